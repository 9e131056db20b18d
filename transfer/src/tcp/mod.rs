//! Transfers as frames over TCP.
//!
//! A [`link`] has a few lanes, each one connection. A [`lane`] is driven by one thread at a time: a caller that waits,
//! or one of the link's workers. At the peer, a thread of its own serves each connection (`serve`), so that reads and
//! writes need nothing of the program that registered the memory. Bytes are received straight where they belong.

mod lane;
mod link;

pub(crate) use link::{TcpLink, data_greeting};
