//! The short form of `tidepool-stress lookups`, which `make drills` runs a hundred times as long.
#![expect(clippy::unwrap_used, reason = "tests")]

use tidepool_stress::lookups::{self, LookupOptions};
use tidepool_stress::node_process::program_beside;

#[test]
fn ten_million_lookups_against_eviction_and_reuse_find_no_wrong_byte() {
    let tidepool = program_beside(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
    let report = lookups::run(&LookupOptions { tidepool, lookups: 10_000_000, readers: 2 }).unwrap();
    assert_eq!(report.wrong, Vec::<String>::new());
    // All memory was used for other objects several times.
    assert!(report.found >= 10_000_000 && report.evicted > 20_000, "the load was real: {report:?}");
    eprintln!("{report:?}");
}
