//! The data folder: who owns it, which node and cluster it belongs to, and in which life.
//!
//! `VERSION` says the layout (a newer one is refused), `LOCK` is held by flock while a process runs, `identity.json`
//! has node id, cluster id and incarnation. The incarnation is counted up and synced before anything else uses the
//! folder, so that ids made in one life are never made again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use tidepool_metadata::{Incarnation, NodeId};

/// The layout that this program writes.
const LAYOUT_VERSION: u32 = 1;

/// Why a data folder can't be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// The system refused.
    #[error("{action} {path}: {source}{advice}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
        /// What to do, if it is known.
        advice: &'static str,
    },
    /// Another process has it.
    #[error("data folder {path} is in use by another process: stop it, or give this one another --data")]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// Written by a newer program.
    #[error("data folder {path} has layout {found}, this program knows up to {LAYOUT_VERSION}: use a newer tidepool")]
    Newer {
        /// The folder.
        path: PathBuf,
        /// Its layout.
        found: u32,
    },
    /// Not what it should be.
    #[error("{path} is damaged ({what}): restore it, or start with an empty data folder")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

/// What the folder remembers between lives.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Identity {
    node: u32,
    cluster: u64,
    incarnation: u32,
}

/// An opened data folder. Dropping it lets the lock go.
#[derive(Debug)]
pub struct DataFolder {
    path: PathBuf,
    identity: Identity,
    _lock: File,
}

impl DataFolder {
    /// Opens the folder, or makes it; takes its lock; counts the incarnation up.
    ///
    /// # Errors
    /// See [`FolderError`].
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        fs::create_dir_all(path).map_err(|source| io_error("create data folder", path, source))?;
        let lock_path = path.join("LOCK");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path);
        let lock = lock.map_err(|source| io_error("open", &lock_path, source))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(FolderError::Locked { path: path.to_owned() }),
            Err(error) => return Err(io_error("lock", &lock_path, error.into())),
        }
        check_version(path)?;
        let identity_path = path.join("identity.json");
        let mut identity = match fs::read(&identity_path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| FolderError::Damaged { path: identity_path.clone(), what: error.to_string() })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => new_identity(path)?,
            Err(source) => return Err(io_error("read", &identity_path, source)),
        };
        identity.incarnation = identity.incarnation.checked_add(1).ok_or_else(|| FolderError::Damaged {
            path: identity_path.clone(),
            what: "incarnation at its end".into(),
        })?;
        let bytes = serde_json::to_vec_pretty(&identity)
            .map_err(|error| FolderError::Damaged { path: identity_path.clone(), what: error.to_string() })?;
        write_synced(&identity_path, &bytes)?;
        Ok(Self { path: path.to_owned(), identity, _lock: lock })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The node's number, the same in every life.
    #[must_use]
    pub fn node(&self) -> NodeId {
        NodeId(self.identity.node)
    }

    /// This life.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.identity.incarnation)
    }

    /// The cluster's random id.
    #[must_use]
    pub fn cluster(&self) -> u64 {
        self.identity.cluster
    }
}

fn check_version(folder: &Path) -> Result<(), FolderError> {
    let path = folder.join("VERSION");
    let mut text = String::new();
    match File::open(&path).and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => {
            let found = text.trim().parse();
            let damaged = || FolderError::Damaged { path: path.clone(), what: format!("not a number: {text:?}") };
            match found.map_err(|_| damaged())? {
                LAYOUT_VERSION => Ok(()),
                found if found > LAYOUT_VERSION => Err(FolderError::Newer { path: folder.to_owned(), found }),
                _ => Err(damaged()),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            write_synced(&path, format!("{LAYOUT_VERSION}\n").as_bytes())
        }
        Err(source) => Err(io_error("read", &path, source)),
    }
}

fn new_identity(folder: &Path) -> Result<Identity, FolderError> {
    let random = || getrandom::u64().map_err(|error| io_error("draw an id for", folder, io::Error::other(error)));
    let (node, cluster) = (random()?, random()?);
    #[expect(clippy::cast_possible_truncation, reason = "any 32 bits but zero will do")]
    let node = (node as u32).max(1);
    Ok(Identity { node, cluster: cluster.max(1), incarnation: 0 })
}

/// Replaces a file whole: written beside, synced, renamed, folder synced.
fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), FolderError> {
    let beside = path.with_extension("part");
    let write = || {
        let mut file = File::create(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    };
    write().map_err(|source| io_error("write", path, source))
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> FolderError {
    let advice = match source.kind() {
        io::ErrorKind::PermissionDenied => {
            "; give this user the right to write there, or choose another folder with --data"
        }
        io::ErrorKind::StorageFull => "; make room on that file system, or choose another folder with --data",
        io::ErrorKind::ReadOnlyFilesystem => "; choose a folder on a writable file system with --data",
        _ => "",
    };
    FolderError::Io { action, path: path.to_owned(), source, advice }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_stays_and_lives_are_counted() {
        let temp = tempfile::tempdir().expect("temporary folder");
        let first = DataFolder::open(temp.path()).expect("new folder");
        let (node, cluster) = (first.node(), first.cluster());
        assert_eq!(first.incarnation(), Incarnation(1));
        drop(first);
        let second = DataFolder::open(temp.path()).expect("known folder");
        assert_eq!((second.node(), second.cluster(), second.incarnation()), (node, cluster, Incarnation(2)));
    }

    #[test]
    fn a_second_process_is_refused() {
        let temp = tempfile::tempdir().expect("temporary folder");
        let _first = DataFolder::open(temp.path()).expect("new folder");
        assert!(matches!(DataFolder::open(temp.path()), Err(FolderError::Locked { .. })));
    }

    #[test]
    fn a_newer_layout_is_refused() {
        let temp = tempfile::tempdir().expect("temporary folder");
        fs::write(temp.path().join("VERSION"), "2\n").expect("writable");
        assert!(matches!(DataFolder::open(temp.path()), Err(FolderError::Newer { found: 2, .. })));
    }

    #[test]
    fn a_damaged_identity_is_refused_and_kept() {
        let temp = tempfile::tempdir().expect("temporary folder");
        fs::write(temp.path().join("identity.json"), "{").expect("writable");
        assert!(matches!(DataFolder::open(temp.path()), Err(FolderError::Damaged { .. })));
        assert_eq!(fs::read(temp.path().join("identity.json")).expect("readable"), b"{");
    }
}
