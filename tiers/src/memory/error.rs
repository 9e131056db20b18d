//! Errors of the DRAM tier.

use std::io;
use std::path::PathBuf;

use tidepool_metadata::directory::LayoutError;

/// Why a segment can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The system refused.
    #[error("{action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is not that much.
    #[error(
        "reserve {wanted} bytes for the segment {path}: {available} are available; lower dram.capacity, or give that \
         file system (in containers: --shm-size) or the machine more"
    )]
    NoRoom {
        /// The segment.
        path: PathBuf,
        /// Bytes of the segment.
        wanted: u64,
        /// Bytes that its file system, the machine or the control group has.
        available: u64,
    },
    /// Another process has it.
    #[error("segment {path} is in use by another process: stop it first")]
    Locked {
        /// The segment.
        path: PathBuf,
    },
    /// A setting.
    #[error("dram.capacity = {capacity} is out of bounds: 4096 bytes to 16 TiB")]
    Capacity {
        /// What was asked for.
        capacity: u64,
    },
    /// A segment that was just made does not read back: a fault of ours.
    #[error("segment {path}: {source}")]
    Layout {
        /// The segment.
        path: PathBuf,
        /// What is wrong.
        source: LayoutError,
    },
}

/// No room for a slice now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room for a slice of {length} bytes")]
pub struct NoSpace {
    /// Its length in bytes.
    pub length: u32,
}

/// Bytes that do not verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("chunk {chunk} has checksum {actual:#010x}, expected {expected:#010x}")]
pub struct Corrupt {
    /// Which chunk of the slice.
    pub chunk: u32,
    /// What should be.
    pub expected: u32,
    /// What is.
    pub actual: u32,
}
