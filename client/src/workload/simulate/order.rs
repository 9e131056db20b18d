//! LRU and FIFO over dense ids.

const NONE: u32 = u32::MAX;

/// A list of dense ids, newest first, linked through an array: every step is O(1) and allocates nothing.
#[derive(Debug)]
pub(super) struct Order {
    /// (newer, older) neighbours by id; an id that is not in the list names itself as both.
    links: Vec<(u32, u32)>,
    newest: u32,
    oldest: u32,
    length: usize,
}

impl Order {
    pub(super) fn new(ids: usize) -> Self {
        let absent = |id| u32::try_from(id).map_or((NONE, NONE), |id| (id, id));
        Self { links: (0..ids).map(absent).collect(), newest: NONE, oldest: NONE, length: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }

    pub(super) fn contains(&self, id: u32) -> bool {
        self.links[id as usize] != (id, id)
    }

    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Makes `id` the newest; adds it if it is not there.
    pub(super) fn push_newest(&mut self, id: u32) {
        self.remove(id);
        self.links[id as usize] = (NONE, self.newest);
        match self.newest {
            NONE => self.oldest = id,
            newest => self.links[newest as usize].0 = id,
        }
        self.newest = id;
        self.length += 1;
    }

    pub(super) fn remove(&mut self, id: u32) -> bool {
        if !self.contains(id) {
            return false;
        }
        let (newer, older) = std::mem::replace(&mut self.links[id as usize], (id, id));
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize].1 = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize].0 = newer,
        }
        self.length -= 1;
        true
    }
}

/// Hits of a cache of `capacity` blocks that evicts the least recently read one.
#[must_use]
pub fn lru(accesses: &[u32], capacity: usize) -> usize {
    hits(accesses, capacity, true)
}

/// Hits of a cache of `capacity` blocks that evicts the one that was put first.
#[must_use]
pub fn fifo(accesses: &[u32], capacity: usize) -> usize {
    hits(accesses, capacity, false)
}

fn hits(accesses: &[u32], capacity: usize, renew_on_read: bool) -> usize {
    let mut order = Order::new(super::distinct(accesses));
    let mut hits = 0;
    for &id in accesses {
        let hit = order.contains(id);
        hits += usize::from(hit);
        if !hit || renew_on_read {
            order.push_newest(id);
        }
        if order.len() > capacity
            && let Some(victim) = order.oldest()
        {
            order.remove(victim);
        }
    }
    hits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_that_of_a_plain_list() {
        let mut order = Order::new(8);
        let mut plain: Vec<u32> = Vec::new();
        let mut state = 1_u32;
        for _ in 0..10_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let id = (state >> 16) % 8;
            let place = plain.iter().position(|&other| other == id);
            if state >> 31 == 0 {
                place.map(|place| plain.remove(place));
                plain.push(id);
                order.push_newest(id);
            } else {
                assert_eq!(order.remove(id), place.map(|place| plain.remove(place)).is_some());
            }
            assert_eq!((order.len(), order.oldest()), (plain.len(), plain.first().copied()));
        }
    }
}
