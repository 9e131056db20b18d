//! The durable image of the state machine: its rows in a RocksDB of its own, written behind apply.
//!
//! | key | value |
//! |---|---|
//! | `i` | identity: version 1, cluster (8 bytes), node (4 bytes) |
//! | `p` | position: index, term, log time; 8 bytes each, little-endian |
//! | `r` and the row's key | the row's bytes |
//!
//! A batch has all rows that changed since the last one and the position that they belong to, taken under one lock; there
//! is one column family and no write-ahead log. So whatever RocksDB flushes, and whenever, is the state at some
//! position, and the log replays the rest.
//!
//! Invariant: the flushed position is never ahead of the durable log. With `durability = os` the log is therefore synced
//! before each batch.
//! Failure: an image that cannot be written ends the group, since the log could never be compacted again.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rocksdb::{DB, Direction, IteratorMode, Options, WriteBatch, WriteOptions};
use tidepool_metadata::{LogIndex, LogTime};

use super::config::{Durability, GroupConfig};
use super::log::Position;
use super::machine::{Change, StateMachine};
use super::shared::{Applied, Shared};
use super::{ClusterEpoch, database, identity};
use crate::error::GroupError;

const IDENTITY: &[u8] = b"i";
const POSITION: &[u8] = b"p";
const ROW: u8 = b'r';

pub(super) struct Image {
    database: DB,
}

fn options() -> Options {
    let mut options = database::options();
    options.set_atomic_flush(true);
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

    /// The state as the image has it.
    pub(super) fn load<S: StateMachine>(&self, epoch: ClusterEpoch) -> Result<Applied<S>, GroupError> {
        let Some(bytes) = self.database.get(POSITION).map_err(read_error)? else {
            let (position, time) = (epoch.start(), LogTime::default());
            return Ok(Applied { machine: S::empty(), position, time, bytes: 0 });
        };
        let numbers: Vec<u64> =
            bytes.chunks_exact(8).map(|part| u64::from_le_bytes(part.try_into().expect("8 bytes"))).collect();
        let &[index, term, time] = numbers.as_slice() else {
            return Err(GroupError::CorruptImage { problem: "its position has a wrong length" });
        };
        let mut failed = None;
        let rows = self.database.iterator(IteratorMode::From(&[ROW], Direction::Forward));
        let rows = rows.map_while(|row| match row {
            Ok((key, value)) => key.strip_prefix(&[ROW]).map(|key| (key.to_vec(), value.into_vec())),
            Err(source) => {
                failed = Some(source);
                None
            }
        });
        let machine = S::load(rows);
        match failed {
            Some(source) => Err(read_error(source)),
            None => {
                let machine = machine.map_err(|source| GroupError::Load(Box::new(source)))?;
                Ok(Applied { machine, position: Position { index, term }, time: LogTime(time), bytes: 0 })
            }
        }
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

/// Tells the image thread that there are changes, and when it is over.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    state: Mutex<DirtyState>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct DirtyState {
    since: Option<Instant>,
    end: bool,
}

impl Dirty {
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
        while !state.end {
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
    pub(super) image: Image,
    /// Where the image was when it was loaded.
    pub(super) start: Position,
    pub(super) log: Arc<DB>,
    pub(super) dirty: Arc<Dirty>,
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
    pub(super) fn run(self) -> Result<(), GroupError> {
        let limits = &self.shared.limits;
        let mut progress = Progress { written: self.start, written_bytes: 0, unflushed_since: None };
        loop {
            let deadline = progress.unflushed_since.map(|since| since + limits.image_flush_interval);
            let end = self.dirty.wait(limits.image_interval, deadline);
            if self.shared.failure().is_some() {
                return Ok(());
            }
            self.write(&mut progress)?;
            let bytes = progress.written_bytes - self.shared.flushed_bytes.load(Ordering::Acquire);
            let age = progress.unflushed_since.map(|since| since.elapsed());
            if age.is_some_and(|age| end || bytes >= limits.image_flush_bytes || age >= limits.image_flush_interval) {
                self.flush(&mut progress)?;
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
        if self.shared.config.durability == Durability::Os {
            self.log.flush_wal(true).map_err(|source| GroupError::Write { what: "the log", source })?;
        }
        self.image.put(changes, position, time)?;
        (progress.written, progress.written_bytes) = (position, bytes);
        progress.unflushed_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    fn flush(&self, progress: &mut Progress) -> Result<(), GroupError> {
        self.image.flush()?;
        progress.unflushed_since = None;
        self.shared.flushed_bytes.store(progress.written_bytes, Ordering::Release);
        self.shared.flushed.store(progress.written.index, Ordering::Release);
        self.shared.inbox.flushed(LogIndex(progress.written.index));
        Ok(())
    }
}
