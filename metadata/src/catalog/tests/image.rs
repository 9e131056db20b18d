//! The durable image.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// A catalog in which every kind of row occurs.
fn rich() -> World {
    let mut world = World::new(3);
    let quota = Quota { bytes: Some(1 << 40), objects: None };
    world.tenant(&Command::CreateTenant { name: "x".to_owned(), quota });
    world.session(&Command::OpenSession { session: SessionId(5) });
    for sequence in 1..=20 {
        let mut item = world.put(&format!("{sequence}"), sequence, &[1, 2, 3]);
        item.replicas.truncate(1 + sequence as usize % 3);
        item.group = (sequence % 4 == 0).then(|| "group".into());
        item.length = 100 + sequence * (1 << 20);
        item.checksums = (0..crate::SliceHeader::slice_count(item.length, 1 << 20)).collect();
        world.complete(&item);
    }
    for (sequence, name) in [(21, "1"), (22, "new")] {
        let request = Some(RequestId { session: SessionId(5), sequence });
        world.complete(&CompleteItem { request, ..world.put(name, sequence, &[1]) });
    }
    world.pin("3");
    world.remove("7");
    world.abandon("8", replica(3, 999));
    let request = Some(RequestId { session: SessionId(5), sequence: 1 });
    world.remove_item(&RemoveItem { tenant: TENANT, key: key("9"), version: None, force: false, request });
    world.apply(&Command::Pin(vec![PinItem {
        tenant: TENANT,
        key: key("4"),
        request: request.map(|request| RequestId { sequence: 2, ..request }),
    }]));
    for (task, target) in [(1, 2), (2, 3)] {
        let request = tasks::copy(task, "3", &[target]);
        assert_eq!(world.task(&Command::BeginTask(request)), TaskOutcome::Known(TaskState::Waiting));
    }
    world.task(&Command::StepTask { task: TaskId(2), step: TaskStep::Fail(TaskFailure::QuotaExceeded) });
    world.register(2, 2);
    world.set_state(3, 1, NodeState::Draining);
    world.register(9, 1);
    world.expel_node(9, 1);
    world
}

#[test]
fn a_loaded_catalog_is_the_catalog_that_was_saved() {
    let world = rich();
    let rows = world.catalog.rows();
    assert!(rows.is_sorted());
    let kinds: BTreeSet<u8> = rows.iter().map(|(key, _)| key[0]).collect();
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7, 8], "every kind of row occurs");
    let mut loaded = Catalog::load(&rows, THREADS).expect("its own rows");
    loaded.validate();
    assert_eq!(loaded.rows(), rows);
    assert!(loaded.take_changes().is_empty(), "a loaded catalog has nothing to write");
}

/// More than one block of each structure, read by threads that share them out.
#[test]
fn any_number_of_threads_loads_the_same_catalog() {
    let mut world = World::new(2);
    let items: Vec<_> = (0..4000).map(|number| world.put(&format!("{:x}", number * 7919), number, &[1, 2])).collect();
    world.apply(&Command::Complete(items));
    let rows = world.catalog.rows();
    for threads in [1, 2, 7] {
        world.catalog = Catalog::load(&rows, NonZero::new(threads).expect("not 0")).expect("its own rows");
        world.catalog.validate();
        assert_eq!(world.catalog.rows(), rows);
    }
    // It goes on as any other: in the places that are left, and in tables that have to grow.
    let first = 4000;
    (first..first + 2000).for_each(|number| {
        let item = world.put(&format!("{:x}", number * 7919), number, &[1]);
        world.catalog.complete(&item);
    });
    world.remove("0");
    assert_eq!(world.catalog.rows().iter().filter(|(key, _)| key[0] == 3).count(), 5999);
}

#[test]
fn changes_taken_one_after_the_other_are_the_image() {
    let mut image = BTreeMap::new();
    let mut take = |catalog: &mut Catalog| {
        for (key, row) in catalog.take_changes() {
            match row {
                Some(row) => drop(image.insert(key, row)),
                None => drop(image.remove(&key)),
            }
        }
        image.clone()
    };
    let mut world = rich();
    assert_eq!(take(&mut world.catalog).into_iter().collect::<Vec<_>>(), world.catalog.rows());
    assert!(world.catalog.take_changes().is_empty());
    for sequence in 1..=20 {
        world.remove(&format!("{sequence}"));
    }
    // Some come back, where others were; some come and go.
    for (sequence, name) in [(30, "2"), (31, "21"), (32, "22")] {
        world.stored(name, sequence, &[1]);
    }
    world.remove("22");
    assert_eq!(take(&mut world.catalog).into_iter().collect::<Vec<_>>(), world.catalog.rows());
    world.pass(Duration::from_secs(2 * 3600));
    world.session(&Command::ExpireSessions);
    world.apply(&Command::Freed { node: NodeId(1), through: LogIndex(u64::MAX) });
    world.tenant(&Command::DropTenant { tenant: TenantId(1) });
    assert_eq!(take(&mut world.catalog).into_iter().collect::<Vec<_>>(), world.catalog.rows());
}

#[test]
fn a_loaded_catalog_still_refuses_what_it_forgot() {
    let mut world = World::new(1);
    world.catalog.retired = Retired::with_capacity(1);
    let freed = world.put("a", 1, &[1]);
    world.abandon("a", replica(1, 1));
    world.pass(Duration::from_secs(2));
    world.abandon("b", replica(1, 2));
    assert!(!world.catalog.retired.contains(replica(1, 1)));
    world.catalog = Catalog::load(&world.catalog.rows(), THREADS).expect("its own rows");
    assert_eq!(world.complete(&freed), refused(Refusal::ReservationExpired));
}

#[test]
fn a_new_catalog_and_no_rows_are_the_same() {
    let loaded = Catalog::load(&Vec::new(), THREADS).expect("no rows");
    assert_eq!(loaded.rows(), Catalog::new().rows());
}

#[test]
fn rows_without_the_first_or_out_of_order_are_refused() {
    let rows = rich().catalog.rows();
    assert_eq!(Catalog::load(&rows[1..].to_vec(), THREADS).err(), Some(LoadError::NoMeta));
    let mut swapped = rows.clone();
    swapped.swap(2, 3);
    assert!(matches!(Catalog::load(&swapped, THREADS), Err(LoadError::Order { .. })));
    let without_nodes = rows.into_iter().filter(|(key, _)| key[0] != 1).collect::<Vec<_>>();
    assert!(matches!(Catalog::load(&without_nodes, THREADS), Err(LoadError::Inconsistent { .. })));
}

/// A first row that gives the number of the tenant that is always there to the next one.
#[test]
fn the_default_tenants_number_is_not_given_again() {
    let row = vec![4, 0, 10, 0, 0, 0x3f, 0, 0, 0, 0, 0];
    assert_eq!(Catalog::load(&vec![(vec![0], row)], THREADS).err(), Some(LoadError::Inconsistent { row: vec![0] }));
}

#[test]
fn a_row_of_a_later_version_is_named() {
    let mut rows = rich().catalog.rows();
    rows[0].1[0] = 5;
    let source = DecodeError::Version { found: 5, known: 4 };
    assert_eq!(Catalog::load(&rows, THREADS).err(), Some(LoadError::Row { row: vec![0], source }));
}

proptest! {
    #[test]
    fn damaged_rows_give_an_error_or_a_catalog_never_a_panic(row: prop::sample::Index, byte: prop::sample::Index, bit in 0u8..8, cut: bool) {
        let mut rows = rich().catalog.rows();
        let row = row.index(rows.len());
        let (_, value) = &mut rows[row];
        if cut {
            value.truncate(byte.index(value.len()));
        } else {
            let byte = byte.index(value.len());
            value[byte] ^= 1 << bit;
        }
        let _ = Catalog::load(&rows, THREADS);
    }
}

/// What separates the parts of a key somewhere: in ours, in the command line's text, in keys that callers compose.
const DELIMITERS: [&[u8]; 9] = [b"/", b":", b"\0", b"hex:", b"\x03", b"\x01\0\0\0", b"_tp_0", b"\xff", b"a"];

fn composed() -> impl Strategy<Value = (u32, Vec<u8>)> {
    let parts = prop::collection::vec(prop::sample::select(&DELIMITERS[..]), 1..6);
    (0..3_u32, parts.prop_map(|parts| parts.concat()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A part of a key that looked like the mark of another part was read as that: keys of one caller were another's.
    #[test]
    fn keys_that_hold_delimiters_are_never_each_others(names in prop::collection::btree_set(composed(), 1..30)) {
        let mut world = World::new(1);
        for name in ["x", "y"] {
            world.tenant(&Command::CreateTenant { name: name.to_owned(), quota: Quota::default() });
        }
        let names: Vec<(TenantId, ObjectKey)> =
            names.into_iter().map(|(tenant, bytes)| (TenantId(tenant), ObjectKey::new(&bytes).expect("a legal key"))).collect();
        for ((tenant, key), sequence) in names.iter().zip(1..) {
            let item = CompleteItem { tenant: *tenant, key: key.clone(), ..world.put("placeholder", sequence, &[1]) };
            assert_eq!(world.complete(&item), CompleteOutcome::Completed { replicas: 1 });
        }
        let loaded = Catalog::load(&world.catalog.rows(), THREADS).expect("its own rows");
        for catalog in [&world.catalog, &loaded] {
            for ((tenant, key), sequence) in names.iter().zip(1..) {
                match catalog.locate(*tenant, key) {
                    Located::Found(location) => assert_eq!(location.version, version(sequence)),
                    other => panic!("{key}: {other:?}"),
                }
            }
            for tenant in (0..3).map(TenantId) {
                let query =
                    Query::List { tenant, prefix: Vec::new(), after: None, limit: 1000, data_type: None };
                let Answer::Page(page) = catalog.query(&query) else { panic!("no page") };
                let listed: Vec<ObjectKey> = page.objects.into_iter().map(|object| object.key).collect();
                let expected: Vec<ObjectKey> =
                    names.iter().filter(|(of, _)| *of == tenant).map(|(_, key)| key.clone()).collect();
                assert_eq!(listed, expected);
            }
        }
    }
}
