//! Starting and stopping the parts of a node, in one order and its reverse.
//!
//! 1. DRAM segment and NVMe tier are opened (found, locked, checked).
//! 2. The store starts, and the three phases of recovery begin.
//! 3. The catalog's group starts beside them: reads by (key, version) do not wait for it.
//! 4. When both are there: the node registers this life, follows its free list, and reconciles.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tidepool_metadata::catalog::{
    Command, ForgetMode, NodeAddresses, NodeOutcome, NodeRegistration, Outcome, TierDescription,
};
use tidepool_metadata::{ErrorKind, NodeId, TierKind};
use tidepool_replication::{CatalogHandle, ClusterId, Forgotten, Group, GroupConfig};
use tidepool_tiers::memory::{MemoryConfig, MemoryTier};
use tidepool_tiers::nvme::{NvmeConfig, NvmeTier, WritePolicy};
use tidepool_tiers::store::{Forget, ForgetAnswer, ReplicaName};
use tidepool_tiers::{StoreConfig, TieredStore};
use tokio::task::JoinHandle;

use super::{NodeService, free_list, reconcile};
use crate::error::Error;
use crate::folder::DataFolder;

/// How long the pause before a failed reconciliation is tried again.
const RECONCILE_PAUSE: Duration = Duration::from_millis(500);

/// What a node is built from.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The DRAM tier.
    pub memory: MemoryConfig,
    /// The NVMe tier, if there is one.
    pub nvme: Option<NvmeConfig>,
    /// The store above them.
    pub store: StoreConfig,
    /// Where the catalog's log and image lie.
    pub catalog_folder: PathBuf,
    /// When a logged change counts as done.
    pub durability: tidepool_replication::Durability,
    /// Largest object that is taken, in bytes.
    pub max_object_bytes: u64,
}

/// A running node.
pub struct Node {
    service: NodeService,
    group: Group,
    tasks: Vec<JoinHandle<()>>,
}

/// Carries the store's proposals to the catalog, once there is one.
#[derive(Default)]
struct CatalogForget {
    catalog: OnceLock<CatalogHandle>,
}

impl Forget for CatalogForget {
    fn forget(&self, replicas: Vec<ReplicaName>) -> BoxFuture<'_, Vec<ForgetAnswer>> {
        async move {
            let count = replicas.len();
            let Some(catalog) = self.catalog.get() else { return vec![ForgetAnswer::Unanswered; count] };
            let names = replicas.into_iter().map(|name| (name.tenant, name.key, name.version, name.replica)).collect();
            match catalog.forget(names, ForgetMode::EvenLast).await {
                Ok(answers) if answers.len() == count => answers.into_iter().map(answer).collect(),
                Ok(_) | Err(_) => vec![ForgetAnswer::Unanswered; count],
            }
        }
        .boxed()
    }
}

fn answer(forgotten: Forgotten) -> ForgetAnswer {
    match forgotten {
        Forgotten::Yes => ForgetAnswer::Forgotten,
        Forgotten::Leased | Forgotten::Pinned | Forgotten::StillNeeded => ForgetAnswer::Refused,
    }
}

impl Node {
    /// Starts the node of `folder`. Serves reads by version as soon as this returns; everything else too, as far as
    /// recovery has come.
    ///
    /// # Errors
    /// What keeps a tier or the catalog from being opened, with what to do about it.
    pub async fn start(config: NodeConfig, folder: &DataFolder) -> Result<Self, Error> {
        let NodeConfig { memory, nvme, store, catalog_folder, durability, max_object_bytes } = config;
        let mut tiers = vec![TierDescription { kind: TierKind::Dram, capacity_bytes: memory.capacity_bytes }];
        let capacity = nvme.as_ref().map(|nvme| nvme.capacity_bytes);
        tiers.extend(capacity.map(|capacity_bytes| TierDescription { kind: TierKind::Nvme, capacity_bytes }));
        let node = folder.node();
        let group = GroupConfig { folder: catalog_folder, cluster: ClusterId(folder.cluster()), node, durability };
        let group = tokio::task::spawn_blocking(move || Group::start(group));
        let opened = tokio::task::spawn_blocking(move || open_tiers(memory, nvme, node)).await;
        let (memory, recovered, nvme) = opened.map_err(|panic| fault(&panic.to_string()))??;
        let forget = Arc::new(CatalogForget::default());
        let store = TieredStore::start(store, memory, recovered, nvme, Arc::clone(&forget) as Arc<dyn Forget>);
        let recovering = store.clone();
        let recovery = tokio::spawn(async move {
            if let Err(error) = recovering.recover().await {
                tracing::error!(%error, "the NVMe tier could not be scanned: what is only there is not served");
            }
        });
        let (group, catalog) = group.await.map_err(|panic| fault(&panic.to_string()))?.map_err(Error::from)?;
        let _first = forget.catalog.set(catalog.clone());
        let service = NodeService::new(folder.node(), folder.incarnation(), store, catalog, max_object_bytes);
        register(&service, tiers).await?;
        let announcing = service.clone();
        let tasks = vec![
            tokio::spawn(free_list::run(service.clone())),
            tokio::spawn(async move {
                let _recovered = recovery.await;
                announce(announcing).await;
            }),
        ];
        Ok(Self { service, group, tasks })
    }

    /// What callers use.
    #[must_use]
    pub fn service(&self) -> &NodeService {
        &self.service
    }

    /// Stops everything in reverse order: heat and NVMe tier are persisted, the catalog's image is flushed.
    pub async fn shutdown(self) {
        for task in self.tasks {
            task.abort();
        }
        if let Err(error) = self.service.store().shutdown().await {
            tracing::error!(%error, "close the NVMe tier");
        }
        self.group.shutdown().await;
    }
}

type Tiers = (Arc<MemoryTier>, Vec<tidepool_tiers::memory::RecoveredSlice>, Option<(Arc<NvmeTier>, WritePolicy)>);

fn open_tiers(memory: MemoryConfig, nvme: Option<NvmeConfig>, node: NodeId) -> Result<Tiers, Error> {
    let (memory, recovered) = MemoryTier::open(&memory).map_err(|error| unusable("DRAM_UNUSABLE", &error))?;
    let open = |config: NvmeConfig| {
        let writes = config.write_policy;
        NvmeTier::open(config, node).map(|tier| (tier, writes))
    };
    let nvme = nvme.map(open).transpose().map_err(|error| unusable("NVME_UNUSABLE", &error))?;
    Ok((memory, recovered, nvme))
}

fn unusable(reason: &'static str, error: &dyn std::error::Error) -> Error {
    Error::new(ErrorKind::Invalid, reason, error.to_string())
}

fn fault(what: &str) -> Error {
    Error::new(ErrorKind::Internal, "INTERNAL", what.to_owned())
}

async fn register(service: &NodeService, tiers: Vec<TierDescription>) -> Result<(), Error> {
    let (node, incarnation) = service.identity();
    let registration = NodeRegistration { node, incarnation, addresses: NodeAddresses::default(), tiers };
    let (_, outcome) = service.catalog().propose(Command::RegisterNode(registration)).await?;
    match outcome {
        Outcome::Node(NodeOutcome::Accepted { .. }) => Ok(()),
        Outcome::Node(NodeOutcome::Stale { current }) => {
            let message = format!(
                "the catalog knows life {} of node {node}, this is {}: the data folder is a copy or was restored; \
                 start with an empty one",
                current.0, incarnation.0
            );
            Err(Error::new(ErrorKind::Conflict, "STALE_NODE", message))
        }
        _ => Err(fault("the catalog refused to register the node")),
    }
}

/// Reconciles until it succeeds: without it, what is here stays unconfirmed.
async fn announce(service: NodeService) {
    loop {
        match reconcile::run(&service).await {
            Ok(_) => return,
            Err(error) if error.is_final() => return,
            Err(error) => {
                tracing::warn!(%error, "reconciliation with the catalog is tried again");
                tokio::time::sleep(RECONCILE_PAUSE).await;
            }
        }
    }
}
