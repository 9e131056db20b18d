//! Copies of objects on several nodes: made by puts ([`spread`], while their bytes come: [`arriving`]), pulled by the
//! nodes that get them ([`pull`]), kept at their number ([`repair`]), made where somebody wants them ([`tasks`]), and of what is read
//! much ([`hot`]).
//!
//! A copy is always pulled by the node that gets it, from a node that has it: nobody else writes its memory. Nodes talk about
//! copies in messages of the catalog's group, whose members have proved that they belong to the cluster.
//! States and times: `docs/src/replicas.md`.

pub(super) mod arriving;
pub(super) mod hot;
mod pull;
pub(super) mod repair;
pub(super) mod spread;
pub(super) mod tasks;

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use prost::Message as _;
use tidepool_metadata::catalog::{Answer, NodeStat, NodeState, Query};
use tidepool_metadata::{ErrorKind, Incarnation, NodeId, ObjectKey, ReplicaId, TenantId, VersionId};
use tidepool_replication::replicas::placement::{self, Candidate};
use tidepool_replication::{CatalogHandle, Read};
use tidepool_tiers::store::ReplicaName;

use super::{NodeService, error};
use crate::error::Error;
use crate::peers::wire::{Id, NodeReplies, NodeReply, NodeRequest, Refused, node_reply, node_request};

pub(super) use arriving::{Arrivals, Arriving, Incoming, Next};
pub(super) use pull::{Fetched, Pulled};
pub(super) use spread::Spread;

/// What a pull may take beside its bytes.
const PULL_TIME: Duration = Duration::from_secs(2);
/// What a slow network or disk moves at least, in bytes a second: says how long a pull of so many bytes may take.
const SLOWEST: u64 = 32 << 20;

impl From<VersionId> for Id {
    fn from(VersionId { node, incarnation, sequence }: VersionId) -> Self {
        Self { node: node.0, incarnation: incarnation.0, sequence }
    }
}

impl From<ReplicaId> for Id {
    fn from(ReplicaId { node, incarnation, sequence }: ReplicaId) -> Self {
        Self { node: node.0, incarnation: incarnation.0, sequence }
    }
}

impl From<&Id> for VersionId {
    fn from(id: &Id) -> Self {
        Self { node: NodeId(id.node), incarnation: Incarnation(id.incarnation), sequence: id.sequence }
    }
}

impl From<&Id> for ReplicaId {
    fn from(id: &Id) -> Self {
        Self { node: NodeId(id.node), incarnation: Incarnation(id.incarnation), sequence: id.sequence }
    }
}

/// Nodes that a client is told of which take objects: to order more would take long.
const MOST_TAKERS: usize = 64;

/// How long a pull of so many bytes may take.
fn pull_time(length: u64) -> Duration {
    PULL_TIME + Duration::from_secs(length / SLOWEST)
}

/// How long an answer to it is waited for: a moment more than it takes, so that it is heard.
fn patience(length: u64) -> Duration {
    pull_time(length) + PULL_TIME / 4
}

pub(super) fn malformed() -> Error {
    Error::new(ErrorKind::Invalid, "BAD_MESSAGE", "a message of another node can't be read".into())
}

impl NodeService {
    /// Answers what other nodes ask.
    pub(super) async fn answer_node(&self, request: &[u8]) -> Vec<u8> {
        use node_reply::Answer;
        let answer = match NodeRequest::decode(request).map(|request| request.ask) {
            Ok(Some(node_request::Ask::Pull(pull))) => self.pull(pull).await.map(|copy| Answer::Copy(copy.into())),
            Ok(Some(node_request::Ask::Fetch(fetch))) => self.fetch(fetch).await.map(|()| Answer::Done(true)),
            Ok(Some(node_request::Ask::Pulls(pulls))) => self.pull_visible(pulls).await.map(|copies| {
                let replies = copies.into_iter().map(|copy| reply(copy.map(|copy| Answer::Copy(copy.into()))));
                Answer::Each(NodeReplies { replies: replies.collect() })
            }),
            Ok(Some(node_request::Ask::Settle(settle))) => self.settle(settle).map(|()| Answer::Done(true)),
            Ok(Some(node_request::Ask::Look(_))) => {
                self.inner.repairs.want();
                Ok(Answer::Done(true))
            }
            Ok(Some(node_request::Ask::Beat(beat))) => self.hear(beat).map(Answer::Loads),
            Ok(None) | Err(_) => Err(malformed()),
        };
        reply(answer).encode_to_vec()
    }

    pub(super) async fn ask_node(
        &self,
        node: NodeId,
        ask: node_request::Ask,
        within: Duration,
    ) -> Result<NodeReply, Error> {
        let words = NodeRequest { ask: Some(ask) }.encode_to_vec();
        let answer = self.catalog().await?.ask_node(node, words, within).await?;
        NodeReply::decode(&answer[..]).map_err(|_| malformed())
    }

    /// The nodes of `nodes` that could take copies.
    fn candidates(&self, nodes: &[NodeStat]) -> Vec<Candidate> {
        let loads = self.loads();
        placement::candidates(nodes, |node| Some(loads.get(&node)?.nvme?.used_bytes))
    }

    /// Where the gRPC of up to 64 nodes listens that take objects, those first to which this node would give copies; none while it does
    /// not know.
    pub(crate) async fn takers(&self) -> Vec<String> {
        if self.inner.catalog.get().is_none() {
            return Vec::new();
        }
        let nodes = self.nodes().await.unwrap_or_default();
        let random = RandomState::new();
        let mut candidates = self.candidates(&nodes);
        candidates.sort_by_cached_key(|candidate| random.hash_one(candidate.node));
        candidates.truncate(MOST_TAKERS);
        let numbers = placement::numbers(random.hash_one("takers"));
        let order = placement::order(&candidates, &[], self.inner.placement, numbers);
        let address = |node: NodeId| nodes.iter().find(|known| known.node == node).map(|known| &known.addresses.grpc);
        order.into_iter().filter_map(address).filter(|address| !address.is_empty()).cloned().collect()
    }

    /// All nodes, as this one's catalog knows them.
    async fn nodes(&self) -> Result<Vec<NodeStat>, Error> {
        match self.catalog().await?.query(Query::Nodes, Read::Local).await? {
            (_, Answer::Nodes(nodes)) => Ok(nodes),
            _ => Err(error::unexpected("nodes")),
        }
    }
}

/// Has the other nodes look for copies that are to be made anew, since this one has lost some. Who does not hear it looks in
/// its own time.
pub(super) async fn tell_of_loss(catalog: CatalogHandle, here: NodeId) {
    let Ok((_, Answer::Nodes(nodes))) = catalog.query(Query::Nodes, Read::Local).await else { return };
    let words = NodeRequest { ask: Some(node_request::Ask::Look(true)) }.encode_to_vec();
    let others = nodes.iter().filter(|node| node.node != here && node.state != NodeState::Absent);
    futures::future::join_all(others.map(|node| catalog.ask_node(node.node, words.clone(), PULL_TIME))).await;
}

fn reply(answer: Result<node_reply::Answer, Error>) -> NodeReply {
    let refused = |error: Error| {
        let (reason, message) = (error.reason().to_owned(), error.to_string());
        node_reply::Answer::Refused(Refused { reason, message })
    };
    NodeReply { answer: Some(answer.unwrap_or_else(refused)) }
}

/// What another node answered, if it did what it was asked for.
fn answer_of(node: NodeId, reply: NodeReply) -> Result<node_reply::Answer, Error> {
    match reply.answer.ok_or_else(malformed)? {
        node_reply::Answer::Refused(Refused { reason, message }) => {
            let message = format!("node {node} refused: {message} ({reason})");
            Err(Error::new(ErrorKind::Unavailable, "REFUSED_BY_NODE", message))
        }
        answer => Ok(answer),
    }
}

/// The copy that was asked for.
fn copy_of(node: NodeId, reply: NodeReply) -> Result<ReplicaId, Error> {
    match answer_of(node, reply)? {
        node_reply::Answer::Copy(copy) if copy.node == node.0 => Ok((&copy).into()),
        _ => Err(error::unexpected("a copy")),
    }
}

/// A copy's full name, as another node gave it.
fn copy_name(tenant: u32, key: &[u8], version: VersionId, replica: ReplicaId) -> Result<ReplicaName, Error> {
    let key = ObjectKey::new(key).map_err(|_| malformed())?;
    Ok(ReplicaName { tenant: TenantId(tenant), key, version, replica })
}
