//! A batch on its way: every request ends exactly once, with success or a reason.
//!
//! ```text
//! request:   waiting --cut into pieces--> moving --last piece finished--> ended: Ok, or the first piece's failure
//! batch:     running --last request ended--> ended        stop reason: none -> cancelled | deadline passed | closed
//! ```
//!
//! A *piece* is what one frame item or one copy moves: a request, or a part of a large one. A *group* is a run of
//! pieces of one direction and one segment that a link takes as one. Who takes a group finishes each of its pieces once
//! (`finish` says so with an assertion), or hands the group back to its peer's rails. A stop reason ends nothing by itself: the holder of a piece looks at it where it can stop
//! without letting bytes arrive later, and finishes the piece with it.
//!
//! Invariant: `open` = requests not ended; region uses are held until `open` is 0.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::Failure;
use crate::peer::Segment;
use crate::rails::{RailIndex, Trouble};
use crate::region::{Region, RegionUse, RemoteAccess};
use crate::schedule::Priority;
use crate::slice::Direction;

/// An overdue group that no other rail would be quicker with is looked at again after this.
const OVERDUE_AGAIN: Duration = Duration::from_millis(5);

/// A group that was overdue on so many rails stays where it is: all of them are slow.
pub(crate) const MOVES_MAX: u8 = 8;

/// A part of a request that moves as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) direction: Direction,
    /// Place of its request in the batch.
    pub(crate) request: u32,
    /// Place of its region in the batch's list.
    pub(crate) region: u32,
    /// Place of its segment in the batch's list.
    pub(crate) segment: u32,
    pub(crate) local_offset: u64,
    pub(crate) remote_offset: u64,
    /// Not 0.
    pub(crate) length: u64,
}

impl Piece {
    /// Cuts it into parts of `piece_bytes`; a last part of less than an eighth of that stays with the one before.
    pub(crate) fn cut(self, piece_bytes: u64) -> impl Iterator<Item = Self> {
        let mut rest = self;
        let tail = piece_bytes / 8;
        std::iter::from_fn(move || {
            if rest.length == 0 {
                return None;
            }
            let length = if rest.length <= piece_bytes + tail { rest.length } else { piece_bytes };
            let part = Self { length, ..rest };
            rest.local_offset += length;
            rest.remote_offset += length;
            rest.length -= length;
            Some(part)
        })
    }
}

/// Pieces that a link takes as one: all of one direction, at most as many and as long as its limits say.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) batch: Arc<BatchState>,
    pub(crate) first: u32,
    pub(crate) count: u32,
    pub(crate) bytes: u64,
    pub(crate) direction: Direction,
    /// Rails that may take it, a bit each.
    pub(crate) may: u64,
    /// The rail that has it.
    pub(crate) rail: RailIndex,
    /// How the rail was chosen, if there was a choice.
    pub(crate) placement: Option<Placement>,
    /// Rails that failed it, a bit each.
    pub(crate) tried: u64,
    /// How often it left a rail because it was overdue, and the last of these, a bit.
    pub(crate) moves: u8,
    pub(crate) left: u64,
    /// Why the last of them failed.
    pub(crate) failure: Option<Failure>,
    /// How often it was handed back when there was no other rail.
    pub(crate) attempts: u8,
    /// Connections that the peer has to end before it takes these bytes: they carried them before, and may still.
    pub(crate) fences: Vec<u64>,
}

/// When a group was given to one of several rails.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement {
    pub(crate) at: Instant,
    /// From then on it is asked whether another rail would be quicker.
    pub(crate) overdue: Instant,
}

impl Group {
    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.batch.pieces[self.first as usize..(self.first + self.count) as usize]
    }

    /// Ends all pieces alike: with success, with what the peer said of them, or with a stop reason.
    pub(crate) fn finish(self, result: Result<(), Failure>) {
        self.finish_each(|_| result);
    }

    /// Ends each piece, in order, with what `result` says of it.
    pub(crate) fn finish_each(self, mut result: impl FnMut(&Piece) -> Result<(), Failure>) {
        let (mut moved, mut ended) = (0, 0);
        for piece in self.pieces() {
            let result = result(piece);
            moved += if result.is_ok() { piece.length } else { 0 };
            ended += u32::from(self.batch.finish_piece(piece, result));
        }
        self.batch.end_requests(ended);
        if let Some(segment) = self.segment() {
            segment.peer.rails.finished(self.rail, self.bytes, moved, &self.batch, self.placement);
        }
    }

    /// Gives the group back because the way failed: another rail takes it, or it ends with the failure. No byte of it may
    /// arrive any more, or only over a connection that [`Group::fence`] names.
    pub(crate) fn hand_back(self, failure: Failure) {
        self.hand_back_for(Trouble::Failed(failure));
    }

    /// The same, for any reason.
    pub(crate) fn hand_back_for(self, trouble: Trouble) {
        let Some(segment) = self.segment().map(Arc::clone) else { return };
        if segment.peer.rails.handed_back(self, trouble) {
            segment.peer.prober.watch(&segment.peer);
        }
    }

    /// Bytes of this write may still be on their way over that connection to the peer: it has to end it first.
    pub(crate) fn fence(&mut self, connection: u64) {
        if self.direction == Direction::Write && !self.fences.contains(&connection) {
            self.fences.push(connection);
        }
    }

    /// When to ask [`Group::is_overdue`]; `None` if there is no other rail.
    pub(crate) fn overdue_at(&self) -> Option<Instant> {
        self.placement.map(|placement| placement.overdue)
    }

    /// Whether it should be handed back now because another rail would be quicker. If not, it is asked again later.
    pub(crate) fn is_overdue(&mut self, now: Instant) -> bool {
        let Some(placement) = self.placement.filter(|placement| placement.overdue <= now) else { return false };
        if self.moves >= MOVES_MAX {
            self.placement = Some(Placement { overdue: self.batch.deadline, ..placement });
            return false;
        }
        let should_move = self.segment().is_some_and(|segment| segment.peer.rails.should_move(self, placement.at, now));
        if !should_move {
            self.placement = Some(Placement { overdue: now + OVERDUE_AGAIN, ..placement });
        }
        should_move
    }

    /// The same pieces as a batch of its own, for whose end the caller answers; it is never moved to another rail.
    #[cfg(feature = "faults")]
    pub(crate) fn copy(&self) -> (Self, Arc<BatchState>) {
        let pieces: Vec<_> = self.pieces().to_vec();
        let of = &self.batch;
        let state = BatchState {
            pieces: pieces.into_boxed_slice(),
            regions: of.regions.clone(),
            segments: of.segments.clone(),
            requests: (of.requests.iter())
                .enumerate()
                .map(|(index, _)| {
                    let left = self.pieces().iter().filter(|piece| piece.request as usize == index).count();
                    RequestState { pieces_left: AtomicU32::new(left as u32), failure: AtomicU8::new(0) }
                })
                .collect(),
            ..BatchState::new(0, Vec::new(), Vec::new(), Vec::new(), of.deadline, of.priority)
        };
        let open = state.requests_left();
        state.open.store(open as u32, Ordering::Release);
        state.ending.lock().has_ended = false;
        let state = Arc::new(state);
        let copy = Self {
            batch: Arc::clone(&state),
            first: 0,
            placement: None,
            tried: u64::MAX,
            failure: None,
            attempts: u8::MAX - 1,
            fences: self.fences.clone(),
            ..*self
        };
        (copy, state)
    }

    /// Until when a connection for it may take, so that another rail can still have it; `None` if there is no other.
    #[cfg(feature = "rdma")]
    pub(crate) fn patience(&self) -> Option<Instant> {
        let has_other = || self.segment().is_some_and(|segment| segment.peer.rails.others(self) != 0);
        self.overdue_at().filter(|_| has_other())
    }

    /// Lets the rails end what waits for them and was stopped: to be called once a tick by who holds groups.
    pub(crate) fn look_around(&self, now: Instant) {
        if let Some(segment) = self.segment() {
            segment.peer.rails.look_around(now);
        }
    }

    fn segment(&self) -> Option<&Arc<Segment>> {
        self.batch.segments.get(self.pieces()[0].segment as usize)
    }

    /// The first `count` pieces and the others, each as a group of its own if there are any.
    #[cfg(feature = "rdma")]
    pub(crate) fn split_at(self, count: u32) -> (Option<Self>, Option<Self>) {
        let count = count.min(self.count);
        let part = |first: u32, count: u32| {
            let pieces = &self.batch.pieces[first as usize..(first + count) as usize];
            let bytes = pieces.iter().map(|piece| piece.length).sum();
            let fences = self.fences.clone();
            (count > 0).then(|| Self { batch: Arc::clone(&self.batch), first, count, bytes, fences, ..self })
        };
        (part(self.first, count), part(self.first + count, self.count - count))
    }

    /// Cuts a run of pieces into groups of at most `items` pieces and about `bytes` bytes.
    pub(crate) fn cut(
        batch: &Arc<BatchState>,
        run: std::ops::Range<usize>,
        items: usize,
        bytes: u64,
        may: u64,
    ) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::with_capacity(1 + run.len() / items);
        for index in run {
            let piece = &batch.pieces[index];
            match groups.last_mut() {
                Some(last)
                    if last.direction == piece.direction
                        && (last.count as usize) < items
                        && last.bytes + piece.length <= bytes =>
                {
                    last.count += 1;
                    last.bytes += piece.length;
                }
                _ => groups.push(Self {
                    batch: Arc::clone(batch),
                    first: index as u32,
                    count: 1,
                    bytes: piece.length,
                    direction: piece.direction,
                    may,
                    rail: 0,
                    placement: None,
                    tried: 0,
                    moves: 0,
                    left: 0,
                    failure: None,
                    attempts: 0,
                    fences: Vec::new(),
                }),
            }
        }
        groups
    }
}

/// What a request still waits for, and why it failed.
#[derive(Debug)]
struct RequestState {
    pieces_left: AtomicU32,
    /// Number of the first failure, 0 for none.
    failure: AtomicU8,
}

/// Runs when the batch has ended, before anybody hears of it.
type OnEnd = Box<dyn FnOnce(&BatchState) + Send>;
/// Runs when the last request has ended and a notification is due; leads to one call of `finish_notification`.
type OnTransferred = Box<dyn FnOnce() + Send>;

/// All that is known of a batch on its way.
pub(crate) struct BatchState {
    pub(crate) pieces: Box<[Piece]>,
    pub(crate) regions: Box<[Arc<Region>]>,
    pub(crate) segments: Box<[Arc<Segment>]>,
    pub(crate) deadline: Instant,
    pub(crate) priority: Priority,
    requests: Box<[RequestState]>,
    open: AtomicU32,
    /// Number of the stop reason, 0 for none.
    stop: AtomicU8,
    uses: Mutex<Vec<RegionUse>>,
    on_end: Mutex<Option<OnEnd>>,
    on_transferred: Mutex<Option<OnTransferred>>,
    ending: Mutex<Ending>,
    ended: Condvar,
}

#[derive(Default)]
struct Ending {
    has_ended: bool,
    waker: Option<Waker>,
}

impl std::fmt::Debug for BatchState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchState").field("requests", &self.requests.len()).field("open", &self.open).finish()
    }
}

impl BatchState {
    /// A batch of `requests` requests that move as `pieces`. Requests without a piece have ended.
    pub(crate) fn new(
        requests: usize,
        pieces: Vec<Piece>,
        uses: Vec<RegionUse>,
        segments: Vec<Arc<Segment>>,
        deadline: Instant,
        priority: Priority,
    ) -> Self {
        let mut left = vec![0_u32; requests];
        for piece in &pieces {
            left[piece.request as usize] += 1;
        }
        let open = left.iter().filter(|left| **left > 0).count() as u32;
        let request = |left| RequestState { pieces_left: AtomicU32::new(left), failure: AtomicU8::new(0) };
        Self {
            pieces: pieces.into_boxed_slice(),
            regions: uses.iter().map(|used| Arc::clone(used.region())).collect(),
            segments: segments.into_boxed_slice(),
            deadline,
            priority,
            requests: left.into_iter().map(request).collect(),
            open: AtomicU32::new(open),
            stop: AtomicU8::new(0),
            uses: Mutex::new(if open == 0 { Vec::new() } else { uses }),
            on_end: Mutex::new(None),
            on_transferred: Mutex::new(None),
            ending: Mutex::new(Ending { has_ended: open == 0, waker: None }),
            ended: Condvar::new(),
        }
    }

    /// Says what to do at the end. Only before the batch is posted.
    pub(crate) fn set_on_end(&self, on_end: OnEnd) {
        *self.on_end.lock() = Some(on_end);
    }

    /// Lets the batch end only with `finish_notification`, which what `on_transferred` begins has to lead to. Only before
    /// the batch is posted.
    pub(crate) fn set_on_transferred(&self, on_transferred: OnTransferred) {
        self.ending.lock().has_ended = false;
        if self.open.fetch_add(1, Ordering::AcqRel) == 0 {
            on_transferred();
        } else {
            *self.on_transferred.lock() = Some(on_transferred);
        }
    }

    /// Ends the notification's part.
    pub(crate) fn finish_notification(&self) {
        if self.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.end();
        }
    }

    /// Ends one piece. Each piece is finished once.
    #[cfg(test)]
    fn finish(&self, piece: &Piece, result: Result<(), Failure>) {
        self.end_requests(u32::from(self.finish_piece(piece, result)));
    }

    /// Ends one piece; `true` if its request has ended with it, which the caller then says to `end_requests`.
    fn finish_piece(&self, piece: &Piece, result: Result<(), Failure>) -> bool {
        let request = &self.requests[piece.request as usize];
        if let Err(failure) = result {
            // The first failure stays.
            let _ = request.failure.compare_exchange(0, failure as u8, Ordering::AcqRel, Ordering::Acquire);
        }
        let before = request.pieces_left.fetch_sub(1, Ordering::AcqRel);
        assert!(before > 0, "a piece of request {} finished twice", piece.request);
        before == 1
    }

    fn end_requests(&self, ended: u32) {
        if ended == 0 {
            return;
        }
        match self.open.fetch_sub(ended, Ordering::AcqRel) - ended {
            0 => self.end(),
            1 => {
                // Either one request is left, or the notification, which takes over.
                let on_transferred = if self.requests_left() == 0 { self.on_transferred.lock().take() } else { None };
                if let Some(on_transferred) = on_transferred {
                    on_transferred();
                }
            }
            _ => {}
        }
    }

    fn requests_left(&self) -> usize {
        self.requests.iter().filter(|request| request.pieces_left.load(Ordering::Acquire) > 0).count()
    }

    fn end(&self) {
        let uses = std::mem::take(&mut *self.uses.lock());
        let on_end = self.on_end.lock().take();
        if let Some(on_end) = on_end {
            on_end(self);
        }
        let waker = {
            let mut ending = self.ending.lock();
            ending.has_ended = true;
            ending.waker.take()
        };
        // Whoever waits for the regions finds the batch ended.
        drop(uses);
        self.ended.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Asks the holders of its pieces to stop. The first reason stays.
    pub(crate) fn stop(&self, reason: Failure) {
        let _ = self.stop.compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Why its pieces should stop, if they should. Passing of the deadline is noticed here.
    pub(crate) fn stop_reason(&self, now: Instant) -> Option<Failure> {
        if now >= self.deadline {
            self.stop(Failure::DeadlinePassed);
        }
        Failure::from_code(self.stop.load(Ordering::Acquire))
    }

    /// Whether all requests have ended and everybody may hear of it.
    pub(crate) fn has_ended(&self) -> bool {
        self.ending.lock().has_ended
    }

    /// Whether no piece is left to anyone; `has_ended` follows.
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }

    /// Waits for the end; `false` if it is not there at `until`.
    pub(crate) fn wait_until(&self, until: Option<Instant>) -> bool {
        let mut ending = self.ending.lock();
        while !ending.has_ended {
            match until {
                None => self.ended.wait(&mut ending),
                Some(until) if self.ended.wait_until(&mut ending, until).timed_out() => return ending.has_ended,
                Some(_) => {}
            }
        }
        true
    }

    fn poll(&self, context: &Context<'_>) -> Poll<()> {
        let mut ending = self.ending.lock();
        if ending.has_ended {
            return Poll::Ready(());
        }
        match &ending.waker {
            Some(waker) if waker.will_wake(context.waker()) => {}
            _ => ending.waker = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// What became of a request; meaningful once it has ended.
    fn result(&self, request: usize) -> Result<(), Failure> {
        match Failure::from_code(self.requests[request].failure.load(Ordering::Acquire)) {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    /// Whether every request succeeded; meaningful at the end.
    pub(crate) fn succeeded(&self) -> bool {
        self.requests.iter().all(|request| request.failure.load(Ordering::Acquire) == 0)
    }

    /// What the peer is asked for on behalf of a piece.
    pub(crate) fn remote_access(&self, piece: &Piece) -> RemoteAccess {
        let segment = &self.segments[piece.segment as usize];
        RemoteAccess {
            direction: piece.direction,
            region: segment.info.region,
            key: segment.info.key,
            offset: piece.remote_offset,
            length: piece.length,
        }
    }
}

/// What became of a batch: one result a request, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// One a request.
    pub results: Vec<Result<(), Failure>>,
    /// Of the notification, if one was asked for: it leaves when all requests have succeeded.
    pub notification: Option<Result<(), Failure>>,
}

impl Outcome {
    /// The first failure, be it of the notification.
    ///
    /// # Errors
    /// That failure.
    pub fn all(&self) -> Result<(), Failure> {
        self.results.iter().copied().collect::<Result<(), _>>()?;
        self.notification.unwrap_or(Ok(()))
    }
}

/// A submitted batch. It goes on when this is dropped; [`Batch::cancel`] before, if nobody wants its result.
///
/// A future: it is ready when the batch has ended, and may be dropped and polled anew.
#[derive(Debug)]
pub struct Batch {
    pub(crate) state: Arc<BatchState>,
    pub(crate) notification: Arc<Mutex<Option<Result<(), Failure>>>>,
}

impl Batch {
    /// Waits until every request has ended. Bounded by the batch's deadline plus what a link takes to let go (50 ms).
    #[must_use]
    pub fn wait(&self) -> Outcome {
        self.state.wait_until(None);
        self.outcome()
    }

    /// The same, for at most until `until`; the batch goes on after that.
    #[must_use]
    pub fn wait_until(&self, until: Instant) -> Option<Outcome> {
        self.state.wait_until(Some(until)).then(|| self.outcome())
    }

    /// The outcome, if the batch has ended.
    #[must_use]
    pub fn poll(&self) -> Option<Outcome> {
        self.state.has_ended().then(|| self.outcome())
    }

    /// Asks for its end. Requests that are not done end as [`Failure::Cancelled`]; each ends only once no byte can
    /// arrive in its memory any more, within 50 ms.
    pub fn cancel(&self) {
        self.state.stop(Failure::Cancelled);
    }

    fn outcome(&self) -> Outcome {
        let results = (0..self.state.requests.len()).map(|request| self.state.result(request)).collect();
        Outcome { results, notification: *self.notification.lock() }
    }
}

impl Future for Batch {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        self.state.poll(context).map(|()| self.outcome())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(request: u32, length: u64) -> Piece {
        Piece { direction: Direction::Read, request, region: 0, segment: 0, local_offset: 0, remote_offset: 0, length }
    }

    fn batch(requests: usize, pieces: Vec<Piece>) -> Arc<BatchState> {
        let deadline = Instant::now() + Duration::from_secs(60);
        Arc::new(BatchState::new(requests, pieces, Vec::new(), Vec::new(), deadline, Priority::Latency))
    }

    #[test]
    fn a_request_ends_with_its_last_piece_and_its_first_failure() {
        let batch = batch(2, vec![piece(0, 1), piece(0, 1), piece(1, 1)]);
        batch.finish(&piece(0, 1), Err(Failure::Silent));
        batch.finish(&piece(1, 1), Ok(()));
        assert!(batch.is_open());
        batch.finish(&piece(0, 1), Err(Failure::Protocol));
        assert!(batch.has_ended());
        assert_eq!((batch.result(0), batch.result(1)), (Err(Failure::Silent), Ok(())));
        assert!(!batch.succeeded());
    }

    #[test]
    #[should_panic(expected = "finished twice")]
    fn a_piece_cant_finish_twice() {
        let batch = batch(2, vec![piece(0, 1), piece(1, 1)]);
        batch.finish(&piece(0, 1), Ok(()));
        batch.finish(&piece(0, 1), Ok(()));
    }

    #[test]
    fn a_batch_of_nothing_has_ended() {
        assert!(batch(0, Vec::new()).has_ended());
        let zero_length_only = batch(3, Vec::new());
        assert!(zero_length_only.has_ended() && zero_length_only.succeeded());
    }

    #[test]
    fn the_first_stop_reason_stays() {
        let batch = batch(1, vec![piece(0, 1)]);
        assert_eq!(batch.stop_reason(Instant::now()), None);
        batch.stop(Failure::Cancelled);
        let late = batch.deadline + Duration::from_secs(1);
        assert_eq!(batch.stop_reason(late), Some(Failure::Cancelled));
    }

    #[test]
    fn the_end_does_its_work_before_anybody_hears_of_it() {
        let batch = batch(1, vec![piece(0, 1)]);
        let (tell, told) = std::sync::mpsc::channel();
        batch.set_on_end(Box::new(move |batch| tell.send(batch.ending.lock().has_ended).expect("told")));
        batch.finish(&piece(0, 1), Ok(()));
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [false]);
        assert!(batch.wait_until(Some(Instant::now())));
    }

    #[test]
    fn a_notification_is_due_after_the_last_request_and_before_the_end() {
        for pieces in [Vec::new(), vec![piece(0, 1), piece(0, 1)]] {
            let batch = batch(1, pieces.clone());
            let (tell, told) = std::sync::mpsc::channel();
            batch.set_on_transferred(Box::new(move || tell.send(()).expect("told")));
            for piece in &pieces {
                assert!(told.try_recv().is_err());
                batch.finish(piece, Ok(()));
            }
            told.try_recv().expect("due");
            assert!(!batch.has_ended());
            batch.finish_notification();
            assert!(batch.has_ended());
        }
    }

    #[test]
    fn pieces_cover_their_request_without_small_tails() {
        for length in [1_u64, 4096, 1 << 20, (1 << 20) + 1, (1 << 20) + (1 << 17), (1 << 20) + (1 << 17) + 1, 7 << 20] {
            let parts: Vec<_> = Piece { local_offset: 5, remote_offset: 9, ..piece(0, length) }.cut(1 << 20).collect();
            let mut offset = 0;
            for part in &parts {
                assert_eq!((part.local_offset, part.remote_offset), (5 + offset, 9 + offset));
                assert!(part.length > 0 && part.length <= (1 << 20) + (1 << 17));
                offset += part.length;
            }
            assert_eq!(offset, length);
            assert!(parts.len() == 1 || parts.iter().all(|part| part.length > 1 << 17), "{length}");
        }
    }

    #[test]
    fn groups_cover_the_pieces_within_their_limits() {
        let mut pieces: Vec<_> = (0..10).map(|request| piece(request, 100)).collect();
        pieces[5].direction = Direction::Write;
        let batch = batch(10, pieces);
        let groups = Group::cut(&batch, 0..10, 3, 250, 1);
        let shape: Vec<_> = groups.iter().map(|group| (group.first, group.count, group.bytes)).collect();
        assert_eq!(shape, [(0, 2, 200), (2, 2, 200), (4, 1, 100), (5, 1, 100), (6, 2, 200), (8, 2, 200)]);
        for group in groups {
            group.finish(Ok(()));
        }
        assert!(batch.has_ended());
    }
}
