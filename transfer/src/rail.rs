//! Health of one rail: pure, with `now` as an argument.
//!
//! ```text
//!            failed(): 50 ms                     probe_begun()
//! healthy ------------> resting until an instant -------------> probing
//!    ^   suspected(): 0    ^                                      |  |
//!    |                     |             failed(): longer         |  |
//!    |   succeeded()       +--------------------------------------+  |
//!    +---------------------------------------------------------------+
//! ```
//!
//! A rest doubles with each failure in a row, from 50 ms to 10 s.

use std::time::{Duration, Instant};

use crate::error::Failure;

/// First rest of a rail that failed.
const REST_FIRST: Duration = Duration::from_millis(50);
/// No rest is longer.
const REST_MAX: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Health {
    failures_in_a_row: u32,
    /// Until when it rests; why is `failure`.
    rests_until: Option<Instant>,
    failure: Option<Failure>,
    is_probed: bool,
}

impl Health {
    /// A rail of which nobody knows yet whether it works: to be probed before it is used.
    pub(crate) fn unknown(now: Instant) -> Self {
        Self { rests_until: Some(now), ..Self::default() }
    }

    /// Whether groups should take it.
    pub(crate) fn is_healthy(&self) -> bool {
        self.rests_until.is_none()
    }

    /// How often it failed since it last worked.
    pub(crate) fn failures_in_a_row(&self) -> u32 {
        self.failures_in_a_row
    }

    /// Why it rests, if it failed.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.failure
    }

    /// It moved bytes, or answered a probe.
    pub(crate) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// It may be silent: to be probed at once, and not used until then.
    pub(crate) fn suspected(&mut self, now: Instant) {
        if self.rests_until.is_none() {
            self.rests_until = Some(now);
            self.failure = Some(Failure::Silent);
        }
    }

    /// It failed. What else fails of what it carried when it began to rest doesn't make the rest longer.
    pub(crate) fn failed(&mut self, failure: Failure, now: Instant) {
        self.failure = Some(failure);
        if self.rests_until.is_some() && !self.is_probed {
            return;
        }
        self.is_probed = false;
        self.failures_in_a_row = self.failures_in_a_row.saturating_add(1);
        self.rests_until = Some(now + rest_duration(self.failures_in_a_row));
    }

    /// When it should be probed; `None` if it is healthy, is being probed, or leads to another engine for good.
    pub(crate) fn probe_at(&self) -> Option<Instant> {
        if self.is_probed || self.is_over() { None } else { self.rests_until }
    }

    /// Whether a probe is due or on its way.
    pub(crate) fn is_watched(&self) -> bool {
        self.rests_until.is_some() && !self.is_over()
    }

    /// Whether it leads to another engine, or to none any more.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.failure, Some(Failure::Restarted | Failure::Closed))
    }

    /// It is being probed from here on: `succeeded` or `failed` follows.
    pub(crate) fn probe_begun(&mut self) {
        self.is_probed = self.rests_until.is_some();
    }
}

/// How long a rail rests after so many failures in a row.
fn rest_duration(failures: u32) -> Duration {
    (REST_FIRST * (1 << failures.saturating_sub(1).min(16))).min(REST_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_grow_with_each_failed_probe_and_are_bounded() {
        let now = Instant::now();
        let mut health = Health::default();
        let mut last = Duration::ZERO;
        for round in 0..40 {
            health.failed(Failure::Silent, now);
            let rest = health.probe_at().expect("rests") - now;
            assert!(rest >= last && rest <= REST_MAX, "round {round}: {rest:?} after {last:?}");
            last = rest;
            health.probe_begun();
            assert_eq!(health.probe_at(), None, "probed once at a time");
        }
        assert_eq!(last, REST_MAX);
        health.succeeded();
        health.failed(Failure::Silent, now);
        assert_eq!(health.probe_at(), Some(now + REST_FIRST));
    }

    #[test]
    fn a_suspect_is_probed_at_once_and_rests_if_that_fails() {
        let now = Instant::now();
        let mut health = Health::default();
        health.suspected(now);
        assert_eq!((health.is_healthy(), health.probe_at()), (false, Some(now)));
        health.probe_begun();
        health.failed(Failure::Unreachable, now);
        assert_eq!(health.probe_at(), Some(now + REST_FIRST));
        health.suspected(now);
        assert_eq!(health.probe_at(), Some(now + REST_FIRST), "it rests already");
    }

    #[test]
    fn what_fails_together_is_one_failure() {
        let now = Instant::now();
        let mut health = Health::default();
        for _ in 0..100 {
            health.failed(Failure::ConnectionLost, now);
        }
        assert_eq!(health.probe_at(), Some(now + REST_FIRST));
        assert_eq!(health.failure(), Some(Failure::ConnectionLost));
    }

    #[test]
    fn a_rail_to_another_engine_is_not_probed_again() {
        let mut health = Health::default();
        health.failed(Failure::Restarted, Instant::now());
        assert_eq!((health.is_healthy(), health.probe_at(), health.is_watched()), (false, None, false));
    }

    #[test]
    fn an_unknown_rail_is_probed_at_once_and_used_after() {
        let now = Instant::now();
        let mut health = Health::unknown(now);
        assert!(!health.is_healthy());
        assert_eq!(health.probe_at(), Some(now));
        health.probe_begun();
        health.succeeded();
        assert!(health.is_healthy());
    }
}
