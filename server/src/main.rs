//! Entry point: arguments, telemetry and everything else are the command line's business.

use std::process::ExitCode;

/// Buffers of 1 MiB and more come and go with every value; glibc gives their pages back and faults them in each time.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// What is free goes back to the system within a second, not ten: what grows leaves its old memory behind each time.
#[cfg(feature = "jemalloc")]
#[expect(unsafe_code, reason = "jemalloc looks for this name, and nothing else defines it: jemalloc(3), TUNING")]
#[unsafe(export_name = "malloc_conf")]
#[used]
static ALLOCATOR_SETTINGS: &[u8; 20] = b"dirty_decay_ms:1000\0";

fn main() -> ExitCode {
    tidepool_server::cli::run()
}
