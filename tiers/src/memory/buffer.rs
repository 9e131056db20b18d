//! A slice on its way into DRAM.

use std::ops::Range;

use crc32fast::Hasher;
use tidepool_metadata::directory::SlotPromise;
use tidepool_metadata::{CHUNK_BYTES, ChunkChecksums, SliceHeader};

use super::arena::Pages;
use super::slice::{SharedSlice, Slice};
use super::stream;
use crate::io::Landing;

/// Room for one slice, being filled. Dropping it frees the room.
pub struct SliceBuffer {
    pages: Pages,
    length: usize,
    filled: usize,
    /// Of the chunks that are full.
    checksums: Vec<u32>,
    /// Of the chunk being filled.
    chunk: Hasher,
    /// Room in the directory; `None`: a slice has that and the pages now, this owns nothing any more.
    promise: Option<SlotPromise>,
}

/// Bytes of a slice of `length` bytes with its trailer of chunk checksums, which a slice of one chunk does without.
pub(super) fn stored_bytes(length: usize) -> usize {
    if length <= CHUNK_BYTES { length } else { trailer_start(length) + 4 * length.div_ceil(CHUNK_BYTES) }
}

/// Where the trailer starts.
pub(super) fn trailer_start(length: usize) -> usize {
    length.next_multiple_of(4)
}

impl SliceBuffer {
    pub(super) fn new(pages: Pages, promise: SlotPromise, length: u32) -> Self {
        let length = length as usize;
        let checksums = Vec::with_capacity(length.div_ceil(CHUNK_BYTES));
        Self { pages, length, filled: 0, checksums, chunk: Hasher::new(), promise: Some(promise) }
    }

    /// Length of the slice in bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    /// Bytes that are there.
    #[must_use]
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// The bytes of `range`, in pieces that lie together.
    ///
    /// # Panics
    /// If they are not all there.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        assert!(range.end <= self.filled, "{range:?} of {} bytes that are there", self.filled);
        self.pages.pieces(range)
    }

    /// Copies `data` behind what is there, past the cache, and checksums it on the way: who has `data` changes nothing of it.
    ///
    /// # Panics
    /// If there is more than the slice has room for: the caller counts.
    pub fn append(&mut self, mut data: &[u8]) {
        assert!(data.len() <= self.length - self.filled, "{} bytes too many", data.len() + self.filled - self.length);
        while !data.is_empty() {
            let room = CHUNK_BYTES - self.filled % CHUNK_BYTES;
            let target = self.pages.spare(self.filled);
            let (now, later) = data.split_at(target.len().min(room).min(data.len()));
            // The sum first: it brings the bytes into the cache, from where they are copied.
            self.chunk.update(now);
            stream::copy(&mut target[..now.len()], now);
            self.summed_to(self.filled + now.len());
            data = later;
        }
    }

    /// Begins anew: none of the bytes is there.
    pub fn restart(&mut self) {
        self.filled = 0;
        self.checksums.clear();
        self.chunk = Hasher::new();
    }

    /// The bytes up to `end`, which are of one chunk, are there and in its sum.
    fn summed_to(&mut self, end: usize) {
        self.filled = end;
        if end.is_multiple_of(CHUNK_BYTES) {
            self.checksums.push(std::mem::take(&mut self.chunk).finalize());
        }
    }

    /// Ends all change and enters the slice in the directory, sealed. Fills in the header's checksum.
    ///
    /// # Panics
    /// If bytes are missing, or the header speaks of another length: a half slice must never be sealed.
    #[must_use]
    pub fn seal(mut self, header: SliceHeader) -> SharedSlice {
        assert!(
            self.filled == self.length && header.slice_length as usize == self.length,
            "a slice of {} bytes is sealed with {} bytes as {}",
            self.length,
            self.filled,
            header.slice_length
        );
        if !self.length.is_multiple_of(CHUNK_BYTES) || self.length == 0 {
            self.checksums.push(std::mem::take(&mut self.chunk).finalize());
        }
        let checksums = ChunkChecksums(std::mem::take(&mut self.checksums));
        let checksum = checksums.combined(self.length);
        if self.length > CHUNK_BYTES {
            let mut position = trailer_start(self.length);
            for sum in &checksums.0 {
                // Pages are multiples of four bytes, so no sum lies across two extents.
                self.pages.spare(position)[..4].copy_from_slice(&sum.to_le_bytes());
                position += 4;
            }
        }
        let pages = self.pages.take();
        let promise = self.promise.take().expect("a buffer is sealed once");
        let slot = pages.tier().seal(promise, &SliceHeader { checksum, ..header }, &pages);
        SharedSlice::new(Slice::new(pages, slot, self.length, checksum))
    }
}

impl Landing for SliceBuffer {
    fn spare(&mut self) -> &mut [u8] {
        let most = self.length - self.filled;
        let spare = self.pages.spare(self.filled);
        let length = spare.len().min(most);
        &mut spare[..length]
    }

    fn advance(&mut self, count: usize) {
        let end = self.filled + count;
        assert!(end <= self.length, "advanced to {end} of {} bytes", self.length);
        while self.filled < end {
            let next = (self.filled / CHUNK_BYTES + 1) * CHUNK_BYTES;
            let to = end.min(next);
            for piece in self.pages.pieces(self.filled..to) {
                self.chunk.update(piece);
            }
            self.summed_to(to);
        }
    }
}

impl Drop for SliceBuffer {
    fn drop(&mut self) {
        if let Some(promise) = self.promise.take() {
            let blocks = self.pages.take_blocks();
            self.pages.tier().give_back(blocks, promise);
        }
    }
}
