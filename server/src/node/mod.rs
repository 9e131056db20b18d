//! The node: one service through which every protocol reserves, writes, completes and reads.
//!
//! gRPC, the engine's messages and admin are thin adapters of [`NodeService`]; no type of theirs appears here.
//! Whoever receives a put is its coordinator.

mod types;

pub use types::{
    Freshness, KeyFilter, ListPage, ListedObject, MatchPage, ObjectDescription, ObjectName, ObjectStat, PutDone,
    PutItem, PutOptions, PutOutcome, RangeRequest, RemoveOutcome, ReplicaStat,
};
