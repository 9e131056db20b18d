//! Starting and failing to start: errors say what is in the way and what to do, before any address is published.

use crate::common::{TestServer, refusal};
use tidepool_client::{PutOptions, RemoveOutcome};

fn settings(server: &TestServer, more: &[String]) -> Vec<String> {
    let dram = server.config.dram.folder.as_ref().unwrap().display();
    let mut all = vec![
        "grpc.listen='127.0.0.1:0'".to_owned(),
        "admin.listen='127.0.0.1:0'".to_owned(),
        "dram.capacity=16MiB".to_owned(),
        "nvme.capacity=64MiB".to_owned(),
        "nvme.region_bytes=1MiB".to_owned(),
        "store.slice_bytes=256KiB".to_owned(),
        format!("dram.folder='{dram}'"),
    ];
    all.extend(more.iter().cloned());
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_process_on_the_same_folder_is_refused() {
    let server = TestServer::start().await;
    let error = refusal(&settings(&server, &[format!("data='{}'", server.data().display())])).await;
    assert_eq!(error.reason(), "FOLDER_UNUSABLE");
    assert!(error.to_string().contains("in use by another process"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_named_with_what_to_do() {
    let server = TestServer::start().await;
    let folder = tempfile::tempdir().unwrap();
    let grpc = server.server.addresses().grpc;
    let data = format!("data='{}'", folder.path().join("data").display());
    let error = refusal(&settings(&server, &[data, format!("grpc.listen='{grpc}'")])).await;
    assert_eq!(error.reason(), "LISTEN");
    let text = error.to_string();
    assert!(text.contains(&grpc.to_string()) && text.contains("another process"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_is_not_there_is_refused_at_start() {
    let server = TestServer::start().await;
    let folder = tempfile::tempdir().unwrap();
    let data = format!("data='{}'", folder.path().join("data").display());
    let error = refusal(&settings(&server, &[data, "dram.capacity=60TiB".into()])).await;
    assert_eq!(error.reason(), "DRAM_UNUSABLE");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_data_folders_of_the_future_are_refused() {
    let server = TestServer::start().await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("VERSION"), "99\n").unwrap();
    let error = refusal(&settings(&server, &[format!("data='{}'", folder.path().display())])).await;
    assert!(error.to_string().contains("newer"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nvme_is_detached_and_attached_while_serving() {
    let server = TestServer::start().await;
    let client = server.client();
    for n in 0..60 {
        client.put(format!("k/{n}"), vec![n; 1 << 20].into(), &PutOptions::default()).await.unwrap();
    }
    assert!(server.tier("nvme", "objects").await > 10);
    let (status, body) = server.admin_post("/v1/nvme/detach", "{}").await;
    assert_eq!(status, 200, "{body}");
    let newest = client.get("k/59").await.unwrap().unwrap();
    assert!(newest.value == vec![59; 1 << 20]);
    let (status, body) = server.admin_post("/v1/nvme/attach", "{}").await;
    assert_eq!(status, 200, "{body}");
    for n in 0..60 {
        assert!(client.get(format!("k/{n}")).await.unwrap().unwrap().value == vec![n; 1 << 20], "{n}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn admin_answers_what_operators_ask() {
    let server = TestServer::start().await;
    let client = server.client();
    client.put("k", vec![1; 300_000].into(), &PutOptions::default()).await.unwrap();
    let (status, recovery) = server.admin("/v1/recovery").await;
    assert!(status == 200 && recovery.contains("hot_keys") && recovery.contains("disk"), "{recovery}");
    let (status, metrics) = server.admin("/metrics").await;
    assert!(status == 200 && metrics.contains("tidepool_tier_used_bytes{tier=\"dram\"}"), "{metrics}");
    let (status, page) = server.admin("/").await;
    assert!(status == 200 && page.contains("<title>Tidepool"), "{page}");
    assert_eq!(server.admin("/readyz").await.0, 200);
    assert_eq!(server.admin("/v1/objects?key=absent").await.0, 404);
    assert_eq!(server.admin("/v1/objects").await.0, 400);
    let (_, info) = server.admin("/v1/info").await;
    assert!(info.contains("\"leader\""), "{info}");
}

/// Puts `count` objects larger than one slice and smaller ones, more than DRAM holds, so that both tiers have some.
async fn fill(client: &tidepool_client::Client, count: u8) {
    for n in 0..count {
        let length = if n % 2 == 0 { 1 << 20 } else { 100_000 };
        client.put(format!("k/{n}"), vec![n; length].into(), &PutOptions::default()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_catalog_is_refused_and_rebuilt_from_the_tiers() {
    let server = TestServer::start().await;
    let client = server.client();
    fill(&client, 70).await;
    client.put("k/1", vec![7; 5000].into(), &PutOptions { upsert: true, ..PutOptions::default() }).await.unwrap();
    assert_eq!(client.remove("k/2", false).await.unwrap(), RemoveOutcome::Removed);
    let on_nvme = server.tier("nvme", "objects").await;
    assert!(on_nvme > 10);
    let (stopped, data) = server.stop().await;

    std::fs::remove_dir_all(data.join("catalog")).unwrap();
    let error = stopped.refusal().await;
    assert_eq!(error.reason(), "CATALOG_LOST");
    assert!(error.to_string().contains("admin rebuild"), "{error}");

    tidepool_server::folder::DataFolder::open(&data).unwrap().begin_rebuild().unwrap();
    let server = stopped.start().await;
    server.reconciled().await;
    let client = server.client();
    for n in 0..70 {
        let found = client.get(format!("k/{n}")).await.unwrap().map(|got| got.value);
        let expected = match n {
            1 => Some(vec![7; 5000]),
            2 => None,
            n => Some(vec![n; if n % 2 == 0 { 1 << 20 } else { 100_000 }]),
        };
        assert!(found.as_deref() == expected.as_deref(), "k/{n}");
    }
    let (_, recovery) = server.admin("/v1/recovery").await;
    assert!(recovery.contains("\"adopted\":69"), "{recovery}");
    // The rebuilt catalog is one like any other.
    client.put("new", vec![1; 10].into(), &PutOptions::default()).await.unwrap();
    let server = server.restart().await;
    server.reconciled().await;
    assert!(server.client().get("new").await.unwrap().is_some());
    assert!(server.client().get("k/69").await.unwrap().is_some());
}
