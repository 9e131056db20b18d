//! Letting go of the interpreter's lock, and taking it again only while there is an interpreter.
//!
//! A daemon thread that asks for the lock while the interpreter shuts down is ended by it in the middle of our frames, which
//! crashes the process. So before the interpreter goes ([`shut_down`], at exit), a flag is set: threads that come back from
//! waiting then wait for ever instead, until the process ends. Those that had looked at the flag before are let through first.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pyo3::marker::Ungil;
use pyo3::prelude::*;

static SHUTTING_DOWN: AtomicBool = AtomicBool::new(false);
/// Threads that have seen that the interpreter is there, and take its lock.
static RETURNING: AtomicUsize = AtomicUsize::new(0);
/// Those take microseconds, on a busy machine more.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether this is the process's main thread, the one that handles signals and shuts the interpreter down.
pub(crate) fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

/// Whether the interpreter is about to go.
pub(crate) fn is_shutting_down() -> bool {
    SHUTTING_DOWN.load(Ordering::SeqCst)
}

/// Runs `work` without the interpreter's lock.
pub(crate) fn detach<T: Ungil + Send, F: Ungil + Send + FnOnce() -> T>(py: Python<'_>, work: F) -> T {
    let done = py.detach(|| {
        let done = work();
        // Counted first, looked at then: a shutdown sees this thread, or this thread sees the shutdown.
        RETURNING.fetch_add(1, Ordering::SeqCst);
        if is_shutting_down() && !is_main_thread() {
            RETURNING.fetch_sub(1, Ordering::SeqCst);
            loop {
                std::thread::park();
            }
        }
        done
    });
    RETURNING.fetch_sub(1, Ordering::SeqCst);
    done
}

/// Says that the interpreter is about to go, and lets those through that are taking its lock.
pub(crate) fn shut_down(py: Python<'_>) {
    SHUTTING_DOWN.store(true, Ordering::SeqCst);
    py.detach(|| {
        let until = Instant::now() + PATIENCE;
        while RETURNING.load(Ordering::SeqCst) > 0 && Instant::now() < until {
            std::thread::yield_now();
        }
    });
}
