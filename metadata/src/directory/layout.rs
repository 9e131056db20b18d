//! Where things stand in the segment, and the header that says so.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::entry::PAGE_BYTES;
use super::writer::{GENERATION, SlotId};
use super::{Cell, high, low, pack};
use crate::node::{Incarnation, NodeId};
use crate::object::{KeyHash, TenantId};

/// "TIDEDIR1", read as a little-endian word.
const MAGIC: u64 = u64::from_le_bytes(*b"TIDEDIR1");
/// Version of the layout.
const VERSION: u32 = 2;
pub(super) const HEADER_WORDS: usize = 64;
pub(super) const BUCKET_WORDS: usize = 2;
pub(super) const SLOT_WORDS: usize = 24;
/// The data starts at a multiple of this, so that it can lie on huge pages.
const DATA_ALIGNMENT: u64 = 2 << 20;
/// Spreads the slices of an object over the buckets.
const SLICE_STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;
/// Slots beyond one a page: each reservation keeps enough of them for the longest key.
const SPARE_SLOTS: u64 = 4096;

// Header words.
const WORD_MAGIC: usize = 0;
const WORD_CHECK: usize = 8;
const WORD_INCARNATION: usize = 16;
pub(super) const WORD_VALID_UNTIL: usize = 17;
pub(super) const WORD_RETIRED: usize = 18;
pub(super) const WORD_RECOVERING: usize = 19;
pub(super) const WORD_SLOTS_USED: usize = 20;
pub(super) const WORD_KEPT_PAGES: usize = 21;
const WORD_OWNER: usize = 32;
const OWNER_WORDS: usize = 32;
/// Longest owner that a segment names, in bytes.
pub const OWNER_BYTES: usize = OWNER_WORDS * 8;
/// Bytes of the header.
pub const HEADER_BYTES: usize = HEADER_WORDS * 8;
const _: () = assert!(WORD_OWNER + OWNER_WORDS <= HEADER_WORDS);

/// The fixed facts of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Whose it is.
    pub node: NodeId,
    /// Slots of the directory.
    pub slot_count: u32,
    /// Buckets of the directory, a power of two.
    pub bucket_count: u32,
    /// Where the data starts, in bytes.
    pub data_offset: u64,
    /// Pages of data.
    pub data_pages: u32,
    /// Length of the file in bytes.
    pub file_bytes: u64,
}

/// Why words are not a segment that this program can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Never finished, or something else.
    #[error("there is no segment header")]
    NoHeader,
    /// Of another program version.
    #[error("segment layout has version {found}, this program writes version {VERSION}")]
    Version {
        /// The version found.
        found: u32,
    },
    /// The header's checksum does not hold, or what it says cannot be.
    #[error("the segment header is damaged")]
    Damaged,
}

impl Layout {
    /// The layout of a segment with `data_pages` pages of data; `slot_count` `None` for two a page and some more.
    #[must_use]
    pub fn new(node: NodeId, data_pages: u32, slot_count: Option<u32>) -> Self {
        let default = 2 * u64::from(data_pages) + SPARE_SLOTS;
        let slot_count = slot_count.unwrap_or(u32::try_from(default).unwrap_or(u32::MAX - 1)).max(1);
        // At most four slices a bucket if each has one page; with slices of 16 KiB and more, less than one.
        let bucket_count = (slot_count / 8).max(1).next_power_of_two();
        let words = HEADER_WORDS + bucket_count as usize * BUCKET_WORDS + slot_count as usize * SLOT_WORDS;
        let data_offset = (words as u64 * 8).next_multiple_of(DATA_ALIGNMENT);
        let file_bytes = data_offset + (u64::from(data_pages) * PAGE_BYTES as u64).next_multiple_of(DATA_ALIGNMENT);
        Self { node, slot_count, bucket_count, data_offset, data_pages, file_bytes }
    }

    /// Words of the directory: header, buckets and all slots.
    #[must_use]
    pub fn words(&self) -> usize {
        self.slot(self.slot_count)
    }

    /// Bytes from the start of the file that must be backed by memory before slots below `slot` are used.
    #[must_use]
    pub fn bytes_below_slot(&self, slot: u32) -> u64 {
        self.slot(slot) as u64 * 8
    }

    /// Bytes from the start of the file that were ever used by the directory in `words`: all that opening it touches.
    #[must_use]
    pub fn bytes_used<C: Cell>(&self, words: &[C]) -> u64 {
        self.bytes_below_slot(low(words[WORD_SLOTS_USED].load(Relaxed)).min(self.slot_count))
    }

    /// Reads the header.
    ///
    /// # Errors
    /// [`LayoutError`]: do not use the segment.
    pub fn read<C: Cell>(words: &[C]) -> Result<Self, LayoutError> {
        let word = |position: usize| words.get(position).map_or(0, |cell| cell.load(Acquire));
        if words.len() < HEADER_WORDS || word(WORD_MAGIC) != MAGIC {
            return Err(LayoutError::NoHeader);
        }
        if low(word(1)) != VERSION {
            return Err(LayoutError::Version { found: low(word(1)) });
        }
        let fixed: [u64; 8] = std::array::from_fn(word);
        let narrow = |value: u64| u32::try_from(value).map_err(|_| LayoutError::Damaged);
        let layout = Self {
            node: NodeId(narrow(fixed[7])?),
            slot_count: narrow(fixed[2])?,
            bucket_count: narrow(fixed[3])?,
            data_offset: fixed[4],
            data_pages: narrow(fixed[5])?,
            file_bytes: fixed[6],
        };
        let sound = u64::from(check(&fixed)) == word(WORD_CHECK)
            && high(fixed[1]) as usize == SLOT_WORDS
            && layout.bucket_count.is_power_of_two()
            && layout.words() as u64 * 8 <= layout.data_offset
            && layout.data_offset.checked_add(u64::from(layout.data_pages) * PAGE_BYTES as u64)
                <= Some(layout.file_bytes);
        if sound { Ok(layout) } else { Err(LayoutError::Damaged) }
    }

    /// Writes the header of a new segment, whose words are all 0. Readers find nothing until
    /// [`super::Writer::recover`] has opened it.
    pub fn format<C: Cell>(&self, words: &[C]) {
        let fixed = [
            MAGIC,
            pack(VERSION, SLOT_WORDS as u32),
            u64::from(self.slot_count),
            u64::from(self.bucket_count),
            self.data_offset,
            u64::from(self.data_pages),
            self.file_bytes,
            u64::from(self.node.0),
        ];
        words[WORD_RECOVERING].store(1, Relaxed);
        words[WORD_CHECK].store(u64::from(check(&fixed)), Relaxed);
        for (cell, &value) in words.iter().zip(&fixed).skip(1) {
            cell.store(value, Relaxed);
        }
        words[WORD_MAGIC].store(MAGIC, Release);
    }

    pub(super) fn set_incarnation<C: Cell>(words: &[C], incarnation: Incarnation) {
        words[WORD_INCARNATION].store(u64::from(incarnation.0), Relaxed);
    }

    /// Notes whose segment it is, in words for people: where the node keeps its data. Nothing, if it is too long.
    pub fn set_owner<C: Cell>(words: &[C], owner: &[u8]) {
        let mut bytes = [0; OWNER_BYTES];
        if let Some(place) = bytes.get_mut(..owner.len()) {
            place.copy_from_slice(owner);
        }
        for (cell, word) in words[WORD_OWNER..].iter().zip(bytes.as_chunks().0) {
            cell.store(u64::from_le_bytes(*word), Relaxed);
        }
    }

    /// What [`Layout::set_owner`] noted; empty if it never did.
    #[must_use]
    pub fn owner<C: Cell>(words: &[C]) -> Vec<u8> {
        let words = words[WORD_OWNER..].iter().take(OWNER_WORDS);
        let mut bytes: Vec<u8> = words.flat_map(|cell| cell.load(Relaxed).to_le_bytes()).collect();
        bytes.truncate(bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len()));
        bytes
    }

    /// First word of bucket `bucket`.
    pub(super) fn bucket(bucket: u32) -> usize {
        HEADER_WORDS + bucket as usize * BUCKET_WORDS
    }

    /// First word of slot `slot`.
    pub(super) fn slot(&self, slot: u32) -> usize {
        HEADER_WORDS + self.bucket_count as usize * BUCKET_WORDS + slot as usize * SLOT_WORDS
    }

    /// The word that has the generation of slot `slot`.
    #[must_use]
    pub fn generation(&self, slot: SlotId) -> usize {
        self.slot(slot.0) + GENERATION
    }

    pub(super) fn bucket_of(&self, tenant: TenantId, key: &[u8], slice_index: u32) -> u32 {
        let hash = KeyHash::of(tenant, key).0.wrapping_add(u64::from(slice_index).wrapping_mul(SLICE_STRIDE));
        let bits = self.bucket_count.trailing_zeros();
        hash.checked_shr(64 - bits).map_or(0, low)
    }
}

fn check(fixed: &[u64; 8]) -> u32 {
    let bytes: Vec<u8> = fixed.iter().flat_map(|word| word.to_le_bytes()).collect();
    crc32fast::hash(&bytes)
}
