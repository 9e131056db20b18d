//! What the threads of a group and its callers share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tidepool_metadata::{LogIndex, LogTime, NodeId, Term};
use tokio::sync::watch;

use super::ClusterId;
use super::ballast::Ballast;
use super::clock::{self, LogClock};
use super::config::{GroupConfig, GroupLimits};
use super::core::{Peer, View};
use super::inbox::Inbox;
use super::log::Position;
use super::machine::StateMachine;
use super::member::{MemberId, Members};
use crate::error::{CatalogError, GroupError};

/// How lately a follower must have heard from its leader to count as in contact: the shortest election timeout.
const CONTACT: Duration = Duration::from_millis(200);

/// After how long without a leader a voter counts as cut off: some elections.
const CUT_OFF_NANOS: u64 = 1_000_000_000;

/// What a voter does in the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Takes entries from the leader, without a vote.
    Learner,
    /// Takes entries from the leader.
    #[default]
    Follower,
    /// Asks for votes.
    Candidate,
    /// Orders the commands.
    Leader,
}

impl Role {
    /// The role's name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Learner => "learner",
            Self::Follower => "follower",
            Self::Candidate => "candidate",
            Self::Leader => "leader",
        }
    }
}

/// How a voter stands.
#[derive(Clone, Debug)]
pub struct GroupStatus {
    /// Which cluster.
    pub cluster: ClusterId,
    /// Which voter.
    pub node: NodeId,
    /// What it does.
    pub role: Role,
    /// In which term.
    pub term: Term,
    /// Who leads, as far as it knows.
    pub leader: Option<NodeId>,
    /// All voters.
    pub voters: Vec<NodeId>,
    /// All learners.
    pub learners: Vec<NodeId>,
    /// Voters and learners, by the logs that they have.
    pub members: Members,
    /// A quorum follows this leader, or the leader was heard from within an election timeout.
    pub in_contact: bool,
    /// The other members: how long ago each was heard from (`None`: never), and, from the leader, up to where its log agrees.
    pub peers: Vec<(NodeId, Option<Duration>, LogIndex)>,
    /// Last entry known to be committed.
    pub commit: LogIndex,
    /// Last entry whose effects reads see.
    pub applied: LogIndex,
    /// First entry that the log still has; one behind the last one if it has none.
    pub log_first: LogIndex,
    /// Last entry of the log.
    pub log_last: LogIndex,
    /// The image has the effects of all entries up to here on disk.
    pub image: LogIndex,
    /// Bytes of applied entries that the image has not on disk yet: what a start would replay.
    pub image_lag_bytes: u64,
    /// Bytes of the entries applied since the start.
    pub applied_bytes: u64,
    /// Commands applied since the start.
    pub applied_commands: u64,
    /// Commands that wait to be logged.
    pub waiting: usize,
    /// Bytes that are free on the catalog's disk, if they are too few for it to grow.
    pub disk_shortage: Option<u64>,
    /// Why the group serves nothing any more.
    pub failure: Option<Arc<GroupError>>,
}

/// The state machine, and how far it is.
pub(super) struct Applied<S> {
    pub(super) machine: S,
    pub(super) position: Position,
    /// Stamp of the last entry.
    pub(super) time: LogTime,
    /// Bytes of all entries applied since the start.
    pub(super) bytes: u64,
}

pub(super) struct Shared<S: StateMachine> {
    pub(super) config: GroupConfig,
    pub(super) limits: GroupLimits,
    pub(super) ballast: Ballast,
    pub(super) inbox: Inbox<S::Outcome>,
    /// Written by the apply thread, and by the image thread to take changes; read by callers.
    pub(super) state: RwLock<Applied<S>>,
    /// Follows `state`, for those who wait.
    pub(super) applied: watch::Sender<LogIndex>,
    pub(super) applied_bytes: AtomicU64,
    pub(super) applied_commands: AtomicU64,
    pub(super) flushed: AtomicU64,
    pub(super) flushed_bytes: AtomicU64,
    /// While this voter leads: index of the first entry of its term. Once that is applied, so is all that was
    /// acknowledged before. 0: it does not lead.
    pub(super) leader_from: AtomicU64,
    /// Last entry known to be committed, before anybody else learns that from here.
    pub(super) commit: AtomicU64,
    /// Until when (`CLOCK_BOOTTIME`) this voter certainly leads.
    pub(super) lease_until: AtomicU64,
    /// When it last heard from its leader; while it leads, until when it certainly does.
    contact: AtomicU64,
    /// Everything that was acknowledged to anybody before this instant (`CLOCK_BOOTTIME`) is applied here.
    pub(super) confirmed: AtomicU64,
    started: u64,
    pub(super) clock: LogClock,
    raft: Mutex<View>,
    stopping: AtomicBool,
    failure: OnceLock<Arc<GroupError>>,
    /// Threads that still run.
    running: watch::Sender<usize>,
}

impl<S: StateMachine> Shared<S> {
    pub(super) fn new(config: GroupConfig, limits: GroupLimits, ballast: Ballast, state: Applied<S>) -> Self {
        let index = state.position.index;
        let clock = LogClock::new();
        clock.at_least(state.time);
        Self {
            inbox: Inbox::new(&limits),
            applied: watch::channel(LogIndex(index)).0,
            applied_bytes: AtomicU64::new(0),
            applied_commands: AtomicU64::new(0),
            flushed: AtomicU64::new(index),
            flushed_bytes: AtomicU64::new(0),
            leader_from: AtomicU64::new(0),
            commit: AtomicU64::new(index),
            lease_until: AtomicU64::new(0),
            contact: AtomicU64::new(0),
            confirmed: AtomicU64::new(0),
            started: clock::boot_nanos(),
            clock,
            raft: Mutex::default(),
            stopping: AtomicBool::new(false),
            failure: OnceLock::new(),
            running: watch::channel(0).0,
            state: RwLock::new(state),
            config,
            limits,
            ballast,
        }
    }

    /// Ends the group: the first cause stays.
    pub(super) fn fail(&self, error: GroupError) {
        let cause = self.failure.get_or_init(|| {
            tracing::error!(node = %self.config.node, %error, "the group fails and stops serving");
            Arc::new(error)
        });
        let cause = Arc::clone(cause);
        self.inbox.close(&CatalogError::Failed { cause, proposed: false });
        self.wake_readers();
    }

    pub(super) fn failure(&self) -> Option<&Arc<GroupError>> {
        self.failure.get()
    }

    /// Takes no more proposals and ends the threads in order, with the image flushed.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.inbox.close(&CatalogError::ShuttingDown);
        self.wake_readers();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// What the Raft thread knows now. Leadership ends here before anybody else can have it.
    pub(super) fn report(&self, view: View) {
        self.lease_until.store(view.lease_until, Ordering::Release);
        self.leader_from.store(view.leader_from, Ordering::Release);
        let leader = view.peers.iter().find(|peer| Some(peer.member) == view.leader);
        let heard = leader.map_or(0, |peer| peer.heard);
        self.contact.store(view.followed_until.max(heard), Ordering::Release);
        *self.raft.lock() = view;
    }

    /// Whether nobody has led this voter for longer than an election takes.
    pub(super) fn is_cut_off(&self) -> bool {
        let contact = self.contact.load(Ordering::Acquire).max(self.started);
        clock::boot_nanos().saturating_sub(CUT_OFF_NANOS) > contact
    }

    /// Whether this voter leads, and a quorum has followed it so lately that no other can have been elected.
    pub(super) fn is_followed(&self) -> bool {
        let raft = self.raft.lock();
        raft.leader_from > 0 && clock::boot_nanos() < raft.followed_until
    }

    /// Entries up to here are committed.
    pub(super) fn committed(&self, index: u64) {
        let mut view = self.raft.lock();
        view.commit = view.commit.max(index);
        view.log_last = view.log_last.max(index);
    }

    pub(super) fn member_of(&self, node: NodeId) -> Option<MemberId> {
        self.raft.lock().members.of(node)
    }

    pub(super) fn leader(&self) -> Option<MemberId> {
        self.raft.lock().leader
    }

    pub(super) fn members(&self) -> Members {
        self.raft.lock().members.clone()
    }

    fn wake_readers(&self) {
        self.applied.send_modify(|_| ());
    }

    pub(super) fn watch_running(&self) -> watch::Receiver<usize> {
        self.running.subscribe()
    }

    pub(super) fn status(&self) -> GroupStatus {
        // From behind to ahead, so that what moves in between keeps `image <= applied <= commit`.
        let image = LogIndex(self.flushed.load(Ordering::Acquire));
        let flushed_bytes = self.flushed_bytes.load(Ordering::Acquire);
        let applied = *self.applied.borrow();
        let raft = self.raft.lock().clone();
        let now = clock::boot_nanos();
        let nodes = |members: Vec<MemberId>| members.into_iter().map(MemberId::node).collect::<Vec<_>>();
        let age = |heard: u64| (heard > 0).then(|| Duration::from_nanos(now.saturating_sub(heard)));
        let is_recent =
            |peer: &Peer| Some(peer.member) == raft.leader && age(peer.heard).is_some_and(|age| age < CONTACT);
        let in_contact = raft.followed_until > now || raft.peers.iter().any(is_recent);
        GroupStatus {
            cluster: self.config.cluster,
            node: self.config.node,
            role: raft.role,
            term: Term(raft.term),
            leader: raft.leader.map(MemberId::node),
            voters: nodes(raft.members.voters()),
            learners: nodes(raft.members.learners()),
            in_contact,
            peers: raft
                .peers
                .iter()
                .map(|peer| (peer.member.node(), age(peer.heard), LogIndex(peer.matched)))
                .collect(),
            members: raft.members,
            commit: LogIndex(raft.commit),
            applied,
            log_first: LogIndex(raft.log_first),
            log_last: LogIndex(raft.log_last),
            image,
            applied_bytes: self.applied_bytes.load(Ordering::Acquire),
            applied_commands: self.applied_commands.load(Ordering::Acquire),
            image_lag_bytes: self.applied_bytes.load(Ordering::Acquire).saturating_sub(flushed_bytes),
            waiting: self.inbox.waiting(),
            disk_shortage: self.ballast.shortage(),
            failure: self.failure.get().cloned(),
        }
    }
}

/// Lives as long as one thread of the group; a panic fails the group.
pub(super) struct ThreadGuard<S: StateMachine> {
    shared: Arc<Shared<S>>,
    thread: &'static str,
}

impl<S: StateMachine> ThreadGuard<S> {
    pub(super) fn new(shared: &Arc<Shared<S>>, thread: &'static str) -> Self {
        shared.running.send_modify(|running| *running += 1);
        Self { shared: Arc::clone(shared), thread }
    }
}

impl<S: StateMachine> Drop for ThreadGuard<S> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.fail(GroupError::ThreadDied { thread: self.thread });
        }
        self.shared.running.send_modify(|running| *running -= 1);
    }
}
