//! Reliable connected queue pairs: created, connected, given work, drained, destroyed.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::super::abi;
use super::super::endpoint::{Endpoint, LinkLayer, PathMtu};
use super::{Context, Domain, Part, check, made, set_nonblocking};

/// Completions taken in one call.
const COMPLETIONS: usize = 32;
/// Inline bytes that are asked for: what most devices take without making their work entries larger.
const INLINE_BYTES: u32 = 220;

/// How work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Success,
    /// Another's failure, or [`QueuePair::stop`], ended it. Whether its bytes moved is not known.
    Flushed,
    /// The peer's device refuses: no such key, no right, out of range.
    RemoteAccess,
    /// The peer's device does not answer.
    RetriesExceeded,
    /// This side's device refuses: our own mistake.
    Local(i32),
    /// Anything else, by the library's number.
    Other(i32),
}

impl Status {
    fn of_code(code: c_int) -> Self {
        match code {
            0 => Self::Success,
            5 => Self::Flushed,
            10 => Self::RemoteAccess,
            12 | 13 => Self::RetriesExceeded,
            1..=4 | 6 | 8 => Self::Local(code),
            other => Self::Other(other),
        }
    }
}

/// Which way work moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Read,
    Write,
}

/// A range of a part.
#[derive(Clone)]
pub(crate) struct LocalRange {
    pub(crate) part: Arc<Part>,
    /// From the part's start.
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

/// One work request: a range of the peer's memory, and where its bytes go to or come from here.
#[derive(Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) way: Way,
    pub(crate) local: &'a [LocalRange],
    pub(crate) remote_address: u64,
    pub(crate) rkey: u32,
    /// Gives a completion even if it succeeds; else its end is known by that of later work.
    pub(crate) is_signalled: bool,
}

/// A completion queue with its channel.
struct Queue {
    raw: NonNull<abi::Queue>,
    channel: NonNull<abi::Channel>,
    context: Arc<Context>,
}

impl Queue {
    fn new(context: &Arc<Context>, entries: u32) -> io::Result<Self> {
        let functions = context.functions;
        // SAFETY: the context is open.
        let channel = made(unsafe { (functions.create_channel)(context.raw.as_ptr()) })?;
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: the context is open, the channel is of it.
        let raw = made(unsafe {
            (functions.create_queue)(context.raw.as_ptr(), entries, ptr::null_mut(), channel.as_ptr(), 0)
        });
        let raw = raw.inspect_err(|_| {
            // SAFETY: no queue uses the channel. A failure leaves nothing to do.
            let _ = unsafe { (functions.destroy_channel)(channel.as_ptr()) };
        })?;
        let queue = Self { raw, channel, context: Arc::clone(context) };
        set_nonblocking(queue.channel())?;
        Ok(queue)
    }

    fn channel(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open until the channel is destroyed, which the borrow outlives.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    fn poll(&self, out: &mut [MaybeUninit<abi::Completion>]) -> io::Result<usize> {
        let room = c_int::try_from(out.len()).unwrap_or(c_int::MAX);
        // SAFETY: the operation table is that of the open context; it writes at most `room` completions.
        let count = unsafe { (self.context.raw.as_ref().poll_cq)(self.raw.as_ptr(), room, out.as_mut_ptr().cast()) };
        usize::try_from(count).map_err(|_| io::Error::from_raw_os_error(libc::EIO))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let functions = self.context.functions;
        // SAFETY: the queue pair that used the queue is gone (field order), its events are acknowledged as they are
        // taken, and neither queue nor channel is used after this.
        let destroyed = unsafe {
            check((functions.destroy_queue)(self.raw.as_ptr()))
                .and_then(|()| check((functions.destroy_channel)(self.channel.as_ptr())))
        };
        if let Err(error) = destroyed {
            tracing::warn!(%error, "RDMA completion queue can't be destroyed");
        }
    }
}

/// The raw queue pair, destroyed before what it uses.
struct RawPair {
    raw: NonNull<abi::Pair>,
    domain: Arc<Domain>,
    /// What posted work names, with the sequence number of the last work that does, in that order.
    lent: VecDeque<(u64, Arc<Part>)>,
}

impl Drop for RawPair {
    fn drop(&mut self) {
        // SAFETY: the pair is not used after this. When the call returns, the device takes no more from its queues and
        // touches no memory on its behalf.
        if let Err(error) = check(unsafe { (self.domain.context.functions.destroy_pair)(self.raw.as_ptr()) }) {
            tracing::error!(%error, "RDMA queue pair can't be destroyed: memory of its work is never freed");
            std::mem::forget(std::mem::take(&mut self.lent));
        }
    }
}

/// A reliable connected queue pair: created, then connected, then used, then stopped.
pub(crate) struct QueuePair {
    // Dropped in this order: the pair uses the queue.
    pair: RawPair,
    queue: Queue,
    port: u8,
    depth: u32,
    ranges: u32,
    inline_bytes: u32,
    /// Sequence number of the next work.
    next: u64,
    /// All work before this has ended.
    ended: u64,
    /// Some work failed: what has no completion of its own from here on was flushed.
    has_failed: bool,
    works: Vec<abi::Work>,
    local: Vec<abi::Range>,
}

// SAFETY: as for `Context`; the pointers in `works` and `local` are set and used within one call.
unsafe impl Send for QueuePair {}

/// How a queue pair talks to its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Index of the own address in the port's table.
    pub(crate) gid_index: u8,
    pub(crate) mtu: PathMtu,
    /// Reads on their way that the other side issues here.
    pub(crate) reads_in: u8,
    /// Reads on their way that this side issues.
    pub(crate) reads_out: u8,
    /// Own first packet number, 24 bits.
    pub(crate) psn: u32,
    /// For an acknowledgement: 4.096 µs times two to this, 1 to 31. Waited for `retries + 1` times.
    pub(crate) timeout_exponent: u8,
    /// At most 6: some devices take 7 for ever.
    pub(crate) retries: u8,
}

impl QueuePair {
    /// Creates a pair that takes `depth` work requests of up to `ranges` local ranges at once, within the device's limits.
    /// With `serves`, the peer may read and write what is registered for it in the domain.
    pub(crate) fn new(domain: &Arc<Domain>, port: u8, depth: u32, ranges: u32, serves: bool) -> io::Result<Self> {
        let context = &domain.context;
        let (depth, ranges) = (depth.clamp(1, context.limits.work.max(1)), ranges.clamp(1, context.limits.ranges));
        // Every work may give a completion, if all fail.
        let queue = Queue::new(context, depth)?;
        let create = |inline_bytes| {
            let limits = abi::PairLimits {
                send_work: depth,
                receive_work: 0,
                send_ranges: ranges,
                receive_ranges: 0,
                inline_bytes,
            };
            let mut setup = abi::PairSetup {
                context: ptr::null_mut(),
                send_queue: queue.raw.as_ptr(),
                receive_queue: queue.raw.as_ptr(),
                shared_receive_queue: ptr::null_mut(),
                limits,
                pair_type: abi::PAIR_RELIABLE,
                signal_all: 0,
            };
            // SAFETY: domain and queue are alive and of one context; the function reads the setup and stores the limits
            // that it grants.
            let raw = made(unsafe { (context.functions.create_pair)(domain.raw.as_ptr(), &raw mut setup) })?;
            Ok((raw, setup.limits.inline_bytes))
        };
        // A device that can't do as much inline refuses.
        let (raw, inline_bytes) = create(INLINE_BYTES).or_else(|_: io::Error| create(0))?;
        let mut created = Self {
            pair: RawPair { raw, domain: Arc::clone(domain), lent: VecDeque::new() },
            queue,
            port,
            depth,
            ranges,
            inline_bytes,
            next: 0,
            ended: 0,
            has_failed: false,
            works: Vec::new(),
            local: Vec::new(),
        };
        let access = if serves { abi::ACCESS_REMOTE_READ | abi::ACCESS_REMOTE_WRITE } else { 0 };
        let set = abi::SET_STATE | abi::SET_PKEY_INDEX | abi::SET_PORT | abi::SET_ACCESS;
        created.modify(set, |attributes| {
            attributes.state = abi::STATE_INIT;
            attributes.port = port;
            attributes.access = access as u32;
        })?;
        Ok(created)
    }

    /// Its number, 24 bits.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the pair is alive, and its number does not change.
        unsafe { self.pair.raw.as_ref() }.number
    }

    /// Connects it to the peer's pair: it serves from here on.
    pub(crate) fn receive_from(&mut self, peer: &Endpoint, route: &Route) -> io::Result<()> {
        let set = abi::SET_STATE
            | abi::SET_ADDRESS
            | abi::SET_PATH_MTU
            | abi::SET_TARGET_NUMBER
            | abi::SET_RECEIVE_PSN
            | abi::SET_READS_IN
            | abi::SET_RNR_TIMER;
        let port = self.port;
        self.modify(set, |attributes| {
            attributes.state = abi::STATE_READY_TO_RECEIVE;
            attributes.path_mtu = c_int::from(route.mtu.code());
            attributes.target_number = peer.number;
            attributes.receive_psn = peer.psn;
            attributes.reads_in = route.reads_in;
            // 0.64 ms; nothing here waits for receives, but a value has to be there.
            attributes.receiver_not_ready_timer = 12;
            attributes.address.port = port;
            attributes.address.lid = peer.lid;
            attributes.address.is_global = u8::from(peer.link == LinkLayer::Ethernet);
            attributes.address.route.target = peer.gid;
            attributes.address.route.source_index = route.gid_index;
            attributes.address.route.hop_limit = 64;
        })
    }

    /// Lets it issue work too.
    pub(crate) fn send_to(&mut self, route: &Route) -> io::Result<()> {
        let set = abi::SET_STATE
            | abi::SET_TIMEOUT
            | abi::SET_RETRIES
            | abi::SET_RNR_RETRIES
            | abi::SET_SEND_PSN
            | abi::SET_READS_OUT;
        self.modify(set, |attributes| {
            attributes.state = abi::STATE_READY_TO_SEND;
            attributes.timeout = route.timeout_exponent;
            attributes.retries = route.retries;
            attributes.receiver_not_ready_retries = route.retries;
            attributes.send_psn = route.psn;
            attributes.reads_out = route.reads_out;
        })
    }

    fn modify(&mut self, set: c_int, fill: impl FnOnce(&mut abi::PairAttributes)) -> io::Result<()> {
        // SAFETY: made of numbers only, for which all zeros is valid.
        let mut attributes: abi::PairAttributes = unsafe { std::mem::zeroed() };
        fill(&mut attributes);
        let functions = self.pair.domain.context.functions;
        // SAFETY: the pair is alive; the function reads the fields that `set` names.
        check(unsafe { (functions.modify_pair)(self.pair.raw.as_ptr(), &raw mut attributes, set) })
    }

    /// Work that can be posted now.
    pub(crate) fn room(&self) -> usize {
        (u64::from(self.depth) - self.in_flight()) as usize
    }

    /// Work that has not ended.
    pub(crate) fn in_flight(&self) -> u64 {
        self.next - self.ended
    }

    /// Most local ranges of one work.
    pub(crate) fn ranges(&self) -> usize {
        self.ranges as usize
    }

    /// Posts all of `work` at once, as one list: at most [`QueuePair::room`]. Gives the sequence number of the first; they
    /// count up from there, and so do what [`QueuePair::poll`] gives.
    ///
    /// Writes that are small enough go inline: their bytes are copied here.
    ///
    /// # Errors
    /// Those of the device; then it is not known to the caller how many were posted, so [`QueuePair::stop`] has to follow.
    /// `InvalidInput` if a range leaves its part or there are too many; nothing was posted.
    pub(crate) fn post(&mut self, work: &[Work<'_>]) -> io::Result<u64> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        if work.is_empty() || work.len() > self.room() || work.iter().any(|work| work.local.len() > self.ranges()) {
            return Err(invalid());
        }
        self.local.clear();
        for range in work.iter().flat_map(|work| work.local) {
            if !Arc::ptr_eq(&range.part.domain, &self.pair.domain) {
                return Err(invalid());
            }
            let address = range.part.address(range.offset, u64::from(range.length))?;
            // SAFETY: the registration is alive, and its keys don't change.
            let lkey = unsafe { range.part.raw.as_ref() }.lkey;
            self.local.push(abi::Range { address, length: range.length, lkey });
        }
        self.works.clear();
        let mut used = 0;
        for (sequence, work) in (self.next..).zip(work) {
            let ranges = &mut self.local[used..used + work.local.len()];
            used += work.local.len();
            let bytes: u64 = ranges.iter().map(|range| u64::from(range.length)).sum();
            let is_inline = work.way == Way::Write && bytes > 0 && bytes <= u64::from(self.inline_bytes);
            self.works.push(abi::Work {
                id: sequence,
                next: ptr::null_mut(),
                ranges: ranges.as_mut_ptr(),
                range_count: c_int::try_from(ranges.len()).map_err(|_| invalid())?,
                opcode: if work.way == Way::Read { abi::READ } else { abi::WRITE },
                flags: if work.is_signalled { abi::SEND_SIGNALLED } else { 0 }
                    | if is_inline { abi::SEND_INLINE } else { 0 },
                immediate: 0,
                remote_address: work.remote_address,
                rkey: work.rkey,
                rest: [0; 9],
            });
        }
        let first = self.works.as_mut_ptr();
        for index in 1..self.works.len() {
            // SAFETY: both places are inside `works`, which is not reallocated before the call below.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        let sequence = self.next;
        // Before the device hears of it: should the call fail in the middle, some of it is on its way.
        for (sequence, work) in (sequence..).zip(work) {
            for range in work.local {
                match self.pair.lent.back_mut() {
                    Some((last, part)) if Arc::ptr_eq(part, &range.part) => *last = sequence,
                    _ => self.pair.lent.push_back((sequence, Arc::clone(&range.part))),
                }
            }
        }
        self.next += work.len() as u64;
        let mut bad = ptr::null_mut();
        // SAFETY: the operation table is that of the open context. The list, its ranges and the memory that inline work
        // is copied from are alive during the call; the memory of all other work is kept by `lent` until its completion
        // was polled or the pair is destroyed. Ranges were checked to lie in their parts, whose lkeys allow no more than
        // they were registered for.
        let posted =
            unsafe { (self.queue.context.raw.as_ref().post_send)(self.pair.raw.as_ptr(), first, &raw mut bad) };
        check(posted).map(|()| sequence)
    }

    /// Takes completions: one entry for each work that has ended, in order. Gives whether there were any.
    ///
    /// # Errors
    /// The device's; its queue is of no use any more.
    pub(crate) fn poll(&mut self, out: &mut Vec<(u64, Status)>) -> io::Result<bool> {
        let mut completions = [MaybeUninit::uninit(); COMPLETIONS];
        let count = self.queue.poll(&mut completions)?;
        for completion in &completions[..count] {
            // SAFETY: `poll` filled the first `count`.
            let completion = unsafe { completion.assume_init() };
            let (sequence, status) = (completion.id, Status::of_code(completion.status));
            if sequence < self.ended || sequence >= self.next {
                return Err(io::Error::from_raw_os_error(libc::EPROTO));
            }
            // Work without a completion of its own ended before: with success, unless the pair had failed by then.
            let before = if self.has_failed { Status::Flushed } else { Status::Success };
            out.extend((self.ended..sequence).map(|sequence| (sequence, before)));
            out.push((sequence, status));
            self.has_failed |= status != Status::Success;
            self.ended = sequence + 1;
        }
        while self.pair.lent.front().is_some_and(|(last, _)| *last < self.ended) {
            self.pair.lent.pop_front();
        }
        Ok(count > 0)
    }

    /// Asks for an event with the next completion. Poll once more after this, before waiting.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: the operation table is that of the open context.
        check(unsafe { (self.queue.context.raw.as_ref().req_notify_cq)(self.queue.raw.as_ptr(), 0) })
    }

    /// Readable when an event is there that was asked for.
    pub(crate) fn events(&self) -> BorrowedFd<'_> {
        self.queue.channel()
    }

    /// Takes the events that are there.
    pub(crate) fn take_events(&self) {
        let functions = self.queue.context.functions;
        loop {
            let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is alive and does not block; the function stores which queue the event is of.
            let taken =
                unsafe { (functions.get_queue_event)(self.queue.channel.as_ptr(), &raw mut queue, &raw mut context) };
            if taken != 0 {
                return;
            }
            // SAFETY: the event is of this queue, the only one of the channel, and acknowledged once.
            unsafe { (functions.ack_queue_events)(queue, 1) };
        }
    }

    /// Moves it to the error state: what is on its way is flushed, nothing more leaves or is answered.
    pub(crate) fn stop(&mut self) -> io::Result<()> {
        self.modify(abi::SET_STATE, |attributes| attributes.state = abi::STATE_ERROR)
    }
}

#[cfg(test)]
mod tests;
