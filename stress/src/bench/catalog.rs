//! The catalog of three voters: what questions and changes cost, beside bare pings and synced writes, and each other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::json;
use tidepool_client::{Client, ClientSettings, Existence, PutOptions, PutOutcome};
use tokio::runtime::Runtime;

use super::complete::ThreeVoters;
use super::latency::{Latencies, Ping, synced_appends};
use super::load::{fill, key, node, runtime};
use super::pairs::median;
use super::{BenchOptions, Bound, Error, Figure};
use crate::cluster::Cluster;
use crate::node_process::NodeProcess;

const VALUE_BYTES: usize = 64;
const LEASE: Duration = Duration::from_secs(5);
/// Keys in a call, clients. `make bench-reference` has another store's beside it.
const ASKED: [(usize, usize); 4] = [(128, 1), (128, 4), (1000, 1), (1000, 4)];

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let runtime = runtime()?;
    let objects = if options.quick { 20_000 } else { 100_000 };
    // Room for all of it: what is evicted is not there to be asked for.
    let mut cluster = Cluster::new(options.tidepool.clone(), &["telemetry.log_filter=warn"])?.lending(2 << 30, 0);
    cluster.grow(3)?;
    let mut bench = Nodes { options, runtime, cluster, next: objects };
    bench.runtime.block_on(fill(&bench.client(true)?, 0..objects, VALUE_BYTES))?;
    let mut figures = bench.questions(objects)?;
    figures.extend(bench.changes()?);
    figures.extend(bench.snapshot()?);
    drop(bench);
    figures.extend(churn(options)?);
    Ok(figures)
}

/// Batches of each caller: enough for seconds.
fn rounds(options: &BenchOptions) -> u64 {
    if options.quick { 50 } else { 400 }
}

struct Nodes<'a> {
    options: &'a BenchOptions,
    runtime: Runtime,
    cluster: Cluster,
    /// The number of the next new object.
    next: u64,
}

impl Nodes<'_> {
    /// A client of all nodes.
    fn client(&self, native: bool) -> Result<Client, Error> {
        let _in_runtime = self.runtime.enter();
        Ok(self.cluster.client_with(ClientSettings { native, ..ClientSettings::default() })?)
    }

    /// A client of the leader alone.
    fn leaders_client(&self) -> Result<Client, Error> {
        let _in_runtime = self.runtime.enter();
        let leader = self.cluster.node(self.cluster.wait_for_leader()).ok_or("nobody leads")?;
        Ok(leader.client(1)?)
    }

    fn questions(&self, objects: u64) -> Result<Vec<Figure>, Error> {
        let (native, mut ping) = (self.client(true)?, Ping::start()?);
        let mut number = 0;
        let mut ask = || {
            number = (number + 7919) % objects;
            let found = self.runtime.block_on(native.exists(key(number)))?;
            if found == Existence::Present { Ok(()) } else { Err(format!("{} is {found:?}", key(number)).into()) }
        };
        ask()?;
        let side = self.options.side();
        let (mut single, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..self.options.pairs() {
            single.push(Latencies::of(side / 4, &mut ask)?.micros(0.5));
            bare.push(Latencies::of(side / 4, || ping.once())?.micros(0.5));
        }
        let (single, bare) = (median(&mut single), median(&mut bare));
        let target = Some(Bound::AtMost(2.0 * bare));
        let remark = format!("a bare ping: {bare:.1} us");
        let mut figures = vec![Figure::number("exists of one key, p50", single, "us", target).remark(remark)];
        let mut rates = Vec::new();
        for (keys, clients) in ASKED {
            let ours = (0..clients).map(|_| self.client(true)).collect::<Result<Vec<_>, _>>()?;
            let rate = self.asked(&ours, keys, objects, None)?;
            rates.push(rate);
            let name = format!("exists of {keys} keys, {clients} client{}", if clients == 1 { "" } else { "s" });
            figures.push(Figure::number(name, rate, "keys/s", None));
        }
        let leased = self.asked(&[self.leaders_client()?], 128, objects, Some(LEASE))?;
        let plain = self.asked(&[self.leaders_client()?], 128, objects, None)?;
        let remark = format!("places found and leases granted: {leased:.2e} keys/s, exists at the leader {plain:.2e}");
        let target = Some(Bound::AtLeast(0.5));
        figures.push(Figure::number("with leases beside without, 128 keys", leased / plain, "", target).remark(remark));
        let grpc = self.asked(&[self.client(false)?], 1000, objects, None)?;
        let remark = format!("by gRPC {grpc:.2e} keys/s");
        let target = Some(Bound::AtLeast(0.6));
        figures.push(Figure::number("gRPC beside native, 1000 keys", grpc / rates[2], "", target).remark(remark));
        Ok(figures)
    }

    /// Keys a second that clients are told of, together.
    fn asked(&self, clients: &[Client], count: usize, objects: u64, lease: Option<Duration>) -> Result<f64, Error> {
        let batches: Arc<Vec<Vec<String>>> = Arc::new(
            (0..64)
                .map(|batch| (0..count as u64).map(|item| key((batch * 1009 + item * 31) % objects)).collect())
                .collect(),
        );
        // Connections are made before time is taken.
        for client in clients {
            self.runtime.block_on(client.exists_many(&batches[0], lease, false))?;
        }
        let mut rates = Vec::new();
        for _ in 0..self.options.pairs() {
            let (began, side) = (Instant::now(), self.options.side());
            let mut tasks = tokio::task::JoinSet::new();
            for client in clients {
                let (client, batches) = (client.clone(), Arc::clone(&batches));
                let ask = async move {
                    let mut told = 0;
                    for batch in batches.iter().cycle() {
                        if began.elapsed() > side {
                            break;
                        }
                        let found = client.exists_many(batch, lease, false).await?;
                        told += found.iter().filter(|&&found| found == Existence::Present).count();
                    }
                    Ok::<_, Error>(told)
                };
                tasks.spawn_on(ask, self.runtime.handle());
            }
            let mut told = 0;
            while let Some(done) = self.runtime.block_on(tasks.join_next()) {
                told += done??;
            }
            rates.push(told as f64 / began.elapsed().as_secs_f64());
        }
        Ok(median(&mut rates))
    }

    fn changes(&mut self) -> Result<Vec<Figure>, Error> {
        const BATCH: u64 = 128;
        const CLIENTS: u64 = 4;
        let clients = (0..CLIENTS).map(|_| self.client(true)).collect::<Result<Vec<_>, _>>()?;
        let value = Bytes::from(vec![7; VALUE_BYTES]);
        let rounds = rounds(self.options);
        let began = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for (number, client) in clients.into_iter().enumerate() {
            let (first, value) = (self.next + number as u64 * rounds * BATCH, value.clone());
            let put = async move {
                for round in 0..rounds {
                    let from = first + round * BATCH;
                    let items: Vec<_> = (from..from + BATCH).map(|number| (key(number), value.clone())).collect();
                    for outcome in client.put_batch(&items, &PutOptions::default()).await? {
                        outcome?;
                    }
                }
                Ok::<_, Error>(())
            };
            tasks.spawn_on(put, self.runtime.handle());
        }
        while let Some(done) = self.runtime.block_on(tasks.join_next()) {
            done??;
        }
        let put = CLIENTS * rounds * BATCH;
        self.next += put;
        let rate = put as f64 / began.elapsed().as_secs_f64();
        let target = Some(Bound::AtLeast(100_000.0));
        let mut figures =
            vec![Figure::number("put in batches of 128, synced on two of three", rate, "objects/s", target).remark(
                format!("{CLIENTS} clients, values of {VALUE_BYTES} bytes, all of it: reserve, copy, complete"),
            )];
        let mut voters = ThreeVoters::start(self.options)?;
        let alone = voters.batches(rounds)?;
        let remark =
            format!("{CLIENTS} callers, objects without bytes, three voters in one process, messages in memory");
        figures.push(
            Figure::number("complete in batches of 128, synced on two of three", alone, "objects/s", target)
                .remark(remark),
        );
        let (client, mut ping, side) = (self.leaders_client()?, Ping::start()?, self.options.side());
        let (mut puts, mut completes, mut floors, mut pings) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.options.pairs() {
            puts.push(self.single_puts(&client, side)?.micros(0.5));
            completes.push(voters.singles(side)?.micros(0.5));
            floors.push(synced_appends(&self.options.folder, side)?.micros(0.5));
            pings.push(Latencies::of(side / 4, || ping.once())?.micros(0.5));
        }
        voters.stop();
        let complete = median(&mut completes);
        let (put, floor, ping) = (median(&mut puts), median(&mut floors), median(&mut pings));
        let remark =
            format!("512 B appended and synced by three at once, two done: {floor:.0} us; a bare ping: {ping:.1} us");
        let target = Some(Bound::AtMost(1.5 * floor + 4.0 * ping));
        figures.push(Figure::number("put of 64 bytes, synced on two of three, p50", put, "us", target).remark(remark));
        figures.push(Figure::number("complete of one object, synced on two of three, p50", complete, "us", target));
        Ok(figures)
    }

    fn single_puts(&mut self, client: &Client, side: Duration) -> Result<Latencies, Error> {
        let value = Bytes::from(vec![7; VALUE_BYTES]);
        let (runtime, next) = (&self.runtime, &mut self.next);
        Latencies::of(side, || {
            *next += 1;
            let done = runtime.block_on(client.put(key(*next), value.clone(), &PutOptions::default()))?;
            if done.outcome == PutOutcome::Stored { Ok(()) } else { Err("a new key exists already".into()) }
        })
    }

    /// A follower that was away takes a snapshot while puts go on.
    fn snapshot(&mut self) -> Result<Vec<Figure>, Error> {
        let leader = self.cluster.wait_for_leader();
        let follower = (leader + 1) % 3;
        let client = self.leaders_client()?;
        self.cluster.kill(follower)?;
        self.single_puts(&client, self.options.side())?;
        for (_, node) in self.cluster.running() {
            node.change("/v1/raft/snapshot", &json!({}))?;
        }
        let side = self.options.side() * 4;
        let quiet = self.single_puts(&client, side)?;
        // It comes back in the middle of this.
        self.cluster.restart(follower)?;
        let busy = self.single_puts(&client, side)?;
        let is_here = |cluster: &Cluster| {
            let raft = cluster.node(follower).and_then(|node| node.admin("/v1/raft").ok()).unwrap_or_default();
            raft["in_contact"] == true
        };
        self.cluster.wait("the follower is back", is_here)?;
        let remark = format!(
            "p99 {:.0} us of {} puts, without {:.0} us of {}; the follower's start is in it",
            busy.micros(0.99),
            busy.count(),
            quiet.micros(0.99),
            quiet.count()
        );
        let ratio = busy.micros(0.99) / quiet.micros(0.99);
        let target = Some(Bound::AtMost(2.0));
        Ok(vec![Figure::number("put while a follower takes a snapshot, p99 beside", ratio, "", target).remark(remark)])
    }
}

/// What the log gets of objects that are put, demoted and forgotten as fast as one node's tiers take them.
fn churn(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    const OBJECT_BYTES: usize = 64 << 10;
    let objects = if options.quick { 8_000 } else { 50_000 };
    let runtime = runtime()?;
    let node = NodeProcess::start(node(options, "churn", 128 << 20, 256 << 20))?;
    let client = {
        let _in_runtime = runtime.enter();
        node.client(4)?
    };
    let logged = || -> Result<[u64; 2], Error> {
        Ok([node.metric("tidepool_catalog_applied_commands")?, node.metric("tidepool_catalog_applied_bytes")?])
    };
    let (before, began) = (logged()?, Instant::now());
    runtime.block_on(fill(&client, 0..objects, OBJECT_BYTES))?;
    let (after, seconds) = (logged()?, began.elapsed().as_secs_f64());
    let each = |place: usize| (after[place] - before[place]) as f64 / objects as f64;
    let left = node.tier("nvme", "evictions")? + node.tier("dram", "evictions")?;
    let remark = format!(
        "{objects} objects of 64 KiB in {seconds:.1} s, {} demoted, {left} forgotten",
        node.tier("dram", "demotions")?
    );
    Ok(vec![
        Figure::number("log under churn, of each object", each(1), "bytes", None).remark(remark),
        Figure::number("commands under churn, of each object", each(0), "", None)
            .remark("one command carries many items; demotion and promotion are none"),
    ])
}
