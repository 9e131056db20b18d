//! Slices that outlived their process, found when the segment was opened.

use std::sync::Arc;

use tidepool_metadata::directory::{RecoveredSlot, SlotId};
use tidepool_metadata::{ReplicaId, SliceHeader};

use super::allocator::Block;
use super::error::Corrupt;
use super::slice::{SharedSlice, Slice};
use super::tier::MemoryTier;

/// All that were found. There may be millions, so each becomes a [`RecoveredSlice`] when it is asked for; those that
/// nobody asked for are freed when this is dropped.
#[derive(Debug)]
pub struct RecoveredSlices {
    tier: Arc<MemoryTier>,
    slots: Vec<RecoveredSlot>,
    /// Those of the first slot, then those of the second, ..
    blocks: Vec<Block>,
    next: Place,
    left: usize,
}

/// A position in `slots`, and the first of its blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    slot: usize,
    block: usize,
}

/// Stands in the place of a slot that was taken out of turn.
const TAKEN: SlotId = SlotId(u32::MAX);

impl RecoveredSlices {
    pub(super) fn new(tier: Arc<MemoryTier>, slots: Vec<RecoveredSlot>, blocks: Vec<Block>) -> Self {
        let left = slots.len();
        Self { tier, slots, blocks, next: Place::default(), left }
    }

    /// Takes the slices of copies that are `wanted`, and leaves the others.
    pub fn take(&mut self, wanted: impl Fn(ReplicaId) -> bool) -> Vec<RecoveredSlice> {
        let (mut place, mut taken) = (self.next, Vec::new());
        while let Some(found) = self.slots.get(place.slot) {
            if found.slot != TAKEN && wanted(found.replica) {
                taken.push(self.make(place));
            }
            place = self.behind(place);
        }
        taken
    }

    fn behind(&self, place: Place) -> Place {
        Place { slot: place.slot + 1, block: place.block + usize::from(self.slots[place.slot].extent_count) }
    }

    /// The slice at `place`, which nobody has.
    fn make(&mut self, place: Place) -> RecoveredSlice {
        let blocks = self.blocks[place.block..self.behind(place).block].iter().copied().collect();
        let found = &mut self.slots[place.slot];
        let slot = std::mem::replace(&mut found.slot, TAKEN);
        self.left -= 1;
        let pages = self.tier.recovered_pages(blocks);
        let slice = Slice::new(pages, slot, found.slice_length as usize, found.checksum);
        RecoveredSlice { slice, replica: found.replica, is_whole: found.is_whole }
    }
}

impl Iterator for RecoveredSlices {
    type Item = RecoveredSlice;

    fn next(&mut self) -> Option<RecoveredSlice> {
        loop {
            let (place, found) = (self.next, self.slots.get(self.next.slot)?);
            let is_taken = found.slot == TAKEN;
            self.next = self.behind(place);
            if !is_taken {
                return Some(self.make(place));
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for RecoveredSlices {}

impl Drop for RecoveredSlices {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

/// A slice that was found in the segment at opening; not verified, and in no reader's way. Dropping it frees it.
#[derive(Debug)]
pub struct RecoveredSlice {
    slice: Slice,
    replica: ReplicaId,
    is_whole: bool,
}

impl RecoveredSlice {
    /// Whether it is the only slice of its object.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Of which copy it is.
    #[must_use]
    pub fn replica(&self) -> ReplicaId {
        self.replica
    }

    /// What its entry says, which its own checksum covers.
    #[must_use]
    pub fn header(&self) -> SliceHeader {
        self.slice.header()
    }

    /// Reads all of it; lets readers find it again if its put was known to be complete.
    ///
    /// # Errors
    /// [`Corrupt`]: it is gone.
    pub fn verify(self) -> Result<SharedSlice, Corrupt> {
        let Self { slice, .. } = self;
        slice.verify(0..slice.length())?;
        let (length, expected) = (slice.length(), slice.checksum());
        let actual = if length == 0 { 0 } else { slice.chunk_checksums().combined(length as usize) };
        if actual != expected {
            return Err(Corrupt { chunk: 0, expected, actual });
        }
        let commit_index = slice.header().commit_index;
        if commit_index > 0 {
            slice.complete(commit_index);
        }
        Ok(SharedSlice::new(slice))
    }
}
