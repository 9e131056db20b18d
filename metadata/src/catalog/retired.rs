//! Ids of copies that may never become visible (again): abandoned, refused, or dropped soon after they were reserved.
//!
//! Why: a coordinator that gets no answer proposes its complete again. The repeat must not bring back a copy whose
//! memory was freed in between. A complete is refused when its reservation is older than [`RESERVATION_LIFETIME`],
//! so an id has to be kept only for [`RETIREMENT`] after it was reserved, and a copy dropped later than that needs
//! no entry at all: churn of old objects costs nothing here.
//!
//! Bound: at [`MAX_RETIRED`] ids the ones reserved first are let go, and every reservation of their age is refused
//! from then on (`horizon`). A put may then be refused early; a dead copy never returns.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::log::LogTime;
use crate::object::ReplicaId;

/// How long after its reservation a copy can be completed, by log time.
pub const RESERVATION_LIFETIME: Duration = Duration::from_secs(60);
/// How long an id is kept; twice as long, so that the stamps of leader and coordinator may differ by a minute.
pub const RETIREMENT: Duration = Duration::from_secs(120);
/// Most ids kept, about 80 MiB: 8,000 abandoned or short-lived copies a second over [`RETIREMENT`].
pub const MAX_RETIRED: usize = 1 << 20;

const _: () = assert!(RETIREMENT.as_secs() >= 2 * RESERVATION_LIFETIME.as_secs());

/// A log time in whole seconds, rounded up: four bytes a replica, until the year 2106.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stamp(pub(super) u32);

impl Stamp {
    pub(super) fn of(time: LogTime) -> Self {
        Self(u32::try_from(time.0.div_ceil(1000)).unwrap_or(u32::MAX))
    }

    fn retires_before(self, now: LogTime) -> bool {
        (u64::from(self.0) + RETIREMENT.as_secs()) * 1000 < now.0
    }
}

/// The table of retired ids.
pub(super) struct Retired {
    stamps: BTreeMap<ReplicaId, Stamp>,
    by_stamp: BTreeSet<(Stamp, ReplicaId)>,
    horizon: Stamp,
    capacity: usize,
}

impl Default for Retired {
    fn default() -> Self {
        Self::with_capacity(MAX_RETIRED)
    }
}

impl Retired {
    pub(super) fn with_capacity(capacity: usize) -> Self {
        Self { stamps: BTreeMap::new(), by_stamp: BTreeSet::new(), horizon: Stamp::default(), capacity }
    }

    pub(super) fn horizon(&self) -> Stamp {
        self.horizon
    }

    pub(super) fn set_horizon(&mut self, horizon: Stamp) {
        self.horizon = horizon;
    }

    pub(super) fn len(&self) -> usize {
        self.stamps.len()
    }

    pub(super) fn contains(&self, replica: ReplicaId) -> bool {
        self.stamps.contains_key(&replica)
    }

    pub(super) fn get(&self, replica: ReplicaId) -> Option<Stamp> {
        self.stamps.get(&replica).copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ReplicaId, Stamp)> {
        self.stamps.iter().map(|(&replica, &stamp)| (replica, stamp))
    }

    /// Whether a copy reserved then may still become visible at `now`.
    pub(super) fn admits(&self, reserved_at: LogTime, now: LogTime) -> bool {
        now.since(reserved_at) <= RESERVATION_LIFETIME
            && reserved_at.since(now) <= RESERVATION_LIFETIME
            && Stamp::of(reserved_at) > self.horizon
    }

    /// Keeps `replica` from becoming visible. `stamp` is when it was reserved, or any later instant.
    /// Gives the ids whose entries changed or went.
    pub(super) fn retire(&mut self, replica: ReplicaId, stamp: Stamp, now: LogTime) -> Vec<ReplicaId> {
        if stamp.retires_before(now) || stamp <= self.horizon || self.get(replica).is_some_and(|known| known >= stamp) {
            return Vec::new();
        }
        self.restore(replica, stamp);
        let mut changed = vec![replica];
        while self.stamps.len() > self.capacity {
            let (oldest, dropped) = self.by_stamp.pop_first().expect("as many stamps as ids");
            self.stamps.remove(&dropped);
            self.horizon = self.horizon.max(oldest);
            changed.push(dropped);
        }
        changed
    }

    /// Sets an entry as an image has it.
    pub(super) fn restore(&mut self, replica: ReplicaId, stamp: Stamp) {
        if let Some(old) = self.stamps.insert(replica, stamp) {
            self.by_stamp.remove(&(old, replica));
        }
        self.by_stamp.insert((stamp, replica));
    }

    /// Lets go of at most `limit` ids whose time is over; gives them.
    pub(super) fn expire(&mut self, now: LogTime, limit: usize) -> Vec<ReplicaId> {
        let mut expired = Vec::new();
        while expired.len() < limit {
            match self.by_stamp.first() {
                Some(&(stamp, replica)) if stamp.retires_before(now) => {
                    self.by_stamp.pop_first();
                    self.stamps.remove(&replica);
                    expired.push(replica);
                }
                _ => break,
            }
        }
        expired
    }

    pub(super) fn validate(&self) {
        assert_eq!(self.stamps.len(), self.by_stamp.len());
        assert!(self.stamps.len() <= self.capacity);
        for (&replica, &stamp) in &self.stamps {
            assert!(self.by_stamp.contains(&(stamp, replica)), "{replica:?} has no entry by its stamp {stamp:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Incarnation, NodeId};

    fn replica(sequence: u64) -> ReplicaId {
        ReplicaId { node: NodeId(1), incarnation: Incarnation(1), sequence }
    }

    fn seconds(seconds: u64) -> LogTime {
        LogTime(seconds * 1000)
    }

    #[test]
    fn retired_ids_are_kept_for_two_minutes() {
        let mut retired = Retired::default();
        retired.retire(replica(1), Stamp::of(seconds(100)), seconds(100));
        assert!(retired.expire(seconds(220), 10).is_empty());
        assert!(retired.contains(replica(1)));
        assert_eq!(retired.expire(seconds(221), 10), [replica(1)]);
        retired.validate();
    }

    #[test]
    fn copies_reserved_long_ago_need_no_entry() {
        let mut retired = Retired::default();
        assert!(retired.retire(replica(1), Stamp::of(seconds(100)), seconds(300)).is_empty());
        assert_eq!(retired.len(), 0);
    }

    #[test]
    fn a_full_table_refuses_reservations_as_old_as_what_it_forgot() {
        let mut retired = Retired::with_capacity(2);
        for second in 101..104 {
            retired.retire(replica(second), Stamp::of(seconds(second)), seconds(104));
        }
        assert_eq!(retired.len(), 2);
        assert!(!retired.contains(replica(101)));
        assert!(!retired.admits(seconds(101), seconds(104)));
        assert!(retired.admits(seconds(102), seconds(104)));
        retired.validate();
    }

    #[test]
    fn reservations_of_another_time_are_refused() {
        let retired = Retired::default();
        assert!(retired.admits(seconds(100), seconds(160)));
        assert!(!retired.admits(seconds(100), seconds(161)));
        assert!(retired.admits(seconds(160), seconds(100)));
        assert!(!retired.admits(seconds(161), seconds(100)));
    }
}
