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
//! and nothing is written after that. A write that finds no free region waits for reclaim for some seconds, then is
//! refused with `Full`.

mod inbox;
mod place;
mod seal;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use self::inbox::{Reply, TOMBSTONES_BATCH};
use self::seal::{SEALED_AFTER, SyncPoint, Then};
use super::NvmeError;
use super::core::{Core, Written};
use super::format::{RegionHeader, Trailer};
use super::location::Location;
use super::open_region::OpenRegion;
use crate::io::{Block, Completion, IoMemory, IoRequest, Operation, PAGE_BYTES};

pub(super) use self::inbox::{Event, Inbox, WriteRequest};

/// Regions that only reclaim and tombstones may take, so that making room never needs room that isn't there.
pub(super) const RESERVED_REGIONS: u32 = 2;
/// Released records' tombstones wait at most this long for company.
const TOMBSTONES_AFTER: Duration = Duration::from_secs(1);
/// While a write waits for room, the reclaimer is woken again this often.
const STALL_TICK: Duration = Duration::from_millis(20);

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
