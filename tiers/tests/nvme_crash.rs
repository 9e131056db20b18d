//! Crashes at any moment: a disk that keeps live and durable images apart loses power in the middle of a workload, and
//! the tier is opened on what the medium may hold then.
//!
//! The laws:
//! 1. Whatever is announced was written, and reads back exactly.
//! 2. What a `sync` covered is announced, unless it was released or dropped since.
//! 3. What was released before a `sync` is not announced.
//! 4. Usage after recovery is the sum of what is announced, and the tier goes on working.
#![expect(clippy::unwrap_used, reason = "tests")]

mod nvme_support;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use nvme_support::*;
use tidepool_tiers::io::faulty::FaultyDisk;
use tidepool_tiers::nvme::{NvmeConfig, NvmeTier};

const REGION_BYTES: u64 = 256 << 10;
const REGIONS: u64 = 12;
const DISK_BYTES: u64 = (64 << 10) + REGIONS * REGION_BYTES;

fn config() -> NvmeConfig {
    NvmeConfig { region_bytes: REGION_BYTES, queue_depth: 8, ..NvmeConfig::new("/faulty", DISK_BYTES) }
}

fn open(disk: &FaultyDisk) -> Arc<NvmeTier> {
    NvmeTier::open_on(&config(), NODE, Arc::new(disk.clone())).unwrap()
}

/// What the workload knows for certain.
#[derive(Default)]
struct Known {
    /// Given to `write`, with its length, whatever came of it.
    attempted: HashMap<u64, usize>,
    /// Covered by a sync.
    synced: HashSet<u64>,
    released: HashSet<u64>,
    /// Released before a sync that succeeded.
    buried: HashSet<u64>,
}

/// Writes, releases and syncs at random until `steps` are done or the disk fails.
async fn work(tier: &Arc<NvmeTier>, owner: &Arc<Owner>, seed: u64, steps: u64) -> Known {
    let mut random = Random::new(seed);
    let mut known = Known::default();
    let (mut next, mut written) = (1, HashSet::new());
    for _ in 0..steps {
        match random.below(10) {
            0..6 => {
                let count = 1 + random.below(12);
                let lengths: Vec<_> = (0..count).map(|_| random_length(&mut random)).collect();
                let tasks: Vec<_> = (next..)
                    .zip(lengths)
                    .map(|(number, length)| {
                        known.attempted.insert(number, length);
                        let (owner, tier) = (Arc::clone(owner), Arc::clone(tier));
                        tokio::spawn(async move { store_for(&owner, &tier, number, length).await.map(|()| number) })
                    })
                    .collect();
                next += count;
                for task in tasks {
                    let Ok(number) = task.await.unwrap() else { return known };
                    written.insert(number);
                }
            }
            6..8 => {
                let slices = owner.slices();
                if !slices.is_empty() {
                    let number = slices[random.below(slices.len() as u64) as usize].header.version.sequence;
                    // Taken out first and released where it lies now: reclaim may be moving it.
                    let Some(slice) = owner.places.lock().remove(&number) else { continue };
                    tier.release(slice.location);
                    known.released.insert(number);
                }
            }
            _ => {
                let (written, released) = (written.clone(), known.released.clone());
                if tier.sync().await.is_err() {
                    return known;
                }
                known.synced.extend(written);
                known.buried.extend(released);
            }
        }
    }
    known
}

fn random_length(random: &mut Random) -> usize {
    let longest = [1, 500, 5000, 30_000, 66_000, 140_000][random.below(6) as usize];
    random.below(longest + 1) as usize
}

async fn check_laws(image: Vec<u8>, known: &Known, owner: &Owner, what: &str) {
    let disk = FaultyDisk::from_image(image);
    let tier = open(&disk);
    let mut used = 0;
    let mut announced = HashMap::new();
    let mut batches = tier.scan();
    while let Some(batch) = batches.recv().await {
        for (header, location) in batch.records {
            used += u64::from(location.record_bytes());
            let slice = Stored { header, location };
            let number = slice.header.version.sequence;
            let length = known.attempted.get(&number).unwrap_or_else(|| panic!("{what}: {number} was never written"));
            assert_eq!(slice.header, header_of(number, *length), "{what}");
            assert_readable(&tier, &slice).await;
            announced.insert(number, slice);
        }
    }
    let dropped = owner.dropped.lock().clone();
    for number in &known.synced {
        let may_be_gone = known.released.contains(number) || dropped.contains(number);
        assert!(may_be_gone || announced.contains_key(number), "{what}: {number} was synced and is lost");
    }
    for number in &known.buried {
        assert!(!announced.contains_key(number), "{what}: {number} was removed and is back");
    }
    let usage = tier.usage();
    assert_eq!(usage.used_bytes, used, "{what}");
    assert_eq!(usage.used_bytes + usage.free_bytes + usage.reserved_bytes, usage.capacity_bytes);
    if usage.free_regions > 2 {
        let slice = store(&tier, u64::MAX, 10_000).await;
        assert_readable(&tier, &slice).await;
        tier.sync().await.unwrap();
    }
}

fn header_of(number: u64, length: usize) -> tidepool_metadata::SliceHeader {
    header(number, length)
}

async fn crash_after(operations: u64, seed: u64) {
    let disk = FaultyDisk::new(DISK_BYTES as usize);
    let tier = open(&disk);
    let owner = Arc::new(Owner { keep_every: 4, ..Owner::default() });
    spawn_reclaim(&tier, &owner);
    disk.lose_power_after(operations);
    let known = work(&tier, &owner, seed, 150).await;
    drop(tier);
    for crash in 0..4 {
        let what = format!("seed {seed}, power lost after {operations} operations, crash {crash}");
        check_laws(disk.crash_image(seed ^ crash << 20), &known, &owner, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_at_any_moment_loses_nothing_synced_and_returns_nothing_removed() {
    for seed in 1..=24 {
        crash_after(10 + seed * 13 % 170, seed).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_in_the_middle_of_reclaim_keeps_what_was_kept() {
    for seed in 100..=112 {
        crash_after(150 + (seed - 100) * 29, seed).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_during_recovery_can_be_recovered_from() {
    for seed in 1..=8 {
        let disk = FaultyDisk::new(DISK_BYTES as usize);
        let tier = open(&disk);
        let owner = Arc::new(Owner::default());
        disk.lose_power_after(40 + seed * 7);
        let known = work(&tier, &owner, seed, 60).await;
        drop(tier);
        let image = disk.crash_image(seed);
        for operations in [2 * REGIONS + 1, 2 * REGIONS + 3, 2 * REGIONS + 4] {
            let again = FaultyDisk::from_image(image.clone());
            again.lose_power_after(operations);
            drop(NvmeTier::open_on(&config(), NODE, Arc::new(again.clone())));
            check_laws(again.crash_image(seed + operations), &known, &owner, &format!("seed {seed}, twice")).await;
        }
    }
}

#[tokio::test]
async fn torn_last_record_is_dropped_and_its_neighbours_are_kept() {
    let disk = FaultyDisk::new(DISK_BYTES as usize);
    let tier = open(&disk);
    let slices = store_many(&tier, 0..10, 9000).await;
    drop(tier);
    let newer = |best: Stored, slice: Stored| if slice.location.is_newer_than(&best.location) { slice } else { best };
    let newest = slices.into_iter().reduce(newer).unwrap();
    // Find the record's payload in the image and lose its second half.
    let mut image = disk.live_image();
    let bytes = bytes_of(newest.header.version.sequence, 9000);
    let at = image.windows(64).position(|window| window == &bytes[8000..8064]).unwrap();
    image[at..at + 512].fill(0);
    let tier = open(&FaultyDisk::from_image(image));
    let found = scan_all(&tier).await;
    assert_eq!(found.len(), 9);
    assert!(!found.contains_key(&newest.header.version.sequence));
}

#[tokio::test]
async fn bytes_of_a_reused_region_are_never_taken_for_new_ones() {
    let disk = FaultyDisk::new(DISK_BYTES as usize);
    let tier = open(&disk);
    let old = store_many(&tier, 0..200, 5000).await;
    tier.close().await.unwrap();
    drop(tier);
    let old_image = disk.live_image();
    let tier = open(&FaultyDisk::from_image(old_image.clone()));
    assert_eq!(scan_all(&tier).await.len(), 200);
    let owner = Arc::new(Owner::default());
    spawn_reclaim(&tier, &owner);
    // All old slices are unknown to the owner, so reclaim drops them; new ones take their place.
    for slice in &old {
        tier.release(slice.location);
    }
    for round in 0..30 {
        store_many_for(&owner, &tier, 1000 + round * 20..1020 + round * 20, 8000).await;
    }
    for slice in &old {
        match read(&tier, slice).await {
            Ok(bytes) => assert_eq!(bytes, bytes_of(slice.header.version.sequence, 5000)),
            Err(error) => assert_eq!(error.kind(), tidepool_metadata::ErrorKind::NotFound, "{error}"),
        }
    }
    assert_all_readable(&tier, &owner).await;
}
