//! The NVMe tier of a running instance: taken out of service, and put into service with another folder or capacity.

use std::path::PathBuf;

use tidepool_metadata::ErrorKind;
use tidepool_tiers::nvme::{NvmeConfig, NvmeTier};

use crate::error::Error;
use crate::node::NodeService;

/// The tier, and what the instance's settings say of it. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Disk {
    service: NodeService,
    settings: Option<NvmeConfig>,
}

impl Disk {
    /// `settings`: `None` if the instance was started without such a tier.
    pub(crate) fn new(service: NodeService, settings: Option<NvmeConfig>) -> Self {
        Self { service, settings }
    }

    /// Opens the tier in `path` with that capacity, each as in the settings if it is not given, and takes over what is found
    /// there. Answers how many records that are.
    ///
    /// # Errors
    /// `BAD_CONFIG` if the settings have no such tier; `NVME_UNUSABLE`; that one is attached already.
    pub(crate) async fn attach(&self, path: Option<PathBuf>, capacity_bytes: Option<u64>) -> Result<u64, Error> {
        let Some(mut config) = self.settings.clone() else {
            let message = "the node runs with nvme.enabled = false: restart it with true";
            return Err(Error::new(ErrorKind::Invalid, "BAD_CONFIG", message.into()).field("nvme.enabled"));
        };
        if let Some(path) = path {
            config.path = path;
        }
        if let Some(capacity_bytes) = capacity_bytes {
            config.capacity_bytes = capacity_bytes;
        }
        let (node, _) = self.service.identity();
        let writes = config.write_policy;
        let opened = tokio::task::spawn_blocking(move || NvmeTier::open(config, node)).await;
        let opened = opened.map_err(|panic| Error::new(ErrorKind::Internal, "INTERNAL", panic.to_string()))?;
        let nvme = opened.map_err(|error| Error::new(ErrorKind::Invalid, "NVME_UNUSABLE", error.to_string()))?;
        Ok(self.service.store().attach_nvme(nvme, writes).await?)
    }

    /// Seals the tier and lets go of its folder: what is only there answers *unavailable* until it is attached again.
    ///
    /// # Errors
    /// That there is none.
    pub(crate) async fn detach(&self) -> Result<(), Error> {
        Ok(self.service.store().detach_nvme().await?)
    }
}
