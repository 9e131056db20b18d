//! The calls: what each does with its message and its values.

use bytes::{Buf, Bytes};
use prost::Message;
use tidepool_metadata::envelope::{MOST_VALUE_BYTES, Request};
use tidepool_metadata::proto::{self, EngineMethod};
use tidepool_metadata::{ErrorKind, ObjectKey};
use tidepool_transfer::Responder;

use super::{Answer, EngineApi, Reply, send};
use crate::error::Error;
use crate::grpc::{StoreApi, convert, describe};
use crate::node::{FilledBatch, ObjectName, Opened, PutDone, PutItem, PutOptions, Value};

fn decode<M: Message + Default>(bytes: impl Buf) -> Result<M, Error> {
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
        // Its keys and values are parts of one buffer.
        Ok(Box::pin(call(self.api.clone(), decode(Bytes::copy_from_slice(request.message))?)))
    }

    /// One value or many, from behind the message or from lent memory.
    fn put(&self, request: &Request<'_>) -> Result<Begun, Error> {
        let mut message: proto::PutItemsRequest = decode(request.message)?;
        let count = message.keys.len();
        if message.lengths.len() != count || !(message.checksums.is_empty() || message.checksums.len() == count) {
            let (lengths, checksums) = (message.lengths.len(), message.checksums.len());
            return Err(mismatch(format!("{count} keys, {lengths} lengths, {checksums} checksums")));
        }
        let (keys, options) = (convert::keys(&message.keys)?, convert::options(message.options.take(), count)?);
        let values = self.values(&message, request.values)?;
        let inflight = self.api.inflight.admit(values.iter().map(Value::length).sum())?;
        // Copied from the connection's buffer to their places, if room for them can be had without waiting. What is given
        // up in the middle leaves nothing reserved.
        let filled = self.now(fill(&self.api, &message, keys.clone(), values, &options));
        if let Some(filled) = filled {
            let (filled, service) = (filled?, self.api.service.clone());
            return Ok(Box::pin(async move {
                let _inflight = inflight;
                put_reply(service.acknowledging(options.ids, filled.complete()).await)
            }));
        }
        let (this, bytes) = (self.clone(), Bytes::copy_from_slice(request.values));
        Ok(Box::pin(async move {
            let _inflight = inflight;
            let values = this.values(&message, &bytes)?;
            let filled = fill(&this.api, &message, keys, values, &options).await?;
            put_reply(this.api.service.acknowledging(options.ids, filled.complete()).await)
        }))
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

/// Brings the values of a put to their places.
async fn fill(
    api: &StoreApi,
    message: &proto::PutItemsRequest,
    keys: Vec<ObjectKey>,
    values: Vec<Value<'_>>,
    options: &PutOptions,
) -> Result<FilledBatch, Error> {
    let tenant = api.tenant(&message.tenant).await?;
    let items = keys.into_iter().zip(values).enumerate().map(|(position, (key, value))| PutItem {
        name: ObjectName { tenant, key },
        value,
        checksum: message.checksums.get(position).copied(),
    });
    Ok(api.service.fill_batch(items.collect(), options).await)
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

type Begun = std::pin::Pin<Box<dyn Future<Output = Answer> + Send>>;

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

impl StoreApi {
    /// An object or a range of it, its bytes as they lie in memory; without them if they are too many for one answer.
    async fn get_whole(self, request: proto::GetRequest) -> Answer {
        let mut reader = match self.open_or_refer(&request, request.may_refer).await? {
            Opened::Here(reader) => reader,
            Opened::Elsewhere(location, elsewhere) => {
                let version = location.version.to_string();
                return Ok(Reply::of(&proto::ObjectDescription { version, elsewhere, ..Default::default() }));
            }
        };
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
