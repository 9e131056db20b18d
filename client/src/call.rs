//! The client, and what all calls share: turns over connections, token, deadline, repetition, the highest log index.

use std::collections::HashMap;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use prost::Message;
use tidepool_metadata::{ObjectKey, proto};
use tidepool_transfer::Engine;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Request, Status};
use tower::ServiceExt;

use crate::builder::{ClientBuilder, ClientSettings, SILENCE_OF_MANY};
use crate::channels::Channels;
use crate::endpoint::ServerAddress;
use crate::error::Error;
use crate::local::LocalReads;
use crate::native::{Link, Method, Native, Others, SharedReads, blocking};
use crate::places::Places;
use crate::raw::store_client::StoreClient;
use crate::recent::{RecentWrites, Writing};
use crate::retry::{Backoff, Repeatable};
use crate::session::Sessions;

/// Most nodes of which a client of their own is kept.
const MOST_NODES: usize = 256;

/// A client of one cluster. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

/// What a client is made of, beside its settings.
pub(crate) struct Parts {
    /// Connections, and which of `natives` is the same node.
    pub(crate) channels: Channels,
    /// One a node.
    pub(crate) natives: Vec<Native>,
    pub(crate) authorization: Option<AsciiMetadataValue>,
    /// SHA-256 of the token.
    pub(crate) secret: Option<[u8; 32]>,
    pub(crate) tenant: String,
    /// Of a node on this host, if that is known.
    pub(crate) local: Option<LocalReads>,
}

struct Inner {
    channels: Channels,
    natives: Vec<Native>,
    authorization: Option<AsciiMetadataValue>,
    secret: Option<[u8; 32]>,
    engine: Mutex<Option<Engine>>,
    native_calls: AtomicU64,
    lent_puts: Arc<AtomicU64>,
    shared_reads: Arc<SharedReads>,
    others: Others,
    places: Places,
    tenant: String,
    settings: ClientSettings,
    /// The highest log index in any answer; reads ask for at least this much.
    seen_index: AtomicU64,
    seeds: RandomState,
    sessions: Sessions,
    /// Of a node on this host, once it is known to be there.
    local: OnceLock<Arc<LocalReads>>,
    writes: RecentWrites,
    /// Clients of single nodes of the cluster, by address.
    nodes: Mutex<HashMap<String, Client>>,
}

/// One attempt at a call.
pub(crate) struct Attempt {
    pub(crate) stub: StoreClient<Channel>,
    channel: Channel,
    /// Which node.
    place: usize,
    authorization: Option<AsciiMetadataValue>,
    deadline: Instant,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("tenant", &self.inner.tenant).field("settings", &self.inner.settings).finish()
    }
}

impl Attempt {
    /// `message` with the token and what is left of the time.
    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        request.set_timeout(self.deadline.saturating_duration_since(Instant::now()));
        request
    }

    /// Calls the method at `path` past the stub, whose codec copies what it sends and receives.
    pub(crate) async fn send(self, path: &'static str, request: Request<Body>) -> Result<http::Response<Body>, Status> {
        let (metadata, _, body) = request.into_parts();
        let mut request = http::Request::new(body);
        *request.method_mut() = http::Method::POST;
        *request.version_mut() = http::Version::HTTP_2;
        *request.uri_mut() = http::Uri::from_static(path);
        *request.headers_mut() = metadata.into_headers();
        let headers = request.headers_mut();
        headers.insert(http::header::TE, http::HeaderValue::from_static("trailers"));
        headers.insert(http::header::CONTENT_TYPE, tonic::metadata::GRPC_CONTENT_TYPE);
        self.channel.oneshot(request).await.map_err(|error| Status::from_error(error.into()))
    }
}

impl Client {
    /// Starts a builder.
    #[must_use]
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    pub(crate) fn new(parts: Parts, settings: ClientSettings) -> Self {
        let Parts { channels, natives, authorization, secret, tenant, local } = parts;
        let inner = Inner {
            channels,
            natives,
            authorization,
            secret,
            engine: Mutex::default(),
            native_calls: AtomicU64::new(0),
            lent_puts: Arc::default(),
            shared_reads: Arc::default(),
            others: Others::default(),
            places: Places::default(),
            tenant,
            settings,
            seen_index: AtomicU64::new(0),
            seeds: RandomState::new(),
            sessions: Sessions::default(),
            local: local.map(Arc::new).map_or_else(OnceLock::new, OnceLock::from),
            writes: RecentWrites::default(),
            nodes: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// A client of the node at `address` alone, with this one's settings, tenant and engine. Remembered.
    ///
    /// # Errors
    /// [`Error::Endpoint`].
    pub(crate) fn of_node(&self, address: &str) -> Result<Self, Error> {
        let mut nodes = self.inner.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = nodes.get(address) {
            return Ok(client.clone());
        }
        let settings = ClientSettings { local_reads: false, ..self.settings().clone() };
        let parsed: ServerAddress = address.parse()?;
        let channels = Channels::new(vec![(0, parsed.channel(&settings, SILENCE_OF_MANY)?)], 1);
        let natives = vec![Native::referred(parsed)];
        let Inner { authorization, secret, tenant, .. } = &*self.inner;
        let (authorization, secret, tenant) = (authorization.clone(), *secret, tenant.clone());
        let client = Self::new(Parts { channels, natives, authorization, secret, tenant, local: None }, settings);
        if client.settings().native {
            *client.inner.engine.lock().unwrap_or_else(PoisonError::into_inner) = self.engine();
        }
        if nodes.len() >= MOST_NODES {
            nodes.clear();
        }
        nodes.insert(address.to_owned(), client.clone());
        Ok(client)
    }

    /// The settings in use.
    #[must_use]
    pub fn settings(&self) -> &ClientSettings {
        &self.inner.settings
    }

    /// The highest log index that any answer carried.
    #[must_use]
    pub fn seen_index(&self) -> u64 {
        self.inner.seen_index.load(Ordering::Relaxed)
    }

    /// How many objects were read from the segment of the node on this host, without a call.
    #[must_use]
    pub fn local_hits(&self) -> u64 {
        self.local().map_or(0, |local| local.hits())
    }

    pub(crate) fn saw(&self, log_index: u64) {
        self.inner.seen_index.fetch_max(log_index, Ordering::Relaxed);
    }

    pub(crate) fn sessions(&self) -> &Sessions {
        &self.inner.sessions
    }

    pub(crate) fn local(&self) -> Option<&Arc<LocalReads>> {
        self.inner.local.get()
    }

    /// Reads by that segment from now on, if this client may and has no other.
    pub(crate) fn read_locally(&self, local: impl FnOnce() -> LocalReads) {
        if self.inner.settings.local_reads && self.inner.natives.len() == 1 {
            self.inner.local.get_or_init(|| Arc::new(local()));
        }
    }

    pub(crate) fn writes(&self) -> &RecentWrites {
        &self.inner.writes
    }

    pub(crate) fn started_engine(&self) -> &Mutex<Option<Engine>> {
        &self.inner.engine
    }

    pub(crate) fn secret_digest(&self) -> Option<[u8; 32]> {
        self.inner.secret
    }

    /// Whether there are reads by what was known a moment ago.
    fn reads_what_was(&self) -> bool {
        self.inner.settings.local_reads || self.inner.settings.native
    }

    /// Notes that `keys` are being written, until what this gives hears of the answer or is dropped: reads by an index or by
    /// known places are no older.
    pub(crate) fn writing<'a>(&self, keys: impl IntoIterator<Item = &'a [u8]>) -> Option<Writing<'_>> {
        self.reads_what_was().then(|| self.inner.writes.begin(keys))
    }

    /// As [`Client::writing`], of keys that this client does not know.
    pub(crate) fn writing_unknown_keys(&self) -> Option<Writing<'_>> {
        self.reads_what_was().then(|| self.inner.writes.begin_all())
    }

    /// Takes note of a write's answer.
    pub(crate) fn wrote(&self, writing: Option<Writing<'_>>, log_index: u64, did_nothing: bool) {
        self.saw(log_index);
        if let Some(writing) = writing {
            writing.answered(if did_nothing { 0 } else { log_index });
        }
    }

    pub(crate) fn tenant(&self) -> String {
        self.inner.tenant.clone()
    }

    /// Runs `attempt` until it succeeds, its error is the answer, or the deadline passes.
    pub(crate) async fn call<T, F, Answer>(
        &self,
        operation: &'static str,
        repeatable: Repeatable,
        attempt: F,
    ) -> Result<T, Error>
    where
        F: FnMut(Attempt) -> Answer,
        Answer: Future<Output = Result<T, Error>>,
    {
        self.run(self.begin(operation, repeatable), attempt).await
    }

    /// As [`Client::call`], in a time that has begun.
    pub(crate) async fn run<T, F, Answer>(&self, mut repetition: Repetition, mut attempt: F) -> Result<T, Error>
    where
        F: FnMut(Attempt) -> Answer,
        Answer: Future<Output = Result<T, Error>>,
    {
        loop {
            let next = self.attempt(repetition.deadline);
            let place = next.place;
            let answer = repetition.within_deadline(attempt(next)).await;
            self.note(place, answer.as_ref().err());
            match answer {
                Ok(answer) => return Ok(answer),
                Err(error) => repetition.pause_after(error).await?,
            }
        }
    }

    /// Remembers how a node answered, for the next calls.
    fn note(&self, place: usize, error: Option<&Error>) {
        match error {
            Some(Error::Refused(refusal)) if refusal.is_transport || is_cut_off(&refusal.reason) => {
                self.inner.channels.failed(place);
            }
            Some(Error::Deadline { .. }) => {}
            _ => self.inner.channels.answered(place),
        }
    }

    /// A call that is a message and an answer, and may be repeated: by the node's engine where there is one.
    pub(crate) async fn call_method<M, R, Answer>(
        &self,
        method: Method,
        message: M,
        grpc: impl FnMut(Attempt, M) -> Answer,
    ) -> Result<R, Error>
    where
        M: Message + Clone + 'static,
        R: Message + Default + 'static,
        Answer: Future<Output = Result<R, Error>>,
    {
        let message = Arc::new(message);
        self.run_method(self.begin(method.0, Repeatable::Always), method, move || Arc::clone(&message), grpc).await
    }

    /// As [`Client::call_method`], in a time that has begun, with a message for each attempt.
    pub(crate) async fn run_method<M, R, Answer>(
        &self,
        repetition: Repetition,
        method: Method,
        message: impl Fn() -> Arc<M> + Clone + Send + 'static,
        mut grpc: impl FnMut(Attempt, M) -> Answer,
    ) -> Result<R, Error>
    where
        M: Message + Clone,
        R: Message + Default + 'static,
        Answer: Future<Output = Result<R, Error>>,
    {
        let native = {
            let message = message.clone();
            move |link: &Link, deadline| link.call(method, &*message(), deadline)
        };
        self.run_linked(repetition, native, |attempt| grpc(attempt, Arc::unwrap_or_clone(message()))).await
    }

    /// As [`Client::run`], by the node's engine where there is one.
    pub(crate) async fn run_linked<T, N, F, Answer>(
        &self,
        mut repetition: Repetition,
        native: N,
        mut grpc: F,
    ) -> Result<T, Error>
    where
        T: Send + 'static,
        N: Fn(&Link, std::time::Instant) -> Result<T, Error> + Clone + Send + 'static,
        F: FnMut(Attempt) -> Answer,
        Answer: Future<Output = Result<T, Error>>,
    {
        loop {
            let attempt = self.attempt(repetition.deadline);
            let place = attempt.place;
            let answer = match self.link_of(&attempt).await {
                Some(link) => {
                    let (native, deadline, used) = (native.clone(), repetition.deadline.into_std(), Arc::clone(&link));
                    let answer = blocking(move || native(&used, deadline)).await;
                    match self.note_answer(&attempt, &link, answer) {
                        // A node that is older than this client.
                        Err(error) if error.reason() == "UNIMPLEMENTED" => {
                            repetition.within_deadline(grpc(attempt)).await
                        }
                        answer => answer,
                    }
                }
                None => repetition.within_deadline(grpc(attempt)).await,
            };
            self.note(place, answer.as_ref().err());
            match answer {
                Ok(answer) => return Ok(answer),
                Err(error) => repetition.pause_after(error).await?,
            }
        }
    }

    /// How many calls went by the engine of a node, rather than by gRPC.
    #[must_use]
    pub fn native_calls(&self) -> u64 {
        self.inner.native_calls.load(Ordering::Relaxed)
    }

    /// How many puts, or messages of a batch put, a node copied or read from memory that it was lent for good
    /// ([`LendableMemory`](crate::LendableMemory)): nothing was copied here.
    #[must_use]
    pub fn lent_puts(&self) -> u64 {
        self.inner.lent_puts.load(Ordering::Relaxed)
    }

    /// How many objects were read by a device from nodes' memory: see [`ClientSettings::one_sided_reads`].
    #[must_use]
    pub fn one_sided_reads(&self) -> u64 {
        self.inner.shared_reads.reads()
    }

    /// How many puts' values nodes have read from this client's memory themselves: see [`ClientSettings::one_sided_puts`].
    #[must_use]
    pub fn one_sided_puts(&self) -> u64 {
        self.inner.shared_reads.puts()
    }

    pub(crate) fn shared_reads(&self) -> &Arc<SharedReads> {
        &self.inner.shared_reads
    }

    pub(crate) fn lent_puts_counter(&self) -> &Arc<AtomicU64> {
        &self.inner.lent_puts
    }

    pub(crate) fn count_native_call(&self) {
        self.inner.native_calls.fetch_add(1, Ordering::Relaxed);
    }

    /// The nodes that this client was referred to.
    pub(crate) fn others(&self) -> &Others {
        &self.inner.others
    }

    /// Where objects were that other nodes hold.
    pub(crate) fn places(&self) -> &Places {
        &self.inner.places
    }

    /// The engine of the node whose turn it is.
    pub(crate) async fn link_of(&self, attempt: &Attempt) -> Option<Arc<Link>> {
        let settings = self.settings();
        let looks_for_segment = settings.local_reads && self.local().is_none();
        if !(settings.native || looks_for_segment) {
            return None;
        }
        self.link(self.inner.natives.get(attempt.place)?, &attempt.channel).await
    }

    /// Lets go of an engine that does not answer.
    pub(crate) fn note_answer<T>(
        &self,
        attempt: &Attempt,
        link: &Arc<Link>,
        answer: Result<T, Error>,
    ) -> Result<T, Error> {
        self.count_native_call();
        if let Err(error) = &answer
            && Link::is_lost(error)
            && let Some(native) = self.inner.natives.get(attempt.place)
        {
            tracing::debug!(%error, "the node's engine does not answer: calls go by gRPC");
            native.close(link);
        }
        answer
    }

    pub(crate) async fn ask_server_info(
        &self,
        channel: Channel,
        timeout: Duration,
    ) -> Result<proto::ServerInfoReply, Error> {
        let attempt = self.attempt_by(channel, 0, Instant::now() + timeout);
        let request = attempt.request(proto::ServerInfoRequest { tenant: self.tenant() });
        let mut stub = attempt.stub;
        Ok(stub.server_info(request).await?.into_inner())
    }

    pub(crate) fn begin(&self, operation: &'static str, repeatable: Repeatable) -> Repetition {
        self.begin_part(operation, repeatable, Instant::now() + self.settings().deadline)
    }

    /// As [`Client::begin`], of a part of a call that has its deadline already.
    pub(crate) fn begin_part(&self, operation: &'static str, repeatable: Repeatable, deadline: Instant) -> Repetition {
        let Inner { settings, seeds, channels, .. } = &*self.inner;
        // Each node but one may be the wrong one to ask, some more than once while it goes.
        let others = u32::try_from(channels.nodes() - 1).unwrap_or(u32::MAX);
        let retries = if settings.retries == 0 { 0 } else { settings.retries.saturating_add(others.saturating_mul(4)) };
        Repetition {
            operation,
            repeatable,
            allowed: settings.deadline,
            deadline,
            backoff: Backoff::new(retries, seeds.hash_one(Instant::now())),
        }
    }

    /// Each attempt takes the next connection, so that a repetition goes to another server where there is one.
    pub(crate) fn attempt(&self, deadline: Instant) -> Attempt {
        let inner = &*self.inner;
        let (place, channel) = inner.channels.take();
        self.attempt_by(channel, place, deadline)
    }

    fn attempt_by(&self, channel: Channel, place: usize, deadline: Instant) -> Attempt {
        let inner = &*self.inner;
        let stub = StoreClient::new(channel.clone())
            .max_decoding_message_size(inner.settings.message_bytes)
            .max_encoding_message_size(inner.settings.message_bytes);
        Attempt { stub, channel, place, authorization: inner.authorization.clone(), deadline }
    }
}

/// What is left of one call: its time and its repetitions.
#[derive(Clone)]
pub(crate) struct Repetition {
    operation: &'static str,
    repeatable: Repeatable,
    allowed: Duration,
    pub(crate) deadline: Instant,
    backoff: Backoff,
}

impl Repetition {
    pub(crate) async fn within_deadline<T>(&self, answer: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let expired = |_| Err(Error::Deadline { operation: self.operation, deadline: self.allowed });
        tokio::time::timeout_at(self.deadline, answer).await.unwrap_or_else(expired)
    }

    /// Waits until the next attempt.
    ///
    /// # Errors
    /// `error`, if it is the answer.
    pub(crate) async fn pause_after(&mut self, error: Error) -> Result<(), Error> {
        let Some(pause) = self.backoff.after(&error, self.repeatable) else { return Err(error) };
        if Instant::now() + pause >= self.deadline {
            return Err(error);
        }
        tracing::debug!(operation = self.operation, %error, ?pause, "call is repeated");
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// Whether a node with that reason can't reach the others, or takes nothing new: one of them may be better to ask.
pub(crate) fn is_cut_off(reason: &str) -> bool {
    matches!(reason, "NO_LEADER" | "LAGGING" | "DRAINING")
}

/// Copies `key` into a message's bytes once it is known to be one.
pub(crate) fn key_bytes(key: impl AsRef<[u8]>) -> Result<bytes::Bytes, Error> {
    let key = key.as_ref();
    ObjectKey::check(key)?;
    Ok(bytes::Bytes::copy_from_slice(key))
}

/// As [`key_bytes`], for many: one buffer for all of them.
pub(crate) fn all_key_bytes<K: AsRef<[u8]>>(keys: &[K]) -> Result<Vec<bytes::Bytes>, Error> {
    let mut all = Vec::with_capacity(keys.iter().map(|key| key.as_ref().len()).sum());
    for key in keys {
        ObjectKey::check(key.as_ref())?;
        all.extend_from_slice(key.as_ref());
    }
    let mut rest = bytes::Bytes::from(all);
    Ok(keys.iter().map(|key| rest.split_to(key.as_ref().len())).collect())
}

/// The key as people read it.
pub(crate) fn shown(key: &[u8]) -> String {
    ObjectKey::new(key).map(|key| key.to_string()).unwrap_or_default()
}
