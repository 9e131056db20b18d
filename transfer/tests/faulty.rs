//! Rails that fail at every stage, under seeds: every request ends once, with the right bytes.

use std::time::{Duration, Instant};

use support::{Pair, bytes, pattern, settings, soon};
use tidepool_transfer::{
    AccessRights, BatchOptions, Direction, Failure, Faults, Priority, Request, Settings, TransportKind,
};

mod support;

const MIB: u64 = 1 << 20;

/// A pair with `rails` TCP rails, and shared memory and files before them if wanted.
fn pair(length: u64, rails: usize, same_host: bool) -> Pair {
    let listen = (1..=rails).map(|host| format!("127.0.0.{host}:0")).collect();
    let there = Settings { listen, ..settings() };
    let here = Settings { same_host, ..settings() };
    let pair = Pair::with(length as usize, AccessRights::READ_WRITE, here, there);
    let until = soon();
    let all = rails + if same_host { 2 } else { 0 };
    loop {
        let rails = pair.here.rails(pair.peer).expect("known");
        if rails.len() == all && rails.iter().all(|rail| rail.rests.is_none()) {
            return pair;
        }
        assert!(Instant::now() < until, "{rails:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Requests of odd sizes that cover `length` bytes once.
fn pieces(pair: &Pair, direction: Direction, length: u64, seed: u64) -> Vec<Request> {
    let (mut requests, mut offset, mut size) = (Vec::new(), 0, 1 + seed % 9000);
    while offset < length {
        let part = size.min(length - offset);
        requests.push(pair.request(direction, offset, offset, part));
        offset += part;
        size = (size * 7 + 13) % (3 * MIB) + 1;
    }
    requests
}

/// Moves everything back and forth under faults, in several batches at once, and compares every byte.
fn survive(pair: &Pair, faults: impl Fn(u64) -> Vec<Faults>, rounds: u64) {
    for seed in 0..rounds {
        let faults = faults(seed);
        for (rail, faults) in faults.iter().enumerate() {
            pair.here.set_faults(pair.peer, rail, *faults).expect("known");
        }
        for direction in [Direction::Read, Direction::Write] {
            let length = pair.local.len();
            let source = pattern(length as usize, seed * 2 + u64::from(direction == Direction::Write));
            let (from, to) =
                if direction == Direction::Read { (&pair.remote, &pair.local) } else { (&pair.local, &pair.remote) };
            from.write_at(0, &source).expect("inside");
            let all = pieces(pair, direction, length, seed);
            let batches: Vec<_> = all
                .chunks(all.len() / 4 + 1)
                .zip([Priority::Latency, Priority::Bulk].into_iter().cycle())
                .map(|(part, priority)| {
                    let options = BatchOptions { priority, ..BatchOptions::default() };
                    pair.here.submit(part, options).expect("submitted")
                })
                .collect();
            for batch in batches {
                let outcome = batch.wait_until(Instant::now() + Duration::from_secs(60)).expect("ended");
                outcome.all().unwrap_or_else(|failure| panic!("seed {seed}, {direction:?}: {failure}, {faults:?}"));
            }
            assert!(bytes(to) == source, "seed {seed}, {direction:?}: {faults:?}");
        }
    }
    let rails = pair.here.rails(pair.peer).expect("known");
    assert!(rails.iter().all(|rail| rail.in_flight_bytes == 0), "{rails:?}");
    assert_eq!(pair.here.totals().batches, 0);
    // Nothing holds a region back.
    pair.here.unregister(pair.region, soon()).expect("withdrawn");
}

#[test]
fn rails_that_fail_at_submit_lose_nothing() {
    let pair = pair(24 * MIB, 3, false);
    let faults =
        |seed| vec![Faults { seed, at_submit: 0.3, ..Faults::default() }, Faults::default(), Faults::default()];
    survive(&pair, faults, 6);
}

#[test]
fn rails_that_fail_at_completion_lose_nothing() {
    let pair = pair(24 * MIB, 3, false);
    let faults = |seed| {
        let one = Faults { seed, at_completion: 0.3, ..Faults::default() };
        vec![one, Faults { seed: seed + 100, ..one }, Faults::default()]
    };
    survive(&pair, faults, 6);
}

#[test]
fn groups_of_which_nothing_is_heard_again_go_elsewhere() {
    let pair = pair(24 * MIB, 2, false);
    let faults = |seed| vec![Faults { seed, loss: 0.2, ..Faults::default() }, Faults::default()];
    survive(&pair, faults, 6);
    assert!(pair.here.rails(pair.peer).expect("known")[0].overdue > 0);
}

#[test]
fn delays_and_all_faults_together_lose_nothing() {
    let pair = pair(24 * MIB, 3, false);
    let faults = |seed| {
        let one = Faults {
            seed,
            at_submit: 0.1,
            at_completion: 0.1,
            loss: 0.05,
            delay: Duration::from_millis(4),
            ..Faults::default()
        };
        let late = Faults { seed, delay: Duration::from_millis(60), ..Faults::default() };
        vec![one, late, Faults::default()]
    };
    survive(&pair, faults, 6);
}

#[test]
fn if_every_rail_of_a_transport_is_cut_the_next_transport_carries() {
    let pair = pair(24 * MIB, 2, true);
    assert_eq!(pair.here.segment(pair.segment).expect("open").1, Some(TransportKind::SharedMemory));
    let cut = Faults { is_cut: true, ..Faults::default() };
    let none = Faults::default();
    // Shared memory, then one of the two addresses too.
    survive(&pair, |seed| if seed == 0 { vec![cut, none, none, none] } else { vec![cut, none, cut, none] }, 2);
    assert_eq!(pair.here.segment(pair.segment).expect("open").1, Some(TransportKind::Tcp));
    // Mended, it is probed and taken again.
    (0..4).for_each(|rail| pair.here.set_faults(pair.peer, rail, none).expect("known"));
    let until = soon();
    while pair.here.segment(pair.segment).expect("open").1 != Some(TransportKind::SharedMemory) {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_batch_that_asks_for_one_transport_ends_with_its_failure() {
    let pair = pair(4 * MIB, 1, true);
    let cut = Faults { is_cut: true, ..Faults::default() };
    pair.here.set_faults(pair.peer, 0, cut).expect("known");
    let read = [pair.request(Direction::Read, 0, 0, 4 * MIB)];
    let outcome = pair.here.transfer(&read, support::by(TransportKind::SharedMemory)).expect("submitted");
    assert_eq!(outcome.results, [Err(Failure::Unreachable)]);
    let outcome = pair.here.transfer(&read, BatchOptions::default()).expect("submitted");
    assert_eq!(outcome.results, [Ok(())]);
    pair.here.set_faults(pair.peer, 2, cut).expect("known");
    let outcome = pair.here.transfer(&read, BatchOptions::default()).expect("submitted");
    assert_eq!(outcome.results, [Err(Failure::Unreachable)], "nothing is left");
}
