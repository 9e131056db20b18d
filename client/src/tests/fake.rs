//! A server that keeps objects in a map, and fails as a test tells it to.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use prost::Message;
use tidepool_metadata::proto::{self, get_chunk, put_chunk};
use tokio_stream::Stream;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::raw::store_server::{Store, StoreServer};

type Answer<T> = Result<Response<T>, Status>;
type Replies<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) objects: BTreeMap<Bytes, Bytes>,
    /// Each next call takes the first of these and fails with it, if there is one.
    pub(crate) failures: VecDeque<Status>,
    /// Calls that came, by name.
    pub(crate) calls: Vec<&'static str>,
    /// Under which names changes came.
    pub(crate) request_ids: Vec<proto::RequestIds>,
    /// Names of tasks that were to be begun.
    pub(crate) tasks: Vec<u64>,
    /// The last call's token.
    pub(crate) authorization: Option<String>,
    /// Gets flip a bit of their last byte so many times.
    pub(crate) damaged_gets: u32,
    /// Gets leave their last byte out.
    pub(crate) short_gets: bool,
    /// Each next batch put takes the first of these, and hears it for each of its items.
    pub(crate) item_refusals: VecDeque<&'static str>,
    /// Calls never answer.
    pub(crate) is_stuck: bool,
}

#[derive(Clone, Default)]
pub(crate) struct Fake(pub(crate) Arc<Mutex<State>>);

pub(crate) fn status(code: Code, reason: &str, retry_after_ms: u32) -> Status {
    let detail = proto::ErrorDetail { reason: reason.into(), field: String::new(), retry_after_ms };
    Status::with_details(code, reason, detail.encode_to_vec().into())
}

impl Fake {
    /// Serves on a port of its own until the test ends.
    pub(crate) async fn serve(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("is bound").to_string();
        let service = StoreServer::new(self.clone()).max_decoding_message_size(64 << 20);
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        address
    }

    pub(crate) fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("no test panics while it holds the lock")
    }

    async fn enter<T>(&self, call: &'static str, request: &Request<T>) -> Result<(), Status> {
        let authorization = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        let is_stuck = {
            let mut state = self.state();
            state.calls.push(call);
            state.authorization = authorization.map(str::to_owned);
            if let Some(failure) = state.failures.pop_front() {
                return Err(failure);
            }
            state.is_stuck
        };
        if is_stuck { std::future::pending().await } else { Ok(()) }
    }

    fn insert(&self, key: Bytes, value: Bytes, checksum: Option<u32>) -> Result<proto::PutReply, Status> {
        let actual = crc32fast::hash(&value);
        if checksum.is_some_and(|checksum| checksum != actual) {
            return Err(status(Code::InvalidArgument, "CHECKSUM_MISMATCH", 0));
        }
        let mut state = self.state();
        let exists = state.objects.contains_key(&key);
        let outcome = if exists { proto::PutOutcome::AlreadyExists } else { proto::PutOutcome::Stored };
        state.objects.entry(key).or_insert(value);
        Ok(proto::PutReply { outcome: outcome as i32, log_index: state.objects.len() as u64, checksum: actual })
    }
}

#[tonic::async_trait]
impl Store for Fake {
    type GetStreamStream = Replies<proto::GetChunk>;
    type BatchGetStream = Replies<proto::BatchGetReply>;
    type RemoveMatchingStream = Replies<proto::RemoveMatchingReply>;

    async fn put(&self, request: Request<proto::PutRequest>) -> Answer<proto::PutReply> {
        self.state().request_ids.extend(request.get_ref().options.as_ref().and_then(|options| options.ids));
        self.enter("put", &request).await?;
        let message = request.into_inner();
        self.insert(message.key, message.value, message.checksum).map(Response::new)
    }

    async fn put_stream(&self, request: Request<Streaming<proto::PutChunk>>) -> Answer<proto::PutReply> {
        self.enter("put_stream", &request).await?;
        let mut chunks = request.into_inner();
        let Some(put_chunk::Part::Announce(announce)) = chunks.message().await?.and_then(|chunk| chunk.part) else {
            return Err(Status::invalid_argument("no announcement"));
        };
        let (mut value, mut checksum) = (Vec::new(), announce.checksum);
        loop {
            match chunks.message().await? {
                Some(proto::PutChunk { part: Some(put_chunk::Part::Data(data)) }) => value.extend_from_slice(&data),
                Some(proto::PutChunk { part: Some(put_chunk::Part::Checksum(sum)) }) => checksum = Some(sum),
                None => break,
                Some(other) => panic!("{other:?}"),
            }
        }
        if value.len() as u64 != announce.length {
            return Err(status(Code::InvalidArgument, "LENGTH_MISMATCH", 0));
        }
        self.insert(announce.key, value.into(), checksum).map(Response::new)
    }

    async fn batch_put(&self, request: Request<proto::BatchPutRequest>) -> Answer<proto::BatchPutReply> {
        self.state().request_ids.extend(request.get_ref().options.as_ref().and_then(|options| options.ids));
        self.enter("batch_put", &request).await?;
        let message = request.into_inner();
        let mut reply = proto::BatchPutReply::default();
        let refusal = self.state().item_refusals.pop_front();
        if let Some(reason) = refusal {
            reply.outcomes = vec![proto::PutOutcome::Failed as i32; message.keys.len()];
            reply.reasons = vec![reason.into(); message.keys.len()];
            return Ok(Response::new(reply));
        }
        let sums = message.checksums.into_iter().map(Some);
        for ((key, value), sum) in message.keys.into_iter().zip(message.values).zip(sums) {
            let refused = value == "refuse me";
            let outcome =
                if refused { proto::PutOutcome::Failed as i32 } else { self.insert(key, value, sum)?.outcome };
            reply.outcomes.push(outcome);
            reply.reasons.push(if refused { "NO_SPACE".into() } else { String::new() });
        }
        Ok(Response::new(reply))
    }

    async fn get(&self, _: Request<proto::GetRequest>) -> Answer<proto::GetReply> {
        Err(Status::unimplemented("the client reads by stream"))
    }

    async fn get_stream(&self, request: Request<proto::GetRequest>) -> Answer<Self::GetStreamStream> {
        self.enter("get_stream", &request).await?;
        let message = request.into_inner();
        let mut state = self.state();
        let is_current = matches!(message.version.as_str(), "" | "1.1.1");
        let Some(whole) = state.objects.get(&message.key).filter(|_| is_current).cloned() else {
            return Err(status(Code::NotFound, "NOT_FOUND", 0));
        };
        let is_range = message.offset > 0 || message.length.is_some();
        let end = message.length.map_or(whole.len() as u64, |length| message.offset + length);
        if end > whole.len() as u64 || message.offset > end {
            return Err(status(Code::OutOfRange, "BAD_RANGE", 0));
        }
        let range = whole.slice(message.offset as usize..end as usize);
        let checksum = crc32fast::hash(&range);
        let mut sent = range.to_vec();
        if state.damaged_gets > 0 {
            state.damaged_gets -= 1;
            *sent.last_mut().expect("only objects with bytes can be damaged") ^= 1;
        }
        if state.short_gets {
            sent.pop();
        }
        let description = proto::ObjectDescription {
            length: whole.len() as u64,
            checksum: (!is_range).then_some(checksum),
            tier: "nvme".into(),
            version: "1.1.1".into(),
            ..proto::ObjectDescription::default()
        };
        let chunks = sent.chunks(1 << 20).map(|chunk| get_chunk::Part::Data(chunk.to_vec().into()));
        let trailing = is_range.then_some(get_chunk::Part::Checksum(checksum));
        let parts: Vec<_> =
            std::iter::once(get_chunk::Part::Description(description)).chain(chunks).chain(trailing).collect();
        let replies = parts.into_iter().map(|part| Ok(proto::GetChunk { part: Some(part) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(replies))))
    }

    async fn batch_get(&self, request: Request<proto::BatchGetRequest>) -> Answer<Self::BatchGetStream> {
        self.enter("batch_get", &request).await?;
        let state = self.state();
        let mut replies = Vec::new();
        for (first, key) in (0..).zip(&request.get_ref().keys) {
            let value = state.objects.get(key).cloned();
            let large = value.as_ref().is_some_and(|value| value.len() > 2 << 20);
            let outcome = match &value {
                None => proto::GetOutcome::Missing,
                Some(_) if large => proto::GetOutcome::TooLarge,
                Some(_) => proto::GetOutcome::Found,
            };
            let values = value.filter(|_| !large).unwrap_or_default();
            replies.push(Ok(proto::BatchGetReply {
                first,
                outcomes: vec![outcome as i32],
                lengths: vec![values.len() as u64],
                checksums: vec![crc32fast::hash(&values)],
                values,
                tiers: vec![1].into(),
                ..Default::default()
            }));
        }
        Ok(Response::new(Box::pin(tokio_stream::iter(replies))))
    }

    async fn exists(&self, request: Request<proto::ExistsRequest>) -> Answer<proto::ExistsReply> {
        self.enter("exists", &request).await?;
        let state = self.state();
        let outcomes = request.get_ref().keys.iter().map(|key| i32::from(state.objects.contains_key(key)));
        Ok(Response::new(proto::ExistsReply { outcomes: outcomes.collect() }))
    }

    async fn open_session(&self, request: Request<proto::OpenSessionRequest>) -> Answer<proto::OpenSessionReply> {
        self.enter("open_session", &request).await?;
        Ok(Response::new(proto::OpenSessionReply { lifetime_ms: 60_000 }))
    }

    async fn remove(&self, request: Request<proto::RemoveRequest>) -> Answer<proto::RemoveReply> {
        self.state().request_ids.extend(request.get_ref().ids);
        self.enter("remove", &request).await?;
        let mut state = self.state();
        let removed = request.get_ref().keys.iter().map(|key| i32::from(state.objects.remove(key).is_some()));
        Ok(Response::new(proto::RemoveReply { outcomes: removed.collect(), log_index: 77 }))
    }

    async fn remove_matching(
        &self,
        request: Request<proto::RemoveMatchingRequest>,
    ) -> Answer<Self::RemoveMatchingStream> {
        self.enter("remove_matching", &request).await?;
        let step = |removed, done| {
            Ok(proto::RemoveMatchingReply { examined: 10, removed, pinned: 1, done, log_index: removed })
        };
        Ok(Response::new(Box::pin(tokio_stream::iter([step(3, false), step(5, true)]))))
    }

    async fn pin(&self, request: Request<proto::PinRequest>) -> Answer<proto::PinReply> {
        self.enter("pin", &request).await?;
        // One answer too few.
        Ok(Response::new(proto::PinReply { found: Vec::new(), log_index: 0 }))
    }

    async fn unpin(&self, request: Request<proto::PinRequest>) -> Answer<proto::PinReply> {
        self.pin(request).await
    }

    async fn renew_lease(&self, request: Request<proto::LeaseRequest>) -> Answer<proto::LeaseReply> {
        self.enter("renew_lease", &request).await?;
        let message = request.into_inner();
        Ok(Response::new(proto::LeaseReply { granted_ms: vec![message.duration_ms; message.keys.len()] }))
    }

    async fn release_lease(&self, request: Request<proto::LeaseRequest>) -> Answer<proto::LeaseReply> {
        self.renew_lease(request).await
    }

    async fn note_local_reads(&self, _: Request<proto::NoteLocalReadsRequest>) -> Answer<proto::NoteLocalReadsReply> {
        Ok(Response::new(proto::NoteLocalReadsReply {}))
    }

    async fn list(&self, request: Request<proto::ListRequest>) -> Answer<proto::ListReply> {
        self.enter("list", &request).await?;
        let state = self.state();
        let listed = |(key, value): (&Bytes, &Bytes)| proto::ListedObject {
            key: key.clone(),
            length: value.len() as u64,
            ..proto::ListedObject::default()
        };
        let objects = state.objects.iter().map(listed).collect();
        Ok(Response::new(proto::ListReply { objects, next_page_token: String::new() }))
    }

    async fn stat(&self, request: Request<proto::StatRequest>) -> Answer<proto::StatReply> {
        self.enter("stat", &request).await?;
        Err(status(Code::NotFound, "UNKNOWN_TENANT", 0))
    }

    async fn begin_task(&self, request: Request<proto::BeginTaskRequest>) -> Answer<proto::Task> {
        self.state().tasks.push(request.get_ref().task);
        self.enter("begin_task", &request).await?;
        let proto::BeginTaskRequest { task, kind, key, targets, .. } = request.into_inner();
        let state = proto::TaskState::Waiting.into();
        Ok(Response::new(proto::Task { task, kind, key, targets, state, ..proto::Task::default() }))
    }

    async fn get_task(&self, request: Request<proto::TaskRequest>) -> Answer<proto::Task> {
        self.enter("get_task", &request).await?;
        Err(status(Code::NotFound, "NO_SUCH_TASK", 0))
    }

    async fn cancel_task(&self, request: Request<proto::TaskRequest>) -> Answer<proto::Task> {
        self.get_task(request).await
    }

    async fn list_tasks(&self, request: Request<proto::ListTasksRequest>) -> Answer<proto::ListTasksReply> {
        self.enter("list_tasks", &request).await?;
        Ok(Response::new(proto::ListTasksReply::default()))
    }

    /// Has no engine. Not one of the calls that tests count: the client looks around with its first.
    async fn server_info(&self, _: Request<proto::ServerInfoRequest>) -> Answer<proto::ServerInfoReply> {
        Ok(Response::new(proto::ServerInfoReply::default()))
    }
}
