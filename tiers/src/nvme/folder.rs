//! The folder of one instance: its lock, its data file, and room for it on the disk.
//!
//! A data file is made under another name, preallocated, given its superblock, and renamed when that is durable, so a
//! crash leaves either a whole file or one that the next start removes. A file that isn't ours is never written to.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags, fallocate, statvfs};

use super::config::{DirectChoice, NvmeConfig};
use super::error::NvmeError;
use super::format::REGIONS_START;

const LOCK: &str = "LOCK";
const DATA: &str = "regions.dat";
const UNFINISHED: &str = "regions.new";

/// The folder and its data file.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    data: File,
}

/// Keeps other processes from opening the folder while it lives.
#[derive(Debug)]
pub(super) struct FolderLock {
    _file: File,
}

/// What opening a folder found.
pub(super) struct Opened {
    pub(super) folder: Folder,
    pub(super) lock: FolderLock,
    /// For the engine: the data file, opened for direct I/O if `is_direct`.
    pub(super) file: File,
    pub(super) is_direct: bool,
    /// The file was made now and needs a superblock, then [`Folder::commit`].
    pub(super) is_new: bool,
}

fn folder_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> NvmeError {
    let path = path.to_owned();
    move |source| NvmeError::Folder { action, path, source }
}

impl Folder {
    /// Locks the folder and opens its data file, or starts a new one.
    pub(super) fn open(config: &NvmeConfig) -> Result<Opened, NvmeError> {
        let path = config.path.clone();
        std::fs::create_dir_all(&path).map_err(folder_error("create folder", &path))?;
        let lock_path = path.join(LOCK);
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&lock_path)
            .map_err(folder_error("open", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(NvmeError::Locked { path }),
            Err(TryLockError::Error(source)) => return Err(folder_error("lock", &lock_path)(source)),
        }
        let unfinished = path.join(UNFINISHED);
        match std::fs::remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(folder_error("remove", &unfinished)(error));
            }
            _ => {}
        }
        warn_of_strangers(&path);
        let data_path = path.join(DATA);
        let is_new = !data_path.try_exists().map_err(folder_error("look for", &data_path))?;
        let file_path = if is_new { unfinished } else { data_path };
        let (file, is_direct) = open_data(&file_path, is_new, config.direct)?;
        let data = file.try_clone().map_err(folder_error("open", &file_path))?;
        Ok(Opened { folder: Self { path, data }, lock: FolderLock { _file: lock }, file, is_direct, is_new })
    }

    /// Length of the data file now.
    pub(super) fn data_bytes(&self) -> Result<u64, NvmeError> {
        self.data.metadata().map(|metadata| metadata.len()).map_err(folder_error("stat", &self.path))
    }

    /// How many regions, up to `wanted`, the file system can hold when `existing` of them are there already.
    pub(super) fn affordable(&self, wanted: u32, existing: u32, region_bytes: u64) -> Result<u32, NvmeError> {
        let stat = statvfs(&self.path).map_err(|error| folder_error("stat", &self.path)(error.into()))?;
        let available = stat.f_bavail * stat.f_frsize;
        let start = if existing == 0 { REGIONS_START } else { 0 };
        let more = u32::try_from(available.saturating_sub(start) / region_bytes).unwrap_or(u32::MAX);
        let count = wanted.min(existing.saturating_add(more));
        if u64::from(count) < NvmeConfig::MIN_REGIONS {
            let needed = NvmeConfig::MIN_REGIONS * region_bytes + start;
            return Err(NvmeError::DiskFull { path: self.path.clone(), available, needed });
        }
        if count < wanted {
            tracing::warn!(wanted, count, "the disk has no room for nvme.capacity_bytes: the regions are reduced");
        }
        Ok(count)
    }

    /// Makes the data file exactly `bytes` long, all of it on disk.
    pub(super) fn resize(&self, bytes: u64) -> Result<(), NvmeError> {
        let current = self.data_bytes()?;
        if bytes < current {
            return self.data.set_len(bytes).map_err(folder_error("shorten the data file in", &self.path));
        }
        match fallocate(&self.data, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::OPNOTSUPP) => {
                tracing::warn!(path = %self.path.display(), "the file system can't preallocate: the disk may fill up under the tier");
                self.data.set_len(bytes).map_err(folder_error("lengthen the data file in", &self.path))
            }
            Err(error) => {
                // A failed allocation may have taken all that was left: give it back.
                let _ = self.data.set_len(current);
                Err(folder_error("preallocate the data file in", &self.path)(error.into()))
            }
        }
    }

    /// The new data file has a durable superblock: it is the data file now.
    pub(super) fn commit(&self) -> Result<(), NvmeError> {
        self.data.sync_all().map_err(folder_error("sync the data file in", &self.path))?;
        let (from, to) = (self.path.join(UNFINISHED), self.path.join(DATA));
        std::fs::rename(&from, &to).map_err(folder_error("rename", &from))?;
        let folder = File::open(&self.path).and_then(|folder| folder.sync_all());
        folder.map_err(folder_error("sync", &self.path))
    }

    /// Whether the file that we write is still the one in the folder.
    pub(super) fn check(&self) -> Result<(), NvmeError> {
        let path = self.path.join(DATA);
        let ours = self.data.metadata().map_err(folder_error("stat the open", &path))?;
        let there = std::fs::metadata(&path).map_err(folder_error("find", &path))?;
        if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) {
            return Ok(());
        }
        let source = io::Error::new(io::ErrorKind::NotFound, "another file is in its place");
        Err(NvmeError::Folder { action: "find", path, source })
    }

    /// The data file's path, for messages.
    pub(super) fn data_path(&self) -> PathBuf {
        self.path.join(DATA)
    }
}

fn warn_of_strangers(path: &Path) {
    let Ok(entries) = std::fs::read_dir(path) else { return };
    let names: Vec<_> = entries
        .filter_map(Result::ok)
        .map(|entry| entry.file_name())
        .filter(|name| ![LOCK, DATA, UNFINISHED].iter().any(|ours| name == ours))
        .collect();
    if !names.is_empty() {
        tracing::warn!(path = %path.display(), files = ?names, "files in the nvme folder are not ours and are left alone");
    }
}

fn open_data(path: &Path, is_new: bool, choice: DirectChoice) -> Result<(File, bool), NvmeError> {
    let options = |flags: OFlags| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(is_new).mode(0o600).custom_flags(flags.bits().cast_signed());
        options.open(path)
    };
    if choice != DirectChoice::Off {
        match options(OFlags::DIRECT) {
            Ok(file) => return Ok((file, true)),
            Err(error) if choice == DirectChoice::On || error.kind() != io::ErrorKind::InvalidInput => {
                return Err(folder_error("open for direct I/O", path)(error));
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "no direct I/O on this file system: the page cache is used");
                if is_new {
                    // The refused open may have left the file behind.
                    let _ = std::fs::remove_file(path);
                }
            }
        }
    }
    options(OFlags::empty()).map(|file| (file, false)).map_err(folder_error("open", path))
}
