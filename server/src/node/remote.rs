//! Reads of what other nodes hold: a stream of exactly one version, by that node's own service.
//!
//! The version comes from the catalog, and the other node serves it without asking the catalog again. What comes is verified
//! at its end; whoever gets it on from here verifies it once more.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_client::{Client, ClientSettings, GetOptions, ObjectStream, StoredIn, Tls};
use tidepool_metadata::catalog::{Answer, ObjectLocation, Query};
use tidepool_metadata::{ErrorKind, NodeId, TenantId};
use tidepool_replication::Read;
use tokio::time::Instant;

use super::{NodeService, ObjectName, RangeRequest, error};
use crate::error::Error;
use crate::peers::AddressBook;

/// How long a node may take to answer, and with each piece: some reads of a busy disk.
const DEADLINE: Duration = Duration::from_secs(2);
/// How long a node that did not is not asked again: it may be frozen, and each read would wait for that.
const REST: Duration = Duration::from_secs(1);
/// Connections to each node.
const CONNECTIONS: usize = 2;

/// How a client asks: by the node's engine, or for streams by gRPC, which give out what arrives as it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Way {
    Engine,
    Stream,
}

/// One for each node, tenant and way, with the address that it is for.
type Clients = HashMap<(NodeId, TenantId, Way), (String, Client)>;

/// Clients of other nodes. Cheap to clone.
#[derive(Clone)]
pub struct Remotes {
    book: Arc<AddressBook>,
    token: Option<Arc<str>>,
    tls: Option<Tls>,
    clients: Arc<Mutex<Clients>>,
    /// Until when nodes are left alone.
    resting: Arc<Mutex<HashMap<NodeId, Instant>>>,
    /// Whose turn it is of those that have further copies.
    turn: Arc<AtomicUsize>,
}

impl Remotes {
    pub(crate) fn new(book: Arc<AddressBook>, token: Option<&str>, tls: Option<Tls>) -> Self {
        Self {
            book,
            token: token.map(Arc::from),
            tls,
            clients: Arc::default(),
            resting: Arc::default(),
            turn: Arc::default(),
        }
    }

    /// Drops what is kept of a node that is gone for good.
    pub(crate) fn forget(&self, node: NodeId) {
        self.clients.lock().retain(|&(known, ..), _| known != node);
        self.resting.lock().remove(&node);
    }

    fn rests(&self, node: NodeId) -> bool {
        self.resting.lock().get(&node).is_some_and(|&until| until > Instant::now())
    }

    fn rest(&self, node: NodeId) {
        self.resting.lock().insert(node, Instant::now() + REST);
    }

    /// Where the nodes are that have it and that answer, as far as this one knows.
    pub(super) fn addresses(&self, location: &ObjectLocation) -> Vec<String> {
        self.in_order(location).filter(|&node| !self.rests(node)).filter_map(|node| self.book.address(node)).collect()
    }

    /// The nodes that have a copy, best first: those that stay before those that are being emptied, and those before those that
    /// seem to be away. Readers of different objects begin with different ones; readers of one that has more copies than it is to
    /// have, because it is hot, take turns.
    fn in_order(&self, location: &ObjectLocation) -> impl Iterator<Item = NodeId> + use<> {
        let mut copies = location.replicas.clone();
        let is_hot = copies.len() > usize::from(location.copies.wanted());
        let turn = if is_hot { self.turn.fetch_add(1, Ordering::Relaxed) } else { 0 };
        let first = usize::try_from(location.version.sequence).unwrap_or(0).wrapping_add(turn) % copies.len().max(1);
        copies.rotate_left(first);
        copies.sort_by_key(|copy| (copy.node_state, !copy.confirmed));
        copies.into_iter().map(|copy| copy.replica.node)
    }

    pub(super) fn client(&self, node: NodeId, tenant: TenantId, tenant_name: &str, way: Way) -> Option<Client> {
        let address = self.book.address(node)?;
        let mut clients = self.clients.lock();
        if let Some((known, client)) = clients.get(&(node, tenant, way))
            && *known == address
        {
            return Some(client.clone());
        }
        let settings = ClientSettings {
            deadline: DEADLINE,
            connect_timeout: Duration::from_secs(1),
            connections: CONNECTIONS,
            local_reads: false,
            // It never puts.
            one_sided_puts: false,
            native: way == Way::Engine,
            engine_tls: self.tls.clone(),
            retries: 0,
            ..ClientSettings::default()
        };
        let mut builder = Client::builder().endpoint(&address).tenant(tenant_name).settings(settings);
        if let Some(token) = &self.token {
            builder = builder.token(token);
        }
        let client =
            builder.build().map_err(|error| tracing::warn!(%node, address, %error, "a client of that node")).ok()?;
        clients.insert((node, tenant, way), (address, client.clone()));
        Some(client)
    }
}

impl NodeService {
    /// Opens a copy on another node; `None` if no node that should have one gives it.
    pub(super) async fn open_elsewhere(
        &self,
        name: &ObjectName,
        location: &ObjectLocation,
        range: RangeRequest,
    ) -> Result<Option<ObjectStream>, Error> {
        let tenant_name = self.tenant_name(name.tenant).await?;
        let version = location.version.to_string();
        for node in self.inner.remotes.in_order(location) {
            if node == self.inner.node || self.inner.remotes.rests(node) {
                continue;
            }
            let Some(client) = self.inner.remotes.client(node, name.tenant, &tenant_name, Way::Stream) else {
                continue;
            };
            let options = GetOptions {
                offset: range.offset,
                length: range.length,
                version: version.clone(),
                ..GetOptions::default()
            };
            match client.get_stream(name.key.as_bytes(), options).await {
                Ok(Some(stream)) => return Ok(Some(stream)),
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::Invalid => return Err(from_client(&error)),
                Err(error) => {
                    tracing::debug!(%node, %error, "a copy can't be read");
                    if error.reason() == "UNREACHABLE" || error.kind() == ErrorKind::Deadline {
                        self.inner.remotes.rest(node);
                    }
                }
            }
        }
        Ok(None)
    }

    pub(super) async fn tenant_name(&self, tenant: TenantId) -> Result<String, Error> {
        if tenant == TenantId::DEFAULT {
            return Ok(String::new());
        }
        let (_, answer) = self.catalog().await?.query(Query::Tenants, Read::Local).await?;
        let Answer::Tenants(tenants) = answer else { return Err(error::unexpected("tenants")) };
        let found = tenants.into_iter().find(|known| known.tenant == tenant);
        found.map(|known| known.name).ok_or_else(|| error::unexpected("a tenant's name"))
    }
}

/// Where the other node found it.
pub(super) fn tier_name(stream: &ObjectStream) -> &'static str {
    match stream.info.tier {
        StoredIn::Dram => "dram",
        StoredIn::Nvme | StoredIn::Other => "nvme",
    }
}

/// What another node said, as this one says it.
pub(super) fn from_client(error: &tidepool_client::Error) -> Error {
    let reason = match error.reason() {
        "BAD_RANGE" => "BAD_RANGE",
        "CHECKSUM_MISMATCH" | "CORRUPT" => "CORRUPT",
        "OVERLOADED" => "OVERLOADED",
        _ => "UNAVAILABLE",
    };
    let kind = match reason {
        "BAD_RANGE" => ErrorKind::Invalid,
        "CORRUPT" => ErrorKind::Corrupt,
        "OVERLOADED" => ErrorKind::Exhausted,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, reason, format!("read from another node: {error}"))
}

#[cfg(test)]
mod tests {
    use tidepool_metadata::catalog::{Copies, NodeState, Presence, ReplicaLocation};
    use tidepool_metadata::{DataType, Durability, Incarnation, LogIndex, ReplicaId, VersionId};

    use super::*;

    #[test]
    fn readers_take_turns_where_there_are_more_copies_than_wanted() {
        let folder = tempfile::tempdir().expect("a folder");
        let book = AddressBook::open(folder.path().join("peers.json"));
        let remotes = Remotes::new(Arc::new(book), None, None);
        let copy = |node| ReplicaLocation {
            replica: ReplicaId { node: NodeId(node), incarnation: Incarnation(1), sequence: 1 },
            durability: Durability::Memory,
            node_state: NodeState::Up,
            confirmed: true,
        };
        let mut location = ObjectLocation {
            version: VersionId { node: NodeId(1), incarnation: Incarnation(1), sequence: 7 },
            commit_index: LogIndex(1),
            length: 1,
            slice_bytes: 1,
            data_type: DataType::default(),
            checksums: vec![0],
            group: None,
            presence: Presence::Present,
            copies: Copies::ONE,
            replicas: (1..=3).map(copy).collect(),
        };
        let firsts = |location: &ObjectLocation| {
            let mut firsts: Vec<_> = (0..30).filter_map(|_| remotes.in_order(location).next()).collect();
            firsts.sort_unstable();
            firsts.chunk_by(|one, other| one == other).map(<[_]>::len).collect::<Vec<_>>()
        };
        assert_eq!(firsts(&location), [10, 10, 10]);
        location.copies = Copies::new(3, 1).expect("legal");
        assert_eq!(firsts(&location), [30], "what lies in one node's memory is read there");
    }
}
