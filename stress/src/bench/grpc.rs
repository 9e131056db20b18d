//! Puts and gets through a node process, four calls in flight, beside a raw blocking socket with default buffers that moves
//! the same bytes: by gRPC streams, and by the native client.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_client::workload::Payload;
use tidepool_client::{Client, ClientSettings, PutOptions};

use super::load::{node, runtime};
use super::pairs::{self, Sample};
use super::{BenchOptions, Error, Figure};
use crate::node_process::NodeProcess;

const TARGET: f64 = 0.6;
const IN_FLIGHT: usize = 4;
/// Objects that calls go round: more than fit a cache, fewer than fill the tier.
const OBJECTS: usize = 64;
const DRAM_BYTES: u64 = 2 << 30;
/// The node has its memory mapped by then.
const PATIENCE: Duration = Duration::from_secs(60);

/// By gRPC streams.
pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let grpc = ClientSettings { unary_put_bytes: 0, native: false, local_reads: false, ..ClientSettings::default() };
    measure(options, &[("stream", grpc)])
}

/// By the transfer engine: as between hosts, and by what one host has, but for reads that need no call.
pub(super) fn run_native(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let tcp = ClientSettings { same_host: false, ..ClientSettings::default() };
    let host = ClientSettings { local_reads: false, ..ClientSettings::default() };
    measure(options, &[("by tcp", tcp), ("on one host", host)])
}

fn measure(options: &BenchOptions, ways: &[(&str, ClientSettings)]) -> Result<Vec<Figure>, Error> {
    let runtime = runtime()?;
    let node = NodeProcess::start(node(options, "grpc", DRAM_BYTES, 0))?;
    // The node maps its memory in the background at first, on a core that the first figures would miss.
    let until = Instant::now() + PATIENCE;
    while node.resident_bytes()?.shared < DRAM_BYTES && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut figures = Vec::new();
    for (way, settings) in ways {
        figures.extend(measure_way(options, &runtime, &node, way, settings)?);
    }
    Ok(figures)
}

fn measure_way(
    options: &BenchOptions,
    runtime: &tokio::runtime::Runtime,
    node: &NodeProcess,
    way: &str,
    settings: &ClientSettings,
) -> Result<Vec<Figure>, Error> {
    let mut figures = Vec::new();
    for (size, name) in [(1 << 20, "1 MiB"), (4 << 20, "4 MiB")] {
        let client = {
            let _in_runtime = runtime.enter();
            Client::builder().endpoint(node.grpc.to_string()).settings(settings.clone()).build()?
        };
        let raw = RawSocket::start(size)?;
        let value = Bytes::from(Payload::of(size as u64).bytes(size));
        let side = options.side();
        // New blocks each time, as engines put them; the tier is soon full and evicts.
        let fresh = AtomicUsize::new(0);
        let put_fresh = |_: Vec<u8>, _: usize| {
            let key = format!("put/{way}/{size}/{}", fresh.fetch_add(1, Ordering::Relaxed));
            put(client.clone(), value.clone(), key)
        };
        let summary = pairs::measure(
            options.pairs(),
            || Sample::measure(&[node.id()], || runtime.block_on(in_flight(side, size, put_fresh))),
            || Sample::measure(&[], || raw.put(side)),
        )?;
        figures.push(Figure::pairs(format!("put {way} of {name}"), summary, TARGET));
        for turn in 0..OBJECTS {
            runtime.block_on(put(client.clone(), value.clone(), format!("get/{size}/{turn}")))?;
        }
        let get = |buffer, turn| get(client.clone(), buffer, turn, size);
        let summary = pairs::measure(
            options.pairs(),
            || Sample::measure(&[node.id()], || runtime.block_on(in_flight(side, size, get))),
            || Sample::measure(&[], || raw.get(side)),
        )?;
        figures.push(Figure::pairs(format!("get {way} of {name}"), summary, TARGET));
    }
    Ok(figures)
}

/// Keeps calls going for `side`; answers the bytes moved. Each worker has a buffer of its own, used again and again.
async fn in_flight<Answer>(side: Duration, size: usize, call: impl Fn(Vec<u8>, usize) -> Answer) -> Result<u64, Error>
where
    Answer: Future<Output = Result<Vec<u8>, Error>> + Send + 'static,
{
    let end = Instant::now() + side;
    let mut calls = tokio::task::JoinSet::new();
    let mut turn = 0;
    for _ in 0..IN_FLIGHT {
        calls.spawn(call(vec![0; size], turn));
        turn += 1;
    }
    let mut bytes = 0;
    while let Some(done) = calls.join_next().await {
        let buffer = done??;
        bytes += size as u64;
        if Instant::now() < end {
            calls.spawn(call(buffer, turn));
            turn += 1;
        }
    }
    Ok(bytes)
}

async fn put(client: Client, value: Bytes, key: String) -> Result<Vec<u8>, Error> {
    client.put(key, value, &PutOptions::default()).await?;
    Ok(Vec::new())
}

async fn get(client: Client, mut buffer: Vec<u8>, turn: usize, size: usize) -> Result<Vec<u8>, Error> {
    let found = client.get_into(format!("get/{size}/{}", turn % OBJECTS), &mut buffer).await?;
    found.ok_or("an object that was put is missing")?;
    Ok(buffer)
}

/// A blocking socket and a thread behind it. Each request is one byte: `p` and a message follows, `g` and one comes.
struct RawSocket {
    address: std::net::SocketAddr,
    messages: Arc<Vec<Vec<u8>>>,
    size: usize,
}

impl RawSocket {
    fn start(size: usize) -> Result<Self, Error> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let messages: Arc<Vec<_>> = Arc::new((0..OBJECTS as u64).map(|id| Payload::of(id).bytes(size)).collect());
        let sent = Arc::clone(&messages);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // The other side closes when it has enough.
                let _closed = serve(stream, &sent);
            }
        });
        Ok(Self { address, messages, size })
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        let stream = TcpStream::connect(self.address)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    fn put(&self, side: Duration) -> Result<u64, Error> {
        let mut stream = self.connect()?;
        let (end, mut sent, mut answered) = (Instant::now() + side, 0, 0);
        while Instant::now() < end {
            stream.write_all(b"p")?;
            stream.write_all(&self.messages[sent % OBJECTS])?;
            sent += 1;
            if sent - answered >= IN_FLIGHT {
                stream.read_exact(&mut [0])?;
                answered += 1;
            }
        }
        while answered < sent {
            stream.read_exact(&mut [0])?;
            answered += 1;
        }
        Ok((sent * self.size) as u64)
    }

    fn get(&self, side: Duration) -> Result<u64, Error> {
        let mut stream = self.connect()?;
        let mut buffers = vec![vec![0; self.size]; IN_FLIGHT];
        let (end, mut asked, mut received) = (Instant::now() + side, 0, 0);
        loop {
            while asked - received < IN_FLIGHT && Instant::now() < end {
                stream.write_all(b"g")?;
                asked += 1;
            }
            if asked == received {
                return Ok((received * self.size) as u64);
            }
            stream.read_exact(&mut buffers[received % IN_FLIGHT])?;
            received += 1;
        }
    }
}

fn serve(mut stream: TcpStream, messages: &[Vec<u8>]) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffers = vec![vec![0; messages[0].len()]; IN_FLIGHT];
    let mut kind = [0];
    for turn in 0.. {
        stream.read_exact(&mut kind)?;
        if kind == *b"p" {
            stream.read_exact(&mut buffers[turn % IN_FLIGHT])?;
            stream.write_all(&[0])?;
        } else {
            stream.write_all(&messages[turn % OBJECTS])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_raw_socket_moves_whole_messages() {
        let raw = RawSocket::start(10_000).expect("a free port");
        for moved in [raw.put(Duration::from_millis(20)), raw.get(Duration::from_millis(20))] {
            let moved = moved.expect("the other side answers");
            assert!(moved > 0 && moved.is_multiple_of(10_000));
        }
    }
}
