//! How much memory could be taken now: asked before much of it is reserved, because the kernel says yes to any
//! amount that a file system allows and then ends processes when it runs out.

use std::fs;
use std::path::Path;

/// Bytes that the machine has available, or that a control group of this process still allows, whichever is less.
/// `None` if the system does not say.
///
/// Source: proc_meminfo(5), `MemAvailable`; control groups version 2, `memory.max` and `memory.current`.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    let machine = meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let group = fs::read_to_string("/proc/self/cgroup").ok();
    let group = group.as_deref().and_then(group_path);
    let allowed = group.and_then(|group| allowed_bytes(Path::new("/sys/fs/cgroup"), group));
    Some(machine.min(allowed.unwrap_or(u64::MAX)))
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The path of the process in the one hierarchy of version 2, without the leading `/`.
fn group_path(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// What the tightest of the group and its parents still allows; `None` if none has a limit.
fn allowed_bytes(root: &Path, group: &str) -> Option<u64> {
    let number = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let groups = Path::new(group).ancestors().map(|group| root.join(group));
    let left = groups.filter_map(|group| {
        // A group without a limit says `max`, which is no number.
        let limit = number(&group.join("memory.max"))?;
        Some(limit.saturating_sub(number(&group.join("memory.current")).unwrap_or(0)))
    });
    left.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_says_what_is_available() {
        assert_eq!(meminfo("MemTotal:  100 kB\nMemAvailable:     42 kB\n"), Some(42 << 10));
        assert_eq!(meminfo("MemTotal:  100 kB\n"), None);
        assert!(available_bytes().is_some_and(|bytes| bytes > 0));
    }

    #[test]
    fn the_tightest_group_counts_with_what_it_uses() {
        let root = tempfile::tempdir().expect("temporary folder");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
            fs::write(path, text).expect("writable");
        };
        assert_eq!(allowed_bytes(root.path(), "a/b"), None);
        write("a/b/memory.max", "max\n");
        write("a/memory.max", "1000\n");
        write("a/memory.current", "400\n");
        assert_eq!(allowed_bytes(root.path(), "a/b"), Some(600));
        write("a/b/memory.max", "100\n");
        assert_eq!(allowed_bytes(root.path(), group_path("1:cpu:/x\n0::/a/b\n").expect("version 2")), Some(100));
    }
}
