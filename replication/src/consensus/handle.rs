//! How callers reach the group.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_metadata::catalog::{MAX_COMMAND_BYTES, MAX_COMMAND_ITEMS};
use tidepool_metadata::{LogIndex, LogTime, NodeId};
use tokio::sync::{oneshot, watch};

use super::calls::Calls;
use super::config::Outlives;
use super::core::Change as MemberChange;
use super::envelope::Body;
use super::image::Dirty;
use super::inbox::Proposal;
use super::machine::StateMachine;
use super::member::{MemberId, Members};
use super::shared::{GroupStatus, Shared};
use super::snapshot::Offers;
use super::transport::Lane;
use super::{clock, snapshot};
use crate::error::CatalogError;

/// How long a read waits for the point from which it may be answered.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a leader's read waits for its own apply before it goes the long way.
const LEADER_WAIT: Duration = Duration::from_millis(500);

/// How old the state may be from which a read is answered that need not see everything. What depends on it promises 5 s: there
/// is a second left for answers on their way.
const STALENESS_NANOS: u64 = 4_000_000_000;

/// What a read must have seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// Whatever this voter has applied, however old that is.
    Local,
    /// The effects of all entries up to this index, and of everything that was acknowledged to anybody 4 s ago.
    AtLeast(LogIndex),
    /// The effects of everything that was acknowledged to anybody before the read began.
    Linearizable,
}

/// Answers the questions of other members' applications; nothing if it can't.
pub type Answerer = Box<dyn Fn(Vec<u8>) -> Pin<Box<dyn Future<Output = Option<Vec<u8>>> + Send>> + Send + Sync>;

/// First byte of an application's question.
const APPLICATION: u8 = 1;
const _: () = assert!(APPLICATION != snapshot::QUESTION);

/// The group as its callers see it.
pub struct Consensus<S: StateMachine> {
    shared: Arc<Shared<S>>,
    calls: Arc<Calls>,
    offers: Arc<Offers>,
    dirty: Arc<Dirty<S>>,
    answerer: AnswererSlot,
}

/// Emptied when the group ends: an answerer usually holds the group's handle.
pub(super) type AnswererSlot = Arc<Mutex<Option<Arc<Answerer>>>>;

impl<S: StateMachine> Clone for Consensus<S> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            calls: Arc::clone(&self.calls),
            offers: Arc::clone(&self.offers),
            dirty: Arc::clone(&self.dirty),
            answerer: Arc::clone(&self.answerer),
        }
    }
}

impl<S: StateMachine> Consensus<S> {
    pub(super) fn new(
        shared: Arc<Shared<S>>,
        calls: Arc<Calls>,
        offers: Arc<Offers>,
        dirty: Arc<Dirty<S>>,
        answerer: AnswererSlot,
    ) -> Self {
        Self { shared, calls, offers, dirty, answerer }
    }

    /// Logs the encoded `command` of so many `items`, applies it, and answers where and with what outcome. `outlives` says what
    /// of it must not be lost.
    ///
    /// Cancel safety: dropped before the command is logged, it never will be; later, it is applied without an answer.
    /// There is no deadline of its own.
    ///
    /// # Errors
    /// See [`CatalogError::is_unproposed`] for those after which nothing was logged.
    pub async fn propose(
        &self,
        command: Vec<u8>,
        items: usize,
        outlives: Outlives,
    ) -> Result<(LogIndex, S::Outcome), CatalogError> {
        self.check_alive()?;
        if command.len() > MAX_COMMAND_BYTES || items > MAX_COMMAND_ITEMS {
            let (length_maximum, items_maximum) = (MAX_COMMAND_BYTES, MAX_COMMAND_ITEMS);
            return Err(CatalogError::TooLarge { length: command.len(), length_maximum, items, items_maximum });
        }
        let (reply, answer) = oneshot::channel();
        if let Err(error) = self.shared.inbox.push(Proposal { command, items, outlives, reply }) {
            // The group may have failed since; that says more.
            self.check_alive()?;
            return Err(error);
        }
        answer.await.unwrap_or_else(|_dropped| {
            Err(match self.shared.failure() {
                Some(cause) => CatalogError::Failed { cause: Arc::clone(cause), proposed: true },
                None => CatalogError::OutcomeUnknown,
            })
        })
    }

    /// Bytes that are free on the disk of log and image, if they are too few for the state to grow: commands that make it
    /// grow should not be proposed.
    #[must_use]
    pub fn disk_shortage(&self) -> Option<u64> {
        self.shared.ballast.shortage()
    }

    /// Answers `question` from the state, on the caller's thread, under the read lock: keep it short. A question may be put
    /// twice, if leadership ended meanwhile. Cancel-safe.
    ///
    /// # Errors
    /// [`CatalogError::Lagging`] after 5 s; [`CatalogError::NotLeader`] at once, if the leader would have to be asked and there
    /// was none for longer than an election takes; those of a group that ended.
    pub async fn read<A>(&self, read: Read, question: impl Fn(&S) -> A) -> Result<(LogIndex, A), CatalogError> {
        self.check_alive()?;
        if read == Read::Linearizable
            && let Some(answer) = self.read_leading(&question).await?
        {
            return Ok(answer);
        }
        let began = clock::boot_nanos();
        let is_recent = matches!(read, Read::AtLeast(_)) && self.is_recent(began);
        let from = match read {
            Read::Local => Some(LogIndex(0)),
            // What a leader has not logged was told by a life of the group that loss of power cut short, or by nobody.
            Read::AtLeast(index) if is_recent => Some(self.leads_from().map_or(index, |from| index.min(from))),
            Read::AtLeast(_) | Read::Linearizable => None,
        };
        if let Some(from) = from {
            // Most reads: nothing is waited for.
            let state = self.shared.state.read();
            if state.position.index >= from.0 {
                return Ok((LogIndex(state.position.index), question(&state.machine)));
            }
        }
        let wait = async {
            let from = match (from, read) {
                (Some(from), _) => from,
                (None, Read::AtLeast(index)) => self.read_index().await?.max(index),
                (None, _) => self.read_index().await?,
            };
            let mut applied = self.watch_applied();
            while *applied.borrow_and_update() < from {
                self.check_alive()?;
                // The sender lives as long as `self`.
                let _ = applied.changed().await;
            }
            self.check_alive()
        };
        let in_time = tokio::time::timeout(READ_TIMEOUT, wait).await;
        in_time.unwrap_or_else(|_elapsed| Err(self.lagging(read)))?;
        if read != Read::Local && !is_recent {
            self.shared.confirmed.fetch_max(began, Ordering::AcqRel);
        }
        let state = self.shared.state.read();
        Ok((LogIndex(state.position.index), question(&state.machine)))
    }

    /// Whether everything that was acknowledged [`STALENESS_NANOS`] before `now` is certainly applied here.
    fn is_recent(&self, now: u64) -> bool {
        self.leads_from().is_some_and(|from| self.applied() >= from)
            || self.shared.confirmed.load(Ordering::Acquire).saturating_add(STALENESS_NANOS) > now
    }

    /// Makes certain that everything that was acknowledged to anybody by now is applied here. As long as this is done every
    /// second or two, reads that may be a little old need not ask anybody.
    ///
    /// # Errors
    /// As [`Consensus::read`].
    pub async fn confirm(&self) -> Result<(), CatalogError> {
        let asked = clock::boot_nanos();
        self.read(Read::Linearizable, |_| ()).await?;
        // Also of one that leads: it may not for long.
        self.shared.confirmed.fetch_max(asked, Ordering::AcqRel);
        Ok(())
    }

    /// Whether this voter has had no leader for longer than an election takes, nor leads: what needs one is better asked of
    /// another node.
    #[must_use]
    pub fn is_cut_off(&self) -> bool {
        self.shared.is_cut_off()
    }

    /// Answers here if this voter leads, and nobody else can lead yet when the answer is there.
    ///
    /// Whoever was answered before the read began was answered by a member that had applied the command; so it was
    /// committed, and this leader knew it, whether or not it has applied it itself: that is waited for.
    async fn read_leading<A>(&self, question: &impl Fn(&S) -> A) -> Result<Option<(LogIndex, A)>, CatalogError> {
        if self.shared.is_stopping() {
            // After a stop the next process may serve already.
            return Err(CatalogError::ShuttingDown);
        }
        let Some(from) = self.leads_from() else { return Ok(None) };
        if self.applied() < from {
            let mut applied = self.watch_applied();
            let wait = applied.wait_for(|&applied| applied >= from || self.check_alive().is_err());
            // The sender lives as long as `self`. An apply that takes so long is told by the other path.
            let _ = tokio::time::timeout(LEADER_WAIT, wait).await;
            self.check_alive()?;
            if self.applied() < from {
                return Ok(None);
            }
        }
        let state = self.shared.state.read();
        let answer = (LogIndex(state.position.index), question(&state.machine));
        drop(state);
        Ok(self.leads_from().is_some().then_some(answer))
    }

    /// While this voter certainly leads: what a linearizable read that begins now must have seen.
    fn leads_from(&self) -> Option<LogIndex> {
        let from = self.shared.leader_from.load(Ordering::Acquire);
        if from == 0 {
            return None;
        }
        match self.shared.lease_until.load(Ordering::Acquire) {
            // Alone: nobody else can ever lead, and nobody was answered but from here.
            u64::MAX => Some(LogIndex(from)),
            until if clock::boot_nanos() < until => {
                Some(LogIndex(from.max(self.shared.commit.load(Ordering::Acquire))))
            }
            _ => None,
        }
    }

    async fn read_index(&self) -> Result<LogIndex, CatalogError> {
        if self.is_cut_off() {
            return Err(CatalogError::NotLeader { leader: None });
        }
        let (reader, index) = oneshot::channel();
        if let Err(error) = self.shared.inbox.read(reader) {
            self.check_alive()?;
            return Err(error);
        }
        index.await.unwrap_or_else(|_dropped| Err(self.check_alive().err().unwrap_or(CatalogError::ShuttingDown)))
    }

    /// Looks at what this voter has applied, without waiting, also after the group has ended. Keep it short.
    pub fn peek<A>(&self, question: impl FnOnce(&S) -> A) -> A {
        question(&self.shared.state.read().machine)
    }

    fn lagging(&self, read: Read) -> CatalogError {
        let read = match read {
            Read::Local => "a local read",
            Read::AtLeast(_) => "a read at that index",
            Read::Linearizable => "a linearizable read",
        };
        CatalogError::Lagging { read, applied: self.applied() }
    }

    fn check_alive(&self) -> Result<(), CatalogError> {
        match self.shared.failure() {
            Some(cause) => Err(CatalogError::Failed { cause: Arc::clone(cause), proposed: false }),
            None => Ok(()),
        }
    }

    /// Whether this voter leads, and has applied all that was acknowledged before it did.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        !self.shared.is_stopping()
            && self.shared.failure().is_none()
            && self.shared.is_followed()
            && self.applied().0 >= self.shared.leader_from.load(Ordering::Acquire)
    }

    /// Whether this voter holds the office of leader; it may have lost it without knowing.
    #[must_use]
    pub fn holds_office(&self) -> bool {
        self.shared.leader_from.load(Ordering::Acquire) != 0
    }

    /// Takes a message of another member, which came over a connection that proved to be of this cluster. Never waits.
    /// Needs a tokio runtime.
    pub fn receive(&self, lane: Lane, message: Vec<u8>) {
        match self.calls.read(&message) {
            None => self.shared.inbox.receive(message),
            Some((_, Body::Answer { ticket, answer })) => self.calls.answered(ticket, answer),
            Some((from, Body::Ask { ticket, question })) => self.asked(from, lane, ticket, question),
            Some(_) => {}
        }
    }

    fn asked(&self, from: MemberId, lane: Lane, ticket: u64, mut question: Vec<u8>) {
        match question.first() {
            Some(&snapshot::QUESTION) => {
                let (shared, calls, offers) =
                    (Arc::clone(&self.shared), Arc::clone(&self.calls), Arc::clone(&self.offers));
                tokio::task::spawn_blocking(move || {
                    let answer = offers.answer(&question[1..], || shared.members());
                    calls.answer(from, lane, ticket, answer);
                });
            }
            Some(&APPLICATION) => {
                let Some(answerer) = self.answerer.lock().clone() else { return };
                let (answer, calls) = (answerer(question.split_off(1)), Arc::clone(&self.calls));
                tokio::spawn(async move { calls.answer(from, lane, ticket, answer.await.unwrap_or_default()) });
            }
            _ => {}
        }
    }

    /// Answers other members' questions with `answerer`, until the group is dropped.
    pub fn answer_with(&self, answerer: Answerer) {
        *self.answerer.lock() = Some(Arc::new(answerer));
    }

    /// Asks the leader's application. Cancel-safe for the caller; what was asked may be done all the same.
    ///
    /// # Errors
    /// [`CatalogError::NotLeader`] if nobody leads, or this voter does; [`CatalogError::OutcomeUnknown`] if no answer came
    /// `within` that time; those of a group that ended.
    pub async fn ask_leader(&self, question: &[u8], within: Duration) -> Result<Vec<u8>, CatalogError> {
        self.check_alive()?;
        let leader = self.shared.leader().filter(|leader| leader.node() != self.shared.config.node);
        let Some(leader) = leader else { return Err(CatalogError::NotLeader { leader: None }) };
        self.ask(leader, question, within).await
    }

    /// Asks the application of another member. Cancel-safe for the caller; what was asked may be done all the same.
    ///
    /// # Errors
    /// [`CatalogError::NoSuchMember`]; [`CatalogError::OutcomeUnknown`] if no answer came `within` that time; those of a
    /// group that ended.
    pub async fn ask_member(&self, node: NodeId, question: &[u8], within: Duration) -> Result<Vec<u8>, CatalogError> {
        self.check_alive()?;
        let member = self.member_of(node).ok_or(CatalogError::NoSuchMember)?;
        self.ask(member, question, within).await
    }

    async fn ask(&self, member: MemberId, question: &[u8], within: Duration) -> Result<Vec<u8>, CatalogError> {
        let mut message = vec![APPLICATION];
        message.extend_from_slice(question);
        self.calls.ask(member, message, within).await.ok_or(CatalogError::OutcomeUnknown)
    }

    /// Changes the group's members, or who leads; answers the members afterwards. This voter must lead.
    ///
    /// # Errors
    /// [`CatalogError::NotLeader`], [`CatalogError::MembersChanging`], [`CatalogError::NotCaughtUp`],
    /// [`CatalogError::NoSuchMember`]; [`CatalogError::OutcomeUnknown`] if leadership was lost meanwhile.
    pub async fn change_members(&self, change: MemberChange) -> Result<Members, CatalogError> {
        self.check_alive()?;
        let (changer, outcome) = oneshot::channel();
        self.shared.inbox.change(change, changer)?;
        outcome.await.unwrap_or(Err(CatalogError::OutcomeUnknown))
    }

    /// Writes the image of all that is applied to disk, after which the log before it is dropped; answers up to where.
    ///
    /// # Errors
    /// Those of a group that ended.
    pub async fn flush_image(&self) -> Result<LogIndex, CatalogError> {
        self.check_alive()?;
        let (done, flushed) = oneshot::channel();
        self.dirty.flush(done);
        let mut running = self.shared.watch_running();
        tokio::select! {
            flushed = flushed => flushed.map_err(|_| CatalogError::ShuttingDown),
            // The sender lives as long as `self`; without threads nobody answers.
            _ = running.wait_for(|&threads| threads == 0) => Err(CatalogError::ShuttingDown),
        }
    }

    /// What stands for `node` in the group.
    #[must_use]
    pub fn member_of(&self, node: NodeId) -> Option<MemberId> {
        self.shared.member_of(node)
    }

    /// The time with which a leader would stamp an entry now. Never goes back.
    #[must_use]
    pub fn now(&self) -> LogTime {
        self.shared.clock.now()
    }

    /// The last entry whose effects reads see.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        *self.shared.applied.borrow()
    }

    /// Follows [`Self::applied`]; also wakes when the group ends.
    #[must_use]
    pub fn watch_applied(&self) -> watch::Receiver<LogIndex> {
        self.shared.applied.subscribe()
    }

    /// How this voter stands.
    #[must_use]
    pub fn status(&self) -> GroupStatus {
        self.shared.status()
    }

    /// Ends the threads where they are, nothing flushed.
    #[cfg(test)]
    pub(crate) fn crash(&self) {
        self.shared.fail(crate::error::GroupError::ThreadDied { thread: "test" });
    }

    /// Takes no more proposals, answers those that are logged, flushes the image, closes both databases. May be called
    /// often, and goes on if it is dropped.
    pub async fn shutdown(&self) {
        self.shared.stop();
        let mut running = self.shared.watch_running();
        // The sender lives as long as `self`.
        let _ = running.wait_for(|&threads| threads == 0).await;
    }
}
