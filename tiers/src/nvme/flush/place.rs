//! Where slices and tombstones go: the open region, or the next one.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::inbox::{TOMBSTONES_BATCH, WriteRequest};
use super::{Flusher, Progress, RESERVED_REGIONS, TOMBSTONES_AFTER, Waiting};
use crate::nvme::NvmeError;
use crate::nvme::location::Location;
use crate::nvme::open_region::OpenRegion;

/// Blocks are written as soon as they have this length: large enough for the device, small enough to overlap with the
/// copying of the next.
const WRITE_BYTES: usize = 1 << 20;
/// How long a write waits for reclaim to free a region.
const FULL_AFTER: Duration = Duration::from_secs(2);
/// Keeps a tombstones record below the length at which payloads are aligned.
const TOMBSTONES_PER_RECORD: usize = 2048;

enum Placing {
    Done,
    /// No region buffer, or the device's queue is full: a completion will tell.
    Busy(WriteRequest),
    /// No free region: reclaim will tell.
    NoRegion(WriteRequest),
}

/// No buffer for a region: a write must end first.
struct Unready;

impl Flusher {
    pub(super) fn place_all(&mut self) {
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

    pub(super) fn bury(&mut self) {
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
    pub(super) fn write_tombstones(&mut self) {
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
}
