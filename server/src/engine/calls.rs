//! The calls: what each does with its message and its values.

use bytes::Bytes;
use prost::Message;
use tidepool_metadata::envelope::{MOST_VALUE_BYTES, Request};
use tidepool_metadata::proto::{self, EngineMethod};
use tidepool_metadata::{ErrorKind, ObjectKey};
use tidepool_transfer::Responder;

use super::{Answer, EngineApi, Reply, send};
use crate::error::Error;
use crate::grpc::{StoreApi, convert, describe};
use crate::node::{ObjectName, PutDone, PutItem, PutOptions, Reserve, Value};

/// A lone value from this size on is copied once, not twice, if that is possible without waiting.
const TAKEN_AT_ONCE: u64 = 32 << 10;

fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M, Error> {
    M::decode(bytes)
        .map_err(|error| Error::new(ErrorKind::Invalid, "BAD_MESSAGE", format!("the message can't be read: {error}")))
}

fn mismatch(message: String) -> Error {
    convert::invalid("LENGTH_MISMATCH", "lengths", message)
}

impl EngineApi {
    pub(super) fn call(&self, request: &Request<'_>, responder: Responder) {
        let begun = match request.method {
            EngineMethod::Put => self.put(request),
            EngineMethod::Get => self.begin(request, StoreApi::get_whole),
            EngineMethod::BatchGet => self.begin(request, StoreApi::get_batch),
            EngineMethod::Exists => {
                self.begin(request, |api, message| async move { Ok(Reply::of(&api.exists_keys(message).await?)) })
            }
            EngineMethod::Remove => {
                self.begin(request, |api, message| async move { Ok(Reply::of(&api.remove_keys(message).await?)) })
            }
            EngineMethod::OpenSession => {
                self.begin(request, |api, message| async move { Ok(Reply::of(&api.begin_session(message).await?)) })
            }
            EngineMethod::Unspecified => {
                Err(Error::new(ErrorKind::Unimplemented, "UNIMPLEMENTED", "no method was named".into()))
            }
        };
        match begun {
            Ok(answer) => self.answer(request.time, responder, answer),
            Err(error) => send(responder, Err(error)),
        }
    }

    fn begin<M: Message + Default, F: Future<Output = Answer> + Send + 'static>(
        &self,
        request: &Request<'_>,
        call: impl FnOnce(StoreApi, M) -> F,
    ) -> Result<Begun, Error> {
        Ok(Box::pin(call(self.api.clone(), decode(request.message)?)))
    }

    /// One value or many, from behind the message or from lent memory.
    fn put(&self, request: &Request<'_>) -> Result<Begun, Error> {
        let message: proto::PutItemsRequest = decode(request.message)?;
        let proto::PutItemsRequest { tenant, keys, lengths, checksums, options, memory } = message;
        let count = keys.len();
        if lengths.len() != count || !(checksums.is_empty() || checksums.len() == count) {
            let message = format!("{count} keys, {} lengths, {} checksums", lengths.len(), checksums.len());
            return Err(mismatch(message));
        }
        let keys = convert::keys(&keys)?;
        let options = convert::options(options)?;
        if let ([key], [length], None) = (&keys[..], &lengths[..], &memory)
            && *length >= TAKEN_AT_ONCE
            && *length == request.values.len() as u64
        {
            let name = (tenant.clone(), key.clone());
            if let Some(begun) = self.put_at_once(name, request.values, &options, checksums.first().copied())? {
                return Ok(begun);
            }
        }
        let values = match memory {
            Some(memory) => self.lent_values(&memory, &lengths)?,
            None => values_behind(request.values, &lengths)?,
        };
        let inflight = self.api.inflight.admit(values.iter().map(Value::length).sum())?;
        let api = self.api.clone();
        Ok(Box::pin(async move {
            let _inflight = inflight;
            let tenant = api.tenant(&tenant).await?;
            let items = keys.into_iter().zip(values).enumerate().map(|(position, (key, value))| PutItem {
                name: ObjectName { tenant, key },
                value,
                checksum: checksums.get(position).copied(),
            });
            let items: Vec<PutItem> = items.collect();
            if let [_] = items[..] {
                // A lone put hears all of its error.
                let mut done = api.service.put_batch(items, &options).await;
                let done =
                    done.pop().ok_or_else(|| Error::new(ErrorKind::Internal, "INTERNAL", "no outcome".into()))??;
                return Ok(put_reply(done));
            }
            Ok(Reply::of(&api.put_items(items, &options).await))
        }))
    }

    /// Copies a value from the connection's buffer to its place, if room for it can be had without waiting.
    fn put_at_once(
        &self,
        (tenant, key): (String, ObjectKey),
        value: &[u8],
        options: &PutOptions,
        checksum: Option<u32>,
    ) -> Result<Option<Begun>, Error> {
        let inflight = self.api.inflight.admit(value.len() as u64)?;
        let reserved = self.now(async {
            let name = ObjectName { tenant: self.api.tenant(&tenant).await?, key };
            self.api.service.reserve(name, value.len() as u64, options.clone()).await
        });
        // Given up, it leaves nothing reserved.
        let Some(reserved) = reserved else { return Ok(None) };
        let mut reservation = match reserved? {
            Reserve::AlreadyExists(done) => return Ok(Some(Box::pin(async move { Ok(put_reply(done)) }))),
            Reserve::Ready(reservation) => reservation,
        };
        reservation.write(value)?;
        Ok(Some(Box::pin(async move {
            let _inflight = inflight;
            Ok(put_reply(reservation.complete(checksum).await?))
        })))
    }

    fn lent_values(&self, memory: &proto::LentMemory, lengths: &[u64]) -> Result<Vec<Value>, Error> {
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

fn put_reply(done: PutDone) -> Reply {
    let outcomes = vec![convert::put_outcome(done.outcome).into()];
    Reply::of(&proto::BatchPutReply { outcomes, log_index: done.log_index.0, ..Default::default() })
}

type Begun = std::pin::Pin<Box<dyn Future<Output = Answer> + Send>>;

/// Cuts values out of what lies behind a message; copied, because the connection's buffer is used again.
fn values_behind(bytes: &[u8], lengths: &[u64]) -> Result<Vec<Value>, Error> {
    let total = lengths.iter().try_fold(0_u64, |total, &length| total.checked_add(length));
    if total != Some(bytes.len() as u64) {
        return Err(mismatch(format!("{} bytes came for lengths of {total:?} in all", bytes.len())));
    }
    let mut rest = Bytes::copy_from_slice(bytes);
    let cut = |&length: &u64| Value::Bytes(rest.split_to(usize::try_from(length).unwrap_or(usize::MAX)));
    Ok(lengths.iter().map(cut).collect())
}

impl StoreApi {
    /// An object or a range of it, its bytes as they lie in memory; without them if they are too many for one answer.
    async fn get_whole(self, request: proto::GetRequest) -> Answer {
        let mut reader = self.open(&request).await?;
        let length = reader.description().range_length;
        let mut description = describe(reader.description());
        if length > MOST_VALUE_BYTES {
            description.checksum = None;
            return Ok(Reply::of(&description));
        }
        let _inflight = self.inflight.admit(length)?;
        let mut sum = description.checksum.is_none().then(crc32fast::Hasher::new);
        let mut values = Vec::new();
        while let Some(bytes) = reader.next().await? {
            if let Some(sum) = &mut sum {
                sum.update(&bytes);
            }
            values.push(bytes);
        }
        description.checksum = description.checksum.or(sum.map(crc32fast::Hasher::finalize));
        Ok(Reply::with(&description, values))
    }

    async fn get_batch(self, request: proto::BatchGetRequest) -> Answer {
        let keys: Vec<ObjectKey> = convert::keys(&request.keys)?;
        let tenant = self.tenant(&request.tenant).await?;
        let freshness = convert::freshness(request.fresh, request.seen_index);
        let (reply, values) = self.gather(tenant, &keys, 0, freshness).await?;
        Ok(Reply::with(&reply, values))
    }
}
