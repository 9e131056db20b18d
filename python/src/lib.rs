//! The native part of the Python package `tidepool`: connections to a store, and a transfer engine.
//!
//! - Every call that waits lets go of the interpreter's lock while it does, can be interrupted by Ctrl-C, and ends by its
//!   deadline. A panic becomes an exception.
//! - Bytes of Python objects go in and out without a copy here; what they lie in is kept until nothing uses it any more.
//! - A process has one runtime, made by the first connection; a forked child does not share its parent's connections.
//!
//! Shapes, types, trees and everything that people read is on the Python side, in the package beside this crate. With the
//! feature `embedded` it links the server, for instances in the program's process; without it, it is a client alone.

mod address;
mod buffer;
mod completion;
mod connection;
mod convert;
mod engine;
mod failure;
mod gathered;
#[cfg(feature = "embedded")]
mod instance;
mod interpreter;
mod raw;
mod runtime;
mod view;

use pyo3::prelude::*;

/// See the package `tidepool`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<connection::Connection>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<engine::Transfer>()?;
    #[cfg(feature = "embedded")]
    module.add_class::<instance::Instance>()?;
    view::add(module)?;
    module.add_function(wrap_pyfunction!(view::allocate, module)?)?;
    module.add_function(wrap_pyfunction!(completion::shut_down, module)?)?;
    module.add_function(wrap_pyfunction!(address::read_memory, module)?)?;
    module.add_function(wrap_pyfunction!(address::write_memory, module)?)?;
    Ok(())
}
