//! Replays a trace against a store: each request reads its blocks in order and puts those that it missed; every byte
//! of every hit is checked.
//!
//! Requests start in the order of the trace, at most `concurrency` at a time; within a request everything is in order.
//! With a `speed`, a request does not start before its time. A wrong byte is counted and remembered, never passed over.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::block_store::{BlockStore, block_key};
use super::histogram::Histogram;
use super::payload::Payload;
use super::report::{ReplayReport, WrongBlock};
use super::trace::Trace;
use crate::StoredIn;
use bytes::Bytes;

/// How a trace is replayed.
#[derive(Clone, Copy, Debug)]
pub struct Replay {
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Requests at a time.
    pub concurrency: usize,
    /// Seconds of the trace a second; `None`: as fast as the store answers.
    pub speed: Option<f64>,
}

/// How far a replay has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Requests done.
    pub requests: usize,
    /// Blocks read.
    pub blocks: usize,
    /// Of those, found.
    pub hits: usize,
}

/// Why a replay can't start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A setting is out of bounds.
    #[error("replay setting {name} is {value}: {bounds}")]
    Setting {
        /// Which.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        bounds: &'static str,
    },
    /// A worker ended before its work was done.
    #[error("a replay worker stopped")]
    Worker(#[source] tokio::task::JoinError),
}

impl Replay {
    /// Replays `trace` against `store`; calls `progress` after each request.
    ///
    /// # Errors
    /// [`ReplayError::Setting`]. Wrong bytes and failed calls are in the report.
    pub async fn run<S: BlockStore>(
        self,
        trace: &Trace,
        store: Arc<S>,
        progress: impl Fn(Progress) + Send + Sync + 'static,
    ) -> Result<ReplayReport, ReplayError> {
        self.validate()?;
        let run = Arc::new(Run {
            replay: self,
            requests: trace.requests.iter().map(|request| (request.timestamp, request.hash_ids.clone())).collect(),
            next: AtomicUsize::new(0),
            started: Instant::now(),
            total: Mutex::new(Total::default()),
        });
        let progress = Arc::new(progress);
        let workers: Vec<_> = (0..self.concurrency.min(run.requests.len()))
            .map(|_| {
                let (run, store, progress) = (Arc::clone(&run), Arc::clone(&store), Arc::clone(&progress));
                tokio::spawn(async move { run.work(&*store, &*progress).await })
            })
            .collect();
        for worker in workers {
            worker.await.map_err(ReplayError::Worker)?;
        }
        let seconds = run.started.elapsed().as_secs_f64();
        let total = run.total.lock().expect("no worker panics while it holds the lock");
        Ok(ReplayReport {
            seconds,
            hit_latency: total.hit_latency.percentiles(),
            miss_latency: total.miss_latency.percentiles(),
            put_latency: total.put_latency.percentiles(),
            ..total.report.clone()
        })
    }

    fn validate(self) -> Result<(), ReplayError> {
        let refuse = |name, value, bounds| Err(ReplayError::Setting { name, value, bounds });
        if self.block_bytes == 0 {
            return refuse("block_bytes", self.block_bytes.to_string(), "give at least 1");
        }
        if !(1..=4096).contains(&self.concurrency) {
            return refuse("concurrency", self.concurrency.to_string(), "give 1 to 4096");
        }
        match self.speed {
            Some(speed) if !(speed.is_finite() && speed > 0.0) => {
                refuse("speed", speed.to_string(), "give more than 0")
            }
            _ => Ok(()),
        }
    }
}

struct Run {
    replay: Replay,
    requests: Vec<(u64, Vec<u64>)>,
    next: AtomicUsize,
    started: Instant,
    total: Mutex<Total>,
}

#[derive(Default)]
struct Total {
    report: ReplayReport,
    hit_latency: Histogram,
    miss_latency: Histogram,
    put_latency: Histogram,
}

impl Run {
    async fn work<S: BlockStore>(&self, store: &S, progress: &(impl Fn(Progress) + Sync)) {
        while let Some((timestamp, hash_ids)) = self.requests.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(speed) = self.replay.speed {
                let due = Duration::from_secs_f64(*timestamp as f64 / 1000.0 / speed);
                tokio::time::sleep(due.saturating_sub(self.started.elapsed())).await;
            }
            let mut request = Total::default();
            let mut unbroken = true;
            for &hash_id in hash_ids {
                unbroken &= self.block(store, hash_id, &mut request).await;
                request.report.prefix_hits += usize::from(unbroken);
            }
            progress(self.merge(&request));
        }
    }

    /// Reads one block and puts it if it was missing; answers whether it was found.
    async fn block<S: BlockStore>(&self, store: &S, hash_id: u64, request: &mut Total) -> bool {
        let length = self.replay.block_bytes;
        let report = &mut request.report;
        report.blocks += 1;
        let started = Instant::now();
        match store.read(block_key(hash_id, length)).await {
            Ok(Some(found)) => {
                request.hit_latency.record(started.elapsed());
                report.hits += 1;
                report.hits_dram += usize::from(found.tier == StoredIn::Dram);
                report.hits_nvme += usize::from(found.tier == StoredIn::Nvme);
                report.read_bytes += found.value.len() as u64;
                if let Err(wrong) = check(hash_id, length, &found.value) {
                    report.wrong_blocks += 1;
                    report.remark(wrong);
                }
                return true;
            }
            Ok(None) => request.miss_latency.record(started.elapsed()),
            Err(error) => {
                report.errors += 1;
                report.remark(format!("get of block {hash_id}: {error}"));
                return false;
            }
        }
        let value = Bytes::from(Payload::of(hash_id).bytes(length));
        let started = Instant::now();
        match store.store(block_key(hash_id, length), value).await {
            Ok(()) => {
                request.put_latency.record(started.elapsed());
                report.puts += 1;
                report.put_bytes += length as u64;
            }
            Err(error) => {
                report.errors += 1;
                report.remark(format!("put of block {hash_id}: {error}"));
            }
        }
        false
    }

    fn merge(&self, request: &Total) -> Progress {
        let mut total = self.total.lock().expect("no worker panics while it holds the lock");
        total.hit_latency.merge(&request.hit_latency);
        total.miss_latency.merge(&request.miss_latency);
        total.put_latency.merge(&request.put_latency);
        let report = &mut total.report;
        report.requests += 1;
        report.add(&request.report);
        Progress { requests: report.requests, blocks: report.blocks, hits: report.hits }
    }
}

fn check(hash_id: u64, length: usize, value: &[u8]) -> Result<(), WrongBlock> {
    if value.len() != length {
        return Err(WrongBlock::Length { hash_id, actual: value.len() });
    }
    Payload::of(hash_id).check(value).map_err(WrongBlock::Byte)
}

#[cfg(test)]
mod tests;
