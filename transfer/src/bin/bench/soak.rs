//! The long run: requests, messages, regions and connections by the million, and what both processes hold at the end.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::time::{Duration, Instant};

use tidepool_transfer::{
    AccessRights, BatchOptions, Direction, Engine, Memory, PeerId, PeerMapping, RemoteSlice, Request, SegmentId,
    Settings, Slice, TransportKind,
};

use crate::Error;
use crate::arguments::Arguments;
use crate::target::{Process, SEGMENT, block_bytes, say};

const BLOCK: u64 = 4096;
const BATCH: u64 = 128;
/// What a process may hold more at the end than after its first tenth: what allocators keep, never what grows.
const GROWTH_MAX: u64 = 16 << 20;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let requests = arguments.number("requests", 10_000_000)?;
    let target = Process::start(&["target", "--bytes", "16M"])?;
    let engine = Engine::start(Settings::default())?;
    let local = Memory::shared(usize::try_from(BATCH * BLOCK)?, PeerMapping::ReadOnly)?;
    let batches = requests.div_ceil(BATCH);
    let (mut begun, mut first) = (None, [0; 2]);
    let (mut peer, mut segment) = open(&engine, &target.address)?;
    for index in 0..batches {
        if index == batches / 10 {
            (begun, first) = (Some(Instant::now()), [resident("self")?, resident(&target.id().to_string())?]);
        }
        // What comes and goes: regions, messages, futures, and now and then the peer.
        let region = engine.register(&local, AccessRights::READ, None)?.region;
        let transport = if index % 2 == 0 { TransportKind::SharedMemory } else { TransportKind::Tcp };
        // Blocks are written as they are: whoever reads finds the same.
        let (direction, start) = if index % 8 < 6 { (Direction::Read, index * 7 % 32) } else { (Direction::Write, 32) };
        let of_block = |block: u64| Request {
            direction,
            local: Slice { region, offset: block * BLOCK, length: BLOCK },
            remote: RemoteSlice { segment, offset: (start * BATCH / 4 + block) * BLOCK },
        };
        let all: Vec<_> = (0..BATCH).map(of_block).collect();
        if direction == Direction::Write {
            (0..BATCH).try_for_each(|block| local.write_at(block * BLOCK, &block_bytes(start * BATCH / 4 + block)))?;
        }
        engine.transfer(&all, BatchOptions { transport: Some(transport), ..BatchOptions::default() })?.all()?;
        let (block, mut read) = (index % BATCH, [0; 4096]);
        local.read_at(block * BLOCK, &mut read)?;
        if read != block_bytes(start * BATCH / 4 + block) {
            return Err("a wrong byte arrived".into());
        }
        let soon = Instant::now() + Duration::from_secs(20);
        engine.unregister(region, soon)?;
        if index % 16 == 0 {
            let message = index.to_le_bytes();
            let replies = [engine.call(peer, &message, soon)?, block_on(engine.call_async(peer, &message, soon))?];
            if replies.iter().any(|reply| *reply != message) {
                return Err("a wrong reply arrived".into());
            }
        }
        if index % 1024 == 1023 {
            engine.close_segment(segment)?;
            engine.disconnect(peer)?;
            (peer, segment) = open(&engine, &target.address)?;
        }
    }
    let last = [resident("self")?, resident(&target.id().to_string())?];
    let totals = engine.totals();
    let seconds = begun.map_or(0.0, |begun: Instant| begun.elapsed().as_secs_f64());
    say(&format!(
        "{{\"requests\":{},\"seconds\":{seconds:.1},\"own_bytes\":[{},{}],\"target_bytes\":[{},{}],\
         \"registered_bytes\":{},\"batches\":{}}}",
        batches * BATCH,
        first[0],
        last[0],
        first[1],
        last[1],
        totals.registered_bytes,
        totals.batches,
    ))?;
    if totals.registered_bytes != 0 || totals.batches != 0 {
        return Err("something is still registered or running".into());
    }
    let grown = first.iter().zip(last).any(|(first, last)| last > first + GROWTH_MAX);
    if grown { Err("a process has grown".into()) } else { Ok(()) }
}

fn open(engine: &Engine, address: &str) -> Result<(PeerId, SegmentId), Error> {
    let soon = Instant::now() + Duration::from_secs(20);
    let peer = engine.connect(address, soon)?;
    Ok((peer, engine.open(peer, SEGMENT, soon)?))
}

/// Resident memory of a process that is its own: without the segment, which is shared.
fn resident(process: &str) -> Result<u64, Error> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).ok_or("no RssAnon")?;
    Ok(line.split_whitespace().next().ok_or("no number")?.parse::<u64>()? << 10)
}

/// Runs a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}
