//! Loads that measure a store find what is wrong with it.

use std::time::Duration;

use tidepool_client::PutOptions;
use tidepool_client::workload::{LoadOperation, StoreLoad};

use crate::common::TestServer;

/// One object has other bytes than it should, one is missing, one is too short: a load that compares says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_compares_finds_wrong_and_missing_objects() {
    let server = TestServer::start().await;
    let client = server.client();
    let load = StoreLoad {
        operation: LoadOperation::Get,
        block_bytes: 5000,
        batch: 4,
        threads: 2,
        duration: Duration::from_millis(300),
        verify: true,
        lendable: false,
        objects: 8,
        prefix: "load".into(),
    };
    let options = PutOptions::default();
    let put = |key: &'static str, length| client.put(key, vec![7; length].into(), &options);
    load.fill(&client).await.unwrap();
    client.remove("load/read/2", false).await.unwrap();
    client.remove("load/read/3", false).await.unwrap();
    client.remove("load/read/5", false).await.unwrap();
    put("load/read/3", 5000).await.unwrap();
    put("load/read/5", 4999).await.unwrap();
    for operation in [LoadOperation::Get, LoadOperation::GetBatch] {
        let (load, client) = (StoreLoad { operation, ..load.clone() }, client.clone());
        let runtime = tokio::runtime::Handle::current();
        let report = tokio::task::spawn_blocking(move || load.run(&runtime, &client)).await.unwrap();
        let words = report.remarks.join("\n");
        assert!(report.wrong > 0 && !report.is_clean(), "{report:?}");
        assert!(words.contains("load/read/3: block 3 has 0x07 at byte 0") && words.contains("4999 bytes"), "{words}");
        assert!(report.missing > 0 && report.errors == 0, "{report:?}");
    }
    // Without comparing, only what costs nothing to see is seen.
    let quick = StoreLoad { verify: false, ..load.clone() };
    let (runtime, of_load) = (tokio::runtime::Handle::current(), client.clone());
    let report = tokio::task::spawn_blocking(move || quick.run(&runtime, &of_load)).await.unwrap();
    assert!(report.wrong > 0 && report.errors == 0 && !report.remarks.is_empty(), "{report:?}");
    assert!(report.remarks.iter().all(|remark| remark.contains("4999 bytes")), "{report:?}");
    // By one thread: while it lends the memory, the puts of another would go another way.
    let put =
        StoreLoad { operation: LoadOperation::Put, block_bytes: 50_000, lendable: true, threads: 1, ..load.clone() };
    let (runtime, of_load) = (tokio::runtime::Handle::current(), client.clone());
    let report = tokio::task::spawn_blocking(move || put.run(&runtime, &of_load)).await.unwrap();
    assert!(report.is_clean() && report.lent_puts == report.calls && report.calls > 0, "{report:?}");
    load.clear(&client).await.unwrap();
    assert_eq!(client.list(b"", 10, "", None).await.unwrap().objects, []);
}
