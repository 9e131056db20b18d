//! Streamed values as bytes on the wire: what other clients send is understood, what none should send does no harm.

use bytes::Bytes;
use futures::StreamExt;
use http::header::CONTENT_TYPE;
use prost::Message;
use tidepool_client::wire::{MessageBody, reply};
use tidepool_metadata::framing::Framed;
use tidepool_metadata::proto::{self, ErrorDetail, put_chunk::Part};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tower::ServiceExt;

use crate::common::TestServer;

const VALUE: &[u8] = b"some bytes of a value";

async fn channel(server: &TestServer) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{}", server.server.addresses().grpc)).unwrap();
    endpoint.connect().await.unwrap()
}

/// A put whose body is made of these pieces, as they are.
async fn put(channel: &Channel, pieces: Vec<Bytes>, encoding: Option<&'static str>) -> Result<proto::PutReply, Status> {
    let pieces = pieces.into_iter().map(|head| Framed { head, data: Bytes::new() });
    let mut request = http::Request::post("/tidepool.v1.Store/PutStream");
    if let Some(encoding) = encoding {
        request = request.header("grpc-encoding", encoding);
    }
    let request = request.header(CONTENT_TYPE, "application/grpc").header("te", "trailers");
    let request = request.body(MessageBody::request(futures::stream::iter(pieces))).unwrap();
    let response = channel.clone().oneshot(request).await.map_err(|error| Status::from_error(error.into()))?;
    reply(response, 1 << 20).await
}

fn message(part: Option<Part>) -> Vec<u8> {
    framed(&proto::PutChunk { part }.encode_to_vec())
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
}

fn announce(key: &str, length: usize) -> Vec<u8> {
    let key = Bytes::copy_from_slice(key.as_bytes());
    message(Some(Part::Announce(proto::PutAnnounce { key, length: length as u64, ..Default::default() })))
}

fn data(bytes: &'static [u8]) -> Vec<u8> {
    message(Some(Part::Data(bytes.into())))
}

fn checksum() -> Vec<u8> {
    message(Some(Part::Checksum(crc32fast::hash(VALUE))))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_cut_at_any_byte_is_stored() {
    let server = TestServer::start().await;
    let (channel, client) = (channel(&server).await, server.client());
    let stream = |key: &str| Bytes::from([announce(key, VALUE.len()), data(VALUE), checksum()].concat());
    for cut in 1..stream("key/00").len() {
        let key = format!("key/{cut:02}");
        let mut second = stream(&key);
        let first = second.split_to(cut);
        put(&channel, vec![first, second], None).await.unwrap();
        assert_eq!(client.get(&key).await.unwrap().unwrap().value, VALUE, "cut at {cut}");
    }
    let bytes = stream("single").into_iter().map(|byte| Bytes::from(vec![byte])).collect();
    put(&channel, bytes, None).await.unwrap();
    assert_eq!(client.get("single").await.unwrap().unwrap().value, VALUE);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_protobuf_allows_is_understood() {
    let server = TestServer::start().await;
    let (channel, client) = (channel(&server).await, server.client());
    let chunk = |part| proto::PutChunk { part: Some(part) }.encode_to_vec();
    let unknown = [0x7a, 2, 1, 2];
    let half = VALUE.len() / 2;
    let puts = [
        ("empty messages", vec![message(None), data(b""), data(VALUE), data(b""), message(None)]),
        ("unknown fields alone", vec![framed(&unknown), data(VALUE)]),
        ("unknown field before data", vec![framed(&[&unknown[..], &chunk(Part::Data(VALUE.into()))].concat())]),
        ("unknown field after data", vec![framed(&[&chunk(Part::Data(VALUE.into()))[..], &unknown].concat())]),
        (
            "the last of two data wins",
            vec![framed(&[chunk(Part::Data("x".into())), chunk(Part::Data(VALUE.into()))].concat())],
        ),
        (
            "a length in more bytes than needed",
            vec![framed(&[&[0x12, 0x80 | VALUE.len() as u8, 0][..], VALUE].concat())],
        ),
        ("two messages", vec![data(&VALUE[..half]), data(&VALUE[half..]), checksum()]),
    ];
    for (name, messages) in puts {
        let stream = [announce(name, VALUE.len()), messages.concat()].concat();
        put(&channel, vec![stream.into()], Some("identity")).await.unwrap_or_else(|status| panic!("{name}: {status}"));
        assert_eq!(client.get(name).await.unwrap().unwrap().value, VALUE, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_framing_gets_a_status_and_stores_nothing() {
    let server = TestServer::start().await;
    let channel = channel(&server).await;
    let start = || announce("k", VALUE.len());
    let whole = [start(), data(VALUE), checksum()].concat();
    let cases = [
        ("compressed", [start(), vec![1, 0, 0, 0, 1, 0]].concat(), Code::Internal, ""),
        ("unknown flag", vec![7, 0, 0, 0, 1, 0], Code::Internal, ""),
        ("giant length", [start(), vec![0, 0xff, 0xff, 0xff, 0xff, 0x12]].concat(), Code::OutOfRange, ""),
        (
            "giant data in a small message",
            [start(), framed(&[0x12, 0xff, 0xff, 0xff, 0xff, 0x7f])].concat(),
            Code::Internal,
            "",
        ),
        ("no protobuf", [start(), framed(&[0xff; 20])].concat(), Code::Internal, ""),
        ("ended in a prefix", whole[..start().len() + 3].to_vec(), Code::Internal, ""),
        ("ended in the data", whole[..start().len() + 15].to_vec(), Code::Internal, ""),
        ("ended in the checksum", whole[..whole.len() - 1].to_vec(), Code::Internal, ""),
        ("second announce", [start(), start(), data(VALUE)].concat(), Code::InvalidArgument, "LENGTH_MISMATCH"),
        ("data first", data(VALUE), Code::InvalidArgument, "LENGTH_MISMATCH"),
        ("nothing", vec![], Code::InvalidArgument, "LENGTH_MISMATCH"),
        ("too much data", [start(), data(VALUE), data(b"x")].concat(), Code::InvalidArgument, "LENGTH_MISMATCH"),
        ("too little data", [start(), data(&VALUE[1..])].concat(), Code::InvalidArgument, "LENGTH_MISMATCH"),
        (
            "other data",
            [start(), data(b"some bytes of a volue"), checksum()].concat(),
            Code::InvalidArgument,
            "CHECKSUM_MISMATCH",
        ),
    ];
    for (name, stream, code, reason) in cases {
        let status = put(&channel, vec![stream.into()], None).await.expect_err(name);
        let detail = ErrorDetail::decode(status.details()).unwrap();
        assert_eq!((status.code(), detail.reason.as_str()), (code, reason), "{name}: {status}");
    }
    let status = put(&channel, vec![whole.into()], Some("gzip")).await.expect_err("compressed");
    assert_eq!(status.code(), Code::Unimplemented);
    assert_eq!(status.metadata().get("grpc-accept-encoding").unwrap(), "identity");
    server.assert_nothing_stored().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generated_client_puts_and_gets_what_ours_does() {
    let server = TestServer::start().await;
    let mut raw = server.raw().await;
    let value: Bytes = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect::<Vec<_>>().into();
    let (key, length) = (Bytes::from_static(b"k"), value.len() as u64);
    let announce = Part::Announce(proto::PutAnnounce { key: key.clone(), length, ..Default::default() });
    let data = [0..1_000_000, 1_000_000..3_000_000].map(|range| Part::Data(value.slice(range)));
    let parts = std::iter::once(announce).chain(data).map(|part| proto::PutChunk { part: Some(part) });
    let stored = raw.put_stream(futures::stream::iter(parts)).await.unwrap().into_inner();
    assert_eq!(stored.checksum, crc32fast::hash(&value));
    let request = proto::GetRequest { key, ..Default::default() };
    let mut chunks = raw.get_stream(request).await.unwrap().into_inner();
    let mut got = Vec::new();
    while let Some(chunk) = chunks.next().await {
        match chunk.unwrap().part.unwrap() {
            proto::get_chunk::Part::Description(description) => assert_eq!(description.length, length),
            proto::get_chunk::Part::Data(data) => got.extend_from_slice(&data),
            other @ proto::get_chunk::Part::Checksum(_) => panic!("{other:?}"),
        }
    }
    assert!(got == value);
    assert!(server.client().get("k").await.unwrap().unwrap().value == value);
    let absent = proto::GetRequest { key: Bytes::from_static(b"absent"), ..Default::default() };
    let status = raw.get_stream(absent).await.expect_err("missing");
    assert_eq!(ErrorDetail::decode(status.details()).unwrap().reason, "NOT_FOUND");
}
