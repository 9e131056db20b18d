//! Pages that are nobody's any more, and that readers in other processes keep as they are for their views.
//!
//! A reader locks the pages' range of the segment's file, then looks whether the slice's generation is still the same; a retired slice's
//! generation goes up before its pages' locks are asked for, with a full fence between on both sides. So one of the two sees the other.
//! Locks are the system's: they outlive this process, and end with the reader's.

use std::fs::File;
use std::ops::Range;

use tidepool_metadata::directory::{Extent, Layout, PAGE_BYTES};

use super::allocator::{Allocator, Block};

/// Blocks that are free once nobody keeps them.
#[derive(Debug)]
pub(super) struct KeptBlocks {
    blocks: Vec<Block>,
    pages: u32,
}

impl KeptBlocks {
    pub(super) fn new(blocks: Vec<Block>) -> Self {
        let pages = blocks.iter().map(|block| block.extent.pages).sum();
        Self { blocks, pages }
    }

    pub(super) fn pages(&self) -> u32 {
        self.pages
    }

    /// Gives `block` back to `allocator`, now or when nobody keeps it.
    pub(super) fn free(&mut self, block: Block, allocator: &mut Allocator, file: &File, layout: &Layout) {
        if is_kept(file, layout, block.extent) {
            self.pages += block.extent.pages;
            self.blocks.push(block);
        } else {
            allocator.free(block);
        }
    }

    /// Gives back what nobody keeps any more; whether there was any.
    pub(super) fn free_let_go(&mut self, allocator: &mut Allocator, file: &File, layout: &Layout) -> bool {
        let let_go = self.blocks.extract_if(.., |block| !is_kept(file, layout, block.extent));
        let mut pages = 0;
        for block in let_go {
            pages += block.extent.pages;
            allocator.free(block);
        }
        self.pages -= pages;
        pages > 0
    }
}

/// Pages that are not among `taken`, and that readers of an earlier life keep.
pub(super) fn kept_beside(taken: &[Extent], file: &File, layout: &Layout) -> Vec<Extent> {
    let kept = find_kept(file, layout);
    if kept.is_empty() {
        return Vec::new();
    }
    let mut is_kept = vec![false; layout.data_pages as usize];
    kept.into_iter().for_each(|pages| is_kept[pages.start as usize..pages.end as usize].fill(true));
    let range = |extent: &Extent| extent.page as usize..(extent.page + extent.pages) as usize;
    taken.iter().for_each(|extent| is_kept[range(extent)].fill(false));
    let mut page = 0;
    let runs = is_kept.chunk_by(|one, other| one == other).filter_map(|run| {
        let pages = u32::try_from(run.len()).unwrap_or(u32::MAX);
        page += pages;
        run[0].then_some(Extent { page: page - pages, pages })
    });
    runs.collect()
}

/// The pages that readers keep. The system names one that is in the way, not the first: what lies on its both sides is
/// looked at then.
fn find_kept(file: &File, layout: &Layout) -> Vec<Range<u32>> {
    let (mut left, mut found) = (vec![(0, layout.data_pages)], Vec::new());
    while let Some((first, last)) = left.pop() {
        if first >= last {
            continue;
        }
        let place = |page: u32| layout.data_offset + u64::from(page) * PAGE_BYTES as u64;
        let kept = match tidepool_io::kept(file, place(first)..place(last)) {
            Ok(None) => continue,
            Ok(Some(kept)) => kept,
            Err(error) => {
                tracing::warn!(%error, "nobody can tell whether the segment's pages are read: they are left alone");
                0..u64::MAX
            }
        };
        let page = |bytes: u64| u32::try_from(bytes / PAGE_BYTES as u64).unwrap_or(u32::MAX);
        let start = page(kept.start.saturating_sub(layout.data_offset)).max(first);
        let end = page(kept.end.saturating_sub(layout.data_offset).saturating_add(PAGE_BYTES as u64 - 1)).min(last);
        left.extend([(first, start), (end, last)]);
        found.push(start..end);
    }
    found
}

/// Whether a reader keeps any of these pages, or nobody can tell.
fn is_kept(file: &File, layout: &Layout, extent: Extent) -> bool {
    let start = layout.data_offset + u64::from(extent.page) * PAGE_BYTES as u64;
    let kept = tidepool_io::kept(file, start..start + u64::from(extent.pages) * PAGE_BYTES as u64);
    kept.map_or(true, |kept| kept.is_some())
}
