//! Batches: one outcome per item, in request order, as structures of arrays.

use bytes::Bytes;
use futures::stream;
use tidepool_metadata::proto;
use tidepool_metadata::{ErrorKind, ObjectKey, TenantId};

use super::{MAX_UNARY_BYTES, Replies, StoreApi, convert};
use crate::error::Error;
use crate::node::{Freshness, ObjectName, PutItem, RangeRequest, Value};

/// About how many bytes of values one message of a batch get carries.
const REPLY_BYTES: usize = 4 << 20;

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
        let put = self.service.put_batch(items.collect(), &options);
        Ok(convert::batch_put_reply(self.service.acknowledging(options.ids, put).await))
    }

    pub(super) async fn get_objects(
        &self,
        request: proto::BatchGetRequest,
    ) -> Result<Replies<proto::BatchGetReply>, Error> {
        let keys = convert::keys(&request.keys)?;
        let tenant = self.tenant(&request.tenant).await?;
        let freshness = convert::freshness(request.fresh, request.seen_index);
        let api = self.clone();
        let replies = stream::try_unfold((api, keys, 0), move |(api, keys, first)| async move {
            if first == keys.len() {
                return Ok::<_, tonic::Status>(None);
            }
            let (mut reply, values) = api.gather(tenant, &keys, first, freshness).await?;
            reply.values = values.concat().into();
            let next = first + reply.outcomes.len();
            Ok(Some((reply, (api, keys, next))))
        });
        Ok(Box::pin(replies))
    }

    /// Reads items from `first` on until a message is full: what is said of them, and their bytes as they lie.
    pub(crate) async fn gather(
        &self,
        tenant: TenantId,
        keys: &[ObjectKey],
        first: usize,
        freshness: Freshness,
    ) -> Result<(proto::BatchGetReply, Vec<Bytes>), Error> {
        use proto::GetOutcome;
        let _inflight = self.inflight.admit(REPLY_BYTES as u64)?;
        let mut reply = proto::BatchGetReply { first: u32::try_from(first).unwrap_or(u32::MAX), ..Default::default() };
        let (mut values, mut total, mut tiers) = (Vec::new(), 0, Vec::new());
        for key in &keys[first..] {
            let name = ObjectName { tenant, key: key.clone() };
            let before = values.len();
            let (outcome, checksum, tier) = match self.read_small(&name, freshness, &mut values).await {
                Ok(Some((checksum, tier))) => (GetOutcome::Found, checksum, tier),
                Ok(None) => (GetOutcome::TooLarge, 0, 0),
                Err(error) => {
                    values.truncate(before);
                    (outcome_of(&error), 0, 0)
                }
            };
            let length = values[before..].iter().map(|bytes| bytes.len() as u64).sum::<u64>();
            reply.outcomes.push(outcome.into());
            reply.lengths.push(length);
            reply.checksums.push(checksum);
            tiers.push(tier);
            total += length;
            if total >= REPLY_BYTES as u64 {
                break;
            }
        }
        reply.tiers = tiers.into();
        Ok((reply, values))
    }

    /// Adds the bytes of an object of at most [`MAX_UNARY_BYTES`] to `values`; its checksum, and the number of its tier.
    /// `None` if it is larger.
    async fn read_small(
        &self,
        name: &ObjectName,
        freshness: Freshness,
        values: &mut Vec<Bytes>,
    ) -> Result<Option<(u32, u8)>, Error> {
        let mut reader = self.service.get(name, RangeRequest::default(), freshness).await?;
        if reader.description().range_length > u64::from(MAX_UNARY_BYTES) {
            return Ok(None);
        }
        let known = reader.description().checksum;
        let tier = if reader.description().tier == "dram" { 1 } else { 2 };
        let mut sum = crc32fast::Hasher::new();
        while let Some(bytes) = reader.next().await? {
            if known.is_none() {
                sum.update(&bytes);
            }
            values.push(bytes);
        }
        Ok(Some((known.unwrap_or_else(|| sum.finalize()), tier)))
    }
}

fn outcome_of(error: &Error) -> proto::GetOutcome {
    match error.kind() {
        ErrorKind::NotFound => proto::GetOutcome::Missing,
        ErrorKind::Unavailable => proto::GetOutcome::Unavailable,
        _ => proto::GetOutcome::Failed,
    }
}
