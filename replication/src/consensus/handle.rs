//! How callers reach the group.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidepool_metadata::catalog::{MAX_COMMAND_BYTES, MAX_COMMAND_ITEMS};
use tidepool_metadata::{LogIndex, LogTime};
use tokio::sync::{oneshot, watch};

use super::inbox::Proposal;
use super::machine::StateMachine;
use super::shared::{GroupStatus, Shared};
use crate::error::CatalogError;

/// How long a read waits for the point from which it may be answered.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// What a read must have seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// Whatever this voter has applied.
    Local,
    /// The effects of all entries up to this index.
    AtLeast(LogIndex),
    /// The effects of everything that was acknowledged to anybody before the read began.
    Linearizable,
}

/// The group as its callers see it.
pub struct Consensus<S: StateMachine> {
    shared: Arc<Shared<S>>,
}

impl<S: StateMachine> Clone for Consensus<S> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<S: StateMachine> Consensus<S> {
    pub(super) fn new(shared: Arc<Shared<S>>) -> Self {
        Self { shared }
    }

    /// Logs the encoded `command` of so many `items`, applies it, and answers where and with what outcome.
    ///
    /// Cancel safety: dropped before the command is logged, it never will be; later, it is applied without an answer.
    /// There is no deadline of its own.
    ///
    /// # Errors
    /// See [`CatalogError::is_unproposed`] for those after which nothing was logged.
    pub async fn propose(&self, command: Vec<u8>, items: usize) -> Result<(LogIndex, S::Outcome), CatalogError> {
        self.check_alive()?;
        if command.len() > MAX_COMMAND_BYTES || items > MAX_COMMAND_ITEMS {
            let (length_maximum, items_maximum) = (MAX_COMMAND_BYTES, MAX_COMMAND_ITEMS);
            return Err(CatalogError::TooLarge { length: command.len(), length_maximum, items, items_maximum });
        }
        let (reply, answer) = oneshot::channel();
        if let Err(error) = self.shared.inbox.push(Proposal { command, items, reply }) {
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

    /// Answers `question` from the state, on the caller's thread, under the read lock: keep it short. Cancel-safe.
    ///
    /// # Errors
    /// [`CatalogError::Lagging`] after 5 s, [`CatalogError::NotLeader`] for a linearizable read, those of a group that ended.
    pub async fn read<A>(&self, read: Read, question: impl FnOnce(&S) -> A) -> Result<(LogIndex, A), CatalogError> {
        if !self.serves(read)? {
            let mut applied = self.watch_applied();
            let wait = async {
                while !self.serves(read)? {
                    // The sender lives as long as `self`.
                    let _ = applied.changed().await;
                }
                Ok(())
            };
            let in_time = tokio::time::timeout(READ_TIMEOUT, wait).await;
            in_time.unwrap_or_else(|_elapsed| Err(self.lagging(read)))?;
        }
        let state = self.shared.state.read();
        Ok((LogIndex(state.position.index), question(&state.machine)))
    }

    /// Looks at what this voter has applied, without waiting, also after the group has ended. Keep it short.
    pub fn peek<A>(&self, question: impl FnOnce(&S) -> A) -> A {
        question(&self.shared.state.read().machine)
    }

    /// Whether such a read can be answered now.
    fn serves(&self, read: Read) -> Result<bool, CatalogError> {
        self.check_alive()?;
        let applied = *self.shared.applied.borrow();
        Ok(match read {
            Read::Local => true,
            Read::AtLeast(index) => applied >= index,
            // In a group of one whatever is acknowledged was applied here. With more voters this is where the leader makes
            // sure that it still leads.
            // After a stop the next process may serve already.
            Read::Linearizable if self.shared.is_stopping() => return Err(CatalogError::ShuttingDown),
            Read::Linearizable => {
                let from = self.shared.leader_from.load(Ordering::Acquire);
                from != 0 && applied.0 >= from
            }
        })
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

    /// Fails unless this voter leads and has applied all that was acknowledged before it did.
    ///
    /// # Errors
    /// [`CatalogError::NotLeader`], those of a group that ended.
    pub fn check_leader(&self) -> Result<(), CatalogError> {
        if self.serves(Read::Linearizable)? {
            return Ok(());
        }
        Err(CatalogError::NotLeader { leader: self.status().leader })
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
