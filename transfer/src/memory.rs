//! Memory that can be registered: who owns it, and how bytes get in and out.
//!
//! A [`Memory`] owns its bytes, or something that owns them, and frees them with its last clone. Whatever moves bytes
//! (a copying thread, the kernel during a system call) holds a clone, so no byte is freed under it: unregistering,
//! cancelling and dropping only withdraw the promise to go on.
//!
//! Other processes and the kernel may read and write these bytes at any time. So they are never seen through Rust
//! references, only moved by `memmove` and system calls; what arrives under somebody's concurrent write is unspecified
//! bytes, as it would be over RDMA.
#![expect(unsafe_code, reason = "maps memory and copies bytes that others may change; each block is argued")]

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::error::SliceError;
use crate::slice::check_range;

/// Bytes that can be registered. Clones are the same bytes.
#[derive(Clone)]
pub struct Memory(Arc<Inner>);

struct Inner {
    base: NonNull<u8>,
    length: usize,
    writable: bool,
    /// The memfd or file behind the bytes, if other processes can map it.
    file: Option<File>,
    /// A dma-buf of the same bytes, and where in it they start.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "for RDMA devices only"))]
    dmabuf: Option<(OwnedFd, u64)>,
    _owner: Owner,
}

/// Keeps the bytes; dropped with the last clone.
#[expect(dead_code, reason = "held for their drops")]
enum Owner {
    Mapping(MmapRaw),
    Other(Box<dyn Any + Send + Sync>),
}

// SAFETY: `base` points to `length` bytes that live until `_owner` is dropped, wherever that happens; the owner is
// `Send + Sync`. All access goes through `memmove` or the kernel, which allow concurrent use (module doc).
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// Whether peers on this host may ever map a shared memory writable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerMapping {
    /// Never: sealed, so that not even a process of the same user can. Peers' writes, if registered for them, go by
    /// messages.
    ReadOnly,
    /// If the memory is registered for remote writes.
    Writable,
}

impl Memory {
    /// Anonymous memory, zeroed and faulted in. Peers reach it by messages only.
    ///
    /// # Errors
    /// Those of mmap.
    pub fn anonymous(length: usize) -> io::Result<Self> {
        Self::mapped(MmapOptions::new().len(length).populate().map_anon()?.into(), true, None)
    }

    /// Memory that peers on this host can map: a memfd, sealed against shrinking and growing, zeroed and faulted in.
    ///
    /// # Errors
    /// Those of memfd_create, fallocate, mmap and fcntl.
    pub fn shared(length: usize, peers: PeerMapping) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("tidepool-memory", flags)?);
        // Reserved first: without pages, a first touch could end in SIGBUS, here or in a peer.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, length as u64)?;
        let mapping = MmapOptions::new().len(length).populate().map_raw(&file)?;
        let mut seals = SealFlags::SHRINK | SealFlags::GROW;
        if peers == PeerMapping::ReadOnly {
            seals |= SealFlags::FUTURE_WRITE;
        }
        rustix::fs::fcntl_add_seals(&file, seals | SealFlags::SEAL)?;
        Self::mapped(mapping, true, Some(file))
    }

    /// Maps a peer's memfd, after checking that it can't shrink under the mapping and holds `length` bytes.
    ///
    /// # Errors
    /// `InvalidData` if it can shrink or is too short; those of fcntl, fstat and mmap.
    pub(crate) fn map_foreign(file: OwnedFd, length: u64, writable: bool) -> io::Result<Self> {
        let length = Self::check_foreign(&file, length)?;
        let options = MmapOptions::new().len(length).populate().clone();
        let mapping = if writable { options.map_raw(&file)? } else { options.map_raw_read_only(&file)? };
        Self::mapped(mapping, writable, None)
    }

    /// The same, read-only, page by page as they are read: it may be much, and little of it used.
    ///
    /// # Errors
    /// As [`Memory::map_foreign`].
    pub(crate) fn map_lent(file: OwnedFd, length: u64) -> io::Result<Self> {
        let length = Self::check_foreign(&file, length)?;
        Self::mapped(MmapOptions::new().len(length).map_raw_read_only(&file)?, false, None)
    }

    fn check_foreign(file: &OwnedFd, length: u64) -> io::Result<usize> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        // A file that takes no seals (tmpfs, disk) could be truncated by its owner, which is SIGBUS for who maps it.
        if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return Err(invalid("memory can shrink"));
        }
        if u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0) < length {
            return Err(invalid("memory is shorter than its region"));
        }
        usize::try_from(length).map_err(|_| invalid("memory is longer than the address space"))
    }

    /// Maps `length` bytes of a store's segment, read-only, page by page as they are read. Unlike a peer, a store is
    /// trusted to keep its file's size: no seal says so, because a segment has a name and outlives its process.
    ///
    /// # Errors
    /// `InvalidData` if the file is shorter; those of fstat and mmap.
    pub(crate) fn map_store(file: &File, length: u64) -> io::Result<Self> {
        let length = Self::check_store(file, length)?;
        Self::mapped(MmapOptions::new().len(length).map_raw_read_only(file)?, false, None)
    }

    /// The same in the store's own process, for devices that register it for peers to read. No request writes it. The file is
    /// open for writing and so is the mapping: Linux before 6.2 lets no device read pages that are mapped read-only and shared
    /// (its change "RDMA/umem: remove FOLL_FORCE usage").
    ///
    /// # Errors
    /// `InvalidData` if the file is shorter; those of fstat and mmap.
    pub fn of_own_store(file: &File, length: u64) -> io::Result<Self> {
        let length = Self::check_store(file, length)?;
        Self::mapped(MmapOptions::new().len(length).map_raw(file)?, false, None)
    }

    fn check_store(file: &File, length: u64) -> io::Result<usize> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        if file.metadata()?.len() < length {
            return Err(invalid("the segment is shorter than was said"));
        }
        usize::try_from(length).map_err(|_| invalid("the segment is longer than the address space"))
    }

    /// The first `count` words, which others may be storing: to be loaded only, unless they are this process's own. As many as there are, if that is fewer.
    #[must_use]
    pub fn words(&self, count: usize) -> &[AtomicU64] {
        let count = count.min(self.0.length / 8);
        // SAFETY: `count` words inside the memory, which lives while `self` does, aligned because mappings begin at pages
        // (asserted); all who use them do so atomically, in this process and in others. Loads are fine in read-only
        // memory (core::sync::atomic, "Atomic accesses to read-only memory").
        unsafe { std::slice::from_raw_parts(aligned(self.0.base.as_ptr()).cast(), count) }
    }

    /// Memory of somebody else, kept by `owner` and moved by nobody while `owner` lives.
    ///
    /// The owner is dropped when the memory is unregistered *and* the last transfer and system call on it has ended.
    ///
    /// # Safety
    /// `base` points to `length` bytes that can be read, and written unless `writable` is false, until `owner` is
    /// dropped, and that nothing in this process uses through references while peers or requests may write them.
    pub unsafe fn owned_by(
        base: NonNull<u8>,
        length: usize,
        writable: bool,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self(Arc::new(Inner { base, length, writable, file: None, dmabuf: None, _owner: Owner::Other(owner) }))
    }

    /// The same for memory of a device, that is mapped at `base` and exported as a dma-buf in which it starts at `offset`:
    /// RDMA devices that can register it by that, without pinning pages.
    ///
    /// # Safety
    /// As for [`Memory::owned_by`], and the dma-buf has the same bytes.
    pub unsafe fn exported_by(
        base: NonNull<u8>,
        length: usize,
        writable: bool,
        owner: Box<dyn Any + Send + Sync>,
        dmabuf: OwnedFd,
        offset: u64,
    ) -> Self {
        let dmabuf = Some((dmabuf, offset));
        Self(Arc::new(Inner { base, length, writable, file: None, dmabuf, _owner: Owner::Other(owner) }))
    }

    fn mapped(mapping: MmapRaw, writable: bool, file: Option<File>) -> io::Result<Self> {
        let base = NonNull::new(mapping.as_mut_ptr()).ok_or(io::ErrorKind::InvalidInput)?;
        let length = mapping.len();
        Ok(Self(Arc::new(Inner { base, length, writable, file, dmabuf: None, _owner: Owner::Mapping(mapping) })))
    }

    /// Of the first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.0.base
    }

    /// Bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "memory of no bytes can't be registered")]
    pub fn len(&self) -> u64 {
        self.0.length as u64
    }

    /// Whether requests may write it.
    pub(crate) fn is_writable(&self) -> bool {
        self.0.writable
    }

    /// The memfd that peers can map.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.0.file.as_ref().map(AsFd::as_fd)
    }

    /// A dma-buf of the same bytes, and where in it they start.
    #[cfg(feature = "rdma")]
    pub(crate) fn dmabuf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.0.dmabuf.as_ref().map(|(file, offset)| (file.as_fd(), *offset))
    }

    /// Whether both are the same memory, so that one clone keeps it for both.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`SliceError::OutOfRange`].
    ///
    /// # Panics
    /// If the memory is mapped read-only.
    pub fn write_at(&self, offset: u64, source: &[u8]) -> Result<(), SliceError> {
        assert!(self.0.writable, "memory is mapped read-only");
        let target = self.address(offset, source.len() as u64)?;
        // SAFETY: `address` checked that the range lies in the memory, which lives while `self` does and is writable;
        // `source` is readable. `copy` allows overlap, should the caller have a slice of the same bytes.
        unsafe { std::ptr::copy(source.as_ptr(), target, source.len()) };
        Ok(())
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// [`SliceError::OutOfRange`].
    pub fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<(), SliceError> {
        let source = self.address(offset, target.len() as u64)?;
        // SAFETY: `address` checked that the range lies in the memory, which lives while `self` does; `target` is ours.
        unsafe { std::ptr::copy(source, target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    /// Copies `length` bytes out, behind those that `target` has.
    ///
    /// # Errors
    /// [`SliceError::OutOfRange`].
    pub fn append_to(&self, offset: u64, length: usize, target: &mut Vec<u8>) -> Result<(), SliceError> {
        let source = self.address(offset, length as u64)?;
        target.reserve(length);
        // SAFETY: `address` checked that the source lies in the memory, which lives while `self` does; `target` has room
        // for `length` bytes behind its own, and they are written before its length says so. A vector's spare room is
        // nobody else's, so the two don't overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(source, target.as_mut_ptr().add(target.len()), length);
            target.set_len(target.len() + length);
        }
        Ok(())
    }

    /// Copies `length` bytes from one memory to another, which may be the same.
    ///
    /// # Errors
    /// [`SliceError::OutOfRange`] of either.
    ///
    /// # Panics
    /// If the target is mapped read-only.
    #[inline]
    pub(crate) fn copy(from: (&Self, u64), to: (&Self, u64), length: u64) -> Result<(), SliceError> {
        assert!(to.0.0.writable, "memory is mapped read-only");
        let (source, target) = (from.0.address(from.1, length)?, to.0.address(to.1, length)?);
        // SAFETY: both ranges were checked and lie in memory that lives while the borrowed `Memory` does; the target
        // is mapped writable. `copy` allows overlap.
        unsafe { std::ptr::copy(source, target, length as usize) };
        Ok(())
    }

    /// A range for an I/O engine, which keeps the memory as long as the system uses it. Only memory that is writable may be
    /// filled by that.
    ///
    /// # Errors
    /// [`SliceError::OutOfRange`].
    pub(crate) fn range(&self, offset: u64, length: u64) -> Result<MemoryRange, SliceError> {
        self.address(offset, length)?;
        Ok(MemoryRange { memory: self.clone(), offset, length })
    }

    /// Reads an aligned word that others may be storing. 0 outside.
    pub(crate) fn load_word(&self, index: usize) -> u64 {
        let Ok(address) = self.address(index as u64 * 8, 8) else { return 0 };
        // SAFETY: 8 bytes inside the mapping, aligned because mappings begin at pages (asserted); all who use it do so
        // atomically, in this process and in others.
        unsafe { AtomicU64::from_ptr(aligned(address)) }.load(Ordering::Acquire)
    }

    /// Stores an aligned word that others may be reading. Nothing outside.
    pub(crate) fn store_word(&self, index: usize, value: u64) {
        assert!(self.0.writable, "memory is mapped read-only");
        let Ok(address) = self.address(index as u64 * 8, 8) else { return };
        // SAFETY: as for `load_word`, and the mapping is writable.
        unsafe { AtomicU64::from_ptr(aligned(address)) }.store(value, Ordering::Release);
    }

    /// Address of the first of `length` bytes at `offset`, all inside; valid while `self` or a clone lives.
    #[inline]
    pub(crate) fn address(&self, offset: u64, length: u64) -> Result<*mut u8, SliceError> {
        check_range(offset, length, self.len())?;
        // SAFETY: `offset <= length of the memory`, so the sum stays in the same allocation or one past its end.
        Ok(unsafe { self.0.base.as_ptr().add(offset as usize) })
    }
}

/// A part of a memory, which lives as long as this.
pub(crate) struct MemoryRange {
    memory: Memory,
    offset: u64,
    length: u64,
}

// SAFETY: the range was checked when it was made and lies in memory that `memory` keeps at its place; whoever has it
// filled saw to it that it is writable (`Memory::range`).
unsafe impl tidepool_io::Outside for MemoryRange {
    fn range(&self) -> (NonNull<u8>, usize) {
        // SAFETY: `offset <= length of the memory`, so the sum stays in the same allocation or one past its end.
        (unsafe { self.memory.0.base.add(self.offset as usize) }, self.length as usize)
    }
}

fn aligned(address: *mut u8) -> *mut u64 {
    assert!(address.addr().is_multiple_of(8), "word at {address:?} is not aligned");
    address.cast()
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("bytes", &self.0.length).field("shared", &self.0.file.is_some()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_in_and_out_within_bounds() {
        let memory = Memory::anonymous(4096).expect("memory");
        memory.write_at(4090, b"abcdef").expect("inside");
        let mut read = [0; 6];
        memory.read_at(4090, &mut read).expect("inside");
        assert_eq!(&read, b"abcdef");
        assert!(memory.write_at(4091, b"abcdef").is_err());
        assert!(memory.read_at(u64::MAX, &mut read).is_err());
        assert!(Memory::copy((&memory, 0), (&memory, 4095), 2).is_err());
    }

    #[test]
    fn a_foreign_mapping_sees_the_owners_bytes_and_cant_write_them() {
        let memory = Memory::shared(8192, PeerMapping::ReadOnly).expect("memory");
        memory.write_at(4096, b"hello").expect("inside");
        let file = memory.file().expect("a memfd").try_clone_to_owned().expect("dup");
        assert!(Memory::map_foreign(file.try_clone().expect("dup"), 8192, true).is_err(), "sealed against writers");
        assert!(Memory::map_foreign(file.try_clone().expect("dup"), 8193, false).is_err(), "too long");
        let mapped = Memory::map_foreign(file, 8192, false).expect("mapped");
        let mut read = [0; 5];
        mapped.read_at(4096, &mut read).expect("inside");
        assert_eq!(&read, b"hello");
        assert!(!mapped.is_writable());
    }

    #[test]
    fn memory_that_can_shrink_is_not_mapped() {
        let file = rustix::fs::memfd_create("loose", MemfdFlags::ALLOW_SEALING).expect("memfd");
        rustix::fs::ftruncate(&file, 4096).expect("grown");
        assert!(Memory::map_foreign(file, 4096, false).is_err());
        let file = tempfile::tempfile().expect("file");
        file.set_len(4096).expect("grown");
        assert!(Memory::map_foreign(file.into(), 4096, false).is_err());
    }

    #[test]
    fn the_owner_lives_as_long_as_the_last_clone() {
        let mut bytes = vec![7_u8; 64].into_boxed_slice();
        let base = NonNull::new(bytes.as_mut_ptr()).expect("not null");
        let owner = Arc::new(bytes);
        // SAFETY: the boxed bytes stay where they are while `owner` lives, and only this test touches them.
        let memory = unsafe { Memory::owned_by(base, 64, true, Box::new(Arc::clone(&owner))) };
        let clone = memory.clone();
        drop(memory);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(clone);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
