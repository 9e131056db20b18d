//! The tiers of one node as one store: where each replica's bytes lie, and when they move.
//!
//! Bytes arrive in DRAM ([`TieredStore::reserve`], [`ObjectBuffer::write`], [`ObjectBuffer::seal`]), become
//! visible when the catalog says so ([`TieredStore::complete`]), are demoted to NVMe when DRAM passes its high
//! watermark, promoted when they are read often, and freed when the catalog says so ([`TieredStore::free`]) or
//! when the node's proposal to forget them was committed ([`Forget`]).
//!
//! What it is not: it does not know which version of a key is current, and asks nobody before it moves an object
//! between its tiers. The catalog knows that this node has a replica, not where.
//!
//! Invariants:
//! - A replica is found by (tenant, key, version), never by a bare key.
//! - DRAM is freed only when the NVMe copy can be read, or after a committed answer that the replica is forgotten;
//!   and always only when the last [`SharedSlice`](crate::memory::SharedSlice) of its slices is gone: each is a hold.
//! - At most one of demote, promote, forget runs on a replica.
//!
//! Concurrency: one lock over index, eviction order and counters, held for O(1) work, never across an await; bytes
//! are copied and checked outside it. One task demotes (`demote.rs`); promotions run in tasks of their own.
//!
//! On a crash: segments and NVMe records say by themselves what they are; `recovery.rs` rebuilds all of this.

mod announce;
mod buffer;
mod demote;
mod heat;
mod hold;
mod index;
mod lost;
mod nvme;
mod outside;
mod promote;
mod read;
mod recovery;
mod report;
mod scrub;
mod soft_pin;

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tidepool_metadata::{
    DATA_TYPES, DEFAULT_SLICE_BYTES, DataType, KeyHash, ObjectKey, ReplicaId, TenantId, VersionId,
};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

pub use announce::Announcement;
pub use buffer::{ObjectBuffer, Sealed};
#[cfg(fuzzing)]
pub use heat::decode_heat_list;
pub use hold::Hold;
pub use index::EntryId;
pub use read::{ByteRange, ObjectReader};
pub use recovery::{Phase, PhaseReport, RecoveryReport};
pub use report::{SlicePlace, TierReport, TierUsage};
pub use soft_pin::MAX_SOFT_PIN;

use crate::StoreError;
use crate::eviction::EvictionPolicy;
use crate::memory::{MemoryTier, RecoveredSlices};
use crate::nvme::{Location, NvmeTier, WritePolicy};
use index::{Entry, Index, State};
use report::Counters;

const _: () = assert!(DATA_TYPES <= u16::BITS as usize, "a bit each");

/// Settings of the store above its tiers.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Length of all slices of an object but the last, in bytes: a multiple of 64 KiB.
    pub slice_bytes: u32,
    /// Share of DRAM in use at which demotion starts.
    pub watermark_high: f64,
    /// Share of DRAM in use at which demotion stops; below `watermark_high`.
    pub watermark_low: f64,
    /// How long a put waits for room while nothing is freed.
    pub room_wait: Duration,
    /// Reads from NVMe after which an object is promoted; 0 promotes never.
    pub promote_after_reads: u8,
    /// Which objects leave DRAM first.
    pub eviction: EvictionPolicy,
    /// Where the list of hot keys is kept; `None` keeps none.
    pub heat_file: Option<PathBuf>,
    /// Bytes that the background scrub verifies a second; 0 switches it off.
    pub scrub_bytes_per_second: u64,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            slice_bytes: DEFAULT_SLICE_BYTES,
            watermark_high: 0.95,
            watermark_low: 0.90,
            room_wait: Duration::from_millis(100),
            promote_after_reads: 2,
            eviction: EvictionPolicy::Lru,
            heat_file: None,
            scrub_bytes_per_second: 64 << 20,
        }
    }
}

/// Names one replica, for proposals to forget it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaName {
    /// The object's tenant.
    pub tenant: TenantId,
    /// The object's key.
    pub key: ObjectKey,
    /// Which put.
    pub version: VersionId,
    /// Which copy.
    pub replica: ReplicaId,
}

/// The answer to a proposal to forget a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForgetAnswer {
    /// Committed, or committed before: the replica may be dropped.
    Forgotten,
    /// Leased, pinned, or the last copy and not to be lost: it stays.
    Refused,
    /// Nobody knows: it stays readable, and the same question is asked again.
    Unanswered,
}

/// Asks the catalog whether replicas may be forgotten. The only way in which the store calls upwards.
pub trait Forget: Send + Sync + 'static {
    /// Answers in order, one a name. May take as long as the catalog does.
    fn forget(&self, replicas: Vec<ReplicaName>) -> futures::future::BoxFuture<'_, Vec<ForgetAnswer>>;

    /// The same for replicas that other nodes have enough of, as far as that is still so: refused else.
    fn forget_further(&self, replicas: Vec<ReplicaName>) -> futures::future::BoxFuture<'_, Vec<ForgetAnswer>>;

    /// Tells that these replicas are gone, whatever was promised of them. True when that is committed; else it is told again.
    fn lost(&self, replicas: Vec<ReplicaName>) -> futures::future::BoxFuture<'_, bool>;
}

/// What identifies a sealed replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaIdentity {
    /// Tenant, key, version and replica.
    pub name: ReplicaName,
    /// What the object holds.
    pub data_type: DataType,
}

/// A node's tiers as one store. Cheap to clone.
#[derive(Clone)]
pub struct TieredStore {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    config: StoreConfig,
    memory: Arc<MemoryTier>,
    /// The attached NVMe tier. Its own state says whether it serves.
    nvme: RwLock<Option<Attached>>,
    state: Mutex<Tables>,
    forget: Arc<dyn Forget>,
    counters: Counters,
    /// Something left DRAM: whoever waits for room looks again.
    room: Notify,
    /// Types of which objects are not demoted: a bit each, by number.
    memory_only: AtomicU16,
    /// Bytes that puts are waiting for.
    wanted_bytes: AtomicU64,
    /// Bytes on their way to NVMe: room that will be free soon.
    demoting_bytes: AtomicU64,
    /// Puts wait for room in the order in which they came.
    room_queue: tokio::sync::Mutex<()>,
    /// The evictor has work.
    pressure: Notify,
    recovery: recovery::Progress,
    holds: Mutex<hold::Holds>,
    lost: lost::Lost,
    stopping: AtomicBool,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

/// An NVMe tier and when to write to it.
struct Attached {
    tier: Arc<NvmeTier>,
    writes: WritePolicy,
    /// Whom the tier asks, as long as it is attached.
    _owner: Arc<nvme::Owner>,
}

/// All that the one lock guards.
struct Tables {
    index: Index,
    /// Complete replicas with DRAM slices, coldest first out.
    resident: soft_pin::Resident,
    /// Those of them that leave before any other, whatever the order says: copies beyond what their objects are to have.
    further: BTreeSet<EntryId>,
    /// Promotions under way; readers wait on them instead of reading again.
    promotions: HashMap<EntryId, Arc<Notify>>,
}

impl TieredStore {
    /// Composes the tiers. `recovered` are the slices that `memory` found in its segment: they are adopted by
    /// [`TieredStore::recover`], which must run before the store is empty-handed about what it has.
    /// Needs a tokio runtime for its tasks.
    #[must_use]
    pub fn start(
        config: StoreConfig,
        memory: Arc<MemoryTier>,
        recovered: RecoveredSlices,
        nvme: Option<(Arc<NvmeTier>, WritePolicy)>,
        forget: Arc<dyn Forget>,
    ) -> Self {
        let resident = soft_pin::Resident::new(config.eviction);
        let inner = Arc::new(Inner {
            memory,
            nvme: RwLock::new(None),
            state: Mutex::new(Tables {
                index: Index::default(),
                resident,
                further: BTreeSet::new(),
                promotions: HashMap::new(),
            }),
            forget,
            counters: Counters::default(),
            room: Notify::new(),
            memory_only: AtomicU16::new(0),
            wanted_bytes: AtomicU64::new(0),
            demoting_bytes: AtomicU64::new(0),
            room_queue: tokio::sync::Mutex::new(()),
            pressure: Notify::new(),
            recovery: recovery::Progress::new(recovered),
            holds: Mutex::new(hold::Holds::default()),
            lost: lost::Lost::default(),
            stopping: AtomicBool::new(false),
            tasks: Mutex::new(Vec::new()),
            config,
        });
        let store = Self { inner };
        if let Some((tier, writes)) = nvme {
            let installed = store.inner.install_nvme(tier, writes);
            debug_assert!(installed.is_ok(), "it is the first");
        }
        let tasks = [
            tokio::spawn(demote::run(Arc::downgrade(&store.inner))),
            tokio::spawn(scrub::run(Arc::downgrade(&store.inner))),
            tokio::spawn(hold::run(Arc::downgrade(&store.inner))),
            tokio::spawn(heat::run(Arc::downgrade(&store.inner))),
            tokio::spawn(lost::run(Arc::downgrade(&store.inner))),
        ];
        store.inner.tasks.lock().extend(tasks);
        store
    }

    /// Makes a sealed replica visible: the committed answer to its `complete` said that it won at `commit_index`.
    /// Answers whether it is still here (the catalog may have dropped it since).
    pub fn complete(&self, name: &ReplicaName, commit_index: u64) -> bool {
        let mut tables = self.inner.state.lock();
        let Some(id) = tables.index.find_replica(name.tenant, name.key.as_bytes(), name.replica) else { return false };
        tables.make_complete(id, commit_index);
        drop(tables);
        self.inner.relieve_pressure();
        true
    }

    /// Drops a replica on the word of a committed answer: refused, abandoned, removed, replaced, trimmed. Its memory
    /// is reused when the last hold ends. Answers whether it was here.
    pub fn free(&self, tenant: TenantId, key: &ObjectKey, replica: ReplicaId) -> bool {
        let mut tables = self.inner.state.lock();
        let Some(id) = tables.index.find_replica(tenant, key.as_bytes(), replica) else { return false };
        self.inner.drop_entry(&mut tables, id);
        drop(tables);
        self.inner.room.notify_waiters();
        true
    }

    /// Has a complete replica leave before any other when DRAM is full, forgotten ([`Forget::forget_further`]) and not demoted: a
    /// further one than the object is to have. If that is refused it leaves in its turn. Answers whether it is here, in DRAM.
    pub fn leaves_first(&self, name: &ReplicaName) -> bool {
        let mut tables = self.inner.state.lock();
        let found = tables.index.find_replica(name.tenant, name.key.as_bytes(), name.replica);
        let Some(id) = found.filter(|&id| tables.index.get(id).is_some_and(Entry::is_settled)) else { return false };
        tables.further.insert(id)
    }

    /// Has objects of these types, and no others, be forgotten when they leave DRAM, rather than be written to NVMe; those whose
    /// puts asked for a copy there have it all the same.
    pub fn set_memory_only(&self, types: &[DataType]) {
        let bits = types.iter().fold(0, |bits, data_type| bits | 1 << *data_type as u16);
        self.inner.memory_only.store(bits, Ordering::Relaxed);
    }

    /// Bytes that DRAM takes before it is so full that demotion would go on.
    #[must_use]
    pub fn room_below_watermark(&self) -> u64 {
        let usage = self.inner.memory.usage();
        demote::share_of(usage.capacity, self.inner.config.watermark_low).saturating_sub(usage.used + usage.reserved)
    }

    /// Whether the replica of that version is here, in any tier.
    #[must_use]
    pub fn contains(&self, tenant: TenantId, key: &ObjectKey, version: VersionId) -> bool {
        self.inner.state.lock().index.find(tenant, key.as_bytes(), version).is_some()
    }

    /// Whether the replica of that version lies in DRAM.
    #[must_use]
    pub fn is_in_dram(&self, tenant: TenantId, key: &ObjectKey, version: VersionId) -> bool {
        let tables = self.inner.state.lock();
        let entry = tables.index.find(tenant, key.as_bytes(), version).and_then(|id| tables.index.get(id));
        entry.is_some_and(|entry| entry.dram.is_some())
    }

    /// Length of all slices of new objects but their last, in bytes.
    #[must_use]
    pub fn slice_bytes(&self) -> u32 {
        self.inner.config.slice_bytes
    }

    /// How many replicas are here.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.state.lock().index.len()
    }

    /// Whether no replica is here.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes the segment's file after [`TieredStore::shutdown`]: of a node that nobody starts again.
    pub fn retire(&self) {
        self.inner.memory.close(false);
    }

    /// Stops the tasks, persists the heat list, seals the NVMe tier, and leaves DRAM entries for the next start.
    ///
    /// # Errors
    /// The first error of the NVMe tier; everything else is stopped all the same.
    pub async fn shutdown(&self) -> Result<(), StoreError> {
        self.inner.stopping.store(true, Ordering::Release);
        let tasks = std::mem::take(&mut *self.inner.tasks.lock());
        for task in tasks {
            task.abort();
            let _ended = task.await;
        }
        heat::persist(&self.inner);
        let nvme = self.inner.nvme.write().take();
        let closed = match nvme {
            Some(nvme) => nvme.tier.close().await.map_err(StoreError::Nvme),
            None => Ok(()),
        };
        self.inner.memory.close(true);
        closed
    }
}

impl Inner {
    /// Takes the entry out of all tables; releases its NVMe records; its DRAM goes with the last hold.
    fn drop_entry(&self, tables: &mut Tables, id: EntryId) {
        tables.resident.remove(id);
        tables.further.remove(&id);
        tables.resident.unpin(id);
        if let Some(entry) = tables.index.remove(id)
            && let Some(locations) = &entry.nvme
        {
            self.release(locations.as_slice().iter().copied());
        }
    }

    /// Says that records are dead.
    fn release(&self, locations: impl IntoIterator<Item = Location>) {
        if let Some(nvme) = &*self.nvme.read() {
            locations.into_iter().for_each(|location| nvme.tier.release(location));
        }
    }

    fn is_memory_only(&self, data_type: DataType) -> bool {
        self.memory_only.load(Ordering::Relaxed) & 1 << data_type as u16 != 0
    }
}

impl Tables {
    fn make_complete(&mut self, id: EntryId, commit_index: u64) {
        let Some(entry) = self.index.get_mut(id) else { return };
        entry.state = State::Complete;
        entry.commit_index = commit_index;
        if let Some(slices) = &entry.dram {
            slices.as_slice().iter().for_each(|slice| slice.complete(commit_index));
            self.enter_order(id);
        }
    }

    /// Enters a complete replica with DRAM slices in the eviction order.
    fn enter_order(&mut self, id: EntryId) {
        if let Some(entry) = self.index.get(id) {
            let key = KeyHash::of(entry.tenant, entry.key.as_bytes());
            self.resident.insert(id, key, entry.object_length);
        }
    }
}

fn name_of(entry: &Entry) -> ReplicaName {
    ReplicaName { tenant: entry.tenant, key: entry.key.clone(), version: entry.version, replica: entry.replica() }
}

/// The store's tasks hold it weakly, so that dropping the last handle ends them.
fn alive(store: &Weak<Inner>) -> Option<Arc<Inner>> {
    store.upgrade().filter(|inner| !inner.stopping.load(Ordering::Acquire))
}
