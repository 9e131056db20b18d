//! The payload of a log entry: commands of many callers under one stamp of the leader.
//!
//! All numbers are little-endian.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | format version, 2 |
//! | 1 | 4 | CRC-32 of everything behind it |
//! | 5 | 8 | log time, ms since the Unix epoch |
//! | 13 | | commands until the end, at least one: origin in 16 bytes, length in 4, then so many bytes |
//!
//! The origin is the member that proposed the command (8 bytes) and that member's count of proposals (8 bytes): by it the
//! proposer recognises its command when it applies the entry, whichever leader logged it. Version 1 had no origins.
//!
//! RocksDB checks its blocks by itself. This checksum goes from the leader's memory to each voter's apply, so that a
//! bit that flips between makes a voter stop instead of drift away from the others.
//! An entry without a payload is Raft's own, with which a leader starts its term.

use tidepool_metadata::{LogIndex, LogTime};

use super::member::MemberId;
use crate::error::GroupError;

const VERSION: u8 = 2;
const WITHOUT_ORIGINS: u8 = 1;
const HEADER_BYTES: usize = 13;
/// Origin and length.
const COMMAND_HEADER_BYTES: usize = 20;

/// Longest payload, in bytes: the longest command has room.
pub(super) const MAX_BYTES: usize = (256 << 10) + HEADER_BYTES + COMMAND_HEADER_BYTES;

/// What a command of so many bytes adds to a payload.
pub(super) const fn cost(command_bytes: usize) -> usize {
    COMMAND_HEADER_BYTES + command_bytes
}

/// Who proposed a command, and as its how-manieth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Origin {
    pub(super) member: MemberId,
    pub(super) sequence: u64,
}

/// Builds the payload of one entry.
#[derive(Debug)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn new(time: LogTime, capacity: usize) -> Self {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + capacity);
        bytes.push(VERSION);
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&time.0.to_le_bytes());
        Self(bytes)
    }

    pub(super) fn fits(&self, command_bytes: usize) -> bool {
        self.0.len() + cost(command_bytes) <= MAX_BYTES
    }

    pub(super) fn push(&mut self, origin: Origin, command: &[u8]) {
        let length = u32::try_from(command.len()).expect("commands are bounded by MAX_BYTES");
        self.0.extend_from_slice(&origin.member.0.to_le_bytes());
        self.0.extend_from_slice(&origin.sequence.to_le_bytes());
        self.0.extend_from_slice(&length.to_le_bytes());
        self.0.extend_from_slice(command);
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        let checksum = crc32fast::hash(&self.0[5..]);
        self.0[1..5].copy_from_slice(&checksum.to_le_bytes());
        self.0
    }
}

/// A payload that verified.
pub(super) struct Payload<'a> {
    pub(super) time: LogTime,
    pub(super) commands: Vec<&'a [u8]>,
}

/// Reads the payload of the entry at `index`.
pub(super) fn read(index: LogIndex, bytes: &[u8]) -> Result<Payload<'_>, GroupError> {
    let corrupt = |problem| GroupError::CorruptLog { index, problem };
    let (&version, rest) = bytes.split_first().ok_or(corrupt("an entry is empty"))?;
    if version != VERSION && version != WITHOUT_ORIGINS {
        return Err(GroupError::Version { what: "a log entry", found: version, known: VERSION });
    }
    let (&checksum, rest) = rest.split_first_chunk().ok_or(corrupt("an entry ends within its header"))?;
    if crc32fast::hash(rest) != u32::from_le_bytes(checksum) {
        return Err(corrupt("an entry's checksum does not match"));
    }
    let (&time, mut rest) = rest.split_first_chunk().ok_or(corrupt("an entry ends within its header"))?;
    let mut commands = Vec::new();
    while !rest.is_empty() {
        if version == VERSION {
            rest = rest.get(16..).ok_or(corrupt("an entry ends within an origin"))?;
        }
        let (&length, behind) = rest.split_first_chunk().ok_or(corrupt("an entry ends within a length"))?;
        let (command, behind) = behind
            .split_at_checked(u32::from_le_bytes(length) as usize)
            .ok_or(corrupt("an entry ends within a command"))?;
        commands.push(command);
        rest = behind;
    }
    Ok(Payload { time: LogTime(u64::from_le_bytes(time)), commands })
}

/// The origins of an entry's commands, in order, without a look at its checksum: nothing if it has none.
pub(super) fn origins(bytes: &[u8]) -> impl Iterator<Item = Origin> + '_ {
    let commands = if bytes.first() == Some(&VERSION) { bytes.get(HEADER_BYTES..) } else { None };
    let mut rest = commands.unwrap_or_default();
    std::iter::from_fn(move || {
        let (&header, behind) = rest.split_first_chunk::<COMMAND_HEADER_BYTES>()?;
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
        let length = u32::from_le_bytes(header[16..].try_into().expect("4 bytes"));
        rest = behind.get(length as usize..)?;
        Some(Origin { member: MemberId(number(0)), sequence: number(8) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(sequence: u64) -> Origin {
        Origin { member: MemberId(1 << 40 | 3), sequence }
    }

    fn sample() -> Vec<u8> {
        let mut writer = Writer::new(LogTime(77), 100);
        writer.push(origin(5), b"one");
        writer.push(origin(6), b"");
        writer.push(origin(u64::MAX), &[9; 300]);
        writer.finish()
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = sample();
        let payload = read(LogIndex(1), &bytes).expect("legal payload");
        assert_eq!(payload.time, LogTime(77));
        assert_eq!(payload.commands, [b"one".as_slice(), b"", &[9; 300]]);
        assert_eq!(origins(&bytes).collect::<Vec<_>>(), [origin(5), origin(6), origin(u64::MAX)]);
    }

    #[test]
    fn entries_without_origins_are_still_read() {
        let mut bytes = vec![WITHOUT_ORIGINS, 0, 0, 0, 0];
        bytes.extend_from_slice(&77u64.to_le_bytes());
        bytes.extend_from_slice(b"\x03\0\0\0one\x01\0\0\0x");
        let checksum = crc32fast::hash(&bytes[5..]);
        bytes[1..5].copy_from_slice(&checksum.to_le_bytes());
        let payload = read(LogIndex(1), &bytes).expect("legal payload");
        assert_eq!((payload.time, payload.commands), (LogTime(77), vec![b"one".as_slice(), b"x"]));
        assert_eq!(origins(&bytes).count(), 0);
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_refused() {
        let bytes = sample();
        for position in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[position] ^= 1 << (position % 8);
            assert!(read(LogIndex(1), &damaged).is_err(), "bit of byte {position}");
            assert!(read(LogIndex(1), &bytes[..position]).is_err(), "cut at {position}");
        }
    }

    #[test]
    fn the_longest_command_fits_alone() {
        let mut writer = Writer::new(LogTime(0), 0);
        assert!(writer.fits(256 << 10));
        assert!(!writer.fits((256 << 10) + 1));
        writer.push(origin(1), b"x");
        assert!(!writer.fits(256 << 10));
    }
}
