//! A disk that is slow, fails, goes away or comes back, under a store that goes on.
#![expect(clippy::unwrap_used, reason = "tests")]

mod test_node;

use std::sync::atomic::Ordering;

use test_node::{Answers, TestNode, payload};
use tidepool_metadata::{ErrorKind, TierKind};
use tidepool_tiers::io::Operation;
use tidepool_tiers::io::faulty::{Fault, FaultyDisk};
use tidepool_tiers::nvme::WritePolicy;
use tidepool_tiers::store::ReplicaName;
use tidepool_tiers::{StoreConfig, StoreError};

const MIB: u64 = 1 << 20;
const HALF: usize = MIB as usize / 2;
const DISK: u64 = 64 * MIB;

async fn on_disk(disk: &FaultyDisk) -> TestNode {
    TestNode::on(disk, StoreConfig { promote_after_reads: 1, ..TestNode::config() }, 16 * MIB, DISK).await
}

fn free(node: &TestNode, name: &ReplicaName) {
    assert!(node.store.free(name.tenant, &name.key, name.replica));
}

/// A key that was being written, and was put anew or removed meanwhile, made the whole batch of writes fail: index and
/// disk disagreed from then on.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_removed_or_replaced_while_it_is_written_to_disk_costs_no_other_object() {
    let disk = FaultyDisk::new(DISK as usize);
    let node = on_disk(&disk).await;
    let mut names = node.put_many(28, HALF).await;
    disk.pause();
    // The high watermark is passed: the coldest are written.
    names.push(node.put(HALF).await);
    node.until(|node| node.tiers_of(TierKind::Nvme).reserved > HALF as u64).await;
    let removed = names.remove(1);
    free(&node, &removed);
    let replaced = names.remove(0);
    free(&node, &replaced);
    names.push(node.put_again(&replaced, HALF).await);
    disk.resume();
    node.until(|node| node.tiers_of(TierKind::Nvme).reserved == 0 && node.tiers_of(TierKind::Nvme).objects > 0).await;
    for gone in [&removed, &replaced] {
        assert!(node.try_read(gone).await.unwrap().is_none());
    }
    for name in &names {
        node.assert_right(name, HALF).await;
    }
    node.assert_accounts();
    // No record on disk is nobody's.
    names.iter().for_each(|name| free(&node, name));
    node.until(|node| node.tiers_of(TierKind::Nvme).used == 0 && node.dram().used == 0).await;
    node.assert_empty();
}

/// Demotion failed without an error, and keys that existed had empty values.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fails_under_demotion_costs_nothing_that_dram_has() {
    let disk = FaultyDisk::new(DISK as usize);
    let node = on_disk(&disk).await;
    let names = node.put_many(40, HALF).await;
    node.until(|node| node.tiers_of(TierKind::Nvme).objects > 5).await;
    disk.add_fault(Fault { operation: Operation::Write, range: 0..u64::MAX, errno: libc::EIO, times: u32::MAX });
    let late = node.put_many(60, HALF).await;
    let report = node.tiers_of(TierKind::Nvme);
    assert_eq!(report.state, "failed");
    assert!(report.last_error.unwrap().contains("Input/output"));
    node.until(|node| node.dram().failed_demotions > 0 && node.dram().evictions > 0).await;
    let mut in_dram = 0;
    for name in names.iter().chain(&late) {
        match node.try_read(name).await {
            Ok(Some((bytes, TierKind::Dram))) => {
                assert!(bytes == payload(name.version.sequence, HALF));
                in_dram += 1;
            }
            // With the catalog's word.
            Ok(None) => {}
            Err(StoreError::TierUnavailable { tier: TierKind::Nvme }) => {}
            other => panic!("{}: {:?}", name.key, other.map(|found| found.map(|(_, tier)| tier))),
        }
    }
    assert!(in_dram > 20, "{in_dram}");
    node.assert_accounts();
}

/// What was promoted lies on both tiers: a full DRAM let go of its copy because there was one on a disk that could not be
/// read any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_on_a_failed_disk_does_not_stand_for_the_one_in_dram() {
    let disk = FaultyDisk::new(DISK as usize);
    let node = on_disk(&disk).await;
    let names = node.put_many(8, HALF).await;
    node.demote_all().await;
    for name in &names {
        node.assert_right(name, HALF).await;
    }
    assert_eq!((node.dram().objects, node.tiers_of(TierKind::Nvme).objects), (8, 8));
    disk.add_fault(Fault { operation: Operation::Write, range: 0..u64::MAX, errno: libc::EIO, times: u32::MAX });
    let durable = node.put(HALF).await;
    assert!(node.store.write_through(&durable, true).await.is_err());
    assert_eq!(node.tiers_of(TierKind::Nvme).state, "failed");
    node.put_many(60, HALF).await;
    for name in &names {
        // Here, or forgotten with the catalog's word: never kept from being put again by a copy that can't be read.
        if let Some((bytes, tier)) = node.try_read(name).await.unwrap() {
            assert!(tier == TierKind::Dram && bytes == payload(name.version.sequence, HALF));
        }
    }
}

/// The places of the old disk named records of the new one, which were then given up for damaged, or released.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_disk_in_place_of_another_has_nothing_of_it_and_the_catalog_is_told() {
    let (old, new) = (FaultyDisk::new(DISK as usize), FaultyDisk::new(DISK as usize));
    let node = on_disk(&old).await;
    let lost = node.put_many(10, HALF).await;
    node.demote_all().await;
    let kept = node.put_many(4, HALF).await;
    node.store.detach_nvme().await.unwrap();
    // It does not hear at first.
    node.forget.answer(Answers::Silence);
    assert_eq!(node.attach_on(Some(&new)).await, 0);
    for name in &lost {
        assert!(node.try_read(name).await.unwrap().is_none(), "{}", name.key);
    }
    node.forget.answer(Answers::Allow);
    node.until(|node| node.forget.lost.load(Ordering::SeqCst) == 10).await;
    // The same places are taken again.
    let later = node.put_many(10, HALF).await;
    node.demote_all().await;
    for name in kept.iter().chain(&later) {
        node.assert_right(name, HALF).await;
    }
    kept.iter().chain(&later).for_each(|name| free(&node, name));
    node.until(|node| node.tiers_of(TierKind::Nvme).used == 0).await;
    node.assert_accounts();
}

/// A read that lasted longer than its disk was attached found what was written there since, and gave the copy up for damaged.
#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_outlives_its_disk_goes_on_with_the_next_one_and_gives_nothing_up() {
    let reading = StoreConfig { promote_after_reads: 0, ..TestNode::config() };
    for is_attached_anew in [false, true] {
        let disk = FaultyDisk::new(DISK as usize);
        let node = TestNode::on(&disk, reading.clone(), 16 * MIB, DISK).await;
        let name = node.put_many(1, HALF).await.remove(0);
        node.demote_all().await;
        let open = node.store.open(name.tenant, &name.key, name.version).await;
        let mut reader = open.unwrap().unwrap();
        assert_eq!(reader.tier(), TierKind::Nvme);
        disk.pause_reads();
        let read = tokio::spawn(async move { reader.read_to_end().await });
        node.until(|_| disk.waiting() > 0).await;
        node.store.detach_nvme().await.unwrap();
        // Its files are the next one's, which writes where this one reads.
        let next = FaultyDisk::from_image(disk.live_image());
        let bytes = payload(name.version.sequence, HALF);
        let at = disk.live_image().windows(64).position(|window| window == &bytes[..64]).unwrap();
        disk.flip_bit(at, 1);
        if is_attached_anew {
            node.attach_on(Some(&next)).await;
            disk.resume();
            assert!(read.await.unwrap().unwrap() == bytes);
        } else {
            disk.resume();
            assert_eq!(read.await.unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
            node.attach_on(Some(&next)).await;
        }
        assert_eq!(node.assert_right(&name, HALF).await, TierKind::Nvme);
        assert_eq!(node.tiers_of(TierKind::Nvme).corruptions, 0);
    }
}

/// An attach whose disk was replaced while it was scanned forgot what the next disk's scan had yet to find.
#[tokio::test(flavor = "multi_thread")]
async fn a_scan_that_outlives_its_disk_neither_adopts_nor_forgets() {
    let disk = FaultyDisk::new(DISK as usize);
    let node = on_disk(&disk).await;
    let names = node.put_many(10, HALF).await;
    node.demote_all().await;
    node.store.detach_nvme().await.unwrap();
    let [first, second] = [(); 2].map(|()| FaultyDisk::from_image(disk.live_image()));
    let (first_tier, second_tier) = (node.open_tier(&first).await, node.open_tier(&second).await);
    first.pause_reads();
    second.pause_reads();
    let attach = |tier| {
        let store = node.store.clone();
        tokio::spawn(async move { store.attach_nvme(tier, WritePolicy::OnEvict).await.unwrap() })
    };
    let first_scan = attach(first_tier);
    node.until(|_| first.waiting() > 0).await;
    node.store.detach_nvme().await.unwrap();
    let second_scan = attach(second_tier);
    node.until(|_| second.waiting() > 0).await;
    first.resume();
    assert_eq!(first_scan.await.unwrap(), 0);
    assert_eq!(node.store.len(), names.len());
    second.resume();
    assert_eq!(second_scan.await.unwrap(), 2 * names.len() as u64, "slices");
    for name in &names {
        node.assert_right(name, HALF).await;
    }
    assert_eq!(node.forget.lost.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_removed_while_its_disk_is_away_does_not_come_back_with_it() {
    let disk = FaultyDisk::new(DISK as usize);
    let node = on_disk(&disk).await;
    let names = node.put_many(10, HALF).await;
    node.demote_all().await;
    node.store.detach_nvme().await.unwrap();
    let (removed, kept) = names.split_at(4);
    removed.iter().for_each(|name| free(&node, name));
    assert_eq!(node.attach().await, 6 * 2, "slices of what is still wanted");
    for name in removed {
        assert!(node.try_read(name).await.unwrap().is_none(), "{} is back", name.key);
    }
    for name in kept {
        node.assert_right(name, HALF).await;
        free(&node, name);
    }
    node.until(|node| node.tiers_of(TierKind::Nvme).used == 0).await;
    node.assert_accounts();
}

/// The scrub finds a damaged record in every round until its region is written anew: released each time, it made the
/// region look empty, and whatever else lay in it went with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_is_released_once_however_often_the_scrub_finds_it() {
    let disk = FaultyDisk::new(DISK as usize);
    let scrubbing = StoreConfig { scrub_bytes_per_second: 1 << 30, promote_after_reads: 0, ..TestNode::config() };
    let node = TestNode::on(&disk, scrubbing, 16 * MIB, DISK).await;
    let names = node.put_many(12, 100_000).await;
    // More than a region, so that the first one is sealed.
    let more = node.put_many(12, HALF).await;
    node.demote_all().await;
    let used = node.tiers_of(TierKind::Nvme).used;
    let bytes = payload(names[3].version.sequence, 100_000);
    let at = disk.live_image().windows(64).position(|window| window == &bytes[50_000..50_064]).unwrap();
    disk.flip_bit(at, 2);
    node.until(|node| node.tiers_of(TierKind::Nvme).corruptions > 0).await;
    let scrubbed = node.tiers_of(TierKind::Nvme).scrubbed_bytes;
    // Every region is looked at some times more.
    node.until(|node| node.tiers_of(TierKind::Nvme).scrubbed_bytes > scrubbed + 8 * used).await;
    let report = node.tiers_of(TierKind::Nvme);
    assert_eq!(report.corruptions, 1);
    assert!(report.used + 100_000 <= used && report.used + 110_000 > used, "{} of {used} are used", report.used);
    assert!(node.try_read(&names[3]).await.unwrap().is_none());
    for (place, name) in names.iter().enumerate().filter(|(place, _)| *place != 3) {
        assert_eq!(node.assert_right(name, 100_000).await, TierKind::Nvme, "{place}");
    }
    for name in &more {
        node.assert_right(name, HALF).await;
    }
}

/// The catalog counts it as durable: it went on counting what had been on the old disk and was in memory only, and when the new one
/// failed as well that was forgotten as any cold copy.
#[tokio::test(flavor = "multi_thread")]
async fn what_puts_asked_to_have_on_disk_is_on_the_next_one_once_that_is_attached() {
    let (old, new) = (FaultyDisk::new(DISK as usize), FaultyDisk::new(DISK as usize));
    let node = TestNode::on(&old, StoreConfig { promote_after_reads: 0, ..TestNode::config() }, 16 * MIB, DISK).await;
    let (durable, plain) = (node.seal_only(HALF).await, node.put(HALF).await);
    node.store.write_through(&durable, true).await.unwrap();
    assert!(node.store.complete(&durable, 1));
    node.store.detach_nvme().await.unwrap();
    assert_eq!(node.attach_on(Some(&new)).await, 0, "nothing is found there");
    let is_on = |image: &[u8], name: &ReplicaName| {
        let bytes = payload(name.version.sequence, HALF);
        image.windows(64).any(|window| window == &bytes[..64])
    };
    // Whatever a loss of power leaves of what was not synced.
    assert!((0..8).all(|seed| is_on(&new.crash_image(seed), &durable)));
    assert!(!is_on(&new.live_image(), &plain));
    assert_eq!((node.dram().objects, node.tiers_of(TierKind::Nvme).objects), (2, 1));
    // In the order of eviction again: it leaves DRAM, with the word of nobody, and is written no second time.
    let used = node.tiers_of(TierKind::Nvme).used;
    node.demote_all().await;
    assert_eq!(node.assert_right(&durable, HALF).await, TierKind::Nvme);
    assert!(node.tiers_of(TierKind::Nvme).used < used + 2 * HALF as u64);
    [durable, plain].iter().for_each(|name| free(&node, name));
    node.until(|node| node.tiers_of(TierKind::Nvme).used == 0).await;
    node.assert_accounts();
}
