//! Threads for work that callers do not wait for: they start when there is work, and end when there has been none.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// A thread without work ends after this.
const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// At most `threads` threads. Jobs are as many as batches may run, so the queue is bounded by that.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    name: &'static str,
    threads: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Pool {
    pub(crate) fn new(name: &'static str, threads: usize) -> Self {
        Self { shared: Arc::default(), name, threads }
    }

    /// Runs a job on some thread, in order of submission; here, if there can't be any thread.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.state.lock();
        state.jobs.push_back(Box::new(job));
        if state.idle > 0 && state.idle >= state.jobs.len() {
            self.shared.work.notify_one();
        } else if state.threads < self.threads {
            let shared = Arc::clone(&self.shared);
            state.threads += 1;
            if std::thread::Builder::new().name(self.name.into()).spawn(move || shared.work()).is_err() {
                state.threads -= 1;
                let own = if state.threads == 0 { state.jobs.pop_back() } else { None };
                drop(state);
                if let Some(job) = own {
                    job();
                }
            }
        } else {
            self.shared.work.notify_one();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.state.lock();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let timed_out = self.work.wait_for(&mut state, IDLE).timed_out();
            state.idle -= 1;
            if timed_out && state.jobs.is_empty() {
                break;
            }
        }
        state.threads -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn every_job_runs_once_on_few_threads() {
        let pool = Pool::new("test", 3);
        let (tell, told) = mpsc::channel();
        for job in 0..100 {
            let tell = tell.clone();
            pool.run(move || tell.send((job, std::thread::current().id())).expect("told"));
        }
        drop(tell);
        let mut ran: Vec<_> = told.iter().collect();
        let threads: std::collections::HashSet<_> = ran.iter().map(|(_, thread)| *thread).collect();
        ran.sort_by_key(|(job, _)| *job);
        assert!(ran.iter().map(|(job, _)| *job).eq(0..100));
        assert!(threads.len() <= 3);
    }
}
