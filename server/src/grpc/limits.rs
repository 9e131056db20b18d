//! Bounds on values in flight: overload is refused with a hint, never absorbed.

use std::sync::Arc;
use std::time::Duration;

use tidepool_metadata::ErrorKind;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::Error;

/// What one permit stands for: bytes are counted in pages, so that 64 GiB fit a semaphore.
const PAGE: u64 = 4096;
/// When a refused caller should come back.
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// Bytes of values that may be in flight. Cheap to clone.
#[derive(Clone)]
pub struct Inflight {
    pages: Arc<Semaphore>,
    limit: u64,
}

impl Inflight {
    /// At most `limit` bytes at a time.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        let pages = usize::try_from(limit / PAGE).unwrap_or(Semaphore::MAX_PERMITS).min(Semaphore::MAX_PERMITS);
        Self { pages: Arc::new(Semaphore::new(pages)), limit }
    }

    /// Counts `bytes` as in flight until the permit is dropped. Larger values than the limit count as all of it: they
    /// pass through one at a time.
    ///
    /// # Errors
    /// `OVERLOADED` with a retry hint.
    pub fn admit(&self, bytes: u64) -> Result<OwnedSemaphorePermit, Error> {
        let pages = u32::try_from(bytes.min(self.limit) / PAGE).unwrap_or(u32::MAX).max(1);
        Arc::clone(&self.pages).try_acquire_many_owned(pages).map_err(|_| {
            let message = format!("more than limits.inflight_bytes = {} bytes are in flight: retry", self.limit);
            Error::new(ErrorKind::Exhausted, "OVERLOADED", message)
                .field("limits.inflight_bytes")
                .retry_after(RETRY_AFTER)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overload_is_refused_with_a_hint_and_ends_with_the_permit() {
        let inflight = Inflight::new(1 << 20);
        let permit = inflight.admit(1 << 20).expect("fits");
        assert_eq!(inflight.admit(1).expect_err("full").reason(), "OVERLOADED");
        drop(permit);
        assert!(inflight.admit(64 << 20).is_ok(), "one large value passes alone");
    }
}
