//! What messages of the native client look like: method, time and length before the protobuf message, values behind it.
//! Pure; documented in `proto/tidepool/v1/data.proto`.

use std::time::Duration;

use prost::Message;

use crate::proto::EngineMethod;

/// Bytes before a request's message.
pub const REQUEST_BYTES: usize = 9;
/// Bytes before an answer's message.
pub const ANSWER_BYTES: usize = 5;
/// Most bytes of values in an answer; more are asked for in ranges.
pub const MOST_VALUE_BYTES: u64 = 8 << 20;
/// Least bytes of an object that is held for a caller that can read it where it lies: smaller ones are sooner there with the
/// answer.
pub const LEAST_HELD_BYTES: u64 = 64 << 10;

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    /// It ends before its message does.
    #[error("the message is cut off")]
    Short,
    /// Not one of [`EngineMethod`].
    #[error("unknown method {0}")]
    Method(u8),
    /// Neither done nor refused.
    #[error("unknown status {0}")]
    Status(u8),
}

/// A request as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Which call.
    pub method: EngineMethod,
    /// How long its caller waits.
    pub time: Duration,
    /// The protobuf message.
    pub message: &'a [u8],
    /// What lies behind it.
    pub values: &'a [u8],
}

/// What a request begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Which call.
    pub method: EngineMethod,
    /// How long its caller waits.
    pub time: Duration,
    /// Bytes of the protobuf message.
    pub message: u64,
}

impl Head {
    /// Reads the first [`REQUEST_BYTES`] of a request.
    ///
    /// # Errors
    /// As [`Request::decode`].
    pub fn decode(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        let [method, t0, t1, t2, t3, l0, l1, l2, l3] = *bytes.first_chunk().ok_or(EnvelopeError::Short)?;
        let known = EngineMethod::try_from(i32::from(method)).ok().filter(|&known| known != EngineMethod::Unspecified);
        Ok(Self {
            method: known.ok_or(EnvelopeError::Method(method))?,
            time: Duration::from_millis(u32::from_le_bytes([t0, t1, t2, t3]).into()),
            message: u32::from_le_bytes([l0, l1, l2, l3]).into(),
        })
    }
}

impl<'a> Request<'a> {
    /// Takes a request apart.
    ///
    /// # Errors
    /// [`EnvelopeError::Short`], [`EnvelopeError::Method`].
    pub fn decode(bytes: &'a [u8]) -> Result<Self, EnvelopeError> {
        let Head { method, time, message } = Head::decode(bytes)?;
        let rest = &bytes[REQUEST_BYTES..];
        let length = usize::try_from(message).unwrap_or(usize::MAX);
        let (message, values) = rest.split_at_checked(length).ok_or(EnvelopeError::Short)?;
        Ok(Self { method, time, message, values })
    }
}

/// What precedes a request's values.
#[must_use]
pub fn request(method: EngineMethod, time: Duration, message: &impl Message) -> Vec<u8> {
    let length = message.encoded_len();
    let mut bytes = Vec::with_capacity(REQUEST_BYTES + length);
    bytes.push(method as u8);
    bytes.extend_from_slice(&u32::try_from(time.as_millis()).unwrap_or(u32::MAX).to_le_bytes());
    finish(bytes, length, message)
}

/// What precedes an answer's values: done, or refused.
#[must_use]
pub fn answer(is_done: bool, message: &impl Message) -> Vec<u8> {
    let length = message.encoded_len();
    let mut bytes = Vec::with_capacity(ANSWER_BYTES + length);
    bytes.push(u8::from(!is_done));
    finish(bytes, length, message)
}

fn finish(mut bytes: Vec<u8>, length: usize, message: &impl Message) -> Vec<u8> {
    bytes.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    // Only a buffer without room is an error, and a vector grows.
    let _fits = message.encode(&mut bytes);
    bytes
}

/// Whether an answer that begins like this is done, and the length of its message.
///
/// # Errors
/// [`EnvelopeError::Status`].
pub fn answer_head(bytes: [u8; ANSWER_BYTES]) -> Result<(bool, usize), EnvelopeError> {
    let [status, length @ ..] = bytes;
    match status {
        0 | 1 => Ok((status == 0, u32::from_le_bytes(length) as usize)),
        status => Err(EnvelopeError::Status(status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto;

    #[test]
    fn requests_and_answers_come_back_apart() {
        let message = proto::ExistsRequest { tenant: "t".into(), lease_ms: 7, ..Default::default() };
        let mut bytes = request(EngineMethod::Exists, Duration::from_millis(1500), &message);
        bytes.extend_from_slice(b"values");
        let request = Request::decode(&bytes).expect("own encoding");
        assert_eq!((request.method, request.time), (EngineMethod::Exists, Duration::from_millis(1500)));
        assert_eq!(proto::ExistsRequest::decode(request.message).expect("own encoding"), message);
        assert_eq!(request.values, b"values");
        for (is_done, status) in [(true, 0), (false, 1)] {
            let bytes = answer(is_done, &message);
            assert_eq!(bytes[0], status);
            let head = *bytes.first_chunk().expect("long enough");
            assert_eq!(answer_head(head), Ok((is_done, bytes.len() - ANSWER_BYTES)));
        }
    }

    #[test]
    fn hostile_bytes_are_refused() {
        let bytes =
            request(EngineMethod::Get, Duration::ZERO, &proto::GetRequest { key: "k".into(), ..Default::default() });
        for length in 0..bytes.len() {
            assert_eq!(Request::decode(&bytes[..length]), Err(EnvelopeError::Short));
        }
        for method in [0, 200, 255] {
            let mut bytes = bytes.clone();
            bytes[0] = method;
            assert_eq!(Request::decode(&bytes), Err(EnvelopeError::Method(method)));
        }
        assert_eq!(answer_head([2, 0, 0, 0, 0]), Err(EnvelopeError::Status(2)));
    }
}
