//! Which nodes are there: the leader's verdict, by when it heard from each, told to the catalog.
//!
//! Every node is a member of the catalog's group, so its answers to the leader's heartbeats are its own heartbeats. A node
//! that was silent for 5 s is absent: its copies are not counted as readable, and a put of their keys makes new versions. A
//! node that is heard again is up. A new leader judges nobody before it has listened for as long, and neither does one that
//! stood still itself. A verdict holds only in the term of the leader that gave it: one that was frozen, and finds when it goes on
//! that it has heard nobody, has been replaced meanwhile, and what it says is passed on to its successor. A leader whose
//! catalog's disk is nearly full hands over to another voter. Guests that do not come back are struck out ([`super::guests`]).

use std::collections::BTreeMap;
use std::time::Duration;

use tidepool_metadata::catalog::{Answer, Command, NodeOutcome, NodeStat, NodeState, Outcome, Query};
use tidepool_metadata::{Incarnation, NodeId, Term};
use tidepool_replication::{CatalogHandle, GroupStatus, MemberChange, Read, Role};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::PROPOSE_TIMEOUT;
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
    let mut listening = Listening::default();
    let mut handed_over: Option<Instant> = None;
    let mut missed = Missed::default();
    let mut telling: Option<JoinHandle<()>> = None;
    loop {
        period.tick().await;
        let status = catalog.status();
        if status.failure.is_some() {
            return;
        }
        if status.role != Role::Leader {
            missed.listen_anew();
            continue;
        }
        if status.disk_shortage.is_some() && handed_over.is_none_or(|at| at.elapsed() > HAND_OVER_AGAIN) {
            // The log of a leader grows with everybody's commands.
            handed_over = Some(Instant::now());
            hand_over(&catalog).await;
        }
        let listened = listening.until(Instant::now(), status.term);
        if listened.is_zero() {
            missed.listen_anew();
        }
        let Ok((_, Answer::Nodes(nodes))) = catalog.query(Query::Nodes, Read::Local).await else { continue };
        missed.look(&catalog, &status, &nodes, grace);
        // Waiting for a slow log here would be taken for standing still.
        let is_telling = telling.as_ref().is_some_and(|task| !task.is_finished());
        let verdicts = verdicts(&status, &nodes, listened);
        if !is_telling && !verdicts.is_empty() {
            telling = Some(tokio::spawn(tell(catalog.clone(), verdicts, status.term)));
        }
    }
}

/// What is to be noted of nodes, in their lives.
type Verdicts = Vec<(NodeId, Incarnation, NodeState)>;

/// Has the catalog note verdicts of a leader's term, all at once: one that waited for others would be told when it is old.
async fn tell(catalog: CatalogHandle, verdicts: Verdicts, term: Term) {
    let noted = verdicts.into_iter().map(|(node, incarnation, state)| {
        let catalog = &catalog;
        async move {
            tracing::info!(%node, ?state, "the state of a node");
            let noted = catalog.propose(Command::SetNodeState { node, incarnation, state, term: Some(term) });
            match tokio::time::timeout(PROPOSE_TIMEOUT, noted).await {
                Ok(Ok((_, Outcome::Node(NodeOutcome::OutOfTerm)))) => {
                    tracing::info!(%node, ?state, "it was for another leader to say");
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::warn!(%node, %error, "the state of a node is not noted yet"),
                Err(_) => tracing::warn!(%node, "the state of a node is not noted in time"),
            }
        }
    });
    futures::future::join_all(noted).await;
}

/// Since when a leader listens to the others without a break.
#[derive(Default)]
struct Listening {
    term: Term,
    since: Option<Instant>,
    looked: Option<Instant>,
}

impl Listening {
    /// For how long it has, when it looks at `now`. What it did not hear while it stood still was not the others' silence.
    fn until(&mut self, now: Instant, term: Term) -> Duration {
        let was_here = self.looked.is_some_and(|looked| now - looked < SUSPECT_AFTER);
        if self.term != term || !was_here {
            self.since = Some(now);
        }
        (self.term, self.looked) = (term, Some(now));
        self.since.map_or(Duration::ZERO, |since| now - since)
    }
}

/// Whose state changes, as a leader sees it that has listened for so long.
fn verdicts(status: &GroupStatus, nodes: &[NodeStat], listened: Duration) -> Verdicts {
    let silent: BTreeMap<NodeId, Option<Duration>> =
        status.peers.iter().map(|&(node, heard, _)| (node, heard)).collect();
    let verdict = |known: &NodeStat| {
        let is_here = known.node == status.node;
        let silence = silent.get(&known.node).copied().flatten();
        let is_heard = is_here || silence.is_some_and(|silence| silence < SUSPECT_AFTER);
        let is_gone = !is_here && listened > ABSENT_AFTER && silence.is_none_or(|silence| silence > ABSENT_AFTER);
        match known.state {
            NodeState::Absent if is_heard => Some(NodeState::Up),
            NodeState::Up | NodeState::Draining if is_gone => Some(NodeState::Absent),
            _ => None,
        }
    };
    nodes.iter().filter_map(|known| Some((known.node, known.incarnation, verdict(known)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_that_stood_still_listens_anew() {
        let (mut listening, begin) = (Listening::default(), Instant::now());
        let mut at =
            |seconds: f64, term| listening.until(begin + Duration::from_secs_f64(seconds), Term(term)).as_secs_f64();
        assert_eq!([at(0.0, 1), at(0.5, 1), at(1.0, 1)], [0.0, 0.5, 1.0]);
        assert_eq!(at(9.0, 1), 0.0, "it was frozen");
        assert_eq!([at(9.5, 1), at(10.0, 2), at(10.5, 2)], [0.5, 0.0, 0.5], "a new term begins anew");
    }
}
