//! The blocks of one slice: 16 bytes for the common case of one, because there is a slice for every small object.

use arrayvec::ArrayVec;
use tidepool_metadata::directory::MAX_EXTENTS;

use super::allocator::Block;

/// At most 8 blocks, in the order in which bytes fill them.
#[derive(Clone, Debug, Default)]
pub enum Blocks {
    /// Those of a slice of no bytes.
    #[default]
    None,
    /// One.
    One(Block),
    /// More.
    Several(Box<ArrayVec<Block, MAX_EXTENTS>>),
}

impl Blocks {
    /// Adds a block behind the others.
    ///
    /// # Panics
    /// If there are 8.
    pub fn push(&mut self, block: Block) {
        match self {
            Self::None => *self = Self::One(block),
            Self::One(first) => *self = Self::Several(Box::new([*first, block].into_iter().collect())),
            Self::Several(blocks) => blocks.push(block),
        }
    }
}

impl std::ops::Deref for Blocks {
    type Target = [Block];

    fn deref(&self) -> &[Block] {
        match self {
            Self::None => &[],
            Self::One(block) => std::slice::from_ref(block),
            Self::Several(blocks) => blocks,
        }
    }
}

impl FromIterator<Block> for Blocks {
    fn from_iter<I: IntoIterator<Item = Block>>(blocks: I) -> Self {
        let mut all = Self::None;
        blocks.into_iter().for_each(|block| all.push(block));
        all
    }
}

const _: () = assert!(size_of::<Blocks>() == 16);
