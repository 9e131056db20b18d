//! Making free regions: picks the region with the least alive, asks the owner which of its records to keep, writes
//! those again, and frees the region.
//!
//! Order (docs/src/formats/nvme.md, "Order of writes"): kept records and carried tombstones are written and synced,
//! then the region is retired, its readers leave, its free header is made durable, and only then is it written again.
//! A crash anywhere leaves each kept record in at least one region.
//!
//! Runs after the scan has announced every record, since the owner judges by what it knows.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use tidepool_metadata::SliceHeader;
use tokio::sync::oneshot;

use super::core::Core;
use super::flush::{Event, WriteRequest};
use super::format::RecordHead;
use super::location::Location;
use super::open_region::SliceSource;
use super::recover::{payload_of, read_records, read_tombstones};
use super::region::SealedRegion;
use super::{NvmeError, NvmeTier};
use crate::io::{Block, BoxFuture, Completion, IoMemory, IoRequest, Operation};

/// Records that the owner judges at once.
const DECIDE_BATCH: usize = 512;

/// Empty regions that are freed with one sync.
const FREE_BATCH: usize = 32;

/// What becomes of a record whose region is reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Write it again; [`RecordOwner::moved`] tells where.
    Keep,
    /// Let it go. The owner has forgotten it already, and does not release it.
    Drop,
}

/// Whoever knows what the records are worth: the store above.
pub trait RecordOwner: Send + Sync {
    /// Judges records, in order; one verdict each. A record that the owner doesn't have at exactly that location
    /// (released, replaced) is `Drop`.
    fn decide(&self, records: Vec<(SliceHeader, Location)>) -> BoxFuture<'_, Vec<Verdict>>;

    /// A kept record can now be read at `to`; `from` is valid for a moment longer and is not to be released. False if
    /// the owner no longer wants it; it is released then.
    fn moved(&self, header: &SliceHeader, from: Location, to: Location) -> bool;

    /// A record turned out to be damaged, by reclaim or by a scrub: it is gone, and the owner does not release it. False
    /// if the owner did not have it there (any more).
    fn lost(&self, header: &SliceHeader, location: Location) -> bool;
}

/// What one reclaimed region gave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reclaimed {
    kept_bytes: u64,
}

impl NvmeTier {
    /// The work of the reclaimer, to be spawned by the owner: runs until the tier or the owner is gone, or the tier
    /// is out of service. Starts when the scan has ended.
    pub fn reclaim(self: &Arc<Self>, owner: Weak<dyn RecordOwner>) -> impl Future<Output = ()> + Send + 'static {
        let core = Arc::downgrade(&self.core);
        let pressure = Arc::clone(&self.core.pressure);
        async move {
            loop {
                match core.upgrade() {
                    Some(core) if core.check().is_ok() => {
                        if core.is_scanned.load(Ordering::SeqCst) {
                            make_room(&core, &owner).await;
                        }
                    }
                    _ => return,
                }
                if owner.strong_count() == 0 {
                    return;
                }
                pressure.notified().await;
            }
        }
    }
}

/// Reclaims until enough regions are free, or a whole round has gained nothing.
async fn make_room(core: &Arc<Core>, owner: &Weak<dyn RecordOwner>) {
    if core.regions.free_count() >= core.reclaim_from {
        return;
    }
    if let Err(error) = free_empty_regions(core).await {
        tracing::warn!(error = %super::chain(&error), "empty regions couldn't be reclaimed");
        return;
    }
    let mut unproductive = 0;
    while core.regions.free_count() < core.reclaim_to && core.check().is_ok() {
        let (Some(owner), Some(victim)) = (owner.upgrade(), core.regions.victim()) else { return };
        match reclaim_region(core, &*owner, victim).await {
            Ok(Reclaimed { kept_bytes }) if kept_bytes < core.regions.region_bytes() / 8 * 7 => unproductive = 0,
            Ok(_) => unproductive += 1,
            Err(error) => {
                tracing::warn!(region = victim.region, error = %super::chain(&error), "a region couldn't be reclaimed");
                return;
            }
        }
        if unproductive >= core.regions.count() {
            return;
        }
    }
}

/// Frees regions in which nothing is alive and which carry no tombstones: many headers, one sync.
async fn free_empty_regions(core: &Arc<Core>) -> Result<(), NvmeError> {
    let mut answers = Vec::new();
    for empty in core.regions.empty(FREE_BATCH).into_iter().filter(|empty| empty.trailer.tombstone_count == 0) {
        core.regions.retire(empty.region);
        core.regions.drain(empty.region).await;
        let (reply, answer) = oneshot::channel();
        core.inbox.push(Event::Free(empty.region, reply));
        answers.push(answer);
    }
    for answer in answers {
        answer.await.unwrap_or_else(|_| Err(core.check().err().unwrap_or_else(gone)))?;
        core.stats.reclaimed_regions.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

pub(super) async fn reclaim_region(
    core: &Arc<Core>,
    owner: &dyn RecordOwner,
    victim: SealedRegion,
) -> Result<Reclaimed, NvmeError> {
    let mut reclaimed = Reclaimed::default();
    let carried = carry_tombstones(core, &victim);
    if victim.live_bytes > 0 {
        // A region that can't be read is given up: its records are lost either way, and reclaim must go on.
        let records = read_records(core, &victim).unwrap_or_else(|error| {
            core.stats.read_errors.fetch_add(1, Ordering::Relaxed);
            tracing::error!(region = victim.region, %error, "a region can't be read and is given up");
            Vec::new()
        });
        let mut kept = Vec::new();
        for batch in records.chunks(DECIDE_BATCH) {
            let verdicts = owner.decide(batch.to_vec()).await;
            debug_assert_eq!(verdicts.len(), batch.len(), "one verdict for each record");
            let judged = batch.iter().zip(verdicts);
            kept.extend(judged.filter(|(_, verdict)| *verdict == Verdict::Keep).map(|(record, _)| record.clone()));
        }
        core.stats.dropped_slices.fetch_add((records.len() - kept.len()) as u64, Ordering::Relaxed);
        if !kept.is_empty() {
            reclaimed.kept_bytes = kept.iter().map(|(_, location)| u64::from(location.length)).sum();
            move_records(core, owner, &victim, kept).await?;
        }
    }
    if carried || reclaimed.kept_bytes > 0 {
        ask(core, Event::Sync).await?;
    }
    core.regions.retire(victim.region);
    core.regions.drain(victim.region).await;
    ask(core, |reply| Event::Free(victim.region, reply)).await?;
    core.stats.reclaimed_regions.fetch_add(1, Ordering::Relaxed);
    Ok(reclaimed)
}

/// Puts the tombstones that this region carries for others back in line; true if there are any.
fn carry_tombstones(core: &Core, victim: &SealedRegion) -> bool {
    let Ok(Some(mut tombstones)) = read_tombstones(core, victim.region, &victim.trailer) else {
        // Damaged or unreadable: what they kept dead may be announced again after a crash, and is then removed by the catalog.
        core.stats.corrupt.fetch_add(1, Ordering::Relaxed);
        return false;
    };
    tombstones
        .retain(|tombstone| tombstone.sequence != victim.epoch.sequence && core.regions.is_current(tombstone.sequence));
    let carried = !tombstones.is_empty();
    core.inbox.bury(tombstones);
    carried
}

/// Writes the kept records again and tells the owner. Reads the region once, whole.
async fn move_records(
    core: &Arc<Core>,
    owner: &dyn RecordOwner,
    victim: &SealedRegion,
    kept: Vec<(SliceHeader, Location)>,
) -> Result<(), NvmeError> {
    let image = match read_region(core, victim.region).await {
        Ok(image) => Arc::new(image),
        Err(error) => {
            tracing::error!(region = victim.region, error = %super::chain(&error), "kept records can't be read");
            for (header, location) in &kept {
                let _had = owner.lost(header, *location);
            }
            return Ok(());
        }
    };
    let mut moves = Vec::with_capacity(kept.len());
    for (header, from) in kept {
        let Some(source) = RecordSource::new(&image, victim, from, &header) else {
            core.stats.corrupt.fetch_add(1, Ordering::Relaxed);
            owner.lost(&header, from);
            continue;
        };
        let (reply, placed) = oneshot::channel();
        core.inbox.push(Event::Move(WriteRequest {
            header: header.clone(),
            source: Arc::new(source),
            reply,
            permit: None,
        }));
        moves.push((header, from, placed));
    }
    for (header, from, placed) in moves {
        match placed.await.unwrap_or_else(|_| Err(core.check().err().unwrap_or(NvmeError::Full))) {
            Ok(placed) => {
                let to = placed.location();
                core.stats.moved_slices.fetch_add(1, Ordering::Relaxed);
                core.stats.moved_slice_bytes.fetch_add(u64::from(header.slice_length), Ordering::Relaxed);
                if owner.moved(&header, from, to) {
                    placed.keep();
                }
            }
            Err(NvmeError::SourceMismatch { .. }) => {
                core.stats.corrupt.fetch_add(1, Ordering::Relaxed);
                owner.lost(&header, from);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

pub(super) async fn read_region(core: &Arc<Core>, region: u32) -> Result<Block, NvmeError> {
    let (sender, receiver) = oneshot::channel();
    let block = core.read_buffers.take(core.regions.region_bytes() as usize);
    core.engine.submit(IoRequest {
        operation: Operation::Read,
        offset: core.offset_of(region),
        memory: IoMemory::block(block),
        done: Box::new(move |completion| drop(sender.send(completion))),
    });
    let Completion { result, memory } = receiver.await.map_err(|_| gone())?;
    core.note_read(&result);
    result.map_err(read_error)?;
    memory.into_blocks().pop().ok_or_else(gone)
}

fn read_error(source: std::io::Error) -> NvmeError {
    NvmeError::Io { action: "read a region of the nvme tier", source }
}

fn gone() -> NvmeError {
    NvmeError::OutOfService { reason: "the engine stopped".into() }
}

/// Asks the flusher for something and waits for its answer.
pub(super) async fn ask(
    core: &Core,
    event: impl FnOnce(oneshot::Sender<Result<(), NvmeError>>) -> Event,
) -> Result<(), NvmeError> {
    let (reply, answer) = oneshot::channel();
    core.inbox.push(event(reply));
    answer.await.unwrap_or_else(|_| Err(core.check().err().unwrap_or_else(gone)))
}

/// A record's payload in the image of its region.
struct RecordSource {
    image: Arc<Block>,
    start: usize,
    length: usize,
}

impl RecordSource {
    /// `None` if the record there is not the one that the footer promised.
    fn new(image: &Arc<Block>, victim: &SealedRegion, location: Location, header: &SliceHeader) -> Option<Self> {
        let start = location.offset as usize;
        let record = image.get(start..start + location.length as usize)?;
        match RecordHead::decode(record, victim.epoch)? {
            RecordHead::Slice { header: found, .. } if found == *header => {}
            _ => return None,
        }
        let length = header.slice_length as usize;
        let payload = payload_of(record, length)?;
        let start = start + (payload.as_ptr().addr() - record.as_ptr().addr());
        Some(Self { image: Arc::clone(image), start, length })
    }
}

impl SliceSource for RecordSource {
    fn pieces(&self) -> Box<dyn Iterator<Item = &[u8]> + '_> {
        Box::new(std::iter::once(&self.image[self.start..self.start + self.length]))
    }
}
