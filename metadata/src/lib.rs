//! What the store knows: the vocabulary of objects, replicas, nodes and tenants, the catalog as a
//! deterministic state machine, the layout of the shared DRAM directory, and the protocol's messages.
//!
//! This crate never waits, never asks the time and does no I/O: instants and random numbers are arguments.

pub mod catalog;
pub mod checksum;
pub mod directory;
pub mod envelope;
pub mod error;
pub mod framing;
pub mod lease;
pub mod log;
pub mod node;
pub mod object;
pub mod proto;
pub mod slice;

pub use checksum::{CHUNK_BYTES, ChunkChecksums};
pub use error::{ErrorKind, KeyError};
pub use log::{LogIndex, LogTime, Term};
pub use node::{Incarnation, NodeId, TierKind};
pub use object::{
    DATA_TYPES, DataType, Durability, KeyHash, MAX_KEY_BYTES, MAX_OBJECT_BYTES, ObjectKey, ReplicaId, TenantId,
    VersionId,
};
pub use slice::{DEFAULT_SLICE_BYTES, SliceHeader};
