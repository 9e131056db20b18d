//! Cost of the catalog's operations from 10^4 objects up: it should be flat. Prints nanoseconds an operation.
//!
//! `cargo bench -p tidepool-metadata --bench catalog [-- OBJECTS..]`; run as a test it uses one small size.
#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
#![expect(clippy::disallowed_methods, reason = "a benchmark asks the time")]

use std::hint::black_box;
use std::time::Instant;

use tidepool_metadata::catalog::{
    Catalog, Command, CompleteItem, Copies, EntryContext, ForgetMode, Labels, NewReplica, NodeAddresses,
    NodeRegistration, Query, ReplicaName,
};
use tidepool_metadata::{
    DataType, Durability, Incarnation, LogIndex, LogTime, NodeId, ObjectKey, ReplicaId, TenantId, Term, VersionId,
};

/// Items of one command, as group commit makes them under load.
const BATCH: u64 = 64;
const NODE: NodeId = NodeId(1);
const LIFE: Incarnation = Incarnation(1);

/// Keys as engines make them: a common prefix, then a hash.
fn key(number: u64) -> ObjectKey {
    let hash = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ObjectKey::new(format!("model@1@0@{hash:016x}{:016x}", hash.rotate_left(17)).as_bytes()).expect("legal key")
}

fn item(number: u64, reserved_at: LogTime) -> CompleteItem {
    let replica = ReplicaId { node: NODE, incarnation: LIFE, sequence: number };
    CompleteItem {
        tenant: TenantId::DEFAULT,
        key: key(number),
        version: VersionId { node: NODE, incarnation: LIFE, sequence: number },
        length: 64 << 10,
        slice_bytes: 4 << 20,
        data_type: DataType::KvCache,
        group: None,
        checksums: vec![number as u32],
        replicas: vec![NewReplica { replica, durability: Durability::Memory }],
        copies: Copies::ONE,
        durability: Durability::Memory,
        upsert: false,
        pin: false,
        reserved_at,
        request: None,
    }
}

fn eviction(number: u64) -> ReplicaName {
    let replica = ReplicaId { node: NODE, incarnation: LIFE, sequence: number };
    ReplicaName { tenant: TenantId::DEFAULT, key: key(number), replica }
}

struct Bench {
    catalog: Catalog,
    index: u64,
}

impl Bench {
    fn with(objects: u64) -> Self {
        let mut bench = Self { catalog: Catalog::new(), index: 0 };
        let addresses = NodeAddresses::default();
        let registration =
            NodeRegistration { node: NODE, incarnation: LIFE, addresses, tiers: vec![], labels: Labels::default() };
        bench.apply(&Command::RegisterNode(registration));
        for from in (0..objects).step_by(BATCH as usize) {
            let puts = bench.puts(from);
            bench.apply(&puts);
            if from.is_multiple_of(1 << 16) {
                drop(bench.catalog.take_changes());
            }
        }
        drop(bench.catalog.take_changes());
        bench
    }

    /// Apart from [`Self::apply`], so that a profiler can count what is measured:
    /// `valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*Bench::measured*'`.
    #[inline(never)]
    fn measured(&mut self, commands: &[Command]) -> u64 {
        let start = Instant::now();
        commands.iter().for_each(|command| self.apply(command));
        nanoseconds(start, commands.len() as u64 * BATCH)
    }

    fn apply(&mut self, command: &Command) {
        self.index += 1;
        black_box(
            self.catalog.apply(EntryContext { index: LogIndex(self.index), term: Term(1), time: self.time() }, command),
        );
    }

    /// About 50,000 items a second.
    fn time(&self) -> LogTime {
        LogTime(1_000_000 + self.index * BATCH / 50)
    }

    fn puts(&self, from: u64) -> Command {
        Command::Complete((from..from + BATCH).map(|number| item(number, self.time())).collect())
    }
}

fn evictions(from: u64) -> Command {
    Command::Forget { mode: ForgetMode::EvenLast, items: (from..from + BATCH).map(eviction).collect() }
}

fn nanoseconds(start: Instant, operations: u64) -> u64 {
    start.elapsed().as_nanos() as u64 / operations
}

fn measure(objects: u64, operations: u64) {
    let objects = objects.next_multiple_of(BATCH);
    let mut bench = Bench::with(objects);
    // Each round is measured apart from making its commands.
    let (mut put, mut evict, mut image, mut locate, mut miss, mut exists) = (0, 0, 0, 0, 0, 0);
    let rounds = operations / (BATCH * 64);
    for round in 0..rounds {
        let first = round * BATCH * 64;
        let puts: Vec<Command> = (0..64).map(|one| bench.puts(objects + first + one * BATCH)).collect();
        put += bench.measured(&puts);

        // Victims are as scattered over the keys as eviction by age leaves them.
        let victims: Vec<Command> = (0..64).map(|one| evictions(first + one * BATCH)).collect();
        evict += bench.measured(&victims);

        let start = Instant::now();
        black_box(bench.catalog.take_changes());
        image += nanoseconds(start, 2 * BATCH * 64);

        let live = |number: u64| first + BATCH * 64 + number.wrapping_mul(0x2545_f491_4f6c_dd1d) % objects;
        let locates = |number: &dyn Fn(u64) -> u64| Query::Locate {
            tenant: TenantId::DEFAULT,
            keys: (0..BATCH * 64).map(|one| key(number(round * 7919 + one))).collect(),
        };
        let (hits, misses) = (locates(&live), locates(&|number| u64::MAX / 2 + number));
        let start = Instant::now();
        black_box(bench.catalog.query(&hits));
        locate += nanoseconds(start, BATCH * 64);
        let start = Instant::now();
        black_box(bench.catalog.query(&misses));
        miss += nanoseconds(start, BATCH * 64);
        let Query::Locate { tenant, keys } = hits else { unreachable!("made above") };
        let start = Instant::now();
        black_box(bench.catalog.presences(tenant, &keys));
        exists += nanoseconds(start, BATCH * 64);
    }
    let per_round = [put, evict, image, locate, miss, exists].map(|sum| sum / rounds.max(1));
    let [put, evict, image, locate, miss, exists] = per_round;
    println!("{objects:>10} {put:>8} {evict:>8} {image:>8} {locate:>8} {miss:>8} {exists:>8}");
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let sizes: Vec<u64> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    let benches = arguments.iter().any(|argument| argument == "--bench");
    let [objects, put, evict, row, locate, miss, exists] =
        ["objects", "put", "evict", "row", "locate", "miss", "exists"];
    println!("{objects:>10} {put:>8} {evict:>8} {row:>8} {locate:>8} {miss:>8} {exists:>8}   ns each");
    match (benches, &sizes[..]) {
        (false, []) => measure(1000, 8192),
        (_, []) => [10_000, 100_000, 1_000_000].into_iter().for_each(|objects| measure(objects, 200_000)),
        (_, sizes) => sizes.iter().for_each(|&objects| measure(objects, 200_000)),
    }
}
