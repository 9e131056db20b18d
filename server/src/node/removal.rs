//! Final removal of a node: it leaves the catalog's group, what is listed on it is forgotten, so that repair makes it anew
//! elsewhere at once, and its identity is refused from then on.
//!
//! Each step may be repeated: a removal that was cut off is ended by asking again, of any node.

use tidepool_metadata::NodeId;
use tidepool_metadata::catalog::{Command, NodeOutcome, NodeState, Outcome};
use tidepool_replication::MemberChange;

use super::NodeService;
use super::guests::Over;
use super::tasks::conflict;
use crate::error::Error;

impl NodeService {
    /// Removes `node` for good. It must be absent, or drained and empty; `is_forced`: whatever it is. Answers how many copies
    /// were given up with it.
    ///
    /// # Errors
    /// `NO_SUCH_NODE`, `IS_THIS_NODE`, `IS_LEADER`; `NODE_IN_USE`, `NODE_NOT_EMPTY` unless forced; `NODE_RESTARTED`; those of the
    /// catalog, after which it may be asked again.
    pub async fn remove_node(&self, node: NodeId, is_forced: bool) -> Result<u64, Error> {
        let refused = |reason, message| Err(conflict(reason, message).field("node"));
        let catalog = self.led_catalog().await?;
        let nodes = self.all_nodes().await?;
        let Some(known) = nodes.into_iter().find(|known| known.node == node) else {
            return refused("NO_SUCH_NODE", format!("there is no node {node}: `tidepool admin nodes` lists them"));
        };
        if node == self.inner.node {
            return refused("IS_THIS_NODE", format!("node {node} is the one that was asked: ask another one"));
        }
        if catalog.status().leader == Some(node) {
            let message = format!("node {node} leads: `tidepool admin raft transfer-leader` to another one first");
            return refused("IS_LEADER", message);
        }
        match known.state {
            NodeState::Up if !is_forced => {
                let message = format!(
                    "node {node} is up: `tidepool admin drain {node}` first, or stop it; --force gives up what only it has"
                );
                return refused("NODE_IN_USE", message);
            }
            NodeState::Draining if known.replicas > 0 && !is_forced => {
                let message = format!(
                    "node {node} still has {} copies that move to others; --force gives up what only it has",
                    known.replicas
                );
                return refused("NODE_NOT_EMPTY", message);
            }
            NodeState::Up | NodeState::Draining | NodeState::Absent => {}
        }
        // First, so that nobody hears it any more and takes it for up.
        catalog.change_members(MemberChange::Remove(node)).await?;
        let (incarnation, state) = (known.incarnation, NodeState::Absent);
        let absent = Command::SetNodeState { node, incarnation, state, term: None };
        let restarted = || refused("NODE_RESTARTED", format!("node {node} has just restarted: ask again"));
        if !matches!(catalog.propose(absent).await?, (_, Outcome::Node(NodeOutcome::Accepted { .. }))) {
            return restarted();
        }
        let over = Over { catalog, node, incarnation, state, is_for_good: true };
        match over.strike_out().await? {
            Some(lost) => {
                tracing::info!(%node, lost, "a node is removed for good");
                Ok(lost)
            }
            None => restarted(),
        }
    }
}
