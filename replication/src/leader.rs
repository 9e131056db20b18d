//! Where the leader is: questions to it from other members, and its answers.

use std::sync::Arc;
use std::time::Duration;

use tidepool_metadata::NodeId;
use tidepool_metadata::catalog::Located;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::catalog_handle::CatalogHandle;
use crate::consensus::{Answerer, Read, Role};
use crate::error::CatalogError;
use crate::question::{LeaderAnswer, Question, Refused};

/// How long a question is repeated: some elections, and a synced write.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(2);
/// The pause before the next: a fraction of an election.
const PAUSE: Duration = Duration::from_millis(25);
/// How often the other voters hear of leases: an election takes longer.
const NEWS_PERIOD: Duration = Duration::from_millis(100);
/// Leases in one message, of 36 bytes each.
const NEWS_LEASES: usize = 2048;
/// Messages under way at a time, to all voters: those to one that is frozen give up their room soon.
const NEWS_UNDER_WAY: usize = 64;

impl CatalogHandle {
    /// Whether this voter holds the office; it may have lost it without knowing.
    pub(crate) fn leads(&self) -> bool {
        self.consensus.holds_office()
    }

    /// Asks whoever leads until there is an answer. What is asked can be done twice without harm: a lease is only made
    /// longer, what is forgotten is forgotten. Should this voter come to lead meanwhile, it answers itself.
    pub(crate) async fn ask(&self, question: Question) -> Result<LeaderAnswer, CatalogError> {
        let (bytes, end) = (question.encode(), Instant::now() + PATIENCE);
        loop {
            let error = match self.ask_once(&question, &bytes).await {
                Ok(LeaderAnswer::Refused(refused)) => refused.into(),
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let may_pass = matches!(error, CatalogError::NotLeader { .. } | CatalogError::OutcomeUnknown);
            // A change of members is told from its effects, and not tried twice blindly.
            let is_change = matches!(question, Question::Change(_)) && matches!(error, CatalogError::OutcomeUnknown);
            if !may_pass || is_change || Instant::now() + PAUSE >= end {
                return Err(error);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn ask_once(&self, question: &Question, bytes: &[u8]) -> Result<LeaderAnswer, CatalogError> {
        if self.leads() {
            return self.answer(question.clone()).await;
        }
        let answer = self.consensus.ask_leader(bytes, ATTEMPT).await?;
        LeaderAnswer::decode(&answer).ok_or(CatalogError::Unexpected { expected: "the leader's words" })
    }

    /// Answers other members from now on.
    pub(crate) fn answer_questions(&self) {
        let handle = self.clone();
        self.consensus.answer_with(Box::new(move |bytes| {
            let handle = handle.clone();
            Box::pin(async move {
                let question = match Question::decode(&bytes)? {
                    Question::Node(words) => return handle.node_answerer.get()?(words).await,
                    Question::Leased(granted) => {
                        if !handle.leads() {
                            handle.leases.take_over(granted);
                        }
                        return None;
                    }
                    question => question,
                };
                let answer = handle.answer(question).await;
                Some(answer.unwrap_or_else(|error| LeaderAnswer::Refused(Refused::from(&error))).encode())
            })
        }));
    }

    /// Answers what other members ask this node, as `answerer` does. Once.
    pub fn answer_nodes_with(&self, answerer: Answerer) {
        // A second one would be a fault of the program's; the first stays.
        let _first = self.node_answerer.set(answerer);
    }

    /// Asks another node, in words of the caller's. Cancel-safe for the caller; what was asked may be done all the same.
    ///
    /// # Errors
    /// [`CatalogError::NoSuchMember`]; [`CatalogError::OutcomeUnknown`] if no answer came `within` that time; those of a
    /// group that ended.
    pub async fn ask_node(&self, node: NodeId, words: Vec<u8>, within: Duration) -> Result<Vec<u8>, CatalogError> {
        self.consensus.ask_member(node, &Question::Node(words).encode(), within).await
    }

    /// Tells the other voters, while this one leads, which leases it gives, so that whoever leads next keeps them. Nobody waits
    /// for that, and what is lost on the way costs a miss at most. Runs until the group ends.
    pub async fn stream_leases(&self) {
        let mut period = tokio::time::interval(NEWS_PERIOD);
        let under_way = Arc::new(Semaphore::new(NEWS_UNDER_WAY));
        loop {
            period.tick().await;
            let status = self.status();
            if status.failure.is_some() {
                return;
            }
            let others: Vec<NodeId> = match status.role {
                Role::Leader => status.voters.into_iter().filter(|&voter| voter != status.node).collect(),
                _ => Vec::new(),
            };
            for granted in self.leases.news(!others.is_empty()).chunks(NEWS_LEASES) {
                let words = Question::Leased(granted.to_vec()).encode();
                for &voter in &others {
                    let Ok(room) = Arc::clone(&under_way).try_acquire_owned() else { break };
                    let (handle, words) = (self.clone(), words.clone());
                    tokio::spawn(async move {
                        let _room = room;
                        // There is no answer, and none is missed.
                        let _heard = handle.consensus.ask_member(voter, &words, ATTEMPT).await;
                    });
                }
            }
        }
    }

    async fn answer(&self, question: Question) -> Result<LeaderAnswer, CatalogError> {
        if !self.leads() {
            return Err(CatalogError::NotLeader { leader: None });
        }
        Ok(match question {
            Question::Grant { tenant, duration, keys } => {
                let (index, _): (_, Vec<Located>) =
                    self.locate_here(tenant, keys, Some(duration), Read::Linearizable).await?;
                LeaderAnswer::Granted(index)
            }
            Question::Renew { tenant, duration, keys } => {
                let versions = self.current(tenant, keys).await?;
                LeaderAnswer::Durations(self.leases.renew(&versions, duration))
            }
            Question::Release { tenant, keys } => {
                let versions = self.current(tenant, keys).await?;
                LeaderAnswer::Released(self.leases.release(&versions))
            }
            Question::Left { tenant, key } => {
                let versions = self.current(tenant, vec![key]).await?;
                let left = |what: &Option<tidepool_metadata::lease::Leased>| {
                    what.map_or(Duration::ZERO, |what| self.leases.left(what.version))
                };
                LeaderAnswer::Durations(versions.iter().map(left).collect())
            }
            Question::Forget { mode, names } => {
                let (index, forgotten) = self.forget_here(names, mode).await?;
                LeaderAnswer::Forgotten(index, forgotten)
            }
            Question::Change(change) => {
                let members = self.consensus.change_members(change).await?;
                LeaderAnswer::Changed(members.index())
            }
            Question::Node(_) | Question::Leased(_) => {
                return Err(CatalogError::Unexpected { expected: "a question to the leader" });
            }
        })
    }
}
