//! After a restart: the node and the catalog agree on what the node has.
//!
//! Digests per key bucket are compared, and only buckets that differ are looked at. A replica that both know stays; one
//! that only the catalog knows is announced as lost; one that only the node has was never committed (it is abandoned,
//! then freed), or was dropped while the node was away (it is freed). Differences alone are logged. While the cluster is
//! being rebuilt, the node first announces all that it has ([`super::rebuild`]). Crash: the whole is repeated by the
//! next start.

use std::collections::HashMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tidepool_metadata::catalog::{
    AbandonItem, AbandonOutcome, Answer, Command, HeldReplica, KEY_BUCKETS, KeyBucket, KeyDigests, MAX_PAGE_ITEMS,
    Outcome, Query, ReplicaName,
};
use tidepool_metadata::{KeyHash, ReplicaId};
use tidepool_replication::{CatalogError, Read};
use tidepool_tiers::store;

use super::{NodeService, rebuild};

/// Replicas in one command.
const BATCH: usize = 200;

/// What a reconciliation found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reconciled {
    /// Replicas that both sides know.
    pub kept: u64,
    /// Replicas that the catalog knew and the node has not.
    pub lost: u64,
    /// Replicas that a catalog that is being rebuilt took over from the node.
    pub adopted: u64,
    /// Replicas that the node had and the catalog does not know: freed.
    pub freed: u64,
    /// Sealed replicas that turned out to be complete.
    pub completed: u64,
    /// Key buckets that differed.
    pub differing_buckets: u64,
    /// How long it took, in milliseconds.
    pub elapsed_ms: u64,
}

/// Brings both sides together and ends the announcement of this life.
///
/// # Errors
/// Those of the catalog; to be tried again.
pub(super) async fn run(service: &NodeService) -> Result<Reconciled, CatalogError> {
    let catalog = service.catalog().await?;
    let (node, incarnation) = service.identity();
    let began = Instant::now();
    let rebuilding = rebuild::is_under_way(service).await?;
    let adopted = if rebuilding { rebuild::announce(service).await? } else { 0 };
    let mut found = Reconciled { adopted, ..Reconciled::default() };
    let (index, answer) = catalog.query(Query::Digests { node }, Read::Linearizable).await?;
    let Answer::Digests(theirs) = answer else { return Ok(found) };
    let (ours, undecided) = digests(service);
    let ours = ours.as_slice().iter().zip(&theirs).zip(undecided);
    let differing: Vec<bool> = ours.map(|((ours, theirs), undecided)| undecided || ours != theirs).collect();
    let mut here: HashMap<KeyBucket, Vec<(store::ReplicaName, u64)>> = HashMap::new();
    if differing.contains(&true) {
        service.store().for_each(|name, commit_index| {
            let bucket = KeyBucket::of(KeyHash::of(name.tenant, name.key.as_bytes()));
            if differing[bucket.index()] {
                here.entry(bucket).or_default().push((name, commit_index));
            }
        });
    }
    for (bucket, _) in differing.into_iter().enumerate().filter(|(_, differs)| *differs) {
        found.differing_buckets += 1;
        let Some(bucket) = KeyBucket::new(bucket) else { continue };
        settle_bucket(service, bucket, here.remove(&bucket).unwrap_or_default(), &mut found).await?;
    }
    let end = Command::EndAnnouncement { node, incarnation, lost: Vec::new(), last: true };
    catalog.propose(end).await?;
    found.kept = service.store().len() as u64;
    found.elapsed_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::info!(?found, index = index.0, "the catalog and this node agree on what is here");
    Ok(found)
}

/// One digest per key bucket of what is here and known to be complete, as the catalog computes its own; and which buckets
/// have sealed replicas, about which the catalog must be asked whatever their digest.
fn digests(service: &NodeService) -> (KeyDigests, Vec<bool>) {
    let (mut digests, mut undecided) = (KeyDigests::default(), vec![false; KEY_BUCKETS]);
    service.store().for_each(|name, commit_index| {
        let hash = KeyHash::of(name.tenant, name.key.as_bytes());
        if commit_index > 0 {
            digests.toggle(hash, name.version, name.replica);
        } else {
            undecided[KeyBucket::of(hash).index()] = true;
        }
    });
    (digests, undecided)
}

async fn settle_bucket(
    service: &NodeService,
    bucket: KeyBucket,
    here: Vec<(store::ReplicaName, u64)>,
    found: &mut Reconciled,
) -> Result<(), CatalogError> {
    let catalog = service.catalog().await?;
    let (node, incarnation) = service.identity();
    let mut theirs: HashMap<ReplicaId, HeldReplica> = HashMap::new();
    let mut after = None;
    loop {
        let query = Query::Bucket { node, bucket, after, limit: MAX_PAGE_ITEMS };
        let (_, answer) = catalog.query(query, Read::Linearizable).await?;
        let Answer::Bucket(page) = answer else { return Ok(()) };
        theirs.extend(page.replicas.into_iter().map(|held| (held.replica, held)));
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    let mut unknown: Vec<store::ReplicaName> = Vec::new();
    for (name, commit_index) in here {
        match theirs.remove(&name.replica) {
            Some(held) if commit_index == 0 => {
                // The put won while nobody was there to hear it.
                service.store().complete(&name, held.commit_index.0);
                found.completed += 1;
            }
            Some(_) => {}
            // A put of this life is on its way: its own answer decides.
            None if name.replica.incarnation == incarnation => {}
            None => unknown.push(name),
        }
    }
    for names in unknown.chunks(BATCH) {
        let item = |name: &store::ReplicaName| AbandonItem {
            tenant: name.tenant,
            key: name.key.clone(),
            replica: name.replica,
        };
        let (_, outcome) = catalog.propose(Command::Abandon(names.iter().map(item).collect())).await?;
        let Outcome::Abandon(outcomes) = outcome else { return Ok(()) };
        for (name, outcome) in names.iter().zip(outcomes) {
            match outcome {
                AbandonOutcome::Abandoned => {
                    service.store().free(name.tenant, &name.key, name.replica);
                    found.freed += 1;
                }
                AbandonOutcome::Completed { commit_index, .. } => {
                    service.store().complete(name, commit_index.0);
                    found.completed += 1;
                }
            }
        }
    }
    // What the catalog lists of this life is on its way into the store; of older lives it is gone.
    let lost: Vec<ReplicaName> = theirs
        .into_values()
        .filter(|held| held.replica.incarnation != incarnation)
        .map(|held| ReplicaName { tenant: held.tenant, key: held.key, replica: held.replica })
        .collect();
    found.lost += lost.len() as u64;
    for lost in lost.chunks(BATCH) {
        catalog.propose(Command::EndAnnouncement { node, incarnation, lost: lost.to_vec(), last: false }).await?;
    }
    Ok(())
}
