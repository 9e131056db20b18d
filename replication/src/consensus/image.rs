//! The durable image of the state machine: its rows in a RocksDB of its own, written behind apply.
//!
//! | key | value |
//! |---|---|
//! | `i` | identity, as in the log |
//! | `p` | position: index, term, log time; 8 bytes each, little-endian |
//! | `s` | if it came as a snapshot: index and term of its position then, 8 bytes each, and the members |
//! | `r` and the row's key | the row's bytes |
//!
//! A batch has all rows that changed since the last one and the position that they belong to, taken under one lock; there
//! is one column family and no write-ahead log. So whatever RocksDB flushes, and whenever, is the state at some
//! position, and the log replays the rest.
//!
//! Invariant: the flushed position is never ahead of the durable log. With `durability = os` the log is therefore synced
//! before each batch.
//! A snapshot of another member takes its place as a whole: it lies complete in `image.new`, and is renamed
//! ([`super::snapshot`]). The log follows; if the process dies in between, the next start sees by `s` what happened.
//! Failure: an image that cannot be written ends the group, since the log could never be compacted again.

use std::num::NonZero;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rocksdb::checkpoint::Checkpoint;
use rocksdb::{DB, IteratorMode, Options, ReadOptions, WriteBatch, WriteOptions};
use tidepool_metadata::catalog::Rows;
use tidepool_metadata::{LogIndex, LogTime};
use tokio::sync::oneshot;

use super::config::GroupConfig;
use super::log::{Position, Unsynced};
use super::machine::{Change, StateMachine};
use super::member::Members;
use super::shared::{Applied, Shared};
use super::{ClusterEpoch, database, identity, snapshot};
use crate::error::GroupError;

const IDENTITY: &[u8] = b"i";
const POSITION: &[u8] = b"p";
const SNAPSHOT: &[u8] = b"s";
const ROW: u8 = b'r';
/// Size of sorted files: small, so that those who load share them out evenly.
const FILE_BYTES: u64 = 16 << 20;
/// What is read ahead of who reads rows.
const READAHEAD_BYTES: usize = 2 << 20;

pub(super) struct Image {
    database: DB,
}

fn options() -> Options {
    let mut options = database::options();
    options.set_atomic_flush(true);
    options.set_target_file_size_base(FILE_BYTES);
    options
}

fn read_error(source: rocksdb::Error) -> GroupError {
    GroupError::Read { what: "the image", source }
}

fn write_error(source: rocksdb::Error) -> GroupError {
    GroupError::Write { what: "the image", source }
}

impl Image {
    pub(super) fn open(path: &Path, config: &GroupConfig) -> Result<Self, GroupError> {
        let database = DB::open(&options(), path).map_err(|source| GroupError::Open {
            what: "the image",
            path: path.to_owned(),
            source,
        })?;
        let image = Self { database };
        match image.database.get(IDENTITY).map_err(read_error)? {
            Some(found) => identity::check("the image", &found, config)?,
            None if image.database.iterator(IteratorMode::Start).next().is_some() => {
                return Err(GroupError::CorruptImage { problem: "it says not whose it is" });
            }
            None => {
                let mut batch = WriteBatch::default();
                batch.put(IDENTITY, identity::encode(config));
                image.write(batch)?;
                image.flush()?;
            }
        }
        Ok(image)
    }

    /// Makes what another member gave this node's own: it is whole, and holds `members` as of its position or later.
    pub(super) fn adopt(path: &Path, config: &GroupConfig, members: &Members) -> Result<Position, GroupError> {
        let database = DB::open(&options(), path).map_err(|source| GroupError::Open {
            what: "a fetched snapshot",
            path: path.to_owned(),
            source,
        })?;
        let image = Self { database };
        let (position, _) =
            image.position()?.ok_or(GroupError::CorruptImage { problem: "a snapshot has no position" })?;
        let mut batch = WriteBatch::default();
        batch.put(IDENTITY, identity::encode(config));
        let mut mark = [position.index, position.term].map(u64::to_le_bytes).concat();
        mark.extend_from_slice(&members.encode());
        batch.put(SNAPSHOT, mark);
        image.write(batch)?;
        image.flush()?;
        Ok(position)
    }

    /// Where it came as a snapshot, and with which members.
    pub(super) fn arrival(&self) -> Result<Option<(Position, Members)>, GroupError> {
        let Some(mark) = self.database.get(SNAPSHOT).map_err(read_error)? else { return Ok(None) };
        let corrupt = GroupError::CorruptImage { problem: "where it came as a snapshot can't be read" };
        let Some((position, members)) = mark.split_first_chunk::<16>() else { return Err(corrupt) };
        let number = |at: usize| u64::from_le_bytes(position[at..at + 8].try_into().expect("8 bytes"));
        let position = Position { index: number(0), term: number(8) };
        Ok(Some((position, Members::decode(members).ok_or(corrupt)?)))
    }

    /// A copy of what is written by now, in `path`, at the cost of some links; answers its position.
    pub(super) fn copy_to(&self, path: &Path) -> Result<Option<Position>, GroupError> {
        // All that is written is in it; flushed first, so that it is in files.
        self.flush()?;
        let position = self.position()?.map(|(position, _)| position);
        let checkpoint = Checkpoint::new(&self.database).map_err(read_error)?;
        checkpoint.create_checkpoint(path).map_err(write_error)?;
        Ok(position)
    }

    fn position(&self) -> Result<Option<(Position, LogTime)>, GroupError> {
        let Some(bytes) = self.database.get(POSITION).map_err(read_error)? else { return Ok(None) };
        let numbers: Vec<u64> =
            bytes.chunks_exact(8).map(|part| u64::from_le_bytes(part.try_into().expect("8 bytes"))).collect();
        let &[index, term, time] = numbers.as_slice() else {
            return Err(GroupError::CorruptImage { problem: "its position has a wrong length" });
        };
        Ok(Some((Position { index, term }, LogTime(time))))
    }

    /// The state as the image has it, read by so many threads.
    pub(super) fn load<S: StateMachine>(
        &self,
        epoch: ClusterEpoch,
        threads: NonZero<usize>,
    ) -> Result<Applied<S>, GroupError> {
        let Some((position, time)) = self.position()? else {
            let (position, time) = (epoch.start(), LogTime::default());
            return Ok(Applied { machine: S::empty(), position, time, bytes: 0 });
        };
        let rows = ImageRows { cuts: self.cuts()?, database: &self.database, failed: Mutex::new(None) };
        let machine = S::load(&rows, threads);
        match rows.failed.into_inner() {
            Some(source) => Err(read_error(source)),
            None => {
                let machine = machine.map_err(|source| GroupError::Load(Box::new(source)))?;
                Ok(Applied { machine, position, time, bytes: 0 })
            }
        }
    }

    /// Where files begin that are sorted among each other, without the first byte.
    fn cuts(&self) -> Result<Vec<Vec<u8>>, GroupError> {
        let files = self.database.live_files().map_err(read_error)?;
        let sorted = files.into_iter().filter(|file| file.level > 0).filter_map(|file| file.start_key);
        let mut cuts: Vec<_> = sorted.filter_map(|key| Some(key.strip_prefix(&[ROW])?.to_vec())).collect();
        cuts.sort_unstable();
        Ok(cuts)
    }

    fn put(&self, changes: Vec<Change>, position: Position, time: LogTime) -> Result<(), GroupError> {
        let mut batch = WriteBatch::default();
        let mut row = vec![ROW];
        for (key, value) in changes {
            row.truncate(1);
            row.extend_from_slice(&key);
            match value {
                Some(value) => batch.put(&row, value),
                None => batch.delete(&row),
            }
        }
        batch.put(POSITION, [position.index, position.term, time.0].map(u64::to_le_bytes).concat());
        self.write(batch)
    }

    fn write(&self, batch: WriteBatch) -> Result<(), GroupError> {
        let mut options = WriteOptions::default();
        options.disable_wal(true);
        self.database.write_opt(batch, &options).map_err(write_error)
    }

    fn flush(&self) -> Result<(), GroupError> {
        self.database.flush().map_err(write_error)
    }
}

/// The rows of an image that is not written to.
struct ImageRows<'a> {
    database: &'a DB,
    cuts: Vec<Vec<u8>>,
    failed: Mutex<Option<rocksdb::Error>>,
}

impl Rows for ImageRows<'_> {
    fn scan(&self, range: Range<&[u8]>, mut each: impl FnMut(&[u8], &[u8]) -> bool) {
        let mut options = ReadOptions::default();
        options.set_readahead_size(READAHEAD_BYTES);
        options.fill_cache(false);
        let behind_all = [ROW + 1];
        let from = [&[ROW], range.start].concat();
        let to = if range.end.is_empty() { behind_all.to_vec() } else { [&[ROW], range.end].concat() };
        options.set_iterate_upper_bound(to);
        let mut rows = self.database.raw_iterator_opt(options);
        rows.seek(from);
        while let Some((key, value)) = rows.item() {
            if !each(&key[1..], value) {
                return;
            }
            rows.next();
        }
        if let Err(source) = rows.status() {
            *self.failed.lock() = Some(source);
        }
    }

    fn cuts(&self) -> Vec<Vec<u8>> {
        self.cuts.clone()
    }
}

/// Tells the image thread that there are changes, that a snapshot takes the image's place, and when it is over.
pub(super) struct Dirty<S> {
    state: Mutex<DirtyState<S>>,
    wake: Condvar,
}

struct DirtyState<S> {
    since: Option<Instant>,
    install: Option<(Applied<S>, SyncSender<()>)>,
    /// Who waits for a flush.
    flushes: Vec<oneshot::Sender<LogIndex>>,
    end: bool,
}

impl<S> Default for Dirty<S> {
    fn default() -> Self {
        Self {
            state: Mutex::new(DirtyState { since: None, install: None, flushes: Vec::new(), end: false }),
            wake: Condvar::new(),
        }
    }
}

impl<S> Dirty<S> {
    /// The state of the snapshot in `image.new` takes the place of the present one; `done` hears when it has.
    pub(super) fn install(&self, state: Applied<S>, done: SyncSender<()>) {
        self.state.lock().install = Some((state, done));
        self.wake.notify_one();
    }

    /// Asks for a flush of all that is applied by now; `done` hears up to where it is on disk.
    pub(super) fn flush(&self, done: oneshot::Sender<LogIndex>) {
        self.state.lock().flushes.push(done);
        self.wake.notify_one();
    }

    fn take_install(&self) -> Option<(Applied<S>, SyncSender<()>)> {
        self.state.lock().install.take()
    }

    pub(super) fn mark(&self) {
        let mut state = self.state.lock();
        if state.since.is_none() {
            state.since = Some(Instant::now());
            self.wake.notify_one();
        }
    }

    /// No more changes come.
    pub(super) fn end(&self) {
        self.state.lock().end = true;
        self.wake.notify_one();
    }

    /// Waits until changes are `interval` old, until `deadline`, or for the end, which it answers with true.
    fn wait(&self, interval: Duration, deadline: Option<Instant>) -> bool {
        let mut state = self.state.lock();
        while !state.end && state.install.is_none() && state.flushes.is_empty() {
            let due = match (state.since.map(|since| since + interval), deadline) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            };
            match due {
                Some(due) if due <= Instant::now() => break,
                Some(due) => drop(self.wake.wait_until(&mut state, due)),
                None => self.wake.wait(&mut state),
            }
        }
        state.since = None;
        state.end
    }
}

/// Writes rows behind apply, and flushes them; owned by the image thread.
pub(super) struct Writer<S: StateMachine> {
    pub(super) shared: Arc<Shared<S>>,
    /// Whoever copies it, locks it; none while a snapshot takes its place.
    pub(super) image: Arc<Mutex<Option<Image>>>,
    /// Where the image was when it was loaded.
    pub(super) start: Position,
    pub(super) log: Unsynced,
    pub(super) dirty: Arc<Dirty<S>>,
}

impl<S: StateMachine> Drop for Writer<S> {
    /// Whoever gives copies of it may live longer; the folder is free when the thread is gone.
    fn drop(&mut self) {
        drop(self.image.lock().take());
    }
}

/// Where the image is: what is written, and what of it is flushed.
struct Progress {
    written: Position,
    written_bytes: u64,
    /// Since when something is written and not flushed.
    unflushed_since: Option<Instant>,
}

impl<S: StateMachine> Writer<S> {
    /// Runs until the apply thread has ended; flushes last, unless the group failed.
    pub(super) fn run(&self) -> Result<(), GroupError> {
        let limits = &self.shared.limits;
        let mut progress = Progress { written: self.start, written_bytes: 0, unflushed_since: None };
        loop {
            let deadline = progress.unflushed_since.map(|since| since + limits.image_flush_interval);
            let end = self.dirty.wait(limits.image_interval, deadline);
            if self.shared.failure().is_some() {
                return Ok(());
            }
            if let Some((state, done)) = self.dirty.take_install() {
                self.install(state, &mut progress)?;
                // The Raft thread may have failed meanwhile.
                let _ = done.send(());
                continue;
            }
            let waiting = std::mem::take(&mut self.dirty.state.lock().flushes);
            self.write(&mut progress)?;
            let bytes = progress.written_bytes - self.shared.flushed_bytes.load(Ordering::Acquire);
            let age = progress.unflushed_since.map(|since| since.elapsed());
            let asked = !waiting.is_empty();
            if age.is_some_and(|age| {
                end || asked || bytes >= limits.image_flush_bytes || age >= limits.image_flush_interval
            }) {
                self.flush(&mut progress)?;
            }
            for done in waiting {
                // Whoever asked may have gone away.
                let _ = done.send(LogIndex(progress.written.index));
            }
            if end {
                return Ok(());
            }
        }
    }

    fn write(&self, progress: &mut Progress) -> Result<(), GroupError> {
        let mut state = self.shared.state.write();
        if state.position == progress.written {
            return Ok(());
        }
        let changes = state.machine.take_changes();
        let (position, time, bytes) = (state.position, state.time, state.bytes);
        drop(state);
        self.log.sync()?;
        self.with_image(|image| image.put(changes, position, time))?;
        (progress.written, progress.written_bytes) = (position, bytes);
        progress.unflushed_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    fn with_image<A>(&self, work: impl FnOnce(&Image) -> Result<A, GroupError>) -> Result<A, GroupError> {
        match &*self.image.lock() {
            Some(image) => work(image),
            None => Err(GroupError::CorruptImage { problem: "it is closed" }),
        }
    }

    /// Readers see the old state or the new one; what was not written of the old one needs not be.
    fn install(&self, mut state: Applied<S>, progress: &mut Progress) -> Result<(), GroupError> {
        let mut image = self.image.lock();
        drop(image.take());
        snapshot::put_in_place(&self.shared.config.folder)?;
        *image = Some(Image::open(&self.shared.config.folder.join("image"), &self.shared.config)?);
        drop(image);
        let (position, time) = (state.position, state.time);
        let mut present = self.shared.state.write();
        state.bytes = present.bytes;
        *progress = Progress { written: position, written_bytes: state.bytes, unflushed_since: None };
        let old = std::mem::replace(&mut *present, state);
        drop(present);
        // Outside the lock: it may be large.
        drop(old);
        self.shared.clock.at_least(time);
        self.shared.flushed_bytes.store(progress.written_bytes, Ordering::Release);
        self.shared.flushed.store(position.index, Ordering::Release);
        self.shared.applied.send_replace(LogIndex(position.index));
        tracing::info!(index = position.index, "a snapshot is in place");
        Ok(())
    }

    fn flush(&self, progress: &mut Progress) -> Result<(), GroupError> {
        self.with_image(Image::flush)?;
        progress.unflushed_since = None;
        self.shared.flushed_bytes.store(progress.written_bytes, Ordering::Release);
        self.shared.flushed.store(progress.written.index, Ordering::Release);
        self.shared.inbox.flushed(LogIndex(progress.written.index));
        Ok(())
    }
}
