//! The tiers of one node as one store: rooms that fill, disks that come and go, processes that die.
#![expect(clippy::unwrap_used, reason = "tests")]

mod test_node;

use std::os::unix::fs::FileExt as _;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use test_node::{Answers, TestNode, key, payload};
use tidepool_metadata::{DataType, TierKind, VersionId};
use tidepool_tiers::store::{ByteRange, ReplicaName};
use tidepool_tiers::{StoreConfig, StoreError};

const MIB: u64 = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn sizes_around_every_limit_come_back_exactly() {
    let node = TestNode::new(64 * MIB, Some(64 * MIB)).await;
    let slice = 256 << 10;
    let mut names = Vec::new();
    for length in
        [0, 1, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537, slice - 1, slice, slice + 1, 3 * slice + 1]
    {
        names.push((node.put(length).await, length));
    }
    for (name, length) in &names {
        node.assert_right(name, *length).await;
    }
    node.demote_all().await;
    for (name, length) in &names {
        node.assert_right(name, *length).await;
    }
    for (name, _) in &names {
        assert!(node.store.free(name.tenant, &name.key, name.replica));
    }
    node.assert_empty();
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_are_exact_on_both_tiers() {
    let node = TestNode::new(64 * MIB, Some(64 * MIB)).await;
    let length = 700_000;
    let name = node.put(length).await;
    let expected = payload(name.version.sequence, length);
    for round in 0..2 {
        for (offset, count) in
            [(0, 0), (0, 1), (65535, 2), (65536, 65536), (100, 600_000), (262_143, 2), (699_999, 1), (700_000, 0)]
        {
            let mut reader = node.store.open(name.tenant, &name.key, name.version).await.unwrap().unwrap();
            reader.select(ByteRange { offset, length: count }).unwrap();
            let found = reader.read_to_end().await.unwrap();
            assert!(
                found[..] == expected[offset as usize..(offset + count) as usize],
                "round {round}: {offset}+{count}"
            );
        }
        let mut reader = node.store.open(name.tenant, &name.key, name.version).await.unwrap().unwrap();
        assert!(matches!(reader.select(ByteRange { offset: 699_999, length: 2 }), Err(StoreError::BadRange { .. })));
        assert!(matches!(reader.select(ByteRange { offset: u64::MAX, length: 2 }), Err(StoreError::BadRange { .. })));
        // A reader is a hold.
        drop(reader);
        node.demote_all().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_can_never_fit_is_refused_at_once_and_evicts_nothing() {
    let node = TestNode::new(16 * MIB, None).await;
    let names = node.put_many(8, MIB as usize).await;
    let refused = node.store.reserve(17 * MIB, 10).await;
    assert!(matches!(refused.err(), Some(StoreError::TooLarge { largest, .. }) if largest <= 16 * MIB));
    for name in &names {
        node.assert_right(name, MIB as usize).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_dies_leaves_nothing_reserved() {
    let node = TestNode::new(16 * MIB, None).await;
    let mut buffer = node.store.reserve(4 * MIB, 10).await.unwrap();
    buffer.write(&[7; 100_000]).unwrap();
    assert!(node.dram().reserved >= 4 * MIB);
    drop(buffer);
    node.assert_empty();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_of_an_object_is_there_can_be_read_before_it_is_sealed() {
    let node = TestNode::new(64 * MIB, None).await;
    let bytes: Vec<u8> = (0..9 * MIB + 77).map(|at| (at * 7 + at / 251) as u8).collect();
    let mut buffer = node.store.reserve(bytes.len() as u64, 10).await.unwrap();
    assert_eq!(buffer.copy_from(0, 100), [0; 0]);
    let mut read = Vec::new();
    for (piece, most) in bytes.chunks(3_333_333).zip([1, 1 << 20, usize::MAX].into_iter().cycle()) {
        buffer.write(piece).unwrap();
        loop {
            let more = buffer.copy_from(read.len() as u64, most);
            assert!(more.len() <= most);
            if more.is_empty() || read.len() > 100 && most == 1 {
                break;
            }
            read.extend(more);
        }
    }
    assert!(read == bytes);
}

/// As where what came first was not whole, and is asked for anew.
#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_begin_anew_leave_nothing_of_the_first_ones() {
    let node = TestNode::new(64 * MIB, None).await;
    let length = 9 * MIB as usize + 77;
    let value: Vec<u8> = (0..length).map(|at| (at * 7 % 251) as u8).collect();
    for come in [1, 64 << 10, (64 << 10) + 1, 5 * MIB as usize, length] {
        let mut buffer = node.store.reserve(length as u64, 10).await.unwrap();
        buffer.write_at(0, &vec![9; come]).unwrap();
        let elsewhere = buffer.write_at(come as u64 - 1 + u64::from(come == 1) * 2, b"x").unwrap_err();
        assert!(matches!(elsewhere, StoreError::LengthMismatch { .. }));
        for (number, step) in value.chunks(64 << 10).enumerate() {
            buffer.write_at(number as u64 * (64 << 10), step).unwrap();
        }
        let sealed = buffer.seal(node.identity(come as u64), Some(crc32fast::hash(&value))).unwrap();
        let name = &sealed.name;
        assert!(node.store.free(name.tenant, &name.key, name.replica));
    }
    node.assert_empty();
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_shorter_or_longer_than_announced_store_nothing() {
    let node = TestNode::new(16 * MIB, None).await;
    let mut buffer = node.store.reserve(1000, 10).await.unwrap();
    buffer.write(&[1; 600]).unwrap();
    assert!(matches!(buffer.write(&[1; 401]), Err(StoreError::LengthMismatch { announced: 1000, received: 1001 })));
    let sealed = buffer.seal(node.identity(1), None);
    assert!(matches!(sealed.err(), Some(StoreError::LengthMismatch { announced: 1000, received: 600 })));
    let mut buffer = node.store.reserve(3, 10).await.unwrap();
    buffer.write(b"abc").unwrap();
    let sealed = buffer.seal(node.identity(2), Some(crc32fast::hash(b"abd")));
    assert!(matches!(sealed.err(), Some(StoreError::ChecksumMismatch { .. })));
    node.assert_empty();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_dram_tier_demotes_the_coldest_and_every_object_stays_readable() {
    let node = TestNode::new(16 * MIB, Some(128 * MIB)).await;
    let names = node.put_many(64, MIB as usize / 2).await;
    let mut tiers = Vec::new();
    for name in &names {
        tiers.push(node.assert_right(name, MIB as usize / 2).await);
    }
    assert!(tiers.iter().filter(|tier| **tier == TierKind::Nvme).count() > 20, "{tiers:?}");
    node.assert_accounts();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_nvme_the_coldest_are_forgotten_with_the_catalogs_word() {
    let node = TestNode::new(16 * MIB, None).await;
    let names = node.put_many(64, MIB as usize / 2).await;
    let asked = node.forget.asked.load(Ordering::SeqCst);
    assert!(asked > 20, "{asked}");
    assert!(node.try_read(&names[0]).await.unwrap().is_none(), "the oldest went first");
    node.assert_right(names.last().unwrap(), MIB as usize / 2).await;
    node.assert_accounts();
}

/// The warmest of all, but other nodes have as many copies as there are to be.
#[tokio::test(flavor = "multi_thread")]
async fn further_copies_leave_before_any_other_and_are_forgotten_not_demoted() {
    let node = TestNode::new(16 * MIB, Some(128 * MIB)).await;
    let names = node.put_many(16, MIB as usize / 2).await;
    let further = node.put_many(8, MIB as usize / 2).await;
    assert!(further.iter().all(|name| node.store.leaves_first(name)));
    let gone = node.put(MIB as usize / 2).await;
    assert!(node.store.leaves_first(&gone) && node.store.free(gone.tenant, &gone.key, gone.replica));
    assert!(!node.store.leaves_first(&gone), "it is not here");
    node.put_many(6, MIB as usize / 2).await;
    node.until(|node| node.dram().evictions >= 3).await;
    assert_eq!((node.dram().demotions, node.dram().evictions), (0, node.forget.asked_further.load(Ordering::SeqCst)));
    for name in &names {
        assert_eq!(node.assert_right(name, MIB as usize / 2).await, TierKind::Dram);
    }
    node.assert_accounts();
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_of_types_that_are_for_memory_only_are_forgotten_and_not_demoted() {
    let node = TestNode::new(16 * MIB, Some(128 * MIB)).await;
    node.store.set_memory_only(&[DataType::Weight]);
    node.put_many(40, MIB as usize / 2).await;
    assert!(node.dram().demotions > 0);
    assert_eq!(node.forget.asked.load(Ordering::SeqCst), 0);
    node.store.set_memory_only(&[DataType::Weight, DataType::KvCache]);
    let before = node.dram().demotions;
    node.put_many(40, MIB as usize / 2).await;
    assert!(node.forget.asked.load(Ordering::SeqCst) > 10);
    // Some were on their way already.
    assert!(node.dram().demotions <= before + 16, "{} after {before}", node.dram().demotions);
    node.assert_accounts();
}

/// Eviction made work that made more eviction, until everything was gone.
#[tokio::test(flavor = "multi_thread")]
async fn eviction_takes_no_more_than_the_puts_need() {
    for nvme in [None, Some(128 * MIB)] {
        let node = TestNode::new(16 * MIB, nvme).await;
        node.put_many(200, MIB as usize / 2).await;
        let dram = node.dram();
        let (left, put) = (dram.evictions + dram.demotions, 200);
        // Two thirds of what fits below the low watermark is there at every moment.
        assert!(left <= put - 16, "{left} of {put} left DRAM");
        assert!(dram.objects >= 16, "{} objects", dram.objects);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_nothing_may_be_forgotten_a_put_is_refused_in_bounded_time() {
    let node = TestNode::new(16 * MIB, None).await;
    node.forget.answer(Answers::Refuse);
    let mut stored = Vec::new();
    let started = std::time::Instant::now();
    let refused = loop {
        match node.try_put(MIB as usize).await {
            Ok(name) => stored.push(name),
            Err(error) => break error,
        }
        assert!(stored.len() < 17);
    };
    assert!(matches!(refused, StoreError::NoSpace { .. }), "{refused}");
    assert!(started.elapsed() < Duration::from_secs(10));
    for name in &stored {
        node.assert_right(name, MIB as usize).await;
    }
    // What was pinned is let go: the next put finds room.
    node.forget.answer(Answers::Allow);
    node.put(MIB as usize).await;
    node.assert_accounts();
}

const LONG: Duration = Duration::from_secs(3600);

#[tokio::test(flavor = "multi_thread")]
async fn what_is_softly_pinned_leaves_after_all_else() {
    let node = TestNode::new(16 * MIB, None).await;
    let pinned = node.put_pinned(MIB as usize, LONG).await;
    let ended = node.put_pinned(MIB as usize, Duration::from_nanos(1)).await;
    let names = node.put_many(64, MIB as usize / 2).await;
    node.assert_right(&pinned, MIB as usize).await;
    for gone in [&ended, &names[0]] {
        assert!(node.try_read(gone).await.unwrap().is_none());
    }
    node.assert_accounts();
}

#[tokio::test(flavor = "multi_thread")]
async fn soft_pins_give_way_where_nothing_else_may_go() {
    let node = TestNode::new(16 * MIB, None).await;
    let first = node.put_pinned(MIB as usize, LONG).await;
    // Full of soft pins: the coldest of them go.
    for _ in 0..20 {
        node.put_pinned(MIB as usize, LONG).await;
    }
    assert!(node.try_read(&first).await.unwrap().is_none());
    node.demote_all().await;
    // Full of what is leased, but for one.
    let second = node.put_pinned(MIB as usize, LONG).await;
    for _ in 0..10 {
        let name = node.put(MIB as usize).await;
        node.forget.leased.lock().unwrap().push(name);
    }
    let reserved = node.store.reserve(5 * MIB, 10).await;
    assert!(reserved.is_ok(), "{:?}", reserved.err());
    assert!(node.try_read(&second).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn soft_pins_are_carried_along_on_disk() {
    let node = TestNode::new(16 * MIB, Some(32 * MIB)).await;
    let mut pinned = Vec::new();
    for _ in 0..8 {
        pinned.push(node.put_pinned(MIB as usize, LONG).await);
    }
    node.demote_all().await;
    node.put_many(200, MIB as usize / 2).await;
    for name in &pinned {
        node.assert_right(name, MIB as usize).await;
    }
    // More than half of the disk is too much to carry: it goes on taking what comes.
    for _ in 0..60 {
        node.put_pinned(MIB as usize, LONG).await;
    }
    node.put_many(20, MIB as usize / 2).await;
    node.assert_accounts();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_version_keeps_the_soft_pin_of_the_old_one() {
    let node = TestNode::new(16 * MIB, None).await;
    let old = node.put_pinned(MIB as usize, LONG).await;
    let new = node.seal_again(&old, MIB as usize).await;
    let left = node.store.soft_pin(&new, None);
    assert!(left <= LONG && left > LONG / 2, "{left:?}");
    assert!(node.store.complete(&new, new.version.sequence));
    assert!(node.store.free(old.tenant, &old.key, old.replica));
    node.put_many(64, MIB as usize / 2).await;
    node.assert_right(&new, MIB as usize).await;
    let other = node.seal_only(10).await;
    assert_eq!(node.store.soft_pin(&other, None), Duration::ZERO, "nothing to keep");
    assert_eq!(node.store.soft_pin(&other, Some(Duration::MAX)), tidepool_tiers::store::MAX_SOFT_PIN);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unanswered_forget_keeps_the_object_and_is_asked_again() {
    let node = TestNode::new(16 * MIB, None).await;
    node.forget.answer(Answers::Silence);
    let mut stored = Vec::new();
    while let Ok(name) = node.try_put(MIB as usize).await {
        stored.push(name);
    }
    for name in &stored {
        node.assert_right(name, MIB as usize).await;
    }
    node.forget.answer(Answers::Allow);
    node.put(MIB as usize).await;
}

/// B036: a removal, and a put in its place, while a reader is in the middle.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_keeps_its_bytes_while_the_object_is_removed_and_its_room_wanted() {
    let node = TestNode::new(16 * MIB, None).await;
    let name = node.put(4 << 20).await;
    let mut reader = node.store.open(name.tenant, &name.key, name.version).await.unwrap().unwrap();
    let first = reader.next().await.unwrap().unwrap();
    assert!(node.store.free(name.tenant, &name.key, name.replica));
    node.put_many(32, MIB as usize).await;
    let mut all = first.to_vec();
    while let Some(bytes) = reader.next().await.unwrap() {
        all.extend_from_slice(&bytes);
    }
    assert!(all == payload(name.version.sequence, 4 << 20));
    assert!(node.try_read(&name).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_read_often_are_promoted_once_and_need_no_second_write() {
    let node = TestNode::new(64 * MIB, Some(64 * MIB)).await;
    let name = node.put(MIB as usize).await;
    node.demote_all().await;
    assert_eq!(node.assert_right(&name, MIB as usize).await, TierKind::Nvme);
    let readers = (0..16).map(|_| node.assert_right(&name, MIB as usize));
    futures::future::join_all(readers).await;
    assert_eq!(node.assert_right(&name, MIB as usize).await, TierKind::Dram);
    let [dram, nvme] = node.tiers();
    assert_eq!((dram.promotions, dram.objects, nvme.objects), (1, 1, 1));
    let written = dram.demoted_bytes;
    node.demote_all().await;
    assert_eq!(node.tiers()[0].demoted_bytes, written, "its record on NVMe still holds");
    assert_eq!(node.assert_right(&name, MIB as usize).await, TierKind::Nvme);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nvme_cap_holds_and_the_cold_leave_with_the_catalogs_word() {
    let node = TestNode::new(16 * MIB, Some(32 * MIB)).await;
    let names = node.put_many(200, MIB as usize / 2).await;
    let mut found = 0;
    for name in &names {
        if let Some((bytes, _)) = node.try_read(name).await.unwrap() {
            assert!(bytes == payload(name.version.sequence, MIB as usize / 2));
            found += 1;
        }
    }
    assert!((20..150).contains(&found), "{found}");
    assert!(node.disk_bytes() <= 32 * MIB + 65536, "{}", node.disk_bytes());
    node.assert_accounts();
}

/// An object that was removed while it was read from disk, and whose room was taken again, was said to be damaged.
#[tokio::test(flavor = "multi_thread")]
async fn a_read_of_what_leaves_the_disk_meanwhile_is_told_so_and_not_of_damage() {
    let config = StoreConfig { promote_after_reads: 0, ..TestNode::config() };
    let node = TestNode::with(config, 16 * MIB, Some(32 * MIB)).await;
    let length = 3 * MIB as usize;
    let name = node.put(length).await;
    node.demote_all().await;
    let mut reader = node.store.open(name.tenant, &name.key, name.version).await.unwrap().unwrap();
    let first = reader.next().await.unwrap().unwrap();
    assert!(payload(name.version.sequence, length).starts_with(&first));
    assert!(node.store.free(name.tenant, &name.key, name.replica));
    node.put_many(200, MIB as usize / 2).await;
    let error = reader.read_to_end().await.unwrap_err();
    assert!(matches!(&error, StoreError::Gone { key } if *key == name.key), "{error}");
    assert_eq!(node.tiers_of(TierKind::Nvme).corruptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_finds_its_dram_and_its_disk_again() {
    let node = TestNode::new(16 * MIB, Some(128 * MIB)).await;
    let names = node.put_many(60, MIB as usize / 2).await;
    let unknown = node.seal_only(1000).await;
    let node = node.kill_and_restart().await;
    for name in &names {
        node.assert_right(name, MIB as usize / 2).await;
    }
    // Sealed, but nobody knows whether its put won: here, with commit index 0, for the catalog to settle.
    let mut sealed_only = Vec::new();
    node.store.for_each(|name, commit_index| {
        if commit_index == 0 {
            sealed_only.push(name);
        }
    });
    assert_eq!(sealed_only, [unknown]);
    let report = node.store.recovery_report();
    assert!(report.finished && report.phases.iter().map(|phase| phase.adopted).sum::<u64>() >= 61, "{report:?}");
    node.assert_accounts();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clean_stop_keeps_the_hot_keys_for_the_first_phase() {
    let node = TestNode::new(16 * MIB, Some(128 * MIB)).await;
    let names = node.put_many(60, MIB as usize / 2).await;
    let node = node.stop_and_restart().await;
    let report = node.store.recovery_report();
    assert!(report.phases[0].adopted > 10, "{report:?}");
    for name in &names {
        node.assert_right(name, MIB as usize / 2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_objects_do_not_come_back_after_a_clean_stop() {
    let node = TestNode::new(16 * MIB, Some(128 * MIB)).await;
    let names = node.put_many(40, MIB as usize / 2).await;
    let (removed, kept) = names.split_at(20);
    removed.iter().for_each(|name| assert!(node.store.free(name.tenant, &name.key, name.replica)));
    let node = node.stop_and_restart().await;
    for name in removed {
        assert!(node.try_read(name).await.unwrap().is_none(), "{} is back", name.key);
    }
    for name in kept {
        node.assert_right(name, MIB as usize / 2).await;
    }
}

/// The heat list is some seconds old after a kill: it named records that had been released since, which were adopted, and
/// released a second time when the catalog said so.
#[tokio::test(flavor = "multi_thread")]
async fn removed_objects_do_not_come_back_by_an_old_heat_list() {
    let node = TestNode::new(16 * MIB, Some(64 * MIB)).await;
    let names = node.put_many(4, MIB as usize / 2).await;
    node.demote_all().await;
    for name in &names {
        // Promoted by the last read, so that the list has it with its place on disk.
        for _ in 0..3 {
            node.assert_right(name, MIB as usize / 2).await;
        }
    }
    let node = node.stop_and_restart().await;
    let list = node.heat_list();
    let (removed, kept) = names.split_at(2);
    removed.iter().for_each(|name| assert!(node.store.free(name.tenant, &name.key, name.replica)));
    let node = node.stop_and_restart_with_heat(&list).await;
    for name in removed {
        assert!(node.try_read(name).await.unwrap().is_none(), "{} is back", name.key);
    }
    for name in kept {
        node.assert_right(name, MIB as usize / 2).await;
        assert!(node.store.free(name.tenant, &name.key, name.replica));
    }
    assert_eq!(node.tiers()[1].used, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_detached_disk_makes_its_objects_unavailable_and_brings_them_back() {
    let node = TestNode::new(64 * MIB, Some(64 * MIB)).await;
    let on_disk = node.put(MIB as usize).await;
    node.demote_all().await;
    let in_dram = node.put(MIB as usize).await;
    node.store.detach_nvme().await.unwrap();
    node.assert_right(&in_dram, MIB as usize).await;
    let unavailable = node.store.open(on_disk.tenant, &on_disk.key, on_disk.version).await;
    assert!(matches!(unavailable.err(), Some(StoreError::TierUnavailable { .. })));
    node.attach().await;
    node.assert_right(&on_disk, MIB as usize).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_on_disk_is_a_miss_with_a_counter() {
    let node = TestNode::new(64 * MIB, Some(64 * MIB)).await;
    let names = node.put_many(8, MIB as usize).await;
    node.demote_all().await;
    node.flip_a_payload_bit(&names[3]);
    for (position, name) in names.iter().enumerate() {
        let mut reader = node.store.open(name.tenant, &name.key, name.version).await.unwrap().unwrap();
        let read = reader.read_to_end().await;
        if position == 3 {
            assert!(matches!(read.err(), Some(StoreError::Corrupt { .. })));
            assert!(node.store.open(name.tenant, &name.key, name.version).await.unwrap().is_none());
        } else {
            assert!(read.unwrap()[..] == payload(name.version.sequence, MIB as usize)[..]);
        }
    }
    assert_eq!(node.tiers()[1].corruptions, 1);
    node.until(|node| node.forget.lost.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_is_never_served_for_another() {
    let node = TestNode::new(16 * MIB, None).await;
    let name = node.put(1000).await;
    let other = VersionId { sequence: name.version.sequence + 1000, ..name.version };
    assert!(node.store.open(name.tenant, &key(name.version.sequence), other).await.unwrap().is_none());
}

/// B025: a transfer that takes longer than anybody thought.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_keeps_memory_until_it_ends() {
    let node = TestNode::new(16 * MIB, None).await;
    for ends_early in [false, true] {
        let name = node.put(3 << 20).await;
        let (expected, _) = node.try_read(&name).await.unwrap().unwrap();
        let reader = node.store.open(name.tenant, &name.key, name.version).await.unwrap().unwrap();
        let time = Duration::from_millis(if ends_early { 60_000 } else { 300 });
        let hold = reader.hold(time).unwrap();
        drop(reader);
        assert!(node.store.free(name.tenant, &name.key, name.replica));
        assert!(node.dram().used >= 3 * MIB, "held");
        // As another process finds it.
        let (segment, _) = node.store.segment_descriptor().unwrap();
        let segment = std::fs::File::from(segment);
        let mut bytes = Vec::new();
        for &(start, length) in &hold.extents {
            let at = bytes.len();
            bytes.resize(at + usize::try_from(length).unwrap(), 0);
            segment.read_exact_at(&mut bytes[at..], start).unwrap();
        }
        assert!(bytes == expected && crc32fast::hash(&bytes) == hold.checksum, "where it says");
        let generation = |at: u64| {
            let mut word = [0; 8];
            segment.read_exact_at(&mut word, at).unwrap();
            u64::from_le_bytes(word)
        };
        assert!(hold.generations.iter().all(|&(at, value)| generation(at) == value));
        if ends_early {
            node.store.end_holds(&[hold.id, hold.id.wrapping_add(1), hold.id]);
        }
        node.until(|node| node.dram().used == 0).await;
        assert!(hold.generations.iter().all(|&(at, value)| generation(at) != value), "changed before reuse");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quarter_of_the_memory_is_held_at_most() {
    let node = TestNode::new(16 * MIB, None).await;
    let name = node.put(1 << 20).await;
    let reader = node.store.open(name.tenant, &name.key, name.version).await.unwrap().unwrap();
    let holds: Vec<_> = std::iter::from_fn(|| reader.hold(Duration::from_secs(60))).take(100).collect();
    assert!((3..=4).contains(&holds.len()), "{}", holds.len());
    node.store.end_holds(&[holds[0].id]);
    assert!(reader.hold(Duration::from_secs(60)).is_some() && reader.hold(Duration::from_secs(60)).is_none());
}

/// What a model of the store does beside the real one.
#[derive(Clone, Debug)]
enum Step {
    Put { length: usize },
    Free { which: usize },
    Read { which: usize },
    Demote,
    Restart { clean: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..300_000_usize).prop_map(|length| Step::Put { length }),
        2 => (0..1000_usize).prop_map(|which| Step::Free { which }),
        6 => (0..1000_usize).prop_map(|which| Step::Read { which }),
        1 => Just(Step::Demote),
        1 => any::<bool>().prop_map(|clean| Step::Restart { clean }),
    ];
    prop::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Below its capacity the store is a plain map, over demotions and restarts.
    #[test]
    fn the_store_is_a_map(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let mut node = TestNode::with(StoreConfig { promote_after_reads: 1, ..TestNode::config() }, 32 * MIB, Some(64 * MIB)).await;
            let mut model: Vec<(ReplicaName, usize)> = Vec::new();
            let mut removed: Vec<ReplicaName> = Vec::new();
            for step in steps {
                match step {
                    Step::Put { length } => model.push((node.put(length).await, length)),
                    Step::Free { which } if !model.is_empty() => {
                        let (name, _) = model.swap_remove(which % model.len());
                        assert!(node.store.free(name.tenant, &name.key, name.replica));
                        removed.push(name);
                    }
                    Step::Read { which } if !model.is_empty() => {
                        let (name, length) = &model[which % model.len()];
                        node.assert_right(name, *length).await;
                    }
                    Step::Demote => node.demote_all().await,
                    Step::Restart { clean: true } => node = node.stop_and_restart().await,
                    Step::Restart { clean: false } => {
                        // A kill may bring back what was removed just before; the catalog settles that.
                        node = node.kill_and_restart().await;
                        removed.clear();
                    }
                    Step::Free { .. } | Step::Read { .. } => {}
                }
                for name in &removed {
                    assert!(node.try_read(name).await.unwrap().is_none());
                }
                node.assert_accounts();
            }
            for (name, length) in &model {
                node.assert_right(name, *length).await;
            }
        });
    }
}
