//! The clock by which a leader stamps entries.
//!
//! The host's wall clock is read once, at the start; from then on time goes on with the monotonic clock. So a wall clock
//! that is set, forward or back, under a running leader changes nothing: a jump forward would expire every session and
//! reservation at once, and could never be taken back, because log time never goes back.
//!
//! Invariant: never goes back, neither here nor behind what was seen in the log; never stands still either.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use tidepool_metadata::LogTime;

/// `CLOCK_BOOTTIME` in nanoseconds: goes on while the host is suspended or the process stopped.
pub(super) fn boot_nanos() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + nanoseconds.unwrap_or(0)
}

#[derive(Debug)]
pub(super) struct LogClock {
    started: Instant,
    /// Log time minus milliseconds since `started`; only grows.
    offset: AtomicU64,
}

impl LogClock {
    pub(super) fn new() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| millis(since.as_millis()));
        Self { started: Instant::now(), offset: AtomicU64::new(wall) }
    }

    pub(super) fn now(&self) -> LogTime {
        self.at_least(LogTime(0))
    }

    /// Never answers less than `time` from here on, nor than it did before.
    pub(super) fn at_least(&self, time: LogTime) -> LogTime {
        let elapsed = millis(self.started.elapsed().as_millis());
        let offset = time.0.saturating_sub(elapsed);
        let before = self.offset.fetch_max(offset, Ordering::AcqRel);
        LogTime(before.max(offset) + elapsed)
    }
}

fn millis(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goes_on_from_what_the_log_has_seen() {
        let clock = LogClock::new();
        let ahead = LogTime(clock.now().0 + 3_600_000);
        assert!(clock.at_least(ahead) >= ahead);
        let mut last = ahead;
        for _ in 0..1000 {
            let now = clock.now();
            assert!(now >= last, "{now:?} after {last:?}");
            last = now;
        }
        assert!(last.0 < ahead.0 + 60_000, "{last:?} ran away from {ahead:?}");
    }
}
