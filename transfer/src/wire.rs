//! The frames that engines exchange: encoding and decoding, no I/O. Documented in `docs/src/formats/wire.md`.
//!
//! Everything is little-endian. A frame is a header of 32 bytes with a check of its own, then what its kind says. The
//! first 8 bytes of a header and the frames [`Kind::Hello`] and [`Kind::Error`] keep their layout in all versions.

use crate::error::Failure;
use crate::region::RemoteAccess;
use crate::slice::{AccessRights, Direction, RegionId, RegionKey};

/// Version of the protocol that this engine speaks.
pub(crate) const VERSION: u8 = 1;
/// First bytes of each frame: "TPTE".
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"TPTE");
/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 32;
/// Bytes of an item: one slice of the peer's memory.
pub(crate) const ITEM_BYTES: usize = 40;
/// Bytes that each READ and WRITE begins with: header and first item, so that a lone request is one receipt.
pub(crate) const OPENING_BYTES: usize = HEADER_BYTES + ITEM_BYTES;
/// Bytes of HELLO and WELCOME after the header.
pub(crate) const GREETING_BYTES: usize = 96;
/// Bytes of SEGMENT after the header.
pub(crate) const SEGMENT_BYTES: usize = 40;
/// Bytes of FENCE after the header: as many as an item, because every frame of a data connection has at least one.
pub(crate) const FENCE_BYTES: usize = ITEM_BYTES;
/// Most bytes of HERE after the header.
pub(crate) const ADDRESSES_BYTES_MAX: usize = 64 << 10;
/// Most items in a frame.
pub(crate) const ITEMS_MAX: usize = 512;
/// Most data bytes in a READ or WRITE: 1 GiB.
pub(crate) const DATA_MAX: u64 = 1 << 30;
/// Most bytes of a segment's name.
pub(crate) const NAME_MAX: usize = 255;
/// Most bytes of a message or notification.
pub(crate) const MESSAGE_MAX: usize = 16 << 20;
/// The same of a request whose handler takes it as it comes.
pub(crate) const REQUEST_MAX: u64 = 1 << 30;

/// Bytes of PAIR after the header: place of the peer's port in its list (2), zeros (6), an endpoint. PAIRED: an endpoint.
pub(crate) const PAIR_BYTES: usize = 40;
/// Most bytes of PORT_LIST after the header.
pub(crate) const PORTS_MAX: u64 = 64 << 10;
/// Most bytes of KEY_LIST after the header.
pub(crate) const KEYS_MAX: u64 = 1 << 20;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// First frame of a connection: who connects, and what for.
    Hello = 1,
    /// Answer: who is here.
    Welcome = 2,
    /// The connection ends: why.
    Error = 3,
    /// Send these slices.
    Read = 4,
    /// Answer to READ: their bytes.
    Data = 5,
    /// Take these bytes into these slices.
    Write = 6,
    /// Answer to WRITE.
    Written = 7,
    /// Which region has this name?
    Open = 8,
    /// Answer to OPEN.
    Segment = 9,
    /// Pass the descriptor of this region (unix sockets).
    Map = 10,
    /// Answer to MAP, with a descriptor.
    Mapped = 11,
    /// A message to the handler.
    Message = 12,
    /// Answer to MESSAGE.
    Reply = 13,
    /// A batch has ended.
    Notify = 14,
    /// Answer to NOTIFY.
    Noted = 15,
    /// Are you there?
    Ping = 16,
    /// Answer to PING.
    Pong = 17,
    /// End that connection of mine before you serve what follows.
    Fence = 18,
    /// Where do you listen?
    Where = 19,
    /// Answer to WHERE.
    Here = 20,
    /// Which RDMA ports do you have?
    Ports = 21,
    /// Answer to PORTS.
    PortList = 22,
    /// Connect a queue pair to this one of mine.
    Pair = 23,
    /// Answer to PAIR.
    Paired = 24,
    /// The RDMA keys of this region?
    Keys = 25,
    /// Answer to KEYS.
    KeyList = 26,
}

impl Kind {
    const ALL: [Self; 26] = [
        Self::Hello,
        Self::Welcome,
        Self::Error,
        Self::Read,
        Self::Data,
        Self::Write,
        Self::Written,
        Self::Open,
        Self::Segment,
        Self::Map,
        Self::Mapped,
        Self::Message,
        Self::Reply,
        Self::Notify,
        Self::Noted,
        Self::Ping,
        Self::Pong,
        Self::Fence,
        Self::Where,
        Self::Here,
        Self::Ports,
        Self::PortList,
        Self::Pair,
        Self::Paired,
        Self::Keys,
        Self::KeyList,
    ];
}

/// What every frame begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Items of READ, WRITE and their answers.
    pub(crate) count: u16,
    /// Chosen by who asks; the answer has the same.
    pub(crate) id: u64,
    /// Data bytes (READ, DATA, WRITE), or bytes of the body.
    pub(crate) length: u64,
    /// 0: success. DATA and WRITTEN: [`SOME_FAILED`]. Else a [`Failure`]'s number.
    pub(crate) status: u32,
}

/// Status of DATA and WRITTEN that have one status byte an item behind the header (DATA: before the data).
pub(crate) const SOME_FAILED: u32 = 0x100;

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    #[error("bytes are no frame: magic or check is wrong")]
    Garbage,
    #[error("frame of version {0}")]
    Version(u8),
    #[error("unknown kind of frame {0}")]
    UnknownKind(u8),
    #[error("a field is out of its bounds")]
    OutOfBounds,
}

impl WireError {
    pub(crate) fn failure(self) -> Failure {
        match self {
            Self::Version(_) => Failure::Version,
            Self::Garbage | Self::UnknownKind(_) | Self::OutOfBounds => Failure::Protocol,
        }
    }
}

impl Header {
    pub(crate) fn new(kind: Kind, id: u64) -> Self {
        Self { kind, count: 0, id, length: 0, status: 0 }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend(MAGIC.to_le_bytes());
        out.extend([VERSION, self.kind as u8]);
        out.extend(self.count.to_le_bytes());
        out.extend(self.id.to_le_bytes());
        out.extend(self.length.to_le_bytes());
        out.extend(self.status.to_le_bytes());
        let check = crc32fast::hash(&out[start..]);
        out.extend(check.to_le_bytes());
    }

    /// Decodes the first 32 of `bytes`.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; HEADER_BYTES] =
            bytes.get(..HEADER_BYTES).and_then(|bytes| bytes.try_into().ok()).ok_or(WireError::Garbage)?;
        if u32_at(bytes, 0) != MAGIC || u32_at(bytes, 28) != crc32fast::hash(&bytes[..28]) {
            return Err(WireError::Garbage);
        }
        if bytes[4] != VERSION && bytes[5] != Kind::Hello as u8 && bytes[5] != Kind::Error as u8 {
            return Err(WireError::Version(bytes[4]));
        }
        let kind = usize::from(bytes[5]).checked_sub(1).and_then(|index| Kind::ALL.get(index));
        let kind = *kind.ok_or(WireError::UnknownKind(bytes[5]))?;
        let count = u16::from_le_bytes([bytes[6], bytes[7]]);
        let header = Self { kind, count, id: u64_at(bytes, 8), length: u64_at(bytes, 16), status: u32_at(bytes, 24) };
        header.check()
    }

    /// Bounds, so that no reader reserves or waits for more than it can take.
    fn check(self) -> Result<Self, WireError> {
        let bound = match self.kind {
            Kind::Hello | Kind::Welcome => GREETING_BYTES as u64,
            Kind::Read | Kind::Data | Kind::Write => DATA_MAX,
            Kind::Open => NAME_MAX as u64,
            Kind::Map | Kind::Keys => ITEM_BYTES as u64,
            Kind::Pair | Kind::Paired => PAIR_BYTES as u64,
            Kind::PortList => PORTS_MAX,
            Kind::KeyList => KEYS_MAX,
            Kind::Segment | Kind::Mapped => SEGMENT_BYTES as u64,
            Kind::Message => REQUEST_MAX,
            Kind::Reply | Kind::Notify => MESSAGE_MAX as u64,
            Kind::Fence => FENCE_BYTES as u64,
            Kind::Here => ADDRESSES_BYTES_MAX as u64,
            Kind::Error | Kind::Written | Kind::Noted | Kind::Ping | Kind::Pong | Kind::Where | Kind::Ports => 0,
        };
        let items = usize::from(self.count);
        let has_items = matches!(self.kind, Kind::Read | Kind::Write);
        if self.length > bound || items > ITEMS_MAX || (has_items && items == 0) {
            return Err(WireError::OutOfBounds);
        }
        Ok(self)
    }

    /// What the peer says went wrong with the whole frame.
    pub(crate) fn failure(&self) -> Failure {
        u8::try_from(self.status).ok().and_then(Failure::from_code).unwrap_or(Failure::Protocol)
    }
}

/// Appends one item of a READ or WRITE.
pub(crate) fn encode_item(out: &mut Vec<u8>, access: &RemoteAccess) {
    out.extend(access.region.0.to_le_bytes());
    out.extend(access.key.0.to_le_bytes());
    out.extend(access.offset.to_le_bytes());
    out.extend(access.length.to_le_bytes());
}

/// Decodes one item.
pub(crate) fn decode_item(bytes: &[u8; ITEM_BYTES], direction: Direction) -> RemoteAccess {
    RemoteAccess {
        direction,
        region: RegionId(u64_at(bytes, 0)),
        key: RegionKey(u128_at(bytes, 8)),
        offset: u64_at(bytes, 24),
        length: u64_at(bytes, 32),
    }
}

/// Status bytes: 0 is success.
pub(crate) fn decode_status(byte: u8) -> Option<Failure> {
    if byte == 0 { None } else { Some(Failure::from_code(byte).unwrap_or(Failure::Protocol)) }
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Purpose {
    /// READ and WRITE.
    Data = 1,
    /// Everything else.
    Control = 2,
}

/// HELLO and WELCOME: who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    /// Random for each start of an engine.
    pub(crate) instance: u128,
    /// Of the host's boot: same boot, same host.
    pub(crate) boot_id: u128,
    /// WELCOME: random name of the unix socket, 0 for none. HELLO: 0.
    pub(crate) socket_token: u128,
    /// HELLO: what the connection is for.
    pub(crate) purpose: Purpose,
    /// Oldest version that the speaker speaks.
    pub(crate) oldest: u8,
    /// Newest version that the speaker speaks.
    pub(crate) newest: u8,
    /// HELLO: proof of the secret; zeros if there is none.
    pub(crate) secret: [u8; 32],
    /// WELCOME: what this connection is called in a FENCE. HELLO: 0.
    pub(crate) connection: u64,
}

impl Greeting {
    pub(crate) fn encode(&self, kind: Kind) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES + GREETING_BYTES);
        Header { length: GREETING_BYTES as u64, ..Header::new(kind, 0) }.encode(&mut out);
        out.extend(self.instance.to_le_bytes());
        out.extend(self.boot_id.to_le_bytes());
        out.extend(self.socket_token.to_le_bytes());
        out.extend([self.purpose as u8, self.oldest, self.newest]);
        out.extend(self.secret);
        out.extend(self.connection.to_le_bytes());
        out.resize(HEADER_BYTES + GREETING_BYTES, 0);
        out
    }

    /// Decodes what follows the header.
    pub(crate) fn decode(bytes: &[u8; GREETING_BYTES]) -> Result<Self, WireError> {
        let purpose = match bytes[48] {
            1 => Purpose::Data,
            2 => Purpose::Control,
            _ => return Err(WireError::OutOfBounds),
        };
        let mut secret = [0; 32];
        secret.copy_from_slice(&bytes[51..83]);
        Ok(Self {
            instance: u128_at(bytes, 0),
            boot_id: u128_at(bytes, 16),
            socket_token: u128_at(bytes, 32),
            purpose,
            oldest: bytes[49],
            newest: bytes[50],
            secret,
            connection: u64_at(bytes, 83),
        })
    }
}

/// SEGMENT and MAPPED: a region of the speaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentInfo {
    pub(crate) region: RegionId,
    pub(crate) key: RegionKey,
    pub(crate) length: u64,
    pub(crate) rights: AccessRights,
    /// MAPPED: the descriptor is a file's, and not memory to be mapped.
    pub(crate) is_file: bool,
}

impl SegmentInfo {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.region.0.to_le_bytes());
        out.extend(self.key.0.to_le_bytes());
        out.extend(self.length.to_le_bytes());
        let rights = u8::from(self.rights.remote_read) | u8::from(self.rights.remote_write) << 1;
        out.extend([rights | u8::from(self.is_file) << 2]);
        out.extend([0; 7]);
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; SEGMENT_BYTES] = bytes.try_into().map_err(|_| WireError::OutOfBounds)?;
        Ok(Self {
            region: RegionId(u64_at(bytes, 0)),
            key: RegionKey(u128_at(bytes, 8)),
            length: u64_at(bytes, 24),
            rights: AccessRights { remote_read: bytes[32] & 1 != 0, remote_write: bytes[32] & 2 != 0 },
            is_file: bytes[32] & 4 != 0,
        })
    }
}

/// FENCE: the number of a connection, and zeros.
pub(crate) fn encode_fence(out: &mut Vec<u8>, connection: u64) {
    Header { length: FENCE_BYTES as u64, ..Header::new(Kind::Fence, 0) }.encode(out);
    out.extend(connection.to_le_bytes());
    out.extend([0; FENCE_BYTES - 8]);
}

/// Decodes what follows the header of a FENCE.
pub(crate) fn decode_fence(bytes: &[u8]) -> Result<u64, Failure> {
    bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).ok_or(Failure::Protocol)
}

/// HERE: addresses, each a byte of length and that many bytes of UTF-8.
pub(crate) fn encode_addresses(addresses: &[String]) -> Vec<u8> {
    let mut out = Vec::new();
    for address in addresses {
        if let Ok(length) = u8::try_from(address.len())
            && out.len() + 1 + address.len() <= ADDRESSES_BYTES_MAX
        {
            out.push(length);
            out.extend_from_slice(address.as_bytes());
        }
    }
    out
}

/// Decodes HERE.
pub(crate) fn decode_addresses(mut bytes: &[u8]) -> Result<Vec<String>, WireError> {
    let mut addresses = Vec::new();
    while let Some((length, rest)) = bytes.split_first() {
        let (address, rest) = rest.split_at_checked(usize::from(*length)).ok_or(WireError::OutOfBounds)?;
        let address = std::str::from_utf8(address).map_err(|_| WireError::OutOfBounds)?;
        addresses.push(address.to_owned());
        bytes = rest;
    }
    Ok(addresses)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

fn u128_at(bytes: &[u8], at: usize) -> u128 {
    u128::from_le_bytes(array(bytes, at))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encoded(header: Header) -> Vec<u8> {
        let mut out = Vec::new();
        header.encode(&mut out);
        out
    }

    #[test]
    fn headers_keep_their_layout() {
        let header = Header { kind: Kind::Read, count: 2, id: 3, length: 4, status: 5 };
        let bytes = encoded(header);
        assert_eq!(bytes.len(), HEADER_BYTES);
        assert_eq!(&bytes[..8], b"TPTE\x01\x04\x02\x00");
        assert_eq!((bytes[8], bytes[16], bytes[24]), (3, 4, 5));
        assert_eq!(Header::decode(&bytes), Ok(header));
    }

    #[test]
    fn one_flipped_bit_is_no_header() {
        let bytes = encoded(Header { kind: Kind::Data, count: 1, id: 9, length: 4096, status: 0 });
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&flipped), Err(WireError::Garbage), "bit {bit}");
        }
    }

    #[test]
    fn a_newer_version_is_told_from_garbage() {
        let mut bytes = encoded(Header::new(Kind::Ping, 1));
        bytes[4] = 2;
        let check = crc32fast::hash(&bytes[..28]);
        bytes[28..].copy_from_slice(&check.to_le_bytes());
        assert_eq!(Header::decode(&bytes), Err(WireError::Version(2)));
    }

    #[test]
    fn lengths_and_counts_are_bounded() {
        let read = Header { kind: Kind::Read, count: 1, id: 0, length: DATA_MAX, status: 0 };
        assert!(Header::decode(&encoded(read)).is_ok());
        for bad in [
            Header { length: DATA_MAX + 1, ..read },
            Header { count: ITEMS_MAX as u16 + 1, ..read },
            Header { count: 0, ..read },
            Header { kind: Kind::Message, length: REQUEST_MAX + 1, ..read },
            Header { kind: Kind::Reply, length: MESSAGE_MAX as u64 + 1, ..read },
            Header { kind: Kind::Ping, length: 1, ..read },
        ] {
            assert_eq!(Header::decode(&encoded(bad)), Err(WireError::OutOfBounds));
        }
    }

    proptest! {
        #[test]
        fn hostile_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Header::decode(&bytes);
            let _ = SegmentInfo::decode(&bytes);
            let _ = decode_addresses(&bytes);
            if let Some(greeting) = bytes.first_chunk() {
                let _ = Greeting::decode(greeting);
            }
        }

        #[test]
        fn greetings_and_items_come_back(a: u128, b: u128, c: u128, secret: [u8; 32], x: u64, y: u64, z: u64) {
            let greeting = Greeting {
                instance: a, boot_id: b, socket_token: c, purpose: Purpose::Control, oldest: 1, newest: 7, secret,
                connection: y,
            };
            let bytes = greeting.encode(Kind::Hello);
            let header = Header::decode(&bytes).expect("a header");
            prop_assert_eq!(header.length as usize, bytes.len() - HEADER_BYTES);
            let body = bytes[HEADER_BYTES..].first_chunk().expect("a body");
            prop_assert_eq!(Greeting::decode(body), Ok(greeting));

            let access = RemoteAccess {
                direction: Direction::Write, region: RegionId(x), key: RegionKey(a), offset: y, length: z,
            };
            let mut item = Vec::new();
            encode_item(&mut item, &access);
            prop_assert_eq!(decode_item(item.first_chunk().expect("an item"), Direction::Write), access);

            let info = SegmentInfo { region: RegionId(x), key: RegionKey(b), length: z, rights: AccessRights::READ, is_file: y % 2 == 1 };
            let mut segment = Vec::new();
            info.encode(&mut segment);
            prop_assert_eq!(SegmentInfo::decode(&segment), Ok(info));
        }

        #[test]
        fn addresses_come_back(addresses in proptest::collection::vec("[a-z0-9.:]{0,40}", 0..20)) {
            prop_assert_eq!(decode_addresses(&encode_addresses(&addresses)), Ok(addresses));
        }
    }
}
