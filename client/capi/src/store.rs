//! Objects in and out.

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use tidepool_client::{Client, ClientSettings, Error, Existence, PutOptions, PutOutcome, RemoveOutcome};
use tokio::runtime::{Builder, Runtime};

use crate::error::{code, failed, guarded, invalid};

pub(crate) const INTERNAL: i32 = -10;
pub(crate) const MISSING: i32 = -2;
/// Replace an object that is there.
const PUT_UPSERT: u32 = 1;
/// Acknowledged when a copy on disk is durable.
const PUT_NVME: u32 = 2;
/// Keep it from eviction until it is removed.
const PUT_PIN: u32 = 4;
/// From this bit on, seconds for which it is evicted after others; 0: it is not.
const PUT_SOFT_PIN_SHIFT: u32 = 8;
/// A day, as the node says.
const LONGEST_SOFT_PIN: u32 = 86_400;

/// A connection to a store.
#[expect(non_camel_case_types, reason = "its name in C")]
pub struct tidepool_store {
    client: Client,
}

impl tidepool_store {
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }
}

/// The runtime of all connections of this process.
pub(crate) fn runtime() -> Option<&'static Runtime> {
    static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();
    let make = || Builder::new_multi_thread().worker_threads(2).thread_name("tidepool").enable_all().build().ok();
    RUNTIME.get_or_init(make).as_ref()
}

/// Connects to the node at `endpoint` (`host:port`, or `unix:/path` of one on this host; null: 127.0.0.1:7420). Each call
/// may take `deadline_ms` (0: 30 s). `token` is the cluster's secret, or null. 0, with the connection in `store`; or a code.
///
/// # Safety
/// `endpoint` and `token` are null or end with a zero byte; `store` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_connect(
    endpoint: *const c_char,
    token: *const c_char,
    deadline_ms: u64,
    store: *mut *mut tidepool_store,
) -> i32 {
    guarded(INTERNAL, || {
        if store.is_null() {
            return invalid("store is null");
        }
        // SAFETY: as the caller promised.
        let (endpoint, token) = unsafe { (text(endpoint), text(token)) };
        let (Ok(endpoint), Ok(token)) = (endpoint, token) else { return invalid("a text is not UTF-8") };
        let mut settings = ClientSettings::default();
        if deadline_ms > 0 {
            settings.deadline = Duration::from_millis(deadline_ms);
        }
        let mut builder = Client::builder().endpoint(endpoint.unwrap_or("127.0.0.1:7420")).settings(settings);
        if let Some(token) = token {
            builder = builder.token(token);
        }
        let Some(runtime) = runtime() else { return INTERNAL };
        match runtime.block_on(builder.connect()) {
            Ok(client) => {
                // SAFETY: not null, and may be written.
                unsafe { store.write(Box::into_raw(Box::new(tidepool_store { client }))) };
                0
            }
            Err(error) => failed(&error),
        }
    })
}

/// Lets go of a connection; null is fine. No call may be under way with it.
///
/// # Safety
/// `store` came from `tidepool_connect`, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_close(store: *mut tidepool_store) {
    guarded((), || {
        if let (Some(runtime), false) = (runtime(), store.is_null()) {
            let _inside = runtime.enter();
            // SAFETY: made by `Box::into_raw`, and given up by the caller.
            drop(unsafe { Box::from_raw(store) });
        }
    });
}

/// Stores `length` bytes. 1: stored. 0: the key has an object, nothing was written. Else a code. `flags`: 1 upsert, 2
/// durable on disk, 4 pinned.
///
/// # Safety
/// `store` is a connection; the key and the value can be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_put(
    store: *const tidepool_store,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    length: usize,
    flags: u32,
) -> i32 {
    // SAFETY: as the caller promised.
    let (key, value) = unsafe { (bytes(key, key_length), bytes(value, length)) };
    let (Some(key), Some(value)) = (key, value) else { return invalid("key or value is null") };
    let Some(options) = put_options(flags) else { return invalid("there is no such flag") };
    // Copied: bytes on their way may outlive a call that its deadline ended.
    let value = Bytes::copy_from_slice(value);
    let put = |client: &'static Client| async move { client.put(key, value, &options).await };
    // SAFETY: as the caller promised.
    unsafe { call(store, put, |done| i64::from(done.outcome == PutOutcome::Stored)) as i32 }
}

/// Reads an object into `buffer`: its length; -2 if there is none; another code. -1 with the reason `BAD_RANGE` if it has
/// more than `capacity` bytes.
///
/// # Safety
/// `store` is a connection; the key can be read, the buffer written, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_get(
    store: *const tidepool_store,
    key: *const c_void,
    key_length: usize,
    buffer: *mut c_void,
    capacity: usize,
) -> i64 {
    // SAFETY: as the caller promised.
    let key = unsafe { bytes(key, key_length) };
    let (Some(key), false) = (key, buffer.is_null() && capacity > 0) else {
        return invalid("key or buffer is null").into();
    };
    let buffer: &'static mut [u8] = match capacity {
        0 => &mut [],
        // SAFETY: as the caller promised; the future that holds it is dropped before this call returns.
        _ => unsafe { std::slice::from_raw_parts_mut(buffer.cast(), capacity) },
    };
    let get = |client: &'static Client| async move { client.get_into(key, buffer).await };
    // SAFETY: as the caller promised.
    unsafe { call(store, get, |info| info.map_or(MISSING.into(), |info| info.length.cast_signed())) }
}

/// Length of an object; -2 if there is none; another code.
///
/// # Safety
/// `store` is a connection; the key can be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_length(store: *const tidepool_store, key: *const c_void, key_length: usize) -> i64 {
    // SAFETY: as the caller promised.
    let Some(key) = (unsafe { bytes(key, key_length) }) else { return invalid("key is null").into() };
    let stat = |client: &'static Client| async move { client.stat(key).await };
    // SAFETY: as the caller promised.
    unsafe { call(store, stat, |stat| stat.map_or(MISSING.into(), |stat| stat.length.cast_signed())) }
}

/// 1: there is such an object. 0: there is none. Else a code; -5 while the node does not know yet.
///
/// # Safety
/// `store` is a connection; the key can be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_exists(store: *const tidepool_store, key: *const c_void, key_length: usize) -> i32 {
    // SAFETY: as the caller promised.
    let Some(key) = (unsafe { bytes(key, key_length) }) else { return invalid("key is null") };
    let ask = |client: &'static Client| async move { client.exists(key).await };
    // SAFETY: as the caller promised.
    unsafe { call(store, ask, |found| existence(found).into()) as i32 }
}

/// Removes an object, pinned ones too if `force` is not 0. 1: removed. 0: there is none. -3: pinned. Else a code.
///
/// # Safety
/// `store` is a connection; the key can be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_remove(
    store: *const tidepool_store,
    key: *const c_void,
    key_length: usize,
    force: i32,
) -> i32 {
    // SAFETY: as the caller promised.
    let Some(key) = (unsafe { bytes(key, key_length) }) else { return invalid("key is null") };
    let remove = |client: &'static Client| async move { client.remove(key, force != 0).await };
    // SAFETY: as the caller promised.
    unsafe { call(store, remove, |outcome| removal(outcome).into()) as i32 }
}

/// What the flags of a put ask for; `None` if there is no such flag.
pub(crate) fn put_options(flags: u32) -> Option<PutOptions> {
    let durability = if flags & PUT_NVME == 0 { Default::default() } else { tidepool_client::Durability::Nvme };
    let (upsert, pin) = (flags & PUT_UPSERT != 0, flags & PUT_PIN != 0);
    let seconds = flags >> PUT_SOFT_PIN_SHIFT;
    let soft_pin = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
    let is_known = flags & 0xff & !(PUT_UPSERT | PUT_NVME | PUT_PIN) == 0 && seconds <= LONGEST_SOFT_PIN;
    is_known.then(|| PutOptions { durability, upsert, pin, soft_pin, ..PutOptions::default() })
}

/// 1, 0, or a code.
pub(crate) fn existence(existence: Existence) -> i32 {
    match existence {
        Existence::Present => 1,
        Existence::Missing => 0,
        Existence::Recovering | Existence::Unconfirmed => code(tidepool_client::ErrorKind::Unavailable),
    }
}

/// 1, 0, or a code.
pub(crate) fn removal(outcome: RemoveOutcome) -> i32 {
    match outcome {
        RemoveOutcome::Removed => 1,
        RemoveOutcome::Missing => 0,
        RemoveOutcome::Pinned => code(tidepool_client::ErrorKind::Conflict),
        RemoveOutcome::Failed => INTERNAL,
    }
}

/// Waits for what `start` begins, and makes an answer of it.
///
/// # Safety
/// `store` is null or a connection that is not closed while this runs.
unsafe fn call<T, F: Future<Output = Result<T, Error>>>(
    store: *const tidepool_store,
    start: impl FnOnce(&'static Client) -> F,
    answer: impl FnOnce(T) -> i64,
) -> i64 {
    guarded(INTERNAL.into(), || {
        // SAFETY: as the caller promised; the future that holds the client ends before this returns.
        let store: Option<&'static tidepool_store> = unsafe { store.as_ref() };
        let (Some(store), Some(runtime)) = (store, runtime()) else { return invalid("store is null").into() };
        match runtime.block_on(start(&store.client)) {
            Ok(value) => answer(value),
            Err(error) => failed(&error).into(),
        }
    })
}

/// # Safety
/// `start` is null, or `length` bytes can be read there while the result is used.
pub(crate) unsafe fn bytes(start: *const c_void, length: usize) -> Option<&'static [u8]> {
    match (start.is_null(), length) {
        (_, 0) => Some(&[]),
        (true, _) => None,
        // SAFETY: as the caller promised.
        (false, _) => Some(unsafe { std::slice::from_raw_parts(start.cast(), length) }),
    }
}

/// # Safety
/// `text` is null, or ends with a zero byte and can be read while the result is used.
unsafe fn text(text: *const c_char) -> Result<Option<&'static str>, std::str::Utf8Error> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller promised.
    unsafe { CStr::from_ptr(text) }.to_str().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_say_what_a_put_asks_for() {
        let asked = put_options(PUT_UPSERT | 600 << PUT_SOFT_PIN_SHIFT).expect("known");
        assert!(asked.upsert && !asked.pin && asked.soft_pin == Some(Duration::from_secs(600)));
        assert_eq!(put_options(PUT_PIN | PUT_NVME).map(|asked| (asked.pin, asked.soft_pin)), Some((true, None)));
        assert!(put_options(LONGEST_SOFT_PIN << PUT_SOFT_PIN_SHIFT).is_some());
        for unknown in [8, 64, 128, (LONGEST_SOFT_PIN + 1) << PUT_SOFT_PIN_SHIFT, u32::MAX] {
            assert!(put_options(unknown).is_none(), "{unknown:#x}");
        }
    }
}
