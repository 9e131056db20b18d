//! What can go wrong: with a call ([`TransferError`]), and with one request of a batch ([`Failure`]).

use std::io;

use crate::slice::{PeerId, RegionId, SegmentId};

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

/// Why one request of a batch did not succeed. Bytes of its destination are then undefined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Failure {
    /// The caller cancelled the batch.
    #[error("cancelled")]
    Cancelled = 1,
    /// The batch's deadline passed.
    #[error("deadline passed")]
    DeadlinePassed = 2,
    /// No connection to the peer could be made.
    #[error("peer is unreachable")]
    Unreachable = 3,
    /// The connection broke, and so did the attempts to replace it.
    #[error("connection to the peer was lost")]
    ConnectionLost = 4,
    /// The peer took or gave no byte for the silence timeout.
    #[error("peer is silent")]
    Silent = 5,
    /// Another engine answers at the peer's address: open the segment again.
    #[error("peer has restarted")]
    Restarted = 6,
    /// The peer has no such region, or the key is not its key.
    #[error("no such region at the peer, or not its key")]
    NoRegion = 7,
    /// The region is not registered for that.
    #[error("region does not grant this access")]
    NoRight = 8,
    /// The slice leaves the peer's region.
    #[error("slice leaves the peer's region")]
    OutOfRange = 9,
    /// The peer broke the protocol.
    #[error("peer broke the protocol")]
    Protocol = 10,
    /// The peer speaks no version that this engine speaks.
    #[error("peer speaks another version of the protocol")]
    Version = 11,
    /// The peer does not accept this engine's secret.
    #[error("peer refused the secret")]
    Unauthorized = 12,
    /// The peer has as many connections as it takes, or this process has no descriptors left.
    #[error("no room for another connection")]
    Overloaded = 13,
    /// The engine was closed.
    #[error("engine is closed")]
    Closed = 14,
    /// This system refused a call that the transfer needs.
    #[error("system call failed")]
    System = 15,
    /// The peer's file has become shorter than its region.
    #[error("peer's file was truncated")]
    Truncated = 16,
    /// The peer's file could not be read or written: a failed or full disk.
    #[error("peer's file could not be read or written")]
    Storage = 17,
}

impl Failure {
    const ALL: [Self; 17] = [
        Self::Cancelled,
        Self::DeadlinePassed,
        Self::Unreachable,
        Self::ConnectionLost,
        Self::Silent,
        Self::Restarted,
        Self::NoRegion,
        Self::NoRight,
        Self::OutOfRange,
        Self::Protocol,
        Self::Version,
        Self::Unauthorized,
        Self::Overloaded,
        Self::Closed,
        Self::System,
        Self::Truncated,
        Self::Storage,
    ];

    /// By its number on the wire and in a batch's state.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }

    /// What to do next.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self {
            Self::Cancelled | Self::DeadlinePassed | Self::Closed => Kind::Stop,
            Self::ConnectionLost | Self::Overloaded | Self::System => Kind::Retry,
            Self::Unreachable | Self::Silent | Self::Truncated | Self::Storage => Kind::OtherReplica,
            Self::Restarted | Self::NoRegion => Kind::OpenAgain,
            Self::NoRight | Self::OutOfRange | Self::Protocol | Self::Version | Self::Unauthorized => Kind::Fix,
        }
    }
}

/// What a caller does after an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The same again may succeed.
    Retry,
    /// Take the bytes from elsewhere.
    OtherReplica,
    /// The peer's memory is another: ask where the bytes are now.
    OpenAgain,
    /// The request, a setting or a program is wrong.
    Fix,
    /// Nothing: it was ended on purpose.
    Stop,
}

/// Why a call was refused.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The handle is stale or was never given out.
    #[error("no region {0:?} is registered")]
    UnknownRegion(RegionId),
    /// The handle is stale or was never given out.
    #[error("no segment {0:?} is open")]
    UnknownSegment(SegmentId),
    /// The handle is stale or was never given out.
    #[error("no peer {0:?} is known")]
    UnknownPeer(PeerId),
    /// A slice of request `request` leaves its region.
    #[error("request {request}: {source}")]
    Slice {
        /// Its place in the batch.
        request: usize,
        /// Why.
        #[source]
        source: SliceError,
    },
    /// Read from a segment that grants no read, or write to one that grants no write, or into memory mapped read-only.
    #[error("request {request}: access is not granted")]
    NoRight {
        /// Its place in the batch.
        request: usize,
    },
    /// The transport that was asked for does not reach the segment, or does not any more.
    #[error("request {request}: no such way to the segment")]
    NoWay {
        /// Its place in the batch.
        request: usize,
    },
    /// The local slice of request `request` lies in a registered file: transfers go to and from memory.
    #[error("request {request}: its local slice lies in a file")]
    NotMemory {
        /// Its place in the batch.
        request: usize,
    },
    /// A file that can't be a segment.
    #[error("file can't be a segment: {reason}")]
    NoSegment {
        /// Why not.
        reason: &'static str,
    },
    /// More of something than the engine's bound; ended ones make room.
    #[error("{what}: the bound of {limit} is reached")]
    Full {
        /// Of what.
        what: &'static str,
        /// The bound.
        limit: usize,
    },
    /// A region, a message or a setting of no length, or longer than allowed.
    #[error("{what} of {length} bytes: {minimum} to {maximum} are allowed")]
    Length {
        /// Of what.
        what: &'static str,
        /// As asked.
        length: u64,
        /// At least this.
        minimum: u64,
        /// At most this.
        maximum: u64,
    },
    /// The name is taken by another region.
    #[error("a segment named {0:?} is registered already")]
    NameTaken(String),
    /// The region was withdrawn, but is still used when the deadline passed; its memory is kept until that ends.
    #[error("region {0:?} is still in use")]
    StillInUse(RegionId),
    /// The address is not `host:port`.
    #[error("{address:?} is not host:port")]
    Address {
        /// As given.
        address: String,
    },
    /// The peer could not be asked.
    #[error("{address}: {failure}")]
    Peer {
        /// Its address.
        address: String,
        /// Why.
        failure: Failure,
        /// What the system said, if it did.
        #[source]
        source: Option<io::Error>,
    },
    /// The peer's handler of messages gave up the request, or there is none.
    #[error("peer did not answer: {0}")]
    NoAnswer(&'static str),
    /// A certificate or key of the settings can't be used.
    #[error("{what}: {source}")]
    Certificate {
        /// Which.
        what: &'static str,
        /// Why not.
        #[source]
        source: rustls::Error,
    },
    /// The system refused.
    #[error("{action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The engine is closed.
    #[error("engine is closed")]
    Closed,
}

impl TransferError {
    /// Wraps a system error.
    pub(crate) fn system(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { action, source }
    }

    /// What to do next.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::Peer { failure, .. } => failure.kind(),
            Self::Full { .. } | Self::StillInUse(_) | Self::System { .. } | Self::NoAnswer(_) => Kind::Retry,
            Self::UnknownSegment(_) | Self::UnknownPeer(_) | Self::NoWay { .. } => Kind::OpenAgain,
            Self::Closed => Kind::Stop,
            Self::UnknownRegion(_)
            | Self::Slice { .. }
            | Self::NoRight { .. }
            | Self::NotMemory { .. }
            | Self::NoSegment { .. }
            | Self::Length { .. }
            | Self::NameTaken(_)
            | Self::Certificate { .. }
            | Self::Address { .. } => Kind::Fix,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_keep_their_numbers() {
        for (index, failure) in Failure::ALL.into_iter().enumerate() {
            assert_eq!(failure as usize, index + 1);
            assert_eq!(Failure::from_code(failure as u8), Some(failure));
        }
        assert_eq!(Failure::from_code(0), None);
        assert_eq!(Failure::from_code(18), None);
    }
}
