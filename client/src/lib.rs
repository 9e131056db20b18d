//! The Rust client of Tidepool.
