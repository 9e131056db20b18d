//! Which nodes get the copies of an object.
//!
//! Copies go as far apart as the nodes' labels allow: another zone before another rack, that before another host, that
//! before another node. Among nodes that are equally far a [`Policy`] decides; by default two are drawn and the one that has
//! more room is taken ("the power of two choices": Mitzenmacher, IEEE TPDS 12(10), 2001). Whatever it is, a node that has just
//! come in gets twice its share at most, and not all there is.

use std::cmp::Reverse;

use tidepool_metadata::catalog::{Labels, NodeStat, NodeState};
use tidepool_metadata::{NodeId, TierKind};

/// What decides between nodes that could take a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Of the nodes that are farthest from the other copies, two drawn at random, and of these the one with more room.
    #[default]
    TwoChoices,
    /// Of the farthest, the one with most room.
    FreeFirst,
    /// Of the farthest, the one with most room on NVMe.
    NvmeFreeFirst,
    /// Of the nearest that are not on one host with a copy, as with two choices: less traffic between racks and zones, which is
    /// bought with copies that are lost together.
    LocalFirst,
}

/// A node that could hold a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub node: NodeId,
    /// What it lends, in bytes.
    pub capacity_bytes: u64,
    /// Of that, on NVMe.
    pub nvme_bytes: u64,
    /// Bytes of the copies that the catalog lists there.
    pub used_bytes: u64,
    /// Bytes that lie on NVMe, if the node has told lately.
    pub nvme_used_bytes: Option<u64>,
    /// Where it stands.
    pub labels: Labels,
}

/// Free share, in millionths, that a newcomer has more than the median of the nodes.
const NEWCOMER: u64 = 100_000;
/// Free shares that differ by less are equal.
const STEP: u64 = 1000;

/// The nodes that take copies: those that are up. `nvme_used`: bytes that lie on a node's NVMe, if that is known.
#[must_use]
pub fn candidates(nodes: &[NodeStat], nvme_used: impl Fn(NodeId) -> Option<u64>) -> Vec<Candidate> {
    let up = nodes.iter().filter(|node| node.state == NodeState::Up);
    up.map(|node| {
        let lent = |counts: fn(TierKind) -> bool| {
            node.tiers.iter().filter(|tier| counts(tier.kind)).map(|tier| tier.capacity_bytes).sum()
        };
        Candidate {
            node: node.node,
            capacity_bytes: lent(|_| true),
            nvme_bytes: lent(|kind| kind == TierKind::Nvme),
            used_bytes: node.bytes,
            nvme_used_bytes: nvme_used(node.node),
            labels: node.labels.clone(),
        }
    })
    .collect()
}

/// The nodes that a caller would have, in its order. It names each by its number, the address of its gRPC, that without the
/// port, or the label of its host; other names name none.
#[must_use]
pub fn preferred(nodes: &[NodeStat], names: &[String]) -> Vec<NodeId> {
    let is_named = |node: &NodeStat, name: &str| {
        let address = &node.addresses.grpc;
        let host = address.rsplit_once(':').map_or("", |(host, _)| host);
        [node.node.to_string().as_str(), address, host, &node.labels.host].contains(&name)
    };
    let named = |name| nodes.iter().filter(move |node| is_named(node, name)).map(|node| node.node);
    names.iter().filter(|name| !name.is_empty()).flat_map(|name| named(name)).collect()
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
        share(self.capacity_bytes.saturating_sub(self.used_bytes), self.capacity_bytes)
    }

    /// Free share of its NVMe tier; of a node that has not told, as if that had what memory has no room for.
    fn nvme_free(&self) -> u64 {
        let estimate = || self.used_bytes.saturating_sub(self.capacity_bytes - self.nvme_bytes);
        let used = self.nvme_used_bytes.unwrap_or_else(estimate);
        share(self.nvme_bytes.saturating_sub(used), self.nvme_bytes)
    }
}

fn share(part: u64, whole: u64) -> u64 {
    part.saturating_mul(1_000_000) / whole.max(1)
}

/// How many pairs of `nodes` are on one host, in one rack of two hosts, in one zone of two racks: the less, in this order, the
/// farther apart they are.
fn pairs(nodes: &[&Candidate]) -> [usize; 3] {
    let mut pairs = [0; 3];
    for (place, one) in nodes.iter().enumerate() {
        for other in &nodes[place + 1..] {
            if let level @ 1.. = one.closeness(other) {
                pairs[3 - level] += 1;
            }
        }
    }
    pairs
}

fn among<'a>(candidates: &'a [Candidate], nodes: &[NodeId]) -> Vec<&'a Candidate> {
    candidates.iter().filter(|candidate| nodes.contains(&candidate.node)).collect()
}

/// How close `nodes` are to each other: the less, the farther apart. Of a node that is no candidate nothing is known.
#[must_use]
pub fn closeness(candidates: &[Candidate], nodes: &[NodeId]) -> [usize; 3] {
    pairs(&among(candidates, nodes))
}

/// Which of `leaving`, the first of equal ones, should give up the copy that it has of an object that `nodes` have, and the nodes
/// with room that should rather have it: farther from the copies that are left, all as far. None: the copies are as far apart as
/// they can be.
#[must_use]
pub fn farther(candidates: &[Candidate], nodes: &[NodeId], leaving: &[NodeId]) -> Option<(NodeId, Vec<NodeId>)> {
    let held = among(candidates, nodes);
    let mut best = pairs(&held);
    if best == [0; 3] {
        return None;
    }
    let mut found: Option<(NodeId, Vec<NodeId>)> = None;
    let has_room = |candidate: &&Candidate| !nodes.contains(&candidate.node) && candidate.free() >= NEWCOMER;
    for target in candidates.iter().filter(has_room) {
        let without = |left: NodeId| -> Vec<&Candidate> {
            held.iter().copied().filter(|copy| copy.node != left).chain([target]).collect()
        };
        let Some((closeness, left)) =
            leaving.iter().map(|&left| (pairs(&without(left)), left)).min_by_key(|(closeness, _)| *closeness)
        else {
            break;
        };
        match &mut found {
            _ if closeness < best => (best, found) = (closeness, Some((left, vec![target.node]))),
            Some((leaver, targets)) if closeness == best && *leaver == left => targets.push(target.node),
            _ => {}
        }
    }
    found
}

/// All nodes that could take a copy of an object that `holders` have, best first: take as many as are needed from the
/// front, and go on when one fails. `random` gives any numbers.
#[must_use]
pub fn order(
    candidates: &[Candidate],
    holders: &[NodeId],
    policy: Policy,
    mut random: impl FnMut() -> u64,
) -> Vec<NodeId> {
    let (held, mut rest): (Vec<&Candidate>, Vec<&Candidate>) =
        candidates.iter().partition(|candidate| holders.contains(&candidate.node));
    let mut taken = held;
    let mut order = Vec::with_capacity(rest.len());
    while !rest.is_empty() {
        let closeness = |candidate: &Candidate| taken.iter().map(|other| candidate.closeness(other)).max().unwrap_or(0);
        let distance = |candidate: &Candidate| match (policy, closeness(candidate)) {
            (Policy::LocalFirst, same_host @ 3..) => same_host,
            (Policy::LocalFirst, closeness) => 2 - closeness,
            (_, closeness) => closeness,
        };
        let least = rest.iter().map(|candidate| distance(candidate)).min().unwrap_or(0);
        let among: Vec<usize> = (0..rest.len()).filter(|&place| distance(rest[place]) == least).collect();
        let chosen = match policy {
            Policy::TwoChoices | Policy::LocalFirst => {
                let mut draw = || among[below(among.len(), &mut random)];
                let (one, other) = (draw(), draw());
                if rest[other].free() > rest[one].free() { other } else { one }
            }
            Policy::FreeFirst => freest(&among, |place| rest[place].free(), &mut random),
            Policy::NvmeFreeFirst => freest(&among, |place| rest[place].nvme_free(), &mut random),
        };
        let chosen = rest.remove(chosen);
        taken.push(chosen);
        order.push(chosen.node);
    }
    order
}

/// The place with the most room, and any of several that have as much. But a newcomer, which has far more than half of
/// them have, only for two of as many objects as there are places: so it gets twice its share, as with two choices, and not all.
fn freest(among: &[usize], free: impl Fn(usize) -> u64, random: &mut impl FnMut() -> u64) -> usize {
    let mut by_free = among.to_vec();
    by_free.sort_by_cached_key(|&place| (Reverse(free(place) / STEP), random()));
    let usual = free(by_free[(by_free.len() - 1) / 2]);
    let is_admitted = |place: &usize| free(*place) <= usual + NEWCOMER || below(among.len(), &mut *random) < 2;
    by_free.iter().copied().find(is_admitted).unwrap_or(by_free[0])
}

#[expect(clippy::cast_possible_truncation, reason = "below a number of nodes")]
fn below(count: usize, random: &mut impl FnMut() -> u64) -> usize {
    (random() % count as u64) as usize
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
        Candidate {
            node: NodeId(node),
            capacity_bytes: 1000,
            nvme_bytes: 500,
            used_bytes,
            nvme_used_bytes: None,
            labels: Labels { zone, rack, host },
        }
    }

    #[test]
    fn every_other_node_is_named_once_and_no_holder() {
        let candidates: Vec<Candidate> = (1..=7).map(|node| candidate(node, 0, ["", "", ""])).collect();
        for seed in 0..50 {
            let mut order = order(&candidates, &[NodeId(3), NodeId(99)], Policy::TwoChoices, numbers(seed));
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
            let order = order(&candidates, &[NodeId(1)], Policy::TwoChoices, numbers(seed));
            assert_eq!(order, [5, 4, 3, 2].map(NodeId), "however much room the close ones have");
        }
    }

    #[test]
    fn a_copy_that_is_close_to_another_one_should_be_farther_away() {
        let mut candidates = vec![
            candidate(1, 0, ["east", "r1", "h1"]),
            candidate(2, 0, ["east", "r1", "h1"]),
            candidate(3, 0, ["east", "r1", "h2"]),
        ];
        let at = |candidates: &[Candidate], nodes: &[u32], leaving: &[u32]| -> Vec<u32> {
            let [nodes, leaving] = [nodes, leaving].map(|nodes| nodes.iter().copied().map(NodeId).collect::<Vec<_>>());
            let targets = farther(candidates, &nodes, &leaving).map(|(_, targets)| targets);
            targets.into_iter().flatten().map(|node| node.0).collect()
        };
        assert_eq!(at(&candidates, &[1], &[1]), [], "alone");
        assert_eq!(at(&candidates, &[1, 2], &[1, 2]), [3], "on one host");
        let leaver = |leaving: [u32; 2]| {
            farther(&candidates, &[1, 2].map(NodeId), &leaving.map(NodeId)).map(|(leaver, _)| leaver.0)
        };
        assert_eq!((leaver([1, 2]), leaver([2, 1])), (Some(1), Some(2)), "the first of equal ones");
        assert_eq!(at(&candidates, &[1, 3], &[1, 3]), [], "in one rack, as all are");
        candidates.push(candidate(4, 0, ["west", "r1", "h1"]));
        candidates.push(candidate(5, 0, ["west", "r2", "h1"]));
        assert_eq!(at(&candidates, &[1, 3], &[3]), [4, 5]);
        assert_eq!(at(&candidates, &[1, 4], &[1, 4]), []);
        assert_eq!(at(&candidates, &[1, 2, 4], &[1, 2, 4]), [5], "in one zone rather than in one rack");
        assert_eq!(at(&candidates, &[1, 2, 4], &[4]), [], "the two that are close stay");
        candidates[3].used_bytes = 950;
        assert_eq!(at(&candidates, &[1, 3], &[1, 3]), [5], "the other one is nearly full");
        candidates.pop();
        assert_eq!(at(&candidates, &[1, 3], &[1, 3]), []);
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
            assert_eq!(order(&candidates, &[NodeId(1)], Policy::TwoChoices, numbers(seed)).last(), Some(&NodeId(2)));
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
            assert_eq!(order(&candidates, &[NodeId(1)], Policy::TwoChoices, numbers(seed)), [2, 3].map(NodeId));
        }
    }

    const POLICIES: [Policy; 4] = [Policy::TwoChoices, Policy::FreeFirst, Policy::NvmeFreeFirst, Policy::LocalFirst];

    /// How often each of `candidates` is the first to get a copy.
    fn firsts(candidates: &[Candidate], policy: Policy, count: u32) -> Vec<f64> {
        let mut random = numbers(5);
        let mut firsts = vec![0.0; candidates.len()];
        for _ in 0..count {
            let first = order(candidates, &[], policy, &mut random)[0];
            let place = candidates.iter().position(|candidate| candidate.node == first).expect("one of them");
            firsts[place] += 1.0 / f64::from(count);
        }
        firsts
    }

    #[test]
    fn room_decides_where_it_is_to() {
        let mut candidates: Vec<Candidate> = (1..=4).map(|node| candidate(node, 700, ["", "", ""])).collect();
        candidates[2].used_bytes = 640;
        assert!((0.99..).contains(&firsts(&candidates, Policy::FreeFirst, 500)[2]));
        // Its memory is larger, so that less of what it has lies on its disk.
        candidates[1].nvme_bytes = 450;
        candidates[1].used_bytes = 660;
        candidates[2].used_bytes = 650;
        assert!((0.99..).contains(&firsts(&candidates, Policy::NvmeFreeFirst, 500)[1]));
        candidates[1].nvme_bytes = 0;
        assert!(firsts(&candidates, Policy::NvmeFreeFirst, 500)[1] < 0.01, "it has no disk");
        candidates[3].nvme_used_bytes = Some(130);
        assert!((0.99..).contains(&firsts(&candidates, Policy::NvmeFreeFirst, 500)[3]), "it says so itself");
    }

    #[test]
    fn nodes_with_as_much_room_take_turns() {
        let candidates: Vec<Candidate> = (1..=4).map(|node| candidate(node, 700, ["", "", ""])).collect();
        for policy in POLICIES {
            let firsts = firsts(&candidates, policy, 2000);
            assert!(firsts.iter().all(|share| (0.2..0.3).contains(share)), "{policy:?}: {firsts:?}");
        }
    }

    #[test]
    fn near_nodes_are_first_where_that_is_asked_for_but_none_on_one_host() {
        let candidates = [
            candidate(1, 0, ["east", "r1", "h1"]),
            candidate(2, 0, ["east", "r1", "h1"]),
            candidate(3, 900, ["east", "r1", "h2"]),
            candidate(4, 900, ["east", "r2", "h3"]),
            candidate(5, 0, ["west", "r9", "h9"]),
        ];
        for seed in 0..50 {
            let order = order(&candidates, &[NodeId(1)], Policy::LocalFirst, numbers(seed));
            assert_eq!(order, [3, 4, 5, 2].map(NodeId));
        }
    }

    #[test]
    fn preferred_nodes_are_named_in_several_ways() {
        let node = |number: u32, grpc: &str, host: &str| NodeStat {
            node: NodeId(number),
            incarnation: tidepool_metadata::Incarnation(1),
            state: NodeState::Up,
            announcing: false,
            addresses: tidepool_metadata::catalog::NodeAddresses { grpc: grpc.into(), ..Default::default() },
            tiers: Vec::new(),
            labels: Labels { host: host.into(), ..Labels::default() },
            replicas: 0,
            bytes: 0,
            free_list: 0,
        };
        let nodes = [node(1, "10.0.0.1:7420", ""), node(2, "10.0.0.2:7420", "left"), node(3, "10.0.0.2:7520", "right")];
        let named = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            preferred(&nodes, &names).into_iter().map(|node| node.0).collect::<Vec<_>>()
        };
        assert_eq!(named(&["right", "00000001"]), [3, 1]);
        assert_eq!(named(&["10.0.0.2:7420"]), [2]);
        assert_eq!(named(&["10.0.0.2"]), [2, 3]);
        assert_eq!(named(&["", "nobody", "1"]), [0; 0]);
    }

    proptest::proptest! {
        /// Moving copies to where they should be comes to an end, each time with copies farther apart.
        #[test]
        fn moving_copies_apart_ends(places in proptest::collection::vec((0..3_u8, 0..3_u8, 0..3_u8), 1..9), count in 1..5_usize) {
            let label = |number: u8| if number == 0 { String::new() } else { number.to_string() };
            let candidates: Vec<Candidate> = (1..)
                .zip(&places)
                .map(|(node, &(zone, rack, host))| candidate(node, 0, [&label(zone), &label(rack), &label(host)]))
                .collect();
            let mut nodes: Vec<NodeId> = candidates.iter().take(count).map(|candidate| candidate.node).collect();
            for _ in 0..100 {
                let before = closeness(&candidates, &nodes);
                let Some((leaver, targets)) = farther(&candidates, &nodes, &nodes) else { return Ok(()) };
                nodes.push(targets[0]);
                nodes.retain(|&node| node != leaver);
                proptest::prop_assert!(closeness(&candidates, &nodes) < before);
            }
            proptest::prop_assert!(false, "it goes on for ever");
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(24))]
        /// Whatever there is and whatever is asked for, of nodes that stand alike none gets more than about two of its shares, the
        /// newcomers among them, while they are newcomers.
        #[test]
        fn newcomers_take_their_share_gradually(
            policy in proptest::sample::select(&POLICIES[..]),
            old in 3_u32..12,
            new in 1_u32..3,
            used in 400_u64..990,
        ) {
            let all = old + new;
            let mut candidates: Vec<Candidate> = (1..=all).map(|node| candidate(node, 0, ["", "", ""])).collect();
            candidates[..old as usize].iter_mut().for_each(|node| (node.used_bytes, node.nvme_bytes) = (used, 1000));
            candidates[old as usize..].iter_mut().for_each(|node| node.nvme_bytes = 1000);
            let firsts = firsts(&candidates, policy, 2000);
            let share = 1.0 / f64::from(all);
            for newcomer in &firsts[old as usize..] {
                proptest::prop_assert!((share..2.4 * share).contains(newcomer), "{firsts:?}");
            }
        }

        #[test]
        fn every_policy_names_each_node_that_is_no_holder_once(
            policy in proptest::sample::select(&POLICIES[..]),
            used in proptest::collection::vec(0_u64..2000, 1..12),
            seed in proptest::prelude::any::<u64>(),
        ) {
            let candidates: Vec<Candidate> =
                (1..).zip(&used).map(|(node, &used)| candidate(node, used, ["", "", ""])).collect();
            let mut order = order(&candidates, &[NodeId(1)], policy, numbers(seed));
            order.sort();
            proptest::prop_assert_eq!(order, candidates[1..].iter().map(|candidate| candidate.node).collect::<Vec<_>>());
        }
    }
}
