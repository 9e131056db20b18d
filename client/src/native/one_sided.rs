//! Reads of memory by an RDMA device, which asks no thread there: this client's of a node's memory, and whether a node may read
//! this client's.
//!
//! The node answers where the object lies and holds it there for a time. This side reads, looks whether that time was over
//! and whether a generation has changed, sums the bytes up, and ends the hold. If any of it fails, the object is asked for
//! anew, to come with the answer: what was read is dropped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crc32fast::Hasher;
use rustix::time::{ClockId, clock_gettime};
use tidepool_metadata::envelope;
use tidepool_metadata::proto::{self, EngineMethod};
use tidepool_transfer::{
    AccessRights, Engine, Landed, Landing, PeerId, Reading, RegionId, RegionKey, RegionTicket, SegmentId,
    TransferError, TransportKind,
};

use super::{Link, Target, lock};
use crate::builder::OneSidedReads;
use crate::call::shown;
use crate::error::{Error, Refusal};

/// Taken at a time, so that the sum reads from the cache.
const STEP_BYTES: usize = 256 << 10;
/// Slots of the landing, of 1 MiB.
const SLOTS: usize = 16;
/// How often the ways to a node are looked at.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// A node that does not tell the keys of its memory sooner is still registering it.
const OPEN_TIME: Duration = Duration::from_secs(1);
/// A node that could not read this client's memory is not asked to for so long, and twice as long each time.
const PUTS_AGAIN: Duration = Duration::from_secs(1);
const PUTS_AGAIN_MOST: Duration = Duration::from_secs(60);
/// The node has so long to hear that a hold is over, which nobody waits for.
const END_TIME: Duration = Duration::from_secs(5);

/// What all links of a client share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    landing: OnceLock<Option<Landing>>,
    reads: AtomicU64,
    puts: AtomicU64,
}

impl Shared {
    pub(crate) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    pub(crate) fn puts(&self) -> u64 {
        self.puts.load(Ordering::Relaxed)
    }

    fn landing(&self, engine: &Engine) -> Option<&Landing> {
        let start = || {
            let failed = |error: &TransferError| tracing::warn!(%error, "nothing is read from nodes' memory");
            Landing::start(engine, SLOTS).inspect_err(failed).ok()
        };
        self.landing.get_or_init(start).as_ref()
    }
}

/// Of a link.
#[derive(Debug)]
pub(super) struct OneSided {
    wanted: OneSidedReads,
    shared: Arc<Shared>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_possible: bool,
    looked: Option<Instant>,
    segment: Segment,
    puts_again: Option<Instant>,
    puts_pause: Duration,
}

/// The node's memory.
#[derive(Debug, Default)]
enum Segment {
    #[default]
    Unknown,
    /// A thread is at it; others have the bytes come with the answer.
    Opening,
    Open(RegionTicket, SegmentId),
}

impl OneSided {
    /// Of a link to a node on this host, or not.
    pub(super) fn new(wanted: OneSidedReads, shared: Arc<Shared>, on_this_host: bool) -> Self {
        let by_device = if on_this_host { OneSidedReads::Never } else { OneSidedReads::Rdma };
        let wanted = if wanted == OneSidedReads::Rdma { by_device } else { wanted };
        Self { wanted, shared, state: Mutex::default() }
    }

    /// Whether the node's memory can be read, as far as is known.
    pub(super) fn is_possible(&self, engine: &Engine, peer: PeerId) -> bool {
        if self.wanted == OneSidedReads::Never {
            return false;
        }
        let mut state = lock(&self.state);
        if state.looked.is_none_or(|looked| looked.elapsed() >= LOOK_AGAIN) {
            let rails = engine.rails(peer).unwrap_or_default();
            let serves = |kind| kind == TransportKind::Rdma || self.wanted == OneSidedReads::Always;
            state.is_possible = rails.iter().any(|rail| serves(rail.transport) && rail.rests.is_none());
            state.looked = Some(Instant::now());
        }
        state.is_possible
    }

    /// Counts a put whose values the node has read itself.
    pub(super) fn note_put(&self, message: &proto::PutItemsRequest) {
        if message.readable.is_some() {
            self.shared.puts.fetch_add(1, Ordering::Relaxed);
            lock(&self.state).puts_pause = Duration::ZERO;
        }
    }

    /// Whether the node may be asked to read this client's memory.
    pub(super) fn may_put(&self, engine: &Engine, peer: PeerId) -> bool {
        self.is_possible(engine, peer) && lock(&self.state).puts_again.is_none_or(|again| again <= Instant::now())
    }

    /// The node could not read it.
    pub(super) fn put_failed(&self) {
        let mut state = lock(&self.state);
        state.puts_pause = (state.puts_pause * 2).clamp(PUTS_AGAIN, PUTS_AGAIN_MOST);
        state.puts_again = Some(Instant::now() + state.puts_pause);
    }

    /// The link ends.
    pub(super) fn close(&self, engine: &Engine) {
        if let Segment::Open(_, segment) = std::mem::take(&mut lock(&self.state).segment) {
            let _closed = engine.close_segment(segment);
        }
    }

    /// Not for a while.
    fn failed(&self) {
        let mut state = lock(&self.state);
        (state.is_possible, state.looked) = (false, Some(Instant::now()));
    }

    fn transport(&self) -> Option<TransportKind> {
        (self.wanted != OneSidedReads::Always).then_some(TransportKind::Rdma)
    }

    /// The node's memory; `None` if another thread is opening it.
    fn segment(
        &self,
        engine: &Engine,
        peer: PeerId,
        ticket: RegionTicket,
        deadline: Instant,
    ) -> Result<Option<SegmentId>, TransferError> {
        let old = {
            let mut state = lock(&self.state);
            match &state.segment {
                Segment::Open(known, segment) if *known == ticket => return Ok(Some(*segment)),
                Segment::Opening => return Ok(None),
                Segment::Open(..) | Segment::Unknown => std::mem::replace(&mut state.segment, Segment::Opening),
            }
        };
        if let Segment::Open(_, old) = old {
            let _closed = engine.close_segment(old);
        }
        let opened = engine.open_ticket(peer, ticket, deadline.min(Instant::now() + OPEN_TIME));
        let reached = |segment: &SegmentId| {
            self.wanted == OneSidedReads::Always
                || engine.segment(*segment).is_ok_and(|(_, way)| way == Some(TransportKind::Rdma))
        };
        let mut state = lock(&self.state);
        state.segment = match &opened {
            Ok(segment) if reached(segment) => Segment::Open(ticket, *segment),
            _ => Segment::Unknown,
        };
        drop(state);
        let segment = opened?;
        if !reached(&segment) {
            // Its keys were not told: it is registered by the time that somebody asks again.
            let _closed = engine.close_segment(segment);
            return Err(TransferError::Full { what: "registered memory", limit: 0 });
        }
        Ok(Some(segment))
    }
}

/// Since the host started, with the time that it slept: what a hold's time is counted by.
pub(super) fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or_default())
}

/// Why a landing gave nothing.
enum Unread {
    Transfer(TransferError),
    Client(Error),
}

impl From<TransferError> for Unread {
    fn from(error: TransferError) -> Self {
        Self::Transfer(error)
    }
}

impl Link {
    /// Memory to read the node's into; `None` if its devices don't reach it, or others take all that there is.
    pub(super) fn reading(&self) -> Option<Reading<'_>> {
        if !self.one_sided.is_possible(&self.engine, self.peer) {
            return None;
        }
        self.one_sided.shared.landing(&self.engine)?.reserve()
    }

    /// Reads what the node holds, which was asked for at `asked` (since boot), and ends the hold.
    pub(super) fn read_held(
        &self,
        reading: Reading<'_>,
        key: &[u8],
        (description, held): (&proto::ObjectDescription, &proto::Held),
        asked: Duration,
        target: &mut impl Target,
        deadline: Instant,
    ) -> Result<(), Error> {
        let read = self.read_where_it_lies(reading, key, (description, held), asked, target, deadline);
        let end = proto::EndHoldsRequest { ids: vec![held.id] };
        let message = envelope::request(EngineMethod::EndHolds, END_TIME, &end);
        // Nobody waits for it.
        let told = self.engine.call_async(self.peer, &message, Instant::now() + END_TIME);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            drop(runtime.spawn(told));
        }
        match read {
            Ok(()) => drop(self.one_sided.shared.reads.fetch_add(1, Ordering::Relaxed)),
            Err(Unread::Client(_)) => {}
            Err(Unread::Transfer(_)) => self.one_sided.failed(),
        }
        read.map_err(|unread| match unread {
            Unread::Transfer(error) => Error::Refused(Box::new(Refusal::of_engine(&error))),
            Unread::Client(error) => error,
        })
    }

    fn read_where_it_lies(
        &self,
        mut reading: Reading<'_>,
        key: &[u8],
        (description, held): (&proto::ObjectDescription, &proto::Held),
        asked: Duration,
        target: &mut impl Target,
        deadline: Instant,
    ) -> Result<(), Unread> {
        let broken = |why| Unread::Client(Error::Protocol { operation: "get", why });
        let expected = description.checksum.ok_or(broken("has no checksum"))?;
        let total = held.lengths.iter().try_fold(0_u64, |total, &length| total.checked_add(length));
        if held.starts.len() != held.lengths.len()
            || held.generation_places.len() != held.generations.len()
            || total != Some(description.length)
        {
            return Err(broken("does not say where all bytes lie"));
        }
        let ticket = RegionTicket {
            region: RegionId(held.region),
            key: RegionKey(held.key[..].try_into().map(u128::from_le_bytes).map_err(|_| broken("has no key"))?),
            length: held.region_length,
            rights: AccessRights::READ,
        };
        let ends = asked + Duration::from_millis(held.milliseconds.into());
        let deadline = deadline.min(Instant::now() + ends.saturating_sub(since_boot()));
        let segment = self.one_sided.segment(&self.engine, self.peer, ticket, deadline)?;
        let segment = segment.ok_or(broken("lies in memory that another thread is opening"))?;
        let way = self.one_sided.transport();
        target.begin(key, description.length).map_err(Unread::Client)?;
        let ranges: Vec<(u64, u64)> = held.starts.iter().copied().zip(held.lengths.iter().copied()).collect();
        let mut sum = Hasher::new();
        reading.read(segment, &ranges, way, deadline, |mut landed: Landed<'_>| {
            while landed.left() > 0 {
                sum.update(target.land(&mut landed).map_err(Unread::Client)?);
            }
            Ok::<_, Unread>(())
        })?;
        // After the last byte, for all of them.
        let words: Vec<(u64, u64)> = held.generation_places.iter().map(|&place| (place, 8)).collect();
        let mut generations = held.generations.iter();
        let mut are_unchanged = true;
        reading.read(segment, &words, way, deadline, |mut landed: Landed<'_>| {
            let mut word = [0; 8];
            while landed.left() > 0 {
                landed.take(&mut word).map_err(|_| broken("has half a generation"))?;
                are_unchanged &= generations.next() == Some(&u64::from_le_bytes(word));
            }
            Ok::<_, Unread>(())
        })?;
        if since_boot() > ends {
            return Err(broken("took longer to be read than it was held"));
        }
        let actual = sum.finalize();
        match actual == expected && are_unchanged {
            true => Ok(()),
            false => Err(Unread::Client(Error::ChecksumMismatch { key: shown(key), expected, actual })),
        }
    }
}

/// As many bytes as are taken next.
pub(super) fn step(landed: &Landed<'_>) -> usize {
    usize::try_from(landed.left()).unwrap_or(usize::MAX).min(STEP_BYTES)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use prost::Message as _;
    use tidepool_metadata::envelope::Request;
    use tidepool_transfer::{Handler, Memory, Responder, Settings};

    use super::super::Filling;
    use super::super::calls::Got;
    use super::super::{Lending, Staging, Times};
    use super::*;

    const LENGTH: u64 = 300_000;
    const AT: u64 = 4096;

    /// A node that holds one object and says of it what the test wants.
    struct Node {
        value: Vec<u8>,
        held: proto::Held,
        checksum: u32,
        told: Sender<(EngineMethod, bool)>,
    }

    impl Handler for Node {
        fn handle(&self, request: &[u8], responder: Responder) {
            let request = Request::decode(request).expect("a message");
            if request.method == EngineMethod::EndHolds {
                let ended = proto::EndHoldsRequest::decode(request.message).expect("ids");
                self.told.send((EngineMethod::EndHolds, ended.ids == [self.held.id])).expect("told");
                return responder.reply(&envelope::answer(true, &proto::EndHoldsReply {}));
            }
            let may_hold = proto::GetRequest::decode(request.message).expect("a get").may_hold;
            self.told.send((EngineMethod::Get, may_hold)).expect("told");
            let checksum = if may_hold { self.checksum } else { crc32fast::hash(&self.value) };
            let held = may_hold.then(|| Box::new(self.held.clone()));
            let description =
                proto::ObjectDescription { length: LENGTH, checksum: Some(checksum), held, ..Default::default() };
            let head = envelope::answer(true, &description);
            let value = if may_hold { &[] } else { &self.value[..] };
            responder.reply_parts(&[&head, value]);
        }
    }

    fn engine(listen: &[&str]) -> Engine {
        let listen = listen.iter().map(ToString::to_string).collect();
        Engine::start(Settings { listen, same_host: false, ..Settings::default() }).expect("started")
    }

    /// Gets the object of a node that says `change` of what it holds; whether that was read where it lies.
    fn is_read_there(change: impl FnOnce(&mut proto::Held, &mut u32)) -> bool {
        let there = engine(&["127.0.0.1:0"]);
        let memory = Memory::anonymous(1 << 20).expect("memory");
        let value: Vec<u8> = (0..LENGTH).map(|index| (index * 7 % 251) as u8).collect();
        memory.write_at(AT, &value).expect("inside");
        memory.write_at(0, &77_u64.to_le_bytes()).expect("inside");
        let ticket = there.register(&memory, AccessRights::READ, None).expect("registered");
        let mut held = proto::Held {
            id: 5,
            milliseconds: 60_000,
            region: ticket.region.0,
            key: ticket.key.0.to_le_bytes().to_vec().into(),
            region_length: ticket.length,
            starts: vec![AT, AT + 1000],
            lengths: vec![1000, LENGTH - 1000],
            generation_places: vec![0],
            generations: vec![77],
        };
        let mut checksum = crc32fast::hash(&value);
        change(&mut held, &mut checksum);
        let (told, hears) = channel();
        there.set_handler(Arc::new(Node { value: value.clone(), held, checksum, told }));

        let (here, shared) = (engine(&[]), Arc::<Shared>::default());
        let deadline = Instant::now() + Duration::from_secs(20);
        let peer = here.connect(&there.addresses()[0].to_string(), deadline).expect("connected");
        let link = Link {
            engine: here,
            peer,
            lending: Lending::new(None),
            staging: Staging::new(None),
            one_sided: OneSided::new(OneSidedReads::Always, Arc::clone(&shared), false),
            is_here: false,
            lent_puts: Arc::default(),
            times: Times::default(),
        };
        let mut buffer = vec![0; value.len() + 1];
        let mut target = Filling { buffer: &mut buffer, filled: 0 };
        let got = link.get(&proto::GetRequest { key: "k".into(), ..Default::default() }, &mut target, deadline);
        assert!(matches!(got, Ok(Got::Whole(Some(info))) if info.length == LENGTH));
        assert!(buffer[..value.len()] == value && buffer[value.len()] == 0);
        let mut heard: Vec<_> = (0..if shared.reads() == 1 { 2 } else { 3 })
            .map(|_| hears.recv_timeout(Duration::from_secs(20)).expect("told"))
            .collect();
        heard.sort_unstable_by_key(|&(method, yes)| (method as i32, !yes));
        assert_eq!(heard[0], (EngineMethod::Get, true));
        assert_eq!(heard.last(), Some(&(EngineMethod::EndHolds, true)), "whatever became of it");
        shared.reads() == 1
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_held_is_read_and_else_asked_for() {
        assert!(is_read_there(|_, _| ()));
        assert!(!is_read_there(|held, _| held.generations = vec![78]), "reused meanwhile");
        assert!(!is_read_there(|held, _| held.milliseconds = 0), "the time was over");
        assert!(!is_read_there(|_, checksum| *checksum += 1));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn nonsense_about_what_is_held_does_no_harm() {
        assert!(!is_read_there(|held, _| held.lengths = vec![1000]));
        assert!(!is_read_there(|held, _| held.lengths = vec![u64::MAX, LENGTH + 1]));
        assert!(!is_read_there(|held, _| held.lengths[1] += 1));
        assert!(!is_read_there(|held, _| held.starts[1] = u64::MAX));
        assert!(!is_read_there(|held, _| held.generation_places = vec![]));
        assert!(!is_read_there(|held, _| held.generation_places = vec![1 << 20]));
        assert!(!is_read_there(|held, _| held.key = "short".into()));
        assert!(!is_read_there(|held, _| held.key = vec![0; 16].into()));
        assert!(!is_read_there(|held, _| held.region += 1));
        // Bounds are its engine's to check.
        assert!(is_read_there(|held, _| held.region_length = 1 << 40));
    }
}
