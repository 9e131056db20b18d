//! A table whose handles know how often their slot was reused, so that a stale handle finds nothing.
//!
//! A handle is `generation << 32 | index`. Generations start at 1 and grow with each removal; a slot whose generation
//! is used up is not used again. Handles say nothing about whose they are: a table belongs to one engine.

/// Generational slots, at most `limit` of them occupied.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    limit: usize,
    occupied: usize,
}

#[derive(Debug)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Slots<T> {
    /// No slots yet. `limit` is at most 2^32 - 1.
    pub(crate) fn new(limit: usize) -> Self {
        Self { entries: Vec::new(), free: Vec::new(), limit: limit.min(u32::MAX as usize), occupied: 0 }
    }

    /// Puts what `make` builds for its handle into a slot; `None` if the table is full.
    pub(crate) fn insert_with(&mut self, make: impl FnOnce(u64) -> T) -> Option<u64> {
        if self.occupied == self.limit {
            return None;
        }
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(self.entries.len()).ok()?;
                self.entries.push(Entry { generation: 1, value: None });
                index
            }
        };
        let entry = &mut self.entries[index as usize];
        let handle = u64::from(entry.generation) << 32 | u64::from(index);
        entry.value = Some(make(handle));
        self.occupied += 1;
        Some(handle)
    }

    /// What the handle names, unless it is stale.
    pub(crate) fn get(&self, handle: u64) -> Option<&T> {
        let entry = self.entries.get(index(handle))?;
        if entry.generation == generation(handle) { entry.value.as_ref() } else { None }
    }

    /// Takes it out; the handle and its copies are stale from here on.
    pub(crate) fn remove(&mut self, handle: u64) -> Option<T> {
        let entry = self.entries.get_mut(index(handle))?;
        if entry.generation != generation(handle) {
            return None;
        }
        let value = entry.value.take()?;
        self.occupied -= 1;
        if let Some(next) = entry.generation.checked_add(1) {
            entry.generation = next;
            self.free.push(index(handle) as u32);
        }
        Some(value)
    }

    /// How many slots are occupied.
    pub(crate) fn len(&self) -> usize {
        self.occupied
    }

    /// All values, in no particular order.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter_map(|entry| entry.value.as_ref())
    }
}

/// Which slot a handle names.
pub(crate) fn index(handle: u64) -> usize {
    (handle & u64::from(u32::MAX)) as usize
}

/// How often that slot had been used.
pub(crate) fn generation(handle: u64) -> u32 {
    (handle >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_finds_nothing() {
        let mut slots = Slots::new(4);
        let first = slots.insert_with(|_| "first").expect("room");
        assert_eq!(slots.remove(first), Some("first"));
        let second = slots.insert_with(|_| "second").expect("room");
        assert_eq!(index(first), index(second));
        assert_eq!(slots.get(first), None);
        assert_eq!(slots.remove(first), None);
        assert_eq!(slots.get(second), Some(&"second"));
        assert_eq!(slots.get(0), None);
        assert_eq!(slots.get(u64::MAX), None);
    }

    #[test]
    fn the_table_refuses_more_than_its_limit() {
        let mut slots = Slots::new(2);
        let first = slots.insert_with(|handle| handle).expect("room");
        assert!(slots.insert_with(|handle| handle).is_some());
        assert_eq!(slots.insert_with(|handle| handle), None);
        slots.remove(first);
        assert!(slots.insert_with(|handle| handle).is_some());
    }

    #[test]
    fn a_slot_whose_generations_are_used_up_rests_for_ever() {
        let mut slots = Slots::new(2);
        let handle = slots.insert_with(|_| ()).expect("room");
        slots.entries[0].generation = u32::MAX;
        slots.remove(u64::from(u32::MAX) << 32).expect("the last generation");
        let next = slots.insert_with(|_| ()).expect("room");
        assert_ne!(index(next), index(handle));
    }
}
