//! Nodes that an operator removed for good. Their identities are refused from then on: a data folder that comes back, or an
//! older copy of it, would use ids again that stand for other copies by now.

use std::collections::BTreeMap;

use crate::log::LogIndex;
use crate::node::NodeId;

/// Most identities that are remembered; beyond that those that went first are let go.
pub const MAX_EXPELLED: usize = 4096;

/// Who was removed, and at which entry.
#[derive(Default)]
pub(super) struct Expelled(BTreeMap<NodeId, LogIndex>);

impl Expelled {
    pub(super) fn get(&self, node: NodeId) -> Option<LogIndex> {
        self.0.get(&node).copied()
    }

    pub(super) fn contains(&self, node: NodeId) -> bool {
        self.0.contains_key(&node)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = NodeId> {
        self.0.keys().copied()
    }

    /// Remembers it; answers whom it lets go for that.
    pub(super) fn insert(&mut self, node: NodeId, at: LogIndex) -> Option<NodeId> {
        self.0.insert(node, at);
        if self.0.len() <= MAX_EXPELLED {
            return None;
        }
        let (&first, _) = self.0.iter().min_by_key(|&(&node, &at)| (at, node))?;
        self.0.remove(&first);
        Some(first)
    }

    /// Puts back a row of the image; false if there are too many.
    pub(super) fn restore(&mut self, node: NodeId, at: LogIndex) -> bool {
        self.0.insert(node, at);
        self.0.len() <= MAX_EXPELLED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_bound_those_that_went_first_are_let_go() {
        let mut expelled = Expelled::default();
        let count = u32::try_from(MAX_EXPELLED).expect("small");
        let let_go: Vec<_> = (0..count + 2)
            .filter_map(|node| expelled.insert(NodeId(count - node.min(count)), LogIndex(node.into())))
            .collect();
        assert_eq!(let_go, [NodeId(count)]);
        assert!(expelled.contains(NodeId(1)) && !expelled.contains(NodeId(count)));
    }
}
