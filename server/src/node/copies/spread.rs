//! Further copies of what a put has just brought here.
//!
//! Once the coordinator's copy is sealed, other nodes pull theirs, those first that have begun to while it arrived, then in the
//! order that placement gives; one that fails is replaced by the next. The put is proposed with all copies that are there, and each node is told how it ended.

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use tidepool_metadata::catalog::{Copies, MAX_COPIES};
use tidepool_metadata::{ErrorKind, KeyHash, LogIndex, NodeId, ObjectKey, ReplicaId, TenantId};
use tidepool_replication::replicas::placement;
use tidepool_tiers::store::{ReplicaName, Sealed};

use super::{PULL_TIME, answer_of, copy_of, patience};
use crate::error::Error;
use crate::node::{NodeService, error};
use crate::peers::wire::{Pull, Settle, node_request};

/// Copies on other nodes, which wait to hear how the put ended.
#[derive(Debug, Default)]
pub(in crate::node) struct Spread {
    pub(in crate::node) copies: Vec<ReplicaId>,
}

/// How many copies a put is to have: what it asks for, or as many as this node's setting says.
///
/// # Errors
/// `BAD_REPLICAS` with the numbers.
pub(in crate::node) fn wanted(asked: (u32, u32), default: Copies) -> Result<Copies, Error> {
    let (replicas, minimum) = asked;
    let minimum = minimum.max(1);
    let replicas = if replicas == 0 { minimum.max(u32::from(default.wanted())) } else { replicas };
    let fits = |number: u32| u8::try_from(number).unwrap_or(u8::MAX);
    Copies::new(fits(replicas), fits(minimum)).ok_or_else(|| {
        let message = format!(
            "{replicas} replicas, at least {minimum} at once: both are from 1 to {MAX_COPIES}, and min_replicas is not more"
        );
        Error::new(ErrorKind::Invalid, "BAD_REPLICAS", message).field("replicas")
    })
}

impl NodeService {
    /// Brings about the further copies of a sealed object, which some nodes are `fetching`. What could not be had is missing: repair makes it later.
    ///
    /// # Errors
    /// `TOO_FEW_REPLICAS` with the numbers, if a put with so few is to be refused. Nothing is left anywhere then.
    pub(in crate::node) async fn spread(
        &self,
        sealed: &Sealed,
        prefer: &[String],
        fetching: &[NodeId],
        pull: Pull,
        copies: Copies,
    ) -> Result<Spread, Error> {
        if copies.wanted() == 1 {
            return Ok(Spread::default());
        }
        let ReplicaName { tenant, key, .. } = &sealed.name;
        let (nodes, mut order) = self.order(*tenant, key, prefer).await?;
        order.sort_by_key(|node| !fetching.contains(node));
        let mut order = order.into_iter();
        let needed = usize::from(copies.wanted()) - 1;
        let mut spread = Spread::default();
        let mut pulls: FuturesUnordered<_> =
            order.by_ref().take(needed).map(|node| self.pull_there(node, pull.clone())).collect();
        let mut last = None;
        while let Some(pulled) = pulls.next().await {
            match pulled {
                Ok(copy) => spread.copies.push(copy),
                Err(error) => {
                    tracing::debug!(%error, "a copy of a put could not be made");
                    last = Some(error);
                    pulls.extend(order.next().map(|node| self.pull_there(node, pull.clone())));
                }
            }
        }
        let have = 1 + spread.copies.len();
        if have >= usize::from(copies.minimum()) {
            return Ok(spread);
        }
        self.tell(&spread, &sealed.name, None);
        Err(error::too_few_replicas(have, copies, nodes, last.as_ref()))
    }

    /// How many nodes take copies, and those but this one in the order in which they are asked for some of a put.
    pub(super) async fn order(
        &self,
        tenant: TenantId,
        key: &ObjectKey,
        prefer: &[String],
    ) -> Result<(usize, Vec<NodeId>), Error> {
        let nodes = self.nodes().await?;
        let preferred = placement::preferred(&nodes, prefer);
        let candidates = self.candidates(&nodes);
        let numbers = placement::numbers(KeyHash::of(tenant, key.as_bytes()).0);
        let mut order = placement::order(&candidates, &[self.inner.node], self.inner.placement, numbers);
        order.sort_by_key(|node| preferred.iter().position(|other| other == node).unwrap_or(preferred.len()));
        Ok((candidates.len(), order))
    }

    /// Has another node pull a copy.
    async fn pull_there(&self, node: NodeId, pull: Pull) -> Result<ReplicaId, Error> {
        let within = patience(pull.length);
        copy_of(node, self.ask_node(node, node_request::Ask::Pull(pull), within).await?)
    }

    /// Tells the nodes that have copies how the put ended: where it was committed, or that it was not. Waits for nobody.
    pub(in crate::node) fn tell(&self, spread: &Spread, name: &ReplicaName, committed: Option<LogIndex>) {
        for &copy in &spread.copies {
            let settle = Settle {
                tenant: name.tenant.0,
                key: name.key.as_bytes().to_vec().into(),
                copy: Some(copy.into()),
                commit_index: committed.map_or(0, |index| index.0),
            };
            let service = self.clone();
            // One that does not hear it asks the log.
            tokio::spawn(async move {
                let settled = service.ask_node(copy.node, node_request::Ask::Settle(settle), PULL_TIME).await;
                let settled = settled.and_then(|reply| answer_of(copy.node, reply));
                settled.map_err(|error| tracing::debug!(?copy, %error, "a copy could not be told")).ok()
            });
        }
    }
}
