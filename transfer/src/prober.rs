//! Asks rails that rest whether they work again, in the background.
//!
//! One thread keeps the time while any rail rests, and ends when none does; probes themselves, which may wait for a peer
//! that is silent, run on a few others. A peer is watched as long as somebody holds it.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::peer::Peer;
use crate::pool::Pool;

/// Probes on their way at once.
const THREADS: usize = 4;

/// See the module.
pub(crate) struct Prober {
    shared: Arc<Shared>,
    /// What one probe may take.
    timeout: Duration,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    pool: Pool,
}

#[derive(Default)]
struct State {
    watched: Vec<Weak<Peer>>,
    is_running: bool,
    is_closed: bool,
}

impl Prober {
    pub(crate) fn new(timeout: Duration) -> Self {
        let pool = Pool::new("tidepool-probe", THREADS);
        Self { shared: Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), pool }), timeout }
    }

    /// Watches a peer one of whose rails rests, until none does.
    pub(crate) fn watch(&self, peer: &Arc<Peer>) {
        let mut state = self.shared.state.lock();
        if state.is_closed {
            return;
        }
        if !state.watched.iter().any(|watched| std::ptr::eq(watched.as_ptr(), Arc::as_ptr(peer))) {
            state.watched.push(Arc::downgrade(peer));
        }
        if state.is_running {
            self.shared.changed.notify_one();
            return;
        }
        let (shared, timeout) = (Arc::clone(&self.shared), self.timeout);
        let spawned = std::thread::Builder::new().name("tidepool-prober".into()).spawn(move || shared.run(timeout));
        // Without it, rails are still tried by groups that find no other.
        state.is_running = spawned.inspect_err(|error| tracing::warn!(%error, "no thread for probes")).is_ok();
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.shared.state.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn run(&self, timeout: Duration) {
        let mut state = self.state.lock();
        while !state.is_closed {
            let now = Instant::now();
            let mut next = None;
            state.watched.retain(|watched| {
                let Some(peer) = watched.upgrade() else { return false };
                let (due, later) = peer.rails.begin_probes(now);
                for rail in due {
                    let peer = Arc::clone(&peer);
                    self.pool.run(move || peer.rails.probe(rail, timeout));
                }
                next = [next, later].into_iter().flatten().min();
                later.is_some()
            });
            match next {
                Some(next) => drop(self.changed.wait_until(&mut state, next)),
                None => break,
            }
        }
        state.is_running = false;
    }
}
