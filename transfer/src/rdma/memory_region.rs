//! Registered regions as devices know them: in parts, as long as a device takes, registered when first needed.
//!
//! For own transfers and for peers a region is registered apart. The first stays until the last transfer has ended; the
//! second has the region's rights and no more, its keys are nobody else's, and it ends when the region is withdrawn:
//! from then on the device refuses peers, whatever keys they know.

use std::any::Any;
use std::io;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::verbs::{Access, Domain, LocalRange, Part};
use crate::memory::Memory;
use crate::region::Region;
use crate::slice::AccessRights;
use crate::transport::Registration;
use crate::wire;

/// Bytes that an entry of KEY_LIST begins with, and those of each part in it.
const KEYS_HEADER_BYTES: usize = 24;
const KEY_BYTES: usize = 16;

/// A region with one device. See the module.
pub(crate) struct DeviceRegion {
    domain: Arc<Domain>,
    memory: Memory,
    rights: AccessRights,
    part_bytes: u64,
    local: OnceLock<Option<Parts>>,
    remote: Mutex<Remote>,
}

enum Remote {
    Unasked,
    Granted(Parts),
    Revoked,
}

/// A memory, registered from its first byte to its last.
struct Parts(Vec<Arc<Part>>);

impl Parts {
    fn register(region: &DeviceRegion, access: Access) -> io::Result<Self> {
        let length = region.memory.len();
        let starts = (0..length.div_ceil(region.part_bytes)).map(|index| index * region.part_bytes);
        starts
            .map(|start| {
                let part_length = region.part_bytes.min(length - start);
                Ok(Arc::new(Part::register(&region.domain, &region.memory, start, part_length, access)?))
            })
            .collect::<io::Result<_>>()
            .map(Self)
    }
}

impl DeviceRegion {
    pub(crate) fn new(domain: &Arc<Domain>, memory: &Memory, rights: AccessRights, part_bytes: u64) -> Self {
        Self {
            domain: Arc::clone(domain),
            memory: memory.clone(),
            rights,
            part_bytes,
            local: OnceLock::new(),
            remote: Mutex::new(Remote::Unasked),
        }
    }

    /// What a device of the engine keeps for a region.
    pub(crate) fn of(region: &Region, device: usize) -> Option<&Self> {
        let registration: &dyn Any = region.registration(device)?;
        registration.downcast_ref()
    }

    /// Whether own transfers can use it; registers it if nobody did.
    pub(crate) fn is_usable(&self) -> bool {
        self.local().is_some()
    }

    fn local(&self) -> Option<&Parts> {
        let register = || {
            let access = Access { local_write: self.memory.is_writable(), remote_read: false, remote_write: false };
            Parts::register(self, access)
                .inspect_err(|error| tracing::warn!(%error, bytes = self.memory.len(), "no RDMA for this region"))
                .ok()
        };
        self.local.get_or_init(register).as_ref()
    }

    /// The registered range that begins at `offset`: at most `length` bytes, up to the end of its part.
    pub(crate) fn range(&self, offset: u64, length: u64) -> Option<LocalRange> {
        let parts = self.local()?;
        let part = parts.0.get(usize::try_from(offset / self.part_bytes).ok()?)?;
        let offset = offset % self.part_bytes;
        let length = u32::try_from(length.min(part.length().checked_sub(offset)?)).unwrap_or(u32::MAX);
        Some(LocalRange { part: Arc::clone(part), offset, length })
    }

    /// Appends what a peer that may use the region needs of it: an entry of KEY_LIST. Registers it if nobody did.
    ///
    /// # Errors
    /// The device's; `WouldBlock` while another thread registers it; `PermissionDenied` if the region was withdrawn, or gives peers no rights.
    pub(crate) fn keys(&self, device: usize, out: &mut Vec<u8>) -> io::Result<()> {
        let mut remote = self.remote.try_lock().ok_or(io::ErrorKind::WouldBlock)?;
        if matches!(*remote, Remote::Unasked) {
            let access = Access {
                local_write: false,
                remote_read: self.rights.remote_read,
                remote_write: self.rights.remote_write && self.memory.is_writable(),
            };
            if access.remote_read || access.remote_write {
                *remote = Remote::Granted(Parts::register(self, access)?);
            }
        }
        let Remote::Granted(parts) = &*remote else { return Err(io::ErrorKind::PermissionDenied.into()) };
        let bytes = KEYS_HEADER_BYTES + parts.0.len() * KEY_BYTES;
        if (out.len() + bytes) as u64 > wire::KEYS_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        out.extend((device as u64).to_le_bytes());
        out.extend(self.part_bytes.to_le_bytes());
        out.extend((parts.0.len() as u64).to_le_bytes());
        for part in &parts.0 {
            let (address, rkey) = part.remote()?;
            out.extend(address.to_le_bytes());
            out.extend(rkey.to_le_bytes());
            out.extend([0; 4]);
        }
        Ok(())
    }
}

impl Registration for DeviceRegion {
    fn revoke(&self) {
        let granted = std::mem::replace(&mut *self.remote.lock(), Remote::Revoked);
        // Deregisters: the device has let go of it when this returns.
        drop(granted);
    }
}

/// What a peer's devices need to be told to use a region of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RemoteKeys(Vec<OfDevice>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct OfDevice {
    device: u64,
    part_bytes: u64,
    /// Address and key of each part.
    parts: Vec<(u64, u32)>,
}

impl RemoteKeys {
    /// Decodes KEY_LIST. `None` if it is none.
    pub(crate) fn decode(mut bytes: &[u8]) -> Option<Self> {
        let mut devices = Vec::new();
        while !bytes.is_empty() {
            let (header, rest) = bytes.split_first_chunk::<KEYS_HEADER_BYTES>()?;
            let word = |at: usize| u64::from_le_bytes(*header[at..].first_chunk().unwrap_or(&[0; 8]));
            let (device, part_bytes, count) = (word(0), word(8), usize::try_from(word(16)).ok()?);
            let (keys, rest) = rest.split_at_checked(count.checked_mul(KEY_BYTES)?)?;
            let key = |key: &[u8; KEY_BYTES]| {
                let address = key.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
                (address, u32::from_le_bytes([key[8], key[9], key[10], key[11]]))
            };
            let parts = keys.as_chunks::<KEY_BYTES>().0.iter().map(key).collect();
            if part_bytes == 0 {
                return None;
            }
            devices.push(OfDevice { device, part_bytes, parts });
            bytes = rest;
        }
        Some(Self(devices))
    }

    /// Whether a device of the peer lets the region be used.
    pub(crate) fn has(&self, device: u64) -> bool {
        self.0.iter().any(|of| of.device == device)
    }

    /// Where a range of the region begins for a device: address, key, and how many of `length` bytes lie in that part.
    pub(crate) fn range(&self, device: u64, offset: u64, length: u64) -> Option<(u64, u32, u64)> {
        let of = self.0.iter().find(|of| of.device == device)?;
        let (address, rkey) = *of.parts.get(usize::try_from(offset / of.part_bytes).ok()?)?;
        let offset = offset % of.part_bytes;
        Some((address.checked_add(offset)?, rkey, length.min(of.part_bytes - offset)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encoded(device: u64, part_bytes: u64, parts: &[(u64, u32)]) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            [device, part_bytes, parts.len() as u64].iter().flat_map(|n| n.to_le_bytes()).collect();
        for (address, rkey) in parts {
            bytes.extend(address.to_le_bytes());
            bytes.extend(rkey.to_le_bytes());
            bytes.extend([0; 4]);
        }
        bytes
    }

    #[test]
    fn a_range_ends_with_its_part() {
        let mut bytes = encoded(0, 4096, &[(0x1000, 7), (0x9000, 8)]);
        bytes.extend(encoded(2, 8192, &[(0x5000, 9)]));
        let keys = RemoteKeys::decode(&bytes).expect("keys");
        assert_eq!((keys.has(0), keys.has(1), keys.has(2)), (true, false, true));
        assert_eq!(keys.range(0, 100, 10), Some((0x1064, 7, 10)));
        assert_eq!(keys.range(0, 4000, 200), Some((0x1fa0, 7, 96)));
        assert_eq!(keys.range(0, 4096, 200), Some((0x9000, 8, 200)));
        assert_eq!(keys.range(0, 8192, 1), None, "behind the last part");
        assert_eq!(keys.range(1, 0, 1), None);
        assert_eq!(keys.range(2, 4096, 1), Some((0x6000, 9, 1)));
    }

    proptest! {
        #[test]
        fn hostile_keys_do_not_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), small: bool, at: u64) {
            if small && bytes.len() > 24 {
                bytes[16..24].copy_from_slice(&[3, 0, 0, 0, 0, 0, 0, 0]);
            }
            if let Some(keys) = RemoteKeys::decode(&bytes) {
                let _ = keys.range(0, at, 1);
            }
        }
    }
}
