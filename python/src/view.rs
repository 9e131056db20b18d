//! `View`: memory of this module which other Python objects can look into without a copy. A value as it came, or memory that
//! was allocated to put values from.
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
use tidepool_client::LendableMemory;

use crate::buffer::{LARGE, PyBuffer_FillInfo, RawBuffer};
use crate::failure::Reason;
use crate::interpreter::{detach, is_shutting_down};

/// `Py_bf_getbuffer` of CPython's `typeslots.h`.
const BF_GETBUFFER: c_int = 1;
const NAME: &CStr = c"tidepool._native.View";

/// A value's bytes, or those of a memory.
#[pyclass(module = "tidepool._native", subclass, frozen)]
pub(crate) struct Value {
    bytes: Owned,
}

/// Who has the bytes.
enum Owned {
    Value(BytesMut),
    Memory(LendableMemory),
}

impl Owned {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Value(bytes) => bytes,
            Self::Memory(memory) => memory,
        }
    }
}

impl Drop for Value {
    /// Called with the interpreter's lock; large memory is freed without it, because that takes the system a while.
    fn drop(&mut self) {
        if self.bytes.bytes().len() >= LARGE && !is_shutting_down() {
            let bytes = std::mem::replace(&mut self.bytes, Owned::Value(BytesMut::new()));
            Python::attach(|py| detach(py, || drop(bytes)));
        }
    }
}

#[pymethods]
impl Value {
    /// Takes the bytes of another.
    #[new]
    fn new(source: &Bound<'_, Carrier>) -> PyResult<Self> {
        let bytes = source.get().0.lock().take();
        let bytes = bytes.ok_or_else(|| Reason::BadArgument.error("a view is made by the store"))?;
        Ok(Self { bytes })
    }

    fn __len__(&self) -> usize {
        self.bytes.bytes().len()
    }

    /// Length in bytes.
    fn size(&self) -> usize {
        self.bytes.bytes().len()
    }

    /// Address of the first byte; good while this object lives.
    fn ptr(&self) -> usize {
        self.bytes.bytes().as_ptr().expose_provenance()
    }

    fn __repr__(&self) -> String {
        format!("<View of {} bytes>", self.bytes.bytes().len())
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
    // its slot (`getbufferproc`). The interpreter copies all of it. Null is checked for.
    unsafe {
        let class = ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr());
        Ok(Bound::from_owned_ptr_or_err(py, class)?.unbind())
    }
}

/// Fills in `view` for the `View` at `object`.
unsafe extern "C" fn get_buffer(object: *mut PyObject, view: *mut RawBuffer, flags: c_int) -> c_int {
    // SAFETY: the interpreter calls its slots attached, with a live object of this class, which is a `Value`.
    let value = unsafe {
        let object = Borrowed::from_ptr(Python::assume_attached(), object);
        object.cast::<Value>().map(|value| {
            let bytes = value.get().bytes.bytes();
            (bytes.as_ptr().cast_mut().cast::<c_void>(), bytes.len().cast_signed())
        })
    };
    let Ok((address, length)) = value else { return -1 };
    // SAFETY: the bytes live as long as `object`, which the view keeps; nothing on this side refers to them while Python
    // may write them (`Value` is frozen, and gives out lengths and addresses only).
    unsafe { PyBuffer_FillInfo(view, object, address, length, 0, flags) }
}
