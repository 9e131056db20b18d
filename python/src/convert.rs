//! Arguments from Python, and plain results to it.

use std::time::Duration;

use bytes::Bytes;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use tidepool_client::{DataType, Durability, Error, Existence, PutOptions, PutOutcome, RemoveOutcome, StoredIn};

use crate::failure::{Reason, of_client};

/// A key: `bytes`, or the UTF-8 of a `str`.
pub(crate) struct Key(pub(crate) Bytes);

impl<'py> FromPyObject<'_, 'py> for Key {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(Self(Bytes::copy_from_slice(text.to_cow()?.as_bytes())));
        }
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Ok(Self(Bytes::copy_from_slice(bytes.as_bytes())));
        }
        let class = object.get_type().name()?;
        Err(PyTypeError::new_err(format!("a key is str or bytes, not {class}")))
    }
}

impl AsRef<[u8]> for Key {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// What a put asks for: durability, number of the data type, group, upsert, pin, replicas, min_replicas, prefer, and
/// milliseconds of soft pin.
pub(crate) type Options = (bool, u8, String, bool, bool, u32, u32, Vec<String>, Option<u64>);

/// The client's options.
pub(crate) fn put_options(options: Options) -> PyResult<PutOptions> {
    let (nvme, data_type, group, upsert, pin, replicas, min_replicas, prefer, soft_pin) = options;
    let soft_pin = soft_pin.map(Duration::from_millis);
    let durability = if nvme { Durability::Nvme } else { Durability::Memory };
    let data_type = self::data_type(data_type)?;
    Ok(PutOptions { durability, data_type, group, upsert, pin, soft_pin, replicas, min_replicas, prefer })
}

pub(crate) fn data_type(number: u8) -> PyResult<DataType> {
    DataType::from_number(number).ok_or_else(|| Reason::BadArgument.error(&format!("there is no data type {number}")))
}

pub(crate) fn seconds(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Reason::BadArgument.error(&format!("{name} is {seconds}: give seconds from 0 up")))
}

/// Lists that belong together are of one length.
pub(crate) fn same_length(lists: &[(&str, usize)]) -> PyResult<()> {
    match lists {
        [(first, expected), rest @ ..] => match rest.iter().find(|(_, length)| length != expected) {
            None => Ok(()),
            Some((name, length)) => {
                let words = format!("{first} has {expected} items, {name} has {length}");
                Err(Reason::LengthMismatch.error(&words))
            }
        },
        [] => Ok(()),
    }
}

/// The client's answer, or the exception for its error.
pub(crate) fn answer<T>(py: Python<'_>, answer: Result<T, Error>) -> PyResult<T> {
    answer.map_err(|error| of_client(py, &error))
}

/// True: stored. False: the key had an object.
pub(crate) fn stored(outcome: PutOutcome) -> bool {
    outcome == PutOutcome::Stored
}

/// True, False, or None: nobody knows yet.
pub(crate) fn existence(existence: Existence) -> Option<bool> {
    match existence {
        Existence::Present => Some(true),
        Existence::Missing => Some(false),
        Existence::Recovering | Existence::Unconfirmed => None,
    }
}

pub(crate) fn removal(outcome: RemoveOutcome) -> &'static str {
    match outcome {
        RemoveOutcome::Removed => "removed",
        RemoveOutcome::Missing => "missing",
        RemoveOutcome::Pinned => "pinned",
        RemoveOutcome::Failed => "failed",
    }
}

pub(crate) fn tier(tier: StoredIn) -> &'static str {
    match tier {
        StoredIn::Dram => "dram",
        StoredIn::Nvme => "nvme",
        StoredIn::Other => "other",
    }
}
