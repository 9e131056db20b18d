//! Memory by its address, as integrations that know no Python objects name it.
//!
//! Who gives an address vouches for it; what can be checked is checked, so that a mistake is an error and not a crash:
//! - Unregistered ranges are copied by the kernel ([`copy_in`], [`copy_out`]), which answers EFAULT where a copy of our own
//!   would be killed.
//! - [`Registry`]: ranges whose owner promised to keep them until they are unregistered. They are read and written without
//!   a copy between. Registering looks at what is mapped there; each use looks again, which catches memory that was given
//!   back to the system meanwhile.
#![expect(unsafe_code, reason = "reads and writes memory by address; each block is argued")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;

use crate::buffer::{Lent, new_bytes, release_dropped, zeroed};
use crate::failure::Reason;
use crate::interpreter::detach;

/// Most ranges that one process can register.
const RANGES: usize = 65_536;
const PAGE: usize = 4096;

/// A range of this process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Of the first byte.
    pub(crate) address: usize,
    /// In bytes.
    pub(crate) length: usize,
}

impl Span {
    /// # Errors
    /// `BAD_ADDRESS` for null and for what reaches past the end of the address space.
    pub(crate) fn new(address: usize, length: usize) -> PyResult<Self> {
        if length > 0 && address == 0 || address.checked_add(length).is_none_or(|end| end > isize::MAX.unsigned_abs()) {
            return Err(bad_address(address, length));
        }
        Ok(Self { address, length })
    }

    fn end(self) -> usize {
        self.address + self.length
    }
}

fn bad_address(address: usize, length: usize) -> PyErr {
    Reason::BadAddress.error(&format!("there is no memory of {length} bytes at {address:#x}"))
}

/// What the call could not reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault(pub(crate) Span);

impl Fault {
    pub(crate) fn error(self) -> PyErr {
        bad_address(self.0.address, self.0.length)
    }
}

/// Copies bytes at an address that need not be good to `target`, which has as many.
pub(crate) fn copy_in(span: Span, target: &mut [u8]) -> Result<(), Fault> {
    assert_eq!(target.len(), span.length, "room for other bytes than are copied");
    let local = libc::iovec { iov_base: target.as_mut_ptr().cast(), iov_len: span.length };
    by_kernel(span, local, libc::process_vm_readv)
}

/// Copies `source` to an address that need not be good.
pub(crate) fn copy_out(source: &[u8], span: Span) -> Result<(), Fault> {
    let span = Span { length: source.len().min(span.length), ..span };
    let local = libc::iovec { iov_base: source.as_ptr().cast_mut().cast(), iov_len: span.length };
    by_kernel(span, local, libc::process_vm_writev)
}

type Copy = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

/// All of it, or a fault.
fn by_kernel(span: Span, local: libc::iovec, copy: Copy) -> Result<(), Fault> {
    let mut done = 0;
    while done < span.length {
        let left = span.length - done;
        let there = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(span.address + done), iov_len: left };
        // SAFETY: `local` has `span.length` bytes, of which `done` are behind.
        let base = unsafe { local.iov_base.cast::<u8>().add(done) };
        let here = libc::iovec { iov_base: base.cast(), iov_len: left };
        // SAFETY: the local range is ours: readable for a write, writable for a read. The other one is checked by the kernel
        // page by page. It may be memory of ours whose address was given out (a `View`, registered memory): who names it
        // vouches that it is theirs to change, as with every address. What a call reads there then is unspecified bytes, as
        // where Python changes a buffer that it lends (`Lent::bytes`).
        let moved = unsafe { copy(libc::getpid(), &raw const here, 1, &raw const there, 1, 0) };
        match usize::try_from(moved) {
            Ok(moved) if moved > 0 => done += moved,
            _ => return Err(Fault(span)),
        }
    }
    Ok(())
}

/// Whether something is mapped in all of the range now: asked before room is made for it, because a length may be nonsense.
pub(crate) fn is_mapped(span: Span) -> bool {
    if span.length == 0 {
        return true;
    }
    let start = span.address & !(PAGE - 1);
    // SAFETY: asks the kernel to do nothing (MS_ASYNC has had no effect since 2.6.19) but to look whether all is mapped.
    unsafe { libc::msync(std::ptr::with_exposed_provenance_mut(start), span.end() - start, libc::MS_ASYNC) == 0 }
}

/// A registered range.
#[derive(Debug)]
struct Registered {
    span: Span,
    writable: bool,
    uses: Mutex<usize>,
    unused: Condvar,
}

/// A part of a registered range, which is waited for when the range is unregistered.
#[derive(Debug)]
pub(crate) struct Use {
    span: Span,
    range: Arc<Registered>,
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut uses = self.range.uses.lock();
        *uses -= 1;
        if *uses == 0 {
            self.range.unused.notify_all();
        }
    }
}

impl Use {
    /// Bytes of the range without a copy. They are the caller's until the last piece is dropped, which unregistering
    /// waits for.
    pub(crate) fn into_shared(self) -> Bytes {
        if self.span.length == 0 { Bytes::new() } else { Bytes::from_owner(self) }
    }

    /// The same for writing; `None` if the memory is read-only.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        // SAFETY: as for `as_ref`; it was mapped writable when it was registered.
        self.range.writable.then(|| unsafe {
            std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.span.address), self.span.length)
        })
    }
}

impl AsRef<[u8]> for Use {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: who registered the range promised that it stays readable memory until it is unregistered, which waits
        // for this; it was mapped a moment ago. Its owner changes it at the cost of unspecified bytes.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.span.address), self.span.length) }
    }
}

/// The ranges that were registered with one store.
#[derive(Debug, Default)]
pub(crate) struct Registry(Mutex<BTreeMap<usize, Arc<Registered>>>);

impl Registry {
    /// # Errors
    /// `BAD_ADDRESS`: nothing readable is mapped in part of it. `OVERLAP`. `OVERLOADED`: too many.
    pub(crate) fn register(&self, address: usize, length: usize) -> PyResult<()> {
        let span = Span::new(address, length)?;
        if length == 0 {
            return Err(bad_address(address, length));
        }
        let writable = mapped_rights(span).ok_or_else(|| bad_address(address, length))?;
        let mut ranges = self.0.lock();
        let before = ranges.range(..span.end()).next_back();
        if let Some((_, other)) = before.filter(|(_, other)| other.span.end() > address) {
            let Span { address, length } = other.span;
            let words = format!("it overlaps the {length} registered bytes at {address:#x}");
            drop(ranges);
            return Err(Reason::Overlap.error(&words));
        }
        if ranges.len() >= RANGES {
            drop(ranges);
            return Err(Reason::Overloaded.error(&format!("{RANGES} ranges are registered already")));
        }
        let (uses, unused) = (Mutex::new(0), Condvar::new());
        ranges.insert(address, Arc::new(Registered { span, writable, uses, unused }));
        Ok(())
    }

    /// Takes the range at `address` out and waits until no call uses it.
    ///
    /// # Errors
    /// `NOT_REGISTERED`. `IN_USE`: a call still uses it after `patience`; its memory must be kept.
    pub(crate) fn unregister(&self, address: usize, patience: Duration) -> PyResult<()> {
        let range = self.0.lock().remove(&address);
        let Some(range) = range else {
            return Err(Reason::NotRegistered.error(&format!("nothing is registered at {address:#x}")));
        };
        let until = Instant::now() + patience;
        let mut uses = range.uses.lock();
        let timed_out = range.unused.wait_while_until(&mut uses, |uses| *uses > 0, until).timed_out();
        drop(uses);
        if timed_out {
            return Err(Reason::InUse.error(&format!("a call still uses the memory at {address:#x}")));
        }
        Ok(())
    }

    /// The use of `span`, if it lies in a registered range and is still mapped.
    pub(crate) fn find(&self, span: Span) -> Option<Use> {
        let used = {
            let ranges = self.0.lock();
            let (_, range) = ranges.range(..=span.address).next_back()?;
            if span.end() > range.span.end() {
                return None;
            }
            // Counted while the table is locked: a removal from it sees this use.
            *range.uses.lock() += 1;
            Use { span, range: Arc::clone(range) }
        };
        is_mapped(span).then_some(used)
    }

    /// Forgets all ranges.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}

/// Whether all of the range can be written; `None` if not all of it can be read.
pub(crate) fn mapped_rights(span: Span) -> Option<bool> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let (mut covered, mut writable) = (span.address, true);
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (range, rights) = (words.next()?, words.next()?);
        let (start, end) = range.split_once('-')?;
        let Range { start, end } = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        if end <= covered {
            continue;
        }
        if start > covered || !rights.starts_with('r') {
            return None;
        }
        writable &= rights.as_bytes().get(1) == Some(&b'w');
        covered = end;
        if covered >= span.end() {
            return Some(writable);
        }
    }
    None
}

/// The `length` bytes at `address`, copied by the kernel.
#[pyfunction]
pub(crate) fn read_memory(py: Python<'_>, address: usize, length: usize) -> PyResult<Py<PyAny>> {
    let span = Span::new(address, length)?;
    let copied = detach(py, || {
        let room = is_mapped(span).then(|| zeroed(length)).flatten();
        let mut bytes = room.ok_or(Fault(span))?;
        copy_in(span, &mut bytes).map(|()| bytes)
    });
    Ok(new_bytes(py, &copied.map_err(Fault::error)?)?.into_any())
}

/// Copies `value` to `address`, by the kernel.
#[pyfunction]
pub(crate) fn write_memory(py: Python<'_>, address: usize, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let lent = Lent::read(value)?;
    let span = Span::new(address, lent.len())?;
    detach(py, || copy_out(lent.bytes(), span)).map_err(Fault::error)?;
    release_dropped(py);
    Ok(())
}
