//! The store's calls.
#![expect(unsafe_code, reason = "memory by address is the program's word; each block is argued")]

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::RwLock;
use tidepool_client::{Client, Error, Existence, Matching, ObjectInfo, PutOptions, RemoveOutcome};

use crate::code::{self, INTERNAL_ERROR, INVALID_PARAMS, OBJECT_HAS_LEASE, OBJECT_NOT_FOUND, REPLICA_IS_NOT_READY};
use crate::error::StoreError;
use crate::memory::{Registry, target};
use crate::setup;
use crate::wait::{runtime, wait};

/// How long an object that was found to exist is not evicted: the other store's default; `DEFAULT_KV_LEASE_TTL` in
/// milliseconds says otherwise.
const LEASE: Duration = Duration::from_secs(10);
const LONGEST_LEASE: Duration = Duration::from_secs(60);
/// The other store's default.
const SOFT_PIN: Duration = Duration::from_secs(1800);
/// Most copies of an object.
const MOST_COPIES: usize = 15;

/// What a put does about a soft pin, by which an object is evicted after others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SoftPinAction {
    /// What is replaced has its pin on.
    #[default]
    Preserve,
    /// Set one.
    Enable,
    /// Take it away.
    Disable,
}

/// What a put asks for besides its bytes.
#[derive(Clone, Debug, Default)]
pub struct ReplicateConfig {
    /// How many copies, on as many nodes, at most 15. 0 and 1: as many as the node's setting says.
    pub replica_num: usize,
    /// Keep the object from eviction.
    pub with_hard_pin: bool,
    /// Nodes that are to have the copies beside the first, as far as these name any: as [`PutOptions::prefer`].
    pub preferred_segments: Vec<String>,
    /// What becomes of the soft pin, by which the object is evicted after others.
    pub soft_pin_action: SoftPinAction,
    /// For how long, half an hour if it isn't said; only together with [`SoftPinAction::Enable`].
    pub soft_pin_ttl_ms: Option<u64>,
}

impl ReplicateConfig {
    fn options(config: Option<&Self>) -> Result<PutOptions, StoreError> {
        let Some(config) = config else { return Ok(PutOptions::default()) };
        let soft_pin = match (config.soft_pin_action, config.soft_pin_ttl_ms) {
            (SoftPinAction::Enable, milliseconds) => Some(milliseconds.map_or(SOFT_PIN, Duration::from_millis)),
            (SoftPinAction::Disable, None) => Some(Duration::ZERO),
            (SoftPinAction::Preserve, None) => None,
            (_, Some(_)) => return Err(StoreError::OperationFailed(INVALID_PARAMS)),
        };
        let copies = if config.replica_num <= 1 { 0 } else { config.replica_num.min(MOST_COPIES) };
        let replicas = u32::try_from(copies).unwrap_or(0);
        let prefer = config.preferred_segments.clone();
        Ok(PutOptions { pin: config.with_hard_pin, soft_pin, replicas, prefer, ..PutOptions::default() })
    }
}

/// A client of a store. Calls before [`MooncakeStore::setup`] fail with -600.
#[derive(Default)]
pub struct MooncakeStore {
    connected: RwLock<Option<(Client, String)>>,
    memory: Arc<Registry>,
}

impl Drop for MooncakeStore {
    fn drop(&mut self) {
        if let (Some(client), Ok(runtime)) = (self.connected.get_mut().take(), runtime()) {
            let _inside = runtime.enter();
            drop(client);
        }
    }
}

fn checked(text: &str) -> Result<&str, StoreError> {
    CString::new(text)?;
    Ok(text)
}

fn failed(error: &Error) -> StoreError {
    StoreError::OperationFailed(code::of(error))
}

fn same_lengths(keys: usize, buffers: usize, sizes: usize) -> Result<(), StoreError> {
    if keys == buffers && keys == sizes {
        return Ok(());
    }
    Err(StoreError::InvalidArgument(format!("{keys} keys, {buffers} buffers, {sizes} sizes")))
}

fn owned(keys: &[&str]) -> Result<Vec<String>, StoreError> {
    keys.iter().map(|key| checked(key).map(str::to_owned)).collect()
}

fn lease() -> Duration {
    let asked = std::env::var("DEFAULT_KV_LEASE_TTL").ok().and_then(|value| value.trim().parse().ok());
    asked.map_or(LEASE, |millis: u64| Duration::from_millis(millis.max(1)).min(LONGEST_LEASE))
}

impl MooncakeStore {
    /// A store that is not connected yet.
    ///
    /// # Errors
    /// None: the other crate has some.
    pub fn new() -> Result<Self, StoreError> {
        Ok(Self::default())
    }

    /// Connects to the node at `master_server_addr` (`host:port`, `unix:/path`; empty: 127.0.0.1:50051), trying for 20 s
    /// (as many as `MC_STORE_CLIENT_SETUP_RETRIES` says, and at least 5). The secret is in the file that `TIDEPOOL_TOKEN_FILE` names. A second call changes
    /// nothing. `metadata_server`, sizes and `device_name` are not looked at.
    ///
    /// # Errors
    /// [`StoreError::OperationFailed`]: -600 for a protocol that is not to be had, -1012 for a master that is no node, -1 if
    /// nothing answers there.
    #[expect(clippy::too_many_arguments, reason = "the other crate's")]
    pub fn setup(
        &self,
        local_hostname: &str,
        metadata_server: &str,
        _global_segment_size: u64,
        _local_buffer_size: u64,
        protocol: &str,
        device_name: &str,
        master_server_addr: &str,
    ) -> Result<(), StoreError> {
        for text in [local_hostname, metadata_server, protocol, device_name, master_server_addr] {
            checked(text)?;
        }
        if self.connected.read().is_some() {
            return Ok(());
        }
        setup::check_protocol(protocol).map_err(StoreError::OperationFailed)?;
        let endpoint = setup::endpoint(master_server_addr).map_err(StoreError::OperationFailed)?;
        let client = self.wait(setup::connect(endpoint))?.map_err(StoreError::OperationFailed)?;
        self.connected.write().get_or_insert((client, local_hostname.to_owned()));
        Ok(())
    }

    /// Whether the node answers.
    ///
    /// # Errors
    /// [`StoreError::OperationFailed`]: 1 before setup, 2 if the node does not answer.
    pub fn health_check(&self) -> Result<(), StoreError> {
        let client = self.client().map_err(|_| StoreError::OperationFailed(1))?;
        let asked = self.wait(async move { client.server_info().await })?;
        asked.map(drop).map_err(|_| StoreError::OperationFailed(2))
    }

    /// Stores a value. A key that has one keeps it, and that is no failure.
    ///
    /// # Errors
    /// [`StoreError::OperationFailed`]: -600 for an empty value, -200 without room, ..
    pub fn put(&self, key: &str, value: &[u8], config: Option<&ReplicateConfig>) -> Result<(), StoreError> {
        self.put_value(key, value.is_empty().then_some(INVALID_PARAMS), config, || Bytes::copy_from_slice(value))
    }

    /// As [`MooncakeStore::put`], of memory by its address; registered memory is sent without a copy.
    ///
    /// # Safety
    /// `size` bytes can be read at `buffer`, and nobody writes them during the call.
    ///
    /// # Errors
    /// As [`MooncakeStore::put`].
    pub unsafe fn put_from(
        &self,
        key: &str,
        buffer: *mut c_void,
        size: usize,
        config: Option<&ReplicateConfig>,
    ) -> Result<(), StoreError> {
        // SAFETY: as the caller promised.
        let value = unsafe { self.memory.value(buffer, size) };
        let wrong = value.as_ref().err().copied();
        self.put_value(key, wrong, config, || value.unwrap_or_default())
    }

    fn put_value(
        &self,
        key: &str,
        wrong: Option<i32>,
        config: Option<&ReplicateConfig>,
        value: impl FnOnce() -> Bytes,
    ) -> Result<(), StoreError> {
        let (key, options, client) = (checked(key)?.to_owned(), ReplicateConfig::options(config)?, self.client()?);
        if let Some(code) = wrong {
            return Err(StoreError::OperationFailed(code));
        }
        let value = value();
        let put = self.wait(async move { client.put(key, value, &options).await })?;
        put.map(drop).map_err(|error| failed(&error))
    }

    /// As [`MooncakeStore::put_from`], for many: 0 or a code for each.
    ///
    /// # Safety
    /// As [`MooncakeStore::put_from`], for each.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] for lists of different lengths; what keeps all of them from being stored.
    pub unsafe fn batch_put_from(
        &self,
        keys: &[&str],
        buffers: &[*mut c_void],
        sizes: &[usize],
        config: Option<&ReplicateConfig>,
    ) -> Result<Vec<i32>, StoreError> {
        same_lengths(keys.len(), buffers.len(), sizes.len())?;
        let (names, options, client) = (owned(keys)?, ReplicateConfig::options(config)?, self.client()?);
        let mut codes = vec![0; keys.len()];
        let (mut places, mut items) = (Vec::new(), Vec::new());
        for (place, ((key, &buffer), &size)) in names.into_iter().zip(buffers).zip(sizes).enumerate() {
            // SAFETY: as the caller promised.
            match unsafe { self.memory.value(buffer, size) } {
                Ok(value) => {
                    places.push(place);
                    items.push((key, value));
                }
                Err(wrong) => codes[place] = wrong,
            }
        }
        if items.is_empty() {
            return Ok(codes);
        }
        let put = self.wait(async move { client.put_batch(&items, &options).await })?;
        for (place, outcome) in places.into_iter().zip(put.map_err(|error| failed(&error))?) {
            codes[place] = outcome.map_or_else(|error| code::of(&error), |_stored| 0);
        }
        Ok(codes)
    }

    /// Reads an object to memory by its address; its length.
    ///
    /// # Safety
    /// `size` bytes can be written at `buffer`, and nobody else uses them during the call.
    ///
    /// # Errors
    /// [`StoreError::OperationFailed`]: -704 if there is none, -600 if it does not fit, ..
    pub unsafe fn get_into(&self, key: &str, buffer: *mut c_void, size: usize) -> Result<i64, StoreError> {
        let (key, client) = (checked(key)?.to_owned(), self.client()?);
        // SAFETY: as the caller promised; the call that has it is over when this returns.
        let buffer = unsafe { target(buffer, size) }.map_err(StoreError::OperationFailed)?;
        match length(self.wait(async move { client.get_into(key, buffer).await })?) {
            length @ 0.. => Ok(length),
            code => Err(StoreError::OperationFailed(i32::try_from(code).unwrap_or(INTERNAL_ERROR))),
        }
    }

    /// As [`MooncakeStore::get_into`], for many: a length or a code for each.
    ///
    /// # Safety
    /// As [`MooncakeStore::get_into`], for each; they do not overlap.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] for lists of different lengths; -600 before setup.
    pub unsafe fn batch_get_into(
        &self,
        keys: &[&str],
        buffers: &[*mut c_void],
        sizes: &[usize],
    ) -> Result<Vec<i64>, StoreError> {
        same_lengths(keys.len(), buffers.len(), sizes.len())?;
        let (names, client) = (owned(keys)?, self.client()?);
        let mut codes = vec![0; keys.len()];
        let (mut places, mut items) = (Vec::new(), Vec::new());
        for (place, ((key, &buffer), &size)) in names.into_iter().zip(buffers).zip(sizes).enumerate() {
            // SAFETY: as the caller promised; no read is under way any more when this returns.
            match unsafe { target(buffer, size) } {
                Ok(buffer) => {
                    places.push(place);
                    items.push((key, buffer));
                }
                Err(wrong) => codes[place] = wrong.into(),
            }
        }
        let read = self.wait(async move { client.get_batch_into(items, false).await })?;
        for (place, read) in places.into_iter().zip(read) {
            codes[place] = length(read);
        }
        Ok(codes)
    }

    /// The object's bytes.
    ///
    /// # Errors
    /// [`StoreError::OperationFailed`]: -704 if there is none, ..
    pub fn get(&self, key: &str) -> Result<Vec<u8>, StoreError> {
        let (key, client) = (checked(key)?.to_owned(), self.client()?);
        match self.wait(async move { client.get(key).await })? {
            Ok(Some(object)) => Ok(object.value.into()),
            Ok(None) => Err(StoreError::OperationFailed(OBJECT_NOT_FOUND)),
            Err(error) => Err(failed(&error)),
        }
    }

    /// Whether there is such an object. One that is there is not evicted for ten seconds.
    ///
    /// # Errors
    /// [`StoreError::OperationFailed`]: -703 while the node does not know yet, ..
    pub fn is_exist(&self, key: &str) -> Result<bool, StoreError> {
        match self.existence(&[key])?.first() {
            Some(Existence::Present) => Ok(true),
            Some(Existence::Missing) => Ok(false),
            _ => Err(StoreError::OperationFailed(REPLICA_IS_NOT_READY)),
        }
    }

    /// As [`MooncakeStore::is_exist`], for many; what the node does not know yet counts as not there.
    ///
    /// # Errors
    /// As [`MooncakeStore::is_exist`], of all of them.
    pub fn batch_is_exist(&self, keys: &[&str]) -> Result<Vec<bool>, StoreError> {
        let found = self.existence(keys)?;
        Ok(found.into_iter().map(|existence| existence == Existence::Present).collect())
    }

    fn existence(&self, keys: &[&str]) -> Result<Vec<Existence>, StoreError> {
        let (keys, client, lease) = (owned(keys)?, self.client()?, lease());
        self.wait(async move { client.exists_many(&keys, Some(lease), false).await })?.map_err(|error| failed(&error))
    }

    /// The object's length in bytes.
    ///
    /// # Errors
    /// [`StoreError::OperationFailed`]: -704 if there is none, ..
    pub fn get_size(&self, key: &str) -> Result<i64, StoreError> {
        let (key, client) = (checked(key)?.to_owned(), self.client()?);
        match self.wait(async move { client.stat(key).await })? {
            Ok(Some(stat)) => Ok(stat.length.cast_signed()),
            Ok(None) => Err(StoreError::OperationFailed(OBJECT_NOT_FOUND)),
            Err(error) => Err(failed(&error)),
        }
    }

    /// The name that was given to [`MooncakeStore::setup`].
    ///
    /// # Errors
    /// -600 before setup.
    pub fn get_hostname(&self) -> Result<String, StoreError> {
        let connected = self.connected.read();
        let name = connected.as_ref().map(|(_, hostname)| hostname.clone());
        name.ok_or(StoreError::OperationFailed(INVALID_PARAMS))
    }

    /// Removes an object, pinned or not; one that has a lease only if `force` says so.
    ///
    /// # Errors
    /// [`StoreError::OperationFailed`]: -704 if there is none, -706 if it has a lease, ..
    pub fn remove(&self, key: &str, force: bool) -> Result<(), StoreError> {
        let (key, client) = (checked(key)?.to_owned(), self.client()?);
        let removed = self.wait(async move {
            if !force {
                match client.stat(&key).await? {
                    None => return Ok(OBJECT_NOT_FOUND),
                    Some(stat) if !stat.lease.is_zero() => return Ok(OBJECT_HAS_LEASE),
                    Some(_) => {}
                }
            }
            // A pin keeps from eviction only, as far as the other store goes.
            Ok::<_, Error>(match client.remove(&key, true).await? {
                RemoveOutcome::Removed => 0,
                RemoveOutcome::Missing => OBJECT_NOT_FOUND,
                RemoveOutcome::Pinned | RemoveOutcome::Failed => INTERNAL_ERROR,
            })
        })?;
        match removed.map_err(|error| failed(&error))? {
            0 => Ok(()),
            code => Err(StoreError::OperationFailed(code)),
        }
    }

    /// Removes the objects in whose keys the regular expression matches; how many. Leases keep none of them, `force` or not.
    ///
    /// # Errors
    /// [`StoreError::OperationFailed`]: -600 for what is no expression, ..
    pub fn remove_by_regex(&self, pattern: &str, _force: bool) -> Result<i64, StoreError> {
        self.remove_matching(Matching::Pattern(checked(pattern)?.to_owned()))
    }

    /// Removes all objects; how many. Leases keep none of them, `force` or not.
    ///
    /// # Errors
    /// [`StoreError::OperationFailed`].
    pub fn remove_all(&self, _force: bool) -> Result<i64, StoreError> {
        self.remove_matching(Matching::All)
    }

    fn remove_matching(&self, matching: Matching) -> Result<i64, StoreError> {
        let client = self.client()?;
        let removed = self.wait(async move { client.remove_matching(&matching, true, |_| {}).await })?;
        removed.map(|done| done.removed.cast_signed()).map_err(|error| failed(&error))
    }

    /// Registers memory: puts from it send it from where it lies.
    ///
    /// # Safety
    /// `size` bytes can be read at `buffer` until [`MooncakeStore::unregister_buffer`] has returned for them.
    ///
    /// # Errors
    /// -600 for what overlaps registered memory, is empty or null.
    pub unsafe fn register_buffer(&self, buffer: *mut c_void, size: usize) -> Result<(), StoreError> {
        self.client()?;
        self.memory.register(buffer as usize, size).map_err(StoreError::OperationFailed)
    }

    /// Unregisters memory; waits up to 5 s for puts that still use it.
    ///
    /// # Safety
    /// None is needed: the other crate's is unsafe.
    ///
    /// # Errors
    /// -600 if nothing is registered there, or it is still in use: then it stays registered.
    pub unsafe fn unregister_buffer(&self, buffer: *mut c_void) -> Result<(), StoreError> {
        self.memory.unregister(buffer as usize).map_err(StoreError::OperationFailed)
    }

    fn client(&self) -> Result<Client, StoreError> {
        let client = self.connected.read().as_ref().map(|(client, _)| client.clone());
        client.ok_or(StoreError::OperationFailed(INVALID_PARAMS))
    }

    fn wait<T: Send + 'static>(&self, call: impl Future<Output = T> + Send + 'static) -> Result<T, StoreError> {
        wait(call).map_err(StoreError::OperationFailed)
    }
}

/// The object's length, or a code.
fn length(read: Result<Option<ObjectInfo>, Error>) -> i64 {
    match read {
        Ok(Some(info)) => info.length.cast_signed(),
        Ok(None) => OBJECT_NOT_FOUND.into(),
        Err(error) => code::of(&error).into(),
    }
}
