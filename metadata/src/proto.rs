//! The messages of `tidepool.v1`, generated from `proto/tidepool/v1/store.proto`. Domain types are separate;
//! they are converted at the edge.
#![expect(missing_docs, reason = "documented in the .proto file")]

include!(concat!(env!("OUT_DIR"), "/tidepool.v1.rs"));

/// The encoded `FileDescriptorSet`, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tidepool.v1.bin"));
