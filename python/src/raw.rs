//! Objects in memory that is named by addresses: what integrations written for other stores hand over.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use pyo3::prelude::*;
use pyo3::types::PyList;
use tidepool_client::{BatchGot, Client, Error, PutOptions, apart};

use crate::address::{Fault, Registry, Span, copy_in, copy_out, is_mapped};
use crate::convert::{Key, same_length};
use crate::failure::{Reason, of_client};
use crate::gathered::Gathered;

/// Calls of one batch that are under way at a time: one is copied here while the node copies another. More fill caches and
/// the lent memory, of which each takes a part; measured: 8 cost twice the CPU time.
const CALLS: usize = 2;
/// Objects with room for at most this many bytes are asked for together: a message has many of them.
const SMALL_BYTES: usize = 256 << 10;
/// Bytes of the values of one message that are copied here before.
const RUN_BYTES: usize = 8 << 20;

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
pub(crate) async fn read(client: &Client, registry: &Arc<Registry>, items: Vec<Item>) -> Vec<Answer> {
    let lone = <[Item; 1]>::try_from(items).map(|[item]| read_one(client.clone(), Arc::clone(registry), item));
    let items = match lone {
        Ok(read) => return vec![read.await],
        Err(items) => items,
    };
    if items.iter().all(|item| item.length <= SMALL_BYTES) {
        return read_small(client, registry, items).await;
    }
    let reads = items.into_iter().map(|item| apart(read_one(client.clone(), Arc::clone(registry), item)));
    futures::stream::iter(reads).buffered(CALLS).collect().await
}

async fn read_one(client: Client, registry: Arc<Registry>, item: Item) -> Answer {
    if let [span] = item.spans[..]
        && let Some(mut target) = registry.find(span)
        && let Some(buffer) = target.bytes_mut()
    {
        return Ok(client.get_into(&item.key, buffer).await?.map(|info| info.length));
    }
    read_and_scatter(&client, &item).await
}

async fn read_and_scatter(client: &Client, item: &Item) -> Answer {
    match client.get(&item.key).await? {
        Some(object) => scatter(&object.value, item).map(Some),
        None => Ok(None),
    }
}

/// From memory on this host those that are there, the others by messages that have many.
async fn read_small(client: &Client, registry: &Registry, items: Vec<Item>) -> Vec<Answer> {
    let (mut answers, mut rest) = (Vec::with_capacity(items.len()), Vec::new());
    for item in items {
        let answer = read_here(client, registry, &item).await.transpose();
        if answer.is_none() {
            rest.push(item);
        }
        answers.push(answer);
    }
    let mut asked = if rest.is_empty() { Vec::new() } else { ask_for_small(client, rest).await }.into_iter();
    answers.into_iter().filter_map(|answer| answer.or_else(|| asked.next())).collect()
}

/// `None`: it has to be asked for.
async fn read_here(client: &Client, registry: &Registry, item: &Item) -> Result<Option<Option<u64>>, Trouble> {
    let [span] = item.spans[..] else { return Ok(None) };
    let Some(mut target) = registry.find(span) else { return Ok(None) };
    let Some(buffer) = target.bytes_mut() else { return Ok(None) };
    Ok(client.get_local_into(&item.key, buffer).await?.map(|info| Some(info.length)))
}

async fn ask_for_small(client: &Client, items: Vec<Item>) -> Vec<Answer> {
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
            let reads = items.into_iter().map(|item| async move { read_and_scatter(client, &item).await });
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

/// Stores each item from its ranges. Items of one group go together.
pub(crate) async fn write(
    client: &Client,
    registry: &Arc<Registry>,
    items: Vec<Item>,
    options: &PutOptions,
    mut groups: Vec<String>,
) -> Vec<Answer> {
    let mut answers: Vec<Answer> = (0..items.len()).map(|_| Ok(None)).collect();
    groups.resize(items.len(), options.group.clone());
    let mut sets: HashMap<String, Vec<(usize, Item)>> = HashMap::new();
    for (group, item) in groups.into_iter().zip(items.into_iter().enumerate()) {
        sets.entry(group).or_default().push(item);
    }
    let runs = sets.into_iter().flat_map(|(group, set)| {
        let options = PutOptions { group, ..options.clone() };
        // Where nothing is copied here, the client cuts as it likes.
        let (registered, others): (Vec<_>, Vec<_>) =
            set.into_iter().partition(|(_, item)| is_registered(registry, item));
        let registered = Some(registered).filter(|run| !run.is_empty());
        registered.into_iter().chain(runs(others)).map(move |run| (run, options.clone()))
    });
    let mut puts: Vec<_> =
        runs.map(|(run, options)| put_run(client.clone(), Arc::clone(registry), run, options)).collect();
    let done = match puts.pop() {
        // A lone one needs no step to another thread.
        Some(put) if puts.is_empty() => vec![put.await],
        last => {
            let puts = puts.into_iter().chain(last).map(apart);
            futures::stream::iter(puts).buffer_unordered(CALLS).collect().await
        }
    };
    for (index, answer) in done.into_iter().flatten() {
        answers[index] = answer;
    }
    answers
}

/// Cuts items into runs of at most [`RUN_BYTES`]; one that is larger is a run of its own.
fn runs(items: Vec<(usize, Item)>) -> Vec<Vec<(usize, Item)>> {
    let mut runs: Vec<Vec<(usize, Item)>> = Vec::new();
    let mut bytes = 0_usize;
    for item in items {
        // What the caller says: nobody has looked whether there is so much memory.
        bytes = bytes.saturating_add(item.1.length);
        match runs.last_mut() {
            Some(run) if bytes <= RUN_BYTES => run.push(item),
            _ => {
                bytes = item.1.length;
                runs.push(vec![item]);
            }
        }
    }
    runs
}

async fn put_run(
    client: Client,
    registry: Arc<Registry>,
    run: Vec<(usize, Item)>,
    options: PutOptions,
) -> Vec<(usize, Answer)> {
    let mut answers = Vec::with_capacity(run.len());
    let (mut puts, mut places) = (Vec::with_capacity(run.len()), Vec::with_capacity(run.len()));
    let values = gather(&registry, &run);
    for ((index, item), value) in run.into_iter().zip(values) {
        match value {
            Ok(value) => {
                puts.push((item.key, value));
                places.push((index, item.length as u64));
            }
            Err(fault) => answers.push((index, Err(fault.into()))),
        }
    }
    match client.put_batch(&puts, &options).await {
        Ok(outcomes) => {
            let answer = |((index, length), outcome): ((usize, u64), Result<_, Error>)| {
                (index, outcome.map(|_| Some(length)).map_err(Trouble::from))
            };
            answers.extend(places.into_iter().zip(outcomes).map(answer));
        }
        // One that can't be stored fails a whole message; alone, each has its own answer.
        Err(_) => {
            for ((index, length), (key, value)) in places.into_iter().zip(puts) {
                let put = client.put(key, value, &options).await;
                answers.push((index, put.map(|_| Some(length)).map_err(Trouble::from)));
            }
        }
    }
    answers
}

/// The bytes of items: registered memory as it is, other memory copied, all of it to one place.
fn gather(registry: &Registry, items: &[(usize, Item)]) -> Vec<Result<Bytes, Fault>> {
    let shared: Vec<_> = items.iter().map(|(_, item)| as_it_is(registry, item)).collect();
    let copied = |(_, value): &(&(usize, Item), &Result<Option<Bytes>, Fault>)| matches!(value, Ok(None));
    let lengths = items.iter().zip(&shared).filter(copied).map(|((_, item), _)| item.length);
    let mut gathered = Gathered::with_room(lengths);
    let mut starts = Vec::with_capacity(items.len());
    for (_, item) in items.iter().zip(&shared).filter(copied).map(|(item, _)| item) {
        starts.push(gather_one(gathered.as_mut(), item));
    }
    let (whole, mut starts) = (gathered.map(Gathered::into_bytes).unwrap_or_default(), starts.into_iter());
    let value = |((_, item), shared): (&(usize, Item), Result<Option<Bytes>, Fault>)| match shared? {
        Some(bytes) => Ok(bytes),
        None => starts.next().unwrap_or(Ok(0)).map(|start| whole.slice(start..start + item.length)),
    };
    items.iter().zip(shared).map(value).collect()
}

fn is_registered(registry: &Registry, item: &Item) -> bool {
    matches!(item.spans[..], [span] if registry.find(span).is_some())
}

/// Registered memory; `None`: others' that is there, as far as can be seen.
fn as_it_is(registry: &Registry, item: &Item) -> Result<Option<Bytes>, Fault> {
    if let [span] = item.spans[..]
        && let Some(used) = registry.find(span)
    {
        return Ok(Some(used.into_shared()));
    }
    item.spans.iter().find(|span| !is_mapped(**span)).map_or(Ok(None), |span| Err(Fault(*span)))
}

/// Copies an item's ranges one behind the other; where they begin.
fn gather_one(gathered: Option<&mut Gathered>, item: &Item) -> Result<usize, Fault> {
    let no_room = || Fault(item.spans.first().copied().unwrap_or(Span { address: 0, length: item.length }));
    let gathered = gathered.ok_or_else(no_room)?;
    let start = gathered.filled();
    item.spans.iter().try_for_each(|span| copy_in(*span, gathered.next(span.length)))?;
    Ok(start)
}
