//! Quotas of tenants, looked at before bytes move.
//!
//! What a tenant may store, the catalog decides when a put completes, exactly, over all nodes. Here a put that would be refused then
//! is refused before it takes room, and a full tenant makes room of its own: objects of its that lie on this node go, those
//! that are not in DRAM before those that are, older before newer. Puts under way on this node count as if they were stored
//! ([`QuotaHold`]); those on other nodes are unknown until they complete
//! (`docs/src/decisions/quotas.md`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_metadata::catalog::{ForgetMode, HeldReplica, Room};
use tidepool_metadata::{ObjectKey, TenantId};
use tidepool_replication::{Forgotten, Read};
use tidepool_tiers::store::ReplicaName;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{NodeService, error};
use crate::error::Error;

/// How long a full tenant's put waits until older objects have gone.
const WAIT: Duration = Duration::from_millis(100);
/// Objects among which those are chosen that go, a quarter of them.
const LOOKED_AT: usize = 1024;
/// How often as many more are looked at, where none of them lies here.
const LOOKS: usize = 16;
/// Most that go at a time.
const GOING: usize = 64;
/// Most of these whose end is asked for again at a time.
const SETTLING: usize = 64;

/// Of tenants with a quota.
pub(super) struct Quotas {
    /// What puts under way will add.
    held: Mutex<HashMap<TenantId, Room>>,
    /// Where the last look for objects that may go ended.
    hands: Mutex<HashMap<TenantId, ObjectKey>>,
    /// Asks again whose forgetting had no answer.
    settling: Arc<Semaphore>,
}

impl Default for Quotas {
    fn default() -> Self {
        Self { held: Mutex::default(), hands: Mutex::default(), settling: Arc::new(Semaphore::new(SETTLING)) }
    }
}

/// A put's part of its tenant's quota, until it is dropped.
pub(super) struct QuotaHold {
    service: NodeService,
    tenant: TenantId,
    bytes: u64,
}

impl Drop for QuotaHold {
    fn drop(&mut self) {
        let mut held = self.service.inner.quotas.held.lock();
        if let Some(room) = held.get_mut(&self.tenant) {
            room.objects -= 1;
            room.bytes -= self.bytes;
            if room.objects == 0 {
                held.remove(&self.tenant);
            }
        }
    }
}

impl NodeService {
    /// Takes one object of so many bytes, all copies together, from the tenant's quota; `None` if it has none.
    ///
    /// # Errors
    /// `QUOTA_EXCEEDED` after a bounded wait; those of the catalog.
    pub(super) async fn hold_quota(&self, tenant: TenantId, bytes: u64) -> Result<Option<QuotaHold>, Error> {
        let catalog = self.catalog().await?;
        let mut room = catalog.quota_room(tenant, Read::Local).await?;
        if room.whole == Room::UNLIMITED {
            return Ok(None);
        }
        let end = Instant::now() + WAIT;
        loop {
            if let Some(hold) = self.try_hold(tenant, bytes, room.left) {
                return Ok(Some(hold));
            }
            // What this node knows may be old: others may have removed something, or the quota is another now.
            room = catalog.quota_room(tenant, Read::Linearizable).await?;
            if let Some(hold) = self.try_hold(tenant, bytes, room.left) {
                return Ok(Some(hold));
            }
            let is_hopeless = room.whole.objects == 0 || bytes > room.whole.bytes;
            if is_hopeless || Instant::now() >= end || !self.evict_own(tenant).await? {
                return Err(error::quota_exceeded());
            }
        }
    }

    fn try_hold(&self, tenant: TenantId, bytes: u64, room: Room) -> Option<QuotaHold> {
        let mut held = self.inner.quotas.held.lock();
        let before = held.get(&tenant).copied().unwrap_or_default();
        let after = Room { objects: before.objects + 1, bytes: before.bytes.checked_add(bytes)? };
        (after.objects <= room.objects && after.bytes <= room.bytes).then(|| {
            held.insert(tenant, after);
            QuotaHold { service: self.clone(), tenant, bytes }
        })
    }

    /// Has some of the tenant's objects here go, the coldest of those that come next by key and may; answers whether any did.
    async fn evict_own(&self, tenant: TenantId) -> Result<bool, Error> {
        let mut coldest = self.next_of(tenant).await?;
        let is_in_dram = |held: &HeldReplica| self.inner.store.is_in_dram(tenant, &held.key, held.version);
        let is_pinned = |held: &HeldReplica| self.inner.store.is_softly_pinned(tenant, &held.key, held.version);
        coldest.sort_by_cached_key(|held| (is_pinned(held), is_in_dram(held), held.commit_index));
        let name = |held: &HeldReplica| (held.tenant, held.key.clone(), held.version, held.replica);
        // The first of them may all be leased or pinned.
        for going in coldest.chunks(coldest.len().div_ceil(4).clamp(1, GOING)) {
            let names = going.iter().map(name).collect();
            let has_gone = match self.catalog().await?.forget(names, ForgetMode::EvenLast).await {
                Ok(forgotten) => self.free_forgotten(going, forgotten),
                Err(error) if error.is_unproposed() => return Err(error.into()),
                // They may be forgotten all the same: nobody else frees them.
                Err(error) => {
                    // More of them are found by the comparison of digests.
                    if let Ok(permit) = Arc::clone(&self.inner.quotas.settling).try_acquire_owned() {
                        let (service, going) = (self.clone(), going.to_vec());
                        tokio::spawn(async move {
                            let _permit = permit;
                            service.settle_forgotten(going).await;
                        });
                    }
                    return Err(error.into());
                }
            };
            if has_gone {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Frees those that count no more; whether there are any.
    fn free_forgotten(&self, held: &[HeldReplica], forgotten: Vec<Forgotten>) -> bool {
        let gone = held.iter().zip(forgotten).filter(|(_, forgotten)| *forgotten == Forgotten::Yes);
        gone.map(|(held, _)| {
            let HeldReplica { tenant, key, version, replica, .. } = held.clone();
            self.free(&ReplicaName { tenant, key, version, replica });
        })
        .count()
            > 0
    }

    /// Asks until there is an answer.
    async fn settle_forgotten(&self, held: Vec<HeldReplica>) {
        let mut pause = WAIT;
        loop {
            tokio::time::sleep(pause).await;
            let names = held.iter().map(|held| (held.tenant, held.key.clone(), held.version, held.replica)).collect();
            match async { self.catalog().await?.forget(names, ForgetMode::EvenLast).await }.await {
                Ok(forgotten) => {
                    self.free_forgotten(&held, forgotten);
                    return;
                }
                Err(error) if error.is_final() => return,
                Err(_) => pause = (pause * 2).min(Duration::from_secs(2)),
            }
        }
    }

    /// Copies of the tenant's here, from where the last look ended on.
    async fn next_of(&self, tenant: TenantId) -> Result<Vec<HeldReplica>, Error> {
        let mut after = self.inner.quotas.hands.lock().remove(&tenant);
        let (catalog, node) = (self.catalog().await?, self.inner.node);
        let mut found = Vec::new();
        for _ in 0..LOOKS {
            let page = catalog.held_of(node, tenant, after.as_ref(), LOOKED_AT).await?;
            // At the end it begins again.
            after = page.next.map(|(_, next)| next);
            found = page.replicas;
            if !found.is_empty() {
                break;
            }
        }
        if let Some(next) = after {
            self.inner.quotas.hands.lock().insert(tenant, next);
        }
        Ok(found)
    }
}
