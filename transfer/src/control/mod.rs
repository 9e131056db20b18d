//! Asking a peer: names, probes, notifications, messages.
//!
//! A caller that waits receives in its own thread: it sends its frame, takes the connection's receiving side if nobody
//! has it, and interprets what arrives for all until its own answer is there. Others that wait on the same connection
//! sleep until their answer comes, or until the receiving side becomes free.
//!
//! Requests without an answer are bounded for all connections to a peer together. A connection that fails ends all of its
//! calls with the reason; the next call opens another. Answers that nobody waits for any more are dropped: ids are unique
//! on a connection, so a late answer can't be taken for another's.
//!
//! Calls that are futures have a connection and a thread of their own ([`driven`]).

mod driven;

use std::collections::HashMap;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::PollFlags;

use self::driven::Driven;
pub(crate) use self::driven::Driving;
use crate::error::Failure;
use crate::spin::Spin;
use crate::stream::{ConnectError, Stream, TICK};
use crate::wire::{HEADER_BYTES, Header, Kind, WireError};

/// Bytes received at once.
const READ_BYTES: usize = 64 << 10;
/// Frames of a run of calls that are sent at once.
const SEND_BYTES: usize = 32 << 10;

/// How to open a connection; again after one failed.
pub(crate) type Dial = Box<dyn Fn(Instant) -> Result<Stream, ConnectError> + Send + Sync>;
type Answer = Result<Vec<u8>, Failure>;

/// Connections to one peer for everything but data.
pub(crate) struct Control {
    dial: Arc<Dial>,
    driven: Driven,
    lanes: Box<[Mutex<Option<Arc<Connection>>>]>,
    turn: AtomicUsize,
    unanswered: Arc<AtomicUsize>,
    limit: usize,
}

/// A request on its way.
struct Call {
    /// Kind that its answer must have.
    answer_kind: Kind,
    state: Mutex<CallState>,
    changed: Condvar,
    /// Of a call that nobody waits for in a thread.
    deadline: Option<Instant>,
    unanswered: Arc<AtomicUsize>,
}

#[derive(Default)]
struct CallState {
    answer: Option<Answer>,
    /// Of a call that is a future: whom to wake, and its id once it was sent.
    waker: Option<Waker>,
    id: Option<u64>,
    /// The receiving side may be free: look.
    nudged: bool,
}

struct Connection {
    stream: Stream,
    sending: Mutex<Vec<u8>>,
    receiving: Mutex<Received>,
    calls: Mutex<Calls>,
}

#[derive(Default)]
struct Calls {
    next_id: u64,
    waiting: HashMap<u64, Arc<Call>>,
    /// Why the connection is over.
    failure: Option<Failure>,
}

#[derive(Default)]
struct Received {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    spin: Spin,
}

/// A call whose answer somebody will fetch.
pub(crate) struct Pending {
    connection: Arc<Connection>,
    id: u64,
    call: Arc<Call>,
}

impl Control {
    /// `lanes` connections at most, and `limit` calls without an answer. `first` is one that is open already.
    pub(crate) fn new(dial: Arc<Dial>, lanes: usize, limit: usize, first: Stream) -> Self {
        let first = Some(Arc::new(Connection::new(first)));
        let lanes = (0..lanes).map(|lane| Mutex::new(if lane == 0 { first.clone() } else { None }));
        let driven = Driven::new(Arc::clone(&dial));
        Self { dial, driven, lanes: lanes.collect(), turn: AtomicUsize::new(0), unanswered: Arc::default(), limit }
    }

    /// Asks and waits for the answer.
    pub(crate) fn call(&self, kind: Kind, body: &[u8], deadline: Instant) -> Result<Vec<u8>, ConnectError> {
        self.start(kind, &[body], deadline)?
            .pop()
            .map_or(Err(Failure::System), |pending| pending.wait(deadline))
            .map_err(ConnectError::from)
    }

    /// Asks several things at once, on one connection; answers are fetched from what this gives, in any order.
    pub(crate) fn start(&self, kind: Kind, bodies: &[&[u8]], deadline: Instant) -> Result<Vec<Pending>, ConnectError> {
        self.count_in(bodies.len())?;
        let connection = match self.connection(deadline) {
            Ok(connection) => connection,
            Err(error) => {
                self.unanswered.fetch_sub(bodies.len(), Ordering::AcqRel);
                return Err(error);
            }
        };
        let calls: Vec<_> = bodies.iter().map(|_| self.counted_call(kind, None)).collect();
        let first = connection.enter(&calls);
        connection.send(kind, first, bodies, deadline);
        let pending = |(index, call)| Pending { connection: Arc::clone(&connection), id: first + index as u64, call };
        Ok(calls.into_iter().enumerate().map(pending).collect())
    }

    /// Sends a message whose answer is a future. Never blocks.
    pub(crate) fn drive(&self, body: &[u8], deadline: Instant) -> Result<Driving, Failure> {
        self.count_in(1)?;
        self.driven.start(body, self.counted_call(Kind::Message, Some(deadline)))
    }

    fn count_in(&self, calls: usize) -> Result<(), Failure> {
        let before = self.unanswered.fetch_add(calls, Ordering::AcqRel);
        if before + calls > self.limit {
            self.unanswered.fetch_sub(calls, Ordering::AcqRel);
            return Err(Failure::Overloaded);
        }
        Ok(())
    }

    /// A call that was counted in, and counts itself out.
    fn counted_call(&self, kind: Kind, deadline: Option<Instant>) -> Arc<Call> {
        Arc::new(Call {
            answer_kind: answer_kind(kind),
            state: Mutex::default(),
            changed: Condvar::new(),
            deadline,
            unanswered: Arc::clone(&self.unanswered),
        })
    }

    /// A connection: one whose receiving side is free, else one after the other.
    fn connection(&self, deadline: Instant) -> Result<Arc<Connection>, ConnectError> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        for lane in &self.lanes {
            // Locked: somebody is connecting it.
            let Some(mut lane) = lane.try_lock() else { continue };
            match &*lane {
                Some(open) if open.is_over() => *lane = None,
                Some(open) if open.receiving.is_locked() => continue,
                Some(open) => return Ok(Arc::clone(open)),
                None => {}
            }
            let open = Arc::new(Connection::new((self.dial)(deadline)?));
            *lane = Some(Arc::clone(&open));
            return Ok(open);
        }
        let lane = self.lanes[turn % self.lanes.len()].try_lock_until(deadline);
        let mut lane = lane.ok_or(Failure::DeadlinePassed)?;
        if let Some(open) = &*lane
            && !open.is_over()
        {
            return Ok(Arc::clone(open));
        }
        let open = Arc::new(Connection::new((self.dial)(deadline)?));
        *lane = Some(Arc::clone(&open));
        Ok(open)
    }

    /// Ends all calls.
    pub(crate) fn close(&self) {
        self.driven.close();
        for lane in &self.lanes {
            if let Some(open) = lane.lock().take() {
                open.fail(Failure::Closed);
            }
        }
    }
}

impl Pending {
    /// Waits for the answer, receiving for everybody on the connection while nobody else does.
    pub(crate) fn wait(&self, deadline: Instant) -> Answer {
        loop {
            if let Some(answer) = self.call.state.lock().answer.take() {
                return answer;
            }
            let now = Instant::now();
            if now >= deadline {
                return self.connection.give_up(self.id, &self.call);
            }
            if let Some(mut receiving) = self.connection.receiving.try_lock() {
                self.connection.receive_until(&mut receiving, &self.call, deadline);
                drop(receiving);
                self.connection.nudge();
                continue;
            }
            let mut state = self.call.state.lock();
            if state.answer.is_none() && !std::mem::take(&mut state.nudged) {
                self.call.changed.wait_until(&mut state, deadline.min(now + TICK));
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.connection.calls.lock().waiting.remove(&self.id);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.unanswered.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Connection {
    fn new(stream: Stream) -> Self {
        Self { stream, sending: Mutex::default(), receiving: Mutex::default(), calls: Mutex::default() }
    }

    fn is_over(&self) -> bool {
        self.calls.lock().failure.is_some()
    }

    /// Enters calls; gives the id of the first, the others follow it.
    fn enter(&self, entered: &[Arc<Call>]) -> u64 {
        let mut calls = self.calls.lock();
        let first = calls.next_id;
        calls.next_id += entered.len() as u64;
        if let Some(failure) = calls.failure {
            entered.iter().for_each(|call| call.end(Err(failure)));
            return first;
        }
        for (id, call) in (first..).zip(entered) {
            calls.waiting.insert(id, Arc::clone(call));
        }
        first
    }

    /// Sends frames. Failure ends all calls of the connection.
    fn send(&self, kind: Kind, first: u64, bodies: &[&[u8]], deadline: Instant) {
        let mut out = self.sending.lock();
        out.clear();
        for (id, body) in (first..).zip(bodies) {
            Header { length: body.len() as u64, ..Header::new(kind, id) }.encode(&mut out);
            out.extend_from_slice(body);
            if out.len() >= SEND_BYTES {
                self.send_all(&mut out, deadline);
            }
        }
        self.send_all(&mut out, deadline);
        if out.capacity() > 4 * SEND_BYTES {
            *out = Vec::new();
        }
    }

    /// While the peer takes nothing, its answers are received, so that neither waits for the other.
    fn send_all(&self, out: &mut Vec<u8>, deadline: Instant) {
        let mut sent = 0;
        while sent < out.len() || self.stream.has_unsent() {
            match self.stream.send_now(&out[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        // Part of a frame may have left: nothing can follow it.
                        self.fail(Failure::DeadlinePassed);
                        break;
                    }
                    let _ = self.stream.poll(PollFlags::IN | PollFlags::OUT, TICK);
                    if let Some(mut receiving) = self.receiving.try_lock()
                        && let Err(failure) = self.receive(&mut receiving, true)
                    {
                        self.fail(failure);
                        break;
                    }
                }
                Err(_) => {
                    self.fail(Failure::ConnectionLost);
                    break;
                }
            }
        }
        out.clear();
    }

    fn receive_until(&self, receiving: &mut MutexGuard<'_, Received>, call: &Call, deadline: Instant) {
        loop {
            if call.state.lock().answer.is_some() {
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let may_block = left >= TICK;
            if !may_block && self.stream.poll(PollFlags::IN, left).is_ok_and(|events| events.is_empty()) {
                continue;
            }
            let _waiting = may_block.then(|| receiving.spin.for_answer(&self.stream));
            if let Err(failure) = self.receive(receiving, !may_block) {
                return self.fail(failure);
            }
        }
    }

    /// Receives once, and ends the calls whose answers are complete.
    fn receive(&self, received: &mut Received, at_once: bool) -> Result<(), Failure> {
        let needed = received.needed()?;
        if received.buffer.len() - received.start < needed.max(READ_BYTES / 4) {
            let (start, end) = (received.start, received.end);
            received.buffer.copy_within(start..end, 0);
            (received.start, received.end) = (0, end - start);
            received.buffer.resize(needed.max(READ_BYTES), 0);
        }
        let end = received.end;
        let room = &mut received.buffer[end..];
        let count = if at_once { self.stream.receive_now(room) } else { (&mut &self.stream).read(room) };
        match count {
            Ok(0) => return Err(Failure::ConnectionLost),
            Ok(count) => received.end += count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(());
            }
            Err(_) => return Err(Failure::ConnectionLost),
        }
        while let Some((header, body)) = received.next_frame()? {
            let call = self.calls.lock().waiting.remove(&header.id);
            let answer = match header.status {
                _ if header.kind == Kind::Error => return Err(header.failure()),
                0 => Ok(body.to_vec()),
                _ => Err(header.failure()),
            };
            if let Some(call) = call {
                if call.answer_kind != header.kind {
                    call.end(Err(Failure::Protocol));
                    return Err(Failure::Protocol);
                }
                call.end(answer);
            }
        }
        Ok(())
    }

    /// Wakes one of those that wait, to take the receiving side.
    fn nudge(&self) {
        let call = self.calls.lock().waiting.values().next().map(Arc::clone);
        if let Some(call) = call {
            call.state.lock().nudged = true;
            call.changed.notify_one();
        }
    }

    fn give_up(&self, id: u64, call: &Call) -> Answer {
        self.calls.lock().waiting.remove(&id);
        call.state.lock().answer.take().unwrap_or(Err(Failure::DeadlinePassed))
    }

    fn fail(&self, failure: Failure) {
        self.stream.shutdown();
        let waiting = {
            let mut calls = self.calls.lock();
            calls.failure = calls.failure.or(Some(failure));
            std::mem::take(&mut calls.waiting)
        };
        waiting.into_values().for_each(|call| call.end(Err(failure)));
    }
}

impl Call {
    fn end(&self, answer: Answer) {
        let waker = {
            let mut state = self.state.lock();
            // A deadline may have come first.
            state.answer.get_or_insert(answer);
            state.waker.take()
        };
        self.changed.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Received {
    /// Bytes that the frame at the start takes, as far as that is known.
    fn needed(&self) -> Result<usize, Failure> {
        let bytes = &self.buffer[self.start..self.end];
        if bytes.len() < HEADER_BYTES {
            return Ok(HEADER_BYTES);
        }
        let header = Header::decode(bytes).map_err(WireError::failure)?;
        Ok(HEADER_BYTES + header.length as usize)
    }

    fn next_frame(&mut self) -> Result<Option<(Header, &[u8])>, Failure> {
        let needed = self.needed()?;
        let start = self.start;
        if self.end - start < needed {
            return Ok(None);
        }
        self.start += needed;
        let header = Header::decode(&self.buffer[start..]).map_err(WireError::failure)?;
        Ok(Some((header, &self.buffer[start + HEADER_BYTES..start + needed])))
    }
}

fn answer_kind(kind: Kind) -> Kind {
    match kind {
        Kind::Open => Kind::Segment,
        Kind::Message => Kind::Reply,
        Kind::Notify => Kind::Noted,
        Kind::Where => Kind::Here,
        Kind::Keys => Kind::KeyList,
        _ => Kind::Pong,
    }
}
