//! A port here and a port of the peer as a link: lanes, and who drives them.
//!
//! A caller that waits takes a free lane and drives it itself. Everything else goes through the queue, which one worker
//! empties over a lane of its own: posting work costs little, the devices do the rest.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::device::RdmaDevice;
use super::handshake::PeerPort;
use super::lane::{Connected, Lane};
use super::memory_region::DeviceRegion;
use crate::batch::{BatchState, Group};
use crate::error::Failure;
use crate::peer::Segment;
use crate::rails::Trouble;
use crate::region::Region;
use crate::schedule::Priority;
use crate::settings::Settings;
use crate::slice::Direction;
use crate::transport::{Limits, Link, TransportKind};
use crate::wire::Greeting;

/// Pieces in a group: small neighbours share work requests.
const GROUP_PIECES: usize = 128;
/// A worker without work ends after this.
const WORKER_IDLE: Duration = Duration::from_secs(10);

/// What the lanes of a link share.
pub(super) struct Shared {
    pub(super) device: Arc<RdmaDevice>,
    pub(super) port: u8,
    pub(super) peer_port: PeerPort,
    /// Where the peer's engine listens, what is said to it, and who has to answer.
    pub(super) address: String,
    pub(super) greeting: Greeting,
    pub(super) instance: u128,
    pub(super) settings: Arc<Settings>,
    name: String,
    queue: Mutex<Queue>,
    work: Condvar,
    closed: AtomicBool,
}

#[derive(Default)]
struct Queue {
    latency: VecDeque<Group>,
    bulk: VecDeque<Group>,
    has_worker: bool,
}

impl Queue {
    /// The one that gives the next group: latency before bulk.
    fn first(&mut self) -> &mut VecDeque<Group> {
        if self.latency.is_empty() { &mut self.bulk } else { &mut self.latency }
    }

    fn is_empty(&self) -> bool {
        self.latency.is_empty() && self.bulk.is_empty()
    }
}

/// See the module.
pub(super) struct RdmaLink {
    shared: Arc<Shared>,
    /// The first is the worker's.
    lanes: Arc<[Mutex<Lane>]>,
}

/// Where a lane's groups come from.
pub(super) enum Source<'a> {
    /// A caller's own: those that it came with, then those of its batch that are first in the queue.
    Own(VecDeque<Group>, &'a BatchState),
    /// The link's queue.
    Queue,
}

impl Source<'_> {
    pub(super) fn next(&mut self, shared: &Shared) -> Option<Group> {
        match self {
            Self::Own(groups, batch) => groups.pop_front().or_else(|| {
                let mut queue = shared.queue.lock();
                let first = queue.first();
                let is_own = first.front().is_some_and(|group| std::ptr::eq(Arc::as_ptr(&group.batch), *batch));
                if is_own { first.pop_front() } else { None }
            }),
            Self::Queue => shared.queue.lock().first().pop_front(),
        }
    }

    /// Ends those that wait and whose batch was stopped, and hands back those that are overdue.
    pub(super) fn purge(&mut self, shared: &Shared, now: Instant) {
        let is_due = |group: &Group| {
            group.batch.stop_reason(now).is_some() || group.overdue_at().is_some_and(|overdue| overdue <= now)
        };
        for mut group in self.take(shared, is_due) {
            if let Some(reason) = group.batch.stop_reason(now) {
                group.finish(Err(reason));
            } else if group.is_overdue(now) {
                group.hand_back_for(Trouble::Overdue { is_silent: false });
            } else {
                self.put_back(shared, group);
            }
        }
    }

    /// The rail rests: what waits for it is better off elsewhere.
    pub(super) fn hand_back(&mut self, shared: &Shared) {
        for group in self.take(shared, |_| true) {
            group.hand_back_for(Trouble::Innocent);
        }
    }

    fn take(&mut self, shared: &Shared, wanted: impl Fn(&Group) -> bool) -> Vec<Group> {
        match self {
            Self::Own(groups, _) => take(groups, wanted),
            Self::Queue => shared.take_queued(wanted),
        }
    }

    fn put_back(&mut self, shared: &Shared, group: Group) {
        match self {
            Self::Own(groups, _) => groups.push_back(group),
            Self::Queue => shared.queue(vec![group]),
        }
    }
}

fn take(groups: &mut VecDeque<Group>, wanted: impl Fn(&Group) -> bool) -> Vec<Group> {
    if !groups.iter().any(&wanted) {
        return Vec::new();
    }
    let (taken, rest): (Vec<_>, Vec<_>) = std::mem::take(groups).into_iter().partition(wanted);
    groups.extend(rest);
    taken
}

impl Shared {
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn queue(&self, groups: Vec<Group>) {
        let mut queue = self.queue.lock();
        for group in groups {
            let is_urgent = group.batch.priority == Priority::Latency;
            if is_urgent { queue.latency.push_back(group) } else { queue.bulk.push_back(group) }
        }
    }

    fn take_queued(&self, wanted: impl Fn(&Group) -> bool) -> Vec<Group> {
        let mut queue = self.queue.lock();
        let mut taken = take(&mut queue.latency, &wanted);
        taken.extend(take(&mut queue.bulk, &wanted));
        taken
    }
}

/// Who a link leads to.
pub(super) struct Target {
    pub(super) address: String,
    pub(super) greeting: Greeting,
    pub(super) instance: u128,
    pub(super) port: PeerPort,
}

impl RdmaLink {
    /// A link from a port here to one of the peer; connects when it is used.
    pub(super) fn new(device: &Arc<RdmaDevice>, port: u8, target: Target, settings: &Arc<Settings>) -> Self {
        let Target { address, greeting, instance, port: peer_port } = target;
        // Two more than callers: the worker's, and one that a probe may take.
        let lanes = (0..=settings.lanes).map(|_| Mutex::default()).collect();
        let name = format!("{}/{port} to {}/{}", device.context.name(), peer_port.device, peer_port.port);
        let shared = Shared {
            device: Arc::clone(device),
            port,
            peer_port,
            address,
            greeting,
            instance,
            settings: Arc::clone(settings),
            name,
            queue: Mutex::default(),
            work: Condvar::new(),
            closed: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared), lanes }
    }

    /// Makes sure that somebody empties the queue.
    fn call_worker(&self) {
        let mut queue = self.shared.queue.lock();
        if queue.has_worker {
            self.shared.work.notify_one();
            return;
        }
        let (shared, lanes) = (Arc::downgrade(&self.shared), Arc::clone(&self.lanes));
        let spawned =
            std::thread::Builder::new().name("tidepool-queue-pair".into()).spawn(move || work(&shared, &lanes));
        match spawned {
            Ok(_) => queue.has_worker = true,
            Err(error) => {
                tracing::warn!(%error, "no thread for a queue pair");
                drop(queue);
                let groups = self.shared.take_queued(|_| true);
                groups.into_iter().for_each(|group| group.hand_back(Failure::System));
            }
        }
    }
}

impl Link for RdmaLink {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn name(&self) -> &str {
        &self.shared.name
    }

    fn bandwidth(&self) -> Option<f64> {
        let speed = self.shared.device.port(self.shared.port).map_or(0, |(now, _)| now.speed);
        let speed = speed.min(self.shared.peer_port.speed);
        (speed > 0).then_some(speed as f64 / 8.0)
    }

    fn limits(&self) -> Limits {
        let piece_bytes = self.shared.settings.rdma.piece_bytes;
        Limits { piece_bytes, group_pieces: GROUP_PIECES, group_bytes: piece_bytes }
    }

    fn reaches(&self, local: Option<&Region>, segment: &Segment, _: Direction) -> bool {
        let shared = &self.shared;
        segment.rdma_keys.has(shared.peer_port.device.into())
            && local
                .is_none_or(|region| DeviceRegion::of(region, shared.device.index).is_some_and(DeviceRegion::is_usable))
    }

    fn post(&self, groups: Vec<Group>) {
        self.shared.queue(groups);
        if self.shared.is_closed() {
            // Looked at after they were queued: either `close` took them, or this does.
            let groups = self.shared.take_queued(|_| true);
            return groups.into_iter().for_each(|group| group.finish(Err(Failure::Closed)));
        }
        self.call_worker();
    }

    fn carry(&self, groups: Vec<Group>, batch: &BatchState) {
        match self.lanes.iter().skip(1).find_map(Mutex::try_lock) {
            Some(mut lane) => lane.run(&self.shared, &mut Source::Own(groups.into(), batch)),
            None => self.post(groups),
        }
    }

    fn probe(&self, deadline: Instant) -> Result<(), Failure> {
        let mut connected = Connected::open(&self.shared, deadline)?;
        connected.check(deadline)?;
        // Good, and up already: whoever comes next has it.
        if let Some(mut lane) = self.lanes.iter().skip(1).find_map(Mutex::try_lock) {
            lane.adopt(connected);
        }
        Ok(())
    }

    fn close(&self) {
        self.shared.closed.store(true, Ordering::Release);
        let groups = self.shared.take_queued(|_| true);
        self.shared.work.notify_all();
        groups.into_iter().for_each(|group| group.finish(Err(Failure::Closed)));
        // Those that somebody drives see it at their next look.
        for mut lane in self.lanes.iter().filter_map(Mutex::try_lock) {
            *lane = Lane::default();
        }
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        self.close();
    }
}

/// A worker's life.
fn work(shared: &Weak<Shared>, lanes: &[Mutex<Lane>]) {
    let mut idle_since = Instant::now();
    while let Some(shared) = shared.upgrade() {
        let mut queue = shared.queue.lock();
        if queue.is_empty() {
            if shared.is_closed() || idle_since.elapsed() >= WORKER_IDLE {
                queue.has_worker = false;
                return;
            }
            // Woken now and then to see whether the link is still there.
            shared.work.wait_for(&mut queue, Duration::from_secs(1));
            continue;
        }
        drop(queue);
        lanes[0].lock().run(&shared, &mut Source::Queue);
        idle_since = Instant::now();
    }
}
