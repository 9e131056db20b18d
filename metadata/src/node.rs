//! Nodes: who lends memory, and in which life.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A node's durable number: random, chosen once per data folder, never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// Counts the starts of a node; persisted before the node does anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u32);

/// What kind of medium a node lends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum TierKind {
    /// Memory of an accelerator, or the host stand-in for it.
    Device = 0,
    /// Main memory.
    Dram = 1,
    /// A disk.
    Nvme = 2,
}

impl TierKind {
    /// Its name in reports and messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Dram => "dram",
            Self::Nvme => "nvme",
        }
    }
}
