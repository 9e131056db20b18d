//! Rails of different speed over virtual networks, one of them cut in mid-batch without a word.
//!
//! `TIDEPOOL_CUTS=100` cuts so many times and prints the stalls.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use support::network::{Cut, Network, must, why_not};
use support::{soon, start};
use tidepool_transfer::{
    AccessRights, Batch, BatchOptions, Direction, Engine, Failure, Memory, PeerId, RemoteSlice, Request, Settings,
    Slice,
};

mod support;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 64 * MIB;

/// An engine on the other side of the network, with 64 MiB named "bench" whose bytes are known.
struct Target(Child);

impl Target {
    /// Gives its first address too.
    fn start(network: &Network, listen: &str) -> (Self, String) {
        let mut command = network.command_there(env!("CARGO_BIN_EXE_tidepool-transfer-bench"));
        command.args(["target", "--bytes", "64M", "--listen", listen]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("spawned");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("said");
        (Self(child), line.split('"').nth(3).expect("an address").to_owned())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Asking {
    engine: Engine,
    peer: PeerId,
    local: Memory,
    whole: Request,
}

impl Asking {
    /// From a thread that has entered the network.
    fn start(network: &Network) -> (Self, Target) {
        let (target, address) = Target::start(network, &network.listen());
        let silence_timeout = Duration::from_millis(800);
        let engine = start(Settings { same_host: false, silence_timeout, ..Settings::default() });
        let peer = engine.connect(&address, soon()).expect("connected");
        let segment = engine.open(peer, "bench", soon()).expect("opened");
        let local = Memory::anonymous(BYTES as usize).expect("memory");
        let region = engine.register(&local, AccessRights::LOCAL, None).expect("registered").region;
        let whole = Request {
            direction: Direction::Read,
            local: Slice { region, offset: 0, length: BYTES },
            remote: RemoteSlice { segment, offset: 0 },
        };
        (Self { engine, peer, local, whole }, target)
    }

    fn submit(&self, direction: Direction) -> Batch {
        let request = Request { direction, ..self.whole };
        self.engine.submit(&[request], BatchOptions::default()).expect("submitted")
    }

    fn moved(&self) -> u64 {
        self.engine.rails(self.peer).expect("known").iter().map(|rail| rail.moved_bytes).sum()
    }

    fn wait_until_healthy(&self, rails: usize) {
        let until = soon();
        loop {
            let status = self.engine.rails(self.peer).expect("known");
            if status.len() == rails && status.iter().all(|rail| rail.rests.is_none()) {
                return;
            }
            assert!(Instant::now() < until, "{status:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A 4 KiB block of the target's memory as it was filled.
fn block(number: u64) -> Vec<u8> {
    (0..512).flat_map(|word| ((number << 9) + word).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

/// Runs a test in a thread of its own, which may move to another network.
fn in_network(megabits: &[u32], test: impl FnOnce(&Network) + Send) {
    if let Some(reason) = why_not() {
        eprintln!("skipped: {reason}");
        return;
    }
    let network = Network::new(megabits);
    std::thread::scope(|scope| {
        let tested = scope.spawn(|| {
            network.enter();
            test(&network);
        });
        if let Err(panic) = tested.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

#[test]
fn a_rail_that_is_cut_in_mid_batch_costs_no_request_no_byte_and_little_time() {
    let cuts = std::env::var("TIDEPOOL_CUTS").map_or(4, |cuts| cuts.parse::<usize>().expect("a number"));
    in_network(&[3000, 1500], |network| {
        let (asking, _target) = Asking::start(network);
        asking.wait_until_healthy(2);
        let expected: Vec<u8> = (0..BYTES / 4096).flat_map(block).collect();
        for _ in 0..3 {
            asking.submit(Direction::Read).wait().all().expect("read");
        }
        let mut stalls = Vec::new();
        for round in 0..cuts {
            let (rail, how) = (round % 2, if round / 2 % 2 == 0 { Cut::Drop } else { Cut::LinkDown });
            // Bytes go out and come back, so that both directions are cut; at the end both sides are as before.
            let direction = if round / 4 % 2 == 0 { Direction::Read } else { Direction::Write };
            if direction == Direction::Read {
                asking.local.write_at(0, &vec![0; BYTES as usize]).expect("inside");
            }
            let before = asking.moved();
            let batch = asking.submit(direction);
            while asking.moved() < before + 8 * MIB && batch.poll().is_none() {
                std::thread::yield_now();
            }
            let cut = std::thread::scope(|scope| {
                let cutting = scope.spawn(|| network.cut(rail, how));
                let (mut stall, mut moved, mut since) = (Duration::ZERO, asking.moved(), Instant::now());
                let outcome = loop {
                    let outcome = batch.wait_until(Instant::now() + Duration::from_micros(500));
                    let now = asking.moved();
                    if now > moved || outcome.is_some() {
                        stall = stall.max(since.elapsed());
                        (moved, since) = (now, Instant::now());
                    }
                    if let Some(outcome) = outcome {
                        break outcome;
                    }
                };
                cutting.join().expect("cut");
                outcome.all().expect("moved by the other rail");
                stall
            });
            stalls.push(cut);
            network.mend(rail, how);
            asking.wait_until_healthy(2);
            // A write is checked by reading it back.
            asking.submit(Direction::Read).wait().all().expect("read");
            assert!(support::bytes(&asking.local) == expected, "round {round}: {direction:?}");
        }
        stalls.sort();
        let at = |share: f64| stalls[((stalls.len() - 1) as f64 * share) as usize];
        eprintln!("{cuts} cuts: stall median {:?}, p90 {:?}, p99 {:?}, most {:?}", at(0.5), at(0.9), at(0.99), at(1.0));
        // The silence timeout is what a batch would wait for without rails; on a busy machine even less than that is much.
        assert!(at(0.5) < Duration::from_millis(800), "{stalls:?}");
        let rails = asking.engine.rails(asking.peer).expect("known");
        assert!(rails.iter().all(|rail| rail.moved_bytes > 0), "{rails:?}");
        eprintln!("{rails:?}");
    });
}

#[test]
fn rails_of_different_speed_carry_by_their_speed() {
    in_network(&[2000, 500], |network| {
        let (asking, _target) = Asking::start(network);
        asking.wait_until_healthy(2);
        for _ in 0..6 {
            asking.submit(Direction::Read).wait().all().expect("read");
        }
        let before = asking.engine.rails(asking.peer).expect("known");
        for _ in 0..4 {
            asking.submit(Direction::Read).wait().all().expect("read");
        }
        let after = asking.engine.rails(asking.peer).expect("known");
        let moved = |rail: usize| (after[rail].moved_bytes - before[rail].moved_bytes) as f64;
        let share = moved(0) / (moved(0) + moved(1));
        eprintln!("the faster rail carried {share:.2} of the bytes: {after:?}");
        assert!((0.6..0.98).contains(&share), "0.8 would be by speed, and it is {share:.2}: {after:?}");
    });
}

/// Both ends keep a connection that the other has given up: the goodbye was dropped on the way.
#[test]
fn half_open_connections_are_noticed_and_replaced() {
    in_network(&[0], |network| {
        let (asking, target) = Asking::start(network);
        asking.submit(Direction::Read).wait().all().expect("read");
        // The asking side is silent for a while, its connection stays: it is used again.
        network.cut(0, Cut::Drop);
        let batch = asking.submit(Direction::Read);
        assert_eq!(batch.wait_until(soon()).expect("ended").results, [Err(Failure::Silent)]);
        network.mend(0, Cut::Drop);
        let until = soon();
        while let Err(failure) = asking.submit(Direction::Write).wait().all() {
            assert!(Instant::now() < until, "{failure}");
        }
        // The peer vanishes in silence, and another engine takes its port: not taken for the first.
        network.cut(0, Cut::Drop);
        let address = asking.engine.rails(asking.peer).expect("known")[0].name.clone();
        drop(target);
        network.mend(0, Cut::Drop);
        let (_second, _) = Target::start(network, &address);
        let until = soon();
        loop {
            match asking.submit(Direction::Read).wait().results[..] {
                [Err(Failure::Restarted)] => break,
                [Err(Failure::ConnectionLost | Failure::Unreachable | Failure::Silent)] => {}
                ref other => panic!("{other:?}"),
            }
            assert!(Instant::now() < until);
        }
        let peer = asking.engine.connect(&address, soon()).expect("the other engine");
        assert_ne!(peer, asking.peer);
    });
}

/// Connections are kept and used again: sixteen ports are enough for a hundred thousand requests of 32 threads.
#[test]
fn few_local_ports_are_enough_for_many_requests_of_many_threads() {
    in_network(&[0], |network| {
        std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40015").expect("of this network");
        let (asking, _target) = Asking::start(network);
        let asking = &asking;
        std::thread::scope(|scope| {
            for thread in 0..32_u64 {
                scope.spawn(move || {
                    for number in 0..3200_u64 {
                        let offset = (thread * 3200 + number) * 4096 % BYTES;
                        let local = Slice { offset, length: 4096, ..asking.whole.local };
                        let remote = RemoteSlice { offset, ..asking.whole.remote };
                        let read = Request { local, remote, ..asking.whole };
                        let outcome = asking.engine.transfer(&[read], BatchOptions::default()).expect("submitted");
                        outcome.all().expect("read");
                    }
                });
            }
        });
        assert_eq!(asking.engine.totals().batches, 0);
    });
}

/// A host without IPv4: engines listen on all addresses, and are reached.
#[test]
fn without_ipv4_all_goes_by_ipv6() {
    in_network(&[], |_| {
        must("ip", &["addr", "del", "127.0.0.1/8", "dev", "lo"]);
        let there = start(Settings { listen: vec!["[::]:0".into()], same_host: false, ..Settings::default() });
        let memory = Memory::anonymous(4096).expect("memory");
        memory.write_at(0, &support::pattern(4096, 1)).expect("inside");
        there.register(&memory, AccessRights::READ, Some("pool")).expect("registered");
        let here = start(Settings { same_host: false, ..Settings::default() });
        let read = support::read_pool(&here, &format!("[::1]:{}", there.addresses()[0].port()));
        assert!(read == support::pattern(4096, 1));
    });
}

/// A name with an address of each family, of which one swallows whatever is sent to it: the other is used.
#[test]
fn a_name_of_which_one_family_is_dead_is_reached_by_the_other() {
    in_network(&[], |_| {
        let there = start(Settings { listen: vec!["[::]:0".into()], same_host: false, ..Settings::default() });
        let memory = Memory::anonymous(MIB as usize).expect("memory");
        (0..MIB / 4096).for_each(|number| memory.write_at(number * 4096, &block(number)).expect("inside"));
        there.register(&memory, AccessRights::READ, Some("bench")).expect("registered");
        let hosts = tempfile::NamedTempFile::new().expect("file");
        for (dead, family, alive) in [("127.0.0.9", "ip daddr", "::1"), ("fd00::9", "ip6 daddr", "127.0.0.1")] {
            let _may_be_there = Command::new("ip").args(["addr", "add", dead, "dev", "lo"]).status();
            must("nft", &["add", "table", "inet", "dead"]);
            must("nft", &["add", "chain", "inet", "dead", "in", "{ type filter hook input priority 0; }"]);
            must("nft", &["add", "rule", "inet", "dead", "in", family, dead, "drop"]);
            let both = format!("{dead} store.test\n{alive} store.test\n");
            std::fs::write(hosts.path(), both).expect("written");
            let bench = env!("CARGO_BIN_EXE_tidepool-transfer-bench");
            let asking = format!(
                "mount --bind {} /etc/hosts && exec {bench} initiator --peer store.test:{} --transport tcp --block 4K \
                 --batch 4 --seconds 0.1 --verify",
                hosts.path().display(),
                there.addresses()[0].port()
            );
            must("unshare", &["--mount", "sh", "-c", &asking]);
            must("nft", &["delete", "table", "inet", "dead"]);
        }
    });
}
