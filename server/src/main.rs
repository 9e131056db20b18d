//! Entry point: arguments, telemetry and everything else are the command line's business.

use std::process::ExitCode;

fn main() -> ExitCode {
    tidepool_server::cli::run()
}
