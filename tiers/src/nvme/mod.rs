//! The NVMe tier: a log of slice records in regions of one preallocated file.
//!
//! Not an index: [`NvmeTier::write`] gives a [`Location`], which the store above keeps and reads by. Not a policy: what
//! is written, kept or dropped is decided above ([`RecordOwner`]).
//!
//! Invariants: the data file never outgrows `capacity_bytes`; a read gives bytes only if the record is the one asked
//! for and every chunk's checksum holds; `used + reserved + free == capacity`; no region is written again while it is
//! being read, or before its end is durable.
//!
//! Threads: one of the I/O engine that drives the ring (or a few that block), one flusher that does all writing. The
//! async functions need no runtime of their own; [`NvmeTier::reclaim`] is a future for the owner to spawn.
//!
//! Failure: a failed write or sync, reads that fail again and again, or a data file that vanished take the tier out of
//! service ([`TierState::Failed`]); the process lives, and the tier can be opened again. Crash: docs/src/formats/nvme.md.

mod config;
mod core;
mod error;
mod flush;
mod folder;
pub mod format;
mod location;
mod open_region;
mod read;
mod reclaim;
mod recover;
mod region;
mod scrub;
mod tier;

pub use config::{DirectChoice, NvmeConfig, WritePolicy};
pub use core::{TierState, Written};
pub use error::NvmeError;
pub use location::Location;
pub use open_region::SliceSource;
pub use read::{SliceName, VecTarget};
pub use reclaim::{RecordOwner, Verdict};
pub use recover::{Recovered, ScanBatch};
pub use region::NvmeUsage;
pub use scrub::ScrubReport;
pub use tier::{NvmeStats, NvmeTier};

pub use crate::io::BoxFuture;

/// An error and its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
