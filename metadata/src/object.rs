//! Objects and their names: tenant, key, version, replica.

use std::fmt;

use crate::error::KeyError;
use crate::node::{Incarnation, NodeId};

/// Longest object key, in bytes. Longer keys are refused before any data moves.
pub const MAX_KEY_BYTES: usize = 1024;

/// Largest object, in bytes (16 GiB).
pub const MAX_OBJECT_BYTES: u64 = 16 << 30;

/// A tenant's number in the catalog; the table of names is replicated with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

impl TenantId {
    /// The tenant of callers that name none; it always exists.
    pub const DEFAULT: Self = Self(0);
}

/// What a caller calls an object: 1 to [`MAX_KEY_BYTES`] bytes, usually a block hash in text or binary.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey(Box<[u8]>);

impl ObjectKey {
    /// Copies `bytes` into a key of its own, so that it never pins the buffer it came in.
    ///
    /// # Errors
    /// [`KeyError::Empty`], [`KeyError::TooLong`].
    pub fn new(bytes: &[u8]) -> Result<Self, KeyError> {
        Self::check(bytes)?;
        Ok(Self(bytes.into()))
    }

    /// Whether `bytes` are a key, without a copy.
    ///
    /// # Errors
    /// As [`ObjectKey::new`].
    pub fn check(bytes: &[u8]) -> Result<(), KeyError> {
        match bytes.len() {
            0 => Err(KeyError::Empty),
            length if length > MAX_KEY_BYTES => Err(KeyError::TooLong { length }),
            _ => Ok(()),
        }
    }

    /// The key's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for ObjectKey {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Text where the key is UTF-8 without control characters, else `hex:..` as the command line takes it.
impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match std::str::from_utf8(&self.0) {
            Ok(text) if !text.starts_with("hex:") && !text.chars().any(char::is_control) => f.write_str(text),
            _ => {
                f.write_str("hex:")?;
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// XXH3-64 of the key, seeded with the tenant: place in the shared directory, digest bucket, shard.
/// Part of the documented formats; equality of hashes never stands for equality of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyHash(pub u64);

impl KeyHash {
    /// Hashes `key` of `tenant`.
    #[must_use]
    pub fn of(tenant: TenantId, key: &[u8]) -> Self {
        Self(xxhash_rust::xxh3::xxh3_64_with_seed(key, u64::from(tenant.0)))
    }
}

/// Names one completed or attempted put of a key: chosen by the coordinator when it reserves, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VersionId {
    /// The coordinator.
    pub node: NodeId,
    /// The coordinator's incarnation.
    pub incarnation: Incarnation,
    /// Counts the coordinator's reservations within the incarnation.
    pub sequence: u64,
}

/// As callers see it, and give it back.
impl fmt::Display for VersionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.node, self.incarnation.0, self.sequence)
    }
}

/// Names one copy of a version, chosen by the node that holds it, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId {
    /// The node that holds the copy.
    pub node: NodeId,
    /// That node's incarnation when it reserved.
    pub incarnation: Incarnation,
    /// Counts that node's reservations within the incarnation.
    pub sequence: u64,
}

/// What a copy of an object survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Durability {
    /// The node's process (its memory segments outlive it), not loss of power.
    #[default]
    Memory = 0,
    /// Loss of power; not loss of the disk.
    Nvme = 1,
}

/// How many types of data there are.
pub const DATA_TYPES: usize = 10;

/// What an object holds; stored, filterable, and usable in policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum DataType {
    /// Nothing is known.
    #[default]
    Unknown = 0,
    /// A block of KV cache.
    KvCache = 1,
    /// A tensor of no special role.
    Tensor = 2,
    /// Model weights.
    Weight = 3,
    /// A training or evaluation sample.
    Sample = 4,
    /// Activations.
    Activation = 5,
    /// Gradients.
    Gradient = 6,
    /// Optimizer state.
    OptimizerState = 7,
    /// Metadata of an application.
    Metadata = 8,
    /// Anything else.
    General = 9,
}

impl DataType {
    /// Its name, as people and settings write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::KvCache => "kv_cache",
            Self::Tensor => "tensor",
            Self::Weight => "weight",
            Self::Sample => "sample",
            Self::Activation => "activation",
            Self::Gradient => "gradient",
            Self::OptimizerState => "optimizer_state",
            Self::Metadata => "metadata",
            Self::General => "general",
        }
    }

    /// All types, by number.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..).map_while(Self::from_number)
    }

    /// The type with this number in messages and formats, if there is one.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        use DataType::{
            Activation, General, Gradient, KvCache, Metadata, OptimizerState, Sample, Tensor, Unknown, Weight,
        };
        [Unknown, KvCache, Tensor, Weight, Sample, Activation, Gradient, OptimizerState, Metadata, General]
            .get(usize::from(number))
            .copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_bounded() {
        assert!(matches!(ObjectKey::new(b""), Err(KeyError::Empty)));
        assert!(ObjectKey::new(&[7; MAX_KEY_BYTES]).is_ok());
        assert!(matches!(ObjectKey::new(&[7; MAX_KEY_BYTES + 1]), Err(KeyError::TooLong { length: 1025 })));
    }

    #[test]
    fn display_can_be_given_back_to_the_command_line() {
        let text = |bytes: &[u8]| ObjectKey::new(bytes).expect("legal key").to_string();
        assert_eq!(text(b"block/17"), "block/17");
        assert_eq!(text(&[0xff, 0x00]), "hex:ff00");
        assert_eq!(text(b"hex:zz"), "hex:6865783a7a7a");
    }

    #[test]
    fn data_types_keep_their_numbers() {
        assert!((0..10).all(|number| DataType::from_number(number).is_some_and(|data_type| data_type as u8 == number)));
        assert_eq!(DataType::from_number(DATA_TYPES as u8), None);
    }
}
