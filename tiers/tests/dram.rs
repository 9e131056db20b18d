//! The DRAM tier from outside: accounts, restarts, crashes, damage.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use memory_support::{KEY_BYTES, bytes_of, put};
use tempfile::TempDir;
use tidepool_metadata::directory::{Lookup, Reader, SliceName};
use tidepool_metadata::{CHUNK_BYTES, Incarnation, NodeId, TenantId};
use tidepool_tiers::memory::{MemoryConfig, MemoryError, MemoryTier, RecoveredSlice, SharedSlice, Slice};

mod memory_support;

const PAGE: u64 = 4096;

fn config(folder: &Path, capacity_bytes: u64, incarnation: u32) -> MemoryConfig {
    MemoryConfig {
        folder: Some(folder.to_owned()),
        name: "segment".into(),
        owner: None,
        capacity_bytes,
        survive_restart: true,
        node: NodeId(5),
        incarnation: Incarnation(incarnation),
    }
}

fn open(folder: &Path, capacity_bytes: u64, incarnation: u32) -> (Arc<MemoryTier>, Vec<RecoveredSlice>) {
    let (tier, recovered) = MemoryTier::open(&config(folder, capacity_bytes, incarnation)).expect("a segment");
    (tier, recovered.collect())
}

fn assert_whole(slice: &SharedSlice) {
    let header = slice.header();
    let expected = bytes_of(header.version.sequence, header.slice_length as usize);
    let mut copied = vec![0; expected.len()];
    slice.copy_to(0..header.slice_length, &mut copied).expect("whole");
    assert_eq!(copied, expected);
    assert_eq!(slice.checksum(), crc32fast::hash(&expected));
    let views: Vec<u8> = Slice::bytes(slice, 0..header.slice_length).flatten().collect();
    assert_eq!(views, expected);
}

fn assert_empty(tier: &MemoryTier) {
    let usage = tier.usage();
    assert_eq!((usage.used, usage.reserved, usage.free), (0, 0, usage.capacity));
}

#[test]
fn slices_of_all_lengths_come_back_byte_for_byte() {
    let folder = TempDir::new().expect("a folder");
    let (tier, _) = open(folder.path(), 16 << 20, 1);
    for length in [0, 1, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5, 4 << 20]
    {
        let slice = put(&tier, length as u64, length).expect("room");
        assert_whole(&slice);
        let middle = (length / 3) as u32..(length - length / 4) as u32;
        let mut part = vec![0; middle.len()];
        slice.copy_to(middle.clone(), &mut part).expect("whole");
        assert_eq!(part, bytes_of(length as u64, length)[middle.start as usize..middle.end as usize]);
        let pages = if length <= CHUNK_BYTES {
            (length as u64).div_ceil(PAGE)
        } else {
            ((length as u64).next_multiple_of(4) + 4 * length.div_ceil(CHUNK_BYTES) as u64).div_ceil(PAGE)
        };
        assert_eq!(tier.usage().used, pages * PAGE, "{length} bytes");
        drop(slice);
        assert_empty(&tier);
    }
}

/// Space once used for one size could not be used for another, even after everything was removed.
#[test]
fn each_size_finds_the_space_that_another_one_left() {
    let folder = TempDir::new().expect("a folder");
    let capacity = 64 << 20;
    let (tier, _) = open(folder.path(), capacity, 1);
    for round in 0..5 {
        for length in [4096_u32, 4 << 20, 1 << 20] {
            // Not filled: what is tried is the room.
            let buffers: Vec<_> = std::iter::from_fn(|| tier.reserve(length, KEY_BYTES).ok()).collect();
            let payload = buffers.len() as u64 * u64::from(length);
            if length > 4096 {
                assert!(payload as f64 >= 0.93 * capacity as f64, "round {round}, {length}: {payload} bytes fit");
            } else {
                // Reservations keep directory slots for the longest key each: sealing gives most of them back.
                assert!(buffers.len() > 1000);
            }
            let usage = tier.usage();
            assert_eq!(usage.free + usage.used + usage.reserved, usage.capacity);
            drop(buffers);
            assert_empty(&tier);
        }
    }
}

#[test]
fn pages_of_4_kib_fill_the_tier() {
    let folder = TempDir::new().expect("a folder");
    let (tier, _) = open(folder.path(), 16 << 20, 1);
    let slices: Vec<_> = (0..).map_while(|number| put(&tier, number, 4096)).collect();
    assert_eq!(slices.len() as u64, (16 << 20) / PAGE);
    slices.iter().step_by(97).for_each(assert_whole);
    drop(slices);
    assert_empty(&tier);
}

/// Bulk removal took sizes off twice, and the gauge went below zero.
#[test]
fn accounts_equal_a_recount_after_every_step() {
    let folder = TempDir::new().expect("a folder");
    let (tier, _) = open(folder.path(), 8 << 20, 1);
    let pages = |length: usize| {
        let trailer = if length > CHUNK_BYTES {
            length.next_multiple_of(4) - length + 4 * length.div_ceil(CHUNK_BYTES)
        } else {
            0
        };
        (length + trailer).div_ceil(4096) as u64 * PAGE
    };
    let (mut sealed, mut filling) = (Vec::new(), Vec::new());
    let mut random = 7_u64;
    for step in 0..2000_u64 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let length = (random >> 40) as usize % 300_000;
        match (random >> 33) % 8 {
            0..3 => sealed.extend(put(&tier, step, length)),
            3 => filling.extend(tier.reserve(length as u32, KEY_BYTES).ok()),
            4 => drop(filling.pop()),
            5 if step % 50 == 0 => sealed.clear(),
            _ if !sealed.is_empty() => drop(sealed.swap_remove(random as usize % sealed.len())),
            _ => {}
        }
        let used: u64 = sealed.iter().map(|slice: &SharedSlice| pages(slice.length() as usize)).sum();
        let reserved: u64 = filling.iter().map(|buffer| pages(buffer.length())).sum();
        let usage = tier.usage();
        assert_eq!((usage.used, usage.reserved), (used, reserved), "step {step}");
        assert_eq!(usage.free + used + reserved, usage.capacity);
    }
    sealed.iter().for_each(assert_whole);
    drop((sealed, filling));
    assert_empty(&tier);
}

#[test]
fn what_was_sealed_comes_back_after_a_close_and_what_was_dropped_does_not() {
    let folder = TempDir::new().expect("a folder");
    let (tier, _) = open(folder.path(), 8 << 20, 1);
    let complete = put(&tier, 1, 200_000).expect("room");
    complete.complete(77);
    let sealed = put(&tier, 2, 5000).expect("room");
    drop(put(&tier, 3, 5000));
    let half = tier.reserve(100_000, KEY_BYTES).expect("room");
    tier.close(true);
    drop((complete, sealed, half, tier));

    let (tier, mut recovered) = open(folder.path(), 8 << 20, 2);
    recovered.sort_by_key(|slice| slice.header().version.sequence);
    let names: Vec<(u64, u64)> =
        recovered.iter().map(|slice| (slice.header().version.sequence, slice.header().commit_index)).collect();
    assert_eq!(names, [(1, 77), (2, 0)]);
    let slices: Vec<_> = recovered.into_iter().map(|slice| slice.verify().expect("whole")).collect();
    slices.iter().for_each(assert_whole);
    drop(slices);
    assert_empty(&tier);
}

/// Objects of others have no place in a core dump.
#[test]
fn the_segment_is_left_out_of_core_dumps() {
    let folder = TempDir::new().expect("a folder");
    let (_tier, _) = open(folder.path(), 1 << 20, 1);
    let maps = fs::read_to_string("/proc/self/smaps").expect("mappings");
    let path = folder.path().join("segment").display().to_string();
    let ours = maps.split_once(&path).expect("the segment is mapped").1;
    let flags = ours.lines().find(|line| line.starts_with("VmFlags:")).expect("its flags");
    assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
}

#[test]
fn a_second_process_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let (_tier, _) = open(folder.path(), 1 << 20, 1);
    let refused = MemoryTier::open(&config(folder.path(), 1 << 20, 2)).expect_err("it is in use");
    assert!(matches!(refused, MemoryError::Locked { .. }), "{refused}");
}

#[test]
fn another_capacity_empties_the_tier_once() {
    let folder = TempDir::new().expect("a folder");
    let (tier, _) = open(folder.path(), 8 << 20, 1);
    let slice = put(&tier, 1, 5000).expect("room");
    tier.close(true);
    drop((slice, tier));
    for capacity in [4 << 20, 32 << 20] {
        let (tier, recovered) = open(folder.path(), capacity, 2);
        assert!(recovered.is_empty());
        assert_eq!(tier.usage().capacity, capacity);
        drop(put(&tier, 2, 1 << 20).expect("room"));
        assert_empty(&tier);
        tier.close(true);
    }
}

/// The segment's bytes as they were at many moments of a run, each opened as a restarted process would.
#[test]
fn every_crash_image_opens_without_a_wrong_byte() {
    let live = TempDir::new().expect("a folder");
    let image = TempDir::new().expect("a folder");
    let capacity = 4 << 20;
    let (tier, _) = open(live.path(), capacity, 1);
    let mut slices: Vec<SharedSlice> = Vec::new();
    let mut filling = None;
    let mut random = 11_u64;
    for step in 0..30_u64 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let length = (random >> 40) as usize % 400_000;
        match put(&tier, step, length) {
            Some(slice) => {
                if step % 3 != 0 {
                    slice.complete(1000 + step);
                }
                slices.push(slice);
            }
            None => drop(slices.swap_remove(random as usize % slices.len())),
        }
        if step % 5 == 0 {
            filling = tier.reserve(70_000, KEY_BYTES).ok().map(|mut buffer| {
                buffer.append(&[0xee; 66_000]);
                buffer
            });
        }
        fs::copy(live.path().join("segment"), image.path().join("segment")).expect("a copy");
        let (restarted, recovered) = open(image.path(), capacity, 2);
        let mut expected: Vec<(u64, u64)> =
            slices.iter().map(|slice| (slice.header().version.sequence, slice.header().commit_index)).collect();
        let verified: Vec<_> = recovered.into_iter().map(|slice| slice.verify().expect("whole")).collect();
        let mut found: Vec<(u64, u64)> =
            verified.iter().map(|slice| (slice.header().version.sequence, slice.header().commit_index)).collect();
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected, "step {step}");
        verified.iter().for_each(assert_whole);
        drop(verified);
        assert_empty(&restarted);
    }
    drop(filling);
}

/// A flipped bit anywhere in a slice's bytes or its chunks' checksums is found, and the rest is served.
#[test]
fn damage_is_found_before_it_is_served() {
    let folder = TempDir::new().expect("a folder");
    let (tier, _) = open(folder.path(), 4 << 20, 1);
    let slices: Vec<_> = (0..4).map(|number| put(&tier, number, 150_000).expect("room")).collect();
    tier.close(true);
    drop((slices, tier));
    let path = folder.path().join("segment");
    let whole = fs::read(&path).expect("the segment");
    let needle = &bytes_of(2, 150_000)[..64];
    let at = whole.windows(64).position(|window| window == needle).expect("the third slice");
    for offset in [0, 65_535, 65_536, 149_999, 150_000, 150_011] {
        let mut damaged = whole.clone();
        damaged[at + offset] ^= 0x10;
        fs::write(&path, &damaged).expect("the damage");
        let (tier, recovered) = open(folder.path(), 4 << 20, 2);
        let mut whole_ones = Vec::new();
        for slice in recovered {
            let number = slice.header().version.sequence;
            match slice.verify() {
                Ok(slice) => whole_ones.push((number, slice)),
                Err(_) => assert_eq!(number, 2, "offset {offset}"),
            }
        }
        assert_eq!(whole_ones.len(), 3, "offset {offset}");
        whole_ones.iter().for_each(|(_, slice)| assert_whole(slice));
        drop(whole_ones);
        assert_empty(&tier);
        tier.close(true);
    }
}

fn boot_nanoseconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Another process maps the file and finds slices by the directory alone.
#[test]
fn readers_find_complete_slices_by_the_file_alone() {
    let folder = TempDir::new().expect("a folder");
    let (tier, _) = open(folder.path(), 4 << 20, 1);
    let slice = put(&tier, 9, 100_000).expect("room");
    slice.complete(3);
    let look = |now: u64| {
        let file = fs::read(folder.path().join("segment")).expect("the segment");
        let words: Vec<std::sync::atomic::AtomicU64> = file
            .chunks_exact(8)
            .map(|word| std::sync::atomic::AtomicU64::new(u64::from_le_bytes(word.try_into().expect("eight bytes"))))
            .collect();
        let reader = Reader::new(&words).expect("a segment");
        let found = reader.lookup(SliceName { tenant: TenantId(1), key: b"key/9", slice_index: 0 }, now);
        let Lookup::Found(found) = found else { return None };
        let data = reader.layout().data_offset as usize;
        let mut bytes = Vec::new();
        for extent in found.extents.as_slice() {
            bytes.extend_from_slice(&file[data + extent.page as usize * 4096..][..extent.pages as usize * 4096]);
        }
        bytes.truncate(found.slice_length as usize);
        assert!(reader.is_unchanged(&found));
        assert_eq!(crc32fast::hash(&bytes), found.checksum);
        Some(bytes)
    };
    assert_eq!(look(1), None, "nobody has said that it may be used");
    tier.renew(Duration::from_secs(5));
    let now = boot_nanoseconds();
    assert_eq!(look(now), Some(bytes_of(9, 100_000)));
    assert_eq!(look(now + 60_000_000_000), None, "it was not said again");
    drop(slice);
    assert_eq!(look(now), None);
    let slice = put(&tier, 9, 100_000).expect("room");
    slice.complete(4);
    assert!(look(now).is_some());
    tier.close(true);
    tier.renew(Duration::from_secs(5));
    assert_eq!(look(now), None, "this life's writing has ended");
}

/// What a view in another process does first.
fn keep(folder: &Path, slice: &SharedSlice) -> (fs::File, Vec<(u64, u64)>) {
    let file = fs::File::open(folder.join("segment")).expect("the segment");
    let extents: Vec<(u64, u64)> = slice.extents().collect();
    extents.iter().for_each(|&(start, bytes)| tidepool_io::keep(&file, start..start + bytes).expect("kept"));
    (file, extents)
}

fn read(file: &fs::File, extents: &[(u64, u64)]) -> Vec<u8> {
    let piece = |&(start, bytes): &(u64, u64)| {
        let mut piece = vec![0; bytes as usize];
        file.read_exact_at(&mut piece, start).expect("inside");
        piece
    };
    extents.iter().flat_map(piece).collect()
}

/// Writes over all that is free.
fn overwrite(tier: &Arc<MemoryTier>) {
    let mut buffers: Vec<_> = std::iter::from_fn(|| tier.reserve(4096, KEY_BYTES).ok()).collect();
    buffers.iter_mut().for_each(|buffer| buffer.append(&[0xee; 4096]));
    assert_eq!(tier.usage().free, 0);
}

#[test]
fn pages_that_a_reader_keeps_are_nobodys_until_it_lets_go() {
    let folder = TempDir::new().expect("a folder");
    let (tier, _) = open(folder.path(), 1 << 20, 1);
    // Scattered: between others, of which every second goes.
    let mut small: Vec<_> = (10..).map_while(|number| put(&tier, number, 8192)).collect();
    let mut even = true;
    small.retain(|_| {
        std::mem::replace(&mut even, false) || {
            even = true;
            false
        }
    });
    let slice = put(&tier, 1, 60_000).expect("room");
    assert!(slice.extents().count() > 1);
    let (reader, extents) = keep(folder.path(), &slice);
    let (second, _) = keep(folder.path(), &slice);
    drop((slice, small));
    let usage = tier.usage();
    assert_eq!((usage.used, usage.kept), (15 * PAGE, 15 * PAGE));
    assert!(!tier.free_kept());
    overwrite(&tier);
    assert_eq!(read(&reader, &extents), bytes_of(1, 60_000));
    drop(reader);
    assert!(!tier.free_kept(), "another one keeps them still");
    let rest = put(&tier, 2, (usage.free - PAGE) as usize).expect("room");
    assert!(tier.reserve(8 * PAGE as u32, KEY_BYTES).is_err());
    drop(second);
    tier.reserve(8 * PAGE as u32, KEY_BYTES).expect("who needs room looks whether it was let go");
    drop(rest);
    assert_empty(&tier);
}

#[test]
fn what_readers_keep_is_known_to_the_next_life() {
    let folder = TempDir::new().expect("a folder");
    let (tier, _) = open(folder.path(), 1 << 20, 1);
    let (gone, stays) = (put(&tier, 1, 30_000).expect("room"), put(&tier, 2, 50_000).expect("room"));
    let readers = [keep(folder.path(), &gone), keep(folder.path(), &stays)];
    drop(gone);
    tier.close(true);
    drop((stays, tier));
    let (tier, recovered) = open(folder.path(), 1 << 20, 2);
    assert_eq!((recovered.len(), tier.usage().kept), (1, 8 * PAGE));
    overwrite(&tier);
    drop(recovered);
    assert_eq!(tier.usage().kept, (8 + 13) * PAGE);
    overwrite(&tier);
    for (number, (file, extents)) in (1..).zip(&readers) {
        let bytes = read(file, extents);
        assert_eq!(bytes, bytes_of(number, bytes.len()));
    }
    drop(readers);
    assert!(tier.free_kept());
    assert_empty(&tier);
}
