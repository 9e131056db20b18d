//! Least recently used.

use tidepool_metadata::KeyHash;

use super::Eviction;
use super::list::{Links, List};

/// Evicts the id whose last use is the longest ago.
#[derive(Debug, Default)]
pub struct Lru {
    links: Links,
    order: List,
}

impl Eviction for Lru {
    fn insert(&mut self, id: u32, _key: KeyHash, _bytes: u64) {
        self.remove(id);
        self.order.push(&mut self.links, id);
    }

    fn touch(&mut self, id: u32) {
        if self.links.has(id) {
            self.order.remove(&mut self.links, id);
            self.order.push(&mut self.links, id);
        }
    }

    fn remove(&mut self, id: u32) {
        if self.links.has(id) {
            self.order.remove(&mut self.links, id);
        }
    }

    fn evict(&mut self) -> Option<u32> {
        let id = self.order.oldest()?;
        self.remove(id);
        Some(id)
    }

    fn len(&self) -> usize {
        self.order.len()
    }

    fn hottest(&self, most: usize) -> Vec<u32> {
        self.order.iter(&self.links).take(most).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against the obvious implementation: a queue, newest at the back.
        #[test]
        fn behaves_like_a_queue(steps in prop::collection::vec((0_u8..4, 0_u32..20), 0..300)) {
            let mut lru = Lru::default();
            let mut model: VecDeque<u32> = VecDeque::new();
            for (step, id) in steps {
                let known = model.iter().position(|&other| other == id);
                match step {
                    0 if known.is_none() => {
                        lru.insert(id, KeyHash(u64::from(id)), 1);
                        model.push_back(id);
                    }
                    1 => {
                        lru.touch(id);
                        if let Some(position) = known {
                            model.remove(position);
                            model.push_back(id);
                        }
                    }
                    2 => {
                        lru.remove(id);
                        known.map(|position| model.remove(position));
                    }
                    3 => prop_assert_eq!(lru.evict(), model.pop_front()),
                    _ => {}
                }
                prop_assert_eq!(lru.len(), model.len());
                let hottest: Vec<u32> = model.iter().rev().copied().collect();
                prop_assert_eq!(lru.hottest(usize::MAX), hottest);
            }
        }
    }
}
