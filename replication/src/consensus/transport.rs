//! Where messages to other voters leave.

use tidepool_metadata::NodeId;

/// Carries Raft's messages as bytes that nobody but the receiving voter looks into.
///
/// Called by the Raft thread: must not wait. A message may be lost, repeated or overtaken, never changed; whoever delivers
/// it has proved that it comes from a voter of this cluster. Messages that acknowledge something are given only once that
/// is durable.
pub trait Transport: Send + 'static {
    /// Sends `message` to `target`, or drops it.
    fn send(&mut self, target: NodeId, message: Vec<u8>);
}

/// The transport of a group of one, which has nobody to write to.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoTransport;

impl Transport for NoTransport {
    fn send(&mut self, target: NodeId, message: Vec<u8>) {
        tracing::warn!(%target, length = message.len(), "message to a voter that cannot be: dropped");
    }
}
