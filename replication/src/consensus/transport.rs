//! Where messages to other members leave.

use tidepool_metadata::NodeId;

/// Which of the connections to a member a message takes. Each has one of its own, so that none waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Heartbeats, votes and their answers: small, and late ones cost an election.
    Beat,
    /// Entries and their acknowledgements.
    Log,
    /// Commands on their way to the leader, reads, questions.
    Call,
    /// Parts of snapshots.
    Bulk,
}

impl Lane {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Beat, Self::Log, Self::Call, Self::Bulk];

    /// Its number on the wire.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Beat => 0,
            Self::Log => 1,
            Self::Call => 2,
            Self::Bulk => 3,
        }
    }
}

/// Carries messages as bytes that nobody but the receiving member looks into.
///
/// Called by the Raft thread and by others: must not wait. A message may be lost, repeated or overtaken, never changed;
/// whoever delivers it has proved that it comes from a node of this cluster. Messages that acknowledge something are given
/// only once that is durable.
pub trait Transport: Send + Sync + 'static {
    /// Sends `message` to `target`, or drops it.
    fn send(&self, target: NodeId, lane: Lane, message: Vec<u8>);
}

/// The transport of a group of one, which has nobody to write to.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoTransport;

impl Transport for NoTransport {
    fn send(&self, target: NodeId, lane: Lane, message: Vec<u8>) {
        tracing::warn!(%target, ?lane, length = message.len(), "message to a member that cannot be: dropped");
    }
}
