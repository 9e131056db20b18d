//! Memory that I/O reads and fills: page-aligned, and owned by one operation at a time.
//!
//! An [`Allocation`] is a span of pages that lives as long as anyone refers to it. A [`Block`] is the only access to
//! its range of an allocation; blocks split but never overlap, so one part can be on its way to the disk while
//! another is being filled. `lent` counts the blocks of an allocation; it can be lent whole again only at zero.
//!
//! Unsafe here: blocks give slices of raw memory (exclusive by the rule above); a [`Landing`] is kept as a raw
//! pointer while the kernel writes through pointers derived from it, since moving a `Box` would assert that it is
//! the only way to its content; memory [`Outside`] is only ever a range for the kernel, never a slice.
#![expect(unsafe_code, reason = "owns raw page-aligned memory and lends it out in disjoint blocks")]

use std::alloc::{self, Layout};
use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Unit of direct I/O: what every NVMe device and file system takes, whatever less they may ask for.
pub const PAGE_BYTES: usize = 4096;

/// Memory of this size or more lies in huge pages where the kernel has some: a device then gets a few long ranges
/// instead of one a page. On a virtual disk, each range of a request can cost as much as reading 20 KiB.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Pages of memory, zeroed when made.
#[derive(Debug)]
pub struct Allocation {
    base: NonNull<u8>,
    length: usize,
    owner: Owner,
    lent: AtomicUsize,
    /// Number under which an engine has registered this memory, plus one.
    registered: AtomicUsize,
}

/// Whose the memory of an allocation is.
#[derive(Debug)]
enum Owner {
    /// Ours, from the allocator.
    Heap(Layout),
    /// Ours, in a mapping that begins here and is this long.
    Mapping(NonNull<u8>, usize),
    /// A part of another's that is there only to be divided.
    Part { _whole: Arc<Allocation> },
}

// SAFETY: the memory is reached only through blocks, which are exclusive for their range; the rest is atomic.
unsafe impl Send for Allocation {}
// SAFETY: as for `Send`.
unsafe impl Sync for Allocation {}

impl Allocation {
    /// Allocates at least `length` bytes, rounded up to pages.
    ///
    /// # Panics
    /// If `length` is 0 or the address space is used up.
    #[must_use]
    pub fn new(length: usize) -> Arc<Self> {
        assert!(length > 0, "an allocation has at least one page");
        let length = length.next_multiple_of(PAGE_BYTES);
        let layout =
            Layout::from_size_align(length, PAGE_BYTES).expect("length of an I/O buffer fits the address space");
        if length >= HUGE_PAGE_BYTES
            && let Some((base, owner)) = map_huge(length)
        {
            return Arc::new(Self::of(base, length, owner));
        }
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { alloc::handle_alloc_error(layout) };
        Arc::new(Self::of(base, length, Owner::Heap(layout)))
    }

    fn of(base: NonNull<u8>, length: usize, owner: Owner) -> Self {
        Self { base, length, owner, lent: AtomicUsize::new(0), registered: AtomicUsize::new(0) }
    }

    /// Allocates `count` times `length` bytes, beside each other; they are freed together.
    ///
    /// # Panics
    /// As [`Self::new`], and if `length` is not whole pages.
    #[must_use]
    fn several(length: usize, count: usize) -> Vec<Arc<Self>> {
        assert!(length.is_multiple_of(PAGE_BYTES), "{length} bytes are not whole pages");
        let whole = Self::new(length * count);
        let part = |index| {
            // SAFETY: `index < count`, so the part lies in the whole, which is as long as all of them.
            let base = unsafe { whole.base.add(index * length) };
            Arc::new(Self::of(base, length, Owner::Part { _whole: Arc::clone(&whole) }))
        };
        (0..count).map(part).collect()
    }

    /// The whole memory as one block; `None` while blocks of it live.
    #[must_use]
    pub fn lend(self: &Arc<Self>) -> Option<Block> {
        // Acquire pairs with the release in `Block::drop`: what the last holder wrote is over.
        self.lent.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(Block { allocation: Arc::clone(self), start: 0, length: self.length })
    }

    /// Size in bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn set_registered(&self, index: usize) {
        self.registered.store(index + 1, Ordering::Release);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match self.owner {
            // SAFETY: allocated in `new` with this layout; no block lives, since each holds an `Arc` of this.
            Owner::Heap(layout) => unsafe { alloc::dealloc(self.base.as_ptr(), layout) },
            // SAFETY: mapped by `map_huge`, and no block lives, as above. A failure would leave it mapped.
            Owner::Mapping(start, length) => drop(unsafe { munmap(start.as_ptr().cast(), length) }),
            Owner::Part { .. } => {}
        }
    }
}

/// Maps `length` zero bytes that begin at a huge page's boundary; `None` if the system has no room.
fn map_huge(length: usize) -> Option<(NonNull<u8>, Owner)> {
    let mapped = length.checked_add(HUGE_PAGE_BYTES)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new anonymous mapping at a place of the kernel's choice touches no memory that is in use.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, flags) }.ok()?;
    let start = NonNull::new(start.cast::<u8>())?;
    // SAFETY: less than one huge page further, and the mapping is longer than `length` by one.
    let base = unsafe { start.add(start.as_ptr().align_offset(HUGE_PAGE_BYTES)) };
    // Small pages do too, so a kernel that refuses is fine.
    // SAFETY: the range lies in the mapping, and the advice changes no content.
    let _ = unsafe { madvise(base.as_ptr().cast(), length, Advice::LinuxHugepage) };
    Some((base, Owner::Mapping(start, mapped)))
}

/// Exclusive access to a range of an [`Allocation`].
#[derive(Debug)]
pub struct Block {
    allocation: Arc<Allocation>,
    start: usize,
    length: usize,
}

impl Block {
    /// A block of memory of its own of at least `length` bytes.
    #[must_use]
    pub fn new(length: usize) -> Self {
        let allocation = Allocation::new(length.max(1));
        allocation.lent.store(1, Ordering::Relaxed);
        Self { start: 0, length: allocation.length(), allocation }
    }

    /// Cuts off and returns the first `count` bytes; `self` keeps the rest.
    ///
    /// # Panics
    /// If the block is shorter.
    #[must_use]
    pub fn split_to(&mut self, count: usize) -> Self {
        assert!(count <= self.length, "split at {count} of a block of {} bytes", self.length);
        self.allocation.lent.fetch_add(1, Ordering::Relaxed);
        let front = Self { allocation: Arc::clone(&self.allocation), start: self.start, length: count };
        self.start += count;
        self.length -= count;
        front
    }

    /// Shortens the block to `length` bytes.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Registered number of the memory, if it has one.
    pub(crate) fn registered(&self) -> Option<u16> {
        let index = self.allocation.registered.load(Ordering::Acquire).checked_sub(1)?;
        u16::try_from(index).ok()
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies in the allocation (`lend`, `split_to`), which lives as long as the block, is
        // initialised, and is reached by no one else.
        unsafe { std::slice::from_raw_parts(self.allocation.base.as_ptr().add(self.start), self.length) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes it exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.allocation.base.as_ptr().add(self.start), self.length) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.allocation.lent.fetch_sub(1, Ordering::Release);
    }
}

/// Memory of someone else in which a read can land: it takes bytes in order, like a cursor.
///
/// [`IoMemory`] owns it while the kernel writes, so the implementor sees no call meanwhile. Bytes land before they
/// are verified: `advance` tells which of them count.
pub trait Landing: Any + Send {
    /// Where the next bytes go: the contiguous free space, which may be shorter than all that is still to come.
    /// Gives the same memory until `advance` is called.
    fn spare(&mut self) -> &mut [u8];

    /// The first `count` bytes of `spare` hold verified data.
    fn advance(&mut self, count: usize);
}

/// A landing that is not touched by anyone while a pointer into it is with the kernel.
struct HeldLanding(NonNull<dyn Landing>);

// SAFETY: `Landing: Send`, and this owns it.
unsafe impl Send for HeldLanding {}

impl HeldLanding {
    fn new(landing: Box<dyn Landing>) -> Self {
        Self(NonNull::from(Box::leak(landing)))
    }

    fn get(&mut self) -> &mut dyn Landing {
        // SAFETY: made from a box in `new` and still owned; `&mut self` makes the access exclusive.
        unsafe { self.0.as_mut() }
    }

    fn into_box(self) -> Box<dyn Landing> {
        let pointer = self.0.as_ptr();
        std::mem::forget(self);
        // SAFETY: made from a box in `new`; `forget` gave the ownership to us.
        unsafe { Box::from_raw(pointer) }
    }
}

impl Drop for HeldLanding {
    fn drop(&mut self) {
        // SAFETY: made from a box in `new`, and dropped only here.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// Memory of someone else that is read and filled in place, and that others may read and write meanwhile: it is never
/// seen through references.
///
/// # Safety
/// [`Outside::range`] always gives the same range, which can be read, and written if an operation that fills memory is to
/// have it, until this is dropped.
pub unsafe trait Outside: Send {
    /// Where it begins, and its bytes.
    fn range(&self) -> (NonNull<u8>, usize);
}

enum Part {
    Block(Block),
    Landing(HeldLanding, usize),
    Outside(Box<dyn Outside>),
}

impl Part {
    fn range(&mut self) -> (NonNull<u8>, usize) {
        let of_slice = |bytes: &mut [u8]| (NonNull::from(&mut *bytes).cast(), bytes.len());
        match self {
            Self::Block(block) => of_slice(block),
            Self::Landing(landing, length) => of_slice(&mut landing.get().spare()[..*length]),
            Self::Outside(outside) => outside.range(),
        }
    }
}

/// The memory of one operation: up to three parts that follow each other in the file.
#[derive(Default)]
pub struct IoMemory {
    parts: Vec<Part>,
}

impl std::fmt::Debug for IoMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IoMemory").field("parts", &self.parts.len()).finish_non_exhaustive()
    }
}

impl IoMemory {
    /// No memory: for a sync.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// One block.
    #[must_use]
    pub fn block(block: Block) -> Self {
        Self { parts: vec![Part::Block(block)] }
    }

    /// A block before, `length` bytes of the spare space of `landing`, and a block after; either block may be missing.
    ///
    /// # Panics
    /// If `landing` has less space.
    #[must_use]
    pub fn landing(before: Option<Block>, mut landing: Box<dyn Landing>, length: usize, after: Option<Block>) -> Self {
        assert!(landing.spare().len() >= length, "landing of {length} bytes has {}", landing.spare().len());
        let mut parts = Vec::with_capacity(3);
        parts.extend(before.map(Part::Block));
        parts.push(Part::Landing(HeldLanding::new(landing), length));
        parts.extend(after.map(Part::Block));
        Self { parts }
    }

    /// Someone else's memory.
    #[must_use]
    pub fn outside(memory: Box<dyn Outside>) -> Self {
        Self { parts: vec![Part::Outside(memory)] }
    }

    /// Length of all parts in bytes.
    pub fn length(&mut self) -> usize {
        self.parts.iter_mut().map(|part| part.range().1).sum()
    }

    /// The blocks, in order.
    #[must_use]
    pub fn into_blocks(self) -> Vec<Block> {
        self.into_parts().0
    }

    /// The blocks, in order, and the landing.
    #[must_use]
    pub fn into_parts(self) -> (Vec<Block>, Option<Box<dyn Landing>>) {
        let (mut blocks, mut landing) = (Vec::new(), None);
        for part in self.parts {
            match part {
                Part::Block(block) => blocks.push(block),
                Part::Landing(held, _) => landing = Some(held.into_box()),
                Part::Outside(_) => {}
            }
        }
        (blocks, landing)
    }

    /// The parts behind the first `skip` bytes, for the kernel to read or fill; valid while `self` is neither moved from
    /// nor dropped.
    pub(crate) fn vectors(&mut self, skip: usize) -> Vec<libc::iovec> {
        let vector =
            |(base, length): (NonNull<u8>, usize)| libc::iovec { iov_base: base.as_ptr().cast(), iov_len: length };
        self.rest(skip).map(vector).collect()
    }

    /// Copies all bytes out.
    #[cfg(any(test, feature = "faults"))]
    pub(crate) fn bytes(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.length()];
        let mut position = 0;
        for (base, length) in self.rest(0) {
            let target = &mut bytes[position..position + length];
            // SAFETY: a part's range can be read (`Part::range`), and `target` is as long and our own.
            unsafe { ptr::copy(base.as_ptr(), target.as_mut_ptr(), length) };
            position += length;
        }
        bytes
    }

    /// Fills all parts from `bytes`, which are as many.
    #[cfg(any(test, feature = "faults"))]
    pub(crate) fn fill(&mut self, bytes: &[u8]) {
        let mut position = 0;
        for (base, length) in self.rest(0) {
            let source = &bytes[position..position + length];
            // SAFETY: whoever has memory filled gives ranges that can be written (`Part::range`); `source` is as long.
            unsafe { ptr::copy(source.as_ptr(), base.as_ptr(), length) };
            position += length;
        }
    }

    /// If all the memory is one registered block: its registered number.
    pub(crate) fn registered(&self) -> Option<u16> {
        match self.parts.as_slice() {
            [Part::Block(block)] => block.registered(),
            _ => None,
        }
    }

    fn rest(&mut self, mut skip: usize) -> impl Iterator<Item = (NonNull<u8>, usize)> {
        self.parts.iter_mut().filter_map(move |part| {
            let (base, length) = part.range();
            let here = skip.min(length);
            skip -= here;
            // SAFETY: `here < length` where it is used, so the sum stays in the part's range.
            (here < length).then(|| (unsafe { base.add(here) }, length - here))
        })
    }
}

/// Keeps buffers for reads, by size, so that a read needn't take fresh pages from the system.
///
/// Bound: at most `retained_limit` bytes are kept; what is taken beyond is freed after use.
#[derive(Debug)]
pub struct BufferPool {
    classes: Mutex<Classes>,
    retained_limit: usize,
}

#[derive(Debug, Default)]
struct Classes {
    by_power: Vec<Vec<Arc<Allocation>>>,
    retained: usize,
}

impl BufferPool {
    /// A pool that keeps up to `retained_limit` bytes.
    #[must_use]
    pub fn new(retained_limit: usize) -> Self {
        Self { classes: Mutex::default(), retained_limit }
    }

    /// A block of exactly `length` bytes, rounded up to pages; its content is whatever was there.
    pub fn take(&self, length: usize) -> Block {
        let length = length.max(1).next_multiple_of(PAGE_BYTES);
        let size = length.next_power_of_two();
        let class = (size / PAGE_BYTES).trailing_zeros() as usize;
        let mut classes = self.classes.lock();
        if classes.by_power.len() <= class {
            classes.by_power.resize_with(class + 1, Vec::new);
        }
        let mut block = match classes.by_power[class].iter().find_map(Allocation::lend) {
            Some(block) => block,
            None => classes.grow(class, size, self.retained_limit).unwrap_or_else(|| Block::new(size)),
        };
        drop(classes);
        block.truncate(length);
        block
    }
}

impl Classes {
    /// Keeps new buffers of `size` and lends one; `None` if that would be beyond the limit.
    fn grow(&mut self, class: usize, size: usize, limit: usize) -> Option<Block> {
        let room = limit.saturating_sub(self.retained);
        // As many as fill a huge page, if there is room for that.
        let count = if room >= HUGE_PAGE_BYTES { (HUGE_PAGE_BYTES / size).max(1) } else { 1 };
        if room < count * size {
            return None;
        }
        let buffers = Allocation::several(size, count);
        let block = buffers.first().and_then(Allocation::lend);
        self.retained += count * size;
        self.by_power[class].extend(buffers);
        block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_disjoint_and_whole_again_when_all_are_gone() {
        let allocation = Allocation::new(3 * PAGE_BYTES);
        let mut rest = allocation.lend().expect("free");
        assert!(allocation.lend().is_none());
        let mut front = rest.split_to(PAGE_BYTES);
        front.fill(1);
        rest.fill(2);
        assert!(front.iter().all(|&byte| byte == 1) && rest.iter().all(|&byte| byte == 2));
        drop(rest);
        assert!(allocation.lend().is_none());
        drop(front);
        assert_eq!(allocation.lend().expect("free").len(), 3 * PAGE_BYTES);
    }

    #[test]
    fn pool_reuses_what_came_back_and_keeps_no_more_than_its_limit() {
        let pool = BufferPool::new(2 * PAGE_BYTES);
        let first = pool.take(100);
        assert_eq!(first.len(), PAGE_BYTES);
        let address = first.as_ptr();
        drop(first);
        assert_eq!(pool.take(PAGE_BYTES).as_ptr(), address);
        let many: Vec<_> = (0..5).map(|_| pool.take(1)).collect();
        drop(many);
        assert!(pool.classes.lock().retained <= 2 * PAGE_BYTES);
    }
}
