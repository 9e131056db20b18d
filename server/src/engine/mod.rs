//! The transfer engine's messages: a thin adapter of [`NodeService`](crate::node::NodeService), beside gRPC.
//!
//! A message is answered on the thread that serves its connection if nothing has to be waited for, so that a get from
//! memory takes no step between threads; else by a task. Values go out from where they lie, and come in from the
//! connection's buffer or from memory that the client has lent ([`lent`]).

mod calls;
mod held;
mod lent;
mod memories;
mod puts;
mod readable;

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use tidepool_metadata::envelope::{self, Request};
use tidepool_metadata::{ErrorKind, proto};
use tidepool_transfer::{Engine, Handler, Pieces, RegionTicket, Responder, Settings, Tls, TransferError};
use tokio::runtime::Handle;
use tonic::Status;

use crate::auth::Auth;
use crate::config::Limits;
use crate::error::Error;
use crate::grpc::StoreApi;

pub(crate) use lent::{LentMemories, MemoryListener};
use readable::Readable;

/// A caller that names more time gets this much.
const LONGEST: Duration = Duration::from_secs(3600);

/// An answer: the message, then values.
pub(super) struct Reply {
    head: Vec<u8>,
    values: Vec<Bytes>,
}

type Answer = Result<Reply, Error>;

impl Reply {
    fn of(message: &impl Message) -> Self {
        Self::with(message, Vec::new())
    }

    fn with(message: &impl Message, values: Vec<Bytes>) -> Self {
        Self { head: envelope::answer(true, message), values }
    }
}

/// The service as the engine's peers see it. Cheap to clone.
#[derive(Clone)]
pub(crate) struct EngineApi {
    api: StoreApi,
    lent: LentMemories,
    /// The DRAM tier, for peers that read it themselves.
    segment: Option<RegionTicket>,
    readable: Readable,
    runtime: Handle,
}

/// Starts an engine that listens at `address`. Messages have no answer before [`serve`].
///
/// # Errors
/// `LISTEN` with the address and what to do.
pub(crate) fn bind(address: SocketAddr, tls: Option<Tls>, auth: &Auth, limits: &Limits) -> Result<Engine, Error> {
    let settings = Settings {
        listen: vec![address.to_string()],
        secret: auth.digest(),
        tls,
        connections: limits.connections as usize,
        ..Settings::default()
    };
    Engine::start(settings).map_err(|error| {
        let message = format!("engine.listen = {address}: {}; choose another port (0 picks a free one)", chain(&error));
        Error::new(ErrorKind::Invalid, "LISTEN", message).field("engine.listen")
    })
}

/// The certificates of the settings, if there are any, for this node's engine and for its calls to others.
///
/// # Errors
/// `BAD_CONFIG` with what is wrong with a certificate or key.
pub(crate) fn tls(config: &crate::config::Engine) -> Result<Option<Tls>, Error> {
    let crate::config::Engine { tls_certificate, tls_key, tls_authorities, tls_name, .. } = config;
    let (Some(certificate), Some(key), Some(authorities)) = (tls_certificate, tls_key, tls_authorities) else {
        return Ok(None);
    };
    Tls::from_files(certificate, key, authorities, tls_name.clone()).map(Some).map_err(|error| {
        let field = match &error {
            TransferError::Certificate { what: "key", .. } => "engine.tls_key",
            TransferError::Certificate { what: "authorities", .. } => "engine.tls_authorities",
            _ => "engine.tls_certificate",
        };
        Error::new(ErrorKind::Invalid, "BAD_CONFIG", format!("{field}: {error}")).field(field)
    })
}

/// Answers its messages by `api` from now on.
pub(crate) fn serve(engine: &Engine, api: StoreApi, lent: LentMemories) {
    let segment = held::register(engine, &api);
    engine.set_handler(Arc::new(EngineApi {
        api,
        lent,
        segment,
        readable: Readable::new(engine),
        runtime: Handle::current(),
    }));
}

fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

impl Handler for EngineApi {
    fn handle(&self, request: &[u8], responder: Responder) {
        match Request::decode(request) {
            Ok(request) => self.call(&request, responder),
            Err(error) => {
                let message = format!("{error}: this node may be older than its client");
                send(responder, Err(Error::new(ErrorKind::Unimplemented, "UNIMPLEMENTED", message)));
            }
        }
    }

    fn handle_pieces(&self, request: &mut Pieces<'_>, responder: Responder) {
        if let Err(failure) = self.call_pieces(request, responder) {
            tracing::debug!(?failure, "a request did not come whole");
        }
    }
}

impl EngineApi {
    /// What `work` gives, if it needs not wait.
    fn now<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let _entered = self.runtime.enter();
        match std::pin::pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }

    /// Answers by `answer`: at once if it needs not wait, else when it is there or `time` is over.
    fn answer(&self, time: Duration, responder: Responder, answer: impl Future<Output = Answer> + Send + 'static) {
        let _entered = self.runtime.enter();
        let mut answer: Pin<Box<dyn Future<Output = Answer> + Send>> = Box::pin(answer);
        match answer.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => send(responder, answer),
            Poll::Pending => drop(self.runtime.spawn(async move {
                let answer = tokio::time::timeout(time.min(LONGEST), answer).await;
                let late = |_| Err(Error::new(ErrorKind::Deadline, "DEADLINE", "the caller's time is over".into()));
                let answer = answer.unwrap_or_else(late);
                let Reply { head, values } = reply_of(answer);
                let left = if values.is_empty() { responder.reply_at_once(&head) } else { Err(responder) };
                if let Err(responder) = left {
                    // Sending blocks while the peer takes nothing.
                    tokio::task::spawn_blocking(move || send(responder, Ok(Reply { head, values })));
                }
            })),
        }
    }
}

fn send(responder: Responder, answer: Answer) {
    let Reply { head, values } = reply_of(answer);
    let mut parts: Vec<&[u8]> = Vec::with_capacity(1 + values.len());
    parts.push(&head);
    parts.extend(values.iter().map(|value| &value[..]));
    responder.reply_parts(&parts);
}

/// What goes to the peer: the answer, or why there is none.
fn reply_of(answer: Answer) -> Reply {
    answer.unwrap_or_else(|error| {
        let status = Status::from(error);
        let refusal = proto::Refusal {
            code: status.code() as u32,
            message: status.message().to_owned(),
            details: Bytes::copy_from_slice(status.details()),
        };
        Reply { head: envelope::answer(false, &refusal), values: Vec::new() }
    })
}
