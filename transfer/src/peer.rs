//! A peer: who it is, how it can be asked, and the ways to its memory.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::control::Control;
use crate::error::Failure;
use crate::exchange::Exchanges;
use crate::file::{FileLink, SegmentFile};
use crate::memory::Memory;
use crate::pool::Pool;
use crate::prober::Prober;
use crate::rails::Rails;
use crate::rdma::{Rdma, RemoteKeys};
use crate::region::{Backing, RemoteAccess};
use crate::settings::Settings;
use crate::shm::ShmLink;
use crate::shm::discover::Neighbour;
use crate::slice::{AccessRights, Direction};
use crate::stream::{ConnectError, Stream, connect_tcp, greet};
use crate::tcp::TcpLink;
use crate::transport::{Link, TransportKind};
use crate::wire::{self, Greeting, ITEM_BYTES, Kind, Purpose, SegmentInfo, WireError};

/// Between two attempts to reach a peer that does not answer yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// A peer's engine, from its start to its end: another start at the same address is another peer.
pub(crate) struct Peer {
    pub(crate) address: String,
    pub(crate) greeting: Greeting,
    neighbour: Option<Arc<Neighbour>>,
    pub(crate) control: Control,
    pub(crate) exchanges: Exchanges,
    pub(crate) rails: Rails,
    pub(crate) prober: Arc<Prober>,
}

/// What an engine lends to its peers.
#[derive(Clone, Copy)]
pub(crate) struct Means<'a> {
    pub(crate) copiers: &'a Arc<Pool>,
    pub(crate) prober: &'a Arc<Prober>,
    pub(crate) rdma: &'a Rdma,
}

/// A region of a peer that was opened here.
pub(crate) struct Segment {
    pub(crate) peer: Arc<Peer>,
    pub(crate) info: SegmentInfo,
    /// Its bytes, if they are mapped.
    pub(crate) mapping: Option<Memory>,
    /// Its file, if it is one that was passed.
    pub(crate) file: Option<Arc<SegmentFile>>,
    /// What RDMA devices have to know to use it.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "for RDMA devices only"))]
    pub(crate) rdma_keys: RemoteKeys,
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segment").field("peer", &self.peer.address).field("info", &self.info).finish_non_exhaustive()
    }
}

impl Peer {
    /// Connects and learns who is there. A peer that refuses connections is asked again until the deadline.
    pub(crate) fn connect(
        address: &str,
        settings: &Arc<Settings>,
        (greeting, secret): (Greeting, Option<[u8; 32]>),
        Means { copiers, prober, rdma }: Means<'_>,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let secret = secret.unwrap_or_default();
        let greeting = Greeting { purpose: Purpose::Control, socket_token: 0, secret, ..greeting };
        // An attempt that the deadline cut short says less than one before it that was refused.
        let mut was_refused = false;
        let (stream, welcome): (Stream, Greeting) = loop {
            let attempt = deadline.min(Instant::now() + settings.connect_timeout);
            let connected = connect_tcp(address, settings.tls.as_ref(), attempt, 0)
                .and_then(|stream| greet(&stream, &greeting, attempt).map(|welcome| (stream, welcome)));
            match connected {
                Ok(connected) => break connected,
                Err(error)
                    if matches!(error.failure, Failure::Unreachable | Failure::Overloaded)
                        && Instant::now() + RETRY_INTERVAL < deadline =>
                {
                    was_refused |= error.failure == Failure::Overloaded;
                    // Nothing tells when a peer comes up: ask again after a while.
                    std::thread::sleep(RETRY_INTERVAL);
                }
                Err(error) if was_refused && error.failure == Failure::Unreachable => {
                    return Err(ConnectError { failure: Failure::Overloaded, ..error });
                }
                Err(error) => return Err(error),
            }
        };
        let attempt = deadline.min(Instant::now() + settings.connect_timeout);
        let neighbour = Neighbour::meet(settings, greeting, welcome, attempt).unwrap_or_else(|error| {
            // Same boot, but another network namespace or user: TCP it is.
            tracing::info!(address, failure = %error.failure, "peer on this host can't be met: using TCP");
            None
        });
        let neighbour = neighbour.map(Arc::new);
        let mut links: Vec<Arc<dyn Link>> = Vec::new();
        if let Some(neighbour) = &neighbour {
            links.push(Arc::new(ShmLink::new(Arc::clone(neighbour), Arc::clone(copiers))));
            links.push(Arc::new(FileLink::new(Arc::clone(neighbour))));
        }
        let (over_rdma, maybe_over_rdma) = rdma.links(address, greeting, welcome.instance, settings, attempt);
        links.extend(over_rdma);
        let data_greeting = crate::tcp::data_greeting(greeting);
        let tcp = |address: String| -> Arc<dyn Link> {
            Arc::new(TcpLink::new(address, Arc::clone(settings), data_greeting, welcome.instance))
        };
        links.push(tcp(address.to_owned()));
        let reached = stream.peer_address();
        let addresses = Arc::new(OnceLock::new());
        let (control, exchanges) = {
            let (dial, first) = match &neighbour {
                Some(neighbour) => {
                    let (first, again) = (neighbour.connection(deadline)?, Arc::clone(neighbour));
                    let timeout = settings.connect_timeout;
                    let dial: crate::control::Dial =
                        Box::new(move |deadline| again.connection(deadline.min(Instant::now() + timeout)));
                    (dial, first)
                }
                None => {
                    let dial = Dialler {
                        address: address.to_owned(),
                        others: Arc::clone(&addresses),
                        settings: Arc::clone(settings),
                        greeting,
                        instance: welcome.instance,
                        turn: AtomicUsize::new(0),
                    };
                    let dial: crate::control::Dial = Box::new(move |deadline| dial.dial(deadline));
                    (dial, stream)
                }
            };
            let dial = Arc::new(dial);
            let control = Control::new(Arc::clone(&dial), settings.lanes, settings.messages, first);
            (control, Exchanges::new(dial, settings.lanes))
        };
        let others = other_addresses(&control, address, reached, attempt);
        let unknown = maybe_over_rdma.into_iter().chain(others.iter().cloned().map(tcp)).collect();
        let _ = addresses.set(others);
        Ok(Self {
            address: address.to_owned(),
            greeting: welcome,
            neighbour,
            control,
            exchanges,
            rails: Rails::new(links, unknown),
            prober: Arc::clone(prober),
        })
    }

    /// Asks for the region that the peer registered under a name.
    pub(crate) fn open(self: &Arc<Self>, name: &str, deadline: Instant) -> Result<Segment, ConnectError> {
        let body = self.control.call(Kind::Open, name.as_bytes(), deadline)?;
        let info = SegmentInfo::decode(&body).map_err(WireError::failure)?;
        Ok(self.segment(info, deadline))
    }

    /// A region whose description came another way.
    pub(crate) fn segment(self: &Arc<Self>, info: SegmentInfo, deadline: Instant) -> Segment {
        let neighbour = self.neighbour.as_ref().filter(|_| info.rights != AccessRights::LOCAL);
        let passed = neighbour.and_then(|neighbour| {
            let passed = neighbour.map(&info, deadline);
            passed.inspect_err(|error| tracing::debug!(?error, "segment can't be mapped: using TCP")).ok()
        });
        let (mapping, file) = match passed {
            Some(Backing::Memory(mapping)) => (Some(mapping), None),
            Some(Backing::File(file)) => (None, Some(file)),
            None => (None, None),
        };
        Segment { peer: Arc::clone(self), info, mapping, file, rdma_keys: self.rdma_keys(&info, deadline) }
    }

    /// Asks for the keys of a region, if there are devices to use them.
    fn rdma_keys(&self, info: &SegmentInfo, deadline: Instant) -> RemoteKeys {
        if !self.rails.has(TransportKind::Rdma) || info.rights == AccessRights::LOCAL {
            return RemoteKeys::default();
        }
        let access = RemoteAccess {
            direction: if info.rights.remote_read { Direction::Read } else { Direction::Write },
            region: info.region,
            key: info.key,
            offset: 0,
            length: 0,
        };
        let mut item = Vec::with_capacity(ITEM_BYTES);
        wire::encode_item(&mut item, &access);
        let answer = self.control.call(Kind::Keys, &item, deadline);
        let keys = answer
            .inspect_err(|error| tracing::debug!(failure = %error.failure, "no RDMA keys: using TCP"))
            .ok()
            .and_then(|body| RemoteKeys::decode(&body));
        keys.unwrap_or_default()
    }

    /// Asks whether it is there.
    pub(crate) fn probe(&self, deadline: Instant) -> Result<(), Failure> {
        self.control.call(Kind::Ping, &[], deadline).map(drop).map_err(|error| error.failure)
    }

    /// Ends everything with it.
    pub(crate) fn close(&self) {
        self.rails.close();
        self.control.close();
        self.exchanges.close();
    }
}

/// Where else the peer listens, as it says itself. What can't be reached from here is found out by probes.
fn other_addresses(control: &Control, address: &str, reached: Option<SocketAddr>, deadline: Instant) -> Vec<String> {
    let told = control
        .call(Kind::Where, &[], deadline)
        .and_then(|body| wire::decode_addresses(&body).map_err(|error| error.failure().into()));
    let mut others = told.unwrap_or_else(|error| {
        tracing::info!(address, failure = %error.failure, "peer does not say where it listens: one rail");
        Vec::new()
    });
    let is_remote = reached.is_some_and(|reached| !reached.ip().is_loopback());
    others.retain(|other| match other.parse::<SocketAddr>() {
        // A peer's loopback is another engine's here.
        Ok(other) => Some(other) != reached && !(is_remote && other.ip().is_loopback()),
        Err(_) => other != address,
    });
    others.sort_unstable();
    others.dedup();
    others
}

/// Opens control connections over TCP: to the address that worked last, then to the others.
struct Dialler {
    address: String,
    others: Arc<OnceLock<Vec<String>>>,
    settings: Arc<Settings>,
    greeting: Greeting,
    instance: u128,
    turn: AtomicUsize,
}

impl Dialler {
    fn dial(&self, deadline: Instant) -> Result<Stream, ConnectError> {
        let others = self.others.get().map_or(&[][..], Vec::as_slice);
        let (first, count) = (self.turn.load(Ordering::Relaxed), 1 + others.len());
        let mut last = ConnectError::from(Failure::Unreachable);
        for step in 0..count {
            let turn = (first + step) % count;
            let address = if turn == 0 { &self.address } else { &others[turn - 1] };
            match self.dial_one(address, deadline) {
                Ok(stream) => {
                    self.turn.store(turn, Ordering::Relaxed);
                    return Ok(stream);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn dial_one(&self, address: &str, deadline: Instant) -> Result<Stream, ConnectError> {
        let deadline = deadline.min(Instant::now() + self.settings.connect_timeout);
        let stream = connect_tcp(address, self.settings.tls.as_ref(), deadline, 0)?;
        let welcome = greet(&stream, &self.greeting, deadline)?;
        if welcome.instance == self.instance { Ok(stream) } else { Err(Failure::Restarted.into()) }
    }
}
