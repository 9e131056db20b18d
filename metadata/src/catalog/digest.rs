//! Digests of the copies that a node has, one per key bucket: equal digests mean equal copies, so that a node and the
//! catalog look only into buckets that differ, and log only what differs there. Both sides compute them here.
//!
//! A digest is the XOR of its copies' hashes, so order does not matter and a copy leaves as it came. Copies are distinct
//! by their ids; that two different sets agree by chance has a probability of 2^-64 a bucket.

use super::{KEY_BUCKETS, KeyBucket};
use crate::object::{KeyHash, ReplicaId, VersionId};

/// What one copy adds: XXH3-64 over key hash, version and replica id (node, incarnation, sequence each), all
/// little-endian in this order.
#[must_use]
pub fn replica_digest(hash: KeyHash, version: VersionId, replica: ReplicaId) -> u64 {
    let mut bytes = [0; 40];
    bytes[0..8].copy_from_slice(&hash.0.to_le_bytes());
    bytes[8..12].copy_from_slice(&version.node.0.to_le_bytes());
    bytes[12..16].copy_from_slice(&version.incarnation.0.to_le_bytes());
    bytes[16..24].copy_from_slice(&version.sequence.to_le_bytes());
    bytes[24..28].copy_from_slice(&replica.node.0.to_le_bytes());
    bytes[28..32].copy_from_slice(&replica.incarnation.0.to_le_bytes());
    bytes[32..40].copy_from_slice(&replica.sequence.to_le_bytes());
    xxhash_rust::xxh3::xxh3_64(&bytes)
}

/// One digest per key bucket. The default is that of no copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyDigests(Box<[u64]>);

impl Default for KeyDigests {
    fn default() -> Self {
        Self(vec![0; KEY_BUCKETS].into())
    }
}

impl KeyDigests {
    /// Adds a copy that is not in it, or takes one out that is.
    pub fn toggle(&mut self, hash: KeyHash, version: VersionId, replica: ReplicaId) {
        self.0[KeyBucket::of(hash).index()] ^= replica_digest(hash, version, replica);
    }

    /// Adds copies of which none is in it.
    pub(super) fn add(&mut self, more: &Self) {
        self.0.iter_mut().zip(&more.0).for_each(|(digest, more)| *digest ^= more);
    }

    /// By bucket number, [`KEY_BUCKETS`] of them.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.0
    }
}
