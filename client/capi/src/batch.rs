//! Many objects at a time: one result each, in order.

use std::ffi::c_void;
use std::slice;

use bytes::Bytes;
use tidepool_client::{Client, Error, ObjectInfo, PutOutcome};

use crate::error::{failed, guarded, invalid};
use crate::store::{INTERNAL, MISSING, bytes, existence, put_options, removal, runtime, tidepool_store};

/// A key or a value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tidepool_slice {
    start: *const c_void,
    length: usize,
}

/// Where an object goes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tidepool_room {
    start: *mut c_void,
    length: usize,
}

/// Stores `count` objects: for each 1, 0 or a code in `results`, as of `tidepool_put`. 0, or the code of what kept all of them
/// from being stored: then `results` say nothing.
///
/// # Safety
/// `store` is a connection; `keys` and `values` have `count` entries that can be read, `results` room for as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_put_batch(
    store: *const tidepool_store,
    count: usize,
    keys: *const tidepool_slice,
    values: *const tidepool_slice,
    flags: u32,
    results: *mut i32,
) -> i32 {
    // SAFETY: as the caller promised.
    let (keys, values) = unsafe { (each(keys, count), each(values, count)) };
    let (Some(keys), Some(values)) = (keys, values) else { return invalid("a key or a value is null") };
    let Some(options) = put_options(flags) else { return invalid("there is no such flag") };
    // Copied: bytes on their way may outlive a call that its deadline ended.
    let items: Vec<_> = keys.into_iter().zip(values.into_iter().map(Bytes::copy_from_slice)).collect();
    let put = |client: &'static Client| async move { client.put_batch(&items, &options).await };
    let result = |outcome: Result<PutOutcome, Error>| match outcome {
        Ok(outcome) => i32::from(outcome == PutOutcome::Stored),
        Err(error) => failed(&error),
    };
    // SAFETY: as the caller promised.
    unsafe { many(store, count, results, put, result) }
}

/// Reads `count` objects to the starts of their rooms: for each its length or a code in `results`, as of `tidepool_get`. 0, or a
/// code.
///
/// # Safety
/// `store` is a connection; `keys` and `rooms` have `count` entries, which can be read and written and do not overlap; `results`
/// has room for as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_get_batch(
    store: *const tidepool_store,
    count: usize,
    keys: *const tidepool_slice,
    rooms: *const tidepool_room,
    results: *mut i64,
) -> i32 {
    // SAFETY: as the caller promised.
    let (Some(keys), Some(rooms)) = (unsafe { each(keys, count) }, unsafe { list(rooms, count) }) else {
        return invalid("a key is null, or the rooms are");
    };
    if rooms.iter().any(|room| room.start.is_null() && room.length > 0) {
        return invalid("a room is null");
    }
    let buffers: Vec<&'static mut [u8]> = rooms
        .iter()
        .map(|room| match room.length {
            0 => &mut [][..],
            // SAFETY: as the caller promised; no read is under way any more when this call returns.
            length => unsafe { slice::from_raw_parts_mut(room.start.cast(), length) },
        })
        .collect();
    // Driven to its end below: then no buffer is in use any more.
    let get =
        |client: &'static Client| async move { Ok(client.get_batch_into(keys.into_iter().zip(buffers), false).await) };
    let result = |read: Result<Option<ObjectInfo>, Error>| match read {
        Ok(info) => info.map_or(MISSING.into(), |info| info.length.cast_signed()),
        Err(error) => failed(&error).into(),
    };
    // SAFETY: as the caller promised.
    unsafe { many(store, count, results, get, result) }
}

/// Whether there are such objects: for each 1, 0 or a code in `results`, as of `tidepool_exists`. 0, or a code.
///
/// # Safety
/// `store` is a connection; `keys` has `count` entries that can be read, `results` room for as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_exists_batch(
    store: *const tidepool_store,
    count: usize,
    keys: *const tidepool_slice,
    results: *mut i32,
) -> i32 {
    // SAFETY: as the caller promised.
    let Some(keys) = (unsafe { each(keys, count) }) else { return invalid("a key is null") };
    let ask = |client: &'static Client| async move { client.exists_many(&keys, None, false).await };
    // SAFETY: as the caller promised.
    unsafe { many(store, count, results, ask, existence) }
}

/// Removes objects: for each 1, 0 or a code in `results`, as of `tidepool_remove`. 0, or a code.
///
/// # Safety
/// `store` is a connection; `keys` has `count` entries that can be read, `results` room for as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_remove_batch(
    store: *const tidepool_store,
    count: usize,
    keys: *const tidepool_slice,
    force: i32,
    results: *mut i32,
) -> i32 {
    // SAFETY: as the caller promised.
    let Some(keys) = (unsafe { each(keys, count) }) else { return invalid("a key is null") };
    let remove = |client: &'static Client| async move { client.remove_many(&keys, force != 0).await };
    // SAFETY: as the caller promised.
    unsafe { many(store, count, results, remove, removal) }
}

/// Waits for what `start` begins, and writes a result for each of its items.
///
/// # Safety
/// `store` is null or a connection that is not closed while this runs; `results` is null or has room for `count`.
unsafe fn many<T, R, F: Future<Output = Result<Vec<T>, Error>>>(
    store: *const tidepool_store,
    count: usize,
    results: *mut R,
    start: impl FnOnce(&'static Client) -> F,
    result: impl Fn(T) -> R,
) -> i32 {
    guarded(INTERNAL, || {
        // SAFETY: as the caller promised; the future that holds the client ends before this returns.
        let store: Option<&'static tidepool_store> = unsafe { store.as_ref() };
        let (Some(store), Some(runtime)) = (store, runtime()) else { return invalid("store is null") };
        if count == 0 {
            return 0;
        }
        if results.is_null() {
            return invalid("results is null");
        }
        match runtime.block_on(start(store.client())) {
            Ok(items) if items.len() == count => {
                for (place, item) in items.into_iter().enumerate() {
                    // SAFETY: `results` has room for `count`, as the caller promised.
                    unsafe { results.add(place).write(result(item)) };
                }
                0
            }
            Ok(_) => INTERNAL,
            Err(error) => failed(&error),
        }
    })
}

/// The bytes of each entry; `None` if one is null.
///
/// # Safety
/// As of [`list`]; each entry is null, or can be read while the result is used.
unsafe fn each(start: *const tidepool_slice, count: usize) -> Option<Vec<&'static [u8]>> {
    // SAFETY: as the caller promised.
    let entries = unsafe { list(start, count) }?;
    // SAFETY: as the caller promised.
    entries.iter().map(|entry| unsafe { bytes(entry.start, entry.length) }).collect()
}

/// # Safety
/// `start` is null, or `count` entries can be read there while the result is used.
unsafe fn list<T>(start: *const T, count: usize) -> Option<&'static [T]> {
    match (start.is_null(), count) {
        (_, 0) => Some(&[]),
        (true, _) => None,
        // SAFETY: as the caller promised.
        (false, _) => Some(unsafe { slice::from_raw_parts(start, count) }),
    }
}
