//! Sessions of request ids: what makes a mutation safe to send again when its answer was lost.
//!
//! The catalog remembers answers by (session, sequence); this names each item of a call, opens sessions, passes
//! acknowledgements on, and sweeps sessions whose time is over.

use std::time::Duration;

use futures::future::Either;
use tidepool_metadata::catalog::{
    Answer, Command, Outcome, Query, RequestId, RequestRefusal, SessionId, SessionOutcome, Setting,
};
use tidepool_replication::{CatalogHandle, Read};

use super::{NodeService, error};
use crate::error::Error;

/// How often sessions whose time is over are dropped: they live ten minutes.
const SWEEP_PERIOD: Duration = Duration::from_secs(60);

/// Names the items of one call, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestIds {
    /// The client's session.
    pub session: SessionId,
    /// Sequence of the first item; the others count on.
    pub first: u64,
    /// The client has all answers up to here; 0: says nothing.
    pub acknowledged: u64,
    /// The call was sent before.
    pub again: bool,
}

impl RequestIds {
    pub(super) fn of_item(self, position: usize) -> RequestId {
        RequestId { session: self.session, sequence: self.first.saturating_add(position as u64) }
    }
}

/// One id an item, for ever; none if the call has none.
pub(super) fn each_item(ids: Option<RequestIds>) -> impl Iterator<Item = Option<RequestId>> {
    (0..).map(move |position| ids.map(|ids| ids.of_item(position)))
}

impl NodeService {
    /// Opens a client's session; answers how long it lives after each use.
    ///
    /// # Errors
    /// `SESSION_EXPIRED` if there was one of that name, `TOO_MANY_SESSIONS`; those of the catalog.
    pub async fn open_session(&self, session: SessionId) -> Result<Duration, Error> {
        self.change_session(Command::OpenSession { session }).await?;
        let (_, answer) = self.catalog().await?.query(Query::Counts, Read::Local).await?;
        let Answer::Counts(counts) = answer else { return Err(error::unexpected("counts")) };
        let lifetime = counts.settings.iter().find_map(|setting| match setting {
            Setting::SessionLifetime(lifetime) => Some(*lifetime),
            _ => None,
        });
        lifetime.ok_or_else(|| error::unexpected("a session's lifetime"))
    }

    /// Passes on what the client has.
    pub(super) async fn acknowledge(&self, ids: Option<RequestIds>) -> Result<(), Error> {
        match ids {
            Some(RequestIds { session, acknowledged: through, .. }) if through > 0 => {
                self.change_session(Command::AcknowledgeSession { session, through }).await
            }
            _ => Ok(()),
        }
    }

    /// Does `work`, and passes on meanwhile what the client has: that is not waited for longer, and if it can't be done, the
    /// next call says it.
    pub(crate) async fn acknowledging<T>(&self, ids: Option<RequestIds>, work: impl Future<Output = T>) -> T {
        if ids.is_none_or(|ids| ids.acknowledged == 0) {
            return work.await;
        }
        let acknowledged = self.acknowledge(ids);
        tokio::pin!(work, acknowledged);
        match futures::future::select(work, acknowledged).await {
            Either::Left((done, _)) => done,
            Either::Right((acknowledged, work)) => {
                if let Err(error) = acknowledged {
                    tracing::debug!(%error, "answers are not acknowledged");
                }
                work.await
            }
        }
    }

    async fn change_session(&self, command: Command) -> Result<(), Error> {
        match self.led_catalog().await?.propose(command).await? {
            (_, Outcome::Session(SessionOutcome::Open { .. })) => Ok(()),
            (_, Outcome::Session(SessionOutcome::Expired)) => Err(error::not_executed(RequestRefusal::SessionExpired)),
            (_, Outcome::Session(SessionOutcome::TooMany)) => Err(error::too_many_sessions()),
            _ => Err(error::unexpected("a session")),
        }
    }
}

/// Runs until the catalog stops.
pub(super) async fn sweep(catalog: CatalogHandle) {
    let mut period = tokio::time::interval(SWEEP_PERIOD);
    loop {
        period.tick().await;
        let sessions = match catalog.query(Query::Counts, Read::Local).await {
            Ok((_, Answer::Counts(counts))) => counts.sessions,
            Err(error) if error.is_final() => return,
            _ => 0,
        };
        if sessions > 0
            && let Err(error) = catalog.propose(Command::ExpireSessions).await
            && error.is_final()
        {
            return;
        }
    }
}
