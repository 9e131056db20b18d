//! Whole systems under load and faults: benchmarks beside the machine's own limits, and node processes to start, stop
//! and kill.

pub mod bench;
pub mod checker;
pub mod cluster;
pub mod drill;
pub mod history;
pub mod lookups;
pub mod node_process;
mod random;
