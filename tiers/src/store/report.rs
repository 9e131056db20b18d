//! What operators see of the tiers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};
use tidepool_metadata::{ObjectKey, TenantId, TierKind, VersionId};

use super::TieredStore;
use super::index::PerSlice;
use crate::nvme::TierState;

/// One tier as `admin tiers` shows it. `free + used + reserved == capacity`, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TierReport {
    /// Which tier.
    pub tier: TierKind,
    /// `serving`, `failed: ..`, `detached`.
    pub state: String,
    /// How it does I/O: `mapped`, `io_uring, direct`, `blocking`, ..
    pub engine: String,
    /// Bytes that the tier may use.
    pub capacity: u64,
    /// Bytes of slices or records.
    pub used: u64,
    /// Bytes being filled or written.
    pub reserved: u64,
    /// Bytes that can be taken.
    pub free: u64,
    /// Replicas on this tier.
    pub objects: u64,
    /// Reads served from here.
    pub hits: u64,
    /// Replicas that left the node from here.
    pub evictions: u64,
    /// Replicas moved to the next slower tier.
    pub demotions: u64,
    /// Bytes of those.
    pub demoted_bytes: u64,
    /// Moves to the next slower tier that failed; the bytes stayed.
    pub failed_demotions: u64,
    /// Replicas that came from the next slower tier.
    pub promotions: u64,
    /// Bytes written to the device for each byte that was demoted to it.
    pub write_amplification: f64,
    /// Damaged copies found and dropped.
    pub corruptions: u64,
    /// I/O errors.
    pub errors: u64,
    /// The last error, if there was one.
    pub last_error: Option<String>,
    /// Bytes verified by the scrub.
    pub scrubbed_bytes: u64,
}

/// How full a tier is, in bytes: `used + reserved <= capacity`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierUsage {
    /// Which tier.
    pub tier: TierKind,
    /// Bytes that the tier may use.
    pub capacity: u64,
    /// Bytes of slices or records.
    pub used: u64,
    /// Bytes being filled or written.
    pub reserved: u64,
}

/// Where one slice of an object lies, as `admin object` shows it.
#[derive(Clone, Debug)]
pub struct SlicePlace {
    /// Its number.
    pub slice_index: u32,
    /// On which tier.
    pub tier: TierKind,
    /// The place, in the tier's own words.
    pub place: String,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    dram_hits: AtomicU64,
    nvme_hits: AtomicU64,
    misses: AtomicU64,
    demoted: AtomicU64,
    demoted_bytes: AtomicU64,
    failed_demotions: AtomicU64,
    promoted: AtomicU64,
    dram_evicted: AtomicU64,
    nvme_evicted: AtomicU64,
    dram_corrupt: AtomicU64,
    nvme_corrupt: AtomicU64,
    scrubbed_bytes: AtomicU64,
}

impl Counters {
    pub(super) fn hit(&self, tier: TierKind) {
        if tier == TierKind::Dram { &self.dram_hits } else { &self.nvme_hits }.fetch_add(1, Relaxed);
    }
    pub(super) fn miss(&self) {
        self.misses.fetch_add(1, Relaxed);
    }
    pub(super) fn demoted(&self, bytes: u64) {
        self.demoted.fetch_add(1, Relaxed);
        self.demoted_bytes.fetch_add(bytes, Relaxed);
    }
    /// Left DRAM without a write, because NVMe had it: a demotion all the same.
    pub(super) fn dropped(&self) {
        self.demoted.fetch_add(1, Relaxed);
    }
    pub(super) fn demotion_failed(&self) {
        self.failed_demotions.fetch_add(1, Relaxed);
    }
    pub(super) fn promoted(&self) {
        self.promoted.fetch_add(1, Relaxed);
    }
    pub(super) fn evicted(&self, tier: TierKind) {
        if tier == TierKind::Dram { &self.dram_evicted } else { &self.nvme_evicted }.fetch_add(1, Relaxed);
    }
    pub(super) fn corrupt(&self, tier: TierKind) {
        if tier == TierKind::Dram { &self.dram_corrupt } else { &self.nvme_corrupt }.fetch_add(1, Relaxed);
    }
    pub(super) fn scrubbed(&self, bytes: u64) {
        self.scrubbed_bytes.fetch_add(bytes, Relaxed);
    }
}

impl TieredStore {
    /// Counts a read that the catalog answered with *missing*: the store was not asked.
    pub fn count_miss(&self) {
        self.inner.counters.miss();
    }

    /// Reads that found nothing.
    #[must_use]
    pub fn misses(&self) -> u64 {
        self.inner.counters.misses.load(Relaxed)
    }

    /// Reads that were served from any tier.
    #[must_use]
    pub fn reads(&self) -> u64 {
        let counters = &self.inner.counters;
        counters.dram_hits.load(Relaxed) + counters.nvme_hits.load(Relaxed)
    }

    /// How full each tier is that serves, fastest first. Cheap.
    #[must_use]
    pub fn usage(&self) -> Vec<TierUsage> {
        let memory = self.inner.memory.usage();
        let (capacity, used, reserved) = (memory.capacity, memory.used, memory.reserved);
        let mut tiers = vec![TierUsage { tier: TierKind::Dram, capacity, used, reserved }];
        if let Some(super::Attached { tier: nvme, .. }) = &*self.inner.nvme.read()
            && matches!(nvme.state(), TierState::Serving)
        {
            let usage = nvme.usage();
            let (capacity, used, reserved) = (usage.capacity_bytes, usage.used_bytes, usage.reserved_bytes);
            tiers.push(TierUsage { tier: TierKind::Nvme, capacity, used, reserved });
        }
        tiers
    }

    /// Each tier, fastest first. Walks the index once; for people, not for every second.
    #[must_use]
    pub fn tiers_report(&self) -> Vec<TierReport> {
        let inner = &self.inner;
        let (mut in_dram, mut on_nvme) = (0, 0);
        {
            let tables = inner.state.lock();
            for (_, entry) in tables.index.iter() {
                in_dram += u64::from(entry.dram.is_some());
                on_nvme += u64::from(entry.nvme.is_some());
            }
        }
        let counters = &inner.counters;
        let memory = inner.memory.usage();
        let dram = TierReport {
            tier: TierKind::Dram,
            state: "serving".into(),
            engine: "mapped".into(),
            capacity: memory.capacity,
            used: memory.used,
            reserved: memory.reserved,
            free: memory.free,
            objects: in_dram,
            hits: counters.dram_hits.load(Relaxed),
            evictions: counters.dram_evicted.load(Relaxed),
            demotions: counters.demoted.load(Relaxed),
            demoted_bytes: counters.demoted_bytes.load(Relaxed),
            failed_demotions: counters.failed_demotions.load(Relaxed),
            promotions: counters.promoted.load(Relaxed),
            write_amplification: 0.0,
            corruptions: counters.dram_corrupt.load(Relaxed),
            errors: 0,
            last_error: None,
            scrubbed_bytes: counters.scrubbed_bytes.load(Relaxed),
        };
        let mut tiers = vec![dram];
        if let Some(super::Attached { tier: nvme, .. }) = &*inner.nvme.read() {
            let (stats, usage) = (nvme.stats(), nvme.usage());
            let (state, last_error) = match nvme.state() {
                TierState::Serving => ("serving".to_owned(), None),
                TierState::Detached => ("detached".to_owned(), None),
                TierState::Failed { error } => ("failed".to_owned(), Some(error.to_string())),
            };
            let path = if nvme.is_direct() { "direct" } else { "page cache" };
            tiers.push(TierReport {
                tier: TierKind::Nvme,
                state,
                engine: format!("{:?}, {path}", nvme.engine()).to_lowercase(),
                capacity: usage.capacity_bytes,
                used: usage.used_bytes,
                reserved: usage.reserved_bytes,
                free: usage.free_bytes,
                objects: on_nvme,
                hits: counters.nvme_hits.load(Relaxed),
                evictions: counters.nvme_evicted.load(Relaxed),
                demotions: 0,
                demoted_bytes: 0,
                failed_demotions: 0,
                promotions: 0,
                write_amplification: stats.write_amplification,
                corruptions: counters.nvme_corrupt.load(Relaxed),
                errors: stats.read_errors + stats.write_errors,
                last_error,
                scrubbed_bytes: stats.scrubbed_bytes,
            });
        }
        tiers
    }

    /// Where each slice of that version lies; empty if it is not here.
    #[must_use]
    pub fn places(&self, tenant: TenantId, key: &ObjectKey, version: VersionId) -> Vec<SlicePlace> {
        let tables = self.inner.state.lock();
        let Some(entry) = tables.index.find(tenant, key.as_bytes(), version).and_then(|id| tables.index.get(id)) else {
            return Vec::new();
        };
        let dram = entry.dram.as_ref().map(PerSlice::as_slice).unwrap_or_default().iter().zip(0..);
        let dram =
            dram.map(|(slice, slice_index)| SlicePlace { slice_index, tier: TierKind::Dram, place: slice.place() });
        let nvme = entry.nvme.as_ref().map(PerSlice::as_slice).unwrap_or_default().iter().zip(0..);
        let nvme = nvme.map(|(place, slice_index)| SlicePlace {
            slice_index,
            tier: TierKind::Nvme,
            place: format!("{place:?}"),
        });
        dram.chain(nvme).collect()
    }
}
