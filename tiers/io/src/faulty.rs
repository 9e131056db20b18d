//! A disk in memory that fails as told, and that can lose power: for tests.
//!
//! Keeps two images: *live* is what reads see, *durable* what a sync has covered. [`FaultyDisk::crash_image`] is what
//! the medium may hold after a power loss: the durable image plus any subset of the writes since, each whole, lost or
//! torn at 512-byte sectors, as the seed decides. Operations are done in the caller's thread, so a run of one thread
//! replays exactly.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::{Completion, EngineKind, IoEngine, IoMemory, IoRequest, Operation};

const SECTOR_BYTES: usize = 512;

/// An error to give to operations that match.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Which operations fail.
    pub operation: Operation,
    /// Only those that touch these bytes of the file.
    pub range: Range<u64>,
    /// The error's number, such as `libc::EIO`.
    pub errno: i32,
    /// How many times, then never again.
    pub times: u32,
}

/// What is held back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Paused {
    All,
    Reads,
}

#[derive(Default)]
struct State {
    live: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<(usize, Vec<u8>)>,
    faults: Vec<Fault>,
    paused: Option<Paused>,
    waiting: VecDeque<IoRequest>,
    /// Operations until the power goes.
    fuse: Option<u64>,
    operations: u64,
}

/// The disk; share it to reach it behind the tier.
#[derive(Clone, Default)]
pub struct FaultyDisk(Arc<Mutex<State>>);

impl FaultyDisk {
    /// A disk of `length` zero bytes.
    #[must_use]
    pub fn new(length: usize) -> Self {
        Self::from_image(vec![0; length])
    }

    /// A disk that holds `image`, durably.
    #[must_use]
    pub fn from_image(image: Vec<u8>) -> Self {
        let disk = Self::default();
        let mut state = disk.0.lock();
        state.durable.clone_from(&image);
        state.live = image;
        drop(state);
        disk
    }

    /// From now on operations that match fail.
    pub fn add_fault(&self, fault: Fault) {
        self.0.lock().faults.push(fault);
    }

    /// Ends all faults.
    pub fn clear_faults(&self) {
        self.0.lock().faults.clear();
    }

    /// Inverts one bit of the medium.
    pub fn flip_bit(&self, offset: usize, bit: u8) {
        let mut state = self.0.lock();
        state.live[offset] ^= 1 << bit;
        state.durable[offset] ^= 1 << bit;
    }

    /// Holds all further operations back until [`Self::resume`].
    pub fn pause(&self) {
        self.0.lock().paused = Some(Paused::All);
    }

    /// Holds all further reads back until [`Self::resume`].
    pub fn pause_reads(&self) {
        self.0.lock().paused = Some(Paused::Reads);
    }

    /// Operations that are held back.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.lock().waiting.len()
    }

    /// Does what was held back and goes on.
    pub fn resume(&self) {
        loop {
            let mut state = self.0.lock();
            state.paused = None;
            let Some(request) = state.waiting.pop_front() else { return };
            drop(state);
            self.perform(request);
        }
    }

    /// The power goes after `operations` more: the last one may be torn, all later ones fail.
    pub fn lose_power_after(&self, operations: u64) {
        self.0.lock().fuse = Some(operations);
    }

    /// How many operations were done.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.0.lock().operations
    }

    /// What reads see now.
    #[must_use]
    pub fn live_image(&self) -> Vec<u8> {
        self.0.lock().live.clone()
    }

    /// What the medium may hold if the power goes now; another seed gives another of the possible images.
    #[must_use]
    pub fn crash_image(&self, seed: u64) -> Vec<u8> {
        let mut random = Random(seed | 1);
        let state = self.0.lock();
        let mut image = state.durable.clone();
        for (offset, bytes) in &state.unsynced {
            let fate = random.next() % 3;
            for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                if fate == 0 || fate == 1 && random.next().is_multiple_of(2) {
                    let start = offset + index * SECTOR_BYTES;
                    image[start..start + sector.len()].copy_from_slice(sector);
                }
            }
        }
        image
    }

    fn perform(&self, request: IoRequest) {
        let IoRequest { operation, offset, mut memory, done } = request;
        let result = self.0.lock().perform(operation, offset, &mut memory);
        done(Completion { result, memory });
    }
}

impl IoEngine for FaultyDisk {
    fn kind(&self) -> EngineKind {
        EngineKind::Faulty
    }

    fn submit(&self, request: IoRequest) {
        let mut state = self.0.lock();
        let is_read = request.operation == Operation::Read;
        if state.paused.is_some_and(|paused| paused == Paused::All || is_read) {
            state.waiting.push_back(request);
            return;
        }
        drop(state);
        self.perform(request);
    }
}

impl State {
    fn perform(&mut self, operation: Operation, offset: u64, memory: &mut IoMemory) -> io::Result<()> {
        self.operations += 1;
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let end = start + memory.length();
        if self.fuse == Some(0) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.fuse = self.fuse.map(|left| left - 1);
        self.check_faults(operation, start as u64..end as u64)?;
        if end > self.live.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match operation {
            Operation::Sync => {
                for (start, bytes) in self.unsynced.drain(..) {
                    self.durable[start..start + bytes.len()].copy_from_slice(&bytes);
                }
            }
            Operation::Read => {
                memory.fill(&self.live[start..end]);
            }
            Operation::Write => {
                let bytes = memory.bytes();
                self.live[start..end].copy_from_slice(&bytes);
                self.unsynced.push((start, bytes));
            }
        }
        Ok(())
    }

    fn check_faults(&mut self, operation: Operation, range: Range<u64>) -> io::Result<()> {
        let hit = self.faults.iter_mut().find(|fault| {
            let overlaps = fault.range.start < range.end && range.start < fault.range.end;
            fault.times > 0 && fault.operation == operation && (overlaps || operation == Operation::Sync)
        });
        match hit {
            Some(fault) => {
                fault.times -= 1;
                Err(io::Error::from_raw_os_error(fault.errno))
            }
            None => Ok(()),
        }
    }
}

/// xorshift64: enough to choose fates, the same on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 8
    }
}
