//! What a change of the catalog costs, beside the synced write that it cannot do without.
//!
//! `cargo bench -p tidepool-replication --bench propose [-- FOLDER]`: the folder says which disk is measured. Without
//! `--bench`, as tests run it, each line is done a few times only, to see that it works.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench reports on standard output, and stops at any error"
)]

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidepool_metadata::catalog::{Command, CompleteItem, Copies, Labels, NewReplica, NodeAddresses, NodeRegistration};
use tidepool_metadata::{DataType, Incarnation, NodeId, ObjectKey, ReplicaId, TenantId, VersionId};
use tidepool_replication::{CatalogHandle, ClusterId, Durability, Group, GroupConfig, Read};

const NODE: NodeId = NodeId(1);
const INCARNATION: Incarnation = Incarnation(1);

/// How long one line is measured, and how long when it is only tried.
const MEASURED: Duration = Duration::from_secs(3);
const TRIED: Duration = Duration::from_millis(20);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        return;
    }
    let span = if arguments.iter().any(|argument| argument == "--bench") { MEASURED } else { TRIED };
    let parent = arguments.iter().find(|argument| !argument.starts_with('-')).map(PathBuf::from);
    let folder = tempfile::tempdir_in(parent.unwrap_or_else(std::env::temp_dir)).unwrap();
    println!("{:<44} {:>12} {:>10} {:>10} {:>10}", "", "items/s", "p50 us", "p99 us", "max us");
    synced_writes(folder.path(), span);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for durability in [Durability::Fsync, Durability::Os] {
        for (callers, items) in [(1, 1), (16, 1), (256, 1), (1, 128), (8, 128)] {
            let name = format!("complete {durability:?}, {callers} callers x {items}").to_lowercase();
            let folder = folder.path().join(name.replace(' ', "_"));
            runtime.block_on(complete(&name, folder, durability, callers, items, span));
        }
    }
    runtime.block_on(reads(folder.path().join("reads"), span));
}

/// The floor: what one appended page costs until it is on disk.
fn synced_writes(folder: &Path, span: Duration) {
    let mut file = File::create(folder.join("floor")).unwrap();
    let (page, end) = ([7; 4096], Instant::now() + span);
    let mut times = Vec::new();
    while Instant::now() < end {
        let start = Instant::now();
        file.write_all(&page).unwrap();
        file.sync_data().unwrap();
        times.push(start.elapsed());
    }
    report("append 4 KiB and fdatasync", times, 1, span);
}

async fn open(folder: PathBuf, durability: Durability) -> (Group, CatalogHandle) {
    let config = GroupConfig::new(folder, ClusterId(1), NODE);
    let (group, catalog) = Group::start(GroupConfig { durability, ..config }).unwrap();
    let (addresses, tiers) = (NodeAddresses::default(), Vec::new());
    let registration =
        NodeRegistration { node: NODE, incarnation: INCARNATION, addresses, tiers, labels: Labels::default() };
    catalog.propose(Command::RegisterNode(registration)).await.unwrap();
    (group, catalog)
}

/// An object as prefix caches make them: a hash as key, one slice.
fn object(catalog: &CatalogHandle, sequence: u64) -> CompleteItem {
    CompleteItem {
        tenant: TenantId::DEFAULT,
        key: key(sequence),
        version: VersionId { node: NODE, incarnation: INCARNATION, sequence },
        length: 1 << 20,
        slice_bytes: 1 << 20,
        data_type: DataType::KvCache,
        group: None,
        checksums: vec![17],
        replicas: vec![NewReplica {
            replica: ReplicaId { node: NODE, incarnation: INCARNATION, sequence },
            durability: tidepool_metadata::Durability::Memory,
        }],
        copies: Copies::ONE,
        durability: tidepool_metadata::Durability::Memory,
        upsert: false,
        pin: false,
        reserved_at: catalog.now(),
        request: None,
    }
}

fn key(sequence: u64) -> ObjectKey {
    ObjectKey::new(format!("{:032x}@layer-0", u128::from(sequence).wrapping_mul(0x9e37_79b9_7f4a_7c15)).as_bytes())
        .unwrap()
}

async fn complete(name: &str, folder: PathBuf, durability: Durability, callers: usize, items: u64, span: Duration) {
    let (_group, catalog) = open(folder, durability).await;
    let sequence = Arc::new(AtomicU64::new(1));
    let end = Instant::now() + span;
    let run = |catalog: CatalogHandle, sequence: Arc<AtomicU64>| async move {
        let mut times = Vec::new();
        while Instant::now() < end {
            let first = sequence.fetch_add(items, Ordering::Relaxed);
            let batch = (first..first + items).map(|sequence| object(&catalog, sequence)).collect();
            let start = Instant::now();
            catalog.propose(Command::Complete(batch)).await.unwrap();
            times.push(start.elapsed());
        }
        times
    };
    let tasks: Vec<_> = (0..callers).map(|_| tokio::spawn(run(catalog.clone(), Arc::clone(&sequence)))).collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.unwrap());
    }
    report(name, times, items, span);
    catalog.shutdown().await;
}

async fn reads(folder: PathBuf, span: Duration) {
    let (_group, catalog) = open(folder, Durability::Os).await;
    for first in (0..100_000).step_by(1000) {
        let items = (first..first + 1000).map(|sequence| object(&catalog, sequence)).collect();
        catalog.propose(Command::Complete(items)).await.unwrap();
    }
    let mut sequence = 0;
    for keys in [1, 128] {
        let (end, mut times) = (Instant::now() + span, Vec::new());
        while Instant::now() < end {
            sequence = (sequence + 7919) % 99_000;
            let keys = (sequence..sequence + keys).map(key).collect();
            let start = Instant::now();
            catalog.locate(TenantId::DEFAULT, keys, None, Read::Linearizable).await.unwrap();
            times.push(start.elapsed());
        }
        report(&format!("locate, linearizable, {keys} keys"), times, keys, span);
    }
    catalog.shutdown().await;
}

fn report(name: &str, mut times: Vec<Duration>, items: u64, span: Duration) {
    times.sort_unstable();
    let at = |share: f64| {
        let position = (times.len() as f64 * share) as usize;
        times[position.min(times.len() - 1)].as_secs_f64() * 1e6
    };
    let rate = times.len() as f64 * items as f64 / span.as_secs_f64();
    println!("{name:<44} {rate:>12.0} {:>10.1} {:>10.1} {:>10.1}", at(0.5), at(0.99), at(1.0));
}
