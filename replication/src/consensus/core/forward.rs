//! Commands on their way into the log, whoever leads.
//!
//! A command is logged at most once. It gets a number here and is given to the leader of one term, who logs it only in that
//! term, and only once under its number. It counts as done when it is applied here. Once an entry of a later term is
//! committed, what was given to an earlier one and was not seen can never be: terms in the log do not fall. Only then, or if it
//! was never given to anybody, may it go to the next leader. So a change of leaders costs time and nothing else, and a
//! message that is lost is sent again with the same number.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use raft::eraftpb::{Entry, EntryType};
use tidepool_metadata::catalog::MAX_COMMAND_ITEMS;

use super::{Core, Host, Logged, Now};
use crate::consensus::config::Outlives;
use crate::consensus::entry::{self, Origin};
use crate::consensus::envelope::{Body, Forwarded};
use crate::consensus::log::LogStore;
use crate::consensus::member::MemberId;
use crate::consensus::transport::Lane;
use crate::error::{CatalogError, GroupError};

/// Bytes of commands in one message: a heartbeat of the same connection waits for one of them at most.
const MESSAGE_BYTES: usize = 256 << 10;
/// After how long without an answer a command is sent again; lost messages are rare, and an answer takes a synced write.
const RESEND_NANOS: u64 = 500_000_000;
/// How long a command waits for a leader.
const LEADERLESS_NANOS: u64 = 5_000_000_000;
/// How long a command that a leader has waits for its outcome.
const OUTCOME_NANOS: u64 = 15_000_000_000;
/// How often all that waits is looked at, in ticks.
const TEND_TICKS: u64 = 20;

/// A command of a caller of this member.
struct Waiting<R> {
    command: Vec<u8>,
    items: usize,
    outlives: Outlives,
    reply: R,
    /// In which term it may be logged; 0: nobody has it.
    term: u64,
    since: u64,
    sent: u64,
}

/// A command of another member, to be logged here.
struct Accepted {
    origin: Origin,
    items: usize,
    command: Vec<u8>,
}

/// What one member's numbers were in this term.
#[derive(Default)]
struct Seen {
    lowest: u64,
    numbers: BTreeSet<u64>,
}

pub(super) struct Forwarding<R> {
    waiting: BTreeMap<u64, Waiting<R>>,
    waiting_bytes: usize,
    /// Those with term 0, in order.
    unrouted: VecDeque<u64>,
    sequence: u64,
    accepted: VecDeque<Accepted>,
    accepted_bytes: usize,
    seen: BTreeMap<MemberId, Seen>,
    /// The highest term of any entry that was handed over.
    term: u64,
    own_turn: bool,
}

impl<R> Forwarding<R> {
    pub(super) fn new(sequence: u64) -> Self {
        Self {
            waiting: BTreeMap::new(),
            waiting_bytes: 0,
            unrouted: VecDeque::new(),
            sequence,
            accepted: VecDeque::new(),
            accepted_bytes: 0,
            seen: BTreeMap::new(),
            term: 0,
            own_turn: true,
        }
    }

    /// An entry of `term` is handed over: what was given to leaders of earlier terms and is not there will never be.
    pub(super) fn enter_term(&mut self, term: u64) {
        if term <= self.term {
            return;
        }
        self.term = term;
        for (&sequence, waiting) in &mut self.waiting {
            if waiting.term != 0 && waiting.term < term {
                waiting.term = 0;
                self.unrouted.push_back(sequence);
            }
        }
    }

    fn remove(&mut self, sequence: u64) -> Option<Waiting<R>> {
        let waiting = self.waiting.remove(&sequence)?;
        self.waiting_bytes -= waiting.command.len();
        Some(waiting)
    }

    fn take_unrouted(&mut self) -> Option<u64> {
        while let Some(sequence) = self.unrouted.pop_front() {
            if self.waiting.get(&sequence).is_some_and(|waiting| waiting.term == 0) {
                return Some(sequence);
            }
        }
        None
    }
}

impl<L: LogStore, H: Host> Core<L, H> {
    /// Takes a command of so many items; [`Core::turn`] sends it on its way.
    pub fn propose(&mut self, now: Now, command: Vec<u8>, items: usize, outlives: Outlives, reply: H::Reply) {
        // It may have slept for long: nothing else tells it the time before it looks who has waited for too long.
        self.now = now;
        let forwarding = &mut self.forwarding;
        forwarding.sequence += 1;
        forwarding.waiting_bytes += command.len();
        forwarding.unrouted.push_back(forwarding.sequence);
        let waiting = Waiting { command, items, outlives, reply, term: 0, since: self.now.boot, sent: 0 };
        forwarding.waiting.insert(forwarding.sequence, waiting);
    }

    /// Bytes of commands that may be proposed now; `unapplied`: of entries that the host has not applied.
    #[must_use]
    pub fn room(&self, unapplied: usize) -> usize {
        let taken = self.forwarding.waiting_bytes.max(self.logged_bytes) + unapplied;
        self.config.in_flight_bytes.saturating_sub(taken)
    }

    /// Refuses what nobody has been given yet: the voter stops.
    pub fn refuse_unrouted(&mut self, error: &CatalogError, host: &mut H) {
        while let Some(sequence) = self.forwarding.take_unrouted() {
            if let Some(waiting) = self.forwarding.remove(sequence) {
                host.refuse(waiting.reply, error.clone());
            }
        }
    }

    /// Gives commands to whoever leads.
    pub(super) fn route(&mut self, host: &mut H) -> Result<(), GroupError> {
        if self.leads() {
            // Not before the first entry of the term is known for what it is.
            return if self.leader_from > 0 { self.log_commands(host) } else { Ok(()) };
        }
        if self.forwarding.unrouted.is_empty() {
            return Ok(());
        }
        if let Some(leader) = self.leader() {
            let mut sequences = Vec::new();
            while let Some(sequence) = self.forwarding.take_unrouted() {
                sequences.push(sequence);
            }
            self.forward(leader, &sequences, host);
        }
        Ok(())
    }

    fn forward(&mut self, leader: MemberId, sequences: &[u64], host: &mut H) {
        let (term, now) = (self.raw.raft.term, self.now.boot);
        let lowest = self.forwarding.waiting.keys().next().copied().unwrap_or(0);
        let (mut commands, mut bytes) = (Vec::new(), 0);
        let mut messages = Vec::new();
        for &sequence in sequences {
            let Some(waiting) = self.forwarding.waiting.get_mut(&sequence) else { continue };
            if host.has_gone(&waiting.reply) && waiting.term == 0 {
                self.forwarding.remove(sequence);
                continue;
            }
            (waiting.term, waiting.sent) = (term, now);
            bytes += waiting.command.len();
            let items = u32::try_from(waiting.items).unwrap_or(u32::MAX);
            commands.push(Forwarded { sequence, items, command: waiting.command.clone() });
            if bytes >= MESSAGE_BYTES {
                messages.push(std::mem::take(&mut commands));
                bytes = 0;
            }
        }
        messages.push(commands);
        for commands in messages.into_iter().filter(|commands| !commands.is_empty()) {
            self.post(leader, Lane::Call, Body::Forward { term, lowest, commands }, host);
        }
    }

    /// Another member's commands, to be logged in exactly that term.
    pub(super) fn accept(&mut self, from: MemberId, term: u64, lowest: u64, commands: Vec<Forwarded>, host: &mut H) {
        if !self.leads() || self.raw.raft.term != term {
            // The sender finds out by the next term's first entry, or sends again.
            return;
        }
        let seen = self.forwarding.seen.entry(from).or_default();
        if lowest > seen.lowest {
            seen.lowest = lowest;
            seen.numbers = seen.numbers.split_off(&lowest);
        }
        let mut refused = Vec::new();
        for Forwarded { sequence, items, command } in commands {
            let seen = self.forwarding.seen.entry(from).or_default();
            if sequence < seen.lowest || seen.numbers.contains(&sequence) {
                continue;
            }
            if self.forwarding.accepted_bytes + command.len() > 2 * self.config.in_flight_bytes {
                refused.push(sequence);
                continue;
            }
            seen.numbers.insert(sequence);
            self.forwarding.accepted_bytes += command.len();
            let origin = Origin { member: from, sequence };
            self.forwarding.accepted.push_back(Accepted { origin, items: items as usize, command });
        }
        if !refused.is_empty() {
            self.post(from, Lane::Call, Body::Refuse { term, sequences: refused }, host);
        }
    }

    /// The leader has too much to do: callers hear it at once.
    pub(super) fn refused(&mut self, term: u64, sequences: &[u64], host: &mut H) {
        let (commands, bytes) = (self.forwarding.waiting.len(), self.forwarding.waiting_bytes);
        for &sequence in sequences {
            if self.forwarding.waiting.get(&sequence).is_some_and(|waiting| waiting.term == term)
                && let Some(waiting) = self.forwarding.remove(sequence)
            {
                host.refuse(waiting.reply, CatalogError::Overloaded { commands, bytes });
            }
        }
    }

    /// Packs commands into as few entries as they fit.
    fn log_commands(&mut self, host: &mut H) -> Result<(), GroupError> {
        if self.raw.raft.lead_transferee.is_some() {
            return Ok(());
        }
        loop {
            let mut writer = entry::Writer::new(self.now.log, 4 << 10);
            let (mut origins, mut items, mut count) = (Vec::new(), 0, 0);
            let mut outlives = Outlives::Process;
            while self.logged_bytes < self.config.in_flight_bytes
                && let Some((is_own, length, more)) = self.next_command(host)
                && (count == 0 || writer.fits(length) && items + more <= MAX_COMMAND_ITEMS)
            {
                items += more;
                count += 1;
                if is_own {
                    if let Some((origin, own)) = self.push_own(&mut writer) {
                        origins.push(origin);
                        outlives = outlives.max(own);
                    }
                } else if let Some(accepted) = self.forwarding.accepted.pop_front() {
                    self.forwarding.accepted_bytes -= accepted.command.len();
                    writer.push(accepted.origin, &accepted.command);
                    origins.push(accepted.origin);
                    outlives = Outlives::Power;
                }
            }
            if count == 0 {
                return Ok(());
            }
            self.append(writer.finish(), &origins, outlives)?;
        }
    }

    /// What comes next: whether it is one of this member's, its length and its items. Both sides take turns.
    fn next_command(&mut self, host: &H) -> Option<(bool, usize, usize)> {
        let own = loop {
            let Some(&sequence) = self.forwarding.unrouted.front() else { break None };
            match self.forwarding.waiting.get(&sequence) {
                Some(waiting) if waiting.term == 0 && !host.has_gone(&waiting.reply) => {
                    break Some((true, waiting.command.len(), waiting.items));
                }
                Some(waiting) if waiting.term == 0 => drop(self.forwarding.remove(sequence)),
                _ => {}
            }
            self.forwarding.unrouted.pop_front();
        };
        let other = self.forwarding.accepted.front().map(|accepted| (false, accepted.command.len(), accepted.items));
        self.forwarding.own_turn = !self.forwarding.own_turn;
        if self.forwarding.own_turn { own.or(other) } else { other.or(own) }
    }

    fn push_own(&mut self, writer: &mut entry::Writer) -> Option<(Origin, Outlives)> {
        let sequence = self.forwarding.unrouted.pop_front()?;
        let waiting = self.forwarding.waiting.get_mut(&sequence)?;
        waiting.term = self.raw.raft.term;
        let origin = Origin { member: self.me, sequence };
        writer.push(origin, &waiting.command);
        Some((origin, waiting.outlives))
    }

    fn append(&mut self, payload: Vec<u8>, origins: &[Origin], outlives: Outlives) -> Result<(), GroupError> {
        let bytes = payload.len();
        match self.raw.propose(Vec::new(), payload) {
            Ok(()) => {
                let index = self.raw.raft.raft_log.last_index();
                self.logged.push_back(Logged { index, bytes, outlives });
                self.logged_bytes += bytes;
            }
            Err(raft::Error::ProposalDropped) => {
                // Not logged: others send theirs again, or learn of the next term.
                for &Origin { member, sequence } in origins {
                    if member != self.me {
                        self.forwarding.seen.entry(member).or_default().numbers.remove(&sequence);
                    } else if let Some(waiting) = self.forwarding.waiting.get_mut(&sequence) {
                        waiting.term = 0;
                        self.forwarding.unrouted.push_back(sequence);
                    }
                }
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Who waits for the commands of a committed entry.
    pub(super) fn waiting_for(&mut self, entry: &Entry) -> Vec<Option<H::Reply>> {
        if self.forwarding.waiting.is_empty() || entry.get_entry_type() != EntryType::EntryNormal {
            return Vec::new();
        }
        let (me, forwarding) = (self.me, &mut self.forwarding);
        let mine = |origin: Origin| {
            if origin.member == me { forwarding.remove(origin.sequence).map(|waiting| waiting.reply) } else { None }
        };
        entry::origins(&entry.data).map(mine).collect()
    }

    /// A snapshot took the place of entries: what was in them is not known.
    pub(super) fn forget_outcomes(&mut self, host: &mut H) {
        let given: Vec<u64> = self
            .forwarding
            .waiting
            .iter()
            .filter(|(_, waiting)| waiting.term != 0)
            .map(|(&sequence, _)| sequence)
            .collect();
        for sequence in given {
            if let Some(waiting) = self.forwarding.remove(sequence) {
                host.refuse(waiting.reply, CatalogError::OutcomeUnknown);
            }
        }
    }

    /// What others gave to this leader is theirs to give to the next one.
    pub(super) fn drop_accepted(&mut self) {
        self.forwarding.accepted.clear();
        self.forwarding.accepted_bytes = 0;
        self.forwarding.seen.clear();
    }

    /// Sends again what may be lost, and gives up what waited too long.
    pub(super) fn tend_forwarding(&mut self, host: &mut H) {
        if !self.ticks.is_multiple_of(TEND_TICKS) {
            return;
        }
        let (now, term, leads) = (self.now.boot, self.raw.raft.term, self.leads());
        let (mut again, mut late) = (Vec::new(), Vec::new());
        for (&sequence, waiting) in &self.forwarding.waiting {
            let patience = if waiting.term == 0 { LEADERLESS_NANOS } else { OUTCOME_NANOS };
            if now.saturating_sub(waiting.since) > patience {
                late.push(sequence);
            } else if waiting.term == term && !leads && now.saturating_sub(waiting.sent) > RESEND_NANOS {
                again.push(sequence);
            }
        }
        let leader = self.leader();
        for sequence in late {
            if let Some(waiting) = self.forwarding.remove(sequence) {
                let error = match waiting.term {
                    0 => CatalogError::NotLeader { leader: leader.map(MemberId::node) },
                    _ => CatalogError::OutcomeUnknown,
                };
                host.refuse(waiting.reply, error);
            }
        }
        if let Some(leader) = leader.filter(|_| !again.is_empty()) {
            self.forward(leader, &again, host);
        }
    }
}
