//! Instances in a client's process: what they hold is the cluster's, and they come and go.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value as Json;
use tidepool_client::{Client, Durability, ErrorKind, PutOptions, PutOutcome};
use tidepool_server::{Config, Embedded};

use crate::common::TestServer;

const LENGTHS: [usize; 5] = [0, 1, 70_000, 256 << 10, 1_000_003];
const PATIENCE: Duration = Duration::from_secs(60);

fn value(length: usize) -> Bytes {
    (0..length).map(|index| (index * 7 % 251) as u8).collect()
}

fn config(node: &TestServer, settings: &[&str]) -> Config {
    let join = format!("cluster.join=['{}']", node.server.addresses().grpc);
    let mut all = vec![join, "dram.capacity=32MiB".to_owned(), "store.slice_bytes=256KiB".to_owned()];
    all.extend(settings.iter().map(ToString::to_string));
    Embedded::config(&all).unwrap()
}

async fn embedded(node: &TestServer, settings: &[&str]) -> Embedded {
    Embedded::start(config(node, settings)).await.unwrap()
}

async fn fill(client: &Client) {
    for length in LENGTHS {
        let put = client.put(format!("k{length}"), value(length), &PutOptions::default()).await.unwrap();
        assert_eq!(put.outcome, PutOutcome::Stored);
    }
}

async fn check(client: &Client) {
    for length in LENGTHS {
        let found = client.get(format!("k{length}")).await.unwrap();
        assert!(found.unwrap_or_else(|| panic!("no object of {length}")).value == value(length), "{length}");
    }
}

async fn rows(node: &TestServer, path: &str, list: &str) -> Vec<Json> {
    let (status, body) = node.admin(path).await;
    assert_eq!(status, 200, "{body}");
    serde_json::from_str::<Json>(&body).unwrap()[list].as_array().unwrap().clone()
}

async fn guests(node: &TestServer) -> Vec<Json> {
    let nodes = rows(node, "/v1/nodes", "nodes").await;
    nodes.into_iter().filter(|node| node["vote"] == "guest").collect()
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let began = std::time::Instant::now();
    while !holds().await {
        assert!(began.elapsed() < PATIENCE, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_instance_holds_is_the_clusters_and_stays_there_when_it_leaves() {
    let node = TestServer::start().await;
    let instance = embedded(&node, &[]).await;
    let (client, other) = (instance.client().build().unwrap(), node.client());
    fill(&client).await;
    check(&client).await;
    assert!(client.local_hits() > 0, "its own process reads without a call");
    check(&other).await;
    other.put("there", value(9), &PutOptions::default()).await.unwrap();
    assert_eq!(client.get("there").await.unwrap().unwrap().value, value(9));

    let seen = guests(&node).await;
    assert_eq!((seen.len(), &seen[0]["state"], &seen[0]["admin"]), (1, &Json::from("up"), &Json::from("")));
    assert_eq!([&seen[0]["dram"], &seen[0]["nvme"]], [&Json::from(32 << 20), &Json::from(0)]);
    assert_eq!(seen[0]["replicas"], LENGTHS.len());
    assert!(instance.addresses().admin.is_none());

    let folder = instance.addresses().data.clone();
    assert!(folder.exists() && instance.is_temporary());
    assert_eq!(instance.leave(PATIENCE).await.unwrap(), 0, "all was handed over");
    assert!(!folder.exists());
    check(&other).await;
    assert_eq!(rows(&node, "/v1/nodes", "nodes").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_folders_of_one_that_is_dropped_stay_as_long_as_it_may_run() {
    let node = TestServer::start().await;
    let disk = tempfile::tempdir().unwrap();
    let lent = format!("nvme.path='{}'", disk.path().display());
    let config = config(&node, &["nvme.enabled=true", "nvme.capacity=64MiB", "nvme.region_bytes=1MiB", &lent]);
    let own = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let started = own.spawn(async move {
        let instance = Embedded::start(config).await.unwrap();
        instance.addresses().data.clone()
    });
    let folder = started.await.unwrap();
    let used = || std::fs::read_dir(disk.path()).unwrap().count();
    assert!(folder.join("catalog").exists() && used() == 1);
    tokio::task::spawn_blocking(move || drop(own)).await.unwrap();
    assert!(!folder.exists() && used() == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_that_have_the_log_are_no_voters_when_others_become_some() {
    let node = TestServer::start().await;
    let mut instances = Vec::new();
    for _ in 0..3 {
        instances.push(embedded(&node, &[]).await);
    }
    until("all have the log", async || {
        let members = rows(&node, "/v1/raft", "members").await;
        let matched = members.iter().filter_map(|member| member["matched"].as_u64()).min();
        members.len() == 4 && matched.is_some_and(|matched| matched > 0)
    })
    .await;
    // The leader promotes two that have the log as soon as there are two: those that came first, if it could be they.
    let join = format!("cluster.join=['{}']", node.server.addresses().grpc);
    let others = [TestServer::with(&[&join]).await, TestServer::with(&[&join]).await];
    let mut kinds = Vec::new();
    until("there are three voters", async || {
        let members = rows(&node, "/v1/raft", "members").await;
        kinds = members.iter().map(|member| member["kind"].as_str().unwrap().to_owned()).collect();
        kinds.iter().filter(|kind| *kind == "voter").count() == 3
    })
    .await;
    assert_eq!(kinds.iter().filter(|kind| *kind == "guest").count(), 3, "{kinds:?}");
    for instance in instances {
        instance.shutdown().await.unwrap();
    }
    assert_eq!(node.client().put("k", value(5), &PutOptions::default()).await.unwrap().outcome, PutOutcome::Stored);
    drop(others);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_handed_over_is_gone_and_its_keys_are_free() {
    let node = TestServer::start().await;
    let instance = embedded(&node, &[]).await;
    fill(&instance.client().build().unwrap()).await;
    assert_eq!(instance.leave(Duration::ZERO).await.unwrap(), LENGTHS.len() as u64);
    let client = node.client();
    for length in LENGTHS {
        assert!(client.get(format!("k{length}")).await.unwrap().is_none());
    }
    fill(&client).await;
    check(&client).await;
}

/// Its process ends in the middle of everything, as by `kill -9`.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_instance_is_struck_out_when_it_does_not_come_back() {
    let node = TestServer::with(&["replicas.repair_grace=0s"]).await;
    let process = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let join = format!("cluster.join=['{}']", node.server.addresses().grpc);
    let started = process.spawn(async move {
        let config = Embedded::config(&[join, "dram.capacity=32MiB".into()]).unwrap();
        let instance = Embedded::start(config).await.unwrap();
        fill(&instance.client().build().unwrap()).await;
        instance
    });
    let instance = started.await.unwrap();
    let client = node.client();
    check(&client).await;
    process.shutdown_background();
    // Its engine has threads of its own.
    drop(instance);
    let failed = async || client.get("k1").await.unwrap_err().kind();
    assert_eq!(failed().await, ErrorKind::Unavailable, "it may come back");
    until("it is no node any more", async || guests(&node).await.is_empty()).await;
    until("it is no member any more", async || rows(&node, "/v1/raft", "members").await.len() == 1).await;
    assert!(client.get("k1").await.unwrap().is_none(), "nobody waits for it");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_with_a_folder_comes_back_with_what_it_held() {
    let node = TestServer::start().await;
    let folder = tempfile::tempdir().unwrap();
    let data = format!("data='{}'", folder.path().join("data").display());
    let disk = folder.path().join("disk");
    let nvme = format!("nvme.path='{}'", disk.display());
    let shared = format!("dram.folder='{}'", folder.path().display());
    let settings = [
        data.as_str(),
        shared.as_str(),
        nvme.as_str(),
        "nvme.enabled=true",
        "nvme.capacity=64MiB",
        "nvme.region_bytes=1MiB",
    ];
    let instance = embedded(&node, &settings).await;
    assert!(!instance.is_temporary());
    assert_eq!(guests(&node).await[0]["nvme"], 64 << 20);
    fill(&instance.client().build().unwrap()).await;
    instance.shutdown().await.unwrap();
    assert!(disk.join("regions.dat").exists(), "its folders stay");
    let instance = embedded(&node, &settings).await;
    let client = node.client();
    until("it has announced what it has", async || !guests(&node).await[0]["announcing"].as_bool().unwrap()).await;
    check(&client).await;
    assert_eq!(guests(&node).await[0]["incarnation"], 2);
    let segments =
        || std::fs::read_dir(folder.path()).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_file());
    assert_eq!(segments().count(), 1);
    instance.leave(PATIENCE).await.unwrap();
    assert_eq!(segments().count(), 0, "nobody comes back to its memory");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_temporary_instance_takes_its_part_of_a_disk_along() {
    let node = TestServer::start().await;
    let disk = tempfile::tempdir().unwrap();
    let nvme = format!("nvme.path='{}'", disk.path().display());
    let settings = [nvme.as_str(), "nvme.enabled=true", "nvme.capacity=64MiB", "nvme.region_bytes=1MiB"];
    let instance = embedded(&node, &settings).await;
    let parts = |path: &Path| std::fs::read_dir(path).unwrap().count();
    assert_eq!(parts(disk.path()), 1);
    instance.shutdown().await.unwrap();
    assert_eq!(parts(disk.path()), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_disk_of_an_instance_is_exchanged_while_it_serves() {
    let node = TestServer::start().await;
    let none = embedded(&node, &[]).await;
    assert_eq!(none.attach_nvme(None, None).await.unwrap_err().reason(), "BAD_CONFIG");
    none.shutdown().await.unwrap();
    let disk = ["nvme.enabled=true", "nvme.capacity=64MiB", "nvme.region_bytes=1MiB"];
    let instance = embedded(&node, &disk).await;
    let client = instance.client().build().unwrap();
    let on_disk = PutOptions { durability: Durability::Nvme, ..PutOptions::default() };
    client.put("k", value(5), &on_disk).await.unwrap();
    instance.detach_nvme().await.unwrap();
    assert!(client.put("l", value(5), &on_disk).await.is_err(), "there is no disk to put it on");
    assert_eq!(instance.attach_nvme(None, Some(128 << 20)).await.unwrap(), 1);
    client.put("l", value(5), &on_disk).await.unwrap();
    assert!(instance.attach_nvme(None, None).await.is_err(), "one is attached");
    let elsewhere = tempfile::tempdir().unwrap();
    instance.detach_nvme().await.unwrap();
    assert_eq!(instance.attach_nvme(Some(elsewhere.path().join("disk")), None).await.unwrap(), 0);
    instance.shutdown().await.unwrap();
    assert!(elsewhere.path().join("disk").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_cluster_there_is_no_instance() {
    let refused = Embedded::start(Embedded::config(&[]).unwrap()).await.err().unwrap();
    assert_eq!((refused.reason(), refused.field_name()), ("BAD_CONFIG", "cluster.join"));
    assert!(Embedded::config(&["dram.capacity=1MiB".into()]).is_err(), "a node's bounds");
}
