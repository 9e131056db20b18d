//! Whether a history can be that of a store that keeps its word. Pure.
//!
//! The law, for each key by itself (linearizability is local: a history is linearizable if that of each object is,
//! Herlihy and Wing, TOPLAS 1990, section 3.2):
//!
//! 1. Writes, removals and reads that ask the leader happened one after the other, each at an instant between its call and its
//!    answer, and each answered what was true then. A write without an answer happened at some instant after its call, or
//!    never. (`linearizability`)
//! 2. A read that need not ask the leader found what some write of its key stored, not replaced or removed more than
//!    [`STALENESS`] before the read began; and that there is nothing, it says of now.
//!
//! So an acknowledged put that is lost, a removed object that is back and a byte that nobody wrote are all refused. Evictions
//! are not part of the law: it holds for stores with room enough.

mod linearizability;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::history::{Call, Found, KeyNumber, Operation, ValueNumber};
use linearizability::{Stuck, Verdict};

/// For how long indices and caches may serve what was replaced or removed.
pub const STALENESS: Duration = Duration::from_secs(5);

/// How many operations of a key are shown around one that breaks the law.
const SHOWN: usize = 12;

/// What is wrong, as well as can be told from where the search got stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A miss, though an acknowledged put was not removed.
    Lost,
    /// There again, though it was removed.
    CameBack,
    /// Bytes that nobody wrote under that key.
    WrongBytes,
    /// What a later write had replaced.
    Stale,
    /// Stored though there was something already.
    StoredTwice,
    /// The search was given up: neither refused nor proved.
    Undecided,
}

/// An operation that can't be explained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Its key.
    pub key: KeyNumber,
    /// What is wrong.
    pub fault: Fault,
    /// The operation.
    pub operation: Operation,
    /// What went before it and beside it, in the order of calls.
    pub around: Vec<Operation>,
}

/// What the checker found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// Keys that were looked at.
    pub keys: usize,
    /// Operations that were looked at.
    pub operations: usize,
    /// One a key, at most.
    pub violations: Vec<Violation>,
}

/// Judges a whole history, in any order.
#[must_use]
pub fn check(history: &[Operation]) -> Findings {
    let mut keys: BTreeMap<KeyNumber, Vec<Operation>> = BTreeMap::new();
    for operation in history {
        keys.entry(operation.key).or_default().push(*operation);
    }
    let violations = keys.values_mut().filter_map(|operations| {
        operations.sort_by_key(|operation| operation.invoked);
        check_key(operations)
    });
    let violations = violations.collect();
    Findings { keys: keys.len(), operations: history.len(), violations }
}

/// Judges the operations of one key, in the order of calls.
fn check_key(operations: &[Operation]) -> Option<Violation> {
    let writes = Writes::of(operations);
    let strange = |operation: &&Operation| match read_of(&operation.call) {
        Some(Found::Damaged) => true,
        Some(Found::Value(value)) => !writes.by_value.contains_key(&value),
        _ => false,
    };
    if let Some(operation) = operations.iter().find(strange) {
        return Some(violation(operations, operation, Fault::WrongBytes));
    }
    if let Some(operation) = operations.iter().find(|operation| writes.is_too_old(operation)) {
        return Some(violation(operations, operation, Fault::Stale));
    }
    let strict: Vec<Operation> = operations.iter().filter_map(as_of_now).collect();
    match linearizability::search(&strict) {
        Verdict::Linearizable => None,
        Verdict::GaveUp => strict.last().map(|last| violation(operations, last, Fault::Undecided)),
        Verdict::Stuck(Stuck { operation, state }) => {
            let fault = fault_of(&strict[operation], state);
            Some(violation(operations, &strict[operation], fault))
        }
    }
}

fn read_of(call: &Call) -> Option<Found> {
    match *call {
        Call::Get { found } | Call::GetRecent { found } => Some(found),
        _ => None,
    }
}

/// What an operation says of the time between its call and its answer, if it does.
fn as_of_now(operation: &Operation) -> Option<Operation> {
    let call = match operation.call {
        Call::GetRecent { found: Found::Missing } => Call::Get { found: Found::Missing },
        Call::ExistsRecent { present: false } => Call::Exists { present: false },
        Call::GetRecent { .. } | Call::ExistsRecent { .. } => return None,
        other => other,
    };
    Some(Operation { call, ..*operation })
}

fn fault_of(operation: &Operation, state: Option<ValueNumber>) -> Fault {
    use crate::history::{PutHeard, RemoveHeard};
    match operation.call {
        Call::Get { found: Found::Missing }
        | Call::Exists { present: false }
        | Call::Remove { heard: RemoveHeard::Missing } => Fault::Lost,
        Call::Get { .. } if state.is_some() => Fault::Stale,
        Call::Put { heard: PutHeard::Stored, .. } => Fault::StoredTwice,
        _ => Fault::CameBack,
    }
}

fn violation(operations: &[Operation], operation: &Operation, fault: Fault) -> Violation {
    let last = operations.iter().rposition(|other| other.invoked <= operation.returned.unwrap_or(operation.invoked));
    let end = last.map_or(0, |last| last + 1);
    let around = operations[end.saturating_sub(SHOWN)..end].to_vec();
    Violation { key: operation.key, fault, operation: *operation, around }
}

/// When the writes of one key were, for reads that may be a little old.
struct Writes {
    /// Since when each value can't but have been stored: its write was answered, or a read had found it.
    by_value: HashMap<ValueNumber, Option<Duration>>,
    /// Acknowledged replacements and removals: called, answered.
    ends: Vec<(Duration, Duration, Option<ValueNumber>)>,
}

impl Writes {
    fn of(operations: &[Operation]) -> Self {
        let mut by_value = HashMap::new();
        let mut ends = Vec::new();
        for operation in operations {
            match operation.call {
                Call::Put { value, heard: crate::history::PutHeard::Stored } => {
                    by_value.insert(value, operation.returned);
                }
                Call::Put { value, .. } => {
                    by_value.insert(value, None);
                }
                Call::Upsert { value } => {
                    by_value.insert(value, operation.returned);
                    ends.extend(operation.returned.map(|returned| (operation.invoked, returned, Some(value))));
                }
                Call::Remove { heard: crate::history::RemoveHeard::Removed } => {
                    ends.extend(operation.returned.map(|returned| (operation.invoked, returned, None)));
                }
                _ => {}
            }
        }
        for operation in operations {
            if let (Some(Found::Value(value)), Some(returned)) = (read_of(&operation.call), operation.returned)
                && let Some(since) = by_value.get_mut(&value)
            {
                *since = Some(since.map_or(returned, |since| since.min(returned)));
            }
        }
        Self { by_value, ends }
    }

    /// Whether it found what was replaced or removed too long before.
    fn is_too_old(&self, operation: &Operation) -> bool {
        let Call::GetRecent { found: Found::Value(value) } = operation.call else { return false };
        let Some(Some(stored)) = self.by_value.get(&value) else { return false };
        let ended = |&(called, answered, by): &(Duration, Duration, Option<ValueNumber>)| {
            called > *stored && answered + STALENESS < operation.invoked && by != Some(value)
        };
        self.ends.iter().any(ended)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "key {}: {:?} at: {}", self.key.0, self.fault, self.operation)?;
        for operation in &self.around {
            writeln!(f, "    {operation}")?;
        }
        Ok(())
    }
}
