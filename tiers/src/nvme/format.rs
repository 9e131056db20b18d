//! Bytes of the NVMe tier: superblock, region header, record, footer. Pure: no I/O, no state.
//!
//! The layout is documented in docs/src/formats/nvme.md; this file is that page in code. Every decoder takes bytes that
//! anything may have written: it gives `None` or an error, never panics, never trusts a length before its checksum.

use tidepool_metadata::checksum::{CHUNK_BYTES, combine};
use tidepool_metadata::{
    DataType, Incarnation, MAX_KEY_BYTES, NodeId, ObjectKey, ReplicaId, SliceHeader, TenantId, VersionId,
};

use crate::io::PAGE_BYTES;

/// Version of the format that this code writes; older ones don't exist yet, newer ones are refused.
pub const FORMAT_VERSION: u32 = 1;
/// Where region 0 starts.
pub const REGIONS_START: u64 = 64 << 10;
/// Records start at multiples of this.
pub const RECORD_ALIGN: usize = 16;
/// Slices of at least this length have a page-aligned payload.
pub const ALIGNED_PAYLOAD_BYTES: usize = 64 << 10;
/// Bytes of a record's head before the key.
pub const HEAD_FIXED_BYTES: usize = 104;
/// Bytes of a footer entry before the key.
pub const ENTRY_FIXED_BYTES: usize = 84;
/// Bytes of one tombstone.
pub const TOMBSTONE_BYTES: usize = 16;
/// Bytes of the trailer, at the very end of a region.
pub const TRAILER_BYTES: usize = 64;

const SUPERBLOCK_MAGIC: &[u8; 8] = b"TPNVMSUP";
const REGION_MAGIC: &[u8; 8] = b"TPREGION";
const FOOTER_MAGIC: &[u8; 8] = b"TPFOOTER";
const RECORD_MAGIC: u32 = u32::from_le_bytes(*b"TPRC");
const SUPERBLOCK_BYTES: usize = 40;
const HEADER_BYTES: usize = 36;
/// Where the copies of a region's header lie in its first page: in different sectors.
const HEADER_COPIES: [usize; 2] = [0, 2048];
const KIND_SLICE: u8 = 1;
const KIND_TOMBSTONES: u8 = 2;

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

/// What the data file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Owner of the folder.
    pub node: NodeId,
    /// Length of a region in bytes.
    pub region_bytes: u64,
    /// How many regions the file has.
    pub region_count: u32,
    /// Random, chosen when the file was made.
    pub file_id: u64,
}

/// Why a page is no superblock of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuperblockFault {
    /// Other magic: not our file, or damaged.
    Foreign,
    /// A newer format.
    Version(u32),
    /// Checksum or a field is wrong.
    Damaged,
}

impl Superblock {
    /// The superblock as the start of a page.
    #[must_use]
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        put(&mut bytes, 0, SUPERBLOCK_MAGIC);
        put(&mut bytes, 8, &FORMAT_VERSION.to_le_bytes());
        put(&mut bytes, 12, &self.node.0.to_le_bytes());
        put(&mut bytes, 16, &self.region_bytes.to_le_bytes());
        put(&mut bytes, 24, &self.region_count.to_le_bytes());
        put(&mut bytes, 28, &self.file_id.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..36]);
        put(&mut bytes, 36, &checksum.to_le_bytes());
        bytes
    }

    /// Reads a superblock from the start of `page`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(page: &[u8]) -> Result<Self, SuperblockFault> {
        if page.len() < SUPERBLOCK_BYTES || &page[..8] != SUPERBLOCK_MAGIC {
            return Err(SuperblockFault::Foreign);
        }
        if crc32fast::hash(&page[..36]) != u32_at(page, 36) {
            return Err(SuperblockFault::Damaged);
        }
        match u32_at(page, 8) {
            FORMAT_VERSION => {}
            version => return Err(SuperblockFault::Version(version)),
        }
        Ok(Self {
            node: NodeId(u32_at(page, 12)),
            region_bytes: u64_at(page, 16),
            region_count: u32_at(page, 24),
            file_id: u64_at(page, 28),
        })
    }
}

/// The first page of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionHeader {
    /// This use of the region.
    pub epoch: Epoch,
    /// Given up: nothing in it counts.
    pub is_free: bool,
}

impl RegionHeader {
    /// Writes both copies of the header over the first page of `region`.
    pub fn encode(&self, region: &mut [u8]) {
        region[..PAGE_BYTES].fill(0);
        for copy in HEADER_COPIES {
            self.encode_copy(&mut region[copy..copy + HEADER_BYTES]);
        }
    }

    fn encode_copy(&self, page: &mut [u8]) {
        put(page, 0, REGION_MAGIC);
        put(page, 8, &FORMAT_VERSION.to_le_bytes());
        put(page, 12, &(if self.is_free { 2_u32 } else { 1 }).to_le_bytes());
        put(page, 16, &self.epoch.sequence.to_le_bytes());
        put(page, 24, &self.epoch.salt.to_le_bytes());
        let checksum = crc32fast::hash(&page[..32]);
        put(page, 32, &checksum.to_le_bytes());
    }

    /// Reads the header of a region's first page; `None` if neither copy is valid.
    #[must_use]
    pub fn decode(page: &[u8]) -> Option<Self> {
        HEADER_COPIES.iter().find_map(|&copy| Self::decode_copy(page.get(copy..)?))
    }

    fn decode_copy(page: &[u8]) -> Option<Self> {
        let is_header = page.len() >= HEADER_BYTES
            && &page[..8] == REGION_MAGIC
            && u32_at(page, 8) == FORMAT_VERSION
            && crc32fast::hash(&page[..32]) == u32_at(page, 32);
        let is_free = match (is_header, is_header.then(|| u32_at(page, 12))) {
            (true, Some(1)) => false,
            (true, Some(2)) => true,
            _ => return None,
        };
        Some(Self { epoch: Epoch { sequence: u64_at(page, 16), salt: u64_at(page, 24) }, is_free })
    }
}

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

/// Length of a footer entry for a key of `key_length` bytes.
#[must_use]
pub fn entry_bytes(key_length: usize) -> usize {
    ENTRY_FIXED_BYTES + key_length
}

/// Appends the footer entry of the record of `record_bytes` at `offset`.
pub fn encode_entry(to: &mut Vec<u8>, header: &SliceHeader, offset: u32, record_bytes: u32) {
    let key = header.key.as_bytes();
    let mut fixed = [0; ENTRY_FIXED_BYTES];
    put(&mut fixed, 0, &offset.to_le_bytes());
    put(&mut fixed, 4, &record_bytes.to_le_bytes());
    put(&mut fixed, 8, &(key.len() as u16).to_le_bytes());
    fixed[10] = header.data_type as u8;
    put_identity(&mut fixed, 12, header);
    to.extend_from_slice(&fixed);
    to.extend_from_slice(key);
}

/// Reads the entries of a footer whose checksum was verified: (header, offset, record length). Ends at nonsense.
pub fn decode_entries(mut bytes: &[u8]) -> impl Iterator<Item = (SliceHeader, u32, u32)> {
    std::iter::from_fn(move || {
        if bytes.len() < ENTRY_FIXED_BYTES {
            return None;
        }
        let key_length = usize::from(u16_at(bytes, 8));
        let key = bytes.get(ENTRY_FIXED_BYTES..ENTRY_FIXED_BYTES + key_length)?;
        let header = identity(bytes, 12, key, bytes[10])?;
        let (offset, record_bytes) = (u32_at(bytes, 0), u32_at(bytes, 4));
        bytes = &bytes[ENTRY_FIXED_BYTES + key_length..];
        Some((header, offset, record_bytes))
    })
}

/// The end of a sealed region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// The use of the region that it closes.
    pub epoch: Epoch,
    /// Length of tombstones and entries in bytes.
    pub footer_bytes: u32,
    /// How many tombstones.
    pub tombstone_count: u32,
    /// How many entries.
    pub entry_count: u32,
    /// CRC-32 of the entries.
    pub entries_checksum: u32,
    /// Sum of the lengths of all entries' records.
    pub record_bytes: u64,
    /// CRC-32 of the tombstones, so that they can be read alone.
    pub tombstones_checksum: u32,
}

impl Trailer {
    /// The trailer's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; TRAILER_BYTES] {
        let mut bytes = [0; TRAILER_BYTES];
        put(&mut bytes, 0, FOOTER_MAGIC);
        put(&mut bytes, 8, &self.epoch.sequence.to_le_bytes());
        put(&mut bytes, 16, &self.epoch.salt.to_le_bytes());
        put(&mut bytes, 24, &self.footer_bytes.to_le_bytes());
        put(&mut bytes, 28, &self.tombstone_count.to_le_bytes());
        put(&mut bytes, 32, &self.entry_count.to_le_bytes());
        put(&mut bytes, 36, &self.entries_checksum.to_le_bytes());
        put(&mut bytes, 40, &self.record_bytes.to_le_bytes());
        put(&mut bytes, 48, &FORMAT_VERSION.to_le_bytes());
        put(&mut bytes, 52, &self.tombstones_checksum.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..60]);
        put(&mut bytes, 60, &checksum.to_le_bytes());
        bytes
    }

    /// Reads the trailer at the end of `bytes`; `None` unless magic, version and checksum hold and the lengths fit a
    /// region of `region_bytes`.
    #[must_use]
    pub fn decode(bytes: &[u8], region_bytes: usize) -> Option<Self> {
        let bytes = bytes.get(bytes.len().checked_sub(TRAILER_BYTES)?..)?;
        if &bytes[..8] != FOOTER_MAGIC
            || u32_at(bytes, 48) != FORMAT_VERSION
            || crc32fast::hash(&bytes[..60]) != u32_at(bytes, 60)
        {
            return None;
        }
        let trailer = Self {
            epoch: Epoch { sequence: u64_at(bytes, 8), salt: u64_at(bytes, 16) },
            footer_bytes: u32_at(bytes, 24),
            tombstone_count: u32_at(bytes, 28),
            entry_count: u32_at(bytes, 32),
            entries_checksum: u32_at(bytes, 36),
            record_bytes: u64_at(bytes, 40),
            tombstones_checksum: u32_at(bytes, 52),
        };
        let fits = trailer.footer_bytes as usize + TRAILER_BYTES + PAGE_BYTES <= region_bytes
            && u64::from(trailer.tombstone_count) * TOMBSTONE_BYTES as u64 <= u64::from(trailer.footer_bytes);
        fits.then_some(trailer)
    }

    /// Where the footer starts, relative to the region's start.
    #[must_use]
    pub fn footer_start(&self, region_bytes: usize) -> usize {
        region_bytes - TRAILER_BYTES - self.footer_bytes as usize
    }
}

/// Where the pages of a footer of that many bytes, trailer not counted, start in a region.
#[must_use]
pub fn footer_pages_start(region_bytes: usize, footer_bytes: usize) -> Option<usize> {
    Some(region_bytes.checked_sub(TRAILER_BYTES + footer_bytes)? / PAGE_BYTES * PAGE_BYTES)
}

/// Tombstones and entries of a region as they are gathered for its footer.
#[derive(Clone, Debug, Default)]
pub struct Footer {
    /// All tombstones in the region's records.
    pub tombstones: Vec<Tombstone>,
    /// Encoded entries.
    pub entries: Vec<u8>,
    /// How many entries.
    pub entry_count: u32,
    /// Sum of their record lengths, and of lost records whose tombstones will be taken off it.
    pub record_bytes: u64,
}

impl Footer {
    /// Bytes of tombstones and entries.
    #[must_use]
    pub fn footer_bytes(&self) -> usize {
        self.tombstones.len() * TOMBSTONE_BYTES + self.entries.len()
    }

    /// Adds a record.
    pub fn push(&mut self, header: &SliceHeader, offset: u32, record_bytes: u32) {
        encode_entry(&mut self.entries, header, offset, record_bytes);
        self.entry_count += 1;
        self.record_bytes += u64::from(record_bytes);
    }

    /// The trailer, and the pages at the end of the region that hold footer and trailer, to be written over `pages`,
    /// which ends with the region.
    pub fn encode(&self, epoch: Epoch, pages: &mut [u8]) -> Trailer {
        let mut tombstones = Vec::with_capacity(self.tombstones.len() * TOMBSTONE_BYTES);
        self.tombstones.iter().for_each(|tombstone| tombstone.encode(&mut tombstones));
        let trailer = Trailer {
            epoch,
            footer_bytes: self.footer_bytes() as u32,
            tombstone_count: self.tombstones.len() as u32,
            entry_count: self.entry_count,
            entries_checksum: crc32fast::hash(&self.entries),
            record_bytes: self.record_bytes,
            tombstones_checksum: crc32fast::hash(&tombstones),
        };
        let trailer_at = pages.len() - TRAILER_BYTES;
        let entries_at = trailer_at - self.entries.len();
        let tombstones_at = entries_at - tombstones.len();
        pages[..tombstones_at].fill(0);
        put(pages, tombstones_at, &tombstones);
        put(pages, entries_at, &self.entries);
        put(pages, trailer_at, &trailer.encode());
        trailer
    }
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
