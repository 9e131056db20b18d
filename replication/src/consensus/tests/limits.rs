//! Bounds: the queue, the size of a command, work in flight.

use super::*;
use crate::consensus::inbox::{Inbox, Proposal};
use tokio::sync::oneshot;

#[tokio::test]
async fn too_large_commands_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (_group, handle) = open(folder.path());
    assert!(handle.propose(vec![b'a'; MAX_COMMAND_BYTES], 1, Outlives::Power).await.is_ok());
    let error = handle.propose(vec![b'a'; MAX_COMMAND_BYTES + 1], 1, Outlives::Power).await.unwrap_err();
    assert!(error.is_unproposed() && error.kind() == ErrorKind::Invalid, "{error}");
    assert!(matches!(
        handle.propose(b"a".to_vec(), 4097, Outlives::Power).await,
        Err(CatalogError::TooLarge { items: 4097, .. })
    ));
}

#[test]
fn a_full_queue_refuses_at_once_and_says_when_to_ask_again() {
    let limits = GroupLimits { queue_commands: 3, ..eager() };
    let inbox = Inbox::<u64>::new(&limits);
    let mut answers = Vec::new();
    let mut push = |length: usize| {
        let (reply, answer) = oneshot::channel();
        answers.push(answer);
        inbox.push(Proposal { command: vec![0; length], items: 1, outlives: Outlives::Power, reply })
    };
    (0..3).for_each(|_| push(10).unwrap());
    let error = push(10).unwrap_err();
    assert!(matches!(error, CatalogError::Overloaded { commands: 3, bytes: 30 }), "{error}");
    assert!(error.is_unproposed() && error.retry_after().is_some() && error.kind() == ErrorKind::Exhausted);
    assert_eq!(inbox.take(|| usize::MAX, None).proposals.len(), 3);
    push(10).unwrap();
    assert!(matches!(push(limits.queue_bytes), Err(CatalogError::Overloaded { commands: 1, bytes: 10 })));
}

#[test]
fn room_made_while_the_queue_waits_for_it_is_seen() {
    use std::sync::atomic::{AtomicUsize, Ordering};

    let inbox = Inbox::<u64>::new(&eager());
    let room = AtomicUsize::new(0);
    let (reply, _answer) = oneshot::channel();
    inbox.push(Proposal { command: vec![1], items: 1, outlives: Outlives::Power, reply }).unwrap();
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| inbox.take(|| room.load(Ordering::Acquire), None).proposals.len());
        room.store(10, Ordering::Release);
        inbox.made_room();
        assert_eq!(taken.join().unwrap(), 1);
    });
}

#[test]
fn proposals_whose_callers_left_are_never_logged() {
    let inbox = Inbox::<u64>::new(&eager());
    let (reply, kept) = oneshot::channel();
    inbox.push(Proposal { command: vec![1], items: 1, outlives: Outlives::Power, reply }).unwrap();
    let (reply, dropped) = oneshot::channel();
    inbox.push(Proposal { command: vec![2], items: 1, outlives: Outlives::Power, reply }).unwrap();
    drop(dropped);
    let taken = inbox.take(|| usize::MAX, None).proposals;
    assert_eq!(taken.iter().map(|proposal| proposal.command[0]).collect::<Vec<_>>(), [1]);
    drop(kept);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_in_flight_is_bounded_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    // Every bound is met often.
    let limits = GroupLimits { in_flight_bytes: 1 << 20, image_lag_bytes: 128 << 10, ..eager() };
    let (_group, handle) = open_limited(folder.path(), limits);
    let tasks: Vec<_> = (0..8u8)
        .map(|task| {
            tokio::spawn({
                let handle = handle.clone();
                async move {
                    for _ in 0..8 {
                        handle.propose(vec![b'a' + task; 100 << 10], 1, Outlives::Power).await.unwrap();
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(60), task).await.expect("goes on").unwrap();
    }
    assert_eq!(counts(&handle).await.values().copied().collect::<Vec<_>>(), [8; 8]);
}
