use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::entry::most_payload_slots;
use super::layout::SLOT_WORDS;
use super::*;
use crate::node::{Incarnation, NodeId};
use crate::object::{DataType, MAX_KEY_BYTES, ObjectKey, ReplicaId, TenantId, VersionId};
use crate::slice::SliceHeader;

const FIRST_LIFE: Incarnation = Incarnation(7);

fn header(key: &[u8], sequence: u64, pages: u32) -> SliceHeader {
    let length = pages * PAGE_BYTES as u32;
    SliceHeader {
        tenant: TenantId(3),
        key: ObjectKey::new(key).expect("a legal key"),
        version: VersionId { node: NodeId(1), incarnation: FIRST_LIFE, sequence },
        replica: ReplicaId { node: NodeId(2), incarnation: FIRST_LIFE, sequence },
        object_length: u64::from(length),
        slice_bytes: 4 << 20,
        slice_index: 0,
        slice_length: length,
        checksum: 0xdead_beef,
        data_type: DataType::KvCache,
        commit_index: 0,
    }
}

fn extents(list: &[(u32, u32)]) -> Extents {
    let mut extents = Extents::default();
    assert!(list.iter().all(|&(page, pages)| extents.push(Extent { page, pages })));
    extents
}

fn segment(slot_count: u32) -> Vec<AtomicU64> {
    let layout = Layout::new(NodeId(9), 1000, Some(slot_count));
    let words: Vec<AtomicU64> = std::iter::repeat_with(AtomicU64::default).take(layout.words()).collect();
    layout.format(&words);
    words
}

fn copy(words: &[AtomicU64]) -> Vec<AtomicU64> {
    words.iter().map(|word| AtomicU64::new(word.load(Relaxed))).collect()
}

fn put<C: Cell>(writer: &mut Writer, words: &[C], header: &SliceHeader, list: &[(u32, u32)]) -> SlotId {
    let promise = writer.reserve(header.key.as_bytes().len()).expect("a slot");
    writer.seal(words, promise, header, &extents(list))
}

fn look_up(words: &[AtomicU64], key: &[u8]) -> Lookup {
    Reader::new(words).expect("a segment").lookup(SliceName { tenant: TenantId(3), key, slice_index: 0 }, 100)
}

fn found(words: &[AtomicU64], key: &[u8]) -> Found {
    match look_up(words, key) {
        Lookup::Found(found) => found,
        other => panic!("expected a slice, got {other:?}"),
    }
}

#[test]
fn a_slice_is_found_once_complete_and_until_retired() {
    let words = segment(64);
    let (mut writer, recovered) = Writer::recover(&words, FIRST_LIFE).expect("a segment");
    assert!(recovered.slots.is_empty());
    Writer::set_valid_until(&words, 1000);
    let slot = put(&mut writer, &words, &header(b"block", 1, 3), &[(5, 2), (9, 1)]);
    assert_eq!(look_up(&words, b"block"), Lookup::Missing, "sealed only");
    writer.complete(&words, slot, 77);
    writer.complete(&words, slot, 77);
    let seen = found(&words, b"block");
    assert_eq!((seen.commit_index, seen.version.sequence, seen.checksum), (77, 1, 0xdead_beef));
    assert_eq!(seen.extents, extents(&[(5, 2), (9, 1)]));
    assert!(seen.generation >= u64::from(FIRST_LIFE.0) << 32);
    let reader = Reader::new(&words).expect("a segment");
    assert!(reader.is_unchanged(&seen));
    writer.retire(&words, slot);
    assert!(!reader.is_unchanged(&seen));
    assert_eq!(look_up(&words, b"block"), Lookup::Missing);
}

#[test]
fn the_owner_is_read_as_noted_and_one_that_is_too_long_is_not_noted() {
    let words = segment(4);
    let layout = Layout::read(&words).expect("a segment");
    assert!(Layout::owner(&words).is_empty());
    for owner in [&b"/var/lib/tidepool"[..], b"/d", &[b'x'; OWNER_BYTES]] {
        Layout::set_owner(&words, owner);
        assert_eq!(Layout::owner(&words), owner);
    }
    Layout::set_owner(&words, &[b'x'; OWNER_BYTES + 1]);
    assert!(Layout::owner(&words).is_empty());
    assert_eq!(Layout::read(&words), Ok(layout), "nothing else is touched");
}

#[test]
fn the_longest_key_with_the_most_extents_fits_what_was_promised() {
    let slot_count = 1 + most_payload_slots(MAX_KEY_BYTES);
    let words = segment(slot_count);
    let (mut writer, _) = Writer::recover(&words, FIRST_LIFE).expect("a segment");
    Writer::set_valid_until(&words, 1000);
    let key = [0xab; MAX_KEY_BYTES];
    let list: Vec<(u32, u32)> = (0..8).map(|i| (i * 10, 1)).collect();
    for round in 1..50 {
        let slot = put(&mut writer, &words, &header(&key, round, 8), &list);
        assert_eq!(writer.reserve(1), Err(SlotsExhausted { slot_count }));
        writer.complete(&words, slot, round);
        assert_eq!(found(&words, &key).extents, extents(&list));
        let (read, _) = writer.read(&words, slot).expect("it is here");
        assert_eq!(read, SliceHeader { commit_index: round, ..header(&key, round, 8) });
        writer.retire(&words, slot);
    }
}

#[test]
fn of_two_versions_the_higher_commit_index_wins_in_any_order() {
    let words = segment(64);
    let (mut writer, _) = Writer::recover(&words, FIRST_LIFE).expect("a segment");
    Writer::set_valid_until(&words, 1000);
    let newer = put(&mut writer, &words, &header(b"k", 2, 1), &[(1, 1)]);
    let older = put(&mut writer, &words, &header(b"k", 1, 1), &[(2, 1)]);
    writer.complete(&words, newer, 20);
    writer.complete(&words, older, 10);
    assert_eq!(found(&words, b"k").version.sequence, 2);
    writer.retire(&words, newer);
    assert_eq!(found(&words, b"k").version.sequence, 1);
}

#[test]
fn doubts_send_readers_the_normal_path() {
    let words = segment(64);
    assert_eq!(look_up(&words, b"k"), Lookup::Unsure(Doubt::Recovering));
    let _writer = Writer::recover(&words, FIRST_LIFE).expect("a segment");
    assert_eq!(look_up(&words, b"k"), Lookup::Unsure(Doubt::Expired));
    Writer::set_valid_until(&words, 101);
    assert_eq!(look_up(&words, b"k"), Lookup::Missing);
    words[Layout::bucket(0)..].iter().step_by(2).take(32).for_each(|sequence| sequence.store(1, Relaxed));
    assert_eq!(look_up(&words, b"k"), Lookup::Unsure(Doubt::Busy), "a writer died within a change");
    Writer::set_retired(&words);
    assert_eq!(look_up(&words, b"k"), Lookup::Unsure(Doubt::Retired));
}

#[test]
fn chains_hold_against_a_plain_map() {
    // Two buckets for up to 100 slices: every link and unlink is in the midst of others.
    let words = segment(1000);
    words[3].store(2, Relaxed);
    let layout = Layout { bucket_count: 2, ..Layout::new(NodeId(9), 1000, Some(1000)) };
    layout.format(&words);
    let (mut writer, _) = Writer::recover(&words, FIRST_LIFE).expect("a segment");
    Writer::set_valid_until(&words, 1000);
    let mut model: std::collections::BTreeMap<u64, SlotId> = std::collections::BTreeMap::new();
    let mut random = 1_u64;
    for _ in 0..5000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = (random >> 33) % 50;
        let key = number.to_le_bytes();
        match model.remove(&number) {
            Some(slot) => writer.retire(&words, slot),
            None => {
                let slot = put(&mut writer, &words, &header(&key, number, 1), &[(number as u32, 1)]);
                writer.complete(&words, slot, 1 + number);
                model.insert(number, slot);
            }
        }
        for number in 0..50_u64 {
            let here = matches!(look_up(&words, &number.to_le_bytes()), Lookup::Found(_));
            assert_eq!(here, model.contains_key(&number));
        }
    }
}

#[test]
fn recovery_takes_what_is_whole_and_generations_never_go_back() {
    let words = segment(64);
    let (mut writer, _) = Writer::recover(&words, FIRST_LIFE).expect("a segment");
    let complete = put(&mut writer, &words, &header(b"complete", 1, 1), &[(0, 1)]);
    writer.complete(&words, complete, 5);
    let sealed = put(&mut writer, &words, &header(b"sealed", 2, 1), &[(1, 1)]);
    let torn = put(&mut writer, &words, &header(b"torn", 3, 1), &[(2, 1)]);
    let at = writer.layout().slot(torn.0);
    words[at + 5].store(12345, Relaxed);
    let generations = |words: &[AtomicU64]| -> Vec<u64> {
        (0..3).map(|slot| words[writer.layout().slot(slot)].load(Relaxed)).collect()
    };
    let before = generations(&words);
    let (mut second, recovered) = Writer::recover(&words, Incarnation(8)).expect("a segment");
    let names: Vec<(SlotId, u64)> = recovered
        .slots
        .iter()
        .map(|found| (found.slot, second.read(&words, found.slot).expect("it is whole").0.commit_index))
        .collect();
    assert_eq!(names, [(complete, 5), (sealed, 0)]);
    let after = generations(&words);
    assert_eq!(after[..2], before[..2]);
    assert!(after[2] > before[2], "the torn one's readers must notice");
    let next = put(&mut second, &words, &header(b"next", 4, 1), &[(2, 1)]);
    assert_eq!(next, torn, "its slot is free again");
    assert!(generations(&words)[2] >= 8 << 32);
}

/// The bytes of a segment after each single store of a scripted run, as a kill between two instructions leaves them.
#[test]
fn a_kill_after_any_store_leaves_only_whole_slices() {
    use std::sync::Mutex;

    /// Records all stores of one thread.
    struct Recorded {
        value: AtomicU64,
        number: usize,
    }
    static STORES: Mutex<Vec<(usize, u64)>> = Mutex::new(Vec::new());
    impl Cell for Recorded {
        fn load(&self, ordering: Ordering) -> u64 {
            self.value.load(ordering)
        }
        fn store(&self, value: u64, ordering: Ordering) {
            self.value.store(value, ordering);
            STORES.lock().expect("no panic under the lock").push((self.number, value));
        }
        fn fence(_: Ordering) {}
    }

    let layout = Layout::new(NodeId(9), 1000, Some(32));
    let words: Vec<Recorded> =
        (0..layout.words()).map(|number| Recorded { value: AtomicU64::new(0), number }).collect();
    layout.format(&words);
    let (mut writer, _) = Writer::recover(&words, FIRST_LIFE).expect("a segment");
    let long_key = [b'x'; 300];
    let all = [header(b"first", 1, 2), header(&long_key, 2, 1), header(b"third", 3, 1)];
    // Pages of the first are reused by the third.
    let first = put(&mut writer, &words, &all[0], &[(10, 1), (20, 1)]);
    writer.complete(&words, first, 50);
    let second = put(&mut writer, &words, &all[1], &[(30, 1)]);
    writer.complete(&words, second, 51);
    writer.retire(&words, first);
    let third = put(&mut writer, &words, &all[2], &[(20, 1)]);
    writer.complete(&words, third, 52);
    writer.retire(&words, second);
    let stores = std::mem::take(&mut *STORES.lock().expect("no panic under the lock"));

    let image: Vec<AtomicU64> = std::iter::repeat_with(AtomicU64::default).take(layout.words()).collect();
    let mut most = 0;
    for (number, value) in stores {
        image[number].store(value, Relaxed);
        let image = copy(&image);
        let Ok((writer, recovered)) = Writer::recover(&image, Incarnation(8)) else {
            assert!(matches!(Layout::read(&image), Err(LayoutError::NoHeader)));
            continue;
        };
        most = most.max(recovered.slots.len());
        for (found, list) in recovered.iter() {
            let (header, extents) = writer.read(&image, found.slot).expect("it is whole");
            assert_eq!(extents.as_slice(), list);
            let said = (found.replica, found.slice_length, found.checksum);
            assert_eq!(said, (header.replica, header.slice_length, header.checksum));
            let original = all.iter().find(|original| original.version == header.version).expect("one of ours");
            assert_eq!(header, SliceHeader { commit_index: header.commit_index, ..original.clone() });
            assert!([0, 49 + header.version.sequence].contains(&header.commit_index));
        }
        let again = Writer::recover(&image, Incarnation(9)).expect("a segment").1;
        assert_eq!(again, recovered, "recovery may be killed and repeated");
    }
    assert_eq!(most, 2);
}

#[test]
fn damaged_headers_and_directories_are_refused_not_believed() {
    let words = segment(16);
    for position in [1, 2, 3, 4, 5, 6, 7, 8] {
        for bit in [0, 3, 31, 40, 63] {
            let damaged = copy(&words);
            damaged[position].store(words[position].load(Relaxed) ^ 1 << bit, Relaxed);
            assert!(Layout::read(&damaged).is_err(), "word {position}, bit {bit}");
        }
    }
    assert_eq!(Layout::read(&words[..10]), Err(LayoutError::NoHeader));
    assert!(matches!(Reader::new(&words[..100]), Err(LayoutError::Damaged)));

    let (mut writer, _) = Writer::recover(&words, FIRST_LIFE).expect("a segment");
    Writer::set_valid_until(&words, 1000);
    let key = [7; 200];
    let slot = put(&mut writer, &words, &header(&key, 1, 2), &[(1, 2)]);
    writer.complete(&words, slot, 3);
    let start = Layout::bucket(0);
    let mut random = 3_u64;
    for position in start..words.len() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let damaged = copy(&words);
        damaged[position].store(random, Relaxed);
        let _any_answer = look_up(&damaged, &key);
        let (writer, recovered) = Writer::recover(&damaged, Incarnation(8)).expect("the header is whole");
        for found in recovered.slots {
            let (found, list) = writer.read(&damaged, found.slot).expect("it is whole");
            assert_eq!((found.version.sequence, list), (1, extents(&[(1, 2)])));
        }
    }
}

#[test]
fn slices_over_the_same_pages_are_both_dropped() {
    let words = segment(64);
    let (mut writer, _) = Writer::recover(&words, FIRST_LIFE).expect("a segment");
    let apart = put(&mut writer, &words, &header(b"a", 1, 1), &[(40, 1)]);
    put(&mut writer, &words, &header(b"b", 2, 4), &[(10, 4)]);
    put(&mut writer, &words, &header(b"c", 3, 1), &[(12, 1)]);
    let (_, recovered) = Writer::recover(&words, Incarnation(8)).expect("a segment");
    assert_eq!(recovered.slots.iter().map(|found| found.slot).collect::<Vec<_>>(), [apart]);
}

/// Slots and buckets whose counters were the last there is: the next one was computed without regard to that.
#[test]
fn slots_and_buckets_full_of_ones_are_used_again() {
    let words = segment(16);
    let (mut writer, _) = Writer::recover(&words, FIRST_LIFE).expect("a segment");
    put(&mut writer, &words, &header(b"old", 1, 1), &[(1, 1)]);
    let layout = Layout::read(&words).expect("a layout");
    words[Layout::bucket(0)..layout.slot(0) + 16 * SLOT_WORDS].iter().for_each(|word| word.store(u64::MAX, Relaxed));
    let (mut writer, recovered) = Writer::recover(&words, Incarnation(8)).expect("a segment");
    assert!(recovered.slots.is_empty());
    Writer::set_valid_until(&words, 1000);
    for sequence in 1..=8 {
        let slot = put(&mut writer, &words, &header(b"new", sequence, 1), &[(1, 1)]);
        writer.complete(&words, slot, sequence);
        assert_eq!(found(&words, b"new").version.sequence, sequence);
        writer.retire(&words, slot);
    }
}
