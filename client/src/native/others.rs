//! Nodes that this client was referred to: they hold what the node that was asked does not.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_metadata::proto;
use tidepool_transfer::Answered;
use tonic::transport::Channel;

use super::{Allowance, Link, Native, Target, blocking, may_block};
use crate::apart::apart;
use crate::batch;
use crate::builder::SILENCE_OF_MANY;
use crate::call::Client;
use crate::error::Error;
use crate::native::calls::{Got, Second};
use crate::places::Elsewhere;
use crate::types::{BatchGot, ObjectInfo};

/// As many nodes as are remembered; of more, those that were learned before are learned again.
const MOST: usize = 256;

/// A node is not asked beside another one sooner than this.
const LEAST_PATIENCE: Duration = Duration::from_millis(1);
/// Of so many reads one goes to the node that is first, however slow it was: it may be quick again.
const TRY_SLOW: usize = 32;

/// By the address of their gRPC, which says where their engine is.
#[derive(Default)]
pub(crate) struct Others {
    known: Mutex<HashMap<String, Arc<Other>>>,
    /// Reads that are asked of a second node too.
    allowance: Allowance,
    hedged: AtomicU64,
    reads: AtomicUsize,
}

struct Other {
    channel: Channel,
    native: Native,
}

impl Others {
    fn get(&self, address: &str, client: &Client) -> Result<Arc<Other>, Error> {
        let mut others = self.lock();
        if let Some(other) = others.get(address) {
            return Ok(Arc::clone(other));
        }
        let parsed: crate::ServerAddress = address.parse()?;
        let channel = parsed.channel(client.settings(), SILENCE_OF_MANY)?;
        if others.len() >= MOST {
            others.clear();
        }
        let other = Arc::new(Other { channel, native: Native::referred(parsed) });
        others.insert(address.to_owned(), Arc::clone(&other));
        Ok(other)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Other>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The link to a node that is connected.
    fn linked(&self, address: &str) -> Option<Arc<Link>> {
        self.lock().get(address)?.native.link()
    }

    /// Nodes that have an object, in the order in which they are to be asked: those last that were far slower than the others.
    fn in_order<'a>(&self, addresses: &'a [String]) -> Vec<&'a String> {
        let mut order: Vec<&String> = addresses.iter().collect();
        if order.len() > 1 && !self.reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(TRY_SLOW) {
            let time = |address: &String| self.linked(address).and_then(|link| link.times.p95());
            let least = order.iter().filter_map(|address| time(address)).min().unwrap_or_default();
            let most = 4 * least.max(LEAST_PATIENCE);
            order.sort_by_cached_key(|address| time(address).is_some_and(|time| time > most));
        }
        order
    }

    /// How long a node may take before another one is asked for the same: as long as 95 of 100 gets of the quicker one take.
    fn patience(first: &Link, second: &Link) -> Option<Duration> {
        Some(first.times.p95()?.min(second.times.p95()?).max(LEAST_PATIENCE))
    }
}

impl Client {
    /// How many reads were asked of a second node too, because the first took long to begin its answer.
    #[must_use]
    pub fn hedged_reads(&self) -> u64 {
        self.others().hedged.load(Ordering::Relaxed)
    }

    async fn link_to(&self, address: &str) -> Option<(Arc<Other>, Arc<Link>)> {
        let other = self.others().get(address, self).ok()?;
        let link = self.link(&other.native, &other.channel).await?;
        self.count_native_call();
        Some((other, link))
    }

    /// Where it is read at once, without asking for it.
    pub(crate) fn known_place(&self, key: &[u8]) -> Option<Elsewhere> {
        let elsewhere = self.places().find(key, Instant::now())?;
        // No older than what this client has written itself.
        (self.writes().least_index(key) == 0).then_some(elsewhere)
    }

    /// Reads the object where it was a moment ago; `None` if it has to be asked for, for which some of the time is left.
    pub(crate) async fn get_known(
        &self,
        message: &proto::GetRequest,
        target: &mut impl Target,
        deadline: Instant,
    ) -> Option<ObjectInfo> {
        if !message.may_refer || message.fresh || !message.version.is_empty() {
            return None;
        }
        let elsewhere = self.known_place(&message.key)?;
        self.get_there(&elsewhere, message, target, deadline).await
    }

    /// Reads exactly the version that is elsewhere into `target`. `None`: it could not be had there, so that the node that
    /// referred to it has to give it. That takes half of the time until `deadline` at most.
    pub(crate) async fn get_there(
        &self,
        elsewhere: &Elsewhere,
        message: &proto::GetRequest,
        target: &mut impl Target,
        deadline: Instant,
    ) -> Option<ObjectInfo> {
        let message = proto::GetRequest { version: elsewhere.version.clone(), may_refer: false, ..message.clone() };
        let deadline = half_way(deadline);
        // What is received goes to the caller's buffer, which no other thread can borrow.
        let others = self.others();
        others.allowance.earn();
        let order = others.in_order(&elsewhere.addresses);
        for (place, address) in order.iter().enumerate().filter(|_| may_block()) {
            let Some((other, link)) = self.link_to(address).await else { continue };
            let second = order.get(place + 1).filter(|_| self.settings().hedged_reads);
            let second = second.and_then(|address| others.linked(address));
            let patience = second.as_ref().and_then(|second| Others::patience(&link, second));
            let second = second.as_deref().zip(patience).filter(|_| others.allowance.take());
            let second = second.map(|(link, patience)| Second { link, patience });
            let got = tokio::task::block_in_place(|| link.get_either(second, &message, target, deadline));
            if second.is_some() {
                match &got {
                    Ok((_, Answered::First)) => others.allowance.give_back(),
                    _ => drop(others.hedged.fetch_add(1, Ordering::Relaxed)),
                }
            }
            match got {
                Ok((Got::Whole(Some(info)), _)) => return Some(info),
                Ok(_) => {}
                Err(error) => other.failed(&link, address, &error),
            }
        }
        self.places().forget(&message.key);
        None
    }

    /// Reads objects of a batch where they are, each node's in a call of its own; what could not be had there is left out.
    pub(crate) async fn get_batch_there(
        &self,
        keys: &[Bytes],
        places: Vec<(usize, Elsewhere)>,
        got: &mut [Option<BatchGot>],
        deadline: Instant,
    ) {
        let deadline = half_way(deadline);
        let mut by_node: BTreeMap<String, (Vec<usize>, Vec<String>)> = BTreeMap::new();
        for (position, elsewhere) in places {
            let Some(address) = elsewhere.addresses.first() else { continue };
            let (positions, versions) = by_node.entry(address.clone()).or_default();
            positions.push(position);
            versions.push(elsewhere.version);
        }
        let calls = by_node.into_iter().map(|(address, (positions, versions))| {
            let keys: Vec<Bytes> = positions.iter().map(|&position| keys[position].clone()).collect();
            let client = self.clone();
            async move {
                (positions, apart(async move { client.get_versions(&address, keys, versions, deadline).await }).await)
            }
        });
        for (positions, items) in futures::future::join_all(calls).await {
            let mut items = items.into_iter();
            for position in positions {
                match items.next() {
                    Some(item @ BatchGot::Found(_)) => got[position] = Some(item),
                    _ => self.places().forget(&keys[position]),
                }
            }
        }
    }

    async fn get_versions(
        self,
        address: &str,
        keys: Vec<Bytes>,
        versions: Vec<String>,
        deadline: Instant,
    ) -> Vec<BatchGot> {
        let Some((other, link)) = self.link_to(address).await else { return Vec::new() };
        let message = proto::BatchGetRequest { tenant: self.tenant(), keys, versions, ..Default::default() };
        let asked = Arc::clone(&link);
        let answer = blocking(move || {
            let replies = asked.get_batch(&message, deadline)?;
            let mut answers = batch::answers(&message.keys, replies)?;
            for ((item, key), version) in answers.iter_mut().zip(&message.keys).zip(&message.versions) {
                if item.as_ref().is_ok_and(batch::is_too_large) {
                    *item = Ok(match asked.get_version(&message.tenant, key, version, deadline) {
                        Err(error) if Link::is_lost(&error) => return Err(error),
                        got => got.into(),
                    });
                }
            }
            Ok::<_, Error>(answers)
        });
        let answers = answer.await.unwrap_or_else(|error| {
            other.failed(&link, address, &error);
            Vec::new()
        });
        // One that refers to yet another has none.
        answers.into_iter().map(|item| item.unwrap_or(BatchGot::Missing)).collect()
    }
}

/// Half of what is left of the time: what does not succeed by then is done another way.
fn half_way(deadline: Instant) -> Instant {
    let now = Instant::now();
    now + deadline.saturating_duration_since(now) / 2
}

impl Other {
    fn failed(&self, link: &Arc<Link>, address: &str, error: &Error) {
        tracing::debug!(%error, address, "where the object is it can't be read");
        if Link::is_lost(error) {
            self.native.close(link);
        }
    }
}
