//! Soft pins: replicas that leave DRAM after all others, for as long as their put said.
//!
//! A hint of the node that holds the replica, not a promise: the catalog knows nothing of it, a restart forgets it, and
//! where only such replicas are left to go, they go, coldest first. On NVMe they are carried along when a region is
//! reclaimed, as long as all soft pins together are at most half of the tier: without that bound a disk full of them would
//! take nothing more.
//!
//! Costs nothing for replicas without one. All methods are O(log n) in the pins, amortised.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tidepool_metadata::{KeyHash, ObjectKey, TenantId, VersionId};
use tokio::time::Instant;

use super::index::EntryId;
use super::{Inner, ReplicaName, Tables, TieredStore};
use crate::eviction::{Eviction, EvictionPolicy};

/// The longest soft pin.
pub const MAX_SOFT_PIN: Duration = Duration::from_secs(24 * 60 * 60);

struct Pin {
    end: Instant,
    bytes: u64,
}

/// Complete replicas with DRAM slices in the order in which they leave, those without a soft pin first.
pub(super) struct Resident {
    plain: Box<dyn Eviction>,
    pinned: Box<dyn Eviction>,
    /// Of replicas in any state and on any tier.
    pins: HashMap<EntryId, Pin>,
    ends: BTreeSet<(Instant, EntryId)>,
    pinned_bytes: u64,
}

impl Resident {
    pub(super) fn new(policy: EvictionPolicy) -> Self {
        let (plain, pinned) = (policy.build(), policy.build());
        Self { plain, pinned, pins: HashMap::new(), ends: BTreeSet::new(), pinned_bytes: 0 }
    }

    pub(super) fn insert(&mut self, id: EntryId, key: KeyHash, bytes: u64) {
        let order = if self.pins.contains_key(&id) { &mut self.pinned } else { &mut self.plain };
        order.insert(id, key, bytes);
    }

    pub(super) fn touch(&mut self, id: EntryId) {
        self.plain.touch(id);
        self.pinned.touch(id);
    }

    /// Out of the order; its pin stays, for when it comes back.
    pub(super) fn remove(&mut self, id: EntryId) {
        self.plain.remove(id);
        self.pinned.remove(id);
    }

    pub(super) fn len(&self) -> usize {
        self.plain.len() + self.pinned.len()
    }

    /// How many of them have no soft pin.
    pub(super) fn plain(&self) -> usize {
        self.plain.len()
    }

    pub(super) fn hottest(&self, most: usize) -> Vec<EntryId> {
        let mut hottest = self.pinned.hottest(most);
        hottest.extend(self.plain.hottest(most - hottest.len()));
        hottest
    }

    fn pin(&mut self, id: EntryId, end: Instant, bytes: u64) {
        self.unpin(id);
        self.pins.insert(id, Pin { end, bytes });
        self.ends.insert((end, id));
        self.pinned_bytes += bytes;
    }

    /// Ends the pin of `id`, if it has one, which must not be in the order.
    pub(super) fn unpin(&mut self, id: EntryId) {
        if let Some(pin) = self.pins.remove(&id) {
            self.ends.remove(&(pin.end, id));
            self.pinned_bytes -= pin.bytes;
        }
    }
}

impl Tables {
    /// Takes out the replica that should leave first: with `pinned`, one with a soft pin if there is one.
    pub(super) fn evict(&mut self, pinned: bool) -> Option<EntryId> {
        self.end_soft_pins();
        let Resident { plain, pinned: last, .. } = &mut self.resident;
        if pinned { last.evict().or_else(|| plain.evict()) } else { plain.evict().or_else(|| last.evict()) }
    }

    /// Whether that replica is to be carried along on a disk of so many bytes.
    pub(super) fn is_kept_on_disk(&mut self, id: EntryId, capacity: u64) -> bool {
        self.end_soft_pins();
        self.resident.pins.contains_key(&id) && self.resident.pinned_bytes <= capacity / 2
    }

    /// Those whose time is over are as others from here on.
    fn end_soft_pins(&mut self) {
        let now = Instant::now();
        while let Some(&(end, id)) = self.resident.ends.first()
            && end <= now
        {
            let before = self.resident.pinned.len();
            self.resident.pinned.remove(id);
            let was_in_order = self.resident.pinned.len() < before;
            self.resident.unpin(id);
            if was_in_order {
                self.enter_order(id);
            }
        }
    }
}

impl TieredStore {
    /// Pins a sealed replica softly for `duration`, at most [`MAX_SOFT_PIN`] and nothing if that is 0; `None` for as long as
    /// another version of its key on this node is pinned still. To be called before it is completed. Answers for how long it is.
    pub fn soft_pin(&self, name: &ReplicaName, duration: Option<Duration>) -> Duration {
        let mut tables = self.inner.state.lock();
        let now = Instant::now();
        let ReplicaName { tenant, key, version, replica } = name;
        let left = |tables: &Tables| {
            let others = tables.index.find_others(*tenant, key.as_bytes(), *version);
            others.filter_map(|id| Some(tables.resident.pins.get(&id)?.end.saturating_duration_since(now))).max()
        };
        let duration = duration.or_else(|| left(&tables)).unwrap_or_default().min(MAX_SOFT_PIN);
        let found = tables.index.find_replica(*tenant, key.as_bytes(), *replica);
        if let Some((id, bytes)) = found.and_then(|id| Some((id, tables.index.get(id)?.object_length)))
            && !duration.is_zero()
        {
            tables.resident.pin(id, now + duration, bytes);
        }
        duration
    }

    /// Whether the replica of that version here has a soft pin.
    #[must_use]
    pub fn is_softly_pinned(&self, tenant: TenantId, key: &ObjectKey, version: VersionId) -> bool {
        let tables = self.inner.state.lock();
        let found = tables.index.find(tenant, key.as_bytes(), version);
        found.and_then(|id| tables.resident.pins.get(&id)).is_some_and(|pin| pin.end > Instant::now())
    }
}

impl Inner {
    /// Bytes of the attached NVMe tier.
    pub(super) fn nvme_capacity(&self) -> u64 {
        self.nvme.read().as_ref().map_or(0, |nvme| nvme.tier.usage().capacity_bytes)
    }
}
