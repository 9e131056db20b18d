//! Where bytes are gathered on their way to a node: those of several ranges, or of memory that may go away meanwhile.
//!
//! What is large goes to lendable memory, from which a node on this host copies it, so that it is copied once here and once
//! there. That memory is used again and again: new memory costs a page fault for each page, more than the copy. A child
//! has its own: it would share its parent's. The pool's lock is held for moments and tried rather than waited for: in a child,
//! one that another thread held at the fork is never free again, and all bytes go to memory of their own.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tidepool_client::LendableMemory;

use crate::buffer::zeroed;
use crate::runtime::Origin;

/// Bytes of one memory: a whole message of values, or a lone larger one.
const MEMORY_BYTES: usize = 8 << 20;
/// Memories of this process: as many as calls that a few threads have under way.
const MEMORIES: usize = 12;
/// Of fewer bytes a node makes no copy of its own, so that they lie anywhere.
const LENT_FROM: usize = 32 << 10;
/// How often the pool's lock is tried.
const TRIES: u32 = 10_000;

/// Memories that nobody uses now.
struct Pool {
    origin: Origin,
    spare: Vec<LendableMemory>,
}

static POOL: Mutex<Option<Pool>> = Mutex::new(None);
/// Memories of this process in all, at most [`MEMORIES`].
static MADE: AtomicUsize = AtomicUsize::new(0);

/// Bytes that are being gathered.
pub(crate) struct Gathered {
    place: Place,
    filled: usize,
}

enum Place {
    Lendable(Option<LendableMemory>, Origin),
    Own(Vec<u8>),
}

impl Gathered {
    /// Room for values of so many bytes. `None`: there is none.
    pub(crate) fn with_room(lengths: impl IntoIterator<Item = usize>) -> Option<Self> {
        let length = lengths.into_iter().try_fold(0_usize, usize::checked_add)?;
        let lendable = (LENT_FROM..=MEMORY_BYTES).contains(&length).then(take).flatten();
        let place = match lendable {
            Some(memory) => Place::Lendable(Some(memory), Origin::here()),
            None => Place::Own(zeroed(length)?),
        };
        Some(Self { place, filled: 0 })
    }

    /// Bytes for which [`Gathered::next`] gave a place.
    pub(crate) fn filled(&self) -> usize {
        self.filled
    }

    /// Place for the next `length` bytes, for which there was room.
    pub(crate) fn next(&mut self, length: usize) -> &mut [u8] {
        let start = self.filled;
        self.filled += length;
        let all: &mut [u8] = match &mut self.place {
            Place::Lendable(memory, _) => memory.as_deref_mut().unwrap_or_default(),
            Place::Own(own) => own,
        };
        &mut all[start..self.filled]
    }

    /// What was gathered. Its memory is used again when the last part of it is dropped.
    pub(crate) fn into_bytes(self) -> Bytes {
        let filled = self.filled;
        Bytes::from_owner(self).slice(..filled)
    }
}

impl AsRef<[u8]> for Gathered {
    fn as_ref(&self) -> &[u8] {
        match &self.place {
            Place::Lendable(memory, _) => memory.as_deref().unwrap_or_default(),
            Place::Own(own) => own,
        }
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        if let Place::Lendable(memory, origin) = &mut self.place
            && origin.is_here()
        {
            match pool().as_deref_mut() {
                Some(Some(pool)) => pool.spare.extend(memory.take()),
                _ => _ = MADE.fetch_sub(1, Ordering::Relaxed),
            }
        }
    }
}

/// A memory, unless all are in use or there can be none.
fn take() -> Option<LendableMemory> {
    {
        let mut pool = pool()?;
        // A parent's memories, if any, are not this process's to use.
        if pool.as_ref().is_none_or(|pool| !pool.origin.is_here()) {
            *pool = Some(Pool { origin: Origin::here(), spare: Vec::new() });
            MADE.store(0, Ordering::Relaxed);
        }
        if let Some(memory) = pool.as_mut().and_then(|pool| pool.spare.pop()) {
            return Some(memory);
        }
        if MADE.load(Ordering::Relaxed) >= MEMORIES {
            return None;
        }
        MADE.fetch_add(1, Ordering::Relaxed);
    }
    // Without the lock: it takes a while.
    let made = LendableMemory::allocate(MEMORY_BYTES);
    made.inspect_err(|_| _ = MADE.fetch_sub(1, Ordering::Relaxed)).ok()
}

fn pool() -> Option<MutexGuard<'static, Option<Pool>>> {
    (0..TRIES).find_map(|_| {
        let pool = POOL.try_lock();
        if pool.is_none() {
            std::thread::yield_now();
        }
        pool
    })
}
