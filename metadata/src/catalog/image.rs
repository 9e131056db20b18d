//! The durable image: the catalog as rows of key and value, and the catalog from its rows.
//!
//! [`Catalog::take_changes`] gives the rows that changed; whoever writes them behind the log keeps their order of
//! taking, and flushes the rows of one taking together or not at all (the first row says up to which entry they are).
//! Keys sort so that a row comes after those it depends on when they are loaded ([`Catalog::load`]). Sums, digests and indexes are not
//! in it: they follow from the objects. Layout: `docs/src/formats/log.md`.
//! A session's answers are part of its row: they come and go with every call, many at a time.

use std::ops::Range;
use std::time::Duration;

use super::codec::{DecodeError, Field, Input, Item, fields};
use super::command::{
    Labels, NodeAddresses, NodeRegistration, NodeState, Quota, SessionId, TaskId, TierDescription, TypePolicy,
};
use super::nodes::{FreeKey, Node};
use super::object::{Name, Object};
use super::outcome::{PinOutcome, RemoveOutcome};
use super::retired::Stamp;
use super::sessions::{Remembered, Session};
use super::settings::Settings;
use super::tasks::Task;
use super::tenants::Tenant;
use super::{Catalog, MAX_ANSWERS, MAX_NODES, MAX_RETIRED, MAX_SESSION_ANSWERS, MAX_SESSIONS, MAX_TENANTS};
use crate::log::{LogIndex, LogTime};
use crate::node::{Incarnation, NodeId};
use crate::object::{DATA_TYPES, DataType, ReplicaId, TenantId};

/// Version of the rows.
const VERSION: u8 = 4;

/// Keys of objects' rows: what is below, they depend on.
pub(super) const OBJECTS: Range<&[u8]> = &[3]..&[4];

/// Key and value of one row; no value: the row is gone.
pub type Row = (Vec<u8>, Option<Vec<u8>>);

/// Why rows are no catalog.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// A row's key or value is damaged, or of another version.
    #[error("decode row {row:02x?}")]
    Row {
        /// Its key.
        row: Vec<u8>,
        /// What is wrong.
        #[source]
        source: DecodeError,
    },
    /// A row is not above the one before it.
    #[error("row {row:02x?} is out of order")]
    Order {
        /// Its key.
        row: Vec<u8>,
    },
    /// A row depends on one that is not there, contradicts another, or is one too many.
    #[error("row {row:02x?} does not fit the rows before it")]
    Inconsistent {
        /// Its key.
        row: Vec<u8>,
    },
    /// There are rows, but not the first one.
    #[error("the image has no first row")]
    NoMeta,
}

/// Names a row, in the order of keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RowKey {
    Meta,
    Node(NodeId),
    Tenant(TenantId),
    Object(Name),
    Free(NodeId, FreeKey),
    Session(SessionId),
    Task(TaskId),
    Retired(ReplicaId),
    Expelled(NodeId),
}

/// The first row.
struct Meta {
    applied: LogIndex,
    time: LogTime,
    next_tenant: TenantId,
    horizon: Stamp,
    rebuilding: bool,
    session_lifetime: Duration,
    types: Vec<TypeRow>,
}
fields!(Meta { applied, time, next_tenant, horizon, rebuilding, session_lifetime, types });

struct TypeRow {
    data_type: DataType,
    policy: TypePolicy,
}
fields!(TypeRow { data_type, policy });

impl Item for TypeRow {
    const MAXIMUM: usize = DATA_TYPES;
}

struct NodeRow {
    incarnation: Incarnation,
    state: NodeState,
    drains: bool,
    announcing: bool,
    addresses: NodeAddresses,
    tiers: Vec<TierDescription>,
    labels: Labels,
}
fields!(NodeRow { incarnation, state, drains, announcing, addresses, tiers, labels });

struct TenantRow {
    name: String,
    quota: Quota,
    dropping: bool,
}
fields!(TenantRow { name, quota, dropping });

struct SessionRow {
    acknowledged: u64,
    used_at: LogTime,
    answers: Vec<(u64, Remembered)>,
}

impl Catalog {
    /// Rows that changed since the last call, each once, as they are now; empty if nothing was applied.
    pub fn take_changes(&mut self) -> Vec<Row> {
        let (rows, placed, gone) = self.changes.take();
        let placed = placed.into_iter().filter_map(|slot| self.objects.occupant(slot));
        // What came back has a row in its new place.
        let gone = gone.into_iter().filter(|name| self.objects.find(name.tenant(), name.key_bytes()).is_none());
        let rows = rows.into_iter().map(|key| (key.encode(), self.row(&key)));
        let placed = placed.map(|object| (object_key(&object.name), Some(object_row(object))));
        rows.chain(placed).chain(gone.map(|name| (object_key(&name), None))).collect()
    }

    /// Every row of the catalog, by key: for checks and small catalogs, since it holds all of them at once.
    #[must_use]
    pub fn rows(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut keys = vec![RowKey::Meta];
        keys.extend(self.nodes.0.keys().map(|&node| RowKey::Node(node)));
        keys.extend(self.tenants.ids().map(RowKey::Tenant));
        keys.extend(self.objects.iter().map(|object| RowKey::Object(object.name.clone())));
        for (&id, node) in &self.nodes.0 {
            keys.extend(node.free_list.keys().map(|&key| RowKey::Free(id, key)));
        }
        keys.extend(self.sessions.by_id.keys().map(|&session| RowKey::Session(session)));
        keys.extend(self.tasks.ids().map(RowKey::Task));
        keys.extend(self.retired.iter().map(|(replica, _)| RowKey::Retired(replica)));
        keys.extend(self.expelled.ids().map(RowKey::Expelled));
        keys.into_iter().map(|key| (key.encode(), self.row(&key).expect("a row that is there"))).collect()
    }

    fn row(&self, key: &RowKey) -> Option<Vec<u8>> {
        match key {
            RowKey::Meta => Some(row(&Meta {
                applied: self.applied,
                time: self.time,
                next_tenant: self.tenants.next,
                horizon: self.retired.horizon(),
                rebuilding: self.settings.rebuilding,
                session_lifetime: self.settings.session_lifetime,
                types: self.settings.type_policies().map(|(data_type, policy)| TypeRow { data_type, policy }).collect(),
            })),
            RowKey::Node(id) => self.nodes.get(*id).map(|node| {
                row(&NodeRow {
                    incarnation: node.incarnation,
                    state: node.state,
                    drains: node.drains,
                    announcing: node.announcing,
                    addresses: node.addresses.clone(),
                    tiers: node.tiers.clone(),
                    labels: node.labels.clone(),
                })
            }),
            RowKey::Tenant(id) => self.tenants.get(*id).map(|tenant| {
                row(&TenantRow { name: tenant.name.clone(), quota: tenant.quota, dropping: tenant.dropping })
            }),
            RowKey::Object(name) => {
                let slot = self.objects.find(name.tenant(), name.key_bytes())?;
                Some(object_row(self.objects.get(slot)))
            }
            RowKey::Free(node, key) => {
                let name = self.nodes.get(*node)?.free_list.get(key)?;
                Some([&[VERSION][..], name.as_bytes()].concat())
            }
            RowKey::Session(id) => self.sessions.by_id.get(id).map(session_row),
            RowKey::Task(id) => self.tasks.get(*id).map(row),
            RowKey::Retired(replica) => self.retired.get(*replica).as_ref().map(row),
            RowKey::Expelled(node) => self.expelled.get(*node).as_ref().map(row),
        }
    }

    /// Reads the first row.
    pub(super) fn load_first(&mut self, key: &[u8], value: &[u8]) -> Result<(), LoadError> {
        if key != RowKey::Meta.encode() {
            return Err(LoadError::NoMeta);
        }
        let meta = decode(value).map_err(|source| LoadError::Row { row: key.to_vec(), source })?;
        if self.load_meta(meta) { Ok(()) } else { Err(LoadError::Inconsistent { row: key.to_vec() }) }
    }

    /// Adds a row that is neither the first nor an object's.
    pub(super) fn load_row(&mut self, key: &[u8], value: &[u8]) -> Result<(), LoadError> {
        match RowKey::decode(key).and_then(|row| self.fits(row, value)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(LoadError::Inconsistent { row: key.to_vec() }),
            Err(source) => Err(LoadError::Row { row: key.to_vec(), source }),
        }
    }

    /// False if it contradicts what every catalog has.
    fn load_meta(&mut self, meta: Meta) -> bool {
        self.applied = meta.applied;
        self.time = meta.time;
        self.tenants.next = meta.next_tenant;
        self.retired.set_horizon(meta.horizon);
        let (rebuilding, session_lifetime) = (meta.rebuilding, meta.session_lifetime);
        self.settings = Settings { rebuilding, session_lifetime, ..Settings::default() };
        for TypeRow { data_type, policy } in &meta.types {
            self.settings.types[*data_type as usize] = *policy;
        }
        // Each once, in their order, and none that says nothing.
        self.tenants.next > TenantId::DEFAULT && self.settings.type_policies().count() == meta.types.len()
    }

    /// Adds one row; false if it does not fit the rows before it.
    fn fits(&mut self, key: RowKey, value: &[u8]) -> Result<bool, DecodeError> {
        Ok(match key {
            // The one comes first, the others apart.
            RowKey::Meta | RowKey::Object(_) => false,
            RowKey::Node(id) => {
                let NodeRow { incarnation, state, drains, announcing, addresses, tiers, labels } = decode(value)?;
                let registration = NodeRegistration { node: id, incarnation, addresses, tiers, labels };
                let mut node = Node::new(registration, state, announcing);
                node.drains = drains;
                self.nodes.0.insert(id, node);
                self.nodes.0.len() <= MAX_NODES
            }
            RowKey::Tenant(id) => {
                let TenantRow { name, quota, dropping } = decode(value)?;
                self.tenants.restore(id, Tenant::new(name, quota, dropping));
                id < self.tenants.next && self.tenants.len() <= MAX_TENANTS && self.tenants.have_distinct_names()
            }
            RowKey::Free(id, key) => {
                let mut input = Input::new(value);
                input.version(VERSION)?;
                let name = Name::decode(input.rest())?;
                self.nodes.0.get_mut(&id).map(|node| node.free_list.insert(key, name)).is_some()
            }
            RowKey::Session(id) => {
                let SessionRow { acknowledged, used_at, answers } = decode_session(value)?;
                let fits = answers.iter().all(|(sequence, _)| *sequence > acknowledged);
                self.sessions.restore(id, Session { acknowledged, used_at, answers: answers.into_iter().collect() });
                fits && self.sessions.len() <= MAX_SESSIONS && self.sessions.remembered() <= MAX_ANSWERS
            }
            RowKey::Task(id) => {
                let task: Task = decode(value)?;
                let is_named = task.is_named(id);
                self.tasks.set(id, task);
                is_named && self.tasks.is_within_bounds()
            }
            RowKey::Retired(replica) => {
                self.retired.restore(replica, decode(value)?);
                self.retired.len() <= MAX_RETIRED
            }
            RowKey::Expelled(node) => self.expelled.restore(node, decode(value)?) && self.nodes.get(node).is_none(),
        })
    }
}

/// The object of one of [`OBJECTS`].
pub(super) fn decode_object(key: &[u8], value: &[u8]) -> Result<Object, DecodeError> {
    let name = Name::decode(&key[OBJECTS.start.len()..])?;
    let mut input = Input::new(value);
    input.version(VERSION)?;
    let object = Object::decode(name, &mut input)?;
    input.finish()?;
    Ok(object)
}

fn row(value: &impl Field) -> Vec<u8> {
    let mut bytes = vec![VERSION];
    value.write(&mut bytes);
    bytes
}

fn object_key(name: &Name) -> Vec<u8> {
    [OBJECTS.start, name.as_bytes()].concat()
}

fn object_row(object: &Object) -> Vec<u8> {
    let mut bytes = vec![VERSION];
    object.encode(&mut bytes);
    bytes
}

/// Answers in order, each by its distance to the one before, or from 0.
fn session_row(session: &Session) -> Vec<u8> {
    let mut bytes = vec![VERSION];
    session.acknowledged.write(&mut bytes);
    session.used_at.write(&mut bytes);
    (session.answers.len() as u64).write(&mut bytes);
    let mut last = 0;
    for (&sequence, answer) in &session.answers {
        (sequence - last).write(&mut bytes);
        answer.write(&mut bytes);
        last = sequence;
    }
    bytes
}

fn decode_session(bytes: &[u8]) -> Result<SessionRow, DecodeError> {
    let mut input = Input::new(bytes);
    input.version(VERSION)?;
    let (acknowledged, used_at, count) = (u64::read(&mut input)?, LogTime::read(&mut input)?, u64::read(&mut input)?);
    if count > MAX_SESSION_ANSWERS as u64 {
        return Err(DecodeError::Value { what: "answers of a session", value: count });
    }
    let (mut answers, mut last) = (Vec::new(), 0_u64);
    for _ in 0..count {
        let distance = u64::read(&mut input)?;
        last = last
            .checked_add(distance)
            .filter(|_| distance > 0)
            .ok_or(DecodeError::Value { what: "sequence of an answer", value: distance })?;
        answers.push((last, Remembered::read(&mut input)?));
    }
    input.finish()?;
    Ok(SessionRow { acknowledged, used_at, answers })
}

fn decode<T: Field>(bytes: &[u8]) -> Result<T, DecodeError> {
    let mut input = Input::new(bytes);
    input.version(VERSION)?;
    let value = T::read(&mut input)?;
    input.finish()?;
    Ok(value)
}

impl RowKey {
    /// Kind, then ids big-endian, so that keys sort as their names do.
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Meta => vec![0],
            Self::Node(node) => [&[1][..], &node.0.to_be_bytes()].concat(),
            Self::Tenant(tenant) => [&[2][..], &tenant.0.to_be_bytes()].concat(),
            Self::Object(name) => object_key(name),
            Self::Free(node, key) => [
                &[4][..],
                &node.0.to_be_bytes(),
                &key.index.0.to_be_bytes(),
                &key.incarnation.0.to_be_bytes(),
                &key.sequence.to_be_bytes(),
            ]
            .concat(),
            Self::Session(session) => [&[5][..], &session.0.to_be_bytes()].concat(),
            Self::Task(task) => [&[6][..], &task.0.to_be_bytes()].concat(),
            Self::Retired(replica) => [
                &[7][..],
                &replica.node.0.to_be_bytes(),
                &replica.incarnation.0.to_be_bytes(),
                &replica.sequence.to_be_bytes(),
            ]
            .concat(),
            Self::Expelled(node) => [&[8][..], &node.0.to_be_bytes()].concat(),
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut input = Input::new(bytes);
        let key = match u8::read(&mut input)? {
            0 => Self::Meta,
            1 => Self::Node(NodeId(input.big_endian_u32()?)),
            2 => Self::Tenant(TenantId(input.big_endian_u32()?)),
            3 => Self::Object(Name::decode(input.rest())?),
            4 => Self::Free(
                NodeId(input.big_endian_u32()?),
                FreeKey {
                    index: LogIndex(input.big_endian_u64()?),
                    incarnation: Incarnation(input.big_endian_u32()?),
                    sequence: input.big_endian_u64()?,
                },
            ),
            5 => Self::Session(SessionId(input.big_endian_u64()?)),
            6 => Self::Task(TaskId(input.big_endian_u64()?)),
            7 => Self::Retired(ReplicaId {
                node: NodeId(input.big_endian_u32()?),
                incarnation: Incarnation(input.big_endian_u32()?),
                sequence: input.big_endian_u64()?,
            }),
            8 => Self::Expelled(NodeId(input.big_endian_u32()?)),
            kind => return Err(DecodeError::Value { what: "kind of row", value: u64::from(kind) }),
        };
        input.finish()?;
        Ok(key)
    }
}

/// Answers as one byte of kind, and what belongs to it.
impl Field for Remembered {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Remove(RemoveOutcome::Removed { version }) => {
                out.push(1);
                version.write(out);
            }
            Self::Remove(RemoveOutcome::Missing) => out.push(2),
            Self::Remove(RemoveOutcome::Pinned) => out.push(3),
            Self::Pin(PinOutcome::Pinned { pins }) => {
                out.push(4);
                pins.write(out);
            }
            Self::Pin(PinOutcome::Missing) => out.push(5),
            Self::Put(Some(version)) => {
                out.push(6);
                version.write(out);
            }
            Self::Put(None) => out.push(7),
            Self::Remove(RemoveOutcome::Refused(_)) | Self::Pin(PinOutcome::Refused(_)) => {
                unreachable!("a refusal is not an answer of an executed item")
            }
        }
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        Ok(match u8::read(input)? {
            1 => Self::Remove(RemoveOutcome::Removed { version: Field::read(input)? }),
            2 => Self::Remove(RemoveOutcome::Missing),
            3 => Self::Remove(RemoveOutcome::Pinned),
            4 => Self::Pin(PinOutcome::Pinned { pins: Field::read(input)? }),
            5 => Self::Pin(PinOutcome::Missing),
            6 => Self::Put(Some(Field::read(input)?)),
            7 => Self::Put(None),
            other => return Err(DecodeError::Value { what: "answer", value: u64::from(other) }),
        })
    }
}
