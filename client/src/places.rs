//! Where objects lie that the node which is asked does not hold, as it told a moment ago.
//!
//! A get of such an object takes one round trip then, not two. A place names a version, of which the node there gives exactly
//! the bytes or nothing: it can be too old, for [`VALID`] at most, but never wrong. What this client has written it does not
//! read by a place ([`crate::recent`]).

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a place is good for, counted from before it was asked for. A read may be 5 s behind the last write, and the node that
/// told may have been 4 of them.
const VALID: Duration = Duration::from_secs(1);
/// Places of a generation; there are two, of about 150 bytes a place.
const MOST: usize = 1 << 15;

/// Where an object is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Elsewhere {
    /// Of nodes that hold it, best first: where their gRPC listens.
    pub(crate) addresses: Arc<[String]>,
    pub(crate) version: String,
}

/// Known places, by the key's hash: the node there compares the key.
#[derive(Default)]
pub(crate) struct Places {
    hasher: RandomState,
    /// Whether `known` has anything, to be seen without its lock: never where one node holds all.
    any: AtomicBool,
    known: Mutex<Known>,
}

/// What is full becomes old, and what was old goes.
#[derive(Default)]
struct Known {
    young: HashMap<u64, Place>,
    old: HashMap<u64, Place>,
}

struct Place {
    elsewhere: Elsewhere,
    until: Instant,
}

impl Places {
    /// Notes where `key` is, as was asked at that time.
    pub(crate) fn learn(&self, key: &[u8], elsewhere: &Elsewhere, asked: Instant) {
        let place = Place { elsewhere: elsewhere.clone(), until: asked + VALID };
        let mut known = self.lock();
        if known.young.len() >= MOST {
            known.old = std::mem::take(&mut known.young);
        }
        known.young.insert(self.hasher.hash_one(key), place);
        self.any.store(true, Ordering::Release);
    }

    pub(crate) fn find(&self, key: &[u8], now: Instant) -> Option<Elsewhere> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let (hash, known) = (self.hasher.hash_one(key), self.lock());
        let place = known.young.get(&hash).or_else(|| known.old.get(&hash))?;
        (place.until > now).then(|| place.elsewhere.clone())
    }

    /// It can't be had there.
    pub(crate) fn forget(&self, key: &[u8]) {
        let (hash, mut known) = (self.hasher.hash_one(key), self.lock());
        known.young.remove(&hash);
        known.old.remove(&hash);
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elsewhere(version: usize) -> Elsewhere {
        Elsewhere { addresses: Arc::from(["node:7420".to_owned()]), version: version.to_string() }
    }

    #[test]
    fn a_place_is_good_until_its_time_is_over_or_it_turns_out_to_be_wrong() {
        let (places, asked) = (Places::default(), Instant::now());
        places.learn(b"a", &elsewhere(1), asked);
        places.learn(b"a", &elsewhere(2), asked);
        places.learn(b"b", &elsewhere(3), asked);
        assert_eq!(places.find(b"a", asked), Some(elsewhere(2)));
        assert_eq!(places.find(b"a", asked + VALID), None);
        places.forget(b"b");
        assert_eq!(places.find(b"b", asked), None);
    }

    #[test]
    fn so_many_places_are_kept_and_those_are_the_newest() {
        let (places, asked) = (Places::default(), Instant::now());
        for key in 0..5 * MOST {
            places.learn(&key.to_le_bytes(), &elsewhere(key), asked);
        }
        let found = |key: usize| places.find(&key.to_le_bytes(), asked);
        assert_eq!(found(0), None);
        assert!((4 * MOST..5 * MOST).all(|key| found(key) == Some(elsewhere(key))));
        let known = places.lock();
        assert!(known.young.len() <= MOST && known.old.len() <= MOST);
    }
}
