//! Slices of known bytes in the DRAM tier.

use std::sync::Arc;

use tidepool_metadata::{DataType, Incarnation, NodeId, ObjectKey, ReplicaId, SliceHeader, TenantId, VersionId};
use tidepool_tiers::memory::{MemoryTier, SharedSlice};

/// Bytes that only this number and length have.
pub(crate) fn bytes_of(number: u64, length: usize) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(number);
            (state >> 56) as u8
        })
        .collect()
}

/// As long as the longest key here.
pub(crate) const KEY_BYTES: usize = 24;

/// Seals slice `number`; `None`: there is no room.
pub(crate) fn put(tier: &Arc<MemoryTier>, number: u64, length: usize) -> Option<SharedSlice> {
    let mut buffer = tier.reserve(length as u32, KEY_BYTES).ok()?;
    // In uneven parts, so that chunks are not the parts.
    bytes_of(number, length).chunks(10_007).for_each(|part| buffer.append(part));
    Some(buffer.seal(SliceHeader {
        tenant: TenantId(1),
        key: ObjectKey::new(format!("key/{number}").as_bytes()).expect("a legal key"),
        version: VersionId { node: NodeId(5), incarnation: Incarnation(1), sequence: number },
        replica: ReplicaId { node: NodeId(5), incarnation: Incarnation(1), sequence: number },
        object_length: length as u64,
        slice_bytes: 4 << 20,
        slice_index: 0,
        slice_length: length as u32,
        checksum: 0,
        data_type: DataType::General,
        commit_index: 0,
    }))
}
