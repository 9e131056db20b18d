//! Large objects over several real processes: where their parts lie, and what becomes of them when nodes or puts are lost.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_client::{Client, Listed, PutOptions, PutOutcome, RemoveOutcome, Stripes};
use tidepool_stress::cluster::{Cluster, program};

const SETTINGS: [&str; 2] = ["store.slice_bytes=256KiB", "replicas.repair_grace=1h"];
const LENGTH: usize = 3_000_001;
const STRIPES: Stripes = Stripes { nodes: 3, part_bytes: 256 << 10 };

fn start() -> (Cluster, Client) {
    let binary: PathBuf = program(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
    let cluster = blocking(|| Cluster::start_voters(binary, 3, &SETTINGS)).unwrap();
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    (cluster, client)
}

fn blocking<A>(work: impl FnOnce() -> A) -> A {
    tokio::task::block_in_place(work)
}

/// Every byte follows from the number and its place.
fn value(number: u64) -> Bytes {
    (0..LENGTH).map(|at| (number.wrapping_mul(31) + at as u64 * 7 + (at as u64 >> 12)) as u8).collect::<Vec<_>>().into()
}

fn copies(replicas: u32) -> PutOptions {
    PutOptions { replicas, min_replicas: replicas, ..PutOptions::default() }
}

async fn objects(client: &Client) -> Vec<Listed> {
    client.list(b"", 10_000, "", None).await.unwrap().objects
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_lie_on_all_nodes_and_are_read_whole_and_in_ranges() {
    let (_cluster, client) = start();
    let put = client.put_striped("k", value(1), &copies(1), STRIPES).await.unwrap();
    assert_eq!(put.outcome, PutOutcome::Stored);
    let mut by_node = std::collections::HashMap::<String, usize>::new();
    for part in objects(&client).await.iter().filter(|object| object.key.as_bytes() != b"k") {
        let stat = client.stat(&part.key).await.unwrap().unwrap();
        assert_eq!(stat.replicas.len(), 1);
        *by_node.entry(stat.replicas[0].node.clone()).or_default() += 1;
    }
    let mut counts: Vec<usize> = by_node.into_values().collect();
    counts.sort_unstable();
    assert_eq!(counts, [4, 4, 4], "twelve parts over three nodes");

    assert!(client.get_striped("k").await.unwrap().unwrap() == value(1));
    for (offset, length) in
        [(0, 1), (262_143, 2), (300_000, 1_000_000), (LENGTH as u64 - 1, 1), (LENGTH as u64, 0), (5, 0)]
    {
        let range = client.get_striped_range("k", offset, Some(length)).await.unwrap().unwrap();
        let start = usize::try_from(offset).unwrap();
        assert!(range == value(1).slice(start..start + usize::try_from(length).unwrap()), "{offset}, {length}");
    }
    let past = client.get_striped_range("k", 5, Some(LENGTH as u64 - 4)).await.unwrap_err();
    assert_eq!(past.reason(), "BAD_RANGE");
    assert_eq!(client.get_striped_range("k", u64::MAX, Some(2)).await.unwrap_err().reason(), "BAD_RANGE");

    let again = client.put_striped("k", value(2), &copies(1), STRIPES).await.unwrap();
    assert_eq!(again.outcome, PutOutcome::AlreadyExists);
    assert!(client.get_striped("k").await.unwrap().unwrap() == value(1));
    let replaced = client.put_striped("k", value(3), &PutOptions { upsert: true, ..copies(1) }, STRIPES).await.unwrap();
    assert_eq!(replaced.outcome, PutOutcome::Stored);
    assert!(client.get_striped("k").await.unwrap().unwrap() == value(3));
    assert_eq!(objects(&client).await.len(), 13, "what was replaced is gone");
    assert_eq!(client.remove_striped("k", false).await.unwrap(), RemoveOutcome::Removed);
    assert_eq!(client.remove_striped("k", false).await.unwrap(), RemoveOutcome::Missing);
    assert!(client.get_striped("k").await.unwrap().is_none());
    assert_eq!(objects(&client).await, []);

    client.put("plain", "bytes".into(), &PutOptions::default()).await.unwrap();
    assert_eq!(client.get_striped("plain").await.unwrap_err().reason(), "NOT_STRIPED");
    let grouped = PutOptions { group: "g".into(), ..PutOptions::default() };
    assert_eq!(client.put_striped("x", value(1), &grouped, STRIPES).await.unwrap_err().reason(), "BAD_SETTING");
    client.put_striped("empty", Bytes::new(), &copies(1), Stripes::default()).await.unwrap();
    assert_eq!(client.get_striped("empty").await.unwrap(), Some(Bytes::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn with_two_copies_the_loss_of_a_node_costs_nothing_and_without_it_is_a_miss() {
    let (mut cluster, client) = start();
    client.put_striped("two", value(1), &copies(2), STRIPES).await.unwrap();
    client.put_striped("one", value(2), &PutOptions { pin: true, ..copies(1) }, STRIPES).await.unwrap();
    let lost = (blocking(|| cluster.wait_for_leader()) + 1) % 3;
    let number = cluster.node(lost).unwrap().admin("/v1/raft").unwrap()["node"].as_str().unwrap().to_owned();
    blocking(|| cluster.kill(lost)).unwrap();
    assert!(client.get_striped("two").await.unwrap().unwrap() == value(1));
    // Once it is known that it does not come back.
    until("it is removed", async || {
        let leader = cluster.node((lost + 2) % 3).unwrap();
        let removal = serde_json::json!({ "node": number });
        let answer = blocking(|| leader.change("/v1/nodes/remove", &removal)).unwrap();
        answer["copies"].is_u64()
    })
    .await;
    assert!(client.get_striped("two").await.unwrap().unwrap() == value(1));
    assert_eq!(client.get_striped("one").await.unwrap(), None);
    let put = client.put_striped("one", value(3), &PutOptions { upsert: true, ..copies(1) }, STRIPES).await.unwrap();
    assert_eq!(put.outcome, PutOutcome::Stored, "over fewer nodes");
    assert!(client.get_striped("one").await.unwrap().unwrap() == value(3));
    until("each part has two copies again", async || {
        let two = client.stat("two").await.unwrap().unwrap();
        let parts = objects(&client).await;
        let parts = parts.iter().filter(|object| object.group == two.group);
        let counts: HashSet<u32> = parts.map(|object| object.replicas).collect();
        counts == HashSet::from([2])
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_see_one_put_while_it_is_replaced() {
    let (cluster, client) = start();
    let upsert = PutOptions { upsert: true, ..copies(1) };
    client.put_striped("k", value(0), &upsert, STRIPES).await.unwrap();
    let reader = cluster.client(Duration::from_secs(20)).unwrap();
    let writer = tokio::spawn(async move {
        for number in 1..20 {
            client.put_striped("k", value(number), &upsert, STRIPES).await.unwrap();
        }
        client
    });
    while !writer.is_finished() {
        // The list may be replaced while its parts are read, and those gone: then it is read anew.
        let found = reader.get_striped("k").await.unwrap().expect("always there");
        assert!((0..20).any(|number| found == value(number)), "the bytes of one put");
    }
    let client = writer.await.unwrap();
    assert!(client.get_striped("k").await.unwrap().unwrap() == value(19));
    assert_eq!(objects(&client).await.len(), 13);
}

/// At whatever moment its caller goes away, a put has stored all or nothing, and keeps nobody from putting.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_is_given_up_is_whole_or_not_there() {
    let (_cluster, client) = start();
    for moment in 0..24 {
        let (key, value) = (format!("k/{moment}"), value(moment));
        let one = copies(1);
        let put = client.put_striped(&key, value.clone(), &one, STRIPES);
        let _ended_or_not = tokio::time::timeout(Duration::from_millis(2 * moment), put).await;
        let found = client.get_striped(&key).await.unwrap();
        assert!(found.is_none_or(|found| found == value), "{moment}");
        client.put_striped(&key, value.clone(), &PutOptions { upsert: true, ..copies(1) }, STRIPES).await.unwrap();
        assert!(client.get_striped(&key).await.unwrap().unwrap() == value);
        assert_eq!(client.remove_striped(&key, false).await.unwrap(), RemoveOutcome::Removed);
    }
}
