//! Settings of one NVMe tier instance.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::NvmeError;
use crate::io::{EngineChoice, PAGE_BYTES};

/// When slices are written to the tier; the store above acts on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WritePolicy {
    /// When DRAM needs the room.
    #[default]
    OnEvict,
    /// With each put.
    WriteThrough,
    /// Never; what is there can be read.
    Never,
}

/// Whether the page cache is passed by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DirectChoice {
    /// If the file system can do it; what holds is logged and shown.
    #[default]
    Auto,
    /// Or the tier doesn't start.
    On,
    /// Through the page cache: for file systems without direct I/O. Its memory is outside our budget.
    Off,
}

/// Settings of one NVMe tier. Every field has a default but `path` and `capacity_bytes`, which the caller sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NvmeConfig {
    /// Folder of this instance; made if missing. Nothing else may live in it.
    pub path: PathBuf,
    /// Hard cap on disk use in bytes, preallocated; at least 8 regions. More than the disk has is reduced with a
    /// warning.
    pub capacity_bytes: u64,
    /// Unit of writing, syncing and reclaim, in bytes: a multiple of 4096, 256 KiB to 256 MiB; a slice must fit in
    /// one. Three buffers of this size are held. Applies to a new folder only. Smaller: more syncs; larger: more
    /// memory, coarser reclaim.
    pub region_bytes: u64,
    /// Operations in flight, each for reads and for writes: 1 to 1024. Low values leave the device idle, high ones
    /// only add waiting.
    pub queue_depth: u32,
    /// How I/O is done.
    pub engine: EngineChoice,
    /// Whether the page cache is passed by.
    pub direct: DirectChoice,
    /// When slices are written here; acted on by the store.
    pub write_policy: WritePolicy,
    /// Fraction of regions in use at which reclaim starts, above 0.5 and below 1. At least three regions are kept
    /// free whatever it says. Higher: writes wait for reclaim more often.
    pub watermark_high: f64,
    /// Fraction of regions in use at which reclaim stops, at most `watermark_high`.
    pub watermark_low: f64,
    /// Bytes of buffers kept for reads that can't land in place, 1 MiB to 1 GiB.
    pub read_buffer_bytes: u64,
}

impl NvmeConfig {
    /// Bytes of disk that the smallest tier has, in regions.
    pub const MIN_REGIONS: u64 = 8;

    /// The defaults for a folder and a capacity.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, capacity_bytes: u64) -> Self {
        Self { path: path.into(), capacity_bytes, ..Self::default() }
    }

    /// Refuses settings out of bounds, naming field, value and bounds.
    ///
    /// # Errors
    /// [`NvmeError::Setting`] for the first that is wrong.
    pub fn validate(&self) -> Result<(), NvmeError> {
        let check = |field, value: u64, min: u64, max: u64| match (min..=max).contains(&value) {
            true => Ok(()),
            false => Err(NvmeError::Setting { field, value: value.to_string(), bounds: format!("{min} to {max}") }),
        };
        check("region_bytes", self.region_bytes, 256 << 10, 256 << 20)?;
        if !self.region_bytes.is_multiple_of(PAGE_BYTES as u64) {
            let bounds = format!("a multiple of {PAGE_BYTES}");
            return Err(NvmeError::Setting { field: "region_bytes", value: self.region_bytes.to_string(), bounds });
        }
        check("queue_depth", u64::from(self.queue_depth), 1, 1024)?;
        let least = Self::MIN_REGIONS * self.region_bytes + super::format::REGIONS_START;
        check("capacity_bytes", self.capacity_bytes, least, 1 << 50)?;
        check("read_buffer_bytes", self.read_buffer_bytes, 1 << 20, 1 << 30)?;
        let fraction = |field, value: f64, min: f64, max: f64| match value > min && value <= max {
            true => Ok(()),
            false => {
                Err(NvmeError::Setting { field, value: value.to_string(), bounds: format!("above {min}, to {max}") })
            }
        };
        fraction("watermark_high", self.watermark_high, 0.5, 0.999)?;
        fraction("watermark_low", self.watermark_low, 0.25, self.watermark_high)
    }
}

impl Default for NvmeConfig {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            capacity_bytes: 32 << 30,
            region_bytes: 16 << 20,
            queue_depth: 64,
            engine: EngineChoice::Auto,
            direct: DirectChoice::Auto,
            write_policy: WritePolicy::OnEvict,
            watermark_high: 0.98,
            watermark_low: 0.97,
            read_buffer_bytes: 32 << 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_values_are_named_with_their_bounds() {
        let good = NvmeConfig::new("/x", 1 << 30);
        assert!(good.validate().is_ok());
        let refused = |config: NvmeConfig| config.validate().expect_err("out of bounds").to_string();
        assert!(refused(NvmeConfig { region_bytes: 1000, ..good.clone() }).contains("region_bytes"));
        assert!(refused(NvmeConfig { region_bytes: (1 << 20) + 1, ..good.clone() }).contains("multiple of 4096"));
        assert!(refused(NvmeConfig { capacity_bytes: 1 << 20, ..good.clone() }).contains("capacity_bytes"));
        assert!(refused(NvmeConfig { queue_depth: 0, ..good.clone() }).contains("1 to 1024"));
        assert!(refused(NvmeConfig { watermark_low: 0.99, ..good.clone() }).contains("watermark_low"));
        assert!(refused(NvmeConfig { watermark_high: f64::NAN, ..good }).contains("watermark_high"));
    }
}
