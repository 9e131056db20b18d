//! Bytes on their way into DRAM: reserved, filled, sealed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidepool_metadata::{SliceHeader, checksum};
use tokio::time::Instant;

use super::index::{Activity, Entry, PerSlice, State};
use super::{Inner, ReplicaIdentity, TieredStore};
use crate::StoreError;
use crate::memory::{MemoryTier, SliceBuffer};

/// How long a put waits for room while some is being made. What was asked for last waits behind the others.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// Memory that others may change is copied through so much of our own, which stays in the nearest cache.
const STEP_BYTES: usize = 16 << 10;

/// Room for one object, being filled. Dropping it frees all of it.
pub struct ObjectBuffer {
    inner: Arc<Inner>,
    slices: Vec<SliceBuffer>,
    /// The slice that is being filled.
    current: usize,
    object_length: u64,
    filled: u64,
}

/// While it lives, the evictor makes this much room beyond its watermark.
struct Wanted<'a>(&'a Inner, u64);

impl<'a> Wanted<'a> {
    fn new(inner: &'a Inner, bytes: u64) -> Self {
        inner.wanted_bytes.fetch_add(bytes, Ordering::AcqRel);
        inner.pressure.notify_one();
        Self(inner, bytes)
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        self.0.wanted_bytes.fetch_sub(self.1, Ordering::AcqRel);
    }
}

impl TieredStore {
    /// Reserves DRAM for an object of `length` bytes under a key of `key_bytes`; waits for eviction while that makes progress.
    /// Cancel-safe: nothing stays reserved.
    ///
    /// # Errors
    /// [`StoreError::TooLarge`] at once if it can never fit; nothing is evicted for it.
    /// [`StoreError::NoSpace`] if nothing was freed for `room_wait`.
    pub async fn reserve(&self, length: u64, key_bytes: usize) -> Result<ObjectBuffer, StoreError> {
        let inner = &self.inner;
        let largest = inner.memory.largest_object_bytes(inner.config.slice_bytes);
        if length > largest {
            return Err(StoreError::TooLarge { length, largest });
        }
        if inner.wanted_bytes.load(Ordering::Acquire) == 0
            && let Some(slices) = inner.try_reserve(length, key_bytes)
        {
            return Ok(ObjectBuffer::new(inner, slices, length));
        }
        let _wanted = Wanted::new(inner, MemoryTier::footprint_bytes(length, inner.config.slice_bytes));
        let last = Instant::now() + LONGEST_WAIT;
        // The order of arrival: else small puts would take from under a large one what was freed for it.
        let Ok(_turn) = tokio::time::timeout_at(last, inner.room_queue.lock()).await else {
            return Err(inner.no_space(length));
        };
        let mut deadline = last.min(Instant::now() + inner.config.room_wait);
        loop {
            let freed = inner.room.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if let Some(slices) = inner.try_reserve(length, key_bytes) {
                return Ok(ObjectBuffer::new(inner, slices, length));
            }
            inner.pressure.notify_one();
            let in_time = tokio::time::timeout_at(deadline, freed).await.is_ok();
            let leaving = inner.demoting_bytes.load(Ordering::Acquire) > 0;
            if Instant::now() >= last || !(in_time || leaving) {
                return Err(inner.no_space(length));
            }
            deadline = last.min(Instant::now() + inner.config.room_wait);
        }
    }
}

impl Inner {
    /// All of the object's slices, or none.
    fn try_reserve(&self, length: u64, key_bytes: usize) -> Option<Vec<SliceBuffer>> {
        let slice_bytes = self.config.slice_bytes;
        (0..SliceHeader::slice_count(length, slice_bytes))
            .map(|index| self.memory.reserve(slice_length(length, slice_bytes, index), key_bytes).ok())
            .collect()
    }

    fn no_space(&self, length: u64) -> StoreError {
        let usage = self.memory.usage();
        StoreError::NoSpace { length, capacity: usage.capacity, free: usage.free }
    }
}

/// Length in bytes of slice `index` of an object of `object_length` bytes.
pub(super) fn slice_length(object_length: u64, slice_bytes: u32, index: u32) -> u32 {
    let rest = object_length.saturating_sub(u64::from(index) * u64::from(slice_bytes));
    u32::try_from(rest).unwrap_or(u32::MAX).min(slice_bytes)
}

impl ObjectBuffer {
    fn new(inner: &Arc<Inner>, slices: Vec<SliceBuffer>, object_length: u64) -> Self {
        Self { inner: Arc::clone(inner), slices, current: 0, object_length, filled: 0 }
    }

    /// Length of the object in bytes.
    #[must_use]
    pub fn object_length(&self) -> u64 {
        self.object_length
    }

    /// Bytes that are still to come.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.object_length - self.filled
    }

    /// Copies `data` behind what is there, checksumming on the way.
    ///
    /// # Errors
    /// [`StoreError::LengthMismatch`] if there is more than was announced; nothing of `data` is taken then.
    pub fn write(&mut self, mut data: &[u8]) -> Result<(), StoreError> {
        let total = self.filled + data.len() as u64;
        if total > self.object_length {
            return Err(StoreError::LengthMismatch { announced: self.object_length, received: total });
        }
        while !data.is_empty() {
            let slice_bytes = u64::from(self.inner.config.slice_bytes);
            let index = u32::try_from(self.current).unwrap_or(u32::MAX);
            let room = slice_length(self.object_length, self.inner.config.slice_bytes, index) as usize
                - (self.filled - self.current as u64 * slice_bytes) as usize;
            let (now, later) = data.split_at(room.min(data.len()));
            self.slices[self.current].append(now);
            self.filled += now.len() as u64;
            data = later;
            if now.len() == room {
                self.current += 1;
            }
        }
        Ok(())
    }

    /// Copies `data` to byte `at`: where the next bytes go, or 0, with which all begins anew.
    ///
    /// # Errors
    /// As [`ObjectBuffer::write`]; [`StoreError::LengthMismatch`] at any other byte.
    pub fn write_at(&mut self, at: u64, data: &[u8]) -> Result<(), StoreError> {
        if at == 0 && self.filled > 0 {
            (self.current, self.filled) = (0, 0);
            self.slices.iter_mut().for_each(SliceBuffer::restart);
        }
        if at != self.filled {
            return Err(StoreError::LengthMismatch { announced: at, received: self.filled });
        }
        self.write(data)
    }

    /// Has `copy` give the next `length` bytes step by step, each summed up and stored as it was given. `copy` is told where
    /// in these bytes a step begins.
    ///
    /// # Errors
    /// [`StoreError::LengthMismatch`] if there are more than was announced, as `E`; the first of `copy`, with which the
    /// buffer is of no more use.
    pub fn fill<E: From<StoreError>>(
        &mut self,
        length: u64,
        mut copy: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let total = self.filled + length;
        if total > self.object_length {
            return Err(StoreError::LengthMismatch { announced: self.object_length, received: total }.into());
        }
        let mut step = [0; STEP_BYTES];
        let mut at = 0;
        while at < length {
            let count = usize::try_from(length - at).unwrap_or(usize::MAX).min(STEP_BYTES);
            copy(at, &mut step[..count])?;
            self.write(&step[..count])?;
            at += count as u64;
        }
        Ok(())
    }

    /// Some of the bytes that are there, from byte `from` on: at most `most`, none if `from` is where the next ones go.
    ///
    /// # Panics
    /// If `from` is beyond what is there.
    #[must_use]
    pub fn copy_from(&self, from: u64, most: usize) -> Vec<u8> {
        assert!(from <= self.filled, "byte {from} of the {} that are there", self.filled);
        let slice_bytes = u64::from(self.inner.config.slice_bytes);
        let count = usize::try_from(self.filled - from).unwrap_or(usize::MAX).min(most);
        let mut copied = Vec::with_capacity(count);
        while copied.len() < count {
            let at = from + copied.len() as u64;
            let slice = &self.slices[(at / slice_bytes) as usize];
            let start = (at % slice_bytes) as usize;
            let end = slice.filled().min(start + count - copied.len());
            slice.pieces(start..end).for_each(|piece| copied.extend_from_slice(piece));
        }
        copied
    }

    /// The error of an object of which bytes are missing.
    #[must_use]
    pub fn short(&self) -> StoreError {
        StoreError::LengthMismatch { announced: self.object_length, received: self.filled }
    }

    /// Ends all change to the bytes and enters the replica in the index, sealed. The caller now proposes `complete`,
    /// and calls [`TieredStore::complete`] or [`TieredStore::free`] on the committed answer, and on nothing else.
    ///
    /// # Errors
    /// [`StoreError::LengthMismatch`] if bytes are missing; [`StoreError::ChecksumMismatch`] if `expected` (CRC-32 of
    /// the object) is something else. Everything is freed then.
    pub fn seal(self, identity: ReplicaIdentity, expected: Option<u32>) -> Result<Sealed, StoreError> {
        if self.filled != self.object_length {
            return Err(self.short());
        }
        let slice_bytes = self.inner.config.slice_bytes;
        let ReplicaIdentity { name, data_type } = identity;
        let mut slices = Vec::with_capacity(self.slices.len());
        let mut slice_checksums = Vec::with_capacity(self.slices.len());
        let mut whole = 0;
        for (slice_index, buffer) in (0_u32..).zip(self.slices) {
            let slice_length = slice_length(self.object_length, slice_bytes, slice_index);
            let slice = buffer.seal(SliceHeader {
                tenant: name.tenant,
                key: name.key.clone(),
                version: name.version,
                replica: name.replica,
                object_length: self.object_length,
                slice_bytes,
                slice_index,
                slice_length,
                checksum: 0,
                data_type,
                commit_index: 0,
            });
            let slice_checksum = slice.checksum();
            whole = if slice_index == 0 {
                slice_checksum
            } else {
                checksum::combine(whole, slice_checksum, u64::from(slice_length))
            };
            slice_checksums.push(slice_checksum);
            slices.push(slice);
        }
        if let Some(expected) = expected
            && expected != whole
        {
            return Err(StoreError::ChecksumMismatch { expected, actual: whole });
        }
        let entry = Entry {
            tenant: name.tenant,
            key: name.key.clone(),
            version: name.version,
            other_replica: Entry::other_replica(name.version, name.replica),
            object_length: self.object_length,
            commit_index: 0,
            dram: PerSlice::collect(slices),
            nvme: None,
            slice_bytes,
            data_type,
            state: State::Sealed,
            activity: Activity::Idle,
            reads: 0,
            durable: false,
        };
        self.inner.state.lock().index.insert(entry);
        Ok(Sealed { name, object_length: self.object_length, slice_checksums, checksum: whole })
    }
}

/// What the catalog is told about a sealed replica.
#[derive(Clone, Debug)]
pub struct Sealed {
    /// Its name.
    pub name: super::ReplicaName,
    /// Length of the object in bytes.
    pub object_length: u64,
    /// CRC-32 of each slice.
    pub slice_checksums: Vec<u32>,
    /// CRC-32 of the object.
    pub checksum: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths of 32 bits end at 2 and at 4 GiB: the slices of such objects are whole, and make up the object.
    #[test]
    fn slices_of_objects_around_2_and_4_gib_make_up_their_length() {
        const GIB: u64 = 1 << 30;
        for slice_bytes in [64 << 10, 4 << 20, 16 << 20] {
            for length in [2 * GIB - 1, 2 * GIB, 4 * GIB - 1, 4 * GIB, 4 * GIB + 1, 5 * GIB + 7, 16 * GIB] {
                let count = SliceHeader::slice_count(length, slice_bytes);
                let lengths = (0..count).map(|index| slice_length(length, slice_bytes, index));
                assert_eq!(lengths.map(u64::from).sum::<u64>(), length, "{length} in slices of {slice_bytes}");
                let last = slice_length(length, slice_bytes, count - 1);
                assert_eq!(u64::from(count - 1) * u64::from(slice_bytes) + u64::from(last), length);
                assert!(last > 0);
            }
        }
    }
}
