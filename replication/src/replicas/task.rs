//! What is to be done next for a copy or a move that somebody asked for.
//!
//! The leader asks this of each open task, by its own catalog, and has done what it says; whether a task is done, and whether the
//! source of a move may let go, is decided by the catalog alone (`Settle`). Nothing of a step is stored: another leader, or the same one
//! after a restart, asks again.

use tidepool_metadata::NodeId;
use tidepool_metadata::catalog::{
    NodeStat, NodeState, ObjectLocation, ReplicaLocation, TaskFailure, TaskKind, TaskRequest,
};

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing now: nobody can be read, or a target is away and waited for.
    Wait,
    /// Ask the catalog whether the task has ended.
    Settle,
    /// It can't be done any more.
    Fail(TaskFailure),
    /// Have these nodes pull copies from that one.
    Pull {
        /// Who has a copy.
        source: NodeId,
        /// Who is to have one.
        targets: Vec<NodeId>,
    },
}

/// What is to be done for a task of the version at `location`; `None`: that is not the current one. Nodes that are `awaited` are
/// away and may come back.
#[must_use]
pub fn plan(request: &TaskRequest, location: Option<&ObjectLocation>, nodes: &[NodeStat], awaited: &[NodeId]) -> Step {
    let Some(location) = location else { return Step::Settle };
    let copy_on = |node: NodeId| location.replicas.iter().find(|copy| copy.replica.node == node);
    let counts = |copy: &ReplicaLocation| copy.confirmed && copy.node_state == NodeState::Up;
    let missing = request.targets.iter().copied().filter(|&target| !copy_on(target).is_some_and(counts));
    let mut targets = Vec::new();
    let mut is_done = true;
    for target in missing {
        is_done = false;
        match nodes.iter().find(|node| node.node == target).map(|node| node.state) {
            None => return Step::Fail(TaskFailure::TargetAbsent),
            Some(NodeState::Draining) => return Step::Fail(TaskFailure::TargetDraining),
            Some(NodeState::Absent) if !awaited.contains(&target) => return Step::Fail(TaskFailure::TargetAbsent),
            Some(NodeState::Absent) => {}
            // One that has not said yet whether it has its copy still is not given another.
            Some(NodeState::Up) => targets.extend(copy_on(target).is_none().then_some(target)),
        }
    }
    let is_lost = request.kind == TaskKind::Move && request.source.is_some_and(|source| copy_on(source).is_none());
    if is_done || is_lost {
        return Step::Settle;
    }
    let reads = |copy: &&ReplicaLocation| copy.confirmed && copy.node_state != NodeState::Absent;
    let asked_for = |copy: &&ReplicaLocation| (Some(copy.replica.node) != request.source, copy.node_state);
    match location.replicas.iter().filter(reads).min_by_key(asked_for) {
        Some(copy) if !targets.is_empty() => Step::Pull { source: copy.replica.node, targets },
        _ => Step::Wait,
    }
}

#[cfg(test)]
mod tests {
    use tidepool_metadata::catalog::{Copies, Labels, NodeAddresses, TaskId};
    use tidepool_metadata::{Incarnation, ObjectKey, TenantId};

    use super::*;
    use crate::replicas::tests::located;

    const UP: NodeState = NodeState::Up;
    const DRAINING: NodeState = NodeState::Draining;
    const ABSENT: NodeState = NodeState::Absent;

    fn nodes(states: &[NodeState]) -> Vec<NodeStat> {
        let node = |(number, &state): (u32, &NodeState)| NodeStat {
            node: NodeId(number),
            incarnation: Incarnation(1),
            state,
            announcing: false,
            addresses: NodeAddresses::default(),
            tiers: Vec::new(),
            labels: Labels::default(),
            replicas: 0,
            bytes: 0,
            free_list: 0,
        };
        (1..).zip(states).map(node).collect()
    }

    fn object(nodes: &[NodeStat], copies: &[(u32, bool)]) -> ObjectLocation {
        let copy = |&(node, confirmed): &(u32, bool)| (node, nodes[node as usize - 1].state, confirmed);
        located(Copies::ONE, &copies.iter().map(copy).collect::<Vec<_>>())
    }

    fn copy(source: Option<u32>, targets: &[u32]) -> TaskRequest {
        TaskRequest {
            task: TaskId(1),
            kind: TaskKind::Copy,
            tenant: TenantId::DEFAULT,
            key: ObjectKey::new(b"a").expect("legal key"),
            source: source.map(NodeId),
            targets: targets.iter().copied().map(NodeId).collect(),
        }
    }

    fn moving(source: u32, target: u32) -> TaskRequest {
        TaskRequest { kind: TaskKind::Move, ..copy(Some(source), &[target]) }
    }

    fn pull(source: u32, targets: &[u32]) -> Step {
        Step::Pull { source: NodeId(source), targets: targets.iter().copied().map(NodeId).collect() }
    }

    #[test]
    fn what_is_missing_is_pulled_from_the_source_or_who_can_be_read_best() {
        let nodes = nodes(&[UP, UP, DRAINING, ABSENT, UP]);
        let object = object(&nodes, &[(3, true), (4, true), (5, true)]);
        let step = |request: &TaskRequest| plan(request, Some(&object), &nodes, &[]);
        assert_eq!(step(&copy(None, &[1, 2])), pull(5, &[1, 2]));
        assert_eq!(step(&copy(Some(3), &[1, 5])), pull(3, &[1]));
        assert_eq!(step(&moving(4, 1)), pull(5, &[1]), "the source is away");
    }

    #[test]
    fn what_is_there_or_gone_is_the_catalogs_to_judge() {
        let nodes = nodes(&[UP, UP, UP]);
        let object = object(&nodes, &[(1, true), (2, true)]);
        assert_eq!(plan(&copy(None, &[2]), Some(&object), &nodes, &[]), Step::Settle);
        assert_eq!(plan(&moving(3, 3), Some(&object), &nodes, &[]), Step::Settle, "the source has none any more");
        assert_eq!(plan(&copy(None, &[2]), None, &nodes, &[]), Step::Settle);
    }

    #[test]
    fn targets_that_cannot_take_a_copy_fail_the_task_or_are_waited_for() {
        let nodes = nodes(&[UP, DRAINING, ABSENT, UP]);
        let object = object(&nodes, &[(1, true), (4, false)]);
        let step = |target, awaited: &[NodeId]| plan(&copy(None, &[target]), Some(&object), &nodes, awaited);
        assert_eq!(step(2, &[]), Step::Fail(TaskFailure::TargetDraining));
        assert_eq!(step(3, &[]), Step::Fail(TaskFailure::TargetAbsent));
        assert_eq!(step(9, &[]), Step::Fail(TaskFailure::TargetAbsent));
        assert_eq!(step(3, &[NodeId(3)]), Step::Wait);
        assert_eq!(step(4, &[]), Step::Wait, "its copy is not confirmed yet");
    }

    #[test]
    fn nothing_is_pulled_while_nobody_can_be_read() {
        let nodes = nodes(&[ABSENT, UP, UP]);
        let object = object(&nodes, &[(1, true), (3, false)]);
        assert_eq!(plan(&copy(None, &[2]), Some(&object), &nodes, &[]), Step::Wait);
    }
}
