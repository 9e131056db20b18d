//! Transfers by RDMA, on soft-RoCE devices: `make test-rdma` runs this in a virtual machine that has four, all on one
//! switch. The asking engine has the even ones, its peer the odd ones. Without devices, every test says so and passes.
#![cfg(feature = "rdma")]

use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use support::authority::Authority;
use support::{Pair, Target, by, bytes, pattern, settings, soon, start};
use tidepool_transfer::{
    AccessRights, BatchOptions, Completion, Direction, Failure, Memory, PeerMapping, RdmaSettings, RegionKey,
    RegionTicket, RemoteSlice, Request, Settings, Slice, TransferError, TransportKind,
};

mod support;

const MIB: u64 = 1 << 20;
const RDMA: TransportKind = TransportKind::Rdma;

/// How many devices there are. Says so if that is too few for a test.
fn has_devices(needed: usize) -> bool {
    let devices = std::env::var("RDMA_VM_DEVICES").ok().and_then(|count| count.parse().ok()).unwrap_or(0);
    if devices < needed {
        eprintln!("skipped: needs the virtual machine of `make test-rdma`, with {needed} RDMA devices");
    }
    devices >= needed
}

/// An engine with these devices, which meets peers by network only.
fn with(devices: &[usize]) -> Settings {
    let devices = devices.iter().map(|index| format!("rxe{index}")).collect();
    Settings { same_host: false, rdma: RdmaSettings { devices, ..RdmaSettings::default() }, ..settings() }
}

fn pair(length: usize) -> Pair {
    Pair::with(length, AccessRights::READ_WRITE, with(&[0]), with(&[1]))
}

/// Runs a command that has to succeed.
fn run(command: &str) {
    let status = Command::new("sh").args(["-c", command]).status().expect("started");
    assert!(status.success(), "{command}: {status}");
}

/// Puts the network right again, whatever becomes of a test.
struct Fault(&'static str);

impl Fault {
    fn begin(begin: &str, end: &'static str) -> Self {
        run(begin);
        Self(end)
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        let _ = Command::new("sh").args(["-c", self.0]).status();
    }
}

/// Rests of the rails by RDMA, in their order.
fn rests(pair: &Pair) -> Vec<Option<Failure>> {
    let rails = pair.here.rails(pair.peer).expect("known");
    rails.into_iter().filter(|rail| rail.transport == RDMA).map(|rail| rail.rests).collect()
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < until, "{what}: not after a minute");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn reads_and_writes_of_any_size_and_alignment_arrive() {
    if !has_devices(2) {
        return;
    }
    for completion in [Completion::Event, Completion::Poll] {
        let mut here = with(&[0]);
        here.rdma.completion = completion;
        // Parts of 1 MiB: what is larger crosses their borders, on both sides at different places.
        let (mut here, mut there) = (here, with(&[1]));
        (here.rdma.registration_bytes, there.rdma.registration_bytes) = (MIB, MIB);
        let pair = Pair::with(4 << 20, AccessRights::READ_WRITE, here, there);
        let lengths = [1, 7, 200, 4095, 4096, 4097, 65_537, MIB + MIB / 8 + 1, 3 * MIB + 3];
        for (round, length) in lengths.into_iter().enumerate() {
            let source = pattern(length as usize, round as u64);
            pair.remote.write_at(5, &source).expect("inside");
            pair.local.write_at(0, &vec![0; 4 << 20]).expect("inside");
            let read = pair.request(Direction::Read, 3, 5, length);
            pair.here.transfer(&[read], by(RDMA)).expect("submitted").all().expect("read");
            let local = bytes(&pair.local);
            assert!(local[3..3 + length as usize] == source, "{completion:?} {length}");
            let after = &local[3 + length as usize..];
            assert!(local[..3] == [0; 3] && after == vec![0; after.len()]);

            let source = pattern(length as usize, 100 + round as u64);
            pair.local.write_at(11, &source).expect("inside");
            let write = pair.request(Direction::Write, 11, 2, length);
            pair.here.submit(&[write], by(RDMA)).expect("submitted").wait().all().expect("written");
            assert!(bytes(&pair.remote)[2..2 + length as usize] == source, "{completion:?} {length}");
        }
        // The peer's processor had no part in it.
        let served = pair.there.totals();
        assert_eq!((served.served_read_bytes, served.served_written_bytes), (0, 0));
    }
}

#[test]
fn large_mixed_batches_of_many_threads_move_every_byte_once() {
    if !has_devices(2) {
        return;
    }
    let pair = pair(8 << 20);
    pair.remote.write_at(0, &pattern(8 << 20, 1)).expect("inside");
    pair.local.write_at(0, &pattern(8 << 20, 2)).expect("inside");
    let (mut local, mut remote) = (bytes(&pair.local), bytes(&pair.remote));
    // Even blocks are read, odd ones are written; each from the mirrored place. Neighbours here are none there.
    let (count, block) = (2048_u64, 4096_u64);
    let requests: Vec<_> = (0..count)
        .map(|index| {
            let (here, there) = (index * block, (count - 1 - index) * block);
            let direction = if index % 2 == 0 { Direction::Read } else { Direction::Write };
            pair.request(direction, here, there, block)
        })
        .collect();
    for request in &requests {
        let (here, there, length) = (request.local.offset as usize, request.remote.offset as usize, block as usize);
        match request.direction {
            Direction::Read => local[here..here + length].copy_from_slice(&remote[there..there + length]),
            Direction::Write => remote[there..there + length].copy_from_slice(&local[here..here + length]),
        }
    }
    std::thread::scope(|scope| {
        for requests in requests.chunks(requests.len() / 4) {
            let pair = &pair;
            scope.spawn(move || pair.here.transfer(requests, by(RDMA)).expect("submitted").all().expect("done"));
        }
    });
    assert!(bytes(&pair.local) == local && bytes(&pair.remote) == remote);
    assert_eq!(pair.here.totals().batches, 0);
}

#[test]
fn scattered_memory_is_gathered_into_one_remote_range() {
    if !has_devices(2) {
        return;
    }
    let pair = pair(1 << 20);
    pair.local.write_at(0, &pattern(1 << 20, 9)).expect("inside");
    // 40 pieces that lie apart here follow each other there: a few work requests with many local ranges.
    let writes: Vec<_> =
        (0..40).map(|index| pair.request(Direction::Write, index * 10_000, index * 1_000, 1_000)).collect();
    pair.here.transfer(&writes, by(RDMA)).expect("submitted").all().expect("written");
    let (local, remote) = (bytes(&pair.local), bytes(&pair.remote));
    for index in 0..40 {
        assert!(remote[index * 1_000..][..1_000] == local[index * 10_000..][..1_000], "piece {index}");
    }
    let reads: Vec<_> =
        (0..40).map(|index| pair.request(Direction::Read, index * 20_000, index * 1_000, 1_000)).collect();
    pair.here.transfer(&reads, by(RDMA)).expect("submitted").all().expect("read");
    let local = bytes(&pair.local);
    assert!((0..40).all(|index| local[index * 20_000..][..1_000] == remote[index * 1_000..][..1_000]));
}

#[test]
fn queue_pairs_come_up_over_encrypted_connections_and_stay_up() {
    if !has_devices(2) {
        return;
    }
    let authority = Authority::new();
    let with_tls = |device| Settings { tls: authority.settings().tls, ..with(&[device]) };
    let pair = Pair::with(4 << 20, AccessRights::READ_WRITE, with_tls(0), with_tls(1));
    pair.remote.write_at(0, &pattern(4 << 20, 3)).expect("inside");
    for _ in 0..5 {
        let read = pair.request(Direction::Read, 0, 0, 4 << 20);
        pair.here.transfer(&[read], by(RDMA)).expect("submitted").all().expect("read");
    }
    assert!(bytes(&pair.local) == pattern(4 << 20, 3));
    let rails = pair.here.rails(pair.peer).expect("known");
    let failures: Vec<_> = rails.iter().filter(|rail| rail.transport == RDMA).map(|rail| rail.failures).collect();
    assert_eq!(failures, [0]);
}

#[test]
fn ports_and_addresses_of_the_machine_are_shown_or_why_there_are_none() {
    let found = tidepool_transfer::rdma_ports();
    if !has_devices(1) {
        // Whatever the machine has: an answer, not a failure to start.
        return assert!(found.is_ok() || !found.expect_err("none").to_string().is_empty());
    }
    let found = found.expect("devices");
    let first = found.iter().find(|port| port.device == "rxe0").expect("is there");
    assert_eq!((first.port, first.link_layer, first.is_active, first.mtu), (1, "Ethernet", true, 4096));
    let own: std::net::Ipv6Addr = "::ffff:10.77.0.1".parse().expect("an address");
    assert!(first.gids.contains(&(own, true)) && first.chosen == Some(own), "{first:?}");
}

#[test]
fn rdma_goes_before_tcp_if_both_ends_have_a_device() {
    if !has_devices(2) {
        return;
    }
    let way = |here: Settings, there: Settings| {
        let pair = Pair::with(4096, AccessRights::READ, here, there);
        let read = pair.request(Direction::Read, 0, 0, 4096);
        pair.here.transfer(&[read], BatchOptions::default()).expect("submitted").all().expect("read");
        pair.here.segment(pair.segment).expect("open").1
    };
    assert_eq!(way(with(&[0]), with(&[1])), Some(RDMA));
    let without = || {
        let mut settings = with(&[]);
        settings.rdma.enabled = false;
        settings
    };
    assert_eq!(way(without(), with(&[1])), Some(TransportKind::Tcp));
    assert_eq!(way(with(&[0]), without()), Some(TransportKind::Tcp));
    let neighbour = Settings { same_host: true, ..with(&[0]) };
    assert_eq!(way(neighbour.clone(), Settings { same_host: true, ..with(&[1]) }), Some(TransportKind::SharedMemory));
}

#[test]
fn a_wrong_key_gets_nothing_and_a_right_that_was_not_given_is_refused_by_the_device() {
    if !has_devices(2) {
        return;
    }
    let pair = Pair::with(64 << 10, AccessRights::READ, with(&[0]), with(&[1]));
    pair.remote.write_at(0, &pattern(64 << 10, 5)).expect("inside");
    let open = |ticket: RegionTicket| pair.here.open_ticket(pair.peer, ticket, soon()).expect("opened");
    let one = |segment, direction, remote| Request {
        remote: RemoteSlice { segment, offset: remote },
        ..pair.request(direction, 0, 0, 4096)
    };
    // A wrong key: no keys of the device are told, and the peer refuses the other ways too.
    let wrong = open(RegionTicket { key: RegionKey(pair.ticket.key.0 ^ 1), ..pair.ticket });
    let refused = pair.here.transfer(&[one(wrong, Direction::Read, 0)], by(RDMA)).expect_err("no way");
    assert!(matches!(refused, TransferError::NoWay { request: 0 }), "{refused:?}");
    let refused = pair.here.transfer(&[one(wrong, Direction::Read, 0)], BatchOptions::default()).expect("submitted");
    assert_eq!(refused.results, [Err(Failure::NoRegion)]);

    // A ticket that claims more than was granted: the device knows better. What shares the queue pair goes on.
    let forged = open(RegionTicket { rights: AccessRights::READ_WRITE, ..pair.ticket });
    let batch = [
        one(pair.segment, Direction::Read, 0),
        one(forged, Direction::Write, 8192),
        one(pair.segment, Direction::Read, 4096),
    ];
    for _ in 0..3 {
        let outcome = pair.here.transfer(&batch, by(RDMA)).expect("submitted");
        assert_eq!(outcome.results, [Ok(()), Err(Failure::NoRegion), Ok(())]);
    }
    let longer = open(RegionTicket { length: 128 << 10, ..pair.ticket });
    let outside = pair.here.transfer(&[one(longer, Direction::Read, 96 << 10)], by(RDMA)).expect("submitted");
    assert!(outside.all().is_err());
    assert!(bytes(&pair.remote) == pattern(64 << 10, 5));
    assert_eq!(rests(&pair), [None], "the way is not to blame");
}

#[test]
fn a_withdrawn_region_is_refused_by_the_device_and_others_are_not() {
    if !has_devices(2) {
        return;
    }
    let pair = pair(64 << 10);
    let other = Memory::anonymous(64 << 10).expect("memory");
    other.write_at(0, &pattern(64 << 10, 3)).expect("inside");
    pair.there.register(&other, AccessRights::READ, Some("other")).expect("registered");
    let segment = pair.here.open(pair.peer, "other", soon()).expect("opened");
    let gone = pair.request(Direction::Read, 0, 0, 4096);
    let stays = Request { remote: RemoteSlice { segment, offset: 0 }, ..pair.request(Direction::Read, 4096, 0, 4096) };
    pair.here.transfer(&[gone, stays], by(RDMA)).expect("submitted").all().expect("read");
    pair.there.unregister(pair.ticket.region, soon()).expect("withdrawn");
    for _ in 0..2 {
        let outcome = pair.here.transfer(&[gone, stays], by(RDMA)).expect("submitted");
        assert_eq!(outcome.results, [Err(Failure::NoRegion), Ok(())]);
    }
    assert!(bytes(&pair.local)[4096..8192] == pattern(64 << 10, 3)[..4096]);
}

#[test]
fn cancelled_and_dropped_batches_end_and_let_go_of_their_memory() {
    if !has_devices(2) {
        return;
    }
    let pair = pair(8 << 20);
    let memory = Arc::new(vec![0_u8; 8 << 20].into_boxed_slice());
    let base = std::ptr::NonNull::new(memory.as_ptr().cast_mut()).expect("not null");
    // SAFETY: the bytes stay where they are while the owner lives; nothing looks at them.
    #[expect(unsafe_code, reason = "to see when the owner is let go")]
    let owned = unsafe { Memory::owned_by(base, 8 << 20, true, Box::new(Arc::clone(&memory))) };
    let region = pair.here.register(&owned, AccessRights::LOCAL, None).expect("registered").region;
    drop(owned);
    for round in 0..20 {
        let read = Request {
            local: Slice { region, offset: 0, length: 8 << 20 },
            ..pair.request(if round % 2 == 0 { Direction::Read } else { Direction::Write }, 0, 0, 8 << 20)
        };
        let batch = pair.here.submit(&[read], by(RDMA)).expect("submitted");
        if round % 3 == 0 {
            std::thread::sleep(Duration::from_millis(round));
        }
        batch.cancel();
        if round % 4 == 0 {
            let ended = batch.wait_until(soon()).expect("ended");
            assert!(matches!(ended.results[..], [Ok(()) | Err(Failure::Cancelled)]), "{ended:?}");
        }
    }
    pair.here.unregister(region, soon()).expect("unused");
    eventually("the owner is let go", || Arc::strong_count(&memory) == 1);
    // The way is as good as before.
    pair.remote.write_at(0, &pattern(4096, 1)).expect("inside");
    let read = pair.request(Direction::Read, 0, 0, 4096);
    pair.here.transfer(&[read], by(RDMA)).expect("submitted").all().expect("read");
    assert!(bytes(&pair.local)[..4096] == pattern(4096, 1));
    assert_eq!(pair.here.totals().batches, 0);
}

#[test]
fn a_deadline_that_passes_ends_what_is_on_its_way() {
    if !has_devices(2) {
        return;
    }
    let pair = pair(8 << 20);
    let options = BatchOptions { deadline: Some(Instant::now() + Duration::from_millis(5)), ..by(RDMA) };
    let outcome = pair.here.transfer(&[pair.request(Direction::Read, 0, 0, 8 << 20)], options).expect("submitted");
    assert!(matches!(outcome.results[..], [Ok(()) | Err(Failure::DeadlinePassed)]), "{outcome:?}");
    let again = pair.here.transfer(&[pair.request(Direction::Read, 0, 0, 4096)], by(RDMA)).expect("submitted");
    again.all().expect("read");
}

#[test]
fn a_gibibyte_is_registered_and_reached_at_both_ends() {
    if !has_devices(2) {
        return;
    }
    let pair = pair(4096);
    let large = Memory::anonymous(1 << 30).expect("memory");
    let last = (1 << 30) - 4096;
    large.write_at(0, &pattern(4096, 1)).expect("inside");
    large.write_at(last, &pattern(4096, 2)).expect("inside");
    let ticket = pair.there.register(&large, AccessRights::READ_WRITE, Some("large")).expect("registered");
    let segment = pair.here.open(pair.peer, "large", soon()).expect("opened");
    for (offset, seed) in [(0, 1), (last, 2)] {
        let read = Request { remote: RemoteSlice { segment, offset }, ..pair.request(Direction::Read, 0, 0, 4096) };
        pair.here.transfer(&[read], by(RDMA)).expect("submitted").all().expect("read");
        assert!(bytes(&pair.local) == pattern(4096, seed), "at {offset}");
    }
    pair.there.unregister(ticket.region, soon()).expect("withdrawn");
    assert_eq!(pair.there.totals().registered_bytes, 4096);
}

#[test]
fn memory_whose_dma_buf_cant_be_registered_is_registered_by_its_address() {
    if !has_devices(2) {
        return;
    }
    let pair = pair(4096);
    let mut owner = vec![7_u8; 4096].into_boxed_slice();
    let base = std::ptr::NonNull::new(owner.as_mut_ptr()).expect("not null");
    let no_dmabuf = OwnedFd::from(std::fs::File::open("/dev/null").expect("there"));
    // SAFETY: the bytes stay where they are while the owner lives; nothing else looks at them. The descriptor is no
    // dma-buf, which the kernel finds out.
    #[expect(unsafe_code, reason = "memory of a device")]
    let memory = unsafe { Memory::exported_by(base, 4096, true, Box::new(owner), no_dmabuf, 0) };
    pair.there.register(&memory, AccessRights::READ, Some("device")).expect("registered");
    let segment = pair.here.open(pair.peer, "device", soon()).expect("opened");
    let read = Request { remote: RemoteSlice { segment, offset: 0 }, ..pair.request(Direction::Read, 0, 0, 4096) };
    pair.here.transfer(&[read], by(RDMA)).expect("submitted").all().expect("read");
    assert_eq!(bytes(&pair.local), [7; 4096]);
}

#[test]
fn a_cable_pulled_in_mid_batch_moves_it_to_the_other_device_and_back_when_it_is_put_in() {
    if !has_devices(4) {
        return;
    }
    let pair = Pair::with(32 << 20, AccessRights::READ_WRITE, with(&[0, 2]), with(&[1, 3]));
    pair.remote.write_at(0, &pattern(32 << 20, 4)).expect("inside");
    assert_eq!(rests(&pair), [None, None]);
    let requests: Vec<_> = (0..32).map(|index| pair.request(Direction::Read, index * MIB, index * MIB, MIB)).collect();
    let batch = pair.here.submit(&requests, by(RDMA)).expect("submitted");
    let fault = Fault::begin("ip link set cable0 down", "ip link set cable0 up");
    assert_eq!(batch.wait().all(), Ok(()));
    assert!(bytes(&pair.local) == pattern(32 << 20, 4));
    // Also found out if the batch was done before.
    eventually("the device's rail rests", || {
        pair.here.transfer(&requests[..1], by(RDMA)).expect("submitted").all().expect("read");
        rests(&pair).iter().filter(|rests| rests.is_some()).count() == 1
    });
    drop(fault);
    eventually("the device's rail works again", || rests(&pair) == [None, None]);
}

#[test]
fn without_any_cable_a_batch_goes_on_over_tcp() {
    if !has_devices(2) {
        return;
    }
    let pair = pair(16 << 20);
    pair.remote.write_at(0, &pattern(16 << 20, 6)).expect("inside");
    let requests: Vec<_> = (0..16).map(|index| pair.request(Direction::Read, index * MIB, index * MIB, MIB)).collect();
    let batch = pair.here.submit(&requests, BatchOptions::default()).expect("submitted");
    let fault = Fault::begin("ip link set cable1 down", "ip link set cable1 up");
    let cut = Instant::now();
    assert_eq!(batch.wait().all(), Ok(()));
    eprintln!("all rails of RDMA cut: the batch of 16 MiB ended by TCP {:?} later", cut.elapsed());
    assert!(bytes(&pair.local) == pattern(16 << 20, 6));
    let write = pair.request(Direction::Write, 0, 0, MIB);
    pair.here.transfer(&[write], BatchOptions::default()).expect("submitted").all().expect("written");
    assert!(pair.there.totals().served_written_bytes >= MIB, "it went over TCP");
    drop(fault);
    eventually("RDMA works again", || rests(&pair) == [None]);
    pair.here.transfer(&[write], by(RDMA)).expect("submitted").all().expect("written");
}

#[test]
fn an_address_that_changes_ends_queue_pairs_and_new_ones_go_by_the_new_one() {
    if !has_devices(2) {
        return;
    }
    let pair = pair(1 << 20);
    pair.remote.write_at(0, &pattern(1 << 20, 7)).expect("inside");
    let read = pair.request(Direction::Read, 0, 0, MIB);
    pair.here.transfer(&[read], by(RDMA)).expect("submitted").all().expect("read");
    // Never without any address: the kernel would forget the neighbours of the port.
    let _fault = Fault::begin(
        "echo 1 >/proc/sys/net/ipv4/conf/port0/promote_secondaries &&
         ip neigh replace 10.77.0.101 lladdr 02:00:00:00:77:00 dev port1 nud permanent &&
         ip addr add 10.77.0.101/24 dev port0 && ip addr del 10.77.0.1/24 dev port0",
        "ip addr add 10.77.0.1/24 dev port0; ip addr del 10.77.0.101/24 dev port0",
    );
    let new: std::net::Ipv6Addr = "::ffff:10.77.0.101".parse().expect("an address");
    eventually("the address is known", || {
        let ports = tidepool_transfer::rdma_ports().expect("devices");
        ports.iter().any(|port| port.device == "rxe0" && port.chosen == Some(new))
    });
    // Whatever was tried in between rests, and is probed.
    eventually("RDMA goes on", || {
        let outcome = pair.here.transfer(&[read], by(RDMA)).expect("submitted");
        outcome.all().is_ok()
    });
    assert!(bytes(&pair.local) == pattern(1 << 20, 7));
}

#[test]
fn lost_packets_are_sent_again() {
    if !has_devices(2) {
        return;
    }
    let pair = pair(2 << 20);
    pair.remote.write_at(0, &pattern(2 << 20, 8)).expect("inside");
    let lose = "for i in 0 1; do tc qdisc replace dev cable$i root netem loss 1%; done";
    let _fault = Fault::begin(lose, "for i in 0 1; do tc qdisc del dev cable$i root; done");
    let requests: Vec<_> =
        (0..64).map(|index| pair.request(Direction::Read, index << 15, index << 15, 1 << 15)).collect();
    pair.here.transfer(&requests, BatchOptions::default()).expect("submitted").all().expect("read");
    assert!(bytes(&pair.local) == pattern(2 << 20, 8));
    pair.local.write_at(0, &pattern(2 << 20, 9)).expect("inside");
    let writes: Vec<_> = requests.iter().map(|read| Request { direction: Direction::Write, ..*read }).collect();
    pair.here.transfer(&writes, BatchOptions::default()).expect("submitted").all().expect("written");
    assert!(bytes(&pair.remote) == pattern(2 << 20, 9));
}

#[test]
fn a_killed_peer_ends_everything_and_a_restarted_one_is_another() {
    if !has_devices(2) {
        return;
    }
    let arguments = ["--devices", "rxe1", "--bytes", "16M"];
    let mut target = Target::with("127.0.0.1:0", &arguments);
    let here = start(with(&[0]));
    let local = Memory::shared(16 << 20, PeerMapping::ReadOnly).expect("memory");
    let region = here.register(&local, AccessRights::LOCAL, None).expect("registered").region;
    let open = |address: &str| {
        let peer = here.connect(address, soon()).expect("connected");
        here.open(peer, "bench", soon()).expect("opened")
    };
    let read = |segment, length| Request {
        direction: Direction::Read,
        local: Slice { region, offset: 0, length },
        remote: RemoteSlice { segment, offset: 0 },
    };
    let before = open(&target.address);
    assert_eq!(here.segment(before).expect("open").1, Some(RDMA));
    here.transfer(&[read(before, 4096)], by(RDMA)).expect("submitted").all().expect("read");
    let address = target.address.clone();
    let batch = here.submit(&[read(before, 16 << 20)], BatchOptions::default()).expect("submitted");
    target.kill();
    let ended = batch.wait_until(soon()).expect("ended").results[0];
    assert!(matches!(ended, Ok(()) | Err(Failure::ConnectionLost | Failure::Unreachable)), "{ended:?}");
    let after = here.transfer(&[read(before, 4096)], BatchOptions::default()).expect("submitted");
    assert!(matches!(after.results[..], [Err(Failure::ConnectionLost | Failure::Unreachable)]), "{after:?}");

    target = Target::with(&address, &arguments);
    // As soon as one of its rails is probed again.
    let until = soon();
    loop {
        match here.transfer(&[read(before, 4096)], BatchOptions::default()).expect("submitted").results[..] {
            [Err(Failure::Restarted)] => break,
            [Err(Failure::ConnectionLost | Failure::Unreachable)] => assert!(Instant::now() < until),
            ref other => panic!("{other:?}"),
        }
    }
    let again = open(&target.address);
    here.transfer(&[read(again, 16 << 20)], by(RDMA)).expect("submitted").all().expect("read");
}
