//! Memory of the node's own index and order: counted at the allocator, beside what the catalog takes
//! (`metadata/tests/memory.rs`); both together are the 400 bytes an object that the node is promised to stay below.
#![expect(unsafe_code, reason = "a global allocator that counts")]
#![expect(clippy::unwrap_used, reason = "tests")]

mod test_node;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use test_node::TestNode;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

/// Counts what is asked for, rounded up to the sizes that the node's allocator has: four to each power of two.
struct Counting;

fn taken(layout: Layout) -> usize {
    let size = layout.size().max(8);
    let step = (size.next_power_of_two() / 8).max(if size <= 8 { 8 } else { 16 });
    size.next_multiple_of(step)
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

/// Seven chunks of entries; the index's table has just doubled.
const OBJECTS: u64 = 7 * 1170;
/// What the allocator takes for a key of the test.
const KEY_TAKEN: usize = 16;

/// One test, since the count is the process's.
#[tokio::test]
async fn an_object_of_one_slice_costs_at_most_215_bytes_beyond_its_key_and_churn_costs_nothing() {
    let node = TestNode::new(48 << 20, None).await;
    let empty = IN_USE.load(Ordering::Relaxed);
    for _ in 0..OBJECTS {
        node.put(1).await;
    }
    let used = (IN_USE.load(Ordering::Relaxed) - empty) / OBJECTS as usize - KEY_TAKEN;
    println_figure("bytes an object beyond its key", used);
    assert!(used <= 215, "{used} bytes an object beyond its key");
    let full = IN_USE.load(Ordering::Relaxed);
    // Old objects go, new ones come, at a constant count.
    for old in 1..=OBJECTS {
        node.put(1).await;
        let name = node.identity(old).name;
        assert!(node.store.free(name.tenant, &name.key, name.replica));
    }
    let grown = IN_USE.load(Ordering::Relaxed) as f64 / full as f64;
    println_figure("percent of memory after churn", (grown * 100.0) as usize);
    assert!(grown < 1.1, "memory grew to {grown:.2} of what it was");
}

#[expect(clippy::print_stdout, reason = "the figure that docs quote")]
fn println_figure(what: &str, figure: usize) {
    println!("{what}: {figure}");
}
