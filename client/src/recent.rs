//! Keys that this client has written a moment ago: an index, or a known place, may still name what was there before.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an index may name what was replaced (`valid_until` of the directory), and some more.
const LINGER: Duration = Duration::from_secs(6);
/// Keys that are told apart; of more, all are taken for the newest of them.
const MOST: usize = 1 << 16;
/// No entry of an index will do.
const NONE_WILL_DO: u64 = u64::MAX;

/// The keys, by hash: a collision costs a call.
#[derive(Default)]
pub(crate) struct RecentWrites {
    hasher: RandomState,
    /// Whether `state` has anything, to be seen without its lock: never for a client that only reads.
    any: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    keys: HashMap<u64, Written>,
    /// What counts for all keys.
    all: Written,
}

/// What is known of the writes of a key.
#[derive(Clone, Copy, Default)]
struct Written {
    under_way: usize,
    /// An entry that was committed at this log index or later is no older than what was written.
    index: u64,
    /// When every index shows it; none: it never was written.
    until: Option<Instant>,
}

impl Written {
    /// The least log index of an entry that may be read now.
    fn least(&self, now: Instant) -> u64 {
        match self.until {
            _ if self.under_way > 0 => NONE_WILL_DO,
            Some(until) if until > now => self.index,
            _ => 0,
        }
    }

    fn end(&mut self, index: u64, now: Instant) {
        // What an older write has left counts no more once it has lingered.
        let lingers = self.until.is_some_and(|until| until > now);
        self.index = if lingers { self.index.max(index) } else { index };
        (self.under_way, self.until) = (self.under_way - 1, Some(now + LINGER));
    }
}

/// A write of some keys that is under way; dropped when its answer is there, or given up.
pub(crate) struct Writing<'a> {
    writes: &'a RecentWrites,
    /// None: of all keys.
    hashes: Option<Vec<u64>>,
    index: u64,
}

impl RecentWrites {
    /// Notes that `keys` are about to be written.
    pub(crate) fn begin<'a>(&self, keys: impl IntoIterator<Item = &'a [u8]>) -> Writing<'_> {
        let hashes: Vec<u64> = keys.into_iter().map(|key| self.hasher.hash_one(key)).collect();
        let (now, mut state) = (Instant::now(), self.lock());
        let State { keys, all } = &mut *state;
        if keys.len() + hashes.len() > MOST {
            keys.retain(|_, written| written.least(now) > 0);
        }
        if keys.len() + hashes.len() > MOST {
            keys.retain(|_, written| {
                if written.under_way == 0 {
                    all.under_way += 1;
                    all.end(written.index, now);
                }
                written.under_way > 0
            });
        }
        for &hash in &hashes {
            keys.entry(hash).or_default().under_way += 1;
        }
        self.any.store(true, Ordering::Release);
        drop(state);
        Writing { writes: self, hashes: Some(hashes), index: NONE_WILL_DO }
    }

    /// Notes that keys that this client does not know are about to be written.
    pub(crate) fn begin_all(&self) -> Writing<'_> {
        self.lock().all.under_way += 1;
        self.any.store(true, Ordering::Release);
        Writing { writes: self, hashes: None, index: NONE_WILL_DO }
    }

    /// The least log index at which an entry of `key` must have been committed to be no older than what this client has
    /// written; 0 if any will do, [`u64::MAX`] if none.
    pub(crate) fn least_index(&self, key: &[u8]) -> u64 {
        if !self.any.load(Ordering::Acquire) {
            return 0;
        }
        let (now, mut state) = (Instant::now(), self.lock());
        let hash = self.hasher.hash_one(key);
        let of_key = state.keys.get(&hash).map_or(0, |written| written.least(now));
        if of_key == 0 {
            state.keys.remove(&hash);
        }
        let of_all = state.all.least(now);
        self.any.store(!state.keys.is_empty() || of_all > 0, Ordering::Release);
        of_key.max(of_all)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writing<'_> {
    /// It was answered: all that it did was committed at `index` or before.
    pub(crate) fn answered(mut self, index: u64) {
        self.index = index;
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let (now, mut state) = (Instant::now(), self.writes.lock());
        let State { keys, all } = &mut *state;
        match &self.hashes {
            None => all.end(self.index, now),
            Some(hashes) => hashes.iter().for_each(|hash| {
                if let Some(written) = keys.get_mut(hash) {
                    written.end(self.index, now);
                }
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linger_passes(writes: &RecentWrites) {
        let (now, mut state) = (Instant::now(), writes.lock());
        state.keys.values_mut().for_each(|written| written.until = written.until.map(|_| now));
        state.all.until = state.all.until.map(|_| now);
    }

    #[test]
    fn an_answered_write_is_read_from_entries_that_are_no_older() {
        let writes = RecentWrites::default();
        assert_eq!(writes.least_index(b"a"), 0);
        let writing = writes.begin([&b"a"[..], b"b"]);
        assert_eq!((writes.least_index(b"a"), writes.least_index(b"c")), (NONE_WILL_DO, 0));
        let again = writes.begin([&b"a"[..]]);
        writing.answered(7);
        assert_eq!((writes.least_index(b"a"), writes.least_index(b"b")), (NONE_WILL_DO, 7));
        again.answered(5);
        assert_eq!(writes.least_index(b"a"), 7, "the newer of both, in whatever order the answers come");
        linger_passes(&writes);
        assert_eq!((writes.least_index(b"a"), writes.least_index(b"b")), (0, 0));
        assert!(!writes.any.load(Ordering::Acquire));
    }

    #[test]
    fn a_write_without_an_answer_is_not_read_from_an_index() {
        let writes = RecentWrites::default();
        drop(writes.begin([&b"a"[..]]));
        assert_eq!(writes.least_index(b"a"), NONE_WILL_DO);
        writes.begin([&b"a"[..]]).answered(9);
        assert_eq!(writes.least_index(b"a"), NONE_WILL_DO, "the first may still arrive, after the second");
        linger_passes(&writes);
        writes.begin([&b"a"[..]]).answered(9);
        assert_eq!(writes.least_index(b"a"), 9);
    }

    #[test]
    fn writes_of_unknown_keys_count_for_all() {
        let writes = RecentWrites::default();
        let writing = writes.begin_all();
        assert_eq!(writes.least_index(b"a"), NONE_WILL_DO);
        writing.answered(4);
        writes.begin([&b"b"[..]]).answered(6);
        assert_eq!((writes.least_index(b"a"), writes.least_index(b"b")), (4, 6));
    }

    #[test]
    fn of_too_many_keys_all_count_for_the_newest() {
        let writes = RecentWrites::default();
        let keys: Vec<_> = (0..MOST).map(|key| key.to_le_bytes()).collect();
        writes.begin(keys.iter().map(|key| &key[..])).answered(3);
        assert_eq!(writes.least_index(b"never written"), 0);
        writes.begin([&b"one more"[..]]).answered(8);
        assert_eq!((writes.least_index(b"never written"), writes.least_index(b"one more")), (3, 8));
        assert!(writes.lock().keys.len() <= MOST);
    }
}
