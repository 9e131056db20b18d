//! Connections between the nodes of a cluster: who is where, how messages get there, how a node comes in.
//!
//! - [`book`]: which node has which address, from what nodes say themselves; kept over restarts.
//! - [`frames`]: what a connection carries.
//! - [`dial`]: outgoing messages, one connection for each node and lane, with bounded queues; what does not fit, or has nowhere
//!   to go, is dropped, as the consensus module expects of a network.
//! - [`accept`]: incoming ones, read only after the caller has proved the cluster's secret ([`handshake`]).
//! - [`join`]: a node without a catalog becomes a learner of a group.
//! - [`forget`]: what is kept of nodes goes when they have gone for good.
//!
//! All of them run on a runtime of their own, so that neither heartbeats nor entries wait for what is done for clients. What other
//! nodes ask beyond consensus is answered on the runtime that serves clients.

mod accept;
mod book;
mod dial;
mod forget;
mod frames;
mod handshake;
mod join;

/// Messages of the protocol between nodes.
#[expect(unreachable_pub, reason = "generated")]
pub(crate) mod wire {
    include!(concat!(env!("OUT_DIR"), "/tidepool.peer.v1.rs"));
}

pub(crate) use accept::PeerApi;
pub(crate) use book::AddressBook;
pub(crate) use dial::{Dialer, greet};
pub(crate) use forget::Forgetter;
pub(crate) use frames::PREFACE;
pub(crate) use handshake::{Myself, Secret, removed};
pub(crate) use join::{Former, join};
