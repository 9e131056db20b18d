//! Memory, limits, ports and devices.

use std::fs;
use std::net::{Ipv6Addr, SocketAddr, TcpListener};
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use tidepool_transfer::RdmaPort;

use super::super::output::size;
use super::Verdict::{Bad, Good, Note};
use super::{Finding, Verdict};
use crate::config::{Config, DeviceKind};

/// Descriptors that a busy node wants: connections, RocksDB's files, regions.
const WANTED_FILES: u64 = 65_536;
/// Below this a node with the default limit of connections runs out early.
const LEAST_FILES: u64 = 1024;
/// Registered buffers of the NVMe tier: three regions of 16 MiB and its read buffers.
const WANTED_LOCKED_BYTES: u64 = 128 << 20;

pub(super) fn look(config: &Config) -> Vec<Finding> {
    let mut findings = vec![
        cores(),
        memory(config),
        shared_memory(config),
        huge_pages(),
        locked_memory(),
        open_files(),
        port("grpc.listen", config.grpc.listen),
        port("admin.listen", config.admin.listen),
    ];
    findings.extend(config.engine_address().map(|listen| port("engine.listen", listen)));
    findings.extend(rdma());
    findings.push(gpu(config));
    findings
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// A field of /proc/meminfo, in bytes (or as counted, where there is no unit).
fn meminfo(field: &str) -> Option<u64> {
    let text = read("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let mut words = line.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    Some(if words.next() == Some("kB") { number << 10 } else { number })
}

fn cores() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let kernel = read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".into());
    let follows = if cores < 4 {
        "clients, node and disk share few cores: expect them to slow each other down"
    } else {
        "enough for a node and its clients"
    };
    Finding::new(if cores < 2 { Note } else { Good }, "cores", format!("{cores}, kernel {kernel}"), follows)
}

fn memory(config: &Config) -> Finding {
    let available = meminfo("MemAvailable").unwrap_or(0);
    let limit = read("/sys/fs/cgroup/memory.max").and_then(|limit| limit.parse().ok()).unwrap_or(u64::MAX);
    let usable = available.min(limit);
    let bounded = if limit < available { format!(", control group limit {}", size(limit)) } else { String::new() };
    let found = format!("{} available{bounded}", size(available));
    match config.dram.capacity {
        Some(dram) if dram.0 > usable => {
            let follows = format!("dram.capacity = {dram} does not fit: lower it, or free memory");
            Finding::new(Bad, "memory", found, follows)
        }
        Some(dram) => Finding::new(Good, "memory", found, format!("dram.capacity = {dram} fits")),
        None => {
            let lent = (usable / 4).clamp(256 << 20, 64 << 30);
            Finding::new(Good, "memory", found, format!("a node lends {} by default", size(lent)))
        }
    }
}

fn shared_memory(config: &Config) -> Finding {
    const WHAT: &str = "dram.folder";
    let folder = config.dram.folder.as_deref().unwrap_or(Path::new("/dev/shm"));
    let Ok(space) = rustix::fs::statvfs(folder) else {
        let found = format!("{} can't be looked at", folder.display());
        return Finding::new(
            Bad,
            WHAT,
            found,
            "set dram.folder to a tmpfs or hugetlbfs, or dram.survive_restart = false",
        );
    };
    let (total, free) = (space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize);
    let found = format!("{}: {} free of {}", folder.display(), size(free), size(total));
    let wanted = config.dram.capacity.map_or(256 << 20, |capacity| capacity.0);
    if !config.dram.survive_restart {
        return Finding::new(Good, WHAT, found, "not used: dram.survive_restart = false");
    }
    if free < wanted {
        let follows = format!(
            "{} do not fit: enlarge it (mount -o remount,size=.., docker --shm-size), or set dram.survive_restart = false",
            size(wanted)
        );
        return Finding::new(Bad, WHAT, found, follows);
    }
    Finding::new(Good, WHAT, found, "the DRAM tier outlives the process there")
}

fn huge_pages() -> Finding {
    const WHAT: &str = "huge pages";
    let reserved = meminfo("HugePages_Total").unwrap_or(0);
    let chosen = |path: &str| {
        let text = read(path).unwrap_or_default();
        let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        chosen.map_or_else(|| "unknown".to_owned(), |(chosen, _)| chosen.to_owned())
    };
    let shared = chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let private = chosen("/sys/kernel/mm/transparent_hugepage/enabled");
    let found = format!("{reserved} reserved, transparent: {private}, for shared memory: {shared}");
    if reserved > 0 || matches!(shared.as_str(), "always" | "within_size" | "advise" | "force") {
        Finding::new(Good, WHAT, found, "first touch of the DRAM tier is fast")
    } else {
        Finding::new(
            Note,
            WHAT,
            found,
            "the DRAM tier has pages of 4 KiB: its first touch at start takes about 0.5 s a GiB",
        )
    }
}

fn shown(limit: Option<u64>) -> String {
    limit.map_or_else(|| "no limit".into(), |limit| limit.to_string())
}

fn locked_memory() -> Finding {
    const WHAT: &str = "locked memory";
    let limit = getrlimit(Resource::Memlock).current;
    let found = limit.map_or_else(|| "no limit".into(), size);
    if rustix::process::geteuid().is_root() {
        return Finding::new(Good, WHAT, found, "root may lock what it likes");
    }
    if limit.is_some_and(|limit| limit < WANTED_LOCKED_BYTES) {
        let follows = "io_uring's buffers may stay unregistered, RDMA can't register segments: raise it (ulimit -l, LimitMEMLOCK)";
        return Finding::new(Note, WHAT, found, follows);
    }
    Finding::new(Good, WHAT, found, "buffers can be registered")
}

fn open_files() -> Finding {
    const WHAT: &str = "open files";
    let limit = getrlimit(Resource::Nofile);
    let found = format!("{} (may be raised to {})", shown(limit.current), shown(limit.maximum));
    let current = limit.current.unwrap_or(u64::MAX);
    let (verdict, follows) = if current < LEAST_FILES {
        (Bad, "too few for a node: raise it (ulimit -n, LimitNOFILE)")
    } else if current < WANTED_FILES {
        (Note, "enough for some hundred connections: raise it for more (ulimit -n, LimitNOFILE)")
    } else {
        (Good, "enough")
    };
    Finding::new(verdict, WHAT, found, follows)
}

fn port(field: &'static str, address: SocketAddr) -> Finding {
    match TcpListener::bind(address) {
        Ok(_) => Finding::new(Good, field, format!("{address} is free"), "a node can listen there"),
        Err(error) => {
            let follows = format!("stop who has it, or set {field} to another address (port 0 picks a free one)");
            Finding::new(Bad, field, format!("{address}: {error}"), follows)
        }
    }
}

/// Names in a folder of the system, sorted.
fn names(path: &str) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn rdma() -> Vec<Finding> {
    const WHAT: &str = "RDMA";
    let ports = match tidepool_transfer::rdma_ports() {
        Ok(ports) => ports,
        Err(why) => {
            let devices = names("/sys/class/infiniband");
            let follows = "transfers go over shared memory and TCP";
            return vec![if devices.is_empty() {
                Finding::new(Good, WHAT, why.to_string(), follows)
            } else {
                Finding::new(Note, WHAT, format!("{} can't be used: {why}", devices.join(", ")), follows)
            }];
        }
    };
    ports.iter().map(|port| rdma_port(WHAT, port)).collect()
}

fn rdma_port(what: &'static str, port: &RdmaPort) -> Finding {
    let RdmaPort { device, port: number, link_layer, is_active, speed, mtu, gids, chosen } = port;
    let gid = |(gid, is_routable_roce): &(Ipv6Addr, bool)| {
        if *is_routable_roce { format!("{gid} (RoCE v2)") } else { gid.to_string() }
    };
    let gids: Vec<String> = gids.iter().map(gid).collect();
    let state = if *is_active { "up" } else { "down" };
    let speed = *speed as f64 / 1e9;
    let found = format!(
        "{device} port {number}: {link_layer}, {state}, {speed} Gb/s, MTU {mtu}, GIDs: {}",
        if gids.is_empty() { "none".to_owned() } else { gids.join(", ") }
    );
    match chosen {
        Some(chosen) if *is_active => Finding::new(Good, what, found, format!("transfers go by it, as {chosen}")),
        Some(_) => Finding::new(Note, what, found, "not used until it is up"),
        None => Finding::new(Note, what, found, "not used: it has no address that transfers can go by"),
    }
}

fn gpu(config: &Config) -> Finding {
    const WHAT: &str = "GPU";
    let devices: Vec<String> = names("/proc/driver/nvidia/gpus");
    let stands_in = config.device.kind == DeviceKind::Host;
    let (verdict, follows): (Verdict, &str) = match (devices.is_empty(), stands_in) {
        (_, true) => (Note, "device.kind = host: host memory stands in for a GPU; for tests only"),
        (true, false) => (Good, "there is no device tier"),
        (false, false) => (Good, "there is no device tier yet: CUDA is not built"),
    };
    let found = if devices.is_empty() { "none".into() } else { format!("{} by NVIDIA", devices.len()) };
    Finding::new(verdict, WHAT, found, follows)
}
