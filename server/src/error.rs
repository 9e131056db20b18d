//! The server's error: what a caller does next, a reason that machines can read, and words for people; and how it
//! looks in gRPC and HTTP.

use std::time::Duration;

use prost::Message;
use tidepool_metadata::ErrorKind;
use tidepool_metadata::proto::ErrorDetail;
use tonic::{Code, Status};

/// An error on its way to a caller.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    reason: &'static str,
    field: &'static str,
    retry_after: Option<Duration>,
    message: String,
}

impl Error {
    /// An error of `kind`; `reason` is stable and in upper case, `message` says what, where, and what to do.
    #[must_use]
    pub fn new(kind: ErrorKind, reason: &'static str, message: String) -> Self {
        Self { kind, reason, field: "", retry_after: None, message }
    }

    /// Names the field or setting that is to blame.
    #[must_use]
    pub fn field(self, field: &'static str) -> Self {
        Self { field, ..self }
    }

    /// Says when a retry makes sense.
    #[must_use]
    pub fn retry_after(self, after: Duration) -> Self {
        Self { retry_after: Some(after), ..self }
    }

    /// What the caller does next.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The machine-readable reason.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        self.reason
    }

    /// The field or setting that is to blame; empty if none is.
    #[must_use]
    pub fn field_name(&self) -> &'static str {
        self.field
    }

    /// The error as JSON, for HTTP.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "error": self.message,
            "reason": self.reason,
            "field": self.field,
            "retry_after_ms": self.retry_after_ms(),
        })
    }

    /// The HTTP status of this kind.
    #[must_use]
    pub fn http_status(&self) -> http::StatusCode {
        use http::StatusCode;
        match self.kind {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Exhausted => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Deadline => StatusCode::GATEWAY_TIMEOUT,
            ErrorKind::Denied => StatusCode::UNAUTHORIZED,
            ErrorKind::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            ErrorKind::Corrupt | ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn retry_after_ms(&self) -> u32 {
        self.retry_after.map_or(0, |after| u32::try_from(after.as_millis()).unwrap_or(u32::MAX))
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let code = match error.kind {
            // The reason says more than the code: a length that does not match is the caller's fault all the same.
            ErrorKind::Invalid => Code::InvalidArgument,
            ErrorKind::NotFound => Code::NotFound,
            ErrorKind::Conflict => Code::FailedPrecondition,
            ErrorKind::Exhausted => Code::ResourceExhausted,
            ErrorKind::Unavailable => Code::Unavailable,
            ErrorKind::Deadline => Code::DeadlineExceeded,
            ErrorKind::Denied => Code::Unauthenticated,
            ErrorKind::Corrupt => Code::DataLoss,
            ErrorKind::Unimplemented => Code::Unimplemented,
            ErrorKind::Internal => Code::Internal,
        };
        let detail = ErrorDetail {
            reason: error.reason.to_owned(),
            field: error.field.to_owned(),
            retry_after_ms: error.retry_after_ms(),
        };
        Self::with_details(code, error.message, detail.encode_to_vec().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_carries_the_reason_and_the_retry_hint() {
        let error =
            Error::new(ErrorKind::Exhausted, "NO_SPACE", "no room".into()).retry_after(Duration::from_millis(100));
        let status = Status::from(error);
        assert_eq!(status.code(), Code::ResourceExhausted);
        let detail = ErrorDetail::decode(status.details()).expect("own encoding");
        assert_eq!((detail.reason.as_str(), detail.retry_after_ms), ("NO_SPACE", 100));
    }
}
