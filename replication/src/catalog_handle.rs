//! The catalog as a node sees it: commands, questions and leases, wherever the leader is.
//!
//! Commands are encoded on the caller's thread and answered when they are durable and applied. Questions are answered on
//! the caller's thread from this voter's copy. Leases are the leader's own: a lease-granting read goes to it, and it refuses
//! to log a forget of what is leased.
//!
//! Failure: [`CatalogError`]; after some of its kinds certainly nothing was logged, and what a command was to announce
//! may be freed.

use std::num::NonZero;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidepool_metadata::catalog::{
    Answer, BucketPage, Catalog, Command, EntryContext, ForgetMode, ForgetOutcome, LoadError, Located,
    MAX_COMMAND_ITEMS, Outcome, Presence, Query, QuotaRoom, RemoveOutcome, ReplicaName, Rows, TypePolicy,
};
use tidepool_metadata::lease::{Leased, group_lease};
use tidepool_metadata::{DataType, LogIndex, LogTime, NodeId, ObjectKey, ReplicaId, TenantId, VersionId};
use tokio::sync::watch;

use crate::consensus::{
    Answerer, Change, Consensus, Group, GroupConfig, GroupLimits, GroupStatus, Lane, MemberChange, MemberId,
    NoTransport, Outlives, Read, StateMachine, Transport,
};
use crate::error::{CatalogError, GroupError};
use crate::leases::LeaderLeases;
use crate::question::{LeaderAnswer, Question};

/// Bytes of names in one command to forget: far below the bound of a command, with room for many in one entry.
const FORGET_BYTES: usize = 64 << 10;
/// Keys of one question to the leader: the longest fit a message.
pub(crate) const QUESTION_KEYS: usize = 2048;
/// Names of one.
const QUESTION_NAMES: usize = 1024;
/// What a name needs beside its key, at most.
const NAME_BYTES: usize = 32;

/// How long a caller who allows it waits for the leader to confirm a miss: some round trips.
const CONFIRM_WITHIN: Duration = Duration::from_millis(50);

/// A replica to forget, and the version that it is a copy of.
pub type ForgetName = (TenantId, ObjectKey, VersionId, ReplicaId);

/// How forgetting a replica ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgotten {
    /// It does not count any more, or did not before: free it when its holds end.
    Yes,
    /// The version is leased: keep it, ask again later. Nothing was logged.
    Leased,
    /// It is the last copy of a pinned object: keep it.
    Pinned,
    /// Too few other copies remain: keep it.
    StillNeeded,
}

/// Why rows or commands are none of the catalog's.
#[derive(Debug, thiserror::Error)]
pub enum CatalogMachineError {
    /// The image.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A command.
    #[error(transparent)]
    Decode(#[from] tidepool_metadata::catalog::DecodeError),
}

impl StateMachine for Catalog {
    type Command = Command;
    type Outcome = Outcome;
    type Error = CatalogMachineError;

    fn empty() -> Self {
        Self::new()
    }

    fn load(rows: &impl Rows, threads: NonZero<usize>) -> Result<Self, Self::Error> {
        Ok(Self::load(rows, threads)?)
    }

    fn decode(bytes: &[u8]) -> Result<Command, Self::Error> {
        Ok(Command::decode(bytes)?)
    }

    fn apply(&mut self, at: EntryContext, command: &Command) -> Outcome {
        Self::apply(self, at, command)
    }

    fn take_changes(&mut self) -> Vec<Change> {
        Self::take_changes(self)
    }
}

impl Group {
    /// Opens the catalog in the folder of `config`, or begins one, with the default limits. Blocks while the image is
    /// loaded.
    ///
    /// # Errors
    /// [`CatalogError::Failed`] with the cause: the folder is in use, foreign, damaged or of another version.
    pub fn start(config: GroupConfig) -> Result<(Self, CatalogHandle), CatalogError> {
        Self::start_with(config, Arc::new(NoTransport))
    }

    /// As [`Group::start`], of a member whose messages leave through `transport` and come in by [`CatalogHandle::receive`].
    ///
    /// # Errors
    /// As [`Group::start`].
    pub fn start_with(
        config: GroupConfig,
        transport: Arc<dyn Transport>,
    ) -> Result<(Self, CatalogHandle), CatalogError> {
        Self::start_limited(config, GroupLimits::default(), transport)
            .map_err(|cause| CatalogError::Failed { cause: Arc::new(cause), proposed: false })
    }

    /// As [`Group::start`] with limits of one's own.
    ///
    /// # Errors
    /// [`GroupError`].
    pub fn start_limited(
        config: GroupConfig,
        limits: GroupLimits,
        transport: Arc<dyn Transport>,
    ) -> Result<(Self, CatalogHandle), GroupError> {
        let (group, consensus) = Self::open_with(config, limits, transport)?;
        let (leases, node_answerer) = (Arc::new(LeaderLeases::new()), Arc::default());
        let handle = CatalogHandle { consensus, leases, node_answerer };
        handle.answer_questions();
        Ok((group, handle))
    }
}

/// The catalog's one door. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct CatalogHandle {
    pub(crate) consensus: Consensus<Catalog>,
    pub(crate) leases: Arc<LeaderLeases>,
    /// Answers what other nodes ask this one.
    pub(crate) node_answerer: Arc<OnceLock<Answerer>>,
}

/// Where there is none.
fn misses(presence: &[Presence]) -> Vec<usize> {
    (0..presence.len()).filter(|&position| presence[position] == Presence::Missing).collect()
}

/// Those of the keys.
fn some_of<'a, K: AsRef<[u8]>>(keys: &'a [K], positions: &[usize]) -> Vec<&'a [u8]> {
    positions.iter().map(|&position| keys[position].as_ref()).collect()
}

impl CatalogHandle {
    /// Logs `command` and answers what came out where. Waiting commands of all callers share entries and synced writes.
    ///
    /// Cancel safety: dropped early it may never be logged, dropped late it is applied without an answer. No deadline of
    /// its own.
    ///
    /// # Errors
    /// [`CatalogError`]; after those that are [`CatalogError::is_unproposed`] nothing was logged.
    pub async fn propose(&self, command: Command) -> Result<(LogIndex, Outcome), CatalogError> {
        if command.is_growth()
            && let Some(free_bytes) = self.consensus.disk_shortage()
        {
            return Err(CatalogError::DiskFull { free_bytes });
        }
        let items = item_count(&command);
        let outlives = if command.is_volatile() { Outlives::Process } else { Outlives::Power };
        let mut bytes = Vec::new();
        command.encode(&mut bytes);
        // A command that cannot be read back must not get into the log: it would end every voter. Costs a decode.
        Command::decode(&bytes)?;
        drop(command);
        let (index, outcome) = self.consensus.propose(bytes, items, outlives).await?;
        self.follow(&outcome);
        Ok((index, outcome))
    }

    /// Keeps the leases in step with what was applied.
    fn follow(&self, outcome: &Outcome) {
        match outcome {
            Outcome::Node(_) => self.leases.set_capacity(self.consensus.peek(capacity_bytes)),
            Outcome::Remove(outcomes) => {
                for outcome in outcomes {
                    if let RemoveOutcome::Removed { version } = outcome {
                        self.leases.end(*version);
                    }
                }
            }
            _ => {}
        }
    }

    /// Answers `query` with the index of the last entry that the answer has seen. On the caller's thread, without a hop if
    /// this voter is far enough. Cancel-safe.
    ///
    /// # Errors
    /// [`CatalogError::Lagging`] after 5 s; [`CatalogError::Failed`], [`CatalogError::ShuttingDown`].
    pub async fn query(&self, query: Query, read: Read) -> Result<(LogIndex, Answer), CatalogError> {
        self.consensus.read(read, |catalog| catalog.query(&query)).await
    }

    /// Makes certain that everything that was acknowledged to anybody by now is applied here; see [`Read::AtLeast`].
    ///
    /// # Errors
    /// As [`CatalogHandle::query`].
    pub async fn confirm(&self) -> Result<(), CatalogError> {
        self.consensus.confirm().await
    }

    /// Whether this voter has had no leader for longer than an election takes: what needs one is better asked of another
    /// node.
    #[must_use]
    pub fn is_cut_off(&self) -> bool {
        self.consensus.is_cut_off()
    }

    /// Where objects are, one answer per key. With `lease`, readable ones get a lease as far as the tenant may have more
    /// ([`CatalogHandle::lease_left`] tells), and the read is linearizable.
    ///
    /// # Errors
    /// As [`CatalogHandle::query`].
    pub async fn locate(
        &self,
        tenant: TenantId,
        keys: Vec<ObjectKey>,
        lease: Option<Duration>,
        read: Read,
    ) -> Result<(LogIndex, Vec<Located>), CatalogError> {
        let Some(duration) = lease else { return self.locate_here(tenant, keys, None, read).await };
        if self.leads() {
            return self.locate_here(tenant, keys, lease, Read::Linearizable).await;
        }
        let granted = self.have_granted(tenant, &keys, duration).await?;
        self.locate_here(tenant, keys, None, Read::AtLeast(granted)).await
    }

    /// Has the leader grant leases; what is read at the index that this answers is as new as what it granted on.
    async fn have_granted(
        &self,
        tenant: TenantId,
        keys: &[ObjectKey],
        duration: Duration,
    ) -> Result<LogIndex, CatalogError> {
        let mut granted = LogIndex::default();
        for keys in keys.chunks(QUESTION_KEYS) {
            match self.ask(Question::Grant { tenant, duration, keys: keys.to_vec() }).await? {
                LeaderAnswer::Granted(index) => granted = granted.max(index),
                _ => return Err(CatalogError::Unexpected { expected: "a grant" }),
            }
        }
        Ok(granted)
    }

    fn grant(&self, catalog: &Catalog, versions: impl Iterator<Item = Leased>, duration: Duration) {
        if self.leases.wants_capacity() {
            self.leases.set_capacity(capacity_bytes(catalog));
        }
        self.leases.grant(versions, duration);
    }

    /// Answers from this voter's copy; a lease is this voter's to give.
    pub(crate) async fn locate_here(
        &self,
        tenant: TenantId,
        keys: Vec<ObjectKey>,
        lease: Option<Duration>,
        read: Read,
    ) -> Result<(LogIndex, Vec<Located>), CatalogError> {
        let query = Query::Locate { tenant, keys };
        let answer = |catalog: &Catalog| -> Result<Vec<Located>, CatalogError> {
            let located = located(catalog, &query)?;
            if let Some(duration) = lease {
                self.grant(catalog, located.iter().filter_map(|located| leasable(tenant, located)), duration);
            }
            Ok(located)
        };
        let (index, located) = self.consensus.read(read, answer).await?;
        Ok((index, located?))
    }

    /// Whether objects can be read, one answer per key; leases as for [`CatalogHandle::locate`].
    ///
    /// # Errors
    /// As [`CatalogHandle::query`].
    pub async fn exists_with_lease(
        &self,
        tenant: TenantId,
        keys: Vec<ObjectKey>,
        lease: Duration,
    ) -> Result<(LogIndex, Vec<Presence>), CatalogError> {
        if !self.leads() {
            let granted = self.have_granted(tenant, &keys, lease).await?;
            return self.presence(tenant, &keys, Read::AtLeast(granted)).await;
        }
        let answer = |catalog: &Catalog| {
            let found = catalog.versions(tenant, &keys);
            let readable = found.iter().filter(|(presence, _)| *presence == Presence::Present);
            self.grant(catalog, readable.filter_map(|(_, what)| *what), lease);
            found.into_iter().map(|(presence, _)| presence).collect()
        };
        self.consensus.read(Read::Linearizable, answer).await
    }

    /// As [`CatalogHandle::exists_with_lease`], without.
    ///
    /// # Errors
    /// As [`CatalogHandle::query`].
    pub async fn exists<K: AsRef<[u8]> + Sync>(
        &self,
        tenant: TenantId,
        keys: &[K],
        read: Read,
    ) -> Result<(LogIndex, Vec<Presence>), CatalogError> {
        let (index, mut presence) = self.presence(tenant, keys, read).await?;
        // A miss of a voter that may lag is confirmed before it is reported.
        let missing = misses(&presence);
        if missing.is_empty() || read == Read::Linearizable {
            return Ok((index, presence));
        }
        let again = some_of(keys, &missing);
        let (confirmed_at, confirmed) = self.presence(tenant, &again, Read::Linearizable).await?;
        for (position, confirmed) in missing.into_iter().zip(confirmed) {
            presence[position] = confirmed;
        }
        Ok((index.max(confirmed_at), presence))
    }

    /// As [`CatalogHandle::exists`], for callers who would rather go on than wait for an election: a miss that
    /// the leader does not confirm soon is `None`.
    ///
    /// # Errors
    /// As [`CatalogHandle::query`]: what this voter has may be too old even for that.
    pub async fn exists_or_unconfirmed<K: AsRef<[u8]> + Sync>(
        &self,
        tenant: TenantId,
        keys: &[K],
        read: Read,
    ) -> Result<(LogIndex, Vec<Option<Presence>>), CatalogError> {
        let (index, presence) = self.presence(tenant, keys, read).await?;
        let missing = misses(&presence);
        let mut answers: Vec<Option<Presence>> = presence.into_iter().map(Some).collect();
        if missing.is_empty() || read == Read::Linearizable {
            return Ok((index, answers));
        }
        let again = some_of(keys, &missing);
        let confirmed = Self::soon(self.presence(tenant, &again, Read::Linearizable)).await?;
        let (confirmed_at, confirmed) = match confirmed {
            Some((index, confirmed)) => (index, confirmed.into_iter().map(Some).collect()),
            None => (index, vec![None; missing.len()]),
        };
        for (position, confirmed) in missing.into_iter().zip(confirmed) {
            answers[position] = confirmed;
        }
        Ok((index.max(confirmed_at), answers))
    }

    /// What the leader `confirms`; `None` if it doesn't within 50 ms, a few round trips.
    ///
    /// # Errors
    /// Those after which asking again is useless.
    pub async fn soon<T>(confirms: impl Future<Output = Result<T, CatalogError>>) -> Result<Option<T>, CatalogError> {
        match tokio::time::timeout(CONFIRM_WITHIN, confirms).await {
            Ok(Ok(confirmed)) => Ok(Some(confirmed)),
            Ok(Err(error)) if error.is_final() => Err(error),
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    }

    async fn presence<K: AsRef<[u8]> + Sync>(
        &self,
        tenant: TenantId,
        keys: &[K],
        read: Read,
    ) -> Result<(LogIndex, Vec<Presence>), CatalogError> {
        self.consensus.read(read, |catalog| catalog.presences(tenant, keys)).await
    }

    /// The number of the tenant of that name. What this voter does not know yet, the leader is asked for.
    ///
    /// # Errors
    /// As [`CatalogHandle::query`].
    pub async fn tenant(&self, name: &str) -> Result<Option<TenantId>, CatalogError> {
        for read in [Read::Local, Read::Linearizable] {
            if let (_, Some(tenant)) = self.consensus.read(read, |catalog| catalog.tenant_named(name)).await? {
                return Ok(Some(tenant));
            }
        }
        Ok(None)
    }

    /// What the tenant may store.
    ///
    /// # Errors
    /// As [`CatalogHandle::query`].
    pub async fn quota_room(&self, tenant: TenantId, read: Read) -> Result<QuotaRoom, CatalogError> {
        Ok(self.consensus.read(read, |catalog| catalog.quota_room(tenant)).await?.1)
    }

    /// What becomes of objects of a type, and the bytes of all their copies, as this voter knows it.
    #[must_use]
    pub fn type_use(&self, data_type: DataType) -> (TypePolicy, u64) {
        self.consensus.peek(|catalog| catalog.type_use(data_type))
    }

    /// The copies on a node of the next `examined` objects of a tenant, by key behind `after`, as this voter knows them.
    ///
    /// # Errors
    /// As [`CatalogHandle::query`].
    pub async fn held_of(
        &self,
        node: NodeId,
        tenant: TenantId,
        after: Option<&ObjectKey>,
        examined: usize,
    ) -> Result<BucketPage, CatalogError> {
        let held = |catalog: &Catalog| catalog.held_of(node, tenant, after, examined);
        Ok(self.consensus.read(Read::Local, held).await?.1)
    }

    /// Renews leases on the current versions of `keys`; answers how long each lasts from now, zero where there is none to
    /// be had.
    ///
    /// # Errors
    /// As [`CatalogHandle::query`].
    pub async fn renew_leases(
        &self,
        tenant: TenantId,
        keys: Vec<ObjectKey>,
        duration: Duration,
    ) -> Result<Vec<Duration>, CatalogError> {
        if self.leads() {
            let versions = self.current(tenant, keys).await?;
            return Ok(self.leases.renew(&versions, duration));
        }
        let mut left = Vec::with_capacity(keys.len());
        for keys in keys.chunks(QUESTION_KEYS) {
            match self.ask(Question::Renew { tenant, duration, keys: keys.to_vec() }).await? {
                LeaderAnswer::Durations(durations) if durations.len() == keys.len() => left.extend(durations),
                _ => return Err(CatalogError::Unexpected { expected: "renewals" }),
            }
        }
        Ok(left)
    }

    /// Gives leases on the current versions of `keys` back; answers where there was one.
    ///
    /// # Errors
    /// As [`CatalogHandle::query`].
    pub async fn release_leases(&self, tenant: TenantId, keys: Vec<ObjectKey>) -> Result<Vec<bool>, CatalogError> {
        if self.leads() {
            let versions = self.current(tenant, keys).await?;
            return Ok(self.leases.release(&versions));
        }
        let mut released = Vec::with_capacity(keys.len());
        for keys in keys.chunks(QUESTION_KEYS) {
            match self.ask(Question::Release { tenant, keys: keys.to_vec() }).await? {
                LeaderAnswer::Released(answers) if answers.len() == keys.len() => released.extend(answers),
                _ => return Err(CatalogError::Unexpected { expected: "releases" }),
            }
        }
        Ok(released)
    }

    pub(crate) async fn current(
        &self,
        tenant: TenantId,
        keys: Vec<ObjectKey>,
    ) -> Result<Vec<Option<Leased>>, CatalogError> {
        let versions = |catalog: &Catalog| catalog.versions(tenant, &keys);
        let (_, versions) = self.consensus.read(Read::Linearizable, versions).await?;
        Ok(versions.into_iter().map(|(_, what)| what).collect())
    }

    /// How long the current version of `key` is leased from now; zero if it is not, or the leader does not say.
    pub async fn lease_left(&self, tenant: TenantId, key: &ObjectKey) -> Duration {
        if !self.leads() {
            return match self.ask(Question::Left { tenant, key: key.clone() }).await {
                Ok(LeaderAnswer::Durations(left)) => left.first().copied().unwrap_or_default(),
                _ => Duration::ZERO,
            };
        }
        let versions = self.consensus.peek(|catalog| catalog.versions(tenant, &[key]));
        let what = versions.into_iter().find_map(|(_, what)| what);
        what.map_or(Duration::ZERO, |what| self.leases.left(what.version))
    }

    /// Takes replicas out of the catalog, one answer per name in order. What is leased is refused before anything is
    /// logged, and so is the last copy of a pinned object.
    ///
    /// Cancel safety: once it has begun it goes on without its caller.
    ///
    /// # Errors
    /// As [`CatalogHandle::propose`]; some of the replicas may be forgotten then: ask again.
    pub async fn forget(&self, names: Vec<ForgetName>, mode: ForgetMode) -> Result<Vec<Forgotten>, CatalogError> {
        if mode == ForgetMode::Lost {
            return self.forget_lost(names).await;
        }
        if self.leads() {
            return Ok(self.forget_here(names, mode).await?.1);
        }
        let mut forgotten = Vec::with_capacity(names.len());
        for names in names.chunks(QUESTION_NAMES) {
            match self.ask(Question::Forget { mode, names: names.to_vec() }).await? {
                LeaderAnswer::Forgotten(_, outcomes) if outcomes.len() == names.len() => forgotten.extend(outcomes),
                _ => return Err(CatalogError::Unexpected { expected: "forget" }),
            }
        }
        Ok(forgotten)
    }

    /// What is gone is no matter of leases: any member logs it.
    async fn forget_lost(&self, names: Vec<ForgetName>) -> Result<Vec<Forgotten>, CatalogError> {
        let (mut answers, all): (_, Vec<usize>) = (vec![None; names.len()], (0..names.len()).collect());
        self.log_forget(&names, &all, ForgetMode::Lost, &mut answers).await?;
        answers.into_iter().collect::<Option<Vec<_>>>().ok_or(CatalogError::Unexpected { expected: "forget" })
    }

    /// As the leader does it, who has the leases.
    pub(crate) async fn forget_here(
        &self,
        names: Vec<ForgetName>,
        mode: ForgetMode,
    ) -> Result<(LogIndex, Vec<Forgotten>), CatalogError> {
        if self.leases.is_quiet(self.consensus.status().term) {
            return Ok((self.applied(), vec![Forgotten::Leased; names.len()]));
        }
        let handle = self.clone();
        // A task of its own: a version stays closed to leases until its forget is settled.
        let task = tokio::spawn(async move {
            let mut answers = handle.refuse_pinned(&names, mode);
            let open: Vec<usize> = (0..names.len()).filter(|&position| answers[position].is_none()).collect();
            // A surplus copy takes no group along.
            let group = |catalog: &Catalog, (tenant, key, version, _): &ForgetName| {
                (mode == ForgetMode::EvenLast).then(|| catalog.group_lease_of(*tenant, key, *version)).flatten()
            };
            let what: Vec<_> = handle.consensus.peek(|catalog| {
                open.iter().map(|&position| (names[position].2, group(catalog, &names[position]))).collect()
            });
            let may = handle.leases.begin_forget(what.iter().copied());
            let (mut closed, mut to_log) = (Vec::new(), Vec::new());
            for ((position, what), may) in open.into_iter().zip(what).zip(may) {
                if may {
                    closed.push(what);
                    to_log.push(position);
                } else {
                    answers[position] = Some(Forgotten::Leased);
                }
            }
            let logged = handle.log_forget(&names, &to_log, mode, &mut answers).await;
            handle.leases.end_forget(closed.into_iter());
            logged?;
            let answers = answers.into_iter().collect::<Option<Vec<_>>>();
            let answers = answers.ok_or(CatalogError::Unexpected { expected: "forget" })?;
            Ok((handle.applied(), answers))
        });
        task.await.unwrap_or(Err(CatalogError::OutcomeUnknown))
    }

    /// Only saves log: the command's own check decides.
    fn refuse_pinned(&self, names: &[ForgetName], mode: ForgetMode) -> Vec<Option<Forgotten>> {
        if mode == ForgetMode::SurplusOnly {
            return vec![None; names.len()];
        }
        let is_last_pinned = |catalog: &Catalog, (tenant, key, version, _): &ForgetName| {
            let answer = catalog.query(&Query::Stat { tenant: *tenant, key: key.clone() });
            matches!(answer, Answer::Stat(Some(stat))
                if stat.listed.version == *version && stat.listed.pins > 0 && stat.listed.replicas == 1)
        };
        self.consensus.peek(|catalog| {
            names.iter().map(|name| is_last_pinned(catalog, name).then_some(Forgotten::Pinned)).collect()
        })
    }

    async fn log_forget(
        &self,
        names: &[ForgetName],
        mut positions: &[usize],
        mode: ForgetMode,
        answers: &mut [Option<Forgotten>],
    ) -> Result<(), CatalogError> {
        while !positions.is_empty() {
            let mut bytes = 0;
            let fits = |&&position: &&usize| {
                bytes += names[position].1.as_bytes().len() + NAME_BYTES;
                bytes <= FORGET_BYTES
            };
            // A single name always fits: keys have 1 KiB at most.
            let (batch, rest) = positions.split_at(positions.iter().take(MAX_COMMAND_ITEMS).take_while(fits).count());
            positions = rest;
            let items = batch.iter().map(|&position| {
                let (tenant, key, _, replica) = &names[position];
                ReplicaName { tenant: *tenant, key: key.clone(), replica: *replica }
            });
            let (_, outcome) = self.propose(Command::Forget { mode, items: items.collect() }).await?;
            let Outcome::Forget(outcomes) = outcome else {
                return Err(CatalogError::Unexpected { expected: "forget" });
            };
            for (&position, outcome) in batch.iter().zip(outcomes) {
                answers[position] = Some(match outcome {
                    ForgetOutcome::Forgotten { last: _ } | ForgetOutcome::Unknown => Forgotten::Yes,
                    ForgetOutcome::StillNeeded => Forgotten::StillNeeded,
                    ForgetOutcome::Pinned => Forgotten::Pinned,
                });
            }
        }
        Ok(())
    }

    /// Changes the group's members, or who leads, wherever the leader is.
    ///
    /// # Errors
    /// [`CatalogError::MembersChanging`], [`CatalogError::NotCaughtUp`], [`CatalogError::NoSuchMember`],
    /// [`CatalogError::NotLeader`]; [`CatalogError::OutcomeUnknown`]: look at the status, and ask again.
    pub async fn change_members(&self, change: MemberChange) -> Result<(), CatalogError> {
        if self.leads() {
            return self.consensus.change_members(change).await.map(drop);
        }
        match self.ask(Question::Change(change)).await? {
            LeaderAnswer::Changed(_) => Ok(()),
            _ => Err(CatalogError::Unexpected { expected: "a change of members" }),
        }
    }

    /// Takes a message of another member, which came over a connection that proved to be of this cluster. Never waits.
    /// Needs a tokio runtime.
    pub fn receive(&self, lane: Lane, message: Vec<u8>) {
        self.consensus.receive(lane, message);
    }

    /// Writes the image of all that is applied to disk, after which the log before it is dropped; answers up to where.
    ///
    /// # Errors
    /// Those of a group that ended.
    pub async fn flush_image(&self) -> Result<LogIndex, CatalogError> {
        self.consensus.flush_image().await
    }

    /// How many leases this voter has given, and how many bytes of each tenant are leased; only a leader gives any.
    #[must_use]
    pub fn leases_here(&self) -> (usize, Vec<(TenantId, u64)>) {
        let tenants = match self.consensus.peek(|catalog| catalog.query(&Query::Tenants)) {
            Answer::Tenants(tenants) => tenants.into_iter().map(|tenant| tenant.tenant).collect(),
            _ => Vec::new(),
        };
        self.leases.counts(&tenants)
    }

    /// What stands for `node` in the group.
    #[must_use]
    pub fn member_of(&self, node: NodeId) -> Option<MemberId> {
        self.consensus.member_of(node)
    }

    /// The time with which a leader would stamp an entry now. Never goes back.
    #[must_use]
    pub fn now(&self) -> LogTime {
        self.consensus.now()
    }

    /// The last entry whose effects reads see.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        self.consensus.applied()
    }

    /// Follows [`CatalogHandle::applied`]; also wakes when the group ends.
    #[must_use]
    pub fn watch_applied(&self) -> watch::Receiver<LogIndex> {
        self.consensus.watch_applied()
    }

    /// How this voter stands.
    #[must_use]
    pub fn status(&self) -> GroupStatus {
        self.consensus.status()
    }

    /// Takes no more proposals, answers those that are logged, flushes the image, closes the folder. May be called often.
    pub async fn shutdown(&self) {
        self.consensus.shutdown().await;
    }
}

/// How many items a command counts as, of the bound of an entry.
fn item_count(command: &Command) -> usize {
    match command {
        Command::Complete(items) => items.len(),
        Command::Abandon(items) => items.len(),
        Command::AddReplicas(items) => items.len(),
        Command::Adopt(items) => items.len(),
        Command::EndAnnouncement { lost, .. } => lost.len(),
        Command::Forget { items, .. } => items.len(),
        Command::Remove(items) => items.len(),
        Command::Pin(items) | Command::Unpin(items) => items.len(),
        // Removes as many objects.
        Command::DropTenant { .. } => MAX_COMMAND_ITEMS,
        _ => 1,
    }
}

fn located(catalog: &Catalog, query: &Query) -> Result<Vec<Located>, CatalogError> {
    match catalog.query(query) {
        Answer::Located(located) => Ok(located),
        _ => Err(CatalogError::Unexpected { expected: "locations" }),
    }
}

fn leasable(tenant: TenantId, located: &Located) -> Option<Leased> {
    match located {
        Located::Found(location) if location.presence == Presence::Present => {
            let group = location.group.as_ref().map(|group| group_lease(tenant, group));
            Some(Leased { tenant, version: location.version, bytes: location.length, group })
        }
        _ => None,
    }
}

/// What all nodes lend together.
fn capacity_bytes(catalog: &Catalog) -> u64 {
    let Answer::Nodes(nodes) = catalog.query(&Query::Nodes) else { return 0 };
    let tiers = nodes.iter().flat_map(|node| &node.tiers);
    tiers.fold(0, |sum, tier| sum.saturating_add(tier.capacity_bytes))
}

#[cfg(test)]
mod tests;
