//! Resident memory: DRAM, a fixed overhead, and at most 400 bytes and the key for each object.

use super::load::{fill, key, node, runtime};
use super::{BenchOptions, Bound, Error, Figure};
use crate::node_process::{NodeProcess, ResidentBytes};

const OVERHEAD_BYTES: u64 = 256 << 20;
const OBJECT_BYTES: u64 = 400;
/// A page each, and some to spare.
const DRAM_BYTES_PER_OBJECT: u64 = 4096 * 5 / 4;

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let objects: u64 = if options.quick { 50_000 } else { 1_000_000 };
    let dram = objects * DRAM_BYTES_PER_OBJECT;
    let runtime = runtime()?;
    let node = NodeProcess::start(node(options, "memory", dram, 0))?;
    let client = {
        let _in_runtime = runtime.enter();
        node.client(4)?
    };
    let total = |resident: ResidentBytes| resident.own + resident.file + resident.shared;
    let empty = node.resident_bytes()?;
    runtime.block_on(fill(&client, 0..objects, 100))?;
    let full = node.resident_bytes()?;
    let key_bytes = key(0).len() as u64;
    let budget = dram + OVERHEAD_BYTES + objects * (OBJECT_BYTES + key_bytes);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let remark = format!(
        "{objects} objects with keys of {key_bytes} bytes; DRAM {:.0} MiB, resident of it {:.0}; own {:.0}, when empty {:.0}",
        mib(dram),
        mib(full.shared),
        mib(full.own),
        mib(empty.own),
    );
    let each = full.own.saturating_sub(empty.own) as f64 / objects as f64;
    let target = Some(Bound::AtMost(mib(budget).round()));
    Ok(vec![
        Figure::number("resident memory", mib(total(full)), "MiB", target).remark(remark),
        Figure::number("own memory grows for each object by", each, "bytes", None),
    ])
}
