//! The catalog: the deterministic state machine that the log drives. This step lays its words: commands, outcomes,
//! queries and answers.

mod command;
mod outcome;
mod query;

pub use command::*;
pub use outcome::*;
pub use query::*;

use crate::log::{LogIndex, LogTime};
use crate::object::KeyHash;

/// Number of key buckets: 4,096, so that 10^7 objects are about 2,400 a bucket, one page of a repair.
pub const KEY_BUCKETS: usize = 4096;

/// A part of the key space: the upper 12 bits of the key's hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyBucket(u16);

impl KeyBucket {
    /// The bucket of a key.
    #[must_use]
    pub fn of(hash: KeyHash) -> Self {
        Self((hash.0 >> 52) as u16)
    }
}

/// The log entry that a command is applied for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryContext {
    /// The entry's index, never below the last one applied. An entry may hold several commands.
    pub index: LogIndex,
    /// The leader's stamp.
    pub time: LogTime,
}
