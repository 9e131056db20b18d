//! The bytes of blocks, as a function of the block's hash id alone, so that any reader can check every byte of any
//! block without having seen it written.
//!
//! Eight independent xorshift generators make 64 bytes a step: no byte depends on the block's length, so a range of
//! a block is known from its offset's step on, and compilers make vector code of it.

/// Generators side by side; a step makes 8 bytes of each.
const LANES: usize = 8;
const STEP_BYTES: usize = LANES * 8;
/// Bytes generated before they are compared: fits the first-level cache.
const PIECE_BYTES: usize = 4096;

const _: () = assert!(PIECE_BYTES.is_multiple_of(STEP_BYTES));

/// The endless bytes of one block; what is stored is a prefix of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    hash_id: u64,
}

/// The first byte of a block that is not what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block {hash_id} has {actual:#04x} at byte {offset}, written was {expected:#04x}")]
pub struct Mismatch {
    /// The block.
    pub hash_id: u64,
    /// Where in the block.
    pub offset: usize,
    /// What was written there.
    pub expected: u8,
    /// What was read.
    pub actual: u8,
}

impl Payload {
    /// The bytes of block `hash_id`.
    #[must_use]
    pub fn of(hash_id: u64) -> Self {
        Self { hash_id }
    }

    /// Fills `target` with the block's first bytes.
    pub fn fill(self, target: &mut [u8]) {
        let mut lanes = self.lanes();
        let mut steps = target.chunks_exact_mut(STEP_BYTES);
        for step in &mut steps {
            next(&mut lanes);
            for (bytes, lane) in step.chunks_exact_mut(8).zip(lanes) {
                bytes.copy_from_slice(&lane.to_le_bytes());
            }
        }
        let rest = steps.into_remainder();
        next(&mut lanes);
        for (byte, value) in rest.iter_mut().zip(lanes.iter().flat_map(|lane| lane.to_le_bytes())) {
            *byte = value;
        }
    }

    /// The block's first `length` bytes.
    #[must_use]
    pub fn bytes(self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.fill(&mut bytes);
        bytes
    }

    /// Compares every byte of `actual` with the block's first bytes.
    ///
    /// # Errors
    /// The first byte that differs.
    pub fn check(self, actual: &[u8]) -> Result<(), Mismatch> {
        let mut lanes = self.lanes();
        let mut piece = [0; PIECE_BYTES];
        for (index, actual) in actual.chunks(PIECE_BYTES).enumerate() {
            for step in piece.chunks_exact_mut(STEP_BYTES) {
                next(&mut lanes);
                for (bytes, lane) in step.chunks_exact_mut(8).zip(lanes) {
                    bytes.copy_from_slice(&lane.to_le_bytes());
                }
            }
            if actual != &piece[..actual.len()] {
                let at = actual.iter().zip(&piece).take_while(|(actual, expected)| actual == expected).count();
                let (expected, actual) = (piece[at], actual[at]);
                return Err(Mismatch { hash_id: self.hash_id, offset: index * PIECE_BYTES + at, expected, actual });
            }
        }
        Ok(())
    }

    /// Starting values by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), never 0 as xorshift demands.
    fn lanes(self) -> [u64; LANES] {
        let mut state = self.hash_id;
        std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (mixed ^ (mixed >> 31)) | 1
        })
    }
}

/// One step of every lane: xorshift64 (Marsaglia, Journal of Statistical Software 8, 2003).
fn next(lanes: &mut [u64; LANES]) {
    for lane in lanes {
        *lane ^= *lane << 13;
        *lane ^= *lane >> 7;
        *lane ^= *lane << 17;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shorter_blocks_are_prefixes_of_longer_ones() {
        let long = Payload::of(42).bytes(3 * PIECE_BYTES + 100);
        for length in [0, 1, 63, 64, 65, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 33] {
            assert_eq!(Payload::of(42).bytes(length), long[..length]);
            assert_eq!(Payload::of(42).check(&long[..length]), Ok(()));
        }
    }

    #[test]
    fn every_wrong_byte_is_found() {
        let mut bytes = Payload::of(7).bytes(PIECE_BYTES + 70);
        for offset in [0, 1, 63, 64, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 69] {
            bytes[offset] ^= 0x10;
            let mismatch = Payload::of(7).check(&bytes).expect_err("one bit is flipped");
            assert_eq!((mismatch.offset, mismatch.actual), (offset, bytes[offset]));
            bytes[offset] ^= 0x10;
        }
        assert!(Payload::of(8).check(&bytes).is_err(), "another block's bytes are wrong bytes");
    }
}
