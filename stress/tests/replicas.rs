//! Copies on several real processes: whoever is lost, what has another copy is read, and gets its number of copies again.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};
use tidepool_client::{Client, ClientSettings, Durability, ErrorKind, ObjectStat, PutOptions};
use tidepool_stress::cluster::{Cluster, program};
use tidepool_stress::node_process::NodeProcess;

const OBJECTS: u64 = 40;

const SETTINGS: [&str; 2] = ["store.slice_bytes=256KiB", "replicas.repair_grace=0s"];

fn binary() -> PathBuf {
    program(&std::env::current_exe().unwrap()).expect("the tidepool binary is built")
}

fn start(count: usize) -> Cluster {
    blocking(|| Cluster::start_voters(binary(), count, &SETTINGS)).unwrap()
}

fn blocking<A>(work: impl FnOnce() -> A) -> A {
    tokio::task::block_in_place(work)
}

/// The value of object `number`, from a byte to several slices: every byte follows from the number.
fn value(number: u64) -> Bytes {
    let length = 1 + number.wrapping_mul(0x9E37_79B9) % 700_000;
    (0..length).map(|at| (number.wrapping_mul(31) + at * 7) as u8).collect::<Vec<_>>().into()
}

fn key(number: u64) -> String {
    format!("k/{number}")
}

fn copies(replicas: u32, min_replicas: u32) -> PutOptions {
    PutOptions { replicas, min_replicas, ..PutOptions::default() }
}

async fn fill(client: &Client, options: &PutOptions) {
    for number in 0..OBJECTS {
        client.put(key(number), value(number), options).await.unwrap();
    }
}

async fn check(client: &Client) {
    for number in 0..OBJECTS {
        let found = client.get(key(number)).await.unwrap();
        let found = found.unwrap_or_else(|| panic!("{} was acknowledged and is lost", key(number)));
        assert!(found.value == value(number), "wrong bytes of {}", key(number));
    }
}

async fn stat(client: &Client, number: u64) -> ObjectStat {
    client.stat(key(number)).await.unwrap().unwrap()
}

/// Waits until each object has so many copies, all on nodes that are up, and no other.
async fn until_each_has(client: &Client, copies: usize) {
    until_each_has_beside(client, copies, "").await;
}

/// The same without what is listed on `lost`, which may still count as up, and keeps what it has for its return.
async fn until_each_has_beside(client: &Client, copies: usize, lost: &str) {
    let began = Instant::now();
    let mut number = 0;
    while number < OBJECTS {
        let stat = stat(client, number).await;
        let others: Vec<_> = stat.replicas.iter().filter(|copy| copy.node != lost).collect();
        if others.len() == copies && others.iter().all(|copy| copy.node_state == "up") {
            number += 1;
            continue;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{} still has {:?}", key(number), stat.replicas);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A client that knows one node only.
fn client_of(cluster: &Cluster, position: usize) -> Client {
    Client::builder().endpoint(cluster.node(position).unwrap().grpc.to_string()).build().unwrap()
}

fn number_of(cluster: &Cluster, position: usize) -> String {
    let info = cluster.node(position).unwrap().admin("/v1/raft").unwrap();
    info["node"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_two_copies_survives_the_loss_of_each_node_and_has_two_again() {
    let mut cluster = start(3);
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    fill(&client, &copies(2, 2)).await;
    for number in 0..OBJECTS {
        let mut nodes: Vec<String> = stat(&client, number).await.replicas.into_iter().map(|copy| copy.node).collect();
        nodes.dedup();
        assert_eq!(nodes.len(), 2, "on different nodes");
    }
    for lost in 0..3 {
        let number = number_of(&cluster, lost);
        blocking(|| cluster.kill(lost)).unwrap();
        // At once, and by each of the others alone: a copy is left.
        check(&client).await;
        for other in (0..3).filter(|&other| other != lost) {
            check(&client_of(&cluster, other)).await;
        }
        until_each_has_beside(&client, 2, &number).await;
        blocking(|| cluster.restart(lost)).unwrap();
        blocking(|| cluster.until("all are up", Cluster::are_all_up));
        // What was made meanwhile is one too many, and goes.
        until_each_has(&client, 2).await;
    }
    check(&client).await;
}

/// The rack of each node.
fn racks(cluster: &Cluster) -> HashMap<String, String> {
    let report = cluster.node(0).unwrap().admin("/v1/nodes").unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    report["nodes"].as_array().unwrap().iter().map(|row| (text(&row["node"]), text(&row["rack"]))).collect()
}

/// Whether an object's copies, but those on `lost`, are in two racks.
fn is_spread(stat: &ObjectStat, racks: &HashMap<String, String>, lost: &str) -> bool {
    let left = stat.replicas.iter().filter(|copy| copy.node != lost);
    left.map(|copy| &racks[&copy.node]).collect::<HashSet<_>>().len() == 2
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_in_one_rack_move_apart_when_another_rack_has_room() {
    let mut cluster = Cluster::new(binary(), &SETTINGS).unwrap();
    for _ in 0..2 {
        blocking(|| cluster.join_with(&["labels.rack=a"])).unwrap();
    }
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    fill(&client, &copies(2, 2)).await;
    blocking(|| cluster.join_with(&["labels.rack=b"])).unwrap();
    blocking(|| cluster.until("the third is known", |cluster| racks(cluster).len() == 3));
    let racks = racks(&cluster);
    let began = Instant::now();
    let mut number = 0;
    while number < OBJECTS {
        let stat = stat(&client, number).await;
        // Never fewer than it is to have, not even while one moves.
        assert!(stat.replicas.len() >= 2, "{:?}", stat.replicas);
        if stat.replicas.len() == 2 && is_spread(&stat, &racks, "") {
            number += 1;
            continue;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{} is still in {:?}", key(number), stat.replicas);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    check(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_go_to_another_rack_by_puts_and_by_repair() {
    let mut cluster = Cluster::new(binary(), &SETTINGS).unwrap();
    for rack in ["labels.rack=a", "labels.rack=a", "labels.rack=b", "labels.rack=b"] {
        blocking(|| cluster.join_with(&[rack])).unwrap();
    }
    // Each places copies by its own view.
    let knows_all = |node: &NodeProcess| node.admin("/v1/nodes").unwrap()["nodes"].as_array().unwrap().len() == 4;
    blocking(|| cluster.until("all know all", |cluster| cluster.running().all(|(_, node)| knows_all(node))));
    let racks = racks(&cluster);
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    fill(&client, &copies(2, 2)).await;
    for number in 0..OBJECTS {
        let stat = stat(&client, number).await;
        assert!(is_spread(&stat, &racks, ""), "{:?} in {racks:?}", stat.replicas);
    }
    // What the lost one had is made anew in its rack, not beside the copy that is left.
    let lost = number_of(&cluster, 3);
    blocking(|| cluster.kill(3)).unwrap();
    until_each_has_beside(&client, 2, &lost).await;
    for number in 0..OBJECTS {
        let stat = stat(&client, number).await;
        assert!(is_spread(&stat, &racks, &lost), "{:?} in {racks:?}", stat.replicas);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_gets_the_copies_that_can_be_had_or_is_refused_and_leaves_nothing() {
    let mut cluster = start(3);
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    blocking(|| cluster.kill(2)).unwrap();
    // Of a client that asks all three, the last word may be that the dead one can't be reached.
    let refused = client_of(&cluster, 0).put("all", value(1), &copies(3, 3)).await.unwrap_err();
    assert_eq!((refused.kind(), refused.reason()), (ErrorKind::Unavailable, "TOO_FEW_REPLICAS"), "{refused}");
    assert!(refused.to_string().contains("2 of 3 copies"), "{refused}");
    assert!(client.get("all").await.unwrap().is_none());
    let unused = |cluster: &Cluster| {
        cluster.running().all(|(_, node)| {
            let tiers = node.admin("/v1/tiers").unwrap();
            tiers["tiers"][0]["objects"] == 0 && tiers["tiers"][0]["reserved"] == 0
        })
    };
    blocking(|| cluster.until("nothing is left of it", unused));

    client.put("k/1", value(1), &copies(3, 2)).await.unwrap();
    assert_eq!(stat(&client, 1).await.replicas.len(), 2);
    let refused = client.put("x", value(1), &copies(2, 3)).await.unwrap_err();
    assert_eq!((refused.kind(), refused.reason()), (ErrorKind::Invalid, "BAD_REPLICAS"), "{refused}");
    // The third is made when there is a third node.
    blocking(|| cluster.restart(2)).unwrap();
    let began = Instant::now();
    while stat(&client, 1).await.replicas.len() < 3 {
        assert!(began.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn preferred_nodes_get_the_further_copies_as_far_as_they_are_up() {
    let mut cluster = start(3);
    let client = client_of(&cluster, 0);
    let names = [1, 2].map(|at| (number_of(&cluster, at), cluster.node(at).unwrap().grpc.to_string()));
    let mut next = 0..OBJECTS;
    let mut second_of = async |prefer: &[&str]| {
        let prefer = prefer.iter().map(|&name| name.to_owned()).collect();
        let number = next.next().unwrap();
        client.put(key(number), value(number), &PutOptions { prefer, ..copies(2, 2) }).await.unwrap();
        let coordinator = number_of(&cluster, 0);
        let copies = stat(&client, number).await.replicas.into_iter().map(|copy| copy.node);
        copies.filter(|node| *node != coordinator).collect::<Vec<_>>()
    };
    for (number, address) in &names {
        for _ in 0..5 {
            assert_eq!(second_of(&["nobody", number]).await, [number.as_str()]);
            assert_eq!(second_of(&[address]).await, [number.as_str()]);
        }
    }
    let refused = client.put("x", value(1), &PutOptions { prefer: vec!["n".into(); 17], ..copies(2, 2) }).await;
    assert_eq!(refused.unwrap_err().reason(), "BAD_PREFERENCE");
    let lost = names[0].0.clone();
    blocking(|| cluster.kill(1)).unwrap();
    let prefer = vec![lost.clone()];
    client.put("after", value(1), &PutOptions { prefer, ..copies(2, 2) }).await.unwrap();
    let stat = client.stat("after").await.unwrap().unwrap();
    assert!(stat.replicas.iter().all(|copy| copy.node != lost) && stat.replicas.len() == 2, "{:?}", stat.replicas);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stands_still_costs_a_reader_no_more_than_asking_another_one() {
    let cluster = start(3);
    let writer = client_of(&cluster, 1);
    let prefer = vec![number_of(&cluster, 2)];
    let options = PutOptions { prefer, ..copies(2, 2) };
    fill(&writer, &options).await;
    let reader = |hedged_reads| {
        let settings = ClientSettings { deadline: Duration::from_secs(20), hedged_reads, ..ClientSettings::default() };
        Client::builder().endpoint(cluster.node(0).unwrap().grpc.to_string()).settings(settings).build().unwrap()
    };
    let (hedging, plain) = (reader(true), reader(false));
    // Each has read from both nodes, and knows how soon they answer.
    for client in [&hedging, &plain] {
        check(client).await;
        check(client).await;
    }
    let before = hedging.hedged_reads();
    cluster.node(1).unwrap().freeze().unwrap();
    check(&hedging).await;
    assert!(hedging.hedged_reads() > before);
    check(&plain).await;
    assert_eq!(plain.hedged_reads(), 0);
    cluster.node(1).unwrap().thaw().unwrap();
}

/// Bytes that change in a node's memory are seen by it when it reads them: that copy goes, and is made anew from another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_copy_is_read_from_another_node_and_made_anew() {
    let mut cluster = start(3);
    let options = PutOptions { prefer: vec![number_of(&cluster, 1)], ..copies(2, 2) };
    fill(&client_of(&cluster, 0), &options).await;
    let client = client_of(&cluster, 1);
    let damaged = blocking(|| damage(&cluster, 1));
    assert!(damaged > OBJECTS / 2, "{damaged}");
    check(&client).await;
    assert_eq!(blocking(|| cluster.node(1).unwrap().tier("dram", "corruptions")).unwrap(), damaged);
    until_each_has(&client, 2).await;
    blocking(|| cluster.kill(0)).unwrap();
    check(&client).await;
}

/// Flips a bit of each object that has a page to itself in a node's memory; answers how many there are.
fn damage(cluster: &Cluster, position: usize) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", cluster.node(position).unwrap().id())).unwrap();
    let segment = maps.lines().filter_map(|line| line.find("/dev/shm/").map(|at| &line[at..])).next().unwrap();
    let segment = std::fs::File::options().read(true).write(true).open(segment).unwrap();
    let mut left: HashSet<Vec<u8>> =
        (0..OBJECTS).map(value).filter(|value| value.len() >= 4096).map(|value| value[..4096].to_vec()).collect();
    let objects = left.len();
    let mut page = vec![0; 4096];
    for at in (0..segment.metadata().unwrap().len()).step_by(4096) {
        segment.read_exact_at(&mut page, at).unwrap();
        if left.remove(&page) {
            segment.write_all_at(&[page[100] ^ 4], at + 100).unwrap();
        }
    }
    (objects - left.len()) as u64
}

/// A put whose bytes come when the test says so.
struct SlowPut {
    pieces: tokio::sync::mpsc::Sender<std::io::Result<Bytes>>,
    put: tokio::task::JoinHandle<Result<tidepool_client::PutDone, tidepool_client::Error>>,
}

impl SlowPut {
    const PIECE: u64 = 1 << 20;
    const PIECES: u64 = 6;

    fn start(client: &Client, options: &PutOptions) -> Self {
        let (pieces, coming) = tokio::sync::mpsc::channel(1);
        let coming = futures::stream::unfold(coming, |mut coming| async { Some((coming.recv().await?, coming)) });
        let (client, options) = (client.clone(), options.clone());
        let put =
            tokio::spawn(async move { client.put_stream("slow", Self::PIECES * Self::PIECE, coming, &options).await });
        Self { pieces, put }
    }

    async fn send(&self, pieces: std::ops::Range<u64>) {
        for piece in pieces {
            self.pieces.send(Ok(Self::piece(piece))).await.unwrap();
        }
    }

    fn piece(piece: u64) -> Bytes {
        (0..Self::PIECE).map(|at| (piece * 91 + at * 7 + at / 251) as u8).collect::<Vec<_>>().into()
    }

    async fn check(client: &Client) {
        let found = client.get("slow").await.unwrap().unwrap().value;
        let whole: Vec<u8> = (0..Self::PIECES).flat_map(Self::piece).collect();
        assert!(found == whole);
    }
}

fn reserved(node: &NodeProcess) -> u64 {
    node.tier("dram", "reserved").unwrap()
}

fn is_unused(node: &NodeProcess) -> bool {
    reserved(node) == 0 && node.tier("dram", "objects").unwrap() == 0
}

/// Waits until one node beside the first, which coordinates, gets what arrives there; answers its position.
fn fetching(cluster: &Cluster) -> usize {
    let fetches =
        |cluster: &Cluster| cluster.running().find(|&(at, node)| at != 0 && reserved(node) > 0).map(|(at, _)| at);
    cluster.until("another node has begun to get it", |cluster| fetches(cluster).is_some());
    fetches(cluster).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn another_node_gets_a_copy_while_the_bytes_arrive() {
    let cluster = start(3);
    let client = client_of(&cluster, 0);
    let put = SlowPut::start(&client, &copies(2, 2));
    put.send(0..3).await;
    let other = blocking(|| fetching(&cluster));
    put.send(3..SlowPut::PIECES).await;
    drop(put.pieces);
    put.put.await.unwrap().unwrap();
    let used = |position: usize| cluster.node(position).unwrap().admin("/v1/repair").unwrap()["fetched"].clone();
    assert_eq!(blocking(|| (used(other), used(3 - other))), (1.into(), 0.into()), "it was not got a second time");
    for position in 0..3 {
        SlowPut::check(&client_of(&cluster, position)).await;
    }
    blocking(|| {
        cluster.until("nothing stays reserved", |cluster| cluster.running().all(|(_, node)| reserved(node) == 0))
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_breaks_off_leaves_nothing_on_the_nodes_that_were_to_have_copies() {
    let mut cluster = start(3);
    let put = SlowPut::start(&client_of(&cluster, 0), &copies(2, 2));
    put.send(0..3).await;
    blocking(|| fetching(&cluster));
    put.pieces.send(Err(std::io::Error::other("the source broke off"))).await.unwrap();
    put.put.await.unwrap().unwrap_err();
    blocking(|| cluster.until("nothing is left", |cluster| cluster.running().all(|(_, node)| is_unused(node))));
    assert!(client_of(&cluster, 1).get("slow").await.unwrap().is_none());

    // So does one whose coordinator dies.
    let put = SlowPut::start(&client_of(&cluster, 0), &copies(2, 2));
    put.send(0..3).await;
    blocking(|| fetching(&cluster));
    blocking(|| cluster.kill(0)).unwrap();
    put.put.await.unwrap().unwrap_err();
    blocking(|| cluster.until("nothing is left", |cluster| cluster.running().all(|(_, node)| is_unused(node))));
    assert!(client_of(&cluster, 1).get("slow").await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_dies_while_it_gets_a_copy_is_replaced() {
    let mut cluster = start(3);
    let client = client_of(&cluster, 0);
    let put = SlowPut::start(&client, &copies(2, 2));
    put.send(0..3).await;
    let lost = blocking(|| fetching(&cluster));
    blocking(|| cluster.kill(lost)).unwrap();
    put.send(3..SlowPut::PIECES).await;
    drop(put.pieces);
    put.put.await.unwrap().unwrap();
    blocking(|| cluster.kill(0)).unwrap();
    SlowPut::check(&client_of(&cluster, 3 - lost)).await;
}

/// A disk that is pulled: the node goes on, and what it had there is read from another one; with a new disk in its place that
/// is made anew.
#[tokio::test(flavor = "multi_thread")]
async fn what_lay_on_a_pulled_disk_is_read_from_another_node_and_made_anew() {
    let mut cluster = Cluster::new(binary(), &SETTINGS).unwrap().lending(16 << 20, 256 << 20);
    blocking(|| cluster.grow(3)).unwrap();
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    let options = PutOptions { durability: Durability::Nvme, ..copies(2, 2) };
    fill(&client, &options).await;
    // Of the DRAM of each nothing is left of the first ones.
    for number in OBJECTS..4 * OBJECTS {
        client.put(format!("later/{number}"), value(number), &PutOptions::default()).await.unwrap();
    }
    let regions = cluster.data(1).join("nvme/regions.dat");
    std::fs::File::options().write(true).open(&regions).unwrap().set_len(0).unwrap();
    std::fs::remove_file(&regions).unwrap();
    check(&client).await;
    check(&client_of(&cluster, 1)).await;
    let state = |cluster: &Cluster| cluster.node(1).unwrap().admin("/v1/tiers").unwrap()["tiers"][1]["state"].clone();
    blocking(|| cluster.until("the tier's error is shown", |cluster| state(cluster) == "failed"));
    check(&client).await;

    let node = cluster.node(1).unwrap();
    blocking(|| node.change("/v1/nvme/detach", &json!({})).and_then(|_| node.change("/v1/nvme/attach", &json!({}))))
        .unwrap();
    assert_eq!(state(&cluster), "serving");
    until_each_has(&client, 2).await;
    for gone in [0, 2] {
        blocking(|| cluster.kill(gone)).unwrap();
        check(&client).await;
        blocking(|| cluster.restart(gone)).unwrap();
        blocking(|| cluster.until("all are up", Cluster::are_all_up));
        until_each_has(&client, 2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_costs_a_put_time_and_no_copy() {
    let cluster = start(3);
    let client = client_of(&cluster, 0);
    let (frozen, number) = (cluster.node(1).unwrap(), number_of(&cluster, 1));
    frozen.freeze().unwrap();
    // Whichever is asked first: the other one takes its place.
    for object in 0..4 {
        client.put(key(object), value(object), &copies(2, 2)).await.unwrap();
        let nodes: Vec<String> = stat(&client, object).await.replicas.into_iter().map(|copy| copy.node).collect();
        assert!(!nodes.contains(&number) && nodes.len() == 2, "{nodes:?} without {number}");
    }
    frozen.thaw().unwrap();
    for number in 0..4 {
        assert!(client.get(key(number)).await.unwrap().unwrap().value == value(number));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_node_is_empty_in_the_end_and_nothing_is_missed_meanwhile() {
    let cluster = start(3);
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    // By each node, so that each has some only copies.
    for number in 0..OBJECTS {
        let client = client_of(&cluster, (number % 3) as usize);
        client.put(key(number), value(number), &copies(1 + (number % 2) as u32, 1)).await.unwrap();
    }
    let (drained, number) = (1, number_of(&cluster, 1));
    let drain = json!({ "node": number });
    let report = blocking(|| cluster.node(0).unwrap().change("/v1/nodes/drain", &drain)).unwrap();
    assert!(report["nodes"].as_array().unwrap().iter().any(|node| node["state"] == "draining"), "{report}");
    let is_empty = |cluster: &Cluster| {
        let nodes = cluster.node(0).unwrap().admin("/v1/nodes").unwrap();
        let row = nodes["nodes"].as_array().unwrap().iter().find(|row| row["node"] == number.as_str());
        row.is_some_and(|row| row["replicas"] == 0)
    };
    let began = Instant::now();
    while !blocking(|| is_empty(&cluster)) {
        assert!(began.elapsed() < Duration::from_secs(60), "it is not emptied");
        check(&client).await;
    }
    check(&client).await;
    for number in 0..OBJECTS {
        assert_eq!(stat(&client, number).await.replicas.len() as u64, 1 + number % 2, "{}", key(number));
    }
    // It takes nothing new itself; whoever knows another node puts there.
    let refused = client_of(&cluster, drained).put("new", value(1), &copies(1, 1)).await.unwrap_err();
    assert_eq!(refused.reason(), "DRAINING", "{refused}");
    client.put("new", value(1), &copies(2, 2)).await.unwrap();
    let undrained = blocking(|| cluster.node(0).unwrap().change("/v1/nodes/undrain", &drain)).unwrap();
    assert!(undrained["nodes"].as_array().unwrap().iter().all(|node| node["state"] == "up"), "{undrained}");
}

/// Reads an object through some nodes until told to stop; answers how many reads there were.
fn keep_reading(
    clients: Vec<Client>,
    key: &'static str,
    value: &Bytes,
) -> (tokio::sync::watch::Sender<bool>, Vec<tokio::task::JoinHandle<u64>>) {
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let read = |client: Client| {
        let (stopped, value) = (stopped.clone(), value.clone());
        tokio::spawn(async move {
            let mut reads = 0;
            while !*stopped.borrow() {
                assert!(client.get(key).await.unwrap().unwrap().value == value);
                reads += 1;
            }
            reads
        })
    };
    let readers = clients.into_iter().map(read).collect();
    (stop, readers)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hot_object_gets_a_further_copy_which_readers_use_and_loses_it_when_it_is_cold() {
    let settings = ["replicas.hot_reads_per_second=10", "replicas.hot_copies=1"];
    let mut cluster = Cluster::new(binary(), &SETTINGS).unwrap();
    for _ in 0..4 {
        blocking(|| cluster.join_with(&settings)).unwrap();
    }
    blocking(|| cluster.until("all are up", Cluster::are_all_up));
    let writer = client_of(&cluster, 0);
    for name in ["hot", "cold"] {
        writer.put(name, value(3), &copies(1, 1)).await.unwrap();
    }
    let copies_of = async |name: &str| writer.stat(name).await.unwrap().unwrap().replicas.len();
    let until_copies = async |wanted: usize| {
        let began = Instant::now();
        while copies_of("hot").await != wanted {
            assert!(began.elapsed() < Duration::from_secs(60), "it has {} copies", copies_of("hot").await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let readers = (1..4).map(|position| client_of(&cluster, position)).collect();
    let (stop, readers) = keep_reading(readers, "hot", &value(3));
    until_copies(2).await;
    // Both have their turns.
    let hits = |cluster: &Cluster, at: usize| cluster.node(at).unwrap().tier("dram", "hits").unwrap();
    let report = |cluster: &Cluster, at: usize| cluster.node(at).unwrap().admin("/v1/repair").unwrap()["hot"].clone();
    let further = |cluster: &Cluster| (1..4).find(|&at| report(cluster, at)["here"] == 1);
    blocking(|| cluster.until("it says so", |cluster| further(cluster).is_some()));
    let at = blocking(|| further(&cluster).unwrap());
    blocking(|| cluster.until("who had it made says so", |cluster| report(cluster, 0)["made"] == 1));
    let before = blocking(|| [0, at].map(|at| hits(&cluster, at)));
    let are_read = |cluster: &Cluster| (0..2).all(|which| hits(cluster, [0, at][which]) > before[which] + 10);
    blocking(|| cluster.until("both are read", are_read));
    assert_eq!((copies_of("hot").await, copies_of("cold").await), (2, 1));
    stop.send(true).unwrap();
    for reader in readers {
        assert!(reader.await.unwrap() > 0);
    }
    until_copies(1).await;
    // The catalog knows before the node does, which asked.
    let has_dropped = |report: Value| report["dropped"] == 1 && report["here_bytes"] == 0;
    blocking(|| cluster.until("it let go of it", |cluster| has_dropped(report(cluster, at))));
    assert!(client_of(&cluster, 2).get("hot").await.unwrap().unwrap().value == value(3));
    assert_eq!(blocking(|| cluster.node(0).unwrap().metric("tidepool_hot_made")).unwrap(), 1);
}
