//! A slot's words, to and from what they mean.

use super::writer::{RecoveredSlot, SlotId};
use super::{high, low, pack};
use crate::node::{Incarnation, NodeId};
use crate::object::{DataType, MAX_KEY_BYTES, ObjectKey, ReplicaId, TenantId, VersionId};
use crate::slice::SliceHeader;

/// Bytes of a page of the data, the unit of extents.
pub const PAGE_BYTES: usize = 4096;
/// Most extents of one slice.
pub const MAX_EXTENTS: usize = 8;

/// A run of pages of a segment's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// The first page.
    pub page: u32,
    /// How many; not 0.
    pub pages: u32,
}

/// The extents of one slice in order, at most [`MAX_EXTENTS`]. Empty for a slice of length 0.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Extents {
    list: [Extent; MAX_EXTENTS],
    count: u8,
}

impl Extents {
    /// Adds an extent behind the others; answers whether there was room for it.
    #[must_use]
    pub fn push(&mut self, extent: Extent) -> bool {
        let Some(place) = self.list.get_mut(usize::from(self.count)) else { return false };
        *place = extent;
        self.count += 1;
        true
    }

    /// In order.
    #[must_use]
    pub fn as_slice(&self) -> &[Extent] {
        &self.list[..usize::from(self.count)]
    }

    /// Pages of all together.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.as_slice().iter().map(|extent| u64::from(extent.pages)).sum()
    }

    /// Whether all lie within `data_pages` pages and hold `length` bytes.
    pub(super) fn fit(&self, data_pages: u32, length: u32) -> bool {
        let inside = |extent: &Extent| {
            extent.pages > 0 && extent.page.checked_add(extent.pages).is_some_and(|end| end <= data_pages)
        };
        self.as_slice().iter().all(inside) && self.pages() * PAGE_BYTES as u64 >= u64::from(length)
    }
}

impl std::fmt::Debug for Extents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// Words 4 to 11, the fixed part.
pub(super) const FIXED_WORDS: usize = 8;
/// Payload words in a slice's slot, and in a payload slot.
pub(super) const PAYLOAD_FIRST: usize = 11;
pub(super) const PAYLOAD_MORE: usize = 20;
const PAYLOAD_WORDS: usize = MAX_EXTENTS + MAX_KEY_BYTES / 8;

/// Payload slots of a slice with the most extents, whose key has `key_bytes`.
pub(super) fn most_payload_slots(key_bytes: usize) -> u32 {
    let words = MAX_EXTENTS + key_bytes.min(MAX_KEY_BYTES).div_ceil(8);
    words.saturating_sub(PAYLOAD_FIRST).div_ceil(PAYLOAD_MORE) as u32
}

/// What stands in the first byte of a slot's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum SlotState {
    Free = 0,
    Slice = 1,
    Payload = 2,
}

/// The `status` word.
#[derive(Clone, Copy, Debug)]
pub(super) struct Status(pub(super) u64);

impl Status {
    pub(super) fn state(self) -> Option<SlotState> {
        [SlotState::Free, SlotState::Slice, SlotState::Payload].get((self.0 & 0xff) as usize).copied()
    }
    pub(super) fn extents(self) -> usize {
        (self.0 >> 8 & 0xff) as usize
    }
    pub(super) fn key_length(self) -> usize {
        (self.0 >> 16 & 0xffff) as usize
    }
    pub(super) fn payload_words(self) -> usize {
        self.extents() + self.key_length().div_ceil(8)
    }
    fn check(self) -> u32 {
        high(self.0)
    }
    /// Whether the numbers are within their bounds.
    pub(super) fn is_sound(self) -> bool {
        self.extents() <= MAX_EXTENTS && (1..=MAX_KEY_BYTES).contains(&self.key_length())
    }
}

/// All words of one entry that its check covers, side by side: generation, status without check, the fixed part,
/// payload. On the stack: a seal allocates nothing.
pub(super) struct Image {
    words: [u64; 2 + FIXED_WORDS + PAYLOAD_WORDS],
    length: usize,
}

impl Image {
    pub(super) fn encode(generation: u64, header: &SliceHeader, extents: &Extents) -> Self {
        let key = header.key.as_bytes();
        let status = SlotState::Slice as u64 | (extents.as_slice().len() as u64) << 8 | (key.len() as u64) << 16;
        let mut image = Self::new();
        image.begin(generation, status);
        for word in [
            pack(header.tenant.0, header.slice_index),
            header.object_length,
            pack(header.slice_bytes, header.slice_length),
            pack(header.checksum, header.data_type as u32),
            pack(header.version.node.0, header.version.incarnation.0),
            header.version.sequence,
            pack(header.replica.node.0, header.replica.incarnation.0),
            header.replica.sequence,
        ] {
            image.push(word);
        }
        extents.as_slice().iter().for_each(|extent| image.push(pack(extent.page, extent.pages)));
        key_words(key).for_each(|word| image.push(word));
        image
    }

    /// Of no entry yet. It is large: whoever reads many entries uses one for all.
    pub(super) fn new() -> Self {
        Self { words: [0; 2 + FIXED_WORDS + PAYLOAD_WORDS], length: 0 }
    }

    /// Forgets what it has; the fixed part and the payload are to be pushed next.
    pub(super) fn begin(&mut self, generation: u64, status: u64) {
        self.length = 0;
        self.push(generation);
        self.push(u64::from(low(status)));
    }

    /// Adds a word. There is room for all that a sound status asks for.
    pub(super) fn push(&mut self, word: u64) {
        self.words[self.length] = word;
        self.length += 1;
    }

    pub(super) fn fixed(&self) -> &[u64] {
        &self.words[2..2 + FIXED_WORDS]
    }

    pub(super) fn payload(&self) -> &[u64] {
        &self.words[2 + FIXED_WORDS..self.length]
    }

    /// The status word with its check.
    pub(super) fn status(&self) -> u64 {
        let mut sum = crc32fast::Hasher::new();
        // Most entries fit one piece: a restart checks a million of them.
        for words in self.words[..self.length].chunks(32) {
            let mut bytes = [0; 8 * 32];
            for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            sum.update(&bytes[..8 * words.len()]);
        }
        pack(low(self.words[1]), sum.finalize())
    }

    /// Whether the words are those that were written.
    pub(super) fn matches(&self, status: Status) -> bool {
        Status(self.status()).check() == status.check()
    }

    pub(super) fn extents(&self) -> Extents {
        let mut extents = Extents::default();
        for &word in &self.payload()[..Status(self.words[1]).extents()] {
            let _fits = extents.push(Extent { page: low(word), pages: high(word) });
        }
        extents
    }

    /// What a restart needs to know of the slice in `slot`; `None` if the entry says something that cannot be.
    pub(super) fn recovered(&self, slot: SlotId) -> Option<RecoveredSlot> {
        let (status, fixed) = (Status(self.words[1]), self.fixed());
        DataType::from_number(u8::try_from(high(fixed[3])).ok()?)?;
        #[expect(clippy::cast_possible_truncation, reason = "a sound status has at most 8")]
        let extent_count = status.extents() as u8;
        Some(RecoveredSlot {
            slot,
            replica: ReplicaId {
                node: NodeId(low(fixed[6])),
                incarnation: Incarnation(high(fixed[6])),
                sequence: fixed[7],
            },
            slice_length: high(fixed[2]),
            checksum: low(fixed[3]),
            extent_count,
            is_whole: fixed[1] == u64::from(high(fixed[2])),
        })
    }

    /// What the entry says; `None` if it says something that cannot be.
    pub(super) fn decode(&self, commit_index: u64) -> Option<(SliceHeader, Extents)> {
        let status = Status(self.words[1]);
        let fixed = self.fixed();
        let key: Vec<u8> = self.payload()[status.extents()..].iter().flat_map(|word| word.to_le_bytes()).collect();
        let header = SliceHeader {
            tenant: TenantId(low(fixed[0])),
            key: ObjectKey::new(key.get(..status.key_length())?).ok()?,
            version: VersionId {
                node: NodeId(low(fixed[4])),
                incarnation: Incarnation(high(fixed[4])),
                sequence: fixed[5],
            },
            replica: ReplicaId {
                node: NodeId(low(fixed[6])),
                incarnation: Incarnation(high(fixed[6])),
                sequence: fixed[7],
            },
            object_length: fixed[1],
            slice_bytes: low(fixed[2]),
            slice_index: high(fixed[0]),
            slice_length: high(fixed[2]),
            checksum: low(fixed[3]),
            data_type: DataType::from_number(u8::try_from(high(fixed[3])).ok()?)?,
            commit_index,
        };
        Some((header, self.extents()))
    }
}

/// A key as words, padded with zeros.
pub(super) fn key_words(key: &[u8]) -> impl Iterator<Item = u64> + '_ {
    key.chunks(8).map(|chunk| {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(bytes)
    })
}

const COMMIT_BITS: u32 = 48;

/// The `commit` word of `index`, which is cut to 48 bits.
pub(super) fn commit_word(index: u64, generation: u64) -> u64 {
    let index = index & ((1 << COMMIT_BITS) - 1);
    if index == 0 {
        return 0;
    }
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&index.to_le_bytes());
    bytes[8..].copy_from_slice(&generation.to_le_bytes());
    index | u64::from(crc32fast::hash(&bytes)) << COMMIT_BITS
}

/// The index in a `commit` word; 0 if it is sealed only, or the word's check does not hold.
pub(super) fn commit_index(word: u64, generation: u64) -> u64 {
    let index = word & ((1 << COMMIT_BITS) - 1);
    if commit_word(index, generation) == word { index } else { 0 }
}
