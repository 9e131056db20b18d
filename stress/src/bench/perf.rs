//! Instructions that a process retires, if the machine lets us count them. Calls `perf` rather than the system call:
//! no unsafe code, and whoever lacks the one usually lacks the other.

use std::process::{Child, Command, Stdio};

use super::Error;

/// Counts one process's instructions until it is asked.
pub(super) struct InstructionCounter(Child);

impl InstructionCounter {
    /// Starts counting, or says why that can't be.
    pub(super) fn start(process: u32) -> Result<Self, String> {
        let probe = Command::new("perf")
            .args(["stat", "-x,", "-e", "instructions:u", "true"])
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("perf can't be run: {error}"))?;
        if parse(&String::from_utf8_lossy(&probe.stderr)).is_none() {
            return Err("this machine has no instruction counter that we may read".into());
        }
        Command::new("perf")
            .args(["stat", "-x,", "-e", "instructions", "-p", &process.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map(Self)
            .map_err(|error| format!("perf can't be run: {error}"))
    }

    /// Ends counting.
    pub(super) fn stop(self) -> Result<f64, Error> {
        // `perf stat` prints when it is interrupted.
        if let Some(id) = i32::try_from(self.0.id()).ok().and_then(rustix::process::Pid::from_raw) {
            rustix::process::kill_process(id, rustix::process::Signal::INT)?;
        }
        let output = self.0.wait_with_output()?;
        parse(&String::from_utf8_lossy(&output.stderr)).ok_or_else(|| "perf printed no count".into())
    }
}

/// The count in perf's comma-separated output.
fn parse(text: &str) -> Option<f64> {
    text.lines().find(|line| line.contains("instructions"))?.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_and_absent_ones_are_not() {
        assert_eq!(parse("1234567,,instructions:u,1000,100.00,,\n"), Some(1_234_567.0));
        assert_eq!(parse("<not supported>,,instructions:u,0,100.00,,\n"), None);
        assert_eq!(parse(""), None);
    }
}
