//! Serves READ and WRITE: the bytes go straight from and to registered memory.
//!
//! Each item is checked by key, right and bounds before a byte moves; the regions stay in use until the frame is done.
//! Items that are refused cost the others nothing: their status says why, and their bytes are left out (READ) or
//! received into the sink (WRITE).
//!
//! A FENCE names another connection of the same engine: it is ended before anything that follows is served, so that
//! bytes that it still holds can't arrive after bytes that replace them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Connection, Context, Registry, fence};
use crate::error::Failure;
use crate::lend::{Lending, Wait};
use crate::region::{RegionUse, RemoteAccess};
use crate::slice::Direction;
use crate::wire::{self, FENCE_BYTES, HEADER_BYTES, Header, ITEM_BYTES, Kind, OPENING_BYTES, SOME_FAILED, WireError};

/// An item and, if it is admitted, the place of its region's use.
type Item = (RemoteAccess, Result<usize, Failure>);

/// One connection's state, reused from frame to frame.
#[derive(Default)]
struct Served {
    receipt: Lending,
    answer: Lending,
    items: Vec<Item>,
    uses: Vec<RegionUse>,
}

pub(super) fn serve(context: &Context, connections: &Registry, connection: &Arc<Connection>) -> Result<(), Failure> {
    let mut served = Served::default();
    loop {
        served.receipt.begin_receipt(OPENING_BYTES);
        if !receive(&mut served.receipt, connection, true)? {
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
        let asked = served.items.iter().try_fold(0_u64, |sum, (access, _)| sum.checked_add(access.length));
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
            self.items.push((access, admitted));
        }
        Ok(())
    }

    fn read(&mut self, context: &Context, connection: &Connection, header: &Header) -> Result<(), Failure> {
        let admitted = self.items.iter().filter(|(_, admitted)| admitted.is_ok());
        let length = admitted.map(|(access, _)| access.length).sum();
        self.begin_answer(header, Kind::Data, length);
        self.lend_admitted(Direction::Read)?;
        context.served.read_bytes.fetch_add(length, Ordering::Relaxed);
        send(&mut self.answer, connection)
    }

    fn write(&mut self, context: &Context, connection: &Connection, header: &Header) -> Result<(), Failure> {
        self.receipt.begin_receipt(0);
        self.lend_admitted(Direction::Write)?;
        receive(&mut self.receipt, connection, false)?;
        let admitted = self.items.iter().filter(|(_, admitted)| admitted.is_ok());
        let written = admitted.map(|(access, _)| access.length).sum();
        context.served.written_bytes.fetch_add(written, Ordering::Relaxed);
        self.begin_answer(header, Kind::Written, 0);
        send(&mut self.answer, connection)
    }

    /// Header, and status bytes if an item was refused.
    fn begin_answer(&mut self, header: &Header, kind: Kind, length: u64) {
        let items = &self.items;
        let status = if items.iter().all(|(_, admitted)| admitted.is_ok()) { 0 } else { SOME_FAILED };
        self.answer.begin(|out| {
            Header { kind, count: header.count, id: header.id, length, status }.encode(out);
            if status == SOME_FAILED {
                out.extend(items.iter().map(|(_, admitted)| admitted.err().map_or(0, |failure| failure as u8)));
            }
        });
    }

    /// Lends the memory of admitted items; bytes for refused ones go to the sink.
    fn lend_admitted(&mut self, direction: Direction) -> Result<(), Failure> {
        for (access, admitted) in &self.items {
            let lending = if direction == Direction::Read { &mut self.answer } else { &mut self.receipt };
            match admitted {
                Ok(place) => {
                    let memory = &self.uses[*place].region().memory;
                    lending.lend(memory, access.offset, access.length).map_err(|_| Failure::OutOfRange)?;
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
