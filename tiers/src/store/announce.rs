//! What this node has, for a catalog: to compare with what it lists, or to list it anew.

use tidepool_metadata::catalog::ObjectFacts;
use tidepool_metadata::{Durability, LogIndex};

use super::index::{Entry, EntryId};
use super::{ReplicaName, TieredStore, name_of};
use crate::nvme::Location;

/// A replica as its node tells a catalog that lost everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Which replica.
    pub name: ReplicaName,
    /// What the object is.
    pub facts: ObjectFacts,
    /// What the copy survives.
    pub durability: Durability,
}

impl TieredStore {
    /// Calls `visit` for each replica: its name, its commit index (0: sealed only). For announcement and digests.
    /// Takes the lock for a bounded number of entries at a time; replicas that come or go meanwhile may be missed.
    pub fn for_each(&self, mut visit: impl FnMut(ReplicaName, u64)) {
        const STEP: EntryId = 4096;
        let mut first = 0;
        loop {
            let tables = self.inner.state.lock();
            let bound = tables.index.id_bound();
            for id in first..bound.min(first + STEP) {
                if let Some(entry) = tables.index.get(id) {
                    visit(name_of(entry), entry.commit_index);
                }
            }
            first += STEP;
            if first >= bound {
                return;
            }
        }
    }

    /// The places of all replicas: those in DRAM first, hottest first, then the others.
    #[must_use]
    pub fn by_heat(&self) -> Vec<EntryId> {
        let tables = self.inner.state.lock();
        let resident = tables.resident.hottest(tables.index.len());
        let is_elsewhere = |&id: &EntryId| tables.index.get(id).is_some_and(|entry| entry.dram.is_none());
        let elsewhere = (0..tables.index.id_bound()).filter(is_elsewhere);
        resident.iter().copied().chain(elsewhere).collect()
    }

    /// Those of the replicas at these places that are complete, and whether each was read since it came here, or to NVMe.
    #[must_use]
    pub fn held(&self, places: &[EntryId]) -> Vec<(ReplicaName, bool)> {
        let tables = self.inner.state.lock();
        let entries = places.iter().filter_map(|&id| tables.index.get(id)).filter(|entry| entry.commit_index > 0);
        entries.map(|entry| (name_of(entry), entry.reads > 0)).collect()
    }

    /// What a catalog that knows nothing of this node needs to list its replicas: those of the `count` places from
    /// `first` on, in the order in which recovery adopted them, hottest first. Answers where to go on, `None` at the end.
    /// From memory alone: the sums stand with the places.
    #[must_use]
    pub fn announce(&self, first: EntryId, count: u32) -> (Vec<Announcement>, Option<EntryId>) {
        let tables = self.inner.state.lock();
        let bound = tables.index.id_bound();
        let end = first.saturating_add(count).min(bound);
        let entries = (first..end).filter_map(|id| tables.index.get(id));
        (entries.filter_map(announcement).collect(), (end < bound).then_some(end))
    }
}

fn announcement(entry: &Entry) -> Option<Announcement> {
    let checksums = match (&entry.dram, &entry.nvme) {
        (Some(slices), _) => slices.as_slice().iter().map(|slice| slice.header().checksum).collect(),
        (None, Some(places)) => places.as_slice().iter().map(Location::checksum).collect(),
        (None, None) => return None,
    };
    let facts = ObjectFacts {
        length: entry.object_length,
        slice_bytes: entry.slice_bytes,
        data_type: entry.data_type,
        checksums,
        commit_index: LogIndex(entry.commit_index),
    };
    let durability = if entry.durable { Durability::Nvme } else { Durability::Memory };
    Some(Announcement { name: name_of(entry), facts, durability })
}
