//! `Connection`: the client's calls. Each is waited for, or awaited if its first argument says so.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use parking_lot::RwLock;
use pyo3::BoundObject;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use tidepool_client::{
    BatchGot, Client, ClientSettings, Error, GetOptions, Matching, Object, ObjectInfo, OneSidedReads, Stripes, Task,
    TaskKind, TaskListing, TaskState, Tls,
};

use crate::address::Registry;
use crate::buffer::{self, Lent, new_bytes};
use crate::completion::{Caller, wait};
use crate::convert::{
    Key, Options, answer, data_type, existence, put_options, removal, same_length, seconds, stored, tier,
};
use crate::failure::{Reason, of_client, of_transfer};
use crate::gathered::Gathered;
use crate::interpreter::detach;
use crate::runtime::{Origin, runtime};
use crate::view::{view, view_object};

/// A connection to a store. See `tidepool.Store`.
#[pyclass(module = "tidepool._native", frozen)]
pub(crate) struct Connection {
    /// `None` once it is closed.
    client: RwLock<Option<Client>>,
    origin: Origin,
    pub(crate) registry: Arc<Registry>,
}

impl Connection {
    /// The client, if it can be used in this process.
    pub(crate) fn client(&self) -> PyResult<Client> {
        self.origin.check()?;
        self.client.read().clone().ok_or_else(|| Reason::Closed.error("the store was closed"))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // The runtime that it belongs to is in another process.
            std::mem::forget(self.client.get_mut().take());
        }
    }
}

fn caller(awaits: bool) -> Caller {
    if awaits { Caller::Awaits } else { Caller::Waits }
}

fn value(py: Python<'_>, bytes: Bytes, as_view: bool) -> PyResult<Py<PyAny>> {
    if as_view { view(py, bytes) } else { Ok(new_bytes(py, &bytes)?.into_any()) }
}

fn object<T>(py: Python<'_>, value: T) -> PyResult<Py<PyAny>>
where
    T: for<'py> IntoPyObject<'py, Error: Into<PyErr>>,
{
    let made = value.into_pyobject(py).map_err(Into::into)?;
    Ok(made.into_bound().into_any().unbind())
}

/// (id, kind, key, source or None, targets, state, reason, copied, length, begun, changed); times in milliseconds since the epoch.
fn task_row(py: Python<'_>, task: Task) -> PyResult<Py<PyAny>> {
    let kind = match task.kind {
        TaskKind::Copy => "copy",
        TaskKind::Move => "move",
    };
    let (state, reason) = match task.state {
        TaskState::Waiting => ("waiting", String::new()),
        TaskState::Running => ("running", String::new()),
        TaskState::Done => ("done", String::new()),
        TaskState::Failed(reason) => ("failed", reason),
        TaskState::Cancelled => ("cancelled", String::new()),
    };
    let milliseconds = |time: SystemTime| {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    };
    let (begun, changed) = (milliseconds(task.begun), milliseconds(task.changed));
    let key = new_bytes(py, task.key.as_bytes())?;
    object(py, (task.id, kind, key, task.source, task.targets, state, reason, task.copied, task.length, begun, changed))
}

#[pymethods]
impl Connection {
    /// Connects. `reads`: local, hedged, one-sided (0 never, 1 by RDMA, 2 always), and one-sided puts. `tls`: files with certificate, key and authorities, and the name of nodes.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "the Python side names them")]
    fn connect<'py>(
        py: Python<'py>,
        awaits: bool,
        endpoints: Vec<String>,
        token: Option<String>,
        tenant: String,
        deadline: f64,
        connect_timeout: f64,
        connections: usize,
        retries: u32,
        reads: (bool, bool, u8, bool),
        same_host: bool,
        tls: Option<(PathBuf, PathBuf, PathBuf, Option<String>)>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tls =
            tls.map(|(certificate, key, authorities, name)| Tls::from_files(&certificate, &key, &authorities, name));
        let (local_reads, hedged_reads, one_sided_reads, one_sided_puts) = reads;
        let settings = ClientSettings {
            deadline: seconds("deadline", deadline)?,
            connect_timeout: seconds("connect_timeout", connect_timeout)?,
            connections,
            retries,
            local_reads,
            hedged_reads,
            one_sided_reads: match one_sided_reads {
                0 => OneSidedReads::Never,
                1 => OneSidedReads::Rdma,
                _ => OneSidedReads::Always,
            },
            one_sided_puts,
            same_host,
            engine_tls: tls.transpose().map_err(|error| of_transfer(py, &error))?,
            ..ClientSettings::default()
        };
        let mut builder = Client::builder().tenant(tenant).settings(settings);
        for endpoint in endpoints {
            builder = builder.endpoint(endpoint);
        }
        if let Some(token) = token {
            builder = builder.token(token);
        }
        let connected = async move { builder.connect().await };
        caller(awaits).run(py, connected, |py, connected| {
            let client = RwLock::new(Some(answer(py, connected)?));
            let connection = Connection { client, origin: Origin::here(), registry: Arc::default() };
            object(py, connection)
        })
    }

    /// Lets go of the connection. Calls that are under way end as they would have.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.origin.check()?;
        let client = self.client.write().take();
        self.registry.clear();
        let runtime = runtime()?;
        detach(py, || {
            let _inside = runtime.enter();
            drop(client);
        });
        buffer::release_dropped(py);
        Ok(())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.client.read().is_none()
    }

    /// Objects that were read from the node's memory on this host.
    #[getter]
    fn local_hits(&self) -> PyResult<u64> {
        Ok(self.client()?.local_hits())
    }

    /// Calls that went by the node's engine.
    #[getter]
    fn native_calls(&self) -> PyResult<u64> {
        Ok(self.client()?.native_calls())
    }

    /// Puts, or messages of batch puts, that the node on this host copied from where their values lie.
    #[getter]
    fn lent_puts(&self) -> PyResult<u64> {
        Ok(self.client()?.lent_puts())
    }

    /// Objects that this client read from nodes' memory itself.
    #[getter]
    fn one_sided_reads(&self) -> PyResult<u64> {
        Ok(self.client()?.one_sided_reads())
    }

    /// Puts whose values nodes read from this client's memory.
    #[getter]
    fn one_sided_puts(&self) -> PyResult<u64> {
        Ok(self.client()?.one_sided_puts())
    }

    /// The value as `bytes`, or a `View` of it; None if there is no such object.
    #[expect(clippy::too_many_arguments, reason = "the Python side names them")]
    fn get<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        key: Key,
        offset: u64,
        length: Option<u64>,
        fresh: bool,
        as_view: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let options = GetOptions { offset, length, fresh, ..GetOptions::default() };
        let got = async move { client.get_with(key, options).await };
        caller(awaits).run(py, got, move |py, got| match answer(py, got)? {
            Some(object) => value(py, object.value, as_view),
            None => Ok(py.None()),
        })
    }

    /// One `View`, None or exception a key: of the object where it lies, if that can be.
    fn views<'py>(&self, py: Python<'py>, awaits: bool, keys: Vec<Key>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let got = async move { client.views(&keys).await };
        caller(awaits).run(py, got, |py, got| {
            let items = answer(py, got)?.into_iter().map(|got| match got {
                Ok(Some(object)) => view_object(py, object),
                Ok(None) => Ok(py.None()),
                Err(error) => Ok(of_client(py, &error).into_value(py).into_any()),
            });
            Ok(PyList::new(py, items.collect::<PyResult<Vec<_>>>()?)?.into_any().unbind())
        })
    }

    /// Reads into the start of a writable buffer; the object's length, or None if there is none.
    fn get_into<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        key: Key,
        buffer: &Bound<'py, PyAny>,
        offset: Option<u64>,
        fresh: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let mut target = Lent::write(buffer)?;
        let got = async move {
            let length = read_into(&client, &key.0, &mut target, offset, fresh).await;
            drop(target);
            length
        };
        caller(awaits).run(py, got, |py, got| object(py, answer(py, got)?))
    }

    /// One `bytes` or `View`, None or exception a key.
    fn get_batch<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        keys: Vec<Key>,
        as_view: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let got = async move { client.get_batch(&keys).await };
        caller(awaits).run(py, got, move |py, got| {
            let items = answer(py, got)?.into_iter().map(|got| match got {
                // Values of a batch share one buffer, which a view would keep whole.
                BatchGot::Found(found) if as_view => view(py, Bytes::copy_from_slice(&found.value)),
                BatchGot::Found(found) => value(py, found.value, false),
                BatchGot::Missing => Ok(py.None()),
                BatchGot::Unavailable => unavailable(py),
                BatchGot::Failed(error) => Ok(of_client(py, &error).into_value(py).into_any()),
            });
            Ok(PyList::new(py, items.collect::<PyResult<Vec<_>>>()?)?.into_any().unbind())
        })
    }

    /// One length, None or exception a key.
    fn get_batch_into<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        keys: Vec<Key>,
        buffers: Vec<Bound<'py, PyAny>>,
        fresh: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        same_length(&[("keys", keys.len()), ("buffers", buffers.len())])?;
        let client = self.client()?;
        let targets = buffers.iter().map(Lent::write).collect::<PyResult<Vec<_>>>()?;
        let items: Vec<_> = keys.into_iter().zip(targets).collect();
        let got = async move { client.get_batch_into(items, fresh).await };
        caller(awaits).run(py, got, lengths)
    }

    /// Stores a value that lies in one buffer or several; True, or False if the key had an object.
    fn put<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        key: Key,
        parts: Vec<Bound<'py, PyAny>>,
        options: Options,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (client, options) = (self.client()?, put_options(options)?);
        let value = gather(py, &parts)?;
        let put = async move { client.put(key, value, &options).await };
        caller(awaits).run(py, put, |py, put| object(py, stored(answer(py, put)?.outcome)))
    }

    /// Stores a value in parts over nodes.
    #[expect(clippy::too_many_arguments, reason = "the Python side names them")]
    fn put_striped<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        key: Key,
        value: &Bound<'py, PyAny>,
        options: Options,
        nodes: usize,
        part_bytes: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (client, options) = (self.client()?, put_options(options)?);
        let (value, stripes) = (buffer::to_send(value)?, Stripes { nodes, part_bytes });
        let put = async move { client.put_striped(key, value, &options, stripes).await };
        caller(awaits).run(py, put, |py, put| object(py, stored(answer(py, put)?.outcome)))
    }

    fn get_striped<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        key: Key,
        offset: u64,
        length: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let got = async move { client.get_striped_range(key, offset, length).await };
        caller(awaits).run(py, got, |py, got| match answer(py, got)? {
            Some(bytes) => value(py, bytes, false),
            None => Ok(py.None()),
        })
    }

    fn remove_striped<'py>(&self, py: Python<'py>, awaits: bool, key: Key, force: bool) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let removed = async move { client.remove_striped(key, force).await };
        caller(awaits).run(py, removed, |py, removed| object(py, removal(answer(py, removed)?)))
    }

    /// One True, False or exception a key.
    fn put_batch<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        keys: Vec<Key>,
        values: Vec<Bound<'py, PyAny>>,
        options: Options,
    ) -> PyResult<Bound<'py, PyAny>> {
        same_length(&[("keys", keys.len()), ("values", values.len())])?;
        let (client, options) = (self.client()?, put_options(options)?);
        let values = values.iter().map(buffer::to_send).collect::<PyResult<Vec<_>>>()?;
        let items: Vec<(Key, Bytes)> = keys.into_iter().zip(values).collect();
        let put = async move { client.put_batch(&items, &options).await };
        caller(awaits).run(py, put, |py, put| {
            let items = answer(py, put)?.into_iter().map(|outcome| match outcome {
                Ok(outcome) => object(py, stored(outcome)),
                Err(error) => Ok(of_client(py, &error).into_value(py).into_any()),
            });
            Ok(PyList::new(py, items.collect::<PyResult<Vec<_>>>()?)?.into_any().unbind())
        })
    }

    /// One True, False or None (not known yet) a key.
    fn exists<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        keys: Vec<Key>,
        lease: Option<f64>,
        fresh: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let lease = lease.map(|lease| seconds("lease", lease)).transpose()?;
        let asked = async move { client.exists_many(&keys, lease, fresh).await };
        caller(awaits).run(py, asked, |py, asked| {
            let answers = answer(py, asked)?.into_iter().map(existence);
            Ok(PyList::new(py, answers.collect::<Vec<_>>())?.into_any().unbind())
        })
    }

    /// One "removed", "missing", "pinned" or "failed" a key.
    fn remove<'py>(&self, py: Python<'py>, awaits: bool, keys: Vec<Key>, force: bool) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let removed = async move { client.remove_many(&keys, force).await };
        caller(awaits).run(py, removed, |py, removed| {
            object(py, answer(py, removed)?.into_iter().map(removal).collect::<Vec<_>>())
        })
    }

    /// Removes all objects of a prefix, of a pattern, or all; how many were examined, removed, pinned.
    fn remove_matching<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        prefix: Option<Vec<u8>>,
        pattern: Option<String>,
        force: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let matching = match (prefix, pattern) {
            (Some(prefix), _) => Matching::Prefix(prefix),
            (None, Some(pattern)) => Matching::Pattern(pattern),
            (None, None) => Matching::All,
        };
        let removed = async move { client.remove_matching(&matching, force, |_| {}).await };
        caller(awaits).run(py, removed, |py, removed| {
            let done = answer(py, removed)?;
            object(py, (done.examined, done.removed, done.pinned))
        })
    }

    /// A page of (key, length, data type, group, pins, replicas), and the token of the next.
    fn list<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        prefix: Vec<u8>,
        page_size: u32,
        page_token: String,
        only: Option<u8>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (client, only) = (self.client()?, only.map(data_type).transpose()?);
        let listed = async move { client.list(&prefix, page_size, &page_token, only).await };
        caller(awaits).run(py, listed, |py, listed| {
            let listing = answer(py, listed)?;
            let rows = listing.objects.iter().map(|found| {
                let key = new_bytes(py, found.key.as_bytes())?;
                let row = (key, found.length, found.data_type as u8, &found.group, found.pins, found.replicas);
                Ok(row.into_pyobject(py)?.unbind())
            });
            let rows = rows.collect::<PyResult<Vec<Py<PyTuple>>>>()?;
            object(py, (rows, listing.next_page_token))
        })
    }

    /// (length, data type, group, pins, version, [(node, replica, state)], lease in seconds), or None.
    fn stat<'py>(&self, py: Python<'py>, awaits: bool, key: Key) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let found = async move { client.stat(key).await };
        caller(awaits).run(py, found, |py, found| {
            let Some(stat) = answer(py, found)? else { return Ok(py.None()) };
            let replicas = stat.replicas.into_iter().map(|replica| (replica.node, replica.replica, replica.node_state));
            let row = (
                stat.length,
                stat.data_type as u8,
                stat.group,
                stat.pins,
                stat.version,
                replicas.collect::<Vec<_>>(),
                stat.lease.as_secs_f64(),
            );
            object(py, row)
        })
    }

    /// Has an object copied; a row of a task.
    fn begin_copy<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        key: Key,
        targets: Vec<String>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let begun = async move { client.begin_copy(key, &targets).await };
        caller(awaits).run(py, begun, |py, begun| task_row(py, answer(py, begun)?))
    }

    /// Has an object moved; a row of a task.
    fn begin_move<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        key: Key,
        source: String,
        target: String,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let begun = async move { client.begin_move(key, &source, &target).await };
        caller(awaits).run(py, begun, |py, begun| task_row(py, answer(py, begun)?))
    }

    /// How a task stands, after it is cancelled if it `is_to_end`: a row, or None.
    fn task<'py>(&self, py: Python<'py>, awaits: bool, task: u64, is_to_end: bool) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let found = async move { if is_to_end { client.cancel_task(task).await } else { client.task(task).await } };
        caller(awaits).run(py, found, |py, found| match answer(py, found)? {
            Some(task) => task_row(py, task),
            None => Ok(py.None()),
        })
    }

    /// A page of rows of tasks, and what gives the next one, or None.
    fn tasks<'py>(&self, py: Python<'py>, awaits: bool, after: Option<u64>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let listed = async move { client.tasks(after).await };
        caller(awaits).run(py, listed, |py, listed| {
            let TaskListing { tasks, next } = answer(py, listed)?;
            let rows = tasks.into_iter().map(|task| task_row(py, task)).collect::<PyResult<Vec<_>>>()?;
            object(py, (rows, next))
        })
    }

    /// Where an object would be read from: (length, tier), or None. Reads one byte of it.
    fn tier<'py>(&self, py: Python<'py>, awaits: bool, key: Key) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let got = async move {
            // A range of no bytes says where it was found, too.
            client.get_range(key, 0, 0).await
        };
        caller(awaits).run(py, got, |py, got| match answer(py, got)? {
            Some(Object { info, .. }) => object(py, (info.length, tier(info.tier))),
            None => Ok(py.None()),
        })
    }

    /// Pins (or unpins) the objects; which exist.
    fn pin<'py>(&self, py: Python<'py>, awaits: bool, keys: Vec<Key>, unpin: bool) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let changed = async move { if unpin { client.unpin(&keys).await } else { client.pin(&keys).await } };
        caller(awaits).run(py, changed, |py, changed| Ok(PyList::new(py, answer(py, changed)?)?.into_any().unbind()))
    }

    /// Grants or renews leases; how many seconds each lasts from now, 0 where there is no object.
    fn lease<'py>(
        &self,
        py: Python<'py>,
        awaits: bool,
        keys: Vec<Key>,
        duration: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let duration = duration.map(|duration| seconds("duration", duration)).transpose()?;
        let granted = async move { client.renew_leases(&keys, duration).await };
        caller(awaits).run(py, granted, |py, granted| {
            let granted = answer(py, granted)?.into_iter().map(|granted| granted.as_secs_f64());
            Ok(PyList::new(py, granted.collect::<Vec<_>>())?.into_any().unbind())
        })
    }

    /// Ends leases.
    fn release<'py>(&self, py: Python<'py>, awaits: bool, keys: Vec<Key>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let released = async move { client.release_leases(&keys).await };
        caller(awaits).run(py, released, |py, released| answer(py, released).map(|()| py.None()))
    }

    /// What the server says of itself, as a list of names and values.
    fn server_info<'py>(&self, py: Python<'py>, awaits: bool) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let asked = async move { client.server_info().await };
        caller(awaits).run(py, asked, |py, asked| {
            let info = answer(py, asked)?;
            let row = (
                info.version,
                info.node,
                info.cluster,
                info.incarnation,
                info.role,
                info.applied_index,
                info.max_object_bytes,
                info.max_unary_bytes,
                info.phase,
                info.objects,
            );
            object(py, row)
        })
    }

    /// Registers memory by its address: it is used without a copy until it is unregistered.
    fn register(&self, py: Python<'_>, address: usize, length: usize) -> PyResult<()> {
        self.client()?;
        detach(py, || self.registry.register(address, length))
    }

    /// Unregisters it; waits for calls that use it, for as long as `patience` says (seconds).
    fn unregister(&self, py: Python<'_>, address: usize, patience: f64) -> PyResult<()> {
        self.origin.check()?;
        let patience = seconds("patience", patience)?;
        detach(py, || self.registry.unregister(address, patience))
    }

    /// Reads objects to addresses, each scattered over several ranges; one length, None or exception a key.
    fn read_to<'py>(
        &self,
        py: Python<'py>,
        keys: Vec<Key>,
        addresses: Vec<Vec<usize>>,
        lengths: Vec<Vec<usize>>,
    ) -> PyResult<Py<PyAny>> {
        let client = self.client()?;
        let items = crate::raw::items(keys, addresses, lengths)?;
        let registry = &self.registry;
        let got = wait(py, Box::pin(crate::raw::read(&client, registry, items)))?;
        crate::raw::results(py, got)
    }

    /// Stores objects from addresses, each gathered from several ranges; one length or exception a key. `groups` has one
    /// name a key, or is empty.
    fn write_from<'py>(
        &self,
        py: Python<'py>,
        keys: Vec<Key>,
        addresses: Vec<Vec<usize>>,
        lengths: Vec<Vec<usize>>,
        options: Options,
        groups: Vec<String>,
    ) -> PyResult<Py<PyAny>> {
        let (client, options) = (self.client()?, put_options(options)?);
        if !groups.is_empty() {
            same_length(&[("keys", keys.len()), ("groups", groups.len())])?;
        }
        let items = crate::raw::items(keys, addresses, lengths)?;
        let registry = &self.registry;
        let put = wait(py, Box::pin(crate::raw::write(&client, registry, items, &options, groups)))?;
        crate::raw::results(py, put)
    }
}

async fn read_into(
    client: &Client,
    key: &Bytes,
    target: &mut Lent,
    offset: Option<u64>,
    fresh: bool,
) -> Result<Option<u64>, Error> {
    let buffer = target.bytes_mut();
    let info = match offset {
        Some(offset) => client.get_range_into(key, offset, buffer).await?,
        None => client.get_into_with(key, GetOptions { fresh, ..GetOptions::default() }, buffer).await?,
    };
    Ok(info.map(|info| info.length))
}

fn lengths(py: Python<'_>, items: Vec<Result<Option<ObjectInfo>, Error>>) -> PyResult<Py<PyAny>> {
    let items = items.into_iter().map(|item| match item {
        Ok(info) => object(py, info.map(|info| info.length)),
        Err(error) => Ok(of_client(py, &error).into_value(py).into_any()),
    });
    Ok(PyList::new(py, items.collect::<PyResult<Vec<_>>>()?)?.into_any().unbind())
}

fn unavailable(py: Python<'_>) -> PyResult<Py<PyAny>> {
    Ok(Reason::Recovering.error("its copies can't be read now").into_value(py).into_any())
}

/// One value of several buffers.
fn gather(py: Python<'_>, parts: &[Bound<'_, PyAny>]) -> PyResult<Bytes> {
    if let [part] = parts {
        return buffer::to_send(part);
    }
    let lent = parts.iter().map(buffer::to_send).collect::<PyResult<Vec<_>>>()?;
    let whole = detach(py, || {
        let mut whole = Gathered::with_room(lent.iter().map(Bytes::len))?;
        lent.iter().for_each(|part| whole.next(part.len()).copy_from_slice(part));
        drop(lent);
        Some(whole.into_bytes())
    });
    buffer::release_dropped(py);
    whole.ok_or_else(|| PyMemoryError::new_err("no memory for a value of several parts"))
}
