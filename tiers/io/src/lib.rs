//! Reading and writing one file at given offsets, behind one trait: io_uring, a pool of threads, and a faulty disk.
//!
//! Knows nothing of regions or records. An engine is made for one file and holds it open.
//!
//! Ownership: an operation owns its memory ([`IoMemory`]) from submission to completion and gives it back with the
//! result, so a caller that goes away never frees bytes under the device.
//! Bounds: an engine queues what it is given; each caller bounds what it has in flight (`NvmeConfig::queue_depth`).

mod available;
mod blocking;
#[cfg(any(test, feature = "faults"))]
pub mod faulty;
mod kept;
mod memory;
mod uring;

use std::fs::File;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc;

pub use available::available_bytes;
pub use blocking::BlockingEngine;
pub use kept::{keep, kept};
pub use memory::{Allocation, Block, BufferPool, HUGE_PAGE_BYTES, IoMemory, Landing, Outside, PAGE_BYTES};
use serde::{Deserialize, Serialize};
pub use uring::UringEngine;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fill the memory from the file. The end of the file inside the range is an error.
    Read,
    /// Write all of the memory to the file.
    Write,
    /// `fdatasync`: what was confirmed before this was submitted is durable when it succeeds.
    Sync,
}

/// An operation's end: the result, and the memory that it owned.
#[derive(Debug)]
pub struct Completion {
    /// Whether all bytes were transferred.
    pub result: io::Result<()>,
    /// The memory; its content is undefined after a failed read.
    pub memory: IoMemory,
}

/// A future in a box, as trait objects need it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Told of an operation's end on an engine's thread; must be short and must not wait for another operation.
pub type OnCompletion = Box<dyn FnOnce(Completion) + Send>;

/// One operation to do.
pub struct IoRequest {
    /// What to do.
    pub operation: Operation,
    /// Where in the file, in bytes; with direct I/O a multiple of [`PAGE_BYTES`].
    pub offset: u64,
    /// From or into what; empty for a sync. With direct I/O each piece is page-aligned in place and length.
    pub memory: IoMemory,
    /// Called exactly once.
    pub done: OnCompletion,
}

/// Does I/O on one file.
///
/// Operations in flight are unordered among each other: who needs an order waits for the first completion. A failed
/// sync says that writes may be lost for good; it must not be tried again, the file is to be given up.
pub trait IoEngine: Send + Sync {
    /// Which engine this is, for logs and admin.
    fn kind(&self) -> EngineKind;

    /// Starts an operation; returns at once. `done` is called even if the engine is shutting down.
    fn submit(&self, request: IoRequest);

    /// As [`IoEngine::submit`], for a task that awaits the end of a read and does not block its thread until then. The
    /// thread may be used to enter the kernel, and while [`IoEngine::drive`] runs it may call `done`, which is called on
    /// a thread of that runtime.
    fn submit_from_task(&self, request: IoRequest) {
        self.submit(request);
    }

    /// Saves tasks the way over the engine's threads while this future runs on their runtime. Ends with the engine;
    /// dropped, it first waits for the reads that it has in flight. An engine without use for it gives a future that
    /// ends at once.
    ///
    /// # Panics
    /// The future does outside a tokio runtime with I/O enabled.
    fn drive(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}

impl dyn IoEngine + '_ {
    /// Does one operation and waits for it; not on an engine's own thread.
    ///
    /// # Errors
    /// The operation's own.
    pub fn run(&self, operation: Operation, offset: u64, memory: IoMemory) -> io::Result<IoMemory> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let done = Box::new(move |completion| drop(sender.send(completion)));
        self.submit(IoRequest { operation, offset, memory, done });
        let Completion { result, memory } = receiver.recv().map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        result.map(|()| memory)
    }

    /// Reads into `block` and waits.
    ///
    /// # Errors
    /// The operation's own.
    pub fn read_block(&self, offset: u64, block: Block) -> io::Result<Block> {
        let mut blocks = self.run(Operation::Read, offset, IoMemory::block(block))?.into_blocks();
        blocks.pop().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Writes `block` and waits.
    ///
    /// # Errors
    /// The operation's own.
    pub fn write_block(&self, offset: u64, block: Block) -> io::Result<()> {
        self.run(Operation::Write, offset, IoMemory::block(block)).map(drop)
    }

    /// Makes confirmed writes durable and waits.
    ///
    /// # Errors
    /// The operation's own; not to be retried.
    pub fn sync(&self) -> io::Result<()> {
        self.run(Operation::Sync, 0, IoMemory::empty()).map(drop)
    }
}

/// The engines there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    /// io_uring with a registered file and registered buffers.
    IoUring,
    /// `preadv` and `pwritev` on a pool of threads.
    Blocking,
    /// A disk in memory that fails as told.
    Faulty,
}

/// Which engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineChoice {
    /// io_uring if the machine lets us, else blocking, with one warning that says why.
    #[default]
    Auto,
    /// io_uring, or an error.
    IoUring,
    /// Blocking.
    Blocking,
}

/// Starts an engine on `file` for a program without a runtime; io_uring if the machine lets us, else blocking, and why.
///
/// # Errors
/// No thread could be started.
pub fn start_threaded(file: File, queue_depth: u32) -> io::Result<(Arc<dyn IoEngine>, Option<io::Error>)> {
    match UringEngine::without_tasks(file.try_clone()?, &[], queue_depth) {
        Ok(engine) => Ok((Arc::new(engine), None)),
        Err(reason) => Ok((Arc::new(BlockingEngine::start(file, queue_depth)?), Some(reason))),
    }
}

/// Starts an engine on `file`; `buffers` are registered where the engine can do that.
///
/// # Errors
/// Whatever kept the demanded engine from starting. `Auto` falls back to the blocking engine and gives the reason.
pub fn start_engine(
    choice: EngineChoice,
    file: File,
    buffers: &[Arc<Allocation>],
    queue_depth: u32,
) -> io::Result<(Arc<dyn IoEngine>, Option<io::Error>)> {
    let reason = match choice {
        EngineChoice::Blocking => None,
        EngineChoice::Auto | EngineChoice::IoUring => {
            match UringEngine::start(file.try_clone()?, buffers, queue_depth) {
                Ok(engine) => return Ok((Arc::new(engine), None)),
                Err(error) if choice == EngineChoice::IoUring => return Err(error),
                Err(error) => Some(error),
            }
        }
    };
    Ok((Arc::new(BlockingEngine::start(file, queue_depth)?), reason))
}

#[cfg(test)]
mod tests;
