//! What a node asks the leader beside the log, in bytes: leases, forgets, changes of members; and what nodes ask each other.
//!
//! The leader keeps leases in its memory only, and checks them before a forget is logged; so these go to it as questions.
//! All numbers are little-endian. A question is its kind in one byte and fields in order; keys have their length in two
//! bytes before them. An answer is one status byte, 0 if what was asked was done, and then fields in order.

use std::time::Duration;

use tidepool_metadata::catalog::ForgetMode;
use tidepool_metadata::lease::Leased;
use tidepool_metadata::{Incarnation, LogIndex, NodeId, ObjectKey, ReplicaId, TenantId, VersionId};

use crate::catalog_handle::{ForgetName, Forgotten};
use crate::consensus::{MemberChange, MemberId};
use crate::error::CatalogError;

/// A question to the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    Grant {
        tenant: TenantId,
        duration: Duration,
        keys: Vec<ObjectKey>,
    },
    Renew {
        tenant: TenantId,
        duration: Duration,
        keys: Vec<ObjectKey>,
    },
    Release {
        tenant: TenantId,
        keys: Vec<ObjectKey>,
    },
    Left {
        tenant: TenantId,
        key: ObjectKey,
    },
    Forget {
        mode: ForgetMode,
        names: Vec<ForgetName>,
    },
    Change(MemberChange),
    /// For the node that is asked, whether or not it leads: the server's own words.
    Node(Vec<u8>),
    /// What the leader has granted, for the other voters, and how long it lasts. Has no answer.
    Leased(Vec<(Leased, Duration)>),
}

/// What the leader answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LeaderAnswer {
    /// Leases are granted as of this index.
    Granted(LogIndex),
    /// How long each lasts.
    Durations(Vec<Duration>),
    Released(Vec<bool>),
    Forgotten(LogIndex, Vec<Forgotten>),
    Changed(LogIndex),
    /// Nothing was done, for this reason.
    Refused(Refused),
}

/// Why the leader did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    NotLeader = 1,
    MembersChanging = 2,
    NotCaughtUp = 3,
    NoSuchMember = 4,
    Failed = 5,
}

impl From<Refused> for CatalogError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::NotLeader => Self::NotLeader { leader: None },
            Refused::MembersChanging => Self::MembersChanging,
            Refused::NotCaughtUp => Self::NotCaughtUp,
            Refused::NoSuchMember => Self::NoSuchMember,
            Refused::Failed => Self::OutcomeUnknown,
        }
    }
}

impl From<&CatalogError> for Refused {
    fn from(error: &CatalogError) -> Self {
        match error {
            CatalogError::NotLeader { .. } => Self::NotLeader,
            CatalogError::MembersChanging => Self::MembersChanging,
            CatalogError::NotCaughtUp => Self::NotCaughtUp,
            CatalogError::NoSuchMember => Self::NoSuchMember,
            _ => Self::Failed,
        }
    }
}

struct Out(Vec<u8>);

impl Out {
    fn number(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn small(&mut self, number: u32) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn duration(&mut self, duration: Duration) {
        self.number(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    }

    fn key(&mut self, key: &ObjectKey) {
        let bytes = key.as_bytes();
        self.0.extend_from_slice(&u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_le_bytes());
        self.0.extend_from_slice(bytes);
    }

    fn id(&mut self, node: NodeId, incarnation: Incarnation, sequence: u64) {
        self.small(node.0);
        self.small(incarnation.0);
        self.number(sequence);
    }
}

struct In<'a>(&'a [u8]);

impl<'a> In<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn small(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn number(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn duration(&mut self) -> Option<Duration> {
        self.number().map(Duration::from_millis)
    }

    fn key(&mut self) -> Option<ObjectKey> {
        let length = u16::from_le_bytes(self.take(2)?.try_into().ok()?);
        ObjectKey::new(self.take(length.into())?).ok()
    }

    fn id(&mut self) -> Option<(NodeId, Incarnation, u64)> {
        Some((NodeId(self.small()?), Incarnation(self.small()?), self.number()?))
    }

    /// Items until the end.
    fn rest<A>(&mut self, item: impl Fn(&mut Self) -> Option<A>) -> Option<Vec<A>> {
        let mut items = Vec::new();
        while !self.0.is_empty() {
            items.push(item(self)?);
        }
        Some(items)
    }
}

impl Question {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Out(Vec::new());
        match self {
            Self::Grant { tenant, duration, keys } | Self::Renew { tenant, duration, keys } => {
                out.0.push(if matches!(self, Self::Grant { .. }) { 1 } else { 2 });
                out.small(tenant.0);
                out.duration(*duration);
                keys.iter().for_each(|key| out.key(key));
            }
            Self::Release { tenant, keys } => {
                out.0.push(3);
                out.small(tenant.0);
                keys.iter().for_each(|key| out.key(key));
            }
            Self::Left { tenant, key } => {
                out.0.push(4);
                out.small(tenant.0);
                out.key(key);
            }
            Self::Forget { mode, names } => {
                out.0.extend_from_slice(&[5, *mode as u8]);
                for (tenant, key, version, replica) in names {
                    out.small(tenant.0);
                    out.key(key);
                    out.id(version.node, version.incarnation, version.sequence);
                    out.id(replica.node, replica.incarnation, replica.sequence);
                }
            }
            Self::Leased(leases) => {
                out.0.push(8);
                for (Leased { tenant, version, bytes, .. }, left) in leases {
                    out.small(tenant.0);
                    out.id(version.node, version.incarnation, version.sequence);
                    out.number(*bytes);
                    out.duration(*left);
                }
            }
            Self::Node(words) => {
                out.0.push(7);
                out.0.extend_from_slice(words);
            }
            Self::Change(change) => {
                out.0.push(6);
                match change {
                    MemberChange::Add(member) => {
                        out.0.push(1);
                        out.number(member.number());
                    }
                    MemberChange::Promote(nodes) => {
                        out.0.push(2);
                        nodes.iter().for_each(|node| out.small(node.0));
                    }
                    MemberChange::Remove(node) => {
                        out.0.push(3);
                        out.small(node.0);
                    }
                    MemberChange::Transfer(node) => {
                        out.0.push(4);
                        out.small(node.0);
                    }
                }
            }
        }
        out.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = In(bytes);
        let question = match input.byte()? {
            1 => Self::Grant {
                tenant: TenantId(input.small()?),
                duration: input.duration()?,
                keys: input.rest(In::key)?,
            },
            2 => Self::Renew {
                tenant: TenantId(input.small()?),
                duration: input.duration()?,
                keys: input.rest(In::key)?,
            },
            3 => Self::Release { tenant: TenantId(input.small()?), keys: input.rest(In::key)? },
            4 => Self::Left { tenant: TenantId(input.small()?), key: input.key()? },
            5 => {
                let mode = match input.byte()? {
                    0 => ForgetMode::SurplusOnly,
                    1 => ForgetMode::EvenLast,
                    2 => ForgetMode::Lost,
                    _ => return None,
                };
                let names = input.rest(|input| {
                    let (tenant, key) = (TenantId(input.small()?), input.key()?);
                    let (node, incarnation, sequence) = input.id()?;
                    let version = VersionId { node, incarnation, sequence };
                    let (node, incarnation, sequence) = input.id()?;
                    Some((tenant, key, version, ReplicaId { node, incarnation, sequence }))
                })?;
                Self::Forget { mode, names }
            }
            6 => Self::Change(match input.byte()? {
                1 => {
                    let number = input.number()?;
                    #[expect(clippy::cast_possible_truncation, reason = "two halves")]
                    let (node, life) = (NodeId(number as u32), (number >> 32) as u32);
                    MemberChange::Add(MemberId::new(node, life))
                }
                2 => MemberChange::Promote(input.rest(|input| input.small().map(NodeId))?),
                3 => MemberChange::Remove(NodeId(input.small()?)),
                4 => MemberChange::Transfer(NodeId(input.small()?)),
                _ => return None,
            }),
            7 => Self::Node(std::mem::take(&mut input.0).to_vec()),
            8 => Self::Leased(input.rest(|input| {
                let tenant = TenantId(input.small()?);
                let (node, incarnation, sequence) = input.id()?;
                let version = VersionId { node, incarnation, sequence };
                Some((Leased { tenant, version, bytes: input.number()?, group: None }, input.duration()?))
            })?),
            _ => return None,
        };
        input.0.is_empty().then_some(question)
    }
}

impl LeaderAnswer {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Out(vec![0]);
        match self {
            Self::Granted(index) => {
                out.0.push(1);
                out.number(index.0);
            }
            Self::Durations(durations) => {
                out.0.push(2);
                durations.iter().for_each(|duration| out.duration(*duration));
            }
            Self::Released(released) => {
                out.0.push(3);
                out.0.extend(released.iter().map(|&released| u8::from(released)));
            }
            Self::Forgotten(index, outcomes) => {
                out.0.push(4);
                out.number(index.0);
                out.0.extend(outcomes.iter().map(|outcome| match outcome {
                    Forgotten::Yes => 0,
                    Forgotten::Leased => 1,
                    Forgotten::Pinned => 2,
                    Forgotten::StillNeeded => 3,
                }));
            }
            Self::Changed(index) => {
                out.0.push(5);
                out.number(index.0);
            }
            Self::Refused(refused) => out.0[0] = *refused as u8,
        }
        out.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = In(bytes);
        let refused = match input.byte()? {
            0 => None,
            1 => Some(Refused::NotLeader),
            2 => Some(Refused::MembersChanging),
            3 => Some(Refused::NotCaughtUp),
            4 => Some(Refused::NoSuchMember),
            _ => Some(Refused::Failed),
        };
        if let Some(refused) = refused {
            return Some(Self::Refused(refused));
        }
        let answer = match input.byte()? {
            1 => Self::Granted(LogIndex(input.number()?)),
            2 => Self::Durations(input.rest(In::duration)?),
            3 => Self::Released(input.rest(|input| input.byte().map(|byte| byte == 1))?),
            4 => {
                let index = LogIndex(input.number()?);
                let outcome = |input: &mut In<'_>| match input.byte()? {
                    0 => Some(Forgotten::Yes),
                    1 => Some(Forgotten::Leased),
                    2 => Some(Forgotten::Pinned),
                    3 => Some(Forgotten::StillNeeded),
                    _ => None,
                };
                Self::Forgotten(index, input.rest(outcome)?)
            }
            5 => Self::Changed(LogIndex(input.number()?)),
            _ => return None,
        };
        input.0.is_empty().then_some(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> ObjectKey {
        ObjectKey::new(name.as_bytes()).expect("a key")
    }

    fn questions() -> Vec<Question> {
        let (tenant, duration) = (TenantId(4), Duration::from_millis(5001));
        let keys = vec![key("a"), key(&"k".repeat(1024))];
        let version = VersionId { node: NodeId(u32::MAX), incarnation: Incarnation(3), sequence: 9 };
        let replica = ReplicaId { node: NodeId(2), incarnation: Incarnation(1), sequence: u64::MAX };
        vec![
            Question::Grant { tenant, duration, keys: keys.clone() },
            Question::Renew { tenant, duration, keys: keys.clone() },
            Question::Release { tenant, keys },
            Question::Left { tenant, key: key("a") },
            Question::Forget { mode: ForgetMode::EvenLast, names: vec![(tenant, key("a"), version, replica)] },
            Question::Forget { mode: ForgetMode::SurplusOnly, names: Vec::new() },
            Question::Change(MemberChange::Add(MemberId::new(NodeId(7), 3))),
            Question::Change(MemberChange::Promote(vec![NodeId(7), NodeId(8)])),
            Question::Change(MemberChange::Remove(NodeId(7))),
            Question::Change(MemberChange::Transfer(NodeId(7))),
            Question::Node(b"words".to_vec()),
            Question::Leased(vec![(Leased { tenant, version, bytes: 7, group: None }, duration); 2]),
        ]
    }

    #[test]
    fn questions_are_read_as_written_and_cuts_never_panic() {
        for question in questions() {
            let bytes = question.encode();
            assert_eq!(Question::decode(&bytes), Some(question));
            (0..bytes.len()).for_each(|length| drop(Question::decode(&bytes[..length])));
        }
    }

    #[test]
    fn answers_are_read_as_written_and_cuts_never_panic() {
        let answers = [
            LeaderAnswer::Granted(LogIndex(7)),
            LeaderAnswer::Durations(vec![Duration::ZERO, Duration::from_secs(60)]),
            LeaderAnswer::Released(vec![true, false]),
            LeaderAnswer::Forgotten(LogIndex(1), vec![Forgotten::Yes, Forgotten::Leased, Forgotten::Pinned]),
            LeaderAnswer::Changed(LogIndex(9)),
            LeaderAnswer::Refused(Refused::NotCaughtUp),
        ];
        for answer in answers {
            let bytes = answer.encode();
            (0..bytes.len()).for_each(|length| drop(LeaderAnswer::decode(&bytes[..length])));
            assert_eq!(LeaderAnswer::decode(&bytes), Some(answer));
        }
    }
}
