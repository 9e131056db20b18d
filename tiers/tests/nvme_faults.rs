//! Faults of disk, folder and machine: no wrong byte, a clear error, and a process that lives.
#![expect(clippy::unwrap_used, reason = "tests")]

mod nvme_support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use nvme_support::*;
use tidepool_metadata::{ErrorKind, NodeId};
use tidepool_tiers::io::Operation;
use tidepool_tiers::io::faulty::{Fault, FaultyDisk};
use tidepool_tiers::nvme::{NvmeConfig, NvmeError, NvmeTier, TierState};

const MIB: u64 = 1 << 20;

fn config(folder: &Path) -> NvmeConfig {
    NvmeConfig { region_bytes: MIB, ..NvmeConfig::new(folder, 17 * MIB) }
}

const FAULTY_BYTES: u64 = (64 << 10) + 12 * (256 << 10);

fn faulty_config() -> NvmeConfig {
    NvmeConfig { region_bytes: 256 << 10, queue_depth: 8, ..NvmeConfig::new("/faulty", FAULTY_BYTES) }
}

fn open_on(disk: &FaultyDisk) -> Result<Arc<NvmeTier>, NvmeError> {
    NvmeTier::open_on(&faulty_config(), NODE, Arc::new(disk.clone()))
}

fn fault(operation: Operation, errno: i32, times: u32) -> Fault {
    Fault { operation, range: 0..u64::MAX, errno, times }
}

// ---- the disk fails ----

#[tokio::test]
async fn eio_on_write_takes_the_tier_out_of_service_and_keeps_what_was_synced() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    let slice = store(&tier, 1, 5000).await;
    tier.sync().await.unwrap();
    disk.add_fault(fault(Operation::Write, libc::EIO, 1));
    let refused = try_store(&tier, 2, 5000).await.unwrap_err();
    assert!(matches!(&refused, NvmeError::OutOfService { reason } if reason.contains("Input/output")), "{refused}");
    assert!(matches!(tier.state(), TierState::Failed { .. }));
    assert_eq!(tier.stats().write_errors, 1);
    assert_eq!(try_store(&tier, 3, 1).await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(read(&tier, &slice).await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(tier.sync().await.is_err() && tier.close().await.is_err());
    assert_eq!(tier.usage().reserved_bytes, 0);
    drop(tier);
    let tier = open_on(&disk).unwrap();
    assert_eq!(scan_all(&tier).await.len(), 1);
    assert_readable(&tier, &slice).await;
}

#[tokio::test]
async fn disk_full_on_write_takes_the_tier_out_of_service() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    disk.add_fault(fault(Operation::Write, libc::ENOSPC, 1));
    assert!(try_store(&tier, 1, 5000).await.is_err());
    assert!(matches!(tier.state(), TierState::Failed { error } if error.contains("No space")));
}

#[tokio::test]
async fn failed_sync_is_never_retried() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    store(&tier, 1, 5000).await;
    disk.add_fault(fault(Operation::Sync, libc::EIO, 1));
    assert!(tier.sync().await.is_err());
    assert!(tier.sync().await.is_err(), "the next sync would succeed and prove nothing");
    assert!(matches!(tier.state(), TierState::Failed { .. }));
}

#[tokio::test]
async fn eio_on_read_is_an_error_of_that_record_and_many_in_a_row_fail_the_tier() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    let slices = store_many(&tier, 0..4, 5000).await;
    for _ in 0..20 {
        disk.add_fault(fault(Operation::Read, libc::EIO, 1));
        assert!(matches!(read(&tier, &slices[0]).await, Err(NvmeError::Io { .. })));
        assert_readable(&tier, &slices[1]).await;
    }
    assert_eq!((tier.state(), tier.stats().read_errors), (TierState::Serving, 20));
    disk.add_fault(fault(Operation::Read, libc::EIO, 100));
    for _ in 0..8 {
        assert!(read(&tier, &slices[2]).await.is_err());
    }
    assert!(matches!(tier.state(), TierState::Failed { .. }));
}

/// A region that can't be read costs its records, not the tier.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_region_does_not_stop_reclaim() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    let owner = Arc::new(Owner::default());
    spawn_reclaim(&tier, &owner);
    let region = (64 << 10) + (256 << 10)..(64 << 10) + 2 * (256 << 10);
    disk.add_fault(Fault { operation: Operation::Read, range: region, errno: libc::EIO, times: u32::MAX });
    for number in 0..200 {
        store_for(&owner, &tier, number, 60_000).await.unwrap();
    }
    assert_eq!(tier.state(), TierState::Serving);
    assert!(tier.stats().reclaimed_regions > 20);
}

#[tokio::test]
async fn region_whose_header_cannot_be_read_is_set_aside_and_a_broken_disk_is_refused() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    let slices = store_many(&tier, 0..30, 30_000).await;
    tier.close().await.unwrap();
    drop(tier);
    let header = (64 << 10)..(64 << 10) + 4096;
    let broken = |range| Fault { operation: Operation::Read, range, errno: libc::EIO, times: u32::MAX };
    disk.add_fault(broken(header));
    let tier = open_on(&disk).unwrap();
    let found = scan_all(&tier).await;
    assert!(!found.is_empty() && found.len() < slices.len());
    for slice in slices.iter().filter(|slice| found.contains_key(&slice.header.version.sequence)) {
        assert_readable(&tier, slice).await;
    }
    store(&tier, 99, 5000).await;
    drop(tier);
    disk.add_fault(broken((64 << 10)..u64::MAX));
    assert!(matches!(open_on(&disk).err(), Some(NvmeError::Io { .. })));
}

#[tokio::test]
async fn calls_after_the_end_are_answered() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    let slice = store(&tier, 1, 5000).await;
    tier.close().await.unwrap();
    assert!(tier.close().await.is_err());
    assert!(try_store(&tier, 2, 1).await.is_err() && tier.sync().await.is_err());
    assert_eq!(read(&tier, &slice).await.unwrap_err().kind(), ErrorKind::Unavailable);
    tier.release(slice.location);
}

#[tokio::test]
async fn abandoned_reads_and_writes_leave_nothing_behind() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    let slice = store(&tier, 1, 100_000).await;
    let used = tier.usage().used_bytes;
    disk.pause();
    let reading = tokio::spawn({
        let (tier, slice) = (Arc::clone(&tier), slice.clone());
        async move { read(&tier, &slice).await.map(drop) }
    });
    let writing = tokio::spawn({
        let tier = Arc::clone(&tier);
        async move { try_store(&tier, 2, 5000).await.map(drop) }
    });
    while tier.usage().reserved_bytes == 0 {
        tokio::task::yield_now().await;
    }
    reading.abort();
    writing.abort();
    assert!(reading.await.unwrap_err().is_cancelled() && writing.await.unwrap_err().is_cancelled());
    disk.resume();
    tier.sync().await.unwrap();
    assert_eq!((tier.usage().used_bytes, tier.usage().reserved_bytes), (used, 0));
    assert_readable(&tier, &slice).await;
}

/// B085: a key that exists has its value, also while writes fail and after.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_write_that_succeeded_is_readable_until_the_disk_fails_and_after_a_restart() {
    for seed in 1..=6 {
        let disk = FaultyDisk::new(FAULTY_BYTES as usize);
        let tier = open_on(&disk).unwrap();
        let owner = Arc::new(Owner { keep_every: 3, ..Owner::default() });
        spawn_reclaim(&tier, &owner);
        disk.add_fault(Fault {
            operation: Operation::Write,
            range: FAULTY_BYTES / 2..u64::MAX,
            errno: libc::EIO,
            times: u32::MAX,
        });
        let mut number = 0;
        while store_for(&owner, &tier, number, 1 + (number * seed * 7919 % 40_000) as usize).await.is_ok() {
            let slice = owner.places.lock().get(&number).cloned();
            if let Some(slice) = slice {
                assert_readable(&tier, &slice).await;
            }
            number += 1;
        }
        drop(tier);
        disk.clear_faults();
        let tier = open_on(&disk).unwrap();
        let found = scan_all(&tier).await;
        for slice in owner.slices() {
            assert!(found.contains_key(&slice.header.version.sequence));
            assert_readable(&tier, &slice).await;
        }
    }
}

// ---- bits flip ----

/// B082: flips one bit after another in everything that is on the disk, with the node down.
#[tokio::test]
async fn flipped_bit_anywhere_costs_at_most_its_own_record_and_never_gives_wrong_bytes() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    let mut slices = store_many(&tier, 0..60, 3000).await;
    slices.extend(store_many(&tier, 60..70, 70_000).await);
    let gone = store_many(&tier, 70..75, 3000).await;
    gone.iter().for_each(|slice| tier.release(slice.location));
    tier.close().await.unwrap();
    drop(tier);
    let image = disk.live_image();
    let mut random = Random::new(82);
    let used: Vec<usize> = (0..image.len()).filter(|&at| image[at] != 0).collect();
    let mut places: Vec<usize> = (0..200).map(|_| used[random.below(used.len() as u64) as usize]).collect();
    // Superblocks, region headers, and trailers for sure.
    places.extend((0..40).chain(4096..4136));
    for region in 0..4_usize {
        let start = (64 << 10) + region * (256 << 10);
        places.extend([start, start + 16, start + 24, start + 33, start + 2048]);
        places.extend((1..200).step_by(13).map(|back| start + (256 << 10) - back));
    }
    for place in places {
        let mut flipped = image.clone();
        flipped[place] ^= 1 << (place % 8);
        let tier = open_on(&FaultyDisk::from_image(flipped)).unwrap();
        let found = scan_all(&tier).await;
        let mut missing = 0;
        for slice in &slices {
            let announced = found.contains_key(&slice.header.version.sequence);
            match read(&tier, slice).await {
                Ok(bytes) => assert_eq!(bytes, bytes_of(slice.header.version.sequence, bytes.len()), "flip at {place}"),
                Err(NvmeError::Corrupt { .. }) => missing += 1,
                Err(error) => panic!("flip at {place}: {error}"),
            }
            missing += usize::from(!announced && read(&tier, slice).await.is_ok());
        }
        assert!(missing <= 1, "flip at {place} cost {missing} records");
        assert!(gone.iter().all(|slice| !found.contains_key(&slice.header.version.sequence)), "flip at {place}");
    }
}

#[tokio::test]
async fn bit_flipped_under_a_running_tier_is_found_by_reads_and_by_the_scrub() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    // More than a region, so that the first one is sealed.
    let slices = store_many(&tier, 0..40, 10_000).await;
    tier.sync().await.unwrap();
    let image = disk.live_image();
    let victim = &slices[3];
    let bytes = bytes_of(victim.header.version.sequence, 10_000);
    let at = image.windows(64).position(|window| window == &bytes[5000..5064]).unwrap();
    disk.flip_bit(at, 2);
    assert!(matches!(read(&tier, victim).await, Err(NvmeError::Corrupt { .. })));
    assert_eq!(tier.stats().corrupt_records, 1);
    tier.close().await.unwrap();
    drop(tier);
    let tier = open_on(&disk).unwrap();
    let mut damaged = Vec::new();
    loop {
        let report = tier.scrub_step().await.unwrap();
        damaged.extend(report.damaged);
        if report.round_is_complete {
            break;
        }
    }
    assert_eq!(damaged.len(), 1);
    assert_eq!(damaged[0].0, victim.header);
    for slice in slices.iter().filter(|slice| slice.header != victim.header) {
        assert_readable(&tier, slice).await;
    }
}

// ---- the folder ----

#[tokio::test]
async fn foreign_data_file_is_refused_and_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("regions.dat");
    for content in [b"not ours".repeat(20_000), Vec::new(), vec![0; 1 << 20]] {
        fs::write(&path, &content).unwrap();
        let error = NvmeTier::open(config(folder.path()), NODE).err().unwrap();
        assert!(matches!(&error, NvmeError::NotOurs { .. }), "{error}");
        assert!(error.to_string().contains("regions.dat"));
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

#[tokio::test]
async fn foreign_files_beside_ours_are_left_alone_and_a_missing_data_file_is_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("notes.txt"), "mine").unwrap();
    let tier = NvmeTier::open(config(folder.path()), NODE).unwrap();
    store(&tier, 1, 5000).await;
    tier.close().await.unwrap();
    drop(tier);
    fs::remove_file(folder.path().join("regions.dat")).unwrap();
    let tier = NvmeTier::open(config(folder.path()), NODE).unwrap();
    assert_eq!(scan_all(&tier).await.len(), 0);
    let slice = store(&tier, 1, 5000).await;
    assert_readable(&tier, &slice).await;
    assert_eq!(fs::read_to_string(folder.path().join("notes.txt")).unwrap(), "mine");
}

#[tokio::test]
async fn folder_of_another_node_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    drop(NvmeTier::open(config(folder.path()), NODE).unwrap());
    let error = NvmeTier::open(config(folder.path()), NodeId(5)).err().unwrap();
    assert!(matches!(error, NvmeError::OtherNode { owner: NODE, node: NodeId(5), .. }), "{error}");
}

/// B073: what a crash left half-made is reclaimed, and disk use is what is reported.
#[tokio::test]
async fn unfinished_data_files_do_not_leak_disk_space() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        fs::write(folder.path().join("regions.new"), vec![1; 1 << 20]).unwrap();
        let tier = NvmeTier::open(config(folder.path()), NODE).unwrap();
        let on_disk: u64 =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum();
        let reported = tier.usage().capacity_bytes + (64 << 10);
        assert!(on_disk.abs_diff(reported) <= 64 << 10, "{on_disk} on disk, {reported} reported");
        assert!(!folder.path().join("regions.new").exists());
    }
}

/// B088: the data file, then the folder, go away under a running tier.
#[tokio::test]
async fn file_removed_under_a_running_node_fails_the_tier_and_attaching_again_works() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nvme");
    for remove_folder in [false, true] {
        let tier = NvmeTier::open(config(&path), NODE).unwrap();
        let slice = store(&tier, 1, 200_000).await;
        if remove_folder {
            fs::remove_dir_all(&path).unwrap();
        } else {
            fs::remove_file(path.join("regions.dat")).unwrap();
        }
        // The bytes are still ours until the descriptor goes.
        assert_readable(&tier, &slice).await;
        let mut number = 2;
        while try_store(&tier, number, 200_000).await.is_ok() {
            number += 1;
            assert!(number < 20, "noticed at the next region at the latest");
        }
        assert!(matches!(tier.state(), TierState::Failed { error } if error.contains("regions.dat")));
        drop(tier);
        let tier = NvmeTier::open(config(&path), NODE).unwrap();
        assert_eq!(scan_all(&tier).await.len(), 0);
        store(&tier, 1, 1000).await;
    }
}

/// The very first write finds the file gone, and nothing else is going on that could wake anyone.
#[tokio::test]
async fn file_removed_before_the_first_write_is_answered_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(config(folder.path()), NODE).unwrap();
    fs::remove_file(folder.path().join("regions.dat")).unwrap();
    let error = try_store(&tier, 1, 5000).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(matches!(tier.state(), TierState::Failed { .. }));
}

// ---- capacity ----

/// B090: a larger capacity keeps everything; a smaller one gives up what lies beyond it.
#[tokio::test]
async fn larger_capacity_after_a_restart_keeps_all_and_smaller_capacity_gives_no_wrong_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(config(folder.path()), NODE).unwrap();
    let slices = store_many(&tier, 0..60, 200_000).await;
    tier.close().await.unwrap();
    drop(tier);
    let larger = NvmeConfig { capacity_bytes: 40 * MIB, ..config(folder.path()) };
    let tier = NvmeTier::open(larger, NODE).unwrap();
    assert_eq!(tier.usage().regions, 39);
    assert_eq!(scan_all(&tier).await.len(), 60);
    for slice in &slices {
        assert_readable(&tier, slice).await;
    }
    let more = store_many(&tier, 60..90, 200_000).await;
    tier.close().await.unwrap();
    drop(tier);
    let smaller = NvmeConfig { capacity_bytes: 9 * MIB, ..config(folder.path()) };
    let tier = NvmeTier::open(smaller, NODE).unwrap();
    assert_eq!(tier.usage().regions, 8);
    assert!(fs::metadata(folder.path().join("regions.dat")).unwrap().len() <= 9 * MIB);
    let found = scan_all(&tier).await;
    assert!(found.len() < 90);
    let mut readable = 0;
    for slice in slices.iter().chain(&more) {
        match read(&tier, slice).await {
            Ok(bytes) => {
                assert_eq!(bytes, bytes_of(slice.header.version.sequence, bytes.len()));
                readable += 1;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
        }
    }
    assert_eq!(readable, found.len());
}

/// B075 and B078: ten times the capacity goes through; disk use never exceeds the cap, over a restart too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn capacity_is_a_hard_cap_on_disk_use() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("regions.dat");
    let owner = Arc::new(Owner { keep_every: 7, ..Owner::default() });
    for restart in 0..2 {
        let tier = NvmeTier::open(config(folder.path()), NODE).unwrap();
        let found = scan_all(&tier).await;
        let known: u64 = owner.slices().iter().map(|slice| u64::from(slice.location.record_bytes())).sum();
        // Dropped but not yet reclaimed records may still be announced.
        assert!(tier.usage().used_bytes >= known && (restart == 0) == found.is_empty());
        for (header, location) in found.into_values() {
            owner.insert(&Stored { header, location });
        }
        spawn_reclaim(&tier, &owner);
        for round in 0..40 {
            let first = 10_000 * restart + round * 50 + 1;
            store_many_for(&owner, &tier, first..first + 50, 50_000).await;
            let metadata = fs::metadata(&data).unwrap();
            assert!(metadata.blocks() * 512 <= 17 * MIB + 4096 && metadata.len() <= 17 * MIB);
            let usage = tier.usage();
            assert_eq!(usage.used_bytes + usage.free_bytes + usage.reserved_bytes, usage.capacity_bytes);
        }
        assert!(tier.stats().reclaimed_regions > 40 && tier.stats().moved_slices > 0);
        assert_all_readable(&tier, &owner).await;
        drop(tier);
    }
}

#[tokio::test]
async fn full_tier_with_no_one_to_reclaim_refuses_in_bounded_time() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    let mut number = 0;
    let error = loop {
        match try_store(&tier, number, 100_000).await {
            Ok(_) => number += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, NvmeError::Full), "{error}");
    assert_eq!((error.kind(), tier.state()), (ErrorKind::Exhausted, TierState::Serving));
    assert!(number >= 18, "{number} slices of 100,000 bytes in 10 regions of 256 KiB");
}

/// Needs root, to mount a small file system.
#[tokio::test]
async fn capacity_above_the_disk_is_reduced_and_a_disk_too_small_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mount = |size: &str| {
        let arguments = ["-t", "tmpfs", "-o", size, "tidepool-test"];
        std::process::Command::new("mount")
            .args(arguments)
            .arg(folder.path())
            .status()
            .is_ok_and(|status| status.success())
    };
    let unmount = || std::process::Command::new("umount").arg("-l").arg(folder.path()).status().unwrap();
    if !mount("size=12m") {
        eprintln!("skipped: needs root");
        return;
    }
    let warnings = Warnings::default();
    let opened = tracing::subscriber::with_default(warnings.clone(), || NvmeTier::open(config(folder.path()), NODE));
    let regions = opened.as_ref().map(|tier| tier.usage().regions).map_err(ToString::to_string);
    let reduced = warnings.0.lock().iter().filter(|text| text.contains("reduced")).count();
    drop(opened);
    unmount();
    assert!((8..12).contains(&regions.unwrap()));
    assert_eq!(reduced, 1);
    assert!(mount("size=4m"));
    let error = NvmeTier::open(config(folder.path()), NODE).err();
    unmount();
    assert!(matches!(error, Some(NvmeError::DiskFull { .. })), "{error:?}");
}

// ---- sizes and keys ----

/// B009: unaligned values back to back; neighbours and canaries are untouched.
#[tokio::test]
async fn unaligned_values_are_exact_and_their_neighbours_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let tier =
        NvmeTier::open(NvmeConfig { region_bytes: 4 * MIB, ..NvmeConfig::new(folder.path(), 40 * MIB) }, NODE).unwrap();
    let lengths = [1, 511, 512, 513, 4095, 4096, 4097, (1 << 20) + 1];
    let mut slices = Vec::new();
    for (number, length) in (0..).zip(lengths) {
        slices.push(store(&tier, number, length).await);
    }
    let middle = slices.len() / 2;
    tier.release(slices[middle].location);
    slices[middle] = store(&tier, 99, 4095).await;
    for slice in &slices {
        let length = slice.header.slice_length as usize;
        let (_, target) =
            tier.read(slice.location, slice.name(), 0..length as u32, Canaries::new(length)).await.unwrap();
        assert_eq!(target.verified(), bytes_of(slice.header.version.sequence, length));
    }
}

/// An exact-size target between canaries.
struct Canaries {
    memory: Vec<u8>,
    length: usize,
    filled: usize,
}

const CANARY: usize = 4096;

impl Canaries {
    fn new(length: usize) -> Self {
        Self { memory: vec![0xaa; length + 2 * CANARY], length, filled: 0 }
    }

    fn verified(self) -> Vec<u8> {
        let end = CANARY + self.length;
        assert_eq!(self.filled, self.length);
        assert!(self.memory[..CANARY].iter().chain(&self.memory[end..]).all(|&byte| byte == 0xaa), "canary died");
        self.memory[CANARY..end].to_vec()
    }
}

impl tidepool_tiers::io::Landing for Canaries {
    fn spare(&mut self) -> &mut [u8] {
        &mut self.memory[CANARY + self.filled..CANARY + self.length]
    }

    fn advance(&mut self, count: usize) {
        self.filled += count;
    }
}

/// B011: keys of every length up to the longest.
#[tokio::test]
async fn keys_of_every_length_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(config(folder.path()), NODE).unwrap();
    let mut stored = Vec::new();
    for (number, length) in (0..).zip([1, 254, 255, 256, 1023, 1024]) {
        for payload in [0, 100, 70_000] {
            let number = number * 100_000 + payload as u64;
            let mut header = header(number, payload);
            header.key = tidepool_metadata::ObjectKey::new(&vec![number as u8; length]).unwrap();
            let location = tier.write(header.clone(), Arc::new(bytes_of(number, payload))).await.unwrap().keep();
            stored.push(Stored { header, location });
        }
    }
    tier.close().await.unwrap();
    drop(tier);
    let tier = NvmeTier::open(config(folder.path()), NODE).unwrap();
    let found = scan_all(&tier).await;
    for slice in &stored {
        assert_eq!(found[&slice.header.version.sequence].0, slice.header);
        assert_readable(&tier, slice).await;
    }
}

/// A slice asked for by another name is not given, wherever it lies.
#[tokio::test]
async fn location_of_another_record_is_stale() {
    let disk = FaultyDisk::new(FAULTY_BYTES as usize);
    let tier = open_on(&disk).unwrap();
    let slices = store_many(&tier, 0..2, 5000).await;
    let swapped = Stored { header: slices[0].header.clone(), location: slices[1].location };
    assert!(matches!(read(&tier, &swapped).await, Err(NvmeError::Stale { .. })));
    assert_eq!(tier.stats().stale_reads, 1);
}
