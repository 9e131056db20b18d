//! The DRAM tier beside memcpy, with slices of 1 MiB and their checksums.
//!
//! Source and target are as cold on both sides: each side walks through buffers far larger than any cache.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidepool_metadata::{DataType, Incarnation, NodeId, ObjectKey, ReplicaId, SliceHeader, TenantId, VersionId};
use tidepool_tiers::memory::{MemoryConfig, MemoryTier, SharedSlice, Slice};

use super::pairs::{self, Sample};
use super::{BenchOptions, Error, Figure};

const SLICE_BYTES: usize = 1 << 20;
/// Of each buffer: colder than any cache.
const SLICES: usize = 512;
const NODE: NodeId = NodeId(1);
const LIFE: Incarnation = Incarnation(1);

/// Runs puts, copying gets and verified views.
///
/// # Errors
/// If there is not the memory for it (about 3 GiB), or a byte is wrong.
pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let tier = open()?;
    let source: Vec<u8> = (0..SLICES * SLICE_BYTES).map(|position| (position * 31 % 251) as u8).collect();
    let mut target = vec![1; SLICES * SLICE_BYTES];
    let mut slices: Vec<SharedSlice> = Vec::new();
    for number in 0..SLICES {
        slices.push(put(&tier, &source, number)?);
    }

    let mut copied = Walk::default();
    let mut limit = {
        let source = &source;
        move |target: &mut [u8]| {
            copied.sample(options.side(), |number| {
                part_mut(target, number).copy_from_slice(part(source, number));
                Ok(())
            })
        }
    };

    let mut walk = Walk::default();
    let puts = pairs::measure(
        options.pairs(),
        || {
            walk.sample(options.side(), |number| {
                // The one that it replaces goes first: its pages are as cold as memcpy's target.
                drop(slices.swap_remove(number));
                slices.push(put(&tier, &source, number)?);
                let last = slices.len() - 1;
                slices.swap(number, last);
                Ok(())
            })
        },
        || limit(&mut target),
    )?;

    let mut walk = Walk::default();
    let mut received = vec![1; SLICES * SLICE_BYTES];
    let gets = pairs::measure(
        options.pairs(),
        || {
            walk.sample(options.side(), |number| {
                slices[number].copy_to(0..SLICE_BYTES as u32, part_mut(&mut received, number)).map_err(Error::from)
            })
        },
        || limit(&mut target),
    )?;
    if received != source {
        return Err("bytes that were read are not those that were written".into());
    }

    let mut walk = Walk::default();
    let views = pairs::measure(
        options.pairs(),
        || walk.sample(options.side(), |number| view(&slices[number])),
        || limit(&mut target),
    )?;
    drop(slices);
    tier.close(false);
    Ok(vec![
        Figure::pairs("put of 1 MiB, beside cold memcpy", puts, 0.65),
        Figure::pairs("copying get of 1 MiB, beside cold memcpy", gets, 0.75),
        Figure::pairs("leased view of 1 MiB, verified, beside memcpy", views, 1.2),
    ])
}

fn open() -> Result<Arc<MemoryTier>, Error> {
    let config = MemoryConfig {
        folder: None,
        name: format!("tidepool-bench-{}", std::process::id()),
        owner: None,
        // A page more a slice for the checksums of its chunks, and one slice more than there are at a time.
        capacity_bytes: ((SLICES + 1) * (SLICE_BYTES + 4096)) as u64,
        survive_restart: false,
        node: NODE,
        incarnation: LIFE,
    };
    Ok(MemoryTier::open(&config)?.0)
}

fn put(tier: &Arc<MemoryTier>, source: &[u8], number: usize) -> Result<SharedSlice, Error> {
    let mut buffer = tier.reserve(SLICE_BYTES as u32, 20)?;
    buffer.append(part(source, number));
    let sequence = number as u64;
    let slice = buffer.seal(SliceHeader {
        tenant: TenantId::DEFAULT,
        key: ObjectKey::new(format!("bench/{number}").as_bytes())?,
        version: VersionId { node: NODE, incarnation: LIFE, sequence },
        replica: ReplicaId { node: NODE, incarnation: LIFE, sequence },
        object_length: SLICE_BYTES as u64,
        slice_bytes: SLICE_BYTES as u32,
        slice_index: 0,
        slice_length: SLICE_BYTES as u32,
        checksum: 0,
        data_type: DataType::KvCache,
        commit_index: 0,
    });
    slice.complete(1 + sequence);
    Ok(slice)
}

/// What a reader in this process does: verifies, then has the bytes without a copy.
fn view(slice: &SharedSlice) -> Result<(), Error> {
    slice.verify(0..SLICE_BYTES as u32)?;
    let length: usize = Slice::bytes(slice, 0..SLICE_BYTES as u32).map(|bytes| std::hint::black_box(bytes).len()).sum();
    assert_eq!(length, SLICE_BYTES);
    Ok(())
}

fn part(buffer: &[u8], number: usize) -> &[u8] {
    &buffer[number * SLICE_BYTES..][..SLICE_BYTES]
}

fn part_mut(buffer: &mut [u8], number: usize) -> &mut [u8] {
    &mut buffer[number * SLICE_BYTES..][..SLICE_BYTES]
}

/// Walks round through the parts of the buffers, on from where it was.
#[derive(Default)]
struct Walk {
    next: usize,
}

impl Walk {
    fn sample(&mut self, side: Duration, mut step: impl FnMut(usize) -> Result<(), Error>) -> Result<Sample, Error> {
        Sample::measure(&[], || {
            let started = Instant::now();
            let mut bytes = 0;
            while started.elapsed() < side {
                for _ in 0..16 {
                    step(self.next)?;
                    self.next = (self.next + 1) % SLICES;
                    bytes += SLICE_BYTES as u64;
                }
            }
            Ok(bytes)
        })
    }
}
