//! Registered regions: what peers and requests may use, until it is withdrawn.
//!
//! A region counts its uses: each running batch and each frame being served holds a [`RegionUse`]. Withdrawing takes
//! the id out of the table, so that nothing new begins, and then waits for the uses.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex, RwLock};

use crate::error::{Failure, TransferError};
use crate::file::SegmentFile;
use crate::memory::Memory;
use crate::slice::{AccessRights, Direction, RegionId, RegionKey, check_range};
use crate::slots::Slots;
use crate::transport::Registration;

/// A region was withdrawn when this bit of its uses is set.
const WITHDRAWN: u64 = 1 << 63;

/// Where a region's bytes lie.
#[derive(Debug)]
pub(crate) enum Backing {
    Memory(Memory),
    File(Arc<SegmentFile>),
}

/// A registered region.
pub(crate) struct Region {
    pub(crate) id: RegionId,
    pub(crate) key: RegionKey,
    pub(crate) rights: AccessRights,
    /// One for each device of the engine, none for files; dropped before the memory.
    registrations: Box<[Option<Box<dyn Registration>>]>,
    backing: Backing,
    name: Option<String>,
    uses: AtomicU64,
    idle: Mutex<()>,
    became_idle: Condvar,
}

/// Keeps a region in use, and its memory with it.
#[derive(Debug)]
pub(crate) struct RegionUse(Arc<Region>);

impl RegionUse {
    /// Begins a use, unless the region was withdrawn.
    pub(crate) fn begin(region: &Arc<Region>) -> Option<Self> {
        // Counted first, looked at then: a withdrawal sees this use, or this use sees the withdrawal.
        let before = region.uses.fetch_add(1, Ordering::AcqRel);
        let used = Self(Arc::clone(region));
        if before & WITHDRAWN == 0 { Some(used) } else { None }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.0
    }
}

impl Drop for RegionUse {
    fn drop(&mut self) {
        if self.0.uses.fetch_sub(1, Ordering::AcqRel) == WITHDRAWN + 1 {
            // The lock orders this with the check of a waiter that is about to sleep.
            drop(self.0.idle.lock());
            self.0.became_idle.notify_all();
        }
    }
}

impl Backing {
    pub(crate) fn length(&self) -> u64 {
        match self {
            Self::Memory(memory) => memory.len(),
            Self::File(file) => file.length(),
        }
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("id", &self.id).field("rights", &self.rights).finish_non_exhaustive()
    }
}

impl Region {
    /// Bytes.
    pub(crate) fn length(&self) -> u64 {
        self.backing.length()
    }

    /// Its memory, unless it is a file.
    pub(crate) fn memory(&self) -> Option<&Memory> {
        match &self.backing {
            Backing::Memory(memory) => Some(memory),
            Backing::File(_) => None,
        }
    }

    /// Its file, if it is one.
    pub(crate) fn file(&self) -> Option<&Arc<SegmentFile>> {
        match &self.backing {
            Backing::Memory(_) => None,
            Backing::File(file) => Some(file),
        }
    }

    fn is_writable(&self) -> bool {
        match &self.backing {
            Backing::Memory(memory) => memory.is_writable(),
            Backing::File(file) => file.is_writable(),
        }
    }

    /// What a device of the engine keeps for it; `None` if it could not register it.
    #[cfg(feature = "rdma")]
    pub(crate) fn registration(&self, device: usize) -> Option<&dyn Registration> {
        self.registrations.get(device)?.as_deref()
    }

    /// Waits until nothing uses it; `false` if something still does at `until`.
    pub(crate) fn wait_until_unused(&self, until: Instant) -> bool {
        let mut idle = self.idle.lock();
        while self.uses.load(Ordering::Acquire) & !WITHDRAWN != 0 {
            if self.became_idle.wait_until(&mut idle, until).timed_out() {
                return self.uses.load(Ordering::Acquire) & !WITHDRAWN == 0;
            }
        }
        true
    }
}

/// All regions of an engine.
#[derive(Debug)]
pub(crate) struct Regions {
    table: RwLock<Table>,
    limit: usize,
}

#[derive(Debug)]
struct Table {
    slots: Slots<Arc<Region>>,
    names: HashMap<String, RegionId>,
    bytes: u64,
}

impl Regions {
    pub(crate) fn new(limit: usize) -> Self {
        Self { table: RwLock::new(Table { slots: Slots::new(limit), names: HashMap::new(), bytes: 0 }), limit }
    }

    /// Registers memory or a file under a new id and key, with what the devices keep for it: `with_devices` pins its pages,
    /// so it is asked only once nothing stands against the region.
    pub(crate) fn register(
        &self,
        backing: Backing,
        with_devices: impl FnOnce(&Backing) -> Box<[Option<Box<dyn Registration>>]>,
        rights: AccessRights,
        name: Option<&str>,
    ) -> Result<Arc<Region>, TransferError> {
        let bytes = backing.length();
        let key = RegionKey(crate::stream::random().map_err(TransferError::system("draw a key"))?);
        self.check_room(&self.table.read(), name)?;
        let registrations = with_devices(&backing);
        let mut table = self.table.write();
        // Others may have registered meanwhile: pinning takes its time.
        self.check_room(&table, name)?;
        let handle = table.slots.insert_with(|handle| {
            Arc::new(Region {
                id: RegionId(handle),
                key,
                rights,
                registrations,
                backing,
                name: name.map(str::to_owned),
                uses: AtomicU64::new(0),
                idle: Mutex::new(()),
                became_idle: Condvar::new(),
            })
        });
        let handle = handle.ok_or(TransferError::Full { what: "regions", limit: self.limit })?;
        table.bytes += bytes;
        if let Some(name) = name {
            table.names.insert(name.to_owned(), RegionId(handle));
        }
        let region = table.slots.get(handle).map(Arc::clone);
        region.ok_or(TransferError::UnknownRegion(RegionId(handle)))
    }

    fn check_room(&self, table: &Table, name: Option<&str>) -> Result<(), TransferError> {
        match name {
            Some(name) if table.names.contains_key(name) => Err(TransferError::NameTaken(name.to_owned())),
            _ if table.slots.len() >= self.limit => Err(TransferError::Full { what: "regions", limit: self.limit }),
            _ => Ok(()),
        }
    }

    /// Takes a region out: its id is stale from here on, and no use begins any more.
    pub(crate) fn withdraw(&self, id: RegionId) -> Result<Arc<Region>, TransferError> {
        let mut table = self.table.write();
        let region = table.slots.remove(id.0).ok_or(TransferError::UnknownRegion(id))?;
        table.bytes -= region.length();
        if let Some(name) = &region.name {
            table.names.remove(name);
        }
        region.uses.fetch_or(WITHDRAWN, Ordering::AcqRel);
        drop(table);
        region.registrations.iter().flatten().for_each(|registration| registration.revoke());
        Ok(region)
    }

    /// Takes all regions out.
    pub(crate) fn withdraw_all(&self) -> Vec<Arc<Region>> {
        let ids: Vec<_> = self.table.read().slots.values().map(|region| region.id).collect();
        ids.into_iter().filter_map(|id| self.withdraw(id).ok()).collect()
    }

    pub(crate) fn get(&self, id: RegionId) -> Option<Arc<Region>> {
        self.table.read().slots.get(id.0).map(Arc::clone)
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<Arc<Region>> {
        let table = self.table.read();
        let id = table.names.get(name)?;
        table.slots.get(id.0).map(Arc::clone)
    }

    /// Registered regions and bytes.
    pub(crate) fn totals(&self) -> (usize, u64) {
        let table = self.table.read();
        (table.slots.len(), table.bytes)
    }

    /// What a peer that names `id` and `key` gets: the region, if the access is granted and inside.
    pub(crate) fn admit(&self, access: &RemoteAccess) -> Result<RegionUse, Failure> {
        let table = self.table.read();
        let region = table.slots.get(access.region.0).ok_or(Failure::NoRegion)?;
        access.check(region)?;
        RegionUse::begin(region).ok_or(Failure::NoRegion)
    }
}

/// What a peer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteAccess {
    pub(crate) direction: Direction,
    pub(crate) region: RegionId,
    pub(crate) key: RegionKey,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl RemoteAccess {
    /// Checks key, right and bounds. A wrong key says no more than a wrong id.
    pub(crate) fn check(&self, region: &Region) -> Result<(), Failure> {
        if region.id != self.region || region.key != self.key {
            return Err(Failure::NoRegion);
        }
        let granted = match self.direction {
            Direction::Read => region.rights.remote_read,
            Direction::Write => region.rights.remote_write && region.is_writable(),
        };
        if !granted {
            return Err(Failure::NoRight);
        }
        check_range(self.offset, self.length, region.length()).map_err(|_| Failure::OutOfRange)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn regions() -> (Regions, Arc<Region>) {
        let regions = Regions::new(4);
        let memory = Backing::Memory(Memory::anonymous(4096).expect("memory"));
        let region = regions.register(memory, |_| [].into(), AccessRights::READ, Some("a")).expect("registered");
        (regions, region)
    }

    fn access(region: &Region) -> RemoteAccess {
        RemoteAccess { direction: Direction::Read, region: region.id, key: region.key, offset: 0, length: 4096 }
    }

    #[test]
    fn access_needs_key_right_and_bounds() {
        let (regions, region) = regions();
        let access = access(&region);
        assert!(regions.admit(&access).is_ok());
        let refused = |access: RemoteAccess| regions.admit(&access).expect_err("refused");
        assert_eq!(refused(RemoteAccess { key: RegionKey(region.key.0 ^ 1), ..access }), Failure::NoRegion);
        assert_eq!(refused(RemoteAccess { region: RegionId(region.id.0 + 1), ..access }), Failure::NoRegion);
        assert_eq!(refused(RemoteAccess { direction: Direction::Write, ..access }), Failure::NoRight);
        assert_eq!(refused(RemoteAccess { offset: 1, ..access }), Failure::OutOfRange);
        assert_eq!(refused(RemoteAccess { offset: u64::MAX, length: 2, ..access }), Failure::OutOfRange);
    }

    #[test]
    fn a_withdrawn_region_waits_for_its_uses_and_admits_no_more() {
        let (regions, region) = regions();
        let used = regions.admit(&access(&region)).expect("admitted");
        regions.withdraw(region.id).expect("withdrawn");
        assert!(matches!(regions.withdraw(region.id), Err(TransferError::UnknownRegion(_))));
        assert_eq!(regions.admit(&access(&region)).expect_err("gone"), Failure::NoRegion);
        assert!(RegionUse::begin(&region).is_none());
        assert!(!region.wait_until_unused(Instant::now() + Duration::from_millis(5)));
        let waiter = {
            let region = Arc::clone(&region);
            std::thread::spawn(move || region.wait_until_unused(Instant::now() + Duration::from_secs(20)))
        };
        drop(used);
        assert!(waiter.join().expect("no panic"));
        assert_eq!(regions.totals(), (0, 0));
    }

    #[test]
    fn names_and_the_number_of_regions_are_bounded() {
        let (regions, region) = regions();
        let memory = || Backing::Memory(Memory::anonymous(4096).expect("memory"));
        let never = |_: &_| -> Box<[_]> { panic!("pinned, and refused then") };
        let taken = regions.register(memory(), never, AccessRights::LOCAL, Some("a"));
        assert!(matches!(taken, Err(TransferError::NameTaken(_))));
        for _ in 0..3 {
            regions.register(memory(), |_| [].into(), AccessRights::LOCAL, None).expect("room");
        }
        let full = regions.register(memory(), never, AccessRights::LOCAL, None);
        assert!(matches!(full, Err(TransferError::Full { limit: 4, .. })));
        regions.withdraw(region.id).expect("withdrawn");
        assert!(regions.by_name("a").is_none());
        regions.register(memory(), |_| [].into(), AccessRights::LOCAL, Some("a")).expect("room and name");
    }
}
