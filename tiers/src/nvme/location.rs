//! Where records lie.

/// Where a record lies: 20 bytes, to be kept by whoever wants to read it. Valid until its region is reused, which a
/// read notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    pub(super) region: u32,
    /// Low half of the region's sequence.
    pub(super) sequence: u32,
    pub(super) offset: u32,
    pub(super) length: u32,
    /// CRC-32 of the slice, so that it can be announced without reading it.
    pub(super) checksum: u32,
}

impl Location {
    /// Bytes that the record takes on disk.
    #[must_use]
    pub fn record_bytes(&self) -> u32 {
        self.length
    }

    /// CRC-32 of the slice in the record.
    #[must_use]
    pub fn checksum(&self) -> u32 {
        self.checksum
    }

    /// The location in 20 bytes, for a list that outlives the process. A read notices if it no longer holds.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 20] {
        let Self { region, sequence, offset, length, checksum } = self;
        let mut bytes = [0; 20];
        for (at, part) in bytes.chunks_exact_mut(4).zip([region, sequence, offset, length, checksum]) {
            at.copy_from_slice(&part.to_le_bytes());
        }
        bytes
    }

    /// The location that [`Self::to_bytes`] wrote; from any other bytes, one where nothing is found.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 20]) -> Self {
        let part = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self { region: part(0), sequence: part(4), offset: part(8), length: part(12), checksum: part(16) }
    }

    /// Which of two announcements of one slice counts: the one written later.
    #[must_use]
    pub fn is_newer_than(&self, other: &Self) -> bool {
        (self.sequence, self.offset) > (other.sequence, other.offset)
    }
}
