//! Readers against a writer that frees and fills the same few pages without end: ten million objects found, and each has
//! its own bytes. `tidepool-stress lookups` does the same with a whole node, and a hundred times as long.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::tests::Node;
use super::*;

/// Found by all readers together.
const FOUND: u64 = 10_000_000;
const READERS: u64 = 2;
/// All of them are used again and again; the newest objects are in them.
const PAGES: u64 = 16;
/// Words of the longest object.
const WORDS: u64 = 16;
/// Readers count this many together.
const COUNTED: u64 = 1 << 12;

/// Every word of an object says which one it is.
fn word(number: u64) -> [u8; 8] {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

fn words(number: u64) -> usize {
    1 + (number % WORDS) as usize
}

fn write(node: &mut Node, newest: &AtomicU64, stop: &AtomicBool) -> u64 {
    let mut slots = vec![Vec::new(); PAGES as usize];
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        let page = (number % PAGES) as usize;
        node.retire(&std::mem::take(&mut slots[page]));
        slots[page] = node.put_bytes(&number.to_be_bytes(), &word(number).repeat(words(number)), &[page as u32]);
        newest.store(number, Ordering::Relaxed);
        number += 1;
    }
    number
}

/// Objects found, and not found.
fn read(segment: &Segment, seed: u64, newest: &AtomicU64, found: &AtomicU64, stop: &AtomicBool) -> u64 {
    let (mut state, mut buffer, mut missed) = (seed, vec![0; 8 * WORDS as usize], 0);
    while !stop.load(Ordering::Relaxed) {
        let mut now = 0;
        for _ in 0..COUNTED {
            state = state.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
            let number = newest.load(Ordering::Relaxed).saturating_sub((state >> 33) % PAGES);
            let key = Bytes::copy_from_slice(&number.to_be_bytes());
            let mut target = Filling { buffer: &mut buffer, filled: 0 };
            let read = segment.read(TenantId::DEFAULT, &key, 0, &mut target);
            // In doubt, a client asks the node.
            let Ok(Some(info)) = read else {
                missed += 1;
                continue;
            };
            assert_eq!(info.length as usize, 8 * words(number), "object {number}");
            let bytes = buffer[..info.length as usize].as_chunks::<8>().0;
            let expected = word(number);
            assert!(bytes.iter().all(|bytes| *bytes == expected), "object {number}: {bytes:02x?}");
            now += 1;
        }
        if found.fetch_add(now, Ordering::Relaxed) + now >= FOUND {
            stop.store(true, Ordering::Relaxed);
        }
    }
    missed
}

#[test]
fn ten_million_lookups_against_reuse_find_no_wrong_byte() {
    let mut node = Node::with_pages(u32::try_from(PAGES).expect("few"));
    let segment = node.segment();
    let (newest, found, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let (put, missed) = std::thread::scope(|scope| {
        let readers: Vec<_> = (1..=READERS)
            .map(|seed| {
                let (segment, newest, found, stop) = (&segment, &newest, &found, &stop);
                scope.spawn(move || {
                    // A reader that panics ends the others.
                    let end = StopOnDrop(stop);
                    let missed = read(segment, seed, newest, found, stop);
                    drop(end);
                    missed
                })
            })
            .collect();
        let put = write(&mut node, &newest, &stop);
        let missed: u64 = readers.into_iter().map(|reader| reader.join().expect("no wrong byte")).sum();
        (put, missed)
    });
    let found = found.into_inner();
    eprintln!("{found} found, {missed} missed, {put} put");
    assert!(put > 100 * PAGES && missed > 0, "the load was real: {put} put, {missed} missed");
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
