//! One network namespace a node, joined by a bridge in a namespace of the clients, and cuts between them. Cuts are silent:
//! packets vanish, no reset arrives. Needs root, iproute2 and nftables.
//!
//! ```text
//!  clients (hub) 10.79.0.254 ── bridge ──┬── node 0: 10.79.0.1
//!                                        ├── node 1: 10.79.0.2
//!                                        └── node 2: 10.79.0.3
//! ```

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::DrillError;
use crate::node_process::Place;

/// The end of an address that is the clients'.
const HUB: u8 = 254;

/// Which way packets vanish, seen from the node that is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Both,
    /// It hears, and is not heard.
    Outgoing,
}

/// The namespaces; they go with this.
pub(crate) struct Network {
    hub: String,
    nodes: Vec<String>,
}

/// Why there can be no namespaces; `None` if there can.
pub(crate) fn why_not() -> Option<&'static str> {
    let has = |tool| Command::new(tool).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !rustix::process::geteuid().is_root() {
        return Some("needs root");
    }
    if !(has("ip") && has("nft")) {
        return Some("needs iproute2 and nftables");
    }
    let probe = format!("td{}p", std::process::id());
    let may = run("ip", &["netns", "add", &probe]).is_ok();
    // It is there only if it could be made.
    let _gone = run("ip", &["netns", "del", &probe]);
    if may { None } else { Some("needs network namespaces") }
}

impl Network {
    /// Namespaces for so many nodes.
    pub(crate) fn new(count: usize) -> Result<Self, DrillError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = format!("td{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let hub = format!("{id}h");
        run("ip", &["netns", "add", &hub])?;
        // From here on, dropping takes down what there is.
        let mut network = Self { hub: hub.clone(), nodes: Vec::new() };
        run("ip", &["-n", &hub, "link", "set", "lo", "up"])?;
        run("ip", &["-n", &hub, "link", "add", "bridge", "type", "bridge"])?;
        run("ip", &["-n", &hub, "addr", "add", &format!("{}/24", address(HUB)), "dev", "bridge"])?;
        run("ip", &["-n", &hub, "link", "set", "bridge", "up"])?;
        for node in 0..count {
            let (name, port) = (format!("{id}n{node}"), format!("port{node}"));
            run("ip", &["netns", "add", &name])?;
            network.nodes.push(name.clone());
            run("ip", &["-n", &name, "link", "set", "lo", "up"])?;
            let peer = ["type", "veth", "peer", "name", "net", "netns", &name];
            run("ip", &[&["link", "add", &port, "netns", &hub][..], &peer].concat())?;
            run("ip", &["-n", &hub, "link", "set", &port, "master", "bridge", "up"])?;
            run("ip", &["-n", &name, "addr", "add", &format!("{}/24", node_address(node)), "dev", "net"])?;
            run("ip", &["-n", &name, "link", "set", "net", "up"])?;
        }
        Ok(network)
    }

    /// Lets each link take so many bits a second, either way.
    pub(crate) fn limit(&self, bits: u64) -> Result<(), DrillError> {
        let rate = format!("{bits}bit");
        let shape = ["root", "tbf", "rate", &rate, "burst", "1mb", "latency", "50ms"];
        for (node, name) in self.nodes.iter().enumerate() {
            run("tc", &[&["-n", name, "qdisc", "add", "dev", "net"][..], &shape].concat())?;
            run("tc", &[&["-n", &self.hub, "qdisc", "add", "dev", &format!("port{node}")][..], &shape].concat())?;
        }
        Ok(())
    }

    /// Moves this thread, and those that it starts from here on, to the clients' side.
    pub(crate) fn enter(&self) -> Result<(), DrillError> {
        let namespace = File::open(format!("/run/netns/{}", self.hub))?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).map_err(std::io::Error::from)?;
        Ok(())
    }

    /// Where the nodes run.
    pub(crate) fn places(&self) -> Vec<Place> {
        let place = |(node, name): (usize, &String)| Place { network: Some((name.clone(), node_address(node))) };
        self.nodes.iter().enumerate().map(place).collect()
    }

    /// Lets packets between `node` and `others` vanish, and with `clients` also those between it and the clients.
    pub(super) fn cut(
        &self,
        node: usize,
        others: &BTreeSet<usize>,
        clients: bool,
        direction: Direction,
    ) -> Result<(), DrillError> {
        let mut peers: Vec<String> = others.iter().map(|&other| node_address(other).to_string()).collect();
        if clients {
            peers.push(address(HUB).to_string());
        }
        let peers = peers.join(", ");
        let incoming = match direction {
            Direction::Both => format!("add rule ip cut in ip saddr {{ {peers} }} drop\n"),
            Direction::Outgoing => String::new(),
        };
        self.nft(
            node,
            &format!(
                "add table ip cut\n\
                 add chain ip cut in {{ type filter hook input priority 0; }}\n\
                 add chain ip cut out {{ type filter hook output priority 0; }}\n\
                 {incoming}\
                 add rule ip cut out ip daddr {{ {peers} }} drop\n"
            ),
        )
    }

    /// Ends the cut of that node.
    pub(super) fn mend(&self, node: usize) -> Result<(), DrillError> {
        self.nft(node, "delete table ip cut\n")
    }

    fn nft(&self, node: usize, rules: &str) -> Result<(), DrillError> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.nodes[node], "nft", "-f", "-"]).stdin(Stdio::piped());
        let mut child = command.spawn()?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(rules.as_bytes())?;
        }
        let status = child.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(DrillError::Tool { command: format!("nft: {rules}"), said: String::new() })
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in self.nodes.iter().chain([&self.hub]) {
            // What can't be taken down now can't be later.
            let _gone = run("ip", &["netns", "del", name]);
        }
    }
}

fn address(end: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 79, 0, end)
}

fn node_address(node: usize) -> Ipv4Addr {
    address(node as u8 + 1)
}

/// Runs a tool to its end.
pub(super) fn run(program: &str, arguments: &[&str]) -> Result<(), DrillError> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(DrillError::Tool { command: format!("{program} {}", arguments.join(" ")), said })
}
