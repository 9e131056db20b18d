//! Traces to replay.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidepool_client::workload::Trace;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(trace) = Trace::read(bytes) {
        assert!(trace.facts().distinct <= trace.facts().blocks);
    }
});
