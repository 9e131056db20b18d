//! `View`: memory of this module which other Python objects can look into without a copy. A value as it came, one that lies in a node's
//! memory, or memory that was allocated to put values from.
//!
//! The stable interface lets a class have a buffer since 3.11 only; the slot itself works since 3.9. So the class is made
//! in two steps: `Value` by PyO3, and `View` below it by `PyType_FromSpecWithBases`, which adds the slot and nothing else.
#![expect(unsafe_code, reason = "makes a class by hand and answers for its buffer; each block is argued")]

use std::ffi::CStr;
use std::os::raw::{c_int, c_void};

use bytes::{Bytes, BytesMut};
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use tidepool_client::{LendableMemory, ObjectView};

use crate::buffer::{LARGE, PyBuffer_FillInfo, RawBuffer};
use crate::failure::Reason;
use crate::interpreter::{detach, is_shutting_down};

/// `Py_bf_getbuffer` and `Py_bf_releasebuffer` of CPython's `typeslots.h`.
const BF_GETBUFFER: c_int = 1;
const BF_RELEASEBUFFER: c_int = 2;
const NAME: &CStr = c"tidepool._native.View";

/// A value's bytes, or those of a memory.
#[pyclass(module = "tidepool._native", subclass, frozen)]
pub(crate) struct Value(parking_lot::Mutex<State>);

struct State {
    /// `None` once it was let go.
    bytes: Option<Owned>,
    /// Buffers that look into it.
    buffers: usize,
    /// It goes with the last of them.
    is_released: bool,
}

/// Who has the bytes.
enum Owned {
    Value(BytesMut),
    Memory(LendableMemory),
    Object(ObjectView),
}

impl Owned {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Value(bytes) => bytes,
            Self::Memory(memory) => memory,
            Self::Object(object) => object,
        }
    }

    fn is_read_only(&self) -> bool {
        matches!(self, Self::Object(_))
    }
}

impl State {
    fn bytes(&self) -> PyResult<&Owned> {
        self.bytes.as_ref().filter(|_| !self.is_released).ok_or_else(|| Reason::Closed.error("the view was released"))
    }
}

impl Drop for Value {
    /// Called with the interpreter's lock; large memory is freed without it, because that takes the system a while.
    fn drop(&mut self) {
        let_go(self.0.get_mut().bytes.take());
    }
}

fn let_go(bytes: Option<Owned>) {
    if bytes.as_ref().is_some_and(|bytes| bytes.bytes().len() >= LARGE) && !is_shutting_down() {
        Python::attach(|py| detach(py, || drop(bytes)));
    }
}

#[pymethods]
impl Value {
    /// Takes the bytes of another.
    #[new]
    fn new(source: &Bound<'_, Carrier>) -> PyResult<Self> {
        let bytes = source.get().0.lock().take();
        let bytes = bytes.ok_or_else(|| Reason::BadArgument.error("a view is made by the store"))?;
        Ok(Self(parking_lot::Mutex::new(State { bytes: Some(bytes), buffers: 0, is_released: false })))
    }

    fn __len__(&self) -> PyResult<usize> {
        self.size()
    }

    /// Length in bytes.
    fn size(&self) -> PyResult<usize> {
        Ok(self.0.lock().bytes()?.bytes().len())
    }

    /// Address of the first byte; good while this object lives and is not released.
    fn ptr(&self) -> PyResult<usize> {
        Ok(self.0.lock().bytes()?.bytes().as_ptr().expose_provenance())
    }

    /// Whether the bytes are this process's own, rather than those in a node's memory.
    #[getter]
    fn copied(&self) -> PyResult<bool> {
        Ok(match self.0.lock().bytes()? {
            Owned::Object(object) => object.is_copied(),
            Owned::Value(_) | Owned::Memory(_) => true,
        })
    }

    /// Lets go of the bytes: now, or when the last buffer is gone that looks into them. Again, it does nothing.
    fn release(&self) {
        let mut state = self.0.lock();
        state.is_released = true;
        let bytes = if state.buffers == 0 { state.bytes.take() } else { None };
        drop(state);
        let_go(bytes);
    }

    fn __enter__(this: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        this.get().0.lock().bytes()?;
        Ok(this)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.release();
    }

    fn __repr__(&self) -> String {
        match self.0.lock().bytes() {
            Ok(bytes) => format!("<View of {} bytes>", bytes.bytes().len()),
            Err(_) => "<View, released>".to_owned(),
        }
    }
}

/// Carries bytes into a new `View`.
#[pyclass(module = "tidepool._native", frozen)]
struct Carrier(parking_lot::Mutex<Option<Owned>>);

static VIEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Makes the class and adds it to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("View", VIEW.get_or_try_init(py, || make_class(py))?.bind(py))
}

/// A view of `bytes`.
pub(crate) fn view(py: Python<'_>, bytes: Bytes) -> PyResult<Py<PyAny>> {
    // Nobody shares them as a rule, so that this copies nothing.
    let bytes = bytes.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]));
    made(py, Owned::Value(bytes))
}

/// A view of an object, wherever it lies.
pub(crate) fn view_object(py: Python<'_>, object: ObjectView) -> PyResult<Py<PyAny>> {
    made(py, Owned::Object(object))
}

/// `length` zeroed bytes from which a node on this host can copy ([`LendableMemory`]).
#[pyfunction]
pub(crate) fn allocate(py: Python<'_>, length: usize) -> PyResult<Py<PyAny>> {
    let memory = detach(py, || LendableMemory::allocate(length)).map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidInput => Reason::BadArgument.error("memory has one byte at least"),
        std::io::ErrorKind::OutOfMemory => PyMemoryError::new_err(format!("there are no {length} bytes available")),
        _ => error.into(),
    })?;
    made(py, Owned::Memory(memory))
}

fn made(py: Python<'_>, bytes: Owned) -> PyResult<Py<PyAny>> {
    let carrier = Bound::new(py, Carrier(parking_lot::Mutex::new(Some(bytes))))?;
    let class = VIEW.get_or_try_init(py, || make_class(py))?;
    Ok(class.bind(py).call1((carrier,))?.unbind())
}

fn make_class(py: Python<'_>) -> PyResult<Py<PyAny>> {
    let bases = PyTuple::new(py, [py.get_type::<Value>()])?;
    let mut slots = [
        ffi::PyType_Slot { slot: BF_GETBUFFER, pfunc: get_buffer as *mut c_void },
        ffi::PyType_Slot { slot: BF_RELEASEBUFFER, pfunc: release_buffer as *mut c_void },
        ffi::PyType_Slot { slot: 0, pfunc: std::ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: NAME.as_ptr(),
        // As its base.
        basicsize: 0,
        itemsize: 0,
        flags: (ffi::Py_TPFLAGS_DEFAULT | ffi::Py_TPFLAGS_BASETYPE) as u32,
        slots: slots.as_mut_ptr(),
    };
    // SAFETY: the specification is complete and ends with a null slot, its name is static, and `get_buffer` has the type of
    // its slot (`getbufferproc`), `release_buffer` likewise (`releasebufferproc`). The interpreter copies all of it. Null is checked for.
    unsafe {
        let class = ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr());
        Ok(Bound::from_owned_ptr_or_err(py, class)?.unbind())
    }
}

/// Fills in `view` for the `View` at `object`.
unsafe extern "C" fn get_buffer(object: *mut PyObject, view: *mut RawBuffer, flags: c_int) -> c_int {
    // SAFETY: the interpreter calls its slots attached, with a live object of this class, which is a `Value`; and with a view to be
    // filled in.
    unsafe {
        let py = Python::assume_attached();
        let Ok(value) = Borrowed::from_ptr(py, object).cast::<Value>() else { return -1 };
        let mut state = value.get().0.lock();
        let (address, length, is_read_only) = match state.bytes() {
            Ok(owned) => (owned.bytes().as_ptr(), owned.bytes().len(), owned.is_read_only()),
            Err(error) => {
                drop(state);
                // As the interpreter asks of those that fail.
                (*view).clear_owner();
                error.restore(py);
                return -1;
            }
        };
        // Counted first, and not while it is locked: the call below takes a reference to the object, and may fail.
        state.buffers += 1;
        drop(state);
        // The bytes live as long as a buffer is counted; nothing on this side refers to them while Python may write them (only lengths and
        // addresses are given out).
        let address = address.cast_mut().cast::<c_void>();
        let filled = PyBuffer_FillInfo(view, object, address, length.cast_signed(), is_read_only.into(), flags);
        if filled != 0 {
            value.get().buffer_gone();
        }
        filled
    }
}

/// A buffer of the `View` at `object` is gone.
unsafe extern "C" fn release_buffer(object: *mut PyObject, _view: *mut RawBuffer) {
    // SAFETY: as above.
    if let Ok(value) = unsafe { Borrowed::from_ptr(Python::assume_attached(), object) }.cast::<Value>() {
        value.get().buffer_gone();
    }
}

impl Value {
    fn buffer_gone(&self) {
        let mut state = self.0.lock();
        state.buffers -= 1;
        let bytes = if state.buffers == 0 && state.is_released { state.bytes.take() } else { None };
        drop(state);
        let_go(bytes);
    }
}
