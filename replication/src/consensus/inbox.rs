//! What waits for the Raft thread: proposals, reads, messages, and news from the other threads.
//!
//! Bounded by number and bytes; when full, proposals and reads are refused at once and messages are dropped, as a network
//! might. A proposal whose caller went away before it was taken is dropped: it was never logged.

use std::collections::VecDeque;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use tidepool_metadata::LogIndex;
use tokio::sync::oneshot;

use super::config::{GroupLimits, Outlives};
use super::core::Change;
use super::log::Position;
use super::member::Members;
use crate::error::CatalogError;

/// Messages of other members that wait, and their bytes: some round trips' worth.
const MESSAGES: usize = 4096;
const MESSAGE_BYTES: usize = 64 << 20;

/// The answer to a proposal: where it was applied, and what came out.
pub(super) type Reply<O> = oneshot::Sender<Result<(LogIndex, O), CatalogError>>;
/// From which index a read may be answered.
pub(super) type Reader = oneshot::Sender<Result<LogIndex, CatalogError>>;
/// How a change of members ended.
pub(super) type Changer = oneshot::Sender<Result<Members, CatalogError>>;

/// One command that waits to be logged.
pub(super) struct Proposal<O> {
    pub(super) command: Vec<u8>,
    pub(super) items: usize,
    pub(super) outlives: Outlives,
    pub(super) reply: Reply<O>,
}

/// What the Raft thread got.
pub(super) struct Input<O> {
    pub(super) proposals: Vec<Proposal<O>>,
    pub(super) messages: Vec<Vec<u8>>,
    pub(super) reads: Vec<Reader>,
    pub(super) changes: Vec<(Change, Changer)>,
    /// A fetch of a snapshot has ended.
    pub(super) fetched: Option<Option<(Position, Members)>>,
    /// The image is flushed up to here.
    pub(super) flushed: Option<LogIndex>,
    /// The log is written up to the batch of this number.
    pub(super) written: Option<u64>,
    pub(super) stop: bool,
}

pub(super) struct Inbox<O> {
    state: Mutex<State<O>>,
    wake: Condvar,
    commands_maximum: usize,
    bytes_maximum: usize,
}

struct State<O> {
    closed: bool,
    queue: VecDeque<Proposal<O>>,
    bytes: usize,
    messages: Vec<Vec<u8>>,
    message_bytes: usize,
    reads: Vec<Reader>,
    changes: Vec<(Change, Changer)>,
    fetched: Option<Option<(Position, Members)>>,
    flushed: Option<LogIndex>,
    written: Option<u64>,
    stop: bool,
    /// The Raft thread waits for room, not for work.
    wants_room: bool,
}

impl<O> State<O> {
    fn has_news(&self) -> bool {
        let quiet = self.messages.is_empty() && self.reads.is_empty() && self.changes.is_empty();
        !quiet || self.stop || self.written.is_some() || self.flushed.is_some() || self.fetched.is_some()
    }
}

impl<O> Inbox<O> {
    pub(super) fn new(limits: &GroupLimits) -> Self {
        let state = State {
            closed: false,
            queue: VecDeque::new(),
            bytes: 0,
            messages: Vec::new(),
            message_bytes: 0,
            reads: Vec::new(),
            changes: Vec::new(),
            fetched: None,
            flushed: None,
            written: None,
            stop: false,
            wants_room: false,
        };
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
        if state.closed {
            return Err(CatalogError::ShuttingDown);
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

    /// Asks for the index from which a read may be answered. Never waits.
    pub(super) fn read(&self, reader: Reader) -> Result<(), CatalogError> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(CatalogError::ShuttingDown);
        }
        if state.reads.len() >= self.commands_maximum {
            return Err(CatalogError::Overloaded { commands: state.reads.len(), bytes: 0 });
        }
        state.reads.push(reader);
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// A message of another member; dropped if too many wait.
    pub(super) fn receive(&self, message: Vec<u8>) {
        let mut state = self.state.lock();
        if state.closed || state.messages.len() >= MESSAGES || state.message_bytes + message.len() > MESSAGE_BYTES {
            return;
        }
        state.message_bytes += message.len();
        state.messages.push(message);
        drop(state);
        self.wake.notify_one();
    }

    pub(super) fn change(&self, change: Change, changer: Changer) -> Result<(), CatalogError> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(CatalogError::ShuttingDown);
        }
        state.changes.push((change, changer));
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Says how a fetch of a snapshot ended.
    pub(super) fn fetched(&self, found: Option<(Position, Members)>) {
        self.state.lock().fetched = Some(found);
        self.wake.notify_one();
    }

    /// Waits for something to do or until `deadline`, and takes at most about `room` bytes of proposals; as long as it
    /// answers 0 none are taken.
    ///
    /// `room` is asked under the lock that [`Inbox::made_room`] takes: room that comes after the answer wakes the wait.
    pub(super) fn take(&self, room: impl Fn() -> usize, deadline: Option<Instant>) -> Input<O> {
        let mut state = self.state.lock();
        let room_bytes = loop {
            let room_bytes = room();
            if state.has_news() || room_bytes > 0 && !state.queue.is_empty() {
                break room_bytes;
            }
            state.wants_room = room_bytes == 0;
            match deadline {
                None => self.wake.wait(&mut state),
                Some(deadline) => {
                    if self.wake.wait_until(&mut state, deadline).timed_out() {
                        break room();
                    }
                }
            }
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
        state.message_bytes = 0;
        Input {
            proposals,
            messages: std::mem::take(&mut state.messages),
            reads: std::mem::take(&mut state.reads),
            changes: std::mem::take(&mut state.changes),
            fetched: state.fetched.take(),
            flushed: state.flushed.take(),
            written: state.written.take(),
            stop: state.stop,
        }
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

    /// Says how far the log is written.
    pub(super) fn written(&self, number: u64) {
        self.state.lock().written = Some(number);
        self.wake.notify_one();
    }

    /// Takes nothing more, refuses what waits, and ends the Raft thread.
    pub(super) fn close(&self, error: &CatalogError) {
        let mut state = self.state.lock();
        (state.closed, state.stop, state.bytes) = (true, true, 0);
        let refused = std::mem::take(&mut state.queue);
        let (reads, changes) = (std::mem::take(&mut state.reads), std::mem::take(&mut state.changes));
        drop(state);
        self.wake.notify_all();
        // Callers may have gone away; then nobody needs to know.
        for proposal in refused {
            let _ = proposal.reply.send(Err(error.clone()));
        }
        for reader in reads {
            let _ = reader.send(Err(error.clone()));
        }
        for (_, changer) in changes {
            let _ = changer.send(Err(error.clone()));
        }
    }

    pub(super) fn waiting(&self) -> usize {
        self.state.lock().queue.len()
    }
}
