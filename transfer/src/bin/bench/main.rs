//! `tidepool-transfer-bench`: what the transfer engine reaches between two processes, beside what the machine can do.
//!
//! `target` registers memory, or a file, and serves it; `initiator` moves blocks and prints a line of JSON; `pairs` starts a target of
//! its own and measures every figure in turn with its limit (a bare socket, iperf3, memcpy), interleaved; `soak` looks for
//! what grows.

mod arguments;
mod initiator;
mod limits;
mod pairs;
mod soak;
mod target;

use std::process::ExitCode;

const USAGE: &str = "\
usage: tidepool-transfer-bench target    [--listen HOST:PORT,..] [--bytes N] [--file PATH] [--devices NAME,..]
       tidepool-transfer-bench initiator --peer HOST:PORT [--transport shm|file|rdma|tcp] [--direction read|write]
                                         [--block N] [--batch N] [--threads N] [--seconds S] [--verify]
                                         [--devices NAME,..] [--completion event|poll] [--piece N]
       tidepool-transfer-bench pairs     [--figure NAME] [--pairs N] [--seconds S]
       tidepool-transfer-bench soak      [--requests N]

Sizes take the suffixes K, M and G. `target` prints its address and serves until its standard input ends;
with --file it makes that file anew and registers it instead of memory.";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let done = match command.as_str() {
        "target" => arguments::Arguments::parse(arguments).and_then(|arguments| target::run(&arguments)),
        "initiator" => arguments::Arguments::parse(arguments).and_then(|arguments| initiator::run(&arguments)),
        "soak" => arguments::Arguments::parse(arguments).and_then(|arguments| soak::run(&arguments)),
        "pairs" => arguments::Arguments::parse(arguments).and_then(|arguments| pairs::run(&arguments)),
        "limit-server" => limits::serve(),
        _ => Err(USAGE.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Whatever ends the bench.
type Error = Box<dyn std::error::Error + Send + Sync>;
