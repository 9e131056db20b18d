//! What copies cost and what they give: puts of two copies beside puts of one, between nodes joined by links of 2 Gbit/s; and the
//! loss of a node, as readers notice it. The first needs root, for network namespaces.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_client::workload::Payload;
use tidepool_client::{Client, ClientSettings, PutOptions};

use super::load::runtime;
use super::pairs::{self, Sample};
use super::{BenchOptions, Bound, Error, Figure};
use crate::cluster::Cluster;
use crate::drill::network::{self, Network};

const NODES: usize = 3;
const LINK_BITS: u64 = 2_000_000_000;
const VALUES: [(usize, &str); 2] = [(1 << 20, "1 MiB"), (4 << 20, "4 MiB")];
const IN_FLIGHT: usize = 16;
/// A side lasts so many times as long as elsewhere: when no more puts begin, copies of the last ones are still under way, for a tenth
/// of a second, in which the client's link rests.
const LONGER: u32 = 4;
/// Objects that are read while a node is lost.
const OBJECTS: u64 = 400;
const OBJECT_BYTES: usize = 64 << 10;
const READERS: u64 = 2;
const DEADLINE: Duration = Duration::from_secs(20);

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let mut figures = match network::why_not() {
        None => in_network(options.clone())?,
        Some(why) => {
            tracing::warn!(why, "puts between nodes are not measured");
            Vec::new()
        }
    };
    figures.extend(loss(options)?);
    Ok(figures)
}

fn in_network(options: BenchOptions) -> Result<Vec<Figure>, Error> {
    // Of its own: a thread that has moved to another network stays there.
    let thread = std::thread::spawn(move || put(&options));
    thread.join().map_err(|_| "the thread in the network panicked")?
}

fn put(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let network = Network::new(NODES)?;
    network.limit(LINK_BITS)?;
    network.enter()?;
    // Without the sockets that one host has: what moves, moves over the links.
    let settings = ["cluster.insecure=true", "grpc.unix_socket=false", "telemetry.log_filter=warn"];
    let mut cluster = Cluster::new(options.tidepool.clone(), &settings)?.at(network.places()).lending(512 << 20, 0);
    cluster.grow(NODES)?;
    let runtime = runtime()?;
    let client = {
        let _in_runtime = runtime.enter();
        // It knows one node, as a client on a host of an inference cluster does; the others get their copies from there.
        let (_, node) = cluster.running().next().ok_or("no node runs")?;
        let settings = ClientSettings { deadline: DEADLINE, same_host: false, ..ClientSettings::default() };
        Client::builder().endpoint(node.grpc.to_string()).settings(settings).build()?
    };
    let nodes: Vec<u32> = cluster.running().map(|(_, node)| node.id()).collect();
    let mut figures = Vec::new();
    for (bytes, name) in VALUES {
        let value = Bytes::from(Payload::of(1).bytes(bytes));
        let next = Arc::new(AtomicU64::new(0));
        let side = |replicas| {
            let copies = PutOptions { replicas, min_replicas: replicas, ..PutOptions::default() };
            Sample::measure(&nodes, || runtime.block_on(puts(&client, &value, &copies, &next, options.side() * LONGER)))
        };
        let summary = pairs::measure(options.pairs(), || side(2), || side(1))?;
        let remark =
            format!("{NODES} nodes, links of {} Gbit/s, {IN_FLIGHT} puts in flight", LINK_BITS / 1_000_000_000);
        let name = format!("put of {name} with two copies / with one");
        figures.push(Figure::pairs(name, summary, 0.9).remark(remark));
    }
    Ok(figures)
}

/// Puts new objects for `time`; answers their bytes.
async fn puts(
    client: &Client,
    value: &Bytes,
    options: &PutOptions,
    next: &Arc<AtomicU64>,
    time: Duration,
) -> Result<u64, Error> {
    let end = Instant::now() + time;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..IN_FLIGHT {
        let (client, value, options, next) = (client.clone(), value.clone(), options.clone(), Arc::clone(next));
        tasks.spawn(async move {
            let mut bytes = 0;
            while Instant::now() < end {
                let number = next.fetch_add(1, Ordering::Relaxed);
                client.put(format!("put/{}/{number}", value.len()), value.clone(), &options).await?;
                bytes += value.len() as u64;
            }
            Ok::<_, Error>(bytes)
        });
    }
    let mut bytes = 0;
    while let Some(done) = tasks.join_next().await {
        bytes += done??;
    }
    Ok(bytes)
}

/// What readers saw.
#[derive(Default)]
struct Seen {
    reads: AtomicU64,
    failed: AtomicU64,
    wrong: AtomicU64,
    longest_micros: AtomicU64,
    stop: AtomicBool,
}

fn loss(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let rounds = if options.quick { 1 } else { 5 };
    let settings = ["replicas.repair_grace=0s", "replicas.repair_bytes_per_second=0", "telemetry.log_filter=warn"];
    let mut cluster = Cluster::start_voters(options.tidepool.clone(), NODES, &settings)?;
    let runtime = runtime()?;
    let client = {
        let _in_runtime = runtime.enter();
        cluster.client_with(ClientSettings { deadline: DEADLINE, ..ClientSettings::default() })?
    };
    let copies = PutOptions { replicas: 2, min_replicas: 2, ..PutOptions::default() };
    for number in 0..OBJECTS {
        runtime.block_on(client.put(key(number), value(number), &copies))?;
    }
    let seen = Arc::new(Seen::default());
    let mut readers = tokio::task::JoinSet::new();
    for reader in 0..READERS {
        readers.spawn_on(read(client.clone(), Arc::clone(&seen), reader), runtime.handle());
    }
    let lost = lose(&mut cluster, rounds);
    seen.stop.store(true, Ordering::SeqCst);
    while let Some(done) = runtime.block_on(readers.join_next()) {
        done?;
    }
    let (mut first, mut rates) = lost?;
    first.sort();
    rates.sort_by(f64::total_cmp);
    let load = |count: &AtomicU64| count.load(Ordering::SeqCst) as f64;
    let remark = format!(
        "{rounds} losses, {} reads, the longest took {:.0} ms; copies were made at {:.2} GB/s (median, the wait for the next look \
         at the nodes included)",
        seen.reads.load(Ordering::SeqCst),
        load(&seen.longest_micros) / 1e3,
        rates[rates.len() / 2] / 1e9
    );
    let none = || Some(Bound::AtMost(0.0));
    Ok(vec![
        Figure::number("gets that failed while nodes were lost", load(&seen.failed), "", none()).remark(remark),
        Figure::number("gets of wrong bytes", load(&seen.wrong), "", none()),
        Figure::number(
            "first copy made anew after a node counts as absent, median",
            first[first.len() / 2].as_secs_f64(),
            "s",
            Some(Bound::AtMost(1.0)),
        ),
    ])
}

/// Loses one node after the other, each until it is back; answers how long the first copy took from when the node counted as
/// absent, and how many bytes a second were copied from then on.
fn lose(cluster: &mut Cluster, rounds: usize) -> Result<(Vec<Duration>, Vec<f64>), Error> {
    let (mut first, mut rates) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let lost = round % NODES;
        cluster.kill(lost)?;
        let before = copied(cluster)?;
        cluster.wait("the node counts as absent", |cluster| states(cluster).contains(&"absent".to_owned()))?;
        let absent = Instant::now();
        cluster.wait("a copy is made anew", |cluster| copied(cluster).is_ok_and(|now| now.0 > before.0))?;
        first.push(absent.elapsed());
        cluster.wait("all copies are made anew", is_whole)?;
        let bytes = copied(cluster)?.1.saturating_sub(before.1);
        rates.push(bytes as f64 / absent.elapsed().as_secs_f64());
        cluster.restart(lost)?;
        cluster.wait("all are up", Cluster::are_all_up)?;
        cluster.wait("what is too many goes", is_whole)?;
    }
    Ok((first, rates))
}

fn key(number: u64) -> String {
    format!("loss/{number}")
}

fn value(number: u64) -> Bytes {
    Payload::of(number).bytes(OBJECT_BYTES).into()
}

async fn read(client: Client, seen: Arc<Seen>, reader: u64) {
    for turn in (reader..).step_by(READERS as usize) {
        if seen.stop.load(Ordering::SeqCst) {
            return;
        }
        let (number, began) = (turn.wrapping_mul(7) % OBJECTS, Instant::now());
        match client.get(key(number)).await {
            Ok(Some(found)) if found.value == value(number) => {}
            Ok(Some(_)) => drop(seen.wrong.fetch_add(1, Ordering::SeqCst)),
            Ok(None) | Err(_) => drop(seen.failed.fetch_add(1, Ordering::SeqCst)),
        }
        seen.reads.fetch_add(1, Ordering::SeqCst);
        let micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        seen.longest_micros.fetch_max(micros, Ordering::SeqCst);
    }
}

/// Copies that running nodes have had made, and their bytes.
pub(super) fn copied(cluster: &Cluster) -> Result<(u64, u64), Error> {
    let mut sum = (0, 0);
    for (_, node) in cluster.running() {
        let report = node.admin("/v1/repair")?;
        sum.0 += report["copied"].as_u64().unwrap_or(0);
        sum.1 += report["copied_bytes"].as_u64().unwrap_or(0);
    }
    Ok(sum)
}

/// The states of all nodes, as one that runs knows them.
fn states(cluster: &Cluster) -> Vec<String> {
    let Some((_, node)) = cluster.running().next() else { return Vec::new() };
    let report = node.admin("/v1/nodes").unwrap_or_default();
    let rows = report["nodes"].as_array().cloned().unwrap_or_default();
    rows.iter().filter_map(|row| row["state"].as_str().map(str::to_owned)).collect()
}

/// Whether the nodes that are up have two copies of everything between them.
fn is_whole(cluster: &Cluster) -> bool {
    let Some((_, node)) = cluster.running().next() else { return false };
    let report = node.admin("/v1/nodes").unwrap_or_default();
    let rows = report["nodes"].as_array().cloned().unwrap_or_default();
    let up = rows.iter().filter(|row| row["state"] == "up");
    up.map(|row| row["replicas"].as_u64().unwrap_or(0)).sum::<u64>() == 2 * OBJECTS
}
