//! A device made of host memory, for machines without an accelerator and for tests.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use super::{DeviceAllocation, DeviceError, DeviceMemory};

/// Host memory that behaves like a device's: bounded, addressed by the device's own numbers, reached by copies only.
#[derive(Debug)]
pub struct HostDevice {
    name: String,
    capacity: u64,
    state: Mutex<Allocations>,
}

#[derive(Debug, Default)]
struct Allocations {
    by_address: BTreeMap<u64, Box<[u8]>>,
    used: u64,
    /// Addresses are never given twice, so that a stale one is found out.
    next_address: u64,
}

impl HostDevice {
    /// A device of `capacity` bytes; memory is taken as it is allocated.
    #[must_use]
    pub fn new(name: impl Into<String>, capacity: u64) -> Self {
        let state = Allocations { next_address: 0x1000, ..Allocations::default() };
        Self { name: name.into(), capacity, state: Mutex::new(state) }
    }

    fn not_allocated(&self, address: u64) -> DeviceError {
        DeviceError::NotAllocated { device: self.name.clone(), address }
    }
}

fn range(bytes: &[u8], offset: u64, length: usize) -> Result<std::ops::Range<usize>, DeviceError> {
    let out_of_range = || DeviceError::OutOfRange { offset, length: length as u64, allocated: bytes.len() as u64 };
    let start = usize::try_from(offset).map_err(|_| out_of_range())?;
    let end = start.checked_add(length).filter(|&end| end <= bytes.len()).ok_or_else(out_of_range)?;
    Ok(start..end)
}

impl DeviceMemory for HostDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn capacity(&self) -> (u64, u64) {
        (self.capacity, self.capacity - self.state.lock().used)
    }

    fn allocate(&self, length: u64) -> Result<DeviceAllocation, DeviceError> {
        let mut state = self.state.lock();
        let free = self.capacity - state.used;
        let size = usize::try_from(length).ok().filter(|_| length <= free);
        let Some(size) = size else {
            return Err(DeviceError::NoSpace { device: self.name.clone(), length, free });
        };
        let address = state.next_address;
        state.next_address += length.max(1);
        state.used += length;
        state.by_address.insert(address, vec![0; size].into_boxed_slice());
        Ok(DeviceAllocation { address, length })
    }

    fn free(&self, allocation: DeviceAllocation) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        let freed = state.by_address.remove(&allocation.address);
        let freed = freed.ok_or_else(|| self.not_allocated(allocation.address))?;
        state.used -= freed.len() as u64;
        Ok(())
    }

    fn copy_in(&self, allocation: &DeviceAllocation, offset: u64, source: &[u8]) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        let bytes = state.by_address.get_mut(&allocation.address);
        let bytes = bytes.ok_or_else(|| self.not_allocated(allocation.address))?;
        let range = range(bytes, offset, source.len())?;
        bytes[range].copy_from_slice(source);
        Ok(())
    }

    fn copy_out(&self, allocation: &DeviceAllocation, offset: u64, target: &mut [u8]) -> Result<(), DeviceError> {
        let state = self.state.lock();
        let bytes = state.by_address.get(&allocation.address);
        let bytes = bytes.ok_or_else(|| self.not_allocated(allocation.address))?;
        target.copy_from_slice(&bytes[range(bytes, offset, target.len())?]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_room_is_given_back() {
        let device = HostDevice::new("host:0", 100);
        let allocation = device.allocate(60).expect("fits");
        assert!(matches!(device.allocate(60), Err(DeviceError::NoSpace { free: 40, .. })));
        device.copy_in(&allocation, 10, b"block").expect("in range");
        let mut read = [0; 5];
        device.copy_out(&allocation, 10, &mut read).expect("in range");
        assert_eq!(&read, b"block");
        device.free(allocation).expect("allocated");
        assert_eq!(device.capacity(), (100, 100));
    }

    #[test]
    fn copies_stay_within_their_allocation() {
        let device = HostDevice::new("host:0", 100);
        let allocation = device.allocate(10).expect("fits");
        assert!(matches!(device.copy_in(&allocation, 8, b"abc"), Err(DeviceError::OutOfRange { .. })));
        assert!(matches!(device.copy_out(&allocation, u64::MAX, &mut [0]), Err(DeviceError::OutOfRange { .. })));
        let stale = DeviceAllocation { address: allocation.address, length: allocation.length };
        device.free(allocation).expect("allocated");
        assert!(matches!(device.copy_in(&stale, 0, b"a"), Err(DeviceError::NotAllocated { .. })));
    }
}
