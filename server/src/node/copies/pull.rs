//! A copy that this node gets from another one.
//!
//! ```text
//!  (of a put under way, begun while its bytes arrive at the source: reserve ──> read, as they come)
//!  reserve ──> read from the source ──> seal ──┬─ of visible versions, many at once ──> propose add_replicas ──> complete, or freed
//!                                              └─ of a put under way ────> wait for its word ────> complete, or freed
//!                                                                              │ none for 10 s
//!                                                                              └──> ask the log (abandon), until it answers
//! ```

use std::collections::HashMap;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream;
use parking_lot::Mutex;
use tidepool_client::GetOptions;
use tidepool_metadata::catalog::{AddReplicaItem, AddReplicaOutcome, Command, Outcome};
use tidepool_metadata::envelope::MOST_VALUE_BYTES;
use tidepool_metadata::{DataType, Durability, ErrorKind, LogTime, NodeId, ReplicaId, VersionId};
use tidepool_tiers::store::{ObjectBuffer, ReplicaIdentity, ReplicaName};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{PULL_TIME, answer_of, copy_name, copy_of, malformed, patience, pull_time};
use crate::error::Error;
use crate::node::remote::{self, Way};
use crate::node::{NodeService, error};
use crate::peers::wire::{NodeReplies, Pull, Pulls, Settle, node_reply, node_request};

/// How long a copy waits for the word of the put that it belongs to. A put without an answer from the log gives up sooner.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

/// Copies that one message asks for, at most, and of them those that are pulled at a time.
pub(super) const MOST_PULLS: usize = 64;
pub(super) const MOST_AT_A_TIME: u32 = 4;

/// Copies that are fetched, or wait to be taken, at a time; those of further puts are pulled when they are sealed.
const MOST_FETCHED: usize = 256;

/// What arrives at other nodes, by version: whole once it is received from here, broken off if that has failed.
pub(in crate::node) type Fetched = Mutex<HashMap<VersionId, oneshot::Receiver<ObjectBuffer>>>;

/// A copy that is here and sealed.
struct Copied {
    name: ReplicaName,
    durability: Durability,
    reserved_at: LogTime,
    commit_index: u64,
}

impl Copied {
    fn item(&self) -> AddReplicaItem {
        let ReplicaName { tenant, key, version, replica } = self.name.clone();
        AddReplicaItem { tenant, key, version, replica, durability: self.durability, reserved_at: self.reserved_at }
    }
}

/// Copies that were pulled for puts under way.
pub(in crate::node) type Pulled = Mutex<HashMap<ReplicaId, ReplicaName>>;

fn has_copy(name: &ReplicaName) -> Error {
    let message = format!("this node has a copy of {} already, or gets one", name.key);
    Error::new(ErrorKind::Conflict, "HAS_COPY", message)
}

impl NodeService {
    /// Gets a copy for a put that is under way; answers once it is here. Runs in a task of its own: who asks may go away.
    pub(super) async fn pull(&self, pull: Pull) -> Result<ReplicaId, Error> {
        let service = self.clone();
        let task = tokio::spawn(async move {
            let deadline = Instant::now() + pull_time(pull.length);
            let name = service.get_copy(pull, deadline).await?.name;
            let replica = name.replica;
            service.await_word(name);
            Ok(replica)
        });
        task.await.unwrap_or_else(|_panic| Err(error::unexpected("a copy")))
    }

    /// Gets copies of visible versions, several at a time; answers once all are here and count, or why not. Runs in a task of its
    /// own.
    pub(super) async fn pull_visible(
        &self,
        Pulls { pulls, at_a_time, further }: Pulls,
    ) -> Result<Vec<Result<ReplicaId, Error>>, Error> {
        if pulls.len() > MOST_PULLS {
            return Err(malformed());
        }
        let (service, at_a_time) = (self.clone(), at_a_time.clamp(1, MOST_AT_A_TIME) as usize);
        let task = tokio::spawn(async move {
            let lengths: Vec<u64> = pulls.iter().map(|pull| pull.length).collect();
            let bytes = lengths.iter().sum();
            let hot = &service.inner.hot;
            let _room = if further { Some(hot.room(&service, bytes)?) } else { None };
            let deadline = Instant::now() + pull_time(bytes);
            let copies = stream::iter(pulls).map(|pull| service.get_copy(pull, deadline)).buffered(at_a_time);
            let copies: Vec<_> = copies.collect().await;
            let names: Vec<_> =
                copies.iter().map(|copy| copy.as_ref().ok().map(|copied| copied.name.clone())).collect();
            let added = service.add(copies).await;
            for ((name, length), added) in names.into_iter().zip(lengths).zip(&added).filter(|_| further) {
                if let (Some(name), Ok(_)) = (name, added) {
                    hot.came(&service, name, length);
                }
            }
            Ok(added)
        });
        task.await.unwrap_or_else(|_panic| Err(error::unexpected("copies")))
    }

    /// Has another node pull copies of visible versions, of so many bytes together; answers for each.
    pub(super) async fn pulled_there(&self, node: NodeId, pulls: Pulls, bytes: u64) -> Vec<Result<ReplicaId, Error>> {
        let count = pulls.pulls.len();
        let reply = self.ask_node(node, node_request::Ask::Pulls(pulls), patience(bytes)).await;
        let error = match reply.and_then(|reply| answer_of(node, reply)) {
            Ok(node_reply::Answer::Each(NodeReplies { replies })) if replies.len() == count => {
                return replies.into_iter().map(|reply| copy_of(node, reply)).collect();
            }
            Ok(_) => malformed(),
            Err(error) => error,
        };
        vec![Err(error); count]
    }

    /// Gets a copy and seals it.
    async fn get_copy(&self, pull: Pull, deadline: Instant) -> Result<Copied, Error> {
        let version: VersionId = pull.version.as_ref().ok_or_else(malformed)?.into();
        let (_, replica) = self.next_ids();
        let name = copy_name(pull.tenant, &pull.key, version, replica)?;
        let data_type = u8::try_from(pull.data_type).ok().and_then(DataType::from_number).ok_or_else(malformed)?;
        if self.inner.store.contains(name.tenant, &name.key, version) {
            return Err(has_copy(&name));
        }
        let reserved_at = self.catalog().await?.now();
        let late = |_| Error::new(ErrorKind::Deadline, "DEADLINE", "the copy was not here in time".into());
        let fetched = self.inner.fetched.lock().remove(&version);
        let received = async {
            if let Some(fetched) = fetched
                && let Ok(buffer) = fetched.await
            {
                self.inner.repairs.count_fetched();
                return Ok(buffer);
            }
            let buffer = self.inner.store.reserve(pull.length, name.key.as_bytes().len()).await?;
            self.receive(&pull, &name, Way::Engine, buffer).await
        };
        let buffer = tokio::time::timeout_at(deadline, received).await.map_err(late)??;
        // From here on nothing may be given up: what is sealed is freed by an answer.
        buffer.seal(ReplicaIdentity { name: name.clone(), data_type }, Some(pull.checksum))?;
        if pull.soft_pin_milliseconds > 0 {
            self.inner.store.soft_pin(&name, Some(Duration::from_millis(pull.soft_pin_milliseconds)));
        }
        if let Err(error) = self.inner.store.write_through(&name, pull.durable_on_nvme).await {
            // Never proposed, so nobody can know it.
            self.free(&name);
            return Err(error.into());
        }
        let durability = if pull.durable_on_nvme { Durability::Nvme } else { Durability::Memory };
        Ok(Copied { name, durability, reserved_at, commit_index: pull.commit_index })
    }

    /// Begins to get what arrives at its source; says so once there is room. It is kept until a Pull takes it, or dropped
    /// when the source breaks off or that Pull does not come.
    pub(super) async fn fetch(&self, pull: Pull) -> Result<(), Error> {
        let version: VersionId = pull.version.as_ref().ok_or_else(malformed)?.into();
        let (_, replica) = self.next_ids();
        let name = copy_name(pull.tenant, &pull.key, version, replica)?;
        let late = |_| Error::new(ErrorKind::Exhausted, "NO_SPACE", "there was no room in time".into());
        let reserved = self.inner.store.reserve(pull.length, name.key.as_bytes().len());
        let buffer = tokio::time::timeout(PULL_TIME, reserved).await.map_err(late)??;
        if self.inner.store.contains(name.tenant, &name.key, version) {
            return Err(has_copy(&name));
        }
        let (sender, receiver) = oneshot::channel();
        {
            let mut fetched = self.inner.fetched.lock();
            if fetched.contains_key(&version) {
                return Err(has_copy(&name));
            }
            if fetched.len() >= MOST_FETCHED {
                return Err(Error::new(
                    ErrorKind::Exhausted,
                    "OVERLOADED",
                    format!("{MOST_FETCHED} copies are on their way"),
                ));
            }
            fetched.insert(version, receiver);
        }
        let service = self.clone();
        tokio::spawn(async move {
            match service.receive(&pull, &name, Way::Stream, buffer).await {
                Ok(buffer) => {
                    let _taken = sender.send(buffer);
                    tokio::time::sleep(SETTLED_WITHIN).await;
                }
                // Whoever waits for it hears it by the sender, which is gone.
                Err(error) => tracing::debug!(key = %name.key, %error, "what arrives elsewhere could not be fetched"),
            }
            service.inner.fetched.lock().remove(&version);
        });
        Ok(())
    }

    /// Reads all bytes from the source. Cancel-safe: nothing stays reserved.
    async fn receive(
        &self,
        pull: &Pull,
        name: &ReplicaName,
        way: Way,
        mut buffer: ObjectBuffer,
    ) -> Result<ObjectBuffer, Error> {
        let source = NodeId(pull.source);
        let tenant_name = self.tenant_name(name.tenant).await?;
        let unknown = || Error::new(ErrorKind::Unavailable, "UNREACHABLE", format!("node {source} has no address"));
        let client = self.inner.remotes.client(source, name.tenant, &tenant_name, way).ok_or_else(unknown)?;
        let options = GetOptions { version: name.version.to_string(), ..GetOptions::default() };
        let gone =
            || Error::new(ErrorKind::NotFound, "NOT_FOUND", format!("node {source} has no copy of {}", name.key));
        let failed = |error| remote::from_client(&error);
        match way {
            // Large ones by ranges, each with a deadline of its own.
            Way::Engine => loop {
                let (start, room) = (pull.length - buffer.missing(), buffer.missing().min(MOST_VALUE_BYTES));
                let range = GetOptions { offset: start, length: Some(room), ..options.clone() };
                let options = if room == pull.length { options.clone() } else { range };
                let mut written = Ok(());
                let mut take = |at, bytes: &[u8]| {
                    if written.is_ok() {
                        written = buffer.write_at(start + at, bytes);
                    }
                };
                let info = client.get_steps(name.key.as_bytes(), options, room, &mut take).await.map_err(failed)?;
                info.ok_or_else(gone)?;
                written?;
                if buffer.missing() == 0 {
                    break;
                }
            },
            Way::Stream => {
                let stream = client.get_stream(name.key.as_bytes(), options).await.map_err(failed)?;
                // What arrives at its source comes as that does.
                let mut stream = stream.ok_or_else(gone)?.unhurried();
                while let Some(bytes) = stream.next().await.map_err(failed)? {
                    buffer.write(&bytes)?;
                }
            }
        }
        Ok(buffer)
    }

    /// Makes sealed copies count, by one command.
    async fn add(&self, copies: Vec<Result<Copied, Error>>) -> Vec<Result<ReplicaId, Error>> {
        let names: Vec<ReplicaName> = copies.iter().flatten().map(|copied| copied.name.clone()).collect();
        if names.is_empty() {
            return copies.into_iter().map(|copy| copy.map(|copied| copied.name.replica)).collect();
        }
        let items: Vec<AddReplicaItem> = copies.iter().flatten().map(Copied::item).collect();
        let proposed = async { self.catalog().await?.propose(Command::AddReplicas(items)).await };
        let failure = match proposed.await {
            Ok((_, Outcome::AddReplicas(outcomes))) if outcomes.len() == names.len() => {
                let mut outcomes = outcomes.into_iter();
                let mut settle = |copied| match outcomes.next() {
                    Some(outcome) => self.added(copied, outcome),
                    None => Err(error::unexpected("outcomes")),
                };
                return copies.into_iter().map(|copy| copy.and_then(&mut settle)).collect();
            }
            Err(error) if error.is_unproposed() => {
                names.iter().for_each(|name| self.free(name));
                error.into()
            }
            Ok(_) | Err(_) => {
                let service = self.clone();
                tokio::spawn(async move { service.abandon(names).await });
                error::outcome_unknown()
            }
        };
        copies.into_iter().map(|copy| copy.and(Err(failure.clone()))).collect()
    }

    /// The log has answered for a sealed copy.
    fn added(&self, Copied { name, commit_index, .. }: Copied, outcome: AddReplicaOutcome) -> Result<ReplicaId, Error> {
        match outcome {
            AddReplicaOutcome::Added => {
                // Not here any more: removed between the commit and now.
                let _still_here = self.inner.store.complete(&name, commit_index);
                Ok(name.replica)
            }
            AddReplicaOutcome::Refused(refusal) => {
                self.free(&name);
                Err(error::refused(refusal))
            }
        }
    }

    /// Keeps a sealed copy until its put says how it ended, or the log does.
    fn await_word(&self, name: ReplicaName) {
        let (service, replica) = (self.clone(), name.replica);
        self.inner.pulled.lock().insert(replica, name);
        tokio::spawn(async move {
            tokio::time::sleep(SETTLED_WITHIN).await;
            let unsettled = service.inner.pulled.lock().remove(&replica);
            if let Some(name) = unsettled {
                tracing::info!(?replica, "nobody said how the put of a copy ended: the log decides");
                service.abandon(vec![name]).await;
                // Its put may have died with the node that has the other copy, when repair could not see this one yet.
                service.inner.repairs.want();
            }
        });
    }

    /// The put of a copy has ended: by a committed answer, or without having been proposed.
    pub(super) fn settle(&self, settle: Settle) -> Result<(), Error> {
        let replica: ReplicaId = settle.copy.as_ref().ok_or_else(malformed)?.into();
        // Another one is settled already, or was never pulled in this life.
        if let Some(name) = self.inner.pulled.lock().remove(&replica) {
            match settle.commit_index {
                0 => self.free(&name),
                index => drop(self.inner.store.complete(&name, index)),
            }
        }
        Ok(())
    }
}
