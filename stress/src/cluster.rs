//! Several nodes on this machine as one cluster: started, stopped, killed, asked.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tidepool_client::{Client, ClientSettings};

use crate::node_process::{NodeError, NodeOptions, NodeProcess, Place};

/// How long a cluster may take to become what it is to be.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often it is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// Nodes by position; a node that is not running is none.
#[derive(Debug)]
pub struct Cluster {
    program: PathBuf,
    /// Before their folders: they end before those are removed.
    nodes: Vec<Option<NodeProcess>>,
    folder: tempfile::TempDir,
    segments: tempfile::TempDir,
    options: Vec<NodeOptions>,
    settings: Vec<String>,
    places: Vec<Place>,
    dram_bytes: u64,
    nvme_bytes: u64,
}

impl Cluster {
    /// A cluster without nodes, with settings for those to come. The first is started by [`Cluster::join`] too.
    ///
    /// # Errors
    /// The system's.
    pub fn new(program: PathBuf, settings: &[&str]) -> Result<Self, NodeError> {
        let folder = tempfile::tempdir()?;
        let segments = tempfile::tempdir_in("/dev/shm")?;
        let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
        let (nodes, options, places) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { program, folder, segments, nodes, options, settings, places, dram_bytes: 64 << 20, nvme_bytes: 0 })
    }

    /// What each node lends, in bytes: 64 MiB and no NVMe tier if nobody says.
    #[must_use]
    pub fn lending(mut self, dram_bytes: u64, nvme_bytes: u64) -> Self {
        (self.dram_bytes, self.nvme_bytes) = (dram_bytes, nvme_bytes);
        self
    }

    /// Where nodes run, by position; those behind the end run here.
    #[must_use]
    pub fn at(mut self, places: Vec<Place>) -> Self {
        self.places = places;
        self
    }

    /// A cluster of one node, with further settings for all nodes.
    ///
    /// # Errors
    /// Those of the node.
    pub fn start(program: PathBuf, settings: &[&str]) -> Result<Self, NodeError> {
        let mut cluster = Self::new(program, settings)?;
        cluster.join()?;
        Ok(cluster)
    }

    /// As [`Cluster::start`], with `count` nodes that all vote.
    ///
    /// # Errors
    /// Those of the nodes.
    pub fn start_voters(program: PathBuf, count: usize, settings: &[&str]) -> Result<Self, NodeError> {
        let mut cluster = Self::new(program, settings)?;
        cluster.grow(count)?;
        Ok(cluster)
    }

    /// Starts nodes until there are `count`, and waits until all vote.
    ///
    /// # Errors
    /// Those of the nodes; [`NodeError::Waited`].
    pub fn grow(&mut self, count: usize) -> Result<(), NodeError> {
        while self.nodes.len() < count {
            self.join()?;
        }
        self.wait("all vote", |cluster| cluster.voters() == Some(count))
    }

    /// Starts one more node, which joins through all that run, if any do; answers its position.
    ///
    /// # Errors
    /// Those of the node.
    pub fn join(&mut self) -> Result<usize, NodeError> {
        self.join_with(&[])
    }

    /// As [`Cluster::join`], with settings of its own.
    ///
    /// # Errors
    /// Those of the node.
    pub fn join_with(&mut self, settings: &[&str]) -> Result<usize, NodeError> {
        let mut more: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        let addresses: Vec<String> = self.running().map(|(_, node)| format!("'{}'", node.grpc)).collect();
        if !addresses.is_empty() {
            more.push(format!("cluster.join=[{}]", addresses.join(",")));
        }
        let position = self.nodes.len();
        let options = self.options_of(position, &more);
        let node = NodeProcess::start(options.clone())?;
        // Where clients know it, it comes back.
        let mut kept = options;
        kept.settings.push(format!("grpc.listen='{}'", node.grpc));
        kept.settings.push(format!("admin.listen='{}'", node.admin));
        self.options.push(kept);
        self.nodes.push(Some(node));
        Ok(position)
    }

    /// What a node at `position` is started with.
    #[must_use]
    pub fn options_of(&self, position: usize, more: &[String]) -> NodeOptions {
        let mut settings = self.settings.clone();
        settings.push(format!("dram.folder='{}'", self.segments.path().display()));
        settings.extend_from_slice(more);
        NodeOptions {
            program: self.program.clone(),
            data: self.data(position),
            dram_bytes: self.dram_bytes,
            nvme_bytes: self.nvme_bytes,
            settings,
            place: self.places.get(position).cloned().unwrap_or_default(),
        }
    }

    /// A node's data folder.
    #[must_use]
    pub fn data(&self, position: usize) -> PathBuf {
        self.folder.path().join(format!("node-{position}"))
    }

    /// The nodes that run, with their positions.
    pub fn running(&self) -> impl Iterator<Item = (usize, &NodeProcess)> {
        self.nodes.iter().enumerate().filter_map(|(position, node)| Some((position, node.as_ref()?)))
    }

    /// A node that runs.
    #[must_use]
    pub fn node(&self, position: usize) -> Option<&NodeProcess> {
        self.nodes.get(position)?.as_ref()
    }

    /// Ends a node at once.
    ///
    /// # Errors
    /// The system's.
    pub fn kill(&mut self, position: usize) -> Result<(), NodeError> {
        match self.nodes[position].take() {
            Some(mut node) => node.kill(),
            None => Ok(()),
        }
    }

    /// Asks a node to end, and waits for it.
    ///
    /// # Errors
    /// As [`NodeProcess::stop`].
    pub fn stop(&mut self, position: usize) -> Result<(), NodeError> {
        match self.nodes[position].take() {
            Some(mut node) => node.stop().map(drop),
            None => Ok(()),
        }
    }

    /// Starts a node that was ended, over its folder and at its addresses.
    ///
    /// # Errors
    /// As [`NodeProcess::start`].
    pub fn restart(&mut self, position: usize) -> Result<(), NodeError> {
        self.nodes[position] = None;
        self.nodes[position] = Some(NodeProcess::start(self.options[position].clone())?);
        Ok(())
    }

    /// Starts a node that is to be refused, or to end by itself, at addresses of its own choosing; answers what it said.
    ///
    /// # Errors
    /// The system's; [`NodeError::Waited`] if it ended as if nothing were wrong.
    pub fn refusal(&self, position: usize, more: &[String]) -> Result<String, NodeError> {
        let options = self.options_of(position, more);
        let mut command = std::process::Command::new(&options.program);
        command.args(["serve", "--json", "--set", "grpc.listen=127.0.0.1:0", "--set", "admin.listen=127.0.0.1:0"]);
        // As large as it was: a segment of another size is another segment.
        command.arg("--data").arg(&options.data).args(["--dram", &options.dram_bytes.to_string(), "--nvme", "0"]);
        for setting in &options.settings {
            command.args(["--set", setting]);
        }
        let output = command.output()?;
        if output.status.success() {
            return Err(NodeError::Waited { what: "it is refused", patience: Duration::ZERO });
        }
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// A client that knows all nodes, also those that do not run.
    ///
    /// # Errors
    /// The client's.
    pub fn client(&self, deadline: Duration) -> Result<Client, tidepool_client::Error> {
        self.client_with(ClientSettings { deadline, ..ClientSettings::default() })
    }

    /// As [`Cluster::client`], with other settings.
    ///
    /// # Errors
    /// The client's.
    pub fn client_with(&self, settings: ClientSettings) -> Result<Client, tidepool_client::Error> {
        let addresses = self.options.iter().filter_map(|options| {
            options.settings.iter().rev().find_map(|setting| setting.strip_prefix("grpc.listen="))
        });
        let builder = Client::builder().settings(settings);
        addresses.fold(builder, |builder, address| builder.endpoint(address.trim_matches('\''))).build()
    }

    /// The position of the node that leads and has a quorum.
    #[must_use]
    pub fn leader(&self) -> Option<usize> {
        let leads = |node: &NodeProcess| {
            let raft = node.admin("/v1/raft").ok()?;
            (raft["role"] == "leader" && raft["in_contact"] == true).then_some(())
        };
        self.running().find_map(|(position, node)| leads(node).map(|()| position))
    }

    /// How many voters all running nodes agree on, if they do and no change is under way.
    #[must_use]
    pub fn voters(&self) -> Option<usize> {
        let mut counts = self.running().map(|(_, node)| {
            let raft = node.admin("/v1/raft").ok()?;
            let members = raft["members"].as_array()?;
            let voters = members.iter().filter(|member| member["kind"] == "voter").count();
            (raft["changing"] == false).then_some(voters)
        });
        let first = counts.next()??;
        counts.all(|count| count == Some(first)).then_some(first)
    }

    /// Waits until `holds`.
    ///
    /// # Panics
    /// After a minute in vain, with what was waited for.
    pub fn until(&self, what: &'static str, holds: impl Fn(&Self) -> bool) {
        if let Err(error) = self.wait(what, holds) {
            panic!("{error}; see the logs in {}", self.folder.path().display());
        }
    }

    /// Waits until `holds`.
    ///
    /// # Errors
    /// [`NodeError::Waited`] after a minute in vain.
    pub fn wait(&self, what: &'static str, holds: impl Fn(&Self) -> bool) -> Result<(), NodeError> {
        let began = Instant::now();
        while !holds(self) {
            if began.elapsed() > PATIENCE {
                return Err(NodeError::Waited { what, patience: PATIENCE });
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// The position of the node that leads, once one does.
    ///
    /// # Panics
    /// As [`Cluster::until`].
    #[must_use]
    pub fn wait_for_leader(&self) -> usize {
        self.until("somebody leads", |cluster| cluster.leader().is_some());
        // It may have changed since; whoever asks goes on all the same.
        self.leader().unwrap_or_default()
    }

    /// Waits until every running node has found all that it had and agrees with the catalog.
    ///
    /// # Panics
    /// As [`Cluster::until`].
    pub fn wait_for_recovery(&self) {
        self.until("all have recovered", Self::has_recovered);
    }

    /// Whether every running node has found all that it had and agrees with the catalog.
    #[must_use]
    pub fn has_recovered(&self) -> bool {
        self.running().all(|(_, node)| {
            let report = node.admin("/v1/recovery").unwrap_or_default();
            report["finished"] == true && !report["reconciliation"].is_null()
        })
    }

    /// Whether the leader counts every running node's copies.
    #[must_use]
    pub fn are_all_up(&self) -> bool {
        let Some(leader) = self.leader().and_then(|leader| self.node(leader)) else { return false };
        let report = leader.admin("/v1/nodes").unwrap_or_default();
        let rows = report["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
        let is_up = |node: &NodeProcess| {
            let address = node.grpc.to_string();
            let row = rows.iter().find(|row| row["grpc"] == address.as_str());
            row.is_some_and(|row| row["state"] == "up" && row["announcing"] == false)
        };
        self.running().all(|(_, node)| is_up(node))
    }

    /// Ends all nodes at once.
    pub fn kill_all(&mut self) {
        // Dropping a node ends it.
        self.nodes.iter_mut().for_each(|node| *node = None);
    }

    /// Leaves the nodes' folders, with their logs, where they are; answers where that is.
    pub fn keep_folder(&mut self) -> &Path {
        self.folder.disable_cleanup(true);
        self.folder.path()
    }
}

/// The `tidepool` binary for a test.
#[must_use]
pub fn program(this: &Path) -> Option<PathBuf> {
    crate::node_process::program_beside(this)
}
