//! Records: a slice with its head, or tombstones of slices that are dead.

use tidepool_metadata::checksum::{CHUNK_BYTES, combine};
use tidepool_metadata::{MAX_KEY_BYTES, SliceHeader};

use super::{Epoch, identity, put, put_identity, u16_at, u32_at, u64_at};
use crate::io::PAGE_BYTES;

/// Records start at multiples of this.
pub const RECORD_ALIGN: usize = 16;
/// Slices of at least this length have a page-aligned payload.
pub const ALIGNED_PAYLOAD_BYTES: usize = 64 << 10;
/// Bytes of a record's head before the key.
pub const HEAD_FIXED_BYTES: usize = 104;
/// Bytes of one tombstone.
pub const TOMBSTONE_BYTES: usize = 16;

pub(super) const RECORD_MAGIC: u32 = u32::from_le_bytes(*b"TPRC");
const KIND_SLICE: u8 = 1;
const KIND_TOMBSTONES: u8 = 2;

/// A record that is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tombstone {
    /// Sequence of the record's region.
    pub sequence: u64,
    /// The record's offset in the region.
    pub offset: u32,
    /// The record's length.
    pub length: u32,
}

impl Tombstone {
    /// Appends the tombstone.
    pub fn encode(self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.sequence.to_le_bytes());
        to.extend_from_slice(&self.offset.to_le_bytes());
        to.extend_from_slice(&self.length.to_le_bytes());
    }

    /// Reads as many tombstones as `bytes` holds.
    pub fn decode_all(bytes: &[u8]) -> impl Iterator<Item = Self> {
        bytes.chunks_exact(TOMBSTONE_BYTES).map(|bytes| Self {
            sequence: u64_at(bytes, 0),
            offset: u32_at(bytes, 8),
            length: u32_at(bytes, 12),
        })
    }
}

/// Where the parts of a record lie, relative to its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordLayout {
    /// Bytes of the head: fixed part, key, chunk checksums.
    pub head_bytes: usize,
    /// Where the payload starts.
    pub payload_offset: usize,
    /// To the start of the next record.
    pub record_bytes: usize,
}

impl RecordLayout {
    /// The layout of a record that starts at `start` in its region.
    #[must_use]
    pub fn at(start: usize, key_length: usize, slice_length: usize) -> Self {
        let head_bytes = checksums_offset(key_length) + slice_length.div_ceil(CHUNK_BYTES) * 4;
        let align = if slice_length >= ALIGNED_PAYLOAD_BYTES { PAGE_BYTES } else { RECORD_ALIGN };
        let payload_offset = (start + head_bytes).next_multiple_of(align) - start;
        Self { head_bytes, payload_offset, record_bytes: payload_offset + slice_length.next_multiple_of(RECORD_ALIGN) }
    }
}

/// Where the payload of a record of `record_bytes` starts.
#[must_use]
pub fn payload_offset(record_bytes: usize, slice_length: usize) -> Option<usize> {
    record_bytes.checked_sub(slice_length.next_multiple_of(RECORD_ALIGN))
}

fn checksums_offset(key_length: usize) -> usize {
    (HEAD_FIXED_BYTES + key_length).next_multiple_of(4)
}

/// Writes the head of a slice's record over the start of `record`, after its payload is in place and `chunks` known.
pub fn encode_slice_head(record: &mut [u8], epoch: Epoch, header: &SliceHeader, chunks: &[u32], record_bytes: usize) {
    let key = header.key.as_bytes();
    let checksums = checksums_offset(key.len());
    let head_bytes = checksums + chunks.len() * 4;
    record[..head_bytes].fill(0);
    record[4] = KIND_SLICE;
    record[5] = header.data_type as u8;
    put(record, 6, &(key.len() as u16).to_le_bytes());
    put_identity(record, 32, header);
    put(record, HEAD_FIXED_BYTES, key);
    for (index, chunk) in chunks.iter().enumerate() {
        put(record, checksums + index * 4, &chunk.to_le_bytes());
    }
    close_head(record, epoch, head_bytes, record_bytes);
}

/// Writes a tombstones record over `record`, whose length is [`tombstones_record_bytes`].
pub fn encode_tombstones(record: &mut [u8], epoch: Epoch, tombstones: &[Tombstone]) {
    let record_bytes = record.len();
    let mut payload = Vec::with_capacity(tombstones.len() * TOMBSTONE_BYTES);
    tombstones.iter().for_each(|tombstone| tombstone.encode(&mut payload));
    record.fill(0);
    record[4] = KIND_TOMBSTONES;
    put(record, 92, &(payload.len() as u32).to_le_bytes());
    put(record, 96, &crc32fast::hash(&payload).to_le_bytes());
    put(record, record_bytes - payload.len(), &payload);
    close_head(record, epoch, HEAD_FIXED_BYTES, record_bytes);
}

/// Length of a record of `count` tombstones.
#[must_use]
pub fn tombstones_record_bytes(count: usize) -> usize {
    HEAD_FIXED_BYTES.next_multiple_of(RECORD_ALIGN) + count * TOMBSTONE_BYTES
}

fn close_head(record: &mut [u8], epoch: Epoch, head_bytes: usize, record_bytes: usize) {
    put(record, 0, &RECORD_MAGIC.to_le_bytes());
    put(record, 12, &(record_bytes as u32).to_le_bytes());
    put(record, 16, &epoch.sequence.to_le_bytes());
    put(record, 24, &epoch.salt.to_le_bytes());
    let checksum = head_checksum(&record[..head_bytes]);
    put(record, 8, &checksum.to_le_bytes());
}

fn head_checksum(head: &[u8]) -> u32 {
    combine(crc32fast::hash(&head[..8]), crc32fast::hash(&head[12..]), head.len() as u64 - 12)
}

/// What a record's head says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordHead {
    /// A slice, and the checksums of its chunks.
    Slice {
        /// All that identifies the slice.
        header: SliceHeader,
        /// CRC-32 of each chunk of the payload.
        chunks: Vec<u32>,
        /// To the next record.
        record_bytes: usize,
    },
    /// Tombstones.
    Tombstones {
        /// CRC-32 of the payload.
        checksum: u32,
        /// Length of the payload.
        payload_bytes: usize,
        /// To the next record.
        record_bytes: usize,
    },
}

impl RecordHead {
    /// To the start of the next record.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        match self {
            Self::Slice { record_bytes, .. } | Self::Tombstones { record_bytes, .. } => *record_bytes,
        }
    }

    /// Reads the head at the start of `bytes`; `None` unless magic, epoch, checksum and all lengths hold.
    #[must_use]
    pub fn decode(bytes: &[u8], epoch: Epoch) -> Option<Self> {
        if bytes.len() < HEAD_FIXED_BYTES
            || u32_at(bytes, 0) != RECORD_MAGIC
            || u64_at(bytes, 16) != epoch.sequence
            || u64_at(bytes, 24) != epoch.salt
        {
            return None;
        }
        let (kind, key_length) = (bytes[4], usize::from(u16_at(bytes, 6)));
        let slice_length = u32_at(bytes, 92) as usize;
        let record_bytes = u32_at(bytes, 12) as usize;
        if key_length > MAX_KEY_BYTES || !record_bytes.is_multiple_of(RECORD_ALIGN) {
            return None;
        }
        let chunk_count = if kind == KIND_SLICE { slice_length.div_ceil(CHUNK_BYTES) } else { 0 };
        let checksums = checksums_offset(key_length);
        let head_bytes = checksums.checked_add(chunk_count * 4)?;
        if bytes.len() < head_bytes || head_checksum(&bytes[..head_bytes]) != u32_at(bytes, 8) {
            return None;
        }
        if payload_offset(record_bytes, slice_length)? < head_bytes {
            return None;
        }
        match kind {
            KIND_SLICE => Some(Self::Slice {
                header: identity(bytes, 32, &bytes[HEAD_FIXED_BYTES..HEAD_FIXED_BYTES + key_length], bytes[5])?,
                chunks: bytes[checksums..head_bytes].chunks_exact(4).map(|chunk| u32_at(chunk, 0)).collect(),
                record_bytes,
            }),
            KIND_TOMBSTONES => {
                Some(Self::Tombstones { checksum: u32_at(bytes, 96), payload_bytes: slice_length, record_bytes })
            }
            _ => None,
        }
    }
}
