//! The bytes of commands and of image rows: fields one after the other, no names, no padding.
//!
//! Not a general serializer: each format that uses it starts with a version byte of its own.
//! Invariants: one value has one encoding (no overlong varints, no bytes left over), so equal states have equal
//! bytes; nothing is allocated beyond the bytes that are really there; hostile bytes give errors, never panics.
//! Layout of each type: `docs/src/formats/log.md`.

use std::sync::Arc;

use super::command::{
    MAX_COMMAND_ITEMS, MAX_GROUP_BYTES, MAX_NAME_BYTES, MAX_REPLICAS, MAX_SLICES, MAX_TIERS, NewReplica, NodeState,
    TierDescription,
};
use crate::error::KeyError;
use crate::log::{LogIndex, LogTime, Term};
use crate::node::{Incarnation, NodeId, TierKind};
use crate::object::{DataType, Durability, ObjectKey, ReplicaId, TenantId, VersionId};

/// Why bytes are no command or no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end within a field.
    #[error("the bytes end within a field")]
    Truncated,
    /// Bytes are left behind the last field.
    #[error("{count} bytes are left behind the last field")]
    LeftOver {
        /// How many.
        count: usize,
    },
    /// Written by a version of this program that this one does not know.
    #[error("format version {found} is not known; this program reads version {known}")]
    Version {
        /// As read.
        found: u8,
        /// What this program reads.
        known: u8,
    },
    /// A number is outside of what its field may be.
    #[error("{what} cannot be {value}")]
    Value {
        /// The field's type.
        what: &'static str,
        /// As read.
        value: u64,
    },
    /// A list, text or the whole is longer than its bound.
    #[error("{what} of length {length} is longer than {maximum}")]
    TooLong {
        /// The field's type.
        what: &'static str,
        /// As read.
        length: u64,
        /// Its bound.
        maximum: usize,
    },
    /// Bytes that must be text are not UTF-8.
    #[error("a text is not UTF-8")]
    NotText,
    /// An object key is empty or too long.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// What is left to decode.
pub(super) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(DecodeError::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(DecodeError::Truncated)?;
        self.0 = rest;
        Ok(*taken)
    }

    /// All that is left.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    pub(super) fn big_endian_u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn big_endian_u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_be_bytes)
    }

    /// A count, checked against its bound before anything is allocated for it.
    pub(super) fn count(&mut self, what: &'static str, maximum: usize) -> Result<usize, DecodeError> {
        let length = u64::read(self)?;
        match usize::try_from(length) {
            Ok(count) if count <= maximum => Ok(count),
            _ => Err(DecodeError::TooLong { what, length, maximum }),
        }
    }

    /// Checks the version byte that every format starts with.
    pub(super) fn version(&mut self, known: u8) -> Result<(), DecodeError> {
        match u8::read(self)? {
            found if found == known => Ok(()),
            found => Err(DecodeError::Version { found, known }),
        }
    }

    pub(super) fn finish(self) -> Result<(), DecodeError> {
        if self.0.is_empty() { Ok(()) } else { Err(DecodeError::LeftOver { count: self.0.len() }) }
    }
}

/// A value with exactly one encoding.
pub(super) trait Field: Sized {
    /// Appends the value.
    fn write(&self, out: &mut Vec<u8>);
    /// Takes the value from the front of `input`.
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError>;
}

/// What may stand in a list, and how often.
pub(super) trait Item: Field {
    const MAXIMUM: usize = MAX_COMMAND_ITEMS;
}

/// Fields of a struct in the order given.
macro_rules! fields {
    ($type:ty { $($field:ident),* $(,)? }) => {
        impl $crate::catalog::codec::Field for $type {
            fn write(&self, out: &mut Vec<u8>) {
                $($crate::catalog::codec::Field::write(&self.$field, out);)*
            }
            fn read(
                input: &mut $crate::catalog::codec::Input<'_>,
            ) -> Result<Self, $crate::catalog::codec::DecodeError> {
                Ok(Self { $($field: $crate::catalog::codec::Field::read(input)?),* })
            }
        }
    };
}
pub(super) use fields;

/// An enum without fields, as one byte.
macro_rules! numbered {
    ($type:ident: $($variant:ident),* $(,)?) => {
        impl $crate::catalog::codec::Field for $type {
            fn write(&self, out: &mut Vec<u8>) {
                out.push(*self as u8);
            }
            fn read(
                input: &mut $crate::catalog::codec::Input<'_>,
            ) -> Result<Self, $crate::catalog::codec::DecodeError> {
                let number = <u8 as $crate::catalog::codec::Field>::read(input)?;
                $(if number == Self::$variant as u8 { return Ok(Self::$variant); })*
                Err($crate::catalog::codec::DecodeError::Value {
                    what: stringify!($type),
                    value: u64::from(number),
                })
            }
        }
    };
}
pub(super) use numbered;

/// One byte.
impl Field for u8 {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(*self);
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        Ok(input.array::<1>()?[0])
    }
}

/// One byte, 0 or 1.
impl Field for bool {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        match u8::read(input)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(DecodeError::Value { what: "bool", value: u64::from(other) }),
        }
    }
}

/// Four bytes, little-endian: checksums and random ids don't shrink.
impl Field for u32 {
    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_le_bytes());
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        Ok(Self::from_le_bytes(input.array()?))
    }
}

/// LEB128: seven bits a byte, low ones first, the shortest form only.
impl Field for u64 {
    fn write(&self, out: &mut Vec<u8>) {
        let mut rest = *self;
        while rest >= 0x80 {
            out.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        out.push(rest as u8);
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        let mut value = 0;
        for shift in (0..Self::BITS).step_by(7) {
            let byte = u8::read(input)?;
            let bits = Self::from(byte & 0x7f);
            let ends = byte & 0x80 == 0;
            let overflows = (bits << shift) >> shift != bits;
            let overlong = ends && bits == 0 && shift > 0;
            if overflows || overlong {
                break;
            }
            value |= bits << shift;
            if ends {
                return Ok(value);
            }
        }
        Err(DecodeError::Value { what: "varint", value })
    }
}

/// A count or small number that is a `u32` in memory and a varint in bytes.
fn read_small(input: &mut Input<'_>, what: &'static str) -> Result<u32, DecodeError> {
    let value = u64::read(input)?;
    u32::try_from(value).map_err(|_| DecodeError::Value { what, value })
}

macro_rules! small_numbers {
    ($($type:ident),*) => {$(
        impl Field for $type {
            fn write(&self, out: &mut Vec<u8>) {
                u64::from(self.0).write(out);
            }
            fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
                read_small(input, stringify!($type)).map(Self)
            }
        }
    )*};
}
small_numbers!(TenantId, Incarnation);

macro_rules! wrapped {
    ($($type:ident),*) => {$(
        impl Field for $type {
            fn write(&self, out: &mut Vec<u8>) {
                self.0.write(out);
            }
            fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
                Field::read(input).map(Self)
            }
        }
    )*};
}
wrapped!(NodeId, LogIndex, LogTime, Term);

/// One byte: 0 for none, 1 and the value for some.
impl<T: Field> Field for Option<T> {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(u8::from(self.is_some()));
        if let Some(value) = self {
            value.write(out);
        }
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        Ok(if bool::read(input)? { Some(T::read(input)?) } else { None })
    }
}

/// Count, then the items.
impl<T: Item> Field for Vec<T> {
    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u64).write(out);
        self.iter().for_each(|item| item.write(out));
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        let count = input.count("list", T::MAXIMUM)?;
        // Each item takes a byte at least, so a false count cannot reserve more than a few times the input.
        let mut items = Self::with_capacity(count.min(input.0.len()));
        for _ in 0..count {
            items.push(T::read(input)?);
        }
        Ok(items)
    }
}

fn write_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    (bytes.len() as u64).write(out);
    out.extend_from_slice(bytes);
}

fn read_text<'a>(input: &mut Input<'a>, what: &'static str, maximum: usize) -> Result<&'a str, DecodeError> {
    let count = input.count(what, maximum)?;
    std::str::from_utf8(input.take(count)?).map_err(|_| DecodeError::NotText)
}

impl Field for String {
    fn write(&self, out: &mut Vec<u8>) {
        write_bytes(self.as_bytes(), out);
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        read_text(input, "name", MAX_NAME_BYTES).map(Self::from)
    }
}

/// The name of a group.
impl Field for Arc<str> {
    fn write(&self, out: &mut Vec<u8>) {
        write_bytes(self.as_bytes(), out);
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        read_text(input, "group", MAX_GROUP_BYTES).map(Self::from)
    }
}

impl Field for ObjectKey {
    fn write(&self, out: &mut Vec<u8>) {
        write_bytes(self.as_bytes(), out);
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        let count = input.count("key", crate::object::MAX_KEY_BYTES)?;
        Ok(Self::new(input.take(count)?)?)
    }
}

impl Item for u32 {
    const MAXIMUM: usize = MAX_SLICES;
}
impl Item for NodeId {
    const MAXIMUM: usize = MAX_REPLICAS;
}
impl Item for NewReplica {
    const MAXIMUM: usize = MAX_REPLICAS;
}
impl Item for TierDescription {
    const MAXIMUM: usize = MAX_TIERS;
}

fields!(VersionId { node, incarnation, sequence });
fields!(ReplicaId { node, incarnation, sequence });
fields!(NewReplica { replica, durability });
fields!(TierDescription { kind, capacity_bytes });
numbered!(Durability: Memory, Nvme);
numbered!(TierKind: Device, Dram, Nvme);
numbered!(NodeState: Up, Draining, Absent);
numbered!(DataType: Unknown, KvCache, Tensor, Weight, Sample, Activation, Gradient, OptimizerState, Metadata, General);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes_of(value: &impl Field) -> Vec<u8> {
        let mut out = Vec::new();
        value.write(&mut out);
        out
    }

    #[test]
    fn numbers_have_one_encoding() {
        assert_eq!(bytes_of(&300u64), [0xac, 0x02]);
        assert_eq!(bytes_of(&u64::MAX).len(), 10);
        for overlong in [&[0x80, 0x00][..], &[0xff, 0x80, 0x00]] {
            assert!(matches!(u64::read(&mut Input::new(overlong)), Err(DecodeError::Value { .. })));
        }
        let mut too_large = [0xff; 10];
        too_large[9] = 0x02;
        assert!(matches!(u64::read(&mut Input::new(&too_large)), Err(DecodeError::Value { .. })));
        assert_eq!(u64::read(&mut Input::new(&[0x80])), Err(DecodeError::Truncated));
    }

    #[test]
    fn a_false_count_reserves_nothing() {
        let mut claim = bytes_of(&(MAX_SLICES as u64));
        assert_eq!(Vec::<u32>::read(&mut Input::new(&claim)), Err(DecodeError::Truncated));
        claim = bytes_of(&(MAX_SLICES as u64 + 1));
        assert!(matches!(Vec::<u32>::read(&mut Input::new(&claim)), Err(DecodeError::TooLong { .. })));
    }

    proptest! {
        #[test]
        fn numbers_come_back(value: u64) {
            let bytes = bytes_of(&value);
            let mut input = Input::new(&bytes);
            prop_assert_eq!(u64::read(&mut input), Ok(value));
            prop_assert_eq!(input.finish(), Ok(()));
        }
    }
}
