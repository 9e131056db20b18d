//! Keys that this client has written a moment ago: an index may still name what was there before.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an index may name what was replaced (`valid_until` of the directory), and some more.
const LINGER: Duration = Duration::from_secs(6);
/// Keys that are told apart; with more, all count as written.
const MOST: usize = 1 << 16;

/// The keys, by hash: a collision costs a call.
#[derive(Default)]
pub(crate) struct RecentWrites {
    hasher: RandomState,
    /// Of `state`, to be looked at without its lock: 0 for a client that only reads.
    len: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    keys: HashMap<u64, Written>,
    /// Until then all keys count as written.
    all_until: Option<Instant>,
}

struct Written {
    under_way: usize,
    until: Instant,
}

/// A write of some keys that is under way; dropped when its answer is there, or given up.
pub(crate) struct Writing<'a> {
    writes: &'a RecentWrites,
    hashes: Vec<u64>,
}

impl RecentWrites {
    /// Notes that `keys` are about to be written.
    pub(crate) fn begin<'a>(&self, keys: impl IntoIterator<Item = &'a [u8]>) -> Writing<'_> {
        let hashes: Vec<u64> = keys.into_iter().map(|key| self.hasher.hash_one(key)).collect();
        let (now, mut state) = (Instant::now(), self.lock());
        if state.keys.len() + hashes.len() > MOST {
            state.keys.retain(|_, written| written.under_way > 0 || written.until > now);
        }
        for &hash in &hashes {
            state.keys.entry(hash).or_insert(Written { under_way: 0, until: now }).under_way += 1;
        }
        if state.keys.len() > MOST {
            state.keys.retain(|_, written| written.under_way > 0);
            state.all_until = Some(now + LINGER);
        }
        self.note_len(&state);
        drop(state);
        Writing { writes: self, hashes }
    }

    /// Notes that unknown keys were, or are being, written.
    pub(crate) fn note_all(&self) {
        let mut state = self.lock();
        state.all_until = Some(Instant::now() + LINGER);
        self.note_len(&state);
    }

    /// Whether `key` was written a moment ago.
    pub(crate) fn has(&self, key: &[u8]) -> bool {
        if self.len.load(Ordering::Acquire) == 0 {
            return false;
        }
        let (now, mut state) = (Instant::now(), self.lock());
        if state.all_until.is_some_and(|until| until > now) {
            return true;
        }
        state.all_until = None;
        let hash = self.hasher.hash_one(key);
        let has = state.keys.get(&hash).is_some_and(|written| written.under_way > 0 || written.until > now);
        if !has {
            state.keys.remove(&hash);
        }
        self.note_len(&state);
        has
    }

    fn note_len(&self, state: &State) {
        self.len.store(state.keys.len() + usize::from(state.all_until.is_some()), Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let (until, mut state) = (Instant::now() + LINGER, self.writes.lock());
        for hash in &self.hashes {
            if let Some(written) = state.keys.get_mut(hash) {
                written.under_way -= 1;
                written.until = until;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_counts_as_written_while_it_is_and_a_while_after() {
        let writes = RecentWrites::default();
        assert!(!writes.has(b"a"));
        let writing = writes.begin([&b"a"[..], b"b"]);
        assert!(writes.has(b"a") && writes.has(b"b") && !writes.has(b"c"));
        let again = writes.begin([&b"a"[..]]);
        drop(writing);
        assert!(writes.has(b"a") && writes.has(b"b"));
        drop(again);
        assert!(writes.has(b"a"));
        writes.lock().keys.values_mut().for_each(|written| written.until = Instant::now());
        assert!(!writes.has(b"a") && !writes.has(b"b"));
        assert_eq!(writes.len.load(Ordering::Acquire), 0);
    }

    #[test]
    fn too_many_keys_are_all_keys() {
        let writes = RecentWrites::default();
        let keys: Vec<_> = (0..=MOST).map(|key| key.to_le_bytes()).collect();
        drop(writes.begin(keys.iter().map(|key| &key[..])));
        assert!(writes.has(b"never written"));
        assert!(writes.lock().keys.len() <= MOST + 1);
        writes.note_all();
        assert!(writes.has(b"x"));
    }
}
