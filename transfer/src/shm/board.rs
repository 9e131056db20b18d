//! Which regions are registered, for peers on this host to see without a call.
//!
//! A page of words in a memfd that peers map read-only: word *i* is the generation of the region in slot *i* of the
//! table while it is registered for peers, else 0. Generations of a slot grow and are never reused, so a reader that
//! finds the expected word before and after its copy knows that the region was registered all the while.

use std::io;

use crate::memory::{Memory, PeerMapping};
use crate::slice::RegionId;
use crate::slots;

/// See the module. The owner stores, peers load.
#[derive(Debug)]
pub(crate) struct Board(Memory);

impl Board {
    /// A board for `regions` regions, none registered.
    pub(crate) fn new(regions: usize) -> io::Result<Self> {
        Ok(Self(Memory::shared((regions * 8).next_multiple_of(4096), PeerMapping::ReadOnly)?))
    }

    /// A peer's board.
    pub(crate) fn of_peer(memory: Memory) -> Self {
        Self(memory)
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.0
    }

    /// The region is registered from here on.
    pub(crate) fn publish(&self, region: RegionId) {
        self.0.store_word(slots::index(region.0), u64::from(slots::generation(region.0)));
    }

    /// It is not any more.
    pub(crate) fn retire(&self, region: RegionId) {
        self.0.store_word(slots::index(region.0), 0);
    }

    /// Whether it is registered right now.
    pub(crate) fn has(&self, region: RegionId) -> bool {
        self.0.load_word(slots::index(region.0)) == u64::from(slots::generation(region.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_see_what_is_registered() {
        let board = Board::new(100).expect("board");
        let file = board.memory().file().expect("memfd").try_clone_to_owned().expect("dup");
        let peer = Board::of_peer(Memory::map_foreign(file, 4096, false).expect("mapped"));
        let region = RegionId(3 << 32 | 7);
        assert!(!peer.has(region));
        board.publish(region);
        assert!(peer.has(region));
        assert!(!peer.has(RegionId(2 << 32 | 7)), "an older generation");
        board.retire(region);
        assert!(!peer.has(region));
        assert!(!peer.has(RegionId(1 << 32 | 100_000)), "outside the board");
    }
}
