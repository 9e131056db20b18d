//! Transfers by RDMA: reliable connected queue pairs, one-sided reads and writes, on InfiniBand and RoCE.
//!
//! What this is not: messages stay on sockets; nothing is received, so no side needs the other's processor.
//!
//! - [`verbs`] (all unsafe code) and [`abi`]: the library as safe types. Loaded at run time; see [`NoRdma`] for what keeps
//!   a machine from it.
//! - [`device`]: open devices, their ports and events; [`memory_region`]: regions as they know them; [`endpoint`]: choice
//!   of address.
//! - [`handshake`]: a queue pair comes up over a control connection of its own, and ends with it.
//! - [`plan`] (pure), [`lane`], [`link`]: groups as work requests.
//!
//! Invariants: memory stays registered until the device is done with it; a region's remote key exists only while the region
//! is registered for peers, has the rights that it was registered with, and is told to holders of the region's key only.

mod abi;
mod device;
pub(crate) mod endpoint;
mod handshake;
mod lane;
mod link;
mod memory_region;
mod plan;
mod verbs;

use std::sync::Arc;
use std::time::Instant;

use self::device::Devices;
use self::endpoint::LinkLayer;
use self::handshake::PeerPort;
use self::link::{RdmaLink, Target};
use self::memory_region::DeviceRegion;
pub(crate) use self::memory_region::RemoteKeys;
pub use self::verbs::NoRdma;
use self::verbs::QueuePair;
use crate::error::Failure;
use crate::region::Region;
use crate::settings::{RdmaSettings, Settings};
use crate::transport::{Device, Link, Links};
use crate::wire::{Greeting, Kind, PORTS_MAX};

/// Queue pairs that one connection may hold.
const PAIRS_PER_CONNECTION: usize = 1;

/// What an engine has of RDMA.
pub(crate) struct Rdma(Option<Devices>);

impl Rdma {
    /// Opens the devices. Without any, transfers go other ways.
    pub(crate) fn start(settings: &RdmaSettings) -> Self {
        if !settings.enabled {
            return Self(None);
        }
        let devices = Devices::open(settings);
        Self(devices.inspect_err(|why| tracing::debug!(%why, "no RDMA")).ok())
    }

    fn list(&self) -> &[Arc<device::RdmaDevice>] {
        self.0.as_ref().map_or(&[], Devices::list)
    }

    /// What memory is registered with.
    pub(crate) fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.list().iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect()
    }

    /// Answers PORTS.
    pub(crate) fn port_list(&self) -> Vec<u8> {
        let mut list = Vec::new();
        for device in self.list() {
            for port in device.ports() {
                if let Some((now, _)) = device.port(port) {
                    PeerPort::of(device, port, &now).encode(&mut list);
                }
            }
        }
        list.truncate(PORTS_MAX as usize);
        list
    }

    /// Answers KEYS for a region that the asking peer may use.
    pub(crate) fn key_list(&self, region: &Arc<Region>) -> Vec<u8> {
        let mut list = Vec::new();
        for device in self.list() {
            let Some(of_device) = DeviceRegion::of(region, device.index) else { continue };
            if let Err(error) = of_device.keys(device.index, &mut list) {
                tracing::info!(device = device.name(), %error, "region is not registered for peers by RDMA");
            }
        }
        list
    }

    /// The links to the engine `instance` at `address`: one for each port here or there, whichever are more. First those that
    /// reach each other, then those that may later, because a port is down now.
    pub(crate) fn links(
        &self,
        address: &str,
        greeting: Greeting,
        instance: u128,
        settings: &Arc<Settings>,
        deadline: Instant,
    ) -> (Links, Links) {
        let mut links: (Links, Links) = (Vec::new(), Vec::new());
        if self.list().is_empty() {
            return links;
        }
        let theirs = handshake::dial(address, settings.tls.as_ref(), &greeting, instance, deadline)
            .map_err(|error| error.failure)
            .and_then(|(stream, _)| handshake::ask(&stream, Kind::Ports, &[], deadline))
            .and_then(|body| PeerPort::decode_all(&body).ok_or(Failure::Protocol));
        let theirs = theirs.unwrap_or_else(|failure| {
            tracing::debug!(address, %failure, "peer has no RDMA");
            Vec::new()
        });
        let ours = self.list().iter().flat_map(|device| device.ports().map(move |port| (device, port)));
        let ours: Vec<_> = ours.filter_map(|(device, port)| Some((device, port, device.port(port)?.0))).collect();
        let link = |device, port, there| {
            let target = Target { address: address.to_owned(), greeting, instance, port: there };
            RdmaLink::new(device, port, target, settings)
        };
        for layer in [LinkLayer::InfiniBand, LinkLayer::Ethernet] {
            let ours: Vec<_> = ours.iter().filter(|(.., now)| now.link == layer).collect();
            let theirs: Vec<_> = theirs.iter().filter(|port| port.link == layer).collect();
            if ours.is_empty() || theirs.is_empty() {
                continue;
            }
            for index in 0..ours.len().max(theirs.len()) {
                let (device, port, now) = ours[index % ours.len()];
                // Devices of one fabric are mostly listed alike: the port at the same place first.
                let candidates = (0..theirs.len()).map(|step| *theirs[(index + step) % theirs.len()]);
                let mut candidates = candidates.take(if index < ours.len() { theirs.len() } else { 1 });
                let first = *theirs[index % theirs.len()];
                if now.gid.is_none() || !first.is_up {
                    links.1.push(Arc::new(link(device, *port, first)));
                    continue;
                }
                let reached = candidates.find_map(|there| {
                    let link = link(device, *port, there);
                    let probed = if there.is_up { link.probe(deadline) } else { Err(Failure::Unreachable) };
                    probed
                        .inspect_err(|failure| {
                            tracing::info!(link = link.name(), %failure, "RDMA ports don't reach each other");
                        })
                        .is_ok()
                        .then_some(link)
                });
                links.0.extend(reached.map(|link| Arc::new(link) as Arc<dyn Link>));
            }
        }
        links
    }
}

/// Queue pairs that a peer holds through one connection; destroyed with it.
#[derive(Default)]
pub(crate) struct Serving(Vec<QueuePair>);

impl Serving {
    /// Answers PAIR.
    pub(crate) fn pair(&mut self, rdma: &Rdma, body: &[u8]) -> Result<Vec<u8>, Failure> {
        if self.0.len() >= PAIRS_PER_CONNECTION {
            return Err(Failure::Overloaded);
        }
        let (pair, answer) = handshake::answer(rdma.list(), body)?;
        self.0.push(pair);
        Ok(answer)
    }
}

/// A port of this machine, as `tidepool doctor` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaPort {
    /// Name of its device.
    pub device: String,
    /// Its number in it, from 1.
    pub port: u8,
    /// "InfiniBand" or "Ethernet".
    pub link_layer: &'static str,
    /// Whether it is up.
    pub is_active: bool,
    /// Bits a second; 0 if that is not known.
    pub speed: u64,
    /// Bytes of payload in a packet.
    pub mtu: u32,
    /// Its addresses: GID, and whether it is one of RoCE version 2.
    pub gids: Vec<(std::net::Ipv6Addr, bool)>,
    /// The one that transfers use.
    pub chosen: Option<std::net::Ipv6Addr>,
}

/// Looks at the RDMA devices of this machine.
///
/// # Errors
/// Why there is none.
pub fn rdma_ports() -> Result<Vec<RdmaPort>, NoRdma> {
    let mut found = Vec::new();
    for context in verbs::Context::open_all()? {
        let system = |source| NoRdma::System { action: "ask an RDMA port", source };
        for number in 1..=context.limits().ports {
            let port = context.port(number).map_err(system)?;
            let gids = context.gids(number).map_err(system)?;
            let chosen = endpoint::Gid::choose(&gids, port.link);
            found.push(RdmaPort {
                device: context.name().to_owned(),
                port: number,
                link_layer: if port.link == LinkLayer::Ethernet { "Ethernet" } else { "InfiniBand" },
                is_active: port.is_active,
                speed: port.speed,
                mtu: port.mtu.bytes(),
                gids: gids.iter().map(|gid| (gid.address.into(), gid.is_routable_roce)).collect(),
                chosen: chosen.map(|gid| gid.address.into()),
            });
        }
    }
    Ok(found)
}
