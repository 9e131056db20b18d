//! The C Transfer Engine API of Mooncake, as far as NIXL and TensorRT-LLM use it, over our engine.
//!
//! Names and layouts are those that these programs were built for. A segment is a peer, `host:port`; offsets in it are
//! addresses in the peer's process. Codes: 0, or -1 (-7: overlap, -3: not registered). Only `P2PHANDSHAKE` is there as
//! metadata server.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tidepool_transfer::{
    AccessRights, AddressedEngine, AddressedError, AddressedRange, Batch, Direction, Failure, Memory, Settings,
};

use crate::error::guarded;

const FAILED: c_int = -1;
const NOT_REGISTERED: c_int = -3;
const OVERLAPPED: c_int = -7;
const INVALID_BATCH: u64 = u64::MAX;
const PENDING: c_int = 1;
const INVALID: c_int = 2;
const CANCELED: c_int = 3;
const COMPLETED: c_int = 4;
const TIMEOUT: c_int = 5;
const STATUS_FAILED: c_int = 6;

const CONNECT_WITHIN: Duration = Duration::from_secs(5);
const TRANSFER_WITHIN: Duration = Duration::from_secs(30);
/// Batches that are not freed; more are refused.
const BATCHES: usize = 65_536;

/// One transfer. The four bytes behind `target_id` are an id of a file in some versions, and padding in others.
#[repr(C)]
pub struct TransferRequest {
    opcode: c_int,
    source: *mut c_void,
    target_id: i32,
    target_offset: u64,
    length: u64,
}

/// How far one transfer is.
#[repr(C)]
pub struct TransferStatus {
    status: c_int,
    transferred_bytes: u64,
}

/// What a peer is told.
#[repr(C)]
pub struct NotifyMessage {
    name: *mut c_char,
    msg: *mut c_char,
}

/// An engine, and what C knows by numbers.
pub struct Handle {
    engine: Arc<AddressedEngine>,
    /// Segment n is the peer at n - 1.
    segments: Mutex<Vec<String>>,
    batches: Mutex<Batches>,
}

#[derive(Default)]
struct Batches {
    last: u64,
    open: HashMap<u64, Tasks>,
}

struct Tasks {
    capacity: usize,
    tasks: Vec<Task>,
}

/// One transfer: its batch of the engine, its place there, its length. No batch: nothing to move.
struct Task {
    batch: Option<Arc<Batch>>,
    place: usize,
    length: u64,
}

/// Starts an engine that listens at the host of `local_server_name`. Null if it can't.
///
/// # Safety
/// Texts are null or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn createTransferEngine(
    metadata_conn_string: *const c_char,
    local_server_name: *const c_char,
    ip_or_host_name: *const c_char,
    rpc_port: u64,
    _auto_discover: c_int,
) -> *mut Handle {
    guarded(ptr::null_mut(), || {
        // SAFETY: as the caller promised.
        let (metadata, name, host) =
            unsafe { (text(metadata_conn_string), text(local_server_name), text(ip_or_host_name)) };
        if !metadata.eq_ignore_ascii_case("P2PHANDSHAKE") || rpc_port > u64::from(u16::MAX) {
            return ptr::null_mut();
        }
        let host = if host.is_empty() { without_port(&name) } else { host };
        let settings = Settings { listen: vec![format!("{host}:{rpc_port}")], ..Settings::default() };
        let Ok(engine) = AddressedEngine::start(settings) else { return ptr::null_mut() };
        let (segments, batches) = (Mutex::default(), Mutex::default());
        Box::into_raw(Box::new(Handle { engine: Arc::new(engine), segments, batches }))
    })
}

/// Ends an engine; null is fine.
///
/// # Safety
/// `engine` came from `createTransferEngine`, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn destroyTransferEngine(engine: *mut Handle) {
    guarded((), || {
        if !engine.is_null() {
            // SAFETY: made by `Box::into_raw`, and given up by the caller.
            let handle = unsafe { Box::from_raw(engine) };
            handle.engine.close();
        }
    });
}

/// Writes `ip:port` and a zero byte to `buffer`. -1 if it does not fit.
///
/// # Safety
/// `engine` is an engine; `length` bytes can be written at `buffer`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getLocalIpAndPort(engine: *const Handle, buffer: *mut c_char, length: usize) -> c_int {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, FAILED, |handle| {
            let addresses = handle.engine.engine().addresses();
            let Some(address) = addresses.first().and_then(|address| CString::new(address.to_string()).ok()) else {
                return FAILED;
            };
            let bytes = address.as_bytes_with_nul();
            if buffer.is_null() || bytes.len() > length {
                return FAILED;
            }
            ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), bytes.len());
            0
        })
    }
}

/// A number for the peer at `host:port`, from 1; -1 if it can't be reached.
///
/// # Safety
/// `engine` is an engine; `name` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegment(engine: *const Handle, name: *const c_char) -> i32 {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, FAILED, |handle| {
            let name = text(name);
            if handle.engine.probe(&name, Instant::now() + CONNECT_WITHIN).is_err() {
                return FAILED;
            }
            let mut segments = handle.segments.lock();
            let place = segments.iter().position(|segment| *segment == name).unwrap_or_else(|| {
                segments.push(name);
                segments.len() - 1
            });
            i32::try_from(place + 1).unwrap_or(FAILED)
        })
    }
}

/// 0: peers stay known.
///
/// # Safety
/// None: nothing is used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn closeSegment(_engine: *const Handle, _segment: i32) -> c_int {
    0
}

/// Registers memory. 0; -7 if it overlaps registered memory; -1.
///
/// # Safety
/// `engine` is an engine. The memory can be read and written until it is unregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemory(
    engine: *const Handle,
    address: *mut c_void,
    length: usize,
    _location: *const c_char,
    remote_accessible: c_int,
) -> c_int {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, FAILED, |handle| {
            let (Some(base), true) = (NonNull::new(address.cast::<u8>()), length > 0) else { return FAILED };
            let rights = if remote_accessible == 0 { AccessRights::LOCAL } else { AccessRights::READ_WRITE };
            // Nothing to own: who registers it keeps it.
            let memory = Memory::owned_by(base, length, true, Box::new(()));
            match handle.engine.register(address.expose_provenance() as u64, &memory, rights) {
                Ok(()) => 0,
                Err(AddressedError::Overlap(_)) => OVERLAPPED,
                Err(_) => FAILED,
            }
        })
    }
}

/// Unregisters memory: transfers of it are waited for, and ended after five seconds. -3 if nothing is registered there.
///
/// # Safety
/// `engine` is an engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unregisterLocalMemory(engine: *const Handle, address: *mut c_void) -> c_int {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, FAILED, |handle| {
            match handle.engine.unregister(address.expose_provenance() as u64, Instant::now() + CONNECT_WITHIN) {
                Ok(()) => 0,
                Err(AddressedError::NotRegistered(_)) => NOT_REGISTERED,
                Err(_) => FAILED,
            }
        })
    }
}

/// A number for up to `size` transfers; the largest 64-bit number if there is none.
///
/// # Safety
/// `engine` is an engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn allocateBatchID(engine: *const Handle, size: usize) -> u64 {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, INVALID_BATCH, |handle| {
            let mut batches = handle.batches.lock();
            if batches.open.len() >= BATCHES {
                return INVALID_BATCH;
            }
            batches.last += 1;
            let number = batches.last;
            batches.open.insert(number, Tasks { capacity: size, tasks: Vec::new() });
            number
        })
    }
}

/// Starts transfers; each is the next task of the batch. None is, if the answer is not 0.
///
/// # Safety
/// `engine` is an engine; `count` requests can be read, and their memory is registered until they have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransfer(
    engine: *const Handle,
    batch: u64,
    entries: *const TransferRequest,
    count: usize,
) -> c_int {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, FAILED, |handle| match handle.submit(batch, requests(entries, count)) {
            Some(_) => 0,
            None => FAILED,
        })
    }
}

/// The same; when all have succeeded, the peer of the first is told.
///
/// # Safety
/// As for `submitTransfer`; the message's texts end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransferWithNotify(
    engine: *const Handle,
    batch: u64,
    entries: *const TransferRequest,
    count: usize,
    message: NotifyMessage,
) -> c_int {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, FAILED, |handle| {
            let (requests, notification) = (requests(entries, count), encode(&message));
            let Some(session) = requests.first().and_then(|request| handle.session(request.target_id)) else {
                return FAILED;
            };
            let Some(started) = handle.submit(batch, requests) else { return FAILED };
            let engine = Arc::clone(&handle.engine);
            let tell = move || {
                if started.iter().all(|batch| batch.wait().all().is_ok()) {
                    // A peer that can't be told is gone: its transfers tell, too.
                    drop(engine.notify(&session, &notification, Instant::now() + CONNECT_WITHIN));
                }
            };
            std::thread::Builder::new().name("tidepool-notify".into()).spawn(tell).map_or(FAILED, |_| 0)
        })
    }
}

/// How far a task is. -1 if there is no such one.
///
/// # Safety
/// `engine` is an engine; `status` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getTransferStatus(
    engine: *const Handle,
    batch: u64,
    task: usize,
    status: *mut TransferStatus,
) -> c_int {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, FAILED, |handle| {
            let batches = handle.batches.lock();
            let found = batches.open.get(&batch).and_then(|tasks| tasks.tasks.get(task));
            let (answer, code) = match found {
                Some(task) => (task.status(), 0),
                None => (TransferStatus { status: INVALID, transferred_bytes: 0 }, FAILED),
            };
            if status.is_null() {
                return FAILED;
            }
            status.write(answer);
            code
        })
    }
}

/// Forgets a batch; its transfers go on. -1 if there is no such one.
///
/// # Safety
/// `engine` is an engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeBatchID(engine: *const Handle, batch: u64) -> c_int {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, FAILED, |handle| match handle.batches.lock().open.remove(&batch) {
            Some(_) => 0,
            None => FAILED,
        })
    }
}

/// Tells a peer something; it has it when this returns 0.
///
/// # Safety
/// `engine` is an engine; the message's texts end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn genNotifyInEngine(engine: *const Handle, target: u64, message: NotifyMessage) -> c_int {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, FAILED, |handle| {
            let session = i32::try_from(target).ok().and_then(|target| handle.session(target));
            let Some(session) = session else { return FAILED };
            let told = handle.engine.notify(&session, &encode(&message), Instant::now() + CONNECT_WITHIN);
            told.map_or(FAILED, |()| 0)
        })
    }
}

/// What peers told since the last call, `size` messages; given back by `freeNotifsMsgBuf`. Null if there are none.
///
/// # Safety
/// `engine` is an engine; `size` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getNotifsFromEngine(engine: *const Handle, size: *mut c_int) -> *mut NotifyMessage {
    // SAFETY: as the caller promised.
    unsafe {
        with(engine, ptr::null_mut(), |handle| {
            if size.is_null() {
                return ptr::null_mut();
            }
            let messages: Vec<_> = handle.engine.notifications().iter().filter_map(|bytes| decode(bytes)).collect();
            size.write(c_int::try_from(messages.len()).unwrap_or(0));
            if messages.is_empty() { ptr::null_mut() } else { Box::into_raw(messages.into_boxed_slice()).cast() }
        })
    }
}

/// Gives messages back.
///
/// # Safety
/// Both came from one call of `getNotifsFromEngine`, and are not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeNotifsMsgBuf(messages: *mut NotifyMessage, size: c_int) -> c_int {
    guarded(FAILED, || {
        let (false, Ok(count)) = (messages.is_null(), usize::try_from(size)) else { return 0 };
        // SAFETY: a boxed slice of that many, given up by the caller.
        let messages = unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(messages, count)) };
        for message in messages {
            // SAFETY: made by `CString::into_raw` in `decode`.
            drop(unsafe { (CString::from_raw(message.name), CString::from_raw(message.msg)) });
        }
        0
    })
}

impl Handle {
    fn session(&self, segment: i32) -> Option<String> {
        let place = usize::try_from(segment).ok()?.checked_sub(1)?;
        self.segments.lock().get(place).cloned()
    }

    /// Starts what `requests` say, in runs of one peer and direction.
    fn submit(&self, number: u64, requests: &[TransferRequest]) -> Option<Vec<Arc<Batch>>> {
        // Held all the time, so that tasks keep the order of their requests.
        let mut batches = self.batches.lock();
        let tasks = batches.open.get_mut(&number)?;
        if tasks.tasks.len() + requests.len() > tasks.capacity {
            return None;
        }
        let (mut made, mut started) = (Vec::with_capacity(requests.len()), Vec::new());
        for run in requests.chunk_by(|one, next| (one.target_id, one.opcode) == (next.target_id, next.opcode)) {
            let session = self.session(run.first()?.target_id)?;
            let direction = match run.first()?.opcode {
                0 => Direction::Read,
                1 => Direction::Write,
                _ => return None,
            };
            let range = |request: &TransferRequest| AddressedRange {
                local: request.source.expose_provenance() as u64,
                remote: request.target_offset,
                length: request.length,
            };
            let ranges: Vec<_> = run.iter().map(range).collect();
            let deadline = Instant::now() + TRANSFER_WITHIN;
            let submitted = self.engine.submit(&session, &ranges, direction, deadline);
            let Ok(batch) = submitted.map(Arc::new) else {
                started.iter().for_each(|batch: &Arc<Batch>| batch.cancel());
                return None;
            };
            let mut place = 0;
            for range in ranges {
                // The engine leaves those out that have no bytes.
                let moves = range.length > 0;
                made.push(Task { batch: moves.then(|| Arc::clone(&batch)), place, length: range.length });
                place += usize::from(moves);
            }
            started.push(batch);
        }
        tasks.tasks.extend(made);
        Some(started)
    }
}

impl Task {
    fn status(&self) -> TransferStatus {
        let result = match &self.batch {
            None => Ok(()),
            Some(batch) => match batch.poll() {
                None => return TransferStatus { status: PENDING, transferred_bytes: 0 },
                Some(outcome) => outcome.results.get(self.place).copied().unwrap_or(Err(Failure::Closed)),
            },
        };
        let status = match result {
            Ok(()) => return TransferStatus { status: COMPLETED, transferred_bytes: self.length },
            Err(Failure::Cancelled | Failure::Closed) => CANCELED,
            Err(Failure::DeadlinePassed) => TIMEOUT,
            Err(_) => STATUS_FAILED,
        };
        TransferStatus { status, transferred_bytes: 0 }
    }
}

/// Runs `call` with the engine; `otherwise` if it is null, or after a panic.
///
/// # Safety
/// `engine` is null, or an engine that is not destroyed while this runs.
unsafe fn with<T: Copy>(engine: *const Handle, otherwise: T, call: impl FnOnce(&Handle) -> T) -> T {
    // SAFETY: as the caller promised.
    guarded(otherwise, || unsafe { engine.as_ref() }.map_or(otherwise, call))
}

/// # Safety
/// `entries` is null, or `count` requests can be read there while the result is used.
unsafe fn requests<'a>(entries: *const TransferRequest, count: usize) -> &'a [TransferRequest] {
    // SAFETY: as the caller promised.
    if entries.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(entries, count) } }
}

/// # Safety
/// `text` is null, or ends with a zero byte.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promised.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn without_port(name: &str) -> String {
    match name.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok() && (!host.contains(':') || host.ends_with(']')) => {
            host.into()
        }
        _ => name.into(),
    }
}

/// Length of the name (4 bytes, little-endian), name, message: as the Python modules have it.
///
/// # Safety
/// As of [`text`], for both.
unsafe fn encode(message: &NotifyMessage) -> Vec<u8> {
    // SAFETY: as the caller promised.
    let (name, msg) = unsafe { (text(message.name), text(message.msg)) };
    let length = u32::try_from(name.len()).unwrap_or(u32::MAX).to_le_bytes();
    [&length[..], name.as_bytes(), msg.as_bytes()].concat()
}

fn decode(bytes: &[u8]) -> Option<NotifyMessage> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (name, msg) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    let text = |bytes: &[u8]| CString::new(bytes).ok().map(CString::into_raw);
    let name = text(name)?;
    match text(msg) {
        Some(msg) => Some(NotifyMessage { name, msg }),
        None => {
            // SAFETY: made by `CString::into_raw` just now.
            drop(unsafe { CString::from_raw(name) });
            None
        }
    }
}
