//! Slices whose bytes follow from a number, and the checks that all NVMe tests share.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::allow_attributes, reason = "what is unused differs per test file, so an expectation can't hold")]

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use tidepool_metadata::{DataType, Incarnation, NodeId, ObjectKey, ReplicaId, SliceHeader, TenantId, VersionId};
use tidepool_tiers::nvme::{Location, NvmeError, NvmeTier, SliceName, VecTarget};

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
    let seed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..length as u64).map(|index| (seed.wrapping_add(index.wrapping_mul(0x0100_0193)) >> 13) as u8).collect()
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
    let location = tier.write(header.clone(), Arc::new(bytes_of(number, length))).await?;
    Ok(Stored { header, location })
}

pub(crate) async fn store(tier: &NvmeTier, number: u64, length: usize) -> Stored {
    try_store(tier, number, length).await.expect("stored")
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
