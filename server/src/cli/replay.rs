//! `tidepool replay`: drives a recorded trace through the public client, and shows the trace's own limits beside what
//! the node reached.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use tidepool_client::workload::simulate::{belady, hit_ratio, lru};
use tidepool_client::workload::{Percentiles, Progress, Replay, ReplayReport, Trace, TraceFacts};

use super::connection::ConnectionArguments;
use super::failure::{Failure, NO};
use super::output::{Output, Table, rate, ratio, size};
use crate::admin::report::TiersReport;
use crate::config::Size;

/// Connections of a replay: more than two cores can keep busy.
const CONNECTIONS: usize = 4;

#[derive(Debug, Args)]
pub(super) struct ReplayArguments {
    /// Trace: one request a line, as the Mooncake traces have them
    #[arg(default_value = "data/conversation_trace.jsonl")]
    trace: PathBuf,
    /// Bytes of a block
    #[arg(long, default_value = "64KiB", value_name = "SIZE")]
    block: Size,
    /// Requests at a time
    #[arg(long, short, default_value_t = 16)]
    concurrency: usize,
    /// Seconds of the trace a second; without it, as fast as the node answers
    #[arg(long)]
    speed: Option<f64>,
    /// Only the first so many requests
    #[arg(long, value_name = "COUNT")]
    requests: Option<usize>,
}

/// What a replay found, beside what could be.
#[derive(Debug, Serialize)]
struct Answer {
    trace: TraceFacts,
    block_hit_ratio: f64,
    prefix_hit_ratio: f64,
    bytes_per_second: f64,
    limits: Option<Limits>,
    #[serde(flatten)]
    report: ReplayReport,
}

/// What simulated caches of the node's capacity reach on this trace.
#[derive(Debug, Serialize)]
struct Limits {
    capacity_bytes: u64,
    capacity_blocks: usize,
    belady: f64,
    lru: f64,
}

pub(super) async fn run(
    arguments: &ReplayArguments,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let mut trace = Trace::open(&arguments.trace).map_err(|error| {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
        Failure::usage(format!("{error}{cause}"))
    })?;
    trace.truncate(arguments.requests.unwrap_or(usize::MAX));
    let block_bytes = usize::try_from(arguments.block.0).map_err(|_| Failure::usage("--block is too large"))?;
    let replay = Replay { block_bytes, concurrency: arguments.concurrency, speed: arguments.speed };
    let client = Arc::new(connection.client(CONNECTIONS)?);
    // A wrong address is better said once than a hundred thousand times.
    client.server_info().await?;

    let bar = output.progress(trace.requests.len() as u64, "{bar:30} {pos}/{len} requests, {msg}, {eta} left");
    let shown = bar.clone();
    let progress = move |now: Progress| {
        shown.set_position(now.requests as u64);
        shown.set_message(format!("hit ratio {:.4}", hit_ratio(now.hits, now.blocks)));
    };
    let report = replay.run(&trace, client, progress).await.map_err(|error| Failure::usage(error.to_string()))?;
    bar.finish_and_clear();

    // The limits are an addition: without admin HTTP the replay is worth as much.
    let tiers = async { connection.admin()?.get::<TiersReport>("/v1/tiers").await }.await.ok();
    let limits = tiers.map(|tiers| limits(&trace, &tiers, block_bytes));
    let clean = report.is_clean();
    let answer = Answer {
        trace: trace.facts(),
        block_hit_ratio: report.block_hit_ratio(),
        prefix_hit_ratio: report.prefix_hit_ratio(),
        bytes_per_second: report.bytes_per_second(),
        limits,
        report,
    };
    output.answer(&answer, |answer| render(answer, block_bytes))?;
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::from(NO) })
}

fn limits(trace: &Trace, tiers: &TiersReport, block_bytes: usize) -> Limits {
    let capacity_bytes = tiers.tiers.iter().map(|tier| tier.capacity).sum();
    let capacity_blocks = usize::try_from(capacity_bytes / block_bytes as u64).unwrap_or(usize::MAX);
    let accesses = trace.accesses();
    let reached = |hits| hit_ratio(hits, accesses.len());
    let (belady, lru) = (reached(belady(&accesses, capacity_blocks)), reached(lru(&accesses, capacity_blocks)));
    Limits { capacity_bytes, capacity_blocks, belady, lru }
}

fn render(answer: &Answer, block_bytes: usize) -> String {
    let Answer { trace, report, limits, .. } = answer;
    let mut text = format!(
        "{} requests, {} blocks of {} ({} distinct) in {:.1} s\n\n",
        report.requests,
        report.blocks,
        size(block_bytes as u64),
        trace.distinct,
        report.seconds
    );
    let mut ratios = Table::new(&["hit ratio", ""]);
    ratios.row(["blocks, this node".into(), ratio(answer.block_hit_ratio)]);
    if let Some(limits) = limits {
        ratios.row([format!("  LRU with {}", size(limits.capacity_bytes)), ratio(limits.lru)]);
        ratios.row([format!("  Belady's optimum with {}", size(limits.capacity_bytes)), ratio(limits.belady)]);
    }
    ratios.row(["  without any eviction".into(), ratio(trace.highest_hit_ratio)]);
    ratios.row(["prefixes, this node".into(), ratio(answer.prefix_hit_ratio)]);
    text += &ratios.render();

    let mut tiers = Table::new(&["served from", "blocks"]);
    tiers.row(["DRAM".into(), report.hits_dram.to_string()]);
    tiers.row(["NVMe".into(), report.hits_nvme.to_string()]);
    tiers.row(["nowhere: put".into(), report.puts.to_string()]);
    text += &format!("\n{}", tiers.render());

    let mut latencies = Table::new(&["latency", "count", "p50", "p99", "p999"]);
    let us = |microseconds: f64| format!("{microseconds:.0} us");
    let mut latency = |name: &str, of: &Percentiles| {
        latencies.row([name.to_owned(), of.count.to_string(), us(of.p50_us), us(of.p99_us), us(of.p999_us)]);
    };
    latency("get, found", &report.hit_latency);
    latency("get, missing", &report.miss_latency);
    latency("put", &report.put_latency);
    text += &format!("\n{}", latencies.render());

    let (read, put) = (size(report.read_bytes), size(report.put_bytes));
    text += &format!("\n{read} read and verified, {put} put, together {}\n", rate(answer.bytes_per_second));
    text += &format!("wrong blocks: {}, failed calls: {}\n", report.wrong_blocks, report.errors);
    for remark in &report.remarks {
        text += &format!("  {remark}\n");
    }
    text
}
