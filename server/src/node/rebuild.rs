//! All voters were lost: the nodes tell an empty catalog what they have, and the catalog takes it over.
//!
//! One node begins the next epoch as a group of its own ([`crate::folder::DataFolder::begin_rebuild`]), the others leave what is left of
//! their catalogs and join it. The catalog was told that it is being rebuilt when its epoch began, and answers *recovering* for
//! what it does not know. Each node announces its copies while its own recovery goes on, so what is hot first and what is on disk last.
//! Of several versions of a key the one with the highest commit index is kept; indices of later epochs are higher.
//! What is refused (an older version, a copy of what was put since) is freed by the reconciliation that follows.
//! It is over when the nodes that it waits for have announced all, or when an operator says so: whoever comes then has what the
//! catalog does not know freed. What stands in no slice is lost: groups, pins, tenants and their quotas.
//! Crash: the whole is repeated, and what was taken over before counts once.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::stream::{FuturesUnordered, TryStreamExt as _};
use tidepool_metadata::catalog::{
    AddReplicaItem, AddReplicaOutcome, AdoptItem, Answer, Command, Located, NodeStat, Outcome, Query, Setting,
};
use tidepool_metadata::{LogTime, NodeId, ObjectKey, TenantId};
use tidepool_replication::{CatalogError, CatalogHandle, Read};
use tidepool_tiers::store::Announcement;
use tokio::task::JoinHandle;

use super::{NodeService, error};
use crate::error::Error;
use crate::folder::DataFolder;

/// Places of the store's index that are looked at together.
const STEP: u32 = 1024;
/// Bytes of items in one command, far below its bound.
const COMMAND_BYTES: usize = 96 << 10;
/// What an item takes beside key and checksums, at most.
const ITEM_BYTES: usize = 112;
/// Commands under way: the log syncs some while the next are encoded.
const IN_FLIGHT: usize = 8;
/// The least pause between two rounds over what recovery has found, and how often it is looked who has announced all.
const PAUSE: Duration = Duration::from_millis(50);

/// How a rebuild stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RebuildStatus {
    /// It goes on: what is not known is *recovering*.
    pub under_way: bool,
    /// The nodes that it waits for, if this one began it; without those that have announced all.
    pub waits: Option<Vec<NodeId>>,
    /// All that have come, by number.
    pub nodes: Vec<NodeStat>,
    /// Objects that the catalog knows.
    pub objects: u64,
}

/// Whether the catalog waits for what its nodes have.
pub(super) async fn is_under_way(service: &NodeService) -> Result<bool, CatalogError> {
    goes_on(service.catalog().await?, Read::Linearizable).await
}

async fn goes_on(catalog: &CatalogHandle, read: Read) -> Result<bool, CatalogError> {
    match catalog.query(Query::Counts, read).await? {
        (_, Answer::Counts(counts)) => Ok(counts.settings.contains(&Setting::Rebuilding(true))),
        _ => Err(CatalogError::Unexpected { expected: "counts" }),
    }
}

/// Announces what `recovery` has found until it has ended, what is hot first.
pub(super) async fn announce_early(service: &NodeService, recovery: &JoinHandle<()>) -> Result<(), CatalogError> {
    if !is_under_way(service).await? {
        return Ok(());
    }
    while !recovery.is_finished() {
        let began = Instant::now();
        announce(service).await?;
        // Each round looks at all that is here.
        tokio::time::sleep(began.elapsed().max(PAUSE)).await;
    }
    Ok(())
}

/// Announces all replicas that the catalog does not list, hottest first. Answers how many were taken over in this life.
pub(super) async fn announce(service: &NodeService) -> Result<u64, CatalogError> {
    let mut under_way = FuturesUnordered::new();
    let (mut adopted, mut first) = (0, Some(0));
    while let Some(place) = first {
        let (announcements, next) = service.store().announce(place, STEP);
        let announcements = unlisted(service.catalog().await?, announcements).await?;
        for command in commands(announcements, service.catalog().await?.now()) {
            if under_way.len() == IN_FLIGHT {
                adopted += under_way.try_next().await?.unwrap_or(0);
            }
            under_way.push(adopt(service.catalog().await?.clone(), command));
        }
        first = next;
    }
    while let Some(more) = under_way.try_next().await? {
        adopted += more;
    }
    let before = service.inner.adopted.fetch_add(adopted, std::sync::atomic::Ordering::Relaxed);
    Ok(before + adopted)
}

/// Those that this node's own catalog does not list.
async fn unlisted(catalog: &CatalogHandle, all: Vec<Announcement>) -> Result<Vec<Announcement>, CatalogError> {
    let mut tenants: HashMap<TenantId, Vec<Announcement>> = HashMap::new();
    for announcement in all {
        tenants.entry(announcement.name.tenant).or_default().push(announcement);
    }
    let mut unlisted = Vec::new();
    for (tenant, announcements) in tenants {
        let keys: Vec<ObjectKey> = announcements.iter().map(|announcement| announcement.name.key.clone()).collect();
        let (_, located) = catalog.locate(tenant, keys, None, Read::Local).await?;
        let is_listed = |announcement: &Announcement, located: &Located| {
            let replica = announcement.name.replica;
            matches!(located, Located::Found(found) if found.replicas.iter().any(|copy| copy.replica == replica))
        };
        let paired = announcements.into_iter().zip(&located);
        unlisted.extend(paired.filter(|(announcement, located)| !is_listed(announcement, located)).map(|(it, _)| it));
    }
    Ok(unlisted)
}

async fn adopt(catalog: CatalogHandle, command: Command) -> Result<u64, CatalogError> {
    let (_, outcome) = catalog.propose(command).await?;
    let Outcome::AddReplicas(outcomes) = outcome else { return Err(CatalogError::Unexpected { expected: "adopt" }) };
    Ok(outcomes.iter().filter(|outcome| **outcome == AddReplicaOutcome::Added).count() as u64)
}

/// The nodes of `waits` that have not announced all.
fn awaited(waits: Vec<NodeId>, nodes: &[NodeStat]) -> Vec<NodeId> {
    let has_announced = |node: &NodeId| nodes.iter().any(|known| known.node == *node && !known.announcing);
    waits.into_iter().filter(|node| !has_announced(node)).collect()
}

/// Ends the rebuild that this node began once this node and those that it waits for have announced all.
pub(super) async fn end_in_time(catalog: CatalogHandle, folder: Arc<DataFolder>, here: NodeId) {
    while let Some(mut waits) = folder.rebuild_waits() {
        waits.push(here);
        let ended = async {
            if !goes_on(&catalog, Read::Linearizable).await? {
                return Ok(true);
            }
            let (_, Answer::Nodes(nodes)) = catalog.query(Query::Nodes, Read::Linearizable).await? else {
                return Err(CatalogError::Unexpected { expected: "nodes" });
            };
            if awaited(waits, &nodes).is_empty() {
                catalog.propose(Command::SetSetting(Setting::Rebuilding(false))).await?;
                tracing::info!(nodes = nodes.len(), "all nodes have announced what they have: the catalog is rebuilt");
                return Ok(true);
            }
            Ok::<_, CatalogError>(false)
        };
        match ended.await {
            Ok(true) => {
                if let Err(error) = folder.end_rebuild() {
                    tracing::warn!(%error, "that the rebuild is over is noted later");
                }
            }
            Ok(false) => {}
            Err(error) if error.is_final() => return,
            Err(error) => tracing::debug!(%error, "whether the rebuild is over is asked again"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

impl NodeService {
    /// How a rebuild of the catalog stands.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn rebuild_status(&self, folder: &DataFolder) -> Result<RebuildStatus, Error> {
        let nodes = self.all_nodes().await?;
        let (_, answer) = self.catalog().await?.query(Query::Counts, Read::Local).await?;
        let Answer::Counts(counts) = answer else { return Err(error::unexpected("counts")) };
        let under_way = counts.settings.contains(&Setting::Rebuilding(true));
        let waits = folder.rebuild_waits().filter(|_| under_way).map(|mut waits| {
            waits.push(self.inner.node);
            awaited(waits, &nodes)
        });
        Ok(RebuildStatus { under_way, waits, nodes, objects: counts.objects })
    }

    /// Ends a rebuild, whoever is still missing: what those have and the catalog does not know is freed when they come.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn finish_rebuild(&self) -> Result<(), Error> {
        self.led_catalog().await?.propose(Command::SetSetting(Setting::Rebuilding(false))).await?;
        Ok(())
    }
}

/// As few commands as the items fit.
fn commands(announcements: Vec<Announcement>, now: LogTime) -> Vec<Command> {
    let mut commands = Vec::new();
    let (mut items, mut bytes) = (Vec::new(), 0);
    for Announcement { name, facts, durability } in announcements {
        let item_bytes = ITEM_BYTES + name.key.as_bytes().len() + 4 * facts.checksums.len();
        if bytes + item_bytes > COMMAND_BYTES && !items.is_empty() {
            commands.push(Command::Adopt(std::mem::take(&mut items)));
            bytes = 0;
        }
        bytes += item_bytes;
        let copy = AddReplicaItem {
            tenant: name.tenant,
            key: name.key,
            version: name.version,
            replica: name.replica,
            durability,
            reserved_at: now,
        };
        items.push(AdoptItem { copy, facts: Some(facts) });
    }
    if !items.is_empty() {
        commands.push(Command::Adopt(items));
    }
    commands
}
