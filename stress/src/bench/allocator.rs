//! How full the extent allocator fills a pool before something must be evicted, and how long it takes.
//!
//! No memory is behind the pools: the allocator is pure. Sizes are those of KV-cache blocks and of the indexes of
//! sparse attention. Time is that of the allocator's own calls: of each allocation by itself, of what an eviction frees
//! together; what the clock takes is measured first and subtracted. On a busy machine the mean has the time of
//! whoever pushed the bench off its core; the median beside it has not.

use std::time::Instant;

use tidepool_metadata::CHUNK_BYTES;
use tidepool_metadata::directory::PAGE_BYTES;
use tidepool_tiers::memory::{Allocator, Blocks};

use super::{BenchOptions, Bound, Error, Figure};
use crate::random::Random;

const BLOCK_BYTES: u64 = 3_274_752;
const INDEX_BYTES: u64 = 658_432;
const SLICE_BYTES: u64 = 4 << 20;
const TARGET_NANOSECONDS: f64 = 200.0;
const TARGET_P99_NANOSECONDS: f64 = 2000.0;

/// Runs the three workloads.
///
/// # Errors
/// None: the allocator is pure.
pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let large = if options.quick { 64 << 30 } else { 1 << 40 };
    let evictions = if options.quick { 20 } else { 100 };
    let mut figures = Vec::new();

    let mut pool = Pool::new(large);
    while pool.fills.len() < evictions {
        pool.put(BLOCK_BYTES, Pool::evict_a_twentieth);
    }
    figures.extend(pool.figures("one size", 0.985));

    let mut pool = Pool::new(large);
    while pool.fills.len() < evictions {
        let count = 1 + pool.random.below(128);
        for bytes in [BLOCK_BYTES, INDEX_BYTES] {
            (0..count).for_each(|_| pool.put(bytes, Pool::evict_a_twentieth));
        }
    }
    figures.extend(pool.figures("pairs of two sizes", 0.985));

    let mut pool = Pool::new(2 << 30);
    while pool.fills.len() < 100 * evictions {
        let bytes = 1024 + pool.random.below((64 << 20) - 1024 + 1);
        pool.put(bytes, Pool::evict_one);
    }
    figures.extend(pool.figures("uniform sizes", 0.98));
    Ok(figures)
}

/// A pool under one workload.
struct Pool {
    allocator: Allocator,
    random: Random,
    objects: Vec<(u64, Vec<Blocks>)>,
    live_bytes: u64,
    /// Live bytes over capacity just before each eviction.
    fills: Vec<f64>,
    /// Nanoseconds of each slice's allocation.
    allocations: Vec<f64>,
    frees: f64,
    clock: f64,
}

impl Pool {
    fn new(bytes: u64) -> Self {
        let pages = u32::try_from(bytes / PAGE_BYTES as u64).expect("at most 16 TiB");
        let mut nothing: Vec<f64> = (0..10_000).map(|_| nanoseconds_of(|| ()).0).collect();
        nothing.sort_by(f64::total_cmp);
        Self {
            allocator: Allocator::new(pages),
            random: Random::new(1),
            objects: Vec::new(),
            live_bytes: 0,
            fills: Vec::new(),
            allocations: Vec::new(),
            frees: 0.0,
            clock: nothing[nothing.len() / 2],
        }
    }

    /// Puts an object; where it does not fit, evicts and tries again.
    fn put(&mut self, bytes: u64, evict: fn(&mut Self)) {
        loop {
            if let Some(slices) = self.try_allocate(bytes) {
                self.objects.push((bytes, slices));
                self.live_bytes += bytes;
                return;
            }
            let capacity = u64::from(self.allocator.pages()) * PAGE_BYTES as u64;
            self.fills.push(self.live_bytes as f64 / capacity as f64);
            evict(self);
        }
    }

    fn try_allocate(&mut self, bytes: u64) -> Option<Vec<Blocks>> {
        let mut slices = Vec::with_capacity(bytes.div_ceil(SLICE_BYTES) as usize);
        let mut rest = bytes;
        while rest > 0 {
            let length = rest.min(SLICE_BYTES);
            let (took, blocks) = nanoseconds_of(|| self.allocator.allocate(pages_of(length)));
            let Some(blocks) = blocks else {
                self.free(slices);
                return None;
            };
            self.allocations.push((took - self.clock).max(0.0));
            slices.push(blocks);
            rest -= length;
        }
        Some(slices)
    }

    /// Gives slices back, timed together: what an eviction frees, it frees in one go.
    fn free(&mut self, slices: Vec<Blocks>) {
        let (took, ()) = nanoseconds_of(|| {
            slices.iter().flat_map(|blocks| blocks.iter()).for_each(|&block| self.allocator.free(block))
        });
        self.frees += (took - self.clock).max(0.0);
    }

    fn evict(&mut self, count: usize) {
        let mut slices = Vec::new();
        for _ in 0..count {
            let victim = self.random.below(self.objects.len() as u64) as usize;
            let (bytes, its_slices) = self.objects.swap_remove(victim);
            self.live_bytes -= bytes;
            slices.extend(its_slices);
        }
        self.free(slices);
    }

    fn evict_one(&mut self) {
        self.evict(1);
    }

    fn evict_a_twentieth(&mut self) {
        self.evict(self.objects.len().div_ceil(20));
    }

    fn figures(mut self, name: &str, target: f64) -> [Figure; 3] {
        let mean_fill = self.fills.iter().sum::<f64>() / self.fills.len() as f64;
        let least_fill = self.fills.iter().copied().fold(1.0, f64::min);
        let several = self.objects.iter().flat_map(|(_, slices)| slices).filter(|blocks| blocks.len() > 1).count();
        let slices: usize = self.objects.iter().map(|(_, slices)| slices.len()).sum();
        self.allocations.sort_by(f64::total_cmp);
        let count = self.allocations.len();
        let mean = (self.allocations.iter().sum::<f64>() + self.frees) / count as f64;
        let p99 = self.allocations[count * 99 / 100];
        [
            Figure::number(format!("{name}: fill before eviction"), mean_fill, "of capacity", Some(Bound::AtLeast(target)))
                .remark(format!(
                    "least {least_fill:.4} in {} evictions; {:.1} % of live slices lie in several extents",
                    self.fills.len(),
                    100.0 * several as f64 / slices.max(1) as f64
                )),
            Figure::number(format!("{name}: slice with its free"), mean, "ns", Some(Bound::AtMost(TARGET_NANOSECONDS)))
                .remark(format!(
                    "{count} slices; median of the allocations {:.0} ns; {:.0} ns for the clock subtracted from each call",
                    self.allocations[count / 2],
                    self.clock
                )),
            Figure::number(format!("{name}: allocation, p99"), p99, "ns", Some(Bound::AtMost(TARGET_P99_NANOSECONDS))),
        ]
    }
}

/// Pages of a slice with its chunks' checksums, as the DRAM tier stores it.
fn pages_of(length: u64) -> u32 {
    let chunks = length.div_ceil(CHUNK_BYTES as u64);
    let checksums = if chunks > 1 { length.next_multiple_of(4) - length + 4 * chunks } else { 0 };
    (length + checksums).div_ceil(PAGE_BYTES as u64) as u32
}

fn nanoseconds_of<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let started = Instant::now();
    let result = std::hint::black_box(work());
    (started.elapsed().as_nanos() as f64, result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_fill_as_far_as_they_must() {
        let mut pool = Pool::new(1 << 30);
        while pool.fills.len() < 20 {
            for bytes in [BLOCK_BYTES, INDEX_BYTES] {
                (0..10).for_each(|_| pool.put(bytes, Pool::evict_a_twentieth));
            }
        }
        let [fill, ..] = pool.figures("pairs", 0.985);
        assert_eq!(fill.is_met(), Some(true), "{fill}");
    }
}
