//! The NVMe tier beside fio, in turns, on files of one folder.
//!
//! - Demotion: slices of 1 MiB from memory into the tier, ending in a sync, beside fio writing blocks of region size
//!   with the same depth (region buffers) and a sync at its end. Every page of both files was written before.
//! - Cold reads: whole slices at random places into page-aligned memory, every chunk's checksum verified, beside fio
//!   reading blocks of that size at the same depth. Both with direct I/O.
//! - Scan: the tier opened and all records announced, beside fio's direct read of as many bytes as the footers have.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidepool_metadata::{DataType, Incarnation, NodeId, ObjectKey, ReplicaId, SliceHeader, TenantId, VersionId};
use tidepool_tiers::io::{Block, Landing};
use tidepool_tiers::nvme::{BoxFuture, Location, NvmeConfig, NvmeTier, RecordOwner, SliceName, SliceSource, Verdict};

use super::pairs::{self, Sample};
use super::{BenchOptions, Bound, Error, Figure};

const TARGET: f64 = 0.9;
const NODE: NodeId = NodeId(0xbe4c);
const REGION_BYTES: u64 = 16 << 20;
/// As many region buffers as the tier has: one being filled, two on their way.
const WRITE_DEPTH: u32 = 3;
/// Rounds of demotion until every page of the tier's file has been written.
const WARM_UP: usize = 3;

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let folder = options.folder.join("nvme");
    std::fs::create_dir_all(&folder)?;
    let bench = NvmeBench { folder, runtime: super::load::runtime()?, options: options.clone() };
    if Command::new("fio").arg("--version").output().is_err() {
        return Ok(vec![Figure::not_measurable("nvme beside fio", "fio is not installed")]);
    }
    let mut figures = vec![bench.demotion()?];
    for (length, name) in [(128 << 10, "128 KiB"), (1 << 20, "1 MiB")] {
        figures.extend(bench.cold_reads(length, name)?);
    }
    figures.push(bench.scan()?);
    std::fs::remove_dir_all(&bench.folder)?;
    Ok(figures)
}

struct NvmeBench {
    folder: PathBuf,
    runtime: tokio::runtime::Runtime,
    options: BenchOptions,
}

impl NvmeBench {
    /// A fresh tier.
    fn open_new(&self, capacity_bytes: u64) -> Result<Arc<NvmeTier>, Error> {
        let path = self.folder.join("tier");
        if path.exists() {
            std::fs::remove_dir_all(&path)?;
        }
        Ok(NvmeTier::open(self.config(capacity_bytes), NODE)?)
    }

    fn config(&self, capacity_bytes: u64) -> NvmeConfig {
        NvmeConfig { region_bytes: REGION_BYTES, ..NvmeConfig::new(self.folder.join("tier"), capacity_bytes) }
    }

    /// Sustained demotion of twice the DRAM.
    fn demotion(&self) -> Result<Figure, Error> {
        let dram: usize = if self.options.quick { 256 << 20 } else { 1 << 30 };
        let memory = Memory::new(dram, 1 << 20);
        let count = 2 * memory.checksums.len();
        let total = count as u64 * memory.slice_length as u64;
        // Room for two rounds; from the third on, the regions of the first are reclaimed while others are written.
        let tier = self.open_new(2 * total + total / 4 + 16 * REGION_BYTES)?;
        let nobody: Arc<dyn RecordOwner> = Arc::new(Nobody);
        self.runtime.spawn(tier.reclaim(Arc::downgrade(&nobody)));
        let block = format!("--bs={REGION_BYTES}");
        // Not `--fdatasync=N` with as many writes: fio syncs before the write after the Nth, so never. Its run time
        // contains the final sync (the rate is by that).
        let limit =
            || fio(&self.folder, "write", total, &[&block, &format!("--iodepth={WRITE_DEPTH}"), "--end_fsync=1"]);
        let mut before: Vec<(SliceName, Location)> = Vec::new();
        let mut ours = || {
            before.drain(..).for_each(|(_, location)| tier.release(location));
            Sample::measure(&[], || {
                before = self.runtime.block_on(memory.demote(&tier, count, 16))?;
                Ok(total)
            })
        };
        for _ in 0..WARM_UP {
            ours()?;
        }
        let summary = pairs::measure(self.options.pairs(), ours, limit)?;
        let remark = format!("{} MiB in slices of 1 MiB, {:?}", total >> 20, tier.engine());
        Ok(Figure::pairs("nvme: sustained demotion", summary, TARGET).remark(remark))
    }

    /// Reads of whole slices of `length` at random, at three depths.
    fn cold_reads(&self, length: usize, name: &str) -> Result<Vec<Figure>, Error> {
        let total: u64 = if self.options.quick { 256 << 20 } else { 2 << 30 };
        let memory = Memory::new(128 << 20, length);
        let tier = self.open_new(total + total / 8 + 16 * REGION_BYTES)?;
        let count = usize::try_from(total)? / length;
        let slices = Arc::new(self.runtime.block_on(memory.demote(&tier, count, 32))?);
        drop(memory);
        self.runtime.spawn(tier.drive_reads());
        fio(&self.folder, "write", total, &["--bs=1m", "--end_fsync=1"])?;
        let seed = AtomicU64::new(1);
        let mut figures = Vec::new();
        for depth in [1, 8, 32] {
            let side = self.options.side();
            let next = || seed.fetch_add(1, Ordering::Relaxed);
            let ours = || {
                let read = read_at_random(Arc::clone(&tier), Arc::clone(&slices), depth, side, next());
                Sample::measure(&[], || self.runtime.block_on(read))
            };
            let (block, depth_option) = (format!("--bs={length}"), format!("--iodepth={depth}"));
            let limit = || {
                let (runtime, seed) = (format!("--runtime={}ms", side.as_millis()), format!("--randseed={}", next()));
                let arguments: [&str; 6] = [&block, &depth_option, "--time_based", &runtime, "--norandommap", &seed];
                fio(&self.folder, "randread", total, &arguments)
            };
            let summary = pairs::measure(self.options.pairs(), ours, limit)?;
            figures.push(Figure::pairs(format!("nvme: cold read of {name}, depth {depth}"), summary, TARGET));
        }
        Ok(figures)
    }

    /// The tier's records found again after a restart.
    fn scan(&self) -> Result<Figure, Error> {
        let records: usize = if self.options.quick { 50_000 } else { 1_000_000 };
        let memory = Memory::new(64 << 20, 4096);
        let capacity = (records as u64 * 4500).next_multiple_of(REGION_BYTES) + 16 * REGION_BYTES;
        let tier = self.open_new(capacity)?;
        self.runtime.block_on(async {
            memory.demote(&tier, records, 512).await?;
            Ok::<_, Error>(tier.close().await?)
        })?;
        drop(tier);
        let start = Instant::now();
        let tier = NvmeTier::open(self.config(capacity), NODE)?;
        let (mut found, mut footer_bytes, mut all) = (0, 0, Vec::new());
        let mut batches = tier.scan();
        while let Some(batch) = batches.blocking_recv() {
            found += batch.records.len();
            footer_bytes +=
                batch.records.iter().map(|(header, _)| 84 + header.key.as_bytes().len() as u64).sum::<u64>();
            all.push(batch.records);
        }
        let seconds = start.elapsed().as_secs_f64();
        if found != records {
            return Err(format!("{found} of {records} records were found").into());
        }
        fio(&self.folder, "write", footer_bytes, &["--bs=1m", "--end_fsync=1"])?;
        let limit = fio(&self.folder, "read", footer_bytes, &["--bs=256k", "--iodepth=8"])?.elapsed.as_secs_f64();
        let remark = format!("{records} records, footers of {footer_bytes} bytes, read directly in {limit:.3} s");
        let bound = Bound::AtMost((3.0 * limit).max(0.5));
        Ok(Figure::number("nvme: all records found again", seconds, "s", Some(bound)).remark(remark))
    }
}

/// Runs fio's one job over the first `size` bytes of its file.
fn fio(folder: &Path, mode: &str, size: u64, arguments: &[&str]) -> Result<Sample, Error> {
    let output = Command::new("fio")
        .args(["--name=limit", "--filename=fio.dat", "--direct=1", "--ioengine=io_uring", "--output-format=json"])
        .arg(format!("--rw={mode}"))
        .arg(format!("--size={size}"))
        .args(arguments)
        .current_dir(folder)
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let job = &report["jobs"][0];
    let side = &job[if mode.ends_with("read") { "read" } else { "write" }];
    let number = |value: &serde_json::Value| value.as_f64().ok_or("fio's report lacks a number");
    let (bytes, rate) = (number(&side["io_bytes"])?, number(&side["bw_bytes"])?);
    let elapsed = Duration::from_secs_f64(bytes / rate.max(1.0));
    let cpu_seconds = (number(&job["usr_cpu"])? + number(&job["sys_cpu"])?) / 100.0 * elapsed.as_secs_f64();
    Ok(Sample { bytes: bytes as u64, elapsed, cpu_seconds })
}

/// Memory to demote from, and the checksum of each slice in it.
struct Memory {
    bytes: Arc<Vec<u8>>,
    slice_length: usize,
    checksums: Vec<u32>,
}

/// One slice of the memory.
struct Part {
    bytes: Arc<Vec<u8>>,
    start: usize,
    length: usize,
}

impl SliceSource for Part {
    fn pieces(&self) -> Box<dyn Iterator<Item = &[u8]> + '_> {
        Box::new(std::iter::once(&self.bytes[self.start..self.start + self.length]))
    }
}

impl Memory {
    fn new(length: usize, slice_length: usize) -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = vec![0; length / slice_length * slice_length];
        for word in bytes.chunks_exact_mut(8) {
            state = state.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
            word.copy_from_slice(&state.to_le_bytes());
        }
        let checksums = bytes.chunks(slice_length).map(crc32fast::hash).collect();
        Self { bytes: Arc::new(bytes), slice_length, checksums }
    }

    /// Writes `count` slices, going round, with `depth` of them under way, and syncs.
    async fn demote(
        &self,
        tier: &Arc<NvmeTier>,
        count: usize,
        depth: usize,
    ) -> Result<Vec<(SliceName, Location)>, Error> {
        let mut workers = Vec::new();
        for worker in 0..depth {
            let mut slices = Vec::new();
            for number in (worker..count).step_by(depth) {
                let index = number % self.checksums.len();
                let part = Part {
                    bytes: Arc::clone(&self.bytes),
                    start: index * self.slice_length,
                    length: self.slice_length,
                };
                slices.push((header(number as u64, part.length, self.checksums[index])?, part));
            }
            let tier = Arc::clone(tier);
            workers.push(tokio::spawn(async move {
                let mut written = Vec::with_capacity(slices.len());
                for (header, part) in slices {
                    let name = SliceName::from(&header);
                    written.push((name, tier.write(header, Arc::new(part)).await?.keep()));
                }
                Ok::<_, Error>(written)
            }));
        }
        let mut written = Vec::with_capacity(count);
        for worker in workers {
            written.extend(worker.await??);
        }
        tier.sync().await?;
        Ok(written)
    }
}

fn header(number: u64, length: usize, checksum: u32) -> Result<SliceHeader, Error> {
    let incarnation = Incarnation(1);
    Ok(SliceHeader {
        tenant: TenantId::DEFAULT,
        key: ObjectKey::new(format!("block-{number:034x}").as_bytes())?,
        version: VersionId { node: NODE, incarnation, sequence: number },
        replica: ReplicaId { node: NODE, incarnation, sequence: number },
        object_length: length as u64,
        slice_bytes: 4 << 20,
        slice_index: 0,
        slice_length: u32::try_from(length)?,
        checksum,
        data_type: DataType::KvCache,
        commit_index: 1,
    })
}

/// Owns nothing: every record that reclaim asks about is dead.
struct Nobody;

impl RecordOwner for Nobody {
    fn decide(&self, records: Vec<(SliceHeader, Location)>) -> BoxFuture<'_, Vec<Verdict>> {
        Box::pin(std::future::ready(vec![Verdict::Drop; records.len()]))
    }

    fn moved(&self, _: &SliceHeader, _: Location, _: Location) -> bool {
        false
    }

    fn lost(&self, _: &SliceHeader, _: Location) -> bool {
        false
    }
}

/// Page-aligned memory that a read lands in, used again and again.
struct Aligned {
    block: Block,
    filled: usize,
}

impl Landing for Aligned {
    fn spare(&mut self) -> &mut [u8] {
        &mut self.block[self.filled..]
    }

    fn advance(&mut self, count: usize) {
        self.filled += count;
    }
}

/// Reads slices at random with `depth` reads under way until `side` has passed; answers the bytes.
async fn read_at_random(
    tier: Arc<NvmeTier>,
    slices: Arc<Vec<(SliceName, Location)>>,
    depth: u64,
    side: Duration,
    seed: u64,
) -> Result<u64, Error> {
    let end = Instant::now() + side;
    let mut workers = Vec::new();
    for worker in 0..depth {
        let (tier, slices) = (Arc::clone(&tier), Arc::clone(&slices));
        workers.push(tokio::spawn(async move {
            let mut state = (seed << 32 | worker) * 2 + 1;
            let length = slices.first().map_or(0, |(name, _)| name.slice_length);
            let mut target = Aligned { block: Block::new(length as usize), filled: 0 };
            let mut bytes = 0;
            while Instant::now() < end {
                state = state.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
                let (name, location) = slices[(state >> 33) as usize % slices.len()];
                target.filled = 0;
                target = tier.read(location, name, 0..length, target).await?.1;
                bytes += target.filled as u64;
            }
            Ok::<_, Error>(bytes)
        }));
    }
    let mut bytes = 0;
    for worker in workers {
        bytes += worker.await??;
    }
    Ok(bytes)
}
