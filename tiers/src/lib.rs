//! Where the bytes of objects lie on one node: device memory, DRAM and NVMe; usable without any network.
//!
//! [`TieredStore`] composes the tiers. [`memory`] is the DRAM tier on a named shared-memory segment that outlives the
//! process; [`nvme`] a log-structured store of slice records over [`io`]; [`eviction`] decides what is cold;
//! [`device`] is the boundary to accelerators. Nothing here opens a socket or knows the catalog: the store calls
//! upwards by one trait, [`store::Forget`].

pub mod device;
pub mod error;
pub mod eviction;
pub mod memory;
pub mod nvme;
pub mod store;

pub use error::StoreError;
pub use store::{StoreConfig, TieredStore};
pub use tidepool_io as io;
pub use tidepool_metadata::TierKind;
