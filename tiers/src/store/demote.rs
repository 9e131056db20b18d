//! The evictor: keeps DRAM below its high watermark.
//!
//! Copies first that are further ones than their objects are to have: the catalog is asked whether they may be forgotten. Then the
//! coldest replicas: one that has an NVMe copy just loses its DRAM; one that has none is written to NVMe; and
//! where there is no NVMe tier to write to, the catalog is asked whether the whole replica may be forgotten. All of it
//! is local and continuous; only forgetting asks anybody.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tidepool_metadata::TierKind;

use super::index::{Activity, Entry, EntryId, PerSlice, State};
use super::{ForgetAnswer, Inner, ReplicaName, Tables, TieredStore, alive, name_of};
use crate::StoreError;
use crate::memory::SharedSlice;
use crate::nvme::{Location, NvmeTier, WritePolicy, Written};

/// Bytes being written to NVMe at a time: enough regions to keep the device busy, few enough not to hold DRAM back.
const DEMOTING_BYTES: u64 = 64 << 20;
/// Replicas that are written at a time when another tier is attached.
const WRITES_AT_A_TIME: usize = 32;
/// Replicas in one proposal to forget.
const FORGET_BATCH: usize = 256;
/// How soon an unanswered proposal is asked again, and pressure looked at without being told.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// A replica that leaves DRAM.
struct Victim {
    id: EntryId,
    name: ReplicaName,
    bytes: u64,
    fate: Fate,
}

enum Fate {
    /// Its NVMe copy can be read: DRAM was dropped under the lock.
    Dropped,
    /// To be written to NVMe.
    Write(PerSlice<SharedSlice>, Arc<NvmeTier>),
    /// To be forgotten, if the catalog allows.
    Forget,
    /// The same, as one that other nodes have enough of.
    ForgetFurther,
}

/// A replica that the catalog is asked about.
struct Asked {
    id: EntryId,
    name: ReplicaName,
    is_further: bool,
}

/// How a replica's write to NVMe ended.
struct Demoted {
    bytes: u64,
    succeeded: bool,
}

/// Runs until the store goes away.
pub(super) async fn run(store: Weak<Inner>) {
    let mut unanswered: VecDeque<Asked> = VecDeque::new();
    loop {
        let Some(inner) = alive(&store) else { return };
        let pause = if unanswered.is_empty() { Duration::from_secs(1) } else { ASK_AGAIN };
        // The timeout only repeats what a notification may have asked for while we were busy.
        let _woken = tokio::time::timeout(pause, inner.pressure.notified()).await;
        make_room(&inner, &mut unanswered).await;
    }
}

/// Demotes and forgets until DRAM is below the low watermark and what puts wait for is free, or nothing is left to go.
async fn make_room(inner: &Arc<Inner>, unanswered: &mut VecDeque<Asked>) {
    let mut writes = FuturesUnordered::new();
    let mut writing_bytes = 0;
    let mut leaving_bytes = 0;
    let mut forgetting: Vec<Asked> = unanswered.drain(..).collect();
    let mut refused = 0_usize;
    // All others were refused: soft pins give way.
    let mut soft_pins_too = false;
    // A write that failed is not repeated with the next one in the same round: forgetting makes room as well.
    let mut nvme_takes = true;
    let starting = inner.excess() > 0;
    loop {
        let excess = if starting { inner.excess() } else { 0 };
        while writing_bytes < DEMOTING_BYTES && excess > leaving_bytes && forgetting.len() < FORGET_BATCH {
            let Some(victim) = inner.next_victim(nvme_takes, soft_pins_too) else { break };
            match victim.fate {
                Fate::Dropped => inner.room.notify_waiters(),
                Fate::Write(slices, nvme) => {
                    leaving_bytes += victim.bytes;
                    writing_bytes += victim.bytes;
                    // At least one, so that objects of no bytes count as well.
                    inner.demoting_bytes.fetch_add(victim.bytes + 1, Ordering::AcqRel);
                    writes.push(write(inner, victim.id, victim.name, victim.bytes, slices, nvme));
                }
                Fate::Forget | Fate::ForgetFurther => {
                    leaving_bytes += victim.bytes;
                    let is_further = matches!(victim.fate, Fate::ForgetFurther);
                    forgetting.push(Asked { id: victim.id, name: victim.name, is_further });
                }
            }
            if inner.excess() <= leaving_bytes {
                break;
            }
        }
        if !forgetting.is_empty() {
            let batch = std::mem::take(&mut forgetting);
            let asked = batch.len();
            let forgotten = forget(inner, batch, unanswered).await;
            leaving_bytes = writing_bytes;
            refused = if forgotten == 0 { refused + asked } else { 0 };
            let (all, plain) = {
                let tables = inner.state.lock();
                (tables.resident.len(), tables.resident.plain())
            };
            soft_pins_too |= refused > plain;
            if !unanswered.is_empty() || refused > all {
                // No answer, or all of them are leased or pinned: who waits for room is refused in bounded time.
                break;
            }
            continue;
        }
        let Some(Demoted { bytes, succeeded }) = writes.next().await else { break };
        inner.demoting_bytes.fetch_sub(bytes + 1, Ordering::AcqRel);
        writing_bytes -= bytes;
        leaving_bytes -= bytes;
        nvme_takes &= succeeded;
    }
    while let Some(Demoted { bytes, .. }) = writes.next().await {
        inner.demoting_bytes.fetch_sub(bytes + 1, Ordering::AcqRel);
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a share")]
pub(super) fn share_of(capacity: u64, share: f64) -> u64 {
    (capacity as f64 * share) as u64
}

impl Inner {
    /// Lets the evictor go to work if more is in use than should be.
    pub(super) fn relieve_pressure(&self) {
        if self.excess() > 0 {
            self.pressure.notify_one();
        }
    }

    /// Bytes of DRAM above what should be in use.
    fn excess(&self) -> u64 {
        let usage = self.memory.usage();
        // What is kept can't be made room of: as if the tier were that much smaller.
        let (capacity, in_use) = (usage.capacity - usage.kept, usage.used - usage.kept + usage.reserved);
        let wanted = self.wanted_bytes.load(Ordering::Acquire);
        if wanted == 0 && in_use <= share_of(capacity, self.config.watermark_high) {
            return 0;
        }
        let target = share_of(capacity, self.config.watermark_low).min(capacity.saturating_sub(wanted));
        in_use.saturating_sub(target)
    }

    /// When the attached tier is to be written.
    fn nvme_writes(&self) -> WritePolicy {
        self.nvme.read().as_ref().map_or(WritePolicy::Never, |nvme| nvme.writes)
    }

    /// Takes the coldest replica that may leave out of the eviction order and says what is to be done with it.
    fn next_victim(&self, nvme_takes: bool, soft_pins_too: bool) -> Option<Victim> {
        let serving = self.serving_nvme().ok();
        let serves = serving.is_some();
        let nvme = serving.filter(|_| nvme_takes && self.nvme_writes() != WritePolicy::Never);
        let mut tables = self.state.lock();
        while let Some(id) = tables.further.pop_first() {
            let Some(entry) = tables.index.get_mut(id).filter(|entry| entry.is_settled()) else { continue };
            entry.state = State::ForgetPending;
            let (name, bytes) = (name_of(entry), entry.object_length);
            tables.resident.remove(id);
            return Some(Victim { id, name, bytes, fate: Fate::ForgetFurther });
        }
        let id = tables.evict(soft_pins_too)?;
        let entry = tables.index.get_mut(id)?;
        let (name, bytes) = (name_of(entry), entry.object_length);
        // A copy on a tier that is out of service is none, unless the put asked for it: then it is the one that counts.
        let fate = if entry.nvme.is_some() && (serves || entry.durable) {
            entry.dram = None;
            entry.reads = 0;
            self.counters.dropped();
            Fate::Dropped
        } else if let (Some(nvme), Some(slices)) =
            (nvme.filter(|_| !self.is_memory_only(entry.data_type)), entry.dram.clone())
        {
            entry.activity = Activity::Demoting;
            Fate::Write(slices, nvme)
        } else {
            entry.state = State::ForgetPending;
            Fate::Forget
        };
        Some(Victim { id, name, bytes, fate })
    }

    /// Writes a replica's slices; answers when all can be read. What is not kept is released.
    async fn write_slices(nvme: &NvmeTier, slices: &PerSlice<SharedSlice>) -> Option<Vec<Written>> {
        let writes = slices.as_slice().iter().map(|slice| nvme.write(slice.header(), Arc::new(slice.clone())));
        let results = futures::future::join_all(writes).await;
        results.into_iter().collect::<Result<Vec<_>, _>>().ok()
    }
}

impl TieredStore {
    /// Writes a sealed replica to NVMe if its put asked for that (`durable`: synced too), or if the tier's policy is
    /// to write through. To be called before the put is proposed.
    ///
    /// # Errors
    /// Only if the put asked for it: [`StoreError::TierUnavailable`] if no NVMe tier takes it, the tier's own.
    pub async fn write_through(&self, name: &ReplicaName, durable: bool) -> Result<(), StoreError> {
        let is_written = || self.inner.nvme_writes() == WritePolicy::WriteThrough && !self.is_memory_only(name);
        let nvme = match self.inner.serving_nvme() {
            Ok(nvme) if durable || is_written() => nvme,
            Err(error) if durable => return Err(error),
            _ => return Ok(()),
        };
        let written = self.inner.write_now(name, &nvme, durable).await;
        if durable { written } else { Ok(()) }
    }
}

impl TieredStore {
    fn is_memory_only(&self, name: &ReplicaName) -> bool {
        let tables = self.inner.state.lock();
        let found = tables.index.find_replica(name.tenant, name.key.as_bytes(), name.replica);
        found.and_then(|id| tables.index.get(id)).is_some_and(|entry| self.inner.is_memory_only(entry.data_type))
    }
}

impl Inner {
    async fn write_now(&self, name: &ReplicaName, nvme: &NvmeTier, durable: bool) -> Result<(), StoreError> {
        let unavailable = || StoreError::TierUnavailable { tier: TierKind::Nvme };
        let find = |tables: &Tables| tables.index.find_replica(name.tenant, name.key.as_bytes(), name.replica);
        let slices = {
            let mut tables = self.state.lock();
            let entry = find(&tables).and_then(|id| tables.index.get_mut(id)).ok_or_else(unavailable)?;
            entry.activity = Activity::Demoting;
            entry.dram.clone().ok_or_else(unavailable)?
        };
        let records = Self::write_slices(nvme, &slices).await;
        let written = match records {
            Some(_) if durable => nvme.sync().await.map_err(StoreError::Nvme),
            Some(_) => Ok(()),
            None => Err(unavailable()),
        };
        let mut tables = self.state.lock();
        let is_replaced = self.is_replaced(nvme);
        if let Some(entry) = find(&tables).and_then(|id| tables.index.get_mut(id)) {
            entry.activity = Activity::Idle;
            entry.durable = durable && !is_replaced && written.is_ok();
            entry.nvme = records.filter(|_| !is_replaced).and_then(keep);
        }
        if is_replaced { Err(unavailable()) } else { written }
    }

    /// Writes what puts asked to have on disk and has no place there, since another tier is attached.
    pub(super) async fn write_durable(self: &Arc<Self>, nvme: &Arc<NvmeTier>) {
        let victims: Vec<_> = {
            let mut tables = self.state.lock();
            let bare = |entry: &Entry| entry.durable && entry.nvme.is_none() && entry.is_settled();
            let ids: Vec<EntryId> = tables.index.iter().filter(|(_, entry)| bare(entry)).map(|(id, _)| id).collect();
            let mut take = |id| {
                tables.resident.remove(id);
                let entry = tables.index.get_mut(id)?;
                entry.activity = Activity::Demoting;
                Some((id, name_of(entry), entry.dram.clone()?))
            };
            ids.into_iter().filter_map(&mut take).collect()
        };
        let count = victims.len();
        let writes = victims.into_iter().map(|(id, name, slices)| async move {
            let written = Self::write_slices(nvme, &slices).await;
            let mut tables = self.state.lock();
            let written = written.filter(|_| !self.is_replaced(nvme));
            let is_written = written.is_some();
            if let Some(entry) = tables.index.get_mut(id).filter(|entry| entry.is(name.version, name.replica)) {
                entry.activity = Activity::Idle;
                entry.nvme = written.and_then(keep);
                tables.enter_order(id);
            }
            is_written
        });
        let writes = futures::stream::iter(writes).buffer_unordered(WRITES_AT_A_TIME);
        let written = writes.filter(|&is_written| futures::future::ready(is_written)).count().await;
        let synced = if count > 0 { nvme.sync().await } else { Ok(()) };
        if let Err(error) = synced {
            tracing::error!(%error, "what puts asked to have on disk could not be made durable on the new one");
        } else if written < count {
            tracing::error!(left = count - written, "the new disk did not take all that puts asked to have on disk");
        }
    }
}

/// The places of records that the index knows from now on. To be called under its lock.
fn keep(written: Vec<Written>) -> Option<PerSlice<Location>> {
    PerSlice::collect(written.into_iter().map(Written::keep).collect())
}

async fn write(
    inner: &Arc<Inner>,
    id: EntryId,
    name: ReplicaName,
    bytes: u64,
    slices: PerSlice<SharedSlice>,
    nvme: Arc<NvmeTier>,
) -> Demoted {
    let written = Inner::write_slices(&nvme, &slices).await;
    let mut tables = inner.state.lock();
    let written = written.filter(|_| !inner.is_replaced(&nvme));
    let succeeded = written.is_some();
    match (tables.index.get_mut(id).filter(|entry| entry.is(name.version, name.replica)), written) {
        (Some(entry), Some(written)) => {
            entry.activity = Activity::Idle;
            entry.nvme = keep(written);
            entry.dram = None;
            entry.reads = 0;
            inner.counters.demoted(bytes);
        }
        (Some(entry), None) => {
            // The bytes stay where they are good; a tier that failed is not asked again.
            entry.activity = Activity::Idle;
            tables.enter_order(id);
            inner.counters.demotion_failed();
        }
        // Removed meanwhile: what was written is nobody's, and is released.
        (None, _) => {}
    }
    drop(tables);
    drop(slices);
    if succeeded {
        inner.room.notify_waiters();
    }
    Demoted { bytes, succeeded }
}

/// Proposes to forget; drops what was allowed, keeps what was refused, remembers what was not answered.
/// Answers how many were forgotten.
async fn forget(inner: &Arc<Inner>, batch: Vec<Asked>, unanswered: &mut VecDeque<Asked>) -> usize {
    let (further, others): (Vec<Asked>, Vec<Asked>) = batch.into_iter().partition(|asked| asked.is_further);
    let names = |asked: &[Asked]| asked.iter().map(|asked| asked.name.clone()).collect::<Vec<_>>();
    let mut answers = Vec::new();
    if !further.is_empty() {
        answers = inner.forget.forget_further(names(&further)).await;
    }
    if !others.is_empty() {
        answers.extend(inner.forget.forget(names(&others)).await);
    }
    let mut forgotten = 0;
    let mut tables = inner.state.lock();
    for (asked, answer) in further.into_iter().chain(others).zip(answers) {
        let Asked { id, ref name, .. } = asked;
        let Some(entry) = tables.index.get_mut(id).filter(|entry| entry.is(name.version, name.replica)) else {
            continue;
        };
        match answer {
            ForgetAnswer::Forgotten => {
                inner.counters.evicted(TierKind::Dram);
                inner.drop_entry(&mut tables, id);
                forgotten += 1;
            }
            ForgetAnswer::Refused => {
                entry.state = State::Complete;
                tables.enter_order(id);
            }
            ForgetAnswer::Unanswered => unanswered.push_back(asked),
        }
    }
    drop(tables);
    if forgotten > 0 {
        // Only then: a put waits as long as it hears of progress.
        inner.room.notify_waiters();
    }
    forgotten
}
