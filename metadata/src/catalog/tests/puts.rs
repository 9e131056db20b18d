//! Complete and abandon.

use super::*;

#[test]
fn a_completed_put_is_visible_with_what_it_said() {
    let mut world = World::new(2);
    let item = world.stored("a", 1, &[1, 2]);
    let location = world.location("a");
    assert_eq!(location.version, item.version);
    assert_eq!(location.commit_index, LogIndex(world.index));
    assert_eq!((location.length, location.slice_bytes), (100, 1 << 20));
    assert_eq!(location.checksums, item.checksums);
    assert_eq!(world.replicas("a"), [replica(1, 1), replica(2, 1)]);
    assert_eq!(world.presence("a"), Presence::Present);
}

#[test]
fn first_completion_wins_and_the_loser_may_free() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    let loser = world.put("a", 2, &[2]);
    assert_eq!(world.complete(&loser), CompleteOutcome::AlreadyExists { version: version(1) });
    assert_eq!(world.replicas("a"), [replica(1, 1)]);
    assert_eq!(world.free_list(2), [], "the loser's node frees on the answer, not by its list");
}

#[test]
fn the_same_key_twice_in_a_batch_is_completed_once() {
    let mut world = World::new(1);
    let items = vec![world.put("a", 1, &[1]), world.put("b", 2, &[1]), world.put("a", 3, &[1])];
    let Outcome::Complete(outcomes) = world.apply(&Command::Complete(items)) else { panic!("outcome of complete") };
    let completed = CompleteOutcome::Completed { replicas: 1 };
    assert_eq!(outcomes, [completed, completed, CompleteOutcome::AlreadyExists { version: version(1) }]);
}

#[test]
fn good_items_of_a_batch_succeed_beside_bad_ones() {
    let mut world = World::new(1);
    let mut bad = world.put("b", 2, &[1]);
    bad.slice_bytes = 0;
    let items = vec![world.put("a", 1, &[1]), bad, world.put("c", 3, &[1])];
    let Outcome::Complete(outcomes) = world.apply(&Command::Complete(items)) else { panic!("outcome of complete") };
    assert_eq!(outcomes[1], refused(Refusal::Malformed));
    assert_eq!([outcomes[0], outcomes[2]], [CompleteOutcome::Completed { replicas: 1 }; 2]);
    assert_eq!(world.counts().objects, 2);
}

#[test]
fn a_repeated_complete_gets_its_first_answer() {
    let mut world = World::new(1);
    let item = world.stored("a", 1, &[1]);
    let first = world.location("a");
    assert_eq!(world.complete(&item), CompleteOutcome::Completed { replicas: 1 });
    assert_eq!(world.location("a"), first);
    assert_eq!(world.counts().bytes, 100);
}

#[test]
fn a_repeated_complete_brings_back_nothing_that_was_removed() {
    let mut world = World::new(1);
    let item = world.stored("a", 1, &[1]);
    world.remove("a");
    assert_eq!(world.complete(&item), refused(Refusal::TooFewReplicas));
    assert_eq!(world.presence("a"), Presence::Missing);
}

#[test]
fn a_repeated_complete_brings_back_nothing_that_was_evicted() {
    let mut world = World::new(1);
    let item = world.stored("a", 1, &[1]);
    world.forget(ForgetMode::EvenLast, "a", replica(1, 1));
    assert_eq!(world.complete(&item), refused(Refusal::TooFewReplicas));
}

#[test]
fn a_loser_stays_lost_after_the_winner_is_removed() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    let loser = world.put("a", 2, &[2]);
    world.complete(&loser);
    world.remove("a");
    assert_eq!(world.complete(&loser), refused(Refusal::TooFewReplicas));
}

#[test]
fn a_refused_put_stays_refused() {
    let mut world = World::new(2);
    let mut item = world.put("a", 1, &[1]);
    item.copies = Copies::new(2, 2).expect("legal");
    assert_eq!(world.complete(&item), refused(Refusal::TooFewReplicas));
    item.copies = Copies::ONE;
    assert_eq!(world.complete(&item), refused(Refusal::TooFewReplicas), "its replica was freed on the first answer");
}

#[test]
fn an_upserted_version_never_returns_over_its_successor() {
    let mut world = World::new(1);
    let mut first = world.put("a", 1, &[1]);
    first.upsert = true;
    world.complete(&first);
    let mut second = world.put("a", 2, &[1]);
    second.upsert = true;
    world.complete(&second);
    assert_eq!(world.complete(&first), refused(Refusal::TooFewReplicas));
    assert_eq!(world.location("a").version, version(2));
}

#[test]
fn upsert_switches_at_once_and_lists_the_old_copies_free() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1, 2]);
    let mut item = world.put("a", 2, &[2]);
    item.upsert = true;
    item.length = 300;
    assert_eq!(world.complete(&item), CompleteOutcome::Completed { replicas: 1 });
    assert_eq!(world.location("a").version, version(2));
    assert_eq!((world.free_list(1), world.free_list(2)), (vec![replica(1, 1)], vec![replica(2, 1)]));
    assert_eq!(world.counts().bytes, 300);
}

#[test]
fn a_reservation_older_than_a_minute_is_refused() {
    let mut world = World::new(1);
    let item = world.put("a", 1, &[1]);
    world.pass(RESERVATION_LIFETIME);
    let on_time = world.put("b", 2, &[1]);
    world.pass(Duration::from_millis(1));
    assert_eq!(world.complete(&item), refused(Refusal::ReservationExpired));
    assert_eq!(world.complete(&on_time), CompleteOutcome::Completed { replicas: 1 });
}

#[test]
fn an_abandoned_replica_never_becomes_visible() {
    let mut world = World::new(1);
    let item = world.put("a", 1, &[1]);
    assert_eq!(world.abandon("a", replica(1, 1)), AbandonOutcome::Abandoned);
    assert_eq!(world.complete(&item), refused(Refusal::TooFewReplicas));
    world.pass(RESERVATION_LIFETIME);
    assert_eq!(world.complete(&item), refused(Refusal::TooFewReplicas));
    world.pass(RESERVATION_LIFETIME + RETIREMENT);
    assert_eq!(world.complete(&item), refused(Refusal::ReservationExpired), "its id may be forgotten by now");
}

#[test]
fn a_complete_goes_on_without_its_abandoned_replica() {
    let mut world = World::new(2);
    let item = world.put("a", 1, &[1, 2]);
    world.abandon("a", replica(2, 1));
    assert_eq!(world.complete(&item), CompleteOutcome::Completed { replicas: 1 });
    assert_eq!(world.replicas("a"), [replica(1, 1)]);
}

#[test]
fn a_complete_below_min_replicas_is_refused() {
    let mut world = World::new(2);
    let mut item = world.put("a", 1, &[1, 2]);
    item.copies = Copies::new(2, 2).expect("legal");
    world.abandon("a", replica(2, 1));
    assert_eq!(world.complete(&item), refused(Refusal::TooFewReplicas));
}

#[test]
fn abandoning_a_completed_replica_says_to_keep_it() {
    let mut world = World::new(1);
    world.stored("a", 1, &[1]);
    let completed = AbandonOutcome::Completed { version: version(1), commit_index: LogIndex(world.index) };
    assert_eq!(world.abandon("a", replica(1, 1)), completed);
    assert_eq!(world.presence("a"), Presence::Present);
}

#[test]
fn a_new_life_abandons_uncommitted_replicas_of_older_ones() {
    let mut world = World::new(2);
    let item = world.put("a", 1, &[2]);
    world.register(2, 2);
    assert_eq!(world.complete(&item), refused(Refusal::TooFewReplicas));
}

#[test]
fn a_put_wins_over_a_version_that_only_absent_nodes_have() {
    let mut world = World::new(2);
    world.stored("a", 1, &[2]);
    world.set_state(2, 1, NodeState::Absent);
    assert_eq!(world.presence("a"), Presence::Unavailable);
    world.stored("a", 2, &[1]);
    assert_eq!(world.location("a").version, version(2));
    world.register(2, 1);
    assert_eq!(world.free_list(2), [replica(2, 1)], "the absent node's copy is freed on its return");
}

#[test]
fn a_draining_node_still_holds_its_keys() {
    let mut world = World::new(2);
    world.stored("a", 1, &[2]);
    world.set_state(2, 1, NodeState::Draining);
    let late = world.put("a", 2, &[1]);
    assert_eq!(world.complete(&late), CompleteOutcome::AlreadyExists { version: version(1) });
}

#[test]
fn copies_on_absent_nodes_do_not_count_for_min_replicas() {
    let mut world = World::new(2);
    world.set_state(2, 1, NodeState::Absent);
    let item = world.put("a", 1, &[2]);
    assert_eq!(world.complete(&item), refused(Refusal::TooFewReplicas));
}

#[test]
fn a_description_that_contradicts_itself_is_refused() {
    let mut world = World::new(1);
    let good = world.put("a", 1, &[1]);
    let bad: [fn(&mut CompleteItem); 7] = [
        |item| item.slice_bytes = 0,
        |item| item.checksums.clear(),
        |item| item.checksums.push(7),
        |item| item.length = crate::MAX_OBJECT_BYTES + 1,
        |item| item.replicas.clear(),
        |item| item.replicas.push(new_replica(1, 77)),
        |item| item.group = Some("".into()),
    ];
    for (number, spoil) in bad.iter().enumerate() {
        let mut item = good.clone();
        item.version = version(10 + number as u64);
        item.replicas = vec![new_replica(1, 10 + number as u64)];
        spoil(&mut item);
        assert_eq!(world.complete(&item), refused(Refusal::Malformed), "case {number}");
    }
    assert_eq!(world.counts().objects, 0);
}

#[test]
fn an_empty_object_has_one_empty_slice_and_no_charge() {
    let mut world = World::new(1);
    let mut item = world.put("a", 1, &[1]);
    item.length = 0;
    assert_eq!(world.complete(&item), CompleteOutcome::Completed { replicas: 1 });
    assert_eq!((world.counts().objects, world.counts().bytes), (1, 0));
}

#[test]
fn an_object_of_16_gib_keeps_its_exact_length() {
    let mut world = World::new(1);
    for (sequence, length) in [(1, (1 << 31) - 1), (2, (4 << 30) + 1), (3, crate::MAX_OBJECT_BYTES)] {
        let mut item = world.put(&format!("{length}"), sequence, &[1]);
        item.length = length;
        item.slice_bytes = 4 << 20;
        item.checksums = (0..crate::SliceHeader::slice_count(length, 4 << 20)).collect();
        assert_eq!(world.complete(&item), CompleteOutcome::Completed { replicas: 1 });
        assert_eq!(world.location(&format!("{length}")).length, length);
    }
}

#[test]
fn a_crashed_writer_holds_no_key() {
    let mut world = World::new(2);
    let dead = world.put("a", 1, &[1]);
    assert_eq!(world.presence("a"), Presence::Missing);
    assert_eq!(world.remove("a"), RemoveOutcome::Missing);
    world.stored("a", 2, &[2]);
    assert_eq!(world.complete(&dead), CompleteOutcome::AlreadyExists { version: version(2) });
}
