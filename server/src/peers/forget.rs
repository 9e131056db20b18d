//! What is kept of a node, its address, connections and clients, goes when it is no member of the group any more.
//!
//! A node is known by its address before it is let in, and others may still tell of one that was removed: so a node goes only
//! when two looks in a row found it to be no member, and one that was told of again goes with the next look.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tidepool_metadata::NodeId;
use tokio::sync::watch;

use super::{AddressBook, Dialer};
use crate::error::Error;
use crate::node::{NodeService, Remotes};

/// Between two looks: longer than a join takes.
const PERIOD: Duration = Duration::from_secs(10);

/// Forgets nodes that have gone.
pub(crate) struct Forgetter {
    service: NodeService,
    book: Arc<AddressBook>,
    dialer: Dialer,
    remotes: Remotes,
}

impl Forgetter {
    pub(crate) fn new(service: NodeService, book: Arc<AddressBook>, dialer: Dialer, remotes: Remotes) -> Self {
        Self { service, book, dialer, remotes }
    }

    /// Runs until told to stop.
    pub(crate) async fn run(self, mut stop: watch::Receiver<bool>) -> Result<(), Error> {
        let mut period = tokio::time::interval(PERIOD);
        let mut strangers = BTreeSet::new();
        let mut stopped = std::pin::pin!(stop.wait_for(|&stop| stop));
        loop {
            tokio::select! {
                _ = period.tick() => {}
                _ = &mut stopped => return Ok(()),
            }
            let Some(catalog) = self.service.opened_catalog() else { continue };
            let (here, _) = self.service.identity();
            let members = catalog.status().members;
            // Who is no member itself knows the others only from this book.
            let found =
                if members.of(here).is_some() { strangers_of(&self.book.nodes(), &members) } else { BTreeSet::new() };
            for &node in found.intersection(&strangers) {
                tracing::debug!(%node, "a node is gone for good");
                self.book.forget(node);
                self.dialer.forget(node);
                self.remotes.forget(node);
            }
            strangers = found;
        }
    }
}

fn strangers_of(known: &[NodeId], members: &tidepool_replication::Members) -> BTreeSet<NodeId> {
    known.iter().copied().filter(|&node| members.of(node).is_none()).collect()
}
