//! Everything about objects but their bytes: removal, pins, leases, listings, and what an operator asks.

use std::time::Duration;

use tidepool_metadata::catalog::{
    self, Answer, Command, MAX_COMMAND_ITEMS, NodeState, Outcome, PinItem, PinOutcome, Query, RemoveItem,
};
use tidepool_metadata::{DataType, Incarnation, LogIndex, NodeId, ObjectKey, TenantId};
use tidepool_replication::Read;
use tidepool_tiers::store::SlicePlace;

use super::{
    KeyFilter, ListPage, MatchPage, NodeService, ObjectName, ObjectStat, RemoveOutcome, ReplicaStat, RequestIds, error,
    sessions,
};
use crate::error::Error;

/// Keys looked at in one step of a removal by pattern.
const STEP_KEYS: usize = 4096;
/// Keys in one proposal: the longest keys still fit a command.
const PROPOSED_KEYS: usize = 200;
const _: () = assert!(PROPOSED_KEYS <= MAX_COMMAND_ITEMS);

/// What a node says of itself.
#[derive(Clone, Debug)]
pub struct NodeInfo {
    /// Its number.
    pub node: NodeId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Its role in the group: `leader`, `follower`, ..; `starting` until the catalog is open, of which nothing is known then.
    pub role: &'static str,
    /// How far its catalog is.
    pub applied: LogIndex,
    /// What it is doing: a phase of recovery, `serving`, ..
    pub phase: &'static str,
    /// Objects that the catalog knows.
    pub objects: u64,
}

/// One object as an operator sees it.
#[derive(Clone, Debug)]
pub struct ObjectReport {
    /// What the catalog knows.
    pub stat: ObjectStat,
    /// Where its slices lie on this node.
    pub places: Vec<SlicePlace>,
}

impl NodeService {
    /// Removes keys. One outcome per key, in order.
    ///
    /// # Errors
    /// Those of the catalog; keys before the error may be removed.
    pub async fn remove(
        &self,
        tenant: TenantId,
        keys: Vec<ObjectKey>,
        force: bool,
        ids: Option<RequestIds>,
    ) -> Result<(LogIndex, Vec<RemoveOutcome>), Error> {
        self.acknowledge(ids);
        let mut requests = sessions::each_item(ids);
        let (mut index, mut outcomes) = (LogIndex::default(), Vec::with_capacity(keys.len()));
        for keys in keys.chunks(PROPOSED_KEYS) {
            let items = keys.iter().zip(&mut requests);
            let item = |(key, request): (&ObjectKey, _)| RemoveItem {
                tenant,
                key: key.clone(),
                version: None,
                force,
                request,
            };
            let (log_index, removed) = self.propose_removal(items.map(item).collect()).await?;
            index = log_index;
            outcomes.extend(removed);
        }
        Ok((index, outcomes))
    }

    async fn propose_removal(&self, items: Vec<RemoveItem>) -> Result<(LogIndex, Vec<RemoveOutcome>), Error> {
        let (log_index, outcome) = self.led_catalog().await?.propose(Command::Remove(items)).await?;
        let Outcome::Remove(outcomes) = outcome else { return Err(error::unexpected("removal")) };
        let outcomes = outcomes.into_iter().map(|outcome| match outcome {
            catalog::RemoveOutcome::Removed { .. } => Ok(RemoveOutcome::Removed),
            catalog::RemoveOutcome::Pinned => Ok(RemoveOutcome::Pinned),
            catalog::RemoveOutcome::Missing => Ok(RemoveOutcome::Missing),
            catalog::RemoveOutcome::Refused(refusal) => Err(error::not_executed(refusal)),
        });
        Ok((log_index, outcomes.collect::<Result<_, Error>>()?))
    }

    /// One bounded step of a removal by pattern, behind `after`. Each object is removed only in the version that
    /// matched.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn remove_matching(
        &self,
        tenant: TenantId,
        filter: &KeyFilter,
        force: bool,
        after: Option<ObjectKey>,
    ) -> Result<MatchPage, Error> {
        let query = Query::Matching { tenant, filter: filter.clone(), after, limit: STEP_KEYS };
        let (log_index, answer) = self.catalog().await?.query(query, Read::Linearizable).await?;
        let Answer::Matches(matches) = answer else { return Err(error::unexpected("matches")) };
        let mut page = MatchPage { examined: matches.examined, next: matches.next, log_index, ..MatchPage::default() };
        for objects in matches.objects.chunks(PROPOSED_KEYS) {
            let item = |object: &catalog::MatchedObject| RemoveItem {
                tenant,
                key: object.key.clone(),
                version: Some(object.version),
                force,
                request: None,
            };
            let (log_index, outcomes) = self.propose_removal(objects.iter().map(item).collect()).await?;
            page.log_index = log_index;
            page.removed += outcomes.iter().filter(|outcome| **outcome == RemoveOutcome::Removed).count() as u64;
            page.pinned += outcomes.iter().filter(|outcome| **outcome == RemoveOutcome::Pinned).count() as u64;
        }
        Ok(page)
    }

    /// Adds or takes a pin; answers per key whether the object is there.
    ///
    /// # Errors
    /// Those of the catalog; keys before the error may be changed.
    pub async fn pin(
        &self,
        tenant: TenantId,
        keys: Vec<ObjectKey>,
        pinned: bool,
        ids: Option<RequestIds>,
    ) -> Result<(LogIndex, Vec<bool>), Error> {
        self.acknowledge(ids);
        let mut requests = sessions::each_item(ids);
        let (mut index, mut found) = (LogIndex::default(), Vec::with_capacity(keys.len()));
        for keys in keys.chunks(PROPOSED_KEYS) {
            let items = keys.iter().zip(&mut requests);
            let items = items.map(|(key, request)| PinItem { tenant, key: key.clone(), request }).collect();
            let command = if pinned { Command::Pin(items) } else { Command::Unpin(items) };
            let (log_index, outcome) = self.led_catalog().await?.propose(command).await?;
            let Outcome::Pin(outcomes) = outcome else { return Err(error::unexpected("pins")) };
            index = log_index;
            for outcome in outcomes {
                found.push(match outcome {
                    PinOutcome::Pinned { .. } => true,
                    PinOutcome::Missing => false,
                    PinOutcome::Refused(refusal) => return Err(error::not_executed(refusal)),
                });
            }
        }
        Ok((index, found))
    }

    /// Grants or renews leases; answers how long each lasts, zero where there is no object.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn renew_leases(
        &self,
        tenant: TenantId,
        keys: Vec<ObjectKey>,
        duration: Duration,
    ) -> Result<Vec<Duration>, Error> {
        Ok(self.catalog().await?.renew_leases(tenant, keys, duration).await?)
    }

    /// Ends leases early; answers per key whether there was one.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn release_leases(&self, tenant: TenantId, keys: Vec<ObjectKey>) -> Result<Vec<bool>, Error> {
        Ok(self.catalog().await?.release_leases(tenant, keys).await?)
    }

    /// One page of the tenant's objects, in key order.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn list(
        &self,
        tenant: TenantId,
        prefix: &[u8],
        after: Option<&ObjectKey>,
        limit: usize,
        data_type: Option<DataType>,
    ) -> Result<ListPage, Error> {
        let query = Query::List { tenant, prefix: prefix.to_vec(), after: after.cloned(), limit, data_type };
        let (_, answer) = self.catalog().await?.query(query, Read::Linearizable).await?;
        let Answer::Page(page) = answer else { return Err(error::unexpected("a page")) };
        Ok(page)
    }

    /// What the catalog knows of one object.
    ///
    /// # Errors
    /// `NOT_FOUND`; those of the catalog.
    pub async fn stat(&self, name: &ObjectName) -> Result<ObjectStat, Error> {
        let query = Query::Stat { tenant: name.tenant, key: name.key.clone() };
        let (log_index, answer) = self.catalog().await?.query(query, Read::Linearizable).await?;
        let Answer::Stat(stat) = answer else { return Err(error::unexpected("a stat")) };
        let catalog::ObjectStat { listed, location, .. } = stat.ok_or_else(|| error::not_found(name))?;
        let replicas = location.replicas.iter().map(|copy| ReplicaStat {
            replica: copy.replica,
            node_state: match copy.node_state {
                NodeState::Up => "up",
                NodeState::Draining => "draining",
                NodeState::Absent => "absent",
            },
        });
        let lease = self.catalog().await?.lease_left(name.tenant, &name.key).await;
        Ok(ObjectStat {
            version: location.version,
            replicas: replicas.collect(),
            slice_checksums: location.checksums,
            listed,
            log_index,
            lease_ms: u32::try_from(lease.as_millis()).unwrap_or(u32::MAX),
        })
    }

    /// One object as an operator sees it.
    ///
    /// # Errors
    /// As [`NodeService::stat`].
    pub async fn object_report(&self, name: &ObjectName) -> Result<ObjectReport, Error> {
        let stat = self.stat(name).await?;
        let places = self.inner.store.places(name.tenant, &name.key, stat.version);
        Ok(ObjectReport { stat, places })
    }

    /// What the node says of itself.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn info(&self) -> Result<NodeInfo, Error> {
        let (node, incarnation) = self.identity();
        let phase = self.phase();
        // Clients ask this first, and what they read by version is served without the catalog.
        let Some(catalog) = self.inner.catalog.get() else {
            return Ok(NodeInfo { node, incarnation, role: "starting", applied: LogIndex(0), phase, objects: 0 });
        };
        let role = catalog.status().role.name();
        let (applied, answer) = catalog.query(Query::Counts, Read::Local).await?;
        let Answer::Counts(counts) = answer else { return Err(error::unexpected("counts")) };
        Ok(NodeInfo { node, incarnation, role, applied, phase, objects: counts.objects })
    }

    /// What the node is doing: `starting`, `hot_keys`, `dram`, `disk`, or `serving`.
    #[must_use]
    pub fn phase(&self) -> &'static str {
        let report = self.inner.store.recovery_report();
        if report.finished {
            return "serving";
        }
        let running = report.phases.iter().rev().find(|phase| phase.started);
        running.map_or("starting", |phase| phase.phase.name())
    }
}
