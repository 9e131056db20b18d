//! Values that RDMA devices move, between a node's memory and a client's: `make test-rdma` runs this in a virtual machine that
//! has devices. Without them, every test says so and passes.

use bytes::Bytes;
use tidepool_client::{BatchGot, Client, ClientSettings, LendableMemory, PutOptions};

use crate::common::TestServer;

fn has_devices() -> bool {
    let has = std::env::var("RDMA_VM_DEVICES").is_ok();
    if !has {
        eprintln!("skipped: needs the virtual machine of `make test-rdma`");
    }
    has
}

fn value(length: usize, seed: usize) -> Bytes {
    (0..length).map(|index| ((index + seed) * 7 % 251) as u8).collect()
}

/// A node that is met by the network of the devices, and a client that is as if on another host.
async fn node_and_client() -> (TestServer, Client) {
    let settings =
        ["cluster.insecure=true", "dram.capacity=256MiB", "grpc.listen='10.77.0.1:0'", "engine.listen='10.77.0.1:0'"];
    let server = TestServer::with(&settings).await;
    let settings = ClientSettings { same_host: false, ..ClientSettings::default() };
    let client = Client::builder().endpoint(server.server.addresses().grpc.to_string()).settings(settings);
    (server, client.build().unwrap())
}

/// What all devices have sent, in packets of 4 KiB at most.
fn packets() -> u64 {
    let devices = std::fs::read_dir("/sys/class/infiniband").unwrap();
    let sent = devices.map(|device| {
        let counter = device.unwrap().path().join("ports/1/hw_counters/sent_pkts");
        std::fs::read_to_string(counter).unwrap().trim().parse::<u64>().unwrap()
    });
    sent.sum()
}

/// Gets until the queue pairs are up, which is found out in the background.
async fn until_read_by_device(client: &Client, key: &str, expected: &Bytes) {
    while client.one_sided_reads() == 0 {
        assert!(client.get(key).await.unwrap().unwrap().value == *expected);
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_read_by_a_device() {
    if !has_devices() {
        return;
    }
    let (server, client) = node_and_client().await;
    let options = PutOptions::default();
    let lengths = [4096, 64 << 10, (64 << 10) + 1, 1 << 20, (4 << 20) + 1, 9_000_001];
    for length in lengths {
        client.put(format!("k{length}"), value(length, 1), &options).await.unwrap();
    }
    until_read_by_device(&client, "k65536", &value(64 << 10, 1)).await;
    let before = client.one_sided_reads();
    for length in lengths {
        let found = client.get(format!("k{length}")).await.unwrap().unwrap();
        assert!(found.value == value(length, 1), "{length}");
        let mut buffer = vec![1; length + 1];
        client.get_into(format!("k{length}"), &mut buffer).await.unwrap().unwrap();
        assert!(buffer[..length] == value(length, 1) && buffer[length] == 1, "{length}");
    }
    assert_eq!(client.one_sided_reads() - before, 2 * 5, "all from 64 KiB on");
    let keys = lengths.map(|length| format!("k{length}"));
    for (got, length) in client.get_batch(&keys).await.unwrap().iter().zip(lengths) {
        assert!(matches!(got, BatchGot::Found(object) if object.value == value(length, 1)), "{length}");
    }
    assert_eq!(client.one_sided_reads() - before, 3 * 5);
    let store = server.server.node().service().store();
    while store.holds() != (0, 0) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn values_are_read_by_the_nodes_device() {
    if !has_devices() {
        return;
    }
    let (_server, client) = node_and_client().await;
    let (options, bytes) = (PutOptions::default(), value(4 << 20, 3));
    client.put("first", bytes.slice(..1 << 20), &options).await.unwrap();
    until_read_by_device(&client, "first", &bytes.slice(..1 << 20)).await;
    let mut memory = LendableMemory::allocate(bytes.len()).unwrap();
    memory.copy_from_slice(&bytes);
    // From the client's staging, and from where they lie.
    for (name, bytes) in [("staged", bytes.clone()), ("lent", Bytes::from_owner(memory))] {
        // The node meets the client's devices in the background.
        for round in 0.. {
            let (before, key) = (packets(), format!("{name}/{round}"));
            client.put(&key, bytes.clone(), &options).await.unwrap();
            let sent = packets() - before;
            assert!(client.get(&key).await.unwrap().unwrap().value == bytes, "{key}");
            if sent >= (4 << 20) / 4096 {
                break;
            }
        }
    }
    assert!(client.one_sided_puts() >= 3 && client.lent_puts() >= 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_cable_objects_come_with_the_answer() {
    if !has_devices() {
        return;
    }
    let (_server, client) = node_and_client().await;
    let expected = value(1 << 20, 1);
    client.put("k", expected.clone(), &PutOptions::default()).await.unwrap();
    until_read_by_device(&client, "k", &expected).await;
    let cables = |what: &str| {
        let command = format!("for i in 0 1 2 3; do ip link set cable$i {what}; done");
        assert!(std::process::Command::new("sh").args(["-c", &command]).status().unwrap().success());
    };
    cables("down");
    for round in 0..20 {
        assert!(client.get("k").await.unwrap().unwrap().value == expected);
        client.put(format!("k{round}"), expected.clone(), &PutOptions::default()).await.unwrap();
        assert!(client.get(format!("k{round}")).await.unwrap().unwrap().value == expected);
    }
    let before = client.one_sided_reads();
    cables("up");
    while client.one_sided_reads() == before {
        assert!(client.get("k").await.unwrap().unwrap().value == expected);
        tokio::task::yield_now().await;
    }
}
