//! What waits for the flusher, from callers and from the device.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tidepool_metadata::SliceHeader;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::nvme::NvmeError;
use crate::nvme::core::Written;
use crate::nvme::format::Tombstone;
use crate::nvme::open_region::SliceSource;

/// So many are written at once, without waiting.
pub(super) const TOMBSTONES_BATCH: usize = 4096;

/// A slice to write.
pub(in crate::nvme) struct WriteRequest {
    pub(in crate::nvme) header: SliceHeader,
    pub(in crate::nvme) source: Arc<dyn SliceSource>,
    pub(in crate::nvme) reply: oneshot::Sender<Result<Written, NvmeError>>,
    /// Bounds what waits; none for records that reclaim moves, which bounds itself.
    pub(in crate::nvme) permit: Option<OwnedSemaphorePermit>,
}

pub(super) type Reply = oneshot::Sender<Result<(), NvmeError>>;

pub(in crate::nvme) enum Event {
    Write(WriteRequest),
    /// As `Write`, by reclaim: may take reserved regions.
    Move(WriteRequest),
    Sync(Reply),
    /// A retired and drained region: make its free header durable, then free it.
    Free(u32, Reply),
    /// Seal, sync, stop.
    Close(Reply),
    /// Stop as soon as nothing is in flight.
    Shutdown,
    Written(u64, io::Result<()>),
    Synced(io::Result<()>),
}

/// What the flusher is to do. Bounded by the write permits, the engine's depth, and one caller each for the rest.
#[derive(Default)]
pub(in crate::nvme) struct Inbox {
    events: Mutex<VecDeque<Event>>,
    /// The flusher has ended: whatever comes is dropped, and who waits for its answer hears that.
    is_closed: AtomicBool,
    arrived: Condvar,
    /// At most one for each record on disk.
    pub(super) tombstones: Mutex<Vec<Tombstone>>,
}

impl Inbox {
    pub(in crate::nvme) fn push(&self, event: Event) {
        let mut events = self.events.lock();
        if self.is_closed.load(Ordering::Relaxed) {
            drop(events);
            return drop(event);
        }
        events.push_back(event);
        drop(events);
        self.arrived.notify_one();
    }

    pub(super) fn close(&self) {
        let mut events = self.events.lock();
        self.is_closed.store(true, Ordering::Relaxed);
        let left = std::mem::take(&mut *events);
        // Not under the lock: what is dropped may push.
        drop(events);
        drop(left);
    }

    pub(in crate::nvme) fn bury(&self, tombstones: impl IntoIterator<Item = Tombstone>) {
        let mut waiting = self.tombstones.lock();
        let before = waiting.len();
        waiting.extend(tombstones);
        let wake = before == 0 || before < TOMBSTONES_BATCH && waiting.len() >= TOMBSTONES_BATCH;
        drop(waiting);
        if wake {
            // Under the lock, so that a flusher about to wait isn't missed.
            let _events = self.events.lock();
            self.arrived.notify_one();
        }
    }

    pub(super) fn wait(&self, timeout: Option<Duration>, has_news: impl Fn() -> bool) -> VecDeque<Event> {
        let mut events = self.events.lock();
        if events.is_empty() && !has_news() {
            match timeout {
                Some(timeout) => drop(self.arrived.wait_for(&mut events, timeout)),
                None => self.arrived.wait(&mut events),
            }
        }
        std::mem::take(&mut events)
    }
}
