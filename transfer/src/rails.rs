//! The rails to one peer: which of them a group takes, and where it goes when one hands it back.
//!
//! ```text
//! first(): best transport with a healthy rail, else the best that reaches
//!
//! group --post, carry--> rail --finish--> its request goes on or ends
//!                         |
//!                         +-- hand back: healthy rail that it has not tried, best transport first
//!                                        else one that rests and that it has not tried
//!                                        else the same again, if what failed may pass, 3 times in all
//!                                        else its pieces end with the failure
//! ```
//!
//! So each group visits each rail once, a few times the last one, and ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::batch::{BatchState, Group};
use crate::error::Failure;
use crate::peer::Segment;
use crate::rail::Health;
use crate::region::Region;
use crate::slice::Direction;
use crate::transport::{Limits, Link, TransportKind};

/// Most rails to a peer: a group remembers in a word which it has tried.
pub(crate) const RAILS_MAX: usize = 64;
/// How often a group is handed back, beyond once for each rail, before its failure counts.
const ATTEMPTS: u8 = 3;

/// While a probe is on its way, its end is looked for this often.
const PROBE_AGAIN: Duration = Duration::from_millis(50);

/// Place of a rail in its peer's list.
pub(crate) type RailIndex = u8;

struct Rail {
    link: Arc<dyn Link>,
    health: Mutex<Health>,
    /// Whether `health` is not healthy, for who looks often.
    rests: AtomicBool,
}

/// One way to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RailStatus {
    /// What carries it.
    pub transport: TransportKind,
    /// The peer's address, or a pair of devices.
    pub name: String,
    /// Why it rests; `None`: it is in use.
    pub rests: Option<Failure>,
}

/// See the module.
pub(crate) struct Rails {
    /// Best transport first.
    rails: Vec<Rail>,
}

impl Rails {
    /// Rails over these links.
    pub(crate) fn new(mut links: Vec<Arc<dyn Link>>) -> Self {
        links.truncate(RAILS_MAX);
        links.sort_by_key(|link| link.kind());
        Self { rails: links.into_iter().map(Rail::new).collect() }
    }

    /// The rail that groups between these two should take first; `kind` names its transport, `None` leaves the choice.
    pub(crate) fn first(
        &self,
        local: Option<&Region>,
        segment: &Segment,
        direction: Direction,
        kind: Option<TransportKind>,
    ) -> Option<RailIndex> {
        let reach = || {
            self.rails.iter().enumerate().filter(move |(_, rail)| {
                kind.is_none_or(|kind| kind == rail.link.kind()) && rail.link.reaches(local, segment, direction)
            })
        };
        let healthy = reach().find(|(_, rail)| !rail.rests());
        healthy.or_else(|| reach().next()).map(|(index, _)| index as RailIndex)
    }

    /// Whether a rail can move bytes between these two.
    pub(crate) fn reaches(&self, rail: RailIndex, local: &Region, segment: &Segment, direction: Direction) -> bool {
        self.rails[usize::from(rail)].link.reaches(Some(local), segment, direction)
    }

    pub(crate) fn kind(&self, rail: RailIndex) -> TransportKind {
        self.rails[usize::from(rail)].link.kind()
    }

    pub(crate) fn limits(&self, rail: RailIndex) -> Limits {
        self.rails[usize::from(rail)].link.limits()
    }

    /// Gives groups to a rail.
    pub(crate) fn post(&self, rail: RailIndex, mut groups: Vec<Group>) {
        groups.iter_mut().for_each(|group| group.rail = rail);
        self.rails[usize::from(rail)].link.post(groups);
    }

    /// The same, and the calling thread lends itself.
    pub(crate) fn carry(&self, rail: RailIndex, mut groups: Vec<Group>, batch: &BatchState) {
        groups.iter_mut().for_each(|group| group.rail = rail);
        self.rails[usize::from(rail)].link.carry(groups, batch);
    }

    /// A rail moved a group.
    pub(crate) fn moved(&self, rail: RailIndex) {
        let rail = &self.rails[usize::from(rail)];
        if rail.rests() {
            rail.succeeded();
        }
    }

    /// A rail gave a group back: it goes on elsewhere, or ends. `true` if the rail rests from here on.
    pub(crate) fn handed_back(&self, mut group: Group, failure: Failure) -> bool {
        let now = Instant::now();
        let begins_to_rest = is_of_the_rail(failure) && self.rails[usize::from(group.rail)].failed(failure, now);
        group.tried |= 1 << group.rail;
        match group.batch.stop_reason(now) {
            Some(reason) => group.finish(Err(reason)),
            None => match self.next(&mut group, failure) {
                Some(rail) => self.post(rail, vec![group]),
                None => group.finish(Err(failure)),
            },
        }
        begins_to_rest
    }

    fn next(&self, group: &mut Group, failure: Failure) -> Option<RailIndex> {
        if matches!(failure, Failure::Restarted | Failure::Closed) {
            return None;
        }
        let untried = || {
            self.rails.iter().enumerate().filter(|(index, rail)| {
                group.tried & 1 << index == 0
                    && group.batch.transport.is_none_or(|kind| kind == rail.link.kind())
                    && rail.reaches(group)
            })
        };
        let next = untried().find(|(_, rail)| !rail.rests()).or_else(|| untried().next());
        if let Some((index, _)) = next {
            return Some(index as RailIndex);
        }
        group.attempts += 1;
        if may_pass(failure) && group.attempts < ATTEMPTS { Some(group.rail) } else { None }
    }

    /// Rails whose probe is due, each once, and when to look again; `None` if no rail has to be watched.
    pub(crate) fn begin_probes(&self, now: Instant) -> (Vec<RailIndex>, Option<Instant>) {
        let (mut due, mut next) = (Vec::new(), None);
        for (index, rail) in self.rails.iter().enumerate() {
            let mut health = rail.health.lock();
            match health.probe_at() {
                Some(at) if at <= now => {
                    health.probe_begun();
                    due.push(index as RailIndex);
                    next = [next, Some(now + PROBE_AGAIN)].into_iter().flatten().min();
                }
                Some(at) => next = [next, Some(at)].into_iter().flatten().min(),
                None if health.is_watched() => next = [next, Some(now + PROBE_AGAIN)].into_iter().flatten().min(),
                None => {}
            }
        }
        (due, next)
    }

    /// Probes a rail; blocks for as long as the timeout.
    pub(crate) fn probe(&self, rail: RailIndex, timeout: Duration) {
        let rail = &self.rails[usize::from(rail)];
        match rail.link.probe(Instant::now() + timeout) {
            Ok(()) => rail.succeeded(),
            Err(failure) => drop(rail.failed(failure, Instant::now())),
        }
    }

    /// All of them, best transport first.
    pub(crate) fn status(&self) -> Vec<RailStatus> {
        let status = |rail: &Rail| {
            let health = *rail.health.lock();
            let rests = if health.is_healthy() { None } else { health.failure().or(Some(Failure::Unreachable)) };
            RailStatus { transport: rail.link.kind(), name: rail.link.name().to_owned(), rests }
        };
        self.rails.iter().map(status).collect()
    }

    /// Ends everything.
    pub(crate) fn close(&self) {
        self.rails.iter().for_each(|rail| rail.link.close());
    }
}

impl Rail {
    fn new(link: Arc<dyn Link>) -> Self {
        Self { link, health: Mutex::default(), rests: AtomicBool::new(false) }
    }

    fn rests(&self) -> bool {
        self.rests.load(Ordering::Acquire)
    }

    fn succeeded(&self) {
        let mut health = self.health.lock();
        if !health.is_healthy() {
            tracing::info!(rail = self.link.name(), "rail works again");
        }
        health.succeeded();
        self.rests.store(false, Ordering::Release);
    }

    /// `true` if it was healthy until now.
    fn failed(&self, failure: Failure, now: Instant) -> bool {
        let mut health = self.health.lock();
        let was_healthy = health.is_healthy();
        health.failed(failure, now);
        self.rests.store(true, Ordering::Release);
        if was_healthy {
            tracing::info!(rail = self.link.name(), %failure, "rail rests");
        }
        was_healthy
    }

    fn reaches(&self, group: &Group) -> bool {
        group.pieces().iter().all(|piece| {
            let local = &group.batch.regions[piece.region as usize];
            self.link.reaches(Some(local), &group.batch.segments[piece.segment as usize], piece.direction)
        })
    }
}

/// Whether a failure says something of the rail. A group that shared a connection with one that was stopped is innocent,
/// and so is its rail.
fn is_of_the_rail(failure: Failure) -> bool {
    !matches!(failure, Failure::Cancelled | Failure::DeadlinePassed | Failure::Restarted | Failure::Closed)
}

/// Whether the same rail may succeed at once: a connection that was idle may have died long ago.
fn may_pass(failure: Failure) -> bool {
    matches!(failure, Failure::ConnectionLost | Failure::Overloaded) || !is_of_the_rail(failure)
}
