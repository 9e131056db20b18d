//! Whose a database is: written when it is made, compared whenever it is opened.

use std::fmt;

use tidepool_metadata::NodeId;

use super::config::GroupConfig;
use super::log::Position;
use crate::error::GroupError;

/// A cluster's number: random, chosen when its first node forms it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(pub u64);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Which catalog of the cluster: 0 is the first one, each rebuild from the nodes' tiers makes the next.
///
/// Log indices of a later epoch are higher than all of an earlier one, so whoever compares commit indices, as a rebuild
/// does to find the newest version of a key, need not know of epochs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterEpoch(pub u32);

impl ClusterEpoch {
    /// The last one: its indices still fit the 48 bits that a slice table keeps of them.
    pub const LAST: Self = Self((1 << (48 - INDEX_BITS)) - 1);

    /// Where its log begins: the first entry has the next index.
    pub(super) fn start(self) -> Position {
        Position { index: u64::from(self.0) << INDEX_BITS, term: u64::from(self.0 > 0) }
    }
}

/// Entries of one epoch: 2^42, at 10,000 a second 14 years.
const INDEX_BITS: u32 = 42;

const VERSION: u8 = 2;
/// Version, cluster, node, epoch; little-endian.
const BYTES: usize = 17;

pub(super) fn encode(config: &GroupConfig) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[0] = VERSION;
    bytes[1..9].copy_from_slice(&config.cluster.0.to_le_bytes());
    bytes[9..13].copy_from_slice(&config.node.0.to_le_bytes());
    bytes[13..].copy_from_slice(&config.epoch.0.to_le_bytes());
    bytes
}

/// Refuses a database that belongs to somebody else, or that another version wrote.
pub(super) fn check(what: &'static str, bytes: &[u8], config: &GroupConfig) -> Result<(), GroupError> {
    let (Ok(bytes), Some(&VERSION)) = (<[u8; BYTES]>::try_from(bytes), bytes.first()) else {
        return Err(GroupError::Version { what, found: bytes.first().copied().unwrap_or(0), known: VERSION });
    };
    if bytes == encode(config) {
        return Ok(());
    }
    let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let (found_cluster, found_node) = (u64::from(number(1)) | u64::from(number(5)) << 32, number(9));
    if (found_cluster, found_node) == (config.cluster.0, config.node.0) {
        return Err(GroupError::Epoch { what, found: ClusterEpoch(number(13)), epoch: config.epoch });
    }
    Err(GroupError::Foreign {
        what,
        found_cluster: ClusterId(found_cluster),
        found_node: NodeId(found_node),
        cluster: config.cluster,
        node: config.node,
    })
}
