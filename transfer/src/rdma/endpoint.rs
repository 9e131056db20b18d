//! One end of a queue pair, as its peer has to know it; and which of its addresses a port goes by. Pure.

/// Bytes of an endpoint on the wire.
pub(crate) const ENDPOINT_BYTES: usize = 32;

/// What a port is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkLayer {
    /// Addressed by LID.
    InfiniBand,
    /// RoCE: addressed by GID.
    Ethernet,
}

/// Bytes of payload in a packet, as the power of two that the wire and the library number from 1 (256) to 5 (4,096).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PathMtu(u8);

impl PathMtu {
    /// By its number; what is out of range becomes the nearest.
    pub(crate) fn of_code(code: u8) -> Self {
        Self(code.clamp(1, 5))
    }

    pub(crate) fn code(self) -> u8 {
        self.0
    }

    pub(crate) fn bytes(self) -> u32 {
        128 << self.0
    }
}

/// An entry of a port's table of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gid {
    /// Its place, if a queue pair can name it.
    pub(crate) index: Option<u8>,
    pub(crate) address: [u8; 16],
    /// RoCE version 2, which crosses routers.
    pub(crate) is_routable_roce: bool,
}

impl Gid {
    /// `::ffff:a.b.c.d`.
    fn is_ipv4_mapped(&self) -> bool {
        self.address[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
    }

    fn is_link_local(&self) -> bool {
        self.address[..2] == [0xfe, 0x80]
    }

    /// Which of a port's addresses its queue pairs use: on Ethernet a routable one of RoCE version 2, with an IPv4 address
    /// in it before IPv6 before link-local; on InfiniBand the first.
    pub(crate) fn choose(gids: &[Self], link: LinkLayer) -> Option<Self> {
        let usable = gids.iter().filter(|gid| gid.index.is_some() && gid.address != [0; 16]);
        match link {
            LinkLayer::InfiniBand => usable.copied().next(),
            LinkLayer::Ethernet => usable
                .filter(|gid| gid.is_routable_roce)
                .min_by_key(|gid| (!gid.is_ipv4_mapped(), gid.is_link_local(), gid.index))
                .copied(),
        }
    }
}

/// One end of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// Number of the queue pair, 24 bits.
    pub(crate) number: u32,
    /// Its first packet number, 24 bits.
    pub(crate) psn: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    pub(crate) mtu: PathMtu,
    pub(crate) link: LinkLayer,
    /// Reads on their way that it answers.
    pub(crate) reads_in: u8,
}

impl Endpoint {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.number.to_le_bytes());
        out.extend(self.psn.to_le_bytes());
        out.extend(self.gid);
        out.extend(self.lid.to_le_bytes());
        out.extend([self.mtu.code(), u8::from(self.link == LinkLayer::Ethernet), self.reads_in, 0, 0, 0]);
    }

    /// `None` if a field is out of its bounds.
    pub(crate) fn decode(bytes: &[u8; ENDPOINT_BYTES]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[8..24]);
        let link = match bytes[27] {
            0 => LinkLayer::InfiniBand,
            1 => LinkLayer::Ethernet,
            _ => return None,
        };
        let (number, psn, mtu) = (word(0), word(4), bytes[26]);
        let is_within = number < 1 << 24 && psn < 1 << 24 && (1..=5).contains(&mtu);
        is_within.then(|| Self {
            number,
            psn,
            gid,
            lid: u16::from_le_bytes([bytes[24], bytes[25]]),
            mtu: PathMtu(mtu),
            link,
            reads_in: bytes[28],
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gid(index: u8, address: &str, is_routable_roce: bool) -> Gid {
        let address: std::net::Ipv6Addr = address.parse().expect("an address");
        Gid { index: Some(index), address: address.octets(), is_routable_roce }
    }

    #[test]
    fn roce_goes_by_version_2_and_ipv4_first() {
        let table = [
            gid(0, "fe80::1", false),
            gid(1, "fe80::1", true),
            gid(2, "fd00::1", true),
            gid(3, "::ffff:10.0.0.1", false),
            gid(4, "::ffff:10.0.0.1", true),
        ];
        let chosen = |gids: &[Gid]| Gid::choose(gids, LinkLayer::Ethernet).and_then(|gid| gid.index);
        assert_eq!(chosen(&table), Some(4));
        assert_eq!(chosen(&table[..4]), Some(2));
        assert_eq!(chosen(&table[..2]), Some(1));
        assert_eq!(chosen(&table[..1]), None);
        assert_eq!(Gid::choose(&table, LinkLayer::InfiniBand), Some(table[0]));
        let far = Gid { index: None, ..table[4] };
        assert_eq!(Gid::choose(&[far, gid(9, "::", true)], LinkLayer::Ethernet), None);
    }

    #[test]
    fn mtus_are_powers_of_two() {
        assert_eq!((PathMtu::of_code(1).bytes(), PathMtu::of_code(5).bytes()), (256, 4096));
        assert_eq!((PathMtu::of_code(0).bytes(), PathMtu::of_code(77).bytes()), (256, 4096));
    }

    proptest! {
        #[test]
        fn endpoints_come_back(number in 0_u32..1 << 24, psn in 0_u32..1 << 24, gid: [u8; 16], lid: u16, reads_in: u8) {
            let (mtu, link) = (PathMtu::of_code(3), LinkLayer::Ethernet);
            let endpoint = Endpoint { number, psn, gid, lid, mtu, link, reads_in };
            let mut bytes = Vec::new();
            endpoint.encode(&mut bytes);
            prop_assert_eq!(Endpoint::decode(bytes.first_chunk().expect("as long")), Some(endpoint));
            prop_assert_eq!(bytes.len(), ENDPOINT_BYTES);
        }

        #[test]
        fn hostile_endpoints_do_not_panic(bytes: [u8; ENDPOINT_BYTES]) {
            let _ = Endpoint::decode(&bytes);
        }
    }
}
