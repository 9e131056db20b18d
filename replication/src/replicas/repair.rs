//! What the holder of a copy is to do about an object's other copies.
//!
//! Every node has the whole catalog, so each decides about the objects that it holds, and no two about the same one: the
//! holders of an object have an order, another one for each object, and the first that can be read is *responsible*. While views differ two may act: a copy too many is trimmed again.
//! Nothing of a plan is stored, so neither a change of leaders nor a restart interrupts anything.

use std::cmp::Reverse;

use tidepool_metadata::catalog::{NodeState, ObjectLocation, ReplicaLocation};
use tidepool_metadata::{NodeId, VersionId};

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing, or not by this node.
    Nothing,
    /// So many more copies are to be made.
    Copy(usize),
    /// This node's copy is one too many: ask the catalog, which decides, whether it may go.
    Trim,
}

/// What `me` is to do about an object in which it holds a copy, in a cluster of which so many nodes are `up`. With
/// `is_patient` copies on absent nodes count as there: those may come back.
#[must_use]
pub fn plan(location: &ObjectLocation, me: NodeId, up: usize, is_patient: bool) -> Step {
    let is_here = |copy: &&ReplicaLocation| copy.confirmed && copy.node_state != NodeState::Absent;
    let stays = |copy: &&ReplicaLocation| is_here(copy) && copy.node_state == NodeState::Up;
    let Some(mine) = location.replicas.iter().find(|copy| copy.replica.node == me && copy.confirmed) else {
        return Step::Nothing;
    };
    let staying = location.replicas.iter().filter(stays).count();
    let wanted = usize::from(location.copies.wanted()).min(up);
    let others = staying - usize::from(stays(&mine));
    let rank = |copy: &&ReplicaLocation| rank(location, copy.replica.node);
    // The last one goes, so that the responsible one stays, and of several the least durable, which the catalog lets go first;
    // one on a node that is to be empty goes wherever it stands.
    let last = |copy: &&ReplicaLocation| (Reverse(copy.durability), rank(copy));
    let last = location.replicas.iter().filter(stays).max_by_key(last).map(|copy| copy.replica.node);
    if others >= wanted.max(1) && (mine.node_state == NodeState::Draining || last == Some(me)) {
        return Step::Trim;
    }
    let away = |copy: &&ReplicaLocation| copy.node_state == NodeState::Absent || !copy.confirmed;
    let awaited = if is_patient { location.replicas.iter().filter(away).count() } else { 0 };
    let first = |among: &dyn Fn(&&ReplicaLocation) -> bool| location.replicas.iter().filter(among).min_by_key(rank);
    let responsible = first(&stays).or_else(|| first(&is_here));
    let missing = wanted.saturating_sub(staying + awaited);
    match responsible {
        Some(copy) if copy.replica.node == me && missing > 0 => Step::Copy(missing),
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
    use tidepool_metadata::catalog::Copies;

    use super::*;
    use crate::replicas::tests::located;

    const UP: NodeState = NodeState::Up;
    const DRAINING: NodeState = NodeState::Draining;
    const ABSENT: NodeState = NodeState::Absent;

    fn object(wanted: u8, copies: &[(u32, NodeState, bool)]) -> ObjectLocation {
        located(Copies::new(wanted, 1).expect("legal"), copies)
    }

    fn plans(object: &ObjectLocation, up: usize, is_patient: bool) -> Vec<(u32, Step)> {
        let nodes = object.replicas.iter().map(|copy| copy.replica.node);
        let steps = nodes.map(|node| (node.0, plan(object, node, up, is_patient)));
        steps.filter(|(_, step)| *step != Step::Nothing).collect()
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
        assert_eq!(plan(&object, NodeId(9), 5, false), Step::Nothing, "it has no copy");
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
