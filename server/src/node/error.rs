//! How the errors of store and catalog look to callers: a kind, and a stable reason that machines can read.

use std::time::Duration;

use tidepool_metadata::ErrorKind;
use tidepool_metadata::catalog::{Copies, Refusal, RequestRefusal};
use tidepool_replication::CatalogError;
use tidepool_tiers::StoreError;

use super::ObjectName;
use crate::error::Error;

/// When a retry makes sense after something that ends by itself.
const SOON: Duration = Duration::from_millis(100);

pub(super) fn not_found(name: &ObjectName) -> Error {
    Error::new(ErrorKind::NotFound, "NOT_FOUND", format!("no object {}", name.key))
}

/// Not found by this node, which may be behind; nobody who knows could be asked in time.
pub(super) fn unconfirmed(name: &ObjectName) -> Error {
    let message = format!("{} is not known here, and no leader confirms that it is missing", name.key);
    Error::new(ErrorKind::NotFound, "UNCONFIRMED", message)
}

pub(super) fn recovering(name: &ObjectName) -> Error {
    let message = format!("object {} may be here: this node is still recovering what it had", name.key);
    Error::new(ErrorKind::Unavailable, "RECOVERING", message).retry_after(SOON)
}

pub(super) fn unavailable(name: &ObjectName) -> Error {
    let message = format!("all copies of object {} are on nodes or tiers that do not serve now", name.key);
    Error::new(ErrorKind::Unavailable, "UNAVAILABLE", message).retry_after(SOON)
}

pub(super) fn quota_exceeded() -> Error {
    refused(Refusal::QuotaExceeded)
}

pub(crate) fn unknown_tenant(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, "UNKNOWN_TENANT", format!("no tenant {name:?}: create it first")).field("tenant")
}

pub(super) fn too_large(length: u64, largest: u64) -> Error {
    let message = format!("value of {length} bytes is over limits.max_object_bytes = {largest}");
    Error::new(ErrorKind::Invalid, "VALUE_TOO_LARGE", message).field("value")
}

/// A put names bytes that its memory has not.
pub(super) fn outside(error: &tidepool_transfer::SliceError) -> Error {
    Error::new(ErrorKind::Invalid, "BAD_RANGE", error.to_string()).field("memory")
}

/// The catalog answered another question than the one asked: a fault of ours.
pub(super) fn unexpected(what: &str) -> Error {
    Error::new(ErrorKind::Internal, "INTERNAL", format!("the catalog gave another answer than {what}"))
}

/// The put may or may not have happened; it is being settled.
pub(super) fn outcome_unknown() -> Error {
    let message = "no answer from the catalog: whether the put succeeded is being settled; read, or put again";
    Error::new(ErrorKind::Deadline, "DEADLINE", message.to_owned()).retry_after(SOON)
}

/// A put had fewer copies than it asked for; nothing of it is left.
pub(super) fn too_few_replicas(have: usize, copies: Copies, up: usize, last: Option<&Error>) -> Error {
    let (minimum, wanted) = (copies.minimum(), copies.wanted());
    let why = last.map(|error| format!("; the last that failed: {error}")).unwrap_or_default();
    let message = format!("{have} of {wanted} copies, at least {minimum} are asked for, {up} nodes are up{why}");
    Error::new(ErrorKind::Unavailable, "TOO_FEW_REPLICAS", message).retry_after(SOON)
}

/// This node is to be emptied: puts go elsewhere.
pub(super) fn draining() -> Error {
    let message = "this node is being drained and takes no new objects: put on another one";
    Error::new(ErrorKind::Unavailable, "DRAINING", message.to_owned()).retry_after(SOON)
}

/// Nothing was done for the item, and as far as the catalog knows never will be under this id.
pub(super) fn not_executed(refusal: RequestRefusal) -> Error {
    let (kind, reason) = match refusal {
        RequestRefusal::SessionExpired => (ErrorKind::Conflict, "SESSION_EXPIRED"),
        RequestRefusal::SessionFull => (ErrorKind::Exhausted, "SESSION_FULL"),
        RequestRefusal::Acknowledged | RequestRefusal::Mismatch => (ErrorKind::Invalid, "BAD_REQUEST_ID"),
    };
    let error = Error::new(kind, reason, format!("not done: {refusal}")).field("ids");
    if kind == ErrorKind::Exhausted { error.retry_after(SOON) } else { error }
}

pub(super) fn too_many_sessions() -> Error {
    let message = "as many sessions are open as the catalog keeps; one ends ten minutes after its last use";
    Error::new(ErrorKind::Exhausted, "TOO_MANY_SESSIONS", message.to_owned()).retry_after(Duration::from_secs(1))
}

pub(super) fn refused(refusal: Refusal) -> Error {
    let (kind, reason) = match refusal {
        Refusal::UnknownTenant => (ErrorKind::NotFound, "UNKNOWN_TENANT"),
        Refusal::QuotaExceeded => (ErrorKind::Exhausted, "QUOTA_EXCEEDED"),
        Refusal::CatalogFull => (ErrorKind::Exhausted, "NO_SPACE"),
        Refusal::ReservationExpired | Refusal::TooFewReplicas | Refusal::Abandoned | Refusal::StaleNode => {
            (ErrorKind::Unavailable, "PUT_EXPIRED")
        }
        Refusal::Malformed | Refusal::NoSuchVersion | Refusal::TooManyReplicas => (ErrorKind::Internal, "INTERNAL"),
    };
    Error::new(kind, reason, format!("the catalog refused the put: {refusal}"))
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        let reason = match &error {
            StoreError::TooLarge { .. } => "VALUE_TOO_LARGE",
            StoreError::NoSpace { .. } => "NO_SPACE",
            StoreError::LengthMismatch { .. } => "LENGTH_MISMATCH",
            StoreError::ChecksumMismatch { .. } => "CHECKSUM_MISMATCH",
            StoreError::BadRange { .. } => "BAD_RANGE",
            StoreError::Corrupt { .. } => "CORRUPT",
            StoreError::Recovering => "RECOVERING",
            StoreError::Gone { .. } | StoreError::TierUnavailable { .. } | StoreError::Nvme(_) => "UNAVAILABLE",
            StoreError::TierAttached => "TIER_ATTACHED",
        };
        let kind = error.kind();
        let message = error.to_string();
        let converted = Self::new(kind, reason, message);
        match kind {
            ErrorKind::Exhausted | ErrorKind::Unavailable => converted.retry_after(SOON),
            _ => converted,
        }
    }
}

impl From<CatalogError> for Error {
    fn from(error: CatalogError) -> Self {
        let (kind, reason, retry_after) = (error.kind(), error.reason(), error.retry_after());
        let converted = Self::new(kind, reason, error.to_string());
        match retry_after {
            Some(after) => converted.retry_after(after),
            None => converted,
        }
    }
}
