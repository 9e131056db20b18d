//! From which index a linearizable read may be answered.
//!
//! A leader answers with its commit index, once it has committed an entry of its own term and knows that nobody else led when
//! the read began: a quorum has followed it since (each message of a leader carries when it was sent, and each answer
//! brings that back), or followed it so lately that no other can have been elected (the leader lease, unless reads are to go by
//! quorum). Other members ask the leader. A read of a leader's own state within the lease does not even come here.
//!
//! The lease rests on clocks that run about equally fast, and on members that do not vote for one election timeout after they
//! heard from the leader, nor after they started. It ends before leadership is handed over.

use std::collections::BTreeMap;

use tidepool_metadata::LogIndex;

use super::{Core, Host, LEASE_NANOS, Now};
use crate::consensus::config::LeaderReads;
use crate::consensus::envelope::Body;
use crate::consensus::log::LogStore;
use crate::consensus::member::MemberId;
use crate::consensus::transport::Lane;

/// After how long without an answer the leader is asked again.
const ASK_AGAIN_NANOS: u64 = 100_000_000;
/// Reads of other members that wait here; above that they ask again.
const REMOTE_READS: usize = 4096;

/// Who waits for an index.
enum Reader<T> {
    Here(T),
    There(MemberId, u64),
}

pub(super) struct Reads<T> {
    /// Those that no leader was asked for, and since when.
    waiting: Vec<(u64, Reader<T>)>,
    /// Those that a leader was asked for: when, and who waits.
    asked: BTreeMap<u64, (u64, Vec<T>)>,
    ticket: u64,
    /// By the leader's clock: when it sent what each member has followed.
    followed: BTreeMap<MemberId, u64>,
    pinged: u64,
    /// Leadership is being handed over: the leader lease is over in this term.
    handing_over: bool,
}

impl<T> Default for Reads<T> {
    fn default() -> Self {
        Self {
            waiting: Vec::new(),
            asked: BTreeMap::new(),
            ticket: 0,
            followed: BTreeMap::new(),
            pinged: 0,
            handing_over: false,
        }
    }
}

impl<T> Reads<T> {
    pub(super) fn begin_term(&mut self) {
        self.followed.clear();
        self.handing_over = false;
        self.unask();
    }

    pub(super) fn hand_over(&mut self) {
        self.handing_over = true;
    }

    pub(super) fn acknowledge(&mut self, from: MemberId, sent: u64) {
        let followed = self.followed.entry(from).or_default();
        *followed = sent.max(*followed);
    }

    /// Members that have followed this leader, and when it had sent what they followed.
    pub(super) fn followed(&self, member: MemberId) -> Option<u64> {
        self.followed.get(&member).copied()
    }

    fn unask(&mut self) {
        for (_, (since, readers)) in std::mem::take(&mut self.asked) {
            self.waiting.extend(readers.into_iter().map(|reader| (since, Reader::Here(reader))));
        }
    }
}

impl<L: LogStore, H: Host> Core<L, H> {
    /// Asks from which index `reader` may be answered; [`Core::turn`] sees to it.
    pub fn read(&mut self, now: Now, reader: H::Reader) {
        // Else it would seem to be as old as the last turn, and what was heard since then to be newer than it.
        self.now = now;
        self.reads.waiting.push((self.now.boot, Reader::Here(reader)));
    }

    pub(super) fn asked_for_index(&mut self, from: MemberId, term: u64, ticket: u64) {
        if self.leads() && self.raw.raft.term == term && self.reads.waiting.len() < REMOTE_READS {
            self.reads.waiting.push((self.now.boot, Reader::There(from, ticket)));
        }
    }

    pub(super) fn index_came(&mut self, ticket: u64, index: u64, host: &mut H) {
        if let Some((_, readers)) = self.reads.asked.remove(&ticket) {
            readers.into_iter().for_each(|reader| host.serve_read(reader, Ok(LogIndex(index))));
        }
    }

    /// By this leader's clock: what it sent then, a quorum has followed.
    fn quorum_followed(&self) -> u64 {
        let followed = |member| if member == self.me { Some(self.now.boot) } else { self.reads.followed(member) };
        self.members().quorum(followed).unwrap_or(0)
    }

    fn has_committed_in_term(&self) -> bool {
        self.leads() && self.leader_from > 0 && self.raw.raft.raft_log.committed >= self.leader_from
    }

    /// Until when reads may take it for certain that this voter leads; 0: it does not, or has to ask.
    pub(super) fn lease_until(&self) -> u64 {
        match (self.followed_until(), self.config.reads) {
            (u64::MAX, _) => u64::MAX,
            (until, LeaderReads::Lease) => until,
            (_, LeaderReads::Quorum) => 0,
        }
    }

    /// Until when no other voter can be elected, if this one leads.
    pub(super) fn followed_until(&self) -> u64 {
        if !self.has_committed_in_term() || self.reads.handing_over {
            return 0;
        }
        if self.members().is_alone(self.me) && !self.raw.raft.has_pending_conf() {
            return u64::MAX;
        }
        self.quorum_followed() + LEASE_NANOS
    }

    /// Answers the reads that can be, and asks for what the others need.
    pub(super) fn serve_reads(&mut self, host: &mut H) {
        if self.reads.waiting.is_empty() {
            return;
        }
        if !self.leads() {
            return self.ask_leader(host);
        }
        if !self.has_committed_in_term() {
            return;
        }
        let commit = self.raw.raft.raft_log.committed;
        let followed = if self.now.boot < self.lease_until() { u64::MAX } else { self.quorum_followed() };
        let mut newest = 0;
        for (since, reader) in std::mem::take(&mut self.reads.waiting) {
            if since > followed {
                newest = newest.max(since);
                self.reads.waiting.push((since, reader));
                continue;
            }
            match reader {
                Reader::Here(reader) => host.serve_read(reader, Ok(LogIndex(commit))),
                Reader::There(from, ticket) => {
                    self.post(from, Lane::Call, Body::ReadAnswer { ticket, index: commit }, host);
                }
            }
        }
        if newest > self.reads.pinged {
            self.reads.pinged = self.now.boot;
            self.raw.ping();
        }
    }

    fn ask_leader(&mut self, host: &mut H) {
        // Others' reads went to a leader that is none: they ask the next one.
        self.reads.waiting.retain(|(_, reader)| matches!(reader, Reader::Here(_)));
        let Some(leader) = self.leader().filter(|_| !self.reads.waiting.is_empty()) else { return };
        self.reads.ticket += 1;
        let waiting = std::mem::take(&mut self.reads.waiting).into_iter();
        let readers = waiting.filter_map(|(_, reader)| match reader {
            Reader::Here(reader) => Some(reader),
            Reader::There(..) => None,
        });
        self.reads.asked.insert(self.reads.ticket, (self.now.boot, readers.collect()));
        let body = Body::ReadIndex { term: self.raw.raft.term, ticket: self.reads.ticket };
        self.post(leader, Lane::Call, body, host);
    }

    /// Asks again what was not answered. Who waits gives up by itself.
    pub(super) fn tend_reads(&mut self) {
        let late = self.now.boot.saturating_sub(ASK_AGAIN_NANOS);
        if self.leads() || self.reads.asked.values().any(|(asked, _)| *asked < late) {
            self.reads.unask();
        }
    }
}
