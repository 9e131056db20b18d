//! The node's own index: which replicas are here, and on which tiers.
//!
//! One entry a replica, found by tenant, key and version or by replica id; never by a bare key, because only the
//! catalog knows which version is current. Pure data: no I/O, no lock of its own.
//!
//! Invariants: an entry has its DRAM slices, its NVMe locations, or both, except while it is loading;
//! `resident` entries and members of the DRAM eviction order are the same set once complete.
//! Memory: a `u32` a table slot, and one [`Entry`] in chunks that never move.

use hashbrown::HashTable;
use tidepool_metadata::{DataType, KeyHash, ObjectKey, ReplicaId, SliceHeader, TenantId, VersionId};

use crate::memory::SharedSlice;
use crate::nvme::Location;

/// A place in the index, reused after the entry is gone; dense, so that eviction orders can be arrays.
pub type EntryId = u32;

/// One value a slice, without an allocation for objects of one slice.
#[derive(Clone, Debug)]
pub(crate) enum PerSlice<T> {
    /// An object of one slice.
    One(T),
    /// An object of several, in order. Twice boxed, so that objects of one slice don't pay for the length.
    Many(Box<Box<[T]>>),
}

impl<T> PerSlice<T> {
    /// Collects one value a slice; `None` for no values.
    pub(crate) fn collect(mut values: Vec<T>) -> Option<Self> {
        match values.len() {
            0 => None,
            1 => values.pop().map(Self::One),
            _ => Some(Self::Many(Box::new(values.into_boxed_slice()))),
        }
    }

    /// The values in slice order.
    pub(crate) fn as_slice(&self) -> &[T] {
        match self {
            Self::One(value) => std::slice::from_ref(value),
            Self::Many(values) => values,
        }
    }

    /// The values in slice order, to change in place.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        match self {
            Self::One(value) => std::slice::from_mut(value),
            Self::Many(values) => values,
        }
    }
}

/// How far a replica has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Bytes are final; whether the put won is not known yet.
    Sealed,
    /// The catalog's committed answer made it visible.
    Complete,
    /// Proposed to be forgotten; readable, not reusable, until there is an answer.
    ForgetPending,
}

/// What is happening to a replica; at most one thing at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// Nothing.
    Idle,
    /// Being written to NVMe.
    Demoting,
    /// Being read into DRAM.
    Promoting,
}

/// One replica on this node.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) tenant: TenantId,
    pub(crate) key: ObjectKey,
    pub(crate) version: VersionId,
    /// What [`Entry::replica`] says, if it has other numbers than the version.
    pub(crate) other_replica: Option<Box<ReplicaId>>,
    pub(crate) object_length: u64,
    pub(crate) commit_index: u64,
    pub(crate) dram: Option<PerSlice<SharedSlice>>,
    pub(crate) nvme: Option<PerSlice<Location>>,
    pub(crate) slice_bytes: u32,
    pub(crate) data_type: DataType,
    pub(crate) state: State,
    pub(crate) activity: Activity,
    /// Reads since the NVMe copy was written, saturating: decides on promotion and on re-insertion.
    pub(crate) reads: u8,
    /// The put asked for an NVMe copy: it may not be dropped while the replica lives.
    pub(crate) durable: bool,
}

impl Entry {
    /// What to keep of a replica's id beside its version's. The node that coordinates a put gives its own copy the numbers
    /// of the version, so that nearly all copies need nothing.
    pub(crate) fn other_replica(version: VersionId, replica: ReplicaId) -> Option<Box<ReplicaId>> {
        (replica != own_replica(version)).then(|| Box::new(replica))
    }

    /// Which copy this is.
    pub(crate) fn replica(&self) -> ReplicaId {
        self.other_replica.as_deref().copied().unwrap_or(own_replica(self.version))
    }

    /// Whether it is complete, in DRAM, and nothing happens to it.
    pub(crate) fn is_settled(&self) -> bool {
        self.dram.is_some() && self.state == State::Complete && self.activity == Activity::Idle
    }

    /// Whether this is that copy of that version.
    pub(crate) fn is(&self, version: VersionId, replica: ReplicaId) -> bool {
        self.version == version && self.replica() == replica
    }
}

/// The copy of a version on the node that coordinated it.
fn own_replica(version: VersionId) -> ReplicaId {
    let VersionId { node, incarnation, sequence } = version;
    ReplicaId { node, incarnation, sequence }
}

/// The header of the entry's slices, as far as all have it in common.
pub(crate) fn header_of(entry: &Entry) -> SliceHeader {
    SliceHeader {
        tenant: entry.tenant,
        key: entry.key.clone(),
        version: entry.version,
        replica: entry.replica(),
        object_length: entry.object_length,
        slice_bytes: entry.slice_bytes,
        slice_index: 0,
        slice_length: 0,
        checksum: 0,
        data_type: entry.data_type,
        commit_index: entry.commit_index,
    }
}

/// Entries of one chunk: what fits 128 KiB, a size of which the allocator wastes nothing.
const CHUNK_ENTRIES: usize = (128 << 10) / size_of::<Option<Entry>>();

/// Entries in chunks that never move, so that growth costs no copy and no slack of half the table.
#[derive(Debug, Default)]
struct Slab {
    chunks: Vec<Box<[Option<Entry>]>>,
    vacant: Vec<EntryId>,
}

impl Slab {
    fn insert(&mut self, entry: Entry) -> EntryId {
        if self.vacant.is_empty() {
            let base = self.chunks.len() * CHUNK_ENTRIES;
            self.chunks.push((0..CHUNK_ENTRIES).map(|_| None).collect());
            // Highest first, so that ids are handed out in ascending order.
            self.vacant.extend((base..base + CHUNK_ENTRIES).rev().filter_map(|id| EntryId::try_from(id).ok()));
        }
        let id = self.vacant.pop().expect("a new chunk has vacant places");
        *self.place(id) = Some(entry);
        id
    }

    fn place(&mut self, id: EntryId) -> &mut Option<Entry> {
        &mut self.chunks[id as usize / CHUNK_ENTRIES][id as usize % CHUNK_ENTRIES]
    }

    fn get(&self, id: EntryId) -> Option<&Entry> {
        self.chunks.get(id as usize / CHUNK_ENTRIES)?[id as usize % CHUNK_ENTRIES].as_ref()
    }

    fn get_mut(&mut self, id: EntryId) -> Option<&mut Entry> {
        self.chunks.get_mut(id as usize / CHUNK_ENTRIES)?[id as usize % CHUNK_ENTRIES].as_mut()
    }

    fn remove(&mut self, id: EntryId) -> Option<Entry> {
        let entry = self.place(id).take();
        if entry.is_some() {
            self.vacant.push(id);
        }
        entry
    }
}

/// All replicas of this node.
#[derive(Debug, Default)]
pub(crate) struct Index {
    table: HashTable<EntryId>,
    slab: Slab,
}

impl Index {
    /// How many replicas there are.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Adds a replica. The caller has made sure that it is not there.
    pub(crate) fn insert(&mut self, entry: Entry) -> EntryId {
        let hash = KeyHash::of(entry.tenant, entry.key.as_bytes()).0;
        let id = self.slab.insert(entry);
        let slab = &self.slab;
        self.table.insert_unique(hash, id, |&other| slab.get(other).map_or(0, hash_of));
        id
    }

    /// The replica of that version, if it is here.
    pub(crate) fn find(&self, tenant: TenantId, key: &[u8], version: VersionId) -> Option<EntryId> {
        self.find_by(tenant, key, |entry| entry.version == version)
    }

    /// The replica with that id, if it is here.
    pub(crate) fn find_replica(&self, tenant: TenantId, key: &[u8], replica: ReplicaId) -> Option<EntryId> {
        self.find_by(tenant, key, |entry| entry.replica() == replica)
    }

    /// Some replica of that key, of whatever version.
    pub(crate) fn find_any(&self, tenant: TenantId, key: &[u8]) -> Option<EntryId> {
        self.find_by(tenant, key, |_| true)
    }

    /// Replicas of other versions of that key.
    pub(crate) fn find_others(
        &self,
        tenant: TenantId,
        key: &[u8],
        version: VersionId,
    ) -> impl Iterator<Item = EntryId> {
        let hash = KeyHash::of(tenant, key).0;
        let is_other =
            move |entry: &Entry| entry.tenant == tenant && entry.key.as_bytes() == key && entry.version != version;
        self.table.iter_hash(hash).copied().filter(move |&id| self.slab.get(id).is_some_and(is_other))
    }

    fn find_by(&self, tenant: TenantId, key: &[u8], is: impl Fn(&Entry) -> bool) -> Option<EntryId> {
        let hash = KeyHash::of(tenant, key).0;
        let matches = |id: &EntryId| {
            self.slab.get(*id).is_some_and(|entry| entry.tenant == tenant && entry.key.as_bytes() == key && is(entry))
        };
        self.table.find(hash, matches).copied()
    }

    /// The entry at `id`, if the place is taken.
    pub(crate) fn get(&self, id: EntryId) -> Option<&Entry> {
        self.slab.get(id)
    }

    /// The entry at `id`, to change.
    pub(crate) fn get_mut(&mut self, id: EntryId) -> Option<&mut Entry> {
        self.slab.get_mut(id)
    }

    /// Takes the entry at `id` out.
    pub(crate) fn remove(&mut self, id: EntryId) -> Option<Entry> {
        let entry = self.slab.remove(id)?;
        if let Ok(occupied) = self.table.find_entry(hash_of(&entry), |&other| other == id) {
            occupied.remove();
        }
        Some(entry)
    }

    /// All entries, in no order that means anything.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (EntryId, &Entry)> {
        self.table.iter().filter_map(|&id| Some((id, self.slab.get(id)?)))
    }

    /// All entries, to change, in no order that means anything.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.slab.chunks.iter_mut().flatten().flatten()
    }

    /// One past the highest id ever given.
    pub(crate) fn id_bound(&self) -> EntryId {
        EntryId::try_from(self.slab.chunks.len() * CHUNK_ENTRIES).unwrap_or(EntryId::MAX)
    }
}

fn hash_of(entry: &Entry) -> u64 {
    KeyHash::of(entry.tenant, entry.key.as_bytes()).0
}

#[cfg(test)]
mod tests {
    use tidepool_metadata::{Incarnation, NodeId};

    use super::*;

    fn entry(key: &[u8], sequence: u64) -> Entry {
        let (node, incarnation) = (NodeId(1), Incarnation(1));
        Entry {
            tenant: TenantId::DEFAULT,
            key: ObjectKey::new(key).expect("legal key"),
            version: VersionId { node, incarnation, sequence },
            other_replica: None,
            object_length: 1,
            commit_index: 0,
            dram: None,
            nvme: None,
            slice_bytes: 4 << 20,
            data_type: DataType::Unknown,
            state: State::Sealed,
            activity: Activity::Idle,
            reads: 0,
            durable: false,
        }
    }

    #[test]
    fn versions_of_one_key_are_told_apart() {
        let mut index = Index::default();
        let (old, new) = (entry(b"k", 1), entry(b"k", 2));
        let (old_version, new_replica) = (old.version, new.replica());
        let (old_id, new_id) = (index.insert(old), index.insert(new));
        assert_eq!(index.find(TenantId::DEFAULT, b"k", old_version), Some(old_id));
        assert_eq!(index.find_replica(TenantId::DEFAULT, b"k", new_replica), Some(new_id));
        assert_eq!(index.find(TenantId(7), b"k", old_version), None);
        assert!(index.remove(old_id).is_some());
        assert_eq!(index.find(TenantId::DEFAULT, b"k", old_version), None);
        assert_eq!(index.len(), 1);
    }

    #[test]
    fn places_are_reused() {
        let mut index = Index::default();
        for round in 0..10_u64 {
            let ids: Vec<_> = (0..2000_u64).map(|i| index.insert(entry(&i.to_le_bytes(), round))).collect();
            for id in ids {
                assert!(index.remove(id).is_some());
            }
        }
        assert_eq!(index.len(), 0);
        assert!(index.id_bound() as usize <= 2000_usize.next_multiple_of(CHUNK_ENTRIES));
    }

    /// A copy of what another node coordinated has an id of its own.
    #[test]
    fn a_copy_is_found_by_its_id_whoever_coordinated_the_put() {
        let mut index = Index::default();
        let (own, mut copy) = (entry(b"k", 1), entry(b"k", 2));
        let id = ReplicaId { node: NodeId(9), incarnation: Incarnation(4), sequence: 77 };
        copy.other_replica = Entry::other_replica(copy.version, id);
        assert!(Entry::other_replica(own.version, own.replica()).is_none());
        let (own_replica, version) = (own.replica(), copy.version);
        let (own_id, copy_id) = (index.insert(own), index.insert(copy));
        assert_eq!(index.find_replica(TenantId::DEFAULT, b"k", id), Some(copy_id));
        assert_eq!(index.find_replica(TenantId::DEFAULT, b"k", own_replica), Some(own_id));
        assert!(index.get(copy_id).is_some_and(|entry| entry.is(version, id) && header_of(entry).replica == id));
    }

    #[test]
    fn an_entry_stays_within_its_memory_budget() {
        // 150 bytes an object for tiers and indexes: entry, table slot with slack, place in an eviction order.
        assert_eq!(size_of::<Option<Entry>>(), 112);
    }
}
