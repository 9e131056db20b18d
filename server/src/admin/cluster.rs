//! The group of the catalog, its nodes and leases, as an operator sees and changes them.

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use tidepool_metadata::catalog::{Answer, NodeStat, NodeState, Query};
use tidepool_metadata::{ErrorKind, NodeId, TierKind};
use tidepool_replication::{CatalogError, CatalogHandle, GroupStatus, MemberChange, MemberId, Read, Role};

use super::AdminApi;
use super::report::{
    LeasesReport, MemberRow, NodeRow, NodesReport, RaftReport, RebuildReport, RebuildRow, RemovalReport, RemovalRequest,
};
use crate::error::Error;
use crate::node::{NodeLoad, RepairReport, SUSPECT_AFTER, TierUse};

/// Which node is meant, as eight hexadecimal digits.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeRequest {
    node: String,
}

/// Which nodes are meant.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodesRequest {
    nodes: Vec<String>,
}

pub(super) fn parse(node: &str) -> Result<NodeId, Error> {
    u32::from_str_radix(node, 16).map(NodeId).map_err(|_| {
        let message = format!("{node:?} is no node: give its number as `tidepool admin nodes` shows it");
        Error::new(ErrorKind::Invalid, "BAD_NODE", message).field("node")
    })
}

/// The catalog also while it can't answer: an operator must see that.
fn catalog(api: &AdminApi) -> Result<&CatalogHandle, Error> {
    Ok(api.inner.service.opened_catalog().ok_or(CatalogError::Starting)?)
}

pub(super) async fn raft(State(api): State<AdminApi>) -> Result<Json<RaftReport>, Error> {
    Ok(Json(report(&catalog(&api)?.status())))
}

fn report(status: &GroupStatus) -> RaftReport {
    let member = |(nodes, kind): (&Vec<NodeId>, &str)| -> Vec<MemberRow> {
        let row = |&node: &NodeId| {
            let peer = status.peers.iter().find(|(known, ..)| *known == node);
            MemberRow {
                node: node.to_string(),
                kind: if status.members.of(node).is_some_and(MemberId::is_guest) { "guest" } else { kind }.to_owned(),
                leads: status.leader == Some(node),
                here: status.node == node,
                silent_ms: peer
                    .and_then(|(_, heard, _)| *heard)
                    .map(|heard| u64::try_from(heard.as_millis()).unwrap_or(u64::MAX)),
                matched: peer.map(|(.., matched)| matched.0).filter(|&matched| matched > 0),
            }
        };
        nodes.iter().map(row).collect()
    };
    let members = [(&status.voters, "voter"), (&status.learners, "learner")].into_iter().flat_map(member).collect();
    RaftReport {
        cluster: status.cluster.to_string(),
        node: status.node.to_string(),
        role: status.role.name().to_owned(),
        term: status.term.0,
        leader: status.leader.map(|leader| leader.to_string()),
        in_contact: status.in_contact,
        changing: status.members.is_changing(),
        commit: status.commit.0,
        applied: status.applied.0,
        log_first: status.log_first.0,
        log_last: status.log_last.0,
        image: status.image.0,
        disk_shortage: status.disk_shortage,
        failure: status.failure.as_ref().map(ToString::to_string),
        members,
    }
}

async fn change(api: &AdminApi, change: MemberChange) -> Result<Json<RaftReport>, Error> {
    let catalog = catalog(api)?;
    catalog.change_members(change).await?;
    Ok(Json(report(&catalog.status())))
}

pub(super) async fn remove(
    State(api): State<AdminApi>,
    Json(request): Json<NodeRequest>,
) -> Result<Json<RaftReport>, Error> {
    let node = parse(&request.node)?;
    if catalog(&api)?.status().leader == Some(node) {
        let message = "that node leads: `tidepool admin raft transfer-leader` to another one first, then remove it";
        return Err(Error::new(ErrorKind::Conflict, "IS_LEADER", message.into()).field("node"));
    }
    change(&api, MemberChange::Remove(node)).await
}

pub(super) async fn promote(
    State(api): State<AdminApi>,
    Json(request): Json<NodesRequest>,
) -> Result<Json<RaftReport>, Error> {
    let nodes = request.nodes.iter().map(|node| parse(node)).collect::<Result<_, _>>()?;
    change(&api, MemberChange::Promote(nodes)).await
}

pub(super) async fn transfer(
    State(api): State<AdminApi>,
    Json(request): Json<NodeRequest>,
) -> Result<Json<RaftReport>, Error> {
    change(&api, MemberChange::Transfer(parse(&request.node)?)).await
}

pub(super) async fn snapshot(State(api): State<AdminApi>) -> Result<Json<RaftReport>, Error> {
    let catalog = catalog(&api)?;
    catalog.flush_image().await?;
    Ok(Json(report(&catalog.status())))
}

pub(super) async fn nodes(State(api): State<AdminApi>) -> Result<Json<NodesReport>, Error> {
    let catalog = api.inner.service.catalog().await?;
    let status = catalog.status();
    let (_, answer) = catalog.query(Query::Nodes, Read::Local).await?;
    let Answer::Nodes(nodes) = answer else { return Err(CatalogError::Unexpected { expected: "nodes" }.into()) };
    let loads = api.inner.service.loads();
    let row = |known: NodeStat| {
        let load = loads.get(&known.node);
        let used = |tier: fn(&NodeLoad) -> Option<TierUse>| load.and_then(tier).map(|tier| tier.used_bytes);
        let silence = status.peers.iter().find(|(node, ..)| *node == known.node).and_then(|(_, heard, _)| *heard);
        // Only the leader hears all nodes.
        let is_suspect = status.role == Role::Leader && silence.is_some_and(|silence| silence > SUSPECT_AFTER);
        NodeRow {
            node: known.node.to_string(),
            incarnation: known.incarnation.0,
            state: match known.state {
                NodeState::Up if is_suspect => "suspect",
                NodeState::Up => "up",
                NodeState::Draining => "draining",
                NodeState::Absent => "absent",
            }
            .to_owned(),
            announcing: known.announcing,
            vote: if status.voters.contains(&known.node) {
                "voter"
            } else if status.members.of(known.node).is_some_and(MemberId::is_guest) {
                "guest"
            } else if status.learners.contains(&known.node) {
                "learner"
            } else {
                "none"
            }
            .to_owned(),
            dram: lent(&known, TierKind::Dram),
            nvme: lent(&known, TierKind::Nvme),
            dram_used: used(|load| load.dram),
            nvme_used: used(|load| load.nvme),
            reads_per_second: load.map(|load| load.reads_per_second),
            zone: known.labels.zone,
            rack: known.labels.rack,
            host: known.labels.host,
            grpc: known.addresses.grpc,
            admin: known.addresses.admin,
            replicas: known.replicas,
            bytes: known.bytes,
        }
    };
    Ok(Json(NodesReport { nodes: nodes.into_iter().map(row).collect() }))
}

fn lent(node: &NodeStat, kind: TierKind) -> u64 {
    node.tiers.iter().filter(|tier| tier.kind == kind).map(|tier| tier.capacity_bytes).sum()
}

/// What this node does to keep objects at their number of copies.
pub(super) async fn repair(State(api): State<AdminApi>) -> Json<RepairReport> {
    Json(api.inner.service.repair_report())
}

pub(super) async fn drain(
    State(api): State<AdminApi>,
    Json(request): Json<NodeRequest>,
) -> Result<Json<NodesReport>, Error> {
    api.inner.service.drain(parse(&request.node)?, true).await?;
    nodes(State(api)).await
}

pub(super) async fn undrain(
    State(api): State<AdminApi>,
    Json(request): Json<NodeRequest>,
) -> Result<Json<NodesReport>, Error> {
    api.inner.service.drain(parse(&request.node)?, false).await?;
    nodes(State(api)).await
}

/// Removes a node for good.
pub(super) async fn remove_node(
    State(api): State<AdminApi>,
    Json(RemovalRequest { node, force }): Json<RemovalRequest>,
) -> Result<Json<RemovalReport>, Error> {
    let node = parse(&node)?;
    let copies = api.inner.service.remove_node(node, force).await?;
    Ok(Json(RemovalReport { node: node.to_string(), copies }))
}

/// How far the nodes have announced what they have to a catalog that is made anew.
pub(super) async fn rebuild(State(api): State<AdminApi>) -> Result<Json<RebuildReport>, Error> {
    let status = api.inner.service.rebuild_status(&api.inner.folder).await?;
    let row = |node: NodeStat| RebuildRow {
        node: node.node.to_string(),
        announcing: node.announcing,
        replicas: node.replicas,
        bytes: node.bytes,
    };
    Ok(Json(RebuildReport {
        under_way: status.under_way,
        waits: status.waits.map(|nodes| nodes.iter().map(ToString::to_string).collect()),
        objects: status.objects,
        nodes: status.nodes.into_iter().map(row).collect(),
    }))
}

pub(super) async fn finish_rebuild(State(api): State<AdminApi>) -> Result<Json<RebuildReport>, Error> {
    api.inner.service.finish_rebuild().await?;
    rebuild(State(api)).await
}

pub(super) async fn leases(State(api): State<AdminApi>) -> Result<Json<LeasesReport>, Error> {
    let catalog = api.inner.service.catalog().await?;
    let status = catalog.status();
    let (count, tenants) = catalog.leases_here();
    Ok(Json(LeasesReport {
        leads: status.role == Role::Leader,
        leader: status.leader.map(|leader| leader.to_string()),
        leases: count as u64,
        tenants: tenants.into_iter().map(|(tenant, bytes)| (tenant.0, bytes)).collect(),
    }))
}
