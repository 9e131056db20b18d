//! Guests: nodes in other people's processes, which lend memory while those run, follow the catalog's log, and never vote.
//!
//! One that leaves hands over what it holds, as far as there is time, and has the rest and itself struck out of the catalog.
//! One that was killed is struck out by the leader: when it has been away for as long as repair waits for a node, or, if
//! the catalog knows nothing of it (it left, or never came to register), after some seconds.

use std::collections::HashMap;
use std::time::Duration;

use tidepool_metadata::catalog::{
    Answer, Command, ForgetMode, KeyBucket, MAX_PAGE_ITEMS, NodeOutcome, NodeStat, NodeState, Outcome, Query,
};
use tidepool_metadata::{Incarnation, NodeId};
use tidepool_replication::{CatalogError, CatalogHandle, GroupStatus, MemberChange, MemberId, Read};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::NodeService;
use super::liveness::ABSENT_AFTER;
use crate::error::Error;

/// How long a guest that is no node of the catalog stays a member: the first seconds of its life.
const UNKNOWN_FOR: Duration = Duration::from_secs(15);
/// How often what is listed on a node is forgotten before it is given up for now: a put that was under way may end meanwhile.
const ROUNDS: usize = 8;
/// How long being struck out may take.
const STRIKE_OUT: Duration = Duration::from_secs(5);

impl NodeService {
    /// Gives up all that is here, for good: what other nodes take over within `hand_over` stays in the store, the rest is
    /// lost. Answers how many objects' copies were. The node serves nothing that others could find afterwards.
    ///
    /// # Errors
    /// Those of the catalog: the node counts as absent then, once it has stopped.
    pub(crate) async fn leave(&self, hand_over: Duration) -> Result<u64, Error> {
        let catalog = self.led_catalog().await?;
        let (node, incarnation) = self.identity();
        let leave = async {
            // Nothing new comes here from now on.
            let draining = Command::SetNodeState { node, incarnation, state: NodeState::Draining, term: None };
            catalog.propose(draining).await?;
            if tokio::time::timeout(hand_over, emptied(catalog, node)).await.is_err() {
                tracing::info!(?hand_over, "what was not handed over in time is given up");
            }
            tokio::time::timeout(STRIKE_OUT, strike_out(catalog, node, incarnation))
                .await
                .unwrap_or(Err(CatalogError::OutcomeUnknown))
        };
        Ok(tokio::time::timeout(hand_over + 2 * STRIKE_OUT, leave)
            .await
            .unwrap_or(Err(CatalogError::OutcomeUnknown))?)
    }
}

async fn nodes(catalog: &CatalogHandle) -> Result<Vec<NodeStat>, CatalogError> {
    match catalog.query(Query::Nodes, Read::Local).await? {
        (_, Answer::Nodes(nodes)) => Ok(nodes),
        _ => Err(CatalogError::Unexpected { expected: "nodes" }),
    }
}

/// Waits until the catalog lists nothing on `node`.
async fn emptied(catalog: &CatalogHandle, node: NodeId) {
    let mut applied = catalog.watch_applied();
    loop {
        applied.mark_unchanged();
        let known = nodes(catalog).await.unwrap_or_default();
        let is_empty = known.iter().any(|known| known.node == node && known.replicas == 0);
        if is_empty || applied.changed().await.is_err() {
            return;
        }
    }
}

/// Has the catalog forget what it lists on the node, then the node itself. Answers how many copies that were.
async fn strike_out(catalog: &CatalogHandle, node: NodeId, incarnation: Incarnation) -> Result<u64, CatalogError> {
    let mut lost = 0;
    for _ in 0..ROUNDS {
        lost += forget_all(catalog, node).await?;
        match catalog.propose(Command::RemoveNode { node, incarnation }).await? {
            (_, Outcome::Node(NodeOutcome::Holds { .. })) => {}
            (_, Outcome::Node(_)) => return Ok(lost),
            _ => return Err(CatalogError::Unexpected { expected: "the end of a node" }),
        }
    }
    Err(CatalogError::OutcomeUnknown)
}

async fn forget_all(catalog: &CatalogHandle, node: NodeId) -> Result<u64, CatalogError> {
    let (_, answer) = catalog.query(Query::Digests { node }, Read::Linearizable).await?;
    let Answer::Digests(digests) = answer else { return Err(CatalogError::Unexpected { expected: "digests" }) };
    let held = digests.iter().enumerate().filter(|(_, digest)| **digest != 0);
    let mut forgotten = 0;
    for bucket in held.filter_map(|(bucket, _)| KeyBucket::new(bucket)) {
        let mut after = None;
        loop {
            let query = Query::Bucket { node, bucket, after, limit: MAX_PAGE_ITEMS };
            let (_, Answer::Bucket(page)) = catalog.query(query, Read::Local).await? else {
                return Err(CatalogError::Unexpected { expected: "a bucket" });
            };
            forgotten += page.replicas.len() as u64;
            let names = page.replicas.into_iter().map(|held| (held.tenant, held.key, held.version, held.replica));
            catalog.forget(names.collect(), ForgetMode::Lost).await?;
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
    }
    Ok(forgotten)
}

/// Guests that a leader hears nothing of.
#[derive(Default)]
pub(super) struct Missed {
    since: HashMap<MemberId, Instant>,
    striking_out: Option<JoinHandle<()>>,
}

impl Missed {
    /// Begins to strike one out if its time is over; one at a time. Only for who leads.
    pub(super) fn look(&mut self, catalog: &CatalogHandle, status: &GroupStatus, nodes: &[NodeStat], grace: Duration) {
        let guests = missed(status, nodes);
        self.since.retain(|member, _| guests.iter().any(|(guest, _)| guest == member));
        if self.striking_out.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        for (guest, incarnation) in guests {
            let since = *self.since.entry(guest).or_insert_with(Instant::now);
            if since.elapsed() >= if incarnation.is_some() { grace } else { UNKNOWN_FOR } {
                self.striking_out = Some(tokio::spawn(end(catalog.clone(), guest, incarnation)));
                return;
            }
        }
    }
}

/// The guests that are silent, or no nodes at all; and the life in which the catalog knows them.
fn missed(status: &GroupStatus, nodes: &[NodeStat]) -> Vec<(MemberId, Option<Incarnation>)> {
    let guests = status.members.all().into_iter().filter(|member| member.is_guest());
    let is_heard = |guest: MemberId| {
        let silence = status.peers.iter().find(|(node, ..)| *node == guest.node()).and_then(|&(_, heard, _)| heard);
        silence.is_some_and(|silence| silence < ABSENT_AFTER)
    };
    let missed = guests.filter_map(|guest| match nodes.iter().find(|known| known.node == guest.node()) {
        Some(known) if known.state == NodeState::Absent => Some((guest, Some(known.incarnation))),
        Some(_) => None,
        // It comes, or it has left.
        None => (!is_heard(guest)).then_some((guest, None)),
    });
    missed.collect()
}

async fn end(catalog: CatalogHandle, guest: MemberId, incarnation: Option<Incarnation>) {
    let node = guest.node();
    let struck_out = async {
        if let Some(incarnation) = incarnation {
            let lost = strike_out(&catalog, node, incarnation).await?;
            tracing::info!(%node, lost, "a guest did not come back");
        }
        // It may have come back meanwhile, with another log.
        if catalog.member_of(node) == Some(guest) {
            catalog.change_members(MemberChange::Remove(node)).await?;
        }
        Ok::<_, CatalogError>(())
    };
    if let Err(error) = struck_out.await {
        tracing::info!(%node, %error, "a guest that is gone is struck out later");
    }
}
