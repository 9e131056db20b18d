//! Entry point: arguments, telemetry and everything else are the command line's business.

use std::process::ExitCode;

/// Buffers of 1 MiB and more come and go with every value; glibc gives their pages back and faults them in each time.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    tidepool_server::cli::run()
}
