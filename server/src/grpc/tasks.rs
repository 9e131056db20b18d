//! Copies and moves of a tenant's objects.

use tidepool_metadata::catalog::{TaskId, TaskKind, TaskStat, TaskState};
use tidepool_metadata::{ErrorKind, proto};

use super::{StoreApi, convert};
use crate::error::Error;
use crate::node::{TaskWish, tasks};

/// Most tasks of a page: with the longest keys they fit a message.
const LARGEST_PAGE: usize = 1000;

fn bad_task(message: &str) -> Error {
    Error::new(ErrorKind::Invalid, "BAD_TASK", message.into()).field("task")
}

fn message(stat: TaskStat) -> proto::Task {
    let request = stat.request;
    let (state, reason) = match stat.state {
        TaskState::Waiting => (proto::TaskState::Waiting, ""),
        TaskState::Running => (proto::TaskState::Running, ""),
        TaskState::Done => (proto::TaskState::Done, ""),
        TaskState::Failed(failure) => (proto::TaskState::Failed, tasks::reason(failure)),
        TaskState::Cancelled => (proto::TaskState::Cancelled, ""),
    };
    let kind = match request.kind {
        TaskKind::Copy => proto::TaskKind::Copy,
        TaskKind::Move => proto::TaskKind::Move,
    };
    proto::Task {
        task: request.task.0,
        kind: kind.into(),
        key: request.key.as_bytes().to_vec().into(),
        source: request.source.map(|source| source.to_string()).unwrap_or_default(),
        targets: request.targets.iter().map(ToString::to_string).collect(),
        state: state.into(),
        reason: reason.to_owned(),
        copied: u32::try_from(stat.copied).unwrap_or(u32::MAX),
        length: stat.length,
        begun_ms: stat.begun_at.0,
        changed_ms: stat.changed_at.0,
    }
}

impl StoreApi {
    pub(super) async fn start_task(&self, request: proto::BeginTaskRequest) -> Result<proto::Task, Error> {
        let kind = match request.kind() {
            proto::TaskKind::Copy => TaskKind::Copy,
            proto::TaskKind::Move => TaskKind::Move,
            proto::TaskKind::Unspecified => return Err(bad_task("a task copies or moves: name its kind")),
        };
        let object = self.name(&request.tenant, &request.key).await?;
        if !convert::are_few_names(&request.targets) || !convert::are_few_names(std::slice::from_ref(&request.source)) {
            return Err(bad_task("too many targets, or a node's name is too long"));
        }
        let source = (!request.source.is_empty()).then_some(request.source);
        let wish = TaskWish { task: TaskId(request.task), kind, object, source, targets: request.targets };
        Ok(message(self.service.begin_task(wish).await?))
    }

    pub(super) async fn show_task(&self, request: proto::TaskRequest) -> Result<proto::Task, Error> {
        let tenant = self.tenant(&request.tenant).await?;
        Ok(message(self.service.task(Some(tenant), TaskId(request.task)).await?))
    }

    pub(super) async fn end_task(&self, request: proto::TaskRequest) -> Result<proto::Task, Error> {
        let tenant = self.tenant(&request.tenant).await?;
        Ok(message(self.service.cancel_task(Some(tenant), TaskId(request.task)).await?))
    }

    pub(super) async fn task_page(&self, request: proto::ListTasksRequest) -> Result<proto::ListTasksReply, Error> {
        let tenant = self.tenant(&request.tenant).await?;
        let limit = match request.page_size as usize {
            0 => LARGEST_PAGE,
            size if size <= LARGEST_PAGE => size,
            size => {
                let message = format!("page of {size} tasks: ask for at most {LARGEST_PAGE}");
                return Err(convert::invalid("BAD_PAGE_SIZE", "page_size", message));
            }
        };
        let page = self.service.tasks(Some(tenant), Some(TaskId(request.after)), limit).await?;
        let next = page.next.map_or(0, |TaskId(next)| next);
        Ok(proto::ListTasksReply { tasks: page.tasks.into_iter().map(message).collect(), next })
    }
}
