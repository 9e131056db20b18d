//! Holds: memory of the DRAM tier that peers read themselves, by a device that asks no thread here.

use std::time::Duration;

use tidepool_metadata::envelope::LEAST_HELD_BYTES;
use tidepool_metadata::proto;
use tidepool_transfer::{AccessRights, Engine, Memory, RegionTicket};

use crate::grpc::StoreApi;
use crate::node::ObjectReader;

/// Longest hold. It ends when the peer says that it has read, so that only peers that die leave one behind.
const LONGEST: Duration = Duration::from_secs(10);
/// Clocks drift by a hundredth at most, and are read to the millisecond.
const MARGIN: Duration = Duration::from_millis(20);

/// Registers the DRAM tier for reading. Devices learn of it when a peer that has one asks for the first time.
pub(super) fn register(engine: &Engine, api: &StoreApi) -> Option<RegionTicket> {
    let memory = api.service.store().segment_file().and_then(|(file, length)| Memory::of_own_store(&file, length));
    let memory = memory.map_err(|error| error.to_string());
    let registered =
        memory.and_then(|memory| engine.register(&memory, AccessRights::READ, None).map_err(|error| error.to_string()));
    let unread = |error: &String| tracing::warn!(error, "peers can't read this node's memory themselves");
    let ticket = registered.inspect_err(unread).ok()?;
    // Pinning takes seconds for much memory: who asks meanwhile gets the bytes with the answer.
    let (engine, region) = (engine.downgrade(), ticket.region);
    let prepare = move || drop(engine.upgrade().map(|engine| engine.prepare(region)));
    let spawned = std::thread::Builder::new().name("tidepool-pin".into()).spawn(prepare);
    if let Err(error) = spawned {
        tracing::debug!(%error, "the first peer that asks has it pinned");
    }
    Some(ticket)
}

/// Holds what is to be read, for a peer that has `time` left: its checksum, and where it lies. `None`: it comes with the
/// answer.
pub(super) fn hold(segment: RegionTicket, reader: &ObjectReader, time: Duration) -> Option<(u32, proto::Held)> {
    let (description, time) = (reader.description(), time.min(LONGEST));
    if description.range_length < LEAST_HELD_BYTES || description.range_length != description.object_length {
        return None;
    }
    let hold = reader.hold(time + time / 100 + MARGIN)?;
    let (starts, lengths) = hold.extents.into_iter().unzip();
    let (generation_places, generations) = hold.generations.into_iter().unzip();
    let held = proto::Held {
        id: hold.id,
        milliseconds: u32::try_from(time.as_millis()).unwrap_or_default(),
        region: segment.region.0,
        key: segment.key.0.to_le_bytes().to_vec().into(),
        region_length: segment.length,
        starts,
        lengths,
        generation_places,
        generations,
    };
    Some((hold.checksum, held))
}
