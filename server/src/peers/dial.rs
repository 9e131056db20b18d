//! Outgoing messages: a task and a connection for each node and lane, begun with the first message.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tidepool_metadata::{ErrorKind, NodeId};
use tidepool_replication::{Lane, Transport};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

use super::AddressBook;
use super::handshake::{Myself, Secret, foreign_cluster, unknown_protocol};
use super::wire::{self, FromCaller, Messages, from_caller, from_node, peer_client::PeerClient};
use crate::error::Error;

/// Messages of one lane that wait. Beyond that they are dropped: Raft sends again.
const QUEUE: usize = 1024;
/// Messages, and their bytes, that travel as one.
const TOGETHER: usize = 128;
const TOGETHER_BYTES: usize = 1 << 20;
/// Largest message: an entry of the largest commands, or a part of a snapshot.
pub(super) const MESSAGE_BYTES: usize = 8 << 20;
/// How long a connection may take, handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The shortest and longest pause between attempts, chosen at random in between.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));
/// After so long without an answer to a ping the connection counts as dead.
const KEEPALIVE: Duration = Duration::from_secs(2);
/// How often nodes that are known are called, so that they learn where this one is.
const GREETING_PERIOD: Duration = Duration::from_millis(500);

type Queue = mpsc::Sender<Vec<u8>>;

/// Sends messages to other nodes. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Dialer {
    inner: Arc<Inner>,
}

struct Inner {
    myself: Myself,
    secret: Secret,
    book: Arc<AddressBook>,
    queues: Mutex<HashMap<(NodeId, Lane), Queue>>,
    runtime: Mutex<Option<Runtime>>,
    handle: tokio::runtime::Handle,
}

impl Dialer {
    /// Starts its runtime.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn start(myself: Myself, secret: Secret, book: Arc<AddressBook>) -> Result<Self, Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("tidepool-peers")
            .enable_all()
            .build()
            .map_err(|error| {
                Error::new(ErrorKind::Internal, "RUNTIME", format!("start the peers' runtime: {error}"))
            })?;
        let handle = runtime.handle().clone();
        let inner =
            Inner { myself, secret, book, queues: Mutex::default(), runtime: Mutex::new(Some(runtime)), handle };
        let dialer = Self { inner: Arc::new(inner) };
        dialer.inner.handle.spawn(keep_greeting(dialer.clone()));
        Ok(dialer)
    }

    /// Ends all connections.
    pub(crate) fn stop(&self) {
        self.inner.queues.lock().clear();
        if let Some(runtime) = self.inner.runtime.lock().take() {
            runtime.shutdown_background();
        }
    }

    /// Ends the connections to a node that is gone for good.
    pub(crate) fn forget(&self, node: NodeId) {
        self.inner.queues.lock().retain(|&(target, _), _| target != node);
    }

    fn queue(&self, target: NodeId, lane: Lane) -> Queue {
        let mut queues = self.inner.queues.lock();
        let start = || {
            let (sender, receiver) = mpsc::channel(QUEUE);
            self.inner.handle.spawn(deliver(self.clone(), target, lane, receiver));
            sender
        };
        queues.entry((target, lane)).or_insert_with(start).clone()
    }
}

impl Transport for Dialer {
    fn send(&self, target: NodeId, lane: Lane, message: Vec<u8>) {
        if self.inner.runtime.lock().is_some() {
            // Full: it is dropped, as a network might.
            let _ = self.queue(target, lane).try_send(message);
        }
    }
}

/// Calls one node and hangs up: whether it is of the same cluster.
///
/// # Errors
/// `FOREIGN_CLUSTER`, `FOREIGN_SECRET`, `CATALOG_EPOCH`; `PEER_UNREACHABLE`.
pub(crate) async fn greet(address: &str, myself: &Myself, secret: &Secret) -> Result<(), Error> {
    let greeted = tokio::time::timeout(CONNECT_TIMEOUT, async {
        let mut connection = connect(address, myself, secret, Lane::Beat.number()).await?;
        // The node says something only once it has believed the proof.
        connection.replies.message().await.map(drop).map_err(|status| refusal(address, &status))
    });
    greeted.await.unwrap_or_else(|_| Err(unreachable_node(address, "no answer in time")))
}

/// Calls all nodes that are known, now and then: whoever moved is found, and finds.
async fn keep_greeting(dialer: Dialer) {
    let mut period = tokio::time::interval(GREETING_PERIOD);
    loop {
        period.tick().await;
        for node in dialer.inner.book.nodes().into_iter().filter(|&node| node != dialer.inner.myself.node) {
            dialer.send(node, Lane::Beat, Vec::new());
        }
    }
}

/// Brings the messages of one queue to their node until the queue is gone.
async fn deliver(dialer: Dialer, target: NodeId, lane: Lane, mut queue: mpsc::Receiver<Vec<u8>>) {
    let Inner { myself, secret, book, .. } = &*dialer.inner;
    while let Some(first) = queue.recv().await {
        let Some(address) = book.address(target) else { continue };
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connect(&address, myself, secret, lane.number()));
        match connected.await.unwrap_or_else(|_| Err(unreachable_node(&address, "no answer in time"))) {
            Ok(Connection { welcome, messages, replies }) if welcome.node == target.0 => {
                tracing::debug!(%target, ?lane, address, "connected");
                pump(first, &mut queue, messages, replies, book).await;
                tracing::debug!(%target, ?lane, address, "disconnected");
            }
            Ok(Connection { welcome, .. }) => {
                tracing::debug!(%target, found = welcome.node, address, "another node has that address now");
            }
            Err(error) => tracing::debug!(%target, ?lane, address, %error, "connect"),
        }
        tokio::time::sleep(pause()).await;
        // What waited meanwhile is old.
        while queue.try_recv().is_ok() {}
    }
}

fn pause() -> Duration {
    let (least, most) = PAUSES;
    let random = getrandom::u32().unwrap_or(0);
    least + (most - least).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

async fn pump(
    first: Vec<u8>,
    queue: &mut mpsc::Receiver<Vec<u8>>,
    messages: mpsc::Sender<FromCaller>,
    mut replies: tonic::Streaming<wire::FromNode>,
    book: &AddressBook,
) {
    let mut next = Some(first);
    loop {
        let mut together = Vec::new();
        let mut bytes = 0;
        // Empty ones are greetings, and done by the connection itself.
        while let Some(message) = next.take() {
            bytes += message.len();
            if !message.is_empty() {
                together.push(Bytes::from(message));
            }
            if together.len() < TOGETHER && bytes < TOGETHER_BYTES {
                next = queue.try_recv().ok();
            }
        }
        if !together.is_empty() {
            let part = Some(from_caller::Part::Messages(Messages { messages: together }));
            if messages.send(FromCaller { part }).await.is_err() {
                return;
            }
        }
        next = tokio::select! {
            message = queue.recv() => match message {
                Some(message) => Some(message),
                None => return,
            },
            reply = replies.message() => match reply {
                Ok(Some(wire::FromNode { part: Some(from_node::Part::Peers(peers)) })) => {
                    book.learn_all(&peers.known);
                    None
                }
                // The node says nothing more; the end of its stream is that of the connection.
                _ => return,
            },
        };
    }
}

/// A connection that both sides have proved.
pub(super) struct Connection {
    pub(super) welcome: wire::Welcome,
    pub(super) messages: mpsc::Sender<FromCaller>,
    pub(super) replies: tonic::Streaming<wire::FromNode>,
}

pub(super) fn unreachable_node(address: &str, what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, "PEER_UNREACHABLE", format!("node at {address}: {what}"))
}

/// Opens a connection of its own, and goes through the handshake.
pub(super) async fn connect(address: &str, myself: &Myself, secret: &Secret, lane: u8) -> Result<Connection, Error> {
    let hello = myself.hello(lane)?;
    let (messages, stream) = mpsc::channel(8);
    let send = |part| messages.try_send(FromCaller { part: Some(part) }).map_err(|_| unknown_protocol("connection"));
    send(from_caller::Part::Hello(hello.clone()))?;
    let mut client = PeerClient::new(channel(address).await?).max_decoding_message_size(MESSAGE_BYTES);
    let refused = |status: tonic::Status| refusal(address, &status);
    let mut replies = client.exchange(ReceiverStream::new(stream)).await.map_err(refused)?.into_inner();
    let reply = replies.message().await.map_err(refused)?;
    let Some(from_node::Part::Welcome(welcome)) = reply.and_then(|reply| reply.part) else {
        return Err(unknown_protocol("welcome"));
    };
    secret.check_node(&hello, &welcome)?;
    if myself.cluster != 0 && welcome.cluster != myself.cluster {
        return Err(foreign_cluster(welcome.cluster, myself.cluster));
    }
    send(from_caller::Part::Proof(secret.caller_proof(&hello, &welcome).into()))?;
    Ok(Connection { welcome, messages, replies })
}

async fn channel(address: &str) -> Result<Channel, Error> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| unreachable_node(address, &format!("not an address: {error}")))?;
    let endpoint = endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .initial_stream_window_size(4 << 20)
        .initial_connection_window_size(8 << 20);
    endpoint.connect().await.map_err(|error| unreachable_node(address, &error.to_string()))
}

/// What the other node said, with its reason where it is one of ours.
pub(super) fn refusal(address: &str, status: &tonic::Status) -> Error {
    use prost::Message as _;
    let detail = tidepool_metadata::proto::ErrorDetail::decode(status.details()).unwrap_or_default();
    let reasons = ["FOREIGN_CLUSTER", "FOREIGN_SECRET", "CATALOG_EPOCH", "PEER_PROTOCOL"];
    match reasons.into_iter().find(|&reason| reason == detail.reason) {
        Some(reason) => Error::new(ErrorKind::Conflict, reason, format!("node at {address}: {}", status.message())),
        None => unreachable_node(address, status.message()),
    }
}
