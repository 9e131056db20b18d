//! `Engine`: the transfer engine, with memory named by its address on both sides.
#![expect(unsafe_code, reason = "lends memory by its address to the engine; the block is argued")]

use std::any::Any;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tidepool_transfer::{
    AccessRights, AddressedEngine, AddressedError, AddressedRange, Batch, Direction, Failure, Memory, Outcome,
    Settings, TransferError,
};

use crate::address::{Span, mapped_rights};
use crate::buffer::{Lent, release_dropped};
use crate::convert::{same_length, seconds};
use crate::failure::{Reason, failure_name, of_transfer};
use crate::interpreter::{detach, is_main_thread};
use crate::runtime::Origin;

/// Between two looks at whether Ctrl-C was pressed.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);
/// Unregistering waits this long for transfers to end, then ends them.
const PATIENCE: Duration = Duration::from_secs(5);

/// A transfer engine. See `tidepool.TransferEngine`.
#[pyclass(module = "tidepool._native", frozen)]
pub(crate) struct Engine {
    engine: AddressedEngine,
    origin: Origin,
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // Its threads are in another process: there is nothing to end here.
            std::mem::forget(self.engine.engine().clone());
        }
    }
}

/// What a call fails with.
enum Trouble {
    Engine(AddressedError),
    /// A signal handler raised.
    Raised(PyErr),
}

impl From<AddressedError> for Trouble {
    fn from(error: AddressedError) -> Self {
        Self::Engine(error)
    }
}

impl Trouble {
    fn error(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Engine(error) => of_addressed(py, &error),
            Self::Raised(raised) => raised,
        }
    }
}

fn of_addressed(py: Python<'_>, error: &AddressedError) -> PyErr {
    match error {
        AddressedError::NotRegistered(_) | AddressedError::NotRegisteredAtPeer(_) => {
            Reason::NotRegistered.error(&error.to_string())
        }
        AddressedError::Overlap(_) => Reason::Overlap.error(&error.to_string()),
        AddressedError::Transfer(error) => of_transfer(py, error),
    }
}

fn ranges(local: Vec<usize>, remote: Vec<usize>, lengths: Vec<usize>) -> PyResult<Vec<AddressedRange>> {
    same_length(&[("local addresses", local.len()), ("remote", remote.len()), ("lengths", lengths.len())])?;
    let range = |((local, remote), length): ((usize, usize), usize)| AddressedRange {
        local: local as u64,
        remote: remote as u64,
        length: length as u64,
    };
    Ok(local.into_iter().zip(remote).zip(lengths).map(range).collect())
}

fn direction(write: bool) -> Direction {
    if write { Direction::Write } else { Direction::Read }
}

#[pymethods]
impl Engine {
    /// Starts an engine that listens at `listen` (`host:port`, port 0 picks one); `secret` has 32 bytes or is None.
    #[new]
    fn new(py: Python<'_>, listen: Vec<String>, secret: Option<Vec<u8>>, same_host: bool) -> PyResult<Self> {
        let secret = secret.map(<[u8; 32]>::try_from).transpose();
        let secret = secret.map_err(|_| Reason::BadArgument.error("a secret has 32 bytes"))?;
        let settings = Settings { listen, secret, same_host, ..Settings::default() };
        let engine = detach(py, || AddressedEngine::start(settings)).map_err(|error| of_transfer(py, &error))?;
        Ok(Self { engine, origin: Origin::here() })
    }

    /// Where it listens: (host, port) pairs.
    #[getter]
    fn addresses(&self) -> Vec<(String, u16)> {
        self.engine.engine().addresses().iter().map(|address| (address.ip().to_string(), address.port())).collect()
    }

    /// Registers memory by its address; with `buffer`, that of an object, which is kept.
    #[pyo3(signature = (address, length, buffer = None))]
    fn register(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        buffer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(usize, usize)> {
        self.origin.check()?;
        let (span, owner): (Span, Box<dyn Any + Send + Sync>) = match buffer {
            Some(buffer) => {
                let lent = Lent::write(buffer)?;
                let address = lent.bytes().as_ptr().expose_provenance();
                (Span::new(address, lent.len())?, Box::new(lent))
            }
            None => (Span::new(address, length)?, Box::new(())),
        };
        let no_memory = || Reason::BadAddress.error(&format!("no memory can be registered at {:#x}", span.address));
        let base = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(span.address)).ok_or_else(no_memory)?;
        if span.length == 0 {
            return Err(no_memory());
        }
        let rights = detach(py, || mapped_rights(span)).ok_or_else(no_memory)?;
        // SAFETY: the range is mapped, readable, and writable if `rights` says so; who registers it by its address promised
        // to keep it until it is unregistered, which waits for its users, and otherwise `owner` keeps it. Nothing of ours
        // refers to it.
        let memory = unsafe { Memory::owned_by(base, span.length, rights, owner) };
        let rights = AccessRights { remote_read: true, remote_write: rights };
        let registered = self.engine.register(span.address as u64, &memory, rights);
        registered.map_err(|error| of_addressed(py, &error))?;
        Ok((span.address, span.length))
    }

    /// Unregisters the memory at `address`: transfers of it are waited for, and ended after five seconds.
    fn unregister(&self, py: Python<'_>, address: usize) -> PyResult<()> {
        self.origin.check()?;
        let gone = detach(py, || self.engine.unregister(address as u64, Instant::now() + PATIENCE));
        release_dropped(py);
        gone.map_err(|error| of_addressed(py, &error))
    }

    /// Moves bytes between registered memory here and at the peer at `session` (`host:port`), and waits for it.
    #[expect(clippy::too_many_arguments, reason = "the Python side names them")]
    fn transfer(
        &self,
        py: Python<'_>,
        session: &str,
        local: Vec<usize>,
        remote: Vec<usize>,
        lengths: Vec<usize>,
        write: bool,
        timeout: f64,
    ) -> PyResult<()> {
        self.origin.check()?;
        let ranges = ranges(local, remote, lengths)?;
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        let done = detach(py, || {
            self.engine.transfer(session, &ranges, direction(write), deadline, |batch| {
                wait(batch).map(|outcome| outcome.all())
            })
        });
        done.map_err(|trouble: Trouble| trouble.error(py))
    }

    /// The same, without waiting.
    #[expect(clippy::too_many_arguments, reason = "the Python side names them")]
    fn start(
        &self,
        py: Python<'_>,
        session: &str,
        local: Vec<usize>,
        remote: Vec<usize>,
        lengths: Vec<usize>,
        write: bool,
        timeout: f64,
    ) -> PyResult<Transfer> {
        self.origin.check()?;
        let ranges = ranges(local, remote, lengths)?;
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        let batch = detach(py, || self.engine.submit(session, &ranges, direction(write), deadline));
        let batch = batch.map_err(|error| of_addressed(py, &error))?;
        Ok(Transfer { batch, session: session.to_owned() })
    }

    /// Tells a peer something; it has it when this returns.
    fn notify(&self, py: Python<'_>, session: &str, notification: Vec<u8>, timeout: f64) -> PyResult<()> {
        self.origin.check()?;
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        let told = detach(py, || self.engine.notify(session, &notification, deadline));
        told.map_err(|error| of_addressed(py, &error))
    }

    /// What peers told since the last call.
    fn notifications(&self) -> Vec<Vec<u8>> {
        self.engine.notifications()
    }

    /// Asks a peer whether it is there.
    fn probe(&self, py: Python<'_>, session: &str, timeout: f64) -> PyResult<()> {
        self.origin.check()?;
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        detach(py, || self.engine.probe(session, deadline)).map_err(|error| of_transfer(py, &error))
    }

    /// What a peer has registered, as it says now: (address, length) pairs, by address.
    fn regions_of(&self, py: Python<'_>, session: &str, timeout: f64) -> PyResult<Vec<(u64, u64)>> {
        self.origin.check()?;
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        detach(py, || self.engine.regions_of(session, deadline)).map_err(|error| of_transfer(py, &error))
    }

    /// Ends it: transfers under way fail.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.origin.check()?;
        detach(py, || self.engine.close());
        release_dropped(py);
        Ok(())
    }
}

/// Waits; cancels the batch if a signal handler raises. Called without the interpreter's lock.
fn wait(batch: &Batch) -> Result<Outcome, Trouble> {
    if !is_main_thread() {
        return Ok(batch.wait());
    }
    loop {
        if let Some(outcome) = batch.wait_until(Instant::now() + SIGNALS_EVERY) {
            return Ok(outcome);
        }
        if let Err(raised) = Python::attach(|py| py.check_signals()) {
            batch.cancel();
            let _ended = batch.wait();
            return Err(Trouble::Raised(raised));
        }
    }
}

fn failed(py: Python<'_>, session: &str, failure: Failure) -> PyErr {
    let error = TransferError::Peer { address: session.to_owned(), failure, source: None };
    of_transfer(py, &error)
}

/// A transfer on its way. It goes on if this is dropped.
#[pyclass(module = "tidepool._native", frozen)]
pub(crate) struct Transfer {
    batch: Batch,
    session: String,
}

#[pymethods]
impl Transfer {
    /// Whether it has ended; raises what it failed with.
    fn poll(&self, py: Python<'_>) -> PyResult<bool> {
        match self.batch.poll() {
            None => Ok(false),
            Some(outcome) => outcome.all().map(|()| true).map_err(|failure| failed(py, &self.session, failure)),
        }
    }

    /// Waits for its end; raises what it failed with.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let outcome = detach(py, || wait(&self.batch)).map_err(|trouble| trouble.error(py))?;
        outcome.all().map_err(|failure| failed(py, &self.session, failure))
    }

    /// Asks for its end.
    fn cancel(&self) {
        self.batch.cancel();
    }

    /// The name of a failure, or None: for reports.
    #[getter]
    fn failure(&self) -> Option<&'static str> {
        self.batch.poll().and_then(|outcome| outcome.all().err()).map(failure_name)
    }
}
