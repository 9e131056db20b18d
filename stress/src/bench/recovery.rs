//! How soon a node that was stopped, killed, or robbed of its catalog serves again, and knows what it has.

use std::time::{Duration, Instant};

use super::load::{fill, key, node, runtime};
use super::{BenchOptions, Bound, Error, Figure};
use crate::node_process::NodeProcess;

/// How long to wait for the end of a recovery.
const PATIENCE: Duration = Duration::from_secs(120);
const DRAM_BYTES_PER_OBJECT: u64 = 4096 * 5 / 4;

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let objects: u64 = if options.quick { 50_000 } else { 1_000_000 };
    let runtime = runtime()?;
    let mut node = NodeProcess::start(node(options, "recovery", objects * DRAM_BYTES_PER_OBJECT, 0))?;
    let connect = |node: &NodeProcess| {
        let _in_runtime = runtime.enter();
        node.client(4)
    };
    let client = connect(&node)?;
    runtime.block_on(fill(&client, 0..objects, 100))?;
    // Hot: read often enough to be in the heat list.
    let hot = key(objects / 2);
    for _ in 0..8 {
        runtime.block_on(client.get(&hot))?;
    }
    let mut figures = Vec::new();
    for (how, kill) in [("SIGTERM", false), ("kill -9", true)] {
        if kill {
            node.kill()?;
        } else {
            node.stop()?;
        }
        node = node.restart()?;
        let client = connect(&node)?;
        let found = runtime.block_on(client.get(&hot))?;
        let first = node.started.elapsed().as_secs_f64();
        found.ok_or("the hot object is gone")?;
        figures.push(Figure::number(format!("{how}: first hot key"), first, "s", Some(Bound::AtMost(0.5))));
        let seconds = wait_finished(&node)?;
        let kept = node.admin("/v1/info")?["objects"].as_u64().unwrap_or(0);
        let figure = Figure::number(format!("{how}: all known again"), seconds, "s", None);
        figures.push(figure.remark(format!("{kept} of {objects} objects; {}", phases(&node)?)));
        let lost = objects.saturating_sub(kept) as f64;
        figures.push(Figure::number(format!("{how}: objects lost"), lost, "", Some(Bound::AtMost(0.0))));
    }
    Ok(figures)
}

/// Seconds from the start of the process until recovery has finished.
fn wait_finished(node: &NodeProcess) -> Result<f64, Error> {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if node.admin("/v1/recovery")?["finished"] == true {
            return Ok(node.started.elapsed().as_secs_f64());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(format!("recovery has not finished within {PATIENCE:?}").into())
}

fn phases(node: &NodeProcess) -> Result<String, Error> {
    let report = node.admin("/v1/recovery")?;
    let phase = |phase: &serde_json::Value| {
        format!("{} {} in {} ms", phase["phase"].as_str().unwrap_or("?"), phase["adopted"], phase["elapsed_ms"])
    };
    let phases = report["phases"].as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(phases.iter().map(phase).collect::<Vec<_>>().join(", "))
}
