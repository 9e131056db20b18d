//! Tidepool under the names of the crate `mooncake_store`: a Rust program that is written for that store uses this one by
//! another line in its manifest.
//!
//! ```toml
//! mooncake_store = { package = "tidepool-mooncake-store", path = ".." }
//! ```
//!
//! ```no_run
//! # fn example() -> Result<(), mooncake_store::StoreError> {
//! let store = mooncake_store::MooncakeStore::new()?;
//! store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:7420")?;
//! store.put("block/17", b"bytes", None)?;
//! assert_eq!(store.get("block/17")?, b"bytes");
//! # Ok(())
//! # }
//! ```
//!
//! `master_server_addr` names a node; what a client of the other store lends (segments, devices) is a node's business here
//! and is not looked at. Names, arguments, and the codes of [`StoreError::OperationFailed`] are the other crate's; what differs
//! is said at each call and in the documentation's page on compatible modules. Nothing of the other crate is in this one.
//!
//! Every call waits, may be made by many threads at once, from within a tokio runtime too, and ends by its deadline
//! (`MC_RPC_TIMEOUT_MS`, 30 s). A call from a runtime's thread holds that thread meanwhile, as the other crate's do.

mod code;
pub mod error;
mod memory;
mod setup;
pub mod store;
mod wait;

pub use error::StoreError;
pub use store::{MooncakeStore, ReplicateConfig, SoftPinAction};
