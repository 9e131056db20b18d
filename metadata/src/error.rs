//! Errors of the vocabulary, and the kinds that all crates fold theirs into.

use crate::object::MAX_KEY_BYTES;

/// What a caller does next about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is wrong; fix it.
    Invalid,
    /// What was named is not there.
    NotFound,
    /// Something in the way must end first, or a condition no longer holds; look again.
    Conflict,
    /// No room or too much in flight; retry after a pause.
    Exhausted,
    /// Not now: no leader, shutting down, recovering; retry.
    Unavailable,
    /// The deadline passed; the outcome may be unknown.
    Deadline,
    /// The caller may not do this.
    Denied,
    /// Bytes are damaged; another replica may be good.
    Corrupt,
    /// Not built yet; docs/roadmap says when.
    Unimplemented,
    /// Our own fault; a person must look.
    Internal,
}

/// Why bytes are no object key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// No bytes.
    #[error("object key is empty: give 1 to {MAX_KEY_BYTES} bytes")]
    Empty,
    /// Too many bytes.
    #[error("object key of {length} bytes is too long: give 1 to {MAX_KEY_BYTES} bytes")]
    TooLong {
        /// The refused key's length in bytes.
        length: usize,
    },
}
