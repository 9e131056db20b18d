//! Puts and gets of one object.

use std::time::Duration;

use futures::{FutureExt as _, Stream, StreamExt as _, TryStreamExt as _, stream};
use tidepool_metadata::proto::get_chunk::Part;
use tidepool_metadata::{ErrorKind, proto};
use tonic::Status;

use super::{MAX_UNARY_BYTES, Replies, StoreApi, convert};
use crate::error::Error;
use crate::node::{Freshness, ObjectDescription, ObjectReader, Opened, PutItem, RangeRequest, Reserve, Value};

/// How long a put may wait for its client's next bytes: what is reserved is not held for the dead.
const CLIENT_IDLE: Duration = Duration::from_secs(5);
/// What a reader gives out at a time.
const PIECE_BYTES: u64 = 1 << 20;

fn chunk(part: Part) -> proto::GetChunk {
    proto::GetChunk { part: Some(part) }
}

fn too_large_for_unary(length: u64) -> Error {
    let message = format!("value of {length} bytes in a unary call: stream what is over {MAX_UNARY_BYTES}");
    convert::invalid("VALUE_TOO_LARGE", "value", message)
}

fn length_mismatch(what: &str) -> Error {
    convert::invalid("LENGTH_MISMATCH", "length", what.to_owned())
}

impl StoreApi {
    pub(super) async fn put_object(&self, request: proto::PutRequest) -> Result<proto::PutReply, Error> {
        let length = request.value.len() as u64;
        if length > u64::from(MAX_UNARY_BYTES) {
            return Err(too_large_for_unary(length));
        }
        let name = self.name(&request.tenant, &request.key).await?;
        let options = convert::options(request.options, 1)?;
        let _inflight = self.inflight.admit(length)?;
        let item = PutItem { name, value: Value::Bytes(&request.value), checksum: request.checksum };
        let mut results = self.service.put_batch(vec![item], &options).await;
        let done = results.pop().ok_or_else(|| Error::new(ErrorKind::Internal, "INTERNAL", "no outcome".into()))??;
        Ok(convert::put_reply(done))
    }

    pub(super) async fn put_chunks(
        &self,
        mut chunks: impl Stream<Item = Result<proto::PutChunk, Status>> + Unpin,
    ) -> Result<proto::PutReply, Status> {
        use proto::put_chunk::Part;
        let Some(Part::Announce(announce)) = next_part(&mut chunks).await? else {
            return Err(length_mismatch("the first message of a streaming put must be its announce").into());
        };
        let name = self.name(&announce.tenant, &announce.key).await?;
        let options = convert::options(announce.options, 1)?;
        let mut reservation = match self.service.reserve(name, announce.length, options).await? {
            Reserve::AlreadyExists(done) => return Ok(convert::put_reply(done)),
            Reserve::Ready(reservation) => reservation,
        };
        let mut expected = announce.checksum;
        while let Some(part) = next_part(&mut chunks).await? {
            match part {
                Part::Data(data) => {
                    let _inflight = self.inflight.admit(data.len() as u64)?;
                    reservation.write(&data)?;
                }
                Part::Checksum(checksum) => expected = Some(checksum),
                Part::Announce(_) => return Err(length_mismatch("a second announce in one put").into()),
            }
        }
        Ok(convert::put_reply(reservation.complete(expected).await?))
    }

    pub(super) async fn get_object(&self, request: proto::GetRequest) -> Result<proto::GetReply, Error> {
        let mut reader = self.open(&request).await?;
        let length = reader.description().range_length;
        if length > u64::from(MAX_UNARY_BYTES) {
            return Err(too_large_for_unary(length));
        }
        let _inflight = self.inflight.admit(length)?;
        let value = reader.read_to_end().await?;
        let mut description = describe(reader.description());
        description.checksum.get_or_insert_with(|| crc32fast::hash(&value));
        Ok(proto::GetReply { description: Some(description), value })
    }

    pub(super) async fn get_chunks(&self, request: proto::GetRequest) -> Result<Replies<proto::GetChunk>, Error> {
        let reader = self.open(&request).await?;
        let description = describe(reader.description());
        // A range's sum is only known when its bytes were read.
        let sum = description.checksum.is_none().then(crc32fast::Hasher::new);
        let first = chunk(Part::Description(description));
        let inflight = self.inflight.clone();
        let rest = stream::try_unfold(Some((reader, sum)), move |state| {
            let inflight = inflight.clone();
            async move {
                let Some((mut reader, mut sum)) = state else { return Ok::<_, Status>(None) };
                reader.ready().await;
                // The transport's windows bound what waits behind this; the permit bounds what is being read.
                let _permit = inflight.admit(PIECE_BYTES)?;
                match reader.next().await? {
                    Some(data) => {
                        if let Some(sum) = &mut sum {
                            sum.update(&data);
                        }
                        Ok(Some((chunk(Part::Data(data)), Some((reader, sum)))))
                    }
                    None => Ok(sum.map(|sum| (chunk(Part::Checksum(sum.finalize())), None))),
                }
            }
        });
        Ok(Box::pin(stream::once(async { Ok(first) }).chain(rest)))
    }

    pub(crate) async fn open(&self, request: &proto::GetRequest) -> Result<ObjectReader, Error> {
        match self.open_or_refer(request, false).await? {
            Opened::Here(reader) => Ok(reader),
            Opened::Elsewhere(..) => Err(Error::new(ErrorKind::Internal, "INTERNAL", "referred".into())),
        }
    }

    pub(crate) async fn open_or_refer(&self, request: &proto::GetRequest, may_refer: bool) -> Result<Opened, Error> {
        let name = self.name(&request.tenant, &request.key).await?;
        let range = RangeRequest { offset: request.offset, length: request.length };
        if request.version.is_empty() {
            let freshness = convert::freshness(request.fresh, request.seen_index);
            let freshness = Freshness { allow_unconfirmed: request.allow_unconfirmed, ..freshness };
            return self.service.get_or_refer(&name, range, freshness, may_refer).await;
        }
        let version = convert::parse_version(&request.version)?;
        self.service.get_version(&name, version, range).await.map(Opened::Here)
    }
}

/// The next part of a put; `None` at the end of the stream.
async fn next_part(
    chunks: &mut (impl Stream<Item = Result<proto::PutChunk, Status>> + Unpin),
) -> Result<Option<proto::put_chunk::Part>, Status> {
    loop {
        // Most have come already, and cost no timer.
        let next = match chunks.try_next().now_or_never() {
            Some(next) => next,
            None => tokio::time::timeout(CLIENT_IDLE, chunks.try_next()).await.map_err(|_| {
                let message = format!("nothing came for {CLIENT_IDLE:?}: the put is given up and its room is free");
                Error::new(ErrorKind::Deadline, "PUT_EXPIRED", message)
            })?,
        };
        match next? {
            None => return Ok(None),
            Some(proto::PutChunk { part: Some(part) }) => return Ok(Some(part)),
            // A part of a newer protocol that this one does not know.
            Some(proto::PutChunk { part: None }) => {}
        }
    }
}

pub(crate) fn describe(description: &ObjectDescription) -> proto::ObjectDescription {
    proto::ObjectDescription {
        length: description.object_length,
        data_type: description.data_type as i32,
        group: description.group.as_deref().unwrap_or_default().to_owned(),
        checksum: description.checksum,
        tier: description.tier.to_owned(),
        version: description.version.to_string(),
        elsewhere: Vec::new(),
        held: None,
    }
}
