//! Slices whose bytes follow from a number, and the checks that all NVMe tests share.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::allow_attributes, reason = "what is unused differs per test file, so an expectation can't hold")]

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use tidepool_metadata::{DataType, Incarnation, NodeId, ObjectKey, ReplicaId, SliceHeader, TenantId, VersionId};
use tidepool_tiers::nvme::{BoxFuture, Location, NvmeError, NvmeTier, RecordOwner, SliceName, VecTarget, Verdict};

pub(crate) const NODE: NodeId = NodeId(0x7ea);

/// A slice that was written.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) header: SliceHeader,
    pub(crate) location: Location,
}

impl Stored {
    pub(crate) fn name(&self) -> SliceName {
        SliceName::from(&self.header)
    }
}

/// The bytes of slice `number`: each depends on the number and on its place.
pub(crate) fn bytes_of(number: u64, length: usize) -> Vec<u8> {
    let word = |index: u64| {
        let mixed = (number << 32 ^ index).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes()
    };
    (0..length.div_ceil(8) as u64).flat_map(word).take(length).collect()
}

pub(crate) fn header(number: u64, length: usize) -> SliceHeader {
    let (incarnation, sequence) = (Incarnation(1), number);
    SliceHeader {
        tenant: TenantId::DEFAULT,
        key: ObjectKey::new(format!("block/{number}").as_bytes()).expect("legal key"),
        version: VersionId { node: NODE, incarnation, sequence },
        replica: ReplicaId { node: NODE, incarnation, sequence },
        object_length: length as u64,
        slice_bytes: 4 << 20,
        slice_index: 0,
        slice_length: length as u32,
        checksum: crc32fast::hash(&bytes_of(number, length)),
        data_type: DataType::KvCache,
        commit_index: number,
    }
}

pub(crate) async fn try_store(tier: &NvmeTier, number: u64, length: usize) -> Result<Stored, NvmeError> {
    let header = header(number, length);
    let location = tier.write(header.clone(), Arc::new(bytes_of(number, length))).await?.keep();
    Ok(Stored { header, location })
}

pub(crate) async fn store(tier: &NvmeTier, number: u64, length: usize) -> Stored {
    try_store(tier, number, length).await.expect("stored")
}

/// Stores a slice and tells the owner before reclaim can ask it.
pub(crate) async fn store_for(owner: &Owner, tier: &NvmeTier, number: u64, length: usize) -> Result<(), NvmeError> {
    let header = header(number, length);
    let written = tier.write(header.clone(), Arc::new(bytes_of(number, length))).await?;
    owner.insert(&Stored { header, location: written.location() });
    written.keep();
    Ok(())
}

/// As [`store_for`], many side by side, each until it succeeds: on a machine that is busy with other things, the disk may
/// take longer to free a region than a write waits for one. The store above does not give up either.
pub(crate) async fn store_many_for(owner: &Arc<Owner>, tier: &Arc<NvmeTier>, numbers: Range<u64>, length: usize) {
    let tasks: Vec<_> = numbers
        .map(|number| {
            let (owner, tier) = (Arc::clone(owner), Arc::clone(tier));
            tokio::spawn(async move {
                loop {
                    match store_for(&owner, &tier, number, length).await {
                        Err(NvmeError::Full) => {}
                        stored => return stored.expect("stored"),
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("task");
    }
}

/// Stores slices side by side, so that they are packed together.
pub(crate) async fn store_many(tier: &Arc<NvmeTier>, numbers: Range<u64>, length: usize) -> Vec<Stored> {
    let tasks: Vec<_> = numbers
        .map(|number| {
            let tier = Arc::clone(tier);
            tokio::spawn(async move { store(&tier, number, length).await })
        })
        .collect();
    let mut stored = Vec::new();
    for task in tasks {
        stored.push(task.await.expect("task"));
    }
    stored
}

pub(crate) async fn read(tier: &NvmeTier, slice: &Stored) -> Result<Vec<u8>, NvmeError> {
    let length = slice.header.slice_length;
    let (header, target) = tier.read(slice.location, slice.name(), 0..length, VecTarget::new(length as usize)).await?;
    assert_eq!(header, slice.header, "a read gives the header that was written");
    Ok(target.into_vec())
}

pub(crate) async fn assert_readable(tier: &NvmeTier, slice: &Stored) {
    let bytes = read(tier, slice).await.expect("readable");
    assert!(bytes == bytes_of(slice.header.version.sequence, bytes.len()), "wrong bytes of {:?}", slice.header);
    assert_eq!(bytes.len(), slice.header.slice_length as usize);
}

/// All that the owner has can be read, while reclaim goes on: what fails has been moved or dropped since.
pub(crate) async fn assert_all_readable(tier: &NvmeTier, owner: &Owner) {
    for slice in owner.slices() {
        match read(tier, &slice).await {
            Ok(bytes) => assert!(bytes == bytes_of(slice.header.version.sequence, bytes.len())),
            Err(error) => {
                let place = owner.places.lock().get(&slice.header.version.sequence).map(|slice| slice.location);
                assert!(place != Some(slice.location), "{:?}: {error}", slice.header);
            }
        }
    }
}

/// All announced slices by the number in their version; the newest of each.
pub(crate) async fn scan_all(tier: &NvmeTier) -> HashMap<u64, (SliceHeader, Location)> {
    let mut found: HashMap<u64, (SliceHeader, Location)> = HashMap::new();
    let mut batches = tier.scan();
    while let Some(batch) = batches.recv().await {
        for (header, location) in batch.records {
            let newest = found.entry(header.version.sequence).or_insert_with(|| (header.clone(), location));
            if location.is_newer_than(&newest.1) {
                *newest = (header, location);
            }
        }
    }
    found
}

/// xorshift64: the same run for the same seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// The store above, as far as the tier needs one: knows where each slice lies, and keeps the hot ones.
#[derive(Default)]
pub(crate) struct Owner {
    pub(crate) places: Mutex<HashMap<u64, Stored>>,
    /// Judged `Drop`, or reported lost.
    pub(crate) dropped: Mutex<HashSet<u64>>,
    /// Every how manieth number is hot, for a while, and kept by reclaim; 0 for none.
    pub(crate) keep_every: u64,
    pub(crate) newest: AtomicU64,
}

impl Owner {
    pub(crate) fn insert(&self, slice: &Stored) {
        self.newest.fetch_max(slice.header.version.sequence, Ordering::Relaxed);
        self.places.lock().insert(slice.header.version.sequence, slice.clone());
    }

    pub(crate) fn slices(&self) -> Vec<Stored> {
        self.places.lock().values().cloned().collect()
    }

    pub(crate) fn is_hot(&self, number: u64) -> bool {
        let is_recent = number + 500 > self.newest.load(Ordering::Relaxed);
        self.keep_every > 0 && number.is_multiple_of(self.keep_every) && is_recent
    }

    fn forget(&self, number: u64, location: Location) -> bool {
        let mut places = self.places.lock();
        let is_here = places.get(&number).is_some_and(|slice| slice.location == location);
        if is_here {
            places.remove(&number);
            self.dropped.lock().insert(number);
        }
        is_here
    }
}

impl RecordOwner for Owner {
    fn decide(&self, records: Vec<(SliceHeader, Location)>) -> BoxFuture<'_, Vec<Verdict>> {
        let judge = |(header, location): (SliceHeader, Location)| {
            let number = header.version.sequence;
            let is_here = self.places.lock().get(&number).is_some_and(|slice| slice.location == location);
            if is_here && self.is_hot(number) {
                return Verdict::Keep;
            }
            self.forget(number, location);
            Verdict::Drop
        };
        Box::pin(std::future::ready(records.into_iter().map(judge).collect()))
    }

    fn moved(&self, header: &SliceHeader, from: Location, to: Location) -> bool {
        match self.places.lock().get_mut(&header.version.sequence) {
            Some(slice) if slice.location == from => {
                slice.location = to;
                true
            }
            _ => false,
        }
    }

    fn lost(&self, header: &SliceHeader, location: Location) -> bool {
        self.forget(header.version.sequence, location)
    }
}

/// Spawns the tier's reclaimer.
pub(crate) fn spawn_reclaim(tier: &Arc<NvmeTier>, owner: &Arc<Owner>) {
    let weak: Weak<Owner> = Arc::downgrade(owner);
    let owner: Weak<dyn RecordOwner> = weak;
    tokio::spawn(tier.reclaim(owner));
}

/// Counts warnings and errors of this thread's default subscriber.
#[derive(Clone, Default)]
pub(crate) struct Warnings(pub(crate) Arc<Mutex<Vec<String>>>);

struct Text(String);

impl tracing::field::Visit for Text {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0 += &format!("{}={value:?} ", field.name());
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().push(text.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}
