use std::collections::HashMap;

use super::super::report::REMEMBERED;
use super::*;
use crate::workload::FoundBlock;
use crate::workload::TraceRequest;

/// A store that never evicts, and damages or refuses on demand.
#[derive(Default)]
struct PlainMap {
    blocks: Mutex<HashMap<Vec<u8>, Bytes>>,
    flip_in: Option<u64>,
    refuse: bool,
}

impl BlockStore for PlainMap {
    type Error = &'static str;

    async fn read(&self, key: Vec<u8>) -> Result<Option<FoundBlock>, Self::Error> {
        if self.refuse {
            return Err("not today");
        }
        let found = self.blocks.lock().expect("no test panics here").get(&key).cloned();
        let damage = self.flip_in.is_some_and(|hash_id| key == block_key(hash_id, 100));
        Ok(found.map(|value| {
            let mut value = value.to_vec();
            if damage {
                value[99] ^= 1;
            }
            FoundBlock { value: value.into(), tier: StoredIn::Dram }
        }))
    }

    async fn store(&self, key: Vec<u8>, value: Bytes) -> Result<(), Self::Error> {
        self.blocks.lock().expect("no test panics here").insert(key, value);
        Ok(())
    }
}

const REPLAY: Replay = Replay { block_bytes: 100, concurrency: 1, speed: None };

fn trace(requests: &[&[u64]]) -> Trace {
    let request =
        |ids: &&[u64]| TraceRequest { timestamp: 0, input_length: 0, output_length: 0, hash_ids: ids.to_vec() };
    Trace { requests: requests.iter().map(request).collect() }
}

async fn replay(replay: Replay, trace: &Trace, store: PlainMap) -> ReplayReport {
    replay.run(trace, Arc::new(store), |_| {}).await.expect("settings are legal")
}

#[tokio::test]
async fn hits_before_the_first_miss_are_prefix_hits() {
    let trace = trace(&[&[1, 2, 3], &[1, 2, 4, 3], &[5, 1]]);
    let report = replay(REPLAY, &trace, PlainMap::default()).await;
    assert_eq!((report.requests, report.blocks, report.puts), (3, 9, 5));
    assert_eq!((report.hits, report.prefix_hits, report.hits_dram), (4, 2, 4));
    assert_eq!((report.read_bytes, report.put_bytes), (400, 500));
    assert!(report.is_clean());
    assert_eq!(report.hit_latency.count, 4);
}

#[tokio::test]
async fn a_single_wrong_byte_is_found() {
    let store = PlainMap { flip_in: Some(2), ..PlainMap::default() };
    let report = replay(REPLAY, &trace(&[&[1, 2], &[1, 2], &[1, 2]]), store).await;
    assert_eq!(report.wrong_blocks, 2);
    assert!(!report.is_clean() && report.remarks[0].contains("block 2 has"), "{:?}", report.remarks);
}

#[tokio::test]
async fn errors_are_counted_and_remarks_are_bounded() {
    let ids: Vec<u64> = (0..100).collect();
    let store = PlainMap { refuse: true, ..PlainMap::default() };
    let report = replay(REPLAY, &trace(&[&ids]), store).await;
    assert_eq!((report.errors, report.remarks.len(), report.puts), (100, REMEMBERED, 0));
}

#[tokio::test]
async fn the_highest_hit_ratio_is_reached_without_eviction() {
    let mut trace = crate::workload::trace::recorded("synthetic_trace.jsonl");
    trace.truncate(500);
    let facts = trace.facts();
    let small = Replay { block_bytes: 16, ..REPLAY };
    let report = replay(small, &trace, PlainMap::default()).await;
    assert_eq!((report.requests, report.blocks, report.puts), (500, facts.blocks, facts.distinct));
    assert!((report.block_hit_ratio() - facts.highest_hit_ratio).abs() < 1e-9);
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_their_time() {
    let mut trace = trace(&[&[1], &[2]]);
    trace.requests[1].timestamp = 60_000;
    let before = tokio::time::Instant::now();
    replay(Replay { speed: Some(2.0), ..REPLAY }, &trace, PlainMap::default()).await;
    assert!(before.elapsed() >= Duration::from_secs(29));
}

#[tokio::test]
async fn settings_out_of_bounds_are_refused() {
    let wrong = [
        Replay { block_bytes: 0, ..REPLAY },
        Replay { concurrency: 0, ..REPLAY },
        Replay { speed: Some(0.0), ..REPLAY },
        Replay { speed: Some(f64::NAN), ..REPLAY },
    ];
    for replay in wrong {
        let result = replay.run(&trace(&[]), Arc::new(PlainMap::default()), |_| {}).await;
        assert!(matches!(result, Err(ReplayError::Setting { .. })), "{replay:?}");
    }
}
