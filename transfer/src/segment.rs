//! Handing a store's segment to processes on the same host, by SCM_RIGHTS over a unix socket (unix(7)).
//!
//! ```text
//! 0            8                      16
//! | "TIDESEG1" | length, u64, little- |   with one descriptor, open for reading only
//! ```
//!
//! Who connects is sent this at once, and the connection ends. Who may connect is the socket file's business.
//!
//! Whoever has a segment may [keep](StoreSegment::keep) ranges of it as they are, by locks of its file, which the store asks for before it gives
//! pages to anyone else: `docs/src/decisions/views.md`.
#![expect(
    unsafe_code,
    reason = "maps ranges of a segment side by side, and gives out their bytes; each block is argued"
)]

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::memory::Memory;

const MAGIC: [u8; 8] = *b"TIDESEG1";
const HELLO_BYTES: usize = 16;
/// A node answers at once, or is not well.
const PATIENCE: Duration = Duration::from_millis(200);

/// Sends `segment`, which has `length` bytes and is open for reading only, to whoever is at the other end of `stream`.
///
/// # Errors
/// Those of sendmsg; `WriteZero` if the socket does not take 16 bytes at once.
pub fn give_segment(stream: impl AsFd, segment: BorrowedFd<'_>, length: u64) -> io::Result<()> {
    let mut hello = [0; HELLO_BYTES];
    hello[..8].copy_from_slice(&MAGIC);
    hello[8..].copy_from_slice(&length.to_le_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [segment];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let sent = rustix::net::sendmsg(stream, &[IoSlice::new(&hello)], &mut ancillary, SendFlags::NOSIGNAL)?;
    if sent == HELLO_BYTES { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// The segment that is handed out at `socket`, mapped.
///
/// # Errors
/// The system's; `InvalidData` if what comes is no segment. Blocks for at most 0.2 s a step.
pub fn map_segment(socket: &Path) -> io::Result<StoreSegment> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut hello = [0; HELLO_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(&mut hello)];
    let received = rustix::net::recvmsg(&stream, &mut pieces, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let mut segment = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            segment = descriptors.last().or(segment);
        }
    }
    stream.read_exact(&mut hello[received..])?;
    let (magic, length) = hello.split_at(8);
    let length = length.try_into().map_or(0, u64::from_le_bytes);
    match segment {
        Some(segment) if *magic == MAGIC => StoreSegment::new(segment.into(), length),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "no segment came")),
    }
}

/// A store's segment on this host, mapped read-only.
#[derive(Debug)]
pub struct StoreSegment {
    memory: Memory,
    file: File,
}

impl StoreSegment {
    /// A segment whose file is open for reading.
    ///
    /// # Errors
    /// The system's; `InvalidData` if it has fewer bytes than `length`.
    pub fn new(file: File, length: u64) -> io::Result<Self> {
        Ok(Self { memory: Memory::map_store(&file, length)?, file })
    }

    /// All of it.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Keeps `pieces` as they are, and gives their bytes, one behind the other. Each is where it starts, in bytes from the segment's start, and
    /// how many bytes it has; none is empty, and all but the last end with a page of [`PIECE_BYTES`]. `None` if what they were
    /// thought to be `has_changed` by the time they are kept: they may be another's then.
    ///
    /// # Errors
    /// `InvalidInput` for pieces that are not so; the system's, if it can't lock or map them: pieces on huge pages, for
    /// example, can only be given if they lie together.
    pub fn keep(&self, pieces: &[(u64, u64)], has_changed: impl FnOnce() -> bool) -> io::Result<Option<KeptBytes>> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        // An open file of its own: its locks end with it, and with nothing else.
        let lock = File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?;
        let (mut runs, mut length): (Vec<(u64, u64)>, u64) = (Vec::new(), 0);
        for &(start, bytes) in pieces {
            self.memory.address(start, bytes).map_err(|_| invalid())?;
            if bytes == 0 || !length.is_multiple_of(PIECE_BYTES) || !start.is_multiple_of(PIECE_BYTES) {
                return Err(invalid());
            }
            length += bytes;
            match runs.last_mut() {
                Some((last, so_far)) if *last + *so_far == start => *so_far += bytes,
                _ => runs.push((start, bytes)),
            }
        }
        for &(start, bytes) in &runs {
            tidepool_io::keep(&lock, start..start + bytes)?;
        }
        // Behind the locks: the store changes what it has to, then asks for them.
        fence(Ordering::SeqCst);
        if has_changed() {
            return Ok(None);
        }
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let (base, place) = match runs[..] {
            [] => (NonNull::dangling(), Place::Nowhere),
            [(start, bytes)] => {
                let base = self.memory.address(start, bytes).map_err(|_| invalid())?;
                (NonNull::new(base).ok_or_else(invalid)?, Place::Segment(self.memory.clone()))
            }
            _ => {
                let mapped = Mapped::side_by_side(&self.file, &runs, length)?;
                (mapped.0.cast(), Place::Apart(mapped))
            }
        };
        Ok(Some(KeptBytes { base, length, _place: place, _lock: lock }))
    }
}

/// Pieces of a segment that are mapped side by side begin at multiples of this, and so do the next ones.
pub const PIECE_BYTES: u64 = 4096;

/// Bytes of a store's segment, which nobody changes while this lives, whatever becomes of the store. A child process that was forked
/// keeps them, too.
#[derive(Debug)]
pub struct KeptBytes {
    base: NonNull<u8>,
    length: usize,
    _place: Place,
    _lock: File,
}

/// Keeps the bytes mapped.
#[derive(Debug)]
#[expect(dead_code, reason = "held for their drops")]
enum Place {
    Nowhere,
    Segment(Memory),
    Apart(Mapped),
}

// SAFETY: `base` points to `length` bytes that are mapped until `_place` is dropped, wherever that happens, and that are only read.
unsafe impl Send for KeptBytes {}
// SAFETY: as above.
unsafe impl Sync for KeptBytes {}

impl Deref for KeptBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are mapped while `self` lives. Nobody writes them: other processes but the store have the segment read-only,
        // and the store gives no page to anyone before its lock is gone, if what the pages were had not changed when it was taken (`keep`).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) }
    }
}

/// A range of addresses, unmapped when this is dropped.
#[derive(Debug)]
struct Mapped(NonNull<std::ffi::c_void>, usize);

// SAFETY: unmapping may be done by any thread.
unsafe impl Send for Mapped {}
// SAFETY: it is a number.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps `runs` of `file`, of `length` bytes together, one behind the other.
    fn side_by_side(file: &File, runs: &[(u64, u64)], length: usize) -> io::Result<Self> {
        // SAFETY: new addresses, chosen by the system.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        let mapped = Self(NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?, length);
        let mut at = 0;
        for &(start, bytes) in runs {
            let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
            // SAFETY: the runs have `length` bytes together, so that each lies in the addresses reserved above, which nobody else has; it begins
            // with a page. The last page is mapped whole, as the reservation is.
            unsafe {
                let place = base.byte_add(at);
                mmap(place, bytes, ProtFlags::READ, MapFlags::SHARED | MapFlags::FIXED, file, start)
            }?;
            at += bytes;
        }
        Ok(mapped)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `side_by_side`, and nobody has an address in it any more.
        let unmapped = unsafe { munmap(self.0.as_ptr(), self.1) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Has `answer` given to the one who connects.
    fn mapped(answer: impl FnOnce(UnixStream) + Send + 'static) -> io::Result<StoreSegment> {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("segment.sock");
        let listener = UnixListener::bind(&path).expect("socket");
        let node = std::thread::spawn(move || answer(listener.accept().expect("a client").0));
        let segment = map_segment(&path);
        node.join().expect("no panic");
        segment
    }

    fn segment(length: usize) -> File {
        let mut file = tempfile::tempfile().expect("file");
        file.write_all(&vec![7; length]).expect("written");
        file
    }

    #[test]
    fn a_segment_is_handed_over_and_read() {
        let segment =
            mapped(|stream| give_segment(&stream, segment(8192).as_fd(), 8192).expect("sent")).expect("mapped");
        let memory = segment.memory();
        let mut byte = [0];
        memory.read_at(8191, &mut byte).expect("inside");
        assert_eq!((byte, memory.words(2).len(), memory.words(1 << 20).len()), ([7], 2, 1024));
        assert!(memory.read_at(8192, &mut byte).is_err());
    }

    #[test]
    fn what_is_no_segment_is_refused() {
        let shorter = mapped(|stream| give_segment(&stream, segment(4096).as_fd(), 8192).expect("sent"));
        assert_eq!(shorter.expect_err("shorter than it says").kind(), io::ErrorKind::InvalidData);
        let none = mapped(|mut stream| stream.write_all(b"TIDESEG1\0\x10\0\0\0\0\0\0").expect("sent"));
        assert_eq!(none.expect_err("no descriptor").kind(), io::ErrorKind::InvalidData);
        assert!(mapped(|mut stream| stream.write_all(b"SSH-2.0").expect("sent")).is_err());
        assert!(mapped(drop).is_err());
    }

    #[test]
    fn pieces_are_kept_side_by_side_until_they_are_let_go() {
        use std::os::unix::fs::FileExt as _;
        let path = tempfile::NamedTempFile::new().expect("file").into_temp_path();
        let file = File::options().read(true).write(true).open(&path).expect("opened");
        let bytes: Vec<u8> = (0..65536_u32).map(|place| (place / 4096 * 7 + place % 251) as u8).collect();
        file.write_all_at(&bytes, 0).expect("written");
        let segment = StoreSegment::new(File::open(&path).expect("opened"), 65536).expect("mapped");
        let kept = |pieces: &[(u64, u64)]| segment.keep(pieces, || false);
        let together = kept(&[(4096, 8192), (12288, 100)]).expect("kept").expect("not changed");
        assert_eq!(together[..], bytes[4096..12388]);
        let apart = kept(&[(40960, 4096), (8192, 4096), (20480, 5000)]).expect("kept").expect("not changed");
        let expected = [&bytes[40960..45056], &bytes[8192..12288], &bytes[20480..25480]].concat();
        assert_eq!(apart[..], expected);
        assert!(kept(&[]).expect("nothing").expect("not changed").is_empty());
        let is_kept = |page: u64| tidepool_io::kept(&file, page * 4096..page * 4096 + 1).expect("asked").is_some();
        assert_eq!((0..16).filter(|&page| is_kept(page)).collect::<Vec<_>>(), [1, 2, 3, 5, 6, 10]);
        drop((segment, apart));
        assert_eq!((0..16).filter(|&page| is_kept(page)).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(together[..], bytes[4096..12388], "without the segment, too");
        drop(together);
        assert_eq!((0..16).find(|&page| is_kept(page)), None);
    }

    #[test]
    fn what_can_not_be_kept_is_refused() {
        let segment = StoreSegment::new(segment(65536), 65536).expect("mapped");
        assert!(segment.keep(&[(0, 4096)], || true).expect("locked").is_none());
        for pieces in [&[(0, 0)][..], &[(100, 5)], &[(0, 100), (4096, 5)], &[(61440, 4097)], &[(u64::MAX - 4095, 4096)]]
        {
            assert_eq!(
                segment.keep(pieces, || false).expect_err("wrong").kind(),
                io::ErrorKind::InvalidInput,
                "{pieces:?}"
            );
        }
    }
}
