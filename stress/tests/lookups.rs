//! The short form of `tidepool-stress lookups`, which `make drills` runs a thousand times as long. Ten million lookups of the
//! same code, without a node around it, are among the client's own tests.
#![expect(clippy::unwrap_used, reason = "tests")]

use tidepool_stress::lookups::{self, LookupOptions};
use tidepool_stress::node_process::program_beside;

#[test]
fn a_million_lookups_against_eviction_and_reuse_find_no_wrong_byte() {
    let tidepool = program_beside(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
    let report = lookups::run(&LookupOptions { tidepool, lookups: 1_000_000, readers: 2 }).unwrap();
    assert_eq!(report.wrong, Vec::<String>::new());
    // All memory was used for other objects several times.
    assert!(report.found >= 1_000_000 && report.evicted > 4_000, "the load was real: {report:?}");
    eprintln!("{report:?}");
}
