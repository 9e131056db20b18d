//! When writes are durable: regions are sealed, syncs shared, footers written, regions freed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::inbox::{Event, Reply};
use super::{Flusher, Purpose};
use crate::io::{IoMemory, IoRequest, Operation, PAGE_BYTES};
use crate::nvme::NvmeError;
use crate::nvme::format::{Epoch, Footer, footer_pages_start};

/// Filled regions that are sealed with one sync, in a tier of many regions: a sync can cost as much as writing several
/// regions. Smaller tiers wait for fewer, because reclaim takes only sealed ones.
const SEALED_TOGETHER: u32 = 8;
const SEALED_SHARE: u32 = 16;
/// A filled region waits at most this long for company.
pub(super) const SEALED_AFTER: Duration = Duration::from_secs(1);

/// To be done when all writes up to `after` are durable.
pub(super) struct SyncPoint {
    pub(super) after: u64,
    pub(super) asked: Instant,
    pub(super) then: Then,
}

pub(super) enum Then {
    Reply(Reply),
    WriteFooter { region: u32, epoch: Epoch, footer: Footer },
    Free(u32, Reply),
}

impl Flusher {
    pub(super) fn seal(&mut self) {
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
    pub(super) fn take_syncs(&mut self) {
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

    pub(super) fn sync_after(&mut self, after: u64, then: Then) {
        self.sync_points.push(SyncPoint { after, asked: Instant::now(), then });
    }

    pub(super) fn sync_if_due(&mut self) {
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

    pub(super) fn oldest_in_flight(&self) -> u64 {
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

    pub(super) fn synced(&mut self, result: io::Result<()>) {
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
}
