//! Ranges of a file that processes keep as they are, said by locks of open file descriptions (fcntl(2), `F_OFD_SETLK`).
//!
//! A lock ends when the last descriptor of its open file is closed: by whoever took it, or by the system at the end of its process and of
//! all children that have the descriptor, however these end. So whoever owns the file learns from the system alone what is still kept,
//! also after a restart of its own.
#![expect(unsafe_code, reason = "locks of open files are a call of the system that takes a struct by its address")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;

/// Keeps `range` (bytes; not empty) of `file` until its last descriptor is closed.
///
/// # Errors
/// The system's, if the range can't be kept: `WouldBlock` if somebody has locked it for writing.
pub fn keep(file: &File, range: Range<u64>) -> io::Result<()> {
    lock(file, libc::F_OFD_SETLK, libc::F_RDLCK, range).map(drop)
}

/// The first range found that somebody keeps, and that has bytes of `range`; not what was kept by way of `file` itself.
///
/// # Errors
/// The system's.
pub fn kept(file: &File, range: Range<u64>) -> io::Result<Option<Range<u64>>> {
    let found = lock(file, libc::F_OFD_GETLK, libc::F_WRLCK, range)?;
    if i32::from(found.l_type) == libc::F_UNLCK {
        return Ok(None);
    }
    let start = u64::try_from(found.l_start).map_err(io::Error::other)?;
    // No length: to the end of all files.
    let end = u64::try_from(found.l_len).ok().filter(|&length| length > 0).map_or(u64::MAX, |length| start + length);
    Ok(Some(start..end))
}

fn lock(file: &File, command: libc::c_int, kind: libc::c_int, range: Range<u64>) -> io::Result<libc::flock> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let length = range.end.checked_sub(range.start).filter(|&length| length > 0).ok_or(io::ErrorKind::InvalidInput)?;
    let mut lock = libc::flock {
        l_type: libc::c_short::try_from(kind).map_err(invalid)?,
        l_whence: libc::c_short::try_from(libc::SEEK_SET).map_err(invalid)?,
        l_start: i64::try_from(range.start).map_err(invalid)?,
        l_len: i64::try_from(length).map_err(invalid)?,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the command reads and writes one `flock`, which is ours.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(lock) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_seen_by_others_until_the_last_descriptor_is_closed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let owner = File::create(&path).expect("made");
        let (one, other) = (File::open(&path).expect("opened"), File::open(&path).expect("opened"));
        assert_eq!(kept(&owner, 0..1 << 40).expect("asked"), None);
        keep(&one, 4096..8192).expect("kept");
        keep(&other, 4096..12288).expect("by two at once");
        assert_eq!(kept(&owner, 0..4096).expect("asked"), None);
        assert_eq!(kept(&owner, 8192..8193).expect("asked"), Some(4096..12288));
        let child = one.try_clone().expect("as a child has it");
        drop((one, other));
        assert_eq!(kept(&owner, 0..1 << 40).expect("asked"), Some(4096..8192));
        drop(child);
        assert_eq!(kept(&owner, 0..1 << 40).expect("asked"), None);
        assert!(keep(&owner, 5..5).is_err());
    }
}
