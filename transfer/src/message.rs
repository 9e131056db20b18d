//! Messages: small requests and replies between engines.
//!
//! The engine carries bytes and knows nothing of what they say. A [`Handler`] answers requests of peers, on the thread
//! that serves the connection; one that has to wait keeps the [`Responder`] and answers later, from any thread. The
//! asking side is `control`.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::control::Driving;
use crate::error::{Failure, TransferError};
use crate::pieces::Pieces;
use crate::serve::Replies;
use crate::wire::MESSAGE_MAX;

/// Answers peers' messages.
pub trait Handler: Send + Sync {
    /// Answers a request, now or later. Called on the thread that serves the peer's connection: while it runs, further
    /// requests of that connection wait, and those of others do not.
    fn handle(&self, request: &[u8], responder: Responder);

    /// As [`Handler::handle`], of a request that is larger than what is received at once: up to 1 GiB. What is over 16 MiB has
    /// no answer here.
    fn handle_pieces(&self, request: &mut Pieces<'_>, responder: Responder) {
        // Without all of it there is nobody to answer.
        if request.left() <= MESSAGE_MAX as u64
            && let Ok(request) = request.take(u64::MAX)
        {
            self.handle(&request, responder);
        }
    }
}

/// The right and duty to answer one message. Dropped without an answer, the peer hears that there is none.
pub struct Responder {
    replies: Option<Arc<Replies>>,
    id: u64,
}

impl Responder {
    pub(crate) fn new(replies: Arc<Replies>, id: u64) -> Self {
        Self { replies: Some(replies), id }
    }

    /// Where the asking peer is; `None` if it came over a unix socket.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.replies.as_ref()?.peer_address()
    }

    /// Answers. A peer that is gone is not told; one that takes no byte for 10 s loses its connection. Longer answers
    /// than the protocol's 16 MiB are no answer.
    pub fn reply(self, reply: &[u8]) {
        self.reply_parts(&[reply]);
    }

    /// As [`Responder::reply`], with an answer that lies in several places: large parts are not copied. Blocks while the
    /// peer does not take them.
    pub fn reply_parts(mut self, parts: &[&[u8]]) {
        if let Some(replies) = self.replies.take() {
            replies.answer(self.id, Ok(parts));
        }
    }

    /// As [`Responder::reply`], if that needs no wait: the answer has at most 4 KiB, nobody else is answering on this
    /// connection, and the peer takes what it is sent.
    ///
    /// # Errors
    /// The right to answer: nothing was sent.
    pub fn reply_at_once(mut self, reply: &[u8]) -> Result<(), Self> {
        match self.replies.take() {
            Some(replies) if !replies.answer_at_once(self.id, reply) => {
                self.replies = Some(replies);
                Err(self)
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if let Some(replies) = self.replies.take() {
            replies.answer(self.id, Err(Failure::Cancelled));
        }
    }
}

impl std::fmt::Debug for Responder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Responder").field("id", &self.id).finish()
    }
}

/// The reply to a message, when it comes. Dropped before, the message may still be answered, and nobody hears of it.
///
/// Needs no runtime, and may be polled from any: a thread of the engine receives.
pub struct Reply {
    pub(crate) state: Result<Driving, Option<TransferError>>,
    pub(crate) address: String,
}

impl Future for Reply {
    type Output = Result<Vec<u8>, TransferError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.state {
            Ok(driving) => Pin::new(driving).poll(context).map(|answer| reply(answer, &self.address)),
            Err(refused) => Poll::Ready(Err(refused.take().unwrap_or(TransferError::NoAnswer("polled after its end")))),
        }
    }
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply").field("address", &self.address).finish_non_exhaustive()
    }
}

/// What a peer's answer means to who asked.
pub(crate) fn reply(answer: Result<Vec<u8>, Failure>, address: &str) -> Result<Vec<u8>, TransferError> {
    answer.map_err(|failure| match failure {
        Failure::Cancelled => TransferError::NoAnswer("its handler gave the request up"),
        failure => TransferError::Peer { address: address.to_owned(), failure, source: None },
    })
}
