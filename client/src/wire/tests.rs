//! Bodies made by hand: what is written frame by frame, and what is understood of answers good and bad.

use std::collections::VecDeque;

use tidepool_metadata::proto::{GetChunk, ObjectDescription, PutReply, get_chunk::Part};

use super::*;

/// A body of these frames.
struct Frames(VecDeque<Result<Frame<Bytes>, Status>>);

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(self.0.pop_front())
    }
}

fn answer(frames: impl IntoIterator<Item = Result<Frame<Bytes>, Status>>) -> http::Response<Body> {
    http::Response::new(Body::new(Frames(frames.into_iter().collect())))
}

fn data(bytes: &[u8]) -> Result<Frame<Bytes>, Status> {
    Ok(Frame::data(Bytes::copy_from_slice(bytes)))
}

fn trailers(status: &Status) -> Result<Frame<Bytes>, Status> {
    let mut trailers = HeaderMap::new();
    status.add_header(&mut trailers).expect("legal headers");
    Ok(Frame::trailers(trailers))
}

fn chunk(part: Part) -> GetChunk {
    GetChunk { part: Some(part) }
}

fn whole(framed: Framed) -> Vec<u8> {
    [framed.head, framed.data].concat()
}

/// All chunks of an answer, and how it ended.
async fn read(answer: http::Response<Body>) -> (Vec<GetChunk>, Result<(), Status>) {
    let mut stream = match ChunkStream::<GetChunk>::response(answer, 1 << 20) {
        Ok(stream) => stream,
        Err(status) => return (Vec::new(), Err(status)),
    };
    let mut chunks = Vec::new();
    loop {
        match stream.message().await {
            Ok(Some(chunk)) => chunks.push(chunk),
            Ok(None) => return (chunks, Ok(())),
            Err(status) => {
                assert!(stream.message().await.expect("says it once").is_none());
                return (chunks, Err(status));
            }
        }
    }
}

async fn frames_of(mut body: Body) -> Vec<Frame<Bytes>> {
    let mut frames = Vec::new();
    while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        frames.push(frame.expect("no error"));
    }
    frames
}

#[tokio::test]
async fn an_answer_is_written_as_heads_data_as_it_was_and_a_status() {
    let value = Bytes::from(vec![7; 100_000]);
    let chunks = [chunk(Part::Checksum(1)), chunk(Part::Data(value.clone())), chunk(Part::Data(Bytes::new()))];
    for status in [None, Some(Status::not_found("gone"))] {
        let messages = chunks.iter().map(|chunk| Ok(Framed::chunk(chunk))).chain(status.clone().map(Err));
        let messages: Vec<_> = messages.collect();
        let frames = frames_of(MessageBody::response(futures::stream::iter(messages))).await;
        let (last, data) = frames.split_last().expect("at least the status");
        let sent: Vec<&Bytes> = data.iter().map(|frame| frame.data_ref().expect("data before the status")).collect();
        let all: Vec<u8> = chunks.iter().flat_map(|chunk| whole(Framed::chunk(chunk))).collect();
        assert!(sent.iter().flat_map(|bytes| bytes.iter()).eq(&all));
        assert!(sent.iter().any(|bytes| bytes.as_ptr() == value.as_ptr()), "the value was copied");
        let written = Status::from_header_map(last.trailers_ref().expect("trailers")).expect("a status");
        let (code, message) =
            status.map_or((Code::Ok, String::new()), |status| (status.code(), status.message().into()));
        assert_eq!((written.code(), written.message()), (code, message.as_str()));
    }
}

#[tokio::test]
async fn a_request_ends_without_a_status() {
    let message = Framed::message(&PutReply { log_index: 3, ..PutReply::default() });
    let frames = frames_of(MessageBody::request(futures::stream::iter([message.clone()]))).await;
    assert_eq!(frames.len(), 1);
    assert_eq!(frames[0].data_ref(), Some(&message.head));
}

#[tokio::test]
async fn chunks_are_read_across_frames_and_data_is_not_copied() {
    let description = Part::Description(ObjectDescription { length: 5000, ..ObjectDescription::default() });
    let value = Bytes::from(vec![9; 5000]);
    let (first, second) =
        (Framed::chunk(&chunk(description.clone())), Framed::chunk(&chunk(Part::Data(value.clone()))));
    let head = [whole(first), second.head.to_vec()].concat();
    let (a, b) = head.split_at(3);
    let pieces = [value.slice(..2000), value.slice(2000..)];
    let frames = [data(a), data(b), data(b""), Ok(Frame::data(pieces[0].clone())), Ok(Frame::data(pieces[1].clone()))];
    let (chunks, end) = read(answer(frames.into_iter().chain([trailers(&Status::ok(""))]))).await;
    end.expect("is good");
    assert_eq!(
        chunks,
        [chunk(description), chunk(Part::Data(pieces[0].clone())), chunk(Part::Data(pieces[1].clone()))]
    );
    let Some(Part::Data(read)) = &chunks[1].part else { panic!("{chunks:?}") };
    assert_eq!(read.as_ptr(), value.as_ptr());
}

#[tokio::test]
async fn the_senders_status_counts_more_than_how_its_stream_ended() {
    let sent = whole(Framed::chunk(&chunk(Part::Data(vec![1; 100].into()))));
    let (chunks, end) = read(answer([data(&sent[..50]), trailers(&Status::data_loss("damaged"))])).await;
    assert_eq!((chunks.len(), end.expect_err("fails").code()), (1, Code::DataLoss));
    let (_, end) = read(answer([data(&sent[..50]), trailers(&Status::ok(""))])).await;
    assert_eq!(end.expect_err("is cut").code(), Code::Internal);
    let (chunks, end) = read(answer([data(&sent), trailers(&Status::unavailable("stopping"))])).await;
    assert_eq!((chunks.len(), end.expect_err("fails").code()), (1, Code::Unavailable));
}

#[tokio::test]
async fn an_answer_without_a_status_is_an_error() {
    let sent = whole(Framed::chunk(&chunk(Part::Checksum(1))));
    let (chunks, end) = read(answer([data(&sent)])).await;
    assert_eq!((chunks.len(), end.expect_err("no status").code()), (1, Code::Unknown));
    let mut proxy = answer([data(b"")]);
    *proxy.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    assert_eq!(read(proxy).await.1.expect_err("no status").code(), Code::Unavailable);
    assert_eq!(read(answer([Err(Status::cancelled("reset"))])).await.1.expect_err("reset").code(), Code::Cancelled);
}

#[tokio::test]
async fn a_status_in_the_headers_needs_no_trailers() {
    let mut refused = answer([]);
    Status::not_found("no").add_header(refused.headers_mut()).expect("legal headers");
    assert_eq!(read(refused).await.1.expect_err("refused").code(), Code::NotFound);
    let mut empty = answer([]);
    Status::ok("").add_header(empty.headers_mut()).expect("legal headers");
    read(empty).await.1.expect("is good");
}

#[tokio::test]
async fn hostile_framing_is_refused() {
    let compressed = read(answer([data(&[1, 0, 0, 0, 0])])).await.1.expect_err("flag");
    assert_eq!(compressed.code(), Code::Internal);
    let giant = read(answer([data(&[0, 0xff, 0xff, 0xff, 0xff])])).await.1.expect_err("length");
    assert_eq!(giant.code(), Code::OutOfRange);
    let nonsense = read(answer([data(&[0, 0, 0, 0, 2, 0x12, 9])])).await.1.expect_err("no protobuf");
    assert_eq!(nonsense.code(), Code::Internal);
    let mut encoded = answer([trailers(&Status::ok(""))]);
    encoded.headers_mut().insert("grpc-encoding", http::HeaderValue::from_static("gzip"));
    assert_eq!(read(encoded).await.1.expect_err("compressed").code(), Code::Unimplemented);
}

#[tokio::test]
async fn one_reply_is_read_with_its_status() {
    let message = PutReply { log_index: 3, ..PutReply::default() };
    let sent = whole(Framed::message(&message));
    let good: PutReply = reply(answer([data(&sent), trailers(&Status::ok(""))]), 1 << 20).await.expect("is good");
    assert_eq!(good, message);
    let late = reply::<PutReply>(answer([data(&sent), trailers(&Status::internal("late"))]), 1 << 20).await;
    assert_eq!(late.expect_err("failed after its message").code(), Code::Internal);
    let none = reply::<PutReply>(answer([trailers(&Status::ok(""))]), 1 << 20).await;
    assert_eq!(none.expect_err("no message").code(), Code::Internal);
}
