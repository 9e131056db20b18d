//! `tidepool admin raft`: the group of the catalog.

use std::process::ExitCode;

use clap::Subcommand;
use serde_json::json;

use super::connection::ConnectionArguments;
use super::failure::Failure;
use super::output::{Output, Table, size};
use super::serve::SettingsArguments;
use crate::admin::report::{LeasesReport, NodesReport, RaftReport, RemovalReport, RemovalRequest};
use crate::folder::DataFolder;
use crate::plan;

/// What to do with a node.
#[derive(Debug, Subcommand)]
pub(super) enum NodeCommand {
    /// Remove a node for good: it leaves the group, what was listed on it is made anew from other copies at once, and its data
    /// folder is refused from then on. It must be drained and empty, or absent
    Remove {
        /// The node
        node: String,
        /// Although it is up or not empty: what only it has is lost
        #[arg(long)]
        force: bool,
    },
}

/// What to do with the group.
#[derive(Debug, Subcommand)]
pub(super) enum RaftCommand {
    /// Show members, leader, and how far the log is
    Status,
    /// Say how a node comes in: it asks by itself, with `tidepool serve --join`
    Add,
    /// Make learners voters now; the leader does so by itself until cluster.voters is reached
    Promote {
        /// Nodes, as `tidepool admin nodes` shows them
        #[arg(required = true)]
        nodes: Vec<String>,
    },
    /// Take a node out of the group for good
    Remove {
        /// The node
        node: String,
    },
    /// Let another voter lead
    TransferLeader {
        /// The voter
        node: String,
    },
    /// Write the image of the catalog to disk now, so that the log before it can go
    Snapshot,
    /// Set a damaged or outdated catalog of this node aside, so that its next start joins its group anew. The node must not
    /// be running, and the group must have a quorum without it
    Rejoin(SettingsArguments),
}

pub(super) async fn run(
    command: &RaftCommand,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let report: RaftReport = match command {
        RaftCommand::Status => connection.admin()?.get("/v1/raft").await?,
        RaftCommand::Add => {
            let message = "a node comes in by itself: start it with an empty folder and `tidepool serve --join ADDRESS`, \
                where ADDRESS is the gRPC address of any node of the group";
            return Err(Failure::usage(message));
        }
        RaftCommand::Promote { nodes } => {
            connection.admin()?.post("/v1/raft/promote", &json!({ "nodes": nodes })).await?
        }
        RaftCommand::Remove { node } => connection.admin()?.post("/v1/raft/remove", &json!({ "node": node })).await?,
        RaftCommand::TransferLeader { node } => {
            connection.admin()?.post("/v1/raft/transfer-leader", &json!({ "node": node })).await?
        }
        RaftCommand::Snapshot => connection.admin()?.post("/v1/raft/snapshot", &json!({})).await?,
        RaftCommand::Rejoin(settings) => return rejoin(settings, output),
    };
    output.answer(&report, raft_table)
}

fn rejoin(settings: &SettingsArguments, output: &Output) -> Result<ExitCode, Failure> {
    let config = settings.load()?;
    let data = config.data.unwrap_or_else(plan::default_data_folder);
    if !data.join("identity.json").exists() {
        let message = format!("{} is no data folder: name it with --data", data.display());
        return Err(Failure::local("FOLDER_UNUSABLE", message));
    }
    let folder = DataFolder::open(&data).map_err(crate::Error::from)?;
    let aside = folder.leave_catalog().map_err(crate::Error::from)?;
    output.answer(&json!({ "data": data, "set_aside": aside }), |_| {
        format!("the old catalog is in {}\nthe next `tidepool serve` joins the group anew\n", aside.display())
    })
}

pub(super) async fn nodes(
    change: Option<&NodeCommand>,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let admin = connection.admin()?;
    let Some(NodeCommand::Remove { node, force }) = change else {
        return show_nodes(&admin.get("/v1/nodes").await?, output);
    };
    let request = RemovalRequest { node: node.clone(), force: *force };
    let report: RemovalReport = admin.post("/v1/nodes/remove", &request).await?;
    output.answer(&report, |RemovalReport { node, copies }| {
        format!("node {node} is removed for good; {copies} copies went with it: what has others is made anew\n")
    })
}

/// Has a node emptied, or not any more.
pub(super) async fn set_state(
    call: &str,
    node: &str,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let path = format!("/v1/nodes/{call}");
    show_nodes(&connection.admin()?.post(&path, &json!({ "node": node })).await?, output)
}

fn show_nodes(report: &NodesReport, output: &Output) -> Result<ExitCode, Failure> {
    output.answer(report, |report| {
        let mut table = Table::new(&[
            "node", "state", "vote", "life", "lends", "reads/s", "copies", "size", "place", "grpc", "admin",
        ]);
        for node in &report.nodes {
            // A host that is named by its kernel's boot id: enough to tell hosts apart.
            let host = node.host.chars().take(12).collect();
            let place = [node.zone.clone(), node.rack.clone(), host];
            let tiers = [(node.dram, node.dram_used), (node.nvme, node.nvme_used)];
            let lends = tiers.into_iter().filter(|&(lent, _)| lent > 0).map(|(lent, used)| match used {
                Some(used) => format!("{} ({} % full)", size(lent), used * 100 / lent),
                None => size(lent),
            });
            let state = if node.announcing { format!("{}, announcing", node.state) } else { node.state.clone() };
            table.row([
                node.node.clone(),
                state,
                node.vote.clone(),
                node.incarnation.to_string(),
                lends.collect::<Vec<_>>().join(" + "),
                node.reads_per_second.map_or_else(String::new, |reads| reads.to_string()),
                node.replicas.to_string(),
                size(node.bytes),
                place.into_iter().filter(|label| !label.is_empty()).collect::<Vec<_>>().join("/"),
                node.grpc.clone(),
                node.admin.clone(),
            ]);
        }
        table.render()
    })
}

pub(super) async fn leases(connection: &ConnectionArguments, output: &Output) -> Result<ExitCode, Failure> {
    let report: LeasesReport = connection.admin()?.get("/v1/leases").await?;
    output.answer(&report, |report| {
        if !report.leads {
            let leader = report.leader.as_deref().unwrap_or("nobody");
            return format!("this node does not give leases: {leader} leads\n");
        }
        let mut table = Table::new(&["tenant", "leased"]);
        for (tenant, bytes) in &report.tenants {
            table.row([tenant.to_string(), size(*bytes)]);
        }
        format!("{}{} leases\n", table.render(), report.leases)
    })
}

fn raft_table(report: &RaftReport) -> String {
    let mut head = Table::default();
    head.row(["cluster".into(), report.cluster.clone()]);
    head.row(["this node".into(), format!("{} ({})", report.node, report.role)]);
    head.row(["leader".into(), report.leader.clone().unwrap_or_else(|| "none".into())]);
    head.row(["term".into(), report.term.to_string()]);
    head.row(["log".into(), format!("{} to {}", report.log_first, report.log_last)]);
    head.row(["committed, applied".into(), format!("{}, {}", report.commit, report.applied)]);
    head.row(["image on disk".into(), report.image.to_string()]);
    if let Some(free) = report.disk_shortage {
        head.row(["disk".into(), format!("full: {} left; puts are refused", size(free))]);
    }
    if let Some(failure) = &report.failure {
        head.row(["failure".into(), failure.clone()]);
    }
    let mut members = Table::new(&["member", "kind", "leads", "heard before", "log agrees up to"]);
    for member in &report.members {
        let heard = member.silent_ms.map(|silent| format!("{silent} ms"));
        members.row([
            member.node.clone(),
            member.kind.clone(),
            if member.leads { "yes".into() } else { String::new() },
            if member.here { "this node".into() } else { heard.unwrap_or_else(|| "never".into()) },
            member.matched.map(|matched| matched.to_string()).unwrap_or_default(),
        ]);
    }
    let changing = if report.changing { "a change of members is under way\n" } else { "" };
    format!("{}\n{}{changing}", head.render(), members.render())
}
