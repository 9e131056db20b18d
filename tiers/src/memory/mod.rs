//! The DRAM tier.

pub mod allocator;
