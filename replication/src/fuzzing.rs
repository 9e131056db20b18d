//! Decoders of what comes from other voters, for the fuzz targets; compiled for them alone (`cfg(fuzzing)`).

use crate::consensus;
use crate::question::{LeaderAnswer, Question};

/// Bytes of another voter, taken for each thing that they may be.
pub fn message(bytes: &[u8]) {
    consensus::fuzzing::message(bytes);
    if let Some(question) = Question::decode(bytes) {
        let again = question.encode();
        assert_eq!(Question::decode(&again).map(|question| question.encode()), Some(again));
    }
    if let Some(answer) = LeaderAnswer::decode(bytes) {
        let again = answer.encode();
        assert_eq!(LeaderAnswer::decode(&again).map(|answer| answer.encode()), Some(again));
    }
}
