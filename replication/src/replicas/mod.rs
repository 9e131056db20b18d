//! How many copies an object has, and where: decisions, without I/O.
//!
//! [`placement`] says which nodes are to get copies, [`repair`] what the holder of a copy is to do about the others, [`hot`] which
//! objects get further ones because they are read much, [`task`] what is to be done next for a copy or move that somebody asked for. All are functions of what the catalog knows. Who carries them out is the node's business.

pub mod hot;
pub mod placement;
pub mod repair;
pub mod task;

#[cfg(test)]
mod tests {
    use tidepool_metadata::catalog::{Copies, NodeState, ObjectLocation, Presence, ReplicaLocation};
    use tidepool_metadata::{DataType, Durability, Incarnation, LogIndex, NodeId, ReplicaId, VersionId};

    /// An object with copies on these nodes, in these states, confirmed or not.
    pub(super) fn located(wanted: Copies, copies: &[(u32, NodeState, bool)]) -> ObjectLocation {
        let replica = |&(node, node_state, confirmed): &(u32, NodeState, bool)| ReplicaLocation {
            replica: ReplicaId { node: NodeId(node), incarnation: Incarnation(1), sequence: 1 },
            durability: Durability::Memory,
            node_state,
            confirmed,
        };
        ObjectLocation {
            version: VersionId { node: NodeId(1), incarnation: Incarnation(1), sequence: 1 },
            commit_index: LogIndex(1),
            length: 1,
            slice_bytes: 1,
            data_type: DataType::default(),
            checksums: vec![0],
            group: None,
            presence: Presence::Present,
            copies: wanted,
            replicas: copies.iter().map(replica).collect(),
        }
    }
}
