//! The conversation trace through a node process, 64 KiB a block.
//!
//! One small node, one request at a time, beside the same policy simulated at the capacity that the node really has:
//! watermarks, free regions and record overhead taken off. And one larger node under sixteen requests at a time, where
//! every byte must be right and every call answered.

use std::process::Command;
use std::sync::Arc;

use serde::Deserialize;
use tidepool_client::workload::simulate::{Reinsertion, TwoTier, belady, hit_ratio, lru};
use tidepool_client::workload::{Replay, ReplayReport, Trace, block_key};
use tidepool_tiers::nvme::NvmeConfig;
use tidepool_tiers::nvme::format::{ENTRY_FIXED_BYTES, REGIONS_START, RecordLayout, TRAILER_BYTES};

use super::load::{node, runtime};
use super::{BenchOptions, Bound, Error, Figure};
use crate::node_process::NodeProcess;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const BLOCK_BYTES: usize = 64 << 10;
/// The largest difference of hit ratios.
const TOLERANCE: f64 = 0.01;
/// Requests of a quick run.
const QUICK_REQUESTS: usize = 1000;

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let mut trace = Trace::open(&options.data.join("conversation_trace.jsonl"))?;
    if options.quick {
        trace.truncate(QUICK_REQUESTS);
    }
    let accesses = trace.accesses();
    let mut figures = Vec::new();

    let (dram, nvme) = (64 * MIB, 512 * MIB);
    let report = replay(options, &trace, "replay-small", dram, nvme, 1)?;
    let simulated = simulated_node(&Settings::of(options)?, dram, nvme).run(&accesses);
    let reached = report.block_hit_ratio();
    let blocks = usize::try_from((dram + nvme) / BLOCK_BYTES as u64)?;
    let beside = format!(
        "node {reached:.4} (prefixes {:.4}), simulated {:.4} (DRAM {:.4}); LRU of all bytes {:.4}, Belady {:.4}, \
         without eviction {:.4}; {:.0} s",
        report.prefix_hit_ratio(),
        simulated.ratio(),
        hit_ratio(simulated.dram, simulated.accesses),
        hit_ratio(lru(&accesses, blocks), accesses.len()),
        hit_ratio(belady(&accesses, blocks), accesses.len()),
        trace.facts().highest_hit_ratio,
        report.seconds,
    );
    let difference = (reached - simulated.ratio()).abs();
    figures.push(
        Figure::number("64 MiB + 512 MiB: hit ratio off by", difference, "", Some(Bound::AtMost(TOLERANCE)))
            .remark(beside),
    );
    figures.extend(clean("64 MiB + 512 MiB, 1 at a time", &report));

    let report = replay(options, &trace, "replay-large", GIB, 4 * GIB, 16)?;
    figures.extend(clean("1 GiB + 4 GiB, 16 at a time", &report));
    Ok(figures)
}

fn clean(name: &str, report: &ReplayReport) -> Vec<Figure> {
    let latency = |name: &str, of: tidepool_client::workload::Percentiles| {
        format!("{name} p50 {:.0}, p99 {:.0}, p999 {:.0} us", of.p50_us, of.p99_us, of.p999_us)
    };
    let remark = format!(
        "hit ratio {:.4}, {} from DRAM, {} from NVMe; {:.2} GB/s; {}; {}{}",
        report.block_hit_ratio(),
        report.hits_dram,
        report.hits_nvme,
        report.bytes_per_second() / 1e9,
        latency("get", report.hit_latency),
        latency("put", report.put_latency),
        report.remarks.iter().map(|remark| format!("\n           {remark}")).collect::<String>(),
    );
    let none = Some(Bound::AtMost(0.0));
    vec![
        Figure::number(format!("{name}: wrong blocks"), report.wrong_blocks as f64, "", none),
        Figure::number(format!("{name}: failed calls"), report.errors as f64, "", none).remark(remark),
    ]
}

fn replay(
    options: &BenchOptions,
    trace: &Trace,
    name: &str,
    dram_bytes: u64,
    nvme_bytes: u64,
    concurrency: usize,
) -> Result<ReplayReport, Error> {
    let runtime = runtime()?;
    let mut node = NodeProcess::start(node(options, name, dram_bytes, nvme_bytes))?;
    let client = {
        let _in_runtime = runtime.enter();
        Arc::new(node.client(4)?)
    };
    let replay = Replay { block_bytes: BLOCK_BYTES, concurrency, speed: None };
    let report = runtime.block_on(replay.run(trace, client, |_| {}))?;
    node.stop()?;
    Ok(report)
}

/// The node's own defaults, as the node prints them.
#[derive(Deserialize)]
struct Settings {
    dram: DramSettings,
    store: StoreSettings,
}

#[derive(Deserialize)]
struct DramSettings {
    watermark_low: f64,
    watermark_high: f64,
}

#[derive(Deserialize)]
struct StoreSettings {
    promote_after_reads: u8,
}

impl Settings {
    fn of(options: &BenchOptions) -> Result<Self, Error> {
        let printed = Command::new(&options.tidepool).args(["config", "print", "--json"]).output()?;
        Ok(serde_json::from_slice(&printed.stdout)?)
    }
}

/// The node's policy at the capacity that is left for blocks.
fn simulated_node(settings: &Settings, dram_bytes: u64, nvme_bytes: u64) -> TwoTier {
    let mean = |low: f64, high: f64| (low + high) / 2.0;
    // DRAM goes up and down between its watermarks; a block of one chunk takes just its pages.
    let dram = dram_bytes as f64 * mean(settings.dram.watermark_low, settings.dram.watermark_high);
    let nvme = NvmeConfig::default();
    let regions = (nvme_bytes - REGIONS_START) / nvme.region_bytes;
    // So do regions in use; at least three are kept free.
    let watermark = (regions as f64 * mean(nvme.watermark_low, nvme.watermark_high)) as u64;
    let key_bytes = block_key(0, BLOCK_BYTES).len();
    let record_bytes = RecordLayout::at(0, key_bytes, BLOCK_BYTES).record_bytes as u64;
    let entry_bytes = (ENTRY_FIXED_BYTES + key_bytes) as u64;
    let page_and_trailer = 4096 + TRAILER_BYTES as u64;
    TwoTier {
        dram_blocks: (dram / BLOCK_BYTES as f64) as usize,
        region_blocks: ((nvme.region_bytes - page_and_trailer) / (record_bytes + entry_bytes)) as usize,
        regions: watermark.min(regions - 3) as usize,
        promote_after_reads: settings.store.promote_after_reads,
        reinsertion: Reinsertion::ReadSinceWritten,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_simulated_node_is_smaller_than_its_bytes() {
        let settings = Settings {
            dram: DramSettings { watermark_low: 0.90, watermark_high: 0.95 },
            store: StoreSettings { promote_after_reads: 2 },
        };
        let node = simulated_node(&settings, 64 * MIB, 512 * MIB);
        assert!((900..1024).contains(&node.dram_blocks), "{node:?}");
        assert!((200..256).contains(&node.region_blocks) && (25..=28).contains(&node.regions), "{node:?}");
    }
}
