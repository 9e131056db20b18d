//! Bytes of Python objects: what has the buffer protocol, lent for as long as a call needs it.
//!
//! The stable interface of CPython has the buffer protocol since 3.11 only, but this package serves 3.9. So its three
//! functions are declared here. They are exported by every CPython 3, and `Py_buffer` has had the same layout since 3.3;
//! 3.11 only promised to keep it.
//!
//! A [`Lent`] may be dropped on any thread, also on those that must never wait for the interpreter. What it holds is then
//! given back by the next thread of Python that comes by ([`release_dropped`]).
#![expect(unsafe_code, reason = "calls the interpreter and sees its memory; each block is argued")]

use std::alloc::{Layout, alloc_zeroed};
use std::mem::MaybeUninit;
use std::os::raw::{c_char, c_int, c_void};

use bytes::Bytes;
use parking_lot::Mutex;
use pyo3::ffi::PyObject;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::interpreter::detach;
use crate::runtime::Origin;

/// `Py_buffer` of CPython's `cpython/object.h` (3.9) and `pybuffer.h` (3.11).
#[repr(C)]
pub(crate) struct RawBuffer {
    pub(crate) buf: *mut c_void,
    obj: *mut PyObject,
    pub(crate) len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

impl RawBuffer {
    /// It has no buffer.
    pub(crate) fn clear_owner(&mut self) {
        self.obj = std::ptr::null_mut();
    }
}

const PYBUF_SIMPLE: c_int = 0;
const PYBUF_WRITABLE: c_int = 1;

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
    pub(crate) fn PyBuffer_FillInfo(
        view: *mut RawBuffer,
        exporter: *mut PyObject,
        buf: *mut c_void,
        len: isize,
        readonly: c_int,
        flags: c_int,
    ) -> c_int;
}

/// The contiguous bytes of a Python object, which keeps them where they are while this lives.
pub(crate) struct Lent {
    /// `None` once it was given up.
    view: Option<Box<RawBuffer>>,
    origin: Origin,
}

// SAFETY: the view is only read (`buf`, `len`) without the interpreter's lock, and given back with it.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

/// Dropped without the interpreter's lock. As many as there are calls under way, at most.
static DROPPED: Mutex<Vec<Dropped>> = Mutex::new(Vec::new());

struct Dropped(Box<RawBuffer>);

// SAFETY: as for `Lent`.
unsafe impl Send for Dropped {}

impl Lent {
    /// Borrows `object`'s bytes for reading.
    ///
    /// # Errors
    /// `TypeError` if it has no buffer, `BufferError` if that is not contiguous.
    pub(crate) fn read(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::lend(object, PYBUF_SIMPLE)
    }

    /// Borrows `object`'s bytes for writing.
    ///
    /// # Errors
    /// As [`Lent::read`]; `BufferError` if they are read-only.
    pub(crate) fn write(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::lend(object, PYBUF_WRITABLE)
    }

    fn lend(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut view = Box::new(MaybeUninit::<RawBuffer>::zeroed());
        // SAFETY: `object` is alive and the interpreter's lock is held (`Bound`); the view is ours and large enough, and
        // stays at its address until it is released.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: the call succeeded, so the view is filled in.
        let view = unsafe { Box::from_raw(Box::into_raw(view).cast::<RawBuffer>()) };
        Ok(Self { view: Some(view), origin: Origin::here() })
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.view.as_ref().map_or(0, |view| view.len.unsigned_abs())
    }

    /// The bytes. Python code that changes them meanwhile gets what it asked for: unspecified bytes are stored, or the
    /// store refuses them for their checksum.
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.view {
            // SAFETY: the exporter keeps `len` contiguous bytes at `buf` until the view is released.
            Some(view) if view.len > 0 => unsafe {
                std::slice::from_raw_parts(view.buf.cast(), view.len.unsigned_abs())
            },
            _ => &[],
        }
    }

    /// The bytes, for writing. Only for those that were borrowed so; what two calls write at once is unspecified.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match &self.view {
            // SAFETY: as for `bytes`, and they are writable: only `write` lends for that.
            Some(view) if view.len > 0 && view.readonly == 0 => unsafe {
                std::slice::from_raw_parts_mut(view.buf.cast(), view.len.unsigned_abs())
            },
            _ => &mut [],
        }
    }

    /// These bytes without a copy; borrowed until the last piece of them is dropped.
    pub(crate) fn into_shared(self) -> Bytes {
        if self.len() == 0 { Bytes::new() } else { Bytes::from_owner(self) }
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(view) = self.view.take() {
            if self.origin.is_here() {
                DROPPED.lock().push(Dropped(view));
            } else {
                // Its objects were copied into this process by a fork; the lock over them may be held for ever.
                std::mem::forget(view);
            }
        }
    }
}

/// Gives back what was dropped by threads without the interpreter's lock.
pub(crate) fn release_dropped(_py: Python<'_>) {
    let dropped = std::mem::take(&mut *DROPPED.lock());
    for mut view in dropped {
        // SAFETY: the view was filled in by `PyObject_GetBuffer` and is released once; the interpreter's lock is held.
        unsafe { PyBuffer_Release(&raw mut *view.0) };
    }
}

/// As many bytes and more are copied, and freed, without the interpreter's lock.
pub(crate) const LARGE: usize = 256 << 10;
/// Values of at most this many bytes are copied to be sent: cheaper than keeping their object.
const SMALL: usize = 4096;

/// A new `bytes` with these bytes; large ones are copied without the interpreter's lock.
pub(crate) fn new_bytes(py: Python<'_>, value: &[u8]) -> PyResult<Py<PyBytes>> {
    if value.len() < LARGE {
        return Ok(PyBytes::new(py, value).unbind());
    }
    let length = isize::try_from(value.len())?;
    // SAFETY: a new object of that length, whose bytes are not set yet; null is checked for by `from_owned_ptr_or_err`.
    let made = unsafe {
        let object = pyo3::ffi::PyBytes_FromStringAndSize(std::ptr::null(), length);
        Bound::from_owned_ptr_or_err(py, object)?.cast_into_unchecked::<PyBytes>()
    };
    // SAFETY: `made` is a `bytes`, so this is the address of its bytes, `length` of them.
    let target = unsafe { pyo3::ffi::PyBytes_AsString(made.as_ptr()) }.expose_provenance();
    detach(py, || {
        // SAFETY: nobody else has seen the new object yet, so its bytes may be written; both are `length` bytes long and
        // don't overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(value.as_ptr(), std::ptr::with_exposed_provenance_mut(target), value.len())
        }
    });
    Ok(made.unbind())
}

/// `length` zeros; of many, the system makes the pages when they are used. `None`: there is no memory.
pub(crate) fn zeroed(length: usize) -> Option<Vec<u8>> {
    if length == 0 {
        return Some(Vec::new());
    }
    let layout = Layout::array::<u8>(length).ok()?;
    // SAFETY: the layout has bytes.
    let bytes = unsafe { alloc_zeroed(layout) };
    // SAFETY: they were allocated just now as an array of `length` bytes is, all of them set; null is looked for first.
    (!bytes.is_null()).then(|| unsafe { Vec::from_raw_parts(bytes, length, length) })
}

/// The bytes of `object`, ready to be sent: shared with the object if they can be.
pub(crate) fn to_send(object: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    if let Ok(bytes) = object.cast::<PyBytes>()
        && bytes.as_bytes().len() <= SMALL
    {
        return Ok(Bytes::copy_from_slice(bytes.as_bytes()));
    }
    if object.is_instance_of::<pyo3::types::PyString>() {
        let words = "a value is bytes-like, not str: encode it";
        return Err(pyo3::exceptions::PyTypeError::new_err(words));
    }
    let lent = Lent::read(object)?;
    if lent.len() <= SMALL {
        return Ok(Bytes::copy_from_slice(lent.bytes()));
    }
    Ok(lent.into_shared())
}
