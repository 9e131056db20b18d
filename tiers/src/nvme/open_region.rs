//! The region being filled: packs records into its buffer and hands out what is ready to be written.
//!
//! Does no I/O. The buffer covers the region from `base`, the first byte not yet handed out, to its end.
//! Invariants: `base <= cursor`, `base` is page-aligned, what was handed out is never changed again (so no page is
//! written twice), and the footer of all records so far always has room behind the cursor.

use tidepool_metadata::SliceHeader;
use tidepool_metadata::checksum::{CHUNK_BYTES, ChunkChecksums};

use super::NvmeError;
use super::format::{
    Epoch, Footer, RecordLayout, RegionHeader, TOMBSTONE_BYTES, Tombstone, encode_slice_head, encode_tombstones,
    entry_bytes, footer_pages_start, tombstones_record_bytes,
};
use crate::io::{Block, PAGE_BYTES};

/// Bytes of a slice that is to be written; immutable while anyone refers to it.
pub trait SliceSource: Send + Sync {
    /// The slice's bytes in order, in pieces of any length.
    fn pieces(&self) -> Box<dyn Iterator<Item = &[u8]> + '_>;
}

impl SliceSource for Vec<u8> {
    fn pieces(&self) -> Box<dyn Iterator<Item = &[u8]> + '_> {
        Box::new(std::iter::once(self.as_slice()))
    }
}

pub(super) struct OpenRegion {
    pub(super) region: u32,
    pub(super) epoch: Epoch,
    region_bytes: usize,
    block: Block,
    base: usize,
    cursor: usize,
    footer: Footer,
}

impl OpenRegion {
    /// Starts a region in `block`, which has the region's length.
    pub(super) fn new(region: u32, epoch: Epoch, mut block: Block) -> Self {
        RegionHeader { epoch, is_free: false }.encode(&mut block);
        let region_bytes = block.len();
        Self { region, epoch, region_bytes, block, base: 0, cursor: PAGE_BYTES, footer: Footer::default() }
    }

    /// How far the region is filled.
    pub(super) fn cursor(&self) -> usize {
        self.cursor
    }

    /// Whether a slice still fits, with its footer entry.
    pub(super) fn fits(&self, key_length: usize, slice_length: usize) -> bool {
        let record_bytes = RecordLayout::at(self.cursor, key_length, slice_length).record_bytes;
        self.has_room(record_bytes, entry_bytes(key_length))
    }

    /// How many of `count` tombstones fit.
    pub(super) fn tombstones_that_fit(&self, count: usize) -> usize {
        let fits = |count| self.has_room(tombstones_record_bytes(count), count * TOMBSTONE_BYTES);
        std::iter::successors(Some(count), |count| Some(count / 2))
            .find(|&count| count == 0 || fits(count))
            .unwrap_or(0)
    }

    fn has_room(&self, record_bytes: usize, footer_growth: usize) -> bool {
        let end = (self.cursor + record_bytes).next_multiple_of(PAGE_BYTES);
        footer_pages_start(self.region_bytes, self.footer.footer_bytes() + footer_growth)
            .is_some_and(|start| end <= start)
    }

    /// Copies a slice in and checks it against its header on the way. Gives the record's offset and length; on an
    /// error nothing has changed. The caller has asked `fits`.
    pub(super) fn append(&mut self, header: &SliceHeader, source: &dyn SliceSource) -> Result<(u32, u32), NvmeError> {
        let slice_length = header.slice_length as usize;
        let layout = RecordLayout::at(self.cursor, header.key.as_bytes().len(), slice_length);
        let start = self.cursor - self.base;
        let record = &mut self.block[start..start + layout.record_bytes];
        let (payload, padding) = record[layout.payload_offset..].split_at_mut(slice_length);
        let chunks = copy_with_checksums(source, payload, header)?;
        padding.fill(0);
        record[layout.head_bytes..layout.payload_offset].fill(0);
        encode_slice_head(record, self.epoch, header, &chunks.0, layout.record_bytes);
        let (offset, length) = (self.cursor as u32, layout.record_bytes as u32);
        self.footer.push(header, offset, length);
        self.cursor += layout.record_bytes;
        Ok((offset, length))
    }

    /// Adds a tombstones record. The caller has asked `tombstones_that_fit`.
    pub(super) fn append_tombstones(&mut self, tombstones: &[Tombstone]) {
        let start = self.cursor - self.base;
        let record_bytes = tombstones_record_bytes(tombstones.len());
        encode_tombstones(&mut self.block[start..start + record_bytes], self.epoch, tombstones);
        self.footer.tombstones.extend_from_slice(tombstones);
        self.cursor += record_bytes;
    }

    /// The whole pages that are filled, if they are at least `least` bytes: where they go, and the memory.
    pub(super) fn take_filled(&mut self, least: usize) -> Option<(usize, Block)> {
        let ready = (self.cursor - self.base) / PAGE_BYTES * PAGE_BYTES;
        (ready >= least && ready > 0).then(|| self.take(ready))
    }

    /// All that is filled, padded to a page: the next record starts on a new one.
    pub(super) fn take_all(&mut self) -> Option<(usize, Block)> {
        let end = self.cursor.next_multiple_of(PAGE_BYTES);
        let (from, to) = (self.cursor - self.base, end - self.base);
        self.block[from..to].fill(0);
        self.cursor = end;
        (to > 0).then(|| self.take(to))
    }

    fn take(&mut self, count: usize) -> (usize, Block) {
        let offset = self.base;
        self.base += count;
        (offset, self.block.split_to(count))
    }

    /// What the region's footer has to say. The rest of the buffer is given up.
    pub(super) fn into_footer(self) -> Footer {
        self.footer
    }
}

/// Copies a source's pieces into `target`, a chunk at a time with its checksum, while the bytes are in the cache.
fn copy_with_checksums(
    source: &dyn SliceSource,
    target: &mut [u8],
    header: &SliceHeader,
) -> Result<ChunkChecksums, NvmeError> {
    let (mut filled, mut summed) = (0, 0);
    let mut chunks = Vec::with_capacity(target.len().div_ceil(CHUNK_BYTES));
    let mut surplus = 0;
    for mut piece in source.pieces() {
        while !piece.is_empty() {
            let room = (summed + CHUNK_BYTES).min(target.len()) - filled;
            if room == 0 {
                surplus += piece.len();
                break;
            }
            let (now, rest) = piece.split_at(room.min(piece.len()));
            target[filled..filled + now.len()].copy_from_slice(now);
            filled += now.len();
            piece = rest;
            if filled - summed == CHUNK_BYTES || filled == target.len() {
                chunks.push(crc32fast::hash(&target[summed..filled]));
                summed = filled;
            }
        }
    }
    let chunks = ChunkChecksums(chunks);
    let length = filled + surplus;
    let actual = if length == target.len() { chunks.combined(length) } else { 0 };
    if length != target.len() || actual != header.checksum {
        return Err(NvmeError::SourceMismatch { length, actual, expected: header.checksum });
    }
    Ok(chunks)
}
