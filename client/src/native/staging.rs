//! Memory of this client that the node copies or reads from: a put is written here, and its message says where.
//!
//! One copy here and one there, without a socket between. Made and lent with the first put that is worth it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_metadata::proto;
use tidepool_transfer::{Loan, Memory, PeerMapping};

use super::means::{self, Means};

/// Bytes of a slot: the largest group of values that is staged.
pub(super) const SLOT_BYTES: usize = 4 << 20;
const SLOTS: usize = 8;
/// How long a node that took no memory is left alone.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The memory, once there is some.
pub(super) struct Staging {
    /// None: it is lent nothing.
    means: Option<Means>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ring: Option<Arc<Ring>>,
    again: Option<Instant>,
}

struct Ring {
    memory: Memory,
    loan: Loan,
    free: Mutex<Vec<usize>>,
}

/// Values that were staged; their room is free again when this is dropped, after the node has answered.
pub(super) struct Staged {
    ring: Arc<Ring>,
    slot: Option<usize>,
    offsets: Vec<u64>,
}

impl Staging {
    pub(super) fn new(means: Option<Means>) -> Self {
        Self { means, state: Mutex::default() }
    }

    /// Copies the values to where the node finds them. `None`: there is no room, or no such node; send them.
    pub(super) fn stage(&self, values: &[Bytes]) -> Option<Staged> {
        let total: usize = values.iter().map(Bytes::len).sum();
        let ring = self.ring().filter(|_| total <= SLOT_BYTES)?;
        let slot = ring.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        // From here on the slot is given back whatever happens.
        let mut staged = Staged { ring, slot: Some(slot), offsets: Vec::with_capacity(values.len()) };
        let mut at = (slot * SLOT_BYTES) as u64;
        for value in values {
            staged.ring.memory.write_at(at, value).ok()?;
            staged.offsets.push(at);
            at += value.len() as u64;
        }
        Some(staged)
    }

    /// Lets go of memory that the node no longer has.
    pub(super) fn renew(&self) {
        let gone = self.state.lock().unwrap_or_else(PoisonError::into_inner).ring.take();
        // Ending a loan may take a moment.
        drop(gone);
    }

    fn ring(&self) -> Option<Arc<Ring>> {
        let means = self.means.as_ref()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ring) = &state.ring {
            return Some(Arc::clone(ring));
        }
        if state.again.is_some_and(|again| again > Instant::now()) {
            return None;
        }
        state.again = Some(Instant::now() + AGAIN_AFTER);
        let made = Memory::shared(SLOTS * SLOT_BYTES, PeerMapping::ReadOnly).and_then(|memory| {
            let (loan, free) = (means.lend(&memory)?, Mutex::new((0..SLOTS).collect()));
            Ok(Arc::new(Ring { memory, loan, free }))
        });
        match made {
            Ok(ring) => state.ring.insert(ring).clone().into(),
            Err(error) => {
                tracing::debug!(%error, "values are sent, not copied from memory");
                None
            }
        }
    }
}

impl Staged {
    /// Says where they lie, for the node.
    pub(super) fn say(&self, message: &mut proto::PutItemsRequest, values: &[Bytes]) {
        means::say(message, &self.ring.loan, self.offsets.clone(), values);
    }

    /// The node has not answered, and may be copying still: the room is not used again.
    pub(super) fn abandon(mut self) {
        self.slot = None;
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.ring.free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        }
    }
}
