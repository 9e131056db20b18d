//! How long single calls take, and the bare exchanges that they can't do without.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use super::Error;

/// Sorted times of single calls.
pub(super) struct Latencies(Vec<Duration>);

impl Latencies {
    /// Calls again and again until `side` has passed.
    pub(super) fn of(side: Duration, mut call: impl FnMut() -> Result<(), Error>) -> Result<Self, Error> {
        let end = Instant::now() + side;
        let mut times = Vec::new();
        while Instant::now() < end {
            let began = Instant::now();
            call()?;
            times.push(began.elapsed());
        }
        Ok(Self::from(times))
    }

    /// In microseconds, the time that so large a share of calls stays within.
    pub(super) fn micros(&self, share: f64) -> f64 {
        let Some(last) = self.0.len().checked_sub(1) else { return f64::NAN };
        self.0[((last as f64 * share).round() as usize).min(last)].as_secs_f64() * 1e6
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }
}

impl From<Vec<Duration>> for Latencies {
    fn from(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self(times)
    }
}

/// The peer of a bare ping: gives back each 64 bytes, until its socket is closed.
pub(super) struct Ping(TcpStream);

impl Ping {
    pub(super) fn start() -> Result<Self, Error> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let socket = TcpStream::connect(listener.local_addr()?)?;
        let (mut peer, _) = listener.accept()?;
        peer.set_nodelay(true)?;
        socket.set_nodelay(true)?;
        std::thread::spawn(move || {
            let mut message = [0; 64];
            // Ends with the other side.
            while peer.read_exact(&mut message).and_then(|()| peer.write_all(&message)).is_ok() {}
        });
        Ok(Self(socket))
    }

    pub(super) fn once(&mut self) -> Result<(), Error> {
        let mut message = [0; 64];
        self.0.write_all(&message)?;
        Ok(self.0.read_exact(&mut message)?)
    }
}

/// What three voters' logs can't do without: 512 bytes appended and synced, by three writers at once; the time until two of the
/// three are done is what a leader waits for.
pub(super) fn synced_appends(folder: &Path, side: Duration) -> Result<Latencies, Error> {
    let mut files =
        (0..3).map(|number| File::create(folder.join(format!("floor-{number}")))).collect::<Result<Vec<_>, _>>()?;
    let end = Instant::now() + side;
    let mut times = Vec::new();
    while Instant::now() < end {
        let began = Instant::now();
        let mut done = std::thread::scope(|scope| {
            let append = |file: &mut File| -> std::io::Result<Duration> {
                file.write_all(&[7; 512])?;
                file.sync_data()?;
                Ok(began.elapsed())
            };
            let writers: Vec<_> = files.iter_mut().map(|file| scope.spawn(move || append(file))).collect();
            let ended = writers.into_iter().map(|writer| writer.join().map_err(|_| "a writer panicked"));
            ended.map(|ended| Ok::<_, Error>(ended??)).collect::<Result<Vec<_>, _>>()
        })?;
        done.sort_unstable();
        times.push(done[1]);
    }
    Ok(Latencies::from(times))
}
