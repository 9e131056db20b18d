//! Memory of this process from which a node on this host can copy: whoever puts values from it sends only where they lie.
//!
//! It is made before anybody knows which nodes there are, and lent to each with the first put from it, by a
//! [`Loan`] of its own. What a slice of bytes lies in is found by its address ([`Lendable::of`]), so that those who hand
//! bytes on need not know.
//!
//! Its memfd is sealed against shrinking, and never written by others. It goes back to the system when the owner has
//! dropped it, nobody holds a [`Lendable`] of it for a transfer, and no node has it mapped: a node lets go of it when the
//! connection ends, and a copy that it has begun before ends first.
//!
//! Its first page is not given out: its first word counts how often it was *withdrawn* ([`Lendable::withdraw`]), which its owner does
//! when a node that may be copying from it has not answered and its bytes are about to change. A put says what the count was,
//! and a node whose copy ended after it had changed refuses the put: what it copied may be another put's. The owner counts, then
//! writes; the node copies, then looks: the order of a sequence lock.
//!
//! A fork shares it: parent and child see what the other writes. The child can lend it, too, over connections of its own.
//! Locks here are held for moments, and tried rather than waited for: in the child, one that another thread held in the
//! moment of the fork is never free again. What is not found for that reason is copied another way.
#![expect(unsafe_code, reason = "gives out memory as slices; each block is argued")]

use std::collections::BTreeMap;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, RwLock, TryLockError, Weak};
use std::time::{Duration, Instant};

use crate::loan::Loan;
use crate::memory::{Memory, PeerMapping};

/// A node that took no memory is left alone for so long.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// How often a lock is tried that somebody else holds for a moment.
const TRIES: u32 = 10_000;
/// The same where another way is near, for each slice of bytes.
const FEW_TRIES: u32 = 100;

/// Bytes in front of those that are given out.
const HEADER_BYTES: usize = 4096;

/// By the address of the first byte that is given out.
static ALL: RwLock<BTreeMap<usize, Weak<Inner>>> = RwLock::new(BTreeMap::new());

/// Memory that nodes on this host can be lent. Its owner writes it; whoever shares it then (`Bytes::from_owner`) writes no more.
///
/// All of it is backed from the start, with zeros.
pub struct LendableMemory(Arc<Inner>);

/// Memory of a [`LendableMemory`], kept for a transfer.
pub struct Lendable(Arc<Inner>);

struct Inner {
    memory: Memory,
    range: Range<usize>,
    lent: Mutex<Vec<(Borrower, State)>>,
}

/// Who is lent memory: one that talks to one node. It ends with [`Borrower::end`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Borrower(u64);

enum State {
    Lent(Arc<Loan>),
    /// The node is being asked, or took it not, and is not asked again before this.
    Refused(Instant),
}

impl LendableMemory {
    /// Allocates `length` bytes.
    ///
    /// # Errors
    /// `InvalidInput` for none; `OutOfMemory` if the machine or its control group has not as many available; those of
    /// memfd_create, fallocate and mmap.
    pub fn allocate(length: usize) -> io::Result<Self> {
        if length == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if tidepool_io::available_bytes().is_some_and(|available| available < length as u64) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let whole = length.checked_add(HEADER_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Memory::shared(whole, PeerMapping::ReadOnly)?;
        let start = memory.base().as_ptr().expose_provenance() + HEADER_BYTES;
        let inner = Arc::new(Inner { memory, range: start..start + length, lent: Mutex::default() });
        let mut all = tried(|| ALL.try_write()).ok_or(io::ErrorKind::WouldBlock)?;
        all.insert(start, Arc::downgrade(&inner));
        Ok(Self(inner))
    }
}

impl Deref for LendableMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping lives while `self` does, all of it is backed, and it has `HEADER_BYTES` more than these. Others
        // map it for reading only (the memfd is sealed), and this process writes these bytes through `&mut self` alone.
        unsafe { std::slice::from_raw_parts(self.0.memory.base().as_ptr().add(HEADER_BYTES), self.0.range.len()) }
    }
}

impl DerefMut for LendableMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively. Whoever else keeps the memory (`Lendable`) reads it by no
        // reference, and a node that copies it meanwhile does so in its own process: it finds by the count of withdrawals or by
        // the checksum whether the bytes may have changed.
        unsafe { std::slice::from_raw_parts_mut(self.0.memory.base().as_ptr().add(HEADER_BYTES), self.0.range.len()) }
    }
}

impl AsRef<[u8]> for LendableMemory {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for LendableMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LendableMemory").field("bytes", &self.0.range.len()).finish_non_exhaustive()
    }
}

impl Lendable {
    /// The memory in which all of `bytes` lie, if there is one.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Option<Self> {
        // The lock is free again before anything is dropped, which may want it.
        let all = || ALL.try_read();
        let found = some_tries(FEW_TRIES, all)?.range(..=bytes.as_ptr().addr()).next_back()?.1.clone();
        let found = Self(found.upgrade()?);
        found.offset_of(bytes).is_some().then_some(found)
    }

    /// Where in this memory all of `bytes` lie.
    #[must_use]
    pub fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let Range { start, end } = self.0.range;
        let first = bytes.as_ptr().addr().checked_sub(start)?;
        (first + bytes.len() <= end - start).then_some((HEADER_BYTES + first) as u64)
    }

    /// How often it was withdrawn: a put from it says so.
    #[must_use]
    pub fn withdrawals(&self) -> u64 {
        self.0.count().load(Ordering::SeqCst)
    }

    /// From here on no copy that is still under way is kept by a node: the bytes may change.
    pub fn withdraw(&self) {
        self.0.withdraw();
    }

    /// Has `lend` lend it to a node, unless it is lent already. `None`: the node does not take it, or did not a moment ago, or
    /// another thread is lending it just now.
    #[must_use]
    pub fn lend(&self, borrower: Borrower, lend: impl FnOnce(&Memory) -> io::Result<Loan>) -> Option<Arc<Loan>> {
        {
            let mut lent = tried(|| self.0.lent.try_lock())?;
            // Until it has answered, which takes less time; whatever happens meanwhile, it is asked again then.
            let refused = State::Refused(Instant::now() + AGAIN_AFTER);
            match lent.iter_mut().find(|(to, _)| *to == borrower) {
                Some((_, State::Lent(lent))) => return Some(Arc::clone(lent)),
                Some((_, State::Refused(until))) if *until > Instant::now() => return None,
                Some((_, state)) => *state = refused,
                None => lent.push((borrower, refused)),
            }
        }
        let taken = lend(&self.0.memory).map(Arc::new).inspect_err(|error| {
            tracing::info!(%error, bytes = self.0.range.len(), "memory is not lent");
        });
        let taken = taken.ok()?;
        let mut lent = tried(|| self.0.lent.try_lock())?;
        // Gone if the borrower has ended meanwhile: what was lent goes with it.
        let (_, state) = lent.iter_mut().find(|(to, _)| *to == borrower)?;
        *state = State::Lent(Arc::clone(&taken));
        Some(taken)
    }

    /// The node no longer has `gone`: the next time it is lent anew.
    pub fn forget(&self, gone: &Arc<Loan>) {
        self.0.take_back(|(_, state)| matches!(state, State::Lent(lent) if Arc::ptr_eq(lent, gone)));
    }
}

impl Borrower {
    /// Another one.
    #[expect(clippy::new_without_default, reason = "each is another")]
    #[must_use]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Takes all memory back.
    pub fn end(self) {
        let all: Vec<_> =
            tried(|| ALL.try_read()).iter().flat_map(|all| all.values().filter_map(Weak::upgrade)).collect();
        all.iter().for_each(|inner| inner.take_back(|(borrower, _)| *borrower == self));
    }
}

/// Withdraws all such memory of this process, for a caller that goes away in the middle of a put: other puts that are under way are
/// refused, and repeated by their clients.
pub fn withdraw_all() {
    // Gone from the table is dropped, and no node keeps what it copies of that.
    tried(|| ALL.try_read()).iter().flat_map(|all| all.values().filter_map(Weak::upgrade)).for_each(|it| it.withdraw());
}

impl Inner {
    /// In the header of memory that is made here: there.
    fn count(&self) -> &AtomicU64 {
        &self.memory.words(1)[0]
    }

    fn withdraw(&self) {
        self.count().fetch_add(1, Ordering::SeqCst);
        // No write of the caller's comes before it.
        fence(Ordering::SeqCst);
    }

    fn take_back(&self, mut is_gone: impl FnMut(&(Borrower, State)) -> bool) {
        let Some(mut lent) = tried(|| self.lent.try_lock()) else { return };
        let gone: Vec<_> = lent.extract_if(.., |lent| is_gone(lent)).collect();
        // Ending a loan may take a moment.
        drop(lent);
        drop(gone);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // What is left there if this fails finds nothing.
        if let Some(mut all) = tried(|| ALL.try_write()) {
            all.remove(&self.range.start);
        }
    }
}

/// A guard that somebody else holds for a moment at most, or never gives back (see the module).
fn tried<G>(attempt: impl Fn() -> Result<G, TryLockError<G>>) -> Option<G> {
    some_tries(TRIES, attempt)
}

fn some_tries<G>(tries: u32, attempt: impl Fn() -> Result<G, TryLockError<G>>) -> Option<G> {
    (0..tries).find_map(|_| match attempt() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {
            std::thread::yield_now();
            None
        }
    })
}

#[cfg(test)]
#[path = "../tests/support/process.rs"]
mod process;

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;

    use super::process::in_own_process;
    use super::*;
    use crate::handover::{REFUSED, TAKEN, take_offer};

    fn node() -> (tempfile::TempDir, std::path::PathBuf, UnixListener) {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("memory.sock");
        let listener = UnixListener::bind(&path).expect("socket");
        (folder, path, listener)
    }

    fn by(socket: &Path) -> impl FnOnce(&Memory) -> io::Result<Loan> {
        |memory| Loan::by_socket(socket, memory)
    }

    /// Lends to a node that answers so.
    fn lend(
        memory: &Lendable,
        to: Borrower,
        (path, listener): (&Path, &UnixListener),
        answer: [u8; 8],
    ) -> (Option<Arc<Loan>>, UnixStream) {
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| {
                let mut stream = listener.accept().expect("a client").0;
                take_offer(&stream).expect("lent");
                stream.write_all(&answer).expect("answered");
                stream
            });
            (memory.lend(to, by(path)), taking.join().expect("no panic"))
        })
    }

    #[test]
    fn bytes_are_found_by_their_address_if_all_of_them_lie_in_one_memory() {
        let mut memory = LendableMemory::allocate(8192).expect("memory");
        memory[4096..4099].copy_from_slice(b"abc");
        let found = Lendable::of(&memory[4096..4099]).expect("in it");
        assert_eq!(found.offset_of(&memory[4096..4099]), Some(HEADER_BYTES as u64 + 4096));
        assert_eq!(found.offset_of(&memory[..]), Some(HEADER_BYTES as u64));
        let other = LendableMemory::allocate(4096).expect("memory");
        assert_eq!(found.offset_of(&other), None);
        assert!(Lendable::of(&[7; 16]).is_none());
        assert_eq!(LendableMemory::allocate(0).expect_err("none").kind(), io::ErrorKind::InvalidInput);
        assert_eq!(LendableMemory::allocate(1 << 50).expect_err("too much").kind(), io::ErrorKind::OutOfMemory);
    }

    #[test]
    fn memory_lives_while_a_transfer_has_it_and_is_taken_back_then() {
        let (_folder, path, listener) = node();
        let memory = LendableMemory::allocate(4096).expect("memory");
        let address = memory.0.range.start;
        let transfer = Lendable::of(&memory).expect("in it");
        let (lent, mut node) = lend(&transfer, Borrower::new(), (&path, &listener), TAKEN);
        drop((memory, lent));
        assert!(ALL.read().expect("not poisoned").contains_key(&address), "the transfer has it");
        drop(transfer);
        assert!(!ALL.read().expect("not poisoned").contains_key(&address));
        assert_eq!(node.read(&mut [0]).expect("ended"), 0, "the node hears of it");
    }

    #[test]
    fn a_borrower_has_memory_once_until_it_is_forgotten_or_ends() {
        let (_folder, path, listener) = node();
        let memory = LendableMemory::allocate(4096).expect("memory");
        let (memory, at) = (Lendable::of(&memory).expect("in it"), (&*path, &listener));
        let (first, second) = (Borrower::new(), Borrower::new());
        let (lent, mut stream) = lend(&memory, first, at, TAKEN);
        let lent = lent.expect("taken");
        // Nobody accepts these.
        assert!(Arc::ptr_eq(&memory.lend(first, by(&path)).expect("lent"), &lent));
        let (other, _other_stream) = lend(&memory, second, at, TAKEN);
        assert!(!Arc::ptr_eq(&other.expect("taken"), &lent));
        memory.forget(&lent);
        drop(lent);
        assert_eq!(stream.read(&mut [0]).expect("ended"), 0);
        let (again, mut stream) = lend(&memory, first, at, TAKEN);
        drop(again);
        first.end();
        assert_eq!(stream.read(&mut [0]).expect("ended"), 0);
        assert_eq!(memory.0.lent.lock().expect("not poisoned").len(), 1, "the other keeps it");
    }

    #[test]
    fn a_node_that_refused_is_left_alone_for_a_while() {
        let (_folder, path, listener) = node();
        let memory = LendableMemory::allocate(4096).expect("memory");
        let (memory, borrower) = (Lendable::of(&memory).expect("in it"), Borrower::new());
        assert!(lend(&memory, borrower, (&path, &listener), REFUSED).0.is_none());
        listener.set_nonblocking(true).expect("set");
        assert!(memory.lend(borrower, by(&path)).is_none());
        assert_eq!(listener.accept().expect_err("nobody asked").kind(), io::ErrorKind::WouldBlock);
        // As after that while.
        memory.0.lent.lock().expect("not poisoned")[0].1 = State::Refused(Instant::now());
        listener.set_nonblocking(false).expect("set");
        assert!(lend(&memory, borrower, (&path, &listener), TAKEN).0.is_some());
    }

    /// It was left alone for ever once, as if another thread were still asking it.
    #[test]
    fn a_node_whose_answer_could_not_be_kept_is_asked_again() {
        let (_folder, path, listener) = node();
        let memory = LendableMemory::allocate(4096).expect("memory");
        let (memory, borrower) = (Lendable::of(&memory).expect("in it"), Borrower::new());
        std::thread::scope(|scope| {
            let (ended, has_ended) = std::sync::mpsc::channel();
            let (memory, listener) = (&memory, &listener);
            scope.spawn(move || {
                let mut stream = listener.accept().expect("a client").0;
                take_offer(&stream).expect("lent");
                let _held = memory.0.lent.lock().expect("not poisoned");
                stream.write_all(&TAKEN).expect("answered");
                has_ended.recv().expect("it ends");
            });
            assert!(memory.lend(borrower, by(&path)).is_none());
            ended.send(()).expect("waits");
        });
        // As after a while.
        for (_, state) in memory.0.lent.lock().expect("not poisoned").iter_mut() {
            if let State::Refused(until) = state {
                *until = Instant::now();
            }
        }
        assert!(lend(&memory, borrower, (&path, &listener), TAKEN).0.is_some());
    }

    /// As in a child that was forked while a thread of its parent was there.
    #[test]
    fn locks_that_are_never_free_again_stop_nobody() {
        in_own_process("lendable::tests::locks_that_are_never_free_again_stop_nobody", || {
            let memory = LendableMemory::allocate(4096).expect("memory");
            let found = Lendable::of(&memory).expect("in it");
            let held = found.0.lent.lock().expect("not poisoned");
            assert!(found.lend(Borrower::new(), by(Path::new("/nowhere"))).is_none());
            drop(held);
            let held = ALL.write().expect("not poisoned");
            assert!(Lendable::of(&memory).is_none());
            assert_eq!(LendableMemory::allocate(4096).expect_err("held").kind(), io::ErrorKind::WouldBlock);
            Borrower::new().end();
            drop((found, memory));
            drop(held);
        });
    }
}
