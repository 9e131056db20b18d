//! Nodes: their lives, what they hold by digest, and what they are to free.
//!
//! A node's copies are not listed here; the objects name them. What stands here per copy is sums: a count, bytes, and
//! a digest per key bucket, which a node computes of its own copies in the same way ([`KeyDigests`]).

use std::collections::BTreeMap;

use super::command::{Labels, NodeAddresses, NodeRegistration, NodeState, TierDescription};
use super::digest::KeyDigests;
use super::object::{Name, Object};
use super::outcome::NodeOutcome;
use super::query::{FreeItem, FreeListPage, MAX_PAGE_ITEMS, NodeStat};
use crate::log::LogIndex;
use crate::node::{Incarnation, NodeId};
use crate::object::{KeyHash, ReplicaId};

/// Most nodes of a cluster: their digests take 32 MiB then.
pub const MAX_NODES: usize = 1024;

/// Place of an entry in a free list: by index, then by copy, so that all voters list alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FreeKey {
    pub(super) index: LogIndex,
    pub(super) incarnation: Incarnation,
    pub(super) sequence: u64,
}

impl FreeKey {
    pub(super) fn new(index: LogIndex, replica: ReplicaId) -> Self {
        Self { index, incarnation: replica.incarnation, sequence: replica.sequence }
    }
}

pub(super) struct Node {
    pub(super) incarnation: Incarnation,
    pub(super) state: NodeState,
    /// It is to be emptied, also when it is back from being absent.
    pub(super) drains: bool,
    /// It returned, and copies of its older lives are not confirmed.
    pub(super) announcing: bool,
    pub(super) addresses: NodeAddresses,
    pub(super) tiers: Vec<TierDescription>,
    pub(super) labels: Labels,
    pub(super) free_list: BTreeMap<FreeKey, Name>,
    holdings: Holdings,
}

/// Sums over the copies that a node has.
#[derive(Default, Debug, PartialEq, Eq)]
pub(super) struct Holdings {
    replicas: u64,
    bytes: u64,
    digests: KeyDigests,
}

impl Holdings {
    /// Counts a copy; `hash` is the object's.
    pub(super) fn gain(&mut self, object: &Object, hash: KeyHash, replica: ReplicaId) {
        self.replicas += 1;
        self.bytes += object.length;
        self.digests.toggle(hash, object.version, replica);
    }

    /// Takes a copy out of the count again.
    fn lose(&mut self, object: &Object, hash: KeyHash, replica: ReplicaId) {
        self.replicas -= 1;
        self.bytes -= object.length;
        self.digests.toggle(hash, object.version, replica);
    }

    fn add(&mut self, more: &Self) {
        self.replicas += more.replicas;
        self.bytes += more.bytes;
        self.digests.add(&more.digests);
    }
}

impl Node {
    pub(super) fn new(registration: NodeRegistration, state: NodeState, announcing: bool) -> Self {
        let NodeRegistration { node: _, incarnation, addresses, tiers, labels } = registration;
        let (free_list, holdings) = (BTreeMap::new(), Holdings::default());
        let drains = state == NodeState::Draining;
        Self { incarnation, state, drains, announcing, addresses, tiers, labels, free_list, holdings }
    }

    /// Its state when it is not absent.
    pub(super) fn when_here(&self) -> NodeState {
        if self.drains { NodeState::Draining } else { NodeState::Up }
    }

    /// Whether its copies can be read.
    pub(super) fn reads(&self) -> bool {
        self.state != NodeState::Absent
    }

    /// Whether it takes copies.
    pub(super) fn takes(&self) -> bool {
        self.state == NodeState::Up
    }

    /// Whether it has confirmed a copy of that life in its present one.
    pub(super) fn confirms(&self, incarnation: Incarnation) -> bool {
        !self.announcing || incarnation == self.incarnation
    }
}

#[derive(Default)]
pub(super) struct Nodes(pub(super) BTreeMap<NodeId, Node>);

impl Nodes {
    pub(super) fn get(&self, node: NodeId) -> Option<&Node> {
        self.0.get(&node)
    }

    pub(super) fn reads(&self, node: NodeId) -> bool {
        self.get(node).is_some_and(Node::reads)
    }

    /// How many are up.
    pub(super) fn up(&self) -> usize {
        self.0.values().filter(|node| node.takes()).count()
    }

    /// Whether `replica` was reserved in its node's present life.
    pub(super) fn is_current(&self, replica: ReplicaId) -> bool {
        self.get(replica.node).is_some_and(|node| node.incarnation == replica.incarnation)
    }

    pub(super) fn register(&mut self, registration: &NodeRegistration, rebuilding: bool) -> NodeOutcome {
        let full = self.0.len() >= MAX_NODES;
        let Some(node) = self.0.get_mut(&registration.node) else {
            if full {
                return NodeOutcome::TooMany;
            }
            let node = Node::new(registration.clone(), NodeState::Up, rebuilding);
            self.0.insert(registration.node, node);
            return NodeOutcome::Accepted { announce: rebuilding };
        };
        if registration.incarnation < node.incarnation {
            return NodeOutcome::Stale { current: node.incarnation };
        }
        if registration.incarnation > node.incarnation {
            node.announcing = true;
            node.incarnation = registration.incarnation;
        }
        if node.state == NodeState::Absent {
            node.state = node.when_here();
        }
        node.addresses = registration.addresses.clone();
        node.tiers.clone_from(&registration.tiers);
        node.labels.clone_from(&registration.labels);
        NodeOutcome::Accepted { announce: node.announcing }
    }

    /// The node, if this is its present life.
    pub(super) fn in_life(&mut self, node: NodeId, incarnation: Incarnation) -> Result<&mut Node, NodeOutcome> {
        match self.0.get_mut(&node) {
            None => Err(NodeOutcome::Unknown),
            Some(node) if node.incarnation == incarnation => Ok(node),
            Some(node) => Err(NodeOutcome::Stale { current: node.incarnation }),
        }
    }

    /// Takes the node out, if this is its present life and it has no copies.
    pub(super) fn remove(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Node, NodeOutcome> {
        match self.in_life(node, incarnation)?.holdings.replicas {
            0 => self.0.remove(&node).ok_or(NodeOutcome::Unknown),
            replicas => Err(NodeOutcome::Holds { replicas }),
        }
    }

    fn known(&mut self, node: NodeId) -> &mut Node {
        self.0.get_mut(&node).expect("copies are on known nodes")
    }

    /// Counts a copy that its node got; `hash` is the object's.
    pub(super) fn gain(&mut self, object: &Object, hash: KeyHash, replica: ReplicaId) {
        self.known(replica.node).holdings.gain(object, hash, replica);
    }

    /// Takes a copy out of the count again.
    pub(super) fn lose(&mut self, object: &Object, hash: KeyHash, replica: ReplicaId) {
        self.known(replica.node).holdings.lose(object, hash, replica);
    }

    /// Counts copies that were counted elsewhere.
    pub(super) fn add(&mut self, node: NodeId, holdings: &Holdings) {
        self.known(node).holdings.add(holdings);
    }

    /// Puts a copy that is not counted any more on its node's free list.
    pub(super) fn list_free(&mut self, index: LogIndex, name: &Name, replica: ReplicaId) -> FreeKey {
        let key = FreeKey::new(index, replica);
        self.known(replica.node).free_list.insert(key, name.clone());
        key
    }

    pub(super) fn free_list(&self, node: NodeId, after: LogIndex, limit: usize) -> FreeListPage {
        let Some(entries) = self.get(node).map(|node| &node.free_list) else { return FreeListPage::default() };
        let from = FreeKey { index: LogIndex(after.0.saturating_add(1)), incarnation: Incarnation(0), sequence: 0 };
        let mut page = FreeListPage::default();
        for (key, name) in entries.range(from..) {
            let starts_index = page.items.last().is_none_or(|last| last.index != key.index);
            if starts_index && page.items.len() >= limit.clamp(1, MAX_PAGE_ITEMS) {
                page.more = true;
                break;
            }
            let replica = ReplicaId { node, incarnation: key.incarnation, sequence: key.sequence };
            page.items.push(FreeItem { index: key.index, tenant: name.tenant(), key: name.key(), replica });
        }
        page
    }

    pub(super) fn digests(&self, node: NodeId) -> Vec<u64> {
        self.get(node).map(|node| node.holdings.digests.as_slice().to_vec()).unwrap_or_default()
    }

    pub(super) fn stats(&self) -> Vec<NodeStat> {
        let stat = |(&id, node): (&NodeId, &Node)| NodeStat {
            node: id,
            incarnation: node.incarnation,
            state: node.state,
            announcing: node.announcing,
            addresses: node.addresses.clone(),
            tiers: node.tiers.clone(),
            labels: node.labels.clone(),
            replicas: node.holdings.replicas,
            bytes: node.holdings.bytes,
            free_list: node.free_list.len() as u64,
        };
        self.0.iter().map(stat).collect()
    }

    /// Copies and bytes of all nodes.
    pub(super) fn totals(&self) -> (u64, u64) {
        let holdings = self.0.values().map(|node| &node.holdings);
        holdings.fold((0, 0), |(replicas, bytes), of| (replicas + of.replicas, bytes + of.bytes))
    }

    /// Asserts that the sums are those of `objects`.
    pub(super) fn validate<'a>(&self, objects: impl Iterator<Item = &'a Object>) {
        assert!(self.0.len() <= MAX_NODES);
        let mut expected: BTreeMap<NodeId, Holdings> = self.0.keys().map(|&node| (node, Holdings::default())).collect();
        for object in objects {
            for replica in object.replicas() {
                let node = &self.0[&replica.id.node];
                assert!(replica.id.incarnation <= node.incarnation, "a copy of a life to come: {replica:?}");
                let free = node.free_list.keys().find(|key| FreeKey::new(key.index, replica.id) == **key);
                assert_eq!(free, None, "a copy that is counted and to be freed");
                let expected = expected.get_mut(&replica.id.node).expect("copies are on known nodes");
                expected.gain(object, object.hash(), replica.id);
            }
        }
        for (id, node) in &self.0 {
            assert_eq!(node.holdings, expected[id], "sums of node {id}");
        }
    }
}
