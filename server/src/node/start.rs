//! Starting and stopping the parts of a node, in one order and its reverse.
//!
//! 1. DRAM segment and NVMe tier are opened (found, locked, checked).
//! 2. The store starts, and the three phases of recovery begin. From here on reads by (key, version) are served.
//! 3. Beside them the catalog's group is opened, and the node registers this life: all else is served.
//! 4. When both are there: the node follows its free list, and reconciles.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tidepool_metadata::catalog::{
    Command, Copies, ForgetMode, Labels, NodeAddresses, NodeOutcome, NodeRegistration, Outcome, Setting,
    TierDescription,
};
use tidepool_metadata::{ErrorKind, NodeId, TierKind};
use tidepool_replication::replicas::placement::Policy;
use tidepool_replication::{
    CatalogError, CatalogHandle, ClusterEpoch, ClusterId, Forgotten, Formation, Group, GroupConfig, Transport,
};
use tidepool_tiers::memory::{MemoryConfig, MemoryTier, RecoveredSlices};
use tidepool_tiers::nvme::{NvmeConfig, NvmeTier, WritePolicy};
use tidepool_tiers::store::{Forget, ForgetAnswer, ReplicaName};
use tidepool_tiers::{StoreConfig, TieredStore};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{
    HotConfig, NodeService, Remotes, RepairConfig, beats, copies, directory, free_list, liveness, rebuild, reconcile,
    sessions,
};
use crate::error::Error;
use crate::folder::DataFolder;
use crate::peers::removed;

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
    /// When a logged change counts as done.
    pub durability: tidepool_replication::Durability,
    /// How the catalog's leader reads.
    pub reads: tidepool_replication::LeaderReads,
    /// Largest object that is taken, in bytes.
    pub max_object_bytes: u64,
    /// How many voters the catalog's group is to have.
    pub voters: usize,
    /// How many copies an object is to have whose put does not say.
    pub copies: Copies,
    /// Which nodes take them.
    pub placement: Policy,
    /// How copies are kept at their number.
    pub repair: RepairConfig,
    /// Which objects get further copies because they are read much.
    pub hot: HotConfig,
    /// Where this node stands.
    pub labels: Labels,
}

/// What connects a node to the others.
pub struct Membership {
    /// What becomes of a folder without a catalog.
    pub formation: Formation,
    /// Where messages leave.
    pub transport: Arc<dyn Transport>,
    /// Where others reach this node.
    pub addresses: NodeAddresses,
    /// Reads of what they hold.
    pub remotes: Remotes,
}

/// A running node.
pub struct Node {
    service: NodeService,
    joining: JoinHandle<Option<Joined>>,
    outcome: watch::Receiver<Option<Result<(), Error>>>,
}

/// What runs once the catalog is there.
struct Joined {
    group: Group,
    tasks: Vec<JoinHandle<()>>,
}

/// Carries the store's proposals to the catalog, once there is one.
#[derive(Default)]
struct CatalogForget {
    catalog: OnceLock<CatalogHandle>,
}

impl CatalogForget {
    async fn ask(&self, replicas: Vec<ReplicaName>, mode: ForgetMode) -> Vec<ForgetAnswer> {
        let count = replicas.len();
        let Some(catalog) = self.catalog.get() else { return vec![ForgetAnswer::Unanswered; count] };
        let names = replicas.into_iter().map(|name| (name.tenant, name.key, name.version, name.replica)).collect();
        match catalog.forget(names, mode).await {
            Ok(answers) if answers.len() == count => answers.into_iter().map(answer).collect(),
            Ok(_) | Err(_) => vec![ForgetAnswer::Unanswered; count],
        }
    }
}

impl Forget for CatalogForget {
    fn forget(&self, replicas: Vec<ReplicaName>) -> BoxFuture<'_, Vec<ForgetAnswer>> {
        self.ask(replicas, ForgetMode::EvenLast).boxed()
    }

    fn forget_further(&self, replicas: Vec<ReplicaName>) -> BoxFuture<'_, Vec<ForgetAnswer>> {
        self.ask(replicas, ForgetMode::SurplusOnly).boxed()
    }

    fn lost(&self, replicas: Vec<ReplicaName>) -> BoxFuture<'_, bool> {
        async move {
            let Some(catalog) = self.catalog.get() else { return false };
            let here = replicas.first().map(|name| name.replica.node);
            let names = replicas.into_iter().map(|name| (name.tenant, name.key, name.version, name.replica)).collect();
            let is_told = catalog.forget(names, ForgetMode::Lost).await.is_ok();
            if let Some(here) = here.filter(|_| is_told) {
                tokio::spawn(copies::tell_of_loss(catalog.clone(), here));
            }
            is_told
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
    /// Starts the node of `folder`. When this returns, reads by version are served as far as recovery has come; all
    /// else answers `STARTING` until the catalog is open ([`Node::ready`]).
    ///
    /// # Errors
    /// What keeps a tier from being opened, with what to do about it; a catalog that is gone.
    pub async fn start(config: NodeConfig, folder: Arc<DataFolder>, membership: Membership) -> Result<Self, Error> {
        let NodeConfig {
            memory,
            nvme,
            store,
            durability,
            reads,
            max_object_bytes,
            voters,
            copies,
            placement,
            repair,
            hot,
            labels,
        } = config;
        let Membership { formation, transport, addresses, remotes } = membership;
        let mut tiers = vec![TierDescription { kind: TierKind::Dram, capacity_bytes: memory.capacity_bytes }];
        let capacity = nvme.as_ref().map(|nvme| nvme.capacity_bytes);
        tiers.extend(capacity.map(|capacity_bytes| TierDescription { kind: TierKind::Nvme, capacity_bytes }));
        let (node, incarnation) = (folder.node(), folder.incarnation());
        let registration = NodeRegistration { node, incarnation, addresses, tiers, labels };
        let (cluster, epoch) = (ClusterId(folder.cluster()), ClusterEpoch(folder.epoch()?));
        let group =
            GroupConfig { folder: folder.catalog(), formation, cluster, epoch, node, durability, reads, voters };
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
        let service = NodeService::new(node, incarnation, store, max_object_bytes, remotes, (copies, placement), hot);
        let (sender, outcome) = watch::channel(None);
        let join = Join { service: service.clone(), folder, forget, registration, transport, recovery, repair };
        let joining = tokio::spawn(async move {
            let joined = join.run(group).await;
            let (joined, outcome) = match joined {
                Ok(joined) => (Some(joined), Ok(())),
                Err(error) => (None, Err(error)),
            };
            // Nobody may be left who waits.
            let _gone = sender.send(Some(outcome));
            joined
        });
        Ok(Self { service, joining, outcome })
    }

    /// Waits until the catalog is open and knows of this life. Cancel-safe.
    ///
    /// # Errors
    /// What keeps it from being opened, with what to do about it: the node can't go on.
    pub async fn ready(&self) -> Result<(), Error> {
        let mut outcome = self.outcome.clone();
        match outcome.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or(Ok(())),
            Err(_) => Err(fault("the task that opens the catalog has died")),
        }
    }

    /// What callers use.
    #[must_use]
    pub fn service(&self) -> &NodeService {
        &self.service
    }

    /// Hands leadership over, if this node has it, so that the others need no election. Bounded by a second.
    pub async fn step_down(&self) {
        if let Some(catalog) = self.service.opened_catalog() {
            liveness::hand_over(catalog).await;
        }
    }

    /// Stops everything in reverse order: heat and NVMe tier are persisted, the catalog's image is flushed.
    pub async fn shutdown(self) {
        // A catalog that is still being opened can't be left: the folder would stay locked.
        let joined = self.joining.await.unwrap_or_default();
        if let Some(joined) = &joined {
            joined.tasks.iter().for_each(JoinHandle::abort);
        }
        if let Err(error) = self.service.store().shutdown().await {
            tracing::error!(%error, "close the NVMe tier");
        }
        if let Some(joined) = joined {
            joined.group.shutdown().await;
        }
    }
}

/// Brings node and catalog together.
struct Join {
    service: NodeService,
    folder: Arc<DataFolder>,
    forget: Arc<CatalogForget>,
    registration: NodeRegistration,
    transport: Arc<dyn Transport>,
    recovery: JoinHandle<()>,
    repair: RepairConfig,
}

impl Join {
    async fn run(self, group: GroupConfig) -> Result<Joined, Error> {
        let Self { service, folder, forget, registration, transport, recovery, repair } = self;
        let group = tokio::task::spawn_blocking(move || Group::start_with(group, transport)).await;
        let (group, catalog) = match group.map_err(|panic| fault(&panic.to_string()))? {
            Err(error) if error.reason() == "MUST_REJOIN" => {
                let aside = folder.leave_catalog()?;
                let message = format!("{error}; the old catalog is set aside in {}: start again", aside.display());
                return Err(Error::new(ErrorKind::Conflict, "MUST_REJOIN", message));
            }
            opened => opened.map_err(Error::from)?,
        };
        // From here on messages of other members are heard: without them nothing is answered.
        let _first = service.inner.opened.set(catalog.clone());
        if folder.is_rebuild() {
            answered(&catalog, Command::SetSetting(Setting::Rebuilding(true))).await?;
        }
        folder.note_catalog()?;
        register(&catalog, registration).await?;
        let _first = (forget.catalog.set(catalog.clone()), service.inner.catalog.set(catalog.clone()));
        let answering = service.clone();
        catalog.answer_nodes_with(Box::new(move |words| {
            let service = answering.clone();
            Box::pin(async move { Some(service.answer_node(&words).await) })
        }));
        let (announcing, leasing) = (service.clone(), catalog.clone());
        let (rebuilt, here) = (catalog.clone(), service.inner.node);
        let tasks = vec![
            tokio::spawn(async move { leasing.stream_leases().await }),
            tokio::spawn(beats::run(service.clone(), catalog.clone())),
            tokio::spawn(free_list::run(service.clone(), catalog.clone())),
            tokio::spawn(copies::repair::run(service.clone(), catalog.clone(), repair)),
            tokio::spawn(copies::hot::run(service.clone(), catalog.clone(), repair.bytes_per_second)),
            tokio::spawn(copies::tasks::run(service, catalog.clone(), repair)),
            tokio::spawn(sessions::sweep(catalog.clone())),
            tokio::spawn(liveness::watch(catalog.clone(), repair.grace)),
            tokio::spawn(rebuild::end_in_time(rebuilt, folder, here)),
            tokio::spawn(async move {
                if let Err(error) = rebuild::announce_early(&announcing, &recovery).await {
                    tracing::info!(%error, "what is here is announced once all of it is found");
                }
                let _recovered = recovery.await;
                announce(&announcing).await;
                // Not before: what was removed while nobody was here may still be in the segment.
                directory::keep_valid(announcing, catalog).await;
            }),
        ];
        Ok(Joined { group, tasks })
    }
}

type Tiers = (Arc<MemoryTier>, RecoveredSlices, Option<(Arc<NvmeTier>, WritePolicy)>);

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

/// Proposes until there is an answer: a group without a quorum gets one when its other nodes are there. Only for commands
/// that may be applied twice.
async fn answered(catalog: &CatalogHandle, command: Command) -> Result<Outcome, CatalogError> {
    loop {
        match catalog.propose(command.clone()).await {
            Ok((_, outcome)) => return Ok(outcome),
            Err(error) if error.retry_after().is_some() || matches!(error, CatalogError::OutcomeUnknown) => {
                tracing::info!(%error, "the catalog does not answer yet");
                tokio::time::sleep(RECONCILE_PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

async fn register(catalog: &CatalogHandle, registration: NodeRegistration) -> Result<(), Error> {
    let (node, incarnation) = (registration.node, registration.incarnation);
    match answered(catalog, Command::RegisterNode(registration)).await? {
        Outcome::Node(NodeOutcome::Accepted { .. }) => Ok(()),
        Outcome::Node(NodeOutcome::Stale { current }) => {
            let message = format!(
                "the catalog knows life {} of node {node}, this is {}: the data folder is a copy or was restored; \
                 start with an empty one",
                current.0, incarnation.0
            );
            Err(Error::new(ErrorKind::Conflict, "STALE_NODE", message))
        }
        Outcome::Node(NodeOutcome::Expelled) => Err(removed(node)),
        _ => Err(fault("the catalog refused to register the node")),
    }
}

/// Reconciles until it succeeds: without it, what is here stays unconfirmed.
async fn announce(service: &NodeService) {
    loop {
        match reconcile::run(service).await {
            Ok(found) => {
                service.inner.reconciled.get_or_init(|| found);
                return;
            }
            Err(error) if error.is_final() => return,
            Err(error) => {
                tracing::warn!(%error, "reconciliation with the catalog is tried again");
                tokio::time::sleep(RECONCILE_PAUSE).await;
            }
        }
    }
}
