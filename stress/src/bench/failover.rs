//! What clients notice when the leader is killed, again and again: how long no write is acknowledged, whether reads that need
//! no leader stop, and whether anything is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tidepool_client::workload::Payload;
use tidepool_client::{Client, ClientSettings, Existence, PutOptions};

use super::latency::Latencies;
use super::load::runtime;
use super::{BenchOptions, Bound, Error, Figure};
use crate::cluster::Cluster;

/// The longest that a voter waits for its leader before it asks for votes.
const ELECTION_TIMEOUT: Duration = Duration::from_millis(300);
const WRITERS: usize = 4;
const VALUE_BYTES: usize = 512;
/// Puts of all writers before one that is asked for: every voter has applied it.
const LONG_AGO: usize = 500;
/// How long clients go on around each kill.
const AROUND: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(30);

/// What clients saw.
#[derive(Default)]
struct Seen {
    acknowledged: Mutex<Vec<(u64, Instant)>>,
    hits: Mutex<Vec<Instant>>,
    next: std::sync::atomic::AtomicU64,
    stop: AtomicBool,
}

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let kills = if options.quick { 5 } else { 100 };
    let runtime = runtime()?;
    // Room for all of it: what is evicted would count as lost.
    let mut cluster = Cluster::new(options.tidepool.clone(), &["telemetry.log_filter=warn"])?.lending(2 << 30, 0);
    cluster.grow(3)?;
    let client = |cluster: &Cluster, settings| {
        let _in_runtime = runtime.enter();
        cluster.client_with(settings)
    };
    let patient = client(&cluster, ClientSettings { deadline: PATIENCE, ..ClientSettings::default() })?;
    let seen = Arc::new(Seen::default());
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..WRITERS {
        tasks.spawn_on(write(patient.clone(), Arc::clone(&seen)), runtime.handle());
    }
    let reader = client(&cluster, ClientSettings { deadline: PATIENCE, ..ClientSettings::default() })?;
    tasks.spawn_on(ask(reader, Arc::clone(&seen)), runtime.handle());
    let (mut write_gaps, mut hit_gaps) = (Vec::new(), Vec::new());
    for _ in 0..kills {
        std::thread::sleep(AROUND);
        let leader = cluster.wait_for_leader();
        let killed_at = Instant::now();
        cluster.kill(leader)?;
        wait_for_write(&seen, killed_at)?;
        std::thread::sleep(AROUND);
        let until = Instant::now();
        write_gaps.push(longest_gap(seen.acknowledged.lock().iter().map(|&(_, at)| at), killed_at - AROUND / 4, until));
        hit_gaps.push(longest_gap(seen.hits.lock().iter().copied(), killed_at - AROUND / 4, until));
        cluster.restart(leader)?;
        cluster.wait("all vote again", |cluster| cluster.voters() == Some(3))?;
        cluster.wait("all have recovered", Cluster::has_recovered)?;
        cluster.wait("all are up", Cluster::are_all_up)?;
    }
    seen.stop.store(true, Ordering::SeqCst);
    while let Some(done) = runtime.block_on(tasks.join_next()) {
        done??;
    }
    let acknowledged: Vec<u64> = seen.acknowledged.lock().iter().map(|&(number, _)| number).collect();
    let (lost, wrong) = runtime.block_on(check(&patient, &acknowledged))?;
    let (write_gaps, hit_gaps) = (Latencies::from(write_gaps), Latencies::from(hit_gaps));
    let timeouts = |gaps: &Latencies, share| gaps.micros(share) / 1e6 / ELECTION_TIMEOUT.as_secs_f64();
    let none = || Some(Bound::AtMost(0.0));
    let remark = format!(
        "{kills} kills of the leader, {} puts acknowledged; T is {ELECTION_TIMEOUT:?}; p50 {:.0} ms, p99 {:.0} ms",
        acknowledged.len(),
        write_gaps.micros(0.5) / 1e3,
        write_gaps.micros(0.99) / 1e3
    );
    let hit_remark =
        format!("longest of the p50 {:.1} ms; one client asks one key at a time", hit_gaps.micros(0.5) / 1e3);
    Ok(vec![
        Figure::number("write gap, p50", timeouts(&write_gaps, 0.5), "T", Some(Bound::AtMost(1.3))).remark(remark),
        Figure::number("write gap, p99", timeouts(&write_gaps, 0.99), "T", Some(Bound::AtMost(2.2))),
        Figure::number("gap of hits that need no leader, p99", hit_gaps.micros(0.99) / 1e3, "ms", None)
            .remark(hit_remark),
        Figure::number("acknowledged puts lost", lost as f64, "", none()),
        Figure::number("objects with wrong bytes", wrong as f64, "", none()),
    ])
}

fn key(number: u64) -> String {
    format!("failover/{number}")
}

async fn write(client: Client, seen: Arc<Seen>) -> Result<(), Error> {
    while !seen.stop.load(Ordering::SeqCst) {
        let number = seen.next.fetch_add(1, Ordering::SeqCst);
        let value = Bytes::from(Payload::of(number).bytes(VALUE_BYTES));
        // One that fails is not acknowledged, and not looked for.
        if client.put(key(number), value, &PutOptions::default()).await.is_ok() {
            seen.acknowledged.lock().push((number, Instant::now()));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// Asks for what others put some time ago; a copy on the dead node is no hit, and no miss. Who has just put something is told of it
/// by who knows that log entry only, and waits for an election.
async fn ask(client: Client, seen: Arc<Seen>) -> Result<(), Error> {
    let mut turn = 0_usize;
    while !seen.stop.load(Ordering::SeqCst) {
        let known = {
            let acknowledged = seen.acknowledged.lock();
            turn += 1;
            let back = LONG_AGO + turn % 50;
            acknowledged.len().checked_sub(back).map(|place| acknowledged[place].0)
        };
        if let Some(number) = known
            && let Ok(found) = client.exists(key(number)).await
        {
            if found == Existence::Missing {
                return Err(format!("{} was acknowledged and is missing", key(number)).into());
            }
            seen.hits.lock().push(Instant::now());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

fn wait_for_write(seen: &Seen, after: Instant) -> Result<(), Error> {
    while seen.acknowledged.lock().last().is_none_or(|&(_, at)| at < after + Duration::from_millis(20)) {
        if after.elapsed() > PATIENCE {
            return Err(format!("no put was acknowledged within {PATIENCE:?} after the kill").into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn longest_gap(events: impl Iterator<Item = Instant>, from: Instant, until: Instant) -> Duration {
    let mut events: Vec<Instant> = events.filter(|&at| at >= from && at <= until).collect();
    events.sort_unstable();
    let ends = std::iter::once(from).chain(events.iter().copied());
    let starts = events.iter().copied().chain([until]);
    starts.zip(ends).map(|(start, end)| start - end).max().unwrap_or_default()
}

/// How many are lost, and how many have other bytes; all nodes run.
async fn check(client: &Client, acknowledged: &[u64]) -> Result<(usize, usize), Error> {
    let (mut lost, mut wrong) = (0, 0);
    for &number in acknowledged {
        match client.get(key(number)).await? {
            Some(object) => wrong += usize::from(Payload::of(number).check(&object.value).is_err()),
            None => lost += 1,
        }
    }
    Ok((lost, wrong))
}
