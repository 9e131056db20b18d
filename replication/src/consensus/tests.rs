//! The group with a small state machine: what is answered is there after every kind of end.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::path::Path;
use std::time::Duration;

use tidepool_metadata::catalog::{EntryContext, MAX_COMMAND_BYTES, Rows};
use tidepool_metadata::{ErrorKind, LogIndex, LogTime, NodeId};

use super::*;
use crate::error::{CatalogError, GroupError};

mod crash;
mod damage;
mod limits;
mod members;
mod network;

/// Counts per name; a command is a name, with a few that misbehave.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Counter {
    counts: BTreeMap<Vec<u8>, u64>,
    last: Option<(u64, u64)>,
    changed: BTreeSet<Vec<u8>>,
}

#[derive(Debug, thiserror::Error)]
#[error("not a command")]
pub(super) struct NoCommand;

/// A command that no machine can read.
const UNREADABLE: &[u8] = b"unreadable";
/// A command on which the machine panics.
const PANIC: &[u8] = b"panic";

impl StateMachine for Counter {
    type Command = Vec<u8>;
    type Outcome = u64;
    type Error = NoCommand;

    fn empty() -> Self {
        Self::default()
    }

    fn load(rows: &impl Rows, _threads: NonZero<usize>) -> Result<Self, NoCommand> {
        let (mut machine, mut result) = (Self::default(), Ok(()));
        rows.scan(&[]..&[], |key, value| {
            result = value.try_into().map(u64::from_le_bytes).map_err(|_| NoCommand).map(|value| {
                machine.counts.insert(key.to_vec(), value);
            });
            result.is_ok()
        });
        result.map(|()| machine)
    }

    fn decode(bytes: &[u8]) -> Result<Vec<u8>, NoCommand> {
        if bytes == UNREADABLE { Err(NoCommand) } else { Ok(bytes.to_vec()) }
    }

    fn apply(&mut self, at: EntryContext, command: &Vec<u8>) -> u64 {
        assert_ne!(command, PANIC, "asked for");
        let now = (at.index.0, at.time.0);
        assert!(self.last.is_none_or(|(index, time)| index <= now.0 && time <= now.1), "{now:?} after {:?}", self.last);
        self.last = Some(now);
        self.changed.insert(command.clone());
        if let Some(name) = command.strip_prefix(b"-") {
            self.changed.insert(name.to_vec());
            return self.counts.remove(name).unwrap_or(0);
        }
        let count = self.counts.entry(command.clone()).or_default();
        *count += 1;
        *count
    }

    fn take_changes(&mut self) -> Vec<Change> {
        let row = |name: Vec<u8>| {
            let value = self.counts.get(&name).map(|count| count.to_le_bytes().to_vec());
            (name, value)
        };
        std::mem::take(&mut self.changed).into_iter().map(row).collect()
    }
}

pub(super) fn config(folder: &Path) -> GroupConfig {
    GroupConfig::new(folder.into(), ClusterId(7), NodeId(3))
}

/// Writes and flushes the image as often as may be.
pub(super) fn eager() -> GroupLimits {
    GroupLimits { image_interval: Duration::from_millis(1), image_flush_bytes: 64 << 10, ..GroupLimits::default() }
}

pub(super) fn open(folder: &Path) -> (Group, Consensus<Counter>) {
    open_limited(folder, eager())
}

pub(super) fn open_limited(folder: &Path, limits: GroupLimits) -> (Group, Consensus<Counter>) {
    Group::open(config(folder), limits).unwrap()
}

pub(super) async fn add(group: &Consensus<Counter>, name: &str) -> u64 {
    group.propose(name.as_bytes().to_vec(), 1, Outlives::Power).await.unwrap().1
}

pub(super) async fn counts(group: &Consensus<Counter>) -> BTreeMap<Vec<u8>, u64> {
    group.read(Read::Linearizable, |machine| machine.counts.clone()).await.unwrap().1
}

#[tokio::test]
async fn answers_come_in_order_and_are_read_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path());
    let mut last = LogIndex(0);
    for count in 1..=50 {
        let (index, answer) = handle.propose(b"a".to_vec(), 1, Outlives::Power).await.unwrap();
        assert_eq!(answer, count);
        assert!(index > last);
        last = index;
        let (seen, read) = handle.read(Read::Linearizable, |machine| machine.counts[b"a".as_slice()]).await.unwrap();
        assert!(read == count && seen >= index);
        assert!(handle.read(Read::AtLeast(index), |_| ()).await.unwrap().0 >= index);
    }
    let status = handle.status();
    assert_eq!((status.role, status.leader), (Role::Leader, Some(NodeId(3))));
    assert!(status.image <= status.applied && status.applied <= status.commit && status.commit <= status.log_last);
    assert_eq!(status.applied, last);
    assert_eq!(status.waiting, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_commands_share_entries() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path());
    let tasks: Vec<_> = (0..512)
        .map(|_| {
            tokio::spawn({
                let handle = handle.clone();
                async move { handle.propose(b"a".to_vec(), 1, Outlives::Power).await.unwrap() }
            })
        })
        .collect();
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(task.await.unwrap());
    }
    answers.sort_by_key(|&(_, count)| count);
    assert!(answers.is_sorted(), "the order of outcomes is that of the log");
    assert_eq!(answers.iter().map(|&(_, count)| count).collect::<Vec<_>>(), (1..=512).collect::<Vec<_>>());
    let entries = handle.status().log_last.0 - 1;
    assert!(entries < 256, "{entries} entries for 512 commands that came together");
}

#[tokio::test]
async fn image_and_log_together_are_the_live_state() {
    let folder = tempfile::tempdir().unwrap();
    let mut before = BTreeMap::new();
    // Round 0 flushes at the end only; the others go on from an image.
    for round in 0..4 {
        let (group, handle) = open(folder.path());
        assert_eq!(counts(&handle).await, before, "round {round}");
        for step in 0..100 {
            add(&handle, &format!("{}", (step * 7 + round) % 23)).await;
            if step % 3 == 0 {
                handle.propose(format!("-{}", step % 23).into_bytes(), 1, Outlives::Power).await.unwrap();
            }
        }
        before = counts(&handle).await;
        let applied = handle.applied();
        handle.shutdown().await;
        assert_eq!(handle.status().image, applied, "a shutdown flushes all");
        drop(group);
    }
}

#[tokio::test]
async fn flushed_entries_are_compacted_and_only_those() {
    let folder = tempfile::tempdir().unwrap();
    let (group, handle) = open(folder.path());
    let name = "n".repeat(1000);
    let compacted = async {
        loop {
            add(&handle, &name).await;
            let status = handle.status();
            assert!(status.log_first.0 <= status.image.0 + 1, "{status:?}");
            if status.log_first > LogIndex(1) {
                return status;
            }
        }
    };
    let status = tokio::time::timeout(Duration::from_secs(60), compacted).await.expect("it is compacted");
    let count = counts(&handle).await;
    handle.shutdown().await;
    drop(group);
    let (_group, handle) = open(folder.path());
    assert_eq!(counts(&handle).await, count);
    assert!(handle.status().log_first >= status.log_first);
}

#[tokio::test]
async fn log_time_does_not_go_back_over_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let mut last = LogTime(0);
    for _ in 0..3 {
        let (_group, handle) = open(folder.path());
        for _ in 0..5 {
            add(&handle, "a").await;
            let now = handle.now();
            assert!(now >= last);
            last = now;
        }
    }
}

#[tokio::test]
async fn after_a_shutdown_nothing_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path());
    add(&handle, "a").await;
    handle.shutdown().await;
    let error = handle.propose(b"a".to_vec(), 1, Outlives::Power).await.unwrap_err();
    assert!(matches!(error, CatalogError::ShuttingDown) && error.is_unproposed() && error.is_final(), "{error}");
    assert!(matches!(handle.read(Read::Linearizable, |_| ()).await, Err(CatalogError::ShuttingDown)));
    handle.shutdown().await;
}

#[tokio::test]
async fn a_dropped_proposal_leaves_the_group_whole() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path());
    for _ in 0..200 {
        let proposal = handle.propose(b"a".to_vec(), 1, Outlives::Power);
        // Polled once: queued, and perhaps logged by now.
        let _ = tokio::time::timeout(Duration::ZERO, proposal).await;
    }
    let count = add(&handle, "a").await;
    assert!((1..=201).contains(&count));
    assert_eq!(counts(&handle).await[b"a".as_slice()], count);
}

#[tokio::test]
async fn a_panic_in_apply_ends_the_group_with_its_cause() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path());
    add(&handle, "a").await;
    let error = handle.propose(PANIC.to_vec(), 1, Outlives::Power).await.unwrap_err();
    assert!(!error.is_unproposed(), "{error}");
    handle.shutdown().await;
    let error = handle.propose(b"a".to_vec(), 1, Outlives::Power).await.unwrap_err();
    let CatalogError::Failed { cause, proposed: false } = &error else { panic!("{error}") };
    assert!(matches!(**cause, GroupError::ThreadDied { thread: "apply" }), "{cause}");
    assert_eq!((error.kind(), error.is_final()), (ErrorKind::Internal, true));
    assert!(matches!(handle.read(Read::Local, |_| ()).await, Err(CatalogError::Failed { .. })));
}

#[tokio::test]
async fn a_failed_write_is_not_repeated_and_ends_the_group() {
    let folder = tempfile::tempdir().unwrap();
    let limits = eager();
    let (group, handle) = open_limited(folder.path(), limits.clone());
    add(&handle, "a").await;
    limits.fail_writes.store(true, std::sync::atomic::Ordering::Release);
    let error = handle.propose(b"a".to_vec(), 1, Outlives::Power).await.unwrap_err();
    let CatalogError::Failed { cause, proposed: true } = &error else { panic!("{error}") };
    assert!(matches!(**cause, GroupError::Write { what: "the log", .. }), "{cause}");
    // The disk is well again, but nobody knows what it holds.
    limits.fail_writes.store(false, std::sync::atomic::Ordering::Release);
    let error = handle.propose(b"a".to_vec(), 1, Outlives::Power).await.unwrap_err();
    assert!(error.is_unproposed() && error.is_final(), "{error}");
    assert!(handle.read(Read::Local, |_| ()).await.is_err());
    handle.shutdown().await;
    assert!(handle.status().failure.is_some());
    drop(group);
    let (_group, handle) = open(folder.path());
    assert_eq!(add(&handle, "a").await, 2);
}

#[tokio::test]
async fn an_unreadable_command_ends_the_group_also_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (group, handle) = open(folder.path());
    add(&handle, "a").await;
    assert!(handle.propose(UNREADABLE.to_vec(), 1, Outlives::Power).await.is_err());
    handle.shutdown().await;
    drop((group, handle));
    let (_group, handle) = open(folder.path());
    let error = handle.read(Read::Linearizable, |_| ()).await.unwrap_err();
    let CatalogError::Failed { cause, .. } = &error else { panic!("{error}") };
    assert!(matches!(**cause, GroupError::Undecodable { .. }), "{cause}");
}

#[tokio::test]
async fn a_second_opener_is_refused_while_the_first_runs() {
    let folder = tempfile::tempdir().unwrap();
    let (group, handle) = open(folder.path());
    add(&handle, "a").await;
    let error = Group::open::<Counter>(config(folder.path()), eager()).err().expect("locked");
    assert!(matches!(error, GroupError::Open { .. }), "{error}");
    assert_eq!(add(&handle, "a").await, 2, "the first goes on");
    drop((group, handle));
    let (_group, handle) = open(folder.path());
    assert_eq!(add(&handle, "a").await, 3);
}

#[tokio::test]
async fn settings_out_of_bounds_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = GroupLimits { queue_commands: 0, ..eager() };
    let error = Group::open::<Counter>(config(folder.path()), wrong).err().expect("refused");
    assert_eq!(error.to_string(), "queue_commands = 0 is out of bounds: 1 to 2^20");
}
