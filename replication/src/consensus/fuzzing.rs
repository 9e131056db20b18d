//! Decoders of what members send and logs hold, for the fuzz targets; compiled for them alone (`cfg(fuzzing)`).

use tidepool_metadata::LogIndex;

use super::envelope::{Envelope, Group};
use super::{ClusterEpoch, ClusterId, Members, entry};

const GROUP: Group = Group { cluster: ClusterId(7), epoch: ClusterEpoch(1) };

/// A message, an entry and a list of members in these bytes. What must be right before anything is looked at is made to
/// hold.
pub fn message(bytes: &[u8]) {
    if let Some((head, body)) = bytes.split_first_chunk::<2>() {
        let mut message = head.to_vec();
        message.extend_from_slice(&GROUP.cluster.0.to_le_bytes());
        message.extend_from_slice(&GROUP.epoch.0.to_le_bytes());
        message.extend_from_slice(body);
        if let Ok(envelope) = Envelope::decode(&message, GROUP) {
            assert_eq!(envelope.encode(GROUP), message);
        }
    }
    if let Some((version, rest)) = bytes.split_first() {
        let payload = [&[*version][..], &crc32fast::hash(rest).to_le_bytes(), rest].concat();
        if let Ok(read) = entry::read(LogIndex(1), &payload) {
            assert!(entry::origins(&payload).count() <= read.commands.len());
        }
        // Without a checksum too: it is asked for before that is looked at.
        assert!(entry::origins(bytes).count() <= bytes.len());
    }
    if let Some(members) = Members::decode(bytes) {
        assert_eq!(Members::decode(&members.encode()), Some(members));
    }
}
