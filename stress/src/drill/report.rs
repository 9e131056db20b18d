//! What a drill found, as a line and as JSON.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::{Drill, DrillError};
use crate::checker::{Findings, Violation};
use crate::history::{Call, Operation, PutHeard, RemoveHeard};

/// How a drill ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Everything held.
    Passed,
    /// Something did not.
    Failed,
    /// This machine can't.
    Skipped,
}

/// What a drill found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Which drill.
    pub name: &'static str,
    /// Its seed.
    pub seed: u64,
    /// How it ended.
    pub verdict: Verdict,
    /// Why it was skipped, or failed before the history was judged.
    pub why: Option<String>,
    /// What was done, and when.
    pub faults: Vec<String>,
    /// Calls in the history.
    pub operations: usize,
    /// Keys in it.
    pub keys: usize,
    /// Of its calls, writes that were acknowledged.
    pub acknowledged: u64,
    /// Of its calls, writes of which nothing was heard.
    pub unanswered: u64,
    /// The longest time without an acknowledged write.
    pub longest_write_gap: Duration,
    /// What breaks the law.
    pub violations: Vec<Violation>,
    /// Where the nodes' logs are, if the drill failed.
    pub logs: Option<PathBuf>,
}

impl Report {
    fn new(name: &'static str, seed: u64, verdict: Verdict, why: Option<String>) -> Self {
        Self {
            name,
            seed,
            verdict,
            why,
            faults: Vec::new(),
            operations: 0,
            keys: 0,
            acknowledged: 0,
            unanswered: 0,
            longest_write_gap: Duration::ZERO,
            violations: Vec::new(),
            logs: None,
        }
    }

    pub(super) fn skipped(name: &'static str, seed: u64, why: &str) -> Self {
        Self::new(name, seed, Verdict::Skipped, Some(why.to_owned()))
    }

    pub(super) fn failed(name: &'static str, seed: u64, error: &DrillError) -> Self {
        Self::new(name, seed, Verdict::Failed, Some(error.to_string()))
    }

    pub(super) fn passed(name: &'static str, seed: u64) -> Self {
        Self::new(name, seed, Verdict::Passed, None)
    }

    pub(super) fn tell(&mut self, drill: &Drill, history: &[Operation]) {
        self.faults.clone_from(&drill.faults);
        (self.acknowledged, self.unanswered) = (drill.load.acknowledged(), drill.load.failed());
        self.longest_write_gap = longest_write_gap(history);
    }

    pub(super) fn judge(&mut self, findings: Findings) {
        (self.operations, self.keys) = (findings.operations, findings.keys);
        if !findings.violations.is_empty() {
            self.verdict = Verdict::Failed;
        }
        self.violations = findings.violations;
    }
}

fn longest_write_gap(history: &[Operation]) -> Duration {
    let is_write = |operation: &&Operation| match operation.call {
        Call::Put { heard, .. } => heard == PutHeard::Stored,
        Call::Upsert { .. } => true,
        Call::Remove { heard } => heard == RemoveHeard::Removed,
        _ => false,
    };
    let mut writes: Vec<Duration> = history.iter().filter(is_write).filter_map(|write| write.returned).collect();
    writes.sort_unstable();
    writes.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

/// The reports as people read them.
#[must_use]
pub fn table(reports: &[Report]) -> String {
    use std::fmt::Write as _;
    let mut table = format!(
        "{:<27} {:<8} {:>6} {:>9} {:>6} {:>9} {:>10} {:>8} {:>10}\n",
        "drill", "verdict", "faults", "calls", "keys", "acknowl.", "unanswered", "longest", "violations"
    );
    for report in reports {
        let verdict = match report.verdict {
            Verdict::Passed => "passed",
            Verdict::Failed => "FAILED",
            Verdict::Skipped => "skipped",
        };
        let gap = format!("{} ms", report.longest_write_gap.as_millis());
        let Report { name, operations, keys, acknowledged, unanswered, .. } = report;
        let (faults, violations) = (report.faults.len(), report.violations.len());
        // Writing to a string can't fail.
        let _ = writeln!(
            table,
            "{name:<27} {verdict:<8} {faults:>6} {operations:>9} {keys:>6} {acknowledged:>9} {unanswered:>10} {gap:>8} \
             {violations:>10}"
        );
        if let Some(why) = &report.why {
            let _ = writeln!(table, "    {why}");
        }
        for violation in report.violations.iter().take(5) {
            let _ = write!(table, "  {violation}");
        }
        if let Some(logs) = &report.logs {
            let _ = writeln!(table, "    seed {}; logs in {}", report.seed, logs.display());
        }
    }
    table
}
