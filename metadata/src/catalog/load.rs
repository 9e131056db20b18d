//! The catalog from the rows of its image, by several threads.
//!
//! Nearly all rows are objects'. They are cut into ranges of names, which threads take one after the other. Each thread keeps
//! what it makes in a [`Part`]: objects in blocks of the slab that have their numbers from the start, the order of their
//! names, which is the order they come in, and sums. Then the hash tables are made of all parts ([`ObjectTable::of`]).
//!
//! Which slot an object gets depends on the threads; no answer does.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Catalog;
use super::image::{LoadError, OBJECTS, decode_object};
use super::nodes::Holdings;
use super::object::Object;
use super::table::{ObjectTable, Slot, TablePart};
use super::tenants::Charge;
use crate::node::NodeId;
use crate::object::{DATA_TYPES, TenantId};

/// The rows of an image, wherever they lie.
pub trait Rows: Sync {
    /// Gives key and value of the rows from `range.start` on, and below `range.end` unless that is empty, by key, until `each`
    /// wants no more. Who can't read on, ends, and keeps the reason to itself.
    fn scan(&self, range: Range<&[u8]>, each: impl FnMut(&[u8], &[u8]) -> bool);

    /// Some keys, rising, with about as many rows between any two.
    fn cuts(&self) -> Vec<Vec<u8>>;
}

impl Rows for Vec<(Vec<u8>, Vec<u8>)> {
    fn scan(&self, range: Range<&[u8]>, mut each: impl FnMut(&[u8], &[u8]) -> bool) {
        let is_in = |key: &[u8]| key >= range.start && (range.end.is_empty() || key < range.end);
        let _all = self.iter().filter(|(key, _)| is_in(key)).all(|(key, value)| each(key, value));
    }

    fn cuts(&self) -> Vec<Vec<u8>> {
        self.iter().step_by(8).map(|(key, _)| key.clone()).collect()
    }
}

impl Catalog {
    /// The catalog of which these are all rows, read by so many threads; a new one if there are none.
    ///
    /// # Errors
    /// [`LoadError`]: the image is damaged, incomplete, or of a later version.
    pub fn load(rows: &impl Rows, threads: NonZero<usize>) -> Result<Self, LoadError> {
        let mut catalog = Self::empty();
        let mut is_first = true;
        read(rows, &[]..OBJECTS.start, |key, value| {
            if std::mem::take(&mut is_first) { catalog.load_first(key, value) } else { catalog.load_row(key, value) }
        })?;
        if is_first {
            read(rows, OBJECTS.start..&[], |_, _| Err(LoadError::NoMeta))?;
            return Ok(Self::new());
        }
        let mut cuts = rows.cuts();
        cuts.retain(|cut| OBJECTS.start < &cut[..] && &cut[..] < OBJECTS.end);
        cuts.insert(0, OBJECTS.start.to_vec());
        cuts.push(OBJECTS.end.to_vec());
        let known = Known {
            nodes: catalog.nodes.0.keys().copied().collect(),
            tenants: catalog.tenants.ids().collect(),
            blocks: AtomicUsize::new(0),
        };
        let next = AtomicUsize::new(0);
        let read_objects = || {
            let mut part = Part::default();
            while let Some([from, to]) = cuts.windows(2).nth(next.fetch_add(1, Ordering::Relaxed)) {
                read(rows, from..to, |key, value| part.add(&known, key, value))?;
                part.objects.end_range();
            }
            Ok(part)
        };
        let (parts, rest) = std::thread::scope(|scope| {
            let readers: Vec<_> = (1..threads.get()).map(|_| scope.spawn(read_objects)).collect();
            let rest = read(rows, OBJECTS.end..&[], |key, value| catalog.load_row(key, value));
            let mut parts = vec![read_objects()];
            parts.extend(readers.into_iter().map(|reader| match reader.join() {
                Ok(part) => part,
                Err(panic) => std::panic::resume_unwind(panic),
            }));
            (parts.into_iter().collect::<Result<Vec<_>, _>>(), rest)
        });
        let mut objects = Vec::new();
        for part in parts? {
            part.nodes.iter().for_each(|(&node, holdings)| catalog.nodes.add(node, holdings));
            part.tenants.into_iter().for_each(|(tenant, charge)| catalog.tenants.charge(tenant, charge));
            catalog.type_bytes.iter_mut().zip(part.type_bytes).for_each(|(sum, bytes)| *sum += bytes);
            catalog.groups.extend(part.groups);
            objects.push(part.objects);
        }
        rest?;
        catalog.objects = ObjectTable::of(objects, threads);
        Ok(catalog)
    }
}

/// Reads rows until one is out of order or refused.
fn read(
    rows: &impl Rows,
    range: Range<&[u8]>,
    mut each: impl FnMut(&[u8], &[u8]) -> Result<(), LoadError>,
) -> Result<(), LoadError> {
    let (mut last, mut result) = (Vec::new(), Ok(()));
    rows.scan(range, |key, value| {
        result = if key > &last[..] { each(key, value) } else { Err(LoadError::Order { row: key.to_vec() }) };
        last.clear();
        last.extend_from_slice(key);
        result.is_ok()
    });
    result
}

/// What all threads know.
struct Known {
    nodes: BTreeSet<NodeId>,
    tenants: BTreeSet<TenantId>,
    /// Blocks of the slab that are taken.
    blocks: AtomicUsize,
}

/// What one thread made of the objects that it read.
#[derive(Default)]
struct Part {
    objects: TablePart,
    nodes: BTreeMap<NodeId, Holdings>,
    tenants: BTreeMap<TenantId, Charge>,
    type_bytes: [u64; DATA_TYPES],
    groups: Vec<(TenantId, Arc<str>, Slot)>,
}

impl Part {
    fn add(&mut self, known: &Known, key: &[u8], value: &[u8]) -> Result<(), LoadError> {
        let object = decode_object(key, value).map_err(|source| LoadError::Row { row: key.to_vec(), source })?;
        let is_known = |object: &Object| {
            known.tenants.contains(&object.tenant())
                && object.replicas().all(|replica| known.nodes.contains(&replica.id.node))
        };
        if !is_known(&object) {
            return Err(LoadError::Inconsistent { row: key.to_vec() });
        }
        let hash = object.hash();
        for replica in object.replicas() {
            self.nodes.entry(replica.id.node).or_default().gain(&object, hash, replica.id);
        }
        self.tenants.entry(object.tenant()).or_default().add(Charge::of(&object));
        self.type_bytes[object.data_type as usize] += object.charged_bytes();
        let group = object.group().map(|group| (object.tenant(), Arc::clone(group)));
        let slot = self.objects.push(&known.blocks, hash, object);
        self.groups.extend(group.map(|(tenant, group)| (tenant, group, slot)));
        Ok(())
    }
}
