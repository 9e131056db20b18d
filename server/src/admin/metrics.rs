//! Metrics for Prometheus: taken from the node's own counters when they are asked for. All names stand here.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tidepool_metadata::ErrorKind;
use tidepool_metadata::catalog::{MAX_TASKS, NodeState, TaskKind, TaskState};
use tidepool_tiers::store::TierReport;

use crate::error::Error;
use crate::node::NodeService;

/// Labels of a tier's metrics.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TierLabel {
    tier: String,
}

/// Labels of the copies and moves that were asked for.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TaskLabel {
    kind: &'static str,
    state: &'static str,
}

/// Label of a node that is being emptied.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct NodeLabel {
    node: String,
}

/// What can be said of a tier: name, help, value.
type TierGauge = (&'static str, &'static str, fn(&TierReport) -> u64);

/// Gauges, because they are copies of counters kept elsewhere; they rise only.
const TIER_GAUGES: [TierGauge; 14] = [
    ("tidepool_tier_capacity_bytes", "Bytes that the tier may use", |tier| tier.capacity),
    ("tidepool_tier_used_bytes", "Bytes of slices or records", |tier| tier.used),
    ("tidepool_tier_reserved_bytes", "Bytes being filled or written", |tier| tier.reserved),
    ("tidepool_tier_free_bytes", "Bytes that can be taken", |tier| tier.free),
    ("tidepool_tier_objects", "Replicas on this tier", |tier| tier.objects),
    ("tidepool_tier_hits", "Reads served from this tier", |tier| tier.hits),
    ("tidepool_tier_evictions", "Replicas that left the node from this tier", |tier| tier.evictions),
    ("tidepool_tier_demotions", "Replicas moved to the next slower tier", |tier| tier.demotions),
    ("tidepool_tier_demoted_bytes", "Bytes written to the next slower tier", |tier| tier.demoted_bytes),
    ("tidepool_tier_failed_demotions", "Demotions that failed; the bytes stayed", |tier| tier.failed_demotions),
    ("tidepool_tier_promotions", "Replicas that came from the next slower tier", |tier| tier.promotions),
    ("tidepool_tier_corruptions", "Damaged copies found and dropped", |tier| tier.corruptions),
    ("tidepool_tier_io_errors", "I/O errors", |tier| tier.errors),
    ("tidepool_tier_scrubbed_bytes", "Bytes verified by the scrub", |tier| tier.scrubbed_bytes),
];

/// The node's metrics.
pub(super) struct Metrics {
    service: NodeService,
}

impl Metrics {
    pub(super) fn new(service: NodeService) -> Self {
        Self { service }
    }

    /// All metrics as OpenMetrics text.
    pub(super) async fn encode(&self) -> Result<String, Error> {
        let mut registry = Registry::default();
        let tiers = self.service.store().tiers_report();
        for (name, help, value) in TIER_GAUGES {
            let family = Family::<TierLabel, Gauge>::default();
            for tier in &tiers {
                let label = TierLabel { tier: tier.tier.name().to_owned() };
                family.get_or_create(&label).set(i64::try_from(value(tier)).unwrap_or(i64::MAX));
            }
            registry.register(name, help, family);
        }
        let status = self.service.catalog().await?.status();
        let info = self.service.info().await?;
        let memory = resident_bytes();
        let (holds, held_bytes) = self.service.store().holds();
        let is_short = u64::from(status.disk_shortage.is_some());
        for (name, help, value) in [
            ("tidepool_catalog_objects", "Objects that the catalog knows", info.objects),
            ("tidepool_catalog_applied_index", "Log index of the last entry applied", info.applied.0),
            ("tidepool_catalog_applied_bytes", "Bytes of the entries applied since the start", status.applied_bytes),
            ("tidepool_catalog_applied_commands", "Commands applied since the start", status.applied_commands),
            ("tidepool_catalog_disk_is_short", "Whether the catalog's disk is too full for puts", is_short),
            ("tidepool_misses", "Reads that found nothing on this node", self.service.store().misses()),
            ("tidepool_holds", "Objects that peers are reading in this node's DRAM themselves", holds as u64),
            ("tidepool_held_bytes", "Bytes of those: not to be reused meanwhile", held_bytes),
            (
                "tidepool_kept_bytes",
                "DRAM that would be free without readers' views",
                self.service.store().kept_bytes(),
            ),
            ("tidepool_ready", "Whether the node knows all that it has", u64::from(info.phase == "serving")),
            ("tidepool_process_resident_bytes", "Resident memory of the process, the segment included", memory),
            (
                "tidepool_heap_allocated_bytes",
                "Memory asked for and not given back; more: the allocator's",
                heap_bytes(),
            ),
        ] {
            registry.register(name, help, gauge(value));
        }
        let repair = self.service.repair_report();
        for (name, help, value) in [
            ("tidepool_repair_copied", "Copies that other nodes were made to pull", repair.copied),
            ("tidepool_repair_copied_bytes", "Bytes of those", repair.copied_bytes),
            ("tidepool_repair_trimmed", "Copies that were too many here", repair.trimmed),
            ("tidepool_repair_failed", "Copies that could not be made at once", repair.failed),
            ("tidepool_hot_made", "Further copies of hot objects that other nodes were made to take", repair.hot.made),
            ("tidepool_hot_dropped", "Further copies that went from here because they were cold", repair.hot.dropped),
            ("tidepool_hot_copies", "Further copies of hot objects here", repair.hot.here),
            ("tidepool_hot_bytes", "Bytes of those", repair.hot.here_bytes),
        ] {
            registry.register(name, help, gauge(value));
        }
        self.register_tasks(&mut registry).await?;
        let mut text = String::new();
        encode(&mut text, &registry).map_err(|error| Error::new(ErrorKind::Internal, "INTERNAL", error.to_string()))?;
        Ok(text)
    }
}

impl Metrics {
    /// Copies, moves and drains: the same on every node, since the catalog has them.
    async fn register_tasks(&self, registry: &mut Registry) -> Result<(), Error> {
        let tasks = Family::<TaskLabel, Gauge>::default();
        for kind in ["copy", "move"] {
            for state in ["waiting", "running", "done", "failed", "cancelled"] {
                tasks.get_or_create(&TaskLabel { kind, state }).set(0);
            }
        }
        for task in self.service.tasks(None, None, MAX_TASKS).await?.tasks {
            let kind = match task.request.kind {
                TaskKind::Copy => "copy",
                TaskKind::Move => "move",
            };
            let state = match task.state {
                TaskState::Waiting => "waiting",
                TaskState::Running => "running",
                TaskState::Done => "done",
                TaskState::Failed(_) => "failed",
                TaskState::Cancelled => "cancelled",
            };
            tasks.get_or_create(&TaskLabel { kind, state }).inc();
        }
        let left = Family::<NodeLabel, Gauge>::default();
        for node in self.service.all_nodes().await?.iter().filter(|node| node.state == NodeState::Draining) {
            let label = NodeLabel { node: node.node.to_string() };
            left.get_or_create(&label).set(i64::try_from(node.replicas).unwrap_or(i64::MAX));
        }
        registry.register("tidepool_tasks", "Copies and moves that were asked for, of the last hour", tasks);
        registry.register("tidepool_drain_copies_left", "Copies on a node that is being emptied", left);
        Ok(())
    }
}

fn gauge(value: u64) -> Gauge {
    let gauge = Gauge::default();
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
    gauge
}

/// What the program holds of its allocator, 0 if that can't be told: with the resident memory it tells a leak from
/// memory that the allocator keeps.
#[cfg(feature = "jemalloc")]
fn heap_bytes() -> u64 {
    let read = tikv_jemalloc_ctl::epoch::advance().and_then(|_epoch| tikv_jemalloc_ctl::stats::allocated::read());
    read.map_or(0, |bytes| bytes as u64)
}

#[cfg(not(feature = "jemalloc"))]
fn heap_bytes() -> u64 {
    0
}

/// `VmRSS` of this process, 0 if it can't be read.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib =
        line.and_then(|rest| rest.trim().strip_suffix(" kB")).and_then(|number| number.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
