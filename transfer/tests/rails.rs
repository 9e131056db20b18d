//! Several ways to a peer: large batches use them all, and none of them can hold a batch up.

use std::time::{Duration, Instant};

use support::proxy::Proxy;
use support::{Pair, bytes, pattern, settings, soon};
use tidepool_transfer::{
    AccessRights, BatchOptions, Direction, Failure, Priority, RailStatus, Request, Settings, TransportKind,
};

mod support;

const MIB: u64 = 1 << 20;

fn over_tcp() -> Settings {
    Settings { same_host: false, ..settings() }
}

/// A pair with two rails: a direct one, and one through a proxy.
fn with_proxy(length: u64) -> (Pair, Proxy) {
    let (proxy, listener) = Proxy::bind();
    let there = Settings { advertise: vec![proxy.address.clone()], ..settings() };
    let rights = AccessRights::READ_WRITE;
    // The target is known only when the engine has started; until then connections wait in the listener's queue.
    let pair = Pair::with(length as usize, rights, over_tcp(), there);
    proxy.serve(listener, support::address(&pair.there));
    wait_for(&pair, |rails| rails.len() == 2 && rails.iter().all(|rail| rail.rests.is_none()));
    (pair, proxy)
}

/// Waits until the rails are so.
fn wait_for(pair: &Pair, so: impl Fn(&[RailStatus]) -> bool) -> Vec<RailStatus> {
    let until = soon();
    loop {
        let rails = pair.here.rails(pair.peer).expect("known");
        if so(&rails) {
            return rails;
        }
        assert!(Instant::now() < until, "{rails:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn through<'a>(rails: &'a [RailStatus], proxy: &Proxy) -> &'a RailStatus {
    rails.iter().find(|rail| rail.name == proxy.address).expect("the proxy's rail")
}

/// Requests that cover `length` bytes, as far as a batch takes them.
fn whole(pair: &Pair, direction: Direction, length: u64) -> Vec<Request> {
    (0..length / MIB).map(|block| pair.request(direction, block * MIB, block * MIB, MIB)).collect()
}

#[test]
fn a_peer_that_listens_on_several_addresses_gives_several_rails_and_all_carry() {
    let listen = ["127.0.0.1:0", "127.0.0.2:0", "127.0.0.3:0"].map(str::to_owned).to_vec();
    let there = Settings { listen, ..settings() };
    let pair = Pair::with(64 << 20, AccessRights::READ_WRITE, over_tcp(), there);
    let rails = wait_for(&pair, |rails| rails.len() == 3 && rails.iter().all(|rail| rail.rests.is_none()));
    assert!(rails.iter().all(|rail| rail.transport == TransportKind::Tcp), "{rails:?}");
    for round in 0..4 {
        let source = pattern(64 << 20, round);
        pair.remote.write_at(0, &source).expect("inside");
        let one = pair.request(Direction::Read, 0, 0, 64 * MIB);
        pair.here.transfer(&[one], BatchOptions::default()).expect("submitted").all().expect("read");
        assert!(bytes(&pair.local) == source);
        let source = pattern(64 << 20, 100 + round);
        pair.local.write_at(0, &source).expect("inside");
        let batch = pair.here.submit(&whole(&pair, Direction::Write, 64 * MIB), BatchOptions::default());
        batch.expect("submitted").wait().all().expect("written");
        assert!(bytes(&pair.remote) == source);
    }
    let rails = pair.here.rails(pair.peer).expect("known");
    assert!(rails.iter().all(|rail| rail.moved_bytes >= 8 * MIB), "{rails:?}");
    assert_eq!(rails.iter().map(|rail| rail.moved_bytes).sum::<u64>(), 8 * 64 * MIB, "each byte once");
    assert!(rails.iter().all(|rail| rail.in_flight_bytes == 0), "{rails:?}");
}

#[test]
fn addresses_that_lead_nowhere_or_elsewhere_cost_nothing() {
    let elsewhere = support::start(settings());
    let advertise = vec![support::address(&elsewhere), "127.0.0.1:9".into(), "no such name:1".into()];
    let there = Settings { advertise, ..settings() };
    let pair = Pair::with(16 << 20, AccessRights::READ, over_tcp(), there);
    wait_for(&pair, |rails| rails.iter().filter(|rail| rail.rests.is_some_and(|_| rail.failures > 0)).count() == 3);
    for _ in 0..20 {
        let batch = whole(&pair, Direction::Read, 16 * MIB);
        pair.here.transfer(&batch, BatchOptions::default()).expect("submitted").all().expect("read");
    }
    let rails = pair.here.rails(pair.peer).expect("known");
    let elsewhere = rails.iter().find(|rail| rail.rests == Some(Failure::Restarted)).expect("another engine's");
    assert_eq!(elsewhere.moved_bytes, 0);
}

#[test]
fn a_rail_that_falls_silent_in_mid_batch_costs_no_request_and_no_byte() {
    let (pair, proxy) = with_proxy(64 * MIB);
    for round in 0..6 {
        let direction = if round % 2 == 0 { Direction::Read } else { Direction::Write };
        let source = pattern(64 << 20, round);
        let (from, to) =
            if direction == Direction::Read { (&pair.remote, &pair.local) } else { (&pair.local, &pair.remote) };
        from.write_at(0, &source).expect("inside");
        let before = proxy.passed();
        let batch = pair.here.submit(&whole(&pair, direction, 64 * MIB), BatchOptions::default()).expect("submitted");
        while proxy.passed() < before + MIB && batch.poll().is_none() {
            std::thread::yield_now();
        }
        proxy.freeze();
        let outcome = batch.wait_until(soon()).expect("ended");
        outcome.all().expect("moved by the other rail");
        assert!(bytes(to) == source, "{direction:?}");
        proxy.thaw();
        // Probed in the background, and used again.
        wait_for(&pair, |rails| rails.iter().all(|rail| rail.rests.is_none()));
    }
    let rails = pair.here.rails(pair.peer).expect("known");
    assert!(through(&rails, &proxy).overdue > 0, "nothing was on the rail when it fell silent: {rails:?}");
    assert!(rails.iter().all(|rail| rail.in_flight_bytes == 0), "{rails:?}");
}

/// Bytes that a connection took before it fell silent reach the peer's process when it wakes. By then another rail has
/// carried them, the batch has ended, and something else lies in their place.
#[test]
fn a_write_that_was_moved_to_another_rail_does_not_arrive_a_second_time() {
    let (pair, proxy) = with_proxy(32 * MIB);
    let mut moved = 0;
    for round in 0..8 {
        pair.local.write_at(0, &pattern(32 << 20, round)).expect("inside");
        let before = proxy.passed();
        let batch = pair.here.submit(&whole(&pair, Direction::Write, 32 * MIB), BatchOptions::default());
        let batch = batch.expect("submitted");
        while proxy.passed() < before + MIB && batch.poll().is_none() {
            std::thread::yield_now();
        }
        proxy.freeze();
        batch.wait_until(soon()).expect("ended").all().expect("written");
        assert!(bytes(&pair.remote) == pattern(32 << 20, round));
        moved = through(&pair.here.rails(pair.peer).expect("known"), &proxy).overdue;
        let last = pattern(32 << 20, 1000 + round);
        pair.remote.write_at(0, &last).expect("inside");
        proxy.thaw();
        wait_for(&pair, |rails| rails.iter().all(|rail| rail.rests.is_none()));
        // A round trip over each rail: what the proxy held has passed or was refused.
        let read = whole(&pair, Direction::Read, 32 * MIB);
        pair.here.transfer(&read, BatchOptions::default()).expect("submitted").all().expect("read");
        std::thread::sleep(Duration::from_millis(20));
        assert!(bytes(&pair.remote) == last, "round {round}: an old write came late");
    }
    assert!(moved > 0, "no write was moved to another rail");
}

#[test]
fn a_rail_that_is_cut_hands_over_and_comes_back() {
    let (pair, proxy) = with_proxy(64 * MIB);
    for round in 0..6 {
        let direction = if round % 2 == 0 { Direction::Read } else { Direction::Write };
        let before = proxy.passed();
        let batch = pair.here.submit(&whole(&pair, direction, 64 * MIB), BatchOptions::default()).expect("submitted");
        while proxy.passed() < before + MIB && batch.poll().is_none() {
            std::thread::yield_now();
        }
        proxy.cut();
        batch.wait_until(soon()).expect("ended").all().expect("moved");
        wait_for(&pair, |rails| rails.iter().all(|rail| rail.rests.is_none()));
    }
}

#[test]
fn a_slow_rail_takes_little_and_gives_back_what_is_late() {
    let (pair, proxy) = with_proxy(64 * MIB);
    proxy.set_rate(8 << 20);
    let source = pattern(64 << 20, 5);
    pair.remote.write_at(0, &source).expect("inside");
    for _ in 0..4 {
        let batch = whole(&pair, Direction::Read, 64 * MIB);
        pair.here.transfer(&batch, BatchOptions::default()).expect("submitted").all().expect("read");
        assert!(bytes(&pair.local) == source);
    }
    let rails = pair.here.rails(pair.peer).expect("known");
    let (slow, all) = (through(&rails, &proxy).moved_bytes, 4 * 64 * MIB);
    assert!(slow * 4 < all, "{slow} bytes of {all} by a rail of 8 MB/s: {rails:?}");
}

#[test]
fn a_request_for_which_every_rail_is_silent_ends_at_its_deadline() {
    let (first, listener) = Proxy::bind();
    let (second, other) = Proxy::bind();
    let there = support::start(Settings { advertise: vec![second.address.clone()], ..settings() });
    first.serve(listener, support::address(&there));
    second.serve(other, support::address(&there));
    let memory = tidepool_transfer::Memory::anonymous(16 << 20).expect("memory");
    there.register(&memory, AccessRights::READ_WRITE, Some("pool")).expect("registered");
    let here = support::start(over_tcp());
    let peer = here.connect(&first.address, soon()).expect("connected");
    let segment = here.open(peer, "pool", soon()).expect("opened");
    let region = here.register(&memory, AccessRights::LOCAL, None).expect("registered").region;
    let until = soon();
    while here.rails(peer).expect("known").iter().any(|rail| rail.rests.is_some()) {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(5));
    }
    for direction in [Direction::Read, Direction::Write] {
        first.freeze();
        second.freeze();
        let request = Request {
            direction,
            local: tidepool_transfer::Slice { region, offset: 0, length: 16 << 20 },
            remote: tidepool_transfer::RemoteSlice { segment, offset: 0 },
        };
        for priority in [Priority::Latency, Priority::Bulk] {
            let deadline = Some(Instant::now() + Duration::from_millis(300));
            let options = BatchOptions { deadline, priority, ..BatchOptions::default() };
            let batch = here.submit(&[request], options).expect("submitted");
            let outcome = batch.wait_until(soon()).expect("ended");
            assert_eq!(outcome.results, [Err(Failure::DeadlinePassed)], "{direction:?}");
        }
        first.thaw();
        second.thaw();
        let until = soon();
        while let Err(failure) = here.transfer(&[request], BatchOptions::default()).expect("submitted").all() {
            assert!(Instant::now() < until, "{failure}");
        }
    }
    assert_eq!(here.totals().batches, 0);
}
