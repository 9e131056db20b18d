//! What the holder of a copy is to do about an object's other copies.
//!
//! Every node has the whole catalog, so each decides about the objects that it holds, and no two about the same one: the
//! holders of an object have an order, another one for each object, and the first that can be read is *responsible*. While views differ two may act: a copy too many is trimmed again.
//! Nothing of a plan is stored, so neither a change of leaders nor a restart interrupts anything.

use std::cmp::Reverse;

use tidepool_metadata::catalog::{NodeState, ObjectLocation, ReplicaLocation};
use tidepool_metadata::{NodeId, VersionId};

use super::placement::{self, Candidate};

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing, or not by this node.
    Nothing,
    /// So many more copies are to be made.
    Copy(usize),
    /// This node's copy is one too many: ask the catalog, which decides, whether it may go.
    Trim,
    /// There are as many as there are to be, and this node is to look whether they could be farther apart: a further one is made
    /// at the better place then, and the one that is closest to others goes as one too many.
    Spread,
}

/// What `me` is to do about an object in which it holds a copy, in a cluster of which the nodes `up` take copies. With
/// `is_patient` copies on absent nodes count as there: those may come back.
#[must_use]
pub fn plan(location: &ObjectLocation, me: NodeId, up: &[Candidate], is_patient: bool) -> Step {
    let is_here = |copy: &&ReplicaLocation| copy.confirmed && copy.node_state != NodeState::Absent;
    let stays = |copy: &&ReplicaLocation| is_here(copy) && copy.node_state == NodeState::Up;
    let Some(mine) = location.replicas.iter().find(|copy| copy.replica.node == me && copy.confirmed) else {
        return Step::Nothing;
    };
    let staying = location.replicas.iter().filter(stays).count();
    let wanted = usize::from(location.copies.wanted()).min(up.len());
    let others = staying - usize::from(stays(&mine));
    let rank = |copy: &&ReplicaLocation| rank(location, copy.replica.node);
    // Of several the least durable goes, which the catalog lets go first, then the one without which the others are farthest
    // apart, then the last one, so that the responsible one stays; one on a node that is to be empty goes wherever it stands.
    let without = |node: NodeId| {
        let rest = location.replicas.iter().filter(stays).map(|copy| copy.replica.node).filter(|&other| other != node);
        placement::closeness(up, &rest.collect::<Vec<_>>())
    };
    let last = |copy: &&ReplicaLocation| (Reverse(copy.durability), Reverse(without(copy.replica.node)), rank(copy));
    if others >= wanted.max(1) {
        let last = || location.replicas.iter().filter(stays).max_by_key(last).map(|copy| copy.replica.node);
        if mine.node_state == NodeState::Draining || last() == Some(me) {
            return Step::Trim;
        }
    }
    let away = |copy: &&ReplicaLocation| copy.node_state == NodeState::Absent || !copy.confirmed;
    let awaited = if is_patient { location.replicas.iter().filter(away).count() } else { 0 };
    let first = |among: &dyn Fn(&&ReplicaLocation) -> bool| location.replicas.iter().filter(among).min_by_key(rank);
    let responsible = first(&stays).or_else(|| first(&is_here));
    let missing = wanted.saturating_sub(staying + awaited);
    match responsible {
        Some(copy) if copy.replica.node == me && missing > 0 => Step::Copy(missing),
        Some(copy)
            if copy.replica.node == me && staying == wanted && staying == location.replicas.len() && wanted > 1 =>
        {
            Step::Spread
        }
        _ => Step::Nothing,
    }
}

/// The place of a node among the holders of an object: work, and what is trimmed, falls to each in turn (SplitMix64's
/// finalizer).
fn rank(location: &ObjectLocation, node: NodeId) -> u64 {
    let VersionId { node: coordinator, sequence, .. } = location.version;
    let mixed =
        (sequence ^ u64::from(coordinator.0) << 32).wrapping_add(u64::from(node.0).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use tidepool_metadata::Durability;
    use tidepool_metadata::catalog::{Copies, Labels};

    use super::*;
    use crate::replicas::tests::located;

    const UP: NodeState = NodeState::Up;
    const DRAINING: NodeState = NodeState::Draining;
    const ABSENT: NodeState = NodeState::Absent;

    fn object(wanted: u8, copies: &[(u32, NodeState, bool)]) -> ObjectLocation {
        located(Copies::new(wanted, 1).expect("legal"), copies)
    }

    /// Nodes 1 to `count`, each in its rack.
    fn nodes(count: usize) -> Vec<Candidate> {
        (1..).take(count).map(|node| in_rack(node, &node.to_string())).collect()
    }

    fn in_rack(node: u32, rack: &str) -> Candidate {
        let labels = Labels { zone: "z".into(), rack: rack.into(), host: String::new() };
        let (capacity_bytes, nvme_bytes, used_bytes) = (1000, 0, 0);
        Candidate { node: NodeId(node), capacity_bytes, nvme_bytes, used_bytes, nvme_used_bytes: None, labels }
    }

    fn plans(object: &ObjectLocation, up: usize, is_patient: bool) -> Vec<(u32, Step)> {
        plans_among(object, &nodes(up), is_patient)
    }

    fn plans_among(object: &ObjectLocation, up: &[Candidate], is_patient: bool) -> Vec<(u32, Step)> {
        let nodes = object.replicas.iter().map(|copy| copy.replica.node);
        let steps = nodes.map(|node| (node.0, plan(object, node, up, is_patient)));
        steps.filter(|(_, step)| !matches!(step, Step::Nothing | Step::Spread)).collect()
    }

    /// What is to be done, by the only node that does something.
    fn only(object: &ObjectLocation, up: usize, is_patient: bool) -> Step {
        match plans(object, up, is_patient)[..] {
            [(_, step)] => step,
            ref plans => panic!("{plans:?}"),
        }
    }

    #[test]
    fn one_holder_makes_what_is_missing() {
        let object = object(3, &[(2, UP, true), (5, UP, true)]);
        assert_eq!(only(&object, 5, false), Step::Copy(1));
        assert_eq!(plans(&object, 2, false), [], "no more copies than nodes");
        assert_eq!(plan(&object, NodeId(9), &nodes(5), false), Step::Nothing, "it has no copy");
    }

    #[test]
    fn an_absent_holder_is_replaced_at_once_or_waited_for() {
        let object = object(2, &[(1, ABSENT, true), (2, UP, true)]);
        assert_eq!(plans(&object, 3, false), [(2, Step::Copy(1))]);
        assert_eq!(plans(&object, 3, true), []);
    }

    #[test]
    fn a_returning_holder_counts_once_it_has_confirmed() {
        let unconfirmed = object(2, &[(1, UP, false), (2, UP, true)]);
        assert_eq!(plans(&unconfirmed, 3, false), [(2, Step::Copy(1))]);
        assert_eq!(plans(&unconfirmed, 3, true), []);
        let back = object(2, &[(1, UP, true), (2, UP, true), (3, UP, true)]);
        assert_eq!(only(&back, 3, true), Step::Trim, "with the copy that was made meanwhile it is one too many");
    }

    #[test]
    fn a_draining_holder_is_replaced_and_then_lets_go() {
        let alone = object(1, &[(1, DRAINING, true)]);
        assert_eq!(plans(&alone, 2, true), [(1, Step::Copy(1))]);
        assert_eq!(plans(&alone, 0, true), [], "nowhere to go");
        let moved = object(1, &[(1, DRAINING, true), (2, UP, true)]);
        assert_eq!(plans(&moved, 2, true), [(1, Step::Trim)]);
        let two = object(2, &[(1, DRAINING, true), (2, UP, true)]);
        assert_eq!(plans(&two, 2, true), [(2, Step::Copy(1))]);
        assert_eq!(plans(&two, 1, true), [(1, Step::Trim)], "as many copies as nodes that stay");
    }

    #[test]
    fn of_several_too_many_one_goes_at_a_time() {
        let object = object(1, &[(1, UP, true), (2, UP, true), (3, UP, true), (4, ABSENT, true)]);
        assert_eq!(only(&object, 3, false), Step::Trim);
    }

    /// The catalog keeps the last durable one, and would refuse for ever.
    #[test]
    fn of_too_many_the_least_durable_one_goes() {
        for durable in 0..3 {
            let mut object = object(2, &[(1, UP, true), (2, UP, true), (3, UP, true)]);
            object.replicas[durable].durability = Durability::Nvme;
            let [(trims, Step::Trim)] = plans(&object, 3, false)[..] else { panic!("one trims") };
            assert_ne!(trims as usize, durable + 1);
        }
    }

    #[test]
    fn one_holder_looks_whether_copies_could_be_farther_apart() {
        let object = object(2, &[(1, UP, true), (2, UP, true)]);
        let looks = |object: &ObjectLocation| {
            (1..4).filter(|&node| plan(object, NodeId(node), &nodes(3), true) == Step::Spread).count()
        };
        assert_eq!(looks(&object), 1);
        assert_eq!(looks(&located(Copies::ONE, &[(1, UP, true)])), 0, "alone");
        assert_eq!(
            looks(&located(object.copies, &[(1, UP, true), (2, UP, true), (3, ABSENT, true)])),
            0,
            "one is away"
        );
    }

    /// Or the copy that was made at a better place would go again.
    #[test]
    fn of_too_many_the_one_that_is_close_to_another_goes() {
        let up = [in_rack(1, "a"), in_rack(2, "a"), in_rack(3, "b")];
        for sequence in 0..50 {
            let mut object = object(2, &[(1, UP, true), (2, UP, true), (3, UP, true)]);
            object.version.sequence = sequence;
            let [(trims, Step::Trim)] = plans_among(&object, &up, false)[..] else { panic!("one trims") };
            assert_ne!(trims, 3);
        }
    }

    #[test]
    fn what_is_trimmed_and_who_copies_falls_to_each_holder_in_turn() {
        let (mut trims, mut copies) = ([0; 4], [0; 4]);
        for sequence in 0..3000 {
            let mut surplus = object(2, &[(1, UP, true), (2, UP, true), (3, UP, true)]);
            surplus.version.sequence = sequence;
            plans(&surplus, 3, false).into_iter().for_each(|(node, _)| trims[node as usize] += 1);
            let mut short = object(4, &[(1, UP, true), (2, UP, true), (3, UP, true)]);
            short.version.sequence = sequence;
            plans(&short, 4, false).into_iter().for_each(|(node, _)| copies[node as usize] += 1);
        }
        assert!(
            trims[1..].iter().chain(&copies[1..]).all(|&count| (900..1100).contains(&count)),
            "{trims:?} {copies:?}"
        );
    }
}
