//! Names and addresses of a store: one that moves behind its name is found again, and one without IPv4 is found at all.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_client::{Client, ClientSettings, PutOptions};
use tidepool_stress::cluster::program;
use tidepool_stress::node_process::{NodeOptions, NodeProcess, Place};

const NAME: &str = "store.tidepool.test";
/// Set where a test runs in a network and with mounts of its own. (What begins with the program's name is a setting of the node.)
const INSIDE: &str = "OWN_NAMES";

fn must(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status();
    assert!(status.is_ok_and(|status| status.success()), "{program} {arguments:?}");
}

/// Runs `test` in a process with an empty network and mounts of its own; `name` is that of the test that calls this.
fn in_own_network(name: &str, test: impl Future<Output = ()>) {
    if std::env::var_os(INSIDE).is_some() {
        must("ip", &["link", "set", "lo", "up"]);
        return tokio::runtime::Runtime::new().expect("runtime").block_on(test);
    }
    let unshare = |arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--net"]).args(arguments).stdin(Stdio::null());
        command
    };
    if !unshare(&["nft", "-v"]).output().is_ok_and(|output| output.status.success()) {
        return eprintln!("skipped: needs root, unshare, nft and namespaces");
    }
    let this = std::env::current_exe().expect("this test");
    let output = unshare(&[this.to_str().expect("a name"), name, "--exact"]).env(INSIDE, "1").output().expect("ran");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

/// At the usual ports of `address`, over what an earlier one kept in `folder`.
fn start(address: IpAddr, folder: &Path) -> NodeProcess {
    let listen = |(section, port)| format!("{section}.listen='{}'", SocketAddr::from((address, port)));
    let mut settings: Vec<String> = [("grpc", 7420), ("engine", 7421), ("admin", 7422)].map(listen).into();
    settings.push(format!("dram.folder='{}'", folder.display()));
    let options = NodeOptions {
        program: program(&std::env::current_exe().expect("this test")).expect("the tidepool binary is built"),
        data: folder.join("data"),
        dram_bytes: 64 << 20,
        nvme_bytes: 0,
        settings,
        place: Place::default(),
    };
    tokio::task::block_in_place(|| NodeProcess::start(options)).expect("a node")
}

/// One that shares memory with a node on its host, one that goes by TCP alone.
fn clients(endpoint: &str) -> [Client; 2] {
    let by_tcp = ClientSettings { same_host: false, local_reads: false, ..ClientSettings::default() };
    let client = |settings| Client::builder().endpoint(endpoint).settings(settings).build().expect("a client");
    [ClientSettings::default(), by_tcp].map(client)
}

fn value(number: usize) -> Bytes {
    vec![number as u8; 100_000].into()
}

/// B099: a service moves to another IP and its name follows; the old one is gone, or swallows what is sent to it.
#[test]
fn a_store_that_moves_behind_its_name_is_found_again() {
    in_own_network("a_store_that_moves_behind_its_name_is_found_again", async {
        let scratch = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let hosts = scratch.path().join("hosts");
        let address = |last: u8| Ipv4Addr::new(127, 0, 0, last);
        // Written as it is: the file that is mounted stays the same.
        let place = |last| std::fs::write(&hosts, format!("127.0.0.1 localhost\n{} {NAME}\n", address(last)));
        place(2).expect("written");
        must("mount", &["--bind", hosts.to_str().expect("a name"), "/etc/hosts"]);
        let mut node = start(address(2).into(), scratch.path());
        let clients = clients(&format!("{NAME}:7420"));
        for (number, client) in clients.iter().enumerate() {
            let key = format!("key {number}");
            client.put(key, value(number), &PutOptions::default()).await.expect("stored");
        }
        for (old, new) in [(2, 3), (3, 4)] {
            if new == 4 {
                // Without a word, as a host that loses its power.
                let drop = |end| format!("add rule ip old in ip {end} {} drop;", address(old));
                let [to, from] = ["daddr", "saddr"].map(drop);
                let chain = "add chain ip old in { type filter hook input priority 0; }";
                must("nft", &[&format!("add table ip old; {chain}; {to} {from}")]);
            }
            tokio::task::block_in_place(|| node.kill()).expect("killed");
            place(new).expect("written");
            node = start(address(new).into(), scratch.path());
            for (number, client) in clients.iter().enumerate() {
                let began = Instant::now();
                let found = client.get(format!("key {number}")).await.expect("reached").expect("kept in memory");
                assert!(found.value == value(number), "client {number}");
                let key = format!("{new} {number}");
                client.put(key, "v".into(), &PutOptions::default()).await.expect("stored");
                // The call has a deadline of its own; what is wanted is far below that.
                assert!(began.elapsed() < Duration::from_secs(10), "client {number} took {:?}", began.elapsed());
            }
        }
    });
}

/// B097: a host that has no IPv4 at all.
#[test]
fn a_store_without_ipv4_is_found() {
    in_own_network("a_store_without_ipv4_is_found", async {
        let scratch = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let node = start(Ipv6Addr::LOCALHOST.into(), scratch.path());
        must("ip", &["addr", "del", "127.0.0.1/8", "dev", "lo"]);
        for (number, client) in clients("[::1]:7420").iter().enumerate() {
            let key = format!("key {number}");
            client.put(&key, value(number), &PutOptions::default()).await.expect("stored");
            let found = client.get(&key).await.expect("reached").expect("stored");
            assert!(found.value == value(number), "client {number}");
        }
        drop(node);
    });
}
