//! The lanes to one peer, and who drives them.
//!
//! A caller that waits takes a free lane and carries its own groups over it. Everything else goes through the queue,
//! which workers empty: threads that start when there is something to do, and end when there has been nothing for a
//! while. A lane that its driver left before it was idle is finished by a worker too.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::lane::{Lane, Source};
use crate::batch::{BatchState, Group};
use crate::error::Failure;
use crate::peer::Segment;
use crate::rails::Trouble;
use crate::region::Region;
use crate::schedule::Priority;
use crate::settings::Settings;
use crate::slice::Direction;
use crate::stream::{ConnectError, Stream, TICK, connect_tcp_while, greet_while};
use crate::transport::{Limits, Link, TransportKind};
use crate::wire::{self, Greeting};

/// Pieces in a group: enough that one system call moves 512 KiB of 4 KiB pieces.
const GROUP_PIECES: usize = 128;
/// Believed of a connection before the first.
const CONNECT_MICROS: u64 = 20_000;
/// A worker without work ends after this.
const WORKER_IDLE: Duration = Duration::from_secs(10);
/// Queued bytes for which one worker is enough.
const BYTES_PER_WORKER: u64 = 16 << 20;

/// What lanes and workers share.
pub(crate) struct Shared {
    pub(crate) address: String,
    pub(crate) settings: Arc<Settings>,
    /// What this engine says of itself.
    greeting: Greeting,
    /// Who has to answer; another instance is another engine, with other memory.
    instance: u128,
    queue: Mutex<Queue>,
    work: Condvar,
    /// A connection that a probe made, for the first lane that needs one.
    spare: Mutex<Option<Connected>>,
    connect_micros: AtomicU64,
    closed: AtomicBool,
}

/// A data connection to the peer, and what the peer calls it.
pub(crate) struct Connected {
    pub(crate) stream: Stream,
    pub(crate) number: u64,
}

#[derive(Default)]
struct Queue {
    latency: VecDeque<Group>,
    bulk: VecDeque<Group>,
    bytes: u64,
    /// Lanes that were left busy.
    orphans: usize,
    workers: usize,
    idle_workers: usize,
}

impl Shared {
    /// A data connection to the peer.
    pub(crate) fn connect(
        &self,
        deadline: Instant,
        still: &mut dyn FnMut() -> bool,
    ) -> Result<Connected, ConnectError> {
        if let Some(spare) = self.spare.lock().take() {
            return Ok(spare);
        }
        let begun = Instant::now();
        let settings = &self.settings;
        let tls = settings.tls.as_ref();
        let stream = connect_tcp_while(&self.address, tls, deadline, settings.socket_buffer_bytes, still)?;
        let welcome = greet_while(&stream, &self.greeting, deadline, still)?;
        if welcome.instance != self.instance {
            return Err(Failure::Restarted.into());
        }
        let took = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.connect_micros.fetch_min(took, Ordering::Relaxed);
        Ok(Connected { stream, number: welcome.connection })
    }

    /// How long a connection takes at best: a lost packet, which takes a second to repeat, is not waited for.
    pub(crate) fn usual_connect(&self) -> Duration {
        Duration::from_micros(self.connect_micros.load(Ordering::Relaxed)).min(self.settings.connect_timeout)
    }

    fn queue(&self, groups: Vec<Group>) {
        let mut queue = self.queue.lock();
        if self.is_closed() {
            drop(queue);
            return groups.into_iter().for_each(|group| group.finish(Err(Failure::Closed)));
        }
        for group in groups {
            queue.push(group);
        }
        drop(queue);
        self.work.notify_one();
    }

    /// Ends queued groups whose batch was stopped, and hands back those that are overdue.
    fn purge(&self, now: Instant) {
        for group in self.take_queued(|group| group.batch.stop_reason(now).is_some()) {
            let reason = group.batch.stop_reason(now).unwrap_or(Failure::Cancelled);
            group.finish(Err(reason));
        }
        // Asked with the queue unlocked: the answer is the schedule's.
        for mut group in self.take_queued(|group| group.overdue_at().is_some_and(|overdue| overdue <= now)) {
            if group.is_overdue(now) {
                group.hand_back_for(Trouble::Overdue { is_silent: false });
            } else {
                self.queue(vec![group]);
            }
        }
    }

    /// The rail rests: what waits for it is better off elsewhere.
    pub(crate) fn hand_back_queued(&self) {
        for group in self.take_queued(|group| group.placement.is_some()) {
            group.hand_back_for(Trouble::Innocent);
        }
    }

    fn take_queued(&self, mut wanted: impl FnMut(&Group) -> bool) -> Vec<Group> {
        let mut guard = self.queue.lock();
        let queue = &mut *guard;
        let mut taken = Vec::new();
        for groups in [&mut queue.latency, &mut queue.bulk] {
            if groups.iter().any(&mut wanted) {
                let (out, rest) = std::mem::take(groups).into_iter().partition::<VecDeque<_>, _>(&mut wanted);
                *groups = rest;
                taken.extend(out);
            }
        }
        queue.bytes -= taken.iter().map(|group| group.bytes).sum::<u64>();
        taken
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

impl Queue {
    fn push(&mut self, group: Group) {
        self.bytes += group.bytes;
        let groups = if group.batch.priority == Priority::Latency { &mut self.latency } else { &mut self.bulk };
        groups.push_back(group);
    }

    /// The next group, if `fits` says so: latency before bulk.
    fn pop(&mut self, fits: impl Fn(&Group) -> bool) -> Option<Group> {
        let groups = if self.latency.is_empty() { &mut self.bulk } else { &mut self.latency };
        let group = if groups.front().is_some_and(fits) { groups.pop_front() } else { None }?;
        self.bytes -= group.bytes;
        Some(group)
    }

    fn is_empty(&self) -> bool {
        self.latency.is_empty() && self.bulk.is_empty()
    }
}

/// See the module.
pub(crate) struct TcpLink {
    shared: Arc<Shared>,
    lanes: Arc<[Mutex<Lane>]>,
}

thread_local! {
    /// Lane that a calling thread looks at first: always the same, so that the same thread at the peer serves it, with
    /// warm caches. Threads differ.
    static FIRST_LANE: usize = {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        THREADS.fetch_add(1, Ordering::Relaxed)
    };
}

impl TcpLink {
    /// A link to the engine `instance` at `address`; connects when it is used.
    pub(crate) fn new(address: String, settings: Arc<Settings>, greeting: Greeting, instance: u128) -> Self {
        let lanes = (0..settings.lanes).map(|_| Mutex::new(Lane::default())).collect();
        let shared = Shared {
            address,
            settings,
            greeting,
            instance,
            queue: Mutex::default(),
            work: Condvar::new(),
            spare: Mutex::default(),
            connect_micros: AtomicU64::new(CONNECT_MICROS),
            closed: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared), lanes }
    }

    /// Makes sure that somebody empties the queue.
    fn call_worker(&self) {
        let mut queue = self.shared.queue.lock();
        let needed = 1 + usize::try_from(queue.bytes / BYTES_PER_WORKER).unwrap_or(usize::MAX);
        let busy = queue.workers - queue.idle_workers;
        if queue.idle_workers > 0 {
            self.shared.work.notify_one();
        } else if busy < needed.min(workers_max(self.lanes.len())) {
            let (shared, lanes) = (Arc::downgrade(&self.shared), Arc::clone(&self.lanes));
            let spawned =
                std::thread::Builder::new().name("tidepool-lanes".into()).spawn(move || work(&shared, &lanes));
            match spawned {
                Ok(_) => queue.workers += 1,
                Err(error) if queue.workers == 0 => {
                    // Nobody will come: end what is queued rather than keep it for ever.
                    tracing::warn!(%error, "no thread for a lane");
                    drop(queue);
                    let groups = self.shared.take_queued(|_| true);
                    groups.into_iter().for_each(|group| group.hand_back(Failure::System));
                }
                Err(_) => {}
            }
        }
    }
}

/// Threads that empty one link's queue: more than cores to run them don't help.
fn workers_max(lanes: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    lanes.min(cores.div_ceil(2))
}

impl Link for TcpLink {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn name(&self) -> &str {
        &self.shared.address
    }

    fn bandwidth(&self) -> Option<f64> {
        let address = self.shared.address.parse::<SocketAddr>().ok()?;
        crate::topology::bandwidth_towards(address.ip())
    }

    fn limits(&self) -> Limits {
        let piece_bytes = self.shared.settings.piece_bytes;
        Limits { piece_bytes, group_pieces: GROUP_PIECES, group_bytes: piece_bytes }
    }

    fn reaches(&self, _: Option<&Region>, _: &Segment, _: Direction) -> bool {
        true
    }

    fn post(&self, groups: Vec<Group>) {
        self.shared.queue(groups);
        self.call_worker();
    }

    fn carry(&self, groups: Vec<Group>, batch: &BatchState) {
        let Some(mut lane) = free_lane(&self.lanes, FIRST_LANE.with(|first| *first)) else {
            return self.post(groups);
        };
        let mut source = Own { groups: groups.into(), batch, shared: &self.shared };
        lane.run(&self.shared, &mut source);
        let is_busy = !lane.is_idle();
        drop(lane);
        debug_assert!(source.groups.is_empty(), "the driver left before its last group");
        // The batch was stopped: answers on their way are drained by a worker.
        if is_busy {
            self.shared.queue.lock().orphans += 1;
        }
        if is_busy || batch.is_open() {
            self.call_worker();
        }
    }

    fn probe(&self, deadline: Instant) -> Result<(), Failure> {
        let connected =
            self.shared.connect(deadline, &mut || !self.shared.is_closed()).map_err(|error| error.failure)?;
        if !self.shared.is_closed() {
            *self.shared.spare.lock() = Some(connected);
        }
        Ok(())
    }

    fn close(&self) {
        self.shared.closed.store(true, Ordering::Release);
        drop(self.shared.spare.lock().take());
        let groups = self.shared.take_queued(|_| true);
        self.shared.work.notify_all();
        // Who drives one of the others sees the end by itself.
        self.lanes.iter().filter_map(Mutex::try_lock).for_each(|mut lane| lane.close());
        groups.into_iter().for_each(|group| group.finish(Err(Failure::Closed)));
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.close();
    }
}

/// A caller's own groups: those that it came with, then those of its batch that are first in the queue.
struct Own<'a> {
    groups: VecDeque<Group>,
    batch: &'a BatchState,
    shared: &'a Shared,
}

impl Source for Own<'_> {
    fn next(&mut self, bytes: u64, is_idle: bool) -> Option<Group> {
        let fits = |group: &Group| is_idle || group.bytes <= bytes;
        if let Some(front) = self.groups.front() {
            return if fits(front) { self.groups.pop_front() } else { None };
        }
        let is_own = |group: &Group| std::ptr::eq(Arc::as_ptr(&group.batch), self.batch);
        self.shared.queue.lock().pop(|group| is_own(group) && fits(group))
    }

    fn is_done(&self) -> bool {
        !self.batch.is_open()
    }

    fn purge(&mut self, now: Instant) {
        if let Some(reason) = self.batch.stop_reason(now) {
            self.groups.drain(..).for_each(|group| group.finish(Err(reason)));
        }
    }
}

/// The link's queue.
struct Queued<'a>(&'a Shared);

impl Source for Queued<'_> {
    fn next(&mut self, bytes: u64, is_idle: bool) -> Option<Group> {
        self.0.queue.lock().pop(|group| is_idle || group.bytes <= bytes)
    }

    fn is_done(&self) -> bool {
        false
    }

    fn purge(&mut self, now: Instant) {
        self.0.purge(now);
    }
}

/// A lane that nobody drives: idle and connected before resting.
fn free_lane(lanes: &[Mutex<Lane>], first: usize) -> Option<MutexGuard<'_, Lane>> {
    let now = Instant::now();
    let mut second_best = None;
    for step in 0..lanes.len() {
        let Some(lane) = lanes[first.wrapping_add(step) % lanes.len()].try_lock() else { continue };
        if lane.is_idle() && !lane.rests(now) {
            return Some(lane);
        }
        second_best = second_best.or(Some(lane));
    }
    second_best
}

/// A worker's life.
fn work(shared: &Weak<Shared>, lanes: &[Mutex<Lane>]) {
    let mut idle_since = Instant::now();
    while let Some(shared) = shared.upgrade() {
        let mut queue = shared.queue.lock();
        if queue.is_empty() && queue.orphans == 0 {
            if shared.is_closed() || idle_since.elapsed() >= WORKER_IDLE {
                queue.workers -= 1;
                return;
            }
            queue.idle_workers += 1;
            // Woken now and then to see whether the link is still there.
            shared.work.wait_for(&mut queue, Duration::from_secs(1));
            queue.idle_workers -= 1;
            continue;
        }
        let has_orphans = std::mem::take(&mut queue.orphans) > 0;
        let is_queued = !queue.is_empty();
        drop(queue);
        if has_orphans {
            for lane in lanes {
                if let Some(mut lane) = lane.try_lock()
                    && !lane.is_idle()
                {
                    lane.run(&shared, &mut Queued(&shared));
                }
            }
        }
        if is_queued {
            match free_lane(lanes, 0).or_else(|| lanes[0].try_lock_for(TICK)) {
                Some(mut lane) => lane.run(&shared, &mut Queued(&shared)),
                // All taken, for long: others may not have to wait for these any more.
                None => shared.purge(Instant::now()),
            }
        }
        idle_since = Instant::now();
    }
}

/// What this engine says when it opens a data connection.
pub(crate) fn data_greeting(greeting: Greeting) -> Greeting {
    Greeting { purpose: wire::Purpose::Data, ..greeting }
}
