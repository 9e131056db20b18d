//! [`MemoryTier`]: opens the segment, hands out room, keeps the accounts.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use tidepool_metadata::directory::{Extents, Layout, PAGE_BYTES, SlotId, SlotPromise, Writer, read_slice};
use tidepool_metadata::{CHUNK_BYTES, Incarnation, NodeId, SliceHeader};

use super::allocator::Allocator;
use super::arena::{Arena, Pages};
use super::blocks::Blocks;
use super::buffer::{SliceBuffer, stored_bytes};
use super::error::{MemoryError, NoSpace};
use super::kept::{KeptBlocks, kept_beside};
use super::recovered::RecoveredSlices;
use super::segment::{self, Segment};

/// Pages that are populated at a time: 2 MiB. Meanwhile nobody else in the process can map memory.
const POPULATED_PAGES: u32 = 512;

/// The slot of a slice that was sealed after the segment was closed.
const NO_SLOT: SlotId = SlotId(u32::MAX);

/// Settings of the DRAM tier.
#[derive(Clone, Debug)]
pub struct MemoryConfig {
    /// Where the segment's file lies: a tmpfs or hugetlbfs. `None`: a hugetlbfs with enough room, else `/dev/shm`.
    pub folder: Option<PathBuf>,
    /// Name of the file.
    pub name: String,
    /// The node's data folder: noted in the segment, for people who wonder whose it is.
    pub owner: Option<PathBuf>,
    /// Bytes of data, rounded down to pages.
    pub capacity_bytes: u64,
    /// Keep the segment when the process ends. False: anonymous memory.
    pub survive_restart: bool,
    /// Whose segment it is.
    pub node: NodeId,
    /// This life of the node.
    pub incarnation: Incarnation,
}

/// Accounts in bytes: `free + used + reserved == capacity`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// All.
    pub capacity: u64,
    /// Of sealed slices, and what is kept.
    pub used: u64,
    /// What readers in other processes keep of slices that are gone: free as soon as they let go of it.
    pub kept: u64,
    /// Of slices being filled.
    pub reserved: u64,
    /// Of nobody.
    pub free: u64,
}

/// The DRAM tier of one node.
#[derive(Debug)]
pub struct MemoryTier {
    arena: Arena,
    layout: Layout,
    file: std::fs::File,
    path: Option<PathBuf>,
    state: Mutex<State>,
    /// The segment belongs to the next life: nothing is written to its directory any more.
    closed: AtomicBool,
}

#[derive(Debug)]
struct State {
    allocator: Allocator,
    kept: KeptBlocks,
    writer: Writer,
    reserved_pages: u32,
    backed_slots: u32,
}

impl MemoryTier {
    /// Opens the segment, or makes it. What an earlier life left in it and is whole comes back, not yet verified.
    ///
    /// # Errors
    /// See [`MemoryError`].
    pub fn open(config: &MemoryConfig) -> Result<(Arc<Self>, RecoveredSlices), MemoryError> {
        let capacity = config.capacity_bytes;
        let data_pages = u32::try_from(capacity / PAGE_BYTES as u64).ok().filter(|&pages| pages > 0);
        let data_pages = data_pages.ok_or(MemoryError::Capacity { capacity })?;
        let layout = Layout::new(config.node, data_pages, None);
        let Segment { file, path, arena } = segment::open(config, &layout)?;
        let damaged = |source| MemoryError::Layout { path: path.clone().unwrap_or_default(), source };
        let (writer, found) = Writer::recover(arena.words(), config.incarnation).map_err(damaged)?;
        // What is not taken was retired just now, before this life asks who reads it.
        fence(Ordering::SeqCst);
        let mut extents = found.extents;
        let of_slices = extents.len();
        extents.extend(kept_beside(&extents, &file, &layout));
        let (allocator, mut blocks) =
            Allocator::restore(data_pages, &extents).expect("recovered extents do not overlap");
        let kept = KeptBlocks::new(blocks.split_off(of_slices));
        Writer::set_kept_pages(arena.words(), kept.pages());
        let owner = config.owner.as_deref().map(|owner| owner.as_os_str().as_bytes());
        Layout::set_owner(arena.words(), owner.unwrap_or_default());
        let backed_slots = writer.slots_needed().max(segment::initially_backed(&layout));
        let state = Mutex::new(State { allocator, kept, writer, reserved_pages: 0, backed_slots });
        let tier = Self { arena, layout, file, path, state, closed: AtomicBool::new(false) };
        let tier = Arc::new(tier);
        let recovered = RecoveredSlices::new(Arc::clone(&tier), found.slots, blocks);
        Ok((tier, recovered))
    }

    /// Takes room for a slice of `length` bytes, in 1 to 8 extents (none for length 0), and for its entry under a key of
    /// `key_bytes`. O(1).
    ///
    /// # Errors
    /// [`NoSpace`].
    pub fn reserve(self: &Arc<Self>, length: u32, key_bytes: usize) -> Result<SliceBuffer, NoSpace> {
        let no_space = NoSpace { length };
        let pages = u32::try_from(stored_bytes(length as usize).div_ceil(PAGE_BYTES)).map_err(|_| no_space)?;
        let mut state = self.state.lock();
        let promise = state.writer.reserve(key_bytes).map_err(|_| no_space)?;
        let mut taken = state.allocator.allocate(pages);
        if taken.is_none() && self.free_let_go(&mut state) {
            taken = state.allocator.allocate(pages);
        }
        let Some(blocks) = taken else {
            state.writer.unreserve(promise);
            return Err(no_space);
        };
        let State { writer, backed_slots, .. } = &mut *state;
        let backed = segment::back_slots(&self.file, &self.layout, backed_slots, writer.slots_needed());
        state.reserved_pages += pages;
        drop(state);
        if let Err(error) = backed {
            tracing::error!(%error, "the directory of the segment can't grow: the machine is out of memory");
            self.give_back(blocks, promise);
            return Err(no_space);
        }
        Ok(SliceBuffer::new(Pages::of_new_blocks(self, blocks), promise, length))
    }

    /// Gives out again what readers in other processes have let go of; whether there was any.
    pub fn free_kept(&self) -> bool {
        self.free_let_go(&mut self.state.lock())
    }

    fn free_let_go(&self, state: &mut State) -> bool {
        if state.kept.pages() == 0 || self.closed.load(Ordering::Acquire) {
            return false;
        }
        let State { kept, allocator, .. } = state;
        let freed = kept.free_let_go(allocator, &self.file, &self.layout);
        Writer::set_kept_pages(self.arena.words(), kept.pages());
        freed
    }

    /// The segment's file, opened for reading only, for processes that may map it; and its length in bytes.
    ///
    /// # Errors
    /// The system's.
    pub fn descriptor(&self) -> io::Result<(OwnedFd, u64)> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = open(format!("/proc/self/fd/{}", self.file.as_raw_fd()), flags, Mode::empty())?;
        Ok((file, self.layout.file_bytes))
    }

    /// The segment's file as this process has it, which may write, and its length in bytes.
    ///
    /// # Errors
    /// The system's.
    pub fn file(&self) -> io::Result<(std::fs::File, u64)> {
        Ok((self.file.try_clone()?, self.layout.file_bytes))
    }

    /// The accounts.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let state = self.state.lock();
        let bytes = |pages: u32| u64::from(pages) * PAGE_BYTES as u64;
        let capacity = bytes(state.allocator.pages());
        let (free, reserved) = (bytes(state.allocator.free_pages()), bytes(state.reserved_pages));
        Usage { capacity, used: capacity - free - reserved, kept: bytes(state.kept.pages()), reserved, free }
    }

    /// Length of the largest object that fits an empty tier when it is cut into slices of `slice_bytes`, in bytes.
    #[must_use]
    pub fn largest_object_bytes(&self, slice_bytes: u32) -> u64 {
        let slice_pages = stored_bytes(slice_bytes as usize).div_ceil(PAGE_BYTES) as u64;
        let pages = u64::from(self.layout.data_pages);
        let rest = (pages % slice_pages) * PAGE_BYTES as u64;
        let trailer = if rest > CHUNK_BYTES as u64 { 4 * rest.div_ceil(CHUNK_BYTES as u64) } else { 0 };
        pages / slice_pages * u64::from(slice_bytes) + rest.saturating_sub(trailer)
    }

    /// Bytes that an object of `length` bytes takes when it is cut into slices of `slice_bytes`: whole pages.
    #[must_use]
    pub fn footprint_bytes(length: u64, slice_bytes: u32) -> u64 {
        let pages =
            |length: u64| stored_bytes(usize::try_from(length).unwrap_or(usize::MAX)).div_ceil(PAGE_BYTES) as u64;
        let slice_bytes = u64::from(slice_bytes);
        (length / slice_bytes * pages(slice_bytes) + pages(length % slice_bytes)) * PAGE_BYTES as u64
    }

    /// Has the kernel map all pages now, in a thread of its own, so that puts do not pay for the first touch.
    pub fn prefault(self: &Arc<Self>) {
        let tier = Arc::downgrade(self);
        let populate = move || {
            let mut page = 0;
            while let Some(tier) = tier.upgrade().filter(|tier| !tier.closed.load(Ordering::Acquire)) {
                if page >= tier.layout.data_pages {
                    return;
                }
                if let Err(error) = tier.arena.populate(page..page.saturating_add(POPULATED_PAGES)) {
                    tracing::debug!(%error, "pages are not populated beforehand");
                    return;
                }
                page = page.saturating_add(POPULATED_PAGES);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("dram-prefault".into()).spawn(populate) {
            tracing::debug!(%error, "pages are not populated beforehand");
        }
    }

    /// Lets other processes read the directory for `duration` from now on.
    pub fn renew(&self, duration: Duration) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let until =
            Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32).saturating_add(duration);
        // Under the lock: not after the end of this life's writing.
        let _state = self.state.lock();
        if !self.closed.load(Ordering::Acquire) {
            Writer::set_valid_until(self.arena.words(), u64::try_from(until.as_nanos()).unwrap_or(u64::MAX));
        }
    }

    /// Ends this life's writing: with `keep`, entries stay in the segment for the next start whatever is dropped from
    /// now on; without, the segment's file is removed.
    pub fn close(&self, keep: bool) {
        let state = self.state.lock();
        Writer::set_valid_until(self.arena.words(), 0);
        self.closed.store(true, Ordering::Release);
        drop(state);
        if !keep {
            Writer::set_retired(self.arena.words());
            if let Some(path) = &self.path {
                let _gone = std::fs::remove_file(path);
            }
        }
        // The next life may have it now, whatever still holds slices of this one.
        if let Err(error) = flock(&self.file, FlockOperation::Unlock) {
            tracing::debug!(%error, "the segment's lock is let go with its file");
        }
    }

    /// The pages of a slice that was recovered.
    pub(super) fn recovered_pages(self: &Arc<Self>, blocks: Blocks) -> Pages {
        Pages::of_new_blocks(self, blocks)
    }

    /// The segment, which stays the same.
    pub(super) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(super) fn header(&self, slot: SlotId) -> SliceHeader {
        read_slice(&self.layout, self.arena.words(), slot).expect("the slot of a slice that lives is whole").0
    }

    /// Where the generation of a slice that lives stands in the segment, and what it is.
    pub(super) fn generation(&self, slot: SlotId) -> (u64, u64) {
        let word = self.layout.generation(slot);
        (word as u64 * 8, self.arena.words()[word].load(Ordering::Relaxed))
    }

    /// Enters a filled slice in the directory.
    pub(super) fn seal(&self, promise: SlotPromise, header: &SliceHeader, pages: &Pages) -> SlotId {
        let mut extents = Extents::default();
        let mut count = 0;
        for block in pages.blocks().iter() {
            let fits = extents.push(block.extent);
            assert!(fits, "at most 8 extents");
            count += block.extent.pages;
        }
        let mut state = self.state.lock();
        state.reserved_pages -= count;
        if self.closed.load(Ordering::Acquire) {
            // A put that comes too late: it is never proposed, and its bytes go with the process.
            return NO_SLOT;
        }
        state.writer.seal(self.arena.words(), promise, header, &extents)
    }

    pub(super) fn complete(&self, slot: SlotId, commit_index: u64) {
        let mut state = self.state.lock();
        if !self.closed.load(Ordering::Acquire) {
            state.writer.complete(self.arena.words(), slot, commit_index);
        }
    }

    /// Takes a slice out of the directory, then gives back its pages, as far as no reader keeps them.
    pub(super) fn retire(&self, slot: SlotId, blocks: Blocks) {
        let mut state = self.state.lock();
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        state.writer.retire(self.arena.words(), slot);
        // The generation is up before locks are asked for: a reader locks, then looks at it (`kept`).
        fence(Ordering::SeqCst);
        let State { kept, allocator, .. } = &mut *state;
        let before = kept.pages();
        blocks.iter().for_each(|&block| kept.free(block, allocator, &self.file, &self.layout));
        if kept.pages() != before {
            Writer::set_kept_pages(self.arena.words(), kept.pages());
        }
    }

    /// Gives back what a buffer had that was never sealed.
    pub(super) fn give_back(&self, blocks: Blocks, promise: SlotPromise) {
        let mut state = self.state.lock();
        state.writer.unreserve(promise);
        for &block in blocks.iter() {
            state.reserved_pages -= block.extent.pages;
            state.allocator.free(block);
        }
    }
}
