//! The flusher: the one thread that writes. It packs slices into the open region, writes full pages in large blocks,
//! seals regions, writes tombstones and free headers, and issues every sync.
//!
//! Order of a region's writes (docs/src/formats/nvme.md):
//!
//! ```text
//! place -> write blocks -> (all confirmed) -> fdatasync -> footer -> Sealed
//!             \-> reply to the records whose bytes are confirmed
//! ```
//!
//! A partly filled page is written only when nothing is in flight, so that small writes batch by themselves: the
//! deeper the device's queue, the fuller the blocks. Syncs are shared: one `fdatasync` covers every sync point whose
//! writes are confirmed.
//!
//! Failure: the first failed write or sync puts the tier out of service; all that waits is answered with the reason,
//! and nothing is written after that. A write that finds no free region waits for reclaim for [`FULL_AFTER`], then is
//! refused with `Full`.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tidepool_metadata::SliceHeader;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::NvmeError;
use super::core::{Core, Written};
use super::format::{Epoch, Footer, RegionHeader, Tombstone, Trailer, footer_pages_start};
use super::open_region::{OpenRegion, SliceSource};
use super::region::Location;
use crate::io::{Block, Completion, IoMemory, IoRequest, Operation, PAGE_BYTES};

/// Blocks are written as soon as they have this length: large enough for the device, small enough to overlap with the
/// copying of the next.
const WRITE_BYTES: usize = 1 << 20;
/// Regions that only reclaim and tombstones may take, so that making room never needs room that isn't there.
pub(super) const RESERVED_REGIONS: u32 = 2;
/// How long a write waits for reclaim to free a region.
const FULL_AFTER: Duration = Duration::from_secs(2);
/// Released records' tombstones wait at most this long for company.
const TOMBSTONES_AFTER: Duration = Duration::from_secs(1);
/// So many are written at once, without waiting.
const TOMBSTONES_BATCH: usize = 4096;
/// Keeps a tombstones record below the length at which payloads are aligned.
const TOMBSTONES_PER_RECORD: usize = 2048;
/// Filled regions that are sealed with one sync, in a tier of many regions: a sync can cost as much as writing several
/// regions. Smaller tiers wait for fewer, because reclaim takes only sealed ones.
const SEALED_TOGETHER: u32 = 8;
const SEALED_SHARE: u32 = 16;
/// A filled region waits at most this long for company.
const SEALED_AFTER: Duration = Duration::from_secs(1);
/// While a write waits for room, the reclaimer is woken again this often.
const STALL_TICK: Duration = Duration::from_millis(20);

/// A slice to write.
pub(super) struct WriteRequest {
    pub(super) header: SliceHeader,
    pub(super) source: Arc<dyn SliceSource>,
    pub(super) reply: oneshot::Sender<Result<Written, NvmeError>>,
    /// Bounds what waits; none for records that reclaim moves, which bounds itself.
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

type Reply = oneshot::Sender<Result<(), NvmeError>>;

pub(super) enum Event {
    Write(WriteRequest),
    /// As `Write`, by reclaim: may take reserved regions.
    Move(WriteRequest),
    Sync(Reply),
    /// A retired and drained region: make its free header durable, then free it.
    Free(u32, Reply),
    /// Seal, sync, stop.
    Close(Reply),
    /// Stop as soon as nothing is in flight.
    Shutdown,
    Written(u64, io::Result<()>),
    Synced(io::Result<()>),
}

/// What the flusher is to do. Bounded by the write permits, the engine's depth, and one caller each for the rest.
#[derive(Default)]
pub(super) struct Inbox {
    events: Mutex<VecDeque<Event>>,
    /// The flusher has ended: whatever comes is dropped, and who waits for its answer hears that.
    is_closed: AtomicBool,
    arrived: Condvar,
    /// At most one for each record on disk.
    tombstones: Mutex<Vec<Tombstone>>,
}

impl Inbox {
    pub(super) fn push(&self, event: Event) {
        let mut events = self.events.lock();
        if self.is_closed.load(Ordering::Relaxed) {
            drop(events);
            return drop(event);
        }
        events.push_back(event);
        drop(events);
        self.arrived.notify_one();
    }

    fn close(&self) {
        let mut events = self.events.lock();
        self.is_closed.store(true, Ordering::Relaxed);
        let left = std::mem::take(&mut *events);
        // Not under the lock: what is dropped may push.
        drop(events);
        drop(left);
    }

    pub(super) fn bury(&self, tombstones: impl IntoIterator<Item = Tombstone>) {
        let mut waiting = self.tombstones.lock();
        let before = waiting.len();
        waiting.extend(tombstones);
        let wake = before == 0 || before < TOMBSTONES_BATCH && waiting.len() >= TOMBSTONES_BATCH;
        drop(waiting);
        if wake {
            // Under the lock, so that a flusher about to wait isn't missed.
            let _events = self.events.lock();
            self.arrived.notify_one();
        }
    }

    fn wait(&self, timeout: Option<Duration>, has_news: impl Fn() -> bool) -> VecDeque<Event> {
        let mut events = self.events.lock();
        if events.is_empty() && !has_news() {
            match timeout {
                Some(timeout) => drop(self.arrived.wait_for(&mut events, timeout)),
                None => self.arrived.wait(&mut events),
            }
        }
        std::mem::take(&mut events)
    }
}

/// A record whose bytes are on their way.
struct Waiting {
    end: usize,
    reply: oneshot::Sender<Result<Written, NvmeError>>,
    location: Location,
    _permit: Option<OwnedSemaphorePermit>,
}

/// How much of a region is confirmed.
struct Progress {
    sequence: u64,
    confirmed: usize,
    /// Confirmed ranges beyond a gap.
    early: BTreeMap<usize, usize>,
    waiting: VecDeque<Waiting>,
    is_closed: bool,
}

impl Progress {
    fn confirm(&mut self, start: usize, end: usize) {
        self.early.insert(start, end);
        while let Some(end) = self.early.remove(&self.confirmed) {
            self.confirmed = end;
        }
    }
}

/// What a write was for.
enum Purpose {
    Data { sequence: u64, start: usize, end: usize },
    Footer { region: u32, trailer: Trailer },
    FreeHeader,
}

/// To be done when all writes up to `after` are durable.
struct SyncPoint {
    after: u64,
    asked: Instant,
    then: Then,
}

enum Then {
    Reply(Reply),
    WriteFooter { region: u32, epoch: Epoch, footer: Footer },
    Free(u32, Reply),
}

pub(super) struct Flusher {
    core: Arc<Core>,
    open: Option<OpenRegion>,
    writes: VecDeque<WriteRequest>,
    moves: VecDeque<WriteRequest>,
    progress: Vec<Progress>,
    in_flight: BTreeMap<u64, Purpose>,
    next_write: u64,
    /// Asked for, tombstones not placed yet.
    syncs: Vec<Reply>,
    sync_points: Vec<SyncPoint>,
    syncing: Vec<Then>,
    stalled_since: Option<Instant>,
    tombstones_since: Option<Instant>,
    closing: Option<Reply>,
    is_stopping: bool,
}

enum Placing {
    Done,
    /// No region buffer, or the device's queue is full: a completion will tell.
    Busy(WriteRequest),
    /// No free region: reclaim will tell.
    NoRegion(WriteRequest),
}

impl Flusher {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            open: None,
            writes: VecDeque::new(),
            moves: VecDeque::new(),
            progress: Vec::new(),
            in_flight: BTreeMap::new(),
            next_write: 1,
            syncs: Vec::new(),
            sync_points: Vec::new(),
            syncing: Vec::new(),
            stalled_since: None,
            tombstones_since: None,
            closing: None,
            is_stopping: false,
        }
    }

    pub(super) fn run(mut self) {
        while !self.is_over() {
            let timeout = self.timeout();
            let (core, since) = (Arc::clone(&self.core), self.tombstones_since);
            let has_news = || {
                let waiting = core.inbox.tombstones.lock().len();
                waiting >= TOMBSTONES_BATCH || waiting > 0 && since.is_none()
            };
            let events = core.inbox.wait(timeout, has_news);
            events.into_iter().for_each(|event| self.take(event));
            if !self.core.is_failed() {
                self.step();
            }
            // A step may have found the failure: nobody waits for another event to hear of it.
            if self.core.is_failed() {
                self.refuse_all();
            }
        }
        if let Some(reply) = self.closing.take() {
            drop(reply.send(self.core.check()));
        }
        self.core.inbox.close();
    }

    fn step(&mut self) {
        self.bury();
        self.place_all();
        self.take_syncs();
        self.write_ready();
        self.close_if_asked();
        self.sync_if_due();
    }

    fn is_over(&self) -> bool {
        let quiet = self.in_flight.is_empty() && self.syncing.is_empty();
        quiet && self.is_stopping && (self.core.is_failed() || self.closing.is_none() || self.is_clean())
    }

    fn is_clean(&self) -> bool {
        self.open.is_none() && self.sync_points.is_empty() && self.writes.is_empty() && self.moves.is_empty()
    }

    fn timeout(&self) -> Option<Duration> {
        if self.core.is_failed() {
            return None;
        }
        let stall = self.stalled_since.map(|_| STALL_TICK);
        let tombstones = self.tombstones_since.map(|since| TOMBSTONES_AFTER.saturating_sub(since.elapsed()));
        let is_due = |point: &&SyncPoint| self.syncing.is_empty() && point.after < self.oldest_in_flight();
        let seal = self.sync_points.first().filter(is_due);
        let seal = seal.map(|point| SEALED_AFTER.saturating_sub(point.asked.elapsed()));
        stall.into_iter().chain(tombstones).chain(seal).min()
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Write(write) => self.writes.push_back(write),
            Event::Move(write) => self.moves.push_back(write),
            Event::Sync(reply) => self.syncs.push(reply),
            Event::Free(region, reply) => self.write_free_header(region, reply),
            Event::Close(reply) => {
                self.closing = Some(reply);
                self.is_stopping = true;
            }
            Event::Shutdown => self.is_stopping = true,
            Event::Written(write, result) => self.written(write, result),
            Event::Synced(result) => self.synced(result),
        }
    }

    // ---- placing ----

    fn place_all(&mut self) {
        let mut stalled = false;
        while let Some(write) = self.moves.pop_front() {
            match self.place(write, 0) {
                Placing::Done => {}
                Placing::Busy(write) => {
                    self.moves.push_front(write);
                    return;
                }
                // Reclaim itself is out of room: it keeps the victim and reports to its caller.
                Placing::NoRegion(write) => drop(write.reply.send(Err(NvmeError::Full))),
            }
        }
        while let Some(write) = self.writes.pop_front() {
            match self.place(write, RESERVED_REGIONS) {
                Placing::Done => {}
                Placing::Busy(write) => {
                    self.writes.push_front(write);
                    break;
                }
                Placing::NoRegion(write) => {
                    self.writes.push_front(write);
                    stalled = true;
                    break;
                }
            }
        }
        self.note_stall(stalled);
    }

    fn note_stall(&mut self, stalled: bool) {
        if !stalled {
            self.stalled_since = None;
            return;
        }
        self.core.pressure.notify_one();
        let since = *self.stalled_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= FULL_AFTER || self.is_stopping {
            self.writes.drain(..).for_each(|write| drop(write.reply.send(Err(NvmeError::Full))));
            self.stalled_since = None;
        }
    }

    fn place(&mut self, write: WriteRequest, keep: u32) -> Placing {
        if write.reply.is_closed() {
            return Placing::Done;
        }
        let (key_length, slice_length) = (write.header.key.as_bytes().len(), write.header.slice_length as usize);
        // A region that was opened from the reserve is for reclaim until the reserve is whole again: otherwise writes
        // would fill it behind each moved record, and reclaim would run dry.
        if self.open.is_some() && self.core.regions.free_count() < keep {
            return Placing::NoRegion(write);
        }
        if self.open.as_ref().is_some_and(|open| !open.fits(key_length, slice_length)) {
            self.seal();
        }
        if self.open.is_none() {
            match self.open_region(keep) {
                Ok(true) => {}
                Ok(false) => return Placing::NoRegion(write),
                Err(Unready) => return Placing::Busy(write),
            }
        }
        if self.in_flight.len() >= self.core.write_depth {
            return Placing::Busy(write);
        }
        let Some(open) = self.open.as_mut() else { return Placing::Busy(write) };
        match open.append(&write.header, &*write.source) {
            Err(error) => drop(write.reply.send(Err(error))),
            Ok((offset, length)) => {
                let (region, sequence) = (open.region, open.epoch.sequence as u32);
                let location = Location { region, sequence, offset, length, checksum: write.header.checksum };
                let end = open.cursor();
                self.core.regions.place(open.region, u64::from(length));
                self.core.stats.written_slices.fetch_add(1, Ordering::Relaxed);
                self.core.stats.written_slice_bytes.fetch_add(slice_length as u64, Ordering::Relaxed);
                let waiting = Waiting { end, reply: write.reply, location, _permit: write.permit };
                if let Some(progress) = self.progress.last_mut() {
                    progress.waiting.push_back(waiting);
                }
                self.write_filled(WRITE_BYTES);
            }
        }
        Placing::Done
    }

    /// Opens a region; false if no more than `keep` are free.
    fn open_region(&mut self, keep: u32) -> Result<bool, Unready> {
        let block = self.core.write_buffers.iter().find_map(|buffer| buffer.lend()).ok_or(Unready)?;
        if let Err(error) = self.core.check_folder() {
            self.core.fail(&error);
            return Err(Unready);
        }
        let Some((region, epoch)) = self.core.regions.open(keep, self.core.random_salt()) else { return Ok(false) };
        self.core.wake_reclaimer_if_low();
        self.progress.push(Progress {
            sequence: epoch.sequence,
            confirmed: 0,
            early: BTreeMap::new(),
            waiting: VecDeque::new(),
            is_closed: false,
        });
        self.open = Some(OpenRegion::new(region, epoch, block));
        Ok(true)
    }

    fn bury(&mut self) {
        let waiting = self.core.inbox.tombstones.lock().len();
        if waiting == 0 {
            self.tombstones_since = None;
            return;
        }
        let since = *self.tombstones_since.get_or_insert_with(Instant::now);
        let due = waiting >= TOMBSTONES_BATCH || since.elapsed() >= TOMBSTONES_AFTER || self.is_stopping;
        if due {
            self.write_tombstones();
        }
    }

    /// Puts all waiting tombstones into the open region, or a new one; those that find no place wait on.
    fn write_tombstones(&mut self) {
        let mut tombstones = std::mem::take(&mut *self.core.inbox.tombstones.lock());
        tombstones.retain(|tombstone| self.core.regions.is_current(tombstone.sequence));
        while !tombstones.is_empty() {
            if self.open.is_none() && !matches!(self.open_region(0), Ok(true)) {
                break;
            }
            let Some(open) = self.open.as_mut() else { break };
            let count = open.tombstones_that_fit(tombstones.len().min(TOMBSTONES_PER_RECORD));
            if count == 0 {
                self.seal();
                continue;
            }
            open.append_tombstones(&tombstones[tombstones.len() - count..]);
            tombstones.truncate(tombstones.len() - count);
        }
        self.tombstones_since = (!tombstones.is_empty()).then(Instant::now);
        self.core.inbox.tombstones.lock().append(&mut tombstones);
    }

    // ---- writing ----

    fn write_ready(&mut self) {
        if self.in_flight.is_empty() {
            self.write_all();
        }
    }

    fn write_filled(&mut self, least: usize) {
        let Some(open) = self.open.as_mut() else { return };
        if let Some((offset, block)) = open.take_filled(least) {
            let (region, sequence) = (open.region, open.epoch.sequence);
            self.write_data(region, sequence, offset, block);
        }
    }

    /// Writes everything that is placed, padding the last page.
    fn write_all(&mut self) {
        let Some(open) = self.open.as_mut() else { return };
        if let Some((offset, block)) = open.take_all() {
            let (region, sequence) = (open.region, open.epoch.sequence);
            self.write_data(region, sequence, offset, block);
        }
    }

    fn write_data(&mut self, region: u32, sequence: u64, offset: usize, block: Block) {
        let purpose = Purpose::Data { sequence, start: offset, end: offset + block.len() };
        self.write(region, offset, block, purpose);
    }

    fn write(&mut self, region: u32, offset: usize, block: Block, purpose: Purpose) {
        let write = self.next_write;
        self.next_write += 1;
        self.in_flight.insert(write, purpose);
        self.core.stats.device_bytes.fetch_add(block.len() as u64, Ordering::Relaxed);
        let core = Arc::clone(&self.core);
        self.core.engine.submit(IoRequest {
            operation: Operation::Write,
            offset: self.core.offset_of(region) + offset as u64,
            memory: IoMemory::block(block),
            done: Box::new(move |Completion { result, memory }| {
                // First, so that the flusher finds the buffer free.
                drop(memory);
                core.inbox.push(Event::Written(write, result));
            }),
        });
    }

    fn written(&mut self, write: u64, result: io::Result<()>) {
        let purpose = self.in_flight.remove(&write);
        if let Err(source) = result {
            self.core.stats.write_errors.fetch_add(1, Ordering::Relaxed);
            return self.core.fail(&NvmeError::Io { action: "write to the nvme tier", source });
        }
        match purpose {
            Some(Purpose::Data { sequence, start, end }) => self.confirm(sequence, start, end),
            Some(Purpose::Footer { region, trailer }) => {
                self.core.regions.seal(region, trailer);
                self.core.pressure.notify_one();
            }
            Some(Purpose::FreeHeader) | None => {}
        }
    }

    fn confirm(&mut self, sequence: u64, start: usize, end: usize) {
        let Some(progress) = self.progress.iter_mut().find(|progress| progress.sequence == sequence) else { return };
        progress.confirm(start, end);
        while progress.waiting.front().is_some_and(|waiting| waiting.end <= progress.confirmed) {
            let Some(waiting) = progress.waiting.pop_front() else { break };
            self.core.regions.publish(u64::from(waiting.location.length));
            // A caller that went away drops what it is sent, which releases the record.
            drop(waiting.reply.send(Ok(Written::new(&self.core, waiting.location))));
        }
        self.progress.retain(|progress| !(progress.is_closed && progress.waiting.is_empty()));
    }

    fn write_free_header(&mut self, region: u32, reply: Reply) {
        let epoch = self.core.regions.retired_epoch(region);
        let mut block = Block::new(PAGE_BYTES);
        RegionHeader { epoch, is_free: true }.encode(&mut block);
        self.write(region, 0, block, Purpose::FreeHeader);
        self.sync_after(self.next_write - 1, Then::Free(region, reply));
    }

    // ---- sealing and syncing ----

    fn seal(&mut self) {
        self.write_all();
        let Some(open) = self.open.take() else { return };
        let (region, epoch) = (open.region, open.epoch);
        if let Some(progress) = self.progress.last_mut() {
            progress.is_closed = true;
        }
        self.progress.retain(|progress| !(progress.is_closed && progress.waiting.is_empty()));
        self.sync_after(self.next_write - 1, Then::WriteFooter { region, epoch, footer: open.into_footer() });
    }

    /// Writes out everything that is placed, and every tombstone, and answers the syncs when that is durable.
    fn take_syncs(&mut self) {
        if self.syncs.is_empty() {
            return;
        }
        self.write_tombstones();
        if !self.core.inbox.tombstones.lock().is_empty() {
            // No buffer: a write in flight will free one. No region: reclaim can't go on either.
            if self.in_flight.is_empty() {
                self.syncs.drain(..).for_each(|reply| drop(reply.send(Err(NvmeError::Full))));
            }
            return;
        }
        self.write_all();
        for reply in std::mem::take(&mut self.syncs) {
            self.sync_after(self.next_write - 1, Then::Reply(reply));
        }
    }

    fn sync_after(&mut self, after: u64, then: Then) {
        self.sync_points.push(SyncPoint { after, asked: Instant::now(), then });
    }

    fn sync_if_due(&mut self) {
        if !self.syncing.is_empty() {
            return;
        }
        let oldest = self.oldest_in_flight();
        let (due, waiting) = std::mem::take(&mut self.sync_points).into_iter().partition(|point| point.after < oldest);
        self.sync_points = waiting;
        let due: Vec<SyncPoint> = due;
        if !self.is_worth_a_sync(&due) {
            self.sync_points.splice(0..0, due);
            return;
        }
        self.syncing = due.into_iter().map(|point| point.then).collect();
        let core = Arc::clone(&self.core);
        self.core.engine.submit(IoRequest {
            operation: Operation::Sync,
            offset: 0,
            memory: IoMemory::empty(),
            done: Box::new(move |completion| core.inbox.push(Event::Synced(completion.result))),
        });
    }

    fn oldest_in_flight(&self) -> u64 {
        self.in_flight.first_key_value().map_or(u64::MAX, |(&write, _)| write)
    }

    /// Whoever waits for a sync gets one at once; regions that are to be sealed wait for each other.
    fn is_worth_a_sync(&self, due: &[SyncPoint]) -> bool {
        let together = (self.core.regions.count() / SEALED_SHARE).clamp(1, SEALED_TOGETHER) as usize;
        let is_awaited = |point: &SyncPoint| !matches!(point.then, Then::WriteFooter { .. });
        let oldest = due.first().map_or(Duration::ZERO, |point| point.asked.elapsed());
        due.len() >= together
            || oldest >= SEALED_AFTER
            || !due.is_empty() && (self.is_stopping || self.stalled_since.is_some())
            || due.iter().any(is_awaited)
    }

    fn synced(&mut self, result: io::Result<()>) {
        let done = std::mem::take(&mut self.syncing);
        if let Err(source) = result {
            self.core.stats.write_errors.fetch_add(1, Ordering::Relaxed);
            self.core.fail(&NvmeError::Io { action: "sync the nvme tier", source });
            // Dropped replies read as out of service.
            return;
        }
        for then in done {
            match then {
                Then::Reply(reply) => drop(reply.send(Ok(()))),
                Then::WriteFooter { region, epoch, footer } => self.write_footer(region, epoch, &footer),
                Then::Free(region, reply) => {
                    self.core.regions.free(region);
                    drop(reply.send(Ok(())));
                }
            }
        }
    }

    fn write_footer(&mut self, region: u32, epoch: Epoch, footer: &Footer) {
        let region_bytes = self.core.regions.region_bytes() as usize;
        let start = footer_pages_start(region_bytes, footer.footer_bytes()).unwrap_or_default();
        assert!(start >= PAGE_BYTES, "footer of {} bytes outgrows its region", footer.footer_bytes());
        let mut pages = self.core.read_buffers.take(region_bytes - start);
        let trailer = footer.encode(epoch, &mut pages);
        self.write(region, start, pages, Purpose::Footer { region, trailer });
    }

    // ---- ending ----

    /// On a clean stop: seals, and once every footer is written, syncs once more.
    fn close_if_asked(&mut self) {
        if self.closing.is_none() || !self.writes.is_empty() || !self.moves.is_empty() {
            return;
        }
        if self.open.is_some() {
            self.seal();
            return;
        }
        let quiet = self.in_flight.is_empty() && self.syncing.is_empty() && self.sync_points.is_empty();
        if quiet && let Some(reply) = self.closing.take() {
            self.sync_after(self.next_write - 1, Then::Reply(reply));
        }
    }

    /// The tier has failed: answers everything that waits.
    fn refuse_all(&mut self) {
        let core = Arc::clone(&self.core);
        let error = || core.check().err().unwrap_or(NvmeError::Full);
        for write in self.moves.drain(..).chain(self.writes.drain(..)) {
            drop(write.reply.send(Err(error())));
        }
        for mut progress in self.progress.drain(..) {
            for waiting in progress.waiting.drain(..) {
                self.core.regions.abandon(waiting.location);
                drop(waiting.reply.send(Err(error())));
            }
        }
        self.syncs.drain(..).for_each(|reply| drop(reply.send(Err(error()))));
        for point in self.sync_points.drain(..) {
            match point.then {
                Then::Reply(reply) | Then::Free(_, reply) => drop(reply.send(Err(error()))),
                Then::WriteFooter { .. } => {}
            }
        }
        self.open = None;
        self.core.inbox.tombstones.lock().clear();
        self.tombstones_since = None;
        self.core.pressure.notify_one();
    }
}

/// No buffer for a region: a write must end first.
struct Unready;
