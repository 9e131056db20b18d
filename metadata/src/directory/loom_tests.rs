//! The protocol between writer and reader under every interleaving and every allowed reordering that loom explores.

use std::sync::atomic::Ordering;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;

use super::*;
use crate::node::{Incarnation, NodeId};
use crate::object::{DataType, ObjectKey, ReplicaId, TenantId, VersionId};
use crate::slice::SliceHeader;

struct LoomCell(AtomicU64);

impl Cell for LoomCell {
    fn load(&self, ordering: Ordering) -> u64 {
        self.0.load(ordering)
    }
    fn store(&self, value: u64, ordering: Ordering) {
        self.0.store(value, ordering);
    }
    fn fence(ordering: Ordering) {
        fence(ordering);
    }
}

fn header(key: &[u8], sequence: u64) -> SliceHeader {
    SliceHeader {
        tenant: TenantId(1),
        key: ObjectKey::new(key).expect("a legal key"),
        version: VersionId { node: NodeId(1), incarnation: Incarnation(1), sequence },
        replica: ReplicaId { node: NodeId(1), incarnation: Incarnation(1), sequence },
        object_length: 4096,
        slice_bytes: 4096,
        slice_index: 0,
        slice_length: 4096,
        checksum: 0,
        data_type: DataType::Unknown,
        commit_index: 0,
    }
}

fn seal(writer: &mut Writer, words: &[LoomCell], key: &[u8], sequence: u64) -> SlotId {
    let mut extents = Extents::default();
    assert!(extents.push(Extent { page: 0, pages: 1 }));
    let promise = writer.reserve(key.len()).expect("a slot");
    writer.seal(words, promise, &header(key, sequence), &extents)
}

/// What the writer does in the model, once its first slice is complete.
#[derive(Clone, Copy)]
enum Script {
    /// The second slice's slot is written before the reader starts: only the change of pages is raced.
    OtherSlot(&'static [u8]),
    /// The second slice takes the first one's slot, each word of which may be seen old or new.
    SameSlot,
}

/// A page of two words. The writer retires the slice that has it and gives it to another one, while a reader
/// looks the first one up and copies: it finds its bytes whole, or notices.
fn reuse_while_reading(script: Script) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(1);
    model.max_branches = 20_000;
    // In full it takes minutes: in the gate, as much as the time allows. `TIDEPOOL_LOOM_SECONDS` asks for more.
    let seconds = std::env::var("TIDEPOOL_LOOM_SECONDS").ok().and_then(|text| text.parse().ok());
    model.max_duration = Some(Duration::from_secs(seconds.unwrap_or(4)));
    model.checkpoint_interval = 100;
    model.check(move || {
        let layout = Layout::new(NodeId(1), 1, Some(16));
        let layout = Layout { bucket_count: 1, slot_count: 16, ..layout };
        // The slots behind the second are never touched, and not there: loom pays for each cell.
        let words: Arc<Vec<LoomCell>> = Arc::new((0..layout.slot(2)).map(|_| LoomCell(AtomicU64::new(0))).collect());
        let page: Arc<[AtomicU64; 2]> = Arc::new([AtomicU64::new(1), AtomicU64::new(1)]);
        layout.format(&words);
        let (mut writer, _) = Writer::recover(&words, Incarnation(1)).expect("a segment");
        Writer::set_valid_until(&words, 1000);
        let first = seal(&mut writer, &words, b"first", 1);
        writer.complete(&words, first, 1);
        let second = match script {
            Script::OtherSlot(key) => Some(seal(&mut writer, &words, key, 2)),
            Script::SameSlot => None,
        };

        let reader = {
            let (words, page) = (Arc::clone(&words), Arc::clone(&page));
            thread::spawn(move || {
                let reader = Reader::reopen(&words, layout);
                let name = SliceName { tenant: TenantId(1), key: b"first", slice_index: 0 };
                if let Lookup::Found(found) = reader.lookup(name, 1) {
                    let copied = [page[0].load(Relaxed), page[1].load(Relaxed)];
                    if reader.is_unchanged(&found) {
                        assert_eq!(copied, [found.version.sequence; 2]);
                    }
                }
            })
        };
        writer.retire(&words, first);
        page.iter().for_each(|word| word.store(2, Relaxed));
        let second = second.unwrap_or_else(|| seal(&mut writer, &words, b"other", 2));
        writer.complete(&words, second, 2);
        reader.join().expect("the reader's assertions hold");
    });
}

#[test]
fn pages_reused_by_another_key_are_noticed() {
    reuse_while_reading(Script::OtherSlot(b"other"));
}

#[test]
fn pages_reused_by_the_next_version_are_noticed() {
    reuse_while_reading(Script::OtherSlot(b"first"));
}

#[test]
fn a_reused_slot_is_noticed() {
    reuse_while_reading(Script::SameSlot);
}
