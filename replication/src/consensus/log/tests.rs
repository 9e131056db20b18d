//! The log alone: what Raft asks of it, and what it refuses.

#![expect(clippy::unwrap_used, reason = "tests")]

use tidepool_metadata::NodeId;

use super::*;
use crate::consensus::ClusterId;

fn open(folder: &Path) -> Result<Log, GroupError> {
    Log::open(folder, &GroupConfig::new(folder.into(), ClusterId(1), NodeId(1)), false)
}

fn entry(index: u64, term: u64) -> Entry {
    Entry { index, term, data: vec![u8::try_from(index % 251).unwrap(); 100].into(), ..Entry::default() }
}

fn in_term(term: u64) -> Option<HardState> {
    Some(HardState { term, ..HardState::default() })
}

fn numbered(number: u64) -> Option<Behind> {
    Some(Behind { number, messages: Vec::new() })
}

fn all(log: &Log) -> Vec<(u64, u64)> {
    let first = log.first_index().unwrap();
    let entries = log.entries(first, log.last() + 1, None, GetEntriesContext::empty(false)).unwrap();
    let found: Vec<_> = entries.iter().map(|entry| (entry.index, entry.term)).collect();
    assert!(found.iter().all(|&(index, term)| log.term(index).unwrap() == term));
    found
}

#[test]
fn what_is_appended_is_there_after_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = open(folder.path()).unwrap();
    log.append((1..=5).map(|index| entry(index, 1)).collect(), in_term(1), true, None).unwrap();
    log.append((6..=9).map(|index| entry(index, 3)).collect(), in_term(3), true, None).unwrap();
    // A new leader replaces the tail.
    log.append((8..=8).map(|index| entry(index, 4)).collect(), in_term(4), true, None).unwrap();
    let expected = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 3), (7, 3), (8, 4)];
    assert_eq!(all(&log), expected);
    drop(log);
    assert_eq!(all(&open(folder.path()).unwrap()), expected);
}

#[test]
fn compaction_keeps_the_term_before_the_first_entry() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = open(folder.path()).unwrap();
    log.append((1..=4).map(|index| entry(index, 1)).collect(), in_term(1), true, None).unwrap();
    log.append((5..=8).map(|index| entry(index, 2)).collect(), in_term(2), true, None).unwrap();
    for (through, term) in [(2, 1), (4, 1), (5, 2), (8, 2)] {
        log.compact(through).unwrap();
        let check = |log: &Log| {
            assert_eq!(log.first_index().unwrap(), through + 1);
            assert_eq!(log.term(through).unwrap(), term);
            assert!(log.term(through - 1).is_err());
            assert_eq!(all(log).len() as u64, 8 - through);
        };
        check(&log);
        drop(log);
        log = open(folder.path()).unwrap();
        check(&log);
    }
    log.append(vec![entry(9, 2)], None, true, None).unwrap();
    assert_eq!(all(&log), [(9, 2)]);
}

#[test]
fn entries_that_left_the_cache_are_read_from_disk() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = open(folder.path()).unwrap();
    let large = |index| Entry { index, term: 1, data: vec![7; CACHE_BYTES / 3].into(), ..Entry::default() };
    log.append((1..=6).map(large).collect(), in_term(1), true, None).unwrap();
    assert!(log.cache.len() <= 3);
    assert_eq!(all(&log).len(), 6);
    let limited = log.entries(1, 7, Some(10), GetEntriesContext::empty(false)).unwrap();
    assert_eq!(limited.len(), 1, "one at least, whatever the limit");
}

#[test]
fn a_gap_or_a_lost_tail_is_refused() {
    type Damage = fn(&Log);
    let damage: [(&str, Damage); 3] = [
        ("index 3: the entry is missing, and later", |log| log.database.delete(entry_key(3)).unwrap()),
        ("index 5: the entry is missing, and it was", |log| log.database.delete(entry_key(5)).unwrap()),
        ("index 4: the entry's index or term", |log| {
            log.database.put(entry_key(4), encode(&entry(4, 9))).unwrap();
        }),
    ];
    for (problem, damage) in damage {
        let folder = tempfile::tempdir().unwrap();
        let mut log = open(folder.path()).unwrap();
        let state = HardState { term: 1, commit: 5, ..HardState::default() };
        log.append((1..=5).map(|index| entry(index, 1)).collect(), Some(state), true, None).unwrap();
        damage(&log);
        drop(log);
        let error = open(folder.path()).err().expect("refused").to_string();
        assert!(error.contains(problem), "{error}");
    }
}

/// Whether the log says that after a loss of power its end may be missing.
fn may_lose_its_end(folder: &Path) -> bool {
    std::fs::read_to_string(folder.join("boot")).unwrap().starts_with('o')
}

#[test]
fn what_was_not_synced_alone_is_before_others_count_on_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = open(folder.path()).unwrap();
    log.note_boot().unwrap();
    assert!(may_lose_its_end(folder.path()));
    log.append(vec![entry(1, 1)], in_term(1), true, None).unwrap();
    assert!(!log.unsynced().any(), "term and vote are synced");
    log.append(vec![entry(2, 1)], None, false, None).unwrap();
    assert!(log.unsynced().any());

    let alone = log.members().clone();
    let mut state = alone.state.clone();
    state.learners.push(MemberId::new(NodeId(2), 1).0);
    log.set_members(Members { index: 2, state }).unwrap();
    assert!(!log.unsynced().any());
    assert!(!may_lose_its_end(folder.path()), "from now on a hole means a broken disk");

    log.set_members(Members { index: 3, state: alone.state }).unwrap();
    assert!(may_lose_its_end(folder.path()));
}

#[test]
fn what_is_not_written_yet_is_read_from_memory() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = open(folder.path()).unwrap();
    let writer = log.writer();
    let large = |index| Entry { index, term: 1, data: vec![7; CACHE_BYTES / 3].into(), ..Entry::default() };
    for index in 1..=6 {
        log.append(vec![large(index)], in_term(1), true, numbered(index * 10)).unwrap();
    }
    // A new leader replaces what no disk has yet.
    log.append(vec![entry(5, 2)], in_term(2), true, numbered(70)).unwrap();
    let expected = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)];
    assert_eq!(all(&log), expected);
    assert_eq!(log.cache.len(), 5, "the disk has none of them");

    let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let ear = Arc::clone(&told);
    let thread = std::thread::spawn(move || writer.run(|behind| ear.lock().push(behind.number)));
    // At once, which is behind all that waits.
    log.append(vec![Entry { term: 2, ..large(6) }], None, true, None).unwrap();
    assert!(log.cache.len() <= 4, "of what is written, as much as there is room for is kept");
    assert_eq!(all(&log)[..5], expected);
    drop(log);
    thread.join().unwrap().unwrap();
    assert_eq!(told.lock().last(), Some(&70));
    assert_eq!(all(&open(folder.path()).unwrap()), [&expected[..], &[(6, 2)]].concat());
}

#[test]
fn a_writer_that_fails_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let broken = Arc::default();
    let mut log = open(folder.path()).unwrap().failing_with(&broken);
    let writer = log.writer();
    log.append(vec![entry(1, 1)], in_term(1), true, numbered(1)).unwrap();
    log.append(vec![entry(2, 1)], None, false, numbered(2)).unwrap();
    broken.store(true, std::sync::atomic::Ordering::Release);
    let unsynced = log.unsynced();
    let thread = std::thread::spawn(move || writer.run(|behind| panic!("{behind:?} is not written")));
    assert!(matches!(thread.join().unwrap(), Err(GroupError::Write { .. })));
    assert!(matches!(unsynced.sync(), Err(GroupError::ThreadDied { .. })));
    assert!(matches!(log.append(vec![entry(3, 1)], None, true, numbered(3)), Err(GroupError::ThreadDied { .. })));
    assert!(matches!(log.append(vec![entry(3, 1)], None, true, None), Err(GroupError::ThreadDied { .. })));
}
