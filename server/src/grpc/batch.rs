//! Batches: one outcome per item, in request order, as structures of arrays.

use bytes::Bytes;
use futures::stream;
use tidepool_metadata::catalog::ObjectLocation;
use tidepool_metadata::proto;
use tidepool_metadata::{ErrorKind, ObjectKey, TenantId, VersionId};

use super::{MAX_UNARY_BYTES, Replies, StoreApi, convert};
use crate::error::Error;
use crate::node::{Freshness, ObjectName, Opened, PutItem, RangeRequest, Value};

/// About how many bytes of values one message of a batch get carries.
const REPLY_BYTES: u64 = 4 << 20;
/// Objects that are open at a time: what other nodes begin to send for them is read soon.
const OPEN_AT_A_TIME: usize = 32;

/// What a batch get is asked for.
pub(crate) struct AskedBatch {
    tenant: TenantId,
    keys: Vec<ObjectKey>,
    /// None, or one a key.
    versions: Vec<VersionId>,
    freshness: Freshness,
    may_refer: bool,
    /// Longer ones are left out.
    largest: u64,
}

/// What became of an item of a batch get.
enum Small {
    /// `tier`: its number.
    Read {
        bytes: Vec<Bytes>,
        checksum: u32,
        tier: u8,
    },
    TooLarge,
    /// The addresses of nodes that hold it.
    Elsewhere(Box<ObjectLocation>, Vec<String>),
}

impl StoreApi {
    pub(super) async fn put_objects(&self, request: proto::BatchPutRequest) -> Result<proto::BatchPutReply, Error> {
        let proto::BatchPutRequest { tenant, keys, values, options, checksums } = request;
        let count = keys.len();
        if values.len() != count || !(checksums.is_empty() || checksums.len() == count) {
            let message = format!("{count} keys, {} values, {} checksums", values.len(), checksums.len());
            return Err(convert::invalid("LENGTH_MISMATCH", "values", message));
        }
        let keys = convert::keys(&keys)?;
        let tenant = self.tenant(&tenant).await?;
        let options = convert::options(options, count)?;
        let _inflight = self.inflight.admit(values.iter().map(|value| value.len() as u64).sum())?;
        let items = keys.into_iter().zip(&values).enumerate().map(|(position, (key, value))| PutItem {
            name: ObjectName { tenant, key },
            value: Value::Bytes(value),
            checksum: checksums.get(position).copied(),
        });
        Ok(convert::batch_put_reply(self.service.put_batch(items.collect(), &options).await))
    }

    pub(super) async fn get_objects(
        &self,
        request: proto::BatchGetRequest,
    ) -> Result<Replies<proto::BatchGetReply>, Error> {
        let asked = self.asked(proto::BatchGetRequest { may_refer: false, ..request }).await?;
        let api = self.clone();
        let replies = stream::try_unfold((api, asked, 0), move |(api, asked, first)| async move {
            if first == asked.keys.len() {
                return Ok::<_, tonic::Status>(None);
            }
            let (mut reply, values) = api.gather(&asked, first).await?;
            reply.values = values.concat().into();
            let next = first + reply.outcomes.len();
            Ok(Some((reply, (api, asked, next))))
        });
        Ok(Box::pin(replies))
    }

    pub(crate) async fn asked(&self, request: proto::BatchGetRequest) -> Result<AskedBatch, Error> {
        let keys = convert::keys(&request.keys)?;
        let versions = request.versions.iter().map(|version| convert::parse_version(version));
        let versions = versions.collect::<Result<Vec<_>, _>>()?;
        if !(versions.is_empty() || versions.len() == keys.len()) {
            let message = format!("{} keys, {} versions", keys.len(), versions.len());
            return Err(convert::invalid("LENGTH_MISMATCH", "versions", message));
        }
        let freshness = convert::freshness(request.fresh, request.seen_index);
        let tenant = self.tenant(&request.tenant).await?;
        let most = u64::from(MAX_UNARY_BYTES);
        let largest = if request.largest == 0 { most } else { request.largest.min(most) };
        Ok(AskedBatch { tenant, keys, versions, freshness, may_refer: request.may_refer, largest })
    }

    /// Reads items from `first` on until a message is full: what is said of them, and their bytes as they lie. Some at a
    /// time, so that those on a disk are not waited for one after the other.
    pub(crate) async fn gather(
        &self,
        asked: &AskedBatch,
        first: usize,
    ) -> Result<(proto::BatchGetReply, Vec<Bytes>), Error> {
        use proto::GetOutcome;
        let _inflight = self.inflight.admit(REPLY_BYTES)?;
        let (mut items, mut announced, mut next) = (Vec::new(), 0, first);
        while announced < REPLY_BYTES && next < asked.keys.len() {
            let mut opened = Vec::with_capacity(OPEN_AT_A_TIME);
            while opened.len() < OPEN_AT_A_TIME && announced < REPLY_BYTES && next < asked.keys.len() {
                let item = self.open_item(asked, next).await;
                if let Ok(Opened::Here(reader)) = &item {
                    let length = reader.description().range_length;
                    announced += if length <= asked.largest { length } else { 0 };
                }
                opened.push(item);
                next += 1;
            }
            items.extend(
                futures::future::join_all(opened.into_iter().map(|item| read_small(item, asked.largest))).await,
            );
        }
        let mut reply = proto::BatchGetReply { first: u32::try_from(first).unwrap_or(u32::MAX), ..Default::default() };
        let (mut values, mut tiers) = (Vec::new(), Vec::with_capacity(items.len()));
        for item in items {
            let (outcome, bytes, checksum, tier) = match item {
                Ok(Small::Read { bytes, checksum, tier }) => (GetOutcome::Found, bytes, checksum, tier),
                Ok(Small::TooLarge) => (GetOutcome::TooLarge, Vec::new(), 0, 0),
                Ok(Small::Elsewhere(location, addresses)) => {
                    refer(&mut reply, location.version.to_string(), addresses);
                    (GetOutcome::Elsewhere, Vec::new(), 0, 0)
                }
                Err(error) => (outcome_of(&error), Vec::new(), 0, 0),
            };
            reply.outcomes.push(outcome.into());
            reply.lengths.push(bytes.iter().map(|bytes| bytes.len() as u64).sum());
            reply.checksums.push(checksum);
            tiers.push(tier);
            values.extend(bytes);
        }
        reply.tiers = tiers.into();
        Ok((reply, values))
    }

    async fn open_item(&self, asked: &AskedBatch, position: usize) -> Result<Opened, Error> {
        let name = ObjectName { tenant: asked.tenant, key: asked.keys[position].clone() };
        let range = RangeRequest::default();
        match asked.versions.get(position) {
            Some(&version) => Ok(Opened::Here(self.service.get_version(&name, version, range).await?)),
            None => self.service.get_or_refer(&name, range, asked.freshness, asked.may_refer).await,
        }
    }
}

/// The bytes of an object of at most `largest`.
async fn read_small(opened: Result<Opened, Error>, largest: u64) -> Result<Small, Error> {
    let mut reader = match opened? {
        Opened::Here(reader) => reader,
        Opened::Elsewhere(location, addresses) => return Ok(Small::Elsewhere(location, addresses)),
    };
    if reader.description().range_length > largest {
        return Ok(Small::TooLarge);
    }
    let known = reader.description().checksum;
    let tier = if reader.description().tier == "dram" { 1 } else { 2 };
    let (mut sum, mut bytes) = (crc32fast::Hasher::new(), Vec::new());
    while let Some(piece) = reader.next().await? {
        if known.is_none() {
            sum.update(&piece);
        }
        bytes.push(piece);
    }
    Ok(Small::Read { bytes, checksum: known.unwrap_or_else(|| sum.finalize()), tier })
}

/// Says of the next item that is elsewhere where it is.
fn refer(reply: &mut proto::BatchGetReply, version: String, addresses: Vec<String>) {
    let known = reply.places.iter().position(|place| place.addresses == addresses);
    let place = known.unwrap_or_else(|| {
        reply.places.push(proto::Place { addresses });
        reply.places.len() - 1
    });
    reply.elsewhere.push(u32::try_from(place).unwrap_or(u32::MAX));
    reply.versions.push(version);
}

fn outcome_of(error: &Error) -> proto::GetOutcome {
    match error.kind() {
        ErrorKind::NotFound => proto::GetOutcome::Missing,
        ErrorKind::Unavailable => proto::GetOutcome::Unavailable,
        _ => proto::GetOutcome::Failed,
    }
}
