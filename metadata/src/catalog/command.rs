//! What can be asked of the catalog through the log. Each command is a compare-and-set on version and replica
//! ids, or carries request ids, so that repeats, reorderings and regroupings do no harm.
//!
//! A command is one item of work or a batch of them; the answer has one outcome per item, in order.
//! Encoding: `docs/src/formats/log.md`.

use std::sync::Arc;
use std::time::Duration;

use super::copies::Copies;
use crate::log::{LogIndex, LogTime, Term};
use crate::node::{Incarnation, NodeId, TierKind};
use crate::object::{DataType, Durability, ObjectKey, ReplicaId, TenantId, VersionId};

/// Most items of one command.
pub const MAX_COMMAND_ITEMS: usize = 4096;
/// Longest encoding of one command, in bytes; with the overhead of its entry it stays near Raft's message size.
pub const MAX_COMMAND_BYTES: usize = 256 << 10;
/// Most slices of one object: their checksums (64 KiB) fit a command four times over.
pub const MAX_SLICES: usize = 16 << 10;
/// Most copies of one object.
pub const MAX_REPLICAS: usize = 16;
/// Longest name of a group, in bytes.
pub const MAX_GROUP_BYTES: usize = 256;
/// Longest name of a tenant, and longest address of a node, in bytes.
pub const MAX_NAME_BYTES: usize = 256;
/// Most tiers that one node lends.
pub const MAX_TIERS: usize = 64;

/// One change of the catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A node starts, or says again that it did.
    RegisterNode(NodeRegistration),
    /// The leader's verdict on a node's life, or an operator's wish to drain it. [`super::NodeOutcome`].
    SetNodeState {
        /// Which node.
        node: NodeId,
        /// Applied only in this life of it.
        incarnation: Incarnation,
        /// The new state.
        state: NodeState,
        /// Applied only in an entry of this term: the verdict of a leader that had lost its place, from being frozen for
        /// example, and had heard of nobody meanwhile, is none. `None`: an operator's wish.
        term: Option<Term>,
    },
    /// A node goes for good; refused while copies are listed on it. [`super::NodeOutcome`].
    RemoveNode {
        /// Which node.
        node: NodeId,
        /// Applied only in this life of it.
        incarnation: Incarnation,
    },
    /// As [`Command::RemoveNode`], and no node may have that identity again. [`super::NodeOutcome`].
    ExpelNode {
        /// Which node.
        node: NodeId,
        /// Applied only in this life of it.
        incarnation: Incarnation,
    },
    /// Ends puts: the objects become visible. [`super::CompleteOutcome`].
    Complete(Vec<CompleteItem>),
    /// Gives up sealed replicas whose complete had no answer, so that their nodes may free them.
    /// [`super::AbandonOutcome`].
    Abandon(Vec<AbandonItem>),
    /// Further copies of versions that are current. [`super::AddReplicaOutcome`].
    AddReplicas(Vec<AddReplicaItem>),
    /// Copies that a returning node found and the catalog does not list. [`super::AddReplicaOutcome`].
    Adopt(Vec<AdoptItem>),
    /// The committed end of a returning node's announcement: what it did not find.
    /// [`super::Outcome::Announcement`].
    EndAnnouncement {
        /// Which node.
        node: NodeId,
        /// Its current life.
        incarnation: Incarnation,
        /// Copies of older lives that the node has not found.
        lost: Vec<ReplicaName>,
        /// No more such commands follow: the node's copies count as confirmed from here on.
        last: bool,
    },
    /// Takes copies out of the catalog, all their tiers at once. [`super::ForgetOutcome`].
    Forget {
        /// Whether the last copy may go.
        mode: ForgetMode,
        /// The copies.
        items: Vec<ReplicaName>,
    },
    /// Removes objects: invisible at once, key reusable at once. [`super::RemoveOutcome`].
    Remove(Vec<RemoveItem>),
    /// One more pin on each object. [`super::PinOutcome`].
    Pin(Vec<PinItem>),
    /// One pin fewer on each object. [`super::PinOutcome`].
    Unpin(Vec<PinItem>),
    /// A new tenant. [`super::TenantOutcome`].
    CreateTenant {
        /// Its name, 1 to [`MAX_NAME_BYTES`] bytes.
        name: String,
        /// What it may store.
        quota: Quota,
    },
    /// Hides a tenant at once and removes up to [`MAX_COMMAND_ITEMS`] of its objects: ask again until
    /// [`super::TenantOutcome::Dropped`].
    DropTenant {
        /// Which tenant; not the default one.
        tenant: TenantId,
    },
    /// Changes what a tenant may store; never removes anything.
    SetQuota {
        /// Which tenant.
        tenant: TenantId,
        /// The new quota.
        quota: Quota,
    },
    /// A node freed all that its free list held up to an index.
    Freed {
        /// Which node.
        node: NodeId,
        /// The last index that is done; what the running entry itself dropped stays.
        through: LogIndex,
    },
    /// A client session begins. [`super::SessionOutcome`].
    OpenSession {
        /// Random, chosen by who opens it.
        session: SessionId,
    },
    /// Forgets a session's answers up to a sequence.
    AcknowledgeSession {
        /// Which session.
        session: SessionId,
        /// The client has all answers up to here.
        through: u64,
    },
    /// Drops the sessions whose time is over at the entry's log time.
    ExpireSessions,
    /// Changes something that the whole cluster must agree on.
    SetSetting(Setting),
    /// A copy or a move is to be made. [`super::TaskOutcome`].
    BeginTask(TaskRequest),
    /// How far a task is, or that it is to end. [`super::TaskOutcome`].
    StepTask {
        /// Which task.
        task: TaskId,
        /// What happened.
        step: TaskStep,
    },
}

impl Command {
    /// Whether all that the command tells of is lost with the host's memory: first puts of objects that asked for no more.
    #[must_use]
    pub fn is_volatile(&self) -> bool {
        let is_volatile = |item: &CompleteItem| item.durability == Durability::Memory && !item.upsert && !item.pin;
        matches!(self, Self::Complete(items) if items.iter().all(is_volatile))
    }

    /// Whether the catalog is larger afterwards, by objects, copies or tenants, than what it can be without: on a disk that
    /// is nearly full such commands are refused and all others are taken.
    #[must_use]
    pub fn is_growth(&self) -> bool {
        match self {
            Self::Complete(_) | Self::AddReplicas(_) | Self::Adopt(_) | Self::CreateTenant { .. } => true,
            Self::BeginTask(_) => true,
            Self::RegisterNode(_)
            | Self::SetNodeState { .. }
            | Self::RemoveNode { .. }
            | Self::ExpelNode { .. }
            | Self::Abandon(_)
            | Self::EndAnnouncement { .. }
            | Self::Forget { .. }
            | Self::Remove(_)
            | Self::Pin(_)
            | Self::Unpin(_)
            | Self::DropTenant { .. }
            | Self::SetQuota { .. }
            | Self::Freed { .. }
            | Self::OpenSession { .. }
            | Self::AcknowledgeSession { .. }
            | Self::ExpireSessions
            | Self::SetSetting(_)
            | Self::StepTask { .. } => false,
        }
    }
}

/// What a node says of itself when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRegistration {
    /// Which node.
    pub node: NodeId,
    /// Its life; a lower one than the catalog knows is refused, a higher one ends the older.
    pub incarnation: Incarnation,
    /// Where to reach it.
    pub addresses: NodeAddresses,
    /// What it lends.
    pub tiers: Vec<TierDescription>,
    /// Where it stands.
    pub labels: Labels,
}

/// Where a node stands: domains that fail as one, empty where it does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// The widest domain: a room, a site, an availability zone.
    pub zone: String,
    /// A rack of the zone.
    pub rack: String,
    /// A host of the rack.
    pub host: String,
}

/// Where to reach a node: `host:port` each, empty for what it does not serve.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAddresses {
    /// gRPC.
    pub grpc: String,
    /// The transfer engine.
    pub engine: String,
    /// Admin HTTP.
    pub admin: String,
}

/// One tier that a node lends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierDescription {
    /// Its medium.
    pub kind: TierKind,
    /// Its capacity in bytes.
    pub capacity_bytes: u64,
}

/// A node's life as the cluster agreed on it. That a node missed some heartbeats (*suspect*) is only the leader's view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum NodeState {
    /// Reads and writes.
    Up = 0,
    /// Reads; gets no new copies.
    Draining = 1,
    /// Neither; its copies are kept for its return.
    Absent = 2,
}

/// One put that ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompleteItem {
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: ObjectKey,
    /// Names this put.
    pub version: VersionId,
    /// Length of the object in bytes, at most [`crate::MAX_OBJECT_BYTES`].
    pub length: u64,
    /// Length of all slices but the last in bytes, at least 1.
    pub slice_bytes: u32,
    /// What the object holds.
    pub data_type: DataType,
    /// Its group, 1 to [`MAX_GROUP_BYTES`] bytes.
    pub group: Option<Arc<str>>,
    /// CRC-32 of each slice, in order; [`crate::SliceHeader::slice_count`] of them.
    pub checksums: Vec<u32>,
    /// The sealed copies: 1 to [`MAX_REPLICAS`], on as many nodes.
    pub replicas: Vec<NewReplica>,
    /// How many copies there are to be, and how many of these must still be good when this is applied.
    pub copies: Copies,
    /// What the put asked its copies to survive.
    pub durability: Durability,
    /// Replaces an object that is there, instead of losing to it.
    pub upsert: bool,
    /// Pinned from the start.
    pub pin: bool,
    /// The log time when the put reserved, as the coordinator knew it.
    pub reserved_at: LogTime,
    /// Under which its answer is remembered, so that another attempt at this put is not a second one.
    pub request: Option<RequestId>,
}

/// One sealed copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewReplica {
    /// Which copy.
    pub replica: ReplicaId,
    /// What it survives.
    pub durability: Durability,
}

/// A copy by its full name; says nothing unless the key's object has exactly this copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaName {
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: ObjectKey,
    /// Which copy.
    pub replica: ReplicaId,
}

/// A sealed copy that its node wants to free.
pub type AbandonItem = ReplicaName;

/// A further copy of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddReplicaItem {
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: ObjectKey,
    /// Of which version it is a copy.
    pub version: VersionId,
    /// Which copy.
    pub replica: ReplicaId,
    /// What it survives.
    pub durability: Durability,
    /// The log time when the copy was reserved, as its node knew it.
    pub reserved_at: LogTime,
}

/// A copy that a node found after its return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdoptItem {
    /// The copy; `reserved_at` is when the node asks.
    pub copy: AddReplicaItem,
    /// What the node knows of the object, to create it from. Looked at only while the cluster is rebuilding.
    pub facts: Option<ObjectFacts>,
}

/// What a node knows of an object from its slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectFacts {
    /// Length of the object in bytes.
    pub length: u64,
    /// Length of all slices but the last in bytes.
    pub slice_bytes: u32,
    /// What the object holds.
    pub data_type: DataType,
    /// CRC-32 of each slice.
    pub checksums: Vec<u32>,
    /// The log index of its complete, or 0 if the node never learned it.
    pub commit_index: LogIndex,
}

/// Which copies a [`Command::Forget`] may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ForgetMode {
    /// Only if enough other copies on living nodes remain, decided when applied.
    SurplusOnly = 0,
    /// The last one too: eviction. The object is gone with it.
    EvenLast = 1,
    /// Whatever was promised of the object: its node has lost the copy, by damage or with a disk.
    Lost = 2,
}

/// One object to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoveItem {
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: ObjectKey,
    /// Only this version; `None`: whichever is current.
    pub version: Option<VersionId>,
    /// Even if it is pinned.
    pub force: bool,
    /// Under which its answer is remembered.
    pub request: Option<RequestId>,
}

/// One object to pin or unpin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinItem {
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: ObjectKey,
    /// Under which its answer is remembered.
    pub request: Option<RequestId>,
}

/// A session of one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// One item of one request, end to end: the same over every retry and regrouping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId {
    /// The client's session.
    pub session: SessionId,
    /// Counts the session's items from 1.
    pub sequence: u64,
}

/// What a tenant may store; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Logical bytes times copies.
    pub bytes: Option<u64>,
    /// Objects.
    pub objects: Option<u64>,
}

/// Something that the whole cluster must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// All voters were lost: adopt creates objects, and what is missing is *recovering*.
    Rebuilding(bool),
    /// How long a session lives after its last use: 10 s to 1 day, *default* 10 minutes.
    SessionLifetime(Duration),
    /// What becomes of objects of a type.
    Type {
        /// Which type.
        data_type: DataType,
        /// What becomes of them; the default is what becomes of all.
        policy: TypePolicy,
    },
}

/// What becomes of objects of one type whose puts do not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TypePolicy {
    /// How many copies there are to be, up to [`super::MAX_COPIES`]; 0: as the node says that takes the put.
    pub copies: u8,
    /// Where they lie.
    pub tier: TypeTier,
    /// They are pinned from the start.
    pub pin: bool,
    /// Most bytes of all tenants together, times copies.
    pub quota_bytes: Option<u64>,
}

/// Where objects of a type lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum TypeTier {
    /// In memory, and on disk when they leave it.
    #[default]
    Any = 0,
    /// In memory only: they are forgotten when they leave it.
    Memory = 1,
    /// On disk from the start, as if their puts had asked for that.
    Nvme = 2,
}

/// Names a task: random, chosen by who begins it, so that it may be begun again when the answer was lost. Not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub u64);

/// A copy or a move that is to be made of an object in its current version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskRequest {
    /// Names it.
    pub task: TaskId,
    /// What is to be done.
    pub kind: TaskKind,
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: ObjectKey,
    /// From where: a move takes that copy away, a copy is read there if it can be. `None`: from any holder.
    pub source: Option<NodeId>,
    /// Where copies are to be: 1 to [`MAX_REPLICAS`] nodes, of a move one.
    pub targets: Vec<NodeId>,
}

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TaskKind {
    /// As many copies more as there are targets without one.
    Copy = 0,
    /// As many copies as before, one of them elsewhere.
    Move = 1,
}

/// What becomes of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskStep {
    /// Somebody has begun to make its copies.
    Start,
    /// Look whether it is done, or cannot be any more.
    Settle,
    /// Its copies could not be made, this time or at all.
    Fail(TaskFailure),
    /// It is not wanted any more. A copy that was made goes by repair.
    Cancel,
}

/// Where a task stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// Nobody has begun with it.
    Waiting,
    /// Copies are being made.
    Running,
    /// What was asked for is so.
    Done,
    /// It is not and won't be, for this reason.
    Failed(TaskFailure),
    /// Nobody wants it any more.
    Cancelled,
}

impl TaskState {
    /// Whether something is still to come.
    #[must_use]
    pub fn is_open(self) -> bool {
        matches!(self, Self::Waiting | Self::Running)
    }
}

/// Why a task failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum TaskFailure {
    /// The object was removed, evicted or replaced by another version.
    #[error("the object was removed or replaced")]
    ObjectGone = 0,
    /// The copy that was to be moved is not there any more.
    #[error("the source has no copy any more")]
    SourceGone = 1,
    /// A target is to be emptied and takes no copies.
    #[error("a target is being drained")]
    TargetDraining = 2,
    /// A target is away for longer than nodes are waited for, or gone for good.
    #[error("a target is absent")]
    TargetAbsent = 3,
    /// A target has no room and could make none.
    #[error("a target has no room")]
    NoSpace = 4,
    /// The tenant's quota does not allow another copy.
    #[error("the tenant's quota is exceeded")]
    QuotaExceeded = 5,
    /// A target could not get its copy.
    #[error("a copy could not be made")]
    NotCopied = 6,
    /// The source's copy is the last one that survives what the put asked for.
    #[error("the source's copy is still needed")]
    StillNeeded = 7,
    /// It was not done within [`super::TASK_LIFETIME`].
    #[error("it was not done in time")]
    Expired = 8,
}

impl TaskFailure {
    /// Whether another attempt may succeed.
    #[must_use]
    pub fn may_pass(self) -> bool {
        matches!(self, Self::NoSpace | Self::NotCopied)
    }
}
