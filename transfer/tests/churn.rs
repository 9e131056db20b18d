//! Users that come and go in the middle of transfers: memory is kept as long as something moves on it and freed then, and
//! whoever stays is served on.
#![expect(unsafe_code, reason = "registers memory of an owner that spoils it when it is freed")]

use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::proxy::Proxy;
use support::{Pair, WAYS, address, by, bytes, pattern, settings, soon, start};
use tidepool_transfer::{
    AccessRights, Batch, BatchOptions, Direction, Failure, Memory, RemoteSlice, Request, Settings, Slice, TransportKind,
};

mod support;

const MIB: u64 = 1 << 20;
/// What freed memory holds; no pattern has it.
const SPOILT: u8 = 0xee;

/// Bytes that are spoilt when they are freed, and say so.
struct Owned {
    bytes: Box<[u8]>,
    is_freed: Arc<AtomicBool>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.bytes.fill(SPOILT);
        std::hint::black_box(&self.bytes);
        self.is_freed.store(true, Ordering::Release);
    }
}

/// Memory of an owner, and whether it was freed.
fn owned(content: Vec<u8>) -> (Memory, Arc<AtomicBool>) {
    let is_freed = Arc::new(AtomicBool::new(false));
    let mut owned = Box::new(Owned { bytes: content.into(), is_freed: Arc::clone(&is_freed) });
    let (base, length) = (NonNull::new(owned.bytes.as_mut_ptr()).expect("not null"), owned.bytes.len());
    // SAFETY: the boxed bytes stay where they are until the owner is dropped, and nobody else has a reference to them.
    let memory = unsafe { Memory::owned_by(base, length, true, owned) };
    (memory, is_freed)
}

fn without_the_spoilt_byte(length: usize, seed: u64) -> Vec<u8> {
    pattern(length, seed).into_iter().map(|byte| if byte == SPOILT { 0 } else { byte }).collect()
}

fn wait_until(what: &str, so: impl Fn() -> bool) {
    let until = soon();
    while !so() {
        assert!(Instant::now() < until, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends what is on its way, by what a careless program does: withdraw the source at either end, close the engine, let the
/// peer go. What succeeded has the bytes of the living, and the memory is free soon after.
#[test]
fn memory_that_goes_in_mid_transfer_is_read_by_nobody_after_it_is_freed() {
    const LENGTH: u64 = 16 * MIB;
    let rounds = std::env::var("TIDEPOOL_ROUNDS").map_or(16, |rounds| rounds.parse::<u64>().expect("a number"));
    for round in 0..rounds {
        let pair = Pair::new(LENGTH as usize);
        let content = without_the_spoilt_byte(LENGTH as usize, round);
        let (memory, is_freed) = owned(content.clone());
        let from_here = round % 4 != 1;
        let (region, request) = if from_here {
            let region = pair.here.register(&memory, AccessRights::LOCAL, None).expect("registered").region;
            let local = Slice { region, offset: 0, length: LENGTH };
            (region, Request { local, ..pair.request(Direction::Write, 0, 0, LENGTH) })
        } else {
            let ticket = pair.there.register(&memory, AccessRights::READ, None).expect("registered");
            let segment = pair.here.open_ticket(pair.peer, ticket, soon()).expect("opened");
            let remote = RemoteSlice { segment, offset: 0 };
            (ticket.region, Request { remote, ..pair.request(Direction::Read, 0, 0, LENGTH) })
        };
        let submit = || pair.here.submit(&[request], by(TransportKind::Tcp)).expect("submitted");
        let batches: Vec<Batch> = (0..4).map(|_| submit()).collect();
        drop(memory);
        match round % 4 {
            0 => pair.here.unregister(region, Instant::now()).expect("withdrawn"),
            1 => pair.there.unregister(region, Instant::now()).expect("withdrawn"),
            2 => pair.here.close(),
            _ => pair.here.disconnect(pair.peer).expect("known"),
        }
        let mut succeeded = 0;
        for batch in batches {
            let result = batch.wait_until(soon()).expect("ended").results[0];
            succeeded += u32::from(result.is_ok());
            let gone =
                [Failure::Cancelled, Failure::Closed, Failure::NoRegion, Failure::ConnectionLost, Failure::Unreachable];
            assert!(result.err().is_none_or(|failure| gone.contains(&failure)), "round {round}: {result:?}");
        }
        let target = bytes(if from_here { &pair.remote } else { &pair.local });
        // What failed left anything there, headers of later frames too, but not so many of these.
        let spoilt = target.windows(16).any(|bytes| *bytes == [SPOILT; 16]);
        assert!(!spoilt, "round {round}: bytes of freed memory arrived");
        assert!(succeeded == 0 || target == content, "round {round}");
        if round % 4 == 3 {
            pair.here.unregister(region, soon()).expect("withdrawn");
        }
        wait_until("the memory is freed", || is_freed.load(Ordering::Acquire));
    }
}

/// Clients in processes of their own are killed wherever they happen to be: greeting, mapping, copying, asking.
#[test]
fn killed_clients_cost_nobody_else_anything_and_leave_nothing_behind() {
    let pair = Pair::new(8 * MIB as usize);
    pair.remote.write_at(0, &pattern(8 << 20, 3)).expect("inside");
    let content = bytes(&pair.remote);
    let bench = Memory::shared(64 << 20, tidepool_transfer::PeerMapping::Writable).expect("memory");
    let bench = pair.there.register(&bench, AccessRights::READ_WRITE, Some("bench")).expect("registered");
    for way in WAYS {
        let read = pair.request(Direction::Read, 0, 0, 8 * MIB);
        pair.here.transfer(&[read], by(way)).expect("submitted").all().expect("read");
    }
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                for way in WAYS {
                    let read = pair.request(Direction::Read, 0, 0, 8 * MIB);
                    pair.here.transfer(&[read], by(way)).expect("submitted").all().expect("read beside the dying");
                    assert!(bytes(&pair.local) == content);
                    reads.fetch_add(1, Ordering::Release);
                }
            }
        });
        for round in 0..12_u64 {
            let clients: Vec<_> = ["shm", "tcp"]
                .into_iter()
                .flat_map(|way| ["read", "write"].map(|direction| (way, direction)))
                .map(|(way, direction)| {
                    Command::new(env!("CARGO_BIN_EXE_tidepool-transfer-bench"))
                        .args(["initiator", "--peer", &address(&pair.there), "--transport", way])
                        .args(["--direction", direction, "--block", "1M", "--batch", "16", "--seconds", "60"])
                        .stdout(Stdio::null())
                        .spawn()
                        .expect("spawned")
                })
                .collect();
            // Some are killed before they have greeted, some in the middle of their work.
            std::thread::sleep(Duration::from_millis(round * round));
            for mut client in clients {
                client.kill().expect("killed");
                client.wait().expect("gone");
            }
        }
        let before = reads.load(Ordering::Acquire);
        wait_until("others go on", || reads.load(Ordering::Acquire) > before + 2);
        stop.store(true, Ordering::Release);
    });
    let Pair { here, there, ticket, .. } = pair;
    drop(here);
    wait_until("all connections have ended", || there.totals().connections == 0);
    for ticket in [ticket, bench] {
        there.unregister(ticket.region, Instant::now()).expect("used by nobody");
    }
}

/// The answer to a greeting comes when its connection was given up, and another one is up: it must not be taken for the
/// other's. Many engines at once, so that some are at each step.
#[test]
fn answers_to_greetings_that_were_given_up_spoil_no_later_connection() {
    let there = start(Settings { same_host: false, ..settings() });
    let memory = Memory::anonymous(4096).expect("memory");
    memory.write_at(0, &pattern(4096, 1)).expect("inside");
    there.register(&memory, AccessRights::READ, Some("pool")).expect("registered");
    let (proxy, listener) = Proxy::bind();
    proxy.serve(listener, address(&there));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let impatient = Duration::from_millis(40);
                let here = start(Settings { same_host: false, connect_timeout: impatient, ..Settings::default() });
                let local = Memory::anonymous(4096).expect("memory");
                let region = here.register(&local, AccessRights::LOCAL, None).expect("registered").region;
                let until = soon();
                let (peer, segment) = loop {
                    let connected = here.connect(&proxy.address, soon());
                    let opened = connected.and_then(|peer| Ok((peer, here.open(peer, "pool", soon())?)));
                    match opened {
                        Ok(opened) => break opened,
                        Err(error) => assert!(Instant::now() < until, "{error}"),
                    }
                };
                // Up means that it can be used, now and for each of these.
                let read = Request {
                    direction: Direction::Read,
                    local: Slice { region, offset: 0, length: 4096 },
                    remote: RemoteSlice { segment, offset: 0 },
                };
                while here.transfer(&[read], BatchOptions::default()).expect("submitted").all().is_err() {
                    assert!(Instant::now() < until);
                }
                here.probe(peer, soon()).expect("alive");
                assert!(bytes(&local) == pattern(4096, 1));
            });
        }
        for round in 0..10 {
            proxy.freeze();
            std::thread::sleep(Duration::from_millis(30 + 10 * round));
            proxy.thaw();
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}
