//! The client protocol, as clients see it: what is promised, and what bad input gets.

use crate::common::TestServer;
use bytes::Bytes;
use prost::Message;
use tidepool_client::{Client, Existence, GetOptions, Matching, PutOptions, PutOutcome, RemoveOutcome};
use tidepool_metadata::proto::{self, ErrorDetail, put_chunk::Part};
use tonic::Status;

fn reason(status: &Status) -> String {
    ErrorDetail::decode(status.details()).unwrap().reason
}

fn bytes(seed: u8, length: usize) -> Bytes {
    (0..length)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed).rotate_left((i >> 8) as u32 & 7))
        .collect::<Vec<_>>()
        .into()
}

fn chunks(parts: Vec<Part>) -> impl futures::Stream<Item = proto::PutChunk> {
    futures::stream::iter(parts.into_iter().map(|part| proto::PutChunk { part: Some(part) }))
}

fn announce(key: &'static [u8], length: u64) -> Part {
    Part::Announce(proto::PutAnnounce { key: key.into(), length, ..Default::default() })
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_put_is_got_whatever_its_size() {
    let server = TestServer::start().await;
    let client = server.client();
    for (n, length) in [0, 1, 4096, 65_537, 262_144, 1 << 20, (5 << 20) + 7].into_iter().enumerate() {
        let (key, value) = (format!("k/{n}"), bytes(n as u8, length));
        let done = client.put(&key, value.clone(), &PutOptions::default()).await.unwrap();
        assert_eq!(done.outcome, PutOutcome::Stored);
        let found = client.get(&key).await.unwrap().unwrap();
        assert!(found.value == value, "{length}");
        let mut into = vec![0; length];
        client.get_into(&key, &mut into).await.unwrap().unwrap();
        assert!(into == value);
    }
    assert!(client.get("absent").await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_put_wins_and_an_upsert_replaces() {
    let server = TestServer::start().await;
    let client = server.client();
    client.put("k", bytes(1, 1000), &PutOptions::default()).await.unwrap();
    let second = client.put("k", bytes(2, 2000), &PutOptions::default()).await.unwrap();
    assert_eq!(second.outcome, PutOutcome::AlreadyExists);
    assert_eq!(client.get("k").await.unwrap().unwrap().value, bytes(1, 1000));
    let upsert = PutOptions { upsert: true, ..PutOptions::default() };
    assert_eq!(client.put("k", bytes(3, 3000), &upsert).await.unwrap().outcome, PutOutcome::Stored);
    assert_eq!(client.get("k").await.unwrap().unwrap().value, bytes(3, 3000));
    assert_eq!(client.remove("k", false).await.unwrap(), RemoveOutcome::Removed);
    assert!(client.get("k").await.unwrap().is_none());
    // The memory of all versions comes back, without anybody's waiting for readers.
    wait_until_empty(&server).await;
}

async fn wait_until_empty(server: &TestServer) {
    let empty = async {
        while server.tier("dram", "used").await + server.tier("dram", "reserved").await > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), empty).await.expect("memory is freed");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_writers_of_one_key_exactly_one_wins_and_readers_see_all_of_its_bytes() {
    let server = TestServer::start().await;
    for round in 0..20_u8 {
        let key = format!("contended/{round}");
        let puts = (0..8_u8).map(|writer| {
            let (client, key) = (server.client(), key.clone());
            tokio::spawn(async move {
                client.put(&key, bytes(writer, 70_000), &PutOptions::default()).await.unwrap().outcome
            })
        });
        let reader = server.client();
        let outcomes = futures::future::join_all(puts).await;
        let won = outcomes.iter().filter(|outcome| *outcome.as_ref().unwrap() == PutOutcome::Stored).count();
        assert_eq!(won, 1);
        let winner = outcomes.iter().position(|outcome| *outcome.as_ref().unwrap() == PutOutcome::Stored).unwrap();
        assert!(reader.get(&key).await.unwrap().unwrap().value == bytes(winner as u8, 70_000));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_give_one_outcome_per_item_in_order() {
    let server = TestServer::start().await;
    let client = server.client();
    let items: Vec<(String, Bytes)> =
        ["a", "b", "a", "c"].iter().enumerate().map(|(n, key)| (key.to_string(), bytes(n as u8, 100 * n))).collect();
    let outcomes = client.put_batch(&items, &PutOptions::default()).await.unwrap();
    let outcomes: Vec<PutOutcome> = outcomes.into_iter().map(Result::unwrap).collect();
    assert_eq!(outcomes, [PutOutcome::Stored, PutOutcome::Stored, PutOutcome::AlreadyExists, PutOutcome::Stored]);
    // The same key several times: every place has its bytes.
    let got = client.get_batch(&["a", "b", "absent", "a", "c", "a"]).await.unwrap();
    let values: Vec<Option<Bytes>> = got.into_iter().map(|got| got.found().map(|object| object.value)).collect();
    let expected = [Some(0), Some(1), None, Some(0), Some(3), Some(0)];
    for (value, expected) in values.into_iter().zip(expected) {
        assert_eq!(value, expected.map(|n: usize| bytes(n as u8, 100 * n)));
    }
    let existence = client.exists_many(&["a", "absent", "c"], None, true).await.unwrap();
    assert_eq!(existence, [Existence::Present, Existence::Missing, Existence::Present]);
    let removed = client.remove_many(&["a", "absent", "a"], false).await.unwrap();
    assert_eq!(removed, [RemoveOutcome::Removed, RemoveOutcome::Missing, RemoveOutcome::Missing]);
}

/// A map keyed by name folded repeated keys together, and reported buffers as good that were never filled: here the
/// repeats lie in different messages of one answer, and one of them is too large for any.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_asked_for_several_times_fills_every_place_though_the_answer_has_several_messages() {
    let server = TestServer::start().await;
    let client = server.client();
    let values = [("a", bytes(1, 3 << 20)), ("b", bytes(2, 5 << 20)), ("c", bytes(3, 0))];
    for (key, value) in &values {
        client.put(key, value.clone(), &PutOptions::default()).await.unwrap();
    }
    let value_of = |key: &str| values.iter().find(|(name, _)| *name == key).map(|(_, value)| value.clone());
    let asked = ["a", "b", "a", "absent", "c", "a", "b", "c", "a"];
    let got = client.get_batch(&asked).await.unwrap();
    assert_eq!(got.len(), asked.len());
    for (key, got) in asked.iter().zip(got) {
        assert!(got.found().map(|object| object.value) == value_of(key), "{key}");
    }
    // The same by the generated stub: every place says what it is, in order.
    let keys = asked.iter().map(|key| Bytes::from_static(key.as_bytes())).collect();
    let request = proto::BatchGetRequest { keys, ..Default::default() };
    let mut raw = server.raw().await.max_decoding_message_size(16 << 20);
    let mut stream = raw.batch_get(request).await.unwrap().into_inner();
    let (mut place, mut messages) = (0, 0);
    while let Some(mut reply) = stream.message().await.unwrap() {
        assert_eq!(reply.first as usize, place);
        messages += 1;
        let mut rest = std::mem::take(&mut reply.values);
        for (outcome, length) in reply.outcomes().zip(&reply.lengths) {
            let value = rest.split_to(*length as usize);
            let expected = match value_of(asked[place]) {
                None => proto::GetOutcome::Missing,
                Some(whole) if whole.len() > 4 << 20 => proto::GetOutcome::TooLarge,
                Some(whole) => {
                    assert!(value == whole, "place {place}");
                    proto::GetOutcome::Found
                }
            };
            assert_eq!(outcome, expected, "place {place}");
            place += 1;
        }
        assert!(rest.is_empty());
    }
    assert_eq!(place, asked.len());
    assert!(messages > 1, "one message has room for all: the test proves nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_batch_the_good_items_succeed_and_the_failed_leave_nothing() {
    let server = TestServer::start().await;
    let request = proto::BatchPutRequest {
        keys: vec![Bytes::from_static(b"good"), Bytes::from_static(b"bad"), Bytes::from_static(b"fine")],
        values: vec![bytes(1, 1000), bytes(2, 1000), bytes(3, 1000)],
        checksums: vec![crc32fast::hash(&bytes(1, 1000)), 7, crc32fast::hash(&bytes(3, 1000))],
        ..Default::default()
    };
    let reply = server.raw().await.batch_put(request).await.unwrap().into_inner();
    let outcomes: Vec<_> = reply.outcomes().collect();
    assert_eq!(outcomes, [proto::PutOutcome::Stored, proto::PutOutcome::Failed, proto::PutOutcome::Stored]);
    assert_eq!(reply.reasons, ["", "CHECKSUM_MISMATCH", ""]);
    let client = server.client();
    client.remove_many(&["good", "fine"], false).await.unwrap();
    assert!(client.get("bad").await.unwrap().is_none());
    wait_until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_are_verified_and_bounded() {
    let server = TestServer::start().await;
    let client = server.client();
    let value = bytes(9, 700_000);
    client.put("k", value.clone(), &PutOptions::default()).await.unwrap();
    for (offset, length) in [(0, 0), (0, 1), (65_530, 10), (262_140, 300_000), (699_999, 1), (700_000, 0)] {
        let found = client.get_range("k", offset, length).await.unwrap().unwrap();
        assert!(found.value == value[offset as usize..(offset + length) as usize], "{offset}+{length}");
    }
    let error = client.get_range("k", 699_999, 2).await.unwrap_err();
    assert_eq!(error.reason(), "BAD_RANGE");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_gets_a_clear_status_and_stores_nothing() {
    let server = TestServer::with(&["limits.max_object_bytes=8MiB"]).await;
    let mut raw = server.raw().await;
    let put = |key: Vec<u8>| proto::PutRequest { key: key.into(), value: bytes(1, 10), ..Default::default() };
    for (request, expected) in [
        (put(vec![]), "KEY_EMPTY"),
        (put(vec![1; 1025]), "KEY_TOO_LONG"),
        (proto::PutRequest { tenant: "nobody".into(), ..put(vec![1]) }, "UNKNOWN_TENANT"),
        (proto::PutRequest { checksum: Some(1), ..put(vec![1]) }, "CHECKSUM_MISMATCH"),
        (proto::PutRequest { value: bytes(1, (4 << 20) + 1), ..put(vec![1]) }, "VALUE_TOO_LARGE"),
    ] {
        assert_eq!(reason(&raw.put(request).await.unwrap_err()), expected);
    }
    let data = |length| Part::Data(bytes(1, length));
    for (parts, expected) in [
        (vec![], "LENGTH_MISMATCH"),
        (vec![data(10)], "LENGTH_MISMATCH"),
        (vec![announce(b"k", 100), data(99)], "LENGTH_MISMATCH"),
        (vec![announce(b"k", 100), data(99), data(2)], "LENGTH_MISMATCH"),
        (vec![announce(b"k", 100), data(100), Part::Checksum(1)], "CHECKSUM_MISMATCH"),
        (vec![announce(b"", 100), data(100)], "KEY_EMPTY"),
        (vec![announce(b"k", (8 << 20) + 1)], "VALUE_TOO_LARGE"),
        (vec![announce(b"k", u64::MAX)], "VALUE_TOO_LARGE"),
    ] {
        assert_eq!(reason(&raw.put_stream(chunks(parts)).await.unwrap_err()), expected);
    }
    let list = proto::ListRequest { page_token: "x".into(), ..Default::default() };
    assert_eq!(reason(&raw.list(list).await.unwrap_err()), "BAD_PAGE_TOKEN");
    let pattern = proto::remove_matching_request::Filter::Pattern("(".into());
    let matching = proto::RemoveMatchingRequest { filter: Some(pattern), ..Default::default() };
    assert_eq!(reason(&raw.remove_matching(matching).await.unwrap_err()), "BAD_PATTERN");
    assert_eq!(reason(&raw.remove_matching(proto::RemoveMatchingRequest::default()).await.unwrap_err()), "BAD_FILTER");
    server.assert_nothing_stored().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_larger_than_any_tier_is_refused_and_evicts_nothing() {
    let server = TestServer::start().await;
    let client = server.client();
    client.put("small", bytes(1, 1 << 20), &PutOptions::default()).await.unwrap();
    let mut raw = server.raw().await;
    let status = raw.put_stream(chunks(vec![announce(b"huge", 40 << 20)])).await.unwrap_err();
    assert_eq!(reason(&status), "VALUE_TOO_LARGE");
    assert!(status.message().contains("largest"), "{}", status.message());
    assert!(client.get("small").await.unwrap().is_some());
}

/// Lengths of 32 bits end at 2 and at 4 GiB: such values came back as errors, or with a wrong size. `make large` moves
/// their bytes; here is what costs no memory: each is refused by its exact length, before any byte is moved.
#[tokio::test(flavor = "multi_thread")]
async fn lengths_around_2_and_4_gib_are_told_exactly() {
    let server = TestServer::start().await;
    let mut raw = server.raw().await;
    let gib: u64 = 1 << 30;
    for length in [2 * gib - 1, 2 * gib, 4 * gib - 1, 4 * gib, 4 * gib + 1, 5 * gib + 7] {
        let status = raw.put_stream(chunks(vec![announce(b"k", length)])).await.unwrap_err();
        assert_eq!(reason(&status), "VALUE_TOO_LARGE");
        assert!(status.message().contains(&length.to_string()), "{length}: {}", status.message());
        // What is read of a small object at such places is outside of it, not at the place that 32 bits leave.
        server.client().put("small", bytes(1, 10), &PutOptions::default()).await.unwrap();
        for range in [(length, Some(1)), (0, Some(length)), (length, None)] {
            let request = proto::GetRequest {
                key: Bytes::from_static(b"small"),
                offset: range.0,
                length: range.1,
                ..Default::default()
            };
            assert_eq!(reason(&raw.get(request).await.unwrap_err()), "BAD_RANGE", "{range:?}");
        }
    }
    assert_eq!(server.tier("dram", "reserved").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_dies_in_mid_put_blocks_nothing() {
    let server = TestServer::start().await;
    for round in 0..50 {
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let mut raw = server.raw().await;
        let put =
            tokio::spawn(async move { raw.put_stream(tokio_stream::wrappers::ReceiverStream::new(receiver)).await });
        sender.send(proto::PutChunk { part: Some(announce(b"k", 4 << 20)) }).await.unwrap();
        sender.send(proto::PutChunk { part: Some(Part::Data(bytes(1, 1 << 20))) }).await.unwrap();
        if round % 2 == 0 {
            // Seen to have room, so that the death is in mid-put.
            let reserved = async {
                while server.tier("dram", "reserved").await == 0 {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(std::time::Duration::from_secs(10), reserved).await.unwrap();
        }
        put.abort();
        drop(sender);
    }
    let client = server.client();
    assert!(client.get("k").await.unwrap().is_none(), "never partial data");
    let done = client.put("k", bytes(2, 4 << 20), &PutOptions::default()).await.unwrap();
    assert_eq!(done.outcome, PutOutcome::Stored, "the key was never held");
    client.remove("k", false).await.unwrap();
    wait_until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn removal_by_prefix_pattern_and_all() {
    let server = TestServer::start().await;
    let client = server.client();
    let items: Vec<(String, Bytes)> =
        (0..300).map(|n| (format!("{}/{n:03}", if n % 3 == 0 { "x" } else { "y" }), bytes(1, 10))).collect();
    client.put_batch(&items, &PutOptions::default()).await.unwrap();
    client.pin(&["x/000"]).await.unwrap();
    let removed = client.remove_matching(&Matching::Prefix("x/".into()), false, |_| {}).await.unwrap();
    assert_eq!((removed.removed, removed.pinned), (99, 1));
    let removed = client.remove_matching(&Matching::Pattern("^y/..[05]$".into()), false, |_| {}).await.unwrap();
    assert_eq!(removed.removed, 40);
    let removed = client.remove_matching(&Matching::All, true, |_| {}).await.unwrap();
    assert_eq!(removed.removed, 161);
    wait_until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_list_every_key_once_in_order() {
    let server = TestServer::start().await;
    let client = server.client();
    let items: Vec<(Vec<u8>, Bytes)> = (0..250_u8).map(|n| (vec![n, 0xff, n], bytes(n, 3))).collect();
    client.put_batch(&items, &PutOptions::default()).await.unwrap();
    let (mut keys, mut token) = (Vec::new(), String::new());
    loop {
        let page = client.list(b"", 37, &token, None).await.unwrap();
        keys.extend(page.objects.iter().map(|object| object.key.as_bytes().to_vec()));
        match page.next_page_token {
            next if next.is_empty() => break,
            next => token = next,
        }
    }
    assert_eq!(keys, items.into_iter().map(|(key, _)| key).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn pinned_and_leased_objects_stay_under_pressure() {
    let server = TestServer::with(&["nvme.enabled=false"]).await;
    let client = server.client();
    let options = PutOptions { pin: true, ..PutOptions::default() };
    client.put("pinned", bytes(1, 1 << 20), &options).await.unwrap();
    client.put("leased", bytes(2, 1 << 20), &PutOptions::default()).await.unwrap();
    let granted = client.renew_leases(&["leased", "absent"], Some(std::time::Duration::from_secs(60))).await.unwrap();
    assert!(granted[0].as_secs() >= 59 && granted[1].is_zero(), "{granted:?}");
    for n in 0..100 {
        client.put(format!("filler/{n}"), bytes(3, 1 << 20), &PutOptions::default()).await.unwrap();
    }
    assert!(client.get("pinned").await.unwrap().unwrap().value == bytes(1, 1 << 20));
    assert!(client.get("leased").await.unwrap().unwrap().value == bytes(2, 1 << 20));
    assert!(client.get("filler/0").await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn existence_probes_do_not_starve_eviction() {
    let server = TestServer::with(&["nvme.enabled=false"]).await;
    let client = server.client();
    let keys: Vec<String> = (0..120).map(|n| format!("k/{n}")).collect();
    for key in &keys {
        client.put(key, bytes(1, 1 << 20), &PutOptions::default()).await.unwrap();
        client.exists_many(&keys, None, true).await.unwrap();
    }
    assert!(server.tier("dram", "evictions").await > 60);
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_survive_a_restart_and_removed_ones_do_not_come_back() {
    let server = TestServer::start().await;
    let client = server.client();
    for n in 0..60_u8 {
        client.put(format!("k/{n}"), bytes(n, 1 << 20), &PutOptions::default()).await.unwrap();
    }
    let removed: Vec<String> = (0..60).step_by(7).map(|n| format!("k/{n}")).collect();
    client.remove_many(&removed, false).await.unwrap();
    let server = server.restart().await;
    let client = server.client();
    for n in 0..60_u8 {
        let found = client.get(format!("k/{n}")).await.unwrap();
        match n % 7 {
            0 => assert!(found.is_none(), "{n} is back"),
            _ => assert!(found.unwrap().value == bytes(n, 1 << 20), "{n}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_asks_for_nvme_lies_there_when_it_is_answered() {
    let server = TestServer::start().await;
    let client = server.client();
    let options = PutOptions { durability: tidepool_client::Durability::Nvme, ..PutOptions::default() };
    client.put("k", bytes(1, 300_000), &options).await.unwrap();
    let (status, body) = server.admin("/v1/objects?key=k").await;
    assert_eq!(status, 200, "{body}");
    let report: serde_json::Value = serde_json::from_str(&body).unwrap();
    let tiers: Vec<&str> =
        report["slices"].as_array().unwrap().iter().map(|slice| slice["tier"].as_str().unwrap()).collect();
    assert_eq!(tiers, ["dram", "dram", "nvme", "nvme"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_location_is_served_by_version() {
    let server = TestServer::start().await;
    let client = server.client();
    client.put("k", bytes(1, 1000), &PutOptions::default()).await.unwrap();
    let stat = client.stat("k").await.unwrap().unwrap();
    let mut raw = server.raw().await;
    let get = |version: String| proto::GetRequest { key: Bytes::from_static(b"k"), version, ..Default::default() };
    assert_eq!(raw.get(get(stat.version.clone())).await.unwrap().into_inner().value, bytes(1, 1000));
    let other = raw.get(get("00000001.1.1".into())).await.unwrap_err();
    assert_eq!(reason(&other), "NOT_FOUND");
    assert_eq!(reason(&raw.get(get("x".into())).await.unwrap_err()), "BAD_VERSION");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_unix_socket_serves_too() {
    let server = TestServer::start().await;
    let endpoint = format!("unix:{}", server.data().join("tidepool.sock").display());
    let client = Client::builder().endpoint(endpoint).connect().await.unwrap();
    client.put("k", bytes(1, 100), &PutOptions::default()).await.unwrap();
    assert!(client.get_with("k", GetOptions::default()).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_secret_only_its_holders_may_call() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    std::fs::write(&path, "a secret of some length").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let server = TestServer::with(&[&format!("cluster.secret_file='{}'", path.display())]).await;
    let endpoint = server.server.addresses().grpc.to_string();
    let refused = server.client().get("k").await.unwrap_err();
    assert_eq!(refused.reason(), "UNAUTHENTICATED");
    let client = Client::builder().endpoint(endpoint).token_file(&path).unwrap().build().unwrap();
    assert!(client.get("k").await.unwrap().is_none());
    assert_eq!(server.admin("/v1/tiers").await.0, 401);
    assert_eq!(server.admin("/healthz").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_sent_twice_under_one_name_is_done_once_whatever_came_between() {
    let server = TestServer::start().await;
    let (client, mut raw) = (server.client(), server.raw().await);
    raw.open_session(proto::OpenSessionRequest { session: 9 }).await.unwrap();
    let options = |first, again| {
        let ids = Some(proto::RequestIds { session: 9, first, acknowledged: 0, again });
        Some(proto::PutOptions { ids, ..Default::default() })
    };
    let value = || bytes(1, 100);
    let put =
        |again| proto::PutRequest { key: "a".into(), value: value(), options: options(1, again), ..Default::default() };
    let stored = proto::PutOutcome::Stored as i32;
    for again in [false, true, true] {
        assert_eq!(raw.put(put(again)).await.unwrap().into_inner().outcome, stored, "its first answer");

        let options_of_b = options(2, again);
        let announce = proto::PutAnnounce { key: "b".into(), length: 100, options: options_of_b, ..Default::default() };
        let parts = [Part::Announce(announce), Part::Data(value())];
        let parts = parts.map(|part| proto::PutChunk { part: Some(part) });
        assert_eq!(raw.put_stream(futures::stream::iter(parts)).await.unwrap().into_inner().outcome, stored);

        let (keys, values) = (vec!["c".into(), "d".into()], vec![value(), value()]);
        let batch = proto::BatchPutRequest { keys, values, options: options(3, again), ..Default::default() };
        assert_eq!(raw.batch_put(batch).await.unwrap().into_inner().outcomes, [stored, stored]);

        client.remove_many(&["a", "b", "c", "d"], false).await.unwrap();
    }
    let left = client.exists_many(&["a", "b", "c", "d"], None, true).await.unwrap();
    assert_eq!(left, [Existence::Missing; 4], "removed objects stay removed");

    client.put("a", bytes(2, 100), &PutOptions::default()).await.unwrap();
    let exists = proto::PutOutcome::AlreadyExists as i32;
    assert_eq!(raw.put(put(false)).await.unwrap().into_inner().outcome, exists, "said without a look at its name");
}

/// What other nodes do that are to have copies.
#[tokio::test(flavor = "multi_thread")]
async fn a_version_is_read_while_it_arrives_and_ends_as_its_put_does() {
    use futures::TryStreamExt as _;
    use proto::get_chunk;
    let server = TestServer::start().await;
    let (client, mut raw) = (server.client(), server.raw().await);
    let whole = bytes(3, 3 << 20);
    for (key, checksum) in [("good", crc32fast::hash(&whole)), ("bad", 1)] {
        client.put(format!("before/{key}"), Bytes::new(), &PutOptions::default()).await.unwrap();
        let before = client.get(format!("before/{key}")).await.unwrap().unwrap().info.version;
        // The next one's: that of a put that is under way is told to nodes only.
        let (life, sequence) = before.rsplit_once('.').unwrap();
        let version = format!("{life}.{}", sequence.parse::<u64>().unwrap() + 1);

        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let receiver = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let put = tokio::spawn({
            let mut raw = raw.clone();
            async move { raw.put_stream(receiver).await }
        });
        let send = async |part| sender.send(proto::PutChunk { part: Some(part) }).await.unwrap();
        let options = Some(proto::PutOptions { replicas: 2, ..Default::default() });
        let length = whole.len() as u64;
        send(Part::Announce(proto::PutAnnounce { key: key.into(), length, options, ..Default::default() })).await;
        send(Part::Data(whole.slice(..1 << 20))).await;
        let request = proto::GetRequest { key: key.into(), version, ..Default::default() };
        let mut read = loop {
            match raw.get_stream(request.clone()).await {
                Ok(read) => break read.into_inner(),
                Err(status) => assert_eq!(reason(&status), "NOT_FOUND"),
            }
            tokio::task::yield_now().await;
        };
        let mut data = Vec::new();
        let mut sum = None;
        let mut more = async |data: &mut Vec<u8>| {
            match read.try_next().await?.and_then(|chunk| chunk.part) {
                Some(get_chunk::Part::Data(piece)) => data.extend_from_slice(&piece),
                Some(get_chunk::Part::Checksum(checksum)) => sum = Some(checksum),
                Some(get_chunk::Part::Description(description)) => assert_eq!(description.length, length),
                None => return Ok::<_, Status>(false),
            }
            Ok(true)
        };
        while data.len() < 1 << 20 {
            assert!(more(&mut data).await.unwrap());
        }
        assert!(client.get(key).await.unwrap().is_none(), "nobody sees it yet");
        for piece in [1 << 20..2 << 20, 2 << 20..3 << 20] {
            send(Part::Data(whole.slice(piece))).await;
        }
        while data.len() < 3 << 20 {
            assert!(more(&mut data).await.unwrap());
        }
        assert!(data == whole);
        send(Part::Checksum(checksum)).await;
        drop(sender);
        let put = put.await.unwrap();
        let end = loop {
            match more(&mut data).await {
                Ok(true) => {}
                end => break end,
            }
        };
        if key == "good" {
            put.unwrap();
            assert!(!end.unwrap() && sum == Some(checksum));
            assert!(client.get(key).await.unwrap().unwrap().value == whole);
        } else {
            assert_eq!(reason(&put.unwrap_err()), "CHECKSUM_MISMATCH");
            assert_eq!(reason(&end.unwrap_err()), "PUT_ENDED");
            assert!(client.get(key).await.unwrap().is_none());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mutation_sent_twice_under_one_name_is_done_once() {
    let server = TestServer::start().await;
    let (client, mut raw) = (server.client(), server.raw().await);
    let options = PutOptions::default();
    let put = || client.put("k", bytes(1, 100), &options);
    put().await.unwrap();
    let ids = |first, acknowledged| Some(proto::RequestIds { session: 7, first, acknowledged, again: false });
    let remove = |ids| proto::RemoveRequest { keys: vec!["k".into(), "absent".into()], ids, ..Default::default() };
    let pin = |ids| proto::PinRequest { keys: vec!["k".into()], ids, ..Default::default() };
    assert_eq!(reason(&raw.remove(remove(ids(1, 0))).await.unwrap_err()), "SESSION_EXPIRED");
    let opened = raw.open_session(proto::OpenSessionRequest { session: 7 }).await.unwrap().into_inner();
    assert!(opened.lifetime_ms >= 10_000);

    let first = raw.remove(remove(ids(1, 0))).await.unwrap().into_inner().outcomes;
    put().await.unwrap();
    let second = raw.remove(remove(ids(1, 0))).await.unwrap().into_inner().outcomes;
    assert_eq!(first, [proto::RemoveOutcome::Removed as i32, proto::RemoveOutcome::Missing as i32]);
    assert_eq!(second, first, "the first answers again");
    assert_eq!(client.exists("k").await.unwrap(), Existence::Present, "what was put since is not removed");

    for _ in 0..2 {
        assert_eq!(raw.pin(pin(ids(3, 0))).await.unwrap().into_inner().found, [true]);
    }
    assert_eq!(client.stat("k").await.unwrap().unwrap().pins, 1);

    assert_eq!(reason(&raw.remove(remove(ids(3, 0))).await.unwrap_err()), "BAD_REQUEST_ID", "an item of another kind");
    assert_eq!(raw.unpin(pin(ids(5, 3))).await.unwrap().into_inner().found, [true]);
    assert_eq!(reason(&raw.pin(pin(ids(3, 0))).await.unwrap_err()), "BAD_REQUEST_ID", "acknowledged");
    for bad in [ids(0, 0), ids(u64::MAX, 0), Some(proto::RequestIds { first: 1, ..Default::default() })] {
        assert_eq!(reason(&raw.pin(pin(bad)).await.unwrap_err()), "BAD_REQUEST_ID");
    }
}
