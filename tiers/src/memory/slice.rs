//! Sealed slices: immutable, verified when they are read.

use std::ops::Range;

use bytes::Bytes;
use crc32fast::Hasher;
use tidepool_metadata::directory::SlotId;
use tidepool_metadata::{CHUNK_BYTES, ChunkChecksums, SliceHeader};

use super::arena::Pages;
use super::buffer::trailer_start;
use super::error::Corrupt;
use crate::nvme::SliceSource;

/// Bytes copied before they are checked: they stay in the first cache, whatever else runs on the core.
const COPY_STEP_BYTES: usize = 4096;

/// A sealed slice in DRAM.
#[derive(Debug)]
pub struct Slice {
    pages: Pages,
    slot: SlotId,
    length: u32,
    checksum: u32,
}

/// A sealed slice, shared: whoever has it holds its memory. Without a count of weak references it takes 48 bytes, a size
/// of the allocator's, instead of 64; there is one for every small object.
pub type SharedSlice = triomphe::Arc<Slice>;

const _: () = assert!(size_of::<Slice>() + size_of::<usize>() <= 48);

impl Slice {
    pub(super) fn new(pages: Pages, slot: SlotId, length: usize, checksum: u32) -> Self {
        let length = u32::try_from(length).expect("a slice has at most 16 MiB");
        Self { pages, slot, length, checksum }
    }

    fn len(&self) -> usize {
        self.length as usize
    }

    /// What the directory says of it.
    #[must_use]
    pub fn header(&self) -> SliceHeader {
        self.pages.tier().header(self.slot)
    }

    /// Its length in bytes.
    #[must_use]
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Its CRC-32.
    #[must_use]
    pub fn checksum(&self) -> u32 {
        self.checksum
    }

    /// The stored CRC-32 of each chunk.
    #[must_use]
    pub fn chunk_checksums(&self) -> ChunkChecksums {
        let chunks = self.len().div_ceil(CHUNK_BYTES).max(1);
        ChunkChecksums((0..chunks).map(|chunk| self.chunk_checksum(chunk)).collect())
    }

    fn chunk_checksum(&self, chunk: usize) -> u32 {
        if self.len() <= CHUNK_BYTES {
            return self.checksum;
        }
        let at = trailer_start(self.len()) + 4 * chunk;
        let mut bytes = [0; 4];
        // Four bytes at a multiple of four lie in one page.
        self.pages.pieces(at..at + 4).for_each(|piece| bytes.copy_from_slice(piece));
        u32::from_le_bytes(bytes)
    }

    /// Checks every chunk that `range` (bytes of the slice) touches.
    ///
    /// # Errors
    /// [`Corrupt`] for the first that does not hold.
    ///
    /// # Panics
    /// If the range leaves the slice.
    pub fn verify(&self, range: Range<u32>) -> Result<(), Corrupt> {
        let range = self.check(range);
        self.chunks_of(&range).try_for_each(|chunk| {
            let mut sum = Hasher::new();
            self.pages.pieces(self.chunk_range(chunk)).for_each(|piece| sum.update(piece));
            self.compare(chunk, sum)
        })
    }

    /// Copies `range` to `target`, whose length it has, checking chunk by chunk while the bytes are in the cache.
    ///
    /// # Errors
    /// [`Corrupt`]: `target` holds bytes that must not be used.
    ///
    /// # Panics
    /// If the range leaves the slice, or the lengths differ.
    pub fn copy_to(&self, range: Range<u32>, target: &mut [u8]) -> Result<(), Corrupt> {
        let range = self.check(range);
        assert!(range.len() == target.len(), "{} bytes are copied to {}", range.len(), target.len());
        let mut rest = target;
        for chunk in self.chunks_of(&range) {
            let whole = self.chunk_range(chunk);
            let wanted = whole.start.max(range.start)..whole.end.min(range.end);
            let (now, later) = rest.split_at_mut(wanted.len());
            rest = later;
            let mut sum = Hasher::new();
            // What was copied is checked where it went; what else the chunk has, where it lies.
            self.pages.pieces(whole.start..wanted.start).for_each(|piece| sum.update(piece));
            let mut copied = 0;
            for piece in self.pages.pieces(wanted.clone()) {
                for part in piece.chunks(COPY_STEP_BYTES) {
                    let here = &mut now[copied..copied + part.len()];
                    here.copy_from_slice(part);
                    sum.update(here);
                    copied += part.len();
                }
            }
            self.pages.pieces(wanted.end..whole.end).for_each(|piece| sum.update(piece));
            self.compare(chunk, sum)?;
        }
        Ok(())
    }

    /// Views of `range` without a copy, not verified; each holds the slice while it lives.
    ///
    /// # Panics
    /// If the range leaves the slice.
    pub fn bytes(slice: &SharedSlice, range: Range<u32>) -> impl Iterator<Item = Bytes> + use<> {
        let range = slice.check(range);
        let mut position = range.start;
        let lengths: arrayvec::ArrayVec<usize, 8> = slice.pages.pieces(range).map(<[u8]>::len).collect();
        let slice = SharedSlice::clone(slice);
        lengths.into_iter().map(move |length| {
            let view = View { slice: SharedSlice::clone(&slice), range: position..position + length };
            position += length;
            Bytes::from_owner(view)
        })
    }

    /// Lets readers in other processes find it: its put was completed at `commit_index`.
    pub fn complete(&self, commit_index: u64) {
        self.pages.tier().complete(self.slot, commit_index);
    }

    /// Where it lies, in words for people.
    #[must_use]
    pub fn place(&self) -> String {
        let extents = self.pages.blocks().iter().map(|block| block.extent);
        let extents: Vec<String> =
            extents.map(|extent| format!("{}..{}", extent.page, extent.page + extent.pages)).collect();
        format!("slot {}, pages {}", self.slot.0, if extents.is_empty() { "none".into() } else { extents.join(" ") })
    }

    /// Where its bytes lie, from the segment's start, and how many there, in order.
    pub fn extents(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut left = u64::from(self.length);
        self.pages.extents().map_while(move |(start, bytes)| {
            let bytes = bytes.min(left);
            left -= bytes;
            (bytes > 0).then_some((start, bytes))
        })
    }

    /// Where in the segment its generation stands, and what it is.
    #[must_use]
    pub fn generation(&self) -> (u64, u64) {
        self.pages.tier().generation(self.slot)
    }

    fn check(&self, range: Range<u32>) -> Range<usize> {
        let range = range.start as usize..range.end as usize;
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} leaves the slice of {}", self.length);
        range
    }

    /// The chunks that `range` touches; none for no bytes.
    fn chunks_of(&self, range: &Range<usize>) -> Range<usize> {
        if range.is_empty() { 0..0 } else { range.start / CHUNK_BYTES..range.end.div_ceil(CHUNK_BYTES) }
    }

    fn chunk_range(&self, chunk: usize) -> Range<usize> {
        chunk * CHUNK_BYTES..((chunk + 1) * CHUNK_BYTES).min(self.len())
    }

    fn compare(&self, chunk: usize, sum: Hasher) -> Result<(), Corrupt> {
        let (expected, actual) = (self.chunk_checksum(chunk), sum.finalize());
        let chunk = u32::try_from(chunk).unwrap_or(u32::MAX);
        if expected == actual { Ok(()) } else { Err(Corrupt { chunk, expected, actual }) }
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        let blocks = self.pages.take_blocks();
        self.pages.tier().retire(self.slot, blocks);
    }
}

impl SliceSource for SharedSlice {
    fn pieces(&self) -> Box<dyn Iterator<Item = &[u8]> + '_> {
        Box::new(self.pages.pieces(0..self.len()))
    }
}

/// A part of a slice that lies together.
struct View {
    slice: SharedSlice,
    range: Range<usize>,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        self.slice.pages.pieces(self.range.clone()).next().unwrap_or_default()
    }
}
