//! What a way of moving bytes has to be.
//!
//! A [`Link`] is one way to one peer. It takes groups of pieces and finishes each piece once, in any order. The shape is
//! that of one-sided verbs: a group is what is posted at once, a piece a work request, and a thread that waits may lend
//! itself to polling for completions ([`Link::carry`]); registration with a device, where a transport needs it, happens
//! before a link takes the first group of a region, and ends with the region's last use.

use crate::batch::{BatchState, Group};
use crate::peer::Segment;
use crate::slice::Direction;

/// Ways of moving bytes, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TransportKind {
    /// Copies between memory of processes on one host.
    SharedMemory,
    /// Frames over TCP.
    Tcp,
}

/// How a link likes its groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Requests are cut into pieces of this many bytes.
    pub(crate) piece_bytes: u64,
    /// Most pieces in a group.
    pub(crate) group_pieces: usize,
    /// Most bytes in a group, as long as it has more than one piece.
    pub(crate) group_bytes: u64,
}

/// One way to one peer.
pub(crate) trait Link: Send + Sync {
    /// Which.
    fn kind(&self) -> TransportKind;

    /// How it likes its groups.
    fn limits(&self) -> Limits;

    /// Whether it can reach that segment that way.
    fn reaches(&self, segment: &Segment, direction: Direction) -> bool;

    /// Takes groups over: each of their pieces is finished once, by another thread or at once.
    fn post(&self, groups: Vec<Group>);

    /// The same, but the calling thread lends itself until the batch has ended or somebody else has taken over.
    fn carry(&self, groups: Vec<Group>, batch: &BatchState);

    /// Ends everything with `Closed` and takes no more. What is on its way ends within a tick.
    fn close(&self);
}
