//! Calls: waited for by the calling thread without the interpreter's lock, or awaited by an event loop.
//!
//! An awaited call runs as a task; when it ends, one thread of our own gives its result to the loop. That thread is the
//! only one that takes the interpreter's lock on its own account, so that no worker of the runtime ever waits for Python.
//! It stops when the interpreter begins to shut down ([`shut_down`]): a thread that asks for the lock later is killed.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use pyo3::prelude::*;
use pyo3::types::PyCFunction;

use crate::buffer;
use crate::failure::Reason;
use crate::interpreter::{self, detach, is_main_thread, is_shutting_down};
use crate::runtime::{Origin, runtime};

/// Between two looks of the main thread at whether Ctrl-C was pressed.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);
/// Awaited calls at a time; more are refused with `OVERLOADED`.
const AWAITED: usize = 4096;

/// How the caller of a method gets its result.
pub(crate) enum Caller {
    /// It waits.
    Waits,
    /// It gets an awaitable.
    Awaits,
}

impl Caller {
    /// Runs `future`, then makes its result a Python object. Exceptions are made of panics, too.
    pub(crate) fn run<'py, T: Send + 'static>(
        &self,
        py: Python<'py>,
        future: impl Future<Output = T> + Send + 'static,
        finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::Waits => {
                let value = wait(py, future)?;
                Ok(finish(py, value)?.into_bound(py))
            }
            Self::Awaits => await_it(py, future, finish),
        }
    }
}

/// Waits for `future` without the interpreter's lock.
///
/// # Errors
/// `KeyboardInterrupt`, or what another signal handler raises; the future is dropped then. `INTERNAL` if it panics.
pub(crate) fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> PyResult<T> {
    let runtime = runtime()?;
    let waited = detach(py, || {
        runtime.block_on(async {
            let mut future = std::pin::pin!(AssertUnwindSafe(future).catch_unwind());
            if !is_main_thread() {
                return future.await.map_err(Stop::Panic);
            }
            loop {
                match tokio::time::timeout(SIGNALS_EVERY, &mut future).await {
                    Ok(value) => return value.map_err(Stop::Panic),
                    Err(_) => Python::attach(|py| py.check_signals()).map_err(Stop::Signal)?,
                }
            }
        })
    });
    let waited = waited.map_err(|stop| match stop {
        Stop::Panic(panic) => panicked(&*panic),
        Stop::Signal(raised) => {
            give_up();
            raised
        }
    });
    buffer::release_dropped(py);
    waited
}

/// Nobody waits for a call that may still be under way: what it puts may change from now on.
fn give_up() {
    tidepool_client::withdraw_all();
}

/// Why a call has no value.
enum Stop {
    Panic(Box<dyn Any + Send>),
    Signal(PyErr),
}

fn panicked(panic: &(dyn Any + Send)) -> PyErr {
    let words = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    Reason::Internal.error(&format!("a bug in tidepool: {}", words.unwrap_or("panic")))
}

/// What the completing thread does, with the interpreter's lock.
type Job = Box<dyn FnOnce(Python<'_>) + Send>;

/// The thread that gives results to event loops.
struct Completer {
    origin: Origin,
    jobs: SyncSender<Job>,
    awaited: Arc<AtomicUsize>,
    /// Held while it has the interpreter's lock, or is about to ask for it.
    working: Arc<Mutex<()>>,
}

static COMPLETER: Mutex<Option<Arc<Completer>>> = Mutex::new(None);

fn completer() -> PyResult<Arc<Completer>> {
    let mut completer = COMPLETER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(completer) = completer.as_ref()
        && completer.origin.is_here()
    {
        return Ok(Arc::clone(completer));
    }
    let (jobs, waiting) = sync_channel(AWAITED);
    let working = Arc::new(Mutex::new(()));
    let thread = {
        let working = Arc::clone(&working);
        std::thread::Builder::new().name("tidepool-await".into()).spawn(move || complete(&waiting, &working))
    };
    thread.map_err(|error| Reason::Internal.error(&format!("start a thread: {error}")))?;
    let made = Completer { origin: Origin::here(), jobs, awaited: Arc::default(), working };
    // A parent's is left alone: its channel may have been in use at the fork.
    let made = Arc::new(made);
    std::mem::forget(completer.replace(Arc::clone(&made)));
    Ok(made)
}

fn complete(waiting: &Receiver<Job>, working: &Mutex<()>) {
    while let Ok(job) = waiting.recv() {
        let held = working.lock().unwrap_or_else(PoisonError::into_inner);
        if is_shutting_down() {
            // A job holds Python objects, which must not be touched any more.
            std::mem::forget(job);
            continue;
        }
        Python::attach(|py| {
            job(py);
            // Several that ended together share one turn with the lock.
            for job in waiting.try_iter().take(64) {
                job(py);
            }
            buffer::release_dropped(py);
        });
        drop(held);
    }
}

/// Called before the interpreter shuts down: results of awaited calls that are still under way are lost from here on.
#[pyfunction]
pub(crate) fn shut_down(py: Python<'_>) {
    interpreter::shut_down(py);
    let completer = py.detach(|| COMPLETER.lock().unwrap_or_else(PoisonError::into_inner).clone());
    if let Some(completer) = completer
        && completer.origin.is_here()
    {
        // Once this was held, the thread sees the flag before it asks for the interpreter.
        py.detach(|| drop(completer.working.lock().unwrap_or_else(PoisonError::into_inner)));
    }
}

/// Counts an awaited call until it ends.
struct Turn(Arc<AtomicUsize>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn await_it<'py, T: Send + 'static>(
    py: Python<'py>,
    future: impl Future<Output = T> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let runtime = runtime()?;
    let completer = completer()?;
    if completer.awaited.fetch_add(1, Ordering::AcqRel) >= AWAITED {
        completer.awaited.fetch_sub(1, Ordering::AcqRel);
        return Err(Reason::Overloaded.error(&format!("{AWAITED} calls are awaited already")));
    }
    let turn = Turn(Arc::clone(&completer.awaited));
    let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
    let awaitable = event_loop.call_method0("create_future")?;
    let (event_loop, promise) = (event_loop.unbind(), awaitable.clone().unbind());
    let jobs = completer.jobs.clone();
    let task = runtime.spawn(async move {
        let value = AssertUnwindSafe(future).catch_unwind().await;
        let job: Job = Box::new(move |py| {
            let result = value.map_err(|panic| panicked(&*panic)).and_then(|value| finish(py, value));
            give(py, &event_loop, &promise, result);
            drop(turn);
        });
        // As many fit as may be awaited, so this never waits; the thread is there as long as the process.
        drop(jobs.try_send(job));
    });
    // A cancelled call is not gone on with: what it holds is let go of.
    let abort = task.abort_handle();
    let on_done = PyCFunction::new_closure(py, None, None, move |args, _| -> PyResult<()> {
        if args.get_item(0)?.call_method0("cancelled")?.is_truthy()? {
            abort.abort();
            give_up();
        }
        Ok(())
    })?;
    awaitable.call_method1("add_done_callback", (on_done,))?;
    Ok(awaitable)
}

/// Hands a result to its loop, which may be closed: then nobody waits any more.
fn give(py: Python<'_>, event_loop: &Py<PyAny>, promise: &Py<PyAny>, result: PyResult<Py<PyAny>>) {
    let promise = promise.clone_ref(py);
    let settle = PyCFunction::new_closure(py, None, None, move |args, _| -> PyResult<()> {
        let py = args.py();
        let promise = promise.bind(py);
        if !promise.call_method0("done")?.is_truthy()? {
            match &result {
                Ok(value) => promise.call_method1("set_result", (value,))?,
                Err(error) => promise.call_method1("set_exception", (error.value(py),))?,
            };
        }
        Ok(())
    });
    let given = settle.and_then(|settle| event_loop.bind(py).call_method1("call_soon_threadsafe", (settle,)));
    drop(given);
}
