//! Device memory: the fastest tier, on accelerators.
//!
//! The trait is the boundary to a driver; [`host::HostDevice`] stands in on machines without an accelerator, by
//! explicit setting only, so that a missing driver is an error and never a silent change of tier. The CUDA
//! implementation (driver loaded at run time) is on the roadmap, and with it the placing of objects here.

mod host;

pub use host::HostDevice;

/// A range of device memory. Given back by [`DeviceMemory::free`], not by dropping: the device may outlive the caller.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceAllocation {
    /// Where it starts, in the device's own addresses.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
}

/// What can go wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No room.
    #[error("device {device} has no room for {length} bytes: {free} are free")]
    NoSpace {
        /// Which device.
        device: String,
        /// Bytes asked for.
        length: u64,
        /// Bytes free in all.
        free: u64,
    },
    /// A copy that leaves the allocation.
    #[error("copy of {length} bytes at {offset} leaves the allocation of {allocated} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes from there.
        length: u64,
        /// Length of the allocation in bytes.
        allocated: u64,
    },
    /// The allocation is not one of this device's.
    #[error("address {address:#x} is not allocated on device {device}")]
    NotAllocated {
        /// Which device.
        device: String,
        /// The address.
        address: u64,
    },
}

/// Memory of one device.
///
/// Copies are complete when the call returns. After an error of a copy the target's bytes are undefined, and the
/// allocation is still the caller's. Implementations are called from any thread.
pub trait DeviceMemory: Send + Sync {
    /// The device's name in reports.
    fn name(&self) -> &str;
    /// Bytes in all, and bytes free.
    fn capacity(&self) -> (u64, u64);
    /// Takes `length` bytes.
    ///
    /// # Errors
    /// [`DeviceError::NoSpace`].
    fn allocate(&self, length: u64) -> Result<DeviceAllocation, DeviceError>;
    /// Gives an allocation back.
    ///
    /// # Errors
    /// [`DeviceError::NotAllocated`].
    fn free(&self, allocation: DeviceAllocation) -> Result<(), DeviceError>;
    /// Copies host bytes to `offset` within the allocation.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], [`DeviceError::NotAllocated`].
    fn copy_in(&self, allocation: &DeviceAllocation, offset: u64, source: &[u8]) -> Result<(), DeviceError>;
    /// Copies bytes at `offset` within the allocation to the host.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], [`DeviceError::NotAllocated`].
    fn copy_out(&self, allocation: &DeviceAllocation, offset: u64, target: &mut [u8]) -> Result<(), DeviceError>;
}
