//! Groups of several members: what one of them answered, all of them keep, whoever dies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::network::{Network, until};
use super::*;
use crate::consensus::{Formation, LeaderReads, MemberChange};

async fn count(member: &Consensus<Counter>, name: &str) -> u64 {
    let name = name.as_bytes().to_vec();
    member.read(Read::Linearizable, |machine| machine.counts.get(&name).copied().unwrap_or(0)).await.unwrap().1
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_one_grows_to_three_while_it_serves() {
    let mut network = Network::new(eager());
    let founder = network.start(1, Formation::Found);
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let load = tokio::spawn({
        let (founder, stop, done) = (founder.clone(), Arc::clone(&stop), Arc::clone(&done));
        async move {
            while !stop.load(Ordering::SeqCst) {
                assert_eq!(add(&founder, "load").await, done.fetch_add(1, Ordering::SeqCst) + 1);
            }
        }
    });
    network.join(2, 1).await;
    until("a learner", || founder.status().learners == [NodeId(2)]).await;
    assert_eq!(founder.status().voters, [NodeId(1)], "two voters tolerate nothing: the first learner waits");
    network.join(3, 1).await;
    let all = [1, 2, 3].map(NodeId);
    until("three voters", || (1..=3).all(|node| network.member(node).status().voters == all)).await;
    stop.store(true, Ordering::SeqCst);
    load.await.unwrap();
    for node in 1..=3 {
        assert_eq!(count(&network.member(node), "load").await, done.load(Ordering::SeqCst), "node {node}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_follows_and_takes_commands_and_never_votes() {
    let mut network = Network::new(eager());
    let founder = network.start(1, Formation::Found);
    for guest in 2..=4 {
        network.join(guest, MemberId::guest(NodeId(guest), 1).life()).await;
    }
    assert_eq!(add(&network.member(2), "a").await, 1);
    until("all have caught up", || (2..=4).all(|node| network.member(node).applied() == founder.applied())).await;
    let refused = founder.change_members(MemberChange::Promote(vec![NodeId(2)])).await;
    assert!(matches!(refused, Err(CatalogError::NoSuchMember)), "{refused:?}");
    network.join(5, 1).await;
    network.join(6, 1).await;
    let voters = [1, 5, 6].map(NodeId);
    let votes = |node: u32| {
        let status = network.member(node).status();
        status.voters == voters && !status.members.is_changing()
    };
    until("the others vote", || [1, 5, 6].into_iter().all(votes)).await;
    let mut learners = founder.status().learners;
    learners.sort_unstable();
    assert_eq!(learners, [2, 3, 4].map(NodeId), "three guests stayed what they are");
    // It joined over the wires of a group whose leader is gone now, and serves on.
    network.crash(1);
    assert_eq!(add(&network.member(3), "a").await, 2);
    assert_eq!(count(&network.member(4), "a").await, 2);
    network.crash(3);
    network.start(3, Formation::Found);
    assert!(network.member(3).status().members.of(NodeId(3)).unwrap().is_guest(), "after a restart too");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_member_takes_commands_and_reads_what_others_were_answered() {
    let network = Network::three(eager()).await;
    for round in 0..30u32 {
        let (writer, reader) = (network.member(1 + round % 3), network.member(1 + (round + 1) % 3));
        assert_eq!(add(&writer, "a").await, u64::from(round) + 1);
        // Read at once where it was answered, and linearizably anywhere else.
        let seen = writer.read(Read::Local, |machine| machine.counts[b"a".as_slice()]).await.unwrap().1;
        assert!(seen > u64::from(round));
        assert!(count(&reader, "a").await > u64::from(round));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_death_of_a_leader_loses_nothing_and_repeats_nothing() {
    let mut network = Network::three(eager()).await;
    let (stop, mut loads) = (Arc::new(AtomicBool::new(false)), Vec::new());
    let mut expected = 0;
    for round in 0..4 {
        let leader = network.leader().await;
        for node in network.nodes().into_iter().filter(|&node| node != leader) {
            let (member, stop) = (network.member(node), Arc::clone(&stop));
            loads.push(tokio::spawn(async move {
                let mut answered = 0u64;
                while !stop.load(Ordering::SeqCst) {
                    // Through the change of leaders: each is answered, and done once.
                    add(&member, "a").await;
                    answered += 1;
                }
                answered
            }));
        }
        // Any moment will do.
        tokio::time::sleep(Duration::from_millis(100 + 30 * round)).await;
        network.crash(leader);
        let next = network.leader().await;
        assert_ne!(next, leader);
        add(&network.member(next), "after").await;
        stop.store(true, Ordering::SeqCst);
        for load in loads.drain(..) {
            expected += load.await.unwrap();
        }
        stop.store(false, Ordering::SeqCst);
        network.start(leader, Formation::Found);
        assert_eq!(count(&network.member(leader), "a").await, expected, "round {round}, seen by who was dead");
        assert_eq!(count(&network.member(next), "after").await, round + 1);
    }
    assert!(expected > 50, "the load was real: {expected}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_cut_off_answers_nothing_and_steps_down() {
    let mut network = Network::three(eager()).await;
    let leader = network.leader().await;
    let old = network.member(leader);
    add(&old, "a").await;
    network.cut(leader, true);
    let other = network.nodes().into_iter().find(|&node| node != leader).unwrap();
    assert_eq!(add(&network.member(other), "a").await, 2, "the majority goes on");
    // The old one may not know yet; it must not answer with what it has.
    for read in [Read::Linearizable, Read::AtLeast(LogIndex(0))] {
        let stale = tokio::time::timeout(Duration::from_secs(1), old.read(read, |machine| machine.counts.clone()));
        assert!(
            !matches!(stale.await, Ok(Ok(_))),
            "{read:?} without a quorum waits, and is refused when that takes long"
        );
    }
    until("it counts as cut off", || old.is_cut_off()).await;
    let refused = old.read(Read::Linearizable, |_| ()).await;
    assert!(matches!(refused, Err(CatalogError::NotLeader { .. })), "{refused:?}");
    assert_eq!(old.read(Read::Local, |machine| machine.counts[b"a".as_slice()]).await.unwrap().1, 1);
    let proposal = tokio::spawn({
        let old = old.clone();
        async move { add(&old, "b").await }
    });
    network.cut(leader, false);
    until("it hears from the leader", || !old.is_cut_off()).await;
    assert_eq!(count(&old, "a").await, 2);
    assert_eq!(old.read(Read::AtLeast(LogIndex(0)), |machine| machine.counts[b"a".as_slice()]).await.unwrap().1, 2);
    assert_eq!(proposal.await.unwrap(), 1, "what was asked of it meanwhile is done once it is back");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_reads_by_quorum_answers_nothing_that_no_quorum_has_followed() {
    let mut network = Network::three_that_read(GroupLimits::default(), LeaderReads::Quorum).await;
    let leader = network.leader().await;
    let member = network.member(leader);
    add(&member, "seen").await;
    member.read(Read::Linearizable, |_| ()).await.expect("a quorum follows");
    network.cut(leader, true);
    // Its lease would hold for a while yet.
    let read = tokio::time::timeout(Duration::from_secs(2), member.read(Read::Linearizable, |_| ()));
    assert!(!matches!(read.await, Ok(Ok(_))), "nobody said that it still leads");
    network.cut(leader, false);
    until("it hears from the leader", || !member.is_cut_off()).await;
    let other = network.leader().await;
    network.member(other).read(Read::Linearizable, |_| ()).await.expect("a quorum follows");
}

/// What was told by a life that loss of power cut short must not hold anybody up.
#[tokio::test(flavor = "multi_thread")]
async fn a_read_ahead_of_the_log_waits_for_it_but_not_on_the_leader() {
    let network = Network::three(eager()).await;
    let leader = network.member(network.leader().await);
    let other = network.nodes().into_iter().find(|&node| !network.member(node).is_leader()).unwrap();
    let follower = network.member(other);
    add(&leader, "a").await;
    let ahead = |count| LogIndex(leader.applied().0 + count);
    let read = |at| {
        let follower = follower.clone();
        async move { follower.read(Read::AtLeast(at), |machine| machine.counts.len()).await }
    };
    let next = ahead(1);
    let waiting = tokio::spawn(read(next));
    tokio::time::timeout(Duration::from_millis(20), read(ahead(100))).await.unwrap_err();
    assert!(!waiting.is_finished());
    assert!(leader.read(Read::AtLeast(ahead(100)), |_| ()).await.unwrap().0 < next);
    add(&leader, "b").await;
    assert!(waiting.await.unwrap().unwrap().0 >= next);
    // The end of the group wakes whoever waits.
    let waiting = tokio::spawn(read(ahead(100)));
    tokio::task::yield_now().await;
    follower.crash();
    assert!(matches!(waiting.await.unwrap(), Err(CatalogError::Failed { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn leadership_is_handed_over_without_a_lost_command() {
    let network = Network::three(eager()).await;
    for round in 1..=6u64 {
        let leader = network.leader().await;
        let target = 1 + leader % 3;
        let member = network.member(leader);
        let proposals: Vec<_> = (0..20)
            .map(|_| {
                let member = member.clone();
                tokio::spawn(async move { add(&member, "a").await })
            })
            .collect();
        member.change_members(MemberChange::Transfer(NodeId(target))).await.unwrap();
        until("the new leader", || network.member(target).status().role == Role::Leader).await;
        for proposal in proposals {
            proposal.await.unwrap();
        }
        assert_eq!(count(&member, "a").await, 20 * round);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_is_far_behind_takes_a_snapshot_and_goes_on() {
    let mut network = Network::three(eager()).await;
    let leader = network.leader().await;
    let behind = 1 + leader % 3;
    network.crash(behind);
    let name = "n".repeat(1000);
    let member = network.member(leader);
    for step in 0..400 {
        add(&member, &format!("{name}{}", step % 50)).await;
    }
    let status = member.status();
    until("compaction", || member.status().log_first > LogIndex(100)).await;
    let back = network.start(behind, Formation::Found);
    until("the member is back", || back.applied() >= status.applied).await;
    until("its log begins behind a snapshot", || back.status().log_first > LogIndex(100)).await;
    let expected = counts(&member).await;
    assert_eq!(counts(&back).await, expected);
    // It takes part, and its image is its own: it starts again from it.
    assert_eq!(add(&back, "after").await, 1);
    network.crash(behind);
    let back = network.start(behind, Formation::Found);
    assert_eq!(count(&back, "after").await, 1);
    // All three can still do without any one of them.
    network.crash(leader);
    assert_eq!(add(&back, "after").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_voter_that_lost_its_log_comes_back_as_another_member() {
    let mut network = Network::three(eager()).await;
    let leader = network.leader().await;
    let lost = 1 + leader % 3;
    for _ in 0..10 {
        add(&network.member(leader), "a").await;
    }
    network.crash(lost);
    network.lose_folder(lost);
    let back = network.join(lost, 2).await;
    let (old, new) = (MemberId::new(NodeId(lost), 1), MemberId::new(NodeId(lost), 2));
    let members = || network.member(leader).status().members;
    until("it votes again", || members().voters().contains(&new)).await;
    assert!(!members().all().contains(&old) && members().voters().len() == 3);
    assert_eq!(count(&back, "a").await, 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_member_is_told_and_stops() {
    let mut network = Network::three(eager()).await;
    let leader = network.leader().await;
    let gone = 1 + leader % 3;
    let removed = network.member(gone);
    network.member(leader).change_members(MemberChange::Remove(NodeId(gone))).await.unwrap();
    assert_eq!(network.member(leader).status().voters.len(), 2);
    until("it knows", || removed.status().failure.is_some() || !removed.status().voters.contains(&NodeId(gone))).await;
    add(&network.member(leader), "a").await;
    // A restart does not make it one.
    network.crash(gone);
    let back = network.start(gone, Formation::Found);
    add(&network.member(leader), "a").await;
    assert!(!back.is_leader());
    assert_eq!(count(&network.member(leader), "a").await, 2, "it disturbs nobody");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_hands_over_and_the_others_go_on_at_once() {
    let mut network = Network::three(eager()).await;
    let leader = network.leader().await;
    add(&network.member(leader), "a").await;
    network.stop(leader);
    let other = network.nodes()[0];
    assert_eq!(add(&network.member(other), "a").await, 2);
    network.start(leader, Formation::Found);
    assert_eq!(count(&network.member(leader), "a").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_whose_host_lost_power_under_os_must_join_again() {
    let mut network = Network::three(eager()).await;
    let leader = network.leader().await;
    let lost = 1 + leader % 3;
    network.crash(lost);
    std::fs::write(network.folder(lost).join("boot"), "o another boot").unwrap();
    let error = network.try_start(lost, Formation::Found, 3).err().expect("refused");
    assert!(matches!(error, GroupError::MustRejoin), "{error}");
}
