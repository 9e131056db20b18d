//! End-to-end checksums: CRC-32 (IEEE 802.3) per chunk of 64 KiB, combined to one per slice and per object.
//!
//! Chunks make ranges verifiable; combination makes the sums of slices and objects free.

use crc32fast::Hasher;

/// Bytes that one checksum covers; the last chunk of a slice may be shorter.
pub const CHUNK_BYTES: usize = 64 << 10;

/// The CRC-32 of each chunk of one slice, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkChecksums(pub Vec<u32>);

impl ChunkChecksums {
    /// Checksums of `bytes`, cut into chunks.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(bytes.chunks(CHUNK_BYTES).map(crc32fast::hash).collect())
    }

    /// The CRC-32 of the whole slice of `length` bytes, as if computed over it at once.
    #[must_use]
    pub fn combined(&self, length: usize) -> u32 {
        let mut rest = length;
        let mut whole = Hasher::new();
        for &chunk in &self.0 {
            let chunk_length = rest.min(CHUNK_BYTES);
            whole.combine(&Hasher::new_with_initial_len(chunk, chunk_length as u64));
            rest -= chunk_length;
        }
        whole.finalize()
    }
}

/// CRC-32 of two neighbouring byte ranges from the sums of both and the second one's length in bytes.
#[must_use]
pub fn combine(first: u32, second: u32, second_length: u64) -> u32 {
    let mut whole = Hasher::new_with_initial_len(first, 0);
    whole.combine(&Hasher::new_with_initial_len(second, second_length));
    whole.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combination_equals_the_sum_over_all() {
        let bytes: Vec<u8> = (0..3 * CHUNK_BYTES + 17).map(|i| (i * 31 % 251) as u8).collect();
        assert_eq!(ChunkChecksums::of(&bytes).combined(bytes.len()), crc32fast::hash(&bytes));
        let (first, second) = bytes.split_at(1000);
        assert_eq!(
            combine(crc32fast::hash(first), crc32fast::hash(second), second.len() as u64),
            crc32fast::hash(&bytes)
        );
        assert_eq!(ChunkChecksums::of(&[]).combined(0), crc32fast::hash(&[]));
    }
}
