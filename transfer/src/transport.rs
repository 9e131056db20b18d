//! What a way of moving bytes has to be.
//!
//! A [`Link`] is one way to one peer: a *rail*. A peer has several, of one transport (one for each address, or pair of
//! devices) and of several transports; `rails` chooses among them and hears of what became of each group. The shape is
//! that of one-sided verbs: a group is what is posted at once, a piece a work request, and a thread that waits may lend
//! itself to polling for completions ([`Link::carry`]).
//!
//! A link ends each group that it took once, in one of two ways:
//! - it *finishes* its pieces, with success or with what the peer said of them ([`Group::finish`],
//!   [`Group::finish_each`]), and with the stop reason of a batch that was stopped;
//! - it *hands it back* ([`Group::hand_back`]) because the way is bad: at submit, at completion, or because the group is
//!   overdue. From there it goes to another rail, or ends. What is handed back must be done for: **no byte of it may
//!   arrive any more**, in the memory here (reads) or there (writes), by the time that another rail takes it. A link that
//!   can't promise that of a write says which connection the peer has to end first ([`Group::fence`]); only TCP takes
//!   such a group.
//!
//! While a link holds groups it looks at them once a tick: whether their batch was stopped, whether they are overdue
//! ([`Group::is_overdue`]: one that is should be handed back, if that is cheap), and [`Group::look_around`].
//!
//! Memory that a transport has to know beforehand is registered with a [`Device`], for as long as its region lives.

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::batch::{BatchState, Group};
use crate::error::Failure;
use crate::memory::Memory;
use crate::peer::Segment;
use crate::region::Region;
use crate::slice::{AccessRights, Direction};

/// Ways of moving bytes, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TransportKind {
    /// Copies between memory of processes on one host.
    SharedMemory,
    /// Reads and writes of files of this host, whose descriptors a peer passed.
    File,
    /// One-sided reads and writes of RDMA devices.
    Rdma,
    /// Frames over TCP.
    Tcp,
}

/// How a link likes its groups. Those that were cut for another link may exceed it, as far as the wire's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Requests are cut into pieces of this many bytes.
    pub(crate) piece_bytes: u64,
    /// Most pieces in a group, at most [`crate::wire::ITEMS_MAX`].
    pub(crate) group_pieces: usize,
    /// Most bytes in a group, as long as it has more than one piece.
    pub(crate) group_bytes: u64,
}

/// One way to one peer.
pub(crate) trait Link: Send + Sync {
    /// Which.
    fn kind(&self) -> TransportKind;

    /// What tells it from others of its kind: an address, a pair of devices.
    fn name(&self) -> &str;

    /// Bytes per second that it should move, if that is known; else it is learned.
    fn bandwidth(&self) -> Option<f64> {
        None
    }

    /// How it likes its groups.
    fn limits(&self) -> Limits;

    /// Whether it can move bytes between these two that way; `None` stands for any memory. Not whether it works just now:
    /// that is found out.
    fn reaches(&self, local: Option<&Region>, segment: &Segment, direction: Direction) -> bool;

    /// Takes groups over: each ends once, by another thread or at once.
    fn post(&self, groups: Vec<Group>);

    /// The same, but the calling thread lends itself until the batch has ended or somebody else has taken over.
    fn carry(&self, groups: Vec<Group>, batch: &BatchState);

    /// Finds out whether it works, by a round trip with the peer. Called in the background for a rail that failed.
    ///
    /// # Errors
    /// Why it does not.
    fn probe(&self, deadline: Instant) -> Result<(), Failure>;

    /// Ends everything with `Closed` and takes no more. What is on its way ends within a tick.
    fn close(&self);

    /// Makes it fail from here on, if it can.
    #[cfg(feature = "faults")]
    fn set_faults(&self, _: crate::faulty::Faults) {}
}

/// Links to one peer.
pub(crate) type Links = Vec<Arc<dyn Link>>;

/// What a device keeps for registered memory; dropped before the memory is freed, after the last transfer has ended.
pub(crate) trait Registration: Any + Send + Sync {
    /// The region was withdrawn: when this returns, the device lets no peer at it any more. Own transfers go on.
    fn revoke(&self);
}

/// Something that has to know memory before a link can move it.
pub(crate) trait Device: Send + Sync {
    /// What the system calls it.
    fn name(&self) -> &str;

    /// Registers memory. What it gives is found by [`Region::registration`] under the device's place in the engine's list.
    ///
    /// # Errors
    /// The system's. The region is registered all the same; links over this device don't reach it.
    fn register(&self, memory: &Memory, rights: AccessRights) -> io::Result<Box<dyn Registration>>;
}
