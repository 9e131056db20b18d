//! Promotion: an object read often enough from NVMe is read into DRAM, once, however many wait for it.

use std::sync::Arc;

use tidepool_metadata::SliceHeader;

use super::Inner;
use super::buffer::slice_length;
use super::index::{Activity, Entry, EntryId, PerSlice, State, header_of};
use crate::memory::SharedSlice;
use crate::nvme::{Location, NvmeTier, SliceName};

/// Larger objects are served from NVMe piece by piece: whoever reads them should not wait for all of them first.
const LARGEST_PROMOTED_BYTES: u64 = 64 << 20;

/// One promotion.
pub(super) struct Load {
    id: EntryId,
    header: SliceHeader,
    locations: PerSlice<Location>,
    nvme: Arc<NvmeTier>,
}

impl Load {
    pub(super) fn new(entry: &Entry, id: EntryId, locations: PerSlice<Location>, nvme: Arc<NvmeTier>) -> Self {
        let header = header_of(entry);
        Self { id, header, locations, nvme }
    }
}

impl Inner {
    /// Admission: read often enough since it was written to NVMe, idle, visible, and small enough to wait for.
    pub(super) fn admits(&self, entry: &Entry) -> bool {
        let threshold = self.config.promote_after_reads;
        threshold > 0
            && entry.reads >= threshold
            && entry.activity == Activity::Idle
            && entry.state == State::Complete
            && entry.object_length <= LARGEST_PROMOTED_BYTES.min(self.memory.usage().capacity / 8)
    }
}

/// Runs as a task of its own, so that a reader that goes away does not stop it for the others.
pub(super) async fn run(inner: Arc<Inner>, load: Load) {
    let loaded = load_slices(&inner, &load).await;
    let mut tables = inner.state.lock();
    let waiting = tables.promotions.remove(&load.id);
    let current = tables.index.get_mut(load.id).filter(|entry| entry.is(load.header.version, load.header.replica));
    if let Some(entry) = current {
        entry.activity = Activity::Idle;
        if let Some(slices) = loaded {
            entry.dram = Some(slices);
            tables.enter_order(load.id);
            inner.counters.promoted();
        }
    }
    drop(tables);
    if let Some(waiting) = waiting {
        waiting.notify_waiters();
    }
    inner.relieve_pressure();
}

/// `None` if there is no room at once (then the evictor is asked for some) or the read failed: the reader that waits
/// reads from NVMe itself, and hears of the error there.
pub(super) async fn load_slices(inner: &Inner, load: &Load) -> Option<PerSlice<SharedSlice>> {
    let mut slices = Vec::with_capacity(load.locations.as_slice().len());
    for (slice_index, &location) in (0_u32..).zip(load.locations.as_slice()) {
        let SliceHeader { object_length, slice_bytes, version, replica, .. } = load.header;
        let length = slice_length(object_length, slice_bytes, slice_index);
        let Ok(buffer) = inner.memory.reserve(length, load.header.key.as_bytes().len()) else {
            inner.pressure.notify_one();
            return None;
        };
        let name = SliceName { version, replica, slice_index, slice_length: length };
        let (header, buffer) = load.nvme.read(location, name, 0..length, buffer).await.ok()?;
        if header.key != load.header.key || header.tenant != load.header.tenant {
            return None;
        }
        let slice = buffer.seal(SliceHeader { slice_index, slice_length: length, ..load.header.clone() });
        slice.complete(load.header.commit_index);
        slices.push(slice);
    }
    PerSlice::collect(slices)
}
