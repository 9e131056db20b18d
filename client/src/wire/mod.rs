//! Bodies of calls that stream values, without tonic's codec between the value and the transport.
//!
//! The codec is one contiguous buffer on either side: it copies each message that goes out, and each transport frame
//! that comes in. Here data goes to the transport as the caller holds it, and comes from there as it was received. On
//! the wire it is the same: any gRPC client or server is at the other end ([`tidepool_metadata::framing`]).
//!
//! Used by this client and by the server; what else a call needs (path, headers, deadline) stays with them.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{HeaderMap, StatusCode};
use http_body::{Body as _, Frame};
use prost::Message;
use sync_wrapper::SyncWrapper;
use tidepool_metadata::framing::{Chunk, ChunkReader, Framed, FramingError};
use tonic::body::Body;
use tonic::codec::Streaming;
use tonic::{Code, Status};
use tonic_prost::ProstDecoder;

/// What goes out: messages, then in an answer the status.
#[derive(Debug)]
pub struct MessageBody<S> {
    messages: S,
    /// Of the message whose head is out.
    data: Bytes,
    /// Whether the status is still to follow.
    has_status: bool,
}

impl MessageBody<()> {
    /// The body of a request.
    pub fn request(messages: impl Stream<Item = Framed> + Send + Unpin + 'static) -> Body {
        Body::new(MessageBody { messages: messages.map(Ok), data: Bytes::new(), has_status: false })
    }

    /// The body of an answer. An error is its last item and becomes its status.
    pub fn response(messages: impl Stream<Item = Result<Framed, Status>> + Send + Unpin + 'static) -> Body {
        Body::new(MessageBody { messages, data: Bytes::new(), has_status: true })
    }
}

impl<S: Stream<Item = Result<Framed, Status>> + Unpin> http_body::Body for MessageBody<S> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if !self.data.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.data)))));
        }
        let status = match ready!(self.messages.poll_next_unpin(cx)) {
            Some(Ok(Framed { head, data })) => {
                self.data = data;
                return Poll::Ready(Some(Ok(Frame::data(head))));
            }
            Some(Err(status)) => status,
            None => Status::ok(""),
        };
        if !std::mem::take(&mut self.has_status) {
            return Poll::Ready(None);
        }
        let mut trailers = HeaderMap::new();
        Poll::Ready(Some(status.add_header(&mut trailers).map(|()| Frame::trailers(trailers))))
    }
}

/// What comes in: chunks, those with data in the pieces in which the transport received them.
#[derive(Debug)]
pub struct ChunkStream<C> {
    body: SyncWrapper<Body>,
    reader: ChunkReader<C>,
    /// Received, not yet read.
    input: Bytes,
    /// Of an answer whose status is still to come.
    answer: Option<StatusCode>,
    is_over: bool,
}

impl<C: Chunk> ChunkStream<C> {
    /// Reads a request; messages of more than `limit` bytes are refused.
    ///
    /// # Errors
    /// `UNIMPLEMENTED` if it is compressed.
    pub fn request(request: http::Request<Body>, limit: usize) -> Result<Self, Status> {
        refuse_compression(request.headers())?;
        Ok(Self::new(request.into_body(), limit, None))
    }

    /// Reads an answer; messages of more than `limit` bytes are refused.
    ///
    /// # Errors
    /// The answer's status, if it has no messages.
    pub fn response(response: http::Response<Body>, limit: usize) -> Result<Self, Status> {
        let answer = status_to_come(&response)?;
        Ok(Self::new(response.into_body(), limit, answer))
    }

    fn new(body: Body, limit: usize, answer: Option<StatusCode>) -> Self {
        let (body, reader) = (SyncWrapper::new(body), ChunkReader::new(limit));
        Self { body, reader, input: Bytes::new(), answer, is_over: false }
    }

    /// The next chunk, or the next piece of one with data; `None` at the end. Cancel-safe.
    ///
    /// # Errors
    /// The answer's status; `INTERNAL` or `OUT_OF_RANGE` for what is no stream of chunks; the transport's.
    pub async fn message(&mut self) -> Result<Option<C>, Status> {
        self.next().await.transpose()
    }

    fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<C, Status>>> {
        loop {
            match self.reader.read(&mut self.input) {
                Ok(Some(chunk)) => return Poll::Ready(Some(Ok(chunk))),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Some(Err(broken(&error)))),
            }
            let end = match ready!(Pin::new(self.body.get_mut()).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        self.input = data;
                        continue;
                    }
                    Err(other) => other.into_trailers().ok(),
                },
                Some(Err(status)) => return Poll::Ready(Some(Err(status))),
                None => None,
            };
            // What the sender says of its failure comes before what can be seen of it.
            let ended = self.answer.map_or(Ok(()), |code| status_of(end.as_ref(), code));
            let ended = ended.and_then(|()| self.reader.end().map_err(|error| broken(&error)));
            self.is_over = true;
            return Poll::Ready(ended.err().map(Err));
        }
    }
}

impl<C: Chunk> Stream for ChunkStream<C> {
    type Item = Result<C, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let message = ready!(self.poll_message(cx));
        self.is_over |= !matches!(message, Some(Ok(_)));
        Poll::Ready(message)
    }
}

/// The one message of an answer.
///
/// # Errors
/// The answer's status, or the transport's.
pub async fn reply<M: Message + Default + 'static>(response: http::Response<Body>, limit: usize) -> Result<M, Status> {
    let answer = status_to_come(&response)?;
    let (decoder, body) = (ProstDecoder::default(), response.into_body());
    let mut messages: Streaming<M> = match answer {
        Some(code) => Streaming::new_response(decoder, body, code, None, Some(limit)),
        None => Streaming::new_empty(decoder, body),
    };
    let message = messages.message().await?.ok_or_else(|| Status::internal("the answer has no message"))?;
    messages.trailers().await?;
    Ok(message)
}

/// Refuses a body whose headers say that it is compressed, as gRPC asks for: with what would be taken.
///
/// # Errors
/// `UNIMPLEMENTED`.
pub fn refuse_compression(headers: &HeaderMap) -> Result<(), Status> {
    match headers.get("grpc-encoding").map(http::HeaderValue::as_bytes) {
        None | Some(b"identity") => Ok(()),
        Some(other) => {
            let other = String::from_utf8_lossy(other);
            let mut status = Status::unimplemented(format!("messages are compressed with {other}: send identity"));
            status
                .metadata_mut()
                .insert("grpc-accept-encoding", tonic::metadata::MetadataValue::from_static("identity"));
            Err(status)
        }
    }
}

/// The code of an answer whose status follows its messages; `None` if it came before them and is good.
fn status_to_come(response: &http::Response<Body>) -> Result<Option<StatusCode>, Status> {
    refuse_compression(response.headers())?;
    match Status::from_header_map(response.headers()) {
        None => Ok(Some(response.status())),
        Some(status) if status.code() == Code::Ok => Ok(None),
        Some(status) => Err(status),
    }
}

/// What the end of an answer says. Without a status, HTTP's code has to do (gRPC: http-grpc-status-mapping).
fn status_of(trailers: Option<&HeaderMap>, code: StatusCode) -> Result<(), Status> {
    if let Some(status) = trailers.and_then(Status::from_header_map) {
        return if status.code() == Code::Ok { Ok(()) } else { Err(status) };
    }
    let meant = match code {
        StatusCode::BAD_REQUEST => Code::Internal,
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::NOT_FOUND => Code::Unimplemented,
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => Code::Unavailable,
        _ => Code::Unknown,
    };
    Err(Status::new(meant, format!("the answer ended without a status of gRPC, with {code} of HTTP")))
}

fn broken(error: &FramingError) -> Status {
    match error {
        FramingError::TooLong { .. } => Status::out_of_range(error.to_string()),
        FramingError::Flag { .. } | FramingError::Malformed(_) | FramingError::Truncated => {
            Status::internal(error.to_string())
        }
    }
}

#[cfg(test)]
mod tests;
