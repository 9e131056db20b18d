//! A node as a process of its own: started with ports of its own choosing, stopped, killed, started again.
//!
//! The process is killed when this is dropped, so that a failing test leaves nothing behind. Its data folder stays
//! until the folder's owner removes it, so that a new process can be started over it.

use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{LazyLock, mpsc};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tidepool_client::Client;

/// How long a node may take until it serves, and until it has ended after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long admin HTTP may take: a frozen node answers nothing.
const ANSWER: Duration = Duration::from_secs(10);

/// What a node is started with.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// The `tidepool` binary.
    pub program: PathBuf,
    /// The data folder.
    pub data: PathBuf,
    /// Bytes of DRAM.
    pub dram_bytes: u64,
    /// Bytes of NVMe; 0: none.
    pub nvme_bytes: u64,
    /// Further settings, as `section.field=value`.
    pub settings: Vec<String>,
    /// Where it runs.
    pub place: Place,
}

/// Where a node runs. The default is this process's network, on loopback, at ports of the node's own choosing.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Network namespace and the node's address in it; its ports are the usual ones there.
    pub network: Option<(String, Ipv4Addr)>,
}

/// A running node.
#[derive(Debug)]
pub struct NodeProcess {
    child: Child,
    options: NodeOptions,
    /// gRPC.
    pub grpc: SocketAddr,
    /// Admin HTTP.
    pub admin: SocketAddr,
    /// When the process was started.
    pub started: Instant,
}

/// Why a node could not be started, asked or stopped.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The program can't be run.
    #[error("run {program}")]
    Spawn {
        /// The program.
        program: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// It ended, or said nothing for too long.
    #[error("the node printed no addresses within {PATIENCE:?}; it said: {said}")]
    NoAddresses {
        /// What it printed on standard output.
        said: String,
    },
    /// It has not ended.
    #[error("the node still runs {PATIENCE:?} after SIGTERM")]
    StillRunning,
    /// Something did not come about.
    #[error("waited {patience:?} in vain until {what}")]
    Waited {
        /// What.
        what: &'static str,
        /// How long.
        patience: Duration,
    },
    /// The system said no.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

#[derive(serde::Deserialize)]
struct Addresses {
    grpc: SocketAddr,
    admin: SocketAddr,
}

/// A free address that stays free while a node is down. Port 0 would pick one of those that the system also gives to
/// outgoing connections (ip(7), `ip_local_port_range`, from 32768 on): one that calls the dead node may get it.
fn lasting_address() -> std::io::Result<SocketAddr> {
    const PORTS: std::ops::Range<u16> = 10_000..32_768;
    // Many processes look at once; each begins somewhere else.
    static NEXT: LazyLock<AtomicU16> =
        LazyLock::new(|| AtomicU16::new((std::process::id().wrapping_mul(7919) % 22_768) as u16));
    let mut last = None;
    for _ in PORTS {
        let port = PORTS.start + NEXT.fetch_add(1, Ordering::Relaxed) % (PORTS.end - PORTS.start);
        match TcpListener::bind(("127.0.0.1", port)) {
            Ok(free) => return free.local_addr(),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| std::io::ErrorKind::AddrInUse.into()))
}

impl NodeProcess {
    /// Starts a node and waits until it has printed its addresses. Its log goes to `node.log` in the data folder.
    ///
    /// # Errors
    /// [`NodeError::Spawn`], [`NodeError::NoAddresses`], [`NodeError::Io`].
    pub fn start(options: NodeOptions) -> Result<Self, NodeError> {
        std::fs::create_dir_all(&options.data)?;
        let log = std::fs::File::options().create(true).append(true).open(options.data.join("node.log"))?;
        let mut command = match &options.place.network {
            // It becomes the program: same process, same id.
            Some((namespace, _)) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(&options.program);
                command
            }
            None => Command::new(&options.program),
        };
        command.args(["serve", "--json"]);
        let listen = match &options.place.network {
            Some((_, address)) => [(address, 7420), (address, 7422), (address, 7421)]
                .map(|(&address, port)| SocketAddr::from((address, port))),
            // The engine's default is the port behind gRPC's, which may be somebody's.
            None => [lasting_address()?, lasting_address()?, SocketAddr::from(([127, 0, 0, 1], 0))],
        };
        for (section, address) in ["grpc", "admin", "engine"].into_iter().zip(listen) {
            command.args(["--set", &format!("{section}.listen='{address}'")]);
        }
        if options.place.network.is_some() {
            // Nobody else is in these namespaces.
            command.args(["--set", "cluster.insecure=true"]);
        }
        command.arg("--data").arg(&options.data);
        command.args(["--dram", &options.dram_bytes.to_string(), "--nvme", &options.nvme_bytes.to_string()]);
        for setting in &options.settings {
            command.args(["--set", setting]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let started = Instant::now();
        let child = command.spawn().map_err(|source| NodeError::Spawn { program: options.program.clone(), source })?;
        // From here on, dropping ends the process.
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut node = Self { child, options, grpc: nowhere, admin: nowhere, started };
        let line = node.first_line()?;
        let addresses: Addresses =
            serde_json::from_str(&line).map_err(|_| NodeError::NoAddresses { said: line.trim().to_owned() })?;
        (node.grpc, node.admin) = (addresses.grpc, addresses.admin);
        Ok(node)
    }

    /// The first line of standard output; the rest is read and dropped, so that the node never waits on a full pipe.
    fn first_line(&mut self) -> Result<String, NodeError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let output = self.child.stdout.take().ok_or_else(|| NodeError::NoAddresses { said: String::new() })?;
        std::thread::spawn(move || {
            let mut lines = BufReader::new(output).lines().map_while(Result::ok);
            // The receiver may have lost its patience.
            let _gone = sender.send(lines.next().unwrap_or_default());
            lines.for_each(drop);
        });
        receiver.recv_timeout(PATIENCE).map_err(|_| NodeError::NoAddresses { said: String::new() })
    }

    /// The process's id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it was started with.
    #[must_use]
    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// A client of it with `connections` connections. Needs a tokio runtime.
    ///
    /// # Errors
    /// The client's.
    pub fn client(&self, connections: usize) -> Result<Client, tidepool_client::Error> {
        Client::builder().endpoint(self.grpc.to_string()).connections(connections).build()
    }

    /// `POST path` of admin HTTP with a JSON body; answers JSON.
    ///
    /// # Errors
    /// As [`NodeProcess::admin`].
    pub fn change(&self, path: &str, body: &serde_json::Value) -> std::io::Result<serde_json::Value> {
        let body = body.to_string();
        let head = format!("POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}", body.len());
        Ok(serde_json::from_str(&self.exchange(&head, &body)?)?)
    }

    /// `GET path` of admin HTTP, as JSON.
    ///
    /// # Errors
    /// The connection's; an answer that is no JSON.
    pub fn admin(&self, path: &str) -> std::io::Result<serde_json::Value> {
        Ok(serde_json::from_str(&self.ask(path)?)?)
    }

    /// The body of the answer to `GET path`.
    fn ask(&self, path: &str) -> std::io::Result<String> {
        self.exchange(&format!("GET {path} HTTP/1.0"), "")
    }

    fn exchange(&self, head: &str, body: &str) -> std::io::Result<String> {
        use std::io::{Read as _, Write as _};
        let mut stream = std::net::TcpStream::connect_timeout(&self.admin, ANSWER)?;
        stream.set_read_timeout(Some(ANSWER))?;
        write!(stream, "{head}\r\nHost: {}\r\n\r\n{body}", self.admin)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned())
    }

    /// A metric without labels.
    ///
    /// # Errors
    /// As [`NodeProcess::admin`]; a metric that is not there.
    pub fn metric(&self, name: &str) -> std::io::Result<u64> {
        let metrics = self.ask("/metrics")?;
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.ok_or_else(|| std::io::Error::other(format!("there is no metric {name}")))
    }

    /// A field of one tier in `admin tiers`.
    ///
    /// # Errors
    /// As [`NodeProcess::admin`]; a tier or field that is not there.
    pub fn tier(&self, tier: &str, field: &str) -> std::io::Result<u64> {
        let report = self.admin("/v1/tiers")?;
        let tiers = report["tiers"].as_array().map(Vec::as_slice).unwrap_or_default();
        let row = tiers.iter().find(|row| row["tier"] == tier);
        let value = row.and_then(|row| row[field].as_u64());
        value.ok_or_else(|| std::io::Error::other(format!("admin tiers has no {field} of {tier}")))
    }

    /// Resident memory in bytes, without pages of files: those of the DRAM segment are counted apart.
    ///
    /// # Errors
    /// The process is gone.
    pub fn resident_bytes(&self) -> std::io::Result<ResidentBytes> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id()))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            number.map_or(0, |kibibytes| kibibytes << 10)
        };
        Ok(ResidentBytes { own: field("RssAnon"), shared: field("RssShmem"), file: field("RssFile") })
    }

    /// Ends the process at once, as `kill -9` does.
    ///
    /// # Errors
    /// The system's.
    pub fn kill(&mut self) -> Result<(), NodeError> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Stops the process where it is, its connections open (SIGSTOP).
    ///
    /// # Errors
    /// The system's.
    pub fn freeze(&self) -> Result<(), NodeError> {
        self.signal(Signal::STOP)
    }

    /// Lets a frozen process go on (SIGCONT).
    ///
    /// # Errors
    /// The system's.
    pub fn thaw(&self) -> Result<(), NodeError> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<(), NodeError> {
        if let Some(id) = i32::try_from(self.id()).ok().and_then(Pid::from_raw) {
            kill_process(id, signal).map_err(std::io::Error::from)?;
        }
        Ok(())
    }

    /// Asks the process to end (SIGTERM), and waits until it has.
    ///
    /// # Errors
    /// [`NodeError::StillRunning`]; the system's.
    pub fn stop(&mut self) -> Result<ExitStatus, NodeError> {
        self.signal(Signal::TERM)?;
        let asked = Instant::now();
        while asked.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(NodeError::StillRunning)
    }

    /// Starts a new process over the same data folder. The old one must have ended.
    ///
    /// # Errors
    /// As [`NodeProcess::start`].
    pub fn restart(mut self) -> Result<Self, NodeError> {
        self.kill()?;
        Self::start(self.options.clone())
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        // It may have ended already.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Resident memory by kind, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidentBytes {
    /// The process's own.
    pub own: u64,
    /// Of shared memory: the DRAM tier.
    pub shared: u64,
    /// Of files: the program itself.
    pub file: u64,
}

/// The `tidepool` binary beside the running program or test.
#[must_use]
pub fn program_beside(this: &Path) -> Option<PathBuf> {
    this.ancestors().map(|folder| folder.join("tidepool")).find(|program| program.is_file())
}
