//! Whether a failed call is repeated, and after what pause. Pure: random numbers are made from a given seed.

use std::time::Duration;

use tidepool_metadata::ErrorKind;

use crate::error::Error;

/// The first pause is at most this long; each further one twice as long, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Long enough that a leader can be elected meanwhile.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Whether doing a call twice differs from doing it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repeatable {
    /// Twice is as once: reads, leases, and what changes something under names that all attempts share.
    Always,
    /// Only if it is certain that nothing was done: removals by pattern.
    IfNotDone,
}

/// Decides on the repetitions of one call.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    left: u32,
    pause: Duration,
    random: u64,
}

impl Backoff {
    pub(crate) fn new(retries: u32, seed: u64) -> Self {
        Self { left: retries, pause: FIRST_PAUSE, random: seed | 1 }
    }

    /// The pause before the next attempt, or `None` if the error is the answer.
    pub(crate) fn after(&mut self, error: &Error, repeatable: Repeatable) -> Option<Duration> {
        let helps = match error.kind() {
            ErrorKind::Unavailable => repeatable == Repeatable::Always,
            // Refused before anything was done: who says when to come again means it.
            ErrorKind::Exhausted => error.retry_after().is_some(),
            // Another read may come through whole; a put was not stored.
            ErrorKind::Corrupt => {
                repeatable == Repeatable::Always
                    && matches!(error, Error::ChecksumMismatch { .. } | Error::LengthMismatch { .. })
            }
            _ => false,
        };
        if !helps || self.left == 0 {
            return None;
        }
        self.left -= 1;
        // Between half the pause and all of it, so that those refused together don't come back together.
        let pause = error.retry_after().unwrap_or_default().max(self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Some(pause.mul_f64(0.5 + self.share() / 2.0))
    }

    /// A number from 0 to 1.
    fn share(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use tidepool_metadata::proto::ErrorDetail;
    use tonic::{Code, Status};

    use super::*;

    fn error(code: Code, retry_after_ms: u32) -> Error {
        let detail = ErrorDetail { reason: "X".into(), field: String::new(), retry_after_ms };
        Status::with_details(code, "", detail.encode_to_vec().into()).into()
    }

    #[test]
    fn pauses_grow_within_their_bounds() {
        let mut backoff = Backoff::new(20, 42);
        let mut bound = FIRST_PAUSE;
        for _ in 0..20 {
            let pause = backoff.after(&error(Code::Unavailable, 0), Repeatable::Always).expect("repetitions are left");
            assert!(pause >= bound / 2 && pause <= bound, "{pause:?} {bound:?}");
            bound = (bound * 2).min(LONGEST_PAUSE);
        }
        assert_eq!(backoff.after(&error(Code::Unavailable, 0), Repeatable::Always), None);
    }

    #[test]
    fn the_servers_hint_is_kept() {
        let mut backoff = Backoff::new(1, 42);
        let pause = backoff.after(&error(Code::ResourceExhausted, 300), Repeatable::IfNotDone);
        assert!(pause.is_some_and(|pause| pause >= Duration::from_millis(150)), "{pause:?}");
    }

    #[test]
    fn what_may_have_been_done_is_not_repeated() {
        let mut backoff = Backoff::new(9, 42);
        assert_eq!(backoff.after(&error(Code::Unavailable, 0), Repeatable::IfNotDone), None);
        for code in [Code::InvalidArgument, Code::ResourceExhausted, Code::DeadlineExceeded, Code::Internal] {
            assert_eq!(backoff.after(&error(code, 0), Repeatable::Always), None, "{code:?}");
        }
    }
}
