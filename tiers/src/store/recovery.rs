//! What this node still has after a restart, found in three phases; it serves from the first one on.
//!
//! 1. *Hot keys*: the persisted heat list, hottest first: from the segment that outlived the process, else read from
//!    the NVMe places that the list names, without a scan.
//! 2. *DRAM entries*: everything else in the segment, each slice verified by its checksum.
//! 3. *Disk*: the scan of the NVMe tier says where everything else is.
//!
//! A replica is adopted whole or not at all. What was sealed but not known to be complete is adopted as sealed: the
//! node asks the catalog about it ([`TieredStore::for_each`] gives commit index 0), and frees it on the answer.
//! Until the last phase is done an unknown replica answers *recovering*, never *missing*.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hashbrown::{HashMap, HashSet};
use parking_lot::Mutex;
use tidepool_metadata::{ReplicaId, SliceHeader};

use super::index::{Activity, Entry, PerSlice, State};
use super::{Inner, Tables, TieredStore, heat, promote};
use crate::StoreError;
use crate::memory::{RecoveredSlice, RecoveredSlices, SharedSlice};
use crate::nvme::{Location, NvmeTier};

/// The phases in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Replicas of the heat list.
    HotKeys,
    /// Entries of the DRAM segment.
    Dram,
    /// Records of the NVMe tier.
    Disk,
}

impl Phase {
    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::HotKeys => "hot_keys",
            Self::Dram => "dram",
            Self::Disk => "disk",
        }
    }
}

/// How far a phase has come.
#[derive(Clone, Debug)]
pub struct PhaseReport {
    /// Which phase.
    pub phase: Phase,
    /// Whether it began.
    pub started: bool,
    /// Whether it ended.
    pub finished: bool,
    /// Replicas that it has to look at, as far as known.
    pub total: u64,
    /// Replicas adopted.
    pub adopted: u64,
    /// Replicas dropped: damaged, or not whole.
    pub dropped: u64,
    /// Bytes of the adopted ones.
    pub bytes: u64,
    /// How long it has run, or ran.
    pub elapsed: Duration,
}

/// All three phases.
#[derive(Clone, Debug)]
pub struct RecoveryReport {
    /// In order.
    pub phases: [PhaseReport; 3],
    /// Whether the node knows all that it has.
    pub finished: bool,
}

pub(super) struct Progress {
    finished: AtomicBool,
    recovered: Mutex<Option<RecoveredSlices>>,
    phases: Mutex<[(PhaseReport, Option<Instant>); 3]>,
}

impl Progress {
    pub(super) fn new(recovered: RecoveredSlices) -> Self {
        let phases = [Phase::HotKeys, Phase::Dram, Phase::Disk].map(|phase| {
            let report = PhaseReport {
                phase,
                started: false,
                finished: false,
                total: 0,
                adopted: 0,
                dropped: 0,
                bytes: 0,
                elapsed: Duration::ZERO,
            };
            (report, None)
        });
        Self { finished: AtomicBool::new(false), recovered: Mutex::new(Some(recovered)), phases: Mutex::new(phases) }
    }

    /// Whether the node knows all that it has.
    pub(super) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    fn begin(&self, phase: Phase, total: u64) {
        let mut phases = self.phases.lock();
        let (report, since) = &mut phases[phase as usize];
        (report.started, report.total) = (true, total);
        *since = Some(Instant::now());
    }

    fn end(&self, phase: Phase) {
        let mut phases = self.phases.lock();
        let (report, since) = &mut phases[phase as usize];
        report.finished = true;
        report.elapsed = since.take().map_or(Duration::ZERO, |since| since.elapsed());
        tracing::info!(
            ?phase, adopted = report.adopted, dropped = report.dropped, bytes = report.bytes, elapsed = ?report.elapsed,
            "recovery phase ended"
        );
    }

    fn count(&self, phase: Phase, adopted: Option<u64>) {
        let report = &mut self.phases.lock()[phase as usize].0;
        match adopted {
            Some(bytes) => {
                report.adopted += 1;
                report.bytes += bytes;
            }
            None => report.dropped += 1,
        }
    }
}

impl TieredStore {
    /// Runs the three phases. Reads are served meanwhile, each as soon as its replica is adopted.
    ///
    /// # Errors
    /// [`StoreError::Recovering`] if a phase died: a fault of ours; the node keeps answering *recovering*.
    pub async fn recover(&self) -> Result<(), StoreError> {
        let inner = &self.inner;
        let hot = inner.config.heat_file.as_deref().map(heat::load).unwrap_or_default();
        inner.recovery.begin(Phase::HotKeys, hot.len() as u64);
        let nvme = inner.serving_nvme().ok();
        let mut found = inner.recovery.recovered.lock().take();
        let mut hot_slices = found.as_mut().map(|found| take_hot(found, &hot)).unwrap_or_default();
        for hot in hot {
            let in_segment = hot_slices.remove(&hot.header.replica);
            let adopted = match (in_segment, &nvme) {
                (Some(slices), _) => adopt_slices(inner, slices),
                (None, Some(nvme)) if !hot.locations.is_empty() => adopt_hot(inner, nvme, hot).await,
                // It left DRAM after the list was written: the disk phase finds it, if anything does.
                _ => continue,
            };
            inner.recovery.count(Phase::HotKeys, adopted);
        }
        inner.recovery.end(Phase::HotKeys);
        inner.memory.prefault();

        // A replica of several slices counts once for each here.
        inner.recovery.begin(Phase::Dram, found.as_ref().map_or(0, |found| found.len() as u64));
        let verifier = Arc::clone(inner);
        let verified = tokio::task::spawn_blocking(move || adopt_all(&verifier, found)).await;
        inner.recovery.end(Phase::Dram);
        verified.map_err(|_panic| StoreError::Recovering)?;

        inner.recovery.begin(Phase::Disk, 0);
        if let Some(nvme) = nvme {
            adopt_disk(inner, &nvme).await;
        }
        inner.recovery.end(Phase::Disk);
        inner.recovery.finished.store(true, Ordering::Release);
        Ok(())
    }

    /// How far the phases have come.
    #[must_use]
    pub fn recovery_report(&self) -> RecoveryReport {
        let phases = self.inner.recovery.phases.lock().clone().map(|(mut report, since)| {
            if let Some(since) = since {
                report.elapsed = since.elapsed();
            }
            report
        });
        RecoveryReport { phases, finished: self.inner.recovery.is_finished() }
    }
}

type Replicas = HashMap<ReplicaId, Vec<RecoveredSlice>>;

fn take_hot(found: &mut RecoveredSlices, hot: &[heat::Hot]) -> Replicas {
    let names: HashSet<ReplicaId> = hot.iter().map(|hot| hot.header.replica).collect();
    let mut taken = Replicas::new();
    for slice in found.take(|replica| names.contains(&replica)) {
        taken.entry(slice.replica()).or_default().push(slice);
    }
    taken
}

/// Adopts objects of one slice as they are found, then those of several, of which all must be found first.
fn adopt_all(inner: &Arc<Inner>, found: Option<RecoveredSlices>) {
    let (found, parts) = (Mutex::new(found.into_iter().flatten()), Mutex::new(Replicas::new()));
    adopt_each(inner, || {
        loop {
            let slice = found.lock().next()?;
            if slice.is_whole() {
                return Some(vec![slice]);
            }
            parts.lock().entry(slice.replica()).or_default().push(slice);
        }
    });
    let parts = Mutex::new(parts.into_inner().into_values());
    adopt_each(inner, || parts.lock().next());
}

/// Verifies on all cores but one, which the catalog needs meanwhile: a core checks about as fast as it can read memory.
fn adopt_each(inner: &Arc<Inner>, next: impl Fn() -> Option<Vec<RecoveredSlice>> + Sync) {
    let workers = std::thread::available_parallelism().map_or(1, |cores| (cores.get() - 1).max(1));
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(slices) = next() {
                    inner.recovery.count(Phase::Dram, adopt_slices(inner, slices));
                }
            });
        }
    });
}

/// Adopts a replica from its slices in the segment, if all are there and all verify. Answers its length.
fn adopt_slices(inner: &Inner, slices: Vec<RecoveredSlice>) -> Option<u64> {
    let verified = slices.into_iter().map_while(|slice| slice.verify().ok());
    let mut slices: Vec<(SliceHeader, SharedSlice)> = verified.map(|slice| (slice.header(), slice)).collect();
    slices.sort_by_key(|(header, _)| header.slice_index);
    let (first, _) = slices.first()?;
    let whole = SliceHeader::slice_count(first.object_length, first.slice_bytes) as usize == slices.len()
        && slices.iter().zip(0..).all(|((header, _), index)| header.slice_index == index);
    if !whole {
        return None;
    }
    let commit_index = slices.iter().map(|(header, _)| header.commit_index).max()?;
    let (length, mut entry) = (first.object_length, entry_of(first, commit_index));
    entry.dram = PerSlice::collect(slices.into_iter().map(|(_, slice)| slice).collect());
    insert(&mut inner.state.lock(), entry);
    Some(length)
}

/// Adopts a hot replica from the places where it lay on NVMe, and brings it into DRAM.
async fn adopt_hot(inner: &Arc<Inner>, nvme: &Arc<NvmeTier>, hot: heat::Hot) -> Option<u64> {
    let heat::Hot { header, locations } = hot;
    // Released after the list was written: counted as free already, and not ours to release again.
    if locations.iter().any(|&location| nvme.is_released(location)) {
        return None;
    }
    if SliceHeader::slice_count(header.object_length, header.slice_bytes) as usize != locations.len() {
        return None;
    }
    let mut entry = entry_of(&header, header.commit_index);
    let locations = PerSlice::collect(locations)?;
    entry.nvme = Some(locations.clone());
    let loaded = promote::load_slices(inner, &promote::Load::new(&entry, 0, locations, Arc::clone(nvme))).await?;
    entry.dram = Some(loaded);
    let mut tables = inner.state.lock();
    if inner.is_replaced(nvme) {
        entry.nvme = None;
    }
    insert(&mut tables, entry);
    Some(header.object_length)
}

/// Adopts what the scan of the NVMe tier finds. Answers how many records were taken over: at start all that are whole, later
/// only those of replicas that are known, since the others were dropped while the tier was away.
pub(super) async fn adopt_disk(inner: &Arc<Inner>, nvme: &Arc<NvmeTier>) -> u64 {
    let mut taken = 0;
    // Objects of several slices whose records were not all seen yet.
    let mut parts: HashMap<ReplicaId, (SliceHeader, Vec<Option<Location>>)> = HashMap::new();
    let mut batches = nvme.scan();
    while let Some(batch) = batches.recv().await {
        for (header, location) in batch.records {
            let count = SliceHeader::slice_count(header.object_length, header.slice_bytes) as usize;
            if count == 1 {
                taken += adopt_records(inner, nvme, &header, PerSlice::One(location));
                continue;
            }
            let (_, places) = parts.entry(header.replica).or_insert_with(|| (header.clone(), vec![None; count]));
            match places.get_mut(header.slice_index as usize) {
                Some(place) => *place = Some(place.map_or(location, |known| newer(nvme, known, location))),
                None => nvme.release(location),
            }
            if places.iter().all(Option::is_some)
                && let Some((header, places)) = parts.remove(&header.replica)
                && let Some(places) = PerSlice::collect(places.into_iter().flatten().collect())
            {
                taken += adopt_records(inner, nvme, &header, places);
            }
        }
    }
    for (header, places) in parts.into_values() {
        tracing::debug!(key = %header.key, "records of a part of an object found: released");
        places.into_iter().flatten().for_each(|location| nvme.release(location));
        inner.recovery.count(Phase::Disk, None);
    }
    taken
}

/// Of two records of one slice, the one that was written later; the other is released.
fn newer(nvme: &NvmeTier, a: Location, b: Location) -> Location {
    let (newer, older) = if a.is_newer_than(&b) { (a, b) } else { (b, a) };
    if newer != older {
        nvme.release(older);
    }
    newer
}

fn adopt_records(inner: &Inner, nvme: &NvmeTier, header: &SliceHeader, places: PerSlice<Location>) -> u64 {
    let count = places.as_slice().len() as u64;
    let mut tables = inner.state.lock();
    if inner.is_replaced(nvme) {
        return 0;
    }
    let known = tables.index.find_replica(header.tenant, header.key.as_bytes(), header.replica);
    if let Some(entry) = known.and_then(|id| tables.index.get_mut(id)) {
        // Already adopted from DRAM, from the heat list, or from an older copy that reclaim had not released.
        match &mut entry.nvme {
            Some(known) => {
                for (known, &found) in known.as_mut_slice().iter_mut().zip(places.as_slice()) {
                    *known = newer(nvme, *known, found);
                }
            }
            None => entry.nvme = Some(places),
        }
        return count;
    }
    if inner.recovery.is_finished() {
        places.as_slice().iter().for_each(|&place| nvme.release(place));
        return 0;
    }
    let mut entry = entry_of(header, header.commit_index);
    entry.nvme = Some(places);
    entry.durable = header.commit_index == 0;
    insert(&mut tables, entry);
    drop(tables);
    inner.recovery.count(Phase::Disk, Some(header.object_length));
    count
}

fn entry_of(header: &SliceHeader, commit_index: u64) -> Entry {
    Entry {
        tenant: header.tenant,
        key: header.key.clone(),
        version: header.version,
        other_replica: Entry::other_replica(header.version, header.replica),
        object_length: header.object_length,
        commit_index,
        dram: None,
        nvme: None,
        slice_bytes: header.slice_bytes,
        data_type: header.data_type,
        state: if commit_index == 0 { State::Sealed } else { State::Complete },
        activity: Activity::Idle,
        reads: 0,
        durable: false,
    }
}

fn insert(tables: &mut Tables, entry: Entry) {
    let in_order = entry.dram.is_some() && entry.state == State::Complete;
    let id = tables.index.insert(entry);
    if in_order {
        tables.enter_order(id);
    }
}
