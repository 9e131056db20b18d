//! Other processes on this host, which read the DRAM segment by its directory: what the node does for them.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tidepool_metadata::{ObjectKey, TenantId};

use super::TieredStore;
use crate::TierKind;

impl TieredStore {
    /// Node and catalog agree on what is here: other processes may read the DRAM tier's directory for `duration`.
    pub fn renew_directory(&self, duration: Duration) {
        self.inner.memory.renew(duration);
    }

    /// The DRAM segment's file for processes that may map it: as [`crate::memory::MemoryTier::descriptor`].
    ///
    /// # Errors
    /// The system's.
    pub fn segment_descriptor(&self) -> io::Result<(OwnedFd, u64)> {
        self.inner.memory.descriptor()
    }

    /// The DRAM segment's file for this process: as [`crate::memory::MemoryTier::file`].
    ///
    /// # Errors
    /// The system's.
    pub fn segment_file(&self) -> io::Result<(File, u64)> {
        self.inner.memory.file()
    }

    /// Counts reads that other processes did by the DRAM tier's directory, so that eviction knows of them.
    pub fn note_local_reads(&self, tenant: TenantId, keys: &[ObjectKey]) {
        let mut tables = self.inner.state.lock();
        for key in keys {
            let Some(id) = tables.index.find_any(tenant, key.as_bytes()) else { continue };
            if let Some(entry) = tables.index.get_mut(id).filter(|entry| entry.dram.is_some()) {
                entry.reads = entry.reads.saturating_add(1);
                tables.resident.touch(id);
                self.inner.counters.hit(TierKind::Dram);
            }
        }
    }
}
