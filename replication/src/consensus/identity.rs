//! Whose a database is: written when it is made, compared whenever it is opened.

use std::fmt;

use tidepool_metadata::NodeId;

use super::config::GroupConfig;
use crate::error::GroupError;

/// A cluster's number: random, chosen when its first node forms it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(pub u64);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

const VERSION: u8 = 1;
/// Version, cluster, node; little-endian.
const BYTES: usize = 13;

pub(super) fn encode(config: &GroupConfig) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[0] = VERSION;
    bytes[1..9].copy_from_slice(&config.cluster.0.to_le_bytes());
    bytes[9..].copy_from_slice(&config.node.0.to_le_bytes());
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
    let [_, cluster @ .., n0, n1, n2, n3] = bytes;
    Err(GroupError::Foreign {
        what,
        found_cluster: ClusterId(u64::from_le_bytes(cluster)),
        found_node: NodeId(u32::from_le_bytes([n0, n1, n2, n3])),
        cluster: config.cluster,
        node: config.node,
    })
}
