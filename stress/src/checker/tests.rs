//! Histories that must be refused, some that must not, and small ones judged by trying every order.

use super::*;
use crate::history::{PutHeard, RemoveHeard};

/// Operations on one key; instants in milliseconds.
fn operation(invoked: u64, returned: u64, call: Call) -> Operation {
    Operation {
        key: KeyNumber(1),
        invoked: Duration::from_millis(invoked),
        returned: Some(Duration::from_millis(returned)),
        call,
        may_replace_absent: false,
    }
}

fn unanswered(invoked: u64, call: Call) -> Operation {
    Operation { returned: None, ..operation(invoked, 0, call) }
}

fn put(value: u64) -> Call {
    Call::Put { value: ValueNumber(value), heard: PutHeard::Stored }
}

fn upsert(value: u64) -> Call {
    Call::Upsert { value: ValueNumber(value) }
}

fn get(value: u64) -> Call {
    Call::Get { found: Found::Value(ValueNumber(value)) }
}

fn get_recent(value: u64) -> Call {
    Call::GetRecent { found: Found::Value(ValueNumber(value)) }
}

const MISS: Call = Call::Get { found: Found::Missing };
const REMOVED: Call = Call::Remove { heard: RemoveHeard::Removed };
const NOT_THERE: Call = Call::Remove { heard: RemoveHeard::Missing };
const EXISTED: PutHeard = PutHeard::AlreadyExists;

fn fault(history: &[Operation]) -> Option<Fault> {
    check(history).violations.first().map(|violation| violation.fault)
}

#[test]
fn an_acknowledged_put_that_is_lost_is_refused() {
    assert_eq!(fault(&[operation(0, 1, put(1)), operation(2, 3, MISS)]), Some(Fault::Lost));
    assert_eq!(fault(&[operation(0, 1, put(1)), operation(2, 3, NOT_THERE)]), Some(Fault::Lost));
    let absent = Call::Exists { present: false };
    assert_eq!(fault(&[operation(0, 1, put(1)), operation(2, 3, absent)]), Some(Fault::Lost));
    // Also by those who need not ask the leader: a miss is confirmed.
    let recent = Call::GetRecent { found: Found::Missing };
    assert_eq!(fault(&[operation(0, 1, put(1)), operation(2, 3, recent)]), Some(Fault::Lost));
    // Lost long before somebody looks.
    let history = [operation(0, 1, put(1)), operation(2, 3, get(1)), operation(4, 5, get(1)), operation(9, 10, MISS)];
    assert_eq!(fault(&history), Some(Fault::Lost));
}

#[test]
fn a_miss_beside_the_put_or_its_removal_is_no_loss() {
    assert_eq!(fault(&[operation(0, 5, put(1)), operation(2, 3, MISS)]), None);
    assert_eq!(fault(&[operation(0, 1, put(1)), operation(2, 6, REMOVED), operation(3, 4, MISS)]), None);
    assert_eq!(fault(&[operation(0, 1, put(1)), operation(2, 6, REMOVED), operation(3, 4, get(1))]), None);
}

#[test]
fn a_removed_object_that_is_back_is_refused() {
    let gone = [operation(0, 1, put(1)), operation(2, 3, REMOVED)];
    for back in [get(1), Call::Exists { present: true }, REMOVED, Call::Put { value: ValueNumber(2), heard: EXISTED }] {
        let history = [gone[0], gone[1], operation(4, 5, back)];
        assert_eq!(fault(&history), Some(Fault::CameBack), "{back:?}");
    }
    // Once seen gone, it stays gone.
    let history = [gone[0], operation(2, 9, REMOVED), operation(3, 4, MISS), operation(5, 6, get(1))];
    assert_eq!(fault(&history), Some(Fault::CameBack));
}

#[test]
fn bytes_that_nobody_wrote_are_refused() {
    let damaged = Call::Get { found: Found::Damaged };
    assert_eq!(fault(&[operation(0, 1, put(1)), operation(2, 3, damaged)]), Some(Fault::WrongBytes));
    assert_eq!(fault(&[operation(0, 1, put(1)), operation(2, 3, get(7))]), Some(Fault::WrongBytes));
    assert_eq!(fault(&[operation(0, 1, put(1)), operation(2, 3, get_recent(7))]), Some(Fault::WrongBytes));
    // Another key's bytes.
    let other = Operation { key: KeyNumber(2), ..operation(0, 1, put(7)) };
    assert_eq!(fault(&[operation(0, 1, put(1)), other, operation(2, 3, get(7))]), Some(Fault::WrongBytes));
}

#[test]
fn reads_of_the_leader_that_go_back_are_refused() {
    let written = [operation(0, 1, put(1)), operation(2, 3, upsert(2))];
    assert_eq!(fault(&[written[0], written[1], operation(4, 5, get(1))]), Some(Fault::Stale));
    // New, then old, while the write is still under way.
    let history = [written[0], operation(2, 9, upsert(2)), operation(3, 4, get(2)), operation(5, 6, get(1))];
    assert_eq!(fault(&history), Some(Fault::Stale));
}

#[test]
fn a_second_put_that_is_stored_is_refused_unless_the_first_ones_node_was_gone() {
    let second = operation(2, 3, put(2));
    assert_eq!(fault(&[operation(0, 1, put(1)), second]), Some(Fault::StoredTwice));
    let beside_a_fault = Operation { may_replace_absent: true, ..second };
    assert_eq!(fault(&[operation(0, 1, put(1)), beside_a_fault, operation(4, 5, get(2))]), None);
}

#[test]
fn a_write_without_an_answer_may_be_done_late_or_never_but_not_undone() {
    let nothing = |value| Call::Put { value: ValueNumber(value), heard: PutHeard::Nothing };
    assert_eq!(fault(&[unanswered(0, nothing(1)), operation(8, 9, MISS)]), None);
    assert_eq!(fault(&[unanswered(0, nothing(1)), operation(2, 3, MISS), operation(8, 9, get(1))]), None);
    let undone = [unanswered(0, nothing(1)), operation(2, 3, get(1)), operation(8, 9, MISS)];
    assert_eq!(fault(&undone), Some(Fault::Lost));
    let removal = Call::Remove { heard: RemoveHeard::Nothing };
    assert_eq!(fault(&[operation(0, 1, put(1)), unanswered(2, removal), operation(8, 9, MISS)]), None);
    let twice = [
        operation(0, 1, put(1)),
        unanswered(2, removal),
        operation(3, 4, MISS),
        operation(5, 6, put(2)),
        operation(8, 9, MISS),
    ];
    assert_eq!(fault(&twice), Some(Fault::Lost), "one removal removes one object");
    assert_eq!(fault(&[operation(0, 1, put(1)), unanswered(2, upsert(2)), operation(4, 5, get(1))]), None);
}

#[test]
fn reads_that_may_be_old_are_refused_when_they_are_too_old() {
    let written = [operation(0, 1, put(1)), operation(2, 3, upsert(2))];
    let late = 3 + STALENESS.as_millis() as u64;
    assert_eq!(fault(&[written[0], written[1], operation(late, late + 1, get_recent(1))]), None);
    assert_eq!(fault(&[written[0], written[1], operation(late + 1, late + 2, get_recent(1))]), Some(Fault::Stale));
    let removed = [operation(0, 1, put(1)), operation(2, 3, REMOVED), operation(late + 1, late + 2, get_recent(1))];
    assert_eq!(fault(&removed), Some(Fault::Stale));
}

#[test]
fn keys_are_judged_apart() {
    let other = |operation: Operation| Operation { key: KeyNumber(2), ..operation };
    let history = [operation(0, 1, put(1)), other(operation(2, 3, MISS)), other(operation(4, 5, put(2)))];
    let findings = check(&history);
    assert_eq!((findings.keys, findings.operations, findings.violations.len()), (2, 3, 0));
}

/// As the search, by trying every order of every choice of unanswered writes.
fn by_every_order(operations: &[Operation]) -> bool {
    fn go(operations: &[Operation], taken: u32, state: Option<ValueNumber>) -> bool {
        let is_left = |number: &usize| taken & (1 << number) == 0;
        let left: Vec<usize> = (0..operations.len()).filter(is_left).collect();
        if left.iter().all(|&number| operations[number].returned.is_none()) {
            return true;
        }
        let may_be_next = |&number: &usize| {
            left.iter()
                .all(|&other| operations[other].returned.is_none_or(|returned| returned >= operations[number].invoked))
        };
        left.iter().filter(|number| may_be_next(number)).any(|&number| {
            linearizability::step(&operations[number], state)
                .is_some_and(|after| go(operations, taken | 1 << number, after))
        })
    }
    go(operations, 0, None)
}

#[test]
fn the_search_agrees_with_trying_every_order() {
    let mut random = 42_u64;
    let mut next = |bound: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % bound
    };
    let mut verdicts = [0, 0];
    for _ in 0..20_000 {
        let count = 1 + next(6);
        let mut history: Vec<Operation> = (0..count)
            .map(|number| {
                let (invoked, length) = (next(12), next(8));
                let call = match next(9) {
                    0 | 1 => put(number),
                    2 => upsert(number),
                    3 => REMOVED,
                    4 => NOT_THERE,
                    5 => Call::Put { value: ValueNumber(number), heard: EXISTED },
                    6 => MISS,
                    7 => Call::Exists { present: true },
                    _ => get(next(count)),
                };
                let answered = operation(invoked, invoked + length, call);
                let is_write =
                    matches!(call, Call::Put { heard: PutHeard::Stored, .. } | Call::Upsert { .. } | REMOVED);
                if is_write && next(4) == 0 { Operation { returned: None, ..answered } } else { answered }
            })
            .collect();
        history.sort_by_key(|operation| operation.invoked);
        let expected = by_every_order(&history);
        let found = linearizability::search(&history) == Verdict::Linearizable;
        assert_eq!(found, expected, "{history:#?}");
        verdicts[usize::from(found)] += 1;
    }
    assert!(verdicts.iter().all(|&count| count > 1000), "both verdicts are tried: {verdicts:?}");
}

#[test]
fn many_writers_at_a_time_are_judged_in_reasonable_time() {
    // Twelve unanswered puts overlap everything; what is read is the last one, again and again.
    let mut history: Vec<Operation> = (0..12).map(|value| unanswered(value, upsert(value))).collect();
    for turn in 0..200 {
        history.push(operation(20 + 2 * turn, 21 + 2 * turn, upsert(100 + turn)));
        history.push(operation(20 + 2 * turn, 22 + 2 * turn, get(100 + turn)));
    }
    history.push(operation(1000, 1001, get(11)));
    assert_eq!(fault(&history), None);
    history.push(operation(1002, 1003, MISS));
    assert_eq!(fault(&history), Some(Fault::Lost));
}
