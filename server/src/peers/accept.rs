//! Incoming connections of other nodes.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use tidepool_metadata::catalog::Query;
use tidepool_metadata::{ErrorKind, Incarnation, NodeId};
use tidepool_replication::{CatalogError, Lane, MemberChange, MemberId, Read};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::AddressBook;
use super::handshake::{
    Myself, NONCE_BYTES, Secret, check_version, foreign_cluster, foreign_epoch, nonce, unknown_protocol,
};
use super::wire::{FromCaller, FromNode, Hello, Joined, Peers, Welcome, from_caller, from_node, peer_server::Peer};
use crate::error::Error;
use crate::node::NodeService;

/// How long a caller may take to prove itself.
const PROOF_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a join may take: a committed change of members.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Takes other nodes' messages. Cheap to clone.
#[derive(Clone)]
pub(crate) struct PeerApi {
    myself: Myself,
    secret: Secret,
    book: Arc<AddressBook>,
    service: NodeService,
    stop: watch::Receiver<bool>,
}

impl PeerApi {
    pub(crate) fn new(
        myself: Myself,
        secret: Secret,
        book: Arc<AddressBook>,
        service: NodeService,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Self { myself, secret, book, service, stop }
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
        welcome: Welcome,
        mut parts: Streaming<FromCaller>,
        replies: mpsc::Sender<Result<FromNode, Status>>,
    ) -> Result<(), Error> {
        let proof = tokio::time::timeout(PROOF_TIMEOUT, parts.message()).await;
        let Ok(Ok(Some(FromCaller { part: Some(from_caller::Part::Proof(proof)) }))) = proof else {
            return Err(unknown_protocol("proof"));
        };
        self.secret.check_caller(&hello, &welcome, &proof)?;
        self.book.learn(NodeId(hello.node), Incarnation(hello.incarnation), &hello.address);
        let peers = FromNode { part: Some(from_node::Part::Peers(Peers { known: self.book.all() })) };
        if replies.send(Ok(peers)).await.is_err() {
            return Ok(());
        }
        let lane = Lane::ALL.into_iter().find(|lane| u32::from(lane.number()) == hello.lane);
        let lane = lane.ok_or_else(|| unknown_protocol("lane"))?;
        loop {
            let message = tokio::select! {
                message = parts.message() => message,
                _ = self.stop.wait_for(|stop| *stop) => return Ok(()),
            };
            match message {
                Ok(Some(FromCaller { part: Some(from_caller::Part::Messages(messages)) })) if hello.cluster != 0 => {
                    // While the catalog is being opened nobody is there to hear it.
                    if let Some(catalog) = self.service.opened_catalog() {
                        messages.messages.into_iter().for_each(|message| catalog.receive(lane, message.into()));
                    }
                }
                Ok(Some(FromCaller { part: Some(from_caller::Part::Join(join)) })) if hello.cluster == 0 => {
                    let kind = if join.guest { MemberId::guest } else { MemberId::new };
                    let member = kind(NodeId(hello.node), join.life.max(1));
                    let members = tokio::time::timeout(JOIN_TIMEOUT, self.admit(member)).await;
                    let members = members.map_err(|_| CatalogError::OutcomeUnknown)??.into();
                    let joined = FromNode { part: Some(from_node::Part::Joined(Joined { members })) };
                    let _gone = replies.send(Ok(joined)).await;
                    return Ok(());
                }
                Ok(Some(_)) => return Err(unknown_protocol("message")),
                Ok(None) | Err(_) => return Ok(()),
            }
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

#[tonic::async_trait]
impl Peer for PeerApi {
    type ExchangeStream = Pin<Box<dyn Stream<Item = Result<FromNode, Status>> + Send>>;

    async fn exchange(
        &self,
        request: Request<Streaming<FromCaller>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        let mut parts = request.into_inner();
        let hello = tokio::time::timeout(PROOF_TIMEOUT, parts.message()).await;
        let Ok(Ok(Some(FromCaller { part: Some(from_caller::Part::Hello(hello)) }))) = hello else {
            return Err(unknown_protocol("hello").into());
        };
        let welcome = self.welcome(&hello)?;
        let (replies, stream) = mpsc::channel(2);
        let first = FromNode { part: Some(from_node::Part::Welcome(welcome.clone())) };
        replies.try_send(Ok(first)).map_err(|_| Status::internal("no room for a welcome"))?;
        let api = self.clone();
        tokio::spawn(async move {
            let node = NodeId(hello.node);
            if let Err(error) = api.converse(hello, welcome, parts, replies.clone()).await {
                if error.kind() == ErrorKind::Denied {
                    tracing::warn!(%node, %error, "a caller that is no node of this cluster");
                }
                let _gone = replies.send(Err(error.into())).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}
