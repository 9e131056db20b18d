//! `Instance`: a node in this process, which lends memory and disk to the cluster ([`tidepool_server::Embedded`]).
//!
//! It runs on a runtime of its own, so that its answers to other nodes never wait behind the calls of this program. In a
//! forked child nothing of it is touched.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;
use tidepool_server::config::Telemetry;
use tidepool_server::{Embedded, Error, telemetry};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::completion::Caller;
use crate::convert::seconds;
use crate::failure::{Reason, of_server};
use crate::runtime::Origin;

/// Threads that serve; the catalog's log and the engine have their own.
const WORKERS: usize = 2;
/// Says what the instance logs to standard error, as `telemetry.log_filter`; nothing if it is not set.
const LOG: &str = "TIDEPOOL_LOG";

/// A runtime that may be dropped anywhere: its tasks are cut off, nobody waits for them.
struct Own(Option<Runtime>);

impl Own {
    fn handle(&self) -> PyResult<Handle> {
        // It is there until it is dropped.
        self.0.as_ref().map(Runtime::handle).cloned().ok_or_else(ended)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

struct Running {
    embedded: Embedded,
    runtime: Own,
}

/// An instance. See `tidepool.Store.embedded`.
#[pyclass(module = "tidepool._native", frozen)]
pub(crate) struct Instance {
    /// `None` once it has ended.
    running: Mutex<Option<Arc<Running>>>,
    origin: Origin,
    /// Where its own process reaches it.
    #[pyo3(get)]
    endpoint: String,
    /// Where other nodes reach it.
    #[pyo3(get)]
    address: String,
    /// Its number in the cluster.
    #[pyo3(get)]
    node: String,
    /// Whether its folders go with it.
    #[pyo3(get)]
    temporary: bool,
}

impl Drop for Instance {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // Its threads are in another process.
            std::mem::forget(self.running.get_mut().take());
        }
    }
}

fn answer<T>(py: Python<'_>, done: Result<Result<T, Error>, tokio::task::JoinError>) -> PyResult<T> {
    match done {
        Ok(done) => done.map_err(|error| of_server(py, &error)),
        Err(error) => Err(Reason::Internal.error(&format!("the instance's task ended: {error}"))),
    }
}

fn ended() -> PyErr {
    Reason::Closed.error("the instance has ended")
}

fn caller(awaits: bool) -> Caller {
    if awaits { Caller::Awaits } else { Caller::Waits }
}

impl Instance {
    fn running(&self) -> PyResult<(Arc<Running>, Handle)> {
        self.origin.check()?;
        let running = self.running.lock().clone().ok_or_else(ended)?;
        let handle = running.runtime.handle()?;
        Ok((running, handle))
    }

    /// Ends it by `end`; what comes meanwhile is told that it has ended.
    fn end<'py, F>(&self, py: Python<'py>, awaits: bool, end: impl FnOnce(Embedded) -> F) -> PyResult<Bound<'py, PyAny>>
    where
        F: Future<Output = Result<u64, Error>> + Send + 'static,
    {
        self.origin.check()?;
        let running = self.running.lock().take().ok_or_else(ended)?;
        let Running { embedded, runtime } = match Arc::try_unwrap(running) {
            Ok(running) => running,
            Err(running) => {
                *self.running.lock() = Some(running);
                return Err(Reason::InUse.error("a call of the instance is under way"));
            }
        };
        let ended = runtime.handle()?.spawn(end(embedded));
        let ended = async move {
            let ended = ended.await;
            drop(runtime);
            ended
        };
        caller(awaits).run(py, ended, |py, ended| Ok(answer(py, ended)?.into_pyobject(py)?.into_any().unbind()))
    }
}

#[pymethods]
impl Instance {
    /// Starts one with settings as `tidepool serve --set` takes them.
    #[staticmethod]
    fn start(py: Python<'_>, awaits: bool, settings: Vec<String>) -> PyResult<Bound<'_, PyAny>> {
        let config = Embedded::config(&settings).map_err(|error| of_server(py, &error.into()))?;
        if let Ok(log_filter) = std::env::var(LOG) {
            // The program may have a subscriber of its own.
            drop(telemetry::install(&Telemetry { log_filter, ..Telemetry::default() }));
        }
        let runtime =
            Builder::new_multi_thread().worker_threads(WORKERS).thread_name("tidepool-node").enable_all().build();
        let runtime = runtime.map_err(|error| Reason::Internal.error(&format!("start a runtime: {error}")))?;
        let starting = runtime.spawn(Embedded::start(config));
        let runtime = Own(Some(runtime));
        let started = async move {
            let started = starting.await;
            (started, runtime)
        };
        caller(awaits).run(py, started, |py, (started, runtime)| {
            let embedded = answer(py, started)?;
            let addresses = embedded.addresses();
            let address = addresses.grpc.to_string();
            let endpoint = addresses.unix.as_ref().map_or(address.clone(), |path| format!("unix:{}", path.display()));
            let instance = Self {
                endpoint,
                address,
                node: embedded.server().node().service().identity().0.to_string(),
                temporary: embedded.is_temporary(),
                running: Mutex::new(Some(Arc::new(Running { embedded, runtime }))),
                origin: Origin::here(),
            };
            Ok(Py::new(py, instance)?.into_any())
        })
    }

    /// Ends it for good, after others had `hand_over` seconds to take over what it holds; how many copies were given up.
    fn leave<'py>(&self, py: Python<'py>, awaits: bool, hand_over: f64) -> PyResult<Bound<'py, PyAny>> {
        let hand_over: Duration = seconds("hand_over", hand_over)?;
        self.end(py, awaits, move |embedded| embedded.leave(hand_over))
    }

    /// Stops it, to come back with its data folder.
    fn stop<'py>(&self, py: Python<'py>, awaits: bool) -> PyResult<Bound<'py, PyAny>> {
        self.end(py, awaits, |embedded| async move { embedded.shutdown().await.map(|()| 0) })
    }

    /// Puts the NVMe tier into service again; how many records were found.
    fn attach_nvme<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        path: Option<PathBuf>,
        capacity: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (running, handle) = self.running()?;
        let attached = handle.spawn(async move { running.embedded.attach_nvme(path, capacity).await });
        caller(awaits)
            .run(py, attached, |py, attached| Ok(answer(py, attached)?.into_pyobject(py)?.into_any().unbind()))
    }

    /// Takes it out of service.
    fn detach_nvme<'py>(&self, py: Python<'py>, awaits: bool) -> PyResult<Bound<'py, PyAny>> {
        let (running, handle) = self.running()?;
        let detached = handle.spawn(async move { running.embedded.detach_nvme().await });
        caller(awaits).run(py, detached, |py, detached| answer(py, detached).map(|()| py.None()))
    }
}
