//! Several members in one process: real threads and disks, a network of channels that can be cut.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::*;
use crate::consensus::{Formation, Lane, LeaderReads, MemberChange, MemberId, Transport};

type Packet = (NodeId, NodeId, Lane, Vec<u8>);

/// Where messages of one member enter the network.
struct Port {
    from: NodeId,
    network: mpsc::UnboundedSender<Packet>,
}

impl Transport for Port {
    fn send(&self, target: NodeId, lane: Lane, message: Vec<u8>) {
        // The test may be over.
        let _ = self.network.send((self.from, target, lane, message));
    }
}

#[derive(Default)]
struct Wires {
    members: BTreeMap<NodeId, Consensus<Counter>>,
    cut: BTreeSet<(NodeId, NodeId)>,
}

/// Members by node, and what lies between them.
pub(super) struct Network {
    sender: mpsc::UnboundedSender<Packet>,
    wires: Arc<Mutex<Wires>>,
    folders: BTreeMap<NodeId, tempfile::TempDir>,
    groups: BTreeMap<NodeId, Group>,
    limits: GroupLimits,
    reads: LeaderReads,
}

impl Network {
    pub(super) fn new(limits: GroupLimits) -> Self {
        let (sender, mut packets) = mpsc::unbounded_channel::<Packet>();
        let wires: Arc<Mutex<Wires>> = Arc::default();
        let delivering = Arc::clone(&wires);
        tokio::spawn(async move {
            while let Some((from, target, lane, message)) = packets.recv().await {
                let wires = delivering.lock();
                if !wires.cut.contains(&(from, target))
                    && let Some(member) = wires.members.get(&target)
                {
                    member.receive(lane, message);
                }
            }
        });
        Self { sender, wires, folders: BTreeMap::new(), groups: BTreeMap::new(), limits, reads: LeaderReads::Lease }
    }

    /// Starts the node's member, over what it has, or as a founder or newcomer.
    pub(super) fn start(&mut self, node: u32, formation: Formation) -> Consensus<Counter> {
        self.try_start(node, formation, 3).unwrap()
    }

    pub(super) fn try_start(
        &mut self,
        node: u32,
        formation: Formation,
        voters: usize,
    ) -> Result<Consensus<Counter>, GroupError> {
        let node = NodeId(node);
        let folder = self.folders.entry(node).or_insert_with(|| tempfile::tempdir().unwrap()).path().to_owned();
        let reads = self.reads;
        let config = GroupConfig { formation, voters, reads, ..GroupConfig::new(folder, ClusterId(7), node) };
        let port = Port { from: node, network: self.sender.clone() };
        let (group, member) = Group::open_with(config, self.limits.clone(), Arc::new(port))?;
        self.wires.lock().members.insert(node, member.clone());
        self.groups.insert(node, group);
        Ok(member)
    }

    /// Ends the member where it is, nothing flushed.
    pub(super) fn crash(&mut self, node: u32) {
        let member = self.wires.lock().members.remove(&NodeId(node)).unwrap();
        member.crash();
        drop(self.groups.remove(&NodeId(node)));
    }

    pub(super) fn stop(&mut self, node: u32) {
        self.wires.lock().members.remove(&NodeId(node));
        drop(self.groups.remove(&NodeId(node)));
    }

    /// Cuts the node off from all others, or joins it to them again.
    pub(super) fn cut(&mut self, node: u32, cut: bool) {
        let mut wires = self.wires.lock();
        for &other in self.folders.keys().filter(|other| other.0 != node) {
            for link in [(NodeId(node), other), (other, NodeId(node))] {
                if cut {
                    wires.cut.insert(link)
                } else {
                    wires.cut.remove(&link)
                };
            }
        }
    }

    /// A folder's contents are gone; the node itself is not.
    pub(super) fn lose_folder(&mut self, node: u32) {
        self.folders.remove(&NodeId(node));
    }

    pub(super) fn folder(&self, node: u32) -> &Path {
        self.folders[&NodeId(node)].path()
    }

    pub(super) fn member(&self, node: u32) -> Consensus<Counter> {
        self.wires.lock().members[&NodeId(node)].clone()
    }

    pub(super) fn nodes(&self) -> Vec<u32> {
        self.wires.lock().members.keys().map(|node| node.0).collect()
    }

    /// A newcomer, as an operator brings it in through any member.
    pub(super) async fn join(&mut self, node: u32, life: u32) -> Consensus<Counter> {
        let leader = self.leader().await;
        let added = MemberId::new(NodeId(node), life);
        let members = self.member(leader).change_members(MemberChange::Add(added)).await.unwrap();
        self.start(node, Formation::Join { life, members })
    }

    /// Three voters, of which node 1 founded the group.
    pub(super) async fn three(limits: GroupLimits) -> Self {
        Self::three_that_read(limits, LeaderReads::Lease).await
    }

    pub(super) async fn three_that_read(limits: GroupLimits, reads: LeaderReads) -> Self {
        let mut network = Self { reads, ..Self::new(limits) };
        let founder = network.start(1, Formation::Found);
        add(&founder, "founded").await;
        network.join(2, 1).await;
        network.join(3, 1).await;
        let all = [1, 2, 3].map(NodeId);
        let has_all = |node: u32| {
            let status = network.member(node).status();
            status.voters == all && !status.members.is_changing()
        };
        until("three voters everywhere", || (1..=3).all(has_all)).await;
        network
    }

    /// Whoever leads and has a quorum.
    pub(super) async fn leader(&self) -> u32 {
        let mut found = None;
        until("a leader", || {
            let leads = |node: &u32| self.member(*node).is_leader();
            found = self.nodes().into_iter().find(leads);
            found.is_some()
        })
        .await;
        found.unwrap()
    }
}

/// Waits until `holds`, looking again and again.
pub(super) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(30), "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
