//! Requests and answers between clients and nodes by the engine, and the protobuf in them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message as _;
use tidepool_metadata::{envelope, proto};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(request) = envelope::Request::decode(bytes) {
        assert_eq!(request.message.len() + request.values.len() + 9, bytes.len());
        let _any = proto::BatchPutRequest::decode(request.message);
        let _any = proto::GetRequest::decode(request.message);
        let _any = proto::ExistsRequest::decode(request.message);
    }
    if let Some(head) = bytes.first_chunk() {
        let _any = envelope::answer_head(*head);
    }
});
