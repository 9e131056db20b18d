//! What a replay found.

use serde::Serialize;

use super::histogram::Percentiles;
use super::payload::Mismatch;

/// Wrong blocks and errors that a report names; more are only counted.
pub(super) const REMEMBERED: usize = 16;

/// A block that came back with wrong bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WrongBlock {
    /// A byte differs.
    Byte(Mismatch),
    /// The length differs.
    Length {
        /// The block.
        hash_id: u64,
        /// Bytes that came back.
        actual: usize,
    },
}

impl std::fmt::Display for WrongBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Byte(mismatch) => mismatch.fmt(f),
            Self::Length { hash_id, actual } => write!(f, "block {hash_id} came back with {actual} bytes"),
        }
    }
}

/// What a replay found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ReplayReport {
    /// Requests replayed.
    pub requests: usize,
    /// Blocks read.
    pub blocks: usize,
    /// Blocks found.
    pub hits: usize,
    /// Blocks found before the request's first miss: what a serving system can use.
    pub prefix_hits: usize,
    /// Hits in DRAM.
    pub hits_dram: usize,
    /// Hits on NVMe.
    pub hits_nvme: usize,
    /// Blocks put.
    pub puts: usize,
    /// Blocks that came back with other bytes than were put.
    pub wrong_blocks: usize,
    /// Calls that failed.
    pub errors: usize,
    /// The first wrong blocks and errors, in words.
    pub remarks: Vec<String>,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Bytes read from the store.
    pub read_bytes: u64,
    /// Bytes put into it.
    pub put_bytes: u64,
    /// Latency of reads that found their block.
    pub hit_latency: Percentiles,
    /// Latency of reads that found nothing.
    pub miss_latency: Percentiles,
    /// Latency of puts.
    pub put_latency: Percentiles,
}

impl ReplayReport {
    /// Blocks found as a share of blocks read.
    #[must_use]
    pub fn block_hit_ratio(&self) -> f64 {
        self.hits as f64 / self.blocks.max(1) as f64
    }

    /// Blocks found before the first miss of their request as a share of blocks read.
    #[must_use]
    pub fn prefix_hit_ratio(&self) -> f64 {
        self.prefix_hits as f64 / self.blocks.max(1) as f64
    }

    /// Bytes moved a second, reads and puts together.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        (self.read_bytes + self.put_bytes) as f64 / self.seconds.max(1e-9)
    }

    /// Whether every byte was right and every call answered.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.wrong_blocks == 0 && self.errors == 0
    }

    pub(super) fn add(&mut self, request: &Self) {
        self.blocks += request.blocks;
        self.hits += request.hits;
        self.prefix_hits += request.prefix_hits;
        self.hits_dram += request.hits_dram;
        self.hits_nvme += request.hits_nvme;
        self.puts += request.puts;
        self.wrong_blocks += request.wrong_blocks;
        self.errors += request.errors;
        self.read_bytes += request.read_bytes;
        self.put_bytes += request.put_bytes;
        request.remarks.iter().for_each(|remark| self.remark(remark));
    }

    pub(super) fn remark(&mut self, remark: impl std::fmt::Display) {
        if self.remarks.len() < REMEMBERED {
            self.remarks.push(remark.to_string());
        }
    }
}
