//! Registered files: a region whose bytes lie in a file, and the way to one on this host.
//!
//! A file is read and written by an I/O engine of its own (`tidepool_io`: io_uring, else a few threads), straight from and
//! to registered memory. That starts with the first request. A file keeps its descriptor: unlinking it changes nothing.
//!
//! Its length is that of its registration. One that became shorter meanwhile is *truncated* for good: requests fail from
//! when that is noticed, also where there still are bytes, and also if it grows again, because what it then has there is
//! zeros that nobody wrote. Each process that uses the file looks for that before each request; whoever truncates a file
//! and lets it grow between two looks has changed its content, as anyone may who can write it.
//!
//! Frames of peers for which a file is read are bounded, and those for which it is written: a disk that hangs keeps the
//! threads, connections and memory of so many, and the others are refused. A file that works makes them wait a little
//! instead.

mod link;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::fs::{FileType, OFlags};
use tidepool_io::{Completion, IoEngine, IoMemory, IoRequest, Operation};

pub(crate) use self::link::FileLink;
use crate::error::{Failure, TransferError};
use crate::memory::Memory;
use crate::slice::{AccessRights, Direction};

/// Operations on one file at once: more don't make a device faster.
const DEPTH: u32 = 64;
/// Bytes that frames of peers read at once, and as many that they write: an eighth each of what there is for all files
/// (`serve::staging`).
const SERVED_BYTES_MAX: u64 = 32 << 20;
/// A frame counts as at least so many, which bounds the frames too.
const FRAME_BYTES_MIN: u64 = 1 << 20;
/// A file that ended none of its frames for so long hangs: nobody waits for it any more.
const HANGS_AFTER: Duration = Duration::from_secs(1);

/// A file as a region, or the same seen from a peer on its host.
pub(crate) struct SegmentFile {
    /// What peers on this host are passed; `None`: they can't be.
    file: Option<File>,
    length: u64,
    is_writable: bool,
    engine: Mutex<Option<Arc<dyn IoEngine>>>,
    is_truncated: AtomicBool,
    serving: Mutex<[Serving; 2]>,
    served: Condvar,
}

/// Frames of peers at the disk in one direction. Those that read wait here without memory, those that write with it: they
/// never wait for each other, or there would be neither turns nor memory.
#[derive(Clone, Copy)]
struct Serving {
    bytes: u64,
    /// When one ended last, or began when there was none.
    moved: Instant,
}

/// A frame's turn at a file, until it is dropped.
pub(crate) struct ServedFrame {
    file: Arc<SegmentFile>,
    direction: Direction,
    bytes: u64,
}

impl SegmentFile {
    /// Takes a file as long as it is, if peers may have that right to it.
    ///
    /// # Errors
    /// `NoSegment` with the reason; `System`.
    pub(crate) fn new(file: File, rights: AccessRights) -> Result<Self, TransferError> {
        let system = |error: rustix::io::Errno| TransferError::system("look at the file")(error.into());
        let status = rustix::fs::fstat(&file).map_err(system)?;
        let flags = rustix::fs::fcntl_getfl(&file).map_err(system)?;
        let access = flags & OFlags::RWMODE;
        let refusal = if !FileType::from_raw_mode(status.st_mode).is_file() {
            Some("it is no regular file")
        } else if flags.contains(OFlags::APPEND) {
            Some("it is open for appending, so that writes would not go where they should")
        } else if flags.contains(OFlags::DIRECT) {
            Some("it is open for direct I/O, which takes whole blocks only")
        } else if rights.remote_read && access == OFlags::WRONLY {
            Some("it is not open for reading")
        } else if rights.remote_write && access == OFlags::RDONLY {
            Some("it is not open for writing")
        } else {
            None
        };
        if let Some(reason) = refusal {
            return Err(TransferError::NoSegment { reason });
        }
        let length = u64::try_from(status.st_size).unwrap_or(0);
        Ok(Self::with(Some(file), length, access != OFlags::RDONLY, None))
    }

    /// A file that an engine has already. Peers on this host reach it over the network.
    #[cfg(feature = "faults")]
    pub(crate) fn on(engine: Arc<dyn IoEngine>, length: u64) -> Self {
        Self::with(None, length, true, Some(engine))
    }

    /// A file that a peer passed, of which `length` bytes are its region.
    ///
    /// # Errors
    /// `InvalidData` if it is no regular file; those of fstat.
    pub(crate) fn of_peer(file: OwnedFd, length: u64, is_writable: bool) -> io::Result<Self> {
        let status = rustix::fs::fstat(&file)?;
        if !FileType::from_raw_mode(status.st_mode).is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "what the peer passed is no regular file"));
        }
        Ok(Self::with(Some(file.into()), length, is_writable, None))
    }

    fn with(file: Option<File>, length: u64, is_writable: bool, engine: Option<Arc<dyn IoEngine>>) -> Self {
        Self {
            file,
            length,
            is_writable,
            engine: Mutex::new(engine),
            is_truncated: AtomicBool::new(false),
            serving: Mutex::new([Serving { bytes: 0, moved: Instant::now() }; 2]),
            served: Condvar::new(),
        }
    }

    /// The turn of a frame of `bytes` bytes. Where others have all the room it waits until `latest` for some, unless the
    /// file hangs. A frame that is alone has room whatever it needs.
    ///
    /// # Errors
    /// `Overloaded`.
    pub(crate) fn serve(
        self: &Arc<Self>,
        direction: Direction,
        bytes: u64,
        latest: Instant,
    ) -> Result<ServedFrame, Failure> {
        let bytes = bytes.max(FRAME_BYTES_MIN);
        let mut all = self.serving.lock();
        loop {
            let serving = &mut all[direction as usize];
            if serving.bytes == 0 {
                serving.moved = Instant::now();
            } else if serving.bytes + bytes > SERVED_BYTES_MAX {
                let until = latest.min(serving.moved + HANGS_AFTER);
                if self.served.wait_until(&mut all, until).timed_out() {
                    return Err(Failure::Overloaded);
                }
                continue;
            }
            serving.bytes += bytes;
            return Ok(ServedFrame { file: Arc::clone(self), direction, bytes });
        }
    }

    /// Bytes of the region.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// What peers on this host are passed.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Moves `length` bytes between `memory` and the file; both ranges were checked, and a read goes to memory that can be
    /// written. `done` is called once, here or on a thread of the file's engine, and must not wait.
    ///
    /// The memory is held until the system is done with it; what it has begun can't be stopped.
    pub(crate) fn transfer(
        self: &Arc<Self>,
        direction: Direction,
        (memory, start): (&Memory, u64),
        offset: u64,
        length: u64,
        done: impl FnOnce(Result<(), Failure>) + Send + 'static,
    ) {
        let (Ok(range), Ok(engine)) = (memory.range(start, length), self.engine()) else {
            return done(Err(Failure::System));
        };
        if self.has_shrunk() {
            return done(Err(Failure::Truncated));
        }
        let operation = if direction == Direction::Read { Operation::Read } else { Operation::Write };
        let file = Arc::clone(self);
        let done = Box::new(move |Completion { result, memory }: Completion| {
            drop(memory);
            done(result.map_err(|error| file.failure(&error)));
        });
        engine.submit(IoRequest { operation, offset, memory: IoMemory::outside(Box::new(range)), done });
    }

    /// What reads and writes it, started with the first use.
    ///
    /// # Errors
    /// The system's: no descriptors, no memory, no threads.
    pub(crate) fn engine(&self) -> io::Result<Arc<dyn IoEngine>> {
        let mut engine = self.engine.lock();
        if let Some(engine) = &*engine {
            return Ok(Arc::clone(engine));
        }
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?.try_clone()?;
        let (started, reason) = tidepool_io::start_threaded(file, DEPTH)
            .inspect_err(|error| tracing::warn!(%error, "no I/O engine for a registered file"))?;
        if let Some(error) = reason {
            tracing::info!(%error, "registered file without io_uring: blocking I/O");
        }
        Ok(Arc::clone(engine.insert(started)))
    }

    /// Whether the file is, or ever was seen to be, shorter than its region.
    fn has_shrunk(&self) -> bool {
        if self.is_truncated.load(Ordering::Acquire) {
            return true;
        }
        let Some(file) = &self.file else { return false };
        let is_short = file.metadata().is_ok_and(|status| status.len() < self.length);
        if is_short {
            self.is_truncated.store(true, Ordering::Release);
        }
        is_short
    }

    fn failure(&self, error: &io::Error) -> Failure {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            self.is_truncated.store(true, Ordering::Release);
            return Failure::Truncated;
        }
        tracing::debug!(%error, "I/O on a registered file");
        Failure::Storage
    }
}

impl Drop for ServedFrame {
    fn drop(&mut self) {
        let mut all = self.file.serving.lock();
        let serving = &mut all[self.direction as usize];
        serving.bytes -= self.bytes;
        serving.moved = Instant::now();
        drop(all);
        self.file.served.notify_all();
    }
}

impl std::fmt::Debug for SegmentFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SegmentFile").field("bytes", &self.length).field("writable", &self.is_writable).finish()
    }
}
