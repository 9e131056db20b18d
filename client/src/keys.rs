//! Calls about keys, without the objects' bytes: exists, remove, pin, lease, list, stat; and what the server is.

use std::sync::Arc;
use std::time::Duration;

use tidepool_metadata::proto::{self, EngineMethod};
use tidepool_metadata::{DataType, ObjectKey};

use crate::call::{Attempt, Client, all_key_bytes, key_bytes};
use crate::error::Error;
use crate::native::Method;
use crate::retry::Repeatable;
use crate::session::{Items, MAX_ITEMS};
use crate::types::{
    Existence, Listed, Listing, Matching, ObjectStat, RemoveOutcome, RemoveProgress, ServerInfo, data_type,
};

impl Client {
    /// Whether the object exists.
    ///
    /// # Errors
    /// [`Error::Key`]; what the server refuses.
    pub async fn exists(&self, key: impl AsRef<[u8]>) -> Result<Existence, Error> {
        let answers = self.exists_many(&[key], None, false).await?;
        answers.into_iter().next().ok_or(Error::Protocol { operation: "exists", why: "is empty" })
    }

    /// Whether the objects exist, in order. With a `lease` those that do are not evicted for so long; `fresh` asks the
    /// leader.
    ///
    /// # Errors
    /// [`Error::Key`] for the first key that is none; what the server refuses.
    pub async fn exists_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        lease: Option<Duration>,
        fresh: bool,
    ) -> Result<Vec<Existence>, Error> {
        self.ask_existence(proto::ExistsRequest {
            keys: all_key_bytes(keys)?,
            lease_ms: lease.map_or(0, milliseconds),
            fresh,
            ..proto::ExistsRequest::default()
        })
        .await
    }

    /// As [`Client::exists_many`], for callers who would rather go on than wait while a leader is elected: what the node that is
    /// asked does not know of is [`Existence::Unconfirmed`] then.
    ///
    /// # Errors
    /// As [`Client::exists_many`].
    pub async fn exists_or_unconfirmed<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Existence>, Error> {
        let keys = all_key_bytes(keys)?;
        self.ask_existence(proto::ExistsRequest { keys, allow_unconfirmed: true, ..proto::ExistsRequest::default() })
            .await
    }

    async fn ask_existence(&self, asked: proto::ExistsRequest) -> Result<Vec<Existence>, Error> {
        let count = asked.keys.len();
        let message = proto::ExistsRequest { tenant: self.tenant(), seen_index: self.seen_index(), ..asked };
        let method = ("exists", EngineMethod::Exists);
        let reply: proto::ExistsReply = self
            .call_method(method, message, |mut attempt, message| async move {
                let request = attempt.request(message);
                Ok(attempt.stub.exists(request).await?.into_inner())
            })
            .await?;
        let existence = |outcome| match outcome {
            proto::ExistsOutcome::Present => Existence::Present,
            proto::ExistsOutcome::Missing => Existence::Missing,
            proto::ExistsOutcome::Recovering => Existence::Recovering,
            proto::ExistsOutcome::Unconfirmed => Existence::Unconfirmed,
        };
        one_a_key("exists", count, reply.outcomes().map(existence).collect())
    }

    /// Removes the object; pinned ones only with `force`.
    ///
    /// # Errors
    /// [`Error::Key`]; what the server refuses.
    pub async fn remove(&self, key: impl AsRef<[u8]>, force: bool) -> Result<RemoveOutcome, Error> {
        let answers = self.remove_many(&[key], force).await?;
        answers.into_iter().next().ok_or(Error::Protocol { operation: "remove", why: "is empty" })
    }

    /// Removes the objects; one outcome a key, in order.
    ///
    /// # Errors
    /// [`Error::Key`] for the first key that is none; what the server refuses.
    pub async fn remove_many<K: AsRef<[u8]>>(&self, keys: &[K], force: bool) -> Result<Vec<RemoveOutcome>, Error> {
        let outcome = |outcome| match outcome {
            proto::RemoveOutcome::Removed => RemoveOutcome::Removed,
            proto::RemoveOutcome::Missing => RemoveOutcome::Missing,
            proto::RemoveOutcome::Pinned => RemoveOutcome::Pinned,
            proto::RemoveOutcome::Failed => RemoveOutcome::Failed,
        };
        let mut outcomes = Vec::with_capacity(keys.len());
        for keys in all_key_bytes(keys)?.chunks(MAX_ITEMS) {
            let writing = self.writing(keys.iter().map(|key| &key[..]));
            let remove = |items: Option<Items>, repetition| {
                let (tenant, keys) = (self.tenant(), keys.to_vec());
                let message = move || {
                    let (tenant, keys, ids) = (tenant.clone(), keys.clone(), items.as_ref().map(Items::ids));
                    Arc::new(proto::RemoveRequest { tenant, keys, force, ids })
                };
                let method = ("remove", EngineMethod::Remove);
                self.run_method(repetition, method, message, |mut attempt, message| async move {
                    let request = attempt.request(message);
                    Ok(attempt.stub.remove(request).await?.into_inner())
                })
            };
            let reply: proto::RemoveReply = self.named("remove", keys.len(), remove).await?;
            self.wrote(writing, reply.log_index, false);
            outcomes.extend(one_a_key("remove", keys.len(), reply.outcomes().map(outcome).collect())?);
        }
        Ok(outcomes)
    }

    /// Removes all objects whose keys match; calls `progress` as it goes. The deadline holds for each step.
    ///
    /// # Errors
    /// What the server refuses; part may be removed then.
    pub async fn remove_matching(
        &self,
        matching: &Matching,
        force: bool,
        mut progress: impl FnMut(RemoveProgress),
    ) -> Result<RemoveProgress, Error> {
        const OPERATION: &str = "remove matching";
        use proto::remove_matching_request::Filter;
        let filter = Some(match matching {
            Matching::Prefix(prefix) => Filter::Prefix(prefix.clone().into()),
            Matching::Pattern(pattern) => Filter::Pattern(pattern.clone()),
            Matching::All => Filter::All(true),
        });
        let message = proto::RemoveMatchingRequest { tenant: self.tenant(), filter, force };
        let writing = self.writing_unknown_keys();
        let mut replies = self
            .call(OPERATION, Repeatable::IfNotDone, |mut attempt| {
                // All of it may take longer than one step may.
                let mut request = attempt.request(message.clone());
                request.metadata_mut().remove("grpc-timeout");
                async move { Ok(attempt.stub.remove_matching(request).await?.into_inner()) }
            })
            .await?;
        let deadline = self.settings().deadline;
        loop {
            let reply = tokio::time::timeout(deadline, replies.message())
                .await
                .map_err(|_| Error::Deadline { operation: OPERATION, deadline })??
                .ok_or(Error::Protocol { operation: OPERATION, why: "ended before it was done" })?;
            self.saw(reply.log_index);
            let now = RemoveProgress { examined: reply.examined, removed: reply.removed, pinned: reply.pinned };
            progress(now);
            if reply.done {
                self.wrote(writing, reply.log_index, false);
                return Ok(now);
            }
        }
    }

    /// Keeps the objects from eviction until they are unpinned as often. Answers which exist, in order.
    ///
    /// # Errors
    /// [`Error::Key`] for the first key that is none; what the server refuses.
    pub async fn pin<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<bool>, Error> {
        self.change_pins(("pin", EngineMethod::Pin), keys, |mut attempt, message| async move {
            let request = attempt.request(message);
            Ok(attempt.stub.pin(request).await?.into_inner())
        })
        .await
    }

    /// Takes one pin off each object. Answers which exist, in order.
    ///
    /// # Errors
    /// [`Error::Key`] for the first key that is none; what the server refuses.
    pub async fn unpin<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<bool>, Error> {
        self.change_pins(("unpin", EngineMethod::Unpin), keys, |mut attempt, message| async move {
            let request = attempt.request(message);
            Ok(attempt.stub.unpin(request).await?.into_inner())
        })
        .await
    }

    async fn change_pins<K, Answer>(
        &self,
        method: Method,
        keys: &[K],
        call: impl Fn(Attempt, proto::PinRequest) -> Answer,
    ) -> Result<Vec<bool>, Error>
    where
        K: AsRef<[u8]>,
        Answer: Future<Output = Result<proto::PinReply, Error>>,
    {
        let (operation, _) = method;
        let mut found = Vec::with_capacity(keys.len());
        for keys in all_key_bytes(keys)?.chunks(MAX_ITEMS) {
            let change = |items: Option<Items>, repetition| {
                let (tenant, keys) = (self.tenant(), keys.to_vec());
                let message = move || {
                    let (tenant, keys, ids) = (tenant.clone(), keys.clone(), items.as_ref().map(Items::ids));
                    Arc::new(proto::PinRequest { tenant, keys, ids })
                };
                self.run_method(repetition, method, message, &call)
            };
            let reply = self.named(operation, keys.len(), change).await?;
            self.saw(reply.log_index);
            found.extend(one_a_key(operation, keys.len(), reply.found)?);
        }
        Ok(found)
    }

    /// Grants or renews leases for `duration` (`None`: the server's default). Answers how long each lasts from now, in
    /// order; zero if the object does not exist.
    ///
    /// # Errors
    /// [`Error::Key`] for the first key that is none; what the server refuses.
    pub async fn renew_leases<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        duration: Option<Duration>,
    ) -> Result<Vec<Duration>, Error> {
        let duration_ms = duration.map_or(0, milliseconds);
        let message = proto::LeaseRequest { tenant: self.tenant(), keys: all_key_bytes(keys)?, duration_ms };
        let reply = self
            .call_method(("renew lease", EngineMethod::RenewLease), message, |mut attempt, message| async move {
                let request = attempt.request(message);
                Ok(attempt.stub.renew_lease(request).await?.into_inner())
            })
            .await?;
        let granted = reply.granted_ms.into_iter().map(|granted| Duration::from_millis(granted.into()));
        one_a_key("renew lease", keys.len(), granted.collect())
    }

    /// Ends leases.
    ///
    /// # Errors
    /// [`Error::Key`] for the first key that is none; what the server refuses.
    pub async fn release_leases<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<(), Error> {
        let message = proto::LeaseRequest { tenant: self.tenant(), keys: all_key_bytes(keys)?, duration_ms: 0 };
        let method = ("release lease", EngineMethod::ReleaseLease);
        let released = self.call_method(method, message, |mut attempt, message| async move {
            let request = attempt.request(message);
            Ok(attempt.stub.release_lease(request).await?.into_inner())
        });
        released.await.map(|proto::LeaseReply { .. }| ())
    }

    /// One page of the objects whose keys start with `prefix`, in key order: `page_size` of them (0: the server's
    /// default), from where `page_token` says (empty: the start); only those of `data_type`, if one is given.
    ///
    /// # Errors
    /// What the server refuses, `BAD_PAGE_TOKEN` among it.
    pub async fn list(
        &self,
        prefix: &[u8],
        page_size: u32,
        page_token: &str,
        only: Option<DataType>,
    ) -> Result<Listing, Error> {
        let message = proto::ListRequest {
            tenant: self.tenant(),
            prefix: prefix.to_vec().into(),
            page_size,
            page_token: page_token.to_owned(),
            data_type: only.map_or(0, |only| i32::from(only as u8)),
        };
        let reply = self
            .call_method(("list", EngineMethod::List), message, |mut attempt, message| async move {
                let request = attempt.request(message);
                Ok(attempt.stub.list(request).await?.into_inner())
            })
            .await?;
        let listed = |object: proto::ListedObject| {
            Ok(Listed {
                key: ObjectKey::new(&object.key)?,
                length: object.length,
                data_type: data_type(object.data_type),
                group: object.group,
                pins: object.pins,
                replicas: object.replicas,
            })
        };
        let objects = reply.objects.into_iter().map(listed).collect::<Result<_, Error>>()?;
        Ok(Listing { objects, next_page_token: reply.next_page_token })
    }

    /// What the catalog knows of the object; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Key`]; what the server refuses.
    pub async fn stat(&self, key: impl AsRef<[u8]>) -> Result<Option<ObjectStat>, Error> {
        let message = proto::StatRequest { tenant: self.tenant(), key: key_bytes(key)? };
        let answer = self
            .call_method(("stat", EngineMethod::Stat), message, |mut attempt, message| async move {
                let request = attempt.request(message);
                Ok(attempt.stub.stat(request).await?.into_inner())
            })
            .await;
        match answer {
            Ok(reply) => Ok(Some(reply.into())),
            Err(error) if error.is_missing_object() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What the server says of itself.
    ///
    /// # Errors
    /// What the server refuses, or that it can't be reached.
    pub async fn server_info(&self) -> Result<ServerInfo, Error> {
        self.call("server info", Repeatable::Always, |mut attempt| {
            let request = attempt.request(proto::ServerInfoRequest { tenant: self.tenant() });
            async move { Ok(attempt.stub.server_info(request).await?.into_inner().into()) }
        })
        .await
    }
}

fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

fn one_a_key<T>(operation: &'static str, keys: usize, answers: Vec<T>) -> Result<Vec<T>, Error> {
    if answers.len() == keys {
        Ok(answers)
    } else {
        Err(Error::Protocol { operation, why: "does not have one outcome per key" })
    }
}
