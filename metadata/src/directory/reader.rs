//! Lookups in a directory that another process writes.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::entry::{
    Extent, Extents, FIXED_WORDS, PAYLOAD_FIRST, PAYLOAD_MORE, SlotState, Status, commit_index, key_words,
};
use super::layout::{WORD_KEPT_PAGES, WORD_RECOVERING, WORD_RETIRED, WORD_VALID_UNTIL};
use super::writer::{COMMIT, FIXED, GENERATION, LINKS, MORE_PAYLOAD, PAYLOAD, STATUS, SlotId};
use super::{Cell, Layout, LayoutError, high, low};
use crate::node::{Incarnation, NodeId};
use crate::object::{DataType, TenantId, VersionId};

/// Most tries, and most slots of a chain: then the normal path is quicker.
const MOST_STEPS: usize = 64;

/// What is looked up.
#[derive(Clone, Copy, Debug)]
pub struct SliceName<'a> {
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: &'a [u8],
    /// The slice's number.
    pub slice_index: u32,
}

/// A slice that was complete at one moment of the lookup. Copy its bytes, then ask [`Reader::is_unchanged`], then
/// compare the checksum: before all three, the bytes are worth nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where it stands.
    pub slot: SlotId,
    /// Changes before its pages are reused.
    pub generation: u64,
    /// Which put.
    pub version: VersionId,
    /// At which log index that was completed.
    pub commit_index: u64,
    /// Length of the object in bytes.
    pub object_length: u64,
    /// Length of all slices but the last, in bytes.
    pub slice_bytes: u32,
    /// Length of this slice in bytes.
    pub slice_length: u32,
    /// What the object holds.
    pub data_type: DataType,
    /// CRC-32 of this slice.
    pub checksum: u32,
    /// Where its bytes are; within the segment, and long enough.
    pub extents: Extents,
}

/// Why a lookup says nothing: take the normal path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// The node has not confirmed lately that it may serve.
    Expired,
    /// The segment is written no more: open it again.
    Retired,
    /// The writer is repairing the directory.
    Recovering,
    /// The writer was always in the way, or the chain is too long or not sound.
    Busy,
}

/// The answer to a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// It is here.
    Found(Found),
    /// It is not in this segment; other tiers and nodes may have it.
    Missing,
    /// Nothing can be said.
    Unsure(Doubt),
}

/// Reads a directory. Trusts nothing that it says: no position leaves the words, no walk is unbounded.
#[derive(Debug)]
pub struct Reader<'a, C> {
    words: &'a [C],
    layout: Layout,
}

impl<'a, C: Cell> Reader<'a, C> {
    /// Opens the directory in `words`, which begin with the segment's header.
    ///
    /// # Errors
    /// [`LayoutError`]; `Damaged` too if there are fewer words than the header says.
    pub fn new(words: &'a [C]) -> Result<Self, LayoutError> {
        let layout = Layout::read(words)?;
        if words.len() < layout.words() {
            return Err(LayoutError::Damaged);
        }
        Ok(Self { words, layout })
    }

    /// Opens a directory again whose layout is known from an earlier [`Reader::new`] over the same words: a segment keeps
    /// its layout for as long as it exists.
    #[must_use]
    pub fn reopen(words: &'a [C], layout: Layout) -> Self {
        Self { words, layout }
    }

    /// The segment's layout.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Looks a slice up. `now` is CLOCK_BOOTTIME in nanoseconds.
    #[must_use]
    pub fn lookup(&self, name: SliceName<'_>, now: u64) -> Lookup {
        let word = |position: usize| self.words[position].load(Acquire);
        if word(WORD_RETIRED) != 0 {
            return Lookup::Unsure(Doubt::Retired);
        }
        if word(WORD_RECOVERING) != 0 {
            return Lookup::Unsure(Doubt::Recovering);
        }
        if word(WORD_VALID_UNTIL) <= now {
            return Lookup::Unsure(Doubt::Expired);
        }
        let bucket = Layout::bucket(self.layout.bucket_of(name.tenant, name.key, name.slice_index));
        for _ in 0..MOST_STEPS {
            let sequence = word(bucket);
            if sequence.is_multiple_of(2) {
                let walked = self.walk(bucket, name);
                C::fence(Acquire);
                if self.words[bucket].load(Relaxed) == sequence {
                    return match walked {
                        Walk::Found(found) => Lookup::Found(found),
                        Walk::End => Lookup::Missing,
                        Walk::Unsound => Lookup::Unsure(Doubt::Busy),
                    };
                }
            }
            std::hint::spin_loop();
        }
        Lookup::Unsure(Doubt::Busy)
    }

    /// Whether the slice's pages still were its own after everything that this thread has read so far: to be asked
    /// after the last byte was copied.
    #[must_use]
    pub fn is_unchanged(&self, found: &Found) -> bool {
        C::fence(Acquire);
        self.words[self.layout.generation(found.slot)].load(Relaxed) == found.generation
    }

    /// Pages that would be free if readers did not keep them.
    #[must_use]
    pub fn kept_pages(&self) -> u64 {
        self.words[WORD_KEPT_PAGES].load(Relaxed)
    }

    /// The newest of the chain that has this name. Only good if the bucket's sequence was the same before and after.
    fn walk(&self, bucket: usize, name: SliceName<'_>) -> Walk {
        let mut newest: Option<Found> = None;
        let mut next = low(self.words[bucket + 1].load(Relaxed));
        for _ in 0..MOST_STEPS {
            let Some(slot) = next.checked_sub(1) else {
                return newest.map_or(Walk::End, Walk::Found);
            };
            if slot >= self.layout.slot_count {
                return Walk::Unsound;
            }
            if let Some(found) = self.compare(slot, name)
                && newest.is_none_or(|newest| newest.commit_index < found.commit_index)
            {
                newest = Some(found);
            }
            next = low(self.words[self.layout.slot(slot) + LINKS].load(Relaxed));
        }
        Walk::Unsound
    }

    fn compare(&self, slot: u32, name: SliceName<'_>) -> Option<Found> {
        let at = self.layout.slot(slot);
        let word = |position: usize| self.words[at + position].load(Relaxed);
        let status = Status(word(STATUS));
        let named = super::pack(name.tenant.0, name.slice_index);
        if status.state() != Some(SlotState::Slice)
            || !status.is_sound()
            || status.key_length() != name.key.len()
            || word(FIXED) != named
        {
            return None;
        }
        let mut payload = Payload { reader: self, slot, position: 0, left: PAYLOAD_FIRST };
        let mut extents = Extents::default();
        for _ in 0..status.extents() {
            let extent = payload.next()?;
            if !extents.push(Extent { page: low(extent), pages: high(extent) }) {
                return None;
            }
        }
        for expected in key_words(name.key) {
            if payload.next()? != expected {
                return None;
            }
        }
        let fixed: [u64; FIXED_WORDS] = std::array::from_fn(|position| word(FIXED + position));
        let generation = word(GENERATION);
        let found = Found {
            slot: SlotId(slot),
            generation,
            version: VersionId {
                node: NodeId(low(fixed[4])),
                incarnation: Incarnation(high(fixed[4])),
                sequence: fixed[5],
            },
            commit_index: commit_index(word(COMMIT), generation),
            object_length: fixed[1],
            slice_bytes: low(fixed[2]),
            slice_length: high(fixed[2]),
            data_type: DataType::from_number(u8::try_from(high(fixed[3])).ok()?)?,
            checksum: low(fixed[3]),
            extents,
        };
        extents.fit(self.layout.data_pages, found.slice_length).then_some(found)
    }
}

enum Walk {
    Found(Found),
    End,
    Unsound,
}

/// The payload words of a slot and of its payload slots.
struct Payload<'a, C> {
    reader: &'a Reader<'a, C>,
    slot: u32,
    position: usize,
    left: usize,
}

impl<C: Cell> Payload<'_, C> {
    fn next(&mut self) -> Option<u64> {
        let words = self.reader.words;
        if self.left == 0 {
            let at = self.reader.layout.slot(self.slot);
            let next = high(words[at + LINKS].load(Relaxed)).checked_sub(1)?;
            if next >= self.reader.layout.slot_count {
                return None;
            }
            (self.slot, self.position, self.left) = (next, MORE_PAYLOAD, PAYLOAD_MORE);
        } else if self.position == 0 {
            self.position = PAYLOAD;
        }
        let word = words[self.reader.layout.slot(self.slot) + self.position].load(Relaxed);
        self.position += 1;
        self.left -= 1;
        Some(word)
    }
}
