//! Certificates for tests.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tidepool_transfer::{Settings, Tls};

use super::settings;

/// Signs certificates of nodes.
pub(crate) struct Authority(pub(crate) CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().expect("key")).expect("signed"))
    }

    /// A node's certificate for a name, to be used with peers whose certificates bear `peers`.
    pub(crate) fn tls(&self, name: &str, peers: Option<&str>) -> Tls {
        let key = KeyPair::generate().expect("key");
        let params = CertificateParams::new(vec![name.to_owned()]).expect("parameters");
        let certificate = params.signed_by(&key, &self.0).expect("signed");
        let (chain, authority) = (certificate.pem(), self.0.pem());
        let tls = Tls::from_pem(
            chain.as_bytes(),
            key.serialize_pem().as_bytes(),
            authority.as_bytes(),
            peers.map(str::to_owned),
        );
        tls.expect("usable")
    }

    /// Settings of a node whose peers must have a certificate from here too.
    pub(crate) fn settings(&self) -> Settings {
        let tls = Some(self.tls("tidepool.test", Some("tidepool.test")));
        Settings { same_host: false, tls, ..settings() }
    }
}
