//! One kind of call on a store, again and again: so many callers, each with one call at a time, for a while.
//!
//! Gets and questions go round objects that were put before; puts store new ones. Callers are threads, because a get that
//! needs no call never gives its thread away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;
use tokio::runtime::Handle;

use super::histogram::{Histogram, Percentiles};
use super::payload::Payload;
use super::report::REMEMBERED;
use crate::{BatchGot, Client, Error, ErrorKind, Existence, LendableMemory, Matching, PutOptions, PutOutcome};

/// Different values of puts: so many that a store could not live on having seen them.
const VALUES: usize = 16;
/// Bytes of one batch while objects are put before a load.
const FILL_BYTES: usize = 4 << 20;
/// A put that finds no room because eviction has not made it yet is repeated for so long while objects are put.
const FILL_PATIENCE: Duration = Duration::from_secs(20);

/// What callers do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadOperation {
    /// Put one new object.
    Put,
    /// Get one object into memory that is used again and again.
    Get,
    /// Put several.
    PutBatch,
    /// Get several.
    GetBatch,
    /// Ask for one.
    Exists,
    /// Ask for several.
    ExistsBatch,
}

impl LoadOperation {
    /// Whether a call means several objects.
    #[must_use]
    pub fn is_batch(self) -> bool {
        matches!(self, Self::PutBatch | Self::GetBatch | Self::ExistsBatch)
    }

    fn is_put(self) -> bool {
        matches!(self, Self::Put | Self::PutBatch)
    }
}

/// A load. Counts are at least 1.
#[derive(Clone, Debug)]
pub struct StoreLoad {
    /// What callers do.
    pub operation: LoadOperation,
    /// Bytes of an object.
    pub block_bytes: usize,
    /// Objects of a batch.
    pub batch: usize,
    /// Callers.
    pub threads: usize,
    /// How long they call.
    pub duration: Duration,
    /// Whether every byte that comes back is compared, and some of what was put is read again.
    pub verify: bool,
    /// Whether values of puts lie in memory from which a node on this host can copy them.
    pub lendable: bool,
    /// Objects that gets and questions go round.
    pub objects: usize,
    /// All keys begin with it; puts want one of their own for each load.
    pub prefix: String,
}

/// What a load did.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StoreLoadReport {
    /// Calls that were answered.
    pub calls: u64,
    /// Objects in them.
    pub items: u64,
    /// Bytes of values moved.
    pub bytes: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Of calls.
    #[serde(flatten)]
    pub latency: Percentiles,
    /// Objects that needed no call: they were read in the node's shared memory.
    pub without_call: u64,
    /// Calls that went by the node's transfer engine.
    pub engine_calls: u64,
    /// Messages with values that the node copied from where they lie.
    pub lent_puts: u64,
    /// Objects that were not there: evicted meanwhile.
    pub missing: u64,
    /// Objects with wrong bytes.
    pub wrong: u64,
    /// Calls or objects that failed.
    pub errors: u64,
    /// The first wrong objects and errors, in words.
    pub remarks: Vec<String>,
}

impl StoreLoadReport {
    /// Objects a second.
    #[must_use]
    pub fn items_per_second(&self) -> f64 {
        self.items as f64 / self.seconds.max(1e-9)
    }

    /// Bytes a second.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds.max(1e-9)
    }

    /// Whether every byte was right and every call answered.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.wrong == 0 && self.errors == 0
    }

    fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.items += other.items;
        self.bytes += other.bytes;
        self.missing += other.missing;
        self.wrong += other.wrong;
        self.errors += other.errors;
        self.remarks.extend(other.remarks);
        self.remarks.truncate(REMEMBERED);
    }

    fn wrong(&mut self, remark: String) {
        self.wrong += 1;
        self.remark(remark);
    }

    fn failed(&mut self, error: &Error) {
        self.errors += 1;
        self.remark(error.to_string());
    }

    fn remark(&mut self, remark: String) {
        if self.remarks.len() < REMEMBERED {
            self.remarks.push(remark);
        }
    }
}

impl StoreLoad {
    /// Puts the objects that gets and questions go round. By another client than that of the load, if gets are to need no
    /// call: what a client has written itself it asks the node for, for a while.
    ///
    /// # Errors
    /// The first put's that fails.
    pub async fn fill(&self, client: &Client) -> Result<(), Error> {
        let a_batch = (FILL_BYTES / self.block_bytes.max(1)).clamp(1, 256);
        let until = Instant::now() + FILL_PATIENCE;
        for start in (0..self.objects).step_by(a_batch) {
            let numbers = start..(start + a_batch).min(self.objects);
            let mut items: Vec<_> = numbers.map(|number| (self.key(number), self.value(number))).collect();
            while !items.is_empty() {
                let outcomes = client.put_batch(&items, &PutOptions::default()).await?;
                let mut refused = Vec::new();
                for (item, outcome) in items.into_iter().zip(outcomes) {
                    match outcome {
                        Ok(PutOutcome::Stored | PutOutcome::AlreadyExists) => {}
                        Err(error) if error.kind() == ErrorKind::Exhausted && Instant::now() < until => {
                            refused.push(item);
                        }
                        Err(error) => return Err(error),
                    }
                }
                items = refused;
            }
        }
        Ok(())
    }

    /// Removes all objects whose keys begin with the prefix.
    ///
    /// # Errors
    /// What the server refuses.
    pub async fn clear(&self, client: &Client) -> Result<(), Error> {
        let matching = Matching::Prefix(format!("{}/", self.prefix).into_bytes());
        client.remove_matching(&matching, true, |_| {}).await.map(drop)
    }

    /// Calls for as long as it says. Blocks; not to be called by a thread of `runtime`.
    #[must_use]
    pub fn run(&self, runtime: &Handle, client: &Client) -> StoreLoadReport {
        let (without_call, engine_calls, lent_puts) = (client.local_hits(), client.native_calls(), client.lent_puts());
        let keys: Arc<[String]> = (0..self.objects).map(|number| self.key(number)).collect();
        let mut report = StoreLoadReport::default();
        let values: Arc<[Bytes]> = match self.put_values() {
            Ok(values) => values.into(),
            Err(error) => {
                report.failed(&Error::Source(error));
                return report;
            }
        };
        let (mut latency, started) = (Histogram::default(), Instant::now());
        let end = started + self.duration;
        let caller = |thread| Caller {
            load: self,
            client,
            keys: Arc::clone(&keys),
            values: Arc::clone(&values),
            thread,
            buffer: vec![0; self.block_bytes],
            report: StoreLoadReport::default(),
            latency: Histogram::default(),
        };
        let mut put = Vec::new();
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..self.threads)
                .map(|thread| {
                    let mut caller = caller(thread);
                    scope.spawn(move || {
                        let turns = runtime.block_on(caller.run(end));
                        (caller.report, caller.latency, turns)
                    })
                })
                .collect();
            for (thread, caller) in callers.into_iter().enumerate() {
                match caller.join() {
                    Ok((of_caller, times, turns)) => {
                        report.add(of_caller);
                        latency.merge(&times);
                        put.push((thread, turns));
                    }
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        });
        report.seconds = started.elapsed().as_secs_f64();
        report.latency = latency.percentiles();
        report.without_call = client.local_hits() - without_call;
        report.engine_calls = client.native_calls() - engine_calls;
        report.lent_puts = client.lent_puts() - lent_puts;
        if self.verify && self.operation.is_put() {
            for (thread, turns) in put {
                let mut reader = caller(thread);
                runtime.block_on(reader.read_again(turns));
                report.wrong += reader.report.wrong;
                report.errors += reader.report.errors;
                reader.report.remarks.into_iter().for_each(|remark| report.remark(remark));
            }
        }
        report
    }

    fn key(&self, number: usize) -> String {
        format!("{}/read/{number}", self.prefix)
    }

    fn put_key(&self, thread: usize, turn: usize) -> String {
        format!("{}/put/{thread}/{turn}", self.prefix)
    }

    fn put_values(&self) -> std::io::Result<Vec<Bytes>> {
        let values = (0..VALUES).map(|number| self.value(number));
        if !self.lendable {
            return Ok(values.collect());
        }
        let mut memory = LendableMemory::allocate(VALUES * self.block_bytes)?;
        memory.chunks_exact_mut(self.block_bytes).zip(values).for_each(|(place, value)| place.copy_from_slice(&value));
        let memory = Bytes::from_owner(memory);
        Ok((0..VALUES).map(|number| memory.slice(number * self.block_bytes..(number + 1) * self.block_bytes)).collect())
    }

    fn value(&self, number: usize) -> Bytes {
        Payload::of(number as u64).bytes(self.block_bytes).into()
    }
}

/// One of a load's callers.
struct Caller<'a> {
    load: &'a StoreLoad,
    client: &'a Client,
    keys: Arc<[String]>,
    values: Arc<[Bytes]>,
    thread: usize,
    buffer: Vec<u8>,
    report: StoreLoadReport,
    latency: Histogram,
}

impl Caller<'_> {
    /// Calls until `end`; gives how often.
    async fn run(&mut self, end: Instant) -> usize {
        let mut turn = 0;
        while Instant::now() < end {
            self.call(turn).await;
            turn += 1;
        }
        turn
    }

    async fn call(&mut self, turn: usize) {
        let StoreLoad { operation, batch, threads, .. } = *self.load;
        // Callers begin far from each other.
        let first = self.thread * self.keys.len() / threads + turn * if operation.is_batch() { batch } else { 1 };
        let numbers: Vec<_> = (first..first + batch).map(|number| number % self.keys.len()).collect();
        match operation {
            LoadOperation::Put => self.put(turn).await,
            LoadOperation::PutBatch => self.put_batch(turn).await,
            LoadOperation::Get => self.get(numbers[0]).await,
            LoadOperation::GetBatch => self.get_batch(&numbers).await,
            LoadOperation::Exists => self.exists(&numbers[..1]).await,
            LoadOperation::ExistsBatch => self.exists(&numbers).await,
        }
    }

    fn answered(&mut self, started: Instant, items: usize) {
        self.latency.record(started.elapsed());
        self.report.calls += 1;
        self.report.items += items as u64;
    }

    async fn put(&mut self, turn: usize) {
        let (key, value) = (self.load.put_key(self.thread, turn), self.values[turn % VALUES].clone());
        let started = Instant::now();
        match self.client.put(key, value, &PutOptions::default()).await {
            Ok(_) => {
                self.answered(started, 1);
                self.report.bytes += self.load.block_bytes as u64;
            }
            Err(error) => self.report.failed(&error),
        }
    }

    async fn put_batch(&mut self, turn: usize) {
        let numbers = (0..self.load.batch).map(|place| turn * self.load.batch + place);
        let item = |number| (self.load.put_key(self.thread, number), self.values[number % VALUES].clone());
        let items: Vec<_> = numbers.map(item).collect();
        let started = Instant::now();
        match self.client.put_batch(&items, &PutOptions::default()).await {
            Ok(outcomes) => {
                self.answered(started, outcomes.len());
                for outcome in outcomes {
                    match outcome {
                        Ok(_) => self.report.bytes += self.load.block_bytes as u64,
                        Err(error) => self.report.failed(&error),
                    }
                }
            }
            Err(error) => self.report.failed(&error),
        }
    }

    async fn get(&mut self, number: usize) {
        let started = Instant::now();
        match self.client.get_into(&self.keys[number], &mut self.buffer).await {
            Ok(found) => {
                self.answered(started, 1);
                match found {
                    Some(info) => {
                        let buffer = std::mem::take(&mut self.buffer);
                        self.found(number, buffer.get(..info.length as usize).unwrap_or(&[]));
                        self.buffer = buffer;
                    }
                    None => self.report.missing += 1,
                }
            }
            Err(error) => self.report.failed(&error),
        }
    }

    async fn get_batch(&mut self, numbers: &[usize]) {
        let keys: Vec<_> = numbers.iter().map(|&number| &self.keys[number]).collect();
        let started = Instant::now();
        match self.client.get_batch(&keys).await {
            Ok(got) => {
                self.answered(started, got.len());
                for (&number, got) in numbers.iter().zip(got) {
                    match got {
                        BatchGot::Found(object) => self.found(number, &object.value),
                        BatchGot::Missing | BatchGot::Unavailable => self.report.missing += 1,
                        BatchGot::Failed(error) => self.report.failed(&error),
                    }
                }
            }
            Err(error) => self.report.failed(&error),
        }
    }

    async fn exists(&mut self, numbers: &[usize]) {
        let keys: Vec<_> = numbers.iter().map(|&number| &self.keys[number]).collect();
        let started = Instant::now();
        match self.client.exists_many(&keys, None, false).await {
            Ok(answers) => {
                self.answered(started, answers.len());
                let missing = answers.iter().filter(|&&answer| answer != Existence::Present);
                self.report.missing += missing.count() as u64;
            }
            Err(error) => self.report.failed(&error),
        }
    }

    /// Counts an object's bytes, and compares them if that is wanted; their number always.
    fn found(&mut self, number: usize, value: &[u8]) {
        self.report.bytes += value.len() as u64;
        let expected = self.load.block_bytes;
        if value.len() != expected {
            self.report.wrong(format!("{} has {} bytes, put were {expected}", self.keys[number], value.len()));
        } else if self.load.verify
            && let Err(mismatch) = Payload::of(number as u64).check(value)
        {
            self.report.wrong(format!("{}: {mismatch}", self.keys[number]));
        }
    }

    /// Compares the last objects that were put in `turns` calls. Some may have been evicted.
    async fn read_again(&mut self, turns: usize) {
        let put = turns * if self.load.operation.is_batch() { self.load.batch } else { 1 };
        for number in put.saturating_sub(self.keys.len())..put {
            let key = self.load.put_key(self.thread, number);
            let expected = Payload::of((number % VALUES) as u64);
            match self.client.get(&key).await {
                Ok(Some(object)) if object.value.len() != self.load.block_bytes => {
                    self.report.wrong(format!("{key} has {} bytes", object.value.len()));
                }
                Ok(Some(object)) => {
                    if let Err(mismatch) = expected.check(&object.value) {
                        self.report.wrong(format!("{key}: {mismatch}"));
                    }
                }
                Ok(None) => {}
                Err(error) => self.report.failed(&error),
            }
        }
    }
}
