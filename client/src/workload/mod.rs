//! Load as real services make it: recorded traces, the bytes of their blocks, a driver that replays them and checks
//! every byte that comes back, loads of one kind of call, and simulated caches that say what hit ratio to expect.
//!
//! Used by `tidepool replay` and `tidepool bench`, by benchmarks and by drills. Replays know a store only through [`BlockStore`],
//! which [`Client`](crate::Client) is.

mod block_store;
mod histogram;
mod payload;
mod replay;
mod report;
pub mod simulate;
mod store_load;
mod trace;

pub use block_store::{BlockStore, FoundBlock, block_key};
pub use histogram::{Histogram, Percentiles};
pub use payload::{Mismatch, Payload};
pub use replay::{Progress, Replay, ReplayError};
pub use report::{ReplayReport, WrongBlock};
pub use store_load::{LoadOperation, StoreLoad, StoreLoadReport};
pub use trace::{Trace, TraceError, TraceFacts, TraceRequest};
