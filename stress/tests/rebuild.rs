//! The catalog is lost on all voters of a cluster, and made anew from what the nodes hold.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};
use tidepool_client::{Client, ErrorKind, PutOptions};
use tidepool_stress::cluster::{Cluster, program};

const OBJECTS: u64 = 45;

fn binary() -> PathBuf {
    program(&std::env::current_exe().unwrap()).expect("the tidepool binary is built")
}

fn blocking<A>(work: impl FnOnce() -> A) -> A {
    tokio::task::block_in_place(work)
}

fn value(number: u64) -> Bytes {
    (0..50_000 + number).map(|at| (number.wrapping_mul(31) + at * 7) as u8).collect::<Vec<_>>().into()
}

fn key(number: u64) -> String {
    format!("k/{number}")
}

fn client_of(cluster: &Cluster, position: usize) -> Client {
    Client::builder().endpoint(cluster.node(position).unwrap().grpc.to_string()).build().unwrap()
}

fn number_of(cluster: &Cluster, position: usize) -> String {
    cluster.node(position).unwrap().admin("/v1/raft").unwrap()["node"].as_str().unwrap().to_owned()
}

/// What an operator does with a node that does not run.
fn admin(cluster: &Cluster, position: usize, command: &[&str], more: &[&str]) -> Value {
    let options = cluster.options_of(position, &[]);
    let mut process = std::process::Command::new(&options.program);
    process.args(["--json", "admin"]).args(command).arg("--data").arg(&options.data).args(more);
    let answered = process.output().unwrap();
    assert!(answered.status.success(), "{answered:?}");
    serde_json::from_slice(&answered.stdout).unwrap()
}

fn rebuild(cluster: &Cluster, position: usize) -> Value {
    cluster.node(position).unwrap().admin("/v1/rebuild").unwrap()
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Puts by each node, of one copy and of two; some are replaced, some removed, and all nodes have heard of that.
async fn fill(cluster: &Cluster) {
    for number in 0..OBJECTS {
        let client = client_of(cluster, (number % 3) as usize);
        let replicas = 1 + (number % 2) as u32;
        let options = PutOptions { replicas, min_replicas: replicas, ..PutOptions::default() };
        let first = if number % 5 == 0 { value(number + 1000) } else { value(number) };
        client.put(key(number), first, &options).await.unwrap();
        if number % 5 == 0 {
            // By another node than the one that has the older version.
            let other = client_of(cluster, ((number + 1) % 3) as usize);
            other.put(key(number), value(number), &PutOptions { upsert: true, ..options }).await.unwrap();
        }
    }
    let client = client_of(cluster, 0);
    for number in (0..OBJECTS).filter(|&number| is_removed(number)) {
        client.remove(key(number), false).await.unwrap();
    }
    let left: u64 = (0..OBJECTS).filter(|&number| !is_removed(number)).map(|number| 1 + number % 2).sum();
    let objects =
        |cluster: &Cluster| cluster.running().map(|(_, node)| node.tier("dram", "objects").unwrap()).sum::<u64>();
    blocking(|| cluster.until("what was removed and replaced is freed", |cluster| objects(cluster) == left));
}

fn is_removed(number: u64) -> bool {
    number % 7 == 3
}

async fn check(client: &Client) {
    for number in 0..OBJECTS {
        let found = client.get(key(number)).await.unwrap_or_else(|error| panic!("{}: {error}", key(number)));
        match found {
            Some(found) => assert!(found.value == value(number) && !is_removed(number), "{}", key(number)),
            None => assert!(is_removed(number), "{} was acknowledged and is lost", key(number)),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_loss_of_all_voters_the_nodes_announce_what_they_have() {
    let mut cluster = blocking(|| Cluster::start_voters(binary(), 3, &["replicas.repair_grace=0s"])).unwrap();
    fill(&cluster).await;
    let numbers: Vec<String> = blocking(|| (0..3).map(|position| number_of(&cluster, position)).collect());
    let whole = client_of(&cluster, 1);
    cluster.kill_all();
    for position in 0..3 {
        std::fs::remove_dir_all(cluster.data(position).join("catalog")).unwrap();
    }
    assert!(blocking(|| cluster.restart(0)).is_err(), "a catalog that is gone is not replaced in silence");

    let begun = blocking(|| admin(&cluster, 0, &["rebuild"], &[]));
    let mut waits = numbers[1..].to_vec();
    waits.sort();
    assert_eq!(begun["waits"], json!(waits));
    blocking(|| cluster.restart(0)).unwrap();
    blocking(|| cluster.until("it has announced what it has", |cluster| rebuild(cluster, 0)["waits"] == json!(waits)));
    let client = client_of(&cluster, 0);
    for number in (0..OBJECTS).filter(|number| number % 3 == 0 && number % 5 != 0 && !is_removed(*number)) {
        assert!(client.get(key(number)).await.unwrap().unwrap().value == value(number), "{}", key(number));
    }
    let unknown = client.get("k/nobody").await.unwrap_err();
    assert_eq!((unknown.kind(), unknown.reason()), (ErrorKind::Unavailable, "RECOVERING"), "{unknown}");

    // Twice begun would be two clusters.
    blocking(|| admin(&cluster, 1, &["rebuild"], &[]));
    assert!(blocking(|| cluster.restart(1)).is_err());
    let log = std::fs::read_to_string(cluster.data(1).join("node.log")).unwrap();
    assert!(log.contains("begun the same rebuild"), "{log}");
    for position in 1..3 {
        blocking(|| admin(&cluster, position, &["raft", "rejoin"], &[]));
        blocking(|| cluster.restart(position)).unwrap();
    }
    until("all have announced what they have", async || {
        blocking(|| cluster.running().all(|(at, _)| rebuild(&cluster, at)["under_way"] == false))
    })
    .await;
    blocking(|| cluster.wait_for_recovery());
    check(&client).await;
    check(&whole).await;
    blocking(|| cluster.until("three vote again", |cluster| cluster.voters() == Some(3)));
    // As many copies as before: none of them is one too many.
    let has_looked = |cluster: &Cluster| {
        cluster.running().all(|(_, node)| {
            let repair = node.admin("/v1/repair").unwrap();
            assert_eq!(repair["trimmed"], 0, "{repair}");
            repair["examined"].as_u64() > Some(0) && repair["sweeping"] == false
        })
    };
    blocking(|| cluster.until("repair has looked at all", has_looked));
    for number in (0..OBJECTS).filter(|&number| !is_removed(number)) {
        let stat = client.stat(key(number)).await.unwrap().unwrap();
        assert_eq!(stat.replicas.len() as u64, 1 + number % 2, "{}", key(number));
    }
    // It is a cluster like any other.
    client.put("new", value(1), &PutOptions { replicas: 3, min_replicas: 3, ..PutOptions::default() }).await.unwrap();
    blocking(|| cluster.kill(0)).unwrap();
    check_two_copies(&client_of(&cluster, 2)).await;
}

async fn check_two_copies(client: &Client) {
    for number in (0..OBJECTS).filter(|&number| number % 2 == 1 && !is_removed(number)) {
        let mut found = None;
        until("it is read from the other node", async || {
            found = client.get(key(number)).await.ok().flatten();
            found.is_some()
        })
        .await;
        assert!(found.is_some_and(|found| found.value == value(number)), "{}", key(number));
    }
}

/// A node that is lost for good is not waited for, or not any longer.
#[tokio::test(flavor = "multi_thread")]
async fn a_rebuild_does_not_wait_for_nodes_that_are_lost() {
    let mut cluster = blocking(|| Cluster::start_voters(binary(), 3, &["replicas.repair_grace=0s"])).unwrap();
    let numbers: Vec<String> = blocking(|| (0..3).map(|position| number_of(&cluster, position)).collect());
    client_of(&cluster, 0).put("a", value(1), &PutOptions::default()).await.unwrap();
    cluster.kill_all();
    let begun = blocking(|| admin(&cluster, 0, &["rebuild"], &["--without", &numbers[2]]));
    assert_eq!(begun["waits"], json!([numbers[1]]));
    assert!(begun["set_aside"].as_str().is_some_and(|aside| std::path::Path::new(aside).exists()));
    blocking(|| cluster.restart(0)).unwrap();
    blocking(|| cluster.until("it waits", |cluster| rebuild(cluster, 0)["waits"] == json!([numbers[1]])));
    let report = blocking(|| cluster.node(0).unwrap().change("/v1/rebuild/finish", &json!({}))).unwrap();
    assert_eq!((&report["under_way"], &report["objects"]), (&json!(false), &json!(1)));
    let client = client_of(&cluster, 0);
    assert!(client.get("a").await.unwrap().is_some_and(|found| found.value == value(1)));
    assert!(client.get("b").await.unwrap().is_none());
    // Restarted it is over still.
    blocking(|| cluster.stop(0)).unwrap();
    blocking(|| cluster.restart(0)).unwrap();
    let report = blocking(|| rebuild(&cluster, 0));
    assert_eq!((&report["under_way"], &report["waits"]), (&json!(false), &Value::Null));
}
