//! The process: listeners bound first, node started, addresses published, calls served, everything stopped in reverse.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tidepool_metadata::ErrorKind;
use tidepool_metadata::catalog::NodeAddresses;
use tidepool_replication::Formation;
use tidepool_transfer::{Engine, Tls};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::admin::AdminApi;
use crate::auth::Auth;
use crate::config::Config;
use crate::disk::Disk;
use crate::engine::{self, LentMemories, MemoryListener};
use crate::error::Error;
use crate::folder::DataFolder;
use crate::grpc::{GrpcServer, HostInfo, Inflight, StoreApi};
use crate::node::{Membership, Node, NodeService, Remotes};
use crate::peers::{AddressBook, Dialer, Forgetter, Former, Myself, PeerApi, Secret, join};
use crate::plan;
use crate::segment::SegmentListener;

/// Where a running server can be reached.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Addresses {
    /// gRPC.
    pub grpc: SocketAddr,
    /// The transfer engine.
    pub engine: Option<SocketAddr>,
    /// Admin HTTP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin: Option<SocketAddr>,
    /// gRPC over a unix socket.
    pub unix: Option<PathBuf>,
    /// The data folder.
    pub data: PathBuf,
}

/// Sockets in the data folder: gRPC, the segment's descriptor, memory that clients lend.
const GRPC_SOCKET: &str = "tidepool.sock";
const SEGMENT_SOCKET: &str = "segment.sock";
const MEMORY_SOCKET: &str = "memory.sock";

/// Takes the sockets out of the data folder again if the start fails: none is to be found that nobody serves.
struct BoundSockets<'a>(Option<&'a Path>);

impl Drop for BoundSockets<'_> {
    fn drop(&mut self) {
        let Some(data) = self.0 else { return };
        for name in [GRPC_SOCKET, SEGMENT_SOCKET, MEMORY_SOCKET] {
            let _gone = std::fs::remove_file(data.join(name));
        }
    }
}

/// What a server is in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// A node: it may vote, and its operator has a door to it.
    Node,
    /// A guest in a client's process: it votes for nothing and has no admin listener.
    Guest,
}

/// A running server.
pub struct Server {
    addresses: Addresses,
    engine: Option<Engine>,
    node: Node,
    disk: Disk,
    folder: Arc<DataFolder>,
    dialer: Dialer,
    ready: watch::Sender<bool>,
    stop: watch::Sender<bool>,
    listeners: Vec<JoinHandle<Result<(), Error>>>,
    shutdown_timeout: Duration,
}

impl Server {
    /// Opens the data folder, binds the listeners, starts the node, and serves. When this returns, the addresses are
    /// good and reads by version are answered as far as recovery has come; all else waits for [`Server::ready`].
    ///
    /// # Errors
    /// What is in the way, and what to do about it; nothing is published then.
    pub async fn start(config: Config) -> Result<Self, Error> {
        Self::launch(config, Role::Node).await
    }

    /// As [`Server::start`], of a guest ([`crate::Embedded`]). It has no admin listener, whatever the settings say.
    pub(crate) async fn start_guest(config: Config) -> Result<Self, Error> {
        Self::launch(config, Role::Guest).await
    }

    async fn launch(config: Config, role: Role) -> Result<Self, Error> {
        let data = config.data.clone().unwrap_or_else(plan::default_data_folder);
        let folder = Arc::new(DataFolder::open(&data)?);
        let auth = match &config.cluster.secret_file {
            Some(path) => Auth::from_file(path)?,
            None => Auth::open(),
        };
        let unix = config.grpc.unix_socket.then(|| data.join(GRPC_SOCKET));
        let mut bound = BoundSockets(Some(folder.path()));
        let grpc = GrpcServer::bind(config.grpc.listen, unix.as_deref()).await?;
        let segment = unix.as_ref().map(|_| SegmentListener::bind(&data.join(SEGMENT_SOCKET))).transpose()?;
        let admin = match role {
            Role::Node => Some(bind_admin(config.admin.listen).await?),
            Role::Guest => None,
        };
        let memory = unix.as_ref().map(|_| MemoryListener::bind(&data.join(MEMORY_SOCKET))).transpose()?;
        let tls = engine::tls(&config.engine)?;
        let bind = |address| engine::bind(address, tls.clone(), &auth, &config.limits);
        let engine = config.engine_address().map(bind).transpose()?;
        let engine_address = engine.as_ref().and_then(|engine| engine.addresses().first().copied());
        let grpc_address = local(grpc.address())?;
        let admin_address = admin.as_ref().map(|admin| local(admin.local_addr())).transpose()?;

        let built = plan::node(&config, &folder)?;
        let nvme = built.nvme.clone();
        let peers = Peers::prepare(&config, role, &auth, tls, &folder, grpc_address).await?;
        let node = Node::start(built, Arc::clone(&folder), peers.membership(admin_address)).await?;
        let (ready, readiness) = watch::channel(false);
        let (stop, stopped) = watch::channel(false);
        let inflight = Inflight::new(config.limits.inflight_bytes.0);
        let host = HostInfo {
            cluster: folder.cluster(),
            engine: engine_address,
            folder: unix.is_some().then(|| folder.path().to_owned()),
        };
        let host = Arc::new(host);
        let api = StoreApi::new(node.service().clone(), inflight, Arc::clone(&host));
        let disk = Disk::new(node.service().clone(), nvme);
        let lent = LentMemories::new(&config.limits);
        if let Some(engine) = &engine {
            engine::serve(engine, api.clone(), lent.clone());
        }
        let addresses = Addresses { grpc: grpc_address, engine: engine_address, admin: admin_address, unix, data };
        let admin_api = AdminApi::new(
            node.service().clone(),
            auth.clone(),
            readiness.clone(),
            Arc::clone(&folder),
            grpc_address,
            disk.clone(),
        );
        let limits = config.limits.clone();
        let (admin_stopped, gone_stopped) = (stopped.clone(), stopped.clone());
        let (store, segment_stopped) = (node.service().store().clone(), stopped.clone());
        let memory_stopped = stopped.clone();
        let peer_api = peers.api(node.service().clone(), stopped.clone());
        let mut listeners = vec![
            tokio::spawn(async move { grpc.serve(api, peer_api, auth, &limits, readiness, stopped).await }),
            tokio::spawn(peers.forgetter(node.service().clone()).run(gone_stopped)),
        ];
        listeners.extend(admin.map(|admin| tokio::spawn(admin_api.serve(admin, admin_stopped))));
        listeners.extend(memory.map(|memory| tokio::spawn(memory.serve(lent, memory_stopped))));
        listeners.extend(segment.map(|segment| tokio::spawn(segment.serve(store, segment_stopped))));
        let shutdown_timeout = config.shutdown_timeout.0.0;
        let dialer = peers.dialer;
        bound.0 = None;
        drop(bound);
        Ok(Self { addresses, engine, node, disk, folder, dialer, ready, stop, listeners, shutdown_timeout })
    }

    /// Waits until the catalog is open, and says so by health and `/readyz`. Cancel-safe.
    ///
    /// # Errors
    /// What keeps the catalog from being opened: shut down, there is no use in going on.
    pub async fn ready(&self) -> Result<(), Error> {
        self.node.ready().await?;
        self.ready.send_replace(true);
        Ok(())
    }

    /// Waits until another node says that this one has no place in the cluster, if one ever does: an operator has removed it
    /// (`REMOVED`), or another process has its identity (`IDENTITY_TAKEN`). Cancel-safe.
    pub async fn unwelcome(&self) -> Error {
        self.dialer.unwelcome().await
    }

    /// Where it can be reached.
    #[must_use]
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// The node under it.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Its NVMe tier.
    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Hands over what is here within that time, has the rest and the node itself struck out of the catalog, and stops.
    /// Answers how many copies were given up.
    ///
    /// # Errors
    /// Those of the catalog; it has stopped all the same, and counts as a node that is away.
    pub(crate) async fn leave(self, hand_over: Duration) -> Result<u64, Error> {
        let left = self.node.service().leave(hand_over).await;
        let store = self.node.service().store().clone();
        self.shutdown().await;
        if left.is_ok() {
            store.retire();
        }
        left
    }

    /// Not ready, stop accepting, finish or cut off calls within the timeout, persist, let go of the folder.
    pub async fn shutdown(self) {
        let Self { engine, node, folder, dialer, ready, stop, listeners, shutdown_timeout, .. } = self;
        ready.send_replace(false);
        // While the other nodes still hear this one.
        node.step_down().await;
        stop.send_replace(true);
        let deadline = tokio::time::Instant::now() + shutdown_timeout;
        for mut listener in listeners {
            if tokio::time::timeout_at(deadline, &mut listener).await.is_err() {
                tracing::warn!(?shutdown_timeout, "calls were still running at the end of shutdown_timeout: cut off");
                listener.abort();
            }
        }
        // Its calls that still run are answered by nobody: their peers go elsewhere.
        drop(engine);
        node.shutdown().await;
        dialer.stop();
        drop(folder);
    }
}

/// What connects this node to the others.
struct Peers {
    myself: Myself,
    secret: Secret,
    book: Arc<AddressBook>,
    dialer: Dialer,
    remotes: Remotes,
    formation: Formation,
}

impl Peers {
    /// Finds out who this node is; one without a catalog, and with `cluster.join`, becomes part of a group first.
    async fn prepare(
        config: &Config,
        role: Role,
        auth: &Auth,
        tls: Option<Tls>,
        folder: &DataFolder,
        listens: SocketAddr,
    ) -> Result<Self, Error> {
        let secret = Secret::new(auth.secret());
        let book = Arc::new(AddressBook::open(folder.path().join("peers.json")));
        let address = match &config.cluster.advertise {
            Some(address) => address.clone(),
            // Nobody can call that: such a node stays alone, or says where it is.
            None if listens.ip().is_unspecified() => String::new(),
            None => listens.to_string(),
        };
        let mut myself =
            Myself { node: folder.node(), incarnation: folder.incarnation(), cluster: 0, epoch: 0, address };
        let mut formation = Formation::Found;
        let mut addresses = config.cluster.join.clone();
        if folder.is_joining() {
            // Part of a group, and without its catalog: whoever was known then may let it in.
            let others = book.nodes().into_iter().filter(|&node| node != myself.node);
            addresses.extend(others.filter_map(|node| book.address(node)));
        }
        if !addresses.is_empty() {
            if myself.address.is_empty() {
                let message = "other nodes can't call this one: set cluster.advertise = host:port";
                return Err(Error::new(ErrorKind::Invalid, "BAD_CONFIG", message.into()).field("cluster.advertise"));
            }
            if folder.is_new() {
                let former = |epoch| Former { cluster: folder.cluster(), epoch };
                let former = folder.last_epoch().filter(|_| folder.is_joining()).map(former);
                let group = join(&addresses, &myself, role == Role::Guest, former, &secret, &book).await?;
                tracing::info!(cluster = format!("{:016x}", group.cluster), "part of a group");
                folder.join(group.cluster, group.epoch)?;
                formation = Formation::Join { life: group.member.life(), members: group.members };
            } else {
                refuse_foreign(&addresses, &myself, &secret, folder).await?;
            }
        } else if folder.is_joining() {
            let message = "this node is part of a group, has no catalog yet, and knows nobody: give cluster.join";
            return Err(Error::new(ErrorKind::Invalid, "JOIN", message.into()).field("cluster.join"));
        }
        (myself.cluster, myself.epoch) = (folder.cluster(), folder.epoch()?);
        if folder.forms_rebuild() {
            refuse_second_rebuild(&myself, &secret, &book).await?;
        }
        book.learn(myself.node, myself.incarnation, &myself.address);
        let dialer = Dialer::start(myself.clone(), secret.clone(), Arc::clone(&book))?;
        let token = std::str::from_utf8(auth.secret()).ok().filter(|token| !token.is_empty()).map(str::to_owned);
        let remotes = Remotes::new(Arc::clone(&book), token.as_deref(), tls);
        Ok(Self { myself, secret, book, dialer, remotes, formation })
    }

    fn membership(&self, admin: Option<SocketAddr>) -> Membership {
        let admin = admin.map(|admin| admin.to_string()).unwrap_or_default();
        let advertised = NodeAddresses { grpc: self.myself.address.clone(), engine: String::new(), admin };
        Membership {
            formation: self.formation.clone(),
            transport: Arc::new(self.dialer.clone()),
            addresses: advertised,
            remotes: self.remotes.clone(),
        }
    }

    fn forgetter(&self, service: NodeService) -> Forgetter {
        Forgetter::new(service, Arc::clone(&self.book), self.dialer.clone(), self.remotes.clone())
    }

    fn api(&self, service: NodeService, stopped: watch::Receiver<bool>) -> PeerApi {
        let runtime = self.dialer.handle().clone();
        PeerApi::new(self.myself.clone(), self.secret.clone(), Arc::clone(&self.book), service, runtime, stopped)
    }
}

/// A folder that belongs to one group does not join another. Nodes that do not answer are not waited for: the start goes on
/// with what the folder knows.
async fn refuse_foreign(
    addresses: &[String],
    myself: &Myself,
    secret: &Secret,
    folder: &DataFolder,
) -> Result<(), Error> {
    let myself = Myself { cluster: folder.cluster(), epoch: folder.epoch()?, ..myself.clone() };
    for address in addresses {
        match crate::peers::greet(address, &myself, secret).await {
            Err(error) if matches!(error.reason(), "FOREIGN_CLUSTER" | "FOREIGN_SECRET" | "CATALOG_EPOCH") => {
                return Err(error.field("cluster.join"));
            }
            Ok(()) => return Ok(()),
            Err(error) => tracing::info!(address, %error, "a node of cluster.join does not answer"),
        }
    }
    Ok(())
}

/// Two nodes that begin the same epoch would be two clusters.
async fn refuse_second_rebuild(myself: &Myself, secret: &Secret, book: &AddressBook) -> Result<(), Error> {
    let others: Vec<String> =
        book.nodes().into_iter().filter(|&node| node != myself.node).filter_map(|node| book.address(node)).collect();
    let greetings = others.iter().map(|address| crate::peers::greet(address, myself, secret));
    let greeted = futures::future::join_all(greetings).await;
    // One that is of this epoch; others refuse, or are not there.
    match others.iter().zip(greeted).find(|(_, greeted)| greeted.is_ok()) {
        Some((address, _)) => {
            let message = format!(
                "the node at {address} has begun the same rebuild: `tidepool admin raft rejoin` this one instead, so that it \
                 joins and announces what it has"
            );
            Err(Error::new(ErrorKind::Conflict, "REBUILT_ELSEWHERE", message))
        }
        None => Ok(()),
    }
}

async fn bind_admin(listen: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(listen).await.map_err(|error| crate::grpc::cannot_listen("admin.listen", listen, &error))
}

fn local(address: std::io::Result<SocketAddr>) -> Result<SocketAddr, Error> {
    address.map_err(|error| Error::new(ErrorKind::Internal, "INTERNAL", error.to_string()))
}
