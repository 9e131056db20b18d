//! The table of regions: which is free, open or sealed, how much of each is alive, and who is reading it.
//!
//! Does no I/O. Invariants: a free region has sequence 0 and no live bytes; sequences are never used twice;
//! `used_bytes` is the sum of `live_bytes` over all regions, less what is still being written (`reserved_bytes`).
//!
//! Readers against reuse: a reader counts itself in, then compares the sequence; [`Regions::retire`] takes the
//! sequence away, then waits until the count is zero. Both are sequentially consistent, so one of them sees the other:
//! a region is never rewritten under a read that takes its bytes for good.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::format::{Epoch, Tombstone, Trailer};
use super::location::Location;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// Being written, or sealed but the seal is not durable yet.
    Open,
    Sealed,
    /// Given up; waiting for readers and for its header to be durable.
    Retired,
}

#[derive(Default)]
struct Slot {
    /// Sequence of the current use; 0 when nothing may be read.
    sequence: AtomicU64,
    readers: AtomicU32,
}

#[derive(Clone, Copy)]
struct Use {
    state: State,
    salt: u64,
    sequence: u64,
    live_bytes: u64,
    /// Records whose writer hasn't yet been told, or hasn't yet noted where they are.
    unsettled: u32,
    footer: Option<Trailer>,
}

const UNUSED: Use = Use { state: State::Free, salt: 0, sequence: 0, live_bytes: 0, unsettled: 0, footer: None };

struct Table {
    uses: Vec<Use>,
    free: VecDeque<u32>,
    by_sequence: HashMap<u64, u32>,
    next_sequence: u64,
    used_bytes: u64,
    reserved_bytes: u64,
}

/// All regions of a tier.
pub(super) struct Regions {
    slots: Box<[Slot]>,
    table: Mutex<Table>,
    region_bytes: u64,
    /// Rung when a retired region's last reader leaves.
    drained: Notify,
}

/// A read in progress: while it lives the region isn't reused.
pub(super) struct RegionHold {
    regions: Arc<Regions>,
    region: u32,
    epoch: Epoch,
}

impl RegionHold {
    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }
}

impl Drop for RegionHold {
    fn drop(&mut self) {
        let slot = &self.regions.slots[self.region as usize];
        if slot.readers.fetch_sub(1, Ordering::SeqCst) == 1 && slot.sequence.load(Ordering::SeqCst) == 0 {
            self.regions.drained.notify_waiters();
        }
    }
}

/// A region that holds records, as the scanner and the reclaimer see it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SealedRegion {
    pub(super) region: u32,
    pub(super) epoch: Epoch,
    pub(super) live_bytes: u64,
    pub(super) trailer: Trailer,
}

/// How full the tier is. `free + used + reserved == capacity`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmeUsage {
    /// All regions.
    pub capacity_bytes: u64,
    /// Live records.
    pub used_bytes: u64,
    /// Records being written.
    pub reserved_bytes: u64,
    /// The rest, whether writable at once or after reclaim.
    pub free_bytes: u64,
    /// Regions that can be written at once.
    pub free_regions: u32,
    /// All regions.
    pub regions: u32,
}

impl Regions {
    pub(super) fn new(region_count: u32, region_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            slots: (0..region_count).map(|_| Slot::default()).collect(),
            table: Mutex::new(Table {
                uses: vec![UNUSED; region_count as usize],
                free: (0..region_count).collect(),
                by_sequence: HashMap::new(),
                next_sequence: 1,
                used_bytes: 0,
                reserved_bytes: 0,
            }),
            region_bytes,
            drained: Notify::new(),
        })
    }

    pub(super) fn count(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(super) fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    pub(super) fn usage(&self) -> NvmeUsage {
        let table = self.table.lock();
        let capacity_bytes = u64::from(self.count()) * self.region_bytes;
        NvmeUsage {
            capacity_bytes,
            used_bytes: table.used_bytes,
            reserved_bytes: table.reserved_bytes,
            free_bytes: capacity_bytes - table.used_bytes - table.reserved_bytes,
            free_regions: table.free.len() as u32,
            regions: self.count(),
        }
    }

    pub(super) fn free_count(&self) -> u32 {
        self.table.lock().free.len() as u32
    }

    // ---- recovery ----

    /// Sequences up to this one are taken.
    pub(super) fn reserve_sequence(&self, sequence: u64) {
        let mut table = self.table.lock();
        table.next_sequence = table.next_sequence.max(sequence + 1);
    }

    /// A region that can't be read: not used until the tier is opened again.
    pub(super) fn quarantine(&self, region: u32) {
        let mut table = self.table.lock();
        table.free.retain(|&free| free != region);
        table.uses[region as usize].state = State::Retired;
    }

    /// A region that was found sealed: all its records count as alive until `bury` says otherwise.
    pub(super) fn adopt(&self, region: u32, trailer: Trailer) {
        let mut table = self.table.lock();
        table.free.retain(|&free| free != region);
        table.by_sequence.insert(trailer.epoch.sequence, region);
        table.used_bytes += trailer.record_bytes;
        table.uses[region as usize] = Use {
            state: State::Sealed,
            salt: trailer.epoch.salt,
            sequence: trailer.epoch.sequence,
            live_bytes: trailer.record_bytes,
            unsettled: 0,
            footer: Some(trailer),
        };
        self.slots[region as usize].sequence.store(trailer.epoch.sequence, Ordering::SeqCst);
    }

    // ---- writing ----

    /// Takes a free region for writing if more than `keep` are free.
    pub(super) fn open(&self, keep: u32, salt: u64) -> Option<(u32, Epoch)> {
        let mut table = self.table.lock();
        if table.free.len() as u32 <= keep {
            return None;
        }
        let region = table.free.pop_front()?;
        let sequence = table.next_sequence;
        table.next_sequence += 1;
        table.by_sequence.insert(sequence, region);
        table.uses[region as usize] = Use { state: State::Open, salt, sequence, ..UNUSED };
        self.slots[region as usize].sequence.store(sequence, Ordering::SeqCst);
        Some((region, Epoch { sequence, salt }))
    }

    /// A record has its place in `region`, not yet readable. The region is no victim until it is settled.
    pub(super) fn place(&self, region: u32, record_bytes: u64) {
        let mut table = self.table.lock();
        let place = &mut table.uses[region as usize];
        place.live_bytes += record_bytes;
        place.unsettled += 1;
        table.reserved_bytes += record_bytes;
    }

    /// The owner of a published record knows of it, or never will.
    pub(super) fn settle(&self, location: Location) {
        self.table.lock().uses[location.region as usize].unsettled -= 1;
    }

    /// A placed record is readable.
    pub(super) fn publish(&self, record_bytes: u64) {
        let mut table = self.table.lock();
        table.reserved_bytes -= record_bytes;
        table.used_bytes += record_bytes;
    }

    /// A placed record will never be readable.
    pub(super) fn abandon(&self, location: Location) {
        let mut table = self.table.lock();
        table.reserved_bytes -= u64::from(location.length);
        let place = &mut table.uses[location.region as usize];
        place.live_bytes -= u64::from(location.length);
        place.unsettled -= 1;
    }

    /// The region's footer is written.
    pub(super) fn seal(&self, region: u32, trailer: Trailer) {
        let mut table = self.table.lock();
        let place = &mut table.uses[region as usize];
        place.state = State::Sealed;
        place.footer = Some(trailer);
    }

    // ---- reading and releasing ----

    /// Keeps the location's region from being reused; `None` if it has been, or if the location makes no sense.
    pub(super) fn hold(self: &Arc<Self>, location: Location) -> Option<RegionHold> {
        if u64::from(location.offset) + u64::from(location.length) > self.region_bytes {
            return None;
        }
        let slot = self.slots.get(location.region as usize)?;
        slot.readers.fetch_add(1, Ordering::SeqCst);
        let sequence = slot.sequence.load(Ordering::SeqCst);
        // Made first, so that every way out counts the reader out again.
        let epoch = Epoch { sequence, salt: 0 };
        let mut hold = RegionHold { regions: Arc::clone(self), region: location.region, epoch };
        if sequence == 0 || sequence as u32 != location.sequence {
            return None;
        }
        // The salt can't change while the hold lives: the next use starts after the readers have left.
        hold.epoch.salt = self.table.lock().uses[location.region as usize].salt;
        Some(hold)
    }

    /// The record at `location` is dead: what stands for it on disk, or `None` if its region is already gone.
    pub(super) fn release(&self, location: Location) -> Option<Tombstone> {
        let mut table = self.table.lock();
        let place = table.uses.get_mut(location.region as usize)?;
        if place.sequence as u32 != location.sequence || matches!(place.state, State::Free | State::Retired) {
            return None;
        }
        let length = u64::from(location.length);
        let Some(live) = place.live_bytes.checked_sub(length) else {
            debug_assert!(false, "{location:?} is released twice");
            return None;
        };
        place.live_bytes = live;
        let sequence = place.sequence;
        table.used_bytes -= length;
        Some(Tombstone { sequence, offset: location.offset, length: location.length })
    }

    /// Whether a tombstone still keeps something from returning.
    pub(super) fn is_current(&self, sequence: u64) -> bool {
        self.table.lock().by_sequence.contains_key(&sequence)
    }

    /// The region of that sequence, if it has not been reused.
    pub(super) fn find(&self, sequence: u64) -> Option<u32> {
        self.table.lock().by_sequence.get(&sequence).copied()
    }

    // ---- reclaim ----

    /// All sealed regions, newest first.
    pub(super) fn sealed(&self) -> Vec<SealedRegion> {
        let table = self.table.lock();
        let mut sealed: Vec<_> = (0..self.count()).filter_map(|region| table.sealed(region)).collect();
        drop(table);
        sealed.sort_unstable_by_key(|region| std::cmp::Reverse(region.epoch.sequence));
        sealed
    }

    /// The best region to reclaim: the one with the least alive, or the oldest if all are nearly full.
    pub(super) fn victim(&self) -> Option<SealedRegion> {
        let table = self.table.lock();
        let is_settled = |region: &u32| table.uses[*region as usize].unsettled == 0;
        let sealed = || (0..self.count()).filter(is_settled).filter_map(|region| table.sealed(region));
        let emptiest = sealed().min_by_key(|region| (region.live_bytes, region.epoch.sequence))?;
        if emptiest.live_bytes <= self.region_bytes / 4 * 3 {
            return Some(emptiest);
        }
        sealed().min_by_key(|region| region.epoch.sequence)
    }

    /// Sealed regions in which nothing is alive, up to `limit`.
    pub(super) fn empty(&self, limit: usize) -> Vec<SealedRegion> {
        let table = self.table.lock();
        let is_empty =
            |region: &SealedRegion| region.live_bytes == 0 && table.uses[region.region as usize].unsettled == 0;
        (0..self.count()).filter_map(|region| table.sealed(region)).filter(is_empty).take(limit).collect()
    }

    /// Ends the region's use: nothing in it is found from now on. Wait for [`Self::drain`] before writing to it.
    pub(super) fn retire(&self, region: u32) {
        let mut table = self.table.lock();
        let place = &mut table.uses[region as usize];
        let live_bytes = std::mem::take(&mut place.live_bytes);
        place.state = State::Retired;
        let sequence = place.sequence;
        table.used_bytes -= live_bytes;
        table.by_sequence.remove(&sequence);
        self.slots[region as usize].sequence.store(0, Ordering::SeqCst);
    }

    /// Waits until no read of a retired region is in flight.
    pub(super) async fn drain(&self, region: u32) {
        loop {
            let drained = self.drained.notified();
            tokio::pin!(drained);
            drained.as_mut().enable();
            if self.slots[region as usize].readers.load(Ordering::SeqCst) == 0 {
                return;
            }
            drained.await;
        }
    }

    /// The epoch of a retired region, for its free header.
    pub(super) fn retired_epoch(&self, region: u32) -> Epoch {
        let table = self.table.lock();
        let place = &table.uses[region as usize];
        Epoch { sequence: place.sequence, salt: place.salt }
    }

    /// The retired region's free header is durable.
    pub(super) fn free(&self, region: u32) {
        let mut table = self.table.lock();
        table.uses[region as usize] = UNUSED;
        table.free.push_back(region);
    }
}

impl Table {
    fn sealed(&self, region: u32) -> Option<SealedRegion> {
        let place = &self.uses[region as usize];
        if place.state != State::Sealed {
            return None;
        }
        let trailer = place.footer?;
        Some(SealedRegion { region, epoch: trailer.epoch, live_bytes: place.live_bytes, trailer })
    }
}

#[cfg(test)]
mod tests;
