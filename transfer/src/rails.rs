//! The rails to one peer: which of them a group takes, and where it goes when one hands it back.
//!
//! ```text
//! group --submit, carry--> the best transport that has a healthy rail
//!            one rail of it: at once            several: `schedule` chooses, or lets it wait
//!                                  \              /
//!                                   link: post, carry --finish--> its request goes on or ends
//!                                             |
//!                                             +-- hand back: a healthy rail that has not failed it, best transport first
//!                                                            else one that rests, until another is healthy again
//!                                                            else a healthy one once more, or the same again if what
//!                                                            failed may pass: 3 times
//!                                                            else its pieces end with the failure
//! ```
//!
//! So each group fails once on each rail, a few times on the last one, leaves a few for their slowness, and ends. A rail that failed rests ([`crate::rail`]), and
//! is probed by `prober`.
//!
//! Groups that wait in the schedule have rails whose windows are full, so that some link holds groups and looks around for
//! them ([`Rails::look_around`]): one whose batch was stopped ends within a tick.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::batch::{BatchState, Group, MOVES_MAX, Placement};
use crate::error::Failure;
use crate::peer::Segment;
use crate::rail::Health;
use crate::region::Region;
pub(crate) use crate::schedule::RailIndex;
use crate::schedule::{BANDWIDTH_UNKNOWN, Schedule, Waiting, rails_of};
use crate::slice::Direction;
use crate::transport::{Limits, Link, TransportKind};

/// Most rails to a peer: a group remembers in a word which it has tried.
pub(crate) const RAILS_MAX: usize = 64;
/// How often a group is handed back, beyond once for each rail, before its failure counts.
const ATTEMPTS: u8 = 3;
/// While a probe is on its way, its end is looked for this often.
const PROBE_AGAIN: Duration = Duration::from_millis(50);
/// Groups that wait are looked at this often.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Why a rail gives a group back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The rail failed.
    Failed(Failure),
    /// The group is overdue and another rail would be quicker. Silent: the rail moved nothing at all.
    Overdue { is_silent: bool },
    /// What it shared the rail's connection with had to go: neither it nor the rail is to blame.
    Innocent,
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

struct Rail {
    link: Arc<dyn Link>,
    health: Mutex<Health>,
    moved_bytes: AtomicU64,
    failures: AtomicU64,
    /// Groups that left it for their slowness.
    overdue: AtomicU64,
}

/// One way to a peer.
#[derive(Clone, Debug, PartialEq)]
pub struct RailStatus {
    /// What carries it.
    pub transport: TransportKind,
    /// The peer's address, or a pair of devices.
    pub name: String,
    /// Why it rests; `None`: it is in use.
    pub rests: Option<Failure>,
    /// Believed bandwidth in bytes per second; learned only where a transport has several rails.
    pub bandwidth: f64,
    /// Bytes on their way, where a transport has several rails.
    pub in_flight_bytes: u64,
    /// Bytes moved.
    pub moved_bytes: u64,
    /// Groups of requests that it failed.
    pub failures: u64,
    /// Groups of requests that were given to another rail because it was slow or silent.
    pub overdue: u64,
}

/// See the module.
pub(crate) struct Rails {
    /// Best transport first.
    rails: Vec<Rail>,
    /// Nothing is probed any more.
    is_closed: AtomicBool,
    /// Rails of each transport, a bit each, best first.
    kinds: Vec<u64>,
    healthy: AtomicU64,
    schedule: Mutex<Schedule<Group>>,
    looked_at: Mutex<Instant>,
    /// Calls for a dispatch that were not followed yet: one thread follows them all, so that links that end groups within
    /// `post` don't pile up calls.
    dispatches: AtomicUsize,
}

/// What rails are given.
type Placements = Vec<(RailIndex, Vec<Group>)>;

impl Rails {
    /// Rails over these links; those of `unknown` are probed before they are used.
    pub(crate) fn new(links: Vec<Arc<dyn Link>>, unknown: Vec<Arc<dyn Link>>) -> Self {
        let now = Instant::now();
        let known = links.into_iter().map(|link| Rail::new(link, Health::default()));
        let unknown = unknown.into_iter().map(|link| Rail::new(link, Health::unknown(now)));
        let mut rails: Vec<_> = known.chain(unknown).take(RAILS_MAX).collect();
        rails.sort_by_key(|rail| rail.link.kind());
        let mut kinds: Vec<u64> = Vec::new();
        for (index, rail) in rails.iter().enumerate() {
            if index == 0 || rails[index - 1].link.kind() != rail.link.kind() {
                kinds.push(0);
            }
            if let Some(kind) = kinds.last_mut() {
                *kind |= 1 << index;
            }
        }
        let is_healthy = |(index, rail): (usize, &Rail)| u64::from(rail.health.lock().is_healthy()) << index;
        let healthy = rails.iter().enumerate().map(is_healthy).sum();
        let bandwidths = rails.iter().map(|rail| rail.link.bandwidth().unwrap_or(BANDWIDTH_UNKNOWN));
        Self {
            schedule: Mutex::new(Schedule::new(bandwidths)),
            rails,
            is_closed: AtomicBool::new(false),
            kinds,
            healthy: AtomicU64::new(healthy),
            looked_at: Mutex::new(now),
            dispatches: AtomicUsize::new(0),
        }
    }

    fn rail(&self, rail: RailIndex) -> &Rail {
        &self.rails[usize::from(rail)]
    }

    /// Rails that can move bytes between these two, a bit each; `kind` allows one transport only.
    pub(crate) fn reach(
        &self,
        local: Option<&Region>,
        segment: &Segment,
        direction: Direction,
        kind: Option<TransportKind>,
    ) -> u64 {
        let reaches = |rail: &Rail| {
            kind.is_none_or(|kind| kind == rail.link.kind()) && rail.link.reaches(local, segment, direction)
        };
        self.rails.iter().enumerate().map(|(index, rail)| u64::from(reaches(rail)) << index).sum()
    }

    /// The first of the rails that should be used, for its transport and its limits.
    pub(crate) fn first(&self, rails: u64) -> Option<RailIndex> {
        rails_of(self.usable(rails)).next()
    }

    /// Whether there is a rail of a kind.
    pub(crate) fn has(&self, kind: TransportKind) -> bool {
        self.rails.iter().any(|rail| rail.link.kind() == kind)
    }

    pub(crate) fn kind(&self, rail: RailIndex) -> TransportKind {
        self.rail(rail).link.kind()
    }

    pub(crate) fn limits(&self, rail: RailIndex) -> Limits {
        self.rail(rail).link.limits()
    }

    /// The healthy ones of the best transport that has any.
    fn best(&self, rails: u64) -> u64 {
        let healthy = rails & self.healthy.load(Ordering::Acquire);
        self.kinds.iter().map(|kind| kind & healthy).find(|rails| *rails != 0).unwrap_or(0)
    }

    /// Those, or if all rest, those of the best transport.
    fn usable(&self, rails: u64) -> u64 {
        match self.best(rails) {
            0 => self.kinds.iter().map(|kind| kind & rails).find(|rails| *rails != 0).unwrap_or(0),
            best => best,
        }
    }

    /// Whether the transport of these rails has no other that may take the same groups: nothing to choose then.
    fn is_alone(&self, usable: u64, rails: u64) -> bool {
        let kind = self.kinds.iter().find(|kind| *kind & usable != 0).copied().unwrap_or(0);
        (kind & rails).count_ones() == 1
    }

    /// Gives groups to rails.
    pub(crate) fn submit(&self, groups: Vec<Group>) {
        let placements = self.enter(groups);
        self.post(placements);
    }

    /// The same, and the calling thread lends itself to the rail that takes most.
    pub(crate) fn carry(&self, groups: Vec<Group>, batch: &BatchState) {
        let mut placements = self.enter(groups);
        let bytes = |groups: &[Group]| groups.iter().map(|group| group.bytes).sum::<u64>();
        let largest = (0..placements.len()).max_by_key(|place| bytes(&placements[*place].1));
        let Some(largest) = largest else { return };
        let (rail, own) = placements.swap_remove(largest);
        self.post(placements);
        self.rail(rail).link.carry(own, batch);
    }

    fn post(&self, placements: Placements) {
        for (rail, groups) in placements {
            self.rail(rail).link.post(groups);
        }
    }

    /// Finds rails for groups, or lets them wait in the schedule.
    fn enter(&self, mut groups: Vec<Group>) -> Placements {
        let first = groups.first().map_or(0, |group| group.may);
        let usable = self.usable(first);
        if groups.iter().all(|group| group.may == first) && self.is_alone(usable, first) {
            let rail = usable.trailing_zeros() as RailIndex;
            groups.iter_mut().for_each(|group| group.rail = rail);
            return vec![(rail, groups)];
        }
        let mut placements = Placements::new();
        for mut group in groups {
            let usable = self.usable(group.may);
            if self.is_alone(usable, group.may) {
                group.rail = usable.trailing_zeros() as RailIndex;
                add(&mut placements, group);
            } else {
                self.schedule.lock().push(waiting(group), false);
            }
        }
        self.place_all(&mut placements);
        placements
    }

    /// Places what waits, as far as rails have room.
    fn place_all(&self, placements: &mut Placements) {
        let now = Instant::now();
        let (mut stopped, mut stuck) = (Vec::new(), Vec::new());
        let mut schedule = self.schedule.lock();
        while let Some(next) = schedule.next(now, |waiting| self.best(waiting.rails)) {
            let placed = match next {
                Ok(placed) => placed,
                Err(waiting) => {
                    stuck.push(waiting.value);
                    continue;
                }
            };
            let mut group = placed.value;
            if let Some(reason) = group.batch.stop_reason(now) {
                schedule.given_back(placed.rail, group.bytes, group.batch.priority, false, now);
                stopped.push((group, reason));
                continue;
            }
            (group.rail, group.left) = (placed.rail, 0);
            group.placement = Some(Placement { at: now, overdue: placed.overdue });
            add(placements, group);
        }
        drop(schedule);
        stopped.into_iter().for_each(|(group, reason): (Group, Failure)| group.finish(Err(reason)));
        for group in stuck {
            if let Some(group) = self.last_resort(group) {
                add(placements, group);
            }
        }
    }

    /// No healthy rail is left that has not failed the group: it waits on one that rests, and leaves that when another is
    /// healthy again.
    fn last_resort(&self, mut group: Group) -> Option<Group> {
        group.left = 0;
        // One that leads to another engine does so for good.
        let untried = rails_of(group.may & !group.tried);
        let untried: u64 = untried.filter(|rail| !self.rail(*rail).health.lock().is_over()).map(|rail| 1 << rail).sum();
        let failures = |rail: &RailIndex| self.rail(*rail).health.lock().failures_in_a_row();
        if let Some(rail) = rails_of(self.usable(untried)).min_by_key(failures) {
            return Some(self.place_on(group, rail));
        }
        group.attempts += 1;
        let of_rail = || self.rail(self.first(group.may)?).health.lock().failure();
        let failure = group.failure.or_else(of_rail).unwrap_or(Failure::Unreachable);
        let healthy = rails_of(self.best(group.may)).next();
        match healthy {
            _ if group.attempts >= ATTEMPTS => {}
            // It came from there for slowness, or the rail works again.
            Some(rail) => {
                group.tried = 0;
                return Some(self.place_on(group, rail));
            }
            None if may_pass(failure) => {
                let rail = group.rail;
                return Some(self.place_on(group, rail));
            }
            None => {}
        }
        group.finish(Err(failure));
        None
    }

    /// Counts a group on a rail, so that it can become overdue there, if its transport has several.
    fn place_on(&self, mut group: Group, rail: RailIndex) -> Group {
        group.rail = rail;
        if self.is_alone(1 << rail, group.may) {
            return group;
        }
        let now = Instant::now();
        let placed = self.schedule.lock().place(waiting(group), rail, now);
        let mut group = placed.value;
        group.placement = Some(Placement { at: now, overdue: placed.overdue });
        group
    }

    /// Places what waits, and posts it.
    fn dispatch(&self) {
        if self.dispatches.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        loop {
            let called = self.dispatches.load(Ordering::Acquire);
            let mut placements = Placements::new();
            self.place_all(&mut placements);
            self.post(placements);
            if self.dispatches.fetch_sub(called, Ordering::AcqRel) == called {
                return;
            }
        }
    }

    /// A rail finished a group, of which `moved` bytes succeeded.
    pub(crate) fn finished(&self, rail: RailIndex, bytes: u64, moved: u64, batch: &BatchState, at: Option<Placement>) {
        if moved > 0 {
            self.rail(rail).moved_bytes.fetch_add(moved, Ordering::Relaxed);
            if self.healthy.load(Ordering::Relaxed) & 1 << rail == 0 {
                self.succeeded(rail);
            }
        }
        let Some(Placement { at, .. }) = at else { return };
        let now = Instant::now();
        let mut schedule = self.schedule.lock();
        if moved > 0 {
            schedule.finished(rail, bytes, batch.priority, at, now);
        } else {
            schedule.given_back(rail, bytes, batch.priority, false, now);
        }
        let is_empty = schedule.is_empty();
        drop(schedule);
        if !is_empty {
            self.dispatch();
        }
    }

    /// A rail gave a group back: it goes on elsewhere, or ends. `true` if the rail rests from here on.
    pub(crate) fn handed_back(&self, mut group: Group, trouble: Trouble) -> bool {
        let now = Instant::now();
        let rail = group.rail;
        if group.placement.take().is_some() {
            let is_slow = matches!(trouble, Trouble::Overdue { .. });
            self.schedule.lock().given_back(rail, group.bytes, group.batch.priority, is_slow, now);
        }
        let mut begins_to_rest = false;
        match trouble {
            Trouble::Failed(failure) => {
                begins_to_rest = self.failed(rail, failure, now);
                group.tried |= 1 << rail;
                group.failure = Some(failure);
            }
            Trouble::Overdue { is_silent } => {
                self.rail(rail).overdue.fetch_add(1, Ordering::Relaxed);
                begins_to_rest = is_silent && self.suspected(rail, now);
                group.left = 1 << rail;
                group.moves += 1;
                // One that no rail keeps is not given to each for ever.
                group.tried |= u64::from(group.moves > MOVES_MAX) << rail;
            }
            Trouble::Innocent => {}
        }
        match (group.batch.stop_reason(now), trouble) {
            (Some(reason), _) => group.finish(Err(reason)),
            (None, Trouble::Failed(Failure::Closed)) => group.finish(Err(Failure::Closed)),
            _ => {
                let others = self.best(group.may & !group.tried & !group.left);
                if others != 0 && !self.is_alone(others, group.may) {
                    self.schedule.lock().push(waiting(group), true);
                } else if others != 0 {
                    group.rail = others.trailing_zeros() as RailIndex;
                    self.rail(group.rail).link.post(vec![group]);
                } else if let Some(group) = self.last_resort(group) {
                    self.rail(group.rail).link.post(vec![group]);
                }
            }
        }
        // There is room on the rail, or a group to place.
        self.dispatch();
        begins_to_rest
    }

    /// Healthy rails that have not failed a group, besides the one that has it.
    pub(crate) fn others(&self, group: &Group) -> u64 {
        self.healthy.load(Ordering::Acquire) & group.may & !group.tried & !(1 << group.rail)
    }

    /// Whether a group that is overdue should leave its rail.
    pub(crate) fn should_move(&self, group: &Group, at: Instant, now: Instant) -> bool {
        let others = self.others(group);
        others != 0 && self.schedule.lock().should_move(group.bytes, now.saturating_duration_since(at), others)
    }

    /// Ends what waits and was stopped. Links call this while they hold groups, at least once a tick.
    pub(crate) fn look_around(&self, now: Instant) {
        let Some(mut looked_at) = self.looked_at.try_lock() else { return };
        if now.saturating_duration_since(*looked_at) < LOOK_INTERVAL {
            return;
        }
        *looked_at = now;
        drop(looked_at);
        let stopped = self.schedule.lock().take(|group| group.batch.stop_reason(now).is_some());
        for group in stopped {
            let reason = group.batch.stop_reason(now).unwrap_or(Failure::Cancelled);
            group.finish(Err(reason));
        }
    }

    fn succeeded(&self, rail: RailIndex) {
        let mut health = self.rail(rail).health.lock();
        if !health.is_healthy() {
            tracing::info!(rail = self.rail(rail).link.name(), "rail works again");
        }
        health.succeeded();
        self.healthy.fetch_or(1 << rail, Ordering::AcqRel);
    }

    /// `true` if it was healthy until now.
    fn failed(&self, rail: RailIndex, failure: Failure, now: Instant) -> bool {
        self.rail(rail).failures.fetch_add(1, Ordering::Relaxed);
        let mut health = self.rail(rail).health.lock();
        let was_healthy = health.is_healthy();
        health.failed(failure, now);
        self.healthy.fetch_and(!(1 << rail), Ordering::AcqRel);
        if was_healthy {
            tracing::info!(rail = self.rail(rail).link.name(), %failure, "rail rests");
        }
        was_healthy
    }

    /// It moved nothing while a group on it became overdue: it rests until a probe, which is due at once, has an answer.
    fn suspected(&self, rail: RailIndex, now: Instant) -> bool {
        let mut health = self.rail(rail).health.lock();
        let was_healthy = health.is_healthy();
        health.suspected(now);
        self.healthy.fetch_and(!(1 << rail), Ordering::AcqRel);
        was_healthy
    }

    /// Rails whose probe is due, each once, and when to look again; `None` if no rail has to be watched.
    pub(crate) fn begin_probes(&self, now: Instant) -> (Vec<RailIndex>, Option<Instant>) {
        let (mut due, mut next) = (Vec::new(), None);
        if self.is_closed.load(Ordering::Acquire) {
            return (due, next);
        }
        for (index, rail) in self.rails.iter().enumerate() {
            let mut health = rail.health.lock();
            let at = match health.probe_at() {
                Some(at) if at <= now => {
                    health.probe_begun();
                    due.push(index as RailIndex);
                    now + PROBE_AGAIN
                }
                Some(at) => at,
                None if health.is_watched() => now + PROBE_AGAIN,
                None => continue,
            };
            next = [next, Some(at)].into_iter().flatten().min();
        }
        (due, next)
    }

    /// Probes a rail; blocks for as long as the timeout.
    pub(crate) fn probe(&self, rail: RailIndex, timeout: Duration) {
        match self.rail(rail).link.probe(Instant::now() + timeout) {
            Ok(()) => self.succeeded(rail),
            Err(failure) => drop(self.failed(rail, failure, Instant::now())),
        }
    }

    /// All of them, best transport first.
    pub(crate) fn status(&self) -> Vec<RailStatus> {
        let status = |(index, rail): (usize, &Rail)| {
            let health = *rail.health.lock();
            let load = self.schedule.lock().load(index as RailIndex);
            RailStatus {
                transport: rail.link.kind(),
                name: rail.link.name().to_owned(),
                rests: if health.is_healthy() { None } else { health.failure().or(Some(Failure::Unreachable)) },
                bandwidth: load.bandwidth(),
                in_flight_bytes: load.in_flight(),
                moved_bytes: rail.moved_bytes.load(Ordering::Relaxed),
                failures: rail.failures.load(Ordering::Relaxed),
                overdue: rail.overdue.load(Ordering::Relaxed),
            }
        };
        self.rails.iter().enumerate().map(status).collect()
    }

    #[cfg(feature = "faults")]
    pub(crate) fn set_faults(&self, rail: usize, faults: crate::faulty::Faults) {
        self.rails[rail].link.set_faults(faults);
    }

    /// Ends everything.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.rails.iter().for_each(|rail| rail.link.close());
        let waiting = self.schedule.lock().take(|_| true);
        waiting.into_iter().for_each(|group| group.finish(Err(Failure::Closed)));
    }
}

impl Rail {
    fn new(link: Arc<dyn Link>, health: Health) -> Self {
        #[cfg(feature = "faults")]
        let link = Arc::new(crate::faulty::FaultyLink::new(link));
        Self {
            link,
            health: Mutex::new(health),
            moved_bytes: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            overdue: AtomicU64::new(0),
        }
    }
}

fn waiting(group: Group) -> Waiting<Group> {
    let (bytes, priority, rails) = (group.bytes, group.batch.priority, group.may & !group.tried & !group.left);
    Waiting { value: group, bytes, priority, rails }
}

fn add(placements: &mut Placements, group: Group) {
    match placements.iter_mut().find(|(rail, _)| *rail == group.rail) {
        Some((_, groups)) => groups.push(group),
        None => placements.push((group.rail, vec![group])),
    }
}

/// Whether the same rail may succeed at once: a connection that was idle may have died long ago.
fn may_pass(failure: Failure) -> bool {
    matches!(failure, Failure::ConnectionLost | Failure::Overloaded)
}
