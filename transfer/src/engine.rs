//! The engine: what a program registers, opens, submits, asks and answers.

mod plan;

use std::collections::HashMap;
use std::fs::File;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use self::plan::{Post, Prepared};
use crate::batch::{Batch, BatchState, Outcome};
use crate::error::{Failure, TransferError};
use crate::exchange::{Answer, Answered};
use crate::file::SegmentFile;
use crate::memory::Memory;
use crate::message::{self, Handler, Reply};
use crate::notify::Notifications;
use crate::peer::{Means, Peer, Segment};
use crate::pool::Pool;
use crate::prober::Prober;
use crate::rails::RailStatus;
use crate::rdma::Rdma;
use crate::region::{Backing, Regions};
use crate::schedule::Priority;
use crate::serve::{Context, ServedCounters, Server, Staging};
use crate::settings::Settings;
use crate::shm::Board;
use crate::slice::{AccessRights, Direction, PeerId, RegionId, RegionKey, Request, SegmentId};
use crate::slots::Slots;
use crate::stream::{self, ConnectError};
use crate::transport::{Registration, TransportKind};
use crate::wire::{self, Greeting, Purpose, SegmentInfo, VERSION};

/// After a region's users were stopped, they get this long to let go of it.
const LET_GO: Duration = Duration::from_secs(1);
/// Notifications on their way at once.
const NOTIFIERS: usize = 8;

/// A transfer engine: one for a process is usual, several don't disturb each other. Clones are the same engine.
///
/// It ends with its last clone, or with [`Engine::close`].
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

/// An engine that ends without regard to this: for what the engine keeps itself, such as its [`Handler`].
#[derive(Clone, Debug, Default)]
pub struct WeakEngine(Weak<Inner>);

impl WeakEngine {
    /// The engine, if it has not ended.
    #[must_use]
    pub fn upgrade(&self) -> Option<Engine> {
        self.0.upgrade().map(Engine)
    }
}

struct Inner {
    settings: Arc<Settings>,
    greeting: Greeting,
    context: Arc<Context>,
    server: Server,
    peers: RwLock<Peers>,
    segments: RwLock<Slots<Arc<Segment>>>,
    batches: Arc<Mutex<Slots<Weak<BatchState>>>>,
    copiers: Arc<Pool>,
    notifiers: Arc<Pool>,
    prober: Arc<Prober>,
    closed: AtomicBool,
}

struct Peers {
    slots: Slots<Arc<Peer>>,
    by_address: HashMap<String, PeerId>,
}

/// What describes a region to a peer. Whoever has it may use the region as far as its rights go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionTicket {
    /// Its name in the engine that registered it.
    pub region: RegionId,
    /// Its key.
    pub key: RegionKey,
    /// Its length in bytes.
    pub length: u64,
    /// What peers may do.
    pub rights: AccessRights,
}

impl From<RegionTicket> for SegmentInfo {
    fn from(ticket: RegionTicket) -> Self {
        let RegionTicket { region, key, length, rights } = ticket;
        Self { region, key, length, rights, is_file: false }
    }
}

/// How a batch is carried.
#[derive(Clone, Debug, Default)]
pub struct BatchOptions {
    /// Requests that have not ended at this instant end with [`Failure::DeadlinePassed`]. None: after the settings'
    /// time.
    pub deadline: Option<Instant>,
    /// Carry it this way or not at all. None: the best way that there is.
    pub transport: Option<TransportKind>,
    /// What goes first where several batches want the same rails.
    pub priority: Priority,
    /// Sent to every peer of the batch when all requests have succeeded; the batch ends when it has arrived.
    pub notification: Option<Vec<u8>>,
}

/// What an engine holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Registered regions.
    pub regions: usize,
    /// Bytes of registered regions.
    pub registered_bytes: u64,
    /// Open segments.
    pub segments: usize,
    /// Batches that have not ended.
    pub batches: usize,
    /// Connections that peers hold.
    pub connections: usize,
    /// Bytes that peers read over connections.
    pub served_read_bytes: u64,
    /// Bytes that peers wrote over connections.
    pub served_written_bytes: u64,
    /// Requests of peers that were refused.
    pub refused_requests: u64,
}

impl Engine {
    /// Starts an engine: it listens from here on.
    ///
    /// # Errors
    /// Of the settings, and of the system: an address that is in use, no descriptors.
    pub fn start(settings: Settings) -> Result<Self, TransferError> {
        let mut settings = settings.validate()?;
        let rdma = Rdma::start(&settings.rdma);
        if settings.listen_for_rdma_only && rdma.devices().is_empty() {
            settings.listen.clear();
        }
        let settings = Arc::new(settings);
        let random = || stream::random().map_err(TransferError::system("draw a random number"));
        let socket_token = if settings.same_host && !settings.listen.is_empty() { random()? } else { 0 };
        let greeting = Greeting {
            instance: random()?,
            boot_id: stream::boot_id(),
            socket_token,
            purpose: Purpose::Control,
            oldest: VERSION,
            newest: VERSION,
            secret: [0; 32],
            connection: 0,
        };
        let context = Arc::new(Context {
            settings: Arc::clone(&settings),
            greeting,
            regions: Arc::new(Regions::new(settings.regions)),
            devices: rdma.devices(),
            rdma,
            advertised: OnceLock::new(),
            notifications: Arc::new(Notifications::new(settings.notifications)),
            handler: RwLock::new(None),
            retired: Arc::new(Board::new(settings.regions).map_err(TransferError::system("make the board"))?),
            served: ServedCounters::default(),
            staging: Staging::default(),
        });
        let server = Server::start(Arc::clone(&context))?;
        let copiers = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self(Arc::new(Inner {
            greeting,
            server,
            peers: RwLock::new(Peers { slots: Slots::new(settings.segments), by_address: HashMap::new() }),
            segments: RwLock::new(Slots::new(settings.segments)),
            batches: Arc::new(Mutex::new(Slots::new(settings.batches))),
            copiers: Arc::new(Pool::new("tidepool-copy", copiers.min(8))),
            notifiers: Arc::new(Pool::new("tidepool-notify", NOTIFIERS)),
            closed: AtomicBool::new(false),
            prober: Arc::new(Prober::new(settings.connect_timeout)),
            settings,
            context,
        })))
    }

    /// What it asks of peers: [`Settings::admission`](field@Settings::admission), or the secret, or zeros for none.
    pub(crate) fn admission(&self) -> [u8; 32] {
        self.0.settings.admission()
    }

    /// The same engine, not kept by that.
    #[must_use]
    pub fn downgrade(&self) -> WeakEngine {
        WeakEngine(Arc::downgrade(&self.0))
    }

    /// Where it listens, in the order of the settings.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        self.0.server.addresses()
    }

    /// Registers memory: requests may name it, and peers may use it as far as the rights go, if they know the key; those
    /// that know `name` are told the key. The same memory may be registered several times.
    ///
    /// # Errors
    /// `Length` (no bytes, or a name of none or more than 255), `NameTaken`, `Full`.
    pub fn register(
        &self,
        memory: &Memory,
        rights: AccessRights,
        name: Option<&str>,
    ) -> Result<RegionTicket, TransferError> {
        self.0.register(Backing::Memory(memory.clone()), rights, name)
    }

    /// Registers a file, as long as it is now: peers may read and write its bytes as far as the rights go. Those on this
    /// host, and of this user, are passed its descriptor and do that themselves ([`TransportKind::File`]): they could read all
    /// of the file, and change its length if they may write it. Others ask this engine, by TCP.
    ///
    /// A file that is truncated after that fails requests with [`Failure::Truncated`], for good; a disk that fails or is full
    /// gives [`Failure::Storage`]. Unlinking changes nothing. What is written is in the system's hands, not on the disk:
    /// whoever needs that syncs the file.
    ///
    /// # Errors
    /// `NoSegment`: it is no regular file, open for appending or for direct I/O, or not open for what the rights say.
    /// `Length` (no bytes, or a name of none or more than 255), `NameTaken`, `Full`, `System`.
    pub fn register_file(
        &self,
        file: File,
        rights: AccessRights,
        name: Option<&str>,
    ) -> Result<RegionTicket, TransferError> {
        let file = SegmentFile::new(file, rights)?;
        self.0.register(Backing::File(Arc::new(file)), rights, name)
    }

    /// The same for `length` bytes of a file, or whatever else, that an I/O engine of the caller's has open for reading and
    /// writing. It takes requests of any place and length. All peers ask by TCP.
    ///
    /// # Errors
    /// `Length`, `NameTaken`, `Full`.
    #[cfg(feature = "faults")]
    pub fn register_disk(
        &self,
        disk: Arc<dyn tidepool_io::IoEngine>,
        length: u64,
        rights: AccessRights,
        name: Option<&str>,
    ) -> Result<RegionTicket, TransferError> {
        self.0.register(Backing::File(Arc::new(SegmentFile::on(disk, length))), rights, name)
    }

    /// Has the devices register a region for peers now, which takes as long as pinning its pages, rather than when the first
    /// one asks. Blocks.
    ///
    /// # Errors
    /// `UnknownRegion`.
    pub fn prepare(&self, region: RegionId) -> Result<(), TransferError> {
        let region = self.0.context.regions.get(region).ok_or(TransferError::UnknownRegion(region))?;
        drop(self.0.context.rdma.key_list(&region));
        Ok(())
    }

    /// Withdraws a region. Its id and key are stale at once; then what uses it is waited for until `deadline`, and
    /// stopped after it: own batches end with [`Failure::Cancelled`], peers lose the connection that uses it.
    ///
    /// Its memory is freed by whoever uses it last, in this process or, if it is shared, in any.
    ///
    /// # Errors
    /// `UnknownRegion`; `StillInUse` if something had not let go a second after it was stopped.
    pub fn unregister(&self, region: RegionId, deadline: Instant) -> Result<(), TransferError> {
        // First the board: copies of peers that end from here on fail.
        self.0.context.retired.retire(region);
        let withdrawn = self.0.context.regions.withdraw(region)?;
        if withdrawn.wait_until_unused(deadline) {
            return Ok(());
        }
        self.0.server.end_users_of(region);
        for batch in self.0.running_batches() {
            if batch.regions.iter().any(|used| used.id == region) {
                batch.stop(Failure::Cancelled);
            }
        }
        let until = Instant::now() + LET_GO;
        if withdrawn.wait_until_unused(until) { Ok(()) } else { Err(TransferError::StillInUse(region)) }
    }

    /// Connects to the engine at `host:port`, and finds out whether it is on this host. A peer that is not up yet is asked
    /// again until the deadline. Another call for the same running peer gives the same id.
    ///
    /// # Errors
    /// `Address`, `Peer`, `Full`.
    pub fn connect(&self, address: &str, deadline: Instant) -> Result<PeerId, TransferError> {
        self.connect_by(address, self.0.settings.secret, deadline)
    }

    /// As [`Engine::connect`], with another proof than the settings' secret: that which the peer itself has given
    /// ([`Settings::admission`](field@Settings::admission)).
    ///
    /// # Errors
    /// As [`Engine::connect`].
    pub fn connect_by(
        &self,
        address: &str,
        secret: Option<[u8; 32]>,
        deadline: Instant,
    ) -> Result<PeerId, TransferError> {
        self.0.check_open()?;
        let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none_or(|port| port == 0) {
            return Err(TransferError::Address { address: address.to_owned() });
        }
        let means = Means { copiers: &self.0.copiers, prober: &self.0.prober, rdma: &self.0.context.rdma };
        let connected = Peer::connect(address, &self.0.settings, (self.0.greeting, secret), means, deadline);
        let peer = connected.map_err(|error| peer_error(address, error))?;
        let mut peers = self.0.peers.write();
        if let Some(id) = peers.by_address.get(address).copied()
            && let Some(known) = peers.slots.get(id.0)
            && known.greeting.instance == peer.greeting.instance
        {
            drop(peers);
            peer.close();
            return Ok(id);
        }
        let limit = self.0.settings.segments;
        let id = peers.slots.insert_with(|_| Arc::new(peer)).ok_or(TransferError::Full { what: "peers", limit })?;
        // One that was there before keeps its id and its end: its segments say that it restarted.
        peers.by_address.insert(address.to_owned(), PeerId(id));
        if let Some(peer) = peers.slots.get(id) {
            self.0.prober.watch(peer);
        }
        Ok(PeerId(id))
    }

    /// Forgets a peer: what is on its way there ends with [`Failure::Closed`], its id is stale.
    ///
    /// # Errors
    /// `UnknownPeer`.
    pub fn disconnect(&self, peer: PeerId) -> Result<(), TransferError> {
        let mut peers = self.0.peers.write();
        let gone = peers.slots.remove(peer.0).ok_or(TransferError::UnknownPeer(peer))?;
        if peers.by_address.get(&gone.address) == Some(&peer) {
            peers.by_address.remove(&gone.address);
        }
        drop(peers);
        gone.close();
        Ok(())
    }

    /// Opens the region that a peer registered under `name`.
    ///
    /// # Errors
    /// `UnknownPeer`, `Peer` (with [`Failure::NoRegion`] if there is no such name), `Full`.
    pub fn open(&self, peer: PeerId, name: &str, deadline: Instant) -> Result<SegmentId, TransferError> {
        let peer = self.0.peer(peer)?;
        let opened = peer.open(name, deadline).map_err(|error| peer_error(&peer.address, error))?;
        self.0.insert_segment(opened)
    }

    /// Opens a region of a peer whose ticket came another way.
    ///
    /// # Errors
    /// `UnknownPeer`, `Full`. Whether the ticket is good is seen by the first request.
    pub fn open_ticket(
        &self,
        peer: PeerId,
        ticket: RegionTicket,
        deadline: Instant,
    ) -> Result<SegmentId, TransferError> {
        let peer = self.0.peer(peer)?;
        self.0.insert_segment(peer.segment(ticket.into(), deadline))
    }

    /// Closes a segment: its id is stale. Batches on their way go on.
    ///
    /// # Errors
    /// `UnknownSegment`.
    pub fn close_segment(&self, segment: SegmentId) -> Result<(), TransferError> {
        let closed = self.0.segments.write().remove(segment.0);
        closed.map(drop).ok_or(TransferError::UnknownSegment(segment))
    }

    /// Length of an open segment in bytes, and the way that reads of it take now.
    ///
    /// # Errors
    /// `UnknownSegment`.
    pub fn segment(&self, segment: SegmentId) -> Result<(u64, Option<TransportKind>), TransferError> {
        let segments = self.0.segments.read();
        let open = segments.get(segment.0).ok_or(TransferError::UnknownSegment(segment))?;
        let rails = open.peer.rails.reach(None, open, Direction::Read, None);
        let rail = open.peer.rails.first(rails);
        Ok((open.info.length, rail.map(|rail| open.peer.rails.kind(rail))))
    }

    /// What became of requests to a segment, as an error.
    pub(crate) fn failed(&self, segment: SegmentId, failure: Failure) -> TransferError {
        match self.0.segments.read().get(segment.0) {
            Some(open) => peer_error(&open.peer.address, failure.into()),
            None => TransferError::UnknownSegment(segment),
        }
    }

    /// Submits a batch; it is on its way when this returns. Nothing is, if this fails.
    ///
    /// # Errors
    /// `UnknownRegion`, `UnknownSegment`, `Slice`, `NoRight`, `NoWay`, `Full`, `Length`, `Closed`.
    pub fn submit(&self, requests: &[Request], options: BatchOptions) -> Result<Batch, TransferError> {
        let Prepared { batch, posts } = self.0.prepare(requests, options)?;
        posts.into_iter().for_each(Post::post);
        Ok(batch)
    }

    /// Submits a batch and waits for its end; the calling thread carries it as far as it can, which saves the hand-over
    /// to another.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn transfer(&self, requests: &[Request], options: BatchOptions) -> Result<Outcome, TransferError> {
        let Prepared { batch, mut posts } = self.0.prepare(requests, options)?;
        let own = posts.pop();
        posts.into_iter().for_each(Post::post);
        if let Some(Post { peer, groups }) = own {
            peer.rails.carry(groups, &batch.state);
        }
        Ok(batch.wait())
    }

    /// The ways to a peer, best transport first.
    ///
    /// # Errors
    /// `UnknownPeer`.
    pub fn rails(&self, peer: PeerId) -> Result<Vec<RailStatus>, TransferError> {
        Ok(self.0.peer(peer)?.rails.status())
    }

    /// Makes a rail fail as told; `rail` is its place in [`Engine::rails`].
    ///
    /// # Errors
    /// `UnknownPeer`.
    #[cfg(feature = "faults")]
    pub fn set_faults(&self, peer: PeerId, rail: usize, faults: crate::faulty::Faults) -> Result<(), TransferError> {
        self.0.peer(peer)?.rails.set_faults(rail, faults);
        Ok(())
    }

    /// Asks a peer whether it is there.
    ///
    /// # Errors
    /// `UnknownPeer`; `Peer` with the reason.
    pub fn probe(&self, peer: PeerId, deadline: Instant) -> Result<(), TransferError> {
        let peer = self.0.peer(peer)?;
        let probed = peer.probe(deadline);
        probed.map_err(|failure| peer_error(&peer.address, failure.into()))
    }

    /// The oldest notification that a peer sent, waiting for one until `until`.
    #[must_use]
    pub fn take_notification(&self, until: Instant) -> Option<Vec<u8>> {
        self.0.context.notifications.take(until)
    }

    /// From here on, peers' messages are answered by `handler`.
    pub fn set_handler(&self, handler: Arc<dyn Handler>) {
        *self.0.context.handler.write() = Some(handler);
    }

    /// Sends a message and waits for the reply; the calling thread drives the socket.
    ///
    /// # Errors
    /// `UnknownPeer`, `Length`, `NoAnswer` (the peer has no handler, or that gave up), `Peer`.
    pub fn call(&self, peer: PeerId, request: &[u8], deadline: Instant) -> Result<Vec<u8>, TransferError> {
        self.call_all(peer, &[request], deadline)?.pop().unwrap_or(Err(TransferError::NoAnswer("no reply")))
    }

    /// Sends several messages at once and waits for all replies, which come in the order of the requests. Each fails or
    /// succeeds by itself.
    ///
    /// # Errors
    /// As [`Engine::call`], for all: none was sent. `Peer` with [`Failure::Overloaded`] if there are more than the
    /// settings' bound of unanswered messages.
    pub fn call_all(
        &self,
        peer: PeerId,
        requests: &[&[u8]],
        deadline: Instant,
    ) -> Result<Vec<Result<Vec<u8>, TransferError>>, TransferError> {
        self.0.check_open()?;
        let maximum = self.0.settings.message_bytes as u64;
        if let Some(long) = requests.iter().find(|request| request.len() as u64 > maximum) {
            return Err(TransferError::Length { what: "message", length: long.len() as u64, minimum: 0, maximum });
        }
        let peer = self.0.peer(peer)?;
        let started = peer.control.start(wire::Kind::Message, requests, deadline);
        let started = started.map_err(|error| peer_error(&peer.address, error))?;
        let reply = |pending: crate::control::Pending| message::reply(pending.wait(deadline), &peer.address);
        Ok(started.into_iter().map(reply).collect())
    }

    /// Sends a message; the reply is a future. Never blocks, so that it can be used where threads may not: what the socket
    /// doesn't take at once is sent by a thread of the engine, which also receives. Where a thread may wait,
    /// [`Engine::call`] saves the hand-over.
    ///
    /// # Errors
    /// Those of [`Engine::call`] are the future's.
    #[must_use]
    pub fn call_async(&self, peer: PeerId, request: &[u8], deadline: Instant) -> Reply {
        let maximum = self.0.settings.message_bytes as u64;
        let length = request.len() as u64;
        let refused = |error| Reply { state: Err(Some(error)), address: String::new() };
        if length > maximum {
            return refused(TransferError::Length { what: "message", length, minimum: 0, maximum });
        }
        match self.0.peer(peer) {
            Ok(peer) => Reply {
                state: peer
                    .control
                    .drive(request, deadline)
                    .map_err(|failure| Some(peer_error(&peer.address, failure.into()))),
                address: peer.address.clone(),
            },
            Err(error) => refused(error),
        }
    }

    /// Sends `parts` as one message, and gives the answer while it comes: the calling thread receives it, where it wants it.
    /// For messages and answers of many bytes: at most 1 GiB and 16 MiB.
    ///
    /// # Errors
    /// As [`Engine::call`].
    pub fn exchange(&self, peer: PeerId, parts: &[&[u8]], deadline: Instant) -> Result<Answer, TransferError> {
        self.0.check_open()?;
        let peer = self.0.peer(peer)?;
        Answer::ask(&peer, parts, deadline).map_err(|error| not_exchanged(&peer, error))
    }

    /// As [`Engine::exchange`], with the first of two peers; asks the second too if the first has not begun to answer after
    /// `patience`. The answer is that of whichever begins sooner; the other one's is given up with its connection.
    ///
    /// # Errors
    /// As [`Engine::call`], in the name of the first.
    pub fn exchange_either(
        &self,
        [first, second]: [PeerId; 2],
        parts: &[&[u8]],
        patience: Duration,
        deadline: Instant,
    ) -> Result<(Answer, Answered), TransferError> {
        self.0.check_open()?;
        let (first, second) = (self.0.peer(first)?, self.0.peer(second)?);
        Answer::ask_either([&first, &second], parts, patience, deadline).map_err(|error| not_exchanged(&first, error))
    }

    /// What it holds and has done.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let (regions, registered_bytes) = self.0.context.regions.totals();
        let served = &self.0.context.served;
        Totals {
            regions,
            registered_bytes,
            segments: self.0.segments.read().len(),
            batches: self.0.batches.lock().len(),
            connections: self.0.server.connections(),
            served_read_bytes: served.read_bytes.load(Ordering::Relaxed),
            served_written_bytes: served.written_bytes.load(Ordering::Relaxed),
            refused_requests: served.refused_requests.load(Ordering::Relaxed),
        }
    }

    /// Ends it for all clones: stops listening, ends connections and batches ([`Failure::Closed`]), withdraws regions.
    pub fn close(&self) {
        self.0.close();
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("addresses", &self.addresses()).finish_non_exhaustive()
    }
}

fn not_exchanged(peer: &Peer, error: ConnectError) -> TransferError {
    match error.failure {
        Failure::Cancelled => TransferError::NoAnswer("its handler gave the request up"),
        _ => peer_error(&peer.address, error),
    }
}

impl Inner {
    fn register(
        &self,
        backing: Backing,
        rights: AccessRights,
        name: Option<&str>,
    ) -> Result<RegionTicket, TransferError> {
        self.check_open()?;
        let within = |what, length: u64, maximum| match length {
            length if (1..=maximum).contains(&length) => Ok(()),
            length => Err(TransferError::Length { what, length, minimum: 1, maximum }),
        };
        within("region", backing.length(), isize::MAX as u64)?;
        name.map_or(Ok(()), |name| within("name", name.len() as u64, wire::NAME_MAX as u64))?;
        let with_devices = |backing: &Backing| match backing {
            Backing::Memory(memory) => self.register_with_devices(memory, rights),
            Backing::File(_) => Box::default(),
        };
        let region = self.context.regions.register(backing, with_devices, rights, name)?;
        if rights != AccessRights::LOCAL {
            self.context.retired.publish(region.id);
        }
        Ok(RegionTicket { region: region.id, key: region.key, length: region.length(), rights })
    }

    fn register_with_devices(&self, memory: &Memory, rights: AccessRights) -> Box<[Option<Box<dyn Registration>>]> {
        let registrations = self.context.devices.iter().map(|device| {
            let registered = device.register(memory, rights);
            registered
                .inspect_err(|error| tracing::info!(device = device.name(), %error, "memory is not registered"))
                .ok()
        });
        registrations.collect()
    }

    fn check_open(&self) -> Result<(), TransferError> {
        if self.closed.load(Ordering::Acquire) { Err(TransferError::Closed) } else { Ok(()) }
    }

    fn peer(&self, peer: PeerId) -> Result<Arc<Peer>, TransferError> {
        self.check_open()?;
        self.peers.read().slots.get(peer.0).map(Arc::clone).ok_or(TransferError::UnknownPeer(peer))
    }

    fn insert_segment(&self, segment: Segment) -> Result<SegmentId, TransferError> {
        let limit = self.settings.segments;
        let id = self.segments.write().insert_with(|_| Arc::new(segment));
        id.map(SegmentId).ok_or(TransferError::Full { what: "segments", limit })
    }

    fn running_batches(&self) -> Vec<Arc<BatchState>> {
        self.batches.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Counts a batch in, until it ends.
    fn enter(&self, state: &Arc<BatchState>) -> Result<(), TransferError> {
        if state.has_ended() {
            return Ok(());
        }
        let slot = self.batches.lock().insert_with(|_| Arc::downgrade(state));
        let slot = slot.ok_or(TransferError::Full { what: "batches", limit: self.settings.batches })?;
        let batches = Arc::clone(&self.batches);
        state.set_on_end(Box::new(move |_| drop(batches.lock().remove(slot))));
        Ok(())
    }

    fn notify_at_the_end(&self, batch: &Batch, peers: Vec<Arc<Peer>>, notification: Vec<u8>) {
        let (notifiers, result) = (Arc::clone(&self.notifiers), Arc::clone(&batch.notification));
        let state = Arc::downgrade(&batch.state);
        batch.state.set_on_transferred(Box::new(move || {
            let Some(state) = state.upgrade() else { return };
            if !state.succeeded() {
                *result.lock() = Some(Err(Failure::Cancelled));
                return state.finish_notification();
            }
            notifiers.run(move || {
                let sent = peers.iter().try_for_each(|peer| {
                    let sent = peer.control.call(wire::Kind::Notify, &notification, state.deadline);
                    sent.map(drop).map_err(|error| error.failure)
                });
                *result.lock() = Some(sent);
                state.finish_notification();
            });
        }));
    }

    fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.server.stop();
        for batch in self.running_batches() {
            batch.stop(Failure::Closed);
        }
        for peer in self.peers.read().slots.values() {
            peer.close();
        }
        for region in self.context.regions.withdraw_all() {
            self.context.retired.retire(region.id);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

pub(crate) fn peer_error(address: &str, error: ConnectError) -> TransferError {
    TransferError::Peer { address: address.to_owned(), failure: error.failure, source: error.source }
}
