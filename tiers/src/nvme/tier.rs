//! [`NvmeTier`]: opening, the calls of the store above, closing.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use tidepool_metadata::{NodeId, SliceHeader};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};

use super::config::NvmeConfig;
use super::core::{Core, Counters, TierState, Written, random_u64};
use super::error::NvmeError;
use super::flush::{Event, Flusher, Inbox, RESERVED_REGIONS, WriteRequest};
use super::folder::{Folder, FolderLock};
use super::format::{REGIONS_START, Superblock, SuperblockFault, max_slice_bytes};
use super::location::Location;
use super::open_region::SliceSource;
use super::read::{Reader, SliceName};
use super::reclaim::ask;
use super::recover::{Graves, Recovered, ScanBatch, recover, scan};
use super::region::{NvmeUsage, Regions};
use crate::io::{Allocation, Block, BoxFuture, BufferPool, EngineKind, IoEngine, Landing, PAGE_BYTES, start_engine};

/// One region is filled while two are on their way to the disk.
const WRITE_BUFFERS: usize = 3;
/// Slices that may wait to be packed, for each operation of the queue depth: enough to fill blocks with small ones.
const WRITES_PER_DEPTH: usize = 16;

/// Counts since the tier was opened.
#[derive(Clone, Debug, Default, PartialEq)]
#[expect(missing_docs, reason = "each name says what is counted")]
pub struct NvmeStats {
    pub written_slices: u64,
    pub written_slice_bytes: u64,
    pub moved_slices: u64,
    pub moved_slice_bytes: u64,
    /// All bytes written to the device.
    pub device_bytes: u64,
    pub reads: u64,
    pub read_bytes: u64,
    pub read_errors: u64,
    pub write_errors: u64,
    pub corrupt_records: u64,
    pub stale_reads: u64,
    pub reclaimed_regions: u64,
    pub dropped_slices: u64,
    pub scrubbed_bytes: u64,
    /// Bytes written to the device for each byte of slices that the store wrote; 0 before the first.
    pub write_amplification: f64,
}

/// An NVMe tier in service.
pub struct NvmeTier {
    pub(super) core: Arc<Core>,
    pub(super) scrubbed_sequence: AtomicU64,
    read_permits: Arc<Semaphore>,
    write_permits: Arc<Semaphore>,
    flusher: Mutex<Option<JoinHandle<()>>>,
    graves: Mutex<Option<Graves>>,
    recovered: Recovered,
    is_direct: bool,
}

/// What the tier needs of its device once the file is there.
struct Device {
    engine: Arc<dyn IoEngine>,
    superblock: Superblock,
    folder: Option<Folder>,
    lock: Option<FolderLock>,
    write_buffers: Vec<Arc<Allocation>>,
    is_direct: bool,
}

impl NvmeTier {
    /// Opens the tier in `config.path`, or makes it. Reads the first and last page of each region and walks those that
    /// a crash left open; waits for that, so call it where waiting is allowed.
    ///
    /// # Errors
    /// A bad setting; the folder is locked, foreign, of another node or of a newer format; the disk is too small or
    /// fails. Nothing that was there is changed then.
    pub fn open(config: NvmeConfig, node: NodeId) -> Result<Arc<Self>, NvmeError> {
        config.validate()?;
        let opened = Folder::open(&config)?;
        let path = opened.folder.data_path();
        let io_error = |action| {
            let path = path.clone();
            move |source| NvmeError::Folder { action, path, source }
        };
        let start = |region_bytes: u64| {
            let buffers: Vec<_> = (0..WRITE_BUFFERS).map(|_| Allocation::new(region_bytes as usize)).collect();
            let file = opened.file.try_clone().map_err(io_error("open"))?;
            let depth = config.queue_depth.saturating_mul(2);
            let started =
                start_engine(config.engine, file, &buffers, depth).map_err(io_error("start the io engine on"))?;
            Ok((started, buffers))
        };
        let (superblock, ((engine, reason), write_buffers)) = if opened.is_new {
            let count = wanted_regions(&config, config.region_bytes);
            let count = opened.folder.affordable(count, 0, config.region_bytes)?;
            let superblock =
                Superblock { node, region_bytes: config.region_bytes, region_count: count, file_id: random_u64() };
            opened.folder.resize(file_bytes(&superblock))?;
            let started = start(config.region_bytes)?;
            write_superblocks(&*started.0.0, &superblock).map_err(io_error("write the superblock of"))?;
            opened.folder.commit()?;
            (superblock, started)
        } else {
            let found = read_superblock_of(&opened.file, &opened.folder, node)?;
            let started = start(found.region_bytes)?;
            (resize(&opened.folder, &*started.0.0, found, &config)?, started)
        };
        if let Some(reason) = reason {
            tracing::warn!(error = %reason, "io_uring can't be used (is it forbidden, or LimitMEMLOCK too low?): the nvme tier uses blocking I/O");
        }
        tracing::info!(
            path = %path.display(), engine = ?engine.kind(), direct = opened.is_direct,
            regions = superblock.region_count, region_bytes = superblock.region_bytes, "nvme tier opened"
        );
        let is_direct = opened.is_direct;
        Self::start(
            &config,
            Device {
                engine,
                superblock,
                folder: Some(opened.folder),
                lock: Some(opened.lock),
                write_buffers,
                is_direct,
            },
        )
    }

    /// Opens a tier on a device that is given, formatting it if it is blank: for tests on faulty disks.
    ///
    /// # Errors
    /// As [`Self::open`].
    #[cfg(any(test, feature = "faults"))]
    pub fn open_on(config: &NvmeConfig, node: NodeId, engine: Arc<dyn IoEngine>) -> Result<Arc<Self>, NvmeError> {
        config.validate()?;
        let io_error = |source| NvmeError::Io { action: "read or write the superblock", source };
        let pages = engine.read_block(0, Block::new(2 * PAGE_BYTES)).map_err(io_error)?;
        let superblock = if pages.iter().all(|&byte| byte == 0) {
            let region_count = wanted_regions(config, config.region_bytes);
            let superblock =
                Superblock { node, region_bytes: config.region_bytes, region_count, file_id: random_u64() };
            write_superblocks(&*engine, &superblock).map_err(io_error)?;
            superblock
        } else {
            choose_superblock(&pages, &config.path, node)?
        };
        let write_buffers = (0..WRITE_BUFFERS).map(|_| Allocation::new(superblock.region_bytes as usize)).collect();
        Self::start(config, Device { engine, superblock, folder: None, lock: None, write_buffers, is_direct: false })
    }

    fn start(config: &NvmeConfig, device: Device) -> Result<Arc<Self>, NvmeError> {
        let Device { engine, superblock, folder, lock, write_buffers, is_direct } = device;
        let regions = Regions::new(superblock.region_count, superblock.region_bytes);
        let count = f64::from(superblock.region_count);
        let free_at = |watermark: f64| (count * (1.0 - watermark)).ceil() as u32;
        let reclaim_from = free_at(config.watermark_high).max(RESERVED_REGIONS + 1);
        let core = Arc::new(Core {
            engine,
            regions,
            inbox: Inbox::default(),
            stats: Counters::default(),
            write_buffers,
            read_buffers: BufferPool::new(usize::try_from(config.read_buffer_bytes).unwrap_or(usize::MAX)),
            write_depth: config.queue_depth as usize,
            reclaim_from,
            reclaim_to: free_at(config.watermark_low).max(reclaim_from + 1),
            pressure: Arc::new(Notify::new()),
            is_scanned: AtomicBool::new(false),
            state: Mutex::new(TierState::Serving),
            read_errors_in_a_row: AtomicU32::new(0),
            folder,
        });
        let (recovered, graves) = recover(&core)?;
        let flusher = Flusher::new(Arc::clone(&core));
        let flusher = thread::Builder::new()
            .name("nvme-flush".into())
            .spawn(move || {
                flusher.run();
                // Nobody writes any more. A read or a scan may last longer, and harms nobody.
                drop(lock);
            })
            .map_err(|source| NvmeError::Io { action: "start the flusher", source })?;
        if recovered.regions == 0 {
            core.is_scanned.store(true, Ordering::SeqCst);
        }
        Ok(Arc::new(Self {
            core,
            scrubbed_sequence: AtomicU64::new(0),
            read_permits: Arc::new(Semaphore::new(config.queue_depth as usize)),
            write_permits: Arc::new(Semaphore::new(config.queue_depth as usize * WRITES_PER_DEPTH)),
            flusher: Mutex::new(Some(flusher)),
            graves: Mutex::new(Some(graves)),
            recovered,
            is_direct,
        }))
    }

    /// Stores a slice; returns when it can be read, before it is durable ([`Self::sync`]). The source's bytes are
    /// checked against the header on the way. Many at once are packed together: small slices written one after
    /// another, each awaited, take a page each.
    ///
    /// Cancel safe: a slice whose caller has gone is released, as is one that the caller doesn't [`Written::keep`].
    ///
    /// # Errors
    /// `TooLarge`; `SourceMismatch`; `Full` if no region became free in time; `OutOfService`.
    pub async fn write(&self, header: SliceHeader, source: Arc<dyn SliceSource>) -> Result<Written, NvmeError> {
        self.core.check()?;
        let (length, limit) = (header.slice_length, self.max_slice_bytes());
        if length > limit {
            return Err(NvmeError::TooLarge { length, limit });
        }
        let permit = Arc::clone(&self.write_permits).acquire_owned().await.map_err(|_| self.detached())?;
        let (reply, placed) = oneshot::channel();
        self.core.inbox.push(Event::Write(WriteRequest { header, source, reply, permit: Some(permit) }));
        placed.await.unwrap_or_else(|_| Err(self.detached()))
    }

    /// Reads `range` (bytes, relative to the slice) into `target`, which has room for it; gives the record's header,
    /// whose key and tenant the caller may compare too. Nothing but verified bytes counts as read.
    ///
    /// Cancel safe: the target stays with the I/O and is dropped after it.
    ///
    /// # Errors
    /// `Stale` if the record is gone; `Corrupt` or `Io` if it can't be read (take another replica, release this one);
    /// `Range`; `OutOfService`. The target is gone then.
    pub async fn read<T: Landing>(
        &self,
        location: Location,
        name: SliceName,
        range: Range<u32>,
        target: T,
    ) -> Result<(SliceHeader, T), NvmeError> {
        self.core.check()?;
        let permit = Arc::clone(&self.read_permits).acquire_owned().await.map_err(|_| self.detached())?;
        let read = async { Reader::new(&self.core, location, name, permit)?.read(range, target).await };
        let error = match read.await {
            Ok(read) => return Ok(read),
            Err(error) => error,
        };
        // Closed meanwhile: whoever has the folder now may have written there, which is no damage.
        self.core.check()?;
        let count = match &error {
            NvmeError::Stale { .. } => &self.core.stats.stale,
            NvmeError::Corrupt { location, what } => {
                tracing::warn!(?location, what, "a record on the nvme tier is damaged");
                &self.core.stats.corrupt
            }
            _ => return Err(error),
        };
        count.fetch_add(1, Ordering::Relaxed);
        Err(error)
    }

    /// Lets tasks of the runtime on which this future runs read without a detour over the engine's threads: to be
    /// spawned by the owner, on a runtime with I/O enabled. Ends when the tier is gone; dropped, it waits for the reads
    /// in flight.
    pub fn drive_reads(&self) -> BoxFuture<'static, ()> {
        self.core.engine.drive()
    }

    /// The record is dead: its bytes count as free at once, and it doesn't return after a restart (from the next
    /// [`Self::sync`] on for sure, from a second later in practice). To be called once for each location.
    pub fn release(&self, location: Location) {
        self.core.release(location);
    }

    /// Returns when everything written and released before is durable.
    ///
    /// # Errors
    /// `OutOfService`; `Full` if a full disk has no room for tombstones.
    pub async fn sync(&self) -> Result<(), NvmeError> {
        self.core.check()?;
        ask(&self.core, Event::Sync).await
    }

    /// Whether opening found the record released: its bytes may still be readable, and it is counted as free. For places
    /// that are known from elsewhere, before [`Self::scan`].
    #[must_use]
    pub fn is_released(&self, location: Location) -> bool {
        let Some(hold) = self.core.regions.hold(location) else { return true };
        let graves = self.graves.lock();
        let dead = graves.as_ref().and_then(|graves| graves.get(&hold.epoch().sequence));
        dead.is_some_and(|dead| dead.binary_search(&location.offset).is_ok())
    }

    /// Announces all live records that were there at opening, newest regions first. Call it once; a second call
    /// announces nothing. Reclaim waits for its end.
    #[must_use]
    pub fn scan(&self) -> mpsc::Receiver<ScanBatch> {
        match self.graves.lock().take() {
            Some(graves) => scan(&self.core, graves),
            None => mpsc::channel(1).1,
        }
    }

    /// Seals, syncs and stops writing; the folder is free once this is dropped too.
    ///
    /// # Errors
    /// What kept records from becoming durable.
    pub async fn close(&self) -> Result<(), NvmeError> {
        self.write_permits.close();
        let result = ask(&self.core, Event::Close).await;
        {
            let mut state = self.core.state.lock();
            if *state == TierState::Serving {
                *state = TierState::Detached;
            }
        }
        self.core.pressure.notify_one();
        if result.is_ok() {
            // Nothing is left to be written: it ends now, and gives up the folder. After a failure it waits for what the disk still has.
            let flusher = self.flusher.lock().take();
            let ended = tokio::task::spawn_blocking(move || flusher.map(JoinHandle::join));
            let _panicked = ended.await;
        }
        result
    }

    fn detached(&self) -> NvmeError {
        self.core.check().err().unwrap_or(NvmeError::OutOfService { reason: "closing".into() })
    }

    /// The longest slice that fits.
    #[must_use]
    pub fn max_slice_bytes(&self) -> u32 {
        max_slice_bytes(self.core.regions.region_bytes())
    }

    /// Whether the tier serves.
    #[must_use]
    pub fn state(&self) -> TierState {
        self.core.state.lock().clone()
    }

    /// How full it is.
    #[must_use]
    pub fn usage(&self) -> NvmeUsage {
        self.core.regions.usage()
    }

    /// What opening found.
    #[must_use]
    pub fn recovered(&self) -> Recovered {
        self.recovered
    }

    /// The engine in use.
    #[must_use]
    pub fn engine(&self) -> EngineKind {
        self.core.engine.kind()
    }

    /// Whether the page cache is passed by.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Counts since opening.
    #[must_use]
    pub fn stats(&self) -> NvmeStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let stats = &self.core.stats;
        let (written, device) = (count(&stats.written_slice_bytes), count(&stats.device_bytes));
        NvmeStats {
            written_slices: count(&stats.written_slices) - count(&stats.moved_slices),
            written_slice_bytes: written - count(&stats.moved_slice_bytes),
            moved_slices: count(&stats.moved_slices),
            moved_slice_bytes: count(&stats.moved_slice_bytes),
            device_bytes: device,
            reads: count(&stats.reads),
            read_bytes: count(&stats.read_bytes),
            read_errors: count(&stats.read_errors),
            write_errors: count(&stats.write_errors),
            corrupt_records: count(&stats.corrupt),
            stale_reads: count(&stats.stale),
            reclaimed_regions: count(&stats.reclaimed_regions),
            dropped_slices: count(&stats.dropped_slices),
            scrubbed_bytes: count(&stats.scrubbed_bytes),
            write_amplification: match written - count(&stats.moved_slice_bytes) {
                0 => 0.0,
                asked => device as f64 / asked as f64,
            },
        }
    }
}

impl Drop for NvmeTier {
    fn drop(&mut self) {
        self.core.inbox.push(Event::Shutdown);
        if let Some(flusher) = self.flusher.lock().take() {
            drop(flusher.join());
        }
    }
}

fn wanted_regions(config: &NvmeConfig, region_bytes: u64) -> u32 {
    u32::try_from(config.capacity_bytes.saturating_sub(REGIONS_START) / region_bytes).unwrap_or(u32::MAX)
}

fn file_bytes(superblock: &Superblock) -> u64 {
    REGIONS_START + u64::from(superblock.region_count) * superblock.region_bytes
}

/// Writes A, makes it durable, then B: one of them is whole at every moment.
fn write_superblocks(engine: &dyn IoEngine, superblock: &Superblock) -> std::io::Result<()> {
    for copy in 0..2 {
        let mut page = Block::new(PAGE_BYTES);
        let bytes = superblock.encode();
        page[..bytes.len()].copy_from_slice(&bytes);
        engine.write_block(copy * PAGE_BYTES as u64, page)?;
        engine.sync()?;
    }
    Ok(())
}

fn read_superblock_of(file: &std::fs::File, folder: &Folder, node: NodeId) -> Result<Superblock, NvmeError> {
    let path = folder.data_path();
    let not_ours = |reason: &str| NvmeError::NotOurs { path: path.clone(), reason: reason.into() };
    if folder.data_bytes()? < REGIONS_START {
        return Err(not_ours("it is too short"));
    }
    let file = file.try_clone().map_err(|source| NvmeError::Folder { action: "open", path: path.clone(), source })?;
    let engine = crate::io::BlockingEngine::start(file, 1);
    let pages = engine.and_then(|engine| (&engine as &dyn IoEngine).read_block(0, Block::new(2 * PAGE_BYTES)));
    let pages = pages.map_err(|source| NvmeError::Folder { action: "read", path: path.clone(), source })?;
    let superblock = choose_superblock(&pages, &path, node)?;
    match folder.data_bytes()? < file_bytes(&superblock) {
        true => Err(not_ours("it is shorter than its superblock says")),
        false => Ok(superblock),
    }
}

/// The first valid superblock of the two, if it is for us.
fn choose_superblock(pages: &[u8], path: &std::path::Path, node: NodeId) -> Result<Superblock, NvmeError> {
    let not_ours = |reason: String| NvmeError::NotOurs { path: path.to_owned(), reason };
    let copies = [Superblock::decode(&pages[..PAGE_BYTES]), Superblock::decode(&pages[PAGE_BYTES..])];
    let found = match copies {
        [Ok(first), _] => first,
        [_, Ok(second)] => {
            tracing::warn!(path = %path.display(), "the first superblock is damaged; the second is used");
            second
        }
        [Err(SuperblockFault::Version(version)), _] | [_, Err(SuperblockFault::Version(version))] => {
            return Err(not_ours(format!("format version {version}, this program knows up to 1")));
        }
        [Err(SuperblockFault::Damaged), _] | [_, Err(SuperblockFault::Damaged)] => {
            return Err(not_ours("both superblocks are damaged".into()));
        }
        [Err(SuperblockFault::Foreign), Err(SuperblockFault::Foreign)] => {
            return Err(not_ours("it has another magic".into()));
        }
    };
    let is_sane = found.region_bytes.is_multiple_of(PAGE_BYTES as u64)
        && (256 << 10..=256 << 20).contains(&found.region_bytes)
        && u64::from(found.region_count) >= NvmeConfig::MIN_REGIONS;
    if !is_sane {
        return Err(not_ours("its superblock makes no sense".into()));
    }
    match found.node == node {
        true => Ok(found),
        false => Err(NvmeError::OtherNode { path: path.to_owned(), owner: found.node, node }),
    }
}

/// Fits an existing file to the configured capacity.
fn resize(
    folder: &Folder,
    engine: &dyn IoEngine,
    found: Superblock,
    config: &NvmeConfig,
) -> Result<Superblock, NvmeError> {
    if config.region_bytes != found.region_bytes {
        tracing::warn!(
            configured = config.region_bytes,
            in_use = found.region_bytes,
            "nvme.region_bytes applies to a new folder only"
        );
    }
    let wanted = wanted_regions(config, found.region_bytes).max(NvmeConfig::MIN_REGIONS as u32);
    let region_count = folder.affordable(wanted, found.region_count, found.region_bytes)?;
    if region_count == found.region_count {
        return Ok(found);
    }
    let resized = Superblock { region_count, ..found };
    let path = folder.data_path();
    let write = || {
        write_superblocks(engine, &resized).map_err(|source| NvmeError::Folder {
            action: "write the superblock of",
            path,
            source,
        })
    };
    if region_count > found.region_count {
        folder.resize(file_bytes(&resized))?;
        write()?;
    } else {
        let dropped = found.region_count - region_count;
        tracing::warn!(
            dropped,
            "nvme.capacity_bytes is smaller than before: the records of the regions beyond it are dropped"
        );
        write()?;
        folder.resize(file_bytes(&resized))?;
    }
    Ok(resized)
}
