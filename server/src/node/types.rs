//! What callers of the node say and hear, free of any protocol.

use std::sync::Arc;
use std::time::Duration;

use tidepool_metadata::{DataType, LogIndex, ObjectKey, TenantId, VersionId};
use tidepool_transfer::Memory;

use super::RequestIds;

pub use tidepool_metadata::catalog::{KeyFilter, ListedObject, Page as ListPage, Presence as Existence};

/// An object's full name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectName {
    /// Whose it is.
    pub tenant: TenantId,
    /// Its key.
    pub key: ObjectKey,
}

/// What a put asks for besides its bytes.
#[derive(Clone, Debug, Default)]
pub struct PutOptions {
    /// Acknowledge only when an NVMe copy is durable.
    pub durable_on_nvme: bool,
    /// What the object holds.
    pub data_type: DataType,
    /// Which objects belong together, and are leased and evicted as one.
    pub group: Option<Arc<str>>,
    /// Replace an existing object instead of answering `AlreadyExists`.
    pub upsert: bool,
    /// Pinned from the start.
    pub pin: bool,
    /// For how long the object is evicted after others; `None`: as what an upsert replaces.
    pub soft_pin: Option<Duration>,
    /// How many copies there are to be; 0: as many as the node's setting says.
    pub replicas: u32,
    /// With how many the put is acknowledged; 0: one.
    pub min_replicas: u32,
    /// Names of nodes that are to have the further copies before others.
    pub prefer: Arc<[String]>,
    /// Names the objects of the call, so that another attempt at it is not a second put.
    pub ids: Option<RequestIds>,
}

impl PutOptions {
    /// Whether an object that is there already is the answer, before any bytes move. To another attempt it is not: that object
    /// may be the first one's.
    pub(super) fn yields(&self) -> bool {
        !self.upsert && !self.ids.is_some_and(|ids| ids.again)
    }
}

/// One object of a batch put.
#[derive(Clone, Debug)]
pub struct PutItem<'a> {
    /// The object's name.
    pub name: ObjectName,
    /// Its bytes.
    pub value: Value<'a>,
    /// CRC-32 of the value as the caller knows it.
    pub checksum: Option<u32>,
}

/// The bytes of a put: here, or in memory that their owner has lent and may be changing.
#[derive(Clone, Debug)]
pub enum Value<'a> {
    /// Here.
    Bytes(&'a [u8]),
    /// `length` bytes at `offset` of memory of another process.
    Lent {
        /// Mapped here.
        memory: Memory,
        /// First byte.
        offset: u64,
        /// Bytes from there.
        length: u64,
    },
}

impl Value<'_> {
    /// Bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Lent { length, .. } => *length,
        }
    }
}

/// How a put ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The object is visible.
    Stored,
    /// The key had a complete object; nothing was written.
    AlreadyExists,
}

/// The answer to a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutDone {
    /// How it ended.
    pub outcome: PutOutcome,
    /// Log index of the answer.
    pub log_index: LogIndex,
    /// CRC-32 of the stored value; 0 if nothing was stored.
    pub checksum: u32,
}

/// A range of an object; the default is all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RangeRequest {
    /// First byte.
    pub offset: u64,
    /// Bytes from there; `None` to the end. Reaching past the end is an error.
    pub length: Option<u64>,
}

/// How new an answer must be (protocol: freshness).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Freshness {
    /// Linearizable: ask the leader.
    pub fresh: bool,
    /// At least as new as this log index.
    pub seen: LogIndex,
    /// A miss that the leader does not confirm soon is told as such.
    pub allow_unconfirmed: bool,
}

/// What precedes an object's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectDescription {
    /// Length of the whole object in bytes.
    pub object_length: u64,
    /// Length of the range that follows in bytes.
    pub range_length: u64,
    /// What the object holds.
    pub data_type: DataType,
    /// Its group.
    pub group: Option<Arc<str>>,
    /// CRC-32 of the bytes that follow, known beforehand if they are the whole object.
    pub checksum: Option<u32>,
    /// Where it was found: `dram` or `nvme`.
    pub tier: &'static str,
    /// Which put.
    pub version: VersionId,
}

/// How the removal of one key ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoveOutcome {
    /// There was no such object.
    Missing,
    /// It is gone.
    Removed,
    /// It is pinned, and the removal was not forced.
    Pinned,
}

/// One step of a removal by pattern.
#[derive(Clone, Debug, Default)]
pub struct MatchPage {
    /// Keys looked at.
    pub examined: u64,
    /// Objects removed.
    pub removed: u64,
    /// Objects left because they are pinned.
    pub pinned: u64,
    /// Where the next step starts (exclusive); `None` at the end.
    pub next: Option<ObjectKey>,
    /// Log index of the last removal.
    pub log_index: LogIndex,
}

/// What the catalog knows of one object.
#[derive(Clone, Debug)]
pub struct ObjectStat {
    /// As in a listing.
    pub listed: ListedObject,
    /// Which put.
    pub version: VersionId,
    /// CRC-32 of each slice.
    pub slice_checksums: Vec<u32>,
    /// Its copies.
    pub replicas: Vec<ReplicaStat>,
    /// The catalog's log index when it was asked.
    pub log_index: LogIndex,
    /// How long a lease on it lasts, in milliseconds.
    pub lease_ms: u32,
}

/// One copy of an object.
#[derive(Clone, Debug)]
pub struct ReplicaStat {
    /// Which copy.
    pub replica: tidepool_metadata::ReplicaId,
    /// State of its node: `up`, `suspect`, `absent`, `draining`.
    pub node_state: &'static str,
}
