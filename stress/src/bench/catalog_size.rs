//! The catalog with many objects: memory, what a snapshot for a new member costs those who write meanwhile, and how soon it is there
//! again after a start with a cold page cache.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidepool_metadata::catalog::{
    Answer, Command, CompleteItem, Copies, Labels, NewReplica, NodeAddresses, NodeRegistration, Query,
};
use tidepool_metadata::{DataType, Incarnation, NodeId, ObjectKey, ReplicaId, TenantId, VersionId};
use tidepool_replication::{CatalogHandle, ClusterId, Formation, Group, GroupConfig, MemberChange, MemberId, Read};
use tokio::runtime::Runtime;

use super::complete::{Hands, MembersHere, complete};
use super::latency::Latencies;
use super::load::runtime;
use super::{BenchOptions, Bound, Error, Figure};

pub(super) const NODE: NodeId = NodeId(1);
const LIFE: Incarnation = Incarnation(1);
const BATCH: u64 = 1000;
/// Commands under way at a time.
const IN_FLIGHT: usize = 4;
/// Of the catalog alone, beyond the key.
const OBJECT_BYTES: f64 = 250.0;
const RESTART: f64 = 5.0;
/// How long a snapshot may take.
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let objects: u64 = if options.quick { 1_000_000 } else { 10_000_000 };
    let runtime = runtime()?;
    let folder = options.folder.join("catalog-size");
    let config = GroupConfig::new(folder.clone(), ClusterId(1), NODE);
    let before = allocated_bytes()?;
    let began = Instant::now();
    let members = MembersHere::default();
    let open = |config: GroupConfig| {
        let node = config.node;
        let hands = Hands { members: Arc::clone(&members), runtime: runtime.handle().clone() };
        let _in_runtime = runtime.enter();
        let (group, catalog) = Group::start_with(config, Arc::new(hands))?;
        members.lock().insert(node, catalog.clone());
        Ok::<_, Error>((group, catalog))
    };
    let (group, catalog) = open(config.clone())?;
    runtime.block_on(put_all(&catalog, objects))?;
    let filled = began.elapsed().as_secs_f64();
    let each = allocated_bytes()?.saturating_sub(before) as f64 / objects as f64;
    let key_bytes = key(0)?.as_bytes().len();
    let remark = format!(
        "allocated for each of {objects} objects, log and queues included, less its key of {key_bytes} bytes; put in {filled:.0} s"
    );
    let target = Some(Bound::AtMost(OBJECT_BYTES));
    let mut figures = vec![
        Figure::number("memory of an object in the catalog", each - key_bytes as f64, "bytes", target).remark(remark),
    ];
    figures.push(snapshot(options, &runtime, &catalog, objects, open)?);
    members.lock().clear();
    runtime.block_on(async {
        catalog.flush_image().await?;
        catalog.shutdown().await;
        Ok::<_, Error>(())
    })?;
    drop((group, catalog));
    let (bytes, limit) = read_cold(&folder.join("image"))?;
    let began = Instant::now();
    let (_group, catalog) = {
        let _in_runtime = runtime.enter();
        Group::start(config)?
    };
    let (_, answer) = runtime.block_on(catalog.query(Query::Counts, Read::Linearizable))?;
    let took = began.elapsed().as_secs_f64();
    let Answer::Counts(counts) = answer else { return Err("the catalog gave no counts".into()) };
    let limit = limit.as_secs_f64();
    let remark = format!(
        "{} objects; the image of {:.0} MiB is read past the page cache in {limit:.2} s; twice that or {RESTART} s",
        counts.objects,
        bytes as f64 / f64::from(1 << 20)
    );
    let target = Some(Bound::AtMost(RESTART.max(2.0 * limit)));
    figures.push(Figure::number("start of a catalog, page cache cold", took, "s", target).remark(remark));
    runtime.block_on(catalog.shutdown());
    Ok(figures)
}

/// A new member takes all of it while objects are completed one by one.
fn snapshot(
    options: &BenchOptions,
    runtime: &Runtime,
    catalog: &CatalogHandle,
    objects: u64,
    open: impl FnOnce(GroupConfig) -> Result<(Group, CatalogHandle), Error>,
) -> Result<Figure, Error> {
    let next = AtomicU64::new(objects);
    let one = || runtime.block_on(complete(catalog, next.fetch_add(1, Ordering::Relaxed), 1));
    // What is written now is the snapshot; what is logged before it is gone.
    runtime.block_on(catalog.flush_image())?;
    let learner = NodeId(NODE.0 + 1);
    runtime.block_on(catalog.change_members(MemberChange::Add(MemberId::new(learner, 1))))?;
    let formation = Formation::Join { life: 1, members: catalog.status().members };
    let folder = options.folder.join("catalog-size-learner");
    let began = Instant::now();
    let (group, copy) = open(GroupConfig { formation, ..GroupConfig::new(folder, ClusterId(1), learner) })?;
    let mut times = Vec::new();
    while copy.applied() < catalog.applied() {
        if began.elapsed() > PATIENCE {
            return Err("the snapshot did not arrive".into());
        }
        let began = Instant::now();
        one()?;
        times.push(began.elapsed());
    }
    let took = began.elapsed().as_secs_f64();
    let busy = Latencies::from(times);
    // With the member there: before, this one was alone, and synced nothing of memory.
    let quiet = Latencies::of(options.side() * 4, one)?;
    let (p99, alone) = (busy.micros(0.99), quiet.micros(0.99));
    runtime.block_on(catalog.change_members(MemberChange::Remove(learner)))?;
    runtime.block_on(group.shutdown());
    let remark = format!(
        "p99 {p99:.0} us of {} completes in {took:.1} s, without {alone:.0} us of {}; giver and taker on one machine",
        busy.count(),
        quiet.count()
    );
    let target = Some(Bound::AtMost(2.0));
    Ok(Figure::number("complete while a new member takes a snapshot, p99 beside", p99 / alone, "", target)
        .remark(remark))
}

/// What this process holds of its allocator.
fn allocated_bytes() -> Result<usize, Error> {
    let read = tikv_jemalloc_ctl::epoch::advance().and_then(|_epoch| tikv_jemalloc_ctl::stats::allocated::read());
    read.map_err(|error| format!("ask the allocator: {error}").into())
}

/// Makes the node of all copies known.
pub(super) async fn register(catalog: &CatalogHandle) -> Result<(), Error> {
    let registration = NodeRegistration {
        node: NODE,
        incarnation: LIFE,
        addresses: NodeAddresses::default(),
        tiers: Vec::new(),
        labels: Labels::default(),
    };
    catalog.propose(Command::RegisterNode(registration)).await?;
    Ok(())
}

async fn put_all(catalog: &CatalogHandle, objects: u64) -> Result<(), Error> {
    register(catalog).await?;
    let mut starts = (0..objects).step_by(BATCH as usize);
    let mut calls = tokio::task::JoinSet::new();
    loop {
        while calls.len() < IN_FLIGHT
            && let Some(first) = starts.next()
        {
            let catalog = catalog.clone();
            calls.spawn(async move {
                let last = (first + BATCH).min(objects);
                let items = (first..last).map(|number| item(&catalog, number)).collect::<Result<_, _>>()?;
                catalog.propose(Command::Complete(items)).await?;
                Ok::<_, Error>(())
            });
        }
        let Some(done) = calls.join_next().await else { return Ok(()) };
        done??;
    }
}

/// Keys as engines make them: a model, then a hash.
fn key(number: u64) -> Result<ObjectKey, Error> {
    let hash = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Ok(ObjectKey::new(format!("model@1@0@{hash:016x}{:016x}", hash.rotate_left(17)).as_bytes())?)
}

/// What completes an object of that number, stamped now.
pub(super) fn item(catalog: &CatalogHandle, sequence: u64) -> Result<CompleteItem, Error> {
    let durability = tidepool_metadata::Durability::Memory;
    let replica = ReplicaId { node: NODE, incarnation: LIFE, sequence };
    Ok(CompleteItem {
        tenant: TenantId::DEFAULT,
        key: key(sequence)?,
        version: VersionId { node: NODE, incarnation: LIFE, sequence },
        length: 64 << 10,
        slice_bytes: 4 << 20,
        data_type: DataType::KvCache,
        group: None,
        checksums: vec![sequence as u32],
        replicas: vec![NewReplica { replica, durability }],
        copies: Copies::ONE,
        durability,
        upsert: false,
        pin: false,
        reserved_at: catalog.now(),
        request: None,
    })
}

/// Takes the folder's files out of the page cache, then reads them past it: how many bytes, and how long that takes.
fn read_cold(folder: &Path) -> Result<(u64, Duration), Error> {
    const PIECE: usize = 1 << 20;
    const ALIGNMENT: usize = 4096;
    let files = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    let mut buffer = vec![0; PIECE + ALIGNMENT];
    let from = buffer.as_ptr().align_offset(ALIGNMENT);
    let (mut bytes, mut took) = (0, Duration::ZERO);
    for path in files.iter().filter(|path| path.is_file()) {
        let file = File::open(path)?;
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(path)?;
        let began = Instant::now();
        loop {
            let read = std::io::Read::read(&mut &direct, &mut buffer[from..from + PIECE])?;
            if read == 0 {
                break;
            }
            bytes += read as u64;
        }
        took += began.elapsed();
    }
    Ok((bytes, took))
}
