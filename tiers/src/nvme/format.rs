//! Bytes of the NVMe tier: superblock, region header, record, footer. Pure: no I/O, no state.
//!
//! The layout is documented in docs/src/formats/nvme.md; this file is that page in code. Every decoder takes bytes that
//! anything may have written: it gives `None` or an error, never panics, never trusts a length before its checksum.

mod footer;
mod record;
mod superblock;

use tidepool_metadata::checksum::CHUNK_BYTES;
use tidepool_metadata::{
    DataType, Incarnation, MAX_KEY_BYTES, NodeId, ObjectKey, ReplicaId, SliceHeader, TenantId, VersionId,
};

pub use footer::{
    ENTRY_FIXED_BYTES, Footer, TRAILER_BYTES, Trailer, decode_entries, encode_entry, entry_bytes, footer_pages_start,
};
pub use record::{
    ALIGNED_PAYLOAD_BYTES, HEAD_FIXED_BYTES, RECORD_ALIGN, RecordHead, RecordLayout, TOMBSTONE_BYTES, Tombstone,
    encode_slice_head, encode_tombstones, payload_offset, tombstones_record_bytes,
};
pub use superblock::{RegionHeader, Superblock, SuperblockFault};

use crate::io::PAGE_BYTES;

/// Version of the format that this code writes; older ones don't exist yet, newer ones are refused.
pub const FORMAT_VERSION: u32 = 1;
/// Where region 0 starts.
pub const REGIONS_START: u64 = 64 << 10;

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// One use of a region: what tells its bytes from those of earlier uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch {
    /// Counts uses over the whole file, from 1.
    pub sequence: u64,
    /// Random; unknown to clients, so that no payload can pass for a record.
    pub salt: u64,
}

/// Writes what identifies a slice: alike in records and footer entries.
fn put_identity(bytes: &mut [u8], at: usize, header: &SliceHeader) {
    put(bytes, at, &header.version.node.0.to_le_bytes());
    put(bytes, at + 4, &header.version.incarnation.0.to_le_bytes());
    put(bytes, at + 8, &header.version.sequence.to_le_bytes());
    put(bytes, at + 16, &header.replica.node.0.to_le_bytes());
    put(bytes, at + 20, &header.replica.incarnation.0.to_le_bytes());
    put(bytes, at + 24, &header.replica.sequence.to_le_bytes());
    put(bytes, at + 32, &header.object_length.to_le_bytes());
    put(bytes, at + 40, &header.commit_index.to_le_bytes());
    put(bytes, at + 48, &header.tenant.0.to_le_bytes());
    put(bytes, at + 52, &header.slice_bytes.to_le_bytes());
    put(bytes, at + 56, &header.slice_index.to_le_bytes());
    put(bytes, at + 60, &header.slice_length.to_le_bytes());
    put(bytes, at + 64, &header.checksum.to_le_bytes());
}

/// Reads it back; `None` for what no slice has.
fn identity(bytes: &[u8], at: usize, key: &[u8], data_type: u8) -> Option<SliceHeader> {
    Some(SliceHeader {
        tenant: TenantId(u32_at(bytes, at + 48)),
        key: ObjectKey::new(key).ok()?,
        version: VersionId {
            node: NodeId(u32_at(bytes, at)),
            incarnation: Incarnation(u32_at(bytes, at + 4)),
            sequence: u64_at(bytes, at + 8),
        },
        replica: ReplicaId {
            node: NodeId(u32_at(bytes, at + 16)),
            incarnation: Incarnation(u32_at(bytes, at + 20)),
            sequence: u64_at(bytes, at + 24),
        },
        object_length: u64_at(bytes, at + 32),
        slice_bytes: u32_at(bytes, at + 52),
        slice_index: u32_at(bytes, at + 56),
        slice_length: u32_at(bytes, at + 60),
        checksum: u32_at(bytes, at + 64),
        data_type: DataType::from_number(data_type)?,
        commit_index: u64_at(bytes, at + 40),
    })
}

/// The longest slice that surely fits an empty region, whatever its key.
#[must_use]
pub fn max_slice_bytes(region_bytes: u64) -> u32 {
    let footer = (ENTRY_FIXED_BYTES + MAX_KEY_BYTES + TRAILER_BYTES).next_multiple_of(PAGE_BYTES) + PAGE_BYTES;
    let chunks = (region_bytes as usize).div_ceil(CHUNK_BYTES) * 4;
    let head = (HEAD_FIXED_BYTES + MAX_KEY_BYTES + chunks).next_multiple_of(PAGE_BYTES) + PAGE_BYTES;
    u32::try_from((region_bytes as usize).saturating_sub(PAGE_BYTES + head + footer)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
