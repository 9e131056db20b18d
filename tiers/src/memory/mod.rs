//! The DRAM tier: slices in a named shared-memory segment that outlives the process.
//!
//! Ownership says it all: a [`SliceBuffer`] is exclusive and is filled; sealed it becomes an immutable [`SharedSlice`],
//! entered in the segment's directory (`docs/src/formats/directory.md`); when the last of it is dropped the entry is
//! retired, its generation goes up, and only then its pages can be taken again, or once no reader in another process keeps them (`kept`). So a
//! [`SharedSlice`] is a hold.
//!
//! It knows nothing of eviction, objects or tiers.
//!
//! Invariants: `free + used + reserved == capacity`; pages belong to exactly one buffer or slice.
//! On a crash the entries stay in the segment; [`MemoryTier::open`] gives back those that are whole.

mod allocator;
mod arena;
mod blocks;
mod buffer;
mod error;
mod found;
mod kept;
mod recovered;
mod segment;
mod slice;
mod stream;
mod tier;

pub use allocator::{Allocator, Block};
pub use blocks::Blocks;
pub use buffer::SliceBuffer;
pub use error::{Corrupt, MemoryError, NoSpace};
pub use found::{FoundSegment, segment_folders, segments_in};
pub use recovered::{RecoveredSlice, RecoveredSlices};
pub use slice::{SharedSlice, Slice};
pub use tier::{MemoryConfig, MemoryTier, Usage};
