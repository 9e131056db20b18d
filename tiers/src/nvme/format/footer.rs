//! The end of a sealed region: its tombstones, an entry for each record, and a trailer that vouches for both.

use tidepool_metadata::SliceHeader;

use super::record::{TOMBSTONE_BYTES, Tombstone};
use super::{Epoch, FORMAT_VERSION, identity, put, put_identity, u16_at, u32_at, u64_at};
use crate::io::PAGE_BYTES;

/// Bytes of a footer entry before the key.
pub const ENTRY_FIXED_BYTES: usize = 84;
/// Bytes of the trailer, at the very end of a region.
pub const TRAILER_BYTES: usize = 64;

const FOOTER_MAGIC: &[u8; 8] = b"TPFOOTER";

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
