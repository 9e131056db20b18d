//! Messages between engines: replies reach who asked, and nobody waits past a deadline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use support::{Pair, Target, settings, soon, start};
use tidepool_transfer::{AccessRights, Answered, Failure, Handler, Responder, Settings, TransferError};

mod support;

/// Answers backwards; "later" and "soon" by another thread, "never" not before "release", "drop" by dropping.
#[derive(Default)]
struct Backwards {
    kept: Mutex<Vec<Responder>>,
}

impl Handler for Backwards {
    fn handle(&self, request: &[u8], responder: Responder) {
        match request {
            b"later" => drop(std::thread::spawn(move || responder.reply(b"retal"))),
            b"soon" => drop(std::thread::spawn(move || {
                // Too long, it is left to who may wait.
                let responder = responder.reply_at_once(&[1; 4097]).expect_err("long");
                responder.reply_at_once(b"noos").expect("short, and the peer waits for it");
            })),
            b"never" => self.kept.lock().push(responder),
            b"drop" => drop(responder),
            b"release" => {
                self.kept.lock().drain(..).for_each(|kept| kept.reply(b"old"));
                responder.reply(b"new");
            }
            _ => {
                let mut reply = request.to_vec();
                reply.reverse();
                responder.reply(&reply);
            }
        }
    }
}

/// Answers backwards whatever it is asked.
struct Prompt;

impl Handler for Prompt {
    fn handle(&self, request: &[u8], responder: Responder) {
        responder.reply(&request.iter().rev().copied().collect::<Vec<_>>());
    }
}

/// Over a unix socket, and over TCP.
fn pairs() -> [Pair; 2] {
    [settings(), Settings { same_host: false, ..settings() }].map(|here| {
        let pair = Pair::with(4096, AccessRights::READ, here, settings());
        pair.there.set_handler(Arc::new(Backwards::default()));
        pair
    })
}

#[test]
fn replies_of_any_size_come_back() {
    for pair in pairs() {
        for length in [0, 1, 64, 4096, 65_536, 4 << 20] {
            let request = support::pattern(length, 1);
            let reply = pair.here.call(pair.peer, &request, soon()).expect("answered");
            assert!(reply.iter().rev().eq(&request), "{length}");
        }
        let long = vec![0; (4 << 20) + 1];
        assert!(matches!(pair.here.call(pair.peer, &long, soon()), Err(TransferError::Length { .. })));
    }
}

#[test]
fn short_answers_are_given_at_once() {
    for pair in pairs() {
        assert_eq!(pair.here.call(pair.peer, b"soon", soon()).expect("answered"), b"noos");
    }
}

#[test]
fn an_exchanged_answer_lands_where_it_is_wanted() {
    for pair in pairs() {
        for length in [0, 1, 100, 4096, 5000, 300_000, 9 << 20] {
            let request = support::pattern(length, 1);
            let (head, tail) = request.split_at(length / 3);
            let mut answer = pair.here.exchange(pair.peer, &[head, &[], tail], soon()).expect("answered");
            assert_eq!(answer.left(), length as u64);
            let mut first = vec![0; length / 2];
            answer.read(&mut first).expect("there");
            assert!(answer.read(&mut vec![0; length + 1]).is_err(), "more than there is");
            while answer.left() > 0 {
                answer.append_to(&mut first).expect("there");
            }
            assert_eq!(answer.left(), 0);
            assert!(first.iter().rev().eq(&request), "{length}");
        }
        let long = vec![0; (16 << 20) + 1];
        assert!(pair.here.exchange(pair.peer, &[&long], soon()).is_err());
        let gone = pair.here.exchange(pair.peer, &[b"drop"], soon());
        assert!(matches!(gone, Err(TransferError::NoAnswer(_))), "{gone:?}");
    }
}

#[test]
fn of_two_peers_the_sooner_one_answers() {
    for ([slow, quick], patience) in [(pairs(), Duration::from_millis(5)), (pairs(), Duration::ZERO)] {
        // Both are peers of one engine.
        let address = quick.there.addresses().first().expect("it listens").to_string();
        let other = slow.here.connect(&address, soon()).expect("connected");
        let mut reply = [0; 3];
        let (mut answer, who) = slow
            .here
            .exchange_either([slow.peer, other], &[b"abc"], Duration::from_secs(60), soon())
            .expect("answered");
        answer.read(&mut reply).expect("there");
        assert_eq!((&reply, who), (b"cba", Answered::First));
        drop(answer);
        // The quick one gives what the slow one keeps until it is told otherwise.
        quick.there.set_handler(Arc::new(Prompt));
        let (mut answer, who) =
            slow.here.exchange_either([slow.peer, other], &[b"never"], patience, soon()).expect("answered");
        let mut reply = [0; 5];
        answer.read(&mut reply).expect("there");
        assert_eq!((&reply, who), (b"reven", Answered::Second));
        drop(answer);
        // Of two that don't answer, none is waited for beyond the deadline.
        let late = slow.here.exchange_either(
            [slow.peer, slow.peer],
            &[b"never"],
            patience,
            Instant::now() + Duration::from_millis(60),
        );
        assert!(matches!(late, Err(TransferError::Peer { failure: Failure::DeadlinePassed, .. })), "{late:?}");
    }
}

/// Two that are frozen once cost all the time there was.
#[test]
fn two_peers_that_are_not_there_are_given_up_before_the_deadline() {
    let targets = [Target::start("127.0.0.1:0"), Target::start("127.0.0.1:0")];
    let here = start(settings());
    let peers = [0, 1].map(|index| here.connect(&targets[index].address, soon()).expect("connected"));
    // The connections are there afterwards.
    for peer in peers {
        let mut answer = here.exchange(peer, &[b"abc"], soon()).expect("answered");
        answer.read(&mut [0; 3]).expect("an echo");
    }
    targets.iter().for_each(Target::freeze);
    let asked = here.exchange_either(peers, &[b"abc"], Duration::ZERO, soon());
    assert!(matches!(asked, Err(TransferError::Peer { failure: Failure::Silent, .. })), "{asked:?}");
}

#[test]
fn an_exchange_that_is_given_up_leaves_the_next_its_own_answer() {
    for pair in pairs() {
        let request = support::pattern(1 << 20, 2);
        drop(pair.here.exchange(pair.peer, &[&request], soon()).expect("answered"));
        let mut answer = pair.here.exchange(pair.peer, &[b"abc"], soon()).expect("answered");
        let mut reply = [0; 3];
        answer.read(&mut reply).expect("there");
        assert_eq!(&reply, b"cba");
        drop(answer);
        let late = pair.here.exchange(pair.peer, &[b"never"], Instant::now() + Duration::from_millis(60));
        assert!(matches!(late, Err(TransferError::Peer { failure: Failure::DeadlinePassed, .. })), "{late:?}");
        // An answer that comes too late is nobody's.
        let mut answer = pair.here.exchange(pair.peer, &[b"release"], soon()).expect("answered");
        answer.read(&mut reply).expect("there");
        assert_eq!(&reply, b"new");
        drop(answer);
        pair.there.close();
        let gone = pair.here.exchange(pair.peer, &[b"abc"], soon());
        assert!(gone.is_err(), "{gone:?}");
    }
}

#[test]
fn every_thread_gets_its_own_reply() {
    for pair in pairs() {
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let pair = &pair;
                scope.spawn(move || {
                    for index in 0..300_u64 {
                        let request = [thread.to_le_bytes(), index.to_le_bytes()].concat();
                        let reply = pair.here.call(pair.peer, &request, soon()).expect("answered");
                        assert!(reply.iter().rev().eq(&request));
                    }
                });
            }
        });
    }
}

#[test]
fn many_at_once_are_answered_in_order_each_by_itself() {
    for pair in pairs() {
        let requests: Vec<Vec<u8>> = (0..1000_u64)
            .map(|index| match index % 10 {
                3 => b"later".to_vec(),
                7 => b"drop".to_vec(),
                _ => index.to_le_bytes().to_vec(),
            })
            .collect();
        let borrowed: Vec<&[u8]> = requests.iter().map(Vec::as_slice).collect();
        let replies = pair.here.call_all(pair.peer, &borrowed, soon()).expect("sent");
        assert_eq!(replies.len(), requests.len());
        for (request, reply) in requests.iter().zip(replies) {
            match reply {
                Ok(reply) => assert!(reply.iter().rev().eq(request)),
                Err(error) => assert!(request == b"drop" && matches!(error, TransferError::NoAnswer(_)), "{error}"),
            }
        }
    }
}

#[test]
fn large_messages_both_ways_at_once_do_not_wait_for_each_other() {
    for pair in pairs() {
        let large = vec![5; 1 << 20];
        let requests = vec![large.as_slice(); 24];
        let replies = pair.here.call_all(pair.peer, &requests, soon()).expect("sent");
        assert!(replies.into_iter().all(|reply| reply.expect("answered") == large));
    }
}

#[test]
fn a_call_without_an_answer_ends_at_its_deadline_and_its_late_answer_is_nobodys() {
    for pair in pairs() {
        let handler = Arc::new(Backwards::default());
        pair.there.set_handler(Arc::clone(&handler) as Arc<dyn Handler>);
        let asked = Instant::now();
        let error = pair.here.call(pair.peer, b"never", asked + Duration::from_millis(80)).expect_err("no answer");
        assert!(matches!(error, TransferError::Peer { failure: Failure::DeadlinePassed, .. }), "{error}");
        assert!(asked.elapsed() >= Duration::from_millis(80) && asked.elapsed() < Duration::from_secs(5));
        for responder in handler.kept.lock().drain(..) {
            responder.reply(b"too late");
        }
        for _ in 0..10 {
            assert_eq!(pair.here.call(pair.peer, b"abc", soon()).expect("answered"), b"cba");
        }
    }
}

#[test]
fn unanswered_messages_are_bounded() {
    let few = Settings { messages: 4, ..settings() };
    let pair = Pair::with(4096, AccessRights::READ, few, settings());
    let handler = Arc::new(Backwards::default());
    pair.there.set_handler(handler);
    let too_many = pair.here.call_all(pair.peer, &[&b"a"[..]; 5], soon());
    assert!(matches!(too_many, Err(TransferError::Peer { failure: Failure::Overloaded, .. })), "{too_many:?}");
    assert_eq!(pair.here.call_all(pair.peer, &[&b"a"[..]; 4], soon()).expect("sent").len(), 4);

    // The answering side has a bound of its own.
    let few = Settings { messages: 4, ..settings() };
    let pair = Pair::with(4096, AccessRights::READ, settings(), few);
    pair.there.set_handler(Arc::new(Backwards::default()));
    let mut requests = vec![&b"never"[..]; 4];
    requests.push(b"abc");
    let replies = pair.here.call_all(pair.peer, &requests, Instant::now() + Duration::from_millis(300)).expect("sent");
    let failures = replies.into_iter().map(|reply| match reply {
        Err(TransferError::Peer { failure, .. }) => failure,
        other => panic!("{other:?}"),
    });
    let failures = failures.collect::<Vec<_>>();
    assert_eq!(failures[..4], [Failure::DeadlinePassed; 4]);
    assert_eq!(failures[4], Failure::Overloaded);
}

#[test]
fn without_a_handler_there_is_no_answer() {
    let pair = Pair::new(4096);
    let error = pair.here.call(pair.peer, b"hello", soon()).expect_err("nobody");
    assert!(matches!(error, TransferError::NoAnswer(_)), "{error}");
}

#[test]
fn replies_that_are_futures_come_back_to_the_one_who_asked() {
    for pair in pairs() {
        let requests: Vec<_> = (0..500_u64)
            .map(|index| match index % 50 {
                3 => b"later".to_vec(),
                7 => b"drop".to_vec(),
                11 => support::pattern(1 << 20, index),
                _ => index.to_le_bytes().to_vec(),
            })
            .collect();
        let replies: Vec<_> = requests.iter().map(|request| pair.here.call_async(pair.peer, request, soon())).collect();
        // In the other order: answers wait for who asks for them.
        for (request, reply) in requests.iter().zip(replies).rev() {
            match support::block_on(reply) {
                Ok(reply) => assert!(reply.iter().rev().eq(request)),
                Err(error) => assert!(request == b"drop" && matches!(error, TransferError::NoAnswer(_)), "{error}"),
            }
        }
    }
}

#[test]
fn a_future_without_an_answer_ends_at_its_deadline_and_makes_room() {
    let few = Settings { messages: 4, ..settings() };
    let pair = Pair::with(4096, AccessRights::READ, few, settings());
    let handler = Arc::new(Backwards::default());
    pair.there.set_handler(Arc::clone(&handler) as Arc<dyn Handler>);
    let call = |request: &[u8], after| pair.here.call_async(pair.peer, request, Instant::now() + after);
    let (late, soon) = (Duration::from_secs(30), Duration::from_millis(60));
    // A late deadline first: an earlier one that comes after it is kept all the same.
    let kept = [call(b"never", late), call(b"never", late), call(b"never", late)];
    let asked = Instant::now();
    let error = support::block_on(call(b"never", soon)).expect_err("no answer");
    assert!(matches!(error, TransferError::Peer { failure: Failure::DeadlinePassed, .. }), "{error}");
    assert!(asked.elapsed() >= soon && asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    let fourth = call(b"never", late);
    let full = support::block_on(call(b"abc", late)).expect_err("full");
    assert!(matches!(full, TransferError::Peer { failure: Failure::Overloaded, .. }), "{full}");
    drop((kept, fourth));
    assert_eq!(support::block_on(call(b"abc", late)).expect("room"), b"cba");
    for responder in handler.kept.lock().drain(..) {
        responder.reply(b"too late");
    }
    assert_eq!(support::block_on(call(b"abc", late)).expect("answered"), b"cba");
}

#[test]
fn futures_end_with_their_engine_or_their_peer_and_begin_anew_after_it() {
    let pair = Pair::new(4096);
    pair.there.set_handler(Arc::new(Backwards::default()));
    assert_eq!(support::block_on(pair.here.call_async(pair.peer, b"abc", soon())).expect("answered"), b"cba");
    let never = pair.here.call_async(pair.peer, b"never", soon());
    pair.there.close();
    let error = support::block_on(never).expect_err("gone");
    assert!(matches!(error, TransferError::Peer { failure: Failure::ConnectionLost, .. }), "{error}");
    let error = support::block_on(pair.here.call_async(pair.peer, b"abc", soon())).expect_err("gone");
    assert!(matches!(error, TransferError::Peer { .. }), "{error}");

    let pair = Pair::new(4096);
    pair.there.set_handler(Arc::new(Backwards::default()));
    let never = pair.here.call_async(pair.peer, b"never", soon());
    pair.here.close();
    let error = support::block_on(never).expect_err("closed");
    assert!(matches!(error, TransferError::Peer { failure: Failure::Closed, .. }), "{error}");
}

/// Nothing of what a stopped peer leaves unread may hold up who calls.
#[test]
fn calling_never_blocks_even_if_the_peer_takes_nothing() {
    for pair in pairs() {
        // The handler of the first request keeps the peer's thread busy: nothing is read from then on.
        let (release, held) = std::sync::mpsc::channel::<()>();
        struct Holding(Mutex<std::sync::mpsc::Receiver<()>>);
        impl Handler for Holding {
            fn handle(&self, request: &[u8], responder: Responder) {
                let _ = self.0.lock().recv_timeout(Duration::from_secs(20));
                responder.reply(request);
            }
        }
        pair.there.set_handler(Arc::new(Holding(Mutex::new(held))));
        let large = vec![7; 4 << 20];
        let asked = Instant::now();
        let replies: Vec<_> = (0..12).map(|_| pair.here.call_async(pair.peer, &large, soon())).collect();
        let took = asked.elapsed();
        assert!(took < Duration::from_secs(10), "{took:?}");
        drop(release);
        for reply in replies {
            assert!(support::block_on(reply).expect("answered") == large);
        }
    }
}
