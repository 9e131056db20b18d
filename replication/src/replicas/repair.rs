//! What the holder of a copy is to do about an object's other copies.
//!
//! Every node has the whole catalog, so each decides about the objects that it holds, and no two about the same one: the
//! holders of an object have an order, another one for each object. The first that can be read is *responsible* for copies that
//! are missing; one that is too many, or too close to others, is its own holder's to let go or to move. While views differ two may act: a copy
//! too many is trimmed again.
//! Nothing of a plan is stored, so neither a change of leaders nor a restart interrupts anything.

use std::cmp::Reverse;

use tidepool_metadata::catalog::{NodeState, ObjectLocation, ReplicaLocation};
use tidepool_metadata::{NodeId, VersionId};

use super::placement::{self, Candidate};

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing, or not by this node.
    Nothing,
    /// So many more copies are to be made.
    Copy(usize),
    /// This node's copy is one too many: ask the catalog, which decides, whether it may go.
    Trim,
    /// There are as many as there are to be, and this node's would be farther from the others on one of these: a further one is
    /// to be made there, and this node's is one too many then. Whose copy goes acts, so that nobody waits for another's sweep.
    Move(Vec<NodeId>),
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
        _ if staying == wanted && staying == location.replicas.len() && wanted > 1 => farther(location, me, up),
        _ => Step::Nothing,
    }
}

/// Whether, and where to, the copy of `me` is to move: it has to be the one that goes when there is one more.
fn farther(location: &ObjectLocation, me: NodeId, up: &[Candidate]) -> Step {
    let nodes: Vec<NodeId> = location.replicas.iter().map(|copy| copy.replica.node).collect();
    let least = location.replicas.iter().map(|copy| copy.durability).min();
    let leaving = location.replicas.iter().filter(|copy| Some(copy.durability) == least);
    let mut leaving: Vec<NodeId> = leaving.map(|copy| copy.replica.node).collect();
    leaving.sort_by_key(|&node| Reverse(rank(location, node)));
    match placement::farther(up, &nodes, &leaving) {
        Some((leaver, targets)) if leaver == me => Step::Move(targets),
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
        steps.filter(|(_, step)| *step != Step::Nothing).collect()
    }

    /// What is to be done, by the only node that does something.
    fn only(object: &ObjectLocation, up: usize, is_patient: bool) -> Step {
        match &plans(object, up, is_patient)[..] {
            [(_, step)] => step.clone(),
            plans => panic!("{plans:?}"),
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

    /// Or the further copy would stay until the other holder happens to look, or go again.
    #[test]
    fn whose_copy_moves_apart_is_whose_goes_then() {
        let up = [in_rack(1, "a"), in_rack(2, "a"), in_rack(3, "b"), in_rack(4, "b")];
        let mut moved = [0; 3];
        for sequence in 0..100 {
            let close = |copies: &[(u32, NodeState, bool)]| {
                let mut object = object(2, copies);
                object.version.sequence = sequence;
                object
            };
            let both = close(&[(1, UP, true), (2, UP, true)]);
            let [(moves, Step::Move(targets))] = &plans_among(&both, &up, false)[..] else { panic!("one moves") };
            assert_eq!(targets[..], [NodeId(3), NodeId(4)]);
            moved[*moves as usize] += 1;
            for target in [3, 4] {
                let three = close(&[(1, UP, true), (2, UP, true), (target, UP, true)]);
                assert_eq!(plans_among(&three, &up, false), [(*moves, Step::Trim)]);
            }
        }
        assert!(moved[1].min(moved[2]) > 25, "each in turn: {moved:?}");
    }

    #[test]
    fn copies_stay_where_they_are_while_one_is_away_alone_or_as_far_apart_as_can_be() {
        let up = [in_rack(1, "a"), in_rack(2, "a"), in_rack(3, "b")];
        let moves = |copies: &[(u32, NodeState, bool)]| plans_among(&object(2, copies), &up, true);
        assert_eq!(moves(&[(1, UP, true), (2, UP, true)]).len(), 1);
        assert_eq!(moves(&[(1, UP, true), (3, UP, true)]), []);
        assert_eq!(moves(&[(1, UP, true), (2, UP, true), (3, ABSENT, true)]), []);
        assert_eq!(plans_among(&object(1, &[(1, UP, true)]), &up, true), []);
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
