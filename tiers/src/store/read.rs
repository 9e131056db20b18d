//! Reading a replica: from DRAM without a copy, from NVMe piece by piece; every byte verified before it is given out.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use tidepool_metadata::{CHUNK_BYTES, DataType, ErrorKind, ObjectKey, TenantId, TierKind, VersionId};
use tokio::sync::Notify;

use super::buffer::slice_length;
use super::index::{Activity, Entry, EntryId, PerSlice};
use super::{Inner, ReplicaName, TieredStore, name_of, promote};
use crate::StoreError;
use crate::memory::{SharedSlice, Slice};
use crate::nvme::{Location, NvmeTier, SliceName, TierState, VecTarget};

/// Most bytes given out, and read from NVMe, at once: measured, larger ones bring no more, and 256 KiB a tenth less over
/// gRPC. A multiple of the chunk, so that no chunk is verified twice in a row.
const PIECE_BYTES: u64 = 1 << 20;
const _: () = assert!(PIECE_BYTES.is_multiple_of(CHUNK_BYTES as u64));

/// A range of an object's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Bytes from there.
    pub length: u64,
}

/// Gives out the bytes of one replica in order. Holds its DRAM while it lives.
pub struct ObjectReader {
    pub(super) inner: Arc<Inner>,
    name: ReplicaName,
    pub(super) object_length: u64,
    slice_bytes: u32,
    data_type: DataType,
    position: u64,
    end: u64,
    pub(super) source: Source,
    /// Verified, not yet given out: a slice may lie in several extents.
    pending: VecDeque<Bytes>,
}

pub(super) enum Source {
    Dram(PerSlice<SharedSlice>),
    Nvme(PerSlice<Location>, Arc<NvmeTier>),
}

/// What the lock said about a replica.
enum Next {
    Read(Box<ObjectReader>),
    Wait(Arc<Notify>),
}

impl TieredStore {
    /// Opens the replica of that version for reading; `None` if it is not here. Counts as a use.
    ///
    /// # Errors
    /// [`StoreError::Recovering`] while the node does not know yet all that it has;
    /// [`StoreError::TierUnavailable`] if the only copy is on an NVMe tier that is detached or failed.
    pub async fn open(
        &self,
        tenant: TenantId,
        key: &ObjectKey,
        version: VersionId,
    ) -> Result<Option<ObjectReader>, StoreError> {
        let mut may_promote = true;
        loop {
            let notify;
            let promoted;
            {
                let mut tables = self.inner.state.lock();
                let Some(id) = tables.index.find(tenant, key.as_bytes(), version) else {
                    self.inner.counters.miss();
                    return if self.inner.recovery.is_finished() { Ok(None) } else { Err(StoreError::Recovering) };
                };
                match self.inner.next(&mut tables, id, may_promote)? {
                    Next::Read(reader) => return Ok(Some(*reader)),
                    Next::Wait(promotion) => notify = promotion,
                }
                // Created under the lock, so that it hears a promotion that ends right after.
                promoted = notify.notified();
            }
            promoted.await;
            may_promote = false;
        }
    }
}

impl Inner {
    fn next(self: &Arc<Self>, tables: &mut super::Tables, id: EntryId, may_promote: bool) -> Result<Next, StoreError> {
        let Some(entry) = tables.index.get_mut(id) else { return Err(StoreError::Recovering) };
        entry.reads = entry.reads.saturating_add(1);
        if let Some(slices) = &entry.dram {
            let reader = ObjectReader::new(self, entry, Source::Dram(slices.clone()));
            tables.resident.touch(id);
            self.counters.hit(TierKind::Dram);
            return Ok(Next::Read(Box::new(reader)));
        }
        if may_promote && let Some(promotion) = tables.promotions.get(&id) {
            return Ok(Next::Wait(Arc::clone(promotion)));
        }
        let nvme = self.serving_nvme()?;
        let Some(locations) = entry.nvme.clone() else { return Err(StoreError::Recovering) };
        if may_promote && self.admits(entry) {
            entry.activity = Activity::Promoting;
            let notify = Arc::new(Notify::new());
            let load = promote::Load::new(entry, id, locations, nvme);
            tables.promotions.insert(id, Arc::clone(&notify));
            tokio::spawn(promote::run(Arc::clone(self), load));
            return Ok(Next::Wait(notify));
        }
        let reader = ObjectReader::new(self, entry, Source::Nvme(locations, nvme));
        self.counters.hit(TierKind::Nvme);
        Ok(Next::Read(Box::new(reader)))
    }
}

impl ObjectReader {
    fn new(inner: &Arc<Inner>, entry: &Entry, source: Source) -> Self {
        Self {
            inner: Arc::clone(inner),
            name: name_of(entry),
            object_length: entry.object_length,
            slice_bytes: entry.slice_bytes,
            data_type: entry.data_type,
            position: 0,
            end: entry.object_length,
            source,
            pending: VecDeque::new(),
        }
    }

    /// Length of the whole object in bytes.
    #[must_use]
    pub fn object_length(&self) -> u64 {
        self.object_length
    }

    /// What the object holds.
    #[must_use]
    pub fn data_type(&self) -> DataType {
        self.data_type
    }

    /// Which tier it is read from.
    #[must_use]
    pub fn tier(&self) -> TierKind {
        match self.source {
            Source::Dram(_) => TierKind::Dram,
            Source::Nvme(..) => TierKind::Nvme,
        }
    }

    /// Narrows the reading to a range, before anything was read.
    ///
    /// # Errors
    /// [`StoreError::BadRange`] if it reaches past the end.
    pub fn select(&mut self, range: ByteRange) -> Result<(), StoreError> {
        match range.offset.checked_add(range.length) {
            Some(end) if end <= self.object_length => {
                (self.position, self.end) = (range.offset, end);
                Ok(())
            }
            _ => Err(StoreError::BadRange {
                offset: range.offset,
                length: range.length,
                object_length: self.object_length,
            }),
        }
    }

    /// The next verified bytes, at most 1 MiB; `None` at the end. From DRAM they are views without a copy, which hold
    /// the memory while they live.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the bytes do not verify and no other tier has good ones: the replica is given up;
    /// [`StoreError::Gone`]; that the NVMe tier was detached or failed.
    pub async fn next(&mut self) -> Result<Option<Bytes>, StoreError> {
        if let Some(bytes) = self.pending.pop_front() {
            return Ok(Some(bytes));
        }
        if self.position == self.end {
            return Ok(None);
        }
        let slice_bytes = u64::from(self.slice_bytes);
        let index = u32::try_from(self.position / slice_bytes).unwrap_or(u32::MAX);
        let start = self.position - u64::from(index) * slice_bytes;
        let slice_end = u64::from(slice_length(self.object_length, self.slice_bytes, index));
        let piece_end = (start / PIECE_BYTES + 1) * PIECE_BYTES;
        let length = (self.end - self.position).min(slice_end - start).min(piece_end - start);
        #[expect(clippy::cast_possible_truncation, reason = "within a slice, whose length is u32")]
        let range = start as u32..(start + length) as u32;
        match &self.source {
            Source::Dram(slices) => {
                let slice = &slices.as_slice()[index as usize];
                if slice.verify(range.clone()).is_err() {
                    self.fall_back(TierKind::Dram)?;
                    return Box::pin(self.next()).await;
                }
                self.pending.extend(Slice::bytes(slice, range));
            }
            Source::Nvme(locations, nvme) => {
                let location = locations.as_slice()[index as usize];
                let ReplicaName { version, replica, .. } = self.name;
                #[expect(clippy::cast_possible_truncation, reason = "a slice's length is u32")]
                let slice_length = slice_end as u32;
                let name = SliceName { version, replica, slice_index: index, slice_length };
                match nvme.read(location, name, range, VecTarget::new(length as usize)).await {
                    Ok((header, target)) if header.key == self.name.key && header.tenant == self.name.tenant => {
                        self.pending.push_back(target.into_vec().into());
                    }
                    failed => {
                        if !self.moved()? {
                            match failed {
                                Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error.into()),
                                Ok(_) | Err(_) => self.fall_back(TierKind::Nvme)?,
                            }
                        }
                        return Box::pin(self.next()).await;
                    }
                }
            }
        }
        self.position += length;
        Ok(self.pending.pop_front())
    }

    /// All bytes that are still to come, in one buffer. For objects known to be small.
    ///
    /// # Errors
    /// As [`ObjectReader::next`].
    pub async fn read_to_end(&mut self) -> Result<Bytes, StoreError> {
        let first = self.next().await?.unwrap_or_default();
        if self.position == self.end && self.pending.is_empty() {
            return Ok(first);
        }
        let mut all = Vec::with_capacity(first.len() + usize::try_from(self.end - self.position).unwrap_or(0));
        all.extend_from_slice(&first);
        while let Some(bytes) = self.next().await? {
            all.extend_from_slice(&bytes);
        }
        Ok(all.into())
    }

    /// Whether the replica is elsewhere than where it was read on NVMe, moved by reclaim or on a disk that was attached
    /// anew; takes the new places.
    ///
    /// # Errors
    /// [`StoreError::Gone`] if it is nowhere.
    fn moved(&mut self) -> Result<bool, StoreError> {
        let Source::Nvme(old, tier) = &self.source else { return Ok(false) };
        let tables = self.inner.state.lock();
        let found = tables.index.find_replica(self.name.tenant, self.name.key.as_bytes(), self.name.replica);
        let Some(entry) = found.and_then(|id| tables.index.get(id)) else {
            return Err(StoreError::Gone { key: self.name.key.clone() });
        };
        let source = match (&entry.dram, &entry.nvme, self.inner.serving_nvme()) {
            (Some(slices), ..) => Source::Dram(slices.clone()),
            (None, Some(places), Ok(nvme)) if !Arc::ptr_eq(&nvme, tier) || places.as_slice() != old.as_slice() => {
                Source::Nvme(places.clone(), nvme)
            }
            _ => return Ok(false),
        };
        drop(tables);
        self.source = source;
        Ok(true)
    }

    /// The copy on `bad` is damaged: gives it up, and goes on with the other tier's if there is one.
    fn fall_back(&mut self, bad: TierKind) -> Result<(), StoreError> {
        let corrupt = || StoreError::Corrupt { key: self.name.key.clone(), tier: bad };
        self.source = match self.inner.give_up(&self.name, bad) {
            Some(locations) => Source::Nvme(locations, self.inner.serving_nvme().map_err(|_| corrupt())?),
            None => return Err(corrupt()),
        };
        Ok(())
    }
}

impl Inner {
    /// The attached tier, if it serves.
    pub(super) fn serving_nvme(&self) -> Result<Arc<NvmeTier>, StoreError> {
        match &*self.nvme.read() {
            Some(nvme) if nvme.tier.state() == TierState::Serving => Ok(Arc::clone(&nvme.tier)),
            _ => Err(StoreError::TierUnavailable { tier: TierKind::Nvme }),
        }
    }

    /// Drops the damaged copy on `bad`. Answers where a good one may be on NVMe; without one the whole replica goes,
    /// and the catalog is told.
    pub(super) fn give_up(&self, name: &ReplicaName, bad: TierKind) -> Option<PerSlice<Location>> {
        self.counters.corrupt(bad);
        tracing::error!(key = %name.key, tier = bad.name(), "damaged bytes found: this copy is dropped");
        let mut tables = self.state.lock();
        let id = tables.index.find_replica(name.tenant, name.key.as_bytes(), name.replica)?;
        if bad == TierKind::Dram {
            tables.resident.remove(id);
        }
        let entry = tables.index.get_mut(id)?;
        let dropped = match bad {
            TierKind::Nvme => entry.nvme.take(),
            _ => {
                entry.dram = None;
                None
            }
        };
        let rest = entry.nvme.clone();
        let orphaned = entry.dram.is_none() && entry.nvme.is_none();
        if let Some(locations) = dropped {
            self.release(locations.as_slice().iter().copied());
        }
        if orphaned {
            self.drop_entry(&mut tables, id);
            self.lost.tell([name.clone()]);
        }
        rest
    }
}
