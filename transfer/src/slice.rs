//! The words of a transfer: slices of registered regions, and requests that pair two of them.

use crate::error::SliceError;

/// Names a registered memory region for as long as it is registered; never reused, so a stale one is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionId(pub u64);

/// Names a peer's region that was opened here, until it is closed; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentId(pub(crate) u64);

/// Names a peer that this engine connected to, until it is forgotten; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId(pub(crate) u64);

/// What a holder of a region's id must also know to use it. Random, 128 bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RegionKey(pub u128);

impl std::fmt::Debug for RegionKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RegionKey(..)")
    }
}

/// What a peer may do with a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessRights {
    /// Peers may read it.
    pub remote_read: bool,
    /// Peers may write it. Store memory never has this: its node pulls.
    pub remote_write: bool,
}

impl AccessRights {
    /// Used by this engine only.
    pub const LOCAL: Self = Self { remote_read: false, remote_write: false };
    /// Peers may read.
    pub const READ: Self = Self { remote_read: true, remote_write: false };
    /// Peers may read and write.
    pub const READ_WRITE: Self = Self { remote_read: true, remote_write: true };
}

/// One end of a transfer in this process: a byte range inside a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The region.
    pub region: RegionId,
    /// First byte, from the region's start.
    pub offset: u64,
    /// Bytes from there.
    pub length: u64,
}

impl Slice {
    /// Checks that the slice lies in a region of `region_length` bytes. A slice of no bytes is legal anywhere inside.
    ///
    /// # Errors
    /// [`SliceError::OutOfRange`].
    pub fn check(&self, region_length: u64) -> Result<(), SliceError> {
        check_range(self.offset, self.length, region_length)
    }
}

/// The other end: a byte range inside an opened segment of a peer. As long as the local slice that it is paired with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSlice {
    /// The segment.
    pub segment: SegmentId,
    /// First byte, from the segment's start.
    pub offset: u64,
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the peer to here.
    Read,
    /// From here to the peer.
    Write,
}

/// One request of a batch.
///
/// Slices may overlap: where two requests write the same byte, it ends up as one of theirs. A request of no bytes is
/// checked like any other, and succeeds without a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Which way.
    pub direction: Direction,
    /// Here.
    pub local: Slice,
    /// There.
    pub remote: RemoteSlice,
}

/// Checks that `length` bytes at `offset` lie in `limit` bytes, without overflow.
pub(crate) fn check_range(offset: u64, length: u64, limit: u64) -> Result<(), SliceError> {
    match offset.checked_add(length) {
        Some(end) if end <= limit => Ok(()),
        _ => Err(SliceError::OutOfRange { offset, length, region_length: limit }),
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
        assert!(slice(11, 0).check(10).is_err());
        assert!(slice(u64::MAX, 2).check(10).is_err());
    }

    #[test]
    fn keys_do_not_show_in_logs() {
        assert_eq!(format!("{:?}", RegionKey(42)), "RegionKey(..)");
    }
}
