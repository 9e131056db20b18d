//! From the node's reports to rows.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tidepool_tiers::TieredStore;

use super::report::{ObjectReport, PhaseRow, RecoveryReport, ReplicaRow, SliceRow, TiersReport};
use crate::node::{self, NodeService};

pub(super) fn tiers(store: &TieredStore) -> TiersReport {
    TiersReport { tiers: store.tiers_report(), misses: store.misses() }
}

pub(super) fn recovery(service: &NodeService) -> RecoveryReport {
    let report = service.store().recovery_report();
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
    RecoveryReport {
        phases: phases.collect(),
        finished: report.finished,
        reconciliation: service.reconciled().copied(),
    }
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
        version: stat.version.to_string(),
        lease_ms: stat.lease_ms,
        replicas: replicas.collect(),
        slices: slices.collect(),
    }
}
