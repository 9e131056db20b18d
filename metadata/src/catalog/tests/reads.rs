//! Queries.

use super::*;

fn list(world: &World, prefix: &str, after: Option<&str>, limit: usize) -> (Vec<String>, Option<String>) {
    let query = Query::List { tenant: TENANT, prefix: prefix.into(), after: after.map(key), limit, data_type: None };
    match world.catalog.query(&query) {
        Answer::Page(page) => {
            let names = page.objects.iter().map(|object| object.key.to_string()).collect();
            (names, page.next.map(|next| next.to_string()))
        }
        other => panic!("{other:?}"),
    }
}

fn filled(names: &[&str]) -> World {
    let mut world = World::new(1);
    for (number, name) in names.iter().enumerate() {
        world.stored(name, 1 + number as u64, &[1]);
    }
    world
}

#[test]
fn pages_list_every_key_once_in_order() {
    let names = ["a", "a/1", "a/2", "a/20", "a0", "b", "\u{ff}"];
    let world = filled(&names);
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        let (page, next) = list(&world, "", after.as_deref(), 2);
        assert!(page.len() <= 2);
        seen.extend(page);
        match next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    assert_eq!(seen, names);
    assert_eq!(list(&world, "a/", None, 10).0, ["a/1", "a/2", "a/20"]);
    assert_eq!(list(&world, "a/", Some("a"), 10).0, ["a/1", "a/2", "a/20"]);
    assert_eq!(list(&world, "a/", Some("a/1"), 1), (vec!["a/2".to_owned()], Some("a/2".to_owned())));
    assert_eq!(list(&world, "a/", Some("b"), 10).0, Vec::<String>::new());
    assert_eq!(list(&world, "c", None, 10), (vec![], None));
}

#[test]
fn a_page_goes_on_behind_a_key_that_was_removed() {
    let mut world = filled(&["a", "b", "c"]);
    world.remove("b");
    assert_eq!(list(&world, "", Some("b"), 10).0, ["c"]);
}

#[test]
fn matching_steps_through_keys_and_names_versions() {
    let world = filled(&["x1", "x2", "y1", "y2"]);
    let step = |filter: &KeyFilter, after: Option<ObjectKey>| {
        let query = Query::Matching { tenant: TENANT, filter: filter.clone(), after, limit: 3 };
        match world.catalog.query(&query) {
            Answer::Matches(matches) => matches,
            other => panic!("{other:?}"),
        }
    };
    let ones = KeyFilter::Pattern(regex::bytes::Regex::new("1$").expect("pattern"));
    let first = step(&ones, None);
    assert_eq!((first.examined, first.objects.len(), first.next.clone()), (3, 2, Some(key("y1"))));
    assert_eq!(first.objects[1].version, version(3));
    let second = step(&ones, first.next);
    assert_eq!((second.examined, second.objects.len(), second.next), (1, 0, None));
    assert_eq!(step(&KeyFilter::Prefix(b"y".to_vec()), None).examined, 2);
    assert_eq!(step(&KeyFilter::All, None).objects.len(), 3);
}

#[test]
fn a_filter_that_matches_little_ends_its_page_in_time() {
    let mut world = World::new(1);
    let at = EntryContext { index: LogIndex(2), term: Term(1), time: LogTime(world.now) };
    for sequence in 0..=MAX_PAGE_ITEMS as u64 {
        let mut item = world.put(&format!("{sequence:06}"), sequence, &[1]);
        item.data_type = DataType::Tensor;
        world.catalog.apply(at, &Command::Complete(vec![item]));
    }
    let wanted = Some(DataType::Weight);
    let query = |after| Query::List { tenant: TENANT, prefix: vec![], after, limit: 10, data_type: wanted };
    let Answer::Page(page) = world.catalog.query(&query(None)) else { panic!("answer of list") };
    assert!(page.objects.is_empty() && page.next == Some(key("009999")));
    let Answer::Page(page) = world.catalog.query(&query(page.next)) else { panic!("answer of list") };
    assert_eq!(page, Page::default());
}

#[test]
fn keys_of_every_legal_length_are_kept_apart() {
    let mut world = World::new(1);
    let lengths = [1, 254, 255, 256, 1024];
    for (number, &length) in lengths.iter().enumerate() {
        world.stored(&"k".repeat(length), 1 + number as u64, &[1]);
    }
    for (number, &length) in lengths.iter().enumerate() {
        assert_eq!(world.location(&"k".repeat(length)).version, version(1 + number as u64));
    }
    let (names, _) = list(&world, "", None, 10);
    assert_eq!(names.iter().map(String::len).collect::<Vec<_>>(), lengths);
}

#[test]
fn keys_may_hold_any_bytes() {
    let mut world = World::new(1);
    let keys: [&[u8]; 5] = [&[0], &[0, 0], b"a\0b", &[0xff; 3], b"tenant/\x01\x00"];
    for (number, bytes) in keys.iter().enumerate() {
        let mut item = world.put("placeholder", 1 + number as u64, &[1]);
        item.key = ObjectKey::new(bytes).expect("legal key");
        world.complete(&item);
        assert_eq!(world.catalog.presence(TENANT, &item.key), Presence::Present);
    }
    assert_eq!(world.counts().objects, 5);
}

#[test]
fn a_group_lists_its_members_while_they_are_there() {
    let mut world = World::new(2);
    for (name, sequence) in [("unit/value", 1), ("unit/index", 2), ("unit/keys", 3)] {
        let mut item = world.put(name, sequence, &[1]);
        item.group = Some("unit".into());
        world.complete(&item);
    }
    let group = |world: &World| match world.catalog.query(&Query::Group { tenant: TENANT, group: "unit".into() }) {
        Answer::Group(members) => members.iter().map(|member| member.key.to_string()).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(group(&world), ["unit/index", "unit/keys", "unit/value"]);
    world.forget(ForgetMode::Lost, "unit/keys", replica(1, 3));
    let mut ungrouped = world.put("unit/value", 4, &[2]);
    ungrouped.upsert = true;
    world.complete(&ungrouped);
    assert_eq!(group(&world), ["unit/index"]);
}

#[test]
fn answers_come_in_request_order_with_duplicates() {
    let world = filled(&["a", "b"]);
    let keys = ["a", "x", "b", "a"].map(key).to_vec();
    let answer = world.catalog.query(&Query::Exists { tenant: TENANT, keys });
    use Presence::{Missing, Present};
    assert_eq!(answer, Answer::Presence(vec![Present, Missing, Present, Present]));
}

#[test]
fn stat_says_what_the_put_asked() {
    let mut world = World::new(2);
    let mut item = world.put("a", 1, &[1, 2]);
    (item.durability, item.copies, item.pin) = (Durability::Nvme, Copies::new(3, 2).expect("legal"), true);
    world.complete(&item);
    let Answer::Stat(Some(stat)) = world.catalog.query(&Query::Stat { tenant: TENANT, key: key("a") }) else {
        panic!("answer of stat")
    };
    assert_eq!((stat.durability, stat.copies), (Durability::Nvme, item.copies));
    assert_eq!((stat.listed.pins, stat.listed.replicas, stat.listed.length), (1, 2, 100));
    assert_eq!(world.catalog.query(&Query::Stat { tenant: TENANT, key: key("b") }), Answer::Stat(None));
}

#[test]
fn many_keys_are_answered_as_each_of_them() {
    let mut world = World::new(1);
    // More than one part of every bucket's tags is taken, so that keys meet others' tags.
    for sequence in 0..3000 {
        world.catalog.apply(
            EntryContext { index: LogIndex(world.index + 1 + sequence), term: Term(1), time: LogTime(world.now) },
            &Command::Complete(vec![world.put(&format!("k{sequence}"), sequence, &[1])]),
        );
    }
    let keys: Vec<ObjectKey> = (0..6000).map(|number| key(&format!("k{}", number * 7 % 6000))).collect();
    let alone: Vec<Presence> = keys.iter().map(|key| world.catalog.presence(TENANT, key)).collect();
    assert_eq!(world.catalog.presences(TENANT, &keys), alone);
    assert_eq!(alone.iter().filter(|&&presence| presence == Presence::Present).count(), 3000);
    assert_eq!(world.catalog.presences(TenantId(9), &keys[..1]), [Presence::Missing], "no such tenant");
}
