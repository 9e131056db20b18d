//! What becomes of objects by their type, and groups that stay and go as one.

use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tidepool_client::{Client, DataType, Existence, PutOptions};

use crate::common::TestServer;

const MIB: usize = 1 << 20;

async fn set(server: &TestServer, body: Value) -> (u16, Value) {
    let (status, answer) = server.admin_post("/v1/types/set", &body.to_string()).await;
    (status, serde_json::from_str(&answer).unwrap())
}

async fn row(server: &TestServer, name: &str) -> Value {
    let (_, report) = server.admin("/v1/types").await;
    let report: Value = serde_json::from_str(&report).unwrap();
    report["types"].as_array().unwrap().iter().find(|row| row["data_type"] == name).unwrap().clone()
}

fn of_type(data_type: DataType) -> PutOptions {
    PutOptions { data_type, ..PutOptions::default() }
}

async fn put(client: &Client, key: &str, length: usize, data_type: DataType) -> Result<(), String> {
    let put = client.put(key, Bytes::from(vec![7; length]), &of_type(data_type)).await;
    put.map(drop).map_err(|error| error.reason().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_become_what_was_said_of_their_type() {
    let server = TestServer::start().await;
    let client = server.client();
    put(&client, "before", 1000, DataType::Weight).await.unwrap();
    let policy = json!({ "data_type": "weight", "copies": 3, "tier": "nvme", "pin": true, "quota": "1MiB" });
    let (status, report) = set(&server, policy).await;
    assert_eq!((status, &report["types"][3]["data_type"]), (200, &json!("weight")), "{report}");
    put(&client, "w", 100_000, DataType::Weight).await.unwrap();
    put(&client, "kv", 100_000, DataType::KvCache).await.unwrap();
    let pins = async |key: &str| {
        let (_, report) = server.admin(&format!("/v1/objects?key={key}")).await;
        serde_json::from_str::<Value>(&report).unwrap()["pins"].as_u64().unwrap()
    };
    assert_eq!((pins("before").await, pins("w").await, pins("kv").await), (0, 1, 0));
    assert_eq!(server.tier("nvme", "objects").await, 1, "that one is durable");
    let mut listed = client.list(b"", 100, "", Some(DataType::Weight)).await.unwrap().objects;
    listed.sort_by(|one, other| one.key.as_bytes().cmp(other.key.as_bytes()));
    assert_eq!(listed.iter().map(|object| object.key.as_bytes()).collect::<Vec<_>>(), [&b"before"[..], b"w"]);
    // Three copies of it would be more, as they are wanted; there is one node.
    assert_eq!(put(&client, "large", 400_000, DataType::Weight).await, Err("QUOTA_EXCEEDED".into()));
    put(&client, "large", 400_000, DataType::KvCache).await.unwrap();
    let weight = row(&server, "weight").await;
    assert_eq!(
        (&weight["bytes"], &weight["quota_bytes"], &weight["copies"]),
        (&json!(101_000), &json!(MIB), &json!(3))
    );

    let refusals = [
        json!({ "data_type": "weights" }),
        json!({ "data_type": "weight", "tier": "disk" }),
        json!({ "data_type": "weight", "copies": 16 }),
        json!({ "data_type": "weight", "quota": "much" }),
    ];
    for body in refusals {
        let (status, answer) = set(&server, body.clone()).await;
        assert_eq!((status, &answer["reason"]), (400, &json!("BAD_TYPE")), "{body}: {answer}");
    }
    // It lasts, until something else is said.
    let server = server.restart().await;
    server.reconciled().await;
    assert_eq!(row(&server, "weight").await, weight);
    set(&server, json!({ "data_type": "weight" })).await;
    put(&server.client(), "large weight", 400_000, DataType::Weight).await.unwrap();
}

/// What objects of a type do not need is not written to the disk.
#[tokio::test(flavor = "multi_thread")]
async fn objects_of_a_type_may_be_for_memory_only() {
    let server = TestServer::start().await;
    let client = server.client();
    set(&server, json!({ "data_type": "activation", "tier": "memory" })).await;
    // A node hears of it with its next heartbeat.
    let mut number = 0;
    let mut fill = async || {
        let before = server.tier("dram", "demotions").await;
        for _ in 0..48 {
            put(&client, &format!("a/{number}"), MIB, DataType::Activation).await.unwrap();
            number += 1;
        }
        server.tier("dram", "demotions").await - before
    };
    let mut rounds = 0;
    while fill().await > 0 {
        rounds += 1;
        assert!(rounds < 50, "activations are demoted still");
    }
    assert!(server.tier("dram", "evictions").await > 0);
}

/// A group is of use as a whole: it is leased and evicted so.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_stays_while_one_of_it_is_leased_and_goes_as_one() {
    let server = TestServer::with(&["nvme.enabled=false"]).await;
    let client = server.client();
    let keys = ["g/0", "g/1", "g/2", "g/3"];
    let options = PutOptions { group: "g".into(), ..PutOptions::default() };
    for key in keys {
        client.put(key, Bytes::from(vec![1; MIB]), &options).await.unwrap();
    }
    let minute = Some(Duration::from_secs(60));
    client.exists_many(&keys[2..3], minute, false).await.unwrap();
    for number in 0..100 {
        put(&client, &format!("k/{number}"), MIB, DataType::KvCache).await.unwrap();
    }
    let present = async || client.exists_many(&keys, None, true).await.unwrap();
    assert_eq!(present().await, [Existence::Present; 4], "one is leased");
    client.release_leases(&keys[2..3]).await.unwrap();
    let mut number = 100;
    loop {
        let found = present().await;
        assert!(found.iter().all(|&one| one == found[0]), "one went alone: {found:?}");
        if found[0] == Existence::Missing {
            break;
        }
        assert!(number < 400, "it is not evicted");
        put(&client, &format!("k/{number}"), MIB, DataType::KvCache).await.unwrap();
        number += 1;
    }
}
