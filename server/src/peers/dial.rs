//! Outgoing messages: a task and a connection for each node and lane, begun with the first message.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use parking_lot::Mutex;
use tidepool_metadata::{ErrorKind, NodeId};
use tidepool_replication::{Lane, Transport};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, watch};

use super::AddressBook;
use super::frames::{self, Frames, HEAD, PREFACE};
use super::handshake::{Myself, Secret, foreign_cluster, unknown_protocol};
use super::wire::{self, FromCaller, FromNode, from_caller, from_node};
use crate::error::Error;

/// Bytes of one lane that wait. What comes beyond that is dropped, unless nothing waits: Raft sends again.
const WAITING_BYTES: usize = 32 << 20;
/// How long a connection may take, handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The shortest and longest pause between attempts, chosen at random in between.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));
/// How often nodes that are known are called, so that they learn where this one is.
const GREETING_PERIOD: Duration = Duration::from_millis(500);

/// Sends messages to other nodes. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Dialer {
    inner: Arc<Inner>,
}

struct Inner {
    myself: Myself,
    secret: Secret,
    book: Arc<AddressBook>,
    links: Mutex<HashMap<(NodeId, Lane), Arc<Link>>>,
    runtime: Mutex<Option<Runtime>>,
    handle: tokio::runtime::Handle,
    /// Why this node has no place among the others any more.
    unwelcome: watch::Sender<Option<Error>>,
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
        let (links, runtime) = (Mutex::default(), Mutex::new(Some(runtime)));
        let inner = Inner { myself, secret, book, links, runtime, handle, unwelcome: watch::Sender::new(None) };
        let dialer = Self { inner: Arc::new(inner) };
        dialer.inner.handle.spawn(keep_greeting(dialer.clone()));
        Ok(dialer)
    }

    /// What runs the connections, also those that others make.
    pub(crate) fn handle(&self) -> &tokio::runtime::Handle {
        &self.inner.handle
    }

    /// Waits until another node says that this one has no place in the cluster (`REMOVED`, `IDENTITY_TAKEN`), if one ever does.
    /// Cancel-safe.
    pub(crate) async fn unwelcome(&self) -> Error {
        let mut unwelcome = self.inner.unwelcome.subscribe();
        loop {
            let known = unwelcome.borrow_and_update().clone();
            match known {
                Some(error) => return error,
                // Never: the sender is here.
                None => _ = unwelcome.changed().await,
            }
        }
    }

    fn note(&self, error: Option<&Error>) {
        if let Some(error) = error.filter(|error| matches!(error.reason(), "REMOVED" | "IDENTITY_TAKEN")) {
            self.inner.unwelcome.send_replace(Some(error.clone()));
        }
    }

    /// Ends all connections.
    pub(crate) fn stop(&self) {
        self.inner.links.lock().drain().for_each(|(_, link)| link.end());
        if let Some(runtime) = self.inner.runtime.lock().take() {
            runtime.shutdown_background();
        }
    }

    /// Ends the connections to a node that is gone for good.
    pub(crate) fn forget(&self, node: NodeId) {
        let ended = |&(target, _): &(NodeId, Lane), link: &mut Arc<Link>| {
            let ends = target == node;
            if ends {
                link.end();
            }
            !ends
        };
        self.inner.links.lock().retain(ended);
    }

    fn link(&self, target: NodeId, lane: Lane) -> Arc<Link> {
        let start = || {
            let link = Arc::new(Link::default());
            self.inner.handle.spawn(deliver(self.clone(), target, lane, Arc::clone(&link)));
            link
        };
        Arc::clone(self.inner.links.lock().entry((target, lane)).or_insert_with(start))
    }
}

impl Transport for Dialer {
    fn send(&self, target: NodeId, lane: Lane, message: Vec<u8>) {
        if self.inner.runtime.lock().is_some() {
            self.link(target, lane).send(&message);
        }
    }
}

/// One lane to one node.
#[derive(Default)]
struct Link {
    state: Mutex<LinkState>,
    /// Somebody wants the connection, or to have written what waits.
    wake: Notify,
}

#[derive(Default)]
struct LinkState {
    /// While there is a connection.
    socket: Option<Arc<OwnedWriteHalf>>,
    /// Frames that are not written, the first one perhaps in part.
    waiting: BytesMut,
    /// A connection is to be made, if there is none.
    is_wanted: bool,
    has_ended: bool,
}

impl Link {
    /// Writes a message to the connection from the caller's thread if nothing waits, which spares it the way over another thread;
    /// else it waits, for room in the socket or for a connection. Never waits itself.
    fn send(&self, message: &[u8]) {
        let Ok(head) = frames::head(message.len()) else { return };
        let mut state = self.state.lock();
        if state.waiting.len() + message.len() > WAITING_BYTES && !state.waiting.is_empty() {
            // Dropped, as a network might.
            return;
        }
        let written = match &state.socket {
            // Whoever reads from the connection finds out why it can't be written to.
            Some(socket) if state.waiting.is_empty() => {
                socket.try_write_vectored(&[IoSlice::new(&head), IoSlice::new(message)]).unwrap_or(0)
            }
            _ => 0,
        };
        if written == HEAD + message.len() {
            return;
        }
        state.waiting.extend_from_slice(&head[written.min(HEAD)..]);
        state.waiting.extend_from_slice(&message[written.saturating_sub(HEAD)..]);
        state.is_wanted = true;
        drop(state);
        self.wake.notify_one();
    }

    /// Asks for a connection.
    fn call(&self) {
        self.state.lock().is_wanted = true;
        self.wake.notify_one();
    }

    fn end(&self) {
        self.state.lock().has_ended = true;
        self.wake.notify_one();
    }

    /// Waits until a connection is wanted; false if none ever will be again.
    async fn wanted(&self) -> bool {
        loop {
            {
                let state = self.state.lock();
                if state.has_ended || state.is_wanted {
                    return !state.has_ended;
                }
            }
            self.wake.notified().await;
        }
    }

    /// Has messages go out by `socket`, or wait for another one.
    fn connected(&self, socket: Option<&Arc<OwnedWriteHalf>>) {
        let mut state = self.state.lock();
        state.socket = socket.cloned();
        if socket.is_none() {
            // What waited for a connection that there is none of, or that broke, is old, and may be cut.
            (state.waiting, state.is_wanted) = (BytesMut::new(), false);
        }
    }

    /// Writes all that waits.
    async fn flush(&self, socket: &OwnedWriteHalf) -> io::Result<()> {
        loop {
            {
                let mut state = self.state.lock();
                while !state.waiting.is_empty() {
                    match socket.try_write(&state.waiting) {
                        Ok(written) => state.waiting.advance(written),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                        Err(error) => return Err(error),
                    }
                }
                if state.has_ended {
                    return Err(io::ErrorKind::NotConnected.into());
                }
                if state.waiting.is_empty() {
                    // Whatever a burst took.
                    if state.waiting.capacity() > (1 << 20) {
                        state.waiting = BytesMut::new();
                    }
                    return Ok(());
                }
            }
            socket.writable().await?;
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
        connection.reply(address).await.map(drop)
    });
    greeted.await.unwrap_or_else(|_| Err(unreachable_node(address, "no answer in time")))
}

/// Calls all nodes that are known, now and then: whoever moved is found, and finds.
async fn keep_greeting(dialer: Dialer) {
    let mut period = tokio::time::interval(GREETING_PERIOD);
    loop {
        period.tick().await;
        for node in dialer.inner.book.nodes().into_iter().filter(|&node| node != dialer.inner.myself.node) {
            dialer.link(node, Lane::Beat).call();
        }
    }
}

/// Brings the messages of one link to their node until the link ends.
async fn deliver(dialer: Dialer, target: NodeId, lane: Lane, link: Arc<Link>) {
    let Inner { myself, secret, book, .. } = &*dialer.inner;
    while link.wanted().await {
        if let Some(address) = book.address(target) {
            let connected = tokio::time::timeout(CONNECT_TIMEOUT, connect(&address, myself, secret, lane.number()));
            match connected.await.unwrap_or_else(|_| Err(unreachable_node(&address, "no answer in time"))) {
                Ok(connection) if connection.welcome.node == target.0 => {
                    tracing::debug!(%target, ?lane, address, "connected");
                    let why = pump(&link, connection, &address, book).await;
                    dialer.note(why.as_ref().err());
                    tracing::debug!(%target, ?lane, address, ?why, "disconnected");
                }
                Ok(Connection { welcome, .. }) => {
                    tracing::debug!(%target, found = welcome.node, address, "another node has that address now");
                }
                Err(error) => {
                    tracing::debug!(%target, ?lane, address, %error, "connect");
                    dialer.note(Some(&error));
                }
            }
        }
        tokio::time::sleep(pause()).await;
        link.connected(None);
    }
}

fn pause() -> Duration {
    let (least, most) = PAUSES;
    let random = getrandom::u32().unwrap_or(0);
    least + (most - least).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

/// Writes what waits, and reads what the node at `address` says, until the connection ends.
async fn pump(link: &Link, connection: Connection, address: &str, book: &AddressBook) -> Result<(), Error> {
    let Connection { mut replies, socket, .. } = connection;
    let socket = Arc::new(socket);
    link.connected(Some(&socket));
    let lost = |error: io::Error| unreachable_node(address, &error.to_string());
    let write = async {
        loop {
            link.flush(&socket).await.map_err(lost)?;
            link.wake.notified().await;
        }
    };
    let read = async {
        while let Some(FromNode { part }) = replies.message().await.map_err(lost)? {
            match part {
                Some(from_node::Part::Peers(peers)) => book.learn_all(&peers.known),
                Some(from_node::Part::Refused(refused)) => return Err(refusal(address, &refused)),
                // The node says nothing more.
                _ => return Err(unknown_protocol("word")),
            }
        }
        Ok(())
    };
    tokio::select! {
        ended = write => ended,
        ended = read => ended,
    }
}

/// A connection that both sides have proved.
pub(super) struct Connection {
    pub(super) welcome: wire::Welcome,
    replies: Frames<OwnedReadHalf>,
    socket: OwnedWriteHalf,
}

impl Connection {
    /// Says something to the node.
    pub(super) async fn say(&mut self, part: from_caller::Part) -> io::Result<()> {
        self.socket.write_all(&frames::framed(&FromCaller { part: Some(part) })?).await
    }

    /// What the node at `address` says.
    ///
    /// # Errors
    /// What it refuses, with its reason where that is one of ours; `PEER_UNREACHABLE` if it hung up.
    pub(super) async fn reply(&mut self, address: &str) -> Result<from_node::Part, Error> {
        match self.replies.message::<FromNode>().await {
            Ok(Some(FromNode { part: Some(from_node::Part::Refused(refused)) })) => Err(refusal(address, &refused)),
            Ok(Some(FromNode { part: Some(part) })) => Ok(part),
            Ok(_) => Err(unreachable_node(address, "it hung up")),
            Err(error) => Err(unreachable_node(address, &error.to_string())),
        }
    }
}

pub(super) fn unreachable_node(address: &str, what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, "PEER_UNREACHABLE", format!("node at {address}: {what}"))
}

/// Opens a connection of its own, and goes through the handshake.
pub(super) async fn connect(address: &str, myself: &Myself, secret: &Secret, lane: u8) -> Result<Connection, Error> {
    let hello = myself.hello(lane)?;
    let lost = |error: io::Error| unreachable_node(address, &error.to_string());
    let stream = TcpStream::connect(address).await.map_err(lost)?;
    frames::tune(&stream).map_err(lost)?;
    let (source, socket) = stream.into_split();
    let mut connection = Connection { welcome: wire::Welcome::default(), replies: Frames::new(source), socket };
    connection.socket.write_all(&PREFACE).await.map_err(lost)?;
    connection.say(from_caller::Part::Hello(hello.clone())).await.map_err(lost)?;
    let from_node::Part::Welcome(welcome) = connection.reply(address).await? else {
        return Err(unknown_protocol("welcome"));
    };
    secret.check_node(&hello, &welcome)?;
    if myself.cluster != 0 && welcome.cluster != myself.cluster {
        return Err(foreign_cluster(welcome.cluster, myself.cluster));
    }
    connection.say(from_caller::Part::Proof(secret.caller_proof(&hello, &welcome).into())).await.map_err(lost)?;
    connection.welcome = welcome;
    Ok(connection)
}

/// What the other node said, with its reason where it is one of ours.
fn refusal(address: &str, refused: &wire::Refused) -> Error {
    let reasons = ["FOREIGN_CLUSTER", "FOREIGN_SECRET", "CATALOG_EPOCH", "PEER_PROTOCOL", "REMOVED", "IDENTITY_TAKEN"];
    match reasons.into_iter().find(|&reason| reason == refused.reason) {
        Some(reason) => Error::new(ErrorKind::Conflict, reason, format!("node at {address}: {}", refused.message)),
        None => unreachable_node(address, &refused.message),
    }
}
