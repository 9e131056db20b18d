//! Changes of members, and of the leader.
//!
//! A node comes in as a learner. Learners become voters in pairs, by one joint change, once they have the log: two voters
//! tolerate no more failures than one does. The leader sees to that by itself until the group has as many voters as it
//! is to have. Guests never do. One change at a time; a leader does not remove itself, it hands over first.

use raft::eraftpb::{ConfChange, ConfChangeSingle, ConfChangeType, ConfChangeV2, Entry, EntryType};
use tidepool_metadata::NodeId;

use super::{Core, ELECTION_NANOS, Host, Now};
use crate::consensus::log::LogStore;
use crate::consensus::member::{MemberId, Members};
use crate::error::{CatalogError, GroupError};

/// How often learners are looked at, in ticks.
const PROMOTE_TICKS: u64 = 40;
/// Entries that a learner may lack and still count as caught up: what comes in during a round trip.
const CAUGHT_UP: u64 = 256;

/// What is to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A node comes in, or comes back with another log.
    Add(MemberId),
    /// Learners become voters.
    Promote(Vec<NodeId>),
    /// A node goes.
    Remove(NodeId),
    /// Another voter leads.
    Transfer(NodeId),
}

pub(super) struct UnderWay<C> {
    index: u64,
    term: u64,
    changer: Option<C>,
}

pub(super) struct Transfer<C> {
    target: MemberId,
    began: Option<u64>,
    changer: Option<C>,
}

fn single(kind: ConfChangeType, member: MemberId) -> ConfChangeSingle {
    let mut change = ConfChangeSingle::default();
    change.set_change_type(kind);
    change.node_id = member.number();
    change
}

impl<L: LogStore, H: Host> Core<L, H> {
    /// Begins a change; `changer` hears how it ended.
    pub fn change(&mut self, now: Now, change: Change, changer: H::Changer, host: &mut H) {
        self.now = now;
        match self.steps(&change) {
            Ok(steps) if steps.is_empty() => host.settle(changer, Ok(self.members().clone())),
            Ok(steps) => self.begin(steps, Some(changer), host),
            Err(None) => {
                // A hand-over, which begins with the next turn: by then nobody trusts the leader lease any more.
                let target = match change {
                    Change::Transfer(node) => self.members().of(node),
                    _ => self.successor(),
                };
                match target {
                    Some(target) => {
                        self.reads.hand_over();
                        self.transfer = Some(Transfer { target, began: None, changer: Some(changer) });
                    }
                    None => host.settle(changer, Err(CatalogError::NoSuchMember)),
                }
            }
            Err(Some(error)) => host.settle(changer, Err(error)),
        }
    }

    /// What Raft is to be asked for; nothing if it is so already. `Err(None)`: leadership must go first.
    fn steps(&self, change: &Change) -> Result<Vec<ConfChangeSingle>, Option<CatalogError>> {
        if !self.leads() {
            return Err(Some(CatalogError::NotLeader { leader: self.leader().map(MemberId::node) }));
        }
        let members = self.members();
        if self.change.is_some() || self.transfer.is_some() || members.is_changing() || self.raw.raft.has_pending_conf()
        {
            return Err(Some(CatalogError::MembersChanging));
        }
        let is_voter = |member: MemberId| members.voters().contains(&member);
        match change {
            Change::Add(member) => {
                let other = members.of(member.node());
                if other == Some(*member) {
                    return Ok(Vec::new());
                }
                let mut steps: Vec<_> = other.into_iter().map(|old| single(ConfChangeType::RemoveNode, old)).collect();
                if other == Some(self.me) || other.is_some_and(is_voter) && members.voters().len() == 1 {
                    return Err(Some(CatalogError::NoSuchMember));
                }
                steps.push(single(ConfChangeType::AddLearnerNode, *member));
                Ok(steps)
            }
            Change::Promote(nodes) => {
                let found = nodes.iter().map(|&node| members.of(node).ok_or(Some(CatalogError::NoSuchMember)));
                let found = found.collect::<Result<Vec<_>, _>>()?;
                let new: Vec<_> = found.into_iter().filter(|&member| !is_voter(member)).collect();
                if new.iter().any(|member| member.is_guest()) {
                    return Err(Some(CatalogError::NoSuchMember));
                }
                if new.iter().any(|&member| !self.is_caught_up(member)) {
                    return Err(Some(CatalogError::NotCaughtUp));
                }
                Ok(new.into_iter().map(|member| single(ConfChangeType::AddNode, member)).collect())
            }
            Change::Remove(node) => match members.of(*node) {
                None => Ok(Vec::new()),
                Some(member) if member == self.me => Err(None),
                Some(member) => Ok(vec![single(ConfChangeType::RemoveNode, member)]),
            },
            Change::Transfer(node) => match members.of(*node) {
                Some(member) if member == self.me => Ok(Vec::new()),
                Some(member) if is_voter(member) => Err(None),
                _ => Err(Some(CatalogError::NoSuchMember)),
            },
        }
    }

    fn is_caught_up(&self, member: MemberId) -> bool {
        let last = self.raw.raft.raft_log.last_index();
        let has_log =
            self.raw.raft.prs().get(member.0).is_some_and(|peer| peer.matched + CAUGHT_UP >= last && peer.matched > 0);
        has_log && self.contacts.get(&member).is_some_and(|&heard| heard + 2 * ELECTION_NANOS > self.now.boot)
    }

    /// The voter that has most of the log.
    fn successor(&self) -> Option<MemberId> {
        let others = self.members().voters().into_iter().filter(|&voter| voter != self.me);
        others.max_by_key(|voter| self.raw.raft.prs().get(voter.0).map_or(0, |peer| peer.matched))
    }

    fn begin(&mut self, steps: Vec<ConfChangeSingle>, changer: Option<H::Changer>, host: &mut H) {
        let mut change = ConfChangeV2::default();
        change.set_changes(steps.into());
        match self.raw.propose_conf_change(Vec::new(), change) {
            Ok(()) => {
                let raft = &self.raw.raft;
                self.change = Some(UnderWay { index: raft.raft_log.last_index(), term: raft.term, changer });
            }
            Err(error) => {
                tracing::warn!(%error, "a change of members is refused");
                if let Some(changer) = changer {
                    host.settle(changer, Err(CatalogError::MembersChanging));
                }
            }
        }
    }

    /// Starts a hand-over that was asked for before the last turn ended.
    pub(super) fn begin_transfer(&mut self) {
        let now = self.now.boot;
        if let Some(transfer) = &mut self.transfer {
            match transfer.began {
                // The first turn only makes known that the leader lease is over.
                None => transfer.began = Some(0),
                Some(0) => {
                    transfer.began = Some(now);
                    self.raw.transfer_leader(transfer.target.0);
                }
                Some(_) => {}
            }
        }
    }

    /// Whether another turn is due at once.
    #[must_use]
    pub fn wants_turn(&self) -> bool {
        self.transfer.as_ref().is_some_and(|transfer| transfer.began == Some(0))
    }

    /// Changes of members take effect when their entries are committed.
    pub(super) fn apply_changes(&mut self, entries: &[Entry], host: &mut H) -> Result<(), GroupError> {
        for entry in entries {
            if entry.get_entry_type() == EntryType::EntryNormal || entry.index <= self.members().index {
                continue;
            }
            let unreadable = |_| GroupError::CorruptLog {
                index: tidepool_metadata::LogIndex(entry.index),
                problem: "a change of members can't be read",
            };
            let state = if entry.get_entry_type() == EntryType::EntryConfChangeV2 {
                let change: ConfChangeV2 = protobuf::Message::parse_from_bytes(&entry.data).map_err(unreadable)?;
                self.raw.apply_conf_change(&change)?
            } else {
                let change: ConfChange = protobuf::Message::parse_from_bytes(&entry.data).map_err(unreadable)?;
                self.raw.apply_conf_change(&change)?
            };
            let members = Members { index: entry.index, state };
            tracing::info!(?members, "the group's members");
            self.raw.mut_store().set_members(members.clone())?;
            self.pace();
            let under_way = self.change.as_ref();
            if under_way.is_some_and(|change| change.index <= entry.index) && !members.is_changing() {
                let under_way = self.change.take();
                let is_this = under_way.as_ref().is_some_and(|change| entry.term == change.term);
                let outcome = if is_this { Ok(members) } else { Err(CatalogError::OutcomeUnknown) };
                if let Some(changer) = under_way.and_then(|change| change.changer) {
                    host.settle(changer, outcome);
                }
            }
        }
        Ok(())
    }

    pub(super) fn lose_leadership(&mut self, host: &mut H) {
        if let Some(changer) = self.change.take().and_then(|change| change.changer) {
            host.settle(changer, Err(CatalogError::OutcomeUnknown));
        }
        if let Some(changer) = self.transfer.take().and_then(|transfer| transfer.changer) {
            let members = self.members().clone();
            host.settle(changer, Ok(members));
        }
        self.drop_accepted();
    }

    /// Ends a hand-over that came to nothing, and promotes learners.
    pub(super) fn tend_changes(&mut self, host: &mut H) {
        let now = self.now.boot;
        let failed = |transfer: &Transfer<H::Changer>| {
            transfer.began.is_some_and(|began| began > 0 && began + 2 * ELECTION_NANOS < now)
        };
        let has_failed = self.raw.raft.lead_transferee.is_none() && self.transfer.as_ref().is_some_and(failed);
        if self.leads()
            && has_failed
            && let Some(changer) = self.transfer.take().and_then(|transfer| transfer.changer)
        {
            host.settle(changer, Err(CatalogError::NotCaughtUp));
        }
        if !self.ticks.is_multiple_of(PROMOTE_TICKS) || !self.leads() {
            return;
        }
        let members = self.members();
        let voters = members.voters().len();
        // To the next odd number.
        let wanted = if voters.is_multiple_of(2) { 1 } else { 2 };
        if members.is_changing() || voters + wanted > self.config.voters || self.change.is_some() {
            return;
        }
        let may_vote = |&learner: &MemberId| !learner.is_guest() && self.is_caught_up(learner);
        let ready = members.learners().into_iter().filter(may_vote);
        let nodes: Vec<NodeId> = ready.take(wanted).map(MemberId::node).collect();
        if nodes.len() == wanted
            && let Ok(steps) = self.steps(&Change::Promote(nodes))
        {
            self.begin(steps, None, host);
        }
    }
}
