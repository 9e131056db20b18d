//! Streams of `PutChunk` and `GetChunk` as gRPC frames them, written and read without copying the data that they carry.
//!
//! A codec of protobuf copies: into one buffer when it writes, out of the transport's frames into another when it
//! reads. Both messages have one field at a time, data mostly, so both sides can do without:
//!
//! ```text
//! 0        1                         5     6
//! | flag 0 | length, u32, big-endian | 12h | varint: length of the data | data .. |
//! |          gRPC's prefix           |     field 2 of the message                 |
//! ```
//!
//! The writer gives out what precedes the data, then the data itself. The reader gives out each piece of such data as
//! it comes, as a chunk of its own: a message of 1 MiB may be read as ten chunks. Every other message, be it of other
//! fields, of several, of unknown ones or of an unusual encoding, is gathered and decoded whole. So both agree with a
//! codec on every stream but for where data is cut.
//!
//! The reader trusts nothing: lengths are checked against a limit, and memory is taken only for bytes that came.

use std::marker::PhantomData;

use bytes::{Buf as _, Bytes, BytesMut};
use prost::Message;
use prost::encoding::{decode_varint, encode_varint};

use crate::proto::{GetChunk, PutChunk, get_chunk, put_chunk};

/// Bytes before each message: a flag and a length.
const PREFIX_BYTES: usize = 5;
/// Field 2, length-delimited.
const DATA_TAG: u8 = 0x12;
/// The longest varint of a length that a prefix can announce.
const VARINT_BYTES: usize = 5;
/// What must be seen to know whether a message is data alone.
const HEAD_BYTES: usize = PREFIX_BYTES + 1 + VARINT_BYTES;
/// Most that is taken in advance for a message that is gathered; what is longer grows as it comes.
const TRUSTED_BYTES: usize = 4096;

/// A message that carries data in field 2, and nothing else then.
pub trait Chunk: Message + Default {
    /// The message that carries `data`.
    fn of_data(data: Bytes) -> Self;

    /// The data that it carries, if it does.
    fn data(&self) -> Option<&Bytes>;
}

impl Chunk for PutChunk {
    fn of_data(data: Bytes) -> Self {
        Self { part: Some(put_chunk::Part::Data(data)) }
    }

    fn data(&self) -> Option<&Bytes> {
        if let Some(put_chunk::Part::Data(data)) = &self.part { Some(data) } else { None }
    }
}

impl Chunk for GetChunk {
    fn of_data(data: Bytes) -> Self {
        Self { part: Some(get_chunk::Part::Data(data)) }
    }

    fn data(&self) -> Option<&Bytes> {
        if let Some(get_chunk::Part::Data(data)) = &self.part { Some(data) } else { None }
    }
}

/// Why a stream of messages can't be read on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FramingError {
    /// The flag before the message says compressed, or nothing that is known.
    #[error("message with flag {flag}: only uncompressed ones (0) are taken")]
    Flag {
        /// The flag.
        flag: u8,
    },
    /// The message is longer than what is taken.
    #[error("message of {length} bytes, at most {limit} are taken")]
    TooLong {
        /// The announced length in bytes.
        length: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The message is no protobuf of its type.
    #[error("message can't be decoded: {0}")]
    Malformed(prost::DecodeError),
    /// The stream ended inside a message.
    #[error("stream ended inside a message")]
    Truncated,
}

/// A message with its prefix, in two parts that follow each other on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Framed {
    /// All but the data.
    pub head: Bytes,
    /// The data that a chunk carries, as the chunk held it; else empty.
    pub data: Bytes,
}

impl Framed {
    /// Any message.
    ///
    /// # Panics
    /// If it has 4 GiB or more, which no prefix can announce.
    pub fn message(message: &impl Message) -> Self {
        Self { head: prefixed(&message.encode_to_vec(), 0), data: Bytes::new() }
    }

    /// A chunk.
    ///
    /// # Panics
    /// As [`Framed::message`].
    pub fn chunk(chunk: &impl Chunk) -> Self {
        let Some(data) = chunk.data() else { return Self::message(chunk) };
        let mut field = Vec::with_capacity(1 + VARINT_BYTES);
        field.push(DATA_TAG);
        encode_varint(data.len() as u64, &mut field);
        Self { head: prefixed(&field, data.len()), data: data.clone() }
    }
}

/// `start` behind the prefix of a message that has `rest` more bytes.
fn prefixed(start: &[u8], rest: usize) -> Bytes {
    let length = u32::try_from(start.len() + rest).expect("senders cut what they send");
    let mut head = Vec::with_capacity(PREFIX_BYTES + start.len());
    head.push(0);
    head.extend_from_slice(&length.to_be_bytes());
    head.extend_from_slice(start);
    head.into()
}

/// Reads a stream of messages from the pieces in which it comes. After an error it must not be used again.
#[derive(Debug)]
pub struct ChunkReader<C> {
    limit: usize,
    state: State,
    chunk: PhantomData<fn() -> C>,
}

#[derive(Debug)]
enum State {
    /// The prefix, and the message's first bytes as far as they are needed.
    Head { bytes: [u8; HEAD_BYTES], length: usize },
    /// Data comes; so much is missing.
    Data { missing: usize },
    /// A message that is decoded when all of it is there.
    Whole { gathered: BytesMut, length: usize },
}

const START: State = State::Head { bytes: [0; HEAD_BYTES], length: 0 };

/// What the bytes from a prefix on say.
enum Head {
    /// Not enough of them.
    Short,
    /// A message that is data alone.
    Data { length: usize },
    /// Any other message.
    Other { length: usize },
}

impl<C: Chunk> ChunkReader<C> {
    /// A reader of messages of at most `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit, state: START, chunk: PhantomData }
    }

    /// Takes the next chunk, or the next piece of one that carries data, from the front of `input`; `None`: all of
    /// `input` was taken, and more is needed.
    ///
    /// # Errors
    /// [`FramingError`], all but `Truncated`.
    pub fn read(&mut self, input: &mut Bytes) -> Result<Option<C>, FramingError> {
        loop {
            match &mut self.state {
                State::Head { bytes, length } => match parse(&bytes[..*length], self.limit)? {
                    Head::Short if input.is_empty() => return Ok(None),
                    Head::Short => {
                        bytes[*length] = input.get_u8();
                        *length += 1;
                    }
                    Head::Data { length: 0 } => {
                        self.state = START;
                        return Ok(Some(C::of_data(Bytes::new())));
                    }
                    Head::Data { length } => self.state = State::Data { missing: length },
                    Head::Other { length: whole } => {
                        let mut gathered = BytesMut::with_capacity(whole.min(TRUSTED_BYTES));
                        gathered.extend_from_slice(&bytes[PREFIX_BYTES..*length]);
                        self.state = State::Whole { gathered, length: whole };
                    }
                },
                State::Data { .. } if input.is_empty() => return Ok(None),
                State::Data { missing } => {
                    let data = input.split_to(input.len().min(*missing));
                    *missing -= data.len();
                    if *missing == 0 {
                        self.state = START;
                    }
                    return Ok(Some(C::of_data(data)));
                }
                State::Whole { gathered, length } => {
                    let more = input.split_to(input.len().min(*length - gathered.len()));
                    gathered.extend_from_slice(&more);
                    if gathered.len() < *length {
                        return Ok(None);
                    }
                    let message = std::mem::take(gathered).freeze();
                    self.state = START;
                    return C::decode(message).map(Some).map_err(FramingError::Malformed);
                }
            }
        }
    }

    /// Whether a stream may end here.
    ///
    /// # Errors
    /// [`FramingError::Truncated`].
    pub fn end(&self) -> Result<(), FramingError> {
        if matches!(self.state, State::Head { length: 0, .. }) { Ok(()) } else { Err(FramingError::Truncated) }
    }
}

/// Looks at no more bytes than it must: what lies behind a head belongs to the next one to look.
fn parse(bytes: &[u8], limit: usize) -> Result<Head, FramingError> {
    let Some((&[flag, a, b, c, d], message)) = bytes.split_first_chunk::<PREFIX_BYTES>() else {
        return match bytes.first() {
            Some(&flag) if flag != 0 => Err(FramingError::Flag { flag }),
            _ => Ok(Head::Short),
        };
    };
    if flag != 0 {
        return Err(FramingError::Flag { flag });
    }
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if length > limit {
        return Err(FramingError::TooLong { length, limit });
    }
    let other = Ok(Head::Other { length });
    if length == 0 {
        return other;
    }
    match message {
        [] => Ok(Head::Short),
        [DATA_TAG, varint @ ..] => match varint.last() {
            // It ends: data alone if it reaches exactly to the message's end.
            Some(0..0x80) => match decode_varint(&mut &*varint) {
                Ok(data) if message.len() as u64 + data == length as u64 => Ok(Head::Data { length: data as usize }),
                _ => other,
            },
            _ if message.len() == length || varint.len() == VARINT_BYTES => other,
            _ => Ok(Head::Short),
        },
        _ => other,
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::proto::{ObjectDescription, PutAnnounce};

    const LIMIT: usize = 1 << 20;

    /// All chunks of a stream that comes in pieces cut at `cuts`, and how it ended.
    fn read<C: Chunk>(stream: &[u8], cuts: &[usize]) -> (Vec<C>, Result<(), FramingError>) {
        let mut reader = ChunkReader::new(LIMIT);
        let mut chunks = Vec::new();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        for piece in cuts.windows(2) {
            let mut input = Bytes::copy_from_slice(&stream[piece[0]..piece[1]]);
            loop {
                match reader.read(&mut input) {
                    Ok(Some(chunk)) => chunks.push(chunk),
                    Ok(None) => break,
                    Err(error) => return (chunks, Err(error)),
                }
            }
            assert!(input.is_empty(), "{} bytes are left", input.len());
        }
        (chunks, reader.end())
    }

    /// What a codec makes of the stream.
    fn decode<C: Chunk>(mut stream: &[u8]) -> (Vec<C>, Result<(), FramingError>) {
        let mut chunks = Vec::new();
        while !stream.is_empty() {
            if stream[0] != 0 {
                return (chunks, Err(FramingError::Flag { flag: stream[0] }));
            }
            let Some((&[_, a, b, c, d], rest)) = stream.split_first_chunk() else {
                return (chunks, Err(FramingError::Truncated));
            };
            let length = u32::from_be_bytes([a, b, c, d]) as usize;
            if length > LIMIT {
                return (chunks, Err(FramingError::TooLong { length, limit: LIMIT }));
            }
            let Some((message, rest)) = rest.split_at_checked(length) else {
                return (chunks, Err(FramingError::Truncated));
            };
            match C::decode(message) {
                Ok(chunk) => chunks.push(chunk),
                Err(error) => return (chunks, Err(FramingError::Malformed(error))),
            }
            stream = rest;
        }
        (chunks, Ok(()))
    }

    /// Data that follows data becomes one chunk: cuts count for nothing.
    fn joined<C: Chunk>(chunks: Vec<C>) -> Vec<C> {
        let mut all: Vec<C> = Vec::new();
        for chunk in chunks {
            match (all.last().and_then(Chunk::data), chunk.data()) {
                (Some(before), Some(data)) => {
                    let data = [&before[..], data].concat();
                    all.pop();
                    all.push(C::of_data(data.into()));
                }
                _ => all.push(chunk),
            }
        }
        all
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
    }

    fn whole(chunk: &impl Chunk) -> Vec<u8> {
        let Framed { head, data } = Framed::chunk(chunk);
        [head, data].concat()
    }

    fn announce() -> PutChunk {
        let announce = PutAnnounce { tenant: "t".into(), length: 7, checksum: Some(1), ..PutAnnounce::default() };
        PutChunk { part: Some(put_chunk::Part::Announce(announce)) }
    }

    fn put_chunks() -> impl Strategy<Value = PutChunk> {
        prop_oneof![
            Just(announce()),
            vec(any::<u8>(), 0..300).prop_map(|data| PutChunk::of_data(data.into())),
            any::<u32>().prop_map(|sum| PutChunk { part: Some(put_chunk::Part::Checksum(sum)) }),
            Just(PutChunk { part: None }),
        ]
    }

    /// Messages as nobody writes them: several fields, unknown ones, long varints, nonsense.
    fn odd_messages() -> impl Strategy<Value = Vec<u8>> {
        let field = prop_oneof![
            put_chunks().prop_map(|chunk| chunk.encode_to_vec()),
            vec(any::<u8>(), 0..5).prop_map(|data| [&[0x12, 0x80 | data.len() as u8, 0x80, 0][..], &data].concat()),
            Just(vec![0x7a, 2, 1, 2]),
            Just(vec![0x20, 7]),
            Just(vec![0x12]),
            vec(any::<u8>(), 0..4),
        ];
        vec(field, 0..4).prop_map(|fields| fields.concat())
    }

    proptest! {
        #[test]
        fn what_is_written_is_what_a_codec_writes(chunk in put_chunks()) {
            prop_assert_eq!(whole(&chunk), framed(&chunk.encode_to_vec()));
        }

        #[test]
        fn what_is_written_is_read_however_it_is_cut(chunks in vec(put_chunks(), 0..6), cuts in vec(any::<usize>(), 0..40)) {
            let stream: Vec<u8> = chunks.iter().flat_map(whole).collect();
            let (read, end) = read::<PutChunk>(&stream, &cuts);
            prop_assert_eq!(end, Ok(()));
            prop_assert_eq!(joined(read), joined(chunks));
        }

        #[test]
        fn a_codec_says_the_same_of_odd_messages(messages in vec(odd_messages(), 0..5), cuts in vec(any::<usize>(), 0..40)) {
            let stream: Vec<u8> = messages.iter().flat_map(|message| framed(message)).collect();
            let ((read, end), (decoded, expected)) = (read::<PutChunk>(&stream, &cuts), decode::<PutChunk>(&stream));
            prop_assert_eq!(joined(read), joined(decoded));
            prop_assert_eq!(end, expected);
        }

        #[test]
        fn a_codec_says_the_same_of_any_bytes(stream in vec(prop_oneof![Just(0), Just(2), Just(0x12), any::<u8>()], 0..60), cuts in vec(any::<usize>(), 0..9)) {
            let ((read, end), (decoded, expected)) = (read::<GetChunk>(&stream, &cuts), decode::<GetChunk>(&stream));
            // Of a message that never ends, the data that came was given out.
            if expected != Err(FramingError::Truncated) {
                prop_assert_eq!(joined(read), joined(decoded));
            }
            prop_assert_eq!(end, expected);
        }
    }

    #[test]
    fn a_stream_split_at_any_byte_is_read() {
        let description = ObjectDescription { length: 300, ..ObjectDescription::default() };
        let chunks = [
            GetChunk { part: Some(get_chunk::Part::Description(description)) },
            GetChunk::of_data(vec![0x12; 300].into()),
            GetChunk { part: None },
            GetChunk::of_data(Bytes::new()),
            GetChunk { part: Some(get_chunk::Part::Checksum(0x1200_0012)) },
        ];
        let stream: Vec<u8> = chunks.iter().flat_map(whole).collect();
        for cut in 0..=stream.len() {
            assert_eq!(joined(read::<GetChunk>(&stream, &[cut]).0), chunks, "cut at {cut}");
        }
        let every: Vec<usize> = (0..stream.len()).collect();
        assert_eq!(joined(read::<GetChunk>(&stream, &every).0), chunks);
    }

    #[test]
    fn a_stream_that_ends_anywhere_inside_a_message_is_truncated() {
        let stream = [whole(&announce()), whole(&PutChunk::of_data(vec![1; 200].into()))].concat();
        let boundary = whole(&announce()).len();
        for end in 0..=stream.len() {
            let expected =
                if [0, boundary, stream.len()].contains(&end) { Ok(()) } else { Err(FramingError::Truncated) };
            assert_eq!(read::<PutChunk>(&stream[..end], &[]).1, expected, "ended at {end}");
        }
    }

    #[test]
    fn data_is_handed_on_without_a_copy() {
        let data = Bytes::from(vec![7; 100_000]);
        let Framed { head, data: written } = Framed::chunk(&PutChunk::of_data(data.clone()));
        assert_eq!(written.as_ptr(), data.as_ptr());
        let mut input = Bytes::from([head, written].concat());
        let at = input.as_ptr() as usize + input.len() - data.len();
        let read = ChunkReader::<PutChunk>::new(LIMIT).read(&mut input).expect("is well formed").expect("is there");
        assert_eq!(read.data().map(|data| (data.as_ptr() as usize, data.len())), Some((at, data.len())));
    }

    #[test]
    fn a_giant_length_is_refused_before_anything_is_taken_for_it() {
        let mut reader = ChunkReader::<PutChunk>::new(LIMIT);
        let error = reader.read(&mut Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff])).expect_err("too long");
        assert_eq!(error, FramingError::TooLong { length: 0xffff_ffff, limit: LIMIT });
        let mut reader = ChunkReader::<PutChunk>::new(u32::MAX as usize);
        let started = reader.read(&mut Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff, 0x0a, 1])).expect("may go on");
        assert_eq!(started, None);
        let State::Whole { gathered, .. } = &reader.state else { panic!("{:?}", reader.state) };
        assert!(gathered.capacity() <= TRUSTED_BYTES);
    }

    #[test]
    fn a_flag_is_refused_by_the_first_byte() {
        for flag in [1, 2, 0xff] {
            let (chunks, end) = read::<PutChunk>(&[flag], &[]);
            assert_eq!((chunks, end), (vec![], Err(FramingError::Flag { flag })));
        }
    }
}
