//! The scrubber: reads sealed regions one after another and checks every record, so that damage is found while another
//! replica is still there to repair from.

use std::sync::atomic::Ordering;

use tidepool_metadata::SliceHeader;

use super::format::decode_entries;
use super::location::Location;
use super::reclaim::read_region;
use super::recover::{read_records, walk_bytes};
use super::{NvmeError, NvmeTier};

/// What one step of a scrub found.
#[derive(Clone, Debug, Default)]
pub struct ScrubReport {
    /// Records looked at.
    pub records: usize,
    /// Bytes read.
    pub bytes: u64,
    /// Damaged records; dead ones may be among them, and those that an earlier round found: their bytes lie there until
    /// the region is reclaimed. Their owner drops and releases those that it has, and no others.
    pub damaged: Vec<(SliceHeader, Location)>,
    /// A whole round over the tier is done.
    pub round_is_complete: bool,
}

impl NvmeTier {
    /// Checks the next sealed region, in order of age; one call reads one region. Cancel safe.
    ///
    /// # Errors
    /// The tier is out of service, or the region can't be read.
    pub async fn scrub_step(&self) -> Result<ScrubReport, NvmeError> {
        let core = &self.core;
        core.check()?;
        if let Err(error) = core.check_folder() {
            core.fail(&error);
            return Err(error);
        }
        let after = self.scrubbed_sequence.load(Ordering::Relaxed);
        let next = core.regions.sealed().into_iter().rev().find(|region| region.epoch.sequence > after);
        let Some(sealed) = next else {
            self.scrubbed_sequence.store(0, Ordering::Relaxed);
            return Ok(ScrubReport { round_is_complete: true, ..ScrubReport::default() });
        };
        let at = Location {
            region: sealed.region,
            sequence: sealed.epoch.sequence as u32,
            offset: 0,
            length: 0,
            checksum: 0,
        };
        let Some(_hold) = core.regions.hold(at) else { return Ok(ScrubReport::default()) };
        let image = read_region(core, sealed.region).await?;
        let read = |source| NvmeError::Io { action: "read a region of the nvme tier", source };
        let expected = read_records(core, &sealed).map_err(read)?;
        let found: std::collections::HashSet<u32> =
            decode_entries(&walk_bytes(&image, sealed.epoch).entries).map(|(_, offset, _)| offset).collect();
        let records = expected.len();
        let damaged: Vec<_> = expected.into_iter().filter(|(_, location)| !found.contains(&location.offset)).collect();
        core.stats.corrupt.fetch_add(damaged.len() as u64, Ordering::Relaxed);
        core.stats.scrubbed_bytes.fetch_add(image.len() as u64, Ordering::Relaxed);
        self.scrubbed_sequence.store(sealed.epoch.sequence, Ordering::Relaxed);
        Ok(ScrubReport { records, bytes: image.len() as u64, damaged, round_is_complete: false })
    }
}
