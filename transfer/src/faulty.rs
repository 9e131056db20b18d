//! A link that fails as it is told, for tests: at submit, at completion, by loss, by delay.
//!
//! Faults are drawn under a seed, in the order in which groups come. It keeps the contract of a link: a group that is lost
//! is looked at once a tick, and handed back when it is overdue; one that fails at completion is handed back after its
//! bytes have moved, which is what a transport does whose completion gets lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::batch::{BatchState, Group};
use crate::error::Failure;
use crate::peer::Segment;
use crate::rails::Trouble;
use crate::region::Region;
use crate::slice::Direction;
use crate::transport::{Limits, Link, TransportKind};

/// What is held back is looked at this often.
const TICK: Duration = Duration::from_millis(1);
/// A group that is lost and can't move is given up after this.
const LOST_TIMEOUT: Duration = Duration::from_secs(2);

/// What goes wrong on one rail. Shares are of groups, 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Of the draws.
    pub seed: u64,
    /// Share that fails at submit.
    pub at_submit: f64,
    /// Share whose bytes move, and which fails then.
    pub at_completion: f64,
    /// Share of which nothing is heard again.
    pub loss: f64,
    /// Each group waits for so long, up to.
    pub delay: Duration,
    /// Everything fails, probes too.
    pub is_cut: bool,
}

/// See the module.
pub(crate) struct FaultyLink {
    inner: Arc<dyn Link>,
    shared: Arc<Shared>,
}

struct Shared {
    inner: Arc<dyn Link>,
    state: Mutex<State>,
    changed: Condvar,
    is_closed: AtomicBool,
}

struct State {
    faults: Faults,
    random: u64,
    held: Vec<Held>,
    is_running: bool,
}

struct Held {
    group: Group,
    /// When it goes on; `None`: it is lost.
    until: Option<Instant>,
    since: Instant,
}

impl FaultyLink {
    pub(crate) fn new(inner: Arc<dyn Link>) -> Self {
        let state = State { faults: Faults::default(), random: 0, held: Vec::new(), is_running: false };
        let shared = Shared {
            inner: Arc::clone(&inner),
            state: Mutex::new(state),
            changed: Condvar::new(),
            is_closed: AtomicBool::new(false),
        };
        Self { inner, shared: Arc::new(shared) }
    }

    fn take(&self, group: Group) {
        let mut state = self.shared.state.lock();
        let faults = state.faults;
        if faults.is_cut || state.draw() < faults.at_submit {
            drop(state);
            return group.hand_back(Failure::Unreachable);
        }
        let (lost, failed) = (state.draw() < faults.loss, state.draw() < faults.at_completion);
        let delay = faults.delay.mul_f64(state.draw());
        let now = Instant::now();
        if lost || !delay.is_zero() {
            let until = if lost { None } else { Some(now + delay) };
            state.held.push(Held { group, until, since: now });
            if !std::mem::replace(&mut state.is_running, true) {
                let shared = Arc::clone(&self.shared);
                let spawned = std::thread::Builder::new().name("tidepool-faults".into()).spawn(move || shared.run());
                assert!(spawned.is_ok(), "no thread for faults");
            }
            return;
        }
        drop(state);
        if failed { fail_later(&*self.inner, group) } else { self.inner.post(vec![group]) }
    }
}

/// Moves a copy of the group, and hands the group back when that has ended.
fn fail_later(inner: &dyn Link, group: Group) {
    let (copy, state) = group.copy();
    state.set_on_end(Box::new(move |_| group.hand_back(Failure::ConnectionLost)));
    inner.post(vec![copy]);
}

impl State {
    /// 0 to 1, splitmix64 (Steele, Lea, Flood 2014).
    fn draw(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.random;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

impl Shared {
    /// Looks at what is held back until nothing is.
    fn run(&self) {
        let mut state = self.state.lock();
        while !state.held.is_empty() {
            self.changed.wait_for(&mut state, TICK);
            let now = Instant::now();
            let held = std::mem::take(&mut state.held);
            drop(state);
            let kept: Vec<_> = held.into_iter().filter_map(|held| self.look(held, now)).collect();
            state = self.state.lock();
            state.held.extend(kept);
        }
        state.is_running = false;
    }

    /// Lets a group go if it is time; gives it back if not.
    fn look(&self, mut held: Held, now: Instant) -> Option<Held> {
        held.group.look_around(now);
        if self.is_closed.load(Ordering::Acquire) {
            held.group.finish(Err(Failure::Closed));
        } else if let Some(reason) = held.group.batch.stop_reason(now) {
            held.group.finish(Err(reason));
        } else if held.group.is_overdue(now) {
            held.group.hand_back_for(Trouble::Overdue { is_silent: true });
        } else if held.until.is_some_and(|until| until <= now) {
            self.inner.post(vec![held.group]);
        } else if held.until.is_none() && now.saturating_duration_since(held.since) >= LOST_TIMEOUT {
            held.group.hand_back(Failure::Silent);
        } else {
            return Some(held);
        }
        None
    }
}

impl Link for FaultyLink {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn bandwidth(&self) -> Option<f64> {
        self.inner.bandwidth()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn reaches(&self, local: Option<&Region>, segment: &Segment, direction: Direction) -> bool {
        self.inner.reaches(local, segment, direction)
    }

    fn post(&self, groups: Vec<Group>) {
        groups.into_iter().for_each(|group| self.take(group));
    }

    fn carry(&self, groups: Vec<Group>, batch: &BatchState) {
        if self.shared.state.lock().faults == Faults::default() {
            return self.inner.carry(groups, batch);
        }
        self.post(groups);
    }

    fn probe(&self, deadline: Instant) -> Result<(), Failure> {
        if self.shared.state.lock().faults.is_cut { Err(Failure::Unreachable) } else { self.inner.probe(deadline) }
    }

    fn set_faults(&self, faults: Faults) {
        let mut state = self.shared.state.lock();
        (state.faults, state.random) = (faults, faults.seed);
    }

    fn close(&self) {
        self.shared.is_closed.store(true, Ordering::Release);
        self.shared.changed.notify_all();
        self.inner.close();
    }
}
