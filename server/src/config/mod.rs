//! Settings: one typed TOML file, environment and flags over it, checked once, before anything is opened.
//!
//! Precedence: flags (`--set section.field=value`), environment (`TIDEPOOL_SECTION__FIELD`), file, defaults. Unknown
//! fields are errors; a value out of bounds is refused with the name of the field, the value and the bounds; nothing
//! is bent quietly. `docs/src/configuration.md` lists every field, and a test holds it to this file.

mod load;
mod units;

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tidepool_tiers::eviction::EvictionPolicy;

pub use load::{ConfigError, load};
pub use units::{Period, Size};

/// All settings of one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where the node keeps everything: a path. Default: `/var/lib/tidepool` as root, else
    /// `$XDG_DATA_HOME/tidepool`.
    pub data: Option<PathBuf>,
    /// How long a clean stop may take: 1 s to 10 min, default 20 s. Too short: calls are cut off.
    pub shutdown_timeout: ShutdownTimeout,
    /// Listener of the client protocol.
    pub grpc: Grpc,
    /// Listener of the transfer engine, by which native clients put and get.
    pub engine: Engine,
    /// Listener of admin HTTP.
    pub admin: Admin,
    /// The cluster that this node belongs to.
    pub cluster: Cluster,
    /// The replicated catalog.
    pub catalog: Catalog,
    /// How objects are cut and moved.
    pub store: Store,
    /// How many copies objects have, and how they are kept at that.
    pub replicas: Replicas,
    /// Where this node stands.
    pub labels: Labels,
    /// The DRAM tier.
    pub dram: Dram,
    /// The NVMe tier of this instance.
    pub nvme: Nvme,
    /// The device tier.
    pub device: Device,
    /// Bounds on what callers may ask for.
    pub limits: Limits,
    /// Logs and traces.
    pub telemetry: Telemetry,
}

/// A newtype only for its default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ShutdownTimeout(pub Period);

impl Default for ShutdownTimeout {
    fn default() -> Self {
        Self(Period::seconds(20))
    }
}

/// Listener of the client protocol.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Grpc {
    /// Address, default `127.0.0.1:7420`; port 0 picks a free one. Others than loopback: see `cluster`.
    pub listen: SocketAddr,
    /// Also listen on `<data>/tidepool.sock`, hand the DRAM segment to readers on `<data>/segment.sock`, and take memory that
    /// clients lend on `<data>/memory.sock` (all of mode 0600), default true.
    pub unix_socket: bool,
}

impl Default for Grpc {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 7420)), unix_socket: true }
    }
}

/// Listener of the transfer engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Engine {
    /// Start it, default true. Without it native clients use gRPC.
    pub enabled: bool,
    /// Address. Default: that of `grpc.listen` with the next port (7421; port 0 picks a free one). Others than loopback: see
    /// `cluster`.
    pub listen: Option<SocketAddr>,
    /// File in PEM with this node's certificate, and those between it and an authority. With it and the next two, connections
    /// over TCP are TLS 1.3, and clients need certificates too: those without use gRPC, which is not encrypted. Default: none.
    pub tls_certificate: Option<PathBuf>,
    /// File in PEM with the certificate's private key, mode 0600. Default: none.
    pub tls_key: Option<PathBuf>,
    /// File in PEM with the authorities from which clients' certificates must come. Default: none.
    pub tls_authorities: Option<PathBuf>,
    /// Name that other nodes' certificates must bear when this one connects to their engines, for example one that all of them
    /// bear. Default: the host in the address that is connected to.
    pub tls_name: Option<String>,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            enabled: true,
            listen: None,
            tls_certificate: None,
            tls_key: None,
            tls_authorities: None,
            tls_name: None,
        }
    }
}

/// Listener of admin HTTP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Admin {
    /// Address, default `127.0.0.1:7422`; port 0 picks a free one.
    pub listen: SocketAddr,
}

impl Default for Admin {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 7422)) }
    }
}

/// The cluster that this node belongs to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    /// File with the shared secret, 16 bytes or more, mode 0600. With it, every call must carry the secret, and
    /// listeners may have other addresses than loopback. Default: none.
    pub secret_file: Option<PathBuf>,
    /// Allow other addresses than loopback without a secret, default false. Whoever reaches them can read and remove
    /// everything.
    pub insecure: bool,
    /// gRPC addresses (`host:port`) of nodes of a group to join. Default: none, a node with an empty folder forms a group of
    /// its own. Without effect on a folder that belongs to a group, but that of another group is refused.
    pub join: Vec<String>,
    /// How many voters the catalog's group is to have: 1, 3, 5 or 7, default 3. Learners are promoted in pairs until it has
    /// so many; more tolerate more failures, and make each change wait for more disks.
    pub voters: usize,
    /// Where other nodes reach this one's gRPC, as `host:port`. Default: the address that it listens on; needed if that is
    /// `0.0.0.0` or `::`.
    pub advertise: Option<String>,
}

impl Default for Cluster {
    fn default() -> Self {
        Self { secret_file: None, insecure: false, join: Vec::new(), voters: 3, advertise: None }
    }
}

/// When a logged change counts as done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// When it is on the disk.
    #[default]
    Fsync,
    /// When the kernel has it: a loss of power may lose acknowledged puts.
    Os,
}

/// How the catalog's leader makes sure that it still leads before it answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reads {
    /// By the time since a quorum followed it.
    #[default]
    Lease,
    /// By asking a quorum each time.
    Quorum,
}

/// The replicated catalog.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Catalog {
    /// `fsync` (default) or `os`.
    pub durability: Durability,
    /// `lease` (default) or `quorum`.
    pub reads: Reads,
}

/// How objects are cut and moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Store {
    /// Length of slices: 64 KiB to 16 MiB in steps of 64 KiB, default 4 MiB. Small: more records; large: coarse eviction.
    pub slice_bytes: Size,
    /// Reads from NVMe after which an object is promoted to DRAM: 0 (never) to 255, default 2.
    pub promote_after_reads: u8,
    /// Bytes that the background scrub verifies a second: 0 (off) to 16 GiB, default 64 MiB.
    pub scrub_bytes_per_second: Size,
}

impl Default for Store {
    fn default() -> Self {
        Self { slice_bytes: Size(4 << 20), promote_after_reads: 2, scrub_bytes_per_second: Size(64 << 20) }
    }
}

/// Which of the nodes that could take a copy does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Far from the others, and of two at random the one with more room.
    #[default]
    TwoChoices,
    /// Far from the others, and the one with most room.
    FreeFirst,
    /// Far from the others, and the one with most room on NVMe.
    NvmeFreeFirst,
    /// Near to the others, but on another host.
    LocalFirst,
}

/// Copies of objects on several nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Replicas {
    /// How many copies an object gets, on as many nodes, if its put does not say: 1 to 15, default 1. What can't be had at once is
    /// made later.
    pub count: u8,
    /// Which nodes take them: `two_choices` (default), `free_first`, `nvme_free_first` or `local_first`.
    pub placement: Placement,
    /// How long a node may be away before its copies are made anew elsewhere, those of objects that are being read excepted:
    /// up to 24h, default 10m.
    pub repair_grace: Period,
    /// Most bytes a second that this node gives away to make copies anew: 0 (as fast as it goes) to 64 GiB, default 256 MiB.
    pub repair_bytes_per_second: Size,
    /// Copies beyond what it is to have that an object gets while it is read much: 0 (none) to 14, default 2.
    pub hot_copies: u8,
    /// Reads a second by other nodes and their clients of one copy that make its object hot: 1 to 1,000,000, default 200. Less than
    /// a quarter of it, and a further copy goes.
    pub hot_reads_per_second: u32,
    /// Share of this node's DRAM that further copies of hot objects take at most: 0 to 0.5, default 0.1.
    pub hot_share: f64,
}

impl Default for Replicas {
    fn default() -> Self {
        Self {
            count: 1,
            placement: Placement::default(),
            repair_grace: Period::seconds(600),
            repair_bytes_per_second: Size(256 << 20),
            hot_copies: 2,
            hot_reads_per_second: 200,
            hot_share: 0.1,
        }
    }
}

/// Where this node stands: domains that fail as one, at most 64 bytes each. The copies of an object go to different zones, else
/// to different racks, else to different hosts, as far as there are any.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Labels {
    /// The widest domain: a room, a site, an availability zone. Default: none.
    pub zone: String,
    /// The rack in its zone. Default: none.
    pub rack: String,
    /// The host in its rack. Default: the running kernel's boot id, which containers on one machine share.
    pub host: Option<String>,
}

/// The DRAM tier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Dram {
    /// Bytes to lend: 16 MiB and more. Default: a quarter of what the machine (or its control group) has free, 256 MiB
    /// to 64 GiB.
    pub capacity: Option<Size>,
    /// Where the segment file lies, a tmpfs or hugetlbfs. Default: a hugetlbfs with enough free pages, else `/dev/shm`.
    pub folder: Option<PathBuf>,
    /// Keep the segment over restarts of the process, default true. False: anonymous memory, lost with the process.
    pub survive_restart: bool,
    /// Share in use at which demotion starts: above `watermark_low`, to 0.99, default 0.95.
    pub watermark_high: f64,
    /// Share in use at which demotion stops: 0.1 and more, default 0.90.
    pub watermark_low: f64,
    /// Which objects leave first: `lru` (default) or `s3fifo`.
    pub eviction: EvictionPolicy,
}

impl Default for Dram {
    fn default() -> Self {
        Self {
            capacity: None,
            folder: None,
            survive_restart: true,
            watermark_high: 0.95,
            watermark_low: 0.90,
            eviction: EvictionPolicy::Lru,
        }
    }
}

/// How the NVMe tier talks to its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NvmeEngine {
    /// io_uring if the kernel allows it, else threads.
    #[default]
    Auto,
    /// io_uring, or no start.
    IoUring,
    /// Threads.
    Blocking,
}

/// Whether the page cache is passed by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DirectIo {
    /// O_DIRECT if the file system allows it.
    #[default]
    Auto,
    /// O_DIRECT, or no start.
    On,
    /// The page cache.
    Off,
}

/// When objects are written to NVMe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NvmeWrites {
    /// When they leave DRAM.
    #[default]
    OnEvict,
    /// Before their put is answered.
    WriteThrough,
    /// Never: what is there is only read.
    Never,
}

/// The NVMe tier of this instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nvme {
    /// Use it, default true.
    pub enabled: bool,
    /// Its folder. Default: `<data>/nvme`.
    pub path: Option<PathBuf>,
    /// Hard cap on its disk use: 8 regions and 1 MiB, and more. Default: a tenth of the free space there, at most 32 GiB.
    pub capacity: Option<Size>,
    /// Length of regions: 1 MiB to 256 MiB in steps of 4 KiB, default 16 MiB; fixed when the folder is made.
    pub region_bytes: Size,
    /// Requests at the device at a time: 1 to 1024, default 32.
    pub queue_depth: u32,
    /// `auto` (default), `io_uring`, `blocking`.
    pub engine: NvmeEngine,
    /// `auto` (default), `on`, `off`.
    pub direct: DirectIo,
    /// `on_evict` (default), `write_through`, `never`.
    pub write_policy: NvmeWrites,
    /// Share of regions in use at which reclaim starts: above `watermark_low`, to 0.999, default 0.98.
    pub watermark_high: f64,
    /// Share of regions in use at which reclaim stops: 0.5 and more, default 0.97.
    pub watermark_low: f64,
}

impl Default for Nvme {
    fn default() -> Self {
        Self {
            enabled: true,
            path: None,
            capacity: None,
            region_bytes: Size(16 << 20),
            queue_depth: 32,
            engine: NvmeEngine::Auto,
            direct: DirectIo::Auto,
            write_policy: NvmeWrites::OnEvict,
            watermark_high: 0.98,
            watermark_low: 0.97,
        }
    }
}

/// What kind of device memory there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// No device tier.
    #[default]
    None,
    /// Host memory standing in for a device, for tests.
    Host,
}

/// The device tier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Device {
    /// `none` (default) or `host`.
    pub kind: DeviceKind,
    /// Bytes to lend: 1 MiB and more, default 256 MiB.
    pub capacity: Size,
}

impl Default for Device {
    fn default() -> Self {
        Self { kind: DeviceKind::None, capacity: Size(256 << 20) }
    }
}

/// Bounds on what callers may ask for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Bytes of values in flight: 16 MiB to 64 GiB, default 256 MiB. Above it calls are refused with a retry hint.
    pub inflight_bytes: Size,
    /// Open connections: 1 to 1,000,000, default 10,000. Further ones wait in the kernel's queue.
    pub connections: u32,
    /// Calls at a time on one connection: 1 to 100,000, default 1,024.
    pub streams: u32,
    /// Largest object: 1 byte to 16 GiB, default 16 GiB.
    pub max_object_bytes: Size,
    /// Memory of clients on this host that the node maps to copy values from it: 64 MiB to 64 TiB, default 64 GiB. It is the
    /// clients' own; the node pays 2 MiB of page tables for each GiB. Values from memory beyond it take another way.
    pub lent_bytes: Size,
    /// The same of one client: 64 MiB to 64 TiB, default 32 GiB.
    pub lent_client_bytes: Size,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            inflight_bytes: Size(256 << 20),
            connections: 10_000,
            streams: 1024,
            max_object_bytes: Size(tidepool_metadata::MAX_OBJECT_BYTES),
            lent_bytes: Size(64 << 30),
            lent_client_bytes: Size(32 << 30),
        }
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

/// Logs and traces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Telemetry {
    /// `human` (default) or `json`.
    pub log_format: LogFormat,
    /// What to log, in `tracing`'s filter language, default `info`.
    pub log_filter: String,
    /// OTLP collector (gRPC URL) for traces. Default: none.
    pub otlp_endpoint: Option<String>,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { log_format: LogFormat::Human, log_filter: "info".into(), otlp_endpoint: None }
    }
}

impl Config {
    /// Where the transfer engine listens; `None`: nowhere.
    #[must_use]
    pub fn engine_address(&self) -> Option<SocketAddr> {
        let next = SocketAddr::new(
            self.grpc.listen.ip(),
            match self.grpc.listen.port() {
                0 | u16::MAX => 0,
                port => port + 1,
            },
        );
        self.engine.enabled.then_some(self.engine.listen.unwrap_or(next))
    }
}

#[cfg(test)]
mod tests;
