//! The faults. Each is made, lasts, is seen to be survived by the load, and is undone; the drill waits for calm between two.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::json;

use super::network::Direction;
use super::{Drill, DrillError, NODES};
use crate::cluster::Cluster;
use crate::node_process::NodeProcess;

/// What a drill needs of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// Nothing else.
    Processes,
    /// Network namespaces.
    Network,
    /// A file system for each node.
    Disk,
    /// Something that no machine has.
    What(&'static str),
}

/// One kind of fault.
pub struct Scenario {
    /// What it is asked for by.
    pub name: &'static str,
    /// What is done.
    pub about: &'static str,
    pub(super) needs: Needs,
    /// Makes the fault once, and undoes it.
    pub(super) fault: fn(&mut Drill) -> Result<(), DrillError>,
}

impl Scenario {
    /// Why no machine can run it; `None` if some can.
    #[must_use]
    pub fn why_never(&self) -> Option<&'static str> {
        match self.needs {
            Needs::What(nobody_has) => Some(nobody_has),
            _ => None,
        }
    }
}

/// All drills, in the order in which they run.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "leader-kill",
        about: "kill -9 of the leader; it is started again over its folder",
        needs: Needs::Processes,
        fault: leader_kill,
    },
    Scenario {
        name: "leader-freeze",
        about: "SIGSTOP of the leader for up to 7 s, its connections open, and back",
        needs: Needs::Processes,
        fault: leader_freeze,
    },
    Scenario { name: "follower-kill", about: "kill -9 of a follower", needs: Needs::Processes, fault: follower_kill },
    Scenario {
        name: "minority-cut",
        about: "one node, leader or not, is cut off from all others and from clients",
        needs: Needs::Network,
        fault: minority_cut,
    },
    Scenario {
        name: "leader-cut-from-followers",
        about: "the leader is cut off from the other nodes, but not from clients",
        needs: Needs::Network,
        fault: leader_cut_from_followers,
    },
    Scenario {
        name: "asymmetric-cut",
        about: "the leader hears and is not heard, by one follower or both; or two nodes can't reach each other, the third both",
        needs: Needs::Network,
        fault: asymmetric_cut,
    },
    Scenario {
        name: "slow-disk",
        about: "the leader's file system stalls for up to a second, again and again",
        needs: Needs::Disk,
        fault: slow_disk,
    },
    Scenario {
        name: "full-disk",
        about: "the leader's file system is full; it is emptied, and the node started again",
        needs: Needs::Disk,
        fault: full_disk,
    },
    Scenario {
        name: "clock-step",
        about: "the clock of one node is set forth and back",
        needs: Needs::What(
            "the kernel knows no wall clock of one process's own, and setting the machine's would step all nodes and everything \
             else on it; tests of the log's clock and the simulation step it instead",
        ),
        fault: |_| Ok(()),
    },
    Scenario {
        name: "rolling-restart",
        about: "SIGTERM of one node after the other, each started again",
        needs: Needs::Processes,
        fault: rolling_restart,
    },
    Scenario {
        name: "membership-change",
        about: "a node joins, a voter is removed, leadership is handed over, the removed node joins again",
        needs: Needs::Processes,
        fault: membership_change,
    },
    Scenario {
        name: "snapshot-install",
        about: "a follower is dead until the log that it lacks is gone, and takes a snapshot",
        needs: Needs::Processes,
        fault: snapshot_install,
    },
];

fn leader_kill(drill: &mut Drill) -> Result<(), DrillError> {
    let leader = drill.leader()?;
    kill_and_restart(drill, leader, "the leader")
}

fn follower_kill(drill: &mut Drill) -> Result<(), DrillError> {
    let follower = drill.follower()?;
    kill_and_restart(drill, follower, "a follower")
}

fn kill_and_restart(drill: &mut Drill, node: usize, which: &str) -> Result<(), DrillError> {
    drill.fault(format!("kill node {node}, {which}"));
    drill.cluster.kill(node)?;
    drill.progress()?;
    drill.last(0, 2000);
    Ok(drill.cluster.restart(node)?)
}

fn leader_freeze(drill: &mut Drill) -> Result<(), DrillError> {
    let leader = drill.leader()?;
    drill.fault(format!("freeze node {leader}, the leader"));
    signal(drill, leader, NodeProcess::freeze)?;
    let survived = drill.progress();
    drill.last(0, 7000);
    signal(drill, leader, NodeProcess::thaw)?;
    survived
}

fn signal(
    drill: &Drill,
    node: usize,
    send: fn(&NodeProcess) -> Result<(), crate::node_process::NodeError>,
) -> Result<(), DrillError> {
    Ok(drill.cluster.node(node).map_or(Ok(()), send)?)
}

fn minority_cut(drill: &mut Drill) -> Result<(), DrillError> {
    let node = if drill.random.below(2) == 0 { drill.leader()? } else { drill.follower()? };
    cut(drill, node, drill.others(node), true, Direction::Both)
}

fn leader_cut_from_followers(drill: &mut Drill) -> Result<(), DrillError> {
    let leader = drill.leader()?;
    cut(drill, leader, drill.others(leader), false, Direction::Both)
}

fn asymmetric_cut(drill: &mut Drill) -> Result<(), DrillError> {
    let leader = drill.leader()?;
    let mut others = drill.others(leader);
    let direction = if drill.random.below(2) == 0 { Direction::Outgoing } else { Direction::Both };
    if direction == Direction::Both || drill.random.below(2) == 0 {
        let at = drill.random.below(others.len() as u64) as usize;
        others = vec![others[at]];
    }
    cut(drill, leader, others, false, direction)
}

fn cut(
    drill: &mut Drill,
    node: usize,
    others: Vec<usize>,
    clients: bool,
    direction: Direction,
) -> Result<(), DrillError> {
    let also = if clients { " and from clients" } else { "" };
    drill.fault(format!("cut node {node} off from {others:?}{also}, {direction:?}"));
    let Some(network) = &drill.network else { return Ok(()) };
    network.cut(node, &BTreeSet::from_iter(others), clients, direction)?;
    let survived = drill.progress();
    drill.last(500, 8000);
    // What went on at once may have stopped since.
    let goes_on = drill.progress();
    if let Some(network) = &drill.network {
        network.mend(node)?;
    }
    survived.and(goes_on)
}

fn slow_disk(drill: &mut Drill) -> Result<(), DrillError> {
    let leader = drill.leader()?;
    drill.fault(format!("stall the disk of node {leader}, the leader, again and again"));
    for _ in 0..6 {
        drill.disks[leader].stall()?;
        drill.last(20, 1000);
        drill.disks[leader].go_on()?;
        drill.last(20, 400);
    }
    drill.progress()
}

fn full_disk(drill: &mut Drill) -> Result<(), DrillError> {
    let leader = drill.leader()?;
    drill.fault(format!("fill the disk of node {leader}, the leader"));
    drill.disks[leader].fill()?;
    let survived = drill.progress();
    drill.last(0, 2000);
    drill.disks[leader].empty()?;
    survived?;
    drill.cluster.kill(leader)?;
    Ok(drill.cluster.restart(leader)?)
}

fn rolling_restart(drill: &mut Drill) -> Result<(), DrillError> {
    for node in 0..NODES {
        drill.fault(format!("stop node {node}, and start it again"));
        drill.cluster.stop(node)?;
        drill.progress()?;
        drill.cluster.restart(node)?;
        drill.calm()?;
    }
    Ok(())
}

fn membership_change(drill: &mut Drill) -> Result<(), DrillError> {
    if drill.cluster.running().count() == NODES {
        drill.fault("a fourth node joins".into());
        let new = drill.cluster.join()?;
        drill.cluster.wait("it has the log", |cluster| is_in_contact(cluster, new))?;
    }
    let leader = drill.leader()?;
    let voters: Vec<usize> = drill
        .others(leader)
        .into_iter()
        .filter(|&node| kind_of(&drill.cluster, node).as_deref() == Some("voter"))
        .collect();
    let Some(&removed) = drill.random.choose(&voters) else { return Ok(()) };
    drill.fault(format!("remove node {removed}, a voter"));
    change(&drill.cluster, leader, "/v1/raft/remove", removed)?;
    drill.progress()?;
    drill.cluster.kill(removed)?;
    drill.cluster.wait("another votes in its place", |cluster| cluster.voters() == Some(NODES))?;
    let (leader, follower) = (drill.leader()?, drill.follower()?);
    drill.fault(format!("node {leader} hands over to node {follower}"));
    // Refused if it lacks some of the log just then: leadership stays, which is as good.
    let _stays = change(&drill.cluster, leader, "/v1/raft/transfer-leader", follower);
    drill.progress()?;
    drill.fault(format!("node {removed} joins again"));
    let mut rejoin = Command::new(&drill.cluster.options_of(removed, &[]).program);
    let rejoin = rejoin.args(["admin", "raft", "rejoin", "--data"]).arg(drill.cluster.data(removed)).output()?;
    if !rejoin.status.success() {
        let said = String::from_utf8_lossy(&rejoin.stderr).into_owned();
        return Err(DrillError::Tool { command: "admin raft rejoin".into(), said });
    }
    drill.cluster.restart(removed)?;
    Ok(drill.cluster.wait("it has the log", |cluster| is_in_contact(cluster, removed))?)
}

fn is_in_contact(cluster: &Cluster, node: usize) -> bool {
    let raft = cluster.node(node).and_then(|node| node.admin("/v1/raft").ok()).unwrap_or_default();
    raft["in_contact"] == true
}

fn kind_of(cluster: &Cluster, node: usize) -> Option<String> {
    let raft = cluster.node(node)?.admin("/v1/raft").ok()?;
    let here = raft["members"].as_array()?.iter().find(|member| member["here"] == true)?;
    here["kind"].as_str().map(str::to_owned)
}

fn change(cluster: &Cluster, leader: usize, path: &str, target: usize) -> Result<(), DrillError> {
    let number = |node: usize| cluster.node(node).and_then(|node| node.admin("/v1/raft").ok());
    let target = number(target).map(|raft| raft["node"].clone()).unwrap_or_default();
    let Some(leader) = cluster.node(leader) else { return Ok(()) };
    let answer = leader.change(path, &json!({ "node": target }))?;
    if answer["members"].is_array() {
        return Ok(());
    }
    Err(DrillError::Tool { command: format!("POST {path}"), said: answer.to_string() })
}

fn snapshot_install(drill: &mut Drill) -> Result<(), DrillError> {
    let follower = drill.follower()?;
    let raft = |cluster: &Cluster, node: usize| {
        cluster.node(node).and_then(|node| node.admin("/v1/raft").ok()).unwrap_or_default()
    };
    let before = raft(&drill.cluster, follower)["log_last"].as_u64().unwrap_or_default();
    drill.fault(format!("kill node {follower}, a follower, until its log is gone"));
    drill.cluster.kill(follower)?;
    drill.progress()?;
    for (_, node) in drill.cluster.running() {
        node.change("/v1/raft/snapshot", &json!({}))?;
    }
    let is_past = |cluster: &Cluster, node: usize| raft(cluster, node)["log_first"].as_u64() > Some(before + 1);
    drill
        .cluster
        .wait("the log is compacted", |cluster| cluster.running().all(|(position, _)| is_past(cluster, position)))?;
    drill.cluster.restart(follower)?;
    Ok(drill.cluster.wait("the follower has a snapshot", |cluster| {
        is_past(cluster, follower) && is_in_contact(cluster, follower)
    })?)
}
