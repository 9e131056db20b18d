//! One voter: its start, its threads, its end.

use std::num::NonZero;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tidepool_metadata::LogIndex;
use tokio::sync::watch;

use super::ballast::Ballast;
use super::calls::Calls;
use super::config::{GroupConfig, GroupLimits};
use super::driver::{Driver, Threads};
use super::handle::{AnswererSlot, Consensus};
use super::image::{Dirty, Image, Writer};
use super::log::{Log, LogStore as _};
use super::machine::StateMachine;
use super::shared::{Applied, Shared, ThreadGuard};
use super::snapshot::{self, Fetcher, Offers};
use super::transport::Transport;
use super::{ClusterEpoch, apply, boot, envelope, transport};
use crate::error::GroupError;

/// Turns of the Raft thread that wait to be applied; their bytes are bounded by `in_flight_bytes`, a replay's by some
/// MiB each.
const APPLY_TURNS: usize = 16;
/// Most threads that load an image: more than a disk feeds are of no use.
const LOADERS: NonZero<usize> = NonZero::new(8).expect("not 0");

/// The running threads of one voter. Dropping it ends the group as a shutdown does, and waits for that.
#[must_use = "dropping the group ends it"]
pub struct Group {
    stop: Box<dyn Fn() + Send + Sync>,
    running: watch::Receiver<usize>,
    threads: Vec<JoinHandle<()>>,
    answerer: AnswererSlot,
}

impl Group {
    /// Opens the folder of `config`, or begins a group of one in it, and starts its threads. Entries behind the image are
    /// replayed afterwards; linearizable reads wait for that.
    ///
    /// Blocks while the image is loaded. The folder is locked: a second start is refused while this one runs.
    ///
    /// # Errors
    /// [`GroupError`]: the settings, the folder (in use, foreign, damaged), or the threads.
    pub fn open<S: StateMachine>(config: GroupConfig, limits: GroupLimits) -> Result<(Self, Consensus<S>), GroupError> {
        Self::open_with(config, limits, Arc::new(transport::NoTransport))
    }

    /// As [`Group::open`], of a member whose messages leave through `transport` and come in by [`Consensus::receive`].
    ///
    /// # Errors
    /// As [`Group::open`]; [`GroupError::MustRejoin`].
    pub fn open_with<S: StateMachine>(
        config: GroupConfig,
        limits: GroupLimits,
        transport: Arc<dyn Transport>,
    ) -> Result<(Self, Consensus<S>), GroupError> {
        let limits = limits.validate()?;
        if config.voters > 7 || config.voters.is_multiple_of(2) {
            let (setting, value) = ("voters", config.voters as u64);
            return Err(GroupError::Setting { setting, value, bounds: "1, 3, 5 or 7" });
        }
        if config.node.0 == 0 {
            return Err(GroupError::Setting { setting: "node", value: 0, bounds: "any number but 0" });
        }
        if config.epoch > ClusterEpoch::LAST {
            return Err(GroupError::Setting { setting: "epoch", value: config.epoch.0.into(), bounds: "0 to 63" });
        }
        let path = &config.folder;
        std::fs::create_dir_all(path).map_err(|source| GroupError::Folder { path: path.clone(), source })?;
        let ballast = Ballast::open(path).map_err(|source| GroupError::Folder { path: path.clone(), source })?;
        snapshot::tidy(path)?;
        let lost_page_cache = boot::lost_page_cache(path)?;
        if lost_page_cache {
            tracing::info!(node = %config.node, "the host booted anew, and the log's end need not have been on disk: if it was \
                not, commands are lost that were answered just before; under durability = fsync only such as told of what was in \
                memory");
        }
        let log = Log::open(&path.join("log"), &config, lost_page_cache)?;
        if lost_page_cache && !log.members().is_alone(log.member()) {
            // It may have acknowledged entries that it lost: as the member that it was, it must not come back.
            return Err(GroupError::MustRejoin);
        }
        #[cfg(test)]
        let log = log.failing_with(&limits.fail_writes);
        let mut log = log;
        let image = Image::open(&path.join("image"), &config)?;
        let threads = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN).min(LOADERS);
        let state: Applied<S> = image.load(config.epoch, threads)?;
        if let Some((position, members)) = image.arrival()?
            && position == state.position
            && position.index > log.last()
        {
            log.follow_image(position, members)?;
        }
        check_meeting(&log, &state)?;
        log.note_boot()?;
        let group = envelope::Group { cluster: config.cluster, epoch: config.epoch };
        let calls = Arc::new(Calls::new(log.member(), group, Arc::clone(&transport)));
        let image = Arc::new(Mutex::new(Some(image)));
        let offers = Arc::new(Offers::new(path, Arc::clone(&image)));
        let (log_writer, start) = (log.writer(), state.position);
        let unsynced = log.unsynced();
        let shared = Arc::new(Shared::new(config, limits, ballast, state));
        let dirty = Arc::new(Dirty::default());
        let (sender, receiver) = mpsc::sync_channel(APPLY_TURNS);
        let fetcher = Fetcher::new(Arc::clone(&calls));
        let acknowledge = Arc::clone(&transport);
        let driver = Driver::new(log, Threads::new(Arc::clone(&shared), transport, sender, fetcher))?;
        let writer = Writer { shared: Arc::clone(&shared), image, start, log: unsynced, dirty: Arc::clone(&dirty) };

        let stop = Arc::clone(&shared);
        let running = shared.watch_running();
        let mut group =
            Self { stop: Box::new(move || stop.stop()), running, threads: Vec::new(), answerer: Arc::default() };
        let (ended, flushing) = (EndOnDrop(Arc::clone(&dirty)), Arc::clone(&dirty));
        let writing = Arc::clone(&shared);
        group.spawn(&shared, "log", move || {
            log_writer.run(|behind| {
                // From here: the Raft thread would be one more that has to wake.
                behind.messages.into_iter().for_each(|(target, lane, message)| acknowledge.send(target, lane, message));
                writing.inbox.written(behind.number);
            })
        })?;
        group.spawn(&shared, "raft", move || {
            driver.run();
            Ok(())
        })?;
        let applying = Arc::clone(&shared);
        group.spawn(&shared, "apply", move || {
            let _ended = ended;
            apply::run(&applying, &receiver, &dirty)
        })?;
        group.spawn(&shared, "image", move || writer.run())?;
        let answerer = Arc::clone(&group.answerer);
        Ok((group, Consensus::new(shared, calls, offers, flushing, answerer)))
    }

    fn spawn<S: StateMachine>(
        &mut self,
        shared: &Arc<Shared<S>>,
        name: &'static str,
        run: impl FnOnce() -> Result<(), GroupError> + Send + 'static,
    ) -> Result<(), GroupError> {
        let guard = ThreadGuard::new(shared, name);
        let shared = Arc::clone(shared);
        let body = move || {
            // Dropped last: what the thread owned is closed when it counts as ended.
            let _guard = guard;
            if let Err(error) = run() {
                shared.fail(error);
            }
        };
        let thread = std::thread::Builder::new().name(format!("tidepool-{name}")).spawn(body);
        self.threads.push(thread.map_err(|source| GroupError::Spawn { thread: name, source })?);
        Ok(())
    }
}

impl Group {
    /// Ends the group and waits for its threads: takes no more proposals, answers what is logged, flushes the image.
    pub async fn shutdown(self) {
        (self.stop)();
        let mut running = self.running.clone();
        // An error means that all who count are gone.
        let _ = running.wait_for(|&threads| threads == 0).await;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        (self.stop)();
        drop(self.answerer.lock().take());
        for thread in self.threads.drain(..) {
            // Its panic has failed the group already.
            let _ = thread.join();
        }
    }
}

/// Ends the image thread when the apply thread is over, however that comes.
struct EndOnDrop<S>(Arc<Dirty<S>>);

impl<S> Drop for EndOnDrop<S> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The log must go on where the image ends.
fn check_meeting<S>(log: &Log, state: &Applied<S>) -> Result<(), GroupError> {
    let (compacted, image) = (log.compacted().index, state.position.index);
    if (compacted..=log.last()).contains(&image) {
        return Ok(());
    }
    let (log_first, log_last) = (LogIndex(compacted + 1), LogIndex(log.last()));
    Err(GroupError::Gap { log_first, log_last, image: LogIndex(image) })
}
