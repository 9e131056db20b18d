//! The first requests of the conversation trace through three nodes that keep two copies of each block, once undisturbed, and once while a node is
//! killed and brought back twice: readers may not notice but by the clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tidepool_client::ClientSettings;
use tidepool_client::workload::{Replay, ReplayReport, Trace};

use super::load::runtime;
use super::{BenchOptions, Bound, Error, Figure};
use crate::cluster::Cluster;

const NODES: usize = 3;
const BLOCK_BYTES: usize = 64 << 10;
const CONCURRENCY: usize = 8;
/// Requests of the trace, from its start: what three nodes on two cores get done in the time that the kills take.
const REQUESTS: usize = 3000;
const QUICK_REQUESTS: usize = 500;
/// What each node lends.
const DRAM_BYTES: u64 = 512 << 20;
const NVME_BYTES: u64 = 2 << 30;
/// The largest difference of hit ratios.
const TOLERANCE: f64 = 0.02;
/// Which node is killed: not the first, which is the leader most likely.
const VICTIM: usize = 1;

/// How a run goes, in seconds: how long it takes, how long the node is away, and how long it is there between two kills.
struct Times {
    whole: f64,
    away: Duration,
    between: Duration,
}

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let mut trace = Trace::open(&options.data.join("conversation_trace.jsonl"))?;
    let times = if options.quick {
        trace.truncate(QUICK_REQUESTS);
        Times { whole: 20.0, away: Duration::from_secs(3), between: Duration::from_secs(4) }
    } else {
        trace.truncate(REQUESTS);
        Times { whole: 110.0, away: Duration::from_secs(15), between: Duration::from_secs(30) }
    };
    let undisturbed = replay(options, &trace, &times, false)?;
    let disturbed = replay(options, &trace, &times, true)?;
    let (before, after) = (undisturbed.block_hit_ratio(), disturbed.block_hit_ratio());
    let remark = format!(
        "{after:.4} beside {before:.4} undisturbed; {} requests, {} blocks read, {} put, in {:.0} s and {:.0} s; gets p99 {:.1} beside {:.1} ms{}",
        disturbed.requests,
        disturbed.blocks,
        disturbed.puts,
        disturbed.seconds,
        undisturbed.seconds,
        disturbed.hit_latency.p99_us / 1e3,
        undisturbed.hit_latency.p99_us / 1e3,
        disturbed.remarks.iter().map(|remark| format!("\n           {remark}")).collect::<String>(),
    );
    let none = Some(Bound::AtMost(0.0));
    let wrong = (undisturbed.wrong_blocks + disturbed.wrong_blocks) as f64;
    let failed = (undisturbed.errors + disturbed.errors) as f64;
    Ok(vec![
        Figure::number("a node killed twice: wrong blocks", wrong, "", none),
        Figure::number("a node killed twice: failed calls", failed, "", none),
        Figure::number(
            "a node killed twice: hit ratio off by",
            (before - after).abs(),
            "",
            Some(Bound::AtMost(TOLERANCE)),
        )
        .remark(remark),
    ])
}

fn replay(options: &BenchOptions, trace: &Trace, times: &Times, disturb: bool) -> Result<ReplayReport, Error> {
    let settings = ["replicas.count=2", "store.scrub_bytes_per_second=0", "telemetry.log_filter=warn"];
    let mut cluster = Cluster::new(options.tidepool.clone(), &settings)?.lending(DRAM_BYTES, NVME_BYTES);
    cluster.grow(NODES)?;
    let runtime = runtime()?;
    let client = {
        let _in_runtime = runtime.enter();
        cluster.client_with(ClientSettings { deadline: Duration::from_secs(20), ..ClientSettings::default() })?
    };
    let last = trace.requests.last().map_or(1, |request| request.timestamp.max(1));
    // Timestamps of the trace are milliseconds.
    let replay =
        Replay { block_bytes: BLOCK_BYTES, concurrency: CONCURRENCY, speed: Some(last as f64 / 1e3 / times.whole) };
    let done = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&done);
    let progress = move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    };
    let running = {
        let (trace, client) = (trace.clone(), Arc::new(client));
        runtime.spawn(async move { replay.run(&trace, client, progress).await })
    };
    if disturb {
        // Something has been put by then that can be lost.
        let quarter = Duration::from_secs_f64(times.whole / 4.0);
        let began = Instant::now();
        while began.elapsed() < quarter && done.load(Ordering::Relaxed) < trace.requests.len() {
            std::thread::sleep(Duration::from_millis(20));
        }
        for pause in [times.between, Duration::ZERO] {
            cluster.kill(VICTIM)?;
            std::thread::sleep(times.away);
            cluster.restart(VICTIM)?;
            std::thread::sleep(pause);
        }
        if running.is_finished() {
            return Err("the replay ended before the second kill".into());
        }
    }
    Ok(runtime.block_on(running)??)
}
