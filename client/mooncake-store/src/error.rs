//! What calls fail with.

use std::ffi::NulError;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// There is no store behind the handle. Never returned: here a handle always has one.
    #[error("null handle or pointer")]
    NullHandle,
    /// A text has a zero byte, which the other store's texts can't have.
    #[error("string argument contains null byte: {0}")]
    InvalidString(#[from] NulError),
    /// The code of what happened: negative; 1 and 2 of [`crate::MooncakeStore::health_check`].
    #[error("store operation failed with code {0}")]
    OperationFailed(i32),
    /// There is no such object. Never returned, as [`StoreError::OperationFailed`] with -704 says it: for programs that make it.
    #[error("key not found")]
    NotFound,
    /// Lists that belong together have different lengths.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
}
