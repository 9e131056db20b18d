//! A node that lives long: millions of puts with a small number of objects alive, and lookups of absent keys. What it
//! holds must not grow with what has gone through it (public reports tell of masters that grew until they were killed).

use super::load::{BATCH, fill, node, read, runtime};
use super::{BenchOptions, Bound, Error, Figure};
use crate::node_process::NodeProcess;

const VALUE_BYTES: usize = 100;
const PAGE_BYTES: u64 = 4096;
/// What growth is measured from: by then all tables have their size.
const WARM_UP: u64 = 2;
const MILLIONS: u64 = 10;
const GROWTH: f64 = 1.10;

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let (step, live) = if options.quick { (20_000, 10_000) } else { (1_000_000, 100_000) };
    let runtime = runtime()?;
    // Beside the live objects, what the watermarks keep free.
    let node = NodeProcess::start(node(options, "soak", live * PAGE_BYTES * 10 / 9, 0))?;
    let client = {
        let _in_runtime = runtime.enter();
        node.client(4)?
    };
    let (mut warm, mut full) = ([0; 2], [0; 2]);
    for round in 0..MILLIONS {
        let numbers = round * step..(round + 1) * step;
        runtime.block_on(fill(&client, numbers.clone(), VALUE_BYTES))?;
        let absent = numbers.end + MILLIONS * step;
        if runtime.block_on(read(&client, absent..absent + BATCH as u64))? > 0 {
            return Err("an object that was never put is found".into());
        }
        full = sample(&node)?;
        if round + 1 == WARM_UP {
            warm = full;
        }
    }
    let growth = |index: usize| full[index] as f64 / warm[index] as f64;
    let mib = |bytes: u64| bytes / (1 << 20);
    let remark = |index: usize| {
        let (puts, objects) = (MILLIONS * step, live);
        format!("{puts} puts, {objects} alive; {} MiB, {} after a fifth of them", mib(full[index]), mib(warm[index]))
    };
    let figure =
        |name, index| Figure::number(name, growth(index), "times", Some(Bound::AtMost(GROWTH))).remark(remark(index));
    Ok(vec![figure("own memory grows with the puts", 0), figure("heap grows with the puts", 1)])
}

/// Own resident memory, and what is held of the allocator, in bytes.
fn sample(node: &NodeProcess) -> Result<[u64; 2], Error> {
    Ok([node.resident_bytes()?.own, node.metric("tidepool_heap_allocated_bytes")?])
}
