//! Values of puts that this node reads itself from their client's memory: by a device if both have one, else by TCP. The
//! client's engine listens for that, on the host that the message came from.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tidepool_metadata::{ErrorKind, proto};
use tidepool_transfer::{
    AccessRights, Engine, Landed, Landing, PeerId, RegionId, RegionKey, RegionTicket, SegmentId, TransferError,
    WeakEngine,
};
use tokio::sync::Semaphore;

use crate::error::Error;
use crate::grpc::convert;
use crate::node::{FilledBatch, ReservedBatch, Value};

/// Puts that are read at a time, and slots for them, of 1 MiB.
const AT_A_TIME: usize = 8;
const SLOTS: usize = 4 * AT_A_TIME;
/// Memories of clients that are remembered.
const MOST: usize = 256;
/// A client that can't be read is told so while it still has time to send.
const LONGEST: Duration = Duration::from_secs(5);

/// What is known of clients' memory. Cheap to clone.
#[derive(Clone)]
pub(super) struct Readable(Arc<Inner>);

struct Inner {
    /// Which has this in its handler.
    engine: WeakEngine,
    landing: OnceLock<Option<Landing>>,
    turns: Semaphore,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    memories: HashMap<(SocketAddr, RegionId, u128), Memory>,
    uses: u64,
}

#[derive(Clone, Copy)]
struct Memory {
    peer: PeerId,
    segment: SegmentId,
    used: u64,
}

/// Why a value did not come to its place.
enum Unread {
    Transfer(TransferError),
    Place(Error),
}

impl From<TransferError> for Unread {
    fn from(error: TransferError) -> Self {
        Self::Transfer(error)
    }
}

fn not_read(why: &str) -> Error {
    let message = format!("this node could not read the values in their memory ({why}): send them");
    Error::new(ErrorKind::Unavailable, "NOT_READ", message)
}

impl Readable {
    pub(super) fn new(engine: &Engine) -> Self {
        let (landing, turns) = (OnceLock::new(), Semaphore::new(AT_A_TIME));
        Self(Arc::new(Inner { engine: engine.downgrade(), landing, turns, known: Mutex::default() }))
    }

    /// Reads values to the places that were reserved for them. Nothing stays reserved if that fails.
    ///
    /// # Errors
    /// `NOT_READ`, `BAD_RANGE`, `LENGTH_MISMATCH`.
    pub(super) async fn fill(
        &self,
        reserved: ReservedBatch,
        message: proto::PutItemsRequest,
        from: Option<SocketAddr>,
        time: Duration,
    ) -> Result<FilledBatch, Error> {
        let deadline = Instant::now() + (time / 2).min(LONGEST);
        let turn = tokio::time::timeout_at(deadline.into(), self.0.turns.acquire()).await;
        let Ok(Ok(_turn)) = turn else { return Err(not_read("too many are being read")) };
        let inner = Arc::clone(&self.0);
        let filled = tokio::task::spawn_blocking(move || inner.fill(reserved, &message, from, deadline));
        filled.await.unwrap_or_else(|_panic| Err(not_read("reading failed")))
    }
}

impl Inner {
    fn fill(
        &self,
        reserved: ReservedBatch,
        message: &proto::PutItemsRequest,
        from: Option<SocketAddr>,
        deadline: Instant,
    ) -> Result<FilledBatch, Error> {
        let said = message.readable.as_ref().ok_or_else(|| not_read("it was not said where they lie"))?;
        if said.offsets.len() != message.lengths.len() {
            let (offsets, lengths) = (said.offsets.len(), message.lengths.len());
            let message = format!("{offsets} offsets, {lengths} lengths");
            return Err(convert::invalid("LENGTH_MISMATCH", "readable", message));
        }
        for (&offset, &length) in said.offsets.iter().zip(&message.lengths) {
            if offset.checked_add(length).is_none_or(|end| end > said.length) {
                let message = format!("{length} bytes at {offset} leave the memory of {}", said.length);
                return Err(convert::invalid("BAD_RANGE", "readable", message));
            }
        }
        let port = u16::try_from(said.port).ok().filter(|&port| port > 0);
        let at = from.zip(port).map(|(from, port)| SocketAddr::new(from.ip(), port));
        let at = at.ok_or_else(|| not_read("their client can't be reached"))?;
        let key = said.key[..].try_into().map(u128::from_le_bytes).map_err(|_| not_read("the memory has no key"))?;
        let ticket = RegionTicket {
            region: RegionId(said.region),
            key: RegionKey(key),
            length: said.length,
            rights: AccessRights::READ,
        };
        let failed = |error: &TransferError| tracing::warn!(%error, "no memory to read clients' values into");
        let engine = self.engine.upgrade().ok_or_else(|| not_read("it is stopping"))?;
        let landing = self.landing.get_or_init(|| Landing::start(&engine, SLOTS).inspect_err(failed).ok());
        let landing = landing.as_ref().ok_or_else(|| not_read("no memory to read into"))?;
        let segment = self.segment(&engine, at, ticket, deadline).map_err(|error| not_read(&error.to_string()))?;
        let mut lost = None;
        let filled = reserved.fill(|position, reservation| {
            let Some(reservation) = reservation else { return Ok(None) };
            if let Some(error) = &lost {
                return Err(Error::clone(error));
            }
            let range = [(said.offsets[position], message.lengths[position])];
            let take = |landed: Landed<'_>| {
                let (memory, offset) = landed.place();
                let value = Value::Lent { memory: memory.clone(), offset, length: landed.left() };
                reservation.take(&value).map_err(Unread::Place)
            };
            match landing.read(segment, &range, None, deadline, take) {
                Ok(()) => Ok(message.checksums.get(position).copied()),
                Err(Unread::Place(error)) => Err(error),
                Err(Unread::Transfer(error)) => Err(lost.insert(not_read(&error.to_string())).clone()),
            }
        });
        match lost {
            None => Ok(filled),
            Some(error) => {
                self.known.lock().end(&engine, (at, ticket.region, ticket.key.0));
                Err(error)
            }
        }
    }

    /// A client's memory, opened once.
    fn segment(
        &self,
        engine: &Engine,
        at: SocketAddr,
        ticket: RegionTicket,
        deadline: Instant,
    ) -> Result<SegmentId, TransferError> {
        let name = (at, ticket.region, ticket.key.0);
        {
            let known = &mut *self.known.lock();
            known.uses += 1;
            if let Some(memory) = known.memories.get_mut(&name) {
                memory.used = known.uses;
                return Ok(memory.segment);
            }
        }
        let peer = engine.connect(&at.to_string(), deadline)?;
        let segment = engine.open_ticket(peer, ticket, deadline)?;
        let mut known = self.known.lock();
        let used = known.uses;
        if let Some(other) = known.memories.insert(name, Memory { peer, segment, used }) {
            // Another put opened it meanwhile.
            let _closed = engine.close_segment(other.segment);
        }
        if known.memories.len() > MOST {
            let oldest = known.memories.iter().min_by_key(|(_, memory)| memory.used).map(|(name, _)| *name);
            if let Some(oldest) = oldest {
                known.end(engine, oldest);
            }
        }
        Ok(segment)
    }
}

impl Known {
    /// Forgets a memory, and its client if nothing else of it is known.
    fn end(&mut self, engine: &Engine, name: (SocketAddr, RegionId, u128)) {
        let Some(gone) = self.memories.remove(&name) else { return };
        let _closed = engine.close_segment(gone.segment);
        if self.memories.values().all(|memory| memory.peer != gone.peer) {
            let _disconnected = engine.disconnect(gone.peer);
        }
    }
}
