//! Two network namespaces joined by pairs of virtual Ethernet devices of chosen speeds. Needs root, iproute2 and nftables.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// How a rail is cut. Both are silent: no reset arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The peer's device goes down, as if the cable were pulled.
    LinkDown,
    /// The peer's firewall drops what comes and goes.
    Drop,
}

pub(crate) struct Network {
    here: String,
    there: String,
    rails: usize,
}

/// Why these tests can't run; `None` if they can.
pub(crate) fn why_not() -> Option<&'static str> {
    let has = |tool| Command::new(tool).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !rustix::process::geteuid().is_root() {
        return Some("needs root");
    }
    if !(has("ip") && has("tc") && has("nft")) {
        return Some("needs iproute2 and nftables");
    }
    // Tests of one process ask at the same time.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let probe = format!("tp{}-{}p", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let may = run("ip", &["netns", "add", &probe]);
    let _ = run("ip", &["netns", "del", &probe]);
    if may { None } else { Some("needs network namespaces") }
}

impl Network {
    /// A rail for each of `megabits`, a speed in both directions; 0 is the device's own.
    pub(crate) fn new(megabits: &[u32]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let network = Self { here: format!("tp{id}h"), there: format!("tp{id}t"), rails: megabits.len() };
        let ends = [(&network.here, 'h', 1), (&network.there, 't', 2)];
        for (name, ..) in ends {
            must("ip", &["netns", "add", name]);
            must("ip", &["-n", name, "link", "set", "lo", "up"]);
        }
        for (rail, megabits) in megabits.iter().enumerate() {
            let device = |end| format!("{end}{rail}");
            let peer = ["type", "veth", "peer", "name", &device('t'), "netns", &network.there];
            must("ip", &[&["link", "add", &device('h'), "netns", &network.here][..], &peer].concat());
            for (name, end, host) in ends {
                let address = format!("{}/24", Self::address(rail, host));
                must("ip", &["-n", name, "addr", "add", &address, "dev", &device(end)]);
                must("ip", &["-n", name, "link", "set", &device(end), "up"]);
                if *megabits > 0 {
                    let rate = format!("{megabits}mbit");
                    let shape = ["root", "tbf", "rate", &rate, "burst", "1mb", "latency", "50ms"];
                    must("tc", &[&["-n", name, "qdisc", "add", "dev", &device(end)][..], &shape].concat());
                }
            }
        }
        network
    }

    fn address(rail: usize, host: u8) -> String {
        format!("10.77.{}.{host}", 100 + rail)
    }

    /// Addresses of the other side, port 0, for `--listen`.
    pub(crate) fn listen(&self) -> String {
        (0..self.rails).map(|rail| format!("{}:0", Self::address(rail, 2))).collect::<Vec<_>>().join(",")
    }

    /// Moves this thread, and what it starts from here on, to this side.
    pub(crate) fn enter(&self) {
        let namespace = File::open(format!("/run/netns/{}", self.here)).expect("namespace");
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).expect("entered");
    }

    /// A command that runs on the other side.
    pub(crate) fn command_there(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.there, program]);
        command
    }

    pub(crate) fn cut(&self, rail: usize, how: Cut) {
        match how {
            Cut::LinkDown => must("ip", &["-n", &self.there, "link", "set", &format!("t{rail}"), "down"]),
            Cut::Drop => self.nft(&format!(
                "add table inet cut{rail}\n\
                 add chain inet cut{rail} in {{ type filter hook input priority 0; }}\n\
                 add chain inet cut{rail} out {{ type filter hook output priority 0; }}\n\
                 add rule inet cut{rail} in iifname \"t{rail}\" drop\n\
                 add rule inet cut{rail} out oifname \"t{rail}\" drop\n"
            )),
        }
    }

    pub(crate) fn mend(&self, rail: usize, how: Cut) {
        match how {
            Cut::LinkDown => must("ip", &["-n", &self.there, "link", "set", &format!("t{rail}"), "up"]),
            Cut::Drop => self.nft(&format!("delete table inet cut{rail}\n")),
        }
    }

    fn nft(&self, rules: &str) {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.there, "nft", "-f", "-"]).stdin(Stdio::piped());
        let mut child = command.spawn().expect("spawned");
        child.stdin.take().expect("piped").write_all(rules.as_bytes()).expect("written");
        assert!(child.wait().expect("ended").success(), "nft refused {rules}");
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = run("ip", &["netns", "del", &self.here]);
        let _ = run("ip", &["netns", "del", &self.there]);
    }
}

fn run(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Runs a tool of the system, which has to succeed.
pub(crate) fn must(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect("started");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}
