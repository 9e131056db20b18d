//! Who writes the log: a thread of its own, or whoever asks for it at once.
//!
//! ```text
//!  Raft thread ── write_later ──> [ batches, in order ] ──> LogWriter::run ──> acknowledgements to others
//!       │                                                        └── written(number) ──> Raft thread
//!       └──────── write: waits until the queue is empty, then writes on this thread
//! ```
//!
//! All batches that wait are written with one sync: the last one's, which syncs those before it. A queue that is full holds up
//! the Raft thread. The first failed write ends the writer, and nothing behind it is written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rocksdb::{DB, WriteBatch, WriteOptions};

use super::Behind;
use crate::error::GroupError;

/// Batches that may wait. Their bytes are bounded by what may be logged and not committed, and by what followers take.
const BATCHES: usize = 1024;

/// A batch's place in the order of all that were given to the thread.
pub(super) type Given = u64;

enum Task {
    Write {
        batch: WriteBatch,
        sync: bool,
        /// What follows.
        behind: Option<Behind>,
    },
    /// Told once all that was given before is written.
    Wait(SyncSender<()>),
}

/// The writing hand of the log's owner.
pub(super) struct Pen {
    file: File,
    /// Something was given since the last sync that need not be synced.
    has_unsynced: Arc<AtomicBool>,
    tasks: Option<SyncSender<Task>>,
    given: Given,
    written: Arc<AtomicU64>,
}

/// Owned by the thread that writes.
pub(in crate::consensus) struct LogWriter {
    file: File,
    tasks: Receiver<Task>,
    written: Arc<AtomicU64>,
}

#[derive(Clone)]
struct File {
    database: Arc<DB>,
    #[cfg(test)]
    fail_writes: Arc<AtomicBool>,
}

const DIED: GroupError = GroupError::ThreadDied { thread: "log" };

impl Pen {
    pub(super) fn new(database: Arc<DB>) -> Self {
        let file = File {
            database,
            #[cfg(test)]
            fail_writes: Arc::default(),
        };
        Self { file, has_unsynced: Arc::default(), tasks: None, given: 0, written: Arc::default() }
    }

    #[cfg(test)]
    pub(super) fn fail_with(&mut self, flag: &Arc<AtomicBool>) {
        self.file.fail_writes = Arc::clone(flag);
    }

    /// The other end of the queue. Without one, everything is written at once.
    pub(super) fn writer(&mut self) -> LogWriter {
        let (sender, tasks) = sync_channel(BATCHES);
        self.tasks = Some(sender);
        LogWriter { file: self.file.clone(), tasks, written: Arc::clone(&self.written) }
    }

    /// Writes at once, behind all that was given before. On return it is on disk, if it must be synced.
    pub(super) fn write(&self, batch: WriteBatch, sync: bool) -> Result<(), GroupError> {
        if let Some(tasks) = &self.tasks
            && self.written() < self.given
        {
            wait(tasks)?;
        }
        self.file.write(batch, sync)?;
        self.has_unsynced.store(!sync, Ordering::Release);
        Ok(())
    }

    /// Gives a batch to the thread; `behind` follows when it is written.
    pub(super) fn write_later(
        &mut self,
        batch: WriteBatch,
        sync: bool,
        behind: Option<Behind>,
    ) -> Result<Given, GroupError> {
        self.given += 1;
        if !sync {
            self.has_unsynced.store(true, Ordering::Release);
        }
        match &self.tasks {
            Some(tasks) => tasks.send(Task::Write { batch, sync, behind }).map_err(|_| DIED)?,
            None => {
                self.file.write(batch, sync)?;
                self.written.store(self.given, Ordering::Release);
            }
        }
        Ok(self.given)
    }

    /// How many of what was given are written.
    pub(super) fn written(&self) -> Given {
        self.written.load(Ordering::Acquire)
    }

    pub(super) fn unsynced(&self) -> Unsynced {
        Unsynced {
            database: Arc::clone(&self.file.database),
            any: Arc::clone(&self.has_unsynced),
            tasks: self.tasks.clone(),
        }
    }
}

/// What was given and may not be on disk yet, for another thread to sync.
pub(in crate::consensus) struct Unsynced {
    database: Arc<DB>,
    any: Arc<AtomicBool>,
    tasks: Option<SyncSender<Task>>,
}

impl Unsynced {
    #[cfg(test)]
    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Returns when all is on disk that was given before the call.
    pub(in crate::consensus) fn sync(&self) -> Result<(), GroupError> {
        // Taken back first: what is given during the sync is for the next one.
        if !self.any.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        self.tasks.iter().try_for_each(wait)?;
        self.database.flush_wal(true).map_err(|source| GroupError::Write { what: "the log", source })
    }
}

/// Returns when all that was given to the thread before is written.
fn wait(tasks: &SyncSender<Task>) -> Result<(), GroupError> {
    let (done, written) = sync_channel(1);
    tasks.send(Task::Wait(done)).map_err(|_| DIED)?;
    // A writer that fails drops it.
    written.recv().map_err(|_| DIED)
}

impl LogWriter {
    /// Writes what is given, until the log is dropped. `follow` has what was to follow all that was written together: the
    /// highest number, and the messages in order.
    pub(in crate::consensus) fn run(self, follow: impl Fn(Behind)) -> Result<(), GroupError> {
        while let Ok(first) = self.tasks.recv() {
            let (mut batches, mut waiting) = (Vec::new(), Vec::new());
            let (mut must_sync, mut together) = (false, None);
            for task in std::iter::once(first).chain(self.tasks.try_iter().take(BATCHES)) {
                match task {
                    Task::Write { batch, sync, behind } => {
                        batches.push(batch);
                        must_sync |= sync;
                        if let Some(behind) = behind {
                            let together = together.get_or_insert_with(Behind::default);
                            together.number = behind.number;
                            together.messages.extend(behind.messages);
                        }
                    }
                    Task::Wait(done) => waiting.push(done),
                }
            }
            let count = batches.len();
            for (place, batch) in batches.into_iter().enumerate() {
                self.file.write(batch, must_sync && place + 1 == count)?;
            }
            self.written.fetch_add(count as u64, Ordering::AcqRel);
            for done in waiting {
                // Whoever waited may have ended.
                let _ = done.send(());
            }
            together.into_iter().for_each(&follow);
        }
        Ok(())
    }
}

impl File {
    fn write(&self, batch: WriteBatch, sync: bool) -> Result<(), GroupError> {
        #[cfg(test)]
        if self.fail_writes.load(Ordering::Acquire) {
            // RocksDB has no public constructor of an I/O error; an illegal call gives a real one.
            let options = rocksdb::Options::default();
            let source = DB::open(&options, "/dev/null/log").map(|_| ()).expect_err("no folder");
            return Err(GroupError::Write { what: "the log", source });
        }
        let mut options = WriteOptions::default();
        options.set_sync(sync);
        self.database.write_opt(batch, &options).map_err(|source| GroupError::Write { what: "the log", source })
    }
}
