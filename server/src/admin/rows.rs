//! From the node's reports to rows.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tidepool_tiers::{TieredStore, store};

use super::report::{ObjectReport, PhaseRow, RecoveryReport, ReplicaRow, SliceRow, TierRow, TiersReport};
use crate::node;

pub(super) fn tiers(store: &TieredStore) -> TiersReport {
    let tiers = store.tiers_report().into_iter().map(|tier| TierRow {
        tier: tier.tier.name().to_owned(),
        state: tier.state,
        engine: tier.engine,
        capacity: tier.capacity,
        used: tier.used,
        reserved: tier.reserved,
        free: tier.free,
        objects: tier.objects,
        hits: tier.hits,
        evictions: tier.evictions,
        demotions: tier.demotions,
        demoted_bytes: tier.demoted_bytes,
        failed_demotions: tier.failed_demotions,
        promotions: tier.promotions,
        write_amplification: tier.write_amplification,
        corruptions: tier.corruptions,
        errors: tier.errors,
        last_error: tier.last_error,
        scrubbed_bytes: tier.scrubbed_bytes,
    });
    TiersReport { tiers: tiers.collect(), misses: store.misses() }
}

pub(super) fn recovery(report: &store::RecoveryReport) -> RecoveryReport {
    let phases = report.phases.iter().map(|phase| PhaseRow {
        phase: phase.phase.name().to_owned(),
        state: match (phase.started, phase.finished) {
            (_, true) => "done",
            (true, false) => "running",
            (false, false) => "waiting",
        }
        .to_owned(),
        total: phase.total,
        adopted: phase.adopted,
        dropped: phase.dropped,
        bytes: phase.bytes,
        elapsed_ms: u64::try_from(phase.elapsed.as_millis()).unwrap_or(u64::MAX),
    });
    RecoveryReport { phases: phases.collect(), finished: report.finished }
}

pub(super) fn object(found: &node::ObjectReport) -> ObjectReport {
    let stat = &found.stat;
    let bytes = stat.listed.key.as_bytes();
    let key = std::str::from_utf8(bytes).ok().map(str::to_owned);
    let replicas = stat
        .replicas
        .iter()
        .map(|copy| ReplicaRow { node: copy.replica.node.to_string(), node_state: copy.node_state.to_owned() });
    let slices = found.places.iter().map(|place| SliceRow {
        slice: place.slice_index,
        tier: place.tier.name().to_owned(),
        place: place.place.clone(),
    });
    ObjectReport {
        key_base64: key.is_none().then(|| STANDARD.encode(bytes)),
        key,
        length: stat.listed.length,
        data_type: format!("{:?}", stat.listed.data_type).to_lowercase(),
        group: stat.listed.group.as_deref().unwrap_or_default().to_owned(),
        pins: stat.listed.pins,
        version: format!("{}.{}.{}", stat.version.node, stat.version.incarnation.0, stat.version.sequence),
        lease_ms: stat.lease_ms,
        replicas: replicas.collect(),
        slices: slices.collect(),
    }
}
