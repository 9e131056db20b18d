//! An object on its way into this node, for the nodes that are to have copies: they begin to get its bytes while these arrive.
//!
//! ```text
//!  client ── bytes ──> coordinator            another node
//!             first    ├── Fetch ───────────> reserve, read (version): the bytes that are there, then each as it comes
//!             last     │ seal: the readers' end, not before
//!                      ├── Pull (checksum) ─> takes what it fetched, or reads anew; compares, seals
//! ```
//!
//! A Fetch promises nothing: whatever becomes of it, the Pull brings about the copy or says why not. A put that is given up breaks
//! off the readers' streams, and their nodes drop what they have.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use tidepool_metadata::catalog::Copies;
use tidepool_metadata::{DataType, ErrorKind, NodeId, ReplicaId, VersionId};
use tidepool_tiers::StoreError;
use tidepool_tiers::store::{ObjectBuffer, ReplicaIdentity, Sealed};
use tokio::sync::watch;

use super::{PULL_TIME, answer_of};
use crate::error::Error;
use crate::node::{NodeService, ObjectName, PutOptions};
use crate::peers::wire::{Pull, node_reply, node_request};

/// Smaller objects are pulled once they are here: they take less time than it takes to say that they come.
const FROM_BYTES: u64 = 1 << 20;
/// What is given out at a time.
const PIECE_BYTES: usize = 1 << 20;

const HAS_BUFFER: &str = "a put has its buffer until it ends";

/// How far an object has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// So many bytes are there.
    Filling(u64),
    /// All; they are in the store.
    Sealed,
    /// It never will be an object.
    GivenUp,
}

/// An object whose bytes arrive.
pub(in crate::node) struct Arriving {
    pub(in crate::node) name: ObjectName,
    pub(in crate::node) ids: (VersionId, ReplicaId),
    pub(in crate::node) length: u64,
    pub(in crate::node) data_type: DataType,
    copies: Copies,
    prefer: Arc<[String]>,
    /// `None` once its put has ended.
    buffer: Mutex<Option<ObjectBuffer>>,
    stage: watch::Sender<Stage>,
    /// Nodes that have begun to get it, in the order in which they are to be asked for copies.
    fetching: Mutex<Vec<NodeId>>,
}

/// What comes next of an object that arrives.
pub(in crate::node) enum Next {
    Piece(Bytes),
    /// The rest is in the store.
    Sealed,
}

/// By version, while their puts go on.
pub(in crate::node) type Arrivals = Mutex<HashMap<VersionId, Arc<Arriving>>>;

impl Arriving {
    /// The bytes from `at` on, as soon as there are some.
    ///
    /// # Errors
    /// `PUT_ENDED` if the put was given up.
    pub(in crate::node) async fn next(&self, at: u64) -> Result<Next, Error> {
        loop {
            self.beyond(at).await;
            if let Some(buffer) = &*self.buffer.lock() {
                let piece = buffer.copy_from(at, PIECE_BYTES);
                if !piece.is_empty() {
                    return Ok(Next::Piece(piece.into()));
                }
                continue;
            }
            return match *self.stage.borrow() {
                Stage::Sealed => Ok(Next::Sealed),
                _ => Err(Error::new(ErrorKind::Unavailable, "PUT_ENDED", "the put of this object was given up".into())),
            };
        }
    }

    /// Waits until there is more than `at`, or there won't be.
    pub(in crate::node) async fn beyond(&self, at: u64) {
        let is_there = |stage: &Stage| !matches!(*stage, Stage::Filling(filled) if filled <= at);
        let mut stage = self.stage.subscribe();
        // The sender is here, so that it ends by that alone.
        let _stage = stage.wait_for(is_there).await;
    }
}

/// Where the bytes of a put go.
pub(in crate::node) enum Incoming {
    /// For this node alone, until they are all there.
    Here(ObjectBuffer),
    /// Others get them meanwhile, if they do not come at once.
    Shared(Arrival),
}

/// An object that arrives, and its put: dropping it gives the put up.
pub(in crate::node) struct Arrival {
    service: NodeService,
    arriving: Arc<Arriving>,
    is_begun: bool,
}

impl Incoming {
    /// Bytes that are still to come.
    pub(in crate::node) fn missing(&self) -> u64 {
        match self {
            Self::Here(buffer) => buffer.missing(),
            Self::Shared(arrival) => arrival.missing(),
        }
    }

    /// Has `change` bring bytes.
    pub(in crate::node) fn change<A>(&mut self, change: impl FnOnce(&mut ObjectBuffer) -> A) -> A {
        match self {
            Self::Here(buffer) => change(buffer),
            Self::Shared(arrival) => arrival.change(change),
        }
    }

    /// Under which names it is to be sealed, if others may know them already.
    pub(in crate::node) fn ids(&self) -> Option<(VersionId, ReplicaId)> {
        match self {
            Self::Here(_) => None,
            Self::Shared(arrival) => Some(arrival.arriving.ids),
        }
    }

    /// Ends all change, as [`ObjectBuffer::seal`]; gives the nodes too that have begun to get it.
    pub(in crate::node) fn seal(
        self,
        identity: ReplicaIdentity,
        expected: Option<u32>,
    ) -> Result<(Sealed, Vec<NodeId>), StoreError> {
        match self {
            Self::Here(buffer) => Ok((buffer.seal(identity, expected)?, Vec::new())),
            Self::Shared(arrival) => arrival.seal(identity, expected),
        }
    }
}

impl Arrival {
    fn missing(&self) -> u64 {
        match *self.arriving.stage.borrow() {
            Stage::Filling(filled) => self.arriving.length - filled,
            Stage::Sealed | Stage::GivenUp => 0,
        }
    }

    fn change<A>(&mut self, change: impl FnOnce(&mut ObjectBuffer) -> A) -> A {
        let (changed, missing) = {
            let mut slot = self.arriving.buffer.lock();
            let buffer = slot.as_mut().expect(HAS_BUFFER);
            (change(buffer), buffer.missing())
        };
        self.arriving.stage.send_replace(Stage::Filling(self.arriving.length - missing));
        if missing > 0 && !self.is_begun {
            self.is_begun = true;
            let (service, arriving) = (self.service.clone(), Arc::clone(&self.arriving));
            service.inner.arrivals.lock().insert(arriving.ids.0, Arc::clone(&arriving));
            self.service.inner.runtime.spawn(async move { service.have_fetched(&arriving).await });
        }
        changed
    }

    fn seal(self, identity: ReplicaIdentity, expected: Option<u32>) -> Result<(Sealed, Vec<NodeId>), StoreError> {
        let mut buffer = self.arriving.buffer.lock();
        let sealed = buffer.take().expect(HAS_BUFFER).seal(identity, expected)?;
        self.arriving.stage.send_replace(Stage::Sealed);
        Ok((sealed, std::mem::take(&mut *self.arriving.fetching.lock())))
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if self.is_begun {
            self.service.inner.arrivals.lock().remove(&self.arriving.ids.0);
        }
        let mut buffer = self.arriving.buffer.lock();
        *buffer = None;
        self.arriving.stage.send_if_modified(|stage| {
            let is_given_up = *stage != Stage::Sealed;
            if is_given_up {
                *stage = Stage::GivenUp;
            }
            is_given_up
        });
    }
}

impl NodeService {
    /// Where the bytes of a put go for which there is room.
    pub(in crate::node) fn incoming(
        &self,
        name: &ObjectName,
        options: &PutOptions,
        copies: Copies,
        buffer: ObjectBuffer,
    ) -> Incoming {
        let length = buffer.object_length();
        if copies.wanted() == 1 || length <= FROM_BYTES {
            return Incoming::Here(buffer);
        }
        let arriving = Arriving {
            name: name.clone(),
            ids: self.next_ids(),
            length,
            data_type: options.data_type,
            copies,
            prefer: Arc::clone(&options.prefer),
            buffer: Mutex::new(Some(buffer)),
            stage: watch::Sender::new(Stage::Filling(0)),
            fetching: Mutex::default(),
        };
        Incoming::Shared(Arrival { service: self.clone(), arriving: Arc::new(arriving), is_begun: false })
    }

    /// The object of that version, while it arrives.
    pub(in crate::node) fn arriving(&self, name: &ObjectName, version: VersionId) -> Option<Arc<Arriving>> {
        self.inner.arrivals.lock().get(&version).filter(|arriving| arriving.name == *name).cloned()
    }

    /// Has as many nodes begin to get it as there are to be further copies.
    async fn have_fetched(&self, arriving: &Arriving) {
        let Arriving { name, ids, copies, prefer, .. } = arriving;
        let Ok((_, order)) = self.order(name.tenant, &name.key, prefer).await else { return };
        let fetch = Pull {
            tenant: name.tenant.0,
            key: name.key.as_bytes().to_vec().into(),
            version: Some(ids.0.into()),
            length: arriving.length,
            source: self.inner.node.0,
            ..Pull::default()
        };
        let mut order = order.into_iter();
        let mut asked: FuturesUnordered<_> =
            order.by_ref().take(usize::from(copies.wanted()) - 1).map(|node| self.fetch_there(node, &fetch)).collect();
        while let Some((node, fetched)) = asked.next().await {
            match fetched {
                Ok(_) => arriving.fetching.lock().push(node),
                Err(error) => {
                    tracing::debug!(%node, %error, "a copy can't be fetched while its bytes arrive");
                    let is_going_on = matches!(*arriving.stage.borrow(), Stage::Filling(_));
                    asked.extend(order.next().filter(|_| is_going_on).map(|node| self.fetch_there(node, &fetch)));
                }
            }
        }
    }

    async fn fetch_there(&self, node: NodeId, fetch: &Pull) -> (NodeId, Result<node_reply::Answer, Error>) {
        let reply = self.ask_node(node, node_request::Ask::Fetch(fetch.clone()), PULL_TIME).await;
        (node, reply.and_then(|reply| answer_of(node, reply)))
    }
}
