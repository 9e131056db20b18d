//! Further copies of objects that other nodes' callers read much ([`tidepool_replication::replicas::hot`]).
//!
//! Counted is what others ask of this node by version: what it gives to its own callers another copy would not take off it. Every
//! second the hottest of these get another copy, if the plan says so, and further copies that are here go if nobody reads them.
//! They take a share of DRAM at most, leave it before anything else, and are made only where it is not full and the tenant has
//! room. Nothing of this is kept over a restart: a further copy is then one too many, and goes by repair when it is cold.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tidepool_metadata::catalog::{ForgetMode, Located, ObjectLocation, Room};
use tidepool_metadata::{ErrorKind, KeyHash, NodeId, ObjectKey, TenantId, TierKind, VersionId};
use tidepool_replication::replicas::hot::{self, Heat, Limits, SETTLES};
use tidepool_replication::replicas::placement;
use tidepool_replication::{CatalogHandle, Forgotten, Read};
use tidepool_tiers::store::ReplicaName;

use super::repair::pull_of;
use crate::error::Error;
use crate::node::NodeService;
use crate::peers::wire::{Pull, Pulls};

/// How often heat is looked at; what [`Heat`] counts by.
const PERIOD: Duration = Duration::from_secs(1);
/// Versions whose reads are counted. Of more, the less read ones are left out.
const COUNTED: usize = 4096;
/// Objects that get another copy at a time, the hottest.
const AT_A_TIME: usize = 16;
/// Nodes that are asked to take a copy.
const ASKED: usize = 2;
/// Seconds until one is tried again that nobody took.
const RESTS: u32 = 4 * SETTLES;
/// Part of a tenant's quota that is left free.
const SPARED: u64 = 8;

/// Which objects get further copies, and how much these may take.
#[derive(Clone, Copy, Debug)]
pub struct HotConfig {
    /// When, and how many.
    pub limits: Limits,
    /// Share of a node's DRAM that such copies take at most.
    pub dram_share: f64,
}

/// What of hot objects is known, for reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotReport {
    /// Further copies that other nodes were made to take.
    pub made: u64,
    /// Further copies that are here.
    pub here: u64,
    /// Their bytes.
    pub here_bytes: u64,
    /// Further copies that went from here because they were cold.
    pub dropped: u64,
}

/// An object that others read here.
struct Asked {
    tenant: TenantId,
    key: ObjectKey,
    heat: Heat,
    /// Seconds in which no copy is made of it.
    rests: u32,
}

/// A further copy that is here.
struct Further {
    name: ReplicaName,
    bytes: u64,
    heat: Heat,
    /// Seconds since it came, up to [`SETTLES`].
    age: u32,
}

#[derive(Default)]
struct Table {
    asked: HashMap<VersionId, Asked>,
    further: HashMap<(TenantId, ObjectKey), Further>,
    /// Bytes of further copies on their way.
    arriving_bytes: u64,
    made: u64,
    dropped: u64,
}

/// What is read here, and what is here because it is read.
pub(in crate::node) struct Hot {
    config: HotConfig,
    table: Mutex<Table>,
}

/// Room for a further copy, until it is here or given up.
pub(super) struct FurtherRoom<'a> {
    hot: &'a Hot,
    bytes: u64,
}

impl Drop for FurtherRoom<'_> {
    fn drop(&mut self) {
        self.hot.table.lock().arriving_bytes -= self.bytes;
    }
}

impl Table {
    fn further_bytes(&self) -> u64 {
        self.further.values().map(|further| further.bytes).sum::<u64>() + self.arriving_bytes
    }
}

impl Hot {
    pub(in crate::node) fn new(config: HotConfig) -> Self {
        Self { config, table: Mutex::default() }
    }

    fn is_off(&self) -> bool {
        self.config.limits.copies == 0
    }

    /// Another node, or a client that was referred here, reads a version.
    pub(in crate::node) fn note_asked(&self, tenant: TenantId, key: &ObjectKey, version: VersionId) {
        if self.is_off() {
            return;
        }
        let mut table = self.table.lock();
        if let Some(asked) = table.asked.get_mut(&version) {
            asked.heat.count();
        } else if table.asked.len() < COUNTED {
            let mut asked = Asked { tenant, key: key.clone(), heat: Heat::default(), rests: 0 };
            asked.heat.count();
            table.asked.insert(version, asked);
        }
        note_further(&mut table, tenant, key);
    }

    /// Callers of this node read what is here.
    pub(in crate::node) fn note_read<'a>(&self, tenant: TenantId, keys: impl IntoIterator<Item = &'a ObjectKey>) {
        if !self.is_off() {
            let mut table = self.table.lock();
            keys.into_iter().for_each(|key| note_further(&mut table, tenant, key));
        }
    }

    /// Whether a copy that is one too many stays here.
    pub(super) fn keeps(&self, name: &ReplicaName, location: &ObjectLocation, up: usize) -> bool {
        let table = self.table.lock();
        let limits = &self.config.limits;
        let asked = table.asked.get(&name.version).map(|asked| asked.heat);
        let further = table.further.get(&(name.tenant, name.key.clone()));
        let heat = asked.max(further.map(|further| further.heat)).unwrap_or_default();
        let is_young = further.is_some_and(|further| further.age < SETTLES);
        // As hot as it takes: only the number decides.
        let rate = if is_young { limits.reads_per_second } else { heat.reads_per_second() };
        hot::keeps(location, up, rate, limits)
    }

    /// Room for a further copy of so many bytes.
    ///
    /// # Errors
    /// `NO_SPACE`: those that are here have their share, or DRAM is full.
    pub(super) fn room(&self, service: &NodeService, bytes: u64) -> Result<FurtherRoom<'_>, Error> {
        let store = &service.inner.store;
        let capacity: u64 =
            store.usage().iter().filter(|tier| tier.tier == TierKind::Dram).map(|tier| tier.capacity).sum();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share"
        )]
        let most = (capacity as f64 * self.config.dram_share) as u64;
        let mut table = self.table.lock();
        if self.is_off() || table.further_bytes() + bytes > most || bytes > store.room_below_watermark() {
            let message = "this node's memory has no room for further copies of hot objects";
            return Err(Error::new(ErrorKind::Exhausted, "NO_SPACE", message.into()));
        }
        table.arriving_bytes += bytes;
        Ok(FurtherRoom { hot: self, bytes })
    }

    /// A further copy is here, and counts.
    pub(super) fn came(&self, service: &NodeService, name: ReplicaName, bytes: u64) {
        service.inner.store.leaves_first(&name);
        let further = Further { name: name.clone(), bytes, heat: Heat::default(), age: 0 };
        self.table.lock().further.insert((name.tenant, name.key), further);
    }

    /// What this node has done and holds.
    pub(super) fn report(&self) -> HotReport {
        let table = self.table.lock();
        let here_bytes = table.further.values().map(|further| further.bytes).sum();
        HotReport { made: table.made, here: table.further.len() as u64, here_bytes, dropped: table.dropped }
    }

    /// A second is over: the hottest objects, hottest first, and the further copies here that are cold.
    fn turn(&self, service: &NodeService) -> (Vec<Candidate>, Vec<ReplicaName>) {
        let (store, limits) = (&service.inner.store, &self.config.limits);
        let mut table = self.table.lock();
        let mut hottest: Vec<Candidate> = Vec::new();
        table.asked.retain(|&version, asked| {
            asked.heat.turn();
            asked.rests = asked.rests.saturating_sub(1);
            let rate = asked.heat.reads_per_second();
            if limits.is_hot(rate) && asked.rests == 0 {
                hottest.push(Candidate { tenant: asked.tenant, key: asked.key.clone(), version, rate });
            }
            !asked.heat.is_cold()
        });
        hottest.sort_by_key(|candidate| std::cmp::Reverse(candidate.rate));
        hottest.truncate(AT_A_TIME);
        let mut cold = Vec::new();
        table.further.retain(|_, further| {
            further.heat.turn();
            further.age = (further.age + 1).min(SETTLES);
            let ReplicaName { tenant, key, version, .. } = &further.name;
            if further.age == SETTLES && !limits.is_warm(further.heat.reads_per_second()) {
                cold.push(further.name.clone());
            }
            // Evicted, or removed.
            store.contains(*tenant, key, *version)
        });
        (hottest, cold)
    }

    fn rest(&self, version: VersionId, seconds: u32) {
        if let Some(asked) = self.table.lock().asked.get_mut(&version) {
            asked.rests = seconds;
        }
    }
}

fn note_further(table: &mut Table, tenant: TenantId, key: &ObjectKey) {
    if !table.further.is_empty()
        && let Some(further) = table.further.get_mut(&(tenant, key.clone()))
    {
        further.heat.count();
    }
}

/// An object that may get another copy.
struct Candidate {
    tenant: TenantId,
    key: ObjectKey,
    version: VersionId,
    rate: u32,
}

/// Runs until the catalog stops.
pub(in crate::node) async fn run(service: NodeService, catalog: CatalogHandle, bytes_per_second: u64) {
    let hot = &service.inner.hot;
    if hot.is_off() {
        return;
    }
    let mut period = tokio::time::interval(PERIOD);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        period.tick().await;
        if catalog.status().failure.is_some() {
            return;
        }
        let (hottest, cold) = hot.turn(&service);
        if let Err(error) = service.drop_cold(&catalog, cold).await {
            tracing::debug!(%error, "further copies that are cold go later");
        }
        let mut bytes = 0_u64;
        for candidate in hottest {
            // As much as repair may give away, beside it.
            if bytes_per_second > 0 && bytes >= bytes_per_second {
                break;
            }
            match service.copy_hot(&catalog, &candidate).await {
                Ok(copied) => bytes += copied,
                Err(error) => {
                    tracing::debug!(key = %candidate.key, %error, "a hot object gets no further copy now");
                    hot.rest(candidate.version, RESTS);
                }
            }
        }
    }
}

impl NodeService {
    /// Has another node take a copy, if the plan says so; answers its bytes.
    async fn copy_hot(&self, catalog: &CatalogHandle, candidate: &Candidate) -> Result<u64, Error> {
        let Candidate { tenant, key, version, rate } = candidate;
        let hot = &self.inner.hot;
        // Until it is seen what comes of it.
        hot.rest(*version, SETTLES);
        let candidates = self.candidates(&self.nodes().await?);
        let (_, located) = catalog.locate(*tenant, vec![key.clone()], None, Read::Local).await?;
        let Some(Located::Found(location)) = located.into_iter().next() else { return Ok(0) };
        let here = location.replicas.iter().find(|copy| copy.replica.node == self.inner.node);
        let Some(replica) = here.filter(|_| location.version == *version).map(|copy| copy.replica) else {
            return Ok(0);
        };
        if !hot::wants_copy(&location, self.inner.node, candidates.len(), *rate, &hot.config.limits) {
            return Ok(0);
        }
        let room = catalog.quota_room(*tenant, Read::Local).await?;
        let spared = if room.whole == Room::UNLIMITED { 0 } else { room.whole.bytes / SPARED };
        if room.left.bytes.saturating_sub(spared) < location.length {
            return Err(crate::node::error::quota_exceeded());
        }
        let holders: Vec<NodeId> = location.replicas.iter().map(|copy| copy.replica.node).collect();
        let numbers = placement::numbers(KeyHash::of(*tenant, key.as_bytes()).0);
        let order = placement::order(&candidates, &holders, self.inner.placement, numbers);
        let name = ReplicaName { tenant: *tenant, key: key.clone(), version: *version, replica };
        // In memory is where it is to be.
        let pull = Pull { durable_on_nvme: false, ..pull_of(&name, &location, self.inner.node) };
        let mut refused =
            crate::node::error::unavailable(&crate::node::ObjectName { tenant: *tenant, key: key.clone() });
        for node in order.into_iter().take(ASKED) {
            let pulls = Pulls { pulls: vec![pull.clone()], at_a_time: 1, further: true };
            match self.pulled_there(node, pulls, location.length).await.pop() {
                Some(Ok(_)) => {
                    tracing::debug!(%key, %node, rate, "a hot object has a further copy");
                    hot.table.lock().made += 1;
                    return Ok(location.length);
                }
                Some(Err(error)) => refused = error,
                None => {}
            }
        }
        Err(refused)
    }

    /// Lets go of further copies here, as far as the catalog agrees; one that it needs is no further one any more.
    async fn drop_cold(&self, catalog: &CatalogHandle, cold: Vec<ReplicaName>) -> Result<(), Error> {
        if cold.is_empty() {
            return Ok(());
        }
        let names = cold.iter().map(|name| (name.tenant, name.key.clone(), name.version, name.replica)).collect();
        let answers = catalog.forget(names, ForgetMode::SurplusOnly).await?;
        for (name, answer) in cold.into_iter().zip(answers) {
            match answer {
                Forgotten::Leased => continue,
                Forgotten::Yes => {
                    self.free(&name);
                    self.inner.hot.table.lock().dropped += 1;
                }
                Forgotten::Pinned | Forgotten::StillNeeded => {}
            }
            self.inner.hot.table.lock().further.remove(&(name.tenant, name.key));
        }
        Ok(())
    }
}
