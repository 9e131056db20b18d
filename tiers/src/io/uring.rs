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

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{IoUring, Probe, opcode, squeue};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::{Allocation, Completion, EngineKind, IoEngine, IoMemory, IoRequest, OnCompletion, Operation};

const FILE: Fixed = Fixed(0);
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

/// One ring and its thread.
pub struct UringEngine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl UringEngine {
    /// Starts a ring of `queue_depth` operations on `file` and registers `buffers`.
    ///
    /// # Errors
    /// io_uring is missing (ENOSYS), forbidden (EPERM), or there is not enough lockable memory (ENOMEM).
    pub fn start(file: File, buffers: &[Arc<Allocation>], queue_depth: u32) -> io::Result<Self> {
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
        let thread = thread::Builder::new().name("nvme-uring".into()).spawn(move || {
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
        Ok(Self { shared, thread: Some(thread) })
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
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.shared.ring_bell();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            drop(thread.join());
        }
    }
}

/// An operation that the kernel has.
struct Flight {
    operation: Operation,
    offset: u64,
    memory: IoMemory,
    done: OnCompletion,
    /// Bytes transferred by completions before; a short transfer is carried on.
    transferred: usize,
    length: usize,
    /// Stays in place while the kernel reads it.
    vectors: Box<[libc::iovec]>,
}

// SAFETY: the iovecs point into `memory`, which the flight owns.
unsafe impl Send for Flight {}

struct Driver {
    shared: Arc<Shared>,
    ring: IoUring,
    flights: Vec<Option<Flight>>,
    vacant: Vec<usize>,
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
            flights: (0..depth).map(|_| None).collect(),
            vacant: (0..depth as usize).rev().collect(),
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
            if self.is_idle() && self.shared.closed.load(Ordering::SeqCst) && self.shared.queue.lock().is_empty() {
                return;
            }
            if let Err(error) = self.enter() {
                return self.give_up(&error);
            }
            self.reap();
        }
    }

    fn is_idle(&self) -> bool {
        self.vacant.len() == self.flights.len()
    }

    /// Submits, and waits for a completion unless requests have come in meanwhile that could be taken.
    fn enter(&mut self) -> io::Result<()> {
        if self.is_idle() && std::mem::take(&mut self.has_finished) && self.await_next() {
            return Ok(());
        }
        self.shared.sleeping.store(true, Ordering::SeqCst);
        let can_take = !self.vacant.is_empty() && !self.shared.queue.lock().is_empty();
        let is_over = self.is_idle() && self.shared.closed.load(Ordering::SeqCst);
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
            self.bell_armed = self.push(&entry);
        }
    }

    /// Adds an entry; false if the submission queue is full, which its size rules out for one entry a flight.
    fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: what the entry points to (a flight's iovecs and memory) stays in place in this
        // driver until the completion, or is leaked by `give_up`. The bell's poll points to nothing.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    fn take_requests(&mut self) {
        while !self.vacant.is_empty() {
            let Some(request) = self.shared.queue.lock().pop_front() else { return };
            self.shared.queued.fetch_sub(1, Ordering::Relaxed);
            let IoRequest { operation, offset, mut memory, done } = request;
            let length = memory.length();
            let flight = Flight { operation, offset, memory, done, transferred: 0, length, vectors: Box::default() };
            if length == 0 && operation != Operation::Sync {
                (flight.done)(Completion { result: Ok(()), memory: flight.memory });
                continue;
            }
            self.launch(flight);
        }
    }

    fn launch(&mut self, mut flight: Flight) {
        let Some(place) = self.vacant.pop() else { return finish(flight, Err(io::ErrorKind::ResourceBusy.into())) };
        let entry = flight.entry().user_data(place as u64);
        self.flights[place] = Some(flight);
        if !self.push(&entry) {
            self.vacant.push(place);
            if let Some(flight) = self.flights[place].take() {
                finish(flight, Err(io::ErrorKind::ResourceBusy.into()));
            }
        }
    }

    fn reap(&mut self) {
        while let Some((data, result)) = self.next_completion() {
            if data == WAKE {
                let _ = rustix::io::read(&self.shared.bell, &mut [0_u8; 8]);
                self.bell_armed = false;
                continue;
            }
            let place = usize::try_from(data).unwrap_or(usize::MAX);
            let Some(mut flight) = self.flights.get_mut(place).and_then(Option::take) else { continue };
            self.vacant.push(place);
            self.has_finished = true;
            match flight.progress(result) {
                Some(result) => finish(flight, result),
                None => self.launch(flight),
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
        for flight in self.flights.drain(..).flatten() {
            let Flight { memory, done, vectors, .. } = flight;
            std::mem::forget((memory, vectors));
            done(Completion { result: Err(failure()), memory: IoMemory::empty() });
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

fn finish(flight: Flight, result: io::Result<()>) {
    (flight.done)(Completion { result, memory: flight.memory });
}

impl Flight {
    /// The submission entry for what is still to be transferred.
    fn entry(&mut self) -> squeue::Entry {
        let offset = self.offset + self.transferred as u64;
        if self.operation == Operation::Sync {
            return opcode::Fsync::new(FILE).flags(FsyncFlags::DATASYNC).build();
        }
        self.vectors = self
            .memory
            .slices_mut(self.transferred)
            .iter_mut()
            .map(|slice| libc::iovec { iov_base: slice.as_mut_ptr().cast(), iov_len: slice.len() })
            .collect();
        let vectors = (self.vectors.as_ptr(), u32::try_from(self.vectors.len()).unwrap_or(u32::MAX));
        match (self.operation, self.memory.registered(), &*self.vectors) {
            (Operation::Write, Some(index), [one]) => {
                let length = u32::try_from(one.iov_len).unwrap_or(u32::MAX);
                opcode::WriteFixed::new(FILE, one.iov_base.cast(), length, index).offset(offset).build()
            }
            (Operation::Write, ..) => opcode::Writev::new(FILE, vectors.0, vectors.1).offset(offset).build(),
            _ => opcode::Readv::new(FILE, vectors.0, vectors.1).offset(offset).build(),
        }
    }

    /// Takes a completion's result; `None` if the operation must go on.
    fn progress(&mut self, result: i32) -> Option<io::Result<()>> {
        match usize::try_from(result) {
            Err(_) if [libc::EINTR, libc::EAGAIN].contains(&-result) => None,
            Err(_) => Some(Err(io::Error::from_raw_os_error(-result))),
            Ok(_) if self.operation == Operation::Sync => Some(Ok(())),
            Ok(0) if self.operation == Operation::Read => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(0) => Some(Err(io::ErrorKind::WriteZero.into())),
            Ok(count) => {
                self.transferred += count;
                (self.transferred >= self.length).then_some(Ok(()))
            }
        }
    }
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
