//! What a group is built from.

use std::path::PathBuf;
use std::time::Duration;

use tidepool_metadata::NodeId;

use super::member::Members;
use super::{ClusterEpoch, ClusterId};
use crate::error::GroupError;

/// When a log entry counts as durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// When `fdatasync` has returned: survives loss of power.
    #[default]
    Fsync,
    /// When the kernel has it: survives the process. With the loss of power of a majority at the same time, acknowledged
    /// commands are lost. Term and vote are synced all the same.
    Os,
}

/// How a leader makes sure that nobody else leads before it answers a linearizable read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaderReads {
    /// A quorum followed it so lately that no other can have been elected: rests on clocks that run about equally fast, and on
    /// hosts that do not stand still between a look at the clock and the answer, as a hypervisor may let them.
    #[default]
    Lease,
    /// A quorum has followed it since the read began: a round trip each, shared by the reads that wait.
    Quorum,
}

/// What a command that was answered survives in a group of one, under [`Durability::Fsync`].
///
/// In every other group all commands are synced: another member may count on what this one acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outlives {
    /// The process: what the command tells of is lost with the host's memory anyway. Synced behind the answer, within about
    /// [`GroupLimits::image_interval`].
    Process,
    /// Loss of power.
    Power,
}

/// What an empty folder becomes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Formation {
    /// A new group, whose only voter is this node.
    #[default]
    Found,
    /// A member of a group that is there.
    Join {
        /// [`super::MemberId::life`] of the member that it becomes, not 0: a later join of the same node, with another log, is
        /// another member.
        life: u32,
        /// The members as the leader knows them, this one among them.
        members: Members,
    },
}

/// Who a voter is and where it lives.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// Log and image lie in here; made if missing.
    pub folder: PathBuf,
    /// What is made of an empty folder; without effect on any other.
    pub formation: Formation,
    /// Which cluster; a folder of another is refused.
    pub cluster: ClusterId,
    /// Which catalog of the cluster; a folder of another is refused.
    pub epoch: ClusterEpoch,
    /// This voter, not 0; a folder of another is refused.
    pub node: NodeId,
    /// When an entry counts as durable.
    pub durability: Durability,
    /// How a leader reads.
    pub reads: LeaderReads,
    /// How many voters the group is to have, 1 to 7, odd: the leader promotes learners, in pairs, until it has so many.
    /// *Default* 3.
    pub voters: usize,
}

impl GroupConfig {
    /// A group of one in an empty `folder`, to grow to three voters.
    #[must_use]
    pub fn new(folder: PathBuf, cluster: ClusterId, node: NodeId) -> Self {
        Self {
            folder,
            formation: Formation::Found,
            cluster,
            epoch: ClusterEpoch::default(),
            node,
            durability: Durability::Fsync,
            reads: LeaderReads::Lease,
            voters: 3,
        }
    }
}

/// How much a voter gathers, holds back and lets lag. The defaults are meant to stay.
#[derive(Clone, Debug)]
pub struct GroupLimits {
    /// Most commands that wait to be logged, 1 to 2^20, *default* 16,384. Fewer: bursts are refused; more: a caller
    /// waits longer for nothing.
    pub queue_commands: usize,
    /// Most bytes of them, 1 MiB to 1 GiB, *default* 32 MiB.
    pub queue_bytes: usize,
    /// Most bytes of entries that are logged and not applied, 1 MiB to 1 GiB, *default* 16 MiB.
    pub in_flight_bytes: usize,
    /// How long changes are gathered before they go to the image, 1 ms to 10 s, *default* 100 ms. Longer: rows that
    /// change often are written less often, but each write holds the state longer.
    pub image_interval: Duration,
    /// Log since the last flush of the image after which it is flushed, 64 KiB to 128 MiB, *default* 64 MiB: what a start
    /// replays. Smaller: more write traffic.
    pub image_flush_bytes: u64,
    /// Longest time between changes and the flush of the image that has them, 100 ms to 1 h, *default* 30 s.
    pub image_flush_interval: Duration,
    /// Log since the last flush of the image above which no more is logged until it was flushed, at least twice
    /// `image_flush_bytes`, *default* 256 MiB.
    pub image_lag_bytes: u64,
    /// Makes writes of the log fail, as a full or broken disk does.
    #[cfg(test)]
    pub(crate) fail_writes: std::sync::Arc<std::sync::atomic::AtomicBool>,
}

impl Default for GroupLimits {
    fn default() -> Self {
        Self {
            queue_commands: 16 << 10,
            queue_bytes: 32 << 20,
            in_flight_bytes: 16 << 20,
            image_interval: Duration::from_millis(100),
            image_flush_bytes: 64 << 20,
            image_flush_interval: Duration::from_secs(30),
            image_lag_bytes: 256 << 20,
            #[cfg(test)]
            fail_writes: std::sync::Arc::default(),
        }
    }
}

impl GroupLimits {
    /// Refuses settings out of bounds.
    ///
    /// # Errors
    /// [`GroupError::Setting`].
    pub fn validate(self) -> Result<Self, GroupError> {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let checks = [
            ("queue_commands", self.queue_commands as u64, 1, 1 << 20, "1 to 2^20"),
            ("queue_bytes", self.queue_bytes as u64, 1 << 20, 1 << 30, "1 MiB to 1 GiB"),
            ("in_flight_bytes", self.in_flight_bytes as u64, 1 << 20, 1 << 30, "1 MiB to 1 GiB"),
            ("image_interval", millis(self.image_interval), 1, 10_000, "1 ms to 10 s"),
            ("image_flush_bytes", self.image_flush_bytes, 64 << 10, 128 << 20, "64 KiB to 128 MiB"),
            ("image_flush_interval", millis(self.image_flush_interval), 100, 3_600_000, "100 ms to 1 h"),
            (
                "image_lag_bytes",
                self.image_lag_bytes,
                2 * self.image_flush_bytes,
                u64::MAX,
                "at least twice image_flush_bytes",
            ),
        ];
        match checks.into_iter().find(|&(_, value, least, most, _)| value < least || value > most) {
            Some((setting, value, .., bounds)) => Err(GroupError::Setting { setting, value, bounds }),
            None => Ok(self),
        }
    }
}
