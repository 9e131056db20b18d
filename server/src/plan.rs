//! From settings to what the parts are built from: defaults that depend on the machine are chosen here.

use std::path::{Path, PathBuf};

use tidepool_metadata::ErrorKind;
use tidepool_metadata::catalog::{Copies, Labels};
use tidepool_replication::replicas::hot::Limits;
use tidepool_replication::replicas::placement::Policy;
use tidepool_tiers::StoreConfig;
use tidepool_tiers::io::EngineChoice;
use tidepool_tiers::io::available_bytes;
use tidepool_tiers::memory::MemoryConfig;
use tidepool_tiers::nvme::{DirectChoice, NvmeConfig, WritePolicy};

use crate::config::{self, Config};
use crate::error::Error;
use crate::folder::DataFolder;
use crate::node::{HotConfig, NodeConfig, RepairConfig};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Where the data lies if nobody says.
#[must_use]
pub(crate) fn default_data_folder() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return "/var/lib/tidepool".into();
    }
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/share"));
    let base = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).or_else(home);
    base.unwrap_or_else(|| ".".into()).join("tidepool")
}

/// What the node in `folder` is built from.
pub(crate) fn node(config: &Config, folder: &DataFolder) -> Result<NodeConfig, Error> {
    let memory = MemoryConfig {
        folder: config.dram.folder.clone(),
        name: format!("tidepool-{}", folder.node()),
        // As it is found from anywhere.
        owner: Some(folder.path().canonicalize().unwrap_or_else(|_| folder.path().to_owned())),
        capacity_bytes: config.dram.capacity.map_or_else(default_dram_bytes, |capacity| capacity.0),
        survive_restart: config.dram.survive_restart,
        node: folder.node(),
        incarnation: folder.incarnation(),
    };
    let nvme = config.nvme.enabled.then(|| nvme(&config.nvme, folder)).transpose()?;
    let store = StoreConfig {
        slice_bytes: u32::try_from(config.store.slice_bytes.0).unwrap_or(u32::MAX),
        watermark_high: config.dram.watermark_high,
        watermark_low: config.dram.watermark_low,
        promote_after_reads: config.store.promote_after_reads,
        eviction: config.dram.eviction,
        heat_file: Some(folder.path().join("heat")),
        scrub_bytes_per_second: config.store.scrub_bytes_per_second.0,
        ..StoreConfig::default()
    };
    let durability = match config.catalog.durability {
        config::Durability::Fsync => tidepool_replication::Durability::Fsync,
        config::Durability::Os => tidepool_replication::Durability::Os,
    };
    let reads = match config.catalog.reads {
        config::Reads::Lease => tidepool_replication::LeaderReads::Lease,
        config::Reads::Quorum => tidepool_replication::LeaderReads::Quorum,
    };
    let max_object_bytes = config.limits.max_object_bytes.0;
    let count = config.replicas.count;
    let copies = Copies::new(count, 1).unwrap_or(Copies::ONE);
    let placement = match config.replicas.placement {
        config::Placement::TwoChoices => Policy::TwoChoices,
        config::Placement::FreeFirst => Policy::FreeFirst,
        config::Placement::NvmeFreeFirst => Policy::NvmeFreeFirst,
        config::Placement::LocalFirst => Policy::LocalFirst,
    };
    let repair = RepairConfig {
        grace: config.replicas.repair_grace.0,
        bytes_per_second: config.replicas.repair_bytes_per_second.0,
    };
    let hot = HotConfig {
        limits: Limits { copies: config.replicas.hot_copies, reads_per_second: config.replicas.hot_reads_per_second },
        dram_share: config.replicas.hot_share,
    };
    let config::Labels { zone, rack, host } = config.labels.clone();
    let labels = Labels { zone, rack, host: host.unwrap_or_else(boot_id) };
    let voters = config.cluster.voters;
    Ok(NodeConfig {
        memory,
        nvme,
        store,
        durability,
        reads,
        max_object_bytes,
        voters,
        copies,
        placement,
        repair,
        hot,
        labels,
    })
}

/// Of this host, or empty if the system does not say.
pub(crate) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

fn nvme(settings: &config::Nvme, folder: &DataFolder) -> Result<NvmeConfig, Error> {
    let path = settings.path.clone().unwrap_or_else(|| folder.path().join("nvme"));
    let capacity_bytes = match settings.capacity {
        Some(capacity) => capacity.0,
        None => default_nvme_bytes(&path, settings.region_bytes.0)?,
    };
    Ok(NvmeConfig {
        path,
        capacity_bytes,
        region_bytes: settings.region_bytes.0,
        queue_depth: settings.queue_depth,
        engine: match settings.engine {
            config::NvmeEngine::Auto => EngineChoice::Auto,
            config::NvmeEngine::IoUring => EngineChoice::IoUring,
            config::NvmeEngine::Blocking => EngineChoice::Blocking,
        },
        direct: match settings.direct {
            config::DirectIo::Auto => DirectChoice::Auto,
            config::DirectIo::On => DirectChoice::On,
            config::DirectIo::Off => DirectChoice::Off,
        },
        write_policy: match settings.write_policy {
            config::NvmeWrites::OnEvict => WritePolicy::OnEvict,
            config::NvmeWrites::WriteThrough => WritePolicy::WriteThrough,
            config::NvmeWrites::Never => WritePolicy::Never,
        },
        watermark_high: settings.watermark_high,
        watermark_low: settings.watermark_low,
        ..NvmeConfig::default()
    })
}

/// A quarter of what can be had, within bounds.
fn default_dram_bytes() -> u64 {
    let available = available_bytes().unwrap_or(GIB);
    (available / 4).clamp(256 * MIB, 64 * GIB) / MIB * MIB
}

/// A tenth of the free space where the tier will lie, at most 32 GiB, at least four regions. What an existing tier
/// takes counts as free, so that the default is the same after a restart.
fn default_nvme_bytes(path: &Path, region_bytes: u64) -> Result<u64, Error> {
    let existing = std::fs::metadata(path.join("regions.dat")).map_or(0, |file| file.len());
    if existing > 0 {
        return Ok(existing);
    }
    let place = path.ancestors().find(|place| place.exists()).unwrap_or(path);
    let stat = rustix::fs::statvfs(place).map_err(|error| {
        let message = format!("nvme.path = {}: read free space: {error}", path.display());
        Error::new(ErrorKind::Invalid, "NVME_UNUSABLE", message).field("nvme.path")
    })?;
    let free = stat.f_bavail * stat.f_frsize;
    let least = NvmeConfig::MIN_REGIONS * region_bytes + MIB;
    Ok((free / 10 / MIB * MIB).min(32 * GIB).max(least))
}
