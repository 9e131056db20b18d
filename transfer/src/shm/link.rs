//! A peer on this host as a link: copies, by the thread that waits or by a few others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::discover::Neighbour;
use crate::batch::{BatchState, Group, Piece};
use crate::error::Failure;
use crate::memory::Memory;
use crate::peer::Segment;
use crate::pool::Pool;
use crate::region::Region;
use crate::slice::Direction;
use crate::transport::{Limits, Link, TransportKind};
use crate::wire::ITEMS_MAX;

/// A stop is looked for between pieces: at 10 GB/s every 0.4 ms.
const PIECE_BYTES: u64 = 4 << 20;
/// Submitted batches up to this many bytes are copied by who submits them: a hand-over costs as much.
const INLINE_BYTES: u64 = 64 << 10;

/// A copy of so many bytes keeps one thread busy long enough that waking another pays: about a millisecond.
const HELPER_BYTES: u64 = 8 << 20;
/// More threads don't copy faster.
const HELPERS_MAX: usize = 4;

/// See the module.
pub(crate) struct ShmLink {
    neighbour: Arc<Neighbour>,
    copiers: Arc<Pool>,
    closed: Arc<AtomicBool>,
    helpers_max: usize,
}

impl ShmLink {
    pub(crate) fn new(neighbour: Arc<Neighbour>, copiers: Arc<Pool>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { neighbour, copiers, closed: Arc::default(), helpers_max: (cores / 2).min(HELPERS_MAX) }
    }
}

impl ShmLink {
    /// How many other threads should help who waits with a copy: one for each 8 MiB beyond the first, at most half the
    /// cores and a few, which is what it takes to fill a memory bus.
    fn helpers(&self, groups: &[Group]) -> usize {
        let bytes: u64 = groups.iter().map(|group| group.bytes).sum();
        let wanted = usize::try_from(bytes / HELPER_BYTES).unwrap_or(usize::MAX);
        wanted.saturating_sub(1).min(groups.len().saturating_sub(1)).min(self.helpers_max)
    }
}

impl Link for ShmLink {
    fn kind(&self) -> TransportKind {
        TransportKind::SharedMemory
    }

    fn name(&self) -> &'static str {
        "this host"
    }

    fn limits(&self) -> Limits {
        Limits { piece_bytes: PIECE_BYTES, group_pieces: ITEMS_MAX, group_bytes: 2 * PIECE_BYTES }
    }

    fn reaches(&self, _: Option<&Region>, segment: &Segment, direction: Direction) -> bool {
        let Some(mapping) = &segment.mapping else { return false };
        (direction == Direction::Read || mapping.is_writable()) && self.neighbour.lives(Instant::now())
    }

    fn post(&self, groups: Vec<Group>) {
        if groups.iter().map(|group| group.bytes).sum::<u64>() <= INLINE_BYTES {
            return groups.into_iter().for_each(|group| copy(&self.neighbour, &self.closed, group));
        }
        for group in groups {
            let (neighbour, closed) = (Arc::clone(&self.neighbour), Arc::clone(&self.closed));
            self.copiers.run(move || copy(&neighbour, &closed, group));
        }
    }

    fn carry(&self, groups: Vec<Group>, _: &BatchState) {
        let helpers = self.helpers(&groups);
        if helpers == 0 {
            return groups.into_iter().for_each(|group| copy(&self.neighbour, &self.closed, group));
        }
        // Whoever is free takes the next: a helper that starts late only takes less.
        let rest = Arc::new(Mutex::new(groups.into_iter()));
        for _ in 0..helpers {
            let (neighbour, closed, rest) = (Arc::clone(&self.neighbour), Arc::clone(&self.closed), Arc::clone(&rest));
            self.copiers.run(move || copy_all(&neighbour, &closed, &rest));
        }
        copy_all(&self.neighbour, &self.closed, &rest);
    }

    fn probe(&self, _: Instant) -> Result<(), Failure> {
        if self.neighbour.lives(Instant::now()) { Ok(()) } else { Err(Failure::ConnectionLost) }
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

fn copy_all(neighbour: &Neighbour, closed: &AtomicBool, groups: &Mutex<std::vec::IntoIter<Group>>) {
    loop {
        let next = groups.lock().next();
        let Some(group) = next else { return };
        copy(neighbour, closed, group);
    }
}

fn copy(neighbour: &Neighbour, closed: &AtomicBool, group: Group) {
    let now = Instant::now();
    let mut stop = if closed.load(Ordering::Acquire) { Some(Failure::Closed) } else { group.batch.stop_reason(now) };
    if stop.is_none() && !neighbour.lives(now) {
        return group.hand_back(Failure::ConnectionLost);
    }
    // All pieces of a group belong to one segment: one look before the copies and one after cover them all.
    let region = group.batch.segments[group.pieces()[0].segment as usize].info.region;
    let (mut since, mut copied) = (0, 0);
    if stop.is_none() && !neighbour.has(region) {
        stop = Some(Failure::NoRegion);
    }
    for piece in group.pieces() {
        if since >= PIECE_BYTES {
            since = 0;
            stop = stop.or_else(|| group.batch.stop_reason(Instant::now()));
        }
        since += piece.length;
        stop = stop.or_else(|| copy_piece(&group.batch, piece).err());
        if stop.is_some() {
            break;
        }
        copied += 1;
    }
    // The copies before the look: what was copied from a region that is gone by now may be anything.
    std::sync::atomic::fence(Ordering::SeqCst);
    if !neighbour.has(region) {
        return group.finish(Err(Failure::NoRegion));
    }
    let mut place = 0;
    group.finish_each(|_| {
        place += 1;
        if place <= copied { Ok(()) } else { Err(stop.unwrap_or(Failure::System)) }
    });
}

fn copy_piece(batch: &BatchState, piece: &Piece) -> Result<(), Failure> {
    let segment = &batch.segments[piece.segment as usize];
    let Some(there) = &segment.mapping else { return Err(Failure::System) };
    let here = batch.regions[piece.region as usize].memory().ok_or(Failure::System)?;
    let copied = match piece.direction {
        Direction::Read => Memory::copy((there, piece.remote_offset), (here, piece.local_offset), piece.length),
        Direction::Write => Memory::copy((here, piece.local_offset), (there, piece.remote_offset), piece.length),
    };
    copied.map_err(|_| Failure::OutOfRange)
}
