//! Copies, moves, and nodes that are being emptied, as an operator sees and changes them.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::{Query, State};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use tidepool_metadata::catalog::{
    Answer, MAX_TASKS, NodeStat, NodeState, Query as CatalogQuery, TaskId, TaskKind, TaskStat, TaskState,
};
use tidepool_metadata::{ErrorKind, NodeId, TenantId};
use tidepool_replication::{CatalogError, Read};

use super::report::{TaskBody, TaskRow, TasksReport};
use super::{AdminApi, cluster, named};
use crate::error::Error;
use crate::node::{TaskWish, tasks as words};

/// Which task is meant; none: all.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TaskQuery {
    id: Option<String>,
}

/// Which task is to be cancelled.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CancelBody {
    id: String,
}

/// What an id names.
enum Named {
    Task(TaskId),
    /// The emptying of that node.
    Drain(NodeId),
}

fn parse(id: &str) -> Result<Named, Error> {
    if let Some(node) = id.strip_prefix("drain-") {
        return cluster::parse(node).map(Named::Drain);
    }
    match u64::from_str_radix(id, 16) {
        Ok(number) if number > 0 && id.len() == 16 => Ok(Named::Task(TaskId(number))),
        _ => {
            let message = format!("{id:?} is no task: give its id as `tidepool admin tasks` shows it");
            Err(Error::new(ErrorKind::Invalid, "BAD_TASK", message).field("id"))
        }
    }
}

pub(super) async fn tasks(
    State(api): State<AdminApi>,
    Query(query): Query<TaskQuery>,
) -> Result<Json<TasksReport>, Error> {
    match query.id.as_deref().map(parse).transpose()? {
        Some(Named::Task(task)) => one(&api, api.inner.service.task(None, task).await?).await,
        Some(Named::Drain(node)) => drain_of(&api, node).await,
        None => {
            let service = &api.inner.service;
            let mut stats = service.tasks(None, None, MAX_TASKS).await?.tasks;
            stats.sort_by_key(|stat| (stat.begun_at, stat.request.task));
            let names = tenant_names(&api).await?;
            let drained = service.all_nodes().await?;
            let tasks = stats.into_iter().map(|stat| row(stat, &names)).chain(drained.iter().filter_map(drain));
            Ok(Json(TasksReport { tasks: tasks.collect() }))
        }
    }
}

pub(super) async fn copy(State(api): State<AdminApi>, Json(body): Json<TaskBody>) -> Result<Json<TasksReport>, Error> {
    begin(&api, TaskKind::Copy, body).await
}

pub(super) async fn relocate(
    State(api): State<AdminApi>,
    Json(body): Json<TaskBody>,
) -> Result<Json<TasksReport>, Error> {
    begin(&api, TaskKind::Move, body).await
}

async fn begin(api: &AdminApi, kind: TaskKind, body: TaskBody) -> Result<Json<TasksReport>, Error> {
    let task = match body.id.as_deref().map(parse).transpose()? {
        Some(Named::Task(task)) => task,
        Some(Named::Drain(_)) => {
            let message = "a copy or move is named by 16 hexadecimal digits";
            return Err(Error::new(ErrorKind::Invalid, "BAD_TASK", message.into()).field("id"));
        }
        None => {
            let random = getrandom::u64();
            let random = random.map_err(|error| Error::new(ErrorKind::Internal, "INTERNAL", error.to_string()))?;
            TaskId(random.max(1))
        }
    };
    let object = named(api, body.key, body.key_base64, &body.tenant).await?;
    let wish = TaskWish { task, kind, object, source: body.source, targets: body.targets };
    one(api, api.inner.service.begin_task(wish).await?).await
}

pub(super) async fn cancel(
    State(api): State<AdminApi>,
    Json(body): Json<CancelBody>,
) -> Result<Json<TasksReport>, Error> {
    match parse(&body.id)? {
        Named::Task(task) => one(&api, api.inner.service.cancel_task(None, task).await?).await,
        Named::Drain(node) => {
            let Json(mut report) = drain_of(&api, node).await?;
            api.inner.service.drain(node, false).await?;
            report.tasks.iter_mut().for_each(|row| row.state = words::state_name(TaskState::Cancelled).to_owned());
            Ok(Json(report))
        }
    }
}

async fn one(api: &AdminApi, stat: TaskStat) -> Result<Json<TasksReport>, Error> {
    Ok(Json(TasksReport { tasks: vec![row(stat, &tenant_names(api).await?)] }))
}

async fn drain_of(api: &AdminApi, node: NodeId) -> Result<Json<TasksReport>, Error> {
    let nodes = api.inner.service.all_nodes().await?;
    let found = nodes.iter().find(|known| known.node == node).and_then(drain);
    let tasks = vec![found.ok_or_else(|| {
        let message = format!("node {node} is not being drained");
        Error::new(ErrorKind::NotFound, "NO_SUCH_TASK", message).field("id")
    })?];
    Ok(Json(TasksReport { tasks }))
}

async fn tenant_names(api: &AdminApi) -> Result<BTreeMap<TenantId, String>, Error> {
    let (_, answer) = api.inner.service.catalog().await?.query(CatalogQuery::Tenants, Read::Local).await?;
    let Answer::Tenants(tenants) = answer else { return Err(CatalogError::Unexpected { expected: "tenants" }.into()) };
    let name = |name: String| if name.is_empty() { "default".to_owned() } else { name };
    Ok(tenants.into_iter().map(|tenant| (tenant.tenant, name(tenant.name))).collect())
}

fn row(stat: TaskStat, names: &BTreeMap<TenantId, String>) -> TaskRow {
    let request = stat.request;
    let key = std::str::from_utf8(request.key.as_bytes()).ok().map(str::to_owned);
    TaskRow {
        id: format!("{:016x}", request.task.0),
        kind: match request.kind {
            TaskKind::Copy => "copy",
            TaskKind::Move => "move",
        }
        .to_owned(),
        state: words::state_name(stat.state).to_owned(),
        reason: match stat.state {
            TaskState::Failed(failure) => words::reason(failure).to_owned(),
            _ => String::new(),
        },
        tenant: names.get(&request.tenant).cloned().unwrap_or_else(|| request.tenant.0.to_string()),
        key_base64: key.is_none().then(|| STANDARD.encode(request.key.as_bytes())),
        key,
        source: request.source.map(|source| source.to_string()).unwrap_or_default(),
        targets: request.targets.iter().map(ToString::to_string).collect(),
        copied: stat.copied as u64,
        bytes: stat.length,
        left: None,
        begun_ms: stat.begun_at.0,
        changed_ms: stat.changed_at.0,
    }
}

/// The task that the emptying of a node is, if it is being emptied.
fn drain(node: &NodeStat) -> Option<TaskRow> {
    let state = if node.replicas == 0 { TaskState::Done } else { TaskState::Running };
    (node.state == NodeState::Draining).then(|| TaskRow {
        id: format!("drain-{}", node.node),
        kind: "drain".to_owned(),
        state: words::state_name(state).to_owned(),
        reason: String::new(),
        tenant: String::new(),
        key: None,
        key_base64: None,
        source: node.node.to_string(),
        targets: Vec::new(),
        copied: 0,
        bytes: node.bytes,
        left: Some(node.replicas),
        begun_ms: 0,
        changed_ms: 0,
    })
}
