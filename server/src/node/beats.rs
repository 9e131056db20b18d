//! Heartbeats: how full and how busy each node is, told to the leader twice a second, and by it to all.
//!
//! They are hints, for placement and for people, and nothing is right or wrong by them: whether a node is there, Raft's own
//! heartbeats tell ([`super::liveness`]). A node has one beat under way at a time, so that none waits behind another; one
//! that is lost is followed by the next. A leader keeps what it hears in memory only: a new one knows all after a period.
//! With each beat a node also looks up what the cluster has decided about types of objects, as far as its store must know.
//! An answer tells of [`TOLD`] nodes, the next one of those that follow, so that it stays small however many there are.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_metadata::catalog::{Answer, Query, Setting, TypeTier};
use tidepool_metadata::{DataType, NodeId, TierKind};
use tidepool_replication::{CatalogHandle, Read, Role};
use tokio::time::Instant;

use super::NodeService;
use crate::error::Error;
use crate::peers::wire::{Beat, Load, Loads, TierLoad, node_reply, node_request};

/// How often a node tells how it is.
const PERIOD: Duration = Duration::from_millis(500);
/// How old a load may be that is still used.
const FRESH: Duration = Duration::from_secs(5);
/// Loads in one answer, of about 60 bytes each.
const TOLD: usize = 64;

/// What is known of the nodes, and when it was so.
#[derive(Default)]
pub(super) struct Beats(Mutex<BTreeMap<NodeId, (Load, Instant)>>);

/// How full a tier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TierUse {
    /// Bytes that it may use.
    pub(crate) capacity_bytes: u64,
    /// Bytes of slices or records, and of those that are being written.
    pub(crate) used_bytes: u64,
}

/// How a node is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeLoad {
    pub(crate) dram: Option<TierUse>,
    pub(crate) nvme: Option<TierUse>,
    /// Objects read from it in the last second or so.
    pub(crate) reads_per_second: u32,
}

impl Beats {
    fn note(&self, load: Load, now: Instant) {
        let Some(at) = now.checked_sub(Duration::from_millis(load.age_ms.into())) else { return };
        let mut known = self.0.lock();
        // Of two ways that it came, the newer: the leader's answer may tell a node of its own beat before.
        if known.get(&NodeId(load.node)).is_none_or(|(_, noted)| *noted <= at) {
            known.insert(NodeId(load.node), (load, at));
        }
        known.retain(|_, (_, at)| now - *at < FRESH);
    }

    /// Those of the nodes behind `after`, and then those from the first on.
    fn told(&self, after: NodeId, now: Instant) -> Vec<Load> {
        let known = self.0.lock();
        let behind = known.range((Excluded(after), Unbounded));
        let told = behind.chain(known.range(..=after)).take(TOLD);
        let aged = |load: &Load, at: Instant| Load {
            age_ms: u32::try_from((now - at).as_millis()).unwrap_or(u32::MAX),
            ..*load
        };
        told.map(|(_, (load, at))| aged(load, *at)).collect()
    }

    fn loads(&self, now: Instant) -> BTreeMap<NodeId, NodeLoad> {
        let known = self.0.lock();
        let fresh = known.iter().filter(|(_, (_, at))| now - *at < FRESH);
        fresh.map(|(&node, (load, _))| (node, NodeLoad::from(load))).collect()
    }
}

impl From<&Load> for NodeLoad {
    fn from(load: &Load) -> Self {
        let tier = |tier: &TierLoad| TierUse { capacity_bytes: tier.capacity_bytes, used_bytes: tier.used_bytes };
        let (dram, nvme) = (load.dram.as_ref().map(tier), load.nvme.as_ref().map(tier));
        Self { dram, nvme, reads_per_second: load.reads_per_second }
    }
}

impl NodeService {
    /// How the nodes are, as far as this one heard in the last seconds.
    pub(crate) fn loads(&self) -> BTreeMap<NodeId, NodeLoad> {
        self.inner.beats.loads(Instant::now())
    }

    /// Another node's beat; answers how the others are.
    pub(super) fn hear(&self, beat: Beat) -> Result<Loads, Error> {
        let load = beat.load.ok_or_else(super::copies::malformed)?;
        let now = Instant::now();
        self.inner.beats.note(Load { age_ms: 0, ..load }, now);
        Ok(Loads { loads: self.inner.beats.told(NodeId(beat.after), now) })
    }

    fn load(&self, reads_per_second: u32) -> Load {
        let mut load = Load { node: self.inner.node.0, reads_per_second, ..Load::default() };
        for tier in self.inner.store.usage() {
            let told = TierLoad { capacity_bytes: tier.capacity, used_bytes: tier.used + tier.reserved };
            match tier.tier {
                TierKind::Dram => load.dram = Some(told),
                TierKind::Nvme => load.nvme = Some(told),
                TierKind::Device => {}
            }
        }
        load
    }
}

/// The types whose objects are never written to disk for want of memory.
fn memory_only(settings: &[Setting]) -> Vec<DataType> {
    let is_so = |setting: &Setting| match setting {
        Setting::Type { data_type, policy } => (policy.tier == TypeTier::Memory).then_some(*data_type),
        _ => None,
    };
    settings.iter().filter_map(is_so).collect()
}

/// Runs until the catalog stops.
pub(super) async fn run(service: NodeService, catalog: CatalogHandle) {
    let mut period = tokio::time::interval(PERIOD);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut reads, mut counted) = (service.inner.store.reads(), Instant::now());
    let mut after = NodeId(0);
    loop {
        period.tick().await;
        let status = catalog.status();
        if status.failure.is_some() {
            return;
        }
        let (now, elapsed) = (service.inner.store.reads(), counted.elapsed().as_millis().max(1));
        let rate = u128::from(now - reads) * 1000 / elapsed;
        (reads, counted) = (now, Instant::now());
        if let Ok((_, Answer::Counts(counts))) = catalog.query(Query::Counts, Read::Local).await {
            service.inner.store.set_memory_only(&memory_only(&counts.settings));
        }
        let load = service.load(u32::try_from(rate).unwrap_or(u32::MAX));
        service.inner.beats.note(load, Instant::now());
        let Some(leader) = status.leader.filter(|_| status.role != Role::Leader) else { continue };
        let beat = node_request::Ask::Beat(Beat { load: Some(load), after: after.0 });
        match service.ask_node(leader, beat, PERIOD).await.map(|reply| reply.answer) {
            Ok(Some(node_reply::Answer::Loads(Loads { loads }))) => {
                after = loads.last().map_or(NodeId(0), |last| NodeId(last.node));
                let others = loads.into_iter().filter(|load| load.node != service.inner.node.0);
                others.for_each(|load| service.inner.beats.note(load, Instant::now()));
            }
            Ok(_) => tracing::debug!(%leader, "the leader did not take a heartbeat"),
            Err(error) => tracing::debug!(%leader, %error, "the leader did not hear a heartbeat"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(node: u32, used_bytes: u64, age_ms: u32) -> Load {
        let dram = Some(TierLoad { capacity_bytes: 100, used_bytes });
        Load { node, age_ms, dram, ..Load::default() }
    }

    #[test]
    fn the_newest_counts_and_what_is_old_does_not() {
        let (beats, begin) = (Beats::default(), Instant::now() + FRESH);
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let used =
            |node, now| beats.loads(now).get(&NodeId(node)).and_then(|load| load.dram).map(|dram| dram.used_bytes);
        beats.note(load(1, 10, 0), at(0));
        beats.note(load(1, 5, 1000), at(0));
        assert_eq!(used(1, at(0)), Some(10), "what comes later by another way is older");
        beats.note(load(1, 20, 1000), at(3));
        beats.note(load(2, 1, 0), at(3));
        assert_eq!(used(1, at(3)), Some(20));
        assert_eq!((used(1, at(7)), used(2, at(7))), (None, Some(1)));
    }

    #[test]
    fn answers_tell_of_all_in_turns() {
        let (beats, now) = (Beats::default(), Instant::now());
        let nodes = 1..=2 * TOLD as u32 + 10;
        nodes.clone().for_each(|node| beats.note(load(node, 1, 0), now));
        let (mut after, mut heard) = (NodeId(0), Vec::new());
        for _ in 0..3 {
            let told = beats.told(after, now);
            assert_eq!(told.len(), TOLD);
            after = NodeId(told[TOLD - 1].node);
            heard.extend(told.iter().map(|load| load.node));
        }
        heard.truncate(nodes.clone().count());
        heard.sort_unstable();
        assert_eq!(heard, nodes.collect::<Vec<_>>());
    }
}
