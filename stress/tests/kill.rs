//! Real processes, killed at any moment under load: what was acknowledged is there again, and no byte is ever wrong.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tidepool_client::{Client, Durability, PutOptions, PutOutcome};
use tidepool_stress::node_process::{NodeOptions, NodeProcess, Place, program_beside};

/// How often the node is killed. Each life is short and different.
const LIVES: u64 = 6;
const WRITERS: u64 = 4;

/// A folder for data and one on tmpfs for the segment, removed at the end.
struct Folders {
    data: tempfile::TempDir,
    segment: tempfile::TempDir,
}

impl Folders {
    fn new() -> Self {
        Self { data: tempfile::tempdir().unwrap(), segment: tempfile::tempdir_in("/dev/shm").unwrap() }
    }

    fn options(&self, dram_bytes: u64, nvme_bytes: u64) -> NodeOptions {
        let program = program_beside(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
        let settings = vec![
            format!("dram.folder='{}'", self.segment.path().display()),
            "nvme.region_bytes=1MiB".into(),
            "store.slice_bytes=256KiB".into(),
        ];
        NodeOptions {
            program,
            data: self.data.path().join("data"),
            dram_bytes,
            nvme_bytes,
            settings,
            place: Place::default(),
        }
    }
}

/// The value of object `number`: its length and every byte follow from the number.
fn value(number: u64) -> Bytes {
    let length = 1 + (number.wrapping_mul(0x9E37_79B9) % 400_000) as usize;
    let mut state = number.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes.into()
}

/// Puts and reads until told to stop or until the node is gone; notes what was acknowledged.
async fn load(client: Client, next: Arc<AtomicU64>, acknowledged: Arc<Mutex<Vec<u64>>>, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::SeqCst) {
        let number = next.fetch_add(1, Ordering::SeqCst);
        let durability = if number.is_multiple_of(5) { Durability::Nvme } else { Durability::Memory };
        let options = PutOptions { durability, ..PutOptions::default() };
        match client.put(format!("k/{number}"), value(number), &options).await {
            Ok(done) => {
                assert_eq!(done.outcome, PutOutcome::Stored);
                acknowledged.lock().push(number);
            }
            // The node is gone; whether this put was done is unknown, and is not asked about.
            Err(_) => return,
        }
        let read = number / 2;
        if let Ok(Some(found)) = client.get(format!("k/{read}")).await {
            assert!(found.value == value(read), "wrong bytes of k/{read}");
        }
    }
}

async fn check(client: &Client, number: u64) -> bool {
    let found = client.get(format!("k/{number}")).await.unwrap();
    let Some(found) = found else { return false };
    assert!(found.value == value(number), "wrong bytes of k/{number}");
    true
}

async fn until_recovered(node: &NodeProcess) {
    let recovered = async {
        loop {
            let report = node.admin("/v1/recovery").unwrap();
            if report["finished"] == serde_json::Value::Bool(true) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), recovered).await.expect("recovery ends");
}

/// B054: a node that is killed and back at once, with clients that go on.
/// Below the capacity of both tiers together nothing may be evicted: every acknowledged object must be there.
#[tokio::test(flavor = "multi_thread")]
async fn kill_9_under_load_loses_nothing_that_was_acknowledged() {
    let folders = Folders::new();
    let mut node = NodeProcess::start(folders.options(24 << 20, 1 << 30)).unwrap();
    let (next, acknowledged) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
    for life in 0..LIVES {
        let stop = Arc::new(AtomicBool::new(false));
        let mut writers = tokio::task::JoinSet::new();
        for _ in 0..WRITERS {
            let client =
                Client::builder().endpoint(node.grpc.to_string()).deadline(Duration::from_secs(2)).build().unwrap();
            writers.spawn(load(client, Arc::clone(&next), Arc::clone(&acknowledged), Arc::clone(&stop)));
        }
        let before = acknowledged.lock().len();
        // Not synchronisation: the moment of the kill is to be any.
        tokio::time::sleep(Duration::from_millis(150 + 137 * life)).await;
        // On a busy machine the load needs longer to be one.
        let under_load = async {
            while acknowledged.lock().len() < before + 10 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), under_load).await.expect("puts are acknowledged");
        node.kill().unwrap();
        stop.store(true, Ordering::SeqCst);
        while let Some(ended) = writers.join_next().await {
            ended.unwrap();
        }
        node = node.restart().unwrap();
        until_recovered(&node).await;
        let client = node.client(2).unwrap();
        let known = acknowledged.lock().clone();
        for number in &known {
            assert!(check(&client, *number).await, "life {life}: k/{number} was acknowledged and is lost");
        }
        for tier in ["dram", "nvme"] {
            let numbers = ["free", "used", "reserved", "capacity"].map(|field| node.tier(tier, field).unwrap());
            assert_eq!(numbers[0] + numbers[1] + numbers[2], numbers[3], "{tier}");
        }
    }
    assert!(node.tier("nvme", "objects").unwrap() > 0);
    node.stop().unwrap();
}

/// SIGTERM under load: the node ends by itself, and what it acknowledged is there afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn sigterm_under_load_ends_cleanly_and_loses_nothing() {
    let folders = Folders::new();
    let mut node = NodeProcess::start(folders.options(24 << 20, 1 << 30)).unwrap();
    let (next, acknowledged) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
    let stop = Arc::new(AtomicBool::new(false));
    let client = node.client(2).unwrap();
    let writer = tokio::spawn(load(client, next, Arc::clone(&acknowledged), Arc::clone(&stop)));
    tokio::time::sleep(Duration::from_millis(700)).await;
    let status = tokio::task::block_in_place(|| node.stop()).unwrap();
    assert!(status.success(), "{status}");
    stop.store(true, Ordering::SeqCst);
    writer.await.unwrap();
    let node = node.restart().unwrap();
    until_recovered(&node).await;
    let client = node.client(1).unwrap();
    let known = acknowledged.lock().clone();
    for number in known {
        assert!(check(&client, number).await, "k/{number} was acknowledged and is lost");
    }
}
