//! The Raft thread: gives the [`Core`] what comes in and carries out what it decides.
//!
//! Group commit: all commands that wait share entries, and all entries of one turn share one write; what comes in during a write
//! is synced with the next one. So throughput grows with the number of callers and a lone caller waits for one write. Only a
//! voter that is alone writes on this thread.
//!
//! Messages are looked at before time is: after a long wait this voter does not take its own silence for the leader's.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Instant;

use tidepool_metadata::{LogIndex, NodeId};

use super::apply::Turn;
use super::clock;
use super::core::{Committed, Core, CoreConfig, Host, Now, TICK};
use super::inbox::{Changer, Input, Reader, Reply};
use super::log::{Log, LogStore, Position};
use super::machine::StateMachine;
use super::member::{MemberId, Members};
use super::shared::Shared;
use super::snapshot::Fetcher;
use super::transport::{Lane, Transport};
use crate::error::{CatalogError, GroupError};

/// Ticks that are made up for at a time: time that this thread lost is not the others' silence.
const TICKS_AT_ONCE: u32 = 4;

pub(super) struct Driver<S: StateMachine> {
    core: Core<Log, Threads<S>>,
    threads: Threads<S>,
    next_tick: Instant,
}

/// The other threads, as the core's host.
pub(super) struct Threads<S: StateMachine> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) apply: SyncSender<Turn<S>>,
    pub(super) fetcher: Fetcher<S>,
    /// Bytes of the entries given to the apply thread.
    handed_bytes: u64,
    /// Changes of members that have ended; told once the status shows them.
    settled: Vec<(Changer, Result<Members, CatalogError>)>,
}

impl<S: StateMachine> Threads<S> {
    pub(super) fn new(
        shared: Arc<Shared<S>>,
        transport: Arc<dyn Transport>,
        apply: SyncSender<Turn<S>>,
        fetcher: Fetcher<S>,
    ) -> Self {
        Self { shared, transport, apply, fetcher, handed_bytes: 0, settled: Vec::new() }
    }

    /// Bytes of entries that are logged and not applied; all that may be while the image lags behind.
    fn unapplied(&self) -> usize {
        let limits = &self.shared.limits;
        let applied = self.shared.applied_bytes.load(Ordering::Acquire);
        let flushed = self.shared.flushed_bytes.load(Ordering::Acquire);
        if self.handed_bytes - flushed >= limits.image_lag_bytes {
            return limits.in_flight_bytes;
        }
        usize::try_from(self.handed_bytes - applied).unwrap_or(usize::MAX)
    }
}

impl<S: StateMachine> Host for Threads<S> {
    type Reply = Reply<S::Outcome>;
    type Reader = Reader;
    type Changer = Changer;

    fn send(&mut self, target: NodeId, lane: Lane, message: Vec<u8>) {
        self.transport.send(target, lane, message);
    }

    fn committed(&mut self, index: LogIndex) {
        self.shared.commit.fetch_max(index.0, Ordering::AcqRel);
    }

    fn apply(&mut self, entries: Vec<Committed<Self::Reply>>) -> Result<(), GroupError> {
        self.handed_bytes += entries.iter().map(|committed| committed.entry.data.len() as u64).sum::<u64>();
        if let Some(last) = entries.last() {
            // Before they are applied: a status never shows more applied than committed.
            self.shared.committed(last.entry.index);
        }
        // The apply thread ends before this one only if the group failed; its cause is known then.
        self.apply.send(Turn::Entries(entries)).map_err(|_| GroupError::ThreadDied { thread: "apply" })
    }

    fn refuse(&mut self, reply: Self::Reply, error: CatalogError) {
        // A caller that went away needs no answer.
        let _ = reply.send(Err(error));
    }

    fn has_gone(&self, reply: &Self::Reply) -> bool {
        reply.is_closed()
    }

    fn serve_read(&mut self, reader: Reader, from: Result<LogIndex, CatalogError>) {
        let _ = reader.send(from);
    }

    fn settle(&mut self, changer: Changer, outcome: Result<Members, CatalogError>) {
        self.settled.push((changer, outcome));
    }

    fn fetch(&mut self, source: MemberId) {
        self.fetcher.begin(&self.shared, source);
    }

    fn install(&mut self, position: Position) -> Result<(), GroupError> {
        let staged =
            self.fetcher.take(position).ok_or(GroupError::CorruptImage { problem: "no snapshot was fetched" })?;
        self.shared.committed(position.index);
        let (done, installed) = sync_channel(1);
        let died = |_| GroupError::ThreadDied { thread: "apply" };
        self.apply.send(Turn::Install(Box::new(staged), done)).map_err(died)?;
        installed.recv().map_err(|_| GroupError::ThreadDied { thread: "image" })
    }
}

impl<S: StateMachine> Driver<S> {
    pub(super) fn new(mut log: Log, threads: Threads<S>) -> Result<Self, GroupError> {
        let shared = &threads.shared;
        let applied = shared.state.read().position.index;
        log.set_flushed(applied);
        let config = CoreConfig {
            cluster: shared.config.cluster,
            epoch: shared.config.epoch,
            voters: shared.config.voters,
            reads: shared.config.reads,
            in_flight_bytes: shared.limits.in_flight_bytes,
            // Far above what an earlier life can have used: a million proposals a millisecond.
            sequence: shared.clock.now().0 << 20,
        };
        let core = Core::new(config, log, applied, now(shared))?;
        shared.report(core.view());
        Ok(Self { core, threads, next_tick: Instant::now() + TICK })
    }

    /// Runs until the group stops or fails.
    pub(super) fn run(mut self) {
        if let Err(error) = self.turns() {
            // Before what waits is dropped with `self`: whoever waits for it learns the cause.
            self.threads.shared.fail(error);
        }
        self.core.refuse_unrouted(&CatalogError::ShuttingDown, &mut self.threads);
    }

    fn turns(&mut self) -> Result<(), GroupError> {
        loop {
            self.core.turn(now(&self.threads.shared), &mut self.threads)?;
            self.threads.shared.report(self.core.view());
            for (changer, outcome) in self.threads.settled.drain(..) {
                // Whoever asked may have gone away.
                let _ = changer.send(outcome);
            }
            if self.core.wants_turn() {
                continue;
            }
            let deadline = self.core.needs_ticks().then_some(self.next_tick);
            let input = self.threads.shared.inbox.take(|| self.core.room(self.threads.unapplied()), deadline);
            if input.stop {
                return Ok(());
            }
            self.take(input)?;
            self.tick();
        }
    }

    fn take(&mut self, input: Input<S::Outcome>) -> Result<(), GroupError> {
        let Self { core, threads, .. } = self;
        let Input { proposals, messages, reads, changes, fetched, flushed, written, stop: _ } = input;
        let now = now(&threads.shared);
        if let Some(number) = written {
            core.written(now, number, threads);
        }
        for message in messages {
            core.receive(now, &message, threads)?;
        }
        for proposal in proposals {
            core.propose(now, proposal.command, proposal.items, proposal.outlives, proposal.reply);
        }
        reads.into_iter().for_each(|reader| core.read(now, reader));
        changes.into_iter().for_each(|(change, changer)| core.change(now, change, changer, threads));
        if let Some(LogIndex(index)) = flushed {
            core.store_mut().set_flushed(index);
            core.store_mut().compact(index)?;
        }
        if let Some(found) = fetched {
            core.turn(now, threads)?;
            core.fetched(now, found, threads)?;
        }
        Ok(())
    }

    /// Lets the core know of the time that has passed, some of it at least.
    fn tick(&mut self) {
        let instant = Instant::now();
        for _ in 0..TICKS_AT_ONCE {
            if self.next_tick > instant {
                return;
            }
            self.next_tick += TICK;
            self.core.tick(now(&self.threads.shared), &mut self.threads);
        }
        self.next_tick = self.next_tick.max(instant);
    }
}

fn now<S: StateMachine>(shared: &Shared<S>) -> Now {
    Now { boot: clock::boot_nanos(), log: shared.clock.now() }
}
