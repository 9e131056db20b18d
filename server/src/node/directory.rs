//! Says until when other processes may read the directory of the DRAM tier: a few seconds ahead, and only while this
//! node and the catalog are known to agree. A node that is stopped, or cut off from the catalog, stops serving by its
//! directory within [`VALIDITY`] (protocol: shared DRAM index).

use std::time::Duration;

use tidepool_replication::CatalogHandle;

use super::NodeService;

/// How long the directory may be used after it was last said so: how stale a hit may be.
const VALIDITY: Duration = Duration::from_secs(5);
/// Often enough that one late turn does no harm.
const PERIOD: Duration = Duration::from_secs(1);

/// Runs until the catalog fails or the task is ended; what was said last holds until then.
pub(super) async fn keep_valid(service: NodeService, catalog: CatalogHandle) {
    let mut period = tokio::time::interval(PERIOD);
    loop {
        period.tick().await;
        let status = catalog.status();
        if status.failure.is_some() {
            return;
        }
        // A leader that a quorum follows, or a follower that hears its leader.
        if status.in_contact {
            service.store().renew_directory(VALIDITY);
        }
    }
}
