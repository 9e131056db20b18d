//! The client's session: names for the items of its mutations, so that one whose answer was lost can be sent again.
//!
//! Opened with the first mutation. An item's sequence is used once, whatever comes of the call; what has an answer, or
//! whose caller has given up, is acknowledged with a later call, so that the server may forget it. That is said of all up to
//! an item, so that one slow call keeps the answers to all that came after it: at [`MOST_UNACKNOWLEDGED`] a session rests, and
//! another one goes on. A session that was idle for half of its lifetime is left for a new one. When the server says all the same
//! that it is over, another is opened. The call that was told so is named anew if that was its first attempt: nothing was
//! done then. After a repetition it is not, because nobody knows any more whether the first attempt was done.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tidepool_metadata::proto::{self, EngineMethod};

use crate::call::{Client, Repetition};
use crate::error::Error;
use crate::retry::Repeatable;

/// Most items of one call; larger ones are cut.
pub(crate) const MAX_ITEMS: usize = 1024;
/// So many answers are kept by the server before they are acknowledged; an idle client leaves as many there, and the room for
/// those of all clients is for 8,000 such.
const ACKNOWLEDGE_EVERY: u64 = 128;
/// Items of a session whose answers are not acknowledged: half of what the server keeps.
const MOST_UNACKNOWLEDGED: u64 = 2048;
/// Why the server does nothing for a session that is over.
const SESSION_EXPIRED: &str = "SESSION_EXPIRED";

/// The sessions of a client: most often one.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    open: Mutex<Vec<Arc<Session>>>,
    /// Held while one is opened.
    opening: tokio::sync::Mutex<()>,
}

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
    attempts: AtomicU32,
}

impl Items {
    /// For an attempt at the call.
    pub(crate) fn ids(&self) -> proto::RequestIds {
        proto::RequestIds { again: self.0.attempts.fetch_add(1, Ordering::Relaxed) > 0, ..self.0.ids }
    }

    /// A refusal was that of the only attempt.
    pub(crate) fn is_sent_once(&self) -> bool {
        self.0.attempts.load(Ordering::Relaxed) == 1
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
        Some(Items(Arc::new(Named { session: Arc::clone(self), ids, attempts: AtomicU32::new(0) })))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        self.session.lock().under_way.remove(&self.ids.first);
    }
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Session>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names by a session that is open and has room.
    fn name(&self, count: usize) -> Option<Items> {
        let mut open = self.lock();
        open.retain(|session| session.is_fresh());
        open.iter().find_map(|session| session.name(count))
    }

    /// The server said that the session of `items` is over.
    pub(crate) fn leave(&self, items: &Items) {
        self.lock().retain(|session| !Arc::ptr_eq(session, &items.0.session));
    }
}

/// The server said that a session is over, and did nothing.
pub(crate) fn is_over(reason: &str) -> bool {
    reason == SESSION_EXPIRED
}

impl Client {
    /// Does a call that changes `count` items, under names that all its attempts share; none if there is one attempt only.
    pub(crate) async fn named<T, Answer>(
        &self,
        operation: &'static str,
        count: usize,
        call: impl Fn(Option<Items>, Repetition) -> Answer,
    ) -> Result<T, Error>
    where
        Answer: Future<Output = Result<T, Error>>,
    {
        let begun = self.begin(operation, Repeatable::Always);
        if self.settings().retries == 0 {
            return call(None, begun).await;
        }
        let mut is_named_anew = false;
        loop {
            // Seldom more than a look, and too large then to be a part of every put.
            let items = begun.within_deadline(Box::pin(self.name_items(count))).await?;
            let answer = call(Some(items.clone()), begun.clone()).await;
            let Err(error) = &answer else { return answer };
            if !is_over(error.reason()) {
                return answer;
            }
            self.sessions().leave(&items);
            if is_named_anew || !items.is_sent_once() {
                return answer;
            }
            is_named_anew = true;
        }
    }

    async fn name_items(&self, count: usize) -> Result<Items, Error> {
        let sessions = self.sessions();
        loop {
            if let Some(items) = sessions.name(count) {
                return Ok(items);
            }
            let _one_at_a_time = sessions.opening.lock().await;
            // Another call may have opened one meanwhile.
            if let Some(items) = sessions.name(count) {
                return Ok(items);
            }
            let opened = self.open_session().await?;
            sessions.lock().push(opened);
        }
    }

    async fn open_session(&self) -> Result<Arc<Session>, Error> {
        // RandomState is seeded from the system's randomness; 0 is no session.
        let id = RandomState::new().hash_one("session") | 1;
        let message = proto::OpenSessionRequest { session: id };
        let method = ("open session", EngineMethod::OpenSession);
        let opened = self.call_method(method, message, |mut attempt, message| async move {
            let request = attempt.request(message);
            Ok(attempt.stub.open_session(request).await?.into_inner())
        });
        let opened: proto::OpenSessionReply = opened.await?;
        let lifetime = Duration::from_millis(opened.lifetime_ms.into());
        Ok(Arc::new(Session::new(id, lifetime)))
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
