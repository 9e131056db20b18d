//! Puts: small values in one message, large ones as a stream of chunks with the checksum behind them.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use crc32fast::Hasher;
use futures::{Stream, StreamExt};
use tidepool_metadata::framing::Framed;
use tidepool_metadata::proto::{self, put_chunk::Part};
use tokio::sync::oneshot;
use tonic::Request;
use tonic::body::Body;

use crate::call::{Attempt, Client, Repetition, key_bytes};
use crate::error::Error;
use crate::native::{Link, MOST_PUT_BYTES};
use crate::recent::Writing;
use crate::session::Items;
use crate::types::{PutDone, PutOptions, PutOutcome};
use crate::wire::{self, MessageBody};

/// Bytes of a chunk of a stream: one frame each, still in the second cache when it is copied again. Measured: 1 MiB and
/// 128 KiB are both slower.
const CHUNK_BYTES: usize = 256 << 10;

impl Client {
    /// Stores `value`. The server verifies its checksum before the object becomes visible.
    ///
    /// Repeated where that can help, under one name, so that it is done once whichever attempts arrive, and when.
    ///
    /// # Errors
    /// [`Error::Key`]; what the server refuses. Nothing is stored then, unless the deadline passed: then it may be.
    pub async fn put(&self, key: impl AsRef<[u8]>, value: Bytes, options: &PutOptions) -> Result<PutDone, Error> {
        let key = key_bytes(key)?;
        let writing = self.writing([&key[..]]);
        let put = |items: Option<Items>, repetition| {
            let (key, value) = (key.clone(), value.clone());
            async move {
                if value.len() <= MOST_PUT_BYTES {
                    return self.put_by_message(repetition, key, value, options, items.as_ref()).await;
                }
                let announce = || self.announce(key.clone(), value.len() as u64, options, items.as_ref());
                self.run(repetition, |attempt| self.send_whole(attempt, announce(), value.clone())).await
            }
        };
        let reply = self.named("put", 1, put).await?;
        self.put_done(&reply, writing)
    }

    async fn put_by_message(
        &self,
        repetition: Repetition,
        key: Bytes,
        value: Bytes,
        options: &PutOptions,
        items: Option<&Items>,
    ) -> Result<proto::PutReply, Error> {
        let native = {
            let message =
                proto::PutItemsRequest { tenant: self.tenant(), keys: vec![key.clone()], ..Default::default() };
            let (value, options, items) = (value.clone(), options.clone(), items.cloned());
            move |link: &Link, deadline| {
                let options = Some(options.message(items.as_ref()));
                let message = proto::PutItemsRequest { options, ..message.clone() };
                let reply = link.put("put", message, std::slice::from_ref(&value), deadline)?;
                let outcome = reply.outcomes.first().copied().unwrap_or_default();
                Ok(proto::PutReply { outcome, log_index: reply.log_index, checksum: 0 })
            }
        };
        let grpc = |mut attempt: Attempt| {
            let (key, value) = (key.clone(), value.clone());
            async move {
                if value.len() > self.settings().unary_put_bytes {
                    let announce = self.announce(key, value.len() as u64, options, items);
                    return self.send_whole(attempt, announce, value).await;
                }
                let (tenant, checksum) = (self.tenant(), Some(crc32fast::hash(&value)));
                let options = Some(options.message(items));
                let message = proto::PutRequest { tenant, key, checksum, value, options };
                let request = attempt.request(message);
                Ok(attempt.stub.put(request).await?.into_inner())
            }
        };
        self.run_linked(repetition, native, grpc).await
    }

    async fn send_whole(
        &self,
        attempt: Attempt,
        announce: proto::PutChunk,
        value: Bytes,
    ) -> Result<proto::PutReply, Error> {
        let request = attempt.request(MessageBody::request(whole_value(announce, value).map(framed)));
        self.send_chunks(attempt, request).await
    }

    /// Stores what `source` gives, `length` bytes in all. The deadline holds for each time without progress, so that
    /// a slow source is no error but a stuck one is. Never repeated.
    ///
    /// # Errors
    /// [`Error::Key`], [`Error::Source`], [`Error::SourceLength`]; what the server refuses. Nothing is stored then.
    pub async fn put_stream(
        &self,
        key: impl AsRef<[u8]>,
        length: u64,
        source: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
        options: &PutOptions,
    ) -> Result<PutDone, Error> {
        let key = key_bytes(key)?;
        let writing = self.writing([&key[..]]);
        let announce = self.announce(key, length, options, None);
        let (fail, mut failed) = oneshot::channel();
        let taken = Arc::new(AtomicU64::new(0));
        let chunks = Chunks {
            source: Box::pin(source),
            pending: Bytes::new(),
            announced: length,
            sent: 0,
            checksum: Hasher::new(),
            taken: Arc::clone(&taken),
            fail: Some(fail),
        };
        let deadline = self.settings().deadline;
        let attempt = self.attempt(tokio::time::Instant::now() + deadline);
        let chunks = futures::stream::iter([announce]).chain(chunks.into_stream()).map(framed);
        let mut request = attempt.request(MessageBody::request(Box::pin(chunks)));
        request.metadata_mut().remove("grpc-timeout");
        let answer = self.send_chunks(attempt, request);
        tokio::pin!(answer);
        let mut progress = 0;
        loop {
            tokio::select! {
                answer = &mut answer => {
                    return match failed.try_recv() {
                        Ok(error) => Err(error),
                        Err(_) => self.put_done(&answer?, writing),
                    };
                }
                () = tokio::time::sleep(deadline) => {
                    let now = taken.load(Ordering::Relaxed);
                    if now == progress {
                        return Err(Error::Deadline { operation: "put", deadline });
                    }
                    progress = now;
                }
            }
        }
    }

    async fn send_chunks(&self, attempt: Attempt, request: Request<Body>) -> Result<proto::PutReply, Error> {
        let response = attempt.send("/tidepool.v1.Store/PutStream", request).await?;
        Ok(wire::reply(response, self.settings().message_bytes).await?)
    }

    fn announce(&self, key: Bytes, length: u64, options: &PutOptions, items: Option<&Items>) -> proto::PutChunk {
        let options = Some(options.message(items));
        part(Part::Announce(proto::PutAnnounce { tenant: self.tenant(), key, length, options, checksum: None }))
    }

    fn put_done(&self, reply: &proto::PutReply, writing: Option<Writing<'_>>) -> Result<PutDone, Error> {
        self.wrote(writing, reply.log_index, reply.outcome() == proto::PutOutcome::AlreadyExists);
        let outcome = match reply.outcome() {
            proto::PutOutcome::Stored => PutOutcome::Stored,
            proto::PutOutcome::AlreadyExists => PutOutcome::AlreadyExists,
            proto::PutOutcome::Failed | proto::PutOutcome::Unspecified => {
                return Err(Error::Protocol { operation: "put", why: "has no outcome" });
            }
        };
        Ok(PutDone { outcome, log_index: reply.log_index })
    }
}

fn framed(chunk: proto::PutChunk) -> Framed {
    Framed::chunk(&chunk)
}

fn part(part: Part) -> proto::PutChunk {
    proto::PutChunk { part: Some(part) }
}

/// The messages of a value that is there already: each chunk is summed up when it is sent.
fn whole_value(announce: proto::PutChunk, mut value: Bytes) -> impl Stream<Item = proto::PutChunk> + Send + 'static {
    let mut checksum = Some(Hasher::new());
    let rest = std::iter::from_fn(move || {
        if value.is_empty() {
            return checksum.take().map(|checksum| part(Part::Checksum(checksum.finalize())));
        }
        let chunk = value.split_to(value.len().min(CHUNK_BYTES));
        checksum.as_mut()?.update(&chunk);
        Some(part(Part::Data(chunk)))
    });
    futures::stream::iter(std::iter::once(announce).chain(rest))
}

/// Cuts a source into messages and watches that it keeps its word.
struct Chunks<S> {
    source: Pin<Box<S>>,
    pending: Bytes,
    announced: u64,
    sent: u64,
    checksum: Hasher,
    /// Counts what was taken from the source, for the caller's clock.
    taken: Arc<AtomicU64>,
    /// Gone once the last message is out.
    fail: Option<oneshot::Sender<Error>>,
}

impl<S: Stream<Item = std::io::Result<Bytes>> + Send + 'static> Chunks<S> {
    fn into_stream(self) -> impl Stream<Item = proto::PutChunk> + Send + 'static {
        futures::stream::unfold(self, |mut chunks| async move {
            let message = chunks.next().await?;
            Some((message, chunks))
        })
    }

    async fn next(&mut self) -> Option<proto::PutChunk> {
        let fail = self.fail.take()?;
        while self.pending.is_empty() {
            let actual = |more: usize| self.sent + more as u64;
            let wrong = match self.source.next().await {
                Some(Ok(bytes)) if actual(bytes.len()) <= self.announced => {
                    self.pending = bytes;
                    self.taken.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                None if self.sent == self.announced => {
                    return Some(part(Part::Checksum(self.checksum.clone().finalize())));
                }
                Some(Ok(bytes)) => Error::SourceLength { announced: self.announced, actual: actual(bytes.len()) },
                None => Error::SourceLength { announced: self.announced, actual: self.sent },
                Some(Err(error)) => Error::Source(error),
            };
            // Neither ending the stream nor dropping the call would do: tonic's codec takes a stream that was reset
            // by `CANCEL` for one that ended, and the bytes so far may be as many as were announced. A checksum that
            // can't be right is refused by every server.
            let _caller_may_be_gone = fail.send(wrong);
            return Some(part(Part::Checksum(!self.checksum.clone().finalize())));
        }
        self.fail = Some(fail);
        let chunk = self.pending.split_to(self.pending.len().min(CHUNK_BYTES));
        self.sent += chunk.len() as u64;
        self.checksum.update(&chunk);
        Some(part(Part::Data(chunk)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(
        announced: u64,
        parts: Vec<std::io::Result<Bytes>>,
    ) -> (oneshot::Receiver<Error>, Chunks<impl Stream<Item = std::io::Result<Bytes>> + Send + 'static>) {
        let (fail, failed) = oneshot::channel();
        let chunks = Chunks {
            source: Box::pin(futures::stream::iter(parts)),
            pending: Bytes::new(),
            announced,
            sent: 0,
            checksum: Hasher::new(),
            taken: Arc::default(),
            fail: Some(fail),
        };
        (failed, chunks)
    }

    #[tokio::test]
    async fn chunks_carry_all_bytes_and_their_checksum() {
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        let (_failed, source) = chunks(3_000_000, vec![Ok(bytes.clone().into())]);
        let whole = whole_value(part(Part::Checksum(0)), bytes.clone().into()).skip(1);
        for messages in [source.into_stream().collect::<Vec<_>>().await, whole.collect().await] {
            let (last, data) = messages.split_last().expect("at least the checksum");
            let sent: Vec<u8> = data
                .iter()
                .flat_map(|message| match &message.part {
                    Some(Part::Data(data)) if data.len() <= CHUNK_BYTES => data.to_vec(),
                    other => panic!("{other:?}"),
                })
                .collect();
            assert!(sent == bytes);
            assert_eq!(last.part, Some(Part::Checksum(crc32fast::hash(&bytes))));
        }
    }

    #[tokio::test]
    async fn a_source_that_breaks_its_word_ends_with_a_wrong_checksum() {
        let broken = || Err(std::io::Error::other("gone"));
        let cases = [
            vec![Ok(Bytes::from("abc"))],
            vec![Ok(Bytes::from("abcdef"))],
            vec![Ok(Bytes::from("abcd")), Ok(Bytes::from("e"))],
            vec![Ok(Bytes::from("abcd")), broken()],
        ];
        for parts in cases {
            let (mut failed, chunks) = chunks(4, parts);
            let mut sum = Hasher::new();
            let mut last = None;
            let mut messages = Box::pin(chunks.into_stream());
            while let Some(message) = messages.next().await {
                match message.part {
                    Some(Part::Data(data)) => sum.update(&data),
                    other => last = other,
                }
            }
            assert!(failed.try_recv().is_ok());
            assert!(matches!(last, Some(Part::Checksum(actual)) if actual != sum.finalize()));
        }
    }
}
