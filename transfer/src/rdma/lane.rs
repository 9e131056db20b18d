//! One queue pair to a peer: groups in, work requests out, completions in order.
//!
//! ```text
//! unconnected --connect--> connected --fill: plan, post--> busy --settle: completions--> connected
//!      ^                                                    |
//!      |   give_up: stop the pair, poll until all its work  |  a completion says so, the port changed, the peer's
//!      +---- has ended, destroy it, sort what it carried ---+  connection ended, a batch was stopped
//! ```
//!
//! Work ends in the order in which it was posted; so does each group, and what is known of a failure is exact: what ended
//! before it is done, the work that the peer's device refused is refused, and the rest, which may or may not have moved,
//! is taken by another rail. For reads the end of the pair here is enough. For writes the peer's pair has to be gone too,
//! or packets that a fabric still holds could land later: it ends with its connection, and if the peer doesn't say in time
//! that this has ended, a write is handed back with the connection's number as its fence.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::event::PollFlags;

use super::handshake::{self, hear_the_end};
use super::link::{Shared, Source};
use super::memory_region::DeviceRegion;
use super::plan::{PlannedWork, RemoteExtent, WorkLimits, plan};
use super::verbs::{LocalRange, QueuePair, Status, Way, Work};
use crate::batch::{Group, Piece};
use crate::error::Failure;
use crate::rails::Trouble;
use crate::settings::Completion;
use crate::slice::Direction;
use crate::stream::Stream;

/// Work requests posted as one list.
const LIST: usize = 32;
/// Every so much work gives a completion, besides the last of each group.
const SIGNAL_EVERY: usize = 16;
/// Most bytes of one work request; ports may take less.
const WORK_BYTES: u64 = 1 << 30;
/// Bytes on their way before more is taken, at least.
const WINDOW_BYTES: u64 = 8 << 20;
/// Between looks for deadlines, cancellations, the port and the peer.
const LOOK: Duration = Duration::from_millis(10);
/// Completions are looked for this long before the thread sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// What a stopped batch has on its way mostly ends by itself in this time; then the pair is given up for it.
const GRACE: Duration = Duration::from_millis(10);
/// A stopped pair flushes its work at once; a device that doesn't is broken, and destroying the pair ends it.
const DRAIN: Duration = Duration::from_secs(1);
/// For the peer to say that its pair is gone.
const FENCE: Duration = Duration::from_millis(500);
/// For a queue pair to be brought up: a peer that takes longer is reached otherwise.
const CONNECT: Duration = Duration::from_millis(500);
/// And at least, where another rail waits.
const CONNECT_AT_LEAST: Duration = Duration::from_millis(50);
/// A pair on which no work ended for this long, and that is overdue, is taken for silent.
const SILENT_AFTER: Duration = Duration::from_millis(20);

/// A queue pair and the connection that it lives by.
pub(super) struct Connected {
    pub(super) pair: QueuePair,
    pub(super) lifeline: Stream,
    /// What the peer calls that connection.
    number: u64,
    /// Of the port, when the pair was connected.
    epoch: u64,
}

/// A group whose work is planned, in part or whole posted.
struct Carried {
    group: Group,
    /// Pieces that are done.
    done: u32,
}

/// What is remembered of posted work.
struct Posted {
    pieces: u32,
    bytes: u64,
    is_last: bool,
}

/// See the module.
#[derive(Default)]
pub(super) struct Lane {
    connected: Option<Connected>,
    carried: VecDeque<Carried>,
    /// Not posted yet, with whether it is a group's last.
    planned: VecDeque<(PlannedWork, Way, bool)>,
    /// Local ranges of planned work, in its order.
    ranges: VecDeque<LocalRange>,
    posted: VecDeque<Posted>,
    /// Bytes planned and posted.
    bytes: u64,
    unsignalled: usize,
    ended: Vec<(u64, Status)>,
    looked: Option<Instant>,
    /// Since when something on its way should be stopped.
    stopping_since: Option<Instant>,
    /// When work ended last, or began on an idle pair.
    moved_at: Option<Instant>,
}

impl Connected {
    /// Brings up a queue pair.
    pub(super) fn open(shared: &Shared, deadline: Instant) -> Result<Self, Failure> {
        let (now, epoch) = shared.device.port(shared.port).ok_or(Failure::Unreachable)?;
        if now.gid.is_none() {
            return Err(Failure::Unreachable);
        }
        let tls = shared.settings.tls.as_ref();
        let lifeline = handshake::dial(&shared.address, tls, &shared.greeting, shared.instance, deadline);
        let (lifeline, number) = lifeline.map_err(|error| error.failure)?;
        let depth = shared.settings.rdma.depth;
        let pair = handshake::connect(&shared.device, shared.port, depth, &shared.peer_port, &lifeline, deadline)?;
        Ok(Self { pair, lifeline, number, epoch })
    }

    /// Makes a round trip without a byte, to see that packets arrive.
    pub(super) fn check(&mut self, deadline: Instant) -> Result<(), Failure> {
        let nothing = Work { way: Way::Write, local: &[], remote_address: 0, rkey: 0, is_signalled: true };
        self.pair.post(&[nothing]).map_err(|_| Failure::System)?;
        let mut ended = Vec::new();
        while !self.pair.poll(&mut ended).map_err(|_| Failure::System)? {
            let now = Instant::now();
            if now >= deadline {
                return Err(Failure::Silent);
            }
            self.sleep(LOOK.min(deadline - now))?;
        }
        ended.into_iter().try_for_each(|(_, status)| failure(status).map_or(Ok(()), Err))
    }

    /// Waits for a completion or the peer's end; completions that came before are noticed.
    fn sleep(&mut self, timeout: Duration) -> Result<(), Failure> {
        use rustix::event::{PollFd, Timespec, poll};
        self.pair.arm().map_err(|_| Failure::System)?;
        let (events, lifeline) = (self.pair.events(), self.lifeline.as_fd());
        let mut waiting =
            [PollFd::from_borrowed_fd(events, PollFlags::IN), PollFd::from_borrowed_fd(lifeline, PollFlags::IN)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(timeout.subsec_nanos()) };
        // Interrupted or failed: the caller looks again, at most once a look.
        let _ = poll(&mut waiting, Some(&timeout));
        self.pair.take_events();
        Ok(())
    }

    /// Whether the peer ended the connection, or said something, which it never does.
    fn is_over(&self) -> bool {
        let events = crate::lend::poll(self.lifeline.as_fd(), PollFlags::IN, Duration::ZERO);
        events.map_or(true, |events| !events.is_empty())
    }
}

/// What the status of a work request says, other than success.
fn failure(status: Status) -> Option<Failure> {
    match status {
        Status::Success => None,
        Status::RemoteAccess => Some(Failure::NoRegion),
        Status::RetriesExceeded => Some(Failure::Silent),
        Status::Flushed | Status::Other(_) => Some(Failure::ConnectionLost),
        Status::Local(_) => Some(Failure::System),
    }
}

impl Lane {
    /// Gives it a queue pair that is up.
    pub(super) fn adopt(&mut self, connected: Connected) {
        self.connected = Some(connected);
    }

    /// Drives it until everything that the source gives has ended.
    pub(super) fn run(&mut self, shared: &Shared, source: &mut Source<'_>) {
        loop {
            match self.advance(shared, source) {
                Ok(true) => return,
                Ok(false) => {}
                Err(trouble) => {
                    let trouble = self.give_up(trouble);
                    if matches!(trouble, Trouble::Failed(_) | Trouble::Overdue { is_silent: true }) {
                        source.hand_back(shared);
                    }
                }
            }
        }
    }

    /// One step; whether there is nothing left.
    fn advance(&mut self, shared: &Shared, source: &mut Source<'_>) -> Result<bool, Trouble> {
        self.fill(shared, source)?;
        if self.carried.is_empty() {
            return Ok(true);
        }
        self.wait(shared, source)?;
        Ok(false)
    }

    /// Takes groups while there is room, and posts their work.
    fn fill(&mut self, shared: &Shared, source: &mut Source<'_>) -> Result<(), Failure> {
        loop {
            self.post()?;
            if !self.planned.is_empty() || self.bytes >= WINDOW_BYTES.max(shared.settings.window_bytes) {
                return Ok(());
            }
            let Some(group) = source.next(shared) else { return Ok(()) };
            let stopped = if shared.is_closed() { Some(Failure::Closed) } else { None };
            if let Some(reason) = stopped.or_else(|| group.batch.stop_reason(Instant::now())) {
                group.finish(Err(reason));
                continue;
            }
            if !group.fences.is_empty() {
                // The peer has to end a connection before it takes these bytes: only TCP can ask for that.
                group.hand_back_for(Trouble::Overdue { is_silent: false });
                continue;
            }
            if let Err(trouble) = self.connect(shared, &group) {
                group.hand_back_for(trouble);
                source.hand_back(shared);
                continue;
            }
            if self.plan(shared, &group).is_none() {
                // `reaches` said otherwise when it was chosen: the region was withdrawn since.
                group.hand_back(Failure::System);
                continue;
            }
            if self.carried.is_empty() {
                self.moved_at = Some(Instant::now());
            }
            self.carried.push_back(Carried { group, done: 0 });
        }
    }

    fn connect(&mut self, shared: &Shared, group: &Group) -> Result<(), Trouble> {
        if self.carried.is_empty() && self.connected.as_ref().is_some_and(|connected| self.is_stale(connected, shared))
        {
            self.connected = None;
        }
        if self.connected.is_some() {
            return Ok(());
        }
        let now = Instant::now();
        let deadline = group.batch.deadline.min(now + CONNECT.min(shared.settings.connect_timeout));
        // Where another rail is there, a connection may take no longer than the group would, if that is long enough for one.
        let patience = group.patience().map(|patience| patience.max(now + CONNECT_AT_LEAST));
        match Connected::open(shared, patience.map_or(deadline, |patience| deadline.min(patience))) {
            Ok(connected) => {
                self.connected = Some(connected);
                Ok(())
            }
            Err(_) if patience.is_some_and(|patience| Instant::now() >= patience) => {
                Err(Trouble::Overdue { is_silent: false })
            }
            Err(failure) => Err(failure.into()),
        }
    }

    /// Whether an idle pair is of no use any more: its peer or its address has gone.
    fn is_stale(&self, connected: &Connected, shared: &Shared) -> bool {
        connected.epoch != shared.device.epoch(shared.port) || connected.is_over()
    }

    fn plan(&mut self, shared: &Shared, group: &Group) -> Option<()> {
        let connected = self.connected.as_ref()?;
        let (now, _) = shared.device.port(shared.port)?;
        let bytes = u64::from(now.max_message_bytes).min(WORK_BYTES);
        let limits = WorkLimits { ranges: connected.pair.ranges(), bytes };
        let regions = &group.batch.regions;
        let of = |region: u32| DeviceRegion::of(&regions[region as usize], shared.device.index);
        let left = |piece: &Piece, offset: u64| Some(of(piece.region)?.range(offset, u64::MAX)?.length.into());
        let remote = |piece: &Piece, offset: u64, length: u64| {
            let keys = &group.batch.segments[piece.segment as usize].rdma_keys;
            let (address, rkey, length) = keys.range(shared.peer_port.device.into(), offset, length)?;
            Some(RemoteExtent { address, rkey, length })
        };
        let (works, extents) = plan(group.pieces(), limits, left, remote)?;
        let ranges: Vec<LocalRange> = extents
            .iter()
            .map(|extent| of(extent.region)?.range(extent.offset, extent.length))
            .collect::<Option<_>>()?;
        let way = if group.direction == Direction::Read { Way::Read } else { Way::Write };
        let last = works.len() - 1;
        self.bytes += works.iter().map(|work| work.bytes).sum::<u64>();
        self.planned.extend(works.into_iter().enumerate().map(|(index, work)| (work, way, index == last)));
        self.ranges.extend(ranges);
        Some(())
    }

    /// Posts planned work while the pair has room, as lists.
    fn post(&mut self) -> Result<(), Failure> {
        let Some(connected) = &mut self.connected else { return Ok(()) };
        while !self.planned.is_empty() && connected.pair.room() > 0 {
            let count = self.planned.len().min(connected.pair.room()).min(LIST);
            let is_full = count == connected.pair.room();
            let mut ranges: &[LocalRange] = self.ranges.make_contiguous();
            let mut list: ArrayVec<Work<'_>, LIST> = ArrayVec::new();
            let mut used = 0;
            for (index, (work, way, is_last)) in self.planned.iter().take(count).enumerate() {
                let (local, rest) = ranges.split_at(work.extents);
                ranges = rest;
                used += work.extents;
                self.unsignalled += 1;
                // The last that fits always is: its completion makes room.
                let is_signalled = *is_last || self.unsignalled >= SIGNAL_EVERY || (is_full && index + 1 == count);
                if is_signalled {
                    self.unsignalled = 0;
                }
                list.push(Work { way: *way, local, remote_address: work.address, rkey: work.rkey, is_signalled });
            }
            let posted = connected.pair.post(&list);
            drop(list);
            self.ranges.drain(..used);
            for (work, _, is_last) in self.planned.drain(..count) {
                self.posted.push_back(Posted { pieces: work.pieces, bytes: work.bytes, is_last });
            }
            if let Err(error) = posted {
                tracing::warn!(%error, "RDMA work can't be posted");
                return Err(Failure::System);
            }
        }
        Ok(())
    }

    /// Takes completions; sleeps if there are none.
    fn wait(&mut self, shared: &Shared, source: &mut Source<'_>) -> Result<(), Trouble> {
        let begun = Instant::now();
        let mut now = begun;
        loop {
            if self.poll()? {
                break;
            }
            now = Instant::now();
            let spun = now - begun;
            if spun < SPIN || (shared.settings.rdma.completion == Completion::Poll && spun < LOOK) {
                std::hint::spin_loop();
                continue;
            }
            if shared.settings.rdma.completion == Completion::Event
                && let Some(connected) = &mut self.connected
            {
                // Armed first, polled then: a completion in between is not slept over.
                connected.pair.arm().map_err(|_| Failure::System)?;
                if !self.poll()?
                    && let Some(connected) = &mut self.connected
                {
                    connected.sleep(LOOK)?;
                    self.poll()?;
                }
            }
            break;
        }
        if self.looked.is_none_or(|looked| now.saturating_duration_since(looked) >= LOOK) {
            self.looked = Some(now);
            self.look(shared, source, now)?;
        }
        Ok(())
    }

    /// Takes what has ended; whether something had.
    fn poll(&mut self) -> Result<bool, Failure> {
        let Some(connected) = &mut self.connected else { return Ok(false) };
        self.ended.clear();
        if !connected.pair.poll(&mut self.ended).map_err(|_| Failure::System)? {
            return Ok(false);
        }
        self.moved_at = Some(Instant::now());
        self.settle()?;
        Ok(true)
    }

    /// Ends groups whose work has ended well; stops at the first that has not, and leaves it in `ended`.
    fn settle(&mut self) -> Result<(), Failure> {
        let mut ended = std::mem::take(&mut self.ended).into_iter();
        for (_, status) in ended.by_ref() {
            if let Some(failure) = failure(status) {
                self.ended = vec![(0, status)];
                return Err(failure);
            }
            let (Some(work), Some(first)) = (self.posted.pop_front(), self.carried.front_mut()) else {
                return Err(Failure::System);
            };
            self.bytes -= work.bytes;
            first.done += work.pieces;
            if work.is_last
                && let Some(carried) = self.carried.pop_front()
            {
                carried.group.finish(Ok(()));
            }
        }
        Ok(())
    }

    /// Looks whether the way is still good, and what it carries still wanted.
    fn look(&mut self, shared: &Shared, source: &mut Source<'_>, now: Instant) -> Result<(), Trouble> {
        source.purge(shared, now);
        if shared.is_closed() {
            return Err(Failure::Closed.into());
        }
        if let Some(connected) = &self.connected {
            if connected.is_over() {
                return Err(Failure::ConnectionLost.into());
            }
            if connected.epoch != shared.device.epoch(shared.port) {
                return Err(Failure::Unreachable.into());
            }
        }
        if let Some(carried) = self.carried.front() {
            carried.group.look_around(now);
        }
        if self.carried.iter_mut().any(|carried| carried.group.is_overdue(now)) {
            let silent_for = self.moved_at.map_or_else(Default::default, |moved| now.saturating_duration_since(moved));
            return Err(Trouble::Overdue { is_silent: silent_for >= SILENT_AFTER });
        }
        if !self.carried.iter().any(|carried| carried.group.batch.stop_reason(now).is_some()) {
            self.stopping_since = None;
            return Ok(());
        }
        let since = *self.stopping_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= GRACE { Err(Trouble::Innocent) } else { Ok(()) }
    }

    /// Ends the pair, and everything that it carries. `trouble` is why; what the device refused is in `ended`. Gives what is
    /// to be said of the rail.
    fn give_up(&mut self, trouble: Trouble) -> Trouble {
        self.stopping_since = None;
        let mut refused = self.ended.first().map(|(_, status)| *status);
        let has_writes = self.carried.iter().any(|carried| carried.group.direction == Direction::Write);
        let mut fence = None;
        if let Some(mut connected) = self.connected.take() {
            self.drain(&mut connected, &mut refused);
            let Connected { pair, lifeline, number, .. } = connected;
            // From here on the device touches no memory on behalf of this work.
            drop(pair);
            if has_writes && !self.posted.is_empty() && !hear_the_end(&lifeline, FENCE) {
                fence = Some(number);
            }
        }
        self.ended.clear();
        let refused_pieces = match refused {
            Some(Status::RemoteAccess) => self.posted.front().map_or(0, |work| work.pieces.max(1)),
            _ => 0,
        };
        self.posted.clear();
        self.planned.clear();
        self.ranges.clear();
        (self.bytes, self.unsignalled) = (0, 0);
        // What shared the pair with a work that was refused is innocent.
        let trouble = if refused_pieces > 0 { Trouble::Innocent } else { trouble };
        let now = Instant::now();
        for (index, Carried { group, done }) in std::mem::take(&mut self.carried).into_iter().enumerate() {
            let (ended, rest) = group.split_at(done);
            ended.into_iter().for_each(|group| group.finish(Ok(())));
            let (bad, rest) = match rest {
                Some(rest) if index == 0 && refused_pieces > 0 => rest.split_at(refused_pieces),
                rest => (None, rest),
            };
            bad.into_iter().for_each(|group| group.finish(Err(Failure::NoRegion)));
            let Some(mut rest) = rest else { continue };
            if let Some(reason) = rest.batch.stop_reason(now) {
                rest.finish(Err(reason));
                continue;
            }
            fence.into_iter().for_each(|number| rest.fence(number));
            let is_late = rest.overdue_at().is_some_and(|overdue| overdue <= now);
            let is_innocent = matches!(trouble, Trouble::Overdue { .. }) && !is_late;
            rest.hand_back_for(if is_innocent { Trouble::Innocent } else { trouble });
        }
        trouble
    }

    /// Stops the pair and takes completions until none is missing. What ends well meanwhile has ended well.
    fn drain(&mut self, connected: &mut Connected, refused: &mut Option<Status>) {
        if let Err(error) = connected.pair.stop() {
            tracing::debug!(%error, "RDMA queue pair can't be stopped: it is destroyed");
        }
        let until = Instant::now() + DRAIN;
        while connected.pair.in_flight() > 0 && Instant::now() < until {
            self.ended.clear();
            match connected.pair.poll(&mut self.ended) {
                Ok(true) if refused.is_none() => {
                    if self.settle().is_err() {
                        *refused = self.ended.first().map(|(_, status)| *status);
                    }
                }
                Ok(true) => {}
                Ok(false) if connected.sleep(LOOK).is_ok() => {}
                _ => break,
            }
        }
    }
}
