//! The bytes of commands.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;

fn encoded(command: &Command) -> Vec<u8> {
    let mut bytes = Vec::new();
    command.encode(&mut bytes);
    bytes
}

fn keys() -> impl Strategy<Value = ObjectKey> {
    vec(any::<u8>(), 1..80).prop_map(|bytes| ObjectKey::new(&bytes).expect("legal key"))
}

fn replica_ids() -> impl Strategy<Value = ReplicaId> {
    (any::<u32>(), any::<u32>(), any::<u64>()).prop_map(|(node, incarnation, sequence)| ReplicaId {
        node: NodeId(node),
        incarnation: Incarnation(incarnation),
        sequence,
    })
}

fn versions() -> impl Strategy<Value = VersionId> {
    replica_ids().prop_map(|ReplicaId { node, incarnation, sequence }| VersionId { node, incarnation, sequence })
}

fn durabilities() -> impl Strategy<Value = Durability> {
    prop_oneof![Just(Durability::Memory), Just(Durability::Nvme)]
}

fn data_types() -> impl Strategy<Value = DataType> {
    (0u8..10).prop_map(|number| DataType::from_number(number).expect("a known type"))
}

fn names() -> impl Strategy<Value = ReplicaName> {
    (any::<u32>(), keys(), replica_ids()).prop_map(|(tenant, key, replica)| ReplicaName {
        tenant: TenantId(tenant),
        key,
        replica,
    })
}

fn requests() -> impl Strategy<Value = Option<RequestId>> {
    let request = |(session, sequence)| RequestId { session: SessionId(session), sequence };
    option::of((any::<u64>(), any::<u64>()).prop_map(request))
}

fn wanted_copies() -> impl Strategy<Value = Copies> {
    (1..=MAX_COPIES)
        .prop_flat_map(|wanted| (Just(wanted), 1..=wanted))
        .prop_map(|(wanted, minimum)| Copies::new(wanted, minimum).expect("legal"))
}

fn completes() -> impl Strategy<Value = CompleteItem> {
    let what = (keys(), versions(), any::<u64>(), any::<u32>(), data_types(), option::of("[a-z]{1,20}"));
    let copies = vec((replica_ids(), durabilities()), 0..4);
    let rest = (vec(any::<u32>(), 0..9), wanted_copies(), durabilities(), any::<bool>(), any::<bool>(), any::<u64>());
    let items = (any::<u32>(), what, copies, rest, requests());
    items.prop_map(|(tenant, what, copies, rest, request)| CompleteItem {
        tenant: TenantId(tenant),
        key: what.0,
        version: what.1,
        length: what.2,
        slice_bytes: what.3,
        data_type: what.4,
        group: what.5.map(Into::into),
        replicas: copies.into_iter().map(|(replica, durability)| NewReplica { replica, durability }).collect(),
        checksums: rest.0,
        copies: rest.1,
        durability: rest.2,
        upsert: rest.3,
        pin: rest.4,
        reserved_at: LogTime(rest.5),
        request,
    })
}

fn copies() -> impl Strategy<Value = AddReplicaItem> {
    (names(), versions(), durabilities(), any::<u64>()).prop_map(|(name, version, durability, time)| AddReplicaItem {
        tenant: name.tenant,
        key: name.key,
        version,
        replica: name.replica,
        durability,
        reserved_at: LogTime(time),
    })
}

fn adoptions() -> impl Strategy<Value = AdoptItem> {
    let facts = (any::<u64>(), any::<u32>(), data_types(), vec(any::<u32>(), 0..5), any::<u64>()).prop_map(|facts| {
        ObjectFacts {
            length: facts.0,
            slice_bytes: facts.1,
            data_type: facts.2,
            checksums: facts.3,
            commit_index: LogIndex(facts.4),
        }
    });
    (copies(), option::of(facts)).prop_map(|(copy, facts)| AdoptItem { copy, facts })
}

fn removals() -> impl Strategy<Value = RemoveItem> {
    (any::<u32>(), keys(), option::of(versions()), any::<bool>(), requests()).prop_map(
        |(tenant, key, version, force, request)| RemoveItem { tenant: TenantId(tenant), key, version, force, request },
    )
}

fn pinnings() -> impl Strategy<Value = PinItem> {
    (any::<u32>(), keys(), requests()).prop_map(|(tenant, key, request)| PinItem {
        tenant: TenantId(tenant),
        key,
        request,
    })
}

fn quotas() -> impl Strategy<Value = Quota> {
    (any::<Option<u64>>(), any::<Option<u64>>()).prop_map(|(bytes, objects)| Quota { bytes, objects })
}

fn registrations() -> impl Strategy<Value = NodeRegistration> {
    let kinds = prop_oneof![Just(TierKind::Device), Just(TierKind::Dram), Just(TierKind::Nvme)];
    let tiers =
        vec((kinds, any::<u64>()).prop_map(|(kind, capacity_bytes)| TierDescription { kind, capacity_bytes }), 0..4);
    let addresses = ("[a-z0-9:.]{0,30}", "[a-z0-9:.]{0,30}", "[a-z0-9:.]{0,30}")
        .prop_map(|(grpc, engine, admin)| NodeAddresses { grpc, engine, admin });
    let labels =
        ("[a-z0-9]{0,9}", "[a-z0-9]{0,9}", "[a-z0-9]{0,9}").prop_map(|(zone, rack, host)| Labels { zone, rack, host });
    (any::<u32>(), any::<u32>(), addresses, tiers, labels).prop_map(|(node, incarnation, addresses, tiers, labels)| {
        NodeRegistration { node: NodeId(node), incarnation: Incarnation(incarnation), addresses, tiers, labels }
    })
}

fn task_requests() -> impl Strategy<Value = TaskRequest> {
    let kinds = prop_oneof![Just(TaskKind::Copy), Just(TaskKind::Move)];
    let nodes = (option::of(any::<u32>()), vec(any::<u32>(), 0..4));
    (any::<u64>(), kinds, any::<u32>(), keys(), nodes).prop_map(|(task, kind, tenant, key, (source, targets))| {
        TaskRequest {
            task: TaskId(task),
            kind,
            tenant: TenantId(tenant),
            key,
            source: source.map(NodeId),
            targets: targets.into_iter().map(NodeId).collect(),
        }
    })
}

fn task_steps() -> impl Strategy<Value = TaskStep> {
    let failures = prop_oneof![
        Just(TaskFailure::ObjectGone),
        Just(TaskFailure::SourceGone),
        Just(TaskFailure::TargetDraining),
        Just(TaskFailure::TargetAbsent),
        Just(TaskFailure::NoSpace),
        Just(TaskFailure::QuotaExceeded),
        Just(TaskFailure::NotCopied),
        Just(TaskFailure::StillNeeded),
        Just(TaskFailure::Expired),
    ];
    let fail = failures.prop_map(TaskStep::Fail);
    prop_oneof![Just(TaskStep::Start), Just(TaskStep::Settle), fail, Just(TaskStep::Cancel)]
}

fn commands() -> impl Strategy<Value = Command> {
    let states = prop_oneof![Just(NodeState::Up), Just(NodeState::Draining), Just(NodeState::Absent)];
    let modes = prop_oneof![Just(ForgetMode::SurplusOnly), Just(ForgetMode::EvenLast), Just(ForgetMode::Lost)];
    prop_oneof![
        registrations().prop_map(Command::RegisterNode),
        (any::<u32>(), any::<u32>(), states, option::of(any::<u64>())).prop_map(|(node, incarnation, state, term)| {
            let (node, incarnation) = (NodeId(node), Incarnation(incarnation));
            Command::SetNodeState { node, incarnation, state, term: term.map(Term) }
        }),
        (any::<u32>(), any::<u32>()).prop_map(|(node, incarnation)| Command::RemoveNode {
            node: NodeId(node),
            incarnation: Incarnation(incarnation)
        }),
        (any::<u32>(), any::<u32>()).prop_map(|(node, incarnation)| Command::ExpelNode {
            node: NodeId(node),
            incarnation: Incarnation(incarnation)
        }),
        vec(completes(), 0..4).prop_map(Command::Complete),
        vec(names(), 0..4).prop_map(Command::Abandon),
        vec(copies(), 0..4).prop_map(Command::AddReplicas),
        vec(adoptions(), 0..4).prop_map(Command::Adopt),
        (any::<u32>(), any::<u32>(), vec(names(), 0..4), any::<bool>()).prop_map(|(node, incarnation, lost, last)| {
            Command::EndAnnouncement { node: NodeId(node), incarnation: Incarnation(incarnation), lost, last }
        }),
        (modes, vec(names(), 0..4)).prop_map(|(mode, items)| Command::Forget { mode, items }),
        vec(removals(), 0..4).prop_map(Command::Remove),
        vec(pinnings(), 0..4).prop_map(Command::Pin),
        vec(pinnings(), 0..4).prop_map(Command::Unpin),
        ("[a-z]{0,40}", quotas()).prop_map(|(name, quota)| Command::CreateTenant { name, quota }),
        any::<u32>().prop_map(|tenant| Command::DropTenant { tenant: TenantId(tenant) }),
        (any::<u32>(), quotas()).prop_map(|(tenant, quota)| Command::SetQuota { tenant: TenantId(tenant), quota }),
        (any::<u32>(), any::<u64>())
            .prop_map(|(node, through)| Command::Freed { node: NodeId(node), through: LogIndex(through) }),
        any::<u64>().prop_map(|session| Command::OpenSession { session: SessionId(session) }),
        (any::<u64>(), any::<u64>())
            .prop_map(|(session, through)| Command::AcknowledgeSession { session: SessionId(session), through }),
        Just(Command::ExpireSessions),
        task_requests().prop_map(Command::BeginTask),
        (any::<u64>(), task_steps()).prop_map(|(task, step)| Command::StepTask { task: TaskId(task), step }),
        any::<bool>().prop_map(|rebuilding| Command::SetSetting(Setting::Rebuilding(rebuilding))),
        any::<u32>().prop_map(|milliseconds| {
            Command::SetSetting(Setting::SessionLifetime(Duration::from_millis(u64::from(milliseconds))))
        }),
        (0..10_u8, 0..17_u8, 0..3_u8, any::<bool>(), any::<Option<u64>>()).prop_map(
            |(number, copies, tier, pin, quota_bytes)| {
                let tier = [TypeTier::Any, TypeTier::Memory, TypeTier::Nvme][usize::from(tier)];
                let data_type = DataType::from_number(number).expect("one of ten");
                Command::SetSetting(Setting::Type { data_type, policy: TypePolicy { copies, tier, pin, quota_bytes } })
            }
        ),
    ]
}

proptest! {
    #[test]
    fn every_command_comes_back(command in commands()) {
        let bytes = encoded(&command);
        prop_assert_eq!(Command::decode(&bytes), Ok(command));
    }

    #[test]
    fn bytes_that_decode_are_the_one_encoding(bytes in vec(any::<u8>(), 0..200)) {
        let versioned = [&[COMMAND_VERSION][..], &bytes].concat();
        if let Ok(command) = Command::decode(&versioned) {
            prop_assert_eq!(encoded(&command), versioned);
        }
    }

    #[test]
    fn a_flipped_byte_gives_another_command_or_an_error(command in commands(), at: prop::sample::Index, flip in 1u8..) {
        let mut bytes = encoded(&command);
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        if let Ok(other) = Command::decode(&bytes) {
            prop_assert_ne!(&other, &command);
            prop_assert_eq!(encoded(&other), bytes);
        }
    }

    #[test]
    fn a_cut_command_is_refused(command in commands(), at: prop::sample::Index) {
        let bytes = encoded(&command);
        let cut = at.index(bytes.len());
        prop_assert!(Command::decode(&bytes[..cut]).is_err());
    }

    #[test]
    fn any_command_can_be_applied(commands in vec(commands(), 1..30)) {
        let mut catalog = Catalog::new();
        for (index, command) in commands.iter().enumerate() {
            catalog.apply(EntryContext { index: LogIndex(index as u64), term: Term(1), time: LogTime(1_000_000) }, command);
        }
        catalog.validate();
    }
}

#[test]
fn bounds_of_a_command_are_checked() {
    let name = replica_name("a", replica(1, 1));
    let most = Command::Abandon(vec![name.clone(); MAX_COMMAND_ITEMS]);
    assert_eq!(Command::decode(&encoded(&most)), Ok(most));
    let too_many = encoded(&Command::Abandon(vec![name; MAX_COMMAND_ITEMS + 1]));
    assert!(matches!(Command::decode(&too_many), Err(DecodeError::TooLong { .. })));
    let too_long = vec![0; MAX_COMMAND_BYTES + 1];
    let error = DecodeError::TooLong { what: "command", length: too_long.len() as u64, maximum: MAX_COMMAND_BYTES };
    assert_eq!(Command::decode(&too_long), Err(error));
}

#[test]
fn bytes_behind_a_command_are_refused() {
    let mut bytes = encoded(&Command::ExpireSessions);
    bytes.push(0);
    assert_eq!(Command::decode(&bytes), Err(DecodeError::LeftOver { count: 1 }));
}

#[test]
fn a_command_of_a_later_version_is_named() {
    assert_eq!(Command::decode(&[6, 18]), Err(DecodeError::Version { found: 6, known: 5 }));
    assert_eq!(Command::decode(&[]), Err(DecodeError::Truncated));
}

#[test]
fn an_illegal_key_is_refused() {
    let mut bytes = encoded(&Command::Abandon(vec![replica_name("abc", replica(1, 1))]));
    bytes[4] = 0; // version, kind, count, tenant, then the key's length
    assert!(matches!(Command::decode(&bytes), Err(DecodeError::Key(_))));
}

/// The bytes that `docs/src/formats/log.md` shows. They stand in logs on disk: a change needs a new version.
#[test]
fn the_encoding_of_version_5_stays() {
    let forget =
        Command::Forget { mode: ForgetMode::EvenLast, items: vec![replica_name("ab", replica(0x0102_0304, 300))] };
    assert_eq!(
        encoded(&forget),
        [5, 8, 1, 1, 0, 2, b'a', b'b', 0x04, 0x03, 0x02, 0x01, 1, 0xac, 0x02],
        "version, kind, mode, count, tenant, key, node, incarnation, sequence"
    );
}
