//! The one writer of a directory.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use super::entry::{
    Extent, Extents, FIXED_WORDS, Image, PAYLOAD_FIRST, PAYLOAD_MORE, SlotState, Status, commit_index, commit_word,
    most_payload_slots,
};
use super::layout::{WORD_KEPT_PAGES, WORD_RECOVERING, WORD_RETIRED, WORD_SLOTS_USED, WORD_VALID_UNTIL};
use super::{Cell, Layout, LayoutError, high, low, pack};
use crate::node::Incarnation;
use crate::object::ReplicaId;
use crate::slice::SliceHeader;

// Words of a slot.
pub(super) const GENERATION: usize = 0;
pub(super) const COMMIT: usize = 1;
pub(super) const STATUS: usize = 2;
pub(super) const LINKS: usize = 3;
pub(super) const FIXED: usize = 4;
pub(super) const PREVIOUS: usize = 12;
pub(super) const PAYLOAD: usize = 13;
/// First payload word of a payload slot.
pub(super) const MORE_PAYLOAD: usize = 4;

/// Number of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

/// A slice that outlived its writer; [`Writer::read`] tells the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveredSlot {
    /// Where its entry is.
    pub slot: SlotId,
    /// Of which copy it is.
    pub replica: ReplicaId,
    /// Its length in bytes.
    pub slice_length: u32,
    /// CRC-32 of its bytes.
    pub checksum: u32,
    /// How many extents it has.
    pub extent_count: u8,
    /// It is the only slice of its object.
    pub is_whole: bool,
}

/// All slices that outlived their writer. Flat, because there may be millions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// In the order of the slots.
    pub slots: Vec<RecoveredSlot>,
    /// The extents of the first, then those of the second, ..
    pub extents: Vec<Extent>,
}

/// All slots are taken or promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {slot_count} slots of the segment's directory are taken")]
pub struct SlotsExhausted {
    /// How many there are.
    pub slot_count: u32,
}

/// Room for one slice: so many slots. For [`Writer::seal`] or [`Writer::unreserve`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is dropped stays promised for ever"]
pub struct SlotPromise(u32);

/// The writer's own state: which slots are free. All else stands in the words, which every call is given; they must
/// always be those of one segment.
#[derive(Debug)]
pub struct Writer {
    layout: Layout,
    /// Every new generation is at least this.
    generation_floor: u64,
    free: Vec<u32>,
    slots_used: u32,
    /// Slots promised to slices that are being filled.
    promised: u32,
}

impl Writer {
    /// Opens the directory in `words`, whether it was just formatted or left by a process that died: takes the
    /// slices that are whole, retires the rest, and lets readers in. No slice is in a chain yet: those that are
    /// complete are entered again by [`Writer::complete`] when their bytes have been verified.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn recover<C: Cell>(words: &[C], incarnation: Incarnation) -> Result<(Self, Recovered), LayoutError> {
        let layout = Layout::read(words)?;
        words[WORD_RECOVERING].store(1, Relaxed);
        words[WORD_VALID_UNTIL].store(0, Relaxed);
        C::fence(SeqCst);
        Layout::set_incarnation(words, incarnation);
        let slots_used = low(words[WORD_SLOTS_USED].load(Relaxed)).min(layout.slot_count);
        let generation_floor = u64::from(incarnation.0) << 32;
        let mut writer = Self { layout, generation_floor, free: Vec::new(), slots_used, promised: 0 };
        writer.empty_chains(words);
        let mut taken = vec![false; slots_used as usize];
        let found = writer.take_slices(words, &mut taken);
        for slot in (0..slots_used).rev() {
            if !taken[slot as usize] {
                writer.retire_slot(words, slot);
            }
        }
        words[WORD_RECOVERING].store(0, Release);
        Ok((writer, found))
    }

    /// The segment's layout.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Slots below this are in use or may be soon: the words must be backed by memory up to
    /// [`Layout::bytes_below_slot`] of it before the next [`Writer::seal`].
    #[must_use]
    pub fn slots_needed(&self) -> u32 {
        let fresh = self.promised.saturating_sub(u32::try_from(self.free.len()).unwrap_or(u32::MAX));
        self.slots_used.saturating_add(fresh).min(self.layout.slot_count)
    }

    /// Promises room for one more slice, whose key has `key_bytes`.
    ///
    /// # Errors
    /// [`SlotsExhausted`].
    pub fn reserve(&mut self, key_bytes: usize) -> Result<SlotPromise, SlotsExhausted> {
        let free = u64::from(self.layout.slot_count - self.slots_used) + self.free.len() as u64;
        let slots = 1 + most_payload_slots(key_bytes);
        if u64::from(self.promised) + u64::from(slots) > free {
            return Err(SlotsExhausted { slot_count: self.layout.slot_count });
        }
        self.promised += slots;
        Ok(SlotPromise(slots))
    }

    /// Takes a promise back.
    pub fn unreserve(&mut self, SlotPromise(slots): SlotPromise) {
        self.promised = self.promised.checked_sub(slots).expect("as many slots are taken back as were promised");
    }

    /// Enters a sealed slice, for which room was promised. It is in no chain: only recovery finds it.
    pub fn seal<C: Cell>(
        &mut self,
        words: &[C],
        promise: SlotPromise,
        header: &SliceHeader,
        extents: &Extents,
    ) -> SlotId {
        self.unreserve(promise);
        let slot = self.take_slot(words);
        let at = self.layout.slot(slot);
        let generation = words[at + GENERATION].load(Relaxed);
        let image = Image::encode(generation, header, extents);
        let (first, more) = image.payload().split_at(image.payload().len().min(PAYLOAD_FIRST));
        let mut chain = 0;
        for part in more.chunks(PAYLOAD_MORE).rev() {
            let payload_slot = self.take_slot(words);
            let at = self.layout.slot(payload_slot);
            store_all(&words[at + MORE_PAYLOAD..], part);
            words[at + LINKS].store(pack(0, chain), Relaxed);
            words[at + STATUS].store(SlotState::Payload as u64, Relaxed);
            chain = payload_slot + 1;
        }
        store_all(&words[at + FIXED..], image.fixed());
        store_all(&words[at + PAYLOAD..], first);
        words[at + COMMIT].store(commit_word(header.commit_index, generation), Relaxed);
        words[at + LINKS].store(pack(0, chain), Relaxed);
        words[at + PREVIOUS].store(0, Relaxed);
        // Full, not release: the data may have been written by non-temporal stores.
        C::fence(SeqCst);
        words[at + STATUS].store(image.status(), Release);
        SlotId(slot)
    }

    /// Lets readers find a slice: its put was completed at `index`. Again, or with index 0 (sealed only), it does nothing.
    pub fn complete<C: Cell>(&mut self, words: &[C], slot: SlotId, index: u64) {
        let at = self.layout.slot(slot.0);
        let bucket = self.bucket_of_slot(words, slot);
        if index == 0 || self.is_linked(words, bucket, slot) {
            return;
        }
        let generation = words[at + GENERATION].load(Relaxed);
        C::fence(SeqCst);
        words[at + COMMIT].store(commit_word(index, generation), Release);
        self.change_bucket(words, bucket, || {
            let head = words[bucket + 1].load(Relaxed);
            let payload = high(words[at + LINKS].load(Relaxed));
            words[at + LINKS].store(pack(low(head), payload), Relaxed);
            words[at + PREVIOUS].store(0, Relaxed);
            if let Some(next) = low(head).checked_sub(1) {
                words[self.layout.slot(next) + PREVIOUS].store(u64::from(slot.0 + 1), Relaxed);
            }
            words[bucket + 1].store(u64::from(slot.0 + 1), Relaxed);
        });
    }

    /// Takes a slice out: no reader finds it after this, and those that have found it see that its generation changed.
    /// Its extents may be reused when this returns.
    pub fn retire<C: Cell>(&mut self, words: &[C], slot: SlotId) {
        let bucket = self.bucket_of_slot(words, slot);
        let at = self.layout.slot(slot.0);
        let links = words[at + LINKS].load(Relaxed);
        let previous = low(words[at + PREVIOUS].load(Relaxed));
        if self.is_linked(words, bucket, slot) {
            self.change_bucket(words, bucket, || {
                match previous.checked_sub(1) {
                    None => words[bucket + 1].store(u64::from(low(links)), Relaxed),
                    Some(previous) => {
                        let at = self.layout.slot(previous) + LINKS;
                        let payload = high(words[at].load(Relaxed));
                        words[at].store(pack(low(links), payload), Relaxed);
                    }
                }
                if let Some(next) = low(links).checked_sub(1) {
                    words[self.layout.slot(next) + PREVIOUS].store(u64::from(previous), Relaxed);
                }
            });
        }
        self.retire_slot(words, slot.0);
        let mut payload = high(links);
        while let Some(payload_slot) = payload.checked_sub(1) {
            payload = high(words[self.layout.slot(payload_slot) + LINKS].load(Relaxed));
            self.retire_slot(words, payload_slot);
        }
        C::fence(SeqCst);
    }

    /// What stands in a slot that [`Writer::seal`] or [`Writer::recover`] gave and that was not retired since.
    #[must_use]
    pub fn read<C: Cell>(&self, words: &[C], slot: SlotId) -> Option<(SliceHeader, Extents)> {
        read_slice(&self.layout, words, slot)
    }

    /// Until when readers may use the directory, in nanoseconds of CLOCK_BOOTTIME.
    pub fn set_valid_until<C: Cell>(words: &[C], boot_nanoseconds: u64) {
        words[WORD_VALID_UNTIL].store(boot_nanoseconds, Release);
    }

    /// How many pages are nobody's, and are not given to anyone because a reader keeps them.
    pub fn set_kept_pages<C: Cell>(words: &[C], pages: u32) {
        words[WORD_KEPT_PAGES].store(u64::from(pages), Relaxed);
    }

    /// Tells readers that this file is written no more.
    pub fn set_retired<C: Cell>(words: &[C]) {
        words[WORD_RETIRED].store(1, Release);
    }

    fn change_bucket<C: Cell>(&self, words: &[C], bucket: usize, change: impl FnOnce()) {
        let sequence = words[bucket].load(Relaxed);
        words[bucket].store(sequence | 1, Relaxed);
        C::fence(Release);
        change();
        words[bucket].store(next_even(sequence), Release);
    }

    fn is_linked<C: Cell>(&self, words: &[C], bucket: usize, slot: SlotId) -> bool {
        words[self.layout.slot(slot.0) + PREVIOUS].load(Relaxed) != 0
            || low(words[bucket + 1].load(Relaxed)) == slot.0 + 1
    }

    fn bucket_of_slot<C: Cell>(&self, words: &[C], slot: SlotId) -> usize {
        let (header, _) = self.read(words, slot).expect("only slots of live slices are asked for");
        Layout::bucket(self.layout.bucket_of(header.tenant, header.key.as_bytes(), header.slice_index))
    }

    /// A free slot with a generation that nobody has seen.
    fn take_slot<C: Cell>(&mut self, words: &[C]) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            assert!(self.slots_used < self.layout.slot_count, "slots are promised before they are taken");
            self.slots_used += 1;
            words[WORD_SLOTS_USED].store(u64::from(self.slots_used), Release);
            self.slots_used - 1
        });
        let cell = &words[self.layout.slot(slot) + GENERATION];
        // A damaged one may be the last there is.
        cell.store(cell.load(Relaxed).wrapping_add(1).max(self.generation_floor), Relaxed);
        slot
    }

    fn retire_slot<C: Cell>(&mut self, words: &[C], slot: u32) {
        let at = self.layout.slot(slot);
        let generation = words[at + GENERATION].load(Relaxed);
        words[at + GENERATION].store(generation.wrapping_add(1), Release);
        words[at + STATUS].store(SlotState::Free as u64, Release);
        self.free.push(slot);
    }

    fn empty_chains<C: Cell>(&self, words: &[C]) {
        for bucket in 0..self.layout.bucket_count {
            let at = Layout::bucket(bucket);
            let sequence = words[at].load(Relaxed);
            // Buckets that were never used stay untouched: their pages need no memory yet.
            if sequence != 0 || words[at + 1].load(Relaxed) != 0 {
                words[at + 1].store(0, Relaxed);
                words[at].store(next_even(sequence), Release);
            }
        }
    }

    fn take_slices<C: Cell>(&self, words: &[C], taken: &mut [bool]) -> Recovered {
        let mut found = Recovered::default();
        found.slots.reserve(self.slots_used as usize);
        found.extents.reserve(self.slots_used as usize);
        let (mut image, mut payload_slots) = (Image::new(), Vec::new());
        for slot in 0..self.slots_used {
            payload_slots.clear();
            let is_whole = read_image(&self.layout, words, slot, &mut image, &mut |payload_slot| {
                let unseen = payload_slot < self.slots_used && !taken[payload_slot as usize];
                payload_slots.push(payload_slot);
                unseen
            });
            if !is_whole {
                continue;
            }
            let extents = image.extents();
            let recovered = image.recovered(SlotId(slot));
            let fits = |slice: &RecoveredSlot| extents.fit(self.layout.data_pages, slice.slice_length);
            let Some(recovered) = recovered.filter(fits) else { continue };
            let at = self.layout.slot(slot);
            let links = words[at + LINKS].load(Relaxed);
            words[at + LINKS].store(pack(0, high(links)), Relaxed);
            words[at + PREVIOUS].store(0, Relaxed);
            taken[slot as usize] = true;
            payload_slots.iter().for_each(|&payload_slot| taken[payload_slot as usize] = true);
            found.slots.push(recovered);
            found.extents.extend_from_slice(extents.as_slice());
        }
        drop_overlapping(&self.layout, words, &mut found, taken);
        found
    }
}

impl Recovered {
    /// Each slice with its extents.
    pub fn iter(&self) -> impl Iterator<Item = (&RecoveredSlot, &[Extent])> {
        let mut rest = self.extents.as_slice();
        self.slots.iter().map(move |slice| {
            let (extents, behind) = rest.split_at(usize::from(slice.extent_count));
            rest = behind;
            (slice, extents)
        })
    }
}

/// One bit a page: much quicker than to sort a million extents that are in order.
fn any_overlap(layout: &Layout, extents: &[Extent]) -> bool {
    let mut taken = vec![0_u64; (layout.data_pages as usize).div_ceil(64)];
    extents.iter().flat_map(|extent| extent.page..extent.page + extent.pages).any(|page| {
        let (word, bit) = (&mut taken[page as usize / 64], 1 << (page % 64));
        let was_taken = *word & bit != 0;
        *word |= bit;
        was_taken
    })
}

/// The sequence of a bucket whose chain does not change any more. Never 0, which says that the bucket was never used: after
/// damage, `sequence` may be the last there is.
fn next_even(sequence: u64) -> u64 {
    (sequence | 1).wrapping_add(1).max(2)
}

/// Two slices over one page cannot be; if damage made it so, neither is trusted.
fn drop_overlapping<C: Cell>(layout: &Layout, words: &[C], found: &mut Recovered, taken: &mut [bool]) {
    if !any_overlap(layout, &found.extents) {
        return;
    }
    let mut all: Vec<_> =
        found.iter().flat_map(|(slice, extents)| extents.iter().map(|&extent| (extent, slice.slot))).collect();
    all.sort_unstable();
    let mut bad = std::collections::BTreeSet::new();
    let mut last: Option<(u32, SlotId)> = None;
    for (extent, slot) in all {
        let end = extent.page + extent.pages;
        match last {
            Some((last_end, last_slot)) if extent.page < last_end => {
                bad.extend([slot, last_slot]);
                last = Some((end.max(last_end), if end > last_end { slot } else { last_slot }));
            }
            _ => last = Some((end, slot)),
        }
    }
    let mut good = Recovered::default();
    for (slice, extents) in found.iter().filter(|(slice, _)| !bad.contains(&slice.slot)) {
        good.slots.push(*slice);
        good.extents.extend_from_slice(extents);
    }
    *found = good;
    for slot in bad {
        taken[slot.0 as usize] = false;
        let mut payload = high(words[layout.slot(slot.0) + LINKS].load(Relaxed));
        while let Some(payload_slot) = payload.checked_sub(1) {
            taken[payload_slot as usize] = false;
            payload = high(words[layout.slot(payload_slot) + LINKS].load(Relaxed));
        }
    }
}

/// What stands in `slot`, if a slice does and its check holds. For the process that writes: only that one knows that
/// the slot does not change meanwhile.
#[must_use]
pub fn read_slice<C: Cell>(layout: &Layout, words: &[C], slot: SlotId) -> Option<(SliceHeader, Extents)> {
    let mut image = Image::new();
    if !read_image(layout, words, slot.0, &mut image, &mut |_payload_slot| true) {
        return None;
    }
    let at = layout.slot(slot.0);
    let index = commit_index(words[at + COMMIT].load(Relaxed), words[at + GENERATION].load(Relaxed));
    let (header, extents) = image.decode(index)?;
    extents.fit(layout.data_pages, header.slice_length).then_some((header, extents))
}

/// Reads the entry in `slot` into `image`; whether there is one and its check holds. `visit` is told each payload slot
/// and may refuse it.
fn read_image<C: Cell>(
    layout: &Layout,
    words: &[C],
    slot: u32,
    image: &mut Image,
    visit: &mut dyn FnMut(u32) -> bool,
) -> bool {
    let at = layout.slot(slot);
    let status = Status(words[at + STATUS].load(Acquire));
    if status.state() != Some(SlotState::Slice) || !status.is_sound() {
        return false;
    }
    image.begin(words[at + GENERATION].load(Relaxed), status.0);
    words[at + FIXED..at + FIXED + FIXED_WORDS].iter().for_each(|cell| image.push(cell.load(Relaxed)));
    let count = status.payload_words();
    let first = count.min(PAYLOAD_FIRST);
    words[at + PAYLOAD..at + PAYLOAD + first].iter().for_each(|cell| image.push(cell.load(Relaxed)));
    let mut rest = count - first;
    let mut payload = high(words[at + LINKS].load(Relaxed));
    while rest > 0 {
        let Some(payload_slot) = payload.checked_sub(1).filter(|&slot| slot < layout.slot_count) else { return false };
        let at = layout.slot(payload_slot);
        if !visit(payload_slot) || Status(words[at + STATUS].load(Relaxed)).state() != Some(SlotState::Payload) {
            return false;
        }
        let now = rest.min(PAYLOAD_MORE);
        words[at + MORE_PAYLOAD..at + MORE_PAYLOAD + now].iter().for_each(|cell| image.push(cell.load(Relaxed)));
        rest -= now;
        payload = high(words[at + LINKS].load(Relaxed));
    }
    image.matches(status)
}

fn store_all<C: Cell>(cells: &[C], values: &[u64]) {
    for (cell, &value) in cells.iter().zip(values) {
        cell.store(value, Relaxed);
    }
}
