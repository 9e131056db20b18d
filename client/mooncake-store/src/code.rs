//! The other store's codes, and which one an error has.

use tidepool_client::{Error, ErrorKind};

pub(crate) const INTERNAL_ERROR: i32 = -1;
pub(crate) const NO_AVAILABLE_HANDLE: i32 = -200;
pub(crate) const INVALID_PARAMS: i32 = -600;
pub(crate) const REPLICA_IS_NOT_READY: i32 = -703;
pub(crate) const OBJECT_NOT_FOUND: i32 = -704;
pub(crate) const OBJECT_HAS_LEASE: i32 = -706;
pub(crate) const CHECKSUM_MISMATCH: i32 = -801;
pub(crate) const RPC_FAIL: i32 = -900;
pub(crate) const RPC_TIMEOUT: i32 = -901;
pub(crate) const NOT_SUPPORTED: i32 = -1012;
pub(crate) const TENANT_QUOTA_EXCEEDED: i32 = -1700;
pub(crate) const TENANT_NOT_REGISTERED: i32 = -1701;

/// The code of an error.
pub(crate) fn of(error: &Error) -> i32 {
    tracing::debug!(%error, "a call failed");
    named(error.reason()).unwrap_or_else(|| of_kind(error.kind()))
}

fn named(reason: &str) -> Option<i32> {
    Some(match reason {
        "QUOTA_EXCEEDED" => TENANT_QUOTA_EXCEEDED,
        "UNKNOWN_TENANT" => TENANT_NOT_REGISTERED,
        "RECOVERING" => REPLICA_IS_NOT_READY,
        "PINNED" => OBJECT_HAS_LEASE,
        _ => return None,
    })
}

fn of_kind(kind: ErrorKind) -> i32 {
    match kind {
        ErrorKind::Invalid | ErrorKind::Conflict => INVALID_PARAMS,
        ErrorKind::NotFound => OBJECT_NOT_FOUND,
        ErrorKind::Exhausted => NO_AVAILABLE_HANDLE,
        ErrorKind::Unavailable | ErrorKind::Denied => RPC_FAIL,
        ErrorKind::Deadline => RPC_TIMEOUT,
        ErrorKind::Corrupt => CHECKSUM_MISMATCH,
        ErrorKind::Unimplemented => NOT_SUPPORTED,
        ErrorKind::Internal => INTERNAL_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_refuses_by_name_has_its_code() {
        assert_eq!(named("QUOTA_EXCEEDED"), Some(TENANT_QUOTA_EXCEEDED));
        assert_eq!(named("UNKNOWN_TENANT"), Some(TENANT_NOT_REGISTERED));
        assert_eq!(named("NO_SPACE"), None);
    }
}
