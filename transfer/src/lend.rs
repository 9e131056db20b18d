//! Registered memory lent to the kernel: the gather and scatter lists of system calls.
//!
//! A [`Lending`] is one message on its way: bytes of its own first (the *control* bytes: headers, items), then ranges
//! of registered memory. It holds a clone of each memory, so what the kernel reads or writes lives until the lending is
//! begun anew or dropped. It says how far it got; the caller repeats until nothing is left.
#![expect(unsafe_code, reason = "passes addresses of registered memory to sendmsg and recvmsg; each block is argued")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, c_int, iovec};

use crate::error::SliceError;
use crate::memory::Memory;

/// Most ranges in one system call (UIO_MAXIOV of the kernel).
const RANGES_PER_CALL: usize = 1024;
/// Bytes that nobody wants any more are received into this many, again and again.
const SINK_BYTES: usize = 256 << 10;

/// Whether a call may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// No: `WouldBlock` if nothing can be moved now.
    No,
    /// Until something moved, at most for the socket's timeout.
    Some,
    /// Receiving: until everything is there, at most for the socket's timeout; less may be.
    All,
}

/// One message on its way.
#[derive(Default)]
pub(crate) struct Lending {
    control: Vec<u8>,
    /// Entry 0 stands for `control`; its address is set at each call.
    ranges: Vec<iovec>,
    owners: Vec<Memory>,
    sink: Box<[u8]>,
    /// First range with bytes left.
    next: usize,
    /// Bytes of it that are done.
    done_of_next: usize,
    left: u64,
    done: u64,
}

// SAFETY: the addresses in `ranges` point into memory kept by `owners` (`Memory` is `Send + Sync`) or into `sink` and
// `control`, which move with the lending without moving on the heap; nothing is bound to a thread.
unsafe impl Send for Lending {}

impl Lending {
    /// Begins a message whose control bytes `fill` appends.
    pub(crate) fn begin(&mut self, fill: impl FnOnce(&mut Vec<u8>)) {
        self.clear();
        fill(&mut self.control);
        self.left = self.control.len() as u64;
        self.ranges.push(iovec { iov_base: std::ptr::null_mut(), iov_len: self.control.len() });
    }

    /// Begins the receipt of `length` control bytes.
    pub(crate) fn begin_receipt(&mut self, length: usize) {
        self.begin(|control| control.resize(length, 0));
    }

    /// Lets go of everything lent.
    pub(crate) fn clear(&mut self) {
        self.control.clear();
        self.ranges.clear();
        self.owners.clear();
        (self.next, self.done_of_next, self.left, self.done) = (0, 0, 0, 0);
    }

    /// Adds a range of registered memory.
    ///
    /// # Errors
    /// [`SliceError::OutOfRange`].
    pub(crate) fn lend(&mut self, memory: &Memory, offset: u64, length: u64) -> Result<(), SliceError> {
        let address = memory.address(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        if !self.owners.last().is_some_and(|last| last.is(memory)) {
            self.owners.push(memory.clone());
        }
        self.ranges.push(iovec { iov_base: address.cast(), iov_len: length as usize });
        self.left += length;
        Ok(())
    }

    /// Adds bytes to be received and forgotten.
    pub(crate) fn sink(&mut self, mut length: u64) {
        if self.sink.is_empty() {
            self.sink = vec![0; SINK_BYTES].into_boxed_slice();
        }
        self.left += length;
        while length > 0 {
            let part = length.min(SINK_BYTES as u64);
            self.ranges.push(iovec { iov_base: self.sink.as_mut_ptr().cast(), iov_len: part as usize });
            length -= part;
        }
    }

    /// Lets go of what is lent: what is left of it goes to the sink. If control bytes are still missing, only they are
    /// left afterwards, because only they tell how many bytes follow.
    pub(crate) fn let_go(&mut self) {
        let control_left = if self.next == 0 { self.control.len() - self.done_of_next } else { 0 };
        let rest = self.left - control_left as u64;
        self.ranges.truncate(1);
        self.owners.clear();
        self.left = control_left as u64;
        if control_left == 0 {
            (self.next, self.done_of_next) = (1, 0);
            self.sink(rest);
        }
    }

    /// Bytes to go.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// Bytes that went.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// The control bytes: all of them once [`Lending::done`] says so.
    pub(crate) fn control(&self) -> &[u8] {
        &self.control
    }

    /// Sends what can be sent; gives how many bytes that were.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>, wait: Wait) -> io::Result<usize> {
        let flags = MSG_NOSIGNAL | if wait == Wait::No { MSG_DONTWAIT } else { 0 };
        self.call(|message| {
            // SAFETY: `message` points to ranges that `call` argues; the kernel only reads them.
            unsafe { libc::sendmsg(socket.as_raw_fd(), message, flags) }
        })
    }

    /// Receives what there is; gives how many bytes that were. The peer's end of file is `UnexpectedEof`.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>, wait: Wait) -> io::Result<usize> {
        let flags = match wait {
            Wait::No => MSG_DONTWAIT,
            Wait::Some => 0,
            Wait::All => libc::MSG_WAITALL,
        };
        if self.left == 0 {
            return Ok(0);
        }
        let received = self.call(|message| {
            // SAFETY: `message` points to ranges that `call` argues; the kernel writes at most their lengths.
            unsafe { libc::recvmsg(socket.as_raw_fd(), message, flags) }
        })?;
        if received == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(received) }
    }

    /// Copies up to `most` of what is left to the end of `target`, as if it had been sent; gives how many.
    pub(crate) fn give(&mut self, target: &mut Vec<u8>, most: usize) -> usize {
        let mut given = 0;
        target.reserve(most.min(usize::try_from(self.left).unwrap_or(most)));
        while given < most && self.left > 0 {
            self.settle_control();
            let range = self.ranges[self.next];
            let length = (range.iov_len - self.done_of_next).min(most - given);
            // SAFETY: the range lies in memory that `owners`, `sink` or `control` keep (see `call`), `done_of_next` and
            // `length` stay inside it; `target` has room for `length` bytes more: `given + length` is at most `most` and
            // what was left. Bytes are copied, not referred to.
            unsafe {
                let end = target.len();
                let source = range.iov_base.cast::<u8>().add(self.done_of_next);
                std::ptr::copy(source, target.as_mut_ptr().add(end), length);
                target.set_len(end + length);
            }
            given += length;
            self.advance(length);
        }
        given
    }

    /// Takes up to what is left from bytes that were received before; gives how many.
    pub(crate) fn take_from(&mut self, bytes: &[u8]) -> usize {
        let mut taken = 0;
        while taken < bytes.len() && self.left > 0 {
            self.settle_control();
            let range = self.ranges[self.next];
            let length = (range.iov_len - self.done_of_next).min(bytes.len() - taken);
            // SAFETY: the range lies in memory that `owners`, `sink` or `control` keep (see `call`), `done_of_next`
            // and `length` stay inside it; `bytes` holds `length` bytes from `taken` on. `copy` allows overlap.
            unsafe {
                let target = range.iov_base.cast::<u8>().add(self.done_of_next);
                std::ptr::copy(bytes.as_ptr().add(taken), target, length);
            }
            taken += length;
            self.advance(length);
        }
        taken
    }

    /// Takes back what was received beyond the control bytes: another message's bytes, as it turned out.
    pub(crate) fn take_back(&self) -> Vec<u8> {
        let mut left = (self.done as usize).saturating_sub(self.control.len());
        let mut bytes: Vec<u8> = Vec::with_capacity(left);
        for range in &self.ranges[1..] {
            let length = range.iov_len.min(left);
            // SAFETY: the range lies in memory that `owners` or `sink` keep and holds at least `length` bytes; the
            // vector has room for all of them. Bytes are copied, not referred to.
            unsafe {
                let end = bytes.len();
                std::ptr::copy(range.iov_base.cast::<u8>(), bytes.as_mut_ptr().add(end), length);
                bytes.set_len(end + length);
            }
            left -= length;
            if left == 0 {
                break;
            }
        }
        bytes
    }

    /// Makes one system call over the ranges that are left, and counts what it moved.
    ///
    /// Ranges are valid: `lend` takes them from memory whose clone is in `owners`, `sink` from the sink, entry 0 is set
    /// here to `control`; none of the three is let go or reallocated before `clear`.
    fn call(&mut self, call: impl FnOnce(*mut libc::msghdr) -> isize) -> io::Result<usize> {
        if self.left == 0 {
            return Ok(0);
        }
        self.settle_control();
        let whole = self.ranges[self.next];
        self.ranges[self.next] = iovec {
            // SAFETY: `done_of_next <= iov_len`, so the sum stays in the same allocation.
            iov_base: unsafe { whole.iov_base.cast::<u8>().add(self.done_of_next) }.cast(),
            iov_len: whole.iov_len - self.done_of_next,
        };
        let count = (self.ranges.len() - self.next).min(RANGES_PER_CALL);
        // SAFETY: all-zero is a valid msghdr: no name, no ranges, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.ranges[self.next..].as_mut_ptr();
        message.msg_iovlen = count;
        let moved = call(&raw mut message);
        let error = io::Error::last_os_error();
        self.ranges[self.next] = whole;
        let moved = usize::try_from(moved).map_err(|_| error)?;
        self.advance(moved);
        Ok(moved)
    }

    fn settle_control(&mut self) {
        if self.next == 0 {
            self.ranges[0].iov_base = self.control.as_mut_ptr().cast();
        }
        while self.ranges[self.next].iov_len == self.done_of_next {
            self.next += 1;
            self.done_of_next = 0;
        }
    }

    fn advance(&mut self, mut bytes: usize) {
        assert!(bytes as u64 <= self.left, "the kernel moved {bytes} bytes of {}", self.left);
        self.left -= bytes as u64;
        self.done += bytes as u64;
        while bytes > 0 {
            let of_next = (self.ranges[self.next].iov_len - self.done_of_next).min(bytes);
            bytes -= of_next;
            self.done_of_next += of_next;
            if self.done_of_next == self.ranges[self.next].iov_len {
                self.next += 1;
                self.done_of_next = 0;
            }
        }
    }
}

/// Waits until one of `events` (POLLIN, POLLOUT) is there, at most `timeout`; gives those that are.
pub(crate) fn poll(
    socket: BorrowedFd<'_>,
    events: rustix::event::PollFlags,
    timeout: std::time::Duration,
) -> io::Result<rustix::event::PollFlags> {
    poll_each([socket], events, timeout).map(|[found]| found)
}

/// What is there of each, as soon as there is something of one.
pub(crate) fn poll_each<const N: usize>(
    sockets: [BorrowedFd<'_>; N],
    events: rustix::event::PollFlags,
    timeout: std::time::Duration,
) -> io::Result<[rustix::event::PollFlags; N]> {
    let mut fds = sockets.map(|socket| rustix::event::PollFd::from_borrowed_fd(socket, events));
    let timeout = rustix::time::Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    match rustix::event::poll(&mut fds, Some(&timeout)) {
        Ok(_) => Ok(fds.map(|fd| fd.revents())),
        Err(rustix::io::Errno::INTR) => Ok([rustix::event::PollFlags::empty(); N]),
        Err(error) => Err(error.into()),
    }
}

/// `c_int` is what the flags are: said once, so that a port to another libc fails here.
const _: c_int = MSG_DONTWAIT;

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn memory(bytes: &[u8]) -> Memory {
        let memory = Memory::anonymous(bytes.len()).expect("memory");
        memory.write_at(0, bytes).expect("inside");
        memory
    }

    fn read(memory: &Memory) -> Vec<u8> {
        let mut bytes = vec![0; memory.len() as usize];
        memory.read_at(0, &mut bytes).expect("inside");
        bytes
    }

    #[test]
    fn control_bytes_and_lent_ranges_are_one_message() {
        let (left, right) = UnixStream::pair().expect("pair");
        let source = memory(b"0123456789");
        let mut sending = Lending::default();
        sending.begin(|control| control.extend(b"head"));
        sending.lend(&source, 2, 3).expect("inside");
        sending.lend(&source, 7, 0).expect("inside");
        sending.lend(&source, 8, 2).expect("inside");
        assert!(sending.lend(&source, 9, 2).is_err());
        while sending.left() > 0 {
            sending.send(left.as_fd(), Wait::Some).expect("sent");
        }
        let target = memory(&[b'.'; 6]);
        let mut receipt = Lending::default();
        receipt.begin_receipt(4);
        receipt.lend(&target, 1, 4).expect("inside");
        receipt.lend(&target, 0, 1).expect("inside");
        while receipt.left() > 0 {
            receipt.receive(right.as_fd(), Wait::All).expect("received");
        }
        assert_eq!(receipt.control(), b"head");
        assert_eq!(read(&target), b"92348.");
        assert_eq!(receipt.receive(right.as_fd(), Wait::No).expect("nothing left"), 0);
        receipt.begin_receipt(1);
        assert_eq!(receipt.receive(right.as_fd(), Wait::No).expect_err("empty").kind(), io::ErrorKind::WouldBlock);
        drop(left);
        let end = receipt.receive(right.as_fd(), Wait::Some).expect_err("end");
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn misplaced_bytes_are_taken_back_and_given_again() {
        let target = memory(&[0; 8]);
        let mut receipt = Lending::default();
        receipt.begin_receipt(2);
        receipt.lend(&target, 4, 4).expect("inside");
        receipt.lend(&target, 0, 4).expect("inside");
        assert_eq!(receipt.take_from(b"HHabcdef"), 8);
        assert_eq!((receipt.done(), receipt.left()), (8, 2));
        assert_eq!(receipt.take_back(), b"abcdef");
        assert_eq!(read(&target), b"ef\0\0abcd");
    }

    #[test]
    fn what_is_left_can_be_let_go() {
        let target = memory(&[0; 4]);
        let mut receipt = Lending::default();
        for received_before in [0_usize, 1, 2, 4] {
            target.write_at(0, &[0; 4]).expect("inside");
            receipt.begin_receipt(2);
            receipt.lend(&target, 0, 4).expect("inside");
            assert_eq!(receipt.take_from(&b"HHabcd"[..received_before]), received_before);
            receipt.let_go();
            let left = if received_before < 2 { 2 - received_before } else { 6 - received_before };
            assert_eq!(receipt.left(), left as u64);
            assert_eq!(receipt.take_from(&b"HHabcd"[received_before..]), left);
            assert_eq!(receipt.control(), b"HH");
            let kept = received_before.saturating_sub(2);
            assert_eq!(&read(&target)[..kept], &b"abcd"[..kept]);
            assert_eq!(&read(&target)[kept..], &[0; 4][kept..]);
        }
    }
}
