//! A copy that this node gets from another one.
//!
//! ```text
//!  reserve ──> read from the source ──> seal ──┬─ of a visible version ──> propose add_replica ──> complete, or freed
//!                                              └─ of a put under way ────> wait for its word ────> complete, or freed
//!                                                                              │ none for 10 s
//!                                                                              └──> ask the log (abandon), until it answers
//! ```

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_client::GetOptions;
use tidepool_metadata::catalog::{AddReplicaItem, AddReplicaOutcome, Command, Outcome};
use tidepool_metadata::envelope::MOST_VALUE_BYTES;
use tidepool_metadata::{DataType, Durability, ErrorKind, NodeId, ReplicaId, VersionId};
use tidepool_tiers::store::{ObjectBuffer, ReplicaIdentity, ReplicaName};

use super::{copy_name, malformed, pull_time};
use crate::error::Error;
use crate::node::remote::{self, Way};
use crate::node::{NodeService, error};
use crate::peers::wire::{Pull, Settle};

/// How long a copy waits for the word of the put that it belongs to. A put without an answer from the log gives up sooner.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

/// Copies that were pulled for puts under way.
pub(in crate::node) type Pulled = Mutex<HashMap<ReplicaId, ReplicaName>>;

impl NodeService {
    /// Gets a copy; answers once it is here, and counts if its version is visible already. Runs in a task of its own: who asks
    /// may go away.
    pub(super) async fn pull(&self, pull: Pull) -> Result<ReplicaId, Error> {
        let service = self.clone();
        let task = tokio::spawn(async move { service.pull_now(pull).await });
        task.await.unwrap_or_else(|_panic| Err(error::unexpected("a copy")))
    }

    async fn pull_now(&self, pull: Pull) -> Result<ReplicaId, Error> {
        let version: VersionId = pull.version.as_ref().ok_or_else(malformed)?.into();
        let (_, replica) = self.next_ids();
        let name = copy_name(pull.tenant, &pull.key, version, replica)?;
        let data_type = u8::try_from(pull.data_type).ok().and_then(DataType::from_number).ok_or_else(malformed)?;
        if self.inner.store.contains(name.tenant, &name.key, version) {
            let message = format!("this node has a copy of {} already", name.key);
            return Err(Error::new(ErrorKind::Conflict, "HAS_COPY", message));
        }
        let reserved_at = self.catalog().await?.now();
        let late = |_| Error::new(ErrorKind::Deadline, "DEADLINE", "the copy was not here in time".into());
        let received = tokio::time::timeout(pull_time(pull.length), self.receive(&name, &pull)).await;
        let buffer = received.map_err(late)??;
        // From here on nothing may be given up: what is sealed is freed by an answer.
        buffer.seal(ReplicaIdentity { name: name.clone(), data_type }, Some(pull.checksum))?;
        if let Err(error) = self.inner.store.write_through(&name, pull.durable_on_nvme).await {
            // Never proposed, so nobody can know it.
            self.free(&name);
            return Err(error.into());
        }
        if pull.commit_index == 0 {
            self.await_word(name);
            return Ok(replica);
        }
        let durability = if pull.durable_on_nvme { Durability::Nvme } else { Durability::Memory };
        let ReplicaName { tenant, key, .. } = name.clone();
        let item = AddReplicaItem { tenant, key, version, replica, durability, reserved_at };
        self.add(&name, item, pull.commit_index).await
    }

    /// Reads all bytes from the source. Cancel-safe: nothing stays reserved.
    async fn receive(&self, name: &ReplicaName, pull: &Pull) -> Result<ObjectBuffer, Error> {
        let mut buffer = self.inner.store.reserve(pull.length, name.key.as_bytes().len()).await?;
        let source = NodeId(pull.source);
        let tenant_name = self.tenant_name(name.tenant).await?;
        let unknown = || Error::new(ErrorKind::Unavailable, "UNREACHABLE", format!("node {source} has no address"));
        let way = if pull.length <= MOST_VALUE_BYTES { Way::Engine } else { Way::Stream };
        let client = self.inner.remotes.client(source, name.tenant, &tenant_name, way).ok_or_else(unknown)?;
        let options = GetOptions { version: name.version.to_string(), ..GetOptions::default() };
        let gone =
            || Error::new(ErrorKind::NotFound, "NOT_FOUND", format!("node {source} has no copy of {}", name.key));
        let failed = |error| remote::from_client(&error);
        match way {
            Way::Engine => {
                let object = client.get_with(name.key.as_bytes(), options).await.map_err(failed)?;
                buffer.write(&object.ok_or_else(gone)?.value)?;
            }
            Way::Stream => {
                let stream = client.get_stream(name.key.as_bytes(), options).await.map_err(failed)?;
                let mut stream = stream.ok_or_else(gone)?;
                while let Some(bytes) = stream.next().await.map_err(failed)? {
                    buffer.write(&bytes)?;
                }
            }
        }
        Ok(buffer)
    }

    /// Makes a sealed copy count.
    async fn add(&self, name: &ReplicaName, item: AddReplicaItem, commit_index: u64) -> Result<ReplicaId, Error> {
        match self.catalog().await?.propose(Command::AddReplicas(vec![item])).await {
            Ok((_, Outcome::AddReplicas(outcomes))) => match outcomes[..] {
                [AddReplicaOutcome::Added] => {
                    // Not here any more: removed between the commit and now.
                    let _still_here = self.inner.store.complete(name, commit_index);
                    Ok(name.replica)
                }
                [AddReplicaOutcome::Refused(refusal)] => {
                    self.free(name);
                    Err(error::refused(refusal))
                }
                _ => Err(error::unexpected("one outcome")),
            },
            Err(error) if error.is_unproposed() => {
                self.free(name);
                Err(error.into())
            }
            Ok(_) | Err(_) => {
                let (service, names) = (self.clone(), vec![name.clone()]);
                tokio::spawn(async move { service.abandon(names).await });
                Err(error::outcome_unknown())
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
