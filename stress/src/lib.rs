//! Whole systems under load and faults: benchmarks beside the machine's own limits, and node processes to start, stop
//! and kill.

pub mod bench;
pub mod cluster;
pub mod node_process;
