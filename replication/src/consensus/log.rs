//! The log and the hard state of one voter, in a RocksDB of its own.
//!
//! One column family, so that a batch is one record of the write-ahead log and that log alone decides what survives:
//!
//! | key | value |
//! |---|---|
//! | `i` | identity: version 2, cluster (8 bytes), node (4 bytes), epoch (4 bytes) |
//! | `h` | Raft's hard state (term, vote, commit), protobuf |
//! | `m` | the members, and as of which index ([`super::Members`]) |
//! | `v` | the only voter, protobuf, as versions before `m` wrote it |
//! | `l` | the life in which this node began the log, 4 bytes little-endian; missing: 0 |
//! | `c` | what was compacted: index and term, 8 bytes each, little-endian |
//! | `e` and the index, 8 bytes big-endian | the entry, protobuf |
//!
//! Invariants: indices are dense from `compacted + 1` to `last`; terms never fall; `compacted` is never above the index
//! of the flushed image.
//!
//! Durability: a batch counts as written when it is on disk (`fsync`) or with the kernel (`os`, or if the caller says that
//! it may; term and vote are synced even then). Batches are written by a thread of their own ([`writer`]), in the order in which
//! they are given to it, so that a slow disk holds up neither heartbeats nor what is sent to others; or at once, where nobody
//! else counts on this voter. What is not written yet is read from memory. A failed write is final: the caller stops.
//! Crash: the last record of the write-ahead log may be cut, which was acknowledged to nobody; any other damage makes
//! the database refuse to open (`TolerateCorruptedTailRecords`, no recycled logs). Where not all is synced, a loss of power
//! leaves what is whole before the first damage ([`boot`]). What RocksDB cannot see, such as a
//! missing file whose entries leave a gap, is found when all entries are read at the start.

mod writer;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use protobuf::Message;
use raft::eraftpb::{Entry, HardState, Snapshot};
use raft::{GetEntriesContext, RaftState, Storage, StorageError};
use rocksdb::{DB, DBRecoveryMode, IteratorMode, Options, WriteBatch};
use tidepool_metadata::{LogIndex, NodeId};
use writer::{Given, Pen};
pub(super) use writer::{LogWriter, Unsynced};

use super::config::{Durability, Formation, GroupConfig};
use super::member::{MemberId, Members};
use super::transport::Lane;
use super::{boot, database, identity};
use crate::error::GroupError;

const IDENTITY: &[u8] = b"i";
const HARD_STATE: &[u8] = b"h";
const MEMBERS: &[u8] = b"m";
const ONLY_VOTER: &[u8] = b"v";
const LIFE: &[u8] = b"l";
const COMPACTED: &[u8] = b"c";

/// Entries kept in memory, because Raft reads each again when it is committed and when it is sent.
const CACHE_BYTES: usize = 16 << 20;

/// Index and term of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Its index.
    pub index: u64,
    /// Its term.
    pub term: u64,
}

/// What follows a write that is done later.
#[derive(Clone, Debug, Default)]
pub struct Behind {
    /// What [`super::Core::written`] is told.
    pub number: u64,
    /// What acknowledges it to others.
    pub messages: Vec<Outgoing>,
}

/// A message on its way out: to whom, by which lane, and its bytes.
pub type Outgoing = (NodeId, Lane, Vec<u8>);

/// Where a voter keeps entries, term and vote, and who the members are: a disk of its own, or a simulated one.
///
/// Whoever drives it stops at the first error and never uses it again: what the disk holds is unknown then.
pub trait LogStore: Storage {
    /// Who this voter is, by the log that it has.
    fn member(&self) -> MemberId;

    /// The members as of the last change that was applied.
    fn members(&self) -> &Members;

    /// What was compacted.
    fn compacted(&self) -> Position;

    /// Index of the last entry.
    fn last(&self) -> u64;

    /// Appends entries, replacing those from the first one's index on, and the hard state, if there is a new one. They can be
    /// read on return. They are written as the voter's durability says, if they must be synced; term and vote always: on return,
    /// with all that was given before; or later, behind all of that, and then the messages of `behind` are sent and
    /// [`super::Core::written`] is told its number, or a higher one.
    ///
    /// # Errors
    /// The disk's.
    fn append(
        &mut self,
        entries: Vec<Entry>,
        hard_state: Option<HardState>,
        must_sync: bool,
        behind: Option<Behind>,
    ) -> Result<(), GroupError>;

    /// Notes how far is committed; need not be durable before the next append.
    fn set_commit(&mut self, commit: u64);

    /// Notes the members; durable before what is appended next, and before an image that is written from now on.
    ///
    /// # Errors
    /// The disk's.
    fn set_members(&mut self, members: Members) -> Result<(), GroupError>;

    /// Drops the entries up to `through`, whose effects are durable elsewhere.
    ///
    /// # Errors
    /// The disk's.
    fn compact(&mut self, through: u64) -> Result<(), GroupError>;

    /// Drops all entries: what is before `position` came as a snapshot, which is durable. So is this on return, with all that
    /// was given before.
    ///
    /// # Errors
    /// The disk's.
    fn install(&mut self, position: Position, members: Members) -> Result<(), GroupError>;

    /// The position of the snapshot that a follower far behind is to take.
    fn offer(&self) -> Position;
}

impl Position {
    fn encode(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.index.to_le_bytes());
        bytes[8..].copy_from_slice(&self.term.to_le_bytes());
        bytes
    }
}

/// Owned by the Raft thread.
pub(super) struct Log {
    folder: PathBuf,
    database: Arc<DB>,
    durability: Durability,
    hard_state: HardState,
    member: MemberId,
    members: Members,
    /// Where the image was flushed last: what a snapshot has at least.
    flushed: u64,
    compacted: Position,
    last: u64,
    /// Where each term starts, in order, of the entries behind `compacted`.
    terms: Vec<Position>,
    /// The newest entries, dense up to `last`.
    cache: VecDeque<Entry>,
    cache_bytes: usize,
    pen: Pen,
    /// Of each batch that was given to the writer's thread: its place in the order, and the first entry that it has.
    unwritten: VecDeque<(Given, u64)>,
}

fn entry_key(index: u64) -> [u8; 9] {
    let mut key = [b'e'; 9];
    key[1..].copy_from_slice(&index.to_be_bytes());
    key
}

fn options(lost_page_cache: bool) -> Options {
    let mut options = database::options();
    options.set_wal_recovery_mode(match lost_page_cache {
        false => DBRecoveryMode::TolerateCorruptedTailRecords,
        true => DBRecoveryMode::PointInTime,
    });
    options.set_recycle_log_file_num(0);
    options.set_track_and_verify_wals_in_manifest(true);
    options
}

impl Log {
    /// Opens the log in `path`, or begins one: of a group whose only voter is this node, or of a member that joins.
    ///
    /// After a loss of the page cache ([`super::boot`]) everything behind the first damage is given up.
    pub(super) fn open(path: &Path, config: &GroupConfig, lost_page_cache: bool) -> Result<Self, GroupError> {
        let database = DB::open(&options(lost_page_cache), path).map_err(|source| GroupError::Open {
            what: "the log",
            path: path.to_owned(),
            source,
        })?;
        let database = Arc::new(database);
        let mut log = Self {
            folder: config.folder.clone(),
            pen: Pen::new(Arc::clone(&database)),
            unwritten: VecDeque::new(),
            database,
            durability: config.durability,
            hard_state: HardState::default(),
            member: MemberId::new(config.node, 0),
            members: Members::default(),
            flushed: 0,
            compacted: Position::default(),
            last: 0,
            terms: Vec::new(),
            cache: VecDeque::new(),
            cache_bytes: 0,
        };
        match log.read(IDENTITY)? {
            Some(found) => {
                identity::check("the log", &found, config)?;
                log.load(config)?;
            }
            None => log.form(config)?,
        }
        Ok(log)
    }

    #[cfg(test)]
    pub(super) fn failing_with(mut self, flag: &Arc<std::sync::atomic::AtomicBool>) -> Self {
        self.pen.fail_with(flag);
        self
    }

    /// What is to write the batches that may be written later; without it they are written at once.
    pub(super) fn writer(&mut self) -> LogWriter {
        self.pen.writer()
    }

    fn form(&mut self, config: &GroupConfig) -> Result<(), GroupError> {
        if self.database.iterator(IteratorMode::Start).next().is_some() {
            return Err(GroupError::CorruptLog { index: LogIndex(0), problem: "it says not whose it is" });
        }
        let mut batch = WriteBatch::default();
        match &config.formation {
            Formation::Found => self.members = Members::alone(self.member),
            Formation::Join { life, members } => {
                self.member = MemberId::new(config.node, *life);
                self.members = members.clone();
                batch.put(LIFE, life.to_le_bytes());
            }
        }
        batch.put(IDENTITY, identity::encode(config));
        batch.put(MEMBERS, self.members.encode());
        // As if everything before had been compacted.
        self.compacted = config.epoch.start();
        self.last = self.compacted.index;
        (self.hard_state.term, self.hard_state.commit) = (self.compacted.term, self.compacted.index);
        batch.put(COMPACTED, self.compacted.encode());
        batch.put(HARD_STATE, encode(&self.hard_state));
        self.pen.write(batch, true)
    }

    fn load(&mut self, config: &GroupConfig) -> Result<(), GroupError> {
        self.hard_state = self.read_message(HARD_STATE)?;
        if let Some(life) = self.read(LIFE)? {
            let life = <[u8; 4]>::try_from(life).map_err(|_| corrupt(0, "the life has a wrong length"))?;
            self.member = MemberId::new(config.node, u32::from_le_bytes(life));
        }
        self.members = match self.read(MEMBERS)? {
            Some(bytes) => Members::decode(&bytes).ok_or(corrupt(0, "the members can't be read"))?,
            None => Members { index: 0, state: self.read_message(ONLY_VOTER)? },
        };
        if let Some(bytes) = self.read(COMPACTED)? {
            let bytes =
                <[u8; 16]>::try_from(bytes).map_err(|_| corrupt(0, "the compacted position has a wrong length"))?;
            let [index, term] =
                [&bytes[..8], &bytes[8..]].map(|part| u64::from_le_bytes(part.try_into().expect("8 bytes")));
            self.compacted = Position { index, term };
        }
        self.last = self.compacted.index;
        let database = Arc::clone(&self.database);
        let start = entry_key(self.compacted.index + 1);
        let rows = database.iterator(IteratorMode::From(&start, rocksdb::Direction::Forward));
        for row in rows {
            let (key, value) = row.map_err(|source| GroupError::Read { what: "the log", source })?;
            if key.first() != Some(&b'e') {
                break;
            }
            let index = self.last + 1;
            if *key != entry_key(index) {
                return Err(corrupt(index, "the entry is missing, and later ones are there"));
            }
            let entry =
                Entry::parse_from_bytes(&value).map_err(|_| corrupt(index, "the entry is no protobuf message"))?;
            let before = self.terms.last().map_or(self.compacted.term, |start| start.term);
            if entry.index != index || entry.term < before || entry.term > self.hard_state.term {
                return Err(corrupt(index, "the entry's index or term cannot be"));
            }
            self.remember(entry);
        }
        if self.hard_state.commit > self.last {
            return Err(corrupt(self.last + 1, "the entry is missing, and it was committed"));
        }
        // Bounds that Raft requires: what was compacted was committed, whether or not that was written down.
        self.hard_state.commit = self.hard_state.commit.max(self.compacted.index);
        Ok(())
    }

    /// Enters what is on disk into what memory knows.
    fn remember(&mut self, entry: Entry) {
        assert_eq!(entry.index, self.last + 1, "entries are dense");
        self.last = entry.index;
        if self.terms.last().map_or(self.compacted.term, |start| start.term) != entry.term || self.terms.is_empty() {
            self.terms.push(Position { index: entry.index, term: entry.term });
        }
        self.cache_bytes += entry.data.len();
        self.cache.push_back(entry);
        if self.cache_bytes > CACHE_BYTES {
            let unwritten = self.first_unwritten();
            while self.cache_bytes > CACHE_BYTES
                && self.cache.len() > 1
                && self.cache.front().is_some_and(|entry| entry.index < unwritten)
            {
                self.forget_oldest();
            }
        }
    }

    /// Entries before this one can be read from the disk.
    fn first_unwritten(&mut self) -> u64 {
        let written = self.pen.written();
        while self.unwritten.front().is_some_and(|&(given, _)| given <= written) {
            self.unwritten.pop_front();
        }
        self.unwritten.iter().map(|&(_, first)| first).min().unwrap_or(u64::MAX)
    }

    fn forget_oldest(&mut self) {
        if let Some(entry) = self.cache.pop_front() {
            self.cache_bytes -= entry.data.len();
        }
    }

    /// Where this voter's image is flushed: a snapshot has that much.
    pub(super) fn set_flushed(&mut self, index: u64) {
        self.flushed = self.flushed.max(index);
    }

    /// Drops everything and goes on behind an image that was put in place by a snapshot when the process died.
    pub(super) fn follow_image(&mut self, position: Position, members: Members) -> Result<(), GroupError> {
        self.install(position, members)
    }
}

impl LogStore for Log {
    fn member(&self) -> MemberId {
        self.member
    }

    fn members(&self) -> &Members {
        &self.members
    }

    fn compacted(&self) -> Position {
        self.compacted
    }

    fn last(&self) -> u64 {
        self.last
    }

    fn append(
        &mut self,
        entries: Vec<Entry>,
        hard_state: Option<HardState>,
        must_sync: bool,
        behind: Option<Behind>,
    ) -> Result<(), GroupError> {
        let mut batch = WriteBatch::default();
        let kept = entries.first().map_or(self.last, |first| first.index - 1);
        assert!(
            (self.compacted.index..=self.last).contains(&kept),
            "entries behind {kept} do not meet {}..={}",
            self.compacted.index,
            self.last
        );
        if kept < self.last {
            batch.delete_range(entry_key(kept + 1), entry_key(self.last + 1));
        }
        for entry in &entries {
            batch.put(entry_key(entry.index), encode(entry));
        }
        let hard_state = hard_state.unwrap_or_else(|| self.hard_state.clone());
        let new_vote = (hard_state.term, hard_state.vote) != (self.hard_state.term, self.hard_state.vote);
        batch.put(HARD_STATE, encode(&hard_state));
        let sync = new_vote || must_sync && self.durability == Durability::Fsync;
        match behind {
            None => self.pen.write(batch, sync)?,
            Some(behind) => {
                let given = self.pen.write_later(batch, sync, Some(behind))?;
                if let Some(first) = entries.first() {
                    self.unwritten.push_back((given, first.index));
                }
            }
        }
        self.truncate(kept);
        entries.into_iter().for_each(|entry| self.remember(entry));
        self.hard_state = hard_state;
        Ok(())
    }

    /// Written with the next batch only: Raft finds it out again, and a start compares it with what it finds.
    fn set_commit(&mut self, commit: u64) {
        assert!(commit <= self.last, "commit index {commit} behind the last entry {}", self.last);
        self.hard_state.commit = self.hard_state.commit.max(commit);
    }

    fn set_members(&mut self, members: Members) -> Result<(), GroupError> {
        let (was_alone, is_alone) = (self.members.is_alone(self.member), members.is_alone(self.member));
        let mut batch = WriteBatch::default();
        batch.put(MEMBERS, members.encode());
        self.members = members;
        match (was_alone, is_alone) {
            // One log of writes: whatever is synced later syncs this too.
            (false, false) => self.pen.write_later(batch, false, None).map(drop),
            (true, true) => self.pen.write(batch, false),
            (true, false) => {
                // From here on others count on every entry.
                self.unsynced().sync()?;
                boot::note(&self.folder, self.durability)?;
                self.pen.write(batch, true)
            }
            (false, true) => {
                self.pen.write(batch, true)?;
                self.note_boot()
            }
        }
    }

    fn compact(&mut self, through: u64) -> Result<(), GroupError> {
        if through <= self.compacted.index {
            return Ok(());
        }
        assert!(through <= self.last, "compaction up to {through} behind the last entry {}", self.last);
        let position = Position { index: through, term: self.term_of(through).expect("the entry is in the log") };
        let (first, end) = (entry_key(self.compacted.index + 1), entry_key(through + 1));
        let mut batch = WriteBatch::default();
        batch.put(COMPACTED, position.encode());
        batch.delete_range(first, end);
        // Not synced: after a crash both are back, or neither.
        if self.members.is_alone(self.member) {
            self.pen.write(batch, false)?;
        } else {
            self.pen.write_later(batch, false, None)?;
        }
        self.compacted = position;
        let next = self.terms.iter().rposition(|start| start.index <= through + 1).unwrap_or(0);
        self.terms.drain(..next);
        if let Some(start) = self.terms.first_mut() {
            start.index = start.index.max(through + 1);
        }
        self.terms.retain(|start| start.index <= self.last);
        while self.cache.front().is_some_and(|entry| entry.index <= through) {
            self.forget_oldest();
        }
        Ok(())
    }

    fn install(&mut self, position: Position, members: Members) -> Result<(), GroupError> {
        let mut batch = WriteBatch::default();
        batch.delete_range(entry_key(0), entry_key(u64::MAX));
        batch.put(COMPACTED, position.encode());
        batch.put(MEMBERS, members.encode());
        let mut hard_state = self.hard_state.clone();
        hard_state.commit = position.index;
        if hard_state.term < position.term {
            (hard_state.term, hard_state.vote) = (position.term, 0);
        }
        batch.put(HARD_STATE, encode(&hard_state));
        self.pen.write(batch, true)?;
        (self.compacted, self.last, self.members, self.hard_state) = (position, position.index, members, hard_state);
        self.terms.clear();
        self.cache.clear();
        self.cache_bytes = 0;
        self.flushed = position.index;
        Ok(())
    }

    fn offer(&self) -> Position {
        let index = self.flushed.max(self.compacted.index);
        Position { index, term: self.term_of(index).unwrap_or(self.compacted.term) }
    }
}

impl Log {
    fn truncate(&mut self, kept: u64) {
        self.last = kept;
        self.terms.retain(|start| start.index <= kept);
        while self.cache.back().is_some_and(|entry| entry.index > kept) {
            self.cache_bytes -= self.cache.pop_back().map_or(0, |entry| entry.data.len());
        }
    }

    fn term_of(&self, index: u64) -> Option<u64> {
        if index == self.compacted.index {
            return Some(self.compacted.term);
        }
        if index < self.compacted.index || index > self.last {
            return None;
        }
        self.terms.iter().rfind(|start| start.index <= index).map(|start| start.term)
    }

    /// Notes how the log is synced, before the first append.
    pub(super) fn note_boot(&self) -> Result<(), GroupError> {
        let alone = self.members.is_alone(self.member);
        boot::note(&self.folder, if alone { Durability::Os } else { self.durability })
    }

    /// What the image's thread syncs before it writes, so that the image is never ahead of the log.
    pub(super) fn unsynced(&self) -> Unsynced {
        self.pen.unsynced()
    }

    fn read(&self, key: &[u8]) -> Result<Option<Vec<u8>>, GroupError> {
        self.database.get(key).map_err(|source| GroupError::Read { what: "the log", source })
    }

    fn read_message<M: Message>(&self, key: &[u8]) -> Result<M, GroupError> {
        let bytes = self.read(key)?.unwrap_or_default();
        M::parse_from_bytes(&bytes).map_err(|_| corrupt(0, "its state is no protobuf message"))
    }
}

fn corrupt(index: u64, problem: &'static str) -> GroupError {
    GroupError::CorruptLog { index: LogIndex(index), problem }
}

fn encode(message: &impl Message) -> Vec<u8> {
    message.write_to_bytes().expect("messages without required fields always encode")
}

impl Storage for Log {
    fn initial_state(&self) -> raft::Result<RaftState> {
        Ok(RaftState::new(self.hard_state.clone(), self.members.state.clone()))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _context: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        if low <= self.compacted.index {
            return Err(StorageError::Compacted.into());
        }
        assert!(high <= self.last + 1, "entries {low}..{high} behind the last one {}", self.last);
        let most = max_size.into().unwrap_or(u64::MAX);
        let mut size = 0;
        let mut entries = Vec::new();
        for index in low..high {
            let entry = self.entry(index)?;
            size += u64::from(entry.compute_size());
            if size > most && !entries.is_empty() {
                break;
            }
            entries.push(entry);
        }
        Ok(entries)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        let missing = if index < self.compacted.index { StorageError::Compacted } else { StorageError::Unavailable };
        self.term_of(index).ok_or(missing.into())
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.compacted.index + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last)
    }

    /// Only a handle: the follower fetches the rows itself.
    fn snapshot(&self, request_index: u64, _to: u64) -> raft::Result<Snapshot> {
        let position = self.offer();
        if position.index < request_index {
            return Err(StorageError::SnapshotTemporarilyUnavailable.into());
        }
        let mut snapshot = Snapshot::default();
        snapshot.mut_metadata().index = position.index;
        snapshot.mut_metadata().term = position.term;
        snapshot.mut_metadata().set_conf_state(self.members.state.clone());
        snapshot.data = self.members.encode().into();
        Ok(snapshot)
    }
}

impl Log {
    fn entry(&self, index: u64) -> raft::Result<Entry> {
        let first_cached = self.last + 1 - self.cache.len() as u64;
        if let Some(position) = index.checked_sub(first_cached) {
            return Ok(self.cache[usize::try_from(position).expect("the cache fits memory")].clone());
        }
        let other = |error: GroupError| StorageError::Other(Box::new(error));
        let bytes = self.read(&entry_key(index)).map_err(other)?.ok_or(StorageError::Unavailable)?;
        let entry =
            Entry::parse_from_bytes(&bytes).map_err(|_| other(corrupt(index, "the entry is no protobuf message")))?;
        Ok(entry)
    }
}

#[cfg(test)]
mod tests;
