//! How two engines bring up queue pairs: over a control connection of its own, which lives as long as the pair.
//!
//! ```text
//! asks                                    is asked
//! connect, HELLO                 -->
//!                                <--      WELCOME
//! queue pair created
//! PAIR its endpoint              -->      queue pair created, connected: it serves
//!                                <--      PAIRED its endpoint
//! connected: it reads and writes
//!            ... one-sided work; the connection is silent ...
//! end of the connection, either side:     its queue pair is destroyed, then the connection is closed
//! ```
//!
//! So whoever sees the connection's end knows that the other's queue pair takes no packet any more.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use super::device::{PortNow, RdmaDevice};
use super::endpoint::{ENDPOINT_BYTES, Endpoint, LinkLayer};
use super::verbs::{QueuePair, Route};
use crate::error::Failure;
use crate::stream::{self, ConnectError, Stream, connect_tcp, greet};
use crate::tls::Tls;
use crate::wire::{self, Greeting, HEADER_BYTES, Header, Kind, WireError};

/// Local ranges of one work request.
const RANGES: u32 = 16;
/// Reads on their way in a queue pair.
const READS: u8 = 16;
/// An acknowledgement is waited for 34 ms: 4.096 µs times 2^13. Longer than any queue in a fabric holds a packet.
const TIMEOUT_EXPONENT: u8 = 13;
/// Then the packet is sent again, so often; a peer that is gone is noticed after a quarter of a second. 7 would be for
/// ever with some devices.
const RETRIES: u8 = 6;
/// A port in PORT_LIST.
const PORT_BYTES: usize = 32;

/// Opens a control connection to the engine `instance` at an address; gives what the peer calls it.
pub(crate) fn dial(
    address: &str,
    tls: Option<&Tls>,
    greeting: &Greeting,
    instance: u128,
    deadline: Instant,
) -> Result<(Stream, u64), ConnectError> {
    let stream = connect_tcp(address, tls, deadline, 0)?;
    let welcome = greet(&stream, greeting, deadline)?;
    if welcome.instance == instance { Ok((stream, welcome.connection)) } else { Err(Failure::Restarted.into()) }
}

/// Asks once and waits for the answer's body.
pub(crate) fn ask(stream: &Stream, kind: Kind, body: &[u8], deadline: Instant) -> Result<Vec<u8>, Failure> {
    let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
    Header { length: body.len() as u64, ..Header::new(kind, 1) }.encode(&mut frame);
    frame.extend_from_slice(body);
    (&mut &*stream).write_all(&frame).map_err(|_| Failure::ConnectionLost)?;
    let mut header = [0; HEADER_BYTES];
    receive(stream, &mut header, deadline)?;
    let header = Header::decode(&header).map_err(WireError::failure)?;
    if header.status != 0 {
        return Err(header.failure());
    }
    let expected = if kind == Kind::Ports { Kind::PortList } else { Kind::Paired };
    if header.kind != expected {
        return Err(Failure::Protocol);
    }
    let mut body = vec![0; header.length as usize];
    receive(stream, &mut body, deadline)?;
    Ok(body)
}

/// Receipts give up after a tick each.
fn receive(stream: &Stream, mut bytes: &mut [u8], deadline: Instant) -> Result<(), Failure> {
    use std::io::ErrorKind::{Interrupted, WouldBlock};
    while !bytes.is_empty() {
        match (&mut &*stream).read(bytes) {
            Ok(0) => return Err(Failure::ConnectionLost),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == Interrupted => {}
            Err(error) if error.kind() == WouldBlock && Instant::now() < deadline => {}
            Err(error) if error.kind() == WouldBlock => return Err(Failure::Silent),
            Err(_) => return Err(Failure::ConnectionLost),
        }
    }
    Ok(())
}

/// Ends the asking half of a connection and waits until the peer has ended the other: its queue pair is gone then. `false`
/// if it did not say so in time.
pub(crate) fn hear_the_end(stream: &Stream, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    // Fails only if it is over already.
    let _ = socket2::SockRef::from(stream).shutdown(std::net::Shutdown::Write);
    let mut rest = [0; 256];
    loop {
        match receive(stream, &mut rest, deadline) {
            Ok(()) => {}
            Err(Failure::ConnectionLost) => return true,
            Err(_) => return false,
        }
    }
}

/// A port of a peer, as the peer lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerPort {
    /// The peer's number of the device.
    pub(crate) device: u16,
    pub(crate) port: u8,
    pub(crate) link: LinkLayer,
    pub(crate) is_up: bool,
    pub(crate) gid: [u8; 16],
    /// Bits a second.
    pub(crate) speed: u64,
}

impl PeerPort {
    pub(crate) fn of(device: &RdmaDevice, port: u8, now: &PortNow) -> Self {
        Self {
            device: device.index as u16,
            port,
            link: now.link,
            is_up: now.gid.is_some(),
            gid: now.gid.map_or([0; 16], |gid| gid.address),
            speed: now.speed,
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.device.to_le_bytes());
        out.extend([self.port, u8::from(self.link == LinkLayer::Ethernet), u8::from(self.is_up), 0, 0, 0]);
        out.extend(self.gid);
        out.extend(self.speed.to_le_bytes());
    }

    /// Decodes PORT_LIST. `None` if it is none.
    pub(crate) fn decode_all(bytes: &[u8]) -> Option<Vec<Self>> {
        let (ports, rest) = bytes.as_chunks::<PORT_BYTES>();
        let port = |bytes: &[u8; PORT_BYTES]| {
            let (gid, speed) = (bytes[8..24].first_chunk()?, bytes[24..].first_chunk()?);
            Some(Self {
                device: u16::from_le_bytes([bytes[0], bytes[1]]),
                port: bytes[2],
                link: if bytes[3] == 1 { LinkLayer::Ethernet } else { LinkLayer::InfiniBand },
                is_up: bytes[4] != 0,
                gid: *gid,
                speed: u64::from_le_bytes(*speed),
            })
        };
        if rest.is_empty() { ports.iter().map(port).collect() } else { None }
    }
}

/// A queue pair in the making, and what its peer has to know.
fn create(device: &RdmaDevice, port: u8, depth: u32, serves: bool) -> Result<(QueuePair, Endpoint, Route), Failure> {
    let (now, _) = device.port(port).ok_or(Failure::NoRegion)?;
    let gid = now.gid.ok_or(Failure::Unreachable)?;
    let pair = QueuePair::new(&device.domain, port, depth, if serves { 1 } else { RANGES }, serves)
        .inspect_err(|error| tracing::warn!(device = device.context.name(), %error, "no RDMA queue pair"))
        .map_err(|_| Failure::System)?;
    // Any will do; a new pair must not take the packets of one before it.
    let psn = stream::random().map_err(|_| Failure::System)? as u32 & 0xff_ffff;
    let limits = device.context.limits();
    let (reads_in, reads_out) = (limits.reads_in.min(READS), limits.reads_out.min(READS));
    let endpoint =
        Endpoint { number: pair.number(), psn, gid: gid.address, lid: now.lid, mtu: now.mtu, link: now.link, reads_in };
    let gid_index = gid.index.unwrap_or(0);
    let route = Route {
        gid_index,
        mtu: now.mtu,
        reads_in,
        reads_out,
        psn,
        timeout_exponent: TIMEOUT_EXPONENT,
        retries: RETRIES,
    };
    Ok((pair, endpoint, route))
}

/// Brings up a queue pair to a port of the peer, over a connection of its own.
pub(crate) fn connect(
    device: &RdmaDevice,
    port: u8,
    depth: u32,
    peer: &PeerPort,
    stream: &Stream,
    deadline: Instant,
) -> Result<QueuePair, Failure> {
    let (mut pair, endpoint, mut route) = create(device, port, depth, false)?;
    let mut body = Vec::with_capacity(wire::PAIR_BYTES);
    body.extend(peer.device.to_le_bytes());
    body.extend([peer.port, 0, 0, 0, 0, 0]);
    endpoint.encode(&mut body);
    let answer = ask(stream, Kind::Pair, &body, deadline)?;
    let there = answer.as_slice().try_into().ok().and_then(Endpoint::decode).ok_or(Failure::Protocol)?;
    if there.link != endpoint.link {
        return Err(Failure::Protocol);
    }
    route.mtu = route.mtu.min(there.mtu);
    route.reads_out = route.reads_out.min(there.reads_in);
    let connected = pair.receive_from(&there, &route).and_then(|()| pair.send_to(&route));
    connected.map_err(unreachable)?;
    Ok(pair)
}

/// Answers PAIR: a queue pair that serves, and its endpoint.
pub(crate) fn answer(devices: &[std::sync::Arc<RdmaDevice>], body: &[u8]) -> Result<(QueuePair, Vec<u8>), Failure> {
    let body: &[u8; wire::PAIR_BYTES] = body.try_into().map_err(|_| Failure::Protocol)?;
    let (header, endpoint) = body.split_at(wire::PAIR_BYTES - ENDPOINT_BYTES);
    let there = endpoint.try_into().ok().and_then(Endpoint::decode).ok_or(Failure::Protocol)?;
    let device = devices.get(usize::from(u16::from_le_bytes([header[0], header[1]]))).ok_or(Failure::NoRegion)?;
    let (mut pair, endpoint, mut route) = create(device, header[2], 1, true)?;
    if there.link != endpoint.link {
        return Err(Failure::Protocol);
    }
    route.mtu = route.mtu.min(there.mtu);
    pair.receive_from(&there, &route).map_err(unreachable)?;
    let mut answer = Vec::with_capacity(ENDPOINT_BYTES);
    endpoint.encode(&mut answer);
    Ok((pair, answer))
}

/// A device that can't find the way to an address.
fn unreachable(error: std::io::Error) -> Failure {
    tracing::debug!(%error, "RDMA queue pair can't be connected");
    Failure::Unreachable
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn port_lists_come_back(device: u16, port: u8, is_up: bool, gid: [u8; 16], speed: u64) {
            let of = PeerPort { device, port, link: LinkLayer::Ethernet, is_up, gid, speed };
            let mut bytes = Vec::new();
            of.encode(&mut bytes);
            of.encode(&mut bytes);
            prop_assert_eq!(PeerPort::decode_all(&bytes), Some(vec![of, of]));
            prop_assert_eq!(PeerPort::decode_all(&bytes[1..]), None);
        }
    }
}
