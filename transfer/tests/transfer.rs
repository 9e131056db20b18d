//! Bytes arrive where they should, over each transport, and bad requests are refused.

use std::time::Instant;

use support::{Pair, WAYS, by, bytes, pattern, settings, soon, start};
use tidepool_transfer::{
    AccessRights, BatchOptions, Direction, Engine, Failure, Kind, Landed, Landing, Loan, Memory, PeerMapping, Priority,
    RegionId, RegionKey, RegionTicket, RemoteSlice, Request, Settings, Slice, TransferError, TransportKind,
};

mod support;

const MIB: u64 = 1 << 20;

#[test]
fn reads_and_writes_of_any_size_and_alignment_arrive() {
    let pair = Pair::new(10 << 20);
    for way in WAYS {
        for (round, length) in
            [1, 7, 4095, 4096, 4097, 65_537, MIB, MIB + MIB / 8 + 1, 9 * MIB + 3].into_iter().enumerate()
        {
            let source = pattern(length as usize, round as u64);
            pair.remote.write_at(5, &source).expect("inside");
            pair.local.write_at(0, &vec![0; 10 << 20]).expect("inside");
            let read = pair.request(Direction::Read, 3, 5, length);
            pair.here.transfer(&[read], by(way)).expect("submitted").all().expect("read");
            let local = bytes(&pair.local);
            assert!(local[3..3 + length as usize] == source, "{way:?} {length}");
            let after = &local[3 + length as usize..];
            assert!(local[..3] == [0; 3] && after == vec![0; after.len()]);

            let source = pattern(length as usize, 100 + round as u64);
            pair.local.write_at(11, &source).expect("inside");
            let write = pair.request(Direction::Write, 11, 2, length);
            pair.here.submit(&[write], by(way)).expect("submitted").wait().all().expect("written");
            assert!(bytes(&pair.remote)[2..2 + length as usize] == source, "{way:?} {length}");
        }
    }
}

#[test]
fn peers_on_one_host_use_shared_memory_unless_told_otherwise() {
    let pair = Pair::new(4096);
    assert_eq!(pair.here.segment(pair.segment).expect("open"), (4096, Some(TransportKind::SharedMemory)));
    let alone = Settings { same_host: false, ..settings() };
    let pair = Pair::with(4096, AccessRights::READ, alone, settings());
    assert_eq!(pair.here.segment(pair.segment).expect("open"), (4096, Some(TransportKind::Tcp)));
}

#[test]
fn large_mixed_batches_move_every_byte_once() {
    let pair = Pair::new(8 << 20);
    for way in WAYS {
        // Even blocks are read, odd ones are written; each from the mirrored place.
        let (count, block) = (1024_u64, 4096_u64);
        pair.remote.write_at(0, &pattern(8 << 20, 1)).expect("inside");
        pair.local.write_at(0, &pattern(8 << 20, 2)).expect("inside");
        let (mut local, mut remote) = (bytes(&pair.local), bytes(&pair.remote));
        let requests: Vec<_> = (0..count)
            .map(|index| {
                let (here, there) = (index * block, (count - 1 - index) * block);
                let direction = if index % 2 == 0 { Direction::Read } else { Direction::Write };
                pair.request(direction, here, there, block)
            })
            .collect();
        for request in &requests {
            let (here, there) = (request.local.offset as usize, request.remote.offset as usize);
            let length = request.local.length as usize;
            match request.direction {
                Direction::Read => local[here..here + length].copy_from_slice(&remote[there..there + length]),
                Direction::Write => remote[there..there + length].copy_from_slice(&local[here..here + length]),
            }
        }
        pair.here.transfer(&requests, by(way)).expect("submitted").all().expect("done");
        assert!(bytes(&pair.local) == local && bytes(&pair.remote) == remote, "{way:?}");
    }
    assert_eq!(pair.here.totals().batches, 0);
}

#[test]
fn bad_slices_are_refused_before_anything_moves() {
    let pair = Pair::new(8192);
    let read = |local, remote, length| pair.request(Direction::Read, local, remote, length);
    let refused = |request: Request| {
        let good = read(0, 0, 4096);
        let error = pair.here.submit(&[good, request], BatchOptions::default()).expect_err("refused");
        assert_eq!(
            error.kind(),
            if matches!(error, TransferError::UnknownSegment(_)) { Kind::OpenAgain } else { Kind::Fix }
        );
        error
    };
    let local = [read(8191, 0, 2), read(8193, 0, 0), read(u64::MAX, 0, 2), read(1, 0, u64::MAX)];
    let remote = [read(0, 8191, 2), read(0, u64::MAX, 1), read(0, 8193, 0)];
    for request in local.into_iter().chain(remote) {
        assert!(matches!(refused(request), TransferError::Slice { request: 1, .. }), "{request:?}");
    }
    let stale = Request { local: Slice { region: RegionId(77), offset: 0, length: 1 }, ..read(0, 0, 1) };
    assert!(matches!(refused(stale), TransferError::UnknownRegion(RegionId(77))));
    pair.here.close_segment(pair.segment).expect("closed");
    assert!(matches!(
        pair.here.submit(&[read(0, 0, 1)], BatchOptions::default()),
        Err(TransferError::UnknownSegment(_))
    ));
    assert!(matches!(pair.here.close_segment(pair.segment), Err(TransferError::UnknownSegment(_))));
    assert_eq!(pair.here.totals().batches, 0);
}

#[test]
fn requests_of_no_bytes_succeed_and_empty_batches_end() {
    let pair = Pair::new(4096);
    for way in WAYS {
        let nothing = [pair.request(Direction::Read, 4096, 4096, 0), pair.request(Direction::Write, 0, 0, 0)];
        assert_eq!(pair.here.transfer(&nothing, by(way)).expect("submitted").results, [Ok(()), Ok(())]);
        assert!(pair.here.submit(&[], by(way)).expect("submitted").poll().expect("ended").results.is_empty());
    }
}

#[test]
fn overlapping_requests_leave_one_of_their_bytes_everywhere() {
    let pair = Pair::new(8192);
    pair.remote.write_at(0, &[1; 4096]).expect("inside");
    pair.remote.write_at(4096, &[2; 4096]).expect("inside");
    for way in WAYS {
        let requests = [pair.request(Direction::Read, 0, 0, 4096), pair.request(Direction::Read, 2048, 4096, 4096)];
        pair.here.transfer(&requests, by(way)).expect("submitted").all().expect("read");
        let local = bytes(&pair.local);
        assert!(local[..2048].iter().all(|byte| *byte == 1));
        assert!(local[2048..4096].iter().all(|byte| [1, 2].contains(byte)));
        assert!(local[4096..6144].iter().all(|byte| *byte == 2));
    }
}

#[test]
fn rights_are_checked_on_both_sides() {
    let pair = Pair::with(4096, AccessRights::READ, settings(), settings());
    let write = pair.request(Direction::Write, 0, 0, 1);
    for way in WAYS {
        let refused = pair.here.submit(&[write], by(way));
        assert!(matches!(refused, Err(TransferError::NoRight { request: 0 })), "{refused:?}");
    }
    // A ticket that promises more than its region grants: the peer says no.
    let forged = RegionTicket { rights: AccessRights::READ_WRITE, ..pair.ticket };
    let segment = pair.here.open_ticket(pair.peer, forged, soon()).expect("opened");
    let write = Request { remote: RemoteSlice { segment, offset: 0 }, ..write };
    let outcome = pair.here.transfer(&[write], BatchOptions::default()).expect("submitted");
    assert_eq!(outcome.results, [Err(Failure::NoRight)]);
    assert_eq!(bytes(&pair.remote), [0; 4096]);
}

#[test]
fn wrong_keys_and_lengths_are_refused_by_the_peer_alone_per_request() {
    let pair = Pair::new(MIB as usize);
    pair.remote.write_at(0, &pattern(MIB as usize, 3)).expect("inside");
    let open = |ticket| pair.here.open_ticket(pair.peer, ticket, soon()).expect("opened");
    let wrong_key = open(RegionTicket { key: RegionKey(pair.ticket.key.0 ^ 1), ..pair.ticket });
    let too_long = open(RegionTicket { length: 4 * MIB, ..pair.ticket });
    for direction in [Direction::Read, Direction::Write] {
        pair.local.write_at(0, &vec![0; MIB as usize]).expect("inside");
        let at = |segment, offset, remote| Request {
            remote: RemoteSlice { segment, offset: remote },
            ..pair.request(direction, offset, 0, 4096)
        };
        // Good and bad alternate in one frame.
        let requests: Vec<_> = (0..64_u64)
            .map(|index| match index % 4 {
                1 => at(wrong_key, index * 4096, 0),
                3 => at(too_long, index * 4096, MIB),
                _ => at(pair.segment, index * 4096, index * 4096),
            })
            .collect();
        let mut batches = vec![requests.clone()];
        batches.extend(requests.iter().map(|request| vec![*request]));
        for requests in batches {
            let outcome = pair.here.transfer(&requests, by(TransportKind::Tcp)).expect("submitted");
            for (request, result) in requests.iter().zip(outcome.results) {
                let expected = match request.remote.segment {
                    segment if segment == wrong_key => Err(Failure::NoRegion),
                    segment if segment == too_long => Err(Failure::OutOfRange),
                    _ => Ok(()),
                };
                assert_eq!(result, expected);
            }
        }
        if direction == Direction::Read {
            let (local, remote) = (bytes(&pair.local), bytes(&pair.remote));
            for block in (0..64).step_by(2) {
                assert!(local[block * 4096..][..4096] == remote[block * 4096..][..4096], "block {block}");
            }
        }
    }
    assert!(pair.there.totals().refused_requests > 0);
}

#[test]
fn a_withdrawn_region_is_gone_over_every_transport() {
    for way in WAYS {
        let pair = Pair::new(4096);
        let read = pair.request(Direction::Read, 0, 0, 4096);
        pair.here.transfer(&[read], by(way)).expect("submitted").all().expect("read");
        pair.there.unregister(pair.ticket.region, soon()).expect("withdrawn");
        let outcome = pair.here.transfer(&[read], by(way)).expect("submitted");
        assert_eq!(outcome.results, [Err(Failure::NoRegion)], "{way:?}");
        let again = pair.here.open(pair.peer, "pool", soon()).expect_err("no such name");
        assert!(matches!(again, TransferError::Peer { failure: Failure::NoRegion, .. }), "{again}");
        // Memory that takes its place is another region.
        let other = Memory::shared(4096, PeerMapping::Writable).expect("memory");
        let ticket = pair.there.register(&other, AccessRights::READ, Some("pool")).expect("registered");
        assert_ne!(ticket.region, pair.ticket.region);
        assert_eq!(pair.here.transfer(&[read], by(way)).expect("submitted").results, [Err(Failure::NoRegion)]);
        assert_eq!(pair.there.totals().registered_bytes, 4096);
    }
}

#[test]
fn a_local_region_can_be_withdrawn_with_transfers_in_flight() {
    let pair = Pair::new(64 << 20);
    for way in WAYS {
        let memory = Memory::anonymous(64 << 20).expect("memory");
        let region = pair.here.register(&memory, AccessRights::LOCAL, None).expect("registered").region;
        let read = Request {
            local: Slice { region, offset: 0, length: 64 << 20 },
            ..pair.request(Direction::Read, 0, 0, 64 << 20)
        };
        let batches: Vec<_> = (0..8).map(|_| pair.here.submit(&[read], by(way)).expect("submitted")).collect();
        pair.here.unregister(region, Instant::now()).expect("withdrawn within its bound");
        assert!(matches!(pair.here.unregister(region, soon()), Err(TransferError::UnknownRegion(_))));
        assert!(matches!(pair.here.submit(&[read], by(way)), Err(TransferError::UnknownRegion(_))));
        for batch in batches {
            let outcome = batch.poll().expect("ended with the withdrawal");
            assert!(matches!(outcome.results[..], [Ok(()) | Err(Failure::Cancelled)]), "{outcome:?}");
        }
        // The memory is ours alone again: nothing arrives any more.
        memory.write_at(0, &vec![9; 64 << 20]).expect("inside");
        let other = pair.request(Direction::Read, 0, 0, 4096);
        pair.here.transfer(&[other], by(way)).expect("submitted").all().expect("read");
        assert!(bytes(&memory) == vec![9; 64 << 20], "{way:?}");
    }
}

#[test]
fn cancelled_batches_end_soon_and_nothing_arrives_later() {
    let pair = Pair::new(32 << 20);
    pair.remote.write_at(0, &vec![1; 32 << 20]).expect("inside");
    for way in WAYS {
        for direction in [Direction::Read, Direction::Write] {
            let batches: Vec<_> = (0..8)
                .map(|_| pair.here.submit(&[pair.request(direction, 0, 0, 32 << 20)], by(way)).expect("submitted"))
                .collect();
            batches.iter().for_each(|batch| batch.cancel());
            for batch in &batches {
                let outcome = batch.wait_until(soon()).expect("ended");
                assert!(matches!(outcome.results[..], [Ok(()) | Err(Failure::Cancelled)]), "{outcome:?}");
            }
            pair.local.write_at(0, &vec![5; 32 << 20]).expect("inside");
            let probe = pair.request(Direction::Write, 0, 0, 4096);
            pair.here.transfer(&[probe], by(way)).expect("submitted").all().expect("written");
            assert!(bytes(&pair.local) == vec![5; 32 << 20], "{way:?} {direction:?}");
        }
    }
    assert_eq!(pair.here.totals().batches, 0);
}

#[test]
fn deadlines_end_batches() {
    let pair = Pair::new(4096);
    for way in WAYS {
        let options = BatchOptions { deadline: Some(Instant::now()), ..by(way) };
        let outcome = pair.here.transfer(&[pair.request(Direction::Read, 0, 0, 4096)], options).expect("submitted");
        assert_eq!(outcome.results, [Err(Failure::DeadlinePassed)]);
    }
}

#[test]
fn ten_thousand_batches_can_be_submitted_and_dropped() {
    for way in WAYS {
        let pair = Pair::new(MIB as usize);
        for index in 0..10_000_u64 {
            let offset = index % 256 * 4096;
            let batch = pair.here.submit(&[pair.request(Direction::Read, offset, offset, 4096)], by(way));
            drop(batch.expect("submitted"));
        }
        // Withdrawing waits for all of them.
        pair.here.unregister(pair.region, soon()).expect("withdrawn");
        let totals = pair.here.totals();
        assert_eq!((totals.batches, totals.registered_bytes), (0, 0));
    }
}

#[test]
fn more_batches_than_the_bound_are_refused() {
    let few = Settings { batches: 4, ..settings() };
    let pair = Pair::with(64 << 20, AccessRights::READ, few, settings());
    let read = pair.request(Direction::Read, 0, 0, 64 << 20);
    let batches: Vec<_> = (0..64).map(|_| pair.here.submit(&[read], by(TransportKind::Tcp))).collect();
    assert!(batches.iter().any(|batch| matches!(batch, Err(TransferError::Full { what: "batches", limit: 4 }))));
    for batch in batches.into_iter().flatten() {
        batch.wait().all().expect("read");
    }
    let many = vec![pair.request(Direction::Read, 0, 0, 1); 65_537];
    assert!(matches!(pair.here.submit(&many, BatchOptions::default()), Err(TransferError::Full { .. })));
}

#[test]
fn batches_are_futures() {
    let pair = Pair::new(MIB as usize);
    for way in WAYS {
        let batch = pair.here.submit(&[pair.request(Direction::Read, 0, 0, MIB)], by(way)).expect("submitted");
        let outcome = support::block_on(batch);
        outcome.all().expect("read");
    }
}

#[test]
fn a_notification_follows_a_batch_that_succeeded_and_no_other() {
    let pair = Pair::new(4096);
    let options = |transport, text: &str| BatchOptions { notification: Some(text.into()), ..by(transport) };
    for way in WAYS {
        let write = pair.request(Direction::Write, 0, 0, 4096);
        let outcome = pair.here.transfer(&[write], options(way, "first")).expect("submitted");
        assert_eq!(outcome.notification, Some(Ok(())));
        assert_eq!(pair.there.take_notification(soon()).as_deref(), Some(&b"first"[..]));

        let late = BatchOptions { deadline: Some(Instant::now()), ..options(way, "never") };
        let outcome = pair.here.transfer(&[write], late).expect("submitted");
        assert_eq!(outcome.notification, Some(Err(Failure::Cancelled)));
        assert_eq!(pair.there.take_notification(Instant::now()), None);
    }
    let few = Settings { notifications: 1, ..settings() };
    let pair = Pair::with(4096, AccessRights::READ, settings(), few);
    let read = pair.request(Direction::Read, 0, 0, 1);
    let results = [(); 2].map(|()| pair.here.transfer(&[read], options(TransportKind::Tcp, "full?")));
    let results = results.map(|outcome| outcome.expect("submitted").notification);
    assert_eq!(results, [Some(Ok(())), Some(Err(Failure::Overloaded))]);
}

#[test]
fn names_and_keys_open_segments_and_wrong_ones_do_not() {
    let pair = Pair::new(4096);
    assert!(matches!(
        pair.here.open(pair.peer, "nothing", soon()),
        Err(TransferError::Peer { failure: Failure::NoRegion, .. })
    ));
    assert_eq!(pair.here.connect(&support::address(&pair.there), soon()).expect("known"), pair.peer);
    pair.here.probe(pair.peer, soon()).expect("alive");
    pair.here.disconnect(pair.peer).expect("forgotten");
    assert!(matches!(pair.here.open(pair.peer, "pool", soon()), Err(TransferError::UnknownPeer(_))));
    let read = pair.request(Direction::Read, 0, 0, 4096);
    for way in WAYS {
        assert_eq!(pair.here.transfer(&[read], by(way)).expect("submitted").results, [Err(Failure::Closed)]);
    }
    for bad in ["", "localhost", "localhost:0", "localhost:99999"] {
        assert!(matches!(pair.here.connect(bad, soon()), Err(TransferError::Address { .. })), "{bad}");
    }
}

#[test]
fn engines_listen_on_both_families_and_on_names() {
    for listen in ["127.0.0.1:0", "[::1]:0", "localhost:0", "[::]:0"] {
        let there = start(Settings { listen: vec![listen.into()], ..settings() });
        let memory = Memory::shared(4096, PeerMapping::ReadOnly).expect("memory");
        memory.write_at(0, &pattern(4096, 1)).expect("inside");
        there.register(&memory, AccessRights::READ, Some("pool")).expect("registered");
        let here = start(Settings { same_host: false, ..Settings::default() });
        let name = if listen.starts_with("[::]") { "[::1]" } else { listen.trim_end_matches(":0") };
        let read = support::read_pool(&here, &format!("{name}:{}", there.addresses()[0].port()));
        assert!(read == pattern(4096, 1));
    }
}

#[test]
fn only_who_knows_the_secret_gets_in() {
    let secret = |byte| Settings { secret: Some([byte; 32]), ..settings() };
    let there = start(secret(7));
    start(secret(7)).connect(&support::address(&there), soon()).expect("same secret");
    for other in [secret(8), settings()] {
        let refused = start(other).connect(&support::address(&there), soon());
        assert!(matches!(refused, Err(TransferError::Peer { failure: Failure::Unauthorized, .. })), "{refused:?}");
    }
}

#[test]
fn a_port_in_use_is_said_so_and_a_closed_engine_gives_its_port_back() {
    let first = start(settings());
    let again = Settings { listen: vec![support::address(&first)], ..settings() };
    let clash = Engine::start(again.clone()).expect_err("in use");
    assert!(
        matches!(&clash, TransferError::System { action: "bind", source } if source.kind() == std::io::ErrorKind::AddrInUse)
    );
    first.close();
    assert!(matches!(
        first.register(&Memory::anonymous(1).expect("memory"), AccessRights::LOCAL, None),
        Err(TransferError::Closed)
    ));
    drop(first);
    start(again);
}

#[test]
fn what_somebody_waits_for_goes_before_what_runs_in_the_background() {
    let pair = Pair::new(32 << 20);
    let large = pair.request(Direction::Read, 0, 0, 32 << 20);
    let bulk = || BatchOptions { priority: Priority::Bulk, ..by(TransportKind::Tcp) };
    let background: Vec<_> = (0..40).map(|_| pair.here.submit(&[large], bulk()).expect("submitted")).collect();
    let small = pair.request(Direction::Read, 0, 0, 4096);
    let urgent = pair.here.submit(&[small], by(TransportKind::Tcp)).expect("submitted");
    urgent.wait().all().expect("read");
    let running = background.iter().filter(|batch| batch.poll().is_none()).count();
    assert!(running >= 20, "{running} of 40 background batches were still running");
    background.iter().for_each(|batch| batch.cancel());
    for batch in background {
        assert!(matches!(batch.wait_until(soon()).expect("ended").results[0], Ok(()) | Err(Failure::Cancelled)));
    }
}

#[test]
fn ranges_land_and_are_taken_in_order() {
    const LENGTH: usize = 9 << 20;
    let pair = Pair::new(LENGTH);
    let source = pattern(LENGTH, 3);
    pair.remote.write_at(0, &source).expect("inside");
    let landing = Landing::start(&pair.here, 5).expect("started");
    // Backwards, of odd lengths, with one of none, longer than all slots.
    let ranges = [((5 << 20) + 3, (4 << 20) - 3), (7, 0), (0, 2 << 20), (4096, 1), (1, 100)];
    let expected: Vec<u8> = ranges.iter().flat_map(|&(at, length)| &source[at..at + length]).copied().collect();
    let ranges = ranges.map(|(at, length)| (at as u64, length as u64));
    for way in WAYS {
        let mut taken = Vec::new();
        let take = |mut landed: Landed<'_>| {
            let mut bytes = vec![0; landed.left() as usize];
            landed.take(&mut bytes).expect("as many as there are");
            assert!(landed.take(&mut [0]).is_err(), "no more than arrived");
            taken.extend(bytes);
            Ok::<_, TransferError>(())
        };
        landing.reserve().expect("free").read(pair.segment, &ranges, Some(way), soon(), take).expect("read");
        assert!(taken == expected, "{way:?}");
    }
    // Who gives up, and a range outside: nothing stays under way, no slot is lost, and the next read is not disturbed.
    let stop = |_: Landed<'_>| Err(TransferError::NoAnswer("enough"));
    let nothing = |_: Landed<'_>| Ok::<_, TransferError>(());
    for _ in 0..20 {
        let mut reading = landing.reserve().expect("free");
        let stopped = reading.read(pair.segment, &ranges, None, soon(), stop);
        assert!(matches!(stopped, Err(TransferError::NoAnswer("enough"))), "{stopped:?}");
        let outside = [(0, 10), (LENGTH as u64, 1)];
        assert!(reading.read(pair.segment, &outside, None, soon(), nothing).is_err());
        assert!(reading.read(pair.segment, &[(u64::MAX, 2)], None, soon(), nothing).is_err());
        let mut taken = [0; 3];
        let take = |mut landed: Landed<'_>| {
            landed.take(&mut taken).expect("three");
            Ok::<_, TransferError>(())
        };
        reading.read(pair.segment, &[(7, 3)], None, soon(), take).expect("read");
        assert_eq!(taken, source[7..10]);
    }
    assert_eq!(pair.here.totals().batches, 0);
    // Two at once take what there is.
    let (first, second) = (landing.reserve(), landing.reserve());
    assert!(first.is_some() && second.is_some() && landing.reserve().is_none());
    drop((first, second));
    drop(landing);
    assert_eq!(pair.here.totals().regions, 1, "the pair's own");
}

#[test]
fn an_engine_may_ask_for_another_proof_than_it_brings() {
    let (secret, admission) = (Some([1; 32]), Some([2; 32]));
    let there = start(Settings { secret, admission, ..settings() });
    let here = start(Settings { secret, same_host: false, ..settings() });
    let address = there.addresses()[0].to_string();
    let refused = here.connect(&address, soon()).expect_err("another proof");
    assert!(matches!(refused, TransferError::Peer { failure: Failure::Unauthorized, .. }), "{refused:?}");
    let peer = here.connect_by(&address, admission, soon()).expect("the proof that it asks for");
    here.probe(peer, soon()).expect("there");
    // Its own it brings to others.
    there.connect(&here.addresses()[0].to_string(), soon()).expect("the secret");
}

#[test]
fn memory_is_registered_as_long_as_it_is_lent() {
    let (here, memory) = (start(settings()), Memory::anonymous(4096).expect("memory"));
    let loan = Loan::by_engine(&here, &memory).expect("registered");
    assert_eq!((here.totals().regions, here.totals().registered_bytes), (1, 4096));
    drop(loan);
    assert_eq!((here.totals().regions, here.totals().registered_bytes), (0, 0));
}
