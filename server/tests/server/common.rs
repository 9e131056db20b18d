//! A whole server in this process, on temporary folders and free ports.

use std::path::PathBuf;

use tidepool_client::Client;
use tidepool_client::raw::store_client::StoreClient;
use tidepool_server::{Config, Error, Server};
use tonic::transport::Channel;

/// A running server and where its things are.
pub(crate) struct TestServer {
    pub(crate) server: Server,
    pub(crate) config: Config,
    folder: tempfile::TempDir,
    shm: Shm,
}

/// A server that does not run, and all that it left.
pub(crate) struct Stopped {
    config: Config,
    folder: tempfile::TempDir,
    shm: Shm,
}

impl Stopped {
    pub(crate) async fn start(self) -> TestServer {
        let Self { config, folder, shm } = self;
        let server = started(&config).await.unwrap();
        TestServer { server, config, folder, shm }
    }

    pub(crate) fn configure(&mut self, change: impl FnOnce(&mut Config)) {
        change(&mut self.config);
    }

    /// What starting is refused with.
    pub(crate) async fn refusal(&self) -> Error {
        started(&self.config).await.err().expect("refused")
    }
}

/// A folder on tmpfs for segments.
struct Shm(tempfile::TempDir);

impl TestServer {
    pub(crate) async fn start() -> Self {
        Self::with(&[]).await
    }

    /// Starts with settings over the small ones of tests.
    pub(crate) async fn with(settings: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shm = Shm(tempfile::tempdir_in("/dev/shm").unwrap());
        let mut all = vec![
            "grpc.listen='127.0.0.1:0'".to_owned(),
            "admin.listen='127.0.0.1:0'".to_owned(),
            "dram.capacity=32MiB".to_owned(),
            "nvme.capacity=64MiB".to_owned(),
            "nvme.region_bytes=1MiB".to_owned(),
            "store.slice_bytes=256KiB".to_owned(),
            format!("dram.folder='{}'", shm.0.path().display()),
            format!("data='{}'", folder.path().join("data").display()),
        ];
        all.extend(settings.iter().map(ToString::to_string));
        let config = tidepool_server::config::load(None, [], &all).unwrap();
        let server = started(&config).await.unwrap();
        Self { server, config, folder, shm }
    }

    pub(crate) fn client(&self) -> Client {
        Client::builder().endpoint(self.server.addresses().grpc.to_string()).build().unwrap()
    }

    /// The generated stub, to say what the client would never say.
    pub(crate) async fn raw(&self) -> StoreClient<Channel> {
        StoreClient::connect(format!("http://{}", self.server.addresses().grpc)).await.unwrap()
    }

    /// `GET` of admin HTTP: status and body.
    pub(crate) async fn admin(&self, path: &str) -> (u16, String) {
        http(self.server.addresses().admin.unwrap(), "GET", path, "").await
    }

    /// `POST` of admin HTTP: status and body.
    pub(crate) async fn admin_post(&self, path: &str, body: &str) -> (u16, String) {
        http(self.server.addresses().admin.unwrap(), "POST", path, body).await
    }

    /// A number of a tier's report.
    pub(crate) async fn tier(&self, tier: &str, field: &str) -> u64 {
        let (status, body) = self.admin("/v1/tiers").await;
        assert_eq!(status, 200, "{body}");
        let report: serde_json::Value = serde_json::from_str(&body).unwrap();
        let tiers = report["tiers"].as_array().unwrap();
        tiers.iter().find(|row| row["tier"] == tier).unwrap()[field].as_u64().unwrap()
    }

    pub(crate) async fn assert_nothing_stored(&self) {
        for tier in ["dram", "nvme"] {
            let numbers = [self.tier(tier, "used").await, self.tier(tier, "reserved").await];
            assert_eq!(numbers, [0, 0], "{tier}");
        }
    }

    /// Stops cleanly and starts again on the same folders.
    pub(crate) async fn restart(self) -> Self {
        self.stop().await.0.start().await
    }

    /// Stops cleanly; answers the data folder too.
    pub(crate) async fn stop(self) -> (Stopped, PathBuf) {
        let data = self.data();
        let Self { server, config, folder, shm } = self;
        server.shutdown().await;
        (Stopped { config, folder, shm }, data)
    }

    /// Waits until node and catalog agree on what is here.
    pub(crate) async fn reconciled(&self) {
        while self.server.node().service().reconciled().is_none() {
            tokio::task::yield_now().await;
        }
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }
}

/// A server that serves everything.
async fn started(config: &Config) -> Result<Server, Error> {
    let server = Server::start(config.clone()).await?;
    match server.ready().await {
        Ok(()) => Ok(server),
        Err(error) => {
            server.shutdown().await;
            Err(error)
        }
    }
}

/// What starting with these settings is refused with.
pub(crate) async fn refusal(settings: &[String]) -> Error {
    let config = tidepool_server::config::load(None, [], settings).unwrap();
    started(&config).await.err().expect("refused")
}

async fn http(address: std::net::SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut reply = String::new();
    socket.read_to_string(&mut reply).await.unwrap();
    let status = reply.split(' ').nth(1).unwrap().parse().unwrap();
    let body = reply.split_once("\r\n\r\n").unwrap().1;
    (status, body.to_owned())
}
