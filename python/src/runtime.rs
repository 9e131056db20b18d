//! The one runtime of this process, made when it is first needed.
//!
//! A fork copies the memory of a runtime but none of its threads. So a runtime belongs to the process that made it: a
//! child makes its own, and what was made in the parent is refused there ([`Origin::check`]). Nothing of the parent's
//! runtime is ever touched in the child, not even dropped: its locks may have been held at the fork.

use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

use crate::failure::Reason;

/// Threads that drive connections; those that wait for answers are Python's own.
const WORKERS: usize = 2;

struct Owned {
    process: u32,
    runtime: Runtime,
}

static CURRENT: AtomicPtr<Owned> = AtomicPtr::new(ptr::null_mut());

/// The runtime of this process.
///
/// # Errors
/// The system's, if it has no threads left.
pub(crate) fn runtime() -> PyResult<&'static Runtime> {
    let process = process::id();
    let current = CURRENT.load(Ordering::Acquire);
    if let Some(owned) = live(current)
        && owned.process == process
    {
        return Ok(&owned.runtime);
    }
    let runtime = Builder::new_multi_thread().worker_threads(WORKERS).thread_name("tidepool").enable_all().build();
    let runtime = runtime.map_err(|error| Reason::Internal.error(&format!("start the runtime: {error}")))?;
    let made = Box::into_raw(Box::new(Owned { process, runtime }));
    if CURRENT.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // Another thread was quicker.
        drop_unpublished(made);
    }
    runtime_of(process)
}

fn runtime_of(process: u32) -> PyResult<&'static Runtime> {
    match live(CURRENT.load(Ordering::Acquire)) {
        Some(owned) if owned.process == process => Ok(&owned.runtime),
        _ => Err(Reason::Internal.error("the process forked while its runtime was started")),
    }
}

#[expect(unsafe_code, reason = "a published runtime is never freed")]
fn live(pointer: *mut Owned) -> Option<&'static Owned> {
    // SAFETY: what is in `CURRENT` came out of `Box::into_raw` and is never freed: a runtime lives as long as its process.
    unsafe { pointer.as_ref() }
}

#[expect(unsafe_code, reason = "frees a runtime that nobody else has seen")]
fn drop_unpublished(pointer: *mut Owned) {
    // SAFETY: it came out of `Box::into_raw` just now, and was not published.
    let owned = unsafe { Box::from_raw(pointer) };
    owned.runtime.shutdown_background();
}

/// Which process something was made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin(u32);

impl Origin {
    /// This process.
    pub(crate) fn here() -> Self {
        Self(process::id())
    }

    /// Whether this still is the process.
    pub(crate) fn is_here(self) -> bool {
        self.0 == process::id()
    }

    /// # Errors
    /// `FORKED` in a child of the process.
    pub(crate) fn check(self) -> PyResult<()> {
        if self.is_here() {
            return Ok(());
        }
        let words = format!("this was made in process {}, and process {} is its child", self.0, process::id());
        Err(Reason::Forked.error(&format!("{words}: connect again after the fork")))
    }
}
