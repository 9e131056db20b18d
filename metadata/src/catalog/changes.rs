//! Which rows of the image changed since they were last taken.
//!
//! Nearly all are objects'. Those are remembered by their slots, four bytes and no search each, and put into order when they
//! are taken; what was taken out, by its name, because its slot is used again.
//!
//! Memory: one entry a change until it is taken, so the taker bounds it by how far it trails.

use std::collections::BTreeSet;

use super::image::RowKey;
use super::object::Name;
use super::table::Slot;

#[derive(Default)]
pub(super) struct Changes {
    rows: BTreeSet<RowKey>,
    /// Where objects were put, or changed; others may lie there now, or none.
    placed: Vec<Slot>,
    /// Objects that were taken out; they may be back elsewhere.
    gone: Vec<Name>,
}

impl Changes {
    pub(super) fn insert(&mut self, row: RowKey) {
        self.rows.insert(row);
    }

    pub(super) fn extend(&mut self, rows: impl IntoIterator<Item = RowKey>) {
        self.rows.extend(rows);
    }

    pub(super) fn place(&mut self, slot: Slot) {
        self.placed.push(slot);
    }

    pub(super) fn displace(&mut self, name: Name) {
        self.gone.push(name);
    }

    /// All of them, and none of them any more: rows, slots, and names, each once.
    pub(super) fn take(&mut self) -> (BTreeSet<RowKey>, Vec<Slot>, Vec<Name>) {
        let Self { rows, mut placed, mut gone } = std::mem::take(self);
        placed.sort_unstable();
        placed.dedup();
        gone.sort_unstable();
        gone.dedup();
        (rows, placed, gone)
    }
}
