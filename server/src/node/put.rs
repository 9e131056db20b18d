//! Puts: reserve, write, complete.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::StreamExt as _;
use tidepool_metadata::catalog::{
    AbandonItem, AbandonOutcome, Answer, Command, CompleteItem, CompleteOutcome, Copies, NewReplica, Outcome, Presence,
    Query, RequestId, TypeTier,
};
use tidepool_metadata::{Durability, LogIndex, LogTime, NodeId, ObjectKey, TenantId};
use tidepool_replication::Read;
use tidepool_tiers::StoreError;
use tidepool_tiers::store::{ReplicaIdentity, ReplicaName, Sealed};

use super::copies::{Incoming, Spread, spread};
use super::quota::QuotaHold;
use super::{NodeService, ObjectName, PROPOSE_TIMEOUT, PutDone, PutOptions, PutOutcome, Value, error};
use crate::error::Error;
use crate::peers::wire::Pull;

/// Objects of one batch whose further copies are made at a time.
const SPREAD_AT_A_TIME: usize = 16;

/// The answer to a reservation.
pub enum Reserve {
    /// There is a complete object: nothing to write.
    AlreadyExists(PutDone),
    /// Room for the bytes.
    Ready(Box<Reservation>),
}

/// Room for one object. Dropping it frees everything; the key was never held.
pub struct Reservation {
    service: NodeService,
    name: ObjectName,
    length: u64,
    options: PutOptions,
    copies: Copies,
    incoming: Incoming,
    reserved_at: LogTime,
    request: Option<RequestId>,
    quota: Option<QuotaHold>,
}

/// An object whose bytes are all there, and their CRC-32 as the caller knows it.
pub(super) struct Filled {
    pub(super) reservation: Reservation,
    pub(super) expected: Option<u32>,
}

/// A sealed object, as it is to become visible.
struct Proposal {
    service: NodeService,
    sealed: Sealed,
    /// Nodes that are to have the further copies before others, and those that have begun to get it while it arrived.
    prefer: Arc<[String]>,
    fetching: Vec<NodeId>,
    item: CompleteItem,
    /// For how long it and its copies have a soft pin.
    soft_pin: Duration,
    spread: Spread,
    quota: Option<QuotaHold>,
}

pub(super) type PutResult = Result<PutDone, Error>;

impl NodeService {
    /// Reserves room for an object of `length` bytes. Cancel-safe.
    ///
    /// # Errors
    /// `VALUE_TOO_LARGE`, `NO_SPACE` after a bounded wait, those of the catalog.
    pub async fn reserve(&self, name: ObjectName, length: u64, options: PutOptions) -> Result<Reserve, Error> {
        self.acknowledge(options.ids);
        if options.yields()
            && let (log_index, present) = self.present(name.tenant, vec![name.key.clone()]).await?
            && present.first() == Some(&true)
        {
            return Ok(Reserve::AlreadyExists(already_exists(log_index)));
        }
        Ok(Reserve::Ready(Box::new(self.reserve_room(name, length, options, 0).await?)))
    }

    /// `position`: of the object in its call.
    pub(super) async fn reserve_room(
        &self,
        name: ObjectName,
        length: u64,
        mut options: PutOptions,
        position: usize,
    ) -> Result<Reservation, Error> {
        let largest = self.inner.max_object_bytes;
        if length > largest {
            return Err(error::too_large(length, largest));
        }
        if self.inner.repairs.is_draining() {
            return Err(error::draining());
        }
        let catalog = self.led_catalog().await?;
        let (policy, type_bytes) = catalog.type_use(options.data_type);
        let default = Copies::new(policy.copies, 1).unwrap_or(self.inner.copies);
        let copies = spread::wanted((options.replicas, options.min_replicas), default)?;
        options.pin |= policy.pin;
        options.durable_on_nvme |= policy.tier == TypeTier::Nvme;
        let bytes = length.saturating_mul(copies.wanted().into());
        let type_room = policy.quota_bytes.map_or(u64::MAX, |quota| quota.saturating_sub(type_bytes));
        if options.yields() && bytes > type_room {
            return Err(error::quota_exceeded());
        }
        let reserved_at = catalog.now();
        // An upsert may well take the room of what it replaces, and a repetition has what its first attempt took.
        let quota = match options.yields() {
            true => self.hold_quota(name.tenant, bytes).await?,
            false => None,
        };
        let buffer = self.inner.store.reserve(length, name.key.as_bytes().len()).await?;
        let request = options.ids.map(|ids| ids.of_item(position));
        let incoming = self.incoming(&name, &options, copies, buffer);
        Ok(Reservation { service: self.clone(), name, length, options, copies, incoming, reserved_at, request, quota })
    }

    /// Which of the keys have an object that can be read, so that no bytes need to move. What this node's copy of the catalog
    /// lacks is only a hint: the proposal decides. What it has is an answer, and confirmed: it may be removed by now.
    pub(super) async fn present(&self, tenant: TenantId, keys: Vec<ObjectKey>) -> Result<(LogIndex, Vec<bool>), Error> {
        let (log_index, mut present) = self.presence(tenant, keys.clone(), Read::Local).await?;
        let found: Vec<usize> = (0..present.len()).filter(|&position| present[position]).collect();
        if found.is_empty() {
            return Ok((log_index, present));
        }
        let again = found.iter().map(|&position| keys[position].clone()).collect();
        let (log_index, confirmed) = self.presence(tenant, again, Read::Linearizable).await?;
        for (position, confirmed) in found.into_iter().zip(confirmed) {
            present[position] = confirmed;
        }
        Ok((log_index, present))
    }

    async fn presence(
        &self,
        tenant: TenantId,
        keys: Vec<ObjectKey>,
        read: Read,
    ) -> Result<(LogIndex, Vec<bool>), Error> {
        let (log_index, answer) = self.catalog().await?.query(Query::Exists { tenant, keys }, read).await?;
        let Answer::Presence(presence) = answer else { return Err(error::unexpected("presence")) };
        Ok((log_index, presence.into_iter().map(|presence| presence == Presence::Present).collect()))
    }

    /// Runs in a task of its own from the first wait on: a caller that goes away leaves nothing half done. Most often that wait is
    /// for the log, which has the proposal by then without a step to another thread.
    pub(super) async fn seal_and_propose(&self, filled: Vec<Filled>) -> Vec<PutResult> {
        let count = filled.len();
        let service = self.clone();
        let mut work = Box::pin(async move {
            let mut results: Vec<Option<PutResult>> = (0..filled.len()).map(|_| None).collect();
            let mut proposals = Vec::with_capacity(filled.len());
            for (position, filled) in filled.into_iter().enumerate() {
                match filled.seal().await {
                    Ok(proposal) => proposals.push((position, proposal)),
                    Err(error) => results[position] = Some(Err(error)),
                }
            }
            if proposals.iter().any(|(_, proposal)| proposal.item.copies.wanted() > 1) {
                let spreading = proposals
                    .into_iter()
                    .map(|(position, proposal)| async move { (position, proposal.spread().await) });
                let spread: Vec<_> = futures::stream::iter(spreading).buffered(SPREAD_AT_A_TIME).collect().await;
                proposals = Vec::with_capacity(spread.len());
                for (position, spread) in spread {
                    match spread {
                        Ok(proposal) => proposals.push((position, proposal)),
                        Err(error) => results[position] = Some(Err(error)),
                    }
                }
            }
            let (positions, proposals): (Vec<usize>, Vec<_>) = proposals.into_iter().unzip();
            for (position, done) in positions.into_iter().zip(service.propose(proposals).await) {
                results[position] = Some(done);
            }
            results.into_iter().map(|result| result.unwrap_or_else(|| Err(error::unexpected("completion")))).collect()
        });
        match futures::poll!(&mut work) {
            Poll::Ready(results) => results,
            Poll::Pending => {
                let failed = |_panic| (0..count).map(|_| Err(error::unexpected("completion"))).collect();
                tokio::spawn(work).await.unwrap_or_else(failed)
            }
        }
    }

    async fn propose(&self, proposals: Vec<Proposal>) -> Vec<PutResult> {
        if proposals.is_empty() {
            return Vec::new();
        }
        let split = |Proposal { sealed, item, spread, quota, .. }| ((sealed, spread), (item, quota));
        let (sealed, items): (Vec<(Sealed, Spread)>, Vec<_>) = proposals.into_iter().map(split).unzip();
        let (items, _until_answered): (Vec<CompleteItem>, Vec<Option<QuotaHold>>) = items.into_iter().unzip();
        let proposal = async { self.catalog().await?.propose(Command::Complete(items)).await };
        let proposed = tokio::time::timeout(PROPOSE_TIMEOUT, proposal).await;
        match proposed {
            Ok(Ok((log_index, Outcome::Complete(outcomes)))) if outcomes.len() == sealed.len() => {
                let answers = sealed.into_iter().zip(outcomes);
                answers.map(|((sealed, spread), outcome)| self.apply(&sealed, &spread, outcome, log_index)).collect()
            }
            Ok(Err(error)) if error.is_unproposed() => {
                // Nothing was logged and nothing will be: the bytes may go at once.
                sealed.iter().for_each(|(sealed, spread)| self.take_back(sealed, spread));
                let error = Error::from(error);
                sealed.iter().map(|_| Err(error.clone())).collect()
            }
            Ok(_) | Err(_) => {
                let unknown = sealed.iter().map(|_| Err(error::outcome_unknown())).collect();
                let service = self.clone();
                // Copies on other nodes hear nothing, and ask the log themselves.
                let names = sealed.into_iter().map(|(sealed, _)| sealed.name).collect();
                tokio::spawn(async move { service.abandon(names).await });
                unknown
            }
        }
    }

    fn apply(&self, sealed: &Sealed, spread: &Spread, outcome: CompleteOutcome, log_index: LogIndex) -> PutResult {
        match outcome {
            CompleteOutcome::Completed { .. } => {
                self.tell(spread, &sealed.name, Some(log_index));
                // Not here any more: removed or replaced between the commit and now, which is as good as after.
                let _still_here = self.inner.store.complete(&sealed.name, log_index.0);
                Ok(PutDone { outcome: PutOutcome::Stored, log_index, checksum: sealed.checksum })
            }
            CompleteOutcome::AlreadyExists { .. } => {
                self.take_back(sealed, spread);
                Ok(PutDone { outcome: PutOutcome::AlreadyExists, log_index, checksum: 0 })
            }
            CompleteOutcome::Repeated { stored } => {
                self.take_back(sealed, spread);
                let outcome = if stored { PutOutcome::Stored } else { PutOutcome::AlreadyExists };
                Ok(PutDone { outcome, log_index, checksum: sealed.checksum })
            }
            CompleteOutcome::Refused(refusal) => {
                self.take_back(sealed, spread);
                Err(error::refused(refusal))
            }
            CompleteOutcome::NotExecuted(refusal) => {
                self.take_back(sealed, spread);
                Err(error::not_executed(refusal))
            }
        }
    }

    /// The put has not become visible and never will: all its copies go.
    fn take_back(&self, sealed: &Sealed, spread: &Spread) {
        self.free(&sealed.name);
        self.tell(spread, &sealed.name, None);
    }

    pub(super) fn free(&self, name: &ReplicaName) {
        self.inner.store.free(name.tenant, &name.key, name.replica);
    }

    /// Settles sealed replicas whose complete had no answer: asks until there is a committed one.
    pub(super) async fn abandon(&self, names: Vec<ReplicaName>) {
        let mut pause = Duration::from_millis(50);
        let item =
            |name: &ReplicaName| AbandonItem { tenant: name.tenant, key: name.key.clone(), replica: name.replica };
        loop {
            let command = Command::Abandon(names.iter().map(item).collect());
            match async { self.catalog().await?.propose(command).await }.await {
                Ok((_, Outcome::Abandon(outcomes))) => {
                    for (name, outcome) in names.iter().zip(outcomes) {
                        match outcome {
                            AbandonOutcome::Abandoned => self.free(name),
                            AbandonOutcome::Completed { commit_index, .. } => {
                                self.inner.store.complete(name, commit_index.0);
                            }
                        }
                    }
                    return;
                }
                Ok(_) => return,
                Err(error) if error.is_final() => return,
                Err(_) => tokio::time::sleep(pause).await,
            }
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }
}

pub(super) fn already_exists(log_index: LogIndex) -> PutDone {
    PutDone { outcome: PutOutcome::AlreadyExists, log_index, checksum: 0 }
}

impl Reservation {
    /// Copies `data` behind what is there.
    ///
    /// # Errors
    /// `LENGTH_MISMATCH` if there is more than was announced.
    pub fn write(&mut self, data: &[u8]) -> Result<(), Error> {
        Ok(self.incoming.change(|buffer| buffer.write(data))?)
    }

    /// Copies a value behind what is there: from lent memory its bytes as they are now, whatever they are later.
    ///
    /// # Errors
    /// `LENGTH_MISMATCH` if there is more than was announced; `BAD_RANGE` if it leaves the lent memory.
    pub fn take(&mut self, value: &Value<'_>) -> Result<(), Error> {
        match value {
            Value::Bytes(bytes) => self.write(bytes),
            Value::Lent { memory, offset, length } => self.incoming.change(|buffer| {
                buffer.fill(*length, |at, run| {
                    memory.read_at(offset.saturating_add(at), run).map_err(|left| error::outside(&left))
                })
            }),
        }
    }

    /// Bytes that are still to come.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.incoming.missing()
    }

    /// Ends the put: the object becomes visible if it is the first of its key. If the caller goes away in here, the
    /// put goes on by itself.
    ///
    /// # Errors
    /// `LENGTH_MISMATCH` if bytes are missing, `CHECKSUM_MISMATCH` if `expected` is not their CRC-32 (everything is
    /// freed then); those of the catalog.
    pub async fn complete(self: Box<Self>, expected: Option<u32>) -> Result<PutDone, Error> {
        let service = self.service.clone();
        if self.missing() > 0 {
            let received = self.length - self.missing();
            return Err(StoreError::LengthMismatch { announced: self.length, received }.into());
        }
        let mut done = service.seal_and_propose(vec![Filled { reservation: *self, expected }]).await;
        done.pop().unwrap_or_else(|| Err(error::unexpected("completion")))
    }
}

impl Filled {
    /// About how many bytes of a proposal it takes: its key, and a checksum a slice.
    pub(super) fn proposed_bytes(&self) -> usize {
        let Reservation { name, length, .. } = &self.reservation;
        name.key.as_bytes().len() + 4 * length.div_ceil(1 << 20) as usize + 128
    }

    /// Ends all change to the bytes, makes them as durable as was asked for, and says what to propose.
    async fn seal(self) -> Result<Proposal, Error> {
        let Self { reservation, expected } = self;
        let Reservation { service, name, options, copies, incoming, reserved_at, request, quota, .. } = reservation;
        let (version, replica) = incoming.ids().unwrap_or_else(|| service.next_ids());
        let ObjectName { tenant, key } = name;
        let name = ReplicaName { tenant, key: key.clone(), version, replica };
        let (sealed, fetching) = incoming.seal(ReplicaIdentity { name, data_type: options.data_type }, expected)?;
        if let Err(error) = service.inner.store.write_through(&sealed.name, options.durable_on_nvme).await {
            // Never proposed, so nobody can know it.
            service.free(&sealed.name);
            return Err(error.into());
        }
        let soft_pin = match options.soft_pin {
            None if !options.upsert => Duration::ZERO,
            wanted => service.inner.store.soft_pin(&sealed.name, wanted),
        };
        let durability = if options.durable_on_nvme { Durability::Nvme } else { Durability::Memory };
        let item = CompleteItem {
            tenant,
            key,
            version,
            length: sealed.object_length,
            slice_bytes: service.inner.store.slice_bytes(),
            data_type: options.data_type,
            group: options.group,
            checksums: sealed.slice_checksums.clone(),
            replicas: vec![NewReplica { replica, durability }],
            copies,
            durability,
            upsert: options.upsert,
            pin: options.pin,
            reserved_at,
            request,
        };
        let spread = Spread::default();
        Ok(Proposal { service, sealed, prefer: options.prefer, fetching, item, soft_pin, spread, quota })
    }
}

impl Proposal {
    /// Has other nodes pull the further copies.
    async fn spread(mut self) -> Result<Self, Error> {
        let Self { service, sealed, prefer, fetching, item, soft_pin, .. } = &self;
        let pull = Pull {
            tenant: item.tenant.0,
            key: item.key.as_bytes().to_vec().into(),
            version: Some(item.version.into()),
            length: item.length,
            data_type: item.data_type as u32,
            checksum: sealed.checksum,
            durable_on_nvme: item.durability == Durability::Nvme,
            source: service.inner.node.0,
            commit_index: 0,
            soft_pin_milliseconds: u64::try_from(soft_pin.as_millis()).unwrap_or(u64::MAX),
        };
        let spread = match service.spread(sealed, prefer, fetching, pull, item.copies).await {
            Ok(spread) => spread,
            Err(error) => {
                // Never proposed, so nobody can know it.
                service.free(&sealed.name);
                return Err(error);
            }
        };
        if spread.copies.len() + 1 < usize::from(item.copies.wanted()) {
            service.inner.repairs.want();
        }
        let durability = item.durability;
        self.item.replicas.extend(spread.copies.iter().map(|&replica| NewReplica { replica, durability }));
        self.spread = spread;
        Ok(self)
    }
}
