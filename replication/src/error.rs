//! What goes wrong, for two readers: who asked the group ([`CatalogError`]), and who runs it ([`GroupError`]).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tidepool_metadata::catalog::DecodeError;
use tidepool_metadata::{ErrorKind, LogIndex, NodeId};

use crate::consensus::{ClusterEpoch, ClusterId};

/// When to ask again if the group has too much to do: some synced writes of a busy disk.
const RETRY_AFTER_OVERLOAD: Duration = Duration::from_millis(50);
/// When to ask again if the disk is full: somebody has to make room.
const RETRY_AFTER_FULL: Duration = Duration::from_secs(1);
/// When to ask again if there is no leader: about an election.
const RETRY_AFTER_ELECTION: Duration = Duration::from_millis(100);

/// Why a call to the group had no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CatalogError {
    /// The group is being opened; nothing was logged.
    #[error("the catalog is being opened")]
    Starting,
    /// As much waits to be logged as may; nothing was logged.
    #[error("{commands} commands of {bytes} bytes wait to be logged, the most that may")]
    Overloaded {
        /// How many wait.
        commands: usize,
        /// Their bytes.
        bytes: usize,
    },
    /// The catalog's disk has no room for it to grow; nothing was logged.
    #[error("the disk of the catalog is full, {free_bytes} bytes are left: remove objects, or make room on it")]
    DiskFull {
        /// What is free.
        free_bytes: u64,
    },
    /// Another voter leads, or none does; nothing was logged.
    #[error("this voter does not lead; leader: {leader:?}")]
    NotLeader {
        /// Who leads, as far as this voter knows.
        leader: Option<NodeId>,
    },
    /// The command does not fit an entry; nothing was logged.
    #[error("command of {length} bytes and {items} items is over {length_maximum} bytes or {items_maximum} items")]
    TooLarge {
        /// Its encoding's length in bytes.
        length: usize,
        /// The bound.
        length_maximum: usize,
        /// Its items.
        items: usize,
        /// The bound.
        items_maximum: usize,
    },
    /// The command's own decoder refuses its encoding: a batch, name or list is too long; nothing was logged.
    #[error("the command cannot be logged: {0}")]
    Malformed(#[from] DecodeError),
    /// The group stops; nothing was logged.
    #[error("the group is shutting down")]
    ShuttingDown,
    /// The group failed, and serves nothing until its process is started anew.
    #[error("the catalog does not serve: {cause}")]
    Failed {
        /// Why.
        cause: Arc<GroupError>,
        /// The command may have been logged before.
        proposed: bool,
    },
    /// Leadership was lost, or the group stopped, after the command was logged here: it may or may not be applied.
    #[error("the command was logged, but whether it will be applied is not known")]
    OutcomeUnknown,
    /// The voter did not reach the asked log index, or the point where it may serve such reads, in time.
    #[error("applied up to log index {}, which does not suffice for {read}", applied.0)]
    Lagging {
        /// What was asked.
        read: &'static str,
        /// How far it is.
        applied: LogIndex,
    },
    /// A change of members is under way, or the last one is not applied yet; nothing was logged.
    #[error("the group's members are changing")]
    MembersChanging,
    /// The member lacks too much of the log, or is silent, for what is asked of it; nothing was logged.
    #[error("the member has not caught up with the log, or does not answer")]
    NotCaughtUp,
    /// There is no such member, or it is not of the kind that was asked for; nothing was logged.
    #[error("there is no such member, or it has no vote and may get none")]
    NoSuchMember,
    /// Not built yet.
    #[error("not built yet: {what}")]
    Unimplemented {
        /// What.
        what: &'static str,
    },
    /// The state machine answered another question than the one asked: a fault of ours.
    #[error("the catalog gave another answer than {expected}")]
    Unexpected {
        /// What was to come.
        expected: &'static str,
    },
}

impl CatalogError {
    /// What the caller does next.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Overloaded { .. } | Self::DiskFull { .. } => ErrorKind::Exhausted,
            Self::Starting
            | Self::NotLeader { .. }
            | Self::ShuttingDown
            | Self::Lagging { .. }
            | Self::MembersChanging
            | Self::NotCaughtUp => ErrorKind::Unavailable,
            Self::NoSuchMember => ErrorKind::NotFound,
            Self::TooLarge { .. } | Self::Malformed(_) => ErrorKind::Invalid,
            Self::Failed { cause, .. } => cause.kind(),
            Self::Unexpected { .. } => ErrorKind::Internal,
            Self::OutcomeUnknown => ErrorKind::Deadline,
            Self::Unimplemented { .. } => ErrorKind::Unimplemented,
        }
    }

    /// A stable word for machines.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Starting => "STARTING",
            Self::Overloaded { .. } => "OVERLOADED",
            Self::DiskFull { .. } => "CATALOG_DISK_FULL",
            Self::NotLeader { .. } => "NO_LEADER",
            Self::TooLarge { .. } => "COMMAND_TOO_LARGE",
            Self::ShuttingDown => "SHUTTING_DOWN",
            Self::Malformed(_) => "COMMAND_MALFORMED",
            Self::Failed { cause, .. } => cause.reason(),
            Self::OutcomeUnknown => "OUTCOME_UNKNOWN",
            Self::Lagging { .. } => "LAGGING",
            Self::MembersChanging => "MEMBERS_CHANGING",
            Self::NotCaughtUp => "NOT_CAUGHT_UP",
            Self::NoSuchMember => "NO_SUCH_MEMBER",
            Self::Unimplemented { .. } => "UNIMPLEMENTED",
            Self::Unexpected { .. } => "INTERNAL",
        }
    }

    /// When asking again makes sense; `None` if it does not, or not here.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Overloaded { .. } => Some(RETRY_AFTER_OVERLOAD),
            Self::DiskFull { .. } => Some(RETRY_AFTER_FULL),
            Self::Starting
            | Self::NotLeader { .. }
            | Self::Lagging { .. }
            | Self::MembersChanging
            | Self::NotCaughtUp => Some(RETRY_AFTER_ELECTION),
            _ => None,
        }
    }

    /// Certainly nothing was logged, nor will be: what the command was to announce may be freed at once.
    #[must_use]
    pub fn is_unproposed(&self) -> bool {
        match self {
            Self::Starting
            | Self::Overloaded { .. }
            | Self::DiskFull { .. }
            | Self::NotLeader { .. }
            | Self::TooLarge { .. }
            | Self::Malformed(_)
            | Self::MembersChanging
            | Self::NotCaughtUp
            | Self::NoSuchMember
            | Self::ShuttingDown => true,
            Self::Failed { proposed, .. } => !proposed,
            Self::OutcomeUnknown | Self::Lagging { .. } | Self::Unexpected { .. } | Self::Unimplemented { .. } => false,
        }
    }

    /// This group will never answer again: asking it anew is useless.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::ShuttingDown | Self::Failed { .. })
    }
}

/// Why a group does not start, or stopped serving.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The folder, or a file in it, cannot be made or read.
    #[error("prepare {}: {source}", path.display())]
    Folder {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A database does not open: another process has it, or it is damaged (the cause says which).
    #[error("open {what} in {}: {source}", path.display())]
    Open {
        /// Log or image.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// RocksDB's words.
        source: rocksdb::Error,
    },
    /// A read failed or met damaged bytes.
    #[error("read {what}: {source}")]
    Read {
        /// What was read.
        what: &'static str,
        /// RocksDB's words.
        source: rocksdb::Error,
    },
    /// A write or its fsync failed. It is never retried: what the disk holds is unknown until it is read again.
    #[error("write {what}: {source}")]
    Write {
        /// What was written.
        what: &'static str,
        /// RocksDB's words.
        source: rocksdb::Error,
    },
    /// The folder belongs to another cluster or node.
    #[error("{what} belongs to node {found_node} of cluster {found_cluster}, not to node {node} of cluster {cluster}")]
    Foreign {
        /// Log or image.
        what: &'static str,
        /// Whose it is.
        found_cluster: ClusterId,
        /// Whose it is.
        found_node: NodeId,
        /// Who asks.
        cluster: ClusterId,
        /// Who asks.
        node: NodeId,
    },
    /// Of another catalog of the same cluster: restored from before a rebuild, or the folder beside it was.
    #[error("{what} is of epoch {}, this node is in epoch {}: the catalog was rebuilt since", found.0, epoch.0)]
    Epoch {
        /// Log or image.
        what: &'static str,
        /// As read.
        found: ClusterEpoch,
        /// As expected.
        epoch: ClusterEpoch,
    },
    /// Written by another version of this program.
    #[error("{what} has format version {found}; this program reads version {known}")]
    Version {
        /// Log, image or entry.
        what: &'static str,
        /// As read.
        found: u8,
        /// What this program reads.
        known: u8,
    },
    /// The log contradicts itself: entries are missing or damaged. It is refused, because acknowledged commands may be
    /// among them.
    #[error("the log is damaged at index {}: {problem}", index.0)]
    CorruptLog {
        /// Where.
        index: LogIndex,
        /// What is wrong.
        problem: &'static str,
    },
    /// The image contradicts itself.
    #[error("the image is damaged: {problem}")]
    CorruptImage {
        /// What is wrong.
        problem: &'static str,
    },
    /// The image's rows are no state.
    #[error("load the state from its image")]
    Load(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Log and image do not meet: one of them was lost or put back from a backup.
    #[error("log entries {}..={} do not meet the image at index {}", log_first.0, log_last.0, image.0)]
    Gap {
        /// First entry of the log.
        log_first: LogIndex,
        /// Last entry of the log.
        log_last: LogIndex,
        /// Index of the image.
        image: LogIndex,
    },
    /// A committed command cannot be read: written by a newer program, or damaged.
    #[error("decode the committed command at index {}: {source}", index.0)]
    Undecodable {
        /// Its entry.
        index: LogIndex,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The host lost what the kernel had, under `durability = os`: this member may have acknowledged what it no longer has.
    /// It must join anew, as another member.
    #[error("the host booted anew under durability = os: this member must join the group again")]
    MustRejoin,
    /// The leader knows entries of this member that it has not: its disk lost what it had synced, or was put back.
    #[error("the log ends at index {}, but this member has acknowledged index {}", last.0, known.0)]
    LostEntries {
        /// Last entry that is there.
        last: LogIndex,
        /// What the leader knows of.
        known: LogIndex,
    },
    /// The group goes on without this member.
    #[error("this node was removed from the group, at log index {} or before", index.0)]
    Removed {
        /// As of which change of members.
        index: LogIndex,
    },
    /// The consensus core refused something that it must take.
    #[error("drive raft: {0}")]
    Raft(#[from] raft::Error),
    /// Not built yet.
    #[error("not built yet: {what}")]
    Unimplemented {
        /// What.
        what: &'static str,
    },
    /// A setting is out of bounds.
    #[error("{setting} = {value} is out of bounds: {bounds}")]
    Setting {
        /// Which.
        setting: &'static str,
        /// As given.
        value: u64,
        /// What it may be.
        bounds: &'static str,
    },
    /// A thread cannot be started.
    #[error("start thread {thread}")]
    Spawn {
        /// Which.
        thread: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A thread of the group panicked: a fault of ours; see the log before it.
    #[error("thread {thread} of the group died")]
    ThreadDied {
        /// Which.
        thread: &'static str,
    },
}

impl GroupError {
    /// What to do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Foreign { .. } | Self::Epoch { .. } | Self::Version { .. } | Self::Setting { .. } => {
                ErrorKind::Invalid
            }
            Self::Open { .. } | Self::Folder { .. } => ErrorKind::Conflict,
            Self::Removed { .. } | Self::MustRejoin => ErrorKind::Conflict,
            Self::CorruptLog { .. }
            | Self::CorruptImage { .. }
            | Self::Load(_)
            | Self::Gap { .. }
            | Self::LostEntries { .. } => ErrorKind::Corrupt,
            Self::Unimplemented { .. } => ErrorKind::Unimplemented,
            Self::Read { .. }
            | Self::Write { .. }
            | Self::Undecodable { .. }
            | Self::Raft(_)
            | Self::Spawn { .. }
            | Self::ThreadDied { .. } => ErrorKind::Internal,
        }
    }

    /// A stable word for machines.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Foreign { .. } => "FOREIGN_CATALOG",
            Self::Epoch { .. } => "CATALOG_EPOCH",
            Self::Version { .. } => "CATALOG_VERSION",
            Self::Setting { .. } => "BAD_SETTING",
            Self::Open { .. } | Self::Folder { .. } => "CATALOG_UNUSABLE",
            Self::MustRejoin => "MUST_REJOIN",
            Self::Removed { .. } => "REMOVED",
            Self::CorruptLog { .. }
            | Self::CorruptImage { .. }
            | Self::Load(_)
            | Self::Gap { .. }
            | Self::LostEntries { .. } => "CATALOG_CORRUPT",
            Self::Unimplemented { .. } => "UNIMPLEMENTED",
            _ => "CATALOG_FAILED",
        }
    }
}
