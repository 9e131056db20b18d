//! Hands the DRAM segment to processes of this user on this host, to be mapped read-only: `docs/src/local-reads.md`.

use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tidepool_tiers::TieredStore;
use tidepool_transfer::give_segment;
use tokio::net::UnixListener;
use tokio::sync::watch;

use crate::error::Error;
use crate::grpc::bind_unix;

/// After a failed accept, which is a shortage of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(50);

/// A listener that gives each caller the segment's descriptor, and nothing else.
pub(crate) struct SegmentListener {
    socket: UnixListener,
    path: PathBuf,
}

impl SegmentListener {
    /// Binds `path`.
    ///
    /// # Errors
    /// `LISTEN` with the path and what to do.
    pub(crate) fn bind(path: &Path) -> Result<Self, Error> {
        Ok(Self { socket: bind_unix(path)?, path: path.to_owned() })
    }

    /// Answers callers until told to stop, one after the other: an answer never waits for its caller.
    pub(crate) async fn serve(self, store: TieredStore, mut stop: watch::Receiver<bool>) -> Result<(), Error> {
        let mut stopped = std::pin::pin!(stop.wait_for(|&stop| stop));
        loop {
            let accepted = tokio::select! {
                accepted = self.socket.accept() => accepted,
                _ = &mut stopped => break,
            };
            match accepted {
                Ok((stream, _)) => {
                    if let Err(error) = give(&store, &stream) {
                        tracing::debug!(%error, "the segment was not handed over");
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "accept on the segment's socket failed");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        let _gone = std::fs::remove_file(&self.path);
        Ok(())
    }
}

fn give(store: &TieredStore, stream: &tokio::net::UnixStream) -> io::Result<()> {
    let (segment, length) = store.segment_descriptor()?;
    give_segment(stream, segment.as_fd(), length)
}
