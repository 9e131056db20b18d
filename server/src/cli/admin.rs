//! `tidepool admin`: asks a node's admin HTTP.

use std::path::PathBuf;
use std::process::ExitCode;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::{Args, Subcommand};
use tidepool_metadata::NodeId;
use tidepool_tiers::store::TierReport;

use super::admin_http::query_value;
use super::connection::ConnectionArguments;
use super::failure::Failure;
use super::key::KeyArgument;
use super::output::{Output, Table, size};
use super::raft::{self, NodeCommand, RaftCommand};
use super::serve::SettingsArguments;
use super::tasks::{self, TaskCommand};
use super::tenants::{self, TenantCommand};
use super::types::{self, TypeCommand};
use crate::admin::report::{AttachRequest, NvmeReport, ObjectReport, RebuildReport, RecoveryReport, TiersReport};
use crate::folder::DataFolder;
use crate::node::{HotReport, Reconciled, RepairReport};
use crate::peers::AddressBook;
use crate::plan;

/// What to ask a node.
#[derive(Debug, Subcommand)]
pub(super) enum AdminCommand {
    /// Show each tier: capacity, use, hits, movements, errors
    Tiers,
    /// Show where each slice of an object lies
    Object {
        /// Key: text, or hex:..
        key: KeyArgument,
    },
    /// Show how far the node's recovery has come
    Recovery,
    /// Set a lost or damaged catalog aside, so that the next start makes a new one from what the tiers hold. On one node, which
    /// must not be running; other nodes `raft rejoin` and announce what they have. Groups, pins and tenants are lost; objects
    /// removed lately may return
    Rebuild(RebuildArguments),
    /// Show or change the group that replicates the catalog
    #[command(subcommand)]
    Raft(RaftCommand),
    /// Show the nodes of the cluster, or remove one for good
    Nodes {
        #[command(subcommand)]
        change: Option<NodeCommand>,
    },
    /// Empty a node: it takes no new objects, and what it holds moves to others. It is empty when `admin nodes` shows no copies
    /// there; `undrain` ends it, a restart of the node does not
    Drain {
        /// Its number, as `admin nodes` shows it
        node: String,
    },
    /// Let a node that was being emptied take objects again
    Undrain {
        /// Its number, as `admin nodes` shows it
        node: String,
    },
    /// Show copies and moves of objects, and nodes that are being emptied; begin or cancel some
    #[command(subcommand)]
    Tasks(TaskCommand),
    /// Show what a node does to keep objects at their number of copies
    Repair,
    /// Show what is leased, as the leader knows it
    Leases,
    /// Show tenants, or create, bound and drop them
    Tenants {
        #[command(subcommand)]
        change: Option<TenantCommand>,
    },
    /// Show what becomes of objects by their type, or change it: copies, tier, pins, quota
    Types {
        #[command(subcommand)]
        change: Option<TypeCommand>,
    },
    /// Attach or detach the NVMe tier while the node runs
    #[command(subcommand)]
    Nvme(NvmeCommand),
}

/// Which catalog is made anew.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct RebuildArguments {
    #[command(flatten)]
    settings: SettingsArguments,
    /// Nodes that are lost and not waited for, by their numbers; the rebuild is over when all others that this node knew have
    /// announced what they have
    #[arg(long, value_name = "NODES", value_delimiter = ',')]
    without: Vec<String>,
    #[command(subcommand)]
    what: Option<RebuildCommand>,
}

/// What of a rebuild that goes on.
#[derive(Clone, Copy, Debug, Subcommand)]
pub(super) enum RebuildCommand {
    /// Show how far the nodes have announced what they have
    Status,
    /// End it, whoever is missing: nodes that come later have what the catalog does not know freed
    Finish,
}

/// What to do with the NVMe tier.
#[derive(Debug, Subcommand)]
pub(super) enum NvmeCommand {
    /// Attach it; what is left out is as configured
    Attach {
        /// Its folder
        #[arg(long)]
        path: Option<PathBuf>,
        /// Its capacity, such as 100GiB
        #[arg(long)]
        capacity: Option<String>,
    },
    /// Detach it; what it holds can't be read until it is attached again
    Detach,
}

pub(super) async fn run(
    command: &AdminCommand,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let admin = || connection.admin();
    match command {
        AdminCommand::Rebuild(arguments) => match arguments.what {
            None => rebuild(arguments, output),
            Some(RebuildCommand::Status) => {
                let report: RebuildReport = admin()?.get("/v1/rebuild").await?;
                output.answer(&report, rebuild_table)
            }
            Some(RebuildCommand::Finish) => {
                let report: RebuildReport = admin()?.post("/v1/rebuild/finish", &serde_json::json!({})).await?;
                output.answer(&report, rebuild_table)
            }
        },
        AdminCommand::Raft(command) => raft::run(command, connection, output).await,
        AdminCommand::Nodes { change } => raft::nodes(change.as_ref(), connection, output).await,
        AdminCommand::Drain { node } => raft::set_state("drain", node, connection, output).await,
        AdminCommand::Undrain { node } => raft::set_state("undrain", node, connection, output).await,
        AdminCommand::Tasks(command) => tasks::run(command, connection, output).await,
        AdminCommand::Repair => {
            let report: RepairReport = admin()?.get("/v1/repair").await?;
            output.answer(&report, repair_table)
        }
        AdminCommand::Leases => raft::leases(connection, output).await,
        AdminCommand::Tenants { change } => tenants::run(change.as_ref(), connection, output).await,
        AdminCommand::Types { change } => types::run(change.as_ref(), connection, output).await,
        AdminCommand::Tiers => {
            let report: TiersReport = admin()?.get("/v1/tiers").await?;
            output.answer(&report, tiers_table)
        }
        AdminCommand::Recovery => {
            let report: RecoveryReport = admin()?.get("/v1/recovery").await?;
            output.answer(&report, recovery_table)
        }
        AdminCommand::Object { key: KeyArgument(key) } => {
            let key = query_value(STANDARD.encode(key.as_bytes()).as_bytes());
            let tenant = query_value(connection.tenant().as_bytes());
            let report: ObjectReport = admin()?.get(&format!("/v1/objects?key_base64={key}&tenant={tenant}")).await?;
            output.answer(&report, object_table)
        }
        AdminCommand::Nvme(NvmeCommand::Attach { path, capacity }) => {
            let path = path.as_ref().map(|path| path.to_str().map(str::to_owned));
            let path = path.map(|path| path.ok_or_else(|| Failure::usage("--path is not UTF-8"))).transpose()?;
            let request = AttachRequest { path, capacity: capacity.clone() };
            let report: NvmeReport = admin()?.post("/v1/nvme/attach", &request).await?;
            output.answer(&report, |report| format!("{}, {} records found\n", report.state, report.records))
        }
        AdminCommand::Nvme(NvmeCommand::Detach) => {
            let report: NvmeReport = admin()?.post("/v1/nvme/detach", &serde_json::json!({})).await?;
            output.answer(&report, |report| format!("{}\n", report.state))
        }
    }
}

/// Works on the data folder itself: its catalog can't be asked.
fn rebuild(
    RebuildArguments { settings, without, .. }: &RebuildArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let config = settings.load()?;
    let data = config.data.unwrap_or_else(plan::default_data_folder);
    if !data.join("identity.json").exists() {
        let message = format!("{} is no data folder: name it with --data", data.display());
        return Err(Failure::local("FOLDER_UNUSABLE", message));
    }
    let folder = DataFolder::open(&data).map_err(crate::Error::from)?;
    let known = AddressBook::open(data.join("peers.json")).nodes();
    if let Some(unknown) = without.iter().find(|name| !known.iter().any(|node| node.to_string() == **name)) {
        let known: Vec<String> = known.iter().map(ToString::to_string).collect();
        return Err(Failure::usage(format!("--without {unknown}: this node knew {}", known.join(", "))));
    }
    let is_awaited = |node: &NodeId| *node != folder.node() && !without.contains(&node.to_string());
    let waits: Vec<NodeId> = known.into_iter().filter(is_awaited).collect();
    let aside = folder.begin_rebuild(&waits).map_err(crate::Error::from)?;
    let waits: Vec<String> = waits.iter().map(ToString::to_string).collect();
    output.answer(&serde_json::json!({ "data": data, "set_aside": aside, "waits": waits }), |_| {
        let aside = aside.as_ref().map(|path| format!("the old catalog is in {}\n", path.display()));
        let waits = if waits.is_empty() {
            String::new()
        } else {
            format!(
                "it waits for {}: on each of them `tidepool admin raft rejoin --data DIR`, then `tidepool serve`\n",
                waits.join(", ")
            )
        };
        let next = "the next `tidepool serve` makes a new one from what the tiers hold\n";
        format!("{}{next}{waits}", aside.unwrap_or_default())
    })
}

fn rebuild_table(report: &RebuildReport) -> String {
    let mut table = Table::new(&["node", "announces", "copies", "size"]);
    for node in &report.nodes {
        let announces = if node.announcing { "going on" } else { "done" };
        table.row([node.node.clone(), announces.into(), node.replicas.to_string(), size(node.bytes)]);
    }
    let state = match (report.under_way, report.waits.as_deref()) {
        (false, _) => "no rebuild goes on".to_owned(),
        (true, None) => "a rebuild goes on; the node that began it knows for whom it waits".to_owned(),
        (true, Some([])) => "a rebuild goes on, and is over in a moment".to_owned(),
        (true, Some(waits)) => format!("a rebuild goes on, and waits for {}", waits.join(", ")),
    };
    format!("{}{state}; {} objects are known\n", table.render(), report.objects)
}

/// Tiers side by side, so that each figure of one stands next to that of the other.
pub(super) fn tiers_table(report: &TiersReport) -> String {
    type Cell = fn(&TierReport) -> String;
    const ROWS: [(&str, Cell); 18] = [
        ("state", |tier| tier.state.clone()),
        ("engine", |tier| tier.engine.clone()),
        ("capacity", |tier| size(tier.capacity)),
        ("used", |tier| size(tier.used)),
        ("reserved", |tier| size(tier.reserved)),
        ("free", |tier| size(tier.free)),
        ("objects", |tier| tier.objects.to_string()),
        ("hits", |tier| tier.hits.to_string()),
        ("evictions", |tier| tier.evictions.to_string()),
        ("demotions", |tier| tier.demotions.to_string()),
        ("demoted", |tier| size(tier.demoted_bytes)),
        ("failed demotions", |tier| tier.failed_demotions.to_string()),
        ("promotions", |tier| tier.promotions.to_string()),
        ("write amplification", |tier| format!("{:.2}", tier.write_amplification)),
        ("scrubbed", |tier| size(tier.scrubbed_bytes)),
        ("corruptions", |tier| tier.corruptions.to_string()),
        ("errors", |tier| tier.errors.to_string()),
        ("last error", |tier| tier.last_error.clone().unwrap_or_else(|| "none".into())),
    ];
    let header: Vec<&str> = std::iter::once("").chain(report.tiers.iter().map(|tier| tier.tier.name())).collect();
    let mut table = Table::new(&header);
    for (name, cell) in ROWS {
        table.cells(std::iter::once(name.to_owned()).chain(report.tiers.iter().map(cell)).collect());
    }
    format!("{}reads that found nothing: {}\n", table.render(), report.misses)
}

fn recovery_table(report: &RecoveryReport) -> String {
    let mut table = Table::new(&["phase", "state", "found", "adopted", "dropped", "size", "time"]);
    for phase in &report.phases {
        table.row([
            phase.phase.clone(),
            phase.state.clone(),
            phase.total.to_string(),
            phase.adopted.to_string(),
            phase.dropped.to_string(),
            size(phase.bytes),
            format!("{:.3} s", phase.elapsed_ms as f64 / 1000.0),
        ]);
    }
    let end = if report.finished { "finished" } else { "still running; the node serves what it has" };
    let agreed = match &report.reconciliation {
        None => "not yet: what only the catalog can tell is answered later".to_owned(),
        Some(found) => {
            let Reconciled { kept, lost, adopted, freed, completed, elapsed_ms, .. } = found;
            let seconds = *elapsed_ms as f64 / 1000.0;
            format!(
                "in {seconds:.3} s: {kept} kept, {lost} lost, {adopted} adopted, {freed} freed, {completed} completed"
            )
        }
    };
    format!("{}recovery: {end}\nagreed with the catalog {agreed}\n", table.render())
}

fn repair_table(report: &RepairReport) -> String {
    let mut table = Table::default();
    table.row(["now".into(), if report.sweeping { "going through what is here".into() } else { "waiting".into() }]);
    table.row(["looked at".into(), report.examined.to_string()]);
    table.row(["copied".into(), format!("{} ({})", report.copied, size(report.copied_bytes))]);
    table.row(["too many, let go".into(), report.trimmed.to_string()]);
    table.row(["got while a put arrived".into(), report.fetched.to_string()]);
    table.row(["failed, tried again".into(), report.failed.to_string()]);
    let HotReport { made, here, here_bytes, dropped } = report.hot;
    table.row(["further copies of hot objects made".into(), made.to_string()]);
    table.row(["of these here".into(), format!("{here} ({})", size(here_bytes))]);
    table.row(["let go of, cold".into(), dropped.to_string()]);
    table.render()
}

fn object_table(report: &ObjectReport) -> String {
    let mut head = Table::default();
    let key = report.key.clone().or_else(|| report.key_base64.clone().map(|key| format!("base64 {key}")));
    head.row(["key".into(), key.unwrap_or_default()]);
    head.row(["size".into(), format!("{} ({} bytes)", size(report.length), report.length)]);
    head.row(["type".into(), report.data_type.clone()]);
    head.row(["group".into(), if report.group.is_empty() { "none".into() } else { report.group.clone() }]);
    head.row(["pins".into(), report.pins.to_string()]);
    head.row(["lease".into(), format!("{:.1} s", f64::from(report.lease_ms) / 1000.0)]);
    head.row(["version".into(), report.version.clone()]);
    for replica in &report.replicas {
        head.row(["copy on".into(), format!("{} ({})", replica.node, replica.node_state)]);
    }
    let mut slices = Table::new(&["slice", "tier", "place on this node"]);
    for slice in &report.slices {
        slices.row([slice.slice.to_string(), slice.tier.clone(), slice.place.clone()]);
    }
    format!("{}\n{}", head.render(), slices.render())
}
