//! Lending memory to a node on the same host: it may read it, as long as the connection over which it was passed lasts.
//!
//! ```text
//! asks     0            8          24                     32
//!          | "TIDELEND" | id, u128 | length, u64, little- |   with one descriptor, open for reading only
//! answers  | "TIDETOOK" |   or "TIDEFULL": the node takes no more, of this client or in all
//! ```
//!
//! Names in later messages are (id, offset, length). The memory is a sealed memfd, so that it can't shrink under the node's
//! mapping; its bytes may change at any time, so the node checks its own copy. Who connects is the socket file's business.

use std::io::{self, IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::memory::Memory;

const MAGIC: [u8; 8] = *b"TIDELEND";
const HELLO_BYTES: usize = 32;
/// What the node answers once it has mapped the memory.
pub const TAKEN: [u8; 8] = *b"TIDETOOK";
/// What it answers if it has as much as it takes; it ends the connection then.
pub const REFUSED: [u8; 8] = *b"TIDEFULL";
/// A node answers at once, or is not well.
const PATIENCE: Duration = Duration::from_millis(500);

/// Memory that a node may read until this is dropped, by the process that lent it.
#[derive(Debug)]
pub struct Lent {
    connection: UnixStream,
    id: u128,
    process: u32,
}

impl Lent {
    /// Lends `memory`, made by [`Memory::shared`], to the node that listens at `socket`.
    ///
    /// # Errors
    /// `InvalidInput` if no other process can map it; `QuotaExceeded` if the node takes no more; the system's; `InvalidData`
    /// if the node answers something else.
    /// Blocks for at most 0.5 s a step.
    pub fn new(socket: &Path, memory: &Memory) -> io::Result<Self> {
        let file = memory.file().ok_or(io::ErrorKind::InvalidInput)?;
        let read_only = std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        let mut connection = connect(socket)?;
        connection.set_read_timeout(Some(PATIENCE))?;
        let id = crate::stream::random()?;
        let mut hello = [0; HELLO_BYTES];
        hello[..8].copy_from_slice(&MAGIC);
        hello[8..24].copy_from_slice(&id.to_le_bytes());
        hello[24..].copy_from_slice(&memory.len().to_le_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = [read_only.as_fd()];
        if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let sent = rustix::net::sendmsg(&connection, &[IoSlice::new(&hello)], &mut ancillary, SendFlags::NOSIGNAL)?;
        if sent != HELLO_BYTES {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let mut answer = [0; TAKEN.len()];
        connection.read_exact(&mut answer)?;
        match answer {
            TAKEN => Ok(Self { connection, id, process: std::process::id() }),
            REFUSED => Err(io::ErrorKind::QuotaExceeded.into()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Its name in messages to the node.
    #[must_use]
    pub fn id(&self) -> u128 {
        self.id
    }

    /// Whether the node still has it, as of now.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        // Nothing is ever sent on it after the answer: whatever is there to read is its end.
        let events = crate::lend::poll(self.connection.as_fd(), rustix::event::PollFlags::IN, Duration::ZERO);
        events.is_ok_and(|events| events.is_empty())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // A child of this process has the connection, too, and would keep it until its end.
        if self.process == std::process::id() {
            // Fails only if the node ended it first.
            let _ = self.connection.shutdown(Shutdown::Both);
        }
    }
}

/// As `UnixStream::connect`, which waits for as long as the node accepts nobody, its backlog full. What is sent has the same
/// patience.
fn connect(socket: &Path) -> io::Result<UnixStream> {
    let node = SocketAddrUnix::new(socket)?;
    let connection = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&connection, Timeout::Send, Some(PATIENCE))?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&connection, &node))?;
    Ok(connection.into())
}

/// Memory that a client lends, not mapped yet.
#[derive(Debug)]
pub struct LendOffer {
    /// The name that the client chose.
    pub id: u128,
    /// In bytes, as the client says.
    pub length: u64,
    file: OwnedFd,
}

impl LendOffer {
    /// Maps the memory read-only, page by page as it is read.
    ///
    /// # Errors
    /// `InvalidData` if it can shrink or is shorter than was said; those of mmap.
    pub fn map(self) -> io::Result<Memory> {
        Memory::map_lent(self.file, self.length)
    }
}

/// Receives what is being lent over `stream`. Whoever calls answers [`TAKEN`] or [`REFUSED`], and lets go of the memory when
/// the stream ends.
///
/// # Errors
/// `WouldBlock` if nothing came yet; `InvalidData` if what came is no hello; those of recvmsg.
pub fn take_offer(stream: impl AsFd) -> io::Result<LendOffer> {
    let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut hello = [0; HELLO_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(&mut hello)];
    let received = rustix::net::recvmsg(&stream, &mut pieces, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let mut file = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            file = descriptors.last().or(file);
        }
    }
    // A unix socket takes so few bytes whole, so a part is somebody else's.
    if received != HELLO_BYTES || hello[..8] != MAGIC {
        return Err(invalid("no memory is lent here"));
    }
    let number = |range: std::ops::Range<usize>| {
        hello[range].iter().rev().fold(0_u128, |number, &byte| number << 8 | u128::from(byte))
    };
    let length = u64::try_from(number(24..32)).unwrap_or(u64::MAX);
    let file = file.ok_or_else(|| invalid("no descriptor came"))?;
    Ok(LendOffer { id: number(8..24), length, file })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::memory::PeerMapping;

    fn socket() -> (tempfile::TempDir, std::path::PathBuf, UnixListener) {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("memory.sock");
        let listener = UnixListener::bind(&path).expect("socket");
        (folder, path, listener)
    }

    #[test]
    fn lent_memory_is_read_as_it_is_now_until_the_lender_ends() {
        let (_folder, path, listener) = socket();
        let memory = Memory::shared(8192, PeerMapping::ReadOnly).expect("memory");
        let node = std::thread::spawn(move || {
            let mut stream = listener.accept().expect("a client").0;
            let offer = take_offer(&stream).expect("lent");
            let (id, lent) = (offer.id, offer.map().expect("mapped"));
            stream.write_all(&TAKEN).expect("answered");
            (stream, id, lent)
        });
        let lent = Lent::new(&path, &memory).expect("taken");
        let (stream, id, mapped) = node.join().expect("no panic");
        assert!(lent.is_taken());
        assert_eq!((id, mapped.len()), (lent.id(), 8192));
        memory.write_at(8190, b"hi").expect("inside");
        let mut read = [0; 2];
        mapped.read_at(8190, &mut read).expect("inside");
        assert_eq!(&read, b"hi");
        drop(stream);
        assert!(!lent.is_taken());
    }

    #[test]
    fn memory_is_taken_back_though_a_child_has_the_connection() {
        let (_folder, path, listener) = socket();
        let memory = Memory::shared(4096, PeerMapping::ReadOnly).expect("memory");
        std::thread::scope(|scope| {
            let node = scope.spawn(|| {
                let mut stream = listener.accept().expect("a client").0;
                take_offer(&stream).expect("lent");
                stream.write_all(&TAKEN).expect("answered");
                stream
            });
            let lent = Lent::new(&path, &memory).expect("taken");
            let mut node = node.join().expect("no panic");
            node.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
            let forked = || lent.connection.try_clone().expect("its descriptor");
            // Made by another process than drops it.
            drop(Lent { connection: forked(), id: lent.id, process: 0 });
            assert!(lent.is_taken());
            let _of_child = forked();
            drop(lent);
            assert_eq!(node.read(&mut [0]).expect("ended"), 0);
        });
    }

    /// A node that is frozen for long accepts nobody; the kernel keeps some waiting, and whoever comes next once waited for
    /// ever.
    #[test]
    fn a_node_that_accepts_nobody_is_not_waited_for() {
        let (_folder, path, listener) = socket();
        rustix::net::listen(&listener, 0).expect("set");
        let _waiting = UnixStream::connect(&path).expect("room for one");
        let memory = Memory::shared(4096, PeerMapping::ReadOnly).expect("memory");
        assert_eq!(Lent::new(&path, &memory).expect_err("no room").kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn what_is_no_lent_memory_is_refused() {
        let anonymous = Memory::anonymous(4096).expect("memory");
        let (_folder, path, listener) = socket();
        assert_eq!(Lent::new(&path, &anonymous).expect_err("nobody can map it").kind(), io::ErrorKind::InvalidInput);
        for hello in [&b"TIDELEND"[..], b"GET / HTTP/1.1\r\nHost: tidepool\r\n\r\n", &[b'x'; 32]] {
            let mut client = UnixStream::connect(&path).expect("connected");
            client.write_all(hello).expect("sent");
            let stream = listener.accept().expect("a client").0;
            assert_eq!(take_offer(&stream).expect_err("refused").kind(), io::ErrorKind::InvalidData);
        }
        let memory = Memory::shared(4096, PeerMapping::ReadOnly).expect("memory");
        for (answer, error) in [(b"SSH-2.0-", io::ErrorKind::InvalidData), (&REFUSED, io::ErrorKind::QuotaExceeded)] {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut stream = listener.accept().expect("a client").0;
                    take_offer(&stream).expect("lent");
                    stream.write_all(answer).expect("sent");
                });
                assert_eq!(Lent::new(&path, &memory).expect_err("refused").kind(), error);
            });
        }
    }
}
