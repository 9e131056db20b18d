//! TLS between native clients and the node's engine: with certificates from one authority, and not otherwise.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tidepool_client::{Client, ClientSettings, PutOptions, Tls};

use crate::common::{TestServer, refusal};

/// Certificate, key and authority in files.
struct Files([PathBuf; 3]);

impl Files {
    /// Of a host that is called so, from an authority of its own making.
    fn new(folder: &Path, authority: &CertifiedIssuer<'_, KeyPair>, name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, authority).unwrap();
        let write = |what: &str, text: String| {
            let path = folder.join(format!("{name}.{what}"));
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            path
        };
        let files = [certificate.pem(), key.serialize_pem(), authority.pem()];
        let [certificate, key, authority] = files;
        Self([write("certificate", certificate), write("key", key), write("authorities", authority)])
    }

    fn settings(&self) -> [String; 3] {
        let Self([certificate, key, authorities]) = self;
        [("certificate", certificate), ("key", key), ("authorities", authorities)]
            .map(|(what, path)| format!("engine.tls_{what}='{}'", path.display()))
    }

    fn tls(&self, name: Option<&str>) -> Tls {
        let Self([certificate, key, authorities]) = self;
        Tls::from_files(certificate, key, authorities, name.map(str::to_owned)).unwrap()
    }
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Puts and gets; how many calls went by the engine.
async fn engine_calls(server: &TestServer, key: &str, engine_tls: Option<Tls>) -> u64 {
    let settings = ClientSettings { engine_tls, same_host: false, local_reads: false, ..ClientSettings::default() };
    let endpoint = server.server.addresses().grpc.to_string();
    let client = Client::builder().endpoint(endpoint).settings(settings).build().unwrap();
    let value: bytes::Bytes = (0..3_000_001_u32).map(|index| (index % 251) as u8).collect();
    client.put(key, value.clone(), &PutOptions::default()).await.unwrap();
    assert!(client.get(key).await.unwrap().unwrap().value == value);
    client.native_calls()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_takes_clients_with_certificates_of_its_authorities_only() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (authority(), authority());
    let node = Files::new(folder.path(), &ours, "node.test");
    let settings = node.settings();
    let server = TestServer::with(&settings.each_ref().map(String::as_str)).await;
    let client = Files::new(folder.path(), &ours, "client.test");
    assert!(engine_calls(&server, "ours", Some(client.tls(Some("node.test")))).await > 0);
    // Without one, from elsewhere, or to a node of another name: all goes by gRPC.
    assert_eq!(engine_calls(&server, "none", None).await, 0);
    let stranger = Files::new(folder.path(), &theirs, "stranger.test");
    assert_eq!(engine_calls(&server, "theirs", Some(stranger.tls(Some("node.test")))).await, 0);
    assert_eq!(engine_calls(&server, "name", Some(client.tls(Some("other.test")))).await, 0);
    assert_eq!(engine_calls(&server, "host", Some(client.tls(None))).await, 0, "the node is not called 127.0.0.1");
    let plain = TestServer::start().await;
    assert_eq!(engine_calls(&plain, "plain", Some(client.tls(Some("node.test")))).await, 0);
    assert!(engine_calls(&server, "again", Some(client.tls(Some("node.test")))).await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_that_can_not_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let good = Files::new(folder.path(), &authority(), "node.test");
    let data = format!("data='{}'", folder.path().join("data").display());
    for place in 0..3 {
        let path = &good.0[place];
        let text = std::fs::read(path).unwrap();
        let field = ["engine.tls_certificate", "engine.tls_key", "engine.tls_authorities"][place];
        let refused = async || {
            let mut settings =
                vec![data.clone(), "grpc.listen='127.0.0.1:0'".into(), "admin.listen='127.0.0.1:0'".into()];
            settings.extend(good.settings());
            let error = refusal(&settings).await;
            assert!(error.reason() == "BAD_CONFIG" && error.to_string().contains(field), "{error}");
            error.to_string()
        };
        std::fs::write(path, "nonsense").unwrap();
        refused().await;
        std::fs::remove_file(path).unwrap();
        let said = refused().await;
        assert!(said.contains(path.to_str().unwrap()), "{said}");
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644)).unwrap();
        if place == 1 {
            let said = refused().await;
            assert!(said.contains("chmod 600"), "{said}");
        }
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
}
