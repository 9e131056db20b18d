//! Which replicas leave DRAM first.
//!
//! A policy orders ids; it knows nothing of replicas, tiers or time. Ids are dense and reused, so orders are lists
//! threaded through arrays: eight bytes an id, O(1) for everything, no allocation for a use. (A general cache crate
//! would bring its own map and a boxed node an entry, for ids that are array indices already.)

mod list;
mod lru;
mod s3fifo;

use tidepool_metadata::KeyHash;

pub use lru::Lru;
pub use s3fifo::S3Fifo;

/// An order of eviction over dense ids. All methods are O(1), amortised; `hottest` is O(n) in what it gives.
pub trait Eviction: Send {
    /// Enters `id`, which is not in. `key` recognises an object that comes back after it was evicted.
    fn insert(&mut self, id: u32, key: KeyHash, bytes: u64);
    /// Notes a use of `id`; nothing if it is not in.
    fn touch(&mut self, id: u32);
    /// Takes `id` out; nothing if it is not in.
    fn remove(&mut self, id: u32);
    /// Takes out the id that should leave first.
    fn evict(&mut self) -> Option<u32>;
    /// How many ids are in.
    fn len(&self) -> usize;
    /// Whether no id is in.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Up to `most` ids that should leave last, hottest first.
    fn hottest(&self, most: usize) -> Vec<u32>;
}

/// The policies by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EvictionPolicy {
    /// Least recently used first.
    #[default]
    Lru,
    /// S3-FIFO: objects used once leave soon, others get second chances.
    S3fifo,
}

impl EvictionPolicy {
    /// An empty order of this policy.
    #[must_use]
    pub fn build(self) -> Box<dyn Eviction> {
        match self {
            Self::Lru => Box::new(Lru::default()),
            Self::S3fifo => Box::new(S3Fifo::default()),
        }
    }
}
