//! What lies on the NVMe tier's disk. Checksums are made to hold, because the disk may have been written by anybody.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidepool_metadata::CHUNK_BYTES;
use tidepool_tiers::nvme::format::{
    Epoch, HEAD_FIXED_BYTES, RecordHead, RegionHeader, Superblock, TRAILER_BYTES, Tombstone, Trailer, decode_entries,
    payload_offset,
};

const EPOCH: Epoch = Epoch { sequence: 3, salt: 4 };

fn seal(bytes: &mut [u8], covered: usize) {
    let checksum = crc32fast::hash(&bytes[..covered]);
    bytes[covered..covered + 4].copy_from_slice(&checksum.to_le_bytes());
}

/// Gives a record's head the magic, the epoch and the checksum that it would have.
fn seal_head(head: &mut [u8]) {
    head[..4].copy_from_slice(b"TPRC");
    head[16..24].copy_from_slice(&EPOCH.sequence.to_le_bytes());
    head[24..32].copy_from_slice(&EPOCH.salt.to_le_bytes());
    let key = usize::from(u16::from_le_bytes([head[6], head[7]]));
    let slice = u32::from_le_bytes([head[92], head[93], head[94], head[95]]) as usize;
    let chunks = if head[4] == 1 { slice.div_ceil(CHUNK_BYTES) } else { 0 };
    let end = (HEAD_FIXED_BYTES + key).next_multiple_of(4) + 4 * chunks;
    if let Some(rest) = head.get(12..end) {
        let mut sum = crc32fast::Hasher::new();
        sum.update(&head[..8]);
        sum.update(rest);
        let checksum = sum.finalize();
        head[8..12].copy_from_slice(&checksum.to_le_bytes());
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, rest)) = bytes.split_first() else { return };
    let mut bytes = rest.to_vec();
    match kind % 5 {
        0 if bytes.len() >= 40 => {
            bytes[..8].copy_from_slice(b"TPNVMSUP");
            seal(&mut bytes, 36);
            if let Ok(block) = Superblock::decode(&bytes) {
                assert_eq!(block.encode()[..36], bytes[..36]);
            }
        }
        1 if bytes.len() >= 36 => {
            bytes[..8].copy_from_slice(b"TPREGION");
            seal(&mut bytes, 32);
            if let Some(header) = RegionHeader::decode(&bytes) {
                let mut page = vec![0; 4096];
                header.encode(&mut page);
                assert_eq!(RegionHeader::decode(&page), Some(header));
            }
        }
        2 if bytes.len() >= HEAD_FIXED_BYTES => {
            seal_head(&mut bytes);
            match RecordHead::decode(&bytes, EPOCH) {
                Some(RecordHead::Slice { header, chunks, record_bytes }) => {
                    assert_eq!(chunks.len(), (header.slice_length as usize).div_ceil(CHUNK_BYTES));
                    assert!(payload_offset(record_bytes, header.slice_length as usize).is_some());
                }
                Some(RecordHead::Tombstones { payload_bytes, record_bytes, .. }) => {
                    assert!(payload_offset(record_bytes, payload_bytes).is_some());
                }
                None => {}
            }
        }
        3 if bytes.len() >= TRAILER_BYTES => {
            let at = bytes.len() - TRAILER_BYTES;
            bytes[at..at + 8].copy_from_slice(b"TPFOOTER");
            seal(&mut bytes[at..], 60);
            if let Some(trailer) = Trailer::decode(&bytes, 1 << 20) {
                assert!(trailer.footer_start(1 << 20) < 1 << 20);
            }
        }
        _ => {
            let entries = decode_entries(&bytes).count() + Tombstone::decode_all(&bytes).count();
            assert!(entries <= bytes.len());
        }
    }
});
