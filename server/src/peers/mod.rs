//! Connections between the nodes of a cluster: who is where, how messages get there, how a node comes in.
//!
//! - [`book`]: which node has which address, from what nodes say themselves; kept over restarts.
//! - [`dial`]: outgoing messages, one connection for each node and lane, with bounded queues; what does not fit, or has nowhere
//!   to go, is dropped, as the consensus module expects of a network.
//! - [`accept`]: incoming ones, read only after the caller has proved the cluster's secret ([`handshake`]).
//! - [`join`]: a node without a catalog becomes a learner of a group.
//! - [`forget`]: what is kept of nodes goes when they have gone for good.
//!
//! Outgoing connections run on a runtime of their own, so that heartbeats do not wait for data.

mod accept;
mod book;
mod dial;
mod forget;
mod handshake;
mod join;

/// Messages and stubs of the protocol between nodes.
#[expect(clippy::allow_attributes, unreachable_pub, unused_qualifications, reason = "generated")]
pub(crate) mod wire {
    include!(concat!(env!("OUT_DIR"), "/tidepool.peer.v1.rs"));
}

pub(crate) use accept::PeerApi;
pub(crate) use book::AddressBook;
pub(crate) use dial::{Dialer, greet};
pub(crate) use forget::Forgetter;
pub(crate) use handshake::{Myself, Secret};
pub(crate) use join::{Former, join};
