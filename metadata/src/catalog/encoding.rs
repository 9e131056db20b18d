//! Encoding of commands: `version, kind, fields`. Documented in `docs/src/formats/log.md`, which changes with this file.

use std::time::Duration;

use super::codec::{DecodeError, Field, Input, Item, fields, numbered};
use super::command::{
    AddReplicaItem, AdoptItem, Command, CompleteItem, ForgetMode, Labels, MAX_COMMAND_BYTES, NodeAddresses,
    NodeRegistration, ObjectFacts, PinItem, Quota, RemoveItem, ReplicaName, RequestId, SessionId, Setting, TaskFailure,
    TaskId, TaskKind, TaskRequest, TaskStep, TypePolicy, TypeTier,
};

/// Version of the encoding of commands.
pub const COMMAND_VERSION: u8 = 5;

impl Command {
    /// Appends the command's encoding to `out`. Decoding refuses more than [`MAX_COMMAND_BYTES`] or too many items:
    /// who gathers items keeps within the bounds.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(COMMAND_VERSION);
        self.write(out);
    }

    /// The command that exactly these bytes are.
    ///
    /// # Errors
    /// [`DecodeError`] of any kind; nothing is allocated beyond a few times the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        if bytes.len() > MAX_COMMAND_BYTES {
            let length = bytes.len() as u64;
            return Err(DecodeError::TooLong { what: "command", length, maximum: MAX_COMMAND_BYTES });
        }
        let mut input = Input::new(bytes);
        input.version(COMMAND_VERSION)?;
        let command = Self::read(&mut input)?;
        input.finish()?;
        Ok(command)
    }
}

/// Kind numbers and fields of a tagged enum, written once for both directions.
macro_rules! tagged {
    ($type:ident { $($number:literal => $variant:ident $( ( $value:ident ) )? $( { $($field:ident),* } )?),* $(,)? }) => {
        impl Field for $type {
            fn write(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant $(($value))? $({ $($field),* })? => {
                        out.push($number);
                        $($value.write(out);)?
                        $($($field.write(out);)*)?
                    })*
                }
            }
            fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
                Ok(match u8::read(input)? {
                    $($number => {
                        $(let $value = Field::read(input)?;)?
                        $($(let $field = Field::read(input)?;)*)?
                        Self::$variant $(($value))? $({ $($field),* })?
                    })*
                    other => return Err(DecodeError::Value { what: stringify!($type), value: u64::from(other) }),
                })
            }
        }
    };
}

tagged!(Command {
    1 => RegisterNode(registration),
    2 => SetNodeState { node, incarnation, state, term },
    3 => Complete(items),
    4 => Abandon(items),
    5 => AddReplicas(items),
    6 => Adopt(items),
    7 => EndAnnouncement { node, incarnation, lost, last },
    8 => Forget { mode, items },
    9 => Remove(items),
    10 => Pin(items),
    11 => Unpin(items),
    12 => CreateTenant { name, quota },
    13 => DropTenant { tenant },
    14 => SetQuota { tenant, quota },
    15 => Freed { node, through },
    16 => OpenSession { session },
    17 => AcknowledgeSession { session, through },
    18 => ExpireSessions,
    19 => SetSetting(setting),
    20 => RemoveNode { node, incarnation },
    21 => BeginTask(request),
    22 => StepTask { task, step },
    23 => ExpelNode { node, incarnation },
});

tagged!(Setting {
    1 => Rebuilding(rebuilding),
    2 => SessionLifetime(lifetime),
    3 => Type { data_type, policy },
});

tagged!(TaskStep {
    1 => Start,
    2 => Settle,
    3 => Fail(failure),
    4 => Cancel,
});

/// Whole milliseconds as a varint.
impl Field for Duration {
    fn write(&self, out: &mut Vec<u8>) {
        u64::try_from(self.as_millis()).unwrap_or(u64::MAX).write(out);
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        u64::read(input).map(Self::from_millis)
    }
}

impl Field for SessionId {
    fn write(&self, out: &mut Vec<u8>) {
        self.0.write(out);
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        u64::read(input).map(Self)
    }
}

impl Field for TaskId {
    fn write(&self, out: &mut Vec<u8>) {
        self.0.write(out);
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        u64::read(input).map(Self)
    }
}

numbered!(ForgetMode: SurplusOnly, EvenLast, Lost);
numbered!(TaskKind: Copy, Move);
numbered!(TypeTier: Any, Memory, Nvme);
numbered!(TaskFailure:
    ObjectGone, SourceGone, TargetDraining, TargetAbsent, NoSpace, QuotaExceeded, NotCopied, StillNeeded, Expired);
fields!(NodeAddresses { grpc, engine, admin });
fields!(Labels { zone, rack, host });
fields!(NodeRegistration { node, incarnation, addresses, tiers, labels });
fields!(CompleteItem {
    tenant,
    key,
    version,
    length,
    slice_bytes,
    data_type,
    group,
    checksums,
    replicas,
    copies,
    durability,
    upsert,
    pin,
    reserved_at,
    request,
});
fields!(ReplicaName { tenant, key, replica });
fields!(AddReplicaItem { tenant, key, version, replica, durability, reserved_at });
fields!(ObjectFacts { length, slice_bytes, data_type, checksums, commit_index });
fields!(AdoptItem { copy, facts });
fields!(RequestId { session, sequence });
fields!(RemoveItem { tenant, key, version, force, request });
fields!(PinItem { tenant, key, request });
fields!(Quota { bytes, objects });
fields!(TypePolicy { copies, tier, pin, quota_bytes });
fields!(TaskRequest { task, kind, tenant, key, source, targets });

impl Item for CompleteItem {}
impl Item for ReplicaName {}
impl Item for AddReplicaItem {}
impl Item for AdoptItem {}
impl Item for RemoveItem {}
impl Item for PinItem {}
