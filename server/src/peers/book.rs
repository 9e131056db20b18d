//! Which node has which address: from what each node says of itself, the later life wins. Kept in `peers.json` in the data
//! folder, so that a cluster that starts as a whole finds itself; nodes that moved are learned when they call.

use std::collections::BTreeMap;
use std::path::PathBuf;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tidepool_metadata::{Incarnation, NodeId};

use super::wire;

/// Most nodes that are kept: as many as a catalog knows.
const NODES: usize = 1024;
/// Longest address that is kept, in bytes.
const ADDRESS_BYTES: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    incarnation: u32,
    address: String,
}

/// The addresses of nodes.
#[derive(Debug)]
pub(crate) struct AddressBook {
    path: PathBuf,
    nodes: Mutex<BTreeMap<u32, Known>>,
}

impl AddressBook {
    /// What the file at `path` has; a file that can't be read is as none, since it only saves time.
    pub(crate) fn open(path: PathBuf) -> Self {
        let nodes = match std::fs::read(&path).map(|bytes| serde_json::from_slice(&bytes)) {
            Ok(Ok(nodes)) => nodes,
            Ok(Err(error)) => {
                tracing::warn!(%error, path = %path.display(), "the address book is damaged: it is made anew");
                BTreeMap::new()
            }
            Err(_) => BTreeMap::new(),
        };
        Self { path, nodes: Mutex::new(nodes) }
    }

    pub(crate) fn address(&self, node: NodeId) -> Option<String> {
        self.nodes.lock().get(&node.0).map(|known| known.address.clone())
    }

    pub(crate) fn nodes(&self) -> Vec<NodeId> {
        self.nodes.lock().keys().copied().map(NodeId).collect()
    }

    /// Enters what is said of a node, if it is newer than what is known.
    pub(crate) fn learn(&self, node: NodeId, incarnation: Incarnation, address: &str) {
        if address.is_empty() || address.len() > ADDRESS_BYTES || node.0 == 0 {
            return;
        }
        let mut nodes = self.nodes.lock();
        let known = Known { incarnation: incarnation.0, address: address.to_owned() };
        let is_news = nodes.get(&node.0).is_none_or(|before| before.incarnation < known.incarnation);
        if !is_news || nodes.len() >= NODES && !nodes.contains_key(&node.0) {
            return;
        }
        nodes.insert(node.0, known);
        if let Err(error) = self.persist(&nodes) {
            tracing::warn!(%error, path = %self.path.display(), "write the address book");
        }
    }

    /// Where another process is that has this identity, in the same life or a later one.
    pub(super) fn other(&self, node: NodeId, incarnation: Incarnation, address: &str) -> Option<String> {
        let nodes = self.nodes.lock();
        let known = nodes.get(&node.0).filter(|known| known.incarnation >= incarnation.0)?;
        let is_itself = known.incarnation == incarnation.0 && (known.address == address || address.is_empty());
        (!is_itself).then(|| known.address.clone())
    }

    /// Drops a node that is gone for good.
    pub(crate) fn forget(&self, node: NodeId) {
        let mut nodes = self.nodes.lock();
        if nodes.remove(&node.0).is_some()
            && let Err(error) = self.persist(&nodes)
        {
            tracing::warn!(%error, path = %self.path.display(), "write the address book");
        }
    }

    fn persist(&self, nodes: &BTreeMap<u32, Known>) -> std::io::Result<()> {
        let beside = self.path.with_extension("part");
        std::fs::write(&beside, serde_json::to_vec_pretty(nodes)?)?;
        std::fs::rename(beside, &self.path)
    }

    pub(super) fn learn_all(&self, known: &[wire::Known]) {
        for wire::Known { node, incarnation, address } in known.iter().take(NODES) {
            self.learn(NodeId(*node), Incarnation(*incarnation), address);
        }
    }

    pub(super) fn all(&self) -> Vec<wire::Known> {
        let nodes = self.nodes.lock();
        let known = |(&node, known): (&u32, &Known)| wire::Known {
            node,
            incarnation: known.incarnation,
            address: known.address.clone(),
        };
        nodes.iter().map(known).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_life_wins_and_is_kept() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("peers.json");
        let book = AddressBook::open(path.clone());
        book.learn(NodeId(7), Incarnation(2), "a:2");
        book.learn(NodeId(7), Incarnation(1), "a:1");
        book.learn(NodeId(8), Incarnation(1), &"x".repeat(300));
        let other = |incarnation, address| book.other(NodeId(7), Incarnation(incarnation), address);
        assert_eq!([other(2, "a:2"), other(2, ""), other(3, "b:2")], [None, None, None]);
        assert_eq!([other(2, "b:2"), other(1, "a:2")].map(|other| other.as_deref() == Some("a:2")), [true, true]);
        assert_eq!(AddressBook::open(path.clone()).address(NodeId(7)).as_deref(), Some("a:2"));
        assert_eq!(book.nodes(), [NodeId(7)]);
        book.learn(NodeId(9), Incarnation(1), "a:9");
        book.forget(NodeId(9));
        assert_eq!(AddressBook::open(path.clone()).nodes(), [NodeId(7)], "a node that went is forgotten on disk too");
        std::fs::write(&path, "{").expect("writable");
        assert!(AddressBook::open(path).nodes().is_empty(), "damage costs time, not the start");
    }
}
