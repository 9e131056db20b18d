//! Frames between transfer engines.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidepool_transfer::fuzzing::frame(bytes));
