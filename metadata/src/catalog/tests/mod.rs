//! Each rule of the protocol as the fact that fails without it.

mod encoding;
mod groups;
mod image;
mod lives;
mod puts;
mod reads;
mod removals;
mod requests;
mod tasks;

use std::num::NonZero;
use std::time::Duration;

use super::*;
use crate::node::TierKind;
use crate::object::{DataType, Durability, ObjectKey, VersionId};

/// A catalog under test: each command is an entry of its own, and all invariants are checked behind it.
struct World {
    catalog: Catalog,
    index: u64,
    now: u64,
}

const TENANT: TenantId = TenantId::DEFAULT;
/// Who read an image.
const THREADS: NonZero<usize> = NonZero::new(2).expect("not 0");

impl World {
    /// With nodes 1 to `nodes`, each in its life 1.
    fn new(nodes: u32) -> Self {
        let mut world = Self { catalog: Catalog::new(), index: 0, now: 1_000_000 };
        (1..=nodes).for_each(|node| {
            world.register(node, 1);
        });
        world
    }

    fn apply(&mut self, command: &Command) -> Outcome {
        self.index += 1;
        let at = EntryContext { index: LogIndex(self.index), term: Term(1), time: LogTime(self.now) };
        let outcome = self.catalog.apply(at, command);
        self.catalog.validate();
        outcome
    }

    fn pass(&mut self, time: Duration) {
        self.now += time.as_millis() as u64;
    }

    fn register(&mut self, node: u32, incarnation: u32) -> NodeOutcome {
        let tiers = vec![TierDescription { kind: TierKind::Dram, capacity_bytes: 1 << 30 }];
        let registration = NodeRegistration {
            node: NodeId(node),
            incarnation: Incarnation(incarnation),
            addresses: NodeAddresses::default(),
            tiers,
            labels: Labels::default(),
        };
        match self.apply(&Command::RegisterNode(registration)) {
            Outcome::Node(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn set_state(&mut self, node: u32, incarnation: u32, state: NodeState) -> NodeOutcome {
        let command =
            Command::SetNodeState { node: NodeId(node), incarnation: Incarnation(incarnation), state, term: None };
        match self.apply(&command) {
            Outcome::Node(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn remove_node(&mut self, node: u32, incarnation: u32) -> NodeOutcome {
        let command = Command::RemoveNode { node: NodeId(node), incarnation: Incarnation(incarnation) };
        match self.apply(&command) {
            Outcome::Node(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn expel_node(&mut self, node: u32, incarnation: u32) -> NodeOutcome {
        let command = Command::ExpelNode { node: NodeId(node), incarnation: Incarnation(incarnation) };
        match self.apply(&command) {
            Outcome::Node(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }

    /// A put of `name` as version `sequence`, with one copy on each of `nodes`, not yet applied.
    fn put(&self, name: &str, sequence: u64, nodes: &[u32]) -> CompleteItem {
        CompleteItem {
            tenant: TENANT,
            key: key(name),
            version: version(sequence),
            length: 100,
            slice_bytes: 1 << 20,
            data_type: DataType::KvCache,
            group: None,
            checksums: vec![sequence as u32],
            replicas: nodes.iter().map(|&node| new_replica(node, sequence)).collect(),
            copies: Copies::ONE,
            durability: Durability::Memory,
            upsert: false,
            pin: false,
            reserved_at: LogTime(self.now),
            request: None,
        }
    }

    fn complete(&mut self, item: &CompleteItem) -> CompleteOutcome {
        match self.apply(&Command::Complete(vec![item.clone()])) {
            Outcome::Complete(outcomes) => outcomes[0],
            other => panic!("{other:?}"),
        }
    }

    fn stored(&mut self, name: &str, sequence: u64, nodes: &[u32]) -> CompleteItem {
        let item = self.put(name, sequence, nodes);
        assert_eq!(self.complete(&item), CompleteOutcome::Completed { replicas: nodes.len() as u8 });
        item
    }

    fn abandon(&mut self, name: &str, replica: ReplicaId) -> AbandonOutcome {
        match self.apply(&Command::Abandon(vec![replica_name(name, replica)])) {
            Outcome::Abandon(outcomes) => outcomes[0],
            other => panic!("{other:?}"),
        }
    }

    fn forget(&mut self, mode: ForgetMode, name: &str, replica: ReplicaId) -> ForgetOutcome {
        match self.apply(&Command::Forget { mode, items: vec![replica_name(name, replica)] }) {
            Outcome::Forget(outcomes) => outcomes[0],
            other => panic!("{other:?}"),
        }
    }

    fn further(&self, name: &str, sequence: u64, replica: ReplicaId) -> AddReplicaItem {
        AddReplicaItem {
            tenant: TENANT,
            key: key(name),
            version: version(sequence),
            replica,
            durability: Durability::Memory,
            reserved_at: LogTime(self.now),
        }
    }

    fn add(&mut self, item: &AddReplicaItem) -> AddReplicaOutcome {
        match self.apply(&Command::AddReplicas(vec![item.clone()])) {
            Outcome::AddReplicas(outcomes) => outcomes[0],
            other => panic!("{other:?}"),
        }
    }

    fn adopt(&mut self, item: &AdoptItem) -> AddReplicaOutcome {
        match self.apply(&Command::Adopt(vec![item.clone()])) {
            Outcome::AddReplicas(outcomes) => outcomes[0],
            other => panic!("{other:?}"),
        }
    }

    fn remove(&mut self, name: &str) -> RemoveOutcome {
        self.remove_item(&RemoveItem { tenant: TENANT, key: key(name), version: None, force: false, request: None })
    }

    fn remove_item(&mut self, item: &RemoveItem) -> RemoveOutcome {
        match self.apply(&Command::Remove(vec![item.clone()])) {
            Outcome::Remove(outcomes) => outcomes[0],
            other => panic!("{other:?}"),
        }
    }

    fn pin(&mut self, name: &str) -> PinOutcome {
        match self.apply(&Command::Pin(vec![PinItem { tenant: TENANT, key: key(name), request: None }])) {
            Outcome::Pin(outcomes) => outcomes[0],
            other => panic!("{other:?}"),
        }
    }

    fn tenant(&mut self, command: &Command) -> TenantOutcome {
        match self.apply(command) {
            Outcome::Tenant(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn task(&mut self, command: &Command) -> TaskOutcome {
        match self.apply(command) {
            Outcome::Task(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn session(&mut self, command: &Command) -> SessionOutcome {
        match self.apply(command) {
            Outcome::Session(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn presence(&self, name: &str) -> Presence {
        self.catalog.presence(TENANT, &key(name))
    }

    fn location(&self, name: &str) -> ObjectLocation {
        match self.catalog.locate(TENANT, &key(name)) {
            Located::Found(location) => *location,
            other => panic!("{name}: {other:?}"),
        }
    }

    fn replicas(&self, name: &str) -> Vec<ReplicaId> {
        self.location(name).replicas.iter().map(|copy| copy.replica).collect()
    }

    fn free_list(&self, node: u32) -> Vec<ReplicaId> {
        let query = Query::FreeList { node: NodeId(node), after: LogIndex(0), limit: 1000 };
        match self.catalog.query(&query) {
            Answer::FreeList(page) => page.items.iter().map(|item| item.replica).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn counts(&self) -> Counts {
        match self.catalog.query(&Query::Counts) {
            Answer::Counts(counts) => counts,
            other => panic!("{other:?}"),
        }
    }
}

/// Readers share the catalog between entries.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Catalog>();
};

fn key(name: &str) -> ObjectKey {
    ObjectKey::new(name.as_bytes()).expect("legal key")
}

/// Coordinated by node 1.
fn version(sequence: u64) -> VersionId {
    VersionId { node: NodeId(1), incarnation: Incarnation(1), sequence }
}

/// In the node's life 1.
fn replica(node: u32, sequence: u64) -> ReplicaId {
    ReplicaId { node: NodeId(node), incarnation: Incarnation(1), sequence }
}

fn new_replica(node: u32, sequence: u64) -> NewReplica {
    NewReplica { replica: replica(node, sequence), durability: Durability::Memory }
}

fn replica_name(name: &str, replica: ReplicaId) -> ReplicaName {
    ReplicaName { tenant: TENANT, key: key(name), replica }
}

fn refused(refusal: Refusal) -> CompleteOutcome {
    CompleteOutcome::Refused(refusal)
}
