//! Where a get's bytes go: a vector that grows, a caller's buffer, or step by step to whoever copies them on.

use tidepool_metadata::envelope::MOST_VALUE_BYTES;
use tidepool_transfer::{Answer, Landed, TransferError};

use super::one_sided;
use crate::call::shown;
use crate::error::Error;

/// Received and summed up at a time, so that the sum reads from the cache.
const STEP_BYTES: usize = 256 << 10;
/// Received at a time by who copies it on: the copy reads it from the cache, too.
const COPIED_BYTES: usize = 64 << 10;

/// Where a get's bytes go.
pub(crate) trait Target {
    /// An object (or range) of that many bytes comes.
    ///
    /// # Errors
    /// [`Error::Buffer`] if there is no room for it.
    fn begin(&mut self, key: &[u8], length: u64) -> Result<(), Error>;

    /// Takes the next bytes, some of those that are left, and gives them.
    fn take(&mut self, answer: &mut Answer) -> Result<&[u8], TransferError>;

    /// Takes the next bytes of those that have landed, and gives them.
    ///
    /// # Errors
    /// [`Error::Protocol`] if there are more than were announced.
    fn land(&mut self, landed: &mut Landed<'_>) -> Result<&[u8], Error>;
}

fn too_long() -> Error {
    Error::Protocol { operation: "get", why: "has more bytes than it announces" }
}

impl Target for Vec<u8> {
    fn begin(&mut self, _: &[u8], length: u64) -> Result<(), Error> {
        self.clear();
        // No more is allocated on the word of a description than one answer can bring.
        self.reserve_exact(usize::try_from(length.min(MOST_VALUE_BYTES)).unwrap_or_default());
        Ok(())
    }

    fn take(&mut self, answer: &mut Answer) -> Result<&[u8], TransferError> {
        let start = self.len();
        answer.append_to(self)?;
        Ok(&self[start..])
    }

    fn land(&mut self, landed: &mut Landed<'_>) -> Result<&[u8], Error> {
        let start = self.len();
        self.resize(start + one_sided::step(landed), 0);
        landed.take(&mut self[start..]).map_err(|_| too_long())?;
        Ok(&self[start..])
    }
}

/// A caller's buffer, filled from its start.
pub(crate) struct Filling<'a> {
    pub(crate) buffer: &'a mut [u8],
    pub(crate) filled: usize,
}

impl Target for Filling<'_> {
    fn begin(&mut self, key: &[u8], length: u64) -> Result<(), Error> {
        self.filled = 0;
        let buffer = self.buffer.len() as u64;
        if length <= buffer { Ok(()) } else { Err(Error::Buffer { key: shown(key), length, buffer }) }
    }

    fn take(&mut self, answer: &mut Answer) -> Result<&[u8], TransferError> {
        let start = self.filled;
        let count = usize::try_from(answer.left()).unwrap_or(usize::MAX).min(STEP_BYTES);
        let room = self.buffer.len() as u64 - start as u64;
        let place = self.buffer.get_mut(start..start + count);
        let place =
            place.ok_or(TransferError::Length { what: "answer", length: count as u64, minimum: 0, maximum: room })?;
        answer.read(place)?;
        self.filled += count;
        Ok(&self.buffer[start..self.filled])
    }

    fn land(&mut self, landed: &mut Landed<'_>) -> Result<&[u8], Error> {
        let (start, count) = (self.filled, one_sided::step(landed));
        let place = self.buffer.get_mut(start..start + count).ok_or_else(too_long)?;
        landed.take(place).map_err(|_| too_long())?;
        self.filled += count;
        Ok(&self.buffer[start..self.filled])
    }
}

/// Gives the bytes on as they come, before they are verified.
pub(crate) struct Steps<'a> {
    /// Told a step's bytes, and where in the object (or range) it begins: behind the last one, or at its start again.
    take: &'a mut (dyn FnMut(u64, &[u8]) + Send),
    room: u64,
    at: u64,
    step: Vec<u8>,
}

impl<'a> Steps<'a> {
    /// Of an object (or range) of `room` bytes at most.
    pub(crate) fn new(room: u64, take: &'a mut (dyn FnMut(u64, &[u8]) + Send)) -> Self {
        Self { take, room, at: 0, step: Vec::new() }
    }

    /// Room for the next step of what is left; `None`: there is more than was announced.
    fn next(&mut self, left: u64) -> Option<&mut [u8]> {
        let count = left.min(COPIED_BYTES as u64);
        if self.at + count > self.room {
            return None;
        }
        self.step.resize(usize::try_from(count).ok()?, 0);
        Some(&mut self.step)
    }

    fn give(&mut self) -> &[u8] {
        (self.take)(self.at, &self.step);
        self.at += self.step.len() as u64;
        &self.step
    }
}

impl Target for Steps<'_> {
    fn begin(&mut self, key: &[u8], length: u64) -> Result<(), Error> {
        self.at = 0;
        let buffer = self.room;
        if length <= buffer { Ok(()) } else { Err(Error::Buffer { key: shown(key), length, buffer }) }
    }

    fn take(&mut self, answer: &mut Answer) -> Result<&[u8], TransferError> {
        let (left, maximum) = (answer.left(), self.room - self.at);
        let step = self.next(left);
        let step = step.ok_or(TransferError::Length { what: "answer", length: left, minimum: 0, maximum })?;
        answer.read(step)?;
        Ok(self.give())
    }

    fn land(&mut self, landed: &mut Landed<'_>) -> Result<&[u8], Error> {
        let step = self.next(one_sided::step(landed) as u64).ok_or_else(too_long)?;
        landed.take(step).map_err(|_| too_long())?;
        Ok(self.give())
    }
}
