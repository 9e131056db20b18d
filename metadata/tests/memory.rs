//! Memory of the catalog: at most 250 bytes an object beyond its key, counted at the allocator.
#![expect(unsafe_code, reason = "a global allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use tidepool_metadata::catalog::{
    Catalog, Command, CompleteItem, Copies, EntryContext, ForgetMode, Labels, NewReplica, NodeAddresses,
    NodeRegistration, ReplicaName,
};
use tidepool_metadata::{
    DataType, Durability, Incarnation, LogIndex, LogTime, NodeId, ObjectKey, ReplicaId, TenantId, Term, VersionId,
};

static IN_USE: AtomicUsize = AtomicUsize::new(0);

/// Counts what is asked for, rounded up to 16 bytes and one word more, as allocators take it.
struct Counting;

fn taken(layout: Layout) -> usize {
    (layout.size() + 8).next_multiple_of(16)
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(taken(layout), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(taken(layout), Ordering::Relaxed);
        // SAFETY: as above; `pointer` came from `System.alloc` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const KEY_BYTES: usize = 32;
/// What the allocator takes for a key alone, with its tenant.
const KEY_TAKEN: usize = 48;

fn key(number: u64) -> ObjectKey {
    ObjectKey::new(format!("{:032x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).as_bytes()).expect("legal key")
}

fn item(number: u64, time: LogTime) -> CompleteItem {
    let (node, incarnation) = (NodeId(1), Incarnation(1));
    CompleteItem {
        tenant: TenantId::DEFAULT,
        key: key(number),
        version: VersionId { node, incarnation, sequence: number },
        length: 64 << 10,
        slice_bytes: 4 << 20,
        data_type: DataType::KvCache,
        group: None,
        checksums: vec![number as u32],
        replicas: vec![NewReplica {
            replica: ReplicaId { node, incarnation, sequence: number },
            durability: Durability::Memory,
        }],
        copies: Copies::ONE,
        durability: Durability::Memory,
        upsert: false,
        pin: false,
        reserved_at: time,
        request: None,
    }
}

struct Filler {
    catalog: Catalog,
    index: u64,
}

impl Filler {
    fn new() -> Self {
        let mut filler = Self { catalog: Catalog::new(), index: 0 };
        filler.apply(&Command::RegisterNode(NodeRegistration {
            node: NodeId(1),
            incarnation: Incarnation(1),
            addresses: NodeAddresses::default(),
            tiers: vec![],
            labels: Labels::default(),
        }));
        filler
    }

    /// A thousand entries a second of log time.
    fn time(&self) -> LogTime {
        LogTime(1_000_000 + self.index)
    }

    fn apply(&mut self, command: &Command) {
        self.index += 1;
        let at = EntryContext { index: LogIndex(self.index), term: Term(1), time: self.time() };
        self.catalog.apply(at, command);
        if self.index.is_multiple_of(1024) {
            drop(self.catalog.take_changes());
        }
    }

    fn put(&mut self, number: u64) {
        self.apply(&Command::Complete(vec![item(number, self.time())]));
    }

    fn evict(&mut self, number: u64) {
        let replica = ReplicaId { node: NodeId(1), incarnation: Incarnation(1), sequence: number };
        let items = vec![ReplicaName { tenant: TenantId::DEFAULT, key: key(number), replica }];
        self.apply(&Command::Forget { mode: ForgetMode::EvenLast, items });
    }
}

/// One test, since the count is the process's.
#[test]
fn an_object_costs_at_most_250_bytes_beyond_its_key_and_churn_costs_nothing() {
    assert!((KEY_BYTES + 4 + 8).next_multiple_of(16) == KEY_TAKEN);
    let mut filler = Filler::new();
    let empty = IN_USE.load(Ordering::Relaxed);
    const OBJECTS: u64 = 60_000;
    // The worst of the sizes at which a table has just doubled.
    let mut worst = 0;
    for number in 1..=OBJECTS {
        filler.put(number);
        if number >= OBJECTS / 2 && number.is_multiple_of(1000) {
            drop(filler.catalog.take_changes());
            let used = (IN_USE.load(Ordering::Relaxed) - empty) / number as usize;
            worst = worst.max(used - KEY_TAKEN);
        }
    }
    println_figure("bytes an object beyond its key, at worst", worst);
    assert!(worst <= 250, "{worst} bytes an object beyond its key");

    // Old objects go, new ones come, at a constant count (a put each and an eviction each).
    let mut settled = 0;
    for number in OBJECTS + 1..=3 * OBJECTS {
        filler.put(number);
        filler.evict(number - OBJECTS);
        if number == 2 * OBJECTS - OBJECTS / 2 {
            drop(filler.catalog.take_changes());
            settled = IN_USE.load(Ordering::Relaxed);
        }
    }
    drop(filler.catalog.take_changes());
    let grown = IN_USE.load(Ordering::Relaxed) as f64 / settled as f64;
    println_figure("percent of memory after churn", (grown * 100.0) as usize);
    assert!(grown < 1.1, "memory grew to {grown:.2} of what it was");
}

#[expect(clippy::print_stdout, reason = "the figure that docs quote")]
fn println_figure(what: &str, figure: usize) {
    println!("{what}: {figure}");
}
