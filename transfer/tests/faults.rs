//! Peers that die, stop, restart, or are no engines at all: every request ends, with the right reason, in time.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use support::process::in_own_process;
use support::{Pair, Target, WAYS, by, settings, soon, start};
use tidepool_transfer::{
    AccessRights, BatchOptions, Direction, Engine, Failure, Memory, PeerId, RegionTicket, RemoteSlice, Request,
    SegmentId, Settings, Slice, TransferError, TransportKind,
};

mod support;

const TARGET_BYTES: u64 = 64 << 20;

/// An engine that opened a target's segment.
struct Asking {
    engine: Engine,
    peer: PeerId,
    request: Request,
    local: Memory,
}

impl Asking {
    fn new(address: &str, silence: Duration) -> Self {
        // One lane: what is asked later comes later.
        let engine = start(Settings { silence_timeout: silence, lanes: 1, ..Settings::default() });
        let peer = engine.connect(address, soon()).expect("connected");
        let segment = engine.open(peer, "bench", soon()).expect("opened");
        let local = Memory::anonymous(TARGET_BYTES as usize).expect("memory");
        let region = engine.register(&local, AccessRights::LOCAL, None).expect("registered").region;
        let request = Request {
            direction: Direction::Read,
            local: Slice { region, offset: 0, length: TARGET_BYTES },
            remote: RemoteSlice { segment, offset: 0 },
        };
        Self { engine, peer, request, local }
    }

    fn small(&self) -> Request {
        Request { local: Slice { length: 4096, ..self.request.local }, ..self.request }
    }

    fn result(&self, request: Request, way: TransportKind) -> Result<(), Failure> {
        self.engine.transfer(&[request], by(way)).expect("submitted").results[0]
    }
}

#[test]
fn a_killed_peer_ends_what_is_on_its_way_and_what_comes_after() {
    for way in WAYS {
        let mut target = Target::start("127.0.0.1:0");
        let asking = Asking::new(&target.address, Duration::from_secs(5));
        asking.result(asking.small(), way).expect("read");
        let batches: Vec<_> =
            (0..64).map(|_| asking.engine.submit(&[asking.request], by(way)).expect("submitted")).collect();
        target.kill();
        let killed = Instant::now();
        let ended: Vec<_> = batches.iter().map(|batch| batch.wait_until(soon()).expect("ended").results[0]).collect();
        assert!(ended.iter().any(|result| result.is_err()), "{way:?}: all of 4 GiB was read before the kill");
        for result in ended {
            assert!(
                matches!(result, Ok(()) | Err(Failure::ConnectionLost | Failure::Unreachable)),
                "{way:?} {result:?}"
            );
        }
        assert!(killed.elapsed() < Duration::from_secs(10), "{way:?} {:?}", killed.elapsed());
        if way == TransportKind::Tcp {
            assert_eq!(asking.result(asking.small(), way), Err(Failure::Unreachable));
        } else {
            // Its memory is still mapped here, but nobody answers for it.
            let refused = asking.engine.submit(&[asking.small()], by(way));
            assert!(matches!(refused, Err(TransferError::NoWay { .. })), "{refused:?}");
            assert_eq!(
                asking.engine.transfer(&[asking.small()], BatchOptions::default()).expect("submitted").results,
                [Err(Failure::Unreachable)]
            );
        }
        let error = asking.engine.probe(asking.peer, soon()).expect_err("gone");
        assert!(matches!(error, TransferError::Peer { .. }), "{error}");
    }
}

#[test]
fn a_stopped_peer_is_given_up_after_the_silence_timeout_and_serves_again_later() {
    let target = Target::start("127.0.0.1:0");
    let asking = Asking::new(&target.address, Duration::from_millis(600));
    let tcp = TransportKind::Tcp;
    asking.result(asking.request, tcp).expect("read");
    target.freeze();
    let stopped = Instant::now();
    assert_eq!(asking.result(asking.request, tcp), Err(Failure::Silent));
    assert!(stopped.elapsed() >= Duration::from_millis(500), "{:?}", stopped.elapsed());
    assert!(stopped.elapsed() < Duration::from_secs(5), "{:?}", stopped.elapsed());
    // A deadline before that is kept.
    let deadline = Instant::now() + Duration::from_millis(100);
    let options = BatchOptions { deadline: Some(deadline), ..by(tcp) };
    let asked = Instant::now();
    let result = asking.engine.transfer(&[asking.small()], options).expect("submitted").results[0];
    assert!(matches!(result, Err(Failure::DeadlinePassed | Failure::Silent | Failure::Unreachable)), "{result:?}");
    assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    let call = asking.engine.call(asking.peer, b"there?", Instant::now() + Duration::from_millis(200));
    assert!(matches!(call, Err(TransferError::Peer { failure: Failure::DeadlinePassed, .. })), "{call:?}");
    // Whose answer carries bytes asks by itself whether anybody is there, long before its deadline.
    let asked = asking.engine.exchange(asking.peer, &[b"there?"], soon());
    assert!(
        matches!(asked, Err(TransferError::Peer { failure: Failure::Silent | Failure::Unreachable, .. })),
        "{asked:?}"
    );
    target.signal(rustix::process::Signal::CONT);
    let until = soon();
    while let Err(failure) = asking.result(asking.small(), tcp) {
        assert!(Instant::now() < until, "{failure}");
    }
    asking.engine.probe(asking.peer, soon()).expect("alive");
}

#[test]
fn no_byte_arrives_after_a_batch_ended_by_its_deadline() {
    let target = Target::start("127.0.0.1:0");
    let asking = Asking::new(&target.address, Duration::from_secs(20));
    let mut stopped_midway = 0;
    for _ in 0..4 {
        asking.local.write_at(0, &vec![3; TARGET_BYTES as usize]).expect("inside");
        let deadline = Instant::now() + Duration::from_millis(150);
        let options = BatchOptions { deadline: Some(deadline), ..by(TransportKind::Tcp) };
        let batch = asking.engine.submit(&[asking.request], options).expect("submitted");
        let mut first = [3; 8];
        while first == [3; 8] && Instant::now() < deadline {
            asking.local.read_at(0, &mut first).expect("inside");
        }
        target.freeze();
        let outcome = batch.wait_until(soon()).expect("ended");
        assert!(matches!(outcome.results[0], Ok(()) | Err(Failure::DeadlinePassed)), "{outcome:?}");
        stopped_midway += u32::from(outcome.results[0].is_err());
        asking.local.write_at(0, &vec![3; TARGET_BYTES as usize]).expect("inside");
        target.signal(rustix::process::Signal::CONT);
        let other = Memory::anonymous(4096).expect("memory");
        let region = asking.engine.register(&other, AccessRights::LOCAL, None).expect("registered").region;
        let small = Request { local: Slice { region, offset: 0, length: 4096 }, ..asking.request };
        asking.result(small, TransportKind::Tcp).expect("read");
        assert!(support::bytes(&asking.local) == vec![3; TARGET_BYTES as usize]);
    }
    assert!(stopped_midway > 0, "every batch was done before its peer was stopped");
}

#[test]
fn another_engine_on_the_same_port_is_not_taken_for_the_first() {
    let mut target = Target::start("127.0.0.1:0");
    let asking = Asking::new(&target.address, Duration::from_secs(5));
    asking.result(asking.small(), TransportKind::Tcp).expect("read");
    target.kill();
    let _second = Target::start(&target.address);
    for _ in 0..3 {
        let result = asking.engine.transfer(&[asking.small()], BatchOptions::default()).expect("submitted").results[0];
        assert_eq!(result, Err(Failure::Restarted));
    }
    let peer = asking.engine.connect(&target.address, soon()).expect("connected");
    assert_ne!(peer, asking.peer);
    let segment = asking.engine.open(peer, "bench", soon()).expect("opened");
    for way in WAYS {
        let again = Request { remote: RemoteSlice { segment, offset: 0 }, ..asking.small() };
        asking.result(again, way).expect("read");
    }
}

#[test]
fn another_program_on_the_same_port_is_noticed() {
    let mut target = Target::start("127.0.0.1:0");
    let asking = Asking::new(&target.address, Duration::from_secs(5));
    target.kill();
    let _other = impostor(TcpListener::bind(&target.address).expect("bound"), |mut stream| {
        let _ = stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n\r\n".repeat(10));
        let _ = stream.read(&mut [0; 256]);
    });
    assert_eq!(asking.result(asking.small(), TransportKind::Tcp), Err(Failure::Protocol));
}

/// Serves connections with `serve` until the test ends.
fn impostor(listener: TcpListener, serve: impl Fn(TcpStream) + Send + 'static) -> String {
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || listener.incoming().flatten().for_each(serve));
    address
}

#[test]
fn garbage_newer_versions_and_silence_at_the_greeting_have_their_reasons() {
    let any = || TcpListener::bind("127.0.0.1:0").expect("bound");
    let engine = start(Settings { connect_timeout: Duration::from_millis(300), ..Settings::default() });
    let in_a_second = || Instant::now() + Duration::from_millis(900);
    let failure = |address: &str| match engine.connect(address, in_a_second()).expect_err("no engine") {
        TransferError::Peer { failure, .. } => failure,
        other => panic!("{other}"),
    };
    let garbage = impostor(any(), |mut stream| drop(stream.write_all(&[0xab; 512])));
    assert_eq!(failure(&garbage), Failure::Protocol);
    // An ERROR frame of an engine of the future: "TPTE", version 9, kind 3, status 11 (version).
    let newer = impostor(any(), |mut stream| {
        let mut frame = *b"TPTE\x09\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x0b\0\0\0\0\0\0\0";
        let check = crc32fast::hash(&frame[..28]);
        frame[28..].copy_from_slice(&check.to_le_bytes());
        let _ = stream.read(&mut [0; 128]);
        let _ = stream.write_all(&frame);
    });
    assert_eq!(failure(&newer), Failure::Version);
    let silent = impostor(any(), |stream| {
        let mut stream = stream;
        while stream.read(&mut [0; 256]).is_ok_and(|count| count > 0) {}
    });
    assert_eq!(failure(&silent), Failure::Unreachable);
    assert_eq!(failure("127.0.0.1:9"), Failure::Unreachable);
}

#[test]
fn a_peer_that_comes_up_late_is_waited_for() {
    let address = {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        listener.local_addr().expect("bound").to_string()
    };
    let engine = start(Settings::default());
    let connecting = {
        let (engine, address) = (engine.clone(), address.clone());
        std::thread::spawn(move || engine.connect(&address, soon()))
    };
    let late = Settings { listen: vec![address], ..Settings::default() };
    let _there = start(late);
    connecting.join().expect("no panic").expect("connected");
}

#[test]
fn clients_that_speak_garbage_cost_an_engine_only_their_connection() {
    let pair = Pair::new(4096);
    let address = support::address(&pair.there);
    let hostile: [&[u8]; 5] = [b"GET / HTTP/1.1\r\n\r\n", &[0; 4096], &[0xff; 65_536], b"TPTE", b""];
    for bytes in hostile.iter().cycle().take(50) {
        let mut stream = TcpStream::connect(&address).expect("connected");
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        // It is ended, with an ERROR frame or a reset: nothing else comes.
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer.len() == 32, "{} bytes", answer.len());
    }
    pair.here
        .transfer(&[pair.request(Direction::Read, 0, 0, 4096)], by(TransportKind::Tcp))
        .expect("submitted")
        .all()
        .expect("others are served");
}

#[test]
fn connections_beyond_the_bound_are_refused_and_the_others_go_on() {
    let there = start(Settings { connections: 4, same_host: false, ..settings() });
    let address = support::address(&there);
    let engines: Vec<_> = (0..4).map(|_| start(Settings::default())).collect();
    let peers: Vec<_> = engines.iter().map(|engine| engine.connect(&address, soon()).expect("room")).collect();
    let soon_refused = start(Settings::default()).connect(&address, Instant::now() + Duration::from_secs(2));
    assert!(matches!(soon_refused, Err(TransferError::Peer { failure: Failure::Overloaded, .. })), "{soon_refused:?}");
    for (engine, peer) in engines.iter().zip(peers) {
        engine.probe(peer, soon()).expect("alive");
    }
    drop(engines);
    start(Settings::default()).connect(&address, soon()).expect("room again");
}

#[test]
fn a_slow_reader_holds_up_neither_others_nor_the_withdrawal_of_what_it_reads() {
    let pair = Pair::new(64 << 20);
    let slow = slow_peer(&pair.there, pair.ticket, Direction::Read);
    // Others are served meanwhile.
    for _ in 0..10 {
        let read = pair.request(Direction::Read, 0, 0, 1 << 20);
        pair.here.transfer(&[read], by(TransportKind::Tcp)).expect("submitted").all().expect("read");
    }
    let asked = Instant::now();
    pair.there.unregister(pair.ticket.region, Instant::now() + Duration::from_millis(200)).expect("withdrawn");
    assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
    drop(slow);
}

/// A peer that was slow once had a file's turn while its socket was waited for: the file seemed to hang.
#[test]
fn slow_peers_keep_nobody_from_a_file() {
    let pair = Pair::new(1 << 20);
    let file = tempfile::tempfile().expect("file");
    file.set_len(64 << 20).expect("as long");
    let ticket = pair.there.register_file(file, AccessRights::READ_WRITE, None).expect("registered");
    let segment = pair.here.open_ticket(pair.peer, ticket, soon()).expect("opened");
    for direction in [Direction::Read, Direction::Write] {
        let _slow = slow_peer(&pair.there, ticket, direction);
        let remote = RemoteSlice { segment, offset: 0 };
        let request = Request { remote, ..pair.request(direction, 0, 0, 1 << 20) };
        let outcome = pair.here.transfer(&[request], by(TransportKind::Tcp)).expect("submitted");
        assert_eq!(outcome.results, [Ok(())], "{direction:?}");
    }
}

/// A connection that greeted, and takes none of 64 MiB that it asked for, or sends half of those that it announced: frames
/// written by hand, as the format says.
fn slow_peer(there: &Engine, ticket: RegionTicket, direction: Direction) -> TcpStream {
    let frame = |kind: u8, count: u16, length: u64, body: &[u8]| {
        let mut frame = b"TPTE\x01".to_vec();
        frame.push(kind);
        frame.extend(count.to_le_bytes());
        frame.extend(7_u64.to_le_bytes());
        frame.extend(length.to_le_bytes());
        frame.extend(0_u32.to_le_bytes());
        frame.extend(crc32fast::hash(&frame).to_le_bytes());
        frame.extend(body);
        frame
    };
    let mut greeting = [0; 96];
    greeting[48..51].copy_from_slice(&[1, 1, 1]);
    let mut stream = TcpStream::connect(support::address(there)).expect("connected");
    stream.write_all(&frame(1, 0, 96, &greeting)).expect("greeted");
    let mut welcome = [0; 128];
    stream.read_exact(&mut welcome).expect("welcomed");
    assert_eq!(&welcome[..6], b"TPTE\x01\x02");
    let mut item = ticket.region.0.to_le_bytes().to_vec();
    item.extend(ticket.key.0.to_le_bytes());
    item.extend(0_u64.to_le_bytes());
    item.extend((64_u64 << 20).to_le_bytes());
    // From the answer's first bytes on, or since so many were taken, it is being served.
    match direction {
        Direction::Read => {
            stream.write_all(&frame(4, 1, 64 << 20, &item)).expect("asked");
            stream.read_exact(&mut [0; 64]).expect("served");
        }
        Direction::Write => {
            stream.write_all(&frame(6, 1, 64 << 20, &item)).expect("asked");
            stream.write_all(&vec![0; 32 << 20]).expect("taken");
        }
    }
    stream
}

#[test]
fn closing_an_engine_ends_its_batches_and_calls() {
    let target = Target::start("127.0.0.1:0");
    for way in WAYS {
        let asking = Asking::new(&target.address, Duration::from_secs(20));
        let batches: Vec<_> =
            (0..32).map(|_| asking.engine.submit(&[asking.request], by(way)).expect("submitted")).collect();
        asking.engine.close();
        for batch in batches {
            let outcome = batch.wait_until(soon()).expect("ended");
            assert!(
                matches!(outcome.results[0], Ok(()) | Err(Failure::Closed | Failure::Cancelled)),
                "{way:?} {outcome:?}"
            );
        }
        assert!(matches!(asking.engine.submit(&[asking.request], by(way)), Err(TransferError::Closed)));
        assert_eq!(asking.engine.totals().registered_bytes, 0);
    }
}

#[test]
fn descriptors_run_out_and_come_back() {
    in_own_process("descriptors_run_out_and_come_back", || {
        let target = Target::start("127.0.0.1:0");
        let asking = Asking::new(&target.address, Duration::from_secs(5));
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let few = rustix::process::Rlimit { current: Some(64), maximum: limit.maximum };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).expect("set");
        let mut held = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            held.push(file);
        }
        let result = asking.result(asking.small(), TransportKind::Tcp);
        assert!(matches!(result, Err(Failure::Overloaded)), "{result:?}");
        // What is connected or mapped goes on.
        asking.result(asking.small(), TransportKind::SharedMemory).expect("read");
        asking.engine.probe(asking.peer, soon()).expect("alive");
        drop(held);
        let until = soon();
        while let Err(failure) = asking.result(asking.small(), TransportKind::Tcp) {
            assert!(Instant::now() < until, "{failure}");
        }
    });
}

/// The asked side this time: who comes is told so at once, who is connected is served on.
#[test]
fn a_peer_without_descriptors_refuses_and_takes_connections_again_later() {
    let target = Target::start("127.0.0.1:0");
    let asking = Asking::new(&target.address, Duration::from_secs(5));
    asking.result(asking.small(), TransportKind::Tcp).expect("read");
    let before = target.limit_descriptors(None);
    let by_tcp = || start(Settings { same_host: false, ..Settings::default() });
    // Who waits for connections has some in hand.
    let mut taking = Vec::new();
    let refused = loop {
        let next = by_tcp();
        match next.connect(&target.address, Instant::now() + Duration::from_secs(2)) {
            Ok(_) => taking.push(next),
            Err(refused) => break refused,
        }
        assert!(taking.len() < 8, "it is out of descriptors");
    };
    assert!(matches!(refused, TransferError::Peer { failure: Failure::Overloaded, .. }), "{refused:?}");
    asking.result(asking.small(), TransportKind::Tcp).expect("read by the connection that there is");
    target.limit_descriptors(Some(before));
    by_tcp().connect(&target.address, soon()).expect("room again");
}

#[test]
fn segments_of_a_closed_engine_are_refused_to_those_who_mapped_them() {
    let pair = Pair::new(4096);
    pair.there.close();
    let segment: SegmentId = pair.segment;
    let read = pair.request(Direction::Read, 0, 0, 4096);
    let until = soon();
    // Noticed at once by the board; by the lifeline 10 ms later.
    match pair.here.transfer(&[read], by(TransportKind::SharedMemory)) {
        Ok(outcome) => assert!(outcome.results[0].is_err()),
        Err(error) => assert!(matches!(error, TransferError::NoWay { .. }), "{error}"),
    }
    while pair.here.segment(segment).expect("open").1 == Some(TransportKind::SharedMemory) {
        assert!(Instant::now() < until);
    }
}
