//! Nodes' lives, further copies, forgetting, free lists and digests.

use super::*;
use crate::object::KeyHash;

fn digests(world: &World, node: u32) -> Vec<u64> {
    match world.catalog.query(&Query::Digests { node: NodeId(node) }) {
        Answer::Digests(digests) => digests,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_older_life_is_refused() {
    let mut world = World::new(1);
    assert_eq!(world.register(1, 3), NodeOutcome::Accepted { announce: true });
    assert_eq!(world.register(1, 2), NodeOutcome::Stale { current: Incarnation(3) });
    assert_eq!(world.set_state(1, 2, NodeState::Absent), NodeOutcome::Stale { current: Incarnation(3) });
    assert_eq!(world.set_state(9, 1, NodeState::Absent), NodeOutcome::Unknown);
}

#[test]
fn a_node_goes_for_good_only_without_copies_and_takes_its_free_list_along() {
    let mut world = World::new(2);
    world.stored("kept", 1, &[1, 2]);
    world.stored("dropped", 2, &[1]);
    world.remove("dropped");
    assert_eq!(world.remove_node(1, 2), NodeOutcome::Stale { current: Incarnation(1) });
    assert_eq!(world.remove_node(1, 1), NodeOutcome::Holds { replicas: 1 });
    world.forget(ForgetMode::Lost, "kept", replica(1, 1));
    assert_eq!(world.remove_node(1, 1), NodeOutcome::Accepted { announce: false });
    assert_eq!(world.remove_node(1, 1), NodeOutcome::Unknown);
    assert_eq!(world.replicas("kept"), [replica(2, 1)]);
    let late = world.put("late", 3, &[1]);
    assert_eq!(world.complete(&late), CompleteOutcome::Refused(Refusal::TooFewReplicas));
    let loaded = Catalog::load(&world.catalog.rows(), THREADS).expect("an image without the node");
    assert_eq!(loaded.rows(), world.catalog.rows());
    assert_eq!(world.register(1, 2), NodeOutcome::Accepted { announce: false }, "as a new one");
}

#[test]
fn an_expelled_node_is_refused_in_every_later_life_and_after_a_restart() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    assert_eq!(world.expel_node(1, 2), NodeOutcome::Stale { current: Incarnation(1) });
    assert_eq!(world.expel_node(1, 1), NodeOutcome::Holds { replicas: 1 });
    world.forget(ForgetMode::Lost, "a", replica(1, 1));
    assert_eq!(world.expel_node(1, 1), NodeOutcome::Accepted { announce: false });
    assert_eq!(world.expel_node(1, 1), NodeOutcome::Expelled);
    assert_eq!([world.register(1, 1), world.register(1, 7)], [NodeOutcome::Expelled; 2]);
    world.catalog = Catalog::load(&world.catalog.rows(), THREADS).expect("an image with its name");
    assert_eq!(world.register(1, 8), NodeOutcome::Expelled);
    assert_eq!(world.register(3, 1), NodeOutcome::Accepted { announce: false });
    let is_expelled = |node| world.catalog.query(&Query::Expelled { node: NodeId(node) });
    assert_eq!([1, 2, 9].map(is_expelled), [true, false, false].map(Answer::Expelled));
}

#[test]
fn an_absent_node_keeps_its_copies_for_its_return() {
    let mut world = World::new(1);
    world.stored("a", 1, &[1]);
    world.set_state(1, 1, NodeState::Absent);
    assert_eq!(world.presence("a"), Presence::Unavailable);
    world.register(1, 1);
    assert_eq!(world.presence("a"), Presence::Present);
}

/// B052 and B054: a node that is back before or after others noticed, with or without what it had.
#[test]
fn copies_of_an_older_life_are_recovering_until_the_announcement_ends() {
    let mut world = World::new(1);
    world.stored("a", 1, &[1]);
    assert_eq!(world.register(1, 2), NodeOutcome::Accepted { announce: true });
    assert_eq!(world.presence("a"), Presence::Recovering);
    let mut item = world.put("b", 2, &[1]);
    item.replicas[0].replica.incarnation = Incarnation(2);
    world.complete(&item);
    assert_eq!(world.presence("b"), Presence::Present, "copies of the new life are confirmed");
    let end = |last| Command::EndAnnouncement { node: NodeId(1), incarnation: Incarnation(2), lost: vec![], last };
    world.apply(&end(false));
    assert_eq!(world.presence("a"), Presence::Recovering);
    world.apply(&end(true));
    assert_eq!(world.presence("a"), Presence::Present);
}

#[test]
fn only_the_committed_end_of_an_announcement_drops_what_was_lost() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    world.stored("b", 2, &[1, 2]);
    world.pin("a");
    world.register(1, 2);
    let lost =
        vec![replica_name("a", replica(1, 1)), replica_name("b", replica(1, 2)), replica_name("b", replica(2, 2))];
    let mut end = Command::EndAnnouncement { node: NodeId(1), incarnation: Incarnation(1), lost, last: true };
    let stale = NodeOutcome::Stale { current: Incarnation(2) };
    assert_eq!(world.apply(&end), Outcome::Announcement { node: stale, lost: vec![] });
    assert_eq!(world.counts().objects, 2);
    if let Command::EndAnnouncement { incarnation, .. } = &mut end {
        *incarnation = Incarnation(2);
    }
    let outcomes = vec![
        ForgetOutcome::Forgotten { last: true },
        ForgetOutcome::Forgotten { last: false },
        ForgetOutcome::Unknown, // another node's copy
    ];
    let node = NodeOutcome::Accepted { announce: false };
    assert_eq!(world.apply(&end), Outcome::Announcement { node, lost: outcomes });
    assert_eq!(world.presence("a"), Presence::Missing);
    assert_eq!(world.replicas("b"), [replica(2, 2)]);
}

#[test]
fn an_announcement_drops_no_copy_of_the_new_life() {
    let mut world = World::new(1);
    world.register(1, 2);
    let mut item = world.put("a", 1, &[1]);
    item.replicas[0].replica.incarnation = Incarnation(2);
    world.complete(&item);
    let lost = vec![replica_name("a", item.replicas[0].replica)];
    let end = Command::EndAnnouncement { node: NodeId(1), incarnation: Incarnation(2), lost, last: true };
    let node = NodeOutcome::Accepted { announce: false };
    assert_eq!(world.apply(&end), Outcome::Announcement { node, lost: vec![ForgetOutcome::Unknown] });
    assert_eq!(world.presence("a"), Presence::Present);
}

#[test]
fn a_late_forget_spares_the_replica_of_a_later_put() {
    let mut world = World::new(1);
    world.stored("a", 1, &[1]);
    world.remove("a");
    world.stored("a", 2, &[1]);
    assert_eq!(world.forget(ForgetMode::EvenLast, "a", replica(1, 1)), ForgetOutcome::Unknown);
    assert_eq!(world.replicas("a"), [replica(1, 2)]);
}

#[test]
fn two_nodes_cannot_both_trim_the_others_surplus() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1, 2]);
    let mode = ForgetMode::SurplusOnly;
    assert_eq!(world.forget(mode, "a", replica(1, 1)), ForgetOutcome::Forgotten { last: false });
    assert_eq!(world.forget(mode, "a", replica(2, 1)), ForgetOutcome::StillNeeded);
}

#[test]
fn copies_on_absent_nodes_make_no_surplus() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1, 2]);
    world.set_state(1, 1, NodeState::Absent);
    assert_eq!(world.forget(ForgetMode::SurplusOnly, "a", replica(2, 1)), ForgetOutcome::StillNeeded);
}

#[test]
fn a_copy_on_a_draining_node_is_surplus_once_the_others_are_there_and_not_before() {
    let mut world = World::new(3);
    let mut item = world.put("a", 1, &[1, 2]);
    item.copies = Copies::new(2, 1).expect("legal");
    world.complete(&item);
    world.set_state(1, 1, NodeState::Draining);
    assert_eq!(world.forget(ForgetMode::SurplusOnly, "a", replica(1, 1)), ForgetOutcome::StillNeeded);
    let third = AddReplicaItem {
        tenant: TENANT,
        key: key("a"),
        version: version(1),
        replica: replica(3, 1),
        durability: Durability::Memory,
        reserved_at: LogTime(world.now),
    };
    assert_eq!(world.apply(&Command::AddReplicas(vec![third])), Outcome::AddReplicas(vec![AddReplicaOutcome::Added]));
    assert_eq!(world.forget(ForgetMode::SurplusOnly, "a", replica(2, 1)), ForgetOutcome::StillNeeded, "one is to go");
    assert_eq!(world.forget(ForgetMode::SurplusOnly, "a", replica(1, 1)), ForgetOutcome::Forgotten { last: false });
    // With fewer nodes than copies are wanted, the last node that stays is enough.
    world.set_state(3, 1, NodeState::Draining);
    assert_eq!(world.forget(ForgetMode::SurplusOnly, "a", replica(3, 1)), ForgetOutcome::Forgotten { last: false });
}

#[test]
fn an_evicted_copy_is_not_wanted_any_more_and_a_lost_one_is() {
    let wanted = |world: &World| match world.catalog.query(&Query::Stat { tenant: TENANT, key: key("a") }) {
        Answer::Stat(Some(stat)) => stat.copies.wanted(),
        other => panic!("{other:?}"),
    };
    let mut world = World::new(3);
    let mut item = world.put("a", 1, &[1, 2, 3]);
    item.copies = Copies::new(3, 3).expect("legal");
    world.complete(&item);
    world.register(1, 2);
    let lost = vec![replica_name("a", replica(1, 1))];
    let (node, incarnation) = (NodeId(1), Incarnation(2));
    world.apply(&Command::EndAnnouncement { node, incarnation, lost, last: true });
    assert_eq!(wanted(&world), 3, "it is made anew");
    assert_eq!(world.forget(ForgetMode::EvenLast, "a", replica(2, 1)), ForgetOutcome::Forgotten { last: false });
    assert_eq!(wanted(&world), 1);
}

#[test]
fn a_surplus_leaves_one_copy_of_the_durability_asked_for() {
    let mut world = World::new(2);
    let mut item = world.put("a", 1, &[1, 2]);
    item.durability = Durability::Nvme;
    item.replicas[0].durability = Durability::Nvme;
    world.complete(&item);
    assert_eq!(world.forget(ForgetMode::SurplusOnly, "a", replica(1, 1)), ForgetOutcome::StillNeeded);
    let memory = world.forget(ForgetMode::SurplusOnly, "a", replica(2, 1));
    assert_eq!(memory, ForgetOutcome::Forgotten { last: false });
}

/// A node that has lost its copy can keep no promise: what was listed on, could be neither read nor put anew.
#[test]
fn a_copy_that_is_lost_goes_whatever_was_promised() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1, 2]);
    world.pin("a");
    assert_eq!(world.forget(ForgetMode::Lost, "a", replica(1, 1)), ForgetOutcome::Forgotten { last: false });
    assert_eq!(world.replicas("a"), [replica(2, 1)]);
    assert_eq!(world.forget(ForgetMode::Lost, "a", replica(2, 1)), ForgetOutcome::Forgotten { last: true });
    assert_eq!(world.presence("a"), Presence::Missing);
    assert!(world.free_list(1).is_empty() && world.free_list(2).is_empty(), "there is nothing to free");
    world.stored("a", 2, &[1]);
    assert_eq!(world.forget(ForgetMode::Lost, "a", replica(1, 1)), ForgetOutcome::Unknown, "a repeat");
    assert_eq!(world.presence("a"), Presence::Present);
}

#[test]
fn eviction_of_the_last_copy_ends_the_object_unless_pinned() {
    let mut world = World::new(1);
    world.stored("a", 1, &[1]);
    world.pin("a");
    assert_eq!(world.forget(ForgetMode::EvenLast, "a", replica(1, 1)), ForgetOutcome::Pinned);
    world.apply(&Command::Unpin(vec![PinItem { tenant: TENANT, key: key("a"), request: None }]));
    assert_eq!(world.forget(ForgetMode::EvenLast, "a", replica(1, 1)), ForgetOutcome::Forgotten { last: true });
    assert_eq!(world.presence("a"), Presence::Missing);
    assert_eq!(world.free_list(1), [], "its node frees on the answer");
    assert_eq!(world.forget(ForgetMode::EvenLast, "a", replica(1, 1)), ForgetOutcome::Unknown);
}

#[test]
fn a_further_copy_counts_once_however_often_it_is_added() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    let item = world.further("a", 1, replica(2, 9));
    assert_eq!(world.add(&item), AddReplicaOutcome::Added);
    assert_eq!(world.add(&item), AddReplicaOutcome::Added);
    assert_eq!(world.counts().replicas, 2);
}

#[test]
fn a_forgotten_copy_is_not_added_again_by_a_repeat() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    let item = world.further("a", 1, replica(2, 9));
    world.add(&item);
    world.forget(ForgetMode::SurplusOnly, "a", replica(2, 9));
    assert_eq!(world.add(&item), AddReplicaOutcome::Refused(Refusal::Abandoned));
}

#[test]
fn a_copy_that_was_refused_stays_refused() {
    let mut world = World::new(2);
    let item = world.further("a", 1, replica(2, 9));
    assert_eq!(world.add(&item), AddReplicaOutcome::Refused(Refusal::NoSuchVersion));
    world.stored("a", 1, &[1]);
    assert_eq!(world.add(&item), AddReplicaOutcome::Refused(Refusal::Abandoned));
}

#[test]
fn a_copy_of_a_replaced_version_is_refused() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    let item = world.further("a", 1, replica(2, 9));
    world.remove("a");
    world.stored("a", 2, &[1]);
    assert_eq!(world.add(&item), AddReplicaOutcome::Refused(Refusal::NoSuchVersion));
}

#[test]
fn a_node_has_one_copy_of_a_version() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    let second = world.further("a", 1, replica(1, 9));
    assert_eq!(world.add(&second), AddReplicaOutcome::Refused(Refusal::TooManyReplicas));
}

#[test]
fn a_copy_of_an_ended_life_is_not_added() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    let item = world.further("a", 1, replica(2, 9));
    world.register(2, 2);
    assert_eq!(world.add(&item), AddReplicaOutcome::Refused(Refusal::StaleNode));
}

#[test]
fn adopt_takes_copies_of_older_lives_by_version_and_creates_nothing() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    world.register(2, 2);
    let facts = |commit_index| ObjectFacts {
        length: 100,
        slice_bytes: 1 << 20,
        data_type: DataType::KvCache,
        checksums: vec![1],
        commit_index: LogIndex(commit_index),
    };
    let known = AdoptItem { copy: world.further("a", 1, replica(2, 9)), facts: Some(facts(5)) };
    assert_eq!(world.adopt(&known), AddReplicaOutcome::Added);
    let other_version = AdoptItem { copy: world.further("a", 2, replica(2, 10)), facts: Some(facts(5)) };
    assert_eq!(world.adopt(&other_version), AddReplicaOutcome::Refused(Refusal::NoSuchVersion));
    let unknown = AdoptItem { copy: world.further("b", 3, replica(2, 11)), facts: Some(facts(5)) };
    assert_eq!(world.adopt(&unknown), AddReplicaOutcome::Refused(Refusal::NoSuchVersion));
    assert_eq!(world.presence("b"), Presence::Missing);
}

/// Being silent for a while is no reason to take new objects again.
#[test]
fn a_node_that_is_to_be_emptied_is_so_when_it_is_back() {
    let mut world = World::new(2);
    let state = |world: &World| match world.catalog.query(&Query::Nodes) {
        Answer::Nodes(nodes) => nodes[0].state,
        other => panic!("{other:?}"),
    };
    let verdict = |world: &mut World, state| {
        let (node, incarnation) = (NodeId(1), Incarnation(1));
        world.apply(&Command::SetNodeState { node, incarnation, state, term: Some(Term(1)) });
    };
    world.set_state(1, 1, NodeState::Draining);
    verdict(&mut world, NodeState::Absent);
    assert_eq!(state(&world), NodeState::Absent);
    world.catalog = Catalog::load(&world.catalog.rows(), THREADS).expect("its own rows");
    verdict(&mut world, NodeState::Up);
    assert_eq!(state(&world), NodeState::Draining);
    verdict(&mut world, NodeState::Absent);
    world.register(1, 2);
    assert_eq!(state(&world), NodeState::Draining, "a new life too");
    world.set_state(1, 2, NodeState::Up);
    assert_eq!(state(&world), NodeState::Up);
    let (node, incarnation) = (NodeId(1), Incarnation(2));
    world.apply(&Command::SetNodeState { node, incarnation, state: NodeState::Absent, term: Some(Term(1)) });
    world.apply(&Command::SetNodeState { node, incarnation, state: NodeState::Up, term: Some(Term(1)) });
    assert_eq!(state(&world), NodeState::Up, "that was over");
}

#[test]
fn in_a_rebuild_the_highest_commit_index_of_a_key_wins() {
    let mut world = World::new(3);
    world.apply(&Command::SetSetting(Setting::Rebuilding(true)));
    assert_eq!(world.presence("a"), Presence::Recovering);
    assert_eq!(world.catalog.locate(TENANT, &key("a")), Located::Recovering);
    let announced = |world: &World, sequence, node, commit_index| AdoptItem {
        copy: world.further("a", sequence, replica(node, sequence)),
        facts: Some(ObjectFacts {
            length: 100,
            slice_bytes: 1 << 20,
            data_type: DataType::KvCache,
            checksums: vec![1],
            commit_index: LogIndex(commit_index),
        }),
    };
    let sealed_only = announced(&world, 1, 1, 0);
    assert_eq!(world.adopt(&sealed_only), AddReplicaOutcome::Added);
    let new = announced(&world, 2, 2, 70);
    assert_eq!(world.adopt(&new), AddReplicaOutcome::Added);
    assert_eq!(world.free_list(1), [replica(1, 1)]);
    let old = announced(&world, 3, 3, 60);
    assert_eq!(world.adopt(&old), AddReplicaOutcome::Refused(Refusal::NoSuchVersion));
    assert_eq!(world.location("a").version, version(2));
    let second_copy = AdoptItem { copy: world.further("a", 2, replica(3, 12)), facts: new.facts.clone() };
    assert_eq!(world.location("a").copies.wanted(), 1);
    assert_eq!(world.adopt(&second_copy), AddReplicaOutcome::Added);
    assert_eq!(world.location("a").copies.wanted(), 2, "none of them is one too many");
    let put = world.stored("b", 9, &[1]);
    let ancient = AdoptItem { copy: world.further("b", 8, replica(2, 8)), facts: announced(&world, 8, 2, 999).facts };
    assert_eq!(world.adopt(&ancient), AddReplicaOutcome::Refused(Refusal::NoSuchVersion));
    assert_eq!(world.location("b").version, put.version, "what was put since the rebuild began stays");
}

#[test]
fn a_free_list_is_read_by_index_and_never_cut_within_one() {
    let mut world = World::new(1);
    (1..=6).for_each(|sequence| {
        world.stored(&format!("{sequence}"), sequence, &[1]);
    });
    let removal =
        |name: &str| RemoveItem { tenant: TENANT, key: key(name), version: None, force: false, request: None };
    world.apply(&Command::Remove(vec![removal("1"), removal("2"), removal("3")]));
    let first = world.index;
    world.apply(&Command::Remove(vec![removal("4"), removal("5")]));
    let page = |after, limit| match world.catalog.query(&Query::FreeList { node: NodeId(1), after, limit }) {
        Answer::FreeList(page) => page,
        other => panic!("{other:?}"),
    };
    let one = page(LogIndex(0), 1);
    assert_eq!((one.items.len(), one.more), (3, true));
    assert!(one.items.iter().all(|item| item.index == LogIndex(first)));
    let two = page(LogIndex(first), 100);
    assert_eq!((two.items.len(), two.more), (2, false));
}

#[test]
fn freed_entries_leave_the_list_up_to_their_index_only() {
    let mut world = World::new(1);
    world.stored("a", 1, &[1]);
    world.stored("b", 2, &[1]);
    world.remove("a");
    let first = LogIndex(world.index);
    world.remove("b");
    world.apply(&Command::Freed { node: NodeId(1), through: first });
    assert_eq!(world.free_list(1), [replica(1, 2)]);
    world.apply(&Command::Freed { node: NodeId(1), through: LogIndex(u64::MAX) });
    assert_eq!(world.free_list(1), []);
}

#[test]
fn freed_spares_what_its_own_entry_drops() {
    let mut world = World::new(1);
    world.stored("a", 1, &[1]);
    let at = EntryContext { index: LogIndex(world.index + 1), term: Term(1), time: LogTime(world.now) };
    let removal = RemoveItem { tenant: TENANT, key: key("a"), version: None, force: false, request: None };
    world.catalog.apply(at, &Command::Remove(vec![removal]));
    world.catalog.apply(at, &Command::Freed { node: NodeId(1), through: at.index });
    assert_eq!(world.free_list(1), [replica(1, 1)]);
}

#[test]
fn digests_are_what_a_node_computes_of_its_own_copies() {
    let mut world = World::new(2);
    (1..=20).for_each(|sequence| {
        world.stored(&format!("{sequence}"), sequence, &[1, 2]);
    });
    world.remove("7");
    let mut expected = KeyDigests::default();
    for sequence in (1..=20).filter(|&sequence| sequence != 7) {
        let hash = KeyHash::of(TENANT, sequence.to_string().as_bytes());
        expected.toggle(hash, version(sequence), replica(2, sequence));
    }
    assert_eq!(digests(&world, 2), expected.as_slice());
    (1..=20).for_each(|sequence| {
        world.remove(&sequence.to_string());
    });
    assert_eq!(digests(&world, 2), vec![0; KEY_BUCKETS]);
}

#[test]
fn a_bucket_lists_the_copies_behind_its_digest() {
    let mut world = World::new(2);
    (1..=50).for_each(|sequence| {
        world.stored(&format!("{sequence}"), sequence, &[1 + (sequence % 2) as u32]);
    });
    let mut seen = 0;
    for number in 0..KEY_BUCKETS {
        let bucket = KeyBucket::new(number).expect("below the number of buckets");
        let held = held_in(&world, bucket, MAX_PAGE_ITEMS);
        for copy in &held {
            assert_eq!(KeyBucket::of(KeyHash::of(copy.tenant, copy.key.as_bytes())), bucket);
            assert_eq!(copy.replica.node, NodeId(1));
        }
        seen += held.len();
    }
    assert_eq!(seen, 25);
    assert_eq!(KeyBucket::new(KEY_BUCKETS), None);
}

#[test]
fn pages_of_a_bucket_have_each_copy_once_in_order_and_no_more_than_asked_for() {
    let mut world = World::new(2);
    let wanted = KeyBucket::new(7).expect("below the number of buckets");
    let keys = (0..).map(|number| number.to_string());
    let keys = keys.filter(|key| KeyBucket::of(KeyHash::of(TENANT, key.as_bytes())) == wanted);
    for (key, sequence) in keys.take(12).zip(1..) {
        // Every fourth lies elsewhere.
        world.stored(&key, sequence, &[if sequence % 4 == 0 { 2 } else { 1 }]);
    }
    let all = held_in(&world, wanted, MAX_PAGE_ITEMS);
    assert_eq!(all.len(), 9);
    assert!(all.is_sorted_by(|one, other| one.key < other.key));
    for limit in [1, 2, 3, 8, 9, 10] {
        assert_eq!(held_in(&world, wanted, limit), all, "{limit} a page");
    }
}

/// What node 1 has in a bucket, read in pages of `limit`.
fn held_in(world: &World, bucket: KeyBucket, limit: usize) -> Vec<HeldReplica> {
    let (mut held, mut after) = (Vec::new(), None);
    loop {
        let query = Query::Bucket { node: NodeId(1), bucket, after, limit };
        let Answer::Bucket(page) = world.catalog.query(&query) else { panic!("answer of bucket") };
        assert!(page.replicas.len() <= limit);
        held.extend(page.replicas);
        match page.next {
            Some(next) => after = Some(next),
            None => return held,
        }
    }
}

#[test]
fn there_are_only_so_many_nodes() {
    let mut catalog = Catalog::new();
    let mut last = None;
    for node in 0..=MAX_NODES as u32 {
        let registration = NodeRegistration {
            node: NodeId(node),
            incarnation: Incarnation(1),
            addresses: NodeAddresses::default(),
            tiers: vec![],
            labels: Labels::default(),
        };
        let at = EntryContext { index: LogIndex(1), term: Term(1), time: LogTime(1) };
        last = Some(catalog.apply(at, &Command::RegisterNode(registration)));
    }
    assert_eq!(last, Some(Outcome::Node(NodeOutcome::TooMany)));
}

#[test]
fn a_verdict_that_reaches_the_log_in_a_later_term_is_none() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    let (node, incarnation) = (NodeId(1), Incarnation(1));
    let verdict = |term| Command::SetNodeState { node, incarnation, state: NodeState::Absent, term: Some(Term(term)) };
    // The world's entries are all of term 1.
    assert_eq!(world.apply(&verdict(0)), Outcome::Node(NodeOutcome::OutOfTerm));
    let second = world.put("a", 2, &[2]);
    assert_eq!(world.complete(&second), CompleteOutcome::AlreadyExists { version: version(1) }, "node 1 is not gone");
    assert_eq!(world.apply(&verdict(1)), Outcome::Node(NodeOutcome::Accepted { announce: false }));
}
