//! `tidepool doctor`: looks at the machine and says what was found and what follows from it.
//!
//! Changes nothing but a scratch file in the data folder, which it removes. Exit code 1 if something keeps a node from
//! starting or from doing its work; what only makes it slower is a note.

mod disk;
mod machine;
mod segments;
mod topology;

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::failure::{Failure, NO};
use super::output::{Output, Table};
use super::serve::SettingsArguments;

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub(super) struct DoctorArguments {
    #[command(flatten)]
    settings: SettingsArguments,
    /// Leave out what takes time: the disk's speed
    #[arg(long)]
    quick: bool,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// As it should be.
    Good,
    /// A node works, but not as well as it could.
    Note,
    /// A node with these settings does not start, or fails later.
    Bad,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Finding {
    verdict: Verdict,
    what: &'static str,
    found: String,
    follows: String,
}

impl Finding {
    fn new(verdict: Verdict, what: &'static str, found: impl Into<String>, follows: impl Into<String>) -> Self {
        Self { verdict, what, found: found.into(), follows: follows.into() }
    }
}

pub(super) fn run(arguments: &DoctorArguments, output: &Output) -> Result<ExitCode, Failure> {
    let config = arguments.settings.load()?;
    let mut findings = machine::look(&config);
    findings.extend(segments::look(&config));
    findings.extend(topology::look());
    findings.extend(disk::look(&config, arguments.quick));
    let bad = findings.iter().filter(|finding| finding.verdict == Verdict::Bad).count();
    output.answer(&findings, |findings| {
        let mut table = Table::new(&["", "what", "found", "what follows"]);
        for Finding { verdict, what, found, follows } in findings {
            let mark = match verdict {
                Verdict::Good => "ok",
                Verdict::Note => "note",
                Verdict::Bad => "BAD",
            };
            table.row([mark.into(), (*what).into(), found.clone(), follows.clone()]);
        }
        let end = match bad {
            0 => "nothing keeps a node from running here".to_owned(),
            1 => "1 thing keeps a node from running here".to_owned(),
            bad => format!("{bad} things keep a node from running here"),
        };
        format!("{}\n{end}\n", table.render())
    })?;
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::from(NO) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_says_what_was_found_and_what_follows() {
        let data = tempfile::tempdir().expect("a scratch folder");
        let mut config = crate::Config { data: Some(data.path().join("data")), ..crate::Config::default() };
        config.grpc.listen.set_port(0);
        config.admin.listen.set_port(0);
        let mut findings = machine::look(&config);
        findings.extend(segments::look(&config));
        findings.extend(disk::look(&config, true));
        assert!(findings.len() >= 10);
        for finding in &findings {
            assert!(!finding.found.is_empty() && !finding.follows.is_empty(), "{finding:?}");
        }
        assert!(!data.path().join("data").exists(), "the folder was not there before, so it is not there after");
    }

    #[test]
    fn a_port_in_use_is_bad() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let mut config = crate::Config::default();
        config.grpc.listen = listener.local_addr().expect("is bound");
        let findings = machine::look(&config);
        let port = findings.iter().find(|finding| finding.what == "grpc.listen").expect("is looked at");
        assert_eq!(port.verdict, Verdict::Bad);
    }
}
