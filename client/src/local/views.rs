//! Views: objects read where they lie in the segment of the node on this host, which keeps them there meanwhile.

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tidepool_metadata::directory::{Found, PAGE_BYTES};
use tidepool_transfer::{KeptBytes, StoreSegment};

use super::{LocalReads, MOST_BYTES, Segment, lock};
use crate::call::{Client, all_key_bytes, key_bytes, shown};
use crate::error::{Error, Refusal};
use crate::native::blocking;
use crate::types::{BatchGot, GetOptions, StoredIn};

/// Views of one client at a time: each takes a descriptor.
const MOST_VIEWS: usize = 256;
/// Of the segment's bytes, one in so many may be viewed by one client.
const SHARE_OF_CLIENT: u64 = 8;
/// No view is given while one page in so many would be free if it were not kept for views, whoever's.
const SHARE_OF_ALL: u64 = 4;
/// Objects that are more scattered are copied.
const MOST_PIECES: usize = 1024;

/// An object's bytes, as they were when it was asked for, for as long as this lives: whatever becomes of the object, and of the node.
#[derive(Debug)]
pub struct ObjectView {
    /// Where it was found.
    pub tier: StoredIn,
    bytes: Source,
}

#[derive(Debug)]
enum Source {
    Kept { bytes: KeptBytes, _room: Room },
    Copied(Bytes),
}

impl ObjectView {
    /// Whether the bytes are a copy: the object did not lie in the DRAM of a node on this host.
    #[must_use]
    pub fn is_copied(&self) -> bool {
        matches!(self.bytes, Source::Copied(_))
    }
}

impl Deref for ObjectView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Source::Kept { bytes, .. } => bytes,
            Source::Copied(bytes) => bytes,
        }
    }
}

/// Views that a client has.
#[derive(Debug, Default)]
pub(super) struct Open {
    views: usize,
    bytes: u64,
}

/// What one view takes of the bounds.
#[derive(Debug)]
struct Room {
    of: Arc<Mutex<Open>>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut open = lock(&self.of);
        open.views -= 1;
        open.bytes -= self.bytes;
    }
}

impl LocalReads {
    fn make_room(&self, key: &[u8], bytes: u64, segment: &Segment) -> Result<Room, Error> {
        let refused = |bound| Err(Error::View { key: shown(key), bound });
        let pages = u64::from(segment.layout.data_pages);
        let mut open = lock(&self.open);
        if open.views >= MOST_VIEWS {
            return refused("this client has 256 open");
        }
        if open.bytes.saturating_add(bytes) > pages * PAGE_BYTES as u64 / SHARE_OF_CLIENT {
            return refused("this client would keep more than an eighth of the node's DRAM");
        }
        if segment.reader().kept_pages() > pages / SHARE_OF_ALL {
            return refused("views keep a quarter of the node's DRAM that would be free without them");
        }
        open.views += 1;
        open.bytes += bytes;
        Ok(Room { of: Arc::clone(&self.open), bytes })
    }
}

impl Client {
    /// The object where it lies, without a copy, if a node on this host has it in DRAM, and otherwise a copy; `None` if there is none.
    /// It is verified once, now. While the view lives, the node gives the memory to nobody else, even if the object is removed, replaced or
    /// evicted.
    ///
    /// # Errors
    /// As [`Client::get`]; [`Error::View`] if too much is viewed already.
    pub async fn view(&self, key: impl AsRef<[u8]>) -> Result<Option<ObjectView>, Error> {
        let key = key_bytes(key)?;
        if let Some(segment) = self.segment_for(&GetOptions::default()).await
            && let Some(view) = self.view_local(&segment, &key).await?
        {
            return Ok(Some(view));
        }
        let object = self.get_with(&key, GetOptions::default()).await?;
        Ok(object.map(|object| copied(object.info.tier, object.value)))
    }

    /// As [`Client::view`] for many; one outcome a key, in order. What has to be copied is asked for together.
    ///
    /// # Errors
    /// As [`Client::get_batch`], for all of them.
    pub async fn views<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<ObjectView>, Error>>, Error> {
        let keys = all_key_bytes(keys)?;
        let segment = self.segment_for(&GetOptions::default()).await;
        let (mut views, mut missing) = (Vec::with_capacity(keys.len()), Vec::new());
        for (place, key) in keys.iter().enumerate() {
            let view = match &segment {
                Some(segment) => self.view_local(segment, key).await,
                None => Ok(None),
            };
            if matches!(view, Ok(None)) {
                missing.push(place);
            }
            views.push(view);
        }
        let asked: Vec<&Bytes> = missing.iter().map(|&place| &keys[place]).collect();
        let got = if asked.is_empty() { Vec::new() } else { self.get_batch(&asked).await? };
        for (place, got) in missing.into_iter().zip(got) {
            views[place] = match got {
                // Values of a batch share one buffer, which a view would keep whole.
                BatchGot::Found(found) => Ok(Some(copied(found.tier, Bytes::copy_from_slice(&found.value)))),
                BatchGot::Missing => Ok(None),
                BatchGot::Unavailable => Err(Error::Refused(Box::new(Refusal::of_item("RECOVERING".into())))),
                BatchGot::Failed(error) => Err(error),
            };
        }
        Ok(views)
    }

    async fn view_local(&self, segment: &Arc<Segment>, key: &Bytes) -> Result<Option<ObjectView>, Error> {
        let Some(local) = self.local() else { return Ok(None) };
        let found = segment.find(local.tenant, key, self.writes().least_index(key));
        let Some(slices) = local.unless_in_doubt(found) else { return Ok(None) };
        let room = local.make_room(key, slices[0].object_length, segment)?;
        let kept = match segment.keep(&slices) {
            Ok(Some(kept)) => kept,
            // Removed or replaced a moment ago.
            Ok(None) => return Ok(None),
            Err(error) => {
                tracing::debug!(%error, key = shown(key), "the object is copied");
                return Ok(None);
            }
        };
        let length = slices[0].object_length;
        let verify = move || is_whole(&kept, &slices).then_some(kept);
        let verified = if length > MOST_BYTES { blocking(verify).await } else { verify() };
        let Some(bytes) = verified else { return Ok(None) };
        self.note_local_read(local, key);
        Ok(Some(ObjectView { tier: StoredIn::Dram, bytes: Source::Kept { bytes, _room: room } }))
    }
}

impl Segment {
    /// Keeps the slices' bytes where they are. `None` if one of them has gone.
    fn keep(&self, slices: &[Found]) -> std::io::Result<Option<KeptBytes>> {
        let mut pieces = Vec::new();
        for slice in slices {
            let mut left = u64::from(slice.slice_length);
            for extent in slice.extents.as_slice() {
                let bytes = left.min(u64::from(extent.pages) * PAGE_BYTES as u64);
                if bytes > 0 {
                    pieces.push((self.layout.data_offset + u64::from(extent.page) * PAGE_BYTES as u64, bytes));
                }
                left -= bytes;
            }
        }
        if pieces.len() > MOST_PIECES {
            return Err(std::io::Error::other("it lies too scattered"));
        }
        let reader = self.reader();
        StoreSegment::keep(&self.store, &pieces, || !slices.iter().all(|slice| reader.is_unchanged(slice)))
    }
}

fn copied(tier: StoredIn, value: Bytes) -> ObjectView {
    ObjectView { tier, bytes: Source::Copied(value) }
}

/// Whether the bytes are those of the slices.
fn is_whole(mut bytes: &[u8], slices: &[Found]) -> bool {
    slices.iter().all(|slice| {
        let Some((now, rest)) = bytes.split_at_checked(slice.slice_length as usize) else { return false };
        bytes = rest;
        crc32fast::hash(now) == slice.checksum
    })
}

#[cfg(test)]
mod tests {
    use tidepool_metadata::TenantId;

    use super::super::tests::Node;
    use super::*;

    const PAGE: usize = PAGE_BYTES;

    fn found(segment: &Segment) -> Vec<Found> {
        let found = segment.find(TenantId::DEFAULT, &Bytes::from_static(b"k"), 0);
        found.expect("no doubt").expect("it was put")
    }

    #[test]
    fn slices_are_seen_one_behind_the_other() {
        let mut node = Node::with_pages(16);
        for (pages, length) in [(&[3][..], 100), (&[4, 5, 6], 3 * PAGE), (&[9, 2, 14], 2 * PAGE + 17), (&[], 0)] {
            let value: Vec<u8> = (0..length).map(|place| (place % 251 + place / PAGE) as u8).collect();
            let slots = node.put_bytes(b"k", &value, pages);
            let segment = node.segment();
            if !slots.is_empty() {
                let slices = found(&segment);
                let kept = segment.keep(&slices).expect("kept").expect("nobody has changed it");
                assert_eq!(kept[..], value);
                assert!(is_whole(&kept, &slices));
                let mut damaged = kept.to_vec();
                damaged[length - 1] ^= 1;
                assert!(!is_whole(&damaged, &slices) && !is_whole(&kept[1..], &slices));
            }
            node.retire(&slots);
        }
    }

    #[test]
    fn what_has_gone_before_it_is_kept_is_not_seen() {
        let mut node = Node::with_pages(16);
        let slots = node.put_bytes(b"k", &vec![7; 2 * PAGE], &[3, 9]);
        let (segment, slices) = (node.segment(), found(&node.segment()));
        node.retire(&slots[1..]);
        node.put_bytes(b"other", &[8; 5], &[9]);
        assert!(segment.keep(&slices).expect("locked").is_none());
    }

    #[test]
    fn views_are_bounded() {
        let node = Node::with_pages(64);
        let local = LocalReads::new("segment.sock".into(), TenantId::DEFAULT, None);
        let segment = node.segment();
        let room = |bytes| local.make_room(b"k", bytes, &segment);
        let most = (64 / SHARE_OF_CLIENT) * PAGE as u64;
        let rooms = (room(most).expect("room"), room(0).expect("room"));
        let refused = room(1).expect_err("more than this client may");
        assert_eq!((refused.reason(), refused.kind()), ("TOO_MANY_VIEWS", crate::ErrorKind::Exhausted));
        drop(rooms);
        let many: Vec<_> = (0..MOST_VIEWS).map(|_| room(1).expect("room")).collect();
        room(1).expect_err("a descriptor each");
        drop(many);
        node.set_kept_pages(17);
        room(1).expect_err("the node is short of memory for views");
        node.set_kept_pages(16);
        room(most).expect("room");
    }
}
