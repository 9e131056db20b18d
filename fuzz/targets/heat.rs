//! The heat list of the last life.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidepool_tiers::store::decode_heat_list(bytes));
