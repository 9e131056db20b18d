//! Objects piece by piece: what need not fit into memory as a whole.

use std::ffi::c_void;
use std::io;

use bytes::{Buf, Bytes};
use futures::stream;
use tidepool_client::{Error, GetOptions, ObjectStream, PutDone, PutOutcome};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::error::{failed, guarded, invalid};
use crate::store::{INTERNAL, MISSING, bytes, put_options, runtime, tidepool_store};

/// Pieces that wait to be sent, and their largest length: writers wait beyond that.
const PIECES: usize = 4;
const PIECE_BYTES: usize = 1 << 20;

/// An object that is being read.
#[expect(non_camel_case_types, reason = "its name in C")]
pub struct tidepool_reader {
    stream: ObjectStream,
    /// What came and was not taken yet.
    rest: Bytes,
}

type Put = JoinHandle<Result<PutDone, Error>>;

/// An object that is being written. The last piece is held back until the end, and the put of an object without bytes is not
/// begun before: what was not ended is stored by no means.
#[expect(non_camel_case_types, reason = "its name in C")]
pub struct tidepool_writer {
    /// `None` once the put has ended.
    pieces: Option<mpsc::Sender<io::Result<Bytes>>>,
    held: Option<Bytes>,
    begin: Option<Box<dyn FnOnce() -> Put>>,
    put: Option<Put>,
    /// The node said before it had all bytes that the key has an object: what comes after that goes nowhere.
    existed: bool,
}

/// Opens `length` bytes of an object from `offset` on for reading (`UINT64_MAX`: to its end): how many will come, with the reader
/// in `reader`; -2 if there is no such object; another code.
///
/// # Safety
/// `store` is a connection; the key can be read; `reader` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_read_begin(
    store: *const tidepool_store,
    key: *const c_void,
    key_length: usize,
    offset: u64,
    length: u64,
    reader: *mut *mut tidepool_reader,
) -> i64 {
    guarded(INTERNAL.into(), || {
        // SAFETY: as the caller promised.
        let (store, key) = unsafe { (store.as_ref(), bytes(key, key_length)) };
        let (Some(store), Some(key), Some(runtime)) = (store, key, runtime()) else {
            return invalid("store or key is null").into();
        };
        if reader.is_null() {
            return invalid("reader is null").into();
        }
        let length = (length != u64::MAX).then_some(length);
        let options = GetOptions { offset, length, ..GetOptions::default() };
        match runtime.block_on(store.client().get_stream(key, options)) {
            Ok(Some(stream)) => {
                let length = stream.length().cast_signed();
                let opened = Box::into_raw(Box::new(tidepool_reader { stream, rest: Bytes::new() }));
                // SAFETY: not null, and may be written.
                unsafe { reader.write(opened) };
                length
            }
            Ok(None) => MISSING.into(),
            Err(error) => failed(&error).into(),
        }
    })
}

/// The next bytes, at most `capacity`: how many; 0 when all came and are what was stored; a code, after which nothing of what
/// came before may be relied on.
///
/// # Safety
/// `reader` is one that nobody else uses meanwhile; the buffer can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_read(reader: *mut tidepool_reader, buffer: *mut c_void, capacity: usize) -> i64 {
    guarded(INTERNAL.into(), || {
        // SAFETY: as the caller promised.
        let (Some(reader), Some(runtime)) = (unsafe { reader.as_mut() }, runtime()) else {
            return invalid("reader is null").into();
        };
        if buffer.is_null() || capacity == 0 {
            return invalid("there is no room to read to").into();
        }
        while reader.rest.is_empty() {
            match runtime.block_on(reader.stream.next()) {
                Ok(Some(piece)) => reader.rest = piece,
                Ok(None) => return 0,
                Err(error) => return failed(&error).into(),
            }
        }
        let length = reader.rest.len().min(capacity);
        // SAFETY: the buffer has room for `capacity` bytes, and is the caller's own.
        unsafe { buffer.cast::<u8>().copy_from_nonoverlapping(reader.rest.as_ptr(), length) };
        reader.rest.advance(length);
        i64::try_from(length).unwrap_or(i64::MAX)
    })
}

/// Ends reading, at any time; null is fine.
///
/// # Safety
/// `reader` came from `tidepool_read_begin`, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_read_end(reader: *mut tidepool_reader) {
    guarded((), || {
        if let (Some(runtime), false) = (runtime(), reader.is_null()) {
            let _inside = runtime.enter();
            // SAFETY: made by `Box::into_raw`, and given up by the caller.
            drop(unsafe { Box::from_raw(reader) });
        }
    });
}

/// Begins to store an object of exactly `length` bytes. 0, with the writer in `writer`; or a code.
///
/// # Safety
/// `store` is a connection; the key can be read; `writer` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_write_begin(
    store: *const tidepool_store,
    key: *const c_void,
    key_length: usize,
    length: u64,
    flags: u32,
    writer: *mut *mut tidepool_writer,
) -> i32 {
    guarded(INTERNAL, || {
        // SAFETY: as the caller promised.
        let (store, key) = unsafe { (store.as_ref(), bytes(key, key_length)) };
        let (Some(store), Some(key), Some(runtime)) = (store, key, runtime()) else {
            return invalid("store or key is null");
        };
        let Some(options) = put_options(flags) else { return invalid("there is no such flag") };
        if writer.is_null() {
            return invalid("writer is null");
        }
        let (client, key) = (store.client().clone(), key.to_vec());
        let (pieces, waiting) = mpsc::channel(PIECES);
        let source = stream::unfold(waiting, |mut waiting| async move { Some((waiting.recv().await?, waiting)) });
        let begin =
            Box::new(move || runtime.spawn(async move { client.put_stream(key, length, source, &options).await }));
        let mut begun =
            tidepool_writer { pieces: Some(pieces), held: None, begin: Some(begin), put: None, existed: false };
        if length > 0 {
            begun.begin();
        }
        // SAFETY: not null, and may be written.
        unsafe { writer.write(Box::into_raw(Box::new(begun))) };
        0
    })
}

/// Writes the next bytes. 0, or a code: then the put has ended, and nothing was stored. The time between two calls must be
/// shorter than the connection's deadline.
///
/// # Safety
/// `writer` is one that nobody else uses meanwhile; the bytes can be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_write(writer: *mut tidepool_writer, start: *const c_void, length: usize) -> i32 {
    guarded(INTERNAL, || {
        // SAFETY: as the caller promised.
        let (writer, given) = unsafe { (writer.as_mut(), bytes(start, length)) };
        let (Some(writer), Some(given)) = (writer, given) else { return invalid("writer or bytes are null") };
        if writer.existed {
            return 0;
        }
        if writer.pieces.is_none() {
            return invalid("the put has ended");
        }
        writer.begin();
        for piece in given.chunks(PIECE_BYTES) {
            let before = writer.held.replace(Bytes::copy_from_slice(piece));
            if let Some(before) = before
                && !writer.send(before)
            {
                return match writer.end() {
                    Ok(PutDone { outcome: PutOutcome::AlreadyExists, .. }) => {
                        writer.existed = true;
                        0
                    }
                    // It can't have been stored before all was written.
                    Ok(_) => INTERNAL,
                    Err(code) => code,
                };
            }
        }
        0
    })
}

/// Ends a put, and lets go of the writer. 1: stored. 0: the key has an object, nothing was written. Else a code: nothing was
/// stored, unless it is -6.
///
/// # Safety
/// `writer` came from `tidepool_write_begin`, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_write_end(writer: *mut tidepool_writer) -> i32 {
    guarded(INTERNAL, || {
        if writer.is_null() {
            return invalid("writer is null");
        }
        // SAFETY: made by `Box::into_raw`, and given up by the caller.
        let mut writer = unsafe { Box::from_raw(writer) };
        if writer.existed {
            return 0;
        }
        match writer.end() {
            Ok(done) => i32::from(done.outcome == PutOutcome::Stored),
            Err(code) => code,
        }
    })
}

/// Gives up a put, and lets go of the writer: nothing is stored. Null is fine.
///
/// # Safety
/// `writer` came from `tidepool_write_begin`, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidepool_write_abandon(writer: *mut tidepool_writer) {
    guarded((), || {
        if !writer.is_null() {
            // SAFETY: made by `Box::into_raw`, and given up by the caller.
            drop(unsafe { Box::from_raw(writer) });
        }
    });
}

impl tidepool_writer {
    fn begin(&mut self) {
        if let Some(begin) = self.begin.take() {
            self.put = Some(begin());
        }
    }

    /// Waits while as many pieces are on their way as may be; false if the put has ended.
    fn send(&self, piece: Bytes) -> bool {
        match (&self.pieces, runtime()) {
            (Some(pieces), Some(runtime)) => runtime.block_on(pieces.send(Ok(piece))).is_ok(),
            _ => false,
        }
    }

    /// Waits for the end of the put, with what is held back as its last bytes.
    fn end(&mut self) -> Result<PutDone, i32> {
        self.begin();
        if let Some(last) = self.held.take() {
            // If it has ended, it says why below.
            self.send(last);
        }
        self.pieces = None;
        let (Some(put), Some(runtime)) = (self.put.take(), runtime()) else {
            return Err(invalid("the put has ended"));
        };
        match runtime.block_on(put) {
            Ok(done) => done.map_err(|error| failed(&error)),
            Err(_panicked) => Err(INTERNAL),
        }
    }
}

impl Drop for tidepool_writer {
    fn drop(&mut self) {
        if let Some(put) = &self.put {
            put.abort();
        }
    }
}
