//! What voters send each other, and entries of the log.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidepool_replication::fuzzing::message(bytes));
