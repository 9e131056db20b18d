//! The mapping of a segment, and the pages that lie in it.
//!
//! The directory's words are atomics that other processes may read at any time. The data pages are plain memory: of
//! each page there is one [`Pages`] that owns it, by `&mut` to write and by `&` to read, as with any Rust value. Other
//! processes map the file read-only, so nobody writes pages that this process has not lent out. They may read pages
//! while this process writes them; they find out by generation and checksum, and it is their side that does the racy
//! copy.
#![expect(unsafe_code, reason = "the mapped segment: words shared with other processes, pages owned by Pages")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use memmap2::MmapRaw;
use rustix::mm::{Advice, madvise};
use tidepool_metadata::directory::{Extent, Layout, PAGE_BYTES};

use super::blocks::Blocks;
use super::tier::MemoryTier;

/// A mapped segment. Its tier keeps it, and whoever has pages keeps the tier.
#[derive(Debug)]
pub(super) struct Arena {
    map: MmapRaw,
    words: usize,
    data_offset: usize,
    data_pages: u32,
}

impl Arena {
    /// Maps `file`, which has the layout's length, and leaves it out of core dumps.
    pub(super) fn map(file: &File, layout: &Layout) -> io::Result<Self> {
        let map = MmapRaw::map_raw(file)?;
        let sound = map.len() as u64 >= layout.file_bytes
            && layout.words() as u64 * 8 <= layout.data_offset
            && layout.data_offset + u64::from(layout.data_pages) * PAGE_BYTES as u64 <= layout.file_bytes
            && (map.as_ptr() as usize).is_multiple_of(PAGE_BYTES)
            && layout.data_offset.is_multiple_of(PAGE_BYTES as u64);
        if !sound {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is shorter than its layout says"));
        }
        // SAFETY: the range is exactly the mapping just made; the advice changes nothing but core dumps.
        unsafe { madvise(map.as_mut_ptr().cast(), map.len(), Advice::LinuxDontDump) }?;
        let data_offset = usize::try_from(layout.data_offset).map_err(io::Error::other)?;
        Ok(Self { map, words: layout.words(), data_offset, data_pages: layout.data_pages })
    }

    /// The directory.
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping starts page-aligned and has `words` words before the data (checked in `map`); it lives as
        // long as `self`; all access to these bytes, here and in other processes, is by atomics. Words beyond those
        // that are backed by the file's reserved part are not touched (the writer is asked first).
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), self.words) }
    }

    /// Has the kernel map `range` of the data, in pages, writable now rather than at the first touch.
    pub(super) fn populate(&self, range: Range<u32>) -> io::Result<()> {
        let end = range.end.min(self.data_pages);
        let Some(pages) = end.checked_sub(range.start).filter(|&pages| pages > 0) else { return Ok(()) };
        let start = self.data_offset + range.start as usize * PAGE_BYTES;
        // SAFETY: within the mapping; populating changes no byte.
        let populated = unsafe {
            let start = self.map.as_mut_ptr().add(start);
            madvise(start.cast(), pages as usize * PAGE_BYTES, Advice::LinuxPopulateRead)
        };
        Ok(populated?)
    }

    /// Has the kernel map the directory's first `bytes`, which are backed, rather than page by page at the first touch.
    pub(super) fn populate_directory(&self, bytes: u64) -> io::Result<()> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).min(self.words * 8);
        // SAFETY: the directory lies at the start of the mapping; populating changes no byte.
        Ok(unsafe { madvise(self.map.as_mut_ptr().cast(), bytes, Advice::LinuxPopulateRead) }?)
    }

    fn check(&self, extent: Extent) {
        let end = extent.page.checked_add(extent.pages);
        assert!(
            end.is_some_and(|end| end <= self.data_pages),
            "{extent:?} leaves the arena of {} pages",
            self.data_pages
        );
    }

    fn start_of(&self, extent: Extent) -> *mut u8 {
        // SAFETY: `Pages::of_new_blocks` checked that the extent lies in the data, and the data lies in the mapping.
        unsafe { self.map.as_mut_ptr().add(self.data_offset + extent.page as usize * PAGE_BYTES) }
    }
}

/// Pages that belong to whoever has this, in the order in which bytes fill them.
#[derive(Debug)]
pub(super) struct Pages {
    tier: Arc<MemoryTier>,
    blocks: Blocks,
}

impl Pages {
    /// Pages of blocks that `super::tier` just took from its allocator, or with which it was restored. What a caller must
    /// keep: the allocator is this tier's, and each block is here once until it is given back.
    pub(super) fn of_new_blocks(tier: &Arc<MemoryTier>, blocks: Blocks) -> Self {
        blocks.iter().for_each(|block| tier.arena().check(block.extent));
        Self { tier: Arc::clone(tier), blocks }
    }

    /// The tier that they are of.
    pub(super) fn tier(&self) -> &Arc<MemoryTier> {
        &self.tier
    }

    /// The same pages under a new owner; this one has none any more.
    pub(super) fn take(&mut self) -> Self {
        Self { tier: Arc::clone(&self.tier), blocks: self.take_blocks() }
    }

    /// The blocks, to be given back.
    pub(super) fn take_blocks(&mut self) -> Blocks {
        std::mem::take(&mut self.blocks)
    }

    /// The blocks.
    pub(super) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Bytes of all pages.
    pub(super) fn capacity(&self) -> usize {
        self.blocks.iter().map(|block| block.extent.pages as usize * PAGE_BYTES).sum()
    }

    /// Where each of them begins, from the segment's start, and its bytes.
    pub(super) fn extents(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let data = self.tier.arena().data_offset as u64;
        let at = |page: u32| u64::from(page) * PAGE_BYTES as u64;
        self.blocks.iter().map(move |block| (data + at(block.extent.page), at(block.extent.pages)))
    }

    /// The bytes of `range`, in pieces that lie together.
    pub(super) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        assert!(range.start <= range.end && range.end <= self.capacity(), "{range:?} leaves the pages");
        let mut start = 0;
        self.blocks.iter().filter_map(move |block| {
            let bytes = block.extent.pages as usize * PAGE_BYTES;
            let (from, to) = (range.start.max(start), range.end.min(start + bytes));
            let offset = from.saturating_sub(start);
            start += bytes;
            // SAFETY: within the extent, which is within the mapping, which the tier keeps; the pages are ours and `&self` keeps writers
            // (`spare`) away; tmpfs pages are initialised, to zero if by nobody else.
            (from < to).then(|| unsafe {
                std::slice::from_raw_parts(self.tier.arena().start_of(block.extent).add(offset), to - from)
            })
        })
    }

    /// The memory from byte `position` on, as far as it lies together.
    pub(super) fn spare(&mut self, position: usize) -> &mut [u8] {
        let mut start = 0;
        for block in self.blocks.iter() {
            let bytes = block.extent.pages as usize * PAGE_BYTES;
            if position < start + bytes {
                let offset = position - start;
                // SAFETY: within the extent and so within the mapping, which the tier keeps; the pages are ours, `&mut self` is exclusive.
                return unsafe {
                    std::slice::from_raw_parts_mut(self.tier.arena().start_of(block.extent).add(offset), bytes - offset)
                };
            }
            start += bytes;
        }
        &mut []
    }
}
