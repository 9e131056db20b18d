//! A ring without a thread: tasks of a runtime submit to it, and one task of that runtime takes the completions.
//!
//! A read through the engine's thread is handed over three times, each time to a thread that sleeps: to the thread, by
//! the kernel to the thread, to the worker that runs the reader. Here whoever submits enters the kernel itself, and the
//! ring is one of the descriptors that the runtime's reactor waits for: a worker that has nothing else to do sleeps in
//! the kernel until the completion, and runs [`TaskRing::drive`] and then the reader. One hand-over, as in a program
//! that does nothing but wait for its disk.
//!
//! Driven: only while the future of [`TaskRing::drive`] lives; before and after, nothing is taken. When it goes away
//! (with its runtime, say) it waits for what is in flight; so does [`TaskRing::close`].
//!
//! Invariants: the ring's queues are touched under the lock; the kernel is entered without it (but by
//! [`TaskRing::drain`]) and by one thread at a time, which takes what others push meanwhile, so that nobody waits there
//! for another's submission; callbacks are called without the lock.
//!
//! If the ring breaks, memory under way is leaked, never freed under the device, and nothing is taken from then on.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::task::Poll;

use futures::task::AtomicWaker;
use io_uring::{IoUring, squeue};
use parking_lot::Mutex;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::flight::{Flight, Flights, Landed};
use crate::IoRequest;

/// Who drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nobody yet, or nobody any more.
    Idle,
    /// A future of `drive`.
    Driven,
    /// Nobody ever again: closed or broken.
    Over,
}

struct State {
    flights: Flights,
    stage: Stage,
    /// Somebody enters the kernel, and looks for more before it ends.
    is_entering: bool,
}

/// The ring. Any number of tasks submit; see the module.
pub(super) struct TaskRing {
    ring: IoUring,
    state: Mutex<State>,
    /// The driver's.
    waker: AtomicWaker,
    /// The ring knows it by number.
    _file: File,
}

impl TaskRing {
    /// A ring for `depth` operations on `file`.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn new(file: File, depth: u32) -> io::Result<Self> {
        // No single issuer: any worker submits.
        let ring = IoUring::builder().setup_clamp().build(depth.next_power_of_two())?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let state = Mutex::new(State { flights: Flights::new(depth), stage: Stage::Idle, is_entering: false });
        Ok(Self { ring, state, waker: AtomicWaker::new(), _file: file })
    }

    /// Starts an operation.
    ///
    /// # Errors
    /// The request, if nobody drives the ring or it is full.
    pub(super) fn submit(&self, request: IoRequest) -> Result<(), IoRequest> {
        let mut state = self.state.lock();
        if state.stage != Stage::Driven || state.flights.is_full() {
            return Err(request);
        }
        let flight = Flight::new(request);
        let launched = if flight.is_empty() { Err((flight, Ok(()))) } else { self.launch(&mut state, flight) };
        drop(state);
        match launched {
            Ok(()) => {
                self.enter();
                // Looked at by the way: under load the reactor comes late.
                self.reap();
            }
            Err((flight, result)) => flight.finish(result),
        }
        Ok(())
    }

    /// To be called under the lock, as the state says. The queue has room: its size is that of the flights.
    fn launch(&self, state: &mut State, flight: Flight) -> Result<(), Ended> {
        let push = |entry: &squeue::Entry| {
            // SAFETY: under the lock nobody else touches the queue. What the entry points to (a flight's iovecs and
            // memory) stays in `flights` until the completion, or is leaked by `give_up`.
            unsafe { self.ring.submission_shared().push(entry) }.is_ok()
        };
        state.flights.launch(flight, push).map_err(|flight| (flight, Err(io::ErrorKind::ResourceBusy.into())))
    }

    /// Drives the ring until it is closed or broken. A second future while one lives ends at once.
    ///
    /// # Panics
    /// Outside a tokio runtime with I/O enabled.
    pub(super) async fn drive(self: Arc<Self>) {
        let descriptor = Descriptor(Arc::clone(&self));
        // SAFETY: the descriptor is the ring's, which stays open and the same for as long as `Descriptor` holds it.
        let ready = match unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) } {
            Ok(ready) => ready,
            Err(error) => return tracing::warn!(%error, "reads go through the engine's thread"),
        };
        let Some(_driven) = Driven::begin(&self) else { return };
        std::future::poll_fn(|context| {
            // First, so that a push from now on is seen or wakes.
            self.waker.register(context.waker());
            loop {
                self.reap();
                self.enter();
                if self.state.lock().stage == Stage::Over {
                    return Poll::Ready(());
                }
                match ready.poll_read_ready(context) {
                    // A completion that comes after this look makes it ready again.
                    Poll::Ready(Ok(mut guard)) if self.is_quiet() => guard.clear_ready(),
                    Poll::Ready(Ok(_)) => {}
                    Poll::Ready(Err(_)) => return Poll::Ready(()),
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await;
    }

    /// Gives the kernel what was pushed, if nobody is at it.
    fn enter(&self) {
        let mut state = self.state.lock();
        if state.is_entering {
            return;
        }
        // SAFETY: under the lock nobody else touches the queue.
        while !unsafe { self.ring.submission_shared() }.is_empty() && state.stage != Stage::Over {
            state.is_entering = true;
            drop(state);
            let entered = self.ring.submitter().submit();
            state = self.state.lock();
            state.is_entering = false;
            if entered.is_err() {
                drop(state);
                return self.check(entered);
            }
        }
    }

    /// Looks at the answer of the kernel to being entered. What it did not take for now is tried again by the driver.
    fn check(&self, entered: io::Result<usize>) {
        match entered {
            Ok(_) => {}
            Err(error) if [libc::EINTR, libc::EAGAIN, libc::EBUSY].map(Some).contains(&error.raw_os_error()) => {
                self.waker.wake();
            }
            Err(error) => self.give_up(&error),
        }
    }

    /// Calls back for everything that has completed.
    fn reap(&self) {
        while let Some((flight, result)) = self.next_ended() {
            flight.finish(result);
        }
    }

    fn next_ended(&self) -> Option<Ended> {
        let mut state = self.state.lock();
        loop {
            // SAFETY: under the lock nobody else touches the queue.
            let entry = unsafe { self.ring.completion_shared() }.next()?;
            match state.flights.land(entry.user_data(), entry.result()) {
                Some(Landed::Ended(flight, result)) => return Some((flight, result)),
                Some(Landed::GoesOn(flight)) => match self.launch(&mut state, flight) {
                    // The driver enters.
                    Ok(()) => self.waker.wake(),
                    Err(ended) => return Some(ended),
                },
                None => {}
            }
        }
    }

    /// Whether no completion waits.
    fn is_quiet(&self) -> bool {
        let _state = self.state.lock();
        // SAFETY: under the lock nobody else touches the queue.
        unsafe { self.ring.completion_shared() }.is_empty()
    }

    /// Takes nothing any more, and waits for what is in flight.
    pub(super) fn close(&self) {
        self.state.lock().stage = Stage::Over;
        self.waker.wake();
        self.drain();
    }

    /// Waits for what is in flight; nothing may be added meanwhile.
    fn drain(&self) {
        loop {
            self.reap();
            // Held while waiting, so that nobody takes the completion that is waited for.
            let state = self.state.lock();
            if state.flights.is_empty() {
                return;
            }
            // SAFETY: under the lock nobody else touches the queue.
            let is_quiet = unsafe { self.ring.completion_shared() }.is_empty();
            let entered = if is_quiet { self.ring.submitter().submit_and_wait(1) } else { Ok(0) };
            drop(state);
            self.check(entered);
        }
    }

    /// The ring is broken. The kernel may still write to what is under way: leak it.
    fn give_up(&self, error: &io::Error) {
        tracing::error!(%error, "io_uring failed; reads go through the engine's thread");
        let mut state = self.state.lock();
        state.stage = Stage::Over;
        let flights = state.flights.drain();
        drop(state);
        self.waker.wake();
        for flight in flights {
            flight.leak(error.kind().into());
        }
    }
}

/// An operation at its end.
type Ended = (Flight, io::Result<()>);

/// Says that somebody drives, while it lives.
struct Driven<'a>(&'a TaskRing);

impl<'a> Driven<'a> {
    fn begin(ring: &'a TaskRing) -> Option<Self> {
        let mut state = ring.state.lock();
        if state.stage != Stage::Idle {
            return None;
        }
        state.stage = Stage::Driven;
        Some(Self(ring))
    }
}

impl Drop for Driven<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        if state.stage == Stage::Driven {
            state.stage = Stage::Idle;
        }
        drop(state);
        self.0.drain();
    }
}

/// What the reactor waits for: readable while there are completions.
struct Descriptor(Arc<TaskRing>);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.ring.as_raw_fd()
    }
}

#[cfg(test)]
impl TaskRing {
    /// Takes reads without a runtime.
    pub(super) fn drive_by_hand(&self) -> impl Drop + '_ {
        Driven::begin(self).expect("nobody drives it")
    }

    /// From now on entering the kernel fails.
    pub(super) fn break_ring(&self) {
        let null = File::open("/dev/null").expect("every machine has it");
        // SAFETY: both descriptors are open; the ring's mappings keep the ring itself alive.
        assert!(unsafe { libc::dup2(null.as_raw_fd(), self.ring.as_raw_fd()) } >= 0);
    }
}
