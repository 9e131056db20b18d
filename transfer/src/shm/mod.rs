//! Transfers as copies between memory of processes on one host.
//!
//! Peers find each other by their greeting: same boot id, and a unix socket whose random name only a greeting tells.
//! Over it the memfd of a region is passed to holders of its key, read-only unless they may write, and mapped after a
//! check that it can't shrink ([`discover`]). From then on a transfer is a copy by the thread that asks; the peer's
//! processors are not needed, nor is its attention.
//!
//! That a region is still registered is on the peer's [`Board`], looked at before and after each copy: a copy that
//! overlapped with the end of a registration is a failure, not success with somebody else's bytes. That the peer's
//! process still lives is seen on a connection that is held for nothing else, at most 10 ms late.

pub(crate) mod board;
pub(crate) mod discover;
mod link;

pub(crate) use board::Board;
pub(crate) use link::ShmLink;
