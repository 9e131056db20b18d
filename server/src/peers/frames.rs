//! What goes over a connection between nodes: frames, each a length and so many bytes. `proto/tidepool/peer/v1/peer.proto` says
//! which.
//!
//! No HTTP/2 as gRPC has it: a message of consensus would pass two more tasks on each side, which is most of what it costs.

use std::io;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::TcpStream;

/// What a connection begins with. Its first byte is none of HTTP/2.
pub(crate) const PREFACE: [u8; 8] = *b"tidepeer";
/// Bytes of a frame's length.
pub(super) const HEAD: usize = 4;
/// Largest frame before the other side has proved itself.
pub(super) const GREETING_BYTES: usize = 64 << 10;
/// Largest message: an entry of the largest commands, or a part of a snapshot.
pub(super) const MESSAGE_BYTES: usize = 8 << 20;
/// Room to read into: many small messages come with one call.
const READ_BYTES: usize = 64 << 10;
/// After so long without an acknowledgement by the other host a connection is dead.
const SILENCE: Duration = Duration::from_secs(2);

/// The bytes of a frame's length.
pub(super) fn head(length: usize) -> io::Result<[u8; HEAD]> {
    match u32::try_from(length) {
        Ok(head) if length <= MESSAGE_BYTES => Ok(head.to_le_bytes()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a message of {length} bytes is too long"))),
    }
}

/// A message of the handshake as a frame.
pub(super) fn framed(message: &impl prost::Message) -> io::Result<Vec<u8>> {
    let mut frame = head(message.encoded_len())?.to_vec();
    message.encode(&mut frame).map_err(io::Error::other)?;
    Ok(frame)
}

/// Has small messages sent at once, and a host that is gone noticed.
pub(super) fn tune(socket: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, SILENCE)?;
    sockopt::set_tcp_keepintvl(socket, SILENCE / 2)?;
    sockopt::set_tcp_keepcnt(socket, 2)?;
    Ok(sockopt::set_tcp_user_timeout(socket, u32::try_from(SILENCE.as_millis()).unwrap_or(u32::MAX))?)
}

/// Frames as they come.
pub(super) struct Frames<R> {
    source: R,
    buffer: BytesMut,
}

impl<R: AsyncRead + Unpin> Frames<R> {
    pub(super) fn new(source: R) -> Self {
        Self { source, buffer: BytesMut::new() }
    }

    /// Whether the connection begins as one between nodes. Called first.
    pub(super) async fn begin(&mut self) -> io::Result<bool> {
        let mut preface = [0; PREFACE.len()];
        self.source.read_exact(&mut preface).await?;
        Ok(preface == PREFACE)
    }

    /// The next frame, of at most that many bytes; none at the end. Cancel-safe.
    pub(super) async fn next(&mut self, most: usize) -> io::Result<Option<Vec<u8>>> {
        loop {
            let missing = match self.buffer.first_chunk::<HEAD>() {
                None => READ_BYTES,
                Some(head) => {
                    let length = u32::from_le_bytes(*head) as usize;
                    if length > most {
                        let message = format!("a frame of {length} bytes, where at most {most} are expected");
                        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
                    }
                    let end = HEAD + length;
                    if self.buffer.len() >= end {
                        let frame = self.buffer[HEAD..end].to_vec();
                        self.buffer.advance(end);
                        return Ok(Some(frame));
                    }
                    (end - self.buffer.len()).max(READ_BYTES)
                }
            };
            self.buffer.reserve(missing);
            if self.source.read_buf(&mut self.buffer).await? == 0 {
                let whole = self.buffer.is_empty();
                return if whole { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
        }
    }

    /// The next frame as a message of the handshake; none at the end, or if it is no such message.
    pub(super) async fn message<M: prost::Message + Default>(&mut self) -> io::Result<Option<M>> {
        let frame = self.next(GREETING_BYTES).await?;
        Ok(frame.and_then(|frame| M::decode(frame.as_slice()).ok()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(bytes: &[u8], most: usize) -> io::Result<Vec<Vec<u8>>> {
        let mut frames = Frames::new(bytes);
        let mut found = Vec::new();
        while let Some(frame) = frames.next(most).await? {
            found.push(frame);
        }
        Ok(found)
    }

    #[tokio::test]
    async fn frames_come_as_they_were_sent_and_cuts_are_errors() {
        let frames = [vec![], b"ab".to_vec(), vec![7; 3 * READ_BYTES]];
        let mut bytes = Vec::new();
        for frame in &frames {
            bytes.extend(head(frame.len()).expect("short"));
            bytes.extend(frame);
        }
        assert_eq!(read(&bytes, MESSAGE_BYTES).await.expect("whole"), frames);
        for cut in [1, 3, 5, 9, bytes.len() - 1] {
            assert!(read(&bytes[..cut], MESSAGE_BYTES).await.is_err(), "cut at {cut}");
        }
    }

    #[tokio::test]
    async fn nobody_is_believed_a_length() {
        let error = read(&u32::MAX.to_le_bytes(), GREETING_BYTES).await.expect_err("too long");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(head(MESSAGE_BYTES + 1).is_err());
    }

    #[tokio::test]
    async fn a_connection_says_what_it_is() {
        assert!(Frames::new(&b"tidepeer"[..]).begin().await.expect("eight bytes"));
        assert!(!Frames::new(&b"PRI * HT"[..]).begin().await.expect("eight bytes"));
        assert!(Frames::new(&b"tide"[..]).begin().await.is_err());
    }
}
