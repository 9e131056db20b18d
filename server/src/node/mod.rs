//! The node: one service through which every protocol reserves, writes, completes and reads.
//!
//! gRPC, the engine's messages and admin are thin adapters of [`NodeService`]; no type of theirs appears here.
//! Whoever receives a put is its coordinator. The service reaches the catalog through one handle and the bytes
//! through one store; it holds no state of its own but counters of ids.
//!
//! Order of a put: reserve (DRAM, a version id, a replica id), write, seal, propose *complete*, and on the committed
//! answer show or free the bytes. Once sealed, a put goes on without its caller: bytes are freed only after a
//! committed answer, refused or abandoned (protocol: put).

mod batch;
mod beats;
mod copies;
mod directory;
mod error;
mod free_list;
mod get;
mod guests;
mod liveness;
mod manage;
mod put;
mod quota;
mod rebuild;
mod reconcile;
mod remote;
mod removal;
mod sessions;
mod start;
pub(crate) mod tasks;
mod types;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidepool_metadata::catalog::Copies;
use tidepool_metadata::{Incarnation, NodeId, ReplicaId, TenantId, VersionId};
use tidepool_replication::replicas::placement::Policy;
use tidepool_replication::{CatalogError, CatalogHandle};
use tidepool_tiers::TieredStore;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SetOnce};

use crate::error::Error;

pub(crate) use batch::{FilledBatch, ReservedBatch};
pub(crate) use beats::{NodeLoad, TierUse};
pub use copies::hot::{HotConfig, HotReport};
pub use copies::repair::{RepairConfig, RepairReport};
pub(crate) use error::unknown_tenant;
pub use get::ObjectReader;
pub(crate) use get::Opened;
pub(crate) use liveness::SUSPECT_AFTER;
pub use manage::{NodeInfo, ObjectReport};
pub use put::{Reservation, Reserve};
pub use rebuild::RebuildStatus;
pub use reconcile::Reconciled;
pub use remote::Remotes;
pub use sessions::RequestIds;
pub use start::{Membership, Node, NodeConfig};
pub use tasks::TaskWish;
pub use types::{
    Existence, Freshness, KeyFilter, ListPage, ListedObject, MatchPage, ObjectDescription, ObjectName, ObjectStat,
    PutDone, PutItem, PutOptions, PutOutcome, RangeRequest, RemoveOutcome, ReplicaStat, Value,
};

/// How long a call waits for a catalog that is being opened.
const START_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a proposal may take before its outcome counts as unknown.
const PROPOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Lease of a caller that does not say how long.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(5);

/// All that a node does for its callers. Cheap to clone.
#[derive(Clone)]
pub struct NodeService {
    inner: Arc<Inner>,
}

struct Inner {
    node: NodeId,
    incarnation: Incarnation,
    store: TieredStore,
    /// Once the group is open, for the messages of other members.
    opened: OnceLock<CatalogHandle>,
    /// Once the group is open and knows of this life.
    catalog: SetOnce<CatalogHandle>,
    /// Counts reservations of this incarnation: version and replica ids.
    sequence: AtomicU64,
    max_object_bytes: u64,
    /// Reads of what other nodes hold.
    remotes: Remotes,
    /// Copies that a catalog that is being rebuilt took over from here.
    adopted: AtomicU64,
    /// How the last reconciliation ended, once one did.
    reconciled: OnceLock<Reconciled>,
    /// How many copies an object is to have whose put does not say.
    copies: Copies,
    /// Which nodes take them.
    placement: Policy,
    /// Copies here of puts under way on other nodes.
    pulled: copies::Pulled,
    /// Objects whose bytes arrive here, and those that are got from where they arrive.
    arrivals: copies::Arrivals,
    fetched: copies::Fetched,
    /// For what a put starts from a thread of a connection.
    runtime: Handle,
    repairs: copies::repair::Repairs,
    hot: copies::hot::Hot,
    beats: beats::Beats,
    quotas: quota::Quotas,
    /// Room for what clients acknowledge.
    acknowledgements: Arc<Semaphore>,
}

impl NodeService {
    fn new(
        node: NodeId,
        incarnation: Incarnation,
        store: TieredStore,
        max: u64,
        remotes: Remotes,
        (copies, placement): (Copies, Policy),
        hot: HotConfig,
    ) -> Self {
        let sequence = AtomicU64::new(1);
        let (opened, catalog, reconciled) = (OnceLock::new(), SetOnce::new(), OnceLock::new());
        Self {
            inner: Arc::new(Inner {
                node,
                incarnation,
                store,
                opened,
                catalog,
                sequence,
                max_object_bytes: max,
                remotes,
                adopted: AtomicU64::new(0),
                reconciled,
                copies,
                placement,
                pulled: copies::Pulled::default(),
                arrivals: copies::Arrivals::default(),
                fetched: copies::Fetched::default(),
                runtime: Handle::current(),
                repairs: copies::repair::Repairs::default(),
                hot: copies::hot::Hot::new(hot),
                beats: beats::Beats::default(),
                quotas: quota::Quotas::default(),
                acknowledgements: Arc::new(Semaphore::new(sessions::ACKNOWLEDGEMENTS)),
            }),
        }
    }

    /// The number of the tenant called `name`; empty is the default one.
    ///
    /// # Errors
    /// `UNKNOWN_TENANT`.
    pub async fn tenant(&self, name: &str) -> Result<TenantId, Error> {
        if name.is_empty() || name == "default" {
            return Ok(TenantId::DEFAULT);
        }
        self.catalog().await?.tenant(name).await?.ok_or_else(|| unknown_tenant(name))
    }

    /// The runtime on which the service works.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.inner.runtime
    }

    /// The store under the service, for reports.
    #[must_use]
    pub fn store(&self) -> &TieredStore {
        &self.inner.store
    }

    /// The catalog; waits while its group is being opened.
    ///
    /// # Errors
    /// [`CatalogError::Starting`] after 5 s.
    pub async fn catalog(&self) -> Result<&CatalogHandle, CatalogError> {
        match self.inner.catalog.get() {
            Some(catalog) => Ok(catalog),
            None => {
                tokio::time::timeout(START_TIMEOUT, self.inner.catalog.wait()).await.or(Err(CatalogError::Starting))
            }
        }
    }

    /// The catalog, for what needs a leader.
    ///
    /// # Errors
    /// As [`NodeService::catalog`]; [`CatalogError::NotLeader`] at once if there was none for longer than an election takes:
    /// another node may have one.
    pub(crate) async fn led_catalog(&self) -> Result<&CatalogHandle, CatalogError> {
        let catalog = self.catalog().await?;
        if catalog.is_cut_off() { Err(CatalogError::NotLeader { leader: None }) } else { Ok(catalog) }
    }

    /// The catalog as soon as its group is open, for those who are members of it; it may not answer yet.
    #[must_use]
    pub fn opened_catalog(&self) -> Option<&CatalogHandle> {
        self.inner.opened.get()
    }

    /// How node and catalog came to agree on what is here; `None` while they have not.
    #[must_use]
    pub fn reconciled(&self) -> Option<&Reconciled> {
        self.inner.reconciled.get()
    }

    /// This node's number and life.
    #[must_use]
    pub fn identity(&self) -> (NodeId, Incarnation) {
        (self.inner.node, self.inner.incarnation)
    }

    /// Largest object that is taken, in bytes.
    #[must_use]
    pub fn max_object_bytes(&self) -> u64 {
        self.inner.max_object_bytes
    }

    fn next_ids(&self) -> (VersionId, ReplicaId) {
        let Inner { node, incarnation, .. } = *self.inner;
        let sequence = self.inner.sequence.fetch_add(1, Ordering::Relaxed);
        (VersionId { node, incarnation, sequence }, ReplicaId { node, incarnation, sequence })
    }
}
