//! More than there is room for, and readers that are slow: who gets what, and that nothing stays behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tidepool_client::{Client, Existence, Matching, PutOptions, PutOutcome, RemoveOutcome};
use tidepool_metadata::proto::{self, get_chunk::Part};

use crate::common::TestServer;

const MIB: usize = 1 << 20;

/// Other bytes for each seed, and at each distance that is no multiple of 509.
fn value(seed: usize, length: usize) -> Bytes {
    let unit: Vec<u8> = (0..509).map(|index| ((index * index + index * 7 + seed * 13) % 251) as u8).collect();
    let mut bytes = unit.repeat(length / unit.len() + 1);
    bytes.truncate(length);
    bytes.into()
}

fn pinned() -> PutOptions {
    PutOptions { pin: true, ..PutOptions::default() }
}

/// Waits until these tiers hold nothing.
pub(crate) async fn until_empty(server: &TestServer, tiers: &[&str]) {
    let empty = async {
        for (tier, field) in tiers.iter().flat_map(|tier| [(tier, "used"), (tier, "reserved")]) {
            while server.tier(tier, field).await > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), empty).await.expect("everything is freed");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_batch_larger_than_the_room_as_many_are_stored_as_fit_and_the_others_leave_nothing() {
    let server = TestServer::with(&["nvme.enabled=false"]).await;
    let client = server.client();
    let items: Vec<(String, Bytes)> = (0..40).map(|n| (format!("k/{n}"), value(n, MIB))).collect();
    let outcomes = client.put_batch(&items, &pinned()).await.unwrap();
    assert_eq!(outcomes.len(), items.len());
    let mut stored = 0;
    for ((key, bytes), outcome) in items.iter().zip(&outcomes) {
        let found = client.get(key).await.unwrap().map(|object| object.value);
        match outcome {
            Ok(PutOutcome::Stored) => {
                assert!(found.as_ref() == Some(bytes), "{key}");
                stored += 1;
            }
            Err(error) => {
                assert_eq!(error.reason(), "NO_SPACE", "{key}");
                assert!(found.is_none(), "{key}");
            }
            other => panic!("{key}: {other:?}"),
        }
    }
    assert!((20..40).contains(&stored), "{stored} of 40 MiB are in a tier of 32");
    assert_eq!(server.tier("dram", "reserved").await, 0);
    let removed = client.remove_matching(&Matching::All, true, |_| {}).await.unwrap();
    assert_eq!(removed.removed, stored);
    until_empty(&server, &["dram"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_a_soft_pin_outlives_what_has_none_and_passes_it_on() {
    let server = TestServer::with(&["nvme.enabled=false"]).await;
    let client = server.client();
    let long = Some(Duration::from_secs(3600));
    let soft = PutOptions { soft_pin: long, ..PutOptions::default() };
    let upsert = PutOptions { upsert: true, ..PutOptions::default() };
    let unpin = PutOptions { soft_pin: Some(Duration::ZERO), ..upsert.clone() };
    for (key, options) in [("kept", &soft), ("replaced", &soft), ("let go", &soft), ("plain", &upsert)] {
        client.put(key, value(1, MIB), options).await.unwrap();
    }
    client.put("replaced", value(2, MIB), &upsert).await.unwrap();
    client.put("let go", value(2, MIB), &unpin).await.unwrap();
    for n in 0..100 {
        client.put(format!("k/{n}"), value(n, MIB), &PutOptions::default()).await.unwrap();
    }
    let mut found = Vec::new();
    for key in ["kept", "replaced", "let go", "plain"] {
        found.push(client.exists(key).await.unwrap());
    }
    assert_eq!(found, [Existence::Present, Existence::Present, Existence::Missing, Existence::Missing]);
    let too_long = PutOptions { soft_pin: Some(Duration::from_secs(86_401)), ..PutOptions::default() };
    let refused = client.put("x", value(1, 10), &too_long).await.expect_err("more than a day");
    assert_eq!(refused.reason(), "BAD_SOFT_PIN");
}

/// B029: memory that is full makes room, and ends no process.
#[tokio::test(flavor = "multi_thread")]
async fn five_times_the_capacity_from_ten_writers_costs_old_objects_and_no_error() {
    for settings in [&["nvme.enabled=false"][..], &[]] {
        let server = TestServer::with(settings).await;
        let writers = (0..10).map(|writer| {
            let client = server.client();
            tokio::spawn(async move {
                for n in 0..16 {
                    let key = format!("{writer}/{n}");
                    client.put(key, value(writer + n, MIB), &PutOptions::default()).await.unwrap();
                }
            })
        });
        for writer in futures::future::join_all(writers).await {
            writer.unwrap();
        }
        let client = server.client();
        let mut found = 0;
        for (writer, n) in (0..10).flat_map(|writer| (0..16).map(move |n| (writer, n))) {
            if let Some(object) = client.get(format!("{writer}/{n}")).await.unwrap() {
                assert!(object.value == value(writer + n, MIB), "{writer}/{n}");
                found += 1;
            }
        }
        assert!(found >= 16, "{found} of 160 MiB are still there");
    }
}

/// B029: and where nothing can go, says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_for_which_nothing_can_go_is_refused_by_name_and_what_is_there_stays() {
    let server = TestServer::with(&["nvme.enabled=false"]).await;
    let client = server.client();
    let mut stored = 0;
    let refused = loop {
        match client.put(format!("k/{stored}"), value(stored, MIB), &pinned()).await {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
        assert!(stored <= 32);
    };
    assert_eq!(refused.reason(), "NO_SPACE");
    for n in 0..stored {
        assert!(client.get(format!("k/{n}")).await.unwrap().unwrap().value == value(n, MIB));
    }
    client.unpin(&["k/0", "k/1"]).await.unwrap();
    client.put("after", value(99, MIB), &PutOptions::default()).await.unwrap();
}

/// A released lease is no reason any more to keep an object.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_leased_may_go_when_the_lease_is_released() {
    let server = TestServer::with(&["nvme.enabled=false"]).await;
    let client = server.client();
    client.put("k", value(1, MIB), &PutOptions::default()).await.unwrap();
    client.renew_leases(&["k"], Some(Duration::from_secs(60))).await.unwrap();
    client.release_leases(&["k"]).await.unwrap();
    for n in 0..64 {
        client.put(format!("filler/{n}"), value(n, MIB), &PutOptions::default()).await.unwrap();
    }
    assert_eq!(client.exists("k").await.unwrap(), Existence::Missing);
}

/// What takes an object away from under a reader.
async fn take_away(client: &Client, how: usize, key: &str) {
    match how {
        0 => assert_eq!(client.remove(key, false).await.unwrap(), RemoveOutcome::Removed),
        1 => {
            client.pin(&[key]).await.unwrap();
            assert_eq!(client.remove(key, false).await.unwrap(), RemoveOutcome::Pinned);
            assert_eq!(client.remove(key, true).await.unwrap(), RemoveOutcome::Removed);
        }
        2 => assert!(client.remove_matching(&Matching::All, true, |_| {}).await.unwrap().removed > 0),
        3 => {
            let upsert = PutOptions { upsert: true, ..PutOptions::default() };
            client.put(key, value(77, MIB), &upsert).await.unwrap();
        }
        // Nothing but pressure.
        _ => {}
    }
}

/// A read slower than any lease got bytes of other objects, because its memory was used again meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_gets_its_object_whole_whatever_is_done_to_it_meanwhile() {
    for settings in [&["nvme.enabled=false"][..], &[]] {
        let server = TestServer::with(settings).await;
        let client = server.client();
        let filler = value(99, MIB);
        for how in 0..5 {
            let (key, whole) = (format!("slow/{how}"), value(how, 4 * MIB));
            client.put(&key, whole.clone(), &PutOptions::default()).await.unwrap();
            // The generated stub's window is 64 KiB: so much is on its way, and no more, until it is read.
            let request = proto::GetRequest { key: key.clone().into(), ..Default::default() };
            let mut chunks =
                server.raw().await.max_decoding_message_size(2 * MIB).get_stream(request).await.unwrap().into_inner();
            let mut received = Vec::new();
            for round in 0.. {
                let Some(chunk) = chunks.message().await.unwrap() else { break };
                if let Some(Part::Data(data)) = chunk.part {
                    received.extend_from_slice(&data);
                }
                if round == 1 {
                    take_away(&client, how, &key).await;
                    for n in 0..32 {
                        client.put(format!("churn/{how}/{n}"), filler.clone(), &PutOptions::default()).await.unwrap();
                    }
                }
            }
            assert!(received == whole, "{how}: {} of {} bytes", received.len(), whole.len());
        }
        client.remove_matching(&Matching::All, true, |_| {}).await.unwrap();
        until_empty(&server, if settings.is_empty() { &["dram", "nvme"] } else { &["dram"] }).await;
    }
}

/// B031: keys, values and an index of one block went one by one; who had seen all of them at look-up got a mix.
#[tokio::test(flavor = "multi_thread")]
async fn what_belongs_together_is_got_in_one_batch_whole_or_with_what_is_missing_named() {
    let server = TestServer::with(&["nvme.enabled=false"]).await;
    let client = server.client();
    let unit: Vec<(String, Bytes)> = (0..3).map(|part| (format!("unit/{part}"), value(part, MIB))).collect();
    let keys: Vec<&String> = unit.iter().map(|(key, _)| key).collect();
    let options = PutOptions { group: "unit".into(), ..PutOptions::default() };
    client.put_batch(&unit, &options).await.unwrap();
    assert_eq!(client.stat("unit/1").await.unwrap().unwrap().group, "unit");
    // Leased as one look-up, all of it is there for as long.
    let granted = client.renew_leases(&keys, Some(Duration::from_secs(60))).await.unwrap();
    assert!(granted.iter().all(|lease| !lease.is_zero()), "{granted:?}");
    for n in 0..64 {
        client.put(format!("filler/{n}"), value(n, MIB), &PutOptions::default()).await.unwrap();
    }
    let got = client.get_batch(&keys).await.unwrap();
    for (got, (key, bytes)) in got.into_iter().zip(&unit) {
        assert!(got.found().is_some_and(|object| object.value == bytes), "{key}");
    }
    // Without one member the batch says which, and the others are whole.
    assert_eq!(client.remove("unit/1", false).await.unwrap(), RemoveOutcome::Removed);
    let existence = client.exists_many(&keys, None, true).await.unwrap();
    assert_eq!(existence, [Existence::Present, Existence::Missing, Existence::Present]);
    let got: Vec<bool> = client.get_batch(&keys).await.unwrap().into_iter().map(|got| got.found().is_some()).collect();
    assert_eq!(got, [true, false, true]);
}

/// Two writers of one key could both fail, or leave a key that was there and had no value.
#[tokio::test(flavor = "multi_thread")]
async fn from_the_moment_a_key_is_there_readers_get_the_winners_whole_value() {
    let server = TestServer::start().await;
    let lengths = [0, 1000, 100_000, 3 * MIB];
    for round in 0..8 {
        let key = format!("contended/{round}");
        let done = Arc::new(AtomicBool::new(false));
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let (client, key, done) = (server.client(), key.clone(), Arc::clone(&done));
                tokio::spawn(async move {
                    let mut seen: Option<Bytes> = None;
                    while !done.load(Ordering::Acquire) {
                        let exists = client.exists(&key).await.unwrap() == Existence::Present;
                        let found = client.get(&key).await.unwrap().map(|object| object.value);
                        assert!(found.is_some() || !(exists || seen.is_some()), "a key without a value");
                        assert!(seen.is_none() || seen == found, "another value");
                        seen = found;
                    }
                })
            })
            .collect();
        let puts = lengths.into_iter().enumerate().map(|(writer, length)| {
            let (client, key) = (server.client(), key.clone());
            tokio::spawn(async move { client.put(key, value(writer, length), &PutOptions::default()).await.unwrap() })
        });
        let outcomes = futures::future::join_all(puts).await;
        let won: Vec<usize> = outcomes
            .into_iter()
            .enumerate()
            .filter_map(|(writer, done)| (done.unwrap().outcome == PutOutcome::Stored).then_some(writer))
            .collect();
        assert_eq!(won.len(), 1, "{won:?}");
        let found = server.client().get(&key).await.unwrap().unwrap();
        assert!(found.value == value(won[0], lengths[won[0]]));
        done.store(true, Ordering::Release);
        for reader in readers {
            reader.await.unwrap();
        }
    }
}
