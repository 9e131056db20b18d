//! The DRAM tier.

mod allocator;

pub use allocator::{Allocator, Block, Blocks};
