//! `tidepool bench`: what this machine reaches against a running node.

use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use tidepool_client::workload::{LoadOperation, StoreLoad, StoreLoadReport};
use tidepool_client::{Client, ClientSettings};
use tokio::runtime::Runtime;

use super::connection::ConnectionArguments;
use super::failure::{Failure, NO};
use super::output::{Output, Table, rate, size};
use crate::config::Size;

/// A node lets readers into its memory when it and its catalog agree on what is there.
const PATIENCE: Duration = Duration::from_secs(6);
/// Runs before each that counts, for connections and caches.
const WARM_UP: Duration = Duration::from_millis(100);

#[derive(Debug, Subcommand)]
pub(super) enum BenchCommand {
    /// Puts, gets and exists of objects through the whole client path
    ///
    /// Keys begin with `bench/` and are removed afterwards. A node that has no room for them evicts others' objects.
    Store(StoreArguments),
}

#[derive(Debug, Args)]
pub(super) struct StoreArguments {
    /// Ways to the node
    #[arg(long, value_enum, value_delimiter = ',', default_value = "local,tcp")]
    ways: Vec<Way>,
    /// What is measured
    #[arg(long, value_enum, value_delimiter = ',', default_value = "put,get,put-batch,get-batch,exists,exists-batch")]
    operations: Vec<OperationArgument>,
    /// Bytes of an object
    #[arg(long, value_delimiter = ',', default_value = "4KiB,1MiB", value_name = "SIZE")]
    block: Vec<Size>,
    /// Objects of a batch
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Callers at a time, each with one call
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Seconds for each figure
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Bytes of all objects that gets and exists go round
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    total: Size,
    /// Compare every byte that comes back, and read again what was put last
    #[arg(long)]
    verify: bool,
    /// Put from memory that a node on this host can copy from
    #[arg(long)]
    lendable: bool,
}

/// A way to the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    /// By what one host has: gets without a call, shared memory, unix socket
    Local,
    /// The same, but every get is a call
    Host,
    /// By the node's engine over TCP, as from another host
    Tcp,
    /// By gRPC
    Grpc,
}

impl Way {
    fn apply(self, settings: &mut ClientSettings) {
        settings.local_reads = self == Self::Local;
        settings.same_host = matches!(self, Self::Local | Self::Host);
        settings.native = self != Self::Grpc;
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OperationArgument {
    Put,
    Get,
    PutBatch,
    GetBatch,
    Exists,
    ExistsBatch,
}

impl From<OperationArgument> for LoadOperation {
    fn from(argument: OperationArgument) -> Self {
        match argument {
            OperationArgument::Put => Self::Put,
            OperationArgument::Get => Self::Get,
            OperationArgument::PutBatch => Self::PutBatch,
            OperationArgument::GetBatch => Self::GetBatch,
            OperationArgument::Exists => Self::Exists,
            OperationArgument::ExistsBatch => Self::ExistsBatch,
        }
    }
}

/// One figure: a line of JSON.
#[derive(Debug, Serialize)]
struct Line {
    way: Way,
    operation: LoadOperation,
    block_bytes: usize,
    batch: usize,
    threads: usize,
    verify: bool,
    items_per_second: f64,
    gigabytes_per_second: f64,
    #[serde(flatten)]
    report: StoreLoadReport,
}

pub(super) fn run(
    command: &BenchCommand,
    connection: &ConnectionArguments,
    runtime: &Runtime,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let BenchCommand::Store(arguments) = command;
    let duration = Duration::try_from_secs_f64(arguments.seconds)
        .map_err(|_| Failure::usage(format!("--seconds {}: give a number of seconds", arguments.seconds)))?;
    let bench = StoreBench { arguments, connection, runtime, output, duration };
    let mut lines = Vec::new();
    for block in &arguments.block {
        bench.block(*block, &mut lines)?;
    }
    if !output.is_json() {
        output.bytes(render(&lines).as_bytes())?;
    }
    let is_clean = lines.iter().all(|line| line.report.is_clean());
    Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::from(NO) })
}

struct StoreBench<'a> {
    arguments: &'a StoreArguments,
    connection: &'a ConnectionArguments,
    runtime: &'a Runtime,
    output: &'a Output,
    duration: Duration,
}

impl StoreBench<'_> {
    /// All ways and operations with objects of one size.
    fn block(&self, block: Size, lines: &mut Vec<Line>) -> Result<(), Failure> {
        let block_bytes = usize::try_from(block.0).ok().filter(|bytes| *bytes > 0);
        let block_bytes = block_bytes.ok_or_else(|| Failure::usage("--block: give at least a byte"))?;
        let (batch, threads) = (self.arguments.batch as usize, self.arguments.threads as usize);
        let objects = usize::try_from(self.arguments.total.0 / block.0).unwrap_or(usize::MAX).clamp(batch, 1 << 20);
        let load = StoreLoad {
            operation: LoadOperation::Get,
            block_bytes,
            batch,
            threads,
            duration: self.duration,
            verify: self.arguments.verify,
            lendable: self.arguments.lendable,
            objects,
            prefix: format!("bench/{}-{}", std::process::id(), seconds_of_day()),
        };
        let writer = self.client(Way::Tcp)?;
        self.runtime.block_on(load.fill(&writer))?;
        let measured = self.arguments.ways.iter().try_for_each(|&way| self.way(way, &load, lines));
        // What was measured stays measured; what could not be removed is said.
        let cleared = self.runtime.block_on(load.clear(&writer));
        measured?;
        Ok(cleared?)
    }

    fn way(&self, way: Way, load: &StoreLoad, lines: &mut Vec<Line>) -> Result<(), Failure> {
        let client = self.client(way)?;
        if way == Way::Local {
            let until = Instant::now() + PATIENCE;
            while client.local_hits() == 0 && Instant::now() < until {
                let _warm = StoreLoad { duration: WARM_UP, ..load.clone() }.run(self.runtime.handle(), &client);
            }
            if client.local_hits() == 0 {
                self.output.remark("the node lets no local reader in: every get is a call");
            }
        }
        for &operation in &self.arguments.operations {
            let operation = LoadOperation::from(operation);
            let run = |duration, kind| {
                let prefix = match operation {
                    LoadOperation::Put | LoadOperation::PutBatch => {
                        format!("{}/{kind}/{way:?}/{operation:?}", load.prefix)
                    }
                    _ => load.prefix.clone(),
                };
                StoreLoad { operation, duration, prefix, ..load.clone() }.run(self.runtime.handle(), &client)
            };
            let _warm = run(WARM_UP.min(self.duration), "warm");
            let report = run(self.duration, "measured");
            let line = Line {
                way,
                operation,
                block_bytes: load.block_bytes,
                batch: if operation.is_batch() { load.batch } else { 1 },
                threads: load.threads,
                verify: load.verify,
                items_per_second: report.items_per_second(),
                gigabytes_per_second: report.bytes_per_second() / 1e9,
                report,
            };
            if self.output.is_json() {
                let text = serde_json::to_string(&line)
                    .map_err(|error| Failure::local("OUTPUT", format!("write JSON: {error}")))?;
                self.output.bytes(format!("{text}\n").as_bytes())?;
            }
            lines.push(line);
        }
        Ok(())
    }

    fn client(&self, way: Way) -> Result<Client, Failure> {
        let _in_runtime = self.runtime.enter();
        self.connection.client_with(|settings| {
            settings.connections = settings.connections.max(self.arguments.threads.min(64) as usize);
            way.apply(settings);
        })
    }
}

/// Tells runs of one process id apart.
fn seconds_of_day() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs() % 86_400)
}

fn render(lines: &[Line]) -> String {
    let header = ["way", "operation", "block", "batch", "threads", "objects/s", "rate", "p50", "p99", "without call"];
    let mut table = Table::new(&header);
    let us = |microseconds: f64| format!("{microseconds:.1} us");
    for line in lines {
        let report = &line.report;
        let rate = if report.bytes > 0 { rate(report.bytes_per_second()) } else { "-".to_owned() };
        table.cells(vec![
            name(&line.way),
            name(&line.operation),
            size(line.block_bytes as u64),
            line.batch.to_string(),
            line.threads.to_string(),
            format!("{:.0}", line.items_per_second),
            rate,
            us(report.latency.p50_us),
            us(report.latency.p99_us),
            format!("{:.0} %", 100.0 * report.without_call as f64 / report.items.max(1) as f64),
        ]);
    }
    let sum = |of: fn(&StoreLoadReport) -> u64| lines.iter().map(|line| of(&line.report)).sum::<u64>();
    let (wrong, errors) = (sum(|report| report.wrong), sum(|report| report.errors));
    let mut text = table.render();
    text += &format!("\nwrong objects: {wrong}, failed: {errors}, missing: {}\n", sum(|report| report.missing));
    for remark in lines.iter().flat_map(|line| &line.report.remarks).take(16) {
        text += &format!("  {remark}\n");
    }
    text
}

/// As it is called in JSON.
fn name(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}
