//! Copies and moves of objects, and the emptying of nodes, as those who ask for them see them.

use std::time::Duration;

use tidepool_metadata::catalog::{
    Answer, Command, NodeOutcome, NodeStat, NodeState, Outcome, Query, TaskFailure, TaskId, TaskKind, TaskOutcome,
    TaskPage, TaskRefusal, TaskRequest, TaskStat, TaskState, TaskStep,
};
use tidepool_metadata::{ErrorKind, NodeId, TenantId};
use tidepool_replication::Read;
use tidepool_replication::replicas::placement;

use super::{NodeService, ObjectName, error};
use crate::error::Error;

/// What is to be copied or moved.
#[derive(Clone, Debug)]
pub struct TaskWish {
    /// Names it: random, not 0.
    pub task: TaskId,
    /// What is to be done.
    pub kind: TaskKind,
    /// Of which object.
    pub object: ObjectName,
    /// From which node; a move needs one. As [`NodeService::begin_task`] reads names.
    pub source: Option<String>,
    /// To which nodes; of a move one.
    pub targets: Vec<String>,
}

pub(super) fn conflict(reason: &'static str, message: String) -> Error {
    Error::new(ErrorKind::Conflict, reason, message)
}

fn no_such_task() -> Error {
    let message = "no such task: one is known for an hour after its end, and to its tenant alone";
    Error::new(ErrorKind::NotFound, "NO_SUCH_TASK", message.into()).field("task")
}

fn refused(refusal: TaskRefusal, wish: &TaskWish) -> Error {
    let reason = match refusal {
        TaskRefusal::NoSuchObject => return error::not_found(&wish.object),
        TaskRefusal::Malformed | TaskRefusal::Mismatch => {
            return Error::new(ErrorKind::Invalid, "BAD_TASK", refusal.to_string()).field("task");
        }
        TaskRefusal::NoSuchNode => "NO_SUCH_NODE",
        TaskRefusal::NodeNotUp => "NODE_NOT_UP",
        TaskRefusal::NotOnSource => "NOT_ON_SOURCE",
        TaskRefusal::TargetHasCopy => "TARGET_HAS_COPY",
        TaskRefusal::TooManyCopies => "TOO_MANY_COPIES",
    };
    conflict(reason, format!("the task was not begun: {refusal}"))
}

/// The stable name of why a task failed, in messages and JSON.
#[must_use]
pub(crate) fn reason(failure: TaskFailure) -> &'static str {
    match failure {
        TaskFailure::ObjectGone => "OBJECT_GONE",
        TaskFailure::SourceGone => "SOURCE_GONE",
        TaskFailure::TargetDraining => "TARGET_DRAINING",
        TaskFailure::TargetAbsent => "TARGET_ABSENT",
        TaskFailure::NoSpace => "NO_SPACE",
        TaskFailure::QuotaExceeded => "QUOTA_EXCEEDED",
        TaskFailure::NotCopied => "NOT_COPIED",
        TaskFailure::StillNeeded => "STILL_NEEDED",
        TaskFailure::Expired => "EXPIRED",
    }
}

/// The only node of that name.
fn node_named(nodes: &[NodeStat], name: &str) -> Result<NodeId, Error> {
    match placement::preferred(nodes, std::slice::from_ref(&name.to_owned()))[..] {
        [node] => Ok(node),
        [] => {
            let message = format!(
                "there is no node {name:?}: give its number, the address of its gRPC, that without its port, or the label of its host"
            );
            Err(conflict("NO_SUCH_NODE", message))
        }
        ref several => {
            let message = format!("{name:?} names {} nodes: give the number of one", several.len());
            Err(conflict("AMBIGUOUS_NODE", message))
        }
    }
}

impl NodeService {
    /// Has an object copied or moved, which goes on without the caller. Nodes are named by number, address of gRPC, that without
    /// its port, or label of the host, if only one has that. Repeated with the same id, it is the same task.
    ///
    /// # Errors
    /// What can't be is refused before anything is begun: `NOT_FOUND`, `NO_SUCH_NODE`, `AMBIGUOUS_NODE`, `NODE_NOT_UP`,
    /// `NOT_ON_SOURCE`, `TARGET_HAS_COPY`, `TOO_MANY_COPIES`, `BAD_TASK`, `TOO_MANY_TASKS`; those of the catalog.
    pub async fn begin_task(&self, wish: TaskWish) -> Result<TaskStat, Error> {
        let catalog = self.led_catalog().await?;
        let nodes = self.all_nodes().await?;
        let request = TaskRequest {
            task: wish.task,
            kind: wish.kind,
            tenant: wish.object.tenant,
            key: wish.object.key.clone(),
            source: wish.source.as_ref().map(|source| node_named(&nodes, source)).transpose()?,
            targets: wish.targets.iter().map(|target| node_named(&nodes, target)).collect::<Result<_, _>>()?,
        };
        match catalog.propose(Command::BeginTask(request)).await? {
            (_, Outcome::Task(TaskOutcome::Known(_))) => self.task(None, wish.task).await,
            (_, Outcome::Task(TaskOutcome::Refused(refusal))) => Err(refused(refusal, &wish)),
            (_, Outcome::Task(TaskOutcome::TooMany)) => {
                let message = "as many tasks are open as the catalog keeps: wait for some, or cancel them";
                let error = Error::new(ErrorKind::Exhausted, "TOO_MANY_TASKS", message.into());
                Err(error.retry_after(Duration::from_secs(1)))
            }
            _ => Err(error::unexpected("a task")),
        }
    }

    /// How a task stands, if it is of that tenant, or for an operator of any.
    ///
    /// # Errors
    /// `NO_SUCH_TASK`; those of the catalog.
    pub async fn task(&self, tenant: Option<TenantId>, task: TaskId) -> Result<TaskStat, Error> {
        let (_, answer) = self.catalog().await?.query(Query::Task { task }, Read::Linearizable).await?;
        let Answer::Task(stat) = answer else { return Err(error::unexpected("a task")) };
        let is_theirs = |stat: &TaskStat| tenant.is_none_or(|tenant| stat.request.tenant == tenant);
        stat.filter(is_theirs).ok_or_else(no_such_task)
    }

    /// Ends a task, unless it has ended; how it stands then. What it has made is one copy too many, and goes by repair.
    ///
    /// # Errors
    /// As [`NodeService::task`].
    pub async fn cancel_task(&self, tenant: Option<TenantId>, task: TaskId) -> Result<TaskStat, Error> {
        self.task(tenant, task).await?;
        let command = Command::StepTask { task, step: TaskStep::Cancel };
        match self.led_catalog().await?.propose(command).await? {
            (_, Outcome::Task(TaskOutcome::Known(_))) => self.task(tenant, task).await,
            _ => Err(no_such_task()),
        }
    }

    /// A page of tasks by id, behind `after`: of a tenant, or for an operator of all.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn tasks(
        &self,
        tenant: Option<TenantId>,
        after: Option<TaskId>,
        limit: usize,
    ) -> Result<TaskPage, Error> {
        let query = Query::Tasks { tenant, after, limit };
        match self.catalog().await?.query(query, Read::Linearizable).await? {
            (_, Answer::Tasks(page)) => Ok(page),
            _ => Err(error::unexpected("tasks")),
        }
    }

    /// All nodes, as the leader's catalog knows them.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn all_nodes(&self) -> Result<Vec<NodeStat>, Error> {
        match self.catalog().await?.query(Query::Nodes, Read::Linearizable).await? {
            (_, Answer::Nodes(nodes)) => Ok(nodes),
            _ => Err(error::unexpected("nodes")),
        }
    }

    /// Has a node emptied, or not any more.
    ///
    /// # Errors
    /// `NO_SUCH_NODE`, `NODE_ABSENT`, `LAST_NODE`, `NODE_RESTARTED`; those of the catalog.
    pub async fn drain(&self, node: NodeId, is_to_drain: bool) -> Result<(), Error> {
        let nodes = self.all_nodes().await?;
        let refused = |reason, message| Err(conflict(reason, message).field("node"));
        let Some(known) = nodes.iter().find(|known| known.node == node) else {
            return refused("NO_SUCH_NODE", format!("there is no node {node}: `tidepool admin nodes` lists them"));
        };
        if known.state == NodeState::Absent {
            return refused(
                "NODE_ABSENT",
                format!("node {node} is absent: what it holds is made anew elsewhere anyway"),
            );
        }
        let stays = |other: &&NodeStat| other.node != node && other.state == NodeState::Up;
        if is_to_drain && !nodes.iter().any(|other| stays(&other)) {
            return refused("LAST_NODE", format!("no other node is up that could take what node {node} holds"));
        }
        let state = if is_to_drain { NodeState::Draining } else { NodeState::Up };
        let command = Command::SetNodeState { node, incarnation: known.incarnation, state, term: None };
        match self.catalog().await?.propose(command).await? {
            (_, Outcome::Node(NodeOutcome::Accepted { .. })) => Ok(()),
            _ => refused("NODE_RESTARTED", format!("node {node} has just restarted: ask again")),
        }
    }
}

/// The name of a state, in messages and JSON.
#[must_use]
pub(crate) fn state_name(state: TaskState) -> &'static str {
    match state {
        TaskState::Waiting => "waiting",
        TaskState::Running => "running",
        TaskState::Done => "done",
        TaskState::Failed(_) => "failed",
        TaskState::Cancelled => "cancelled",
    }
}
