//! How soon a node that was stopped, killed, or robbed of its catalog serves again, and knows what it has.

use std::process::Command;
use std::time::{Duration, Instant};

use tidepool_client::GetOptions;
use tidepool_server::node::Reconciled;

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
    // A client that holds the object's place names its version: that is served before the catalog is open.
    let held = runtime.block_on(client.get(&hot))?.ok_or("the hot object is not there")?.info.version;
    let held = GetOptions { version: held, ..GetOptions::default() };
    let mut figures = Vec::new();
    for (how, kill) in [("SIGTERM", false), ("kill -9", true)] {
        if kill {
            node.kill()?;
        } else {
            node.stop()?;
        }
        node = node.restart()?;
        let client = connect(&node)?;
        let found = runtime.block_on(client.get_with(&hot, held.clone()))?;
        let first = node.started.elapsed().as_secs_f64();
        found.ok_or("the hot object is gone")?;
        runtime.block_on(client.get(&hot))?.ok_or("the hot object is not listed")?;
        let by_key = node.started.elapsed().as_secs_f64();
        let figure = Figure::number(format!("{how}: first hot key"), first, "s", Some(Bound::AtMost(0.5)));
        figures.push(figure.remark(format!("by version; by key alone, with the catalog: {by_key:.2} s")));
        let agreed = wait_agreed(&node)?;
        let figure = Figure::number(format!("{how}: all known again"), node.started.elapsed().as_secs_f64(), "s", None);
        figures.push(figure.remark(phases(&node)?));
        let seconds = agreed.elapsed_ms as f64 / 1000.0;
        let figure = Figure::number(format!("{how}: reconciliation"), seconds, "s", Some(Bound::AtMost(2.0)));
        let buckets = agreed.differing_buckets;
        figures.push(figure.remark(format!("{} of {objects} objects kept; {buckets} buckets differed", agreed.kept)));
        figures.push(lost(how, &node, objects)?);
    }
    node.stop()?;
    let rebuild =
        Command::new(&options.tidepool).args(["admin", "rebuild", "--data"]).arg(&node.options().data).output()?;
    if !rebuild.status.success() {
        return Err(format!("admin rebuild: {}", String::from_utf8_lossy(&rebuild.stderr)).into());
    }
    node = node.restart()?;
    let agreed = wait_agreed(&node)?;
    let speed = agreed.adopted as f64 / (agreed.elapsed_ms as f64 / 1000.0);
    let figure = Figure::number("announced to an empty catalog", speed, "objects/s", Some(Bound::AtLeast(100_000.0)));
    figures.push(figure.remark(format!("{} in {} ms", agreed.adopted, agreed.elapsed_ms)));
    figures.push(lost("rebuild", &node, objects)?);
    Ok(figures)
}

fn lost(how: &str, node: &NodeProcess, objects: u64) -> Result<Figure, Error> {
    let known = node.admin("/v1/info")?["objects"].as_u64().unwrap_or(0);
    let lost = objects.saturating_sub(known) as f64;
    Ok(Figure::number(format!("{how}: objects lost"), lost, "", Some(Bound::AtMost(0.0))))
}

/// Waits until node and catalog agree on what is there.
fn wait_agreed(node: &NodeProcess) -> Result<Reconciled, Error> {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        let report = node.admin("/v1/recovery")?;
        if let Some(agreed) = serde_json::from_value(report["reconciliation"].clone())? {
            return Ok(agreed);
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
