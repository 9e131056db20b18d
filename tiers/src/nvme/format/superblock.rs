//! The first page of the data file, and the first page of each region.

use tidepool_metadata::NodeId;

use super::{Epoch, FORMAT_VERSION, put, u32_at, u64_at};
use crate::io::PAGE_BYTES;

const SUPERBLOCK_MAGIC: &[u8; 8] = b"TPNVMSUP";
const REGION_MAGIC: &[u8; 8] = b"TPREGION";
const SUPERBLOCK_BYTES: usize = 40;
const HEADER_BYTES: usize = 36;
/// Where the copies of a region's header lie in its first page: in different sectors.
const HEADER_COPIES: [usize; 2] = [0, 2048];

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
