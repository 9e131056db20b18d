//! The C library `libtidepool`: objects in and out of a store, and a transfer engine.
//!
//! - `store`: our own calls, `tidepool_*`. Each waits, may be made by many threads at once, and ends by its deadline.
//! - `batch`, `stream`: many objects at a time, and objects piece by piece.
//! - `engine`: the symbols of Mooncake's C Transfer Engine API that NIXL and TensorRT-LLM link to, over our engine.
//!
//! The header is `include/tidepool.h`. Null pointers are errors; other pointers are the caller's word. No panic leaves the
//! library: it becomes an internal error.
#![expect(unsafe_code, reason = "the border to C: each block is argued")]

pub mod batch;
pub mod engine;
pub mod error;
pub mod store;
pub mod stream;
