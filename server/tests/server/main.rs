//! A whole server, seen from outside.
#![expect(clippy::unwrap_used, reason = "tests")]

mod common;
mod framing;
mod grpc;
mod native;
mod process;
