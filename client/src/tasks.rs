//! Copies and moves of objects between nodes, which go on without the client.

use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, SystemTime};

use tidepool_metadata::{ObjectKey, proto};

use crate::call::{Client, key_bytes};
use crate::error::Error;
use crate::retry::Repeatable;

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskKind {
    /// As many copies more as there are targets that have none.
    Copy,
    /// The copy at the source goes once the target's counts.
    Move,
}

/// Where a task stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// Nobody has begun with it.
    Waiting,
    /// Copies are being made.
    Running,
    /// What was asked for is so.
    Done,
    /// It is not, for this reason: `OBJECT_GONE`, `SOURCE_GONE`, `TARGET_DRAINING`, `TARGET_ABSENT`, `NO_SPACE`,
    /// `QUOTA_EXCEEDED`, `NOT_COPIED`, `STILL_NEEDED` or `EXPIRED`.
    Failed(String),
    /// Somebody has cancelled it.
    Cancelled,
}

impl TaskState {
    /// Whether something is still to come.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Waiting | Self::Running)
    }
}

/// A copy or a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Names it; never 0.
    pub id: u64,
    /// What it does.
    pub kind: TaskKind,
    /// With which object.
    pub key: ObjectKey,
    /// Number of the node from which, if one was named.
    pub source: Option<String>,
    /// Numbers of the nodes to which.
    pub targets: Vec<String>,
    /// Where it stands.
    pub state: TaskState,
    /// How many targets have copies that count.
    pub copied: u32,
    /// Length of the object in bytes.
    pub length: u64,
    /// When it began, by the cluster's clock.
    pub begun: SystemTime,
    /// When its state changed last.
    pub changed: SystemTime,
}

/// One page of tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskListing {
    /// By id.
    pub tasks: Vec<Task>,
    /// Gives the next page; `None` at the end.
    pub next: Option<u64>,
}

impl TryFrom<proto::Task> for Task {
    type Error = Error;

    fn try_from(message: proto::Task) -> Result<Self, Error> {
        let unknown = |why| Error::Protocol { operation: "task", why };
        let state = match message.state() {
            proto::TaskState::Waiting => TaskState::Waiting,
            proto::TaskState::Running => TaskState::Running,
            proto::TaskState::Done => TaskState::Done,
            proto::TaskState::Failed => TaskState::Failed(message.reason.clone()),
            proto::TaskState::Cancelled => TaskState::Cancelled,
            proto::TaskState::Unspecified => return Err(unknown("has no state that is known")),
        };
        let kind = match message.kind() {
            proto::TaskKind::Copy => TaskKind::Copy,
            proto::TaskKind::Move => TaskKind::Move,
            proto::TaskKind::Unspecified => return Err(unknown("has no kind that is known")),
        };
        let time = |milliseconds| SystemTime::UNIX_EPOCH + Duration::from_millis(milliseconds);
        Ok(Self {
            id: message.task,
            kind,
            key: ObjectKey::new(&message.key)?,
            source: (!message.source.is_empty()).then_some(message.source),
            targets: message.targets,
            state,
            copied: message.copied,
            length: message.length,
            begun: time(message.begun_ms),
            changed: time(message.changed_ms),
        })
    }
}

impl Client {
    /// Has copies of an object made on further nodes, which it keeps. A node is named by its number, the address of its gRPC, or,
    /// if only one has it, by that without its port or by the label of its host. Goes on without the client:
    /// [`Client::task`] tells how it stands.
    ///
    /// # Errors
    /// [`Error::Key`]; what the server refuses, before anything is begun: `NOT_FOUND`, `NO_SUCH_NODE`, `AMBIGUOUS_NODE`,
    /// `NODE_NOT_UP`, `TOO_MANY_COPIES`, `BAD_TASK`, `TOO_MANY_TASKS`.
    pub async fn begin_copy(&self, key: impl AsRef<[u8]>, targets: &[String]) -> Result<Task, Error> {
        self.begin_task(proto::TaskKind::Copy, key, "", targets).await
    }

    /// Has the copy of an object on one node moved to another one. As [`Client::begin_copy`].
    ///
    /// # Errors
    /// As [`Client::begin_copy`]; `NOT_ON_SOURCE`, `TARGET_HAS_COPY`.
    pub async fn begin_move(&self, key: impl AsRef<[u8]>, source: &str, target: &str) -> Result<Task, Error> {
        self.begin_task(proto::TaskKind::Move, key, source, &[target.to_owned()]).await
    }

    async fn begin_task(
        &self,
        kind: proto::TaskKind,
        key: impl AsRef<[u8]>,
        source: &str,
        targets: &[String],
    ) -> Result<Task, Error> {
        // RandomState is seeded from the system's randomness; 0 is no task. All attempts share it.
        let task = RandomState::new().hash_one("task").max(1);
        let message = proto::BeginTaskRequest {
            tenant: self.tenant(),
            task,
            kind: kind.into(),
            key: key_bytes(key)?,
            source: source.to_owned(),
            targets: targets.to_vec(),
        };
        self.call("begin task", Repeatable::Always, |mut attempt| {
            let request = attempt.request(message.clone());
            async move { attempt.stub.begin_task(request).await?.into_inner().try_into() }
        })
        .await
    }

    /// How a task stands; `None` if there is none of that id, or it ended more than an hour ago.
    ///
    /// # Errors
    /// What the server refuses.
    pub async fn task(&self, task: u64) -> Result<Option<Task>, Error> {
        let message = proto::TaskRequest { tenant: self.tenant(), task };
        let answer = self.call("get task", Repeatable::Always, |mut attempt| {
            let request = attempt.request(message.clone());
            async move { attempt.stub.get_task(request).await?.into_inner().try_into() }
        });
        some_task(answer.await)
    }

    /// Ends a task, unless it has ended; how it stands then. What it has made goes again. `None` as for [`Client::task`].
    ///
    /// # Errors
    /// What the server refuses.
    pub async fn cancel_task(&self, task: u64) -> Result<Option<Task>, Error> {
        let message = proto::TaskRequest { tenant: self.tenant(), task };
        let answer = self.call("cancel task", Repeatable::Always, |mut attempt| {
            let request = attempt.request(message.clone());
            async move { attempt.stub.cancel_task(request).await?.into_inner().try_into() }
        });
        some_task(answer.await)
    }

    /// One page of the tenant's tasks, at most 1,000, behind `after` (`None`: from the first).
    ///
    /// # Errors
    /// What the server refuses.
    pub async fn tasks(&self, after: Option<u64>) -> Result<TaskListing, Error> {
        let message = proto::ListTasksRequest { tenant: self.tenant(), after: after.unwrap_or(0), page_size: 0 };
        let reply = self
            .call("list tasks", Repeatable::Always, |mut attempt| {
                let request = attempt.request(message.clone());
                async move { Ok(attempt.stub.list_tasks(request).await?.into_inner()) }
            })
            .await?;
        let tasks = reply.tasks.into_iter().map(Task::try_from).collect::<Result<_, _>>()?;
        Ok(TaskListing { tasks, next: (reply.next != 0).then_some(reply.next) })
    }
}

/// Without the error that says that there is none.
fn some_task(answer: Result<Task, Error>) -> Result<Option<Task>, Error> {
    match answer {
        Ok(task) => Ok(Some(task)),
        Err(error) if error.reason() == "NO_SUCH_TASK" => Ok(None),
        Err(error) => Err(error),
    }
}
