//! Errors of the tiers.

use tidepool_metadata::{ErrorKind, ObjectKey, TierKind};

use crate::nvme::NvmeError;

/// What can go wrong in the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The object can never fit.
    #[error("object of {length} bytes is too large: the largest that fits the DRAM tier has {largest} bytes")]
    TooLarge {
        /// The object's length in bytes.
        length: u64,
        /// The largest possible, in bytes.
        largest: u64,
    },
    /// Nothing could be evicted in time.
    #[error(
        "no room for {length} bytes: {free} of {capacity} bytes of DRAM are free and nothing could be evicted; \
         unpin objects, wait for leases to end, or enlarge dram.capacity"
    )]
    NoSpace {
        /// Bytes asked for.
        length: u64,
        /// Bytes of the tier.
        capacity: u64,
        /// Bytes free.
        free: u64,
    },
    /// More or fewer bytes than announced.
    #[error("object was announced with {announced} bytes, {received} came")]
    LengthMismatch {
        /// Bytes announced.
        announced: u64,
        /// Bytes received, or that would have been.
        received: u64,
    },
    /// The bytes are not those that the caller checksummed.
    #[error("checksum of the received bytes is {actual:#010x}, expected {expected:#010x}")]
    ChecksumMismatch {
        /// What the caller said.
        expected: u32,
        /// What came.
        actual: u32,
    },
    /// A range that is not within the object.
    #[error("range of {length} bytes at {offset} leaves the object of {object_length} bytes")]
    BadRange {
        /// First byte.
        offset: u64,
        /// Bytes from there.
        length: u64,
        /// Length of the object in bytes.
        object_length: u64,
    },
    /// Stored bytes do not verify, and no other tier has good ones.
    #[error("object {key} on {} is damaged and was dropped", tier.name())]
    Corrupt {
        /// The object.
        key: ObjectKey,
        /// Where the damage was.
        tier: TierKind,
    },
    /// The copy is here no more: its object was removed or replaced, or the catalog let this node forget it.
    #[error("object {key} left this node while it was read: read it again to see what there is now")]
    Gone {
        /// The object.
        key: ObjectKey,
    },
    /// The node does not know yet all that it has.
    #[error("the node is still recovering what it had")]
    Recovering,
    /// The tier that has the only copy does not serve.
    #[error("the {} tier is not attached or has failed: see `tidepool admin tiers`", tier.name())]
    TierUnavailable {
        /// Which tier.
        tier: TierKind,
    },
    /// There is an NVMe tier already.
    #[error("an NVMe tier is attached already: detach it first")]
    TierAttached,
    /// The NVMe tier's own.
    #[error(transparent)]
    Nvme(#[from] NvmeError),
}

impl StoreError {
    /// What the caller does next.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::TooLarge { .. }
            | Self::LengthMismatch { .. }
            | Self::ChecksumMismatch { .. }
            | Self::BadRange { .. } => ErrorKind::Invalid,
            Self::NoSpace { .. } => ErrorKind::Exhausted,
            Self::Corrupt { .. } => ErrorKind::Corrupt,
            Self::Gone { .. } | Self::Recovering | Self::TierUnavailable { .. } | Self::Nvme(_) => {
                ErrorKind::Unavailable
            }
            Self::TierAttached => ErrorKind::Conflict,
        }
    }
}
