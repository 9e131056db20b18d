//! Where the bytes of objects lie on one node: device, DRAM and NVMe.

pub mod io;
pub mod memory;
pub mod nvme;
