//! The NVMe tier under the store: attach and detach at run time, and what the tier asks when it reclaims a region.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use tidepool_metadata::{ReplicaId, SliceHeader, TierKind};

use super::index::{Entry, PerSlice, State};
use super::{Attached, ForgetAnswer, Inner, ReplicaName, TieredStore};
use crate::StoreError;
use crate::nvme::{BoxFuture, Location, NvmeTier, RecordOwner, Verdict, WritePolicy};

impl TieredStore {
    /// Attaches an NVMe tier and scans it: replicas found there that this node still has, or had when the tier was
    /// detached, can be read from it again; other records are released. What is nowhere any more is forgotten, and what
    /// puts asked to have on disk, and is in DRAM only now, is written there. Answers how many records were taken over.
    ///
    /// # Errors
    /// [`StoreError::TierAttached`] if there is one already; the tier's own errors.
    pub async fn attach_nvme(&self, tier: Arc<NvmeTier>, writes: WritePolicy) -> Result<u64, StoreError> {
        self.inner.install_nvme(Arc::clone(&tier), writes)?;
        let taken = super::recovery::adopt_disk(&self.inner, &tier).await;
        self.inner.forget_missing(&tier);
        self.inner.write_durable(&tier).await;
        Ok(taken)
    }

    /// Detaches the NVMe tier: seals it and lets go of its folder. Replicas that are only there answer *unavailable*
    /// until it is attached again.
    ///
    /// # Errors
    /// [`StoreError::TierUnavailable`] if there is none; the tier's own errors, after it is detached all the same.
    pub async fn detach_nvme(&self) -> Result<(), StoreError> {
        let nvme = self.inner.nvme.write().take();
        let nvme = nvme.ok_or(StoreError::TierUnavailable { tier: TierKind::Nvme })?;
        nvme.tier.close().await.map_err(StoreError::Nvme)
    }
}

impl Inner {
    /// Attaches a tier and forgets all NVMe places: those of an earlier one may name what is another object's on this one.
    /// The scan says where things are now; what is only there answers *recovering* meanwhile.
    ///
    /// # Errors
    /// [`StoreError::TierAttached`]
    pub(super) fn install_nvme(self: &Arc<Self>, tier: Arc<NvmeTier>, writes: WritePolicy) -> Result<(), StoreError> {
        let owner = Arc::new(Owner { store: Arc::downgrade(self), tier: Arc::clone(&tier) });
        let mut tables = self.state.lock();
        let mut attached = self.nvme.write();
        if attached.is_some() {
            return Err(StoreError::TierAttached);
        }
        let asked: Weak<dyn RecordOwner> = Arc::downgrade(&(Arc::clone(&owner) as Arc<dyn RecordOwner>));
        // Ends by itself when the tier is closed or the store is gone.
        tokio::spawn(tier.reclaim(asked));
        tokio::spawn(tier.drive_reads());
        *attached = Some(Attached { tier, writes, _owner: owner });
        tables.index.values_mut().for_each(|entry| entry.nvme = None);
        Ok(())
    }

    /// Whether another tier is attached by now. To be asked under the lock of the tables before a place on `tier` is
    /// noted, or compared with one that is; while none is, places may be: the next to be attached is scanned.
    pub(super) fn is_replaced(&self, tier: &NvmeTier) -> bool {
        self.nvme.read().as_ref().is_some_and(|attached| !std::ptr::eq(&raw const *attached.tier, tier))
    }

    /// Drops what neither tier has after a scan, and tells the catalog. If the scanned tier is no longer attached, what it had
    /// is for the next one's scan to find.
    fn forget_missing(&self, scanned: &Arc<NvmeTier>) {
        let mut tables = self.state.lock();
        if !self.nvme.read().as_ref().is_some_and(|attached| Arc::ptr_eq(&attached.tier, scanned)) {
            return;
        }
        let missing = tables.index.iter().filter(|(_, entry)| entry.dram.is_none() && entry.nvme.is_none());
        let missing: Vec<_> = missing.map(|(id, entry)| (id, super::name_of(entry))).collect();
        missing.iter().for_each(|(id, _)| self.drop_entry(&mut tables, *id));
        drop(tables);
        self.lost.tell(missing.into_iter().map(|(_, name)| name));
    }
}

/// What becomes of one record, as far as this node can say alone.
enum Judgement {
    Keep,
    Drop,
    /// The last copy on this node, not read since it was written: the catalog is asked.
    Ask(ReplicaName),
}

/// The store, as the owner of one tier's records. A tier that was replaced may still be at work: its places are compared
/// with none of the next one's, on which the same may be another record.
pub(super) struct Owner {
    store: Weak<Inner>,
    tier: Arc<NvmeTier>,
}

impl RecordOwner for Owner {
    fn decide(&self, records: Vec<(SliceHeader, Location)>) -> BoxFuture<'_, Vec<Verdict>> {
        Box::pin(async move {
            match self.store.upgrade() {
                Some(store) => store.decide(&self.tier, &records).await,
                None => vec![Verdict::Keep; records.len()],
            }
        })
    }

    fn moved(&self, header: &SliceHeader, from: Location, to: Location) -> bool {
        self.store.upgrade().is_some_and(|store| store.moved(&self.tier, header, from, to))
    }

    fn lost(&self, header: &SliceHeader, location: Location) -> bool {
        self.store.upgrade().is_some_and(|store| store.lost(&self.tier, header, location))
    }
}

impl Inner {
    async fn decide(&self, tier: &NvmeTier, records: &[(SliceHeader, Location)]) -> Vec<Verdict> {
        let reclaimed: HashSet<Location> = records.iter().map(|(_, location)| *location).collect();
        let judgements = self.judge(tier, records, &reclaimed);
        let mut names: Vec<ReplicaName> = Vec::new();
        for judgement in &judgements {
            if let Judgement::Ask(name) = judgement
                && names.last() != Some(name)
            {
                names.push(name.clone());
            }
        }
        let forgotten = self.forget_cold(tier, names, &reclaimed).await;
        let verdict = |judgement| match judgement {
            Judgement::Drop => Verdict::Drop,
            Judgement::Ask(name) if forgotten.contains(&name.replica) => Verdict::Drop,
            Judgement::Keep | Judgement::Ask(_) => Verdict::Keep,
        };
        judgements.into_iter().map(verdict).collect()
    }

    fn moved(&self, tier: &NvmeTier, header: &SliceHeader, from: Location, to: Location) -> bool {
        let mut tables = self.state.lock();
        if self.is_replaced(tier) {
            return false;
        }
        let found = tables.index.find_replica(header.tenant, header.key.as_bytes(), header.replica);
        let place = found
            .and_then(|id| tables.index.get_mut(id))
            .and_then(|entry| entry.nvme.as_mut())
            .and_then(|locations| locations.as_mut_slice().get_mut(header.slice_index as usize))
            .filter(|place| **place == from);
        match place {
            Some(place) => {
                *place = to;
                true
            }
            None => false,
        }
    }

    /// As [`RecordOwner::lost`].
    pub(super) fn lost(&self, tier: &NvmeTier, header: &SliceHeader, location: Location) -> bool {
        let mut tables = self.state.lock();
        if self.is_replaced(tier) {
            return false;
        }
        let found = tables.index.find_replica(header.tenant, header.key.as_bytes(), header.replica);
        let Some(id) = found else { return false };
        let Some(entry) = tables.index.get_mut(id).filter(|entry| holds(entry, header.slice_index, location)) else {
            return false;
        };
        self.counters.corrupt(TierKind::Nvme);
        let name = super::name_of(entry);
        let others = entry.nvme.take();
        let orphaned = entry.dram.is_none();
        let others = others.iter().flat_map(|places| places.as_slice()).copied().filter(|&place| place != location);
        self.release(others);
        if orphaned {
            self.drop_entry(&mut tables, id);
            drop(tables);
            self.lost.tell([name]);
        }
        true
    }

    fn judge(
        &self,
        tier: &NvmeTier,
        records: &[(SliceHeader, Location)],
        reclaimed: &HashSet<Location>,
    ) -> Vec<Judgement> {
        let capacity = self.nvme_capacity();
        let mut tables = self.state.lock();
        if self.is_replaced(tier) {
            return records.iter().map(|_| Judgement::Keep).collect();
        }
        let mut judge = |(header, location): &(SliceHeader, Location)| {
            let found = tables.index.find_replica(header.tenant, header.key.as_bytes(), header.replica);
            let is_kept = found.is_some_and(|id| tables.is_kept_on_disk(id, capacity));
            let Some(entry) = found.and_then(|id| tables.index.get_mut(id)) else { return Judgement::Drop };
            if !holds(entry, header.slice_index, *location) {
                return Judgement::Drop;
            }
            if entry.dram.is_some() && !entry.durable {
                // DRAM has it; if it is demoted again it is written again.
                self.release_others(entry.nvme.take(), reclaimed);
                return Judgement::Drop;
            }
            if is_kept || entry.reads > 0 || entry.durable || entry.state == State::Sealed {
                // A second chance, and a new count.
                entry.reads = 0;
                return Judgement::Keep;
            }
            Judgement::Ask(super::name_of(entry))
        };
        records.iter().map(&mut judge).collect()
    }

    /// Releases the places that are not being reclaimed: those are let go of by the verdict.
    fn release_others(&self, places: Option<PerSlice<Location>>, reclaimed: &HashSet<Location>) {
        let places = places.iter().flat_map(|places| places.as_slice()).copied();
        self.release(places.filter(|place| !reclaimed.contains(place)).collect::<Vec<_>>());
    }

    /// Proposes to forget replicas that are on NVMe only; answers those that are gone.
    async fn forget_cold(
        &self,
        tier: &NvmeTier,
        names: Vec<ReplicaName>,
        reclaimed: &HashSet<Location>,
    ) -> HashSet<ReplicaId> {
        if names.is_empty() {
            return HashSet::new();
        }
        let answers = self.forget.forget(names.clone()).await;
        let mut forgotten = HashSet::with_capacity(names.len());
        let mut tables = self.state.lock();
        let is_replaced = self.is_replaced(tier);
        for (name, answer) in names.into_iter().zip(answers) {
            if answer != ForgetAnswer::Forgotten {
                continue;
            }
            if let Some(id) = tables.index.find_replica(name.tenant, name.key.as_bytes(), name.replica) {
                self.counters.evicted(TierKind::Nvme);
                if !is_replaced {
                    let places = tables.index.get_mut(id).and_then(|entry| entry.nvme.take());
                    self.release_others(places, reclaimed);
                }
                self.drop_entry(&mut tables, id);
            }
            forgotten.insert(name.replica);
        }
        forgotten
    }
}

fn holds(entry: &Entry, slice_index: u32, location: Location) -> bool {
    let places = entry.nvme.as_ref().map(PerSlice::as_slice);
    places.and_then(|places| places.get(slice_index as usize)) == Some(&location)
}
