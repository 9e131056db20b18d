//! Three nodes: how fast copies are made anew and a node is emptied beside what the engine alone moves, what readers feel of a
//! limited repair, and how soon a node that was killed is back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use serde_json::json;
use tidepool_client::workload::Payload;
use tidepool_client::{Client, ClientSettings, Durability, GetOptions, PutOptions};

use super::latency::Latencies;
use super::load::{self, runtime};
use super::pairs::median;
use super::replicas;
use super::{BenchOptions, Bound, Error, Figure};
use crate::cluster::Cluster;
use crate::node_process::NodeProcess;

const NODES: usize = 3;
const OBJECT_BYTES: usize = 1 << 20;
const IN_FLIGHT: usize = 4;
/// What readers read meanwhile.
const SMALL_BYTES: usize = 64 << 10;
const SMALL: u64 = 200;
const DEADLINE: Duration = Duration::from_secs(20);
/// How often counters are looked at.
const LOOK: Duration = Duration::from_millis(2);
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let objects = if options.quick { 90 } else { 600 };
    let (mut figures, engine) = rates(options, objects)?;
    figures.push(limited(options, objects, engine)?);
    figures.extend(comes_back(options).unwrap_or_else(|error| vec![Figure::failed("a killed node of three", &*error)]));
    Ok(figures)
}

fn start(options: &BenchOptions, objects: u64, limit: u64) -> Result<Cluster, Error> {
    let limit = format!("replicas.repair_bytes_per_second={limit}");
    let settings = ["replicas.repair_grace=0s", &limit, "store.scrub_bytes_per_second=0", "telemetry.log_filter=warn"];
    // Two nodes hold all of it.
    let dram = (objects * OBJECT_BYTES as u64 * 5 / 4).max(256 << 20);
    let mut cluster = Cluster::new(options.tidepool.clone(), &settings)?.lending(dram, 0);
    cluster.grow(NODES)?;
    Ok(cluster)
}

fn client(cluster: &Cluster, runtime: &tokio::runtime::Runtime) -> Result<Client, Error> {
    let _in_runtime = runtime.enter();
    // By the engine, as nodes read from each other.
    let settings = ClientSettings { deadline: DEADLINE, local_reads: false, ..ClientSettings::default() };
    Ok(cluster.client_with(settings)?)
}

fn key(number: u64) -> String {
    format!("large/{number}")
}

async fn fill(client: &Client, objects: u64) -> Result<(), Error> {
    let two = PutOptions { replicas: 2, min_replicas: 2, ..PutOptions::default() };
    let (large, small) =
        (Bytes::from(Payload::of(1).bytes(OBJECT_BYTES)), Bytes::from(Payload::of(2).bytes(SMALL_BYTES)));
    for number in 0..objects {
        client.put(key(number), large.clone(), &two).await?;
    }
    for number in 0..SMALL {
        client.put(load::key(number), small.clone(), &two).await?;
    }
    Ok(())
}

/// Bytes a second at which a client reads everything by the engine.
async fn read_all(client: &Client, objects: u64) -> Result<f64, Error> {
    let began = Instant::now();
    let mut reads = tokio::task::JoinSet::new();
    for reader in 0..IN_FLIGHT as u64 {
        let client = client.clone();
        reads.spawn(async move {
            for number in (reader..objects).step_by(IN_FLIGHT) {
                client.get(key(number)).await?.ok_or("an object is missing")?;
            }
            Ok::<_, Error>(())
        });
    }
    while let Some(read) = reads.join_next().await {
        read??;
    }
    Ok((objects * OBJECT_BYTES as u64) as f64 / began.elapsed().as_secs_f64())
}

/// Bytes that running nodes have had copied.
fn copied(cluster: &Cluster) -> Result<u64, Error> {
    Ok(replicas::copied(cluster)?.1)
}

/// Looks until `value` is there.
fn look<A>(what: &str, mut value: impl FnMut() -> Result<Option<A>, Error>) -> Result<A, Error> {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if let Some(value) = value()? {
            return Ok(value);
        }
        std::thread::sleep(LOOK);
    }
    Err(format!("{what}: not within {PATIENCE:?}").into())
}

/// Bytes a second of copying, from the first copy to the last of `bytes`.
fn rate(cluster: &Cluster, before: u64, bytes: u64) -> Result<f64, Error> {
    let begun = |now: u64| (now > before).then(|| (now, Instant::now()));
    let (first, began) = look("the first copy", || Ok(begun(copied(cluster)?)))?;
    look("the last copy", || Ok((copied(cluster)? >= before + bytes).then_some(())))?;
    Ok((before + bytes - first) as f64 / began.elapsed().as_secs_f64())
}

/// What a node has, in bytes.
fn held(cluster: &Cluster, grpc: &str) -> Result<(String, u64), Error> {
    let (_, node) = cluster.running().next().ok_or("no node runs")?;
    let report = node.admin("/v1/nodes")?;
    let rows = report["nodes"].as_array().cloned().unwrap_or_default();
    let row = rows.iter().find(|row| row["grpc"] == grpc).ok_or("a node is not listed")?;
    Ok((row["node"].as_str().unwrap_or_default().to_owned(), row["bytes"].as_u64().unwrap_or(0)))
}

fn is_settled(cluster: &Cluster, objects: u64) -> bool {
    let Some((_, node)) = cluster.running().next() else { return false };
    let report = node.admin("/v1/nodes").unwrap_or_default();
    let rows = report["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let copies: u64 = rows.iter().map(|row| row["replicas"].as_u64().unwrap_or(0)).sum();
    cluster.are_all_up() && copies == 2 * (objects + SMALL)
}

fn rates(options: &BenchOptions, objects: u64) -> Result<(Vec<Figure>, f64), Error> {
    let rounds = if options.quick { 1 } else { 5 };
    let runtime = runtime()?;
    let mut cluster = start(options, objects, 0)?;
    let client = client(&cluster, &runtime)?;
    runtime.block_on(fill(&client, objects))?;
    let (mut engine, mut repair, mut drain) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        engine.push(runtime.block_on(read_all(&client, objects))?);
        let victim = round % NODES;
        let grpc = cluster.node(victim).ok_or("it runs")?.grpc.to_string();
        let (number, bytes) = held(&cluster, &grpc)?;
        let before = copied(&cluster)?;
        let (_, other) = cluster.running().find(|(position, _)| *position != victim).ok_or("others run")?;
        other.change("/v1/nodes/drain", &json!({ "node": number }))?;
        drain.push(rate(&cluster, before, bytes)?);
        cluster.wait("it is empty", |cluster| held(cluster, &grpc).is_ok_and(|(_, bytes)| bytes == 0))?;
        let (_, other) = cluster.running().find(|(position, _)| *position != victim).ok_or("others run")?;
        other.change("/v1/nodes/undrain", &json!({ "node": number }))?;
        // Now another one is lost, half of everything with it.
        let victim = (victim + 1) % NODES;
        let (_, bytes) = held(&cluster, &cluster.node(victim).ok_or("it runs")?.grpc.to_string())?;
        cluster.kill(victim)?;
        let before = copied(&cluster)?;
        repair.push(rate(&cluster, before, bytes)?);
        cluster.restart(victim)?;
        cluster.wait("all is as it is to be", |cluster| is_settled(cluster, objects))?;
    }
    let [engine, repair, drain] = [engine, repair, drain].map(|mut rates| median(&mut rates));
    let ratio = |name: &str, rate: f64| {
        let remark = format!("{:.2} beside {:.2} GB/s, medians of {rounds}; 1 MiB objects", rate / 1e9, engine / 1e9);
        Figure::number(name, rate / engine, "", Some(Bound::AtLeast(0.7))).remark(remark)
    };
    let figures = vec![
        ratio("copies made anew / read by the engine", repair),
        ratio("a node emptied / read by the engine", drain),
    ];
    Ok((figures, engine))
}

/// The p99 of readers while copies are made at a quarter of the engine's rate, beside that without.
fn limited(options: &BenchOptions, objects: u64, engine: f64) -> Result<Figure, Error> {
    let rounds = if options.quick { 1 } else { 3 };
    let runtime = runtime()?;
    // Two nodes give, so an eighth each.
    let mut cluster = start(options, objects, (engine / 8.0) as u64)?;
    let client = client(&cluster, &runtime)?;
    runtime.block_on(fill(&client, objects))?;
    let (mut quiet, mut loaded) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let victim = 1 + round % (NODES - 1);
        let (_, bytes) = held(&cluster, &cluster.node(victim).ok_or("it runs")?.grpc.to_string())?;
        cluster.kill(victim)?;
        cluster.wait("the node counts as absent", |cluster| !cluster.running().all(|(_, node)| sees_all(node)))?;
        let before = copied(&cluster)?;
        look("the first copy", || Ok((copied(&cluster)? > before).then_some(())))?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read_until(&client, &runtime, &stop));
            let ended = look("the last copy", || Ok((copied(&cluster)? >= before + bytes).then_some(())));
            stop.store(true, Ordering::SeqCst);
            loaded.extend(reader.join().map_err(|_| "a reader panicked")??);
            ended
        })?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read_until(&client, &runtime, &stop));
            std::thread::sleep(options.side());
            stop.store(true, Ordering::SeqCst);
            quiet.extend(reader.join().map_err(|_| "a reader panicked")??);
            Ok::<_, Error>(())
        })?;
        cluster.restart(victim)?;
        cluster.wait("all is as it is to be", |cluster| is_settled(cluster, objects))?;
    }
    let (quiet, loaded) = (Latencies::from(quiet), Latencies::from(loaded));
    let (before, after) = (quiet.micros(0.99), loaded.micros(0.99));
    let remark = format!(
        "{after:.0} beside {before:.0} us; p50 {:.0} beside {:.0} us; {} and {} gets of 64 KiB, one after the other; repair at \
         {:.2} GB/s",
        loaded.micros(0.5),
        quiet.micros(0.5),
        loaded.count(),
        quiet.count(),
        engine / 4e9
    );
    let name = "p99 of gets while copies are made anew / without";
    Ok(Figure::number(name, after / before, "", Some(Bound::AtMost(2.0))).remark(remark))
}

fn sees_all(node: &NodeProcess) -> bool {
    let report = node.admin("/v1/nodes").unwrap_or_default();
    report["nodes"].as_array().is_some_and(|rows| rows.iter().all(|row| row["state"] != "absent"))
}

fn read_until(client: &Client, runtime: &tokio::runtime::Runtime, stop: &AtomicBool) -> Result<Vec<Duration>, Error> {
    let mut times = Vec::new();
    for turn in 0_u64.. {
        if stop.load(Ordering::SeqCst) {
            break;
        }
        let began = Instant::now();
        runtime.block_on(client.get(load::key(turn.wrapping_mul(7) % SMALL)))?.ok_or("an object is missing")?;
        times.push(began.elapsed());
    }
    Ok(times)
}

/// A node with DRAM and many objects on NVMe, killed in a cluster of three.
fn comes_back(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let objects: u64 = if options.quick { 10_000 } else { 200_000 };
    let (dram, nvme) = if options.quick { (256 << 20, 1 << 30) } else { (1 << 30, 4 << 30) };
    let settings = ["store.scrub_bytes_per_second=0", "telemetry.log_filter=warn"];
    let mut cluster = Cluster::new(options.tidepool.clone(), &settings)?.lending(dram, nvme);
    cluster.grow(NODES)?;
    let runtime = runtime()?;
    let victim = 1;
    let connect = |cluster: &Cluster| {
        let _in_runtime = runtime.enter();
        cluster.node(victim).ok_or("it runs")?.client(4).map_err(Error::from)
    };
    let client = connect(&cluster)?;
    let durable = PutOptions { durability: Durability::Nvme, ..PutOptions::default() };
    let value = Bytes::from(Payload::of(1).bytes(4000));
    runtime.block_on(async {
        for start in (0..objects).step_by(load::BATCH) {
            let end = objects.min(start + load::BATCH as u64);
            let items: Vec<_> = (start..end).map(|number| (load::key(number), value.clone())).collect();
            for outcome in client.put_batch(&items, &durable).await? {
                outcome?;
            }
        }
        Ok::<_, Error>(())
    })?;
    // Read often enough to be in the heat list, and held by its version.
    let hot = load::key(objects / 2);
    for _ in 0..8 {
        runtime.block_on(client.get(&hot))?;
    }
    let version = runtime.block_on(client.get(&hot))?.ok_or("the hot object is not there")?.info.version;
    let held = GetOptions { version, ..GetOptions::default() };
    drop(client);
    let read = SystemTime::now();
    let heat = cluster.data(victim).join("heat");
    look("the heat list is written", || Ok((std::fs::metadata(&heat)?.modified()? > read).then_some(())))?;
    cluster.kill(victim)?;
    cluster.restart(victim)?;
    let client = connect(&cluster)?;
    runtime.block_on(client.get_with(&hot, held))?.ok_or("the hot object is gone")?;
    let node = cluster.node(victim).ok_or("it runs")?;
    let first = node.started.elapsed().as_secs_f64();
    let agreed = look("node and catalog agree", || {
        let report = node.admin("/v1/recovery")?;
        let is_done = report["finished"] == true && !report["reconciliation"].is_null();
        Ok(is_done.then(|| (node.started.elapsed().as_secs_f64(), report["reconciliation"].clone())))
    })?;
    let remark = format!("{objects} objects on NVMe, {} MiB of DRAM; {}", dram >> 20, agreed.1);
    Ok(vec![
        Figure::number("a killed node of three: first hot key", first, "s", Some(Bound::AtMost(0.5))),
        Figure::number("a killed node of three: all reconciled", agreed.0, "s", Some(Bound::AtMost(3.0)))
            .remark(remark),
    ])
}
