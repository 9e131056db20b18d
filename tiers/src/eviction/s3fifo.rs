//! S3-FIFO (Yang et al., *FIFO queues are all you need for cache eviction*, SOSP 2023).
//!
//! Three queues: new objects enter a small one; those used again while there move to the main one, the others leave
//! and are remembered by their key's hash in a ghost queue; who comes back while remembered enters the main one
//! directly. In the main queue a use buys one more round, at most three.

use std::collections::VecDeque;

use hashbrown::HashSet;
use tidepool_metadata::KeyHash;

use super::Eviction;
use super::list::{Links, List};

/// Share of the bytes that the small queue holds before it gives way: one in this many (paper: 10 %).
const SMALL_SHARE: u64 = 10;
/// Most uses that are counted (paper: 2 bits).
const MOST_USES: u8 = 3;
/// Ghosts remembered at least, so that small caches remember anything.
const LEAST_GHOSTS: usize = 1024;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Queue {
    #[default]
    None,
    Small,
    Main,
}

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    key: u64,
    bytes: u64,
    uses: u8,
    queue: Queue,
}

/// Evicts what was used once before what was used again.
#[derive(Debug, Default)]
pub struct S3Fifo {
    links: Links,
    nodes: Vec<Node>,
    small: List,
    main: List,
    small_bytes: u64,
    main_bytes: u64,
    ghosts: VecDeque<u64>,
    ghost_keys: HashSet<u64>,
}

impl S3Fifo {
    fn enter(&mut self, id: u32, queue: Queue) {
        let node = &mut self.nodes[id as usize];
        node.queue = queue;
        node.uses = 0;
        let bytes = node.bytes;
        match queue {
            Queue::Main => {
                self.main.push(&mut self.links, id);
                self.main_bytes += bytes;
            }
            _ => {
                self.small.push(&mut self.links, id);
                self.small_bytes += bytes;
            }
        }
    }

    fn leave(&mut self, id: u32) -> Node {
        let node = std::mem::take(&mut self.nodes[id as usize]);
        match node.queue {
            Queue::Small => {
                self.small.remove(&mut self.links, id);
                self.small_bytes -= node.bytes;
            }
            Queue::Main => {
                self.main.remove(&mut self.links, id);
                self.main_bytes -= node.bytes;
            }
            Queue::None => {}
        }
        node
    }

    /// Moves an id to the (new end of the) main queue with one use fewer.
    fn again(&mut self, id: u32) {
        let node = self.leave(id);
        self.nodes[id as usize] = node;
        self.enter(id, Queue::Main);
        self.nodes[id as usize].uses = if node.queue == Queue::Main { node.uses - 1 } else { 0 };
    }

    fn remember(&mut self, key: u64) {
        if self.ghost_keys.insert(key) {
            self.ghosts.push_back(key);
        }
        let most = self.main.len().max(LEAST_GHOSTS);
        while self.ghosts.len() > most {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.ghost_keys.remove(&oldest);
            }
        }
    }
}

impl Eviction for S3Fifo {
    fn insert(&mut self, id: u32, key: KeyHash, bytes: u64) {
        self.remove(id);
        if self.nodes.len() <= id as usize {
            self.nodes.resize((id as usize + 1).next_multiple_of(1024), Node::default());
        }
        self.nodes[id as usize] = Node { key: key.0, bytes, ..Node::default() };
        // Its place in the ghost queue goes stale: when it comes up, it removes at worst a later memory of the key.
        let queue = if self.ghost_keys.remove(&key.0) { Queue::Main } else { Queue::Small };
        self.enter(id, queue);
    }

    fn touch(&mut self, id: u32) {
        if let Some(node) = self.nodes.get_mut(id as usize).filter(|node| node.queue != Queue::None) {
            node.uses = (node.uses + 1).min(MOST_USES);
        }
    }

    fn remove(&mut self, id: u32) {
        if (id as usize) < self.nodes.len() {
            self.leave(id);
        }
    }

    fn evict(&mut self) -> Option<u32> {
        loop {
            let small_is_full = self.small_bytes * SMALL_SHARE >= self.small_bytes + self.main_bytes;
            let from_small = self.small.oldest().filter(|_| small_is_full || self.main.len() == 0);
            if let Some(id) = from_small {
                if self.nodes[id as usize].uses > 0 {
                    self.again(id);
                    continue;
                }
                let node = self.leave(id);
                self.remember(node.key);
                return Some(id);
            }
            let id = self.main.oldest()?;
            if self.nodes[id as usize].uses > 0 {
                self.again(id);
                continue;
            }
            self.leave(id);
            return Some(id);
        }
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn hottest(&self, most: usize) -> Vec<u32> {
        self.main.iter(&self.links).chain(self.small.iter(&self.links)).take(most).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet as Set;

    use proptest::prelude::*;

    use super::*;

    fn key(id: u32) -> KeyHash {
        KeyHash(u64::from(id))
    }

    #[test]
    fn a_scan_does_not_flush_what_is_used() {
        let mut policy = S3Fifo::default();
        (0..100).for_each(|id| policy.insert(id, key(id), 1));
        (0..50).for_each(|id| policy.touch(id));
        for id in 100..300 {
            policy.insert(id, key(id), 1);
            let victim = policy.evict().expect("not empty");
            assert!(victim >= 50, "{victim} was used and left before the scan");
        }
    }

    #[test]
    fn who_comes_back_soon_enters_the_main_queue() {
        let mut policy = S3Fifo::default();
        policy.insert(1, key(1), 1);
        assert_eq!(policy.evict(), Some(1));
        policy.insert(7, key(1), 1);
        policy.insert(8, key(8), 1);
        assert_eq!(policy.hottest(1), [7]);
    }

    proptest! {
        #[test]
        fn every_id_leaves_exactly_once(steps in prop::collection::vec((0_u8..4, 0_u32..30), 0..400)) {
            let mut policy = S3Fifo::default();
            let mut present: Set<u32> = Set::new();
            for (step, id) in steps {
                match step {
                    0 if !present.contains(&id) => {
                        policy.insert(id, key(id), u64::from(id % 5));
                        present.insert(id);
                    }
                    1 => policy.touch(id),
                    2 => {
                        policy.remove(id);
                        present.remove(&id);
                    }
                    3 => {
                        let victim = policy.evict();
                        prop_assert_eq!(victim.is_none(), present.is_empty());
                        victim.iter().for_each(|victim| assert!(present.remove(victim)));
                    }
                    _ => {}
                }
                prop_assert_eq!(policy.len(), present.len());
                prop_assert_eq!(policy.hottest(usize::MAX).into_iter().collect::<Set<_>>(), present.clone());
            }
        }
    }
}
