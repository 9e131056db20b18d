//! What benches of whole nodes share: a node to start, a runtime, and small objects by the hundred thousand.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_client::{Client, ErrorKind, PutOptions, PutOutcome};

use super::{BenchOptions, Error};
use crate::node_process::{NodeOptions, Place};

/// Objects in one call.
pub(super) const BATCH: usize = 1000;
/// How long one batch may wait for room.
const PATIENCE: Duration = Duration::from_secs(30);
/// Calls under way at a time.
const IN_FLIGHT: usize = 4;

pub(super) fn runtime() -> Result<tokio::runtime::Runtime, Error> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// A node of its own in the bench's folder. The scrub is off: it would be measured too.
pub(super) fn node(options: &BenchOptions, name: &str, dram_bytes: u64, nvme_bytes: u64) -> NodeOptions {
    NodeOptions {
        program: options.tidepool.clone(),
        data: options.folder.join(name),
        dram_bytes,
        nvme_bytes,
        settings: vec![
            "store.scrub_bytes_per_second=0".into(),
            "telemetry.log_filter=warn".into(),
            format!("dram.folder={}", options.segments.display()),
        ],
        place: Place::default(),
    }
}

/// The key of small object `number`: 20 bytes.
pub(super) fn key(number: u64) -> String {
    format!("small/{number:014}")
}

/// Puts the small objects `numbers`, `length` bytes each. All must be new.
pub(super) async fn fill(client: &Client, numbers: std::ops::Range<u64>, length: usize) -> Result<(), Error> {
    let value = Bytes::from(tidepool_client::workload::Payload::of(1).bytes(length));
    let mut calls = tokio::task::JoinSet::new();
    let mut starts = numbers.clone().step_by(BATCH);
    loop {
        while calls.len() < IN_FLIGHT
            && let Some(start) = starts.next()
        {
            let (client, value) = (client.clone(), value.clone());
            let batch = start..(start + BATCH as u64).min(numbers.end);
            calls.spawn(put_all(client, batch.map(|number| (key(number), value.clone())).collect()));
        }
        let Some(done) = calls.join_next().await else { return Ok(()) };
        done??;
    }
}

/// Puts all of `items`; those refused because eviction has not made room yet are put again.
async fn put_all(client: Client, mut items: Vec<(String, Bytes)>) -> Result<(), Error> {
    let end = Instant::now() + PATIENCE;
    while !items.is_empty() {
        let outcomes = client.put_batch(&items, &PutOptions::default()).await?;
        let mut refused = Vec::new();
        for (item, outcome) in items.into_iter().zip(outcomes) {
            match outcome {
                Ok(PutOutcome::Stored) => {}
                Ok(PutOutcome::AlreadyExists) => return Err(format!("{} is new and exists already", item.0).into()),
                Err(error) if error.kind() == ErrorKind::Exhausted && Instant::now() < end => refused.push(item),
                Err(error) => return Err(error.into()),
            }
        }
        items = refused;
    }
    Ok(())
}

/// Gets small objects by number, in batches; answers how many were found.
pub(super) async fn read(client: &Client, numbers: impl Iterator<Item = u64>) -> Result<usize, Error> {
    let keys: Vec<String> = numbers.map(key).collect();
    let got = client.get_batch(&keys).await?;
    Ok(got.into_iter().filter_map(tidepool_client::BatchGot::found).count())
}

/// Numbers below `bound` in an order that looks random and is the same each time (SplitMix64's finalizer).
pub(super) fn scattered(count: u64, bound: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |i| {
        let mixed = (i ^ (i >> 30)).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)) % bound
    })
}
