//! Which nodes get the copies of an object.
//!
//! Copies go as far apart as the nodes' labels allow: another zone before another rack, that before another host, that
//! before another node. Among nodes that are equally far, two are drawn and the one that has more room is taken ("the power
//! of two choices": Mitzenmacher, IEEE TPDS 12(10), 2001), so that a node that has just come in gets twice its share at most,
//! and not all there is.

use tidepool_metadata::NodeId;
use tidepool_metadata::catalog::{Labels, NodeStat, NodeState};

/// A node that could hold a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub node: NodeId,
    /// What it lends, in bytes.
    pub capacity_bytes: u64,
    /// Bytes of the copies that the catalog lists there.
    pub used_bytes: u64,
    /// Where it stands.
    pub labels: Labels,
}

/// The nodes that take copies: those that are up.
#[must_use]
pub fn candidates(nodes: &[NodeStat]) -> Vec<Candidate> {
    let up = nodes.iter().filter(|node| node.state == NodeState::Up);
    up.map(|node| Candidate {
        node: node.node,
        capacity_bytes: node.tiers.iter().map(|tier| tier.capacity_bytes).sum(),
        used_bytes: node.bytes,
        labels: node.labels.clone(),
    })
    .collect()
}

impl Candidate {
    /// How close it is to a node that has a copy: 3 on one host, 2 in one rack, 1 in one zone, else 0. A name says nothing
    /// outside the domain that it belongs to, and a label that is missing says nothing at all.
    fn closeness(&self, other: &Self) -> usize {
        let (one, other) = (&self.labels, &other.labels);
        let levels = [(&one.zone, &other.zone), (&one.rack, &other.rack), (&one.host, &other.host)];
        let mut closest = 0;
        for (level, (one, other)) in (1..).zip(levels) {
            if one.is_empty() || other.is_empty() {
                continue;
            }
            if one != other {
                break;
            }
            closest = level;
        }
        closest
    }

    /// Free share of what it lends, in millionths.
    fn free(&self) -> u64 {
        let free = self.capacity_bytes.saturating_sub(self.used_bytes);
        free.saturating_mul(1_000_000) / self.capacity_bytes.max(1)
    }
}

/// All nodes that could take a copy of an object that `holders` have, best first: take as many as are needed from the
/// front, and go on when one fails. `random` gives any numbers.
#[must_use]
pub fn order(candidates: &[Candidate], holders: &[NodeId], mut random: impl FnMut() -> u64) -> Vec<NodeId> {
    let (held, mut rest): (Vec<&Candidate>, Vec<&Candidate>) =
        candidates.iter().partition(|candidate| holders.contains(&candidate.node));
    let mut taken = held;
    let mut order = Vec::with_capacity(rest.len());
    while !rest.is_empty() {
        let closeness = |candidate: &Candidate| taken.iter().map(|other| candidate.closeness(other)).max().unwrap_or(0);
        let least = rest.iter().map(|candidate| closeness(candidate)).min().unwrap_or(0);
        let far: Vec<usize> = (0..rest.len()).filter(|&place| closeness(rest[place]) == least).collect();
        #[expect(clippy::cast_possible_truncation, reason = "below the number of nodes")]
        let mut draw = || far[(random() % far.len() as u64) as usize];
        let (one, other) = (draw(), draw());
        let better = if rest[other].free() > rest[one].free() { other } else { one };
        let chosen = rest.remove(better);
        taken.push(chosen);
        order.push(chosen.node);
    }
    order
}

/// Numbers that follow from `seed`, such as a key's hash, to draw nodes by (xorshift64*).
pub fn numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(node: u32, used_bytes: u64, labels: [&str; 3]) -> Candidate {
        let [zone, rack, host] = labels.map(str::to_owned);
        Candidate { node: NodeId(node), capacity_bytes: 1000, used_bytes, labels: Labels { zone, rack, host } }
    }

    #[test]
    fn every_other_node_is_named_once_and_no_holder() {
        let candidates: Vec<Candidate> = (1..=7).map(|node| candidate(node, 0, ["", "", ""])).collect();
        for seed in 0..50 {
            let mut order = order(&candidates, &[NodeId(3), NodeId(99)], numbers(seed));
            order.sort();
            assert_eq!(order, [1, 2, 4, 5, 6, 7].map(NodeId));
        }
    }

    #[test]
    fn copies_go_as_far_apart_as_they_can() {
        let candidates = [
            candidate(1, 0, ["east", "r1", "h1"]),
            candidate(2, 0, ["east", "r1", "h1"]),
            candidate(3, 900, ["east", "r1", "h2"]),
            candidate(4, 900, ["east", "r2", "h3"]),
            candidate(5, 900, ["west", "r9", "h9"]),
        ];
        for seed in 0..50 {
            let order = order(&candidates, &[NodeId(1)], numbers(seed));
            assert_eq!(order, [5, 4, 3, 2].map(NodeId), "however much room the close ones have");
        }
    }

    #[test]
    fn one_host_is_one_host_whatever_other_labels_are_missing() {
        let candidates = [
            candidate(1, 0, ["", "", "h1"]),
            candidate(2, 0, ["", "", "h1"]),
            candidate(3, 900, ["", "r1", "h2"]),
            candidate(4, 900, ["", "", ""]),
        ];
        for seed in 0..50 {
            assert_eq!(order(&candidates, &[NodeId(1)], numbers(seed)).last(), Some(&NodeId(2)));
        }
    }

    #[test]
    fn racks_and_hosts_of_the_same_name_in_two_zones_are_two() {
        let candidates = [
            candidate(1, 0, ["east", "r1", "h1"]),
            candidate(2, 900, ["west", "r1", "h1"]),
            candidate(3, 0, ["east", "r2", "h2"]),
        ];
        for seed in 0..50 {
            assert_eq!(order(&candidates, &[NodeId(1)], numbers(seed)), [2, 3].map(NodeId));
        }
    }

    #[test]
    fn a_node_that_has_just_come_in_gets_more_and_not_all() {
        let mut candidates: Vec<Candidate> = (1..=8).map(|node| candidate(node, 800, ["", "", ""])).collect();
        candidates.push(candidate(9, 0, ["", "", ""]));
        let mut random = numbers(5);
        let count = 4000;
        let first = (0..count).filter(|_| order(&candidates, &[], &mut random)[0] == NodeId(9)).count();
        let share = first as f64 / f64::from(count);
        // Drawn first or second of nine: 1 - (8/9)^2.
        assert!((0.17..0.25).contains(&share), "{share}");
    }
}
