//! What clients asked and what they heard: the history of a run, which the checker reads.
//!
//! Instants are those of one clock, since the run began. A read without an answer says nothing and is not recorded; a
//! write without one may have been done at any time after it was asked for, or never.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// Names a key of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct KeyNumber(pub u64);

/// Names a value; no two writes share one, so a read says which write it saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ValueNumber(pub u64);

/// One call and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Operation {
    /// Whose object.
    pub key: KeyNumber,
    /// When it was asked for.
    pub invoked: Duration,
    /// When its answer was there; `None` if none came.
    pub returned: Option<Duration>,
    /// What it was, and what was heard.
    pub call: Call,
    /// A node was gone for some of its time: a put may have stored over an object whose only copy was there.
    pub may_replace_absent: bool,
}

/// A call with what was heard of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// Stores if there is nothing.
    Put {
        /// What.
        value: ValueNumber,
        /// The answer.
        heard: PutHeard,
    },
    /// Stores in any case. Its only answer is that it has; else `returned` is none.
    Upsert {
        /// What.
        value: ValueNumber,
    },
    /// Takes the object away.
    Remove {
        /// The answer.
        heard: RemoveHeard,
    },
    /// Reads what there is now.
    Get {
        /// The answer.
        found: Found,
    },
    /// Asks whether there is something now.
    Exists {
        /// The answer.
        present: bool,
    },
    /// Reads what there is, or was up to [`crate::checker::STALENESS`] ago. That there is nothing is always said of now.
    GetRecent {
        /// The answer.
        found: Found,
    },
    /// As [`Call::GetRecent`], without the bytes.
    ExistsRecent {
        /// The answer.
        present: bool,
    },
}

/// The answer to a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PutHeard {
    /// It is stored.
    Stored,
    /// There was something, and still is.
    AlreadyExists,
    /// None.
    Nothing,
}

/// The answer to a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RemoveHeard {
    /// It was there, and is not any more.
    Removed,
    /// It was not there.
    Missing,
    /// None.
    Nothing,
}

/// What a read found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Found {
    /// Every byte of this value.
    Value(ValueNumber),
    /// No object.
    Missing,
    /// Bytes that nobody wrote.
    Damaged,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>12.6} ", self.invoked.as_secs_f64())?;
        match self.returned {
            Some(returned) => write!(f, "{:>12.6} ", returned.as_secs_f64())?,
            None => write!(f, "{:>12} ", "no answer")?,
        }
        match self.call {
            Call::Put { value, heard } => write!(f, "put {} -> {heard:?}", value.0),
            Call::Upsert { value } => write!(f, "upsert {}", value.0),
            Call::Remove { heard } => write!(f, "remove -> {heard:?}"),
            Call::Get { found } => write!(f, "get -> {found:?}"),
            Call::Exists { present } => write!(f, "exists -> {present}"),
            Call::GetRecent { found } => write!(f, "get recent -> {found:?}"),
            Call::ExistsRecent { present } => write!(f, "exists recent -> {present}"),
        }
    }
}
