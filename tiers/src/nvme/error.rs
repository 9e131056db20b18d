//! Errors of the NVMe tier.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tidepool_metadata::{ErrorKind, NodeId};

use super::Location;

/// Why the tier couldn't do something.
#[derive(Debug, thiserror::Error)]
pub enum NvmeError {
    /// A setting out of bounds.
    #[error("nvme.{field} = {value} is out of bounds: {bounds}")]
    Setting {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        bounds: String,
    },
    /// Another process has the folder.
    #[error("{path} is in use by another process: stop it, or give this node a folder of its own")]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// The data file is not ours, or damaged beyond use. It was not touched.
    #[error("{path} is not a data file of this format ({reason}): move it away, or give another folder")]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The folder belongs to another node.
    #[error("{path} belongs to node {owner}, this is node {node}: give each node a folder of its own")]
    OtherNode {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        owner: NodeId,
        /// Who we are.
        node: NodeId,
    },
    /// The disk can't hold even the smallest tier.
    #[error("{path}: {available} bytes available, the smallest tier takes {needed}")]
    DiskFull {
        /// The folder.
        path: PathBuf,
        /// What the file system has for us.
        available: u64,
        /// What it takes.
        needed: u64,
    },
    /// The operating system refused.
    #[error("{action} {path}")]
    Folder {
        /// What was tried, as a verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// One read or write failed.
    #[error("{action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The tier has failed or was closed.
    #[error("the nvme tier is out of service: {reason}")]
    OutOfService {
        /// Why.
        reason: Arc<str>,
    },
    /// No free region, and reclaim made none in time.
    #[error("the nvme tier is full")]
    Full,
    /// The slice can't fit in a region.
    #[error("a slice of {length} bytes doesn't fit a region: at most {limit}")]
    TooLarge {
        /// The slice's length.
        length: u32,
        /// The longest that fits.
        limit: u32,
    },
    /// The source's bytes don't have the header's length and checksum; nothing was stored.
    #[error("slice to write has {length} bytes of checksum {actual:#010x}, its header says {expected:#010x}")]
    SourceMismatch {
        /// Bytes that the source gave.
        length: usize,
        /// Their checksum.
        actual: u32,
        /// The header's.
        expected: u32,
    },
    /// The location's region has been reused, or another record is there: look the location up again.
    #[error("no such record at {location:?} any more")]
    Stale {
        /// The location asked for.
        location: Location,
    },
    /// The range leaves the slice, or the target has no room for it.
    #[error("range {start}..{end} doesn't fit a slice of {length} bytes and its target")]
    Range {
        /// First byte asked for.
        start: u32,
        /// One past the last.
        end: u32,
        /// Length of the slice.
        length: u32,
    },
    /// The bytes on disk are damaged.
    #[error("record at {location:?} is damaged: {what}")]
    Corrupt {
        /// The record.
        location: Location,
        /// Which part.
        what: &'static str,
    },
}

impl NvmeError {
    /// What the caller does next.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Setting { .. } | Self::TooLarge { .. } | Self::Range { .. } => ErrorKind::Invalid,
            Self::Locked { .. } | Self::OtherNode { .. } | Self::NotOurs { .. } | Self::SourceMismatch { .. } => {
                ErrorKind::Conflict
            }
            Self::DiskFull { .. } | Self::Full => ErrorKind::Exhausted,
            Self::Folder { .. } | Self::OutOfService { .. } => ErrorKind::Unavailable,
            Self::Stale { .. } => ErrorKind::NotFound,
            Self::Corrupt { .. } | Self::Io { .. } => ErrorKind::Corrupt,
        }
    }
}
