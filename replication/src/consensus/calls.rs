//! Questions between members, beside Raft: parts of snapshots, and what the application asks the leader.
//!
//! A question or its answer may be lost: whoever asks waits for a while and decides. Answers are found by number; one that
//! nobody waits for any more is dropped.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::envelope::{Body, Envelope, Group};
use super::member::MemberId;
use super::transport::{Lane, Transport};

/// Questions that may wait for answers at a time.
const QUESTIONS: usize = 4096;

/// Who waits for an answer.
enum Waiter {
    Task(oneshot::Sender<Vec<u8>>),
    Thread(mpsc::SyncSender<Vec<u8>>),
}

pub(super) struct Calls {
    me: MemberId,
    group: Group,
    transport: Arc<dyn Transport>,
    next: AtomicU64,
    waiting: Mutex<HashMap<u64, Waiter>>,
}

/// Takes the waiter out when nobody waits any more.
struct Pending<'a>(&'a Calls, u64);

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.waiting.lock().remove(&self.1);
    }
}

impl Calls {
    pub(super) fn new(me: MemberId, group: Group, transport: Arc<dyn Transport>) -> Self {
        Self { me, group, transport, next: AtomicU64::new(1), waiting: Mutex::default() }
    }

    /// Asks `target`; `None` if no answer came in time, or it can't be answered.
    pub(super) async fn ask(&self, target: MemberId, question: Vec<u8>, within: Duration) -> Option<Vec<u8>> {
        let (sender, receiver) = oneshot::channel();
        let _pending = self.send(target, Lane::Call, question, Waiter::Task(sender))?;
        let answer = tokio::time::timeout(within, receiver).await.ok()?.ok()?;
        (!answer.is_empty()).then_some(answer)
    }

    /// As [`Calls::ask`], of a thread that may wait, beside everything else.
    pub(super) fn ask_blocking(&self, target: MemberId, question: Vec<u8>, within: Duration) -> Option<Vec<u8>> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let _pending = self.send(target, Lane::Bulk, question, Waiter::Thread(sender))?;
        let answer = receiver.recv_timeout(within).ok()?;
        (!answer.is_empty()).then_some(answer)
    }

    fn send(&self, target: MemberId, lane: Lane, question: Vec<u8>, waiter: Waiter) -> Option<Pending<'_>> {
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        let mut waiting = self.waiting.lock();
        if waiting.len() >= QUESTIONS {
            return None;
        }
        waiting.insert(ticket, waiter);
        drop(waiting);
        let envelope = Envelope { from: self.me, to: target, body: Body::Ask { ticket, question } };
        self.transport.send(target.node(), lane, envelope.encode(self.group));
        Some(Pending(self, ticket))
    }

    pub(super) fn answer(&self, target: MemberId, lane: Lane, ticket: u64, answer: Vec<u8>) {
        let envelope = Envelope { from: self.me, to: target, body: Body::Answer { ticket, answer } };
        self.transport.send(target.node(), lane, envelope.encode(self.group));
    }

    pub(super) fn answered(&self, ticket: u64, answer: Vec<u8>) {
        // Whoever waited may have given up between.
        match self.waiting.lock().remove(&ticket) {
            Some(Waiter::Task(sender)) => drop(sender.send(answer)),
            Some(Waiter::Thread(sender)) => drop(sender.try_send(answer)),
            None => {}
        }
    }

    /// What a message asks or answers, if it does.
    pub(super) fn read(&self, message: &[u8]) -> Option<(MemberId, Body)> {
        let Envelope { from, to, body } = Envelope::decode(message, self.group).ok()?;
        (to == self.me && matches!(body, Body::Ask { .. } | Body::Answer { .. })).then_some((from, body))
    }
}
