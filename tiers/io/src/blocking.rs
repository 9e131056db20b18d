//! I/O by `preadv` and `pwritev` on a pool of threads, for machines where io_uring is missing or forbidden.
//!
//! Shutdown: dropping the engine finishes what was submitted, then ends the threads.
#![expect(unsafe_code, reason = "hands an operation's memory to the kernel for the length of a call")]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use crate::{Completion, EngineKind, IoEngine, IoMemory, IoRequest, Operation};

/// More threads than this gain nothing on one device and cost stack and switches.
const MAX_THREADS: u32 = 32;

#[derive(Default)]
struct Queue {
    waiting: VecDeque<IoRequest>,
    closed: bool,
}

struct Shared {
    file: File,
    queue: Mutex<Queue>,
    arrived: Condvar,
}

/// A pool of threads, one operation each at a time.
pub struct BlockingEngine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl BlockingEngine {
    /// Starts up to `queue_depth` threads on `file`.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(file: File, queue_depth: u32) -> io::Result<Self> {
        let shared = Arc::new(Shared { file, queue: Mutex::default(), arrived: Condvar::new() });
        let mut engine = Self { shared, threads: Vec::new() };
        for number in 0..queue_depth.clamp(1, MAX_THREADS) {
            let shared = Arc::clone(&engine.shared);
            let thread = thread::Builder::new().name(format!("tidepool-io-{number}")).spawn(move || shared.work());
            match thread {
                Ok(thread) => engine.threads.push(thread),
                Err(error) if engine.threads.is_empty() => return Err(error),
                // Fewer threads mean less depth, not less function.
                Err(_) => break,
            }
        }
        Ok(engine)
    }
}

impl IoEngine for BlockingEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Blocking
    }

    fn submit(&self, request: IoRequest) {
        self.shared.queue.lock().waiting.push_back(request);
        self.shared.arrived.notify_one();
    }
}

impl Drop for BlockingEngine {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.arrived.notify_all();
        let current = thread::current().id();
        // The last reference may go away inside a completion, on one of our own threads.
        for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != current) {
            drop(thread.join());
        }
    }
}

impl Shared {
    fn work(&self) {
        while let Some(request) = self.next() {
            let IoRequest { operation, offset, mut memory, done } = request;
            let result = perform(&self.file, operation, offset, &mut memory);
            done(Completion { result, memory });
        }
    }

    fn next(&self) -> Option<IoRequest> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(request) = queue.waiting.pop_front() {
                return Some(request);
            }
            if queue.closed {
                return None;
            }
            self.arrived.wait(&mut queue);
        }
    }
}

fn perform(file: &File, operation: Operation, offset: u64, memory: &mut IoMemory) -> io::Result<()> {
    if operation == Operation::Sync {
        return file.sync_data();
    }
    let (mut done, length) = (0, memory.length());
    while done < length {
        match transfer(file, operation, offset + done as u64, &memory.vectors(done)) {
            Ok(0) if operation == Operation::Read => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// One system call over the ranges of an operation's memory, which the caller keeps.
fn transfer(file: &File, operation: Operation, offset: u64, vectors: &[libc::iovec]) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    let (file, start, count) = (file.as_raw_fd(), vectors.as_ptr(), vectors.len() as i32);
    let moved = match operation {
        // SAFETY: the ranges lie in memory that the operation owns and that a read may fill, and stay there for the call.
        Operation::Read => unsafe { libc::preadv64(file, start, count, offset) },
        // SAFETY: the same; the kernel only reads them.
        _ => unsafe { libc::pwritev64(file, start, count, offset) },
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}
