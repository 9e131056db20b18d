//! Which pages are free. Pure: it owns no memory, so that it can be tried on pools that no machine has.
//!
//! Two-level segregated fit: free blocks are kept in bins by size, each power of two divided into 32, with a bitmap
//! over the bins, so that a block that fits is found by two bit scans. Where no single block fits, the largest ones
//! are taken, up to 8 for a slice: this is what fills a segment of mixed sizes.
//!
//! Blocks, free or not, form a list in the order of their addresses; a freed block looks at its two neighbours and
//! merges. The list's nodes lie in one vector and are named by number, which the owner of a block keeps. So memory is
//! proportional to the blocks there are, and nothing is looked up by address. (A tag for each page would be simpler,
//! and takes two cache and TLB misses more for each block: at 1 TiB those tags span 2 GiB.)
//!
//! Invariants: blocks are disjoint and cover the pool; no two neighbours are both free; `free + taken == pages`.
//!
//! Cost: in a large pool every look at another node is a cache miss, and that is what a call costs. So a node knows
//! whether its neighbours are free, and whoever enters or leaves a bin tells them: a store, which nobody waits for.
//!
//! On a crash: nothing is kept; [`Allocator::restore`] is given the blocks that are in use.
//!
//! Source: Masmano and others, TLSF (ECRTS 2004).

use tidepool_metadata::directory::{Extent, MAX_EXTENTS};

use super::blocks::Blocks;

/// Bins for each power of two, as a power of two: blocks in a bin differ by 3 % at most.
const SPLIT_BITS: u32 = 5;
const SPLIT: u32 = 1 << SPLIT_BITS;
/// Sizes below `SPLIT` have bins of their own; then 27 powers of two up to 2^32 pages.
const LEVELS: usize = 33 - SPLIT_BITS as usize;
/// No node.
const NONE: u32 = u32::MAX;
/// How many blocks of a bin whose blocks may or may not fit are looked at before a larger bin is split.
const LOOK_AT: usize = 4;

/// A block that was given out. Whoever has it gives it back, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its pages.
    pub extent: Extent,
    node: u32,
}

/// Aligned so that it lies in one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Node {
    page: u32,
    pages: u32,
    /// Neighbours by address.
    left: u32,
    right: u32,
    /// Neighbours in the bin; of a node that stands for nothing, `next` is the next such.
    next: u32,
    previous: u32,
    is_free: bool,
    left_is_free: bool,
    right_is_free: bool,
}

/// The allocator of one pool.
#[derive(Debug)]
pub struct Allocator {
    nodes: Vec<Node>,
    /// First node that stands for nothing.
    unused: u32,
    bins: Box<[[u32; SPLIT as usize]; LEVELS]>,
    levels: u32,
    splits: [u32; LEVELS],
    pages: u32,
    free_pages: u32,
}

impl Allocator {
    /// A pool of `pages` free pages.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        let mut allocator = Self::empty(pages);
        if pages > 0 {
            let node = allocator.new_node(Node::between(0, pages, NONE, NONE));
            allocator.enter(node);
        }
        allocator
    }

    /// A pool of which `taken` are in use; they are answered as blocks in the same order. `None` if they overlap or
    /// leave the pool.
    #[must_use]
    pub fn restore(pages: u32, taken: &[Extent]) -> Option<(Self, Vec<Block>)> {
        let mut allocator = Self::empty(pages);
        let mut blocks = vec![Block { extent: Extent::default(), node: NONE }; taken.len()];
        let (mut page, mut left) = (0, NONE);
        for index in by_page(pages, taken) {
            let extent = taken[index as usize];
            let end = extent.page.checked_add(extent.pages).filter(|&end| end <= pages && extent.pages > 0)?;
            left = allocator.append_free(page, extent.page.checked_sub(page)?, left);
            let node = allocator.append(Node::between(extent.page, extent.pages, left, NONE));
            blocks[index as usize] = Block { extent, node };
            (page, left) = (end, node);
        }
        allocator.append_free(page, pages - page, left);
        Some((allocator, blocks))
    }

    /// Pages of the pool.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Pages that are free.
    #[must_use]
    pub fn free_pages(&self) -> u32 {
        self.free_pages
    }

    /// Takes `pages` pages in as few blocks as there must be, at most 8; `None`, and nothing is taken, if there are
    /// not that many or they lie too scattered. No pages are no blocks.
    pub fn allocate(&mut self, pages: u32) -> Option<Blocks> {
        let mut blocks = Blocks::default();
        if pages > self.free_pages {
            return None;
        }
        let mut missing = pages;
        while missing > 0 {
            let node = match self.find(missing) {
                Some(node) => node,
                None => self.largest().filter(|_| blocks.len() + 1 < MAX_EXTENTS).unwrap_or(NONE),
            };
            if node == NONE {
                blocks.iter().for_each(|&block| self.free(block));
                return None;
            }
            let block = self.take(node, missing);
            missing -= block.extent.pages;
            blocks.push(block);
        }
        Some(blocks)
    }

    /// Gives a block back.
    ///
    /// # Panics
    /// If it is free already, or of another pool: whoever does that would give one page to two.
    pub fn free(&mut self, block: Block) {
        let mut node = block.node;
        let taken = self.nodes[node as usize];
        assert!(
            !taken.is_free && (taken.page, taken.pages) == (block.extent.page, block.extent.pages),
            "block {block:?} is given back, but the pool has {taken:?}"
        );
        self.free_pages += taken.pages;
        if taken.left_is_free {
            self.leave(taken.left);
            self.absorb_right(taken.left);
            node = taken.left;
        }
        if taken.right_is_free {
            self.leave(taken.right);
            self.absorb_right(node);
        }
        self.enter(node);
    }

    /// Panics if an invariant does not hold. Looks at every block.
    pub fn validate(&self) {
        let some = |node: u32| (node != NONE).then_some(node);
        let unused = std::iter::successors(some(self.unused), |&node| some(self.nodes[node as usize].next)).count();
        let mut in_bins = 0;
        for (level, bins) in self.bins.iter().enumerate() {
            for (split, &first) in bins.iter().enumerate() {
                let marked = self.levels >> level & 1 == 1 && self.splits[level] >> split & 1 == 1;
                assert_eq!(marked, first != NONE, "the bitmap says what the bin {level}, {split} has");
                let mut node = first;
                while node != NONE {
                    let Node { pages, next, is_free, .. } = self.nodes[node as usize];
                    assert!(is_free && bin_of(pages) == (level, split));
                    in_bins += 1;
                    node = next;
                }
            }
        }
        let mut left = NONE;
        let (mut blocks, mut page, mut free_blocks, mut free_pages, mut was_free) = (0, 0, 0, 0, false);
        let is_used = |node: &u32| self.nodes[*node as usize].pages > 0 && self.nodes[*node as usize].left == NONE;
        let mut node = (0..self.nodes.len() as u32).find(is_used).unwrap_or(NONE);
        while node != NONE {
            let block = self.nodes[node as usize];
            assert_eq!((block.page, block.left), (page, left), "blocks touch");
            assert!(!(block.is_free && was_free), "free neighbours are merged");
            assert_eq!(block.left_is_free, was_free);
            let right_is_free = block.right != NONE && self.nodes[block.right as usize].is_free;
            assert_eq!(block.right_is_free, right_is_free);
            free_blocks += usize::from(block.is_free);
            free_pages += if block.is_free { block.pages } else { 0 };
            (left, was_free, page, blocks) = (node, block.is_free, page + block.pages, blocks + 1);
            node = block.right;
        }
        assert_eq!((page, free_pages, in_bins), (self.pages, self.free_pages, free_blocks));
        assert_eq!(blocks + unused, self.nodes.len(), "each node is a block or unused");
    }

    fn empty(pages: u32) -> Self {
        Self {
            nodes: Vec::new(),
            unused: NONE,
            bins: Box::new([[NONE; SPLIT as usize]; LEVELS]),
            levels: 0,
            splits: [0; LEVELS],
            pages,
            free_pages: pages,
        }
    }

    /// A free block of at least `pages` pages. First in the bin whose blocks may be too small by 3 %, for a few; then
    /// the smallest of the bins whose blocks all fit.
    fn find(&self, pages: u32) -> Option<u32> {
        let (level, split) = bin_of(pages);
        let mut node = self.bins[level][split];
        for _ in 0..LOOK_AT {
            if node == NONE {
                break;
            }
            let Node { pages: found, next, .. } = self.nodes[node as usize];
            if found >= pages {
                return Some(node);
            }
            node = next;
        }
        // `split + 1` may be 32: then the shift leaves nothing, as it should.
        let splits = self.splits[level] & u32::MAX.checked_shl(split as u32 + 1).unwrap_or(0);
        if splits != 0 {
            return Some(self.bins[level][splits.trailing_zeros() as usize]);
        }
        let levels = self.levels & u32::MAX.checked_shl(level as u32 + 1).unwrap_or(0);
        let level = (levels != 0).then(|| levels.trailing_zeros() as usize)?;
        Some(self.bins[level][self.splits[level].trailing_zeros() as usize])
    }

    /// One of the largest free blocks.
    fn largest(&self) -> Option<u32> {
        let level = self.levels.checked_ilog2()? as usize;
        Some(self.bins[level][self.splits[level].ilog2() as usize])
    }

    /// Takes at most `pages` pages from the start of a free block; the rest stays free.
    fn take(&mut self, node: u32, pages: u32) -> Block {
        self.leave(node);
        let Node { page, pages: found, right, .. } = self.nodes[node as usize];
        let taken = found.min(pages);
        if taken < found {
            let rest = self.new_node(Node::between(page + taken, found - taken, node, right));
            if right != NONE {
                self.nodes[right as usize].left = rest;
            }
            let block = &mut self.nodes[node as usize];
            (block.pages, block.right) = (taken, rest);
            self.enter(rest);
        }
        self.free_pages -= taken;
        Block { extent: Extent { page, pages: taken }, node }
    }

    /// Tells the neighbours of `node` whether it is free.
    fn tell_neighbours(&mut self, node: u32, is_free: bool) {
        let Node { left, right, .. } = self.nodes[node as usize];
        if left != NONE {
            self.nodes[left as usize].right_is_free = is_free;
        }
        if right != NONE {
            self.nodes[right as usize].left_is_free = is_free;
        }
    }

    /// The block right of `node` becomes part of it.
    fn absorb_right(&mut self, node: u32) {
        let gone = self.nodes[node as usize].right;
        let Node { pages, right, .. } = self.nodes[gone as usize];
        let block = &mut self.nodes[node as usize];
        block.pages += pages;
        block.right = right;
        block.right_is_free = false;
        if right != NONE {
            self.nodes[right as usize].left = node;
        }
        self.nodes[gone as usize] = Node { next: self.unused, ..Node::between(0, 0, NONE, NONE) };
        self.unused = gone;
    }

    /// Enters a block in its bin.
    fn enter(&mut self, node: u32) {
        let (level, split) = bin_of(self.nodes[node as usize].pages);
        let first = std::mem::replace(&mut self.bins[level][split], node);
        if first != NONE {
            self.nodes[first as usize].previous = node;
        }
        let block = &mut self.nodes[node as usize];
        (block.next, block.previous, block.is_free) = (first, NONE, true);
        self.tell_neighbours(node, true);
        self.levels |= 1 << level;
        self.splits[level] |= 1 << split;
    }

    /// Takes a block out of its bin.
    fn leave(&mut self, node: u32) {
        let Node { pages, next, previous, .. } = self.nodes[node as usize];
        self.nodes[node as usize].is_free = false;
        self.tell_neighbours(node, false);
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        if previous != NONE {
            self.nodes[previous as usize].next = next;
            return;
        }
        let (level, split) = bin_of(pages);
        self.bins[level][split] = next;
        if next == NONE {
            self.splits[level] &= !(1 << split);
            self.levels &= !(u32::from(self.splits[level] == 0) << level);
        }
    }

    fn new_node(&mut self, node: Node) -> u32 {
        let number = self.unused;
        if number == NONE {
            self.nodes.push(node);
            return (self.nodes.len() - 1) as u32;
        }
        self.unused = self.nodes[number as usize].next;
        self.nodes[number as usize] = node;
        number
    }

    /// Adds a taken block at the end of the pool.
    fn append(&mut self, node: Node) -> u32 {
        self.free_pages -= node.pages;
        let left = node.left;
        let number = self.new_node(node);
        if left != NONE {
            self.nodes[left as usize].right = number;
            self.nodes[number as usize].left_is_free = self.nodes[left as usize].is_free;
        }
        number
    }

    /// Adds a free block at the end of the pool, unless it would be empty; answers the last block.
    fn append_free(&mut self, page: u32, pages: u32, left: u32) -> u32 {
        if pages == 0 {
            return left;
        }
        let node = self.append(Node::between(page, pages, left, NONE));
        self.free_pages += pages;
        self.enter(node);
        node
    }
}

impl Node {
    fn between(page: u32, pages: u32, left: u32, right: u32) -> Self {
        let (is_free, left_is_free, right_is_free) = (false, false, false);
        Self { page, pages, left, right, next: NONE, previous: NONE, is_free, left_is_free, right_is_free }
    }
}

/// The bin of blocks of `pages` pages, which is not 0.
fn bin_of(pages: u32) -> (usize, usize) {
    if pages < SPLIT {
        return (0, pages as usize);
    }
    let power = pages.ilog2();
    ((power - SPLIT_BITS + 1) as usize, (pages >> (power - SPLIT_BITS) & (SPLIT - 1)) as usize)
}

/// Indices of `taken` in the order of their pages.
fn by_page(pages: u32, taken: &[Extent]) -> Vec<u32> {
    // One place a page is five times as quick as sorting, if not nearly all of them stay empty.
    if taken.len() >= pages as usize / 32 {
        let mut places = vec![NONE; pages as usize];
        let is_free = |(extent, index): (&Extent, u32)| {
            let place = places.get_mut(extent.page as usize);
            place.is_some_and(|place| std::mem::replace(place, index) == NONE)
        };
        if taken.iter().zip(0..).all(is_free) {
            places.retain(|&index| index != NONE);
            return places;
        }
    }
    let mut order: Vec<u32> = (0..).take(taken.len()).collect();
    order.sort_unstable_by_key(|&index| taken[index as usize].page);
    order
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bins_are_in_the_order_of_sizes() {
        let mut last = (0, 0);
        for pages in 1..100_000 {
            let bin = bin_of(pages);
            assert!(bin >= last && bin.1 < SPLIT as usize);
            last = bin;
        }
        assert!(bin_of(u32::MAX).0 < LEVELS);
    }

    #[test]
    fn mixed_sizes_fill_the_pool_in_several_blocks() {
        let mut pool = Allocator::new(100);
        let blocks: Vec<Blocks> = (0..10).map(|_| pool.allocate(10).expect("room")).collect();
        assert!(pool.allocate(1).is_none());
        for blocks in blocks.iter().step_by(2) {
            pool.free(blocks[0]);
        }
        let scattered = pool.allocate(50).expect("five blocks of ten");
        assert_eq!((scattered.len(), pool.free_pages()), (5, 0));
    }

    #[test]
    fn more_than_eight_blocks_are_refused_and_nothing_is_taken() {
        let mut pool = Allocator::new(40);
        let blocks: Vec<Blocks> = (0..40).map(|_| pool.allocate(1).expect("room")).collect();
        blocks.iter().step_by(2).for_each(|blocks| pool.free(blocks[0]));
        assert!(pool.allocate(9).is_none());
        assert_eq!(pool.free_pages(), 20);
        assert_eq!(pool.allocate(8).expect("eight blocks of one").len(), 8);
        pool.validate();
    }

    #[test]
    #[should_panic(expected = "is given back")]
    fn giving_back_twice_is_noticed() {
        let mut pool = Allocator::new(10);
        let block = pool.allocate(3).expect("room")[0];
        pool.free(block);
        pool.free(block);
    }

    /// Space once used for one size could not be used for another, even after everything was removed.
    #[test]
    fn freed_space_serves_every_size() {
        let mut pool = Allocator::new(1 << 16);
        for round in 0..20 {
            for pages in [1, 16_385, 257] {
                let mut blocks = Vec::new();
                let mut taken = 0;
                while let Some(more) = pool.allocate(pages) {
                    taken += pages;
                    blocks.extend(more.iter().copied());
                }
                assert!(taken > pool.pages() - pages, "round {round}: {taken} pages in slices of {pages}");
                blocks.iter().for_each(|&block| pool.free(block));
                pool.validate();
                assert_eq!(pool.free_pages(), pool.pages());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn blocks_are_disjoint_and_accounted_for(
            pages in 1_u32..3000,
            steps in prop::collection::vec((any::<bool>(), 0_u32..400, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut pool = Allocator::new(pages);
            let mut live: Vec<Blocks> = Vec::new();
            for (allocate, size, index) in steps {
                if allocate {
                    let before = pool.free_pages();
                    match pool.allocate(size) {
                        Some(blocks) => {
                            prop_assert_eq!(blocks.iter().map(|block| block.extent.pages).sum::<u32>(), size);
                            live.push(blocks);
                        }
                        None => prop_assert_eq!(pool.free_pages(), before),
                    }
                } else if !live.is_empty() {
                    let blocks = live.swap_remove(index.index(live.len()));
                    blocks.iter().for_each(|&block| pool.free(block));
                }
                pool.validate();
                let mut ends = BTreeMap::new();
                for extent in live.iter().flat_map(|blocks| blocks.iter()).map(|block| block.extent) {
                    prop_assert!(extent.pages > 0);
                    prop_assert!(ends.insert(extent.page, extent.page + extent.pages).is_none());
                }
                prop_assert!(ends.values().zip(ends.keys().skip(1)).all(|(end, start)| end <= start));
                let taken: u32 = ends.iter().map(|(start, end)| end - start).sum();
                prop_assert_eq!(taken + pool.free_pages(), pages);
            }
            // The same pool from its live blocks alone.
            let extents: Vec<Extent> = live.iter().flat_map(|blocks| blocks.iter()).map(|block| block.extent).collect();
            let (mut restored, blocks) = Allocator::restore(pages, &extents).expect("they are disjoint");
            restored.validate();
            prop_assert_eq!(restored.free_pages(), pool.free_pages());
            for block in blocks {
                restored.free(block);
            }
            restored.validate();
            prop_assert_eq!(restored.allocate(pages).map(|blocks| blocks.len()), Some(1));
        }

        #[test]
        fn what_cannot_be_restored_is_refused(extents in prop::collection::vec((0_u32..50, 0_u32..20), 0..8)) {
            let extents: Vec<Extent> = extents.into_iter().map(|(page, pages)| Extent { page, pages }).collect();
            let mut owner = [false; 50];
            let fits = extents.iter().all(|extent| {
                extent.pages > 0
                    && (extent.page..extent.page + extent.pages)
                        .all(|page| owner.get_mut(page as usize).is_some_and(|owned| !std::mem::replace(owned, true)))
            });
            prop_assert_eq!(Allocator::restore(50, &extents).is_some(), fits);
        }
    }
}
