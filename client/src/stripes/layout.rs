//! What a striped object's list of parts says, and its bytes: `docs/src/formats/stripes.md`.

use std::ops::Range;

use bytes::Bytes;

/// Most parts: a group of so many objects and the list is still evicted as one.
pub(super) const MOST_PARTS: u64 = 1024;

const MAGIC: &[u8; 8] = b"TPSTRIP1";
/// Magic, name, length, bytes of a part, nodes.
const HEAD: usize = 8 + 16 + 8 + 8 + 4;

/// How a value lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Of its parts, and of this put alone.
    pub(super) id: u128,
    /// Bytes of the value.
    pub(super) length: u64,
    /// Of each part but the last one, which may be shorter.
    pub(super) part_bytes: u64,
    /// Over how many nodes the parts were dealt.
    pub(super) nodes: u32,
    /// CRC-32 of each part.
    pub(super) checksums: Vec<u32>,
}

impl Layout {
    /// The parts' and the list's group.
    pub(super) fn group(&self) -> String {
        format!("stripes/{:032x}", self.id)
    }

    pub(super) fn part_key(&self, part: usize) -> String {
        format!("stripes/{:032x}/{part}", self.id)
    }

    pub(super) fn part_keys(&self) -> Vec<String> {
        (0..self.checksums.len()).map(|part| self.part_key(part)).collect()
    }

    /// Which bytes of the value a part has.
    pub(super) fn bytes_of(&self, part: usize) -> Range<u64> {
        let start = part as u64 * self.part_bytes;
        start..self.length.min(start + self.part_bytes)
    }

    /// The parts that have bytes of `range`.
    pub(super) fn parts_of(&self, range: &Range<u64>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        let place = |part: u64| usize::try_from(part).unwrap_or(usize::MAX);
        place(range.start / self.part_bytes)..place(range.end.div_ceil(self.part_bytes))
    }

    pub(super) fn encode(&self) -> Bytes {
        let mut bytes = Vec::with_capacity(HEAD + 4 * self.checksums.len() + 4);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.id.to_le_bytes());
        bytes.extend_from_slice(&self.length.to_le_bytes());
        bytes.extend_from_slice(&self.part_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.nodes.to_le_bytes());
        self.checksums.iter().for_each(|checksum| bytes.extend_from_slice(&checksum.to_le_bytes()));
        bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
        bytes.into()
    }

    /// What [`Layout::encode`] wrote; `None` for any other bytes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (body, sum) = bytes.split_last_chunk()?;
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return None;
        }
        let (magic, rest) = body.split_first_chunk()?;
        let (id, rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (part_bytes, rest) = rest.split_first_chunk()?;
        let (nodes, rest) = rest.split_first_chunk()?;
        let (sums, odd) = rest.as_chunks();
        let layout = Self {
            id: u128::from_le_bytes(*id),
            length: u64::from_le_bytes(*length),
            part_bytes: u64::from_le_bytes(*part_bytes),
            nodes: u32::from_le_bytes(*nodes),
            checksums: sums.iter().copied().map(u32::from_le_bytes).collect(),
        };
        let parts = layout.checksums.len() as u64;
        let is_whole = magic == MAGIC && odd.is_empty() && layout.part_bytes > 0 && parts <= MOST_PARTS;
        (is_whole && layout.length.div_ceil(layout.part_bytes) == parts).then_some(layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(length: u64, part_bytes: u64) -> Layout {
        let checksums = (0..length.div_ceil(part_bytes)).map(|part| part as u32).collect();
        Layout { id: 0x1234 << 100, length, part_bytes, nodes: 3, checksums }
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_is() {
        for layout in [layout(0, 7), layout(1, 7), layout(21, 7), layout(1024, 1)] {
            let bytes = layout.encode();
            assert_eq!(Layout::decode(&bytes), Some(layout));
            assert!((0..bytes.len()).all(|length| Layout::decode(&bytes[..length]).is_none()));
            for at in 0..bytes.len() {
                let mut flipped = bytes.to_vec();
                flipped[at] ^= 1;
                assert_eq!(Layout::decode(&flipped), None);
            }
        }
        let lies = [Layout { part_bytes: 0, ..layout(0, 7) }, Layout { length: 22, ..layout(21, 7) }, layout(1025, 1)];
        assert!(lies.iter().all(|lie| Layout::decode(&lie.encode()).is_none()));
    }

    #[test]
    fn parts_have_all_bytes_once() {
        let layout = layout(20, 7);
        let bytes: Vec<_> = (0..3).map(|part| layout.bytes_of(part)).collect();
        assert_eq!(bytes, [0..7, 7..14, 14..20]);
        assert_eq!(layout.parts_of(&(0..20)), 0..3);
        assert_eq!(layout.parts_of(&(7..8)), 1..2);
        assert_eq!(layout.parts_of(&(6..14)), 0..2);
        assert_eq!(layout.parts_of(&(20..20)), 0..0);
    }
}
