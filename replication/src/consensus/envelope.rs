//! What goes between the members of a group: Raft's messages, and what makes every member a door to the leader.
//!
//! All numbers are little-endian.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | format version, 1 |
//! | 1 | 1 | kind |
//! | 2 | 8 | cluster |
//! | 10 | 4 | epoch |
//! | 14 | 8 | sender's member number |
//! | 22 | 8 | receiver's member number |
//! | 30 | | body, by kind |
//!
//! The head is compared before anything of the body is looked at: what is meant for another cluster, epoch, or for a log
//! that this node no longer has, is dropped. The bytes come over connections that proved the cluster's secret.

use super::member::MemberId;
use super::{ClusterEpoch, ClusterId};

const VERSION: u8 = 1;
const HEAD_BYTES: usize = 30;

/// A command on its way to the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Forwarded {
    /// Counts what the sender proposes; the same when it is sent again.
    pub(super) sequence: u64,
    pub(super) items: u32,
    pub(super) command: Vec<u8>,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// Raft's own. `sent`: by the sender's clock, if it leads. `heard`: the last `sent` of the receiver that was followed,
    /// and in which term.
    Raft { sent: u64, heard: (u64, u64), message: Vec<u8> },
    /// Commands to log in exactly this term. The sender waits for nothing below `lowest`.
    Forward { term: u64, lowest: u64, commands: Vec<Forwarded> },
    /// The leader has too much to do for these sequences, and will not log them in this term.
    Refuse { term: u64, sequences: Vec<u64> },
    /// Asks from which index a read may be answered.
    ReadIndex { term: u64, ticket: u64 },
    /// Answers it.
    ReadAnswer { ticket: u64, index: u64 },
    /// A question to the receiver's application.
    Ask { ticket: u64, question: Vec<u8> },
    /// Its answer; empty: it can't be answered.
    Answer { ticket: u64, answer: Vec<u8> },
    /// Who sends votes is no member, as of that index.
    Removed { index: u64 },
}

/// A message with its head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Envelope {
    pub(super) from: MemberId,
    pub(super) to: MemberId,
    pub(super) body: Body,
}

/// Which group messages belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) cluster: ClusterId,
    pub(super) epoch: ClusterEpoch,
}

/// Why bytes are no message for this group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unread {
    Version,
    Foreign,
    Malformed,
}

impl Envelope {
    pub(super) fn encode(&self, group: Group) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + 32);
        let kind = match &self.body {
            Body::Raft { .. } => 1,
            Body::Forward { .. } => 2,
            Body::Refuse { .. } => 3,
            Body::ReadIndex { .. } => 4,
            Body::ReadAnswer { .. } => 5,
            Body::Ask { .. } => 6,
            Body::Answer { .. } => 7,
            Body::Removed { .. } => 8,
        };
        out.extend_from_slice(&[VERSION, kind]);
        out.extend_from_slice(&group.cluster.0.to_le_bytes());
        out.extend_from_slice(&group.epoch.0.to_le_bytes());
        numbers(&mut out, &[self.from.0, self.to.0]);
        match &self.body {
            Body::Raft { sent, heard, message } => {
                numbers(&mut out, &[*sent, heard.0, heard.1]);
                out.extend_from_slice(message);
            }
            Body::Forward { term, lowest, commands } => {
                numbers(&mut out, &[*term, *lowest]);
                for Forwarded { sequence, items, command } in commands {
                    numbers(&mut out, &[*sequence]);
                    out.extend_from_slice(&items.to_le_bytes());
                    out.extend_from_slice(&u32::try_from(command.len()).unwrap_or(u32::MAX).to_le_bytes());
                    out.extend_from_slice(command);
                }
            }
            Body::Refuse { term, sequences } => {
                numbers(&mut out, &[*term]);
                numbers(&mut out, sequences);
            }
            Body::ReadIndex { term, ticket } => numbers(&mut out, &[*term, *ticket]),
            Body::ReadAnswer { ticket, index } => numbers(&mut out, &[*ticket, *index]),
            Body::Ask { ticket, question: bytes } | Body::Answer { ticket, answer: bytes } => {
                numbers(&mut out, &[*ticket]);
                out.extend_from_slice(bytes);
            }
            Body::Removed { index } => numbers(&mut out, &[*index]),
        }
        out
    }

    pub(super) fn decode(bytes: &[u8], group: Group) -> Result<Self, Unread> {
        let (&[version, kind], rest) = bytes.split_first_chunk().ok_or(Unread::Malformed)?;
        if version != VERSION {
            return Err(Unread::Version);
        }
        let mut rest = Rest(rest);
        let (cluster, epoch) = (ClusterId(rest.number()?), ClusterEpoch(rest.small()?));
        if (Group { cluster, epoch }) != group {
            return Err(Unread::Foreign);
        }
        let (from, to) = (MemberId(rest.number()?), MemberId(rest.number()?));
        let body = match kind {
            1 => {
                let (sent, heard) = (rest.number()?, (rest.number()?, rest.number()?));
                Body::Raft { sent, heard, message: rest.all() }
            }
            2 => {
                let (term, lowest) = (rest.number()?, rest.number()?);
                let mut commands = Vec::new();
                while !rest.0.is_empty() {
                    let (sequence, items, length) = (rest.number()?, rest.small()?, rest.small()?);
                    commands.push(Forwarded { sequence, items, command: rest.take(length as usize)?.to_vec() });
                }
                Body::Forward { term, lowest, commands }
            }
            3 => {
                let (term, mut sequences) = (rest.number()?, Vec::new());
                while !rest.0.is_empty() {
                    sequences.push(rest.number()?);
                }
                Body::Refuse { term, sequences }
            }
            4 => Body::ReadIndex { term: rest.number()?, ticket: rest.number()? },
            5 => Body::ReadAnswer { ticket: rest.number()?, index: rest.number()? },
            6 => Body::Ask { ticket: rest.number()?, question: rest.all() },
            7 => Body::Answer { ticket: rest.number()?, answer: rest.all() },
            8 => Body::Removed { index: rest.number()? },
            _ => return Err(Unread::Malformed),
        };
        if rest.0.is_empty() { Ok(Self { from, to, body }) } else { Err(Unread::Malformed) }
    }
}

fn numbers(out: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
}

/// What is still to be read.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Unread> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Unread::Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u64, Unread> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("8 bytes")))
    }

    fn small(&mut self) -> Result<u32, Unread> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("4 bytes")))
    }

    fn all(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Group = Group { cluster: ClusterId(7), epoch: ClusterEpoch(2) };

    fn bodies() -> Vec<Body> {
        let command = |sequence, length| Forwarded { sequence, items: 2, command: vec![5; length] };
        vec![
            Body::Raft { sent: 3, heard: (4, 5), message: vec![1, 2, 3] },
            Body::Forward { term: 9, lowest: 3, commands: vec![command(3, 0), command(4, 300)] },
            Body::Refuse { term: 9, sequences: vec![3, 8] },
            Body::ReadIndex { term: 9, ticket: 1 },
            Body::ReadAnswer { ticket: 1, index: 77 },
            Body::Ask { ticket: 6, question: b"where".to_vec() },
            Body::Answer { ticket: 6, answer: Vec::new() },
            Body::Removed { index: 12 },
        ]
    }

    #[test]
    fn every_message_is_read_as_it_was_written() {
        for body in bodies() {
            let envelope = Envelope { from: MemberId(1), to: MemberId(2), body };
            assert_eq!(Envelope::decode(&envelope.encode(GROUP), GROUP), Ok(envelope));
        }
    }

    #[test]
    fn messages_of_other_groups_and_versions_are_not_looked_into() {
        let envelope = Envelope { from: MemberId(1), to: MemberId(2), body: Body::Removed { index: 1 } };
        let mut bytes = envelope.encode(GROUP);
        let others = [Group { cluster: ClusterId(8), ..GROUP }, Group { epoch: ClusterEpoch(3), ..GROUP }];
        assert!(others.into_iter().all(|group| Envelope::decode(&bytes, group) == Err(Unread::Foreign)));
        bytes[0] = 2;
        assert_eq!(Envelope::decode(&bytes, GROUP), Err(Unread::Version));
    }

    #[test]
    fn no_cut_or_flip_panics() {
        for body in bodies() {
            let bytes = Envelope { from: MemberId(1), to: MemberId(2), body }.encode(GROUP);
            for position in 0..bytes.len() {
                let _cut = Envelope::decode(&bytes[..position], GROUP);
                let mut damaged = bytes.clone();
                damaged[position] ^= 0xff;
                let _damaged = Envelope::decode(&damaged, GROUP);
            }
        }
    }
}
