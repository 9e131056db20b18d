//! Ratios near 1, measured as interleaved pairs: ours, limit, ours, limit.
//!
//! Machines drift; two sides measured one right after the other drift together. The median of the pairs' ratios
//! counts; its quartiles say how far to trust it.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::Error;

/// One side of a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Bytes moved.
    pub bytes: u64,
    /// In this time.
    pub elapsed: Duration,
    /// CPU seconds, user and system, of all processes that took part.
    pub cpu_seconds: f64,
}

/// Ours and the limit's, one right after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pair {
    /// Bytes a second.
    pub ours: f64,
    /// Bytes a second.
    pub limit: f64,
    /// CPU seconds for each 10^9 bytes.
    pub ours_cpu: f64,
    /// CPU seconds for each 10^9 bytes.
    pub limit_cpu: f64,
}

/// What the pairs say together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PairSummary {
    /// How many.
    pub pairs: usize,
    /// Median of the ratios ours / limit.
    pub median: f64,
    /// A quarter of the ratios are at most this.
    pub lower_quartile: f64,
    /// Three quarters are at most this.
    pub upper_quartile: f64,
    /// Median of ours in bytes a second.
    pub ours: f64,
    /// Median of the limit in bytes a second.
    pub limit: f64,
    /// Median of our CPU seconds for each 10^9 bytes.
    pub ours_cpu_seconds_per_gigabyte: f64,
    /// Median of the limit's.
    pub limit_cpu_seconds_per_gigabyte: f64,
}

impl Sample {
    /// Measures what `work` does. `processes` are others that take part, by their ids.
    ///
    /// # Errors
    /// The work's.
    pub fn measure(processes: &[u32], work: impl FnOnce() -> Result<u64, Error>) -> Result<Self, Error> {
        let (cpu, started) = (cpu_seconds(processes), Instant::now());
        let bytes = work()?;
        Ok(Self { bytes, elapsed: started.elapsed(), cpu_seconds: cpu_seconds(processes) - cpu })
    }

    fn rate(self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64()
    }

    fn cpu_seconds_per_gigabyte(self) -> f64 {
        self.cpu_seconds / (self.bytes as f64 / 1e9)
    }
}

/// Measures `pairs` pairs, after one that warms both sides up and does not count.
///
/// # Errors
/// Those of either side.
pub fn measure(
    pairs: usize,
    mut ours: impl FnMut() -> Result<Sample, Error>,
    mut limit: impl FnMut() -> Result<Sample, Error>,
) -> Result<PairSummary, Error> {
    ours()?;
    limit()?;
    let pair = |_| {
        let (ours, limit) = (ours()?, limit()?);
        Ok::<_, Error>(Pair {
            ours: ours.rate(),
            limit: limit.rate(),
            ours_cpu: ours.cpu_seconds_per_gigabyte(),
            limit_cpu: limit.cpu_seconds_per_gigabyte(),
        })
    };
    Ok(PairSummary::of(&(0..pairs).map(pair).collect::<Result<Vec<_>, _>>()?))
}

impl PairSummary {
    /// Sums pairs up.
    #[must_use]
    pub fn of(pairs: &[Pair]) -> Self {
        let quantile = |share: f64, value: &dyn Fn(&Pair) -> f64| {
            let mut values: Vec<f64> = pairs.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            quantile(&values, share)
        };
        let ratio = |pair: &Pair| pair.ours / pair.limit;
        Self {
            pairs: pairs.len(),
            median: quantile(0.5, &ratio),
            lower_quartile: quantile(0.25, &ratio),
            upper_quartile: quantile(0.75, &ratio),
            ours: quantile(0.5, &|pair| pair.ours),
            limit: quantile(0.5, &|pair| pair.limit),
            ours_cpu_seconds_per_gigabyte: quantile(0.5, &|pair| pair.ours_cpu),
            limit_cpu_seconds_per_gigabyte: quantile(0.5, &|pair| pair.limit_cpu),
        }
    }

    /// Whether the median reaches `target` and the lower quartile is not more than a tenth below it.
    #[must_use]
    pub fn reaches(&self, target: f64) -> bool {
        self.median >= target && self.lower_quartile >= 0.9 * target
    }
}

impl fmt::Display for PairSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.3} [{:.3}, {:.3}] of {} pairs: {:.2} beside {:.2} GB/s, CPU {:.3} beside {:.3} s/GB",
            self.median,
            self.lower_quartile,
            self.upper_quartile,
            self.pairs,
            self.ours / 1e9,
            self.limit / 1e9,
            self.ours_cpu_seconds_per_gigabyte,
            self.limit_cpu_seconds_per_gigabyte
        )
    }
}

/// Of sorted values, between neighbours where it falls between them; NaN of none.
pub(super) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = share * last as f64;
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

/// The middle one, or the mean of the two in the middle; NaN of none.
pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    quantile(values, 0.5)
}

/// User and system time of this process and of `processes`, in seconds.
#[must_use]
pub fn cpu_seconds(processes: &[u32]) -> f64 {
    let of = |id: String| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // The name, in parentheses, may hold anything; after it, user time is the 12th field and system time the 13th.
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        let field = |index| after_name.split_whitespace().nth(index).and_then(|text: &str| text.parse::<f64>().ok());
        (field(11).unwrap_or(0.0) + field(12).unwrap_or(0.0)) / rustix::param::clock_ticks_per_second() as f64
    };
    processes.iter().map(u32::to_string).chain(["self".into()]).map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(ratios: &[f64]) -> PairSummary {
        let pair = |&ours: &f64| Pair { ours, limit: 1.0, ..Pair::default() };
        PairSummary::of(&ratios.iter().map(pair).collect::<Vec<_>>())
    }

    #[test]
    fn the_median_of_the_ratios_counts() {
        let summary = summary(&[0.9, 0.1, 1.1, 1.0, 5.0]);
        assert_eq!((summary.median, summary.lower_quartile, summary.upper_quartile), (1.0, 0.9, 1.1));
    }

    #[test]
    fn a_wide_spread_does_not_reach_the_target() {
        assert!(summary(&[0.95, 1.0, 1.05]).reaches(1.0));
        assert!(!summary(&[0.2, 0.3, 1.0, 1.0, 1.0]).reaches(1.0));
        assert!(!summary(&[0.98, 0.99, 0.99]).reaches(1.0));
    }

    #[test]
    fn cpu_time_grows_with_work() {
        let before = cpu_seconds(&[]);
        let mut sum = 0_u64;
        while cpu_seconds(&[]) - before < 0.02 {
            sum = std::hint::black_box((0..1_000_000_u64).sum::<u64>().wrapping_add(sum));
        }
    }
}
