//! The client's session: names for the items of its mutations, so that one whose answer was lost can be sent again.
//!
//! Opened with the first mutation. An item's sequence is used once, whatever comes of the call; what has an answer, or
//! whose caller has given up, is acknowledged with a later call, so that the server may forget it. That is said of all up to
//! an item, so that one slow call keeps the answers to all that came after it: at [`MOST_UNACKNOWLEDGED`] a session rests, and
//! another one goes on. A session that was idle for half of its lifetime is left for a new one. When the server says all the same that it is over, the next call
//! opens another; the one that was told is not repeated, because nobody knows any more whether it was done.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tidepool_metadata::proto;

use crate::call::Client;
use crate::error::Error;
use crate::retry::Repeatable;

/// Most items of one call; larger ones are cut.
pub(crate) const MAX_ITEMS: usize = 1024;
/// So many answers are kept by the server before they are acknowledged.
const ACKNOWLEDGE_EVERY: u64 = 512;
/// Items of a session whose answers are not acknowledged: half of what the server keeps.
const MOST_UNACKNOWLEDGED: u64 = 2048;

/// One open session.
#[derive(Debug)]
pub(crate) struct Session {
    id: u64,
    longest_idle: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Of the next item.
    next: u64,
    /// The first sequences of calls under way.
    under_way: BTreeSet<u64>,
    /// Said to the server.
    acknowledged: u64,
    used: Instant,
}

/// The names of one call's items, until the last of these is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Items(Arc<Named>);

#[derive(Debug)]
struct Named {
    session: Arc<Session>,
    ids: proto::RequestIds,
    is_sent: AtomicBool,
}

impl Items {
    /// For an attempt at the call.
    pub(crate) fn ids(&self) -> proto::RequestIds {
        proto::RequestIds { again: self.0.is_sent.swap(true, Ordering::Relaxed), ..self.0.ids }
    }
}

impl Session {
    fn new(id: u64, lifetime: Duration) -> Self {
        let state = State { next: 1, under_way: BTreeSet::new(), acknowledged: 0, used: Instant::now() };
        Self { id, longest_idle: lifetime / 2, state: Mutex::new(state) }
    }

    fn is_fresh(&self) -> bool {
        self.lock().used.elapsed() < self.longest_idle
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is left half done by a panic: each change is one assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names for `count` items; none while too many before them are without an answer.
    fn name(self: &Arc<Self>, count: usize) -> Option<Items> {
        let mut state = self.lock();
        let first = state.next;
        let answered = state.under_way.first().map_or(first, |&oldest| oldest) - 1;
        let acknowledged = if answered >= state.acknowledged + ACKNOWLEDGE_EVERY { answered } else { 0 };
        let known = state.acknowledged.max(acknowledged);
        let next = first + count as u64;
        if next - 1 - known > MOST_UNACKNOWLEDGED {
            return None;
        }
        *state =
            State { next, acknowledged: known, used: Instant::now(), under_way: std::mem::take(&mut state.under_way) };
        state.under_way.insert(first);
        drop(state);
        let ids = proto::RequestIds { session: self.id, first, acknowledged, again: false };
        Some(Items(Arc::new(Named { session: Arc::clone(self), ids, is_sent: AtomicBool::new(false) })))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        self.session.lock().under_way.remove(&self.ids.first);
    }
}

impl Client {
    /// Names for the `count` items of a call.
    pub(crate) async fn name_items(&self, count: usize) -> Result<Items, Error> {
        let mut sessions = self.sessions().lock().await;
        sessions.retain(|session| session.is_fresh());
        loop {
            if let Some(items) = sessions.iter().find_map(|session| session.name(count)) {
                return Ok(items);
            }
            // Seldom, and too large to be a part of every put.
            sessions.push(Box::pin(self.open_session()).await?);
        }
    }

    async fn open_session(&self) -> Result<Arc<Session>, Error> {
        // RandomState is seeded from the system's randomness; 0 is no session.
        let id = RandomState::new().hash_one("session") | 1;
        let message = proto::OpenSessionRequest { session: id };
        let opened = self.call("open session", Repeatable::Always, |mut attempt| {
            let request = attempt.request(message);
            async move { Ok(attempt.stub.open_session(request).await?.into_inner()) }
        });
        let lifetime = Duration::from_millis(opened.await?.lifetime_ms.into());
        Ok(Arc::new(Session::new(id, lifetime)))
    }

    /// Names for the `count` objects of a put, if it may be sent more than once.
    pub(crate) async fn name_put(&self, count: usize) -> Result<Option<Items>, Error> {
        if self.settings().retries == 0 { Ok(None) } else { self.name_items(count).await.map(Some) }
    }

    /// Looks at the answer to a call of `items`: a session that is over is not used again.
    pub(crate) async fn settled<T>(&self, items: &Items, answer: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &answer {
            self.heard(items, error.reason()).await;
        }
        answer
    }

    /// Why an item was not done.
    pub(crate) async fn heard(&self, items: &Items, reason: &str) {
        if reason == "SESSION_EXPIRED" {
            self.sessions().lock().await.retain(|session| !Arc::ptr_eq(session, &items.0.session));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(session: &Arc<Session>, count: usize) -> Items {
        session.name(count).expect("room")
    }

    #[test]
    fn what_has_its_answer_is_acknowledged_and_nothing_behind_it() {
        let session = Arc::new(Session::new(1, Duration::from_secs(60)));
        let slow = name(&session, 1);
        drop(name(&session, MAX_ITEMS));
        assert_eq!(name(&session, 1).ids().acknowledged, 0, "the first call has no answer yet");
        let (slow_end, next) = (slow.ids().first, session.lock().next);
        assert_eq!(slow_end, 1);
        drop(slow);
        let ids = name(&session, 1).ids();
        assert_eq!((ids.first, ids.acknowledged), (next, next - 1));
    }

    #[test]
    fn a_session_rests_behind_a_slow_call_and_goes_on_when_that_has_ended() {
        let session = Arc::new(Session::new(1, Duration::from_secs(60)));
        let slow = name(&session, 1);
        let named = std::iter::from_fn(|| session.name(128)).count() as u64;
        assert_eq!(named, (MOST_UNACKNOWLEDGED - 1) / 128);
        drop(slow);
        assert_eq!(name(&session, MAX_ITEMS).ids().acknowledged, 1 + named * 128);
    }

    #[test]
    fn only_the_first_attempt_is_no_repetition() {
        let items = name(&Arc::new(Session::new(1, Duration::from_secs(60))), 1);
        let clone = items.clone();
        assert_eq!([items.ids().again, clone.ids().again, items.ids().again], [false, true, true]);
    }

    #[test]
    fn no_sequence_is_used_twice() {
        let session = Arc::new(Session::new(1, Duration::from_secs(60)));
        let (one, other) = (name(&session, 5), name(&session, 2));
        assert_eq!((one.ids().first, other.ids().first), (1, 6));
        drop((one, other));
        assert_eq!(name(&session, 1).ids().first, 8);
    }
}
