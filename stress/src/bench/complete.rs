//! The catalog's part of a put: completes of objects without bytes, by three voters in this process. Each has its threads, its log
//! and its image on disk; messages are handed over in memory. So this is consensus and the catalog, without what carries calls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tidepool_metadata::NodeId;
use tidepool_metadata::catalog::{Command, CompleteOutcome, Outcome};
use tidepool_replication::{
    CatalogHandle, ClusterId, Formation, Group, GroupConfig, Lane, MemberChange, MemberId, Transport,
};
use tokio::runtime::{Handle, Runtime};

use super::catalog_size::{NODE, item, register};
use super::latency::Latencies;
use super::{BenchOptions, Error};

const BATCH: u64 = 128;
const CALLERS: u64 = 4;
/// How long the group may take to be whole.
const PATIENCE: Duration = Duration::from_secs(30);

/// Members of one group in this process, by node.
pub(super) type MembersHere = Arc<Mutex<BTreeMap<NodeId, CatalogHandle>>>;

/// Hands messages to the member that they are for.
pub(super) struct Hands {
    pub(super) members: MembersHere,
    pub(super) runtime: Handle,
}

impl Transport for Hands {
    fn send(&self, target: NodeId, lane: Lane, message: Vec<u8>) {
        let member = self.members.lock().get(&target).cloned();
        let _answers = self.runtime.enter();
        if let Some(member) = member {
            member.receive(lane, message);
        }
    }
}

/// Three voters, of which the first leads.
pub(super) struct ThreeVoters {
    runtime: Runtime,
    leader: CatalogHandle,
    groups: Vec<Group>,
    /// The number of the next new object.
    next: u64,
}

impl ThreeVoters {
    pub(super) fn start(options: &BenchOptions) -> Result<Self, Error> {
        let runtime = super::load::runtime()?;
        let members = MembersHere::default();
        let mut groups = Vec::new();
        let mut open = |node: u32, formation: Formation| {
            let folder = options.folder.join(format!("complete-{node}"));
            let config = GroupConfig { formation, voters: 3, ..GroupConfig::new(folder, ClusterId(1), NodeId(node)) };
            let hands = Hands { members: Arc::clone(&members), runtime: runtime.handle().clone() };
            let _in_runtime = runtime.enter();
            let (group, handle) = Group::start_with(config, Arc::new(hands))?;
            members.lock().insert(NodeId(node), handle.clone());
            groups.push(group);
            Ok::<_, Error>(handle)
        };
        let leader = open(NODE.0, Formation::Found)?;
        runtime.block_on(register(&leader))?;
        for node in [2, 3] {
            runtime.block_on(leader.change_members(MemberChange::Add(MemberId::new(NodeId(node), 1))))?;
            open(node, Formation::Join { life: 1, members: leader.status().members })?;
        }
        let began = Instant::now();
        while leader.status().voters.len() < 3 || leader.status().members.is_changing() {
            if began.elapsed() > PATIENCE {
                return Err("three voters did not come together".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Self { runtime, leader, groups, next: 1 })
    }

    /// Objects a second, in batches of several callers.
    pub(super) fn batches(&mut self, rounds: u64) -> Result<f64, Error> {
        let began = Instant::now();
        let mut calls = tokio::task::JoinSet::new();
        for caller in 0..CALLERS {
            let (catalog, first) = (self.leader.clone(), self.next + caller * rounds * BATCH);
            let complete = async move {
                for round in 0..rounds {
                    complete(&catalog, first + round * BATCH, BATCH).await?;
                }
                Ok::<_, Error>(())
            };
            calls.spawn_on(complete, self.runtime.handle());
        }
        while let Some(done) = self.runtime.block_on(calls.join_next()) {
            done??;
        }
        let count = CALLERS * rounds * BATCH;
        self.next += count;
        Ok(count as f64 / began.elapsed().as_secs_f64())
    }

    /// One at a time.
    pub(super) fn singles(&mut self, side: Duration) -> Result<Latencies, Error> {
        let Self { runtime, leader, next, .. } = self;
        Latencies::of(side, || {
            *next += 1;
            runtime.block_on(complete(leader, *next, 1))
        })
    }

    pub(super) fn stop(self) {
        self.runtime.block_on(async {
            for group in self.groups {
                group.shutdown().await;
            }
        });
    }
}

/// Completes so many new objects by one command.
pub(super) async fn complete(catalog: &CatalogHandle, first: u64, count: u64) -> Result<(), Error> {
    let items = (first..first + count).map(|number| item(catalog, number)).collect::<Result<_, _>>()?;
    let (_, outcome) = catalog.propose(Command::Complete(items)).await?;
    match outcome {
        Outcome::Complete(done) if done.iter().all(|done| matches!(done, CompleteOutcome::Completed { .. })) => Ok(()),
        other => Err(format!("completes came to {other:?}").into()),
    }
}
