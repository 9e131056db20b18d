//! Groups, which are evicted as one, and what becomes of objects of a type.

use super::*;

fn grouped(world: &mut World, name: &str, sequence: u64, nodes: &[u32], group: &str) {
    let item = CompleteItem { group: Some(group.into()), ..world.put(name, sequence, nodes) };
    assert_eq!(world.complete(&item), CompleteOutcome::Completed { replicas: nodes.len() as u8 });
}

#[test]
fn with_the_last_copy_of_a_member_its_group_goes() {
    let mut world = World::new(3);
    grouped(&mut world, "a", 1, &[1, 2], "g");
    grouped(&mut world, "b", 2, &[2], "g");
    grouped(&mut world, "c", 3, &[3], "g");
    grouped(&mut world, "other", 4, &[3], "h");
    world.stored("alone", 5, &[1]);
    // One of two copies is no member.
    assert_eq!(world.forget(ForgetMode::EvenLast, "a", replica(1, 1)), ForgetOutcome::Forgotten { last: false });
    assert_eq!(world.presence("b"), Presence::Present);
    assert_eq!(world.forget(ForgetMode::EvenLast, "a", replica(2, 1)), ForgetOutcome::Forgotten { last: true });
    let left = ["a", "b", "c", "other", "alone"].map(|name| world.presence(name) == Presence::Present);
    assert_eq!(left, [false, false, false, true, true]);
    assert_eq!((world.free_list(2), world.free_list(3)), (vec![replica(2, 2)], vec![replica(3, 3)]));
}

#[test]
fn a_pinned_member_keeps_its_group_and_what_is_lost_takes_none_along() {
    let mut world = World::new(2);
    grouped(&mut world, "a", 1, &[1], "g");
    grouped(&mut world, "b", 2, &[2], "g");
    world.apply(&Command::Pin(vec![PinItem { tenant: TENANT, key: key("b"), request: None }]));
    assert_eq!(world.forget(ForgetMode::EvenLast, "a", replica(1, 1)), ForgetOutcome::Pinned);
    assert_eq!(world.forget(ForgetMode::Lost, "a", replica(1, 1)), ForgetOutcome::Forgotten { last: true });
    assert_eq!(world.presence("b"), Presence::Present);
}

/// Which of too many were to go would be another on each voter, and cost as much as there are.
#[test]
fn members_of_a_group_that_is_too_large_go_alone() {
    let mut world = World::new(1);
    for sequence in 1..=1026 {
        grouped(&mut world, &sequence.to_string(), sequence, &[1], "g");
    }
    world.forget(ForgetMode::EvenLast, "7", replica(1, 7));
    assert_eq!(world.counts().objects, 1025);
    world.forget(ForgetMode::EvenLast, "8", replica(1, 8));
    assert_eq!(world.counts().objects, 0);
}

#[test]
fn a_type_has_a_quota_of_its_own() {
    let mut world = World::new(2);
    let policy = TypePolicy { quota_bytes: Some(250), ..TypePolicy::default() };
    let set = |world: &mut World, policy| {
        let setting = Setting::Type { data_type: DataType::Weight, policy };
        assert_eq!(world.apply(&Command::SetSetting(setting)), Outcome::Setting(setting));
    };
    set(&mut world, policy);
    let weight = |world: &World, name: &str, sequence, nodes: &[u32]| CompleteItem {
        data_type: DataType::Weight,
        ..world.put(name, sequence, nodes)
    };
    let refused = CompleteOutcome::Refused(Refusal::QuotaExceeded);
    let (a, b) = (weight(&world, "a", 1, &[1, 2]), weight(&world, "b", 2, &[1]));
    assert_eq!(world.complete(&a), CompleteOutcome::Completed { replicas: 2 });
    assert_eq!(world.complete(&b), refused, "300 bytes");
    world.stored("of another type", 3, &[1]);
    world.catalog = Catalog::load(&world.catalog.rows(), THREADS).expect("its own rows");
    assert_eq!(world.catalog.type_use(DataType::Weight), (policy, 200));
    world.forget(ForgetMode::Lost, "a", replica(1, 1));
    let c = weight(&world, "c", 4, &[1]);
    assert_eq!(world.complete(&c), CompleteOutcome::Completed { replicas: 1 });
    let further = world.further("c", 4, replica(2, 9));
    assert_eq!(world.add(&further), AddReplicaOutcome::Refused(Refusal::QuotaExceeded));
    let upsert = CompleteItem { upsert: true, ..weight(&world, "a", 5, &[2]) };
    assert_eq!(world.complete(&upsert), CompleteOutcome::Completed { replicas: 1 }, "in place of as much");
    // Too many copies are no policy.
    let bad = Setting::Type { data_type: DataType::Weight, policy: TypePolicy { copies: 16, ..policy } };
    let kept = Setting::Type { data_type: DataType::Weight, policy };
    assert_eq!(world.apply(&Command::SetSetting(bad)), Outcome::Setting(kept));
    set(&mut world, TypePolicy::default());
    assert_eq!(world.counts().settings.len(), 2, "what says nothing is not listed");
}
