//! Serves READ and WRITE: the bytes go straight from and to registered memory.
//!
//! Each item is checked by key, right and bounds before a byte moves; the regions stay in use until the frame is done.
//! Items that are refused cost the others nothing: their status says why, and their bytes are left out (READ) or
//! received into the sink (WRITE).
//!
//! Bytes of files go through staged memory: read before the answer begins, because its header says what failed; written
//! after all have arrived. The thread waits for the disk, so each file has so many frames at once
//! ([`SegmentFile::serve`](crate::file::SegmentFile::serve)); slices of others are refused. Such a turn ends with the disk's
//! work: none is held while a peer's socket is waited for.
//!
//! A FENCE names another connection of the same engine: it is ended before anything that follows is served, so that
//! bytes that it still holds can't arrive after bytes that replace them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::staging::Staged;
use super::{Connection, Context, Registry, fence};
use crate::error::Failure;
use crate::file::ServedFrame;
use crate::lend::{Lending, Wait};
use crate::memory::Memory;
use crate::region::{RegionUse, RemoteAccess};
use crate::slice::Direction;
use crate::spin::ServingThread;
use crate::wire::{self, FENCE_BYTES, HEADER_BYTES, Header, ITEM_BYTES, Kind, OPENING_BYTES, SOME_FAILED, WireError};

/// For a file's turn and for staged memory a frame waits this long: less than its peer waits for the answer.
const ROOM_TIMEOUT: Duration = Duration::from_secs(2);

/// What is asked of one slice.
struct Item {
    access: RemoteAccess,
    /// Place of its region's use.
    admitted: Result<usize, Failure>,
    /// Of a slice of a file: where in the frame's staged memory its bytes are.
    staged_at: Option<u64>,
}

/// One connection's state, reused from frame to frame.
#[derive(Default)]
struct Served {
    receipt: Lending,
    answer: Lending,
    items: Vec<Item>,
    uses: Vec<RegionUse>,
}

pub(super) fn serve(context: &Context, connections: &Registry, connection: &Arc<Connection>) -> Result<(), Failure> {
    let (mut served, thread) = (Served::default(), ServingThread::begin());
    loop {
        served.receipt.begin_receipt(OPENING_BYTES);
        if !thread.request(&connection.stream, || receive(&mut served.receipt, connection, true))? {
            return Ok(());
        }
        let header = Header::decode(served.receipt.control()).map_err(WireError::failure)?;
        let direction = match header.kind {
            Kind::Read => Direction::Read,
            Kind::Write => Direction::Write,
            Kind::Fence if header.length == FENCE_BYTES as u64 => {
                let body = &served.receipt.control()[HEADER_BYTES..];
                fence(connections, connection, wire::decode_fence(body)?)?;
                continue;
            }
            _ => return Err(Failure::Protocol),
        };
        served.items.clear();
        served.admit(context, &header, direction, HEADER_BYTES)?;
        if header.count > 1 {
            served.receipt.begin_receipt(usize::from(header.count - 1) * ITEM_BYTES);
            receive(&mut served.receipt, connection, false)?;
            served.admit(context, &header, direction, 0)?;
        }
        let asked = served.items.iter().try_fold(0_u64, |sum, item| sum.checked_add(item.access.length));
        if asked != Some(header.length) || served.items.len() != usize::from(header.count) {
            return Err(Failure::Protocol);
        }
        connection.busy_with.lock().extend(served.uses.iter().map(|used| used.region().id));
        let done = match direction {
            Direction::Read => served.read(context, connection, &header),
            Direction::Write => served.write(context, connection, &header),
        };
        connection.busy_with.lock().clear();
        served.receipt.clear();
        served.answer.clear();
        served.uses.clear();
        done?;
    }
}

impl Served {
    /// Decodes and checks the items in the received control bytes from `start` on.
    fn admit(&mut self, context: &Context, header: &Header, direction: Direction, start: usize) -> Result<(), Failure> {
        let (items, rest) = self.receipt.control()[start..].as_chunks::<ITEM_BYTES>();
        if !rest.is_empty() || self.items.len() + items.len() > usize::from(header.count) {
            return Err(Failure::Protocol);
        }
        for item in items {
            let access = wire::decode_item(item, direction);
            // Most frames stay in one region: its use covers them all.
            let admitted = match self.uses.last() {
                Some(used) if used.region().id == access.region => {
                    access.check(used.region()).map(|()| self.uses.len() - 1)
                }
                _ => context.regions.admit(&access).map(|used| {
                    self.uses.push(used);
                    self.uses.len() - 1
                }),
            };
            if admitted.is_err() {
                context.served.refused_requests.fetch_add(1, Ordering::Relaxed);
            }
            self.items.push(Item { access, admitted, staged_at: None });
        }
        Ok(())
    }

    fn read(&mut self, context: &Context, connection: &Connection, header: &Header) -> Result<(), Failure> {
        let latest = Instant::now() + ROOM_TIMEOUT;
        // Before memory: a file that hangs takes none of it from others.
        let turns = self.take_turns(context, Direction::Read, latest);
        let staged = self.stage(context, latest);
        if let Some(staged) = &staged {
            self.move_files(Direction::Read, &staged.memory);
        }
        drop(turns);
        let length = self.admitted_bytes();
        self.begin_answer(header, Kind::Data, length);
        self.lend_admitted(Direction::Read, staged.as_ref())?;
        context.served.read_bytes.fetch_add(length, Ordering::Relaxed);
        send(&mut self.answer, connection)
    }

    fn write(&mut self, context: &Context, connection: &Connection, header: &Header) -> Result<(), Failure> {
        let staged = self.stage(context, Instant::now() + ROOM_TIMEOUT);
        self.receipt.begin_receipt(0);
        self.lend_admitted(Direction::Write, staged.as_ref())?;
        receive(&mut self.receipt, connection, false)?;
        if let Some(staged) = &staged {
            let _turns = self.take_turns(context, Direction::Write, Instant::now() + ROOM_TIMEOUT);
            self.move_files(Direction::Write, &staged.memory);
        }
        context.served.written_bytes.fetch_add(self.admitted_bytes(), Ordering::Relaxed);
        self.begin_answer(header, Kind::Written, 0);
        send(&mut self.answer, connection)
    }

    fn admitted_bytes(&self) -> u64 {
        self.items.iter().filter(|item| item.admitted.is_ok()).map(|item| item.access.length).sum()
    }

    /// Turns of slices of files, until they are dropped; those that get none are refused.
    fn take_turns(&mut self, context: &Context, direction: Direction, latest: Instant) -> Vec<ServedFrame> {
        let mut turns = Vec::new();
        for (place, used) in self.uses.iter().enumerate() {
            let Some(file) = used.region().file() else { continue };
            let of_file = |item: &&mut Item| item.admitted == Ok(place);
            let bytes = self.items.iter_mut().filter(of_file).map(|item| item.access.length).sum();
            match file.serve(direction, bytes, latest) {
                Ok(turn) => turns.push(turn),
                Err(failure) => {
                    for item in self.items.iter_mut().filter(of_file) {
                        item.admitted = Err(failure);
                        context.served.refused_requests.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
        turns
    }

    /// Gives slices of files a place in staged memory; `None` if there are none, or no room for them, which is their end.
    fn stage<'a>(&mut self, context: &'a Context, latest: Instant) -> Option<Staged<'a>> {
        let mut length = 0;
        for item in &mut self.items {
            if item.admitted.is_ok_and(|place| self.uses[place].region().file().is_some()) {
                item.staged_at = Some(length);
                length += item.access.length;
            }
        }
        let of_files = self.items.iter_mut().filter(|item| item.staged_at.is_some());
        let mut of_files = of_files.peekable();
        of_files.peek()?;
        let staged = context.staging.take(length, latest);
        staged.map_err(|failure| of_files.for_each(|item| item.admitted = Err(failure))).ok()
    }

    /// Moves slices of files from or to their staged places, and waits for all of them.
    fn move_files(&mut self, direction: Direction, staged: &Memory) {
        let (sender, receiver) = mpsc::channel();
        for (index, item) in self.items.iter_mut().enumerate() {
            let (Ok(place), Some(staged_at)) = (item.admitted, item.staged_at) else { continue };
            let Some(file) = self.uses[place].region().file() else { continue };
            // Until its end is heard of, it failed.
            item.admitted = Err(Failure::System);
            let (access, sender) = (item.access, sender.clone());
            file.transfer(direction, (staged, staged_at), access.offset, access.length, move |result| {
                let _ = sender.send((index, result.map(|()| place)));
            });
        }
        drop(sender);
        receiver.iter().for_each(|(index, result)| self.items[index].admitted = result);
    }

    /// Header, and status bytes if an item was refused.
    fn begin_answer(&mut self, header: &Header, kind: Kind, length: u64) {
        let items = &self.items;
        let status = if items.iter().all(|item| item.admitted.is_ok()) { 0 } else { SOME_FAILED };
        self.answer.begin(|out| {
            Header { kind, count: header.count, id: header.id, length, status }.encode(out);
            if status == SOME_FAILED {
                out.extend(items.iter().map(|item| item.admitted.err().map_or(0, |failure| failure as u8)));
            }
        });
    }

    /// Lends the memory of admitted items; bytes for refused ones go to the sink.
    fn lend_admitted(&mut self, direction: Direction, staged: Option<&Staged<'_>>) -> Result<(), Failure> {
        for Item { access, admitted, staged_at } in &self.items {
            let lending = if direction == Direction::Read { &mut self.answer } else { &mut self.receipt };
            match admitted {
                Ok(place) => {
                    let in_memory = || Some((self.uses[*place].region().memory()?, access.offset));
                    let in_staging = |at| Some((&staged?.memory, at));
                    let (memory, offset) = staged_at.map_or_else(in_memory, in_staging).ok_or(Failure::System)?;
                    lending.lend(memory, offset, access.length).map_err(|_| Failure::OutOfRange)?;
                }
                Err(_) if direction == Direction::Write => lending.sink(access.length),
                Err(_) => {}
            }
        }
        Ok(())
    }
}

/// Receives all of it. `false` if the peer ended the connection between frames; only there it may also be idle.
fn receive(receipt: &mut Lending, connection: &Connection, is_between_frames: bool) -> Result<bool, Failure> {
    while receipt.left() > 0 {
        let is_idle = is_between_frames && receipt.done() == 0;
        match connection.stream.receive(receipt, Wait::All) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && is_idle => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Failure::Silent),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && is_idle => return Ok(false),
            Err(_) => return Err(Failure::ConnectionLost),
        }
    }
    Ok(true)
}

fn send(answer: &mut Lending, connection: &Connection) -> Result<(), Failure> {
    while answer.left() > 0 || connection.stream.has_unsent() {
        match connection.stream.send(answer, Wait::Some) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Failure::Silent),
            Err(_) => return Err(Failure::ConnectionLost),
        }
    }
    Ok(())
}
