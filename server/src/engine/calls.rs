//! The calls: what each does with its message and its values.

use std::time::Duration;

use bytes::{Buf, Bytes};
use prost::Message;
use tidepool_metadata::ErrorKind;
use tidepool_metadata::envelope::{MOST_VALUE_BYTES, Request};
use tidepool_metadata::proto::{self, EngineMethod};
use tidepool_transfer::{RegionTicket, Responder};

use super::{Answer, EngineApi, Reply, held, send};
use crate::error::Error;
use crate::grpc::{StoreApi, describe};
use crate::node::Opened;

pub(super) fn decode<M: Message + Default>(bytes: impl Buf) -> Result<M, Error> {
    M::decode(bytes)
        .map_err(|error| Error::new(ErrorKind::Invalid, "BAD_MESSAGE", format!("the message can't be read: {error}")))
}

impl EngineApi {
    pub(super) fn call(&self, request: &Request<'_>, responder: Responder) {
        let begun = match request.method {
            EngineMethod::Put => self.put(request, responder.peer_address()),
            EngineMethod::Get => {
                let (segment, time) = (self.segment, request.time);
                self.begin(request, move |api, message| api.get_whole(message, segment, time))
            }
            EngineMethod::BatchGet => self.begin(request, StoreApi::get_batch),
            EngineMethod::Exists => self.plain(request, |api, message| async move { api.exists_keys(message).await }),
            EngineMethod::Remove => self.plain(request, |api, message| async move { api.remove_keys(message).await }),
            EngineMethod::OpenSession => {
                self.plain(request, |api, message| async move { api.begin_session(message).await })
            }
            EngineMethod::Pin => {
                self.plain(request, |api, message| async move { api.change_pins(message, true).await })
            }
            EngineMethod::Unpin => {
                self.plain(request, |api, message| async move { api.change_pins(message, false).await })
            }
            EngineMethod::RenewLease => self.plain(request, |api, message| async move { api.renew(message).await }),
            EngineMethod::ReleaseLease => self.plain(request, |api, message| async move { api.release(message).await }),
            EngineMethod::List => self.plain(request, |api, message| async move { api.list_page(message).await }),
            EngineMethod::Stat => self.plain(request, |api, message| async move { api.stat_object(message).await }),
            EngineMethod::EndHolds => self.begin(request, |api, message: proto::EndHoldsRequest| async move {
                api.service.store().end_holds(&message.ids);
                Ok(Reply::of(&proto::EndHoldsReply {}))
            }),
            EngineMethod::Unspecified => {
                Err(Error::new(ErrorKind::Unimplemented, "UNIMPLEMENTED", "no method was named".into()))
            }
        };
        match begun {
            Ok(answer) => self.answer(request.time, responder, answer),
            Err(error) => send(responder, Err(error)),
        }
    }

    /// A call that is a message and an answer.
    fn plain<M: Message + Default, R: Message, F: Future<Output = Result<R, Error>> + Send + 'static>(
        &self,
        request: &Request<'_>,
        call: impl FnOnce(StoreApi, M) -> F,
    ) -> Result<Begun, Error> {
        self.begin(request, |api, message| {
            let answer = call(api, message);
            async move { Ok(Reply::of(&answer.await?)) }
        })
    }

    fn begin<M: Message + Default, F: Future<Output = Answer> + Send + 'static>(
        &self,
        request: &Request<'_>,
        call: impl FnOnce(StoreApi, M) -> F,
    ) -> Result<Begun, Error> {
        // Its keys and values are parts of one buffer.
        Ok(Box::pin(call(self.api.clone(), decode(Bytes::copy_from_slice(request.message))?)))
    }
}

pub(super) type Begun = std::pin::Pin<Box<dyn Future<Output = Answer> + Send>>;

impl StoreApi {
    /// An object or a range of it, its bytes as they lie in memory; without them if they are held in `segment`, or too many
    /// for one answer.
    async fn get_whole(self, request: proto::GetRequest, segment: Option<RegionTicket>, time: Duration) -> Answer {
        let mut reader = match self.open_or_refer(&request, request.may_refer).await? {
            Opened::Here(reader) => reader,
            Opened::Elsewhere(location, elsewhere) => {
                let version = location.version.to_string();
                return Ok(Reply::of(&proto::ObjectDescription { version, elsewhere, ..Default::default() }));
            }
        };
        let length = reader.description().range_length;
        let mut description = describe(reader.description());
        let held = segment.filter(|_| request.may_hold).and_then(|segment| held::hold(segment, &reader, time));
        if let Some((checksum, held)) = held {
            (description.checksum, description.held) = (Some(checksum), Some(Box::new(held)));
            return Ok(Reply::of(&description));
        }
        if length > MOST_VALUE_BYTES {
            description.checksum = None;
            return Ok(Reply::of(&description));
        }
        let _inflight = self.inflight.admit(length)?;
        let mut sum = description.checksum.is_none().then(crc32fast::Hasher::new);
        let mut values = Vec::new();
        while let Some(bytes) = reader.next().await? {
            if let Some(sum) = &mut sum {
                sum.update(&bytes);
            }
            values.push(bytes);
        }
        description.checksum = description.checksum.or(sum.map(crc32fast::Hasher::finalize));
        Ok(Reply::with(&description, values))
    }

    async fn get_batch(self, request: proto::BatchGetRequest) -> Answer {
        let (reply, values) = self.gather(&self.asked(request).await?, 0).await?;
        Ok(Reply::with(&reply, values))
    }
}
