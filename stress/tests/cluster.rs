//! Three real processes: whoever is killed, frozen or cut off, nothing that was acknowledged is lost, and no byte is wrong.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tidepool_client::{BatchGot, Client, ClientSettings, ErrorKind, Existence, GetOptions, PutOptions};
use tidepool_stress::cluster::{Cluster, program};
use tidepool_stress::node_process::NodeProcess;

const WRITERS: usize = 3;

fn start(count: usize) -> Cluster {
    let program = program(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
    tokio::task::block_in_place(|| Cluster::start_voters(program, count, &["store.slice_bytes=256KiB"])).unwrap()
}

/// The value of object `number`: every byte follows from the number.
fn value(number: u64) -> Bytes {
    let length = 1 + (number.wrapping_mul(0x9E37_79B9) % 5_000) as usize;
    (0..length).map(|at| (number.wrapping_mul(31) as usize + at * 7) as u8).collect::<Vec<_>>().into()
}

/// Puts and gets until it is told to stop, through whatever happens; notes what was acknowledged.
#[derive(Clone, Default)]
struct Load {
    next: Arc<AtomicU64>,
    acknowledged: Arc<Mutex<BTreeSet<u64>>>,
    stop: Arc<AtomicBool>,
}

impl Load {
    fn start(&self, cluster: &Cluster) -> tokio::task::JoinSet<()> {
        self.stop.store(false, Ordering::SeqCst);
        let client = cluster.client(Duration::from_secs(10)).unwrap();
        // An object whose only copy is on a dead node stays unavailable: asking for it until it is back would hold up the load.
        let reader = cluster.client(Duration::from_millis(500)).unwrap();
        (0..WRITERS).fold(tokio::task::JoinSet::new(), |mut writers, _| {
            writers.spawn(self.clone().run(client.clone(), reader.clone()));
            writers
        })
    }

    async fn run(self, client: Client, reader: Client) {
        while !self.stop.load(Ordering::SeqCst) {
            let number = self.next.fetch_add(1, Ordering::SeqCst);
            match client.put(format!("k/{number}"), value(number), &PutOptions::default()).await {
                Ok(_) => drop(self.acknowledged.lock().insert(number)),
                // Whether it was done is unknown, and is not asked about.
                Err(error) => assert_ne!(error.kind(), ErrorKind::Internal, "{error}"),
            }
            let known = self.acknowledged.lock().range(number / 2..).next().copied();
            let Some(known) = known else { continue };
            match reader.get(format!("k/{known}")).await {
                Ok(Some(found)) => assert!(found.value == value(known), "wrong bytes of k/{known}"),
                Ok(None) => panic!("k/{known} was acknowledged and is missing"),
                // Its node is not there: unavailable is no loss.
                Err(error) => assert_ne!(error.kind(), ErrorKind::Internal, "{error}"),
            }
        }
    }

    fn count(&self) -> usize {
        self.acknowledged.lock().len()
    }

    /// Waits until so many more are acknowledged: the cluster serves.
    async fn progress(&self, more: usize) {
        let target = self.count() + more;
        let reached = async {
            while self.count() < target {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), reached).await.expect("puts go on");
    }

    async fn end(&self, mut writers: tokio::task::JoinSet<()>) {
        self.stop.store(true, Ordering::SeqCst);
        while let Some(ended) = writers.join_next().await {
            ended.unwrap();
        }
    }

    /// All nodes run: everything that was acknowledged is there.
    async fn check(&self, cluster: &Cluster) {
        tokio::task::block_in_place(|| cluster.wait_for_recovery());
        let client = cluster.client(Duration::from_secs(20)).unwrap();
        let known = self.acknowledged.lock().clone();
        for number in known {
            let found = client.get(format!("k/{number}")).await.unwrap();
            let found = found.unwrap_or_else(|| panic!("k/{number} was acknowledged and is lost"));
            assert!(found.value == value(number), "wrong bytes of k/{number}");
        }
    }
}

fn blocking<A>(work: impl FnOnce() -> A) -> A {
    tokio::task::block_in_place(work)
}

/// B060: an index that is highly available, and empty after it has moved.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_killed_under_load_costs_nothing_that_was_acknowledged() {
    let mut cluster = start(3);
    let load = Load::default();
    let writers = load.start(&cluster);
    for _ in 0..2 {
        load.progress(60).await;
        let leader = blocking(|| cluster.wait_for_leader());
        blocking(|| cluster.kill(leader)).unwrap();
        load.progress(60).await;
        assert_ne!(blocking(|| cluster.wait_for_leader()), leader);
        blocking(|| cluster.restart(leader)).unwrap();
        load.progress(20).await;
    }
    load.end(writers).await;
    load.check(&cluster).await;
}

/// B064: the connections of a process that is stopped stay open. B069: what is asked right after a change of leaders.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_frozen_and_comes_back_serves_nothing_old() {
    let cluster = start(3);
    let load = Load::default();
    let writers = load.start(&cluster);
    load.progress(60).await;
    let leader = blocking(|| cluster.wait_for_leader());
    let frozen = cluster.node(leader).unwrap();
    frozen.freeze().unwrap();
    load.progress(60).await;
    // Alone with it, a client must not hear what was true before.
    let key = "written while the leader was frozen";
    let others: Vec<String> =
        cluster.running().filter(|(position, _)| *position != leader).map(|(_, node)| node.grpc.to_string()).collect();
    let others = others.iter().fold(Client::builder(), |builder, other| builder.endpoint(other)).build().unwrap();
    others.put(key, "new".into(), &PutOptions::default()).await.unwrap();
    frozen.thaw().unwrap();
    let old = frozen.client(1).unwrap();
    // That the copy can't be read now may be said while nodes hear of each other again; that there is none, never.
    let told = async {
        loop {
            match old.exists(key).await.unwrap() {
                Existence::Recovering => tokio::time::sleep(Duration::from_millis(20)).await,
                found => break found,
            }
        }
    };
    let found = tokio::time::timeout(Duration::from_secs(20), told).await.expect("nodes hear of each other again");
    assert_eq!(found, Existence::Present, "a miss is confirmed by who leads now");
    load.progress(20).await;
    load.end(writers).await;
    load.check(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_comes_and_goes_and_takes_a_snapshot_when_it_is_far_behind() {
    let mut cluster = start(3);
    let load = Load::default();
    let writers = load.start(&cluster);
    load.progress(40).await;
    let leader = blocking(|| cluster.wait_for_leader());
    let follower = (leader + 1) % 3;
    let before = cluster.node(follower).unwrap().admin("/v1/raft").unwrap()["log_last"].as_u64().unwrap();
    blocking(|| cluster.kill(follower)).unwrap();
    load.progress(100).await;
    for (_, node) in cluster.running() {
        node.change("/v1/raft/snapshot", &serde_json::json!({})).unwrap();
    }
    let compacted = |cluster: &Cluster| {
        let first = |node: &NodeProcess| node.admin("/v1/raft").ok()?["log_first"].as_u64();
        cluster.running().filter(|(position, _)| *position != follower).all(|(_, node)| first(node) > Some(before + 1))
    };
    blocking(|| cluster.until("the log is compacted", compacted));
    blocking(|| cluster.restart(follower)).unwrap();
    let caught_up = |cluster: &Cluster| {
        let raft = cluster.node(follower).unwrap().admin("/v1/raft").unwrap_or_default();
        raft["log_first"].as_u64() > Some(before + 1) && raft["in_contact"] == true
    };
    blocking(|| cluster.until("the follower has a snapshot", caught_up));
    load.progress(20).await;
    load.end(writers).await;
    load.check(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_minority_answers_nothing_that_it_cannot_know() {
    let cluster = start(3);
    let client = cluster.client(Duration::from_secs(10)).unwrap();
    client.put("k", "v".into(), &PutOptions::default()).await.unwrap();
    let leader = blocking(|| cluster.wait_for_leader());
    let others: Vec<_> = cluster.running().filter(|(position, _)| *position != leader).map(|(_, node)| node).collect();
    others.iter().for_each(|node| node.freeze().unwrap());
    let alone = cluster.node(leader).unwrap();
    let lonely = Client::builder().endpoint(alone.grpc.to_string()).deadline(Duration::from_secs(3)).build().unwrap();
    // Whoever allows it goes on with what it knew, while that is not too old; at first it still leads, and knows a miss.
    let told = async {
        loop {
            let told = lonely.exists_or_unconfirmed(&["k", "nobody knows"]).await.unwrap();
            assert_eq!(told[0], Existence::Present, "hits go on");
            if told[1] == Existence::Unconfirmed {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(2), told).await.expect("nobody confirms a miss");
    let allowing = GetOptions { allow_unconfirmed: true, ..GetOptions::default() };
    let unknown = lonely.get_with("nobody knows", allowing).await.unwrap_err();
    assert_eq!(unknown.reason(), "UNCONFIRMED");
    let put = lonely.put("other", "v".into(), &PutOptions::default()).await.unwrap_err();
    assert!(matches!(put.kind(), ErrorKind::Deadline | ErrorKind::Unavailable), "{put}");
    let missing = lonely.exists("nobody knows").await.unwrap_err();
    assert!(
        matches!(missing.kind(), ErrorKind::Deadline | ErrorKind::Unavailable),
        "a miss is not confirmed: {missing}"
    );
    others.iter().for_each(|node| node.thaw().unwrap());
    client.put("after", "v".into(), &PutOptions::default()).await.unwrap();
}

/// Clients ask a node who it is before anything else: an answer that waited for the catalog held up what needs none.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_a_quorum_gives_what_it_has_by_version_and_says_that_it_is_starting() {
    let mut cluster = start(3);
    let client = Client::builder().endpoint(cluster.node(0).unwrap().grpc.to_string()).build().unwrap();
    client.put("k", value(1), &PutOptions::default()).await.unwrap();
    let version = client.get("k").await.unwrap().unwrap().info.version;
    tokio::task::block_in_place(|| (0..3).try_for_each(|node| cluster.kill(node))).unwrap();
    tokio::task::block_in_place(|| cluster.restart(0)).unwrap();
    let client = Client::builder().endpoint(cluster.node(0).unwrap().grpc.to_string()).build().unwrap();
    let held = GetOptions { version, ..GetOptions::default() };
    let found = loop {
        match client.get_with("k", held.clone()).await {
            Ok(found) => break found.unwrap(),
            Err(error) => assert_eq!(error.reason(), "RECOVERING", "{error}"),
        }
    };
    assert!(found.value == value(1));
    let info = cluster.node(0).unwrap().admin("/v1/info").unwrap();
    assert_eq!((info["role"].as_str(), info["objects"].as_u64()), (Some("starting"), Some(0)), "{info}");
}

/// B056: after a restart of all voters nodes are known, can be read, and a new one finds them. B060: with all that was acknowledged.
/// B063: and memory that holds objects is given to nobody else.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_killed_as_a_whole_comes_back_with_what_it_had() {
    const OBJECT: usize = 64 << 10;
    const OBJECTS: u64 = 150;
    let program = program(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
    // Room for all of them on any one node.
    let mut cluster = blocking(|| {
        let mut cluster = Cluster::new(program, &["store.slice_bytes=256KiB"])?.lending(16 << 20, 0);
        cluster.grow(3).map(|()| cluster)
    })
    .unwrap();
    let bytes = |number: u64| Bytes::from(vec![(number % 251) as u8; OBJECT]);
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    for number in 0..OBJECTS {
        client.put(format!("old/{number}"), bytes(number), &PutOptions::default()).await.unwrap();
    }
    let of_each = |cluster: &Cluster, field: &str| -> Vec<u64> {
        cluster.running().map(|(_, node)| node.tier("dram", field).unwrap()).collect()
    };
    let before = blocking(|| of_each(&cluster, "used"));
    blocking(|| {
        cluster.kill_all();
        (0..3).try_for_each(|node| cluster.restart(node))
    })
    .unwrap();
    blocking(|| cluster.wait_for_recovery());
    assert_eq!(blocking(|| of_each(&cluster, "used")), before, "as much is used as before");
    let newcomer = blocking(|| cluster.join()).unwrap();
    blocking(|| cluster.wait_for_recovery());
    let reader = cluster.node(newcomer).unwrap().client(1).unwrap();
    for number in 0..OBJECTS {
        let found = reader.get(format!("old/{number}")).await.unwrap().expect("it was acknowledged");
        assert!(found.value == bytes(number), "wrong bytes of old/{number}");
    }
    // Until it is full several times over: what is evicted is a miss, and nothing is another object's.
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    for number in 0..8 * OBJECTS {
        client.put(format!("new/{number}"), bytes(number + 7), &PutOptions::default()).await.unwrap();
        let old = number % OBJECTS;
        if let Some(found) = client.get(format!("old/{old}")).await.unwrap() {
            assert!(found.value == bytes(old), "wrong bytes of old/{old}");
        }
    }
    assert!(blocking(|| of_each(&cluster, "evictions")).into_iter().sum::<u64>() > 0, "memory was given to others");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_grows_from_one_to_three_while_it_serves() {
    let mut cluster = start(1);
    let load = Load::default();
    let writers = load.start(&cluster);
    load.progress(40).await;
    blocking(|| cluster.join()).unwrap();
    blocking(|| cluster.join()).unwrap();
    blocking(|| cluster.until("all vote", |cluster| cluster.voters() == Some(3)));
    load.progress(40).await;
    load.end(writers).await;
    // The one that was all of it goes: the others know everything.
    blocking(|| cluster.kill(0)).unwrap();
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    let acknowledged = load.acknowledged.lock().clone();
    for number in acknowledged {
        let known = client.exists(format!("k/{number}")).await.unwrap();
        assert_ne!(known, Existence::Missing, "k/{number} was acknowledged");
    }
    blocking(|| cluster.restart(0)).unwrap();
    load.check(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_refused_by_name() {
    let secrets = tempfile::tempdir().unwrap();
    let secret = |name: &str| {
        use std::os::unix::fs::PermissionsExt as _;
        let path = secrets.path().join(name);
        std::fs::write(&path, format!("{name:0>16}")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        format!("cluster.secret_file='{}'", path.display())
    };
    let program = program(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
    let one = blocking(|| Cluster::start(program.clone(), &[&secret("right")])).unwrap();
    let join = format!("cluster.join=['{}']", one.node(0).unwrap().grpc);
    // A secret that is not the cluster's.
    let said = blocking(|| one.refusal(7, &[secret("wrong"), join.clone()])).unwrap();
    assert!(said.contains("FOREIGN_SECRET"), "{said}");
    // A folder that belongs to another group.
    let mut other = blocking(|| Cluster::start(program, &[&secret("right")])).unwrap();
    blocking(|| other.stop(0)).unwrap();
    let said = blocking(|| other.refusal(0, std::slice::from_ref(&join))).unwrap();
    assert!(said.contains("FOREIGN_CLUSTER"), "{said}");
}

/// A voter whose log is damaged serves nothing, says so, and comes back as a new member.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_log_is_found_and_its_voter_can_be_replaced() {
    let mut cluster = start(3);
    let client = cluster.client(Duration::from_secs(10)).unwrap();
    for number in 0..40 {
        client.put(format!("k/{number}"), value(number), &PutOptions::default()).await.unwrap();
    }
    let leader = blocking(|| cluster.wait_for_leader());
    let damaged = (leader + 1) % 3;
    blocking(|| cluster.kill(damaged)).unwrap();
    let log = cluster.data(damaged).join("catalog/log");
    let files = std::fs::read_dir(&log).unwrap().map(|file| file.unwrap().path());
    let path = files.filter(|path| path.extension().is_some_and(|kind| kind == "log")).max().unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&path, bytes).unwrap();
    let said = blocking(|| cluster.refusal(damaged, &[])).unwrap();
    assert!(said.contains("CATALOG_UNUSABLE") && said.contains("orruption"), "{said}");
    // What an operator does.
    let options = cluster.options_of(damaged, &[]);
    let mut rejoin = std::process::Command::new(&options.program);
    let rejoined = rejoin.args(["admin", "raft", "rejoin", "--data"]).arg(&options.data).status().unwrap();
    assert!(rejoined.success());
    blocking(|| cluster.restart(damaged)).unwrap();
    blocking(|| cluster.until("three vote again", |cluster| cluster.voters() == Some(3)));
    blocking(|| cluster.wait_for_recovery());
    for number in 0..40 {
        let found = client.get(format!("k/{number}")).await.unwrap().expect("it was acknowledged");
        assert!(found.value == value(number));
    }
}

/// A folder as it was some time ago: its voter acknowledged what it no longer has. Only the leader that heard so can tell: under
/// a later one the voter gets from the others what it lacks.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_data_folder_is_found_out() {
    let mut cluster = start(3);
    let client = cluster.client(Duration::from_secs(10)).unwrap();
    client.put("before", "v".into(), &PutOptions::default()).await.unwrap();
    let leader = blocking(|| cluster.wait_for_leader());
    let follower = (leader + 1) % 3;
    blocking(|| cluster.stop(follower)).unwrap();
    let (catalog, copy) = (cluster.data(follower).join("catalog"), cluster.data(follower).join("copy"));
    let copied = std::process::Command::new("cp").arg("-a").args([&catalog, &copy]).status().unwrap();
    assert!(copied.success());
    blocking(|| cluster.restart(follower)).unwrap();
    for number in 0..30 {
        client.put(format!("k/{number}"), value(number), &PutOptions::default()).await.unwrap();
    }
    let last = |cluster: &Cluster, position: usize| {
        cluster.node(position).and_then(|node| node.admin("/v1/raft").ok()?["applied"].as_u64())
    };
    blocking(|| cluster.until("the follower has it", |cluster| last(cluster, follower) >= last(cluster, leader)));
    let term = |cluster: &Cluster| cluster.node(leader).and_then(|node| node.admin("/v1/raft").ok()?["term"].as_u64());
    let told_in = term(&cluster);
    blocking(|| cluster.kill(follower)).unwrap();
    std::fs::remove_dir_all(&catalog).unwrap();
    std::fs::rename(&copy, &catalog).unwrap();
    blocking(|| cluster.restart(follower)).unwrap();
    // A process that has not come to serve ends with it, and can only be read about.
    let failed = |cluster: &Cluster| {
        let said = std::fs::read_to_string(cluster.data(follower).join("node.log")).unwrap_or_default();
        said.contains("but this member has acknowledged") || term(cluster) != told_in
    };
    blocking(|| cluster.until("the old folder is found out", failed));
    client.put("after", "v".into(), &PutOptions::default()).await.unwrap();
}

/// Of two processes with one identity the one that comes later is told so, and the other one goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_copied_folder_is_refused_while_its_original_serves() {
    let mut cluster = start(3);
    let client = cluster.client(Duration::from_secs(10)).unwrap();
    client.put("before", "v".into(), &PutOptions::default()).await.unwrap();
    let original = (blocking(|| cluster.wait_for_leader()) + 1) % 3;
    blocking(|| cluster.stop(original)).unwrap();
    let copied = std::process::Command::new("cp").arg("-a").args([cluster.data(original), cluster.data(7)]).status();
    assert!(copied.unwrap().success());
    blocking(|| cluster.restart(original)).unwrap();
    blocking(|| cluster.until("all are up", Cluster::are_all_up));
    // As on another machine: on one host the DRAM segment is in use.
    let segments = tempfile::tempdir_in("/dev/shm").unwrap();
    let elsewhere = format!("dram.folder='{}'", segments.path().display());
    let said = blocking(|| cluster.refusal(7, &[elsewhere])).unwrap();
    assert!(said.contains("IDENTITY_TAKEN"), "{said}");
    let alone = Client::builder().endpoint(cluster.node(original).unwrap().grpc.to_string()).build().unwrap();
    alone.put("after", "v".into(), &PutOptions::default()).await.unwrap();
    assert!(alone.get("before").await.unwrap().is_some());
    assert!(blocking(|| cluster.are_all_up()));
}

/// Each node knows how full the others are, whoever leads.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_hear_how_full_the_others_are() {
    let mut cluster = start(3);
    let holder = cluster.node(1).unwrap().grpc.to_string();
    let client = Client::builder().endpoint(&holder).build().unwrap();
    client.put("k", vec![7; 300 << 10].into(), &PutOptions::default()).await.unwrap();
    let are_told = |cluster: &Cluster| {
        let used = cluster.node(1).unwrap().tier("dram", "used").unwrap();
        cluster.running().all(|(_, node)| {
            let report = node.admin("/v1/nodes").unwrap_or_default();
            let rows = report["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
            let of_holder = rows.iter().find(|row| row["grpc"] == holder.as_str());
            of_holder.is_some_and(|row| row["dram_used"].as_u64() == Some(used)) && used > 0
        })
    };
    blocking(|| cluster.until("all know how full it is", are_told));
    let leader = blocking(|| cluster.wait_for_leader());
    if leader != 1 {
        blocking(|| cluster.kill(leader)).unwrap();
        blocking(|| cluster.until("all know how full it is", are_told));
    }
}

/// What another node holds is read from it straight, not by way of the node that was asked; where that fails, by way of it.
#[tokio::test(flavor = "multi_thread")]
async fn objects_of_other_nodes_are_read_from_them() {
    let mut cluster = start(3);
    let at = |position: usize| {
        let address = cluster.node(position).unwrap().grpc.to_string();
        // On one host all nodes could be reached by their sockets; elsewhere they can't.
        let settings =
            ClientSettings { same_host: false, deadline: Duration::from_secs(20), ..ClientSettings::default() };
        Client::builder().endpoint(address).settings(settings).build().unwrap()
    };
    let (there, here) = (at(1), at(0));
    let upsert = PutOptions { upsert: true, ..PutOptions::default() };
    for number in 0..20 {
        there.put(format!("k/{number}"), value(number), &upsert).await.unwrap();
    }
    let mut buffer = vec![0; 8 << 10];
    for number in 0..20 {
        let calls = here.native_calls();
        let key = format!("k/{number}");
        let expected = value(number);
        if number % 2 == 0 {
            assert_eq!(here.get(&key).await.unwrap().unwrap().value, expected);
        } else {
            let length = here.get_into(&key, &mut buffer).await.unwrap().unwrap().length as usize;
            assert_eq!(&buffer[..length], &expected[..]);
        }
        assert_eq!(here.native_calls() - calls, 2, "one that refers, one that gives");
        let range = here.get_range(&key, 1, expected.len() as u64 - 1).await.unwrap().unwrap();
        assert_eq!(range.value, expected.slice(1..));
        assert_eq!(here.native_calls() - calls, 3, "its place is known");
    }
    // A batch: some whose places are known, some whose are not, one that is nowhere, one of the node that is asked.
    here.put("k/1000", value(1000), &PutOptions::default()).await.unwrap();
    for number in 20..30 {
        there.put(format!("k/{number}"), value(number), &upsert).await.unwrap();
    }
    let mut keys: Vec<String> = (0..30).map(|number| format!("k/{number}")).collect();
    keys.insert(7, "nowhere".into());
    keys.push("k/1000".into());
    let calls = here.native_calls();
    for (got, key) in here.get_batch(&keys).await.unwrap().into_iter().zip(&keys) {
        match got {
            BatchGot::Found(object) => assert_eq!(object.value, value(key[2..].parse().unwrap())),
            got => assert!(matches!(got, BatchGot::Missing) && key == "nowhere", "{key}: {got:?}"),
        }
    }
    // One by known places, if those are still known; one that refers; one by the places that it gave.
    assert!((2..=3).contains(&(here.native_calls() - calls)), "not one by one, and nothing is passed on");
    // What this client has written itself it does not read by an older place.
    here.put("k/1", value(1001), &upsert).await.unwrap();
    assert_eq!(here.get("k/1").await.unwrap().unwrap().value, value(1001));
    let got = here.get_batch(&["k/1", "k/2"]).await.unwrap();
    assert!(matches!(&got[0], BatchGot::Found(object) if object.value == value(1001)));
    there.put("k/1", value(1), &upsert).await.unwrap();
    // The newest is read, not what was there when this client was referred.
    there.put("k/0", value(77), &upsert).await.unwrap();
    assert_eq!(
        here.get_with("k/0", GetOptions { fresh: true, ..GetOptions::default() }).await.unwrap().unwrap().value,
        value(77)
    );
    blocking(|| cluster.kill(1)).unwrap();
    let gone = here.get("k/1").await;
    assert!(matches!(&gone, Err(error) if error.reason() == "UNAVAILABLE"), "{gone:?}");
    blocking(|| cluster.restart(1)).unwrap();
    blocking(|| cluster.wait_for_recovery());
    // The node that is asked may hear a moment later that the other one is back.
    let got = loop {
        match here.get("k/1").await {
            Err(error) if error.reason() == "UNAVAILABLE" => tokio::task::yield_now().await,
            got => break got,
        }
    };
    assert_eq!(got.unwrap().unwrap().value, value(1));
}
