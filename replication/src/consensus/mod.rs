//! A replicated log of commands, driven by raft-rs, and the state machine that it drives.
//!
//! This module never looks into a command: it is bytes from the proposal until [`StateMachine::decode`]. It owns the
//! order of commands, their time stamps, what is durable when, and who may answer a read.
//!
//! ```text
//!  callers ── propose ──> inbox ── Raft thread ──────> apply thread ── outcome ──> callers
//!             (bounded)            stamp, pack,         decode, apply
//!                                  append + fsync         │ take_changes
//!                                      ^ compact          v
//!                                      └─────────── image thread: rows, flush
//! ```
//!
//! Invariants: `compacted <= flushed image <= applied <= committed <= last`; an answered proposal is on disk, applied, and
//! visible to every read that starts later.
//!
//! Failure: an error of the disk, a damaged entry or a panic in one of the threads ends the group with a
//! [`GroupError`](crate::GroupError); it serves nothing from there on, and no failed write is repeated. Crash: a start
//! loads the image and replays the log behind it.
//!
//! What decides is [`Core`], which knows no thread, clock or socket; [`Group`] runs one on threads, over a RocksDB and
//! a [`Transport`]. A simulation runs several under one seed instead: see `docs/src/consensus.md`.

mod apply;
mod ballast;
mod boot;
mod calls;
mod clock;
mod config;
mod core;
mod database;
mod driver;
mod entry;
mod envelope;
#[cfg(fuzzing)]
pub mod fuzzing;
mod group;
mod handle;
mod identity;
mod image;
mod inbox;
mod log;
mod machine;
mod member;
mod shared;
mod snapshot;
mod transport;

pub use self::core::{Change as MemberChange, Commands, Committed, Core, CoreConfig, Host, Now, Peer, TICK, View};
pub use config::{Durability, Formation, GroupConfig, GroupLimits, LeaderReads, Outlives};
pub use group::Group;
pub use handle::{Answerer, Consensus, Read};
pub use identity::{ClusterEpoch, ClusterId};
pub use log::{Behind, LogStore, Outgoing, Position};
pub use machine::{Change, StateMachine};
pub use member::{MemberId, Members};
pub use shared::{GroupStatus, Role};
pub use transport::{Lane, NoTransport, Transport};

#[cfg(test)]
mod tests;
