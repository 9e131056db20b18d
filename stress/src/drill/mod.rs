//! Failover drills: real processes, a load that never stops, one kind of fault again and again, and a checker that reads the
//! history of what clients heard.
//!
//! A drill passes if the load went on in every fault, all nodes came to agree again, every key could be read at the end, and the
//! history is one that [`crate::checker`] lets pass. Nodes have room for all of it: if one evicted something, the drill
//! proves nothing and fails.
//!
//! The seed decides what clients ask and how long faults last; processes and the machine decide the rest, so a seed makes
//! a failure likely again, not certain.

mod disk;
mod load;
pub(crate) mod network;
mod report;
mod scenario;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_client::{Client, ClientSettings, Durability, PutOptions};

use crate::checker;
use crate::cluster::Cluster;
use crate::node_process::NodeError;
use crate::random::Random;
use disk::Disk;
use load::{Clients, Load, Standing};
use network::Network;
pub use report::{Report, Verdict, table};
use scenario::{Copies, Needs};
pub use scenario::{SCENARIOS, Scenario};

/// Nodes of a drill at its start, all of them voters.
const NODES: usize = 3;
/// Nodes that a drill may have in the end.
const MOST_NODES: usize = 4;
/// Acknowledged writes that show that the cluster serves.
const PROGRESS: u64 = 60;
/// How long that may take, also while a node is gone.
const PATIENCE: Duration = Duration::from_secs(60);
/// What a node lends in the drill of NVMe tiers: less memory than its part of the load, more on disk than all of it.
const DRAM_BYTES: u64 = 16 << 20;
const NVME_BYTES: u64 = 512 << 20;
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// What a drill is run with.
#[derive(Clone, Debug)]
pub struct DrillOptions {
    /// How long faults go on; what has begun is ended. At least one fault is made.
    pub duration: Duration,
    /// Decides what is not left to the machine.
    pub seed: u64,
    /// The node's binary.
    pub tidepool: PathBuf,
}

/// Why a drill could not be run to its end, or failed before the history was read.
#[derive(Debug, thiserror::Error)]
pub enum DrillError {
    /// A node did not do what it was to do.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// A client could not be made.
    #[error(transparent)]
    Client(#[from] tidepool_client::Error),
    /// The system said no.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A tool of the system failed.
    #[error("{command}: {said}")]
    Tool {
        /// The command.
        command: String,
        /// What it said.
        said: String,
    },
    /// Writes stopped.
    #[error("{found} writes were acknowledged within {PATIENCE:?}, {PROGRESS} were waited for")]
    NoProgress {
        /// How many there were.
        found: u64,
    },
    /// The drill proves nothing.
    #[error("nodes evicted {count} objects: they had too little room for the load")]
    Evicted {
        /// How many.
        count: u64,
    },
    /// Objects that are there can't be read.
    #[error("{count} keys could not be read when enough nodes were there")]
    Unread {
        /// How many.
        count: u64,
    },
    /// A node that was gone was noticed.
    #[error("{count} reads of objects with another copy failed, the first of {first}")]
    Unavailable {
        /// How many.
        count: usize,
        /// The first one, and why.
        first: String,
    },
    /// A leader was replaced for nothing.
    #[error("node {node} led in term {before}, and lost its office by a slow disk: term {after}")]
    Deposed {
        /// Its position.
        node: usize,
        /// In which term it led.
        before: u64,
        /// In which term the group is now.
        after: u64,
    },
    /// A refusal without a reason that says what is wrong.
    #[error("a put without a quorum was answered {said:?}")]
    Unclear {
        /// What was said.
        said: String,
    },
    /// A thread of the drill panicked.
    #[error("the drill panicked")]
    Panicked,
}

/// Runs one drill.
#[must_use]
pub fn run(scenario: &Scenario, options: &DrillOptions) -> Report {
    let why_not = match scenario.needs {
        Needs::Processes => None,
        Needs::Network => network::why_not(),
        Needs::Disk => disk::why_not(),
        Needs::What(nobody_has) => Some(nobody_has),
    };
    if let Some(why) = why_not {
        return Report::skipped(scenario.name, options.seed, why);
    }
    // A thread of its own, and a runtime that begins there: what enters a network namespace stays in it.
    std::thread::scope(|scope| {
        let drill = scope.spawn(|| run_here(scenario, options));
        drill.join().unwrap_or_else(|_| Report::failed(scenario.name, options.seed, &DrillError::Panicked))
    })
}

fn run_here(scenario: &Scenario, options: &DrillOptions) -> Report {
    let mut drill = match Drill::start(scenario, options) {
        Ok(drill) => drill,
        Err(error) => return Report::failed(scenario.name, options.seed, &error),
    };
    let mut report = match drill.play(scenario) {
        Ok(()) => Report::passed(scenario.name, options.seed),
        Err(error) => Report::failed(scenario.name, options.seed, &error),
    };
    let history = drill.load.history();
    report.tell(&drill, &history);
    report.judge(checker::check(&history));
    if report.verdict == Verdict::Failed {
        report.logs = Some(drill.keep_logs());
    }
    report
}

/// A cluster under load, and what can be done to it. Ends with all that it started.
struct Drill {
    began: Instant,
    deadline: Instant,
    seed: u64,
    random: Random,
    faults: Vec<String>,
    load: Arc<Load>,
    runtime: Option<tokio::runtime::Runtime>,
    tasks: tokio::task::JoinSet<()>,
    cluster: Cluster,
    disks: Vec<Disk>,
    network: Option<Network>,
}

impl Drill {
    fn start(scenario: &Scenario, options: &DrillOptions) -> Result<Self, DrillError> {
        let network = (scenario.needs == Needs::Network).then(|| Network::new(MOST_NODES)).transpose()?;
        if let Some(network) = &network {
            network.enter()?;
        }
        let mut settings = vec!["store.slice_bytes=256KiB"];
        if scenario.copies != Copies::One {
            settings.extend(["replicas.count=2", "replicas.repair_grace=0s", "replicas.repair_bytes_per_second=0"]);
        }
        let cluster = Cluster::new(options.tidepool.clone(), &settings)?;
        let cluster =
            if scenario.copies == Copies::TwoOnDisks { cluster.lending(DRAM_BYTES, NVME_BYTES) } else { cluster };
        let cluster = cluster.at(network.as_ref().map(Network::places).unwrap_or_default());
        let always_read = matches!(scenario.copies, Copies::Two | Copies::TwoOnDisks);
        let (put, standing) = if scenario.copies == Copies::TwoOnDisks {
            (PutOptions { durability: Durability::Nvme, min_replicas: 2, ..PutOptions::default() }, Standing::LARGE)
        } else {
            (PutOptions::default(), Standing::SMALL)
        };
        let load = Load::new(options.seed, put, standing, always_read);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let now = Instant::now();
        let mut drill = Self {
            began: now,
            deadline: now,
            seed: options.seed,
            random: Random::new(options.seed),
            faults: Vec::new(),
            load,
            runtime: Some(runtime),
            tasks: tokio::task::JoinSet::new(),
            cluster,
            disks: Vec::new(),
            network,
        };
        if scenario.needs == Needs::Disk {
            for node in 0..NODES {
                drill.disks.push(Disk::new(&drill.cluster.data(node))?);
            }
        }
        drill.cluster.grow(NODES)?;
        drill.start_load()?;
        drill.deadline = Instant::now() + options.duration;
        Ok(drill)
    }

    fn clients(&self) -> Result<Clients, DrillError> {
        // What is cut off is cut off: sockets of the file system and shared memory know no network.
        let same_host = self.network.is_none();
        let settings = ClientSettings { same_host, local_reads: same_host, ..ClientSettings::default() };
        let _runtime = self.runtime.as_ref().map(tokio::runtime::Runtime::enter);
        let client = |deadline, retries| {
            let deadline = Duration::from_secs(deadline);
            self.cluster.client_with(ClientSettings { deadline, retries, ..settings.clone() })
        };
        let retries = settings.retries;
        Ok(Clients { once: client(10, 0)?, patient: client(20, retries)?, reader: client(1, retries)? })
    }

    fn start_load(&mut self) -> Result<(), DrillError> {
        let clients = self.clients()?;
        if let Some(runtime) = &self.runtime {
            self.tasks = self.load.start(&clients, runtime);
        }
        Ok(())
    }

    fn play(&mut self, scenario: &Scenario) -> Result<(), DrillError> {
        loop {
            self.progress()?;
            (scenario.fault)(self)?;
            self.calm()?;
            if Instant::now() >= self.deadline {
                break;
            }
        }
        self.progress()?;
        self.end_load()?;
        if scenario.copies != Copies::One {
            self.cluster.wait("all have two copies again", has_two_copies)?;
        }
        if let Some(first) = self.load.unread().first() {
            return Err(DrillError::Unavailable { count: self.load.unread().len(), first: first.clone() });
        }
        self.read_all()?;
        let evictions = self.cluster.running().map(|(_, node)| node.tier("dram", "evictions"));
        match evictions.sum::<std::io::Result<u64>>()? {
            0 => {}
            count => return Err(DrillError::Evicted { count }),
        }
        if scenario.copies == Copies::TwoOnDisks {
            // What the catalog lists is there: each node can be done without.
            for node in 0..NODES {
                self.cluster.kill(node)?;
                self.read_all()?;
                self.cluster.restart(node)?;
                self.calm()?;
            }
        }
        Ok(())
    }

    /// Reads every key once more.
    fn read_all(&self) -> Result<(), DrillError> {
        let clients = self.clients()?;
        let Some(runtime) = &self.runtime else { return Ok(()) };
        match runtime.block_on(self.load.read_all(&clients.patient)) {
            0 => Ok(()),
            count => Err(DrillError::Unread { count }),
        }
    }

    fn end_load(&mut self) -> Result<(), DrillError> {
        self.load.stop();
        let Some(runtime) = &self.runtime else { return Ok(()) };
        let tasks = &mut self.tasks;
        runtime.block_on(async {
            while let Some(ended) = tasks.join_next().await {
                ended.map_err(|_| DrillError::Panicked)?;
            }
            Ok(())
        })
    }

    /// Notes a fault that is about to be made.
    fn fault(&mut self, what: String) {
        self.load.disturb();
        self.faults.push(format!("{:.3} s: {what}", self.began.elapsed().as_secs_f64()));
    }

    /// Waits until writes have gone on for a while.
    fn progress(&self) -> Result<(), DrillError> {
        let (before, began) = (self.load.acknowledged(), Instant::now());
        loop {
            let found = self.load.acknowledged() - before;
            if found >= PROGRESS {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                return Err(DrillError::NoProgress { found });
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Lets the fault last.
    fn last(&mut self, least: u64, most: u64) {
        std::thread::sleep(Duration::from_millis(least + self.random.below(most - least)));
    }

    /// The position of the node that leads.
    fn leader(&self) -> Result<usize, DrillError> {
        self.cluster.wait("somebody leads", |cluster| cluster.leader().is_some())?;
        // It may have changed since; whoever is meant is as good.
        Ok(self.cluster.leader().unwrap_or_default())
    }

    /// In which term a node is.
    fn term(&self, node: usize) -> u64 {
        let raft = self.cluster.node(node).and_then(|node| node.admin("/v1/raft").ok()).unwrap_or_default();
        raft["term"].as_u64().unwrap_or_default()
    }

    /// The nodes that run, but for one.
    fn others(&self, than: usize) -> Vec<usize> {
        self.cluster.running().map(|(position, _)| position).filter(|&position| position != than).collect()
    }

    /// One of those that do not lead.
    fn follower(&mut self) -> Result<usize, DrillError> {
        let leader = self.leader()?;
        let others = self.others(leader);
        Ok(self.random.choose(&others).copied().unwrap_or_default())
    }

    /// Waits until all nodes are there, voters agree, and the catalog counts every copy.
    fn calm(&mut self) -> Result<(), DrillError> {
        self.cluster.wait("all vote again", |cluster| cluster.voters() == Some(NODES))?;
        self.cluster.wait("all have recovered", Cluster::has_recovered)?;
        self.cluster.wait("all are up", Cluster::are_all_up)?;
        self.load.calm();
        Ok(())
    }

    /// Why one node, asked alone, does not take a put.
    fn refused_put(&self, node: usize) -> Result<String, DrillError> {
        let Some((runtime, node)) = self.runtime.as_ref().zip(self.cluster.node(node)) else {
            return Ok(String::new());
        };
        let _runtime = runtime.enter();
        let settings = ClientSettings { deadline: Duration::from_secs(20), retries: 0, ..ClientSettings::default() };
        let client = Client::builder().endpoint(node.grpc.to_string()).settings(settings).build()?;
        let options = PutOptions::default();
        let put = client.put("drill/without-a-quorum", Bytes::from_static(b"value"), &options);
        Ok(runtime.block_on(put).map_or_else(|error| error.reason().to_owned(), |_| "stored".to_owned()))
    }

    /// Keeps what nodes said; answers where.
    fn keep_logs(&mut self) -> PathBuf {
        for node in 0..MOST_NODES {
            let log = self.cluster.data(node).join("node.log");
            // Beside the folder, which may be a mounted one. Not every node was started.
            let _absent = std::fs::copy(&log, self.cluster.data(node).with_extension("log"));
        }
        self.cluster.keep_folder().to_owned()
    }
}

/// Whether all objects have two copies on nodes that are up, and no more.
fn has_two_copies(cluster: &Cluster) -> bool {
    let counted = || -> std::io::Result<bool> {
        let (_, node) = cluster.running().next().ok_or_else(|| std::io::Error::other("no node runs"))?;
        let report = node.admin("/v1/nodes")?;
        let rows = report["nodes"].as_array().cloned().unwrap_or_default();
        let copies: u64 =
            rows.iter().filter(|row| row["state"] == "up").filter_map(|row| row["replicas"].as_u64()).sum();
        Ok(node.admin("/v1/info")?["objects"].as_u64() == Some(copies / 2) && copies.is_multiple_of(2))
    };
    counted().unwrap_or(false)
}

impl Drop for Drill {
    fn drop(&mut self) {
        self.load.stop();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        // A process that waits for its disk does not even end.
        for disk in &self.disks {
            let _not_stalled = disk.go_on();
        }
        self.cluster.kill_all();
        self.disks.clear();
    }
}
