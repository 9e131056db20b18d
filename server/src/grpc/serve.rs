//! The listeners of gRPC: TCP and a unix socket, with windows made for large values.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream, StreamExt as _, future, stream};
use tidepool_metadata::{ErrorKind, proto};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Status};

use super::values::ValueStreams;
use super::{StoreApi, StoreServer};
use crate::auth::Auth;
use crate::config::Limits;
use crate::error::Error;
use crate::peers::{PREFACE, PeerApi};

/// Largest message, in bytes: a batch of values. Larger values are streamed.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// With the defaults (64 KiB) a stream of large values waits for window updates most of the time.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
const FRAME_BYTES: u32 = (1 << 20) - 1;
/// A silent peer is noticed after this and a timeout of the same length.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// How long a connection may take to say what it is, and how many may be about to.
const FIRST_BYTE: Duration = Duration::from_secs(5);
const UNTOLD: usize = 1024;

/// Bound listeners, not yet served.
pub struct GrpcServer {
    tcp: TcpListener,
    unix: Option<(UnixListener, PathBuf)>,
}

impl GrpcServer {
    /// Binds the listeners, so that an address is published only when it is ours.
    ///
    /// # Errors
    /// `LISTEN` with the address and what to do.
    pub async fn bind(listen: SocketAddr, unix_socket: Option<&Path>) -> Result<Self, Error> {
        let tcp = TcpListener::bind(listen).await.map_err(|error| cannot_listen("grpc.listen", listen, &error))?;
        let unix = match unix_socket {
            None => None,
            Some(path) => Some((bind_unix(path)?, path.to_owned())),
        };
        Ok(Self { tcp, unix })
    }

    /// Where TCP listens.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Serves until `stop` says true; calls under way are finished first.
    ///
    /// # Errors
    /// The transport's.
    pub(crate) async fn serve(
        self,
        api: StoreApi,
        peers: PeerApi,
        auth: Auth,
        limits: &Limits,
        ready: watch::Receiver<bool>,
        stop: watch::Receiver<bool>,
    ) -> Result<(), Error> {
        let store = StoreServer::new(api.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES + (1 << 20));
        let checked = auth.clone();
        let check = move |request: Request<()>| -> Result<Request<()>, Status> {
            checked.check(request.metadata().get("authorization").map(|value| value.as_bytes()))?;
            Ok(request)
        };
        let store = InterceptedService::new(ValueStreams { store, api }, check.clone());
        let (health, health_service) = tonic_health::server::health_reporter();
        tokio::spawn(report_health(health, ready));
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1()
            .map_err(|error| Error::new(ErrorKind::Internal, "INTERNAL", error.to_string()))?;
        let router = Server::builder()
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .max_concurrent_streams(limits.streams)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE))
            .add_service(health_service)
            .add_service(store)
            .add_service(InterceptedService::new(reflection, check));
        let permits = Arc::new(Semaphore::new(limits.connections as usize));
        let tcp = connections(permits.clone(), self.tcp, |listener| async move {
            let accepted = listener.accept().await;
            accepted.and_then(|(socket, _)| socket.set_nodelay(true).map(|()| socket))
        });
        let tcp = calls(tcp, peers);
        let over_tcp = router.clone().serve_with_incoming_shutdown(tcp, stopped(stop.clone()));
        let over_unix =
            async {
                let Some((socket, path)) = self.unix else { return Ok(()) };
                let unix = connections(permits, socket, |listener| async move {
                    listener.accept().await.map(|(socket, _)| socket)
                });
                let served = router.serve_with_incoming_shutdown(unix, stopped(stop)).await;
                let _gone = std::fs::remove_file(path);
                served
            };
        let (tcp, unix) = tokio::join!(over_tcp, over_unix);
        tcp.and(unix).map_err(|error| Error::new(ErrorKind::Internal, "INTERNAL", error.to_string()))
    }
}

/// The connections of clients among `accepted`. Those of nodes are told by their first byte, and given to `peers`, whose runtime
/// reads them.
fn calls(
    accepted: impl Stream<Item = io::Result<Counted<TcpStream>>> + Send + 'static,
    peers: PeerApi,
) -> impl Stream<Item = io::Result<Counted<TcpStream>>> {
    let told = accepted.map(move |accepted| {
        let peers = peers.clone();
        async move {
            let accepted = accepted.ok()?;
            let mut first = [0];
            // Who says nothing is no client.
            let peeked = tokio::time::timeout(FIRST_BYTE, accepted.socket.peek(&mut first)).await;
            if !matches!(peeked, Ok(Ok(1))) {
                return None;
            }
            if first[0] != PREFACE[0] {
                return Some(Ok(accepted));
            }
            peers.take(accepted.socket, accepted.permit);
            None
        }
    });
    told.buffer_unordered(UNTOLD).filter_map(future::ready)
}

/// Binds a socket in the data folder, for this user alone.
pub(crate) fn bind_unix(path: &Path) -> Result<UnixListener, Error> {
    // The data folder's lock is ours, so a socket that is there belongs to nobody.
    let _none = std::fs::remove_file(path);
    let socket = UnixListener::bind(path).and_then(|socket| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(path, mode).map(|()| socket)
    });
    socket.map_err(|error| cannot_listen("grpc.unix_socket", path.display(), &error))
}

/// The error of a listener that can't be bound, with what to do.
pub(crate) fn cannot_listen(field: &'static str, address: impl std::fmt::Display, error: &io::Error) -> Error {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another process listens there: stop it, or choose another port (0 picks a free one)"
        }
        io::ErrorKind::AddrNotAvailable => "no interface of this machine has that address",
        io::ErrorKind::PermissionDenied => "this user may not: choose a port above 1023, or a folder that it may write",
        _ => "choose another address",
    };
    Error::new(ErrorKind::Invalid, "LISTEN", format!("{field} = {address}: {error}; {advice}")).field(field)
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // The sender gone means that the process ends.
    let _gone = stop.wait_for(|stop| *stop).await;
}

async fn report_health(health: tonic_health::server::HealthReporter, mut ready: watch::Receiver<bool>) {
    loop {
        let serving = *ready.borrow_and_update();
        let status =
            if serving { tonic_health::ServingStatus::Serving } else { tonic_health::ServingStatus::NotServing };
        health.set_service_status("", status).await;
        health.set_service_status("tidepool.v1.Store", status).await;
        if ready.changed().await.is_err() {
            return;
        }
    }
}

/// Accepts connections, as many at a time as there are permits; further ones wait in the kernel's queue.
fn connections<L, S, F>(
    permits: Arc<Semaphore>,
    listener: L,
    accept: impl Fn(Arc<L>) -> F + Send + 'static,
) -> impl Stream<Item = io::Result<Counted<S>>>
where
    L: Send + Sync + 'static,
    F: Future<Output = io::Result<S>> + Send,
{
    stream::unfold((permits, Arc::new(listener), accept), |(permits, listener, accept)| async move {
        let permit = Arc::clone(&permits).acquire_owned().await.ok()?;
        loop {
            match accept(Arc::clone(&listener)).await {
                Ok(socket) => return Some((Ok(Counted { socket, permit }), (permits, listener, accept))),
                // A connection that died in the queue, or no descriptors left: neither ends the listener.
                Err(error) => {
                    tracing::warn!(%error, "accept");
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    })
}

/// A connection that gives its permit back when it ends.
struct Counted<S> {
    socket: S,
    permit: OwnedSemaphorePermit,
}

impl<S: Connected> Connected for Counted<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> S::ConnectInfo {
        self.socket.connect_info()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }
}
