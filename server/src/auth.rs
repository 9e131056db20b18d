//! Who may call: the cluster's secret as bearer token, checked in one place for every listener.

use std::path::Path;
use std::sync::Arc;

use sha2::Digest as _;
use subtle::ConstantTimeEq;
use tidepool_metadata::ErrorKind;

use crate::error::Error;

/// Least length of a secret, in bytes.
const LEAST_SECRET_BYTES: usize = 16;

/// The check. Cheap to clone.
#[derive(Clone, Default)]
pub struct Auth {
    secret: Option<Arc<[u8]>>,
}

impl Auth {
    /// Lets everybody in: for loopback, and where the operator said so.
    #[must_use]
    pub fn open() -> Self {
        Self::default()
    }

    /// Asks for the secret in the file at `path` (surrounding white space does not count).
    ///
    /// # Errors
    /// The file can't be read, can be read by others than its owner, or is too short.
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        use std::os::unix::fs::MetadataExt;
        let invalid = |what: String| {
            let message = format!("cluster.secret_file = {}: {what}", path.display());
            Error::new(ErrorKind::Invalid, "BAD_CONFIG", message).field("cluster.secret_file")
        };
        let mode = path.metadata().map_err(|error| invalid(error.to_string()))?.mode();
        if mode & 0o077 != 0 {
            return Err(invalid(format!("mode {:03o} lets others read it: chmod 600", mode & 0o777)));
        }
        let bytes = std::fs::read(path).map_err(|error| invalid(error.to_string()))?;
        let secret = bytes.trim_ascii();
        if secret.len() < LEAST_SECRET_BYTES {
            return Err(invalid(format!("{} bytes, need {LEAST_SECRET_BYTES} or more", secret.len())));
        }
        Ok(Self { secret: Some(secret.into()) })
    }

    /// What the transfer engine proves and asks for: SHA-256 of the secret.
    pub(crate) fn digest(&self) -> Option<[u8; 32]> {
        self.secret.as_ref().map(|secret| sha2::Sha256::digest(secret).into())
    }

    /// The secret itself, for proofs between nodes; empty if there is none.
    #[must_use]
    pub(crate) fn secret(&self) -> &[u8] {
        self.secret.as_deref().unwrap_or_default()
    }

    /// Checks the value of an `authorization` header. The time that it takes does not depend on how much is right.
    ///
    /// # Errors
    /// `UNAUTHENTICATED`.
    pub fn check(&self, authorization: Option<&[u8]>) -> Result<(), Error> {
        let Some(secret) = &self.secret else { return Ok(()) };
        let token = authorization.and_then(|value| value.strip_prefix(b"Bearer ")).unwrap_or_default();
        if token.ct_eq(secret).into() {
            return Ok(());
        }
        let message = "this node asks for the cluster's secret: send it as `authorization: Bearer ..` (--token-file)";
        Err(Error::new(ErrorKind::Denied, "UNAUTHENTICATED", message.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_the_secret_opens() {
        let temp = tempfile::tempdir().expect("temporary folder");
        let path = temp.path().join("secret");
        std::fs::write(&path, "0123456789abcdef\n").expect("writable");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("own file");
        let auth = Auth::from_file(&path).expect("good file");
        assert!(auth.check(Some(b"Bearer 0123456789abcdef")).is_ok());
        for wrong in [None, Some(&b"Bearer 0123456789abcde"[..]), Some(b"0123456789abcdef"), Some(b"Bearer ")] {
            assert_eq!(auth.check(wrong).expect_err("refused").reason(), "UNAUTHENTICATED");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).expect("own file");
        assert!(Auth::from_file(&path).is_err());
    }

    #[test]
    fn without_a_secret_everybody_may_call() {
        assert!(Auth::open().check(None).is_ok());
    }
}
