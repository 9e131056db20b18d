//! Connections to the nodes that a client knows, and which of them is taken next.
//!
//! Calls take turns. A node whose connection failed is passed over for a while, then tried again by one call: so a dead node
//! costs a call now and then, not every third one. If all have failed, turns go on as if none had.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tonic::transport::Channel;

/// How long a node is passed over.
const REST: Duration = Duration::from_millis(500);

/// Connections in turn, each with the number of its node.
#[derive(Debug)]
pub(crate) struct Channels {
    channels: Vec<(usize, Channel)>,
    next: AtomicUsize,
    /// Until when each node rests, in milliseconds since `began`.
    resting: Vec<AtomicU64>,
    began: Instant,
}

impl Channels {
    pub(crate) fn new(channels: Vec<(usize, Channel)>, nodes: usize) -> Self {
        let resting = (0..nodes).map(|_| AtomicU64::new(0)).collect();
        Self { channels, next: AtomicUsize::new(0), resting, began: Instant::now() }
    }

    /// How many nodes there are.
    pub(crate) fn nodes(&self) -> usize {
        self.resting.len()
    }

    /// The next connection, with the number of its node.
    pub(crate) fn take(&self) -> (usize, Channel) {
        let now = self.now();
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let at = |step: usize| &self.channels[turn.wrapping_add(step) % self.channels.len()];
        let awake = (0..self.channels.len()).map(at).find(|(node, _)| self.wake(*node, now));
        let (node, channel) = awake.unwrap_or_else(|| at(0));
        (*node, channel.clone())
    }

    /// Whether that node may be called. Of those who ask when its rest is over, one gets it, and the others wait for how that
    /// goes.
    fn wake(&self, node: usize, now: u64) -> bool {
        let until = self.resting[node].load(Ordering::Relaxed);
        let next = now + millis(REST);
        until == 0
            || until <= now
                && self.resting[node].compare_exchange(until, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// The connection to that node failed.
    pub(crate) fn failed(&self, node: usize) {
        self.resting[node].store(self.now() + millis(REST), Ordering::Relaxed);
    }

    /// That node answered.
    pub(crate) fn answered(&self, node: usize) {
        if self.resting[node].load(Ordering::Relaxed) != 0 {
            self.resting[node].store(0, Ordering::Relaxed);
        }
    }

    fn now(&self) -> u64 {
        // Never 0, which means no rest.
        millis(self.began.elapsed()) + 1
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tonic::transport::Endpoint;

    use super::*;

    fn channels(nodes: usize, connections: usize) -> Channels {
        let channel = Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        Channels::new((0..connections).map(|turn| (turn % nodes, channel.clone())).collect(), nodes)
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_failed_is_passed_over_and_tried_again_by_one() {
        let channels = channels(3, 6);
        channels.failed(1);
        assert!((0..30).all(|_| channels.take().0 != 1));
        tokio::time::advance(REST + Duration::from_millis(1)).await;
        let taken: Vec<usize> = (0..30).map(|_| channels.take().0).collect();
        assert_eq!(taken.iter().filter(|&&node| node == 1).count(), 1, "{taken:?}");
        channels.answered(1);
        assert_eq!((0..30).filter(|_| channels.take().0 == 1).count(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn if_all_failed_turns_go_on() {
        let channels = channels(2, 4);
        channels.failed(0);
        channels.failed(1);
        let taken: Vec<usize> = (0..4).map(|_| channels.take().0).collect();
        assert_eq!(taken, [0, 1, 0, 1]);
    }
}
