//! `Engine`: the transfer engine, with memory named by its address on both sides.
//!
//! The engine itself knows regions and tickets. Integrations know the peer's `host:port` and addresses in its process, so
//! each engine here answers one question more ([`Answers`]): which regions are registered, at which addresses. A peer's
//! answer is kept until a transfer shows that it is out of date. So whoever may connect may use what is registered: the
//! engine's secret is the door.
#![expect(unsafe_code, reason = "lends memory by its address to the engine; the block is argued")]

use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::prelude::*;
use tidepool_transfer::{
    AccessRights, Batch, BatchOptions, Direction, Failure, Handler, Kind, Memory, Outcome, PeerId, RegionId, RegionKey,
    RegionTicket, RemoteSlice, Request, Responder, SegmentId, Settings, Slice, TransferError,
};

use crate::address::{Span, mapped_rights};
use crate::buffer::{Lent, release_dropped};
use crate::convert::{same_length, seconds};
use crate::failure::{Reason, failure_name, of_transfer};
use crate::interpreter::detach;
use crate::runtime::Origin;

/// Asks which regions there are.
const ASK_REGIONS: &[u8] = b"tidepool.regions.1";
/// Begins a notification.
const NOTIFY: &[u8] = b"tidepool.notify.1:";
/// Bytes of one region in the answer: address, length, id, key; little-endian.
const REGION_BYTES: usize = 8 + 8 + 8 + 16;
/// Notifications that nobody took; further ones are refused to their senders.
const NOTIFICATIONS: usize = 4096;
/// Between two looks at whether Ctrl-C was pressed.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);
/// Unregistering waits this long for transfers to end, then ends them.
const PATIENCE: Duration = Duration::from_secs(5);

/// A transfer engine. See `tidepool.TransferEngine`.
#[pyclass(module = "tidepool._native", frozen)]
pub(crate) struct Engine {
    engine: tidepool_transfer::Engine,
    shared: Arc<Shared>,
    peers: Mutex<HashMap<String, Known>>,
    origin: Origin,
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // Its threads are in another process: there is nothing to end here.
            std::mem::forget(self.engine.clone());
        }
    }
}

/// What peers ask for.
#[derive(Default)]
struct Shared {
    regions: Mutex<BTreeMap<usize, RegionTicket>>,
    notifications: Mutex<VecDeque<Vec<u8>>>,
}

/// A peer and the regions that it said it has, by address.
#[derive(Clone)]
struct Known {
    peer: PeerId,
    regions: Arc<BTreeMap<u64, (u64, SegmentId)>>,
}

struct Answers(Arc<Shared>);

impl Handler for Answers {
    fn handle(&self, request: &[u8], responder: Responder) {
        if request == ASK_REGIONS {
            let regions = self.0.regions.lock();
            let mut reply = Vec::with_capacity(regions.len() * REGION_BYTES);
            for (address, ticket) in regions.iter() {
                reply.extend_from_slice(&(*address as u64).to_le_bytes());
                reply.extend_from_slice(&ticket.length.to_le_bytes());
                reply.extend_from_slice(&ticket.region.0.to_le_bytes());
                reply.extend_from_slice(&ticket.key.0.to_le_bytes());
            }
            drop(regions);
            responder.reply(&reply);
        } else if let Some(notification) = request.strip_prefix(NOTIFY) {
            let mut waiting = self.0.notifications.lock();
            if waiting.len() < NOTIFICATIONS {
                waiting.push_back(notification.to_vec());
                drop(waiting);
                responder.reply(b"");
            }
        }
        // A responder that is dropped says that there is no answer.
    }
}

/// A region in a peer's answer.
fn decode_region(bytes: &[u8]) -> Option<(u64, RegionTicket)> {
    let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let key = u128::from_le_bytes(bytes.get(24..40)?.try_into().ok()?);
    let ticket = RegionTicket {
        region: RegionId(word(16)?),
        key: RegionKey(key),
        length: word(8)?,
        rights: AccessRights::READ_WRITE,
    };
    Some((word(0)?, ticket))
}

impl Engine {
    fn known(&self, session: &str, deadline: Instant) -> Result<Known, TransferError> {
        if let Some(known) = self.peers.lock().get(session) {
            return Ok(known.clone());
        }
        let peer = self.engine.connect(session, deadline)?;
        let answer = self.engine.call(peer, ASK_REGIONS, deadline)?;
        let mut regions = BTreeMap::new();
        for region in answer.chunks_exact(REGION_BYTES) {
            let Some((address, ticket)) = decode_region(region) else { continue };
            regions.insert(address, (ticket.length, self.engine.open_ticket(peer, ticket, deadline)?));
        }
        let known = Known { peer, regions: Arc::new(regions) };
        self.peers.lock().insert(session.to_owned(), known.clone());
        Ok(known)
    }

    /// What was known of the peer is out of date.
    fn forget(&self, session: &str, is_gone: bool) {
        let Some(known) = self.peers.lock().remove(session) else { return };
        for (_, segment) in known.regions.values() {
            // One that is gone already needs no closing.
            drop(self.engine.close_segment(*segment));
        }
        if is_gone {
            drop(self.engine.disconnect(known.peer));
        }
    }

    fn requests(&self, known: &Known, ranges: &[Ranges], direction: Direction) -> Result<Vec<Request>, Missing> {
        let local = self.shared.regions.lock();
        let request = |ranges: &Ranges| {
            let here = local.range(..=ranges.local).next_back();
            let here = here.filter(|(start, ticket)| ends_in(ranges.local - *start, ranges.length, ticket.length));
            let (start, ticket) = here.ok_or(Missing::Here(ranges.local))?;
            let remote = ranges.remote as u64;
            let there = known.regions.range(..=remote).next_back();
            let there = there.filter(|(start, (length, _))| remote - *start + ranges.length as u64 <= *length);
            let (base, (_, segment)) = there.ok_or(Missing::There(ranges.remote))?;
            let offset = (ranges.local - start) as u64;
            Ok(Request {
                direction,
                local: Slice { region: ticket.region, offset, length: ranges.length as u64 },
                remote: RemoteSlice { segment: *segment, offset: remote - base },
            })
        };
        ranges.iter().map(request).collect()
    }

    /// Submits a batch, with what is known of the peer or, if that will not do, with what it says now.
    fn submit(&self, job: &Job<'_>) -> Result<Batch, Refused> {
        for is_last in [false, true] {
            let known = self.known(job.session, job.deadline).map_err(Refused::Error)?;
            let outdated = match self.requests(&known, &job.ranges, job.direction) {
                Ok(requests) => {
                    let options = BatchOptions { deadline: Some(job.deadline), ..BatchOptions::default() };
                    match self.engine.submit(&requests, options) {
                        Ok(batch) => return Ok(batch),
                        Err(error) if error.kind() == Kind::OpenAgain && !is_last => true,
                        Err(error) => return Err(Refused::Error(error)),
                    }
                }
                Err(Missing::There(_)) if !is_last => false,
                Err(missing) => return Err(Refused::Missing(missing)),
            };
            self.forget(job.session, outdated);
        }
        Err(Refused::Error(TransferError::Closed))
    }
}

fn ends_in(offset: usize, length: usize, region: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| end as u64 <= region)
}

/// One transfer's two ends.
struct Ranges {
    local: usize,
    remote: usize,
    length: usize,
}

struct Job<'a> {
    session: &'a str,
    ranges: Vec<Ranges>,
    direction: Direction,
    deadline: Instant,
}

/// Not registered.
enum Missing {
    Here(usize),
    There(usize),
}

enum Refused {
    Error(TransferError),
    Missing(Missing),
}

impl Refused {
    fn error(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Error(error) => of_transfer(py, error),
            Self::Missing(Missing::Here(address)) => {
                Reason::NotRegistered.error(&format!("the memory at {address:#x} is not registered here"))
            }
            Self::Missing(Missing::There(address)) => {
                Reason::NotRegistered.error(&format!("the memory at {address:#x} is not registered at the peer"))
            }
        }
    }
}

fn job<'a>(
    session: &'a str,
    local: Vec<usize>,
    remote: Vec<usize>,
    lengths: Vec<usize>,
    write: bool,
    timeout: f64,
) -> PyResult<Job<'a>> {
    same_length(&[("local addresses", local.len()), ("remote", remote.len()), ("lengths", lengths.len())])?;
    let ranges = local.into_iter().zip(remote).zip(lengths);
    let ranges = ranges.map(|((local, remote), length)| {
        // Checked here, so that sums can't overflow later.
        Span::new(local, length)?;
        Span::new(remote, length)?;
        Ok(Ranges { local, remote, length })
    });
    // What has no bytes needs no registered memory.
    let ranges = ranges.filter(|ranges| !matches!(ranges, Ok(Ranges { length: 0, .. })));
    let direction = if write { Direction::Write } else { Direction::Read };
    let deadline = Instant::now() + seconds("timeout", timeout)?;
    Ok(Job { session, ranges: ranges.collect::<PyResult<_>>()?, direction, deadline })
}

#[pymethods]
impl Engine {
    /// Starts an engine that listens at `listen` (`host:port`, port 0 picks one); `secret` has 32 bytes or is None.
    #[new]
    fn new(py: Python<'_>, listen: Vec<String>, secret: Option<Vec<u8>>, same_host: bool) -> PyResult<Self> {
        let secret = secret.map(<[u8; 32]>::try_from).transpose();
        let secret = secret.map_err(|_| Reason::BadArgument.error("a secret has 32 bytes"))?;
        let settings = Settings { listen, secret, same_host, ..Settings::default() };
        let engine = detach(py, || tidepool_transfer::Engine::start(settings));
        let engine = engine.map_err(|error| of_transfer(py, &error))?;
        let shared = Arc::<Shared>::default();
        engine.set_handler(Arc::new(Answers(Arc::clone(&shared))));
        Ok(Self { engine, shared, peers: Mutex::default(), origin: Origin::here() })
    }

    /// Where it listens: (host, port) pairs.
    #[getter]
    fn addresses(&self) -> Vec<(String, u16)> {
        self.engine.addresses().iter().map(|address| (address.ip().to_string(), address.port())).collect()
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
        let mut regions = self.shared.regions.lock();
        let before = regions.range(..span.address + span.length).next_back();
        if before.is_some_and(|(start, ticket)| *start as u64 + ticket.length > span.address as u64) {
            drop(regions);
            return Err(Reason::Overlap.error("it overlaps memory that is registered"));
        }
        // SAFETY: the range is mapped, readable, and writable if `rights` says so; who registers it by its address promised
        // to keep it until it is unregistered, which waits for its users, and otherwise `owner` keeps it. Nothing of ours
        // refers to it.
        let memory = unsafe { Memory::owned_by(base, span.length, rights, owner) };
        let rights = AccessRights { remote_read: true, remote_write: rights };
        let ticket = self.engine.register(&memory, rights, None).map_err(|error| of_transfer(py, &error))?;
        regions.insert(span.address, ticket);
        Ok((span.address, span.length))
    }

    /// Unregisters the memory at `address`: transfers of it are waited for, and ended after five seconds.
    fn unregister(&self, py: Python<'_>, address: usize) -> PyResult<()> {
        self.origin.check()?;
        let ticket = self.shared.regions.lock().remove(&address);
        let Some(ticket) = ticket else {
            return Err(Reason::NotRegistered.error(&format!("nothing is registered at {address:#x}")));
        };
        let gone = detach(py, || self.engine.unregister(ticket.region, Instant::now() + PATIENCE));
        release_dropped(py);
        gone.map_err(|error| of_transfer(py, &error))
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
        let job = job(session, local, remote, lengths, write, timeout)?;
        for is_last in [false, true] {
            let batch = detach(py, || self.submit(&job)).map_err(|refused| refused.error(py))?;
            let failure = match wait(py, &batch)?.all() {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            };
            if failure.kind() == Kind::OpenAgain && !is_last {
                // Writing the same bytes again is the same; so is reading them.
                self.forget(session, failure == Failure::Restarted);
                continue;
            }
            return Err(failed(py, session, failure));
        }
        Ok(())
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
        let job = job(session, local, remote, lengths, write, timeout)?;
        let batch = detach(py, || self.submit(&job)).map_err(|refused| refused.error(py))?;
        Ok(Transfer { batch, session: session.to_owned() })
    }

    /// Tells a peer something; it has it when this returns.
    fn notify(&self, py: Python<'_>, session: &str, notification: Vec<u8>, timeout: f64) -> PyResult<()> {
        self.origin.check()?;
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        let request = [NOTIFY, &notification].concat();
        let told = detach(py, || {
            let known = self.known(session, deadline)?;
            self.engine.call(known.peer, &request, deadline).map(drop)
        });
        told.map_err(|error| of_transfer(py, &error))
    }

    /// What peers told since the last call.
    fn notifications(&self) -> Vec<Vec<u8>> {
        self.shared.notifications.lock().drain(..).collect()
    }

    /// Asks a peer whether it is there.
    fn probe(&self, py: Python<'_>, session: &str, timeout: f64) -> PyResult<()> {
        self.origin.check()?;
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        let probed = detach(py, || {
            let peer = self.engine.connect(session, deadline)?;
            self.engine.probe(peer, deadline)
        });
        probed.map_err(|error| of_transfer(py, &error))
    }

    /// What a peer has registered, as it says now: (address, length) pairs, by address.
    fn regions_of(&self, py: Python<'_>, session: &str, timeout: f64) -> PyResult<Vec<(u64, u64)>> {
        self.origin.check()?;
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        self.forget(session, false);
        let known = detach(py, || self.known(session, deadline)).map_err(|error| of_transfer(py, &error))?;
        Ok(known.regions.iter().map(|(address, (length, _))| (*address, *length)).collect())
    }

    /// Ends it: transfers under way fail.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.origin.check()?;
        detach(py, || self.engine.close());
        self.shared.regions.lock().clear();
        release_dropped(py);
        Ok(())
    }
}

/// Waits without the interpreter's lock, and cancels the batch if a signal handler raises.
fn wait(py: Python<'_>, batch: &Batch) -> PyResult<Outcome> {
    loop {
        if let Some(outcome) = detach(py, || batch.wait_until(Instant::now() + SIGNALS_EVERY)) {
            return Ok(outcome);
        }
        if let Err(interrupted) = py.check_signals() {
            batch.cancel();
            let _ended = detach(py, || batch.wait());
            return Err(interrupted);
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
        wait(py, &self.batch)?.all().map_err(|failure| failed(py, &self.session, failure))
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
