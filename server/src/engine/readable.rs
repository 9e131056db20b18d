//! Values of puts that this node reads itself from their client's memory: by a device if both have one, else by TCP. The
//! client's engine listens for that, on the host that the message came from.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tidepool_metadata::{ErrorKind, proto};
use tidepool_transfer::{
    AccessRights, Engine, Landed, Landing, RegionId, RegionKey, RegionTicket, TransferError, WeakEngine,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::memories::{ClientMemory, Memories, Opened};
use crate::error::Error;
use crate::grpc::convert;
use crate::node::{FilledBatch, ReservedBatch, Value};

/// Puts that are read at a time, and slots for them, of 1 MiB.
const AT_A_TIME: usize = 8;
const SLOTS: usize = 4 * AT_A_TIME;
/// A client that can't be read is told so while it still has time to send.
const LONGEST: Duration = Duration::from_secs(5);

/// Reads values. Cheap to clone.
#[derive(Clone)]
pub(super) struct Readable(Arc<Inner>);

struct Inner {
    /// Which has this in its handler.
    engine: WeakEngine,
    landing: OnceLock<Option<Landing>>,
    turns: Arc<Semaphore>,
    memories: Arc<Memories>,
}

/// Values that are about to be read: their memory is open, and it is their turn.
pub(super) struct ToRead {
    inner: Arc<Inner>,
    memory: Arc<Opened>,
    deadline: Instant,
    _turn: OwnedSemaphorePermit,
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

pub(super) fn not_read(why: &str) -> Error {
    let message = format!("this node could not read the values in their memory ({why}): send them");
    Error::new(ErrorKind::Unavailable, "NOT_READ", message)
}

impl Readable {
    pub(super) fn new(engine: &Engine) -> Self {
        let (landing, turns) = (OnceLock::new(), Arc::new(Semaphore::new(AT_A_TIME)));
        Self(Arc::new(Inner { engine: engine.downgrade(), landing, turns, memories: Arc::default() }))
    }

    /// Opens the memory of values and waits for their turn.
    ///
    /// # Errors
    /// `NOT_READ`, `BAD_RANGE`, `LENGTH_MISMATCH`.
    pub(super) async fn begin(
        &self,
        message: &proto::PutItemsRequest,
        from: Option<SocketAddr>,
        time: Duration,
    ) -> Result<ToRead, Error> {
        let (deadline, named) = (Instant::now() + (time / 2).min(LONGEST), named(message, from)?);
        let inner = Arc::clone(&self.0);
        let memory = match inner.memories.find(&named) {
            Some(memory) => memory,
            None => {
                let engine = inner.engine.upgrade().ok_or_else(|| not_read("it is stopping"))?;
                let memories = Arc::clone(&inner.memories);
                let opened = tokio::task::spawn_blocking(move || memories.open(&engine, &named));
                opened.await.unwrap_or_else(|_panic| Err(not_read("opening it failed")))?
            }
        };
        let turn = tokio::time::timeout_at(deadline.into(), Arc::clone(&inner.turns).acquire_owned()).await;
        let Ok(Ok(_turn)) = turn else { return Err(not_read("too many are being read")) };
        Ok(ToRead { inner, memory, deadline, _turn })
    }
}

/// What the message says of the memory, as far as that can be.
fn named(message: &proto::PutItemsRequest, from: Option<SocketAddr>) -> Result<ClientMemory, Error> {
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
    let mut at = from.ok_or_else(|| not_read("their client can't be reached"))?;
    at.set_port(port.ok_or_else(|| not_read("their client listens nowhere"))?);
    let key = said.key[..].try_into().map(u128::from_le_bytes).map_err(|_| not_read("the memory has no key"))?;
    let admission = said.admission[..].try_into().map_err(|_| not_read("their client admits nobody"))?;
    let ticket = RegionTicket {
        region: RegionId(said.region),
        key: RegionKey(key),
        length: said.length,
        rights: AccessRights::READ,
    };
    Ok(ClientMemory { at, admission, ticket })
}

impl ToRead {
    /// Reads the values to the places that were reserved for them. Nothing stays reserved if that fails.
    ///
    /// # Errors
    /// `NOT_READ`.
    pub(super) async fn fill(
        self,
        reserved: ReservedBatch,
        message: proto::PutItemsRequest,
        inflight: OwnedSemaphorePermit,
    ) -> Result<FilledBatch, Error> {
        let filled = tokio::task::spawn_blocking(move || {
            let _inflight = inflight;
            self.read(reserved, &message)
        });
        filled.await.unwrap_or_else(|_panic| Err(not_read("reading failed")))
    }

    fn read(self, reserved: ReservedBatch, message: &proto::PutItemsRequest) -> Result<FilledBatch, Error> {
        let Self { inner, memory, deadline, .. } = &self;
        let engine = inner.engine.upgrade().ok_or_else(|| not_read("it is stopping"))?;
        let failed = |error: &TransferError| tracing::warn!(%error, "no memory to read clients' values into");
        let landing = inner.landing.get_or_init(|| Landing::start(&engine, SLOTS).inspect_err(failed).ok());
        let reading = landing.as_ref().and_then(Landing::reserve);
        let mut reading = reading.ok_or_else(|| not_read("no memory to read into"))?;
        let offsets = message.readable.as_ref().map_or(&[][..], |readable| &readable.offsets);
        let mut lost = None;
        let filled = reserved.fill(|position, reservation| {
            let Some(reservation) = reservation else { return Ok(None) };
            if let Some(error) = &lost {
                return Err(Error::clone(error));
            }
            let range = [(offsets[position], message.lengths[position])];
            let take = |landed: Landed<'_>| {
                let (memory, offset) = landed.place();
                let value = Value::Lent { memory: memory.clone(), offset, length: landed.left() };
                reservation.take(&value).map_err(Unread::Place)
            };
            match reading.read(memory.segment, &range, None, *deadline, take) {
                Ok(()) => Ok(message.checksums.get(position).copied()),
                Err(Unread::Place(error)) => Err(error),
                Err(Unread::Transfer(error)) => Err(lost.insert(not_read(&error.to_string())).clone()),
            }
        });
        match lost {
            None => Ok(filled),
            Some(error) => {
                inner.memories.forget(memory);
                Err(error)
            }
        }
    }
}
