//! The NVMe tier under a whole server: a file that vanishes, another capacity, a folder that is not ours.

use std::fs;

use tidepool_client::{Client, Existence, PutOptions};

use crate::common::TestServer;

const MIB: usize = 1 << 20;

async fn put(client: &Client, n: u8) {
    client.put(format!("k/{n}"), vec![n; MIB].into(), &PutOptions::default()).await.unwrap();
}

/// A field of the NVMe tier's report, in words.
async fn nvme(server: &TestServer, field: &str) -> String {
    let (_, body) = server.admin("/v1/tiers").await;
    let report: serde_json::Value = serde_json::from_str(&body).unwrap();
    let tiers = report["tiers"].as_array().unwrap();
    tiers.iter().find(|row| row["tier"] == "nvme").unwrap()[field].as_str().unwrap_or_default().to_owned()
}

async fn post(server: &TestServer, path: &str, body: &str) {
    let (status, answer) = server.admin_post(path, body).await;
    assert_eq!(status, 200, "{answer}");
}

/// A file that was missing took the whole engine down.
#[tokio::test(flavor = "multi_thread")]
async fn a_data_file_that_vanishes_is_told_and_costs_only_what_was_in_it() {
    let server = TestServer::start().await;
    let client = server.client();
    for n in 0..50 {
        put(&client, n).await;
    }
    assert!(server.tier("nvme", "objects").await > 10);
    // Nothing that was promised of an object keeps its key when its only copy is gone.
    client.pin(&["k/0"]).await.unwrap();
    client.renew_leases(&["k/1"], Some(std::time::Duration::from_secs(60))).await.unwrap();
    fs::remove_file(server.data().join("nvme/regions.dat")).unwrap();
    for n in 50..80 {
        put(&client, n).await;
    }
    assert_eq!(nvme(&server, "state").await, "failed");
    assert!(nvme(&server, "last_error").await.contains("regions.dat"));
    assert_eq!(server.admin("/readyz").await.0, 200, "DRAM serves");
    assert!(client.get("k/79").await.unwrap().unwrap().value == vec![79; MIB]);
    let (mut here, mut unavailable) = (0, 0);
    for n in 0..80_u8 {
        match client.get(format!("k/{n}")).await {
            Ok(Some(object)) => {
                assert!(object.value == vec![n; MIB], "{n}");
                here += 1;
            }
            Ok(None) => {}
            Err(error) => {
                assert_eq!(error.reason(), "UNAVAILABLE", "{n}");
                unavailable += 1;
            }
        }
    }
    assert!(here > 10 && unavailable > 0, "{here} here, {unavailable} unavailable");

    // With a new file in its place, what was only in the old one is missing, and can be put again.
    assert_eq!(server.admin_post("/v1/nvme/detach", "{}").await.0, 503, "what was not durable is told");
    post(&server, "/v1/nvme/attach", "{}").await;
    assert_eq!(nvme(&server, "state").await, "serving");
    for n in 0..80_u8 {
        let key = format!("k/{n}");
        match client.get(&key).await.unwrap() {
            Some(object) => assert!(object.value == vec![n; MIB], "{n}"),
            None => {
                // The catalog is told in the background.
                let told = async {
                    while client.exists(&key).await.unwrap() != Existence::Missing {
                        tokio::task::yield_now().await;
                    }
                };
                tokio::time::timeout(std::time::Duration::from_secs(10), told).await.expect("the catalog is told");
                put(&client, n).await;
                assert!(client.get(&key).await.unwrap().unwrap().value == vec![n; MIB], "{n}");
            }
        }
    }
}

/// A larger disk was noticed only after a restart.
#[tokio::test(flavor = "multi_thread")]
async fn another_capacity_is_taken_by_attaching_again_and_by_a_restart_and_a_larger_one_keeps_all() {
    let server = TestServer::with(&["dram.capacity=16MiB", "nvme.capacity=64MiB"]).await;
    let client = server.client();
    // A region of 1 MiB has room for three slices of 256 KiB.
    for n in 0..40 {
        put(&client, n).await;
    }
    let all_are_there = async |server: &TestServer| {
        for n in 0..40_u8 {
            assert!(server.client().get(format!("k/{n}")).await.unwrap().unwrap().value == vec![n; MIB], "{n}");
        }
    };
    all_are_there(&server).await;
    let before = server.tier("nvme", "capacity").await;
    post(&server, "/v1/nvme/detach", "{}").await;
    post(&server, "/v1/nvme/attach", r#"{"capacity": "128MiB"}"#).await;
    assert_eq!(server.tier("nvme", "capacity").await, before + (64 << 20));
    all_are_there(&server).await;
    for n in 40..80 {
        put(&client, n).await;
    }
    all_are_there(&server).await;
    let (mut stopped, _) = server.stop().await;
    stopped.configure(|config| config.nvme.capacity = Some("160MiB".parse().unwrap()));
    let server = stopped.start().await;
    server.reconciled().await;
    assert_eq!(server.tier("nvme", "capacity").await, before + (96 << 20));
    all_are_there(&server).await;
}

/// An object one byte over a limit inside, which nobody had told callers about, ended the process when it was read back
/// from disk.
#[tokio::test(flavor = "multi_thread")]
async fn values_around_every_limit_come_back_from_disk_in_one_batch() {
    const CHUNK: usize = 64 << 10;
    const SLICE: usize = 256 << 10;
    let server = TestServer::with(&["nvme.capacity=128MiB", "store.promote_after_reads=0"]).await;
    let limits = [CHUNK, SLICE, 3 * SLICE, 4 * MIB];
    let lengths = limits.into_iter().flat_map(|limit| [limit - 1, limit, limit + 1]).chain([0, 1]);
    let items: Vec<(String, bytes::Bytes)> =
        lengths.enumerate().map(|(n, length)| (format!("limit/{n}"), vec![n as u8 + 1; length].into())).collect();
    for (key, bytes) in &items {
        server.client().put(key, bytes.clone(), &PutOptions::default()).await.unwrap();
    }
    // What is coldest goes to disk.
    for n in 0..40 {
        put(&server.client(), n).await;
    }
    let before = server.tier("nvme", "hits").await;
    let keys: Vec<&String> = items.iter().map(|(key, _)| key).collect();
    let by_grpc = tidepool_client::ClientSettings { native: false, ..tidepool_client::ClientSettings::default() };
    let by_grpc = Client::builder().endpoint(server.server.addresses().grpc.to_string()).settings(by_grpc);
    for client in [server.client(), by_grpc.build().unwrap()] {
        for (got, (key, bytes)) in client.get_batch(&keys).await.unwrap().into_iter().zip(&items) {
            assert!(got.found().is_some_and(|object| object.value == bytes), "{key} of {} bytes", bytes.len());
        }
    }
    assert!(server.tier("nvme", "hits").await >= before + 2 * items.len() as u64, "from disk");
}
