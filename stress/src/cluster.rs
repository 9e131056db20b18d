//! Several nodes on this machine as one cluster: started, stopped, killed, asked.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tidepool_client::Client;

use crate::node_process::{NodeError, NodeOptions, NodeProcess};

/// How long a cluster may take to become what it is to be.
const PATIENCE: Duration = Duration::from_secs(60);

/// Nodes by position; a node that is not running is none.
#[derive(Debug)]
pub struct Cluster {
    program: PathBuf,
    folder: tempfile::TempDir,
    segments: tempfile::TempDir,
    nodes: Vec<Option<NodeProcess>>,
    options: Vec<NodeOptions>,
    settings: Vec<String>,
}

impl Cluster {
    /// A cluster of one node, with further settings for all nodes.
    ///
    /// # Errors
    /// Those of the node.
    pub fn start(program: PathBuf, settings: &[&str]) -> Result<Self, NodeError> {
        let folder = tempfile::tempdir()?;
        let segments = tempfile::tempdir_in("/dev/shm")?;
        let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
        let mut cluster = Self { program, folder, segments, nodes: Vec::new(), options: Vec::new(), settings };
        cluster.add(&[])?;
        Ok(cluster)
    }

    /// As [`Cluster::start`], with `count` nodes that all vote.
    ///
    /// # Errors
    /// Those of the nodes.
    pub fn start_voters(program: PathBuf, count: usize, settings: &[&str]) -> Result<Self, NodeError> {
        let mut cluster = Self::start(program, settings)?;
        for _ in 1..count {
            cluster.join()?;
        }
        cluster.until("all vote", |cluster| cluster.voters() == Some(count));
        Ok(cluster)
    }

    /// Starts one more node, which joins through all that run; answers its position.
    ///
    /// # Errors
    /// Those of the node.
    pub fn join(&mut self) -> Result<usize, NodeError> {
        let addresses: Vec<String> = self.running().map(|(_, node)| format!("'{}'", node.grpc)).collect();
        self.add(&[format!("cluster.join=[{}]", addresses.join(","))])
    }

    fn add(&mut self, more: &[String]) -> Result<usize, NodeError> {
        let position = self.nodes.len();
        let options = self.options_of(position, more);
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
            dram_bytes: 64 << 20,
            nvme_bytes: 0,
            settings,
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

    /// A client that knows all nodes, also those that do not run.
    ///
    /// # Errors
    /// The client's.
    pub fn client(&self, deadline: Duration) -> Result<Client, tidepool_client::Error> {
        let addresses = self.options.iter().filter_map(|options| {
            options.settings.iter().rev().find_map(|setting| setting.strip_prefix("grpc.listen="))
        });
        let builder = Client::builder().deadline(deadline);
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
    pub fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let began = Instant::now();
        while !holds(self) {
            let logs = self.folder.path().display();
            assert!(began.elapsed() < PATIENCE, "waited in vain until {what}; see the logs in {logs}");
            std::thread::sleep(Duration::from_millis(20));
        }
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
        let recovered = |node: &NodeProcess| {
            let report = node.admin("/v1/recovery").unwrap_or_default();
            report["finished"] == true && !report["reconciliation"].is_null()
        };
        self.until("all have recovered", |cluster| cluster.running().all(|(_, node)| recovered(node)));
    }
}

/// The `tidepool` binary for a test.
#[must_use]
pub fn program(this: &Path) -> Option<PathBuf> {
    crate::node_process::program_beside(this)
}
