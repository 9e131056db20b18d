//! The apply thread: runs committed commands through the state machine, in order, and answers those who wait.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;

use raft::eraftpb::EntryType;
use tidepool_metadata::LogIndex;
use tidepool_metadata::catalog::EntryContext;

use super::driver::{Committed, answer};
use super::entry;
use super::image::Dirty;
use super::log::Position;
use super::machine::StateMachine;
use super::shared::Shared;
use crate::error::GroupError;

/// Runs until the Raft thread has ended and all that it gave is applied.
pub(super) fn run<S: StateMachine>(
    shared: &Arc<Shared<S>>,
    committed: &Receiver<Vec<Committed<S::Outcome>>>,
    dirty: &Dirty,
) -> Result<(), GroupError> {
    while let Ok(batch) = committed.recv() {
        for entry in batch {
            // After a failure nothing is answered: what was not, may be applied after the next start.
            if shared.failure().is_some() {
                return Ok(());
            }
            apply(shared, entry)?;
            dirty.mark();
        }
        shared.inbox.made_room();
    }
    Ok(())
}

/// Applies one entry under one hold of the lock, so that readers see all of it or nothing.
fn apply<S: StateMachine>(shared: &Shared<S>, committed: Committed<S::Outcome>) -> Result<(), GroupError> {
    let Committed { entry, replies } = committed;
    let index = LogIndex(entry.index);
    if entry.get_entry_type() != EntryType::EntryNormal {
        return Err(GroupError::Unimplemented { what: "a change of the group's members" });
    }
    let (mut time, mut commands) = (None, Vec::new());
    if !entry.data.is_empty() {
        let payload = entry::read(index, &entry.data)?;
        time = Some(payload.time);
        let decoded = payload.commands.into_iter().map(S::decode).collect::<Result<Vec<_>, _>>();
        commands = decoded.map_err(|source| GroupError::Undecodable { index, source: Box::new(source) })?;
    }
    let mut state = shared.state.write();
    assert_eq!(entry.index, state.position.index + 1, "entries are applied in order");
    // A leader whose clock is behind its predecessor's may stamp less than what it has not applied yet.
    state.time = time.map_or(state.time, |time| time.max(state.time));
    let at = EntryContext { index, time: state.time };
    let outcomes: Vec<S::Outcome> = commands.iter().map(|command| state.machine.apply(at, command)).collect();
    state.position = Position { index: entry.index, term: entry.term };
    state.bytes += entry.data.len() as u64;
    shared.applied_bytes.store(state.bytes, Ordering::Release);
    drop(state);

    shared.clock.at_least(at.time);
    shared.applied.send_replace(index);
    assert!(replies.is_empty() || replies.len() == outcomes.len(), "one outcome per command of entry {}", entry.index);
    for (reply, outcome) in replies.into_iter().zip(outcomes) {
        answer(reply, Ok((index, outcome)));
    }
    Ok(())
}
