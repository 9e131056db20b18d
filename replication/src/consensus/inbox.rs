//! What waits for the Raft thread: proposals, and news from the other threads.
//!
//! Bounded by commands and bytes; when full, proposals are refused at once. A proposal whose caller went away before it was
//! taken is dropped: it was never logged.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};
use tidepool_metadata::{LogIndex, NodeId};
use tokio::sync::oneshot;

use super::config::GroupLimits;
use crate::error::CatalogError;

/// The answer to a proposal: where it was applied, and what came out.
pub(super) type Reply<O> = oneshot::Sender<Result<(LogIndex, O), CatalogError>>;

/// One command that waits to be logged.
pub(super) struct Proposal<O> {
    pub(super) command: Vec<u8>,
    pub(super) items: usize,
    pub(super) reply: Reply<O>,
}

/// Whether proposals are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    /// Taken, and logged as soon as this voter leads: at the start, and while it does.
    Open,
    /// Another voter leads, or none.
    NotLeader(Option<NodeId>),
    /// The group stops.
    Closed,
}

/// What the Raft thread got.
pub(super) struct Input<O> {
    pub(super) proposals: Vec<Proposal<O>>,
    /// The image is flushed up to here.
    pub(super) flushed: Option<LogIndex>,
    pub(super) stop: bool,
}

pub(super) struct Inbox<O> {
    state: Mutex<State<O>>,
    wake: Condvar,
    commands_maximum: usize,
    bytes_maximum: usize,
}

struct State<O> {
    gate: Gate,
    queue: VecDeque<Proposal<O>>,
    bytes: usize,
    flushed: Option<LogIndex>,
    stop: bool,
    /// The Raft thread waits for room, not for work.
    wants_room: bool,
}

impl<O> Inbox<O> {
    pub(super) fn new(limits: &GroupLimits) -> Self {
        let state =
            State { gate: Gate::Open, queue: VecDeque::new(), bytes: 0, flushed: None, stop: false, wants_room: false };
        Self {
            state: Mutex::new(state),
            wake: Condvar::new(),
            commands_maximum: limits.queue_commands,
            bytes_maximum: limits.queue_bytes,
        }
    }

    /// Never waits.
    pub(super) fn push(&self, proposal: Proposal<O>) -> Result<(), CatalogError> {
        let mut state = self.state.lock();
        match state.gate {
            Gate::Open => {}
            Gate::NotLeader(leader) => return Err(CatalogError::NotLeader { leader }),
            Gate::Closed => return Err(CatalogError::ShuttingDown),
        }
        let length = proposal.command.len();
        if state.queue.len() >= self.commands_maximum || state.bytes + length > self.bytes_maximum {
            return Err(CatalogError::Overloaded { commands: state.queue.len(), bytes: state.bytes });
        }
        state.bytes += length;
        state.queue.push_back(proposal);
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Waits for something to do, and takes at most about `room` bytes of proposals; as long as it answers 0 none are taken.
    ///
    /// `room` is asked under the lock that [`Inbox::made_room`] takes: room that comes after the answer wakes the wait.
    pub(super) fn take(&self, room: impl Fn() -> usize) -> Input<O> {
        let mut state = self.state.lock();
        let room_bytes = loop {
            let room_bytes = room();
            if state.stop || state.flushed.is_some() || room_bytes > 0 && !state.queue.is_empty() {
                break room_bytes;
            }
            state.wants_room = room_bytes == 0;
            self.wake.wait(&mut state);
        };
        state.wants_room = false;
        let (mut proposals, mut taken) = (Vec::new(), 0);
        while taken < room_bytes
            && !state.stop
            && let Some(proposal) = state.queue.pop_front()
        {
            taken += proposal.command.len();
            if !proposal.reply.is_closed() {
                proposals.push(proposal);
            }
        }
        state.bytes = if state.queue.is_empty() { 0 } else { state.bytes - taken };
        Input { proposals, flushed: state.flushed.take(), stop: state.stop }
    }

    /// Says that entries were applied, after that shows in what `room` looks at.
    pub(super) fn made_room(&self) {
        if self.state.lock().wants_room {
            self.wake.notify_one();
        }
    }

    /// Says how far the image is flushed.
    pub(super) fn flushed(&self, index: LogIndex) {
        self.state.lock().flushed = Some(index);
        self.wake.notify_one();
    }

    pub(super) fn set_gate(&self, gate: Gate) {
        let mut state = self.state.lock();
        if state.gate != Gate::Closed {
            state.gate = gate;
        }
        if let Gate::NotLeader(leader) = gate {
            let refused = std::mem::take(&mut state.queue);
            state.bytes = 0;
            drop(state);
            refuse(refused, &CatalogError::NotLeader { leader });
        }
    }

    /// Takes nothing more, refuses what waits, and ends the Raft thread.
    pub(super) fn close(&self, error: &CatalogError) {
        let mut state = self.state.lock();
        state.gate = Gate::Closed;
        state.stop = true;
        state.bytes = 0;
        let refused = std::mem::take(&mut state.queue);
        drop(state);
        self.wake.notify_all();
        refuse(refused, error);
    }

    pub(super) fn waiting(&self) -> usize {
        self.state.lock().queue.len()
    }
}

fn refuse<O>(proposals: VecDeque<Proposal<O>>, error: &CatalogError) {
    for proposal in proposals {
        // The caller may have gone away; then nobody needs to know.
        let _ = proposal.reply.send(Err(error.clone()));
    }
}
