//! Why a command failed, in words, with its exit code.

use std::process::ExitCode;

use serde_json::json;

use super::output::Output;

/// The answer is no.
pub(super) const NO: u8 = 1;
/// Wrong usage or settings.
pub(super) const USAGE: u8 = 2;
/// The server can't be reached or refused, or this machine did.
pub(super) const FAILED: u8 = 3;

/// A failed command.
#[derive(Debug)]
pub(super) struct Failure {
    code: u8,
    reason: String,
    message: String,
}

impl Failure {
    /// What the user asked for can't be meant.
    pub(super) fn usage(message: impl Into<String>) -> Self {
        Self { code: USAGE, reason: "USAGE".into(), message: message.into() }
    }

    /// This machine said no.
    pub(super) fn local(reason: &str, message: impl Into<String>) -> Self {
        Self { code: FAILED, reason: reason.into(), message: message.into() }
    }

    /// The answer is no.
    pub(super) fn no(reason: &str, message: impl Into<String>) -> Self {
        Self { code: NO, reason: reason.into(), message: message.into() }
    }

    /// There is no such object.
    pub(super) fn missing(key: &tidepool_metadata::ObjectKey) -> Self {
        Self::no("NOT_FOUND", format!("there is no object {key}"))
    }

    /// Says it on standard error.
    pub(super) fn report(&self, output: &Output) -> ExitCode {
        if output.is_json() {
            output.remark(&json!({ "error": self.message, "reason": self.reason }).to_string());
        } else {
            output.remark(&format!("tidepool: {}", self.message));
        }
        ExitCode::from(self.code)
    }

    #[cfg(test)]
    pub(super) fn message(&self) -> &str {
        &self.message
    }
}

impl From<tidepool_client::Error> for Failure {
    fn from(error: tidepool_client::Error) -> Self {
        use tidepool_client::Error;
        let code = match error {
            Error::Endpoint { .. } | Error::Setting { .. } | Error::Key(_) => USAGE,
            _ => FAILED,
        };
        let advice = if error.reason() == "UNREACHABLE" { "; is a node running? (tidepool serve)" } else { "" };
        Self { code, reason: error.reason().to_owned(), message: format!("{error}{advice}") }
    }
}

impl From<crate::Error> for Failure {
    fn from(error: crate::Error) -> Self {
        let code = if error.kind() == tidepool_metadata::ErrorKind::Invalid { USAGE } else { FAILED };
        Self { code, reason: error.reason().to_owned(), message: error.to_string() }
    }
}

impl From<crate::config::ConfigError> for Failure {
    fn from(error: crate::config::ConfigError) -> Self {
        Self { code: USAGE, reason: "BAD_CONFIG".into(), message: error.to_string() }
    }
}
