//! Gets: always as a stream, so that no size needs a second try; verified against the announced checksum.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use crc32fast::Hasher;
use tidepool_metadata::framing::Framed;
use tidepool_metadata::proto::{self, get_chunk::Part};
use tokio::time::Instant;

use crate::call::{Attempt, Client, key_bytes, shown};
use crate::error::Error;
use crate::native::{Filling, Got, Link, Steps, blocking, may_block};
use crate::retry::Repeatable;
use crate::types::{GetOptions, Object, ObjectInfo};
use crate::wire::{ChunkStream, MessageBody};

/// Most that is allocated on the word of an announcement alone; what is larger grows as it comes.
const TRUSTED_BYTES: u64 = 64 << 20;

impl Client {
    /// The object of that key, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Key`], [`Error::ChecksumMismatch`], [`Error::LengthMismatch`]; what the server refuses.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Object>, Error> {
        self.get_with(key, GetOptions::default()).await
    }

    /// `length` bytes of the object from `offset` on, or `None` if there is no such object.
    ///
    /// # Errors
    /// As [`Client::get`]; `BAD_RANGE` if the range reaches past the end.
    pub async fn get_range(&self, key: impl AsRef<[u8]>, offset: u64, length: u64) -> Result<Option<Object>, Error> {
        self.get_with(key, GetOptions { offset, length: Some(length), ..GetOptions::default() }).await
    }

    /// What `options` say of the object, or `None` if there is no such object.
    ///
    /// # Errors
    /// As [`Client::get_range`].
    pub async fn get_with(&self, key: impl AsRef<[u8]>, options: GetOptions) -> Result<Option<Object>, Error> {
        let key = key_bytes(key)?;
        if let Some(object) = self.get_local(&key, &options).await {
            return Ok(Some(object));
        }
        self.get_until(self.get_message(key, options), Instant::now() + self.settings().deadline).await
    }

    /// Asks for an object; one deadline for all ways to it.
    pub(crate) async fn get_until(
        &self,
        mut message: proto::GetRequest,
        deadline: Instant,
    ) -> Result<Option<Object>, Error> {
        let mut value = Vec::new();
        if let Some(info) = self.get_known(&message, &mut value, deadline.into_std()).await {
            return Ok(Some(Object { info, value: value.into() }));
        }
        loop {
            let asked = std::time::Instant::now();
            let (mut value, got) = self.get_value(&message, deadline).await?;
            let info = match got {
                Got::Whole(info) => info,
                Got::Elsewhere(_) if !message.may_refer => return Err(referred_again()),
                Got::Elsewhere(elsewhere) => {
                    self.places().learn(&message.key, &elsewhere, asked);
                    let there = self.get_there(&elsewhere, &message, &mut value, deadline.into_std()).await;
                    if there.is_none() {
                        message.may_refer = false;
                        continue;
                    }
                    there
                }
            };
            return Ok(info.map(|info| Object { info, value: value.into() }));
        }
    }

    async fn get_value(&self, message: &proto::GetRequest, deadline: Instant) -> Result<(Vec<u8>, Got), Error> {
        let native = {
            let message = message.clone();
            move |link: &Link, deadline| {
                let mut value = Vec::new();
                let got = link.get(&message, &mut value, deadline)?;
                Ok((value, got))
            }
        };
        self.run_linked(self.begin_part("get", Repeatable::Always, deadline), native, |attempt| {
            let message = message.clone();
            async move {
                let Some(mut stream) = self.open(attempt, message, false).await? else {
                    return Ok((Vec::new(), Got::Whole(None)));
                };
                let value = stream.collect().await?;
                Ok((value.into(), Got::Whole(Some(stream.info))))
            }
        })
        .await
    }

    /// Reads the object into the start of `buffer`; `None` if there is no such object. After an error the buffer's
    /// content means nothing.
    ///
    /// # Errors
    /// As [`Client::get`]; [`Error::Buffer`] if the object is longer than the buffer.
    pub async fn get_into(&self, key: impl AsRef<[u8]>, buffer: &mut [u8]) -> Result<Option<ObjectInfo>, Error> {
        self.get_into_with(key, GetOptions::default(), buffer).await
    }

    /// Reads what `options` say of the object into the start of `buffer`; `None` if there is no such object.
    ///
    /// # Errors
    /// As [`Client::get_into`] and [`Client::get_range`].
    pub async fn get_into_with(
        &self,
        key: impl AsRef<[u8]>,
        options: GetOptions,
        buffer: &mut [u8],
    ) -> Result<Option<ObjectInfo>, Error> {
        let deadline = Instant::now() + self.settings().deadline;
        self.read_into(key_bytes(key)?, options, buffer, deadline).await
    }

    /// As [`Client::get_into`], if it needs no call: from the memory of a node on this host.
    ///
    /// # Errors
    /// [`Error::Key`].
    pub async fn get_local_into(&self, key: impl AsRef<[u8]>, buffer: &mut [u8]) -> Result<Option<ObjectInfo>, Error> {
        Ok(self.read_local_into(&key_bytes(key)?, &GetOptions::default(), buffer).await)
    }

    /// Reads the object's bytes from `offset` on into `buffer`, all of it; `None` if there is no such object.
    ///
    /// # Errors
    /// As [`Client::get_range`].
    pub async fn get_range_into(
        &self,
        key: impl AsRef<[u8]>,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<Option<ObjectInfo>, Error> {
        let options = GetOptions { offset, length: Some(buffer.len() as u64), ..GetOptions::default() };
        self.get_into_with(key, options, buffer).await
    }

    /// Gives what `options` say of the object step by step, as it comes, for who copies it on: `take` is told where in it a step
    /// begins, which is behind the last one, or at 0 again where it had to be asked for anew. What was given counts once this
    /// answers: it is verified at the end. `None`: there is no such object. Memory of nodes on this host is not read.
    ///
    /// # Errors
    /// As [`Client::get_range`]; [`Error::Buffer`] if it is longer than `room`.
    pub async fn get_steps(
        &self,
        key: impl AsRef<[u8]>,
        options: GetOptions,
        room: u64,
        take: &mut (dyn FnMut(u64, &[u8]) + Send),
    ) -> Result<Option<ObjectInfo>, Error> {
        let message = proto::GetRequest { may_refer: false, ..self.get_message(key_bytes(key)?, options) };
        let deadline = Instant::now() + self.settings().deadline;
        let mut repetition = self.begin_part("get", Repeatable::Always, deadline);
        loop {
            let attempt = self.attempt(deadline);
            let link = if may_block() { self.link_of(&attempt).await } else { None };
            let answer = if let Some(link) = link {
                let mut steps = Steps::new(room, take);
                let got = tokio::task::block_in_place(|| link.get(&message, &mut steps, deadline.into_std()));
                self.note_answer(&attempt, &link, got).and_then(|got| match got {
                    Got::Whole(info) => Ok(info),
                    Got::Elsewhere(_) => Err(referred_again()),
                })
            } else {
                let answer = async {
                    let Some(mut stream) = self.open(attempt, message.clone(), false).await? else {
                        return Ok(None);
                    };
                    stream.give(room, take).await?;
                    Ok(Some(stream.info))
                };
                repetition.within_deadline(answer).await
            };
            match answer {
                Ok(info) => return Ok(info),
                Err(error) => repetition.pause_after(error).await?,
            }
        }
    }

    /// Opens the object for reading piece by piece; `None` if there is no such object. The deadline holds for each
    /// piece. Opening is repeated where that helps, reading is not.
    ///
    /// # Errors
    /// As [`Client::get_range`].
    pub async fn get_stream(&self, key: impl AsRef<[u8]>, options: GetOptions) -> Result<Option<ObjectStream>, Error> {
        let message = self.get_message(key_bytes(key)?, options);
        let stream = self.call("get", Repeatable::Always, |attempt| self.open(attempt, message.clone(), true)).await?;
        Ok(stream.map(|stream| ObjectStream { step: Some(self.settings().deadline), ..stream }))
    }

    pub(crate) fn get_message(&self, key: Bytes, options: GetOptions) -> proto::GetRequest {
        let GetOptions { offset, length, fresh, allow_unconfirmed, version } = options;
        let (tenant, seen_index) = (self.tenant(), self.seen_index());
        let may_refer = may_block();
        let may_hold = false;
        proto::GetRequest {
            tenant,
            key,
            offset,
            length,
            fresh,
            seen_index,
            version,
            may_refer,
            allow_unconfirmed,
            may_hold,
        }
    }

    pub(crate) async fn read_into(
        &self,
        key: Bytes,
        options: GetOptions,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<ObjectInfo>, Error> {
        if let Some(info) = self.read_local_into(&key, &options, buffer).await {
            return Ok(Some(info));
        }
        let mut message = self.get_message(key, options);
        let mut target = Filling { buffer: &mut *buffer, filled: 0 };
        if let Some(info) = self.get_known(&message, &mut target, deadline.into_std()).await {
            return Ok(Some(info));
        }
        let mut repetition = self.begin_part("get", Repeatable::Always, deadline);
        loop {
            let (attempt, asked) = (self.attempt(deadline), std::time::Instant::now());
            if let Some(link) = self.link_of(&attempt).await {
                let deadline = deadline.into_std();
                let answer = get_into(&link, &message, buffer, deadline).await;
                match self.note_answer(&attempt, &link, answer) {
                    Ok(Got::Whole(info)) => return Ok(info),
                    Ok(Got::Elsewhere(elsewhere)) if message.may_refer => {
                        self.places().learn(&message.key, &elsewhere, asked);
                        let mut target = Filling { buffer: &mut *buffer, filled: 0 };
                        if let Some(info) = self.get_there(&elsewhere, &message, &mut target, deadline).await {
                            return Ok(Some(info));
                        }
                        message.may_refer = false;
                    }
                    Ok(Got::Elsewhere(_)) => return Err(referred_again()),
                    Err(error) => repetition.pause_after(error).await?,
                }
                continue;
            }
            let answer = async {
                let Some(mut stream) = self.open(attempt, message.clone(), false).await? else {
                    return Ok(None);
                };
                stream.read_into(buffer).await?;
                Ok(Some(stream.info))
            };
            match repetition.within_deadline(answer).await {
                Ok(answer) => return Ok(answer),
                Err(error) => repetition.pause_after(error).await?,
            }
        }
    }

    async fn open(
        &self,
        attempt: Attempt,
        message: proto::GetRequest,
        unhurried: bool,
    ) -> Result<Option<ObjectStream>, Error> {
        let body = MessageBody::request(futures::stream::iter([Framed::message(&message)]));
        let mut request = attempt.request(body);
        if unhurried {
            request.metadata_mut().remove("grpc-timeout");
        }
        let first = async {
            let response = attempt.send("/tidepool.v1.Store/GetStream", request).await?;
            let mut chunks = ChunkStream::<proto::GetChunk>::response(response, self.settings().message_bytes)?;
            let first = chunks.message().await?;
            Ok((chunks, first))
        };
        let (chunks, first) = match first.await {
            Ok(opened) => opened,
            Err(error) if Error::is_missing_object(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(proto::GetChunk { part: Some(Part::Description(description)) }) = first else {
            return Err(Error::Protocol { operation: "get", why: "does not begin with a description" });
        };
        let info = ObjectInfo::from(description);
        let proto::GetRequest { key, offset, length, .. } = message;
        let length = length.unwrap_or(info.length.saturating_sub(offset));
        let (checksum, trailing, step) = (Hasher::new(), None, None);
        Ok(Some(ObjectStream { info, key, chunks, length, received: 0, checksum, trailing, step }))
    }
}

/// Reads into the caller's buffer, in place if this thread may block, else by way of another thread's.
async fn get_into(
    link: &Arc<Link>,
    message: &proto::GetRequest,
    buffer: &mut [u8],
    deadline: std::time::Instant,
) -> Result<Got, Error> {
    if may_block() {
        let mut target = Filling { buffer, filled: 0 };
        return tokio::task::block_in_place(|| link.get(message, &mut target, deadline));
    }
    let (link, asked) = (Arc::clone(link), message.clone());
    let got = blocking(move || {
        let mut value = Vec::new();
        link.get(&asked, &mut value, deadline).map(|got| (got, value))
    });
    let (got, value) = got.await?;
    let (length, room) = (value.len() as u64, buffer.len() as u64);
    let place = buffer.get_mut(..value.len());
    let place = place.ok_or_else(|| Error::Buffer { key: shown(&message.key), length, buffer: room })?;
    place.copy_from_slice(&value);
    Ok(got)
}

fn referred_again() -> Error {
    Error::Protocol { operation: "get", why: "refers to another node where that was not asked for" }
}

/// An object's bytes as they come. They are verified when the end is reached, and not before: whoever uses a piece
/// earlier must be able to take that back.
#[derive(Debug)]
pub struct ObjectStream {
    /// What is known of the object.
    pub info: ObjectInfo,
    key: Bytes,
    chunks: ChunkStream<proto::GetChunk>,
    length: u64,
    received: u64,
    checksum: Hasher,
    /// The sum behind a range's bytes: only known to the server when it has read them.
    trailing: Option<u32>,
    step: Option<std::time::Duration>,
}

impl ObjectStream {
    /// How many bytes come in all.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Each piece may take as long as its source does: for a source that waits itself. A connection that is gone is noticed.
    #[must_use]
    pub fn unhurried(self) -> Self {
        Self { step: None, ..self }
    }

    /// The next piece; `None` when all came and the checksum is right. Not cancel safe: a piece may be lost.
    ///
    /// # Errors
    /// [`Error::ChecksumMismatch`], [`Error::LengthMismatch`], [`Error::Deadline`]; what the server says on the way.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            match self.message().await? {
                Some(Some(Part::Data(data))) if self.trailing.is_none() => {
                    self.received += data.len() as u64;
                    if self.received > self.length {
                        return Err(self.length_mismatch());
                    }
                    self.checksum.update(&data);
                    return Ok(Some(data));
                }
                Some(Some(Part::Checksum(checksum))) if self.trailing.is_none() => self.trailing = Some(checksum),
                Some(_) => return Err(Error::Protocol { operation: "get", why: "has a chunk out of place" }),
                None => return self.verify().map(|()| None),
            }
        }
    }

    async fn message(&mut self) -> Result<Option<Option<Part>>, Error> {
        let message = self.chunks.message();
        let message = match self.step {
            None => message.await?,
            Some(step) => tokio::time::timeout_at(Instant::now() + step, message)
                .await
                .map_err(|_| Error::Deadline { operation: "get", deadline: step })??,
        };
        Ok(message.map(|chunk| chunk.part))
    }

    fn verify(&self) -> Result<(), Error> {
        if self.received != self.length {
            return Err(self.length_mismatch());
        }
        let announced = self.trailing.or(self.info.checksum);
        let expected = announced.ok_or(Error::Protocol { operation: "get", why: "ended without a checksum" })?;
        let actual = self.checksum.clone().finalize();
        if actual == expected {
            Ok(())
        } else {
            Err(Error::ChecksumMismatch { key: shown(&self.key), expected, actual })
        }
    }

    fn length_mismatch(&self) -> Error {
        Error::LengthMismatch { key: shown(&self.key), expected: self.length, actual: self.received }
    }

    /// All bytes. What comes in one piece is not copied.
    async fn collect(&mut self) -> Result<Bytes, Error> {
        let Some(first) = self.next().await? else { return Ok(Bytes::new()) };
        if first.len() as u64 == self.length {
            return match self.next().await? {
                None => Ok(first),
                Some(_) => Err(Error::Protocol { operation: "get", why: "has an empty chunk" }),
            };
        }
        let mut all = BytesMut::with_capacity(self.length.min(TRUSTED_BYTES) as usize);
        all.extend_from_slice(&first);
        while let Some(data) = self.next().await? {
            all.extend_from_slice(&data);
        }
        Ok(all.freeze())
    }

    async fn read_into(&mut self, buffer: &mut [u8]) -> Result<(), Error> {
        let room = buffer.len() as u64;
        let mut copy = |at: u64, data: &[u8]| buffer[at as usize..][..data.len()].copy_from_slice(data);
        self.give(room, &mut copy).await
    }

    async fn give(&mut self, room: u64, take: &mut (dyn FnMut(u64, &[u8]) + Send)) -> Result<(), Error> {
        if self.length > room {
            return Err(Error::Buffer { key: shown(&self.key), length: self.length, buffer: room });
        }
        let mut at = 0;
        while let Some(data) = self.next().await? {
            take(at, &data);
            at += data.len() as u64;
        }
        Ok(())
    }
}
