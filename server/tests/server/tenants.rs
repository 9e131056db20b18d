//! Tenants: made by an operator, kept apart, and within their quotas.

use std::time::Duration;

use serde_json::{Value, json};
use tidepool_client::{Client, Existence, PutOutcome};
use tidepool_metadata::catalog::SessionId;
use tidepool_metadata::{ObjectKey, TenantId};
use tidepool_server::node::{ObjectName, PutOptions, RequestIds, Reserve};

use crate::common::TestServer;

const KIB: usize = 1 << 10;

async fn change(server: &TestServer, call: &str, body: Value) -> (u16, Value) {
    let (status, answer) = server.admin_post(&format!("/v1/tenants/{call}"), &body.to_string()).await;
    (status, serde_json::from_str(&answer).unwrap())
}

async fn row(server: &TestServer, name: &str) -> Value {
    let (_, report) = server.admin("/v1/tenants").await;
    let report: Value = serde_json::from_str(&report).unwrap();
    report["tenants"].as_array().unwrap().iter().find(|row| row["name"] == name).unwrap().clone()
}

fn client_of(server: &TestServer, tenant: &str) -> Client {
    Client::builder().endpoint(server.server.addresses().grpc.to_string()).tenant(tenant).build().unwrap()
}

async fn put(client: &Client, key: &str, length: usize) -> Result<PutOutcome, String> {
    let done = client.put(key, vec![7; length].into(), &tidepool_client::PutOptions::default()).await;
    done.map(|done| done.outcome).map_err(|error| error.reason().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_are_created_bounded_and_dropped() {
    let server = TestServer::start().await;
    let client = client_of(&server, "team");
    assert_eq!(put(&client, "k", 10).await, Err("UNKNOWN_TENANT".into()));
    let (status, report) = change(&server, "create", json!({ "name": "team", "bytes": "1MiB" })).await;
    assert_eq!((status, &report["tenants"][1]["name"]), (200, &json!("team")), "{report}");
    assert_eq!(put(&client, "k", 10).await, Ok(PutOutcome::Stored));
    assert_eq!(server.client().exists("k").await.unwrap(), Existence::Missing, "another tenant's");
    let refusals = [
        ("create", json!({ "name": "team" }), (409, "TENANT_EXISTS")),
        ("create", json!({ "name": "default" }), (400, "BAD_TENANT")),
        ("create", json!({ "name": "x".repeat(257) }), (400, "BAD_TENANT")),
        ("create", json!({ "name": "other", "bytes": "many" }), (400, "BAD_SIZE")),
        ("quota", json!({ "name": "nobody" }), (404, "UNKNOWN_TENANT")),
        ("drop", json!({ "name": "nobody" }), (404, "UNKNOWN_TENANT")),
        ("drop", json!({ "name": "default" }), (400, "BAD_TENANT")),
    ];
    for (call, body, (status, reason)) in refusals {
        let answer = change(&server, call, body.clone()).await;
        assert_eq!((answer.0, &answer.1["reason"]), (status, &json!(reason)), "{call} {body}: {answer:?}");
    }
    let (status, _) = change(&server, "quota", json!({ "name": "team", "objects": 1 })).await;
    let bounded = row(&server, "team").await;
    assert_eq!((status, &bounded["quota_objects"], &bounded["quota_bytes"]), (200, &json!(1), &Value::Null));
    let (status, report) = change(&server, "drop", json!({ "name": "team" })).await;
    assert_eq!((status, report["tenants"].as_array().unwrap().len()), (200, 1), "{report}");
    assert_eq!(put(&client, "k", 10).await, Err("UNKNOWN_TENANT".into()));
}

/// A full tenant makes room of its own objects, and of nobody else's.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_tenant_makes_room_of_its_own() {
    let server = TestServer::start().await;
    change(&server, "create", json!({ "name": "team", "bytes": "1MiB", "objects": 100 })).await;
    let (client, other) = (client_of(&server, "team"), server.client());
    for number in 0..20 {
        assert_eq!(put(&other, &format!("other/{number}"), 50 * KIB).await, Ok(PutOutcome::Stored));
    }
    for number in 0..60 {
        assert_eq!(put(&client, &format!("k/{number}"), 50 * KIB).await, Ok(PutOutcome::Stored), "{number}");
        assert_eq!(client.exists(format!("k/{number}")).await.unwrap(), Existence::Present);
    }
    let full = row(&server, "team").await;
    assert!((500 * 1024..=1 << 20).contains(&full["bytes"].as_u64().unwrap()), "{full}");
    for number in 0..20 {
        assert_eq!(other.exists(format!("other/{number}")).await.unwrap(), Existence::Present);
    }
    // What can never fit is refused, and nothing goes for it.
    assert_eq!(put(&client, "large", 1025 * KIB).await, Err("QUOTA_EXCEEDED".into()));
    assert_eq!(row(&server, "team").await, full);
    // What is pinned does not go.
    for number in 0..60 {
        let key = format!("k/{number}");
        if client.exists(&key).await.unwrap() == Existence::Present {
            assert_eq!(client.pin(&[&key]).await.unwrap(), [true]);
        }
    }
    assert_eq!(put(&client, "one more", 600 * KIB).await, Err("QUOTA_EXCEEDED".into()));
    // But what is not does, however much is.
    let young = client.list(b"k/", 100, "", None).await.unwrap().objects.pop().unwrap();
    client.unpin(&[young.key.as_bytes()]).await.unwrap();
    let left = (1 << 20) - row(&server, "team").await["bytes"].as_u64().unwrap();
    assert_eq!(put(&client, "one more", left as usize + 1).await, Ok(PutOutcome::Stored));
    assert_eq!(client.exists(young.key.as_bytes()).await.unwrap(), Existence::Missing);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_full_tenant_what_has_a_soft_pin_goes_last() {
    let server = TestServer::start().await;
    change(&server, "create", json!({ "name": "team", "bytes": "1MiB" })).await;
    let client = client_of(&server, "team");
    let soft = tidepool_client::PutOptions { soft_pin: Some(Duration::from_secs(3600)), ..Default::default() };
    for number in 0..10 {
        client.put(format!("soft/{number}"), vec![1; 50 * KIB].into(), &soft).await.unwrap();
    }
    for number in 0..100 {
        assert_eq!(put(&client, &format!("k/{number}"), 50 * KIB).await, Ok(PutOutcome::Stored), "{number}");
    }
    for number in 0..10 {
        assert_eq!(client.exists(format!("soft/{number}")).await.unwrap(), Existence::Present, "{number}");
    }
    // Where nothing else is left, they go.
    assert_eq!(put(&client, "large", 900 * KIB).await, Ok(PutOutcome::Stored));
}

/// Puts under way count: a node takes no bytes that would be refused at the end.
#[tokio::test(flavor = "multi_thread")]
async fn puts_under_way_count_towards_the_quota() {
    let server = TestServer::start().await;
    change(&server, "create", json!({ "name": "team", "bytes": "1MiB" })).await;
    let service = server.server.node().service();
    let reserve = |key: &str| {
        let name = ObjectName { tenant: TenantId(1), key: ObjectKey::new(key.as_bytes()).unwrap() };
        service.reserve(name, 600 << 10, PutOptions::default())
    };
    let first = reserve("a").await.unwrap();
    assert!(matches!(first, Reserve::Ready(_)));
    assert_eq!(reserve("b").await.err().map(|error| error.reason().to_owned()), Some("QUOTA_EXCEEDED".into()));
    // A repetition: its first attempt may have what is taken.
    let ids = RequestIds { session: SessionId(7), first: 1, acknowledged: 0, again: true };
    let again = PutOptions { ids: Some(ids), ..PutOptions::default() };
    let name = ObjectName { tenant: TenantId(1), key: ObjectKey::new(b"a").unwrap() };
    assert!(matches!(service.reserve(name, 600 << 10, again).await, Ok(Reserve::Ready(_))));
    drop(first);
    assert!(matches!(reserve("b").await, Ok(Reserve::Ready(_))));
}
