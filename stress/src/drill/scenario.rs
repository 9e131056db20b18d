//! The faults. Each is made, lasts, is seen to be survived by the load, and is undone; the drill waits for calm between two.

use std::collections::BTreeSet;
use std::fs::File;
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

/// How many copies objects have, and what follows for who reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copies {
    /// What lies on a node that is gone can't be read, and may be put anew.
    One,
    /// What was acknowledged can be read, whichever node is gone.
    Two,
    /// The same, each on its node's disk before the put is acknowledged, and memory has room for a part of them only.
    TwoOnDisks,
    /// More nodes go than there are copies.
    TooFew,
}

/// One kind of fault.
pub struct Scenario {
    /// What it is asked for by.
    pub name: &'static str,
    /// What is done.
    pub about: &'static str,
    pub(super) needs: Needs,
    pub(super) copies: Copies,
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
        copies: Copies::One,
        fault: leader_kill,
    },
    Scenario {
        name: "leader-freeze",
        about: "SIGSTOP of the leader for up to 7 s, its connections open, and back",
        needs: Needs::Processes,
        copies: Copies::One,
        fault: leader_freeze,
    },
    Scenario {
        name: "follower-kill",
        about: "kill -9 of a follower",
        needs: Needs::Processes,
        copies: Copies::One,
        fault: follower_kill,
    },
    Scenario {
        name: "minority-cut",
        about: "one node, leader or not, is cut off from all others and from clients",
        needs: Needs::Network,
        copies: Copies::One,
        fault: minority_cut,
    },
    Scenario {
        name: "leader-cut-from-followers",
        about: "the leader is cut off from the other nodes, but not from clients",
        needs: Needs::Network,
        copies: Copies::One,
        fault: leader_cut_from_followers,
    },
    Scenario {
        name: "asymmetric-cut",
        about: "the leader hears and is not heard, by one follower or both; or two nodes can't reach each other, the third both",
        needs: Needs::Network,
        copies: Copies::One,
        fault: asymmetric_cut,
    },
    Scenario {
        name: "slow-disk",
        about: "the leader's file system stalls for up to a second, again and again; it leads on",
        needs: Needs::Disk,
        copies: Copies::One,
        fault: slow_disk,
    },
    Scenario {
        name: "full-disk",
        about: "the leader's file system is full; it is emptied, and the node started again",
        needs: Needs::Disk,
        copies: Copies::One,
        fault: full_disk,
    },
    Scenario {
        name: "clock-step",
        about: "the clock of one node is set forth and back",
        needs: Needs::What(
            "the kernel knows no wall clock of one process's own, and setting the machine's would step all nodes and everything \
             else on it; tests of the log's clock and the simulation step it instead",
        ),
        copies: Copies::One,
        fault: |_| Ok(()),
    },
    Scenario {
        name: "rolling-restart",
        about: "SIGTERM of one node after the other, each started again",
        needs: Needs::Processes,
        copies: Copies::One,
        fault: rolling_restart,
    },
    Scenario {
        name: "membership-change",
        about: "a node joins, a voter is removed, leadership is handed over, the removed node joins again",
        needs: Needs::Processes,
        copies: Copies::One,
        fault: membership_change,
    },
    Scenario {
        name: "snapshot-install",
        about: "a follower is dead until the log that it lacks is gone, and takes a snapshot",
        needs: Needs::Processes,
        copies: Copies::One,
        fault: snapshot_install,
    },
    Scenario {
        name: "copies-node-kill",
        about: "two copies of everything; kill -9 of a node for long enough that its copies are made anew",
        needs: Needs::Processes,
        copies: Copies::Two,
        fault: any_kill,
    },
    Scenario {
        name: "copies-node-freeze",
        about: "two copies of everything; SIGSTOP of a node for up to 8 s, its connections open, and back",
        needs: Needs::Processes,
        copies: Copies::Two,
        fault: any_freeze,
    },
    Scenario {
        name: "copies-node-cut",
        about: "two copies of everything; a node is cut off from all others and from clients",
        needs: Needs::Network,
        copies: Copies::Two,
        fault: minority_cut,
    },
    Scenario {
        name: "copies-full-disk",
        about: "two copies of everything; a node's file system is full; it is emptied, and the node started again",
        needs: Needs::Disk,
        copies: Copies::Two,
        fault: any_full_disk,
    },
    Scenario {
        name: "copies-flapping",
        about: "two copies of everything; kill -9 of a node, again and again as soon as it is back",
        needs: Needs::Processes,
        copies: Copies::Two,
        fault: flapping,
    },
    Scenario {
        name: "copies-drain",
        about: "two copies of everything; a node is emptied, and takes part again",
        needs: Needs::Processes,
        copies: Copies::Two,
        fault: drain,
    },
    Scenario {
        name: "copies-rolling-restart",
        about: "two copies of everything; SIGTERM of one node after the other, each started again",
        needs: Needs::Processes,
        copies: Copies::Two,
        fault: rolling_restart,
    },
    Scenario {
        name: "copies-nvme-pulled",
        about: "two copies of everything, on disks; one node's NVMe file is pulled from under it; a new one is attached",
        needs: Needs::Processes,
        copies: Copies::TwoOnDisks,
        fault: nvme_pulled,
    },
    Scenario {
        name: "two-of-three-down",
        about: "two copies of everything; kill -9 of two nodes: the third serves what it has, and says what it can't do",
        needs: Needs::Processes,
        copies: Copies::TooFew,
        fault: two_down,
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

fn any(drill: &mut Drill) -> usize {
    drill.random.below(NODES as u64) as usize
}

fn any_kill(drill: &mut Drill) -> Result<(), DrillError> {
    let node = any(drill);
    drill.fault(format!("kill node {node}"));
    drill.cluster.kill(node)?;
    drill.progress()?;
    // It counts as absent after 5 s.
    drill.last(5000, 9000);
    drill.progress()?;
    Ok(drill.cluster.restart(node)?)
}

fn any_freeze(drill: &mut Drill) -> Result<(), DrillError> {
    let node = any(drill);
    drill.fault(format!("freeze node {node}"));
    signal(drill, node, NodeProcess::freeze)?;
    let survived = drill.progress();
    drill.last(0, 8000);
    signal(drill, node, NodeProcess::thaw)?;
    survived
}

fn flapping(drill: &mut Drill) -> Result<(), DrillError> {
    let node = any(drill);
    drill.fault(format!("kill node {node} again and again"));
    for _ in 0..4 {
        drill.cluster.kill(node)?;
        drill.last(0, 300);
        drill.cluster.restart(node)?;
        drill.last(0, 1500);
    }
    drill.progress()
}

/// Objects that leave a node's memory for its disk before that is pulled.
const DEMOTED: u64 = 200;

fn demotions(cluster: &Cluster, node: usize) -> u64 {
    cluster.node(node).and_then(|node| node.tier("dram", "demotions").ok()).unwrap_or_default()
}

fn nvme_state(cluster: &Cluster, node: usize) -> Option<String> {
    let report = cluster.node(node)?.admin("/v1/tiers").ok()?;
    let row = report["tiers"].as_array()?.iter().find(|row| row["tier"] == "nvme")?;
    row["state"].as_str().map(str::to_owned)
}

/// The node that the seed names, each time: what is on another one's disk is never lost, whether it was made anew by then or not.
fn nvme_pulled(drill: &mut Drill) -> Result<(), DrillError> {
    let node = (drill.seed % NODES as u64) as usize;
    let before = demotions(&drill.cluster, node);
    drill.cluster.wait("some lie on its disk alone", |cluster| demotions(cluster, node) > before + DEMOTED)?;
    drill.fault(format!("pull the disk of node {node}"));
    let regions = drill.cluster.data(node).join("nvme/regions.dat");
    File::options().write(true).open(&regions)?.set_len(0)?;
    std::fs::remove_file(&regions)?;
    drill
        .cluster
        .wait("the tier is out of service", |cluster| nvme_state(cluster, node).as_deref() == Some("failed"))?;
    drill.progress()?;
    drill.last(0, 3000);
    drill.progress()?;
    let Some(process) = drill.cluster.node(node) else { return Ok(()) };
    // What it could not write any more is an error; it is detached all the same.
    process.change("/v1/nvme/detach", &json!({}))?;
    process.change("/v1/nvme/attach", &json!({}))?;
    drill.cluster.wait("a new one serves", |cluster| nvme_state(cluster, node).as_deref() == Some("serving"))?;
    Ok(())
}

fn drain(drill: &mut Drill) -> Result<(), DrillError> {
    let node = any(drill);
    drill.fault(format!("empty node {node}"));
    let number = drill.cluster.node(node).map(|node| node.admin("/v1/raft")).transpose()?;
    let number = number.map(|raft| raft["node"].clone()).unwrap_or_default();
    let asked = drill.others(node).first().copied().unwrap_or_default();
    let Some(asked) = drill.cluster.node(asked) else { return Ok(()) };
    asked.change("/v1/nodes/drain", &json!({ "node": number }))?;
    let survived = drill.progress();
    let is_empty = |_: &Cluster| {
        let report = asked.admin("/v1/nodes").unwrap_or_default();
        let rows = report["nodes"].as_array().cloned().unwrap_or_default();
        rows.iter().any(|row| row["node"] == number && row["replicas"] == 0 && row["state"] == "draining")
    };
    let emptied = drill.cluster.wait("the node is empty", is_empty);
    asked.change("/v1/nodes/undrain", &json!({ "node": number }))?;
    survived?;
    Ok(emptied?)
}

fn two_down(drill: &mut Drill) -> Result<(), DrillError> {
    let stays = any(drill);
    drill.fault(format!("kill all nodes but {stays}"));
    for node in drill.others(stays) {
        drill.cluster.kill(node)?;
    }
    // A put that waits for the log until its time is over may have been done or not: that is all that can be said of it.
    let waited = drill.refused_put(stays)?;
    // The node has found out by then that nobody answers it.
    let refused = drill.refused_put(stays)?;
    if !["NO_LEADER", "DEADLINE"].contains(&waited.as_str()) || refused != "NO_LEADER" {
        return Err(DrillError::Unclear { said: format!("{waited}, then {refused}") });
    }
    drill.last(500, 4000);
    for node in (0..NODES).filter(|&node| node != stays) {
        drill.cluster.restart(node)?;
    }
    Ok(())
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
    let before = drill.term(leader);
    drill.fault(format!("stall the disk of node {leader}, the leader, again and again"));
    for _ in 0..6 {
        drill.disks[leader].stall()?;
        drill.last(20, 1000);
        drill.disks[leader].go_on()?;
        drill.last(20, 400);
    }
    drill.progress()?;
    let after = drill.term(leader);
    if after != before {
        return Err(DrillError::Deposed { node: leader, before, after });
    }
    Ok(())
}

fn full_disk(drill: &mut Drill) -> Result<(), DrillError> {
    let leader = drill.leader()?;
    fill_disk(drill, leader, ", the leader")
}

fn any_full_disk(drill: &mut Drill) -> Result<(), DrillError> {
    let node = any(drill);
    fill_disk(drill, node, "")
}

fn fill_disk(drill: &mut Drill, node: usize, which: &str) -> Result<(), DrillError> {
    drill.fault(format!("fill the disk of node {node}{which}"));
    drill.disks[node].fill()?;
    let survived = drill.progress();
    drill.last(0, 2000);
    drill.disks[node].empty()?;
    survived?;
    drill.cluster.kill(node)?;
    Ok(drill.cluster.restart(node)?)
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
