//! Between messages and domain types.

use std::time::Duration;

use bytes::Bytes;
use tidepool_metadata::catalog::{MAX_GROUP_BYTES, MAX_SESSION_ANSWERS, Presence, SessionId};
use tidepool_metadata::{
    DataType, ErrorKind, Incarnation, KeyError, LogIndex, NodeId, ObjectKey, TenantId, VersionId, proto,
};
use tidepool_tiers::store::MAX_SOFT_PIN;

use super::StoreApi;
use crate::error::Error;
use crate::node::{Freshness, ObjectName, PutDone, PutOptions, PutOutcome, RequestIds};

/// Most keys of one call.
pub(super) const MAX_KEYS: usize = 65_536;

pub(crate) fn invalid(reason: &'static str, field: &'static str, message: String) -> Error {
    Error::new(ErrorKind::Invalid, reason, message).field(field)
}

fn bad_key(error: KeyError) -> Error {
    let reason = match error {
        KeyError::Empty => "KEY_EMPTY",
        KeyError::TooLong { .. } => "KEY_TOO_LONG",
    };
    invalid(reason, "key", error.to_string())
}

pub(super) fn key(bytes: &[u8]) -> Result<ObjectKey, Error> {
    ObjectKey::new(bytes).map_err(bad_key)
}

pub(crate) fn keys(keys: &[Bytes]) -> Result<Vec<ObjectKey>, Error> {
    check_count(keys)?;
    keys.iter().map(|bytes| key(bytes)).collect()
}

/// Whether all of them are keys, where they lie.
pub(super) fn check_keys(keys: &[Bytes]) -> Result<(), Error> {
    check_count(keys)?;
    keys.iter().try_for_each(|bytes| ObjectKey::check(bytes).map_err(bad_key))
}

fn check_count(keys: &[Bytes]) -> Result<(), Error> {
    if keys.len() > MAX_KEYS {
        let message = format!("{} keys in one call: send at most {MAX_KEYS}", keys.len());
        return Err(invalid("TOO_MANY_KEYS", "keys", message));
    }
    Ok(())
}

pub(super) fn session(session: u64) -> Result<SessionId, Error> {
    if session == 0 {
        return Err(invalid("BAD_REQUEST_ID", "session", "session 0: choose a random number".into()));
    }
    Ok(SessionId(session))
}

/// The names of `count` items.
pub(super) fn request_ids(ids: Option<proto::RequestIds>, count: usize) -> Result<Option<RequestIds>, Error> {
    let Some(proto::RequestIds { session: id, first, acknowledged, again }) = ids else { return Ok(None) };
    if count > MAX_SESSION_ANSWERS {
        let message = format!("{count} items with request ids in one call: send at most {MAX_SESSION_ANSWERS}");
        return Err(invalid("TOO_MANY_KEYS", "keys", message));
    }
    if first == 0 || first.checked_add(count as u64).is_none() {
        let message = format!("first = {first} for {count} items: sequences count from 1 and fit 64 bits");
        return Err(invalid("BAD_REQUEST_ID", "ids", message));
    }
    Ok(Some(RequestIds { session: session(id)?, first, acknowledged, again }))
}

impl StoreApi {
    pub(super) async fn name(&self, tenant: &str, bytes: &[u8]) -> Result<ObjectName, Error> {
        Ok(ObjectName { tenant: self.service.tenant(tenant).await?, key: key(bytes)? })
    }

    pub(crate) async fn tenant(&self, name: &str) -> Result<TenantId, Error> {
        self.service.tenant(name).await
    }
}

/// Nodes that a put may prefer or a task may have as targets, and bytes of the name of one.
const MAX_PREFERRED: usize = 16;
const MAX_NAME_BYTES: usize = 256;

/// Whether so many nodes may be named, and so.
pub(crate) fn are_few_names(names: &[String]) -> bool {
    names.len() <= MAX_PREFERRED && names.iter().all(|name| name.len() <= MAX_NAME_BYTES)
}

/// What a put of `count` objects asks for.
pub(crate) fn options(options: Option<proto::PutOptions>, count: usize) -> Result<PutOptions, Error> {
    let options = options.unwrap_or_default();
    if options.group.len() > MAX_GROUP_BYTES {
        let message = format!("group of {} bytes: give at most {MAX_GROUP_BYTES}", options.group.len());
        return Err(invalid("GROUP_TOO_LONG", "group", message));
    }
    if !are_few_names(&options.prefer) {
        let count = options.prefer.len();
        let message = format!(
            "{count} preferred nodes: give at most {MAX_PREFERRED}, by names of at most {MAX_NAME_BYTES} bytes"
        );
        return Err(invalid("BAD_PREFERENCE", "prefer", message));
    }
    let soft_pin = Duration::from_millis(options.soft_pin_milliseconds.unwrap_or(0));
    if soft_pin > MAX_SOFT_PIN {
        let message = format!("a soft pin of {soft_pin:?}: give at most {MAX_SOFT_PIN:?}");
        return Err(invalid("BAD_SOFT_PIN", "soft_pin_milliseconds", message));
    }
    Ok(PutOptions {
        durable_on_nvme: options.durability() == proto::Durability::Nvme,
        data_type: data_type(options.data_type)?,
        group: (!options.group.is_empty()).then(|| options.group.as_str().into()),
        upsert: options.upsert,
        pin: options.pin,
        soft_pin: options.soft_pin_milliseconds.map(Duration::from_millis),
        replicas: options.replicas,
        min_replicas: options.min_replicas,
        prefer: options.prefer.into(),
        ids: request_ids(options.ids, count)?,
    })
}

pub(super) fn data_type(number: i32) -> Result<DataType, Error> {
    let known = u8::try_from(number).ok().and_then(DataType::from_number);
    known.ok_or_else(|| invalid("BAD_DATA_TYPE", "data_type", format!("data type {number} is none that is known")))
}

pub(crate) fn freshness(fresh: bool, seen: u64) -> Freshness {
    Freshness { fresh, seen: LogIndex(seen), allow_unconfirmed: false }
}

pub(crate) fn put_outcome(outcome: PutOutcome) -> proto::PutOutcome {
    match outcome {
        PutOutcome::Stored => proto::PutOutcome::Stored,
        PutOutcome::AlreadyExists => proto::PutOutcome::AlreadyExists,
    }
}

/// The outcomes of a batch, and why those failed that did.
pub(crate) fn batch_put_reply(results: Vec<Result<PutDone, Error>>) -> proto::BatchPutReply {
    let mut reply = proto::BatchPutReply::default();
    let failed = results.iter().any(Result::is_err);
    for result in results {
        let (outcome, reason) = match result {
            Ok(done) => {
                reply.log_index = reply.log_index.max(done.log_index.0);
                (put_outcome(done.outcome), "")
            }
            Err(error) => (proto::PutOutcome::Failed, error.reason()),
        };
        reply.outcomes.push(outcome.into());
        if failed {
            reply.reasons.push(reason.to_owned());
        }
    }
    reply
}

pub(super) fn put_reply(done: PutDone) -> proto::PutReply {
    proto::PutReply { outcome: put_outcome(done.outcome).into(), log_index: done.log_index.0, checksum: done.checksum }
}

/// `None`: a miss that nobody confirmed.
pub(super) fn existence(presence: Option<Presence>) -> proto::ExistsOutcome {
    match presence {
        Some(Presence::Present) => proto::ExistsOutcome::Present,
        Some(Presence::Missing) => proto::ExistsOutcome::Missing,
        Some(Presence::Recovering | Presence::Unavailable) => proto::ExistsOutcome::Recovering,
        None => proto::ExistsOutcome::Unconfirmed,
    }
}

/// Reads what `VersionId` is shown as.
pub(super) fn parse_version(text: &str) -> Result<VersionId, Error> {
    let parse = || {
        let mut parts = text.split('.');
        let node = NodeId(u32::from_str_radix(parts.next()?, 16).ok()?);
        let incarnation = Incarnation(parts.next()?.parse().ok()?);
        let sequence = parts.next()?.parse().ok()?;
        parts.next().is_none().then_some(VersionId { node, incarnation, sequence })
    };
    parse().ok_or_else(|| {
        invalid("BAD_VERSION", "version", format!("{text:?} is no version: give one as a get or stat named it"))
    })
}
