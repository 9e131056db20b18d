//! One message and its answer on a connection that nobody else uses meanwhile: bytes leave from the caller's buffers and
//! arrive in them, without a copy in this process.
//!
//! Messages of `control` share connections, so what arrives is received by whoever waits first, into a buffer that belongs
//! to nobody. Here the caller that waits is the only one who can receive: a header, then as much as it wants, where it
//! wants. For answers that carry values; it blocks.

use std::io::{self, IoSlice, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::PollFlags;

use crate::control::Dial;
use crate::error::{Failure, TransferError};
use crate::lend::poll_each;
use crate::peer::Peer;
use crate::spin::Spin;
use crate::stream::{ConnectError, Stream, TICK};
use crate::wire::{HEADER_BYTES, Header, Kind, REQUEST_MAX, WireError};

/// Received at once at an answer's start: small answers take one system call, large ones have this much copied.
const FIRST_BYTES: usize = 4096;

/// A peer that sends nothing for so long is asked whether it is there, and given as long to answer: a handler may take its
/// time, a process that is frozen or cut off takes all of it.
const SILENCE: Duration = Duration::from_secs(1);
/// How long it may take to ask a second peer.
const SECOND_WITHIN: Duration = Duration::from_millis(100);

/// Connections to one peer for exchanges: as many as run at a time.
pub(crate) struct Exchanges {
    dial: Arc<Dial>,
    /// Whole answers were received on these.
    idle: Mutex<Vec<Stream>>,
    /// More are closed.
    most_idle: usize,
    /// Of the next message: no answer is taken for another's.
    next_id: AtomicU64,
    spin: Spin,
}

/// An answer on its way. Dropped before its end, its connection is closed.
pub struct Answer {
    peer: Arc<Peer>,
    /// None: it was lost.
    stream: Option<Stream>,
    first: Box<[u8; FIRST_BYTES]>,
    /// What of `first` was received and not taken yet.
    taken: usize,
    received: usize,
    left: u64,
    deadline: Instant,
    /// Since when nothing came.
    silent_since: Instant,
}

/// Of two peers that could be asked, whose answer it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    /// The first one's: it came in time, and the second was not asked.
    First,
    /// The first one's, although the second was asked too.
    FirstOfTwo,
    /// The second one's.
    Second,
}

/// A message that was sent, and its number; nothing of the answer was received. Dropped, its connection is closed.
struct Asked(Answer, u64);

impl Exchanges {
    pub(crate) fn new(dial: Arc<Dial>, most_idle: usize) -> Self {
        Self { dial, idle: Mutex::default(), most_idle, next_id: AtomicU64::new(1), spin: Spin::default() }
    }

    fn connection(&self, deadline: Instant) -> Result<Stream, ConnectError> {
        while let Some(stream) = self.idle.lock().pop() {
            // Nothing is owed on it: whatever is there to read is its end.
            if stream.poll(PollFlags::IN, Duration::ZERO).is_ok_and(|events| events.is_empty()) {
                return Ok(stream);
            }
        }
        (self.dial)(deadline)
    }

    fn give_back(&self, stream: Stream) {
        let mut idle = self.idle.lock();
        if idle.len() < self.most_idle {
            idle.push(stream);
        }
    }

    /// Closes the connections that are idle.
    pub(crate) fn close(&self) {
        self.idle.lock().clear();
    }
}

impl Answer {
    /// Sends `parts` as one message, and receives the beginning of its answer.
    pub(crate) fn ask(peer: &Arc<Peer>, parts: &[&[u8]], deadline: Instant) -> Result<Self, ConnectError> {
        Asked::send(peer, parts, deadline)?.answer()
    }

    /// As [`Answer::ask`]; asks `second` too if `first` has not begun to answer after `patience`. Then the answer is that of
    /// the one that begins sooner, and what the other one does is given up.
    pub(crate) fn ask_either(
        [first, second]: [&Arc<Peer>; 2],
        parts: &[&[u8]],
        patience: Duration,
        deadline: Instant,
    ) -> Result<(Self, Answered), ConnectError> {
        let mut first = Asked::send(first, parts, deadline)?;
        if first.0.is_coming(patience.min(deadline.saturating_duration_since(Instant::now())))? {
            return Ok((first.answer()?, Answered::First));
        }
        // What is asked for speed is not waited for long.
        let soon = deadline.min(Instant::now() + SECOND_WITHIN);
        let Ok(mut second) = Asked::send(second, parts, soon) else {
            return Ok((first.answer()?, Answered::FirstOfTwo));
        };
        second.0.deadline = deadline;
        loop {
            if first.0.is_coming(Duration::ZERO)? {
                return match first.answer() {
                    Ok(answer) => Ok((answer, Answered::FirstOfTwo)),
                    Err(_) => Ok((second.answer()?, Answered::Second)),
                };
            }
            if second.0.is_coming(Duration::ZERO)? {
                return match second.answer() {
                    Ok(answer) => Ok((answer, Answered::Second)),
                    Err(_) => Ok((first.answer()?, Answered::FirstOfTwo)),
                };
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::DeadlinePassed.into());
            }
            let [Some(one), Some(other)] = [&first.0.stream, &second.0.stream] else {
                return Err(Failure::Closed.into());
            };
            poll_each([one.as_fd(), other.as_fd()], PollFlags::IN, left.min(TICK))
                .map_err(|_| Failure::ConnectionLost)?;
            // Whoever is not there is waited for no longer.
            if first.0.note_progress(0).is_err() {
                return Ok((second.answer()?, Answered::Second));
            }
            if second.0.note_progress(0).is_err() {
                return Ok((first.answer()?, Answered::FirstOfTwo));
            }
        }
    }

    /// Whether there is something to receive, or comes within `time`.
    fn is_coming(&self, time: Duration) -> Result<bool, Failure> {
        let stream = self.stream.as_ref().ok_or(Failure::Closed)?;
        stream.poll(PollFlags::IN, time).map(|events| !events.is_empty()).map_err(|_| Failure::ConnectionLost)
    }
}

impl Asked {
    fn send(peer: &Arc<Peer>, parts: &[&[u8]], deadline: Instant) -> Result<Self, ConnectError> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if length as u64 > REQUEST_MAX {
            return Err(Failure::OutOfRange.into());
        }
        let stream = peer.exchanges.connection(deadline)?;
        let id = peer.exchanges.next_id.fetch_add(1, Ordering::Relaxed);
        send(&stream, id, length, parts, deadline)?;
        let first = Box::new([0; FIRST_BYTES]);
        let peer = Arc::clone(peer);
        let (stream, silent_since) = (Some(stream), Instant::now());
        // All is left until its header says how much it is: a connection that owes an answer is never used again.
        Ok(Self(Answer { peer, stream, first, taken: 0, received: 0, left: u64::MAX, deadline, silent_since }, id))
    }

    /// Receives the beginning of the answer.
    fn answer(self) -> Result<Answer, ConnectError> {
        let Self(mut answer, id) = self;
        while answer.received < HEADER_BYTES {
            let (mut stream, room) =
                (answer.stream.as_ref().ok_or(Failure::Closed)?, &mut answer.first[answer.received..]);
            let _waiting = answer.peer.exchanges.spin.for_answer(stream);
            let count = received(stream.read(room), answer.deadline)?;
            answer.received += count;
            answer.note_progress(count)?;
        }
        let header = Header::decode(&answer.first[..]).map_err(WireError::failure)?;
        if header.id != id {
            return Err(Failure::Protocol.into());
        }
        answer.taken = HEADER_BYTES;
        answer.left = header.length;
        match header.kind {
            Kind::Reply if header.status == 0 => Ok(answer),
            Kind::Reply | Kind::Error => Err(header.failure().into()),
            _ => Err(Failure::Protocol.into()),
        }
    }
}

impl Answer {
    /// Bytes that were not taken yet.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Takes the next bytes, as many as `target` has room for.
    ///
    /// # Errors
    /// `Length` if the answer has not as many; `Peer` with the reason why they don't come.
    pub fn read(&mut self, target: &mut [u8]) -> Result<(), TransferError> {
        self.check(target.len())?;
        let early = self.take_early(target.len());
        let (now, mut rest) = target.split_at_mut(early.len());
        now.copy_from_slice(&self.first[early]);
        while !rest.is_empty() {
            let count = self.receive(|stream| stream.receive_all(rest))?;
            rest = &mut rest[count..];
        }
        Ok(())
    }

    /// Appends what comes next to `target`, at least a byte if any is left: as much as arrived and `target` has room for,
    /// which is made for all that is left if there is none.
    ///
    /// # Errors
    /// `Peer` with the reason why no more comes.
    pub fn append_to(&mut self, target: &mut Vec<u8>) -> Result<(), TransferError> {
        let before = target.len();
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        if target.capacity() == before {
            target.reserve_exact(left);
        }
        let early = self.take_early(left);
        if !early.is_empty() {
            target.extend_from_slice(&self.first[early]);
            return Ok(());
        }
        while target.len() == before && left > 0 {
            self.receive(|stream| stream.receive_behind(target))?;
        }
        // Nothing follows an answer.
        if target.len() - before <= left { Ok(()) } else { Err(self.failed(Failure::Protocol.into())) }
    }

    fn check(&self, wanted: usize) -> Result<(), TransferError> {
        let (length, maximum) = (wanted as u64, self.left);
        if length <= maximum {
            return Ok(());
        }
        Err(TransferError::Length { what: "rest of an answer", length, minimum: 0, maximum })
    }

    /// Where in `first` the next bytes are, as far as they are there.
    fn take_early(&mut self, most: usize) -> std::ops::Range<usize> {
        let start = self.taken;
        self.taken += most.min(self.received - start);
        self.left -= (self.taken - start) as u64;
        start..self.taken
    }

    fn receive(&mut self, receive: impl FnOnce(&Stream) -> io::Result<usize>) -> Result<usize, TransferError> {
        let stream = self.stream.as_ref().ok_or(TransferError::Closed)?;
        let received = received(receive(stream), self.deadline);
        match received.and_then(|count| self.note_progress(count).map(|()| count)) {
            Ok(count) => {
                self.left = self.left.saturating_sub(count as u64);
                Ok(count)
            }
            Err(failure) => Err(self.failed(failure.into())),
        }
    }

    /// After a receipt of `count` bytes: a peer that has been silent for long is asked whether it is there.
    fn note_progress(&mut self, count: usize) -> Result<(), Failure> {
        let now = Instant::now();
        if count > 0 {
            self.silent_since = now;
        } else if now >= self.silent_since + SILENCE {
            let until = self.deadline.min(now + SILENCE);
            self.peer.probe(until).map_err(|failure| match failure {
                Failure::DeadlinePassed if until < self.deadline => Failure::Silent,
                failure => failure,
            })?;
            self.silent_since = Instant::now();
        }
        Ok(())
    }

    fn failed(&mut self, error: ConnectError) -> TransferError {
        self.stream = None;
        crate::engine::peer_error(&self.peer.address, error)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take()
            && self.left == 0
            // More than was asked for came: whatever it is, the connection is out of step.
            && self.taken == self.received
        {
            self.peer.exchanges.give_back(stream);
        }
    }
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").field("peer", &self.peer.address).field("left", &self.left).finish_non_exhaustive()
    }
}

fn send(stream: &Stream, id: u64, length: usize, parts: &[&[u8]], deadline: Instant) -> Result<(), Failure> {
    let mut header = Vec::with_capacity(HEADER_BYTES);
    Header { length: length as u64, ..Header::new(Kind::Message, id) }.encode(&mut header);
    let mut slices: Vec<IoSlice<'_>> =
        std::iter::once(&header[..]).chain(parts.iter().copied()).map(IoSlice::new).collect();
    let mut left = &mut slices[..];
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        match (&mut &*stream).write_vectored(left) {
            Ok(0) => return Err(Failure::ConnectionLost),
            Ok(count) => IoSlice::advance_slices(&mut left, count),
            Err(error) => look_around(&error, deadline)?,
        }
    }
    Ok(())
}

/// What a receipt gave. No bytes: look again, the deadline has not passed.
fn received(result: io::Result<usize>, deadline: Instant) -> Result<usize, Failure> {
    match result {
        Ok(0) => Err(Failure::ConnectionLost),
        Ok(count) => Ok(count),
        Err(error) => look_around(&error, deadline).map(|()| 0),
    }
}

/// After a failed call: whether it is worth another.
fn look_around(error: &io::Error, deadline: Instant) -> Result<(), Failure> {
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(()),
        io::ErrorKind::WouldBlock if Instant::now() < deadline => Ok(()),
        io::ErrorKind::WouldBlock => Err(Failure::DeadlinePassed),
        _ => Err(Failure::ConnectionLost),
    }
}
