//! The tidepool server: the only place where all crates meet.
//!
//! [`node`] is the service; [`grpc`] and [`admin`] adapt it to their protocols; [`server`] starts and stops everything
//! in one order; [`embedded`] is a node in a client's process; [`cli`] is the command line.

pub mod admin;
pub mod auth;
pub mod cli;
pub mod config;
mod disk;
pub mod embedded;
mod engine;
pub mod error;
pub mod folder;
pub mod grpc;
pub mod node;
mod peers;
mod plan;
mod segment;
pub mod server;
pub mod telemetry;

pub use config::Config;
pub use embedded::Embedded;
pub use error::Error;
pub use server::Server;
