//! All objects: where they lie in memory, how they are found by key, and their order by key.
//!
//! Three parts, because no one structure is flat in cost, small and ordered at once:
//! - a slab of objects in blocks, so that growth never copies an object and a slot is 4 bytes;
//! - per key bucket a hash table of slots. Point operations, which are nearly all, take one probe whatever the size.
//!   4,096 small tables instead of one large: each grows by itself (a pause of microseconds, not a second), and a
//!   node's copies in a bucket are found without an index of their own;
//! - an [`Order`] of slots by name, for listing and matching only. It costs each put and removal a search, but the
//!   upper steps of it stay in the processor's caches.
//!
//! A tree by name alone would cost every `locate` that search; measured figures are in `docs/src/catalog.md`.
//! Determinism: no answer depends on the order of a hash table; [`ObjectTable::bucket`] sorts.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};

use hashbrown::HashTable;

use super::object::{Name, Object};
use super::order::{Order, OrderPart};
use super::{KEY_BUCKETS, KeyBucket};
use crate::object::{KeyHash, TenantId};

/// Index of an object in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot(pub(super) u32);

/// Objects of one block of the slab: what fits 128 KiB, a size of which the allocator wastes nothing.
const BLOCK: usize = (128 << 10) / size_of::<Option<Object>>();
/// Keys that are looked up side by side: more than a processor fetches memory for at a time.
const ABREAST: usize = 32;
/// Most objects: what a slot can number, with room to spare.
pub(super) const MAX_OBJECTS: usize = 1 << 31;

pub(super) struct ObjectTable {
    blocks: Vec<Vec<Option<Object>>>,
    vacant: Vec<Slot>,
    buckets: Box<[HashTable<Slot>]>,
    order: Order,
    count: usize,
}

impl ObjectTable {
    pub(super) fn new() -> Self {
        Self {
            blocks: Vec::new(),
            vacant: Vec::new(),
            buckets: (0..KEY_BUCKETS).map(|_| HashTable::new()).collect(),
            order: Order::new(),
            count: 0,
        }
    }

    /// All objects of the parts, of which no two have the same name.
    pub(super) fn of(mut parts: Vec<TablePart>, threads: NonZero<usize>) -> Self {
        let mut table = Self::new();
        let mut blocks: Vec<_> = parts.iter_mut().flat_map(|part| std::mem::take(&mut part.blocks)).collect();
        blocks.sort_unstable_by_key(|(number, _)| *number);
        for (number, mut block) in blocks {
            table.count += block.len();
            table.vacant.extend((block.len()..BLOCK).map(|index| slot(number, index)));
            block.resize_with(BLOCK, || None);
            table.blocks.push(block);
        }
        table.order = Order::of(parts.iter_mut().map(|part| std::mem::take(&mut part.order)));
        let share = table.buckets.len().div_ceil(threads.get()).next_multiple_of(GROUP);
        std::thread::scope(|scope| {
            for (number, buckets) in table.buckets.chunks_mut(share).enumerate() {
                let parts = &parts;
                scope.spawn(move || {
                    let first = number * share / GROUP;
                    for (group, buckets) in buckets.chunks_mut(GROUP).enumerate() {
                        seat_all(buckets, parts.iter().map(|part| &part.seats[first + group][..]));
                    }
                });
            }
        });
        table
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn find(&self, tenant: TenantId, key: &[u8]) -> Option<Slot> {
        let hash = KeyHash::of(tenant, key);
        self.buckets[KeyBucket::of(hash).index()]
            .find(spread(hash), |&slot| self.get(slot).name.is(tenant, key))
            .copied()
    }

    /// As [`Self::find`], of many keys in order. Each of its steps is done for some keys before the next, so that the memory
    /// that one of them needs comes while that of the others does: most of the time of a lookup is waiting for it.
    pub(super) fn find_each<K: AsRef<[u8]>>(&self, tenant: TenantId, keys: &[K], mut found: impl FnMut(Option<Slot>)) {
        for keys in keys.chunks(ABREAST) {
            let (mut candidates, mut names) = ([None; ABREAST], [&[][..]; ABREAST]);
            for (candidate, key) in candidates.iter_mut().zip(keys) {
                let hash = KeyHash::of(tenant, key.as_ref());
                // The first one that has these bits of the hash, or none at all.
                *candidate = self.buckets[KeyBucket::of(hash).index()].find(spread(hash), |_| true).copied();
            }
            for (name, candidate) in names.iter_mut().zip(candidates) {
                *name = candidate.map_or(&[], |slot| self.get(slot).name.as_bytes());
            }
            for ((key, candidate), name) in keys.iter().zip(candidates).zip(names) {
                let key = key.as_ref();
                found(match candidate {
                    Some(_) if !Name::are_bytes_of(name, tenant, key) => self.find(tenant, key),
                    found => found,
                });
            }
        }
    }

    pub(super) fn get(&self, slot: Slot) -> &Object {
        let (block, index) = place(slot);
        self.blocks[block][index].as_ref().expect("a slot in use")
    }

    /// The object that lies there, if one does.
    pub(super) fn occupant(&self, slot: Slot) -> Option<&Object> {
        let (block, index) = place(slot);
        self.blocks.get(block)?.get(index)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> &mut Object {
        let (block, index) = place(slot);
        self.blocks[block][index].as_mut().expect("a slot in use")
    }

    /// Adds an object whose name is not there yet; `hash` is its own.
    pub(super) fn insert(&mut self, hash: KeyHash, object: Object) -> Slot {
        let slot = self.seat(object);
        let blocks = &self.blocks;
        self.buckets[KeyBucket::of(hash).index()]
            .insert_unique(spread(hash), slot, |&slot| spread(get(blocks, slot).hash()));
        self.order.insert(slot, get(blocks, slot).name.as_bytes(), |slot| get(blocks, slot).name.as_bytes());
        self.count += 1;
        slot
    }

    /// Takes an object out; `hash` is its own.
    pub(super) fn remove(&mut self, slot: Slot, hash: KeyHash) -> Object {
        let blocks = &self.blocks;
        let object = get(blocks, slot);
        self.buckets[KeyBucket::of(hash).index()]
            .find_entry(spread(hash), |&other| other == slot)
            .expect("every object is in its bucket")
            .remove();
        self.order.remove(object.name.as_bytes(), |slot| get(blocks, slot).name.as_bytes());
        self.count -= 1;
        self.vacant.push(slot);
        let (block, index) = place(slot);
        self.blocks[block][index].take().expect("a slot in use")
    }

    /// Objects of a tenant in key order, from the first key that is `start` or above.
    pub(super) fn range<'a>(&'a self, tenant: TenantId, start: &[u8]) -> impl Iterator<Item = &'a Object> + use<'a> {
        let from = Name::bytes(tenant, start);
        self.order
            .range(&from, |slot| self.get(slot).name.as_bytes())
            .map(|slot| self.get(slot))
            .take_while(move |object| object.tenant() == tenant)
    }

    /// All objects by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Object> {
        self.order.range(&[], |slot| self.get(slot).name.as_bytes()).map(|slot| self.get(slot))
    }

    /// Objects of a bucket, in no order that means anything.
    pub(super) fn bucket(&self, bucket: KeyBucket) -> impl Iterator<Item = &Object> {
        self.buckets[bucket.index()].iter().map(|&slot| self.get(slot))
    }

    fn seat(&mut self, object: Object) -> Slot {
        if let Some(slot) = self.vacant.pop() {
            let (block, index) = place(slot);
            self.blocks[block][index] = Some(object);
            return slot;
        }
        if self.blocks.last().is_none_or(|block| block.len() == BLOCK) {
            self.blocks.push(Vec::with_capacity(BLOCK));
        }
        let block = self.blocks.len() - 1;
        let objects = &mut self.blocks[block];
        objects.push(Some(object));
        slot(block, objects.len() - 1)
    }

    pub(super) fn validate(&self) {
        let seated = self.blocks.iter().flatten().flatten().count();
        assert_eq!(seated, self.count, "objects in the slab");
        assert_eq!(self.buckets.iter().map(HashTable::len).sum::<usize>(), self.count, "objects in buckets");
        self.order.validate(self.count, |slot| self.get(slot).name.as_bytes());
        for object in self.iter() {
            let slot = self.find(object.tenant(), object.name.key_bytes()).expect("found by its key");
            assert_eq!(self.get(slot).name, object.name);
        }
    }
}

/// Objects that are to become part of a table, made by one thread of several.
///
/// Objects come with their names in order. Their hash tables are made at the end, each at once at its size, and [`GROUP`] at a time:
/// objects put one by one would miss the caches with each, and move each table a dozen times.
pub(super) struct TablePart {
    /// With their numbers. Only the last is not full.
    blocks: Vec<(usize, Vec<Option<Object>>)>,
    order: OrderPart,
    /// Where objects lie, for each group of buckets.
    seats: [Vec<(KeyHash, Slot)>; KEY_BUCKETS / GROUP],
}

/// Buckets whose tables are made at a time: those of 10^7 objects stay within a processor's second cache.
const GROUP: usize = 64;

impl Default for TablePart {
    fn default() -> Self {
        Self { blocks: Vec::new(), order: OrderPart::default(), seats: std::array::from_fn(|_| Vec::new()) }
    }
}

impl TablePart {
    /// Adds an object, behind all others of the range in order of names. `taken` counts the blocks of all parts.
    pub(super) fn push(&mut self, taken: &AtomicUsize, hash: KeyHash, object: Object) -> Slot {
        if self.blocks.last().is_none_or(|(_, block)| block.len() == BLOCK) {
            self.blocks.push((taken.fetch_add(1, Ordering::Relaxed), Vec::with_capacity(BLOCK)));
        }
        let (number, block) = self.blocks.last_mut().expect("just seen");
        let slot = slot(*number, block.len());
        block.push(Some(object));
        self.seats[KeyBucket::of(hash).index() / GROUP].push((hash, slot));
        self.order.push(slot, |slot| name_in(&self.blocks, slot));
        slot
    }

    /// Names that come next need not be above those that came so far.
    pub(super) fn end_range(&mut self) {
        self.order.end_block(|slot| name_in(&self.blocks, slot));
    }
}

/// The name of an object that was pushed a short while ago.
fn name_in(blocks: &[(usize, Vec<Option<Object>>)], slot: Slot) -> &[u8] {
    let (number, index) = place(slot);
    let (_, block) = blocks.iter().rev().find(|(known, _)| *known == number).expect("a block of this part");
    block[index].as_ref().expect("a slot in use").name.as_bytes()
}

/// Makes the tables of a group of buckets.
fn seat_all<'a>(buckets: &mut [HashTable<Slot>], seats: impl Iterator<Item = &'a [(KeyHash, Slot)]> + Clone) {
    let mut counts = [0; GROUP];
    let index = |hash| KeyBucket::of(hash).index() % GROUP;
    seats.clone().flatten().for_each(|&(hash, _)| counts[index(hash)] += 1);
    buckets.iter_mut().zip(counts).for_each(|(bucket, count)| *bucket = HashTable::with_capacity(count));
    for &(hash, slot) in seats.flatten() {
        buckets[index(hash)].insert_unique(spread(hash), slot, |_| unreachable!("a table made for all of them grows"));
    }
}

fn slot(block: usize, index: usize) -> Slot {
    Slot(u32::try_from(block * BLOCK + index).expect("bounded by MAX_OBJECTS"))
}

fn place(slot: Slot) -> (usize, usize) {
    (slot.0 as usize / BLOCK, slot.0 as usize % BLOCK)
}

fn get(blocks: &[Vec<Option<Object>>], slot: Slot) -> &Object {
    let (block, index) = place(slot);
    blocks[block][index].as_ref().expect("a slot in use")
}

/// Within a bucket the upper bits of the hash are equal. A table takes tags from the upper bits and places from the lower ones, so
/// the equal ones go in between: else all keys of a bucket would be looked for from one place on.
fn spread(hash: KeyHash) -> u64 {
    hash.0.rotate_left(32)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The bits from which a table takes a key's place, and its tag.
    #[test]
    fn keys_of_a_bucket_are_spread_over_its_table() {
        let bucket = 7 << (64 - KeyBucket::BITS);
        let hashes =
            (1..=1000u64).map(|number| KeyHash(bucket | number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> KeyBucket::BITS));
        let spread: Vec<u64> = hashes.map(spread).collect();
        let places: BTreeSet<u64> = spread.iter().map(|hash| hash % 1024).collect();
        let tags: BTreeSet<u64> = spread.iter().map(|hash| hash >> 57).collect();
        assert!(places.len() > 500 && tags.len() > 100, "{} places, {} tags", places.len(), tags.len());
    }
}
