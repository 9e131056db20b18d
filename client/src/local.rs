//! Reads from the DRAM segment of the node on this host, without a call: look up, copy, look again, verify.
//!
//! The directory and its rules are in `tidepool_metadata::directory`. On any doubt the answer is "ask the node", so
//! nothing here is an error. Freshness is that of an index: an object may be found for up to 5 s after somebody else
//! replaced or removed it; what this client has written itself is read only from entries that were committed no earlier. Reads are told to the
//! node in batches, because eviction goes by them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_metadata::directory::{Doubt, Found, Layout, Lookup, PAGE_BYTES, Reader, SliceName};
use tidepool_metadata::{NodeId, SliceHeader, TenantId, checksum, proto};
use tidepool_transfer::{Memory, StoreSegment, map_segment};

pub use self::views::ObjectView;

use crate::call::Client;
use crate::retry::Repeatable;
use crate::types::{GetOptions, Object, ObjectInfo, StoredIn};

/// How long a segment that could not be opened is left alone.
const REOPEN_AFTER: Duration = Duration::from_secs(1);
/// The node is told of so many reads at a time, or of fewer when the first of them is this old.
const TOLD_AT_ONCE: usize = 256;
const TOLD_AFTER: Duration = Duration::from_secs(1);
/// Copied and summed up at a time, so that the sum reads from the cache.
const STEP_BYTES: usize = 64 << 10;
/// Larger objects are asked for: copying them would keep a thread of the caller's runtime busy for long.
const MOST_BYTES: u64 = 64 << 20;
/// Reads beyond these, while the node has not answered to those before, are not told.
const MOST_UNTOLD: usize = 1024;

/// The segment of the node on this host, as far as it can be had.
pub(crate) struct LocalReads {
    socket: PathBuf,
    segment: RwLock<Option<Arc<Segment>>>,
    tenant: TenantId,
    /// Whose segment it must be. A path says that only where the caller named it: on another file system, that of a container,
    /// another node may have it.
    node: Option<NodeId>,
    tried: Mutex<Option<Instant>>,
    hits: AtomicU64,
    untold: Mutex<Untold>,
    open: Arc<Mutex<views::Open>>,
}

#[derive(Default)]
struct Untold {
    keys: Vec<Bytes>,
    /// Since the first of them.
    since: Option<Instant>,
    /// The node is being told of others: one call at a time.
    is_telling: bool,
}

impl LocalReads {
    /// Reads by the segment that is handed out at `socket`, whenever it is.
    pub(crate) fn new(socket: PathBuf, tenant: TenantId, node: Option<NodeId>) -> Self {
        let (segment, tried, untold) = (RwLock::default(), Mutex::default(), Mutex::default());
        Self { socket, tenant, node, segment, tried, hits: AtomicU64::new(0), untold, open: Arc::default() }
    }

    /// How many objects were read.
    pub(crate) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    fn segment(&self) -> Option<Arc<Segment>> {
        self.segment.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Opens the segment if there is none and the last try is long enough ago.
    async fn open(self: &Arc<Self>) -> Option<Arc<Segment>> {
        {
            let mut tried = lock(&self.tried);
            if tried.is_some_and(|tried| tried.elapsed() < REOPEN_AFTER) {
                return None;
            }
            *tried = Some(Instant::now());
        }
        let this = Arc::clone(self);
        let opened = tokio::task::spawn_blocking(move || Segment::open(&this.socket, this.node)).await.ok()?;
        match opened {
            Ok(segment) => {
                let segment = Arc::new(segment);
                *self.segment.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&segment));
                Some(segment)
            }
            Err(error) => {
                tracing::debug!(%error, socket = %self.socket.display(), "reads go to the node, not to its segment");
                None
            }
        }
    }

    /// Lets go of the segment, to be opened again.
    fn close(&self) {
        *self.segment.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// What was found, unless it was not or nothing can be said. Lets go of a segment that is written no more.
    fn unless_in_doubt<T>(&self, found: Result<Option<T>, Doubt>) -> Option<T> {
        match found {
            Ok(found) => found,
            // Another file is in its place, or may be: a node that starts anew with another size leaves this one behind.
            Err(Doubt::Retired | Doubt::Expired) => {
                self.close();
                None
            }
            Err(Doubt::Recovering | Doubt::Busy) => None,
        }
    }

    /// Notes a read; gives those that the node is to be told of now.
    fn note(&self, key: &Bytes) -> Option<Vec<Bytes>> {
        self.hits.fetch_add(1, Ordering::Relaxed);
        let mut untold = lock(&self.untold);
        if untold.keys.len() < MOST_UNTOLD {
            untold.keys.push(key.clone());
        }
        let since = *untold.since.get_or_insert_with(Instant::now);
        if untold.is_telling || untold.keys.len() < TOLD_AT_ONCE && since.elapsed() < TOLD_AFTER {
            return None;
        }
        (untold.since, untold.is_telling) = (None, true);
        Some(std::mem::take(&mut untold.keys))
    }

    /// Lets the node be told of more.
    fn told(&self) {
        lock(&self.untold).is_telling = false;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    /// The object, if the segment on this host has it and nothing is in doubt.
    pub(crate) async fn get_local(&self, key: &Bytes, options: &GetOptions) -> Option<Object> {
        let segment = self.segment_for(options).await?;
        let mut value = Vec::new();
        let info = self.read_local(&segment, key, &mut value)?;
        Some(Object { info, value: value.into() })
    }

    /// The same, into the start of `buffer`; what that has otherwise means nothing.
    pub(crate) async fn read_local_into(
        &self,
        key: &Bytes,
        options: &GetOptions,
        buffer: &mut [u8],
    ) -> Option<ObjectInfo> {
        let segment = self.segment_for(options).await?;
        self.read_local(&segment, key, &mut Filling { buffer, filled: 0 })
    }

    async fn segment_for(&self, options: &GetOptions) -> Option<Arc<Segment>> {
        let wants_whole = options.offset == 0 && options.length.is_none();
        if options.fresh || !options.version.is_empty() || !wants_whole || !self.settings().local_reads {
            return None;
        }
        if self.local().is_none() {
            // The node says whether it is on this host.
            self.link_of(&self.attempt(tokio::time::Instant::now())).await;
        }
        let local = self.local()?;
        match local.segment() {
            Some(segment) => Some(segment),
            None => local.open().await,
        }
    }

    fn read_local(&self, segment: &Segment, key: &Bytes, target: &mut impl Target) -> Option<ObjectInfo> {
        let local = self.local()?;
        let read = segment.read(local.tenant, key, self.writes().least_index(key), target);
        let info = local.unless_in_doubt(read)?;
        self.note_local_read(local, key);
        Some(info)
    }

    fn note_local_read(&self, local: &LocalReads, key: &Bytes) {
        if let Some(keys) = local.note(key) {
            self.tell_local_reads(keys);
        }
    }

    /// Tells the node behind the caller's back; if it does not hear, eviction knows a little less.
    fn tell_local_reads(&self, keys: Vec<Bytes>) {
        let client = self.clone();
        tokio::spawn(async move {
            let message = proto::NoteLocalReadsRequest { tenant: client.tenant(), keys };
            let repetition = client.begin("note local reads", Repeatable::IfNotDone);
            let mut attempt = client.attempt(repetition.deadline);
            let request = attempt.request(message);
            let told = async { Ok(attempt.stub.note_local_reads(request).await?) };
            if let Err(error) = repetition.within_deadline(told).await {
                tracing::debug!(%error, "the node was not told of local reads");
            }
            if let Some(local) = client.local() {
                local.told();
            }
        });
    }
}

/// A mapped segment.
struct Segment {
    store: StoreSegment,
    layout: Layout,
}

impl Segment {
    fn open(socket: &std::path::Path, node: Option<NodeId>) -> std::io::Result<Self> {
        let store = map_segment(socket)?;
        let layout = *Reader::new(store.memory().words(usize::MAX)).map_err(std::io::Error::other)?.layout();
        if store.memory().len() < layout.file_bytes {
            return Err(std::io::Error::other("the segment is shorter than its layout says"));
        }
        if node.is_some_and(|node| node != layout.node) {
            return Err(std::io::Error::other("the segment is another node's"));
        }
        Ok(Self { store, layout })
    }

    fn reader(&self) -> Reader<'_, AtomicU64> {
        Reader::reopen(self.store.memory().words(self.layout.words()), self.layout)
    }

    fn look_up(&self, tenant: TenantId, key: &Bytes, slice_index: u32) -> Result<Option<Found>, Doubt> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let now = now.tv_sec.unsigned_abs().saturating_mul(1_000_000_000).saturating_add(now.tv_nsec.unsigned_abs());
        match self.reader().lookup(SliceName { tenant, key, slice_index }, now) {
            Lookup::Found(found) => Ok(Some(found)),
            Lookup::Missing => Ok(None),
            Lookup::Unsure(doubt) => Err(doubt),
        }
    }

    /// All slices of the object with this key of that tenant, if it was committed at `least_index` or later.
    fn find(&self, tenant: TenantId, key: &Bytes, least_index: u64) -> Result<Option<Vec<Found>>, Doubt> {
        let Some(first) = self.look_up(tenant, key, 0)?.filter(|first| first.commit_index >= least_index) else {
            return Ok(None);
        };
        if first.slice_bytes == 0 {
            return Ok(None);
        }
        let (mut slices, mut length) = (vec![first], u64::from(first.slice_length));
        for index in 1..SliceHeader::slice_count(first.object_length, first.slice_bytes) {
            let slice = self.look_up(tenant, key, index)?.filter(|slice| slice.version == first.version);
            let Some(slice) = slice else { return Ok(None) };
            length += u64::from(slice.slice_length);
            slices.push(slice);
        }
        Ok((length == first.object_length).then_some(slices))
    }

    /// Reads the object with this key of that tenant, if it was committed at `least_index` or later; `None` if it is not
    /// here, does not fit, or was changed meanwhile.
    fn read(
        &self,
        tenant: TenantId,
        key: &Bytes,
        least_index: u64,
        target: &mut impl Target,
    ) -> Result<Option<ObjectInfo>, Doubt> {
        let reader = self.reader();
        let Some(first) = self.look_up(tenant, key, 0)?.filter(|first| first.commit_index >= least_index) else {
            return Ok(None);
        };
        // What the directory says may be nonsense until the checksum holds.
        if first.slice_bytes == 0 || first.object_length > MOST_BYTES || !target.begin(first.object_length) {
            return Ok(None);
        }
        let (mut read, mut whole) = (0, 0);
        for index in 0..SliceHeader::slice_count(first.object_length, first.slice_bytes) {
            let Some(found) = (if index == 0 { Some(first) } else { self.look_up(tenant, key, index)? }) else {
                return Ok(None);
            };
            let length = u64::from(found.slice_length);
            read += length;
            if found.version != first.version || read > first.object_length {
                return Ok(None);
            }
            let Some(actual) = self.copy(&found, target) else { return Ok(None) };
            if !reader.is_unchanged(&found) || actual != found.checksum {
                return Ok(None);
            }
            whole = if index == 0 { actual } else { checksum::combine(whole, actual, length) };
        }
        if read < first.object_length {
            return Ok(None);
        }
        Ok(Some(ObjectInfo {
            length: read,
            data_type: first.data_type,
            group: String::new(),
            checksum: Some(whole),
            tier: StoredIn::Dram,
            version: first.version.to_string(),
        }))
    }

    /// Copies the slice's bytes, which may be another's by now, and gives the CRC-32 of the copy. `None` if its extents leave
    /// the segment, which the reader has checked for, or do not hold it.
    fn copy(&self, found: &Found, target: &mut impl Target) -> Option<u32> {
        let mut missing = found.slice_length as usize;
        let mut sum = crc32fast::Hasher::new();
        for extent in found.extents.as_slice() {
            let mut offset = self.layout.data_offset + u64::from(extent.page) * PAGE_BYTES as u64;
            let mut left = missing.min(extent.pages as usize * PAGE_BYTES);
            missing -= left;
            while left > 0 {
                let length = left.min(STEP_BYTES);
                target.take(self.store.memory(), offset, length)?;
                sum.update(target.last(length));
                offset += length as u64;
                left -= length;
            }
        }
        (missing == 0).then(|| sum.finalize())
    }
}

/// Where an object is read to.
trait Target {
    /// An object of that length comes; whether there is room for it.
    fn begin(&mut self, length: u64) -> bool;
    /// Takes the next `length` bytes. `None` if they are not in the memory.
    fn take(&mut self, memory: &Memory, offset: u64, length: usize) -> Option<()>;
    /// The last `length` bytes that were taken.
    fn last(&self, length: usize) -> &[u8];
}

impl Target for Vec<u8> {
    fn begin(&mut self, length: u64) -> bool {
        usize::try_from(length).is_ok_and(|length| self.try_reserve_exact(length).is_ok())
    }

    fn take(&mut self, memory: &Memory, offset: u64, length: usize) -> Option<()> {
        memory.append_to(offset, length, self).ok()
    }

    fn last(&self, length: usize) -> &[u8] {
        &self[self.len() - length..]
    }
}

/// A caller's buffer, filled from its start.
struct Filling<'a> {
    buffer: &'a mut [u8],
    filled: usize,
}

impl Target for Filling<'_> {
    fn begin(&mut self, length: u64) -> bool {
        self.buffer.len() as u64 >= length
    }

    fn take(&mut self, memory: &Memory, offset: u64, length: usize) -> Option<()> {
        let target = self.buffer.get_mut(self.filled..)?.get_mut(..length)?;
        self.filled += length;
        memory.read_at(offset, target).ok()
    }

    fn last(&self, length: usize) -> &[u8] {
        &self.buffer[self.filled - length..self.filled]
    }
}

mod views;

#[cfg(test)]
mod reuse;

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use tidepool_metadata::directory::{Extent, Extents, SlotId, Writer};
    use tidepool_metadata::{DataType, Incarnation, ObjectKey, ReplicaId, VersionId};

    const NODE: NodeId = NodeId(7);
    const SLICE_BYTES: u32 = 4096;

    /// The node's side of a segment.
    pub(super) struct Node {
        segment: Arc<Segment>,
        file: File,
        memory: Memory,
        writer: Writer,
        sequence: u64,
    }

    impl Node {
        fn new() -> Self {
            Self::with_pages(16)
        }

        pub(super) fn with_pages(pages: u32) -> Self {
            let layout = Layout::new(NODE, pages, Some(64));
            let file = tempfile::tempfile_in("/dev/shm").expect("file");
            file.set_len(layout.file_bytes).expect("room");
            let memory = Memory::of_own_store(&file, layout.file_bytes).expect("memory");
            let store = StoreSegment::new(file.try_clone().expect("dup"), layout.file_bytes).expect("mapped");
            layout.format(memory.words(usize::MAX));
            let (writer, _) = Writer::recover(memory.words(usize::MAX), Incarnation(1)).expect("a segment");
            Writer::set_valid_until(memory.words(usize::MAX), u64::MAX);
            Self { segment: Arc::new(Segment { store, layout }), file, memory, writer, sequence: 0 }
        }

        /// The reader's side of it.
        pub(super) fn segment(&self) -> Arc<Segment> {
            Arc::clone(&self.segment)
        }

        /// Puts an object whose slices lie in `pages`, one each.
        fn put(&mut self, key: &str, value: &[u8], pages: &[u32]) -> Vec<SlotId> {
            self.put_bytes(key.as_bytes(), value, pages)
        }

        pub(super) fn put_bytes(&mut self, key: &[u8], value: &[u8], pages: &[u32]) -> Vec<SlotId> {
            self.sequence += 1;
            let sequence = self.sequence;
            let slices = value.chunks(SLICE_BYTES as usize).zip(pages).zip(0..);
            slices
                .map(|((bytes, &page), index)| self.put_slice(key, value.len(), sequence, bytes, page, index))
                .collect()
        }

        fn put_slice(
            &mut self,
            key: &[u8],
            length: usize,
            sequence: u64,
            bytes: &[u8],
            page: u32,
            index: u32,
        ) -> SlotId {
            let (memory, layout) = (&self.memory, &self.segment.layout);
            let place = layout.data_offset + u64::from(page) * PAGE_BYTES as u64;
            self.file.write_all_at(bytes, place).expect("written");
            let header = SliceHeader {
                tenant: TenantId::DEFAULT,
                key: ObjectKey::new(key).expect("legal"),
                version: VersionId { node: NODE, incarnation: Incarnation(1), sequence },
                replica: ReplicaId { node: NODE, incarnation: Incarnation(1), sequence },
                object_length: length as u64,
                slice_bytes: SLICE_BYTES,
                slice_index: index,
                slice_length: u32::try_from(bytes.len()).expect("small"),
                checksum: crc32fast::hash(bytes),
                data_type: DataType::KvCache,
                commit_index: 0,
            };
            let mut extents = Extents::default();
            assert!(extents.push(Extent { page, pages: 1 }));
            let promise = self.writer.reserve(key.len()).expect("room");
            let slot = self.writer.seal(memory.words(usize::MAX), promise, &header, &extents);
            self.writer.complete(memory.words(usize::MAX), slot, sequence);
            slot
        }

        pub(super) fn set_kept_pages(&self, pages: u32) {
            Writer::set_kept_pages(self.memory.words(usize::MAX), pages);
        }

        pub(super) fn retire(&mut self, slots: &[SlotId]) {
            slots.iter().for_each(|&slot| self.writer.retire(self.memory.words(usize::MAX), slot));
        }

        fn read(&self, key: &str) -> Option<Vec<u8>> {
            let mut value = Vec::new();
            let info = self
                .segment
                .read(TenantId::DEFAULT, &Bytes::copy_from_slice(key.as_bytes()), 0, &mut value)
                .expect("no doubt")?;
            assert_eq!((info.length, info.checksum), (value.len() as u64, Some(crc32fast::hash(&value))));
            Some(value)
        }
    }

    /// Lets the node do something in the middle of a reader's copy: after so many pieces.
    struct Interrupted<'a> {
        value: Vec<u8>,
        pieces: usize,
        act: &'a mut dyn FnMut(),
    }

    impl Target for Interrupted<'_> {
        fn begin(&mut self, length: u64) -> bool {
            self.value.begin(length)
        }

        fn take(&mut self, memory: &Memory, offset: u64, length: usize) -> Option<()> {
            if self.pieces == 0 {
                (self.act)();
            }
            self.pieces = self.pieces.wrapping_sub(1);
            self.value.take(memory, offset, length)
        }

        fn last(&self, length: usize) -> &[u8] {
            self.value.last(length)
        }
    }

    fn bytes(seed: u8, length: usize) -> Vec<u8> {
        (0..length).map(|position| (position as u8).wrapping_mul(31) ^ seed).collect()
    }

    #[test]
    fn objects_of_any_number_of_slices_are_read() {
        let mut node = Node::new();
        for (key, length, pages) in [("one", 100, &[3][..]), ("three", 10_000, &[5, 1, 9]), ("full", 4096, &[0])] {
            node.put(key, &bytes(1, length), pages);
            assert_eq!(node.read(key), Some(bytes(1, length)), "{key}");
        }
        assert_eq!(node.read("other"), None);
        let first = node.put("again", &bytes(2, 50), &[10]);
        node.put("again", &bytes(3, 60), &[11]);
        assert_eq!(node.read("again"), Some(bytes(3, 60)), "the newer of two");
        node.retire(&first);
        assert_eq!(node.read("again"), Some(bytes(3, 60)));
        let mut short = vec![0; 59];
        let mut target = Filling { buffer: &mut short, filled: 0 };
        assert_eq!(
            node.segment.read(TenantId::DEFAULT, &Bytes::from_static(b"again"), 0, &mut target),
            Ok(None),
            "it does not fit"
        );
    }

    /// At every piece of the copy, the object goes and its memory is another's: that has other bytes, or the same.
    #[test]
    fn memory_that_is_reused_during_the_copy_is_noticed() {
        for same_bytes in [false, true] {
            for pieces in 0..3 {
                let mut node = Node::new();
                let (value, pages) = (bytes(1, 3 * SLICE_BYTES as usize), [2, 3, 4]);
                let mut slots = node.put("k", &value, &pages);
                let other = if same_bytes { value.clone() } else { bytes(9, value.len()) };
                let segment = node.segment();
                let mut act = || {
                    node.retire(&std::mem::take(&mut slots));
                    node.put("other", &other, &pages);
                };
                let mut target = Interrupted { value: Vec::new(), pieces, act: &mut act };
                let read = segment.read(TenantId::DEFAULT, &Bytes::from_static(b"k"), 0, &mut target);
                assert_eq!(read, Ok(None), "piece {pieces}, same bytes: {same_bytes}");
            }
        }
    }

    /// A put of the same key commits while the older version is read: the two are never mixed.
    #[test]
    fn slices_of_two_versions_are_not_mixed() {
        for pieces in 0..3 {
            let mut node = Node::new();
            let old = bytes(1, 3 * SLICE_BYTES as usize);
            node.put("k", &old, &[2, 3, 4]);
            let segment = node.segment();
            let mut act = || drop(node.put("k", &bytes(2, old.len()), &[5, 6, 7]));
            let mut target = Interrupted { value: Vec::new(), pieces, act: &mut act };
            let read = segment.read(TenantId::DEFAULT, &Bytes::from_static(b"k"), 0, &mut target).expect("no doubt");
            assert!(read.is_none() || target.value == old, "piece {pieces}");
        }
    }

    /// However many reads there are while the node does not answer, what is kept for it is bounded, and one call waits.
    #[test]
    fn what_the_node_is_not_told_yet_is_bounded() {
        let (local, key) = (LocalReads::new("segment.sock".into(), TenantId::DEFAULT, None), Bytes::from_static(b"k"));
        let told: Vec<_> = (0..10_000).filter_map(|_| local.note(&key)).collect();
        assert_eq!(told.iter().map(Vec::len).collect::<Vec<_>>(), [TOLD_AT_ONCE]);
        assert_eq!((lock(&local.untold).keys.len(), local.hits()), (MOST_UNTOLD, 10_000));
        local.told();
        assert_eq!(local.note(&key).map(|keys| keys.len()), Some(MOST_UNTOLD));
    }

    #[test]
    fn damaged_bytes_are_not_given_out() {
        let mut node = Node::new();
        node.put("k", &bytes(1, 3000), &[2]);
        let place = node.segment.layout.data_offset + 2 * PAGE_BYTES as u64;
        node.file.write_all_at(&[0xff], place + 1500).expect("written");
        assert_eq!(node.read("k"), None);
    }

    #[test]
    fn another_nodes_segment_is_not_taken() {
        let folder = tempfile::tempdir().expect("folder");
        let socket = folder.path().join("segment.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("socket");
        let layout = Layout::new(NODE, 16, Some(64));
        let file = tempfile::tempfile().expect("file");
        file.set_len(layout.file_bytes).expect("room");
        let words: Vec<AtomicU64> = (0..layout.words()).map(|_| AtomicU64::new(0)).collect();
        layout.format(&words);
        let bytes: Vec<u8> = words.into_iter().flat_map(|word| word.into_inner().to_ne_bytes()).collect();
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).expect("written");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                tidepool_transfer::give_segment(&stream, std::os::fd::AsFd::as_fd(&file), layout.file_bytes)
                    .expect("sent");
            }
        });
        assert!(Segment::open(&socket, Some(NodeId(8))).is_err());
        assert!(Segment::open(&socket, Some(NODE)).is_ok());
        assert!(Segment::open(&socket, None).is_ok(), "the caller named the socket");
    }
}
