//! Remove, pins, tenants and quotas.

use super::*;

fn create(world: &mut World, name: &str, bytes: Option<u64>, objects: Option<u64>) -> TenantId {
    match world.tenant(&Command::CreateTenant { name: name.to_owned(), quota: Quota { bytes, objects } }) {
        TenantOutcome::Created { tenant } => tenant,
        other => panic!("{other:?}"),
    }
}

fn of(tenant: TenantId, mut item: CompleteItem) -> CompleteItem {
    item.tenant = tenant;
    item
}

#[test]
fn a_removed_key_is_gone_at_once_and_free_at_once() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1, 2]);
    assert_eq!(world.remove("a"), RemoveOutcome::Removed { version: version(1) });
    assert_eq!(world.presence("a"), Presence::Missing);
    assert_eq!((world.free_list(1), world.free_list(2)), (vec![replica(1, 1)], vec![replica(2, 1)]));
    world.stored("a", 2, &[1]);
    assert_eq!(world.presence("a"), Presence::Present);
}

#[test]
fn removing_a_named_version_spares_a_later_one() {
    let mut world = World::new(1);
    world.stored("a", 2, &[1]);
    let mut item = RemoveItem { tenant: TENANT, key: key("a"), version: Some(version(1)), force: false, request: None };
    assert_eq!(world.remove_item(&item), RemoveOutcome::Missing);
    item.version = Some(version(2));
    assert_eq!(world.remove_item(&item), RemoveOutcome::Removed { version: version(2) });
}

#[test]
fn a_pinned_object_is_removed_by_force_only() {
    let mut world = World::new(1);
    world.stored("a", 1, &[1]);
    assert_eq!(world.pin("a"), PinOutcome::Pinned { pins: 1 });
    assert_eq!(world.pin("a"), PinOutcome::Pinned { pins: 2 });
    assert_eq!(world.pin("b"), PinOutcome::Missing);
    assert_eq!(world.remove("a"), RemoveOutcome::Pinned);
    let forced = RemoveItem { tenant: TENANT, key: key("a"), version: None, force: true, request: None };
    assert_eq!(world.remove_item(&forced), RemoveOutcome::Removed { version: version(1) });
}

#[test]
fn pins_outlive_an_upsert_and_end_with_the_object() {
    let mut world = World::new(1);
    let mut item = world.put("a", 1, &[1]);
    item.pin = true;
    world.complete(&item);
    world.pin("a");
    let mut next = world.put("a", 2, &[1]);
    next.upsert = true;
    world.complete(&next);
    assert_eq!(world.remove("a"), RemoveOutcome::Pinned);
    let unpin = Command::Unpin(vec![PinItem { tenant: TENANT, key: key("a"), request: None }; 3]);
    let left = [1, 0, 0].map(|pins| PinOutcome::Pinned { pins });
    assert_eq!(world.apply(&unpin), Outcome::Pin(left.to_vec()));
    world.remove("a");
    world.stored("a", 3, &[1]);
    assert_eq!(world.pin("a"), PinOutcome::Pinned { pins: 1 });
}

#[test]
fn tenants_with_equal_keys_never_meet() {
    let mut world = World::new(1);
    let (x, y) = (create(&mut world, "x", None, None), create(&mut world, "y", None, None));
    let (of_x, of_y) = (of(x, world.put("k", 1, &[1])), of(y, world.put("k", 2, &[1])));
    world.complete(&of_x);
    assert_eq!(world.catalog.presence(y, &key("k")), Presence::Missing);
    world.complete(&of_y);
    world.remove_item(&RemoveItem { tenant: x, key: key("k"), version: None, force: true, request: None });
    assert_eq!(world.catalog.presence(x, &key("k")), Presence::Missing);
    assert_eq!(world.catalog.presence(y, &key("k")), Presence::Present);
}

#[test]
fn a_put_of_an_unknown_tenant_is_refused() {
    let mut world = World::new(1);
    let item = of(TenantId(9), world.put("a", 1, &[1]));
    assert_eq!(world.complete(&item), refused(Refusal::UnknownTenant));
}

#[test]
fn a_quota_counts_bytes_times_copies() {
    let mut world = World::new(2);
    let tenant = create(&mut world, "x", Some(250), None);
    let two_copies = of(tenant, world.put("a", 1, &[1, 2]));
    assert_eq!(world.complete(&two_copies), CompleteOutcome::Completed { replicas: 2 });
    let more = of(tenant, world.put("b", 2, &[1]));
    assert_eq!(world.complete(&more), refused(Refusal::QuotaExceeded));
    world.remove_item(&RemoveItem { tenant, key: key("a"), version: None, force: false, request: None });
    let fits = of(tenant, world.put("b", 3, &[1]));
    assert_eq!(world.complete(&fits), CompleteOutcome::Completed { replicas: 1 });
}

#[test]
fn a_further_copy_is_charged_to_the_quota() {
    let mut world = World::new(2);
    let tenant = create(&mut world, "x", Some(150), None);
    let item = of(tenant, world.put("a", 1, &[1]));
    world.complete(&item);
    let mut copy = world.further("a", 1, replica(2, 9));
    copy.tenant = tenant;
    assert_eq!(world.add(&copy), AddReplicaOutcome::Refused(Refusal::QuotaExceeded));
}

#[test]
fn an_upsert_is_charged_the_difference() {
    let mut world = World::new(1);
    let tenant = create(&mut world, "x", Some(120), Some(1));
    let first = of(tenant, world.put("a", 1, &[1]));
    world.complete(&first);
    let mut larger = of(tenant, world.put("a", 2, &[1]));
    (larger.upsert, larger.length) = (true, 120);
    assert_eq!(world.complete(&larger), CompleteOutcome::Completed { replicas: 1 });
    let mut too_large = of(tenant, world.put("a", 3, &[1]));
    (too_large.upsert, too_large.length) = (true, 121);
    assert_eq!(world.complete(&too_large), refused(Refusal::QuotaExceeded));
    assert_eq!(world.catalog.presence(tenant, &key("a")), Presence::Present, "the old version stays");
}

#[test]
fn what_shrinks_is_allowed_above_a_lowered_quota() {
    let mut world = World::new(1);
    let tenant = create(&mut world, "x", Some(100), None);
    let first = of(tenant, world.put("a", 1, &[1]));
    world.complete(&first);
    let quota = Quota { bytes: Some(10), objects: None };
    assert_eq!(world.tenant(&Command::SetQuota { tenant, quota }), TenantOutcome::Changed);
    let mut smaller = of(tenant, world.put("a", 2, &[1]));
    (smaller.upsert, smaller.length) = (true, 50);
    assert_eq!(world.complete(&smaller), CompleteOutcome::Completed { replicas: 1 });
}

#[test]
fn a_refused_put_leaves_no_charge() {
    let mut world = World::new(2);
    let tenant = create(&mut world, "x", Some(1000), None);
    for sequence in 1..=50 {
        let mut item = of(tenant, world.put("a", sequence, &[1]));
        item.copies = Copies::new(2, 2).expect("legal");
        assert_eq!(world.complete(&item), refused(Refusal::TooFewReplicas));
    }
    let Answer::Tenants(tenants) = world.catalog.query(&Query::Tenants) else { panic!("answer of tenants") };
    assert_eq!((tenants[1].objects, tenants[1].bytes), (0, 0));
}

#[test]
fn a_dropped_tenant_is_hidden_at_once_and_goes_in_bounded_steps() {
    let mut world = World::new(1);
    let tenant = create(&mut world, "x", None, None);
    let objects = MAX_COMMAND_ITEMS as u64 + 10;
    let at = EntryContext { index: LogIndex(world.index + 1), term: Term(1), time: LogTime(world.now) };
    for sequence in 1..=objects {
        let item = of(tenant, world.put(&sequence.to_string(), sequence, &[1]));
        world.catalog.apply(at, &Command::Complete(vec![item]));
    }
    world.index += 1;
    assert_eq!(world.tenant(&Command::DropTenant { tenant }), TenantOutcome::Dropping { remaining: 10 });
    let list = Query::List { tenant, prefix: vec![], after: None, limit: 100, data_type: None };
    assert_eq!(world.catalog.query(&list), Answer::Page(Page::default()));
    let late = of(tenant, world.put("late", 99_999, &[1]));
    assert_eq!(world.complete(&late), refused(Refusal::UnknownTenant));
    let again = Command::CreateTenant { name: "x".to_owned(), quota: Quota::default() };
    assert_eq!(world.tenant(&again), TenantOutcome::Refused, "not while the old one goes");
    assert_eq!(world.tenant(&Command::DropTenant { tenant }), TenantOutcome::Dropped);
    assert_eq!(world.tenant(&again), TenantOutcome::Created { tenant: TenantId(2) });
    assert_eq!(world.counts().bytes, 0);
}

#[test]
fn tenants_are_created_once_and_the_default_one_stays() {
    let mut world = World::new(0);
    let tenant = create(&mut world, "x", None, None);
    let quota = Quota::default();
    assert_eq!(world.tenant(&Command::CreateTenant { name: "x".to_owned(), quota }), TenantOutcome::Exists { tenant });
    let name = "n".repeat(MAX_NAME_BYTES + 1);
    assert_eq!(world.tenant(&Command::CreateTenant { name, quota }), TenantOutcome::Refused);
    assert_eq!(world.tenant(&Command::DropTenant { tenant: TENANT }), TenantOutcome::Refused);
    assert_eq!(world.tenant(&Command::DropTenant { tenant: TenantId(9) }), TenantOutcome::Unknown);
    assert_eq!(world.tenant(&Command::SetQuota { tenant: TenantId(9), quota }), TenantOutcome::Unknown);
}

#[test]
fn use_returns_to_zero_when_all_is_removed() {
    let mut world = World::new(3);
    for sequence in 1..=60 {
        world.stored(&format!("{}", sequence % 20 + 100 * sequence), sequence, &[1, 2, 3]);
    }
    for key in all(&world) {
        world.remove_item(&RemoveItem { tenant: TENANT, key, version: None, force: false, request: None });
    }
    let counts = world.counts();
    assert_eq!((counts.objects, counts.replicas, counts.bytes), (0, 0, 0));
}

fn all(world: &World) -> Vec<ObjectKey> {
    let query = Query::Matching { tenant: TENANT, filter: KeyFilter::All, after: None, limit: 10_000 };
    match world.catalog.query(&query) {
        Answer::Matches(matches) => matches.objects.into_iter().map(|object| object.key).collect(),
        other => panic!("{other:?}"),
    }
}
