//! Puts of several objects: room for each, their bytes in their places, one proposal for all that fit it.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;
use tidepool_metadata::catalog::MAX_COMMAND_ITEMS;

use super::put::{Filled, PutResult, Reservation, already_exists};
use super::{NodeService, ObjectName, PutItem, PutOptions, error};
use crate::error::Error;

/// Bytes of keys and checksums in one proposal, well below the command's own limit.
const PROPOSED_BYTES: usize = 128 << 10;

/// A copy of so many bytes keeps one thread busy long enough, about a millisecond, that another one pays.
const HELPER_BYTES: u64 = 4 << 20;
/// More threads don't copy faster.
const HELPERS_MAX: usize = 4;
/// Threads that may still be started to help with copies, over all batches: half the processors, as others call too.
static FREE_HELPERS: LazyLock<AtomicUsize> = LazyLock::new(|| {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    AtomicUsize::new((processors / 2).min(HELPERS_MAX))
});

/// Room for a batch, where it could be had.
pub(crate) struct ReservedBatch {
    service: NodeService,
    results: Vec<Option<PutResult>>,
    /// With their positions, in order.
    reserved: Vec<(usize, Reservation)>,
}

/// A batch whose values are all in their places, or failed.
pub(crate) struct FilledBatch {
    service: NodeService,
    results: Vec<Option<PutResult>>,
    /// With their positions.
    filled: Vec<(usize, Filled)>,
}

impl NodeService {
    /// Puts many small objects of one tenant with one proposal for all that fit it. One outcome per item, in order.
    pub async fn put_batch(&self, items: Vec<PutItem<'_>>, options: &PutOptions) -> Vec<PutResult> {
        self.fill_batch(items, options).await.complete().await
    }

    /// Reserves room for each item and copies its value there; what is given out needs the values no more. Dropping that
    /// frees everything.
    pub(crate) async fn fill_batch(&self, items: Vec<PutItem<'_>>, options: &PutOptions) -> FilledBatch {
        let apart = |PutItem { name, value, checksum }| ((name, value.length()), (value, checksum));
        let (objects, values): (Vec<_>, Vec<_>) = items.into_iter().map(apart).unzip();
        let reserved = self.reserve_batch(objects, options).await;
        reserved.fill_side_by_side(|position, reservation| {
            let (value, checksum) = &values[position];
            reservation.take(value)?;
            Ok(*checksum)
        })
    }

    /// Reserves room for objects of one tenant, of so many bytes each. Dropping what this gives frees everything.
    pub(crate) async fn reserve_batch(&self, objects: Vec<(ObjectName, u64)>, options: &PutOptions) -> ReservedBatch {
        self.acknowledge(options.ids);
        let mut results: Vec<Option<PutResult>> = objects.iter().map(|_| None).collect();
        let service = self.clone();
        if options.yields()
            && let Some((first, _)) = objects.first()
        {
            let keys = objects.iter().map(|(name, _)| name.key.clone()).collect();
            match self.present(first.tenant, keys).await {
                Ok((log_index, present)) => {
                    for (result, _) in results.iter_mut().zip(present).filter(|(_, present)| *present) {
                        *result = Some(Ok(already_exists(log_index)));
                    }
                }
                Err(error) => {
                    results.fill(Some(Err(error)));
                    return ReservedBatch { service, results, reserved: Vec::new() };
                }
            }
        }
        let mut reserved = Vec::with_capacity(objects.len());
        for (position, (name, length)) in objects.into_iter().enumerate() {
            if results[position].is_some() {
                continue;
            }
            match self.reserve_room(name, length, options.clone(), position).await {
                Ok(reservation) => reserved.push((position, reservation)),
                Err(error) => results[position] = Some(Err(error)),
            }
        }
        ReservedBatch { service, results, reserved }
    }
}

impl ReservedBatch {
    /// Has `fill` bring the bytes of all objects, one after the other: to their places, or nowhere where there is none. It
    /// gives their CRC-32, if the caller knows it.
    pub(crate) fn fill(
        self,
        mut fill: impl FnMut(usize, Option<&mut Reservation>) -> Result<Option<u32>, Error>,
    ) -> FilledBatch {
        let Self { service, mut results, reserved } = self;
        let (mut reserved, mut filled) = (reserved.into_iter().peekable(), Vec::new());
        for (position, result) in results.iter_mut().enumerate() {
            let mut reservation = reserved.next_if(|(of, _)| *of == position).map(|(_, reservation)| reservation);
            let checksum = fill(position, reservation.as_mut());
            match (checksum, reservation) {
                (Ok(expected), Some(reservation)) => filled.push((position, Filled { reservation, expected })),
                (Err(error), Some(_)) => *result = Some(Err(error)),
                (_, None) => {}
            }
        }
        FilledBatch { service, results, filled }
    }
}

impl ReservedBatch {
    /// As [`Self::fill`], of objects whose bytes are there: large batches by several threads, whichever has nothing to do takes the
    /// next object.
    fn fill_side_by_side(
        self,
        fill: impl Fn(usize, &mut Reservation) -> Result<Option<u32>, Error> + Sync,
    ) -> FilledBatch {
        let Self { service, mut results, reserved } = self;
        let bytes: u64 = reserved.iter().map(|(_, reservation)| reservation.missing()).sum();
        let wanted = usize::try_from(bytes / HELPER_BYTES).unwrap_or(usize::MAX).saturating_sub(1);
        let helpers = Helpers::take(wanted.min(reserved.len().saturating_sub(1)));
        let (left, ended) = (Mutex::new(reserved.into_iter()), Mutex::new(Vec::with_capacity(results.len())));
        let work = || {
            // Taken in a statement of its own: the lock is not held while it is filled.
            let next = || left.lock().next();
            while let Some((position, mut reservation)) = next() {
                let checksum = fill(position, &mut reservation);
                let filled = checksum.map(|expected| Filled { reservation, expected });
                ended.lock().push((position, filled));
            }
        };
        thread::scope(|scope| {
            for _ in 0..helpers.0 {
                // Without it, it takes longer.
                let _started = thread::Builder::new().name("tidepool-copy".into()).spawn_scoped(scope, work);
            }
            work();
        });
        drop(helpers);
        let mut filled = Vec::with_capacity(results.len());
        for (position, ended) in ended.into_inner() {
            match ended {
                Ok(ended) => filled.push((position, ended)),
                Err(error) => results[position] = Some(Err(error)),
            }
        }
        filled.sort_unstable_by_key(|(position, _)| *position);
        FilledBatch { service, results, filled }
    }
}

/// Threads that help a batch, given back when this is dropped.
struct Helpers(usize);

impl Helpers {
    /// As many as are free, at most `wanted`.
    fn take(wanted: usize) -> Self {
        let mut taken = 0;
        let some = |free: usize| {
            taken = wanted.min(free);
            Some(free - taken)
        };
        let _always = FREE_HELPERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, some);
        Self(taken)
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        FREE_HELPERS.fetch_add(self.0, Ordering::Relaxed);
    }
}

impl FilledBatch {
    /// Makes the objects visible, with one proposal for all that fit it. One outcome per item, in order.
    pub(crate) async fn complete(self) -> Vec<PutResult> {
        let Self { service, mut results, mut filled } = self;
        while !filled.is_empty() {
            let mut bytes = 0;
            let fits = |(_, filled): &&(usize, Filled)| {
                bytes += filled.proposed_bytes();
                bytes <= PROPOSED_BYTES
            };
            let count = filled.iter().take(MAX_COMMAND_ITEMS).take_while(fits).count().max(1);
            let (positions, proposed): (Vec<usize>, Vec<Filled>) = filled.drain(..count).unzip();
            for (position, done) in positions.into_iter().zip(service.seal_and_propose(proposed).await) {
                results[position] = Some(done);
            }
        }
        let missing = || Err(error::unexpected("one outcome per item"));
        results.into_iter().map(|result| result.unwrap_or_else(missing)).collect()
    }
}
