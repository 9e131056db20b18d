//! Readers in the memory of a node on their host, while it evicts and fills that memory again without end.
//!
//! A writer puts small objects, many times what there is room for; readers look up recent ones without a call, and each
//! that is found must have its own bytes: every word of an object says which object it is. Only what was found counts, so
//! that a node which lets nobody read, or readers that look for what is gone, prove nothing.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;
use tidepool_client::{Client, ErrorKind, PutOptions};

use crate::bench::Error;
use crate::node_process::{NodeOptions, NodeProcess, Place};
use crate::random::Random;

/// Of the node: each object takes a page of 4 KiB.
const DRAM_BYTES: u64 = 16 << 20;
/// Of the newest objects readers choose: somewhat fewer than there is room for, so that most are found and many are just
/// going.
const RECENT: u64 = 3000;
/// Objects of a put.
const BATCH: u64 = 64;
/// Words of the longest object.
const WORDS: u64 = 128;
/// Readers count this many together.
const COUNTED: u64 = 1024;
/// So long nothing may be found before the run is given up.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// What is done.
#[derive(Clone, Debug)]
pub struct LookupOptions {
    /// The node's binary.
    pub tidepool: PathBuf,
    /// Objects to be found.
    pub lookups: u64,
    /// Threads that look.
    pub readers: u32,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct LookupReport {
    /// Objects that were found, each verified.
    pub found: u64,
    /// Lookups that found nothing: evicted, or being changed.
    pub not_found: u64,
    /// Objects that were put.
    pub put: u64,
    /// Objects that were evicted from the node's memory.
    pub evicted: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Wrong bytes, in words. Readers end with the first.
    pub wrong: Vec<String>,
}

/// What all threads know.
#[derive(Default)]
struct Shared {
    stored: AtomicU64,
    found: AtomicU64,
    not_found: AtomicU64,
    stop: AtomicBool,
}

/// Runs a node, its writer and its readers until so many objects were found, or one was wrong.
///
/// # Errors
/// The node's; a put that fails; nothing was found for a minute.
pub fn run(options: &LookupOptions) -> Result<LookupReport, Error> {
    let (folder, segment) = (tempfile::tempdir()?, tempfile::tempdir_in("/dev/shm")?);
    let node = NodeProcess::start(NodeOptions {
        program: options.tidepool.clone(),
        data: folder.path().join("data"),
        dram_bytes: DRAM_BYTES,
        nvme_bytes: 0,
        settings: vec![format!("dram.folder='{}'", segment.path().display()), "store.slice_bytes=256KiB".into()],
        place: Place::default(),
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let client = || {
        let _in_runtime = runtime.enter();
        let socket = node.options().data.join("tidepool.sock");
        Client::builder().endpoint(format!("unix:{}", socket.display())).build()
    };
    let (writer, shared, started) = (client()?, Shared::default(), Instant::now());
    let readers: Vec<_> = (0..options.readers.max(1)).map(|_| client()).collect::<Result<_, _>>()?;
    let (put, wrong) = std::thread::scope(|scope| {
        let writing = scope.spawn(|| runtime.block_on(write(&writer, &shared)));
        let reading: Vec<_> = (1..)
            .zip(&readers)
            .map(|(seed, client)| {
                let (shared, runtime) = (&shared, &runtime);
                scope.spawn(move || runtime.block_on(read(client, seed, shared)))
            })
            .collect();
        let waited = wait(&shared, options.lookups, || {
            writing.is_finished() || reading.iter().any(std::thread::ScopedJoinHandle::is_finished)
        });
        shared.stop.store(true, Ordering::Relaxed);
        let put = writing.join().map_err(|_| "the writer panicked")??;
        let mut wrong = Vec::new();
        for reader in reading {
            wrong.extend(reader.join().map_err(|_| "a reader panicked")??);
        }
        waited.map(|()| (put, wrong))
    })?;
    Ok(LookupReport {
        found: shared.found.load(Ordering::Relaxed),
        not_found: shared.not_found.load(Ordering::Relaxed),
        put,
        evicted: node.tier("dram", "evictions")?,
        seconds: started.elapsed().as_secs_f64(),
        wrong,
    })
}

/// Waits until enough was found, or somebody ended before.
fn wait(shared: &Shared, lookups: u64, is_over: impl Fn() -> bool) -> Result<(), Error> {
    let (mut last, mut since) = (0, Instant::now());
    loop {
        let found = shared.found.load(Ordering::Relaxed);
        if found >= lookups || is_over() {
            return Ok(());
        }
        if found > last {
            (last, since) = (found, Instant::now());
        } else if since.elapsed() > PATIENCE {
            return Err(format!("nothing was found for {PATIENCE:?}, {found} before").into());
        }
        std::thread::sleep(LOOK);
    }
}

/// Puts objects until it is stopped; gives how many.
async fn write(client: &Client, shared: &Shared) -> Result<u64, Error> {
    let mut next = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        let mut items: Vec<_> = (next..next + BATCH).map(|number| (key(number), value(number))).collect();
        while !items.is_empty() && !shared.stop.load(Ordering::Relaxed) {
            let outcomes = client.put_batch(&items, &PutOptions::default()).await?;
            let mut refused = Vec::new();
            for (item, outcome) in items.into_iter().zip(outcomes) {
                match outcome {
                    Ok(_) => {}
                    // Eviction makes room while we wait for it.
                    Err(error) if error.kind() == ErrorKind::Exhausted => refused.push(item),
                    Err(error) => return Err(error.into()),
                }
            }
            items = refused;
        }
        next += BATCH;
        shared.stored.store(next, Ordering::Relaxed);
    }
    Ok(next)
}

/// Looks recent objects up until it is stopped, or one is wrong, which it describes.
async fn read(client: &Client, seed: u64, shared: &Shared) -> Result<Option<String>, Error> {
    let (mut random, mut buffer) = (Random::new(seed), vec![0; 8 * WORDS as usize]);
    while !shared.stop.load(Ordering::Relaxed) {
        let newest = shared.stored.load(Ordering::Relaxed);
        let mut found = 0;
        for _ in 0..COUNTED {
            let number = newest.saturating_sub(random.below(RECENT));
            let Some(info) = client.get_local_into(key(number), &mut buffer).await? else { continue };
            if let Some(wrong) = wrong(number, info.length, &buffer) {
                return Ok(Some(wrong));
            }
            found += 1;
        }
        shared.found.fetch_add(found, Ordering::Relaxed);
        shared.not_found.fetch_add(COUNTED - found, Ordering::Relaxed);
        if found == 0 {
            // Not let in yet, or nothing there yet: others need the core more.
            tokio::time::sleep(LOOK).await;
        }
    }
    Ok(None)
}

fn key(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

/// Words of object `number`.
fn words(number: u64) -> u64 {
    1 + number % WORDS
}

/// What each word of object `number` is.
fn word(number: u64) -> [u8; 8] {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

fn value(number: u64) -> Bytes {
    word(number).repeat(words(number) as usize).into()
}

/// What is wrong with an object that was found.
fn wrong(number: u64, length: u64, buffer: &[u8]) -> Option<String> {
    if length != 8 * words(number) {
        return Some(format!("object {number} has {length} bytes, not {}", 8 * words(number)));
    }
    let expected = word(number);
    let found = buffer[..length as usize].as_chunks::<8>().0;
    let place = found.iter().position(|word| *word != expected)?;
    Some(format!("object {number} has {:02x?} at {}, not {expected:02x?}", found[place], place * 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_byte_and_length_is_noticed() {
        for number in [0, 1, 126, 127, 128, 1 << 40] {
            let mut bytes = value(number).to_vec();
            let length = bytes.len() as u64;
            assert_eq!(wrong(number, length, &bytes), None);
            assert!(wrong(number, length - 1, &bytes).is_some());
            assert!(wrong(number + 1, length, &bytes).is_some(), "another object's bytes");
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            assert!(wrong(number, length, &bytes).is_some());
        }
    }
}
