//! The optimum: evict what is read again last. Needs the future, so it is a limit, not a policy.
//! Source: Belady, IBM Systems Journal 5 (1966); a block that is never read again is not kept at all.

use std::collections::BinaryHeap;

const NEVER: usize = usize::MAX;

/// Hits of the best possible cache of `capacity` blocks.
#[must_use]
pub fn belady(accesses: &[u32], capacity: usize) -> usize {
    let next_use = next_uses(accesses);
    // What is kept, by its next use; entries that were read since are stale and differ from `kept`.
    let mut by_next_use: BinaryHeap<(usize, u32)> = BinaryHeap::new();
    let mut kept: Vec<Option<usize>> = vec![None; super::distinct(accesses)];
    let (mut count, mut hits) = (0, 0);
    for (&id, &next) in accesses.iter().zip(&next_use) {
        if kept[id as usize].take().is_some() {
            hits += 1;
            count -= 1;
        }
        if next == NEVER {
            continue;
        }
        kept[id as usize] = Some(next);
        by_next_use.push((next, id));
        count += 1;
        while count > capacity {
            let (next, victim) = by_next_use.pop().expect("every kept block is in the heap");
            if kept[victim as usize] == Some(next) {
                kept[victim as usize] = None;
                count -= 1;
            }
        }
    }
    hits
}

fn next_uses(accesses: &[u32]) -> Vec<usize> {
    let mut latest = vec![NEVER; super::distinct(accesses)];
    let mut next_use: Vec<usize> = accesses
        .iter()
        .enumerate()
        .rev()
        .map(|(position, &id)| std::mem::replace(&mut latest[id as usize], position))
        .collect();
    next_use.reverse();
    next_use
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_optimum_keeps_what_is_read_soonest() {
        // With one place: 0 is kept over 1 because it is read sooner, 2 is never kept.
        assert_eq!(belady(&[0, 1, 0, 2, 0, 1], 1), 2);
        assert_eq!(belady(&[0, 1, 0, 2, 0, 1], 2), 3);
    }
}
