//! Keeps the objects that this node holds at the number of copies that they are to have.
//!
//! When a node comes, goes or is to be emptied, and now and then without a reason, the node goes through what it holds, what
//! was read lately first, and does its part of each object's plan ([`tidepool_replication::replicas::repair`]): it has other
//! nodes pull copies from here, and lets go of its own where there are too many. Copies on a node that has been away for less
//! than the grace period are waited for, but those of objects that are being read.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use serde::{Deserialize, Serialize};
use tidepool_metadata::catalog::{ForgetMode, Located, NodeStat, NodeState, ObjectLocation, ReplicaLocation};
use tidepool_metadata::{Durability, Incarnation, KeyHash, NodeId, TenantId};
use tidepool_replication::replicas::placement::{self, Candidate, Policy};
use tidepool_replication::replicas::repair::{Step, plan};
use tidepool_replication::{CatalogHandle, Forgotten, Read};
use tidepool_tiers::store::ReplicaName;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::hot::HotReport;
use super::pull::{MOST_AT_A_TIME, MOST_PULLS};
use crate::error::Error;
use crate::node::{NodeService, get};
use crate::peers::wire::{Pull, Pulls};

/// How often nodes are looked at.
const PERIOD: Duration = Duration::from_millis(100);
/// How long after the last one a sweep that found something to do is repeated, longer each time that nothing came of it; and one
/// that found nothing.
const AGAIN_AFTER: Duration = Duration::from_secs(2);
const SWEEP_AFTER: Duration = Duration::from_secs(60);
/// Objects that are looked at together.
const STEP: usize = 256;
/// Messages that are answered at a time, and the bytes from which on the next object has another one.
const AT_A_TIME: usize = 4;
const MESSAGE_BYTES: u64 = 16 << 20;
/// With a limit one message at a time is out, of so much of a second's bytes, and its copies are made one after the other: what
/// others wait for is short.
const LIMITED_SHARE: u64 = 32;

/// How repair behaves.
#[derive(Clone, Copy, Debug)]
pub struct RepairConfig {
    /// How long a node may be away before its copies are made anew elsewhere.
    pub grace: Duration,
    /// Most bytes a second that this node gives away for repair; 0: as fast as it goes.
    pub bytes_per_second: u64,
}

/// What repair has done in this life.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairReport {
    /// It goes through what is here.
    pub sweeping: bool,
    /// Objects that this sweep, or the last one, has looked at.
    pub examined: u64,
    /// Copies that other nodes were made to pull, and their bytes.
    pub copied: u64,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Copies that were too many here.
    pub trimmed: u64,
    /// Copies that could not be made; they are tried again.
    pub failed: u64,
    /// Copies of puts that this node began to get while their bytes arrived at another one.
    pub fetched: u64,
    /// Further copies of objects that are read much.
    pub hot: HotReport,
}

/// What repair and the node's other parts tell each other.
#[derive(Default)]
pub(in crate::node) struct Repairs {
    sweeping: AtomicBool,
    examined: AtomicU64,
    copied: AtomicU64,
    copied_bytes: AtomicU64,
    trimmed: AtomicU64,
    failed: AtomicU64,
    fetched: AtomicU64,
    /// This node is to be emptied.
    draining: AtomicBool,
    /// A put has fewer copies than it is to have.
    wanted: Notify,
}

impl Repairs {
    pub(in crate::node) fn want(&self) {
        self.wanted.notify_one();
    }

    pub(in crate::node) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    pub(super) fn count_fetched(&self) {
        self.fetched.fetch_add(1, Ordering::Relaxed);
    }

    fn report(&self, hot: HotReport) -> RepairReport {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        RepairReport {
            sweeping: self.sweeping.load(Ordering::Relaxed),
            examined: load(&self.examined),
            copied: load(&self.copied),
            copied_bytes: load(&self.copied_bytes),
            trimmed: load(&self.trimmed),
            failed: load(&self.failed),
            fetched: load(&self.fetched),
            hot,
        }
    }
}

impl NodeService {
    /// What repair has done.
    #[must_use]
    pub fn repair_report(&self) -> RepairReport {
        self.inner.repairs.report(self.inner.hot.report())
    }
}

/// What of the nodes a sweep depends on.
type View = Vec<(NodeId, Incarnation, NodeState, bool)>;

fn view(nodes: &[NodeStat]) -> View {
    nodes.iter().map(|node| (node.node, node.incarnation, node.state, node.announcing)).collect()
}

/// The cluster during one sweep.
struct Sweep<'a> {
    service: &'a NodeService,
    catalog: &'a CatalogHandle,
    view: &'a View,
    /// Nodes that are away and may come back.
    awaited: Vec<NodeId>,
    /// This node is to be emptied: it is not done before nothing is here, whoever has to act first.
    is_draining: bool,
    pace: &'a Pace,
}

/// An object of which copies are to be made.
struct Making {
    pull: Pull,
    /// Who may pull one and was not asked yet, best first.
    order: VecDeque<NodeId>,
    missing: usize,
}

/// What one node is asked to pull at once.
struct Message {
    node: NodeId,
    /// Places in a list of makings.
    places: Vec<usize>,
    bytes: u64,
}

/// Who is asked for what next: as many nodes for each object as it misses copies. In the objects' order, as far as messages
/// are of several.
fn messages(makings: &mut [Making], most_bytes: u64) -> Vec<Message> {
    let mut messages = Vec::new();
    let mut open: HashMap<NodeId, Message> = HashMap::new();
    for (place, making) in makings.iter_mut().enumerate() {
        for node in making.order.drain(..making.missing.min(making.order.len())) {
            let message = open.entry(node).or_insert_with(|| Message { node, places: Vec::new(), bytes: 0 });
            message.places.push(place);
            message.bytes += making.pull.length;
            if message.places.len() == MOST_PULLS || message.bytes >= most_bytes {
                messages.extend(open.remove(&node));
            }
        }
    }
    messages.extend(open.into_values());
    messages
}

/// Runs until the catalog stops.
pub(in crate::node) async fn run(service: NodeService, catalog: CatalogHandle, config: RepairConfig) {
    let repairs = &service.inner.repairs;
    let pace = Pace::new(config.bytes_per_second);
    let mut period = tokio::time::interval(PERIOD);
    let mut absent: HashMap<NodeId, Instant> = HashMap::new();
    let mut swept: Option<(View, Vec<NodeId>)> = None;
    let (mut due, mut pause) = (Instant::now(), AGAIN_AFTER);
    loop {
        let is_wanted = tokio::select! {
            _ = period.tick() => false,
            () = repairs.wanted.notified() => true,
        };
        if catalog.status().failure.is_some() {
            return;
        }
        let Ok(nodes) = service.nodes().await else { continue };
        let view = view(&nodes);
        let here = nodes.iter().find(|node| node.node == service.inner.node);
        let is_draining = here.is_some_and(|here| here.state == NodeState::Draining);
        repairs.draining.store(is_draining, Ordering::Release);
        let awaited = awaited(&nodes, &mut absent, config.grace);
        let is_news = swept.as_ref().is_none_or(|before| (&before.0, &before.1) != (&view, &awaited));
        if is_wanted {
            due = due.min(Instant::now() + AGAIN_AFTER);
        }
        // Alone there is nothing to do, and nobody to do it with.
        if nodes.len() < 2 || !(is_news || Instant::now() >= due) || here.is_none_or(|here| here.announcing) {
            continue;
        }
        let awaits = awaited.clone();
        let sweep =
            Sweep { service: &service, catalog: &catalog, view: &view, awaited: awaits, is_draining, pace: &pace };
        repairs.sweeping.store(true, Ordering::Relaxed);
        let done = || repairs.copied.load(Ordering::Relaxed) + repairs.trimmed.load(Ordering::Relaxed);
        let before = done();
        let is_quiet = sweep.run().await;
        // What can't be done, such as a copy above a quota, costs bytes each time that it is tried.
        pause = if done() > before || is_news { AGAIN_AFTER } else { (pause * 2).min(SWEEP_AFTER) };
        repairs.sweeping.store(false, Ordering::Relaxed);
        swept = Some((view, awaited));
        // After news others act too: a copy that one of them makes when this sweep has passed by may be one too many here.
        due = Instant::now() + if is_quiet && !is_news { SWEEP_AFTER } else { pause };
    }
}

/// The nodes that are away for less than `grace`.
pub(super) fn awaited(nodes: &[NodeStat], absent: &mut HashMap<NodeId, Instant>, grace: Duration) -> Vec<NodeId> {
    let is_absent = |node: &&NodeStat| node.state == NodeState::Absent;
    absent.retain(|node, _| nodes.iter().filter(is_absent).any(|known| known.node == *node));
    let away = nodes.iter().filter(is_absent).map(|known| known.node);
    away.filter(|&node| absent.entry(node).or_insert_with(Instant::now).elapsed() < grace).collect()
}

impl Sweep<'_> {
    /// Goes through all that is here, unless the nodes change meanwhile; false if there was something to do, done or not.
    async fn run(&self) -> bool {
        let (store, repairs) = (&self.service.inner.store, &self.service.inner.repairs);
        repairs.examined.store(0, Ordering::Relaxed);
        let mut is_quiet = true;
        for ids in store.by_heat().chunks(STEP) {
            // Anew for each part: what is given to a node fills it.
            let candidates = match self.service.nodes().await {
                Ok(nodes) if view(&nodes) == *self.view => self.service.candidates(&nodes),
                Ok(_) | Err(_) => return false,
            };
            let held = store.held(ids);
            // What is not complete here yet, after a restart or of a put under way, is not judged yet.
            is_quiet &= held.len() == ids.len() && (!self.is_draining || held.is_empty());
            repairs.examined.fetch_add(held.len() as u64, Ordering::Relaxed);
            let mut tenants: HashMap<TenantId, Vec<(ReplicaName, bool)>> = HashMap::new();
            for (name, is_read) in held {
                tenants.entry(name.tenant).or_default().push((name, is_read));
            }
            for (tenant, held) in tenants {
                is_quiet &= self.step(tenant, held, &candidates).await.unwrap_or(false);
            }
            // What is asked of the node meanwhile has its turn.
            tokio::task::yield_now().await;
        }
        is_quiet
    }

    async fn step(
        &self,
        tenant: TenantId,
        held: Vec<(ReplicaName, bool)>,
        candidates: &[Candidate],
    ) -> Result<bool, Error> {
        let keys = held.iter().map(|(name, _)| name.key.clone()).collect();
        let (_, located) = self.catalog.locate(tenant, keys, None, Read::Local).await?;
        let (mut makings, mut surplus, mut is_quiet) = (Vec::new(), Vec::new(), true);
        for ((name, is_read), located) in held.into_iter().zip(located) {
            // What this node's catalog does not know yet, or knows already to be gone, is looked at again.
            let location = match located {
                Located::Found(location) if location.version == name.version => location,
                _ => {
                    is_quiet = false;
                    continue;
                }
            };
            let is_away = |copy: &ReplicaLocation| copy.node_state == NodeState::Absent;
            let mut away = location.replicas.iter().filter(|copy| is_away(copy)).map(|copy| copy.replica.node);
            let is_patient = !is_read && away.all(|node| self.awaited.contains(&node));
            match plan(&location, self.service.inner.node, candidates, is_patient) {
                Step::Nothing => {}
                // Who wants copies near has them near.
                Step::Move(_) if self.service.inner.placement == Policy::LocalFirst => {}
                Step::Move(targets) => {
                    let mut making = self.making(&name, &location, candidates, 1);
                    making.order.retain(|node| targets.contains(node));
                    makings.push(making);
                }
                Step::Copy(count) => makings.push(self.making(&name, &location, candidates, count)),
                Step::Trim if !self.is_draining && self.service.inner.hot.keeps(&name, &location, candidates.len()) => {
                }
                Step::Trim => surplus.push(name),
            }
        }
        is_quiet &= makings.is_empty() && surplus.is_empty();
        self.make(makings).await;
        self.trim(surplus).await?;
        Ok(is_quiet)
    }

    fn making(
        &self,
        name: &ReplicaName,
        location: &ObjectLocation,
        candidates: &[Candidate],
        missing: usize,
    ) -> Making {
        let numbers = placement::numbers(KeyHash::of(name.tenant, name.key.as_bytes()).0);
        let order = placement::order(candidates, &holders(location), self.service.inner.placement, numbers).into();
        Making { pull: pull_of(name, location, self.service.inner.node), order, missing }
    }

    /// Has other nodes pull what is missing, by messages about many objects. Where one fails, the next in the object's order is
    /// asked.
    async fn make(&self, mut makings: Vec<Making>) {
        let repairs = &self.service.inner.repairs;
        let (messages_at_a_time, at_a_time) = if self.pace.is_limited() { (1, 1) } else { (AT_A_TIME, MOST_AT_A_TIME) };
        loop {
            let messages = messages(&mut makings, self.pace.message_bytes());
            if messages.is_empty() {
                break;
            }
            let pulls = |places: &[usize]| places.iter().map(|&place| makings[place].pull.clone()).collect();
            let asked = messages.into_iter().map(|Message { node, places, bytes }| {
                let pulls = Pulls { pulls: pulls(&places), at_a_time, further: false };
                async move {
                    self.pace.wait(bytes).await;
                    (node, places, self.service.pulled_there(node, pulls, bytes).await)
                }
            });
            let asked: Vec<_> = futures::stream::iter(asked).buffer_unordered(messages_at_a_time).collect().await;
            for (node, places, copies) in asked {
                for (place, copy) in places.into_iter().zip(copies) {
                    let Making { pull, missing, .. } = &mut makings[place];
                    match copy {
                        Ok(_) => {
                            *missing -= 1;
                            repairs.copied.fetch_add(1, Ordering::Relaxed);
                            repairs.copied_bytes.fetch_add(pull.length, Ordering::Relaxed);
                        }
                        Err(error) => tracing::debug!(key = ?pull.key, %node, %error, "a copy could not be made"),
                    }
                }
            }
        }
        let failed: usize = makings.iter().map(|making| making.missing).sum();
        repairs.failed.fetch_add(failed as u64, Ordering::Relaxed);
    }

    /// Lets go of what is too much here, as far as the catalog agrees.
    async fn trim(&self, surplus: Vec<ReplicaName>) -> Result<(), Error> {
        if surplus.is_empty() {
            return Ok(());
        }
        let names = surplus.iter().map(|name| (name.tenant, name.key.clone(), name.version, name.replica)).collect();
        let answers = self.catalog.forget(names, ForgetMode::SurplusOnly).await?;
        for (name, answer) in surplus.iter().zip(answers) {
            if answer == Forgotten::Yes {
                self.service.free(name);
                self.service.inner.repairs.trimmed.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

fn holders(location: &ObjectLocation) -> Vec<NodeId> {
    location.replicas.iter().map(|copy| copy.replica.node).collect()
}

pub(super) fn pull_of(name: &ReplicaName, location: &ObjectLocation, source: NodeId) -> Pull {
    let durable_on_nvme = location.replicas.iter().any(|copy| copy.durability == Durability::Nvme);
    Pull {
        tenant: name.tenant.0,
        key: name.key.as_bytes().to_vec().into(),
        version: Some(name.version.into()),
        length: location.length,
        data_type: location.data_type as u32,
        checksum: get::whole_checksum(location),
        durable_on_nvme,
        source: source.0,
        commit_index: location.commit_index.0,
        soft_pin_milliseconds: 0,
    }
}

/// Spreads bytes over time.
struct Pace {
    bytes_per_second: u64,
    /// When the next bytes may go.
    next: tokio::sync::Mutex<Instant>,
}

impl Pace {
    fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, next: tokio::sync::Mutex::new(Instant::now()) }
    }

    fn is_limited(&self) -> bool {
        self.bytes_per_second > 0
    }

    fn message_bytes(&self) -> u64 {
        if self.is_limited() { (self.bytes_per_second / LIMITED_SHARE).clamp(1, MESSAGE_BYTES) } else { MESSAGE_BYTES }
    }

    async fn wait(&self, bytes: u64) {
        if !self.is_limited() {
            return;
        }
        let mut next = self.next.lock().await;
        tokio::time::sleep_until(*next).await;
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        *next = Instant::now() + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
    }
}
