//! What the parts of the tier share: engine, regions, buffers, counters, and whether it is in service.

use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::NvmeError;
use super::flush::Inbox;
use super::folder::Folder;
use super::format::REGIONS_START;
use super::location::Location;
use super::region::Regions;
use crate::io::{Allocation, BufferPool, IoEngine};

/// So many reads in a row that fail with an I/O error, none good between them, say that the disk is broken.
const READ_ERRORS_IN_A_ROW: u32 = 8;

/// Whether the tier serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierState {
    /// It does.
    Serving,
    /// The disk failed it; nothing is read or written until it is attached anew.
    Failed {
        /// The first error.
        error: Arc<str>,
    },
    /// Closed by its owner.
    Detached,
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) written_slices: AtomicU64,
    pub(super) written_slice_bytes: AtomicU64,
    pub(super) moved_slices: AtomicU64,
    pub(super) moved_slice_bytes: AtomicU64,
    pub(super) device_bytes: AtomicU64,
    pub(super) reads: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) read_errors: AtomicU64,
    pub(super) write_errors: AtomicU64,
    pub(super) corrupt: AtomicU64,
    pub(super) stale: AtomicU64,
    pub(super) reclaimed_regions: AtomicU64,
    pub(super) dropped_slices: AtomicU64,
    pub(super) scrubbed_bytes: AtomicU64,
}

pub(super) struct Core {
    pub(super) engine: Arc<dyn IoEngine>,
    pub(super) regions: Arc<Regions>,
    pub(super) inbox: Inbox,
    pub(super) stats: Counters,
    pub(super) write_buffers: Vec<Arc<Allocation>>,
    pub(super) read_buffers: BufferPool,
    pub(super) write_depth: usize,
    /// Free regions below which reclaim starts, and at which it stops.
    pub(super) reclaim_from: u32,
    pub(super) reclaim_to: u32,
    /// Rung when reclaim may have something to do.
    pub(super) pressure: Arc<Notify>,
    /// Every record has been announced, so that the owner can judge them.
    pub(super) is_scanned: AtomicBool,
    pub(super) state: Mutex<TierState>,
    pub(super) read_errors_in_a_row: AtomicU32,
    pub(super) folder: Option<Folder>,
}

impl Core {
    pub(super) fn offset_of(&self, region: u32) -> u64 {
        REGIONS_START + u64::from(region) * self.regions.region_bytes()
    }

    /// A salt that no client can guess: the hasher's keys come from the system's randomness.
    #[expect(clippy::unused_self, reason = "a seam for deterministic tests")]
    pub(super) fn random_salt(&self) -> u64 {
        random_u64()
    }

    pub(super) fn is_failed(&self) -> bool {
        matches!(*self.state.lock(), TierState::Failed { .. })
    }

    /// # Errors
    /// `OutOfService` unless the tier serves.
    pub(super) fn check(&self) -> Result<(), NvmeError> {
        match &*self.state.lock() {
            TierState::Serving => Ok(()),
            TierState::Failed { error } => Err(NvmeError::OutOfService { reason: Arc::clone(error) }),
            TierState::Detached => Err(NvmeError::OutOfService { reason: "detached".into() }),
        }
    }

    /// Takes the tier out of service, for the first reason that is given.
    pub(super) fn fail(&self, error: &NvmeError) {
        let mut state = self.state.lock();
        if matches!(*state, TierState::Failed { .. }) {
            return;
        }
        let text: Arc<str> = super::chain(error).into();
        tracing::error!(error = %text, "the nvme tier failed and is out of service");
        *state = TierState::Failed { error: text };
        drop(state);
        self.pressure.notify_one();
    }

    /// # Errors
    /// The data file is no longer where it was.
    pub(super) fn check_folder(&self) -> Result<(), NvmeError> {
        self.folder.as_ref().map_or(Ok(()), Folder::check)
    }

    /// Counts a read's I/O result towards the verdict on the disk.
    pub(super) fn note_read(&self, result: &std::io::Result<()>) {
        let Err(error) = result else {
            self.read_errors_in_a_row.store(0, Ordering::Relaxed);
            return;
        };
        self.stats.read_errors.fetch_add(1, Ordering::Relaxed);
        if self.read_errors_in_a_row.fetch_add(1, Ordering::Relaxed) + 1 >= READ_ERRORS_IN_A_ROW {
            let source = std::io::Error::from(error.kind());
            self.fail(&NvmeError::Io { action: "read the nvme tier, again and again", source });
        }
    }

    /// Marks a record dead, on disk too before long.
    pub(super) fn release(&self, location: Location) {
        if let Some(tombstone) = self.regions.release(location) {
            self.inbox.bury([tombstone]);
        }
    }

    pub(super) fn wake_reclaimer_if_low(&self) {
        if self.regions.free_count() < self.reclaim_from {
            self.pressure.notify_one();
        }
    }
}

/// A number from the system's randomness.
pub(super) fn random_u64() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

/// A slice that was written and can be read. While this lives, reclaim leaves its region alone, so that the owner can
/// put the location where [`RecordOwner::decide`](super::RecordOwner::decide) finds it. Dropped without
/// [`Self::keep`], the record is released: nobody knows of it.
#[must_use = "a written slice that isn't kept is released"]
pub struct Written {
    core: Weak<Core>,
    location: Location,
    is_kept: bool,
}

impl Written {
    pub(super) fn new(core: &Arc<Core>, location: Location) -> Self {
        Self { core: Arc::downgrade(core), location, is_kept: false }
    }

    /// Where it lies.
    #[must_use]
    pub fn location(&self) -> Location {
        self.location
    }

    /// The owner knows the location now and will release it one day.
    pub fn keep(mut self) -> Location {
        self.is_kept = true;
        self.location
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        let Some(core) = self.core.upgrade() else { return };
        core.regions.settle(self.location);
        if !self.is_kept {
            core.release(self.location);
        }
    }
}
