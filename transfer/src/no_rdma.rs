//! Stands in for `rdma` where the engine is built without it: no device, no link, and peers are told so.

use std::sync::Arc;
use std::time::Instant;

use crate::error::Failure;
use crate::region::Region;
use crate::settings::{RdmaSettings, Settings};
use crate::transport::{Device, Links};
use crate::wire::Greeting;

/// What an engine has of RDMA: nothing.
pub(crate) struct Rdma;

impl Rdma {
    pub(crate) fn start(_: &RdmaSettings) -> Self {
        Self
    }

    pub(crate) fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }

    pub(crate) fn port_list(&self) -> Vec<u8> {
        Vec::new()
    }

    pub(crate) fn key_list(&self, _: &Arc<Region>) -> Vec<u8> {
        Vec::new()
    }

    pub(crate) fn links(&self, _: &str, _: Greeting, _: u128, _: &Arc<Settings>, _: Instant) -> (Links, Links) {
        (Vec::new(), Vec::new())
    }
}

/// Queue pairs of a peer: none.
#[derive(Default)]
pub(crate) struct Serving(());

impl Serving {
    pub(crate) fn pair(&mut self, _: &Rdma, _: &[u8]) -> Result<Vec<u8>, Failure> {
        Err(Failure::Unreachable)
    }
}

/// Keys of a peer's region: none.
#[derive(Clone, Debug, Default)]
pub(crate) struct RemoteKeys(());

impl RemoteKeys {
    pub(crate) fn decode(_: &[u8]) -> Option<Self> {
        Some(Self(()))
    }
}
