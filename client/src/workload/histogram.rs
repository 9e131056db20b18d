//! Latencies in buckets of at most 1.6 % width, mergeable, of fixed size.

use std::time::Duration;

use serde::Serialize;

/// Buckets a doubling: 64 give a width of 1/64.
const SUB_BITS: u32 = 6;
const SUB: usize = 1 << SUB_BITS;
const BUCKETS: usize = (64 - SUB_BITS as usize + 1) * SUB;

/// Counts of durations, by nanoseconds.
#[derive(Clone)]
pub struct Histogram {
    buckets: Box<[u64]>,
    count: u64,
}

/// The percentiles that people ask for, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// How many durations there were.
    pub count: u64,
    /// Half are at most this long.
    pub p50_us: f64,
    /// 99 of 100 are at most this long.
    pub p99_us: f64,
    /// 999 of 1000 are at most this long.
    pub p999_us: f64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: vec![0; BUCKETS].into(), count: 0 }
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.percentiles().fmt(f)
    }
}

impl Histogram {
    /// Counts one duration.
    pub fn record(&mut self, duration: Duration) {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket_of(nanoseconds)] += 1;
        self.count += 1;
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(own, other)| *own += other);
        self.count += other.count;
    }

    /// The duration that `share` (0 to 1) of all are at most as long as; zero if there are none.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Duration {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut below = 0;
        for (bucket, &count) in self.buckets.iter().enumerate() {
            below += count;
            if below >= rank {
                return Duration::from_nanos(upper_bound(bucket));
            }
        }
        Duration::ZERO
    }

    /// The usual percentiles.
    #[must_use]
    pub fn percentiles(&self) -> Percentiles {
        let us = |share| self.quantile(share).as_nanos() as f64 / 1e3;
        Percentiles { count: self.count, p50_us: us(0.5), p99_us: us(0.99), p999_us: us(0.999) }
    }
}

/// Values below `SUB` have a bucket each; above, each doubling has `SUB` buckets.
fn bucket_of(value: u64) -> usize {
    let shift = (63 - (value | 1).leading_zeros()).saturating_sub(SUB_BITS);
    shift as usize * SUB + (value >> shift) as usize
}

fn upper_bound(bucket: usize) -> u64 {
    let shift = (bucket / SUB).saturating_sub(1);
    let base = (bucket - shift * SUB) as u64;
    ((u128::from(base + 1) << shift) - 1).min(u128::from(u64::MAX)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_hold_their_values_within_their_width() {
        for value in (0..200).chain([1 << 20, (1 << 20) + 12_345, u64::MAX / 3, u64::MAX]) {
            let bound = upper_bound(bucket_of(value));
            assert!(bound >= value && bound - value <= value / SUB as u64, "{value} {bound}");
            assert_eq!(bucket_of(bound), bucket_of(value));
        }
        assert!(bucket_of(u64::MAX) < BUCKETS);
    }

    #[test]
    fn percentiles_of_a_known_run() {
        let mut first = Histogram::default();
        let mut second = Histogram::default();
        (1..=500).for_each(|us| first.record(Duration::from_micros(us)));
        (501..=1000).for_each(|us| second.record(Duration::from_micros(us)));
        first.merge(&second);
        let percentiles = first.percentiles();
        assert_eq!(percentiles.count, 1000);
        assert!((percentiles.p50_us / 500.0 - 1.0).abs() < 0.02, "{percentiles:?}");
        assert!((percentiles.p99_us / 990.0 - 1.0).abs() < 0.02, "{percentiles:?}");
    }
}
