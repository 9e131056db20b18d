//! `Instance`: a node in this process, which lends memory and disk to the cluster ([`tidepool_server::Embedded`]).
//!
//! It runs on a runtime of its own, so that its answers to other nodes never wait behind the calls of this program. In a
//! forked child nothing of it is touched.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use pyo3::prelude::*;
use tidepool_server::config::Telemetry;
use tidepool_server::{Embedded, Error, telemetry};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::RwLock;
use tokio::task::{JoinError, JoinHandle};

use crate::completion::Caller;
use crate::connection::Connection;
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

/// An instance. See `tidepool.Store.embedded`.
#[pyclass(module = "tidepool._native", frozen)]
pub(crate) struct Instance {
    /// Taken by who ends it: `None` from then on.
    runtime: Mutex<Option<Own>>,
    /// Calls read; who ends it waits for them, and takes it.
    embedded: Arc<RwLock<Option<Embedded>>>,
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
            std::mem::forget((self.runtime.get_mut().take(), Arc::clone(&self.embedded)));
        }
    }
}

/// `None`: it had ended already.
fn answer<T>(py: Python<'_>, done: Result<Option<Result<T, Error>>, JoinError>) -> PyResult<T> {
    match done {
        Ok(done) => done.ok_or_else(ended)?.map_err(|error| of_server(py, &error)),
        // With its runtime.
        Err(error) if error.is_cancelled() => Err(ended()),
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
    /// Runs a call of the instance. One that comes too late, or is overtaken by the end, is told so.
    fn call<T: Send + 'static>(
        &self,
        call: impl for<'a> FnOnce(&'a Embedded) -> BoxFuture<'a, Result<T, Error>> + Send + 'static,
    ) -> PyResult<JoinHandle<Option<Result<T, Error>>>> {
        self.origin.check()?;
        let handle = self.runtime.lock().as_ref().ok_or_else(ended)?.handle()?;
        let embedded = Arc::clone(&self.embedded);
        Ok(handle.spawn(async move {
            match &*embedded.read().await {
                Some(embedded) => Some(call(embedded).await),
                None => None,
            }
        }))
    }

    /// Ends it by `end` when the calls that are under way have ended, and closes the connection to it at once.
    fn end<'py, F>(
        &self,
        py: Python<'py>,
        awaits: bool,
        connection: Option<&Connection>,
        end: impl FnOnce(Embedded) -> F + Send + 'static,
    ) -> PyResult<Bound<'py, PyAny>>
    where
        F: Future<Output = Result<u64, Error>> + Send + 'static,
    {
        self.origin.check()?;
        let runtime = self.runtime.lock().take().ok_or_else(ended)?;
        if let Some(connection) = connection {
            connection.close(py)?;
        }
        let embedded = Arc::clone(&self.embedded);
        let ending = runtime.handle()?.spawn(async move {
            let embedded = embedded.write().await.take();
            match embedded {
                Some(embedded) => Some(end(embedded).await),
                None => None,
            }
        });
        let ended = async move {
            let ended = ending.await;
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
            let embedded = answer(py, started.map(Some))?;
            let addresses = embedded.addresses();
            let address = addresses.grpc.to_string();
            let endpoint = addresses.unix.as_ref().map_or(address.clone(), |path| format!("unix:{}", path.display()));
            let instance = Self {
                endpoint,
                address,
                node: embedded.server().node().service().identity().0.to_string(),
                temporary: embedded.is_temporary(),
                runtime: Mutex::new(Some(runtime)),
                embedded: Arc::new(RwLock::new(Some(embedded))),
                origin: Origin::here(),
            };
            Ok(Py::new(py, instance)?.into_any())
        })
    }

    /// Ends it for good, after others had `hand_over` seconds to take over what it holds; how many copies were given up.
    fn leave<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        hand_over: f64,
        connection: Option<&Connection>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let hand_over: Duration = seconds("hand_over", hand_over)?;
        self.end(py, awaits, connection, move |embedded| embedded.leave(hand_over))
    }

    /// Stops it, to come back with its data folder.
    fn stop<'py>(&self, py: Python<'py>, awaits: bool, connection: Option<&Connection>) -> PyResult<Bound<'py, PyAny>> {
        self.end(py, awaits, connection, |embedded| async move { embedded.shutdown().await.map(|()| 0) })
    }

    /// Puts the NVMe tier into service again; how many records were found.
    fn attach_nvme<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        path: Option<PathBuf>,
        capacity: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let attached = self.call(move |embedded| embedded.attach_nvme(path, capacity).boxed())?;
        caller(awaits)
            .run(py, attached, |py, attached| Ok(answer(py, attached)?.into_pyobject(py)?.into_any().unbind()))
    }

    /// Takes it out of service.
    fn detach_nvme<'py>(&self, py: Python<'py>, awaits: bool) -> PyResult<Bound<'py, PyAny>> {
        let detached = self.call(|embedded| embedded.detach_nvme().boxed())?;
        caller(awaits).run(py, detached, |py, detached| answer(py, detached).map(|()| py.None()))
    }
}
