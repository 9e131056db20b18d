//! The load of a drill: clients that put, get, ask, remove and replace all the while, and write down what they heard.
//!
//! Two kinds, because a client that repeats a put by itself asks twice:
//!
//! - *Contended*: many calls on few keys at a time. Puts and upserts are sent once, so that each is one operation of the
//!   history; removals are repeated, their request ids make them one. A key is left after [`KEY_CALLS`] calls or some without
//!   an answer, so that no key's history grows beyond what can be judged; what it held then must stay.
//! - *Standing*: each key is put once, by a client that repeats, and must be found by everybody from then on, by whatever way
//!   reads go. The oldest are removed when there are too many bytes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tidepool_client::workload::Payload;
use tidepool_client::{Client, Existence, GetOptions, PutOptions, PutOutcome, RemoveOutcome};
use tokio::task::JoinSet;

use crate::history::{Call, Found, KeyNumber, Operation, PutHeard, RemoveHeard, ValueNumber};
use crate::random::Random;

/// Contended keys at a time.
const SLOTS: u64 = 12;
/// Calls after which a contended key is left; one without an answer counts as [`UNANSWERED_CALLS`].
const KEY_CALLS: u64 = 200;
const UNANSWERED_CALLS: u64 = 25;
const CONTENDERS: u64 = 4;
const STANDERS: u64 = 2;
/// Pauses between the calls of one client: nodes under test, clients and checker share this machine.
const CONTENDER_PAUSE: Duration = Duration::from_millis(1);
const STANDER_PAUSE: Duration = Duration::from_millis(4);
/// First number of the standing keys.
const STANDING: u64 = 1 << 40;
/// Left contended keys that are read now and then, or at the end.
const MOST_LEFT: usize = 4096;
/// Largest value, of two slices; few are so large.
const LARGEST_BYTES: u64 = 300 << 10;

/// Standing objects: all bytes at a time, and of the largest one.
#[derive(Clone, Copy)]
pub(super) struct Standing {
    bytes: u64,
    largest: u64,
}

impl Standing {
    pub(super) const SMALL: Self = Self { bytes: 24 << 20, largest: 4 << 10 };
    /// Soon more than a node has of memory.
    pub(super) const LARGE: Self = Self { bytes: 64 << 20, largest: 64 << 10 };
}

/// The clients that a load uses.
#[derive(Clone)]
pub(super) struct Clients {
    /// Sends each call once.
    pub(super) once: Client,
    /// Repeats what may be repeated.
    pub(super) patient: Client,
    /// Repeats, but gives up soon: what lies on a dead node stays unavailable.
    pub(super) reader: Client,
}

/// What clients share.
pub(super) struct Load {
    began: Instant,
    seed: u64,
    /// What all puts ask for.
    put: PutOptions,
    sizes: Standing,
    history: Mutex<Vec<Operation>>,
    /// When nodes were gone.
    disturbances: Mutex<Vec<(Duration, Option<Duration>)>>,
    next_value: AtomicU64,
    next_standing: AtomicU64,
    slots: Vec<AtomicU64>,
    left: Mutex<Vec<u64>>,
    standing: Mutex<VecDeque<(u64, u64)>>,
    standing_bytes: AtomicU64,
    acknowledged: AtomicU64,
    failed: AtomicU64,
    /// Objects have copies enough that each read of what was acknowledged must succeed; how many did not.
    always_read: bool,
    unread: Mutex<Vec<String>>,
    stop: AtomicBool,
}

impl Load {
    pub(super) fn new(seed: u64, put: PutOptions, sizes: Standing, always_read: bool) -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            seed,
            put,
            sizes,
            history: Mutex::default(),
            disturbances: Mutex::default(),
            next_value: AtomicU64::new(1),
            next_standing: AtomicU64::new(STANDING),
            slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
            left: Mutex::default(),
            standing: Mutex::default(),
            standing_bytes: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            always_read,
            unread: Mutex::default(),
            stop: AtomicBool::new(false),
        })
    }

    /// Starts all clients.
    pub(super) fn start(self: &Arc<Self>, clients: &Clients, runtime: &tokio::runtime::Runtime) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        for number in 0..CONTENDERS {
            let (load, clients) = (Arc::clone(self), clients.clone());
            let random = Random::new(self.seed ^ (number + 1));
            tasks.spawn_on(async move { load.contend(clients, random).await }, runtime.handle());
        }
        for number in 0..STANDERS {
            let (load, clients) = (Arc::clone(self), clients.clone());
            let random = Random::new(self.seed ^ (number + 101));
            tasks.spawn_on(async move { load.stand(clients, random).await }, runtime.handle());
        }
        tasks
    }

    /// Ends all clients after their calls.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    /// Writes that were acknowledged so far.
    pub(super) fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Calls without an answer so far.
    pub(super) fn failed(&self) -> u64 {
        self.failed.load(Ordering::SeqCst)
    }

    /// Why reads of standing objects failed although they had another copy.
    pub(super) fn unread(&self) -> Vec<String> {
        self.unread.lock().clone()
    }

    /// From here on a node may be gone.
    pub(super) fn disturb(&self) {
        let now = self.now();
        let mut disturbances = self.disturbances.lock();
        if disturbances.last().is_none_or(|(_, end)| end.is_some()) {
            disturbances.push((now, None));
        }
    }

    /// All nodes are there.
    pub(super) fn calm(&self) {
        let now = self.now();
        if let Some((_, end)) = self.disturbances.lock().last_mut() {
            end.get_or_insert(now);
        }
    }

    /// What was asked and heard; calls of disturbed times say so.
    pub(super) fn history(&self) -> Vec<Operation> {
        let mut history = self.history.lock().clone();
        let disturbances = self.disturbances.lock();
        for operation in &mut history {
            operation.may_replace_absent = disturbances.iter().any(|&(begin, end)| {
                operation.returned.is_none_or(|returned| returned >= begin)
                    && end.is_none_or(|end| operation.invoked <= end)
            });
        }
        history
    }

    /// Reads every key once more; enough nodes run. Answers how many could not be read.
    pub(super) async fn read_all(&self, client: &Client) -> u64 {
        let mut keys: Vec<u64> = self.left.lock().clone();
        keys.extend((0..SLOTS).map(|slot| self.contended(slot)));
        keys.extend(self.standing.lock().iter().map(|&(key, _)| key));
        let mut unread = 0;
        for key in keys {
            let options = GetOptions { fresh: true, ..GetOptions::default() };
            unread += u64::from(!self.get(client, key, options).await);
        }
        unread
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn contended(&self, slot: u64) -> u64 {
        self.slots[slot as usize].load(Ordering::SeqCst) / KEY_CALLS * SLOTS + slot
    }

    /// Counts calls on a slot's key, and leaves the key when there were enough.
    fn count(&self, slot: u64, key: u64, calls: u64) {
        let used = &self.slots[slot as usize];
        let advance = |now: u64| {
            // Others have left it already.
            let is_current = now / KEY_CALLS * SLOTS + slot == key;
            is_current.then(|| (now + calls).min((now / KEY_CALLS + 1) * KEY_CALLS))
        };
        if let Ok(before) = used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, advance)
            && (before + calls) / KEY_CALLS > before / KEY_CALLS
        {
            let mut left = self.left.lock();
            if left.len() < MOST_LEFT {
                left.push(key);
            }
        }
    }

    fn record(&self, key: u64, invoked: Duration, returned: Option<Duration>, call: Call) {
        let operation = Operation { key: KeyNumber(key), invoked, returned, call, may_replace_absent: false };
        self.history.lock().push(operation);
        if returned.is_none() {
            self.failed.fetch_add(1, Ordering::SeqCst);
        }
    }

    async fn contend(self: Arc<Self>, clients: Clients, mut random: Random) {
        while !self.stop.load(Ordering::SeqCst) {
            let slot = random.below(SLOTS);
            let key = self.contended(slot);
            let fresh = GetOptions { fresh: true, ..GetOptions::default() };
            let is_answered = match random.below(100) {
                0..10 => self.put(&clients.once, key, false, &mut random).await,
                10..30 => self.put(&clients.patient, key, false, &mut random).await,
                30..42 => self.put(&clients.patient, key, true, &mut random).await,
                42..58 => self.remove(&clients.patient, key).await,
                58..76 => self.get(&clients.reader, key, fresh).await,
                76..84 => self.exists(&clients.reader, key, true).await,
                84..90 => self.get(&clients.reader, key, GetOptions::default()).await,
                90..95 => self.exists(&clients.reader, key, false).await,
                _ => {
                    let left = random.choose(&self.left.lock()).copied();
                    if let Some(key) = left {
                        self.get(&clients.reader, key, fresh).await;
                    }
                    true
                }
            };
            self.count(slot, key, if is_answered { 1 } else { UNANSWERED_CALLS });
            tokio::time::sleep(CONTENDER_PAUSE).await;
        }
    }

    async fn stand(self: Arc<Self>, clients: Clients, mut random: Random) {
        while !self.stop.load(Ordering::SeqCst) {
            let key = self.next_standing.fetch_add(1, Ordering::SeqCst);
            let length = self.put_standing(&clients.patient, key).await;
            if let Some(length) = length {
                self.standing.lock().push_back((key, length));
                self.standing_bytes.fetch_add(length, Ordering::SeqCst);
            }
            let known = {
                let standing = self.standing.lock();
                (!standing.is_empty()).then(|| standing[random.below(standing.len() as u64) as usize].0)
            };
            if let Some(known) = known {
                if random.below(4) == 0 {
                    self.exists(&clients.reader, known, false).await;
                } else {
                    self.get_standing(&clients, known).await;
                }
            }
            if self.standing_bytes.load(Ordering::SeqCst) > self.sizes.bytes {
                let oldest = self.standing.lock().pop_front();
                if let Some((key, length)) = oldest {
                    self.standing_bytes.fetch_sub(length, Ordering::SeqCst);
                    self.remove(&clients.patient, key).await;
                }
            }
            tokio::time::sleep(STANDER_PAUSE).await;
        }
    }

    async fn put(&self, client: &Client, key: u64, upsert: bool, random: &mut Random) -> bool {
        let number = self.next_value.fetch_add(1, Ordering::SeqCst);
        let length = if random.below(100) == 0 { LARGEST_BYTES } else { 16 + random.below(8 << 10) };
        let bytes = value(number, length);
        let (value, options) = (ValueNumber(number), PutOptions { upsert, ..self.put.clone() });
        let invoked = self.now();
        let answer = client.put(name(key), bytes, &options).await;
        let returned = answer.as_ref().ok().map(|_| self.now());
        let call = match answer.map(|done| done.outcome) {
            _ if upsert => Call::Upsert { value },
            Ok(PutOutcome::Stored) => Call::Put { value, heard: PutHeard::Stored },
            Ok(PutOutcome::AlreadyExists) => Call::Put { value, heard: PutHeard::AlreadyExists },
            Err(_) => Call::Put { value, heard: PutHeard::Nothing },
        };
        self.note_write(key, invoked, returned, call)
    }

    /// Puts the one value of a standing key; answers its length if it is there.
    async fn put_standing(&self, client: &Client, key: u64) -> Option<u64> {
        let number = self.next_value.fetch_add(1, Ordering::SeqCst);
        let length = 16 + key.wrapping_mul(0x9e37_79b9_7f4a_7c15) % self.sizes.largest;
        let invoked = self.now();
        let answer = client.put(name(key), value(number, length), &self.put).await;
        // Nobody else puts this key: if there is something, an earlier attempt of this call stored it.
        let returned = answer.ok().map(|_| self.now());
        let heard = if returned.is_some() { PutHeard::Stored } else { PutHeard::Nothing };
        let call = Call::Put { value: ValueNumber(number), heard };
        self.note_write(key, invoked, returned, call).then_some(length)
    }

    async fn remove(&self, client: &Client, key: u64) -> bool {
        let invoked = self.now();
        let answer = client.remove(name(key), false).await;
        let heard = match answer {
            Ok(RemoveOutcome::Removed) => RemoveHeard::Removed,
            Ok(RemoveOutcome::Missing) => RemoveHeard::Missing,
            // Nothing is pinned here.
            Ok(RemoveOutcome::Pinned | RemoveOutcome::Failed) | Err(_) => RemoveHeard::Nothing,
        };
        let returned = (heard != RemoveHeard::Nothing).then(|| self.now());
        self.note_write(key, invoked, returned, Call::Remove { heard })
    }

    fn note_write(&self, key: u64, invoked: Duration, returned: Option<Duration>, call: Call) -> bool {
        self.record(key, invoked, returned, call);
        if returned.is_some() {
            self.acknowledged.fetch_add(1, Ordering::SeqCst);
        }
        returned.is_some()
    }

    async fn get(&self, client: &Client, key: u64, options: GetOptions) -> bool {
        self.try_get(client, key, options).await.is_ok()
    }

    async fn try_get(&self, client: &Client, key: u64, options: GetOptions) -> Result<(), tidepool_client::Error> {
        let (fresh, invoked) = (options.fresh, self.now());
        let answer = client.get_with(name(key), options).await?;
        let found = answer.map_or(Found::Missing, |object| read(&object.value).map_or(Found::Damaged, Found::Value));
        let call = if fresh { Call::Get { found } } else { Call::GetRecent { found } };
        self.record(key, invoked, Some(self.now()), call);
        Ok(())
    }

    /// Reads what is there, unless the other client has just removed it.
    async fn get_standing(&self, clients: &Clients, key: u64) {
        let client = if self.always_read { &clients.patient } else { &clients.reader };
        let invoked = self.now();
        if let Err(error) = self.try_get(client, key, GetOptions::default()).await
            && self.always_read
        {
            let (invoked, now) = (invoked.as_secs_f64(), self.now().as_secs_f64());
            self.unread.lock().push(format!("{} at {invoked:.3} to {now:.3} s: {error}", name(key)));
        }
    }

    async fn exists(&self, client: &Client, key: u64, fresh: bool) -> bool {
        let invoked = self.now();
        let Ok(answer) = client.exists_many(&[name(key)], None, fresh).await else { return false };
        let present = match answer.first() {
            Some(Existence::Present) => true,
            Some(Existence::Missing) => false,
            // Nobody knows now.
            Some(Existence::Recovering | Existence::Unconfirmed) | None => return false,
        };
        let call = if fresh { Call::Exists { present } } else { Call::ExistsRecent { present } };
        self.record(key, invoked, Some(self.now()), call);
        true
    }
}

fn name(key: u64) -> String {
    format!("drill/{key}")
}

/// A value that says which it is: its number and length, and bytes that follow from the number.
fn value(number: u64, length: u64) -> Bytes {
    let mut bytes = vec![0; length as usize];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..16].copy_from_slice(&length.to_le_bytes());
    Payload::of(number).fill(&mut bytes[16..]);
    bytes.into()
}

/// Which value these bytes are, all of them.
fn read(bytes: &[u8]) -> Option<ValueNumber> {
    let (head, rest) = bytes.split_at_checked(16)?;
    let (number, length) = head.split_at(8);
    let number = u64::from_le_bytes(number.try_into().ok()?);
    let length = u64::from_le_bytes(length.try_into().ok()?);
    let is_whole = length == bytes.len() as u64 && Payload::of(number).check(rest).is_ok();
    is_whole.then_some(ValueNumber(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_recognised_whole_and_only_whole() {
        let bytes = value(7, 5000);
        assert_eq!(read(&bytes), Some(ValueNumber(7)));
        assert_eq!(read(&bytes[..4999]), None);
        for at in [0, 9, 16, 4999] {
            let mut wrong = bytes.to_vec();
            wrong[at] ^= 1;
            assert_eq!(read(&wrong), None, "byte {at}");
        }
        assert_eq!(read(&bytes[..10]), None);
    }

    #[test]
    fn a_key_is_left_after_enough_calls_and_once() {
        let load = Load::new(1, PutOptions::default(), Standing::SMALL, false);
        let key = load.contended(3);
        for _ in 0..KEY_CALLS - 1 {
            load.count(3, key, 1);
        }
        assert_eq!(load.contended(3), key);
        load.count(3, key, UNANSWERED_CALLS);
        load.count(3, key, UNANSWERED_CALLS);
        assert_eq!((load.contended(3), load.left.lock().clone()), (key + SLOTS, vec![key]));
        assert_eq!(load.slots[3].load(Ordering::SeqCst), KEY_CALLS, "calls on the old key are not counted for the new");
    }
}
