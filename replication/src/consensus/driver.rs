//! The Raft thread: takes proposals, packs them into entries, makes those durable, and hands over what is committed.
//!
//! Group commit: all commands that wait share entries, and all entries of one turn share one synced write; what comes in
//! during that write is the next turn. So throughput grows with the number of callers and a lone caller waits for one
//! write.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;

use protobuf::Message as _;
use raft::eraftpb::{Entry, Message};
use raft::{RawNode, SoftState, StateRole};
use tidepool_metadata::catalog::MAX_COMMAND_ITEMS;
use tidepool_metadata::{LogIndex, NodeId};

use super::entry;
use super::inbox::{Gate, Input, Proposal, Reply};
use super::log::Log;
use super::machine::StateMachine;
use super::shared::{Role, Shared};
use super::transport::Transport;
use crate::error::{CatalogError, GroupError};

/// Committed entries of one turn: what a replay holds in memory at once.
const COMMITTED_BYTES: u64 = 4 << 20;

/// A committed entry, and who waits for its commands.
pub(super) struct Committed<O> {
    pub(super) entry: Entry,
    /// In the order of the commands, or none at all.
    pub(super) replies: Vec<Reply<O>>,
}

/// Entries that this voter proposed and that are not committed.
struct Pending<O> {
    index: u64,
    term: u64,
    bytes: usize,
    replies: Vec<Reply<O>>,
}

pub(super) struct Driver<S: StateMachine, T> {
    raw: RawNode<Log>,
    shared: Arc<Shared<S>>,
    transport: T,
    apply: SyncSender<Vec<Committed<S::Outcome>>>,
    pending: VecDeque<Pending<S::Outcome>>,
    pending_bytes: usize,
    /// Bytes of the entries given to the apply thread.
    handed_bytes: u64,
}

/// Raft's own settings.
fn raft_config(id: u64, applied: u64) -> raft::Config {
    raft::Config {
        id,
        applied,
        // In ticks of 5 ms, which a group of one needs none of.
        election_tick: 100,
        min_election_tick: 100,
        max_election_tick: 200,
        heartbeat_tick: 10,
        pre_vote: true,
        check_quorum: true,
        max_size_per_msg: 1 << 20,
        max_inflight_msgs: 64,
        max_committed_size_per_ready: COMMITTED_BYTES,
        ..raft::Config::default()
    }
}

impl<S: StateMachine, T: Transport> Driver<S, T> {
    pub(super) fn new(
        mut log: Log,
        shared: Arc<Shared<S>>,
        transport: T,
        apply: SyncSender<Vec<Committed<S::Outcome>>>,
    ) -> Result<Self, GroupError> {
        let id = u64::from(shared.config.node.0);
        if log.voters() != [id] {
            return Err(GroupError::Unimplemented { what: "a group of several voters" });
        }
        let applied = shared.state.read().position.index;
        // Only committed entries are applied, whether or not the log says so by now.
        log.set_commit(applied);
        let logger = slog::Logger::root(slog::Discard, slog::o!());
        let mut raw = RawNode::new(&raft_config(id, applied), log, &logger)?;
        // The only voter need not wait for an election timeout.
        raw.campaign()?;
        let (pending, pending_bytes, handed_bytes) = (VecDeque::new(), 0, 0);
        let driver = Self { raw, shared, transport, apply, pending, pending_bytes, handed_bytes };
        driver.report();
        Ok(driver)
    }

    /// Runs until the group stops or fails.
    pub(super) fn run(mut self) {
        if let Err(error) = self.turns() {
            // Before what is pending is dropped with `self`: whoever waits for it learns the cause.
            self.shared.fail(error);
        }
    }

    fn turns(&mut self) -> Result<(), GroupError> {
        loop {
            self.turn()?;
            let Input { proposals, flushed, stop } = self.shared.inbox.take(|| self.room());
            if stop {
                return Ok(());
            }
            if let Some(LogIndex(index)) = flushed {
                self.raw.mut_store().compact(index)?;
            }
            self.propose(proposals)?;
        }
    }

    /// How many bytes may be proposed now.
    fn room(&self) -> usize {
        let limits = &self.shared.limits;
        let applied = self.shared.applied_bytes.load(Ordering::Acquire);
        let flushed = self.shared.flushed_bytes.load(Ordering::Acquire);
        let unapplied = usize::try_from(self.handed_bytes - applied).unwrap_or(usize::MAX);
        let lags = self.handed_bytes - flushed >= limits.image_lag_bytes;
        let leads = self.raw.raft.state == StateRole::Leader;
        if lags || !leads { 0 } else { limits.in_flight_bytes.saturating_sub(self.pending_bytes + unapplied) }
    }

    /// Packs commands into as few entries as they fit.
    fn propose(&mut self, proposals: Vec<Proposal<S::Outcome>>) -> Result<(), GroupError> {
        let mut proposals = proposals.into_iter().peekable();
        while proposals.peek().is_some() {
            let mut writer = entry::Writer::new(self.shared.clock.now(), 4 << 10);
            let (mut replies, mut items) = (Vec::new(), 0);
            while let Some(proposal) = proposals.next_if(|next| {
                replies.is_empty() || writer.fits(next.command.len()) && items + next.items <= MAX_COMMAND_ITEMS
            }) {
                items += proposal.items;
                writer.push(&proposal.command);
                replies.push(proposal.reply);
            }
            self.append(writer.finish(), replies)?;
        }
        Ok(())
    }

    fn append(&mut self, payload: Vec<u8>, replies: Vec<Reply<S::Outcome>>) -> Result<(), GroupError> {
        let bytes = payload.len();
        match self.raw.propose(Vec::new(), payload) {
            Ok(()) => {}
            Err(raft::Error::ProposalDropped) => {
                let leader = None;
                replies.into_iter().for_each(|reply| answer(reply, Err(CatalogError::NotLeader { leader })));
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        let raft = &self.raw.raft;
        self.pending.push_back(Pending { index: raft.raft_log.last_index(), term: raft.term, bytes, replies });
        self.pending_bytes += bytes;
        Ok(())
    }

    /// Does all that Raft wants done.
    fn turn(&mut self) -> Result<(), GroupError> {
        while self.raw.has_ready() {
            let mut ready = self.raw.ready();
            if !ready.snapshot().is_empty() {
                return Err(GroupError::Unimplemented { what: "taking a snapshot" });
            }
            if let Some(state) = ready.ss() {
                self.role_changed(state);
            }
            self.send(ready.take_messages());
            self.hand_over(ready.take_committed_entries())?;
            let (entries, hard_state, must_sync) = (ready.take_entries(), ready.hs().cloned(), ready.must_sync());
            if !entries.is_empty() || hard_state.is_some() {
                self.raw.mut_store().append(entries, hard_state, must_sync)?;
            }
            // They acknowledge what is durable only now.
            self.send(ready.take_persisted_messages());
            let mut light = self.raw.advance_append(ready);
            if let Some(commit) = light.commit_index() {
                self.raw.mut_store().set_commit(commit);
            }
            self.send(light.take_messages());
            self.hand_over(light.take_committed_entries())?;
        }
        let applied = self.shared.applied.borrow().0;
        self.raw.advance_apply_to(applied);
        self.report();
        Ok(())
    }

    fn role_changed(&mut self, state: &SoftState) {
        let leads = state.raft_state == StateRole::Leader;
        // Nothing is proposed before this is known, so the last entry is the one that began the term.
        let first = if leads { self.raw.raft.raft_log.last_index() } else { 0 };
        self.shared.leader_from.store(first, Ordering::Release);
        let leader = u32::try_from(state.leader_id).ok().filter(|&id| id != 0).map(NodeId);
        self.shared.inbox.set_gate(if leads { Gate::Open } else { Gate::NotLeader(leader) });
        tracing::info!(node = %self.shared.config.node, term = self.raw.raft.term, ?leader, leads, "role in the group");
    }

    /// Gives committed entries to the apply thread, with those who wait for them.
    fn hand_over(&mut self, entries: Vec<Entry>) -> Result<(), GroupError> {
        if entries.is_empty() {
            return Ok(());
        }
        // Before they are applied: a status never shows more applied than committed.
        self.report();
        self.handed_bytes += entries.iter().map(|entry| entry.data.len() as u64).sum::<u64>();
        let committed =
            entries.into_iter().map(|entry| Committed { replies: self.waiting_for(&entry), entry }).collect();
        // The apply thread ends before this one only if the group failed; its cause is known then.
        self.apply.send(committed).map_err(|_| GroupError::ThreadDied { thread: "apply" })
    }

    fn waiting_for(&mut self, entry: &Entry) -> Vec<Reply<S::Outcome>> {
        while self.pending.front().is_some_and(|pending| pending.index <= entry.index)
            && let Some(pending) = self.pending.pop_front()
        {
            self.pending_bytes -= pending.bytes;
            if (pending.index, pending.term) == (entry.index, entry.term) {
                return pending.replies;
            }
            // Another leader's entry has its place: it will never be applied.
            let leader = None;
            pending.replies.into_iter().for_each(|reply| answer(reply, Err(CatalogError::NotLeader { leader })));
        }
        Vec::new()
    }

    fn send(&mut self, messages: Vec<Message>) {
        for message in messages {
            let (Ok(target), Ok(bytes)) = (u32::try_from(message.to), message.write_to_bytes()) else { continue };
            self.transport.send(NodeId(target), bytes);
        }
    }

    fn report(&self) {
        let (raft, log) = (&self.raw.raft, self.raw.store());
        let mut view = self.shared.raft.lock();
        view.role = match raft.state {
            StateRole::Leader => Role::Leader,
            StateRole::Follower => Role::Follower,
            StateRole::Candidate | StateRole::PreCandidate => Role::Candidate,
        };
        (view.term, view.leader, view.commit) = (raft.term, raft.leader_id, raft.raft_log.committed);
        (view.log_first, view.log_last) = (log.compacted().index + 1, log.last());
        if view.voters != log.voters() {
            view.voters = log.voters().to_vec();
        }
    }
}

/// Gives an answer to whoever still waits for it.
pub(super) fn answer<O>(reply: Reply<O>, with: Result<(LogIndex, O), CatalogError>) {
    // A caller that went away needs none.
    let _ = reply.send(with);
}
