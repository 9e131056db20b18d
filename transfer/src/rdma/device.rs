//! Open devices: their ports as of now, and memory registered with them.
//!
//! One thread an engine follows the devices' asynchronous events (port down, address changed) and looks at the port
//! again; lanes see by its *epoch* that what they were connected with is not so any more.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::endpoint::{Gid, LinkLayer, PathMtu};
use super::memory_region::DeviceRegion;
use super::verbs::{Context, Domain, Event, NoRdma};
use crate::memory::Memory;
use crate::settings::RdmaSettings;
use crate::slice::AccessRights;
use crate::transport::{Device, Registration};

/// Parts of a region start at pages.
const PAGE_BYTES: u64 = 4096;

/// An open device and what is made in it.
pub(crate) struct RdmaDevice {
    /// Its place in the engine's list.
    pub(crate) index: usize,
    pub(crate) context: Arc<Context>,
    pub(crate) domain: Arc<Domain>,
    ports: Box<[PortSlot]>,
    part_bytes: u64,
}

struct PortSlot {
    now: Mutex<PortNow>,
    /// Grows whenever `now` was looked at again and had changed.
    epoch: AtomicU64,
}

/// A port as it was found last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortNow {
    pub(crate) link: LinkLayer,
    pub(crate) mtu: PathMtu,
    pub(crate) lid: u16,
    pub(crate) max_message_bytes: u32,
    pub(crate) speed: u64,
    /// The address that queue pairs use; `None` while the port is down or has none.
    pub(crate) gid: Option<Gid>,
}

impl RdmaDevice {
    fn new(index: usize, context: Arc<Context>, settings: &RdmaSettings) -> io::Result<Self> {
        let domain = Arc::new(Domain::new(&context)?);
        let limits = context.limits();
        let part_bytes = settings.registration_bytes.min(limits.registration_bytes) / PAGE_BYTES * PAGE_BYTES;
        let ports = (1..=limits.ports)
            .map(|port| Ok(PortSlot { now: Mutex::new(look(&context, port)?), epoch: AtomicU64::new(0) }))
            .collect::<io::Result<_>>()?;
        Ok(Self { index, context, domain, ports, part_bytes: part_bytes.max(PAGE_BYTES) })
    }

    /// Its ports, counted from 1.
    pub(crate) fn ports(&self) -> impl Iterator<Item = u8> {
        1..=self.ports.len() as u8
    }

    /// A port as it was found last, and the epoch of that. `None` if there is no such port.
    pub(crate) fn port(&self, port: u8) -> Option<(PortNow, u64)> {
        let slot = self.ports.get(usize::from(port).checked_sub(1)?)?;
        let now = slot.now.lock();
        Some((*now, slot.epoch.load(Ordering::Acquire)))
    }

    /// The epoch of a port: while it is the same, the port is as it was found.
    pub(crate) fn epoch(&self, port: u8) -> u64 {
        self.ports[usize::from(port) - 1].epoch.load(Ordering::Acquire)
    }

    /// Takes all events that are there.
    fn follow(&self) -> io::Result<()> {
        while let Some(event) = self.context.next_event()? {
            match event {
                Event::PortActive(port) | Event::PortError(port) | Event::AddressChange(port) => {
                    tracing::info!(device = self.context.name(), port, ?event, "RDMA port changed");
                    self.look_again(port);
                }
                Event::DeviceFatal => {
                    tracing::error!(device = self.context.name(), "RDMA device failed");
                    self.ports().for_each(|port| self.look_again(port));
                }
                Event::Other(kind) => tracing::debug!(device = self.context.name(), kind, "RDMA event"),
            }
        }
        Ok(())
    }

    fn look_again(&self, port: u8) {
        let Some(slot) = usize::from(port).checked_sub(1).and_then(|index| self.ports.get(index)) else { return };
        let mut now = slot.now.lock();
        let found = look(&self.context, port).unwrap_or(PortNow { gid: None, ..*now });
        if found != *now {
            *now = found;
            slot.epoch.fetch_add(1, Ordering::AcqRel);
        }
    }
}

fn look(context: &Context, port: u8) -> io::Result<PortNow> {
    let found = context.port(port)?;
    let gid = if found.is_active { Gid::choose(&context.gids(port)?, found.link) } else { None };
    let super::verbs::Port { link, mtu, lid, max_message_bytes, speed, .. } = found;
    Ok(PortNow { link, mtu, lid, max_message_bytes, speed, gid })
}

impl Device for RdmaDevice {
    fn name(&self) -> &str {
        self.context.name()
    }

    fn register(&self, memory: &Memory, rights: AccessRights) -> io::Result<Box<dyn Registration>> {
        Ok(Box::new(DeviceRegion::new(&self.domain, memory, rights, self.part_bytes)))
    }
}

/// The devices of an engine, followed until this is dropped.
pub(crate) struct Devices {
    list: Vec<Arc<RdmaDevice>>,
    stop: Arc<std::os::fd::OwnedFd>,
    follower: Option<std::thread::JoinHandle<()>>,
}

impl Devices {
    /// Opens the devices that the settings name.
    pub(crate) fn open(settings: &RdmaSettings) -> Result<Self, NoRdma> {
        let system = |action| move |source| NoRdma::System { action, source };
        let named = |context: &Arc<Context>| {
            settings.devices.is_empty() || settings.devices.iter().any(|name| name == context.name())
        };
        let list = Context::open_all()?
            .into_iter()
            .filter(named)
            .enumerate()
            .map(|(index, context)| RdmaDevice::new(index, context, settings).map(Arc::new))
            .collect::<io::Result<Vec<_>>>()
            .map_err(system("look at an RDMA device"))?;
        if list.is_empty() {
            return Err(NoRdma::NoDevice);
        }
        let stop = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
            .map_err(|error| system("make an eventfd")(error.into()))?;
        let stop = Arc::new(stop);
        let (followed, until) = (list.clone(), Arc::clone(&stop));
        let follower = std::thread::Builder::new()
            .name("tidepool-rdma".into())
            .spawn(move || follow(followed, &until))
            .map_err(system("start a thread"))?;
        Ok(Self { list, stop, follower: Some(follower) })
    }

    pub(crate) fn list(&self) -> &[Arc<RdmaDevice>] {
        &self.list
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        // An eventfd takes this always: nothing else adds to it.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(follower) = self.follower.take() {
            let _ = follower.join();
        }
    }
}

/// Follows devices until `stop` is readable. One whose events can't be taken any more is gone, and not followed further.
fn follow(mut devices: Vec<Arc<RdmaDevice>>, stop: &std::os::fd::OwnedFd) {
    use rustix::event::{PollFd, PollFlags};
    loop {
        let events = devices.iter().map(|device| device.context.events());
        let mut polled: Vec<_> = events.map(|events| PollFd::from_borrowed_fd(events, PollFlags::IN)).collect();
        polled.push(PollFd::new(stop, PollFlags::IN));
        match rustix::event::poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return tracing::error!(%error, "RDMA events can't be followed"),
        }
        if polled.last().is_some_and(|stop| !stop.revents().is_empty()) {
            return;
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        devices.retain(|device| {
            if !ready.next().unwrap_or(false) {
                return true;
            }
            let followed = device.follow();
            if let Err(error) = &followed {
                tracing::error!(device = device.context.name(), %error, "RDMA events can't be taken");
                device.ports().for_each(|port| device.look_again(port));
            }
            followed.is_ok()
        });
    }
}
