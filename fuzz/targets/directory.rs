//! The directory of a DRAM segment: after any damage its writer takes slices that are disjoint, and a reader ends.
#![no_main]

use std::sync::atomic::{AtomicU64, Ordering};

use libfuzzer_sys::fuzz_target;
use tidepool_metadata::directory::{Extent, Extents, Layout, Lookup, Reader, SliceName, SlotId, Writer, read_slice};
use tidepool_metadata::{DataType, Incarnation, NodeId, ObjectKey, ReplicaId, SliceHeader, TenantId, VersionId};

const NODE: NodeId = NodeId(7);
const PAGES: u32 = 64;
const SLOTS: u32 = 48;
const SLICES: u64 = 8;

fn key(number: u64) -> ObjectKey {
    // The longer ones take several slots.
    ObjectKey::new(&vec![number as u8 + 1; number as usize * 40 + 1]).expect("a legal key")
}

fn segment() -> (Layout, Vec<AtomicU64>) {
    let layout = Layout::new(NODE, PAGES, Some(SLOTS));
    let words: Vec<AtomicU64> = (0..layout.words()).map(|_| AtomicU64::new(0)).collect();
    layout.format(&words);
    let (mut writer, _) = Writer::recover(&words, Incarnation(1)).expect("just made");
    Writer::set_valid_until(&words, u64::MAX);
    for number in 0..SLICES {
        let mut extents = Extents::default();
        (0..=number as u32 % 3).for_each(|part| {
            assert!(extents.push(Extent { page: number as u32 * 6 + part * 2, pages: 1 }), "three extents at most");
        });
        let promise = writer.reserve(key(number).as_bytes().len()).expect("slots");
        let slot = writer.seal(&words, promise, &header(number), &extents);
        if number % 2 == 0 {
            writer.complete(&words, slot, number + 1);
        }
    }
    (layout, words)
}

fn header(number: u64) -> SliceHeader {
    SliceHeader {
        tenant: TenantId(1),
        key: key(number),
        version: VersionId { node: NODE, incarnation: Incarnation(1), sequence: number },
        replica: ReplicaId { node: NODE, incarnation: Incarnation(1), sequence: number },
        object_length: 1000,
        slice_bytes: 4 << 20,
        slice_index: 0,
        slice_length: 1000,
        checksum: 5,
        data_type: DataType::General,
        commit_index: 0,
    }
}

fn look(words: &[AtomicU64]) {
    let Ok(reader) = Reader::new(words) else { return };
    for number in 0..SLICES {
        let key = key(number);
        if let Lookup::Found(found) =
            reader.lookup(SliceName { tenant: TenantId(1), key: key.as_bytes(), slice_index: 0 }, 1)
        {
            let last = found.extents.as_slice().iter().map(|extent| u64::from(extent.page) + u64::from(extent.pages));
            assert!(last.max() <= Some(reader.layout().data_pages.into()), "outside of the segment: {found:?}");
            let _any = reader.is_unchanged(&found);
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let (layout, words) = segment();
    // Of each ten bytes two say which word, eight what is flipped in it.
    for change in bytes.as_chunks::<10>().0 {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % words.len();
        let flipped = u64::from_le_bytes(*change[2..].first_chunk().expect("eight bytes"));
        words[at].fetch_xor(flipped, Ordering::Relaxed);
    }
    look(&words);
    (0..SLOTS).for_each(|slot| drop(read_slice(&layout, &words, SlotId(slot))));
    let Ok((writer, found)) = Writer::recover(&words, Incarnation(2)) else { return };
    let mut taken = vec![false; writer.layout().data_pages as usize];
    for page in found.extents.iter().flat_map(|extent| extent.page..extent.page + extent.pages) {
        assert!(!std::mem::replace(&mut taken[page as usize], true), "page {page} is in two slices");
    }
    look(&words);
});
