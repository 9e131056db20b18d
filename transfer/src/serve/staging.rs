//! Memory in which bytes of files wait on their way between disk and socket.
//!
//! Whether a file gives its bytes must be known before an answer begins, so a frame's are all read first. All frames
//! together have [`BYTES_MAX`]; one that finds no room waits for a while, then is refused.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::error::Failure;
use crate::memory::Memory;

/// On their way at once, in all connections.
const BYTES_MAX: u64 = 256 << 20;
/// Kept for the next frames.
const SPARE_BYTES_MAX: u64 = 32 << 20;
/// Buffers are powers of two, from here up.
const BUFFER_BYTES_MIN: u64 = 64 << 10;

/// See the module.
#[derive(Default)]
pub(crate) struct Staging {
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    taken_bytes: u64,
    spare: Vec<Memory>,
}

/// Memory for one frame; its room is free again with its end.
pub(super) struct Staged<'a> {
    staging: &'a Staging,
    pub(super) memory: Memory,
}

impl Staging {
    /// Memory for at least `length` bytes, waiting until there is room.
    ///
    /// # Errors
    /// `Overloaded`: there was none until `until`, or there never is for that many. `System`.
    pub(super) fn take(&self, length: u64, until: Instant) -> Result<Staged<'_>, Failure> {
        if length > BYTES_MAX {
            return Err(Failure::Overloaded);
        }
        let length = length.next_power_of_two().max(BUFFER_BYTES_MIN);
        let mut state = self.state.lock();
        while state.taken_bytes + length > BYTES_MAX {
            if self.freed.wait_until(&mut state, until).timed_out() {
                return Err(Failure::Overloaded);
            }
        }
        state.taken_bytes += length;
        let spare = state.spare.iter().position(|memory| memory.len() == length);
        let spare = spare.map(|place| state.spare.swap_remove(place));
        drop(state);
        let memory = match spare {
            Some(memory) => Ok(memory),
            None => Memory::anonymous(length as usize),
        };
        memory.map(|memory| Staged { staging: self, memory }).map_err(|error| {
            tracing::warn!(%error, length, "no memory for bytes of files");
            self.give_back(length, None);
            Failure::System
        })
    }

    fn give_back(&self, length: u64, memory: Option<Memory>) {
        let mut state = self.state.lock();
        state.taken_bytes -= length;
        let spare_bytes: u64 = state.spare.iter().map(Memory::len).sum();
        state.spare.extend(memory.filter(|_| spare_bytes + length <= SPARE_BYTES_MAX));
        drop(state);
        self.freed.notify_all();
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        self.staging.give_back(self.memory.len(), Some(self.memory.clone()));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn room_is_bounded_and_comes_back() {
        let (staging, now) = (Staging::default(), Instant::now());
        assert_eq!(staging.take(BYTES_MAX + 1, now).err(), Some(Failure::Overloaded));
        let half = || staging.take(BYTES_MAX / 2, now).expect("room");
        let (first, second) = (half(), half());
        assert_eq!(staging.take(1, now).err(), Some(Failure::Overloaded));
        std::thread::scope(|scope| {
            let waiting =
                scope.spawn(|| staging.take(1, now + Duration::from_secs(20)).map(|staged| staged.memory.len()));
            drop(first);
            assert_eq!(waiting.join().expect("no panic"), Ok(BUFFER_BYTES_MIN));
        });
        drop(second);
        let state = staging.state.lock();
        assert_eq!((state.taken_bytes, state.spare.len()), (0, 1), "large ones are not kept");
    }
}
