//! A whole server, seen from outside.
#![expect(clippy::unwrap_used, reason = "tests")]

mod common;
mod disk;
mod embedded;
mod framing;
mod grpc;
mod load;
mod native;
mod pressure;
mod process;
mod races;
mod rdma;
mod starts;
mod tenants;
mod tls;
mod types;
