//! The Rust client of Tidepool.

pub mod workload;
