//! Messages: small requests and replies between engines.
//!
//! The engine carries bytes and knows nothing of what they say. A [`Handler`] answers requests of peers, on the thread
//! that serves the connection; one that has to wait keeps the [`Responder`] and answers later, from any thread. The
//! asking side is `control`.

use std::sync::Arc;

use crate::error::Failure;
use crate::serve::Replies;

/// Answers peers' messages.
pub trait Handler: Send + Sync {
    /// Answers a request, now or later. Called on the thread that serves the peer's connection: while it runs, further
    /// requests of that connection wait, and those of others do not.
    fn handle(&self, request: &[u8], responder: Responder);
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

    /// Answers. A peer that is gone is not told; one that takes no byte for 10 s loses its connection. Longer answers
    /// than the protocol's 16 MiB are no answer.
    pub fn reply(mut self, reply: &[u8]) {
        if let Some(replies) = self.replies.take() {
            replies.answer(self.id, Ok(reply));
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
