//! What callers give and get.

use std::time::Duration;

use bytes::Bytes;
use tidepool_metadata::{DataType, ObjectKey, proto};

use crate::error::Error;
use crate::session::Items;

/// What an acknowledged put survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// The node's process.
    #[default]
    Memory,
    /// Loss of power too: acknowledged when an NVMe copy is durable.
    Nvme,
}

/// What a put asks for besides its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// What the acknowledged object survives.
    pub durability: Durability,
    /// What the object holds.
    pub data_type: DataType,
    /// Which objects belong together; empty: none. They are leased and evicted as one: who needs all of a group gets them in
    /// one batch, and takes it for missing if one of them is.
    pub group: String,
    /// Replace an existing object instead of answering [`PutOutcome::AlreadyExists`].
    pub upsert: bool,
    /// Pinned from the start.
    pub pin: bool,
    /// For so long, at most 24 h, nodes evict the object after all that have no such pin, and before pinned ones. A hint,
    /// which nodes don't keep over a restart. Zero: not. `None`: for as long as the version was to be that an upsert
    /// replaces, if the node had that one; else not.
    pub soft_pin: Option<Duration>,
    /// How many copies there are to be, on as many nodes, at most 15; 0: as many as the node's setting says.
    pub replicas: u32,
    /// With how many of them the put is acknowledged; 0: one. The rest is made later.
    pub min_replicas: u32,
    /// Nodes that are to have the copies beside that of the node that is asked, before others and in this order, as far as they are
    /// up: each by its number as `tidepool admin nodes` shows it, the address of its gRPC, that without its port, or the label of
    /// its host. Other names name none. At most 16, of at most 256 bytes.
    pub prefer: Vec<String>,
}

impl PutOptions {
    /// For an attempt at a put of `items`.
    pub(crate) fn message(&self, items: Option<&Items>) -> proto::PutOptions {
        proto::PutOptions {
            durability: match self.durability {
                Durability::Memory => proto::Durability::Memory,
                Durability::Nvme => proto::Durability::Nvme,
            } as i32,
            data_type: i32::from(self.data_type as u8),
            group: self.group.clone(),
            upsert: self.upsert,
            pin: self.pin,
            soft_pin_milliseconds: self.soft_pin.map(|pin| u64::try_from(pin.as_millis()).unwrap_or(u64::MAX)),
            replicas: self.replicas,
            min_replicas: self.min_replicas,
            ids: items.map(Items::ids),
            prefer: self.prefer.clone(),
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
    pub log_index: u64,
}

/// Which bytes of an object a get means, and how new they must be. The default is all of them, as new as this client
/// knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GetOptions {
    /// First byte.
    pub offset: u64,
    /// Bytes from there; `None` to the end.
    pub length: Option<u64>,
    /// Ask the leader: linearizable.
    pub fresh: bool,
    /// Rather fail with the reason `UNCONFIRMED` than wait for a leader to be elected, if the node that is asked does not know of
    /// the object.
    pub allow_unconfirmed: bool,
    /// Exactly this version, as [`ObjectInfo::version`] named it, without asking the catalog: what a node serves
    /// while it recovers. Empty: the current one.
    pub version: String,
}

/// The tier that served a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredIn {
    /// Memory.
    Dram,
    /// Disk.
    Nvme,
    /// Something this client does not know.
    Other,
}

/// What precedes an object's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Length of the whole object in bytes.
    pub length: u64,
    /// What it holds.
    pub data_type: DataType,
    /// Its group, or empty.
    pub group: String,
    /// CRC-32 of the whole object; `None` if a range of it was asked for.
    pub checksum: Option<u32>,
    /// Where it was found.
    pub tier: StoredIn,
    /// Which put.
    pub version: String,
}

impl From<proto::ObjectDescription> for ObjectInfo {
    fn from(message: proto::ObjectDescription) -> Self {
        let tier = match message.tier.as_str() {
            "dram" => StoredIn::Dram,
            "nvme" => StoredIn::Nvme,
            _ => StoredIn::Other,
        };
        Self {
            length: message.length,
            data_type: data_type(message.data_type),
            group: message.group,
            checksum: message.checksum,
            tier,
            version: message.version,
        }
    }
}

/// An object, or a range of one; verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// What is known of it.
    pub info: ObjectInfo,
    /// The bytes asked for.
    pub value: Bytes,
}

/// An object of a batch get; verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchObject {
    /// Its bytes.
    pub value: Bytes,
    /// Where they were.
    pub tier: StoredIn,
}

/// One item of a batch get.
#[derive(Debug)]
pub enum BatchGot {
    /// It is there.
    Found(BatchObject),
    /// No such object.
    Missing,
    /// Its copies are on absent nodes, or the node is recovering: not missing.
    Unavailable,
    /// It could not be read.
    Failed(Error),
}

impl BatchGot {
    /// The object, if it is there.
    #[must_use]
    pub fn found(self) -> Option<BatchObject> {
        match self {
            Self::Found(object) => Some(object),
            Self::Missing | Self::Unavailable | Self::Failed(_) => None,
        }
    }
}

/// Whether an object exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existence {
    /// A complete copy is there.
    Present,
    /// There is none.
    Missing,
    /// Nobody knows yet.
    Recovering,
    /// The node that was asked knows of none, and nobody led who could confirm that. Answered only to
    /// [`crate::Client::exists_or_unconfirmed`].
    Unconfirmed,
}

/// How the removal of a key ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoveOutcome {
    /// It is gone.
    Removed,
    /// There was no such object.
    Missing,
    /// It is pinned, and the removal was not forced.
    Pinned,
    /// It could not be removed; it may be still there.
    Failed,
}

/// Which keys a removal means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matching {
    /// Those that start with these bytes.
    Prefix(Vec<u8>),
    /// Those in which this expression matches somewhere (RE2 syntax, no look-around).
    Pattern(String),
    /// All of the tenant.
    All,
}

/// How far a removal by pattern has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoveProgress {
    /// Keys looked at.
    pub examined: u64,
    /// Objects removed.
    pub removed: u64,
    /// Objects left because they are pinned.
    pub pinned: u64,
}

/// One object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: ObjectKey,
    /// Its length in bytes.
    pub length: u64,
    /// What it holds.
    pub data_type: DataType,
    /// Its group, or empty.
    pub group: String,
    /// How often it is pinned.
    pub pins: u32,
    /// How many complete copies it has.
    pub replicas: u32,
}

/// One page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The objects, in key order.
    pub objects: Vec<Listed>,
    /// Gives the next page; empty at the end.
    pub next_page_token: String,
}

/// What the catalog knows of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectStat {
    /// Its length in bytes.
    pub length: u64,
    /// What it holds.
    pub data_type: DataType,
    /// Its group, or empty.
    pub group: String,
    /// How often it is pinned.
    pub pins: u32,
    /// Which put.
    pub version: String,
    /// CRC-32 of each slice.
    pub slice_checksums: Vec<u32>,
    /// Its copies.
    pub replicas: Vec<ReplicaStat>,
    /// The catalog's log index when it was asked.
    pub log_index: u64,
    /// How long a lease on it lasts from now.
    pub lease: Duration,
}

/// One copy of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaStat {
    /// The node that has it.
    pub node: String,
    /// Which copy.
    pub replica: String,
    /// `up`, `suspect`, `absent` or `draining`.
    pub node_state: String,
}

impl From<proto::StatReply> for ObjectStat {
    fn from(message: proto::StatReply) -> Self {
        let replica = |replica: proto::Replica| ReplicaStat {
            node: replica.node,
            replica: replica.replica,
            node_state: replica.node_state,
        };
        Self {
            length: message.length,
            data_type: data_type(message.data_type),
            group: message.group,
            pins: message.pins,
            version: message.version,
            slice_checksums: message.slice_checksums,
            replicas: message.replicas.into_iter().map(replica).collect(),
            log_index: message.log_index,
            lease: Duration::from_millis(message.lease_ms.into()),
        }
    }
}

/// What a server says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    /// Of the program.
    pub version: String,
    /// The node's id.
    pub node: String,
    /// The cluster's id.
    pub cluster: String,
    /// Counts the node's starts.
    pub incarnation: u32,
    /// `leader`, `follower`, `learner` or `none`.
    pub role: String,
    /// How much of the log is applied.
    pub applied_index: u64,
    /// Largest object in bytes.
    pub max_object_bytes: u64,
    /// Largest value of a unary call in bytes.
    pub max_unary_bytes: u32,
    /// `starting`, `hot_keys`, `dram`, `disk`, `serving` or `stopping`.
    pub phase: String,
    /// Objects in the catalog.
    pub objects: u64,
    /// Where the gRPC of nodes listens that take new objects, those first to which this one would give copies; empty while it
    /// does not know.
    pub takers: Vec<String>,
}

impl From<proto::ServerInfoReply> for ServerInfo {
    fn from(message: proto::ServerInfoReply) -> Self {
        Self {
            version: message.version,
            node: message.node,
            cluster: message.cluster,
            incarnation: message.incarnation,
            role: message.role,
            applied_index: message.applied_index,
            max_object_bytes: message.max_object_bytes,
            max_unary_bytes: message.max_unary_bytes,
            phase: message.phase,
            objects: message.objects,
            takers: message.takers,
        }
    }
}

pub(crate) fn data_type(number: i32) -> DataType {
    u8::try_from(number).ok().and_then(DataType::from_number).unwrap_or_default()
}
