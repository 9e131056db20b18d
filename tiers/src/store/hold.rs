//! Holds for readers outside this process: until a hold ends, the extents that it names are not reused.
//!
//! A hold is an `Arc` of the slices, kept until an instant or until it is given back. Instants are the runtime's; the margin
//! for clock drift and for the way of the answer is added by whoever grants (the client counts from before its
//! request).

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Weak;
use std::time::Duration;

use tidepool_metadata::checksum::combine;
use tokio::time::Instant;

use super::read::{ObjectReader, Source};
use super::{Inner, TieredStore, alive};
use crate::TierKind;
use crate::memory::SharedSlice;

/// Longest hold that is granted.
const LONGEST: Duration = Duration::from_secs(60);
/// Most holds at a time, and of the DRAM tier's bytes one in so many: what is held can't be made room of.
const MOST_HOLDS: usize = 65_536;
const SHARE_OF_BYTES: u64 = 4;
/// How often ended holds are let go.
const SWEEP: Duration = Duration::from_millis(250);

/// A granted hold: where an object's bytes lie, which cannot move or be reused until it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// CRC-32 of the object.
    pub checksum: u32,
    /// By this it is given back. Nobody can guess another one.
    pub id: u64,
    /// The bytes in order: from the segment's start, and how many, as far as they lie together.
    pub extents: Vec<(u64, u64)>,
    /// The generation of each slice: where in the segment it stands, 8 bytes, little-endian, and what it is. It changes
    /// before the extents are reused.
    pub generations: Vec<(u64, u64)>,
}

/// All that are granted.
#[derive(Default)]
pub(super) struct Holds {
    by_id: HashMap<u64, Held>,
    ends: BTreeSet<(Instant, u64)>,
    bytes: u64,
    granted: u64,
    ids: RandomState,
}

struct Held {
    until: Instant,
    bytes: u64,
    /// Never read: keeping it is the hold.
    _slices: Box<[SharedSlice]>,
}

impl Holds {
    fn let_go(&mut self, id: u64) -> Option<Held> {
        let held = self.by_id.remove(&id)?;
        self.ends.remove(&(held.until, id));
        self.bytes -= held.bytes;
        Some(held)
    }

    fn first_ended(&self, now: Instant) -> Option<u64> {
        self.ends.first().filter(|(until, _)| *until <= now).map(|(_, id)| *id)
    }
}

impl ObjectReader {
    /// Keeps the whole object where it is for `duration`, at most a minute, so that another process may read it there.
    /// `None`: it is not in DRAM, or too much is held already.
    #[must_use]
    pub fn hold(&self, duration: Duration) -> Option<Hold> {
        let Source::Dram(slices) = &self.source else { return None };
        let slices: Box<[SharedSlice]> = slices.as_slice().into();
        let mut extents: Vec<(u64, u64)> = Vec::new();
        for (start, bytes) in slices.iter().flat_map(|slice| slice.extents()) {
            match extents.last_mut() {
                Some((last, length)) if *last + *length == start => *length += bytes,
                _ => extents.push((start, bytes)),
            }
        }
        let whole = slices.iter().map(|slice| (slice.checksum(), u64::from(slice.length())));
        let whole = whole.reduce(|(whole, so_far), (sum, length)| (combine(whole, sum, length), so_far + length));
        let checksum = whole.map_or(0, |(whole, _)| whole);
        let generations = slices.iter().map(|slice| slice.generation()).collect();
        let most_bytes = self.inner.memory.usage().capacity / SHARE_OF_BYTES;
        let until = Instant::now() + duration.min(LONGEST);
        let mut holds = self.inner.holds.lock();
        let bytes = holds.bytes.saturating_add(self.object_length);
        if holds.by_id.len() >= MOST_HOLDS || bytes > most_bytes {
            return None;
        }
        holds.granted += 1;
        let id = holds.ids.hash_one(holds.granted);
        if holds.by_id.contains_key(&id) {
            return None;
        }
        holds.bytes = bytes;
        holds.by_id.insert(id, Held { until, bytes: self.object_length, _slices: slices });
        holds.ends.insert((until, id));
        drop(holds);
        self.inner.counters.hit(TierKind::Dram);
        Some(Hold { checksum, id, extents, generations })
    }
}

impl TieredStore {
    /// Holds that have not ended, and bytes of their objects.
    #[must_use]
    pub fn holds(&self) -> (usize, u64) {
        let holds = self.inner.holds.lock();
        (holds.by_id.len(), holds.bytes)
    }

    /// Bytes of DRAM that would be free if views of readers on this host did not keep them.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.inner.memory.usage().kept
    }

    /// Ends holds before their time; unknown ones have ended.
    pub fn end_holds(&self, ids: &[u64]) {
        let mut holds = self.inner.holds.lock();
        let ended: Vec<Held> = ids.iter().filter_map(|&id| holds.let_go(id)).collect();
        drop(holds);
        self.inner.held_ended(ended);
    }
}

impl Inner {
    fn held_ended(&self, ended: Vec<Held>) {
        if !ended.is_empty() {
            drop(ended);
            self.room.notify_waiters();
        }
    }
}

/// Lets ended holds go, and gives out what views have let go of, until the store goes away.
pub(super) async fn run(store: Weak<Inner>) {
    let mut ticks = tokio::time::interval(SWEEP);
    loop {
        ticks.tick().await;
        let Some(inner) = alive(&store) else { return };
        let now = Instant::now();
        let mut holds = inner.holds.lock();
        let mut ended = Vec::new();
        while let Some(held) = holds.first_ended(now).and_then(|id| holds.let_go(id)) {
            ended.push(held);
        }
        drop(holds);
        inner.held_ended(ended);
        if inner.memory.free_kept() {
            inner.room.notify_waiters();
        }
    }
}
