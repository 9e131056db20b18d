//! `tidepool admin tasks`: copies and moves of objects, and nodes that are being emptied.

use std::process::ExitCode;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Subcommand;
use serde_json::json;
use tidepool_metadata::ObjectKey;

use super::admin_http::query_value;
use super::connection::ConnectionArguments;
use super::failure::Failure;
use super::key::KeyArgument;
use super::output::{Output, Table, size};
use crate::admin::report::{TaskBody, TaskRow, TasksReport};

/// What to do with tasks. Nodes are named by number, by the address of their gRPC, that without its port, or the label of their host.
#[derive(Debug, Subcommand)]
pub(super) enum TaskCommand {
    /// Show all tasks that are not finished, those that ended in the last hour, and nodes that are being emptied
    List,
    /// Have copies of an object made on further nodes, which it keeps
    Copy {
        /// Key: text, or hex:..
        key: KeyArgument,
        /// Nodes that are to have copies
        #[arg(long = "to", required = true, num_args = 1..)]
        targets: Vec<String>,
        /// The node from which to read; else any that has a copy
        #[arg(long = "from")]
        source: Option<String>,
    },
    /// Have the copy of an object on one node moved to another one
    Move {
        /// Key: text, or hex:..
        key: KeyArgument,
        /// The node that has a copy
        #[arg(long = "from")]
        source: String,
        /// The node that is to have it
        #[arg(long = "to")]
        target: String,
    },
    /// Show one task
    Show {
        /// Its id, as `admin tasks list` shows it
        id: String,
    },
    /// Cancel a task that is not finished. What it has made goes again; a node that was being emptied takes objects again
    Cancel {
        /// Its id, as `admin tasks list` shows it
        id: String,
    },
}

pub(super) async fn run(
    command: &TaskCommand,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let admin = connection.admin()?;
    let body = |key: &ObjectKey, source: Option<&String>, targets: &[String]| TaskBody {
        key_base64: Some(STANDARD.encode(key.as_bytes())),
        tenant: connection.tenant().to_owned(),
        source: source.cloned(),
        targets: targets.to_vec(),
        ..TaskBody::default()
    };
    let report: TasksReport = match command {
        TaskCommand::List => admin.get("/v1/tasks").await?,
        TaskCommand::Show { id } => admin.get(&format!("/v1/tasks?id={}", query_value(id.as_bytes()))).await?,
        TaskCommand::Copy { key: KeyArgument(key), targets, source } => {
            admin.post("/v1/tasks/copy", &body(key, source.as_ref(), targets)).await?
        }
        TaskCommand::Move { key: KeyArgument(key), source, target } => {
            admin.post("/v1/tasks/move", &body(key, Some(source), std::slice::from_ref(target))).await?
        }
        TaskCommand::Cancel { id } => admin.post("/v1/tasks/cancel", &json!({ "id": id })).await?,
    };
    output.answer(&report, table)
}

fn table(report: &TasksReport) -> String {
    let mut table = Table::new(&["task", "kind", "state", "progress", "from", "to", "tenant", "object"]);
    for task in &report.tasks {
        let state =
            if task.reason.is_empty() { task.state.clone() } else { format!("{}: {}", task.state, task.reason) };
        table.row([
            task.id.clone(),
            task.kind.clone(),
            state,
            progress(task),
            task.source.clone(),
            task.targets.join(" "),
            task.tenant.clone(),
            object(task),
        ]);
    }
    table.render()
}

fn progress(task: &TaskRow) -> String {
    match task.left {
        Some(left) => format!("{left} copies left ({})", size(task.bytes)),
        None => format!("{} of {} ({} each)", task.copied, task.targets.len(), size(task.bytes)),
    }
}

/// The key as it can be typed.
fn object(task: &TaskRow) -> String {
    let bytes = match (&task.key, &task.key_base64) {
        (Some(key), _) => key.clone().into_bytes(),
        (None, Some(key)) => STANDARD.decode(key).unwrap_or_default(),
        (None, None) => return String::new(),
    };
    ObjectKey::new(&bytes).map(|key| key.to_string()).unwrap_or_default()
}
