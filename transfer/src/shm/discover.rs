//! Finding a peer on this host, and mapping its memory.

use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use super::Board;
use crate::error::Failure;
use crate::file::SegmentFile;
use crate::memory::Memory;
use crate::region::{Backing, RemoteAccess};
use crate::settings::Settings;
use crate::slice::{Direction, RegionId, RegionKey};
use crate::stream::{ConnectError, Stream, connect_unix, greet};
use crate::wire::{self, Greeting, HEADER_BYTES, Header, ITEM_BYTES, Kind, SEGMENT_BYTES, SegmentInfo, WireError};

/// How old the news that a peer lives may be.
const LIFE_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A peer on this host.
pub(crate) struct Neighbour {
    /// Held for its end only: the kernel ends it with the peer's process.
    lifeline: Stream,
    life: Mutex<Life>,
    board: Board,
    greeting: Greeting,
    peer: Greeting,
}

struct Life {
    is_over: bool,
    checked: Instant,
}

impl Neighbour {
    /// Meets the peer that gave this welcome over TCP, if it is on this host.
    ///
    /// `Ok(None)`: it is elsewhere, or does not want to be met. Errors: it is here, but can't be reached.
    pub(crate) fn meet(
        settings: &Settings,
        greeting: Greeting,
        peer: Greeting,
        deadline: Instant,
    ) -> Result<Option<Self>, ConnectError> {
        if !settings.same_host || peer.socket_token == 0 || peer.boot_id != greeting.boot_id || peer.boot_id == 0 {
            return Ok(None);
        }
        let lifeline = Self::connect(greeting, peer, deadline)?;
        let (_, file) = map(&lifeline, RegionId(0), RegionKey(0))?;
        // All of it: how many regions it holds is the peer's bound.
        let length = rustix::fs::fstat(&file).map_err(|error| system(error.into()))?.st_size;
        let board = Memory::map_foreign(file, u64::try_from(length).unwrap_or(0), false);
        let board = Board::of_peer(board.map_err(system)?);
        let life = Mutex::new(Life { is_over: false, checked: Instant::now() });
        Ok(Some(Self { lifeline, life, board, greeting, peer }))
    }

    fn connect(greeting: Greeting, peer: Greeting, deadline: Instant) -> Result<Stream, ConnectError> {
        let stream = connect_unix(peer.socket_token)?;
        let welcome = greet(&stream, &greeting, deadline)?;
        if welcome.instance == peer.instance { Ok(stream) } else { Err(Failure::Restarted.into()) }
    }

    /// Another connection to it.
    pub(crate) fn connection(&self, deadline: Instant) -> Result<Stream, ConnectError> {
        Self::connect(self.greeting, self.peer, deadline)
    }

    /// Maps a region whose key is known, or takes its file; writable if the peer grants it and its memory allows it.
    pub(crate) fn map(&self, info: &SegmentInfo, deadline: Instant) -> Result<Backing, ConnectError> {
        let stream = self.connection(deadline)?;
        let (mapped, file) = map(&stream, info.region, info.key)?;
        if mapped.length < info.length {
            return Err(Failure::OutOfRange.into());
        }
        if mapped.is_file {
            let file = SegmentFile::of_peer(file, info.length, mapped.rights.remote_write);
            return file.map(|file| Backing::File(Arc::new(file))).map_err(system);
        }
        if mapped.rights.remote_write
            && let Ok(memory) = Memory::map_foreign(file.try_clone().map_err(system)?, info.length, true)
        {
            return Ok(Backing::Memory(memory));
        }
        Memory::map_foreign(file, info.length, false).map(Backing::Memory).map_err(system)
    }

    /// Whether the region is registered, as of now.
    pub(crate) fn has(&self, region: RegionId) -> bool {
        self.board.has(region)
    }

    /// Whether the peer's process lives, as of at most 10 ms ago.
    pub(crate) fn lives(&self, now: Instant) -> bool {
        let mut life = self.life.lock();
        if !life.is_over && now.saturating_duration_since(life.checked) >= LIFE_CHECK_INTERVAL {
            life.checked = now;
            // Nothing is ever sent on it: whatever is there to read is its end.
            let events = crate::lend::poll(
                std::os::fd::AsFd::as_fd(&self.lifeline),
                rustix::event::PollFlags::IN,
                Duration::ZERO,
            );
            life.is_over = events.map_or(true, |events| !events.is_empty());
        }
        !life.is_over
    }
}

fn system(source: io::Error) -> ConnectError {
    ConnectError { failure: Failure::System, source: Some(source) }
}

/// Asks for the descriptor of a region.
fn map(stream: &Stream, region: RegionId, key: RegionKey) -> Result<(SegmentInfo, OwnedFd), ConnectError> {
    let lost = |source| ConnectError { failure: Failure::ConnectionLost, source: Some(source) };
    let mut frame = Vec::with_capacity(HEADER_BYTES + ITEM_BYTES);
    Header { length: ITEM_BYTES as u64, ..Header::new(Kind::Map, 1) }.encode(&mut frame);
    let access = RemoteAccess { direction: Direction::Read, region, key, offset: 0, length: 0 };
    wire::encode_item(&mut frame, &access);
    (&mut &*stream).write_all(&frame).map_err(lost)?;

    let mut answer = [0; HEADER_BYTES + SEGMENT_BYTES];
    let (mut received, mut file, mut ticks) = (0, None, 0);
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut answer[received..])];
        match rustix::net::recvmsg(stream, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) if message.bytes == 0 => return Err(lost(io::ErrorKind::UnexpectedEof.into())),
            Ok(message) => received += message.bytes,
            Err(rustix::io::Errno::INTR) => {}
            // Each try waits for a tick: 40 are 2 s.
            Err(rustix::io::Errno::AGAIN) if ticks < 40 => ticks += 1,
            Err(error) => return Err(lost(error.into())),
        }
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                file = files.last().or(file);
            }
        }
        if received < HEADER_BYTES {
            continue;
        }
        let header = Header::decode(&answer).map_err(WireError::failure)?;
        if header.status != 0 {
            return Err(header.failure().into());
        }
        if header.kind != Kind::Mapped || header.length != SEGMENT_BYTES as u64 {
            return Err(Failure::Protocol.into());
        }
        if received == answer.len() {
            let info = SegmentInfo::decode(&answer[HEADER_BYTES..]).map_err(WireError::failure)?;
            return Ok((info, file.ok_or(Failure::Protocol)?));
        }
    }
}
