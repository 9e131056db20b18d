//! All voters were lost: the node tells an empty catalog what it has, and the catalog takes it over.
//!
//! The catalog was told that it is being rebuilt when its epoch began, and answers *recovering* for what it does not
//! know. Of several versions of a key it keeps the one with the highest commit index; indices of later epochs are higher.
//! What it refuses (an older version, a copy of what was put since) is freed by the reconciliation that follows.
//! What stands in no slice is lost: groups, pins, tenants and their quotas.
//! Crash: the whole is repeated, and what was taken over before counts once.

use futures::stream::{FuturesUnordered, TryStreamExt as _};
use tidepool_metadata::LogTime;
use tidepool_metadata::catalog::{
    AddReplicaItem, AddReplicaOutcome, AdoptItem, Answer, Command, Outcome, Query, Setting,
};
use tidepool_replication::{CatalogError, CatalogHandle, Read};
use tidepool_tiers::store::Announcement;

use super::NodeService;

/// Places of the store's index that are looked at together.
const STEP: u32 = 1024;
/// Bytes of items in one command, far below its bound.
const COMMAND_BYTES: usize = 96 << 10;
/// What an item takes beside key and checksums, at most.
const ITEM_BYTES: usize = 112;
/// Commands under way: the log syncs some while the next are encoded.
const IN_FLIGHT: usize = 8;

/// Whether the catalog waits for what its nodes have.
pub(super) async fn is_under_way(service: &NodeService) -> Result<bool, CatalogError> {
    match service.catalog().await?.query(Query::Counts, Read::Linearizable).await? {
        (_, Answer::Counts(counts)) => Ok(counts.settings.contains(&Setting::Rebuilding(true))),
        _ => Err(CatalogError::Unexpected { expected: "counts" }),
    }
}

/// Announces all replicas, hottest first. Answers how many were taken over.
pub(super) async fn announce(service: &NodeService) -> Result<u64, CatalogError> {
    let mut under_way = FuturesUnordered::new();
    let (mut adopted, mut first) = (0, Some(0));
    while let Some(place) = first {
        let (announcements, next) = service.store().announce(place, STEP);
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
    Ok(adopted)
}

async fn adopt(catalog: CatalogHandle, command: Command) -> Result<u64, CatalogError> {
    let (_, outcome) = catalog.propose(command).await?;
    let Outcome::AddReplicas(outcomes) = outcome else { return Err(CatalogError::Unexpected { expected: "adopt" }) };
    Ok(outcomes.iter().filter(|outcome| **outcome == AddReplicaOutcome::Added).count() as u64)
}

/// The only node has announced itself: what the catalog does not know now is missing.
pub(super) async fn end(service: &NodeService) -> Result<(), CatalogError> {
    if service.catalog().await?.status().voters == [service.identity().0] {
        service.catalog().await?.propose(Command::SetSetting(Setting::Rebuilding(false))).await?;
    }
    Ok(())
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
