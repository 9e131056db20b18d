//! Handing a store's segment to processes on the same host, by SCM_RIGHTS over a unix socket (unix(7)).
//!
//! ```text
//! 0            8                      16
//! | "TIDESEG1" | length, u64, little- |   with one descriptor, open for reading only
//! ```
//!
//! Who connects is sent this at once, and the connection ends. Who may connect is the socket file's business.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

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

/// Maps the segment that is handed out at `socket`.
///
/// # Errors
/// The system's; `InvalidData` if what comes is no segment. Blocks for at most 0.2 s a step.
pub fn map_segment(socket: &Path) -> io::Result<Memory> {
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
        Some(segment) if *magic == MAGIC => Memory::map_store(&File::from(segment), length),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "no segment came")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Has `answer` given to the one who connects.
    fn mapped(answer: impl FnOnce(UnixStream) + Send + 'static) -> io::Result<Memory> {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("segment.sock");
        let listener = UnixListener::bind(&path).expect("socket");
        let node = std::thread::spawn(move || answer(listener.accept().expect("a client").0));
        let memory = map_segment(&path);
        node.join().expect("no panic");
        memory
    }

    fn segment(length: usize) -> File {
        let mut file = tempfile::tempfile().expect("file");
        file.write_all(&vec![7; length]).expect("written");
        file
    }

    #[test]
    fn a_segment_is_handed_over_and_read() {
        let memory =
            mapped(|stream| give_segment(&stream, segment(8192).as_fd(), 8192).expect("sent")).expect("mapped");
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
}
