//! How bytes move between registered memory: the vocabulary of the transfer engine.
//!
//! The engine itself is on the roadmap; these words are shared by what will use it. It knows nothing of objects.

/// Names a registered memory region for as long as it is registered; never reused, so a stale one is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionId(pub u64);

/// What a peer may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessRights {
    /// Peers may read it.
    pub remote_read: bool,
    /// Peers may write it. Store memory never has this: its node pulls.
    pub remote_write: bool,
}

/// One end of a transfer: a byte range inside a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The region.
    pub region: RegionId,
    /// First byte, from the region's start.
    pub offset: u64,
    /// Bytes from there.
    pub length: u64,
}

/// Why a slice is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// It leaves its region, or its end can't be counted.
    #[error("slice of {length} bytes at {offset} leaves its region of {region_length} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes from there.
        length: u64,
        /// Length of the region in bytes.
        region_length: u64,
    },
}

impl Slice {
    /// Checks that the slice lies in a region of `region_length` bytes. A slice of no bytes is legal anywhere inside.
    ///
    /// # Errors
    /// [`SliceError::OutOfRange`].
    pub fn check(&self, region_length: u64) -> Result<(), SliceError> {
        let Self { offset, length, .. } = *self;
        match offset.checked_add(length) {
            Some(end) if end <= region_length => Ok(()),
            _ => Err(SliceError::OutOfRange { offset, length, region_length }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_stay_within_their_region() {
        let slice = |offset, length| Slice { region: RegionId(1), offset, length };
        assert!(slice(0, 10).check(10).is_ok());
        assert!(slice(10, 0).check(10).is_ok());
        assert!(slice(1, 10).check(10).is_err());
        assert!(slice(u64::MAX, 2).check(10).is_err());
    }
}
