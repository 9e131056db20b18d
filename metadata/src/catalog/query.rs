//! What can be read of the catalog, and the answers. Reads change nothing; all answers are in a stated order and bounded.

use std::sync::Arc;

use super::KeyBucket;
use super::command::{
    Labels, NodeAddresses, NodeState, Quota, Setting, TaskId, TaskRequest, TaskState, TierDescription,
};
use super::copies::Copies;
use crate::log::{LogIndex, LogTime};
use crate::node::{Incarnation, NodeId};
use crate::object::{DataType, Durability, ObjectKey, ReplicaId, TenantId, VersionId};

/// Most items of one page; a larger limit means this one.
pub const MAX_PAGE_ITEMS: usize = 10_000;

/// One question.
#[derive(Clone, Debug)]
pub enum Query {
    /// Where the copies of objects are: [`Answer::Located`].
    Locate {
        /// Whose.
        tenant: TenantId,
        /// Which.
        keys: Vec<ObjectKey>,
    },
    /// Whether objects can be read: [`Answer::Presence`].
    Exists {
        /// Whose.
        tenant: TenantId,
        /// Which.
        keys: Vec<ObjectKey>,
    },
    /// A page of a tenant's objects in key order: [`Answer::Page`].
    List {
        /// Whose.
        tenant: TenantId,
        /// Only keys that start so.
        prefix: Vec<u8>,
        /// Only keys behind this one.
        after: Option<ObjectKey>,
        /// Most objects of the page, 1 to [`MAX_PAGE_ITEMS`].
        limit: usize,
        /// Only objects that hold this.
        data_type: Option<DataType>,
    },
    /// A step through the keys that match, in key order: [`Answer::Matches`].
    Matching {
        /// Whose.
        tenant: TenantId,
        /// Which.
        filter: KeyFilter,
        /// Only keys behind this one.
        after: Option<ObjectKey>,
        /// Most keys to look at, 1 to [`MAX_PAGE_ITEMS`].
        limit: usize,
    },
    /// All that is known of one object: [`Answer::Stat`].
    Stat {
        /// Whose.
        tenant: TenantId,
        /// Which.
        key: ObjectKey,
    },
    /// The members of a group in key order: [`Answer::Group`].
    Group {
        /// Whose.
        tenant: TenantId,
        /// Which.
        group: Arc<str>,
    },
    /// What a node is to free: [`Answer::FreeList`].
    FreeList {
        /// Which node.
        node: NodeId,
        /// Only entries behind this index.
        after: LogIndex,
        /// About how many: an index is never cut in two.
        limit: usize,
    },
    /// One digest per key bucket of a node's copies, [`super::KEY_BUCKETS`] of them: [`Answer::Digests`].
    Digests {
        /// Which node.
        node: NodeId,
    },
    /// A page of a node's copies in one key bucket, by tenant and key: [`Answer::Bucket`]. Costs a walk of the bucket.
    Bucket {
        /// Which node.
        node: NodeId,
        /// Which bucket.
        bucket: KeyBucket,
        /// Only those behind this one.
        after: Option<(TenantId, ObjectKey)>,
        /// Most copies of the page, 1 to [`MAX_PAGE_ITEMS`].
        limit: usize,
    },
    /// All nodes by id: [`Answer::Nodes`].
    Nodes,
    /// Whether the node was removed for good: [`Answer::Expelled`].
    Expelled {
        /// Which node.
        node: NodeId,
    },
    /// All tenants by id: [`Answer::Tenants`].
    Tenants,
    /// One task: [`Answer::Task`].
    Task {
        /// Which.
        task: TaskId,
    },
    /// The tasks that are not finished, those that began first in front: [`Answer::Tasks`].
    OpenTasks {
        /// Most of them.
        limit: usize,
    },
    /// A page of tasks by id: [`Answer::Tasks`].
    Tasks {
        /// Only of this tenant.
        tenant: Option<TenantId>,
        /// Only those behind this one.
        after: Option<TaskId>,
        /// Most tasks of the page, 1 to [`MAX_PAGE_ITEMS`].
        limit: usize,
    },
    /// How much of everything there is: [`Answer::Counts`].
    Counts,
}

/// Which keys a [`Query::Matching`] means.
#[derive(Clone, Debug)]
pub enum KeyFilter {
    /// Those that start with these bytes.
    Prefix(Vec<u8>),
    /// Those in which this expression matches somewhere.
    Pattern(regex::bytes::Regex),
    /// All of the tenant.
    All,
}

/// The answer to a [`Query`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// One per key, in request order.
    Located(Vec<Located>),
    /// One per key, in request order.
    Presence(Vec<Presence>),
    /// Objects in key order.
    Page(Page),
    /// Matching objects in key order.
    Matches(Matches),
    /// The object, if there is one.
    Stat(Option<ObjectStat>),
    /// Members in key order, at most [`MAX_PAGE_ITEMS`].
    Group(Vec<GroupMember>),
    /// Entries by index.
    FreeList(FreeListPage),
    /// By bucket number; empty if there is no such node.
    Digests(Vec<u64>),
    /// Whether it was.
    Expelled(bool),
    /// By tenant and key.
    Bucket(BucketPage),
    /// By id.
    Nodes(Vec<NodeStat>),
    /// By id.
    Tenants(Vec<TenantStat>),
    /// The task, if it is known.
    Task(Option<TaskStat>),
    /// By id, or by when they began.
    Tasks(TaskPage),
    /// Totals.
    Counts(Counts),
}

/// Whether an object can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// No such object.
    Missing,
    /// At least one copy is on a node that reads, and confirmed in that node's life.
    Present,
    /// It may be there: its nodes are still announcing what they have, or the cluster is being rebuilt.
    Recovering,
    /// All copies are on absent nodes.
    Unavailable,
}

/// Where one object is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Located {
    /// No such object.
    Missing,
    /// Not known, because the cluster is being rebuilt.
    Recovering,
    /// It is there; whether it can be read is said by its copies ([`ObjectLocation::presence`]).
    Found(Box<ObjectLocation>),
}

/// What a reader needs of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectLocation {
    /// The current version.
    pub version: VersionId,
    /// Log index of its complete.
    pub commit_index: LogIndex,
    /// Length of the object in bytes.
    pub length: u64,
    /// Length of all slices but the last in bytes.
    pub slice_bytes: u32,
    /// What the object holds.
    pub data_type: DataType,
    /// CRC-32 of each slice.
    pub checksums: Vec<u32>,
    /// Its group.
    pub group: Option<Arc<str>>,
    /// Whether it can be read.
    pub presence: Presence,
    /// How many copies there are to be.
    pub copies: Copies,
    /// Its copies, by id.
    pub replicas: Vec<ReplicaLocation>,
}

/// One copy of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaLocation {
    /// Which copy; its node is in it.
    pub replica: ReplicaId,
    /// What it survives.
    pub durability: Durability,
    /// Whether its node reads.
    pub node_state: NodeState,
    /// Whether its node has confirmed it in its present life.
    pub confirmed: bool,
}

/// One page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The objects.
    pub objects: Vec<ListedObject>,
    /// Where the next page starts (exclusive); `None` at the end.
    pub next: Option<ObjectKey>,
}

/// One object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Its key.
    pub key: ObjectKey,
    /// The current version.
    pub version: VersionId,
    /// Its length in bytes.
    pub length: u64,
    /// What it holds.
    pub data_type: DataType,
    /// Its group.
    pub group: Option<Arc<str>>,
    /// How often it is pinned.
    pub pins: u32,
    /// How many copies it has.
    pub replicas: u32,
}

/// One step through the keys that match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matches {
    /// Keys looked at.
    pub examined: u64,
    /// Those that match: name the version in a [`super::RemoveItem`] to remove only what was seen.
    pub objects: Vec<MatchedObject>,
    /// Where the next step starts (exclusive); `None` at the end.
    pub next: Option<ObjectKey>,
}

/// One key that matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchedObject {
    /// The key.
    pub key: ObjectKey,
    /// The current version.
    pub version: VersionId,
    /// How often it is pinned.
    pub pins: u32,
}

/// All that is known of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectStat {
    /// As in a listing.
    pub listed: ListedObject,
    /// As a reader sees it.
    pub location: ObjectLocation,
    /// What its put asked its copies to survive.
    pub durability: Durability,
    /// How many copies it needs.
    pub copies: Copies,
}

/// One member of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMember {
    /// Its key.
    pub key: ObjectKey,
    /// Its current version.
    pub version: VersionId,
    /// Whether it can be read.
    pub presence: Presence,
}

/// What a node is to free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreeListPage {
    /// By index; all of an index or none.
    pub items: Vec<FreeItem>,
    /// More entries follow behind the last index.
    pub more: bool,
}

/// One copy that the leader dropped and its node still has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeItem {
    /// The entry that dropped it.
    pub index: LogIndex,
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: ObjectKey,
    /// Which copy.
    pub replica: ReplicaId,
}

/// One page of the copies on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketPage {
    /// The copies.
    pub replicas: Vec<HeldReplica>,
    /// Where the next page starts (exclusive); `None` at the end.
    pub next: Option<(TenantId, ObjectKey)>,
}

/// One copy on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldReplica {
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: ObjectKey,
    /// The object's current version.
    pub version: VersionId,
    /// Log index of its complete.
    pub commit_index: LogIndex,
    /// Which copy.
    pub replica: ReplicaId,
}

/// What is known of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeStat {
    /// Which.
    pub node: NodeId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Its state.
    pub state: NodeState,
    /// It returned and has not yet said all that it has.
    pub announcing: bool,
    /// Where to reach it.
    pub addresses: NodeAddresses,
    /// What it lends.
    pub tiers: Vec<TierDescription>,
    /// Where it stands.
    pub labels: Labels,
    /// How many copies it has.
    pub replicas: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How many copies it is to free.
    pub free_list: u64,
}

/// Objects and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Objects.
    pub objects: u64,
    /// Logical bytes times copies.
    pub bytes: u64,
}

impl Room {
    /// No bound.
    pub const UNLIMITED: Self = Self { objects: u64::MAX, bytes: u64::MAX };
}

/// What a tenant may store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaRoom {
    /// In all; [`Room::UNLIMITED`] if it has no quota.
    pub whole: Room,
    /// Beyond what it has.
    pub left: Room,
}

/// What is known of one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantStat {
    /// Its number.
    pub tenant: TenantId,
    /// Its name; the default tenant's is empty.
    pub name: String,
    /// What it may store.
    pub quota: Quota,
    /// How many objects it has.
    pub objects: u64,
    /// Their bytes times copies.
    pub bytes: u64,
    /// It is hidden and its objects are being removed.
    pub dropping: bool,
}

/// One page of tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskPage {
    /// The tasks.
    pub tasks: Vec<TaskStat>,
    /// Where the next page starts (exclusive); `None` at the end.
    pub next: Option<TaskId>,
}

/// What is known of one task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskStat {
    /// What was asked for.
    pub request: TaskRequest,
    /// Of which version.
    pub version: VersionId,
    /// Length of the object in bytes.
    pub length: u64,
    /// Where it stands.
    pub state: TaskState,
    /// How many of the targets have copies that count; 0 of a task that failed or was cancelled.
    pub copied: usize,
    /// How often copies could not be made.
    pub failures: u8,
    /// When it began.
    pub begun_at: LogTime,
    /// When its state, or its count of failures, changed last.
    pub changed_at: LogTime,
}

/// How much of everything there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Index of the last entry applied.
    pub applied: LogIndex,
    /// Log time of that entry.
    pub time: LogTime,
    /// Objects of all tenants.
    pub objects: u64,
    /// Copies of all objects.
    pub replicas: u64,
    /// Bytes of all copies.
    pub bytes: u64,
    /// Nodes.
    pub nodes: u64,
    /// Tenants.
    pub tenants: u64,
    /// Open sessions.
    pub sessions: u64,
    /// Answers remembered for them.
    pub remembered: u64,
    /// Ids of copies that may not become visible any more.
    pub retired: u64,
    /// All settings.
    pub settings: Vec<Setting>,
}
