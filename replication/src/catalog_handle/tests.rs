//! The catalog through its handle: puts, leases against forgets, starts.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

use tidepool_metadata::catalog::{
    CompleteItem, CompleteOutcome, Copies, Labels, NewReplica, NodeAddresses, NodeOutcome, NodeRegistration, PinItem,
    RemoveItem, TierDescription,
};
use tidepool_metadata::{DataType, Durability, ErrorKind, Incarnation, NodeId, TierKind};

use super::*;
use crate::consensus::ClusterId;

const NODE: NodeId = NodeId(3);
const INCARNATION: Incarnation = Incarnation(1);
const MINUTE: Duration = Duration::from_secs(60);

async fn open(folder: &Path) -> (Group, CatalogHandle) {
    let config = GroupConfig::new(folder.into(), ClusterId(7), NODE);
    let limits =
        GroupLimits { image_interval: Duration::from_millis(1), image_flush_bytes: 64 << 10, ..GroupLimits::default() };
    let (group, handle) = Group::start_limited(config, limits, Arc::new(NoTransport)).unwrap();
    let tiers = vec![TierDescription { kind: TierKind::Dram, capacity_bytes: 1 << 30 }];
    let addresses = NodeAddresses::default();
    let registration =
        NodeRegistration { node: NODE, incarnation: INCARNATION, addresses, tiers, labels: Labels::default() };
    let (_, outcome) = handle.propose(Command::RegisterNode(registration)).await.unwrap();
    assert!(matches!(outcome, Outcome::Node(NodeOutcome::Accepted { .. })), "{outcome:?}");
    (group, handle)
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::new(name.as_bytes()).unwrap()
}

fn version(sequence: u64) -> VersionId {
    VersionId { node: NODE, incarnation: INCARNATION, sequence }
}

fn replica(sequence: u64) -> ReplicaId {
    ReplicaId { node: NODE, incarnation: INCARNATION, sequence }
}

fn complete(handle: &CatalogHandle, name: &str, sequence: u64) -> CompleteItem {
    CompleteItem {
        tenant: TenantId::DEFAULT,
        key: key(name),
        version: version(sequence),
        length: 100,
        slice_bytes: 1 << 20,
        data_type: DataType::KvCache,
        group: None,
        checksums: vec![17],
        replicas: vec![NewReplica { replica: replica(sequence), durability: Durability::Memory }],
        copies: Copies::ONE,
        durability: Durability::Memory,
        upsert: false,
        pin: false,
        reserved_at: handle.now(),
        request: None,
    }
}

async fn put(handle: &CatalogHandle, name: &str, sequence: u64) -> LogIndex {
    let command = Command::Complete(vec![complete(handle, name, sequence)]);
    let (index, outcome) = handle.propose(command).await.unwrap();
    let Outcome::Complete(outcomes) = outcome else { panic!("{outcome:?}") };
    assert!(matches!(outcomes.as_slice(), [CompleteOutcome::Completed { .. }]), "{outcomes:?}");
    index
}

fn name(name: &str, sequence: u64) -> ForgetName {
    (TenantId::DEFAULT, key(name), version(sequence), replica(sequence))
}

async fn exists(handle: &CatalogHandle, name: &str, lease: Option<Duration>) -> Presence {
    let (tenant, keys) = (TenantId::DEFAULT, vec![key(name)]);
    let presence = match lease {
        Some(lease) => handle.exists_with_lease(tenant, keys, lease).await,
        None => handle.exists(tenant, &keys, Read::Linearizable).await,
    };
    let (_, presence) = presence.unwrap();
    presence[0]
}

#[tokio::test]
async fn a_leased_object_is_not_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path()).await;
    put(&handle, "leased", 1).await;
    put(&handle, "free", 2).await;
    assert_eq!(exists(&handle, "leased", Some(MINUTE)).await, Presence::Present);
    assert_eq!(exists(&handle, "free", None).await, Presence::Present);
    assert!(handle.lease_left(TenantId::DEFAULT, &key("leased")).await > Duration::from_secs(50));
    assert_eq!(handle.lease_left(TenantId::DEFAULT, &key("free")).await, Duration::ZERO);
    let names = vec![name("leased", 1), name("free", 2), name("never", 3)];
    let answers = handle.forget(names, ForgetMode::EvenLast).await.unwrap();
    assert_eq!(answers, [Forgotten::Leased, Forgotten::Yes, Forgotten::Yes]);
    assert_eq!(exists(&handle, "free", None).await, Presence::Missing);

    let keys = || vec![key("leased"), key("free")];
    assert_eq!(handle.release_leases(TenantId::DEFAULT, keys()).await.unwrap(), [true, false]);
    let before = handle.status().log_last;
    let answers = handle.forget(vec![name("leased", 1)], ForgetMode::EvenLast).await.unwrap();
    assert_eq!(answers, [Forgotten::Yes]);
    assert!(handle.status().log_last > before);
    let left = handle.renew_leases(TenantId::DEFAULT, keys(), MINUTE).await.unwrap();
    assert_eq!(left, [Duration::ZERO; 2], "what is gone has no lease");
}

/// "pinned" as version 1, and "leased" as version 2.
async fn put_pinned_and_leased(handle: &CatalogHandle) {
    put(handle, "pinned", 1).await;
    put(handle, "leased", 2).await;
    let pin = PinItem { tenant: TenantId::DEFAULT, key: key("pinned"), request: None };
    handle.propose(Command::Pin(vec![pin])).await.unwrap();
    exists(handle, "leased", Some(MINUTE)).await;
}

#[tokio::test]
async fn pinned_and_leased_replicas_are_refused_before_the_log() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path()).await;
    put_pinned_and_leased(&handle).await;
    let before = handle.status().log_last;
    let names = vec![name("pinned", 1), name("leased", 2)];
    let answers = handle.forget(names, ForgetMode::EvenLast).await.unwrap();
    assert_eq!(answers, [Forgotten::Pinned, Forgotten::Leased]);
    assert_eq!(handle.status().log_last, before, "nothing was logged");
    let surplus = handle.forget(vec![name("pinned", 1)], ForgetMode::SurplusOnly).await.unwrap();
    assert_eq!(surplus, [Forgotten::StillNeeded]);
}

/// It was refused as leased or pinned, once and for all: listed and without a copy, its key was taken and its value gone.
#[tokio::test]
async fn a_lost_copy_is_forgotten_though_it_is_leased_or_pinned() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path()).await;
    put_pinned_and_leased(&handle).await;
    let names = vec![name("pinned", 1), name("leased", 2), name("never", 3)];
    for _ in 0..2 {
        assert_eq!(handle.forget(names.clone(), ForgetMode::Lost).await.unwrap(), [Forgotten::Yes; 3]);
    }
    for gone in ["pinned", "leased"] {
        assert_eq!(exists(&handle, gone, None).await, Presence::Missing);
    }
    put(&handle, "leased", 4).await;
    assert_eq!(exists(&handle, "leased", None).await, Presence::Present);
}

#[tokio::test]
async fn a_removed_object_leaves_no_lease_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path()).await;
    put(&handle, "a", 1).await;
    exists(&handle, "a", Some(MINUTE)).await;
    let remove = RemoveItem { tenant: TenantId::DEFAULT, key: key("a"), version: None, force: false, request: None };
    handle.propose(Command::Remove(vec![remove])).await.unwrap();
    put(&handle, "a", 2).await;
    assert_eq!(handle.lease_left(TenantId::DEFAULT, &key("a")).await, Duration::ZERO);
    assert_eq!(handle.forget(vec![name("a", 2)], ForgetMode::EvenLast).await.unwrap(), [Forgotten::Yes]);
}

#[tokio::test]
async fn many_long_names_are_forgotten_in_commands_that_fit() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path()).await;
    let long = |number: usize| format!("{number:04}{}", "k".repeat(1000));
    let names: Vec<_> = (0..600).map(|number| name(&long(number), number as u64)).collect();
    for chunk in (0..600).collect::<Vec<_>>().chunks(100) {
        let items = chunk.iter().map(|&number| complete(&handle, &long(number), number as u64)).collect();
        handle.propose(Command::Complete(items)).await.unwrap();
    }
    let answers = handle.forget(names, ForgetMode::EvenLast).await.unwrap();
    assert_eq!(answers, vec![Forgotten::Yes; 600]);
    let (_, Answer::Counts(counts)) = handle.query(Query::Counts, Read::Linearizable).await.unwrap() else { panic!() };
    assert_eq!(counts.objects, 0);
}

#[tokio::test]
async fn a_command_that_cannot_be_read_back_is_refused_and_harms_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path()).await;
    let item = CompleteItem { group: Some("g".repeat(300).into()), ..complete(&handle, "a", 1) };
    let error = handle.propose(Command::Complete(vec![item])).await.unwrap_err();
    assert!(error.is_unproposed() && error.kind() == ErrorKind::Invalid, "{error}");
    let many = (0..5000).map(|sequence| complete(&handle, "a", sequence)).collect();
    assert!(handle.propose(Command::Complete(many)).await.unwrap_err().is_unproposed());
    put(&handle, "a", 2).await;
}

#[tokio::test]
async fn reads_by_index_see_the_put_that_gave_it() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path()).await;
    let mut applied = handle.watch_applied();
    for sequence in 0..20 {
        let object = format!("a{sequence}");
        let index = put(&handle, &object, sequence).await;
        assert!(applied.wait_for(|&applied| applied >= index).await.is_ok());
        let keys = vec![key(&object)];
        let (seen, located) = handle.locate(TenantId::DEFAULT, keys, None, Read::AtLeast(index)).await.unwrap();
        assert!(seen >= index);
        let [Located::Found(location)] = located.as_slice() else { panic!("{located:?}") };
        assert_eq!((location.commit_index, location.version), (index, version(sequence)));
    }
}

#[tokio::test]
async fn changes_of_unknown_members_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path()).await;
    let error = handle.change_members(MemberChange::Promote(vec![NodeId(4)])).await.unwrap_err();
    assert_eq!((error.kind(), error.reason()), (ErrorKind::NotFound, "NO_SUCH_MEMBER"));
    handle.change_members(MemberChange::Remove(NodeId(4))).await.unwrap();
    assert_eq!(handle.status().voters, [NODE]);
}

#[tokio::test]
async fn the_catalog_is_the_same_after_every_start() {
    let folder = tempfile::tempdir().unwrap();
    let mut rows = Vec::new();
    for round in 0..4u64 {
        let (group, handle) = open(folder.path()).await;
        if round > 0 {
            // The registration of this start is one entry; the rest is as it was.
            let now = handle.consensus.peek(Catalog::rows);
            let objects = |rows: &[(Vec<u8>, Vec<u8>)]| rows.len();
            assert_eq!(objects(&now), objects(&rows));
        }
        for step in 0..60 {
            let sequence = round * 1000 + step;
            put(&handle, &format!("object-{sequence}"), sequence).await;
            if step % 3 == 0 {
                let names = vec![name(&format!("object-{sequence}"), sequence)];
                handle.forget(names, ForgetMode::EvenLast).await.unwrap();
            }
        }
        handle.consensus.peek(Catalog::validate);
        rows = handle.consensus.peek(Catalog::rows);
        // Every other end is a crash: the log makes up for what the image lacks.
        if round % 2 == 0 {
            handle.shutdown().await
        } else {
            handle.consensus.crash()
        }
        drop((group, handle));

        let (group, consensus) = Group::open::<Catalog>(
            GroupConfig {
                durability: crate::Durability::Os,
                ..GroupConfig::new(folder.path().into(), ClusterId(7), NODE)
            },
            GroupLimits::default(),
        )
        .unwrap();
        let (_, recovered) = consensus.read(Read::Linearizable, Catalog::rows).await.unwrap();
        assert_eq!(recovered, rows, "image and log give the state that was, round {round}");
        drop(group);
    }
}
