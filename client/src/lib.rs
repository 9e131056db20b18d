//! The Rust client of Tidepool: objects in, objects out, over gRPC.
//!
//! ```no_run
//! # async fn example() -> Result<(), tidepool_client::Error> {
//! use tidepool_client::{Client, PutOptions};
//!
//! let client = Client::builder().endpoint("127.0.0.1:7420").connect().await?;
//! client.put("block/17", "bytes".into(), &PutOptions::default()).await?;
//! let object = client.get("block/17").await?.expect("just put");
//! assert_eq!(object.value, "bytes");
//! # Ok(())
//! # }
//! ```
//!
//! - A missing object is an outcome (`None`), not an error; so is a put of a key that exists.
//! - Every read is verified: bytes that don't match their checksum are an error, never returned.
//! - Every call ends by its deadline. Calls that may be repeated are, with growing pauses, where the error says that a
//!   repetition can help ([`Error::kind`]).
//! - `workload` replays recorded traces and simulates caches on them.
//!
//! What this crate is not: it keeps no copies, and it links no part of the server.

mod apart;
mod batch;
mod builder;
mod call;
mod channels;
mod endpoint;
mod error;
mod get;
mod keys;
mod local;
mod native;
mod places;
mod put;
mod recent;
mod retry;
mod session;
mod stripes;
mod tasks;
#[cfg(test)]
mod tests;
mod types;
pub mod wire;
pub mod workload;

/// The generated gRPC stub, for callers that speak the protocol themselves. Messages are in `tidepool_metadata::proto`.
#[expect(unused_qualifications, reason = "generated")]
#[cfg_attr(test, expect(clippy::allow_attributes, reason = "generated"))]
pub mod raw {
    tonic::include_proto!("tidepool.v1");
}

pub use apart::apart;
pub use builder::{ClientBuilder, ClientSettings, OneSidedReads};
pub use call::Client;
pub use endpoint::ServerAddress;
pub use error::{Error, Refusal};
pub use get::ObjectStream;
pub use local::ObjectView;
pub use stripes::Stripes;
pub use tasks::{Task, TaskKind, TaskListing, TaskState};
pub use tidepool_metadata::{DataType, ErrorKind, ObjectKey};
pub use tidepool_transfer::{LendableMemory, Tls, TransferError, withdraw_all};
pub use types::{
    BatchGot, BatchObject, Durability, Existence, GetOptions, Listed, Listing, Matching, Object, ObjectInfo,
    ObjectStat, PutDone, PutOptions, PutOutcome, RemoveOutcome, RemoveProgress, ReplicaStat, ServerInfo, StoredIn,
};
