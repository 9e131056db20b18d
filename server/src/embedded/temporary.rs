//! Folders that go with their process, however it ends: each is held by a lock on a file in it, and whoever makes one removes
//! those that nobody holds any more.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// How the folders are called, before some random letters.
const PREFIX: &str = "tidepool-embedded-";
/// The file that is locked.
const HELD: &str = "HELD";

/// A folder that is removed when this is dropped.
#[derive(Debug)]
pub(super) struct Temporary {
    path: PathBuf,
    _held: File,
}

impl Temporary {
    /// Makes one in `parent`, which is made if it is missing, and removes those there that dead processes left.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn new_in(parent: &Path) -> io::Result<Self> {
        fs::create_dir_all(parent)?;
        sweep(parent);
        let random = getrandom::u64().map_err(io::Error::other)?;
        let path = parent.join(format!("{PREFIX}{random:016x}"));
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        // Under another name until it is locked: what has no such file yet is left alone by others.
        let unheld = path.join("HELD.part");
        let held = File::create_new(&unheld)?;
        flock(&held, FlockOperation::NonBlockingLockExclusive)?;
        fs::rename(unheld, path.join(HELD))?;
        Ok(Self { path, _held: held })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "remove a temporary folder");
        }
    }
}

/// Removes what nobody holds.
fn sweep(parent: &Path) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let ours = entries.filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX)));
    for folder in ours.map(|entry| entry.path()) {
        // Not there, or another user's: not to be removed.
        let Ok(held) = File::options().write(true).open(folder.join(HELD)) else { continue };
        if flock(&held, FlockOperation::NonBlockingLockExclusive).is_ok() {
            match fs::remove_dir_all(&folder) {
                Ok(()) => tracing::info!(path = %folder.display(), "what a dead process left is removed"),
                Err(error) => tracing::warn!(%error, path = %folder.display(), "remove what a dead process left"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_stays_and_what_a_dead_process_left_goes() {
        let parent = tempfile::tempdir().expect("temporary folder");
        let held = Temporary::new_in(parent.path()).expect("writable");
        let dead = Temporary::new_in(parent.path()).expect("writable");
        let (left, foreign) = (dead.path().to_owned(), parent.path().join("tidepool-embedded-without-a-lock"));
        fs::create_dir(&foreign).expect("writable");
        // The process is gone: its lock is, its folder is not.
        let Temporary { _held: lock, .. } = &dead;
        flock(lock, FlockOperation::Unlock).expect("its own lock");
        std::mem::forget(dead);
        let third = Temporary::new_in(parent.path()).expect("writable");
        assert!(!left.exists(), "left by a dead process");
        assert!(held.path().exists() && third.path().exists() && foreign.exists());
        let path = held.path().to_owned();
        drop(held);
        assert!(!path.exists());
    }
}
