//! Load as real services make it: recorded traces, the bytes of their blocks, a driver that replays them and checks
//! every byte that comes back, and simulated caches that say what hit ratio to expect.
//!
//! Used by `tidepool replay`, by benchmarks and by drills. Knows a store only through [`BlockStore`],
//! which [`Client`](crate::Client) is.

mod block_store;
mod histogram;
mod payload;
mod replay;
mod report;
pub mod simulate;
mod trace;

pub use block_store::{BlockStore, FoundBlock, block_key};
pub use histogram::{Histogram, Percentiles};
pub use payload::{Mismatch, Payload};
pub use replay::{Progress, Replay, ReplayError};
pub use report::{ReplayReport, WrongBlock};
pub use trace::{Trace, TraceError, TraceFacts, TraceRequest};
