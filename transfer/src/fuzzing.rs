//! Decoders of what peers send, for the fuzz targets; compiled for them alone (`cfg(fuzzing)`).

use crate::rdma::RemoteKeys;
#[cfg(feature = "rdma")]
use crate::rdma::endpoint::Endpoint;
use crate::slice::Direction;
use crate::wire::{
    self, FENCE_BYTES, GREETING_BYTES, Greeting, HEADER_BYTES, Header, ITEM_BYTES, Kind, MAGIC, SegmentInfo,
};

const CHECKED_BYTES: usize = HEADER_BYTES - 4;

/// One frame. Its header's magic and checksum are made to hold.
pub fn frame(bytes: &[u8]) {
    let Some((start, body)) = bytes.split_first_chunk::<CHECKED_BYTES>() else { return };
    let mut head = start.to_vec();
    head[..4].copy_from_slice(&MAGIC.to_le_bytes());
    head.extend(crc32fast::hash(&head).to_le_bytes());
    let Ok(header) = Header::decode(&head) else { return };
    let _any = header.failure();
    let mut again = Vec::new();
    header.encode(&mut again);
    assert_eq!(Header::decode(&again), Ok(header));
    // A reader takes as much as the header says, and no more.
    let body = &body[..body.len().min(usize::try_from(header.length).unwrap_or(usize::MAX))];
    match header.kind {
        Kind::Hello | Kind::Welcome => {
            if let Some(Ok(greeting)) = body.first_chunk::<GREETING_BYTES>().map(Greeting::decode) {
                let again = greeting.encode(header.kind);
                assert_eq!(again[HEADER_BYTES..].first_chunk().map(Greeting::decode), Some(Ok(greeting)));
            }
        }
        Kind::Segment | Kind::Mapped => {
            if let Ok(segment) = SegmentInfo::decode(body) {
                let mut again = Vec::new();
                segment.encode(&mut again);
                assert_eq!(SegmentInfo::decode(&again), Ok(segment));
            }
        }
        Kind::Here => {
            if let Ok(addresses) = wire::decode_addresses(body) {
                assert_eq!(wire::encode_addresses(&addresses), body);
            }
        }
        Kind::Fence => {
            assert_eq!(wire::decode_fence(body).is_ok(), body.len() >= 8);
            assert!(body.len() <= FENCE_BYTES);
        }
        Kind::KeyList => drop(RemoteKeys::decode(body)),
        #[cfg(feature = "rdma")]
        Kind::Paired => drop(body.first_chunk().map(Endpoint::decode)),
        _ => {
            let items = body.as_chunks::<ITEM_BYTES>().0.iter();
            for item in items {
                let _any = wire::decode_item(item, Direction::Read);
            }
            for &status in body {
                let _any = wire::decode_status(status);
            }
        }
    }
}
