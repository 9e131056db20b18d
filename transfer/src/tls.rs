//! TLS 1.3 on TCP connections, with both sides' certificates: rustls between the frames and the socket.
//!
//! The bytes of a frame are the same; they are encrypted on their way from registered memory to the socket, which costs a
//! copy and the cipher. Connections on one host (unix sockets, shared memory) and RDMA are not encrypted.
//!
//! A [`TlsStream`] behaves like a socket: what it takes is not sent yet when the socket is full ([`TlsStream::has_unsent`]),
//! and what it has received may be more than was asked for ([`TlsStream::has_received`]), so that the socket alone doesn't
//! tell whether there is something to read. The session is locked while bytes are moved, never while a thread waits: one
//! may send while another receives.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::PollFlags;
use rustix::net::{RecvFlags, SendFlags};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use crate::error::TransferError;
use crate::lend::{Lending, Wait, poll};

/// Plain bytes that a session takes before they have to be sent.
const SEND_BYTES: usize = 64 << 10;
/// Encrypted bytes received at once.
const RECEIVE_BYTES: usize = 64 << 10;

/// Certificates of a node. Clones are the same.
#[derive(Clone)]
pub struct Tls(Arc<Configs>);

struct Configs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: Option<String>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("name", &self.0.name).finish_non_exhaustive()
    }
}

impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Tls {}

impl Tls {
    /// Reads PEM: this node's certificate with those between it and an authority, its private key, and the authorities
    /// that peers' certificates must come from. Peers' certificates must bear `name`, for example the cluster's; `None`
    /// stands for the host that is connected to.
    ///
    /// # Errors
    /// `Certificate`.
    pub fn from_pem(
        certificates: &[u8],
        key: &[u8],
        authorities: &[u8],
        name: Option<String>,
    ) -> Result<Self, TransferError> {
        let wrong = |what| move |source: rustls::Error| TransferError::Certificate { what, source };
        let text = |error: rustls::pki_types::pem::Error| rustls::Error::General(error.to_string());
        let chain: Vec<_> = CertificateDer::pem_slice_iter(certificates)
            .collect::<Result<_, _>>()
            .map_err(text)
            .map_err(wrong("certificates"))?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(text).map_err(wrong("key"))?;
        let mut roots = RootCertStore::empty();
        for authority in CertificateDer::pem_slice_iter(authorities) {
            let added = authority.map_err(text).and_then(|authority| roots.add(authority));
            added.map_err(wrong("authorities"))?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider)).build();
        let verifier =
            verifier.map_err(|error| rustls::Error::General(error.to_string())).map_err(wrong("authorities"))?;
        let versions = &[&rustls::version::TLS13];
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(wrong("versions"))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(wrong("certificates"))?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(wrong("versions"))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(wrong("certificates"))?;
        Ok(Self(Arc::new(Configs { client: Arc::new(client), server: Arc::new(server), name })))
    }

    /// Reads the same from files. The key's may be read by its owner only.
    ///
    /// # Errors
    /// `Certificate`.
    pub fn from_files(
        certificates: &Path,
        key: &Path,
        authorities: &Path,
        name: Option<String>,
    ) -> Result<Self, TransferError> {
        let read = |what, path: &Path| {
            let wrong = |said: String| {
                let source = rustls::Error::General(format!("{}: {said}", path.display()));
                TransferError::Certificate { what, source }
            };
            let mode = path.metadata().map_err(|error| wrong(error.to_string()))?.mode();
            if what == "key" && mode & 0o077 != 0 {
                return Err(wrong(format!("mode {:03o} lets others read it: chmod 600", mode & 0o777)));
            }
            std::fs::read(path).map_err(|error| wrong(error.to_string()))
        };
        let certificates = read("certificates", certificates)?;
        Self::from_pem(&certificates, &read("key", key)?, &read("authorities", authorities)?, name)
    }

    /// The asking side of a connection to `address`. The handshake happens with the first bytes.
    pub(crate) fn connect(&self, tcp: TcpStream, address: &str) -> io::Result<TlsStream> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
        let name = ServerName::try_from(self.0.name.as_deref().unwrap_or(host).to_owned()).map_err(io::Error::other)?;
        let session = ClientConnection::new(Arc::clone(&self.0.client), name).map_err(io::Error::other)?;
        Ok(TlsStream::new(tcp, session.into()))
    }

    /// The answering side.
    pub(crate) fn accept(&self, tcp: TcpStream) -> io::Result<TlsStream> {
        let session = ServerConnection::new(Arc::clone(&self.0.server)).map_err(io::Error::other)?;
        Ok(TlsStream::new(tcp, session.into()))
    }
}

/// See the module.
pub(crate) struct TlsStream {
    tcp: TcpStream,
    session: Mutex<Session>,
    /// What a call may wait, in milliseconds.
    receipt_timeout: AtomicU64,
    send_timeout: AtomicU64,
}

struct Session {
    tls: Connection,
    /// Encrypted bytes that were received and not decrypted yet.
    received: Vec<u8>,
    start: usize,
    /// Plain bytes on their way to or from registered memory.
    plain: Vec<u8>,
}

impl std::fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsStream").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}

impl AsFd for TlsStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tcp.as_fd()
    }
}

impl TlsStream {
    fn new(tcp: TcpStream, tls: Connection) -> Self {
        let session = Session { tls, received: Vec::new(), start: 0, plain: Vec::new() };
        Self { tcp, session: Mutex::new(session), receipt_timeout: AtomicU64::new(0), send_timeout: AtomicU64::new(0) }
    }

    pub(crate) fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    pub(crate) fn set_timeouts(&self, receipt: Duration, send: Duration) {
        let milliseconds = |timeout: Duration| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).max(1);
        self.receipt_timeout.store(milliseconds(receipt), Ordering::Relaxed);
        self.send_timeout.store(milliseconds(send), Ordering::Relaxed);
    }

    /// Whether bytes that it took wait for room in the socket.
    pub(crate) fn has_unsent(&self) -> bool {
        self.session.lock().tls.wants_write()
    }

    /// Whether there may be bytes to read that the socket doesn't tell of.
    pub(crate) fn has_received(&self) -> bool {
        let mut session = self.session.lock();
        session.start < session.received.len() || session.has_plain()
    }

    /// Sends what can be sent of a message; gives how many of its bytes were taken.
    pub(crate) fn send(&self, lending: &mut Lending, wait: Wait) -> io::Result<usize> {
        self.sending(wait, |session| {
            let Session { tls, plain, .. } = session;
            plain.clear();
            let taken = lending.give(plain, SEND_BYTES);
            tls.writer().write_all(plain)?;
            Ok((taken, lending.left() > 0))
        })
    }

    /// The same for bytes, without waiting.
    pub(crate) fn send_now(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut taken = 0;
        self.sending(Wait::No, |session| {
            let part = &bytes[taken..(taken + SEND_BYTES).min(bytes.len())];
            session.tls.writer().write_all(part)?;
            taken += part.len();
            Ok((part.len(), taken < bytes.len()))
        })
    }

    /// Lets the session take parts of something as long as the socket takes what comes of them. `take` gives how many
    /// bytes it took, and whether there are more.
    fn sending(
        &self,
        wait: Wait,
        mut take: impl FnMut(&mut Session) -> io::Result<(usize, bool)>,
    ) -> io::Result<usize> {
        let until = Instant::now() + Duration::from_millis(self.send_timeout.load(Ordering::Relaxed));
        let (mut taken, mut has_more) = (0, true);
        loop {
            let mut session = self.session.lock();
            session.flush(&self.tcp)?;
            while !session.tls.wants_write() && has_more {
                let (count, more) = take(&mut session)?;
                (taken, has_more) = (taken + count, more && count > 0);
                session.flush(&self.tcp)?;
            }
            let is_sent = !session.tls.wants_write();
            drop(session);
            if is_sent || (wait == Wait::No && taken > 0) {
                return Ok(taken);
            }
            let left = until.saturating_duration_since(Instant::now());
            if wait == Wait::No || left.is_zero() {
                return if taken > 0 { Ok(taken) } else { Err(io::ErrorKind::WouldBlock.into()) };
            }
            poll(self.tcp.as_fd(), PollFlags::OUT, left)?;
        }
    }

    /// Receives into a message; gives how many bytes that were. The peer's end is `UnexpectedEof`.
    pub(crate) fn receive(&self, lending: &mut Lending, wait: Wait) -> io::Result<usize> {
        if lending.left() == 0 {
            return Ok(0);
        }
        let received = self.receiving(wait, |session| {
            let wanted = usize::try_from(lending.left()).unwrap_or(usize::MAX).min(RECEIVE_BYTES);
            let Session { tls, plain, .. } = session;
            plain.resize(wanted, 0);
            let count = tls.reader().read(plain)?;
            lending.take_from(&plain[..count]);
            Ok((count, lending.left() > 0))
        })?;
        if received == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(received) }
    }

    /// The same into bytes; 0 at the peer's end.
    fn read_some(&self, bytes: &mut [u8], wait: Wait) -> io::Result<usize> {
        self.receiving(wait, |session| Ok((session.tls.reader().read(bytes)?, false)))
    }

    /// The same, without waiting.
    pub(crate) fn receive_now(&self, bytes: &mut [u8]) -> io::Result<usize> {
        self.read_some(bytes, Wait::No)
    }

    /// Decrypts what comes and lets `take` have it, until it wants no more or nothing comes.
    fn receiving(
        &self,
        wait: Wait,
        mut take: impl FnMut(&mut Session) -> io::Result<(usize, bool)>,
    ) -> io::Result<usize> {
        let until = Instant::now() + Duration::from_millis(self.receipt_timeout.load(Ordering::Relaxed));
        let mut taken = 0;
        loop {
            let mut session = self.session.lock();
            match take(&mut session) {
                Ok((0, _)) => return Ok(taken),
                Ok((count, wants_more)) => {
                    taken += count;
                    if wants_more {
                        continue;
                    }
                    return Ok(taken);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // An end without a goodbye is an end: frames say themselves whether they are complete.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(taken),
                Err(error) => return Err(error),
            }
            if session.decrypt(&self.tcp)? {
                continue;
            }
            // What was taken and not sent yet may be what the answer waits for.
            session.flush(&self.tcp)?;
            let events = if session.tls.wants_write() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            drop(session);
            let left = until.saturating_duration_since(Instant::now());
            if taken > 0 && wait != Wait::All {
                return Ok(taken);
            }
            if wait == Wait::No || left.is_zero() {
                return if taken > 0 { Ok(taken) } else { Err(io::ErrorKind::WouldBlock.into()) };
            }
            poll(self.tcp.as_fd(), events, left)?;
        }
    }
}

impl Session {
    fn has_plain(&mut self) -> bool {
        // Looking needs `BufRead`, which gives what is there without taking it.
        io::BufRead::fill_buf(&mut self.tls.reader()).is_ok_and(|bytes| !bytes.is_empty())
    }

    /// Sends what the socket takes.
    fn flush(&mut self, tcp: &TcpStream) -> io::Result<()> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Now(tcp)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Receives, if nothing is left to decrypt, and decrypts; `false` if there was nothing to receive.
    fn decrypt(&mut self, tcp: &TcpStream) -> io::Result<bool> {
        if self.start == self.received.len() {
            self.start = 0;
            self.received.resize(RECEIVE_BYTES, 0);
            let count = Now(tcp).read(&mut self.received);
            self.received.truncate(*count.as_ref().unwrap_or(&0));
            match count {
                // The session is told of the end, and says of it what there is to say.
                Ok(0) => drop(self.tls.read_tls(&mut io::empty())?),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        while self.start < self.received.len() {
            let mut rest = &self.received[self.start..];
            match self.tls.read_tls(&mut rest) {
                Ok(count) => self.start += count,
                // It holds as much plain text as it likes to: that is taken first.
                Err(_) if self.has_plain() => break,
                Err(error) => return Err(error),
            }
            let processed = self.tls.process_new_packets();
            // What there is to say, an alert too.
            let flushed = self.flush(tcp);
            processed.map_err(refusal)?;
            flushed?;
        }
        Ok(true)
    }
}

/// Tells a certificate that one side refused from a peer that does not speak TLS.
fn refusal(error: rustls::Error) -> io::Error {
    use rustls::{AlertDescription as Alert, Error};
    let is_certificate = match &error {
        Error::InvalidCertificate(_) | Error::NoCertificatesPresented => true,
        Error::AlertReceived(alert) => matches!(
            alert,
            Alert::BadCertificate
                | Alert::UnknownCA
                | Alert::CertificateRequired
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::UnsupportedCertificate
                | Alert::AccessDenied
                | Alert::DecryptError
        ),
        _ => false,
    };
    let kind = if is_certificate { io::ErrorKind::PermissionDenied } else { io::ErrorKind::InvalidData };
    io::Error::new(kind, error)
}

impl Read for &TlsStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.read_some(bytes, Wait::Some)
    }
}

impl Write for &TlsStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut taken = 0;
        self.sending(Wait::Some, |session| {
            let part = &bytes[taken..(taken + SEND_BYTES).min(bytes.len())];
            session.tls.writer().write_all(part)?;
            taken += part.len();
            Ok((part.len(), taken < bytes.len()))
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A socket that never waits.
struct Now<'a>(&'a TcpStream);

impl Read for Now<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::net::recv(self.0, bytes, RecvFlags::DONTWAIT)?.0)
    }
}

impl Write for Now<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
