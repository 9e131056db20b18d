//! How many copies: the replicated log of catalog commands, and the replicas of objects.
//!
//! [`consensus`] replicates a log of opaque commands and applies it to a state machine; [`CatalogHandle`] is the
//! same with the catalog's words, and keeps what the leader knows beside the log: leases. Planning and repair of
//! copies come with the transfer engine.
//!
//! Threads, what is durable when, and settings: `docs/src/consensus.md`.

mod catalog_handle;
pub mod consensus;
pub mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
mod leader;
mod leases;
mod question;
pub mod replicas;

pub use catalog_handle::{CatalogHandle, ForgetName, Forgotten};
pub use consensus::{
    ClusterEpoch, ClusterId, Durability, Formation, Group, GroupConfig, GroupLimits, GroupStatus, Lane, LeaderReads,
    MemberChange, MemberId, Members, Read, Role, Transport,
};
pub use error::{CatalogError, GroupError};
