//! `tidepool.v1` over gRPC: thin adapters of [`NodeService`]; what they add is conversion, limits and deadlines.

mod batch;
pub(crate) mod convert;
mod limits;
mod manage;
mod object;
mod serve;
mod tasks;
mod values;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use tidepool_metadata::proto;
use tonic::{Request, Response, Status, Streaming};

use crate::node::NodeService;

pub use limits::Inflight;
pub(crate) use object::describe;
pub use serve::{GrpcServer, MAX_MESSAGE_BYTES};
pub(crate) use serve::{bind_unix, cannot_listen};

/// Generated server traits; the messages are `tidepool_metadata::proto`.
#[expect(clippy::allow_attributes, unreachable_pub, unused_qualifications, reason = "generated")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/tidepool.v1.rs"));
}

pub use generated::store_server::{Store, StoreServer};

/// Largest value of a unary call, in bytes; larger ones are streamed.
pub const MAX_UNARY_BYTES: u32 = 4 << 20;

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The service as gRPC sees it.
#[derive(Clone)]
pub struct StoreApi {
    pub(crate) service: NodeService,
    pub(crate) inflight: Inflight,
    host: Arc<HostInfo>,
}

/// What clients are told of the process, beside what the node says.
#[derive(Debug)]
pub struct HostInfo {
    /// The cluster's id.
    pub cluster: u64,
    /// Where the transfer engine listens.
    pub engine: Option<SocketAddr>,
    /// The data folder, if sockets for this host's clients lie in it.
    pub folder: Option<PathBuf>,
}

impl StoreApi {
    /// Adapts `service`; values in flight are bounded by `inflight`.
    #[must_use]
    pub fn new(service: NodeService, inflight: Inflight, host: Arc<HostInfo>) -> Self {
        Self { service, inflight, host }
    }
}

#[tonic::async_trait]
impl Store for StoreApi {
    type GetStreamStream = Replies<proto::GetChunk>;
    type BatchGetStream = Replies<proto::BatchGetReply>;
    type RemoveMatchingStream = Replies<proto::RemoveMatchingReply>;

    async fn put(&self, request: Request<proto::PutRequest>) -> Result<Response<proto::PutReply>, Status> {
        Ok(Response::new(self.put_object(request.into_inner()).await?))
    }

    async fn put_stream(
        &self,
        request: Request<Streaming<proto::PutChunk>>,
    ) -> Result<Response<proto::PutReply>, Status> {
        Ok(Response::new(self.put_chunks(request.into_inner()).await?))
    }

    async fn batch_put(
        &self,
        request: Request<proto::BatchPutRequest>,
    ) -> Result<Response<proto::BatchPutReply>, Status> {
        Ok(Response::new(self.put_objects(request.into_inner()).await?))
    }

    async fn get(&self, request: Request<proto::GetRequest>) -> Result<Response<proto::GetReply>, Status> {
        Ok(Response::new(self.get_object(request.into_inner()).await?))
    }

    async fn get_stream(&self, request: Request<proto::GetRequest>) -> Result<Response<Self::GetStreamStream>, Status> {
        Ok(Response::new(self.get_chunks(request.into_inner()).await?))
    }

    async fn batch_get(
        &self,
        request: Request<proto::BatchGetRequest>,
    ) -> Result<Response<Self::BatchGetStream>, Status> {
        Ok(Response::new(self.get_objects(request.into_inner()).await?))
    }

    async fn exists(&self, request: Request<proto::ExistsRequest>) -> Result<Response<proto::ExistsReply>, Status> {
        Ok(Response::new(self.exists_keys(request.into_inner()).await?))
    }

    async fn open_session(
        &self,
        request: Request<proto::OpenSessionRequest>,
    ) -> Result<Response<proto::OpenSessionReply>, Status> {
        Ok(Response::new(self.begin_session(request.into_inner()).await?))
    }

    async fn remove(&self, request: Request<proto::RemoveRequest>) -> Result<Response<proto::RemoveReply>, Status> {
        Ok(Response::new(self.remove_keys(request.into_inner()).await?))
    }

    async fn remove_matching(
        &self,
        request: Request<proto::RemoveMatchingRequest>,
    ) -> Result<Response<Self::RemoveMatchingStream>, Status> {
        Ok(Response::new(self.remove_filtered(request.into_inner()).await?))
    }

    async fn pin(&self, request: Request<proto::PinRequest>) -> Result<Response<proto::PinReply>, Status> {
        Ok(Response::new(self.change_pins(request.into_inner(), true).await?))
    }

    async fn unpin(&self, request: Request<proto::PinRequest>) -> Result<Response<proto::PinReply>, Status> {
        Ok(Response::new(self.change_pins(request.into_inner(), false).await?))
    }

    async fn renew_lease(&self, request: Request<proto::LeaseRequest>) -> Result<Response<proto::LeaseReply>, Status> {
        Ok(Response::new(self.renew(request.into_inner()).await?))
    }

    async fn note_local_reads(
        &self,
        request: Request<proto::NoteLocalReadsRequest>,
    ) -> Result<Response<proto::NoteLocalReadsReply>, Status> {
        Ok(Response::new(self.note_reads(request.into_inner()).await?))
    }

    async fn release_lease(
        &self,
        request: Request<proto::LeaseRequest>,
    ) -> Result<Response<proto::LeaseReply>, Status> {
        Ok(Response::new(self.release(request.into_inner()).await?))
    }

    async fn list(&self, request: Request<proto::ListRequest>) -> Result<Response<proto::ListReply>, Status> {
        Ok(Response::new(self.list_page(request.into_inner()).await?))
    }

    async fn stat(&self, request: Request<proto::StatRequest>) -> Result<Response<proto::StatReply>, Status> {
        Ok(Response::new(self.stat_object(request.into_inner()).await?))
    }

    async fn begin_task(&self, request: Request<proto::BeginTaskRequest>) -> Result<Response<proto::Task>, Status> {
        Ok(Response::new(self.start_task(request.into_inner()).await?))
    }

    async fn get_task(&self, request: Request<proto::TaskRequest>) -> Result<Response<proto::Task>, Status> {
        Ok(Response::new(self.show_task(request.into_inner()).await?))
    }

    async fn cancel_task(&self, request: Request<proto::TaskRequest>) -> Result<Response<proto::Task>, Status> {
        Ok(Response::new(self.end_task(request.into_inner()).await?))
    }

    async fn list_tasks(
        &self,
        request: Request<proto::ListTasksRequest>,
    ) -> Result<Response<proto::ListTasksReply>, Status> {
        Ok(Response::new(self.task_page(request.into_inner()).await?))
    }

    async fn server_info(
        &self,
        request: Request<proto::ServerInfoRequest>,
    ) -> Result<Response<proto::ServerInfoReply>, Status> {
        Ok(Response::new(self.info(request.into_inner()).await?))
    }
}
