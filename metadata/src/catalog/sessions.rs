//! Sessions of request ids: an item that is repeated gets its first answer, however commands were regrouped.
//!
//! An answer is kept until the client acknowledges it (cumulatively) or the session's time is over, by log time.
//! A session whose time is over is refused, never re-executed: nobody knows any more what it did.
//! Bounds: [`MAX_SESSIONS`], [`MAX_SESSION_ANSWERS`] of one, [`MAX_ANSWERS`] of all; at a bound new items are refused
//! unexecuted, and their repeat after some acknowledgement is executed. Long before all room is taken, sessions of clients that
//! went idle are dropped, so that those never keep others from writing.

use std::collections::BTreeMap;
use std::time::Duration;

use super::command::{RequestId, SessionId};
use super::outcome::{PinOutcome, RemoveOutcome, RequestRefusal, SessionOutcome};
use crate::log::LogTime;
use crate::object::VersionId;

/// Most sessions at a time.
pub const MAX_SESSIONS: usize = 64 << 10;
/// Most answers remembered for one session.
pub const MAX_SESSION_ANSWERS: usize = 4096;
/// Most answers remembered for all sessions: about 100 MiB.
pub const MAX_ANSWERS: usize = 1 << 20;
/// From so many answers on, sessions that are idle for a minute are dropped by a sweep.
pub const MANY_ANSWERS: usize = MAX_ANSWERS / 2;
/// Longer than a call of a client takes.
const CROWDED_LIFETIME: Duration = Duration::from_secs(60);

/// An answer as it is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remembered {
    Remove(RemoveOutcome),
    Pin(PinOutcome),
    /// A put that became visible under this version; `None`: it lost to an object that was there.
    Put(Option<VersionId>),
}

pub(super) struct Session {
    /// Answers up to here are forgotten.
    pub(super) acknowledged: u64,
    pub(super) used_at: LogTime,
    pub(super) answers: BTreeMap<u64, Remembered>,
}

#[derive(Default)]
pub(super) struct Sessions {
    pub(super) by_id: BTreeMap<SessionId, Session>,
    remembered: usize,
}

/// What to do with an item.
pub(super) enum Verdict {
    Execute,
    Repeat(Remembered),
    Refuse(RequestRefusal),
}

impl Sessions {
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn remembered(&self) -> usize {
        self.remembered
    }

    pub(super) fn open(&mut self, id: SessionId, now: LogTime, lifetime: Duration) -> SessionOutcome {
        if let Some(session) = self.by_id.get_mut(&id) {
            if is_over(session, now, lifetime) {
                return SessionOutcome::Expired;
            }
            session.used_at = now;
            return SessionOutcome::Open { acknowledged: session.acknowledged };
        }
        if self.len() >= MAX_SESSIONS {
            return SessionOutcome::TooMany;
        }
        self.restore(id, Session { acknowledged: 0, used_at: now, answers: BTreeMap::new() });
        SessionOutcome::Open { acknowledged: 0 }
    }

    pub(super) fn restore(&mut self, id: SessionId, session: Session) {
        self.remembered += session.answers.len();
        self.by_id.insert(id, session);
    }

    /// Decides about an item, and counts as a use of the session.
    pub(super) fn judge(&mut self, request: RequestId, now: LogTime, lifetime: Duration) -> Verdict {
        let full = self.remembered >= MAX_ANSWERS;
        let Some(session) = self.by_id.get_mut(&request.session).filter(|session| !is_over(session, now, lifetime))
        else {
            return Verdict::Refuse(RequestRefusal::SessionExpired);
        };
        session.used_at = now;
        match session.answers.get(&request.sequence) {
            Some(&answer) => Verdict::Repeat(answer),
            None if request.sequence <= session.acknowledged => Verdict::Refuse(RequestRefusal::Acknowledged),
            None if full || session.answers.len() >= MAX_SESSION_ANSWERS => {
                Verdict::Refuse(RequestRefusal::SessionFull)
            }
            None => Verdict::Execute,
        }
    }

    /// Remembers the answer of an item that [`Self::judge`] let through.
    pub(super) fn remember(&mut self, request: RequestId, answer: Remembered) {
        let session = self.by_id.get_mut(&request.session).expect("judged before");
        let old = session.answers.insert(request.sequence, answer);
        assert_eq!(old, None, "{request:?} was answered before");
        self.remembered += 1;
    }

    /// Forgets answers up to `through`.
    pub(super) fn acknowledge(
        &mut self,
        id: SessionId,
        through: u64,
        now: LogTime,
        lifetime: Duration,
    ) -> SessionOutcome {
        let Some(session) = self.by_id.get_mut(&id).filter(|session| !is_over(session, now, lifetime)) else {
            return SessionOutcome::Expired;
        };
        session.used_at = now;
        session.acknowledged = session.acknowledged.max(through);
        let before = session.answers.len();
        session.answers = match through.checked_add(1) {
            Some(next) => session.answers.split_off(&next),
            None => BTreeMap::new(),
        };
        self.remembered -= before - session.answers.len();
        SessionOutcome::Open { acknowledged: session.acknowledged }
    }

    /// Drops the sessions whose time is over, which comes earlier while answers are [many](MANY_ANSWERS); gives their ids.
    pub(super) fn expire(&mut self, now: LogTime, lifetime: Duration) -> Vec<SessionId> {
        let lifetime = if self.remembered > MANY_ANSWERS { lifetime.min(CROWDED_LIFETIME) } else { lifetime };
        let over = self.by_id.iter().filter(|(_, session)| is_over(session, now, lifetime));
        let ids: Vec<SessionId> = over.map(|(&id, _)| id).collect();
        let dropped = ids.iter().filter_map(|id| self.by_id.remove(id));
        self.remembered -= dropped.map(|session| session.answers.len()).sum::<usize>();
        ids
    }

    pub(super) fn validate(&self) {
        assert!(self.len() <= MAX_SESSIONS);
        let answers: usize = self.by_id.values().map(|session| session.answers.len()).sum();
        assert_eq!(answers, self.remembered, "answers remembered");
        assert!(answers <= MAX_ANSWERS);
        for (id, session) in &self.by_id {
            assert!(session.answers.len() <= MAX_SESSION_ANSWERS, "answers of {id:?}");
            let first = session.answers.first_key_value().map(|(&sequence, _)| sequence);
            assert!(first.is_none_or(|first| first > session.acknowledged), "{id:?} keeps what it acknowledged");
        }
    }
}

fn is_over(session: &Session, now: LogTime, lifetime: Duration) -> bool {
    now.since(session.used_at) > lifetime
}
