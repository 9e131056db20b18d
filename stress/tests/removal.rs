//! Final removal of nodes: what they had is made anew at once, and they do not come back.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};
use tidepool_client::{Client, PutOptions};
use tidepool_stress::cluster::{Cluster, program};

const OBJECTS: u64 = 40;

/// Who waits for the end of the grace period waits for ever.
const SETTINGS: [&str; 2] = ["store.slice_bytes=256KiB", "replicas.repair_grace=1h"];

fn binary() -> PathBuf {
    program(&std::env::current_exe().unwrap()).expect("the tidepool binary is built")
}

fn blocking<A>(work: impl FnOnce() -> A) -> A {
    tokio::task::block_in_place(work)
}

fn value(number: u64) -> Bytes {
    vec![number as u8; 1000 + 10_000 * usize::try_from(number).unwrap()].into()
}

fn number_of(cluster: &Cluster, position: usize) -> String {
    cluster.node(position).unwrap().admin("/v1/raft").unwrap()["node"].as_str().unwrap().to_owned()
}

/// A removal, as it was answered: how many copies went, or the reason why not.
fn remove(cluster: &Cluster, at: usize, node: &str, force: bool) -> Result<u64, String> {
    let removal = json!({ "node": node, "force": force });
    let answer = cluster.node(at).unwrap().change("/v1/nodes/remove", &removal).unwrap();
    match answer["copies"].as_u64() {
        Some(copies) => Ok(copies),
        None => Err(answer["reason"].as_str().unwrap_or_default().to_owned()),
    }
}

fn state(cluster: &Cluster, at: usize, node: &str) -> Value {
    let report = cluster.node(at).unwrap().admin("/v1/nodes").unwrap();
    let row = report["nodes"].as_array().unwrap().iter().find(|row| row["node"] == node).cloned();
    row.unwrap_or(Value::Null)
}

/// All objects are there, each with two copies on nodes that are up.
async fn until_all_have_two(client: &Client) {
    let began = Instant::now();
    let mut number = 0;
    while number < OBJECTS {
        let stat = client.stat(format!("k/{number}")).await.unwrap().unwrap();
        if stat.replicas.len() == 2 && stat.replicas.iter().all(|copy| copy.node_state == "up") {
            assert!(client.get(format!("k/{number}")).await.unwrap().unwrap().value == value(number));
            number += 1;
            continue;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", stat.replicas);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn three_with_two_copies_of_each() -> (Cluster, Client, usize) {
    let cluster = blocking(|| Cluster::start_voters(binary(), 3, &SETTINGS)).unwrap();
    let client = cluster.client(Duration::from_secs(20)).unwrap();
    let options = PutOptions { replicas: 2, min_replicas: 2, ..PutOptions::default() };
    for number in 0..OBJECTS {
        client.put(format!("k/{number}"), value(number), &options).await.unwrap();
    }
    let leader = blocking(|| cluster.wait_for_leader());
    (cluster, client, leader)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_lost_node_had_is_made_anew_once_it_is_removed_and_it_does_not_come_back() {
    let (mut cluster, client, leader) = three_with_two_copies_of_each().await;
    let (gone, other) = ((leader + 1) % 3, (leader + 2) % 3);
    let number = number_of(&cluster, gone);
    let leads = number_of(&cluster, leader);
    blocking(|| {
        assert_eq!(remove(&cluster, other, &number, false), Err("NODE_IN_USE".into()));
        assert_eq!(remove(&cluster, other, "00000001", true), Err("NO_SUCH_NODE".into()));
        assert_eq!(remove(&cluster, gone, &number, true), Err("IS_THIS_NODE".into()));
        assert_eq!(remove(&cluster, other, &leads, true), Err("IS_LEADER".into()));
        cluster.kill(gone).unwrap();
        cluster.until("it is away", |cluster| state(cluster, leader, &number)["state"] == "absent");
        assert!(remove(&cluster, other, &number, false).unwrap() > 0);
        assert_eq!(state(&cluster, leader, &number), Value::Null);
        assert_eq!(remove(&cluster, other, &number, false), Err("NO_SUCH_NODE".into()));
        assert_eq!(cluster.voters(), Some(2));
    });
    until_all_have_two(&client).await;

    // With its catalog, and without it, by a door that lets others in.
    let said = blocking(|| cluster.refusal(gone, &[])).unwrap();
    assert!(said.contains("REMOVED"), "{said}");
    let data = cluster.data(gone);
    let rejoin = |data: &PathBuf| {
        let mut rejoin = std::process::Command::new(binary());
        rejoin.args(["admin", "raft", "rejoin", "--data"]).arg(data).output().unwrap()
    };
    assert!(blocking(|| rejoin(&data)).status.success());
    let join = format!("cluster.join=['{}']", cluster.node(other).unwrap().grpc);
    let said = blocking(|| cluster.refusal(gone, std::slice::from_ref(&join))).unwrap();
    assert!(said.contains("REMOVED"), "{said}");
    // Over an empty folder it is another node.
    blocking(|| cluster.join()).unwrap();
    blocking(|| cluster.until("it takes part", Cluster::are_all_up));
    until_all_have_two(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_removed_once_it_is_empty_and_ends_by_itself() {
    let (cluster, client, leader) = three_with_two_copies_of_each().await;
    let leaving = (leader + 1) % 3;
    let number = number_of(&cluster, leaving);
    blocking(|| {
        cluster.node(leader).unwrap().change("/v1/nodes/drain", &json!({ "node": number })).unwrap();
        cluster.until("it is empty", |cluster| state(cluster, leader, &number)["replicas"] == 0);
        assert_eq!(remove(&cluster, leader, &number, false), Ok(0));
        cluster.until("it has ended", |cluster| cluster.node(leaving).unwrap().admin("/v1/raft").is_err());
        // The last thing that it does.
        let log = cluster.data(leaving).join("node.log");
        cluster.until("it says why", |_| std::fs::read_to_string(&log).unwrap().contains("REMOVED"));
    });
    until_all_have_two(&client).await;
}
