//! The segment's file: found or made, locked, reserved, mapped.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, fallocate, flock, statvfs};
use tidepool_io::available_bytes;
use tidepool_metadata::directory::{Layout, Writer};

use super::arena::Arena;
use super::error::MemoryError;
use super::tier::MemoryConfig;

/// Directory slots that are backed beforehand, and by which the backing grows.
const SLOT_STEP: u32 = 16 << 10;

/// An opened segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) file: File,
    pub(super) path: Option<PathBuf>,
    pub(super) arena: Arena,
}

/// Opens the segment of `config`, or makes it anew: if there is none, or one of another layout or size.
pub(super) fn open(config: &MemoryConfig, layout: &Layout) -> Result<Segment, MemoryError> {
    if !config.survive_restart {
        return anonymous(config, layout);
    }
    let folder = config
        .folder
        .clone()
        .or_else(|| hugetlbfs(&config.name, layout.file_bytes))
        .unwrap_or_else(|| "/dev/shm".into());
    let path = folder.join(&config.name);
    let file = open_locked(&path)?;
    let length = file.metadata().map_err(|source| io_error("look at", &path, source))?.len();
    if length == layout.file_bytes {
        let arena = Arena::map(&file, layout).map_err(|source| io_error("map", &path, source))?;
        match Layout::read(arena.words()) {
            Ok(found) if found == *layout => {
                if let Err(error) = arena.populate_directory(layout.bytes_used(arena.words())) {
                    tracing::debug!(%error, "the directory is mapped page by page");
                }
                return Ok(Segment { file, path: Some(path), arena });
            }
            found => retire(&path, arena.words(), &format!("{found:?}")),
        }
    } else if length > 0 {
        tracing::warn!(path = %path.display(), length, wanted = layout.file_bytes, "the segment has another size: made anew");
    }
    fs::remove_file(&path).map_err(|source| io_error("remove the old segment", &path, source))?;
    // Its memory must be free before the new one is reserved.
    drop(file);
    let file = open_locked(&path)?;
    let made = make(&file, layout, &path);
    if made.is_err() {
        let _half_made = fs::remove_file(&path);
    }
    Ok(Segment { arena: made?, file, path: Some(path) })
}

fn anonymous(config: &MemoryConfig, layout: &Layout) -> Result<Segment, MemoryError> {
    let path = PathBuf::from(format!("memfd:{}", config.name));
    let file = rustix::fs::memfd_create(config.name.as_str(), MemfdFlags::CLOEXEC);
    let file = File::from(file.map_err(|error| io_error("make", &path, error.into()))?);
    Ok(Segment { arena: make(&file, layout, &path)?, file, path: None })
}

fn open_locked(path: &Path) -> Result<File, MemoryError> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = file.map_err(|source| io_error("open", path, source))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(MemoryError::Locked { path: path.to_owned() }),
        Err(error) => Err(io_error("lock", path, error.into())),
    }
}

/// Reserves everything that will be touched, so that no access ends in SIGBUS, then writes the header.
fn make(file: &File, layout: &Layout, path: &Path) -> Result<Arena, MemoryError> {
    file.set_len(layout.file_bytes).map_err(|source| io_error("size", path, source))?;
    let data = layout.file_bytes - layout.data_offset;
    if let Some(available) = available_bytes().filter(|&available| available < data && !is_hugetlbfs(file)) {
        return Err(MemoryError::NoRoom { path: path.to_owned(), wanted: layout.file_bytes, available });
    }
    for (offset, length) in [(0, layout.bytes_below_slot(SLOT_STEP.min(layout.slot_count))), (layout.data_offset, data)]
    {
        reserve(file, offset, length).map_err(|source| room_error("reserve the memory of", path, layout, source))?;
    }
    // On hugetlbfs this takes what is not reserved yet.
    let arena = Arena::map(file, layout).map_err(|source| room_error("map", path, layout, source))?;
    layout.format(arena.words());
    Ok(arena)
}

/// Its pages were set aside before: they are not among what is available.
fn is_hugetlbfs(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type == libc::HUGETLBFS_MAGIC)
}

fn reserve(file: &File, offset: u64, length: u64) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::empty(), offset, length)?)
}

/// Backs the directory up to the slots that the next seals may use. Cheap but for every so many thousand slots.
pub(super) fn back_slots(file: &File, layout: &Layout, backed: &mut u32, needed: u32) -> io::Result<()> {
    if needed <= *backed {
        return Ok(());
    }
    let target = needed.next_multiple_of(SLOT_STEP).min(layout.slot_count);
    let from = layout.bytes_below_slot(*backed);
    reserve(file, from, layout.bytes_below_slot(target) - from)?;
    *backed = target;
    Ok(())
}

/// Slots backed in a file that was just made.
pub(super) fn initially_backed(layout: &Layout) -> u32 {
    SLOT_STEP.min(layout.slot_count)
}

fn retire(path: &Path, words: &[AtomicU64], why: &str) {
    tracing::warn!(path = %path.display(), why, "the segment is not one that this program can use: made anew");
    Writer::set_retired(words);
}

/// Where hugetlbfs is mounted.
pub(super) fn hugetlbfs_mounts() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let place = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let (place, kind) = (fields.next()?, fields.next()?);
        (kind == "hugetlbfs").then(|| PathBuf::from(place))
    };
    mounts.lines().filter_map(place).collect()
}

/// A mount of hugetlbfs that has our segment already, or enough free pages for it.
fn hugetlbfs(name: &str, bytes: u64) -> Option<PathBuf> {
    let mounts = hugetlbfs_mounts();
    let has_room = |place: &&PathBuf| statvfs(*place).is_ok_and(|stat| stat.f_bavail * stat.f_frsize >= bytes);
    let ours = mounts.iter().find(|place| place.join(name).exists());
    ours.or_else(|| mounts.iter().find(has_room)).cloned()
}

fn room_error(action: &'static str, path: &Path, layout: &Layout, source: io::Error) -> MemoryError {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::OutOfMemory => {
            let available = statvfs(path.parent().unwrap_or(path)).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
            MemoryError::NoRoom { path: path.to_owned(), wanted: layout.file_bytes, available }
        }
        _ => io_error(action, path, source),
    }
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> MemoryError {
    MemoryError::Io { action, path: path.to_owned(), source }
}
