//! Incoming connections of other nodes.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tidepool_metadata::catalog::{Answer, Query};
use tidepool_metadata::{ErrorKind, Incarnation, NodeId};
use tidepool_replication::{CatalogError, Lane, MemberChange, MemberId, Read};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::AddressBook;
use super::frames::{self, Frames, MESSAGE_BYTES};
use super::handshake::{
    Myself, NONCE_BYTES, Secret, check_version, foreign_cluster, foreign_epoch, nonce, removed, taken, unknown_protocol,
};
use super::wire::{FromCaller, FromNode, Hello, Joined, Peers, Refused, Welcome, from_caller, from_node};
use crate::error::Error;
use crate::node::NodeService;

/// How long a caller may take to prove itself.
const PROOF_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a join may take: a committed change of members.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);

/// How often it is looked whether a caller is unwelcome since.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// Takes other nodes' messages. Cheap to clone.
#[derive(Clone)]
pub(crate) struct PeerApi {
    myself: Myself,
    secret: Secret,
    book: Arc<AddressBook>,
    service: NodeService,
    /// What reads the connections.
    runtime: Handle,
    stop: watch::Receiver<bool>,
}

impl PeerApi {
    pub(crate) fn new(
        myself: Myself,
        secret: Secret,
        book: Arc<AddressBook>,
        service: NodeService,
        runtime: Handle,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Self { myself, secret, book, service, runtime, stop }
    }

    /// Takes a connection that began as one between nodes, nothing of it read; `permit` is given back at its end.
    pub(crate) fn take(&self, socket: TcpStream, permit: OwnedSemaphorePermit) {
        let api = self.clone();
        let socket = frames::tune(&socket).and_then(|()| socket.into_std());
        self.runtime.spawn(async move {
            let _permit = permit;
            // From here on it belongs to this runtime.
            let ended = match socket.and_then(TcpStream::from_std) {
                Ok(socket) => api.serve(socket).await,
                Err(error) => Err(error),
            };
            tracing::debug!(?ended, "a connection of a node is over");
        });
    }

    async fn serve(self, socket: TcpStream) -> io::Result<()> {
        let (source, mut socket) = socket.into_split();
        let mut parts = Frames::new(source);
        let hello = tokio::time::timeout(PROOF_TIMEOUT, async {
            if parts.begin().await? { parts.message::<FromCaller>().await } else { Ok(None) }
        });
        let Ok(Some(FromCaller { part: Some(from_caller::Part::Hello(hello)) })) = hello.await? else {
            return refuse(&mut socket, &unknown_protocol("hello")).await;
        };
        let node = NodeId(hello.node);
        match self.converse(hello, parts, &mut socket).await {
            Ok(ended) => ended,
            Err(error) => {
                if error.kind() == ErrorKind::Denied {
                    tracing::warn!(%node, %error, "a caller that is no node of this cluster");
                }
                refuse(&mut socket, &error).await
            }
        }
    }

    fn welcome(&self, hello: &Hello) -> Result<Welcome, Error> {
        check_version(hello)?;
        if hello.nonce.len() != NONCE_BYTES {
            return Err(unknown_protocol("hello"));
        }
        let Myself { node, incarnation, cluster, epoch, .. } = self.myself;
        if hello.cluster != 0 && hello.cluster != cluster {
            return Err(foreign_cluster(cluster, hello.cluster));
        }
        if hello.cluster != 0 && hello.epoch != epoch {
            return Err(foreign_epoch(epoch, hello.epoch));
        }
        let mut welcome =
            Welcome { node: node.0, incarnation: incarnation.0, cluster, epoch, nonce: nonce()?, ..Welcome::default() };
        welcome.proof = self.secret.node_proof(hello, &welcome).into();
        Ok(welcome)
    }

    /// Reads what the caller says until it or this node goes.
    async fn converse(
        mut self,
        hello: Hello,
        mut parts: Frames<OwnedReadHalf>,
        socket: &mut OwnedWriteHalf,
    ) -> Result<io::Result<()>, Error> {
        let welcome = self.welcome(&hello)?;
        if let Err(error) = say(socket, from_node::Part::Welcome(welcome.clone())).await {
            return Ok(Err(error));
        }
        let proof = tokio::time::timeout(PROOF_TIMEOUT, parts.message()).await;
        let Ok(Ok(Some(FromCaller { part: Some(from_caller::Part::Proof(proof)) }))) = proof else {
            return Err(unknown_protocol("proof"));
        };
        self.secret.check_caller(&hello, &welcome, &proof)?;
        let node = NodeId(hello.node);
        self.refuse_unwelcome(&hello).await?;
        self.book.learn(node, Incarnation(hello.incarnation), &hello.address);
        if let Err(error) = say(socket, from_node::Part::Peers(Peers { known: self.book.all() })).await {
            return Ok(Err(error));
        }
        if hello.cluster == 0 {
            let Ok(Some(FromCaller { part: Some(from_caller::Part::Join(join)) })) = parts.message().await else {
                return Err(unknown_protocol("join"));
            };
            let kind = if join.guest { MemberId::guest } else { MemberId::new };
            let member = kind(node, join.life.max(1));
            let members = tokio::time::timeout(JOIN_TIMEOUT, self.admit(member)).await;
            let members = members.map_err(|_| CatalogError::OutcomeUnknown)??.into();
            return Ok(say(socket, from_node::Part::Joined(Joined { members })).await);
        }
        let lane = Lane::ALL.into_iter().find(|lane| u32::from(lane.number()) == hello.lane);
        let lane = lane.ok_or_else(|| unknown_protocol("lane"))?;
        let mut looks = tokio::time::interval(LOOK_AGAIN);
        loop {
            let message = tokio::select! {
                message = parts.next(MESSAGE_BYTES) => Some(message),
                _ = looks.tick() => None,
                _ = self.stop.wait_for(|stop| *stop) => return Ok(Ok(())),
            };
            let Some(message) = message else {
                self.refuse_unwelcome(&hello).await?;
                continue;
            };
            match message {
                Ok(Some(message)) => {
                    // While the catalog is being opened nobody is there to hear it.
                    if let Some(catalog) = self.service.opened_catalog() {
                        // What it asks beyond consensus is for the runtime that serves clients.
                        let _answers = self.service.runtime().enter();
                        catalog.receive(lane, message);
                    }
                }
                Ok(None) => return Ok(Ok(())),
                Err(error) => return Ok(Err(error)),
            }
        }
    }

    /// Whoever was removed for good is told so, and so is one of two with the same identity. What this node does not know yet is
    /// found by another look.
    async fn refuse_unwelcome(&self, hello: &Hello) -> Result<(), Error> {
        let (node, incarnation) = (NodeId(hello.node), Incarnation(hello.incarnation));
        if let Some(other) = self.book.other(node, incarnation, &hello.address) {
            return Err(taken(node, incarnation, &other));
        }
        let Some(catalog) = self.service.opened_catalog() else { return Ok(()) };
        match catalog.query(Query::Expelled { node }, Read::Local).await {
            Ok((_, Answer::Expelled(true))) => Err(removed(node)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Makes `member` a learner; answers the members when this node knows it as one.
    async fn admit(&self, member: MemberId) -> Result<Vec<u8>, CatalogError> {
        let catalog = self.service.catalog().await?;
        loop {
            let members = catalog.status().members;
            if members.all().contains(&member) {
                return Ok(members.encode());
            }
            match catalog.change_members(MemberChange::Add(member)).await {
                Ok(()) | Err(CatalogError::OutcomeUnknown) => {
                    // The change is applied where it was made; here it is once this read is answered.
                    catalog.query(Query::Counts, Read::Linearizable).await?;
                }
                Err(error) if error.retry_after().is_some() => {}
                Err(error) => return Err(error),
            }
            // Bounded by the caller's patience.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

async fn say(socket: &mut OwnedWriteHalf, part: from_node::Part) -> io::Result<()> {
    socket.write_all(&frames::framed(&FromNode { part: Some(part) })?).await
}

async fn refuse(socket: &mut OwnedWriteHalf, error: &Error) -> io::Result<()> {
    let refused = Refused { reason: error.reason().to_owned(), message: error.to_string() };
    say(socket, from_node::Part::Refused(refused)).await
}
