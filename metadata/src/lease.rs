//! Leases: until when a located version is not evicted. The leader's own volatile table.
//!
//! Not in the log and not on disk: a lease that is lost in a failover costs a miss, never bytes (a node's *hold*
//! protects memory that is being read). Pure: instants are arguments, so a simulation can step them.
//! Invariants: `holders >= 1` of each lease; what a tenant has leased is the sum over its leases, and no grant takes
//! it above its share of the capacity, so that existence probes cannot make everything unevictable.
//! Ends are kept by the second in which they come, one entry a lease, that stays where it is when the lease is made longer, and moves
//! on when its second comes: a renewal costs one look.
//! Bounds: [`LeaseLimits::entries`] leases, a share of bytes per tenant; at both a grant is refused, which means that
//! the object may be evicted, not that it cannot be read.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::node::{Incarnation, NodeId};
use crate::object::{KeyHash, TenantId, VersionId};

/// How long a lease lasts if its caller does not say.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(5);
/// The longest lease; asking for more gives this much.
pub const MAX_LEASE: Duration = Duration::from_secs(60);

/// Expired leases that each grant sweeps, so that a table in use needs no sweeper.
const SWEEP: usize = 16;

/// An instant of a clock that never goes back and runs while the machine sleeps (`CLOCK_BOOTTIME`), since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootTime(pub Duration);

/// Bounds of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseLimits {
    /// Most leases; 100 bytes each.
    pub entries: usize,
    /// Bytes that all nodes lend together.
    pub capacity_bytes: u64,
    /// How much of the capacity one tenant may have leased, 1 to 100 percent.
    pub tenant_percent: u8,
}

impl Default for LeaseLimits {
    /// 2^19 leases, half of the capacity for one tenant, no capacity yet.
    fn default() -> Self {
        Self { entries: 1 << 19, capacity_bytes: 0, tenant_percent: 50 }
    }
}

impl LeaseLimits {
    fn tenant_bytes(&self) -> u64 {
        let bytes = u128::from(self.capacity_bytes) * u128::from(self.tenant_percent.min(100)) / 100;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// Which version a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leased {
    /// The object's tenant.
    pub tenant: TenantId,
    /// The version.
    pub version: VersionId,
    /// The object's length in bytes.
    pub bytes: u64,
    /// What stands for its group, which is leased with it; a lease of one lets no member be evicted.
    pub group: Option<VersionId>,
}

/// What stands for a group in a table of leases: a version that no object has, since no node has the number 0. Two groups have
/// the same once in 2^96, and are then leased together.
#[must_use]
pub fn group_lease(tenant: TenantId, group: &str) -> VersionId {
    let (one, other) = (KeyHash::of(tenant, group.as_bytes()), KeyHash::of(TenantId(!tenant.0), group.as_bytes()));
    #[expect(clippy::cast_possible_truncation, reason = "any 32 bits of it")]
    let incarnation = Incarnation(other.0 as u32);
    VersionId { node: NodeId(0), incarnation, sequence: one.0 }
}

/// How asking for a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseOutcome {
    /// No eviction for this long from `now`; at least as long as was asked, up to [`MAX_LEASE`].
    Granted(Duration),
    /// The tenant has its share leased already; an existing lease ends when it would have.
    TenantFull,
    /// The table is full.
    TableFull,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    tenant: TenantId,
    bytes: u64,
    until: BootTime,
    holders: u32,
    /// Where its end is looked for.
    listed: Second,
}

/// Seconds of [`BootTime`], rounded up.
type Second = u64;

fn second_of(time: BootTime) -> Second {
    time.0.as_secs() + u64::from(time.0.subsec_nanos() > 0)
}

/// Only looked up, and walked to be checked.
#[expect(clippy::disallowed_types, reason = "its order is in no answer")]
type ByVersion = std::collections::HashMap<VersionId, Lease>;

/// The table. See the module's documentation.
#[derive(Debug)]
pub struct Leases {
    limits: LeaseLimits,
    by_version: ByVersion,
    /// Of each lease one entry in the second where it is listed, and old ones of leases that are gone.
    by_end: BTreeMap<Second, Vec<VersionId>>,
    /// Entries of it.
    listed: usize,
    leased_bytes: BTreeMap<TenantId, u64>,
}

impl Leases {
    /// An empty table.
    #[must_use]
    pub fn new(limits: LeaseLimits) -> Self {
        Self { limits, by_version: ByVersion::new(), by_end: BTreeMap::new(), listed: 0, leased_bytes: BTreeMap::new() }
    }

    /// Says that nodes came or went. Leases stay; above the new bound they are not renewed.
    pub fn set_capacity(&mut self, capacity_bytes: u64) {
        self.limits.capacity_bytes = capacity_bytes;
    }

    /// How many leases there are, expired ones included until they are swept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_version.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_version.is_empty()
    }

    /// Bytes that a tenant has leased.
    #[must_use]
    pub fn leased_bytes(&self, tenant: TenantId) -> u64 {
        self.leased_bytes.get(&tenant).copied().unwrap_or(0)
    }

    /// A lease for one more holder. One that is there is only ever made longer.
    pub fn grant(&mut self, now: BootTime, what: Leased, duration: Duration) -> LeaseOutcome {
        self.ask(now, what, duration, 1)
    }

    /// Makes a holder's lease longer, or grants it anew if it is over.
    pub fn renew(&mut self, now: BootTime, what: Leased, duration: Duration) -> LeaseOutcome {
        self.ask(now, what, duration, 0)
    }

    fn ask(&mut self, now: BootTime, what: Leased, duration: Duration, holders: u32) -> LeaseOutcome {
        let until = self.sweep(now, what.version, duration);
        let (leased, bound) = (self.leased_bytes(what.tenant), self.limits.tenant_bytes());
        if let Some(lease) = self.by_version.get_mut(&what.version) {
            if leased > bound {
                return LeaseOutcome::TenantFull;
            }
            lease.holders = lease.holders.saturating_add(holders);
            return LeaseOutcome::Granted(self.lengthen(what.version, until).0.saturating_sub(now.0));
        }
        if leased.saturating_add(what.bytes) > bound {
            return LeaseOutcome::TenantFull;
        }
        if !self.has_room() {
            return LeaseOutcome::TableFull;
        }
        self.insert(what, until);
        LeaseOutcome::Granted(until.0.saturating_sub(now.0))
    }

    /// Notes a lease that another leader has granted, within its bounds; only the room for leases is a bound here.
    pub fn take_over(&mut self, now: BootTime, what: Leased, left: Duration) {
        let until = self.sweep(now, what.version, left);
        if self.by_version.contains_key(&what.version) {
            self.lengthen(what.version, until);
        } else if self.has_room() && self.leased_bytes(what.tenant).checked_add(what.bytes).is_some() {
            self.insert(what, until);
        }
    }

    /// What is over goes; when a lease of so long from now ends.
    fn sweep(&mut self, now: BootTime, version: VersionId, duration: Duration) -> BootTime {
        self.expire(now, SWEEP);
        if self.remaining(now, version).is_none() {
            self.end(version);
        }
        BootTime(now.0.saturating_add(duration.min(MAX_LEASE)))
    }

    /// Leases that are given back and granted again at once leave entries behind: those are bounded too.
    fn has_room(&self) -> bool {
        self.by_version.len() < self.limits.entries && self.listed < 4 * self.limits.entries
    }

    fn list(&mut self, second: Second, version: VersionId) {
        self.by_end.entry(second).or_default().push(version);
        self.listed += 1;
    }

    fn insert(&mut self, what: Leased, until: BootTime) {
        let listed = second_of(until);
        let lease = Lease { tenant: what.tenant, bytes: what.bytes, until, holders: 1, listed };
        self.by_version.insert(what.version, lease);
        self.list(listed, what.version);
        *self.leased_bytes.entry(what.tenant).or_default() += what.bytes;
    }

    /// Until when it lasts now; never shorter.
    fn lengthen(&mut self, version: VersionId, until: BootTime) -> BootTime {
        let Some(lease) = self.by_version.get_mut(&version) else { return until };
        lease.until = lease.until.max(until);
        lease.until
    }

    /// The lease of a version, and how long it still lasts.
    #[must_use]
    pub fn leased(&self, now: BootTime, version: VersionId) -> Option<(Leased, Duration)> {
        let left = self.remaining(now, version)?;
        let lease = self.by_version.get(&version)?;
        Some((Leased { tenant: lease.tenant, version, bytes: lease.bytes, group: None }, left))
    }

    /// One holder needs its lease no longer; it ends with the last one. False if there was none.
    pub fn release(&mut self, now: BootTime, version: VersionId) -> bool {
        if self.remaining(now, version).is_none() {
            return false;
        }
        let Some(lease) = self.by_version.get_mut(&version) else { return false };
        lease.holders -= 1;
        if lease.holders == 0 {
            self.end(version);
        }
        true
    }

    /// How long the version is still leased; `None`: it may be evicted.
    #[must_use]
    pub fn remaining(&self, now: BootTime, version: VersionId) -> Option<Duration> {
        let lease = self.by_version.get(&version)?;
        lease.until.0.checked_sub(now.0).filter(|rest| !rest.is_zero())
    }

    /// Whether the version is leased.
    #[must_use]
    pub fn is_leased(&self, now: BootTime, version: VersionId) -> bool {
        self.remaining(now, version).is_some()
    }

    /// Ends a lease whatever its holders: the version was removed or replaced.
    pub fn end(&mut self, version: VersionId) {
        let Some(lease) = self.by_version.remove(&version) else { return };
        if let Some(leased) = self.leased_bytes.get_mut(&lease.tenant) {
            *leased -= lease.bytes;
            if *leased == 0 {
                self.leased_bytes.remove(&lease.tenant);
            }
        }
    }

    /// Looks at the ends of at most `limit` leases whose second is over; says of how many. Those that were made longer are
    /// listed anew.
    pub fn expire(&mut self, now: BootTime, limit: usize) -> usize {
        for swept in 0..limit {
            let Some(mut first) =
                self.by_end.first_entry().filter(|first| BootTime(Duration::from_secs(*first.key())) <= now)
            else {
                return swept;
            };
            let (second, version) = (*first.key(), first.get_mut().pop());
            if first.get().is_empty() {
                first.remove();
            }
            let Some(version) = version else { continue };
            self.listed -= 1;
            match self.by_version.get_mut(&version) {
                // The entry of an earlier lease of that version.
                Some(lease) if lease.listed != second => {}
                Some(lease) if lease.until > now => {
                    lease.listed = second_of(lease.until);
                    let listed = lease.listed;
                    self.list(listed, version);
                }
                Some(_) => self.end(version),
                None => {}
            }
        }
        limit
    }

    /// Forgets all: leadership ended.
    pub fn clear(&mut self) {
        *self = Self::new(self.limits);
    }

    /// Asserts the invariants; walks everything.
    ///
    /// # Panics
    /// If one is broken.
    pub fn validate(&self) {
        assert_eq!(self.by_end.values().map(Vec::len).sum::<usize>(), self.listed, "listed ends");
        let mut sums: BTreeMap<TenantId, u64> = BTreeMap::new();
        for (&version, lease) in &self.by_version {
            assert!(lease.holders >= 1, "{version:?} has no holder");
            let listed = self.by_end.get(&lease.listed).is_some_and(|ends| ends.contains(&version));
            assert!(listed && lease.listed <= second_of(lease.until), "{version:?} has no end");
            *sums.entry(lease.tenant).or_default() += lease.bytes;
        }
        sums.retain(|_, bytes| *bytes > 0);
        let leased: BTreeMap<_, _> = self
            .leased_bytes
            .iter()
            .filter(|(_, bytes)| **bytes > 0)
            .map(|(&tenant, &bytes)| (tenant, bytes))
            .collect();
        assert_eq!(leased, sums, "leased bytes of tenants");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(seconds))
    }

    fn object(sequence: u64, bytes: u64) -> Leased {
        let version = VersionId { node: NodeId(1), incarnation: Incarnation(1), sequence };
        Leased { tenant: TenantId::DEFAULT, version, bytes, group: None }
    }

    fn table(entries: usize) -> Leases {
        Leases::new(LeaseLimits { entries, capacity_bytes: 1000, tenant_percent: 50 })
    }

    #[test]
    fn an_expired_lease_allows_eviction() {
        let mut leases = table(10);
        let one = object(1, 10);
        assert_eq!(leases.grant(at(100), one, 5 * SECOND), LeaseOutcome::Granted(5 * SECOND));
        assert!(leases.is_leased(at(104), one.version));
        assert!(!leases.is_leased(at(105), one.version));
        assert_eq!(leases.expire(at(105), 100), 1);
        assert_eq!((leases.len(), leases.leased_bytes(one.tenant)), (0, 0));
    }

    #[test]
    fn a_shorter_lease_never_shortens_a_longer_one() {
        let mut leases = table(10);
        let one = object(1, 10);
        leases.grant(at(0), one, 30 * SECOND);
        assert_eq!(leases.renew(at(10), one, 5 * SECOND), LeaseOutcome::Granted(20 * SECOND));
        assert_eq!(leases.renew(at(10), one, 40 * SECOND), LeaseOutcome::Granted(40 * SECOND));
        leases.validate();
    }

    #[test]
    fn a_lease_lasts_a_minute_at_most() {
        assert_eq!(table(1).grant(at(0), object(1, 1), Duration::MAX), LeaseOutcome::Granted(MAX_LEASE));
    }

    #[test]
    fn a_lease_ends_with_its_last_holder() {
        let mut leases = table(10);
        let one = object(1, 10);
        leases.grant(at(0), one, 30 * SECOND);
        leases.grant(at(0), one, 30 * SECOND);
        assert!(leases.release(at(1), one.version));
        assert!(leases.is_leased(at(1), one.version));
        assert!(leases.release(at(1), one.version));
        assert!(!leases.is_leased(at(1), one.version));
        assert!(!leases.release(at(1), one.version));
    }

    #[test]
    fn a_renewal_adds_no_holder() {
        let mut leases = table(10);
        let one = object(1, 10);
        leases.grant(at(0), one, 30 * SECOND);
        leases.renew(at(1), one, 30 * SECOND);
        leases.release(at(2), one.version);
        assert!(!leases.is_leased(at(2), one.version));
    }

    /// B027: probes that lease whatever they find.
    #[test]
    fn existence_probes_protect_at_most_half_of_the_pool() {
        let mut leases = table(10_000);
        let mut refused = 0;
        for second in 0..60 {
            for sequence in 0..1000 {
                refused +=
                    u64::from(leases.grant(at(second), object(sequence, 1), 5 * SECOND) == LeaseOutcome::TenantFull);
            }
            assert_eq!(leases.leased_bytes(TenantId::DEFAULT), 500);
            let evictable = (0..1000).filter(|&sequence| !leases.is_leased(at(second), object(sequence, 1).version));
            assert_eq!(evictable.count(), 500);
        }
        assert_eq!(refused, 60 * 500);
        leases.validate();
    }

    #[test]
    fn one_tenant_at_its_bound_leaves_others_theirs() {
        let mut leases = table(10);
        assert_eq!(leases.grant(at(0), object(1, 501), SECOND), LeaseOutcome::TenantFull);
        leases.grant(at(0), object(2, 500), SECOND);
        let other = Leased { tenant: TenantId(1), ..object(3, 500) };
        assert_eq!(leases.grant(at(0), other, SECOND), LeaseOutcome::Granted(SECOND));
    }

    #[test]
    fn above_its_bound_a_tenant_renews_nothing() {
        let mut leases = table(10);
        let one = object(1, 400);
        leases.grant(at(0), one, 5 * SECOND);
        leases.set_capacity(500);
        assert_eq!(leases.renew(at(1), one, 30 * SECOND), LeaseOutcome::TenantFull);
        assert_eq!(leases.remaining(at(1), one.version), Some(4 * SECOND), "the lease that it has stays");
    }

    #[test]
    fn a_full_table_refuses_until_leases_end() {
        let mut leases = table(2);
        leases.grant(at(0), object(1, 1), SECOND);
        leases.grant(at(0), object(2, 1), SECOND);
        assert_eq!(leases.grant(at(0), object(3, 1), SECOND), LeaseOutcome::TableFull);
        assert_eq!(leases.grant(at(1), object(3, 1), SECOND), LeaseOutcome::Granted(SECOND));
    }

    #[test]
    fn leases_that_come_and_go_leave_little_behind() {
        let mut leases = table(10);
        let granted = (0..100).filter(|_| {
            let outcome = leases.grant(at(0), object(1, 1), 5 * SECOND);
            leases.release(at(0), object(1, 1).version);
            outcome != LeaseOutcome::TableFull
        });
        assert_eq!(granted.count(), 40);
        leases.validate();
        while leases.expire(at(5), 16) > 0 {}
        assert_eq!((leases.listed, leases.grant(at(5), object(1, 1), SECOND)), (0, LeaseOutcome::Granted(SECOND)));
    }

    /// B067: a lease ends when it was to end, however often the leader changes.
    #[test]
    fn a_lease_that_is_taken_over_counts_and_is_bound_by_the_table_only() {
        let mut leases = Leases::new(LeaseLimits { entries: 2, ..LeaseLimits::default() });
        let (one, other) = (object(1, 600), object(2, 600));
        leases.take_over(at(0), one, 30 * SECOND);
        leases.take_over(at(1), one, SECOND);
        leases.take_over(at(1), other, Duration::MAX);
        leases.take_over(at(1), object(3, 1), SECOND);
        assert_eq!(leases.leased(at(1), one.version), Some((one, 29 * SECOND)), "never shorter");
        assert_eq!(leases.remaining(at(1), other.version), Some(MAX_LEASE));
        assert_eq!(leases.leased(at(1), object(3, 1).version), None, "there is no room");
        leases.validate();
        leases.take_over(at(31), object(3, 1), SECOND);
        assert!(leases.is_leased(at(31), object(3, 1).version) && !leases.is_leased(at(31), one.version));
        let mut roomy = table(10);
        [one, object(2, u64::MAX)].into_iter().for_each(|what| roomy.take_over(at(0), what, SECOND));
        assert!(
            roomy.is_leased(at(0), one.version) && !roomy.is_leased(at(0), other.version),
            "no sum of bytes overflows"
        );
    }

    #[test]
    fn a_removed_version_has_no_lease() {
        let mut leases = table(2);
        leases.grant(at(0), object(1, 1), SECOND);
        leases.end(object(1, 1).version);
        assert!(leases.is_empty() && !leases.is_leased(at(0), object(1, 1).version));
    }

    proptest! {
        #[test]
        fn sums_and_ends_agree_after_any_steps(steps in proptest::collection::vec((0u8..7, 0u64..8, 0u64..200, 0u64..9), 1..200)) {
            let mut leases = table(5);
            let mut now = 0;
            for (kind, sequence, bytes, seconds) in steps {
                now += seconds / 4;
                let what = object(sequence, bytes);
                match kind {
                    0 | 1 => _ = leases.grant(at(now), what, Duration::from_secs(seconds)),
                    2 => _ = leases.renew(at(now), what, Duration::from_secs(seconds)),
                    3 => _ = leases.release(at(now), what.version),
                    4 => leases.end(what.version),
                    // What another leader has granted is not within these bounds.
                    5 if leases.leased_bytes(TenantId::DEFAULT) + bytes <= 500 => {
                        leases.take_over(at(now), what, Duration::from_secs(seconds));
                    }
                    _ => _ = leases.expire(at(now), 2),
                }
                leases.validate();
                prop_assert!(leases.leased_bytes(TenantId::DEFAULT) <= 500 && leases.len() <= 5);
            }
        }
    }
}
