//! Follows the node's free list: what the catalog dropped (removed, replaced, lost races) is freed here, in log order,
//! and reported as freed at most once a second.

use std::time::Duration;

use tidepool_metadata::LogIndex;
use tidepool_metadata::catalog::{Answer, Command, FreeListPage, Query};
use tidepool_replication::{CatalogHandle, Read};
use tokio::time::Instant;

use super::NodeService;

/// Items read at a time.
const PAGE_ITEMS: usize = 1024;
/// How soon after a look the next one is: puts drop nothing, and need not wake anybody here.
const LOOK_PERIOD: Duration = Duration::from_millis(10);
/// How often the catalog hears how far the node is.
const REPORT_PERIOD: Duration = Duration::from_secs(1);

/// Runs until the catalog stops.
pub(super) async fn run(service: NodeService, catalog: CatalogHandle) {
    let (node, _) = service.identity();
    let mut applied = catalog.watch_applied();
    let mut freed = LogIndex::default();
    let mut reported = LogIndex::default();
    let mut report_at = Instant::now();
    loop {
        let query = Query::FreeList { node, after: freed, limit: PAGE_ITEMS };
        let Ok((seen, Answer::FreeList(page))) = catalog.query(query, Read::Local).await else {
            // Not answering now; the next applied entry, or the end of the catalog, wakes us.
            if applied.changed().await.is_err() {
                return;
            }
            continue;
        };
        let FreeListPage { items, more } = page;
        for item in &items {
            service.store().free(item.tenant, &item.key, item.replica);
            freed = freed.max(item.index);
        }
        if more {
            continue;
        }
        debug_assert!(freed <= seen);
        if freed > reported && Instant::now() >= report_at {
            if catalog.propose(Command::Freed { node, through: freed }).await.is_ok() {
                reported = freed;
            }
            report_at = Instant::now() + REPORT_PERIOD;
        }
        tokio::time::sleep(LOOK_PERIOD).await;
        let changed = applied.changed();
        let outcome = if freed > reported {
            tokio::time::timeout_at(report_at, changed).await.unwrap_or(Ok(()))
        } else {
            changed.await
        };
        if outcome.is_err() {
            return;
        }
    }
}
