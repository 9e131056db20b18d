//! Sessions of request ids.

use super::*;

const SESSION: SessionId = SessionId(77);

fn open(world: &mut World) {
    let outcome = world.session(&Command::OpenSession { session: SESSION });
    assert_eq!(outcome, SessionOutcome::Open { acknowledged: 0 });
}

fn removal(name: &str, sequence: u64) -> RemoveItem {
    let request = Some(RequestId { session: SESSION, sequence });
    RemoveItem { tenant: TENANT, key: key(name), version: None, force: false, request }
}

fn pinning(name: &str, sequence: u64) -> PinItem {
    PinItem { tenant: TENANT, key: key(name), request: Some(RequestId { session: SESSION, sequence }) }
}

fn acknowledge(through: u64) -> Command {
    Command::AcknowledgeSession { session: SESSION, through }
}

#[test]
fn a_repeated_removal_gets_its_first_answer_and_spares_a_later_put() {
    let mut world = World::new(1);
    open(&mut world);
    world.stored("a", 1, &[1]);
    let removed = RemoveOutcome::Removed { version: version(1) };
    assert_eq!(world.remove_item(&removal("a", 1)), removed);
    world.stored("a", 2, &[1]);
    assert_eq!(world.remove_item(&removal("a", 1)), removed);
    assert_eq!(world.presence("a"), Presence::Present);
}

fn attempt(world: &World, name: &str, attempt: u64, request: u64) -> CompleteItem {
    CompleteItem { request: Some(RequestId { session: SESSION, sequence: request }), ..world.put(name, attempt, &[1]) }
}

#[test]
fn a_put_that_was_repeated_and_removed_is_not_brought_back_by_its_first_attempt() {
    let mut world = World::new(1);
    open(&mut world);
    let (frozen, repeated) = (attempt(&world, "a", 1, 1), attempt(&world, "a", 2, 1));
    assert_eq!(world.complete(&repeated), CompleteOutcome::Completed { replicas: 1 });
    world.remove("a");
    assert_eq!(world.complete(&frozen), CompleteOutcome::Repeated { stored: true });
    assert_eq!(world.presence("a"), Presence::Missing);
    assert_eq!(world.abandon("a", replica(1, 1)), AbandonOutcome::Abandoned, "its copy may go");
}

#[test]
fn an_attempt_at_a_put_that_lost_loses_whatever_became_of_the_winner() {
    let mut world = World::new(1);
    open(&mut world);
    world.stored("a", 1, &[1]);
    let (first, second) = (attempt(&world, "a", 2, 1), attempt(&world, "a", 3, 1));
    assert_eq!(world.complete(&first), CompleteOutcome::AlreadyExists { version: version(1) });
    world.remove("a");
    assert_eq!(world.complete(&second), CompleteOutcome::Repeated { stored: false });
    assert_eq!(world.presence("a"), Presence::Missing);
}

#[test]
fn an_attempt_that_could_not_be_done_does_not_stand_in_the_way_of_the_next() {
    let mut world = World::new(1);
    open(&mut world);
    let late = attempt(&world, "a", 1, 1);
    world.pass(Duration::from_secs(61));
    assert_eq!(world.complete(&late), CompleteOutcome::Refused(Refusal::ReservationExpired));
    let next = attempt(&world, "a", 2, 1);
    assert_eq!(world.complete(&next), CompleteOutcome::Completed { replicas: 1 });
    assert_eq!(world.complete(&next), CompleteOutcome::Completed { replicas: 1 }, "proposed twice");
}

#[test]
fn a_put_under_an_acknowledged_or_foreign_id_is_not_done() {
    let mut world = World::new(1);
    open(&mut world);
    world.session(&acknowledge(3));
    world.remove_item(&removal("b", 4));
    for (request, refusal) in [(3, RequestRefusal::Acknowledged), (4, RequestRefusal::Mismatch)] {
        let item = attempt(&world, "a", request, request);
        assert_eq!(world.complete(&item), CompleteOutcome::NotExecuted(refusal));
    }
    assert_eq!(world.presence("a"), Presence::Missing);
}

#[test]
fn regrouped_repeats_are_executed_once_each() {
    let mut world = World::new(1);
    open(&mut world);
    world.stored("a", 1, &[1]);
    let pins = |sequences: &[u64]| Command::Pin(sequences.iter().map(|&one| pinning("a", one)).collect());
    world.apply(&pins(&[1, 2]));
    let outcome = world.apply(&pins(&[3, 2, 1, 3]));
    let expected = [3, 2, 1, 3].map(|pins| PinOutcome::Pinned { pins });
    assert_eq!(outcome, Outcome::Pin(expected.to_vec()));
    assert_eq!(world.counts().remembered, 3);
}

#[test]
fn an_expired_session_is_refused_never_executed() {
    let mut world = World::new(1);
    open(&mut world);
    world.stored("a", 1, &[1]);
    world.pass(Duration::from_secs(601));
    let refused = RemoveOutcome::Refused(RequestRefusal::SessionExpired);
    assert_eq!(world.remove_item(&removal("a", 1)), refused);
    assert_eq!(world.session(&acknowledge(1)), SessionOutcome::Expired);
    assert_eq!(world.session(&Command::OpenSession { session: SESSION }), SessionOutcome::Expired);
    assert_eq!(world.session(&Command::ExpireSessions), SessionOutcome::Swept { dropped: 1 });
    assert_eq!(world.remove_item(&removal("a", 1)), refused);
    assert_eq!(world.presence("a"), Presence::Present);
}

#[test]
fn a_used_session_does_not_expire() {
    let mut world = World::new(1);
    open(&mut world);
    for sequence in 1..=5 {
        world.pass(Duration::from_secs(599));
        assert_eq!(world.remove_item(&removal("a", sequence)), RemoveOutcome::Missing);
        assert_eq!(world.session(&Command::ExpireSessions), SessionOutcome::Swept { dropped: 0 });
    }
}

#[test]
fn acknowledged_answers_are_forgotten_and_their_repeats_refused() {
    let mut world = World::new(1);
    open(&mut world);
    (1..=5).for_each(|sequence| {
        world.remove_item(&removal("a", sequence));
    });
    assert_eq!(world.session(&acknowledge(3)), SessionOutcome::Open { acknowledged: 3 });
    assert_eq!(world.session(&acknowledge(2)), SessionOutcome::Open { acknowledged: 3 });
    assert_eq!(world.counts().remembered, 2);
    let repeat = world.remove_item(&removal("a", 3));
    assert_eq!(repeat, RemoveOutcome::Refused(RequestRefusal::Acknowledged));
    assert_eq!(world.remove_item(&removal("a", 4)), RemoveOutcome::Missing);
}

#[test]
fn a_session_with_4096_answers_executes_no_more_until_acknowledged() {
    let mut world = World::new(1);
    open(&mut world);
    let items = (1..=MAX_SESSION_ANSWERS as u64).map(|sequence| removal("b", sequence)).collect();
    world.apply(&Command::Remove(items));
    world.stored("a", 1, &[1]);
    let one_more = removal("a", 5000);
    assert_eq!(world.remove_item(&one_more), RemoveOutcome::Refused(RequestRefusal::SessionFull));
    assert_eq!(world.presence("a"), Presence::Present);
    assert_eq!(world.remove_item(&removal("b", 1)), RemoveOutcome::Missing, "repeats are still answered");
    world.session(&acknowledge(1));
    assert_eq!(world.remove_item(&one_more), RemoveOutcome::Removed { version: version(1) });
}

#[test]
fn a_request_id_of_another_kind_is_refused() {
    let mut world = World::new(1);
    open(&mut world);
    world.stored("a", 1, &[1]);
    world.apply(&Command::Pin(vec![pinning("a", 1)]));
    assert_eq!(world.remove_item(&removal("a", 1)), RemoveOutcome::Refused(RequestRefusal::Mismatch));
}

#[test]
fn there_are_only_so_many_sessions_and_expired_ones_make_room() {
    let mut catalog = Catalog::new();
    let mut open = |session, seconds: u64| {
        let at = EntryContext { index: LogIndex(1), term: Term(1), time: LogTime(seconds * 1000) };
        match catalog.apply(at, &Command::OpenSession { session: SessionId(session) }) {
            Outcome::Session(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    };
    for session in 0..MAX_SESSIONS as u64 {
        assert_eq!(open(session, 1), SessionOutcome::Open { acknowledged: 0 });
    }
    assert_eq!(open(1 << 40, 1), SessionOutcome::TooMany);
    assert_eq!(open(1 << 40, 700), SessionOutcome::Open { acknowledged: 0 });
}

#[test]
fn idle_sessions_make_room_for_the_answers_of_others() {
    let mut world = World::new(0);
    let removals = |session: u64| {
        let item = |sequence| RemoveItem {
            request: Some(RequestId { session: SessionId(session), sequence }),
            ..removal("a", sequence)
        };
        Command::Remove((1..=MAX_SESSION_ANSWERS as u64).map(item).collect())
    };
    let idle = (MANY_ANSWERS / MAX_SESSION_ANSWERS) as u64;
    for session in 1000..1000 + idle {
        world.session(&Command::OpenSession { session: SessionId(session) });
        world.apply(&removals(session));
    }
    world.pass(Duration::from_secs(61));
    assert_eq!(world.session(&Command::ExpireSessions), SessionOutcome::Swept { dropped: 0 }, "not many yet");
    world.session(&Command::OpenSession { session: SESSION });
    world.remove_item(&removal("a", 1));
    assert_eq!(world.session(&Command::ExpireSessions), SessionOutcome::Swept { dropped: idle as u32 });
    assert_eq!(world.counts().remembered, 1);
}

#[test]
fn log_time_never_goes_back() {
    let mut world = World::new(1);
    open(&mut world);
    let later = world.counts().time;
    world.now -= 500_000;
    assert_eq!(world.session(&Command::ExpireSessions), SessionOutcome::Swept { dropped: 0 });
    assert_eq!(world.counts().time, later);
}

#[test]
fn a_setting_out_of_bounds_changes_nothing() {
    let mut world = World::new(0);
    let outcome = world.apply(&Command::SetSetting(Setting::SessionLifetime(Duration::from_secs(5))));
    assert_eq!(outcome, Outcome::Setting(Setting::SessionLifetime(Duration::from_secs(600))));
    let good = Setting::SessionLifetime(Duration::from_secs(60));
    assert_eq!(world.apply(&Command::SetSetting(good)), Outcome::Setting(good));
}
