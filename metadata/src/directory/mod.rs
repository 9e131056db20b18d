//! The shared directory of a node's DRAM segment: who lies where, in a fixed layout that other processes read.
//!
//! Safe code over a slice of atomic words; mapping them is the business of whoever has them. The format, and why it
//! is safe, is in `docs/src/formats/directory.md`: this module is that page in code.
//!
//! One [`Writer`] (the node), any number of [`Reader`]s in any process. Readers take no lock and write nothing: each
//! bucket has a sequence counter, each slot a generation, and on any doubt the answer is [`Lookup::Unsure`].
//!
//! On a crash: [`Writer::recover`] takes what is whole and retires the rest.

mod entry;
mod layout;
#[cfg(test)]
mod loom_tests;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

use std::sync::atomic::{self, AtomicU64, Ordering};

pub use entry::{Extent, Extents, MAX_EXTENTS, PAGE_BYTES};
pub use layout::{HEADER_BYTES, Layout, LayoutError, OWNER_BYTES};
pub use reader::{Doubt, Found, Lookup, Reader, SliceName};
pub use writer::{Recovered, RecoveredSlot, SlotId, SlotPromise, SlotsExhausted, Writer, read_slice};

/// One word of the segment. Real segments are [`AtomicU64`]; the model checker brings its own.
pub trait Cell: Send + Sync {
    /// As of [`AtomicU64::load`].
    fn load(&self, ordering: Ordering) -> u64;
    /// As of [`AtomicU64::store`].
    fn store(&self, value: u64, ordering: Ordering);
    /// As of [`atomic::fence`].
    fn fence(ordering: Ordering);
}

impl Cell for AtomicU64 {
    #[inline]
    fn load(&self, ordering: Ordering) -> u64 {
        self.load(ordering)
    }
    #[inline]
    fn store(&self, value: u64, ordering: Ordering) {
        self.store(value, ordering);
    }
    #[inline]
    fn fence(ordering: Ordering) {
        atomic::fence(ordering);
    }
}

fn pack(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
fn low(word: u64) -> u32 {
    word as u32
}

fn high(word: u64) -> u32 {
    low(word >> 32)
}
