//! Slots in the order of their objects' names, in blocks of up to 512: six bytes an object.
//!
//! Holds no names of its own but one per block (the bound between it and the block before); the caller gives the
//! name of a slot. A search takes a few steps in a small tree and nine in one block.
//! Invariants: names rise within a block; a block's names are at or above its bound and below the next one's;
//! the first bound is empty; no other block is empty.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::table::Slot;

/// Most slots of a block: its moves stay within 2 KiB.
const BLOCK: usize = 512;
/// A block below this joins its neighbour if both then fill at most three quarters.
const SPARSE: usize = BLOCK / 4;

pub(super) struct Order {
    blocks: BTreeMap<Box<[u8]>, Vec<Slot>>,
}

impl Order {
    pub(super) fn new() -> Self {
        Self { blocks: BTreeMap::from([(Box::default(), Vec::new())]) }
    }

    /// Puts a slot whose `name` is not there yet in its place.
    pub(super) fn insert<'a>(&mut self, slot: Slot, name: &[u8], name_of: impl Fn(Slot) -> &'a [u8]) {
        let (_, block) = self.blocks.range_mut::<[u8], _>(through(name)).next_back().expect("the first bound is empty");
        let position = block.partition_point(|&other| name_of(other) < name);
        block.insert(position, slot);
        if block.len() > BLOCK {
            // Names that come in order leave full blocks behind; others leave two halves.
            let cut = if position == BLOCK { BLOCK } else { BLOCK / 2 };
            let mut upper = Vec::with_capacity(BLOCK + 1);
            upper.extend(block.drain(cut..));
            self.blocks.insert(name_of(upper[0]).into(), upper);
        }
    }

    /// Takes away the slot whose name this is; it must be there.
    pub(super) fn remove<'a>(&mut self, name: &[u8], name_of: impl Fn(Slot) -> &'a [u8]) {
        let (bound, block) =
            self.blocks.range_mut::<[u8], _>(through(name)).next_back().expect("the first bound is empty");
        let position = block.partition_point(|&other| name_of(other) < name);
        assert_eq!(name_of(block[position]), name, "the name is in its block");
        block.remove(position);
        if block.len() < SPARSE {
            let bound = bound.clone();
            self.join(&bound);
        }
    }

    /// Moves the block behind the one at `bound` into it, if both have room in one.
    fn join(&mut self, bound: &[u8]) {
        let mut from = self.blocks.range::<[u8], _>(behind(bound));
        let next = from.next().map(|(next, block)| (next.clone(), block.len()));
        let room = BLOCK * 3 / 4;
        match next {
            Some((next, length)) if self.blocks[bound].len() + length <= room => {
                let moved = self.blocks.remove(&next).expect("just seen");
                self.blocks.get_mut(bound).expect("just seen").extend(moved);
            }
            _ if !bound.is_empty() && self.blocks[bound].is_empty() => {
                self.blocks.remove(bound);
            }
            _ => {}
        }
    }

    /// Slots in order, from the first whose name is `from` or above.
    pub(super) fn range<'a, F: Fn(Slot) -> &'a [u8]>(
        &'a self,
        from: &[u8],
        name_of: F,
    ) -> impl Iterator<Item = Slot> + use<'a, F> {
        let (bound, block) = self.blocks.range::<[u8], _>(through(from)).next_back().expect("the first bound is empty");
        let position = block.partition_point(|&slot| name_of(slot) < from);
        let rest = self.blocks.range::<[u8], _>(behind(bound));
        block[position..].iter().chain(rest.flat_map(|(_, block)| block)).copied()
    }

    pub(super) fn validate<'a>(&self, count: usize, name_of: impl Fn(Slot) -> &'a [u8]) {
        assert!(self.blocks.contains_key(&[][..]), "the first bound is empty");
        let mut last: Option<&[u8]> = None;
        let mut seen = 0;
        for (bound, block) in &self.blocks {
            assert!(block.len() <= BLOCK, "a block of {}", block.len());
            assert!(bound.is_empty() || !block.is_empty(), "an empty block");
            assert!(last.is_none_or(|last| last < &**bound), "a bound within the block before");
            for &slot in block {
                let name = name_of(slot);
                assert!(name >= &**bound && last.is_none_or(|last| last < name), "names out of order");
                last = Some(name);
                seen += 1;
            }
        }
        assert_eq!(seen, count, "slots in order");
    }
}

fn through(name: &[u8]) -> (Bound<&[u8]>, Bound<&[u8]>) {
    (Bound::Unbounded, Bound::Included(name))
}

fn behind(bound: &[u8]) -> (Bound<&[u8]>, Bound<&[u8]>) {
    (Bound::Excluded(bound), Bound::Unbounded)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Names of slots for tests: their number scattered, so that neighbours are not neighbours.
    fn names() -> Vec<[u8; 4]> {
        (0u32..6000).map(|number| number.wrapping_mul(0x9e37_79b1).to_be_bytes()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn order_equals_a_sorted_set(steps in proptest::collection::vec((0u32..6000, 0u8..3), 1..6000), from: [u8; 4]) {
            let names = names();
            let name_of = |slot: Slot| &names[slot.0 as usize][..];
            let mut order = Order::new();
            let mut model = BTreeSet::new();
            for (number, kind) in steps {
                let entry = (names[number as usize], Slot(number));
                if kind > 0 && model.insert(entry) {
                    order.insert(Slot(number), &entry.0, name_of);
                } else if kind == 0 && model.remove(&entry) {
                    order.remove(&entry.0, name_of);
                }
            }
            order.validate(model.len(), name_of);
            let expected: Vec<_> = model.range((from, Slot(0))..).map(|&(_, slot)| slot).collect();
            prop_assert_eq!(order.range(&from, name_of).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn blocks_join_when_names_leave() {
        let names = names();
        let name_of = |slot: Slot| &names[slot.0 as usize][..];
        let mut order = Order::new();
        (0..6000).for_each(|number| order.insert(Slot(number), &names[number as usize], name_of));
        for number in 0..5900 {
            order.remove(&names[number as usize], name_of);
        }
        order.validate(100, name_of);
        assert!(order.blocks.len() <= 12, "{} blocks for 100 slots", order.blocks.len());
        (5900..6000).for_each(|number| order.remove(&names[number as usize], name_of));
        order.validate(0, name_of);
    }

    #[test]
    fn names_in_order_fill_their_blocks() {
        let names: Vec<[u8; 4]> = (0u32..6000).map(u32::to_be_bytes).collect();
        let name_of = |slot: Slot| &names[slot.0 as usize][..];
        let mut order = Order::new();
        (0..6000).for_each(|number| order.insert(Slot(number), &names[number as usize], name_of));
        order.validate(6000, name_of);
        assert_eq!(order.blocks.len(), 6000usize.div_ceil(BLOCK));
    }
}
