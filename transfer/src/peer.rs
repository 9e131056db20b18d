//! A peer: who it is, how it can be asked, and the ways to its memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::control::Control;
use crate::error::Failure;
use crate::memory::Memory;
use crate::pool::Pool;
use crate::prober::Prober;
use crate::rails::Rails;
use crate::settings::Settings;
use crate::shm::ShmLink;
use crate::shm::discover::Neighbour;
use crate::slice::AccessRights;
use crate::stream::{ConnectError, connect_tcp, greet};
use crate::tcp::TcpLink;
use crate::transport::Link;
use crate::wire::{Greeting, Kind, Purpose, SegmentInfo, WireError};

/// Between two attempts to reach a peer that does not answer yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// A peer's engine, from its start to its end: another start at the same address is another peer.
pub(crate) struct Peer {
    pub(crate) address: String,
    pub(crate) greeting: Greeting,
    neighbour: Option<Arc<Neighbour>>,
    pub(crate) control: Control,
    pub(crate) rails: Rails,
    pub(crate) prober: Arc<Prober>,
}

/// A region of a peer that was opened here.
pub(crate) struct Segment {
    pub(crate) peer: Arc<Peer>,
    pub(crate) info: SegmentInfo,
    /// Its bytes, if they are mapped.
    pub(crate) mapping: Option<Memory>,
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segment").field("peer", &self.peer.address).field("info", &self.info).finish_non_exhaustive()
    }
}

impl Peer {
    /// Connects and learns who is there. A peer that refuses connections is asked again until the deadline.
    pub(crate) fn connect(
        address: &str,
        settings: &Arc<Settings>,
        greeting: Greeting,
        copiers: &Arc<Pool>,
        prober: &Arc<Prober>,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let greeting = Greeting {
            purpose: Purpose::Control,
            socket_token: 0,
            secret: settings.secret.unwrap_or_default(),
            ..greeting
        };
        // An attempt that the deadline cut short says less than one before it that was refused.
        let mut was_refused = false;
        let (stream, welcome) = loop {
            let attempt = deadline.min(Instant::now() + settings.connect_timeout);
            let connected = connect_tcp(address, attempt, 0)
                .and_then(|stream| greet(&stream, &greeting, attempt).map(|welcome| (stream, welcome)));
            match connected {
                Ok(connected) => break connected,
                Err(error)
                    if matches!(error.failure, Failure::Unreachable | Failure::Overloaded)
                        && Instant::now() + RETRY_INTERVAL < deadline =>
                {
                    was_refused |= error.failure == Failure::Overloaded;
                    // Nothing tells when a peer comes up: ask again after a while.
                    std::thread::sleep(RETRY_INTERVAL);
                }
                Err(error) if was_refused && error.failure == Failure::Unreachable => {
                    return Err(ConnectError { failure: Failure::Overloaded, ..error });
                }
                Err(error) => return Err(error),
            }
        };
        let attempt = deadline.min(Instant::now() + settings.connect_timeout);
        let neighbour = Neighbour::meet(settings, greeting, welcome, attempt).unwrap_or_else(|error| {
            // Same boot, but another network namespace or user: TCP it is.
            tracing::info!(address, failure = %error.failure, "peer on this host can't be met: using TCP");
            None
        });
        let neighbour = neighbour.map(Arc::new);
        let mut links: Vec<Arc<dyn Link>> = Vec::new();
        if let Some(neighbour) = &neighbour {
            links.push(Arc::new(ShmLink::new(Arc::clone(neighbour), Arc::clone(copiers))));
        }
        let data_greeting = crate::tcp::data_greeting(greeting);
        links.push(Arc::new(TcpLink::new(address.to_owned(), Arc::clone(settings), data_greeting, welcome.instance)));
        let control = {
            let (dial, first) = match &neighbour {
                Some(neighbour) => {
                    let (first, again) = (neighbour.connection(deadline)?, Arc::clone(neighbour));
                    let timeout = settings.connect_timeout;
                    let dial: crate::control::Dial =
                        Box::new(move |deadline| again.connection(deadline.min(Instant::now() + timeout)));
                    (dial, first)
                }
                None => (dial_tcp(address.to_owned(), Arc::clone(settings), greeting, welcome.instance), stream),
            };
            Control::new(dial, settings.lanes, settings.messages, first)
        };
        Ok(Self {
            address: address.to_owned(),
            greeting: welcome,
            neighbour,
            control,
            rails: Rails::new(links),
            prober: Arc::clone(prober),
        })
    }

    /// Asks for the region that the peer registered under a name.
    pub(crate) fn open(self: &Arc<Self>, name: &str, deadline: Instant) -> Result<Segment, ConnectError> {
        let body = self.control.call(Kind::Open, name.as_bytes(), deadline)?;
        let info = SegmentInfo::decode(&body).map_err(WireError::failure)?;
        Ok(self.segment(info, deadline))
    }

    /// A region whose description came another way.
    pub(crate) fn segment(self: &Arc<Self>, info: SegmentInfo, deadline: Instant) -> Segment {
        let neighbour = self.neighbour.as_ref().filter(|_| info.rights != AccessRights::LOCAL);
        let mapping = neighbour.and_then(|neighbour| {
            let mapped = neighbour.map(&info, deadline);
            mapped.inspect_err(|error| tracing::debug!(?error, "segment can't be mapped: using TCP")).ok()
        });
        Segment { peer: Arc::clone(self), info, mapping }
    }

    /// Asks whether it is there.
    pub(crate) fn probe(&self, deadline: Instant) -> Result<(), Failure> {
        self.control.call(Kind::Ping, &[], deadline).map(drop).map_err(|error| error.failure)
    }

    /// Ends everything with it.
    pub(crate) fn close(&self) {
        self.rails.close();
        self.control.close();
    }
}

fn dial_tcp(address: String, settings: Arc<Settings>, greeting: Greeting, instance: u128) -> crate::control::Dial {
    Box::new(move |deadline| {
        let deadline = deadline.min(Instant::now() + settings.connect_timeout);
        let stream = connect_tcp(&address, deadline, 0)?;
        let welcome = greet(&stream, &greeting, deadline)?;
        if welcome.instance == instance { Ok(stream) } else { Err(Failure::Restarted.into()) }
    })
}
