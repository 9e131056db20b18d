//! Batches: many small objects a message, a few messages at a time, one outcome an item in the caller's order.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::{FutureExt, StreamExt, TryStreamExt};
use tidepool_metadata::proto;
use tidepool_transfer::Lendable;

use crate::apart::apart;
use crate::call::{Attempt, Client, all_key_bytes, is_cut_off, key_bytes, shown};
use crate::error::{Error, Refusal};
use crate::native::{Link, may_block};
use crate::places::Elsewhere;
use crate::retry::Repeatable;
use crate::session::{self, Items};
use crate::types::{BatchGot, BatchObject, GetOptions, Object, ObjectInfo, PutOptions, PutOutcome, StoredIn};

/// Bytes of values in one message; larger values go alone.
const MESSAGE_BYTES: usize = 3 << 20;
/// The same where the node finds the values in memory that it is lent: each message is made known by the catalog, and more
/// of them would be waited for. Small enough for gRPC, if it comes to that.
const LENT_MESSAGE_BYTES: usize = 12 << 20;
/// Keys in one message.
const MESSAGE_KEYS: usize = 1000;
const GET: &str = "batch get";
/// Messages under way at a time: one is filled while the node works on another.
const IN_FLIGHT: usize = 2;
/// Objects of one batch that are read to their places at a time.
const READS: usize = 4;

/// The answer to a put of many, unless nothing of it was done and another attempt may find a leader.
fn led(reply: proto::BatchPutReply) -> Result<proto::BatchPutReply, Error> {
    match reply.reasons.iter().find(|reason| is_cut_off(reason)) {
        Some(reason) if !reply.outcomes().any(|outcome| outcome == proto::PutOutcome::Stored) => {
            Err(Error::Refused(Box::new(Refusal::of_item(reason.clone()))))
        }
        _ => Ok(reply),
    }
}

impl Client {
    /// Stores many objects; one outcome an item, in order. An item that is refused does not keep the others from
    /// being stored.
    ///
    /// # Errors
    /// [`Error::Key`] for the first key that is none (nothing is stored then); what the server refuses for a whole
    /// message (items of other messages may be stored then).
    pub async fn put_batch<K: AsRef<[u8]>>(
        &self,
        items: &[(K, Bytes)],
        options: &PutOptions,
    ) -> Result<Vec<Result<PutOutcome, Error>>, Error> {
        let keyed = |(key, value): &(K, Bytes)| Ok((key_bytes(key)?, value.clone()));
        let items = items.iter().map(keyed).collect::<Result<Vec<_>, Error>>()?;
        let most = if are_lendable(&items) { LENT_MESSAGE_BYTES } else { MESSAGE_BYTES };
        let groups = groups(&items, most, |(_, value)| value.len()).map(<[_]>::to_vec).collect();
        let options = options.clone();
        self.side_by_side(groups, move |client, group| {
            let options = options.clone();
            async move { client.put_group(group, &options).await }
        })
        .await
    }

    /// Does each part of a batch, a few at a time; their outcomes in order.
    async fn side_by_side<I, T, F>(&self, mut parts: Vec<I>, call: impl Fn(Self, I) -> F) -> Result<Vec<T>, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<Vec<T>, Error>> + Send + 'static,
    {
        if parts.len() <= 1 {
            return match parts.pop() {
                Some(part) => call(self.clone(), part).await,
                None => Ok(Vec::new()),
            };
        }
        let outcomes = futures::stream::iter(parts).map(|part| apart(call(self.clone(), part))).buffered(IN_FLIGHT);
        Ok(outcomes.try_collect::<Vec<_>>().await?.into_iter().flatten().collect())
    }

    async fn put_group(
        &self,
        items: Vec<(Bytes, Bytes)>,
        options: &PutOptions,
    ) -> Result<Vec<Result<PutOutcome, Error>>, Error> {
        const OPERATION: &str = "batch put";
        if let [(key, value)] = items.as_slice() {
            return Ok(vec![self.put(key, value.clone(), options).await.map(|done| done.outcome)]);
        }
        let writing = self.writing(items.iter().map(|(key, _)| &key[..]));
        let count = items.len();
        let (keys, values): (Vec<Bytes>, Vec<Bytes>) = items.into_iter().unzip();
        let put = |items: Option<Items>, repetition| {
            let (keys, values) = (&keys, &values);
            async move {
                let native = {
                    let (values, options, items) = (values.clone(), options.clone(), items.clone());
                    let message =
                        proto::PutItemsRequest { tenant: self.tenant(), keys: keys.clone(), ..Default::default() };
                    move |link: &Link, deadline| {
                        let options = Some(options.message(items.as_ref()));
                        let message = proto::PutItemsRequest { options, ..message.clone() };
                        led(link.put(OPERATION, message, &values, deadline)?)
                    }
                };
                let message = || {
                    let checksums = values.iter().map(|value| crc32fast::hash(value)).collect();
                    let (keys, values, options) = (keys.clone(), values.clone(), Some(options.message(items.as_ref())));
                    proto::BatchPutRequest { tenant: self.tenant(), keys, values, options, checksums }
                };
                let grpc = |mut attempt: Attempt| {
                    let request = attempt.request(message());
                    async move { led(attempt.stub.batch_put(request).await?.into_inner()) }
                };
                let reply = self.run_linked(repetition, native, grpc).await?;
                self.look_at_session(items.as_ref(), reply)
            }
        };
        let mut reply = match self.named(OPERATION, count, put).await {
            // Of these items; others of the batch have their own outcomes.
            Err(error) if is_cut_off(error.reason()) => {
                let refused = || Err(Error::Refused(Box::new(Refusal::of_item(error.reason().to_owned()))));
                return Ok(std::iter::repeat_with(refused).take(count).collect());
            }
            reply => reply?,
        };
        let did_nothing = reply.outcomes().all(|outcome| outcome == proto::PutOutcome::AlreadyExists);
        self.wrote(writing, reply.log_index, did_nothing);
        if reply.outcomes.len() != count {
            return Err(Error::Protocol { operation: OPERATION, why: "does not have one outcome per item" });
        }
        let mut reasons = std::mem::take(&mut reply.reasons);
        reasons.resize(count, String::new());
        let outcome = |(outcome, reason)| match outcome {
            proto::PutOutcome::Stored => Ok(PutOutcome::Stored),
            proto::PutOutcome::AlreadyExists => Ok(PutOutcome::AlreadyExists),
            proto::PutOutcome::Failed | proto::PutOutcome::Unspecified => {
                Err(Error::Refused(Box::new(Refusal::of_item(reason))))
            }
        };
        Ok(reply.outcomes().zip(reasons).map(outcome).collect())
    }

    /// Leaves a session that is over. If that was the answer to the first attempt, and to all that was not there, it is that
    /// of the whole message.
    fn look_at_session(
        &self,
        items: Option<&Items>,
        reply: proto::BatchPutReply,
    ) -> Result<proto::BatchPutReply, Error> {
        let Some(items) = items else { return Ok(reply) };
        let Some(reason) = reply.reasons.iter().find(|reason| session::is_over(reason)) else { return Ok(reply) };
        self.sessions().leave(items);
        if items.is_sent_once() && !reply.outcomes().any(|outcome| outcome == proto::PutOutcome::Stored) {
            return Err(Error::Refused(Box::new(Refusal::of_item(reason.clone()))));
        }
        Ok(reply)
    }

    /// Reads many objects; one outcome a key, in order. Values of one message share one buffer: copy what is kept.
    ///
    /// # Errors
    /// [`Error::Key`] for the first key that is none; what the server refuses for a whole message.
    pub async fn get_batch<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<BatchGot>, Error> {
        let keys = all_key_bytes(keys)?;
        let groups = keys.chunks(MESSAGE_KEYS).map(<[_]>::to_vec).collect();
        self.side_by_side(groups, |client, group| async move { client.get_group(group).await }).await
    }

    /// Reads each object into the start of its buffer; one outcome an item, in order, as of [`Client::get_into`], all of them by
    /// one deadline. With `fresh` none comes from an index that may be behind.
    ///
    /// When this has ended, no buffer is in use any more. Dropped before, reads that are under way still end theirs.
    ///
    /// # Panics
    /// If a read does, when all have ended.
    pub async fn get_batch_into<K, B>(
        &self,
        items: impl IntoIterator<Item = (K, B)>,
        fresh: bool,
    ) -> Vec<Result<Option<ObjectInfo>, Error>>
    where
        K: AsRef<[u8]>,
        B: AsMut<[u8]> + Send + 'static,
    {
        let deadline = tokio::time::Instant::now() + self.settings().deadline;
        let read = |(key, mut buffer): (K, B)| {
            let (client, key) = (self.clone(), key_bytes(key));
            let options = GetOptions { fresh, ..GetOptions::default() };
            let read = apart(async move { client.read_into(key?, options, buffer.as_mut(), deadline).await });
            AssertUnwindSafe(read).catch_unwind()
        };
        let reads: Vec<_> = items.into_iter().map(read).collect();
        let ended: Vec<_> = futures::stream::iter(reads).buffered(READS).collect().await;
        ended.into_iter().map(|read| read.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    }

    /// Takes what it can from the node's memory on this host, reads the rest where it was a moment ago, and asks for what is
    /// left.
    async fn get_group(&self, keys: Vec<Bytes>) -> Result<Vec<BatchGot>, Error> {
        let (mut got, mut copied) = (Vec::with_capacity(keys.len()), 0);
        for key in &keys {
            let object = self.get_local(key, &GetOptions::default()).await;
            copied += object.as_ref().map_or(0, |object| object.value.len());
            got.push(object.map(|object| Ok(Some(object)).into()));
            // Others on this thread have their turn.
            if copied > MESSAGE_BYTES {
                copied = 0;
                tokio::task::yield_now().await;
            }
        }
        // One for all ways to them.
        let deadline = Instant::now() + self.settings().deadline;
        let may_refer = may_block() && self.settings().native;
        if may_refer {
            let places = left(&got).filter_map(|position| Some((position, self.known_place(&keys[position])?)));
            let places = places.collect();
            self.get_batch_there(&keys, places, &mut got, deadline).await;
            let places = self.ask_for_left(&keys, &mut got, true, deadline).await?;
            self.get_batch_there(&keys, places, &mut got, deadline).await;
        }
        self.ask_for_left(&keys, &mut got, false, deadline).await?;
        // Nothing is left: one outcome came for each.
        Ok(got.into_iter().flatten().collect())
    }

    /// Asks for what is left; gives where those are that the node refers to.
    async fn ask_for_left(
        &self,
        keys: &[Bytes],
        got: &mut [Option<BatchGot>],
        may_refer: bool,
        deadline: Instant,
    ) -> Result<Vec<(usize, Elsewhere)>, Error> {
        let (mut places, asked) = (Vec::new(), Instant::now());
        let left: Vec<usize> = left(got).collect();
        if left.is_empty() {
            return Ok(places);
        }
        let asking = left.iter().map(|&position| keys[position].clone()).collect();
        let answers = self.ask_for_group(asking, may_refer, deadline).await?;
        for (position, answer) in left.into_iter().zip(answers) {
            match answer {
                Ok(item) => got[position] = Some(item),
                Err(elsewhere) => {
                    self.places().learn(&keys[position], &elsewhere, asked);
                    places.push((position, elsewhere));
                }
            }
        }
        Ok(places)
    }

    async fn ask_for_group(
        &self,
        keys: Vec<Bytes>,
        may_refer: bool,
        deadline: Instant,
    ) -> Result<Vec<Result<BatchGot, Elsewhere>>, Error> {
        let message = proto::BatchGetRequest {
            tenant: self.tenant(),
            keys: keys.clone(),
            seen_index: self.seen_index(),
            may_refer,
            ..Default::default()
        };
        let message = Arc::new(message);
        let native = {
            let message = Arc::clone(&message);
            move |link: &Link, deadline| link.get_batch(&message, deadline)
        };
        let replies: Vec<proto::BatchGetReply> = self
            .run_linked(self.begin_part(GET, Repeatable::Always, deadline.into()), native, |mut attempt| {
                let request = attempt.request((*message).clone());
                async move { Ok(attempt.stub.batch_get(request).await?.into_inner().try_collect().await?) }
            })
            .await?;
        let mut got = answers(&keys, replies)?;
        if !may_refer && got.iter().any(Result::is_err) {
            return Err(Error::Protocol { operation: GET, why: "refers to another node where that was not asked for" });
        }
        // What did not fit the message, or is better read alone.
        let mut reads = Vec::new();
        for (position, key) in
            keys.iter().enumerate().filter(|&(position, _)| got[position].as_ref().is_ok_and(is_too_large))
        {
            let message = self.get_message(key.clone(), GetOptions::default());
            let (client, deadline) = (self.clone(), deadline.into());
            reads
                .push(async move { (position, apart(async move { client.get_until(message, deadline).await }).await) });
        }
        let mut reads = futures::stream::iter(reads).buffer_unordered(READS);
        while let Some((position, read)) = reads.next().await {
            got[position] = Ok(read.into());
        }
        Ok(got)
    }
}

/// Whether it has to be read by itself.
pub(crate) fn is_too_large(item: &BatchGot) -> bool {
    matches!(item, BatchGot::Failed(error) if error.reason() == "TOO_LARGE")
}

impl From<Result<Option<Object>, Error>> for BatchGot {
    fn from(got: Result<Option<Object>, Error>) -> Self {
        match got {
            Ok(Some(object)) => Self::Found(BatchObject { value: object.value, tier: object.info.tier }),
            Ok(None) => Self::Missing,
            Err(error) => Self::Failed(error),
        }
    }
}

/// What has no outcome yet.
fn left(got: &[Option<BatchGot>]) -> impl Iterator<Item = usize> {
    got.iter().enumerate().filter(|(_, got)| got.is_none()).map(|(position, _)| position)
}

/// One outcome a key, or where it is, of replies that follow each other.
pub(crate) fn answers(
    keys: &[Bytes],
    replies: Vec<proto::BatchGetReply>,
) -> Result<Vec<Result<BatchGot, Elsewhere>>, Error> {
    let mut got = Vec::with_capacity(keys.len());
    for reply in replies {
        if reply.first as usize != got.len() {
            return Err(Error::Protocol { operation: GET, why: "leaves items out" });
        }
        take_items(keys, reply, &mut got)?;
    }
    if got.len() == keys.len() {
        Ok(got)
    } else {
        Err(Error::Protocol { operation: GET, why: "does not have one outcome per key" })
    }
}

/// Cuts the values of one reply out and verifies each.
fn take_items(
    keys: &[Bytes],
    mut reply: proto::BatchGetReply,
    got: &mut Vec<Result<BatchGot, Elsewhere>>,
) -> Result<(), Error> {
    let bad = |why| Error::Protocol { operation: GET, why };
    let count = reply.outcomes.len();
    let whole = [reply.lengths.len(), reply.checksums.len(), reply.tiers.len()].into_iter().all(|len| len == count);
    if !whole || count > keys.len() - got.len() {
        return Err(bad("has lists of different lengths"));
    }
    let places: Vec<Arc<[String]>> = reply.places.into_iter().map(|place| place.addresses.into()).collect();
    let mut elsewhere = reply.elsewhere.into_iter().zip(reply.versions);
    let mut values = std::mem::take(&mut reply.values);
    for index in 0..count {
        if reply.outcomes[index] == proto::GetOutcome::Elsewhere as i32 {
            let (place, version) = elsewhere.next().ok_or(bad("does not say where an item is"))?;
            let addresses = places.get(place as usize).cloned().ok_or(bad("does not say where an item is"))?;
            got.push(Err(Elsewhere { addresses, version }));
            continue;
        }
        let item = match proto::GetOutcome::try_from(reply.outcomes[index]) {
            Ok(proto::GetOutcome::Found) => {
                let length = usize::try_from(reply.lengths[index]).unwrap_or(usize::MAX);
                if length > values.len() {
                    return Err(bad("has fewer bytes than it announces"));
                }
                let value = values.split_to(length);
                let (expected, actual) = (reply.checksums[index], crc32fast::hash(&value));
                let tier = match reply.tiers[index] {
                    1 => StoredIn::Dram,
                    2 => StoredIn::Nvme,
                    _ => StoredIn::Other,
                };
                if actual == expected {
                    BatchGot::Found(BatchObject { value, tier })
                } else {
                    let key = shown(&keys[got.len()]);
                    BatchGot::Failed(Error::ChecksumMismatch { key, expected, actual })
                }
            }
            Ok(proto::GetOutcome::Missing) => BatchGot::Missing,
            Ok(proto::GetOutcome::Unavailable) => BatchGot::Unavailable,
            Ok(proto::GetOutcome::TooLarge) => refused("TOO_LARGE"),
            Ok(_) | Err(_) => refused("INTERNAL"),
        };
        got.push(Ok(item));
    }
    if values.is_empty() { Ok(()) } else { Err(bad("has more bytes than it announces")) }
}

fn refused(reason: &str) -> BatchGot {
    BatchGot::Failed(Error::Refused(Box::new(Refusal::of_item(reason.to_owned()))))
}

/// Whether all values lie in one memory that a node can be lent; those of no bytes lie anywhere.
fn are_lendable(items: &[(Bytes, Bytes)]) -> bool {
    let mut values = items.iter().map(|(_, value)| value).filter(|value| !value.is_empty());
    let memory = values.clone().next().and_then(|value| Lendable::of(value));
    memory.is_some_and(|memory| values.all(|value| memory.offset_of(value).is_some()))
}

/// Cuts `items` into runs of at most `most` bytes and [`MESSAGE_KEYS`]; an item that is larger is a run of its own.
fn groups<T>(items: &[T], most: usize, size: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    let mut rest = items;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |item: &&T| {
            bytes += size(item);
            bytes <= most
        };
        let count = rest.iter().take(MESSAGE_KEYS).take_while(fits).count().max(1).min(rest.len());
        let (group, after) = rest.split_at(count);
        rest = after;
        (!group.is_empty()).then_some(group)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_bounded_and_lose_nothing() {
        let sizes = [1 << 20, 1 << 20, 1 << 20, 1, 5 << 20, 0, 0];
        let cut: Vec<&[usize]> = groups(&sizes, MESSAGE_BYTES, |&size| size).collect();
        assert_eq!(cut, [&sizes[..3], &sizes[3..4], &sizes[4..5], &sizes[5..]]);
        let many = vec![0_usize; 2500];
        assert_eq!(groups(&many, MESSAGE_BYTES, |&size| size).map(<[_]>::len).collect::<Vec<_>>(), [1000, 1000, 500]);
        assert_eq!(groups(&[], MESSAGE_BYTES, |&size: &usize| size).count(), 0);
    }

    fn reply(values: &str, lengths: Vec<u64>, checksums: Vec<u32>) -> proto::BatchGetReply {
        let outcomes = vec![proto::GetOutcome::Found as i32; lengths.len()];
        let tiers = vec![1; lengths.len()].into();
        let values = values.to_owned().into();
        proto::BatchGetReply { outcomes, lengths, checksums, values, tiers, ..Default::default() }
    }

    #[test]
    fn a_damaged_item_does_not_spoil_the_others() {
        let keys = [Bytes::from("a"), Bytes::from("b")];
        let mut got = Vec::new();
        let good = crc32fast::hash(b"yes");
        take_items(&keys, reply("yesno", vec![3, 2], vec![good, 7]), &mut got).expect("well-formed");
        let found = |object: &BatchObject| object.value == "yes" && object.tier == StoredIn::Dram;
        assert!(matches!(&got[0], Ok(BatchGot::Found(object)) if found(object)));
        assert!(matches!(&got[1], Ok(BatchGot::Failed(Error::ChecksumMismatch { .. }))));
    }

    #[test]
    fn items_that_are_elsewhere_share_their_places() {
        let keys = ["a", "b", "c"].map(Bytes::from);
        let outcomes = vec![proto::GetOutcome::Elsewhere as i32; 3];
        let place = |address: &str| proto::Place { addresses: vec![address.to_owned()] };
        let reply = proto::BatchGetReply {
            outcomes,
            lengths: vec![0; 3],
            checksums: vec![0; 3],
            tiers: vec![0; 3].into(),
            places: vec![place("x"), place("y")],
            elsewhere: vec![1, 0, 1],
            versions: ["1", "2", "3"].map(str::to_owned).to_vec(),
            ..Default::default()
        };
        let got = answers(&keys, vec![reply.clone()]).expect("well-formed");
        let places: Vec<(&str, &str)> = got
            .iter()
            .filter_map(|item| item.as_ref().err())
            .map(|elsewhere| (&*elsewhere.addresses[0], &*elsewhere.version))
            .collect();
        assert_eq!(places, [("y", "1"), ("x", "2"), ("y", "3")]);
        let wrong = [
            proto::BatchGetReply { elsewhere: vec![0, 1], ..reply.clone() },
            proto::BatchGetReply { elsewhere: vec![0, 1, 2], ..reply },
        ];
        for reply in wrong {
            assert!(matches!(answers(&keys, vec![reply]), Err(Error::Protocol { .. })));
        }
    }

    #[test]
    fn malformed_replies_are_errors() {
        let keys = [Bytes::from("a")];
        let sum = crc32fast::hash(b"yes");
        let wrong = [
            reply("yes", vec![4], vec![sum]),
            reply("yes!", vec![3], vec![sum]),
            reply("yes", vec![u64::MAX], vec![sum]),
            reply("yes", vec![3], vec![]),
            reply("yes", vec![3, 0], vec![sum, 0]),
        ];
        for reply in wrong {
            assert!(matches!(take_items(&keys, reply, &mut Vec::new()), Err(Error::Protocol { .. })));
        }
    }
}
