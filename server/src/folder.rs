//! The data folder: who owns it, which node and cluster it belongs to, and in which life.
//!
//! `VERSION` says the layout (a newer one is refused), `LOCK` is held by flock while a process runs, `identity.json`
//! has node id, cluster id, incarnation and the epoch of the catalog. The incarnation is counted up and synced before
//! anything else uses the folder, so that ids made in one life are never made again.
//!
//! A catalog that is gone is not replaced by an empty one in silence: against that, everything on the tiers would count
//! as never committed, and would be freed. [`DataFolder::begin_rebuild`] sets what is left of it aside and begins the
//! next epoch, whose catalog is made from what the tiers hold.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use tidepool_metadata::{ErrorKind, Incarnation, NodeId};

use crate::error::Error;

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
    /// It had a catalog.
    #[error(
        "the catalog in {path} is gone: put it back, or make a new one from what the tiers hold with \
         `tidepool admin rebuild`"
    )]
    CatalogLost {
        /// Where it was.
        path: PathBuf,
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

impl From<FolderError> for Error {
    fn from(error: FolderError) -> Self {
        let reason = match &error {
            FolderError::CatalogLost { .. } => "CATALOG_LOST",
            _ => "FOLDER_UNUSABLE",
        };
        Self::new(ErrorKind::Invalid, reason, error.to_string()).field("data")
    }
}

/// What the folder remembers between lives.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Identity {
    node: u32,
    cluster: u64,
    incarnation: u32,
    /// Which catalog of the cluster this is; `None` until the first one is formed.
    #[serde(default)]
    epoch: Option<u32>,
    /// The epoch has begun, and its catalog does not know yet that it is to be rebuilt.
    #[serde(default)]
    rebuild: bool,
    /// Nodes that the rebuild waits for, on the node that began it and until it is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rebuild_waits: Option<Vec<u32>>,
    /// The node is part of that cluster, and has no catalog yet: a crash in between is none that lost one.
    #[serde(default)]
    joining: bool,
}

/// An opened data folder. Dropping it lets the lock go.
#[derive(Debug)]
pub struct DataFolder {
    path: PathBuf,
    identity: Mutex<Identity>,
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
        let folder = Self { path: path.to_owned(), identity: Mutex::new(identity), _lock: lock };
        folder.persist(&folder.identity.lock())?;
        Ok(folder)
    }

    /// The node of the data folder at `path`, whoever has it open; `None` if there is none.
    #[must_use]
    pub fn node_of(path: &Path) -> Option<NodeId> {
        let bytes = fs::read(path.join("identity.json")).ok()?;
        serde_json::from_slice(&bytes).ok().map(|identity: Identity| NodeId(identity.node))
    }

    fn persist(&self, identity: &Identity) -> Result<(), FolderError> {
        let path = self.path.join("identity.json");
        let bytes = serde_json::to_vec_pretty(identity)
            .map_err(|error| FolderError::Damaged { path: path.clone(), what: error.to_string() })?;
        write_synced(&path, &bytes)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The node's number, the same in every life.
    #[must_use]
    pub fn node(&self) -> NodeId {
        NodeId(self.identity.lock().node)
    }

    /// This life.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.identity.lock().incarnation)
    }

    /// The cluster's random id.
    #[must_use]
    pub fn cluster(&self) -> u64 {
        self.identity.lock().cluster
    }

    /// Where the catalog lies.
    #[must_use]
    pub fn catalog(&self) -> PathBuf {
        self.path.join("catalog")
    }

    /// Which catalog of the cluster to open, or to form if there was none.
    ///
    /// # Errors
    /// [`FolderError::CatalogLost`].
    pub fn epoch(&self) -> Result<u32, FolderError> {
        let identity = self.identity.lock();
        match identity.epoch {
            None => Ok(0),
            Some(epoch) if identity.rebuild || identity.joining || has_log(&self.catalog()) => Ok(epoch),
            Some(_) => Err(FolderError::CatalogLost { path: self.catalog() }),
        }
    }

    /// Whether the catalog is to be told that it is being rebuilt.
    #[must_use]
    pub fn is_rebuild(&self) -> bool {
        self.identity.lock().rebuild
    }

    /// Whether this node is to form the catalog of a rebuild, and has not yet.
    #[must_use]
    pub fn forms_rebuild(&self) -> bool {
        self.is_rebuild() && !has_log(&self.catalog())
    }

    /// The nodes that the rebuild waits for which this one began; `None`: it began none, or that is over.
    #[must_use]
    pub fn rebuild_waits(&self) -> Option<Vec<NodeId>> {
        self.identity.lock().rebuild_waits.as_ref().map(|nodes| nodes.iter().copied().map(NodeId).collect())
    }

    /// Notes that the rebuild is over.
    ///
    /// # Errors
    /// [`FolderError::Io`].
    pub fn end_rebuild(&self) -> Result<(), FolderError> {
        let mut identity = self.identity.lock();
        match identity.rebuild_waits.take() {
            Some(_) => self.persist(&identity),
            None => Ok(()),
        }
    }

    /// The epoch of the last catalog that was here; `None` if there was none.
    #[must_use]
    pub fn last_epoch(&self) -> Option<u32> {
        self.identity.lock().epoch
    }

    /// Notes that the catalog of [`DataFolder::epoch`] is there, and knows if it is being rebuilt.
    ///
    /// # Errors
    /// [`FolderError::Io`].
    pub fn note_catalog(&self) -> Result<(), FolderError> {
        let mut identity = self.identity.lock();
        let epoch = Some(identity.epoch.unwrap_or(0));
        if (epoch, false, false) == (identity.epoch, identity.rebuild, identity.joining) {
            return Ok(());
        }
        (identity.epoch, identity.rebuild, identity.joining) = (epoch, false, false);
        self.persist(&identity)
    }

    /// Whether there is no catalog here, and none was lost: the node may form one, or join one.
    #[must_use]
    pub fn is_new(&self) -> bool {
        let identity = self.identity.lock();
        !has_log(&self.catalog()) && !identity.rebuild && (identity.epoch.is_none() || identity.joining)
    }

    /// Whether the node is part of a cluster, and its catalog is to come from there.
    #[must_use]
    pub fn is_joining(&self) -> bool {
        self.identity.lock().joining
    }

    /// Makes the node part of a cluster that is there. What an interrupted join left of a catalog is dropped.
    ///
    /// # Errors
    /// [`FolderError::Io`].
    pub fn join(&self, cluster: u64, epoch: u32) -> Result<(), FolderError> {
        let catalog = self.catalog();
        match fs::remove_dir_all(&catalog) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(io_error("remove", &catalog, source)),
        }
        let mut identity = self.identity.lock();
        (identity.cluster, identity.epoch, identity.joining) = (cluster, Some(epoch), true);
        self.persist(&identity)
    }

    /// Sets a catalog aside that this node must not use any more; it joins its cluster anew. Answers where it is.
    ///
    /// # Errors
    /// [`FolderError::Io`].
    pub fn leave_catalog(&self) -> Result<PathBuf, FolderError> {
        let catalog = self.catalog();
        let aside = (0..).map(|turn| self.path.join(format!("catalog.left.{turn}"))).find(|path| !path.exists());
        let aside = aside.unwrap_or_else(|| self.path.join("catalog.left"));
        if catalog.exists() {
            fs::rename(&catalog, &aside).map_err(|source| io_error("set aside", &catalog, source))?;
        }
        let mut identity = self.identity.lock();
        (identity.epoch, identity.joining) = (Some(identity.epoch.unwrap_or(0)), true);
        // One that was begun here too is given up for the group's.
        (identity.rebuild, identity.rebuild_waits) = (false, None);
        self.persist(&identity)?;
        Ok(aside)
    }

    /// Begins the next epoch, which is rebuilt once these nodes have announced what they have, and this one. What is there of
    /// the catalog is set aside: answers where.
    ///
    /// # Errors
    /// [`FolderError::Io`].
    pub fn begin_rebuild(&self, waits: &[NodeId]) -> Result<Option<PathBuf>, FolderError> {
        let mut identity = self.identity.lock();
        let (catalog, epoch) = (self.catalog(), identity.epoch.unwrap_or(0));
        let aside =
            (0..).map(|turn| self.path.join(format!("catalog.epoch-{epoch}.{turn}"))).find(|path| !path.exists());
        let aside = match aside {
            Some(aside) if catalog.exists() => {
                fs::rename(&catalog, &aside).map_err(|source| io_error("set aside", &catalog, source))?;
                Some(aside)
            }
            _ => None,
        };
        (identity.epoch, identity.rebuild, identity.joining) = (Some(epoch + 1), true, false);
        identity.rebuild_waits = Some(waits.iter().map(|node| node.0).collect());
        self.persist(&identity)?;
        Ok(aside)
    }
}

/// Whether RocksDB has a database there.
fn has_log(catalog: &Path) -> bool {
    catalog.join("log").join("CURRENT").exists()
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
    let cluster = cluster.max(1);
    Ok(Identity { node, cluster, incarnation: 0, epoch: None, rebuild: false, rebuild_waits: None, joining: false })
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
    fn a_lost_catalog_is_missed_and_a_rebuild_begins_the_next_epoch() {
        let temp = tempfile::tempdir().expect("temporary folder");
        let folder = DataFolder::open(temp.path()).expect("new folder");
        assert_eq!(folder.epoch().expect("none was formed"), 0);
        let log = folder.catalog().join("log");
        fs::create_dir_all(&log).expect("writable");
        fs::write(log.join("CURRENT"), "").expect("writable");
        folder.note_catalog().expect("writable");
        drop(folder);
        let folder = DataFolder::open(temp.path()).expect("known folder");
        assert_eq!((folder.epoch().expect("it is there"), folder.is_rebuild()), (0, false));
        let aside = folder.begin_rebuild(&[NodeId(7)]).expect("writable").expect("something was there");
        assert!(aside.join("log").exists() && !folder.catalog().exists());
        drop(folder);
        let folder = DataFolder::open(temp.path()).expect("known folder");
        assert_eq!((folder.epoch().expect("to be formed"), folder.forms_rebuild()), (1, true));
        folder.note_catalog().expect("writable");
        assert_eq!((folder.is_rebuild(), folder.rebuild_waits()), (false, Some(vec![NodeId(7)])));
        folder.end_rebuild().expect("writable");
        assert_eq!(folder.rebuild_waits(), None);
        assert!(matches!(folder.epoch(), Err(FolderError::CatalogLost { .. })));
    }

    #[test]
    fn a_join_may_be_interrupted_and_a_catalog_is_left_only_on_purpose() {
        let temp = tempfile::tempdir().expect("temporary folder");
        let folder = DataFolder::open(temp.path()).expect("new folder");
        assert!(folder.is_new());
        folder.join(77, 2).expect("writable");
        drop(folder);
        let folder = DataFolder::open(temp.path()).expect("known folder");
        assert!(folder.is_new() && folder.cluster() == 77 && folder.epoch().expect("none was lost") == 2);
        let log = folder.catalog().join("log");
        fs::create_dir_all(&log).expect("writable");
        fs::write(log.join("CURRENT"), "").expect("writable");
        folder.note_catalog().expect("writable");
        assert!(!folder.is_new());
        let aside = folder.leave_catalog().expect("writable");
        assert!(aside.join("log").exists() && folder.is_new() && folder.cluster() == 77);
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
