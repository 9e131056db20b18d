//! Copies and moves that somebody asks for, on three real processes: they end as was asked, or say why not, whoever dies meanwhile.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};
use tidepool_client::{Client, PutOptions, Task, TaskState};
use tidepool_stress::cluster::{Cluster, program};

fn binary() -> PathBuf {
    program(&std::env::current_exe().unwrap()).expect("the tidepool binary is built")
}

fn start(settings: &[&str]) -> Cluster {
    let cluster = blocking(|| Cluster::start_voters(binary(), 3, settings)).unwrap();
    blocking(|| cluster.until("all are up", Cluster::are_all_up));
    cluster
}

fn blocking<A>(work: impl FnOnce() -> A) -> A {
    tokio::task::block_in_place(work)
}

/// Every byte follows from the number.
fn value(number: u64) -> Bytes {
    (0..300_000 + number).map(|at| (number.wrapping_mul(31) + at * 7) as u8).collect::<Vec<_>>().into()
}

fn key(number: u64) -> String {
    format!("k/{number}")
}

/// A client that knows one node only: what it puts without copies is there.
fn client_of(cluster: &Cluster, position: usize) -> Client {
    Client::builder().endpoint(cluster.node(position).unwrap().grpc.to_string()).build().unwrap()
}

fn numbers(cluster: &Cluster) -> [String; 3] {
    [0, 1, 2].map(|position| {
        let info = cluster.node(position).unwrap().admin("/v1/raft").unwrap();
        info["node"].as_str().unwrap().to_owned()
    })
}

async fn holders(client: &Client, key: &str) -> Vec<String> {
    client.stat(key).await.unwrap().unwrap().replicas.into_iter().map(|copy| copy.node).collect()
}

/// Waits until the task has ended.
async fn ended(client: &Client, task: &Task) -> Task {
    let began = Instant::now();
    loop {
        match client.task(task.id).await {
            Ok(Some(task)) if !task.state.is_open() => return task,
            answer => assert!(began.elapsed() < Duration::from_secs(60), "{answer:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn failed(reason: &str) -> TaskState {
    TaskState::Failed(reason.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_kept_and_a_move_leaves_nothing_behind() {
    let cluster = start(&[]);
    let nodes = blocking(|| numbers(&cluster));
    let client = client_of(&cluster, 0);
    client.put("a", value(1), &PutOptions::default()).await.unwrap();

    let moved = client.begin_move("a", &nodes[0], &nodes[1]).await.unwrap();
    let moved = ended(&client, &moved).await;
    assert_eq!((moved.state.clone(), moved.copied, moved.length), (TaskState::Done, 1, 300_001));
    assert_eq!(holders(&client, "a").await, [nodes[1].as_str()]);
    let is_freed = |cluster: &Cluster| cluster.node(0).unwrap().tier("dram", "objects").unwrap() == 0;
    blocking(|| cluster.until("the source has freed its copy", is_freed));

    // To the node that leads and to the others: by the address of its gRPC too.
    let address = cluster.node(0).unwrap().grpc.to_string();
    let copied = client.begin_copy("a", &[address, nodes[2].clone()]).await.unwrap();
    assert_eq!(copied.targets, [nodes[0].as_str(), nodes[2].as_str()]);
    assert_eq!(ended(&client, &copied).await.state, TaskState::Done);
    for position in 0..3 {
        let client = client_of(&cluster, position);
        assert!(client.get("a").await.unwrap().unwrap().value == value(1), "wrong bytes from node {position}");
    }
    assert_eq!(holders(&client, "a").await.len(), 3);
    assert_eq!(client.tasks(None).await.unwrap().tasks.len(), 2);

    // More than one answer of an engine has.
    let large: Bytes = (0..20_000_003_u32).map(|at| (at * 7 % 251) as u8).collect();
    client.put("large", large.clone(), &PutOptions::default()).await.unwrap();
    let moved = client.begin_move("large", &nodes[0], &nodes[2]).await.unwrap();
    assert_eq!(ended(&client, &moved).await.state, TaskState::Done);
    assert_eq!(holders(&client, "large").await, [nodes[2].as_str()]);
    assert!(client_of(&cluster, 2).get("large").await.unwrap().unwrap().value == large);
    let metric = |kind: &str| format!("tidepool_tasks{{kind=\"{kind}\",state=\"done\"}}");
    let done = |kind: &str| blocking(|| cluster.node(1).unwrap().metric(&metric(kind))).unwrap();
    assert_eq!((done("move"), done("copy")), (2, 1));
}

/// The process that carries tasks out, a target and the source die in the middle of many moves: others go on, and nothing is lost.
#[tokio::test(flavor = "multi_thread")]
async fn moves_end_although_leader_target_and_source_are_killed_in_the_middle() {
    const OBJECTS: u64 = 24;
    let mut cluster = start(&["replicas.repair_bytes_per_second=1MiB"]);
    let nodes = blocking(|| numbers(&cluster));
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    let (source, target) = (0, 1);
    let at_source = client_of(&cluster, source);
    let mut tasks = Vec::new();
    for number in 0..OBJECTS {
        at_source.put(key(number), value(number), &PutOptions::default()).await.unwrap();
        tasks.push(client.begin_move(key(number), &nodes[source], &nodes[target]).await.unwrap());
    }
    let open = async || {
        let listed = client.tasks(None).await;
        listed.map_or(0, |listing| listing.tasks.iter().filter(|task| task.state.is_open()).count())
    };
    let third = OBJECTS as usize / 4;
    for (more, victim) in [(3, Some(target)), (2, None), (1, Some(source))] {
        // Some are done and others are not.
        until("tasks go on", async || (1..=more * third).contains(&open().await)).await;
        let victim = victim.unwrap_or_else(|| blocking(|| cluster.wait_for_leader()));
        blocking(|| cluster.kill(victim)).unwrap();
        blocking(|| cluster.restart(victim)).unwrap();
        blocking(|| cluster.until("all are up", Cluster::are_all_up));
    }
    for (number, task) in (0..).zip(&tasks) {
        assert_eq!(ended(&client, task).await.state, TaskState::Done, "{}", key(number));
        assert_eq!(holders(&client, &key(number)).await, [nodes[target].as_str()], "{}", key(number));
        let found = client.get(key(number)).await.unwrap();
        assert!(found.unwrap().value == value(number), "wrong bytes of {}", key(number));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_with_its_reason() {
    let mut cluster = start(&[]);
    let nodes = blocking(|| numbers(&cluster));
    let client = client_of(&cluster, 0);
    client.put("a", value(1), &PutOptions::default()).await.unwrap();
    let copy = async |key: &str, targets: &[&str]| {
        let targets: Vec<String> = targets.iter().map(|&target| target.to_owned()).collect();
        client.begin_copy(key, &targets).await.unwrap_err().reason().to_owned()
    };
    let relocate = async |source: &str, target: &str| {
        client.begin_move("a", source, target).await.unwrap_err().reason().to_owned()
    };
    assert_eq!(copy("b", &[&nodes[1]]).await, "NOT_FOUND");
    assert_eq!(copy("a", &[]).await, "BAD_TASK");
    assert_eq!(copy("a", &[&nodes[1], &nodes[1]]).await, "BAD_TASK");
    assert_eq!(copy("a", &["nobody"]).await, "NO_SUCH_NODE");
    assert_eq!(copy("a", &["127.0.0.1"]).await, "AMBIGUOUS_NODE");
    assert_eq!(relocate(&nodes[1], &nodes[2]).await, "NOT_ON_SOURCE");
    assert_eq!(relocate(&nodes[0], &nodes[0]).await, "BAD_TASK");
    let drained = json!({ "node": nodes[1] });
    blocking(|| cluster.node(0).unwrap().change("/v1/nodes/drain", &drained)).unwrap();
    assert_eq!(copy("a", &[&nodes[1]]).await, "NODE_NOT_UP");
    assert_eq!(client.task(1).await.unwrap(), None);
    assert_eq!(client.tasks(None).await.unwrap().tasks, []);
    // A node whose end is not noticed yet is waited for.
    blocking(|| cluster.kill(2)).unwrap();
    until("its end is noticed", async || match client.begin_move("a", &nodes[0], &nodes[2]).await {
        Ok(task) => client.cancel_task(task.id).await.unwrap().is_none(),
        Err(error) => error.reason() == "NODE_NOT_UP",
    })
    .await;
}

/// Tasks that wait for their turn: each ends by what becomes of its object, its target, or its caller's mind.
#[tokio::test(flavor = "multi_thread")]
async fn what_happens_meanwhile_ends_a_task_with_its_reason() {
    let mut cluster = start(&["replicas.repair_bytes_per_second=1KiB", "replicas.repair_grace=0s"]);
    let nodes = blocking(|| numbers(&cluster));
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    let at_source = client_of(&cluster, 0);
    let mut begun = Vec::new();
    for name in ["first", "removed", "replaced", "cancelled", "drained", "killed"] {
        at_source.put(name, value(1), &PutOptions::default()).await.unwrap();
        let target = if name == "drained" { 2 } else { 1 };
        begun.push(client.begin_move(name, &nodes[0], &nodes[target]).await.unwrap());
        if name == "first" {
            // The next bytes are allowed in five minutes.
            assert_eq!(ended(&client, &begun[0]).await.state, TaskState::Done);
        }
    }
    client.remove("removed", false).await.unwrap();
    client.put("replaced", value(2), &PutOptions { upsert: true, ..PutOptions::default() }).await.unwrap();
    assert_eq!(client.cancel_task(begun[3].id).await.unwrap().unwrap().state, TaskState::Cancelled);
    assert_eq!(client.cancel_task(begun[0].id).await.unwrap().unwrap().state, TaskState::Done, "it has ended");
    let drain = json!({ "node": nodes[2] });
    blocking(|| cluster.node(0).unwrap().change("/v1/nodes/drain", &drain)).unwrap();
    blocking(|| cluster.kill(1)).unwrap();
    for (place, state) in [
        (1, failed("OBJECT_GONE")),
        (2, failed("OBJECT_GONE")),
        (3, TaskState::Cancelled),
        (4, failed("TARGET_DRAINING")),
        (5, failed("TARGET_ABSENT")),
    ] {
        assert_eq!(ended(&client, &begun[place]).await.state, state, "{}", begun[place].key);
    }
    for name in ["cancelled", "drained", "killed"] {
        assert_eq!(holders(&client, name).await, [nodes[0].as_str()], "{name}");
    }
}

/// A target whose memory is full of what may not be evicted.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_without_room_fails_the_task_after_some_attempts() {
    let mut cluster = Cluster::new(binary(), &[]).unwrap().lending(16 << 20, 0);
    for _ in 0..2 {
        blocking(|| cluster.join()).unwrap();
    }
    blocking(|| cluster.until("all are up", Cluster::are_all_up));
    let number = |position: usize| {
        let info = blocking(|| cluster.node(position).unwrap().admin("/v1/raft")).unwrap();
        info["node"].as_str().unwrap().to_owned()
    };
    let (source, target) = (number(0), number(1));
    let (at_source, at_target) = (client_of(&cluster, 0), client_of(&cluster, 1));
    let pinned = PutOptions { pin: true, ..PutOptions::default() };
    let mut full = 0;
    until("it is full", async || {
        full += 1;
        at_target.put(key(full), vec![0; 1 << 20].into(), &pinned).await.is_err()
    })
    .await;
    at_source.put("a", vec![1; 4 << 20].into(), &PutOptions::default()).await.unwrap();
    let task = at_source.begin_move("a", &source, &target).await.unwrap();
    assert_eq!(ended(&at_source, &task).await.state, failed("NO_SPACE"));
    assert_eq!(holders(&at_source, "a").await, [source]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_sees_drains_among_the_tasks_and_cancels_them_alike() {
    let cluster = start(&["replicas.repair_bytes_per_second=1KiB"]);
    let nodes = blocking(|| numbers(&cluster));
    let at_drained = client_of(&cluster, 1);
    for number in 0..3 {
        at_drained.put(key(number), value(number), &PutOptions::default()).await.unwrap();
    }
    let admin = |path: &str| blocking(|| cluster.node(0).unwrap().admin(path)).unwrap();
    let change = |path: &str, body: &Value| blocking(|| cluster.node(0).unwrap().change(path, body)).unwrap();
    change("/v1/nodes/drain", &json!({ "node": nodes[1] }));
    let id = format!("drain-{}", nodes[1]);
    let drain = admin("/v1/tasks")["tasks"][0].clone();
    assert_eq!((&drain["id"], &drain["kind"], &drain["state"]), (&json!(id), &json!("drain"), &json!("running")));
    assert!((1..=3).contains(&drain["left"].as_u64().unwrap()), "{drain}");
    assert_eq!(admin(&format!("/v1/tasks?id={id}"))["tasks"][0]["kind"], "drain");
    let cancelled = change("/v1/tasks/cancel", &json!({ "id": id }));
    assert_eq!(cancelled["tasks"][0]["state"], "cancelled");
    assert_eq!(admin("/v1/tasks")["tasks"], json!([]));

    let body = json!({ "key": "k/2", "targets": [nodes[2]], "id": "00000000000000ff" });
    for _ in 0..2 {
        let begun = change("/v1/tasks/copy", &body);
        assert_eq!(
            (&begun["tasks"][0]["id"], &begun["tasks"][0]["tenant"]),
            (&body["id"], &json!("default")),
            "{begun}"
        );
    }
    assert_eq!(admin("/v1/tasks")["tasks"].as_array().unwrap().len(), 1, "the same task");

    let address = cluster.node(0).unwrap().admin.to_string();
    let command = |arguments: &[&str]| {
        let mut command = std::process::Command::new(binary());
        let output = command.args(["--admin", &address, "admin", "tasks"]).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, shown) = command(&["move", "k/1", "--from", &nodes[1], "--to", &nodes[2]]);
    assert_eq!(code, Some(0), "{shown}");
    let (code, shown) = command(&["list"]);
    let is_there = |words: [&str; 3]| shown.lines().any(|line| words.iter().all(|word| line.contains(word)));
    assert!(
        code == Some(0) && is_there(["00000000000000ff", "copy", "k/2"]) && is_there(["move", &nodes[1], "k/1"]),
        "{shown}"
    );
    let (code, shown) = command(&["cancel", "00000000000000ff", "--json"]);
    let cancelled: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((code, &cancelled["tasks"][0]["key"]), (Some(0), &json!("k/2")), "{shown}");
    assert_eq!(command(&["show", "00000000000000fe"]).0, Some(1));
}
