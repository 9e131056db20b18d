//! A voter's disk and its log on it: writes take a while, and of those that were not done a crash leaves any number of the first ones.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use raft::eraftpb::{Entry, HardState, Snapshot};
use raft::{GetEntriesContext, RaftState, Storage, StorageError};
use tidepool_replication::consensus::{Behind, LogStore, Position};
use tidepool_replication::{GroupError, MemberId, Members};

/// What a log holds.
#[derive(Clone, Default)]
pub(crate) struct Pages {
    pub(crate) entries: BTreeMap<u64, Entry>,
    pub(crate) hard_state: HardState,
    pub(crate) members: Members,
    pub(crate) compacted: Position,
}

/// A disk with a cache: `durable` is what a crash leaves.
#[derive(Clone, Default)]
pub(crate) struct Disk {
    pub(crate) cached: Pages,
    pub(crate) durable: Pages,
    pub(crate) flushed: u64,
    /// Writes under way, in order.
    pub(crate) queue: VecDeque<Write>,
    /// How many writes were given to it.
    pub(crate) given: u64,
    /// Up to which of them `durable` is.
    pub(crate) synced: u64,
}

/// A write that is under way: what the disk has afterwards.
#[derive(Clone)]
pub(crate) struct Write {
    place: u64,
    pages: Pages,
    sync: bool,
    /// What follows.
    behind: Option<Behind>,
}

impl Disk {
    /// Begins to write what is cached.
    pub(crate) fn write_later(&mut self, sync: bool, behind: Option<Behind>) {
        self.given += 1;
        self.queue.push_back(Write { place: self.given, pages: self.cached.clone(), sync, behind });
    }

    /// Has all of it.
    pub(crate) fn sync(&mut self) {
        self.given += 1;
        (self.durable, self.synced) = (self.cached.clone(), self.given);
    }

    /// The first `count` writes are done; answers what follows.
    pub(crate) fn done(&mut self, count: usize) -> Vec<Behind> {
        let done: Vec<_> = self.queue.drain(..count).collect();
        let last_synced = done.iter().rposition(|write| write.sync);
        if let Some(Write { place, pages, .. }) = last_synced.map(|place| &done[place])
            && *place > self.synced
        {
            (self.durable, self.synced) = (pages.clone(), *place);
        }
        done.into_iter().filter_map(|write| write.behind).collect()
    }
}

#[derive(Clone)]
pub(crate) struct SimulatedLog {
    pub(crate) member: MemberId,
    pub(crate) disk: Arc<Mutex<Disk>>,
    // Borrowed views need a copy of one's own.
    pub(crate) members: Members,
}

impl SimulatedLog {
    pub(crate) fn last_of(pages: &Pages) -> u64 {
        pages.entries.keys().next_back().copied().unwrap_or(pages.compacted.index)
    }
}

impl Storage for SimulatedLog {
    fn initial_state(&self) -> raft::Result<RaftState> {
        let disk = self.disk.lock();
        Ok(RaftState::new(disk.cached.hard_state.clone(), disk.cached.members.state().clone()))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max: impl Into<Option<u64>>,
        _: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        let disk = self.disk.lock();
        if low <= disk.cached.compacted.index {
            return Err(StorageError::Compacted.into());
        }
        let most = max.into().unwrap_or(u64::MAX);
        let (mut size, mut found) = (0, Vec::new());
        for (_, entry) in disk.cached.entries.range(low..high) {
            size += entry.data.len() as u64;
            if size > most && !found.is_empty() {
                break;
            }
            found.push(entry.clone());
        }
        Ok(found)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        let disk = self.disk.lock();
        if index == disk.cached.compacted.index {
            return Ok(disk.cached.compacted.term);
        }
        let missing =
            if index < disk.cached.compacted.index { StorageError::Compacted } else { StorageError::Unavailable };
        disk.cached.entries.get(&index).map(|entry| entry.term).ok_or(missing.into())
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.disk.lock().cached.compacted.index + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(Self::last_of(&self.disk.lock().cached))
    }

    fn snapshot(&self, request: u64, _to: u64) -> raft::Result<Snapshot> {
        let position = self.offer();
        if position.index < request {
            return Err(StorageError::SnapshotTemporarilyUnavailable.into());
        }
        let mut snapshot = Snapshot::default();
        snapshot.mut_metadata().index = position.index;
        snapshot.mut_metadata().term = position.term;
        snapshot.mut_metadata().set_conf_state(self.members.state().clone());
        snapshot.data = self.members.encode().into();
        Ok(snapshot)
    }
}

impl LogStore for SimulatedLog {
    fn member(&self) -> MemberId {
        self.member
    }

    fn members(&self) -> &Members {
        &self.members
    }

    fn compacted(&self) -> Position {
        self.disk.lock().cached.compacted
    }

    fn last(&self) -> u64 {
        Self::last_of(&self.disk.lock().cached)
    }

    fn append(
        &mut self,
        entries: Vec<Entry>,
        hard_state: Option<HardState>,
        must_sync: bool,
        behind: Option<Behind>,
    ) -> Result<(), GroupError> {
        let is_alone = self.members.all() == [self.member];
        assert!(must_sync || entries.is_empty() || is_alone, "others count on what this voter has");
        let mut disk = self.disk.lock();
        if let Some(first) = entries.first() {
            disk.cached.entries.split_off(&first.index);
        }
        for entry in entries {
            assert_eq!(entry.index, Self::last_of(&disk.cached) + 1, "entries are dense");
            disk.cached.entries.insert(entry.index, entry);
        }
        let mut must_sync = must_sync;
        if let Some(hard_state) = hard_state {
            let vote = |state: &HardState| (state.term, state.vote);
            must_sync |= vote(&hard_state) != vote(&disk.cached.hard_state);
            disk.cached.hard_state = hard_state;
        }
        match behind {
            Some(behind) => disk.write_later(must_sync, Some(behind)),
            None if must_sync => disk.sync(),
            None => {}
        }
        Ok(())
    }

    fn set_commit(&mut self, commit: u64) {
        let mut disk = self.disk.lock();
        disk.cached.hard_state.commit = disk.cached.hard_state.commit.max(commit);
    }

    fn set_members(&mut self, members: Members) -> Result<(), GroupError> {
        let is_alone = |members: &Members| members.all() == [self.member];
        let changes = is_alone(&self.members) != is_alone(&members);
        let mut disk = self.disk.lock();
        disk.cached.members = members.clone();
        if changes {
            disk.sync();
        } else {
            disk.write_later(false, None);
        }
        self.members = members;
        Ok(())
    }

    fn compact(&mut self, through: u64) -> Result<(), GroupError> {
        let mut disk = self.disk.lock();
        if through > disk.cached.compacted.index {
            let term = disk.cached.entries[&through].term;
            disk.cached.entries = disk.cached.entries.split_off(&(through + 1));
            disk.cached.compacted = Position { index: through, term };
            disk.write_later(false, None);
        }
        Ok(())
    }

    fn install(&mut self, position: Position, members: Members) -> Result<(), GroupError> {
        self.members = members.clone();
        let mut disk = self.disk.lock();
        disk.flushed = position.index;
        let pages = &mut disk.cached;
        pages.entries.clear();
        (pages.compacted, pages.members) = (position, members);
        pages.hard_state.commit = position.index;
        if pages.hard_state.term < position.term {
            (pages.hard_state.term, pages.hard_state.vote) = (position.term, 0);
        }
        disk.sync();
        Ok(())
    }

    fn offer(&self) -> Position {
        let flushed = self.disk.lock().flushed;
        let index = flushed.max(self.compacted().index);
        Position { index, term: self.term(index).unwrap_or_default() }
    }
}
