//! Large objects laid over several nodes: parts that are objects of their own, and a list of them under the object's key.
//!
//! - A put stores the parts first, each at another node in turn, and the list last: whoever finds a list finds its parts. The parts
//!   of each put have names of their own, so no read mixes two puts.
//! - List and parts are one group: a lease or a pin of the key protects all of them, and with the last copy of one that is evicted
//!   the others go.
//! - A client that dies in a put leaves parts that no list names, as one that dies in a removal or a replacement may: nobody reads
//!   them, so they are evicted before what is read.
//!
//! The store knows nothing of it: for [`Client::get`], `stat`, `ls` and other clients a list is an object like any other. Why
//! it is so: `docs/src/decisions/striping.md`.

mod layout;

use std::hash::{BuildHasher as _, RandomState};
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use futures::{StreamExt as _, TryStreamExt as _};
use tidepool_metadata::ErrorKind;

use crate::apart::apart;
use crate::call::{Client, key_bytes, shown};
use crate::error::Error;
use crate::types::{Existence, GetOptions, Object, PutDone, PutOptions, PutOutcome, RemoveOutcome};
use layout::{Layout, MOST_PARTS};

/// Parts of one object that are put or read at a time, for each node and in all.
const AT_A_TIME: (usize, usize) = (2, 16);
/// How often a list that is replaced while its parts are read is read again.
const LOOKUPS: usize = 4;

/// How a value is laid over nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripes {
    /// Over how many; over fewer if fewer take objects. 0: over all that do.
    pub nodes: usize,
    /// Bytes of a part, the last one perhaps shorter; at least 1. Parts of longer values are larger, so that there are at most
    /// 1,024. Default 4 MiB.
    pub part_bytes: u64,
}

impl Default for Stripes {
    fn default() -> Self {
        Self { nodes: 0, part_bytes: 4 << 20 }
    }
}

impl Client {
    /// Stores `value` in parts on several nodes, for [`Client::get_striped`]. `options` hold for each part: with two replicas each has
    /// another copy on another node. May be repeated by the caller.
    ///
    /// # Errors
    /// [`Error::Key`]; [`Error::Setting`] if `options` name a group, which striped objects have of their own, or parts have no bytes;
    /// those of [`Client::put`]. Nothing is stored then, unless the deadline passed while the list was stored: then it may be.
    pub async fn put_striped(
        &self,
        key: impl AsRef<[u8]>,
        value: Bytes,
        options: &PutOptions,
        stripes: Stripes,
    ) -> Result<PutDone, Error> {
        let key = key_bytes(key)?;
        if !options.group.is_empty() {
            let (name, value) = ("group", options.group.clone());
            return Err(Error::Setting { name, value, bounds: "a striped object is a group of its own" });
        }
        if stripes.part_bytes == 0 {
            return Err(Error::Setting { name: "part_bytes", value: "0".into(), bounds: "give at least 1" });
        }
        // Else all parts would be put for nothing.
        if !options.upsert && self.exists(&key).await? == Existence::Present {
            return Ok(PutDone { outcome: PutOutcome::AlreadyExists, log_index: self.seen_index() });
        }
        // If it can't be read, its parts are left to be evicted.
        let replaced = if options.upsert { self.layout(&key, true).await.ok().flatten() } else { None };
        let nodes = self.takers(stripes.nodes).await?;
        let length = value.len() as u64;
        let part_bytes = stripes.part_bytes.max(length.div_ceil(MOST_PARTS));
        let id = u128::from(random()) << 64 | u128::from(random());
        let count = usize::try_from(length.div_ceil(part_bytes)).unwrap_or(usize::MAX);
        let mut layout = Layout {
            id,
            length,
            part_bytes,
            nodes: u32::try_from(nodes.len()).unwrap_or(u32::MAX),
            checksums: vec![0; count],
        };
        let of_parts = PutOptions { group: layout.group(), upsert: false, pin: false, ..options.clone() };
        if let Err(error) = self.put_parts(&mut layout, &value, &of_parts, &nodes).await {
            self.discard(&layout).await;
            return Err(error);
        }
        let of_list = PutOptions { group: layout.group(), ..options.clone() };
        let done = self.put(&key, layout.encode(), &of_list).await;
        match &done {
            Ok(PutDone { outcome: PutOutcome::Stored, .. }) => {
                if let Some(Ok(replaced)) = replaced {
                    self.discard(&replaced).await;
                }
            }
            Ok(_) => self.discard(&layout).await,
            // It may be stored: then it needs them.
            Err(error) if matches!(error.kind(), ErrorKind::Deadline | ErrorKind::Unavailable) => {}
            Err(_) => self.discard(&layout).await,
        }
        done
    }

    /// Deals the parts out, each to the next node, and sums them up.
    async fn put_parts(
        &self,
        layout: &mut Layout,
        value: &Bytes,
        options: &PutOptions,
        nodes: &[Self],
    ) -> Result<(), Error> {
        let puts = (0..layout.checksums.len()).map(|part| {
            let Range { start, end } = layout.bytes_of(part);
            // They are bounded by the value's length, which is in memory.
            #[expect(clippy::cast_possible_truncation, reason = "within a value in memory")]
            let bytes = value.slice(start as usize..end as usize);
            let (key, options) = (layout.part_key(part), options.clone());
            let nodes: Vec<Self> = (0..nodes.len()).map(|turn| nodes[(part + turn) % nodes.len()].clone()).collect();
            async move {
                let checksum = crc32fast::hash(&bytes);
                apart(put_part(nodes, key, bytes, options)).await.map(|log_index| (part, checksum, log_index))
            }
        });
        let puts: Vec<_> = puts.collect();
        let mut puts = futures::stream::iter(puts).buffer_unordered(at_a_time(nodes.len()));
        while let Some((part, checksum, log_index)) = puts.try_next().await? {
            layout.checksums[part] = checksum;
            self.saw(log_index);
        }
        Ok(())
    }

    /// The striped object of that key, or `None` if there is none, or one of its parts is lost. Its parts are read from their
    /// nodes side by side.
    ///
    /// # Errors
    /// [`Error::NotStriped`]; those of [`Client::get`].
    pub async fn get_striped(&self, key: impl AsRef<[u8]>) -> Result<Option<Bytes>, Error> {
        self.read_striped(key_bytes(key)?, 0, None).await
    }

    /// Bytes of the striped object from `offset` on, `length` of them or all (`None`): only from the parts that have them.
    ///
    /// # Errors
    /// As [`Client::get_striped`]; [`Error::Buffer`] if the range reaches past the end.
    pub async fn get_striped_range(
        &self,
        key: impl AsRef<[u8]>,
        offset: u64,
        length: Option<u64>,
    ) -> Result<Option<Bytes>, Error> {
        self.read_striped(key_bytes(key)?, offset, length).await
    }

    async fn read_striped(&self, key: Bytes, offset: u64, length: Option<u64>) -> Result<Option<Bytes>, Error> {
        let mut tried = None;
        for lookup in 0..LOOKUPS {
            let Some(layout) = self.layout(&key, lookup > 0).await? else { return Ok(None) };
            let layout = layout?;
            let end = length.map_or(Some(layout.length), |length| offset.checked_add(length));
            let Some(end) = end.filter(|&end| offset <= end && end <= layout.length) else {
                let buffer = length.unwrap_or(0);
                return Err(Error::Buffer { key: shown(&key), length: layout.length, buffer });
            };
            if let Some(value) = self.get_parts(&layout, offset..end).await? {
                return Ok(Some(value));
            }
            // Replaced while it was read, or it has lost a part.
            if tried.replace(layout.id) == Some(layout.id) {
                return Ok(None);
            }
        }
        Err(Error::Protocol { operation: "get", why: "named parts of an object that is replaced all the time" })
    }

    /// The bytes of that range; `None` if a part is missing.
    async fn get_parts(&self, layout: &Layout, range: Range<u64>) -> Result<Option<Bytes>, Error> {
        let reads: Vec<_> = layout.parts_of(&range).map(|part| self.get_part(layout, part, &range)).collect();
        let nodes = usize::try_from(layout.nodes).unwrap_or(usize::MAX);
        let mut reads = futures::stream::iter(reads).buffered(at_a_time(nodes));
        let mut value = BytesMut::new();
        while let Some(piece) = reads.next().await {
            match piece? {
                Some(piece) if piece.len() as u64 == range.end - range.start => return Ok(Some(piece)),
                Some(piece) => value.extend_from_slice(&piece),
                None => return Ok(None),
            }
        }
        Ok(Some(value.freeze()))
    }

    /// What a part has of that range.
    fn get_part(
        &self,
        layout: &Layout,
        part: usize,
        range: &Range<u64>,
    ) -> impl Future<Output = Result<Option<Bytes>, Error>> + use<> {
        let has = layout.bytes_of(part);
        let wanted = range.start.max(has.start)..range.end.min(has.end);
        let is_whole = wanted == has;
        let length = wanted.end - wanted.start;
        let options = GetOptions {
            offset: wanted.start - has.start,
            length: (!is_whole).then_some(length),
            ..GetOptions::default()
        };
        let (client, key, expected) = (self.clone(), layout.part_key(part), layout.checksums[part]);
        apart(async move {
            let Some(Object { info, value }) = client.get_with(&key, options).await? else { return Ok(None) };
            let actual = if is_whole { crc32fast::hash(&value) } else { expected };
            if info.length != has.end - has.start || value.len() as u64 != length || actual != expected {
                return Err(Error::ChecksumMismatch { key, expected, actual });
            }
            Ok(Some(value))
        })
    }

    /// Removes a striped object: invisible at once, then its parts. `force`: although it is pinned.
    ///
    /// # Errors
    /// [`Error::NotStriped`]; those of [`Client::remove_many`].
    pub async fn remove_striped(&self, key: impl AsRef<[u8]>, force: bool) -> Result<RemoveOutcome, Error> {
        let key = key_bytes(key)?;
        let Some(layout) = self.layout(&key, true).await? else { return Ok(RemoveOutcome::Missing) };
        let layout = layout?;
        let outcomes = self.remove_many(&[&key], force).await?;
        let outcome = outcomes.first().copied().unwrap_or(RemoveOutcome::Failed);
        if outcome == RemoveOutcome::Removed {
            self.discard(&layout).await;
        }
        Ok(outcome)
    }

    /// The list of a key; `None` if there is no object. The inner error: it is another one.
    async fn layout(&self, key: &Bytes, fresh: bool) -> Result<Option<Result<Layout, Error>>, Error> {
        let object = self.get_with(key, GetOptions { fresh, ..GetOptions::default() }).await?;
        let decoded = |value: &[u8]| Layout::decode(value).ok_or_else(|| Error::NotStriped { key: shown(key) });
        Ok(object.map(|object| decoded(&object.value)))
    }

    /// Lets go of parts that no list names any more; what can't be removed is evicted in time.
    async fn discard(&self, layout: &Layout) {
        if let Err(error) = self.remove_many(&layout.part_keys(), true).await {
            tracing::debug!(%error, group = layout.group(), "parts are left to be evicted");
        }
    }

    /// Clients of `count` nodes that take objects, each of one node.
    async fn takers(&self, count: usize) -> Result<Vec<Self>, Error> {
        let mut addresses = self.server_info().await?.takers;
        if count > 0 {
            addresses.truncate(count);
        }
        // A node of an older version names none.
        if addresses.is_empty() {
            return Ok(vec![self.clone()]);
        }
        addresses.iter().map(|address| self.of_node(address)).collect()
    }
}

/// Puts a part to the first of `nodes` that takes it; answers the log index.
async fn put_part(nodes: Vec<Client>, key: String, bytes: Bytes, options: PutOptions) -> Result<u64, Error> {
    let mut last = None;
    for node in nodes {
        match node.put(&key, bytes.clone(), &options).await {
            // That it exists is this put's own doing: an attempt whose answer was lost.
            Ok(done) => return Ok(done.log_index),
            Err(error) if error.kind() == ErrorKind::Invalid => return Err(error),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or(Error::Protocol { operation: "put", why: "names no node" }))
}

fn at_a_time(nodes: usize) -> usize {
    let (each, all) = AT_A_TIME;
    nodes.saturating_mul(each).clamp(each, all)
}

/// From the system's randomness, by which this is seeded.
fn random() -> u64 {
    RandomState::new().hash_one("stripes")
}
