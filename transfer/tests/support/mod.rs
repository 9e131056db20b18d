//! Two engines in one process, and what they move between them.
#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses a part")]

pub(crate) mod authority;
pub(crate) mod network;
pub(crate) mod process;
pub(crate) mod proxy;

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, kill_process, prlimit, waitid};
use tidepool_transfer::{
    AccessRights, BatchOptions, Direction, Engine, Memory, PeerId, PeerMapping, RegionId, RegionTicket, RemoteSlice,
    Request, SegmentId, Settings, Slice, TransportKind,
};

pub(crate) const WAYS: [TransportKind; 2] = [TransportKind::SharedMemory, TransportKind::Tcp];

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub(crate) fn settings() -> Settings {
    Settings { listen: vec!["127.0.0.1:0".into()], ..Settings::default() }
}

pub(crate) fn start(settings: Settings) -> Engine {
    Engine::start(settings).expect("started")
}

pub(crate) fn address(engine: &Engine) -> String {
    engine.addresses()[0].to_string()
}

/// Bytes that tell their place.
pub(crate) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    // A prime period, so that no power of two is the same as another; copied by doubling, which is fast unoptimised.
    let start: Vec<u8> = (0..4093_u64).map(|index| (((index + seed * 251) * 0x9e37_79b9) >> 13) as u8).collect();
    start.repeat(length / 4093 + 1)[..length].to_vec()
}

pub(crate) fn bytes(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len() as usize];
    memory.read_at(0, &mut bytes).expect("inside");
    bytes
}

/// The 4 KiB that the engine at `address` has registered as `pool`.
pub(crate) fn read_pool(here: &Engine, address: &str) -> Vec<u8> {
    let peer = here.connect(address, soon()).expect("connected");
    let segment = here.open(peer, "pool", soon()).expect("opened");
    let local = Memory::anonymous(4096).expect("memory");
    let region = here.register(&local, AccessRights::LOCAL, None).expect("registered").region;
    let read = Request {
        direction: Direction::Read,
        local: Slice { region, offset: 0, length: 4096 },
        remote: RemoteSlice { segment, offset: 0 },
    };
    here.transfer(&[read], BatchOptions::default()).expect("submitted").all().expect("read");
    bytes(&local)
}

/// An asking engine with memory, and a peer that registered some.
pub(crate) struct Pair {
    pub(crate) here: Engine,
    pub(crate) there: Engine,
    pub(crate) local: Memory,
    pub(crate) remote: Memory,
    pub(crate) region: RegionId,
    pub(crate) ticket: RegionTicket,
    pub(crate) peer: PeerId,
    pub(crate) segment: SegmentId,
}

impl Pair {
    pub(crate) fn new(length: usize) -> Self {
        Self::with(length, AccessRights::READ_WRITE, settings(), settings())
    }

    pub(crate) fn with(length: usize, rights: AccessRights, here: Settings, there: Settings) -> Self {
        let (here, there) = (start(here), start(there));
        let remote = Memory::shared(length, PeerMapping::Writable).expect("memory");
        let local = Memory::shared(length, PeerMapping::ReadOnly).expect("memory");
        let ticket = there.register(&remote, rights, Some("pool")).expect("registered");
        let region = here.register(&local, AccessRights::LOCAL, None).expect("registered").region;
        let peer = here.connect(&address(&there), soon()).expect("connected");
        let segment = here.open(peer, "pool", soon()).expect("opened");
        Self { here, there, local, remote, region, ticket, peer, segment }
    }

    pub(crate) fn request(&self, direction: Direction, local: u64, remote: u64, length: u64) -> Request {
        Request {
            direction,
            local: Slice { region: self.region, offset: local, length },
            remote: RemoteSlice { segment: self.segment, offset: remote },
        }
    }
}

/// An engine in a process of its own, with memory named "bench": 64 MiB unless told otherwise.
pub(crate) struct Target {
    child: Child,
    pub(crate) address: String,
}

impl Target {
    pub(crate) fn start(listen: &str) -> Self {
        Self::with(listen, &["--bytes", "64M"])
    }

    pub(crate) fn with(listen: &str, arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tidepool-transfer-bench"))
            .args(["target", "--listen", listen])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawned");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("said");
        let address = line.split('"').nth(3).expect("an address").to_owned();
        Self { child, address }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("signalled");
    }

    /// Stops it; none of its threads runs when this returns.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
        let stopped = waitid(WaitId::Pid(Pid::from_child(&self.child)), WaitIdOptions::STOPPED);
        assert!(stopped.expect("waited").is_some_and(|status| status.stopped()));
    }

    /// Bounds the numbers of its descriptors, `None`: by the lowest that is free; gives the bound before.
    pub(crate) fn limit_descriptors(&self, limit: Option<Rlimit>) -> Rlimit {
        let folder = format!("/proc/{}/fd", self.child.id());
        let is_free = |number: &u64| std::fs::symlink_metadata(format!("{folder}/{number}")).is_err();
        let limit = limit
            .unwrap_or_else(|| Rlimit { current: (0..).find(is_free), maximum: getrlimit(Resource::Nofile).maximum });
        prlimit(Some(Pid::from_child(&self.child)), Resource::Nofile, limit).expect("set")
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn by(transport: TransportKind) -> BatchOptions {
    BatchOptions { transport: Some(transport), ..BatchOptions::default() }
}

/// Runs a future on this thread: a waker that unparks it is all the runtime that is needed.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(output) => break output,
            std::task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(20)),
        }
    }
}
