//! A node's two tiers in blocks: DRAM evicted by LRU, over a log of NVMe regions that are reclaimed in the order in
//! which they were written.
//!
//! The rules are those of the node: what leaves DRAM is written to the log unless the log has it; a block that is read
//! from the log for the `promote_after_reads`-th time comes back to DRAM; a reclaimed region's blocks that were read
//! since they were written are written again, with a new count; those that DRAM has lose only their copy in the log;
//! the others are forgotten. Bytes in flight, watermarks and regions held free are not simulated: give the capacity
//! that is left without them.

use std::collections::VecDeque;

use serde::Serialize;

use super::order::Order;

/// Which blocks of a reclaimed region are written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reinsertion {
    /// None: the log is a FIFO.
    Never,
    /// Those read since they were written.
    ReadSinceWritten,
}

/// Sizes and rules of the simulated node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TwoTier {
    /// Blocks that DRAM holds.
    pub dram_blocks: usize,
    /// Blocks that a region holds.
    pub region_blocks: usize,
    /// Regions with blocks, the one being filled included; 0: no NVMe tier.
    pub regions: usize,
    /// Reads since it left DRAM after which a block comes back; 0: never.
    pub promote_after_reads: u8,
    /// What is written again.
    pub reinsertion: Reinsertion,
}

/// Hits by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TwoTierHits {
    /// Blocks read.
    pub accesses: usize,
    /// Found in DRAM.
    pub dram: usize,
    /// Found in NVMe.
    pub nvme: usize,
    /// Blocks written to the log for the first time since they left DRAM.
    pub demoted: usize,
    /// Blocks written to the log again.
    pub reinserted: usize,
}

impl TwoTierHits {
    /// Hits of both tiers as a share of accesses.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        super::hit_ratio(self.dram + self.nvme, self.accesses)
    }
}

impl TwoTier {
    /// Runs all accesses through an empty node.
    #[must_use]
    pub fn run(self, accesses: &[u32]) -> TwoTierHits {
        let distinct = super::distinct(accesses);
        let mut node = Node {
            rules: self,
            dram: Order::new(distinct),
            blocks: vec![Block { region: None, reads: 0 }; distinct],
            sealed: VecDeque::new(),
            open: (0, Vec::new()),
            hits: TwoTierHits { accesses: accesses.len(), ..TwoTierHits::default() },
        };
        accesses.iter().for_each(|&id| node.access(id));
        node.hits
    }
}

#[derive(Clone, Copy)]
struct Block {
    /// The region that has the block's only valid copy in the log.
    region: Option<u64>,
    /// Reads since it was written there.
    reads: u8,
}

struct Node {
    rules: TwoTier,
    dram: Order,
    blocks: Vec<Block>,
    /// Full regions, oldest first: number, and what was written to it.
    sealed: VecDeque<(u64, Vec<u32>)>,
    open: (u64, Vec<u32>),
    hits: TwoTierHits,
}

impl Node {
    fn access(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        block.reads = block.reads.saturating_add(1);
        if self.dram.contains(id) {
            self.hits.dram += 1;
            self.insert_into_dram(id);
        } else if block.region.is_some() {
            self.hits.nvme += 1;
            let threshold = self.rules.promote_after_reads;
            if threshold > 0 && block.reads >= threshold {
                self.insert_into_dram(id);
            }
        } else {
            block.reads = 0;
            self.insert_into_dram(id);
        }
    }

    fn insert_into_dram(&mut self, id: u32) {
        self.dram.push_newest(id);
        while self.dram.len() > self.rules.dram_blocks
            && let Some(victim) = self.dram.oldest()
        {
            self.dram.remove(victim);
            self.blocks[victim as usize].reads = 0;
            if self.blocks[victim as usize].region.is_none() && self.rules.regions > 0 {
                self.hits.demoted += 1;
                self.write(victim);
            }
        }
    }

    fn write(&mut self, id: u32) {
        let mut waiting = VecDeque::from([id]);
        // Ends: what a reclaimed region gives back has a count of 0 and is dropped when it comes round again.
        while let Some(id) = waiting.pop_front() {
            if self.open.1.len() >= self.rules.region_blocks {
                let next = (self.open.0 + 1, Vec::with_capacity(self.rules.region_blocks));
                self.sealed.push_back(std::mem::replace(&mut self.open, next));
                if self.sealed.len() >= self.rules.regions {
                    waiting.extend(self.reclaim());
                }
            }
            self.open.1.push(id);
            self.blocks[id as usize].region = Some(self.open.0);
        }
    }

    /// Frees the oldest region and answers what of it is to be written again.
    fn reclaim(&mut self) -> Vec<u32> {
        let Some((region, written)) = self.sealed.pop_front() else { return Vec::new() };
        let mut again = Vec::new();
        for id in written {
            let block = &mut self.blocks[id as usize];
            if block.region != Some(region) {
                continue;
            }
            block.region = None;
            let read = block.reads > 0 && self.rules.reinsertion == Reinsertion::ReadSinceWritten;
            if read && !self.dram.contains(id) {
                block.reads = 0;
                self.hits.reinserted += 1;
                again.push(id);
            }
        }
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::simulate::lru;
    use crate::workload::trace::recorded;

    const NODE: TwoTier = TwoTier {
        dram_blocks: 1000,
        region_blocks: 250,
        regions: 32,
        promote_after_reads: 2,
        reinsertion: Reinsertion::ReadSinceWritten,
    };

    #[test]
    fn without_nvme_it_is_plain_lru() {
        let accesses = recorded("synthetic_trace.jsonl").accesses();
        let hits = TwoTier { regions: 0, ..NODE }.run(&accesses);
        assert_eq!((hits.dram, hits.nvme, hits.demoted), (lru(&accesses, 1000), 0, 0));
    }

    #[test]
    fn nothing_is_lost_while_the_log_has_room() {
        let accesses = recorded("synthetic_trace.jsonl").accesses();
        let hits = TwoTier { regions: 1000, ..NODE }.run(&accesses);
        assert!((hits.ratio() - 0.6396).abs() < 1e-4);
        assert_eq!(hits.reinserted, 0);
    }

    #[test]
    fn reinsertion_keeps_what_is_read() {
        let accesses = recorded("synthetic_trace.jsonl").accesses();
        let with = NODE.run(&accesses);
        let without = TwoTier { reinsertion: Reinsertion::Never, ..NODE }.run(&accesses);
        assert!(with.reinserted > 0 && without.reinserted == 0);
        assert!(with.ratio() > without.ratio(), "{with:?} {without:?}");
    }

    #[test]
    fn a_block_read_twice_from_the_log_comes_back_to_dram() {
        let node = TwoTier { dram_blocks: 1, region_blocks: 4, regions: 2, ..NODE };
        // 0 leaves for 1; two reads come from the log, the second one brings it back, the third finds it in DRAM.
        let hits = node.run(&[0, 1, 0, 0, 0]);
        assert_eq!((hits.nvme, hits.dram), (2, 1));
    }
}
