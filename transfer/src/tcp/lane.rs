//! One connection to a peer, seen from who asks: frames out, answers in, in order.
//!
//! ```text
//!            connect, greet                 window has room: fill()
//! Unconnected ------------> Connected --------------------------------> frames in `outgoing`
//!      ^                        |  ^                                        | send()
//!      |                        |  +-- answer complete: pieces finished <-- `awaiting`, answer into `incoming`
//!      +-- fail(): groups are tried again elsewhere, or finished with the failure
//! ```
//!
//! An answer is received *optimistically*: header and the bytes that follow if all went well are one receipt, straight
//! into registered memory. If the header says otherwise, what was received too much is taken back ([`Lending::take_back`])
//! and interpreted anew; it had landed only in destinations of requests that are still open.
//!
//! A batch that stops: what has not been sent is finished at once; answers that are still to come are received into the
//! sink; a WRITE whose bytes have left only in part can't be completed without the caller's memory, so the connection
//! is given up.
//!
//! A group with which another rail would be quicker costs the connection too: what was asked for and is not wanted any
//! more would have to be received first. Its answer can't arrive after that, because nobody receives it. Of a write, bytes
//! that left may still be taken by the peer; so every write that was on a lost connection carries the connection's number,
//! and the frame that repeats it follows a FENCE, at which the peer ends that connection before it goes on.
//!
//! Invariants: answers come in the order of `awaiting`; `in_flight` = bytes of the groups in it.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::link::{Connected, Shared};
use crate::batch::Group;
use crate::error::Failure;
use crate::lend::{Lending, Wait};
use crate::rails::Trouble;
use crate::slice::Direction;
use crate::spin::Spin;
use crate::stream::{ConnectError, Stream, TICK};
use crate::wire::{self, HEADER_BYTES, Header, Kind, SOME_FAILED};

/// Most groups on their way: their frames fit in any socket buffer, so that a peer that only answers is never waited for
/// while it waits for us.
const GROUPS_MAX: usize = 16;

/// A connection that moved no byte for this long, with a group on it that is overdue, is silent rather than slow.
const SILENT_AFTER: Duration = Duration::from_millis(10);

/// Where a lane's groups come from.
pub(crate) trait Source {
    /// The next group of at most `bytes` bytes; any, if nothing is in flight.
    fn next(&mut self, bytes: u64, is_idle: bool) -> Option<Group>;
    /// Whether the driver may leave although the lane is busy.
    fn is_done(&self) -> bool;
    /// Finishes groups that wait and whose batch was stopped.
    fn purge(&mut self, now: Instant);
}

/// A group that was sent, or is being sent.
#[derive(Debug)]
struct Awaited {
    id: u64,
    /// `None` once its pieces were finished early: the answer goes to the sink.
    group: Option<Group>,
    direction: Direction,
    count: u16,
    bytes: u64,
}

/// Which part of an answer `incoming` receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Nothing begun.
    None,
    /// Header, and optimistically what follows.
    Opening,
    /// The rest after a header that said: as expected.
    Rest,
    /// One status byte an item.
    Statuses {
        /// Data bytes that follow them.
        data_bytes: u64,
    },
    /// Data of the items that succeeded.
    Remains,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Lane {
    stream: Option<Stream>,
    /// What the peer calls the connection.
    number: u64,
    outgoing: Lending,
    /// First id in `outgoing`, while bytes of it are left.
    unsent_from: u64,
    awaiting: VecDeque<Awaited>,
    in_flight: u64,
    incoming: Lending,
    part: Option<Part>,
    statuses: Vec<u8>,
    /// Bytes received that are not interpreted yet.
    stash: Vec<u8>,
    next_id: u64,
    moved_at: Option<Instant>,
    looked_at: Option<Instant>,
    /// Not before this is another connection tried, and why.
    rests_until: Option<(Instant, Failure)>,
    failures_in_a_row: u32,
    /// Whether a group on it can become overdue: then nothing blocks for a tick.
    is_watched: bool,
    spin: Spin,
}

impl Lane {
    /// Whether nothing is on its way.
    pub(crate) fn is_idle(&self) -> bool {
        self.awaiting.is_empty() && !self.is_sending()
    }

    fn is_sending(&self) -> bool {
        self.outgoing.left() > 0 || self.stream.as_ref().is_some_and(Stream::has_unsent)
    }

    /// Whether it is waiting for better times.
    pub(crate) fn rests(&self, now: Instant) -> bool {
        self.rests_until.is_some_and(|(until, _)| now < until)
    }

    /// Ends its connection if nothing is on its way.
    pub(crate) fn close(&mut self) {
        if self.is_idle()
            && let Some(stream) = self.stream.take()
        {
            stream.shutdown();
        }
    }

    /// Drives it until it is idle and the source is empty, or the source says that its driver may leave.
    pub(crate) fn run(&mut self, shared: &Shared, source: &mut dyn Source) {
        while !source.is_done() {
            if let Err(trouble) = self.advance(shared, source) {
                self.fail(trouble, shared);
            } else if self.is_idle() {
                return;
            }
            if shared.is_closed() {
                self.fail(Failure::Closed.into(), shared);
            }
        }
    }

    fn advance(&mut self, shared: &Shared, source: &mut dyn Source) -> Result<(), Trouble> {
        while !self.is_sending() && self.fill(shared, source) {
            self.send()?;
        }
        if self.is_idle() { Ok(()) } else { self.wait(shared, source) }
    }

    /// Takes groups into `outgoing` while the window has room: reads until there are no more, or one write.
    fn fill(&mut self, shared: &Shared, source: &mut dyn Source) -> bool {
        let window = shared.settings.window_bytes;
        let mut frames = Vec::new();
        self.unsent_from = self.next_id;
        while self.awaiting.len() < GROUPS_MAX && self.in_flight < window {
            let Some(mut group) = source.next(window - self.in_flight, self.awaiting.is_empty()) else { break };
            let now = Instant::now();
            if let Some(reason) = group.batch.stop_reason(now) {
                group.finish(Err(reason));
                continue;
            }
            if let Err(trouble) = self.connected(shared, &mut group, now) {
                group.hand_back_for(trouble);
                shared.hand_back_queued();
                continue;
            }
            let is_write = group.direction == Direction::Write;
            self.is_watched |= group.overdue_at().is_some();
            frames.push(self.await_answer(group, now));
            if is_write {
                break;
            }
        }
        if frames.is_empty() {
            return false;
        }
        let (awaiting, outgoing) = (&self.awaiting, &mut self.outgoing);
        let groups = || awaiting.iter().filter(|awaited| awaited.id >= frames[0]);
        outgoing.begin(|out| groups().for_each(|awaited| encode_frame(out, awaited)));
        if let Some(Awaited { group: Some(group), direction: Direction::Write, .. }) = groups().next_back() {
            lend(outgoing, group, |_| true);
        }
        true
    }

    fn await_answer(&mut self, group: Group, now: Instant) -> u64 {
        let (direction, bytes) = (group.direction, group.bytes);
        let id = self.next_id;
        self.next_id += 1;
        self.in_flight += bytes;
        if self.awaiting.is_empty() {
            self.moved_at = Some(now);
        }
        self.awaiting.push_back(Awaited { id, count: group.count as u16, group: Some(group), direction, bytes });
        id
    }

    /// Connects if there is no connection; a failed attempt lets the lane rest, longer each time.
    fn connected(&mut self, shared: &Shared, group: &mut Group, now: Instant) -> Result<(), Trouble> {
        if shared.is_closed() {
            return Err(Failure::Closed.into());
        }
        if self.stream.is_some() {
            return Ok(());
        }
        if let Some((until, failure)) = self.rests_until
            && now < until
        {
            return Err(failure.into());
        }
        let deadline = group.batch.deadline.min(now + shared.settings.connect_timeout);
        // Where another rail is there, a connection may take no longer than the group would, or connections usually do.
        let (patience, mut is_late) = (now + shared.usual_connect() * 2, false);
        let mut still = || {
            let now = Instant::now();
            is_late = now >= patience && group.is_overdue(now);
            !is_late && !shared.is_closed() && group.batch.stop_reason(now).is_none()
        };
        match shared.connect(deadline, &mut still) {
            Ok(Connected { stream, number }) => {
                self.stream = Some(stream);
                self.number = number;
                self.rests_until = None;
                Ok(())
            }
            Err(ConnectError { failure, source }) => {
                tracing::debug!(peer = shared.address, %failure, error = ?source, "no connection");
                if is_late {
                    return Err(Trouble::Overdue { is_silent: true });
                }
                self.rest(failure);
                Err(failure.into())
            }
        }
    }

    fn rest(&mut self, failure: Failure) {
        self.failures_in_a_row += 1;
        self.rests_until = Some((Instant::now() + rest_duration(self.failures_in_a_row), failure));
    }

    fn send(&mut self) -> Result<(), Trouble> {
        let Some(stream) = &self.stream else { return Err(Failure::ConnectionLost.into()) };
        // Answers to writes are few bytes: a peer that owes nothing else never waits for us to take them, so that we may
        // wait for it.
        let only_writes = self.awaiting.iter().all(|awaited| awaited.direction == Direction::Write);
        let wait = if only_writes && !self.is_watched { Wait::Some } else { Wait::No };
        let begun = Instant::now();
        while self.outgoing.left() > 0 || stream.has_unsent() {
            match stream.send(&mut self.outgoing, wait) {
                Ok(_) => {
                    let now = Instant::now();
                    self.moved_at = Some(now);
                    if (self.outgoing.left() > 0 || stream.has_unsent()) && now.saturating_duration_since(begun) >= TICK
                    {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Failure::ConnectionLost.into()),
            }
        }
        self.outgoing.clear();
        Ok(())
    }

    /// Waits until something can be sent or received, at most a tick, and does it.
    fn wait(&mut self, shared: &Shared, source: &mut dyn Source) -> Result<(), Trouble> {
        let now = Instant::now();
        // A peer that moves a byte now and then may not keep us from looking.
        if self.looked_at.is_none_or(|looked| now.saturating_duration_since(looked) >= TICK) {
            self.look_around(shared, source)?;
        }
        let Some(stream) = &self.stream else { return Err(Failure::ConnectionLost.into()) };
        let groups = self.awaiting.iter().filter_map(|awaited| awaited.group.as_ref());
        let first =
            groups.map(|group| group.overdue_at().map_or(group.batch.deadline, |at| at.min(group.batch.deadline)));
        let until_deadline = first.min().map_or(TICK, |first| first.saturating_duration_since(now));
        if until_deadline.is_zero() {
            // If it was this thread that was late, what came meanwhile comes first.
            let events = stream.poll(PollFlags::IN, Duration::ZERO).map_err(|_| Failure::System)?;
            return if events.is_empty() {
                self.look_around(shared, source)
            } else {
                self.receive(shared, source, Wait::No)
            };
        }
        if self.outgoing.left() > 0 || stream.has_unsent() {
            let events = stream.poll(PollFlags::IN | PollFlags::OUT, until_deadline.min(TICK));
            let events = events.map_err(|_| Failure::System)?;
            if events.intersects(PollFlags::OUT) {
                self.send()?;
            }
            if events.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                return self.receive(shared, source, Wait::No);
            }
            return self.look_around(shared, source);
        }
        if until_deadline >= TICK {
            // The socket's own timeout is a tick.
            if self.part.is_none_or(|part| part == Part::Opening) {
                let _waiting = self.spin.for_answer(stream);
                return self.receive(shared, source, Wait::Some);
            }
            return self.receive(shared, source, Wait::All);
        }
        let events = stream.poll(PollFlags::IN, until_deadline).map_err(|_| Failure::System)?;
        if events.is_empty() { self.look_around(shared, source) } else { self.receive(shared, source, Wait::No) }
    }

    /// Stops what has to stop, and notices a silent peer.
    fn look_around(&mut self, shared: &Shared, source: &mut dyn Source) -> Result<(), Trouble> {
        let now = Instant::now();
        self.looked_at = Some(now);
        source.purge(now);
        self.look_for_overdue(now)?;
        let is_unsent = |id: u64, left: u64, unsent_from: u64| left > 0 && id >= unsent_from;
        for index in 0..self.awaiting.len() {
            let awaited = &mut self.awaiting[index];
            let Some(reason) = awaited.group.as_ref().and_then(|group| group.batch.stop_reason(now)) else { continue };
            if awaited.direction == Direction::Write && is_unsent(awaited.id, self.outgoing.left(), self.unsent_from) {
                // Its bytes can't be taken back, and the rest of them may not be read from the caller's memory.
                return Err(if reason == Failure::Closed { reason.into() } else { Trouble::Innocent });
            }
            if index == 0 {
                self.incoming.let_go();
            }
            if let Some(group) = awaited.group.take() {
                group.finish(Err(reason));
            }
        }
        let silent_for = self.moved_at.map_or_else(Default::default, |moved| now.saturating_duration_since(moved));
        if silent_for >= shared.settings.silence_timeout { Err(Failure::Silent.into()) } else { Ok(()) }
    }

    /// Gives the connection up if it carries a group with which another rail would be quicker: only so is the group done
    /// for here, and what else would have to be received for nothing is not sent. The others on it are innocent.
    fn look_for_overdue(&mut self, now: Instant) -> Result<(), Trouble> {
        if !self.is_watched {
            return Ok(());
        }
        if let Some(group) = self.awaiting.iter().find_map(|awaited| awaited.group.as_ref()) {
            group.look_around(now);
        }
        let mut groups = self.awaiting.iter_mut().filter_map(|awaited| awaited.group.as_mut());
        if !groups.any(|group| group.is_overdue(now)) {
            return Ok(());
        }
        let silent_for = self.moved_at.map_or_else(Default::default, |moved| now.saturating_duration_since(moved));
        Err(Trouble::Overdue { is_silent: silent_for >= SILENT_AFTER })
    }

    fn receive(&mut self, shared: &Shared, source: &mut dyn Source, wait: Wait) -> Result<(), Trouble> {
        if self.part.is_none() {
            self.open_answer();
        }
        if self.stash.is_empty() {
            let Some(stream) = &self.stream else { return Err(Failure::ConnectionLost.into()) };
            match stream.receive(&mut self.incoming, wait) {
                Ok(0) => {}
                Ok(_) => self.moved_at = Some(Instant::now()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.look_around(shared, source),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
                Err(_) => return Err(Failure::ConnectionLost.into()),
            }
        }
        Ok(self.interpret()?)
    }

    /// Begins the receipt of the first awaited answer.
    fn open_answer(&mut self) {
        let Some(front) = self.awaiting.front() else { return };
        self.incoming.begin_receipt(HEADER_BYTES);
        if let (Direction::Read, Some(group)) = (front.direction, &front.group) {
            lend(&mut self.incoming, group, |_| true);
        }
        self.part = Some(Part::Opening);
    }

    /// Goes on as far as received bytes allow, over as many answers as they hold.
    fn interpret(&mut self) -> Result<(), Failure> {
        loop {
            if !self.stash.is_empty() {
                let taken = self.incoming.take_from(&self.stash);
                self.stash.drain(..taken);
            }
            match self.part.unwrap_or(Part::None) {
                Part::None => return Ok(()),
                Part::Opening if self.incoming.done() < HEADER_BYTES as u64 => return Ok(()),
                Part::Opening => self.read_header()?,
                _ if self.incoming.left() > 0 => return Ok(()),
                Part::Statuses { data_bytes } => self.read_statuses(data_bytes)?,
                Part::Rest | Part::Remains => {
                    self.complete();
                    if self.stash.is_empty() {
                        return Ok(());
                    }
                    if self.awaiting.is_empty() {
                        return Err(Failure::Protocol);
                    }
                    self.open_answer();
                }
            }
        }
    }

    fn read_header(&mut self) -> Result<(), Failure> {
        let header = Header::decode(self.incoming.control()).map_err(wire::WireError::failure)?;
        let Some(front) = self.awaiting.front() else { return Err(Failure::Protocol) };
        if header.kind == Kind::Error {
            return Err(header.failure());
        }
        let (kind, bytes) = match front.direction {
            Direction::Read => (Kind::Data, front.bytes),
            Direction::Write => (Kind::Written, 0),
        };
        if header.kind != kind || header.id != front.id || header.count != front.count {
            return Err(Failure::Protocol);
        }
        match header.status {
            0 if header.length != bytes => Err(Failure::Protocol),
            0 => {
                let sinks = front.group.is_none() && self.incoming.left() == 0;
                if sinks && self.incoming.done() == HEADER_BYTES as u64 {
                    self.incoming.begin_receipt(0);
                    self.incoming.sink(bytes);
                }
                self.part = Some(Part::Rest);
                Ok(())
            }
            SOME_FAILED if header.length <= bytes => {
                let mut taken_back = self.incoming.take_back();
                taken_back.append(&mut self.stash);
                self.stash = taken_back;
                self.incoming.begin_receipt(usize::from(header.count));
                self.part = Some(Part::Statuses { data_bytes: header.length });
                Ok(())
            }
            _ => Err(Failure::Protocol),
        }
    }

    fn read_statuses(&mut self, data_bytes: u64) -> Result<(), Failure> {
        self.statuses.clear();
        self.statuses.extend_from_slice(self.incoming.control());
        self.incoming.begin_receipt(0);
        let Some(front) = self.awaiting.front() else { return Err(Failure::Protocol) };
        if front.direction == Direction::Read {
            match &front.group {
                Some(group) => lend(&mut self.incoming, group, |index| self.statuses[index] == 0),
                None => self.incoming.sink(data_bytes),
            }
        }
        self.part = Some(Part::Remains);
        if self.incoming.left() == data_bytes { Ok(()) } else { Err(Failure::Protocol) }
    }

    /// The first awaited answer is complete.
    fn complete(&mut self) {
        let had_statuses = self.part == Some(Part::Remains);
        self.part = None;
        self.incoming.clear();
        self.failures_in_a_row = 0;
        self.is_watched &= self.awaiting.len() > 1;
        let Some(front) = self.awaiting.pop_front() else { return };
        self.in_flight -= front.bytes;
        let Some(group) = front.group else { return };
        if !had_statuses {
            return group.finish(Ok(()));
        }
        let mut statuses = self.statuses.iter();
        group.finish_each(|_| statuses.next().and_then(|status| wire::decode_status(*status)).map_or(Ok(()), Err));
    }

    /// Gives the connection up: what it carried is tried again, or ends with the failure.
    fn fail(&mut self, trouble: Trouble, shared: &Shared) {
        if let Some(stream) = self.stream.take() {
            stream.shutdown();
        }
        self.outgoing.clear();
        self.incoming.clear();
        self.stash.clear();
        self.part = None;
        self.in_flight = 0;
        self.is_watched = false;
        tracing::debug!(peer = shared.address, ?trouble, groups = self.awaiting.len(), "lane failed");
        if let Trouble::Failed(failure) = trouble
            && failure != Failure::Closed
        {
            // A lost connection is replaced at once the first time: an idle one may have died long ago.
            if failure != Failure::ConnectionLost || self.failures_in_a_row > 0 {
                self.rest(failure);
            } else {
                self.failures_in_a_row = 1;
            }
        }
        let now = Instant::now();
        for awaited in self.awaiting.drain(..) {
            let Some(mut group) = awaited.group else { continue };
            group.fence(self.number);
            let is_late = group.overdue_at().is_some_and(|overdue| overdue <= now);
            group.hand_back_for(if matches!(trouble, Trouble::Overdue { .. }) && !is_late {
                Trouble::Innocent
            } else {
                trouble
            });
        }
        if matches!(trouble, Trouble::Failed(_) | Trouble::Overdue { is_silent: true }) {
            shared.hand_back_queued();
        }
    }
}

/// How long a lane rests after so many failures in a row: 50 ms, doubling, at most 5 s.
fn rest_duration(failures: u32) -> Duration {
    TICK * (1 << failures.saturating_sub(1).min(7)).min(100)
}

fn encode_frame(out: &mut Vec<u8>, awaited: &Awaited) {
    let Some(group) = &awaited.group else { return };
    group.fences.iter().for_each(|connection| wire::encode_fence(out, *connection));
    let kind = if awaited.direction == Direction::Read { Kind::Read } else { Kind::Write };
    Header { kind, count: awaited.count, id: awaited.id, length: awaited.bytes, status: 0 }.encode(out);
    for piece in group.pieces() {
        wire::encode_item(out, &group.batch.remote_access(piece));
    }
}

/// Lends the local memory of the pieces that `wanted` picks. Their bounds were checked when the batch was submitted.
fn lend(lending: &mut Lending, group: &Group, wanted: impl Fn(usize) -> bool) {
    for (index, piece) in group.pieces().iter().enumerate() {
        if wanted(index) {
            let memory = group.batch.regions[piece.region as usize].memory();
            let lent = memory.map(|memory| lending.lend(memory, piece.local_offset, piece.length));
            assert!(matches!(lent, Some(Ok(()))), "a piece leaves its region");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_grow_and_are_bounded() {
        assert_eq!(rest_duration(1), Duration::from_millis(50));
        assert_eq!(rest_duration(2), Duration::from_millis(100));
        assert_eq!(rest_duration(40), Duration::from_secs(5));
    }
}
