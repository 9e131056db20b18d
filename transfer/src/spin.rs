//! Looking for a moment whether something comes, before sleeping until it does.
//!
//! Putting a thread to sleep and waking it costs tens of microseconds where the processor halts meanwhile (most virtual machines),
//! which is more than a small request takes. So who waits looks again and again for [`SPIN`] first, if
//!
//! - that was not in vain lately: after a wait that was, the next ones sleep at once: one, two, four of them, up to
//!   [`MOST_SKIPPED`]. So long answers and idle peers cost nothing that shows;
//! - no more than half of the processors are wanted by others who do the same: by threads of this process that wait for answers
//!   (asleep too: their answers wake them), and on the serving side by threads that are not asleep. So where there are many
//!   callers, the processors are theirs.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use crate::stream::Stream;

/// How long at most: about what sleeping and waking cost.
const SPIN: Duration = Duration::from_micros(50);
const MOST_SKIPPED: u32 = 256;

/// Threads that wait for answers.
static ASKING: AtomicUsize = AtomicUsize::new(0);
/// Threads that serve a connection and are not asleep.
static SERVING: AtomicUsize = AtomicUsize::new(0);
static MOST: LazyLock<usize> =
    LazyLock::new(|| std::thread::available_parallelism().map_or(0, |processors| processors.get() / 2));

/// What waiting was like lately, on one connection or for one peer. Threads may share it: a wrong guess costs a moment.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    /// Waits that sleep at once from here on.
    skipped: AtomicU32,
    /// After the next one that was in vain, so many.
    next: AtomicU32,
}

/// Counts a thread while it serves.
pub(crate) struct ServingThread {
    spin: Spin,
}

/// A thread that is counted until this is dropped.
#[must_use]
pub(crate) struct Counted(&'static AtomicUsize);

impl Counted {
    fn among(count: &'static AtomicUsize) -> (Self, usize) {
        (Self(count), count.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Spin {
    /// Spins for an answer. The thread counts as one that waits until what this gives is dropped, so that is kept while it sleeps.
    pub(crate) fn for_answer(&self, stream: &Stream) -> Counted {
        let (counted, count) = Counted::among(&ASKING);
        self.until_readable(stream, count);
        counted
    }

    /// Returns when there is something to receive, or it has looked for long enough.
    fn until_readable(&self, stream: &Stream, count: usize) {
        if count > *MOST {
            return;
        }
        let skipped = self.skipped.load(Ordering::Relaxed);
        if skipped > 0 {
            return self.skipped.store(skipped - 1, Ordering::Relaxed);
        }
        let until = Instant::now() + SPIN;
        let is_there = loop {
            // An error is the receipt's to tell.
            if stream.poll(PollFlags::IN, Duration::ZERO).map_or(true, |events| !events.is_empty()) {
                break true;
            }
            if Instant::now() >= until {
                break false;
            }
            std::hint::spin_loop();
        };
        self.note(is_there);
    }

    fn note(&self, is_there: bool) {
        let next = if is_there { 0 } else { self.next.load(Ordering::Relaxed).clamp(1, MOST_SKIPPED) };
        self.skipped.store(next, Ordering::Relaxed);
        self.next.store(next * 2, Ordering::Relaxed);
    }
}

impl ServingThread {
    pub(crate) fn begin() -> Self {
        SERVING.fetch_add(1, Ordering::Relaxed);
        Self { spin: Spin::default() }
    }

    /// Receives a request by `receive`, which may sleep.
    pub(crate) fn request<T>(&self, stream: &Stream, receive: impl FnOnce() -> T) -> T {
        self.spin.until_readable(stream, SERVING.load(Ordering::Relaxed));
        SERVING.fetch_sub(1, Ordering::Relaxed);
        let received = receive();
        SERVING.fetch_add(1, Ordering::Relaxed);
        received
    }
}

impl Drop for ServingThread {
    fn drop(&mut self) {
        SERVING.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_in_vain_are_rarer_and_rarer_until_one_is_not() {
        let spin = Spin::default();
        let skipped = |spin: &Spin| spin.skipped.load(Ordering::Relaxed);
        for expected in [1, 2, 4, 8, 16, 32, 64, 128, 256, 256] {
            spin.note(false);
            assert_eq!(skipped(&spin), expected);
        }
        spin.note(true);
        assert_eq!(skipped(&spin), 0);
        spin.note(false);
        assert_eq!(skipped(&spin), 1);
    }
}
