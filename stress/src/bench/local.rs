//! Reads on the node's host, by its shared memory and without a call: latency of small ones, large ones beside memcpy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_client::workload::Payload;
use tidepool_client::{Client, PutOptions};
use tokio::runtime::Runtime;

use super::load::{node, runtime};
use super::pairs::{self, Sample};
use super::{BenchOptions, Bound, Error, Figure};
use crate::node_process::NodeProcess;

const MICROSECONDS: f64 = 2.0;
const SMALL: usize = 4096;
const LARGE: usize = 1 << 20;
/// Of each size; the large ones are more than any cache holds.
const OBJECTS: usize = 256;
/// A node lets readers in when it and its catalog agree on what is there.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let runtime = runtime()?;
    let node = NodeProcess::start(node(options, "local", 1 << 30, 0))?;
    let client = || {
        let _in_runtime = runtime.enter();
        let socket = node.options().data.join("tidepool.sock");
        Client::builder().endpoint(format!("unix:{}", socket.display())).build()
    };
    // Another one: what a client wrote itself it reads by a call for a while.
    let (writer, reader) = (client()?, client()?);
    for (size, name) in [(SMALL, "small"), (LARGE, "large")] {
        runtime.block_on(async {
            for number in 0..OBJECTS {
                let value: Bytes = Payload::of(number as u64).bytes(size).into();
                writer.put(key(name, number), value, &PutOptions::default()).await?;
            }
            Ok::<_, Error>(())
        })?;
    }
    runtime.block_on(until_local(&reader))?;
    let latency = latency(&runtime, &reader, if options.quick { 10_000 } else { 1_000_000 })?;
    let mut figures = vec![latency];
    for (targets, name, at_least) in [(OBJECTS, "cold", 0.75), (1, "warm", 0.65)] {
        let summary = beside_memcpy(options, &runtime, &reader, targets)?;
        figures.push(Figure::pairs(format!("local get of 1 MiB, verified, {name} target / memcpy"), summary, at_least));
    }
    Ok(figures)
}

fn key(name: &str, number: usize) -> String {
    format!("{name}/{number}")
}

async fn until_local(reader: &Client) -> Result<(), Error> {
    let end = Instant::now() + PATIENCE;
    while reader.local_hits() == 0 {
        if Instant::now() > end {
            return Err("the node lets no local reader in".into());
        }
        reader.get(key("small", 0)).await?;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

fn latency(runtime: &Runtime, reader: &Client, count: usize) -> Result<Figure, Error> {
    let mut buffer = vec![0; SMALL];
    let keys: Vec<String> = (0..OBJECTS).map(|number| key("small", number)).collect();
    let hits = reader.local_hits();
    let mut times = Vec::with_capacity(count);
    runtime.block_on(async {
        for turn in 0..count {
            let started = Instant::now();
            reader.get_into(&keys[turn % OBJECTS], &mut buffer).await?;
            times.push(started.elapsed());
        }
        Ok::<_, Error>(())
    })?;
    let local = reader.local_hits() - hits;
    times.sort_unstable();
    let at = |part: f64| times[(count as f64 * part) as usize].as_secs_f64() * 1e6;
    let remark = format!("p99 {:.2}, p999 {:.2} us; {local} of {count} without a call", at(0.99), at(0.999));
    let target = Some(Bound::AtMost(MICROSECONDS));
    Ok(Figure::number("local get of 4 KiB, verified: p50", at(0.5), "us", target).remark(remark))
}

/// Gets of 1 MiB into `targets` buffers in turn, beside copies between as many buffers as there are objects and those.
fn beside_memcpy(
    options: &BenchOptions,
    runtime: &Runtime,
    reader: &Client,
    targets: usize,
) -> Result<pairs::PairSummary, Error> {
    let keys: Vec<String> = (0..OBJECTS).map(|number| key("large", number)).collect();
    let sources: Arc<Vec<Vec<u8>>> =
        Arc::new((0..OBJECTS).map(|number| Payload::of(number as u64).bytes(LARGE)).collect());
    let (mut ours, mut limits) = (vec![vec![1_u8; LARGE]; targets], vec![vec![1_u8; LARGE]; targets]);
    let (hits, mut reads) = (reader.local_hits(), 0);
    let summary = pairs::measure(
        options.pairs(),
        || {
            Sample::measure(&[], || {
                walk(options.side(), |turn| {
                    reads += 1;
                    let (key, target) = (&keys[turn % OBJECTS], &mut ours[turn % targets]);
                    Ok(runtime.block_on(reader.get_into(key, target)).map(drop)?)
                })
            })
        },
        || {
            Sample::measure(&[], || {
                walk(options.side(), |turn| {
                    limits[turn % targets].copy_from_slice(&sources[turn % OBJECTS]);
                    std::hint::black_box(&limits);
                    Ok(())
                })
            })
        },
    )?;
    if reader.local_hits() - hits != reads {
        return Err("some reads went to the node".into());
    }
    Ok(summary)
}

fn walk(side: Duration, mut step: impl FnMut(usize) -> Result<(), Error>) -> Result<u64, Error> {
    let end = Instant::now() + side;
    let mut turn = 0;
    while Instant::now() < end {
        step(turn)?;
        turn += 1;
    }
    Ok((turn * LARGE) as u64)
}
