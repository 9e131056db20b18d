//! The apply thread: runs committed commands through the state machine, in order, and answers those who wait.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};

use tidepool_metadata::catalog::EntryContext;
use tidepool_metadata::{LogIndex, Term};

use super::core::Committed;
use super::image::Dirty;
use super::inbox::Reply;
use super::log::Position;
use super::machine::StateMachine;
use super::shared::{Applied, Shared};
use crate::error::GroupError;

/// What the Raft thread gives.
pub(super) enum Turn<S: StateMachine> {
    Entries(Vec<Committed<Reply<S::Outcome>>>),
    /// A fetched snapshot takes the place of the state; the sender hears when it is durable, or is dropped.
    Install(Box<Applied<S>>, SyncSender<()>),
}

/// Runs until the Raft thread has ended and all that it gave is applied.
pub(super) fn run<S: StateMachine>(
    shared: &Arc<Shared<S>>,
    turns: &Receiver<Turn<S>>,
    dirty: &Dirty<S>,
) -> Result<(), GroupError> {
    while let Ok(turn) = turns.recv() {
        match turn {
            Turn::Entries(entries) => {
                for entry in entries {
                    // After a failure nothing is answered: what was not, may be applied after the next start.
                    if shared.failure().is_some() {
                        return Ok(());
                    }
                    apply(shared, entry)?;
                    dirty.mark();
                }
            }
            Turn::Install(state, done) => dirty.install(*state, done),
        }
        shared.inbox.made_room();
    }
    Ok(())
}

/// Applies one entry under one hold of the lock, so that readers see all of it or nothing.
fn apply<S: StateMachine>(shared: &Shared<S>, mut committed: Committed<Reply<S::Outcome>>) -> Result<(), GroupError> {
    let index = committed.index();
    let (term, bytes) = (committed.entry.term, committed.entry.data.len() as u64);
    let (mut time, mut commands, mut replies) = (None, Vec::new(), Vec::new());
    if let Some((stamp, found)) = committed.commands()? {
        time = Some(stamp);
        for (command, reply) in found {
            let undecodable = |source| GroupError::Undecodable { index, source: Box::new(source) };
            commands.push(S::decode(command).map_err(undecodable)?);
            replies.push(reply);
        }
    }
    let mut state = shared.state.write();
    assert_eq!(index.0, state.position.index + 1, "entries are applied in order");
    // A leader whose clock is behind its predecessor's may stamp less than what it has not applied yet.
    state.time = time.map_or(state.time, |time| time.max(state.time));
    let at = EntryContext { index, term: Term(term), time: state.time };
    let outcomes: Vec<S::Outcome> = commands.iter().map(|command| state.machine.apply(at, command)).collect();
    state.position = Position { index: index.0, term };
    state.bytes += bytes;
    shared.applied_bytes.store(state.bytes, Ordering::Release);
    drop(state);
    shared.applied_commands.fetch_add(commands.len() as u64, Ordering::AcqRel);

    shared.clock.at_least(at.time);
    shared.applied.send_replace(LogIndex(index.0));
    for (reply, outcome) in replies.into_iter().zip(outcomes) {
        if let Some(reply) = reply {
            // A caller that went away needs no answer.
            let _ = reply.send(Ok((index, outcome)));
        }
    }
    Ok(())
}
