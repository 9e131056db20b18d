//! Segments on hugetlbfs, where the machine gives huge pages (needs root; else skipped).
#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;
use std::process::Command;

use memory_support::{bytes_of, put};
use tempfile::TempDir;
use tidepool_metadata::{Incarnation, NodeId};
use tidepool_tiers::memory::{MemoryConfig, MemoryError, MemoryTier};

mod memory_support;

const HUGE_PAGE: u64 = 2 << 20;
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Huge pages of this test's own, and a hugetlbfs of them; both are given back at its end.
struct HugePages {
    mount: TempDir,
    before: u64,
}

impl HugePages {
    /// `None`, said on standard error, where there is none to be had.
    fn take(count: u64) -> Option<Self> {
        let (before, free) = (pool("nr_hugepages"), pool("free_hugepages"));
        let (Some(before), Some(free)) = (before, free) else {
            eprintln!("skipped: needs hugetlb");
            return None;
        };
        let pages = Self { mount: tempfile::tempdir().unwrap(), before };
        // Pages that nobody has might be promised to somebody.
        let asked = fs::write(format!("{POOL}/nr_hugepages"), (before + count).to_string());
        if asked.is_err() || pool("free_hugepages").unwrap_or(0) < free + count {
            eprintln!("skipped: needs root and {count} huge pages of memory in one piece each");
            return None;
        }
        let options = format!("pagesize=2M,size={}", count * HUGE_PAGE);
        let arguments = ["-t", "hugetlbfs", "-o", &options, "tidepool-test"];
        let mounted = Command::new("mount").args(arguments).arg(pages.mount.path()).status();
        if !mounted.is_ok_and(|status| status.success()) {
            eprintln!("skipped: needs root to mount");
            return None;
        }
        Some(pages)
    }

    fn path(&self) -> &Path {
        self.mount.path()
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _not_mounted = Command::new("umount").arg(self.mount.path()).status();
        let _not_root = fs::write(format!("{POOL}/nr_hugepages"), self.before.to_string());
    }
}

fn pool(number: &str) -> Option<u64> {
    fs::read_to_string(format!("{POOL}/{number}")).ok()?.trim().parse().ok()
}

fn config(folder: Option<&Path>, name: &str, capacity_bytes: u64) -> MemoryConfig {
    MemoryConfig {
        folder: folder.map(Path::to_owned),
        name: name.into(),
        owner: None,
        capacity_bytes,
        survive_restart: true,
        node: NodeId(5),
        incarnation: Incarnation(1),
    }
}

/// One test, since huge pages are the machine's.
#[test]
fn a_segment_on_hugetlbfs_is_found_by_itself_and_comes_back_and_too_few_pages_are_an_error() {
    let Some(pages) = HugePages::take(24) else { return };
    let name = format!("tidepool-test-{}", std::process::id());
    // No folder is named: the hugetlbfs has room, so it is taken.
    let (tier, _) = MemoryTier::open(&config(None, &name, 24 << 20)).unwrap();
    assert!(pages.path().join(&name).exists(), "the segment is not on hugetlbfs");
    let lengths = [0, 1, 4096, 70_000, (2 << 20) - 1, (4 << 20) + 5];
    let slices: Vec<_> = lengths.iter().zip(1..).map(|(&length, number)| put(&tier, number, length)).collect();
    assert!(slices.iter().all(Option::is_some));
    // Filled to the last page: what is not backed by memory would kill this process here.
    let filler: Vec<_> = (100..).map_while(|number| put(&tier, number, 64 << 10)).collect();
    assert!(filler.len() > 200, "{}", filler.len());
    drop(filler);
    tier.close(true);
    drop((slices, tier));

    let (tier, found) = MemoryTier::open(&config(None, &name, 24 << 20)).unwrap();
    let mut returned = 0;
    for slice in found {
        let slice = slice.verify().expect("whole");
        let header = slice.header();
        let number = header.version.sequence as usize;
        let mut bytes = vec![0; header.slice_length as usize];
        slice.copy_to(0..header.slice_length, &mut bytes).unwrap();
        assert_eq!(bytes, bytes_of(number as u64, lengths[number - 1]));
        returned += 1;
    }
    assert_eq!(returned, lengths.len());
    drop(tier);

    fs::remove_file(pages.path().join(&name)).unwrap();
    // More than there are pages for, of data or of directory: an error that says so, and no file left.
    for capacity in [64 << 20, 44 << 20] {
        let error = MemoryTier::open(&config(Some(pages.path()), "too-large", capacity)).err();
        assert!(matches!(error, Some(MemoryError::NoRoom { .. })), "{capacity}: {error:?}");
        assert!(!pages.path().join("too-large").exists());
    }
}
