//! Slices: the contiguous pieces of objects that tiers hold.

use crate::object::{DataType, ObjectKey, ReplicaId, TenantId, VersionId};

/// Default length of all slices of an object but the last.
pub const DEFAULT_SLICE_BYTES: u32 = 4 << 20;

/// All that identifies a slice: stands in the slice table and in the NVMe record, under that record's checksum,
/// so that each copy on any tier says by itself what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceHeader {
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: ObjectKey,
    /// Which put of that key.
    pub version: VersionId,
    /// Which copy of that version.
    pub replica: ReplicaId,
    /// Length of the whole object in bytes.
    pub object_length: u64,
    /// Length of all the object's slices but the last, in bytes; a multiple of the chunk.
    pub slice_bytes: u32,
    /// This slice's number, from 0. An object of length 0 has one slice of length 0.
    pub slice_index: u32,
    /// Length of this slice in bytes.
    pub slice_length: u32,
    /// CRC-32 of this slice.
    pub checksum: u32,
    /// What the object holds.
    pub data_type: DataType,
    /// The log index at which the put was completed, or 0 while no answer is known (sealed only).
    pub commit_index: u64,
}

impl SliceHeader {
    /// How many slices an object of `object_length` bytes has: at least one.
    #[must_use]
    pub fn slice_count(object_length: u64, slice_bytes: u32) -> u32 {
        u32::try_from(object_length.div_ceil(u64::from(slice_bytes)).max(1)).unwrap_or(u32::MAX)
    }
}
