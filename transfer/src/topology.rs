//! What this host is made of, as far as it matters to who moves bytes: NUMA nodes, network devices, RDMA devices,
//! accelerators, and how far apart they are.
//!
//! The parser is pure: it reads a [`Tree`], which is either recorded from `/sys` or taken from a text that was recorded
//! elsewhere. Source: Linux, Documentation/ABI (sysfs-class-net, sysfs-class-infiniband, sysfs-devices-node, sysfs-bus-pci).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::Path;

/// Files and links of `/sys` that the parser looks at, by their path without the leading `/sys/`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree(BTreeMap<String, String>);

/// What the host is made of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Topology {
    /// NUMA nodes, in the order of their numbers.
    pub nodes: Vec<Node>,
    /// Network devices with hardware, network-card first by name.
    pub nics: Vec<Nic>,
    /// RDMA devices.
    pub rdma: Vec<RdmaDevice>,
    /// GPUs and other accelerators.
    pub accelerators: Vec<Accelerator>,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// Its processors, as the kernel writes lists: `0-3,8`.
    pub processors: String,
}

/// A network device.
#[derive(Clone, Debug, PartialEq)]
pub struct Nic {
    /// What the system calls it.
    pub name: String,
    /// Whether it has a link.
    pub is_up: bool,
    /// Bits per second, if it knows.
    pub bits_per_second: Option<u64>,
    /// Where it is plugged in.
    pub place: Place,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq)]
pub struct RdmaDevice {
    /// What the system calls it.
    pub name: String,
    /// Whether one of its ports is active.
    pub is_up: bool,
    /// Bits per second of its fastest active port.
    pub bits_per_second: Option<u64>,
    /// Where it is plugged in.
    pub place: Place,
}

/// A GPU or another accelerator.
#[derive(Clone, Debug, PartialEq)]
pub struct Accelerator {
    /// Its PCI address.
    pub name: String,
    /// Where it is plugged in.
    pub place: Place,
}

/// Where a device is plugged in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// NUMA node, if the system knows.
    pub node: Option<u32>,
    /// Root complex, bridges and device, from the root; empty for a device without PCI.
    pub path: Vec<String>,
}

/// How far apart two devices are, near first. Each step costs bandwidth or latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// The same device, or two functions of one.
    Same,
    /// Under one PCI bridge or switch.
    Bridge,
    /// Under one PCI root complex.
    Root,
    /// At one NUMA node, or where nobody knows.
    Node,
    /// At different NUMA nodes.
    Far,
}

impl Place {
    /// How far apart two devices are.
    #[must_use]
    pub fn distance(&self, other: &Self) -> Distance {
        let shared = self.path.iter().zip(&other.path).take_while(|(a, b)| a == b).count();
        let functions =
            |place: &Self| place.path.last().and_then(|last| last.rsplit_once('.')).map(|(slot, _)| slot.to_owned());
        let is_same = shared > 0 && functions(self).is_some() && functions(self) == functions(other);
        match shared {
            _ if is_same => Distance::Same,
            0 if self.node.is_some() && other.node.is_some() && self.node != other.node => Distance::Far,
            0 => Distance::Node,
            1 => Distance::Root,
            _ => Distance::Bridge,
        }
    }
}

impl Tree {
    /// What this host says.
    #[must_use]
    pub fn record() -> Self {
        Self::record_from(Path::new("/sys"))
    }

    /// Records from another root, for a tree that was copied. What can't be read is left out.
    #[must_use]
    pub fn record_from(root: &Path) -> Self {
        let mut tree = Self::default();
        for (class, files) in [
            ("class/net", &["speed", "operstate", "device/numa_node"][..]),
            ("class/infiniband", &["device/numa_node"]),
            ("devices/system/node", &["cpulist"]),
            ("bus/pci/devices", &["class", "numa_node"]),
        ] {
            for name in names(&root.join(class)) {
                let entry = format!("{class}/{name}");
                if class == "devices/system/node" && !is_numbered(&name, "node") {
                    continue;
                }
                files.iter().for_each(|file| tree.add_file(root, &format!("{entry}/{file}")));
                let device = if class == "bus/pci/devices" { entry.clone() } else { format!("{entry}/device") };
                tree.add_link(root, &device);
                for port in names(&root.join(&entry).join("ports")) {
                    tree.add_file(root, &format!("{entry}/ports/{port}/state"));
                    tree.add_file(root, &format!("{entry}/ports/{port}/rate"));
                }
            }
        }
        tree
    }

    /// From text: a line a file (`path = content`) or link (`path -> target`). Other lines are left out.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once(" = ").or_else(|| line.split_once(" -> ")));
        Self(lines.map(|(path, value)| (path.trim().to_owned(), value.trim().to_owned())).collect())
    }

    /// As text, for [`Tree::from_text`].
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for (path, value) in &self.0 {
            let sign = if value.starts_with("devices/") { "->" } else { "=" };
            // Writing to a string can't fail.
            let _ = writeln!(text, "{path} {sign} {value}");
        }
        text
    }

    fn add_file(&mut self, root: &Path, path: &str) {
        if let Ok(content) = std::fs::read_to_string(root.join(path)) {
            self.0.insert(path.to_owned(), content.trim().to_owned());
        }
    }

    fn add_link(&mut self, root: &Path, path: &str) {
        let target = root.join(path).canonicalize().ok();
        let root = root.canonicalize().ok();
        let relative = target.as_ref().zip(root.as_ref()).and_then(|(target, root)| target.strip_prefix(root).ok());
        if let Some(relative) = relative.and_then(Path::to_str)
            && relative != path
        {
            self.0.insert(path.to_owned(), relative.to_owned());
        }
    }

    fn get(&self, path: &str) -> Option<&str> {
        self.0.get(path).map(String::as_str)
    }

    /// Names directly under a folder.
    fn entries(&self, folder: &str) -> Vec<String> {
        let prefix = format!("{folder}/");
        let under = self.0.range(prefix.clone()..).take_while(|(path, _)| path.starts_with(&prefix));
        let mut names: Vec<_> =
            under.filter_map(|(path, _)| path[prefix.len()..].split('/').next()).map(str::to_owned).collect();
        names.dedup();
        names
    }

    /// Where the device of an entry is plugged in.
    fn place(&self, device: &str, numa_node: &str) -> Place {
        let is_pci = |part: &&str| part.starts_with("pci") || (part.len() == 12 && part.as_bytes()[10] == b'.');
        let path = self.get(device).unwrap_or_default();
        let path = path.split('/').filter(is_pci).map(str::to_owned).collect();
        // -1 where the firmware doesn't say.
        Place { node: self.get(numa_node).and_then(|node| node.parse().ok()), path }
    }
}

impl Topology {
    /// This host's.
    #[must_use]
    pub fn read() -> Self {
        Self::of(&Tree::record())
    }

    /// That of a recorded tree.
    #[must_use]
    pub fn of(tree: &Tree) -> Self {
        let mut nodes: Vec<_> = tree
            .entries("devices/system/node")
            .into_iter()
            .filter_map(|name| {
                let processors = tree.get(&format!("devices/system/node/{name}/cpulist"))?.to_owned();
                Some(Node { number: name.strip_prefix("node")?.parse().ok()?, processors })
            })
            .collect();
        nodes.sort_by_key(|node| node.number);
        Self {
            nodes,
            nics: tree.entries("class/net").iter().filter_map(|name| nic(tree, name)).collect(),
            rdma: tree.entries("class/infiniband").iter().map(|name| rdma(tree, name)).collect(),
            accelerators: tree.entries("bus/pci/devices").iter().filter_map(|name| accelerator(tree, name)).collect(),
        }
    }
}

/// A network device with hardware: virtual ones (loopback, bridges) have none.
fn nic(tree: &Tree, name: &str) -> Option<Nic> {
    let entry = format!("class/net/{name}");
    tree.get(&format!("{entry}/device"))?;
    let megabits = tree.get(&format!("{entry}/speed")).and_then(|speed| speed.parse::<u64>().ok());
    Some(Nic {
        name: name.to_owned(),
        is_up: tree.get(&format!("{entry}/operstate")) == Some("up"),
        bits_per_second: megabits.filter(|speed| *speed > 0).map(|speed| speed * 1_000_000),
        place: tree.place(&format!("{entry}/device"), &format!("{entry}/device/numa_node")),
    })
}

fn rdma(tree: &Tree, name: &str) -> RdmaDevice {
    let entry = format!("class/infiniband/{name}");
    let ports = tree.entries(&format!("{entry}/ports"));
    let active = ports
        .iter()
        .filter(|port| tree.get(&format!("{entry}/ports/{port}/state")).is_some_and(|state| state.ends_with("ACTIVE")));
    // "100 Gb/sec (4X EDR)"
    let rates = active.clone().filter_map(|port| {
        let rate = tree.get(&format!("{entry}/ports/{port}/rate"))?;
        let gigabits = rate.split(' ').next()?.parse::<f64>().ok()?;
        Some((gigabits * 1e9) as u64)
    });
    RdmaDevice {
        name: name.to_owned(),
        is_up: active.count() > 0,
        bits_per_second: rates.max(),
        place: tree.place(&format!("{entry}/device"), &format!("{entry}/device/numa_node")),
    }
}

/// Display controllers (class 03) and processing accelerators (class 12).
fn accelerator(tree: &Tree, name: &str) -> Option<Accelerator> {
    let entry = format!("bus/pci/devices/{name}");
    let class = tree.get(&format!("{entry}/class"))?;
    if !class.starts_with("0x03") && !class.starts_with("0x12") {
        return None;
    }
    Some(Accelerator { name: name.to_owned(), place: tree.place(&entry, &format!("{entry}/numa_node")) })
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn is_numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Bytes per second of the device that leads to an address, if the system knows: where an estimate begins.
pub(crate) fn bandwidth_towards(address: IpAddr) -> Option<f64> {
    // Of this thread's network, which may be another than the process began with.
    let routes = |name| std::fs::read_to_string(format!("/proc/thread-self/net/{name}")).ok();
    let device = match address.to_canonical() {
        IpAddr::V4(address) => device_v4(&routes("route")?, address.to_bits())?,
        IpAddr::V6(address) => device_v6(&routes("ipv6_route")?, address.to_bits())?,
    };
    let speed = std::fs::read_to_string(format!("/sys/class/net/{device}/speed")).ok()?;
    let megabits = speed.trim().parse::<u64>().ok().filter(|speed| *speed > 0)?;
    Some(megabits as f64 * 1e6 / 8.0)
}

/// The device of the longest matching route of `/proc/net/route`, whose numbers are in network byte order.
fn device_v4(table: &str, address: u32) -> Option<String> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok().map(u32::swap_bytes);
    let routes = table.lines().skip(1).filter_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let (destination, mask) = (number(columns.get(1)?)?, number(columns.get(7)?)?);
        (address & mask == destination).then_some((mask, *columns.first()?))
    });
    routes.max_by_key(|(mask, _)| *mask).map(|(_, device)| device.to_owned())
}

/// The same for `/proc/net/ipv6_route`.
fn device_v6(table: &str, address: u128) -> Option<String> {
    let routes = table.lines().filter_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let destination = u128::from_str_radix(columns.first()?, 16).ok()?;
        let length = u32::from_str_radix(columns.get(1)?, 16).ok().filter(|length| *length <= 128)?;
        let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
        (address & mask == destination).then_some((length, *columns.last()?))
    });
    routes.max_by_key(|(length, _)| *length).map(|(_, device)| device.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets, each with a switch under which a GPU and an RDMA card sit; recorded by hand after real machines.
    const TWO_SOCKETS: &str = "
        devices/system/node/node0/cpulist = 0-31,64-95
        devices/system/node/node1/cpulist = 32-63,96-127
        devices/system/node/node10/cpulist = 128
        class/net/lo/operstate = unknown
        class/net/ens1f0/speed = 100000
        class/net/ens1f0/operstate = up
        class/net/ens1f0/device/numa_node = 0
        class/net/ens1f0/device -> devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0
        class/net/ens1f1/speed = -1
        class/net/ens1f1/operstate = down
        class/net/ens1f1/device/numa_node = 0
        class/net/ens1f1/device -> devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.1
        class/infiniband/mlx5_0/device/numa_node = 0
        class/infiniband/mlx5_0/device -> devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0
        class/infiniband/mlx5_0/ports/1/state = 4: ACTIVE
        class/infiniband/mlx5_0/ports/1/rate = 100 Gb/sec (4X EDR)
        class/infiniband/mlx5_0/ports/2/state = 1: DOWN
        class/infiniband/mlx5_0/ports/2/rate = 400 Gb/sec (4X NDR)
        class/infiniband/mlx5_1/device/numa_node = 1
        class/infiniband/mlx5_1/device -> devices/pci0000:97/0000:97:01.0/0000:98:00.0
        class/infiniband/mlx5_1/ports/1/state = 1: DOWN
        class/infiniband/mlx5_1/ports/1/rate = 2.5 Gb/sec (1X SDR)
        bus/pci/devices/0000:18:00.0/class = 0x030200
        bus/pci/devices/0000:18:00.0/numa_node = 0
        bus/pci/devices/0000:18:00.0 -> devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0
        bus/pci/devices/0000:26:00.0/class = 0x030200
        bus/pci/devices/0000:26:00.0/numa_node = 0
        bus/pci/devices/0000:26:00.0 -> devices/pci0000:15/0000:15:05.0/0000:26:00.0
        bus/pci/devices/0000:19:00.0/class = 0x020000
        bus/pci/devices/0000:19:00.0/numa_node = 0
        bus/pci/devices/0000:19:00.0 -> devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0";

    /// A virtual machine with one virtio card that does not know its speed; recorded by `Tree::record`.
    const VIRTUAL: &str = "
        bus/pci/devices/0000:00:03.0 -> devices/pci0000:00/0000:00:03.0
        bus/pci/devices/0000:00:03.0/class = 0x020000
        bus/pci/devices/0000:00:03.0/numa_node = -1
        class/net/eth0/device -> devices/pci0000:00/0000:00:03.0/virtio2
        class/net/eth0/operstate = up
        class/net/eth0/speed = -1
        class/net/lo/operstate = unknown
        devices/system/node/node0/cpulist = 0-1";

    #[test]
    fn two_sockets_and_their_devices_are_found() {
        let topology = Topology::of(&Tree::from_text(TWO_SOCKETS));
        let numbers: Vec<_> = topology.nodes.iter().map(|node| (node.number, node.processors.as_str())).collect();
        assert_eq!(numbers, [(0, "0-31,64-95"), (1, "32-63,96-127"), (10, "128")]);
        let nics: Vec<_> =
            topology.nics.iter().map(|nic| (nic.name.as_str(), nic.is_up, nic.bits_per_second)).collect();
        assert_eq!(nics, [("ens1f0", true, Some(100_000_000_000)), ("ens1f1", false, None)]);
        let rdma: Vec<_> =
            topology.rdma.iter().map(|device| (device.name.as_str(), device.is_up, device.bits_per_second)).collect();
        assert_eq!(rdma, [("mlx5_0", true, Some(100_000_000_000)), ("mlx5_1", false, None)]);
        assert_eq!(topology.accelerators.len(), 2);
    }

    #[test]
    fn distance_follows_bridges_roots_and_nodes() {
        let topology = Topology::of(&Tree::from_text(TWO_SOCKETS));
        let (near, far) = (&topology.rdma[0].place, &topology.rdma[1].place);
        let gpus: Vec<_> = topology.accelerators.iter().map(|gpu| &gpu.place).collect();
        assert_eq!(near.distance(&topology.nics[0].place), Distance::Same);
        assert_eq!(near.distance(&topology.nics[1].place), Distance::Same, "two functions of one card");
        assert_eq!(near.distance(gpus[0]), Distance::Bridge);
        assert_eq!(near.distance(gpus[1]), Distance::Root);
        assert_eq!(near.distance(far), Distance::Far);
        assert_eq!(far.distance(gpus[0]), Distance::Far);
        assert_eq!(Place::default().distance(near), Distance::Node, "nobody knows");
        assert!(Distance::Same < Distance::Bridge && Distance::Node < Distance::Far);
    }

    #[test]
    fn a_card_that_knows_neither_speed_nor_node_is_found() {
        let topology = Topology::of(&Tree::from_text(VIRTUAL));
        let path = ["pci0000:00", "0000:00:03.0"].map(str::to_owned).to_vec();
        let place = Place { node: None, path };
        assert_eq!(topology.nics, [Nic { name: "eth0".into(), is_up: true, bits_per_second: None, place }]);
        assert_eq!((topology.rdma.len(), topology.accelerators.len()), (0, 0));
    }

    #[test]
    fn trees_come_back_from_their_text_and_any_text_is_a_tree() {
        for text in [
            TWO_SOCKETS,
            VIRTUAL,
            "",
            "nonsense\n = \n -> x",
            "class/net/ = 1\nclass/net/é/speed = 99999999999999999999999",
        ] {
            let tree = Tree::from_text(text);
            let again = Tree::from_text(&tree.to_text());
            assert_eq!(Topology::of(&again), Topology::of(&tree));
        }
    }

    #[test]
    fn a_copied_tree_is_recorded_with_its_links() {
        let folder = tempfile::tempdir().expect("folder");
        let root = folder.path();
        let device = root.join("devices/pci0000:00/0000:00:03.0");
        for made in [&device, &root.join("class/net/eth0"), &root.join("devices/system/node/node0")] {
            std::fs::create_dir_all(made).expect("made");
        }
        std::fs::write(root.join("class/net/eth0/speed"), "25000\n").expect("written");
        std::fs::write(device.join("numa_node"), "0\n").expect("written");
        std::fs::write(root.join("devices/system/node/node0/cpulist"), "0-3\n").expect("written");
        std::os::unix::fs::symlink(&device, root.join("class/net/eth0/device")).expect("linked");
        let topology = Topology::of(&Tree::record_from(root));
        assert_eq!(topology.nics[0].bits_per_second, Some(25_000_000_000));
        assert_eq!(topology.nics[0].place.node, Some(0));
        assert_eq!(topology.nics[0].place.path.len(), 2);
        assert_eq!(topology.nodes.len(), 1);
    }

    #[test]
    fn the_longest_route_names_the_device() {
        let table = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
                     eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0\n\
                     eth1 00644D0A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n";
        let address = |text: &str| text.parse::<std::net::Ipv4Addr>().expect("an address").to_bits();
        assert_eq!(device_v4(table, address("10.77.100.2")).as_deref(), Some("eth1"));
        assert_eq!(device_v4(table, address("10.77.101.2")).as_deref(), Some("eth0"));
        assert_eq!(device_v4("", 1), None);
        let zeros = "00000000000000000000000000000000";
        let table = format!(
            "fd000000000000000000000000000000 40 {zeros} 00 {zeros} 00000100 00000001 00000000 00000001 eth1\n\
             {zeros} 00 {zeros} 00 {zeros} 00000400 00000003 00000000 00000003 eth0\n"
        );
        let address = |text: &str| text.parse::<std::net::Ipv6Addr>().expect("an address").to_bits();
        assert_eq!(device_v6(&table, address("fd00::7")).as_deref(), Some("eth1"));
        assert_eq!(device_v6(&table, address("2001:db8::7")).as_deref(), Some("eth0"));
        assert_eq!(device_v6("garbage\n00 zz\n", 1), None);
    }
}
