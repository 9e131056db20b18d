//! The data path past gRPC: messages and values over the node's transfer engine (unix socket on its host, else TCP).
//!
//! Where the engine listens is asked of the node, once; what fails there is repeated by gRPC, and the engine is tried again
//! a second later. Calls block on their sockets: in a runtime of several threads they block in place, which saves the
//! hand-over, else on a thread of their own.

mod calls;
mod lending;
mod means;
mod one_sided;
mod others;
mod staging;
mod targets;
mod times;

use std::hash::{BuildHasher as _, RandomState};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tidepool_metadata::{NodeId, TenantId};
use tidepool_transfer::{Engine, PeerId, Settings, TransferError};
use tokio::runtime::{Handle, RuntimeFlavor};
use tonic::transport::Channel;

use crate::builder::OneSidedReads;
use crate::call::Client;
use crate::endpoint::ServerAddress;
use crate::local::LocalReads;
pub(crate) use calls::{Got, MOST_PUT_BYTES, Method};
use lending::Lending;
use means::Means;
use one_sided::OneSided;
pub(crate) use one_sided::Shared as SharedReads;
pub(crate) use others::Others;
use staging::Staging;
pub(crate) use targets::{Filling, Steps, Target};
use times::{Allowance, Times};

/// How long an engine that failed is left alone; and one that could not be reached beside a node that could, or a node that
/// has none.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// Where this client's engine listens, at a port that is free: on all addresses of both families, or of one if there is no other.
const ANYWHERE: [&str; 2] = ["[::]:0", "0.0.0.0:0"];

/// The engine of one node, as far as it can be had.
pub(crate) struct Native {
    address: ServerAddress,
    /// Its segment is not read: what was read there is told to the nodes that the caller named.
    is_referred: bool,
    link: RwLock<Option<Arc<Link>>>,
    /// Not before this is it looked for again; none: it never was.
    again: Mutex<Option<Instant>>,
}

/// A node's engine that answers.
pub(crate) struct Link {
    engine: Engine,
    peer: PeerId,
    lending: Lending,
    staging: Staging,
    one_sided: OneSided,
    /// The node is on this host.
    is_here: bool,
    lent_puts: Arc<AtomicU64>,
    /// Of its gets.
    times: Times,
}

impl Native {
    pub(crate) fn new(address: ServerAddress) -> Self {
        Self { address, is_referred: false, link: RwLock::default(), again: Mutex::default() }
    }

    /// Of a node that another one named.
    pub(crate) fn referred(address: ServerAddress) -> Self {
        Self { is_referred: true, ..Self::new(address) }
    }

    fn link(&self) -> Option<Arc<Link>> {
        self.link.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets go of a link that failed.
    pub(crate) fn close(&self, failed: &Arc<Link>) {
        let mut link = self.link.write().unwrap_or_else(PoisonError::into_inner);
        if link.as_ref().is_some_and(|link| Arc::ptr_eq(link, failed)) {
            *link = None;
            *lock(&self.again) = Some(Instant::now() + AGAIN_AFTER);
        }
    }

    /// Whether it is this caller's turn to look for the engine.
    fn may_look(&self) -> bool {
        let (now, mut again) = (Instant::now(), lock(&self.again));
        let may = again.is_none_or(|again| again <= now);
        if may {
            *again = Some(now + AGAIN_AFTER);
        }
        may
    }

    /// `host:port` of the engine; a node that listens everywhere is where its endpoint is.
    fn reachable(&self, engine: &str) -> Option<String> {
        let listens: std::net::SocketAddr = engine.parse().ok()?;
        if !listens.ip().is_unspecified() {
            return Some(engine.to_owned());
        }
        let host = match &self.address {
            ServerAddress::Tcp(authority) => authority.rsplit_once(':')?.0,
            ServerAddress::Unix(_) => "127.0.0.1",
        };
        Some(format!("{host}:{}", listens.port()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this thread may block: its runtime goes on with others.
pub(crate) fn may_block() -> bool {
    Handle::try_current().is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread)
}

/// Runs what blocks, here if that does no harm.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    if may_block() {
        return tokio::task::block_in_place(work);
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

impl Client {
    /// The link to the node at that place; looks for one if there is none and the last time is long enough ago.
    pub(crate) async fn link(&self, native: &Native, channel: &Channel) -> Option<Arc<Link>> {
        if let Some(link) = native.link() {
            return Some(link);
        }
        if !native.may_look() {
            return None;
        }
        let timeout = self.settings().connect_timeout;
        let asked = tokio::time::timeout(timeout, self.ask_server_info(channel.clone(), timeout)).await;
        let Ok(Ok(info)) = asked else { return None };
        let on_this_host = self.settings().same_host && info.boot_id == boot_id() && !info.boot_id.is_empty();
        let folder = (on_this_host && !info.folder.is_empty()).then(|| PathBuf::from(&info.folder));
        if let Some(folder) = &folder
            && !native.is_referred
        {
            let node = u32::from_str_radix(&info.node, 16).ok().map(NodeId);
            let socket = folder.join("segment.sock");
            self.read_locally(|| LocalReads::new(socket, TenantId(info.tenant_number), node));
        }
        let Some(engine_address) = native.reachable(&info.engine).filter(|_| self.settings().native) else {
            *lock(&native.again) = Some(Instant::now() + ASK_AGAIN_AFTER);
            return None;
        };
        let engine = self.engine()?;
        let lent_puts = Arc::clone(self.lent_puts_counter());
        let one_sided =
            OneSided::new(self.settings().one_sided_reads, Arc::clone(self.shared_reads()), folder.is_some());
        let linked = blocking(move || {
            let peer = engine.connect(&engine_address, Instant::now() + timeout)?;
            let is_here = folder.is_some();
            let by_device = || (!engine.addresses().is_empty()).then(|| Means::Device(engine.clone()));
            let means = folder.map(|folder| Means::Socket(folder.join("memory.sock"))).or_else(by_device);
            let (lending, staging) = (Lending::new(means.clone()), Staging::new(means));
            let times = Times::default();
            Ok::<_, TransferError>(Link { engine, peer, lending, staging, one_sided, is_here, lent_puts, times })
        });
        match linked.await {
            Ok(link) => {
                let link = Arc::new(link);
                *native.link.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&link));
                Some(link)
            }
            Err(error) => {
                match self.settings().engine_tls {
                    Some(_) => tracing::warn!(%error, engine = info.engine, "calls go by gRPC, unencrypted"),
                    None => tracing::debug!(%error, engine = info.engine, "calls go by gRPC, not by the node's engine"),
                }
                *lock(&native.again) = Some(Instant::now() + ASK_AGAIN_AFTER);
                None
            }
        }
    }

    /// The engine of this client, started with its first use.
    pub(crate) fn engine(&self) -> Option<Engine> {
        let mut started = lock(self.started_engine());
        if started.is_none() {
            let (same_host, tls) = (self.settings().same_host, self.settings().engine_tls.clone());
            let secret = self.secret_digest();
            let without = Settings { secret, same_host, tls, ..Settings::default() };
            // Nodes read values from here by their devices. They are not asked for the cluster's secret: whoever listened at
            // this port later would be told it.
            let wanted = self.settings().one_sided_reads;
            let listens = self.settings().one_sided_puts && wanted != OneSidedReads::Never;
            let admission: [u8; 32] = std::array::from_fn(|_| RandomState::new().hash_one(()).to_le_bytes()[0]);
            let listening = |address: &str| {
                Engine::start(Settings {
                    listen: vec![address.to_owned()],
                    listen_for_rdma_only: wanted == OneSidedReads::Rdma,
                    admission: Some(admission),
                    ..without.clone()
                })
            };
            let refused = |error: &TransferError| tracing::debug!(%error, "nodes can't read this client's memory");
            let addresses = ANYWHERE.into_iter().filter(|_| listens);
            let listening = addresses.map(listening).find_map(|started| started.inspect_err(refused).ok());
            *started = listening
                .map_or_else(|| Engine::start(without), Ok)
                .inspect_err(|error| tracing::warn!(%error, "no transfer engine: calls go by gRPC"))
                .ok();
        }
        started.clone()
    }
}

/// Of this host, or empty if the system does not say.
fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

impl Drop for Link {
    fn drop(&mut self) {
        self.one_sided.close(&self.engine);
        // Stale already if the peer was forgotten.
        let _forgotten = self.engine.disconnect(self.peer);
    }
}
