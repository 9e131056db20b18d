//! Files of a peer on this host as a link: it passes the descriptor, and we read and write them ourselves.
//!
//! ```text
//! post --> waiting, latency before bulk --pump, while few run--> a piece each to the file's engine --last one ends--> finished
//! ```
//!
//! A batch that was stopped ends here before its pieces are begun; what the system has begun is waited for.
//! As with shared memory, that the region is registered is looked up before and after.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use crate::batch::{BatchState, Group};
use crate::error::Failure;
use crate::peer::Segment;
use crate::region::Region;
use crate::schedule::Priority;
use crate::shm::discover::Neighbour;
use crate::slice::Direction;
use crate::transport::{Limits, Link, TransportKind};

/// Long enough that a disk reads it in one go, and what a TCP link takes too, should this one fail.
const PIECE_BYTES: u64 = 1 << 20;
/// As of a TCP link.
const GROUP_PIECES: usize = 128;
/// Groups whose pieces are with the file's engine: enough to keep a device busy, and few enough that a small urgent one
/// does not wait long.
const RUNNING_MAX: usize = 8;

/// See the module.
pub(crate) struct FileLink(Arc<Shared>);

struct Shared {
    neighbour: Arc<Neighbour>,
    is_closed: AtomicBool,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    latency: VecDeque<Group>,
    bulk: VecDeque<Group>,
    running: usize,
    /// Somebody launches groups, and looks again before it stops.
    is_pumping: bool,
}

impl FileLink {
    pub(crate) fn new(neighbour: Arc<Neighbour>) -> Self {
        Self(Arc::new(Shared { neighbour, is_closed: AtomicBool::new(false), queue: Mutex::default() }))
    }
}

impl Link for FileLink {
    fn kind(&self) -> TransportKind {
        TransportKind::File
    }

    fn name(&self) -> &'static str {
        "files of this host"
    }

    fn limits(&self) -> Limits {
        Limits { piece_bytes: PIECE_BYTES, group_pieces: GROUP_PIECES, group_bytes: PIECE_BYTES }
    }

    fn reaches(&self, _: Option<&Region>, segment: &Segment, direction: Direction) -> bool {
        let Some(file) = &segment.file else { return false };
        (direction == Direction::Read || file.is_writable()) && self.0.neighbour.lives(Instant::now())
    }

    fn post(&self, groups: Vec<Group>) {
        let mut queue = self.0.queue.lock();
        for group in groups {
            let is_urgent = group.batch.priority == Priority::Latency;
            if is_urgent { queue.latency.push_back(group) } else { queue.bulk.push_back(group) }
        }
        drop(queue);
        self.0.pump();
    }

    fn carry(&self, groups: Vec<Group>, _: &BatchState) {
        self.post(groups);
    }

    fn probe(&self, _: Instant) -> Result<(), Failure> {
        if self.0.neighbour.lives(Instant::now()) { Ok(()) } else { Err(Failure::ConnectionLost) }
    }

    fn close(&self) {
        self.0.is_closed.store(true, Ordering::Release);
        self.0.pump();
    }
}

impl Shared {
    /// Launches groups while there is room. One thread at a time does: groups that end at once don't pile up calls.
    fn pump(self: &Arc<Self>) {
        let mut queue = self.queue.lock();
        if std::mem::replace(&mut queue.is_pumping, true) {
            return;
        }
        // Closed, all of them end.
        while queue.running < RUNNING_MAX || self.is_closed.load(Ordering::Acquire) {
            let next = queue.latency.pop_front();
            let Some(group) = next.or_else(|| queue.bulk.pop_front()) else { break };
            queue.running += 1;
            drop(queue);
            self.launch(group);
            queue = self.queue.lock();
        }
        queue.is_pumping = false;
    }

    fn launch(self: &Arc<Self>, group: Group) {
        let now = Instant::now();
        let segment = Arc::clone(&group.batch.segments[group.pieces()[0].segment as usize]);
        let stop = group.batch.stop_reason(now);
        let refusal = match (&segment.file, stop) {
            _ if self.is_closed.load(Ordering::Acquire) => Failure::Closed,
            (_, Some(reason)) => reason,
            (None, _) => Failure::System,
            _ if !self.neighbour.lives(now) => {
                group.hand_back(Failure::ConnectionLost);
                return self.ended();
            }
            _ if !self.neighbour.has(segment.info.region) => Failure::NoRegion,
            (Some(file), None) => {
                // No descriptors or memory for it here: the peer has an engine of its own.
                if file.engine().is_err() {
                    group.hand_back(Failure::System);
                    return self.ended();
                }
                let batch = Arc::clone(&group.batch);
                let (first, count) = (group.first as usize, group.count as usize);
                let flight = Arc::new(Flight {
                    shared: Arc::clone(self),
                    left: AtomicUsize::new(count),
                    results: Mutex::new(vec![Ok(()); count]),
                    group: Mutex::new(Some(group)),
                });
                for (place, piece) in batch.pieces[first..first + count].iter().enumerate() {
                    let flight = Arc::clone(&flight);
                    let Some(memory) = batch.regions[piece.region as usize].memory() else {
                        flight.landed(place, Err(Failure::System));
                        continue;
                    };
                    let here = (memory, piece.local_offset);
                    file.transfer(piece.direction, here, piece.remote_offset, piece.length, move |result| {
                        flight.landed(place, result);
                    });
                }
                return;
            }
        };
        group.finish(Err(refusal));
        self.ended();
    }

    fn ended(self: &Arc<Self>) {
        self.queue.lock().running -= 1;
        self.pump();
    }
}

/// A group whose pieces are with the file's engine.
struct Flight {
    shared: Arc<Shared>,
    left: AtomicUsize,
    results: Mutex<Vec<Result<(), Failure>>>,
    group: Mutex<Option<Group>>,
}

impl Flight {
    fn landed(&self, place: usize, result: Result<(), Failure>) {
        self.results.lock()[place] = result;
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let Some(group) = self.group.lock().take() else { return };
        let region = group.batch.segments[group.pieces()[0].segment as usize].info.region;
        if self.shared.neighbour.has(region) {
            let mut results = std::mem::take(&mut *self.results.lock()).into_iter();
            group.finish_each(|_| results.next().unwrap_or(Err(Failure::System)));
        } else {
            // What was read of a region that is gone by now may be anything.
            group.finish(Err(Failure::NoRegion));
        }
        self.shared.ended();
    }
}
