//! Memory that clients on this host have lent: mapped read-only, under the name that they chose, while they hold the
//! connection over which it came.
//!
//! Its pages are the clients'; what this node pays is address space and page tables (2 MiB for each GiB that was read), which
//! is why it is bounded, for each client and in all. What is beyond is refused at once, and its client sends values
//! another way.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_transfer::{LendOffer, Memory, REFUSED, TAKEN, take_offer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

use crate::config::Limits;
use crate::error::Error;
use crate::grpc::bind_unix;

/// Memories at a time, in all and of one client: each is a connection.
const MOST: usize = 1024;
const MOST_OF_ONE: usize = 128;
/// A client says what it lends at once, or is not well.
const PATIENCE: Duration = Duration::from_secs(2);
/// After a failed accept, which is a shortage of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(50);

/// The memories by name. Cheap to clone.
#[derive(Clone)]
pub(crate) struct LentMemories(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    most_bytes: u64,
    most_bytes_of_one: u64,
}

#[derive(Default)]
struct State {
    by_id: HashMap<u128, Memory>,
    all: Share,
    by_client: HashMap<Client, Share>,
}

/// A process; `None` where its number means nothing here, as in another namespace: all those are one.
type Client = Option<i32>;

#[derive(Clone, Copy, Default)]
struct Share {
    connections: usize,
    bytes: u64,
}

/// What one connection takes of the bounds, until it is dropped.
struct Room {
    lent: LentMemories,
    client: Client,
    bytes: u64,
}

impl LentMemories {
    pub(crate) fn new(limits: &Limits) -> Self {
        let (most_bytes, most_bytes_of_one) = (limits.lent_bytes.0, limits.lent_client_bytes.0);
        Self(Arc::new(Shared { state: Mutex::default(), most_bytes, most_bytes_of_one }))
    }

    /// The memory of that name.
    pub(crate) fn find(&self, id: u128) -> Option<Memory> {
        self.0.state.lock().by_id.get(&id).cloned()
    }

    /// Room for a connection of a client; `None`: there is none.
    fn enter(&self, client: Client) -> Option<Room> {
        let State { all, by_client, .. } = &mut *self.0.state.lock();
        if all.connections >= MOST {
            return None;
        }
        let of_one = by_client.entry(client).or_default();
        if of_one.connections >= MOST_OF_ONE {
            return None;
        }
        all.connections += 1;
        of_one.connections += 1;
        Some(Room { lent: self.clone(), client, bytes: 0 })
    }
}

impl Room {
    /// Takes `bytes` bytes, once; `false`: there are not as many.
    fn take(&mut self, bytes: u64) -> bool {
        let shared = &self.lent.0;
        let State { all, by_client, .. } = &mut *shared.state.lock();
        let of_one = by_client.entry(self.client).or_default();
        let fits = |share: &Share, most| share.bytes.checked_add(bytes).is_some_and(|bytes| bytes <= most);
        let fits = fits(all, shared.most_bytes) && fits(of_one, shared.most_bytes_of_one);
        if fits {
            all.bytes += bytes;
            of_one.bytes += bytes;
            self.bytes = bytes;
        }
        fits
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let State { all, by_client, .. } = &mut *self.lent.0.state.lock();
        if let Entry::Occupied(mut of_one) = by_client.entry(self.client) {
            for share in [all, of_one.get_mut()] {
                share.connections -= 1;
                share.bytes -= self.bytes;
            }
            if of_one.get().connections == 0 {
                of_one.remove();
            }
        }
    }
}

/// Takes memory that clients lend.
pub(crate) struct MemoryListener {
    socket: UnixListener,
    path: PathBuf,
}

impl MemoryListener {
    /// Binds `path`, for this user alone.
    ///
    /// # Errors
    /// `LISTEN` with the path and what to do.
    pub(crate) fn bind(path: &Path) -> Result<Self, Error> {
        Ok(Self { socket: bind_unix(path)?, path: path.to_owned() })
    }

    /// Takes memory into `lent` until told to stop. What puts are still copying stays mapped until they are done.
    pub(crate) async fn serve(self, lent: LentMemories, mut stop: watch::Receiver<bool>) -> Result<(), Error> {
        let mut stopped = std::pin::pin!(stop.wait_for(|&stop| stop));
        loop {
            let accepted = tokio::select! {
                accepted = self.socket.accept() => accepted,
                _ = &mut stopped => break,
            };
            match accepted {
                Ok((stream, _)) => {
                    let lent = lent.clone();
                    tokio::spawn(async move {
                        if let Err(error) = keep(&lent, stream).await {
                            tracing::debug!(%error, "no memory was lent");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "accept on the memory's socket failed");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        lent.0.state.lock().by_id.clear();
        let _gone = std::fs::remove_file(&self.path);
        Ok(())
    }
}

/// Takes one memory and keeps it until its client ends the connection.
async fn keep(lent: &LentMemories, mut stream: UnixStream) -> io::Result<()> {
    let client = stream.peer_cred()?.pid().filter(|&pid| pid > 0);
    // Its connection counts before anything is read of it.
    let Some(mut room) = lent.enter(client) else { return stream.write_all(&REFUSED).await };
    let offer = tokio::time::timeout(PATIENCE, offer(&stream)).await??;
    if !room.take(offer.length) {
        tracing::info!(?client, bytes = offer.length, "memory that a client would lend is beyond the limits");
        return stream.write_all(&REFUSED).await;
    }
    let id = offer.id;
    let memory = offer.map()?;
    match lent.0.state.lock().by_id.entry(id) {
        Entry::Vacant(vacant) => vacant.insert(memory),
        // A name is random and 128 bits: one that is taken is a client's fault.
        Entry::Occupied(_) => return Err(io::ErrorKind::AlreadyExists.into()),
    };
    let end = async {
        stream.write_all(&TAKEN).await?;
        // Nothing more is said: whatever comes is the end.
        stream.read(&mut [0]).await.map(drop)
    };
    let ended = end.await;
    lent.0.state.lock().by_id.remove(&id);
    ended
}

async fn offer(stream: &UnixStream) -> io::Result<LendOffer> {
    loop {
        stream.readable().await?;
        match stream.try_io(Interest::READABLE, || take_offer(stream)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            taken => return taken,
        }
    }
}
