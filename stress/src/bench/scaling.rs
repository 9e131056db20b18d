//! Cost of put, get and eviction at 10^4, 10^5 and 10^6 objects: it must hardly grow.
//!
//! Objects are small and travel in batches, so that the node's tables are what is measured. Time is the node's CPU
//! time; instructions are counted where the machine lets us.

use std::time::Instant;

use tidepool_client::Client;
use tokio::runtime::Runtime;

use super::load::{BATCH, fill, node, read, runtime, scattered};
use super::pairs::cpu_seconds;
use super::perf::InstructionCounter;
use super::{BenchOptions, Bound, Error, Figure};
use crate::node_process::NodeProcess;

const VALUE_BYTES: usize = 100;
/// A slice takes a page.
const PAGE_BYTES: u64 = 4096;

/// Cost of one operation.
#[derive(Clone, Copy, Debug)]
struct Cost {
    cpu_microseconds: f64,
    wall_microseconds: f64,
    instructions: Option<f64>,
}

pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let sizes: &[u64] = if options.quick { &[10_000, 50_000] } else { &[10_000, 100_000, 1_000_000] };
    let operations: u64 = if options.quick { 10_000 } else { 100_000 };
    let costs = sizes.iter().map(|&size| costs(options, size, operations)).collect::<Result<Vec<_>, _>>()?;
    let mut figures = Vec::new();
    for (index, name) in ["put", "get", "put that evicts"].into_iter().enumerate() {
        let all: Vec<Cost> = costs.iter().map(|costs| costs[index]).collect();
        let growth = |value: &dyn Fn(&Cost) -> f64| value(&all[all.len() - 1]) / value(&all[0]);
        let remark = sizes.iter().zip(&all).map(|(size, cost)| {
            let (cpu, wall) = (cost.cpu_microseconds, cost.wall_microseconds);
            format!("{size}: {cpu:.2} us CPU, {wall:.2} us")
        });
        let time = growth(&|cost| cost.cpu_microseconds);
        let figure = Figure::number(format!("{name}: time grows by"), time, "times", Some(Bound::AtMost(2.0)));
        figures.push(figure.remark(remark.collect::<Vec<_>>().join("; ")));
        let instructions = format!("{name}: instructions grow by");
        figures.push(if all.iter().all(|cost| cost.instructions.is_some()) {
            let grown = growth(&|cost| cost.instructions.unwrap_or(f64::NAN));
            Figure::number(instructions, grown, "times", Some(Bound::AtMost(1.2)))
        } else {
            Figure::not_measurable(instructions, "no instruction counter that we may read")
        });
    }
    Ok(figures)
}

/// Put, get and eviction in a node with `size` objects.
fn costs(options: &BenchOptions, size: u64, operations: u64) -> Result<[Cost; 3], Error> {
    let runtime = runtime()?;
    // The measured puts stay below the low watermark of 0.90, whatever the size.
    let room = (size + operations) * PAGE_BYTES * 10 / 8;
    let node = NodeProcess::start(node(options, &format!("scaling-{size}"), room, 0))?;
    let client = {
        let _in_runtime = runtime.enter();
        node.client(4)?
    };
    runtime.block_on(fill(&client, 0..size, VALUE_BYTES))?;
    let end = size + operations;
    let put = measure(&node, operations, || runtime.block_on(fill(&client, size..end, VALUE_BYTES)))?;
    let get = measure(&node, operations, || read_scattered(&runtime, &client, operations, size))?;
    // Fill up to the watermark, then as much again as is evicted for.
    let full = room / PAGE_BYTES;
    runtime.block_on(fill(&client, end..full, VALUE_BYTES))?;
    let before = node.tier("dram", "evictions")?;
    let evict = measure(&node, operations, || runtime.block_on(fill(&client, full..full + operations, VALUE_BYTES)))?;
    let evicted = node.tier("dram", "evictions")? - before;
    if evicted < operations / 2 {
        return Err(format!("{operations} puts into a full tier evicted only {evicted}").into());
    }
    Ok([put, get, evict])
}

fn read_scattered(runtime: &Runtime, client: &Client, count: u64, bound: u64) -> Result<(), Error> {
    let numbers: Vec<u64> = scattered(count, bound).collect();
    for batch in numbers.chunks(BATCH) {
        if runtime.block_on(read(client, batch.iter().copied()))? != batch.len() {
            return Err("an object that was put is missing".into());
        }
    }
    Ok(())
}

fn measure(node: &NodeProcess, operations: u64, work: impl FnOnce() -> Result<(), Error>) -> Result<Cost, Error> {
    let node_cpu = || cpu_seconds(&[node.id()]) - cpu_seconds(&[]);
    let counter = InstructionCounter::start(node.id()).ok();
    let (cpu, started) = (node_cpu(), Instant::now());
    work()?;
    let each = |seconds: f64| seconds * 1e6 / operations as f64;
    let (cpu, wall) = (each(node_cpu() - cpu), each(started.elapsed().as_secs_f64()));
    let instructions = counter.map(InstructionCounter::stop).transpose()?;
    let instructions = instructions.map(|count| count / operations as f64);
    Ok(Cost { cpu_microseconds: cpu, wall_microseconds: wall, instructions })
}
