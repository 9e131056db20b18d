//! What the host is made of: NUMA nodes, network devices, and how far accelerators are from them.

use tidepool_transfer::topology::{Distance, Nic, Place, Topology};

use super::Finding;
use super::Verdict::{Good, Note};

pub(super) fn look() -> Vec<Finding> {
    of(&Topology::read())
}

fn of(topology: &Topology) -> Vec<Finding> {
    let nodes: Vec<_> =
        topology.nodes.iter().map(|node| format!("{}: processors {}", node.number, node.processors)).collect();
    let follows = match topology.nodes.len() {
        0 | 1 => "all memory is equally near",
        _ => "bind a node's process to one NUMA node, or start one node for each",
    };
    let numa = if nodes.is_empty() { "none are told of".to_owned() } else { nodes.join("; ") };
    let mut findings = vec![Finding::new(Good, "NUMA nodes", numa, follows)];
    findings.extend(topology.nics.iter().map(network));
    for accelerator in &topology.accelerators {
        let nics = topology.nics.iter().map(|nic| (&nic.name, &nic.place));
        let devices = topology.rdma.iter().map(|device| (&device.name, &device.place));
        let near = nics.chain(devices).map(|(name, place)| (place.distance(&accelerator.place), name)).min();
        let found = format!("{}{}", accelerator.name, at(&accelerator.place));
        findings.push(match near {
            Some((distance, name)) => {
                Finding::new(Good, "accelerator", found, format!("nearest to {name}: {}", words(distance)))
            }
            None => Finding::new(Note, "accelerator", found, "no network device with hardware is there"),
        });
    }
    findings
}

fn network(nic: &Nic) -> Finding {
    let speed = nic.bits_per_second.map(|speed| format!("{} Gb/s", speed as f64 / 1e9));
    let state = if nic.is_up { "up" } else { "down" };
    let known = speed.as_deref().unwrap_or("speed unknown");
    let found = format!("{}: {state}, {known}{}", nic.name, at(&nic.place));
    let follows = match (nic.is_up, speed) {
        (false, _) => "not used until it is up",
        (true, Some(_)) => "each address on it that the engine listens on is a rail",
        (true, None) => "each address on it that the engine listens on is a rail; its speed is learned",
    };
    Finding::new(Good, "network", found, follows)
}

fn at(place: &Place) -> String {
    place.node.map_or_else(String::new, |node| format!(", NUMA node {node}"))
}

fn words(distance: Distance) -> &'static str {
    match distance {
        Distance::Same => "the same card",
        Distance::Bridge => "under one PCI bridge",
        Distance::Root => "under one PCI root",
        Distance::Node => "at one NUMA node, as far as is known",
        Distance::Far => "at another NUMA node",
    }
}

#[cfg(test)]
mod tests {
    use tidepool_transfer::topology::Tree;

    use super::*;

    #[test]
    fn devices_are_shown_with_what_follows() {
        let tree = Tree::from_text(
            "devices/system/node/node0/cpulist = 0-3\n\
             devices/system/node/node1/cpulist = 4-7\n\
             class/net/eth0/device -> devices/pci0000:00/0000:00:01.0/0000:01:00.0\n\
             class/net/eth0/device/numa_node = 0\n\
             class/net/eth0/operstate = up\n\
             class/net/eth0/speed = 25000\n\
             bus/pci/devices/0000:02:00.0 -> devices/pci0000:00/0000:00:02.0/0000:02:00.0\n\
             bus/pci/devices/0000:02:00.0/class = 0x030200\n\
             bus/pci/devices/0000:02:00.0/numa_node = 0\n",
        );
        let said: Vec<_> =
            of(&Topology::of(&tree)).into_iter().map(|finding| (finding.found, finding.follows)).collect();
        assert_eq!(said.len(), 3);
        assert!(said[0].1.starts_with("bind"), "{said:?}");
        assert_eq!(said[1].0, "eth0: up, 25 Gb/s, NUMA node 0");
        assert_eq!(said[2].1, "nearest to eth0: under one PCI root");
    }
}
