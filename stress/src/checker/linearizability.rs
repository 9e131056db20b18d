//! Whether the operations on one key can have happened one after the other.
//!
//! Wing and Gong's search (JPDC 1993) with Lowe's memory of what was tried (CPIM 2017): take any operation that may come
//! next, because no other was answered before it was called, and whose answer fits the state; go on; come back if nothing
//! fits. What has been tried is a set of taken operations with the state that they left; from there nothing new can come.
//! Some more cuts, none of which loses an order:
//!
//! - An operation that fits and changes nothing is taken at once and never given back for its own sake: whatever can follow
//!   without it, can follow with it.
//! - Writes without an answer are taken last. Where the same answered operations left the same state with fewer of them, more
//!   is still possible, so what used more need not be looked at. Nor two of them in a row of which nobody can have seen the
//!   first.
//!
//! Cost: linear where calls do not overlap; in the worst case exponential in how many do at a time, and in writes without an
//! answer. [`MOST_TRIED`] bounds it.

use std::collections::HashMap;
use std::time::Duration;

use crate::history::{Call, Found, Operation, PutHeard, RemoveHeard, ValueNumber};

/// States that are tried before the search is given up: some hundred MiB.
const MOST_TRIED: usize = 2_000_000;

/// What the search said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Linearizable,
    Stuck(Stuck),
    GaveUp,
}

/// Where the longest attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stuck {
    /// The operation that had to come next and could not.
    pub(super) operation: usize,
    /// What the object was then.
    pub(super) state: Option<ValueNumber>,
}

/// What the object is after `operation`, if it was `state` before; `None` if its answer does not fit.
pub(super) fn step(operation: &Operation, state: Option<ValueNumber>) -> Option<Option<ValueNumber>> {
    match operation.call {
        Call::Put { value, heard: PutHeard::Stored | PutHeard::Nothing } => {
            (state.is_none() || operation.may_replace_absent).then_some(Some(value))
        }
        Call::Put { heard: PutHeard::AlreadyExists, .. } | Call::Exists { present: true } => state.map(Some),
        Call::Upsert { value } => Some(Some(value)),
        Call::Remove { heard: RemoveHeard::Removed | RemoveHeard::Nothing } => state.map(|_| None),
        Call::Remove { heard: RemoveHeard::Missing }
        | Call::Get { found: Found::Missing }
        | Call::Exists { present: false } => state.is_none().then_some(None),
        Call::Get { found: Found::Value(value) } => (state == Some(value)).then_some(state),
        // Not said of one instant, or said of none.
        Call::Get { found: Found::Damaged } | Call::GetRecent { .. } | Call::ExistsRecent { .. } => None,
    }
}

/// Whether the second of two writes without an answer, one right after the other, makes the first one pointless: nobody can
/// have seen what it did. All but a put that needs the removal before it.
fn is_vain(first: &Operation, second: &Operation) -> bool {
    let makes_room = matches!((first.call, second.call), (Call::Remove { .. }, Call::Put { .. }));
    first.returned.is_none() && !makes_room
}

/// Judges `operations`, in the order of calls.
pub(super) fn search(operations: &[Operation]) -> Verdict {
    let mut events = Events::of(operations);
    let is_unanswered = |number: &usize| operations[*number].returned.is_none();
    let unanswered: Vec<usize> = (0..operations.len()).filter(is_unanswered).collect();
    let mut left = operations.len() - unanswered.len();
    let mut taken = Numbers::none_of(operations.len());
    let mut tried = Tried::default();
    let mut path: Vec<Taken> = Vec::new();
    let mut state = None;
    let mut longest: Option<(usize, Stuck)> = None;
    let mut next = Next::Answered(events.first());
    while left > 0 {
        let (number, or_else) = match next {
            Next::Answered(entry) => match events.what(entry) {
                Event::Call(number) => (number, Next::Answered(events.next(entry))),
                Event::Return(number) => {
                    if longest.is_none_or(|(fewest, _)| left < fewest) {
                        longest = Some((left, Stuck { operation: number, state }));
                    }
                    // Answered, or it would not be there.
                    next = Next::Unanswered(0, operations[number].returned.unwrap_or_default());
                    continue;
                }
            },
            Next::Unanswered(at, until) => match unanswered.get(at) {
                Some(&number) if operations[number].invoked <= until => {
                    next = Next::Unanswered(at + 1, until);
                    let before = path.last().map(|last| &operations[last.number]);
                    if taken.has(number) || before.is_some_and(|before| is_vain(before, &operations[number])) {
                        continue;
                    }
                    (number, next)
                }
                _ => {
                    let Some(last) = path.pop() else {
                        let (_, stuck) = longest.expect("an answer came first");
                        return Verdict::Stuck(stuck);
                    };
                    taken.remove(last.number);
                    if operations[last.number].returned.is_some() {
                        events.give_back(last.number);
                        left += 1;
                    }
                    state = last.before;
                    // What changed nothing is no choice: the one before it is looked at again.
                    next = if last.is_for_good { Next::Unanswered(usize::MAX, Duration::ZERO) } else { last.or_else };
                    continue;
                }
            },
        };
        next = or_else;
        let Some(after) = step(&operations[number], state) else { continue };
        taken.insert(number);
        if !tried.is_new(&taken, &unanswered, after) {
            taken.remove(number);
            continue;
        }
        if tried.count > MOST_TRIED {
            return Verdict::GaveUp;
        }
        let is_answered = operations[number].returned.is_some();
        path.push(Taken { number, before: state, is_for_good: is_answered && after == state, or_else });
        if is_answered {
            events.take(number);
            left -= 1;
        }
        state = after;
        next = Next::Answered(events.first());
    }
    Verdict::Linearizable
}

/// What is to be looked at.
#[derive(Clone, Copy)]
enum Next {
    /// An entry among the answered ones.
    Answered(usize),
    /// One of those without an answer, if it was called until then.
    Unanswered(usize, Duration),
}

struct Taken {
    number: usize,
    before: Option<ValueNumber>,
    /// It changed nothing: without it no more is possible than with it.
    is_for_good: bool,
    or_else: Next,
}

/// A set of operations.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Numbers(Box<[u64]>);

impl Numbers {
    fn none_of(count: usize) -> Self {
        Self(vec![0; count.div_ceil(64)].into())
    }

    fn has(&self, number: usize) -> bool {
        self.0[number / 64] & 1 << (number % 64) != 0
    }

    fn insert(&mut self, number: usize) {
        self.0[number / 64] |= 1 << (number % 64);
    }

    fn remove(&mut self, number: usize) {
        self.0[number / 64] &= !(1 << (number % 64));
    }

    fn is_within(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(these, others)| these & !others == 0)
    }
}

/// What was tried: for answered operations and the state that they left, which unanswered ones they needed.
#[derive(Default)]
struct Tried {
    needed: HashMap<(Numbers, Option<ValueNumber>), Vec<Numbers>>,
    count: usize,
}

impl Tried {
    /// Notes a state, unless it was tried, or one from which more is possible.
    fn is_new(&mut self, taken: &Numbers, unanswered: &[usize], state: Option<ValueNumber>) -> bool {
        let (mut answered, mut needs) = (taken.clone(), Numbers(vec![0; taken.0.len()].into()));
        for &number in unanswered.iter().filter(|&&number| taken.has(number)) {
            answered.remove(number);
            needs.insert(number);
        }
        let known = self.needed.entry((answered, state)).or_default();
        let is_new = !known.iter().any(|fewer| fewer.is_within(&needs));
        if is_new {
            known.push(needs);
            self.count += 1;
        }
        is_new
    }
}

#[derive(Clone, Copy)]
enum Event {
    Call(usize),
    Return(usize),
}

/// Calls and answers of what was answered, in the order of time, as a list from which those of an operation can be taken, and
/// given back in the opposite order (Knuth's dancing links). Entry 0 is the head.
struct Events {
    what: Vec<Event>,
    next: Vec<usize>,
    previous: Vec<usize>,
    /// Entries of each operation's call and answer.
    places: Vec<[usize; 2]>,
}

impl Events {
    fn of(operations: &[Operation]) -> Self {
        let both = operations.iter().enumerate().filter_map(|(number, operation)| {
            let returned = operation.returned?;
            Some([(operation.invoked, false, Event::Call(number)), (returned, true, Event::Return(number))])
        });
        // At the same instant calls come first: who is in doubt is let pass.
        let mut events: Vec<_> = both.flatten().collect();
        events.sort_by_key(|&(when, is_return, _)| (when, is_return));
        let count = events.len();
        let mut found = Self {
            what: std::iter::once(Event::Call(usize::MAX)).chain(events.into_iter().map(|(.., what)| what)).collect(),
            next: (1..=count).chain([0]).collect(),
            previous: std::iter::once(count).chain(0..count).collect(),
            places: vec![[0; 2]; operations.len()],
        };
        for (entry, what) in found.what.iter().enumerate().skip(1) {
            match *what {
                Event::Call(number) => found.places[number][0] = entry,
                Event::Return(number) => found.places[number][1] = entry,
            }
        }
        found
    }

    fn first(&self) -> usize {
        self.next[0]
    }

    fn next(&self, entry: usize) -> usize {
        self.next[entry]
    }

    fn what(&self, entry: usize) -> Event {
        self.what[entry]
    }

    fn take(&mut self, number: usize) {
        for entry in self.places[number] {
            let (before, after) = (self.previous[entry], self.next[entry]);
            self.next[before] = after;
            self.previous[after] = before;
        }
    }

    fn give_back(&mut self, number: usize) {
        for entry in self.places[number].into_iter().rev() {
            let (before, after) = (self.previous[entry], self.next[entry]);
            self.next[before] = entry;
            self.previous[after] = entry;
        }
    }
}
