//! Notifications that peers sent with finished batches, until somebody takes them.

use std::collections::VecDeque;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::error::Failure;

/// Bounded, oldest first. What does not fit is refused to its sender, who hears of it with the batch's outcome.
#[derive(Debug)]
pub(crate) struct Notifications {
    queue: Mutex<VecDeque<Vec<u8>>>,
    arrived: Condvar,
    limit: usize,
}

impl Notifications {
    pub(crate) fn new(limit: usize) -> Self {
        Self { queue: Mutex::default(), arrived: Condvar::new(), limit }
    }

    pub(crate) fn push(&self, notification: &[u8]) -> Result<(), Failure> {
        let mut queue = self.queue.lock();
        if queue.len() >= self.limit {
            return Err(Failure::Overloaded);
        }
        queue.push_back(notification.to_vec());
        drop(queue);
        self.arrived.notify_one();
        Ok(())
    }

    /// The oldest one, waiting for one until `until`.
    pub(crate) fn take(&self, until: Instant) -> Option<Vec<u8>> {
        let mut queue = self.queue.lock();
        while queue.is_empty() {
            if self.arrived.wait_until(&mut queue, until).timed_out() {
                break;
            }
        }
        queue.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_come_in_order_and_are_bounded() {
        let notifications = Notifications::new(2);
        notifications.push(b"a").expect("room");
        notifications.push(b"b").expect("room");
        assert_eq!(notifications.push(b"c"), Err(Failure::Overloaded));
        assert_eq!(notifications.take(Instant::now()).as_deref(), Some(&b"a"[..]));
        assert_eq!(notifications.take(Instant::now()).as_deref(), Some(&b"b"[..]));
        assert_eq!(notifications.take(Instant::now()), None);
    }
}
