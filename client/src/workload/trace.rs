//! Recorded requests of a serving system: one JSON object a line, as the Mooncake traces have them.
//!
//! A request names the prefix blocks of its input by hash id; an equal id means the same block behind the same prefix.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct TraceRequest {
    /// Arrival, in milliseconds since the start of the trace.
    pub timestamp: u64,
    /// Tokens of the input.
    #[serde(default)]
    pub input_length: u64,
    /// Tokens of the answer.
    #[serde(default)]
    pub output_length: u64,
    /// Hash ids of the input's blocks, in order.
    pub hash_ids: Vec<u64>,
}

/// Why a trace can't be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file can't be opened.
    #[error("open trace {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A line can't be read.
    #[error("read line {line} of the trace")]
    Read {
        /// The line's number, from 1.
        line: usize,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A line is no request.
    #[error("line {line} of the trace is no request")]
    Parse {
        /// The line's number, from 1.
        line: usize,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
}

/// A whole trace, in order of arrival.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The requests.
    pub requests: Vec<TraceRequest>,
}

/// What a trace can give at best, whatever the cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TraceFacts {
    /// Requests.
    pub requests: usize,
    /// Blocks read.
    pub blocks: usize,
    /// Distinct blocks.
    pub distinct: usize,
    /// Hit ratio of a cache that never evicts.
    pub highest_hit_ratio: f64,
}

impl Trace {
    /// Reads the trace in the file `path`.
    ///
    /// # Errors
    /// [`TraceError`], with the number of the line.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|source| TraceError::Open { path: path.to_owned(), source })?;
        Self::read(BufReader::new(file))
    }

    /// Reads a trace, one request a line; empty lines are skipped.
    ///
    /// # Errors
    /// [`TraceError::Read`], [`TraceError::Parse`].
    pub fn read(reader: impl BufRead) -> Result<Self, TraceError> {
        let mut requests = Vec::new();
        for (index, text) in reader.lines().enumerate() {
            let line = index + 1;
            let text = text.map_err(|source| TraceError::Read { line, source })?;
            if !text.trim().is_empty() {
                requests.push(serde_json::from_str(&text).map_err(|source| TraceError::Parse { line, source })?);
            }
        }
        Ok(Self { requests })
    }

    /// Keeps only the first `count` requests.
    pub fn truncate(&mut self, count: usize) {
        self.requests.truncate(count);
    }

    /// All blocks in the order of reading, hash ids replaced by dense numbers from 0 in order of first appearance.
    #[must_use]
    pub fn accesses(&self) -> Vec<u32> {
        let mut dense = HashMap::new();
        let ids = self.requests.iter().flat_map(|request| &request.hash_ids);
        ids.map(|&id| {
            let next = u32::try_from(dense.len()).expect("a trace in memory has fewer than 2^32 blocks");
            *dense.entry(id).or_insert(next)
        })
        .collect()
    }

    /// What this trace can give at best.
    #[must_use]
    pub fn facts(&self) -> TraceFacts {
        let accesses = self.accesses();
        let distinct = accesses.iter().max().map_or(0, |&last| last as usize + 1);
        TraceFacts {
            requests: self.requests.len(),
            blocks: accesses.len(),
            distinct,
            highest_hit_ratio: (accesses.len() - distinct) as f64 / accesses.len().max(1) as f64,
        }
    }
}

#[cfg(test)]
pub(crate) fn recorded(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data").join(name);
    Trace::open(&path).expect("the recorded traces are in data/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_traces_have_the_facts_of_their_readme() {
        let conversation = recorded("conversation_trace.jsonl").facts();
        assert_eq!((conversation.requests, conversation.blocks, conversation.distinct), (12_031, 288_500, 182_790));
        assert!((conversation.highest_hit_ratio - 0.3664).abs() < 5e-5);
        let synthetic = recorded("synthetic_trace.jsonl").facts();
        assert_eq!((synthetic.requests, synthetic.blocks, synthetic.distinct), (3_993, 121_877, 43_924));
        assert!((synthetic.highest_hit_ratio - 0.6396).abs() < 5e-5);
    }

    #[test]
    fn a_bad_line_is_named() {
        let text = "{\"timestamp\": 1, \"hash_ids\": [1, 2]}\n\n{\"timestamp\": 2}\n";
        assert!(matches!(Trace::read(text.as_bytes()), Err(TraceError::Parse { line: 3, .. })));
    }

    #[test]
    fn accesses_are_numbered_by_first_appearance() {
        let text = "{\"timestamp\": 1, \"hash_ids\": [70, 50]}\n{\"timestamp\": 2, \"hash_ids\": [70, 60]}";
        assert_eq!(Trace::read(text.as_bytes()).expect("two requests").accesses(), [0, 1, 0, 2]);
    }
}
