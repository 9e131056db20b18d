//! Sessions of request ids: what makes a mutation safe to send again when its answer was lost.
//!
//! The catalog remembers answers by (session, sequence); this names each item of a call, opens sessions, passes
//! acknowledgements on, and sweeps sessions whose time is over.

use std::sync::Arc;
use std::time::Duration;

use tidepool_metadata::catalog::{
    Answer, Command, MANY_ANSWERS, Outcome, Query, RequestId, RequestRefusal, SessionId, SessionOutcome, Setting,
};
use tidepool_replication::{CatalogHandle, Read, Role};
use tokio::time::Instant;

use super::{NodeService, PROPOSE_TIMEOUT, error};
use crate::error::Error;

/// How often sessions whose time is over are dropped: they live ten minutes.
const SWEEP_PERIOD: Duration = Duration::from_secs(60);
/// How often it is looked whether so many answers are kept that idle sessions are dropped earlier.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// Acknowledgements under way at a time. One that finds no room is left out: the client's next says as much and more.
pub(super) const ACKNOWLEDGEMENTS: usize = 256;

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

    /// Passes on what the client has. Nobody waits for that, and if it can't be done, a later call says it.
    pub(super) fn acknowledge(&self, ids: Option<RequestIds>) {
        let Some(RequestIds { session, acknowledged: through, .. }) = ids.filter(|ids| ids.acknowledged > 0) else {
            return;
        };
        let Ok(under_way) = Arc::clone(&self.inner.acknowledgements).try_acquire_owned() else { return };
        let service = self.clone();
        tokio::spawn(async move {
            let _under_way = under_way;
            let acknowledged = service.change_session(Command::AcknowledgeSession { session, through });
            match tokio::time::timeout(PROPOSE_TIMEOUT, acknowledged).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "answers are not acknowledged"),
                Err(_) => tracing::debug!("answers are not acknowledged in time"),
            }
        });
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

/// Runs until the catalog stops; the leader sweeps.
pub(super) async fn sweep(catalog: CatalogHandle) {
    let mut period = tokio::time::interval(LOOK_PERIOD);
    let mut swept = Instant::now();
    loop {
        period.tick().await;
        let status = catalog.status();
        if status.failure.is_some() {
            return;
        }
        if status.role != Role::Leader {
            continue;
        }
        let Ok((_, Answer::Counts(counts))) = catalog.query(Query::Counts, Read::Local).await else { continue };
        let is_time = swept.elapsed() >= SWEEP_PERIOD || counts.remembered > MANY_ANSWERS as u64;
        if !is_time || counts.sessions == 0 {
            continue;
        }
        swept = Instant::now();
        if let Err(error) = catalog.propose(Command::ExpireSessions).await {
            tracing::debug!(%error, "sessions are swept later");
        }
    }
}
