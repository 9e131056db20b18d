//! Where bytes are gathered on their way to a node: those of several ranges, or of memory that may go away meanwhile.
//!
//! What is large goes to lendable memory, from which a node on this host copies it, so that it is copied once here and once
//! there. That memory is used again and again: new memory costs a page fault for each page, more than the copy. A child
//! has its own: it would share its parent's.

use bytes::Bytes;
use parking_lot::Mutex;
use tidepool_client::LendableMemory;

use crate::runtime::Origin;

/// Bytes of one memory: a whole message of values, or a lone larger one.
const MEMORY_BYTES: usize = 4 << 20;
/// Memories of this process: as many as calls that a few threads have under way.
const MEMORIES: usize = 16;
/// Of fewer bytes a node makes no copy of its own, so that they lie anywhere.
const LENT_FROM: usize = 32 << 10;

/// Memories that nobody uses now, and how many there are in all.
struct Pool {
    origin: Origin,
    spare: Vec<LendableMemory>,
    made: usize,
}

static POOL: Mutex<Option<Pool>> = Mutex::new(None);

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
    /// Room for `length` bytes. `None`: there is none.
    pub(crate) fn with_room(length: usize) -> Option<Self> {
        let lendable = (LENT_FROM..=MEMORY_BYTES).contains(&length).then(take).flatten();
        let place = match lendable {
            Some(memory) => Place::Lendable(Some(memory), Origin::here()),
            None => {
                let mut own = Vec::new();
                own.try_reserve_exact(length).ok()?;
                own.resize(length, 0);
                Place::Own(own)
            }
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
            && let Some(Pool { spare, .. }) = &mut *POOL.lock()
        {
            spare.extend(memory.take());
        }
    }
}

/// A memory, unless all are in use or there can be none.
fn take() -> Option<LendableMemory> {
    let mut pool = POOL.lock();
    if pool.as_ref().is_some_and(|pool| !pool.origin.is_here()) {
        *pool = None;
    }
    let pool = pool.get_or_insert_with(|| Pool { origin: Origin::here(), spare: Vec::new(), made: 0 });
    if pool.spare.is_empty() && pool.made < MEMORIES {
        pool.spare.push(LendableMemory::allocate(MEMORY_BYTES).ok()?);
        pool.made += 1;
    }
    pool.spare.pop()
}
