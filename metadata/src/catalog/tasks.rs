//! Copies and moves of objects that somebody asked for: what is to be done, how far it is, and how it ended.
//!
//! ```text
//!           begin            start             settle: the targets' copies count
//!  (none) ────────> waiting ──────> running ─────────────────────────────────────> done
//!                      │               │ fail, cancel, TASK_LIFETIME                 │
//!                      └───────────────┴──────────────> failed, cancelled ───────────┴── TASK_RETENTION ──> (none)
//! ```
//!
//! The catalog makes no copy. Whoever executes has the targets pull theirs ([`super::Command::AddReplicas`]) and asks by
//! [`TaskStep::Settle`] whether that was all. A task is of the version that was current when it began.
//!
//! Invariants: the source's copy of a move goes in the entry that finds the target's counting, never before; while a
//! task is open none of its object's copies is surplus, so that nobody takes away what another one is making.
//! Bounds: [`MAX_TASKS`], of which [`MAX_OPEN_TASKS`] are open; finished ones make room, the oldest first.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Catalog;
use super::codec::{DecodeError, Field, Input, fields};
use super::command::{MAX_REPLICAS, TaskFailure, TaskId, TaskKind, TaskRequest, TaskState, TaskStep};
use super::copies::MAX_COPIES;
use super::image::RowKey;
use super::object::{Name, Object, Replica};
use super::outcome::{TaskOutcome, TaskRefusal};
use super::query::{MAX_PAGE_ITEMS, TaskPage, TaskStat};
use super::table::Slot;
use crate::log::LogTime;
use crate::node::NodeId;
use crate::object::{TenantId, VersionId};

/// Most tasks that are not finished.
pub const MAX_OPEN_TASKS: usize = 4096;
/// Most tasks in all: 12 MiB with the longest keys.
pub const MAX_TASKS: usize = 2 * MAX_OPEN_TASKS;
/// After how long a task that is not finished has failed.
pub const TASK_LIFETIME: Duration = Duration::from_secs(3600);
/// For how long it is known how a task ended.
pub const TASK_RETENTION: Duration = Duration::from_secs(3600);
/// After so many failures that may pass a task has failed.
pub const MAX_TASK_FAILURES: u8 = 10;

/// One task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Task {
    request: TaskRequest,
    version: VersionId,
    length: u64,
    /// How many copies there are to be once it is done.
    wanted: u8,
    state: TaskState,
    failures: u8,
    begun_at: LogTime,
    changed_at: LogTime,
}
fields!(Task { request, version, length, wanted, state, failures, begun_at, changed_at });

impl Task {
    /// Whether it has this id.
    pub(super) fn is_named(&self, id: TaskId) -> bool {
        self.request.task == id
    }

    fn name(&self) -> Name {
        Name::new(self.request.tenant, &self.request.key)
    }

    /// When something happens to it by itself.
    fn due(&self) -> LogTime {
        let (since, for_long) =
            if self.state.is_open() { (self.begun_at, TASK_LIFETIME) } else { (self.changed_at, TASK_RETENTION) };
        LogTime(since.0.saturating_add(for_long.as_millis() as u64))
    }
}

#[derive(Default)]
pub(super) struct Tasks {
    by_id: BTreeMap<TaskId, Task>,
    by_due: BTreeSet<(LogTime, TaskId)>,
    /// How many open ones each object has.
    open: BTreeMap<Name, usize>,
    open_count: usize,
}

impl Tasks {
    pub(super) fn get(&self, id: TaskId) -> Option<&Task> {
        self.by_id.get(&id)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = TaskId> {
        self.by_id.keys().copied()
    }

    /// Whether an open one is about the object.
    pub(super) fn concern(&self, object: &Object) -> bool {
        self.open.contains_key(&object.name)
    }

    pub(super) fn is_within_bounds(&self) -> bool {
        self.by_id.len() <= MAX_TASKS && self.open_count <= MAX_OPEN_TASKS
    }

    /// Sets a task as it is now, or as an image has it.
    pub(super) fn set(&mut self, id: TaskId, task: Task) {
        self.remove(id);
        self.by_due.insert((task.due(), id));
        if task.state.is_open() {
            *self.open.entry(task.name()).or_default() += 1;
            self.open_count += 1;
        }
        self.by_id.insert(id, task);
    }

    fn remove(&mut self, id: TaskId) {
        let Some(task) = self.by_id.remove(&id) else { return };
        self.by_due.remove(&(task.due(), id));
        if task.state.is_open() {
            self.open_count -= 1;
            let name = task.name();
            match self.open.get_mut(&name) {
                Some(count) if *count > 1 => *count -= 1,
                _ => drop(self.open.remove(&name)),
            }
        }
    }

    /// One that is due at `now`.
    fn due(&self, now: LogTime) -> Option<TaskId> {
        self.by_due.first().filter(|(due, _)| *due <= now).map(|&(_, id)| id)
    }

    fn oldest_finished(&self) -> Option<TaskId> {
        self.by_due.iter().map(|&(_, id)| id).find(|id| !self.by_id[id].state.is_open())
    }

    pub(super) fn validate(&self) {
        assert!(self.is_within_bounds());
        let due: BTreeSet<(LogTime, TaskId)> = self.by_id.iter().map(|(&id, task)| (task.due(), id)).collect();
        assert_eq!(self.by_due, due, "when tasks are due");
        let mut open: BTreeMap<Name, usize> = BTreeMap::new();
        let is_open = |task: &&Task| task.state.is_open();
        self.by_id.values().filter(is_open).for_each(|task| *open.entry(task.name()).or_default() += 1);
        assert_eq!(self.open_count, open.values().sum::<usize>(), "open tasks");
        assert_eq!(self.open, open, "objects of open tasks");
    }
}

impl Catalog {
    /// What time does to tasks, a bounded number of them.
    pub(super) fn age_tasks(&mut self) {
        for _ in 0..2 {
            let Some(id) = self.tasks.due(self.time) else { return };
            self.changes.insert(RowKey::Task(id));
            let task = &self.tasks.by_id[&id];
            if task.state.is_open() {
                let (state, changed_at) = (TaskState::Failed(TaskFailure::Expired), self.time);
                let task = Task { state, changed_at, ..task.clone() };
                self.tasks.set(id, task);
            } else {
                self.tasks.remove(id);
            }
        }
    }

    pub(super) fn begin_task(&mut self, request: &TaskRequest) -> TaskOutcome {
        if let Some(known) = self.tasks.get(request.task) {
            let is_same = known.request == *request;
            return if is_same { TaskOutcome::Known(known.state) } else { TaskOutcome::Refused(TaskRefusal::Mismatch) };
        }
        let (object, wanted) = match self.judge_task(request) {
            Ok(found) => found,
            Err(refusal) => return TaskOutcome::Refused(refusal),
        };
        let task = Task {
            request: request.clone(),
            version: object.version,
            length: object.length,
            wanted,
            state: TaskState::Waiting,
            failures: 0,
            begun_at: self.time,
            changed_at: self.time,
        };
        if self.tasks.open_count >= MAX_OPEN_TASKS {
            return TaskOutcome::TooMany;
        }
        if self.tasks.by_id.len() >= MAX_TASKS
            && let Some(oldest) = self.tasks.oldest_finished()
        {
            self.tasks.remove(oldest);
            self.changes.insert(RowKey::Task(oldest));
        }
        self.tasks.set(request.task, task);
        self.changes.insert(RowKey::Task(request.task));
        TaskOutcome::Known(TaskState::Waiting)
    }

    /// The object, and how many copies it is to have afterwards, if this can be begun.
    fn judge_task(&self, request: &TaskRequest) -> Result<(&Object, u8), TaskRefusal> {
        let TaskRequest { task, kind, source, targets, .. } = request;
        let distinct: BTreeSet<NodeId> = targets.iter().chain(source).copied().collect();
        let fits = match kind {
            TaskKind::Copy => (1..=MAX_REPLICAS).contains(&targets.len()),
            TaskKind::Move => targets.len() == 1 && source.is_some(),
        };
        if task.0 == 0 || !fits || distinct.len() != targets.len() + usize::from(source.is_some()) {
            return Err(TaskRefusal::Malformed);
        }
        let slot = self.visible(request.tenant, &request.key).ok_or(TaskRefusal::NoSuchObject)?;
        let object = self.objects.get(slot);
        for &target in targets {
            let node = self.nodes.get(target).ok_or(TaskRefusal::NoSuchNode)?;
            if !node.takes() {
                return Err(TaskRefusal::NodeNotUp);
            }
        }
        if source.is_some_and(|source| !object.has_replica_on(source)) {
            return Err(TaskRefusal::NotOnSource);
        }
        let new = targets.iter().filter(|&&target| !object.has_replica_on(target)).count();
        let wanted = usize::from(object.copies.wanted());
        match kind {
            TaskKind::Move if new == 0 => Err(TaskRefusal::TargetHasCopy),
            TaskKind::Move => Ok((object, wanted as u8)),
            TaskKind::Copy if wanted + new > usize::from(MAX_COPIES) => Err(TaskRefusal::TooManyCopies),
            TaskKind::Copy => Ok((object, (wanted + new) as u8)),
        }
    }

    pub(super) fn step_task(&mut self, id: TaskId, step: TaskStep) -> TaskOutcome {
        let Some(task) = self.tasks.get(id) else { return TaskOutcome::Unknown };
        if !task.state.is_open() {
            return TaskOutcome::Known(task.state);
        }
        let mut task = task.clone();
        let before = (task.state, task.failures);
        task.state = match step {
            TaskStep::Start => TaskState::Running,
            TaskStep::Cancel => TaskState::Cancelled,
            TaskStep::Settle => self.settle_task(&task).unwrap_or(task.state),
            TaskStep::Fail(failure) => self.settle_task(&task).unwrap_or_else(|| {
                task.failures += 1;
                let is_final = !failure.may_pass() || task.failures >= MAX_TASK_FAILURES;
                if is_final { TaskState::Failed(failure) } else { task.state }
            }),
        };
        let state = task.state;
        if (state, task.failures) != before {
            task.changed_at = self.time;
            self.changes.insert(RowKey::Task(id));
            self.tasks.set(id, task);
        }
        TaskOutcome::Known(state)
    }

    /// How a task ends, if what the catalog knows ends it. Ends a move by taking the source's copy away.
    fn settle_task(&mut self, task: &Task) -> Option<TaskState> {
        let TaskRequest { kind, tenant, key, source, targets, .. } = &task.request;
        let Some(slot) = self.find_version(*tenant, key, task.version) else {
            return Some(TaskState::Failed(TaskFailure::ObjectGone));
        };
        let object = self.objects.get(slot);
        let from = source.and_then(|source| object.replicas().find(|copy| copy.id.node == source));
        if self.copied(object, targets) < targets.len() {
            let is_lost = *kind == TaskKind::Move && from.is_none();
            return is_lost.then_some(TaskState::Failed(TaskFailure::SourceGone));
        }
        match (kind, from) {
            (TaskKind::Copy, _) => {
                let copies = object.copies.at_least(task.wanted);
                self.objects.get_mut(slot).copies = copies;
                self.changes.place(slot);
            }
            (TaskKind::Move, Some(from)) if !self.keeps_durable(object, from) => {
                return Some(TaskState::Failed(TaskFailure::StillNeeded));
            }
            (TaskKind::Move, Some(from)) => self.drop_copy(slot, from),
            (TaskKind::Move, None) => {}
        }
        Some(TaskState::Done)
    }

    /// How many of the nodes have copies that count.
    fn copied(&self, object: &Object, nodes: &[NodeId]) -> usize {
        object.replicas().filter(|copy| nodes.contains(&copy.id.node) && self.stays(copy)).count()
    }

    /// Takes away one copy of several, and has its node free it.
    fn drop_copy(&mut self, slot: Slot, copy: Replica) {
        self.detach(slot, copy);
        let name = self.objects.get(slot).name.clone();
        let key = self.nodes.list_free(self.applied, &name, copy.id);
        self.changes.insert(RowKey::Free(copy.id.node, key));
    }

    pub(super) fn task_stat(&self, id: TaskId) -> Option<TaskStat> {
        let task = self.tasks.get(id)?;
        let TaskRequest { tenant, ref key, ref targets, .. } = task.request;
        let copied = match task.state {
            TaskState::Waiting | TaskState::Running => {
                let slot = self.find_version(tenant, key, task.version);
                slot.map_or(0, |slot| self.copied(self.objects.get(slot), targets))
            }
            TaskState::Done => targets.len(),
            TaskState::Failed(_) | TaskState::Cancelled => 0,
        };
        Some(TaskStat {
            request: task.request.clone(),
            version: task.version,
            length: task.length,
            state: task.state,
            copied,
            failures: task.failures,
            begun_at: task.begun_at,
            changed_at: task.changed_at,
        })
    }

    pub(super) fn open_tasks(&self, limit: usize) -> TaskPage {
        // Those that are not finished are due in the order in which they began.
        let ids = self.tasks.by_due.iter().map(|&(_, id)| id);
        let open = ids.filter(|id| self.tasks.by_id[id].state.is_open()).take(limit.min(MAX_OPEN_TASKS));
        TaskPage { tasks: open.filter_map(|id| self.task_stat(id)).collect(), next: None }
    }

    pub(super) fn task_page(&self, tenant: Option<TenantId>, after: Option<TaskId>, limit: usize) -> TaskPage {
        let from = after.map_or(TaskId(0), |TaskId(after)| TaskId(after.saturating_add(1)));
        let is_meant = |task: &Task| tenant.is_none_or(|tenant| task.request.tenant == tenant);
        let mut found = self.tasks.by_id.range(from..).filter(|(_, task)| is_meant(task)).map(|(&id, _)| id);
        let ids: Vec<TaskId> = found.by_ref().take(limit.clamp(1, MAX_PAGE_ITEMS)).collect();
        let next = found.next().and(ids.last().copied());
        TaskPage { tasks: ids.into_iter().filter_map(|id| self.task_stat(id)).collect(), next }
    }
}

/// One byte, and for a failure another one.
impl Field for TaskState {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Waiting => out.push(0),
            Self::Running => out.push(1),
            Self::Done => out.push(2),
            Self::Cancelled => out.push(3),
            Self::Failed(failure) => {
                out.push(4);
                failure.write(out);
            }
        }
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        Ok(match u8::read(input)? {
            0 => Self::Waiting,
            1 => Self::Running,
            2 => Self::Done,
            3 => Self::Cancelled,
            4 => Self::Failed(Field::read(input)?),
            other => return Err(DecodeError::Value { what: "TaskState", value: u64::from(other) }),
        })
    }
}
