//! One object as the catalog keeps it: 88 bytes, its name, and nothing else for the common object of one slice and of
//! one copy, on the node that coordinated its put.

use std::sync::Arc;

use super::codec::{DecodeError, Field, Input, fields};
use super::command::{MAX_REPLICAS, MAX_SLICES};
use super::copies::Copies;
use super::retired::Stamp;
use crate::log::LogIndex;
use crate::node::NodeId;
use crate::object::{DataType, Durability, KeyHash, ObjectKey, ReplicaId, TenantId, VersionId};
use crate::slice::SliceHeader;

/// A tenant (four bytes, big-endian) and a key in one byte string, so that names of one tenant are neighbours and
/// in key order, here and in the image.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name(Box<[u8]>);

const TENANT_BYTES: usize = 4;

impl Name {
    pub(super) fn new(tenant: TenantId, key: &ObjectKey) -> Self {
        Self::bytes(tenant, key.as_bytes()).into()
    }

    /// The bytes of a name, or of where names with this prefix start.
    pub(super) fn bytes(tenant: TenantId, key: &[u8]) -> Vec<u8> {
        [&tenant.0.to_be_bytes(), key].concat()
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn tenant(&self) -> TenantId {
        let (tenant, _) = self.0.split_first_chunk().expect("a name has a tenant");
        TenantId(u32::from_be_bytes(*tenant))
    }

    pub(super) fn key_bytes(&self) -> &[u8] {
        &self.0[TENANT_BYTES..]
    }

    pub(super) fn key(&self) -> ObjectKey {
        ObjectKey::new(self.key_bytes()).expect("a name has a legal key")
    }

    pub(super) fn is(&self, tenant: TenantId, key: &[u8]) -> bool {
        self.key_bytes() == key && self.tenant() == tenant
    }

    /// Whether these are the bytes of that name.
    pub(super) fn are_bytes_of(bytes: &[u8], tenant: TenantId, key: &[u8]) -> bool {
        bytes.split_at_checked(TENANT_BYTES).is_some_and(|(of, bytes)| bytes == key && of == tenant.0.to_be_bytes())
    }

    /// The name with these bytes, as a row's key has them.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (_, key) = bytes.split_at_checked(TENANT_BYTES).ok_or(DecodeError::Truncated)?;
        ObjectKey::check(key)?;
        Ok(Self(bytes.into()))
    }
}

impl From<Vec<u8>> for Name {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

/// One copy of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Replica {
    pub(super) id: ReplicaId,
    /// When it was reserved: says how long its id must be remembered once it is dropped.
    pub(super) reserved: Stamp,
    pub(super) durability: Durability,
}

/// Sorted by id, on different nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Replicas {
    /// The one on the node that coordinated the put, which gives its copy the numbers of the version.
    Own { reserved: Stamp, durability: Durability },
    /// Any others.
    Listed(Box<[Replica]>),
}

/// The id of a version's copy on the node that coordinated it.
fn own_id(version: VersionId) -> ReplicaId {
    let VersionId { node, incarnation, sequence } = version;
    ReplicaId { node, incarnation, sequence }
}

/// What few objects have: boxed, it takes eight bytes of all others.
#[derive(Clone, Debug, PartialEq, Eq)]
struct More {
    /// Of each slice, if there are several; else empty.
    checksums: Box<[u32]>,
    group: Option<Arc<str>>,
}

/// What a put said of its object, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) name: Name,
    pub(super) version: VersionId,
    pub(super) commit_index: LogIndex,
    pub(super) length: u64,
    replicas: Replicas,
    more: Option<Box<More>>,
    /// Of the only slice.
    checksum: u32,
    pub(super) slice_bytes: u32,
    pub(super) pins: u32,
    pub(super) data_type: DataType,
    pub(super) durability: Durability,
    pub(super) copies: Copies,
    /// Created by adopt, in a rebuild: a later commit index may replace it.
    pub(super) adopted: bool,
}

/// One of each slice; the only one of an object of one slice takes no memory of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Checksums {
    One(u32),
    Listed(Box<[u32]>),
}

impl Checksums {
    fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Listed(checksums) => checksums.len(),
        }
    }
}

impl From<&[u32]> for Checksums {
    fn from(checksums: &[u32]) -> Self {
        match *checksums {
            [checksum] => Self::One(checksum),
            _ => Self::Listed(checksums.into()),
        }
    }
}

/// As a list.
impl Field for Checksums {
    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u64).write(out);
        match self {
            Self::One(checksum) => checksum.write(out),
            Self::Listed(checksums) => checksums.iter().for_each(|checksum| checksum.write(out)),
        }
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        match input.count("list", MAX_SLICES)? {
            1 => Field::read(input).map(Self::One),
            count => (0..count).map(|_| Field::read(input)).collect::<Result<_, _>>().map(Self::Listed),
        }
    }
}

/// An object without name and copies; the rest of it, as puts and rows bring it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Description {
    pub(super) version: VersionId,
    pub(super) commit_index: LogIndex,
    pub(super) length: u64,
    pub(super) slice_bytes: u32,
    pub(super) data_type: DataType,
    pub(super) group: Option<Arc<str>>,
    pub(super) checksums: Checksums,
    pub(super) pins: u64,
    pub(super) durability: Durability,
    pub(super) copies: Copies,
    pub(super) adopted: bool,
}

fields!(Description {
    version,
    commit_index,
    length,
    slice_bytes,
    data_type,
    group,
    checksums,
    pins,
    durability,
    copies,
    adopted,
});

impl Description {
    /// Whether lengths, slices and checksums fit each other and their bounds.
    pub(super) fn is_sound(&self) -> bool {
        let slices = match self.slice_bytes {
            0 => return false,
            bytes => SliceHeader::slice_count(self.length, bytes) as usize,
        };
        self.length <= crate::object::MAX_OBJECT_BYTES
            && slices <= MAX_SLICES
            && self.checksums.len() == slices
            && u32::try_from(self.pins).is_ok()
            && self.group.as_ref().is_none_or(|group| (1..=super::MAX_GROUP_BYTES).contains(&group.len()))
    }
}

impl Object {
    /// `replicas` has one to [`MAX_REPLICAS`] copies on as many nodes; `description` is sound.
    pub(super) fn new(name: Name, description: Description, replicas: Vec<Replica>) -> Self {
        let replicas = Replicas::of(description.version, replicas);
        Self::with(name, description, replicas)
    }

    fn with(name: Name, description: Description, replicas: Replicas) -> Self {
        let (checksum, checksums) = match description.checksums {
            Checksums::One(checksum) => (checksum, Box::default()),
            Checksums::Listed(checksums) => (0, checksums),
        };
        let more = More { checksums, group: description.group };
        let is_common = more.checksums.is_empty() && more.group.is_none();
        Self {
            name,
            version: description.version,
            commit_index: description.commit_index,
            length: description.length,
            replicas,
            more: (!is_common).then(|| Box::new(more)),
            checksum,
            slice_bytes: description.slice_bytes,
            pins: u32::try_from(description.pins).unwrap_or(u32::MAX),
            data_type: description.data_type,
            durability: description.durability,
            copies: description.copies,
            adopted: description.adopted,
        }
    }

    pub(super) fn describe(&self) -> Description {
        Description {
            version: self.version,
            commit_index: self.commit_index,
            length: self.length,
            slice_bytes: self.slice_bytes,
            data_type: self.data_type,
            group: self.group().cloned(),
            checksums: self.checksums().into(),
            pins: u64::from(self.pins),
            durability: self.durability,
            copies: self.copies,
            adopted: self.adopted,
        }
    }

    pub(super) fn tenant(&self) -> TenantId {
        self.name.tenant()
    }

    pub(super) fn group(&self) -> Option<&Arc<str>> {
        self.more.as_ref()?.group.as_ref()
    }

    /// Computed when it is asked for: eight bytes less an object.
    pub(super) fn hash(&self) -> KeyHash {
        KeyHash::of(self.tenant(), self.name.key_bytes())
    }

    /// Its copies, sorted by id.
    pub(super) fn replicas(&self) -> impl Iterator<Item = Replica> + use<'_> {
        let (own, listed) = match &self.replicas {
            Replicas::Own { reserved, durability } => {
                let own = Replica { id: own_id(self.version), reserved: *reserved, durability: *durability };
                (Some(own), &[][..])
            }
            Replicas::Listed(replicas) => (None, &replicas[..]),
        };
        own.into_iter().chain(listed.iter().copied())
    }

    pub(super) fn replica_count(&self) -> usize {
        match &self.replicas {
            Replicas::Own { .. } => 1,
            Replicas::Listed(replicas) => replicas.len(),
        }
    }

    pub(super) fn replica(&self, id: ReplicaId) -> Option<Replica> {
        self.replicas().find(|replica| replica.id == id)
    }

    pub(super) fn has_replica_on(&self, node: NodeId) -> bool {
        self.replicas().any(|replica| replica.id.node == node)
    }

    pub(super) fn add_replica(&mut self, replica: Replica) {
        let replicas = self.replicas().chain([replica]).collect();
        self.replicas = Replicas::of(self.version, replicas);
    }

    /// Takes one copy away; another one must remain.
    pub(super) fn take_replica(&mut self, id: ReplicaId) {
        let rest = self.replicas().filter(|replica| replica.id != id).collect();
        self.replicas = Replicas::of(self.version, rest);
    }

    pub(super) fn checksums(&self) -> &[u32] {
        match &self.more {
            Some(more) if !more.checksums.is_empty() => &more.checksums,
            _ => std::slice::from_ref(&self.checksum),
        }
    }

    /// What a tenant is charged: logical bytes times copies.
    pub(super) fn charged_bytes(&self) -> u64 {
        self.length * self.replica_count() as u64
    }

    /// Appends all but the name.
    pub(super) fn encode(&self, row: &mut Vec<u8>) {
        row.reserve(96);
        self.describe().write(row);
        (self.replica_count() as u64).write(row);
        self.replicas().for_each(|replica| replica.write(row));
    }

    pub(super) fn decode(name: Name, input: &mut Input<'_>) -> Result<Self, DecodeError> {
        let description = Description::read(input)?;
        let count = u64::read(input)?;
        if !description.is_sound() || !(1..=MAX_REPLICAS as u64).contains(&count) {
            return Err(DecodeError::Value { what: "object", value: count });
        }
        if count == 1 {
            let replicas = Replicas::one(description.version, Replica::read(input)?);
            return Ok(Self::with(name, description, replicas));
        }
        let replicas = (0..count).map(|_| Replica::read(input)).collect::<Result<Vec<_>, _>>()?;
        if !replicas.is_sorted_by(|one, other| one.id.node < other.id.node) {
            return Err(DecodeError::Value { what: "order of replicas", value: count });
        }
        Ok(Self::new(name, description, replicas))
    }
}

impl Replicas {
    fn of(version: VersionId, mut replicas: Vec<Replica>) -> Self {
        if let [replica] = replicas[..] {
            return Self::one(version, replica);
        }
        replicas.sort_unstable_by_key(|replica| replica.id);
        Self::Listed(replicas.into())
    }

    fn one(version: VersionId, replica: Replica) -> Self {
        let Replica { id, reserved, durability } = replica;
        if id == own_id(version) { Self::Own { reserved, durability } } else { Self::Listed([replica].into()) }
    }
}

impl Field for Stamp {
    fn write(&self, out: &mut Vec<u8>) {
        self.0.write(out);
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        u32::read(input).map(Self)
    }
}

fields!(Replica { id, reserved, durability });

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_stays_small() {
        assert_eq!(size_of::<Replica>(), 24);
        assert_eq!(size_of::<Option<Object>>(), 88);
    }

    #[test]
    fn names_of_a_tenant_are_neighbours_in_key_order() {
        let name = |tenant, key: &[u8]| Name::new(TenantId(tenant), &ObjectKey::new(key).expect("legal key"));
        assert!(name(0, &[0xff; 9]) < name(1, b"a"));
        assert!(name(1, b"a") < name(1, b"aa") && name(1, b"aa") < name(1, b"b"));
        assert!(name(1, b"a").is(TenantId(1), b"a") && !name(1, b"a").is(TenantId(2), b"a"));
    }
}
