//! A large request as it is received: piece by piece, each in the same small buffer, so that it is brought where it belongs
//! while it is in the processor's caches.

use std::io::{self, Read};

use crate::error::Failure;
use crate::stream::Stream;

/// What is left of a request that is being received. What its handler leaves is skipped.
pub struct Pieces<'a> {
    stream: &'a Stream,
    buffer: &'a mut [u8],
    /// Bytes of the buffer that were received and not given; those behind the request's end belong to the next.
    start: usize,
    end: usize,
    left: u64,
    failure: Option<Failure>,
}

impl<'a> Pieces<'a> {
    /// Of a request of `length` bytes, the first of which are `buffer[start..end]`.
    pub(crate) fn new(stream: &'a Stream, buffer: &'a mut [u8], (start, end): (usize, usize), length: u64) -> Self {
        Self { stream, buffer, start, end, left: length, failure: None }
    }

    /// Bytes that are still to be given.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// The next bytes: at least one and at most `most`, if so many are left; waits for them.
    ///
    /// # Errors
    /// [`Failure::ConnectionLost`], [`Failure::Silent`]: there will be no more, and nobody hears an answer.
    pub fn next(&mut self, most: u64) -> Result<&[u8], Failure> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        while self.start == self.end && self.left > 0 {
            let room = self.buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
            match (&mut &*self.stream).read(&mut self.buffer[..room]) {
                Ok(0) => return Err(self.fail(Failure::ConnectionLost)),
                Ok(count) => (self.start, self.end) = (0, count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(self.fail(Failure::Silent)),
                Err(_) => return Err(self.fail(Failure::ConnectionLost)),
            }
        }
        let most = usize::try_from(most.min(self.left)).unwrap_or(usize::MAX);
        let piece = self.start..self.end.min(self.start.saturating_add(most));
        self.start = piece.end;
        self.left -= piece.len() as u64;
        Ok(&self.buffer[piece])
    }

    /// The next `length` bytes, or all that are left, in one buffer.
    ///
    /// # Errors
    /// As [`Pieces::next`].
    pub fn take(&mut self, length: u64) -> Result<Vec<u8>, Failure> {
        let length = usize::try_from(length.min(self.left)).unwrap_or(usize::MAX);
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            bytes.extend_from_slice(self.next((length - bytes.len()) as u64)?);
        }
        Ok(bytes)
    }

    /// Skips the next `length` bytes.
    ///
    /// # Errors
    /// As [`Pieces::next`].
    pub fn skip(&mut self, mut length: u64) -> Result<(), Failure> {
        while length > 0 && self.left > 0 {
            length -= self.next(length)?.len() as u64;
        }
        Ok(())
    }

    /// Skips what is left; gives the bytes of the buffer that come after.
    pub(crate) fn finish(mut self) -> Result<(usize, usize), Failure> {
        self.skip(u64::MAX)?;
        Ok((self.start, self.end))
    }

    fn fail(&mut self, failure: Failure) -> Failure {
        *self.failure.insert(failure)
    }
}

impl std::fmt::Debug for Pieces<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pieces").field("left", &self.left).field("failure", &self.failure).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn pieces_are_the_request_and_what_comes_behind_it_stays() {
        let (here, mut there) = UnixStream::pair().expect("sockets");
        let stream = Stream::Unix(here);
        let sent: Vec<u8> = (0..1000_u32).map(|byte| byte as u8).collect();
        // Ten bytes came with the header, and three of the next message behind the end.
        for received in [10, 1000] {
            let mut buffer = [0; 2000];
            buffer[5..5 + received].copy_from_slice(&sent[..received]);
            buffer[5 + received..8 + received].copy_from_slice(b"nxt");
            let end = if received == 1000 { 8 + received } else { 5 + received };
            there.write_all(&sent[received..]).expect("room");
            let mut pieces = Pieces::new(&stream, &mut buffer, (5, end), 1000);
            assert_eq!(pieces.take(4).expect("there"), sent[..4]);
            pieces.skip(6).expect("there");
            assert!(pieces.next(7).expect("there").len() <= 7);
            let at = 1000 - pieces.left() as usize;
            assert_eq!(pieces.take(u64::MAX).expect("there"), sent[at..]);
            assert_eq!(pieces.next(9).expect("the end"), b"");
            let (start, end) = pieces.finish().expect("nothing is left");
            assert_eq!(&buffer[start..end], if received == 1000 { &b"nxt"[..] } else { b"" });
        }
    }

    #[test]
    fn what_is_not_taken_is_skipped_and_a_lost_connection_is_told_each_time() {
        let (here, mut there) = UnixStream::pair().expect("sockets");
        let stream = Stream::Unix(here);
        let mut buffer = [0; 64];
        there.write_all(&[7; 500]).expect("room");
        assert_eq!(Pieces::new(&stream, &mut buffer, (0, 0), 300).finish().map(|(start, end)| end - start), Ok(0));
        drop(there);
        let mut pieces = Pieces::new(&stream, &mut buffer, (0, 0), 300);
        assert_eq!(pieces.take(300), Err(Failure::ConnectionLost));
        assert_eq!(pieces.next(1), Err(Failure::ConnectionLost));
        assert_eq!(pieces.finish(), Err(Failure::ConnectionLost));
    }
}
