//! Serves everything but data: segments by name, descriptors of shared memory, messages, notifications, probes.
//!
//! Frames are read into a buffer and answered in one send for as many as had arrived.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::PollFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::{Connection, Context};
use crate::error::Failure;
use crate::memory::Memory;
use crate::message::Responder;
use crate::pieces::Pieces;
use crate::rdma::Serving;
use crate::region::Region;
use crate::slice::{AccessRights, Direction, RegionId, RegionKey};
use crate::spin::ServingThread;
use crate::stream::Stream;
use crate::wire::{self, HEADER_BYTES, Header, ITEM_BYTES, Kind, SegmentInfo, WireError};

/// Bytes read at once: many small messages.
const READ_BYTES: usize = 64 << 10;
/// Answers that wait for the end of a run of requests; more are sent before.
const ANSWER_BYTES: usize = 256 << 10;

/// An answer of at most this many bytes fits what is free in a socket that poll(2) calls writable.
const SHORT_BYTES: usize = 4096;

/// The answering side of a control connection. Shared by the thread that serves it and by those that answer later.
pub(crate) struct Replies {
    connection: Arc<Connection>,
    out: Mutex<Vec<u8>>,
    serving: ThreadId,
    unanswered: AtomicUsize,
}

impl Replies {
    /// Whose requests they answer.
    pub(crate) fn peer_address(&self) -> Option<std::net::SocketAddr> {
        self.connection.stream.peer_address()
    }

    /// Answers message `id`.
    pub(crate) fn answer(&self, id: u64, reply: Result<&[&[u8]], Failure>) {
        self.unanswered.fetch_sub(1, Ordering::AcqRel);
        let length = |parts: &[&[u8]]| parts.iter().map(|part| part.len()).sum::<usize>();
        let (status, parts) = match reply {
            Ok(parts) if length(parts) <= wire::MESSAGE_MAX => (0, parts),
            Ok(_) => (Failure::OutOfRange as u32, &[][..]),
            Err(failure) => (failure as u32, &[][..]),
        };
        let header = Header { status, length: length(parts) as u64, ..Header::new(Kind::Reply, id) };
        self.push_parts(&header, parts);
        if std::thread::current().id() != self.serving {
            self.flush();
        }
    }

    /// Answers message `id` if that needs no wait; `false`: it was not answered.
    pub(crate) fn answer_at_once(&self, id: u64, reply: &[u8]) -> bool {
        let Some(mut out) = self.out.try_lock().filter(|out| out.is_empty() && reply.len() <= SHORT_BYTES) else {
            return false;
        };
        let writable = self.connection.stream.poll(PollFlags::OUT, Duration::ZERO);
        if !writable.is_ok_and(|events| events.contains(PollFlags::OUT)) {
            return false;
        }
        self.unanswered.fetch_sub(1, Ordering::AcqRel);
        Header { length: reply.len() as u64, ..Header::new(Kind::Reply, id) }.encode(&mut out);
        self.send(&mut out, &[reply]);
        true
    }

    fn push(&self, header: &Header, body: &[u8]) {
        self.push_parts(header, &[body]);
    }

    fn push_parts(&self, header: &Header, parts: &[&[u8]]) {
        let mut out = self.out.lock();
        header.encode(&mut out);
        if out.len() as u64 + header.length >= ANSWER_BYTES as u64 {
            return self.send(&mut out, parts);
        }
        parts.iter().for_each(|part| out.extend_from_slice(part));
    }

    fn flush(&self) {
        let mut out = self.out.lock();
        if !out.is_empty() {
            self.send(&mut out, &[]);
        }
    }

    /// Sends what waits, and `parts` behind it.
    fn send(&self, out: &mut Vec<u8>, parts: &[&[u8]]) {
        let mut slices: Vec<_> = std::iter::once(&out[..]).chain(parts.iter().copied()).map(IoSlice::new).collect();
        let mut left = &mut slices[..];
        IoSlice::advance_slices(&mut left, 0);
        while !left.is_empty() {
            match (&mut &self.connection.stream).write_vectored(left) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(count) if count > 0 => IoSlice::advance_slices(&mut left, count),
                _ => {
                    self.connection.stream.shutdown();
                    break;
                }
            }
        }
        out.clear();
    }
}

pub(super) fn serve(context: &Arc<Context>, connection: &Arc<Connection>) -> Result<(), Failure> {
    let replies = Arc::new(Replies {
        connection: Arc::clone(connection),
        out: Mutex::default(),
        serving: std::thread::current().id(),
        unanswered: AtomicUsize::new(0),
    });
    let mut buffer = vec![0; READ_BYTES];
    let (mut start, mut end) = (0, 0);
    // Destroyed when this returns, which is before the connection is closed.
    let mut serving = Serving::default();
    let thread = ServingThread::begin();
    loop {
        let received = &buffer[start..end];
        let header = if received.len() < HEADER_BYTES {
            None
        } else {
            Some(Header::decode(received).map_err(WireError::failure)?)
        };
        let needed = HEADER_BYTES + header.map_or(0, |header| header.length as usize);
        if let Some(header) = header
            && header.kind == Kind::Message
            && needed > READ_BYTES
        {
            // It takes a while to come.
            replies.flush();
            let behind = (start + HEADER_BYTES, end);
            let mut pieces = Pieces::new(&connection.stream, &mut buffer[..], behind, header.length);
            message(context, &replies, header.id, Body::Coming(&mut pieces));
            (start, end) = pieces.finish()?;
            continue;
        }
        if let Some(header) = header
            && received.len() >= needed
        {
            handle(context, &replies, &mut serving, &header, &received[HEADER_BYTES..needed])?;
            start += needed;
            continue;
        }
        replies.flush();
        buffer.copy_within(start..end, 0);
        (start, end) = (0, end - start);
        if buffer.len() < needed {
            buffer.resize(needed, 0);
        }
        let read = thread.request(&connection.stream, || (&mut &connection.stream).read(&mut buffer[end..]));
        match read {
            Ok(0) => return if end == 0 { Ok(()) } else { Err(Failure::ConnectionLost) },
            Ok(count) => end += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && end == 0 => {
                // Idle: what a large notification needed is given back.
                buffer.truncate(READ_BYTES);
                buffer.shrink_to_fit();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Failure::Silent),
            Err(_) => return Err(Failure::ConnectionLost),
        }
    }
}

fn handle(
    context: &Arc<Context>,
    replies: &Arc<Replies>,
    serving: &mut Serving,
    header: &Header,
    body: &[u8],
) -> Result<(), Failure> {
    let id = header.id;
    match header.kind {
        Kind::Ping => replies.push(&Header::new(Kind::Pong, id), &[]),
        Kind::Message => message(context, replies, id, Body::Here(body)),
        Kind::Notify => {
            let status = context.notifications.push(body).err().map_or(0, |failure| failure as u32);
            replies.push(&Header { status, ..Header::new(Kind::Noted, id) }, &[]);
        }
        Kind::Open => {
            let region = std::str::from_utf8(body).ok().and_then(|name| context.regions.by_name(name));
            match region {
                Some(region) => push_segment(replies, Kind::Segment, id, &info(&region)),
                None => push_failure(replies, Kind::Segment, id, Failure::NoRegion),
            }
        }
        Kind::Where => {
            let body = wire::encode_addresses(context.advertised.get().map_or(&[], Vec::as_slice));
            replies.push(&Header { length: body.len() as u64, ..Header::new(Kind::Here, id) }, &body);
        }
        Kind::Map => match map(context, replies, id, body) {
            Ok(()) => {}
            Err(failure) => push_failure(replies, Kind::Mapped, id, failure),
        },
        Kind::Ports => push_body(replies, Kind::PortList, id, &context.rdma.port_list()),
        Kind::Pair => match serving.pair(&context.rdma, body) {
            Ok(endpoint) => push_body(replies, Kind::Paired, id, &endpoint),
            Err(failure) => push_failure(replies, Kind::Paired, id, failure),
        },
        Kind::Keys => match keys(context, body) {
            Ok(list) => push_body(replies, Kind::KeyList, id, &list),
            Err(failure) => push_failure(replies, Kind::KeyList, id, failure),
        },
        _ => return Err(Failure::Protocol),
    }
    Ok(())
}

/// The keys of a region for RDMA devices, for who knows its key. What they allow is what the region was registered with.
fn keys(context: &Context, body: &[u8]) -> Result<Vec<u8>, Failure> {
    let item: &[u8; ITEM_BYTES] = body.try_into().map_err(|_| Failure::Protocol)?;
    let allowed = |direction| context.regions.admit(&wire::decode_item(item, direction));
    match allowed(Direction::Read).or_else(|_| allowed(Direction::Write)) {
        Ok(used) => Ok(context.rdma.key_list(used.region())),
        Err(failure) => {
            context.served.refused_requests.fetch_add(1, Ordering::Relaxed);
            Err(failure)
        }
    }
}

/// A message's bytes.
enum Body<'a, 'b> {
    Here(&'a [u8]),
    Coming(&'a mut Pieces<'b>),
}

fn message(context: &Arc<Context>, replies: &Arc<Replies>, id: u64, body: Body<'_, '_>) {
    let before = replies.unanswered.fetch_add(1, Ordering::AcqRel);
    if before >= context.settings.messages {
        return replies.answer(id, Err(Failure::Overloaded));
    }
    let handler = context.handler.read().as_ref().map(Arc::clone);
    // Without a handler the responder is dropped: no answer.
    let responder = Responder::new(Arc::clone(replies), id);
    match (handler, body) {
        (Some(handler), Body::Here(body)) => handler.handle(body, responder),
        (Some(handler), Body::Coming(pieces)) => handler.handle_pieces(pieces, responder),
        (None, _) => {}
    }
}

fn info(region: &Region) -> SegmentInfo {
    SegmentInfo {
        region: region.id,
        key: region.key,
        length: region.length(),
        rights: region.rights,
        is_file: region.file().is_some(),
    }
}

fn push_segment(replies: &Replies, kind: Kind, id: u64, info: &SegmentInfo) {
    let mut body = Vec::with_capacity(wire::SEGMENT_BYTES);
    info.encode(&mut body);
    push_body(replies, kind, id, &body);
}

fn push_body(replies: &Replies, kind: Kind, id: u64, body: &[u8]) {
    replies.push(&Header { length: body.len() as u64, ..Header::new(kind, id) }, body);
}

fn push_failure(replies: &Replies, kind: Kind, id: u64, failure: Failure) {
    replies.push(&Header { status: failure as u32, ..Header::new(kind, id) }, &[]);
}

/// Passes the descriptor of a region that the peer may read; opened read-only unless the peer may write. Region 0 is the
/// board of registered regions.
fn map(context: &Context, replies: &Replies, id: u64, body: &[u8]) -> Result<(), Failure> {
    if !matches!(replies.connection.stream, Stream::Unix(_)) {
        return Err(Failure::NoRight);
    }
    let item: &[u8; ITEM_BYTES] = body.try_into().map_err(|_| Failure::Protocol)?;
    let access = wire::decode_item(item, Direction::Read);
    if access.region == RegionId(0) {
        let memory = context.retired.memory();
        let (region, key, rights) = (RegionId(0), RegionKey(0), AccessRights::READ);
        let info = SegmentInfo { region, key, length: memory.len(), rights, is_file: false };
        return pass(replies, id, &info, memory.file().ok_or(Failure::NoRegion)?);
    }
    let used = context.regions.admit(&access)?;
    let region = used.region();
    let of_memory = || region.memory().and_then(Memory::file);
    let file = region.file().map_or_else(of_memory, |file| file.descriptor()).ok_or(Failure::NoRegion)?;
    pass(replies, id, &info(region), file)
}

fn pass(replies: &Replies, id: u64, info: &SegmentInfo, file: BorrowedFd<'_>) -> Result<(), Failure> {
    let opened = if info.rights.remote_write { None } else { Some(read_only(file).map_err(|_| Failure::System)?) };
    let descriptors = [opened.as_ref().map_or(file, |opened| opened.as_fd())];
    let mut frame = Vec::with_capacity(HEADER_BYTES + wire::SEGMENT_BYTES);
    Header { length: wire::SEGMENT_BYTES as u64, ..Header::new(Kind::Mapped, id) }.encode(&mut frame);
    info.encode(&mut frame);
    // In order with the other answers, and in one piece: the peer takes the descriptor with the first byte.
    let mut out = replies.out.lock();
    if !out.is_empty() {
        replies.send(&mut out, &[]);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let slices = [IoSlice::new(&frame)];
    let sent = rustix::net::sendmsg(&replies.connection.stream, &slices, &mut ancillary, SendFlags::NOSIGNAL);
    match sent {
        Ok(count) if count == frame.len() => Ok(()),
        _ => {
            replies.connection.stream.shutdown();
            Ok(())
        }
    }
}

/// Another descriptor of the same memory that can't write.
fn read_only(file: BorrowedFd<'_>) -> io::Result<std::fs::File> {
    use std::os::fd::AsRawFd;
    std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A peer that reads nothing: answers are given as long as it has room, whole ones, and never waited for.
    #[test]
    fn an_answer_at_once_does_not_wait_for_its_peer() {
        let (here, mut there) = UnixStream::pair().expect("sockets");
        let replies = Replies {
            connection: Arc::new(Connection::new(Stream::Unix(here))),
            out: Mutex::default(),
            serving: std::thread::current().id(),
            unanswered: AtomicUsize::new(1 << 20),
        };
        assert!(!replies.answer_at_once(0, &[0; SHORT_BYTES + 1]), "too long");
        let answered = (0..1 << 16).take_while(|&id| replies.answer_at_once(id, &[7; SHORT_BYTES])).count();
        assert!((2..1 << 16).contains(&answered), "{answered}");
        drop(replies);
        let mut received = Vec::new();
        there.read_to_end(&mut received).expect("all of it");
        assert_eq!(received.len(), answered * (HEADER_BYTES + SHORT_BYTES));
        for (id, frame) in received.chunks(HEADER_BYTES + SHORT_BYTES).enumerate() {
            let header = Header::decode(frame).expect("a frame");
            assert_eq!((header.kind, header.id, header.length), (Kind::Reply, id as u64, SHORT_BYTES as u64));
        }
    }
}
