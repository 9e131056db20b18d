//! What can go wrong in a call, and what the caller does next about it.

use std::error::Error as _;
use std::time::Duration;

use prost::Message;
use tidepool_metadata::proto::ErrorDetail;
use tidepool_metadata::{ErrorKind, KeyError};
use tonic::{Code, Status, TimeoutExpired};

/// Errors of the client. [`Error::kind`] says what to do next, [`Error::reason`] what happened, in words for machines.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The endpoint can't be understood.
    #[error("endpoint {endpoint:?}: {why}; give host:port, http://host:port or unix:/path")]
    Endpoint {
        /// What was given.
        endpoint: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A setting is out of bounds.
    #[error("client setting {name} is {value}: {bounds}")]
    Setting {
        /// Which.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        bounds: &'static str,
    },
    /// Not a key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The server said no, or could not be reached.
    #[error(transparent)]
    Refused(Box<Refusal>),
    /// The call's deadline passed; whether it was done is unknown.
    #[error("{operation} has no answer after {deadline:?}")]
    Deadline {
        /// The call.
        operation: &'static str,
        /// How long it was given.
        deadline: Duration,
    },
    /// The bytes that came are not those that were stored.
    #[error("object {key}: checksum {actual:#010x}, expected {expected:#010x}")]
    ChecksumMismatch {
        /// The object.
        key: String,
        /// What the server announced.
        expected: u32,
        /// What came.
        actual: u32,
    },
    /// More or fewer bytes came than were announced.
    #[error("object {key}: {actual} bytes came, {expected} were announced")]
    LengthMismatch {
        /// The object.
        key: String,
        /// What was announced.
        expected: u64,
        /// What came.
        actual: u64,
    },
    /// The caller's buffer does not fit what was asked for.
    #[error("object {key} has {length} bytes, the buffer {buffer}")]
    Buffer {
        /// The object.
        key: String,
        /// The object's length in bytes.
        length: u64,
        /// The buffer's length in bytes.
        buffer: u64,
    },
    /// No view is given: too much is viewed already.
    #[error("no view of object {key} is given: {bound}")]
    View {
        /// The object.
        key: String,
        /// What bound is reached.
        bound: &'static str,
    },
    /// The source of a put failed; nothing was stored.
    #[error("read the source of a put")]
    Source(#[source] std::io::Error),
    /// The source of a put ended early or went on; nothing was stored.
    #[error("the source of a put gave {actual} bytes, announced were {announced}")]
    SourceLength {
        /// What the caller announced.
        announced: u64,
        /// What the source gave, as far as it was read.
        actual: u64,
    },
    /// The object was not stored in stripes.
    #[error("object {key} is not striped: read it with a plain get")]
    NotStriped {
        /// The object.
        key: String,
    },
    /// The answer breaks the protocol.
    #[error("the server's answer to {operation} {why}")]
    Protocol {
        /// The call.
        operation: &'static str,
        /// What is wrong with the answer.
        why: &'static str,
    },
}

/// A status that is not OK.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// gRPC's code.
    pub code: Code,
    /// The protocol's own reason (`KEY_EMPTY`, `OVERLOADED`, ..), or empty if the server gave none.
    pub reason: String,
    /// The field or setting to blame, or empty.
    pub field: String,
    /// The server's words.
    pub message: String,
    /// When a repetition makes sense, if the server said so.
    pub retry_after: Option<Duration>,
    /// The connection failed, not the server: what was asked may not have arrived.
    pub is_transport: bool,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        if !self.reason.is_empty() {
            write!(f, " ({})", self.reason)?;
        }
        Ok(())
    }
}

impl std::error::Error for Refusal {}

impl Refusal {
    fn of(status: &Status) -> Self {
        let detail = ErrorDetail::decode(status.details()).unwrap_or_default();
        // A status made on this side, because no answer came, has its cause; one that came over the wire has none.
        let cause = status.source();
        let causes = || std::iter::successors(cause, |&error| error.source());
        let words = causes().last();
        // tonic's own clock, which may be ahead of ours. A call whose connection closes is cancelled, too.
        let is_late = causes().any(|cause| cause.is::<TimeoutExpired>());
        Self {
            code: status.code(),
            message: match words {
                Some(words) if words.to_string() != status.message() => format!("{}: {words}", status.message()),
                _ => status.message().to_owned(),
            },
            is_transport: cause.is_some() && detail.reason.is_empty() && !is_late,
            retry_after: (detail.retry_after_ms > 0).then(|| Duration::from_millis(detail.retry_after_ms.into())),
            reason: detail.reason,
            field: detail.field,
        }
    }

    /// The engine's: no answer came over it.
    pub(crate) fn of_engine(error: &tidepool_transfer::TransferError) -> Self {
        let causes = std::iter::successors(Some(error as &dyn std::error::Error), |&error| error.source());
        let message = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        let (reason, field) = (String::new(), String::new());
        Self { code: Code::Unavailable, reason, field, message, retry_after: None, is_transport: true }
    }

    /// The refusal of one item of a batch, of which only the reason comes.
    pub(crate) fn of_item(reason: String) -> Self {
        let code = match reason.as_str() {
            "KEY_EMPTY" | "KEY_TOO_LONG" | "VALUE_TOO_LARGE" | "LENGTH_MISMATCH" | "CHECKSUM_MISMATCH"
            | "BAD_RANGE" | "BAD_REPLICAS" => Code::InvalidArgument,
            "NO_SPACE" | "OVERLOADED" | "QUOTA_EXCEEDED" => Code::ResourceExhausted,
            "NO_LEADER" | "LAGGING" | "STARTING" | "RECOVERING" | "UNAVAILABLE" | "PUT_EXPIRED" | "SHUTTING_DOWN"
            | "DRAINING" | "TOO_FEW_REPLICAS" => Code::Unavailable,
            "UNKNOWN_TENANT" => Code::NotFound,
            "CORRUPT" => Code::DataLoss,
            "DEADLINE" | "OUTCOME_UNKNOWN" => Code::DeadlineExceeded,
            "UNAUTHENTICATED" => Code::Unauthenticated,
            "UNIMPLEMENTED" => Code::Unimplemented,
            _ => Code::Internal,
        };
        let message = "the item was refused".to_owned();
        Self { code, reason, field: String::new(), message, retry_after: None, is_transport: false }
    }

    fn kind(&self) -> ErrorKind {
        if self.is_transport {
            return ErrorKind::Unavailable;
        }
        match self.code {
            Code::InvalidArgument | Code::OutOfRange => ErrorKind::Invalid,
            Code::NotFound => ErrorKind::NotFound,
            Code::AlreadyExists | Code::FailedPrecondition | Code::Aborted => ErrorKind::Conflict,
            Code::ResourceExhausted => ErrorKind::Exhausted,
            Code::Unavailable => ErrorKind::Unavailable,
            Code::DeadlineExceeded | Code::Cancelled => ErrorKind::Deadline,
            Code::PermissionDenied | Code::Unauthenticated => ErrorKind::Denied,
            Code::DataLoss => ErrorKind::Corrupt,
            Code::Unimplemented => ErrorKind::Unimplemented,
            Code::Ok | Code::Unknown | Code::Internal => ErrorKind::Internal,
        }
    }
}

impl Error {
    /// What the caller does next.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Endpoint { .. }
            | Self::Setting { .. }
            | Self::Key(_)
            | Self::Buffer { .. }
            | Self::NotStriped { .. }
            | Self::Source(_)
            | Self::SourceLength { .. } => ErrorKind::Invalid,
            Self::Refused(refusal) => refusal.kind(),
            Self::View { .. } => ErrorKind::Exhausted,
            Self::Deadline { .. } => ErrorKind::Deadline,
            Self::ChecksumMismatch { .. } | Self::LengthMismatch { .. } => ErrorKind::Corrupt,
            Self::Protocol { .. } => ErrorKind::Internal,
        }
    }

    /// The machine-readable reason: the server's, or the one that it would have given.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            Self::Refused(refusal) if refusal.is_transport => "UNREACHABLE",
            // tonic's own clock, which gives no reason, may be ahead of ours.
            Self::Refused(refusal) if refusal.reason.is_empty() && refusal.kind() == ErrorKind::Deadline => "DEADLINE",
            Self::Refused(refusal) => &refusal.reason,
            Self::Key(KeyError::Empty) => "KEY_EMPTY",
            Self::Key(KeyError::TooLong { .. }) => "KEY_TOO_LONG",
            Self::Deadline { .. } => "DEADLINE",
            Self::ChecksumMismatch { .. } => "CHECKSUM_MISMATCH",
            Self::LengthMismatch { .. } | Self::SourceLength { .. } => "LENGTH_MISMATCH",
            Self::Endpoint { .. } => "BAD_ENDPOINT",
            Self::Setting { .. } => "BAD_SETTING",
            Self::Buffer { .. } => "BAD_RANGE",
            Self::NotStriped { .. } => "NOT_STRIPED",
            Self::View { .. } => "TOO_MANY_VIEWS",
            Self::Source(_) => "SOURCE_FAILED",
            Self::Protocol { .. } => "INTERNAL",
        }
    }

    /// When a repetition makes sense, if the server said so.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused(refusal) => refusal.retry_after,
            _ => None,
        }
    }

    /// Whether this says that the object is not there, and not that something else isn't.
    pub(crate) fn is_missing_object(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.kind() == ErrorKind::NotFound
            && matches!(refusal.reason.as_str(), "" | "NOT_FOUND"))
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::Refused(Box::new(Refusal::of(&status)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn status(code: Code, reason: &str, retry_after_ms: u32) -> Status {
        let detail = ErrorDetail { reason: reason.into(), field: "key".into(), retry_after_ms };
        Status::with_details(code, "refused", detail.encode_to_vec().into())
    }

    #[test]
    fn details_of_a_status_are_decoded() {
        let error = Error::from(status(Code::ResourceExhausted, "OVERLOADED", 250));
        assert_eq!((error.kind(), error.reason()), (ErrorKind::Exhausted, "OVERLOADED"));
        assert_eq!(error.retry_after(), Some(Duration::from_millis(250)));
        assert_eq!(error.to_string(), "refused (OVERLOADED)");
    }

    #[test]
    fn damaged_details_do_not_hide_the_status() {
        let error = Error::from(Status::with_details(Code::InvalidArgument, "bad", vec![0xff; 9].into()));
        assert_eq!((error.kind(), error.reason()), (ErrorKind::Invalid, ""));
    }

    #[test]
    fn a_deadline_has_its_reason_whoever_noticed_it() {
        assert_eq!(Error::from(Status::deadline_exceeded("late")).reason(), "DEADLINE");
        assert_eq!(Error::from(Status::cancelled("Timeout expired")).reason(), "DEADLINE");
        assert_eq!(Error::from(Status::from_error(Box::new(TimeoutExpired(())))).reason(), "DEADLINE");
        let mut closed = Status::cancelled("operation was canceled: connection closed");
        closed.set_source(Arc::new(std::io::Error::other("connection closed")));
        assert_eq!(Error::from(closed).reason(), "UNREACHABLE", "as a call on a connection that a frozen node had");
    }

    #[test]
    fn an_unknown_tenant_is_no_missing_object() {
        assert!(Error::from(status(Code::NotFound, "NOT_FOUND", 0)).is_missing_object());
        assert!(Error::from(Status::not_found("no")).is_missing_object());
        assert!(!Error::from(status(Code::NotFound, "UNKNOWN_TENANT", 0)).is_missing_object());
    }
}
