//! How soon nodes begin to answer gets, and how many of these may be asked for twice.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The last ones of a node, and how many say something of it.
const KEPT: usize = 64;
const FEWEST: usize = 16;
/// The 95th percentile is looked for after so many more.
const LOOK_AFTER: usize = 8;

/// What a read earns, and what a second request costs: one of twenty, and at most a few at once.
const EARNED: u32 = 1;
const COST: u32 = 20;
const MOST: u32 = 5 * COST;

/// How long a node took to begin its last answers.
#[derive(Default)]
pub(crate) struct Times(Mutex<Ring>);

#[derive(Default)]
struct Ring {
    micros: Vec<u32>,
    count: usize,
    p95: Option<Duration>,
}

impl Times {
    pub(crate) fn note(&self, time: Duration) {
        let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        let mut ring = self.lock();
        let place = ring.count % KEPT;
        match ring.micros.get_mut(place) {
            Some(kept) => *kept = micros,
            None => ring.micros.push(micros),
        }
        ring.count += 1;
        if ring.count >= FEWEST && ring.count.is_multiple_of(LOOK_AFTER) {
            let mut sorted = ring.micros.clone();
            let place = (sorted.len() * 95).div_ceil(100) - 1;
            let (_, &mut micros, _) = sorted.select_nth_unstable(place);
            ring.p95 = Some(Duration::from_micros(micros.into()));
        }
    }

    /// What 95 of 100 took at most; `None` before enough are known.
    pub(crate) fn p95(&self) -> Option<Duration> {
        self.lock().p95
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What may be asked for twice.
#[derive(Default)]
pub(crate) struct Allowance(AtomicU32);

impl Allowance {
    pub(crate) fn earn(&self) {
        let more = |has: u32| (has < MOST).then_some(has + EARNED);
        let _full = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// Takes what a second request costs, if it is there.
    pub(crate) fn take(&self) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |has| has.checked_sub(COST)).is_ok()
    }

    /// It was not made.
    pub(crate) fn give_back(&self) {
        let more = |has: u32| Some((has + COST).min(MOST));
        let _given = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_percentile_is_of_the_last_times_and_of_enough_of_them() {
        let times = Times::default();
        (0..15).for_each(|_| times.note(Duration::from_micros(100)));
        assert_eq!(times.p95(), None);
        times.note(Duration::from_micros(100));
        assert_eq!(times.p95(), Some(Duration::from_micros(100)));
        (1..=100).for_each(|time| times.note(Duration::from_micros(time)));
        // The last 64 when it was looked at last: 33 to 96, four times in a hundred or so of which are above.
        let p95 = times.p95().map(|time| time.as_micros());
        assert!(p95.is_some_and(|micros| (92..=98).contains(&micros)), "{p95:?}");
    }

    #[test]
    fn one_of_twenty_may_be_asked_for_twice_and_no_crowd_at_once() {
        let allowance = Allowance::default();
        assert!(!allowance.take(), "nothing is earned yet");
        let mut taken = 0;
        for _ in 0..2000 {
            allowance.earn();
            taken += u32::from(allowance.take());
        }
        assert_eq!(taken, 100);
        (0..2000).for_each(|_| allowance.earn());
        assert_eq!((0..10).filter(|_| allowance.take()).count(), 5);
        allowance.give_back();
        assert!(allowance.take() && !allowance.take());
        (0..10).for_each(|_| allowance.give_back());
        assert_eq!((0..10).filter(|_| allowance.take()).count(), 5, "never more than that at once");
    }
}
