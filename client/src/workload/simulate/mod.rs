//! Simulated caches over a trace's accesses ([`Trace::accesses`](super::Trace::accesses)): what hit ratio a policy
//! gives at a capacity, and what the best one could.
//!
//! All caches count whole blocks; each access reads a block, and a miss puts it at once.

mod belady;
mod order;
mod two_tier;

pub use belady::belady;
pub use order::{fifo, lru};
pub use two_tier::{Reinsertion, TwoTier, TwoTierHits};

/// Hits as a share of accesses; 0 of none.
#[must_use]
pub fn hit_ratio(hits: usize, accesses: usize) -> f64 {
    hits as f64 / accesses.max(1) as f64
}

fn distinct(accesses: &[u32]) -> usize {
    accesses.iter().max().map_or(0, |&highest| highest as usize + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::trace::recorded;

    /// The table in data/README.md, computed independently.
    const TABLE: [(&str, usize, [f64; 3]); 8] = [
        ("conversation_trace.jsonl", 1_827, [0.2464, 0.0523, 0.0505]),
        ("conversation_trace.jsonl", 9_139, [0.3664, 0.1954, 0.1796]),
        ("conversation_trace.jsonl", 18_279, [0.3664, 0.2784, 0.2558]),
        ("conversation_trace.jsonl", 36_558, [0.3664, 0.3446, 0.3212]),
        ("synthetic_trace.jsonl", 2_196, [0.3956, 0.1548, 0.1513]),
        ("synthetic_trace.jsonl", 4_392, [0.5063, 0.2598, 0.2467]),
        ("synthetic_trace.jsonl", 8_784, [0.6080, 0.3905, 0.3703]),
        ("synthetic_trace.jsonl", 21_962, [0.6396, 0.5888, 0.5503]),
    ];

    #[test]
    fn policies_give_the_hit_ratios_of_the_table() {
        for (name, capacity, expected) in TABLE {
            let accesses = recorded(name).accesses();
            let actual = [belady(&accesses, capacity), lru(&accesses, capacity), fifo(&accesses, capacity)]
                .map(|hits| hit_ratio(hits, accesses.len()));
            for (actual, expected) in actual.into_iter().zip(expected) {
                assert!((actual - expected).abs() < 1e-4, "{name} at {capacity}: {actual:.4}, expected {expected}");
            }
        }
    }

    #[test]
    fn no_capacity_gives_no_hit_and_ample_capacity_all() {
        let accesses = [0, 1, 0, 1, 2, 0];
        for policy in [belady, lru, fifo] {
            assert_eq!(policy(&accesses, 0), 0);
            assert_eq!(policy(&accesses, 3), 3);
        }
    }
}
