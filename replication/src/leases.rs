//! The leader's leases, and what keeps them apart from forgetting.
//!
//! A lease promises that its version is not evicted before it ends. A forget is checked before it is logged and takes
//! effect later; a version that is being forgotten in between gets no lease. So `leased and forgotten` never holds for one
//! version: whoever comes second is refused.
//!
//! Locks: callers may hold the state's read lock; nothing is locked from in here.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use tidepool_metadata::lease::{BootTime, LeaseLimits, LeaseOutcome, Leased, Leases};
use tidepool_metadata::{TenantId, Term, VersionId};

/// The leader's table; volatile.
#[derive(Debug)]
pub(crate) struct LeaderLeases(Mutex<Table>);

#[derive(Debug)]
struct Table {
    leases: Leases,
    /// Versions that got a lease, or a longer one, of which the other voters have not heard; `None`: nobody is told.
    news: Option<Vec<VersionId>>,
    /// Versions with a forget under way, and how many.
    forgetting: BTreeMap<VersionId, usize>,
    /// When the capacity was looked up last.
    capacity_at: Option<BootTime>,
    /// The term that was seen last, until when nothing is evicted in it, and until when it will not be so again.
    term: Term,
    quiet_until: BootTime,
    quiet_again: BootTime,
}

/// How long a new leader lets nothing be evicted: it does not know which leases its predecessor gave. A few elections.
const QUIET: Duration = Duration::from_millis(600);
/// Not more often than this, however often leaders change.
const QUIET_PERIOD: Duration = Duration::from_secs(10);
/// Leases of which the other voters wait to hear; of more they don't, and a failover costs those: 40,000 a second, since each
/// voter notes them as the leader did.
const MOST_NEWS: usize = 4 << 10;
/// How old the known capacity may be: nodes come and go.
const CAPACITY_AGE: Duration = Duration::from_secs(1);

/// `CLOCK_BOOTTIME`: a suspended host wakes up with its leases expired.
fn now() -> BootTime {
    let time = clock_gettime(ClockId::Boottime);
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    BootTime(Duration::new(seconds.unwrap_or(0), nanoseconds.unwrap_or(0)))
}

impl LeaderLeases {
    pub(crate) fn new() -> Self {
        let leases = Leases::new(LeaseLimits::default());
        Self(Mutex::new(Table {
            leases,
            news: None,
            forgetting: BTreeMap::new(),
            capacity_at: None,
            term: Term::default(),
            quiet_until: BootTime::default(),
            quiet_again: BootTime::default(),
        }))
    }

    /// Whether this leader, in `term`, lets nothing be evicted yet. The first term that is seen is no failover.
    pub(crate) fn is_quiet(&self, term: Term) -> bool {
        self.is_quiet_at(now(), term)
    }

    fn is_quiet_at(&self, now: BootTime, term: Term) -> bool {
        let mut table = self.0.lock();
        if table.term != term {
            if table.term != Term::default() && now >= table.quiet_again {
                table.quiet_until = BootTime(now.0 + QUIET);
                table.quiet_again = BootTime(now.0 + QUIET_PERIOD);
            }
            table.term = term;
        }
        now < table.quiet_until
    }

    /// What all nodes lend together, of which one tenant may lease a share.
    pub(crate) fn set_capacity(&self, bytes: u64) {
        let mut table = self.0.lock();
        table.capacity_at = Some(now());
        table.leases.set_capacity(bytes);
    }

    /// Whether the capacity is to be looked up.
    pub(crate) fn wants_capacity(&self) -> bool {
        self.0.lock().capacity_at.is_none_or(|at| at.0 + CAPACITY_AGE < now().0)
    }

    /// Grants leases where they are to be had; the others may be evicted, and can be read all the same.
    pub(crate) fn grant(&self, versions: impl Iterator<Item = Leased>, duration: Duration) {
        let now = now();
        let mut table = self.0.lock();
        for what in versions {
            if !table.is_forgetting(what) {
                table.leases.grant(now, what, duration);
                table.note(what.version);
                if let Some(group) = group_of(what) {
                    table.leases.grant(now, group, duration);
                    table.note(group.version);
                }
            }
        }
    }

    /// Renews, and answers how long each lease lasts from now; zero if there is none.
    pub(crate) fn renew(&self, versions: &[Option<Leased>], duration: Duration) -> Vec<Duration> {
        let now = now();
        let mut table = self.0.lock();
        let mut renew = |what: Leased| {
            if table.is_forgetting(what) {
                return Duration::ZERO;
            }
            if let Some(group) = group_of(what) {
                table.leases.renew(now, group, duration);
                table.note(group.version);
            }
            match table.leases.renew(now, what, duration) {
                LeaseOutcome::Granted(left) => {
                    table.note(what.version);
                    left
                }
                LeaseOutcome::TenantFull | LeaseOutcome::TableFull => {
                    table.leases.remaining(now, what.version).unwrap_or_default()
                }
            }
        };
        versions.iter().map(|what| what.map_or(Duration::ZERO, &mut renew)).collect()
    }

    /// Ends one holder's lease on each; false if there was none.
    pub(crate) fn release(&self, versions: &[Option<Leased>]) -> Vec<bool> {
        let now = now();
        let mut table = self.0.lock();
        let mut release = |what: Leased| {
            let was_leased = table.leases.release(now, what.version);
            if let Some(group) = what.group.filter(|_| was_leased) {
                table.leases.release(now, group);
            }
            was_leased
        };
        versions.iter().map(|what| what.is_some_and(&mut release)).collect()
    }

    /// How many leases there are, and the bytes of each tenant.
    pub(crate) fn counts(&self, tenants: &[TenantId]) -> (usize, Vec<(TenantId, u64)>) {
        let table = self.0.lock();
        let bytes = |&tenant: &TenantId| (tenant, table.leases.leased_bytes(tenant));
        (table.leases.len(), tenants.iter().map(bytes).filter(|(_, bytes)| *bytes > 0).collect())
    }

    pub(crate) fn left(&self, version: VersionId) -> Duration {
        self.0.lock().leases.remaining(now(), version).unwrap_or_default()
    }

    /// Forgets the leases of a version that is gone.
    pub(crate) fn end(&self, version: VersionId) {
        self.0.lock().leases.end(version);
    }

    /// Says of each version, with what stands for its group if that goes with it, whether it may be forgotten; those, and
    /// other members, get no lease until [`LeaderLeases::end_forget`].
    pub(crate) fn begin_forget(&self, what: impl Iterator<Item = (VersionId, Option<VersionId>)>) -> Vec<bool> {
        let now = now();
        let mut table = self.0.lock();
        let mut begin = |(version, group): (VersionId, Option<VersionId>)| {
            let both = || std::iter::once(version).chain(group);
            let free = !both().any(|version| table.leases.is_leased(now, version));
            if free {
                both().for_each(|version| *table.forgetting.entry(version).or_default() += 1);
            }
            free
        };
        what.map(&mut begin).collect()
    }

    /// What was granted since the last time, and how long it lasts; from the first time on, if there `are_listeners`.
    pub(crate) fn news(&self, are_listeners: bool) -> Vec<(Leased, Duration)> {
        let now = now();
        let mut table = self.0.lock();
        let next = are_listeners.then(Vec::new);
        let Some(mut versions) = std::mem::replace(&mut table.news, next) else { return Vec::new() };
        versions.sort_unstable();
        versions.dedup();
        versions.into_iter().filter_map(|version| table.leases.leased(now, version)).collect()
    }

    /// Notes what the leader has granted: this voter may have to keep that promise.
    pub(crate) fn take_over(&self, granted: Vec<(Leased, Duration)>) {
        let now = now();
        let mut table = self.0.lock();
        for (what, left) in granted {
            table.leases.take_over(now, what, left);
        }
    }

    pub(crate) fn end_forget(&self, what: impl Iterator<Item = (VersionId, Option<VersionId>)>) {
        let mut table = self.0.lock();
        for version in what.flat_map(|(version, group)| std::iter::once(version).chain(group)) {
            if let Some(count) = table.forgetting.get_mut(&version) {
                *count -= 1;
                if *count == 0 {
                    table.forgetting.remove(&version);
                }
            }
        }
    }
}

/// The lease that protects the whole group: of no bytes, since its members are there already.
fn group_of(what: Leased) -> Option<Leased> {
    what.group.map(|version| Leased { version, bytes: 0, group: None, ..what })
}

impl Table {
    fn is_forgetting(&self, what: Leased) -> bool {
        std::iter::once(what.version).chain(what.group).any(|version| self.forgetting.contains_key(&version))
    }

    fn note(&mut self, version: VersionId) {
        if let Some(news) = self.news.as_mut().filter(|news| news.len() < MOST_NEWS) {
            news.push(version);
        }
    }
}

#[cfg(test)]
mod tests {
    use tidepool_metadata::{Incarnation, NodeId};

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn object(sequence: u64) -> Leased {
        let version = VersionId { node: NodeId(1), incarnation: Incarnation(1), sequence };
        Leased { tenant: TenantId::DEFAULT, version, bytes: 10, group: None }
    }

    #[test]
    fn a_new_leader_is_quiet_for_a_moment_however_often_leaders_change() {
        let leases = LeaderLeases::new();
        let at = |millis| BootTime(Duration::from_millis(1_000_000 + millis));
        assert!(!leases.is_quiet_at(at(0), Term(3)), "the first term is no failover");
        assert!(leases.is_quiet_at(at(10), Term(4)));
        assert!(leases.is_quiet_at(at(600), Term(4)));
        assert!(!leases.is_quiet_at(at(611), Term(4)));
        let quiet = (0..100).filter(|step| leases.is_quiet_at(at(700 + step * 90), Term(5 + step))).count();
        assert_eq!(quiet, 0, "no second time within ten seconds");
        assert!(leases.is_quiet_at(at(10_011), Term(200)));
    }

    #[test]
    fn a_voter_that_heard_of_leases_keeps_them_when_it_leads() {
        let (leader, voter) = (LeaderLeases::new(), LeaderLeases::new());
        leader.set_capacity(1000);
        let (one, other, released) = (object(1), object(2), object(3));
        leader.grant(std::iter::once(one), MINUTE);
        assert!(leader.news(true).is_empty(), "nobody listened");
        leader.grant([other, released, other].into_iter(), MINUTE);
        leader.renew(&[Some(one)], MINUTE);
        leader.release(&[Some(released)]);
        let news = leader.news(true);
        assert_eq!(news.iter().map(|(what, _)| *what).collect::<Vec<_>>(), [one, other]);
        voter.take_over(news);
        let may = voter.begin_forget([one, other, released].map(alone).into_iter());
        assert_eq!(may, [false, false, true]);
        assert!(leader.news(false).is_empty());
        leader.grant(std::iter::once(other), MINUTE);
        assert!(leader.news(false).is_empty(), "nothing is kept for nobody");
    }

    fn alone(what: Leased) -> (VersionId, Option<VersionId>) {
        (what.version, None)
    }

    #[test]
    fn a_lease_of_one_member_keeps_its_group_also_with_another_leader() {
        let (leader, voter) = (LeaderLeases::new(), LeaderLeases::new());
        leader.set_capacity(1000);
        let group = Some(tidepool_metadata::lease::group_lease(TenantId::DEFAULT, "g"));
        let (one, other) = (Leased { group, ..object(1) }, Leased { group, ..object(2) });
        leader.news(true);
        leader.grant(std::iter::once(one), MINUTE);
        voter.take_over(leader.news(true));
        for leases in [&leader, &voter] {
            assert_eq!(leases.begin_forget([(other.version, group)].into_iter()), [false]);
            assert_eq!(leases.begin_forget([alone(other)].into_iter()), [true], "without its group");
            leases.end_forget([alone(other)].into_iter());
        }
        assert_eq!(leader.counts(&[TenantId::DEFAULT]).1, [(TenantId::DEFAULT, 10)], "its bytes count once");
        assert_eq!(leader.release(&[Some(one)]), [true]);
        assert_eq!(leader.begin_forget([(other.version, group)].into_iter()), [true]);
        // While it goes no member gets a lease.
        assert_eq!(leader.renew(&[Some(one)], MINUTE), [Duration::ZERO]);
        leader.end_forget([(other.version, group)].into_iter());
        assert_eq!(leader.renew(&[Some(one)], MINUTE), [MINUTE]);
        assert_eq!(leader.begin_forget([(other.version, group)].into_iter()), [false]);
    }

    #[test]
    fn whoever_comes_second_is_refused() {
        let leases = LeaderLeases::new();
        leases.set_capacity(1000);
        let (leased, forgotten) = (object(1), object(2));
        leases.grant(std::iter::once(leased), MINUTE);
        let may = leases.begin_forget([leased, forgotten].map(alone).into_iter());
        assert_eq!(may, [false, true]);
        leases.grant(std::iter::once(forgotten), MINUTE);
        assert_eq!(leases.left(forgotten.version), Duration::ZERO);
        assert_eq!(leases.renew(&[Some(forgotten)], MINUTE), [Duration::ZERO]);
        // Two nodes forget their copies of one version; the second is still under way.
        leases.begin_forget(std::iter::once(alone(forgotten)));
        leases.end_forget(std::iter::once(alone(forgotten)));
        assert_eq!(leases.renew(&[Some(forgotten)], MINUTE), [Duration::ZERO]);
        leases.end_forget(std::iter::once(alone(forgotten)));
        assert!(leases.renew(&[Some(forgotten)], MINUTE)[0] > Duration::ZERO);
        assert_eq!(leases.release(&[Some(forgotten), None]), [true, false]);
    }
}
