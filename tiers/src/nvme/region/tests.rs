#![expect(clippy::unwrap_used, reason = "tests")]

use super::*;

fn trailer(epoch: Epoch, record_bytes: u64) -> Trailer {
    Trailer {
        epoch,
        footer_bytes: 0,
        tombstone_count: 0,
        entry_count: 0,
        entries_checksum: 0,
        tombstones_checksum: 0,
        record_bytes,
    }
}

fn check(regions: &Regions) {
    let usage = regions.usage();
    assert_eq!(usage.free_bytes + usage.used_bytes + usage.reserved_bytes, usage.capacity_bytes);
    let live: u64 = regions.table.lock().uses.iter().map(|place| place.live_bytes).sum();
    assert_eq!(live, usage.used_bytes + usage.reserved_bytes);
}

#[test]
fn usage_adds_up_through_a_regions_life() {
    let regions = Regions::new(3, 1 << 20);
    let (region, epoch) = regions.open(2, 7).unwrap();
    assert!(regions.open(2, 7).is_none(), "two regions stay in reserve");
    for length in [100, 200, 300] {
        regions.place(region, length);
        check(&regions);
    }
    regions.publish(100);
    regions.publish(200);
    let location = Location { region, sequence: epoch.sequence as u32, offset: 4096, length: 100, checksum: 0 };
    regions.abandon(Location { length: 300, ..location });
    check(&regions);
    assert_eq!(regions.release(location), Some(Tombstone { sequence: 1, offset: 4096, length: 100 }));
    regions.seal(region, trailer(epoch, 300));
    assert!(regions.victim().is_none(), "the owner doesn't know all records yet");
    regions.settle(location);
    regions.settle(location);
    assert_eq!(regions.victim().unwrap().live_bytes, 200);
    regions.retire(region);
    check(&regions);
    assert_eq!(regions.usage().used_bytes, 0);
    assert!(regions.hold(location).is_none());
    assert_eq!(regions.release(location), None);
    regions.free(region);
    assert_eq!(regions.free_count(), 3);
    let (_, next) = regions.open(0, 7).unwrap();
    assert_eq!(next.sequence, 2, "a sequence is never used twice");
}

#[tokio::test]
async fn a_region_is_reused_only_after_its_readers_have_left() {
    let regions = Regions::new(2, 1 << 20);
    let (region, epoch) = regions.open(0, 7).unwrap();
    let location = Location { region, sequence: epoch.sequence as u32, offset: 0, length: 16, checksum: 0 };
    let hold = regions.hold(location).unwrap();
    assert_eq!(hold.epoch(), epoch);
    regions.seal(region, trailer(epoch, 0));
    regions.retire(region);
    let waiting = tokio::spawn({
        let regions = Arc::clone(&regions);
        async move { regions.drain(region).await }
    });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    drop(hold);
    waiting.await.unwrap();
}

#[test]
fn locations_survive_as_bytes_and_nonsense_finds_nothing() {
    let regions = Regions::new(2, 1 << 20);
    let (region, epoch) = regions.open(0, 7).unwrap();
    let location = Location { region, sequence: epoch.sequence as u32, offset: 4096, length: 160, checksum: 0 };
    assert_eq!(Location::from_bytes(location.to_bytes()), location);
    assert!(regions.hold(location).is_some());
    for nonsense in [
        Location { region: 2, ..location },
        Location { sequence: 0, ..location },
        Location { offset: 1 << 20, ..location },
        Location { length: u32::MAX, ..location },
    ] {
        assert!(regions.hold(nonsense).is_none());
    }
}

#[test]
fn nearly_full_regions_are_reclaimed_oldest_first() {
    let regions = Regions::new(3, 1000);
    for live in [900, 950, 800] {
        let (region, epoch) = regions.open(0, 1).unwrap();
        regions.place(region, live);
        regions.publish(live);
        regions.settle(Location {
            region,
            sequence: epoch.sequence as u32,
            offset: 0,
            length: live as u32,
            checksum: 0,
        });
        regions.seal(region, trailer(epoch, live));
    }
    assert_eq!(regions.victim().unwrap().epoch.sequence, 1);
    regions.release(Location { region: 1, sequence: 2, offset: 0, length: 500, checksum: 0 });
    assert_eq!(regions.victim().unwrap().epoch.sequence, 2);
}
