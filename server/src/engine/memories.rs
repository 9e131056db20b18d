//! Memory of clients from which this node reads: opened once, forgotten when nobody has put from it for a minute.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tidepool_transfer::{Engine, PeerId, RegionTicket, SegmentId, TransferError, TransportKind, WeakEngine};

use super::readable::not_read;
use crate::error::Error;

/// Clients, and memories of one.
const MOST: usize = 1024;
const MOST_OF_ONE: usize = 64;
/// One that nobody has put from for so long is forgotten, with its client if that has no other; looked for as often as this.
const IDLE: Duration = Duration::from_secs(60);
const SWEEP: Duration = Duration::from_secs(20);
/// A client listens, or does not: it is asked once. Its device may take a moment to register the memory.
const CONNECT_TIME: Duration = Duration::from_millis(300);
const OPEN_TIME: Duration = Duration::from_secs(1);
/// The clients on a host on which one could not be reached send their values for so long.
const UNREACHABLE_FOR: Duration = Duration::from_secs(10);

/// Where memory of a client is.
#[derive(Clone, Copy)]
pub(super) struct ClientMemory {
    /// Where the client's engine listens.
    pub(super) at: SocketAddr,
    /// What that asks for. It is the client's, so that the cluster's secret is told to nobody who only listens there.
    pub(super) admission: [u8; 32],
    pub(super) ticket: RegionTicket,
}

/// Memory of a client that is open while somebody has this.
pub(super) struct Opened {
    engine: WeakEngine,
    peer: PeerId,
    pub(super) segment: SegmentId,
}

impl Drop for Opened {
    fn drop(&mut self) {
        let _closed = self.engine.upgrade().map(|engine| engine.close_segment(self.segment));
    }
}

#[derive(Default)]
pub(super) struct Memories(Mutex<Known>);

#[derive(Default)]
struct Known {
    clients: HashMap<SocketAddr, Client>,
    unreachable: HashMap<IpAddr, Instant>,
    is_swept: bool,
}

struct Client {
    engine: WeakEngine,
    peer: PeerId,
    /// By region and key.
    memories: HashMap<(u64, u128), (Arc<Opened>, Instant)>,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.memories.clear();
        let _disconnected = self.engine.upgrade().map(|engine| engine.disconnect(self.peer));
    }
}

fn name(ticket: RegionTicket) -> (u64, u128) {
    (ticket.region.0, ticket.key.0)
}

impl Memories {
    /// The memory, if it is open.
    pub(super) fn find(&self, memory: &ClientMemory) -> Option<Arc<Opened>> {
        let mut known = self.0.lock();
        let (opened, used) = known.clients.get_mut(&memory.at)?.memories.get_mut(&name(memory.ticket))?;
        *used = Instant::now();
        Some(Arc::clone(opened))
    }

    /// Opens it. Blocks; needs a tokio runtime.
    ///
    /// # Errors
    /// `NOT_READ`.
    pub(super) fn open(self: &Arc<Self>, engine: &Engine, memory: &ClientMemory) -> Result<Arc<Opened>, Error> {
        let (at, ip, began) = (memory.at, memory.at.ip(), Instant::now());
        {
            let mut known = self.0.lock();
            known.unreachable.retain(|_, until| *until > began);
            if known.unreachable.contains_key(&ip) {
                return Err(not_read("their client could not be reached a moment ago"));
            }
            let full = known.clients.len() >= MOST && !known.clients.contains_key(&at);
            if full || known.clients.get(&at).is_some_and(|client| client.memories.len() >= MOST_OF_ONE) {
                return Err(not_read("other memory is being read"));
            }
        }
        let connected = engine.connect_by(&at.to_string(), Some(memory.admission), began + CONNECT_TIME);
        let peer = connected.map_err(|error| self.not_reached(ip, &error))?;
        let segment = engine.open_ticket(peer, memory.ticket, Instant::now() + OPEN_TIME);
        let weak = engine.downgrade();
        let opened = segment.map(|segment| Arc::new(Opened { engine: weak.clone(), peer, segment }));
        let mut known = self.0.lock();
        // Another one listens there now: what was known of the old one is of no use.
        let old = known.clients.get(&at).is_some_and(|client| client.peer != peer).then(|| known.clients.remove(&at));
        let client = || Client { engine: weak, peer, memories: HashMap::new() };
        let client = known.clients.entry(at).or_insert_with(client);
        // Without the keys of devices that there are, it is opened anew with the next put.
        if let Ok(opened) = &opened
            && !lacks_keys(engine, opened)
        {
            client.memories.insert(name(memory.ticket), (Arc::clone(opened), Instant::now()));
        }
        if !std::mem::replace(&mut known.is_swept, true) {
            tokio::spawn(sweep(Arc::clone(self)));
        }
        drop(known);
        drop(old);
        opened.map_err(|error| not_read(&error.to_string()))
    }

    fn not_reached(&self, ip: IpAddr, error: &TransferError) -> Error {
        let mut known = self.0.lock();
        if known.unreachable.len() < MOST {
            known.unreachable.insert(ip, Instant::now() + UNREACHABLE_FOR);
        }
        not_read(&error.to_string())
    }

    /// It could not be read.
    pub(super) fn forget(&self, gone: &Arc<Opened>) {
        let mut known = self.0.lock();
        for client in known.clients.values_mut() {
            client.memories.retain(|_, (opened, _)| !Arc::ptr_eq(opened, gone));
        }
    }

    /// Forgets what is idle; whether something is left.
    fn forget_idle(&self) -> bool {
        let mut known = self.0.lock();
        let is_idle =
            |(opened, used): &(Arc<Opened>, Instant)| used.elapsed() >= IDLE && Arc::strong_count(opened) == 1;
        for client in known.clients.values_mut() {
            client.memories.retain(|_, memory| !is_idle(memory));
        }
        let gone: Vec<Client> =
            known.clients.extract_if(|_, client| client.memories.is_empty()).map(|(_, client)| client).collect();
        known.is_swept = !known.clients.is_empty();
        let is_left = known.is_swept;
        drop(known);
        drop(gone);
        is_left
    }
}

/// Whether devices reach the client, and not this memory: its keys were not told in time.
fn lacks_keys(engine: &Engine, opened: &Opened) -> bool {
    let by_device = |kind| kind == TransportKind::Rdma;
    engine.rails(opened.peer).is_ok_and(|rails| rails.iter().any(|rail| by_device(rail.transport)))
        && !engine.segment(opened.segment).is_ok_and(|(_, way)| way.is_some_and(by_device))
}

async fn sweep(memories: Arc<Memories>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        if !memories.forget_idle() {
            return;
        }
    }
}
