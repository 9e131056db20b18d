//! Objects in memory that is named by addresses: what integrations written for other stores hand over.

use std::collections::HashMap;

use bytes::Bytes;
use futures::StreamExt;
use pyo3::prelude::*;
use pyo3::types::PyList;
use tidepool_client::{Client, Error, PutOptions};

use crate::address::{Fault, Registry, Span, copy_in, copy_out};
use crate::convert::{Key, same_length};
use crate::failure::{Reason, of_client};

/// Calls of one batch that are under way at a time.
const CALLS: usize = 8;
/// Objects with room for at most this many bytes are asked for together: a message has many of them.
const SMALL_BYTES: usize = 256 << 10;

/// One object and where its bytes lie, in order.
pub(crate) struct Item {
    key: Bytes,
    spans: Vec<Span>,
    length: usize,
}

/// Why an item failed.
pub(crate) enum Trouble {
    /// The client says so.
    Client(Error),
    /// The memory is not there, or can't be written.
    Memory(Fault),
    /// The object is longer than its ranges.
    TooLong { length: usize, room: usize },
}

/// The object's length; `None`: there is none.
pub(crate) type Answer = Result<Option<u64>, Trouble>;

/// Puts lists together that belong together.
///
/// # Errors
/// `LENGTH_MISMATCH`, `BAD_ADDRESS`.
pub(crate) fn items(keys: Vec<Key>, addresses: Vec<Vec<usize>>, lengths: Vec<Vec<usize>>) -> PyResult<Vec<Item>> {
    same_length(&[("keys", keys.len()), ("addresses", addresses.len()), ("lengths", lengths.len())])?;
    let item = |((key, addresses), lengths): ((Key, Vec<usize>), Vec<usize>)| {
        same_length(&[("addresses of a key", addresses.len()), ("its lengths", lengths.len())])?;
        let mut spans: Vec<Span> = Vec::with_capacity(addresses.len());
        let mut whole = 0_usize;
        for (address, length) in addresses.into_iter().zip(lengths) {
            let span = Span::new(address, length)?;
            whole = whole.checked_add(length).ok_or_else(|| Fault(span).error())?;
            match spans.last_mut() {
                // Neighbours are one range.
                Some(last) if last.address + last.length == address => last.length += length,
                _ => spans.push(span),
            }
        }
        Ok(Item { key: key.0, spans, length: whole })
    };
    keys.into_iter().zip(addresses).zip(lengths).map(item).collect()
}

/// Results as Python has them.
pub(crate) fn results(py: Python<'_>, answers: Vec<Answer>) -> PyResult<Py<PyAny>> {
    let answers = answers.into_iter().map(|answer| match answer {
        Ok(Some(length)) => Ok(length.into_pyobject(py)?.into_any().unbind()),
        Ok(None) => Ok(py.None()),
        Err(trouble) => Ok(trouble.error(py).into_value(py).into_any()),
    });
    Ok(PyList::new(py, answers.collect::<PyResult<Vec<_>>>()?)?.into_any().unbind())
}

impl Trouble {
    fn error(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Client(error) => of_client(py, error),
            Self::Memory(fault) => fault.error(),
            Self::TooLong { length, room } => {
                Reason::BadRange.error(&format!("the object has {length} bytes, its memory {room}"))
            }
        }
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Client(error)
    }
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        Self::Memory(fault)
    }
}

/// Reads each item to its ranges.
pub(crate) async fn read(client: &Client, registry: &Registry, items: Vec<Item>) -> Vec<Answer> {
    if items.len() > 1 && items.iter().all(|item| item.length <= SMALL_BYTES) {
        return read_small(client, items).await;
    }
    let reads = items.into_iter().map(|item| read_one(client, registry, item));
    futures::stream::iter(reads).buffered(CALLS).collect().await
}

async fn read_one(client: &Client, registry: &Registry, item: Item) -> Answer {
    if let [span] = item.spans[..]
        && let Some(mut target) = registry.find(span)
        && let Some(buffer) = target.bytes_mut()
    {
        return Ok(client.get_into(&item.key, buffer).await?.map(|info| info.length));
    }
    read_and_scatter(client, item).await
}

async fn read_and_scatter(client: &Client, item: Item) -> Answer {
    match client.get(&item.key).await? {
        Some(object) => scatter(&object.value, &item).map(Some),
        None => Ok(None),
    }
}

async fn read_small(client: &Client, items: Vec<Item>) -> Vec<Answer> {
    use tidepool_client::BatchGot;
    let keys: Vec<&Bytes> = items.iter().map(|item| &item.key).collect();
    match client.get_batch(&keys).await {
        Ok(got) => {
            let answer = |(got, item): (BatchGot, &Item)| match got {
                BatchGot::Found(object) => scatter(&object.value, item).map(Some),
                BatchGot::Missing | BatchGot::Unavailable => Ok(None),
                BatchGot::Failed(error) => Err(error.into()),
            };
            got.into_iter().zip(&items).map(answer).collect()
        }
        // Asked one by one, each gets its own answer.
        Err(_) => {
            let reads = items.into_iter().map(|item| read_and_scatter(client, item));
            futures::stream::iter(reads).buffered(CALLS).collect().await
        }
    }
}

fn scatter(value: &Bytes, item: &Item) -> Result<u64, Trouble> {
    if value.len() > item.length {
        return Err(Trouble::TooLong { length: value.len(), room: item.length });
    }
    let mut rest = &value[..];
    for span in &item.spans {
        let (part, after) = rest.split_at(rest.len().min(span.length));
        copy_out(part, *span)?;
        rest = after;
    }
    Ok(value.len() as u64)
}

fn gather(registry: &Registry, item: &Item) -> Result<Bytes, Fault> {
    if let [span] = item.spans[..]
        && let Some(used) = registry.find(span)
    {
        return Ok(used.into_shared());
    }
    let mut value = Vec::new();
    for span in &item.spans {
        copy_in(*span, &mut value)?;
    }
    Ok(value.into())
}

/// Stores each item from its ranges. Items of one group go together.
pub(crate) async fn write(
    client: &Client,
    registry: &Registry,
    items: Vec<Item>,
    options: &PutOptions,
    mut groups: Vec<String>,
) -> Vec<Answer> {
    let count = items.len();
    let mut answers: Vec<Answer> = (0..count).map(|_| Ok(None)).collect();
    groups.resize(count, options.group.clone());
    let mut sets: HashMap<String, Vec<usize>> = HashMap::new();
    for (index, group) in groups.into_iter().enumerate() {
        sets.entry(group).or_default().push(index);
    }
    let items = &items;
    let puts = sets.into_iter().map(|(group, indexes)| {
        let options = PutOptions { group, ..options.clone() };
        async move { put_set(client, registry, items, indexes, &options).await }
    });
    let mut done = futures::stream::iter(puts).buffer_unordered(CALLS);
    while let Some(set) = done.next().await {
        for (index, answer) in set {
            answers[index] = answer;
        }
    }
    answers
}

/// Bytes that are gathered at a time.
const GATHERED_BYTES: usize = 64 << 20;

async fn put_set(
    client: &Client,
    registry: &Registry,
    items: &[Item],
    mut indexes: Vec<usize>,
    options: &PutOptions,
) -> Vec<(usize, Answer)> {
    let mut answers = Vec::with_capacity(indexes.len());
    while !indexes.is_empty() {
        let mut bytes = 0;
        let fits = |&&index: &&usize| {
            bytes += items[index].length;
            bytes <= GATHERED_BYTES
        };
        let count = indexes.iter().take_while(fits).count().max(1);
        let (mut puts, mut places) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for index in indexes.drain(..count) {
            match gather(registry, &items[index]) {
                Ok(value) => {
                    puts.push((items[index].key.clone(), value));
                    places.push(index);
                }
                Err(fault) => answers.push((index, Err(fault.into()))),
            }
        }
        let length = |place: usize| Ok(Some(items[place].length as u64));
        match client.put_batch(&puts, options).await {
            Ok(outcomes) => answers.extend(
                places
                    .into_iter()
                    .zip(outcomes)
                    .map(|(place, outcome)| (place, outcome.map_err(Trouble::from).and_then(|_| length(place)))),
            ),
            // One that can't be stored fails a whole message; alone, each has its own answer.
            Err(_) => {
                for (place, (key, value)) in places.into_iter().zip(puts) {
                    let put = client.put(key, value, options).await;
                    answers.push((place, put.map_err(Trouble::from).and_then(|_| length(place))));
                }
            }
        }
    }
    answers
}
