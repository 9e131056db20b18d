//! The side that is asked: listeners, the connections that peers hold, and what each may do.
//!
//! A thread accepts per listener, a thread serves per connection; connections are bounded. A connection must greet in
//! time and prove the secret before anything else of it is read. What a peer sends is bounded by the frame headers;
//! what breaks the protocol ends the connection, never more.

mod control;
mod data;
mod staging;

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

pub(crate) use self::control::Replies;
pub(crate) use self::staging::Staging;
use crate::error::{Failure, TransferError};
use crate::message::Handler;
use crate::notify::Notifications;
use crate::rdma::Rdma;
use crate::region::Regions;
use crate::settings::Settings;
use crate::slice::RegionId;
use crate::slots::Slots;
use crate::stream::{self, Stream};
use crate::transport::Device;
use crate::wire::{GREETING_BYTES, Greeting, HEADER_BYTES, Header, Kind, Purpose, VERSION};

/// Connections that the kernel holds until they are accepted.
const BACKLOG: i32 = 1024;
/// A peer that stops in the middle of a frame, or takes no byte of an answer, for this long loses its connection.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection that was shut down is let go of by its thread at once, unless that is kept from running.
const FENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// What serving needs of the engine.
pub(crate) struct Context {
    pub(crate) settings: Arc<Settings>,
    pub(crate) greeting: Greeting,
    pub(crate) regions: Arc<Regions>,
    /// What memory is registered with, in the order of [`crate::region::Region::registration`].
    pub(crate) devices: Vec<Arc<dyn Device>>,
    pub(crate) rdma: Rdma,
    pub(crate) notifications: Arc<Notifications>,
    pub(crate) handler: parking_lot::RwLock<Option<Arc<dyn Handler>>>,
    pub(crate) retired: Arc<crate::shm::Board>,
    /// Where peers may connect; set once it is known.
    pub(crate) advertised: OnceLock<Vec<String>>,
    pub(crate) served: ServedCounters,
    /// For what is read from and written to registered files.
    pub(crate) staging: Staging,
}

/// What peers were served.
#[derive(Debug, Default)]
pub(crate) struct ServedCounters {
    pub(crate) read_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) refused_requests: AtomicU64,
}

/// Connections by their number; numbers are never used again.
type Registry = Arc<Mutex<Slots<Arc<Connection>>>>;

/// Listeners and connections of an engine.
pub(crate) struct Server {
    context: Arc<Context>,
    connections: Registry,
    stopping: Arc<AtomicBool>,
    listeners: Mutex<Vec<(Stop, std::thread::JoinHandle<()>)>>,
    addresses: Vec<SocketAddr>,
}

/// How to stop a listener: shutting its socket down ends accept().
struct Stop(Socket);

/// One connection being served.
pub(crate) struct Connection {
    stream: Stream,
    /// Instance of the engine that greeted.
    owner: OnceLock<u128>,
    is_over: Mutex<bool>,
    became_over: Condvar,
    /// Regions that the frame being served uses.
    busy_with: Mutex<Vec<RegionId>>,
}

impl Server {
    /// Binds all addresses of the settings, and the unix socket; accepts from then on.
    pub(crate) fn start(context: Arc<Context>) -> Result<Self, TransferError> {
        let limit = context.settings.connections;
        let mut server = Self {
            connections: Arc::new(Mutex::new(Slots::new(limit))),
            stopping: Arc::default(),
            listeners: Mutex::default(),
            addresses: Vec::new(),
            context,
        };
        let settings = Arc::clone(&server.context.settings);
        let mut listeners = Vec::new();
        for address in &settings.listen {
            let listener = bind(address, settings.socket_buffer_bytes)?;
            server.addresses.push(listener.local_addr().map_err(TransferError::system("ask for the address"))?);
            listeners.push(listener);
        }
        // Before anybody is accepted who could ask.
        let _ = server.context.advertised.set(advertised(&settings, &server.addresses));
        for listener in listeners {
            let tls = settings.tls.clone();
            let stop = Stop(SockRef::from(&listener).try_clone().map_err(TransferError::system("clone the listener"))?);
            server.spawn(stop, move || {
                let (stream, _) = listener.accept()?;
                stream::set_tcp_options(&stream)?;
                match &tls {
                    Some(tls) => Ok(Stream::Tls(Box::new(tls.accept(stream)?))),
                    None => Ok(Stream::Tcp(stream)),
                }
            })?;
        }
        if server.context.greeting.socket_token != 0 {
            let bind = || UnixListener::bind_addr(&stream::socket_name(server.context.greeting.socket_token)?);
            let listener = bind().map_err(TransferError::system("bind the unix socket"))?;
            let stop = Stop(SockRef::from(&listener).try_clone().map_err(TransferError::system("clone the listener"))?);
            server.spawn(stop, move || {
                let (stream, _) = listener.accept()?;
                stream::is_same_user(&stream)?;
                Ok(Stream::Unix(stream))
            })?;
        }
        Ok(server)
    }

    /// Where it listens.
    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    fn spawn(&self, stop: Stop, accept: impl Fn() -> io::Result<Stream> + Send + 'static) -> Result<(), TransferError> {
        let (context, connections) = (Arc::clone(&self.context), Arc::clone(&self.connections));
        let stopping = Arc::clone(&self.stopping);
        let thread = std::thread::Builder::new()
            .name("tidepool-accept".into())
            .spawn(move || accept_all(&context, &connections, &stopping, &accept))
            .map_err(TransferError::system("start a thread"))?;
        self.listeners.lock().push((stop, thread));
        Ok(())
    }

    /// Ends the connections that use a region right now: their peers hold it longer than its owner will wait.
    pub(crate) fn end_users_of(&self, region: RegionId) {
        for connection in self.connections.lock().values() {
            if connection.busy_with.lock().contains(&region) {
                connection.stream.shutdown();
            }
        }
    }

    /// How many connections peers hold.
    pub(crate) fn connections(&self) -> usize {
        self.connections.lock().len()
    }

    /// Stops accepting and ends all connections; their threads end on their own.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        for (stop, thread) in self.listeners.lock().drain(..) {
            let _ = stop.0.shutdown(std::net::Shutdown::Both);
            let _ = thread.join();
        }
        for connection in self.connections.lock().values() {
            connection.stream.shutdown();
        }
    }
}

/// What peers are told: what the settings say, else what is listened on, unless that stands for all addresses.
fn advertised(settings: &Settings, addresses: &[SocketAddr]) -> Vec<String> {
    if !settings.advertise.is_empty() {
        return settings.advertise.clone();
    }
    addresses.iter().filter(|address| !address.ip().is_unspecified()).map(SocketAddr::to_string).collect()
}

fn bind(address: &str, buffer_bytes: usize) -> Result<TcpListener, TransferError> {
    use std::net::ToSocketAddrs;
    let wrong = || TransferError::Address { address: address.to_owned() };
    let resolved = address.to_socket_addrs().map_err(|_| wrong())?.next().ok_or_else(wrong)?;
    let bind = || {
        let socket = Socket::new(Domain::for_address(resolved), Type::STREAM, Some(Protocol::TCP))?;
        // A restarted engine gets its port back although old connections still linger.
        socket.set_reuse_address(true)?;
        stream::set_buffers(&socket, buffer_bytes)?;
        socket.bind(&resolved.into())?;
        socket.listen(BACKLOG)?;
        Ok(TcpListener::from(socket))
    };
    bind().map_err(TransferError::system("bind"))
}

fn accept_all(
    context: &Arc<Context>,
    connections: &Registry,
    stopping: &AtomicBool,
    accept: &dyn Fn() -> io::Result<Stream>,
) {
    // Given up when descriptors run out, so that the connection can be taken and closed instead of waiting for ever.
    let mut reserve = File::open("/dev/null").ok();
    while !stopping.load(Ordering::Acquire) {
        match accept() {
            Ok(stream) => start_serving(context, connections, stream),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                drop(reserve.take());
                if let Ok(stream) = accept() {
                    refuse(&stream, Failure::Overloaded);
                }
                reserve = File::open("/dev/null").ok();
            }
            Err(error) => tracing::debug!(%error, "accept"),
        }
    }
}

fn start_serving(context: &Arc<Context>, connections: &Registry, stream: Stream) {
    let connection = Arc::new(Connection::new(stream));
    let Some(slot) = connections.lock().insert_with(|_| Arc::clone(&connection)) else {
        return refuse(&connection.stream, Failure::Overloaded);
    };
    let (context, registry) = (Arc::clone(context), Arc::clone(connections));
    let served = Arc::clone(&connection);
    let spawned = std::thread::Builder::new().name("tidepool-serve".into()).spawn(move || {
        if let Err(failure) = serve(&context, &registry, &served, slot) {
            tracing::debug!(%failure, "connection ended");
        }
        served.stream.shutdown();
        registry.lock().remove(slot);
        *served.is_over.lock() = true;
        served.became_over.notify_all();
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread for a connection");
        connections.lock().remove(slot);
        refuse(&connection.stream, Failure::Overloaded);
    }
}

/// Says why, as far as that can be said at once, and ends the connection.
fn refuse(stream: &Stream, failure: Failure) {
    let mut frame = Vec::with_capacity(HEADER_BYTES);
    Header { status: failure as u32, ..Header::new(Kind::Error, 0) }.encode(&mut frame);
    // An empty socket takes 32 bytes; if it does not, the peer learns of the end anyway.
    let _ = (&mut &*stream).write_all(&frame);
    let _ = SockRef::from(stream).shutdown(std::net::Shutdown::Write);
}

/// Greets, then serves until the peer ends the connection or breaks the protocol.
fn serve(
    context: &Arc<Context>,
    connections: &Registry,
    connection: &Arc<Connection>,
    number: u64,
) -> Result<(), Failure> {
    let hello = welcome(context, &connection.stream, number);
    let hello = hello.inspect_err(|failure| refuse(&connection.stream, *failure))?;
    let _ = connection.owner.set(hello.instance);
    let served = match hello.purpose {
        Purpose::Data => data::serve(context, connections, connection),
        Purpose::Control => control::serve(context, connection),
    };
    if let Err(failure @ (Failure::Protocol | Failure::Version)) = served {
        refuse(&connection.stream, failure);
    }
    served
}

fn welcome(context: &Context, stream: &Stream, number: u64) -> Result<Greeting, Failure> {
    let timeout = context.settings.connect_timeout;
    stream.set_timeouts(timeout, timeout).map_err(|_| Failure::System)?;
    let mut bytes = [0; HEADER_BYTES];
    (&mut &*stream).read_exact(&mut bytes).map_err(|_| Failure::ConnectionLost)?;
    let header = Header::decode(&bytes).map_err(|error| error.failure())?;
    if header.kind != Kind::Hello || header.length != GREETING_BYTES as u64 {
        return Err(Failure::Protocol);
    }
    let mut body = [0; GREETING_BYTES];
    (&mut &*stream).read_exact(&mut body).map_err(|_| Failure::ConnectionLost)?;
    let hello = Greeting::decode(&body).map_err(|error| error.failure())?;
    if !(hello.oldest..=hello.newest).contains(&VERSION) {
        return Err(Failure::Version);
    }
    if !is_equal(&context.settings.admission(), &hello.secret) {
        return Err(Failure::Unauthorized);
    }
    let welcome = Greeting { purpose: hello.purpose, connection: number, ..context.greeting };
    (&mut &*stream).write_all(&welcome.encode(Kind::Welcome)).map_err(|_| Failure::ConnectionLost)?;
    stream.set_timeouts(STALL_TIMEOUT, STALL_TIMEOUT).map_err(|_| Failure::System)?;
    Ok(hello)
}

impl Connection {
    fn new(stream: Stream) -> Self {
        Self {
            stream,
            owner: OnceLock::new(),
            is_over: Mutex::new(false),
            became_over: Condvar::new(),
            busy_with: Mutex::default(),
        }
    }

    /// Ends it, and returns when nothing of it can touch memory any more; `false` if that takes too long.
    fn end(&self) -> bool {
        self.stream.shutdown();
        let until = Instant::now() + FENCE_TIMEOUT;
        let mut is_over = self.is_over.lock();
        while !*is_over {
            if self.became_over.wait_until(&mut is_over, until).timed_out() {
                return *is_over;
            }
        }
        true
    }
}

/// Ends connection `number`, if the engine that `own` belongs to opened it. One that is gone is at its end already.
fn fence(connections: &Registry, own: &Arc<Connection>, number: u64) -> Result<(), Failure> {
    let Some(fenced) = connections.lock().get(number).map(Arc::clone) else { return Ok(()) };
    if Arc::ptr_eq(&fenced, own) || fenced.owner.get() != own.owner.get() {
        return Err(Failure::Protocol);
    }
    if fenced.end() { Ok(()) } else { Err(Failure::System) }
}

/// Compares in time that does not depend on where they differ.
fn is_equal(left: &[u8; 32], right: &[u8; 32]) -> bool {
    let different = left.iter().zip(right).fold(0, |different, (left, right)| different | (left ^ right));
    std::hint::black_box(different) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_differ_in_any_byte() {
        let secret = [7; 32];
        assert!(is_equal(&secret, &secret));
        for index in 0..32 {
            let mut other = secret;
            other[index] ^= 1;
            assert!(!is_equal(&secret, &other));
        }
    }
}
