//! Memory that programs name by its address: registered, to be sent from where it lies, or copied.
#![expect(unsafe_code, reason = "memory by address is the program's word; each block is argued")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};

use crate::code::INVALID_PARAMS;

/// How long unregistering waits for calls that still use the memory: those whose deadline has passed.
const PATIENCE: Duration = Duration::from_secs(5);

/// A registered range.
struct Region {
    length: usize,
    /// Values on their way that lie in it.
    uses: usize,
}

/// Which memory is registered.
#[derive(Default)]
pub(crate) struct Registry {
    regions: Mutex<BTreeMap<usize, Region>>,
    given_back: Condvar,
}

impl Registry {
    /// Registers a range. Overlapping ones are refused.
    pub(crate) fn register(&self, start: usize, length: usize) -> Result<(), i32> {
        let end = start.checked_add(length).filter(|_| start != 0 && length > 0).ok_or(INVALID_PARAMS)?;
        let mut regions = self.regions.lock();
        let before = regions.range(..end).next_back();
        if before.is_some_and(|(other, region)| other + region.length > start) {
            return Err(INVALID_PARAMS);
        }
        regions.insert(start, Region { length, uses: 0 });
        Ok(())
    }

    /// Unregisters the range that starts there, once nothing uses it.
    pub(crate) fn unregister(&self, start: usize) -> Result<(), i32> {
        let until = Instant::now() + PATIENCE;
        let mut regions = self.regions.lock();
        loop {
            let uses = regions.get(&start).map(|region| region.uses).ok_or(INVALID_PARAMS)?;
            if uses == 0 {
                regions.remove(&start);
                return Ok(());
            }
            if self.given_back.wait_until(&mut regions, until).timed_out() {
                return Err(INVALID_PARAMS);
            }
        }
    }

    /// The bytes there as a value to send: without a copy if they are registered.
    ///
    /// # Safety
    /// `length` bytes can be read at `start` during this call, and as long as they are registered; nobody writes them before
    /// the call ends that they are for.
    pub(crate) unsafe fn value(self: &Arc<Self>, start: *const c_void, length: usize) -> Result<Bytes, i32> {
        if length == 0 || start.is_null() {
            return Err(INVALID_PARAMS);
        }
        if let Some(loan) = self.lend(start as usize, length) {
            return Ok(Bytes::from_owner(loan));
        }
        // SAFETY: as the caller promised.
        Ok(Bytes::copy_from_slice(unsafe { std::slice::from_raw_parts(start.cast(), length) }))
    }

    fn lend(self: &Arc<Self>, start: usize, length: usize) -> Option<Loan> {
        let mut regions = self.regions.lock();
        let (&region_start, region) = regions.range_mut(..=start).next_back()?;
        if start.checked_add(length)? > region_start + region.length {
            return None;
        }
        region.uses += 1;
        Some(Loan { registry: Arc::clone(self), region: region_start, start, length })
    }
}

/// Part of a registered range that a value lies in. The range stays registered while this lives.
struct Loan {
    registry: Arc<Registry>,
    region: usize,
    start: usize,
    length: usize,
}

impl AsRef<[u8]> for Loan {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: in a registered range, which can be read until `unregister` has returned, and that waits for this to drop.
        // Whoever registered it does not write what is on its way; if it does all the same, the sum that is sent with the
        // bytes does not fit them, and they are refused.
        unsafe { std::slice::from_raw_parts(self.start as *const u8, self.length) }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(region) = self.registry.regions.lock().get_mut(&self.region) {
            region.uses -= 1;
        }
        self.registry.given_back.notify_all();
    }
}

/// Memory to read an object to, for one call.
///
/// # Safety
/// `length` bytes can be written at `start`, and nobody else uses them, until the call has ended that this is given to.
pub(crate) unsafe fn target(start: *mut c_void, length: usize) -> Result<&'static mut [u8], i32> {
    match (start.is_null(), length) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(INVALID_PARAMS),
        // SAFETY: as the caller promised.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts_mut(start.cast(), length) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap_and_stay_while_they_are_used() {
        let memory = vec![7_u8; 4096];
        let (start, registry) = (memory.as_ptr() as usize, Arc::new(Registry::default()));
        registry.register(start, 1024).expect("free");
        for (other, length) in
            [(start + 1023, 1), (start, 1024), (start + 100, 4), (start, 0), (0, 10), (start, usize::MAX)]
        {
            assert_eq!(registry.register(other, length), Err(INVALID_PARAMS));
        }
        registry.register(start + 1024, 1024).expect("its neighbour");
        // SAFETY: it lives until the end.
        let (lent, copied) = unsafe {
            let place = |offset| memory.as_ptr().wrapping_add(offset).cast();
            (registry.value(place(10), 100).expect("there"), registry.value(place(1000), 100).expect("there"))
        };
        assert_eq!(lent.as_ptr() as usize, start + 10, "without a copy");
        assert_ne!(copied.as_ptr() as usize, start + 1000, "over the end of a range: a copy");
        assert!(lent[..] == memory[..100] && copied[..] == memory[..100]);
        let waiting = {
            let registry = Arc::clone(&registry);
            std::thread::spawn(move || registry.unregister(start))
        };
        drop(lent);
        assert_eq!(waiting.join().expect("no panic"), Ok(()));
        assert_eq!(registry.unregister(start), Err(INVALID_PARAMS), "it is gone");
        registry.register(start, 1024).expect("free again");
    }
}
