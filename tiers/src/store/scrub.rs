//! The background scrub: reads what lies at rest and drops what no longer verifies, before a reader finds it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tidepool_metadata::TierKind;

use super::index::{EntryId, PerSlice};
use super::{Inner, ReplicaName, alive, name_of};
use crate::memory::SharedSlice;
use crate::nvme::NvmeTier;

/// How often a share of the budget is spent.
const TICK: Duration = Duration::from_millis(250);
/// What a slice costs at least, in bytes: the memory that it takes. Finding it takes as long as summing that up.
const LEAST_COST: u64 = 4096;

/// Verifies DRAM slices and NVMe regions in turn, within the configured bytes a second.
pub(super) async fn run(store: Weak<Inner>) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    let mut next = 0;
    let mut credit = 0;
    loop {
        ticks.tick().await;
        let Some(inner) = alive(&store) else { return };
        let mut budget = inner.config.scrub_bytes_per_second / 4;
        if budget == 0 {
            continue;
        }
        let nvme = inner.serving_nvme().ok();
        if nvme.is_some() {
            budget /= 2;
        }
        let dram = Arc::clone(&inner);
        let Ok(reached) = tokio::task::spawn_blocking(move || scrub_dram(&dram, next, budget)).await else { return };
        next = reached;
        if let Some(nvme) = nvme {
            credit += budget;
            scrub_nvme(&inner, &nvme, &mut credit).await;
        }
    }
}

/// Checks whole regions while there is credit for one; what one costs too much is saved up for.
async fn scrub_nvme(inner: &Inner, nvme: &NvmeTier, credit: &mut u64) {
    while *credit > 0 {
        // A tier that fails says so itself.
        let Ok(found) = nvme.scrub_step().await else { return };
        for (header, location) in &found.damaged {
            // Dead ones, and those of earlier rounds, are found too.
            if inner.lost(nvme, header, *location) {
                nvme.release(*location);
            }
        }
        *credit = credit.saturating_sub(found.bytes.max(1));
        if found.bytes > *credit || found.round_is_complete {
            return;
        }
    }
}

/// Verifies slices from entry `first` on until the budget is spent, of which small ones take more than their bytes; answers
/// where to go on.
fn scrub_dram(inner: &Arc<Inner>, first: EntryId, budget: u64) -> EntryId {
    let mut spent = 0;
    let mut id = first;
    while spent < budget {
        let (bound, found) = {
            let tables = inner.state.lock();
            let found = tables.index.get(id).and_then(|entry| Some((name_of(entry), entry.dram.clone()?)));
            (tables.index.id_bound(), found)
        };
        if id >= bound {
            return 0;
        }
        id += 1;
        if let Some((name, slices)) = found {
            spent += verify(inner, &name, &slices);
        }
    }
    id
}

/// Answers what it cost.
fn verify(inner: &Arc<Inner>, name: &ReplicaName, slices: &PerSlice<SharedSlice>) -> u64 {
    let (mut bytes, mut cost) = (0, 0);
    for slice in slices.as_slice() {
        bytes += u64::from(slice.length());
        cost += u64::from(slice.length()).max(LEAST_COST);
        if slice.verify(0..slice.length()).is_err() {
            inner.give_up(name, TierKind::Dram);
            break;
        }
    }
    inner.counters.scrubbed(bytes);
    cost
}
