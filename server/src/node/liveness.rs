//! Which nodes are there: the leader's verdict, by when it heard from each, told to the catalog.
//!
//! Every node is a member of the catalog's group, so its answers to the leader's heartbeats are its own heartbeats. A node
//! that was silent for 5 s is absent: its copies are not counted as readable, and a put of their keys makes new versions. A
//! node that is heard again is up. A new leader judges nobody before it has listened for as long. A leader whose catalog's
//! disk is nearly full hands over to another voter. Guests that do not come back are struck out ([`super::guests`]).

use std::collections::BTreeMap;
use std::time::Duration;

use tidepool_metadata::NodeId;
use tidepool_metadata::catalog::{Answer, Command, NodeStat, NodeState, Query};
use tidepool_replication::{CatalogHandle, GroupStatus, MemberChange, Read, Role};
use tokio::time::Instant;

use super::guests::Missed;

/// How often nodes are looked at.
const PERIOD: Duration = Duration::from_millis(500);
/// After how long without a word a node is suspect: it is read last.
pub(crate) const SUSPECT_AFTER: Duration = Duration::from_millis(1500);
/// After how long it is absent.
pub(super) const ABSENT_AFTER: Duration = Duration::from_secs(5);

/// How long a member whose disk is full waits before it gives leadership away again, if it came back.
const HAND_OVER_AGAIN: Duration = Duration::from_secs(30);
/// How long handing over may take.
const HAND_OVER: Duration = Duration::from_secs(1);

/// Hands leadership over, if this node has it and there is another voter, so that the others need no election. Bounded by a
/// second.
pub(super) async fn hand_over(catalog: &CatalogHandle) {
    let status = catalog.status();
    let others = status.peers.iter().filter(|(node, ..)| status.voters.contains(node));
    let Some(&(successor, ..)) = others.max_by_key(|(_, _, matched)| *matched) else { return };
    if status.role == Role::Leader {
        let handed = catalog.change_members(MemberChange::Transfer(successor));
        match tokio::time::timeout(HAND_OVER, handed).await {
            Ok(Ok(())) => tracing::info!(%successor, "leadership is handed over"),
            Ok(Err(error)) => tracing::warn!(%error, "leadership could not be handed over"),
            Err(_) => tracing::warn!("leadership could not be handed over in time"),
        }
    }
}

/// Runs until the catalog stops. `grace`: how long a node is waited for that is away.
pub(super) async fn watch(catalog: CatalogHandle, grace: Duration) {
    let mut period = tokio::time::interval(PERIOD);
    let mut leading: Option<(u64, Instant)> = None;
    let mut handed_over: Option<Instant> = None;
    let mut missed = Missed::default();
    loop {
        period.tick().await;
        let status = catalog.status();
        if status.failure.is_some() {
            return;
        }
        if status.role != Role::Leader {
            (leading, missed) = (None, Missed::default());
            continue;
        }
        if status.disk_shortage.is_some() && handed_over.is_none_or(|at| at.elapsed() > HAND_OVER_AGAIN) {
            // The log of a leader grows with everybody's commands.
            handed_over = Some(Instant::now());
            hand_over(&catalog).await;
        }
        let since = match leading {
            Some((term, since)) if term == status.term.0 => since,
            _ => leading.insert((status.term.0, Instant::now())).1,
        };
        let Ok((_, Answer::Nodes(nodes))) = catalog.query(Query::Nodes, Read::Local).await else { continue };
        missed.look(&catalog, &status, &nodes, grace);
        for (node, state) in verdicts(&status, &nodes, since.elapsed()) {
            let Some(known) = nodes.iter().find(|known| known.node == node) else { continue };
            tracing::info!(%node, ?state, "the state of a node");
            let command = Command::SetNodeState { node, incarnation: known.incarnation, state };
            if let Err(error) = catalog.propose(command).await {
                tracing::warn!(%node, %error, "the state of a node is not noted yet");
            }
        }
    }
}

/// Whose state changes, as a leader sees it that has led for so long.
fn verdicts(status: &GroupStatus, nodes: &[NodeStat], led: Duration) -> Vec<(NodeId, NodeState)> {
    let silent: BTreeMap<NodeId, Option<Duration>> =
        status.peers.iter().map(|&(node, heard, _)| (node, heard)).collect();
    let verdict = |known: &NodeStat| {
        let is_here = known.node == status.node;
        let silence = silent.get(&known.node).copied().flatten();
        let is_heard = is_here || silence.is_some_and(|silence| silence < SUSPECT_AFTER);
        let is_gone = !is_here && led > ABSENT_AFTER && silence.is_none_or(|silence| silence > ABSENT_AFTER);
        match known.state {
            NodeState::Absent if is_heard => Some((known.node, NodeState::Up)),
            NodeState::Up | NodeState::Draining if is_gone => Some((known.node, NodeState::Absent)),
            _ => None,
        }
    };
    nodes.iter().filter_map(verdict).collect()
}
