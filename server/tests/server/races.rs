//! Many callers on few keys, while tiers move, evict and lose sight of the objects: nobody ever gets bytes that no put of
//! that key had, no call fails for a reason of our own, and in the end nothing is left.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_client::workload::Payload;
use tidepool_client::{Client, ErrorKind, Matching, PutOptions};

use crate::common::TestServer;
use crate::pressure::until_empty;

const KEYS: u64 = 16;
const CALLERS: u64 = 64;
/// Of a value; all keys together are one and a half times what DRAM holds.
const MOST_BYTES: u64 = 1_500_000;

/// The value of put `number` of a key: the number, and bytes that follow from both.
fn value(key: u64, number: u64) -> Bytes {
    let length = 8 + (number * 7919 + key * 104_729) % MOST_BYTES;
    let mut value = number.to_le_bytes().to_vec();
    value.extend(Payload::of(key << 40 | number).bytes(length as usize - 8));
    value.into()
}

fn assert_is_a_value(key: u64, found: &[u8]) {
    let number = found.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).expect("values begin with a number");
    assert!(number < 1 << 40 && found == value(key, number), "key {key} has bytes that no put {number} had");
}

/// What a loaded node without its disk may say.
fn assert_is_a_refusal(error: &tidepool_client::Error) {
    let may = [ErrorKind::Exhausted, ErrorKind::Unavailable, ErrorKind::Conflict, ErrorKind::Deadline];
    assert!(may.contains(&error.kind()), "{:?}: {error}", error.kind());
}

async fn call(client: &Client, caller: u64, until: Instant) -> u64 {
    let (mut state, mut calls) = (caller.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, 0);
    while Instant::now() < until {
        state = state.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
        let (key, kind) = ((state >> 33) % KEYS, (state >> 41) % 8);
        let (name, number) = (format!("k/{key}"), caller << 20 | calls);
        let ended = match kind {
            0 | 1 => {
                let options = PutOptions { upsert: kind == 1, ..PutOptions::default() };
                client.put(&name, value(key, number), &options).await.map(drop)
            }
            2 => client.remove(&name, false).await.map(drop),
            3 => client.exists(&name).await.map(drop),
            _ => client.get(&name).await.map(|found| {
                if let Some(object) = found {
                    assert_is_a_value(key, &object.value);
                }
            }),
        };
        if let Err(error) = ended {
            assert_is_a_refusal(&error);
        }
        calls += 1;
    }
    calls
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn callers_that_meet_on_few_keys_get_whole_values_whatever_tiers_do() {
    let seconds = std::env::var("TIDEPOOL_RACE_SECONDS").map_or(5, |seconds| seconds.parse().expect("a number"));
    let server = TestServer::with(&["dram.capacity=16MiB", "store.promote_after_reads=1"]).await;
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut callers = tokio::task::JoinSet::new();
    for caller in 1..=CALLERS {
        let client = server.client();
        callers.spawn(async move { call(&client, caller, until).await });
    }
    // The disk comes and goes meanwhile.
    let mut detached = 0;
    while Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(400)).await;
        let (status, body) = server.admin_post("/v1/nvme/detach", "{}").await;
        assert_eq!(status, 200, "{body}");
        detached += 1;
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (status, body) = server.admin_post("/v1/nvme/attach", "{}").await;
        assert_eq!(status, 200, "{body}");
    }
    let calls: u64 = callers.join_all().await.into_iter().sum();
    assert!(calls >= CALLERS && detached > 0, "{calls} calls, {detached} times without the disk");
    let client = server.client();
    for key in 0..KEYS {
        if let Some(object) = client.get(format!("k/{key}")).await.unwrap() {
            assert_is_a_value(key, &object.value);
        }
    }
    client.remove_matching(&Matching::All, true, |_| {}).await.unwrap();
    until_empty(&server, &["dram", "nvme"]).await;
}
