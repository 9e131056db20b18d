//! Memory that clients on this host have lent: mapped read-only, under the name that they chose, while they hold the
//! connection over which it came.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_transfer::{Memory, TAKEN, take_lent};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};

use crate::error::Error;
use crate::grpc::bind_unix;

/// Memories at a time; further clients wait.
const MOST: usize = 1024;
/// A client says what it lends at once, or is not well.
const PATIENCE: Duration = Duration::from_secs(2);
/// After a failed accept, which is a shortage of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(50);

/// The memories by name. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct LentMemories {
    by_id: Arc<Mutex<HashMap<u128, Memory>>>,
}

impl LentMemories {
    /// The memory of that name.
    pub(crate) fn find(&self, id: u128) -> Option<Memory> {
        self.by_id.lock().get(&id).cloned()
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
        let permits = Arc::new(Semaphore::new(MOST));
        let mut stopped = std::pin::pin!(stop.wait_for(|&stop| stop));
        loop {
            let accepted = tokio::select! {
                accepted = async { (Arc::clone(&permits).acquire_owned().await, self.socket.accept().await) } => accepted,
                _ = &mut stopped => break,
            };
            match accepted {
                (Ok(permit), Ok((stream, _))) => {
                    let lent = lent.clone();
                    tokio::spawn(async move {
                        let _permit = permit;
                        if let Err(error) = keep(&lent, stream).await {
                            tracing::debug!(%error, "no memory was lent");
                        }
                    });
                }
                (Err(_closed), _) => break,
                (_, Err(error)) => {
                    tracing::warn!(%error, "accept on the memory's socket failed");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        lent.by_id.lock().clear();
        let _gone = std::fs::remove_file(&self.path);
        Ok(())
    }
}

/// Takes one memory and keeps it until its client ends the connection.
async fn keep(lent: &LentMemories, mut stream: UnixStream) -> io::Result<()> {
    let taken = async {
        loop {
            stream.readable().await?;
            match stream.try_io(Interest::READABLE, || take_lent(&stream)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                taken => return taken,
            }
        }
    };
    let (id, memory) = tokio::time::timeout(PATIENCE, taken).await??;
    match lent.by_id.lock().entry(id) {
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
    lent.by_id.lock().remove(&id);
    ended
}
