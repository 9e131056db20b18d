//! Slots in the order of their objects' names, in blocks of up to 511: some seventeen bytes an object.
//!
//! Holds no names; the caller gives the name of a slot. Asking for one costs a cache miss or two, so a block keeps
//! what its names have in common and eight bytes of each behind that, and a search rarely asks for any name: keys end
//! in hashes, and 64 bits tell 512 of them apart. (With names alone a put of a million took twice as long.)
//! Invariants: names rise within a block; a block's names are at or above its bound and below the next one's;
//! the first bound is empty; no other block is empty.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::table::Slot;

/// Most slots of a block: its moves stay within 4 KiB, and with the one that is too many it fills 4 and 2 KiB exactly.
const BLOCK: usize = 511;
/// A block below this joins its neighbour if both then fill at most three quarters.
const SPARSE: usize = BLOCK / 4;
/// How many more bytes its names must have in common before a block that was split looks behind them.
const LONGER: usize = 4;

pub(super) struct Order {
    blocks: BTreeMap<Box<[u8]>, Block>,
}

#[derive(Default)]
struct Block {
    /// What all names start with; they may have more in common.
    prefix: Box<[u8]>,
    /// Of each name the eight bytes behind the prefix, zeros behind its end, big-endian.
    heads: Vec<u64>,
    slots: Vec<Slot>,
}

impl Block {
    /// Where `name` is, or would be.
    fn position<'a>(&self, name: &[u8], name_of: impl Fn(Slot) -> &'a [u8]) -> usize {
        if !name.starts_with(&self.prefix) {
            return if name < &*self.prefix { 0 } else { self.slots.len() };
        }
        let head = head(name, self.prefix.len());
        let from = self.heads.partition_point(|&other| other < head);
        let equal = self.heads[from..].iter().take_while(|&&other| other == head).count();
        from + self.slots[from..from + equal].partition_point(|&slot| name_of(slot) < name)
    }

    /// Puts a slot in its place, and says which that is.
    fn insert<'a>(&mut self, slot: Slot, name: &[u8], name_of: impl Fn(Slot) -> &'a [u8]) -> usize {
        let common = common_length(&self.prefix, name);
        if common < self.prefix.len() {
            self.look_behind(&name[..common], &name_of);
        }
        let position = self.position(name, name_of);
        self.heads.insert(position, head(name, self.prefix.len()));
        self.slots.insert(position, slot);
        position
    }

    fn remove(&mut self, position: usize) {
        self.heads.remove(position);
        self.slots.remove(position);
    }

    /// Takes the slots from `cut` on into a block of their own.
    fn split_off<'a>(&mut self, cut: usize, name_of: impl Fn(Slot) -> &'a [u8]) -> Self {
        let mut upper = Self {
            prefix: self.prefix.clone(),
            heads: Vec::with_capacity(BLOCK + 1),
            slots: Vec::with_capacity(BLOCK + 1),
        };
        upper.heads.extend(self.heads.drain(cut..));
        upper.slots.extend(self.slots.drain(cut..));
        self.lengthen(&name_of);
        upper.lengthen(&name_of);
        upper
    }

    /// Looks behind more bytes, if there is enough to gain.
    fn lengthen<'a>(&mut self, name_of: impl Fn(Slot) -> &'a [u8]) {
        let [first, .., last] = self.slots[..] else { return };
        let (first, last) = (name_of(first), name_of(last));
        let common = common_length(first, last);
        if common >= self.prefix.len() + LONGER {
            self.look_behind(&first[..common], name_of);
        }
    }

    /// Moves all slots of the block behind this one into it.
    fn append<'a>(&mut self, next: Self, name_of: impl Fn(Slot) -> &'a [u8]) {
        self.slots.extend(next.slots);
        let common = common_length(&self.prefix, &next.prefix);
        let prefix: Box<[u8]> = self.prefix[..common].into();
        self.look_behind(&prefix, name_of);
    }

    fn look_behind<'a>(&mut self, prefix: &[u8], name_of: impl Fn(Slot) -> &'a [u8]) {
        self.prefix = prefix.into();
        self.heads.clear();
        self.heads.extend(self.slots.iter().map(|&slot| head(name_of(slot), prefix.len())));
    }
}

/// Eight bytes of `name` from `start` on. Names that share those before it are in the order of these, or equal.
fn head(name: &[u8], start: usize) -> u64 {
    let rest = &name[start..];
    let mut bytes = [0; 8];
    let length = rest.len().min(8);
    bytes[..length].copy_from_slice(&rest[..length]);
    u64::from_be_bytes(bytes)
}

fn common_length(one: &[u8], other: &[u8]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

/// Blocks of an order, made of names that come in order.
#[derive(Default)]
pub(super) struct OrderPart {
    blocks: Vec<(Box<[u8]>, Block)>,
    /// Of the block to come.
    slots: Vec<Slot>,
}

impl OrderPart {
    /// Puts a slot behind all others of the part.
    pub(super) fn push<'a>(&mut self, slot: Slot, name_of: impl Fn(Slot) -> &'a [u8]) {
        self.slots.push(slot);
        if self.slots.len() == BLOCK {
            self.end_block(name_of);
        }
    }

    /// What is pushed next need not be behind what was pushed so far.
    pub(super) fn end_block<'a>(&mut self, name_of: impl Fn(Slot) -> &'a [u8]) {
        let (Some(&first), Some(&last)) = (self.slots.first(), self.slots.last()) else { return };
        let bound = name_of(first);
        let slots = std::mem::replace(&mut self.slots, Vec::with_capacity(BLOCK + 1));
        let mut block = Block { prefix: Box::default(), heads: Vec::with_capacity(BLOCK + 1), slots };
        block.look_behind(&bound[..common_length(bound, name_of(last))], name_of);
        self.blocks.push((bound.into(), block));
    }
}

impl Order {
    pub(super) fn new() -> Self {
        Self::of([])
    }

    /// All blocks of the parts, of which no two cover a name.
    pub(super) fn of(parts: impl IntoIterator<Item = OrderPart>) -> Self {
        let mut blocks: BTreeMap<_, _> = parts.into_iter().flat_map(|part| part.blocks).collect();
        let first = blocks.pop_first().map(|(_, block)| block).unwrap_or_default();
        blocks.insert(Box::default(), first);
        Self { blocks }
    }

    /// Puts a slot whose `name` is not there yet in its place.
    pub(super) fn insert<'a>(&mut self, slot: Slot, name: &[u8], name_of: impl Fn(Slot) -> &'a [u8]) {
        let (_, block) = self.blocks.range_mut::<[u8], _>(through(name)).next_back().expect("the first bound is empty");
        let position = block.insert(slot, name, &name_of);
        if block.slots.len() > BLOCK {
            // Names that come in order leave full blocks behind; others leave two halves.
            let cut = if position == BLOCK { BLOCK } else { BLOCK / 2 };
            let upper = block.split_off(cut, &name_of);
            self.blocks.insert(name_of(upper.slots[0]).into(), upper);
        }
    }

    /// Takes away the slot whose name this is; it must be there.
    pub(super) fn remove<'a>(&mut self, name: &[u8], name_of: impl Fn(Slot) -> &'a [u8]) {
        let (bound, block) =
            self.blocks.range_mut::<[u8], _>(through(name)).next_back().expect("the first bound is empty");
        let position = block.position(name, &name_of);
        assert_eq!(name_of(block.slots[position]), name, "the name is in its block");
        block.remove(position);
        if block.slots.len() < SPARSE {
            let bound = bound.clone();
            self.join(&bound, name_of);
        }
    }

    /// Moves the block behind the one at `bound` into it, if both have room in one.
    fn join<'a>(&mut self, bound: &[u8], name_of: impl Fn(Slot) -> &'a [u8]) {
        let length = self.blocks[bound].slots.len();
        let next = self.blocks.range::<[u8], _>(behind(bound)).next();
        match next.map(|(next, block)| (next.clone(), block.slots.len())) {
            Some((next, more)) if length + more <= BLOCK * 3 / 4 => {
                let moved = self.blocks.remove(&next).expect("just seen");
                self.blocks.get_mut(bound).expect("just seen").append(moved, name_of);
            }
            _ if !bound.is_empty() && length == 0 => {
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
        let position = block.position(from, name_of);
        let rest = self.blocks.range::<[u8], _>(behind(bound));
        block.slots[position..].iter().chain(rest.flat_map(|(_, block)| &block.slots)).copied()
    }

    pub(super) fn validate<'a>(&self, count: usize, name_of: impl Fn(Slot) -> &'a [u8]) {
        assert!(self.blocks.contains_key(&[][..]), "the first bound is empty");
        let mut last: Option<&[u8]> = None;
        let mut seen = 0;
        for (bound, block) in &self.blocks {
            assert!(block.slots.len() <= BLOCK, "a block of {}", block.slots.len());
            assert!(bound.is_empty() || !block.slots.is_empty(), "an empty block");
            assert!(last.is_none_or(|last| last < &**bound), "a bound within the block before");
            assert_eq!(block.slots.len(), block.heads.len());
            for (&slot, &known) in block.slots.iter().zip(&block.heads) {
                let name = name_of(slot);
                assert!(name >= &**bound && last.is_none_or(|last| last < name), "names out of order");
                assert!(name.starts_with(&block.prefix), "a name without its block's prefix");
                assert_eq!(head(name, block.prefix.len()), known);
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

    /// Names of slots for tests: their number scattered, so that neighbours are not neighbours, behind prefixes of
    /// several lengths, some of them longer than a head, some with zeros at their end.
    fn names() -> Vec<Vec<u8>> {
        let name = |number: u32| {
            let scattered = number.wrapping_mul(0x9e37_79b1).to_be_bytes();
            match number % 4 {
                0 => scattered.to_vec(),
                1 => [&b"model/"[..], &scattered].concat(),
                2 => [&b"model/a long common part/"[..], &scattered[..]].concat(),
                _ => [&b"model/"[..], &vec![0; number as usize % 40]].concat(),
            }
        };
        let distinct: BTreeSet<Vec<u8>> = (0..6000).map(name).collect();
        let mut names: Vec<_> = distinct.into_iter().collect();
        names.sort_by_key(|name| crc32fast::hash(name));
        names
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn order_equals_a_sorted_set(
            steps in proptest::collection::vec((any::<prop::sample::Index>(), 0u8..4), 1..8000),
            from in proptest::collection::vec(any::<u8>(), 0..8),
        ) {
            let names = names();
            let name_of = |slot: Slot| &names[slot.0 as usize][..];
            let mut order = Order::new();
            let mut model = BTreeSet::new();
            for (number, kind) in steps {
                let slot = Slot(number.index(names.len()) as u32);
                let name = name_of(slot);
                if kind > 0 && model.insert((name, slot)) {
                    order.insert(slot, name, name_of);
                } else if kind == 0 && model.remove(&(name, slot)) {
                    order.remove(name, name_of);
                }
            }
            order.validate(model.len(), name_of);
            let expected: Vec<_> = model.range((&from[..], Slot(0))..).map(|&(_, slot)| slot).collect();
            prop_assert_eq!(order.range(&from, name_of).collect::<Vec<_>>(), expected);
            for (name, slot) in model {
                prop_assert_eq!(order.range(name, name_of).next(), Some(slot));
            }
        }
    }

    #[test]
    fn blocks_join_when_names_leave() {
        let names = names();
        let count = names.len() as u32;
        let name_of = |slot: Slot| &names[slot.0 as usize][..];
        let mut order = Order::new();
        (0..count).for_each(|number| order.insert(Slot(number), name_of(Slot(number)), name_of));
        order.validate(names.len(), name_of);
        (100..count).for_each(|number| order.remove(name_of(Slot(number)), name_of));
        order.validate(100, name_of);
        assert!(order.blocks.len() <= 12, "{} blocks for 100 slots", order.blocks.len());
        (0..100).for_each(|number| order.remove(name_of(Slot(number)), name_of));
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
