//! The process that reads and writes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidepool_transfer::{
    AccessRights, BatchOptions, Direction, Engine, Memory, PeerId, PeerMapping, RegionId, RemoteSlice, Request,
    SegmentId, Settings, Slice, TransportKind,
};

use crate::Error;
use crate::arguments::Arguments;
use crate::target::{SEGMENT, block_bytes, say};

/// What to move, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) transport: Option<TransportKind>,
    pub(crate) direction: Direction,
    pub(crate) block_bytes: u64,
    pub(crate) batch: u64,
    pub(crate) threads: u64,
    pub(crate) verify: bool,
}

/// What was moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moved {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    pub(crate) elapsed: Duration,
}

/// An engine connected to a target.
pub(crate) struct Initiator {
    pub(crate) engine: Engine,
    pub(crate) peer: PeerId,
    segment: SegmentId,
    segment_bytes: u64,
}

impl Initiator {
    pub(crate) fn connect(address: &str, settings: Settings) -> Result<Self, Error> {
        let engine = Engine::start(settings)?;
        let soon = Instant::now() + Duration::from_secs(5);
        let peer = engine.connect(address, soon)?;
        let segment = engine.open(peer, SEGMENT, soon)?;
        let (segment_bytes, _) = engine.segment(segment)?;
        Ok(Self { engine, peer, segment, segment_bytes })
    }

    /// Moves blocks for `duration`. Threads have memory of their own; together they walk over all of the segment.
    pub(crate) fn run(&self, load: Load, duration: Duration) -> Result<Moved, Error> {
        let batch_bytes = load.block_bytes * load.batch;
        let stride = self.segment_bytes / load.threads / batch_bytes * batch_bytes;
        if stride == 0 {
            return Err("batches of all threads do not fit in the segment".into());
        }
        let memory: Vec<_> = (0..load.threads)
            .map(|_| {
                let bytes = usize::try_from(batch_bytes.max(32 << 20) / batch_bytes * batch_bytes)?;
                let memory = Memory::shared(bytes, PeerMapping::ReadOnly)?;
                Ok((self.engine.register(&memory, AccessRights::LOCAL, None)?.region, memory))
            })
            .collect::<Result<_, Error>>()?;
        let (batches, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let started = Instant::now();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..load.threads)
                .zip(&memory)
                .map(|(thread, (region, memory))| {
                    let (batches, stop) = (&batches, &stop);
                    scope.spawn(move || {
                        let done = self.walk(load, *region, memory, thread * stride, stride, stop);
                        done.map(|done| batches.fetch_add(done, Ordering::Relaxed))
                    })
                })
                .collect();
            std::thread::sleep(duration);
            stop.store(true, Ordering::Relaxed);
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?.map(drop))
        })?;
        let elapsed = started.elapsed();
        for (region, _) in memory {
            self.engine.unregister(region, Instant::now() + Duration::from_secs(5))?;
        }
        let requests = batches.into_inner() * load.batch;
        Ok(Moved { requests, bytes: requests * load.block_bytes, elapsed })
    }

    fn walk(
        &self,
        load: Load,
        region: RegionId,
        memory: &Memory,
        start: u64,
        stride: u64,
        stop: &AtomicBool,
    ) -> Result<u64, Error> {
        let batch_bytes = load.block_bytes * load.batch;
        let (mut here, mut there, mut batches) = (0, 0, 0);
        let mut requests = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            requests.clear();
            requests.extend((0..load.batch).map(|index| {
                let offset = index * load.block_bytes;
                Request {
                    direction: load.direction,
                    local: Slice { region, offset: here + offset, length: load.block_bytes },
                    remote: RemoteSlice { segment: self.segment, offset: start + there + offset },
                }
            }));
            if load.verify && load.direction == Direction::Write {
                each_block(start + there, batch_bytes, |offset, bytes| Ok(memory.write_at(here + offset, bytes)?))?;
            }
            let options = BatchOptions { transport: load.transport, ..BatchOptions::default() };
            self.engine.transfer(&requests, options)?.all()?;
            if load.verify && load.direction == Direction::Read {
                each_block(start + there, batch_bytes, |offset, bytes| {
                    let mut read = [0; 4096];
                    memory.read_at(here + offset, &mut read)?;
                    if read == *bytes { Ok(()) } else { Err("a wrong byte arrived".into()) }
                })?;
            }
            batches += 1;
            here = if here + 2 * batch_bytes > memory.len() { 0 } else { here + batch_bytes };
            there = if there + 2 * batch_bytes > stride { 0 } else { there + batch_bytes };
        }
        Ok(batches)
    }
}

/// Calls `work` with each whole 4 KiB block of a range of the target, as it should be.
fn each_block(
    start: u64,
    length: u64,
    mut work: impl FnMut(u64, &[u8; 4096]) -> Result<(), Error>,
) -> Result<(), Error> {
    for offset in (0..length / 4096).map(|block| block * 4096) {
        work(offset, &block_bytes((start + offset) / 4096))?;
    }
    Ok(())
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let transport = match arguments.text("transport") {
        None => None,
        Some("shm") => Some(TransportKind::SharedMemory),
        Some("file") => Some(TransportKind::File),
        Some("rdma") => Some(TransportKind::Rdma),
        Some("tcp") => Some(TransportKind::Tcp),
        Some(other) => return Err(format!("--transport {other}?").into()),
    };
    let direction = match arguments.text("direction") {
        None | Some("read") => Direction::Read,
        Some("write") => Direction::Write,
        Some(other) => return Err(format!("--direction {other}?").into()),
    };
    let load = Load {
        transport,
        direction,
        block_bytes: arguments.number("block", 64 << 10)?.max(1),
        batch: arguments.number("batch", 128)?.max(1),
        threads: arguments.number("threads", 1)?.max(1),
        verify: arguments.has("verify"),
    };
    if load.verify && !load.block_bytes.is_multiple_of(4096) {
        return Err("--verify needs blocks of a multiple of 4096 bytes".into());
    }
    let initiator = Initiator::connect(arguments.text("peer").ok_or("--peer host:port?")?, arguments.settings()?)?;
    let moved = initiator.run(load, Duration::from_secs_f64(arguments.seconds("seconds", 3.0)?))?;
    let seconds = moved.elapsed.as_secs_f64();
    say(&format!(
        "{{\"transport\":\"{:?}\",\"direction\":\"{:?}\",\"block_bytes\":{},\"batch\":{},\"threads\":{},\"verify\":{},\
         \"requests\":{},\"bytes\":{},\"seconds\":{seconds:.3},\"requests_per_second\":{:.0},\"gigabytes_per_second\":{:.3}}}",
        load.transport,
        load.direction,
        load.block_bytes,
        load.batch,
        load.threads,
        load.verify,
        moved.requests,
        moved.bytes,
        moved.requests as f64 / seconds,
        moved.bytes as f64 / 1e9 / seconds,
    ))
}
