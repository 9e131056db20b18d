//! Segments that lie in a folder, whoever's: for people who want to know what takes the machine's memory. A node whose data
//! folder was deleted leaves its segment behind, since nothing else says that it will never come back.
//!
//! Opens no segment and takes no lock, so that a node that starts meanwhile is not in its way.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use tidepool_metadata::NodeId;
use tidepool_metadata::directory::{HEADER_BYTES, Layout};

/// A segment's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSegment {
    /// The file.
    pub path: PathBuf,
    /// Whose it is.
    pub node: NodeId,
    /// The data folder of that node; `None` if the segment does not say.
    pub owner: Option<PathBuf>,
    /// Memory that it takes, in bytes.
    pub bytes: u64,
    /// A process has it open, or nobody can tell.
    pub is_in_use: bool,
}

/// Folders where segments lie by default: `/dev/shm`, and every mount of hugetlbfs.
#[must_use]
pub fn segment_folders() -> Vec<PathBuf> {
    std::iter::once(PathBuf::from("/dev/shm")).chain(super::segment::hugetlbfs_mounts()).collect()
}

/// The segments in `folder`, by path. What this user may not read, and what is none, is left out.
///
/// # Errors
/// The system's, if the folder can't be read.
pub fn segments_in(folder: &Path) -> io::Result<Vec<FoundSegment>> {
    let locks = fs::read_to_string("/proc/locks").ok();
    let mut found: Vec<FoundSegment> =
        fs::read_dir(folder)?.filter_map(|entry| look_at(&entry.ok()?.path(), locks.as_deref())).collect();
    found.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    Ok(found)
}

/// `None` if it is no segment of this or an earlier program.
fn look_at(path: &Path, locks: Option<&str>) -> Option<FoundSegment> {
    if !fs::symlink_metadata(path).ok()?.is_file() {
        return None;
    }
    let mut file = File::open(path).ok()?;
    let mut header = [0; HEADER_BYTES];
    file.read_exact(&mut header).ok()?;
    let words: Vec<AtomicU64> =
        header.as_chunks().0.iter().map(|word| AtomicU64::new(u64::from_le_bytes(*word))).collect();
    let layout = Layout::read(&words).ok()?;
    let owner = Some(Layout::owner(&words)).filter(|owner| !owner.is_empty());
    let metadata = file.metadata().ok()?;
    Some(FoundSegment {
        path: path.to_owned(),
        node: layout.node,
        owner: owner.map(|owner| std::ffi::OsString::from_vec(owner).into()),
        // On hugetlbfs none are counted.
        bytes: Some(metadata.blocks() * 512).filter(|&bytes| bytes > 0).unwrap_or(layout.file_bytes),
        is_in_use: locks.is_none_or(|locks| is_locked(locks, metadata.dev(), metadata.ino())),
    })
}

/// Whether `locks`, as of /proc/locks, has one on that file.
fn is_locked(locks: &str, device: u64, inode: u64) -> bool {
    let file = format!("{:02x}:{:02x}:{inode}", rustix::fs::major(device), rustix::fs::minor(device));
    locks.split_whitespace().any(|word| word == file)
}
