//! Further copies of objects that are read much, and when they go again.
//!
//! Each node knows how much is read of the copies that it has. One that gives an object to others as often as
//! [`Limits::reads_per_second`] has another node take a copy, one at a time, as long as there are not
//! [`Limits::copies`] more than the object is to have; readers then take turns. A further copy goes when less than a
//! [`COOLED`]th of that is read of it. So what is read steadily by whoever takes turns does not flap: with a copy more, each of
//! `n + 1` has at least half of what made it hot, and a further copy goes at a quarter. Rates follow what happens with a delay
//! of some seconds ([`Heat`]), which covers pauses between bursts.
//! Nothing of it is stored: a further copy is one too many, which repair lets be while it is read.

use tidepool_metadata::NodeId;
use tidepool_metadata::catalog::{NodeState, ObjectLocation, ReplicaLocation};

/// What is read less by this factor than what makes an object hot is cold.
pub const COOLED: u32 = 4;
/// Seconds that a copy has for its share of the reads, before another one is made and before it may go.
pub const SETTLES: u32 = 2 * FOLLOWS;
/// By which part of the difference a [`Heat`] follows what was read in a second.
const FOLLOWS: u32 = 8;

/// When objects are hot, and how many more copies they get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most copies more than an object is to have; 0: none.
    pub copies: u8,
    /// Reads a second of one copy that make the object hot; not 0.
    pub reads_per_second: u32,
}

impl Limits {
    /// Whether so much that is read of a copy by other nodes asks for another one.
    #[must_use]
    pub fn is_hot(&self, reads_per_second: u32) -> bool {
        self.copies > 0 && reads_per_second >= self.reads_per_second
    }

    /// Whether so much that is read of a further copy keeps it.
    #[must_use]
    pub fn is_warm(&self, reads_per_second: u32) -> bool {
        self.copies > 0 && reads_per_second.saturating_mul(COOLED) >= self.reads_per_second
    }
}

/// Reads a second, smoothed over some seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Heat(u32);

impl Heat {
    /// Counts one read.
    pub fn count(&mut self) {
        self.0 = self.0.saturating_add(1);
    }

    /// A second is over.
    pub fn turn(&mut self) {
        self.0 -= self.0.div_ceil(FOLLOWS);
    }

    /// Nothing was read for long.
    #[must_use]
    pub fn is_cold(self) -> bool {
        self.0 == 0
    }

    /// Reads a second: of what is read steadily, as many.
    #[must_use]
    pub fn reads_per_second(self) -> u32 {
        self.0 / FOLLOWS
    }
}

/// Copies that can be read and stay.
fn staying(location: &ObjectLocation) -> impl Iterator<Item = &ReplicaLocation> {
    location.replicas.iter().filter(|copy| copy.confirmed && copy.node_state == NodeState::Up)
}

/// How many there are more than wanted, in a cluster of which so many nodes are `up`.
fn surplus(location: &ObjectLocation, up: usize) -> usize {
    staying(location).count().saturating_sub(usize::from(location.copies.wanted()).min(up))
}

/// Whether another node is to take a copy of an object, of which others read so much from `me`.
#[must_use]
pub fn wants_copy(location: &ObjectLocation, me: NodeId, up: usize, reads_per_second: u32, limits: &Limits) -> bool {
    limits.is_hot(reads_per_second)
        && staying(location).any(|copy| copy.replica.node == me)
        && location.replicas.len() < up
        // One that is missing, or away, is made anew by repair, and is no further one.
        && staying(location).count() >= usize::from(location.copies.wanted()).min(up)
        && surplus(location, up) < usize::from(limits.copies)
}

/// Whether a copy that is one too many stays, of which so much is read.
#[must_use]
pub fn keeps(location: &ObjectLocation, up: usize, reads_per_second: u32, limits: &Limits) -> bool {
    limits.is_warm(reads_per_second) && surplus(location, up) <= usize::from(limits.copies)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidepool_metadata::catalog::Copies;

    use super::*;
    use crate::replicas::tests::located;

    const UP: NodeState = NodeState::Up;
    const LIMITS: Limits = Limits { copies: 2, reads_per_second: 100 };

    fn object(wanted: u8, copies: &[(u32, NodeState, bool)]) -> ObjectLocation {
        located(Copies::new(wanted, 1).expect("legal"), copies)
    }

    #[test]
    fn heat_is_what_is_read_steadily_and_ends() {
        let mut heat = Heat::default();
        for _ in 0..100 {
            (0..1000).for_each(|_| heat.count());
            heat.turn();
        }
        assert!((870..=1000).contains(&heat.reads_per_second()), "{heat:?}");
        (0..100).for_each(|_| heat.turn());
        assert!(heat.is_cold(), "{heat:?}");
    }

    #[test]
    fn a_hot_object_gets_copies_up_to_the_limit_and_the_nodes() {
        let one = object(1, &[(1, UP, true)]);
        assert!(wants_copy(&one, NodeId(1), 3, 100, &LIMITS));
        assert!(!wants_copy(&one, NodeId(1), 3, 99, &LIMITS));
        assert!(!wants_copy(&one, NodeId(2), 3, 100, &LIMITS), "it has none");
        assert!(!wants_copy(&one, NodeId(1), 1, 100, &LIMITS), "nobody else is there");
        assert!(!wants_copy(&one, NodeId(1), 3, 100, &Limits { copies: 0, ..LIMITS }));
        let three = object(1, &[(1, UP, true), (2, UP, true), (3, UP, true)]);
        assert!(!wants_copy(&three, NodeId(1), 9, 100, &LIMITS));
        let short = object(2, &[(1, UP, true), (2, NodeState::Absent, true)]);
        assert!(!wants_copy(&short, NodeId(1), 9, 100, &LIMITS), "that is repair's");
    }

    #[test]
    fn a_further_copy_stays_while_it_is_read_and_within_the_limit() {
        let two = object(1, &[(1, UP, true), (2, UP, true)]);
        assert!(keeps(&two, 3, 25, &LIMITS));
        assert!(!keeps(&two, 3, 24, &LIMITS));
        assert!(!keeps(&two, 3, 100, &Limits { copies: 0, ..LIMITS }));
        let four = object(1, &[(1, UP, true), (2, UP, true), (3, UP, true), (4, UP, true)]);
        assert!(!keeps(&four, 9, 100, &LIMITS));
    }

    proptest! {
        /// Under a steady load, of which each copy has its turn, copies are made and then it is still: none is dropped, none
        /// made again. Once nobody reads, those go that are too many, and no other.
        #[test]
        fn copies_do_not_flap(
            wanted in 1..4_u8, nodes in 1..8_usize, load in 0..4000_u32, limit in 1..500_u32, copies in 0..5_u8,
        ) {
            let limits = Limits { copies, reads_per_second: limit };
            let base = usize::from(wanted).min(nodes);
            let mut heats = vec![Heat::default(); base];
            let mut changes = Vec::new();
            for second in 0..400_u32 {
                let copies_now: Vec<_> = (1..).take(heats.len()).map(|node| (node, UP, true)).collect();
                let location = object(wanted, &copies_now);
                let share = if second < 120 { load / heats.len() as u32 } else { 0 };
                for heat in &mut heats {
                    (0..share).for_each(|_| heat.count());
                    heat.turn();
                }
                let rate = |at: usize, heats: &[Heat]| heats[at].reads_per_second();
                // What each node asks for, by what it alone knows; the last copy is the one that may go.
                let makes = (0..heats.len()).any(|at| wants_copy(&location, NodeId(at as u32 + 1), nodes, rate(at, &heats), &limits));
                let drops = heats.len() > base && !keeps(&location, nodes, rate(heats.len() - 1, &heats), &limits);
                let is_settled = changes.last().is_none_or(|&(at, _)| second >= at + SETTLES);
                prop_assert!(!(makes && drops && is_settled));
                if makes && is_settled {
                    heats.push(Heat::default());
                    changes.push((second, true));
                } else if drops && is_settled {
                    heats.pop();
                    changes.push((second, false));
                }
            }
            let (made, dropped): (Vec<_>, Vec<_>) = changes.into_iter().partition(|&(_, is_made)| is_made);
            prop_assert!(made.len() <= usize::from(copies) && base + made.len() <= nodes.max(base));
            prop_assert!(made.iter().all(|&(at, _)| at < 120) && dropped.iter().all(|&(at, _)| at >= 120), "{made:?} {dropped:?}");
            prop_assert_eq!(heats.len(), base);
        }
    }
}
