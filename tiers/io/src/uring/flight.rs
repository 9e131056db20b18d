//! Operations that the kernel has, and the table that keeps their memory in place meanwhile.

use std::io;

use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{opcode, squeue};

use crate::{Completion, IoMemory, IoRequest, OnCompletion, Operation};

/// The file's number in both rings.
const FILE: Fixed = Fixed(0);

/// An operation that the kernel has, or is to get next.
pub(super) struct Flight {
    operation: Operation,
    offset: u64,
    memory: IoMemory,
    done: OnCompletion,
    /// Bytes transferred by completions before; a short transfer is carried on.
    transferred: usize,
    length: usize,
    /// Stays in place while the kernel reads it.
    vectors: Box<[libc::iovec]>,
}

// SAFETY: the iovecs point into `memory`, which the flight owns.
unsafe impl Send for Flight {}

impl Flight {
    pub(super) fn new(request: IoRequest) -> Self {
        let IoRequest { operation, offset, mut memory, done } = request;
        let length = memory.length();
        Self { operation, offset, memory, done, transferred: 0, length, vectors: Box::default() }
    }

    /// Whether there is nothing to do.
    pub(super) fn is_empty(&self) -> bool {
        self.length == 0 && self.operation != Operation::Sync
    }

    /// The submission entry for what is still to be transferred.
    fn entry(&mut self) -> squeue::Entry {
        let offset = self.offset + self.transferred as u64;
        if self.operation == Operation::Sync {
            return opcode::Fsync::new(FILE).flags(FsyncFlags::DATASYNC).build();
        }
        self.vectors = self.memory.vectors(self.transferred).into();
        let vectors = (self.vectors.as_ptr(), u32::try_from(self.vectors.len()).unwrap_or(u32::MAX));
        match (self.operation, self.memory.registered(), &*self.vectors) {
            (Operation::Write, Some(index), [one]) => {
                let length = u32::try_from(one.iov_len).unwrap_or(u32::MAX);
                opcode::WriteFixed::new(FILE, one.iov_base.cast(), length, index).offset(offset).build()
            }
            (Operation::Write, ..) => opcode::Writev::new(FILE, vectors.0, vectors.1).offset(offset).build(),
            _ => opcode::Readv::new(FILE, vectors.0, vectors.1).offset(offset).build(),
        }
    }

    /// Takes a completion's result; `None` if the operation must go on.
    fn progress(&mut self, result: i32) -> Option<io::Result<()>> {
        match usize::try_from(result) {
            // Cancelled: a thread that submitted it ended before the kernel had begun.
            Err(_) if [libc::EINTR, libc::EAGAIN, libc::ECANCELED].contains(&-result) => None,
            Err(_) => Some(Err(io::Error::from_raw_os_error(-result))),
            Ok(_) if self.operation == Operation::Sync => Some(Ok(())),
            Ok(0) if self.operation == Operation::Read => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(0) => Some(Err(io::ErrorKind::WriteZero.into())),
            Ok(count) => {
                self.transferred += count;
                (self.transferred >= self.length).then_some(Ok(()))
            }
        }
    }

    /// Gives the memory back with the result.
    pub(super) fn finish(self, result: io::Result<()>) {
        (self.done)(Completion { result, memory: self.memory });
    }

    /// Ends an operation that the kernel may still be doing: its memory is never freed.
    pub(super) fn leak(self, error: io::Error) {
        std::mem::forget((self.memory, self.vectors));
        (self.done)(Completion { result: Err(error), memory: IoMemory::empty() });
    }
}

/// What became of a completion.
pub(super) enum Landed {
    Ended(Flight, io::Result<()>),
    /// The rest of it is to be pushed.
    GoesOn(Flight),
}

/// The operations in flight, each at a place of its own, by whose number its completion names it.
pub(super) struct Flights {
    places: Vec<Option<Flight>>,
    vacant: Vec<usize>,
}

impl Flights {
    /// Room for `depth` of them.
    pub(super) fn new(depth: u32) -> Self {
        Self { places: (0..depth).map(|_| None).collect(), vacant: (0..depth as usize).rev().collect() }
    }

    pub(super) fn is_full(&self) -> bool {
        self.vacant.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.vacant.len() == self.places.len()
    }

    /// Keeps `flight` in place and has `push` give its entry to the kernel.
    ///
    /// # Errors
    /// The flight, if there is no room here or in the queue; the kernel knows nothing of it then.
    pub(super) fn launch(
        &mut self,
        mut flight: Flight,
        push: impl FnOnce(&squeue::Entry) -> bool,
    ) -> Result<(), Flight> {
        let Some(place) = self.vacant.pop() else { return Err(flight) };
        let entry = flight.entry().user_data(place as u64);
        let flight = self.places[place].insert(flight);
        if push(&entry) {
            return Ok(());
        }
        let _ = flight;
        self.vacant.push(place);
        self.places[place].take().map_or(Ok(()), Err)
    }

    /// Takes out the flight of which a completion tells.
    pub(super) fn land(&mut self, place: u64, result: i32) -> Option<Landed> {
        let place = usize::try_from(place).ok()?;
        let mut flight = self.places.get_mut(place)?.take()?;
        self.vacant.push(place);
        Some(match flight.progress(result) {
            Some(result) => Landed::Ended(flight, result),
            None => Landed::GoesOn(flight),
        })
    }

    /// Takes all of them out.
    pub(super) fn drain(&mut self) -> Vec<Flight> {
        self.vacant = (0..self.places.len()).rev().collect();
        self.places.iter_mut().filter_map(Option::take).collect()
    }
}
