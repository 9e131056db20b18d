//! Memory into which reads of peers' segments come when their bytes go on to memory that no device knows.
//!
//! ```text
//! ranges of the segment --cut--> steps of 1 MiB at most --a batch each, up to 4 under way--> slots --in order--> `take`
//! ```
//!
//! A slot is used again once its batch has ended: no byte can arrive there any more.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::batch::Batch;
use crate::engine::{BatchOptions, Engine, WeakEngine};
use crate::error::{SliceError, TransferError};
use crate::memory::Memory;
use crate::slice::{AccessRights, Direction, RegionId, RemoteSlice, Request, SegmentId, Slice};
use crate::transport::TransportKind;

/// Bytes of a slot.
const SLOT_BYTES: u64 = 1 << 20;
/// Slots of a reading at most: while one is emptied, the others fill.
const AHEAD: usize = 4;
/// Withdrawing waits so long for what is under way.
const LET_GO: Duration = Duration::from_secs(1);

/// Registered memory in slots of 1 MiB. Its engine is not kept by it.
#[derive(Debug)]
pub struct Landing {
    engine: WeakEngine,
    memory: Memory,
    region: RegionId,
    free: Mutex<Vec<u64>>,
}

/// Bytes that have arrived, to be taken.
#[derive(Debug)]
pub struct Landed<'a> {
    memory: &'a Memory,
    at: u64,
    left: u64,
}

impl Landed<'_> {
    /// Bytes that were not taken yet.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Where those lie: in this memory, from this byte on. Only before [`Reading::read`] hears that they were taken.
    #[must_use]
    pub fn place(&self) -> (&Memory, u64) {
        (self.memory, self.at)
    }

    /// Takes the next bytes, as many as `target` has.
    ///
    /// # Errors
    /// `OutOfRange` if there are not as many.
    pub fn take(&mut self, target: &mut [u8]) -> Result<(), SliceError> {
        let length = target.len() as u64;
        if length > self.left {
            return Err(SliceError::OutOfRange { offset: 0, length, region_length: self.left });
        }
        self.memory.read_at(self.at, target)?;
        (self.at, self.left) = (self.at + length, self.left - length);
        Ok(())
    }
}

/// Slots of a landing, for reads one after the other. Ends with nothing under way.
#[derive(Debug)]
pub struct Reading<'a> {
    landing: &'a Landing,
    free: Vec<u64>,
    under_way: VecDeque<(Batch, u64, u64)>,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.end();
        self.landing.free.lock().append(&mut self.free);
    }
}

impl Landing {
    /// Registers `slots` slots, for this engine's own use.
    ///
    /// # Errors
    /// The system's, and those of [`Engine::register`].
    pub fn start(engine: &Engine, slots: usize) -> Result<Self, TransferError> {
        let memory = Memory::anonymous(slots * SLOT_BYTES as usize).map_err(TransferError::system("map memory"))?;
        let region = engine.register(&memory, AccessRights::LOCAL, None)?.region;
        let free = Mutex::new((0..slots as u64).collect());
        Ok(Self { engine: engine.downgrade(), memory, region, free })
    }

    /// Takes some of the slots that are free; `None`: none is.
    #[must_use]
    pub fn reserve(&self) -> Option<Reading<'_>> {
        let mut free = self.free.lock();
        let left = free.len().saturating_sub(AHEAD);
        let free = free.split_off(left);
        (!free.is_empty()).then(|| Reading { landing: self, free, under_way: VecDeque::new() })
    }
}

impl Reading<'_> {
    /// Reads ranges (first byte, bytes) of a segment, by this transport if one is given, and has them taken in order as they
    /// arrive, at most 1 MiB at a time. What `take` leaves is lost. Blocks.
    ///
    /// # Errors
    /// `Closed`, those of [`Engine::submit`], `Peer`, and those of `take`.
    pub fn read<E: From<TransferError>>(
        &mut self,
        segment: SegmentId,
        ranges: &[(u64, u64)],
        transport: Option<TransportKind>,
        deadline: Instant,
        mut take: impl FnMut(Landed<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let engine = self.landing.engine.upgrade().ok_or(TransferError::Closed)?;
        let mut steps = Steps { ranges: ranges.iter(), rest: (0, 0) };
        let options = || BatchOptions { deadline: Some(deadline), transport, ..BatchOptions::default() };
        // What an earlier one left is nobody's.
        self.end();
        loop {
            while let Some(&slot) = self.free.last() {
                let requests = steps.next(self.landing.region, slot * SLOT_BYTES, segment);
                if requests.is_empty() {
                    break;
                }
                let bytes = requests.iter().map(|request| request.local.length).sum();
                let batch = engine.submit(&requests, options())?;
                self.free.pop();
                self.under_way.push_back((batch, slot, bytes));
            }
            let Some((batch, slot, bytes)) = self.under_way.pop_front() else { return Ok(()) };
            let arrived = batch.wait().all();
            self.free.push(slot);
            arrived.map_err(|failure| engine.failed(segment, failure))?;
            take(Landed { memory: &self.landing.memory, at: slot * SLOT_BYTES, left: bytes })?;
        }
    }

    /// Waits until nothing is under way.
    fn end(&mut self) {
        self.under_way.iter().for_each(|(batch, ..)| batch.cancel());
        for (batch, slot, _) in self.under_way.drain(..) {
            let _cancelled = batch.wait();
            self.free.push(slot);
        }
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // An engine that has ended has withdrawn it.
        let _withdrawn = self.engine.upgrade().map(|engine| engine.unregister(self.region, Instant::now() + LET_GO));
    }
}

/// Ranges, cut into what fits a slot.
struct Steps<'a> {
    ranges: std::slice::Iter<'a, (u64, u64)>,
    rest: (u64, u64),
}

impl Steps<'_> {
    /// The requests that fill the slot at `offset` next; none at the end.
    fn next(&mut self, region: RegionId, mut offset: u64, segment: SegmentId) -> Vec<Request> {
        let (end, mut requests) = (offset + SLOT_BYTES, Vec::new());
        while offset < end {
            if self.rest.1 == 0 {
                let Some(&range) = self.ranges.next() else { break };
                self.rest = range;
                continue;
            }
            let (start, left) = self.rest;
            let length = left.min(end - offset);
            let (local, remote) = (Slice { region, offset, length }, RemoteSlice { segment, offset: start });
            requests.push(Request { direction: Direction::Read, local, remote });
            // A range that wraps is refused with its request.
            self.rest = (start.wrapping_add(length), left - length);
            offset += length;
        }
        requests
    }
}
