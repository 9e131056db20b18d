//! Benchmarks: each figure beside the limit measured in the same run, with the target and whether it is met.

mod allocator;
mod catalog;
mod catalog_size;
mod complete;
mod dram;
mod engine;
mod failover;
mod figure;
mod grpc;
mod latency;
mod load;
mod local;
mod memory;
mod nodes;
mod nvme;
pub mod pairs;
mod perf;
mod recovery;
mod replay;
mod replay_nodes;
mod replicas;
mod scaling;
mod soak;

use std::path::PathBuf;
use std::time::Duration;

pub use figure::{Bound, Figure, Value};
pub use pairs::{Pair, PairSummary, Sample};

/// What went wrong in a bench: it ends, its name is told, the others run.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// What a bench may use.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Fewer and shorter pairs.
    pub quick: bool,
    /// For files.
    pub folder: PathBuf,
    /// For the DRAM segments of nodes: on a tmpfs, removed after the bench.
    pub segments: PathBuf,
    /// The node's binary.
    pub tidepool: PathBuf,
    /// Folder with the recorded traces.
    pub data: PathBuf,
}

impl BenchOptions {
    /// How many pairs to measure.
    #[must_use]
    pub fn pairs(&self) -> usize {
        if self.quick { 3 } else { 11 }
    }

    /// How long one side of a pair runs.
    #[must_use]
    pub fn side(&self) -> Duration {
        if self.quick { Duration::from_millis(200) } else { Duration::from_secs(1) }
    }
}

/// One benchmark.
pub struct Bench {
    /// What it is asked for by.
    pub name: &'static str,
    /// What it measures.
    pub about: &'static str,
    /// Runs it.
    pub run: fn(&BenchOptions) -> Result<Vec<Figure>, Error>,
}

/// All benchmarks, in the order in which they run.
pub const BENCHES: &[Bench] = &[
    Bench { name: "allocator", about: "how full pools get and how long extents take", run: allocator::run },
    Bench { name: "dram", about: "put, copying get and verified view beside memcpy", run: dram::run },
    Bench {
        name: "engine",
        about: "the transfer engine beside memcpy, bare sockets and iperf3, by tidepool-transfer-bench",
        run: engine::run,
    },
    Bench {
        name: "engine-soak",
        about: "what the engine holds after ten million requests, beside after one",
        run: engine::run_soak,
    },
    Bench { name: "grpc", about: "streaming put and get beside a raw blocking socket", run: grpc::run },
    Bench {
        name: "native",
        about: "put and get by the native client beside a raw blocking socket",
        run: grpc::run_native,
    },
    Bench { name: "local", about: "reads on the node's host, without a call, beside memcpy", run: local::run },
    Bench { name: "nvme", about: "demotion, cold reads and scan of the NVMe tier beside fio", run: nvme::run },
    Bench { name: "replay", about: "the conversation trace through a node, beside its simulation", run: replay::run },
    Bench { name: "scaling", about: "cost of put, get and eviction from 10^4 to 10^6 objects", run: scaling::run },
    Bench { name: "memory", about: "resident memory beside its budget", run: memory::run },
    Bench { name: "recovery", about: "how soon a restarted node serves and knows what it has", run: recovery::run },
    Bench {
        name: "catalog",
        about: "questions and changes on three voters beside pings and synced writes",
        run: catalog::run,
    },
    Bench { name: "catalog-size", about: "memory and start of a catalog of 10^7 objects", run: catalog_size::run },
    Bench { name: "failover", about: "what clients notice when the leader is killed, 100 times", run: failover::run },
    Bench {
        name: "replicas",
        about: "puts of two copies beside puts of one, and the loss of a node",
        run: replicas::run,
    },
    Bench {
        name: "nodes",
        about: "how fast copies are made anew and nodes emptied, what readers feel of it, a node's return",
        run: nodes::run,
    },
    Bench {
        name: "replay-nodes",
        about: "the conversation trace on three nodes, one of which is killed twice",
        run: replay_nodes::run,
    },
    Bench { name: "soak", about: "what a node holds after ten million puts, beside after two", run: soak::run },
];
