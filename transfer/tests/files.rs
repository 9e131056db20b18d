//! Registered files: their bytes are read and written like memory, by descriptor and over TCP, and what goes wrong with a
//! file is a result of its requests alone.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use support::process::in_own_process;
use support::{Target, address, by, bytes, pattern, settings, soon, start};
use tidepool_io::Operation;
use tidepool_io::faulty::{Fault, FaultyDisk};
use tidepool_transfer::{
    AccessRights, BatchOptions, Direction, Engine, Failure, Faults, Memory, PeerId, PeerMapping, RegionId, RegionKey,
    RegionTicket, RemoteSlice, Request, SegmentId, Settings, Slice, TransferError, TransportKind,
};

mod support;

const MIB: u64 = 1 << 20;
/// By descriptor, and over the network.
const WAYS: [TransportKind; 2] = [TransportKind::File, TransportKind::Tcp];

/// An asking engine with memory, and a peer.
struct Asking {
    here: Engine,
    there: Engine,
    peer: PeerId,
    local: Memory,
    region: RegionId,
}

impl Asking {
    fn new(length: u64) -> Self {
        let (here, there) = (start(settings()), start(settings()));
        let local = Memory::shared(length as usize, PeerMapping::ReadOnly).expect("memory");
        let region = here.register(&local, AccessRights::LOCAL, None).expect("registered").region;
        let peer = here.connect(&address(&there), soon()).expect("connected");
        Self { here, there, peer, local, region }
    }

    /// Registers a file there and opens it here.
    fn open(&self, file: File, rights: AccessRights) -> (RegionTicket, SegmentId) {
        let ticket = self.there.register_file(file, rights, None).expect("registered");
        (ticket, self.here.open_ticket(self.peer, ticket, soon()).expect("opened"))
    }

    fn request(&self, direction: Direction, local: u64, segment: SegmentId, offset: u64, length: u64) -> Request {
        let local = Slice { region: self.region, offset: local, length };
        Request { direction, local, remote: RemoteSlice { segment, offset } }
    }

    fn results(&self, requests: &[Request], way: TransportKind) -> Vec<Result<(), Failure>> {
        self.here.transfer(requests, by(way)).expect("submitted").results
    }
}

/// A file of `length` zero bytes, open for reading and writing, and its path.
fn file(folder: &Path, length: u64) -> File {
    let path = folder.join("segment");
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).expect("created");
    file.set_len(length).expect("as long");
    file
}

fn content(file: &File, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset).expect("read");
    bytes
}

#[test]
fn slices_of_a_file_of_any_size_and_alignment_are_read_and_written() {
    let folder = tempfile::tempdir().expect("folder");
    let asking = Asking::new(10 * MIB);
    let disk = file(folder.path(), 10 * MIB);
    let (_, segment) = asking.open(disk.try_clone().expect("dup"), AccessRights::READ_WRITE);
    assert_eq!(asking.here.segment(segment).expect("open"), (10 * MIB, Some(TransportKind::File)));
    for way in WAYS {
        for (round, length) in [1, 7, 4095, 4096, 65_537, MIB + MIB / 8 + 1, 9 * MIB + 3].into_iter().enumerate() {
            let source = pattern(length as usize, round as u64);
            disk.write_all_at(&source, 5).expect("written");
            asking.local.write_at(0, &vec![0; 10 << 20]).expect("inside");
            let read = asking.request(Direction::Read, 3, segment, 5, length);
            assert_eq!(asking.results(&[read], way), [Ok(())], "{way:?} {length}");
            let local = bytes(&asking.local);
            assert!(local[3..3 + length as usize] == source, "{way:?} {length}");
            assert!(local[..3] == [0; 3] && local[3 + length as usize..].iter().all(|byte| *byte == 0));

            let source = pattern(length as usize, 100 + round as u64);
            asking.local.write_at(11, &source).expect("inside");
            let write = asking.request(Direction::Write, 11, segment, 2, length);
            let batch = asking.here.submit(&[write], by(way)).expect("submitted");
            batch.wait().all().expect("written");
            assert!(content(&disk, 2, length as usize) == source, "{way:?} {length}");
        }
    }
}

#[test]
fn large_batches_move_every_byte_once() {
    let folder = tempfile::tempdir().expect("folder");
    let (count, block) = (2048_u64, 4096_u64);
    let asking = Asking::new(count * block);
    let disk = file(folder.path(), count * block);
    let (_, segment) = asking.open(disk.try_clone().expect("dup"), AccessRights::READ_WRITE);
    for way in WAYS {
        // Even blocks are read, odd ones are written; each from the mirrored place.
        let (mut there, mut here) = (pattern((count * block) as usize, 1), pattern((count * block) as usize, 2));
        disk.write_all_at(&there, 0).expect("written");
        asking.local.write_at(0, &here).expect("inside");
        let requests: Vec<_> = (0..count)
            .map(|index| {
                let mirrored = (count - 1 - index) / 2 * 2 + index % 2;
                let (source, target) = ((mirrored * block) as usize, (index * block) as usize);
                let range = source..source + block as usize;
                if index % 2 == 0 {
                    here[target..target + block as usize].copy_from_slice(&there[range]);
                    asking.request(Direction::Read, index * block, segment, mirrored * block, block)
                } else {
                    there[target..target + block as usize].copy_from_slice(&here[range]);
                    asking.request(Direction::Write, mirrored * block, segment, index * block, block)
                }
            })
            .collect();
        assert!(asking.results(&requests, way).iter().all(Result::is_ok), "{way:?}");
        assert!(bytes(&asking.local) == here && content(&disk, 0, there.len()) == there, "{way:?}");
    }
}

#[test]
fn keys_rights_and_bounds_of_a_file_are_checked() {
    let folder = tempfile::tempdir().expect("folder");
    let asking = Asking::new(MIB);
    let disk = file(folder.path(), MIB);
    let (ticket, segment) = asking.open(disk.try_clone().expect("dup"), AccessRights::READ);
    for way in WAYS {
        let refused = |request| asking.here.submit(&[request], by(way)).map(drop);
        let write = asking.request(Direction::Write, 0, segment, 0, 1);
        assert!(matches!(refused(write), Err(TransferError::NoRight { request: 0 })));
        let beyond = asking.request(Direction::Read, 0, segment, MIB - 1, 2);
        assert!(matches!(refused(beyond), Err(TransferError::Slice { request: 0, .. })));
        let around = asking.request(Direction::Read, 0, segment, u64::MAX, 2);
        assert!(matches!(refused(around), Err(TransferError::Slice { request: 0, .. })));
    }
    // Tickets that promise more than there is: the peer says no.
    let open = |ticket| asking.here.open_ticket(asking.peer, ticket, soon()).expect("opened");
    let forged = [
        (RegionTicket { key: RegionKey(ticket.key.0 ^ 1), ..ticket }, Direction::Read, 0, Failure::NoRegion),
        (RegionTicket { rights: AccessRights::READ_WRITE, ..ticket }, Direction::Write, 0, Failure::NoRight),
        (RegionTicket { length: 2 * MIB, ..ticket }, Direction::Read, MIB, Failure::OutOfRange),
    ];
    for (ticket, direction, offset, failure) in forged {
        let request = asking.request(direction, 0, open(ticket), offset, 4096);
        let outcome = asking.here.transfer(&[request], BatchOptions::default()).expect("submitted");
        assert_eq!(outcome.results, [Err(failure)]);
    }
    assert_eq!(content(&disk, 0, 4096), [0; 4096]);
}

#[test]
fn what_can_be_no_segment_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().expect("folder");
    let asking = Asking::new(4096);
    let reason = |file: File, rights| match asking.there.register_file(file, rights, None) {
        Err(TransferError::NoSegment { reason }) => reason,
        other => panic!("{other:?}"),
    };
    let path = folder.path().join("segment");
    file(folder.path(), 4096);
    let with = |options: &mut OpenOptions| options.open(&path).expect("opened");
    assert!(reason(File::open(folder.path()).expect("opened"), AccessRights::READ).contains("regular"));
    assert!(reason(File::open("/dev/null").expect("opened"), AccessRights::READ).contains("regular"));
    let appending = with(OpenOptions::new().read(true).append(true));
    assert!(reason(appending, AccessRights::READ_WRITE).contains("appending"));
    if let Ok(direct) = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path) {
        assert!(reason(direct, AccessRights::READ).contains("direct"));
    }
    assert!(reason(with(OpenOptions::new().write(true)), AccessRights::READ).contains("reading"));
    assert!(reason(with(OpenOptions::new().read(true)), AccessRights::READ_WRITE).contains("writing"));
    let empty = asking.there.register_file(tempfile::tempfile().expect("file"), AccessRights::READ, None);
    assert!(matches!(empty, Err(TransferError::Length { length: 0, .. })), "{empty:?}");
    assert_eq!((asking.there.totals().regions, asking.there.totals().registered_bytes), (0, 0));
}

#[test]
fn a_local_slice_in_a_file_is_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let asking = Asking::new(4096);
    let (_, segment) = asking.open(file(folder.path(), 4096), AccessRights::READ_WRITE);
    let own = file(folder.path(), 4096);
    let own = asking.here.register_file(own, AccessRights::LOCAL, None).expect("registered");
    for direction in [Direction::Read, Direction::Write] {
        let mut request = asking.request(direction, 0, segment, 0, 16);
        request.local.region = own.region;
        let refused = asking.here.submit(&[request], BatchOptions::default());
        assert!(matches!(refused, Err(TransferError::NotMemory { request: 0 })), "{refused:?}");
    }
}

/// What a file that grew again has in between are zeros that nobody wrote: it must not be served.
#[test]
fn a_truncated_file_fails_its_requests_for_good_and_no_others() {
    let folder = tempfile::tempdir().expect("folder");
    let asking = Asking::new(MIB);
    for way in WAYS {
        let disk = file(folder.path(), MIB);
        let (_, segment) = asking.open(disk.try_clone().expect("dup"), AccessRights::READ_WRITE);
        let memory = Memory::shared(4096, PeerMapping::Writable).expect("memory");
        let ticket = asking.there.register(&memory, AccessRights::READ, None).expect("registered");
        let other = asking.here.open_ticket(asking.peer, ticket, soon()).expect("opened");
        let read = asking.request(Direction::Read, 0, segment, 0, 4096);
        assert_eq!(asking.results(&[read], way), [Ok(())]);
        disk.set_len(MIB / 2).expect("truncated");
        let write = asking.request(Direction::Write, 0, segment, MIB - 4096, 4096);
        assert_eq!(asking.results(&[read, write], way), [Err(Failure::Truncated); 2], "{way:?}");
        assert_eq!(disk.metadata().expect("there").len(), MIB / 2, "a refused write leaves the file as it is");
        disk.set_len(MIB).expect("grown");
        let beside = asking.request(Direction::Read, 8192, other, 0, 4096);
        assert_eq!(asking.results(&[read, write], way), [Err(Failure::Truncated); 2], "{way:?}");
        let results = asking.here.transfer(&[beside], BatchOptions::default()).expect("submitted").results;
        assert_eq!(results, [Ok(())], "{way:?}");
    }
}

#[test]
fn an_unlinked_file_is_served_on() {
    let folder = tempfile::tempdir().expect("folder");
    let asking = Asking::new(MIB);
    let disk = file(folder.path(), MIB);
    std::fs::remove_file(folder.path().join("segment")).expect("unlinked");
    // Also to who opens it only now.
    let (_, segment) = asking.open(disk.try_clone().expect("dup"), AccessRights::READ_WRITE);
    for (round, way) in WAYS.into_iter().enumerate() {
        let source = pattern(MIB as usize, round as u64);
        asking.local.write_at(0, &source).expect("inside");
        assert_eq!(asking.results(&[asking.request(Direction::Write, 0, segment, 0, MIB)], way), [Ok(())]);
        assert!(content(&disk, 0, MIB as usize) == source);
        asking.local.write_at(0, &vec![0; MIB as usize]).expect("inside");
        assert_eq!(asking.results(&[asking.request(Direction::Read, 0, segment, 0, MIB)], way), [Ok(())]);
        assert!(bytes(&asking.local) == source, "{way:?}");
    }
}

#[test]
fn a_disk_that_fails_ends_the_requests_that_touch_it() {
    let asking = Asking::new(MIB);
    let disk = FaultyDisk::from_image(pattern(MIB as usize, 5));
    let ticket = asking.there.register_disk(Arc::new(disk.clone()), MIB, AccessRights::READ_WRITE, None);
    let segment = asking.here.open_ticket(asking.peer, ticket.expect("registered"), soon()).expect("opened");
    assert_eq!(asking.here.segment(segment).expect("open").1, Some(TransportKind::Tcp));
    for (direction, operation) in [(Direction::Read, Operation::Read), (Direction::Write, Operation::Write)] {
        asking.local.write_at(0, &pattern(MIB as usize, 6)).expect("inside");
        let bad = 8 * 4096..9 * 4096;
        disk.add_fault(Fault { operation, range: bad.clone(), errno: libc::EIO, times: u32::MAX });
        let requests: Vec<_> =
            (0..64).map(|index| asking.request(direction, index * 4096, segment, index * 4096, 4096)).collect();
        let results = asking.results(&requests, TransportKind::Tcp);
        for (index, result) in results.into_iter().enumerate() {
            let expected = if bad.contains(&(index as u64 * 4096)) { Err(Failure::Storage) } else { Ok(()) };
            assert_eq!(result, expected, "{direction:?} {index}");
            let place = index * 4096..(index + 1) * 4096;
            assert!(expected.is_err() || bytes(&asking.local)[place.clone()] == disk.live_image()[place], "{index}");
        }
        disk.clear_faults();
        assert!(asking.results(&requests, TransportKind::Tcp).iter().all(Result::is_ok), "{direction:?}");
    }
}

/// A disk that never answers costs its own requests their deadline; memory behind the same engine is served on.
#[test]
fn a_disk_that_hangs_costs_its_own_requests_only() {
    let asking = Asking::new(MIB);
    let disk = FaultyDisk::new(MIB as usize);
    let ticket = asking.there.register_disk(Arc::new(disk.clone()), MIB, AccessRights::READ, None);
    let segment = asking.here.open_ticket(asking.peer, ticket.expect("registered"), soon()).expect("opened");
    let memory = Memory::shared(4096, PeerMapping::Writable).expect("memory");
    let ticket = asking.there.register(&memory, AccessRights::READ, None).expect("registered");
    let other = asking.here.open_ticket(asking.peer, ticket, soon()).expect("opened");
    disk.pause();
    let deadline = Instant::now() + Duration::from_millis(300);
    let options = BatchOptions { deadline: Some(deadline), ..BatchOptions::default() };
    let hung = asking.here.submit(&[asking.request(Direction::Read, 0, segment, 0, 4096)], options).expect("submitted");
    let beside = asking.request(Direction::Read, 8192, other, 0, 4096);
    assert_eq!(asking.results(&[beside], TransportKind::Tcp), [Ok(())]);
    assert_eq!(hung.wait().results, [Err(Failure::DeadlinePassed)]);
    disk.resume();
    assert_eq!(asking.results(&[asking.request(Direction::Read, 0, segment, 0, 4096)], TransportKind::Tcp), [Ok(())]);
}

/// Requests at a disk that never answers once held all memory for bytes of files, and with it the requests at every other
/// file.
#[test]
fn many_requests_at_a_disk_that_hangs_leave_other_files_their_memory() {
    const LENGTH: u64 = 16 << 20;
    // So many fill that memory, and so many may.
    const ASKED: usize = 16;
    const ADMITTED: usize = 2;
    let folder = tempfile::tempdir().expect("folder");
    let asking = Asking::new(MIB);
    let healthy = file(folder.path(), MIB);
    healthy.write_all_at(&pattern(MIB as usize, 3), 0).expect("written");
    let (_, healthy) = asking.open(healthy, AccessRights::READ);
    let disk = FaultyDisk::new(LENGTH as usize);
    let ticket = asking.there.register_disk(Arc::new(disk.clone()), LENGTH, AccessRights::READ, None);
    let ticket = ticket.expect("registered");
    disk.pause();
    let local = Memory::anonymous(LENGTH as usize).expect("memory");
    // An engine of its own asks each time, because one would ask one after the other.
    let silence_timeout = Duration::from_secs(20);
    let settings = Settings { piece_bytes: LENGTH, window_bytes: LENGTH, silence_timeout, ..Settings::default() };
    let ask = || {
        let engine = start(settings.clone());
        let peer = engine.connect(&address(&asking.there), soon()).expect("connected");
        let segment = engine.open_ticket(peer, ticket, soon()).expect("opened");
        let region = engine.register(&local, AccessRights::LOCAL, None).expect("registered").region;
        let local = Slice { region, offset: 0, length: LENGTH };
        let read = Request { direction: Direction::Read, local, remote: RemoteSlice { segment, offset: 0 } };
        let options = BatchOptions { deadline: Some(soon()), ..by(TransportKind::Tcp) };
        (engine.submit(&[read], options).expect("submitted"), engine)
    };
    let hung: Vec<_> = (0..ASKED).map(|_| ask()).collect();
    let until = soon();
    while disk.waiting() < ADMITTED {
        assert!(Instant::now() < until, "{} requests reach the disk", disk.waiting());
        std::thread::yield_now();
    }
    for _ in 0..10 {
        let beside = asking.request(Direction::Read, 0, healthy, 0, MIB);
        assert_eq!(asking.results(&[beside], TransportKind::Tcp), [Ok(())]);
        assert!(bytes(&asking.local) == pattern(MIB as usize, 3));
    }
    while asking.there.totals().refused_requests < (ASKED - ADMITTED) as u64 {
        assert!(Instant::now() < until, "{:?}", asking.there.totals());
        std::thread::yield_now();
    }
    disk.resume();
    let results: Vec<_> = hung.iter().map(|(batch, _)| batch.wait_until(soon()).expect("ended").results[0]).collect();
    let count = |result| results.iter().filter(|&&is| is == result).count();
    assert_eq!((count(Ok(())), count(Err(Failure::Overloaded))), (ADMITTED, ASKED - ADMITTED), "{results:?}");
}

#[test]
fn a_full_file_system_fails_writes_that_need_room() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let folder = tempfile::tempdir().expect("folder");
    let mount = |arguments: &[&str]| {
        let done = std::process::Command::new(arguments[0]).args(&arguments[1..]).arg(folder.path()).status();
        assert!(done.expect("run").success(), "{arguments:?}");
    };
    mount(&["mount", "-t", "tmpfs", "-o", "size=256k", "tidepool-test"]);
    // Sparse: it has no pages yet, and there is no room for them all.
    let disk = file(folder.path(), 4 * MIB);
    let asking = Asking::new(4 * MIB);
    let (_, segment) = asking.open(disk, AccessRights::READ_WRITE);
    for way in WAYS {
        let write = asking.request(Direction::Write, 0, segment, 0, 4 * MIB);
        assert_eq!(asking.results(&[write], way), [Err(Failure::Storage)], "{way:?}");
        let small = asking.request(Direction::Read, 0, segment, 3 * MIB, 4096);
        assert_eq!(asking.results(&[small], way), [Ok(())], "{way:?}");
    }
    asking.there.close();
    asking.here.close();
    drop(asking);
    mount(&["umount", "--lazy"]);
}

#[test]
fn a_withdrawn_file_is_gone_over_every_transport() {
    let folder = tempfile::tempdir().expect("folder");
    let asking = Asking::new(4096);
    for way in WAYS {
        let (ticket, segment) = asking.open(file(folder.path(), 4096), AccessRights::READ);
        let read = asking.request(Direction::Read, 0, segment, 0, 4096);
        assert_eq!(asking.results(&[read], way), [Ok(())]);
        asking.there.unregister(ticket.region, soon()).expect("withdrawn");
        assert_eq!(asking.results(&[read], way), [Err(Failure::NoRegion)], "{way:?}");
        assert_eq!((asking.there.totals().regions, asking.there.totals().registered_bytes), (0, 0));
    }
}

#[test]
fn a_file_whose_descriptor_can_t_be_used_is_read_over_tcp() {
    let folder = tempfile::tempdir().expect("folder");
    let asking = Asking::new(4 * MIB);
    let disk = file(folder.path(), 4 * MIB);
    let source = pattern(4 << 20, 9);
    disk.write_all_at(&source, 0).expect("written");
    let (_, segment) = asking.open(disk, AccessRights::READ);
    let rails = asking.here.rails(asking.peer).expect("known");
    let by_descriptor = rails.iter().position(|rail| rail.transport == TransportKind::File).expect("one host");
    let cut = Faults { is_cut: true, ..Faults::default() };
    asking.here.set_faults(asking.peer, by_descriptor, cut).expect("known");
    let read = asking.request(Direction::Read, 0, segment, 0, 4 * MIB);
    let outcome = asking.here.transfer(&[read], BatchOptions::default()).expect("submitted");
    assert_eq!(outcome.results, [Ok(())]);
    assert!(bytes(&asking.local) == source);
    assert_eq!(asking.here.segment(segment).expect("open").1, Some(TransportKind::Tcp));
}

/// The descriptor is here, but nothing can be started to use it: the peer can.
#[test]
fn a_file_that_gets_no_io_engine_here_is_read_over_tcp() {
    in_own_process("a_file_that_gets_no_io_engine_here_is_read_over_tcp", || {
        let folder = tempfile::tempdir().expect("folder");
        let asking = Asking::new(MIB);
        let disk = file(folder.path(), MIB);
        disk.write_all_at(&pattern(MIB as usize, 9), 0).expect("written");
        let (_, segment) = asking.open(disk, AccessRights::READ);
        let read = asking.request(Direction::Read, 0, segment, 0, MIB);
        // Connected, and the peer uses the file.
        assert_eq!(asking.results(&[read], TransportKind::Tcp), [Ok(())]);
        asking.local.write_at(0, &vec![0; MIB as usize]).expect("inside");
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let few = rustix::process::Rlimit { current: Some(128), maximum: limit.maximum };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).expect("set");
        let mut held = Vec::new();
        while let Ok(file) = File::open("/dev/null") {
            held.push(file);
        }
        let outcome = asking.here.transfer(&[read], BatchOptions::default()).expect("submitted");
        assert_eq!(outcome.results, [Ok(())]);
        assert!(bytes(&asking.local) == pattern(MIB as usize, 9));
        drop(held);
        let until = soon();
        while asking.here.transfer(&[read], by(TransportKind::File)).map(|outcome| outcome.results).ok()
            != Some(vec![Ok(())])
        {
            assert!(Instant::now() < until, "the way by the descriptor stays closed");
        }
    });
}

#[test]
fn a_cancelled_batch_on_a_file_ends_and_leaves_the_way_usable() {
    let folder = tempfile::tempdir().expect("folder");
    let asking = Asking::new(16 * MIB);
    let (_, segment) = asking.open(file(folder.path(), 16 * MIB), AccessRights::READ_WRITE);
    for way in WAYS {
        let read = asking.request(Direction::Read, 0, segment, 0, 16 * MIB);
        let batches: Vec<_> = (0..32).map(|_| asking.here.submit(&[read], by(way)).expect("submitted")).collect();
        batches.iter().for_each(tidepool_transfer::Batch::cancel);
        for batch in batches {
            let result = batch.wait_until(soon()).expect("ended").results[0];
            assert!(matches!(result, Ok(()) | Err(Failure::Cancelled)), "{way:?} {result:?}");
        }
        assert_eq!(asking.results(&[read], way), [Ok(())]);
    }
    assert_eq!(asking.here.totals().batches, 0);
}

/// The descriptor is still here, but nobody answers for the file any more.
#[test]
fn files_of_a_killed_peer_are_gone() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("segment");
    let mut target = Target::with("127.0.0.1:0", &["--bytes", "1M", "--file", path.to_str().expect("text")]);
    let here = start(Settings::default());
    let peer = here.connect(&target.address, soon()).expect("connected");
    let segment = here.open(peer, "bench", soon()).expect("opened");
    let local = Memory::anonymous(MIB as usize).expect("memory");
    let region = here.register(&local, AccessRights::LOCAL, None).expect("registered").region;
    let read = Request {
        direction: Direction::Read,
        local: Slice { region, offset: 0, length: MIB },
        remote: RemoteSlice { segment, offset: 0 },
    };
    for way in WAYS {
        local.write_at(0, &vec![0; MIB as usize]).expect("inside");
        here.transfer(&[read], by(way)).expect("submitted").all().expect("read");
        assert!(bytes(&local) == std::fs::read(&path).expect("read"), "{way:?}");
    }
    target.kill();
    let until = soon();
    while here.segment(segment).expect("open").1 == Some(TransportKind::File) {
        assert!(Instant::now() < until, "its end goes unnoticed");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(matches!(here.submit(&[read], by(TransportKind::File)), Err(TransferError::NoWay { .. })));
    let result = here.transfer(&[read], BatchOptions::default()).expect("submitted").results[0];
    assert!(matches!(result, Err(Failure::ConnectionLost | Failure::Unreachable)), "{result:?}");
}
