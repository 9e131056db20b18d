//! The client's session: names for the items of its mutations, so that one whose answer was lost can be sent again.
//!
//! Opened with the first mutation. An item's sequence is used once, whatever comes of the call; what has an answer, or
//! whose caller has given up, is acknowledged with a later call, so that the server may forget it. A session that was
//! idle for half of its lifetime is left for a new one. When the server says all the same that it is over, the next call
//! opens another; the one that was told is not repeated, because nobody knows any more whether it was done.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tidepool_metadata::proto;

use crate::call::Client;
use crate::error::Error;
use crate::retry::Repeatable;

/// Most items of one call; larger ones are cut. With four such calls at a time a session's answers are full.
pub(crate) const MAX_ITEMS: usize = 1024;
/// So many answers are kept by the server before they are acknowledged.
const ACKNOWLEDGE_EVERY: u64 = 512;

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
    /// Calls under way: their first sequences and how many items they have.
    under_way: BTreeMap<u64, u64>,
    /// Said to the server.
    acknowledged: u64,
    used: Instant,
}

/// The names of one call's items, until it ends.
#[derive(Debug)]
pub(crate) struct Items {
    session: Arc<Session>,
    pub(crate) ids: proto::RequestIds,
}

impl Session {
    fn new(id: u64, lifetime: Duration) -> Self {
        let state = State { next: 1, under_way: BTreeMap::new(), acknowledged: 0, used: Instant::now() };
        Self { id, longest_idle: lifetime / 2, state: Mutex::new(state) }
    }

    fn is_fresh(&self) -> bool {
        self.lock().used.elapsed() < self.longest_idle
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is left half done by a panic: each change is one assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(self: &Arc<Self>, count: usize) -> Items {
        let mut state = self.lock();
        let first = state.next;
        state.next += count as u64;
        state.used = Instant::now();
        state.under_way.insert(first, count as u64);
        let answered = state.under_way.keys().next().map_or(state.next, |&oldest| oldest) - 1;
        let acknowledged = if answered >= state.acknowledged + ACKNOWLEDGE_EVERY { answered } else { 0 };
        state.acknowledged = state.acknowledged.max(acknowledged);
        let ids = proto::RequestIds { session: self.id, first, acknowledged };
        drop(state);
        Items { session: Arc::clone(self), ids }
    }
}

impl Drop for Items {
    fn drop(&mut self) {
        self.session.lock().under_way.remove(&self.ids.first);
    }
}

impl Client {
    /// Names for the `count` items of a call.
    pub(crate) async fn name_items(&self, count: usize) -> Result<Items, Error> {
        let mut current = self.session().lock().await;
        let session = match &*current {
            Some(session) if session.is_fresh() => Arc::clone(session),
            _ => {
                // RandomState is seeded from the system's randomness; 0 is no session.
                let id = RandomState::new().hash_one("session") | 1;
                let message = proto::OpenSessionRequest { session: id };
                let opened = self.call("open session", Repeatable::Always, |mut attempt| {
                    let request = attempt.request(message);
                    async move { Ok(attempt.stub.open_session(request).await?.into_inner()) }
                });
                let lifetime = Duration::from_millis(opened.await?.lifetime_ms.into());
                Arc::clone(current.insert(Arc::new(Session::new(id, lifetime))))
            }
        };
        drop(current);
        Ok(session.name(count))
    }

    /// Looks at the answer to a call of `items`: a session that is over is not used again.
    pub(crate) async fn settle<T>(&self, items: Items, answer: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &answer
            && error.reason() == "SESSION_EXPIRED"
        {
            let mut current = self.session().lock().await;
            if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, &items.session)) {
                *current = None;
            }
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_its_answer_is_acknowledged_and_nothing_behind_it() {
        let session = Arc::new(Session::new(1, Duration::from_secs(60)));
        let slow = session.name(1);
        for _ in 0..3 {
            drop(session.name(MAX_ITEMS));
        }
        assert_eq!(session.name(1).ids.acknowledged, 0, "the first call has no answer yet");
        let (slow_end, next) = (slow.ids.first, session.lock().next);
        assert_eq!(slow_end, 1);
        drop(slow);
        let items = session.name(1);
        assert_eq!((items.ids.first, items.ids.acknowledged), (next, next - 1));
    }

    #[test]
    fn no_sequence_is_used_twice() {
        let session = Arc::new(Session::new(1, Duration::from_secs(60)));
        let (one, other) = (session.name(5), session.name(2));
        assert_eq!((one.ids.first, other.ids.first), (1, 6));
        drop((one, other));
        assert_eq!(session.name(1).ids.first, 8);
    }
}
