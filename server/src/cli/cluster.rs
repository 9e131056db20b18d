//! `tidepool cluster`: three nodes on this machine, and what they survive.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use tidepool_client::{Client, PutOptions};

use super::admin_http::AdminClient;
use super::failure::{Failure, NO};
use super::output::Output;
use crate::admin::report::{RaftReport, RecoveryReport};

/// How long each step may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often something is looked at while it is waited for.
const LOOK: Duration = Duration::from_millis(20);
/// Bytes of one object.
const VALUE_BYTES: usize = 4096;

/// What to do with several nodes.
#[derive(Debug, Subcommand)]
pub(super) enum ClusterCommand {
    /// Start three nodes on ports of their own choosing, kill the leader under load, and check that nothing that was
    /// acknowledged is lost; exit code 0 only then. Leaves nothing behind
    Demo(DemoArguments),
}

/// Arguments of the demo.
#[derive(Debug, Args)]
pub(super) struct DemoArguments {
    /// How many objects are put before the leader is killed, and as many after
    #[arg(long, default_value_t = 500, value_name = "COUNT")]
    objects: u64,
}

/// What the demo shows.
#[derive(Debug, Serialize)]
struct Demo {
    /// Objects that were acknowledged.
    acknowledged: usize,
    /// Of them, those that were not there at the end.
    lost: usize,
    /// Of them, those with other bytes.
    wrong: usize,
    /// From the kill to the next acknowledged put, in milliseconds.
    gap_ms: u64,
    /// Objects that the catalog knew while their node was dead.
    known_meanwhile: usize,
    /// Who led before, and after.
    leaders: [String; 2],
}

#[derive(Clone, Default, Deserialize)]
struct Addresses {
    grpc: String,
    admin: String,
}

struct Node {
    process: Child,
    data: PathBuf,
    addresses: Addresses,
}

impl Node {
    async fn start(data: PathBuf, segments: &Path, listen: [&str; 2], join: &[String]) -> Result<Self, Failure> {
        let failed = |what: String| Failure::local("DEMO", what);
        let program = std::env::current_exe().map_err(|error| failed(format!("find this program: {error}")))?;
        std::fs::create_dir_all(&data).map_err(|error| failed(format!("make {}: {error}", data.display())))?;
        let log = std::fs::File::options().create(true).append(true).open(data.join("node.log"));
        let log = log.map_err(|error| failed(format!("open the node's log: {error}")))?;
        let mut command = Command::new(program);
        command.args(["serve", "--json", "--dram", "64MiB", "--nvme", "0", "--data"]).arg(&data);
        command.args(["--set", &format!("grpc.listen='{}'", listen[0])]);
        command.args(["--set", &format!("admin.listen='{}'", listen[1])]);
        // Of its own choosing also when the node comes back at its address: the next port may be somebody's.
        command.args(["--set", "engine.listen='127.0.0.1:0'"]);
        command.args(["--set", &format!("dram.folder='{}'", segments.display())]);
        if !join.is_empty() {
            command.args(["--join", &join.join(",")]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut process = command.spawn().map_err(|error| failed(format!("start a node: {error}")))?;
        let output = process.stdout.take();
        // From here on, dropping ends the process.
        let mut node = Self { process, data, addresses: Addresses::default() };
        let first = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            // Without output, or at its end, the line is empty, which is no address.
            let _read = output.map(|output| BufReader::new(output).read_line(&mut line));
            line
        });
        let line = tokio::time::timeout(PATIENCE, first).await.ok().and_then(Result::ok).unwrap_or_default();
        node.addresses = serde_json::from_str(&line)
            .map_err(|_| failed(format!("a node did not start: see {}", node.data.join("node.log").display())))?;
        Ok(node)
    }

    fn kill(&mut self) {
        // It may have ended by itself.
        let _ended = (self.process.kill(), self.process.wait());
    }

    fn admin(&self) -> AdminClient {
        AdminClient::new(self.addresses.admin.clone(), None, Duration::from_secs(2))
    }

    async fn raft(&self) -> Option<RaftReport> {
        self.admin().get("/v1/raft").await.ok()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

pub(super) async fn run(command: &ClusterCommand, output: &Output) -> Result<ExitCode, Failure> {
    let ClusterCommand::Demo(arguments) = command;
    let folder = Scratch::new(&std::env::temp_dir())?;
    let shared = Path::new("/dev/shm");
    let segments = Scratch::new(if shared.is_dir() { shared } else { &folder.0 })?;
    let demo = demo(arguments.objects, &folder.0, &segments.0, output).await?;
    let held = demo.lost == 0 && demo.wrong == 0;
    let code = output.answer(&demo, |demo| {
        format!(
            "{} objects acknowledged, {} lost, {} wrong\nthe leader {} was killed; {} leads now; puts went on after {} ms\n\
             while it was dead, the others knew {} of them\n",
            demo.acknowledged, demo.lost, demo.wrong, demo.leaders[0], demo.leaders[1], demo.gap_ms, demo.known_meanwhile
        )
    })?;
    Ok(if held { code } else { ExitCode::from(NO) })
}

async fn demo(objects: u64, folder: &Path, segments: &Path, output: &Output) -> Result<Demo, Failure> {
    let any = "127.0.0.1:0";
    let mut nodes = Vec::new();
    for number in 0..3 {
        let join: Vec<String> = nodes.iter().map(|node: &Node| node.addresses.grpc.clone()).collect();
        nodes.push(Node::start(folder.join(number.to_string()), segments, [any, any], &join).await?);
    }
    let client = nodes.iter().fold(Client::builder(), |builder, node| builder.endpoint(&node.addresses.grpc));
    let client = client.deadline(Duration::from_secs(20)).build()?;
    output.remark("three nodes run; waiting until all of them vote");
    let leader = wait("all three vote", async || voting(&nodes).await).await?;
    let mut acknowledged = BTreeMap::new();
    output.remark(&format!("node {} leads; putting {objects} objects", leader.1));
    put(&client, 0..objects, &mut acknowledged).await?;

    output.remark("killing the leader (kill -9)");
    let dead = leader.0;
    nodes[dead].kill();
    let killed = Instant::now();
    put(&client, objects..objects + 1, &mut acknowledged).await?;
    let gap_ms = u64::try_from(killed.elapsed().as_millis()).unwrap_or(u64::MAX);
    put(&client, objects + 1..2 * objects, &mut acknowledged).await?;
    let new_leader = wait("another node leads", async || leading(&nodes, Some(dead)).await).await?;
    let mut known_meanwhile = 0;
    for number in acknowledged.keys() {
        let existence = client.exists(key(*number)).await?;
        known_meanwhile += usize::from(existence != tidepool_client::Existence::Missing);
    }

    output.remark("starting it again, and reading everything");
    let (data, addresses) = (nodes[dead].data.clone(), nodes[dead].addresses.clone());
    let back = Node::start(data, segments, [&addresses.grpc, &addresses.admin], &[]).await?;
    nodes[dead] = back;
    wait("the node has found what it had", async || recovered(&nodes[dead]).await).await?;
    let (mut lost, mut wrong) = (0, 0);
    for number in acknowledged.keys() {
        match client.get(key(*number)).await? {
            None => lost += 1,
            Some(found) if found.value != value(*number) => wrong += 1,
            Some(_) => {}
        }
    }
    let known_meanwhile = known_meanwhile.min(acknowledged.len());
    Ok(Demo {
        acknowledged: acknowledged.len(),
        lost,
        wrong,
        gap_ms,
        known_meanwhile,
        leaders: [leader.1, new_leader.1],
    })
}

async fn put(
    client: &Client,
    numbers: std::ops::Range<u64>,
    acknowledged: &mut BTreeMap<u64, ()>,
) -> Result<(), Failure> {
    for number in numbers {
        client.put(key(number), value(number).into(), &PutOptions::default()).await?;
        acknowledged.insert(number, ());
    }
    Ok(())
}

/// Who leads, if all nodes vote and no change is under way.
async fn voting(nodes: &[Node]) -> Option<(usize, String)> {
    for node in nodes {
        let raft = node.raft().await?;
        let voters = raft.members.iter().filter(|member| member.kind == "voter").count();
        if voters < nodes.len() || raft.changing {
            return None;
        }
    }
    leading(nodes, None).await
}

async fn leading(nodes: &[Node], but: Option<usize>) -> Option<(usize, String)> {
    for (position, node) in nodes.iter().enumerate().filter(|(position, _)| Some(*position) != but) {
        if let Some(raft) = node.raft().await
            && raft.role == "leader"
            && raft.in_contact
        {
            return Some((position, raft.node));
        }
    }
    None
}

async fn recovered(node: &Node) -> Option<()> {
    let report: RecoveryReport = node.admin().get("/v1/recovery").await.ok()?;
    (report.finished && report.reconciliation.is_some()).then_some(())
}

async fn wait<A>(what: &str, look: impl AsyncFn() -> Option<A>) -> Result<A, Failure> {
    let began = Instant::now();
    loop {
        if let Some(found) = look().await {
            return Ok(found);
        }
        if began.elapsed() > PATIENCE {
            return Err(Failure::local("DEMO", format!("waited {PATIENCE:?} in vain until {what}")));
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn key(number: u64) -> String {
    format!("demo/{number}")
}

/// Every byte follows from the number.
fn value(number: u64) -> Vec<u8> {
    (0..VALUE_BYTES).map(|at| (number.wrapping_mul(131).wrapping_add(at as u64 * 7) & 0xff) as u8).collect()
}

/// A folder that is gone when this is.
struct Scratch(PathBuf);

impl Scratch {
    fn new(within: &Path) -> Result<Self, Failure> {
        let random = getrandom::u64().map_err(|error| Failure::local("DEMO", format!("draw a number: {error}")))?;
        let path = within.join(format!("tidepool-demo-{random:016x}"));
        std::fs::create_dir(&path)
            .map_err(|error| Failure::local("DEMO", format!("make {}: {error}", path.display())))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What can't be removed is in a temporary folder.
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}
