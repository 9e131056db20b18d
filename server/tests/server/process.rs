//! Starting and failing to start: errors say what is in the way and what to do, before any address is published.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{TestServer, refusal};
use prost::Message as _;
use tidepool_client::{PutOptions, RemoveOutcome};
use tidepool_metadata::proto;

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

/// B058: a port that somebody else has.
#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_named_with_what_to_do() {
    let server = TestServer::start().await;
    let taken = server.server.addresses().grpc;
    for field in ["grpc.listen", "admin.listen", "engine.listen"] {
        let folder = tempfile::tempdir().unwrap();
        let data = format!("data='{}'", folder.path().join("data").display());
        let error = refusal(&settings(&server, &[data, format!("{field}='{taken}'")])).await;
        assert_eq!(error.reason(), "LISTEN", "{field}");
        let text = error.to_string();
        assert!(text.contains(&taken.to_string()) && text.contains("choose another port"), "{field}: {text}");
        assert_eq!(sockets(&folder.path().join("data")), Vec::<PathBuf>::new(), "{field}: no address was published");
    }
    assert_eq!(sockets(&server.data()).len(), 3, "what is looked for");
}

/// The sockets in a data folder.
fn sockets(data: &Path) -> Vec<PathBuf> {
    use std::os::unix::fs::FileTypeExt as _;
    let entries = std::fs::read_dir(data).unwrap().map(Result::unwrap);
    entries.filter(|entry| entry.file_type().unwrap().is_socket()).map(|entry| entry.path()).collect()
}

/// Root may write everywhere; not so where there are no folders to be made.
#[tokio::test(flavor = "multi_thread")]
async fn a_path_that_can_not_be_written_is_named() {
    let server = TestServer::start().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "in the way").unwrap();
    let beneath = file.join("beneath");
    let data = format!("data='{}'", folder.path().join("data").display());
    let wrong = |field: &str| format!("{field}='{}'", beneath.display());
    for (settings_, reason) in [
        (vec![wrong("data")], "FOLDER_UNUSABLE"),
        (vec![data.clone(), wrong("nvme.path")], "NVME_UNUSABLE"),
        (vec![data.clone(), wrong("dram.folder")], "DRAM_UNUSABLE"),
    ] {
        let error = refusal(&settings(&server, &settings_)).await;
        assert_eq!(error.reason(), reason, "{error}");
        assert!(error.to_string().contains("beneath"), "{error}");
    }
    // A file that is not ours is not written to.
    let nvme = folder.path().join("nvme");
    std::fs::create_dir(&nvme).unwrap();
    std::fs::write(nvme.join("regions.dat"), "not ours").unwrap();
    let error = refusal(&settings(&server, &[data, format!("nvme.path='{}'", nvme.display())])).await;
    assert_eq!(sockets(&folder.path().join("data")), Vec::<PathBuf>::new());
    assert_eq!(error.reason(), "NVME_UNUSABLE");
    assert!(error.to_string().contains("regions.dat"), "{error}");
    assert_eq!(std::fs::read_to_string(nvme.join("regions.dat")).unwrap(), "not ours");
}

/// Machines of others ask these before they send anything, and tools which calls there are.
#[tokio::test(flavor = "multi_thread")]
async fn health_and_reflection_answer() {
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    let server = TestServer::start().await;
    let address = format!("http://{}", server.server.addresses().grpc);
    let channel = tonic::transport::Channel::from_shared(address).unwrap().connect().await.unwrap();
    let mut health = HealthClient::new(channel.clone());
    for service in ["", "tidepool.v1.Store"] {
        let request = HealthCheckRequest { service: service.into() };
        let status = health.check(request).await.unwrap().into_inner().status();
        assert_eq!(status, ServingStatus::Serving, "{service:?}");
    }
    let request = tonic_reflection::pb::v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let requests = futures::stream::iter([request]);
    let answers = ServerReflectionClient::new(channel).server_reflection_info(requests).await;
    let mut answers = answers.unwrap().into_inner();
    let answer = answers.message().await.unwrap().unwrap().message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("{answer:?}") };
    assert!(list.service.iter().any(|service| service.name == "tidepool.v1.Store"), "{list:?}");
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
    // What has no place on the disk when that goes makes room by being forgotten.
    while server.tier("dram", "used").await > 30 << 20 || server.tier("nvme", "reserved").await > 0 {
        tokio::task::yield_now().await;
    }
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
    // What tells a leak from memory that the allocator keeps; the heap is the program's own, and this is a test's.
    let resident = metrics.lines().find_map(|line| line.strip_prefix("tidepool_process_resident_bytes "));
    assert!(resident.unwrap().parse::<u64>().unwrap() > 1 << 20);
    assert!(metrics.contains("\ntidepool_heap_allocated_bytes "), "{metrics}");
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
    // What a node has not freed yet when the catalog is lost comes back.
    let freed = async {
        while server.tier("dram", "objects").await + server.tier("nvme", "objects").await > 69 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), freed).await.expect("the removed object is freed");
    let (stopped, data) = server.stop().await;

    std::fs::remove_dir_all(data.join("catalog")).unwrap();
    let error = stopped.refusal().await;
    assert_eq!(error.reason(), "CATALOG_LOST");
    assert!(error.to_string().contains("admin rebuild"), "{error}");

    tidepool_server::folder::DataFolder::open(&data).unwrap().begin_rebuild(&[]).unwrap();
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

/// A small disk of this test's own.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// `None`, said on standard error, where this user may not mount.
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let arguments = ["-t", "tmpfs", "-o", "size=256m", "tidepool-test"];
        let mounted = Command::new("mount").args(arguments).arg(folder.path()).status();
        if !mounted.is_ok_and(|status| status.success()) {
            eprintln!("skipped: needs root");
            return None;
        }
        Some(Self(folder))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Leaves so many bytes free.
    fn leave(&self, free: u64) {
        let disk = rustix::fs::statvfs(self.path()).unwrap();
        let filler = std::fs::OpenOptions::new().create(true).append(true).open(self.filler()).unwrap();
        let (length, bytes) = (filler.metadata().unwrap().len(), disk.f_bavail * disk.f_frsize - free);
        rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), length, bytes).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.path().join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _gone = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// Why a put is refused; `None` if it is not.
async fn put_refusal(server: &TestServer, key: String) -> Option<String> {
    let request = proto::PutRequest { key: key.into(), value: vec![1; 1000].into(), ..Default::default() };
    let status = server.raw().await.put(request).await.err()?;
    Some(proto::ErrorDetail::decode(status.details()).unwrap().reason)
}

/// Puts until one ends like that: the disk is looked at ten times a second at most.
async fn until_puts_end(server: &TestServer, name: &str, expected: Option<&str>) {
    let waiting = async {
        for n in 0_u64.. {
            if put_refusal(server, format!("{name}/{n}")).await.as_deref() == expected {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), waiting).await.expect("puts end like that");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_puts_are_refused_and_objects_can_be_read_and_removed_also_after_a_restart() {
    let Some(disk) = SmallDisk::mount() else { return };
    let data = disk.path().join("data");
    let ballast = data.join("catalog/ballast");
    let server = TestServer::with(&["nvme.enabled=false", &format!("data='{}'", data.display())]).await;
    let client = server.client();
    for n in 0..4 {
        client.put(format!("k/{n}"), vec![n; 1000].into(), &PutOptions::default()).await.unwrap();
    }
    assert_eq!(ballast.metadata().unwrap().len(), 8 << 20);
    disk.leave(5 << 20);
    until_puts_end(&server, "full", Some("CATALOG_DISK_FULL")).await;
    assert!(ballast.exists(), "what is left is not touched by refusing");
    assert!(client.get("k/0").await.unwrap().unwrap().value == vec![0; 1000]);
    assert_eq!(client.remove("k/0", false).await.unwrap(), RemoveOutcome::Removed);
    let (_, report) = server.admin("/v1/raft").await;
    assert!(report.contains("\"disk_shortage\":"), "{report}");
    // Somebody else takes the rest.
    disk.leave(1 << 20);
    until_puts_end(&server, "fuller", Some("CATALOG_DISK_FULL")).await;
    while ballast.exists() {
        until_puts_end(&server, "fuller", Some("CATALOG_DISK_FULL")).await;
    }
    assert_eq!(client.remove("k/1", false).await.unwrap(), RemoveOutcome::Removed);
    assert_eq!(server.tier("dram", "reserved").await, 0);

    let (stopped, _) = server.stop().await;
    // What the end of the last life gave back is taken too.
    disk.leave(6 << 20);
    let server = stopped.start().await;
    let client = server.client();
    assert!(client.get("k/1").await.unwrap().is_none());
    assert!(client.get("k/2").await.unwrap().unwrap().value == vec![2; 1000]);
    assert_eq!(put_refusal(&server, "restarted".into()).await.as_deref(), Some("CATALOG_DISK_FULL"));
    assert_eq!(client.remove("k/2", false).await.unwrap(), RemoveOutcome::Removed);
    std::fs::remove_file(disk.filler()).unwrap();
    until_puts_end(&server, "room", None).await;
    assert!(ballast.exists());
    server.stop().await;
}
