//! Two short drills; `make drills` runs all of them, longer.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use tidepool_stress::cluster::program;
use tidepool_stress::drill::{self, DrillOptions, SCENARIOS, Verdict};

fn run(name: &str) {
    let scenario = SCENARIOS.iter().find(|scenario| scenario.name == name).unwrap();
    let tidepool = program(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
    let report = drill::run(scenario, &DrillOptions { duration: Duration::from_secs(3), seed: 7, tidepool });
    match report.verdict {
        Verdict::Passed => assert!(!report.faults.is_empty() && report.operations > 100, "{report:?}"),
        Verdict::Failed => panic!("{}{:#?}", drill::table(std::slice::from_ref(&report)), report.faults),
        Verdict::Skipped => eprintln!("skipped: {}", report.why.unwrap_or_default()),
    }
}

#[test]
fn a_killed_leader_costs_nothing_that_clients_heard_of() {
    run("leader-kill");
}

#[test]
fn a_leader_that_only_clients_can_reach_tells_them_nothing_old() {
    run("leader-cut-from-followers");
}
