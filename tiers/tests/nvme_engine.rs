//! Machines where io_uring can't be used (B083): the tier starts on blocking I/O with one clear warning.
//!
//! System calls are refused by a seccomp filter on the test's own thread, as a container's profile does. Each test
//! runs in a process of its own under nextest; under plain `cargo test` the filter stays with its thread.
#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(unsafe_code, reason = "installs a seccomp filter and lowers a limit")]

mod nvme_support;

use nvme_support::*;
use tidepool_tiers::io::{EngineChoice, EngineKind};
use tidepool_tiers::nvme::{NvmeConfig, NvmeTier};

fn config(folder: &tempfile::TempDir) -> NvmeConfig {
    NvmeConfig { region_bytes: 1 << 20, ..NvmeConfig::new(folder.path(), 17 << 20) }
}

/// Makes `io_uring_setup` fail with `errno` on this thread and those that it starts.
fn refuse_io_uring(errno: i32) {
    let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let filter = [
        // Load the number of the system call.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_io_uring_setup as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: plain flags; affects this thread only and can't be undone, which the thread's end does.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: `program` and the filter it points to live through the call, which copies them.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) }, 0);
}

/// Opens a tier here, expects blocking I/O and one warning that says so, and uses it.
fn expect_blocking() {
    let folder = tempfile::tempdir().unwrap();
    let warnings = Warnings::default();
    let tier = tracing::subscriber::with_default(warnings.clone(), || NvmeTier::open(config(&folder), NODE)).unwrap();
    assert_eq!(tier.engine(), EngineKind::Blocking);
    let warnings = warnings.0.lock().clone();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("io_uring") && warnings[0].contains("blocking"), "{warnings:?}");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let slice = store(&tier, 1, 200_000).await;
        assert_readable(&tier, &slice).await;
        tier.close().await.unwrap();
    });
    drop(tier);
    let explicit = NvmeConfig { engine: EngineChoice::IoUring, ..config(&folder) };
    assert!(NvmeTier::open(explicit, NODE).is_err(), "io_uring was demanded and can't be had");
}

#[test]
fn io_uring_refused_with_eperm_falls_back_to_blocking() {
    std::thread::spawn(|| {
        refuse_io_uring(libc::EPERM);
        expect_blocking();
    })
    .join()
    .unwrap();
}

#[test]
fn io_uring_missing_with_enosys_falls_back_to_blocking() {
    std::thread::spawn(|| {
        refuse_io_uring(libc::ENOSYS);
        expect_blocking();
    })
    .join()
    .unwrap();
}

#[test]
fn io_uring_out_of_memory_falls_back_to_blocking() {
    std::thread::spawn(|| {
        refuse_io_uring(libc::ENOMEM);
        expect_blocking();
    })
    .join()
    .unwrap();
}

/// Needs a process of its own, since the limit and the user are the process's.
#[test]
fn memlock_of_64_kib_falls_back_to_blocking() {
    const CHILD: &str = "TIDEPOOL_TEST_MEMLOCK_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let name = "memlock_of_64_kib_falls_back_to_blocking";
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let limit = libc::rlimit { rlim_cur: 64 << 10, rlim_max: 64 << 10 };
    // SAFETY: plain values.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
    // Root is exempt from the limit; the group and user stay changed, which the process's end undoes.
    // SAFETY: no pointers.
    if unsafe { libc::geteuid() } == 0 {
        // SAFETY: no pointers; this process has no other threads that care.
        assert_eq!(unsafe { libc::setgid(65534) } | unsafe { libc::setuid(65534) }, 0);
    }
    expect_blocking();
}
