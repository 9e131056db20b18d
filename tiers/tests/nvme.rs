//! The NVMe tier on real files: what is written is read back, by either engine, before and after a restart.
#![expect(clippy::unwrap_used, reason = "tests")]

mod nvme_support;

use std::sync::Arc;

use nvme_support::*;
use tidepool_tiers::io::{EngineChoice, EngineKind, Landing};
use tidepool_tiers::nvme::{DirectChoice, NvmeConfig, NvmeError, NvmeTier, TierState, VecTarget};

fn config(folder: &tempfile::TempDir) -> NvmeConfig {
    NvmeConfig { region_bytes: 1 << 20, ..NvmeConfig::new(folder.path(), 17 << 20) }
}

#[tokio::test]
async fn slices_are_read_back_before_and_after_a_restart_by_either_engine() {
    for engine in [EngineChoice::Auto, EngineChoice::Blocking] {
        let folder = tempfile::tempdir().unwrap();
        let config = NvmeConfig { engine, ..config(&folder) };
        let tier = NvmeTier::open(config.clone(), NODE).unwrap();
        let mut stored = Vec::new();
        for (number, length) in [0, 1, 511, 4096, 65535, 65536, 65537, 200_000, 900_000].into_iter().enumerate() {
            stored.push(store(&tier, number as u64, length).await);
        }
        for slice in &stored {
            assert_readable(&tier, slice).await;
        }
        tier.close().await.unwrap();
        drop(tier);
        let tier = NvmeTier::open(config, NODE).unwrap();
        assert_eq!(tier.recovered().walked_regions, 0, "a clean stop leaves footers");
        let found = scan_all(&tier).await;
        assert_eq!(found.len(), stored.len());
        for slice in &stored {
            assert_eq!(found[&slice.header.version.sequence], (slice.header.clone(), slice.location));
            assert_readable(&tier, slice).await;
        }
    }
}

#[tokio::test]
async fn unsynced_slices_of_a_killed_process_are_found_by_a_walk() {
    let folder = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(config(&folder), NODE).unwrap();
    let slices = store_many(&tier, 0..50, 10_000).await;
    drop(tier);
    let tier = NvmeTier::open(config(&folder), NODE).unwrap();
    assert_eq!(tier.recovered().walked_regions, 1);
    assert_eq!(tier.usage().used_bytes, slices.iter().map(|slice| u64::from(slice.location.record_bytes())).sum());
    assert_eq!(scan_all(&tier).await.len(), 50);
    for slice in &slices {
        assert_readable(&tier, slice).await;
    }
    drop(tier);
    let tier = NvmeTier::open(config(&folder), NODE).unwrap();
    assert_eq!(tier.recovered().walked_regions, 0, "the walked region got a footer");
    assert_eq!(scan_all(&tier).await.len(), 50);
}

#[tokio::test]
async fn ranges_are_exact_and_verified() {
    let folder = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(config(&folder), NODE).unwrap();
    for length in [5_u32, 5000, 65536, 300_000] {
        let slice = store(&tier, u64::from(length), length as usize).await;
        let all = bytes_of(slice.header.version.sequence, length as usize);
        let mut starts = vec![0, 1, length / 3, length];
        starts.extend([4096, 65535, 65536, 131_072].into_iter().filter(|&start| start < length));
        for &start in &starts {
            for end in [start, (start + 1).min(length), (start + 65536).min(length), length] {
                let target = VecTarget::new((end - start) as usize);
                let (_, target) = tier.read(slice.location, slice.name(), start..end, target).await.unwrap();
                assert_eq!(target.into_vec(), &all[start as usize..end as usize], "{start}..{end} of {length}");
            }
        }
        let beyond = tier.read(slice.location, slice.name(), 0..length + 1, VecTarget::new(9)).await;
        assert!(matches!(beyond, Err(NvmeError::Range { .. })));
    }
}

/// A target of page-aligned memory in pieces, as an object in several extents has.
struct Pieces {
    memory: Vec<tidepool_tiers::io::Block>,
    filled: usize,
}

impl Pieces {
    fn new(lengths: &[usize]) -> Self {
        let block = |&length: &usize| {
            let mut block = tidepool_tiers::io::Block::new(length);
            block.truncate(length);
            block
        };
        Self { memory: lengths.iter().map(block).collect(), filled: 0 }
    }
}

impl Landing for Pieces {
    fn spare(&mut self) -> &mut [u8] {
        let mut skip = self.filled;
        for block in &mut self.memory {
            if skip < block.len() {
                return &mut block[skip..];
            }
            skip -= block.len();
        }
        &mut []
    }

    fn advance(&mut self, count: usize) {
        self.filled += count;
    }
}

#[tokio::test]
async fn reads_land_in_place_in_one_or_several_extents() {
    let folder = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(config(&folder), NODE).unwrap();
    let length = 300_000_usize;
    let slice = store(&tier, 1, length).await;
    let expected = bytes_of(1, length);
    for lengths in [
        vec![length],
        vec![100 * 4096 / 2, length - 50 * 4096],
        vec![4096, 65536, length - 69632],
        vec![1000, length - 1000],
    ] {
        let target = Pieces::new(&lengths);
        let (header, target) = tier.read(slice.location, slice.name(), 0..length as u32, target).await.unwrap();
        assert_eq!(header, slice.header);
        let got: Vec<u8> = target.memory.iter().flat_map(|block| block.iter().copied()).collect();
        assert_eq!(got, expected, "{lengths:?}");
        assert_eq!(target.filled, length);
    }
    let target = Pieces::new(&[length - 131_072]);
    let (_, target) = tier.read(slice.location, slice.name(), 131_072..length as u32, target).await.unwrap();
    assert_eq!(&target.memory[0][..], &expected[131_072..]);
}

#[tokio::test]
async fn removed_objects_do_not_return_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(config(&folder), NODE).unwrap();
    let slices = store_many(&tier, 0..200, 5000).await;
    for slice in slices.iter().filter(|slice| slice.header.version.sequence % 3 == 0) {
        tier.release(slice.location);
    }
    tier.sync().await.unwrap();
    let used = tier.usage().used_bytes;
    drop(tier);
    for _ in 0..2 {
        let tier = NvmeTier::open(config(&folder), NODE).unwrap();
        assert_eq!(tier.usage().used_bytes, used);
        let found = scan_all(&tier).await;
        assert!(found.keys().all(|sequence| sequence % 3 != 0));
        assert_eq!(found.len(), 133);
        tier.close().await.unwrap();
    }
}

#[tokio::test]
async fn a_second_process_on_the_same_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(config(&folder), NODE).unwrap();
    assert!(matches!(NvmeTier::open(config(&folder), NODE), Err(NvmeError::Locked { .. })));
    drop(tier);
    assert!(NvmeTier::open(config(&folder), NODE).is_ok());
}

/// Or a disk could not be attached again while a read of its former life is under way.
#[tokio::test]
async fn a_closed_tier_has_given_up_its_folder_whoever_still_has_it() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        let tier = NvmeTier::open(config(&folder), NODE).unwrap();
        store(&tier, 1, 100_000).await;
        tier.close().await.unwrap();
        let again = NvmeTier::open(config(&folder), NODE).unwrap();
        assert!(again.usage().used_bytes > 0);
        drop((tier, again));
    }
}

#[tokio::test]
async fn the_engine_in_use_is_visible() {
    let folder = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(NvmeConfig { engine: EngineChoice::Blocking, ..config(&folder) }, NODE).unwrap();
    assert_eq!((tier.engine(), tier.state()), (EngineKind::Blocking, TierState::Serving));
    drop(tier);
    let tier = NvmeTier::open(NvmeConfig { direct: DirectChoice::Off, ..config(&folder) }, NODE).unwrap();
    assert!(!tier.is_direct());
    let slice = store(&tier, 1, 100_000).await;
    assert_readable(&tier, &slice).await;
}

#[tokio::test]
async fn a_slice_that_is_not_what_its_header_says_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(config(&folder), NODE).unwrap();
    let good = header(1, 1000);
    for bytes in [bytes_of(2, 1000), bytes_of(1, 999), bytes_of(1, 1001)] {
        let refused = tier.write(good.clone(), Arc::new(bytes)).await;
        assert!(matches!(refused, Err(NvmeError::SourceMismatch { .. })));
    }
    let length = tier.max_slice_bytes() + 1;
    let too_large = tier.write(header(1, length as usize), Arc::new(bytes_of(1, length as usize))).await;
    assert!(matches!(too_large, Err(NvmeError::TooLarge { .. })));
    let longest = store(&tier, 3, tier.max_slice_bytes() as usize).await;
    assert_readable(&tier, &longest).await;
    let usage = tier.usage();
    assert_eq!(usage.reserved_bytes, 0);
    assert_eq!(usage.used_bytes, u64::from(longest.location.record_bytes()));
}
