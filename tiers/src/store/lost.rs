//! Copies that are gone: damaged with no good one on another tier, or on a disk that did not come back. The catalog is told
//! until it has heard: as long as it lists them, their keys can be neither read nor put.
//!
//! On a crash before that: the next start's reconciliation tells it.

use std::sync::Weak;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{Inner, ReplicaName, alive};

/// Replicas told at once.
const BATCH: usize = 256;
/// How soon a catalog that did not answer is told again.
const AGAIN: Duration = Duration::from_millis(250);

/// What is to be told: at most one name for each replica that was here.
#[derive(Default)]
pub(super) struct Lost {
    waiting: Mutex<Vec<ReplicaName>>,
    arrived: Notify,
}

impl Lost {
    /// Has the catalog told that these are gone.
    pub(super) fn tell(&self, names: impl IntoIterator<Item = ReplicaName>) {
        self.waiting.lock().extend(names);
        self.arrived.notify_one();
    }
}

/// Runs until the store goes away.
pub(super) async fn run(store: Weak<Inner>) {
    loop {
        let Some(inner) = alive(&store) else { return };
        let names: Vec<ReplicaName> = {
            let mut waiting = inner.lost.waiting.lock();
            let rest = waiting.len().saturating_sub(BATCH);
            waiting.split_off(rest)
        };
        if names.is_empty() {
            // The timeout only looks whether the store is still there.
            let _woken = tokio::time::timeout(Duration::from_secs(1), inner.lost.arrived.notified()).await;
        } else if !inner.forget.lost(names.clone()).await {
            inner.lost.waiting.lock().extend(names);
            drop(inner);
            tokio::time::sleep(AGAIN).await;
        }
    }
}
