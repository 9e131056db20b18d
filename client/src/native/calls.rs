//! The calls over a link. They block until the answer is there or the deadline has passed.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crc32fast::Hasher;
use prost::Message;
use tidepool_metadata::envelope::{self, ANSWER_BYTES, LEAST_HELD_BYTES, MOST_VALUE_BYTES};
use tidepool_metadata::proto::{self, EngineMethod};
use tidepool_transfer::{Answer, Answered, Failure, Reading, TransferError};
use tonic::{Code, Status};

use super::one_sided::since_boot;
use super::{Link, Target, means};
use crate::call::shown;
use crate::error::{Error, Refusal};
use crate::places::Elsewhere;
use crate::types::{Object, ObjectInfo};

/// Values from this size on are staged where the node can copy them: below it a message is as quick.
const STAGED_FROM: usize = 32 << 10;
/// Most bytes of values in a message; larger ones are streamed by gRPC.
pub(crate) const MOST_PUT_BYTES: usize = 1000 << 20;

/// What a call is named to people, and in a message.
pub(crate) type Method = (&'static str, EngineMethod);

/// Another node that has what is asked for, and how long the first one has to begin before it is asked.
#[derive(Clone, Copy)]
pub(crate) struct Second<'a> {
    pub(crate) link: &'a Link,
    pub(crate) patience: Duration,
}

/// How a get ended.
pub(crate) enum Got {
    /// All was received; `None`: there is no such object.
    Whole(Option<ObjectInfo>),
    /// Nothing was.
    Elsewhere(Elsewhere),
}

/// The engine's error as the client's.
fn failed(operation: &'static str, began: Instant) -> impl Fn(TransferError) -> Error {
    move |error| match error {
        TransferError::Peer { failure: Failure::DeadlinePassed, .. } => {
            Error::Deadline { operation, deadline: began.elapsed() }
        }
        error => Error::Refused(Box::new(Refusal::of_engine(&error))),
    }
}

/// Whether an error is what the node says, so that it no longer works on the call.
fn is_answered(error: &Error) -> bool {
    matches!(error, Error::Refused(refusal) if !refusal.is_transport)
}

impl Link {
    /// Whether an error says that the engine does not answer.
    pub(crate) fn is_lost(error: &Error) -> bool {
        matches!(error, Error::Refused(refusal) if refusal.is_transport)
    }

    /// Sends a message with values behind it; gives the answer's message, and its values still to be received.
    fn ask<M: Message + Default>(
        &self,
        operation: &'static str,
        method: EngineMethod,
        message: &impl Message,
        values: &[Bytes],
        deadline: Instant,
    ) -> Result<(M, Answer), Error> {
        let (message, answer, _) = self.ask_either(None, operation, method, message, values, deadline)?;
        Ok((message, answer))
    }

    /// As [`Link::ask`], of a second node too if there is one and this one takes long; says whose the answer is.
    fn ask_either<M: Message + Default>(
        &self,
        second: Option<Second<'_>>,
        operation: &'static str,
        method: EngineMethod,
        message: &impl Message,
        values: &[Bytes],
        deadline: Instant,
    ) -> Result<(M, Answer, Answered), Error> {
        let began = Instant::now();
        let failed = failed(operation, began);
        let head = envelope::request(method, deadline.saturating_duration_since(began), message);
        let mut parts: Vec<&[u8]> = Vec::with_capacity(1 + values.len());
        parts.push(&head);
        parts.extend(values.iter().map(|value| &value[..]));
        let asked = match second {
            None => self.engine.exchange(self.peer, &parts, deadline).map(|answer| (answer, Answered::First)),
            Some(Second { link, patience }) => {
                self.engine.exchange_either([self.peer, link.peer], &parts, patience, deadline)
            }
        };
        let (mut answer, answered) = asked.map_err(|error| {
            // Whatever was being tried when the time was over.
            let is_late = Instant::now() >= deadline;
            if is_late { Error::Deadline { operation, deadline: began.elapsed() } } else { failed(error) }
        })?;
        if method == EngineMethod::Get {
            self.times.note(began.elapsed());
        }
        let broken = |why| Error::Protocol { operation, why };
        let mut start = [0; ANSWER_BYTES];
        answer.read(&mut start).map_err(&failed)?;
        let (is_done, length) = envelope::answer_head(start).map_err(|_| broken("has no status"))?;
        if length as u64 > answer.left() {
            return Err(broken("is shorter than its message"));
        }
        let mut message = vec![0; length];
        answer.read(&mut message).map_err(&failed)?;
        if is_done {
            let message = M::decode(&message[..]).map_err(|_| broken("can't be read"))?;
            return Ok((message, answer, answered));
        }
        let refusal = proto::Refusal::decode(&message[..]).map_err(|_| broken("can't be read"))?;
        let code = Code::from(i32::try_from(refusal.code).unwrap_or_default());
        Err(Status::with_details(code, refusal.message, refusal.details).into())
    }

    /// A call that is a message and an answer.
    pub(crate) fn call<M: Message + Default>(
        &self,
        (operation, method): Method,
        message: &impl Message,
        deadline: Instant,
    ) -> Result<M, Error> {
        Ok(self.ask(operation, method, message, &[], deadline)?.0)
    }

    /// Puts values; large ones by memory that the node copies from, where it can: that in which they lie, else staged.
    pub(crate) fn put(
        &self,
        operation: &'static str,
        mut message: proto::PutItemsRequest,
        values: &[Bytes],
        deadline: Instant,
    ) -> Result<proto::BatchPutReply, Error> {
        let total: usize = values.iter().map(Bytes::len).sum();
        message.lengths = values.iter().map(|value| value.len() as u64).collect();
        let may_lend = || total >= STAGED_FROM && (self.is_here || self.one_sided.may_put(&self.engine, self.peer));
        // Once more where the node has been restarted, or another put from this memory was not answered.
        for _ in 0..2 {
            let Some(placed) = may_lend().then(|| self.lending.place(values)).flatten() else { break };
            let mut message = message.clone();
            placed.say(&mut message, values);
            match self.ask(operation, EngineMethod::Put, &message, &[], deadline) {
                Err(error) if error.reason() == "NOT_LENT" => placed.forget(),
                Err(error) if error.reason() == "WITHDRAWN" => {}
                Err(error) if error.reason() == "NOT_READ" => self.one_sided.put_failed(),
                Err(error) => {
                    if !is_answered(&error) {
                        placed.withdraw();
                    }
                    return Err(error);
                }
                Ok((reply, _)) => {
                    self.lent_puts.fetch_add(1, Ordering::Relaxed);
                    self.one_sided.note_put(&message);
                    return Ok(reply);
                }
            }
        }
        if may_lend()
            && let Some(staged) = self.staging.stage(values)
        {
            let mut message = message.clone();
            staged.say(&mut message, values);
            match self.ask(operation, EngineMethod::Put, &message, &[], deadline) {
                Err(error) if error.reason() == "NOT_LENT" => self.staging.renew(),
                Err(error) if error.reason() == "NOT_READ" => self.one_sided.put_failed(),
                Err(error) => {
                    if !is_answered(&error) {
                        staged.abandon();
                        self.staging.renew();
                    }
                    return Err(error);
                }
                Ok((reply, _)) => {
                    self.one_sided.note_put(&message);
                    return Ok(reply);
                }
            }
        }
        message.checksums = means::checksums(values);
        Ok(self.ask(operation, EngineMethod::Put, &message, values, deadline)?.0)
    }

    /// Reads an object or a range of it into `target`, verified.
    pub(crate) fn get(
        &self,
        message: &proto::GetRequest,
        target: &mut impl Target,
        deadline: Instant,
    ) -> Result<Got, Error> {
        Ok(self.get_either(None, message, target, deadline)?.0)
    }

    /// As [`Link::get`], from a second node too if there is one and this one takes long; says whose the answer is.
    pub(crate) fn get_either(
        &self,
        second: Option<Second<'_>>,
        message: &proto::GetRequest,
        target: &mut impl Target,
        deadline: Instant,
    ) -> Result<(Got, Answered), Error> {
        // A second node's hold would be left behind by whichever answers later.
        let is_whole = message.length.is_none() && message.offset == 0 && second.is_none();
        let reading = is_whole.then(|| self.reading()).flatten();
        if reading.is_none() {
            return self.get_asked(second, message, None, target, deadline);
        }
        let message = proto::GetRequest { may_hold: true, ..message.clone() };
        self.get_asked(None, &message, reading, target, deadline)
    }

    fn get_asked(
        &self,
        second: Option<Second<'_>>,
        message: &proto::GetRequest,
        reading: Option<Reading<'_>>,
        target: &mut impl Target,
        deadline: Instant,
    ) -> Result<(Got, Answered), Error> {
        let began = since_boot();
        let asked = self.ask_either(second, "get", EngineMethod::Get, message, &[], deadline);
        let (mut description, mut answer, answered): (proto::ObjectDescription, _, _) = match asked {
            Err(error) if error.is_missing_object() => return Ok((Got::Whole(None), Answered::FirstOfTwo)),
            asked => asked?,
        };
        let link = match second {
            Some(second) if answered == Answered::Second => second.link,
            _ => self,
        };
        if !description.elsewhere.is_empty() {
            let addresses = std::mem::take(&mut description.elsewhere).into();
            return Ok((Got::Elsewhere(Elsewhere { addresses, version: description.version }), answered));
        }
        if let Some(held) = description.held.take() {
            let reading =
                reading.ok_or(Error::Protocol { operation: "get", why: "is held without having been asked to" })?;
            return match self.read_held(reading, &message.key, (&description, &held), began, target, deadline) {
                Ok(()) => Ok((Got::Whole(Some(description.into())), answered)),
                Err(error @ Error::Buffer { .. }) => Err(error),
                Err(error) => {
                    tracing::debug!(%error, "what the node holds can't be read: it is asked for");
                    let message = proto::GetRequest { may_hold: false, ..message.clone() };
                    self.get_asked(None, &message, None, target, deadline)
                }
            };
        }
        let all = message.length.unwrap_or_else(|| description.length.saturating_sub(message.offset));
        target.begin(&message.key, all)?;
        if answer.left() > 0 || all == 0 {
            receive(&message.key, &description, all, &mut answer, target)?;
            return Ok((Got::Whole(Some(description.into())), answered));
        }
        // Too much for one answer: that version, range by range.
        let mut at = 0;
        while at < all {
            let length = MOST_VALUE_BYTES.min(all - at);
            let (offset, version) = (message.offset + at, description.version.clone());
            let range =
                proto::GetRequest { offset, length: Some(length), version, may_refer: false, ..message.clone() };
            let (part, mut answer) = match link.ask("get", EngineMethod::Get, &range, &[], deadline) {
                // It was replaced or removed meanwhile: as if it had been a moment before.
                Err(error) if error.is_missing_object() => return Ok((Got::Whole(None), answered)),
                part => part?,
            };
            receive(&message.key, &part, length, &mut answer, target)?;
            at += length;
        }
        Ok((Got::Whole(Some(description.into())), answered))
    }

    /// Reads exactly that version.
    pub(crate) fn get_version(
        &self,
        tenant: &str,
        key: &Bytes,
        version: &str,
        deadline: Instant,
    ) -> Result<Option<Object>, Error> {
        let (tenant, version) = (tenant.to_owned(), version.to_owned());
        let message = proto::GetRequest { tenant, key: key.clone(), version, ..Default::default() };
        let mut value = Vec::new();
        match self.get(&message, &mut value, deadline)? {
            Got::Whole(info) => Ok(info.map(|info| Object { info, value: value.into() })),
            Got::Elsewhere(_) => Ok(None),
        }
    }

    /// Reads objects, as many answers as they take.
    pub(crate) fn get_batch(
        &self,
        message: &proto::BatchGetRequest,
        deadline: Instant,
    ) -> Result<Vec<proto::BatchGetReply>, Error> {
        const OPERATION: &str = "batch get";
        let (mut replies, mut first) = (Vec::new(), 0);
        let are_read_alone = self.one_sided.is_possible(&self.engine, self.peer);
        let largest = if are_read_alone { LEAST_HELD_BYTES - 1 } else { message.largest };
        while first < message.keys.len() {
            let rest = proto::BatchGetRequest {
                tenant: message.tenant.clone(),
                keys: message.keys[first..].to_vec(),
                versions: message.versions.get(first..).unwrap_or_default().to_vec(),
                largest,
                ..*message
            };
            let began = Instant::now();
            let (mut reply, mut answer): (proto::BatchGetReply, _) =
                self.ask(OPERATION, EngineMethod::BatchGet, &rest, &[], deadline)?;
            let mut values = Vec::new();
            while answer.left() > 0 {
                answer.append_to(&mut values).map_err(failed(OPERATION, began))?;
            }
            reply.values = values.into();
            reply.first = u32::try_from(first).unwrap_or(u32::MAX);
            first += reply.outcomes.len();
            if reply.outcomes.is_empty() {
                return Err(Error::Protocol { operation: OPERATION, why: "has no items" });
            }
            replies.push(reply);
        }
        Ok(replies)
    }
}

/// Receives `length` bytes and compares their sum with the announced one.
fn receive(
    key: &[u8],
    description: &proto::ObjectDescription,
    length: u64,
    answer: &mut Answer,
    target: &mut impl Target,
) -> Result<(), Error> {
    let began = Instant::now();
    if answer.left() != length {
        return Err(Error::LengthMismatch { key: shown(key), expected: length, actual: answer.left() });
    }
    let expected = description.checksum.ok_or(Error::Protocol { operation: "get", why: "has no checksum" })?;
    let mut sum = Hasher::new();
    while answer.left() > 0 {
        sum.update(target.take(answer).map_err(failed("get", began))?);
    }
    let actual = sum.finalize();
    if actual == expected { Ok(()) } else { Err(Error::ChecksumMismatch { key: shown(key), expected, actual }) }
}
