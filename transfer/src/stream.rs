//! Connections: TCP or unix sockets, their options, and the greeting with which each begins.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::PollFlags;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::error::Failure;
use crate::lend::{Lending, Wait, poll};
use crate::tls::{Tls, TlsStream};
use crate::wire::{GREETING_BYTES, Greeting, HEADER_BYTES, Header, Kind};

/// A driver that waits in a receipt looks around at least this often: for deadlines, cancellations, silence.
pub(crate) const TICK: Duration = Duration::from_millis(50);
/// Silence on an idle connection before the kernel probes it, and between its probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_PROBES: u32 = 3;
/// Plain bytes of a TLS record, at most.
const TLS_BYTES: usize = 16 << 10;
/// What one address of several may take before the next is tried.
const FIRST_ADDRESS_TIMEOUT: Duration = Duration::from_millis(300);

/// Whether a connection that is being made is still wanted is asked this often.
const WANTED_CHECK: Duration = Duration::from_millis(5);

/// A connected socket.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream>),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
            Self::Tls(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    /// Makes receipts and sends give up after these.
    pub(crate) fn set_timeouts(&self, receipt: Duration, send: Duration) -> io::Result<()> {
        if let Self::Tls(stream) = self {
            stream.set_timeouts(receipt, send);
        }
        let socket = SockRef::from(self);
        socket.set_read_timeout(Some(receipt.max(Duration::from_millis(1))))?;
        socket.set_write_timeout(Some(send.max(Duration::from_millis(1))))
    }

    /// Whom a TCP connection reached.
    pub(crate) fn peer_address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(stream) => stream.peer_addr().ok(),
            Self::Tls(stream) => stream.tcp().peer_addr().ok(),
            Self::Unix(_) => None,
        }
    }

    /// Sends what can be sent of a message. Bytes that it took may wait for room: [`Stream::has_unsent`].
    pub(crate) fn send(&self, message: &mut Lending, wait: Wait) -> io::Result<usize> {
        match self {
            Self::Tls(stream) => stream.send(message, wait),
            socket => message.send(socket.as_fd(), wait),
        }
    }

    /// Receives into a message.
    pub(crate) fn receive(&self, message: &mut Lending, wait: Wait) -> io::Result<usize> {
        match self {
            Self::Tls(stream) => stream.receive(message, wait),
            socket => message.receive(socket.as_fd(), wait),
        }
    }

    /// Sends what it takes without waiting.
    pub(crate) fn send_now(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tls(stream) => stream.send_now(bytes),
            socket => Ok(rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?),
        }
    }

    /// Receives what is there without waiting; 0 at the peer's end.
    pub(crate) fn receive_now(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tls(stream) => stream.receive_now(bytes),
            socket => Ok(rustix::net::recv(socket, bytes, RecvFlags::DONTWAIT)?.0),
        }
    }

    /// Receives until `bytes` are full, at most for the socket's timeout; 0 at the peer's end.
    pub(crate) fn receive_all(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tls(stream) => (&mut &**stream).read(bytes),
            socket => Ok(rustix::net::recv(socket, bytes, RecvFlags::WAITALL)?.0),
        }
    }

    /// Receives behind what `target` has, as much as came and it has room for; 0 at the peer's end.
    pub(crate) fn receive_behind(&self, target: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Tls(stream) => {
                let mut bytes = [0; TLS_BYTES];
                let room = (target.capacity() - target.len()).min(TLS_BYTES);
                let count = (&mut &**stream).read(&mut bytes[..room])?;
                target.extend_from_slice(&bytes[..count]);
                Ok(count)
            }
            socket => Ok(rustix::net::recv(socket, spare_capacity(target), RecvFlags::empty())?.1),
        }
    }

    /// Whether bytes that it took wait for room in the socket: another send, of nothing too, goes on with them.
    pub(crate) fn has_unsent(&self) -> bool {
        if let Self::Tls(stream) = self { stream.has_unsent() } else { false }
    }

    /// Whether there may be bytes to receive that polling the socket doesn't tell of.
    pub(crate) fn has_received(&self) -> bool {
        if let Self::Tls(stream) = self { stream.has_received() } else { false }
    }

    /// Waits until one of `events` is there, at most `timeout`.
    pub(crate) fn poll(&self, events: PollFlags, timeout: Duration) -> io::Result<PollFlags> {
        if events.contains(PollFlags::IN) && self.has_received() {
            return Ok(PollFlags::IN);
        }
        poll(self.as_fd(), events, timeout)
    }

    /// Ends it for both sides; whoever waits in it returns.
    pub(crate) fn shutdown(&self) {
        // Fails only if the peer ended it first.
        let _ = SockRef::from(self).shutdown(Shutdown::Both);
    }
}

impl Read for &Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).read(bytes),
            Stream::Unix(stream) => (&mut &*stream).read(bytes),
            Stream::Tls(stream) => (&mut &**stream).read(bytes),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).write(bytes),
            Stream::Unix(stream) => (&mut &*stream).write(bytes),
            Stream::Tls(stream) => (&mut &**stream).write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tls(stream) => {
                let slice = slices.iter().find(|slice| !slice.is_empty());
                slice.map_or(Ok(0), |slice| (&mut &**stream).write(slice))
            }
            // Not writev: where nobody ignores SIGPIPE (a C program), a peer that is gone would end the process.
            socket => {
                Ok(rustix::net::sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why there is no connection.
#[derive(Debug)]
pub(crate) struct ConnectError {
    pub(crate) failure: Failure,
    pub(crate) source: Option<io::Error>,
}

impl From<Failure> for ConnectError {
    fn from(failure: Failure) -> Self {
        Self { failure, source: None }
    }
}

impl ConnectError {
    fn io(failure: Failure) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { failure, source: Some(source) }
    }

    /// An error of connect(): without descriptors or ports there is no room, else nobody is there.
    fn of_connect(source: io::Error) -> Self {
        let failure = match source.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EADDRNOTAVAIL) => {
                Failure::Overloaded
            }
            _ => Failure::Unreachable,
        };
        Self { failure, source: Some(source) }
    }
}

/// Connects to the first address of a name that answers. Names are resolved each time: a peer may move.
///
/// Each address gets 300 ms, then all of them what is left, so that a dead address family costs little.
pub(crate) fn connect_tcp(
    address: &str,
    tls: Option<&Tls>,
    deadline: Instant,
    buffer_bytes: usize,
) -> Result<Stream, ConnectError> {
    connect_tcp_while(address, tls, deadline, buffer_bytes, &mut || true)
}

/// The same, as long as `still` says that it is wanted.
pub(crate) fn connect_tcp_while(
    address: &str,
    tls: Option<&Tls>,
    deadline: Instant,
    buffer_bytes: usize,
    still: &mut dyn FnMut() -> bool,
) -> Result<Stream, ConnectError> {
    let unreachable = ConnectError::io(Failure::Unreachable);
    let named = address;
    let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(unreachable)?.collect();
    let mut last = ConnectError::from(Failure::Unreachable);
    let many = addresses.len() > 1;
    for bound in [FIRST_ADDRESS_TIMEOUT, Duration::MAX] {
        for address in &addresses {
            let left = deadline.saturating_duration_since(Instant::now()).min(if many { bound } else { Duration::MAX });
            if left.is_zero() || !still() {
                return Err(last);
            }
            match connect_one(*address, left, buffer_bytes, still) {
                Ok(stream) => match tls {
                    Some(tls) => {
                        let stream = tls.connect(stream, named).map_err(ConnectError::io(Failure::System))?;
                        return Ok(Stream::Tls(Box::new(stream)));
                    }
                    None => return Ok(Stream::Tcp(stream)),
                },
                Err(error) => last = ConnectError::of_connect(error),
            }
        }
        let timed_out = last.source.as_ref().is_some_and(|error| error.kind() == io::ErrorKind::TimedOut);
        if !many || !timed_out {
            break;
        }
    }
    Err(last)
}

fn connect_one(
    address: SocketAddr,
    timeout: Duration,
    buffer_bytes: usize,
    still: &mut dyn FnMut() -> bool,
) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // Before the connection: the window scale is agreed on with it.
    set_buffers(&socket, buffer_bytes)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => await_connection(&socket, timeout, still)?,
        Err(error) => return Err(error),
    }
    socket.set_nonblocking(false)?;
    let stream = TcpStream::from(socket);
    // On loopback, a connection to a free ephemeral port can end up connected to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    set_tcp_options(&stream)?;
    Ok(stream)
}

/// Waits until a connection is made or refused.
fn await_connection(socket: &Socket, timeout: Duration, still: &mut dyn FnMut() -> bool) -> io::Result<()> {
    let until = Instant::now().checked_add(timeout);
    loop {
        let left = until.map_or(WANTED_CHECK, |until| until.saturating_duration_since(Instant::now()));
        if left.is_zero() || !still() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let events = poll(socket.as_fd(), PollFlags::OUT, left.min(WANTED_CHECK))?;
        if !events.is_empty() {
            return socket.take_error()?.map_or(Ok(()), Err);
        }
    }
}

/// Options of both ends: no delay, and the kernel's means against silent peers.
pub(crate) fn set_tcp_options(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let keepalive =
        TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL).with_retries(KEEPALIVE_PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    // Unacknowledged bytes, or a closed window, for this long end the connection.
    socket.set_tcp_user_timeout(Some(KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_PROBES))
}

/// Sets both buffers if the system allows as many bytes; a smaller fixed buffer is worse than the system's tuning.
pub(crate) fn set_buffers(socket: &Socket, bytes: usize) -> io::Result<()> {
    let allowed = |name| {
        let limit = std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).unwrap_or_default();
        bytes > 0 && limit.trim().parse::<usize>().is_ok_and(|limit| limit >= bytes)
    };
    if allowed("rmem_max") {
        socket.set_recv_buffer_size(bytes)?;
    }
    if allowed("wmem_max") {
        socket.set_send_buffer_size(bytes)?;
    }
    Ok(())
}

/// Name of an engine's unix socket, in the abstract name space of the network namespace.
pub(crate) fn socket_name(token: u128) -> io::Result<std::os::unix::net::SocketAddr> {
    std::os::unix::net::SocketAddr::from_abstract_name(format!("tidepool-transfer-{token:032x}"))
}

/// Connects to the unix socket of an engine on this host.
pub(crate) fn connect_unix(token: u128) -> Result<Stream, ConnectError> {
    let connect = || UnixStream::connect_addr(&socket_name(token)?);
    let stream = connect().map_err(ConnectError::of_connect)?;
    is_same_user(&stream).map_err(ConnectError::io(Failure::Unauthorized))?;
    Ok(Stream::Unix(stream))
}

/// Both ends of a unix socket belong to the same user, or one of them to root.
pub(crate) fn is_same_user(stream: &UnixStream) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?.uid;
    let own = rustix::process::geteuid();
    if peer == own || peer.is_root() || own.is_root() { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// Greets whoever accepted a connection; gives who it is. Then receipts and sends give up after a tick.
pub(crate) fn greet(stream: &Stream, greeting: &Greeting, deadline: Instant) -> Result<Greeting, ConnectError> {
    greet_while(stream, greeting, deadline, &mut || true)
}

/// The same, as long as `still` says that it is wanted.
pub(crate) fn greet_while(
    stream: &Stream,
    greeting: &Greeting,
    deadline: Instant,
    still: &mut dyn FnMut() -> bool,
) -> Result<Greeting, ConnectError> {
    // The session of a TLS connection begins here too: what it refuses is no lost connection.
    let lost = || {
        |source: io::Error| {
            let failure = match source.kind() {
                io::ErrorKind::PermissionDenied => Failure::Unauthorized,
                io::ErrorKind::InvalidData => Failure::Protocol,
                _ => Failure::Unreachable,
            };
            ConnectError { failure, source: Some(source) }
        }
    };
    let left = deadline.saturating_duration_since(Instant::now());
    stream.set_timeouts(WANTED_CHECK, left).map_err(lost())?;
    (&mut &*stream).write_all(&greeting.encode(Kind::Hello)).map_err(lost())?;
    let mut header = [0; HEADER_BYTES];
    read_all(stream, &mut header, deadline, still).map_err(lost())?;
    let header = Header::decode(&header).map_err(|error| ConnectError::from(error.failure()))?;
    match header.kind {
        Kind::Welcome if header.length == GREETING_BYTES as u64 => {}
        Kind::Error => return Err(header.failure().into()),
        _ => return Err(Failure::Protocol.into()),
    }
    let mut body = [0; GREETING_BYTES];
    read_all(stream, &mut body, deadline, still).map_err(lost())?;
    let welcome = Greeting::decode(&body).map_err(|error| ConnectError::from(error.failure()))?;
    stream.set_timeouts(TICK, TICK).map_err(lost())?;
    Ok(welcome)
}

/// Fills `bytes` from a stream whose receipts give up now and then.
fn read_all(
    mut stream: &Stream,
    mut bytes: &mut [u8],
    deadline: Instant,
    still: &mut dyn FnMut() -> bool,
) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                if Instant::now() >= deadline || !still() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Boot id of this host; 0 if it can't be read, which is nobody's.
pub(crate) fn boot_id() -> u128 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0)
}

/// A random number that is not 0.
pub(crate) fn random() -> io::Result<u128> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(u128::from_le_bytes(bytes).max(1))
}
