//! What is on the disk: the regions at start, the records of one region, and the scan that announces them all.
//!
//! At start only the first and the last page of each region are read, and the tombstones; regions without a valid
//! footer are walked record by record and given one. The scan then reads the footers on all cores. See
//! docs/src/formats/nvme.md, "Recovery".

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use tidepool_metadata::{ChunkChecksums, SliceHeader};
use tokio::sync::mpsc as channel;

use super::NvmeError;
use super::core::Core;
use super::format::{
    Epoch, Footer, RECORD_ALIGN, RecordHead, RegionHeader, TOMBSTONE_BYTES, TRAILER_BYTES, Tombstone, Trailer,
    decode_entries, footer_pages_start, payload_offset,
};
use super::location::Location;
use super::region::SealedRegion;
use crate::io::{Block, Completion, IoEngine, IoMemory, IoRequest, Operation, PAGE_BYTES};

/// Batches that may wait for the consumer of a scan.
const SCAN_BATCHES: usize = 4;
/// More threads than this wait for the consumer, not for parsing.
const SCAN_THREADS: usize = 4;

/// If more than one in so many regions can't be read, the tier isn't opened.
const BROKEN_SHARE: usize = 8;

/// Dead records, by region sequence: their offsets.
pub(super) type Graves = HashMap<u64, Vec<u32>>;

/// What start-up found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Regions that hold records.
    pub regions: u32,
    /// Of those, regions that had no valid footer and were walked.
    pub walked_regions: u32,
    /// Records in all of them, dead ones too.
    pub records: u64,
    /// Tombstones that still count.
    pub tombstones: u64,
}

/// Reads many ranges with up to `depth` in flight and hands each to `each`, in any order.
fn read_many(
    engine: &dyn IoEngine,
    depth: usize,
    ranges: impl Iterator<Item = (usize, u64, usize)>,
    mut each: impl FnMut(usize, io::Result<Block>),
) {
    let (sender, receiver) = mpsc::channel::<(usize, Completion)>();
    let mut in_flight = 0;
    let mut ranges = ranges.peekable();
    while in_flight > 0 || ranges.peek().is_some() {
        while in_flight < depth
            && let Some((index, offset, length)) = ranges.next()
        {
            let sender = sender.clone();
            let done = Box::new(move |completion| drop(sender.send((index, completion))));
            let memory = IoMemory::block(Block::new(length));
            engine.submit(IoRequest { operation: Operation::Read, offset, memory, done });
            in_flight += 1;
        }
        let Ok((index, completion)) = receiver.recv() else { return };
        in_flight -= 1;
        let block = completion.memory.into_blocks().pop();
        each(index, completion.result.and_then(|()| block.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())));
    }
}

/// Finds out which regions hold what, and rebuilds usage. Runs before anything else uses the tier.
pub(super) fn recover(core: &Core) -> Result<(Recovered, Graves), NvmeError> {
    let io_error = |action| move |source| NvmeError::Io { action, source };
    let (count, region_bytes) = (core.regions.count() as usize, core.regions.region_bytes());
    let mut headers = vec![None; count];
    let mut trailers = vec![None; count];
    let mut broken = vec![None; count];
    let pages = (0..2 * count).map(|index| {
        let start = core.offset_of((index / 2) as u32);
        (index, if index % 2 == 0 { start } else { start + region_bytes - PAGE_BYTES as u64 }, PAGE_BYTES)
    });
    read_many(&*core.engine, core.write_depth.max(16), pages, |index, page| match page {
        Ok(page) if index % 2 == 0 => headers[index / 2] = RegionHeader::decode(&page),
        Ok(page) => trailers[index / 2] = Trailer::decode(&page, region_bytes as usize),
        Err(error) => broken[index / 2] = Some(error.kind()),
    });
    quarantine(core, &broken)?;
    let mut recovered = Recovered::default();
    let (mut sealed, mut unsealed) = (Vec::new(), Vec::new());
    for (region, (header, trailer)) in (0_u32..).zip(headers.iter().zip(&trailers)) {
        // Also of a trailer whose header is gone: a sequence is never used twice.
        core.regions.reserve_sequence(trailer.map_or(0, |trailer: Trailer| trailer.epoch.sequence));
        let Some(header) = header.filter(|_| broken[region as usize].is_none()) else { continue };
        core.regions.reserve_sequence(header.epoch.sequence);
        match trailer {
            _ if header.is_free => {}
            Some(trailer) if trailer.epoch == header.epoch => sealed.push((region, *trailer)),
            _ => unsealed.push((region, header.epoch)),
        }
    }
    let mut tombstones = Vec::new();
    for (region, trailer) in sealed {
        match read_tombstones(core, region, &trailer).map_err(io_error("read tombstones of the nvme tier"))? {
            Some(found) => {
                tombstones.extend(found);
                core.regions.adopt(region, trailer);
                recovered.records += u64::from(trailer.entry_count);
            }
            None => unsealed.push((region, trailer.epoch)),
        }
    }
    recovered.walked_regions = unsealed.len() as u32;
    let mut walked = Vec::with_capacity(unsealed.len());
    for (region, epoch) in unsealed {
        let footer = walk(core, region, epoch).map_err(io_error("read an unsealed region of the nvme tier"))?;
        tombstones.extend_from_slice(&footer.tombstones);
        recovered.records += u64::from(footer.entry_count);
        walked.push((region, epoch, footer));
    }
    tombstones.sort_unstable();
    tombstones.dedup_by_key(|tombstone| (tombstone.sequence, tombstone.offset));
    for (region, epoch, mut footer) in walked {
        footer.record_bytes += lost_graves(&footer, epoch, &tombstones);
        let trailer = write_footer(core, region, epoch, &footer).map_err(io_error("seal a recovered region"))?;
        core.regions.adopt(region, trailer);
    }
    if recovered.walked_regions > 0 {
        core.engine.sync().map_err(io_error("sync recovered regions"))?;
    }
    tombstones.iter().for_each(|tombstone| core.regions.reserve_sequence(tombstone.sequence));
    let graves = bury(core, tombstones);
    recovered.tombstones = graves.values().map(|offsets| offsets.len() as u64).sum();
    recovered.regions = core.regions.sealed().len() as u32;
    Ok((recovered, graves))
}

/// Sets aside the regions whose header or trailer can't be read. If they are many, the disk is broken.
fn quarantine(core: &Core, broken: &[Option<io::ErrorKind>]) -> Result<(), NvmeError> {
    let count = broken.iter().flatten().count();
    if count > broken.len() / BROKEN_SHARE {
        let kind = broken.iter().flatten().next().copied().unwrap_or(io::ErrorKind::Other);
        return Err(NvmeError::Io { action: "read the headers of the nvme tier", source: kind.into() });
    }
    for (region, _) in (0..).zip(broken).filter(|(_, error)| error.is_some()) {
        core.stats.read_errors.fetch_add(1, Ordering::Relaxed);
        tracing::error!(region, "a region's header can't be read; the region is not used");
        core.regions.quarantine(region);
    }
    Ok(())
}

/// Bytes of records of a walked region that have a tombstone, and that the crash took before they were durable. The
/// trailer counts them, at this and every later start, because their tombstones will be taken off again.
fn lost_graves(footer: &Footer, epoch: Epoch, tombstones: &[Tombstone]) -> u64 {
    let first = tombstones.partition_point(|tombstone| tombstone.sequence < epoch.sequence);
    let of_region = tombstones[first..].iter().take_while(|tombstone| tombstone.sequence == epoch.sequence);
    let found: HashSet<u32> = decode_entries(&footer.entries).map(|(_, offset, _)| offset).collect();
    of_region.filter(|tombstone| !found.contains(&tombstone.offset)).map(|tombstone| u64::from(tombstone.length)).sum()
}

/// Takes the dead records out of the usage. `tombstones` are sorted; one that was copied by reclaim is there once.
fn bury(core: &Core, tombstones: Vec<Tombstone>) -> Graves {
    let mut graves = Graves::new();
    for Tombstone { sequence, offset, length } in tombstones {
        let Some(region) = core.regions.find(sequence) else { continue };
        let dead = Location { region, sequence: sequence as u32, offset, length, checksum: 0 };
        if core.regions.release(dead).is_some() {
            graves.entry(sequence).or_default().push(offset);
        }
    }
    graves
}

/// The tombstones of a sealed region; `None` if that part of the footer is damaged.
pub(super) fn read_tombstones(core: &Core, region: u32, trailer: &Trailer) -> io::Result<Option<Vec<Tombstone>>> {
    if trailer.tombstone_count == 0 {
        return Ok(Some(Vec::new()));
    }
    let length = trailer.tombstone_count as usize * TOMBSTONE_BYTES;
    let start = trailer.footer_start(core.regions.region_bytes() as usize);
    let page = start / PAGE_BYTES * PAGE_BYTES;
    let block = core.read_buffers.take(start + length - page);
    let block = core.engine.read_block(core.offset_of(region) + page as u64, block)?;
    let bytes = &block[start - page..start - page + length];
    let is_good = crc32fast::hash(bytes) == trailer.tombstones_checksum;
    Ok(is_good.then(|| Tombstone::decode_all(bytes).collect()))
}

/// The pages at the end of a sealed region that hold its footer.
fn footer_range(core: &Core, sealed: &SealedRegion) -> (u64, usize) {
    let region_bytes = core.regions.region_bytes() as usize;
    let start = footer_pages_start(region_bytes, sealed.trailer.footer_bytes as usize).unwrap_or(PAGE_BYTES);
    (core.offset_of(sealed.region) + start as u64, region_bytes - start)
}

/// The records in the pages of a footer; `None` if they are damaged.
fn parse_footer(sealed: &SealedRegion, pages: &[u8]) -> Option<Vec<(SliceHeader, Location)>> {
    let trailer = &sealed.trailer;
    let end = pages.len().checked_sub(TRAILER_BYTES)?;
    let length = (trailer.footer_bytes as usize).checked_sub(trailer.tombstone_count as usize * TOMBSTONE_BYTES)?;
    let entries = pages.get(end.checked_sub(length)?..end)?;
    if crc32fast::hash(entries) != trailer.entries_checksum {
        return None;
    }
    let mut records = Vec::with_capacity(trailer.entry_count as usize);
    records.extend(decode_entries(entries).map(|entry| located(sealed, entry)));
    (records.len() == trailer.entry_count as usize).then_some(records)
}

/// The records of a sealed region, dead ones too: from its footer, or by a walk if that is damaged.
pub(super) fn read_records(core: &Core, sealed: &SealedRegion) -> io::Result<Vec<(SliceHeader, Location)>> {
    let (offset, length) = footer_range(core, sealed);
    let pages = core.engine.read_block(offset, core.read_buffers.take(length))?;
    records_or_walk(core, sealed, &pages)
}

fn records_or_walk(core: &Core, sealed: &SealedRegion, pages: &[u8]) -> io::Result<Vec<(SliceHeader, Location)>> {
    if let Some(records) = parse_footer(sealed, pages) {
        return Ok(records);
    }
    core.stats.corrupt.fetch_add(1, Ordering::Relaxed);
    tracing::warn!(region = sealed.region, "the footer of a region is damaged: its records are read one by one");
    let footer = walk(core, sealed.region, sealed.epoch)?;
    Ok(decode_entries(&footer.entries).map(|entry| located(sealed, entry)).collect())
}

fn located(sealed: &SealedRegion, (header, offset, length): (SliceHeader, u32, u32)) -> (SliceHeader, Location) {
    let (region, sequence, checksum) = (sealed.region, sealed.epoch.sequence as u32, header.checksum);
    (header, Location { region, sequence, offset, length, checksum })
}

/// Reads a whole region and finds its records one by one.
fn walk(core: &Core, region: u32, epoch: Epoch) -> io::Result<Footer> {
    let length = core.regions.region_bytes() as usize;
    let block = core.engine.read_block(core.offset_of(region), core.read_buffers.take(length))?;
    Ok(walk_bytes(&block, epoch))
}

/// The records of a region's bytes that hold in every checksum. After a bad one, looks for the next head of the same
/// epoch, whose salt no payload can know.
pub(super) fn walk_bytes(bytes: &[u8], epoch: Epoch) -> Footer {
    let mut footer = Footer::default();
    let mut offset = PAGE_BYTES;
    while offset < bytes.len() {
        let Some(head) = RecordHead::decode(&bytes[offset..], epoch) else {
            offset += RECORD_ALIGN;
            continue;
        };
        let record_bytes = head.record_bytes();
        // A record that doesn't hold is passed by all the same: its head does, so the next one follows its end.
        if let Some(record) = bytes.get(offset..offset + record_bytes) {
            match &head {
                RecordHead::Slice { header, chunks, .. } => {
                    let payload = payload_of(record, header.slice_length as usize);
                    if payload.is_some_and(|payload| ChunkChecksums::of(payload).0 == *chunks) {
                        footer.push(header, offset as u32, record_bytes as u32);
                    }
                }
                RecordHead::Tombstones { checksum, payload_bytes, .. } => {
                    let payload = payload_of(record, *payload_bytes);
                    if let Some(payload) = payload.filter(|payload| crc32fast::hash(payload) == *checksum) {
                        footer.tombstones.extend(Tombstone::decode_all(payload));
                    }
                }
            }
        }
        offset += record_bytes.max(RECORD_ALIGN);
    }
    footer
}

/// The payload of a whole record.
pub(super) fn payload_of(record: &[u8], slice_length: usize) -> Option<&[u8]> {
    let start = payload_offset(record.len(), slice_length)?;
    record.get(start..start + slice_length)
}

fn write_footer(core: &Core, region: u32, epoch: Epoch, footer: &Footer) -> io::Result<Trailer> {
    let region_bytes = core.regions.region_bytes() as usize;
    let start = footer_pages_start(region_bytes, footer.footer_bytes()).filter(|&start| start >= PAGE_BYTES);
    let start = start.ok_or(io::ErrorKind::InvalidData)?;
    let mut pages = core.read_buffers.take(region_bytes - start);
    let trailer = footer.encode(epoch, &mut pages);
    core.engine.write_block(core.offset_of(region) + start as u64, pages)?;
    Ok(trailer)
}

/// Some of the records found by a scan: those of one region.
#[derive(Debug)]
pub struct ScanBatch {
    /// Slices and where they lie. If one slice comes twice, [`Location::is_newer_than`] says which counts; the other
    /// is to be released.
    pub records: Vec<(SliceHeader, Location)>,
    /// Regions scanned so far.
    pub regions_done: usize,
    /// Regions to scan.
    pub regions: usize,
}

/// Announces every live record: region by region, newest first, read and parsed on all cores. The channel ends when
/// all have come. If the receiver is dropped the scan stops.
pub(super) fn scan(core: &Arc<Core>, graves: Graves) -> channel::Receiver<ScanBatch> {
    let (sender, receiver) = channel::channel(SCAN_BATCHES);
    let regions = core.regions.sealed();
    if regions.is_empty() {
        core.is_scanned.store(true, Ordering::SeqCst);
        return receiver;
    }
    let threads = thread::available_parallelism().map_or(2, usize::from).clamp(1, SCAN_THREADS).min(regions.len());
    let scan = Arc::new(Scan {
        core: Arc::clone(core),
        regions,
        graves,
        next: AtomicUsize::new(0),
        done: AtomicUsize::new(0),
    });
    for _ in 0..threads {
        let (scan, sender) = (Arc::clone(&scan), sender.clone());
        let work = move || scan.work(&sender);
        if let Err(error) = thread::Builder::new().name("nvme-scan".into()).spawn(work) {
            tracing::warn!(%error, "a thread of the nvme scan couldn't start");
        }
    }
    receiver
}

struct Scan {
    core: Arc<Core>,
    regions: Vec<SealedRegion>,
    graves: Graves,
    next: AtomicUsize,
    done: AtomicUsize,
}

impl Scan {
    /// Takes region after region; the next one's footer is on its way while this one's is parsed.
    fn work(&self, sender: &channel::Sender<ScanBatch>) {
        let mut coming = self.fetch_next();
        while let Some((index, pages)) = coming {
            coming = self.fetch_next();
            let sealed = &self.regions[index];
            let records = match pages.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into())) {
                Ok(pages) => records_or_walk(&self.core, sealed, &pages),
                Err(error) => Err(error),
            };
            self.core.note_read(&records.as_ref().map(drop).map_err(|error| io::Error::from(error.kind())));
            let mut records = records.unwrap_or_else(|error| {
                tracing::error!(region = sealed.region, %error, "a region of the nvme tier can't be read");
                Vec::new()
            });
            if let Some(graves) = self.graves.get(&sealed.epoch.sequence) {
                records.retain(|(_, location)| graves.binary_search(&location.offset).is_err());
            }
            let regions_done = self.done.fetch_add(1, Ordering::SeqCst) + 1;
            if regions_done == self.regions.len() {
                self.core.is_scanned.store(true, Ordering::SeqCst);
                self.core.pressure.notify_one();
            }
            let batch = ScanBatch { records, regions_done, regions: self.regions.len() };
            if sender.blocking_send(batch).is_err() {
                return;
            }
        }
    }

    fn fetch_next(&self) -> Option<(usize, mpsc::Receiver<io::Result<Block>>)> {
        let index = self.next.fetch_add(1, Ordering::SeqCst);
        let (offset, length) = footer_range(&self.core, self.regions.get(index)?);
        let (sender, receiver) = mpsc::sync_channel(1);
        let done = Box::new(move |completion: Completion| {
            let block = completion.memory.into_blocks().pop();
            let block = completion.result.and_then(|()| block.ok_or_else(|| io::ErrorKind::UnexpectedEof.into()));
            drop(sender.send(block));
        });
        let memory = IoMemory::block(self.core.read_buffers.take(length));
        self.core.engine.submit(IoRequest { operation: Operation::Read, offset, memory, done });
        Some((index, receiver))
    }
}
