//! Reading a range of a slice: one I/O for head and payload where they lie together, in place where that is possible,
//! verified before it counts.
//!
//! A read holds its region from before the first byte is asked for until the I/O ends, also if the caller has gone.
//! In place: the payload of slices of 64 KiB and more is page-aligned on disk; if the range is whole chunks (or ends
//! with the slice) and the target's memory is page-aligned, full pages are read straight into it. All else goes
//! through a buffer.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidepool_metadata::{CHUNK_BYTES, ReplicaId, SliceHeader, VersionId};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::NvmeError;
use super::core::Core;
use super::format::{ALIGNED_PAYLOAD_BYTES, Epoch, RecordHead, payload_offset};
use super::location::Location;
use super::region::RegionHold;
use crate::io::{Block, Completion, IoMemory, IoRequest, Landing, Operation, PAGE_BYTES};

/// Which slice a reader expects at a location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceName {
    /// The put that it is of.
    pub version: VersionId,
    /// The copy that it is of.
    pub replica: ReplicaId,
    /// Its number in the object.
    pub slice_index: u32,
    /// Its length in bytes.
    pub slice_length: u32,
}

impl From<&SliceHeader> for SliceName {
    fn from(header: &SliceHeader) -> Self {
        Self {
            version: header.version,
            replica: header.replica,
            slice_index: header.slice_index,
            slice_length: header.slice_length,
        }
    }
}

/// A vector to read into; it grows by what was read.
#[derive(Debug, Default)]
pub struct VecTarget {
    bytes: Vec<u8>,
    filled: usize,
}

impl VecTarget {
    /// A target for `length` bytes.
    #[must_use]
    pub fn new(length: usize) -> Self {
        Self { bytes: vec![0; length], filled: 0 }
    }

    /// What was read.
    #[must_use]
    pub fn into_vec(mut self) -> Vec<u8> {
        self.bytes.truncate(self.filled);
        self.bytes
    }
}

impl Landing for VecTarget {
    fn spare(&mut self) -> &mut [u8] {
        &mut self.bytes[self.filled..]
    }

    fn advance(&mut self, count: usize) {
        self.filled += count;
    }
}

/// What the I/O's end gives back.
struct Fetched {
    result: std::io::Result<()>,
    memory: IoMemory,
}

pub(super) struct Reader<'a> {
    core: &'a Arc<Core>,
    location: Location,
    name: SliceName,
    hold: Arc<(RegionHold, OwnedSemaphorePermit)>,
    epoch: Epoch,
    /// Of the payload, in the region.
    payload: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        core: &'a Arc<Core>,
        location: Location,
        name: SliceName,
        permit: OwnedSemaphorePermit,
    ) -> Result<Self, NvmeError> {
        let stale = || NvmeError::Stale { location };
        let hold = core.regions.hold(location).ok_or_else(stale)?;
        let payload = payload_offset(location.length as usize, name.slice_length as usize).ok_or_else(stale)?;
        let epoch = hold.epoch();
        let payload = location.offset as usize + payload;
        Ok(Self { core, location, name, hold: Arc::new((hold, permit)), epoch, payload })
    }

    /// Reads `range` of the slice into `target`.
    pub(super) async fn read<T: Landing>(&self, range: Range<u32>, target: T) -> Result<(SliceHeader, T), NvmeError> {
        let (start, end, length) = (range.start, range.end, self.name.slice_length);
        let mut target: Box<dyn Landing> = Box::new(target);
        if start > end || end > length {
            return Err(NvmeError::Range { start, end, length });
        }
        let range = start as usize..end as usize;
        let header;
        if self.lands_in_place(&range, &mut *target) {
            (header, target) = self.read_in_place(range.clone(), target).await?;
        } else {
            let bytes;
            (header, bytes) = self.read_through_buffer(range.clone()).await?;
            copy_out(&bytes, &mut *target).ok_or(NvmeError::Range { start, end, length })?;
        }
        self.core.stats.reads.fetch_add(1, Ordering::Relaxed);
        self.core.stats.read_bytes.fetch_add(range.len() as u64, Ordering::Relaxed);
        let target: Box<dyn Any> = target;
        let target = target.downcast().map_err(|_| NvmeError::Range { start, end, length })?;
        Ok((header, *target))
    }

    fn lands_in_place(&self, range: &Range<usize>, target: &mut dyn Landing) -> bool {
        let length = self.name.slice_length as usize;
        let whole_chunks =
            range.start.is_multiple_of(CHUNK_BYTES) && (range.end.is_multiple_of(CHUNK_BYTES) || range.end == length);
        let spare = target.spare();
        length >= ALIGNED_PAYLOAD_BYTES
            && whole_chunks
            && range.len() >= PAGE_BYTES
            && spare.len() >= PAGE_BYTES
            && spare.as_ptr().addr().is_multiple_of(PAGE_BYTES)
    }

    /// The pages of the head, and whether the payload from `start` follows them at once.
    fn head_pages(&self, start: usize) -> (usize, usize, bool) {
        let first = self.location.offset as usize / PAGE_BYTES * PAGE_BYTES;
        let last = self.payload.next_multiple_of(PAGE_BYTES).max(first + PAGE_BYTES);
        (first, last - first, start == 0)
    }

    async fn read_in_place(
        &self,
        range: Range<usize>,
        mut target: Box<dyn Landing>,
    ) -> Result<(SliceHeader, Box<dyn Landing>), NvmeError> {
        let (first, head_bytes, joined) = self.head_pages(range.start);
        let mut head = None;
        if !joined {
            let block = self.core.read_buffers.take(head_bytes);
            head = Some(self.fetch_block(first, block).await?);
        }
        let mut verifier = None;
        let mut position = range.start;
        while position < range.end {
            let rest = range.end - position;
            let spare = target.spare();
            let is_aligned = spare.as_ptr().addr().is_multiple_of(PAGE_BYTES);
            let pages = spare.len().min(rest) / PAGE_BYTES * PAGE_BYTES;
            let tail = rest - pages;
            let with_tail = tail < PAGE_BYTES && tail > 0 && spare.len() >= rest;
            if !is_aligned || pages == 0 && !with_tail {
                return self.finish_through_buffer(range, position, target, verifier).await;
            }
            let before = (head.is_none()).then(|| self.core.read_buffers.take(head_bytes));
            let after = with_tail.then(|| self.core.read_buffers.take(PAGE_BYTES));
            let offset = if before.is_some() { first } else { self.payload + position };
            let has_before = before.is_some();
            let fetched = self.fetch(offset, IoMemory::landing(before, target, pages, after)).await?;
            let (blocks, landing) = fetched.into_parts();
            target = landing.ok_or_else(|| self.corrupt("target"))?;
            let mut blocks = blocks.into_iter();
            if has_before {
                head = blocks.next();
            }
            if verifier.is_none() {
                let (header, chunks) = self.decode_head(head.as_deref().unwrap_or_default())?;
                verifier = Some((header, Verifier::new(chunks, range.start, self.name.slice_length as usize)));
            }
            let Some((_, sums)) = verifier.as_mut() else { return Err(self.corrupt("head")) };
            sums.feed(&target.spare()[..pages]).ok_or_else(|| self.corrupt("payload"))?;
            target.advance(pages);
            position += pages;
            if with_tail && let Some(after) = blocks.next() {
                sums.feed(&after[..tail]).ok_or_else(|| self.corrupt("payload"))?;
                copy_out(&after[..tail], &mut *target).ok_or_else(|| self.corrupt("target"))?;
                position += tail;
            }
        }
        let (header, _) = verifier.ok_or_else(|| self.corrupt("head"))?;
        Ok((header, target))
    }

    /// For a target of odd pieces. The chunk at `position` may have begun in place: its sum is carried on, so that
    /// what landed is verified too.
    async fn finish_through_buffer(
        &self,
        range: Range<usize>,
        position: usize,
        mut target: Box<dyn Landing>,
        verifier: Option<(SliceHeader, Verifier)>,
    ) -> Result<(SliceHeader, Box<dyn Landing>), NvmeError> {
        let (header, bytes) = self.read_through_buffer(position..range.end).await?;
        if let Some((_, mut sums)) = verifier {
            sums.feed(&bytes).ok_or_else(|| self.corrupt("payload"))?;
        }
        let (start, end, length) = (range.start as u32, range.end as u32, self.name.slice_length);
        copy_out(&bytes, &mut *target).ok_or(NvmeError::Range { start, end, length })?;
        Ok((header, target))
    }

    /// Reads and verifies the chunks that `range` touches, and gives the range.
    async fn read_through_buffer(&self, range: Range<usize>) -> Result<(SliceHeader, Bytes), NvmeError> {
        let length = self.name.slice_length as usize;
        let chunk_start = range.start / CHUNK_BYTES * CHUNK_BYTES;
        let chunk_end = range.end.next_multiple_of(CHUNK_BYTES).min(length).max(chunk_start);
        let (first, head_bytes, joined) = self.head_pages(chunk_start);
        let body_start = (self.payload + chunk_start) / PAGE_BYTES * PAGE_BYTES;
        let body_end = (self.payload + chunk_end).next_multiple_of(PAGE_BYTES);
        let (head, body, body_at) = if joined {
            let end = body_end.max(first + head_bytes);
            let block = self.fetch_block(first, self.core.read_buffers.take(end - first)).await?;
            (None, block, first)
        } else {
            let head = self.fetch_block(first, self.core.read_buffers.take(head_bytes)).await?;
            let body = self.fetch_block(body_start, self.core.read_buffers.take(body_end - body_start)).await?;
            (Some(head), body, body_start)
        };
        let (header, chunks) = self.decode_head(head.as_deref().unwrap_or(&body))?;
        let at = |offset: usize| self.payload + offset - body_at;
        let mut verifier = Verifier::new(chunks, chunk_start, length);
        let bytes = body.get(at(chunk_start)..at(chunk_end)).ok_or_else(|| self.corrupt("payload"))?;
        verifier.feed(bytes).ok_or_else(|| self.corrupt("payload"))?;
        let range = at(range.start)..at(range.end);
        Ok((header, Bytes { block: body, range }))
    }

    /// Checks that the record is the expected one, whole.
    fn decode_head(&self, pages: &[u8]) -> Result<(SliceHeader, Vec<u32>), NvmeError> {
        let start = self.location.offset as usize % PAGE_BYTES;
        let head = RecordHead::decode(pages.get(start..).unwrap_or_default(), self.epoch);
        let Some(RecordHead::Slice { header, chunks, record_bytes }) = head else {
            return Err(self.corrupt("head"));
        };
        if SliceName::from(&header) != self.name || record_bytes != self.location.length as usize {
            return Err(NvmeError::Stale { location: self.location });
        }
        Ok((header, chunks))
    }

    fn corrupt(&self, what: &'static str) -> NvmeError {
        NvmeError::Corrupt { location: self.location, what }
    }

    async fn fetch_block(&self, offset: usize, block: Block) -> Result<Block, NvmeError> {
        let memory = self.fetch(offset, IoMemory::block(block)).await?;
        memory.into_blocks().pop().ok_or_else(|| self.corrupt("buffer"))
    }

    /// Reads at an offset of the region.
    async fn fetch(&self, offset: usize, memory: IoMemory) -> Result<IoMemory, NvmeError> {
        let (sender, receiver) = oneshot::channel();
        let hold = Arc::clone(&self.hold);
        self.core.engine.submit_from_task(IoRequest {
            operation: Operation::Read,
            offset: self.core.offset_of(self.location.region) + offset as u64,
            memory,
            done: Box::new(move |Completion { result, memory }| {
                drop(sender.send(Fetched { result, memory }));
                // The region may be reused only now that the device has finished with it.
                drop(hold);
            }),
        });
        let Fetched { result, memory } = receiver.await.map_err(|_| gone())?;
        self.core.note_read(&result);
        result.map_err(|source| NvmeError::Io { action: "read from the nvme tier", source })?;
        Ok(memory)
    }
}

fn gone() -> NvmeError {
    NvmeError::OutOfService { reason: "the engine stopped".into() }
}

/// A range of a block.
struct Bytes {
    block: Block,
    range: Range<usize>,
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.block[self.range.clone()]
    }
}

/// Copies all of `bytes` into the target; `None` if it has no room.
fn copy_out(mut bytes: &[u8], target: &mut dyn Landing) -> Option<()> {
    while !bytes.is_empty() {
        let spare = target.spare();
        let count = spare.len().min(bytes.len());
        if count == 0 {
            return None;
        }
        spare[..count].copy_from_slice(&bytes[..count]);
        target.advance(count);
        bytes = &bytes[count..];
    }
    Some(())
}

/// Checks chunk after chunk of bytes that come in pieces.
struct Verifier {
    chunks: Vec<u32>,
    hasher: crc32fast::Hasher,
    position: usize,
    length: usize,
}

impl Verifier {
    /// For bytes from `position` on, the start of a chunk, of a slice of `length`.
    fn new(chunks: Vec<u32>, position: usize, length: usize) -> Self {
        Self { chunks, hasher: crc32fast::Hasher::new(), position, length }
    }

    /// Takes the next bytes; `None` if a chunk that they complete is damaged.
    fn feed(&mut self, mut bytes: &[u8]) -> Option<()> {
        while !bytes.is_empty() {
            let chunk = self.position / CHUNK_BYTES;
            let end = ((chunk + 1) * CHUNK_BYTES).min(self.length);
            let (now, rest) = bytes.split_at((end - self.position).min(bytes.len()));
            self.hasher.update(now);
            self.position += now.len();
            bytes = rest;
            if self.position == end {
                let hasher = std::mem::take(&mut self.hasher);
                if self.chunks.get(chunk) != Some(&hasher.finalize()) {
                    return None;
                }
            }
        }
        Some(())
    }
}
