//! Guests: nodes in other people's processes, which lend memory while those run, follow the catalog's log, and never vote.
//!
//! One that leaves hands over what it holds, as far as there is time, and has the rest and itself struck out of the catalog.
//! One that was killed, or never came to register, is struck out by the leader when it has been away for as long as repair
//! waits for a node; what remains of one that has left, after some seconds.

use std::collections::HashMap;
use std::time::Duration;

use tidepool_metadata::catalog::{
    Answer, Command, ForgetMode, KeyBucket, NodeOutcome, NodeStat, NodeState, Outcome, Query,
};
use tidepool_metadata::{Incarnation, NodeId};
use tidepool_replication::{CatalogError, CatalogHandle, GroupStatus, MemberChange, MemberId, Read};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::NodeService;
use super::liveness::ABSENT_AFTER;
use crate::error::Error;

/// How long a guest stays a member that is no node of the catalog any more, or not yet: the first seconds of its life.
const UNKNOWN_FOR: Duration = Duration::from_secs(15);
/// How often what is listed on a node is forgotten before it is given up for now: a put that was under way may end meanwhile.
const ROUNDS: usize = 8;
/// Copies that are forgotten before it is looked again whether the node is back.
const FORGOTTEN_AT_A_TIME: usize = 256;
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
            let over = Over { catalog, node, incarnation, state: NodeState::Draining, is_for_good: false };
            tokio::time::timeout(STRIKE_OUT, over.strike_out())
                .await
                .unwrap_or(Ok(None))?
                .ok_or(CatalogError::OutcomeUnknown)
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

/// A life of a node that is over, as long as it is in that state.
pub(super) struct Over<'a> {
    pub(super) catalog: &'a CatalogHandle,
    pub(super) node: NodeId,
    pub(super) incarnation: Incarnation,
    pub(super) state: NodeState,
    /// No node may have its identity again.
    pub(super) is_for_good: bool,
}

impl Over<'_> {
    /// Has the catalog forget what it lists on the node, then the node itself. Answers how many copies that were; `None` if
    /// it is not over any more.
    pub(super) async fn strike_out(&self) -> Result<Option<u64>, CatalogError> {
        let mut lost = 0;
        for _ in 0..ROUNDS {
            let Some(forgotten) = self.forget_all().await? else { return Ok(None) };
            lost += forgotten;
            let Self { node, incarnation, .. } = *self;
            let removal = if self.is_for_good {
                Command::ExpelNode { node, incarnation }
            } else {
                Command::RemoveNode { node, incarnation }
            };
            match self.catalog.propose(removal).await? {
                (_, Outcome::Node(NodeOutcome::Holds { .. })) => {}
                (_, Outcome::Node(NodeOutcome::Stale { .. })) => return Ok(None),
                (_, Outcome::Node(_)) => return Ok(Some(lost)),
                _ => return Err(CatalogError::Unexpected { expected: "the end of a node" }),
            }
        }
        Err(CatalogError::OutcomeUnknown)
    }

    /// A node that is back has what is listed on it.
    async fn is_over(&self) -> Result<bool, CatalogError> {
        let over = (self.node, self.incarnation, self.state);
        let known = nodes(self.catalog).await?;
        Ok(known.iter().any(|known| (known.node, known.incarnation, known.state) == over))
    }

    async fn forget_all(&self) -> Result<Option<u64>, CatalogError> {
        let Self { catalog, node, .. } = *self;
        let (_, answer) = catalog.query(Query::Digests { node }, Read::Linearizable).await?;
        let Answer::Digests(digests) = answer else { return Err(CatalogError::Unexpected { expected: "digests" }) };
        let held = digests.iter().enumerate().filter(|(_, digest)| **digest != 0);
        let mut forgotten = 0;
        for bucket in held.filter_map(|(bucket, _)| KeyBucket::new(bucket)) {
            let mut after = None;
            loop {
                let query = Query::Bucket { node, bucket, after, limit: FORGOTTEN_AT_A_TIME };
                let (_, Answer::Bucket(page)) = catalog.query(query, Read::Local).await? else {
                    return Err(CatalogError::Unexpected { expected: "a bucket" });
                };
                if !self.is_over().await? {
                    return Ok(None);
                }
                forgotten += page.replicas.len() as u64;
                let names = page.replicas.into_iter().map(|held| (held.tenant, held.key, held.version, held.replica));
                catalog.forget(names.collect(), ForgetMode::Lost).await?;
                match page.next {
                    Some(next) => after = Some(next),
                    None => break,
                }
            }
        }
        Ok(Some(forgotten))
    }
}

/// Guests that a leader hears nothing of.
#[derive(Default)]
pub(super) struct Missed {
    since: HashMap<MemberId, Instant>,
    striking_out: Option<JoinHandle<()>>,
}

impl Missed {
    /// What was not heard until now is nobody's silence.
    pub(super) fn listen_anew(&mut self) {
        self.since.clear();
    }

    /// Begins to strike one out if its time is over; one at a time. Only for who leads.
    pub(super) fn look(&mut self, catalog: &CatalogHandle, status: &GroupStatus, nodes: &[NodeStat], grace: Duration) {
        let guests = missed(status, nodes);
        self.since.retain(|member, _| guests.iter().any(|guest| guest.member == *member));
        if self.striking_out.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        for Guest { member, incarnation, was_heard } in guests {
            let since = self.since.entry(member).or_insert_with(Instant::now);
            let patience = match incarnation {
                Some(_) => grace,
                None if was_heard => UNKNOWN_FOR,
                // Making its memory ready takes a while.
                None => grace.max(UNKNOWN_FOR),
            };
            if since.elapsed() >= patience {
                // If it can't be done now, others have their turn first.
                *since = Instant::now();
                self.striking_out = Some(tokio::spawn(end(catalog.clone(), member, incarnation)));
                return;
            }
        }
    }
}

/// A guest that is silent, or no node.
struct Guest {
    member: MemberId,
    /// Its life as the catalog knows it.
    incarnation: Option<Incarnation>,
    /// This leader has heard from it.
    was_heard: bool,
}

fn missed(status: &GroupStatus, nodes: &[NodeStat]) -> Vec<Guest> {
    let missed = |member: MemberId| {
        let silence = status.peers.iter().find(|(node, ..)| *node == member.node()).and_then(|&(_, heard, _)| heard);
        let known = nodes.iter().find(|known| known.node == member.node());
        let is_missed = match known {
            Some(known) => known.state == NodeState::Absent,
            // It comes, or it has left.
            None => silence.is_none_or(|silence| silence >= ABSENT_AFTER),
        };
        let incarnation = known.map(|known| known.incarnation);
        is_missed.then_some(Guest { member, incarnation, was_heard: silence.is_some() })
    };
    status.members.all().into_iter().filter(|member| member.is_guest()).filter_map(missed).collect()
}

async fn end(catalog: CatalogHandle, guest: MemberId, incarnation: Option<Incarnation>) {
    let node = guest.node();
    let struck_out = async {
        if let Some(incarnation) = incarnation {
            let over = Over { catalog: &catalog, node, incarnation, state: NodeState::Absent, is_for_good: false };
            let Some(lost) = over.strike_out().await? else {
                tracing::info!(%node, "a guest came back when it was to be struck out");
                return Ok(());
            };
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
