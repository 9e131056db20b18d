//! The catalog: what the cluster agreed on, as a pure function of the log.
//!
//! It knows objects and which nodes have copies of them (never where on a node, nor in which tier), nodes and what
//! they are to free, tenants and quotas, sessions of request ids, tasks, and ids that may not become
//! visible any more.
//! It is deliberately no place for leases, heat and load, which the leader keeps ([`crate::lease`]), and it never
//! waits, asks the time, draws a random number or does I/O.
//!
//! [`Catalog::apply`] is the only way to change it. The bytes of commands and the rule of each:
//! `docs/src/formats/log.md`; states drawn and invariants in words: `docs/src/catalog.md`. In relations:
//! - `command.index >= applied`; log time never goes back, even if a stamp does;
//! - each object has 1 to 16 copies, on different known nodes, none of them retired or on a free list;
//! - sums of nodes and tenants are the sums over objects ([`Catalog::validate`]);
//! - `load(rows) == self`, and equal states have equal rows.
//!
//! Who may call: one thread applies; readers share it between entries (an entry's commands are applied without a
//! query in between, so that a free list is never seen with half an index). Commands come from the log, so a bad one
//! is refused in its outcome; a panic here means that an invariant is broken. A crash loses nothing: the state is
//! the image of [`Catalog::take_changes`] plus the log behind it.

mod changes;
mod codec;
mod command;
mod copies;
mod digest;
mod encoding;
mod expelled;
mod image;
mod load;
mod nodes;
mod object;
mod order;
mod outcome;
mod put;
mod query;
mod read;
mod removal;
mod replicas;
mod retired;
mod sessions;
mod settings;
mod table;
mod tasks;
mod tenants;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

pub use codec::DecodeError;
pub use command::*;
pub use copies::{Copies, MAX_COPIES};
pub use digest::{KeyDigests, replica_digest};
pub use encoding::COMMAND_VERSION;
pub use expelled::MAX_EXPELLED;
pub use image::{LoadError, Row};
pub use load::Rows;
pub use nodes::MAX_NODES;
pub use outcome::*;
pub use query::*;
pub use retired::{MAX_RETIRED, RESERVATION_LIFETIME, RETIREMENT};
pub use sessions::{MANY_ANSWERS, MAX_ANSWERS, MAX_SESSION_ANSWERS, MAX_SESSIONS};
pub use tasks::{MAX_OPEN_TASKS, MAX_TASK_FAILURES, MAX_TASKS, TASK_LIFETIME, TASK_RETENTION};
pub use tenants::MAX_TENANTS;

use crate::log::{LogIndex, LogTime, Term};
use crate::node::{Incarnation, NodeId};
use crate::object::{DATA_TYPES, KeyHash, ReplicaId, TenantId};
use changes::Changes;
use expelled::Expelled;
use image::RowKey;
use nodes::Nodes;
use object::{Object, Replica};
use retired::{Retired, Stamp};
use sessions::Sessions;
use settings::Settings;
use table::{ObjectTable, Slot};
use tasks::Tasks;
use tenants::{Charge, Tenants};

/// Number of key buckets: 4,096, so that 10^7 objects are about 2,400 a bucket, one page of a repair.
pub const KEY_BUCKETS: usize = 1 << KeyBucket::BITS;

/// A part of the key space: the upper 12 bits of the key's hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyBucket(u16);

impl KeyBucket {
    pub(crate) const BITS: u32 = 12;

    /// The bucket of a key.
    #[must_use]
    pub fn of(hash: KeyHash) -> Self {
        Self((hash.0 >> (u64::BITS - Self::BITS)) as u16)
    }

    /// The bucket with this number, if it is below [`KEY_BUCKETS`].
    #[must_use]
    pub fn new(number: usize) -> Option<Self> {
        u16::try_from(number).ok().filter(|_| number < KEY_BUCKETS).map(Self)
    }

    /// Its number, which is its place in a list of digests.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The log entry that a command is applied for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryContext {
    /// The entry's index, never below the last one applied. An entry may hold several commands.
    pub index: LogIndex,
    /// The term of the leader that logged it.
    pub term: Term,
    /// The leader's stamp. It should advance as a clock that cannot be set does: sessions, reservations and retired ids
    /// live by it, so a wall clock that jumps by years must not move it by more than the time that passed.
    pub time: LogTime,
}

/// What the cluster agreed on. See the module's documentation.
pub struct Catalog {
    applied: LogIndex,
    time: LogTime,
    settings: Settings,
    objects: ObjectTable,
    groups: BTreeSet<(TenantId, Arc<str>, Slot)>,
    /// Bytes of all copies, by the number of the type.
    type_bytes: [u64; DATA_TYPES],
    nodes: Nodes,
    expelled: Expelled,
    tenants: Tenants,
    sessions: Sessions,
    retired: Retired,
    tasks: Tasks,
    /// Rows of the image that changed since they were last taken.
    changes: Changes,
}

impl Default for Catalog {
    fn default() -> Self {
        Self::new()
    }
}

impl Catalog {
    /// The catalog before the first entry: the default tenant, nothing else.
    #[must_use]
    pub fn new() -> Self {
        let mut catalog = Self::empty();
        catalog.changes.extend([RowKey::Meta, RowKey::Tenant(TenantId::DEFAULT)]);
        catalog
    }

    fn empty() -> Self {
        Self {
            applied: LogIndex(0),
            time: LogTime(0),
            settings: Settings::default(),
            objects: ObjectTable::new(),
            groups: BTreeSet::new(),
            type_bytes: [0; DATA_TYPES],
            nodes: Nodes::default(),
            expelled: Expelled::default(),
            tenants: Tenants::new(),
            sessions: Sessions::default(),
            retired: Retired::default(),
            tasks: Tasks::default(),
            changes: Changes::default(),
        }
    }

    /// Index of the last entry applied.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        self.applied
    }

    /// Log time of the last entry applied.
    #[must_use]
    pub fn time(&self) -> LogTime {
        self.time
    }

    /// Applies one command of the entry `at` and says how it ended.
    ///
    /// # Panics
    /// If `at.index` is below [`Self::applied`]: the caller skips what an image already holds.
    pub fn apply(&mut self, at: EntryContext, command: &Command) -> Outcome {
        self.advance(at);
        match command {
            Command::RegisterNode(registration) => Outcome::Node(self.register_node(registration)),
            Command::SetNodeState { term: Some(term), .. } if *term != at.term => Outcome::Node(NodeOutcome::OutOfTerm),
            Command::SetNodeState { node, incarnation, state, .. } => {
                let is_verdict = matches!(command, Command::SetNodeState { term: Some(_), .. });
                Outcome::Node(self.set_node_state(*node, *incarnation, *state, is_verdict))
            }
            Command::RemoveNode { node, incarnation } => Outcome::Node(self.remove_node(*node, *incarnation)),
            Command::ExpelNode { node, incarnation } => Outcome::Node(self.expel_node(*node, *incarnation)),
            Command::Complete(items) => Outcome::Complete(each(items, |item| self.complete(item))),
            Command::Abandon(items) => Outcome::Abandon(each(items, |item| self.abandon(item))),
            Command::AddReplicas(items) => Outcome::AddReplicas(each(items, |item| self.add_replica(item))),
            Command::Adopt(items) => Outcome::AddReplicas(each(items, |item| self.adopt(item))),
            Command::EndAnnouncement { node, incarnation, lost, last } => {
                self.end_announcement(*node, *incarnation, lost, *last)
            }
            Command::Forget { mode, items } => {
                let mut room = MAX_COMMAND_ITEMS;
                Outcome::Forget(each(items, |item| self.forget(*mode, item, &mut room)))
            }
            Command::Remove(items) => Outcome::Remove(each(items, |item| self.remove(item))),
            Command::Pin(items) => Outcome::Pin(each(items, |item| self.pin(item))),
            Command::Unpin(items) => Outcome::Pin(each(items, |item| self.unpin(item))),
            Command::CreateTenant { name, quota } => Outcome::Tenant(self.create_tenant(name, *quota)),
            Command::DropTenant { tenant } => Outcome::Tenant(self.drop_tenant(*tenant)),
            Command::SetQuota { tenant, quota } => Outcome::Tenant(self.set_quota(*tenant, *quota)),
            Command::Freed { node, through } => Outcome::Node(self.freed(*node, *through)),
            Command::OpenSession { session } => Outcome::Session(self.open_session(*session)),
            Command::AcknowledgeSession { session, through } => {
                Outcome::Session(self.acknowledge_session(*session, *through))
            }
            Command::ExpireSessions => Outcome::Session(self.expire_sessions()),
            Command::SetSetting(setting) => Outcome::Setting(self.settings.set(*setting)),
            Command::BeginTask(request) => Outcome::Task(self.begin_task(request)),
            Command::StepTask { task, step } => Outcome::Task(self.step_task(*task, *step)),
        }
    }

    fn advance(&mut self, at: EntryContext) {
        assert!(at.index >= self.applied, "entry {:?} is applied already: {:?}", at.index, self.applied);
        self.applied = at.index;
        self.time = self.time.max(at.time);
        self.changes.insert(RowKey::Meta);
        // Twice what one command can retire of its own items, so that the table shrinks under any load.
        let expired = self.retired.expire(self.time, 2 * MAX_COMMAND_ITEMS);
        self.changes.extend(expired.into_iter().map(RowKey::Retired));
        self.age_tasks();
    }

    fn register_node(&mut self, registration: &NodeRegistration) -> NodeOutcome {
        if self.expelled.contains(registration.node) {
            return NodeOutcome::Expelled;
        }
        self.changes.insert(RowKey::Node(registration.node));
        self.nodes.register(registration, self.settings.rebuilding)
    }

    /// A leader's verdict says whether the node is here, an operator's wish whether it is to be emptied.
    fn set_node_state(
        &mut self,
        node: NodeId,
        incarnation: Incarnation,
        state: NodeState,
        is_verdict: bool,
    ) -> NodeOutcome {
        match self.nodes.in_life(node, incarnation) {
            Err(outcome) => outcome,
            Ok(known) => {
                if !is_verdict && state != NodeState::Absent {
                    known.drains = state == NodeState::Draining;
                }
                known.state = if is_verdict && state == NodeState::Up { known.when_here() } else { state };
                self.changes.insert(RowKey::Node(node));
                NodeOutcome::Accepted { announce: known.announcing }
            }
        }
    }

    fn remove_node(&mut self, node: NodeId, incarnation: Incarnation) -> NodeOutcome {
        match self.nodes.remove(node, incarnation) {
            Err(outcome) => outcome,
            Ok(gone) => {
                self.changes.insert(RowKey::Node(node));
                // Nobody is left who would free what stands there.
                self.changes.extend(gone.free_list.into_keys().map(|key| RowKey::Free(node, key)));
                NodeOutcome::Accepted { announce: false }
            }
        }
    }

    fn expel_node(&mut self, node: NodeId, incarnation: Incarnation) -> NodeOutcome {
        if self.expelled.contains(node) {
            return NodeOutcome::Expelled;
        }
        let outcome = self.remove_node(node, incarnation);
        if matches!(outcome, NodeOutcome::Accepted { .. }) {
            let let_go = self.expelled.insert(node, self.applied);
            self.changes.extend(let_go.into_iter().chain([node]).map(RowKey::Expelled));
        }
        outcome
    }

    fn freed(&mut self, node: NodeId, through: LogIndex) -> NodeOutcome {
        let Some(known) = self.nodes.0.get_mut(&node) else { return NodeOutcome::Unknown };
        // The running entry may list more behind what the node has seen of it.
        let through = through.min(LogIndex(self.applied.0.saturating_sub(1)));
        while let Some(entry) = known.free_list.first_entry().filter(|entry| entry.key().index <= through) {
            let (key, _) = entry.remove_entry();
            self.changes.insert(RowKey::Free(node, key));
        }
        NodeOutcome::Accepted { announce: known.announcing }
    }

    fn open_session(&mut self, session: SessionId) -> SessionOutcome {
        if self.sessions.len() >= MAX_SESSIONS {
            self.expire_sessions();
        }
        self.changes.insert(RowKey::Session(session));
        self.sessions.open(session, self.time, self.settings.session_lifetime)
    }

    fn acknowledge_session(&mut self, session: SessionId, through: u64) -> SessionOutcome {
        let lifetime = self.settings.session_lifetime;
        self.changes.insert(RowKey::Session(session));
        self.sessions.acknowledge(session, through, self.time, lifetime)
    }

    fn expire_sessions(&mut self) -> SessionOutcome {
        let expired = self.sessions.expire(self.time, self.settings.session_lifetime);
        self.changes.extend(expired.iter().map(|&id| RowKey::Session(id)));
        SessionOutcome::Swept { dropped: u32::try_from(expired.len()).unwrap_or(u32::MAX) }
    }

    // What follows is how objects change: each step keeps sums, groups and changed rows in line with them.

    /// Makes an object visible whose name is not there.
    fn place(&mut self, object: Object) {
        let hash = object.hash();
        object.replicas().for_each(|replica| self.nodes.gain(&object, hash, replica.id));
        self.tenants.charge(object.tenant(), Charge::of(&object));
        self.type_bytes[object.data_type as usize] += object.charged_bytes();
        let group = object.group().cloned().map(|group| (object.tenant(), group));
        let slot = self.objects.insert(hash, object);
        self.changes.place(slot);
        self.groups.extend(group.map(|(tenant, group)| (tenant, group, slot)));
    }

    /// Takes an object out, retiring its copies; who frees them is up to the caller.
    fn displace(&mut self, slot: Slot) -> Object {
        let hash = self.objects.get(slot).hash();
        let object = self.objects.remove(slot, hash);
        object.replicas().for_each(|replica| {
            self.nodes.lose(&object, hash, replica.id);
            self.retire(replica.id, replica.reserved);
        });
        self.tenants.refund(object.tenant(), Charge::of(&object));
        self.type_bytes[object.data_type as usize] -= object.charged_bytes();
        self.changes.displace(object.name.clone());
        if let Some(group) = object.group() {
            self.groups.remove(&(object.tenant(), Arc::clone(group), slot));
        }
        object
    }

    /// Takes an object out and puts its copies on the free lists of their nodes.
    fn drop_object(&mut self, slot: Slot) -> Object {
        let object = self.displace(slot);
        for replica in object.replicas() {
            let key = self.nodes.list_free(self.applied, &object.name, replica.id);
            self.changes.insert(RowKey::Free(replica.id.node, key));
        }
        object
    }

    fn attach(&mut self, slot: Slot, replica: Replica) {
        let object = self.objects.get_mut(slot);
        object.add_replica(replica);
        self.nodes.gain(object, object.hash(), replica.id);
        self.tenants.charge(object.tenant(), Charge { objects: 0, bytes: object.length });
        self.type_bytes[object.data_type as usize] += object.length;
        self.changes.place(slot);
    }

    /// Takes away one copy of several, retiring it.
    fn detach(&mut self, slot: Slot, replica: Replica) {
        let object = self.objects.get_mut(slot);
        object.take_replica(replica.id);
        self.nodes.lose(object, object.hash(), replica.id);
        self.tenants.refund(object.tenant(), Charge { objects: 0, bytes: object.length });
        self.type_bytes[object.data_type as usize] -= object.length;
        self.changes.place(slot);
        self.retire(replica.id, replica.reserved);
    }

    fn retire(&mut self, replica: ReplicaId, reserved: Stamp) {
        let changed = self.retired.retire(replica, reserved, self.time);
        self.changes.extend(changed.into_iter().map(RowKey::Retired));
    }

    /// Whether some copy of the object is on a node that reads.
    fn is_held(&self, object: &Object) -> bool {
        object.replicas().any(|replica| self.nodes.reads(replica.id.node))
    }

    /// Asserts all invariants; walks everything. For tests and simulation.
    ///
    /// # Panics
    /// If one is broken.
    pub fn validate(&self) {
        self.objects.validate();
        self.nodes.validate(self.objects.iter());
        self.tenants.validate(self.objects.iter().map(|object| (object.tenant(), Charge::of(object))));
        self.sessions.validate();
        self.retired.validate();
        self.tasks.validate();
        let (mut grouped, mut type_bytes) = (0, [0; DATA_TYPES]);
        for object in self.objects.iter() {
            type_bytes[object.data_type as usize] += object.charged_bytes();
            let replicas: Vec<Replica> = object.replicas().collect();
            assert!((1..=MAX_REPLICAS).contains(&replicas.len()), "{:?} has {} copies", object.name, replicas.len());
            assert!(replicas.is_sorted_by(|one, other| one.id.node < other.id.node), "two copies on one node");
            assert!(object.describe().is_sound(), "{:?}", object.name);
            assert!(replicas.iter().all(|replica| !self.retired.contains(replica.id)), "a retired copy is visible");
            grouped += usize::from(object.group().is_some());
        }
        assert_eq!(self.groups.len(), grouped, "members of groups");
        assert_eq!(self.type_bytes, type_bytes, "bytes of types");
        for (tenant, group, slot) in &self.groups {
            let object = self.objects.get(*slot);
            assert_eq!((object.tenant(), object.group()), (*tenant, Some(group)));
        }
    }
}

impl Charge {
    fn of(object: &Object) -> Self {
        Self { objects: 1, bytes: object.charged_bytes() }
    }
}

fn each<T, O>(items: &[T], one: impl FnMut(&T) -> O) -> Vec<O> {
    items.iter().map(one).collect()
}
