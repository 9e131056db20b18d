//! Streams of values as gRPC frames them: however they are cut, the same chunks or the same error.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tidepool_metadata::framing::{Chunk, ChunkReader};
use tidepool_metadata::proto::{GetChunk, PutChunk};

const LIMIT: usize = 1 << 16;

/// What comes out of `pieces`: all data joined, every other message as it is, and whether it ended in an error.
fn read<C: Chunk>(pieces: impl Iterator<Item = Bytes>) -> (Vec<C>, bool) {
    let mut reader = ChunkReader::<C>::new(LIMIT);
    let mut chunks: Vec<C> = Vec::new();
    for mut piece in pieces {
        loop {
            match reader.read(&mut piece) {
                Ok(Some(chunk)) => match (chunks.last().and_then(Chunk::data), chunk.data()) {
                    (Some(before), Some(data)) => {
                        let joined = [&before[..], data].concat();
                        chunks.pop();
                        chunks.push(C::of_data(joined.into()));
                    }
                    _ => chunks.push(chunk),
                },
                Ok(None) => break,
                Err(_) => return (chunks, true),
            }
        }
        assert!(piece.is_empty(), "what is left when more is needed");
    }
    (chunks, false)
}

fn check<C: Chunk + PartialEq>(bytes: &[u8], cut: usize) {
    let whole = Bytes::copy_from_slice(bytes);
    let at_once = read::<C>(std::iter::once(whole.clone()));
    let pieces = (0..whole.len()).step_by(cut).map(|at| whole.slice(at..whole.len().min(at + cut)));
    assert!(at_once == read::<C>(pieces), "pieces of {cut} bytes");
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&cut, bytes)) = bytes.split_first() else { return };
    let cut = usize::from(cut).max(1);
    check::<PutChunk>(bytes, cut);
    check::<GetChunk>(bytes, cut);
});
