#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use tidepool_metadata::ChunkChecksums;

use super::record::RECORD_MAGIC;
use super::*;

const EPOCH: Epoch = Epoch { sequence: 7, salt: 0x5a17 };

fn header(key: &[u8], payload: &[u8]) -> SliceHeader {
    SliceHeader {
        tenant: TenantId(3),
        key: ObjectKey::new(key).unwrap(),
        version: VersionId { node: NodeId(1), incarnation: Incarnation(2), sequence: 3 },
        replica: ReplicaId { node: NodeId(4), incarnation: Incarnation(5), sequence: 6 },
        object_length: payload.len() as u64,
        slice_bytes: 4 << 20,
        slice_index: 0,
        slice_length: payload.len() as u32,
        checksum: crc32fast::hash(payload),
        data_type: DataType::KvCache,
        commit_index: 99,
    }
}

fn record(start: usize, key: &[u8], payload: &[u8]) -> Vec<u8> {
    let layout = RecordLayout::at(start, key.len(), payload.len());
    let mut bytes = vec![0; layout.record_bytes];
    bytes[layout.payload_offset..layout.payload_offset + payload.len()].copy_from_slice(payload);
    let chunks = ChunkChecksums::of(payload);
    encode_slice_head(&mut bytes, EPOCH, &header(key, payload), &chunks.0, layout.record_bytes);
    bytes
}

#[test]
fn a_small_slice_does_not_waste_half() {
    let layout = RecordLayout::at(4096, 40, 4096);
    assert_eq!(layout.record_bytes, 4256);
    assert_eq!(RecordLayout::at(4096 + 4256, 40, 4096).record_bytes, 4256);
}

#[test]
fn payloads_of_a_chunk_and_more_are_page_aligned() {
    for start in [4096, 4112, 8176, 12288] {
        for length in [65536, 65537, 1 << 20] {
            let layout = RecordLayout::at(start, 1024, length);
            assert_eq!((start + layout.payload_offset) % PAGE_BYTES, 0);
            assert_eq!(payload_offset(layout.record_bytes, length), Some(layout.payload_offset));
            assert_eq!(layout.record_bytes % RECORD_ALIGN, 0);
        }
    }
}

#[test]
fn superblock_and_trailer_survive_and_one_flipped_bit_is_found() {
    let superblock = Superblock { node: NodeId(9), region_bytes: 16 << 20, region_count: 33, file_id: 77 };
    let bytes = superblock.encode();
    assert_eq!(Superblock::decode(&bytes), Ok(superblock));
    let trailer = Trailer {
        epoch: EPOCH,
        footer_bytes: 160,
        tombstone_count: 2,
        entry_count: 1,
        entries_checksum: 5,
        record_bytes: 4256,
        tombstones_checksum: 6,
    };
    let end = trailer.encode();
    assert_eq!(Trailer::decode(&end, 1 << 20), Some(trailer));
    for bit in 0..36 * 8 {
        let mut flipped = bytes;
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(Superblock::decode(&flipped).is_err());
    }
    for bit in 0..TRAILER_BYTES * 8 {
        let mut flipped = end;
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(Trailer::decode(&flipped, 1 << 20), None);
    }
}

#[test]
fn a_flipped_bit_anywhere_in_a_head_is_found() {
    let bytes = record(4096, b"block/17", &[5; 300]);
    let head_bytes = RecordLayout::at(4096, 8, 300).head_bytes;
    assert!(RecordHead::decode(&bytes, EPOCH).is_some());
    for bit in 0..head_bytes * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(RecordHead::decode(&flipped, EPOCH), None, "bit {bit}");
    }
}

#[test]
fn a_record_of_an_earlier_use_of_the_region_is_none() {
    let bytes = record(4096, b"k", b"old");
    assert!(RecordHead::decode(&bytes, Epoch { sequence: 8, ..EPOCH }).is_none());
    assert!(RecordHead::decode(&bytes, Epoch { salt: 1, ..EPOCH }).is_none());
}

proptest! {
    #[test]
    fn a_head_says_what_was_written(
        key in proptest::collection::vec(any::<u8>(), 1..=1024),
        length in 0_usize..200_000,
        start in (256_usize..4096).prop_map(|unit| unit * RECORD_ALIGN),
    ) {
        let payload: Vec<u8> = (0..length).map(|index| (index % 253) as u8).collect();
        let bytes = record(start, &key, &payload);
        let decoded = RecordHead::decode(&bytes, EPOCH);
        prop_assert_eq!(decoded, Some(RecordHead::Slice {
            header: header(&key, &payload),
            chunks: ChunkChecksums::of(&payload).0,
            record_bytes: bytes.len(),
        }));
        let mut entries = Vec::new();
        encode_entry(&mut entries, &header(&key, &payload), start as u32, bytes.len() as u32);
        prop_assert_eq!(entries.len(), entry_bytes(key.len()));
        let found: Vec<_> = decode_entries(&entries).collect();
        prop_assert_eq!(found, vec![(header(&key, &payload), start as u32, bytes.len() as u32)]);
    }

    #[test]
    fn decoders_take_any_bytes(mut bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let _ = (Superblock::decode(&bytes), RegionHeader::decode(&bytes), Trailer::decode(&bytes, 1 << 20));
        let _ = (decode_entries(&bytes).count(), Tombstone::decode_all(&bytes).count());
        if bytes.len() >= HEAD_FIXED_BYTES {
            // Past the cheap checks, so that the lengths are looked at.
            put(&mut bytes, 0, &RECORD_MAGIC.to_le_bytes());
            put(&mut bytes, 16, &EPOCH.sequence.to_le_bytes());
            put(&mut bytes, 24, &EPOCH.salt.to_le_bytes());
        }
        prop_assert_eq!(RecordHead::decode(&bytes, EPOCH), None);
    }
}
