//! Holds for readers outside this process: until a hold ends, the extents that it names are not reused.
//!
//! A hold is an `Arc` of the slices kept until an instant. Instants are the runtime's; the margin for clock drift and
//! for the way of the answer is added by whoever grants (protocol: the client counts from before its request).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tidepool_metadata::{ObjectKey, TenantId, VersionId};
use tokio::time::Instant;

use super::index::PerSlice;
use super::{Inner, TieredStore, alive};
use crate::StoreError;
use crate::memory::SharedSlice;

/// Longest hold that is granted.
const LONGEST: Duration = Duration::from_secs(60);
/// Most holds at a time; above it, new ones are refused.
const MOST_HOLDS: usize = 65_536;
/// How often ended holds are let go.
const SWEEP: Duration = Duration::from_millis(250);

/// A granted hold: the slices cannot move or be reused until `until`.
#[derive(Clone, Debug)]
pub struct Hold {
    /// When it ends.
    pub until: Instant,
    /// The object's slices in DRAM, in order.
    pub slices: Arc<[SharedSlice]>,
}

#[derive(Default)]
pub(super) struct Holds {
    by_end: BinaryHeap<Reverse<Held>>,
}

struct Held {
    until: Instant,
    /// Never read: keeping it is the hold.
    _slices: Arc<[SharedSlice]>,
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.until == other.until
    }
}
impl Eq for Held {}
impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Held {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.until.cmp(&other.until)
    }
}

impl TieredStore {
    /// Resolves (key, version) to its DRAM slices under a hold of `duration`, at most a minute; `None` if DRAM does
    /// not have it.
    ///
    /// # Errors
    /// [`StoreError::TooManyHolds`].
    pub fn hold(
        &self,
        tenant: TenantId,
        key: &ObjectKey,
        version: VersionId,
        duration: Duration,
    ) -> Result<Option<Hold>, StoreError> {
        let slices: Option<Arc<[SharedSlice]>> = {
            let tables = self.inner.state.lock();
            let entry = tables.index.find(tenant, key.as_bytes(), version).and_then(|id| tables.index.get(id));
            entry.and_then(|entry| entry.dram.as_ref()).map(PerSlice::as_slice).map(Arc::from)
        };
        let Some(slices) = slices else { return Ok(None) };
        let until = Instant::now() + duration.min(LONGEST);
        let mut holds = self.inner.holds.lock();
        if holds.by_end.len() >= MOST_HOLDS {
            return Err(StoreError::TooManyHolds { most: MOST_HOLDS });
        }
        holds.by_end.push(Reverse(Held { until, _slices: Arc::clone(&slices) }));
        Ok(Some(Hold { until, slices }))
    }
}

/// Lets ended holds go until the store goes away.
pub(super) async fn run(store: Weak<Inner>) {
    let mut ticks = tokio::time::interval(SWEEP);
    loop {
        ticks.tick().await;
        let Some(inner) = alive(&store) else { return };
        let now = Instant::now();
        let mut ended = false;
        let mut holds = inner.holds.lock();
        while holds.by_end.peek().is_some_and(|Reverse(held)| held.until <= now) {
            holds.by_end.pop();
            ended = true;
        }
        drop(holds);
        if ended {
            inner.room.notify_waiters();
        }
    }
}
