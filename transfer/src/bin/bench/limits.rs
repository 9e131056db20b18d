//! What the machine can do: bare blocking sockets, iperf3, memcpy between mappings.
#![expect(unsafe_code, reason = "maps memory of its own to measure memcpy")]

use std::fs::File;
use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memmap2::{MmapMut, MmapOptions};
use socket2::{Domain, SockRef, Socket, Type};
use tidepool_transfer::Direction;

use crate::Error;
use crate::target::{Process, say};

/// Buffers of both ends: what the engine's data connections have.
const SOCKET_BYTES: usize = 4 << 20;

/// A process that answers on bare sockets: each request is two numbers, how many more bytes it has and how many bytes
/// are wanted.
pub(crate) struct Bare {
    process: Process,
}

impl Bare {
    pub(crate) fn start() -> Result<Self, Error> {
        Ok(Self { process: Process::start(&["limit-server"])? })
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    fn connect(&self) -> Result<TcpStream, Error> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_recv_buffer_size(SOCKET_BYTES)?;
        socket.set_send_buffer_size(SOCKET_BYTES)?;
        socket.connect(&self.process.address.parse::<std::net::SocketAddr>()?.into())?;
        let stream = TcpStream::from(socket);
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    fn connect_unix(&self) -> Result<UnixStream, Error> {
        Ok(UnixStream::connect_addr(&name(&self.process.address)?)?)
    }

    /// Bytes a second of a stream towards us or from us, 1 MiB a call, over as much memory as the engine's side walks over.
    pub(crate) fn stream(&self, direction: Direction, duration: Duration) -> Result<f64, Error> {
        let mut stream = self.connect()?;
        let mut memory = MmapOptions::new().len(32 << 20).populate().map_anon()?;
        memory.fill(2);
        let [sent, wanted] = if direction == Direction::Read { [0, u64::MAX] } else { [u64::MAX - 16, 0] };
        stream.write_all(&header(sent, wanted))?;
        let (started, mut bytes) = (Instant::now(), 0_u64);
        while started.elapsed() < duration {
            let at = (bytes % (32 << 20)) as usize;
            let part = &mut memory[at..at + (1 << 20)];
            match direction {
                Direction::Read => stream.read_exact(part)?,
                Direction::Write => stream.write_all(part)?,
            }
            bytes += 1 << 20;
        }
        Ok(bytes as f64 / started.elapsed().as_secs_f64())
    }

    /// Mean round trip: a request of `sent` bytes, an answer of `wanted`.
    pub(crate) fn round_trip(&self, unix: bool, sent: u64, wanted: u64, duration: Duration) -> Result<Duration, Error> {
        if unix {
            ping(self.connect_unix()?, sent, wanted, duration)
        } else {
            ping(self.connect()?, sent, wanted, duration)
        }
    }
}

/// A file in the page cache, and memory to read it to.
pub(crate) struct Cached {
    file: File,
    memory: MmapMut,
}

impl Cached {
    pub(crate) fn open(path: &str) -> Result<Self, Error> {
        let file = File::open(path)?;
        let mut memory = MmapOptions::new().len(32 << 20).populate().map_anon()?;
        memory.fill(2);
        Ok(Self { file, memory })
    }

    /// Bytes a second of reads of `block` bytes each, one after another.
    pub(crate) fn read(&mut self, block: usize, duration: Duration) -> Result<f64, Error> {
        let (length, started, mut bytes) = (self.file.metadata()?.len(), Instant::now(), 0_u64);
        while started.elapsed() < duration {
            let at = (bytes % self.memory.len() as u64) as usize;
            self.file.read_exact_at(&mut self.memory[at..at + block], bytes % length)?;
            bytes += block as u64;
        }
        Ok(bytes as f64 / started.elapsed().as_secs_f64())
    }
}

fn name(address: &str) -> Result<SocketAddr, Error> {
    let port = address.rsplit(':').next().unwrap_or_default();
    Ok(SocketAddr::from_abstract_name(format!("tidepool-bench-{port}"))?)
}

/// How many bytes follow, how many are wanted.
fn header(sent: u64, wanted: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sent.to_le_bytes());
    bytes[8..].copy_from_slice(&wanted.to_le_bytes());
    bytes
}

fn ping(mut stream: impl Read + Write, sent: u64, wanted: u64, duration: Duration) -> Result<Duration, Error> {
    let mut answer = vec![0; usize::try_from(wanted)?];
    let mut bytes = vec![0; usize::try_from(sent.max(16))?];
    bytes[..16].copy_from_slice(&header(sent.max(16) - 16, wanted));
    let (started, mut count) = (Instant::now(), 0_u32);
    while started.elapsed() < duration {
        stream.write_all(&bytes)?;
        stream.read_exact(&mut answer)?;
        count += 1;
    }
    Ok(started.elapsed() / count.max(1))
}

/// Serves until standard input ends.
pub(crate) fn serve() -> Result<(), Error> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    SockRef::from(&listener).set_recv_buffer_size(SOCKET_BYTES)?;
    SockRef::from(&listener).set_send_buffer_size(SOCKET_BYTES)?;
    let address = listener.local_addr()?.to_string();
    let local = UnixListener::bind_addr(&name(&address)?)?;
    let mut memory = MmapOptions::new().len(256 << 20).populate().map_anon()?;
    memory.fill(1);
    let memory = Arc::new(memory);
    let unix_memory = Arc::clone(&memory);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = stream.set_nodelay(true);
            let memory = Arc::clone(&memory);
            std::thread::spawn(move || answer(stream, &memory));
        }
    });
    std::thread::spawn(move || {
        for stream in local.incoming().flatten() {
            let memory = Arc::clone(&unix_memory);
            std::thread::spawn(move || answer(stream, &memory));
        }
    });
    say(&format!("{{\"address\":\"{address}\"}}"))?;
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

/// One connection's life, until an error ends it. A ping's request is received at once: it is a bare ping-pong.
fn answer(mut stream: impl Read + Write, memory: &[u8]) -> Result<(), Error> {
    const PING: usize = 4096;
    let (mut request, mut filled) = (vec![0; PING], 0);
    let read = |stream: &mut dyn Read, to: &mut [u8]| match stream.read(to)? {
        0 => Err(Error::from("it has ended")),
        count => Ok(count),
    };
    loop {
        while filled < 16 {
            filled += read(&mut stream, &mut request[filled..])?;
        }
        let word = |at: usize| u64::from_le_bytes(request[at..at + 8].try_into().unwrap_or_default());
        let (mut left, mut wanted) = ((word(0) + 16).saturating_sub(filled as u64), word(8));
        // More than a ping's is a stream: it goes over as much memory as it came from.
        let mut target = vec![0; if left > PING as u64 { 32 << 20 } else { PING }];
        let mut at = 0;
        while left > 0 {
            let length = left.min(1 << 20).min((target.len() - at) as u64) as usize;
            let count = read(&mut stream, &mut target[at..at + length])?;
            left -= count as u64;
            at = (at + count) % target.len();
        }
        filled = 0;
        let mut at = 0;
        while wanted > 0 {
            let length = wanted.min(1 << 20) as usize;
            stream.write_all(&memory[at..at + length])?;
            at = (at + (1 << 20)) % (256 << 20);
            wanted -= length as u64;
        }
    }
}

/// Bytes a second of iperf3, in so many streams; `None` if it isn't installed.
pub(crate) fn iperf(direction: Direction, streams: usize, duration: Duration) -> Option<f64> {
    let port = TcpListener::bind("127.0.0.1:0").ok()?.local_addr().ok()?.port().to_string();
    let mut server = Command::new("iperf3")
        .args(["-s", "-1", "-B", "127.0.0.1", "-p", &port])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let (seconds, streams) = (duration.as_secs().max(1).to_string(), streams.to_string());
    let reverse: &[&str] = if direction == Direction::Read { &["-R"] } else { &[] };
    // The server needs a moment to listen; it says nothing when it does.
    let answer = (0..50).find_map(|_| {
        let client = Command::new("iperf3")
            .args(["-c", "127.0.0.1", "-p", &port, "-P", &streams, "-w", "4M", "-l", "1M", "-f", "k", "-t", &seconds])
            .args(reverse)
            .stderr(Stdio::null())
            .output()
            .ok()?;
        if !client.status.success() {
            std::thread::sleep(Duration::from_millis(20));
        }
        client.status.success().then_some(client.stdout)
    });
    let _ = server.kill();
    let _ = server.wait();
    // "[SUM]   0.00-1.00   sec  5.58 GBytes  47900000 Kbits/sec                  receiver": the last is that of all streams.
    let answer = String::from_utf8(answer?).ok()?;
    let line = answer.lines().rfind(|line| line.ends_with("receiver"))?;
    let words: Vec<_> = line.split_whitespace().collect();
    let unit = words.iter().position(|word| *word == "Kbits/sec")?;
    Some(words[unit - 1].parse::<f64>().ok()? * 1000.0 / 8.0)
}

/// Two memfd mappings to copy between.
pub(crate) struct Mappings {
    source: MmapMut,
    target: MmapMut,
}

impl Mappings {
    /// As large as a target's segment, and as what an initiator reads into.
    pub(crate) fn new() -> Result<Self, Error> {
        let map = |bytes| -> Result<MmapMut, Error> {
            let file = rustix::fs::memfd_create("tidepool-bench", rustix::fs::MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&file, bytes)?;
            let mut options = MmapOptions::new();
            options.len(usize::try_from(bytes)?).populate();
            // SAFETY: the memfd was made here and its descriptor is dropped here: nobody else maps or changes it.
            Ok(unsafe { options.map_mut(&file) }?)
        };
        let (mut source, mut target) = (map(256 << 20)?, map(32 << 20)?);
        source.fill(1);
        target.fill(2);
        Ok(Self { source, target })
    }

    /// Bytes a second of memcpy in slices of so many bytes.
    pub(crate) fn copy(&mut self, slice: usize, duration: Duration) -> f64 {
        let (started, mut bytes) = (Instant::now(), 0);
        while started.elapsed() < duration {
            let (from, to) = (bytes % (256 << 20), bytes % (32 << 20));
            self.target[to..to + slice].copy_from_slice(black_box(&self.source[from..from + slice]));
            bytes += slice;
        }
        black_box(&self.target);
        bytes as f64 / started.elapsed().as_secs_f64()
    }
}
