//! Errors as Python sees them: an exception of `tidepool.errors` with a kind, a reason for machines, and words.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tidepool_client::{Error, ErrorKind};
use tidepool_transfer::{Failure, Kind, TransferError};

/// Reasons that arise on this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The object was made in a parent process.
    Forked,
    /// The connection was closed.
    Closed,
    /// A bug on this side.
    Internal,
    /// An address that can't be meant.
    BadAddress,
    /// Lists that belong together have different lengths.
    LengthMismatch,
    /// An argument has none of the values that are allowed.
    BadArgument,
    /// Overlaps a registered range.
    Overlap,
    /// No such range is registered.
    NotRegistered,
    /// The range is used by a call.
    InUse,
    /// Too many awaited calls at once.
    Overloaded,
    /// The object is there, but nobody can read it now.
    Recovering,
    /// The object does not fit the buffer.
    BadRange,
}

impl Reason {
    fn names(self) -> (ErrorKind, &'static str) {
        match self {
            Self::Forked => (ErrorKind::Conflict, "FORKED"),
            Self::Closed => (ErrorKind::Conflict, "CLOSED"),
            Self::Internal => (ErrorKind::Internal, "INTERNAL"),
            Self::BadAddress => (ErrorKind::Invalid, "BAD_ADDRESS"),
            Self::LengthMismatch => (ErrorKind::Invalid, "LENGTH_MISMATCH"),
            Self::BadArgument => (ErrorKind::Invalid, "BAD_ARGUMENT"),
            Self::Overlap => (ErrorKind::Invalid, "OVERLAP"),
            Self::NotRegistered => (ErrorKind::Invalid, "NOT_REGISTERED"),
            Self::InUse => (ErrorKind::Conflict, "IN_USE"),
            Self::Overloaded => (ErrorKind::Exhausted, "OVERLOADED"),
            Self::Recovering => (ErrorKind::Unavailable, "RECOVERING"),
            Self::BadRange => (ErrorKind::Invalid, "BAD_RANGE"),
        }
    }

    /// The exception.
    pub(crate) fn error(self, words: &str) -> PyErr {
        let (kind, reason) = self.names();
        Python::attach(|py| exception(py, kind_name(kind), reason, words, None, ""))
    }
}

fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "invalid",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Conflict => "conflict",
        ErrorKind::Exhausted => "exhausted",
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::Deadline => "deadline",
        ErrorKind::Denied => "denied",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::Unimplemented => "unimplemented",
        ErrorKind::Internal => "internal",
    }
}

/// The exception for an error of the client.
pub(crate) fn of_client(py: Python<'_>, error: &Error) -> PyErr {
    let mut words = error.to_string();
    if let Some(source) = std::error::Error::source(error) {
        words = format!("{words}: {source}");
    }
    let field = match error {
        Error::Refused(refusal) => refusal.field.as_str(),
        Error::Setting { name, .. } => name,
        Error::Endpoint { .. } => "endpoint",
        _ => "",
    };
    let retry_after = error.retry_after().map(|pause| pause.as_secs_f64());
    exception(py, kind_name(error.kind()), error.reason(), &words, retry_after, field)
}

/// The exception for an error of a node in this process.
#[cfg(feature = "embedded")]
pub(crate) fn of_server(py: Python<'_>, error: &tidepool_server::Error) -> PyErr {
    exception(py, kind_name(error.kind()), error.reason(), &error.to_string(), None, error.field_name())
}

/// The exception for an error of the transfer engine.
pub(crate) fn of_transfer(py: Python<'_>, error: &TransferError) -> PyErr {
    let reason = match error {
        TransferError::UnknownRegion(_) => "NOT_REGISTERED",
        TransferError::UnknownSegment(_) | TransferError::UnknownPeer(_) => "STALE_HANDLE",
        TransferError::Slice { .. } => "BAD_RANGE",
        TransferError::NoRight { .. } => "NO_RIGHT",
        TransferError::NotMemory { .. } => "NOT_MEMORY",
        TransferError::NoSegment { .. } => "NO_SEGMENT",
        TransferError::NoWay { .. } => "NO_WAY",
        TransferError::Full { .. } => "OVERLOADED",
        TransferError::Length { .. } => "BAD_LENGTH",
        TransferError::NameTaken(_) => "NAME_TAKEN",
        TransferError::StillInUse(_) => "IN_USE",
        TransferError::Address { .. } => "BAD_ENDPOINT",
        TransferError::Peer { failure, .. } => failure_name(*failure),
        TransferError::NoAnswer(_) => "NO_ANSWER",
        TransferError::System { .. } => "SYSTEM",
        TransferError::Certificate { .. } => "BAD_CERTIFICATE",
        TransferError::Closed => "CLOSED",
    };
    let kind = match error.kind() {
        Kind::Retry => "exhausted",
        Kind::OtherReplica | Kind::OpenAgain => "unavailable",
        Kind::Fix => "invalid",
        Kind::Stop if reason == "DEADLINE" => "deadline",
        Kind::Stop => "conflict",
    };
    exception(py, kind, reason, &error.to_string(), None, "")
}

/// A failure's name for machines.
pub(crate) fn failure_name(failure: Failure) -> &'static str {
    match failure {
        Failure::Cancelled => "CANCELLED",
        Failure::DeadlinePassed => "DEADLINE",
        Failure::Unreachable => "UNREACHABLE",
        Failure::ConnectionLost => "CONNECTION_LOST",
        Failure::Silent => "SILENT",
        Failure::Restarted => "RESTARTED",
        Failure::NoRegion => "NOT_REGISTERED",
        Failure::NoRight => "NO_RIGHT",
        Failure::OutOfRange => "BAD_RANGE",
        Failure::Protocol => "PROTOCOL",
        Failure::Version => "VERSION",
        Failure::Unauthorized => "UNAUTHENTICATED",
        Failure::Overloaded => "OVERLOADED",
        Failure::Closed => "CLOSED",
        Failure::System => "SYSTEM",
        Failure::Truncated => "TRUNCATED",
        Failure::Storage => "STORAGE",
    }
}

static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

fn exception(py: Python<'_>, kind: &str, reason: &str, words: &str, retry_after: Option<f64>, field: &str) -> PyErr {
    let make = MAKE.get_or_try_init(py, || Ok::<_, PyErr>(py.import("tidepool.errors")?.getattr("make")?.unbind()));
    let made = make.and_then(|make| make.bind(py).call1((kind, reason, words, retry_after, field)));
    made.map_or_else(|error| error, PyErr::from_value)
}
