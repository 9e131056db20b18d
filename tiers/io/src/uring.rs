//! I/O by io_uring: one thread drives one ring, with the file and the write buffers registered.
//!
//! Submitters put requests into a queue; the thread moves them to the ring, waits for completions and calls back. When
//! it sleeps in the kernel a poll of an eventfd that is always armed wakes it. The ring has a single issuer, so task work
//! is deferred to the thread's own waits where the kernel can do that (6.1), else it is cooperative.
//!
//! Memory: an operation's [`IoMemory`] and its iovec array stay in `flights` until the kernel's completion, whatever
//! the submitter does. Shutdown: dropping the engine finishes what was submitted. If the ring itself breaks, memory
//! under way is leaked, never freed under the device, and every request from then on fails.
#![expect(unsafe_code, reason = "hands pointers to the kernel and keeps their owners until the completion")]

mod flight;
mod task_ring;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, squeue};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use self::flight::{Flight, Flights, Landed};
use self::task_ring::TaskRing;
use crate::{Allocation, BoxFuture, Completion, EngineKind, IoEngine, IoRequest};

const WAKE: u64 = u64::MAX;
/// How long the thread looks for another request before it sleeps, when the last one has just finished: about what
/// waking it costs.
const LINGER: Duration = Duration::from_micros(20);

struct Shared {
    queue: Mutex<VecDeque<IoRequest>>,
    /// Length of the queue, to be looked at without its lock.
    queued: AtomicUsize,
    /// The thread is in the kernel, or about to be: whoever takes this down must ring.
    sleeping: AtomicBool,
    closed: AtomicBool,
    bell: OwnedFd,
}

impl Shared {
    fn ring_bell(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // An eventfd write fails only when the counter is full, and then the thread is awake anyway.
            let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }
}

/// One ring and its thread, and one ring for tasks unless there are none.
pub struct UringEngine {
    shared: Arc<Shared>,
    tasks: Option<Arc<TaskRing>>,
    thread: Option<JoinHandle<()>>,
}

impl UringEngine {
    /// Starts a ring of `queue_depth` operations on `file` and registers `buffers`.
    ///
    /// # Errors
    /// io_uring is missing (ENOSYS), forbidden (EPERM), or there is not enough lockable memory (ENOMEM).
    pub fn start(file: File, buffers: &[Arc<Allocation>], queue_depth: u32) -> io::Result<Self> {
        let tasks = TaskRing::new(file.try_clone()?, queue_depth.max(1))?;
        let mut engine = Self::without_tasks(file, buffers, queue_depth)?;
        engine.tasks = Some(Arc::new(tasks));
        Ok(engine)
    }

    /// The same for a program whose threads block: reads of tasks go the same way as all others.
    ///
    /// # Errors
    /// As [`UringEngine::start`].
    pub fn without_tasks(file: File, buffers: &[Arc<Allocation>], queue_depth: u32) -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            queued: AtomicUsize::new(0),
            sleeping: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            bell,
        });
        let (sender, receiver) = mpsc::sync_channel(1);
        let (thread_shared, buffers) = (Arc::clone(&shared), buffers.to_vec());
        let thread = thread::Builder::new().name("tidepool-uring".into()).spawn(move || {
            // A single issuer must make the ring on its own thread.
            match Driver::new(thread_shared, file, buffers, queue_depth.max(1)) {
                Ok(driver) => {
                    let _ = sender.send(Ok(()));
                    driver.run();
                }
                Err(error) => drop(sender.send(Err(error))),
            }
        })?;
        receiver.recv().map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))??;
        Ok(Self { shared, tasks: None, thread: Some(thread) })
    }
}

impl IoEngine for UringEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::IoUring
    }

    fn submit(&self, request: IoRequest) {
        self.shared.queue.lock().push_back(request);
        self.shared.queued.fetch_add(1, Ordering::Release);
        self.shared.ring_bell();
    }

    fn submit_from_task(&self, request: IoRequest) {
        let refused = match &self.tasks {
            Some(tasks) => tasks.submit(request).err(),
            None => Some(request),
        };
        if let Some(request) = refused {
            self.submit(request);
        }
    }

    fn drive(&self) -> BoxFuture<'static, ()> {
        match &self.tasks {
            Some(tasks) => Box::pin(Arc::clone(tasks).drive()),
            None => Box::pin(std::future::ready(())),
        }
    }
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        if let Some(tasks) = &self.tasks {
            tasks.close();
        }
        self.shared.closed.store(true, Ordering::SeqCst);
        self.shared.ring_bell();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            drop(thread.join());
        }
    }
}

struct Driver {
    shared: Arc<Shared>,
    ring: IoUring,
    flights: Flights,
    bell_armed: bool,
    /// Since the thread last looked for more to do.
    has_finished: bool,
    /// Registered memory must outlive the ring's use of its numbers; the file likewise.
    _buffers: Vec<Arc<Allocation>>,
    _file: File,
}

impl Driver {
    fn new(shared: Arc<Shared>, file: File, buffers: Vec<Arc<Allocation>>, depth: u32) -> io::Result<Self> {
        let ring = build_ring(depth + 1)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Readv::CODE,
            opcode::Writev::CODE,
            opcode::WriteFixed::CODE,
            opcode::Fsync::CODE,
            opcode::PollAdd::CODE,
        ];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let vectors: Vec<_> = buffers
            .iter()
            .map(|buffer| libc::iovec { iov_base: buffer.base().as_ptr().cast(), iov_len: buffer.length() })
            .collect();
        if !vectors.is_empty() {
            // SAFETY: each range is a live allocation, and `_buffers` keeps it for as long as the ring.
            unsafe { ring.submitter().register_buffers(&vectors) }?;
            buffers.iter().enumerate().for_each(|(index, buffer)| buffer.set_registered(index));
        }
        Ok(Self {
            shared,
            ring,
            flights: Flights::new(depth),
            bell_armed: false,
            has_finished: false,
            _buffers: buffers,
            _file: file,
        })
    }

    fn run(mut self) {
        loop {
            self.arm_bell();
            self.take_requests();
            if self.flights.is_empty()
                && self.shared.closed.load(Ordering::SeqCst)
                && self.shared.queue.lock().is_empty()
            {
                return;
            }
            if let Err(error) = self.enter() {
                return self.give_up(&error);
            }
            self.reap();
        }
    }

    /// Submits, and waits for a completion unless requests have come in meanwhile that could be taken.
    fn enter(&mut self) -> io::Result<()> {
        if self.flights.is_empty() && std::mem::take(&mut self.has_finished) && self.await_next() {
            return Ok(());
        }
        self.shared.sleeping.store(true, Ordering::SeqCst);
        let can_take = !self.flights.is_full() && !self.shared.queue.lock().is_empty();
        let is_over = self.flights.is_empty() && self.shared.closed.load(Ordering::SeqCst);
        let result = self.ring.submit_and_wait(usize::from(!can_take && !is_over));
        self.shared.sleeping.store(false, Ordering::SeqCst);
        match result {
            Ok(_) => Ok(()),
            // EBUSY and EAGAIN: the kernel is short of something until we have reaped.
            Err(error) if [libc::EINTR, libc::EAGAIN, libc::EBUSY].map(Some).contains(&error.raw_os_error()) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Looks for a request a little longer; whoever reads one slice after another comes back soon.
    fn await_next(&self) -> bool {
        let end = Instant::now() + LINGER;
        while self.shared.queued.load(Ordering::Acquire) == 0 {
            if Instant::now() >= end {
                return false;
            }
            std::hint::spin_loop();
        }
        true
    }

    fn arm_bell(&mut self) {
        if !self.bell_armed {
            let bell = io_uring::types::Fd(self.shared.bell.as_raw_fd());
            let entry = opcode::PollAdd::new(bell, libc::POLLIN as u32).build().user_data(WAKE);
            self.bell_armed = push(&mut self.ring, &entry);
        }
    }

    fn take_requests(&mut self) {
        while !self.flights.is_full() {
            let Some(request) = self.shared.queue.lock().pop_front() else { return };
            self.shared.queued.fetch_sub(1, Ordering::Relaxed);
            let flight = Flight::new(request);
            match flight.is_empty() {
                true => flight.finish(Ok(())),
                false => self.launch(flight),
            }
        }
    }

    fn launch(&mut self, flight: Flight) {
        if let Err(flight) = self.flights.launch(flight, |entry| push(&mut self.ring, entry)) {
            flight.finish(Err(io::ErrorKind::ResourceBusy.into()));
        }
    }

    fn reap(&mut self) {
        while let Some((data, result)) = self.next_completion() {
            if data == WAKE {
                let _ = rustix::io::read(&self.shared.bell, &mut [0_u8; 8]);
                self.bell_armed = false;
                continue;
            }
            let Some(landed) = self.flights.land(data, result) else { continue };
            self.has_finished = true;
            match landed {
                Landed::Ended(flight, result) => flight.finish(result),
                Landed::GoesOn(flight) => self.launch(flight),
            }
        }
    }

    fn next_completion(&mut self) -> Option<(u64, i32)> {
        self.ring.completion().next().map(|entry| (entry.user_data(), entry.result()))
    }

    /// The ring is broken. The kernel may still write to what is under way: leak it and fail everything else.
    fn give_up(mut self, error: &io::Error) {
        tracing::error!(%error, "io_uring failed; the engine is out of service");
        let failure = || io::Error::from(error.kind());
        for flight in self.flights.drain() {
            flight.leak(failure());
        }
        loop {
            let closed = self.shared.closed.load(Ordering::SeqCst);
            // Taken one by one, so that no lock is held in a callback.
            while let Some(request) = { self.shared.queue.lock().pop_front() } {
                (request.done)(Completion { result: Err(failure()), memory: request.memory });
            }
            if closed {
                return;
            }
            thread::park_timeout(Duration::from_millis(1));
        }
    }
}

/// Adds an entry; false if the submission queue is full, which its size rules out for one entry a flight.
fn push(ring: &mut IoUring, entry: &squeue::Entry) -> bool {
    // SAFETY: what the entry points to (a flight's iovecs and memory) stays in the driver's `flights` until the
    // completion, or is leaked by `give_up`. The bell's poll points to nothing.
    unsafe { ring.submission().push(entry) }.is_ok()
}

/// A ring with the cheapest way of running task work that this kernel has.
fn build_ring(entries: u32) -> io::Result<IoUring> {
    let entries = entries.next_power_of_two();
    let newest = IoUring::builder().setup_single_issuer().setup_defer_taskrun().setup_clamp().build(entries);
    match newest {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::builder().setup_clamp().build(entries),
        other => other,
    }
}
