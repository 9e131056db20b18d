//! A way to an engine that can be stopped, slowed and cut: a proxy on loopback.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

pub(crate) struct Proxy {
    pub(crate) address: String,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Nothing passes, in either direction, and nothing tells.
    is_frozen: Mutex<bool>,
    thawed: Condvar,
    /// Bytes per second and direction of a connection; 0: no limit.
    rate: AtomicU64,
    passed: AtomicU64,
    /// The first few MiB that passed.
    seen: Mutex<Vec<u8>>,
    is_over: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// A proxy whose target is said later: its address has to be known before the target starts.
    pub(crate) fn bind() -> (Self, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = listener.local_addr().expect("bound").to_string();
        (Self { address, shared: Arc::default() }, listener)
    }

    pub(crate) fn serve(&self, listener: TcpListener, target: String) {
        let shared = Arc::clone(&self.shared);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.is_over.load(Ordering::Acquire) {
                    return;
                }
                let Ok(server) = TcpStream::connect(&target) else { continue };
                for stream in [&client, &server] {
                    stream.set_nodelay(true).expect("set");
                    shared.streams.lock().push(stream.try_clone().expect("clone"));
                }
                let (back, forth) = (client.try_clone().expect("clone"), server.try_clone().expect("clone"));
                for (from, to) in [(client, server), (forth, back)] {
                    let shared = Arc::clone(&shared);
                    std::thread::spawn(move || shared.pump(from, to));
                }
            }
        });
    }

    pub(crate) fn freeze(&self) {
        *self.shared.is_frozen.lock() = true;
    }

    pub(crate) fn thaw(&self) {
        *self.shared.is_frozen.lock() = false;
        self.shared.thawed.notify_all();
    }

    pub(crate) fn set_rate(&self, bytes_per_second: u64) {
        self.shared.rate.store(bytes_per_second, Ordering::Release);
    }

    /// Bytes that passed, in both directions.
    pub(crate) fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::Acquire)
    }

    /// The first few MiB that passed, from all connections.
    pub(crate) fn seen(&self) -> Vec<u8> {
        self.shared.seen.lock().clone()
    }

    /// Ends all connections.
    pub(crate) fn cut(&self) {
        for stream in self.shared.streams.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.thaw();
        self.cut();
        // Wakes the listener.
        let _ = TcpStream::connect(&self.address);
    }
}

impl Shared {
    fn pump(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            let mut is_frozen = self.is_frozen.lock();
            while *is_frozen {
                self.thawed.wait(&mut is_frozen);
            }
            drop(is_frozen);
            let rate = self.rate.load(Ordering::Acquire);
            if rate > 0 {
                std::thread::sleep(Duration::from_secs_f64(count as f64 / rate as f64));
            }
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
            self.passed.fetch_add(count as u64, Ordering::AcqRel);
            let mut seen = self.seen.lock();
            if seen.len() < 4 << 20 {
                seen.extend_from_slice(&bytes[..count]);
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    }
}
