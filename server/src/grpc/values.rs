//! PutStream and GetStream without a codec between tier and transport ([`tidepool_client::wire`]).
//!
//! Stands before the generated service and takes these two calls from it; all others pass through. What the calls do
//! is in `object.rs`, for both.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::{StreamExt, stream};
use http::header::CONTENT_TYPE;
use tidepool_client::wire::{ChunkStream, MessageBody, refuse_compression};
use tidepool_metadata::framing::Framed;
use tidepool_metadata::proto;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::Streaming;
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::server::NamedService;
use tonic_prost::ProstDecoder;
use tower::Service;

use super::{MAX_MESSAGE_BYTES, StoreApi, StoreServer};

const PUT_STREAM: &str = "/tidepool.v1.Store/PutStream";
const GET_STREAM: &str = "/tidepool.v1.Store/GetStream";

type Answer = http::Response<Body>;

/// `store`, but for the two calls that stream values.
#[derive(Clone)]
pub(super) struct ValueStreams<S> {
    pub(super) store: S,
    pub(super) api: StoreApi,
}

impl<S> NamedService for ValueStreams<S> {
    const NAME: &'static str = <StoreServer<StoreApi> as NamedService>::NAME;
}

impl<S> Service<http::Request<Body>> for ValueStreams<S>
where
    S: Service<http::Request<Body>, Response = Answer, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Answer;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Answer, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.store.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let api = self.api.clone();
        match request.uri().path() {
            PUT_STREAM => Box::pin(async move { Ok(answer(put_stream(&api, request).await)) }),
            GET_STREAM => Box::pin(async move { Ok(answer(get_stream(&api, request).await)) }),
            _ => Box::pin(self.store.call(request)),
        }
    }
}

async fn put_stream(api: &StoreApi, request: http::Request<Body>) -> Result<Body, Status> {
    let chunks = ChunkStream::<proto::PutChunk>::request(request, MAX_MESSAGE_BYTES)?;
    let reply = api.put_chunks(chunks).await?;
    Ok(MessageBody::response(stream::iter([Ok(Framed::message(&reply))])))
}

async fn get_stream(api: &StoreApi, request: http::Request<Body>) -> Result<Body, Status> {
    refuse_compression(request.headers())?;
    let decoder = ProstDecoder::<proto::GetRequest>::default();
    let mut messages = Streaming::new_request(decoder, request.into_body(), None, Some(MAX_MESSAGE_BYTES));
    let message = messages.message().await?.ok_or_else(|| Status::internal("the request has no message"))?;
    let chunks = api.get_chunks(message).await?;
    Ok(MessageBody::response(chunks.map(|chunk| chunk.map(|chunk| Framed::chunk(&chunk)))))
}

fn answer(body: Result<Body, Status>) -> Answer {
    body.map_or_else(Status::into_http, |body| {
        let mut answer = Answer::new(body);
        answer.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
        answer
    })
}
