//! How two nodes prove to each other that they know the cluster's secret, without saying it.
//!
//! Each side gives 32 random bytes and a proof over both: HMAC-SHA-256 under the secret of a word for its side, both random
//! values, and who talks to whom. A proof is good for one connection, in one direction, for one lane: to listen in, to send
//! it again or to reflect it gains nothing. Without a secret the key is empty, and the proof shows nothing: then only
//! loopback is listened to, or the operator said that everybody may come in.

use std::sync::Arc;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use tidepool_metadata::catalog::COMMAND_VERSION;
use tidepool_metadata::{ErrorKind, Incarnation, NodeId};

use super::wire;
use crate::error::Error;

/// Version of the protocol between nodes: the handshake's, and that of the commands that go to the leader. A command that a
/// member can't read would end it, so who writes another version is not let in.
pub(super) const VERSION: u32 = (2 << 8) + COMMAND_VERSION as u32;
/// Length of a random value, in bytes.
pub(super) const NONCE_BYTES: usize = 32;

/// The cluster's secret; empty if there is none.
#[derive(Clone, Default)]
pub(crate) struct Secret(Arc<[u8]>);

impl Secret {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    fn mac(&self, side: &[u8], hello: &wire::Hello, welcome: &wire::Welcome) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("any length of key will do");
        // Each part has its length before it, so that no two exchanges give the same bytes.
        let numbers = |numbers: &[u64]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
        let caller = numbers(&[
            hello.node.into(),
            hello.incarnation.into(),
            hello.cluster,
            hello.epoch.into(),
            hello.lane.into(),
        ]);
        let node = numbers(&[welcome.node.into(), welcome.incarnation.into(), welcome.cluster, welcome.epoch.into()]);
        for part in [side, &hello.nonce, &welcome.nonce, &caller, hello.address.as_bytes(), &node] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    /// The node's proof.
    pub(super) fn node_proof(&self, hello: &wire::Hello, welcome: &wire::Welcome) -> Vec<u8> {
        self.mac(b"node", hello, welcome).finalize().into_bytes().to_vec()
    }

    /// The caller's proof.
    pub(super) fn caller_proof(&self, hello: &wire::Hello, welcome: &wire::Welcome) -> Vec<u8> {
        self.mac(b"caller", hello, welcome).finalize().into_bytes().to_vec()
    }

    /// Compares in constant time.
    pub(super) fn check_node(&self, hello: &wire::Hello, welcome: &wire::Welcome) -> Result<(), Error> {
        self.mac(b"node", hello, welcome).verify_slice(&welcome.proof).map_err(|_| foreign_secret())
    }

    /// Compares in constant time.
    pub(super) fn check_caller(&self, hello: &wire::Hello, welcome: &wire::Welcome, proof: &[u8]) -> Result<(), Error> {
        self.mac(b"caller", hello, welcome).verify_slice(proof).map_err(|_| foreign_secret())
    }
}

/// Who this node is, to others.
#[derive(Clone, Debug)]
pub(crate) struct Myself {
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
    /// 0 while it has none.
    pub(crate) cluster: u64,
    pub(crate) epoch: u32,
    /// Where it can be reached.
    pub(crate) address: String,
}

impl Myself {
    pub(super) fn hello(&self, lane: u8) -> Result<wire::Hello, Error> {
        Ok(wire::Hello {
            version: VERSION,
            node: self.node.0,
            incarnation: self.incarnation.0,
            cluster: self.cluster,
            epoch: self.epoch,
            address: self.address.clone(),
            lane: lane.into(),
            nonce: nonce()?,
        })
    }
}

/// Refuses callers whose messages this node would not understand.
pub(super) fn check_version(hello: &wire::Hello) -> Result<(), Error> {
    if hello.version == VERSION {
        return Ok(());
    }
    let message = format!(
        "this node speaks version {VERSION:#x} of the protocol between nodes, the caller {:#x}: both need the same version of \
         the program",
        hello.version
    );
    Err(Error::new(ErrorKind::Invalid, "PEER_PROTOCOL", message))
}

/// Random bytes for one exchange.
pub(super) fn nonce() -> Result<bytes::Bytes, Error> {
    let mut bytes = vec![0; NONCE_BYTES];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(ErrorKind::Internal, "RANDOM", format!("draw random bytes: {error}")))?;
    Ok(bytes.into())
}

fn foreign_secret() -> Error {
    let message = "the other node does not know this cluster's secret: both need the same cluster.secret_file";
    Error::new(ErrorKind::Denied, "FOREIGN_SECRET", message.into()).field("cluster.secret_file")
}

/// The other node belongs to another cluster.
pub(super) fn foreign_cluster(found: u64, cluster: u64) -> Error {
    let message =
        format!("the other node is of cluster {found:016x}, this one of {cluster:016x}: a node belongs to one cluster");
    Error::new(ErrorKind::Conflict, "FOREIGN_CLUSTER", message)
}

/// The other node is of another catalog of the same cluster.
pub(super) fn foreign_epoch(found: u32, epoch: u32) -> Error {
    let message = format!(
        "the other node is of epoch {found}, this one of epoch {epoch}: the catalog was rebuilt since; whoever is older \
         joins with an empty folder"
    );
    Error::new(ErrorKind::Conflict, "CATALOG_EPOCH", message)
}

/// An operator removed the caller from the cluster.
pub(crate) fn removed(node: NodeId) -> Error {
    let message = format!(
        "node {node} was removed from this cluster for good: start it over an empty data folder, and it joins as another node"
    );
    Error::new(ErrorKind::Conflict, "REMOVED", message)
}

/// Another process has the caller's identity, in the same life or a later one.
pub(super) fn taken(node: NodeId, incarnation: Incarnation, other: &str) -> Error {
    let message = format!(
        "node {node} is at {other} in this life ({}) or a later one: the data folder was copied; a node has one folder, and the \
         other one starts over an empty one",
        incarnation.0
    );
    Error::new(ErrorKind::Conflict, "IDENTITY_TAKEN", message)
}

/// The other side does not keep to the protocol, or speaks another version of it.
pub(super) fn unknown_protocol(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, "PEER_PROTOCOL", format!("the other node's {what} can't be understood"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange() -> (wire::Hello, wire::Welcome) {
        let myself =
            Myself { node: NodeId(1), incarnation: Incarnation(2), cluster: 3, epoch: 0, address: "a:1".into() };
        let welcome =
            wire::Welcome { node: 9, incarnation: 1, cluster: 3, nonce: vec![7; 32].into(), ..Default::default() };
        (myself.hello(0).expect("random bytes"), welcome)
    }

    #[test]
    fn who_writes_other_commands_is_refused_and_told_so() {
        let (hello, _) = exchange();
        assert!(check_version(&hello).is_ok());
        let error = check_version(&wire::Hello { version: VERSION + 1, ..hello }).expect_err("refused");
        assert!(error.reason() == "PEER_PROTOCOL" && error.to_string().contains("same version"), "{error}");
    }

    #[test]
    fn only_the_same_secret_over_the_same_exchange_is_a_proof() {
        let (secret, other) = (Secret::new(b"0123456789abcdef"), Secret::new(b"0123456789abcdeF"));
        let (hello, mut welcome) = exchange();
        welcome.proof = secret.node_proof(&hello, &welcome).into();
        let proof = secret.caller_proof(&hello, &welcome);
        assert!(secret.check_node(&hello, &welcome).is_ok() && secret.check_caller(&hello, &welcome, &proof).is_ok());
        assert_eq!(other.check_node(&hello, &welcome).expect_err("refused").reason(), "FOREIGN_SECRET");
        assert!(other.check_caller(&hello, &welcome, &proof).is_err());
        // Reflected, cut, or taken from another exchange.
        assert!(secret.check_caller(&hello, &welcome, &welcome.proof).is_err());
        assert!(secret.check_caller(&hello, &welcome, &proof[..31]).is_err());
        assert!(secret.check_caller(&exchange().0, &welcome, &proof).is_err());
        for changed in [
            wire::Hello { lane: 1, ..hello.clone() },
            wire::Hello { node: 5, ..hello.clone() },
            wire::Hello { address: "b:1".into(), ..hello.clone() },
        ] {
            assert!(secret.check_caller(&changed, &welcome, &proof).is_err());
        }
    }
}
