//! Calls that nobody waits for in a thread: futures.
//!
//! One connection to the peer, and one thread that receives on it, sends what the socket did not take at once, and ends
//! calls whose deadline passed. The thread starts with the first call, and ends when there has been none for a while.
//! Who calls never blocks: it sends if the socket takes the frame, else the frame waits for the thread.
//!
//! Bounds: calls without an answer are bounded for all connections to the peer together (`Control`); frames that wait
//! have at most [`BACKLOG_BYTES`].

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use super::{Answer, Call, Connection, Dial, Received};
use crate::error::Failure;
use crate::wire::{Header, Kind};

/// Most bytes of frames that the socket did not take yet; a call beyond them is refused.
const BACKLOG_BYTES: usize = 64 << 20;
/// A thread and its connection end after so long without a call.
const IDLE: Duration = Duration::from_secs(10);

/// See the module.
pub(super) struct Driven(Arc<Shared>);

struct Shared {
    dial: Arc<Dial>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connection: Option<Arc<Connection>>,
    /// Calls that wait for a connection.
    waiting: VecDeque<(Vec<u8>, Arc<Call>)>,
    waiting_bytes: usize,
    /// Bytes that the connection's socket did not take yet, from `sent` on.
    backlog: Vec<u8>,
    sent: usize,
    /// Wakes the thread; there while it runs.
    wake: Option<OwnedFd>,
    /// No call's deadline is earlier.
    next_deadline: Option<Instant>,
    is_closed: bool,
}

/// The answer to a call, when it comes: a future that may be polled from anywhere, and dropped.
pub(crate) struct Driving {
    call: Arc<Call>,
    /// Where it waits for its answer, so that dropping it makes room.
    shared: Weak<Shared>,
}

impl Driven {
    pub(super) fn new(dial: Arc<Dial>) -> Self {
        Self(Arc::new(Shared { dial, state: Mutex::default() }))
    }

    /// Sends a message, now or when the thread can.
    pub(super) fn start(&self, body: &[u8], call: Arc<Call>) -> Result<Driving, Failure> {
        let mut state = self.0.state.lock();
        if state.is_closed {
            return Err(Failure::Closed);
        }
        if state.wake.is_none() {
            self.0.run_thread(&mut state)?;
        }
        let deadline = call.deadline;
        if state.backlog.len() - state.sent + state.waiting_bytes + body.len() > BACKLOG_BYTES {
            return Err(Failure::Overloaded);
        }
        let driving = Driving { call: Arc::clone(&call), shared: Arc::downgrade(&self.0) };
        let is_earliest = deadline.is_some_and(|deadline| state.next_deadline.is_none_or(|next| deadline < next));
        if is_earliest {
            state.next_deadline = deadline;
        }
        let connection = state.connection.clone();
        let mut sent = Ok(());
        match &connection {
            Some(connection) => {
                state.enter(connection, body, &call);
                sent = state.send(connection);
            }
            None => {
                state.waiting_bytes += body.len();
                state.waiting.push_back((body.to_vec(), call));
            }
        }
        if is_earliest || connection.is_none() || !state.backlog.is_empty() {
            state.wake();
        }
        drop(state);
        if let (Err(failure), Some(connection)) = (sent, connection) {
            connection.fail(failure);
        }
        Ok(driving)
    }

    pub(super) fn close(&self) {
        let mut state = self.0.state.lock();
        state.is_closed = true;
        state.wake();
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.close();
    }
}

impl State {
    fn enter(&mut self, connection: &Connection, body: &[u8], call: &Arc<Call>) {
        let id = connection.enter(std::slice::from_ref(call));
        call.state.lock().id = Some(id);
        Header { length: body.len() as u64, ..Header::new(Kind::Message, id) }.encode(&mut self.backlog);
        self.backlog.extend_from_slice(body);
    }

    /// Sends what the socket takes. The caller gives a connection up that takes no more, once it holds no lock.
    fn send(&mut self, connection: &Connection) -> Result<(), Failure> {
        while self.sent < self.backlog.len() || connection.stream.has_unsent() {
            match connection.stream.send_now(&self.backlog[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(_) => return Err(Failure::ConnectionLost),
            }
        }
        self.sent = 0;
        self.backlog.clear();
        self.backlog.shrink_to(BACKLOG_BYTES / 64);
        Ok(())
    }

    fn wake(&self) {
        if let Some(wake) = &self.wake {
            // Full means that it was woken already.
            let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
        }
    }

    /// Takes out the calls that wait for a connection, all of them or those whose deadline passed. The caller ends them,
    /// once it holds no lock: their wakers are somebody else's code.
    fn take_waiting(&mut self, passed_at: Option<Instant>) -> Vec<Arc<Call>> {
        let mut ended = Vec::new();
        self.waiting.retain(|(body, call)| {
            let ends = passed_at.is_none_or(|now| call.deadline.is_some_and(|deadline| deadline <= now));
            if ends {
                self.waiting_bytes -= body.len();
                ended.push(Arc::clone(call));
            }
            !ends
        });
        ended
    }

    /// Takes out the calls whose deadline passed, and finds the next one.
    fn take_expired(&mut self, now: Instant) -> Vec<Arc<Call>> {
        let mut expired = self.take_waiting(Some(now));
        let mut next = self.waiting.iter().filter_map(|(_, call)| call.deadline).min();
        if let Some(connection) = &self.connection {
            let mut calls = connection.calls.lock();
            let passed: Vec<_> = calls
                .waiting
                .iter()
                .filter(|(_, call)| call.deadline.is_some_and(|deadline| deadline <= now))
                .map(|(id, _)| *id)
                .collect();
            expired.extend(passed.into_iter().filter_map(|id| calls.waiting.remove(&id)));
            next = calls.waiting.values().filter_map(|call| call.deadline).chain(next).min();
        }
        self.next_deadline = next;
        expired
    }

    fn is_idle(&self) -> bool {
        let answered = self.connection.as_ref().is_none_or(|connection| connection.calls.lock().waiting.is_empty());
        self.waiting.is_empty() && answered
    }
}

impl Shared {
    fn run_thread(self: &Arc<Self>, state: &mut State) -> Result<(), Failure> {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let wake = eventfd(0, flags).map_err(|_| Failure::Overloaded)?;
        let own = wake.try_clone().map_err(|_| Failure::Overloaded)?;
        let shared = Arc::clone(self);
        let spawned = std::thread::Builder::new().name("tidepool-calls".into()).spawn(move || shared.run(&own));
        spawned.map_err(|_| Failure::Overloaded)?;
        state.wake = Some(wake);
        Ok(())
    }

    fn run(&self, wake: &OwnedFd) {
        let mut received = Received::default();
        let mut idle_since = None;
        loop {
            let now = Instant::now();
            let mut state = self.state.lock();
            if state.next_deadline.is_some_and(|next| next <= now) {
                let expired = state.take_expired(now);
                drop(state);
                end_all(expired, Failure::DeadlinePassed);
                continue;
            }
            let is_idle = state.is_idle();
            idle_since = if is_idle { idle_since.or(Some(now)) } else { None };
            let is_over = idle_since.is_some_and(|since: Instant| now.saturating_duration_since(since) >= IDLE);
            if state.is_closed || is_over {
                drop(state);
                return self.end();
            }
            if state.connection.as_ref().is_some_and(|connection| connection.is_over()) {
                state.connection = None;
                state.backlog.clear();
                state.sent = 0;
                received = Received::default();
            }
            if state.connection.is_none() && !state.waiting.is_empty() {
                drop(state);
                self.connect();
                continue;
            }
            let until = if is_idle { Some(IDLE) } else { None };
            let deadline = state.next_deadline.map(|next| next.saturating_duration_since(now));
            let at_once = state.connection.as_ref().is_some_and(|connection| connection.stream.has_received());
            let at_once = at_once.then_some(Duration::ZERO);
            let timeout = [until, deadline, at_once].into_iter().flatten().min();
            let (connection, has_backlog) = (state.connection.clone(), !state.backlog.is_empty());
            drop(state);
            if let Err(error) = self.wait(wake, connection.as_ref(), has_backlog, timeout, &mut received) {
                tracing::warn!(%error, "poll of a connection failed");
                return self.end();
            }
        }
    }

    /// Waits for something to do, and does it.
    fn wait(
        &self,
        wake: &OwnedFd,
        connection: Option<&Arc<Connection>>,
        has_backlog: bool,
        timeout: Option<Duration>,
        received: &mut Received,
    ) -> io::Result<()> {
        let events = if has_backlog { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let socket = connection.map_or(wake.as_fd(), |connection| connection.stream.as_fd());
        let mut polled =
            [PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN), PollFd::from_borrowed_fd(socket, events)];
        let watched = if connection.is_some() { &mut polled[..] } else { &mut polled[..1] };
        let timeout = timeout.map(|timeout| rustix::time::Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        match rustix::event::poll(watched, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let (woken, happened) = (polled[0].revents(), polled[1].revents());
        if !woken.is_empty() {
            // Only whether it was woken counts.
            let _ = rustix::io::read(wake, &mut [0; 8]);
        }
        let Some(connection) = connection else { return Ok(()) };
        let mut done = Ok(());
        if happened.contains(PollFlags::OUT) {
            done = self.state.lock().send(connection);
        }
        if happened.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) || connection.stream.has_received() {
            done = done.and(connection.receive(received, true));
        }
        if let Err(failure) = done {
            connection.fail(failure);
        }
        Ok(())
    }

    /// Opens a connection for the calls that wait, or ends them.
    fn connect(&self) {
        let deadline = self.state.lock().waiting.iter().filter_map(|(_, call)| call.deadline).min();
        let deadline = deadline.unwrap_or_else(|| Instant::now() + IDLE);
        let dialled = (self.dial)(deadline);
        let mut state = self.state.lock();
        let (ended, failure) = match dialled {
            Ok(stream) => {
                let connection = Arc::new(Connection::new(stream));
                for (body, call) in std::mem::take(&mut state.waiting) {
                    state.enter(&connection, &body, &call);
                }
                state.waiting_bytes = 0;
                state.connection = Some(Arc::clone(&connection));
                if let Err(failure) = state.send(&connection) {
                    drop(state);
                    connection.fail(failure);
                }
                return;
            }
            // The earliest deadline cut the attempt short: the others get one of their own.
            Err(_) if Instant::now() >= deadline => (state.take_waiting(Some(deadline)), Failure::DeadlinePassed),
            Err(error) => (state.take_waiting(None), error.failure),
        };
        drop(state);
        end_all(ended, failure);
    }

    /// The thread ends: a call after this starts another.
    fn end(&self) {
        let mut state = self.state.lock();
        state.wake = None;
        let failure = if state.is_closed { Failure::Closed } else { Failure::ConnectionLost };
        let (ended, connection) = (state.take_waiting(None), state.connection.take());
        state.backlog = Vec::new();
        state.sent = 0;
        drop(state);
        end_all(ended, failure);
        if let Some(connection) = connection {
            connection.fail(failure);
        }
    }
}

fn end_all(calls: Vec<Arc<Call>>, failure: Failure) {
    calls.into_iter().for_each(|call| call.end(Err(failure)));
}

impl Future for Driving {
    type Output = Answer;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answer> {
        let mut state = self.call.state.lock();
        if let Some(answer) = state.answer.take() {
            return Poll::Ready(answer);
        }
        match &state.waker {
            Some(waker) if waker.will_wake(context.waker()) => {}
            _ => state.waker = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl Drop for Driving {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let mut state = shared.state.lock();
        let id = self.call.state.lock().id;
        match (id, &state.connection) {
            // Another connection may have given the same id to another call.
            (Some(id), Some(connection)) => {
                let mut calls = connection.calls.lock();
                if calls.waiting.get(&id).is_some_and(|call| Arc::ptr_eq(call, &self.call)) {
                    calls.waiting.remove(&id);
                }
            }
            (None, _) => {
                let place = state.waiting.iter().position(|(_, call)| Arc::ptr_eq(call, &self.call));
                if let Some((body, _)) = place.and_then(|place| state.waiting.remove(place)) {
                    state.waiting_bytes -= body.len();
                }
            }
            _ => {}
        }
    }
}
