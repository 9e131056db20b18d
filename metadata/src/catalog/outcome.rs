//! How commands end. What is expected is an outcome, never an error; each has one per item, in order.

use super::command::{Setting, TaskState};
use crate::log::LogIndex;
use crate::node::Incarnation;
use crate::object::{TenantId, VersionId};

/// The answer to a [`super::Command`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Of `RegisterNode`, `SetNodeState`, `RemoveNode`, `ExpelNode` and `Freed`.
    Node(NodeOutcome),
    /// Of `Complete`.
    Complete(Vec<CompleteOutcome>),
    /// Of `Abandon`.
    Abandon(Vec<AbandonOutcome>),
    /// Of `AddReplicas` and `Adopt`.
    AddReplicas(Vec<AddReplicaOutcome>),
    /// Of `EndAnnouncement`.
    Announcement {
        /// Unless accepted, nothing changed.
        node: NodeOutcome,
        /// One per item that was lost; of a later life than the old ones is `Unknown`.
        lost: Vec<ForgetOutcome>,
    },
    /// Of `Forget`.
    Forget(Vec<ForgetOutcome>),
    /// Of `Remove`.
    Remove(Vec<RemoveOutcome>),
    /// Of `Pin` and `Unpin`.
    Pin(Vec<PinOutcome>),
    /// Of `CreateTenant`, `DropTenant` and `SetQuota`.
    Tenant(TenantOutcome),
    /// Of `OpenSession`, `AcknowledgeSession` and `ExpireSessions`.
    Session(SessionOutcome),
    /// Of `SetSetting`: the setting as it is now. One out of bounds changes nothing.
    Setting(Setting),
    /// Of `BeginTask` and `StepTask`.
    Task(TaskOutcome),
}

/// How a command on a node ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeOutcome {
    /// Done, or already so.
    Accepted {
        /// Copies of older lives are listed: the node must announce what it has, then end the announcement.
        announce: bool,
    },
    /// The catalog knows a later life of the node: this one is over and must stop.
    Stale {
        /// That later life.
        current: Incarnation,
    },
    /// No such node.
    Unknown,
    /// The verdict of a leader that was none any more when this was logged.
    OutOfTerm,
    /// The catalog has as many nodes as it takes.
    TooMany,
    /// An operator removed the node for good: whoever has that identity must stop.
    Expelled,
    /// Copies are listed on the node: it stays until they are forgotten.
    Holds {
        /// How many.
        replicas: u64,
    },
}

/// How a put ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompleteOutcome {
    /// The object is visible under this version. Also the answer to every repeat while it is current.
    Completed {
        /// How many copies were taken; the rest had been abandoned, or belong to an ended life, and may be freed.
        replicas: u8,
    },
    /// Another version came first and can be read; all copies of this one may be freed.
    AlreadyExists {
        /// The one that is current.
        version: VersionId,
    },
    /// Nothing changed; all copies may be freed.
    Refused(Refusal),
    /// Another attempt at the same put came before; all copies of this one may be freed.
    Repeated {
        /// It became visible then, whatever came of it since; false: it lost to an object that was there.
        stored: bool,
    },
    /// Its request id was refused: nothing changed, and all copies may be freed.
    NotExecuted(RequestRefusal),
}

/// Why the catalog refused a copy or a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Refusal {
    /// No such tenant, or it is being dropped.
    #[error("unknown tenant")]
    UnknownTenant = 0,
    /// Lengths, slices, checksums or copies contradict each other or their bounds.
    #[error("malformed description of an object")]
    Malformed = 1,
    /// Reserved too long ago (or in the future), so that an earlier answer to it may be forgotten.
    #[error("the reservation is too old")]
    ReservationExpired = 2,
    /// Too few copies are good: abandoned, dropped before, of an ended life, or on absent nodes.
    #[error("too few good replicas")]
    TooFewReplicas = 3,
    /// The tenant's quota does not allow it.
    #[error("the tenant's quota is exceeded")]
    QuotaExceeded = 4,
    /// The catalog has as many objects as it takes.
    #[error("the catalog is full")]
    CatalogFull = 5,
    /// The version is not the current one of its key.
    #[error("no such version of the object")]
    NoSuchVersion = 6,
    /// This copy was abandoned or dropped before.
    #[error("the replica was abandoned")]
    Abandoned = 7,
    /// The copy's node is unknown, or it is in a later life.
    #[error("the replica's node is in a later life or unknown")]
    StaleNode = 8,
    /// The node has another copy of this version, or the object has all the copies it may have.
    #[error("the object has a replica on that node, or too many")]
    TooManyReplicas = 9,
}

/// How giving up a copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbandonOutcome {
    /// It will never become visible: free it.
    Abandoned,
    /// It is visible as a copy of this version: keep it.
    Completed {
        /// The object's current version.
        version: VersionId,
        /// Log index of its complete.
        commit_index: LogIndex,
    },
}

/// How a further copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddReplicaOutcome {
    /// It counts, or did so already.
    Added,
    /// It does not; it may be freed. (An adopted one that was never committed: abandon it first.)
    Refused(Refusal),
}

/// How forgetting a copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForgetOutcome {
    /// It no longer counts: free it when its holds end.
    Forgotten {
        /// It was the last one; the object is gone.
        last: bool,
    },
    /// It did not count any more. A copy that did once may be freed.
    Unknown,
    /// Too few others remain: keep it.
    StillNeeded,
    /// It is the last one of a pinned object: keep it.
    Pinned,
}

/// How the removal of an object ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoveOutcome {
    /// It is gone.
    Removed {
        /// The version that was.
        version: VersionId,
    },
    /// There is no such object, or not this version of it.
    Missing,
    /// It is pinned, and the removal was not forced.
    Pinned,
    /// Its request id was refused; nothing was done.
    Refused(RequestRefusal),
}

/// How pinning or unpinning ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinOutcome {
    /// The object has so many pins now.
    Pinned {
        /// How many.
        pins: u32,
    },
    /// There is no such object.
    Missing,
    /// Its request id was refused; nothing was done.
    Refused(RequestRefusal),
}

/// Why an item with a request id was not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum RequestRefusal {
    /// The session is unknown or its time is over: whether the item was executed before cannot be known.
    #[error("the session has expired")]
    SessionExpired = 0,
    /// The client said before that it has this item's answer.
    #[error("the request was acknowledged before")]
    Acknowledged = 1,
    /// As many answers are remembered as may be: acknowledge some.
    #[error("too many answers are remembered for the session")]
    SessionFull = 2,
    /// The id belongs to an item of another kind.
    #[error("the request id was used for something else")]
    Mismatch = 3,
}

/// How a command on a tenant ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TenantOutcome {
    /// It is there now.
    Created {
        /// Its number.
        tenant: TenantId,
    },
    /// It was there; nothing changed.
    Exists {
        /// Its number.
        tenant: TenantId,
    },
    /// Its quota is set.
    Changed,
    /// It is hidden; so many of its objects remain: ask again.
    Dropping {
        /// How many.
        remaining: u64,
    },
    /// It is gone.
    Dropped,
    /// No such tenant.
    Unknown,
    /// The default tenant cannot be dropped; a name must have 1 to 256 bytes; the catalog takes so many tenants.
    Refused,
}

/// How a command on sessions ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionOutcome {
    /// It is open; answers up to `acknowledged` are forgotten.
    Open {
        /// The last acknowledged sequence, 0 at first.
        acknowledged: u64,
    },
    /// It is unknown or its time is over: open another.
    Expired,
    /// As many sessions are open as may be: retry later.
    TooMany,
    /// So many sessions were dropped.
    Swept {
        /// How many.
        dropped: u32,
    },
}

/// How a command on a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskOutcome {
    /// The task is in this state now. Also the answer to every repeat.
    Known(TaskState),
    /// No such task, or it ended too long ago.
    Unknown,
    /// As many tasks are open as may be: retry later.
    TooMany,
    /// Nothing was begun.
    Refused(TaskRefusal),
}

/// Why a task was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TaskRefusal {
    /// No target, one twice, more than may be, the source among them, a move without a source, or no id.
    #[error("targets and source contradict each other or their bounds")]
    Malformed,
    /// The id names another task.
    #[error("the id names another task")]
    Mismatch,
    /// There is no such object.
    #[error("there is no such object")]
    NoSuchObject,
    /// A target is no node.
    #[error("a target is no node of the cluster")]
    NoSuchNode,
    /// A target is absent, or being drained.
    #[error("a target is not up")]
    NodeNotUp,
    /// The source has no copy of the object.
    #[error("the source has no copy")]
    NotOnSource,
    /// The target of a move has a copy already.
    #[error("the target has a copy already")]
    TargetHasCopy,
    /// The object would have more copies than it may.
    #[error("the object would have too many copies")]
    TooManyCopies,
}
