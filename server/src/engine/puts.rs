//! Puts: their values come behind the message, as they come or all at once, or lie in lent memory.

use std::net::SocketAddr;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use tidepool_metadata::envelope::{Head, REQUEST_BYTES, Request};
use tidepool_metadata::proto::{self, EngineMethod};
use tidepool_metadata::{ErrorKind, ObjectKey, TenantId};
use tidepool_transfer::{Failure, Handler as _, Pieces, Responder};
use tokio::sync::OwnedSemaphorePermit;

use super::calls::{Begun, decode};
use super::{Answer, EngineApi, LONGEST, Reply, send};
use crate::error::Error;
use crate::grpc::{StoreApi, convert};
use crate::node::{FilledBatch, ObjectName, PutDone, PutItem, PutOptions, ReservedBatch, Value};

/// Bytes of a put's message, without its values, up to which values are taken as they come.
const MOST_MESSAGE_BYTES: u64 = 1 << 20;
/// Bytes of values that are kept until there is room for them; more are left with their client until then. And of what else is
/// received at all.
const MOST_KEPT_BYTES: u64 = 16 << 20;

/// A put as its message has it.
struct Put {
    message: proto::PutItemsRequest,
    keys: Vec<ObjectKey>,
    options: PutOptions,
}

fn mismatch(message: String) -> Error {
    convert::invalid("LENGTH_MISMATCH", "lengths", message)
}

impl Put {
    fn decode(bytes: impl Buf) -> Result<Self, Error> {
        let mut message: proto::PutItemsRequest = decode(bytes)?;
        let count = message.keys.len();
        if message.lengths.len() != count || !(message.checksums.is_empty() || message.checksums.len() == count) {
            let (lengths, checksums) = (message.lengths.len(), message.checksums.len());
            return Err(mismatch(format!("{count} keys, {lengths} lengths, {checksums} checksums")));
        }
        let (keys, options) = (convert::keys(&message.keys)?, convert::options(message.options.take(), count)?);
        Ok(Self { message, keys, options })
    }

    /// Bytes of all values, if those are behind the message that it says.
    fn values_behind(&self, behind: u64) -> Result<u64, Error> {
        let total = self.message.lengths.iter().try_fold(0_u64, |total, &length| total.checked_add(length));
        if total != Some(behind) || self.message.memory.is_some() || self.message.readable.is_some() {
            return Err(mismatch(format!("{behind} bytes came for lengths of {total:?} in all")));
        }
        Ok(behind)
    }

    fn names(&self, tenant: TenantId) -> impl Iterator<Item = ObjectName> + '_ {
        self.keys.iter().map(move |key| ObjectName { tenant, key: key.clone() })
    }

    /// Finds places for the values.
    async fn reserve(&self, api: &StoreApi) -> Result<ReservedBatch, Error> {
        let tenant = api.tenant(&self.message.tenant).await?;
        let objects = self.names(tenant).zip(self.message.lengths.iter().copied()).collect();
        Ok(api.service.reserve_batch(objects, &self.options).await)
    }

    /// Brings the values to their places.
    ///
    /// # Errors
    /// `WITHDRAWN` if their memory is another's by then; nothing is kept.
    async fn fill(&self, api: &StoreApi, values: Vec<Value<'_>>) -> Result<FilledBatch, Error> {
        let lent = match values.first() {
            Some(Value::Lent { memory, .. }) => Some(memory.clone()),
            _ => None,
        };
        let tenant = api.tenant(&self.message.tenant).await?;
        let items = self.names(tenant).zip(values).enumerate().map(|(position, (name, value))| PutItem {
            name,
            value,
            checksum: self.message.checksums.get(position).copied(),
        });
        let filled = api.service.fill_batch(items.collect(), &self.options).await;
        // No byte was read after this word.
        fence(Ordering::Acquire);
        let withdrawals = lent.and_then(|memory| Some(memory.words(1).first()?.load(Ordering::Relaxed)));
        if self
            .message
            .memory
            .as_ref()
            .is_some_and(|memory| memory.withdrawals.is_some_and(|then| withdrawals != Some(then)))
        {
            let message = "another put from this memory had no answer: what was copied may be other bytes".into();
            return Err(Error::new(ErrorKind::Conflict, "WITHDRAWN", message).field("memory"));
        }
        Ok(filled)
    }
}

impl EngineApi {
    /// One value or many, from behind the message, from lent memory, or from where this node reads them itself.
    pub(super) fn put(&self, request: &Request<'_>, from: Option<SocketAddr>) -> Result<Begun, Error> {
        let put = Put::decode(Bytes::copy_from_slice(request.message))?;
        if put.message.readable.is_some() {
            return match request.values {
                [] => self.read(put, from, request.time),
                behind => Err(mismatch(format!("{} bytes came with values that lie elsewhere", behind.len()))),
            };
        }
        let values = self.values(&put.message, request.values)?;
        let inflight = self.api.inflight.admit(values.iter().map(Value::length).sum())?;
        // Copied from the connection's buffer to their places, if room for them can be had without waiting. What is given
        // up in the middle leaves nothing reserved.
        if let Some(filled) = self.now(put.fill(&self.api, values)) {
            return Ok(Self::complete(filled?, inflight));
        }
        Ok(self.wait_for_room(put, request.values.to_vec(), inflight))
    }

    /// A put whose values this node reads itself.
    fn read(&self, put: Put, from: Option<SocketAddr>, time: Duration) -> Result<Begun, Error> {
        let total = put.message.lengths.iter().try_fold(0_u64, |total, &length| total.checked_add(length));
        let total = total.ok_or_else(|| mismatch("the lengths have no sum".into()))?;
        // What is being read takes a few slots, however large it is.
        let (this, inflight) = (self.clone(), self.api.inflight.admit(total.min(MOST_KEPT_BYTES))?);
        Ok(Box::pin(async move {
            let to_read = this.readable.begin(&put.message, from, time).await?;
            let reserved = put.reserve(&this.api).await?;
            put_reply(to_read.fill(reserved, put.message, inflight).await?.complete().await)
        }))
    }

    /// Ends a put whose values are in their places.
    fn complete(filled: FilledBatch, inflight: OwnedSemaphorePermit) -> Begun {
        Box::pin(async move {
            let _inflight = inflight;
            put_reply(filled.complete().await)
        })
    }

    /// A put for whose values there is no room yet: those behind its message wait here.
    fn wait_for_room(&self, put: Put, behind: Vec<u8>, inflight: OwnedSemaphorePermit) -> Begun {
        let this = self.clone();
        Box::pin(async move {
            let _inflight = inflight;
            let filled = put.fill(&this.api, this.values(&put.message, &behind)?).await?;
            put_reply(filled.complete().await)
        })
    }

    /// A request that is being received: the values of a put go to their places as they come.
    pub(super) fn call_pieces(&self, request: &mut Pieces<'_>, responder: Responder) -> Result<(), Failure> {
        let began = Instant::now();
        let mut bytes = request.take(REQUEST_BYTES as u64)?;
        // Less than what is left: values come behind it.
        let comes = |head: &Head| {
            head.method == EngineMethod::Put && head.message <= MOST_MESSAGE_BYTES && head.message < request.left()
        };
        let Some(Head { time, message, .. }) = Head::decode(&bytes).ok().filter(comes) else {
            if request.left() > MOST_KEPT_BYTES {
                let message = format!("a message of {} bytes, of at most {MOST_KEPT_BYTES}", request.left());
                send(responder, Err(Error::new(ErrorKind::Invalid, "TOO_LARGE", message)));
                return Ok(());
            }
            bytes.append(&mut request.take(u64::MAX)?);
            self.handle(&bytes, responder);
            return Ok(());
        };
        let message = request.take(message)?;
        let is_late = || began.elapsed() > time;
        match self.put_coming(message.into(), request, time.min(LONGEST), is_late)? {
            Ok(answer) => self.answer(time.saturating_sub(began.elapsed()), responder, answer),
            Err(error) => send(responder, Err(error)),
        }
        Ok(())
    }

    fn put_coming(
        &self,
        message: Bytes,
        request: &mut Pieces<'_>,
        time: Duration,
        is_late: impl Fn() -> bool,
    ) -> Result<Result<Begun, Error>, Failure> {
        let admitted = Put::decode(message).and_then(|put| {
            let total = put.values_behind(request.left())?;
            // Larger ones pass through the connection's buffer.
            Ok((put, self.api.inflight.admit(total.min(MOST_KEPT_BYTES))?))
        });
        let (put, inflight) = match admitted {
            Ok(admitted) => admitted,
            Err(error) => return Ok(Err(error)),
        };
        let reserved = match self.now(put.reserve(&self.api)) {
            Some(reserved) => reserved,
            None if request.left() <= MOST_KEPT_BYTES => {
                return Ok(Ok(self.wait_for_room(put, request.take(u64::MAX)?, inflight)));
            }
            None => {
                let late = |_| Err(Error::new(ErrorKind::Exhausted, "NO_SPACE", "there was no room in time".into()));
                let reserve = async { tokio::time::timeout(time, put.reserve(&self.api)).await };
                self.runtime.block_on(reserve).unwrap_or_else(late)
            }
        };
        let reserved = match reserved {
            Ok(reserved) => reserved,
            Err(error) => return Ok(Err(error)),
        };
        let mut lost = None;
        let filled = reserved.fill(|position, mut reservation| {
            let (mut left, mut written) = (put.message.lengths[position], Ok(()));
            while left > 0 && lost.is_none() {
                match request.next(left) {
                    Ok(_) if is_late() => lost = Some(Failure::DeadlinePassed),
                    Ok(piece) => {
                        left -= piece.len() as u64;
                        if let (Ok(()), Some(reservation)) = (&written, &mut reservation) {
                            written = reservation.write(piece);
                        }
                    }
                    Err(failure) => lost = Some(failure),
                }
            }
            written.map(|()| put.message.checksums.get(position).copied())
        });
        match lost {
            Some(failure) => Err(failure),
            None => Ok(Ok(Self::complete(filled, inflight))),
        }
    }

    /// The values of a put, where they lie.
    fn values<'a>(&self, message: &proto::PutItemsRequest, behind: &'a [u8]) -> Result<Vec<Value<'a>>, Error> {
        match &message.memory {
            Some(memory) => self.lent_values(memory, &message.lengths),
            None => values_behind(behind, &message.lengths),
        }
    }

    fn lent_values(&self, memory: &proto::LentMemory, lengths: &[u64]) -> Result<Vec<Value<'static>>, Error> {
        let id = memory.id[..].try_into().map(u128::from_le_bytes).unwrap_or_default();
        let lent = self.lent.find(id).ok_or_else(|| {
            let message = "this node has no such memory: lend it again";
            Error::new(ErrorKind::Conflict, "NOT_LENT", message.into()).field("memory")
        })?;
        if memory.offsets.len() != lengths.len() {
            return Err(mismatch(format!("{} offsets, {} lengths", memory.offsets.len(), lengths.len())));
        }
        let value = |(&offset, &length): (&u64, &u64)| match offset.checked_add(length) {
            Some(end) if end <= lent.len() => Ok(Value::Lent { memory: lent.clone(), offset, length }),
            _ => {
                let message = format!("{length} bytes at {offset} leave the lent memory of {}", lent.len());
                Err(convert::invalid("BAD_RANGE", "memory", message))
            }
        };
        memory.offsets.iter().zip(lengths).map(value).collect()
    }
}

fn put_reply(mut results: Vec<Result<PutDone, Error>>) -> Answer {
    // A lone put hears all of its error.
    if let [Err(_)] = results[..]
        && let Some(Err(error)) = results.pop()
    {
        return Err(error);
    }
    Ok(Reply::of(&convert::batch_put_reply(results)))
}

/// Cuts values out of what lies behind a message.
fn values_behind<'a>(bytes: &'a [u8], lengths: &[u64]) -> Result<Vec<Value<'a>>, Error> {
    let total = lengths.iter().try_fold(0_u64, |total, &length| total.checked_add(length));
    if total != Some(bytes.len() as u64) {
        return Err(mismatch(format!("{} bytes came for lengths of {total:?} in all", bytes.len())));
    }
    let mut rest = bytes;
    let cut = |&length: &u64| {
        let (value, after) = rest.split_at(usize::try_from(length).unwrap_or(usize::MAX));
        rest = after;
        Value::Bytes(value)
    };
    Ok(lengths.iter().map(cut).collect())
}
