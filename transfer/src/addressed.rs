//! An engine whose memory is named by its address, here and at peers: for integrations that know no regions.
//!
//! [`Engine`] knows regions and tickets. Here a peer is a session (`host:port`), and memory is an address in the peer's
//! process. So each such engine answers one message more: which regions are registered, at which addresses. A peer's answer
//! is kept until a transfer shows that it is out of date. Whoever may connect may therefore use what is registered: the
//! engine's secret is the door.
//!
//! Notifications are messages, too: a sender hears that one has arrived, also without a transfer.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::batch::Batch;
use crate::engine::{BatchOptions, Engine, RegionTicket};
use crate::error::{Failure, Kind, TransferError};
use crate::memory::Memory;
use crate::message::{Handler, Responder};
use crate::settings::Settings;
use crate::slice::{AccessRights, Direction, PeerId, RegionId, RegionKey, RemoteSlice, Request, SegmentId, Slice};

/// Asks which regions there are.
const ASK_REGIONS: &[u8] = b"tidepool.regions.1";
/// Begins a notification.
const NOTIFY: &[u8] = b"tidepool.notify.1:";
/// Bytes of one region in the answer: address, length, id, key; little-endian.
const REGION_BYTES: usize = 8 + 8 + 8 + 16;

/// What a call of an [`AddressedEngine`] fails with.
#[derive(Debug, thiserror::Error)]
pub enum AddressedError {
    /// Nothing is registered in all of that range here.
    #[error("the memory at {0:#x} is not registered here")]
    NotRegistered(u64),
    /// Nothing is registered in all of that range at the peer.
    #[error("the memory at {0:#x} is not registered at the peer")]
    NotRegisteredAtPeer(u64),
    /// Overlaps what is registered.
    #[error("the memory at {0:#x} overlaps memory that is registered")]
    Overlap(u64),
    /// The engine's.
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

/// The two ends of one transfer, as addresses of the process that each lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressedRange {
    /// Here.
    pub local: u64,
    /// At the peer.
    pub remote: u64,
    /// Bytes. A range of none needs no registered memory.
    pub length: u64,
}

/// An engine, and what is known of peers' memory. Threads share it.
#[derive(Debug)]
pub struct AddressedEngine {
    engine: Engine,
    shared: Arc<Shared>,
    peers: Mutex<HashMap<String, Known>>,
}

#[derive(Debug)]
struct Shared {
    regions: Mutex<BTreeMap<u64, RegionTicket>>,
    notifications: Mutex<VecDeque<Vec<u8>>>,
    notifications_limit: usize,
}

/// A peer and the regions that it said it has, by address.
#[derive(Clone, Debug)]
struct Known {
    peer: PeerId,
    regions: Arc<BTreeMap<u64, (u64, SegmentId)>>,
}

struct Answers(Arc<Shared>);

impl Handler for Answers {
    fn handle(&self, request: &[u8], responder: Responder) {
        if request == ASK_REGIONS {
            let reply = encode_regions(&self.0.regions.lock());
            responder.reply(&reply);
        } else if let Some(notification) = request.strip_prefix(NOTIFY) {
            let mut waiting = self.0.notifications.lock();
            if waiting.len() < self.0.notifications_limit {
                waiting.push_back(notification.to_vec());
                drop(waiting);
                responder.reply(b"");
            }
        }
        // A responder that is dropped says that there is no answer.
    }
}

impl AddressedEngine {
    /// Starts an engine: it listens from here on.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start(settings: Settings) -> Result<Self, TransferError> {
        let notifications_limit = settings.notifications;
        let engine = Engine::start(settings)?;
        let (regions, notifications) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { regions, notifications, notifications_limit });
        engine.set_handler(Arc::new(Answers(Arc::clone(&shared))));
        Ok(Self { engine, shared, peers: Mutex::default() })
    }

    /// The engine under it.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Registers memory that lies at `address`.
    ///
    /// # Errors
    /// [`AddressedError::Overlap`]; as [`Engine::register`].
    pub fn register(&self, address: u64, memory: &Memory, rights: AccessRights) -> Result<(), AddressedError> {
        let mut regions = self.shared.regions.lock();
        let before = regions.range(..address.saturating_add(memory.len())).next_back();
        if before.is_some_and(|(start, ticket)| start.saturating_add(ticket.length) > address) {
            return Err(AddressedError::Overlap(address));
        }
        regions.insert(address, self.engine.register(memory, rights, None)?);
        Ok(())
    }

    /// Withdraws what was registered at `address`, as [`Engine::unregister`] does.
    ///
    /// # Errors
    /// [`AddressedError::NotRegistered`]; as [`Engine::unregister`].
    pub fn unregister(&self, address: u64, deadline: Instant) -> Result<(), AddressedError> {
        let ticket = self.shared.regions.lock().remove(&address).ok_or(AddressedError::NotRegistered(address))?;
        Ok(self.engine.unregister(ticket.region, deadline)?)
    }

    /// Submits a batch of transfers with the peer at `session`.
    ///
    /// # Errors
    /// As [`Engine::connect`] and [`Engine::submit`]; one of the addresses is not registered.
    pub fn submit(
        &self,
        session: &str,
        ranges: &[AddressedRange],
        direction: Direction,
        deadline: Instant,
    ) -> Result<Batch, AddressedError> {
        let attempt = || {
            let requests = self.requests(&self.known(session, deadline)?, ranges, direction)?;
            let options = BatchOptions { deadline: Some(deadline), ..BatchOptions::default() };
            Ok(self.engine.submit(&requests, options)?)
        };
        match attempt() {
            Err(AddressedError::NotRegisteredAtPeer(_)) => self.forget(session, false),
            Err(AddressedError::Transfer(error)) if error.kind() == Kind::OpenAgain => self.forget(session, true),
            answer => return answer,
        }
        attempt()
    }

    /// Moves bytes and waits for it. What the peer withdrew and registered anew is found by a second attempt: the same bytes
    /// are written or read again. `wait` waits for a batch, in the caller's way.
    ///
    /// # Errors
    /// As [`AddressedEngine::submit`]; what the batch failed with; those of `wait`.
    pub fn transfer<E: From<AddressedError>>(
        &self,
        session: &str,
        ranges: &[AddressedRange],
        direction: Direction,
        deadline: Instant,
        mut wait: impl FnMut(&Batch) -> Result<Result<(), Failure>, E>,
    ) -> Result<(), E> {
        let failed = |failure| {
            AddressedError::Transfer(TransferError::Peer { address: session.to_owned(), failure, source: None })
        };
        match wait(&self.submit(session, ranges, direction, deadline)?)? {
            Ok(()) => return Ok(()),
            Err(failure) if failure.kind() == Kind::OpenAgain => self.forget(session, failure == Failure::Restarted),
            Err(failure) => return Err(failed(failure).into()),
        }
        let again = self.submit(session, ranges, direction, deadline)?;
        wait(&again)?.map_err(|failure| failed(failure).into())
    }

    /// Tells a peer something; it has it when this returns.
    ///
    /// # Errors
    /// As [`Engine::call`]; `NoAnswer` if the peer has as many as it keeps.
    pub fn notify(&self, session: &str, notification: &[u8], deadline: Instant) -> Result<(), AddressedError> {
        let known = self.known(session, deadline)?;
        self.engine.call(known.peer, &[NOTIFY, notification].concat(), deadline)?;
        Ok(())
    }

    /// What peers told since the last call.
    #[must_use]
    pub fn notifications(&self) -> Vec<Vec<u8>> {
        self.shared.notifications.lock().drain(..).collect()
    }

    /// Asks a peer whether it is there.
    ///
    /// # Errors
    /// As [`Engine::connect`] and [`Engine::probe`].
    pub fn probe(&self, session: &str, deadline: Instant) -> Result<(), TransferError> {
        let peer = self.engine.connect(session, deadline)?;
        self.engine.probe(peer, deadline)
    }

    /// What a peer has registered, as it says now: addresses and lengths, by address.
    ///
    /// # Errors
    /// As [`Engine::connect`] and [`Engine::call`].
    pub fn regions_of(&self, session: &str, deadline: Instant) -> Result<Vec<(u64, u64)>, TransferError> {
        self.forget(session, false);
        let known = self.known(session, deadline)?;
        Ok(known.regions.iter().map(|(address, (length, _))| (*address, *length)).collect())
    }

    /// Ends it: transfers under way fail.
    pub fn close(&self) {
        self.engine.close();
        self.shared.regions.lock().clear();
    }

    fn known(&self, session: &str, deadline: Instant) -> Result<Known, TransferError> {
        if let Some(known) = self.peers.lock().get(session) {
            return Ok(known.clone());
        }
        let peer = self.engine.connect(session, deadline)?;
        let answer = self.engine.call(peer, ASK_REGIONS, deadline)?;
        let mut regions = BTreeMap::new();
        for (address, ticket) in answer.chunks_exact(REGION_BYTES).filter_map(decode_region) {
            regions.insert(address, (ticket.length, self.engine.open_ticket(peer, ticket, deadline)?));
        }
        let known = Known { peer, regions: Arc::new(regions) };
        self.peers.lock().insert(session.to_owned(), known.clone());
        Ok(known)
    }

    /// What was known of the peer is out of date; with `is_gone`, the peer is another.
    fn forget(&self, session: &str, is_gone: bool) {
        let Some(known) = self.peers.lock().remove(session) else { return };
        for (_, segment) in known.regions.values() {
            // One that is gone already needs no closing.
            drop(self.engine.close_segment(*segment));
        }
        if is_gone {
            drop(self.engine.disconnect(known.peer));
        }
    }

    fn requests(
        &self,
        known: &Known,
        ranges: &[AddressedRange],
        direction: Direction,
    ) -> Result<Vec<Request>, AddressedError> {
        let local = self.shared.regions.lock();
        let request = |range: &AddressedRange| {
            let here = local.range(..=range.local).next_back();
            let here = here.filter(|(start, ticket)| ends_in(range.local - *start, range.length, ticket.length));
            let (start, ticket) = here.ok_or(AddressedError::NotRegistered(range.local))?;
            let there = known.regions.range(..=range.remote).next_back();
            let there = there.filter(|(start, (length, _))| ends_in(range.remote - *start, range.length, *length));
            let (base, (_, segment)) = there.ok_or(AddressedError::NotRegisteredAtPeer(range.remote))?;
            Ok(Request {
                direction,
                local: Slice { region: ticket.region, offset: range.local - start, length: range.length },
                remote: RemoteSlice { segment: *segment, offset: range.remote - base },
            })
        };
        ranges.iter().filter(|range| range.length > 0).map(request).collect()
    }
}

fn ends_in(offset: u64, length: u64, region: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| end <= region)
}

fn encode_regions(regions: &BTreeMap<u64, RegionTicket>) -> Vec<u8> {
    let mut reply = Vec::with_capacity(regions.len() * REGION_BYTES);
    for (address, ticket) in regions {
        reply.extend_from_slice(&address.to_le_bytes());
        reply.extend_from_slice(&ticket.length.to_le_bytes());
        reply.extend_from_slice(&ticket.region.0.to_le_bytes());
        reply.extend_from_slice(&ticket.key.0.to_le_bytes());
    }
    reply
}

/// A region in a peer's answer. What peers may do with it, the peer decides when they try.
fn decode_region(bytes: &[u8]) -> Option<(u64, RegionTicket)> {
    let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let key = RegionKey(u128::from_le_bytes(bytes.get(24..REGION_BYTES)?.try_into().ok()?));
    let (region, length, rights) = (RegionId(word(16)?), word(8)?, AccessRights::READ_WRITE);
    Some((word(0)?, RegionTicket { region, key, length, rights }))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn engine() -> (AddressedEngine, String) {
        let settings = Settings { listen: vec!["127.0.0.1:0".into()], ..Settings::default() };
        let engine = AddressedEngine::start(settings).expect("started");
        let session = engine.engine().addresses()[0].to_string();
        (engine, session)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn waited(batch: &Batch) -> Result<Result<(), Failure>, AddressedError> {
        Ok(batch.wait().all())
    }

    #[test]
    fn bytes_go_by_addresses_and_follow_memory_that_is_registered_anew() {
        let ((here, _), (there, session)) = (engine(), engine());
        let (mine, theirs) = (Memory::anonymous(8192).expect("memory"), Memory::anonymous(8192).expect("memory"));
        here.register(0x1000, &mine, AccessRights::LOCAL).expect("registered");
        there.register(0x70_0000, &theirs, AccessRights::READ_WRITE).expect("registered");
        mine.write_at(10, b"hello").expect("inside");
        let write = |local, remote, length| {
            let range = AddressedRange { local, remote, length };
            here.transfer(&session, &[range], Direction::Write, soon(), waited)
        };
        write(0x100a, 0x70_1000, 5).expect("written");
        let mut read = [0; 5];
        theirs.read_at(0x1000, &mut read).expect("inside");
        assert_eq!(&read, b"hello");
        write(0, 0, 0).expect("nothing to move");

        assert!(matches!(write(0xfff, 0x70_0000, 5), Err(AddressedError::NotRegistered(0xfff))));
        assert!(matches!(write(0x1000, 0x70_1ffc, 5), Err(AddressedError::NotRegisteredAtPeer(_))));
        assert!(matches!(write(0x1000, u64::MAX, 5), Err(AddressedError::NotRegisteredAtPeer(_))));
        assert!(matches!(write(u64::MAX, 0x70_0000, u64::MAX), Err(AddressedError::NotRegistered(_))));

        there.unregister(0x70_0000, soon()).expect("unregistered");
        assert!(matches!(write(0x1000, 0x70_0000, 5), Err(AddressedError::NotRegisteredAtPeer(_))));
        there.register(0x70_0000, &theirs, AccessRights::READ_WRITE).expect("registered");
        write(0x1000, 0x70_0000, 5).expect("found anew");
        there.unregister(0x70_0000, soon()).expect("unregistered");
        there.register(0x70_0000, &theirs, AccessRights::READ_WRITE).expect("registered");
        write(0x1000, 0x70_0000, 5).expect("its ticket is another");
    }

    #[test]
    fn registrations_do_not_overlap() {
        let (engine, _) = engine();
        let memory = Memory::anonymous(4096).expect("memory");
        engine.register(0x1000, &memory, AccessRights::LOCAL).expect("registered");
        for address in [0x1000, 0x1fff, 1] {
            let refused = engine.register(address, &memory, AccessRights::LOCAL);
            assert!(matches!(refused, Err(AddressedError::Overlap(_))), "{address:#x}");
        }
        engine.register(0x2000, &memory, AccessRights::LOCAL).expect("registered");
        assert!(matches!(engine.unregister(0x1001, soon()), Err(AddressedError::NotRegistered(0x1001))));
    }

    #[test]
    fn notifications_arrive_and_are_bounded() {
        let (here, _) = engine();
        let settings = Settings { listen: vec!["127.0.0.1:0".into()], notifications: 2, ..Settings::default() };
        let there = AddressedEngine::start(settings).expect("started");
        let session = there.engine().addresses()[0].to_string();
        for told in [&b"one"[..], b""] {
            here.notify(&session, told, soon()).expect("told");
        }
        assert!(here.notify(&session, b"three", soon()).is_err());
        assert_eq!(there.notifications(), [b"one".to_vec(), Vec::new()]);
        here.notify(&session, b"four", soon()).expect("told");
        assert_eq!(there.notifications(), [b"four".to_vec()]);
    }
}
