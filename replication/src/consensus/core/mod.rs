//! The deciding part of one voter: no thread, no clock, no socket. Inputs come in with the time, decisions go to a [`Host`].
//!
//! ```text
//!  propose, read, change ──┐                      ┌──> send(lane, target, bytes)
//!  receive(bytes) ─────────┼──> Core ── turn() ───┼──> apply(entries, with those who wait for them)
//!  tick() ─────────────────┘      │               ├──> fetch, install (a snapshot)
//!                              LogStore           └──> refuse, serve_read, settle
//! ```
//!
//! After any number of inputs the host calls [`Core::turn`], which does all that follows from them, in an order that is safe:
//! what is acknowledged was given to the [`LogStore`] before. The same inputs at the same times give the same decisions,
//! so a simulation that owns the clock, the network and the disk replays a run from its seed.
//!
//! Every member is a door to the leader: commands that are proposed here are forwarded ([`forward`]), linearizable reads ask
//! the leader for an index and are answered from this voter's state ([`reads`]).
//!
//! Raft itself is raft-rs; its election timeouts are set from here, so that they follow from term and rank alone.

mod change;
mod forward;
mod reads;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use protobuf::Message as _;
use raft::eraftpb::{Entry, EntryType, Message, MessageType};
use raft::{RawNode, StateRole};
use tidepool_metadata::{LogIndex, LogTime, NodeId};

pub use change::Change;
use forward::Forwarding;
use reads::Reads;

use super::config::{LeaderReads, Outlives};
use super::envelope::{self, Body, Envelope, Unread};
use super::log::{Behind, LogStore, Outgoing, Position};
use super::member::{MemberId, Members};
use super::shared::Role;
use super::transport::Lane;
use super::{ClusterEpoch, ClusterId};
use crate::error::{CatalogError, GroupError};

/// How often [`Core::tick`] is to be called while [`Core::needs_ticks`].
pub const TICK: Duration = Duration::from_millis(5);
/// Shortest election timeout: 200 ms. The ranges of voters follow each other, so that two hardly ever collide.
const ELECTION_TICKS: usize = 40;
/// How many ticks one voter's range of timeouts has, and how many ranges there are: 300 ms at most.
const RANGE_TICKS: usize = 4;
const RANGES: usize = 5;
const _: () = assert!(ELECTION_TICKS + RANGE_TICKS * RANGES <= 60);
/// Heartbeats come every 40 ms: five fit the shortest election timeout.
const HEARTBEAT_TICKS: usize = 8;
/// The shortest election timeout in nanoseconds.
const ELECTION_NANOS: u64 = ELECTION_TICKS as u64 * TICK.as_nanos() as u64;
/// For how long after a quorum heard from the leader nobody else can lead, with room for clocks that run differently.
const LEASE_NANOS: u64 = ELECTION_NANOS / 10 * 8;
/// Committed entries of one turn: what a replay holds in memory at once.
const COMMITTED_BYTES: u64 = 4 << 20;
/// Bytes of entries that may wait to be written; entries that come beyond that are dropped, and sent again by the leader.
const UNWRITTEN_BYTES: usize = 32 << 20;
/// After how long a snapshot that was offered is offered again.
const OFFER_AGAIN_NANOS: u64 = 3_000_000_000;

/// When something happens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Now {
    /// `CLOCK_BOOTTIME`, in nanoseconds: what leases and timeouts go by.
    pub boot: u64,
    /// With what a leader would stamp an entry.
    pub log: LogTime,
}

/// A committed entry, and who waits for its commands.
pub struct Committed<R> {
    pub(super) entry: Entry,
    /// In the order of the commands, or none at all.
    pub(super) replies: Vec<Option<R>>,
}

impl<R> Committed<R> {
    /// The entry's index.
    #[must_use]
    pub fn index(&self) -> LogIndex {
        LogIndex(self.entry.index)
    }

    /// The entry's term.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.entry.term
    }

    /// Stamp and commands of the entry, each with who waits for it here; none if the entry is the group's own.
    ///
    /// # Errors
    /// [`GroupError::CorruptLog`], [`GroupError::Version`].
    pub fn commands(&mut self) -> Result<Option<Commands<'_, R>>, GroupError> {
        if self.entry.get_entry_type() != EntryType::EntryNormal || self.entry.data.is_empty() {
            return Ok(None);
        }
        let payload = super::entry::read(LogIndex(self.entry.index), &self.entry.data)?;
        let mut replies = std::mem::take(&mut self.replies);
        replies.resize_with(payload.commands.len(), || None);
        Ok(Some((payload.time, payload.commands.into_iter().zip(replies).collect())))
    }
}

/// When an entry was stamped, and its commands with those who wait for them.
pub type Commands<'a, R> = (LogTime, Vec<(&'a [u8], Option<R>)>);

/// What a voter's decisions become. Nothing in here may wait for another member.
pub trait Host {
    /// Who waits for a command.
    type Reply;
    /// Who waits for a read.
    type Reader;
    /// Who waits for a change of members.
    type Changer;

    /// Sends `message` to `target`, or loses it.
    fn send(&mut self, target: NodeId, lane: Lane, message: Vec<u8>);

    /// Entries up to `index` are committed. Said before any message tells it to others: whoever reads here as the leader must
    /// see what they may have answered by then.
    fn committed(&mut self, index: LogIndex);

    /// Applies entries, in order, exactly once, behind what was installed or applied before.
    ///
    /// # Errors
    /// The voter stops.
    fn apply(&mut self, entries: Vec<Committed<Self::Reply>>) -> Result<(), GroupError>;

    /// Tells a proposer that its command will not be answered.
    fn refuse(&mut self, reply: Self::Reply, error: CatalogError);

    /// Nobody waits any more.
    fn has_gone(&self, reply: &Self::Reply) -> bool;

    /// A read may be answered once so much is applied.
    fn serve_read(&mut self, reader: Self::Reader, from: Result<LogIndex, CatalogError>);

    /// Says how a change of members ended.
    fn settle(&mut self, changer: Self::Changer, outcome: Result<Members, CatalogError>);

    /// Begins to fetch a snapshot from `source`; [`Core::fetched`] says how it ended. Only one at a time is asked for.
    fn fetch(&mut self, source: MemberId);

    /// Puts the fetched snapshot in place of the state, durably, behind all entries that were given to `apply`.
    ///
    /// # Errors
    /// The voter stops.
    fn install(&mut self, position: Position) -> Result<(), GroupError>;
}

/// What a core is built from.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Which cluster.
    pub cluster: ClusterId,
    /// Which catalog of it.
    pub epoch: ClusterEpoch,
    /// How many voters the group is to have.
    pub voters: usize,
    /// How a leader reads.
    pub reads: LeaderReads,
    /// Most bytes of entries that are logged here and not applied, or forwarded and not answered.
    pub in_flight_bytes: usize,
    /// Before the first proposal's number; above all that an earlier life of this member used.
    pub sequence: u64,
}

/// What of a voter others may know.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// What it does.
    pub role: Role,
    /// In which term.
    pub term: u64,
    /// Who leads; `None` if nobody is known to.
    pub leader: Option<MemberId>,
    /// Who takes part.
    pub members: Members,
    /// Last entry known to be committed.
    pub commit: u64,
    /// First entry of the log.
    pub log_first: u64,
    /// Last entry of the log.
    pub log_last: u64,
    /// While it leads: the first entry of its term; else 0.
    pub leader_from: u64,
    /// Until when (`Now::boot`) it certainly leads; 0: it does not, or must ask.
    pub lease_until: u64,
    /// Until when no other can be elected, if this voter leads; reads may not rest on it.
    pub followed_until: u64,
    /// Of each member when it was heard from last, and how much of the log it has, if this voter leads.
    pub peers: Vec<Peer>,
}

/// A member as seen from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Who.
    pub member: MemberId,
    /// When its last message came; 0: never.
    pub heard: u64,
    /// Up to where its log is known to agree; 0 unless seen from the leader.
    pub matched: u64,
}

/// One voter or learner.
pub struct Core<L: LogStore, H: Host> {
    raw: RawNode<L>,
    config: CoreConfig,
    me: MemberId,
    started: u64,
    now: Now,
    ticks: u64,
    forwarding: Forwarding<H::Reply>,
    reads: Reads<H::Reader>,
    change: Option<change::UnderWay<H::Changer>>,
    transfer: Option<change::Transfer<H::Changer>>,
    /// The last time by its own clock that a leader sent and this voter followed: term, leader, time.
    followed: (u64, u64, u64),
    /// When each member was heard from.
    contacts: BTreeMap<MemberId, u64>,
    leader_from: u64,
    /// A snapshot that is being fetched for this message.
    fetching: Option<Message>,
    /// To whom a snapshot was offered, and when.
    offers: BTreeMap<u64, u64>,
    /// Batches of the log that are not known to be written, in order.
    unwritten: VecDeque<Unwritten>,
    /// Term and vote as they were given to the log last.
    promised: (u64, u64),
    /// Entries of commands that were logged here and are not committed.
    logged: VecDeque<Logged>,
    logged_bytes: usize,
    unread: u64,
}

/// What waits for a batch of the log.
struct Unwritten {
    /// The batch's number.
    batch: u64,
    /// The last of Raft's readies that is done with it.
    ready: u64,
    /// Bytes of its entries.
    bytes: usize,
    /// It has a term or a vote that was not written before.
    promises: bool,
    /// What came after it and is to be sent then.
    messages: Vec<Message>,
}

/// An entry that this leader made.
struct Logged {
    index: u64,
    bytes: usize,
    /// The most that one of its commands asks for.
    outlives: Outlives,
}

/// Raft's own settings.
fn raft_config(id: u64, applied: u64) -> raft::Config {
    raft::Config {
        id,
        applied,
        election_tick: ELECTION_TICKS,
        min_election_tick: ELECTION_TICKS,
        max_election_tick: ELECTION_TICKS + RANGE_TICKS * RANGES,
        heartbeat_tick: HEARTBEAT_TICKS,
        pre_vote: true,
        check_quorum: true,
        max_size_per_msg: 1 << 20,
        max_inflight_msgs: 64,
        max_committed_size_per_ready: COMMITTED_BYTES,
        ..raft::Config::default()
    }
}

impl<L: LogStore, H: Host> Core<L, H> {
    /// The voter of `log`, whose state has the effects of all entries up to `applied`.
    ///
    /// # Errors
    /// [`GroupError::Raft`].
    pub fn new(config: CoreConfig, mut log: L, applied: u64, now: Now) -> Result<Self, GroupError> {
        let me = log.member();
        // Only committed entries are applied, whether or not the log says so by now.
        log.set_commit(applied);
        let alone = log.members().is_alone(me);
        let hard_state = log.initial_state()?.hard_state;
        let logger = slog::Logger::root(slog::Discard, slog::o!());
        let mut raw = RawNode::new(&raft_config(me.0, applied), log, &logger)?;
        if alone {
            // The only voter need not wait for an election timeout.
            raw.campaign()?;
        }
        let forwarding = Forwarding::new(config.sequence);
        let mut core = Self {
            raw,
            config,
            me,
            started: now.boot,
            now,
            ticks: 0,
            forwarding,
            reads: Reads::default(),
            change: None,
            transfer: None,
            followed: (0, 0, 0),
            contacts: BTreeMap::new(),
            leader_from: 0,
            fetching: None,
            offers: BTreeMap::new(),
            unwritten: VecDeque::new(),
            promised: (hard_state.term, hard_state.vote),
            logged: VecDeque::new(),
            logged_bytes: 0,
            unread: 0,
        };
        core.pace();
        Ok(core)
    }

    /// The log.
    pub fn store(&self) -> &L {
        self.raw.store()
    }

    /// The log, to note what was flushed and to compact it.
    pub fn store_mut(&mut self) -> &mut L {
        self.raw.mut_store()
    }

    /// Whether time means anything to this voter: a group of one with nothing under way needs none.
    #[must_use]
    pub fn needs_ticks(&self) -> bool {
        !self.members().is_alone(self.me) || self.raw.raft.state != StateRole::Leader
    }

    /// A message came; false if it is not for this member, or can't be read.
    ///
    /// # Errors
    /// The voter must stop.
    pub fn receive(&mut self, now: Now, message: &[u8], host: &mut H) -> Result<bool, GroupError> {
        self.now = now;
        let Envelope { from, to, body } = match Envelope::decode(message, self.group()) {
            Ok(envelope) => envelope,
            Err(unread) => {
                self.unread += 1;
                if self.unread == 1 || unread == Unread::Version {
                    tracing::warn!(?unread, "a message of another group or version is dropped");
                }
                return Ok(false);
            }
        };
        if to != self.me {
            return Ok(false);
        }
        match body {
            Body::Raft { sent, heard, message } => self.step(from, sent, heard, &message, host)?,
            Body::Forward { term, lowest, commands } => self.accept(from, term, lowest, commands, host),
            Body::Refuse { term, sequences } => self.refused(term, &sequences, host),
            Body::ReadIndex { term, ticket } => self.asked_for_index(from, term, ticket),
            Body::ReadAnswer { ticket, index } => self.index_came(ticket, index, host),
            Body::Removed { index } if index > self.members().index => {
                return Err(GroupError::Removed { index: LogIndex(index) });
            }
            Body::Removed { .. } | Body::Ask { .. } | Body::Answer { .. } => return Ok(false),
        }
        Ok(true)
    }

    /// [`TICK`] has passed.
    pub fn tick(&mut self, now: Now, host: &mut H) {
        self.now = now;
        self.ticks += 1;
        // A voter that has just become the only one leads at once when it campaigns, so all must be written by then.
        if self.leads() || self.unwritten.is_empty() || !self.members().is_alone(self.me) {
            self.raw.tick();
        }
        self.pace();
        self.tend_forwarding(host);
        self.tend_reads();
        self.tend_changes(host);
        let (raw, offers) = (&mut self.raw, &mut self.offers);
        offers.retain(|&member, at| {
            let waits = raw.raft.prs().get(member).is_some_and(|peer| peer.state == raft::ProgressState::Snapshot);
            if waits && *at + OFFER_AGAIN_NANOS < now.boot {
                raw.report_snapshot(member, raft::SnapshotStatus::Failure);
                return false;
            }
            waits
        });
    }

    /// Sets this voter's election timeout in its present term: from its rank among the voters, so that ranges do not
    /// overlap, and from the term, so that it is not always the same one that wins.
    fn pace(&mut self) {
        let voters = self.members().voters();
        let rank = voters.iter().position(|&voter| voter == self.me).unwrap_or(0);
        let term = usize::try_from(self.raw.raft.term % 1024).unwrap_or(0);
        let range = (rank + term) % voters.len().clamp(1, RANGES);
        let timeout = ELECTION_TICKS + range * RANGE_TICKS + (rank * 3 + term) % RANGE_TICKS;
        if self.raw.raft.randomized_election_timeout() != timeout {
            self.raw.raft.set_randomized_election_timeout(timeout);
        }
    }

    fn step(
        &mut self,
        from: MemberId,
        sent: u64,
        heard: (u64, u64),
        message: &[u8],
        host: &mut H,
    ) -> Result<(), GroupError> {
        let Ok(message) = Message::parse_from_bytes(message) else {
            self.unread += 1;
            return Ok(());
        };
        if message.from != from.0 || message.to != self.me.0 || raft::raw_node::is_local_msg(message.get_msg_type()) {
            return Ok(());
        }
        self.contacts.insert(from, self.now.boot);
        let raft = &self.raw.raft;
        match message.get_msg_type() {
            MessageType::MsgRequestVote | MessageType::MsgRequestPreVote => {
                // A voter that has just started may have promised a leader not to vote, and forgotten it.
                if self.now.boot < self.started + ELECTION_NANOS {
                    return Ok(());
                }
                if raft.state == StateRole::Leader && !self.members().all().contains(&from) {
                    self.post(from, Lane::Beat, Body::Removed { index: self.members().index }, host);
                    return Ok(());
                }
            }
            MessageType::MsgHeartbeat if message.commit > raft.raft_log.last_index() && message.term >= raft.term => {
                let (last, known) = (LogIndex(raft.raft_log.last_index()), LogIndex(message.commit));
                return Err(GroupError::LostEntries { last, known });
            }
            MessageType::MsgAppend if !message.entries.is_empty() && self.unwritten_bytes() > UNWRITTEN_BYTES => {
                return Ok(());
            }
            MessageType::MsgSnapshot if !self.may_step_snapshot(&message, host) => return Ok(()),
            _ => {}
        }
        let leads = matches!(message.get_msg_type(), MessageType::MsgAppend | MessageType::MsgHeartbeat);
        let (term, sender) = (message.term, message.from);
        if let Err(error) = self.raw.step(message) {
            // Such as an answer from somebody who is no member any more.
            tracing::debug!(%error, "raft drops a message");
        }
        self.pace();
        let raft = &self.raw.raft;
        if leads && raft.term == term && raft.leader_id == sender {
            let before = if (self.followed.0, self.followed.1) == (term, sender) { self.followed.2 } else { 0 };
            self.followed = (term, sender, before.max(sent));
        }
        if raft.state == StateRole::Leader && heard.0 == raft.term {
            self.reads.acknowledge(from, heard.1);
        }
        Ok(())
    }

    /// A snapshot is a handle: its rows are fetched before Raft hears of it.
    fn may_step_snapshot(&mut self, message: &Message, host: &mut H) -> bool {
        let raft = &self.raw.raft;
        let behind = message.get_snapshot().get_metadata().index > raft.raft_log.committed;
        if message.term < raft.term || !behind {
            // Raft answers by itself, without a look at what is in it.
            return true;
        }
        if self.fetching.is_none() {
            host.fetch(MemberId(message.from));
        }
        self.fetching = Some(message.clone());
        false
    }

    /// The fetch of a snapshot has ended: with the position and members of what was fetched, or without success.
    ///
    /// # Errors
    /// The voter must stop.
    pub fn fetched(&mut self, now: Now, found: Option<(Position, Members)>, host: &mut H) -> Result<(), GroupError> {
        self.now = now;
        let Some(mut message) = self.fetching.take() else { return Ok(()) };
        let Some((position, members)) = found else { return Ok(()) };
        let metadata = message.mut_snapshot().mut_metadata();
        if position.index < metadata.index || position.index <= self.raw.raft.raft_log.committed {
            return Ok(());
        }
        (metadata.index, metadata.term) = (position.index, position.term);
        metadata.set_conf_state(members.state.clone());
        message.mut_snapshot().data = members.encode().into();
        // The leader may have changed meanwhile: a snapshot of what is committed is right in any term.
        if message.term < self.raw.raft.term {
            (message.term, message.from) = (self.raw.raft.term, self.raw.raft.leader_id);
            if message.from == 0 {
                return Ok(());
            }
        }
        if let Err(error) = self.raw.step(message) {
            tracing::debug!(%error, "raft drops a snapshot");
        }
        self.turn(now, host)
    }

    /// Does all that follows from the inputs since the last turn.
    ///
    /// # Errors
    /// The voter must stop, and nothing that it was about to acknowledge was.
    pub fn turn(&mut self, now: Now, host: &mut H) -> Result<(), GroupError> {
        self.now = now;
        self.begin_transfer();
        loop {
            self.route(host)?;
            self.serve_reads(host);
            if !self.raw.has_ready() {
                return Ok(());
            }
            self.do_ready(host)?;
        }
    }

    fn do_ready(&mut self, host: &mut H) -> Result<(), GroupError> {
        let mut ready = self.raw.ready();
        if ready.ss().is_some() {
            self.role_changed(host);
        }
        host.committed(LogIndex(self.raw.raft.raft_log.committed));
        let (entries, hard_state) = (ready.take_entries(), ready.hs().cloned());
        let promised = hard_state.as_ref().map_or(self.promised, |state| (state.term, state.vote));
        let promises = promised != self.promised;
        self.promised = promised;
        let (at_once, mut behind) = self.sort(ready.take_messages(), ready.take_persisted_messages(), promises);
        // Beside the write: followers have what a leader logs as early as its own disk.
        self.send(at_once, host);
        let has_snapshot = !ready.snapshot().is_empty();
        if has_snapshot {
            let metadata = ready.snapshot().get_metadata();
            let position = Position { index: metadata.index, term: metadata.term };
            let members = Members::decode(&ready.snapshot().data);
            let members = members.ok_or(GroupError::CorruptImage { problem: "a snapshot's members can't be read" })?;
            host.install(position)?;
            self.raw.mut_store().install(position, members)?;
            self.forget_outcomes(host);
        }
        let number = ready.number();
        // Alone, nobody waits for this voter meanwhile; a snapshot is installed on this thread as it is.
        let is_later = !has_snapshot && !self.members().is_alone(self.me);
        let bytes = entries.iter().map(|entry| entry.data.len()).sum();
        let writes = !entries.is_empty() || promises;
        if writes {
            let must_sync = promises || !self.may_sync_later(&entries);
            let later = is_later.then(|| {
                let messages = std::mem::take(&mut behind).into_iter().filter_map(|message| self.outgoing(message));
                Behind { number, messages: messages.collect() }
            });
            self.raw.mut_store().append(entries, hard_state, must_sync, later)?;
        } else if let Some(state) = hard_state {
            self.raw.mut_store().set_commit(state.commit);
        }
        let committed = ready.take_committed_entries();
        self.raw.advance_append_async(ready);
        match self.unwritten.back_mut() {
            _ if writes && is_later => {
                self.unwritten.push_back(Unwritten { batch: number, ready: number, bytes, promises, messages: behind });
            }
            Some(last) if !writes && !has_snapshot => {
                last.ready = number;
                last.messages.extend(behind);
            }
            _ => {
                // Written by now, with all that was given to the log before.
                self.settle_writes(u64::MAX, host);
                self.raw.on_persist_ready(number);
                self.send(behind, host);
            }
        }
        self.apply_changes(&committed, host)?;
        self.hand_over(committed, host)?;
        // For Raft, applied means that changes of members are: the state machine may lag behind.
        self.raw.advance_apply();
        Ok(())
    }

    /// Which messages may be sent at once, and which wait until all that was given to the log by now is written.
    ///
    /// Entries of a leader say nothing of its own disk, and that a heartbeat came says nothing of entries: both would be held
    /// up by a slow disk for nothing. Only in a term that is not written yet they wait too: after a crash it could begin again.
    fn sort(&self, leading: Vec<Message>, following: Vec<Message>, promises: bool) -> (Vec<Message>, Vec<Message>) {
        if promises || self.unwritten.iter().any(|batch| batch.promises) {
            return (Vec::new(), [leading, following].concat());
        }
        let heard = |message: &Message| message.get_msg_type() == MessageType::MsgHeartbeatResponse;
        let (heard, behind): (Vec<_>, Vec<_>) = following.into_iter().partition(heard);
        ([leading, heard].concat(), behind)
    }

    /// The log is written up to the batch `number`, as the store said that it would be. [`Core::turn`] does what follows.
    pub fn written(&mut self, now: Now, number: u64, host: &mut H) {
        self.now = now;
        self.settle_writes(number, host);
    }

    fn settle_writes(&mut self, number: u64, host: &mut H) {
        while self.unwritten.front().is_some_and(|batch| batch.batch <= number)
            && let Some(batch) = self.unwritten.pop_front()
        {
            self.raw.on_persist_ready(batch.ready);
            self.send(batch.messages, host);
        }
    }

    fn unwritten_bytes(&self) -> usize {
        self.unwritten.iter().map(|batch| batch.bytes).sum()
    }

    /// Whether nobody but this voter counts on `entries`, and nothing that they tell of outlives loss of power. Term and vote
    /// are the log's own to sync.
    fn may_sync_later(&self, entries: &[Entry]) -> bool {
        let may = |entry: &Entry| {
            let logged = self.logged.iter().rev().find(|logged| logged.index == entry.index);
            logged.is_some_and(|logged| logged.outlives == Outlives::Process)
        };
        self.members().is_alone(self.me) && entries.iter().all(may)
    }

    fn role_changed(&mut self, host: &mut H) {
        let raft = &self.raw.raft;
        let leads = raft.state == StateRole::Leader;
        tracing::info!(member = self.me.0, term = raft.term, leader = raft.leader_id, role = ?raft.state, "role in the group");
        if leads && self.leader_from == 0 {
            // Nothing is proposed before this is known, so the last entry is the one that began the term.
            self.leader_from = raft.raft_log.last_index();
            self.reads.begin_term();
        }
        if !leads {
            self.leader_from = 0;
            (self.logged, self.logged_bytes) = Default::default();
            self.lose_leadership(host);
        }
    }

    /// Gives committed entries away, with those who wait for them.
    fn hand_over(&mut self, entries: Vec<Entry>, host: &mut H) -> Result<(), GroupError> {
        let Some(last) = entries.last().map(|entry| entry.index) else { return Ok(()) };
        while let Some(&Logged { index, bytes, .. }) = self.logged.front()
            && index <= last
        {
            self.logged_bytes -= bytes;
            self.logged.pop_front();
        }
        let mut committed = Vec::with_capacity(entries.len());
        for entry in entries {
            self.forwarding.enter_term(entry.term);
            committed.push(Committed { replies: self.waiting_for(&entry), entry });
        }
        host.apply(committed)
    }

    fn send(&mut self, messages: Vec<Message>, host: &mut H) {
        for message in messages {
            if let Some((target, lane, message)) = self.outgoing(message) {
                host.send(target, lane, message);
            }
        }
    }

    fn outgoing(&mut self, message: Message) -> Option<Outgoing> {
        let to = MemberId(message.to);
        let lane = match message.get_msg_type() {
            MessageType::MsgAppend | MessageType::MsgAppendResponse => Lane::Log,
            MessageType::MsgSnapshot => {
                self.offers.insert(to.0, self.now.boot);
                Lane::Log
            }
            _ => Lane::Beat,
        };
        let leads = self.raw.raft.state == StateRole::Leader;
        let sent = if leads { self.now.boot } else { 0 };
        let follows = self.followed.0 == self.raw.raft.term && self.followed.1 == to.0;
        let heard = if follows { (self.followed.0, self.followed.2) } else { (0, 0) };
        let message = message.write_to_bytes().ok()?;
        Some(self.envelope(to, lane, Body::Raft { sent, heard, message }))
    }

    fn post(&self, to: MemberId, lane: Lane, body: Body, host: &mut H) {
        let (target, lane, message) = self.envelope(to, lane, body);
        host.send(target, lane, message);
    }

    fn envelope(&self, to: MemberId, lane: Lane, body: Body) -> Outgoing {
        let envelope = Envelope { from: self.me, to, body };
        (to.node(), lane, envelope.encode(self.group()))
    }

    fn group(&self) -> envelope::Group {
        envelope::Group { cluster: self.config.cluster, epoch: self.config.epoch }
    }

    fn members(&self) -> &Members {
        self.raw.store().members()
    }

    fn leader(&self) -> Option<MemberId> {
        Some(self.raw.raft.leader_id).filter(|&id| id != 0).map(MemberId)
    }

    fn leads(&self) -> bool {
        self.raw.raft.state == StateRole::Leader
    }

    /// How this voter stands.
    #[must_use]
    pub fn view(&self) -> View {
        let (raft, log) = (&self.raw.raft, self.raw.store());
        let peer = |member: MemberId| Peer {
            member,
            heard: self.contacts.get(&member).copied().unwrap_or(0),
            matched: raft.prs().get(member.0).filter(|_| self.leads()).map_or(0, |peer| peer.matched),
        };
        View {
            role: match raft.state {
                StateRole::Leader => Role::Leader,
                StateRole::Candidate | StateRole::PreCandidate => Role::Candidate,
                StateRole::Follower if log.members().learners().contains(&self.me) => Role::Learner,
                StateRole::Follower => Role::Follower,
            },
            term: raft.term,
            leader: self.leader(),
            members: log.members().clone(),
            commit: raft.raft_log.committed,
            log_first: log.compacted().index + 1,
            log_last: log.last(),
            leader_from: if self.leads() { self.leader_from } else { 0 },
            lease_until: self.lease_until(),
            followed_until: self.followed_until(),
            peers: log.members().all().into_iter().filter(|&member| member != self.me).map(peer).collect(),
        }
    }
}
