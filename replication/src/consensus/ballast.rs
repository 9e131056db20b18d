//! Room on the catalog's disk for the commands that make room.
//!
//! A log that can't be written ends its voter, and a start needs room too: on a full disk nothing could be removed any
//! more. So a file of some MiB, the ballast, lies beside the log. While little is free beside it, commands that make the
//! catalog grow are refused and all others are taken; when that runs out too, the ballast makes room for those. It is laid
//! again when there is room for both.
//!
//! ```text
//!          short of `refuse`            short of `last`
//!  Ample ────────────────────> Short ────────────────────> Spent
//!    ^    refuse and a bit          │                        │
//!    ├──────────────────────────────┘   all of it and a bit  │
//!    └───────────────────────────────────────────────────────┘
//! ```
//!
//! It promises nothing: who else fills the disk can fill it to the last byte. The disk is looked at by whoever asks, at most
//! every so often, so that no thread ticks.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate, statvfs};

/// Name of the file in the catalog's folder.
const FILE: &str = "ballast";
/// What the databases write in a busy second: a look at the disk is older than that never.
const LOOK: Duration = Duration::from_millis(100);
/// The ballast on a large disk: memtables, files being merged and the log of removals find room in it.
const MOST_BYTES: u64 = 64 << 20;
/// On a small disk, a part of it.
const PART: u64 = 32;

/// How much room there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// For everything.
    Ample,
    /// For commands that don't make the catalog grow.
    Short,
    /// For those, in the place of the ballast.
    Spent,
}

/// Bounds in bytes, by the size of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bounds {
    ballast: u64,
    /// Less than this is free: growth is refused.
    refuse: u64,
    /// Less than this is free: the ballast is given up.
    last: u64,
}

impl Bounds {
    fn of(disk_bytes: u64) -> Self {
        let ballast = (disk_bytes / PART).min(MOST_BYTES);
        Self { ballast, refuse: ballast, last: ballast / 4 }
    }

    /// What follows on `room` when `free` bytes are free. Back only with a bit more than where it came from, so that it does
    /// not swing.
    fn next(self, room: Room, free: u64) -> Room {
        let enough = self.refuse + self.last;
        match room {
            Room::Ample | Room::Short if free < self.last => Room::Spent,
            Room::Ample if free < self.refuse => Room::Short,
            Room::Short if free >= enough => Room::Ample,
            Room::Spent if free >= enough + self.ballast => Room::Ample,
            same => same,
        }
    }
}

/// The file, and what is known of the disk.
#[derive(Debug)]
pub(super) struct Ballast {
    path: PathBuf,
    bounds: Bounds,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    room: Room,
    free: u64,
    at: Instant,
}

impl Ballast {
    /// Lays the ballast in `folder`, or finds it there; gives it up at once if the databases could not be opened else.
    ///
    /// # Errors
    /// The disk can't be asked for its room.
    pub(super) fn open(folder: &Path) -> io::Result<Self> {
        let (free, disk_bytes) = ask(folder)?;
        let (path, bounds) = (folder.join(FILE), Bounds::of(disk_bytes));
        let is_laid = fs::metadata(&path).is_ok_and(|found| found.len() == bounds.ballast);
        let room = if is_laid { Room::Ample } else { Room::Spent };
        let ballast = Self { path, bounds, seen: Mutex::new(Seen { room, free, at: Instant::now() }) };
        ballast.settle(&mut ballast.seen.lock(), free);
        Ok(ballast)
    }

    /// Bytes that are free, if they are too few for the catalog to grow.
    pub(super) fn shortage(&self) -> Option<u64> {
        let mut seen = self.seen.lock();
        if seen.at.elapsed() >= LOOK {
            seen.at = Instant::now();
            match ask(&self.path) {
                Ok((free, _)) => self.settle(&mut seen, free),
                Err(error) => tracing::warn!(path = %self.path.display(), %error, "ask the disk for its room"),
            }
        }
        (seen.room != Room::Ample).then_some(seen.free)
    }

    fn settle(&self, seen: &mut Seen, free: u64) {
        let next = self.bounds.next(seen.room, free);
        seen.free = free;
        if next == seen.room {
            return;
        }
        let path = self.path.display();
        match (seen.room, next) {
            (_, Room::Spent) => {
                tracing::error!(%path, free, "the catalog's disk is full: the ballast is given up, so that objects can be removed");
                let _was_not_laid = fs::remove_file(&self.path);
            }
            (_, Room::Short) => {
                tracing::error!(%path, free, refuse = self.bounds.refuse, "the catalog's disk is nearly full: puts are refused");
            }
            (Room::Spent, Room::Ample) => {
                if let Err(error) = lay(&self.path, self.bounds.ballast) {
                    tracing::warn!(%path, %error, "the ballast can't be laid");
                    let _half_laid = fs::remove_file(&self.path);
                    return;
                }
                tracing::info!(%path, free, bytes = self.bounds.ballast, "the ballast of the catalog's disk is laid");
            }
            (_, Room::Ample) => tracing::info!(%path, free, "the catalog's disk has room again"),
        }
        seen.room = next;
    }
}

/// Bytes that are free on the disk of `path` for this user, and all that it has. The file itself may be gone.
fn ask(path: &Path) -> io::Result<(u64, u64)> {
    let disk = match statvfs(path) {
        Err(rustix::io::Errno::NOENT) => statvfs(path.parent().unwrap_or(path))?,
        disk => disk?,
    };
    Ok((disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize))
}

fn lay(path: &Path, bytes: u64) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    if bytes > 0 {
        fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_ballast_follows_the_size_of_the_disk() {
        assert_eq!(Bounds::of(1 << 40), Bounds { ballast: 64 * MIB, refuse: 64 * MIB, last: 16 * MIB });
        assert_eq!(Bounds::of(256 * MIB), Bounds { ballast: 8 * MIB, refuse: 8 * MIB, last: 2 * MIB });
    }

    #[test]
    fn growth_is_refused_before_the_ballast_is_given_up_and_comes_back_with_room_for_both() {
        let bounds = Bounds::of(1 << 40);
        let walk = [
            (1000, Room::Ample),
            (64, Room::Ample),
            (63, Room::Short),
            (70, Room::Short),
            (16, Room::Short),
            (80, Room::Ample),
            (40, Room::Short),
            (15, Room::Spent),
            // What the ballast left.
            (79, Room::Spent),
            (143, Room::Spent),
            (144, Room::Ample),
            (0, Room::Spent),
        ];
        let mut room = Room::Ample;
        for (free, expected) in walk {
            room = bounds.next(room, free * MIB);
            assert_eq!(room, expected, "{free} MiB free");
        }
    }

    #[test]
    fn the_file_is_there_while_there_is_room_and_gone_when_there_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let ballast = Ballast::open(folder.path()).unwrap();
        let path = folder.path().join(FILE);
        assert_eq!(path.metadata().unwrap().len(), ballast.bounds.ballast);
        assert_eq!(ballast.shortage(), None);
        let mut seen = ballast.seen.lock();
        ballast.settle(&mut seen, ballast.bounds.last - 1);
        assert!(!path.exists());
        drop(seen);
        assert_eq!(ballast.shortage(), Some(ballast.bounds.last - 1));
        ballast.settle(&mut ballast.seen.lock(), 1 << 40);
        assert_eq!(path.metadata().unwrap().len(), ballast.bounds.ballast);
        assert_eq!(ballast.shortage(), None);
    }
}
