//! On two soft-RoCE devices (`make test-rdma`): what the safe types promise. Elsewhere every test says so and passes.

use std::time::{Duration, Instant};

use super::super::{Access, Port};
use super::*;
use crate::memory::Memory;
use crate::rdma::endpoint::Gid;

/// Bytes at each end.
const BYTES: u64 = 1 << 20;

/// A queue pair of the first device, connected to one of the second that serves.
struct Wired {
    asking: QueuePair,
    serving: QueuePair,
    here: Arc<Domain>,
    local: Arc<Part>,
    remote: Part,
    local_memory: Memory,
    remote_memory: Memory,
}

fn wired(access: Access) -> Option<Wired> {
    if std::env::var_os("RDMA_VM_DEVICES").is_none() {
        eprintln!("skipped: needs the virtual machine of `make test-rdma`");
        return None;
    }
    let devices = Context::open_all().expect("devices");
    let domains: Vec<_> = devices.iter().map(|device| Arc::new(Domain::new(device).expect("a domain"))).collect();
    let mut asking = QueuePair::new(&domains[0], 1, 64, 4, false).expect("a pair");
    let mut serving = QueuePair::new(&domains[1], 1, 1, 1, true).expect("a pair");
    let end = |context: &Context, pair: &QueuePair, psn| {
        let port = context.port(1).expect("a port");
        let gid = Gid::choose(&context.gids(1).expect("addresses"), port.link).expect("an address");
        let Port { link, mtu, lid, .. } = port;
        let endpoint = Endpoint { number: pair.number(), psn, gid: gid.address, lid, mtu, link, reads_in: 16 };
        let gid_index = gid.index.expect("has one");
        (endpoint, Route { gid_index, mtu, reads_in: 16, reads_out: 16, psn, timeout_exponent: 13, retries: 3 })
    };
    let (ours, here) = end(&devices[0], &asking, 7);
    let (theirs, there) = end(&devices[1], &serving, 0xff_fff0);
    serving.receive_from(&ours, &there).expect("connected");
    asking.receive_from(&theirs, &here).expect("connected");
    asking.send_to(&here).expect("connected");
    let (local_memory, remote_memory) =
        (Memory::anonymous(BYTES as usize).expect("memory"), Memory::anonymous(BYTES as usize).expect("memory"));
    let own = Access { local_write: true, remote_read: false, remote_write: false };
    let local = Arc::new(Part::register(&domains[0], &local_memory, 0, BYTES, own).expect("registered"));
    let remote = Part::register(&domains[1], &remote_memory, 0, BYTES, access).expect("registered");
    Some(Wired { asking, serving, here: Arc::clone(&domains[0]), local, remote, local_memory, remote_memory })
}

const ALL: Access = Access { local_write: false, remote_read: true, remote_write: true };

impl Wired {
    fn range(&self, offset: u64, length: u32) -> [LocalRange; 1] {
        [LocalRange { part: Arc::clone(&self.local), offset, length }]
    }

    fn work<'a>(&self, way: Way, local: &'a [LocalRange], offset: u64, is_signalled: bool) -> Work<'a> {
        let (address, rkey) = self.remote.remote().expect("alive");
        Work { way, local, remote_address: address + offset, rkey, is_signalled }
    }

    /// Everything that ends until nothing is on its way.
    fn ended(&mut self) -> Vec<(u64, Status)> {
        let (mut ended, until) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        while self.asking.in_flight() > 0 {
            assert!(Instant::now() < until, "{} did not end", self.asking.in_flight());
            self.asking.arm().expect("armed");
            if !self.asking.poll(&mut ended).expect("polled") {
                let events = self.asking.events();
                crate::lend::poll(events, rustix::event::PollFlags::IN, Duration::from_millis(50)).expect("polled");
                self.asking.take_events();
            }
        }
        ended
    }
}

#[test]
fn work_without_a_completion_of_its_own_ends_with_later_work_in_order() {
    let Some(mut wired) = wired(ALL) else { return };
    wired.remote_memory.write_at(0, &[7; 4096]).expect("inside");
    let ranges: Vec<_> = (0..10).map(|index| wired.range(index * 100, 100)).collect();
    let work: Vec<_> =
        (0..10).map(|index| wired.work(Way::Read, &ranges[index], index as u64 * 100, index == 9)).collect();
    assert_eq!(wired.asking.post(&work).expect("posted"), 0);
    let expected: Vec<_> = (0..10).map(|sequence| (sequence, Status::Success)).collect();
    assert_eq!(wired.ended(), expected);
    let mut read = [0; 1001];
    wired.local_memory.read_at(0, &mut read).expect("inside");
    assert!(read[..1000] == [7; 1000] && read[1000] == 0);
    assert_eq!(wired.asking.room(), 64);
}

#[test]
fn small_writes_go_inline_and_may_be_changed_once_posted() {
    let Some(mut wired) = wired(ALL) else { return };
    wired.local_memory.write_at(0, &[1; 64]).expect("inside");
    let range = wired.range(0, 64);
    let work = wired.work(Way::Write, &range, 128, true);
    wired.asking.post(&[work]).expect("posted");
    if wired.asking.inline_bytes >= 64 {
        wired.local_memory.write_at(0, &[2; 64]).expect("inside");
    }
    assert_eq!(wired.ended(), [(0, Status::Success)]);
    let mut written = [0; 64];
    wired.remote_memory.read_at(128, &mut written).expect("inside");
    assert_eq!(written, [1; 64]);
}

#[test]
fn what_was_not_granted_is_refused_and_what_follows_is_flushed() {
    let read_only = Access { remote_write: false, ..ALL };
    let Some(mut wired) = wired(read_only) else { return };
    wired.remote_memory.write_at(0, &[5; 1024]).expect("inside");
    let ranges = wired.range(0, 1024);
    let good = wired.work(Way::Read, &ranges, 0, false);
    let bad = wired.work(Way::Write, &ranges, 0, false);
    wired.asking.post(&[good, bad, good]).expect("posted");
    assert_eq!(wired.ended(), [(0, Status::Success), (1, Status::RemoteAccess), (2, Status::Flushed)]);
    let mut there = [0; 1024];
    wired.remote_memory.read_at(0, &mut there).expect("inside");
    assert_eq!(there, [5; 1024]);
}

#[test]
fn keys_end_with_their_registration() {
    let Some(mut wired) = wired(ALL) else { return };
    let ranges = wired.range(0, 1024);
    let (remote_address, rkey) = wired.remote.remote().expect("alive");
    let other = Part::register(&wired.remote.domain, &wired.remote_memory, 0, BYTES, ALL).expect("registered");
    drop(std::mem::replace(&mut wired.remote, other));
    let work = Work { way: Way::Read, local: &ranges, remote_address, rkey, is_signalled: true };
    wired.asking.post(&[work]).expect("posted");
    assert_eq!(wired.ended(), [(0, Status::RemoteAccess)]);
}

#[test]
fn work_that_leaves_its_part_or_is_of_another_domain_is_not_posted() {
    let Some(mut wired) = wired(ALL) else { return };
    let invalid = |wired: &mut Wired, ranges: &[LocalRange]| {
        let work = wired.work(Way::Read, ranges, 0, true);
        let refused = wired.asking.post(&[work]).expect_err("refused");
        assert_eq!((refused.kind(), wired.asking.in_flight()), (io::ErrorKind::InvalidInput, 0));
    };
    let range = wired.range(BYTES - 10, 11);
    invalid(&mut wired, &range);
    let range = wired.range(u64::MAX, 2);
    invalid(&mut wired, &range);
    let many: Vec<_> = (0..5).flat_map(|index| wired.range(index, 1)).collect();
    invalid(&mut wired, &many);
    let foreign = Arc::new(Domain::new(&wired.here.context).expect("a domain"));
    let own = Access { local_write: true, remote_read: false, remote_write: false };
    let part = Arc::new(Part::register(&foreign, &wired.local_memory, 0, BYTES, own).expect("registered"));
    invalid(&mut wired, &[LocalRange { part, offset: 0, length: 1 }]);
    let range = wired.range(0, 1);
    let work = vec![wired.work(Way::Read, &range, 0, true); 65];
    assert!(wired.asking.post(&work).is_err(), "more than the pair takes");
}

#[test]
fn memory_of_work_is_kept_until_it_has_ended_or_its_pair_is_gone() {
    let Some(mut wired) = wired(ALL) else { return };
    // The other side is gone: reads stay on their way until their retries are used up.
    wired.serving.stop().expect("stopped");
    let ranges = wired.range(0, 4096);
    let work = wired.work(Way::Read, &ranges, 0, true);
    wired.asking.post(&[work, work]).expect("posted");
    drop(ranges);
    let weak = Arc::downgrade(&wired.local);
    let Wired { asking, local, .. } = wired;
    drop(local);
    assert!(weak.upgrade().is_some(), "lent");
    drop(asking);
    assert!(weak.upgrade().is_none(), "the pair is gone");
}

#[test]
fn a_stopped_pair_flushes_what_is_on_its_way() {
    let Some(mut wired) = wired(ALL) else { return };
    wired.serving.stop().expect("stopped");
    let ranges = wired.range(0, 4096);
    let work = wired.work(Way::Read, &ranges, 0, false);
    wired.asking.post(&[work; 8]).expect("posted");
    wired.asking.stop().expect("stopped");
    let ended = wired.ended();
    assert_eq!(ended.len(), 8);
    assert!(ended.iter().all(|(_, status)| *status == Status::Flushed), "{ended:?}");
    assert!(wired.asking.pair.lent.is_empty());
}
