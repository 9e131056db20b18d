//! Commands about keys: exists, rm, ls, stat.

use std::process::ExitCode;

use clap::Args;
use futures::{StreamExt as _, TryStreamExt as _};
use serde_json::{Value, json};
use tidepool_client::{DataType, Existence, Listed, Matching, ObjectKey, RemoveOutcome};

use super::connection::ConnectionArguments;
use super::failure::{FAILED, Failure, NO};
use super::key::{KeyArgument, key_bytes};
use super::output::{Output, Table, size};

/// Objects that `ls` asks for at a time.
const PAGE: u32 = 1000;

#[derive(Debug, Args)]
pub(super) struct ExistsArguments {
    /// Keys: text, or hex:..
    #[arg(required = true, value_name = "KEY")]
    keys: Vec<KeyArgument>,
    /// Ask the leader
    #[arg(long)]
    fresh: bool,
}

#[derive(Debug, Args)]
pub(super) struct RemoveArguments {
    /// Keys: text, or hex:..
    #[arg(value_name = "KEY", required_unless_present_any = ["prefix", "pattern", "all"])]
    keys: Vec<KeyArgument>,
    /// All keys that start so
    #[arg(long, conflicts_with_all = ["keys", "pattern", "all"])]
    prefix: Option<String>,
    /// All keys in which this regular expression matches
    #[arg(long, conflicts_with_all = ["keys", "all"])]
    pattern: Option<String>,
    /// All keys of the tenant
    #[arg(long, conflicts_with = "keys")]
    all: bool,
    /// Pinned objects too
    #[arg(long)]
    force: bool,
    /// The keys are of objects that were put with --stripes: their parts go too
    #[arg(long, requires = "keys")]
    striped: bool,
}

#[derive(Debug, Args)]
pub(super) struct ListArguments {
    /// Only keys that start so: text, or hex:..
    #[arg(default_value = "", hide_default_value = true)]
    prefix: String,
    /// At most so many
    #[arg(long, short = 'n')]
    limit: Option<usize>,
    /// Only objects of this type, such as kv_cache
    #[arg(long = "type", value_name = "TYPE", value_parser = data_type_named)]
    data_type: Option<DataType>,
}

#[derive(Debug, Args)]
pub(super) struct StatArguments {
    /// Key: text, or hex:..
    key: KeyArgument,
}

/// A key as JSON has it: `key`, or `key_base64` if it is not UTF-8.
pub(super) fn key_json(key: &ObjectKey) -> Value {
    use base64::Engine as _;
    match std::str::from_utf8(key.as_bytes()) {
        Ok(text) => json!({ "key": text }),
        Err(_) => json!({ "key_base64": base64::engine::general_purpose::STANDARD.encode(key.as_bytes()) }),
    }
}

fn with_key(key: &ObjectKey, mut rest: Value) -> Value {
    if let (Some(rest), Value::Object(key)) = (rest.as_object_mut(), key_json(key)) {
        rest.extend(key);
    }
    rest
}

/// The type of that name.
pub(super) fn data_type_named(name: &str) -> Result<DataType, String> {
    let names = || DataType::all().map(DataType::name).collect::<Vec<_>>().join(", ");
    DataType::all().find(|data_type| data_type.name() == name).ok_or_else(|| format!("give one of {}", names()))
}

fn keys_of(arguments: &[KeyArgument]) -> Vec<&ObjectKey> {
    arguments.iter().map(|KeyArgument(key)| key).collect()
}

pub(super) async fn exists(
    arguments: &ExistsArguments,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let keys = keys_of(&arguments.keys);
    let answers = connection.client(1)?.exists_many(&keys, None, arguments.fresh).await?;
    let word = |existence: &Existence| match existence {
        Existence::Present => "present",
        Existence::Missing => "missing",
        Existence::Recovering => "recovering",
        Existence::Unconfirmed => "unconfirmed",
    };
    let rows: Vec<(&ObjectKey, &str)> = keys.into_iter().zip(answers.iter().map(word)).collect();
    print_outcomes("existence", &rows, output)?;
    let all = answers.iter().all(|&existence| existence == Existence::Present);
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(NO) })
}

fn print_outcomes(name: &str, rows: &[(&ObjectKey, &str)], output: &Output) -> Result<ExitCode, Failure> {
    let json: Vec<Value> = rows.iter().map(|(key, word)| with_key(key, json!({ name: word }))).collect();
    output.answer(&json, |_| {
        let mut table = Table::new(&["key", name]);
        rows.iter().for_each(|(key, word)| table.row([key.to_string(), (*word).to_owned()]));
        table.render()
    })
}

pub(super) async fn remove(
    arguments: &RemoveArguments,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let client = connection.client(1)?;
    let matching = match (&arguments.prefix, &arguments.pattern) {
        (Some(prefix), _) => Matching::Prefix(key_bytes(prefix).map_err(Failure::usage)?),
        (_, Some(pattern)) => Matching::Pattern(pattern.clone()),
        _ if arguments.all => Matching::All,
        _ => {
            let keys = keys_of(&arguments.keys);
            let outcomes = if arguments.striped {
                let removed = futures::stream::iter(&keys).then(|key| client.remove_striped(key, arguments.force));
                removed.try_collect::<Vec<_>>().await?
            } else {
                client.remove_many(&keys, arguments.force).await?
            };
            let word = |outcome: &RemoveOutcome| match outcome {
                RemoveOutcome::Removed => "removed",
                RemoveOutcome::Missing => "missing",
                RemoveOutcome::Pinned => "pinned",
                RemoveOutcome::Failed => "failed",
            };
            let rows: Vec<(&ObjectKey, &str)> = keys.into_iter().zip(outcomes.iter().map(word)).collect();
            print_outcomes("outcome", &rows, output)?;
            let code = match outcomes.iter().find(|&&outcome| outcome != RemoveOutcome::Removed) {
                None => 0,
                Some(RemoveOutcome::Failed) => FAILED,
                Some(_) => NO,
            };
            return Ok(ExitCode::from(code));
        }
    };
    let bar = output.progress(0, "{spinner} {msg}");
    let done = client
        .remove_matching(&matching, arguments.force, |step| {
            bar.set_message(format!("{} looked at, {} removed", step.examined, step.removed));
        })
        .await?;
    bar.finish_and_clear();
    let json = json!({ "examined": done.examined, "removed": done.removed, "pinned": done.pinned });
    output.answer(&json, |_| {
        let pinned =
            if done.pinned > 0 { format!(", {} left because they are pinned", done.pinned) } else { String::new() };
        format!("{} removed{pinned}\n", done.removed)
    })
}

pub(super) async fn list(
    arguments: &ListArguments,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let client = connection.client(1)?;
    let prefix = key_bytes(&arguments.prefix).map_err(Failure::usage)?;
    let limit = arguments.limit.unwrap_or(usize::MAX);
    let mut objects: Vec<Listed> = Vec::new();
    let mut token = String::new();
    while objects.len() < limit {
        let page_size = u32::try_from(limit - objects.len()).unwrap_or(PAGE).min(PAGE);
        let page = client.list(&prefix, page_size, &token, arguments.data_type).await?;
        objects.extend(page.objects);
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    objects.truncate(limit);
    let row = |object: &Listed| {
        let rest = json!({
            "length": object.length,
            "data_type": object.data_type.name(),
            "group": object.group,
            "pins": object.pins,
            "replicas": object.replicas,
        });
        with_key(&object.key, rest)
    };
    let json: Vec<Value> = objects.iter().map(row).collect();
    output.answer(&json, |_| {
        let mut table = Table::new(&["size", "type", "pins", "copies", "key"]);
        for object in &objects {
            table.row([
                size(object.length),
                object.data_type.name().to_owned(),
                object.pins.to_string(),
                object.replicas.to_string(),
                object.key.to_string(),
            ]);
        }
        table.render()
    })
}

pub(super) async fn stat(
    arguments: &StatArguments,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let KeyArgument(key) = &arguments.key;
    let stat = connection.client(1)?.stat(key).await?.ok_or_else(|| Failure::missing(key))?;
    let replica = |replica: &tidepool_client::ReplicaStat| json!({ "node": replica.node, "replica": replica.replica, "node_state": replica.node_state });
    let json = with_key(
        key,
        json!({
            "length": stat.length,
            "data_type": stat.data_type.name(),
            "group": stat.group,
            "pins": stat.pins,
            "version": stat.version,
            "slice_checksums": stat.slice_checksums,
            "replicas": stat.replicas.iter().map(replica).collect::<Vec<_>>(),
            "log_index": stat.log_index,
            "lease_ms": u64::try_from(stat.lease.as_millis()).unwrap_or(u64::MAX),
        }),
    );
    output.answer(&json, |_| {
        let mut table = Table::default();
        table.row(["key".into(), key.to_string()]);
        table.row(["size".into(), format!("{} ({} bytes)", size(stat.length), stat.length)]);
        table.row(["type".into(), stat.data_type.name().into()]);
        table.row(["group".into(), if stat.group.is_empty() { "none".into() } else { stat.group.clone() }]);
        table.row(["pins".into(), stat.pins.to_string()]);
        table.row(["lease".into(), format!("{:.1} s", stat.lease.as_secs_f64())]);
        table.row(["version".into(), stat.version.clone()]);
        table.row(["slices".into(), stat.slice_checksums.len().to_string()]);
        for replica in &stat.replicas {
            table.row(["copy on".into(), format!("{} ({})", replica.node, replica.node_state)]);
        }
        table.render()
    })
}
