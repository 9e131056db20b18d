//! The catalog against a plain map, under random commands with repeats, reorderings and regroupings.
//!
//! The model remembers everything for ever and knows no bound, so where the catalog forgets (ids that were freed,
//! answers of sessions) it must do so without anybody noticing. Beside equal outcomes one law is checked after each
//! step: no copy that its node may have freed is ever visible again.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use tidepool_metadata::catalog::{
    AbandonOutcome, AddReplicaItem, AddReplicaOutcome, Answer, Catalog, Command, CompleteItem, CompleteOutcome, Copies,
    EntryContext, ForgetMode, ForgetOutcome, Labels, Located, MAX_TASK_FAILURES, NewReplica, NodeAddresses,
    NodeRegistration, NodeState, Outcome, PinItem, PinOutcome, Query, Quota, Refusal, RemoveItem, RemoveOutcome,
    ReplicaName, RequestId, SessionId, TaskFailure, TaskId, TaskKind, TaskOutcome, TaskRefusal, TaskRequest, TaskState,
    TaskStep,
};
use tidepool_metadata::{
    DataType, Durability, Incarnation, LogIndex, LogTime, NodeId, ObjectKey, ReplicaId, TenantId, Term, VersionId,
};

const NODES: u32 = 3;
/// Who read an image.
const THREADS: NonZero<usize> = NonZero::new(3).expect("not 0");
const SESSION: SessionId = SessionId(1);
const TENANT_QUOTA: u64 = 500;

/// One entry of the log to be. Numbers choose among what was reserved before, modulo its count.
#[derive(Clone, Debug)]
enum Step {
    Pass(Duration),
    Reserve { key: u8, nodes: u8, length: u8, copies: Copies, upsert: bool, pin: bool, nvme: bool, request: Option<u8> },
    ReserveCopy { put: usize, node: u8 },
    Complete(Vec<usize>),
    Abandon(Vec<(usize, u8)>),
    Forget(ForgetMode, Vec<(usize, u8)>),
    AddReplicas(Vec<usize>),
    Remove(Vec<(u8, bool, Option<u8>)>),
    Pin(Vec<(u8, Option<u8>)>),
    Unpin(Vec<(u8, Option<u8>)>),
    State { node: u8, state: NodeState },
    NewLife { node: u8 },
    Freed { node: u8 },
    BeginTask { task: u8, is_move: bool, key: u8, source: u8, targets: Vec<u8> },
    AdvanceTask { task: u8, step: TaskStep },
    Reload,
}

fn wanted() -> impl Strategy<Value = Copies> {
    (1u8..4, 1u8..3).prop_map(|(wanted, minimum)| Copies::new(wanted.max(minimum), minimum).expect("legal"))
}

fn steps() -> impl Strategy<Value = Step> {
    let state = prop_oneof![Just(NodeState::Up), Just(NodeState::Draining), Just(NodeState::Absent)];
    let mode = prop_oneof![Just(ForgetMode::SurplusOnly), Just(ForgetMode::EvenLast), Just(ForgetMode::Lost)];
    let many = |most| vec(any::<usize>(), 1..most);
    let copies = || vec((any::<usize>(), any::<u8>()), 1..3);
    // Few ids, so that most are repeats.
    let request = || proptest::option::of(1u8..12);
    prop_oneof![
        2 => (0u64..50_000).prop_map(|milliseconds| Step::Pass(Duration::from_millis(milliseconds))),
        8 => (0u8..4, 1u8..8, any::<u8>(), wanted(), any::<(bool, bool, bool)>(), request()).prop_map(
            |(key, nodes, length, copies, (upsert, pin, nvme), request)| {
                Step::Reserve { key, nodes, length, copies, upsert, pin: pin && upsert, nvme, request }
            }),
        3 => (any::<usize>(), 0u8..NODES as u8).prop_map(|(put, node)| Step::ReserveCopy { put, node }),
        10 => many(4).prop_map(Step::Complete),
        2 => copies().prop_map(Step::Abandon),
        4 => (mode, copies()).prop_map(|(mode, items)| Step::Forget(mode, items)),
        4 => many(3).prop_map(Step::AddReplicas),
        4 => vec((0u8..4, any::<bool>(), request()), 1..4).prop_map(Step::Remove),
        1 => vec((0u8..4, request()), 1..3).prop_map(Step::Pin),
        1 => vec((0u8..4, request()), 1..3).prop_map(Step::Unpin),
        2 => (0u8..NODES as u8, state).prop_map(|(node, state)| Step::State { node, state }),
        1 => (0u8..NODES as u8).prop_map(|node| Step::NewLife { node }),
        1 => (0u8..NODES as u8).prop_map(|node| Step::Freed { node }),
        3 => (0u8..6, any::<bool>(), 0u8..4, 0u8..NODES as u8 + 1, vec(0u8..NODES as u8, 1..3)).prop_map(
            |(task, is_move, key, source, targets)| Step::BeginTask { task, is_move, key, source, targets }),
        4 => (0u8..6, task_steps()).prop_map(|(task, step)| Step::AdvanceTask { task, step }),
        1 => Just(Step::Reload),
    ]
}

fn task_steps() -> impl Strategy<Value = TaskStep> {
    prop_oneof![
        Just(TaskStep::Start),
        Just(TaskStep::Settle),
        Just(TaskStep::Settle),
        Just(TaskStep::Fail(TaskFailure::NoSpace)),
        Just(TaskStep::Fail(TaskFailure::TargetDraining)),
        Just(TaskStep::Cancel),
    ]
}

#[derive(Clone, Debug)]
struct ModelTask {
    request: TaskRequest,
    version: VersionId,
    wanted: u8,
    state: TaskState,
    failures: u8,
}

#[derive(Clone, Debug)]
struct ModelObject {
    version: VersionId,
    commit_index: LogIndex,
    length: u64,
    replicas: BTreeMap<ReplicaId, Durability>,
    pins: u32,
    copies: Copies,
    durability: Durability,
}

/// Even keys belong to the default tenant, odd ones to a tenant with a quota.
fn name(key: u8) -> (TenantId, ObjectKey) {
    (TenantId(u32::from(key) % 2), ObjectKey::new(&[b'k', key]).expect("legal key"))
}

/// Some objects of each tenant are of one group.
fn is_grouped(length: u64) -> bool {
    length.is_multiple_of(3)
}

fn request_id(sequence: Option<u8>, kind: u64) -> Option<RequestId> {
    sequence.map(|one| RequestId { session: SESSION, sequence: kind + u64::from(one) })
}

#[derive(Default)]
struct Model {
    now: u64,
    index: LogIndex,
    objects: BTreeMap<(TenantId, ObjectKey), ModelObject>,
    lives: BTreeMap<NodeId, (u32, NodeState)>,
    /// Nodes that an operator empties, whether they are here or not.
    drained: BTreeSet<NodeId>,
    /// All copies that their nodes may have freed, ever.
    freed: BTreeSet<ReplicaId>,
    /// Of the puts with request ids: under which version each became visible, or that it lost.
    put: BTreeMap<u64, Option<VersionId>>,
    removals: BTreeMap<u64, RemoveOutcome>,
    pins: BTreeMap<u64, PinOutcome>,
    tasks: BTreeMap<TaskId, ModelTask>,
}

impl Model {
    fn reads(&self, replica: &ReplicaId) -> bool {
        self.lives[&replica.node].1 != NodeState::Absent
    }

    fn is_fresh(&self, reserved_at: LogTime) -> bool {
        reserved_at.0 + 60_000 >= self.now
    }

    fn used(&self, tenant: TenantId) -> u64 {
        let charge = |object: &ModelObject| object.length * object.replicas.len() as u64;
        self.objects.iter().filter(|((owner, _), _)| *owner == tenant).map(|(_, object)| charge(object)).sum()
    }

    fn allows(&self, tenant: TenantId, less: u64, more: u64) -> bool {
        tenant == TenantId::DEFAULT || more <= less || self.used(tenant) - less + more <= TENANT_QUOTA
    }

    fn complete(&mut self, item: &CompleteItem) -> CompleteOutcome {
        let Some(sequence) = item.request.map(|request| request.sequence) else { return self.complete_once(item) };
        match self.put.get(&sequence) {
            Some(version) if *version != Some(item.version) => {
                self.freed.extend(item.replicas.iter().map(|new| new.replica));
                CompleteOutcome::Repeated { stored: version.is_some() }
            }
            Some(_) => self.complete_once(item),
            None => {
                let outcome = self.complete_once(item);
                let answer = match outcome {
                    CompleteOutcome::Completed { .. } => Some(Some(item.version)),
                    CompleteOutcome::AlreadyExists { .. } => Some(None),
                    _ => None,
                };
                self.put.extend(answer.map(|answer| (sequence, answer)));
                outcome
            }
        }
    }

    fn complete_once(&mut self, item: &CompleteItem) -> CompleteOutcome {
        let name = (item.tenant, item.key.clone());
        let existing = self.objects.get(&name).cloned();
        if let Some(object) = existing.as_ref().filter(|object| object.version == item.version) {
            return CompleteOutcome::Completed { replicas: object.replicas.len() as u8 };
        }
        let held = existing.as_ref().filter(|object| object.replicas.keys().any(|replica| self.reads(replica)));
        let good: BTreeMap<ReplicaId, Durability> = item
            .replicas
            .iter()
            .filter(|new| self.lives[&new.replica.node].0 == new.replica.incarnation.0)
            .filter(|new| !self.freed.contains(&new.replica))
            .map(|new| (new.replica, new.durability))
            .collect();
        let readable = good.keys().filter(|replica| self.reads(replica)).count();
        let charge = |object: &ModelObject| object.length * object.replicas.len() as u64;
        let less = existing.as_ref().map_or(0, charge);
        let outcome = match held {
            Some(object) if !item.upsert => CompleteOutcome::AlreadyExists { version: object.version },
            _ if !self.is_fresh(item.reserved_at) => CompleteOutcome::Refused(Refusal::ReservationExpired),
            _ if readable < usize::from(item.copies.minimum()) => CompleteOutcome::Refused(Refusal::TooFewReplicas),
            _ if !self.allows(item.tenant, less, item.length * good.len() as u64) => {
                CompleteOutcome::Refused(Refusal::QuotaExceeded)
            }
            _ => CompleteOutcome::Completed { replicas: good.len() as u8 },
        };
        if matches!(outcome, CompleteOutcome::Completed { .. }) {
            self.freed.extend(existing.iter().flat_map(|object| object.replicas.keys()));
            self.freed.extend(item.replicas.iter().map(|new| new.replica).filter(|id| !good.contains_key(id)));
            let object = ModelObject {
                version: item.version,
                commit_index: self.index,
                length: item.length,
                replicas: good,
                pins: existing.map_or(0, |object| object.pins).max(u32::from(item.pin)),
                copies: item.copies,
                durability: item.durability,
            };
            self.objects.insert(name, object);
        } else {
            self.freed.extend(item.replicas.iter().map(|new| new.replica));
        }
        outcome
    }

    fn abandon(&mut self, item: &ReplicaName) -> AbandonOutcome {
        match self.objects.get(&(item.tenant, item.key.clone())) {
            Some(object) if object.replicas.contains_key(&item.replica) => {
                AbandonOutcome::Completed { version: object.version, commit_index: object.commit_index }
            }
            _ => {
                self.freed.insert(item.replica);
                AbandonOutcome::Abandoned
            }
        }
    }

    fn forget(&mut self, mode: ForgetMode, item: &ReplicaName) -> ForgetOutcome {
        let name = (item.tenant, item.key.clone());
        let Some(object) = self.objects.get(&name).filter(|object| object.replicas.contains_key(&item.replica)) else {
            return ForgetOutcome::Unknown;
        };
        let others = || object.replicas.iter().filter(|(replica, _)| **replica != item.replica);
        let keeps = |replica: &ReplicaId| self.lives[&replica.node] == (replica.incarnation.0, NodeState::Up);
        let kept: Vec<Durability> = others().filter(|(id, _)| keeps(id)).map(|(_, &durability)| durability).collect();
        let up = self.lives.values().filter(|life| life.1 == NodeState::Up).count();
        let durable = |durability: &Durability| *durability >= object.durability;
        let surplus = kept.len() >= usize::from(object.copies.wanted()).min(up).max(1)
            && (!durable(&object.replicas[&item.replica]) || kept.iter().any(durable));
        let is_task =
            |task: &ModelTask| (task.request.tenant, task.request.key.clone()) == name && task.state.is_open();
        if mode == ForgetMode::SurplusOnly && (!surplus || self.tasks.values().any(is_task)) {
            return ForgetOutcome::StillNeeded;
        }
        if mode == ForgetMode::EvenLast && object.pins > 0 && !others().any(|(replica, _)| self.reads(replica)) {
            return ForgetOutcome::Pinned;
        }
        if mode == ForgetMode::EvenLast && object.replicas.len() == 1 && is_grouped(object.length) {
            // A group goes as one, unless one of it is pinned.
            let is_other = |other: &(TenantId, ObjectKey), object: &ModelObject| {
                *other != name && other.0 == name.0 && is_grouped(object.length)
            };
            if self.objects.iter().any(|(other, object)| is_other(other, object) && object.pins > 0) {
                return ForgetOutcome::Pinned;
            }
            let is_kept = |other: &_, object: &mut ModelObject| {
                let goes = is_other(other, object);
                if goes {
                    self.freed.extend(object.replicas.keys());
                }
                !goes
            };
            self.objects.retain(is_kept);
        }
        self.freed.insert(item.replica);
        let object = self.objects.get_mut(&name).expect("just seen");
        object.replicas.remove(&item.replica);
        if mode == ForgetMode::EvenLast {
            let wanted = object.copies.wanted().min(object.replicas.len().max(1) as u8);
            object.copies = Copies::new(wanted, object.copies.minimum().min(wanted)).expect("legal");
        }
        let last = object.replicas.is_empty();
        if last {
            self.objects.remove(&name);
        }
        ForgetOutcome::Forgotten { last }
    }

    fn add(&mut self, item: &AddReplicaItem) -> AddReplicaOutcome {
        let name = (item.tenant, item.key.clone());
        let object = self.objects.get(&name).filter(|object| object.version == item.version);
        let outcome = match object {
            None => Err(Refusal::NoSuchVersion),
            Some(object) if object.replicas.contains_key(&item.replica) => return AddReplicaOutcome::Added,
            Some(_) if !self.is_fresh(item.reserved_at) => Err(Refusal::ReservationExpired),
            Some(_) if self.freed.contains(&item.replica) => Err(Refusal::Abandoned),
            Some(object) if object.replicas.keys().any(|replica| replica.node == item.replica.node) => {
                Err(Refusal::TooManyReplicas)
            }
            Some(_) if self.lives[&item.replica.node].0 != item.replica.incarnation.0 => Err(Refusal::StaleNode),
            Some(object) if !self.allows(item.tenant, 0, object.length) => Err(Refusal::QuotaExceeded),
            Some(_) => Ok(()),
        };
        match outcome {
            Err(refusal) => {
                self.freed.insert(item.replica);
                AddReplicaOutcome::Refused(refusal)
            }
            Ok(()) => {
                let object = self.objects.get_mut(&name).expect("just seen");
                object.replicas.insert(item.replica, item.durability);
                AddReplicaOutcome::Added
            }
        }
    }

    fn remove(&mut self, item: &RemoveItem) -> RemoveOutcome {
        let sequence = item.request.map(|request| request.sequence);
        if let Some(answer) = sequence.and_then(|sequence| self.removals.get(&sequence)) {
            return *answer;
        }
        let name = (item.tenant, item.key.clone());
        let outcome = match self.objects.get(&name) {
            None => RemoveOutcome::Missing,
            Some(object) if object.pins > 0 && !item.force => RemoveOutcome::Pinned,
            Some(object) => RemoveOutcome::Removed { version: object.version },
        };
        if matches!(outcome, RemoveOutcome::Removed { .. }) {
            let object = self.objects.remove(&name).expect("just seen");
            self.freed.extend(object.replicas.keys());
        }
        self.removals.extend(sequence.map(|sequence| (sequence, outcome)));
        outcome
    }

    fn change_pins(&mut self, item: &PinItem, change: fn(u32) -> u32) -> PinOutcome {
        let sequence = item.request.map(|request| request.sequence);
        if let Some(answer) = sequence.and_then(|sequence| self.pins.get(&sequence)) {
            return *answer;
        }
        let outcome = match self.objects.get_mut(&(item.tenant, item.key.clone())) {
            None => PinOutcome::Missing,
            Some(object) => {
                object.pins = change(object.pins);
                PinOutcome::Pinned { pins: object.pins }
            }
        };
        self.pins.extend(sequence.map(|sequence| (sequence, outcome)));
        outcome
    }

    fn begin(&mut self, request: &TaskRequest) -> TaskOutcome {
        if let Some(known) = self.tasks.get(&request.task) {
            let is_same = known.request == *request;
            return if is_same { TaskOutcome::Known(known.state) } else { TaskOutcome::Refused(TaskRefusal::Mismatch) };
        }
        let distinct: BTreeSet<_> = request.targets.iter().chain(&request.source).collect();
        let is_odd = request.kind == TaskKind::Move && (request.source.is_none() || request.targets.len() > 1);
        if is_odd || distinct.len() < request.targets.len() + usize::from(request.source.is_some()) {
            return TaskOutcome::Refused(TaskRefusal::Malformed);
        }
        let Some(object) = self.objects.get(&(request.tenant, request.key.clone())) else {
            return TaskOutcome::Refused(TaskRefusal::NoSuchObject);
        };
        let has = |node: &NodeId| object.replicas.keys().any(|replica| replica.node == *node);
        if request.targets.iter().any(|target| self.lives[target].1 != NodeState::Up) {
            return TaskOutcome::Refused(TaskRefusal::NodeNotUp);
        }
        if request.source.is_some_and(|source| !has(&source)) {
            return TaskOutcome::Refused(TaskRefusal::NotOnSource);
        }
        let new = request.targets.iter().filter(|target| !has(target)).count() as u8;
        let wanted = match request.kind {
            TaskKind::Move if new == 0 => return TaskOutcome::Refused(TaskRefusal::TargetHasCopy),
            TaskKind::Move => object.copies.wanted(),
            TaskKind::Copy => object.copies.wanted() + new,
        };
        let state = TaskState::Waiting;
        let task = ModelTask { request: request.clone(), version: object.version, wanted, state, failures: 0 };
        self.tasks.insert(request.task, task);
        TaskOutcome::Known(state)
    }

    fn step_task(&mut self, id: TaskId, step: TaskStep) -> TaskOutcome {
        let Some(task) = self.tasks.get(&id).cloned() else { return TaskOutcome::Unknown };
        if !task.state.is_open() {
            return TaskOutcome::Known(task.state);
        }
        let settled = matches!(step, TaskStep::Settle | TaskStep::Fail(_)).then(|| self.settle(&task)).flatten();
        let known = self.tasks.get_mut(&id).expect("just seen");
        known.state = match (settled, step) {
            (Some(state), _) => state,
            (None, TaskStep::Start) => TaskState::Running,
            (None, TaskStep::Cancel) => TaskState::Cancelled,
            (None, TaskStep::Settle) => task.state,
            (None, TaskStep::Fail(failure)) => {
                known.failures += 1;
                let ends = failure == TaskFailure::TargetDraining || known.failures == MAX_TASK_FAILURES;
                if ends { TaskState::Failed(failure) } else { task.state }
            }
        };
        TaskOutcome::Known(known.state)
    }

    fn settle(&mut self, task: &ModelTask) -> Option<TaskState> {
        let TaskRequest { tenant, key, source, targets, kind, .. } = &task.request;
        let lives = &self.lives;
        let counts = |replica: &ReplicaId| lives[&replica.node] == (replica.incarnation.0, NodeState::Up);
        let object = self.objects.get_mut(&(*tenant, key.clone())).filter(|object| object.version == task.version);
        let Some(object) = object else { return Some(TaskState::Failed(TaskFailure::ObjectGone)) };
        let from = object.replicas.keys().find(|replica| Some(replica.node) == *source).copied();
        let is_there = |target: &NodeId| object.replicas.keys().any(|copy| copy.node == *target && counts(copy));
        if !targets.iter().all(is_there) {
            let is_lost = *kind == TaskKind::Move && from.is_none();
            return is_lost.then_some(TaskState::Failed(TaskFailure::SourceGone));
        }
        if *kind == TaskKind::Copy {
            let wanted = object.copies.wanted().max(task.wanted);
            object.copies = Copies::new(wanted, object.copies.minimum()).expect("legal");
        } else if let Some(from) = from {
            let durable = |copy: &ReplicaId| object.replicas[copy] >= object.durability;
            if durable(&from) && !object.replicas.keys().any(|copy| *copy != from && counts(copy) && durable(copy)) {
                return Some(TaskState::Failed(TaskFailure::StillNeeded));
            }
            object.replicas.remove(&from);
            assert!(object.replicas.keys().any(counts), "a move takes no last copy");
            self.freed.insert(from);
        }
        Some(TaskState::Done)
    }

    /// The outcome that the catalog must give.
    fn apply(&mut self, command: &Command) -> Outcome {
        match command {
            Command::Complete(items) => Outcome::Complete(items.iter().map(|item| self.complete(item)).collect()),
            Command::Abandon(items) => Outcome::Abandon(items.iter().map(|item| self.abandon(item)).collect()),
            Command::Forget { mode, items } => {
                Outcome::Forget(items.iter().map(|item| self.forget(*mode, item)).collect())
            }
            Command::AddReplicas(items) => Outcome::AddReplicas(items.iter().map(|item| self.add(item)).collect()),
            Command::Remove(items) => Outcome::Remove(items.iter().map(|item| self.remove(item)).collect()),
            Command::Pin(items) => {
                Outcome::Pin(items.iter().map(|item| self.change_pins(item, |pins| pins + 1)).collect())
            }
            Command::Unpin(items) => {
                let unpin = |pins: u32| pins.saturating_sub(1);
                Outcome::Pin(items.iter().map(|item| self.change_pins(item, unpin)).collect())
            }
            Command::BeginTask(request) => Outcome::Task(self.begin(request)),
            Command::StepTask { task, step } => Outcome::Task(self.step_task(*task, *step)),
            other => unreachable!("the model has no {other:?}"),
        }
    }
}

/// The catalog, its regrouped twin, the image that is kept of it, and the model.
struct Run {
    catalog: Catalog,
    twin: Catalog,
    image: BTreeMap<Vec<u8>, Vec<u8>>,
    model: Model,
    index: u64,
    puts: Vec<CompleteItem>,
    copies: Vec<AddReplicaItem>,
}

impl Run {
    fn new() -> Self {
        let mut run = Self {
            catalog: Catalog::new(),
            twin: Catalog::new(),
            image: BTreeMap::new(),
            model: Model { now: 10_000_000, ..Model::default() },
            index: 0,
            puts: Vec::new(),
            copies: Vec::new(),
        };
        (1..=NODES).for_each(|node| run.register(node, 1));
        let quota = Quota { bytes: Some(TENANT_QUOTA), objects: None };
        run.both(&Command::CreateTenant { name: "quota".to_owned(), quota });
        run.both(&Command::OpenSession { session: SESSION });
        run
    }

    fn register(&mut self, node: u32, incarnation: u32) {
        let registration = NodeRegistration {
            node: NodeId(node),
            incarnation: Incarnation(incarnation),
            addresses: NodeAddresses::default(),
            tiers: vec![],
            labels: Labels::default(),
        };
        self.both(&Command::RegisterNode(registration));
        let life = self.model.lives.entry(NodeId(node)).or_insert((incarnation, NodeState::Up));
        let drains = self.model.drained.contains(&NodeId(node));
        *life = (incarnation, if drains { NodeState::Draining } else { NodeState::Up });
    }

    fn entry(&mut self) -> EntryContext {
        self.index += 1;
        self.model.index = LogIndex(self.index);
        EntryContext { index: LogIndex(self.index), term: Term(1), time: LogTime(self.model.now) }
    }

    /// A command that is the same for catalog and twin.
    fn both(&mut self, command: &Command) {
        let at = self.entry();
        assert_eq!(self.catalog.apply(at, command), self.twin.apply(at, command));
    }

    /// A command whose outcome the model knows; the twin gets its items one by one.
    fn modelled(&mut self, command: &Command) {
        if singles(command).is_empty() {
            return self.both(command);
        }
        let at = self.entry();
        let outcome = self.catalog.apply(at, command);
        assert_eq!(outcome, self.model.apply(command), "{command:?}");
        let apart: Vec<Outcome> = singles(command).iter().map(|single| self.twin.apply(at, single)).collect();
        assert_eq!(singles_of(&outcome), apart, "regrouped {command:?}");
    }

    fn reserve(&mut self, step: &Step) {
        let Step::Reserve { key, nodes, length, copies, upsert, pin, nvme, request } = *step else { return };
        let sequence = self.puts.len() as u64 + 1;
        let (tenant, key) = name(key);
        let durability = if nvme { Durability::Nvme } else { Durability::Memory };
        let replica = |node: u32| NewReplica {
            replica: self.fresh_replica(node, sequence),
            durability: if node == 1 { durability } else { Durability::Memory },
        };
        self.puts.push(CompleteItem {
            tenant,
            key,
            version: VersionId { node: NodeId(1), incarnation: Incarnation(1), sequence },
            length: u64::from(length),
            slice_bytes: 1 << 20,
            data_type: DataType::KvCache,
            group: is_grouped(length.into()).then(|| "group".into()),
            checksums: vec![sequence as u32],
            replicas: (1..=NODES).filter(|node| nodes >> (node - 1) & 1 == 1).map(replica).collect(),
            copies,
            durability,
            upsert,
            pin,
            reserved_at: LogTime(self.model.now),
            request: request_id(request, 300),
        });
    }

    fn fresh_replica(&self, node: u32, sequence: u64) -> ReplicaId {
        let incarnation = Incarnation(self.model.lives[&NodeId(node)].0);
        ReplicaId { node: NodeId(node), incarnation, sequence }
    }

    fn reserve_copy(&mut self, put: usize, node: u8) {
        let Some(put) = choose(&self.puts, put) else { return };
        let sequence = 1_000_000 + self.copies.len() as u64;
        let copy = AddReplicaItem {
            tenant: put.tenant,
            key: put.key.clone(),
            version: put.version,
            replica: self.fresh_replica(u32::from(node) + 1, sequence),
            durability: Durability::Memory,
            reserved_at: LogTime(self.model.now),
        };
        self.copies.push(copy);
    }

    /// Names copies of puts and further ones.
    fn names(&self, choices: &[(usize, u8)]) -> Vec<ReplicaName> {
        let name = |&(number, copy): &(usize, u8)| {
            if copy % 4 == 3 {
                let copy = choose(&self.copies, number)?;
                return Some(ReplicaName { tenant: copy.tenant, key: copy.key.clone(), replica: copy.replica });
            }
            let put = choose(&self.puts, number)?;
            let replica = put.replicas[usize::from(copy) % put.replicas.len()].replica;
            Some(ReplicaName { tenant: put.tenant, key: put.key.clone(), replica })
        };
        choices.iter().filter_map(name).collect()
    }

    fn step(&mut self, step: &Step) {
        let pins = |items: &[(u8, Option<u8>)], kind| {
            let item = |&(key, sequence): &(u8, Option<u8>)| {
                let (tenant, key) = name(key);
                PinItem { tenant, key, request: request_id(sequence, kind) }
            };
            items.iter().map(item).collect()
        };
        match step {
            Step::Pass(time) => self.model.now += time.as_millis() as u64,
            Step::Reserve { .. } => self.reserve(step),
            Step::ReserveCopy { put, node } => self.reserve_copy(*put, *node),
            Step::Complete(puts) => {
                let items = puts.iter().filter_map(|&put| choose(&self.puts, put)).cloned().collect();
                self.modelled(&Command::Complete(items));
            }
            Step::Abandon(choices) => self.modelled(&Command::Abandon(self.names(choices))),
            Step::Forget(mode, choices) => {
                let items = self.names(choices);
                self.modelled(&Command::Forget { mode: *mode, items });
            }
            Step::AddReplicas(copies) => {
                let items = copies.iter().filter_map(|&copy| choose(&self.copies, copy)).cloned().collect();
                self.modelled(&Command::AddReplicas(items));
            }
            Step::Remove(items) => {
                let item = |&(key, force, sequence): &(u8, bool, Option<u8>)| {
                    let (tenant, key) = name(key);
                    RemoveItem { tenant, key, version: None, force, request: request_id(sequence, 0) }
                };
                self.modelled(&Command::Remove(items.iter().map(item).collect()));
            }
            Step::Pin(items) => self.modelled(&Command::Pin(pins(items, 100))),
            Step::Unpin(items) => self.modelled(&Command::Unpin(pins(items, 200))),
            Step::State { node, state } => {
                let node = NodeId(u32::from(*node) + 1);
                let (incarnation, known) = self.model.lives.get_mut(&node).expect("registered");
                *known = *state;
                match state {
                    NodeState::Draining => _ = self.model.drained.insert(node),
                    NodeState::Up => _ = self.model.drained.remove(&node),
                    NodeState::Absent => {}
                }
                let incarnation = Incarnation(*incarnation);
                self.both(&Command::SetNodeState { node, incarnation, state: *state, term: None });
            }
            Step::NewLife { node } => {
                let node = u32::from(*node) + 1;
                let next = self.model.lives[&NodeId(node)].0 + 1;
                self.register(node, next);
            }
            Step::Freed { node } => {
                let through = LogIndex(self.index);
                self.both(&Command::Freed { node: NodeId(u32::from(*node) + 1), through });
            }
            Step::BeginTask { task, is_move, key, source, targets } => {
                let (tenant, key) = name(*key);
                let node = |number: u8| NodeId(u32::from(number) + 1);
                self.modelled(&Command::BeginTask(TaskRequest {
                    task: TaskId(u64::from(*task) + 1),
                    kind: if *is_move { TaskKind::Move } else { TaskKind::Copy },
                    tenant,
                    key,
                    source: (u32::from(*source) < NODES).then(|| node(*source)),
                    targets: targets.iter().copied().map(node).collect(),
                }));
            }
            Step::AdvanceTask { task, step } => {
                self.modelled(&Command::StepTask { task: TaskId(u64::from(*task) + 1), step: *step });
            }
            Step::Reload => self.reload(),
        }
        self.catalog.validate();
        self.check();
    }

    /// Goes on with the catalog that the image gives.
    fn reload(&mut self) {
        for (key, row) in self.catalog.take_changes() {
            match row {
                Some(row) => drop(self.image.insert(key, row)),
                None => drop(self.image.remove(&key)),
            }
        }
        let rows = self.catalog.rows();
        assert_eq!(self.image.clone().into_iter().collect::<Vec<_>>(), rows, "the image that was kept");
        self.catalog = Catalog::load(&rows, THREADS).expect("its own rows");
    }

    fn check(&self) {
        for number in 0..4 {
            let (tenant, key) = name(number);
            let expected = self.model.objects.get(&(tenant, key.clone()));
            match (self.catalog.locate(tenant, &key), expected) {
                (Located::Missing, None) => {}
                (Located::Found(found), Some(expected)) => {
                    assert_eq!((found.version, found.length), (expected.version, expected.length));
                    assert_eq!(found.commit_index, expected.commit_index);
                    let replicas: BTreeMap<_, _> =
                        found.replicas.iter().map(|copy| (copy.replica, copy.durability)).collect();
                    assert_eq!(replicas, expected.replicas);
                    let risen = replicas.keys().find(|replica| self.model.freed.contains(replica));
                    assert_eq!(risen, None, "a copy that may have been freed is visible");
                }
                (found, expected) => panic!("{key}: {found:?}, expected {expected:?}"),
            }
        }
        let Answer::Tenants(tenants) = self.catalog.query(&Query::Tenants) else { panic!("answer of tenants") };
        for tenant in tenants {
            assert_eq!(tenant.bytes, self.model.used(tenant.tenant));
        }
    }
}

fn choose<T>(items: &[T], number: usize) -> Option<&T> {
    items.get(number.checked_rem(items.len())?)
}

fn singles(command: &Command) -> Vec<Command> {
    fn each<T: Clone>(items: &[T], command: impl Fn(Vec<T>) -> Command) -> Vec<Command> {
        items.iter().map(|item| command(vec![item.clone()])).collect()
    }
    match command {
        Command::Complete(items) => each(items, Command::Complete),
        Command::Abandon(items) => each(items, Command::Abandon),
        Command::AddReplicas(items) => each(items, Command::AddReplicas),
        Command::Remove(items) => each(items, Command::Remove),
        Command::Pin(items) => each(items, Command::Pin),
        Command::Unpin(items) => each(items, Command::Unpin),
        Command::Forget { mode, items } => each(items, |items| Command::Forget { mode: *mode, items }),
        other => vec![other.clone()],
    }
}

fn singles_of(outcome: &Outcome) -> Vec<Outcome> {
    fn each<T: Clone>(items: &[T], outcome: impl Fn(Vec<T>) -> Outcome) -> Vec<Outcome> {
        items.iter().map(|item| outcome(vec![item.clone()])).collect()
    }
    match outcome {
        Outcome::Complete(items) => each(items, Outcome::Complete),
        Outcome::Abandon(items) => each(items, Outcome::Abandon),
        Outcome::AddReplicas(items) => each(items, Outcome::AddReplicas),
        Outcome::Remove(items) => each(items, Outcome::Remove),
        Outcome::Pin(items) => each(items, Outcome::Pin),
        Outcome::Forget(items) => each(items, Outcome::Forget),
        other => vec![other.clone()],
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_catalog_equals_a_plain_map_that_forgets_nothing(steps in vec(steps(), 1..120)) {
        let mut run = Run::new();
        for step in &steps {
            run.step(step);
        }
        run.reload();
        prop_assert_eq!(run.catalog.rows(), run.twin.rows(), "the same items in other groups give the same state");
        run.twin.validate();
    }
}
