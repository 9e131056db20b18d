//! Says until when other processes may read the directory of the DRAM tier: a few seconds after the leader last confirmed that
//! this node has heard of everything. A node that is stopped, cut off from the catalog, or behind it, stops serving by its
//! directory within [`VALIDITY`] (protocol: shared DRAM index). The same confirmations let it answer reads from its copy of
//! the catalog without asking.

use std::time::Duration;

use tidepool_replication::CatalogHandle;
use tokio::time::MissedTickBehavior;

use super::NodeService;

/// How long the directory may be used after it was last said so: how stale a hit may be.
const VALIDITY: Duration = Duration::from_secs(5);
/// Often enough that one late turn does no harm.
const PERIOD: Duration = Duration::from_secs(1);

/// Runs until the catalog fails or the task is ended; what was said last holds until then.
pub(super) async fn keep_valid(service: NodeService, catalog: CatalogHandle) {
    let mut period = tokio::time::interval(PERIOD);
    period.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        period.tick().await;
        // Before the question, by the clock that goes on while the host sleeps, as the directory's readers count.
        let asked = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        match catalog.confirm().await {
            Ok(()) => {
                let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
                let passed = Duration::try_from(now).ok().zip(Duration::try_from(asked).ok());
                let passed = passed.map_or(VALIDITY, |(now, asked)| now.saturating_sub(asked));
                service.store().renew_directory(VALIDITY.saturating_sub(passed));
            }
            Err(error) if error.is_final() => return,
            // What was said last holds until then.
            Err(error) => tracing::debug!(%error, "the directory is not confirmed"),
        }
    }
}
