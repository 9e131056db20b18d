//! TLS on TCP: the same transfers and messages, encrypted, between nodes whose certificates come from one authority.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rcgen::{CertificateParams, KeyPair};
use support::authority::Authority;
use support::proxy::Proxy;
use support::{Pair, bytes, pattern, settings, soon, start};
use tidepool_transfer::{
    AccessRights, BatchOptions, Direction, Engine, Failure, Handler, Memory, Responder, Settings, Tls, TransferError,
};

mod support;

const MIB: u64 = 1 << 20;

struct Echo;

impl Handler for Echo {
    fn handle(&self, request: &[u8], responder: Responder) {
        responder.reply(request);
    }
}

fn failure(result: Result<tidepool_transfer::PeerId, TransferError>) -> Failure {
    match result {
        Err(TransferError::Peer { failure, .. }) => failure,
        other => panic!("{other:?}"),
    }
}

fn connect(engine: &Engine, to: &Engine) -> Result<tidepool_transfer::PeerId, TransferError> {
    engine.connect(&support::address(to), Instant::now() + Duration::from_millis(600))
}

#[test]
fn transfers_of_any_size_arrive_over_tls() {
    let authority = Authority::new();
    let pair = Pair::with(24 << 20, AccessRights::READ_WRITE, authority.settings(), authority.settings());
    for (round, length) in [1, 4095, 65_537, MIB, 9 * MIB + 3, 24 * MIB].into_iter().enumerate() {
        let source = pattern(length as usize, round as u64);
        pair.remote.write_at(0, &source).expect("inside");
        let read = pair.request(Direction::Read, 0, 0, length);
        pair.here.transfer(&[read], BatchOptions::default()).expect("submitted").all().expect("read");
        assert!(bytes(&pair.local)[..length as usize] == source, "{length}");
        let source = pattern(length as usize, 100 + round as u64);
        pair.local.write_at(0, &source).expect("inside");
        let write = pair.request(Direction::Write, 0, 0, length);
        pair.here.submit(&[write], BatchOptions::default()).expect("submitted").wait().all().expect("written");
        assert!(bytes(&pair.remote)[..length as usize] == source, "{length}");
    }
    // Many small ones in both directions at once, with some that are refused between them.
    let too_long = tidepool_transfer::RegionTicket { length: 64 << 20, ..pair.ticket };
    let too_long = pair.here.open_ticket(pair.peer, too_long, soon()).expect("opened");
    let batches: Vec<_> = [Direction::Read, Direction::Write, Direction::Read, Direction::Write]
        .into_iter()
        .map(|direction| {
            let requests: Vec<_> = (0..1000_u64)
                .map(|index| {
                    let request = pair.request(direction, index * 4096, index * 4096, 4096);
                    let remote = tidepool_transfer::RemoteSlice { segment: too_long, offset: 30 << 20 };
                    if index % 100 == 7 { tidepool_transfer::Request { remote, ..request } } else { request }
                })
                .collect();
            pair.here.submit(&requests, BatchOptions::default()).expect("submitted")
        })
        .collect();
    for batch in batches {
        for (index, result) in batch.wait_until(soon()).expect("ended").results.into_iter().enumerate() {
            assert_eq!(result, if index % 100 == 7 { Err(Failure::OutOfRange) } else { Ok(()) }, "request {index}");
        }
    }
}

#[test]
fn messages_and_futures_are_answered_over_tls() {
    let authority = Authority::new();
    let pair = Pair::with(4096, AccessRights::READ, authority.settings(), authority.settings());
    pair.there.set_handler(Arc::new(Echo));
    for length in [0, 1, 4096, 1 << 20, 4 << 20] {
        let request = pattern(length, 1);
        assert!(pair.here.call(pair.peer, &request, soon()).expect("answered") == request, "{length}");
        let reply = support::block_on(pair.here.call_async(pair.peer, &request, soon()));
        assert!(reply.expect("answered") == request, "{length}");
    }
    let large = vec![5; 1 << 20];
    let replies = pair.here.call_all(pair.peer, &vec![large.as_slice(); 24], soon()).expect("sent");
    assert!(replies.into_iter().all(|reply| reply.expect("answered") == large));
    let futures: Vec<_> = (0..24).map(|_| pair.here.call_async(pair.peer, &large, soon())).collect();
    assert!(futures.into_iter().all(|reply| support::block_on(reply).expect("answered") == large));
    pair.here.probe(pair.peer, soon()).expect("alive");
}

#[test]
fn who_listens_on_the_wire_sees_nothing() {
    for is_encrypted in [false, true] {
        let (proxy, listener) = Proxy::bind();
        let authority = Authority::new();
        let settings = || if is_encrypted { authority.settings() } else { Settings { same_host: false, ..settings() } };
        // Its own address would be a way past who listens.
        let there = start(Settings { advertise: vec![proxy.address.clone()], ..settings() });
        proxy.serve(listener, support::address(&there));
        let marker = *b"a block of keys and values, 32 B";
        let memory = Memory::anonymous(1 << 20).expect("memory");
        (0..1 << 15).for_each(|place| memory.write_at(place * 32, &marker).expect("inside"));
        there.register(&memory, AccessRights::READ_WRITE, Some("name of a segment")).expect("registered");
        let here = start(settings());
        let peer = here.connect(&proxy.address, soon()).expect("connected");
        let segment = here.open(peer, "name of a segment", soon()).expect("opened");
        let region = here.register(&memory, AccessRights::LOCAL, None).expect("registered").region;
        for direction in [Direction::Read, Direction::Write] {
            let request = tidepool_transfer::Request {
                direction,
                local: tidepool_transfer::Slice { region, offset: 0, length: 1 << 20 },
                remote: tidepool_transfer::RemoteSlice { segment, offset: 0 },
            };
            here.transfer(&[request], BatchOptions::default()).expect("submitted").all().expect("moved");
        }
        let seen = proxy.seen();
        let shows = |what: &[u8]| seen.windows(what.len()).any(|window| window == what);
        assert_eq!((shows(&marker), shows(b"name of a segment")), (!is_encrypted, !is_encrypted));
    }
}

#[test]
fn certificates_of_another_authority_or_name_are_refused() {
    let (ours, others) = (Authority::new(), Authority::new());
    let there = start(ours.settings());
    connect(&start(ours.settings()), &there).expect("same authority");
    // Ours, but it trusts others; then theirs, which ours does not trust.
    assert_eq!(failure(connect(&start(others.settings()), &there)), Failure::Unauthorized);
    let tls = Some(ours.tls("tidepool.test", Some("another.test")));
    let picky = start(Settings { tls, ..ours.settings() });
    assert_eq!(failure(connect(&picky, &there)), Failure::Unauthorized);
    // By the address that is connected to.
    let named = Settings { tls: Some(ours.tls("127.0.0.1", None)), ..ours.settings() };
    let there = start(named.clone());
    connect(&start(named), &there).expect("bears its address");
    let strange = Settings { tls: Some(ours.tls("tidepool.test", None)), ..ours.settings() };
    assert_eq!(failure(connect(&start(strange.clone()), &start(strange))), Failure::Unauthorized);
}

/// A client whose own certificate comes from elsewhere, although it accepts the server's.
#[test]
fn a_client_that_the_server_does_not_trust_is_refused() {
    let (ours, others) = (Authority::new(), Authority::new());
    let there = start(ours.settings());
    let key = KeyPair::generate().expect("key");
    let params = CertificateParams::new(vec!["tidepool.test".to_owned()]).expect("parameters");
    let certificate = params.signed_by(&key, &others.0).expect("signed").pem();
    let (key, authority) = (key.serialize_pem(), ours.0.pem());
    let name = Some("tidepool.test".to_owned());
    let tls = Tls::from_pem(certificate.as_bytes(), key.as_bytes(), authority.as_bytes(), name).expect("usable");
    let here = start(Settings { tls: Some(tls), ..ours.settings() });
    assert_eq!(failure(connect(&here, &there)), Failure::Unauthorized);
}

#[test]
fn with_and_without_tls_do_not_meet() {
    let authority = Authority::new();
    let (with, without) = (start(authority.settings()), start(Settings { same_host: false, ..settings() }));
    assert_eq!(failure(connect(&with, &without)), Failure::Protocol);
    assert!(matches!(failure(connect(&without, &with)), Failure::Protocol | Failure::Unreachable));
    // Nothing is served to who speaks plainly.
    let mut stream = TcpStream::connect(support::address(&with)).expect("connected");
    stream.write_all(b"TPTE\x01\x01\0\0 and whatever follows").expect("sent");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"TPTE") && answer.len() < 32, "{answer:?}");
}

#[test]
fn a_tls_rail_that_falls_silent_hands_over() {
    let (proxy, listener) = Proxy::bind();
    let authority = Authority::new();
    let there = Settings { advertise: vec![proxy.address.clone()], ..authority.settings() };
    let pair = Pair::with(32 << 20, AccessRights::READ_WRITE, authority.settings(), there);
    proxy.serve(listener, support::address(&pair.there));
    let until = soon();
    let is_ready = || {
        let rails = pair.here.rails(pair.peer).expect("known");
        rails.len() == 2 && rails.iter().all(|rail| rail.rests.is_none())
    };
    while !is_ready() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(5));
    }
    for round in 0..4 {
        let direction = if round % 2 == 0 { Direction::Read } else { Direction::Write };
        let source = pattern(32 << 20, round);
        let (from, to) =
            if direction == Direction::Read { (&pair.remote, &pair.local) } else { (&pair.local, &pair.remote) };
        from.write_at(0, &source).expect("inside");
        let before = proxy.passed();
        let request = pair.request(direction, 0, 0, 32 << 20);
        let batch = pair.here.submit(&[request], BatchOptions::default()).expect("submitted");
        while proxy.passed() < before + MIB && batch.poll().is_none() {
            std::thread::yield_now();
        }
        proxy.freeze();
        batch.wait_until(soon()).expect("ended").all().expect("moved by the other rail");
        assert!(bytes(to) == source, "{direction:?}");
        proxy.thaw();
        let until = soon();
        while !is_ready() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn keys_that_are_none_are_refused() {
    let authority = Authority::new();
    let good = authority.0.pem();
    for (certificates, key, authorities) in [("", "", good.as_str()), (&good, "nonsense", &good), (&good, "", "")] {
        let tls = Tls::from_pem(certificates.as_bytes(), key.as_bytes(), authorities.as_bytes(), None);
        assert!(matches!(tls, Err(TransferError::Certificate { .. })), "{tls:?}");
    }
}
