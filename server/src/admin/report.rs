//! What admin HTTP answers and the command line shows: plain data, the same on both sides.

use serde::{Deserialize, Serialize};
use tidepool_tiers::store::TierReport;

use crate::node::Reconciled;

/// `GET /v1/tiers`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TiersReport {
    /// Fastest first.
    pub tiers: Vec<TierReport>,
    /// Reads that found nothing on this node.
    pub misses: u64,
}

/// `GET /v1/recovery`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecoveryReport {
    /// In order.
    pub phases: Vec<PhaseRow>,
    /// Whether the node knows all that it has.
    pub finished: bool,
    /// How node and catalog came to agree on it, once they have.
    pub reconciliation: Option<Reconciled>,
}

/// One phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseRow {
    /// `hot_keys`, `dram`, `disk`.
    pub phase: String,
    /// `waiting`, `running`, `done`.
    pub state: String,
    /// Replicas to look at, as far as known.
    pub total: u64,
    /// Replicas adopted.
    pub adopted: u64,
    /// Replicas dropped: damaged, or not whole.
    pub dropped: u64,
    /// Bytes of the adopted ones.
    pub bytes: u64,
    /// How long it ran, in milliseconds.
    pub elapsed_ms: u64,
}

/// `GET /v1/objects`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObjectReport {
    /// The key, if it is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The key in base64, if it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_base64: Option<String>,
    /// Length in bytes.
    pub length: u64,
    /// What it holds.
    pub data_type: String,
    /// Its group.
    pub group: String,
    /// How often it is pinned.
    pub pins: u32,
    /// Which put.
    pub version: String,
    /// How long a lease on it lasts, in milliseconds.
    pub lease_ms: u32,
    /// Its copies.
    pub replicas: Vec<ReplicaRow>,
    /// Where its slices lie on this node.
    pub slices: Vec<SliceRow>,
}

/// One copy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplicaRow {
    /// Its node.
    pub node: String,
    /// That node's state.
    pub node_state: String,
}

/// One slice on one tier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SliceRow {
    /// Its number.
    pub slice: u32,
    /// On which tier.
    pub tier: String,
    /// The place, in the tier's own words.
    pub place: String,
}

/// `GET /v1/info`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InfoReport {
    /// Of the program.
    pub version: String,
    /// The node.
    pub node: String,
    /// Its cluster.
    pub cluster: String,
    /// Its life.
    pub incarnation: u32,
    /// Its role in the catalog's group.
    pub role: String,
    /// What it is doing.
    pub phase: String,
    /// How far its catalog is.
    pub applied_index: u64,
    /// Objects that the catalog knows.
    pub objects: u64,
    /// Where gRPC listens.
    pub grpc: String,
}

/// Body of `POST /v1/nvme/attach`: what is left out is as configured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttachRequest {
    /// Folder.
    pub path: Option<String>,
    /// Capacity, as in the configuration.
    pub capacity: Option<String>,
}

/// Answer to attach and detach.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NvmeReport {
    /// `attached` or `detached`.
    pub state: String,
    /// Records found and taken over.
    pub records: u64,
}

/// `GET /v1/raft`, and the answer to every change of the group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RaftReport {
    /// Which cluster.
    pub cluster: String,
    /// Which node answers.
    pub node: String,
    /// `leader`, `follower`, `candidate`, `learner`.
    pub role: String,
    /// In which term.
    pub term: u64,
    /// Who leads, as far as this node knows.
    pub leader: Option<String>,
    /// A quorum follows it, or it hears its leader.
    pub in_contact: bool,
    /// A change of members is under way.
    pub changing: bool,
    /// Last entry known to be committed.
    pub commit: u64,
    /// Last entry applied here.
    pub applied: u64,
    /// First entry of the log.
    pub log_first: u64,
    /// Last entry of the log.
    pub log_last: u64,
    /// The image on disk has all entries up to here.
    pub image: u64,
    /// Bytes that are free on the catalog's disk, if they are too few for it to grow: puts are refused.
    #[serde(default)]
    pub disk_shortage: Option<u64>,
    /// Why the group serves nothing any more.
    pub failure: Option<String>,
    /// Voters, then learners.
    pub members: Vec<MemberRow>,
}

/// One member of the group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberRow {
    /// Its node.
    pub node: String,
    /// `voter`, `learner` or `guest`.
    pub kind: String,
    /// Whether it leads.
    pub leads: bool,
    /// Whether it is the one that answers.
    pub here: bool,
    /// How long ago it was heard from, in milliseconds.
    pub silent_ms: Option<u64>,
    /// Up to where its log agrees, as the leader knows.
    pub matched: Option<u64>,
}

/// `GET /v1/nodes`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodesReport {
    /// By number.
    pub nodes: Vec<NodeRow>,
}

/// One node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeRow {
    /// Its number.
    pub node: String,
    /// Its life.
    pub incarnation: u32,
    /// `up`, `suspect` (only the leader says so), `draining`, `absent`.
    pub state: String,
    /// It has returned and not yet said all that it has.
    pub announcing: bool,
    /// `voter`, `learner`, `guest` (an instance in a client's process), `none`.
    pub vote: String,
    /// Bytes of DRAM that it lends.
    pub dram: u64,
    /// Bytes of NVMe.
    pub nvme: u64,
    /// Bytes of its DRAM in use, if it was heard of in the last seconds.
    pub dram_used: Option<u64>,
    /// Bytes of its NVMe in use.
    pub nvme_used: Option<u64>,
    /// Objects read from it in the last second or so.
    pub reads_per_second: Option<u32>,
    /// Where it stands, each empty if it does not say.
    pub zone: String,
    /// In its zone.
    pub rack: String,
    /// In its rack: the running kernel's boot id, if nothing else was configured.
    pub host: String,
    /// Its gRPC.
    pub grpc: String,
    /// Its admin HTTP; empty if it has none.
    pub admin: String,
    /// How many copies it has.
    pub replicas: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// `POST /v1/nodes/remove`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemovalRequest {
    /// Which node goes, as eight hexadecimal digits.
    pub node: String,
    /// Although it is up, or holds copies that nobody has taken over.
    #[serde(default)]
    pub force: bool,
}

/// The answer to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovalReport {
    /// Which node went.
    pub node: String,
    /// How many copies were given up with it; what has others is made anew.
    pub copies: u64,
}

/// `GET /v1/rebuild`, and the answer to its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RebuildReport {
    /// The catalog is being made anew from what the nodes hold: what is not known yet is *recovering*.
    pub under_way: bool,
    /// Nodes that have not announced all yet and are waited for; null: another node knows.
    pub waits: Option<Vec<String>>,
    /// Objects that the catalog knows.
    pub objects: u64,
    /// The nodes that have come, by number.
    pub nodes: Vec<RebuildRow>,
}

/// One node that announces what it has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RebuildRow {
    /// Its number.
    pub node: String,
    /// It has not announced all yet.
    pub announcing: bool,
    /// Its copies that the catalog knows.
    pub replicas: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// `GET /v1/types`, and the answer to a change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TypesReport {
    /// All types, by number.
    pub types: Vec<TypeRow>,
}

/// What becomes of objects of one type whose puts do not say.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TypeRow {
    /// Which type, such as `kv_cache`.
    pub data_type: String,
    /// How many copies there are to be; 0: as `replicas.count` of the node says that takes the put.
    pub copies: u8,
    /// `any`, `memory` (never written to disk for want of memory), `nvme` (durable from the start).
    pub tier: String,
    /// They are pinned from the start.
    pub pin: bool,
    /// Most bytes of all tenants, times copies; null: as many as there is room for.
    pub quota_bytes: Option<u64>,
    /// Their bytes, times copies.
    pub bytes: u64,
}

/// Body of `POST /v1/types/set`: all of it at once, what is left out is as for any type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TypeRequest {
    /// Which type.
    pub data_type: String,
    /// How many copies; 0: as the node says.
    pub copies: u8,
    /// `any`, `memory` or `nvme`.
    pub tier: String,
    /// Pinned from the start.
    pub pin: bool,
    /// Most bytes, such as `10GiB`; null: no bound.
    pub quota: Option<String>,
}

impl Default for TypeRequest {
    fn default() -> Self {
        Self { data_type: String::new(), copies: 0, tier: "any".into(), pin: false, quota: None }
    }
}

/// `GET /v1/leases`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeasesReport {
    /// Whether this node is the one that gives leases.
    pub leads: bool,
    /// Who does.
    pub leader: Option<String>,
    /// How many leases there are.
    pub leases: u64,
    /// Bytes that each tenant has leased, by its number.
    pub tenants: Vec<(u32, u64)>,
}

/// `GET /v1/tenants`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantsReport {
    /// All tenants, in the order in which they were created.
    pub tenants: Vec<TenantRow>,
}

/// One tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantRow {
    /// Its name; `default` for callers who name none.
    pub name: String,
    /// Its number, never used again.
    pub number: u32,
    /// `serving`; `dropping`: it is hidden, and its objects are being removed.
    pub state: String,
    /// Objects that it has.
    pub objects: u64,
    /// Their bytes, times copies.
    pub bytes: u64,
    /// Most objects; null: as many as there is room for.
    pub quota_objects: Option<u64>,
    /// Most bytes, times copies.
    pub quota_bytes: Option<u64>,
}

/// Body of `POST /v1/tenants/create`, `quota` and `drop`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TenantRequest {
    /// Which.
    pub name: String,
    /// Most bytes, times copies, such as `10GiB`; null: no bound.
    pub bytes: Option<String>,
    /// Most objects.
    pub objects: Option<u64>,
}

/// `GET /v1/tasks`, and the answer to a task that was begun or cancelled: that one alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TasksReport {
    /// By when they began; nodes that are being emptied at the end.
    pub tasks: Vec<TaskRow>,
}

/// One task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskRow {
    /// 16 hexadecimal digits; `drain-` and the node's number for one that is being emptied.
    pub id: String,
    /// `copy`, `move`, `drain`.
    pub kind: String,
    /// `waiting`, `running`, `done`, `failed`, `cancelled`.
    pub state: String,
    /// Why it failed, such as `OBJECT_GONE`; else empty.
    pub reason: String,
    /// The object's tenant; of a drain empty.
    pub tenant: String,
    /// The object's key, if it is UTF-8.
    pub key: Option<String>,
    /// Else its bytes.
    pub key_base64: Option<String>,
    /// From which node; empty: from any holder.
    pub source: String,
    /// To which nodes; of a drain none: wherever there is room.
    pub targets: Vec<String>,
    /// Of a copy or move, how many targets have copies that count.
    pub copied: u64,
    /// Bytes of the object; of a drain those that are left on the node.
    pub bytes: u64,
    /// Of a drain, how many copies are left on the node.
    pub left: Option<u64>,
    /// When it began, in milliseconds since the Unix epoch; of a drain 0.
    pub begun_ms: u64,
    /// When its state changed last; of a drain 0.
    pub changed_ms: u64,
}

/// Body of `POST /v1/tasks/copy` and `move`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TaskBody {
    /// The object's key as text, or
    pub key: Option<String>,
    /// as bytes in base64.
    pub key_base64: Option<String>,
    /// Its tenant; empty: the default one.
    pub tenant: String,
    /// From which node; a move needs one.
    pub source: Option<String>,
    /// To which nodes; of a move one.
    pub targets: Vec<String>,
    /// Names the task, 16 hexadecimal digits, so that it can be asked for again when the answer was lost; null: the node draws one.
    pub id: Option<String>,
}
