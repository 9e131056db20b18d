//! Which rail takes which group: pure, with `now` as an argument.
//!
//! Each rail has a *load*: bytes in flight, and an estimate of its bandwidth and latency, so that the time at which it
//! would be done with a further group can be predicted. A group goes to the rail that would be done with it first, as long
//! as that rail has room in its window; to another with room only if that would be done before all rails together are done
//! with everything that waits. So a slow rail helps with a long queue and is left out of its end.
//!
//! What doesn't fit in the windows waits here, latency before bulk; bulk in flight takes no room from latency. The window
//! is 10 ms of what the rail moves: what a rail holds when it fails is no more than that.
//!
//! **Estimate.** Bytes and busy time are gathered until they are worth a sample (5 ms or 4 MiB), because completions
//! come in bursts; a sample counts for a quarter, within a factor of four of what was believed before: no sample drowns
//! the rest. Time that groups wait in front of others is no part of it: it counts from the rail's last completion.
//!
//! Invariants: `in_flight` of a rail = bytes of groups placed on it and not yet finished or given back; `queued_bytes` =
//! bytes of the two queues; a group is in a queue or placed, never both.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Place of a rail in its peer's list.
pub(crate) type RailIndex = u8;

/// Believed of a rail whose speed nobody tells: 10 Gbit/s.
pub(crate) const BANDWIDTH_UNKNOWN: f64 = 1.25e9;
/// Bounds of an estimate in bytes per second.
const BANDWIDTH_MIN: f64 = 1e5;
const BANDWIDTH_MAX: f64 = 1e12;
/// What makes a sample.
const SAMPLE_TIME: Duration = Duration::from_millis(5);
const SAMPLE_BYTES: u64 = 4 << 20;
/// Share of a new sample in the estimate, and how far from the estimate it may be.
const SAMPLE_SHARE: f64 = 0.25;
const SAMPLE_FACTOR: f64 = 4.0;
/// What a group may take longer than it was believed, in seconds, beyond that factor, to count: a connection that is made anew is no
/// latency.
const LATENCY_STEP: f64 = 1e-3;
/// How much a rail may hold, in time; and in bytes at least, so that one piece is moved while another is asked for.
const WINDOW_SECONDS: f64 = 0.01;
const WINDOW_MIN: f64 = (2 << 20) as f64;
const WINDOW_MAX: f64 = (64 << 20) as f64;
/// A rail that nobody used for this long is given a group to find out how fast it is now.
const EXPLORE_AFTER: Duration = Duration::from_secs(1);
/// A group is overdue after this many times its predicted time, and not before.
const OVERDUE_FACTOR: f64 = 3.0;
const OVERDUE_MIN: Duration = Duration::from_millis(20);
/// Groups at the head of a queue that are looked at: those behind one whose rails are full may have others.
const LOOK_AHEAD: usize = 16;

/// What goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for it.
    #[default]
    Latency,
    /// In the background: it waits for all of the other kind.
    Bulk,
}

/// A group that waits for a rail.
#[derive(Debug)]
pub(crate) struct Waiting<T> {
    pub(crate) value: T,
    pub(crate) bytes: u64,
    pub(crate) priority: Priority,
    /// Rails that may take it, a bit each.
    pub(crate) rails: u64,
}

/// A group that a rail takes.
#[derive(Debug)]
pub(crate) struct Placed<T> {
    pub(crate) value: T,
    pub(crate) rail: RailIndex,
    /// After this it is overdue.
    pub(crate) overdue: Instant,
}

/// What one rail holds, and how fast it is believed to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    latency_bytes: u64,
    bulk_bytes: u64,
    /// Bytes per second.
    bandwidth: f64,
    /// Seconds that a group takes beyond its bytes.
    latency: f64,
    gathered_bytes: u64,
    gathered_time: Duration,
    /// While it is busy: when it became so, or last completed something.
    busy_since: Option<Instant>,
    used: Option<Instant>,
}

impl Load {
    fn new(bandwidth: f64) -> Self {
        Self {
            latency_bytes: 0,
            bulk_bytes: 0,
            bandwidth: bandwidth.clamp(BANDWIDTH_MIN, BANDWIDTH_MAX),
            latency: 0.0,
            gathered_bytes: 0,
            gathered_time: Duration::ZERO,
            busy_since: None,
            used: None,
        }
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.latency_bytes + self.bulk_bytes
    }

    /// Bytes per second.
    pub(crate) fn bandwidth(&self) -> f64 {
        self.bandwidth
    }

    /// Seconds until it would be done with so many bytes more.
    fn predict(&self, bytes: u64) -> f64 {
        (self.in_flight() + bytes) as f64 / self.bandwidth + self.latency
    }

    fn has_room(&self, bytes: u64, priority: Priority) -> bool {
        let window = (self.bandwidth * WINDOW_SECONDS).clamp(WINDOW_MIN, WINDOW_MAX);
        let held = if priority == Priority::Latency { self.latency_bytes } else { self.in_flight() };
        held == 0 || (held + bytes) as f64 <= window
    }

    fn is_to_explore(&self, now: Instant) -> bool {
        self.in_flight() == 0 && self.used.is_some_and(|used| now.saturating_duration_since(used) >= EXPLORE_AFTER)
    }

    fn held(&mut self, priority: Priority) -> &mut u64 {
        if priority == Priority::Latency { &mut self.latency_bytes } else { &mut self.bulk_bytes }
    }

    fn begin(&mut self, bytes: u64, priority: Priority, now: Instant) {
        *self.held(priority) += bytes;
        self.busy_since = self.busy_since.or(Some(now));
        self.used = Some(now);
    }

    fn end(&mut self, bytes: u64, priority: Priority) {
        let held = self.held(priority);
        debug_assert!(*held >= bytes, "{held} bytes in flight, {bytes} ended");
        *held = held.saturating_sub(bytes);
        if self.in_flight() == 0 {
            self.busy_since = None;
        }
    }

    fn sample(&mut self, bytes: u64, elapsed: Duration) {
        self.gathered_bytes += bytes;
        self.gathered_time += elapsed;
        if self.gathered_time < SAMPLE_TIME && self.gathered_bytes < SAMPLE_BYTES {
            return;
        }
        let rate = self.gathered_bytes as f64 / self.gathered_time.as_secs_f64().max(1e-9);
        let rate = rate.clamp(self.bandwidth / SAMPLE_FACTOR, self.bandwidth * SAMPLE_FACTOR);
        self.bandwidth += (rate - self.bandwidth) * SAMPLE_SHARE;
        self.bandwidth = self.bandwidth.clamp(BANDWIDTH_MIN, BANDWIDTH_MAX);
        (self.gathered_bytes, self.gathered_time) = (0, Duration::ZERO);
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Schedule<T> {
    loads: Vec<Load>,
    latency: VecDeque<Waiting<T>>,
    bulk: VecDeque<Waiting<T>>,
    queued_bytes: u64,
}

impl<T> Schedule<T> {
    /// A schedule of rails that are believed to move so many bytes per second each.
    pub(crate) fn new(bandwidths: impl IntoIterator<Item = f64>) -> Self {
        let loads = bandwidths.into_iter().map(Load::new).collect();
        Self { loads, latency: VecDeque::new(), bulk: VecDeque::new(), queued_bytes: 0 }
    }

    pub(crate) fn load(&self, rail: RailIndex) -> Load {
        self.loads[usize::from(rail)]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.latency.is_empty() && self.bulk.is_empty()
    }

    /// Lets a group wait for a rail; before those of its priority that wait already if it was given back by one.
    pub(crate) fn push(&mut self, waiting: Waiting<T>, is_again: bool) {
        self.queued_bytes += waiting.bytes;
        let queue = if waiting.priority == Priority::Latency { &mut self.latency } else { &mut self.bulk };
        if is_again {
            queue.push_front(waiting);
        } else {
            queue.push_back(waiting);
        }
    }

    /// Places the next group that can be placed. `usable` narrows the rails that may take it to those that should now;
    /// none means that the group is stuck: it is given out all the same, for the caller to end or to place.
    pub(crate) fn next(
        &mut self,
        now: Instant,
        usable: impl Fn(&Waiting<T>) -> u64,
    ) -> Option<Result<Placed<T>, Waiting<T>>> {
        for priority in [Priority::Latency, Priority::Bulk] {
            let queue = if priority == Priority::Latency { &self.latency } else { &self.bulk };
            for place in 0..queue.len().min(LOOK_AHEAD) {
                let rails = usable(&queue[place]);
                let choice = if rails == 0 { None } else { Some(self.choose(&queue[place], rails, now)) };
                if choice == Some(None) {
                    continue;
                }
                let queue = if priority == Priority::Latency { &mut self.latency } else { &mut self.bulk };
                let waiting = queue.remove(place)?;
                self.queued_bytes -= waiting.bytes;
                return Some(match choice.flatten() {
                    Some(rail) => Ok(self.place(waiting, rail, now)),
                    None => Err(waiting),
                });
            }
        }
        None
    }

    /// The rail that a group should take now, if there is one that should.
    fn choose(&self, waiting: &Waiting<T>, rails: u64, now: Instant) -> Option<RailIndex> {
        let all = || rails_of(rails).map(|rail| (rail, &self.loads[usize::from(rail)]));
        let others_wait = self.queued_bytes > waiting.bytes || waiting.priority == Priority::Bulk;
        if let Some((rail, _)) = all().find(|(_, load)| others_wait && load.is_to_explore(now)) {
            return Some(rail);
        }
        let by_end = |a: &(RailIndex, &Load), b: &(RailIndex, &Load)| {
            a.1.predict(waiting.bytes).total_cmp(&b.1.predict(waiting.bytes))
        };
        let first = all().min_by(by_end)?;
        let with_room = all().filter(|(_, load)| load.has_room(waiting.bytes, waiting.priority)).min_by(by_end)?;
        if with_room.0 == first.0 {
            return Some(first.0);
        }
        let held: u64 = all().map(|(_, load)| load.in_flight()).sum();
        let bandwidth: f64 = all().map(|(_, load)| load.bandwidth).sum();
        let everything = (held + self.queued_bytes) as f64 / bandwidth;
        if with_room.1.predict(waiting.bytes) <= everything { Some(with_room.0) } else { None }
    }

    /// Counts a group on a rail.
    pub(crate) fn place(&mut self, waiting: Waiting<T>, rail: RailIndex, now: Instant) -> Placed<T> {
        let load = &mut self.loads[usize::from(rail)];
        let predicted = Duration::try_from_secs_f64(load.predict(waiting.bytes) * OVERDUE_FACTOR).unwrap_or_default();
        load.begin(waiting.bytes, waiting.priority, now);
        Placed { value: waiting.value, rail, overdue: now + predicted.max(OVERDUE_MIN) }
    }

    /// A rail finished a group that it was given at `placed`.
    pub(crate) fn finished(&mut self, rail: RailIndex, bytes: u64, priority: Priority, placed: Instant, now: Instant) {
        let load = &mut self.loads[usize::from(rail)];
        let began = load.busy_since.unwrap_or(placed);
        load.sample(bytes, now.saturating_duration_since(began));
        if began <= placed {
            // It was alone: what it took beyond its bytes is latency.
            let beyond = now.saturating_duration_since(placed).as_secs_f64() - bytes as f64 / load.bandwidth;
            let most = load.latency * SAMPLE_FACTOR + LATENCY_STEP;
            load.latency += (beyond.clamp(0.0, most) - load.latency) / 8.0;
        }
        load.busy_since = Some(now);
        load.end(bytes, priority);
    }

    /// A rail gave a group back. If it was for its slowness, that is a sample of what it moved since it last ended one: nothing.
    pub(crate) fn given_back(&mut self, rail: RailIndex, bytes: u64, priority: Priority, is_slow: bool, now: Instant) {
        let load = &mut self.loads[usize::from(rail)];
        if is_slow && let Some(since) = load.busy_since.replace(now) {
            // What several groups waited for at once was lost once.
            load.sample(0, now.saturating_duration_since(since));
        }
        load.end(bytes, priority);
    }

    /// Whether a group of so many bytes that has been on its rail for `elapsed` should be moved to one of `others`: if that
    /// would be done with it in the time that was spent already. So moving costs at most as much as was lost.
    pub(crate) fn should_move(&self, bytes: u64, elapsed: Duration, others: u64) -> bool {
        rails_of(others).any(|rail| self.loads[usize::from(rail)].predict(bytes) <= elapsed.as_secs_f64())
    }

    /// Takes out what `wanted` says.
    pub(crate) fn take(&mut self, mut wanted: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut taken = Vec::new();
        for queue in [&mut self.latency, &mut self.bulk] {
            for _ in 0..queue.len() {
                let Some(waiting) = queue.pop_front() else { break };
                if wanted(&waiting.value) {
                    self.queued_bytes -= waiting.bytes;
                    taken.push(waiting.value);
                } else {
                    queue.push_back(waiting);
                }
            }
        }
        taken
    }
}

/// The rails whose bits are set.
pub(crate) fn rails_of(mut rails: u64) -> impl Iterator<Item = RailIndex> {
    std::iter::from_fn(move || {
        let rail = rails.trailing_zeros();
        rails &= rails.wrapping_sub(1);
        if rail < 64 { Some(rail as RailIndex) } else { None }
    })
}

#[cfg(test)]
mod tests;
